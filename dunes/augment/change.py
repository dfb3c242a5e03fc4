"""The record of a change to a model, saved in a checkpoint to repeat the change."""

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from hashlib import sha256
from typing import Any

import torch
from torch import nn

from dunes import tree
from dunes.units import plural


@dataclass(frozen=True)
class Change:
    """The record of a change to a model, in JSON values.

    `name` is the key in CHANGES, `version` the entry's VERSION. `request` has every option with its default filled
    in, `places` the settings decided for each changed module, `new` globs of the added parameters. `before`
    identifies the original weights if the change can be undone exactly.
    """

    name: str
    version: int
    request: Mapping[str, Any]
    places: Mapping[str, Mapping[str, Any]]
    new: tuple[str, ...] = ()
    before: Mapping[str, str] = field(default_factory=dict)

    def __repr__(self) -> str:
        request = ", ".join(f"{key}={value!r}" for key, value in self.request.items())
        return f"Change({self.name} at {plural(len(self.places), 'place')}: {request})"

    def record(self) -> dict[str, Any]:
        """The change as a JSON object."""
        return asdict(self)

    def parts(self) -> dict[str, "Change"]:
        """The change split by block, or by top-level module outside the blocks, keyed by `part_name`."""
        parts = dict[str, dict[str, Any]]()
        for name, settings in self.places.items():
            parts.setdefault(part_name(name), {})[name] = settings
        return {name: replace(self, places=places) for name, places in parts.items()}

    @classmethod
    def of(cls, record: Any) -> "Change":
        """The inverse of `record`. Raises ValueError for anything else."""
        try:
            name, version, request, places = (record[key] for key in ("name", "version", "request", "places"))
            if isinstance(places, list):  # quantization before format 3
                places = {place: {} for place in places}
            new, before = tuple(record.get("new", ())), record.get("before", {})
            valid = isinstance(name, str) and type(version) is int and all(map(_is_object, (request, places)))
            words = [*new, *before.values()]
        except (KeyError, TypeError, AttributeError):
            valid = False
        if not valid or not all(map(_is_object, places.values())) or not all(isinstance(w, str) for w in words):
            raise ValueError("the record of a change is damaged; expected name, version, request and places")
        return cls(name, version, request, places, new, before)


@dataclass(frozen=True)
class Part:
    """A solved part of a change: the completed record of one of `Change.parts`.

    `solved` has the arguments of `fill` beside the weights, by place.
    """

    change: Change
    solved: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Prefix of the names of all its tensors: a block, or a top-level module outside the blocks."""
        return part_name(next(iter(self.change.places)))


def part_name(place: str) -> str:
    """The block of a place, as "blocks.0", or the top-level module of a place outside the blocks."""
    names = place.split(".")
    return ".".join(names[:2] if names[0] == "blocks" else names[:1])


def modules_at(model: nn.Module, places: Collection[str]) -> dict[str, Any]:
    """Modules at these places, with their wrappers, by place."""
    return {p.name: p.module for p in tree.places(model) if p.name in places}


def put_modules(model: nn.Module, modules: Mapping[str, nn.Module]) -> None:
    """Replace the modules at these places, wrappers included."""
    for place in [p for p in tree.places(model) if p.name in modules]:
        setattr(place.parent, place.key, modules[place.name])


def float_dtype(name: Any) -> torch.dtype:
    """The floating-point dtype with this name. Raises ValueError for any other."""
    if name not in (names := ("float32", "bfloat16", "float16", "float64")):
        raise ValueError(f"dtype is {str(name)[:80]!r}; expected {', '.join(names)}")
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def generator(*key: Any) -> torch.Generator:
    """A generator seeded by the key alone: a seed, names, places."""
    digest = sha256(" ".join(map(str, key)).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)
