"""Print measurements as plain text, or draw them as HTML."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dunes.bench.compare import Comparison
from dunes.bench.profile_modules import PHASES, Report, flame
from dunes.bench.rows import CASE, differing_columns, group_rows, read_folder, summaries
from dunes.bench.step_memory import MeasuredMemory, MemoryEstimate
from dunes.measure import KINDS, Allocations, memory_curves
from dunes.pictures import html_table
from dunes.progress import print_table
from dunes.units import format_bytes, format_count, format_seconds, plural


def summary_table(results: Sequence[Mapping[str, Any]]) -> tuple[str, list[str], list[list[str]], int]:
    """A table with one line per case: title, columns, lines, and the number of columns with settings.

    The columns have the settings in which cases differ, and the results; the title has the other settings.
    """
    columns = ["subject", *(n for n in differing_columns(results) if n != "subject")]
    formats: dict[str, Callable[[Mapping[str, Any]], str]] = {
        "time/run": lambda f: format_seconds(f["seconds"]),
        "p25 to p75": lambda f: f"{format_seconds(f['low'])} to {format_seconds(f['high'])}",
        "rate": lambda f: f"{format_count(f['rate'])} {f['unit']}/s",
        "MFU": lambda f: f"{f['flop_share']:.0%}" if "flop_share" in f else "",
        "bandwidth": lambda f: f"{f['byte_share']:.0%}" if "byte_share" in f else "",
        "limit": lambda f: _limit(f) if "limit" in f else "",
        "to the first token": lambda f: _first_token(f) if "first_token" in f else "",
        "tensors": lambda f: format_bytes(f["peak_bytes"]) if "peak_bytes" in f else "",
    }
    columns_shown = {name: text for name, text in formats.items() if any(text(f) for f in results)}
    lines = [[_value(f[n]) for n in columns] + [text(f) for text in columns_shown.values()] for f in results]
    hidden = {"benchmark", "family", "parameters", "machine", *columns}
    fixed = ", ".join(f"{n} {_value(results[0][n])}" for n in CASE if n not in hidden)
    title = f"{results[0]['benchmark']}: {fixed}, {plural(results[0]['rounds'], 'round')}"
    return title, [*columns, *columns_shown], lines, len(columns)


def draw_folder(folder: Path) -> Iterator[tuple[str, str]]:
    """Titles and HTML for a folder: the rates of each benchmark, the memory of each step, each profile, and
    messages about invalid lines."""
    messages = list[str]()
    records = read_folder(folder, messages.append)
    for laps in group_rows((row for row in records if "seconds" in row), ["benchmark"]).values():
        results = summaries(laps)
        title, columns, lines, _ = summary_table(results)
        rates = [[r["rate"] * r["seconds"] / r[key] for key in ("high", "low")] for r in results]
        highest = max(rate for _, rate in rates)
        yield title, html_table(columns, lines, [[rate / highest for rate in bar] for bar in rates])
    for step in (step for record in records for step in record.get("results", [])):
        title = f"memory of a step: {step['subject']}, {step['batch']} x {step['context']}, {step['dtype']}"
        yield title, memory_curves(step["live"])
    for profile in (record for record in records if "modules" in record):
        yield f"time by module: {profile['benchmark']}, {profile['subject']}", flame(profile)
    yield from ((message, "") for message in messages)


def _limit(f: Mapping[str, Any]) -> str:
    return f"{format_count(f['limit'])} {f['unit']}/s ({f['rate'] / f['limit']:.0%} reached)"


def _first_token(f: Mapping[str, Any]) -> str:
    rate = f["rate"] * f["seconds"] / f["first_token"]
    return f"{format_seconds(f['first_token'])}, {format_count(rate)} {f['unit']}/s"


def print_comparison(results: Comparison, confidence: float) -> None:
    """Print the columns in which A and B differ, and the differences in time with their intervals."""
    for name, (a, b) in results.differing.items():
        values = f"A {a}, B {b}"
        if a and not isinstance(a, str):
            values = f"A {format_count(a)}, B {format_count(b)} ({b / a - 1:+.1%})"
        print(f"differs: {name}: {values}" if not name.endswith("rate") else f"the machine's {name}: {values}")
    lines = []
    for d in results.differences:
        interval = "{:.3f} to {:.3f}".format(*d.interval) if d.interval else ""
        lines.append([d.what, f"{d.ratio:.3f}", interval, str(d.pairs), d.verdict])
    title = f"seconds of B over seconds of A, {confidence:.0%} confidence"
    print_table(title, ["", "ratio", "interval", "rounds", ""], lines)
    for label in results.unmatched:
        print(f"only in one of them: {label}")


def print_times(report: Report, overhead: float) -> None:
    """Print tables of the time by kind of operation and by module, with bars."""
    phases = [p for p in PHASES if any(e.phase == p for e in report.entries)]
    kinds = report.kinds() | {"between operations (Python, waiting)": {"": report.between}}
    for title, results in (("kind of operation", kinds), ("module, with its submodules", report.inside())):
        lines = []
        for name, by_phase in results.items():
            total = sum(by_phase.values())
            depth = name.count(".") + 1 if title[0] == "m" and name else 0
            label = "  " * depth + (name.rpartition(".")[2] if title[0] == "m" else name)
            cells = [format_seconds(by_phase[p]) if by_phase.get(p) else "" for p in phases]
            lines.append([label or "all", *cells, f"{total / report.wall:.1%}", bar(total / report.wall)])
        print_table(title, ["", *phases, "share", ""], lines)
        print()
    print(f"{format_seconds(report.wall)} in total; the profiler's overhead was {overhead:+.0%}")


def print_memory(log: Allocations) -> None:
    """Print the peak memory by kind, and the modules or functions that allocated most of the peak memory."""
    peak = log.peak or 1
    kinds = [[k, format_bytes(b), f"{b / peak:.1%}", bar(b / peak)] for (k,), b in log.by("kind").items()]
    print_table(f"peak tensor memory: {format_bytes(log.peak)}", ["", "bytes", "share", ""], kinds)
    places: dict[tuple[str, str, str], list[int]] = {}
    for a in log.live_at():
        place = places.setdefault((re.sub(r"\b\d+\b", "*", a.owner), a.kind, a.phase), [0, 0])
        place[0] += a.size
        place[1] += 1
    largest = sorted(places.items(), key=lambda item: -item[1][0])[:16]
    print()
    lines = [[w, format_bytes(b), k, p, str(n)] for (w, k, p), (b, n) in largest]
    print_table("allocated by", ["", "bytes", "kind", "phase", "tensors"], lines)


def print_estimates(results: Sequence[MemoryEstimate], truths: Sequence[MeasuredMemory | None]) -> None:
    """Print one line per step, with its estimated memory and its measured memory if known."""
    lines = []
    for f, truth in zip(results, truths, strict=True):
        kinds = {kind: size for (kind,), size in f.log.by("kind").items()}
        dtype = str(f.shape.dtype).removeprefix("torch.")
        line = [f"{f.subject.name}, {f.shape.batch} x {f.shape.context}, {dtype}", format_bytes(f.log.peak)]
        line += [format_bytes(kinds[k]) if kinds.get(k) else "" for k in KINDS]
        if truth:
            growth = f"{format_bytes(truth.grown)} ({truth.grown / f.log.peak - 1:+.1%})"
            line += [format_bytes(truth.tensors), growth]
        lines.append(line)
    measured_columns = ["measured", "process grew by"] if any(truths) else []
    print_table("peak memory", ["", "estimated", *KINDS, *measured_columns], lines)


def bar(share: float, width: int = 30) -> str:
    """A text bar for `share` (0 to 1), up to `width` characters long; its length is a multiple of 1/8
    character."""
    eighths = round(max(0.0, min(1.0, share)) * width * 8)
    return "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()


def _value(value: object) -> str:
    return format_count(value) if isinstance(value, int) and value >= 10_000 else str(value)
