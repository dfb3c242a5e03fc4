"""What a model folder holds and whether it would load, from headers alone."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from dunes import tree
from dunes.checkpoint.source import Source
from dunes.checkpoint.stored import Weights
from dunes.models.outline import outline
from dunes.text import Tokenizer

BITS = {"float32": 32, "bfloat16": 16, "int8": 8, "4 bits": 4}
SHOWN = 40


def inspect(source: Source) -> Iterator[str]:
    """Lines about a folder: what it is, what it takes, and every difference from what it should be."""
    files, config = source.files, source.config
    size = sum(w.nbytes for w in files.values())
    yield f"family      {source.family}, in {source.form}'s form: {len(files)} tensors, {_bytes(size)}"
    yield f"config      {', '.join(f'{f.name} {_word(getattr(config, f.name))}' for f in fields(config))}"
    yield from _parameters(source)
    kinds = Counter[str]()
    for w in files.values():
        kinds[str(w.dtype).removeprefix("torch.")] += w.nbytes
    yield f"stored      {', '.join(f'{kind} {_bytes(n)}' for kind, n in kinds.most_common())}"
    yield f"tokenizer   {_tokenizer(source.folder)}"
    for note in source.notes:
        yield f"assumed     {note}"
    _, differences = source.compared
    for difference in differences[:SHOWN]:
        yield f"difference  {difference}"
    if len(differences) > SHOWN:
        yield f"            and {len(differences) - SHOWN} more"
    yield f"loads       {'no: ' + _counted(differences) if differences else 'yes'}"


def _counted(differences: list[Any]) -> str:
    kinds = Counter(d.kind for d in differences)
    return ", ".join(f"{n} {'of another shape' if kind == 'shape' else kind}" for kind, n in kinds.items())


def _parameters(source: Source) -> Iterator[str]:
    model = outline(source.family, source.config)
    total = tree.count(model)
    ends = tree.count(model.get_submodule("embed")) + (tree.count(h) if (h := getattr(model, "head", None)) else 0)
    parts = f"{_short(total - ends)} in blocks, {_short(ends)} in embedding and head"
    yield f"parameters  {total:,} ({_short(total)}): {parts}"
    yield f"memory      {', '.join(f'{name} {_bytes(total * bits // 8)}' for name, bits in BITS.items())}"
    attn = model.get_submodule("blocks.0.attn")
    cache = 2 * attn.get_submodule("k").out_features * source.config.depth * 2  # type: ignore[operator]
    yield f"cache       {_bytes(cache * 1000)} for each 1,000 tokens in bfloat16"


def _tokenizer(folder: Path) -> str:
    try:
        tokenizer = Tokenizer.load(folder)
    except ValueError as error:
        return f"none that opens: {error}"
    return f"{tokenizer.vocab:,} ids"


def _word(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _short(count: int) -> str:
    for unit, size in {"T": 1e12, "B": 1e9, "M": 1e6, "k": 1e3}.items():
        if count >= size:
            return f"{count / size:.2f}{unit}"
    return str(count)


def _bytes(count: int) -> str:
    for unit, size in {"TB": 1e12, "GB": 1e9, "MB": 1e6, "kB": 1e3}.items():
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"


CHUNK = 1 << 18
"""Numbers looked at in one go: they stay in a core's cache through all the passes."""
WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def values(weights: Weights) -> Iterator[str]:
    """A line for each tensor that holds numbers that are not finite or denormal, or rows of zeros only."""
    for name, stored in weights.items():
        odd = _odd(stored.read())
        stored.forget()
        if said := ", ".join(f"{count:,} {what}" for what, count in odd.items() if count):
            yield f"{name}: {said}"


def _odd(tensor: torch.Tensor) -> dict[str, int]:
    """How many numbers are what nobody wants, told from their bits."""
    if not tensor.is_floating_point() or not tensor.numel():
        return {}
    limits = torch.finfo(tensor.dtype)
    word = WORDS[tensor.dtype.itemsize]
    infinite = int(torch.tensor(torch.inf, dtype=tensor.dtype).view(word))
    smallest = int(torch.tensor(limits.smallest_normal, dtype=tensor.dtype).view(word))
    rows = tensor.view(word).flatten(1) if tensor.dim() > 1 else tensor.view(word).reshape(1, -1)
    counts = {"not finite": 0, "denormal": 0, "rows of zeros": 0}
    step = max(1, CHUNK // rows.shape[1])
    magnitude = torch.iinfo(word).max
    for chunk in torch.split(rows, step):
        bits = chunk & magnitude
        top = bits.amax(1)
        if int(top.max()) >= infinite:
            counts["not finite"] += int((bits >= infinite).sum())
        if tensor.dim() > 1:
            counts["rows of zeros"] += int((top == 0).sum())
        # One less: zero becomes the largest number, so that the smallest is the smallest above zero.
        if int(bits.sub_(1).bitwise_and_(magnitude).amin()) < smallest - 1:
            counts["denormal"] += int((bits < smallest - 1).sum())
    return counts
