"""Block expansion: copies of blocks that add nothing at first, so that a model learns in these alone (LLaMA Pro).

https://arxiv.org/abs/2401.02415. An entry of CHANGES, see `changes.py`.
"""

import re
from collections.abc import Mapping
from copy import deepcopy

import torch
from torch import Tensor, nn

from dunes import tree
from dunes.augment.adapted import how_to_make_dense, sides
from dunes.augment.change import Change
from dunes.augment.masked import unmask_linears
from dunes.augment.options import Expand
from dunes.augment.quantized import Quantized
from dunes.parts import Decoder, cache_for
from dunes.progress import each
from dunes.units import plural

VERSION = 1
RESTORES = True
SPACING = 4
"""By default a new block follows every fourth, as in the paper."""
OUTPUTS = ("attn.out", "mlp.down", "mlp.**.down", "!mlp.router.**")
"""The linear layers whose results a block adds to the hidden states; in a mixture, those of all experts."""
COPIED = 0.5
"""The share of the change that is done when the blocks are copied, and not yet compared."""
TOKENS = 8
"""Tokens in each of two rows on which equality is checked."""


def decide(model: nn.Module, options: Expand) -> Change:
    """The record of the change: the new blocks, each with the block that it copies.

    Raises ValueError for a model with other parts, and for blocks that it does not have.
    """
    depth, blocks, after = len(_decoder(model).blocks), options.blocks, options.after
    _check_dense(model)
    sources = sorted(after) or list(range(depth))
    if sources[0] < 0 or sources[-1] >= depth:
        raise ValueError(f"after is {', '.join(map(str, after))}; this model's blocks are 0 to {depth - 1}")
    count = (len(after) or max(1, depth // SPACING)) if blocks is None else blocks
    if count < 1:
        raise ValueError(f"blocks is {count}; expected 1 or more new blocks")
    copied = [sources[-(-i * len(sources) // count) - 1] for i in range(1, count + 1)]
    places = {f"blocks.{source + i}": {"of": source} for i, source in enumerate(copied, 1)}
    return Change(
        "expand", VERSION, {**options.request(), "blocks": count}, places, tuple(f"{place}.**" for place in places)
    )


def _decoder(model: nn.Module) -> Decoder:
    if not isinstance(model, Decoder) or not len(model.blocks):
        raise ValueError(f"a {type(model).__name__} without blocks; expected a decoder, a stack of blocks")
    return model


def _check_dense(model: nn.Module) -> None:
    for place in [p for p in tree.places(model) if re.match(r"blocks\.\d+\.", p.name)]:
        if isinstance(tree.innermost(place.module), Quantized):
            raise ValueError(f"{place.name}: quantized; expand the dense model, and quantize the result")
        if tree.innermost(place.module) is not place.module:
            raise ValueError(f"{place.name}: it has adapters: {how_to_make_dense(place.module)}")


def describe(change: Change) -> str:
    """The new blocks, in one sentence."""
    copies = ", ".join(f"{place} copies the former blocks.{s['of']}" for place, s in change.places.items())
    return f"{plural(len(change.places), 'new block')} without effect until trained: {copies}"


def shape(model: nn.Module, change: Change) -> None:
    """Insert a copy of the block before at each place. Raises ValueError for places that no such model has."""
    blocks = _decoder(model).blocks
    for index in each(_indices(change), end=COPIED):
        if not 0 < index <= len(blocks):
            raise ValueError(f"blocks.{index}: the model has only {plural(len(blocks), 'block')} to stand behind")
        tree.insert(model, "blocks", index, block := deepcopy(blocks[index - 1]))
        unmask_linears(block)  # their zeros are there to be trained


def _indices(change: Change) -> list[int]:
    if odd := [place for place in change.places if not re.fullmatch(r"blocks\.\d{1,9}", place)]:
        raise ValueError(f"{odd[0][:80]}: not a block; expected places like blocks.3")
    return sorted(int(place.removeprefix("blocks.")) for place in change.places)


@torch.no_grad()
def fill(model: nn.Module, change: Change, weights: Mapping[str, Tensor]) -> None:
    """Zero the output projections and their biases of the new blocks, which are copies in all else.

    Raises ValueError, and removes the new blocks, if the model's outputs are then not equal bit for bit.
    """
    blocks = _decoder(model).blocks
    new = {index: blocks[index] for index in _indices(change)}
    for place in (p for block in new.values() for p in tree.places(tree.innermost(block))):
        if isinstance(place.module, nn.Linear) and tree.matches(OUTPUTS, place.name):
            for parameter in place.module.parameters():
                parameter.zero_()
    after = _logits(_decoder(model))
    undo(model, change)
    if not all(map(torch.equal, _logits(_decoder(model)), after)):
        raise ValueError(
            "the new blocks would change the model's outputs: a block adds more to the hidden states than the "
            f"linear layers {' and '.join(OUTPUTS[:2])}; replace that part, or expand blocks without it. Are its "
            "weights finite? dunes inspect --values lists them"
        )
    for index, block in new.items():
        tree.insert(model, "blocks", index, block)


def _logits(model: Decoder) -> list[Tensor]:
    """Logits of a few ids, in one forward, and with a cache in two."""
    length = TOKENS if model.embed.place is None else min(TOKENS, sides(model.embed.place)[0])
    ids = torch.randint(sides(model.embed.token)[0], (2, length), generator=torch.Generator().manual_seed(0))
    ids = ids.to(device := next(model.parameters()).device)
    with tree.mode(model, False):
        cache = cache_for(model, 2, length, device)
        forwards = [(ids, None)] if cache is None else [(ids, None), (ids[:, :-1], cache), (ids[:, -1:], cache)]
        return [model(part, cache=cache) for part, cache in forwards]


def undo(model: nn.Module, change: Change) -> None:
    """Remove the new blocks; if the others were not trained, they are those of before, bit for bit."""
    if (last := _indices(change)[-1]) >= len(blocks := _decoder(model).blocks):
        raise ValueError(f"blocks.{last}: the model has only {plural(len(blocks), 'block')}; was it expanded?")
    tree.remove(model, {*change.places})
