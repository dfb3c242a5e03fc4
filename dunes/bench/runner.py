"""Run a benchmark for several settings: first estimate the memory, then time laps, and append each lap to a file.

Workloads are timed in alternation, so that a drift of the machine's speed affects all workloads equally.
"""

import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from time import perf_counter
from typing import Annotated

import torch
import tyro

from dunes import __version__, measure, tree
from dunes.bench import rows
from dunes.bench.benchmarks import BENCHMARKS, Benchmark
from dunes.bench.subject import Setting, Subject, Work, of_folder, of_shape
from dunes.files.json_file import append_record
from dunes.flags import flag
from dunes.progress import report
from dunes.runs.memory import Shape, train_allocations
from dunes.runs.train_config import parse_size
from dunes.units import format_bytes, format_seconds

FRAGMENTS = 1.5
"""Upper bound of the ratio of a process's growth to the size of its tensors. Because of fragmentation, the ratio
is above 1 (docs/log/training.md, "The estimate of memory is a step on tensors without data")."""

LEAST = 0.2
"""Minimum duration of a lap in seconds; a shorter workload is run several times per lap."""

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Shapes:  # each field lists the values to measure; () selects its default
    models: Annotated[tuple[Path, ...], tyro.conf.Positional, flag("MODEL", "none")] = ()
    """Model folders."""
    sizes: Annotated[tuple[str, ...], flag("SIZE", "none", name="size")] = ()
    """Numbers of parameters of randomly initialised models, like 500k or 3m."""
    families: Annotated[tuple[str, ...], flag("FAMILY", "arcee", name="family")] = ("arcee",)
    """Architectures of the randomly initialised models."""
    batches: Annotated[tuple[int, ...], flag("SEQUENCES", "16 in train, score, memory; else 1", name="batch")] = ()
    """Batch sizes."""
    contexts: Annotated[
        tuple[int, ...], flag("TOKENS", "the model's; 256 with --size", name="context-length")
    ] = ()
    """Sequence lengths in tokens."""
    dtypes: Annotated[
        tuple[str, ...], flag("DTYPE", "measured for train and score, else float32", name="dtype")
    ] = ()
    """Dtypes of matrix products, like float32 or bfloat16."""


@dataclass(frozen=True)
class Request(Shapes):  # all combinations of the fields' values are measured
    threads: Annotated[tuple[int, ...], flag("THREADS", "measured")] = ()
    """Numbers of threads."""
    compile: bool = False
    """With decode: first compile missing native code (one to five minutes per model shape)."""


@dataclass(frozen=True)
class Case:
    """A case to time: a model with a setting.

    Sizes are in bytes: `bytes` is the size of the weights, `resident` is the memory between runs, and `peak` is
    the estimated peak memory (None if unknown).
    """

    subject: Subject
    setting: Setting
    parameters: int
    bytes: int
    resident: int
    peak: int | None


def cases(name: str, request: Request) -> list[Case]:
    """All cases of a request, with their estimated memory. Raises ValueError for settings that the model or
    machine does not support."""
    benchmark = BENCHMARKS[name]
    results = [_case(benchmark, *pair) for pair in subjects_with_settings(name, request)]
    _check_memory(results)
    return results


def subjects_with_settings(name: str, request: Request) -> list[tuple[Subject, Setting]]:
    """All pairs of a model and a setting of the request. Raises ValueError for invalid settings."""
    counts = {"batch": request.batches, "context-length": request.contexts, "threads": request.threads}
    for option, values in counts.items():
        if min(values, default=1) < 1:
            raise ValueError(f"--{option} must be at least 1, not {min(values)}")
    options = {"batch": request.batches, "context-length": request.contexts, "dtype": request.dtypes}
    options["compile"] = (True,) if request.compile else ()
    if unused := [option for option, values in options.items() if values and option not in BENCHMARKS[name].reads]:
        raise ValueError(f"--{unused[0]} has no effect on {name}; leave it out")
    if not request.models and not request.sizes:
        raise ValueError("nothing to measure; pass a model folder, or a shape such as --size 3m")
    if invalid := [d for d in request.dtypes if d not in DTYPES]:
        raise ValueError(f"--dtype is {invalid[0]!r}; it must be one of {', '.join(DTYPES)}")
    subjects, results = [*_subjects(request)], []  # first: an invalid model raises before slow measurements
    dtypes_and_threads = _dtypes_and_threads(name, request)
    for subject in subjects:
        contexts = request.contexts or (subject.context,)
        if (most := max(contexts)) > subject.context:
            words = f"was made for {subject.context} tokens; --context-length {most} is more"
            raise ValueError(f"{subject.name}: {words}")
        settings = itertools.product(request.batches or (BENCHMARKS[name].batch,), contexts, *dtypes_and_threads)
        results += [(subject, Setting(*setting, request.compile)) for setting in settings]
    return results


