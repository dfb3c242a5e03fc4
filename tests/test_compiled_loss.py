"""The compiled loss of a run: when it changes over, that it gives the eager one's numbers, and what it says."""

import json
import math
import os
import pickle
import signal
import subprocess
import sys
import time
from collections import Counter, deque
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch._dynamo.utils import counters

from conftest import display, toy
from dunes.augment import attach
from dunes.models import FAMILIES
from dunes.models.initialise import initialise
from dunes.runs import compiled_loss as module
from dunes.runs.child_process import python_command
from dunes.runs.compiled_loss import Compiled, LossCompiler, Work, compiled_loss, why_eager
from dunes.runs.finetune import finetune
from dunes.runs.finetune_config import FinetuneConfig
from dunes.runs.finetune_task import FinetuneTask
from dunes.runs.memory import next_token_loss
from dunes.runs.run import Run, read_metrics
from dunes.runs.train import TrainTask, train
from dunes.runs.train_config import TrainConfig
from dunes.train import Trainer, sgd
from test_runs import stopping_at, weights

LIMIT = 1e-4
RATE = 1e-4
"""Muon's products in bfloat16 make large differences of small ones."""

STEPS, CHANGE = 16, 5
"""The step after which the other process is done."""


CODE = Path(__file__).parent.parent / "recipes"


class Process:
    """The other process, done at once."""

    outcome: Compiled | str = Compiled(20.0, 1.0)

    def __init__(self, work):
        self.work = work

    def wait(self, seconds):
        pass

    def result(self):
        return self.outcome

    def stop(self):
        pass


@pytest.fixture
def soon(monkeypatch):
    """Graphs without Inductor, a run of any length pays, compiled steps are timed as twice as fast, and a run of
    so many steps changes over by the clock, too."""
    torch.compiler.reset()
    counters.clear()
    real, times = compiled_loss, iter([2.0, 1.0] * 9)
    monkeypatch.setattr(module, "compiled_loss", lambda loss, backend: real(loss, "aot_eager"))
    monkeypatch.setattr(module, "_Process", Process)
    monkeypatch.setattr(module, "GAIN", math.inf)
    monkeypatch.setattr(module, "planned_change", lambda run: None)
    monkeypatch.setattr(module, "TIMED", CHANGE - 1)
    monkeypatch.setattr(module, "median", lambda seconds: next(times))
    for task in (TrainTask, FinetuneTask):
        monkeypatch.setattr(task, "sample", lambda self: "")
    monkeypatch.setattr(FinetuneTask, "_answer", lambda self, talk: "")
    return monkeypatch


def metrics(folder):
    return [r for r in read_metrics(folder / "metrics.jsonl") if "loss" in r]


def changes(folder):
    return [(r["step"], r["compiled"]) for r in read_metrics(folder / "metrics.jsonl") if "compiled" in r]


def trained(folder, expected=0, resume=False, **options):
    show, out = display()
    config = (
        TrainConfig(sources=()) if resume else toy(CODE, **{"steps": STEPS, "lr": RATE, "size": "1x64"} | options)
    )
    assert train(config, folder, show, resume=resume) == expected
    return out.getvalue().replace("\n", " ")


def losses(folder):
    return [r["loss"] for r in metrics(folder)]


@pytest.fixture(scope="module")
def eager(tmp_path_factory):
    folder = tmp_path_factory.mktemp("eager") / "run"
    assert "compil" not in trained(folder, compile="off")
    assert changes(folder) == []
    return folder


def test_a_run_changes_over_and_trains_as_before(eager, tmp_path, soon):
    said = trained(tmp_path / "run")
    assert "the loss is compiled: 1000 ms a step against 2000 eager, after 20 s of compiling beside" in said
    assert changes(tmp_path / "run") == [(CHANGE, True)]
    assert counters["stats"]["unique_graphs"] == 1, "validation and samples are eager"
    ours, other = losses(tmp_path / "run"), losses(eager)
    assert ours == pytest.approx(other, abs=LIMIT)
    assert ours[:CHANGE] == other[:CHANGE]
    stopped_and_resumed(tmp_path, soon)


