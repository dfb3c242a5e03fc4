"""The layout of adapters in PEFT's files. https://huggingface.co/docs/peft/developer_guides/checkpoint

One tensor of a checkpoint may correspond to several modules: GPT-2's c_attn is q, k and v concatenated, and recent
files stack all experts of a layer. A *target* is a tensor of the base model's checkpoint, with the modules that it
corresponds to.
"""

# Shapes: I inputs, O outputs, R rank, E experts.

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dunes.augment.adapted import sides
from dunes.models.names import Layout, Names, identity, parts_by_target


@dataclass(frozen=True)
class Factors:
    """Factors of the update `scale * B @ A`, with `A` (R, I) and `B` (O, R).

    `others` has tensors that a variant of LoRA trains beside `A` and `B`, such as DoRA's `magnitude` (O,).
    """

    A: Tensor
    B: Tensor
    scale: float
    others: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def rank(self) -> int:
        return self.A.shape[0]


@dataclass(frozen=True)
class Target:
    """The base's tensor `weight` (a Hugging Face name). `rows` has the names of the modules whose weights this
    tensor contains, one row per expert if `stacked`.

    As in `Name`, `load` converts the layout of the files to the modules' layout, and `save` converts it back.
    """

    weight: str
    rows: tuple[tuple[str, ...], ...]
    stacked: bool
    load: Layout = identity
    save: Layout = identity

    @property
    def transposed(self) -> bool:
        """True if the weight has the shape (inputs, outputs)."""
        return self.load(torch.empty(0, 1, device="meta")).shape == (1, 0)

    def b_to_theirs(self, b: Tensor) -> Tensor:
        """Reorder the outputs of one row's `B` (O, R) into the order of Hugging Face's weight."""
        saved = self.save(b)
        return saved.mT if self.transposed else saved

    def b_to_ours(self, b: Tensor) -> Tensor:
        """The inverse of `b_to_theirs`."""
        return self.load(b.mT if self.transposed else b)

    @property
    def path(self) -> str:
        """The target's name in PEFT: the module's name, or for stacked experts the parameter's name."""
        return self.weight.removesuffix(".weight")

    @property
    def parent(self) -> str:
        """Name of the module that has the stacked parameter."""
        return self.path.rpartition(".")[0]

    @property
    def modules(self) -> list[str]:
        return [module for row in self.rows for module in row]


def peft_targets(names: Names, modules: Iterable[str]) -> dict[str, Target]:
    """All targets that may contain these modules, by the weight's name, in the order of the table `names`."""
    keys = [f"{module}.weight" for module in modules]
    targets: dict[str, Target] = {}
    for rule in names:
        for weight, parts in parts_by_target(rule, keys).items():
            rows = tuple(tuple(part.removesuffix(".weight") for part in row) for row in parts)
            targets[weight] = Target(weight, rows, rule.stacked, rule.load, rule.save)
    return targets


def join_factors(target: Target, factors: Mapping[str, Factors], modules: Mapping[str, nn.Module]) -> Factors:
    """Factors of a target, joined from its modules' factors; modules without an adapter get rank 0.

    Raises ValueError for `others` that PEFT does not support on this target.
    """
    adapted = [factors[m] for m in target.modules if m in factors]
    if len(target.modules) == 1:
        return adapted[0]
    _check_others(target, factors)
    scale, like = max(f.scale for f in adapted), adapted[0].A
    rows = []
    for row in target.rows:
        sizes = [sides(modules[m]) for m in row]
        empty = [Factors(like.new_zeros(0, i), like.new_zeros(o, 0), scale) for i, o in sizes]
        rows.append(_stack_row([factors.get(m, e) for m, e in zip(row, empty, strict=True)], scale))
    rank = max(len(a) for a, _ in rows)
    a = torch.stack([F.pad(a, (0, 0, 0, rank - len(a))) for a, _ in rows])
    b = torch.stack([target.b_to_theirs(F.pad(b, (0, rank - b.shape[1]))) for _, b in rows], 2)
    vectors = {name: torch.cat([f.others[name] for f in adapted]) for name in adapted[0].others}
    others = {name: target.b_to_theirs(vector[:, None])[:, 0] for name, vector in vectors.items()}
    return Factors(a.flatten(0, 1), b.flatten(1), scale, others)


def _check_others(target: Target, factors: Mapping[str, Factors]) -> None:
    """Raise ValueError unless each of `others` has one element for each output of the complete target.

    PEFT supports `others` neither on stacked experts nor on a part of a matrix.
    """
    adapted = [factors[m] for m in target.modules if m in factors]
    by_output = all(t.shape == f.B.shape[:1] for f in adapted for t in f.others.values())
    whole = len(adapted) == len(target.modules) and not target.stacked
    if (names := ", ".join(adapted[0].others)) and not (whole and by_output):
        raise ValueError(
            f"{target.path}: PEFT supports {names} neither on experts nor on a part of a matrix; "
            "adapt all parts, use LoRA there, or merge the adapter"
        )


def _stack_row(parts: Sequence[Factors], scale: float) -> tuple[Tensor, Tensor]:
    """`A` and `B` for modules joined along their outputs.

    If all modules have the same `A`, this `A` is kept once, and the `B`s are concatenated. Otherwise, the `A`s are
    concatenated, and `B` is block-diagonal.
    """
    b = [p.B if p.scale == scale else p.B * (p.scale / scale) for p in parts]
    if not parts[0].A.is_meta and all(torch.equal(p.A, parts[0].A) for p in parts):
        return parts[0].A, torch.cat(b)
    return torch.cat([p.A for p in parts]), torch.block_diag(*b)  # type: ignore[no-untyped-call]


def split_factors(target: Target, joined: Factors, modules: Mapping[str, nn.Module]) -> dict[str, Factors]:
    """Factors of each module of a target. Zero columns of `B` and the matching rows of `A` are dropped, and
    `_limit_rank` is applied.

    `modules` has the base's modules by name. A module with a zero `B` and no `others` is omitted.
    """
    if len(target.modules) == 1:
        return {target.modules[0]: _limit_rank(joined)}
    a = joined.A.view(len(target.rows), -1, joined.A.shape[1])
    b = joined.B.view(len(joined.B), -1, len(target.rows))
    factors = {}
    for e, row in enumerate(target.rows):
        ends = [*accumulate(sides(modules[name])[1] for name in row[:-1])]
        parts = target.b_to_ours(b[..., e]).tensor_split(ends)
        others = {
            name: target.b_to_ours(vector[:, None])[:, 0].tensor_split(ends)
            for name, vector in joined.others.items()
        }
        for i, (module, part) in enumerate(zip(row, parts, strict=True)):
            used = (part != 0).any(0)
            if used.any() or others:
                used[0] |= ~used.any()
                own = {name: vectors[i] for name, vectors in others.items()}
                factors[module] = _limit_rank(Factors(a[e][used], part[:, used], joined.scale, own))
    return factors


def _limit_rank(f: Factors) -> Factors:
    """Factors of the same update, with a rank of at most `min(I, O)` (8 for a router of 8 experts)."""
    outputs, inputs = len(f.B), f.A.shape[1]
    if f.rank <= min(outputs, inputs):
        return f
    product = f.B @ f.A
    eye = torch.eye(min(outputs, inputs), dtype=product.dtype, device=product.device)
    return replace(f, A=product, B=eye) if outputs < inputs else replace(f, A=eye, B=product)
