"""GPTQ: quantize a linear layer column by column, compensating each rounding error in the later columns.

https://arxiv.org/abs/2210.17323. SparseGPT (`prune.py`) uses the same Hessian and sweep.

Let W be the weight, Q the rounded weight, and G the Gram matrix of the inputs X. When column j is rounded, the
later columns change in proportion to row j of the upper Cholesky factor of G's inverse. These changes minimise the
error of the outputs, |(W - Q) X|^2.
"""

# Shapes: I inputs, O outputs, G groups of a row. Weights are transposed inside, so that columns are contiguous.

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dunes.augment.adapted import keeps_zeros
from dunes.augment.calibrate import Gram, assign_weight, calibrate_blocks
from dunes.augment.change import modules_at
from dunes.augment.quantized import Grid, QuantParams

BLOCK = 128
"""Number of columns that are rounded between two updates of all later columns."""
DAMP = 0.01
"""Damping added to the Hessian's diagonal, as a fraction of the diagonal's mean."""
MOST_DAMPING = 1e4
"""Maximum damping, as a multiple of the diagonal's mean; more damping would make the Gram matrix negligible."""


class Hessian(NamedTuple):
    """The damped Hessian `matrix` (I, I): 2/n times the sum of x xT over n tokens, plus `added` on the diagonal.

    `factor` (I, I) is the upper Cholesky factor of the inverse of `matrix`. `dead` (I,), bool, is True for inputs
    that are always zero. `damp` is `added` as a fraction of the diagonal's mean.
    """

    factor: Tensor
    dead: Tensor
    damp: float
    matrix: Tensor
    added: Tensor


def hessian(gram: Gram, damp: float, place: str = "a layer") -> Hessian:
    """Compute the Hessian from a Gram matrix; the damping is multiplied by 10 until the Hessian can be inverted.

    Raises ValueError with the name of the place if the Gram matrix is not finite, or if the Hessian cannot be
    inverted even with a damping of MOST_DAMPING.
    """
    if not gram.matrix.isfinite().all():
        raise ValueError(f"{place}: the inputs of the calibration text are not finite; check the model's weights")
    h = gram.matrix * (2 / max(1, gram.tokens))
    dead = h.diagonal() == 0
    mean = h.new_ones(()) if dead.all() else h.diagonal().mean()
    h.diagonal()[dead] = mean  # makes the diagonal positive, and has no effect on other inputs
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
"""A function (j, columns) that returns the new column j, (O,); `columns` (I, O) contain all updates so far."""


def sweep(columns: Tensor, factor: Tensor, blocks: Mapping[int, int], replace: Column) -> None:
    """Set each column j of `columns` (I, O) in place to `replace(j, columns)`, in order.

    After each column, the later columns are adjusted to compensate for the column's error. `factor` (I, I) comes
    from `Hessian`. `blocks` maps the start of each block of columns to the block's end. The error of a column
    updates the later columns of its block immediately, and columns after the block at the block's end.
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


@torch.no_grad()
def solve(
    model: nn.Module, ids: Tensor | None, grids: Mapping[str, Grid], request: Mapping[str, Any]
) -> Iterator[tuple[dict[str, QuantParams], list[str]]]:
    """Quantize the linear layers at the places in `grids`, block by block, calibrated on `ids` (S, T) int64.

    Layers are quantized in execution order; each is calibrated on the outputs of the quantized layers before it
    ("true sequential"). If `request["act_order"]` is True, the columns with the largest inputs are rounded first.
    A layer that got fewer tokens than it has inputs is rounded to nearest. For each block, yields the scales and
    zero points (O, G) by place, and the list of places rounded to nearest.
    """
    assert ids is not None, "decided with text"
    layers = modules_at(model, grids)
    solved, short = dict[str, QuantParams](), list[str]()

    def solve_layers(grams: Mapping[str, Gram]) -> None:
        for name, gram in grams.items():
            layer, grid = layers.pop(name), grids[name]
            weight = layer.weight.float()
            if gram.tokens < weight.shape[1]:
                short.append(name)
                solved[name] = grid.fit_weight(weight)
                assign_weight(layer, grid.round_weight(weight, solved[name]))
                continue
            h, order = gram.factors = gram.factors or hessian_of(gram, request["act_order"], name)
            zeros = weight == 0 if keeps_zeros(layer) else None
            rounded, solved[name] = round_columns(weight, h, order, grid, zeros)
            assign_weight(layer, rounded)

    for _ in calibrate_blocks(model, ids, [*grids], solve_layers, sequential=True):
        yield {**solved}, [*short]
        solved.clear()
        short.clear()


def hessian_of(gram: Gram, act_order: bool, place: str = "a layer") -> tuple[Hessian, Tensor | None]:
    """The Hessian, and the order (I,) of its columns: largest inputs first, or None without `act_order`."""
    order = gram.matrix.diagonal().argsort(descending=True, stable=True) if act_order else None
    if order is not None:
        gram = replace(gram, matrix=gram.matrix[order][:, order])
    return hessian(gram, DAMP, place), order


def round_columns(
    weight: Tensor, h: Hessian, order: Tensor | None, grid: Grid, zeros: Tensor | None = None
) -> tuple[Tensor, QuantParams]:
    """Round a float32 weight (O, I); returns the rounded weight, and its scales and zero points (O, G).

    A group's scale and zero point are fitted when the sweep reaches the group's first column, or, with an `order`
    (I,), before the sweep ("static groups"). Where `zeros` (O, I) is True, the result is 0.
    """
    inputs, width = weight.shape[1], grid.width(weight.shape[1])
    columns, parts = weight.T.clone(memory_format=torch.contiguous_format), list[QuantParams]()
    masked = torch.zeros_like(columns, dtype=torch.bool) if zeros is None else zeros.T
    if order is not None:
        columns, masked = columns[order], masked[order]
        parts = [
            QuantParams(*pair)
            for pair in zip(*(torch.split(t, 1, 1) for t in grid.fit_weight(weight)), strict=True)
        ]
    group_of = ((torch.arange(inputs) if order is None else order) // width).tolist()

    def rounded(j: int, current: Tensor) -> Tensor:
        if group_of[j] == len(parts):
            parts.append(grid.fit(current[j : j + width].T))
        return grid.round(current[j, :, None], parts[group_of[j]])[:, 0].masked_fill(masked[j], 0)

    sweep(columns, h.factor, column_blocks(inputs, width if order is None else BLOCK), rounded)
    columns = columns if order is None else columns[order.argsort()]
    return columns.T.contiguous(), QuantParams(*(torch.cat(t, 1) for t in zip(*parts, strict=True)))


def column_blocks(inputs: int, width: int) -> dict[int, int]:
    """The start and stop of each block of columns; `width` is the size of a quantization group.

    A group wider than a block starts at a block boundary; any other group lies inside one block.
    """
    span = width if width > BLOCK else BLOCK // width * width
    spans = [range(first, min(first + span, inputs), BLOCK) for first in range(0, inputs, span)]
    starts = [start for each in spans for start in each]
    return dict(zip(starts, [*starts[1:], inputs], strict=True))
