"""A run's loss compiled while the run trains. https://docs.pytorch.org/docs/stable/torch.compiler.html

The run begins eagerly. Another process compiles the loss of a model of the same structure, and leaves the code in
Inductor's cache, from which this process loads it in seconds. A low priority would take as much of the run's time,
since its threads wait for each other, and end later. The run changes over where the time that its steps still take
times `GAIN` is more than what is left to do: at first all of the compiling, then the loading, as that process
measured it. It changes back if steps do not become faster. The step of the change depends on the clock, so it is a
record of the training state, as those of the schedule are. A run of so many steps does not look at the clock: it
changes over at a step that follows from its options, so that the same command has the same losses. The other
process ends with the run, however that ends.
"""

import json
import os
import pickle
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from math import ceil
from statistics import median
from tempfile import TemporaryFile
from threading import Thread
from time import perf_counter, sleep, thread_time
from types import TracebackType
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from dunes import measure, tree
from dunes.runs.autosize import flops
from dunes.runs.child_process import python_command
from dunes.runs.memory import next_token_loss
from dunes.runs.run import Run, append_metrics
from dunes.runs.step_package import has_compiler
from dunes.train import Step, Trainer
from dunes.train.loss import Loss
from dunes.units import format_seconds

GAIN, COMPILING = 0.15, 45.0
"""What a compiled loss saves of a step, and seconds of the run that compiling takes, before they are measured."""

TIMED = 10
"""Steps of either form that are compared."""

NOMINAL = 30e9
"""FLOP/s of a thread by which the step is chosen at which a run of so many steps changes over."""

HUNG = 1800.0
"""Seconds after which a run of so many steps stops waiting for the compiler."""

PATIENCE = 2.0
"""The run stops compiling that takes this many times as long as the code is expected to save."""

COMPILER_BYTES = 0.7e9
"""What must be free for the other process, besides the memory of the run itself, whose steps it makes."""

INDICES = 1 << 16
"""Integers that may be indices, which are copied; more of them are codes of quantized weights."""

COMMAND = "from dunes.runs.compiled_loss import compile_for_parent; compile_for_parent()"


class Work(NamedTuple):
    """What the other process compiles: the loss of this model on batches such as this one."""

    model: nn.Module
    batch: Any
    dtype: torch.dtype
    threads: int


class Compiled(NamedTuple):
    """What it took: `seconds` in all, and seconds of processor time to load the code from the cache."""

    seconds: float
    loading: float


