"""Walk, exchange, freeze, watch and count the modules of any `nn.Module`.

A *place* is a module's dotted name as it reads without wrappers: a module with a `.base` (LoRA,
say, or a quantized linear) is transparent, so `blocks.3.attn.q` names the same spot before and
after a change. Places are addressed by globs, which unlike functions can be written to a file and
repeated: `*` stays inside one segment, `**` crosses segments, `!` excludes, the last match wins.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

from torch import nn

Where = str | Sequence[str]
Kind = Callable[[nn.Module], bool]


class Place(NamedTuple):
    """`parent.key` holds `module`; `name` is where that is in the tree without wrappers."""

    name: str
    module: nn.Module
    parent: nn.Module
    key: str


def anything(module: nn.Module) -> bool:
    return True


def linear(module: nn.Module) -> bool:
    """Whether the module maps `in_features` to `out_features`, whatever its class."""
    return hasattr(module, "in_features") and hasattr(module, "out_features")


def matches(where: Where, name: str) -> bool:
    """Whether the glob, or the ordered list of globs, selects this place."""
    chosen = False
    for glob in [where] if isinstance(where, str) else where:
        if _pattern(glob.removeprefix("!")).fullmatch(name):
            chosen = not glob.startswith("!")
    return chosen


def _pattern(glob: str) -> re.Pattern[str]:
    pieces = {"**": ".*", "*": "[^.]*", "?": "[^.]"}
    tokens = re.findall(r"\*\*|[*?]|\[[^\]]*\]|[^*?\[]+|\[", glob)
    return re.compile("".join(pieces.get(t, t if t[0] == "[" and t[-1] == "]" else re.escape(t)) for t in tokens))


def places(model: nn.Module, prefix: str = "") -> Iterator[Place]:
    """Every place below `model`, parents before children, the outermost module of each wrapping."""
    for key, module in model.named_children():
        yield Place(prefix + key, module, model, key)
        yield from places(_innermost(module, model, key)[0], f"{prefix}{key}.")


def _innermost(module: nn.Module, parent: nn.Module, key: str) -> tuple[nn.Module, nn.Module, str]:
    while isinstance(base := getattr(module, "base", None), nn.Module):
        module, parent, key = base, module, "base"
    return module, parent, key


def innermost(module: nn.Module) -> nn.Module:
    """What stands below all wrappers."""
    return _innermost(module, module, "")[0]


def find(model: nn.Module, where: Where = "**", kind: Kind = anything) -> list[Place]:
    """The places that `where` selects and whose module is of that kind.

    Raises ValueError if there is none: a change that hits nothing is a mistake, not a change.
    """
    found = [p for p in places(model) if matches(where, p.name) and kind(p.module)]
    if not found:
        some = ", ".join(p.name for p in places(model) if kind(p.module)) or "none"
        raise ValueError(f"{where!r} selects nothing here; the places of that kind are: {some[:300]}")
    return found


def replace(
    model: nn.Module,
    where: Where,
    make: Callable[[nn.Module], nn.Module],
    kind: Kind = anything,
    reach: Literal["outer", "inner"] = "outer",
) -> list[str]:
    """Put `make(module)` where `module` stood, and return the names of the places.

    `reach` says which module of a wrapped place is meant: the outermost wrapper, or the innermost
    base (the one that holds the dense weights). Raises ValueError if nothing is selected.
    """

    def reached(p: Place) -> Place:
        return p if reach == "outer" else Place(p.name, *_innermost(p.module, p.parent, p.key))

    found = [r for p in find(model, where) if kind((r := reached(p)).module)]
    if not found:
        raise ValueError(f"{where!r} selects places, but none of the kind asked for")
    for place in found:
        setattr(place.parent, place.key, make(place.module))
    return [place.name for place in found]


def freeze(model: nn.Module, where: Where = "**") -> list[str]:
    """Stop training the parameters whose dotted names are selected, and return those names."""
    names = [name for name, _ in model.named_parameters() if matches(where, name)]
    if not names:
        raise ValueError(f"{where!r} selects no parameter")
    for name in names:
        model.get_parameter(name).requires_grad_(False)
    return names


def count(model: nn.Module, trainable: bool = False) -> int:
    """How many numbers the parameters hold; a parameter used in two places counts once."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad or not trainable)


@contextmanager
def watch(model: nn.Module, where: Where) -> Iterator[dict[str, Any]]:
    """`with watch(model, "blocks.*.mlp") as seen: model(ids)` leaves each place's last output in `seen`."""
    seen: dict[str, Any] = {}

    def remember(name: str) -> Callable[..., None]:
        return lambda module, inputs, output: seen.__setitem__(name, output)

    hooks = [p.module.register_forward_hook(remember(p.name)) for p in find(model, where)]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def mode(model: nn.Module, training: bool) -> Iterator[None]:
    """Training or evaluation mode for a while; a model already in it is left alone, another put back."""
    if model.training == training:
        yield
        return
    before = [(module, module.training) for module in model.modules()]
    model.train(training)
    try:
        yield
    finally:
        for module, was in before:
            module.training = was
