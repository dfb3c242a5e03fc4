"""The same weights under someone else's names. One table, read in both directions.

`{i}` in a name stands for a number; it is the same number on both sides.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Name:
    """Their tensor is ours, several of ours below each other, or that turned (in, out for out, in)."""

    theirs: str
    ours: tuple[str, ...]
    turned: bool = False

    def load(self, weight: Tensor) -> Sequence[Tensor]:
        weight = weight.T if self.turned else weight
        return [part.contiguous() for part in weight.chunk(len(self.ours))]

    def save(self, weights: Sequence[Tensor]) -> Tensor:
        weight = torch.cat(list(weights)) if len(weights) > 1 else weights[0]
        return (weight.T if self.turned else weight).contiguous()


Names = Sequence[Name]


def name(theirs: str, *ours: str, turned: bool = False) -> Name:
    return Name(theirs, ours, turned)


def both(theirs: str, *ours: str, turned: bool = False) -> list[Name]:
    """A weight, turned if asked, and its bias."""
    return [
        name(f"{theirs}.weight", *[f"{o}.weight" for o in ours], turned=turned),
        name(f"{theirs}.bias", *[f"{o}.bias" for o in ours]),
    ]


def _number(template: str, name: str) -> dict[str, str] | None:
    """The numbers in `name` if it has the template's form."""
    found = re.fullmatch(re.sub(r"\\\{(\w)\\\}", r"(?P<\1>\\d+)", re.escape(template)), name)
    return None if found is None else found.groupdict()


def from_theirs(names: Names, theirs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our state dict from theirs. Raises ValueError that lists every weight the table does not know."""
    ours: dict[str, Tensor] = {}
    unknown = []
    for key, weight in theirs.items():
        hit = next(((n, at) for n in names if (at := _number(n.theirs, key)) is not None), None)
        if hit is None:
            unknown.append(f"{key} {tuple(weight.shape)}")
            continue
        rule, at = hit
        ours |= {o.format(**at): part for o, part in zip(rule.ours, rule.load(weight), strict=True)}
    if unknown:
        raise ValueError(f"weights that this family does not have: {', '.join(unknown)}")
    return ours


def to_theirs(names: Names, ours: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Their state dict from ours. Raises ValueError that lists every weight the table does not know."""
    theirs: dict[str, Tensor] = {}
    used: set[str] = set()
    for rule in names:
        for key in ours:
            if (at := _number(rule.ours[0], key)) is None:
                continue
            parts = [o.format(**at) for o in rule.ours]
            theirs[rule.theirs.format(**at)] = rule.save([ours[p] for p in parts])
            used.update(parts)
    if unknown := set(ours) - used:
        raise ValueError(f"weights without a name there: {', '.join(sorted(unknown))}")
    return theirs
