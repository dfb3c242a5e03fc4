"""SparseGPT: pruning by the inverse Hessian of the layer's squared error; the weights that stay make up for it.

https://arxiv.org/abs/2301.00774
"""

# Shapes: O outputs, I inputs, B columns of a block. Weights are transposed inside, so that a column is contiguous.

from typing import NamedTuple

import torch
from torch import Tensor

from dunes.augment.calibrate import Gram
from dunes.augment.wanda import lowest, smallest

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


class Hessian(NamedTuple):
    """The upper Cholesky factor (I, I) of the inverse of H = 2/n sum x xT + damping, inputs that are always zero
    (I,) bool, and the damping as a fraction of the mean diagonal."""

    factor: Tensor
    dead: Tensor
    damp: float


def hessian(gram: Gram, damp: float) -> Hessian:
    """What `prune` needs of a Gram matrix; the damping is raised tenfold until the matrix can be inverted.

    Raises ValueError if it has values that are not finite.
    """
    if not gram.matrix.isfinite().all():
        raise ValueError("the inputs of the calibration text are not finite; are the model's weights?")
    h = gram.matrix * (2 / max(1, gram.tokens))
    dead = h.diagonal() == 0
    h.diagonal()[dead] = 1
    mean = h.diagonal().mean()
    while True:
        damped = h.clone()
        damped.diagonal().add_(damp * mean)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not failed:
            factor, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
        if not failed and factor.isfinite().all():
            return Hessian(factor, dead, damp)
        damp = max(damp, 1e-4) * 10
        if damp > MOST_DAMPING:
            raise ValueError("the Gram matrix of the calibration text cannot be inverted; pass other text")


def prune(weight: Tensor, h: Hessian, sparsity: float, pattern: Pattern | None, block: int = 128) -> Tensor:
    """The pruned weight (O, I) in float32.

    In each block of columns, the weights with the lowest error go: w² over the squared diagonal of the factor
    (here the roots of both, since small squares underflow). With a pattern they are chosen for each output and
    group, just before its first column, when the errors of the columns before have been made up for.
    """
    columns = weight.detach().float().T.contiguous()
    columns[h.dead] = 0
    for start in range(0, len(columns), block):
        end = min(start + block, len(columns))
        factor = h.factor[start:end, start:end]
        errors = _prune_block(columns[start:end], factor, sparsity, pattern)
        columns[end:] -= h.factor[start:end, end:].T @ errors
    return columns.T.contiguous()


def _prune_block(columns: Tensor, factor: Tensor, sparsity: float, pattern: Pattern | None) -> Tensor:
    """Prune the columns (B, O) in place; returns their errors (B, O), which later columns make up for."""
    scales, errors = factor.diagonal()[:, None], torch.empty_like(columns)
    pruned = torch.zeros_like(columns, dtype=torch.bool)
    if pattern is None:
        pruned = smallest((columns / scales).abs(), sparsity)
    for j in range(len(columns)):
        if pattern is not None and j % pattern.group == 0:
            group = slice(j, j + pattern.group)
            scores = (columns[group] / scales[group]).abs()
            pruned[group] = lowest(scores, pattern.group - pattern.kept, 0)
        error = columns[j] * pruned[j] / scales[j]
        columns[j:].addr_(factor[j, j:], error, alpha=-1)
        columns[j].masked_fill_(pruned[j], 0)
        errors[j] = error
    return errors