def stopped_and_resumed(tmp_path, soon):
    """A run that was stopped after the change is the straight one, bit for bit."""
    with soon.context() as patch:
        stopping_at(12, patch)
        trained(tmp_path / "halves", expected=130)
    torch.compiler.reset()
    assert "compiling the loss before the first step: it was" in trained(tmp_path / "halves", resume=True)
    straight, halves = tmp_path / "run", tmp_path / "halves"
    assert [r["loss_hex"] for r in metrics(halves)] == [r["loss_hex"] for r in metrics(straight)]
    one, two = weights(straight), weights(halves)
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_slower_steps_are_eager_again_also_after_resuming(tmp_path, soon):
    times = iter([1.0, 2.0] * 9)
    soon.setattr(module, "median", lambda seconds: next(times))
    with soon.context() as patch:
        stopping_at(12, patch)
        said = trained(tmp_path / "run", expected=130)
    assert "the loss is eager again: compiled it takes 2000 ms a step against 1000" in said
    assert changes(tmp_path / "run") == [(CHANGE, True), (2 * CHANGE, False)]
    trained(tmp_path / "run", resume=True)
    assert len(changes(tmp_path / "run")) == 2


def test_compiled_steps_alone_are_deterministic(tmp_path, soon):
    modes = []

    def noting(loss, backend=""):
        def call(model, batch):
            modes.append((model.training, torch.are_deterministic_algorithms_enabled()))
            return loss(model, batch)

        return call

    soon.setattr(module, "compiled_loss", noting)
    trained(tmp_path / "run")
    assert modes == [(True, True)] * (STEPS - CHANGE)
    assert not torch.are_deterministic_algorithms_enabled()


def no_cache(loss, backend):
    raise FileNotFoundError("no folder of the cache")


def failing(loss, backend):
    def call(model, batch):
        raise RuntimeError("no such\nkernel")

    return call


def unpicklable(self, work):
    raise pickle.PickleError("cannot pickle\nthis")  # as a ScriptModule does


def busy(patch):
    """The other process, which does not end, on a machine where nothing is worth waiting for."""
    patch.setattr(Process, "outcome", None)
    patch.setattr(Process, "stop", lambda self: None)
    patch.setattr(module, "PATIENCE", 0.0)
    patch.setattr(module, "GAIN", 1e9)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: m.setattr(module, "compiled_loss", failing), "the loss is eager again: no such kernel"),
        (
            lambda m: m.setattr(module, "compiled_loss", no_cache),
            "the loss is eager again: no folder of the cache",
        ),
        (
            lambda m: m.setattr(module, "has_compiler", lambda: no_cache(0, 0)),
            "stays eager: no folder of the cache",
        ),
        (lambda m: m.setattr(Process, "outcome", "a reason"), "stays eager: compiling it failed: a reason"),
        (lambda m: m.setattr(Process, "__init__", unpicklable), "the loss stays eager: cannot pickle this"),
        (
            lambda m: m.setattr(module, "has_compiler", lambda: False),
            "the loss stays eager: no C++ compiler; install",
        ),
        (
            lambda m: m.setattr(module.measure, "free_memory", lambda device: 8 * 10**8),
            "GB of memory, and 0.8 are",
        ),
        (busy, "the loss stays eager: compiling it takes longer than it would save"),
    ],
)
def test_a_loss_that_cannot_be_compiled_stays_eager_with_a_line(change, words, eager, tmp_path, soon):
    change(soon)
    said = trained(tmp_path / "run")
    assert said.count("eager") == 1
    assert words in said
    assert [r["loss_hex"] for r in metrics(tmp_path / "run")] == [r["loss_hex"] for r in metrics(eager)]


