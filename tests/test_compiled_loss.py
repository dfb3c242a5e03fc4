"""The compiled loss of a run: when there is one, that it gives the eager one's numbers, and what is printed."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch._dynamo.utils import counters

from conftest import display, raising, refuses, toy, training_output
from dunes.runs import compiled_loss as module
from dunes.runs.compiled_loss import compiled_loss, pays, why_eager
from dunes.runs.finetune import FinetuneTask, finetune
from dunes.runs.finetune_config import FinetuneConfig
from dunes.runs.saving import read_metrics
from dunes.runs.train import TrainTask, train
from dunes.runs.train_config import TrainConfig
from dunes.train import Trainer, sgd
from test_runs import assert_same_training, stop, stopping_at

LIMIT = 1e-4
RATE = 1e-4
"""Muon's products in bfloat16 make large differences of small ones."""

STEPS = 16
USUAL = {"steps": STEPS, "lr": RATE, "size": "1x64"}


CODE = Path(__file__).parent.parent / "recipes"


CPP = "torch._inductor.cpp_builder"


def no_compiler():
    return torch._inductor.cpp_builder.cpp_compiler_search(())


@pytest.fixture
def soon(monkeypatch):
    """Graphs without Inductor, and a run of any length pays."""
    torch.compiler.reset()
    counters.clear()
    real = compiled_loss
    monkeypatch.setattr(module, "compiled_loss", lambda loss: real(loss, "aot_eager"))
    monkeypatch.setattr(module, "COMPILING", 0.0)
    for task in (TrainTask, FinetuneTask):
        monkeypatch.setattr(task, "sample", lambda self: "")
    monkeypatch.setattr(FinetuneTask, "_answer", lambda self, *_: "")
    return monkeypatch


def metrics(folder):
    return [r for r in read_metrics(folder / "metrics.jsonl") if "loss" in r]


def changes(folder):
    return [(r["step"], r["compiled"]) for r in read_metrics(folder / "metrics.jsonl") if "compiled" in r]


def trained(folder, resume=False, **options):
    config = TrainConfig(sources=()) if resume else toy(CODE, **USUAL | options)
    return training_output(config, folder, resume=resume).replace("\n", " ")


def losses(folder):
    return [r["loss"] for r in metrics(folder)]


@pytest.fixture(scope="module")
def eager(tmp_path_factory):
    folder = tmp_path_factory.mktemp("eager") / "run"
    assert "compil" not in trained(folder, compile="off")
    assert changes(folder) == []
    return folder


@pytest.mark.slow
def test_a_compiled_run_trains_as_an_eager_one(eager, tmp_path, soon):
    assert "compiling the loss in the first step" in trained(tmp_path / "run")
    assert changes(tmp_path / "run") == [(0, True)]
    assert counters["stats"]["unique_graphs"] == 1, "validation and samples are eager"
    assert losses(tmp_path / "run") == pytest.approx(losses(eager), abs=LIMIT)
    stopped_and_resumed(tmp_path, soon)


def stopped_and_resumed(tmp_path, soon):
    """A run that was stopped and resumed is the straight one bit for bit, also if it would not be compiled now."""
    stop(toy(CODE, **USUAL), tmp_path / "halves", 12, soon)
    torch.compiler.reset()
    soon.setattr(module, "COMPILING", 1e9)
    assert "compiling the loss in the first step" in trained(tmp_path / "halves", resume=True)
    assert_same_training(tmp_path / "run", tmp_path / "halves")


@pytest.mark.slow
def test_on_compiles_a_short_run_and_says_what_it_lacks(eager, tmp_path, soon):
    soon.setattr(module, "COMPILING", 1e9)
    assert "compiling" not in trained(tmp_path / "auto")
    trained(tmp_path / "on", compile="on")
    assert changes(tmp_path / "on") == [(0, True)]
    soon.setattr(f"{CPP}.get_cpp_compiler", no_compiler)
    refuses(r"--compile on: no C\+\+ compiler; install g\+\+", trained, tmp_path / "none", compile="on")


@pytest.mark.slow
def test_a_run_that_was_eager_last_stays_so(tmp_path, soon):
    stop(toy(CODE, **USUAL), tmp_path / "run", 6, soon)
    show, _ = display()
    config = TrainConfig(sources=(), compile="off")
    with soon.context() as patch:
        stopping_at(9, patch)
        assert train(config, tmp_path / "run", show, resume=True, override=("compile",), asked={"compile"}) == 130
    config = TrainConfig(sources=(), compile="auto")
    assert train(config, tmp_path / "run", show, resume=True, override=("compile",), asked={"compile"}) == 0
    assert changes(tmp_path / "run") == [(0, True), (6, False)]


@pytest.mark.slow
def test_a_finished_run_compiles_nothing_when_it_is_resumed(tmp_path, soon):
    trained(tmp_path / "run")
    assert "compiling" not in trained(tmp_path / "run", resume=True)


