"""`dunes bench ...`: one command for each registered benchmark, and those that look at what was measured."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import tyro

from dunes.cli.verbs import _open

Paths = Annotated[tuple[Path, ...], tyro.conf.Positional]


def verbs() -> dict[str, Callable[..., Any]]:
    """The commands below `dunes bench`."""
    from dunes.bench import BENCHMARKS

    return {name: _named(name, b.about) for name, b in BENCHMARKS.items()} | {
        "compare": compare,
        "memory": memory,
    }


def _named(name: str, about: str) -> Callable[..., int]:
    """The command of one benchmark."""

    def command(
        models: Annotated[Paths, _open("MODEL", "none")] = (),
        *,
        size: Annotated[tuple[str, ...], _open("SIZE", "none")] = (),
        family: Annotated[tuple[str, ...], _open("FAMILY", "arcee")] = ("arcee",),
        batch: Annotated[tuple[int, ...], _open("WINDOWS", "usual for it")] = (),
        context: Annotated[tuple[int, ...], _open("TOKENS", "the model's")] = (),
        dtype: Annotated[tuple[str, ...], _open("DTYPE", "usual for it")] = (),
        threads: Annotated[tuple[int, ...], _open("THREADS", "measured")] = (),
        rounds: int = 10,
        out: Annotated[Path | None, _open("FILE", "runs/bench/...")] = None,
        by_module: bool = False,
    ) -> int:
        """"""
        from dunes.bench.run import Request

        request = Request(models, size, family, batch, context, dtype, threads)
        if by_module:
            return _by_module(name, request)
        return _race(name, request, rounds, out)

    command.__doc__ = f"""{about}

    Several models, sizes, batches, ... race against each other in one run.

    Example: dunes bench {name} --size 1m 3m 10m

    Args:
        models: Model folders.
        size: Or shapes of so many parameters, like 500k or 3m.
        family: Architectures of those shapes.
        batch: Windows at once.
        context: Tokens of a window.
        dtype: What matrix products are computed in, like float32 or bfloat16.
        threads: How many threads compute.
        rounds: How often each is timed.
        out: The file of all measurements, .jsonl or .parquet.
        by_module: Say instead where the time of one run goes, by module and by operation.
    """
    return command


def _race(name: str, request: Any, rounds: int, out: Path | None) -> int:
    from rich.console import Console

    from dunes.bench import run, table
    from dunes.runs.progress import Display

    file, rows, status = out or run.named(name), [], 0
    with Display(Console(stderr=True, highlight=False)) as show:
        rows = run.bench(name, request, rounds, file, show.state)
    found = run.summaries(rows)
    table.summary(found)
    print(f"all laps: {file}   compare: dunes bench compare {file} OTHER   draw: dunes bench plot {file}")
    print(json.dumps({"file": str(file), "results": found}))
    return status


def _by_module(name: str, request: Any) -> int:
    from dunes.bench import run, table, timed

    (one,) = run.contestants(name, request)[:1]
    report = timed.of_work(name, one)
    table.times(report)
    print(json.dumps(report.record()))
    return 0


def compare(
    a: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="A")],
    b: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="B")],
    confidence: float = 0.99,
) -> int:
    """Which differences between two files of measurements are real.

    Example: dunes bench compare before.jsonl after.jsonl

    Args:
        a: A file that `dunes bench` wrote.
        b: Another one: after a change, or from another machine.
        confidence: How sure to be before a difference is called real.
    """
    from dunes.bench import rows, table
    from dunes.bench.compare import compare as compared

    found = compared(rows.read(Path(a)), rows.read(Path(b)), confidence)
    table.comparison(found, confidence)
    return 0


def memory() -> int:
    return 0


def run(arguments: list[str]) -> int:
    """Parse what follows `dunes bench` and do it."""
    about = "Measure: time, memory, where they go; compare and draw what was measured."
    chosen = tyro.extras.subcommand_cli_from_dict(
        verbs(), args=arguments, prog="dunes bench", description=about, config=(tyro.conf.FlagCreatePairsOff,)
    )
    return int(chosen or 0)