def test_compiling_needs_the_memory_of_a_step_besides_its_own(monkeypatch):
    trainer = Trainer(model := torch.nn.Linear(2, 2), sgd(model), next_token_loss)
    monkeypatch.setattr(module.measure, "peak_memory", lambda device: 4e9)
    monkeypatch.setattr(module.measure, "free_memory", lambda device: 4.6e9)
    assert why_eager(trainer, []) == "compiling takes up to 4.7 GB of memory, and 4.6 are free"
    monkeypatch.setattr(module.measure, "free_memory", lambda device: 4.8e9)
    assert why_eager(trainer, []) == ""


def half_done(steps):
    """A run after 10 steps of 0.1 s, and 100 s of preparation before them."""
    config = SimpleNamespace(steps=steps, seconds=500.0, compile="auto")
    trainer = SimpleNamespace(number=10, loss=None, model=None)
    return SimpleNamespace(
        config=config, trainer=trainer, compiled=None, elapsed=101.0, pace=deque([0.1] * 9),
        timings=SimpleNamespace(seconds=Counter({"first step": 9.0, "steps": 2.0})),
    )  # fmt: skip


def test_the_time_left_is_that_of_steps_and_not_of_what_came_before_them():
    run = half_done(steps=210)
    assert Run.seconds_left.fget(run) == pytest.approx(20.0)
    run.pace.clear()
    assert Run.seconds_left.fget(run) == pytest.approx(200 * 0.2), "of a run that was just resumed"
    run.timings.seconds["steps"] = 0.0
    assert Run.seconds_left.fget(run) == pytest.approx(200 * 9.0), "after the first step"
    run.trainer.number = 300
    assert Run.seconds_left.fget(run) == 0
    assert Run.seconds_left.fget(half_done(steps=None)) == 399.0


@pytest.mark.parametrize(("seconds", "begins"), [(400.0, False), (402.0, True)])
def test_compiling_begins_where_the_time_left_pays_for_it(seconds, begins):
    run, begun = half_done(None), []
    run.config.seconds = seconds
    run.seconds_left = Run.seconds_left.fget(run)
    compiler = LossCompiler(run, print, print)
    compiler._start = begun.append
    for _ in range(module.TIMED):
        assert not compiler.running
        compiler.after(SimpleNamespace(seconds=0.1))
    assert bool(begun) == compiler.running == begins


@pytest.mark.parametrize(("planned", "slow"), [(9, False), (9, True), (0, False)])
def test_a_run_of_so_many_steps_changes_over_at_a_planned_step_whatever_the_clock_says(
    planned, slow, tmp_path, soon
):
    """Also where compiled steps are no faster, and where the compiler is done late: same command, same losses."""
    waited, times = [], iter([1.0, 2.0] * 9 if slow else [2.0, 1.0] * 9)
    soon.setattr(module, "planned_change", lambda run: planned)
    soon.setattr(module, "median", lambda seconds: next(times))
    soon.setattr(Process, "wait", lambda self, seconds: waited.append(seconds))
    trained(tmp_path / "run")
    assert changes(tmp_path / "run") == ([(planned, True)] if planned >= CHANGE else [])
    assert len(waited) == (planned >= CHANGE)
    if waited:
        stopped_and_resumed(tmp_path, soon)


def test_a_run_that_is_resumed_just_before_the_planned_step_changes_over_there(tmp_path, soon):
    soon.setattr(module, "planned_change", lambda run: 9)
    with soon.context() as patch:
        stopping_at(7, patch)
        trained(tmp_path / "run", expected=130)
    trained(tmp_path / "run", resume=True)
    assert changes(tmp_path / "run") == [(9, True)]


@pytest.mark.parametrize(
    ("steps", "threads", "change"), [(2000, 1, 0), (20_000, 1, 1840), (20_000, 2, 0), (40_000, 2, 3669)]
)
def test_the_planned_step_follows_from_the_config_alone(steps, threads, change):
    model = torch.nn.Linear(100, 100)
    config = SimpleNamespace(steps=steps, threads=threads, context_length=123, batch=100)
    assert module.planned_change(SimpleNamespace(config=config, model=model, pace=None)) == change
    config.steps = None
    assert module.planned_change(SimpleNamespace(config=config)) is None


