"""LoRA adapters and their variants for any existing model: add, select, merge and remove them.

Plain LoRA is in `adapted.py`. This module is registered in the table `CHANGES` in `changes.py`.
"""

# Shapes: I inputs, O outputs, R rank.

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any, ClassVar, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dunes import tree
from dunes.augment.adapted import (
    Adapted,
    AdaptedEmbedding,
    AdaptedLinear,
    Adapter,
    EmbeddingAdapter,
    LoraConfig,
    dense,
    is_embedding,
    keeps_zeros,
    linear_of,
    sides,
)
from dunes.augment.change import Change, float_dtype, generator, modules_at, put_modules
from dunes.augment.options import NAME as NAME
from dunes.augment.options import VARIANTS as OPTIONS_OF
from dunes.augment.options import Lora, LoraExperts
from dunes.augment.prune import MaskedLinear
from dunes.ops.operation import without_autocast
from dunes.parts import Decoder, MoE
from dunes.parts.context import undeclared_modules
from dunes.progress import each

VERSION = 1
TINY = 1e-30
"""Minimum for the squared norm of a row, since untrained output projections have rows of zeros."""


class DoRA(Adapter):
    """LoRA with a parameter `magnitude`: trained row norms of the updated matrix. https://arxiv.org/abs/2402.09353"""

    PARAMETERS: ClassVar = {"magnitude": ("O", "lora_magnitude_vector")}
    PEFT_SETTING = "use_dora"
    magnitude: nn.Parameter

    def initialise(self, base: nn.Module, generator: torch.Generator) -> None:
        super().initialise(base, generator)
        self.magnitude.copy_(self.norms(base))

    def add(self, y: Tensor, update: Tensor, base: nn.Module) -> Tensor:
        ratio = self.magnitude / self.norms(base)
        bias = getattr(base, "bias", None)
        product = y if bias is None else y - bias
        # Initially the ratio is 1, and this form adds exactly `update`.
        return y + (ratio - 1) * product + ratio * update

    @torch.no_grad()
    def norms(self, base: nn.Module) -> Tensor:
        """The norms (O,) of the updated matrix's rows, without gradient (section 4.3 of the paper).

        The norms are computed from the factors; the updated matrix is not materialised.
        """
        a, b = self.factors()
        s = self.config.scale
        with without_autocast(a):
            weight = dense(base).to(a.dtype)
            squares = weight.square().sum(1)
            squares += 2 * s * ((weight @ a.T) * b).sum(1) + s * s * (b @ (a @ a.T) * b).sum(1)
        return squares.clamp(min=TINY).sqrt()

    def updated(self, base: nn.Module, dtype: torch.dtype = torch.float64) -> Tensor:
        weight = super().updated(base, dtype)
        norms = weight.detach().square().sum(1).clamp(min=TINY).sqrt()
        return weight * (self.magnitude.to(dtype) / norms)[:, None]


class PiSSA(Adapter):
    """LoRA initialised from the base weight; the update is scale * (B A - B0 A0). https://arxiv.org/abs/2404.02948

    `A0` and `B0` are the initial values of `A` and `B`. The paper instead subtracts B0 A0 from the base; here
    several adapters share the base, so the base stays unchanged. An untrained adapter leaves the output unchanged,
    bit for bit. In PEFT's format, the adapter is a plain LoRA of rank 2 R.
    """

    A0: Tensor
    B0: Tensor

    def __init__(self, base: nn.Module, config: LoraConfig, dtype: torch.dtype) -> None:
        super().__init__(base, config, dtype)
        self.register_buffer("A0", torch.empty_like(self.A))
        self.register_buffer("B0", torch.empty_like(self.B))

    def initialise(self, base: nn.Module, generator: torch.Generator) -> None:
        rank = self.config.rank
        u, s, v = torch.linalg.svd(dense(base).float(), full_matrices=False)
        root = (s[:rank] / self.config.scale).sqrt()  # scale * B A is the best rank-R approximation of the base
        self.A.copy_(root[:, None] * v[:rank])
        self.B.copy_(u[:, :rank] * root)
        self.A0.copy_(self.A)
        self.B0.copy_(self.B)

    def update(self, x: Tensor) -> Tensor:
        x = F.dropout(x, self.config.dropout, self.training).to(self.A.dtype)
        y = F.linear(F.linear(x, self.A), self.B) - F.linear(F.linear(x, self.A0), self.B0)
        return y * self.config.scale

    def factors(self) -> tuple[Tensor, Tensor]:
        return torch.cat([self.A, self.A0]), torch.cat([self.B, -self.B0], 1)


