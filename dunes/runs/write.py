"""Text from a model: samples, continuations, the rest of a line."""

from collections.abc import Iterator
from pathlib import Path

from torch import nn

from dunes.generate import Sampler, begun, below, generate, sampler
from dunes.text import Stream, Tokenizer


def write(
    model: nn.Module, tokenizer: Tokenizer, context: int, prompt: str, limit: int, sample: Sampler
) -> Iterator[str]:
    """The text that follows the prompt, piece by piece as it comes, up to the end of the document."""
    ids, stream = tokenizer.prompt(prompt), Stream(tokenizer)
    sample = below(sample, tokenizer.vocab)
    for token in generate(model, ids, limit=limit, context=context, sample=sample, stop=tokenizer.stops):
        yield stream.feed(token.id)


def sample_text(model: nn.Module, tokenizer: Tokenizer, context: int, seed: int = 0, limit: int = 120) -> str:
    """What the model writes by itself, from the beginning of a document."""
    pieces = write(model, tokenizer, context, "", limit, sampler(0.8, top_k=50, seed=seed))
    return "".join(pieces).strip("\n")


def complete_line(model: nn.Module, tokenizer: Tokenizer, context: int, prefix: str, limit: int = 48) -> str:
    """The likeliest rest of the line that the prefix ends in, without the line end.

    A prefix that ends inside a token is healed: its last tokens are taken back, and what they stood
    for is what the model must begin with.
    """
    pieces = tokenizer.pieces()
    room = max(context // 2, context - limit)
    ids, healed = taken_back(tokenizer.encode(prefix[-8 * context :])[-room:], pieces)
    text = b""
    sample, stops = below(begun(sampler(0.0), pieces, healed), len(pieces)), tokenizer.stops
    prompt = [*tokenizer.begin, *ids] or [tokenizer.end]
    for token in generate(model, prompt, limit=limit, context=context, sample=sample):
        if token.id in stops or b"\n" in pieces[token.id]:
            break
        text += pieces[token.id]
    return text[len(healed) :].decode(errors="ignore")


def taken_back(ids: list[int], pieces: list[bytes]) -> tuple[list[int], bytes]:
    """The ids without as many at their end as one longer token could stand for, and the bytes of those.

    Text that goes on may have been one token where the text up to here is several.
    """
    for cut in range(max(0, len(ids) - 8), len(ids)):
        tail = b"".join(pieces[i] for i in ids[cut:])
        if any(len(p) > len(tail) and p.startswith(tail) for p in pieces):
            return ids[:cut], tail
    return ids, b""


def text_before(place: str) -> str:
    """The text of a file before FILE:LINE:COLUMN, both counted from 1.

    Raises ValueError if the place is not written like that, or not in the file.
    """
    path, line, column = [*place.rsplit(":", 2), "", ""][:3]
    if not (line.isdigit() and column.isdigit() and int(line) and int(column)):
        raise ValueError(f"{place}: expected FILE:LINE:COLUMN, both numbers counted from 1")
    lines = [*Path(path).read_text(encoding="utf-8").splitlines(keepends=True), ""]
    if int(line) > len(lines) or int(column) > len(lines[int(line) - 1].rstrip("\r\n")) + 1:
        raise ValueError(f"{place}: {path} has no such place")
    return "".join(lines[: int(line) - 1]) + lines[int(line) - 1][: int(column) - 1]
