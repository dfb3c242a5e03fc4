"""The benchmarks run and say what they promise; their figures are for docs/log, never for a test."""

import importlib
import json
import shlex
import shutil
import subprocess
import sys
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
import torch

from conftest import refuses, run_dunes
from dunes import checkpoint
from dunes.models import llama
from dunes.text import Tokenizer

FOLDER = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture(autouse=True)
def _importable(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)


def last_line(script: str, *arguments: object):
    command = [sys.executable, FOLDER / script, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_what_is_no_commit_is_refused():
    commits = importlib.import_module("commits")
    refuses("no-such-commit: no commit of", commits.measure_commits, ("no-such-commit", "HEAD"), "train", "20k", 1)


@pytest.mark.slow
def test_two_checkouts_are_compared(tmp_path, capsys):
    oracle, here = importlib.import_module("oracle"), FOLDER.parent
    shutil.copytree(here / "dunes", tmp_path / "changed" / "dunes")
    with (tmp_path / "changed" / "dunes" / "__init__.py").open("a") as file:
        file.write("__version__ = 'another'\n")
    compare = partial(oracle.main, here, out=tmp_path / "out")
    assert compare(here, scenarios=("templates",)) == 0
    assert compare(tmp_path / "changed", scenarios=("templates", "verbs-version", "unknown")) == 1
    found = json.loads((tmp_path / "out" / "differences.json").read_text())
    assert found["templates"] == []
    ((place, *values),) = found["verbs-version"]
    assert place == "verbs-version/verbs-version/out/0"
    assert ["another" in value for value in values] == [False, True]
    assert "FAILED no such scenario" in capsys.readouterr().out


def each(rows, *keys):
    return bool(rows) and all(row[key] > 0 for row in rows for key in keys)


LONG = {
    "commits.py HEAD HEAD --benchmark prefill --size 20k --rounds 2": lambda row: (
        row["differences"][0]["pairs"] == 2
    ),
    "gpu.py --toy --rounds 1": lambda row: each([row], "plain compiled: tokens/s", "Trainer: tokens/s"),
    "train.py --side 'plain float32' --sizes 1m --batch 1": lambda row: each([row], "seconds"),
    "train.py --side 'Trainer float32' --sizes 1m --batch 1": lambda row: each([row], "seconds"),
    "busy.py --tasks train --busy 0 1 --rounds 1 --seconds 0.1 --threads 1": lambda row: row["threads"] == 1,
    "load.py --rounds 1 --layers 1": lambda row: row["convert"]["grown"] < row["convert"]["largest"] + 1e9,
    "lora_memory.py --batch 1": lambda row: each(row["rows"], "peak"),
    "finetune.py --toy --here --tasks packed": lambda row: row["packed"]["peft"]["said"] == [],
    "start.py --size 20k --rounds 1": lambda row: each(
        [row], "import torch, cpu", "generate, cpu", "complete, cpu"
    ),
    "save.py --size 300k --rounds 1 --steps 2": lambda row: each([row], "blocked_seconds"),
    "experts.py --layer --seconds 0 --dtypes float32 --without-litgpt": lambda row: each(
        row["float32"].values(), "training", "forward"
    ),
}
SLOW = {
    "operations.py --models toy --threads 1 --seconds 0.001 --picture OUT/a.svg": lambda rows: each(
        rows, "plain", "fused"
    ),
    "train.py --side ours --sizes 1m --batch 1": lambda row: each([row], "seconds"),
    "busy.py --tasks decode --busy 0 1 --rounds 1 --seconds 0.1 --threads 1": lambda row: (
        row["decode busy=0 spins=-1: fair"] == 1.0
    ),
    "experts.py --quick": lambda row: all(
        each([r["inference"], r["training"]], "moe_ktok_s") for r in row["rows"]
    ),
    "look_up.py --tokens 40 --rounds 1": lambda row: (
        row["code with two names changed"]["tokens per forward"]["look-up 8"] > 3
    ),
    "lora_experts.py IN/rouge.py IN/theirs.py IN/large.py --base-steps 4 --steps 4 --seeds 0 1": lambda row: (
        {r["method"] for r in row["summary"]} == {"before", "LoRA", "linear", "shared", "mlp"}
    ),
    "expand.py IN/rouge.py IN/theirs.py --base-steps 8 --steps 4 --seeds 0 1": lambda row: all(
        r["restored"] == (r["method"] != "full") for r in row["summary"]
    ),
}


@pytest.mark.timeout(700)
@pytest.mark.parametrize(
    ("line", "right"),
    [
        pytest.param(*run, marks=mark, id=run[0])
        for runs, mark in ((LONG, pytest.mark.long), (SLOW, pytest.mark.slow))
        for run in runs.items()
    ],
)
def test_each_runs_and_has_figures(line, right, tmp_path):
    assert right(last_line(*shlex.split(line.replace("OUT", str(tmp_path)).replace("IN/", f"{FOLDER}/"))))


def finetuning_in(folder, code):
    """A file for results, a base, and examples."""
    base, data = folder / "base", folder / "data.jsonl"
    size = ("--size", "300k", "--context-length", "64", "--batch", "4", "--steps", "3")
    run_dunes("train", code, "--out", base, *size, check=True, timeout=300)
    data.write_text("".join(f'{{"prompt": "{i} and 1?", "completion": "{i + 1}"}}\n' for i in range(300)))
    return folder / "rows.jsonl", base, data


@pytest.mark.slow
def test_training_on_is_compared_for_equal_processor_time(code, tmp_path):
    out, base, _ = finetuning_in(tmp_path, code)
    short = ("--suffix", ".py", "--minutes", 0.02, "--context-length", 32, "--batch", 2, "--rank", 2)
    row = last_line("train_from.py", out, base, code, *short)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [r["arm"] for r in rows] == ["full-muon", "full-adamw", "lora-muon", "lora-adamw"]
    assert row == rows[-1]
    assert all(r["after"] != r["before"] == rows[0]["before"] and r["steps"] > 0 for r in rows)


TOY = ("peers.py", "--toy", "--here", "--peers")

LIAR = """
import our_side, work

def answers(asked, setting):
    truth = our_side.answers(asked, setting)
    return lambda ids, new: [(id + (i == 5)) % 4096 for i, id in enumerate(truth(ids, new))]

work.main({"decode": (("float32", "bfloat16"), answers)})
"""


@pytest.mark.long
@pytest.mark.timeout(700)
def test_transformers_gives_what_ours_gives_and_is_raced():
    tasks = ("decode", "prefill", "decode16", "first", "train")
    row = last_line(*TOY, "transformers", "--tasks", *tasks)
    assert all(row[task]["transformers"]["ours_over_it"] > 0 for task in tasks)
    tried = row["decode"]["transformers"]["tried"]["float32 dynamic"]
    assert tried["agreement"] == "32 of 32 ids equal"


def test_ratios_are_those_of_the_best_settings_and_of_the_best_with_equal_bits(capsys):
    import peers

    rates = {
        "ours": {"float32": [2.0, 4.0], "bfloat16 compiled": [10.0, 10.0]},
        "theirs": {"float32 static": [8.0, 8.0], "float32": [1.0, 1.0], "float16 flash": [5.0, 4.0]},
    }
    tried = lambda rate: {"rate": rate, "warmup": 1.0, "agreement": "", "output": []}
    sides = [peers.Side(n, (), rows={s: tried(max(r)) for s, r in x.items()}) for n, x in rates.items()]
    assert peers.near_best(sides[1]) == ["float32 static", "float16 flash"]
    laps = {(n, s): [tried(r) for r in x[s]] for n, x in rates.items() for s in x}
    row = peers.report_results(sides, laps)["theirs"]
    assert (row["setting"], row["ours_over_it"]) == ("float32 static", 1.25)
    settings = {n: (each["ours"], each["setting"]) for n, each in row["equal_bits"].items()}
    assert settings == {"32": ("float32", "float32 static"), "16": ("bfloat16 compiled", "float16 flash")}
    assert row["equal_bits"]["32"]["from_to"] == [0.25, 0.5]
    assert row["equal_bits"]["16"]["ratio"] == 2.25
    printed = capsys.readouterr().out
    assert "at 16 bits: ours (bfloat16 compiled) 10, theirs (float16 flash) 4.5: 2.25 times" in printed


@pytest.mark.long
def test_a_side_with_other_output_gets_no_ratio(tmp_path):
    (tmp_path / "liar_side.py").write_text(LIAR)
    row = last_line(*TOY, tmp_path / "liar_side.py", "--tasks", "decode")
    side = row["decode"]["liar_side"]
    assert "ours_over_it" not in side
    assert "31 of 32 ids equal, first differs at 5" in side["said"][0]
    assert row["decode"]["ours"]["rate"] > 0


@pytest.mark.parametrize("folder", ["scenes", "name_scenes"])
def test_the_scenes_are_whole(folder):
    scenes = importlib.import_module("completion_scenes")
    folder = scenes.SCENES.with_name(folder)
    found = scenes.find_scenes(folder)
    languages, kinds = (Counter(getattr(scene, by) for scene in found) for by in ("language", "kind"))
    if folder == scenes.SCENES:
        assert languages == dict.fromkeys(("go", "markdown", "python", "rust", "typescript", "zig"), 10)
        assert {*kinds.values()} == {len(languages)}
    else:
        assert {*languages} == {"c", "go", "python", "rust", "typescript", "zig"}
        assert kinds == {"half": 7, "header": 7, "again": 6, "object": 7}
    assert all(scene.opened for scene in found if scene.kind == "open")
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert len(files) == len(found) + sum(bool(scene.opened) for scene in found), "each is a scene or open in one"
    for scene in found:
        expected = scene.expected[0].removeprefix(scenes.NOT).removesuffix(scenes.PART)
        whole = scene.before + expected + scene.after
        assert not {*whole, *scene.opened} & {*scenes.MARKS}, scene.name
        assert 10 <= whole.count("\n") <= 60, scene.name
        assert scene.after, f"{scene.name}: a file ends in a line end"
        is_wrong = scene.expected[0].startswith(scenes.NOT)
        for text in scene.expected:
            assert text == text.rstrip(), scene.name
            assert not {*"\t\n"} & {*text}, scene.name
            shown = text.removeprefix(scenes.NOT).removesuffix(scenes.PART)
            assert scene.is_right(shown) != is_wrong, scene.name
        assert scene.is_right("") == is_wrong, scene.name


@pytest.mark.parametrize(
    ("expected", "right", "wrong"),
    [
        ("a(b)", ("a(b)", "a(b) ", "a(b)\nc"), ("a(b", "a(b))", "")),
        ("ea…", ("ea", "ea(b"), ("each", "ea1", "e", "")),
        ("a(…", ("a(b", "a("), ("a", "ab")),
        ("a¦b", ("a", "b"), ("ab", "c")),
        ("≠a…¦≠b…", ("", "ab", "c(a)"), ("a", "a(b", "b", "b c")),
    ],
)
def test_what_is_right_in_a_scene(tmp_path, expected, right, wrong):
    (tmp_path / "call-area.go").write_text(f"x = ▏{expected}▕\n")
    (tmp_path / "call-area.open.go").write_text("y\n")
    scene = importlib.import_module("completion_scenes").parse_scene(tmp_path / "call-area.go")
    assert (scene.before, scene.after, scene.opened, scene.kind) == ("x = ", "\n", "y\n", "call")
    assert [scene.is_right(text) for text in (*right, *wrong)] == [True] * len(right) + [False] * len(wrong)


@pytest.mark.parametrize("text", ["", "a▏b", "a▏▕", "a▏b▕c▏d▕", "a▏b¦▕", "a▏…▕", "a¦▏b▕", "▕a▏b▕", "▕a▏b"])
def test_what_is_no_scene_is_refused(tmp_path, text):
    (tmp_path / "call-area.go").write_text(text)
    parse_scene = importlib.import_module("completion_scenes").parse_scene
    refuses(r"call-area\.go: expected one ▏", parse_scene, tmp_path / "call-area.go")


def made_repository(folder):
    """A repository of shapes, and a link and a text of another kind, and its entry in a list."""
    for i in range(60):
        path = folder / "made" / f"part_{i % 4}" / f"shapes_{i}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        body = "".join(f"def area_{i}_{n}(width, height):\n    return width * height + {n}\n\n" for n in range(9))
        path.write_text(body)
        (folder / "made" / f"notes_{i}.md").write_text(f"# Notes {i}\n\n" + f"The area of {i} is a product.\n" * 9)
    (folder / "made" / "link.py").symlink_to(path)
    entry = {"name": "made", "address": "https://made.up", "commit": "0" * 40, "suffix": ".py"}
    entry["sha256"] = importlib.import_module("completion_repositories").digest(folder / "made")
    (folder / "list.json").write_text(json.dumps([entry]))
    return entry, folder / "list.json"


def test_repositories_are_those_of_the_list_or_refused(tmp_path):
    lists = importlib.import_module("completion_repositories")
    entry, file = made_repository(tmp_path)
    assert lists.read_repositories(file, tmp_path) == [lists.Repository(**entry)]
    elsewhere = tmp_path / "elsewhere"
    refuses(r"no such folder; put the files of https://made\.up at 0000", lists.read_repositories, file, elsewhere)
    (tmp_path / "made" / "notes_1.md").write_text("another")
    refuses("made: its files have the SHA-256", lists.read_repositories, file, tmp_path)


@pytest.mark.slow
def test_repositories_are_scored_once_each_and_go_on_after_a_kill(tmp_path):
    (_, file), out = made_repository(tmp_path), tmp_path / "out"
    (out / "made" / "run").mkdir(parents=True)  # as a process that was killed leaves it
    sizes = ("--steps", 6, "--size", "60k", "--cuts", 3, "--lines", 1)
    given = ("--repositories", file, "--folders", tmp_path)
    command = [sys.executable, FOLDER / "completion.py", out, *given, *sizes]
    for _ in range(2):
        done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr[-3000:]
        assert "exact match minus copying, mean over repositories:" in done.stdout
        times = [path.stat().st_mtime_ns for path in sorted(out.rglob("*")) if path.is_file()]
    result = json.loads((out / "made" / "result.json").read_text())
    assert times == [path.stat().st_mtime_ns for path in sorted(out.rglob("*")) if path.is_file()], "done once"
    assert 3 < result["files"]["test"] < 20 > result["files"]["other"] > 1
    assert len(result["differences"]) == result["files"]["test"]
    assert result["validated"] > 0 < result["held_out"]


@pytest.mark.slow
def test_completion_is_trained_and_scored_on_a_corpus_and_timed(tmp_path):
    out, corpus = tmp_path / "out", tmp_path / "corpus"
    corpus.mkdir()
    for number in range(40):
        lines = [f"def area_{number}_{i}(width, height):\n    return width * height + {i}\n" for i in range(30)]
        (corpus / f"shapes_{number}.py").write_text(f"# {number}\n" + "\n".join(lines))
    options = ("--steps", 10, "--size", "2x32", "--cuts", 3, "--lines", 1, "--all-lines")
    found = last_line("completion.py", out, "--corpus", corpus, *options)
    assert found["files"]["test"] > 0
    assert found["steps"] == 10
    assert set(found["rows"]) == {"run", "copy nearest"}
    assert found["rows"]["run"]["bits_per_character"] > 0
    test = out / "corpus" / "test"
    exact = last_line("completion_ablations.py", out / "run", test, "--cuts", 2, "--others", out / "run")["exact"]
    assert exact["copy nearest alone"] > 0
    assert exact[str(out / "run")] == exact["all"], "the same run beside itself"
    scenes = last_line("completion_scenes.py", out / "run")
    assert scenes["language"]["all"]["scenes"] == scenes["kind"]["all"]["scenes"] == 60
    assert scenes["language"]["all"]["ours"] == 60 - len(scenes["missed"])
    opened = scenes["kind"]["open"]
    assert opened["copying"] > opened["copying, nothing open"], "it copies from the open file"
    timed = last_line("completion_latency.py", out / "run", corpus / "shapes_0.py", "--keys", 60, "--widths", 1, 2)
    rows = timed["widths"].values()
    assert all(row["warm"][0] > 0 and row["all"] > 0 for row in rows)
    assert all(row["first"] <= 4 for row in rows), "a key whose logits are remembered evaluates nothing"


@pytest.mark.long
def test_a_models_forms_are_raced_with_their_losses(tmp_path):
    pytest.importorskip("xllamacpp")
    torch.manual_seed(0)
    config = llama.Config.from_size(vocab=400, dim=64, depth=2, context_length=512)
    text = "\n".join(f"{i} and {i + 1} are {2 * i + 1}." for i in range(400))
    checkpoint.save(llama.build(config), tmp_path / "model", Tokenizer.train("bpe", [text], 400), 512)
    (tmp_path / "text").write_text(text)
    work = ("--prompt", 8, "--new", 8, "--prefill", 64, "--scored", 256, "--rounds", 1, "--threads", 1)
    row = last_line(
        "real_model.py", tmp_path / "model", tmp_path / "text", "--kinds", "int4", "--no-compiled", *work
    )
    names = ["ours int4 modules", "transformers bfloat16", "llama.cpp q4_0"]
    assert [*row["loss"]] == [*row["1 threads"]] == names
    assert all(abs(loss - row["loss"]["transformers bfloat16"]) < 0.2 for loss in row["loss"].values())