VARIANTS: dict[str, type[Adapter]] = {"dora": DoRA, "pissa": PiSSA}
"""Maps names of `options.VARIANTS` to adapter classes; the other variants are options of plain LoRA."""


def adapter_class(request: Mapping[str, Any]) -> type[Adapter]:
    """The adapter class for these options; for several variants, a subclass of all their classes."""
    classes = tuple(cls for name, cls in VARIANTS.items() if OPTIONS_OF[name].items() <= request.items())
    if len(classes) < 2:
        return next(iter(classes), Adapter)
    return type("".join(cls.__name__ for cls in classes), classes, {})


def decide(model: nn.Module, options: Lora) -> Change:
    """The record of the change: every setting, and the rank and alpha of each place.

    Raises ValueError with the name of the place if an option is invalid.
    """
    change = adapter_change("lora", VERSION, model, options)
    check(model, change)
    return change


def adapter_change(name: str, version: int, model: nn.Module, options: Lora | LoraExperts) -> Change:
    """The record of the change `name`, with the rank and alpha of each place that `where` selects."""
    request, places = options.request(), {}
    for place in _select(model, request["where"]):
        matching = [rank for glob, rank in request["ranks"] if tree.matches(glob, place.name)]
        places[place.name] = {"rank": [request["rank"], *matching][-1], "alpha": request["alpha"]}
    return Change(name, version, request, places, (f"**.adapters.{options.adapter}.*",))


def _select(model: nn.Module, where: Sequence[str]) -> list[tree.Place]:
    """The linear layers that match the globs, and the embeddings whose exact names are in `where`."""
    named = {p.name for p in tree.places(model) if is_embedding(p.module) and p.name in where}
    selected = [
        p for p in tree.places(model) if p.name in named or (tree.linear(p.module) and tree.matches(where, p.name))
    ]
    return selected or tree.find(model, where, tree.linear)  # raises ValueError that lists the linear layers


def check(model: nn.Module, change: Change) -> None:
    """Raise ValueError with the place and a remedy if the change cannot be made to this model."""
    request = change.request
    tied = isinstance(model, Decoder) and model.head is None
    for place, module in check_places(model, change):
        if not is_embedding(module):
            continue
        if adapter_class(request) is not Adapter:
            raise ValueError(
                f"{place}: an embedding supports plain LoRA only; exclude it, or give it an adapter of its own"
            )
        if tied and place == "embed.token":
            raise ValueError(
                f"{place}: the embedding is tied to the head, and an adapter would change only one of them; "
                "exclude it"
            )


def check_places(model: nn.Module, change: Change) -> list[tuple[str, nn.Module]]:
    """The names of the places of the change, each with the module there.

    Raises ValueError for an invalid adapter name, dropout, dtype, rank or alpha.
    """
    name, dropout = change.request["adapter"], change.request["dropout"]
    if not re.fullmatch(r"\w+", name) or hasattr(nn.ModuleDict, name):
        raise ValueError(f"adapter name {name!r}; expected letters, digits and _, not a ModuleDict method")
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout is {dropout!r}; it must be from 0 to below 1")
    modules = modules_at(model, change.places)
    for place, settings in change.places.items():
        module, rank, alpha = modules[place], settings["rank"], settings["alpha"]
        if not 1 <= rank <= min(sides(module)) or not 0 < alpha < math.inf:
            raise ValueError(
                f"{place}: rank {rank}, alpha {alpha}; expected a rank from 1 to {min(sides(module))}, "
                "the shorter side, and a positive alpha"
            )
        if isinstance(module, Adapted) and name in module.adapters:
            raise ValueError(
                f"{place}: it already has an adapter {name!r}; start from the model without it, or merge it first "
                "(dunes augment merge); in Python, pass another name as adapter="
            )
    return [(place, modules[place]) for place in change.places]


def shape(model: nn.Module, change: Change) -> None:
    """Wrap the modules at the places and activate the adapter. A module already wrapped gets one more adapter.

    Raises ValueError, before anything is changed, if the change does not fit the model.
    """
    check(model, change)
    cls = adapter_class(change.request)
    add_adapters(model, change, lambda place: EmbeddingAdapter if is_embedding(place.module) else cls)


