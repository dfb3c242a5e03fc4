"""Every recipe runs, at toy size, and stays short enough to read."""

import importlib.util
import json
import runpy
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from conftest import data, refuses
from dunes import checkpoint
from dunes.data import collect_corpus
from dunes.progress import Display
from dunes.runs.train import train
from dunes.runs.train_config import TrainConfig
from dunes.text import Tokenizer
from dunes.text.lines import text_around_cursor
from small_models import random_model
from teacher.tasks import REQUEST, numbered_prompt, read_seed_tasks

ROOT = Path(__file__).parent.parent
RECIPES = sorted((ROOT / "recipes").glob("*.py"))


def recipe(name):
    spec = importlib.util.spec_from_file_location(name, next(p for p in RECIPES if p.stem == name))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def save_model(folder, tokenizer, context, **sizes):
    """A model as before its first step."""
    model = random_model(noise=0, vocab=tokenizer.vocab, context=context, **sizes)
    checkpoint.save(model, folder, tokenizer, context)


def instructed(folder):
    """A base and sixty rows for it: their paths."""
    (folder / "rows.json").write_text(ROWS)
    save_model(folder / "base", Tokenizer.train("bpe", [ROWS], 300), 256)
    return str(folder / "base"), str(folder / "rows.json")


def ended(path, words, monkeypatch):
    """The exit code of a recipe that is called as a command."""
    monkeypatch.setattr(sys, "argv", [f"recipes/{path.name}", *words])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(path), run_name="__main__")
    return ended.value.code


PLAY = "First Citizen:\nBefore we proceed any further, hear me speak.\n\nAll:\nSpeak, speak.\n\n" * 60
ROWS = json.dumps([{"instruction": f"Say {i}.", "input": "", "output": f"It is {i}."} for i in range(60)])


@pytest.mark.parametrize(
    "name",
    [
        *("shakespeare", "zig", "alpaca_lora", "llama_moe", "mixtral_tiny", "expand", "lora_experts", "prune"),
        "mnist_lstm",
    ],
)
def test_a_recipe_is_short(name):
    lines = next(p for p in RECIPES if p.stem == name).read_text().split('"""', 2)[2].splitlines()
    assert sum(bool(line.strip()) for line in lines) < 40


@pytest.mark.slow
def test_shakespeare(tmp_path, capsys):
    play = tmp_path / "play.txt"
    play.write_text(PLAY)
    assert recipe("shakespeare").main(str(play), 100, str(tmp_path / "run")) < 1.0
    assert "step 100" in capsys.readouterr().out


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_shakespeare_itself_learns_what_the_field_expects(tmp_path):
    loss = recipe("shakespeare").main(str(data("tinyshakespeare.txt")), 300, str(tmp_path / "run"))
    assert loss < 1.88


def test_zig(tmp_path, capsys):
    for i in range(30):
        code = f'const std = @import("std");\n\npub fn task{i}(value: u32) u32 {{\n    return value * {i};\n}}\n\n'
        (tmp_path / f"m{i}.zig").write_text(code * 60)
    assert recipe("zig").main(str(tmp_path), 0.1, str(tmp_path / "run")) == 0
    assert "const std = @im▏" in capsys.readouterr().out


def test_alpaca_lora(tmp_path, capsys):
    out, how = tmp_path / "run", {"dtype": "float32", "threads": 1}
    assert recipe("alpaca_lora").main(*instructed(tmp_path), 1.0, str(out), **how) == 0
    said = capsys.readouterr().out
    assert "validation loss of answers:" in said
    assert "List three things that a cat likes." in said
    assert checkpoint.load(f"{out}-merged").card["template"] == "alpaca"


def test_expand(code, tmp_path, capsys):
    (tmp_path / "old.txt").write_text("We are accounted poor citizens, the patricians good.\n" * 40)
    save_model(tmp_path / "base", Tokenizer.train("bytes", ()), 64)
    options = {"steps": 8, "batch": 4, "context_length": 32, "lr": 0.01, "dtype": "float32", "threads": 1}
    texts = str(code), str(tmp_path / "old.txt")
    assert recipe("expand").main(str(tmp_path / "base"), *texts, out=str(tmp_path / "run"), **options) == 0
    before, trained, after = capsys.readouterr().out.splitlines()[-3:]
    assert before.partition(": ")[2] == after.partition(": ")[2] != trained.partition(": ")[2]
    weights = "model.safetensors"
    assert (tmp_path / "run-restored" / weights).read_bytes() == (tmp_path / "base" / weights).read_bytes()


@pytest.mark.slow
def test_lora_experts(tmp_path, capsys):
    options = {"dtype": "float32", "threads": 1, "steps": 12, "lr": 0.02, "out": str(tmp_path / "run")}
    losses = recipe("lora_experts").main(*instructed(tmp_path), **options)
    assert losses.keys() == {"lora-experts", "lora"}
    assert max(losses.values()) < checkpoint.load(tmp_path / "run" / "lora").card["measured"]["before"]
    assert "trained parameters" in capsys.readouterr().out


