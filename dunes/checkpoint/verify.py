"""Whether two folders hold one model: logits on fixed prompts, a part of one matrix in memory at a time."""

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
from dunes.augment.adapted import Adapted, dense, is_embedding, sides
from dunes.augment.quantize import Quantized
from dunes.checkpoint import native
from dunes.checkpoint.lazy_tensor import LazyTensor, Weights, cast, in_memory, track_reads
from dunes.checkpoint.source import Source
from dunes.checkpoint.state_dict_diff import compare
from dunes.models.meta import build_on_meta
from dunes.parts import Attention, Decoder
from dunes.plural import plural

Tick = Callable[[int], None]

PROMPTS, TOKENS = 2, 16
EXACT = 1e-4
"""Of the logits' size: what other orders of the same float32 operations differ by, with room to spare."""
ROUNDED = 32
"""Times the relative step of a narrower dtype: rounding every weight moves the logits less than that."""
BLOCK = 1 << 24
"""Numbers of a matrix that are made float32 at a time."""


@dataclass(frozen=True)
class Verification:
    """Logits of the source and of the result, in float32: `size` is the source's root mean square.

    `agree` is the share of positions whose likeliest token is the same. Where the weights were rounded,
    the difference is from the source with its weights rounded, and `rounding` that from the source itself.
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
        """What a comparison that passed says in words: how far the result is from the source, with rounding."""
        moved = max(self.largest_difference, self.rounding or 0.0)
        return f"equal within rounding: {moved / (self.size or 1.0):.1e} relative" if moved else "equal"

    def card(self) -> dict[str, Any]:
        return asdict(self) | {"tolerance": EXACT}

    def __str__(self) -> str:
        rounded = "" if self.rounding is None else f"; rounding moved them by up to {self.rounding:.1e}"
        return (
            f"logits of {plural(self.tokens, 'token')} differ by {self.largest_difference:.1e} at most, "
            f"{self.relative:.1e} of their size (allowed: {EXACT:.1e}){rounded}; "
            f"the likeliest token agrees at {self.agree:.0%}"
        )


def verify(
    source: Source, result: Source, dtype: torch.dtype | None = None, tick: Tick = lambda size: None
) -> Verification:
    """Compare two models, whose weights were rounded to `dtype` on the way if that is given.

    `tick` is told the bytes of each tensor that was used. Raises ValueError if they differ by more than
    other orders of operations do, or rounding moved them by more than it can.
    """
    if result.config != source.config:
        raise ValueError(f"{source.folder}: the result's config reads {result.config}, not {source.config}")
    after, plain = source_logits(result, tick), source_logits(source, tick)
    before = plain if dtype is None else source_logits(replace(source, files=cast(source.files, dtype)), tick)
    agree = float((after.argmax(-1) == plain.argmax(-1)).float().mean())
    size = float(plain.square().mean().sqrt())
    rounding = None if dtype is None else float((after - plain).abs().max())
    found = Verification(float((after - before).abs().max()), size, agree, rounding)
    _pass(found, source.folder, plain, dtype, bool(before.isfinite().all()))
    return found


def _pass(found: Verification, folder: Path, plain: Tensor, dtype: torch.dtype | None, finite: bool) -> None:
    """Raise ValueError, which says why, for a result that must not be; `finite` are its numbers in that dtype."""
    if not plain.isfinite().all():
        raise ValueError(f"{folder}: its logits are not finite; look with: dunes inspect --values")
    if finite and not found.relative <= EXACT:  # also where it is not a number
        raise ValueError(f"{folder}: the result is another model: {found}; nothing was written")
    if dtype is not None and not (found.rounding or 0.0) <= ROUNDED * torch.finfo(dtype).eps * found.size:
        raise ValueError(f"{folder}: {dtype} cannot hold these weights: {found}; nothing was written")


@dataclass(frozen=True, eq=False)
class UnmergedLogits:
    """Logits of a model with an adapter: as it is, folded in float32, and folded and rounded to `dtype`."""

    folder: Path
    dtype: torch.dtype
    plain: Tensor
    exact: Tensor
    rounded: Tensor

    @classmethod
    def of(cls, model: Decoder, folder: Path, context_length: int, dtype: torch.dtype) -> "UnmergedLogits":
        exact = model_logits(model, context_length, torch.float32)
        rounded = exact if dtype == torch.float32 else model_logits(model, context_length, dtype)
        return cls(folder, dtype, model_logits(model, context_length), exact, rounded)

    def verify(self, result: Source) -> Verification:
        """Compare with the merged model as it lies in a folder.

        Raises ValueError if folding, or what was written, differs by more than other orders of operations do,
        or rounding moved the logits by more than it can.
        """
        after = source_logits(result)
        apart = max(float((a - b).abs().max()) for a, b in ((self.exact, self.plain), (after, self.rounded)))
        rounding = None if self.dtype == torch.float32 else float((after - self.plain).abs().max())
        agree = float((after.argmax(-1) == self.plain.argmax(-1)).float().mean())
        found = Verification(apart, float(self.plain.square().mean().sqrt()), agree, rounding)
        dtype = None if rounding is None else self.dtype
        _pass(found, self.folder, self.plain, dtype, dtype is None or bool(self.rounded.isfinite().all()))
        return found


def model_logits(model: nn.Module, context_length: int, folded: torch.dtype | None = None) -> Tensor:
    """Logits of a model in memory on the fixed prompts, in float32 whatever its numbers are kept as.

    With `folded`, the adapter that acts is made part of its matrix, and all weights are rounded to that dtype.
    """
    twin = deepcopy(model, {id(t): t for t in (*model.parameters(), *model.buffers())}).eval()
    assert isinstance(twin, Decoder)
    kind, vocab = folded or torch.float32, sides(twin.embed.token)[0]
    if twin.head is None:
        twin.head = _Linear(_own(twin.embed.token, kind))
    for place in list(tree.places(twin)):
        inner = tree.innermost(place.module)
        if folded is not None and isinstance(place.module, Adapted):
            setattr(place.parent, place.key, (_Rows if is_embedding(inner) else _Linear)(_own(place.module, kind)))
        elif isinstance(inner, Quantized):
            tree.replace(twin, [place.name], lambda m: _Linear(_own(m, kind)), reach="inner")
    _read_when_used(twin, cast(in_memory(twin.state_dict()), kind))
    with torch.no_grad():
        result: Tensor = twin(_prompts(vocab, context_length))
    return result


def _own(module: nn.Module, dtype: torch.dtype) -> Weights:
    """Matrix and bias of a map or an embedding, of an adapted one with the update."""
    adapter = module.active_adapter if isinstance(module, Adapted) else None
    updated = None if adapter is None else partial(adapter.updated, tree.innermost(module))

    def read() -> Tensor:
        with torch.no_grad():
            return (dense(module) if updated is None else updated()).to(dtype)

    size = sides(module)
    weight = LazyTensor(size if is_embedding(module) else size[::-1], dtype, "memory", read)
    bias = getattr(module, "bias", None)
    return {"weight": weight} | ({} if bias is None else cast(in_memory({"bias": bias}), dtype))


def source_logits(source: Source, tick: Tick = lambda size: None) -> Tensor:
    """Logits (PROMPTS, TOKENS, V) of the fixed prompts, with a part of one matrix in memory at a time.

    A native model runs as its own code runs it: weights as they lie, rotary positions on adjacent pairs.
    """
    model = build_on_meta(source.family, source.config).eval()
    names = source.names
    if source.form == "native":
        names = native.weight_names(source.hf_config, permuted=False)
        for module in model.modules():
            if isinstance(module, Attention) and module.position is not None:
                module.position = replace(module.position, adjacent=True)
    weights = track_reads(compare(source.expected, source.files, names, source.ignored)[0], tick)
    if model.head is None:
        model.head = nn.Linear(1, 1, bias=False, device="meta")
        weights["head.weight"] = weights["embed.token.weight"]
    _read_when_used(model, weights)
    with torch.no_grad():
        result: Tensor = model(_prompts(source.config.vocab, source.config.context_length))
    return result


def _prompts(vocab: int, context_length: int) -> Tensor:
    """The same for every model of these sizes."""
    draw = torch.Generator().manual_seed(0)
    return torch.randint(vocab, (PROMPTS, min(TOKENS, context_length)), generator=draw)


def _read_when_used(model: nn.Module, weights: Weights) -> None:
    """Put modules that read their weights at each use in the place of matrices, and fill all others."""
    for place, module in list(model.named_modules()):
        own = {name: weights[f"{place}.{name}"] for name, _ in module.named_parameters(recurse=False)}
        if isinstance(module, nn.Linear | nn.Embedding):
            kind = _Rows if isinstance(module, nn.Embedding) else _Linear
            parent, _, key = place.rpartition(".")
            setattr(model.get_submodule(parent), key, kind(own))
        else:
            for name, stored in own.items():
                module._parameters[name] = nn.Parameter(stored.read().float(), requires_grad=False)
                stored.forget()


class _Linear(nn.Module):
    """A linear layer whose weights are in a file."""

    def __init__(self, own: Weights) -> None:
        super().__init__()
        self.own = own

    @property
    def bias(self) -> Tensor | None:
        return self.own["bias"].read().float() if "bias" in self.own else None

    def dense(self) -> Tensor:
        return self.own["weight"].read().float()

    def forward(self, x: Tensor) -> Tensor:
        weight = self.own["weight"].read()
        rows = max(1, BLOCK // weight.shape[1])
        y = torch.cat([F.linear(x, part.float()) for part in torch.split(weight, rows)], -1)
        y = y if self.bias is None else y + self.bias
        self.own["weight"].forget()
        return y


class _Rows(nn.Module):
    """An embedding whose vectors are in a file."""

    def __init__(self, own: Weights) -> None:
        super().__init__()
        self.own, self.num_embeddings = own, own["weight"].shape[0]

    def forward(self, ids: Tensor) -> Tensor:
        found = self.own["weight"].read()[ids].float()
        self.own["weight"].forget()
        return found