def add_adapters(
    model: nn.Module, change: Change, class_at: Callable[[tree.Place], Callable[..., Adapter]]
) -> None:
    """Wrap the modules at the change's places, and add an active adapter of class `class_at(place)` to each."""
    request, dtype = change.request, float_dtype(change.request["dtype"])
    options = {key: request[key] for key in ("rslora", "dropout") if key in request}
    for place in [p for p in tree.places(model) if p.name in change.places]:
        wrapper = AdaptedEmbedding if is_embedding(place.module) else AdaptedLinear
        outer = place.module if isinstance(place.module, Adapted) else wrapper(place.module)
        settings = change.places[place.name]
        config = LoraConfig(settings["rank"], settings["alpha"], **options)
        outer.adapters[request["adapter"]] = class_at(place)(outer.base, config, dtype)
        setattr(place.parent, place.key, outer.train(place.module.training))
    set_adapter(model, request["adapter"])


@torch.no_grad()
def fill(model: nn.Module, change: Change, weights: Mapping[str, Tensor]) -> None:
    """Initialise the adapter; the model's outputs stay the same, bit for bit.

    The random numbers depend only on the seed, the adapter's name and the place. Initialising PiSSA computes a
    full SVD of each matrix.
    """
    modules, name = adapted_modules(model), change.request["adapter"]
    for place in each(change.places):
        modules[place][name].initialise(modules[place].base, generator(change.request["seed"], name, place))


def undo(model: nn.Module, change: Change) -> None:
    """Remove the adapter from the model."""
    detach(model, change.request["adapter"])


def adapted_modules(model: nn.Module, adapter: str | None = None) -> dict[str, Adapted]:
    """The adapted modules by name; with `adapter`, only those that have this adapter.

    If the model has no such module, raises ValueError with the names of the model's adapters.
    """
    modules = {p.name: p.module for p in tree.places(model) if isinstance(p.module, Adapted)}
    selected = {k: m for k, m in modules.items() if adapter is None or adapter in m.adapters}
    if not selected:
        names = sorted({name for m in modules.values() for name in m.adapters})
        missing = "adapter" if adapter is None else f"adapter {adapter!r}"
        raise ValueError(f"this model has no {missing}; its adapters are: {', '.join(names) or 'none'}")
    return selected


def set_adapter(model: nn.Module, adapter: str | None) -> None:
    """Activate this adapter; None deactivates all. Raises ValueError for an unknown name."""
    if adapter is not None:
        adapted_modules(model, adapter)
    for module in model.modules():
        if isinstance(module, Adapted):
            module.active = adapter


def active_adapter(model: nn.Module) -> str | None:
    """The name of the active adapter; None if none is active."""
    return next((m.active for m in model.modules() if isinstance(m, Adapted)), None)


@contextmanager
def adapter_active(model: nn.Module, adapter: str | None) -> Iterator[None]:
    """A context in which this adapter is active (None: no adapter). Raises ValueError for an unknown name."""
    before = [(m, m.active) for m in model.modules() if isinstance(m, Adapted)]
    set_adapter(model, adapter)
    try:
        yield
    finally:
        for module, active in before:
            module.active = active


@contextmanager
def row_adapters(model: nn.Module, names: Sequence[str | None]) -> Iterator[None]:
    """A context in which row i of the batch uses the adapter `names[i]`; None selects the base model.

    Raises ValueError for an unknown name. If the names differ, also raises ValueError for adapters in experts, for
    LoRA experts that are MLPs, and for a model with parts that may mix tokens. In these cases, row i of an
    adapter's input need not belong to row i of the batch.
    """
    if len(set(names)) == 1:
        with adapter_active(model, names[0]):
            yield
        return
    for name in set(names) - {None}:
        adapted_modules(model, name)
    modules = adapted_modules(model)
    experts = [e for m in model.modules() if isinstance(m, MoE) for e in m.modules()]
    reshaping = [a for m in modules.values() for a in m.adapters.values() if not cast(Adapter, a).keeps_shape]
    if reshaping or undeclared_modules(model) or any(isinstance(e, Adapted) for e in experts):
        raise ValueError("adapters in experts, as MLPs or with parts that may mix tokens: use one at a time")
    for module in modules.values():
        module._row_adapters = names
    try:
        yield
    finally:
        for module in modules.values():
            module._row_adapters = ()