@pytest.mark.slow
def test_llama_moe_recovers(tmp_path):
    (tmp_path / "play.txt").write_text(PLAY)
    options = {"dtype": "float32", "threads": 1, "batch": 4, "context_length": 32, "lr": 0.01}
    save_model(tmp_path / "new", Tokenizer.train("chars", [PLAY], 0), 32)
    play = str(tmp_path / "play.txt")
    config = TrainConfig(sources=(play,), base=str(tmp_path / "new"), steps=60, **options)
    assert train(config, tmp_path / "base", Display(quiet=True)) == 0
    losses = recipe("llama_moe").main(str(tmp_path / "base"), play, 40, str(tmp_path / "run"), **options)
    assert losses["before routers"] > losses["routers"] > losses["experts"]
    assert losses["before dense"] < losses["before routers"]
    assert checkpoint.load(tmp_path / "run" / "experts").architecture.family == "mixtral"
    routers, split = (checkpoint.load(tmp_path / "run" / name).model.state_dict() for name in ("routers", "split"))
    changed = {name for name in split if not torch.equal(routers[name], split[name])}
    assert changed == {f"blocks.{i}.mlp.router.weight" for i in (0, 1)}


@pytest.mark.slow
def test_prune_recovers_and_the_zeros_stay(tmp_path, capsys):
    (tmp_path / "play.txt").write_text(PLAY)
    play, options = str(tmp_path / "play.txt"), {"dtype": "float32", "threads": 1, "batch": 4, "lr": 0.01}
    config = TrainConfig(sources=(play,), steps=60, size="30k", context_length=32, **options)
    assert train(config, tmp_path / "base", Display(quiet=True)) == 0
    losses = recipe("prune").main(str(tmp_path / "base"), play, 20, "1:4", str(tmp_path / "run"), **options)
    assert losses["dense"] < losses["pruned"]
    assert losses["pruned, 20 steps on"] < losses["pruned"]
    trained = checkpoint.load(tmp_path / "run" / "pruned-trained").model.blocks[0].mlp.down.weight
    assert ((trained != 0).unflatten(1, (-1, 4)).sum(2) <= 1).all()
    assert "against the dense model" in capsys.readouterr().out


def test_mixtral_tiny(tmp_path, capsys):
    (tmp_path / "play.txt").write_text("All:\nSpeak, speak.\n\n" * 200)
    assert recipe("mixtral_tiny").main(str(tmp_path / "play.txt"), 12, str(tmp_path / "run")) < 2.5
    assert "MaxVio of the least even layer" in capsys.readouterr().out
    mixture = checkpoint.load(tmp_path / "run").model.blocks[0].mlp
    assert len(mixture.shared) == 1
    assert mixture.selection_bias.abs().max() > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("network", "optimizer", "loss"),
    [
        ("mlp", "momentum", "cross_entropy"),
        ("mlp", "rmsprop", "mean_squared"),
        ("conv_net", "adamw", "cross_entropy"),
    ],
)
def test_mnist_learns_drawn_digits(network, optimizer, loss, tmp_path):
    assert recipe("mnist").main("drawn", network, optimizer, loss, 8, str(tmp_path)) > 0.7
    assert (tmp_path / "mistakes.png").exists()


def test_an_lstm_reads_digits_by_rows():
    assert recipe("mnist_lstm").main(epochs=12) > 0.7


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("network", "least"), [("mlp", 0.95), pytest.param("conv_net", 0.975, marks=pytest.mark.long)]
)
def test_mnist_itself(network, least, tmp_path):
    runs = [recipe("mnist").main(str(data("mnist")), network, out=str(tmp_path), seed=seed) for seed in range(3)]
    assert sum(runs) / 3 >= least


def lines_of_the_docs():
    """The commands of the docs that run a recipe, as lists of words."""
    files = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    lines = [line.partition("#")[0].split() for file in sorted(files) for line in file.read_text().splitlines()]
    return [words[1:] for words in lines if words[:1] == ["python"] and words[1].startswith("recipes/")]


OF_THE_WALK = ("self_instruct", "preferences")
"""Recipes of docs/instruction-data.md, whose commands tests/test_walk.py runs."""


def with_marks(words):
    stem = Path(words[0]).stem
    return pytest.param(words, id=stem, marks=[pytest.mark.long] if stem == "lora_experts" else [])


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", [with_marks(words) for words in lines_of_the_docs() if Path(words[0]).stem not in OF_THE_WALK]
)
def test_the_docs_lines_run(words, tmp_path, monkeypatch):
    """As written, with a toy in place of each name, and 2 steps in place of 150 or 200."""
    monkeypatch.chdir(tmp_path)
    save_model(tmp_path / "MODEL", Tokenizer.train("bytes", ()), 32)
    (tmp_path / "SOURCE").write_text("All:\nSpeak, speak.\n\n" * 200)
    (tmp_path / "DATA").write_text(ROWS)
    path, *given = ["2" if word in ("150", "200") else word for word in words]
    assert ended(ROOT / path, given, monkeypatch) == 0


