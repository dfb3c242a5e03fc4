"""Text from a model: samples, continuations, the rest of a line."""

from collections.abc import Iterator
from pathlib import Path

from torch import nn

from dunes.generate import Sampler, begun, generate, sampler
from dunes.text import Stream, Tokenizer


def write(
    model: nn.Module, tokenizer: Tokenizer, context: int, prompt: str, limit: int, sample: Sampler
) -> Iterator[str]:
    """The text that follows the prompt, piece by piece as it comes, up to the end of the document."""
    ids = [tokenizer.end, *tokenizer.encode(prompt)]
    stream = Stream(tokenizer)
    for token in generate(model, ids, limit=limit, context=context, sample=sample, stop={tokenizer.end}):
        yield stream.feed(token.id)


def sample_text(model: nn.Module, tokenizer: Tokenizer, context: int, seed: int = 0, limit: int = 120) -> str:
    """What the model writes by itself, from the beginning of a document."""
    pieces = write(model, tokenizer, context, "", limit, sampler(0.8, top_k=50, seed=seed))
    return "".join(pieces).strip("\n")


def complete_line(model: nn.Module, tokenizer: Tokenizer, context: int, prefix: str, limit: int = 48) -> str:
    """The likeliest rest of the line that the prefix ends in, without the line end.

    A prefix that ends inside a token is healed: the last token is taken back, and what it stood for
    is what the model must begin with.
    """
    ids = tokenizer.encode(prefix[-8 * context :])[-context + limit :]
    pieces = tokenizer.pieces()
    healed = b""
    if ids and b"\n" not in pieces[ids[-1]]:
        healed = pieces[ids.pop()]
    text = b""
    sample = begun(sampler(0.0), pieces, healed)
    for token in generate(model, [tokenizer.end, *ids], limit=limit, context=context, sample=sample):
        if token.id == tokenizer.end or b"\n" in pieces[token.id]:
            break
        text += pieces[token.id]
    return text[len(healed) :].decode(errors="ignore")


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
