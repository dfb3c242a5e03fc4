"""The same weights under someone else's names. One table, read in both directions.

`{i}` in a name stands for a number; it is the same number on both sides. A number that only our side
has counts along the first dimension of theirs, where all of ours lie stacked.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

Change = Callable[[Tensor], Tensor]


def same(weight: Tensor) -> Tensor:
    """No change of layout."""
    return weight


@dataclass(frozen=True)
class Name:
    """Their tensor is ours, or several of ours below each other.

    `load` brings a whole tensor of theirs into our layout before it is parted, `save` takes it back.
    """

    theirs: str
    ours: tuple[str, ...]
    load: Change = same
    save: Change = same

    @property
    def stacked(self) -> bool:
        """Whether theirs holds many of ours (experts), one after the other in its first dimension."""
        return bool(fields(self.ours[0]) - fields(self.theirs))


Names = Sequence[Name]


def turned(weight: Tensor) -> Tensor:
    """(in, out) for (out, in), as GPT-2's Conv1D stores matrices."""
    return weight.mT


def name(theirs: str, *ours: str, load: Change = same, save: Change = same) -> Name:
    return Name(theirs, ours, load, save)


def both(theirs: str, *ours: str, load: Change = same, save: Change = same) -> list[Name]:
    """A weight in another layout, if asked, and its bias."""
    return [
        name(f"{theirs}.weight", *[f"{o}.weight" for o in ours], load=load, save=save),
        name(f"{theirs}.bias", *[f"{o}.bias" for o in ours]),
    ]


@dataclass(frozen=True)
class Move:
    """A tensor `to` is what `make` makes of the tensors `sources`; views where nothing has to be copied."""

    to: str
    sources: tuple[str, ...]
    make: Callable[[Sequence[Tensor]], Tensor]


def to_ours(names: Names, theirs: Mapping[str, tuple[int, ...]]) -> tuple[list[Move], list[str]]:
    """How our tensors are made of theirs, given by name and shape, and the names that the table does not know."""
    moves: list[Move] = []
    unknown = []
    for key, shape in theirs.items():
        hit = next(((n, at) for n in names if (at := numbers(n.theirs, key)) is not None), None)
        if hit is None:
            unknown.append(key)
            continue
        rule, at = hit
        copies = shape[0] if rule.stacked and shape else 1
        for e in range(copies):
            for part, ours in enumerate(rule.ours):
                to = filled(ours, at | {f: str(e) for f in fields(ours) - at.keys()})
                moves.append(Move(to, (key,), _taken(rule, part, e if rule.stacked else None)))
    return moves, unknown


def _taken(rule: Name, part: int, index: int | None) -> Callable[[Sequence[Tensor]], Tensor]:
    def make(sources: Sequence[Tensor]) -> Tensor:
        whole = rule.load(sources[0] if index is None else sources[0][index])
        # Unlike `chunk`, this refuses to part what does not part evenly: it gives other shapes than expected.
        return whole if len(rule.ours) == 1 else whole.tensor_split(len(rule.ours))[part]

    return make


def to_theirs(names: Names, ours: Iterable[str]) -> tuple[list[Move], list[str]]:
    """How their tensors are made of ours, given by name, and the names that the table does not know."""
    moves: list[Move] = []
    left = dict.fromkeys(ours)
    for rule in names:
        for key in [k for k in left if numbers(rule.ours[0], k) is not None]:
            at = numbers(rule.ours[0], key) or {}
            parts = tuple(filled(o, at) for o in rule.ours)
            if rule.stacked or any(p not in left for p in parts):
                continue
            moves.append(Move(filled(rule.theirs, at), parts, _joined(rule)))
            for part in parts:
                del left[part]
    return moves, list(left)


def _joined(rule: Name) -> Callable[[Sequence[Tensor]], Tensor]:
    return lambda parts: rule.save(parts[0] if len(parts) == 1 else torch.cat(list(parts)))


def fields(template: str) -> set[str]:
    """The letters that stand for numbers."""
    return set(re.findall(r"\{(\w)\}", template))


def filled(template: str, at: Mapping[str, str]) -> str:
    """The name with these numbers."""
    for field, number in at.items():
        template = template.replace(f"{{{field}}}", number)
    return template


@lru_cache(maxsize=4096)
def _pattern(template: str) -> re.Pattern[str]:
    return re.compile(re.sub(r"\\\{(\w)\\\}", r"(?P<\1>0|[1-9]\\d{0,8})", re.escape(template)), re.ASCII)


def numbers(template: str, key: str) -> dict[str, str] | None:
    """The numbers in `key` if it has the template's form."""
    found = _pattern(template).fullmatch(key)
    return None if found is None else found.groupdict()
