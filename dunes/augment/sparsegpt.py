"""SparseGPT: pruning by the inverse Hessian of the layer's squared error; the weights that stay make up for it.

https://arxiv.org/abs/2301.00774
"""

# Shapes: O outputs, I inputs, Weights are transposed inside, so that a column is contiguous.

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from dunes.augment.calibrate import Gram

HALF = 0.5
"""The fraction of zeros where none is asked for."""
REFITS, REFIT_TOLERANCE = 10, 1e-4
"""Steps of `refit` at most, and the part of the squared gradient at which it stops."""
TINY = 1e-30
MOST_DAMPING = 1e4
"""Beyond this multiple of the mean diagonal, nothing is left of the Gram matrix."""


class Pattern(NamedTuple):
    """At most `kept` of every `group` consecutive inputs of an output are not zero."""

    kept: int
    group: int

    @classmethod
    def of(cls, text: str) -> "Pattern":
        """From "2:4". Raises ValueError for anything else."""
        kept, separator, group = text.partition(":")
        if not separator or not (kept.isdecimal() and group.isdecimal()) or not 0 < int(kept) < int(group):
            raise ValueError(f"pattern is {text[:80]!r}; expected KEPT:GROUP, like 2:4 or 4:8")
        return cls(int(kept), int(group))

    def groups(self, inputs: int) -> dict[int, int]:
        """The start and stop of each group."""
        return {start: start + self.group for start in range(0, inputs, self.group)}


class Sparsity(NamedTuple):
    """The fraction of the weights that become zero, and the pattern that they follow, if any."""

    fraction: float
    pattern: Pattern | None = None

    @classmethod
    def of(cls, fraction: float | None, pattern: str | None) -> "Sparsity":
        """A half by default, or what the pattern gives. Raises ValueError if they do not agree."""
        shape = None if pattern is None else Pattern.of(pattern)
        implied = HALF if shape is None else 1 - shape.kept / shape.group
        fraction = implied if fraction is None else fraction
        if not 0 < fraction < 1 or (shape is not None and abs(fraction - implied) > 1e-9):
            expected = "more than 0 and less than 1" if shape is None else f"{implied:g}, which {pattern} gives"
            raise ValueError(f"sparsity is {fraction:g}; expected {expected}")
        return cls(fraction, shape)

    def require_inputs(self, name: str, inputs: int) -> None:
        """Raise ValueError, with the layer's name, unless groups of the pattern fill its inputs."""
        if self.pattern is not None and inputs % self.pattern.group:
            kept, group = self.pattern
            raise ValueError(f"{name}: its {inputs} inputs are no multiple of {group} ({kept}:{group})")

    def choose(self, scores: Tensor) -> Tensor:
        """The lowest scores (columns, O), or of each output as many as a group of the pattern loses."""
        if self.pattern is None:
            return smallest(scores, self.fraction)
        return lowest(scores, self.pattern.group - self.pattern.kept, 0)

    def choose_all(self, scores: Tensor, by_output: bool = False) -> Tensor:
        """The lowest scores (O, I): by the pattern, else of each output or of all."""
        if self.pattern is not None:
            return lowest_of_groups(scores, *self.pattern)
        if by_output:
            return lowest(scores, int(scores.shape[1] * self.fraction), 1)
        return smallest(scores, self.fraction)


class Hessian(NamedTuple):
    """The upper Cholesky factor (I, I) of the inverse of H = 2/n sum x xT + damping, inputs that are always zero
    (I,) bool, the damping as a fraction of the mean diagonal, H, and what the damping adds to its diagonal."""

    factor: Tensor
    dead: Tensor
    damp: float
    matrix: Tensor
    added: Tensor


def hessian(gram: Gram, damp: float) -> Hessian:
    """What `prune` needs of a Gram matrix; the damping is raised tenfold until the matrix can be inverted.

    Raises ValueError if it has values that are not finite.
    """
    if not gram.matrix.isfinite().all():
        raise ValueError("the inputs of the calibration text are not finite; are the model's weights?")
    h = gram.matrix * (2 / max(1, gram.tokens))
    dead = h.diagonal() == 0
    mean = h.new_ones(()) if dead.all() else h.diagonal().mean()
    h.diagonal()[dead] = mean  # and not a number that would outweigh small inputs in the damping
    while True:
        damped, added = h.clone(), damp * mean
        damped.diagonal().add_(added)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not failed:
            factor, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
        if not failed and factor.isfinite().all():
            return Hessian(factor, dead, damp, damped, added)
        damp = max(damp, 1e-4) * 10
        if damp > MOST_DAMPING:
            raise ValueError("the Gram matrix of the calibration text cannot be inverted; pass other text")


Column = Callable[[int, Tensor], Tensor]
"""Of column j something (O,), by the columns (I, O) as they are when a sweep reaches it."""


