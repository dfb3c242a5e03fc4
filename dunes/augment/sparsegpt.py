"""SparseGPT: prune by the inverse Hessian of a layer's squared error, compensating in the remaining weights.

https://arxiv.org/abs/2301.00774
"""

# Shapes: O outputs, I inputs. Weights are transposed inside, so that a column is contiguous.

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from dunes.augment.calibrate import Gram

HALF = 0.5
"""Default fraction of zeros."""
REFITS, REFIT_TOLERANCE = 10, 1e-4  # iterations of `refit`; fraction of the squared gradient at which it stops
TINY = 1e-30
MOST_DAMPING = 1e4
"""Damping, as a multiple of the mean diagonal, at which the Gram matrix no longer matters."""


class Pattern(NamedTuple):
    """An N:M pattern: at most `kept` of every `group` consecutive inputs of an output are nonzero."""

    kept: int
    group: int

    @classmethod
    def of(cls, text: str) -> "Pattern":
        """Parse text like "2:4". Raises ValueError for anything else."""
        kept, separator, group = text.partition(":")
        if not separator or not (kept.isdecimal() and group.isdecimal()) or not 0 < int(kept) < int(group):
            raise ValueError(f"pattern is {text[:80]!r}; expected KEPT:GROUP, like 2:4 or 4:8")
        return cls(int(kept), int(group))

    def groups(self, inputs: int) -> dict[int, int]:
        """Start and stop of each group of columns."""
        return {start: start + self.group for start in range(0, inputs, self.group)}


class Sparsity(NamedTuple):
    """Fraction of weights to set to zero, and an N:M pattern or None."""

    fraction: float
    pattern: Pattern | None = None

    @classmethod
    def of(cls, fraction: float | None, pattern: str | None) -> "Sparsity":
        """The fraction, by default the pattern's or 0.5. Raises ValueError if fraction and pattern disagree."""
        shape = None if pattern is None else Pattern.of(pattern)
        implied = HALF if shape is None else 1 - shape.kept / shape.group
        fraction = implied if fraction is None else fraction
        if not 0 < fraction < 1 or (shape is not None and abs(fraction - implied) > 1e-9):
            expected = "more than 0 and less than 1" if shape is None else f"{implied:g}, which {pattern} gives"
            raise ValueError(f"sparsity is {fraction:g}; expected {expected}")
        return cls(fraction, shape)

    def require_inputs(self, name: str, inputs: int) -> None:
        """Raise ValueError, naming the layer, unless its inputs are a multiple of the pattern's group."""
        if self.pattern is not None and inputs % self.pattern.group:
            kept, group = self.pattern
            raise ValueError(f"{name}: its {inputs} inputs are no multiple of {group} ({kept}:{group})")

    def choose(self, scores: Tensor) -> Tensor:
        """Mask of the scores (columns, O) to prune: the lowest, or with a pattern the lowest of each output."""
        if self.pattern is None:
            return smallest(scores, self.fraction)
        return lowest(scores, self.pattern.group - self.pattern.kept, 0)

    def choose_all(self, scores: Tensor, by_output: bool = False) -> Tensor:
        """Mask of the scores (O, I) to prune: the lowest by pattern, by output, or of the complete matrix."""
        if self.pattern is not None:
            groups = scores.view(len(scores), -1, self.pattern.group)
            return lowest(groups, self.pattern.group - self.pattern.kept, 2).flatten(1)
        if by_output:
            return lowest(scores, int(scores.shape[1] * self.fraction), 1)
        return smallest(scores, self.fraction)


class Hessian(NamedTuple):
    """The damped Hessian `matrix` (I, I) = 2/n sum x xT + `added` on the diagonal. `factor` (I, I) is the upper
    Cholesky factor of its inverse, `dead` (I,) bool the inputs that are always zero, `damp` is `added` as a
    fraction of the mean diagonal."""

    factor: Tensor
    dead: Tensor
    damp: float
    matrix: Tensor
    added: Tensor


