"""Quantized linear layers: int8 per row, and NF4 in blocks of 64.

QLoRA https://arxiv.org/abs/2305.14314, LLM.int8 https://arxiv.org/abs/2208.07339
"""

# Shapes: I inputs, O outputs, N blocks.

from abc import ABC, abstractmethod
from collections.abc import MutableMapping
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dunes import tree
from dunes.augment.adapted import dense
from dunes.augment.change import Change, float_dtype
from dunes.ops import low_rank
from dunes.ops.autocast import autocast_dtype
from dunes.steps import each

VERSION = 2

BLOCK = 64
OUTER = 256
"""Blocks that share one scale of scales, with double quantization."""


class Quantized(nn.Module, ABC):
    """A linear layer whose forward dequantizes its weight each time, and again in the backward pass."""

    makes_dense = True  # `dense` returns a new matrix without gradient
    supports_packing = True
    mutable_buffers = ()  # training changes no code and no scale

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features, self.bias = base.in_features, base.out_features, base.bias
        self.dtype = base.weight.dtype

    @abstractmethod
    def fill(self, weight: Tensor) -> None:
        """Quantize this matrix (O, I)."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling() or (self.bias is not None and self.bias.requires_grad):
            return F.linear(x, self.dense().to(autocast_dtype(x)), self.bias)
        return low_rank.frozen(x, self.dense, self.bias)

    @abstractmethod
    def dense(self) -> Tensor:
        """The dequantized matrix (O, I) in the original dtype."""


class Int8(Quantized):
    """Symmetric int8: each row is scaled by its largest absolute value / 127."""

    codes: Tensor
    scale: Tensor

    def __init__(self, base: nn.Linear) -> None:
        super().__init__(base)
        shape, device = base.weight.shape, base.weight.device
        self.register_buffer("codes", torch.empty(shape, dtype=torch.int8, device=device))
        self.register_buffer("scale", torch.empty(shape[0], 1, device=device))

    def fill(self, weight: Tensor) -> None:
        weight = weight.float()
        self.scale.copy_(weight.abs().amax(1, keepdim=True) / 127)
        self.codes.copy_((weight / self.scale.clamp(min=1e-30)).round())

    def dense(self) -> Tensor:
        return (self.codes.to(torch.float32) * self.scale).to(self.dtype)


class NF4(Quantized):
    """Sixteen quantiles of the normal distribution, scaled by the largest absolute value of each block.

    With `double` these scales are themselves quantized to int8.
    """

    codes: Tensor
    scale: Tensor
    outer: Tensor | None
    middle: Tensor | None

    def __init__(self, base: nn.Linear, double: bool = False) -> None:
        super().__init__(base)
        device, size = base.weight.device, base.weight.numel()
        blocks = -(-size // BLOCK)
        self.double_quantized = double
        self.register_buffer("codes", torch.empty(-(-size // 2), dtype=torch.uint8, device=device))
        self.register_buffer(
            "scale", torch.empty(blocks, dtype=torch.int8 if double else torch.float32, device=device)
        )
        self.register_buffer("outer", torch.empty(-(-blocks // OUTER), 1, device=device) if double else None)
        self.register_buffer("middle", torch.empty((), device=device) if double else None)

    def fill(self, weight: Tensor) -> None:
        codes, scale = encode(weight)
        if len(codes) % 2:
            codes = F.pad(codes, (0, 1), value=7)  # the code of zero
        self.codes.copy_(codes[0::2] << 4 | codes[1::2])
        if self.outer is None or self.middle is None:
            self.scale.copy_(scale)
            return
        # In float64, since otherwise the result would depend on the number of threads.
        self.middle.copy_(scale.double().mean())
        rows = _rows(scale - self.middle, OUTER)
        self.outer.copy_(rows.abs().amax(1, keepdim=True) / 127)
        self.scale.copy_((rows / self.outer.clamp(min=1e-30)).round().flatten()[: len(scale)])

    def scales(self) -> Tensor:
        """The largest absolute value of each block (N,)."""
        if self.outer is None or self.middle is None:
            return self.scale
        rows = _rows(self.scale.float(), OUTER) * self.outer
        return rows.flatten()[: len(self.scale)] + self.middle

    def dense(self) -> Tensor:
        codes = torch.stack([self.codes >> 4, self.codes & 15], 1).flatten()[
            : self.out_features * self.in_features
        ]
        levels = codebook(codes.device)[codes.int()]
        whole = _rows(levels, BLOCK) * self.scales()[:, None]
        return whole.flatten()[: len(codes)].view(self.out_features, self.in_features).to(self.dtype)


def _codebook() -> tuple[float, ...]:
    """NF4's levels: quantiles of the normal distribution, seven below zero and eight above it.

    They are rounded at the same places as bitsandbytes', so that they are bit-equal.
    """
    levels = torch.cat([-_quantiles(8), torch.zeros(1), _quantiles(9).flip(0)])
    return tuple((levels / levels.max()).tolist())


def _quantiles(count: int) -> Tensor:
    probabilities = torch.linspace(0.9677083, 0.5, count, dtype=torch.float32)
    quantiles: Tensor = torch.special.ndtri(probabilities.double())
    return quantiles[:-1].float()


LEVELS = _codebook()


def codebook(device: torch.device | str = "cpu") -> Tensor:
    """NF4's levels (16,), a new tensor: one that was cached under a fake tensor mode would hold no data."""
    if torch.compiler.is_exporting():  # a graph keeps a tensor's values apart, where a compiled step misses them
        return torch.cat([torch.full((1,), level, device=device) for level in LEVELS])
    return torch.tensor(LEVELS, device=device)