def _dtypes_and_threads(name: str, request: Request) -> tuple[Sequence[str], Sequence[int]]:
    """The dtypes and numbers of threads of a request; by default, the values chosen for this machine."""
    dtype = torch.float32
    if name in ("train", "score") and not request.dtypes:  # as in `dunes train` and `dunes eval`
        dtype = measure.choose_dtype(measure.device())
    dtypes = request.dtypes or (str(dtype).removeprefix("torch."),)
    return dtypes, request.threads or (measure.choose_threads(),)


def _subjects(request: Request) -> Iterator[Subject]:
    yield from map(of_folder, request.models)
    longest = max(request.contexts, default=0)
    for family, size in itertools.product(request.families, request.sizes):
        yield of_shape(family, parse_size(size), longest) if longest else of_shape(family, parse_size(size))


def _case(benchmark: Benchmark, subject: Subject, setting: Setting) -> Case:
    with torch.device("meta"):
        model = subject.outline()
    parameters = tree.count(model)
    dtype = torch.float32 if benchmark.memory is train_allocations else getattr(torch, setting.dtype)
    tensors = (*model.parameters(), *model.buffers())
    size = sum(t.numel() * (dtype if t.is_floating_point() else t.dtype).itemsize for t in tensors)
    if benchmark.memory is None:
        return Case(subject, setting, parameters, size, size, None)
    shape = Shape(setting.batch, setting.context, getattr(torch, setting.dtype))
    log = benchmark.memory(subject.outline, shape)
    return Case(subject, setting, parameters, size, log.live[0], log.peak)


def _check_memory(results: Sequence[Case]) -> None:
    """Raise ValueError unless free memory suffices to hold all models and to run the one that needs most
    additional memory."""
    need = FRAGMENTS * (sum(c.resident for c in results) + max((c.peak or 0) - c.resident for c in results))
    if (free := measure.free_memory(measure.device())) and need > free:
        raise ValueError(
            f"this needs about {format_bytes(need)}, but {format_bytes(free)} are free; choose a smaller model, "
            "--batch or --context-length, or measure fewer values at once"
        )


@dataclass(frozen=True)
class Lap:
    """One timing of a workload: mean seconds per run over `runs` runs, and seconds to the first token."""

    name: str
    round: int
    seconds: float
    runs: int
    first_token: float | None = None


def race(
    works: Mapping[str, Work],
    rounds: int,
    *,
    before: Callable[[str], object] = lambda name: None,
    least: float = LEAST,
    clock: Callable[[], float] = perf_counter,
) -> Iterator[Lap]:
    """Time all workloads in turn; yields `rounds` laps of each workload, in the order A B, then B A, then A B.

    The alternating order cancels a steady drift of the machine's speed when two workloads are compared. First,
    each workload runs twice without yielding a lap. These runs load kernels, and determine the number of runs per
    lap. `before(name)` is called before each lap, and is not timed.
    """
    runs = {}
    for name, work in works.items():
        before(name)
        first, _ = [_time(work, 1, clock) for _ in range(2)][1]
        runs[name] = max(1, round(least / max(first, 1e-9)))
    for number in range(rounds):
        for name in works if number % 2 == 0 else reversed(list(works)):
            before(name)
            seconds, first_token = _time(works[name], runs[name], clock)
            yield Lap(name, number, seconds, runs[name], first_token)


def _time(work: Work, runs: int, clock: Callable[[], float]) -> tuple[float, float | None]:
    """Mean seconds of `work.run`, and of `work.run` followed by `work.then` (None without `then`). The setup is
    not timed."""
    total = extended = 0.0
    for _ in range(runs):
        state = work.setup()
        start = clock()
        result = work.run(state)
        measure.synchronize(measure.device())
        total += clock() - start
        if work.then is not None:
            work.then(result)
            measure.synchronize(measure.device())
            extended += clock() - start
    return total / runs, None if work.then is None else extended / runs