def test_steps_beside_the_compiler_are_not_the_pace(tmp_path, soon):
    paces = []
    soon.setattr(Process, "outcome", None)
    soon.setattr(module.LossCompiler, "__exit__", lambda self, *error: paces.append(len(self.run.pace)))
    trained(tmp_path / "run")
    assert paces == [CHANGE - 2], "without the first step, and those after step 4"


def test_nothing_is_compiled_where_the_time_left_does_not_pay_for_it(tmp_path, soon):
    soon.setattr(module, "GAIN", 0.1)
    with soon.context() as patch:
        patch.setattr(Process, "__init__", lambda self, work: pytest.fail("started"))
        assert "eager" not in trained(tmp_path / "short")
    soon.setattr(module, "COMPILING", 0.0)
    soon.setattr(Process, "outcome", Compiled(20.0, 500.0))
    assert "the loss stays eager: its code takes 500 s to load, and " in trained(tmp_path / "loading")
    assert changes(tmp_path / "loading") == []


ROWS = [{"instruction": f"Count to {n}.", "output": " ".join(map(str, range(n)))} for n in range(2, 60)]


def finetuned(base, folder, rows, **options):
    show, out = display()
    fixed = {"steps": 8, "batch": 4, "rank": 4, "lr": RATE, "dtype": "float32", "threads": 1}
    config = FinetuneConfig(model=str(base), data=str(rows), **fixed | options)
    assert finetune(config, folder, show) == 0
    return out.getvalue().replace("\n", " ")


@pytest.mark.slow
@pytest.mark.parametrize("method", ["lora", "qlora", "full"])
def test_a_finetune_with_accumulated_gradients_changes_over(method, eager, tmp_path, soon):
    rows = tmp_path / "rows.json"
    rows.write_text(json.dumps(ROWS))
    ours, other = tmp_path / "ours", tmp_path / "other"
    finetuned(eager, ours, rows, micro_batch=2, method=method)
    finetuned(eager, other, rows, micro_batch=2, method=method, compile="off")
    assert changes(ours) == [(CHANGE, True)]
    assert losses(ours) == pytest.approx(losses(other), abs=LIMIT)
    assert counters["stats"]["unique_graphs"] == 1


def test_batches_of_another_shape_are_computed_eagerly(soon):
    model = torch.nn.Embedding(9, 9)
    loss = compiled_loss(lambda model, batch: (model(batch).sum(), torch.tensor(1)), "aot_eager")
    trainer = Trainer(model, sgd(model), loss)
    batches = [torch.zeros(n, 3, dtype=torch.long) for n in (2, 2, 3, 2)]
    assert len(list(trainer.run(batches))) == 4
    assert counters["stats"]["unique_graphs"] == 1
    assert why_eager(trainer, batches).startswith("batches differ in length")
    assert why_eager(trainer, batches[:2]) == ""