@pytest.mark.slow
def test_own_parts_learn_to_add(tmp_path):
    assert recipe("own_parts").main(out=tmp_path / "kept") > 0.9


@dataclass
class Unseen:
    """A completer of nothing, with files that it was trained on and others."""

    folder: Path
    training_files: list[tuple[str, str]]

    def test_documents(self):
        return collect_corpus([self.folder]).documents


def test_the_demo_cuts_lines_of_unseen_files_as_editors_count_them(tmp_path):
    demo = recipe("demo")
    text = "\x0c\n\x85 = \u2028\r\n" + "    value = function(argument, other)\n" * 90
    for name in "abc":
        (tmp_path / f"{name}.py").write_bytes(f"# {name}{text}".encode())
    places = demo.unseen_places(Unseen(tmp_path, [("c.py", f"# c{text}")]), 20, seed=0)
    assert {file.name for file, _ in places} == {"a.py", "b.py"}, "c.py was trained on"
    assert len({(file.name, cut.offset) for file, cut in places}) == 20
    for file, cut in places:
        number = file.text.count("\n", 0, cut.offset) + 1
        column = cut.offset - file.text.rfind("\n", 0, cut.offset)
        assert text_around_cursor(f"{tmp_path / file.name}:{number}:{column}")[1] == file.text[: cut.offset]
        assert file.text[cut.offset :].startswith(cut.rest)
        assert cut.rest.strip()


def seeds(folder):
    rows = [{"instruction": f"Say {w}.", "input": "", "output": w} for w in ("one", "two", "three")]
    path = folder / "seeds.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def test_self_instruct_asks_a_model_folder(tmp_path):
    made, out = recipe("self_instruct"), tmp_path / "out.json"
    save_model(tmp_path / "model", Tokenizer.train("bpe", [REQUEST], 300), 2048, dim=16, depth=1)
    options = made.Options(seeds=seeds(tmp_path), out=str(out), model=str(tmp_path / "model"), max_tokens=6)
    refuses(r"10 requests without a kept task; reasons in the last: \{'(truncated|layout)'", made.main, options)
    assert json.loads(out.read_text()) == []
    lines = [json.loads(line) for line in (tmp_path / "out.json.requests.jsonl").read_text().splitlines()]
    answers = [row for row in lines if "answer" in row]
    assert [row["number"] for row in answers] == list(range(10))
    prompt = numbered_prompt(read_seed_tasks(seeds(tmp_path)), 0, 0)
    length = len(Tokenizer.train("bpe", [REQUEST], 300).prompt(prompt))
    answer = made.LocalModel(str(tmp_path / "model"), 6).ask(prompt)
    assert (answer.text, answer.tokens) == (answers[0]["answer"], (length, 6))
    assert answers[0]["tokens"] == [length, 6]
    refuses("--in-flight is 0", made.main, replace(options, in_flight=0))


@pytest.mark.parametrize("path", [p for p in RECIPES if p.stem != "self_instruct"], ids=lambda path: path.stem)
def test_arguments_that_a_recipe_cannot_use_print_its_usage(path, monkeypatch, capsys):
    needed = {"alpaca_lora": 2, "expand": 3, "lora_experts": 2}
    needed = (needed | dict.fromkeys(("shakespeare", "zig", "mixtral_tiny"), 1)).get(path.stem, 0)
    for given in ([], ["a"] * (needed - 1), ["a"] * 9, ["a", "--help"]):
        if given or needed:
            code = ended(path, given, monkeypatch)
            said = capsys.readouterr()
            assert f"python recipes/{path.name}" in (said.out if "--help" in given else said.err)
            assert code == (0 if "--help" in given else 2)
            assert said.err.count("\n") == ("--help" not in given)


ASKED = "--seeds", "seeds.jsonl", "--out", "out.json"


@pytest.mark.parametrize(
    ("name", "given"),
    [("alpaca_lora", ["nowhere", "x.json"]), ("shakespeare", ["nowhere"]), ("shakespeare", ["nowhere", "many"]),
     ("zig", ["nowhere"]), ("expand", ["nowhere", "new", "old"]), ("lora_experts", ["nowhere", "data"]),
     ("self_instruct", [*ASKED, "--model", "model"]), ("demo", ["soon"]), ("mnist", ["drawn", "lenet"])],
)  # fmt: skip
def test_a_mistake_is_one_line_in_a_recipe_too(name, given, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert ended(RECIPES[0].with_stem(name), given, monkeypatch) == 2
    said = capsys.readouterr()
    assert said.err.startswith(f"recipes/{name}.py: ")
    assert said.err.count("\n") == 1
    assert not list(tmp_path.iterdir())
