"""Samples, rates of generation, the text around a cursor."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from dunes.checkpoint import LoadedModel
from dunes.generate import PrefixCache, sampler
from dunes.runs.text_generator import TextGenerator
from dunes.text.lines import decode_text, split_lines
from dunes.units import format_bytes, format_count, plural


def sample_text(loaded: LoadedModel, seed: int = 0, max_tokens: int = 120) -> str:
    """A sample without a prompt."""
    return TextGenerator(loaded).text("", max_tokens, sampler(0.8, top_k=50, seed=seed)).strip("\n")


def describe_generation(
    generator: TextGenerator, prompt: int, times: Sequence[float], max_tokens: int | None
) -> Iterator[str]:
    """Lines about a text after a prompt of so many tokens; `times` (s) are of the start and of each token.

    `max_tokens` is how many tokens could come, None if the text was interrupted.
    """
    count = len(times) - 1
    if count:
        yield describe_rates(min(prompt, generator.context_length), times) + _describe_form(generator.cache)
    if max_tokens is not None and count < max_tokens:
        yield f"the model ended the text after {count} of {plural(max_tokens, 'token')}"


def _describe_form(cache: PrefixCache | None) -> str:
    """How tokens were computed, if not by the model with a full cache."""
    if cache is not None and cache.format and cache.cache:
        return f", int{cache.format.bits} cache of {format_bytes(cache.cache.nbytes)}"
    step = cache.step if cache is not None else None
    if step is None:
        return ""
    form = "compiled" if step.native else "as a script"
    return f", {form} with {str(step.dtype).removeprefix('torch.')} weights"


def describe_rates(prompt: int, times: Sequence[float]) -> str:
    """Tokens/s of a prompt of this many tokens, and after it; `times` (s) are of the start and of each token."""
    start, first, last = times[0], times[1], times[-1]
    text = f"prompt: {plural(prompt, 'token')}, {format_count(prompt / (first - start))} tokens/s"
    if len(times) == 2:
        return text
    rate = format_count((len(times) - 2) / (last - first))
    return f"{text}; generated: {plural(len(times) - 1, 'token')}, {rate} tokens/s"


def text_before_cursor(place: str) -> str:
    """The text of a file before FILE:LINE:COLUMN; raises what `text_around_cursor` does."""
    return text_around_cursor(place)[1]


def text_around_cursor(place: str) -> tuple[Path, str, str]:
    """The file of FILE:LINE:COLUMN, both counted from 1, columns in characters (a tab is one), and its text before
    and after this place.

    Raises ValueError for another form, no file, or a position outside of it.
    """
    parts = re.fullmatch(r"(.+):([1-9][0-9]{0,8}):([1-9][0-9]{0,8})", place, re.DOTALL)
    if parts is None:
        raise ValueError(f"{place}: expected FILE:LINE:COLUMN, both numbers counted from 1")
    path, line, column = parts[1], int(parts[2]), int(parts[3])
    if not Path(path).is_file():
        raise ValueError(f"{path}: not a file; expected FILE:LINE:COLUMN")
    lines = split_lines(decode_text(Path(path).read_bytes(), path))
    if line > len(lines):
        raise ValueError(f"{place}: the file has {plural(len(lines), 'line')}")
    columns = len(lines[line - 1].rstrip("\r\n")) + 1
    if column > columns:
        raise ValueError(f"{place}: line {line} has columns 1 to {columns}")
    current = lines[line - 1]
    return (
        Path(path),
        "".join(lines[: line - 1]) + current[: column - 1],
        current[column - 1 :] + "".join(lines[line:]),
    )
