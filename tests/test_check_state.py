"""What somebody wrote into a run's files by hand, digests and all: right, or one line that names the place."""

import json
import shutil
from functools import partial

import pytest
from safetensors.torch import load_file, save_file

from conftest import display, refuses, toy, training_output, write_programs
from dunes import checkpoint
from dunes.bench.runner import Request, bench
from dunes.checkpoint.state import MANIFEST
from dunes.files.atomic import digest
from dunes.runs import autosize
from dunes.runs import run as run_module
from dunes.runs.finetune import finetune
from dunes.runs.finetune_config import FinetuneConfig
from dunes.runs.saving import run_lock
from dunes.runs.train import train
from dunes.runs.train_config import TrainConfig


def write_manifest(folder):
    """The manifest of a state whose files were changed on purpose."""
    files = {path.name: {"sha256": digest(path)} for path in folder.iterdir() if path.name != MANIFEST}
    (folder / MANIFEST).write_text(json.dumps({"files": files}))


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    """A run of twelve steps on forty small programs, and its text."""
    base = tmp_path_factory.mktemp("whole")
    assert train(toy(write_programs(base / "code")), base / "run", display()[0]) == 0
    return base / "run"


@pytest.fixture
def run(run_folder, tmp_path):
    return shutil.copytree(run_folder, tmp_path / "run")


def resumed(folder, show=None):
    return train(TrainConfig(sources=()), folder, show or display()[0], resume=True)


PLANS = [
    *(b"", b"[]", b"\xff", b"[" * 99_999, b'{"steps": 1, "steps": 2}', b'{"format": 1}'),
    *({"steps": 0}, {"steps": "12"}, {"minutes": None, "context": 32}, {"format": 1}),
]


@pytest.mark.parametrize("content", PLANS, ids=lambda content: repr(content)[:20])
def test_a_plan_that_is_none_is_refused_by_its_file(content, run):
    path = run / "state" / "plan.json"
    edited = lambda: json.dumps(json.loads(path.read_text()) | content).encode()
    path.write_bytes(content if isinstance(content, bytes) else edited())
    for call in (partial(resumed, run), partial(train, toy(run.parent), run, display()[0])):
        assert refuses(".", call).startswith(f"{path}: ")


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
    (folder / "state.json").write_text(json.dumps(content))
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


WRONG_STATES = {
    "no records": setting("schedule", 5),
    "no score": setting("last", "none"),
    "no config": setting("config", 3),
    "weights of another": setting("weights", {"dict": []}),
    "no optimizer": setting("optimizer", {"dict": []}),
    "a missing weight": without("weights."),
    "a missing momentum": without("trainer.optimizer"),
    "a shape that broadcasts": replaced("weights.", lambda t: t[:1], "norm"),
    "another dtype": replaced("weights.", lambda t: t.double()),
    "best of another shape": replaced("best_weights.", lambda t: t[:1]),
}


@pytest.mark.parametrize("case", WRONG_STATES)
def test_a_state_of_another_run_is_refused_by_its_folder(case, run):
    folder = resealed(run, WRONG_STATES[case])
    before = {p: p.read_bytes() for p in run.rglob("*") if p.is_file() and p.name != "lock"}
    refuses(str(folder), resumed, run)
    assert {p: p.read_bytes() for p in run.rglob("*") if p.is_file() and p.name != "lock"} == before


def test_a_state_that_is_resealed_as_it_was_goes_on(run):
    before = (run / "model.safetensors").read_bytes()
    resealed(run, lambda state, tensors: None)
    assert resumed(run) == 0
    assert (run / "model.safetensors").read_bytes() == before


def test_a_link_to_nothing_is_no_place_for_a_run(code, tmp_path, monkeypatch):
    monkeypatch.setattr(run_module.measure, "keep_freed_memory", lambda: pytest.fail("work was begun"))
    for name in ("file", "other/state"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("[]")
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "state").symlink_to(tmp_path / "gone")
    tuning = FinetuneConfig(model=str(tmp_path), data=str(tmp_path / "file"))
    places = {"file": "file", "link": "link", "loop": "loop", "link/run": "link"}
    for name, place in (places | {"run": "run/state", "other": "other/state"}).items():
        for verb, config in ((train, toy(code)), (finetune, tuning)):
            for how in ({}, {"dry_run": True}):
                words = refuses(".", verb, config, tmp_path / name, display()[0], **how)
                assert words.startswith(f"{tmp_path / place}: ")
    assert not (tmp_path / "gone").exists()


def test_a_link_to_a_folder_is_a_place_for_a_run(code, tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert train(toy(code, steps=2), tmp_path / "link", display()[0]) == 0
    assert (tmp_path / "real" / "model.safetensors").is_file()


def test_what_the_base_could_do_is_read_as_it_was_written(tmp_path):
    from dunes.evaluate.text_loss import Score
    from dunes.runs.finetune_data import Baseline

    path = tmp_path / "baseline.json"
    whole = Baseline(Score(1.0, 2, 3), None, ["x"], "")
    whole.write(path)
    assert Baseline.read(path) == whole
    for text in (b"3", b"{}", b'{"score": [1]}', b"\xff{"):
        path.write_bytes(text)
        refuses(f"{path}: ", Baseline.read, path)


dry = partial(training_output, dry_run=True)


@pytest.mark.slow
def test_a_dry_run_into_a_run_says_that_there_is_one_and_touches_nothing(run, run_folder, monkeypatch):
    machine = autosize.Machine(threads=1, dtype="float32", matmul=1e11, read=1e10)
    monkeypatch.setattr(autosize, "measure_machine", lambda config: machine)
    stamps = lambda: {p: p.stat().st_mtime_ns for p in run.rglob("*") if p.name != "lock"}
    config = TrainConfig(sources=(str(run_folder.parent / "code"),), minutes=1, dtype="float32", threads=1)
    before, said, again = stamps(), dry(config, run), dry(TrainConfig(), run, resume=True)
    assert f"warning: {run}: already contains a run" in said
    assert "chosen for 1 minute" in said
    assert "already contains a run" not in again
    assert "last saved state: step 12; --resume continues from there up to 12 steps" in again
    with run_lock(run):
        assert "in use by another training process" in dry(TrainConfig(), run, resume=True)
    assert stamps() == before
    refuses("size was '60k'", train, TrainConfig(size="70k"), run, display()[0], resume=True, dry_run=True)


def test_a_dry_run_into_a_run_that_never_saved_says_so(run):
    for state in (run / "state").glob("step-*"):
        shutil.rmtree(state)
    assert "no training state" in dry(TrainConfig(), run, resume=True)


def test_measurements_do_not_go_through_a_link_to_nothing(tmp_path):
    (tmp_path / "out.jsonl").symlink_to(tmp_path / "gone" / "x.jsonl")
    refuses(r"out\.jsonl: ", bench, "train", Request(sizes=["60k"]), 1, tmp_path / "out.jsonl")