def detach(model: nn.Module, adapter: str | None = None) -> list[str]:
    """Remove one adapter, or with None all adapters; unwrap modules that have no adapter left.

    Returns the names of all modules that lost an adapter.
    """
    selected = adapted_modules(model, adapter)
    for outer in selected.values():
        for name in list(outer.adapters) if adapter is None else [adapter]:
            del outer.adapters[name]
            outer.active = None if outer.active == name else outer.active
    put_modules(model, {place: outer.base for place, outer in selected.items() if not outer.adapters})
    return list(selected)


def base_model(model: nn.Module) -> nn.Module:
    """A copy of the model without adapters; the copy shares the weights with the model."""
    shared: dict[int, Any] = {id(t): t for t in (*model.parameters(), *model.buffers())}
    base = deepcopy(model, shared)
    if any(isinstance(m, Adapted) for m in base.modules()):
        detach(base)
    return base


class Merged(NamedTuple):
    """The result of a merge: rounding `errors` by module name.

    An error is the norm of the rounding error divided by the norm of the update. Errors are about 1e-7 in float32
    and 0.1 or more in bfloat16, since rounding to bfloat16 removes most of a small update. `share` is the fraction
    of the update that survives rounding: the change of the weights, projected onto the update.
    """

    errors: dict[str, float]
    share: float


@torch.no_grad()
def merge(model: nn.Module, adapter: str | None = None, dtype: torch.dtype | None = None) -> Merged:
    """Merge the adapter (by default the only one) into the base weights and remove the adapter wrappers.

    A quantized base becomes dense. `dtype` is the dtype of the merged matrices, by default the base's. Raises
    ValueError for a mixture of LoRA experts. Also raises ValueError if a module to be merged has other adapters,
    since the other adapters were trained for the unmerged base.
    """
    selected = adapted_modules(model, adapter)
    for place, outer in selected.items():
        if mixtures := [n for n, a in outer.adapters.items() if a.depends_on_input and adapter in (None, n)]:
            raise ValueError(
                f"{place}: {mixtures[0]!r} is a mixture of LoRA experts, which depends on the input, so no "
                "matrix equals it; use the model without merging"
            )
        if len(outer.adapters) > 1:
            raise ValueError(f"{place}: adapters {', '.join(outer.adapters)}; detach the others before the merge")
    if adapter is None and len(names := {n for m in selected.values() for n in m.adapters}) > 1:
        raise ValueError(f"adapters {', '.join(sorted(names))} are at different places; name the one to merge")
    merged = {place: _merge_place(outer, dtype) for place, outer in selected.items()}
    put_modules(model, {place: module for place, (*_, module) in merged.items()})
    errors = {place: error for place, (error, *_) in merged.items()}
    changed, update = (sum(sums[i] for _, sums, _ in merged.values()) for i in (0, 1))
    return Merged(errors, changed / update if update else 1.0)


def _merge_place(outer: Adapted, dtype: torch.dtype | None) -> tuple[float, tuple[float, float], nn.Module]:
    """Merge one module; returns (its error as in `Merged.errors`, two dot products, merged module).

    The dot products are (change, update) and (update, update). The change is the merged weight minus the base
    weight, both rounded; the update is not rounded.
    """
    (name,) = outer.adapters
    base = dense(outer.base)
    exact = outer[name].updated(outer.base)
    weight = exact.to(dtype or base.dtype)
    rounding, update = weight.double() - exact, exact - base.double()
    square = update.square().sum().item()
    error = rounding.norm().item() / square**0.5 if square else 0.0
    change = weight.double() - base.to(weight.dtype).double()  # the rounding of the base does not count as change
    return error, ((change * update).sum().item(), square), _plain(outer.base, weight).train(outer.training)


def _plain(base: nn.Module, weight: Tensor) -> nn.Module:
    if isinstance(base, nn.Linear | nn.Embedding) and base.weight.dtype == weight.dtype:
        base.weight.copy_(weight)
        return base
    parameter = nn.Parameter(weight, any(p.requires_grad for p in base.parameters()))
    if not is_embedding(base):
        cls = MaskedLinear if keeps_zeros(base) else nn.Linear
        return linear_of(parameter, getattr(base, "bias", None), base.training, cls)
    with torch.device("meta"):
        plain = nn.Embedding(*weight.shape)
    plain.weight = parameter
    return plain
