"""The walk of docs/instruction-data.md: seeds, data, a look at it, finetuning, preferences, a chat."""

import io
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import teachers
from dunes import checkpoint
from dunes.data import read_records
from dunes.text import Tokenizer
from small_models import random_model
from test_recipes import RECIPES

PAGE = Path(__file__).parent.parent / "docs" / "instruction-data.md"
COMMANDS = re.search(r"^```\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)[1].splitlines()
STEPS = ["--steps", "3", "--batch", "4", "--dtype", "float32", "--threads", "1"]
SEEDS = [f"Say the number {i} in words." for i in range(5)]


@pytest.mark.slow
def test_every_command_of_the_walk_runs(tmp_path, monkeypatch, command, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OPENAI_API_KEY", teachers.KEY)
    monkeypatch.setattr("dunes.runs.finetune.ANSWER_TOKENS", 8)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"Say the number 2 in words.\n")))
    seeds = [json.dumps({"instruction": text, "input": "", "output": "words"}) for text in SEEDS]
    Path("seeds.jsonl").write_text("\n".join(seeds))
    tokenizer = Tokenizer.train("bpe", ["\n".join(seeds), " ".join(teachers.WORDS)], 300)
    model = random_model(noise=0, vocab=tokenizer.vocab, context=512)
    checkpoint.save(model, "runs/project", tokenizer, 512)
    printed = []

    def run(line):
        program, verb, *words = shlex.split(line, comments=True)
        if program == "dunes":
            more = STEPS if "--out" in words else ["--max-tokens", "8"] if verb == "chat" else []
            status, out, errors = command(verb, *words, *more)
        elif program == "python":
            path = next(path for path in RECIPES if str(path).endswith(verb))
            words = [{"URL": server.url, "1000": "24"}.get(word, word) for word in words]
            done = subprocess.run([sys.executable, path, *words], capture_output=True, text=True, check=False)
            status, out, errors = done.returncode, done.stdout, done.stderr
        assert status == 0, (line, errors)
        return out

    with teachers.serving() as server:
        for line in COMMANDS:
            if not line.startswith("pip"):
                printed.append(run(line))
    tasks = read_records("tasks.json")
    assert len(tasks.rows) >= 24
    answers = map(json.loads, Path("tasks.json.requests.jsonl").read_text().splitlines())
    counted = [row["tokens"] for row in answers if "answer" in row]
    assert server.total() == [sum(part) for part in zip(*counted, strict=True)]
    pairs = read_records("pairs.jsonl")
    assert [row.turns for row in pairs.rows] == [row.turns for row in tasks.rows][: len(pairs.rows)]
    assert "validation loss of preferences: 0.6931 before" in printed[-2]
    assert checkpoint.load("runs/preferred").card["measured"]["pairs"] >= 1
