"""Calibration: compute the Gram matrix of each linear layer's inputs, and let a solver change the layer's weight.

Blocks are changed one after another: each block reads the outputs of the changed blocks before it, as in GPTQ
https://arxiv.org/abs/2210.17323 and SparseGPT https://arxiv.org/abs/2301.00774
"""

# Shapes: S sequences, T tokens, D width, I inputs and O outputs of a linear layer.

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dunes import tree
from dunes.augment.adapted import not_plain
from dunes.augment.change import modules_at
from dunes.ops.expert_products import one_by_one
from dunes.ops.float32_products import add_gram, mirror
from dunes.parts import Decoder
from dunes.parts.context import ForwardContext
from dunes.progress import each
from dunes.units import plural

TOKENS = 4096
"""Maximum number of calibration tokens in one forward of a block."""
SMALL = 20_000_000
"""Models with up to this many parameters are calibrated on four times as many tokens as larger models. This takes
little time and improves 2:4 pruning (docs/log/quantization.md, "Pruning: SparseGPT, Wanda, magnitude")."""


@dataclass
class Gram:
    """Gram matrix of a linear layer's inputs x: `matrix` (I, I) float32 is the sum of x xT over `tokens` tokens.

    A solver may store any value in `factors`, to share work among layers with the same input.
    """

    matrix: Tensor
    tokens: int = 0
    factors: Any = None

    @classmethod
    def zeros(cls, inputs: int, device: torch.device) -> "Gram":
        """A Gram matrix to which no token has been added."""
        return cls(torch.zeros(inputs, inputs, device=device))

    def add(self, x: Tensor) -> None:
        """Add x xT of inputs x (..., I) to the upper triangle; `float32_products.mirror` completes the matrix."""
        x = x.detach().flatten(0, -2)
        add_gram(self.matrix, x)
        self.tokens += len(x)


Forward = Callable[[Tensor], Tensor]
Linears = Mapping[str, nn.Linear]
Rows = Sequence[Tensor]
Solve = Callable[[Mapping[str, Gram]], None]
"""A function that changes the weights of linear layers; its argument maps layer names to Gram matrices."""


def require_ids(model: nn.Module, ids: Any) -> None:
    """Raise ValueError unless `ids` are int64 ids (S, T) in the model's vocabulary."""
    if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.dtype != torch.long or 0 in ids.shape:
        actual = f"{ids.dtype} of shape {tuple(ids.shape)}" if isinstance(ids, Tensor) else type(ids).__name__
        raise ValueError(f"the calibration text is {actual}; expected int64 ids (sequences, tokens)")
    vocab = _decoder(model).embed.token.num_embeddings
    if int(ids.min()) < 0 or int(ids.max()) >= vocab:
        raise ValueError(
            f"the calibration text has ids from {int(ids.min())} to {int(ids.max())}; the model's vocabulary "
            f"ends at {vocab - 1}: use its own tokenizer"
        )


