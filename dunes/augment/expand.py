"""Block expansion (LLaMA Pro): insert copies of blocks with zero output projections; only the copies are trained.

https://arxiv.org/abs/2401.02415. This module is registered in the table `CHANGES` in `changes.py`.
"""

import re
from collections.abc import Mapping
from copy import deepcopy

import torch
from torch import Tensor, nn

from dunes import tree
from dunes.augment.adapted import how_to_make_dense, order_matters, sides
from dunes.augment.change import Change
from dunes.augment.options import Expand
from dunes.augment.prune import unmask_linears
from dunes.augment.quantized import Quantized
from dunes.parts import Decoder, cache_for
from dunes.parts.layers import ZeroCenteredRMSNorm
from dunes.progress import each
from dunes.units import plural

VERSION = 1
RESTORES = True
SPACING = 4
"""By default one block is inserted for every SPACING blocks, as in the paper."""
OUTPUTS = ("attn.out", "mlp.down", "mlp.**.down", "!mlp.router.**")
"""Globs of output projections: linear layers whose outputs are added to the hidden states."""
COPIED = 0.5
"""Progress, from 0 to 1, after copying the blocks and before comparing the logits."""
TOKENS = 8
"""Length of each of the two sequences on which the logits are compared."""


def decide(model: nn.Module, options: Expand) -> Change:
    """The record of the change. `places` are the new blocks, each with the index of the block that it copies.

    Raises ValueError if the model is no decoder, if blocks have quantized layers, adapters or modules that use
    results of an earlier block, and for block indices out of range.
    """
    depth, blocks, after = len(_decoder(model).blocks), options.blocks, options.after
    if name := order_matters(model):
        raise ValueError(f"{name} uses results of an earlier block; new blocks would separate the two")
    for place in [p for p in tree.places(model) if re.match(r"blocks\.\d+\.", p.name)]:
        base = tree.innermost(place.module)
        if isinstance(base, Quantized) or base is not place.module:
            raise ValueError(f"{place.name} is quantized or has adapters: {how_to_make_dense(place.module)}")
    sources = sorted(after) or list(range(depth))
    if sources[0] < 0 or sources[-1] >= depth:
        raise ValueError(f"after is {', '.join(map(str, after))}; this model's blocks are 0 to {depth - 1}")
    count = (len(after) or max(1, depth // SPACING)) if blocks is None else blocks
    if count < 1:
        raise ValueError(f"blocks is {count}; expected 1 or more new blocks")
    copied = [sources[-(-i * len(sources) // count) - 1] for i in range(1, count + 1)]
    places = {f"blocks.{source + i}": {"of": source} for i, source in enumerate(copied, 1)}
    new = tuple(f"{place}.**" for place in places)
    return Change("expand", VERSION, {**options.request(), "blocks": count}, places, new)


def _decoder(model: nn.Module) -> Decoder:
    if not isinstance(model, Decoder) or not len(model.blocks):
        raise ValueError(f"a {type(model).__name__} without blocks; expected a decoder, a stack of blocks")
    return model


def describe(change: Change) -> str:
    """One sentence that tells users the number of new blocks, and which block each new block copies."""
    copies = ", ".join(f"{place} copies the former blocks.{s['of']}" for place, s in change.places.items())
    return f"{plural(len(change.places), 'new block')} without effect until trained: {copies}"


def shape(model: nn.Module, change: Change) -> None:
    """At each place of the change, insert a copy of the preceding block."""
    blocks = _decoder(model).blocks
    for index in each(_indices(change), end=COPIED):
        tree.insert(model, "blocks", index, block := deepcopy(blocks[index - 1]))
        unmask_linears(block)  # a `MaskedLinear` would keep the zeros of the output projections


def _indices(change: Change) -> list[int]:
    return sorted(int(place.removeprefix("blocks.")) for place in change.places)


@torch.no_grad()
def fill(model: nn.Module, change: Change, weights: Mapping[str, Tensor]) -> None:
    """Zero the output projections of the new blocks; if a norm follows a projection, zero the norm instead.

    If the model's logits do not stay equal bit for bit, the new blocks are removed and ValueError is raised.
    """
    blocks = _decoder(model).blocks
    new = {index: blocks[index] for index in _indices(change)}
    for block in map(tree.innermost, new.values()):
        normed = [n for n in ("attn", "mlp") if getattr(block, f"{n}_post_norm", None) is not None]
        for name in normed:
            norm = getattr(block, f"{name}_post_norm")
            for parameter in norm.parameters():
                parameter.fill_(-1.0 if isinstance(norm, ZeroCenteredRMSNorm) else 0.0)
        for place in tree.places(block):
            is_output = isinstance(place.module, nn.Linear) and tree.matches(OUTPUTS, place.name)
            # A projection before a norm is not zeroed, since the norm's gradient at zero would be huge.
            if is_output and place.name.split(".")[0] not in normed:
                for parameter in place.module.parameters():
                    parameter.zero_()
    after = _logits(_decoder(model))
    undo(model, change)
    if not all(map(torch.equal, _logits(_decoder(model)), after)):
        raise ValueError(
            "the new blocks would change the model's outputs: a block adds more to the hidden states than the "
            f"linear layers {' and '.join(OUTPUTS[:2])}; replace that part, or expand blocks without it. If "
            "weights are not finite, dunes inspect --values lists them"
        )
    for index, block in new.items():
        tree.insert(model, "blocks", index, block)


def _logits(model: Decoder) -> list[Tensor]:
    """Logits of random ids (2, `TOKENS`): from one forward without a KV cache, and from two with a cache."""
    length = TOKENS if model.embed.place is None else min(TOKENS, sides(model.embed.place)[0])
    ids = torch.randint(sides(model.embed.token)[0], (2, length), generator=torch.Generator().manual_seed(0))
    ids = ids.to(device := next(model.parameters()).device)
    with tree.mode(model, False):
        cache = cache_for(model, 2, length, device)
        forwards = [(ids, None)] if cache is None else [(ids, None), (ids[:, :-1], cache), (ids[:, -1:], cache)]
        return [model(part, cache=cache) for part, cache in forwards]


def undo(model: nn.Module, change: Change) -> None:
    """Remove the new blocks. The model is restored bit for bit, unless the original blocks were trained."""
    tree.remove(model, {*change.places})
