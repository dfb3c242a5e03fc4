"""The record of a change to a model. A checkpoint saves the record, so that loading can repeat the change."""

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
    """The record of a change to a model; its fields have JSON values.

    `name` is a key of CHANGES, and `version` is the VERSION of that entry. `request` maps every option to its
    value. `places` maps each changed module to the settings decided for it. `new` contains globs of the added
    parameters. `before` is unused and empty in new records.
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
        """Convert the change to a JSON object."""
        return asdict(self)

    def parts(self) -> dict[str, "Change"]:
        """Split the change by block (outside the blocks, by top-level module). The keys are `part_name`s."""
        parts = dict[str, dict[str, Any]]()
        for name, settings in self.places.items():
            parts.setdefault(part_name(name), {})[name] = settings
        return {name: replace(self, places=places) for name, places in parts.items()}

    @classmethod
    def of(cls, record: Any) -> "Change":
        """Convert a JSON object to a change: the inverse of `record`. Raises ValueError for a damaged record."""
        try:
            name, version, request, places = (record[key] for key in ("name", "version", "request", "places"))
            new, before = tuple(record.get("new", ())), record.get("before", {})
            objects = all(isinstance(value, dict) for value in (request, places, *places.values()))
            valid = objects and isinstance(name, str) and type(version) is int
        except (KeyError, TypeError, AttributeError):
            valid = False
        if not valid:
            raise ValueError("the record of a change is damaged; expected name, version, request and places")
        return cls(name, version, request, places, new, before)


@dataclass(frozen=True)
class Part:
    """A part of a change (see `Change.parts`) that `solve` has made; `change` is its completed record.

    `solved` maps a module's name to the values that `fill` needs in addition to the weights.
    """

    change: Change
    solved: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Name of the block, or of the top-level module outside the blocks, that contains this part."""
        return part_name(next(iter(self.change.places)))


def part_name(place: str) -> str:
    """Name of the block of a place ("blocks.0"), or of the top-level module of a place outside the blocks."""
    names = place.split(".")
    return ".".join(names[:2] if names[0] == "blocks" else names[:1])


def modules_at(model: nn.Module, places: Collection[str]) -> dict[str, Any]:
    """A dict of the modules with these names; a wrapped module is returned with its wrappers."""
    return {p.name: p.module for p in tree.places(model) if p.name in places}


def put_modules(model: nn.Module, modules: Mapping[str, nn.Module]) -> None:
    """Replace the module at each place, and its wrappers, by the given module."""
    for place in [p for p in tree.places(model) if p.name in modules]:
        setattr(place.parent, place.key, modules[place.name])


def float_dtype(name: Any) -> torch.dtype:
    """The torch dtype with this name. Raises ValueError unless this is a supported floating-point dtype."""
    if name not in (names := ("float32", "bfloat16", "float16", "float64")):
        raise ValueError(f"dtype is {str(name)[:80]!r}; expected {', '.join(names)}")
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def generator(*key: Any) -> torch.Generator:
    """A random generator seeded by a digest of `key`, which usually contains a seed, names and places."""
    digest = sha256(" ".join(map(str, key)).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
