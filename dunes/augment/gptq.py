"""GPTQ: quantize a linear layer column by column, compensating each rounding error in the later columns.

https://arxiv.org/abs/2210.17323. SparseGPT (`prune.py`) uses the same Hessian and sweep.

Let G be the Gram matrix of the inputs X. The outputs' error |(W - Q) X|^2 is least if the error of rounding column
j is distributed over the later columns in proportion to row j of the upper Cholesky factor of G's inverse.
"""

# Shapes: I inputs, O outputs, G groups of a row. Weights are transposed inside, which makes columns contiguous.

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dunes.augment.adapted import keeps_zeros
from dunes.augment.calibrate import Gram, assign_weight, calibrate_blocks
from dunes.augment.change import modules_at
from dunes.augment.quantized import Grid, Steps

BLOCK = 128
"""Columns to round between two updates of the remaining matrix."""
DAMP = 0.01
"""Damping of the Gram matrix's diagonal, as a fraction of its mean."""
MOST_DAMPING = 1e4
"""Damping, as a multiple of the mean diagonal, at which the Gram matrix no longer matters."""


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


@torch.no_grad()
def solve(
    model: nn.Module, ids: Tensor, grids: Mapping[str, Grid], request: Mapping[str, Any]
) -> Iterator[tuple[dict[str, Steps], list[str]]]:
    """Quantize the linear layers at the places in `grids`, block by block, calibrated on `ids` (S, T) int64.

    Layers are quantized in execution order, each calibrated on the outputs of the quantized layers before it
    ("true sequential"). If the change's `request` has `act_order`, the columns with the largest inputs come first.
    Yields for each block scales and zero points (O, G) by place, and places with fewer tokens than inputs, which
    are rounded to nearest.
    """
    layers = modules_at(model, grids)
    solved, short = dict[str, Steps](), list[str]()

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
    """The Hessian of a Gram matrix, and with `act_order` the order (I,) of its columns, the largest first."""
    order = gram.matrix.diagonal().argsort(descending=True, stable=True) if act_order else None
    if order is not None:
        gram = replace(gram, matrix=gram.matrix[order][:, order])
    return hessian(gram, DAMP, place), order


def round_columns(
    weight: Tensor, h: Hessian, order: Tensor | None, grid: Grid, zeros: Tensor | None = None
) -> tuple[Tensor, Steps]:
    """The rounded weight (O, I) with its scales and zero points (O, G); the weight is float32.

    A group's scale and zero point are fitted when its first column is reached; with an `order`, to the original
    weight ("static groups"). The result is zero where `zeros` (O, I) bool is True.
    """
    inputs, width = weight.shape[1], grid.width(weight.shape[1])
    columns, parts = weight.T.clone(memory_format=torch.contiguous_format), list[Steps]()
    masked = torch.zeros_like(columns, dtype=torch.bool) if zeros is None else zeros.T
    if order is not None:
        columns, masked = columns[order], masked[order]
        parts = [
            Steps(*pair) for pair in zip(*(torch.split(t, 1, 1) for t in grid.fit_weight(weight)), strict=True)
        ]
    group_of = ((torch.arange(inputs) if order is None else order) // width).tolist()

    def rounded(j: int, current: Tensor) -> Tensor:
        if group_of[j] == len(parts):
            parts.append(grid.fit(current[j : j + width].T))
        return grid.round(current[j, :, None], parts[group_of[j]])[:, 0].masked_fill(masked[j], 0)

    sweep(columns, h.factor, column_blocks(inputs, width if order is None else BLOCK), rounded)
    columns = columns if order is None else columns[order.argsort()]
    return columns.T.contiguous(), Steps(*(torch.cat(t, 1) for t in zip(*parts, strict=True)))


def column_blocks(inputs: int, width: int) -> dict[int, int]:
    """Start and stop of each block. No group crosses a block, except wide ones, which start a new block."""
    span = width if width > BLOCK else BLOCK // width * width
    spans = [range(first, min(first + span, inputs), BLOCK) for first in range(0, inputs, span)]
    starts = [start for each in spans for start in each]
    return dict(zip(starts, [*starts[1:], inputs], strict=True))
