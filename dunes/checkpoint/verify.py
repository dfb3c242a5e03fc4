"""Compare the logits of two model folders, with only part of one matrix in memory at a time."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dunes import tree
from dunes.augment.adapted import Adapted, dense, is_embedding, keeps_zeros, sides
from dunes.augment.quantized import Quantized
from dunes.checkpoint.formats import native
from dunes.checkpoint.open import OpenedModel, load_decoder, open_model
from dunes.checkpoint.weights.lazy_tensor import LazyTensor, Weights, cast, in_memory, track_reads
from dunes.checkpoint.weights.state_dict_diff import compare
from dunes.models import build_on_meta
from dunes.parts import Attention, Decoder, Rotary
from dunes.progress import advance
from dunes.units import plural

Tick = Callable[[int], None]

PROMPTS, TOKENS = 2, 16
EXACT = 1e-4
ROUNDED = 32
PACKED = 0.05
MAX_RATIO = 2.0
"""Permitted differences between the float32 logits of a model and of its written form, on fixed prompts.

| form                           | dtype     | measure                                                | tolerance |
|--------------------------------|-----------|--------------------------------------------------------|-----------|
| converted, merged, dequantized | as stored | largest difference / RMS                               | EXACT     |
| the same, rounded              | narrower  | largest difference from the rounded source / RMS       | EXACT     |
|                                |           | largest difference from the source / RMS / epsilon     | ROUNDED   |
| changed, or a change undone    | any       | norm of the difference / norm                          | EXACT     |
| packed codes                   | float32   | norm of the difference / norm                          | EXACT     |
| packed codes, rounded scales   | narrower  | norm of the difference / norm                          | PACKED    |
| adapter on the original base   | any       | distance of the logits / distance of the bases' logits | MAX_RATIO |
| ONNX                           | float32   | largest difference / largest absolute logit            | EXACT     |

`verify` below checks converted folders, `formats.onnx` checks ONNX, and `formats.compressed_tensors` packed codes.
A GGUF file must read back with equal weights (`formats.gguf`). `formats.cpp` runs compiled code, with the
tolerances of `generate.decode_packages`. In tests/test_merge.py, the ratio that MAX_RATIO limits is about 1; it is
larger if an adapter depends on quantization errors.
"""
BLOCK = 1 << 24
"""Number of a matrix's elements that are converted to float32 at a time."""


@dataclass(frozen=True)
class Verification:
    """Differences between the float32 logits of source and result; `size` is the RMS of the source's logits.

    `agree` is the fraction of positions with the same top-1 token. If weights were rounded, `largest_difference`
    is measured against the source rounded to the same dtype, and `rounding` is the largest difference from the
    unrounded source.
    """

    largest_difference: float
    size: float
    agree: float
    rounding: float | None = None
    tokens: int = PROMPTS * TOKENS

    @property
    def relative(self) -> float:
        return self.largest_difference / self.size if self.size else self.largest_difference

    @property
    def verdict(self) -> str:
        """Short text for a comparison that passed."""
        largest = max(self.largest_difference, self.rounding or 0.0)
        return f"equal within rounding: {largest / (self.size or 1.0):.1e} relative" if largest else "equal"

    def card(self) -> dict[str, Any]:
        return asdict(self) | {"tolerance": EXACT}

    def __str__(self) -> str:
        rounded = "" if self.rounding is None else f"; rounding changed them by up to {self.rounding:.1e}"
        return (
            f"logits of {plural(self.tokens, 'token')} differ by {self.largest_difference:.1e} at most, "
            f"{self.relative:.1e} relative (tolerance: {EXACT:.1e}){rounded}; "
            f"top-1 tokens agree at {self.agree:.0%} of positions"
        )


def verify(source: OpenedModel, result: OpenedModel, dtype: torch.dtype | None = None) -> Verification:
    """Compare the logits of two models; pass `dtype` if the result's weights were rounded to this dtype.

    Raises ValueError if the logits differ by more than reordered operations or rounding can cause.
    """
    if result.family == source.family and result.config != source.config:
        raise ValueError(f"{source.folder}: the result's config is {result.config}, not {source.config}")
    rounded = [] if dtype is None else [replace(source, files=cast(source.files, dtype))]
    compared = [result, source, *rounded]
    tick = advance(sum(w.nbytes for s in compared for w in s.files.values()))
    after, plain, *before = (source_logits(s, tick) for s in compared)
    return _compare(source.folder, plain, (before or [plain])[0], after, dtype)


