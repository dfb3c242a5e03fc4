"""Tables that map our weight names to the names in another format ("theirs"), and back.

`{i}` in a name stands for a number, such as a layer's index, which is the same on both sides. If only our name has
a placeholder, such as `{e}` for an expert, their tensor stacks our tensors: tensor e is at index e of dimension 0.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import torch
from torch import Tensor

Layout = Callable[[Tensor], Tensor]


def identity(weight: Tensor) -> Tensor:
    """The layout function of a weight that has the same layout on both sides."""
    return weight


@dataclass(frozen=True)
class Name:
    """One entry of a table: the tensor `theirs` contains one of our tensors, or several joined along dimension 0.

    `load` converts their tensor to our layout, before splitting; `save` is the inverse. By default, joined tensors
    have equally many rows. `like` names one of their matrices: the first joined tensor has as many rows as this
    matrix has columns, and the other tensors share the remaining rows. With `beside`, one of our names, the entry
    is used for saving only in blocks that also have that tensor, since different modules may use the same name.
    """

    theirs: str
    ours: tuple[str, ...]
    load: Layout = identity
    save: Layout = identity
    like: str = ""
    beside: str = ""

    @property
    def stacked(self) -> bool:
        """True if their tensor stacks several of our tensors (experts) in a new first dimension."""
        return bool(fields(self.ours[0]) - fields(self.theirs))


Names = Sequence[Name]


def transpose(weight: Tensor) -> Tensor:
    """Swap the dimensions of a matrix: GPT-2's Conv1D stores (in, out), nn.Linear stores (out, in)."""
    return weight.mT


def halves(weight: Tensor) -> Tensor:
    """Reorder the rows of a matrix or bias: first the rows with even indices, then the rows with odd indices."""
    if len(weight) % 2:
        return weight  # not pairs: a later comparison of shapes raises an error
    return torch.unflatten(weight, 0, (-1, 2)).transpose(0, 1).flatten(0, 1)


def pairs(weight: Tensor) -> Tensor:
    """The inverse of `halves`."""
    return torch.unflatten(weight, 0, (2, -1)).transpose(0, 1).flatten(0, 1)


def name(
    theirs: str, *ours: str, load: Layout = identity, save: Layout = identity, like: str = "", beside: str = ""
) -> Name:
    return Name(theirs, ours, load, save, like, beside)


def weight_and_bias(theirs: str, *ours: str, load: Layout = identity, save: Layout = identity) -> list[Name]:
    """The names of a module's weight and bias; `load` and `save` convert the layout of the weight."""
    return [
        name(f"{theirs}.weight", *[f"{o}.weight" for o in ours], load=load, save=save),
        name(f"{theirs}.bias", *[f"{o}.bias" for o in ours]),
    ]


def convolution(theirs: str, ours: str) -> list[Name]:
    """The names of a depthwise convolution: weights are (C, 1, W) in PyTorch's Conv1d, and (C, W) in ours."""
    return weight_and_bias(
        theirs, ours, load=partial(torch.squeeze, dim=-2), save=partial(torch.unsqueeze, dim=-2)
    )


def per_head(names: Names) -> Names:
    """Names of joined tensors in which all rows of a head are adjacent. `for_heads` sets their layouts."""
    return [replace(n, load=_unknown_heads, save=_unknown_heads) for n in names]


def _unknown_heads(weight: Tensor) -> Tensor:
    raise AssertionError("for_heads was not called")


def for_heads(names: Names, heads: int) -> Names:
    """The names for a model with this number of heads: sets the layouts of names made by `per_head`."""

    def complete(n: Name) -> Name:
        sizes = heads, len(n.ours)
        return replace(n, load=partial(_regroup, sizes=sizes), save=partial(_regroup, sizes=sizes[::-1]))

    return [complete(n) if n.load is _unknown_heads else n for n in names]