@torch.no_grad()
def calibrate_blocks(
    model: nn.Module, ids: Tensor, places: Collection[str], solve: Solve, *, sequential: bool = False
) -> Iterator[None]:
    """Let `solve` change the linear layers at `places`, block by block, calibrated on ids (S, T) int64.

    For each block, `solve` is called once, with the `Gram` of every place in the block. Layers that read the same
    tensor share a `Gram`. The `Gram` of an expert's layer counts only tokens routed to the expert. The next block
    reads the changed block's outputs. With `sequential`, `solve` is called once for each group of layers with the
    same input, in execution order; a layer's inputs then come from the changed layers before it. The head, if
    among the places, comes last.

    Yields after each block that contains places, and after the head. At a yield, the generator has no reference to
    the block's layers, so the caller may replace these layers.

    Memory holds the hidden states of all tokens and the Gram matrices of one block. Raises ValueError, before any
    change, for invalid ids, and for a place that is neither a plain linear layer of a block nor the head.
    """
    require_ids(model, ids)
    decoder = _decoder(model)
    linears, depth = _plain_linears(decoder, places), len(decoder.blocks)
    layers = {name: depth if name == "head" else int(name.split(".")[1]) for name in linears}
    last = max(layers.values(), default=-1)
    with tree.mode(model, False), one_by_one():
        ids = ids.to(next(decoder.parameters()).device)
        ctx = ForwardContext.of(ids)
        rows = torch.split(torch.arange(len(ids)), max(1, TOKENS // ids.shape[1]))
        hidden = torch.cat([decoder.embed(ids[part], ctx) for part in rows])

        def forward(layer: int, x: Tensor) -> Tensor:
            """Outputs of block `layer`; for an index past the last block, the outputs of norm and head."""
            y: Tensor = decoder.blocks[layer](x, ctx, layer) if layer < depth else decoder.logits(decoder.norm(x))
            return y

        for layer in each(range(last + 1)):
            run = partial(forward, layer)
            inside = {name: linears.pop(name) for name in [*linears] if layers[name] == layer}
            _solve_layers(run, hidden, rows, inside, solve, sequential)
            if layer < last:  # later layers read these outputs
                for part in rows:
                    hidden[part] = run(hidden[part])
            if inside:
                inside.clear()
                yield


def _solve_layers(
    run: Forward, states: Tensor, rows: Rows, linears: Linears, solve: Solve, sequential: bool
) -> None:
    """Let `solve` change these layers of a block: all at once, or in stages if `sequential`."""
    stages = _stages(run, states, rows[:1], linears) if sequential and len(linears) > 1 else [linears]
    for stage in filter(None, stages):
        grams = _collect(run, states, rows, stage)
        missing = {n: Gram.zeros(m.in_features, m.weight.device) for n, m in stage.items() if n not in grams}
        solve(grams | missing)


class _EnoughError(Exception):
    """Raised to end a forward early, once all layers to calibrate have been called."""


def _collect(run: Forward, states: Tensor, rows: Rows, linears: Linears) -> dict[str, Gram]:
    """Run the hidden states (S, T, D) through `run`; return the `Gram` of the inputs of each linear layer called.

    The result is a dict keyed by layer name, in execution order. The first forward counts the calls of each layer.
    Later forwards stop once each layer has been called that often. Layers that read the same tensor share a
    `Gram`.
    """
    grams: dict[str, Gram] = {}
    calls, awaited = Counter[str](), Counter[str]()
    readers: dict[str, str] = {}  # maps each layer to the first layer that reads the same tensor
    last: list[tuple[Tensor, str]] = []

    def count(name: str) -> Callable[..., None]:
        def hook(module: nn.Linear, inputs: tuple[Tensor]) -> None:
            x = inputs[0]
            first = last[0][1] if last and last[0][0] is x else name
            if readers.setdefault(name, first) != first:
                raise ValueError(f"{name}: reads the same tensor as {readers[name]} in only some calls")
            if first == name:
                if name not in grams:
                    grams[name] = Gram.zeros(module.in_features, module.weight.device)
                grams[name].add(x)
                last[:] = [(x, name)]
            grams[name] = grams[first]
            calls[name] += 1
            if awaited and awaited <= calls:
                raise _EnoughError

        return hook

    with ExitStack() as hooks:
        for name, module in linears.items():
            hooks.enter_context(module.register_forward_pre_hook(count(name)))
        for part in rows:
            calls.clear()
            with suppress(_EnoughError):
                run(states[part])
            awaited = awaited or Counter({name: max(1, calls[name]) for name in linears})
    for gram in {id(gram): gram for gram in grams.values()}.values():
        mirror(gram.matrix)
    return grams


def _stages(run: Forward, states: Tensor, rows: Rows, linears: Linears) -> list[dict[str, nn.Linear]]:
    """Linear layers of a block in execution order, grouped by input; experts' layers of one name share a group."""
    grams = _collect(run, states, rows, linears)
    stage_of: dict[str, int] = {}
    stages: dict[int, dict[str, nn.Linear]] = {}
    for name in {**grams, **linears}:
        stage = stage_of.setdefault(re.sub(r"\d+", "*", name), id(grams.get(name)))
        stages.setdefault(stage, {})[name] = linears[name]
    return [*stages.values()]


@torch.no_grad()
def assign_weight(linear: nn.Linear, weight: Tensor) -> None:
    """Replace the weight of a linear layer by `weight` (O, I), cast to the layer's dtype.

    The old tensor is not overwritten, since written pages of a memory-mapped tensor would stay in memory.
    """
    linear.weight.data = weight.to(linear.weight.dtype)


def _plain_linears(decoder: Decoder, names: Collection[str]) -> dict[str, nn.Linear]:
    """These linear layers of blocks and the head, by name. Raises ValueError for any other module."""
    modules = modules_at(decoder, names)
    for name in names:
        module = modules.get(name)
        if not isinstance(module, nn.Linear):
            raise not_plain(name, module)
        if not name.startswith("blocks.") and name != "head":
            raise ValueError(f"{name}: only the head and layers of blocks can be calibrated")
    return {name: module for name, module in modules.items() if isinstance(module, nn.Linear)}


def _decoder(model: nn.Module) -> Decoder:
    if not isinstance(model, Decoder):
        raise ValueError(f"{type(model).__name__} is no Decoder; calibration runs the blocks of a decoder in turn")
    return model


def calibration_tokens(model: nn.Module) -> int:
    """The number of calibration tokens to use for this model; more tokens would not improve the result."""
    return 131_072 if tree.count(model) <= SMALL else 32_768


def require_text(model: nn.Module, ids: Any, linears: Mapping[str, nn.Linear]) -> None:
    """Raise ValueError for invalid `ids`, or if a layer outside of experts has more inputs than there are
    tokens."""
    require_ids(model, ids)
    layers = {name: linear for name, linear in linears.items() if ".experts." not in name} or linears
    name, widest = max(((n, m.in_features) for n, m in layers.items()), key=lambda pair: pair[1])
    if ids.numel() < widest:
        raise ValueError(
            f"the calibration text is too short: {plural(ids.numel(), 'token')} for {widest} inputs of {name}; "
            "pass more of it"
        )