def _compare(
    folder: Path, plain: Tensor, before: Tensor, after: Tensor, dtype: torch.dtype | None, merging: float = 0.0
) -> Verification:
    """Compare the logits of the result (`after`), the source (`plain`) and the rounded source (`before`).

    `merging` is the largest difference caused by merging an adapter. Raises ValueError if a tolerance is exceeded.
    """
    largest = max(merging, float((after - before).abs().max()))
    agree = float((after.argmax(-1) == plain.argmax(-1)).float().mean())
    rounding = None if dtype is None else float((after - plain).abs().max())
    verification = Verification(largest, float(plain.square().mean().sqrt()), agree, rounding)
    if not plain.isfinite().all():
        raise ValueError(f"{folder}: its logits are not finite; list the weights: dunes inspect --values {folder}")
    finite = dtype is None or before.isfinite().all()  # False if the logits exceed the dtype's range.
    if finite and not verification.relative <= EXACT:  # `not` also catches NaN
        raise ValueError(f"{folder}: the result is another model: {verification}; nothing was written")
    if dtype and not (rounding or 0.0) <= ROUNDED * torch.finfo(dtype).eps * verification.size:
        raise ValueError(f"{folder}: {dtype} cannot hold these weights: {verification}; nothing was written")
    return verification


def check_written(
    staged: Path, out: Path, expected: Tensor, context_length: int, origin: str, limit: float = EXACT
) -> float:
    """Relative distance between the logits of the written model in `staged` and the `expected` logits.

    Raises ValueError, naming `out` and the `origin` of the expected logits, if the distance exceeds the limit.
    """
    difference = distance(expected, model_logits(load_decoder(open_model(staged)), context_length))
    if not difference <= limit:
        raise ValueError(f"{out}: the written model differs by {difference:.1e} from {origin}")
    return difference


def merge_check(
    model: Decoder, folder: Path, context_length: int, dtype: torch.dtype
) -> Callable[[OpenedModel], Verification]:
    """Return a function that compares a written model with `model`, merged and rounded to `dtype`.

    The function raises ValueError if merging or writing changes the logits by more than reordered operations or
    rounding can cause.
    """
    plain, exact = (model_logits(model, context_length, merged) for merged in (None, torch.float32))
    merging, rounded_to = float((exact - plain).abs().max()), None if dtype == torch.float32 else dtype
    rounded = exact if rounded_to is None else model_logits(model, context_length, dtype)
    return lambda result: _compare(folder, plain, rounded, source_logits(result), rounded_to, merging)


def distance(a: Tensor, b: Tensor) -> float:
    """The norm of `a - b`, divided by the norm of `a`."""
    return float((a - b).norm() / a.norm())


def model_logits(model: nn.Module, context_length: int, merged: torch.dtype | None = None) -> Tensor:
    """Logits (PROMPTS, TOKENS, V) of an in-memory model on the fixed prompts, computed in float32.

    If `merged` is a dtype, the active adapter is merged, and all weights are rounded to this dtype.
    """
    copy = deepcopy(model, {id(t): t for t in (*model.parameters(), *model.buffers())}).eval()
    assert isinstance(copy, Decoder)
    dtype, vocab = merged or torch.float32, sides(copy.embed.token)[0]
    tick = advance(tree.count(model) * dtype.itemsize)

    def make_lazy(module: nn.Module) -> nn.Module:
        return _Lazy(track_reads(_parameters_of(module, dtype), tick), is_embedding(tree.innermost(module)))

    if copy.head is None:
        copy.head = _Lazy(_parameters_of(copy.embed.token, dtype))
    for place in list(tree.places(copy)):
        if merged is not None and isinstance(place.module, Adapted):
            setattr(place.parent, place.key, make_lazy(place.module))
        elif isinstance(tree.innermost(place.module), Quantized):
            tree.replace(copy, {place.name}, make_lazy, reach="inner")
    weights = track_reads(cast(in_memory(copy.state_dict()), dtype), tick)
    return _lazy_logits(copy, weights, prompts(vocab, context_length))