def _regroup(weight: Tensor, sizes: tuple[int, int]) -> Tensor:
    """Reorder the rows of a matrix or bias from (a, b, rest) to (b, a, rest); `sizes` are a and b."""
    groups = weight.view(*sizes, len(weight) // (sizes[0] * sizes[1]), *weight.shape[1:])
    return groups.transpose(0, 1).flatten(0, 2)


@dataclass(frozen=True)
class Conversion:
    """A recipe for the tensor `target`: call `make` with the list of the tensors named in `sources`.

    The result is a view if nothing has to be copied.
    """

    target: str
    sources: tuple[str, ...]
    make: Callable[[Sequence[Tensor]], Tensor]


def to_ours(names: Names, theirs: Mapping[str, tuple[int, ...]]) -> tuple[list[Conversion], list[str]]:
    """Returns (conversions from their tensors to ours, names in `theirs` that match no entry of `names`).

    `theirs` maps the names of their tensors to shapes.
    """
    conversions: list[Conversion] = []
    unknown = []
    for key, shape in theirs.items():
        match = next(((n, i) for n in names if (i := match_indices(n.theirs, key)) is not None), None)
        if match is None:
            unknown.append(key)
            continue
        rule, indices = match
        copies = shape[0] if rule.stacked and shape else 1
        rows = next(iter(theirs.get(substitute(rule.like, indices), ())[1:]), None)
        for e in range(copies):
            for part, ours in enumerate(rule.ours):
                target = substitute(ours, indices | {f: str(e) for f in fields(ours) - indices.keys()})
                split = _split(rule, part, e if rule.stacked else None, rows)
                conversions.append(Conversion(target, (key,), split))
    return conversions, unknown


def _split(rule: Name, part: int, index: int | None, rows: int | None) -> Callable[[Sequence[Tensor]], Tensor]:
    def make(sources: Sequence[Tensor]) -> Tensor:
        weight = rule.load(sources[0] if index is None else sources[0][index])
        # Unlike `chunk`, `tensor_split` may split unevenly; the comparison of shapes refuses such parts.
        if len(rule.ours) == 1 or rows is None:
            return weight if len(rule.ours) == 1 else weight.tensor_split(len(rule.ours))[part]
        if part == 0:
            return weight.tensor_split([rows])[0]
        return weight.tensor_split([rows])[1].tensor_split(len(rule.ours) - 1)[part - 1]

    return make


def to_theirs(names: Names, ours: Iterable[str]) -> tuple[list[Conversion], list[str]]:
    """Returns (conversions from our tensors to theirs, names in `ours` that match no entry of `names`)."""
    conversions: list[Conversion] = []
    remaining = dict.fromkeys(ours)
    for rule in names:
        for target, rows in parts_by_target(rule, remaining).items():
            parts = tuple(part for row in rows for part in row)
            if all(part in remaining for part in parts):
                conversions.append(Conversion(target, parts, partial(_join, rule)))
                for part in parts:
                    del remaining[part]
    return conversions, list(remaining)


def parts_by_target(rule: Name, ours: Iterable[str]) -> dict[str, list[tuple[str, ...]]]:
    """Maps each of their names to tuples of our names: one tuple per expert for a stacked tensor, otherwise one.

    Of each tuple, `ours` contains the first name; the other names may be missing.
    """
    free, ours = "".join(fields(rule.ours[0]) - fields(rule.theirs)), {*ours} if rule.beside else ours
    targets: dict[str, dict[int, tuple[str, ...]]] = {}
    for indices in (match_indices(rule.ours[0], key) for key in ours):
        if indices is not None and (not rule.beside or substitute(rule.beside, indices) in ours):
            row = tuple(substitute(o, indices) for o in rule.ours)
            targets.setdefault(substitute(rule.theirs, indices), {})[int(indices.get(free, 0))] = row
    return {target: [rows[e] for e in sorted(rows)] for target, rows in targets.items()}


def _join(rule: Name, parts: Sequence[Tensor]) -> Tensor:
    n = len(rule.ours)
    rows = [rule.save(parts[i] if n == 1 else _cat(parts[i : i + n])) for i in range(0, len(parts), n)]
    return _cat([row[None] for row in rows]) if rule.stacked else rows[0]


def _cat(parts: Sequence[Tensor]) -> Tensor:
    """Like `torch.cat`, but fast for meta tensors, for which `torch.cat` imports the compiler (1.7 s)."""
    if parts[0].is_meta:
        return parts[0].new_empty(sum(map(len, parts)), *parts[0].shape[1:])
    return torch.cat([*parts])


def fields(template: str) -> set[str]:
    """The letters of the placeholders in a name: `i` for `{i}`."""
    return set(re.findall(r"\{(\w)\}", template))


def substitute(template: str, indices: Mapping[str, str]) -> str:
    """Replace the placeholders in a name by numbers: `{i}` by `indices["i"]`."""
    for field, number in indices.items():
        template = template.replace(f"{{{field}}}", number)
    return template


@lru_cache(maxsize=4096)
def _regex(template: str) -> re.Pattern[str]:
    return re.compile(re.sub(r"\\\{(\w)\\\}", r"(?P<\1>0|[1-9]\\d{0,8})", re.escape(template)), re.ASCII)


def match_indices(template: str, key: str) -> dict[str, str] | None:
    """The numbers in `key`, by placeholder, if `key` matches the template; otherwise None."""
    if not key.endswith(template[template.rfind("}") + 1 :]):  # faster than compiling the pattern
        return None
    match = _regex(template).fullmatch(key)
    return None if match is None else match.groupdict()
