"""Describe a model folder, and check whether it would load."""

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
from dunes.augment.quantize import Quantized
from dunes.checkpoint import card
from dunes.checkpoint.folder import check_vocabulary
from dunes.checkpoint.header import quote
from dunes.checkpoint.lazy_tensor import Weights
from dunes.checkpoint.source import Source
from dunes.plural import plural
from dunes.text import Tokenizer
from dunes.units import format_bytes, format_count

BITS = {"float32": 32, "bfloat16": 16, "int8": 8, "4 bits": 4}
SHOWN = 40


@dataclass(frozen=True)
class Verdict:
    """The tokenizer, if it can be read, and each reason why `load` would refuse the folder."""

    tokenizer: Tokenizer | None
    reasons: tuple[str, ...]


def judge(source: Source) -> Verdict:
    """Whether a folder would load; the digests in its card are compared whatever its size."""
    _ = source.expected  # raises if it cannot be built
    tokenizer, reasons = None, []
    if differences := source.comparison[1]:
        reasons.append(_count_kinds(differences))
    try:
        card.check_files(source.folder, card.read_card(source.folder), math.inf)
    except ValueError as error:
        reasons.append(str(error))
    try:
        tokenizer = None if Tokenizer.find_file(source.folder) is None else Tokenizer.load(source.folder)
        check_vocabulary(source, tokenizer)
    except ValueError as error:
        reasons.append(str(error))
    return Verdict(tokenizer, tuple(reasons))


def describe_folder(source: Source, verdict: Verdict | None = None) -> Iterator[str]:
    """Lines that describe a folder: family, config, sizes, differences, and whether it would load."""
    verdict = verdict or judge(source)
    files, config = source.files, source.config
    size = f"{plural(len(files), 'tensor')}, {format_bytes(sum(w.nbytes for w in files.values()))}"
    yield f"family      {source.family}, {source.format} format: {size}"
    yield f"config      {', '.join(f'{f.name} {_format(getattr(config, f.name))}' for f in fields(config))}"
    for change in source.architecture.changes:
        settings = ", ".join(f"{name} {quote(value)}" for name, value in change.request.items())
        yield f"change      {change.name} at {plural(len(change.places), 'place')}: {settings}"
    yield from _parameters(source)
    dtypes = Counter[str]()
    for w in files.values():
        dtypes[str(w.dtype).removeprefix("torch.")] += w.nbytes
    yield f"dtypes      {', '.join(f'{dtype} {format_bytes(n)}' for dtype, n in dtypes.most_common())}"
    yield f"tokenizer   {_describe_tokenizer(source, verdict.tokenizer)}"
    for note in source.notes:
        yield f"assumed     {note}"
    _, differences = source.comparison
    for difference in differences[:SHOWN]:
        yield f"difference  {difference}"
    if len(differences) > SHOWN:
        yield f"            and {len(differences) - SHOWN} more"
    yield f"loads       {'no: ' + '; '.join(verdict.reasons) if verdict.reasons else 'yes'}"


def _describe_tokenizer(source: Source, tokenizer: Tokenizer | None) -> str:
    if tokenizer is not None:
        return f"{tokenizer.vocab:,} ids"
    return "none that can be read" if Tokenizer.find_file(source.folder) else "none"


def _count_kinds(differences: list[Any]) -> str:
    kinds = Counter(d.kind for d in differences)
    return ", ".join(f"{n} {'of another shape' if kind == 'shape' else kind}" for kind, n in kinds.items())


def _parameters(source: Source) -> Iterator[str]:
    model = source.architecture.outline()
    total = tree.count(model) + sum(
        m.in_features * m.out_features for m in model.modules() if isinstance(m, Quantized)
    )
    ends = tree.count(model.get_submodule("embed")) + (tree.count(h) if (h := getattr(model, "head", None)) else 0)
    parts = f"{format_count(total - ends)} in blocks, {format_count(ends)} in embedding and head"
    yield f"parameters  {total:,} ({format_count(total)}): {parts}"
    if source.own is None:
        sizes = ", ".join(f"{name} {format_bytes(total * bits // 8)}" for name, bits in BITS.items())
        yield f"memory      {sizes}"
    attn = model.get_submodule("blocks.0.attn")
    cache = 2 * attn.get_submodule("k").out_features * source.config.depth * 2  # type: ignore[operator]
    yield f"KV cache    {format_bytes(cache * 1000)} for each 1,000 tokens in bfloat16"


def _format(value: Any) -> str:
    if is_dataclass(value):  # a rotary scaling: its name, and the fields that differ from their defaults
        changed = [f"{f.name} {_format(x)}" for f in fields(value) if (x := getattr(value, f.name)) != f.default]
        return " ".join([type(value).__name__.lower(), *changed])
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


CHUNK = 1 << 20
"""Elements in a chunk: with fewer, Python's overhead dominates."""
UNSIGNED = {2: np.uint16, 4: np.uint32, 8: np.uint64}
SIGNED = {2: torch.int16, 4: torch.int32, 8: torch.int64}
ODD = {"not finite": "not finite", "denormal": "denormal", "row of zeros": "rows of zeros"}


def odd_values(weights: Weights) -> Iterator[str]:
    """A line for each tensor with elements that are not finite or denormal, or with rows of zeros."""
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        for name, lazy in weights.items():
            tensor = lazy.read()
            counts = np.sum([[0, 0, 0], *pool.map(partial(_count_odd, tensor.dtype), _chunks(tensor))], 0)
            if tensor.dim() < 2:
                counts[2] = 0
            lazy.release()
            named = zip(counts, ODD.items(), strict=True)
            if listed := ", ".join(f"{n:,} {noun if n == 1 else nouns}" for n, (noun, nouns) in named if n):
                yield f"{name}: {listed}"


def _chunks(tensor: Tensor) -> Iterator[np.ndarray[Any, Any]]:
    """The bits of some rows at a time, as unsigned integers."""
    if not tensor.is_floating_point() or tensor.dtype.itemsize not in UNSIGNED or not tensor.numel():
        return
    unsigned = UNSIGNED[tensor.dtype.itemsize]
    matrix = tensor.reshape(tensor.shape[0] if tensor.dim() > 1 else 1, -1)
    bits = matrix.view(SIGNED[tensor.dtype.itemsize]).numpy().view(unsigned)
    rows = max(1, CHUNK // bits.shape[1])
    for begin in range(0, len(bits), rows):
        yield bits[begin : begin + rows]


def _count_odd(dtype: torch.dtype, bits: np.ndarray[Any, Any]) -> tuple[int, int, int]:
    """The number of non-finite elements, denormal elements and rows of zeros, from their bits.

    In numpy, since torch's overhead exceeds a pass over a chunk that fits into the cache.
    """
    unit = bits.dtype.type(1)
    # The bits without the sign are ordered like absolute values.
    infinite, normal = (2 * _bits(x, dtype) for x in (torch.inf, torch.finfo(dtype).smallest_normal))
    size = np.left_shift(bits, unit)
    largest = size.max(1)
    not_finite = int((size >= infinite).sum()) if largest.max() >= infinite else 0
    smallest = size.min()
    if smallest == 0:
        smallest = (size - unit).min()  # zero wraps around to the largest
    denormal = int(((size > 0) & (size < normal)).sum()) if smallest < normal else 0
    return not_finite, denormal, int((largest == 0).sum())


def _bits(number: float, dtype: torch.dtype) -> int:
    return int(torch.tensor(number, dtype=dtype).view(SIGNED[dtype.itemsize]))