INVERSE = 1.0000000649e38
"""The largest reciprocal of a scale: bitsandbytes divides by at least 1e-38."""


def encode(weight: Tensor) -> tuple[Tensor, Tensor]:
    """The code of each number (I * O,) and the scale of each block (N,), bit-equal to bitsandbytes'.

    For numbers exactly between two levels, the rounding of a product decides, or of a quotient in an incomplete
    last block.
    """
    rows = _rows(weight.float().flatten(), BLOCK)
    scale = rows.abs().amax(1)
    normalised = rows * (1 / scale).clamp(max=INVERSE)[:, None]
    if weight.numel() % BLOCK:
        scale[-1].clamp_(min=1e-38)
        normalised[-1] = rows[-1] / scale[-1]
    levels = codebook(weight.device)
    codes = torch.bucketize(normalised, (levels[1:] + levels[:-1]) / 2)
    return codes.flatten()[: weight.numel()].to(torch.uint8), scale


def _rows(flat: Tensor, length: int) -> Tensor:
    return F.pad(flat, (0, -len(flat) % length)).view(-1, length)


@torch.no_grad()
def dequantize(model: nn.Module) -> list[str]:
    """Replace quantized layers by dense ones with the rounded weights, below any wrappers. Returns the places."""
    places = {*_quantized(model)}

    def make(base: nn.Module) -> nn.Module:
        assert isinstance(base, Quantized)
        with torch.device("meta"):
            plain = nn.Linear(base.in_features, base.out_features, False)
        plain.weight = nn.Parameter(base.dense(), False)
        plain.register_parameter("bias", base.bias)
        return plain.train(base.training)

    return tree.replace(model, places, make, reach="inner") if places else []


Kind = Literal["int8", "nf4"]


def decide(
    model: nn.Module,
    *,
    where: tree.Where = ("blocks.**", "!**.router", "!**.router.**"),
    kind: Kind = "nf4",
    double: bool = False,
) -> Change:
    """The record of the change: every setting, the places and the dtype of each. Raises ValueError for others."""
    if kind not in ("int8", "nf4") or (double and kind != "nf4"):
        raise ValueError(
            f"kind is {kind!r}, double {double}; expected 'int8' or 'nf4', and double only with 'nf4'"
        )
    globs = [where] if isinstance(where, str) else list(where)
    modules = {p.name: tree.innermost(p.module) for p in tree.find(model, globs, _quantizable)}
    if quantized := [name for name, module in modules.items() if isinstance(module, Quantized)]:
        raise ValueError(f"{quantized[0]}: already quantized; load the dense model and quantize that")
    places = {name: {"dtype": str(dense(m).dtype).removeprefix("torch.")} for name, m in modules.items()}
    return Change("quantize", VERSION, {"where": globs, "kind": kind, "double": double}, places)


def _quantizable(module: nn.Module) -> bool:
    return isinstance(tree.innermost(module), nn.Linear | Quantized)


def shape(model: nn.Module, change: Change) -> None:
    """Replace the linear layers, below their wrappers if they have any.

    Raises ValueError, before anything is changed, if the change does not fit the model.
    """
    request = change.request

    def make(base: nn.Module) -> nn.Module:
        assert isinstance(base, nn.Linear)
        layer = Int8(base) if request["kind"] == "int8" else NF4(base, request["double"])
        return layer.train(base.training)

    linears = {p.name for p in tree.places(model) if isinstance(tree.innermost(p.module), nn.Linear)}
    if missing := sorted({*change.places} - linears):
        raise ValueError(f"{missing[0]}: this model has no such dense linear layer; was it quantized already?")
    dtypes = {name: float_dtype(s["dtype"]) for name, s in change.places.items() if "dtype" in s}
    tree.replace(model, {*change.places}, make, reach="inner")
    for name, module in _quantized(model).items():
        module.dtype = dtypes.get(name, module.dtype)


@torch.no_grad()
def fill(model: nn.Module, change: Change, weights: MutableMapping[str, Tensor]) -> None:
    """Quantize the weights, each of which is dropped from `weights` afterwards."""
    paths = {id(module): path for path, module in model.named_modules()}
    for name, module in each(_quantized(model).items()):
        if name in change.places:
            module.fill(weights.pop(f"{paths[id(module)]}.weight"))


def undo(model: nn.Module, change: Change) -> None:
    """Replace the quantized layers by dense ones with the rounded weights."""
    dequantize(model)


def _quantized(model: nn.Module) -> dict[str, Quantized]:
    """The quantized layers by place."""
    inner = {p.name: tree.innermost(p.module) for p in tree.places(model)}
    return {name: module for name, module in inner.items() if isinstance(module, Quantized)}
