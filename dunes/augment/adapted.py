"""A linear map or an embedding with low-rank changes beside it, of which one at a time acts.

LoRA https://arxiv.org/abs/2106.09685, rsLoRA https://arxiv.org/abs/2312.03732,
DoRA https://arxiv.org/abs/2402.09353, PiSSA https://arxiv.org/abs/2404.02948
"""

# Shapes: I inputs, O outputs (of an embedding: the vocabulary and the width), R rank.

from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dunes.ops import low_rank

TINY = 1e-30
"""A row of zeros, as in output projections that nobody has trained yet, has no direction to keep."""


@dataclass(frozen=True)
class Form:
    """One adapter at one place: `scale` is alpha / rank, or alpha / sqrt(rank) with `rslora`."""

    rank: int
    alpha: float
    rslora: bool = False
    dora: bool = False
    pissa: bool = False
    dropout: float = 0.0

    @property
    def scale(self) -> float:
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)


class Adapter(nn.Module):
    """What is added to a linear map: scale * B(A(dropout(x))), with A (R, I) and B (O, R).

    DoRA has a `magnitude` (O,) for the rows of the changed matrix. PiSSA begins with A and B other than zero, and
    keeps these as A0 and B0, whose product is taken off again. (The paper takes it off the base. Here the base
    is shared with other adapters and stays as it is, and an untrained adapter changes nothing, bit for bit.)
    """

    A0: Tensor | None
    B0: Tensor | None
    constant = True  # its buffers, for whoever would keep a copy of what a forward may change

    supports_packing = True

    def __init__(self, base: nn.Module, form: Form, dtype: torch.dtype) -> None:
        super().__init__()
        wide, tall = sides(base)
        self.form = form
        where = next(t.device for t in (*base.parameters(), *base.buffers()))
        kind: dict[str, Any] = {"device": where, "dtype": dtype}
        self.A = nn.Parameter(torch.empty(form.rank, wide, **kind))
        self.B = nn.Parameter(torch.empty(tall, form.rank, **kind))
        self.magnitude = nn.Parameter(torch.empty(tall, **kind)) if form.dora else None
        self.register_buffer("A0", torch.empty(form.rank, wide, **kind) if form.pissa else None)
        self.register_buffer("B0", torch.empty(tall, form.rank, **kind) if form.pissa else None)

    def forward(self, x: Tensor, y: Tensor, base: nn.Module) -> Tensor:
        """x (..., I) and what the base makes of it, y (..., O) -> (..., O) in y's dtype."""
        change = self.change(x)
        if self.magnitude is None:
            return (y + change).to(y.dtype)
        ratio = self.magnitude / self.norms(base)
        bias = getattr(base, "bias", None)
        plain = y if bias is None else y - bias
        # At the start the ratio is one: written like this, nothing is then rounded.
        return (y + (ratio - 1) * plain + ratio * change).to(y.dtype)

    def change(self, x: Tensor) -> Tensor:
        """(..., I) -> (..., O), in the adapter's dtype or autocast's."""
        x = F.dropout(x, self.form.dropout, self.training).to(self.A.dtype)
        y = F.linear(F.linear(x, self.A), self.B)
        if self.A0 is not None and self.B0 is not None:
            y = y - F.linear(F.linear(x, self.A0), self.B0)
        return y * self.form.scale

    def factors(self) -> tuple[Tensor, Tensor]:
        """A and B, of twice the rank with PiSSA, whose product times the scale is the change of the matrix."""
        if self.A0 is None or self.B0 is None:
            return self.A, self.B
        return torch.cat([self.A, self.A0]), torch.cat([self.B, -self.B0], 1)

    @torch.no_grad()
    def norms(self, base: nn.Module) -> Tensor:
        """The length of each row of the changed matrix (O,), a constant on the way back (DoRA, section 4.3).

        Put together from small products: the changed matrix itself is never made.
        """
        a, b = self.factors()
        s = self.form.scale
        with _exact(a):
            weight = dense(base).to(a.dtype)
            squares = weight.square().sum(1)
            squares += 2 * s * ((weight @ a.T) * b).sum(1) + s * s * (b @ (a @ a.T) * b).sum(1)
        return squares.clamp(min=TINY).sqrt()

    def changed(self, base: nn.Module, dtype: torch.dtype = torch.float64) -> Tensor:
        """The base's matrix with the change in it, (O, I) for a linear map."""
        a, b = self.factors()
        with _exact(a):
            whole = dense(base).to(dtype) + self.form.scale * (b.to(dtype) @ a.to(dtype))
        if self.magnitude is None:
            return whole
        norms = whole.detach().square().sum(1).clamp(min=TINY).sqrt()
        return whole * (self.magnitude.to(dtype) / norms)[:, None]