class LossCompiler:
    """`with LossCompiler(run, line, detail) as compiler:` then `compiler.after(step)` after each step.

    `compiler.batches(stream)` are the run's batches. `line` gets a line for each change, `detail` the reason where
    there is none.
    """

    def __init__(
        self, run: Run, line: Callable[[str], object], detail: Callable[[str], object], backend: str = "inductor"
    ) -> None:
        self.run, self.line, self.detail, self.backend = run, line, detail, backend
        self.eager = self._form = run.trainer.loss
        self.seconds = deque[float](maxlen=TIMED)
        self._samples = list[Any]()
        self._process: _Process | None = None
        self._planned = planned_change(run)
        self._next: Callable[[], object] | None = self._begin

    @property
    def running(self) -> bool:
        """Whether the other process shares the processor with the run."""
        return self._next == self._change_over

    def __enter__(self) -> Self:
        if self.run.config.compile == "off" or self.run.compiled is not None:
            self._next = None
        if self.run.config.compile == "auto" and self.run.compiled:
            self.line("compiling the loss before the first step: it was compiled when this state was saved")
            self._use_compiled()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._set_loss(self.eager, False)
        if self._process is not None:
            self._process.stop()

    def batches(self, stream: Iterable[Any]) -> Iterator[Any]:
        """The stream; the first batches are kept as samples until compiling begins."""
        for batch in stream:
            if self._next == self._begin:
                self._samples.append(batch)
            yield batch

    def after(self, step: Step) -> bool:
        """Do what is due after this step; returns whether the loss has another form than after the one before."""
        self.seconds.append(step.seconds)
        if self._next is not None:
            self._next()
        form, self._form = self._form, self.run.trainer.loss
        return self._form != form

    def _savings(self) -> float:
        """Seconds that a compiled loss is expected to save until the time limit."""
        return self.run.seconds_left * GAIN

    def _begin(self) -> None:
        due = bool(self._planned) and self.run.trainer.number == self._planned  # resumed just before the change
        if len(self.seconds) < TIMED and not due:
            return
        samples, self._samples, self._next = self._samples, [], None
        self.before = median(self.seconds)  # later steps share the processor with the compiler
        savings = self._savings()
        if not savings > COMPILING if self._planned is None else self.run.trainer.number > self._planned:
            return
        if reason := self._start(samples):
            (self.detail if self._planned is None else self.line)(f"the loss stays eager: {reason}")
            return
        self.detail("compiling the loss in another process; until it is done, steps take longer")
        self._deadline = perf_counter() + (PATIENCE * savings if self._planned is None else HUNG)
        self._next = self._change_over
        if due:
            self._change_over()

    def _start(self, samples: list[Any]) -> str:
        """Start the other process; the result is the reason if there is none."""
        trainer = self.run.trainer
        try:
            if reason := why_eager(trainer, samples):
                return reason
            self._process = _Process(Work(trainer.model, samples[0], trainer.dtype, torch.get_num_threads()))
        except Exception as error:  # whatever a user's own modules raise when they are pickled
            return _first_line(error)
        return ""

    def _change_over(self) -> None:
        assert self._process is not None, "started by _begin"
        if self._planned is not None:
            if self.run.trainer.number < self._planned:
                return
            self._process.wait(self._deadline - perf_counter())
        result = self._process.result()
        if result is None and perf_counter() < self._deadline:
            return
        self._next = None
        if result is None:
            self._process.stop()
            self.line("the loss stays eager: compiling it takes longer than it would save")
        elif isinstance(result, str):
            self.line(f"the loss stays eager: compiling it failed: {result}")
        elif self._planned is None and not self._savings() > result.loading:
            left = format_seconds(round(self.run.seconds_left))
            self.detail(
                f"the loss stays eager: its code takes {result.loading:.0f} s to load, and {left} are left"
            )
        else:
            self.result = result
            self._use_compiled()
            self._next = self._after_loading

    def _after_loading(self) -> None:
        self._loading = self.seconds[-1]
        self.seconds.clear()
        self._next = self._compare

    def _compare(self) -> None:
        if len(self.seconds) < TIMED:
            return
        own, self._next = median(self.seconds), None
        times = f"{1e3 * own:.0f} ms a step against {1e3 * self.before:.0f} eager"
        if own >= self.before and self._planned is None:
            self._use_eager(f"the loss is eager again: compiled it takes {times}")
            return
        took = f"{self.result.seconds:.0f} s of compiling beside training, {self._loading:.1f} s of loading"
        self.line(f"the loss is compiled: {times}, after {took}")

    def _use_compiled(self) -> None:
        self._set_loss(self._attempt(), True)
        self._record(True)

    def _use_eager(self, reason: str) -> None:
        self._set_loss(self.eager, False)
        self._next = None
        self.line(reason)
        self._record(False)

    def _set_loss(self, loss: Loss, compiled: bool) -> None:
        """Compiled code is deterministic: Inductor's own would add to gradients in the order of its threads."""
        self.run.trainer.loss, self.run.trainer.deterministic = loss, compiled

    def _record(self, compiled: bool) -> None:
        self.run.compiled, self.run.warm = compiled, False  # the next step loads code
        append_metrics(self.run.folder, {"step": self.run.trainer.number, "compiled": compiled})

    def _attempt(self) -> Loss:
        """The compiled loss, or the eager one from the first call that fails on."""
        compiled: Loss | None = None

        def loss(model: nn.Module, batch: Any) -> Any:
            nonlocal compiled
            try:
                # Here, since importing the compiler may fail, too: it makes the folder of its cache.
                compiled = compiled or compiled_loss(self.eager, self.backend)
                return compiled(model, batch)
            except Exception as error:  # whatever the compiler meets; an error of the loss comes again
                self._use_eager(f"the loss is eager again: {_first_line(error)}")
                return self.eager(model, batch)

        return loss


def planned_change(run: Run) -> int | None:
    """The step after which a run of so many steps has a compiled loss; 0 if it is too short for that.

    A function of the config, as if the machine had a nominal speed: the clock would make each run another one.
    None for a run that ends by the clock.
    """
    config = run.config
    if not config.steps:
        return None
    work = flops(run.model, config.context_length) * config.batch * config.context_length
    seconds = work / (NOMINAL * (config.threads or 1))
    change = TIMED + ceil(COMPILING / seconds)
    return change if (config.steps - change) * seconds * GAIN > COMPILING else 0


def why_eager(trainer: Trainer, samples: list[Any]) -> str:
    """Why the loss of these batches is not compiled; empty if it can be."""
    if trainer.device.type != "cpu" or trainer.ranks > 1:
        return f"compiling it beside training was not built for {trainer.device.type}, {trainer.ranks} ranks"
    if len({_shapes(batch) for batch in samples}) > 1:
        return "batches differ in length, and each length would be compiled anew"
    if not has_compiler():
        return "no C++ compiler; install g++"
    needed = COMPILER_BYTES + measure.peak_memory(trainer.device)
    if 0 < (free := measure.free_memory(trainer.device)) < needed:
        return f"compiling takes up to {needed / 1e9:.1f} GB of memory, and {free / 1e9:.1f} are free"
    return ""