def hessian(gram: Gram, damp: float, place: str = "a layer") -> Hessian:
    """The Hessian of a Gram matrix, with damping raised tenfold until the matrix can be inverted.

    Raises ValueError, naming the place, if the Gram has values that are not finite, or cannot be inverted with any
    damping.
    """
    if not gram.matrix.isfinite().all():
        raise ValueError(f"{place}: the inputs of the calibration text are not finite; are the model's weights?")
    h = gram.matrix * (2 / max(1, gram.tokens))
    dead = h.diagonal() == 0
    mean = h.new_ones(()) if dead.all() else h.diagonal().mean()
    h.diagonal()[dead] = mean  # a larger number would outweigh small inputs in the damping
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
            raise ValueError(
                f"{place}: the Gram matrix of the calibration text cannot be inverted; pass other text"
            )


Column = Callable[[int, Tensor], Tensor]
"""Function of j and the columns (I, O), as updated so far, that returns the new column j (O,)."""


def sweep(columns: Tensor, factor: Tensor, blocks: Mapping[int, int], replace: Column) -> None:
    """Replace the columns (I, O) in place, one after another, compensating each error in the later columns.

    `factor` (I, I) is the factor of their `Hessian`. `blocks` maps the start of a block of columns to its stop:
    columns of the same block are updated immediately, later columns at the end of the block.
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
    """The pruned weight (O, I) in float32, by a sweep over blocks of `block` columns.

    Each block loses the weights with the lowest error, w² over the squared diagonal of the factor (compared as
    square roots, as squares may underflow). With a pattern, weights are selected by output and group when the
    sweep reaches the group's first column. Weights where `zeros` (O, I) bool is True are pruned first.
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
    """The pruned weight (O, I) with nonzero values refitted by least squares to the outputs of `weight`.

    The sweep does not update earlier columns for later zeros; this does. Conjugate gradients, preconditioned by
    the diagonal, solve the least squares of all rows at once. Rows whose undamped error does not fall, or is not
    finite, are returned unchanged.
    """
    fitted, nonzero, diagonal = pruned, pruned != 0, h.matrix.diagonal()
    missing = weight.float() - pruned
    residual = before_fit = (missing @ h.matrix) * nonzero
    scaled = direction = residual / diagonal
    size = (residual * scaled).sum(1, keepdim=True)
    enough = REFIT_TOLERANCE * size.sum()
    for _ in range(REFITS):
        if size.sum() <= enough:
            break
        product = (direction @ h.matrix) * nonzero
        step = size / (direction * product).sum(1, keepdim=True).clamp(min=TINY)
        fitted, residual = fitted + step * direction, residual - step * product
        scaled = residual / diagonal
        size, before = (residual * scaled).sum(1, keepdim=True), size
        direction = scaled + size / before.clamp(min=TINY) * direction
    # The error falls by m H m - (m - c) H (m - c), with m `missing` and c `change`, which is 0 at pruned weights.
    change = fitted - pruned
    fall = change * (before_fit + residual) - h.added * change * (2 * missing - change)
    fall = fall.sum(1, keepdim=True)  # products may overflow, or underflow to zero
    return torch.where(fall.isfinite() & (fall > 0), fitted, pruned)


def wanda_scores(weight: Tensor, gram: Gram) -> Tensor:
    """Wanda's scores (O, I) float32: |w| times the norm of its input over all tokens."""
    return weight.detach().float().abs() * gram.matrix.diagonal().sqrt()


def smallest(scores: Tensor, sparsity: float) -> Tensor:
    """Mask of the lowest scores: as in the published code, one more than the fraction.

    Ties at the threshold are cut to that number, as a layer with few distinct values would lose more, except
    zeros.
    """
    count = int(scores.numel() * sparsity) + 1
    threshold = scores.flatten().kthvalue(count).values
    chosen = scores <= threshold
    if threshold > 0 and (extra := int(chosen.sum()) - count):
        chosen.view(-1)[(scores == threshold).flatten().nonzero()[-extra:]] = False
    return chosen


def lowest(scores: Tensor, count: int, dim: int) -> Tensor:
    """Mask of the `count` lowest scores along `dim`; ties go to the first."""
    order = torch.sort(scores, stable=True, dim=dim).indices.narrow(dim, 0, count)
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(dim, order, True)
