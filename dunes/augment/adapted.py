"""Low-rank adapters, and wrappers that hold a linear layer or an embedding together with its named adapters.

LoRA https://arxiv.org/abs/2106.09685, rsLoRA https://arxiv.org/abs/2312.03732; variants of LoRA are in `lora.py`.
"""

# Shapes: I inputs, O outputs (in embeddings: vocabulary size and width), R rank.

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dunes.ops import low_rank
from dunes.ops.operation import autocast_enabled, without_autocast


@dataclass(frozen=True)
class LoraConfig:
    """Settings of a module's adapter; `scale` is alpha / rank, or alpha / sqrt(rank) with `rslora`."""

    rank: int
    alpha: float
    rslora: bool = False
    dropout: float = 0.0

    @property
    def scale(self) -> float:
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)


class Adapter(nn.Module):
    """A LoRA update of a linear layer: scale * B(A(dropout(x))), with matrices `A` (R, I) and `B` (O, R)."""

    PARAMETERS: ClassVar[Mapping[str, tuple[str, str]]] = {
        "A": ("RI", "lora_A.weight"),
        "B": ("OR", "lora_B.weight"),
    }
    """Maps a trained tensor's attribute to its dimensions and name in PEFT's files. Subclasses add tensors."""
    PEFT_SETTING: ClassVar[str] = ""
    """The key of PEFT's adapter_config.json that selects this variant; "" if PEFT stores it as plain LoRA."""
    A: nn.Parameter
    B: nn.Parameter
    supports_packing = True
    depends_on_input = False  # True if the update depends on the input, so that it cannot be merged
    keeps_shape = True  # False if the shapes of inputs or outputs differ from the base's

    def __init_subclass__(cls) -> None:
        own = [vars(base).get("PARAMETERS", {}) for base in reversed(cls.__mro__)]
        cls.PARAMETERS = {name: spec for parameters in own for name, spec in parameters.items()}

    def __init__(self, base: nn.Module, config: LoraConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        device = next(t.device for t in (*base.parameters(), *base.buffers()))
        size = {"R": config.rank, **dict(zip("IO", sides(base), strict=True))}
        for name, (dims, _) in self.PARAMETERS.items():
            empty = torch.empty([size[dim] for dim in dims], device=device, dtype=dtype)
            setattr(self, name, nn.Parameter(empty))

    def initialise(self, base: nn.Module, generator: torch.Generator) -> None:
        """Set initial values for which the update is zero. `base` is the adapted module."""
        # kaiming_uniform_(a=sqrt(5)), as in the paper's code
        self.A.copy_(torch.empty(self.A.shape).uniform_(-1, 1, generator=generator) / self.A.shape[-1] ** 0.5)
        self.B.zero_()

    def forward(self, x: Tensor, y: Tensor, base: nn.Module) -> Tensor:
        """Add the update of input x (..., I) to the base's output y (..., O); returns (..., O) in y's dtype."""
        if keeps_zeros(base) and not self.depends_on_input:  # the update of a pruned base is masked, too
            x = F.dropout(x, self.config.dropout, self.training).to(self.A.dtype)
            change = self.updated(base, torch.float32).to(x.dtype) - dense(base).to(x.dtype)
            return (y + F.linear(x, change)).to(y.dtype)
        return self.add(y, self.update(x), base).to(y.dtype)

    def add(self, y: Tensor, update: Tensor, base: nn.Module) -> Tensor:
        """Add the update (..., O) to the output y (..., O) of `base`; returns the adapted output (..., O)."""
        return y + update

    def base_input(self, x: Tensor) -> Tensor:
        """Convert the adapted layer's input x to the input of the base layer."""
        return x

    def update(self, x: Tensor) -> Tensor:
        """The update of the output: (..., I) -> (..., O), in the adapter's dtype or autocast's."""
        x = F.dropout(x, self.config.dropout, self.training).to(self.A.dtype)
        return F.linear(F.linear(x, self.A), self.B) * self.config.scale

    def factors(self) -> tuple[Tensor, Tensor]:
        """Matrices A and B; scale * B A is the update of the base's weight. Their rank may differ from R."""
        return self.A, self.B

    def products(self) -> list[tuple[int, int]]:
        """The (inputs, outputs) of each matrix product that the update computes for a token."""
        return [(factor.shape[1], factor.shape[0]) for factor in self.factors()]

    def updated(self, base: nn.Module, dtype: torch.dtype = torch.float64) -> Tensor:
        """The base's weight plus the update: (O, I), or (I, O) for an embedding. A pruned base keeps its zeros."""
        a, b = self.factors()
        with without_autocast(a):
            update = self.config.scale * (b.to(dtype) @ a.to(dtype))
            weight = dense(base).to(dtype) + (update.T if is_embedding(base) else update)
        return weight * (dense(base) != 0) if keeps_zeros(base) else weight


class EmbeddingAdapter(Adapter):
    """A LoRA update of an embedding (I, O). Its `A` (R, I) has one column per token id; dropout is not applied."""

    PARAMETERS: ClassVar = {"A": ("RI", "lora_embedding_A"), "B": ("OR", "lora_embedding_B")}

    def initialise(self, base: nn.Module, generator: torch.Generator) -> None:
        self.A.zero_()  # as in PEFT; the embeddings of unused ids then never change
        self.B.copy_(torch.randn(self.B.shape, generator=generator))

    def update(self, x: Tensor) -> Tensor:
        """The update of the output: ids (...) int64 -> (..., O)."""
        return F.linear(F.embedding(x, self.A.T), self.B) * self.config.scale


def keeps_zeros(module: nn.Module) -> bool:
    """True if zeros in the weight of this linear layer must stay zero, because the layer is pruned."""
    return bool(getattr(module, "keeps_zeros", False))


class Adapted(nn.Module):
    """A linear layer or an embedding with named adapters; `active` is the name of the active adapter, or None."""

    supports_packing = True

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base
        self.adapters = nn.ModuleDict()
        self._active: str | None = None  # not part of the structure digest
        self._row_adapters: Sequence[str | None] = ()  # set by `lora.row_adapters` for a forward

    @property
    def active(self) -> str | None:
        """The name of the active adapter; None if no adapter is active."""
        return self._active

    @active.setter
    def active(self, name: str | None) -> None:
        self._active = name

    @property
    def bias(self) -> Tensor | None:
        """The base's bias (O,); None without one."""
        return getattr(self.base, "bias", None)

    @property
    def active_adapter(self) -> Adapter | None:
        """The active adapter; None if no adapter is active, or if the active adapter is not in this module."""
        return self[self.active] if self.active is not None and self.active in self.adapters else None

    @property
    def added_products(self) -> list[tuple[int, int]]:
        """The (inputs, outputs) of each matrix product that the active adapter adds for a token."""
        products = self.active_adapter.products() if self.active_adapter else []
        return products[int(is_embedding(self)) :]  # ids are looked up

    def __getitem__(self, name: str) -> Adapter:
        return cast(Adapter, self.adapters[name])

    def forward(self, x: Tensor) -> Tensor:
        """The output (..., O) of the base with the active adapter, or with an adapter for each row."""
        if self._row_adapters:
            return self._forward_by_row(x, self._row_adapters)
        if (adapter := self.active_adapter) is None:
            return cast(Tensor, self.base(x))
        if _fusable(adapter, self.base, x):
            make = lambda: dense(self.base)
            return low_rank.fused(x, adapter.A, adapter.B, make, self.bias, adapter.config.scale)
        return cast(Tensor, adapter(x, self.base(adapter.base_input(x)), self.base))

    def _forward_by_row(self, x: Tensor, names: Sequence[str | None]) -> Tensor:
        y: Tensor = self.base(x)
        for name in set(self.adapters) & set(names):
            rows = torch.tensor([i for i, row in enumerate(names) if row == name], device=x.device)
            y = y.index_copy(0, rows, self[name](x[rows], y[rows], self.base))
        return y

    def dense(self) -> Tensor:
        """The base's weight with the active adapter merged into it, in the base's dtype."""
        weight, adapter = dense(self.base), self.active_adapter
        return weight if adapter is None else adapter.updated(self.base, torch.float32).to(weight.dtype)


class AdaptedLinear(Adapted):
    """A linear layer with adapters."""

    in_features = property(lambda self: self.base.in_features)
    out_features = property(lambda self: self.base.out_features)


class AdaptedEmbedding(Adapted):
    """An embedding with adapters."""

    num_embeddings = property(lambda self: self.base.num_embeddings)
    embedding_dim = property(lambda self: self.base.embedding_dim)


def _fusable(adapter: Adapter, base: Any, x: Tensor) -> bool:
    """True if `low_rank.fused` can compute this forward: plain LoRA, no dropout, a frozen base, one dtype."""
    if type(adapter) is not Adapter or torch.compiler.is_compiling():
        return False
    if adapter.config.dropout and adapter.training:
        return False
    if type(base) is not nn.Linear and not getattr(base, "makes_dense", False):
        return False
    dtypes = {x.dtype, adapter.A.dtype, base.dtype if hasattr(base, "dtype") else base.weight.dtype}
    same_dtype = len(dtypes) == 1 or autocast_enabled(x)
    return same_dtype and not any(p.requires_grad for p in base.parameters())


def order_matters(model: nn.Module) -> str:
    """The name of the first module that uses results of an earlier block; "" if there is none."""
    return next((name for name, m in model.named_modules() if getattr(m, "depends_on_order", False)), "")


def how_to_make_dense(module: nn.Module | None) -> str:
    """Advice on how to get a plain linear layer, for the end of an error message."""
    if isinstance(module, Adapted) and any(a.depends_on_input for a in module.adapters.values()):
        return "a mixture of LoRA experts cannot be merged: make this change before you add the mixture"
    return (
        "merge adapters (dunes augment merge), and start from the model before it was quantized "
        "or from its dense weights (dunes augment merge, too)"
    )


def not_plain(name: str, module: nn.Module | None) -> ValueError:
    """The error for a module that should be a plain linear layer, with advice on how to get one."""
    kind = "no module" if module is None else type(module).__name__
    return ValueError(f"{name} is {kind}; expected a plain linear layer: {how_to_make_dense(module)}")


def dense(module: nn.Module) -> Tensor:
    """The dense weight of a linear layer (O, I) or of an embedding (I, O), dequantized if necessary."""
    make = getattr(module, "dense", None)
    return cast(Tensor, module.weight if make is None else make())


def linear_of(
    weight: nn.Parameter, bias: nn.Parameter | None, training: bool, cls: type[nn.Linear] = nn.Linear
) -> nn.Linear:
    """A linear layer of class `cls` with these parameters, which are not copied."""
    rows, columns = weight.shape
    with torch.device("meta"):
        linear = cls(columns, rows, False)
    linear.weight = weight
    linear.register_parameter("bias", bias)
    return linear.train(training)


def sides(module: nn.Module) -> tuple[int, int]:
    """(inputs, outputs) of a linear layer, or (vocabulary size, width) of an embedding."""
    if is_embedding(module):
        return cast(int, module.num_embeddings), cast(int, module.embedding_dim)
    return cast(int, module.in_features), cast(int, module.out_features)


def is_embedding(module: nn.Module) -> bool:
    """True if the module has the attributes of an embedding, whatever its class."""
    return hasattr(module, "num_embeddings") and hasattr(module, "embedding_dim")
