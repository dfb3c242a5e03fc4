"""Rounding a linear layer's weight column by column, each error made up for by the columns after it (GPTQ).

https://arxiv.org/abs/2210.17323: with the Gram matrix G of the inputs, the change of the outputs |(W - Q) X|^2 is
least, given that column j is rounded, if the error of that column is spread over the later ones in proportion to a
row of the upper Cholesky factor of the inverse of G.
"""

# Shapes: I inputs, O outputs, G groups of a row. Weights are transposed inside, so that a column is contiguous.

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from dunes import tree
from dunes.augment.calibrate import Gram, States, assign_weight, calibrate_blocks
from dunes.augment.quantized import Grid, Steps, join
from dunes.augment.sparsegpt import hessian

BLOCK, DAMP = 128, 0.01
"""Columns that are rounded before the rest of the matrix is updated, and what is added to the Gram's diagonal, as
a fraction of its mean."""

StepsOf = Callable[[int, Tensor], Steps]
"""The steps (O, 1) of column j, of columns as they are then."""
Factors = dict[int, tuple[Tensor, Tensor | None]]


@torch.no_grad()
def solve(
    model: nn.Module, ids: Tensor, grids: Mapping[str, Grid], act_order: bool, states: States | None = None
) -> Iterator[tuple[dict[str, Steps], list[str], States]]:
    """Round the linear layers at these places, by what they read of `ids` (S, T), block by block.

    Layers that compute earlier come first, and later ones are calibrated on what these then write ("true
    sequential"). With `act_order` the columns whose inputs are largest come first. Yields for each block the steps
    (O, G) by place, and the places of experts that got fewer tokens than they have inputs, which are rounded to
    nearest; and the states from which another call goes on.
    """
    layers: dict[str, Any] = {p.name: p.module for p in tree.places(model) if p.name in grids}
    solved, short = dict[str, Steps](), list[str]()

    def solve_layers(grams: Mapping[str, Gram]) -> None:
        factors: Factors = {}
        for name, gram in grams.items():
            layer, grid = layers.pop(name), grids[name]
            weight = layer.weight.float()
            if gram.tokens < weight.shape[1]:
                short.append(name)
                solved[name] = grid.fit_weight(weight)
                assign_weight(layer, grid.round_weight(weight, solved[name]))
                continue
            if id(gram) not in factors:  # layers with the same input share it
                factors[id(gram)] = factor_of(gram, act_order, name)
            pruned = weight == 0 if getattr(layer, "keeps_zeros", False) else None
            rounded, solved[name] = round_columns(weight, *factors[id(gram)], grid, pruned)
            assign_weight(layer, rounded)

    for after in calibrate_blocks(model, ids, [*grids], solve_layers, sequential=True, states=states):
        yield {**solved}, [*short], after
        solved.clear()
        short.clear()


def factor_of(gram: Gram, act_order: bool, place: str = "") -> tuple[Tensor, Tensor | None]:
    """The upper Cholesky factor (I, I) of the inverse of the damped Gram matrix, and the order (I,) of columns.

    Raises ValueError, with the place, for a matrix that cannot be inverted.
    """
    order = gram.matrix.diagonal().argsort(descending=True, stable=True) if act_order else None
    if order is not None:
        gram = replace(gram, matrix=gram.matrix[order][:, order])
    try:
        return hessian(gram, DAMP).factor, order
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from None


def round_columns(
    weight: Tensor, factor: Tensor, order: Tensor | None, grid: Grid, pruned: Tensor | None = None
) -> tuple[Tensor, Steps]:
    """The rounded weight (O, I) and its steps (O, G), for a weight in float32 and `factor_of` its inputs.

    A group's steps are those of its columns as they are when its first column is reached; with an order, they are
    those of the weight ("static groups"). Where `pruned` (O, I), it becomes zero.
    """
    width = grid.width(weight.shape[1])
    columns = weight.T.clone(memory_format=torch.contiguous_format)
    keep = None if pruned is None else ~pruned.T
    if order is not None:
        steps = grid.fit_weight(weight)
        groups = [Steps(steps.scale[:, i, None], steps.zero[:, i, None]) for i in (order // width).tolist()]
        keep = None if keep is None else keep[order]
        columns = _round_in_order(columns[order], factor, grid, lambda j, current: groups[j], keep)
        return columns[order.argsort()].T.contiguous(), steps
    parts = list[Steps]()

    def steps_of(j: int, current: Tensor) -> Steps:
        if j % width == 0:
            parts.append(grid.fit(current[j : j + width].T))
        return parts[-1]

    columns = _round_in_order(columns, factor, grid, steps_of, keep, width)
    return columns.T.contiguous(), join(parts)


def _round_in_order(
    columns: Tensor, factor: Tensor, grid: Grid, steps_of: StepsOf, keep: Tensor | None, width: int = BLOCK
) -> Tensor:
    """The columns (I, O) of a weight, rounded in place from the first to the last."""
    for start, stop in _blocks(len(columns), width):
        block, rows = columns[start:stop], factor[start:stop, start:stop]
        errors = torch.empty_like(block)
        for i, column in enumerate(block):
            rounded = grid.round(column[:, None], steps_of(start + i, columns))[:, 0]
            if keep is not None:
                rounded = rounded * keep[start + i]
            errors[i] = (column - rounded) / rows[i, i]
            block[i:].addr_(rows[i, i:], errors[i], alpha=-1)
            block[i] = rounded
        columns[stop:] -= factor[start:stop, stop:].T @ errors
    return columns


def _blocks(inputs: int, width: int) -> Iterator[tuple[int, int]]:
    """Blocks of columns. A group that is wider than one begins with a block, others are whole inside of one."""
    span = width if width > BLOCK else BLOCK // width * width
    for first in range(0, inputs, span):
        last = min(first + span, inputs)
        for start in range(first, last, BLOCK):
            yield start, min(start + BLOCK, last)
