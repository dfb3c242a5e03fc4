"""`dunes bench ...`: one command per registered benchmark, and commands that compare and plot the results."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import tyro

from dunes import measure
from dunes.bench import BENCHMARKS
from dunes.bench.runner import Request, Shapes
from dunes.cli.command import with_trust
from dunes.files.atomic import write_file
from dunes.flags import flag
from dunes.progress import print_table

ABOUT = """Benchmark time and memory, profile, compare and plot.

Example: dunes bench train --size 1m 3m"""

Json = Annotated[bool, tyro.conf.arg(name="json", help="Print one JSON document instead of text.")]


def _print(print_text: Callable[[], None], record: Any, as_json: bool) -> None:
    """Print the record as JSON if `as_json`; otherwise call `print_text`."""
    if as_json:
        print(json.dumps(record))
    else:
        print_text()


def commands() -> dict[str, Callable[..., Any]]:
    """The subcommands of `dunes bench`, by name. Also prepares this process for measurements."""
    measure.keep_freed_memory()
    measure.flush_denormals()
    benchmarks = {name: _benchmark_command(name, b.about) for name, b in BENCHMARKS.items()}
    of_models = {name: with_trust(command) for name, command in (benchmarks | {"memory": memory}).items()}
    return of_models | {"compare": compare, "plot": plot}


def _benchmark_command(name: str, about: str) -> Callable[..., int]:
    """The command that runs the benchmark `name`."""

    def command(
        model: Request,
        *,
        rounds: Annotated[int | None, flag("ROUNDS", "10")] = None,
        out: Annotated[Path | None, flag("FILE", "runs/bench/...")] = None,
        by_module: bool = False,
        picture: Annotated[Path | None, flag("FILE", "none")] = None,
        as_json: Json = False,
    ) -> int:
        """"""
        if picture and not (by_module and picture.suffix == ".svg"):
            raise ValueError(f"--picture {picture}: expected a name like time.svg, and --by-module")
        if by_module and (rounds is not None or out):
            raise ValueError("--by-module profiles a single run; omit --rounds and --out")
        if by_module:
            return _by_module(name, model, picture, as_json)
        return _race(name, model, 10 if rounds is None else rounds, out, as_json)

    command.__doc__ = f"""{about}

    Several models, sizes, batch sizes, ... are timed in alternation in one run.

    Example: dunes bench {name} --size 1m 3m 10m

    Args:
        rounds: Number of timed rounds.
        out: Output file for all measurements, .jsonl.
        by_module: Profile one run instead, by module and by operation.
        picture: Output file for a plot of the profile by module, .svg.
    """
    return command


def _race(name: str, request: Any, rounds: int, out: Path | None, as_json: bool) -> int:
    from rich.console import Console

    from dunes.bench import rows, runner, table
    from dunes.progress import Display, shown_by

    file, status = out or runner.default_path(name), 0
    try:
        with Display(Console(stderr=True, highlight=False)) as display, shown_by(display.state):
            laps = runner.bench(name, request, rounds, file)
    except KeyboardInterrupt:
        file, status = file.with_suffix(".jsonl"), 130
        if not file.exists():
            raise
        laps = rows.read_rows(file)
        print("interrupted; results so far:", file=sys.stderr)
    results = rows.summaries(laps)

    def print_text() -> None:
        print_table(*table.summary_table(results))
        print(f"measurements: {file}   compare: dunes bench compare {file} OTHER   plot: dunes bench plot {file}")

    _print(print_text, {"file": str(file), "results": results}, as_json)
    return status


def _by_module(name: str, request: Any, picture: Path | None, as_json: bool) -> int:
    import torch

    from dunes.bench import BENCHMARKS, runner, table
    from dunes.bench.profile_modules import flame, profile_work

    cases = runner.cases(name, request)
    if len(cases) > 1:
        raise ValueError(f"--by-module profiles one setting, not {len(cases)}; give each option one value")
    torch.set_num_threads(cases[0].setting.threads)
    work = BENCHMARKS[name].make(cases[0].subject, cases[0].setting)
    if work.model is None:
        raise ValueError(f"--by-module: dunes bench {name} runs no model")
    report, overhead = profile_work(work)
    record = {"benchmark": name, "subject": cases[0].subject.name, **report.record(), "overhead": overhead}
    if picture:
        write_file(picture, flame(record).encode())
    _print(lambda: table.print_times(report, overhead), record, as_json)
    return 0


def compare(
    a: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="A")],
    b: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="B")],
    *,
    confidence: float = 0.99,
    as_json: Json = False,
) -> int:
    """Compare two files of measurements, and mark significant differences.

    Example: dunes bench compare before.jsonl after.jsonl

    Args:
        a: A file written by `dunes bench`.
        b: A second file, measured after a change or on another machine.
        confidence: Confidence level of the intervals.
    """
    from dunes.bench import rows, table
    from dunes.bench.compare import compare as compare_rows

    comparison = compare_rows(rows.read_rows(a), rows.read_rows(b), confidence)
    _print(lambda: table.print_comparison(comparison, confidence), comparison.record(), as_json)
    return 0


def plot(
    paths: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="PATH")],
    out: Path = Path("runs/bench"),
    as_json: Json = False,
) -> int:
    """Plot measurements over size and settings; `dunes studio` shows losses of training runs over one another.

    Example: dunes bench plot runs/bench/train.jsonl

    Args:
        paths: Files of measurements.
        out: Output folder for the plots.
    """
    from dunes.bench import plot as plots
    from dunes.bench import rows

    if not paths or any(path.is_dir() for path in paths):
        raise ValueError("expected files of measurements; for folders of training runs: dunes studio FOLDER")
    laps = [row for p in paths for row in rows.read_rows(p)]
    by_benchmark = {row["benchmark"]: [r for r in laps if r["benchmark"] == row["benchmark"]] for row in laps}
    plotted = [path for rows_of_one in by_benchmark.values() for path in plots.draw_all(rows_of_one, out)]
    _print(lambda: print(*plotted, sep="\n"), {"pictures": [*map(str, plotted)]}, as_json)
    return 0


def memory(
    model: Shapes,
    *,
    checkpointing: bool = False,
    inference: bool = False,
    check: bool = False,
    picture: Annotated[Path | None, flag("FILE", "none")] = None,
    as_json: Json = False,
) -> int:
    """Estimate the memory of a training step, by kind of tensor, module and phase.

    The step runs on fake tensors and allocates nothing. If options have several values, all combinations are
    compared.

    Example: dunes bench memory --size 40m --batch 8 16 --check

    Args:
        checkpointing: Use activation checkpointing in each block.
        inference: Estimate the memory for a prompt and one generated token instead of a training step.
        check: Also run the step, and report the memory allocated by the step and by the process.
        picture: Output file for a plot of the memory over the step, .svg (of the first setting).
    """
    if picture and picture.suffix != ".svg":
        raise ValueError(f"--picture {picture}: expected a name like memory.svg")
    from dunes.bench import runner, table
    from dunes.bench import step_memory as estimator

    defaults = {"batches": model.batches or (16,), "dtypes": model.dtypes or ("float32",), "threads": (1,)}
    pairs = runner.subjects_with_settings("prefill" if inference else "train", Request(**vars(model) | defaults))
    estimates = [estimator.estimate_memory(*pair, checkpointing, inference) for pair in pairs]
    measurements = [e.measure() if check else None for e in estimates]

    def print_text() -> None:
        if len(estimates) == 1:
            table.print_memory(estimates[0].log)
            print()
        table.print_estimates(estimates, measurements)

    if picture:
        write_file(picture, measure.memory_curves(estimates[0].log.over_time()).encode())
    results = [e.record(m) for e, m in zip(estimates, measurements, strict=True)]
    _print(print_text, {"benchmark": "memory", "results": results}, as_json)
    return 0