def _parameters_of(module: nn.Module, dtype: torch.dtype) -> Weights:
    """Lazy weight and bias of a linear layer or an embedding, with the active adapter merged."""
    adapter = module.active_adapter if isinstance(module, Adapted) else None
    updated = None if adapter is None else partial(adapter.updated, tree.innermost(module))

    def read() -> Tensor:
        with torch.no_grad():
            return (dense(module) if updated is None else updated()).to(dtype)

    size = sides(module)
    weight = LazyTensor(size if is_embedding(module) else size[::-1], dtype, "memory", read)
    bias = getattr(module, "bias", None)
    return {"weight": weight} | ({} if bias is None else cast(in_memory({"bias": bias}), dtype))


def source_logits(source: OpenedModel, tick: Tick = lambda size: None) -> Tensor:
    """Logits (PROMPTS, TOKENS, V) of a source on the fixed prompts, with part of one matrix in memory at a time.

    A native model runs as in its original code, with unpermuted weights and rotary embedding on adjacent pairs.
    """
    model = build_on_meta(source.family, source.config).eval()
    compared = source.comparison
    if source.format == "native":
        names = native.weight_names(source.hf_config, permuted=False)
        compared = compare(source.expected, source.files, names, source.ignored)
        for module in model.modules():
            if isinstance(module, Attention) and isinstance(module.position, Rotary):
                module.position = replace(module.position, adjacent=True)
    weights = track_reads(compared[0], tick)
    if model.head is None:
        model.head = nn.Linear(1, 1, bias=False, device="meta")
        weights["head.weight"] = weights["embed.token.weight"]
    return _lazy_logits(model, weights, prompts(source.config.vocab, source.config.context_length))


def prompts(vocab: int, context_length: int) -> Tensor:
    """Random ids (PROMPTS, TOKENS), equal for all models with this vocabulary and context length."""
    draw = torch.Generator().manual_seed(0)
    return torch.randint(vocab, (PROMPTS, min(TOKENS, context_length)), generator=draw)


@torch.no_grad()
def _lazy_logits(model: nn.Module, weights: Weights, ids: Tensor) -> Tensor:
    """Logits of a model; replaces its linear layers and embeddings by modules that read weights on each call."""
    for place, module in list(model.named_modules()):
        parameters = {name: weights[f"{place}.{name}"] for name, _ in module.named_parameters(recurse=False)}
        if isinstance(module, nn.Linear | nn.Embedding):
            lazy = _Lazy(parameters, isinstance(module, nn.Embedding))
            lazy.keeps_zeros = keeps_zeros(module)
            parent, _, key = place.rpartition(".")
            setattr(model.get_submodule(parent), key, lazy)
        else:
            for name, tensor in parameters.items():
                module._parameters[name] = nn.Parameter(tensor.read().float(), requires_grad=False)
                tensor.release()
            for name, _ in [*module.named_buffers(recurse=False)]:
                module._buffers[name] = weights[f"{place}.{name}"].read().float()
    logits: Tensor = model(ids)
    return logits


class _Lazy(nn.Module):
    """A linear layer or an embedding that reads its weights on each call."""

    keeps_zeros = False

    def __init__(self, parameters: Weights, is_table: bool = False) -> None:
        super().__init__()
        self.lazy, self.is_table = parameters, is_table

    @property
    def num_embeddings(self) -> int:
        return self.lazy["weight"].shape[0]

    @property
    def bias(self) -> Tensor | None:
        return self.lazy["bias"].read().float() if "bias" in self.lazy else None

    def dense(self) -> Tensor:
        return self.lazy["weight"].read().float()

    def forward(self, x: Tensor) -> Tensor:
        weight = self.lazy["weight"].read()
        parts = [] if self.is_table else torch.split(weight, max(1, BLOCK // weight.shape[1]))
        y = torch.cat([F.linear(x, part.float()) for part in parts], -1) if parts else weight[x].float()
        self.lazy["weight"].release()
        return y if self.bias is None else y + self.bias
