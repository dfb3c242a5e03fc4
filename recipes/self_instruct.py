"""Instruction data in Alpaca's form, written by a model after a file of seed tasks.

    python recipes/self_instruct.py seeds.jsonl out.json MODEL [COUNT] [NAME]

MODEL is a model folder, or the address of a server that speaks OpenAI's completions, such as
http://localhost:8080/v1; NAME is the model's name there, and OPENAI_API_KEY its key. What was asked
and dropped, and why, stands in out.json.rounds.jsonl, from which a run that was stopped goes on.
"""

import json
import os
import zlib
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

from dunes import checkpoint
from dunes.checkpoint.atomic import write_file
from dunes.cli.recipe import run_recipe
from dunes.data import self_instruct
from dunes.data.self_instruct import STOP, TOKENS, AskModel, Round
from dunes.generate import sampler
from dunes.plural import plural
from dunes.runs.json_lines import append_record, print_warning, read_lines, warn_of_damage, write_lines
from dunes.runs.write import write


def folder(path: str, limit: int = TOKENS) -> AskModel:
    """A model of ours. Raises ValueError where a prompt leaves no room for an answer."""
    loaded = checkpoint.load(path)

    def one(prompt: str) -> tuple[str, bool]:
        length = len(loaded.tokenizer.prompt(prompt))
        room = min(limit, loaded.context_length - length)
        if room < 1:
            needed = 1 << (2 * length - 1).bit_length()
            raise ValueError(
                f"{path}: its context length is {loaded.context_length}, and a prompt has {length} tokens; use a "
                f"model with {needed} or more, half of them for the answer (dunes train --context-length {needed})"
            )
        sample = sampler(1.0, seed=zlib.crc32(prompt.encode()))
        return stopped(write(loaded.model, loaded.tokenizer, loaded.context_length, prompt, room, sample), room)

    return lambda prompts: [one(prompt) for prompt in prompts]


def stopped(pieces: Iterable[str], limit: int) -> tuple[str, bool]:
    """The text before the first stop string, and whether there were `limit` pieces without one."""
    text, count = "", 0
    for piece in pieces:
        text, count = text + piece, count + 1
        if found := next((stop for stop in STOP if stop in text), None):
            return text[: text.index(found)], False
    return text, count >= limit


def server(url: str, name: str, limit: int = TOKENS) -> AskModel:
    """A model behind OpenAI's protocol. Raises ValueError that names the address."""

    def one(prompt: str) -> tuple[str, bool]:
        asked = {"model": name, "prompt": prompt, "max_tokens": limit, "temperature": 1.0, "stop": STOP}
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get("OPENAI_API_KEY"):
            headers["Authorization"] = f"Bearer {key}"
        request = Request(f"{url.rstrip('/')}/completions", json.dumps(asked).encode(), headers)
        try:
            with urlopen(request, timeout=600) as reply:
                choice = json.load(reply)["choices"][0]
            return choice["text"], choice["finish_reason"] == "length"
        except (URLError, TimeoutError, ValueError, LookupError, TypeError) as error:
            raise ValueError(f"{request.full_url}: no completion: {error!r}; what is written stays") from None

    return lambda prompts: [one(prompt) for prompt in prompts]


def before(path: Path) -> list[Round]:
    """The rounds of the run before; damaged lines are told, and those that are no JSON objects are cut out."""
    lines = read_lines(path)
    found = [_round(line.record) for line in lines]
    damaged = [line for line, known in zip(lines, found, strict=True) if known is None]
    warn_of_damage(path, damaged, "a round", print_warning)
    if any(line.record is None for line in lines):
        write_lines(path, [line for line in lines if line.record is not None])
    return [known for known in found if known is not None]


def _round(row: Any) -> Round | None:
    try:
        found = Round.of(row)
    except (LookupError, TypeError):
        return None
    texts = [text for task in found.kept for text in (task.instruction, task.input, task.output)]
    return found if isinstance(found.number, int) and all(isinstance(text, str) for text in texts) else None


def main(seeds: str, out: str, ask: AskModel, wanted: int = 1000) -> int:
    rounds = Path(f"{out}.rounds.jsonl")
    past = before(rounds)
    kept = [task for found in past for task in found.kept]
    try:
        for found in self_instruct.generate(ask, self_instruct.read_seed_tasks(seeds), wanted=wanted, before=past):
            append_record(rounds, found.row())
            kept += found.kept
            why = Counter(item.reason.partition(":")[0] for item in found.items if item.reason)
            said = ", ".join(f"{reason} {n}" for reason, n in why.most_common())
            total = f"{len(kept)} of {plural(wanted, 'task')}"
            print(f"round {found.number}: {total}, {len(found.kept)} new; dropped: {said}")
    finally:
        if rounds.exists():  # else nothing was asked
            rows = [{"instruction": t.instruction, "input": t.input, "output": t.output} for t in kept]
            write_file(Path(out), json.dumps(rows, indent=1).encode())
    return len(kept)


def command(seeds: str, out: str, model: str, count: str = "1000", name: str = "model") -> None:
    ask = server(model, name) if model.startswith("http") else folder(model)
    print(f"{out}: {plural(main(seeds, out, ask, int(count)), 'task')}")


if __name__ == "__main__":
    run_recipe(__doc__, command)
