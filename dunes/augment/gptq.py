"""Rounding a linear layer's weight column by column, each error made up for by the columns after it (GPTQ).

https://arxiv.org/abs/2210.17323: with the Gram matrix G of the inputs, the change of the outputs |(W - Q) X|^2 is
least, given that column j is rounded, if the error of that column is spread over the later ones in proportion to a
row of the upper Cholesky factor of the inverse of G.
"""

# Shapes: I inputs, O outputs, G groups of a row. Weights are transposed inside, so that a column is contiguous.

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from dunes import tree
from dunes.augment.adapted import keeps_zeros
from dunes.augment.calibrate import Gram, assign_weight, calibrate_blocks
from dunes.augment.quantized import Grid, Steps, join, split
from dunes.augment.sparsegpt import Hessian, hessian, sweep

BLOCK, DAMP = 128, 0.01
"""Columns that are rounded before the rest of the matrix is updated, and what is added to the Gram's diagonal, as
a fraction of its mean."""

Hessians = dict[int, tuple[Hessian, Tensor | None]]
"""Of each Gram that some layers read (by its id): what a sweep needs of it, and the order of the columns."""


@torch.no_grad()
def solve(
    model: nn.Module, ids: Tensor, grids: Mapping[str, Grid], act_order: bool
) -> Iterator[tuple[dict[str, Steps], list[str]]]:
    """Round the linear layers at these places, by what they read of `ids` (S, T), block by block.

    Layers that compute earlier come first, and later ones are calibrated on what these then write ("true
    sequential"). With `act_order` the columns whose inputs are largest come first. Yields for each block the steps
    (O, G) by place, and the places of experts that got fewer tokens than they have inputs, which are rounded to
    nearest.
    """
    layers: dict[str, Any] = {p.name: p.module for p in tree.places(model) if p.name in grids}
    solved, short = dict[str, Steps](), list[str]()

    def solve_layers(grams: Mapping[str, Gram]) -> None:
        hessians = Hessians()
        for name, gram in grams.items():
            layer, grid = layers.pop(name), grids[name]
            weight = layer.weight.float()
            if gram.tokens < weight.shape[1]:
                short.append(name)
                solved[name] = grid.fit_weight(weight)
                assign_weight(layer, grid.round_weight(weight, solved[name]))
                continue
            if id(gram) not in hessians:  # layers with the same input share it
                hessians[id(gram)] = hessian_of(gram, act_order, name)
            zeros = weight == 0 if keeps_zeros(layer) else None
            rounded, solved[name] = round_columns(weight, *hessians[id(gram)], grid, zeros)
            assign_weight(layer, rounded)

    for _ in calibrate_blocks(model, ids, [*grids], solve_layers, sequential=True):
        yield {**solved}, [*short]
        solved.clear()
        short.clear()


def hessian_of(gram: Gram, act_order: bool, place: str = "") -> tuple[Hessian, Tensor | None]:
    """What a sweep needs of a Gram matrix, and the order (I,) of its columns, by size with `act_order`.

    Raises ValueError, with the place, for a matrix that cannot be inverted.
    """
    order = gram.matrix.diagonal().argsort(descending=True, stable=True) if act_order else None
    if order is not None:
        gram = replace(gram, matrix=gram.matrix[order][:, order])
    try:
        return hessian(gram, DAMP), order
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from None


def round_columns(
    weight: Tensor,
    h: Hessian,
    order: Tensor | None,
    grid: Grid,
    zeros: Tensor | None = None,
) -> tuple[Tensor, Steps]:
    """The rounded weight (O, I) and its steps (O, G), for a weight in float32 and `hessian_of` its inputs.

    A group's steps are those of its columns as they are when its first column is reached; with an order, they are
    those of the weight ("static groups"). Where `zeros` (O, I), it becomes zero.
    """
    inputs, width = weight.shape[1], grid.width(weight.shape[1])
    columns, parts = weight.T.clone(memory_format=torch.contiguous_format), list[Steps]()
    gone = torch.zeros_like(columns, dtype=torch.bool) if zeros is None else zeros.T
    if order is not None:
        columns, gone, parts = columns[order], gone[order], split(grid.fit_weight(weight))
    group_of = ((torch.arange(inputs) if order is None else order) // width).tolist()

    def rounded(j: int, current: Tensor) -> Tensor:
        if group_of[j] == len(parts):
            parts.append(grid.fit(current[j : j + width].T))
        return grid.round(current[j, :, None], parts[group_of[j]])[:, 0].masked_fill(gone[j], 0)

    sweep(columns, h.factor, column_blocks(inputs, width if order is None else BLOCK), rounded)
    columns = columns if order is None else columns[order.argsort()]
    return columns.T.contiguous(), join(parts)


def column_blocks(inputs: int, width: int) -> dict[int, int]:
    """The start and stop of each block: a wide group begins with one, other groups are whole inside of one."""
    span = width if width > BLOCK else BLOCK // width * width
    spans = [range(first, min(first + span, inputs), BLOCK) for first in range(0, inputs, span)]
    starts = [start for each in spans for start in each]
    return dict(zip(starts, [*starts[1:], inputs], strict=True))
