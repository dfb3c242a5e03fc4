"""What somebody wrote into a run's files by hand, digests and all: right, or one line that names the place."""

import json
import shutil
from functools import partial
from math import inf, nan

import pytest
from safetensors.torch import load_file, save_file

from conftest import display, refuses, toy, training_output, write_programs
from dunes import checkpoint
from dunes.checkpoint.state import MANIFEST
from dunes.cli import bench as bench_verbs
from dunes.files.atomic import digest
from dunes.runs import autosize
from dunes.runs import loop as loop_module
from dunes.runs.finetune import finetune
from dunes.runs.finetune_config import FinetuneConfig
from dunes.runs.run import read_metrics, run_lock
from dunes.runs.train import train
from dunes.runs.train_config import TrainConfig


def write_manifest(folder):
    """The manifest of a state whose files were changed on purpose."""
    files = {path.name: {"sha256": digest(path)} for path in folder.iterdir() if path.name != MANIFEST}
    (folder / MANIFEST).write_text(json.dumps({"files": files}))


def refused(call, *arguments, **named):
    """What is said, in one line, of what cannot be done."""
    with pytest.raises((ValueError, OSError)) as error:
        call(*arguments, **named)
    words = str(error.value)
    assert "\n" not in words
    assert len(words) < 600, words
    return words


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    """A run of twelve steps on forty small programs, and its text."""
    base = tmp_path_factory.mktemp("whole")
    (base / "code").mkdir()
    write_programs(base / "code")
    assert train(toy(base / "code"), base / "run", display()[0]) == 0
    return base / "run"


@pytest.fixture
def run(run_folder, tmp_path):
    return shutil.copytree(run_folder, tmp_path / "run")


def resumed(folder, show=None):
    return train(TrainConfig(sources=()), folder, show or display()[0], resume=True)


WRONG_PLANS = {
    "endless steps": ("steps", 1e400),
    "endless minutes": ("minutes", 1e400),
    "no number": ("minutes", nan),
    "text for steps": ("steps", "12"),
    "a number for the size": ("size", 3_000_000),
    "text for a context": ("context_length", "32"),
    "text for minutes": ("minutes", "1e400"),
    "a share of a step": ("steps", 12.5),
    "true": ("batch", True),
    "null": ("seed", None),
    "a long seed": ("seed", 10**23),
    "a list": ("dtype", ["float32"]),
    "an object": ("threads", {}),
    "a number for text": ("family", 3),
    "a source": ("sources", "code"),
    "sources that are numbers": ("sources", [1]),
    "a text for the rate": ("matmul", "fast"),
    "a negative depth": ("size", "-2x96"),
}


@pytest.mark.parametrize("case", WRONG_PLANS)
def test_a_plan_that_was_edited_wrongly_is_refused_by_file_and_field(case, run):
    name, value = WRONG_PLANS[case]
    path = run / "state" / "plan.json"
    text = json.dumps(json.loads(path.read_text()) | {name: value})
    path.write_text(text.replace("Infinity", "1e400"))
    words = refused(resumed, run)
    assert words.startswith(f"{path}: ")
    assert f"--{name.replace('_', '-')} is " in words
    assert str(path) in refused(train, toy(run.parent), run, display()[0], dry_run=True)


def test_a_number_too_long_for_python_is_refused_by_its_file(run):
    path = run / "state" / "plan.json"
    path.write_text(path.read_text().replace('"seed": 0', f'"seed": 1{"0" * 5000}'))
    assert refused(resumed, run).startswith(f"{path}: not JSON")


@pytest.mark.parametrize(
    "text", [b"", b"{", b"[]", b"3", b"null", b"\xff", b"[" * 99_999, b'{"steps": 1, "steps": 2}']
)
def test_a_plan_that_is_none_is_refused_by_its_file(text, run):
    path = run / "state" / "plan.json"
    path.write_bytes(text)
    assert refused(resumed, run).startswith(f"{path}: ")


def test_a_plan_from_python_is_checked_alike():
    wrong = ({"minutes": inf}, {"steps": "3"}, {"seed": 10**23}, {"sources": ["x"]}, {"context_length": 32.0})
    for fields in wrong:
        said = f"--{next(iter(fields)).replace('_', '-')} is .*; it must be"
        refuses(said, TrainConfig, **{"sources": ("x",)} | fields)
    for fields in ({"alpha": inf}, {"lr": "1e-3"}, {"model": None}, {"packing": 1}, {"target_modules": "**"}):
        refuses(f"--{next(iter(fields)).replace('_', '-')} is .*; it must be", FinetuneConfig, **fields)