def sweep(columns: Tensor, factor: Tensor, blocks: Mapping[int, int], replace: Column) -> None:
    """Replace the columns (I, O) in place, one after another; later ones make up for its error.

    `factor` (I, I) is that of their `Hessian`. The columns of a block (its start and stop) make up for each
    other at once, those behind it when it is done.
    """
    for start, stop in blocks.items():
        block, rows = columns[start:stop], factor[start:stop, start:stop]
        errors = torch.empty_like(block)
        for i, column in enumerate(block):
            replaced = replace(start + i, columns)
            errors[i] = (column - replaced) / rows[i, i]
            block[i:].addr_(rows[i, i:], errors[i], alpha=-1)
            block[i] = replaced
        columns[stop:] -= factor[start:stop, stop:].T @ errors


def prune(weight: Tensor, h: Hessian, sparsity: Sparsity, block: int = 128, zeros: Tensor | None = None) -> Tensor:
    """The pruned weight (O, I) in float32, by a sweep over blocks of so many columns.

    In each block the weights with the lowest error go: w² over the squared diagonal of the factor (here the roots
    of both, since small squares underflow). With a pattern they are chosen for each output and group, just before
    its first column, when the errors of the columns before have been made up for. Where `zeros` (O, I) they go in
    any case, as some of these.
    """
    columns = weight.detach().float().T.clone(memory_format=torch.contiguous_format)
    columns[h.dead] = 0
    zeros = torch.zeros_like(columns, dtype=torch.bool) if zeros is None else zeros.T
    blocks = {start: min(start + block, len(columns)) for start in range(0, len(columns), block)}
    spans = blocks if sparsity.pattern is None else sparsity.pattern.groups(len(columns))
    scales, pruned = h.factor.diagonal()[:, None], zeros.clone()

    def replace(j: int, current: Tensor) -> Tensor:
        if j in spans:
            span = slice(j, spans[j])
            pruned[span] |= sparsity.choose((current[span] / scales[span]).abs().masked_fill(zeros[span], -1))
        return current[j].masked_fill(pruned[j], 0)

    sweep(columns, h.factor, blocks, replace)
    return columns.T.contiguous()


def refit(pruned: Tensor, weight: Tensor, h: Hessian) -> Tensor:
    """The pruned weight (O, I) with the values that, given its zeros, change the outputs of `weight` least.

    The sweep leaves a column as it is once it is passed; here weights also make up for zeros behind them. Each row
    has its own least squares, which conjugate gradients solve, preconditioned by the diagonal, all rows at once.
    Rows whose error without the damping does not fall, or is no finite number, stay as they are.
    """
    fitted, kept, diagonal = pruned, pruned != 0, h.matrix.diagonal()
    missing = weight.float() - pruned
    residual = before_fit = (missing @ h.matrix) * kept
    scaled = direction = residual / diagonal
    size = (residual * scaled).sum(1, keepdim=True)
    enough = REFIT_TOLERANCE * size.sum()
    for _ in range(REFITS):
        if size.sum() <= enough:
            break
        product = (direction @ h.matrix) * kept
        step = size / (direction * product).sum(1, keepdim=True).clamp(min=TINY)
        fitted, residual = fitted + step * direction, residual - step * product
        scaled = residual / diagonal
        size, before = (residual * scaled).sum(1, keepdim=True), size
        direction = scaled + size / before.clamp(min=TINY) * direction
    # The error falls by m H m - (m - c) H (m - c) of the missing m and the change c, which is 0 where not kept.
    change = fitted - pruned
    fall = change * (before_fit + residual) - h.added * change * (2 * missing - change)
    fall = fall.sum(1, keepdim=True)  # products may overflow, or underflow to zero
    return torch.where(fall.isfinite() & (fall > 0), fitted, pruned)


def wanda_scores(weight: Tensor, gram: Gram) -> Tensor:
    """|w| times the norm of its input over all tokens (O, I), in float32."""
    return weight.detach().float().abs() * gram.matrix.diagonal().sqrt()


def smallest(scores: Tensor, sparsity: float) -> Tensor:
    """Where the scores are lowest; as published, one weight more than the fraction.

    Of equal ones so many of the first, or a layer with few different values would lose more; but all zeros.
    """
    count = int(scores.numel() * sparsity) + 1
    threshold = scores.flatten().kthvalue(count).values
    chosen = scores <= threshold
    if threshold > 0 and (extra := int(chosen.sum()) - count):
        chosen.view(-1)[(scores == threshold).flatten().nonzero()[-extra:]] = False
    return chosen


def lowest(scores: Tensor, count: int, dim: int) -> Tensor:
    """Where the `count` lowest scores are along `dim`; of equal ones the first."""
    order = torch.sort(scores, stable=True, dim=dim).indices.narrow(dim, 0, count)
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(dim, order, True)


def lowest_of_groups(scores: Tensor, kept: int, group: int) -> Tensor:
    """Where all but the `kept` highest scores of every `group` consecutive inputs of an output are (O, I)."""
    return lowest(scores.view(len(scores), -1, group), group - kept, 2).flatten(1)