def _shapes(batch: Any) -> tuple[torch.Size, ...]:
    return tuple(t.shape for t in ([batch] if isinstance(batch, Tensor) else batch))


def compiled_loss(loss: Loss, backend: str = "inductor") -> Loss:
    """The loss as one compiled graph.

    Random numbers are the eager loss's, but for dropout in packed rows, whose padding that one leaves out.
    It is compiled for the first batch; what needs another graph, such as another length, is computed eagerly.
    """
    options: dict[str, Any] | None = {"fallback_random": True} if backend == "inductor" else None
    fast = torch.compile(loss, fullgraph=True, dynamic=False, backend=backend, options=options)
    stances = iter(["default"])

    def call(model: nn.Module, batch: Any) -> Any:
        with torch.compiler.set_stance(next(stances, "eager_on_recompile")):
            return fast(model, batch)

    return call


class _Process:
    """The process that compiles. Work and result are in files, so that neither side waits for the other."""

    def __init__(self, work: Work) -> None:
        with TemporaryFile() as payload:
            _Pickler(payload).dump(work)
            payload.seek(0)
            self._output = TemporaryFile()  # noqa: SIM115  (read and closed when the process has ended)
            command, environment = python_command("-c", COMMAND, str(os.getpid()))
            self._process = subprocess.Popen(
                command,
                stdin=payload,
                stdout=self._output,
                stderr=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,
            )

    def result(self) -> Compiled | str | None:
        """What it took, or in a line why it failed; None while the process runs."""
        if self._process.poll() is None:
            return None
        self._output.seek(0)
        lines = self._output.read().decode(errors="replace").splitlines()
        self._output.close()
        if self._process.returncode or not lines:
            return f"the compiling process ended with status {self._process.returncode}"
        record = json.loads(lines[-1])
        return record["error"] if "error" in record else Compiled(**record)

    def wait(self, seconds: float) -> None:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(max(0.0, seconds))

    def stop(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)  # with the C++ compilers that it started
            self._process.wait()
        self._output.close()


def compile_for_parent() -> None:
    """Compile the `Work` on standard input, and print a `Compiled` or {"error": ...} as JSON.

    The parent's process id is the first argument.
    """
    Thread(target=_end_with, args=(int(sys.argv[1]),), daemon=True).start()
    try:
        record = _compile(pickle.load(sys.stdin.buffer))._asdict()
    except Exception as error:  # whatever the compiler meets
        record = {"error": _first_line(error)}
    print(f"\n{json.dumps(record)}", flush=True)


def _end_with(parent: int, interval: float = 1.0) -> None:
    """End this process, with the C++ compilers that it started, when its parent has ended without a word."""
    while os.getppid() == parent:
        sleep(interval)
    os.killpg(0, signal.SIGKILL)


def _compile(work: Work) -> Compiled:
    start, imports = perf_counter(), thread_time()
    import torch._inductor.compile_fx  # a second that the parent will take, too

    imports = thread_time() - imports
    torch._inductor.config.compile_threads = 1
    torch.set_num_threads(work.threads)
    measure.flush_denormals()
    optimizer = torch.optim.SGD(work.model.parameters(), 0.0)
    for _ in range(2):  # the second time from the cache, as the parent will
        torch.compiler.reset()
        trainer = Trainer(work.model, optimizer, compiled_loss(next_token_loss), dtype=work.dtype)
        trainer.deterministic, own = True, thread_time()
        with tree.mode(work.model, True):
            trainer.gradients([work.batch])
        own = thread_time() - own
    return Compiled(perf_counter() - start, imports + own)


class _Pickler(pickle.Pickler):
    """Pickles the structure of a model: its tensors are made anew, but for few integers, which may be indices."""

    def __init__(self, file: Any) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, Tensor) or not (obj.is_floating_point() or obj.numel() > INDICES):
            return NotImplemented
        layout = tuple(obj.shape), obj.stride(), obj.dtype
        return _new_tensor, (*layout, obj.requires_grad, isinstance(obj, nn.Parameter))


def _new_tensor(
    shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, grad: bool, parameter: bool
) -> Tensor:
    t = torch.empty_strided(shape, stride, dtype=dtype).fill_(0.01 if dtype.is_floating_point else 0)
    return nn.Parameter(t, grad) if parameter else t.requires_grad_(grad)


def _first_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