class EmbeddingAdapter(Adapter):
    """The same for a table of vectors (I, O): A (R, I) holds a column for each id. No dropout acts on ids."""

    def change(self, x: Tensor) -> Tensor:
        """ids (...) -> (..., O)."""
        return F.linear(F.embedding(x, self.A.T), self.B) * self.form.scale

    def changed(self, base: nn.Module, dtype: torch.dtype = torch.float64) -> Tensor:
        """The table (I, O) with the change in it."""
        with _exact(self.A):
            return dense(base).to(dtype) + self.form.scale * (self.B.to(dtype) @ self.A.to(dtype)).T


def _exact(like: Tensor) -> torch.autocast:
    """Matrices themselves, unlike activations, are not to be rounded to autocast's dtype."""
    return torch.autocast(like.device.type, enabled=False)


class Adapted(nn.Module):
    """A linear map or an embedding, and adapters by name; `active` names the one that acts, if any does."""

    supports_packing = True

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base
        self.adapters = nn.ModuleDict()
        self.active: str | None = None
        for size in ("in_features", "out_features", "num_embeddings", "embedding_dim"):
            if hasattr(base, size):
                setattr(self, size, getattr(base, size))

    @property
    def bias(self) -> Tensor | None:
        return getattr(self.base, "bias", None)

    @property
    def acting(self) -> Adapter | None:
        """The adapter that acts here; an adapter of that name may be at other places only."""
        here = self.active is not None and self.active in self.adapters
        return self[self.active] if here and self.active is not None else None

    def __getitem__(self, name: str) -> Adapter:
        return cast(Adapter, self.adapters[name])

    def forward(self, x: Tensor) -> Tensor:
        adapter = self.acting
        if adapter is not None and _fusable(adapter, self.base, x):
            make = lambda: dense(self.base)
            return low_rank.fused(x, adapter.A, adapter.B, make, self.bias, adapter.form.scale)
        y: Tensor = self.base(x)
        if adapter is None:
            return y
        changed: Tensor = adapter(x, y, self.base)
        return changed

    def dense(self) -> Tensor:
        """The matrix that acts, in the dtype of the base's."""
        weight = dense(self.base)
        return weight if self.acting is None else self.acting.changed(self.base, torch.float32).to(weight.dtype)


def _fusable(adapter: Adapter, base: nn.Module, x: Tensor) -> bool:
    """Whether a frozen base and a plain low-rank change can be computed together: all in one dtype."""
    if type(adapter) is not Adapter or adapter.magnitude is not None or adapter.A0 is not None:
        return False
    if (adapter.form.dropout and adapter.training) or torch.compiler.is_compiling():
        return False
    if type(base) is not nn.Linear and not getattr(base, "remade", False):
        return False
    mixed = {x.dtype, adapter.A.dtype, _dtype(base)}
    one = len(mixed) == 1 or torch.is_autocast_enabled(x.device.type)
    return one and not any(p.requires_grad for p in base.parameters())


def _dtype(base: nn.Module) -> torch.dtype:
    return cast(torch.dtype, base.dtype) if hasattr(base, "dtype") else cast(Tensor, base.weight).dtype


def dense(module: nn.Module) -> Tensor:
    """The matrix (O, I) of a linear map, or the table of an embedding, whatever it is kept as."""
    make = getattr(module, "dense", None)
    return cast(Tensor, module.weight if make is None else make())


def sides(module: nn.Module) -> tuple[int, int]:
    """How many numbers go in and come out; of an embedding the vocabulary and the width."""
    if embeds(module):
        return cast(int, module.num_embeddings), cast(int, module.embedding_dim)
    return cast(int, module.in_features), cast(int, module.out_features)


def embeds(module: nn.Module) -> bool:
    """Whether the module is a table of vectors, whatever its class."""
    return hasattr(module, "num_embeddings") and hasattr(module, "embedding_dim")