def built(family, adapted):
    config = FAMILIES[family].Config.from_size(300, 64, 2, 32)
    model = initialise(FAMILIES[family].build(config), 0)
    if adapted:
        attach(model, rank=4, dropout=0.1)
    return model


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # of torch's own, as it imports its compiler
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("family", "adapted"),
    [
        ("arcee", False),
        pytest.param("llama", True, marks=pytest.mark.long),
        pytest.param("mixtral", False, marks=pytest.mark.long),
    ],
)
def test_the_other_process_leaves_the_code_that_this_one_loads(family, adapted, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    torch.compiler.reset()
    batches = torch.randint(300, (5, 4, 33), generator=torch.Generator().manual_seed(0))
    process = module._Process(Work(built(family, adapted), batches[0], torch.float32, torch.get_num_threads()))
    while (outcome := process.result()) is None:
        process._process.wait()
    assert isinstance(outcome, Compiled), outcome
    assert outcome.loading < outcome.seconds
    counters.clear()
    steps = []
    for loss in (next_token_loss, compiled_loss(next_token_loss)):
        model = built(family, adapted)
        trainer = Trainer(model, sgd(model, 0.1), loss)
        trainer.deterministic = loss is not next_token_loss
        steps.append([step.loss for step in trainer.run(batches)])
    assert steps[0] == pytest.approx(steps[1], abs=LIMIT)
    assert counters["inductor"]["fxgraph_cache_hit"] == 2, "forward and backward"
    assert counters["inductor"]["fxgraph_cache_miss"] == 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # of torch's own, as it imports its compiler
@pytest.mark.timeout(900)
def test_a_run_changes_over_to_inductors_code(tmp_path, monkeypatch):
    torch.compiler.reset()
    counters.clear()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "GAIN", math.inf)
    monkeypatch.setattr(module, "planned_change", lambda run: None)
    real = module._Process.result
    monkeypatch.setattr(module._Process, "result", lambda self: (self._process.wait(), real(self))[1])
    said = trained(tmp_path / "ours", steps=40, size="2x64")
    assert "the loss is compiled: " in said or "the loss is eager again: compiled it takes " in said
    assert counters["inductor"]["fxgraph_cache_miss"] == 0, "the other process left this code"
    trained(tmp_path / "eager", steps=40, size="2x64", compile="off")
    assert losses(tmp_path / "ours") == pytest.approx(losses(tmp_path / "eager"), abs=LIMIT)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # of torch's own, as it imports its compiler
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("llama", torch.float32),
        pytest.param("llama", torch.bfloat16, marks=pytest.mark.long),
        pytest.param("mixtral", torch.float32, marks=pytest.mark.long),
    ],
)
def test_gradients_of_two_threads_have_the_same_bits(family, dtype):
    torch.compiler.reset()
    torch.set_num_threads(2)
    trainer = Trainer(model := built(family, False), sgd(model), compiled_loss(next_token_loss), dtype=dtype)
    trainer.deterministic = True
    batch, seen = torch.randint(300, (64, 33), generator=torch.Generator().manual_seed(0)), set()
    with module.tree.mode(model, True):
        for _ in range(20):
            trainer.gradients([batch])
            seen.add(b"".join(p.grad.numpy().tobytes() for p in model.parameters()))
    assert len(seen) == 1


def test_a_child_has_the_modules_of_its_parent_and_not_of_the_working_directory(tmp_path, monkeypatch):
    (tmp_path / "json.py").write_text("raise SystemExit(7)")
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "beside.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path / "own")
    command, environment = python_command("-c", "import json, beside")
    assert subprocess.run(command, env=environment, cwd=tmp_path).returncode == 0


def test_the_other_process_ends_when_its_parent_does(monkeypatch):
    ended, parents = [], iter([7, 7, 1])
    monkeypatch.setattr(os, "getppid", lambda: next(parents))
    monkeypatch.setattr(os, "killpg", lambda *arguments: ended.append(arguments))
    module._end_with(7, interval=0.0)
    assert ended == [(0, signal.SIGKILL)]
    assert next(parents, None) is None


ORPHAN = """
import os, torch
from dunes.runs import compiled_loss as module
module.COMMAND = (
    "import time; from dunes.runs import compiled_loss as module\\n"
    "module._compile = lambda work: time.sleep(100)\\nmodule.compile_for_parent()"
)
process = module._Process(module.Work(torch.nn.Linear(2, 2), torch.zeros(1), torch.float32, 1))
print(process._process.pid, flush=True)
os.kill(os.getpid(), 9)
"""


@pytest.mark.slow
def test_a_killed_run_leaves_no_compiler():
    done = subprocess.run([sys.executable, "-c", ORPHAN], stdout=subprocess.PIPE)
    assert done.returncode == -signal.SIGKILL
    for _ in range(300):
        if not _runs(int(done.stdout)):
            return
        time.sleep(0.1)
    pytest.fail("it goes on")


def _runs(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_process_that_is_stopped_leaves_nothing(tmp_path):
    process = module._Process(Work(torch.nn.Linear(2, 2), torch.zeros(1), torch.float32, 1))
    assert process.result() is None
    process.stop()
    assert process._process.poll() is not None
    with pytest.raises(AttributeError, match="local object"):
        module._Process(Work(torch.nn.Linear(2, 2), lambda: 0, torch.float32, 1))