def bench(name: str, request: Request, rounds: int, out: Path, least: float = LEAST) -> list[rows.Row]:
    """Time the cases of a request in turn, and append a row to `out` after each lap; returns the rows.

    Shows the phase, the fraction of laps done, and an estimate of the remaining time. Raises ValueError for an
    invalid request, before any timing.
    """
    if rounds < 1:
        raise ValueError(f"--rounds is {rounds}; expected at least 1")
    if os.path.lexists(out):
        raise ValueError(f"{out}: already exists; choose another --out")
    report(f"{name}: estimating memory, choosing threads", 0.0)
    numbered, works = {f"{number}": c for number, c in enumerate(cases(name, request))}, dict[str, Work]()
    for n, c in numbered.items():
        compiles = ", and compiling its decoding unless cached" if c.setting.compile else ""
        report(f"{name}: building {c.subject.name}{compiles} ({len(works) + 1} of {len(numbered)})", 0.0)
        works[n] = BENCHMARKS[name].make(c.subject, c.setting)
    machine = {"commit": rows.source_commit(), "dunes": __version__, **measure.fingerprint()}
    ceilings, results = Ceilings(), list[rows.Row]()
    out.parent.mkdir(parents=True, exist_ok=True)
    report(f"{name}: warming up", 0.0)
    start, laps = perf_counter(), rounds * len(works)
    before = lambda n: torch.set_num_threads(numbered[n].setting.threads)
    for lap in race(works, rounds, before=before, least=least):
        row = _row(name, numbered[lap.name], works[lap.name], lap, ceilings) | machine
        append_record(out, row)
        results.append(row)
        # The warm-up counts as one round, since it takes about as long.
        remaining = (perf_counter() - start) / (len(works) + len(results)) * (laps - len(results))
        words = f"{name} round {lap.round + 1} of {rounds}, {format_seconds(round(remaining))} left"
        report(words, len(results) / laps)
    return results


class Ceilings:
    """The machine's rates of matrix products and of memory reads, measured once per round. `read` returns the
    highest rate measured so far."""

    def __init__(self) -> None:
        self.matmul = cache(self._matmul)
        self._read = cache(lambda size, threads, round: measure.read_rate(measure.device(), size, 0.1))

    def _matmul(self, dtype: str, threads: int, round: int) -> float:
        """FLOP/s of matrix products in `dtype` or in float32, whichever is faster; measured once per round."""
        return max(measure.matmul_rate(getattr(torch, d), measure.device()) for d in {dtype, "float32"})

    def read(self, size: int, threads: int, round: int) -> float:
        """The highest rate so far, in bytes/s, of reading `size` bytes; measured once per round."""
        return max(self._read(size, threads, number) for number in range(round + 1))


def _row(name: str, c: Case, work: Work, lap: Lap, ceilings: Ceilings) -> rows.Row:
    matmul = ceilings.matmul(c.setting.dtype, c.setting.threads, lap.round)
    read = ceilings.read(c.bytes, c.setting.threads, lap.round)
    dtype, device = getattr(torch, c.setting.dtype), measure.device()
    mfu = measure.model_flops_utilization(work.flops, lap.seconds, dtype, device) if work.flops else None
    return {
        "benchmark": name,
        "subject": c.subject.name,
        "family": c.subject.family,
        "parameters": c.parameters,
        **asdict(c.setting),
        "device": measure.device().type,
        "form": work.form,
        **{name: getattr(lap, name) for name in ("round", "seconds", "runs", "first_token")},
        **{name: getattr(work, name) for name in ("amount", "unit", "flops", "bytes")},
        "matmul": matmul,
        "read": read,
        "flop_share": mfu,
        "byte_share": work.bytes / lap.seconds / read if work.bytes else None,
        "peak_bytes": c.peak,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def default_path(name: str) -> Path:
    """The default path of a benchmark's file of rows, with the current time."""
    return Path("runs", "bench", f"{name}-{datetime.now():%Y%m%d-%H%M%S}.jsonl")