def resealed(run, change):
    """Change the newest state, and write digests that agree with it."""
    folder = checkpoint.latest_state(run)
    tensors = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    (folder / "unchanging.safetensors").unlink(missing_ok=True)  # one file may have all
    content = json.loads((folder / "state.json").read_text())
    state = dict(content["state"]["dict"])
    state["trainer"] = dict(state["trainer"]["dict"])
    change(state, tensors)
    state["trainer"] = {"dict": [[k, v] for k, v in state["trainer"].items()]}
    content["state"] = {"dict": [[k, v] for k, v in state.items()]}
    save_file(tensors, folder / "tensors.safetensors")
    (folder / "state.json").write_text(json.dumps(content).replace('"1e400"', "1e400"))
    write_manifest(folder)
    assert checkpoint.latest_state(run) == folder, "its digests are right"
    return folder


def setting(name, value):
    def change(state, tensors):
        (state["trainer"] if name in state["trainer"] else state)[name] = value

    return change


def without(prefix):
    def change(state, tensors):
        del tensors[next(name for name in tensors if name.startswith(prefix))]

    return change


def replaced(prefix, value, where=""):
    def change(state, tensors):
        name = next(name for name in tensors if name.startswith(prefix) and where in name)
        tensors[name] = value(tensors[name]).contiguous()

    return change


def entry_gone(state, tensors):
    """One parameter's momentum is gone, from the tensors and from what names them."""
    text = json.dumps(state["trainer"]["optimizer"])
    name = next(n for n in tensors if n.endswith("exp_avg_sq"))
    del tensors[name]
    text = text.replace(f', ["exp_avg_sq", {{"tensor": "{name}"}}]', "")
    assert name not in text
    state["trainer"]["optimizer"] = json.loads(text)


def option(old, new):
    def change(state, tensors):
        text = json.dumps(state["trainer"]["optimizer"])
        assert old in text
        state["trainer"]["optimizer"] = json.loads(text.replace(old, new))

    return change


WRONG_STATES = {
    "another step": (setting("number", 7), "it belongs to step 7"),
    "text for a step": (setting("number", "12"), "it belongs to step '12'"),
    "an endless step": (setting("number", "1e400"), "it belongs to step inf"),
    "a step below none": (setting("number", -1), "it belongs to step -1"),
    "elapsed": (setting("elapsed", "1e400"), "elapsed is inf"),
    "elapsed text": (setting("elapsed", "3"), "elapsed is '3'"),
    "elapsed below": (setting("elapsed", -3.0), "elapsed is -3.0"),
    "records": (setting("schedule", {"list": [{"list": [0, "12"]}]}), "not the state of a run"),
    "records of one": (setting("schedule", {"list": [{"list": [0]}]}), "not the state of a run"),
    "records backwards": (setting("schedule", {"list": [{"list": [12, 6]}]}), "a decay from step 12 to 6"),
    "records no list": (setting("schedule", 5), "not the state of a run"),
    "best": (setting("best", {"list": [1.0, 2]}), "not enough values"),
    "best of nothing": (setting("best", {"list": [1.0, 0, 5]}), "a score of 0 tokens"),
    "last": (setting("last", "none"), "too many values"),
    "best step": (setting("best_step", 1.5), "not the state of a run"),
    "spent": (setting("timings", {"dict": [["data", "long"]]}), "could not convert string"),
    "plan": (setting("config", 3), "contains no run config"),
    "plan's number": (setting("config", {"dict": [["steps", "12"]]}), "--steps is '12'"),
    "corpus": (setting("fingerprints", None), "not the state of a run"),
    "weights": (setting("weights", {"list": []}), "not the state of a run"),
    "weights of another": (setting("weights", {"dict": []}), "the state belongs to another model"),
    "no optimizer": (setting("optimizer", {"dict": []}), "not the state of a run"),
    "a missing weight": (without("weights."), "not the state of a run: KeyError"),
    "a missing best weight": (without("best_weights."), "not the state of a run: KeyError"),
    "a missing momentum": (without("trainer.optimizer"), "not the state of a run: KeyError"),
    "a momentum unnamed": (entry_gone, "the optimizer's parameters have different entries"),
    "a shape that broadcasts": (
        replaced("weights.", lambda t: t[:1], "norm"),
        "the state belongs to another model: blocks",
    ),
    "another dtype": (replaced("weights.", lambda t: t.double()), "the state belongs to another model: blocks"),
    "best of another shape": (
        replaced("best_weights.", lambda t: t[:1]),
        "the state belongs to another model: blocks",
    ),
    "a weight that is none": (replaced("weights.", lambda t: t * nan), "not finite"),
    "a best weight that is none": (replaced("best_weights.", lambda t: t * nan), "not finite"),
    "a momentum that is none": (replaced("trainer.", lambda t: t * inf, "exp_avg"), "not finite"),
    "a momentum of another shape": (
        replaced("trainer.", lambda t: t.flatten()[:3], "exp_avg"),
        "is (3,) torch.float32, not ",
    ),
    "a rate": (option('["lr", 0.0', '["lr", "x'.replace('"x', '"1"], ["was", 0.0')), "not the state of a run"),
    "betas": (option('["betas", {"tuple": [0.9', '["betas", {"tuple": ["0.9"'), "too many dimensions"),
    "an endless decay": (
        option('["weight_decay", 0.0', '["weight_decay", 1e999'),
        "the optimizer's weight_decay is inf",
    ),
    "a group": (option('"params", {"list": [0', '"params", {"list": [99'), "the optimizer's groups"),
}