def test_compiled_steps_alone_are_deterministic(tmp_path, soon):
    modes = []

    def noting(loss, backend=""):
        def call(model, batch):
            modes.append((model.training, torch.are_deterministic_algorithms_enabled()))
            return loss(model, batch)

        return call

    soon.setattr(module, "compiled_loss", noting)
    trained(tmp_path / "run")
    assert modes == [(True, True)] * STEPS
    assert not torch.are_deterministic_algorithms_enabled()


no_cache = raising(FileNotFoundError("no folder of the cache"))


def failing(loss):
    return raising(RuntimeError("no such\nkernel"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("dunes.runs.compiled_loss.compiled_loss", failing, "the loss is eager again: no such kernel"),
        ("dunes.runs.compiled_loss.compiled_loss", no_cache, "the loss is eager again: no folder of the cache"),
        (f"{CPP}.get_cpp_compiler", no_cache, "stays eager: no folder of the cache"),
        (f"{CPP}.get_cpp_compiler", no_compiler, "the loss stays eager: no C++ compiler; install g++ or clang"),
        ("dunes.runs.compiled_loss.measure.free_memory", lambda device: 6 * 10**8, "GB of memory, and 0.6 are"),
    ],
)
def test_a_loss_that_cannot_be_compiled_stays_eager_with_a_line(name, value, words, eager, tmp_path, soon):
    soon.setattr(name, value)
    said = trained(tmp_path / "run")
    assert said.count("eager") == 1
    assert words in said
    assert [r["loss_hex"] for r in metrics(tmp_path / "run")] == [r["loss_hex"] for r in metrics(eager)]


@pytest.mark.parametrize(
    ("length", "threads", "expected"),
    [
        ({"steps": 2000}, 1, False), ({"steps": 40_000}, 1, True), ({"steps": 40_000}, 2, False),
        ({"seconds": 740.0}, 2, False), ({"seconds": 760.0}, 1, True),
    ],
)  # fmt: skip
def test_whether_it_pays_follows_from_the_config_alone(length, threads, expected):
    fixed = {"steps": None, "seconds": 900.0, "threads": threads, "context_length": 123, "batch": 100}
    run = SimpleNamespace(config=SimpleNamespace(**fixed | length), model=torch.nn.Linear(100, 100))
    assert pays(run) == expected


ROWS = [{"instruction": f"Count to {n}.", "output": " ".join(map(str, range(n)))} for n in range(2, 60)]


def finetuned(base, folder, rows, **options):
    show, out = display()
    fixed = {"steps": 8, "batch": 4, "rank": 4, "lr": RATE, "dtype": "float32", "threads": 1}
    config = FinetuneConfig(model=str(base), data=str(rows), **fixed | options)
    assert finetune(config, folder, show) == 0
    return out.getvalue().replace("\n", " ")


@pytest.mark.slow
@pytest.mark.parametrize("method", ["lora", "qlora", "full"])
def test_a_finetune_with_accumulated_gradients_is_compiled(method, eager, tmp_path, soon):
    rows = tmp_path / "rows.json"
    rows.write_text(json.dumps(ROWS))
    ours, other = tmp_path / "ours", tmp_path / "other"
    finetuned(eager, ours, rows, micro_batch=2, method=method)
    assert changes(ours) == [(0, True)]
    finetuned(eager, other, rows, micro_batch=2, method=method, compile="off")
    assert losses(ours) == pytest.approx(losses(other), abs=LIMIT)
    assert counters["stats"]["unique_graphs"] == 1


def test_batches_of_another_shape_are_computed_eagerly(soon):
    model = torch.nn.Embedding(9, 9)
    loss = compiled_loss(lambda model, batch: (model(batch).sum(), torch.tensor(1)), "aot_eager")
    trainer = Trainer(model, sgd(model), loss)
    batches = [torch.zeros(n, 3, dtype=torch.long) for n in (2, 2, 3, 2)]
    assert len(list(trainer.run(batches))) == 4
    assert counters["stats"]["unique_graphs"] == 1
    config = SimpleNamespace(counted="tokens")
    task = SimpleNamespace(batches=lambda start: iter(batches))
    run = SimpleNamespace(config=config, trainer=trainer, task=task)
    assert why_eager(run).startswith("batches differ in length")
    del batches[2]
    assert why_eager(run) == ""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # of torch's own, as it imports its compiler
@pytest.mark.timeout(900)
def test_a_run_with_inductors_code(tmp_path):
    torch.compiler.reset()
    trained(tmp_path / "ours", steps=40, size="2x64", compile="on")
    assert changes(tmp_path / "ours") == [(0, True)], "and no failure"
    trained(tmp_path / "eager", steps=40, size="2x64", compile="off")
    assert losses(tmp_path / "ours") == pytest.approx(losses(tmp_path / "eager"), abs=LIMIT)
