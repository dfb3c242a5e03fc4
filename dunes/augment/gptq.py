"""Rounding a linear layer's weight column by column, each error made up for by the columns after it (GPTQ).

https://arxiv.org/abs/2210.17323: with the Gram matrix G of the inputs, the change of the outputs |(W - Q) X|^2 is
least, given that column j is rounded, if the error of that column is spread over the later ones in proportion to a
row of the upper Cholesky factor of the inverse of G.
"""

# Shapes: I inputs, O outputs, C columns of a block, G groups of a row.

from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from dunes import tree
from dunes.augment.calibrate import Gram, calibrate
from dunes.augment.change import Show, no_show
from dunes.augment.quantized import Grid, Steps, join

ORDER = False
BLOCK, DAMP = 128, 0.01
"""Columns that are rounded before the rest of the matrix is updated, and what is added to the Gram's diagonal, as
a fraction of its mean."""


@torch.no_grad()
def solve(
    model: nn.Module, ids: Tensor, grids: Mapping[str, Grid], show: Show = no_show
) -> tuple[dict[str, Steps], list[str]]:
    """Round the linear layers at these places in place, by what they read of `ids` (S, T).

    Layers that compute earlier come first, and later ones are calibrated on what these then write ("true
    sequential"). Returns the steps (O, G) by place, and the places of experts that got fewer tokens than they have
    inputs: these are rounded to nearest.
    """
    layers: dict[str, Any] = {p.name: p.module for p in tree.places(model) if p.name in grids}
    solved, short = dict[str, Steps](), list[str]()

    def solve_layers(grams: Mapping[str, Gram]) -> None:
        factors = dict[int, Tensor]()
        for name, gram in grams.items():
            weight, grid = layers[name].weight, grids[name]
            if gram.tokens < weight.shape[1]:
                short.append(name)
                steps = grid.fit_weight(weight.float())
                rounded = grid.round_weight(weight.float(), steps)
            else:
                order = gram.matrix.diagonal().argsort(descending=True, stable=True) if ORDER else None
                if id(gram) not in factors:
                    factors[id(gram)] = inverse_factor(gram.matrix if order is None else gram.matrix[order][:, order], name)
                rounded, steps = round_columns(weight.float(), factors[id(gram)], grid, order)
            weight.copy_(rounded)
            solved[name] = steps

    calibrate(model, ids, [*grids], solve_layers, sequential=True, show=show)
    return solved, short


def inverse_factor(gram: Tensor, place: str = "") -> Tensor:
    """The upper Cholesky factor (I, I) of the inverse of a Gram matrix (I, I), damped.

    An input that is always zero is coupled to none. Where float32 does not find the matrix positive, it is damped
    more. Raises ValueError, with the place, for inputs that are not finite.
    """
    gram, diagonal = gram.clone(), gram.diagonal()
    if not diagonal.isfinite().all():
        raise ValueError(f"{place}: what it reads of the calibration text is not finite; are all weights?")
    damp = max(float(diagonal.mean()) * DAMP, 1e-20)
    gram.diagonal()[diagonal == 0] = 1.0
    while True:
        gram.diagonal().add_(damp)
        lower, failed = torch.linalg.cholesky_ex(gram)
        if not failed:
            factor, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not failed and factor.isfinite().all():
                return cast(Tensor, factor)
        damp *= 10


def round_columns(
    weight: Tensor, factor: Tensor, grid: Grid, order: Tensor | None = None
) -> tuple[Tensor, Steps]:
    """The rounded weight (O, I) and its steps (O, G), for a weight in float32 and an `inverse_factor` (I, I).

    A group's steps are those of its columns as they are when its first column is reached. With an `order` (I,) of
    the columns, which is also that of the factor, they are those of the weight ("static groups").
    """
    width = grid.width(weight.shape[1])
    if order is not None:
        steps = grid.fit_weight(weight)
        groups = [Steps(steps.scale[:, i, None], steps.zero[:, i, None]) for i in (order // width).tolist()]
        rounded = _round_in_order(weight[:, order], factor, grid, lambda j, current: groups[j])
        return rounded[:, order.argsort()], steps
    parts = list[Steps]()

    def steps_of(j: int, current: Tensor) -> Steps:
        if j % width == 0:
            parts.append(grid.fit(current[:, j : j + width]))
        return parts[-1]

    rounded = _round_in_order(weight.clone(), factor, grid, steps_of, width)
    return rounded, join(parts)


def _round_in_order(
    weight: Tensor, factor: Tensor, grid: Grid, steps_of: Callable[[int, Tensor], Steps], width: int = BLOCK
) -> Tensor:
    """The weight (O, I), whose columns are rounded from left to right, in place."""
    for start, stop in _blocks(weight.shape[1], width):
        block, errors = weight[:, start:stop], torch.empty_like(weight[:, start:stop])
        for i in range(stop - start):
            row = factor[start + i, start + i : stop]
            column = block[:, i : i + 1].clone()
            rounded = grid.round(column, steps_of(start + i, weight))
            errors[:, i : i + 1] = error = (column - rounded) / row[0]
            block[:, i:] -= error * row
            block[:, i : i + 1] = rounded
        weight[:, stop:] -= errors @ factor[start:stop, stop:]
    return weight


def _blocks(inputs: int, width: int) -> Iterator[tuple[int, int]]:
    """Blocks of columns. A group that is wider than one begins with a block, others are whole inside of one."""
    span = width if width > BLOCK else BLOCK // width * width
    for first in range(0, inputs, span):
        last = min(first + span, inputs)
        for start in range(first, last, BLOCK):
            yield start, min(start + BLOCK, last)