@pytest.mark.parametrize("case", WRONG_STATES)
def test_a_state_with_a_wrong_number_is_refused_by_name(case, run):
    change, words = WRONG_STATES[case]
    folder = resealed(run, change)
    before = {p: p.read_bytes() for p in run.rglob("*") if p.is_file() and p.name != "lock"}
    said = refused(resumed, run)
    assert words in said
    assert str(folder) in said
    assert {p: p.read_bytes() for p in run.rglob("*") if p.is_file() and p.name != "lock"} == before


NO_STATES = [
    "3", "[]", "null", "{}", '{"format": 2}', '{"format": 2, "state": 3}', '{"format": 2, "state": {"dict": [1]}}',
    '{"format": 2, "state": {"list": []}}', '{"format": 2, "state": {"dict": []}}', "[" * 99_999,
    '{"format": 2, "state": {"tensor": []}}',
]  # fmt: skip


@pytest.mark.parametrize("text", NO_STATES)
def test_a_state_that_is_none_is_refused_by_name(text, run):
    folder = checkpoint.latest_state(run)
    (folder / "state.json").write_text(text)
    write_manifest(folder)
    assert str(folder) in refused(resumed, run)


def test_a_state_that_is_resealed_as_it_was_goes_on(run):
    before = (run / "model.safetensors").read_bytes()
    resealed(run, lambda state, tensors: None)
    assert resumed(run) == 0
    assert (run / "model.safetensors").read_bytes() == before


FORMAT_1 = {
    "context": 32, "batch": 4, "steps": 12, "minutes": 15.0, "seed": 0, "lr": None, "device": None,
    "dtype": "float32", "threads": 1, "matmul": None, "sources": ["/home/me/code"], "text_field": [],
    "follow_links": False,
    "family": "arcee", "tokenizer": "bpe", "vocab": 300, "size": 60_000, "depth": 0, "width": 0, "split": "files",
}  # fmt: skip
"""The plan.json of a run before its keys were renamed."""


def test_a_run_of_an_earlier_version_is_refused_with_the_remedy(run):
    path = run / "state" / "plan.json"
    path.write_text(json.dumps(FORMAT_1))
    for words in (refused(resumed, run), refused(train, toy(run.parent), run, display()[0])):
        assert words.startswith(f"{path}: written by another version of dunes (format 1, this version reads 2)")
        assert words.endswith("choose another --out")


def test_metrics_of_an_earlier_version_are_passed_over_and_told(tmp_path):
    line = {"step": 3, "loss": 2.0, "count": 8, "norm": 1.5, "rate": 0.5, "skipped": False, "seconds": 0.1}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    warnings = []
    assert read_metrics(tmp_path / "metrics.jsonl", warnings.append) == []
    assert "expected the metrics of a step" in warnings[0]


def out_folders(tmp_path):
    """Places for a run that are none, and the words that say which."""
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "state").symlink_to(tmp_path / "gone")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "state").write_text("x")
    own = {name: name for name in ("file", "link", "loop")}
    return own | {"link/run": "link", "run": "run/state", "other": "other/state"}


