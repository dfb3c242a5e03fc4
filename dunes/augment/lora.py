"""Low-rank adaptation of a built model, whatever it is. The papers are named in `adapted.py`.

`attach` is the short way. `decide` writes down what is to be done, `shape` does it without reading or
drawing a number (on the meta device, too), and `fill` gives an untrained adapter its first numbers.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from hashlib import sha256
from typing import Any, Literal

import torch
from torch import Tensor, nn

from dunes import tree
from dunes.augment.adapted import Adapted, Adapter, EmbeddingAdapter, Form, dense, embeds, sides
from dunes.parts import Decoder

Note = dict[str, Any]
Ranks = Mapping[str, int] | Sequence[tuple[str, int]]
LINEARS = ("blocks.**", "!**.router")
"""All linear maps in the blocks but routers, whose choice of experts is better left alone."""
NAME = "default"


def attach(model: nn.Module, **request: Any) -> Note:
    """Put an untrained adapter beside linear maps of the model, make it the active one, and return the note.

    `request` is what `decide` takes. Nothing is frozen: `note["new"]` are globs of the parameters that are
    new, and `tree.freeze(model, ["**", *(f"!{new}" for new in note["new"])])` leaves only these to learn.
    Raises ValueError, before anything is changed, for what cannot be.
    """
    note = decide(model, **request)
    shape(model, **note)
    fill(model, **note)
    select(model, note["request"]["adapter"])
    return note


def decide(
    model: nn.Module,
    *,
    where: tree.Where = LINEARS,
    rank: int = 16,
    alpha: float = 32.0,
    ranks: Ranks = (),
    rslora: bool = False,
    dora: bool = False,
    init: Literal["lora", "pissa"] = "lora",
    dropout: float = 0.0,
    adapter: str = NAME,
    seed: int = 0,
    dtype: str = "float32",
) -> Note:
    """What `attach` will do, as JSON: every setting, and the rank and alpha of each place.

    `ranks` says other ranks for globs, in order, the last match wins. An embedding is hit only where `where` names
    its place in full. `dtype` is the adapter's; the base may have another. The defaults, all linear maps
    and an alpha of 32 whatever the rank, are those of https://thinkingmachines.ai/blog/lora/, which also found
    a learning rate ten times that of full finetuning to be best.
    Raises ValueError for what cannot be, with the place.
    """
    request = {k: v for k, v in locals().items() if k != "model"}
    request["where"] = [where] if isinstance(where, str) else list(where)
    request["ranks"] = [list(pair) for pair in _pairs(ranks)]
    hit = _hit(model, request["where"])
    places = {p.name: {"rank": _rank(p.name, rank, ranks), "alpha": alpha} for p in hit}
    note = {"name": "lora", "version": 1, "request": request, "places": places}
    note["new"] = [f"**.adapters.{adapter}.*"]
    check(model, note)
    return note


def _pairs(ranks: Ranks) -> Iterable[tuple[str, int]]:
    return ranks.items() if isinstance(ranks, Mapping) else ranks


def _rank(place: str, usual: int, ranks: Ranks) -> int:
    return [usual, *(r for glob, r in _pairs(ranks) if tree.matches(glob, place))][-1]


def _hit(model: nn.Module, where: Sequence[str]) -> list[tree.Place]:
    """Linear maps that the globs select, and embeddings that they name."""
    named = {p.name for p in tree.places(model) if embeds(p.module) and p.name in where}
    hit = [
        p for p in tree.places(model) if p.name in named or (tree.linear(p.module) and tree.matches(where, p.name))
    ]
    return hit or tree.find(model, where, tree.linear)  # which says what there is


def check(model: nn.Module, note: Note) -> None:
    """Raise ValueError, with the place and the remedy, if the note cannot be carried out on this model."""
    request = note["request"]
    name, dropout = request["adapter"], request["dropout"]
    if not re.fullmatch(r"\w+", name) or hasattr(nn.ModuleDict, name):
        raise ValueError(f"an adapter cannot be called {name!r}; a word of letters, digits and _ is expected")
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout is {dropout!r}; it must be from 0 to below 1")
    if request["init"] not in ("lora", "pissa"):
        raise ValueError(f"init is {request['init']!r}; 'lora' and 'pissa' are known")
    there = {p.name: p.module for p in tree.places(model)}
    for place, one in note["places"].items():
        if place not in there:
            raise ValueError(f"{place}: there is no such place in this model; was the note made for another one?")
        _check_place(model, place, there[place], one, request)


def _check_place(model: nn.Module, place: str, module: nn.Module, one: Mapping[str, Any], request: Note) -> None:
    rank, alpha, most = one["rank"], one["alpha"], min(sides(module))
    if type(rank) is not int or not 1 <= rank <= most:
        raise ValueError(f"{place}: rank {rank!r}; expected 1 to {most}, the smaller side of its matrix")
    if type(alpha) not in (int, float) or not math.isfinite(alpha) or alpha <= 0:
        raise ValueError(f"{place}: alpha {alpha!r}; a positive number is expected")
    if isinstance(module, Adapted) and (name := request["adapter"]) in module.adapters:
        raise ValueError(
            f"{place}: there is an adapter {name!r} already; give the new one another name, or detach it"
        )
    if not embeds(module):
        return
    if request["dora"] or request["init"] != "lora":
        raise ValueError(
            f"{place}: an embedding takes plain LoRA only; leave it out, or give it an adapter of its own"
        )
    if isinstance(model, Decoder) and model.head is None and place == "embed.token":
        raise ValueError(
            f"{place}: the embedding is this model's head, too (tied); only one would change; leave it out"
        )


def shape(model: nn.Module, *, request: Note, places: Mapping[str, Mapping[str, Any]], **rest: Any) -> list[str]:
    """Wrap the places, without reading or drawing a number. A place that has adapters already gets one more.

    Returns the places. Raises ValueError, before anything is changed, for what cannot be.
    """
    check(model, {"request": request, "places": places})
    dtype = getattr(torch, request["dtype"])

    def wrap(place: tree.Place) -> nn.Module:
        outer = place.module if isinstance(place.module, Adapted) else Adapted(place.module)
        make = EmbeddingAdapter if embeds(outer) else Adapter
        outer.adapters[request["adapter"]] = make(outer.base, _form(request, places[place.name]), dtype)
        return outer.train(place.module.training)

    for place in [p for p in tree.places(model) if p.name in places]:
        setattr(place.parent, place.key, wrap(place))
    return list(places)


def _form(request: Mapping[str, Any], one: Mapping[str, Any]) -> Form:
    return Form(
        rank=one["rank"],
        alpha=one["alpha"],
        rslora=request["rslora"],
        dora=request["dora"],
        pissa=request["init"] == "pissa",
        dropout=request["dropout"],
    )


@torch.no_grad()
def fill(model: nn.Module, *, request: Note, places: Mapping[str, Any], **rest: Any) -> None:
    """First numbers: the model still computes what it did, bit for bit.

    What is drawn depends on the seed, the adapter's name and the place alone. PiSSA takes a whole singular
    value decomposition of each matrix.
    """
    there = wrapped(model)
    for place in places:
        outer = there[place]
        adapter = outer[request["adapter"]]
        _first(adapter, outer.base, _drawing(request, place))
        if adapter.magnitude is not None:
            adapter.magnitude.copy_(adapter.norms(outer.base))


def _drawing(request: Mapping[str, Any], place: str) -> torch.Generator:
    key = f"{request['seed']} {request['adapter']} {place}".encode()
    return torch.Generator().manual_seed(int.from_bytes(sha256(key).digest()[:7], "big"))


def _first(adapter: Adapter, base: nn.Module, draw: torch.Generator) -> None:
    a, b = adapter.A, adapter.B
    if adapter.A0 is not None and adapter.B0 is not None:
        for first, tensor in zip(principal(dense(base), adapter.form), (a, b), strict=True):
            tensor.copy_(first)
        adapter.A0.copy_(a)
        adapter.B0.copy_(b)
    elif isinstance(adapter, EmbeddingAdapter):
        a.zero_()  # as in PEFT: a row that is never looked up never changes
        b.copy_(torch.randn(b.shape, generator=draw))
    else:
        # kaiming_uniform_(a=sqrt(5)), as in the paper's code
        a.copy_(torch.empty(a.shape).uniform_(-1, 1, generator=draw) / a.shape[1] ** 0.5)
        b.zero_()


def principal(weight: Tensor, form: Form) -> tuple[Tensor, Tensor]:
    """A (R, I) and B (O, R) of which the scaled product is the nearest matrix of that rank."""
    u, s, v = torch.linalg.svd(weight.float(), full_matrices=False)
    root = (s[: form.rank] / form.scale).sqrt()
    return root[:, None] * v[: form.rank], u[:, : form.rank] * root


def wrapped(model: nn.Module, adapter: str | None = None) -> dict[str, Adapted]:
    """The wrappers by place; only those that hold the adapter of that name, if one is given.

    Raises ValueError, with the names that there are, if there is none.
    """
    every = {p.name: p.module for p in tree.places(model) if isinstance(p.module, Adapted)}
    found = {k: m for k, m in every.items() if adapter is None or adapter in m.adapters}
    if not found:
        names = sorted({name for m in every.values() for name in m.adapters})
        raise ValueError(
            f"no adapter {adapter or 'at all'} in this model; there are: {', '.join(names) or 'none'}"
        )
    return found


def select(model: nn.Module, adapter: str | None) -> None:
    """Let this adapter act from now on, or with None the base alone. Raises ValueError for an unknown name."""
    if adapter is not None:
        wrapped(model, adapter)
    for module in model.modules():
        if isinstance(module, Adapted):
            module.active = adapter


@contextmanager
def using(model: nn.Module, adapter: str | None) -> Iterator[None]:
    """This adapter, or with None the base alone, for a while. Raises ValueError for an unknown name."""
    before = [(m, m.active) for m in model.modules() if isinstance(m, Adapted)]
    select(model, adapter)
    try:
        yield
    finally:
        for module, active in before:
            module.active = active


def detach(model: nn.Module, adapter: str | None = None) -> list[str]:
    """Take one adapter off, or all. A place without any is again what it was. Returns the places."""
    found = wrapped(model, adapter)
    for place in [p for p in tree.places(model) if p.name in found]:
        outer = found[place.name]
        for name in list(outer.adapters) if adapter is None else [adapter]:
            del outer.adapters[name]
            outer.active = None if outer.active == name else outer.active
        if not outer.adapters:
            setattr(place.parent, place.key, outer.base)
    return list(found)


def bare(model: nn.Module) -> nn.Module:
    """The model without adapters, as another tree over the same weights: no number is copied."""
    shared: dict[int, Any] = {id(t): t for t in (*model.parameters(), *model.buffers())}
    other = deepcopy(model, shared)
    if any(isinstance(m, Adapted) for m in other.modules()):
        detach(other)
    return other
