"""Inputs that are large on average are scaled up before weights are rounded, and down in the layer before (AWQ).

https://arxiv.org/abs/2306.00978: the scale of an input is its mean absolute value to a power, which is searched
for by the error of the outputs. The model computes what it did before, until its weights are rounded.
"""

# Shapes: I inputs, O outputs, K key/value heads, R heads of each, D head dim.

from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dunes import tree
from dunes.augment.calibrate import Gram, States, calibrate_blocks
from dunes.augment.change import part_name
from dunes.augment.quantized import Grid
from dunes.parts import MLP, Attention, Block, GatedMLP, RMSNorm
from dunes.parts.context import ForwardContext

POWERS = [i / 20 for i in range(20)]
SMALLEST = 1e-4
"""Mean inputs, as a fraction of the largest one, that get a smaller one's scale."""
TOLERANCE, TOKENS = 1e-5, 16


class _Fold(NamedTuple):
    """The outputs of a norm, or the rows of a linear layer, that linear layers read and nothing else does.

    Each output is read by `repeats` consecutive heads of `head_dim` inputs; 1 and 1 if it is one input.
    """

    source: Any
    readers: dict[str, Any]
    repeats: int = 1
    head_dim: int = 1


@torch.no_grad()
def fold(
    model: nn.Module, ids: Tensor, grids: Mapping[str, Grid], states: States | None = None
) -> Iterator[tuple[str, States]]:
    """Scale the layers at these places for their grids, by what they read of `ids` (S, T), block by block.

    Yields the name of each block, and the states from which another call goes on.

    Layers after a norm, the output of attention and the second matrix of a gated MLP are scaled; others have
    nothing before them that could be scaled down. Raises ValueError, before a block is changed, if it would
    compute something else afterwards.
    """
    parts = {*map(part_name, grids)}
    blocks: dict[str, Any] = {p.name: tree.innermost(p.module) for p in tree.places(model) if p.name in parts}
    done = list[str]()

    def scale_block(grams: Mapping[str, Gram]) -> None:
        name = part_name(next(iter(grams)))
        done.append(name)
        block = blocks[name]
        if type(block) is not Block:
            return
        scaled = deepcopy(block).float()  # equality could not be told from rounding in the model's own dtype
        for each in _folds(name, scaled):
            scale = _search(each, grams, grids)
            if scale is not None:
                _apply(each, scale)
        _require_equality(name, block, scaled)
        for parameter, new in zip(block.parameters(), scaled.parameters(), strict=True):
            parameter.data = new.to(parameter.dtype)  # not written over pages of a mapped file, which would stay

    for after in calibrate_blocks(model, ids, [*grids], scale_block, states=states):
        yield done.pop(), after


def _folds(name: str, block: Any) -> Iterator[_Fold]:
    """Where a scale can be moved from one layer of a block to another."""
    attn, mlp = block.attn, block.mlp
    if type(attn) is Attention:
        yield _Fold(block.attn_norm, {f"{name}.attn.{key}": getattr(attn, key) for key in ("q", "k", "v")})
        if all(isinstance(layer, nn.Linear) for layer in (attn.v, attn.out)):
            repeats = attn.out.in_features // attn.v.out_features
            yield _Fold(attn.v, {f"{name}.attn.out": attn.out}, repeats, attn.head_dim)
    if type(mlp) in (MLP, GatedMLP):
        keys = ("gate", "up") if type(mlp) is GatedMLP else ("up",)
        yield _Fold(block.mlp_norm, {f"{name}.mlp.{key}": getattr(mlp, key) for key in keys})
    for place in tree.places(block, f"{name}."):
        if type(place.module) is GatedMLP:
            yield _Fold(place.module.up, {f"{place.name}.down": place.module.down})


def _search(fold: _Fold, grams: Mapping[str, Gram], grids: Mapping[str, Grid]) -> Tensor | None:
    """The scale of each output of the source whose rounded readers have the least error; None if that is 1."""
    readers = {n: m for n, m in fold.readers.items() if n in grams and grams[n].tokens}
    layers = [fold.source, *fold.readers.values()]
    if not readers or not all(isinstance(layer, nn.Linear | nn.LayerNorm | RMSNorm) for layer in layers):
        return None
    if getattr(fold.source, "weight", None) is None:
        return None
    first = grams[next(iter(readers))]
    mean = _by_output(first.absolute / first.tokens, fold)
    mean = (mean / mean.max()).clamp(min=SMALLEST)
    least, best = float("inf"), None
    for power in POWERS:
        scale = mean**power / (mean.max() * mean.min()) ** (power / 2)
        wide = _by_input(scale, fold)
        error = sum(_error(m.weight, wide, grams[n].matrix, grids[n]) for n, m in readers.items())
        if error < least:
            least, best = error, scale if power else None
    return best


def _by_output(inputs: Tensor, fold: _Fold) -> Tensor:
    """The mean (outputs of the source,) over the inputs (I,) that read the same output."""
    return inputs.view(-1, fold.repeats, fold.head_dim).mean(1).flatten()


def _by_input(outputs: Tensor, fold: _Fold) -> Tensor:
    return outputs.view(-1, 1, fold.head_dim).expand(-1, fold.repeats, -1).flatten()


def _error(weight: Tensor, scale: Tensor, gram: Tensor, grid: Grid) -> float:
    """The squared change of the outputs if the weight (O, I) is rounded after its inputs are scaled."""
    scaled = weight * scale
    change = grid.round_weight(scaled, grid.fit_weight(scaled)) / scale - weight
    return float(((change @ gram) * change).sum())


def _apply(fold: _Fold, scale: Tensor) -> None:
    for layer in fold.readers.values():
        layer.weight.mul_(_by_input(scale, fold))
    weight, bias = fold.source.weight, getattr(fold.source, "bias", None)
    weight.div_(scale if weight.dim() == 1 else scale[:, None])
    if bias is not None:
        bias.div_(scale)


def _require_equality(name: str, block: Any, scaled: Any) -> None:
    """Raises ValueError if the scaled block (float32) computes something else on random states."""
    weight = block.attn_norm.weight
    x = torch.randn(1, TOKENS, len(weight), generator=torch.Generator().manual_seed(0)).to(weight.device)
    expected, actual = (b.eval()(x, ForwardContext.of(x), 0) - x for b in (deepcopy(block).float(), scaled))
    tolerance = TOLERANCE * float(expected.abs().max())
    if not (difference := float((actual - expected).abs().max())) <= tolerance:
        raise ValueError(
            f"{name}: scaling its layers changed what it computes by {difference:.1e}, more than {tolerance:.1e}; "
            "use another --method"
        )
