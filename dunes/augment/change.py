"""The record of a change to a model, which a checkpoint saves and repeats."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from hashlib import sha256
from typing import Any

import torch

from dunes.units import plural


@dataclass(frozen=True)
class Change:
    """A change to a model in JSON values.

    `name` and `version` are those of its entry in CHANGES. `request` has every argument of its `decide` with the
    defaults bound, `places` the changed modules with what was decided for each, `new` globs of the parameters that
    it added. `before` identifies the weights that it was made to, if it can give them back.
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
        """As a JSON object."""
        return asdict(self)

    def parts(self) -> dict[str, "Change"]:
        """The change of each block, and of what is beside the blocks, by the first names of its places."""
        parts = dict[str, dict[str, Any]]()
        for name, settings in self.places.items():
            parts.setdefault(part_name(name), {})[name] = settings
        return {name: replace(self, places=places) for name, places in parts.items()}

    @classmethod
    def of(cls, record: Any) -> "Change":
        """The inverse of `record`. Raises ValueError for anything else."""
        try:
            name, version, request, places = (record[key] for key in ("name", "version", "request", "places"))
            if isinstance(places, list):  # of quantization before format 3
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
    """A part of a change that was solved for, as one of `Change.parts` with what was decided.

    `solved` is what `fill` needs besides the weights, by place.
    """

    change: Change
    solved: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The name that all its tensors begin with: a block, or what is beside the blocks."""
        return part_name(next(iter(self.change.places)))


def part_name(place: str) -> str:
    """The block of a place, or its first name if it is in none."""
    names = place.split(".")
    return ".".join(names[:2] if names[0] == "blocks" else names[:1])


def float_dtype(name: Any) -> torch.dtype:
    """The dtype of weights with this name. Raises ValueError for any other."""
    if name not in (names := ("float32", "bfloat16", "float16", "float64")):
        raise ValueError(f"dtype is {str(name)[:80]!r}; expected {', '.join(names)}")
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def generator(*key: Any) -> torch.Generator:
    """A generator whose numbers depend on the key alone: a seed, names, places."""
    digest = sha256(" ".join(map(str, key)).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)
