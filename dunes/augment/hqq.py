"""Zero points for a weight alone, without calibration text (HQQ). https://mobiusml.github.io/hqq_blog/

Half-quadratic splitting: the error is pulled towards a sparse one by the p-norm's proximal step, and the zero
point is the mean of what remains; the scale stays that of round to nearest.
"""

# Shapes: I inputs, O outputs, G groups of a row, C inputs of a group.

import torch
from torch import Tensor

from dunes.augment.quantized import Grid, Steps

NORM, BETA, GROWTH, ITERATIONS = 0.7, 10.0, 1.01, 20
"""The paper's p, the first weight of the quadratic term and its growth, and the most iterations."""


@torch.no_grad()
def solve(weight: Tensor, grid: Grid) -> Steps:
    """Scales and real zero points (O, G) of a weight (O, I) in float32.

    The iteration begins at those of round to nearest, and stops where no group's mean absolute error falls any
    more; each group gets the best that it had. Where a group has zeros, as of pruning, its zero point is a code.
    """
    groups, mask = grid.grouped(weight), grid.grouped(torch.ones_like(weight[:1]))
    count, beta = mask.sum(-1, keepdim=True), BETA
    steps, pruned = grid.fit(groups), ((groups == 0) * mask).any(-1, keepdim=True)
    best, least = steps.zero, _error(groups, grid, steps, mask)
    for _ in range(ITERATIONS):
        rounded = grid.round(groups, steps)
        sparse = _shrink(groups - rounded, beta)
        codes = grid.codes(groups, steps)
        scale = torch.where(steps.scale == 0, 1.0, steps.scale)
        zero = ((codes - (groups - sparse) / scale) * mask).sum(-1, keepdim=True) / count
        zero = torch.where(pruned, zero.round().clamp(grid.lowest, grid.highest), zero.half().float())
        steps, beta = Steps(steps.scale, zero), beta * GROWTH
        error = _error(groups, grid, steps, mask)
        if not (better := error < least).any():
            break
        best, least = torch.where(better, steps.zero, best), torch.where(better, error, least)
    return Steps(steps.scale[..., 0], best[..., 0])


def _error(groups: Tensor, grid: Grid, steps: Steps, mask: Tensor) -> Tensor:
    """The sum of the absolute errors in each group."""
    return ((groups - grid.round(groups, steps)).abs() * mask).sum(-1, keepdim=True)


def _shrink(error: Tensor, beta: float) -> Tensor:
    """The proximal step of the p-norm, for p below 1 (section 2.2)."""
    size = error.abs()
    return error.sign() * (size - size.clamp(min=1e-8).pow(NORM - 1) / beta).clamp(min=0)
