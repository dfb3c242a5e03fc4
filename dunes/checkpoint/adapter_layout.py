"""How adapters of our modules are stored in PEFT's files. https://huggingface.co/docs/peft/developer_guides/checkpoint

One of their tensors may be several of ours: GPT-2's c_attn is q, k and v concatenated, and recent files hold all
experts of a layer in one pair of matrices. A *target* is such a tensor of the base with our modules in it.
"""

# Shapes: I inputs, O outputs, R rank, E experts.

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dunes.models.names import Names, fields, match_indices, substitute


@dataclass(frozen=True)
class Factors:
    """scale * B @ A, with A (R, I) and B (O, R); `magnitude` (O,) with DoRA."""

    A: Tensor
    B: Tensor
    scale: float
    magnitude: Tensor | None = None

    @property
    def rank(self) -> int:
        return self.A.shape[0]


@dataclass(frozen=True)
class Target:
    """A tensor `theirs` of the base; `rows` are our modules in it, one row per expert if they are `stacked`."""

    theirs: str
    rows: tuple[tuple[str, ...], ...]
    stacked: bool
    transposed: bool

    @property
    def path(self) -> str:
        """Its name in PEFT: that of the module, or for stacked experts of the parameter."""
        return self.theirs.removesuffix(".weight")

    @property
    def places(self) -> list[str]:
        return [place for row in self.rows for place in row]


def peft_targets(names: Names, places: Iterable[str]) -> dict[str, Target]:
    """All tensors that may contain these modules, by their name, in the order of the table."""
    keys = [f"{place}.weight" for place in places]
    targets: dict[str, Target] = {}
    for rule in names:
        (free,) = (fields(rule.ours[0]) - fields(rule.theirs)) or {""}
        rows: dict[str, dict[int, tuple[str, ...]]] = {}
        for at in [at for key in keys if (at := match_indices(rule.ours[0], key)) is not None]:
            ours = tuple(substitute(o, at).removesuffix(".weight") for o in rule.ours)
            rows.setdefault(substitute(rule.theirs, at), {})[int(at.get(free, 0))] = ours
        for theirs, row in rows.items():
            transposed = rule.load(torch.empty(1, 2, device="meta")).shape == (2, 1)
            targets[theirs] = Target(theirs, tuple(row[e] for e in sorted(row)), bool(free), transposed)
    return targets


def join_factors(target: Target, ours: Mapping[str, Factors], sizes: Mapping[str, tuple[int, int]]) -> Factors:
    """The factors of a target, joined from those of our modules; a module without an adapter gets zeros.

    `sizes` are (I, O) of every place. Raises ValueError for what PEFT's format cannot express.
    """
    given = [ours[p] for p in target.places if p in ours]
    if len(target.places) == 1:
        return given[0]
    _check_dora(target, ours)
    scale = max(f.scale for f in given)
    empty = given[0].A.new_zeros(0)
    rows = [
        _stack_row([ours.get(p) or _zero_factors(empty, sizes[p], scale) for p in row], scale)
        for row in target.rows
    ]
    rank = max(len(a) for a, _ in rows)
    a = torch.stack([_pad_columns(a.T, rank).T for a, _ in rows])
    b = torch.stack([_pad_columns(b, rank) for _, b in rows], 2)
    lengths = [f.magnitude for f in given if f.magnitude is not None]
    return Factors(a.flatten(0, 1), b.flatten(1), scale, torch.cat(lengths) if lengths else None)


def _check_dora(target: Target, ours: Mapping[str, Factors]) -> None:
    """Raise ValueError for DoRA where PEFT does not support it: on stacked experts and on part of a matrix."""
    if all(ours[p].magnitude is None for p in target.places if p in ours):
        return
    if target.stacked:
        raise ValueError(
            f"{target.path}: PEFT does not support DoRA on experts; use LoRA there, or merge the adapter"
        )
    if missing := [p for p in target.places if p not in ours]:
        raise ValueError(
            f"{target.path}: DoRA covers only part of it, not {missing[0]}; adapt all parts, or merge the adapter"
        )


def _zero_factors(like: Tensor, size: tuple[int, int], scale: float) -> Factors:
    """Factors of rank zero."""
    return Factors(like.new_zeros(0, size[0]), like.new_zeros(size[1], 0), scale)


def _stack_row(parts: Sequence[Factors], scale: float) -> tuple[Tensor, Tensor]:
    """A and B of concatenated matrices: one A if all share it, else block-diagonal."""
    b = [p.B if p.scale == scale else p.B * (p.scale / scale) for p in parts]
    if all(torch.equal(p.A, parts[0].A) for p in parts):
        return parts[0].A, torch.cat(b)
    return torch.cat([p.A for p in parts]), torch.block_diag(*b)  # type: ignore[no-untyped-call]


def _pad_columns(matrix: Tensor, columns: int) -> Tensor:
    return torch.nn.functional.pad(matrix, (0, columns - matrix.shape[1]))


def split_factors(target: Target, whole: Factors) -> dict[str, Factors]:
    """The factors of each of our modules, without the columns of B that are zero there and their rows of A.

    Modules with no columns left are omitted.
    """
    if len(target.places) == 1:
        return {target.places[0]: whole}
    a = whole.A.view(len(target.rows), -1, whole.A.shape[1])
    b = whole.B.view(len(whole.B), -1, len(target.rows))
    targets = {}
    for e, row in enumerate(target.rows):
        parts = b[..., e].tensor_split(len(row))
        lengths = [None] * len(row) if whole.magnitude is None else whole.magnitude.tensor_split(len(row))
        for place, part, length in zip(row, parts, lengths, strict=True):
            used = (part != 0).any(0)
            if used.any() or length is not None:
                used[0] |= ~used.any()
                targets[place] = Factors(a[e][used], part[:, used], whole.scale, length)
    return targets


def limit_rank(f: Factors) -> Factors:
    """The same update with a rank that the matrix can have: a router of eight experts may come with rank 16."""
    tall, wide = len(f.B), f.A.shape[1]
    if f.rank <= min(tall, wide):
        return f
    product = f.B @ f.A
    one = torch.eye(min(tall, wide), dtype=product.dtype, device=product.device)
    return replace(f, A=product, B=one) if tall < wide else replace(f, A=one, B=product)
