"""What a model folder holds and whether it would load, from headers alone."""

import math
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dunes import tree
from dunes.checkpoint import card
from dunes.checkpoint.folder import check_vocabulary
from dunes.checkpoint.lazy_tensor import Weights
from dunes.checkpoint.source import Source
from dunes.models.meta import build_on_meta
from dunes.plural import plural
from dunes.text import Tokenizer
from dunes.units import format_bytes, format_count

BITS = {"float32": 32, "bfloat16": 16, "int8": 8, "4 bits": 4}
SHOWN = 40


@dataclass(frozen=True)
class Verdict:
    """The tokenizer if there is one that opens, and why `load` would refuse the folder, a line for each reason."""

    tokenizer: Tokenizer | None
    reasons: tuple[str, ...]


def judge(source: Source) -> Verdict:
    """What stands against loading a folder; the digests in its card count, whatever its size."""
    _ = source.expected  # refuses what cannot be built
    tokenizer, reasons = None, []
    if differences := source.comparison[1]:
        reasons.append(_counted(differences))
    try:
        card.check(source.folder, card.read(source.folder), math.inf)
    except ValueError as error:
        reasons.append(str(error))
    try:
        tokenizer = None if Tokenizer.find_file(source.folder) is None else Tokenizer.load(source.folder)
        check_vocabulary(source, tokenizer)
    except ValueError as error:
        reasons.append(str(error))
    return Verdict(tokenizer, tuple(reasons))


def describe_folder(source: Source, verdict: Verdict | None = None) -> Iterator[str]:
    """Lines about a folder: what it is, what it takes, every difference, and what stands against loading it."""
    verdict = verdict or judge(source)
    files, config = source.files, source.config
    size = sum(w.nbytes for w in files.values())
    yield f"family      {source.family}, {source.form} form: {plural(len(files), 'tensor')}, {format_bytes(size)}"
    yield f"config      {', '.join(f'{f.name} {_word(getattr(config, f.name))}' for f in fields(config))}"
    yield from _parameters(source)
    kinds = Counter[str]()
    for w in files.values():
        kinds[str(w.dtype).removeprefix("torch.")] += w.nbytes
    yield f"stored      {', '.join(f'{kind} {format_bytes(n)}' for kind, n in kinds.most_common())}"
    yield f"tokenizer   {_ids(source, verdict.tokenizer)}"
    for note in source.notes:
        yield f"assumed     {note}"
    _, differences = source.comparison
    for difference in differences[:SHOWN]:
        yield f"difference  {difference}"
    if len(differences) > SHOWN:
        yield f"            and {len(differences) - SHOWN} more"
    yield f"loads       {'no: ' + '; '.join(verdict.reasons) if verdict.reasons else 'yes'}"


def _ids(source: Source, tokenizer: Tokenizer | None) -> str:
    if tokenizer is not None:
        return f"{tokenizer.vocab:,} ids"
    return (
        "none that opens"
        if Tokenizer.find_file(source.folder)
        else "none, so text can be neither read nor written"
    )


def _counted(differences: list[Any]) -> str:
    kinds = Counter(d.kind for d in differences)
    return ", ".join(f"{n} {'of another shape' if kind == 'shape' else kind}" for kind, n in kinds.items())


def _parameters(source: Source) -> Iterator[str]:
    model = build_on_meta(source.family, source.config)
    total = tree.count(model)
    ends = tree.count(model.get_submodule("embed")) + (tree.count(h) if (h := getattr(model, "head", None)) else 0)
    parts = f"{format_count(total - ends)} in blocks, {format_count(ends)} in embedding and head"
    yield f"parameters  {total:,} ({format_count(total)}): {parts}"
    yield f"memory      {', '.join(f'{name} {format_bytes(total * bits // 8)}' for name, bits in BITS.items())}"
    attn = model.get_submodule("blocks.0.attn")
    cache = 2 * attn.get_submodule("k").out_features * source.config.depth * 2  # type: ignore[operator]
    yield f"cache       {format_bytes(cache * 1000)} for each 1,000 tokens in bfloat16"


def _word(value: Any) -> str:
    if is_dataclass(value):  # a rotary scaling: its name, and what is not as it goes without saying
        said = [f"{f.name} {_word(x)}" for f in fields(value) if (x := getattr(value, f.name)) != f.default]
        return " ".join([type(value).__name__.lower(), *said])
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


CHUNK = 1 << 20
"""Numbers looked at in one go: fewer, and Python takes longer than the passes over them."""
WORDS = {2: np.uint16, 4: np.uint32, 8: np.uint64}
SIGNED = {2: torch.int16, 4: torch.int32, 8: torch.int64}
ODD = {"not finite": "not finite", "denormal": "denormal", "row of zeros": "rows of zeros"}


def odd_values(weights: Weights) -> Iterator[str]:
    """A line for each tensor that holds numbers that are not finite or denormal, or rows of zeros only."""
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        for name, stored in weights.items():
            tensor = stored.read()
            counts = np.sum([[0, 0, 0], *pool.map(partial(_odd, tensor.dtype), _chunks(tensor))], 0)
            if tensor.dim() < 2:
                counts[2] = 0
            stored.release()
            told = zip(counts, ODD.items(), strict=True)
            if said := ", ".join(f"{n:,} {noun if n == 1 else nouns}" for n, (noun, nouns) in told if n):
                yield f"{name}: {said}"


def _chunks(tensor: Tensor) -> Iterator[np.ndarray[Any, Any]]:
    """The bits of some rows at a time, as whole numbers."""
    if not tensor.is_floating_point() or tensor.dtype.itemsize not in WORDS or not tensor.numel():
        return
    word = WORDS[tensor.dtype.itemsize]
    table = tensor.reshape(tensor.shape[0] if tensor.dim() > 1 else 1, -1)
    bits = table.view(SIGNED[tensor.dtype.itemsize]).numpy().view(word)
    rows = max(1, CHUNK // bits.shape[1])
    for begin in range(0, len(bits), rows):
        yield bits[begin : begin + rows]


def _odd(dtype: torch.dtype, bits: np.ndarray[Any, Any]) -> tuple[int, int, int]:
    """How many numbers are not finite, how many denormal, and how many rows are zeros, told from the bits.

    numpy, because a pass of torch over a part that fits a cache takes longer than the part.
    """
    word = bits.dtype.type
    # Bits without the sign grow with the number's size.
    infinite, normal = (2 * _bits(x, dtype) for x in (torch.inf, torch.finfo(dtype).smallest_normal))
    size = np.left_shift(bits, word(1))
    top = size.max(1)
    wrong = int((size >= infinite).sum()) if top.max() >= infinite else 0
    low = size.min()
    if low == 0:
        low = (size - word(1)).min()  # zero becomes the largest
    small = int(((size > 0) & (size < normal)).sum()) if low < normal else 0
    return wrong, small, int((top == 0).sum())


def _bits(number: float, dtype: torch.dtype) -> int:
    return int(torch.tensor(number, dtype=dtype).view(SIGNED[dtype.itemsize]))