def test_a_link_to_nothing_is_no_place_for_a_run(code, tmp_path, monkeypatch):
    monkeypatch.setattr(loop_module.measure, "keep_freed_memory", lambda: pytest.fail("work was begun"))
    rows = tmp_path / "rows.json"
    rows.write_text("[]")
    for name, place in out_folders(tmp_path).items():
        for verb, config in ((train, toy(code)), (finetune, FinetuneConfig(model=str(tmp_path), data=str(rows)))):
            for how in ({}, {"dry_run": True}, {"strict": True}):
                words = refused(verb, config, tmp_path / name, display()[0], **how)
                assert words.startswith(f"{tmp_path / place}: is "), words
                assert words.endswith("choose another --out")
    assert not (tmp_path / "gone").exists()


def test_a_link_to_a_folder_is_a_place_for_a_run(code, tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert train(toy(code, steps=2), tmp_path / "link", display()[0]) == 0
    assert (tmp_path / "real" / "model.safetensors").is_file()


def test_measurements_do_not_go_through_a_link_to_nothing(tmp_path):
    from dunes.bench.runner import Request, bench

    (tmp_path / "out.jsonl").symlink_to(tmp_path / "gone" / "x.jsonl")
    refuses(r"out\.jsonl: already exists", bench, "train", Request(sizes=["60k"]), 1, tmp_path / "out.jsonl")


def test_readers_of_what_is_no_run_say_so(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    (tmp_path / "empty").mkdir()
    for name in ("link", "empty"):
        assert str(tmp_path / name) in refused(bench_verbs.plot, (tmp_path / name,), tmp_path / "pictures")


def test_what_the_base_could_do_is_asked_again_if_its_file_is_damaged(tmp_path):
    from dunes.evaluate.text_loss import Score
    from dunes.runs.finetune_data import Baseline

    path = tmp_path / "baseline.json"
    whole = Baseline(Score(1.0, 2, 3), None, ["x"], "")
    whole.write(path)
    assert Baseline.read(path) == whole
    good = json.loads(path.read_text())
    damaged = ({"score": [1]}, {"answers": 5}, {"score": ["x", 1, 2]}, {"forgetting": "x"})
    for wrong in (3, [], {}, *(good | fields for fields in damaged)):
        path.write_text(json.dumps(wrong))
        assert refused(Baseline.read, path).startswith(f"{path}: ")
    path.write_bytes(b"\xff{")
    assert refused(Baseline.read, path).startswith(f"{path}: ")


dry = partial(training_output, dry_run=True)


@pytest.mark.slow
def test_a_dry_run_into_a_run_says_that_there_is_one_and_touches_nothing(run, run_folder, monkeypatch):
    machine = autosize.Machine(threads=1, dtype="float32", matmul=1e11, read=1e10)
    monkeypatch.setattr(autosize, "measure_machine", lambda config: machine)
    code = run_folder.parent / "code"
    before = {p: p.stat().st_mtime_ns for p in run.rglob("*")}
    config = TrainConfig(sources=(str(code),), minutes=1, dtype="float32", threads=1)
    said = dry(config, run)
    assert f"warning: {run}: already contains a run; continue it with --resume, or choose another --out" in said
    assert "last saved state: step 12" in said
    assert "chosen for 1 minute" in said
    assert "chosen for" not in dry(TrainConfig(), run), "nothing was asked but what is there"
    again = dry(TrainConfig(), run, resume=True)
    assert "already contains a run" not in again
    assert "last saved state: step 12" in again
    assert "--resume continues from there up to 12 steps" in again
    with run_lock(run):
        assert "in use by another training process" in dry(config, run)
        assert "in use by another training process" in dry(TrainConfig(), run, resume=True)
    after = {p: p.stat().st_mtime_ns for p in run.rglob("*") if p.name != "lock"}
    assert after == {p: t for p, t in before.items() if p.name != "lock"}
    assert "no sources" in refused(train, TrainConfig(), run.parent / "new", display()[0], dry_run=True)
    longer = refused(train, TrainConfig(steps=3), run, display()[0], resume=True, dry_run=True)
    assert "steps was 12, now 3" in longer


def test_a_dry_run_into_a_run_that_never_saved_says_so(run):
    shutil.rmtree(checkpoint.latest_state(run))
    shutil.rmtree(checkpoint.latest_state(run), ignore_errors=True)
    assert "no training state" in dry(TrainConfig(), run, resume=True)
