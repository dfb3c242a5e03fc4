"""Calibration: collect the Gram matrix of each linear layer's inputs, block by block, and let a solver change it.

Each block reads the outputs of the changed blocks before it, as in GPTQ https://arxiv.org/abs/2210.17323 and
SparseGPT https://arxiv.org/abs/2301.00774
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
from dunes.augment.adapted import how_to_make_dense
from dunes.augment.change import modules_at
from dunes.ops.expert_products import one_by_one
from dunes.ops.float32_products import add_gram, mirror
from dunes.parts import Decoder
from dunes.parts.context import ForwardContext
from dunes.progress import each
from dunes.units import plural

TOKENS = 4096
"""Tokens in one forward of a block."""
SMALL = 20_000_000
"""Parameters up to which four times the calibration tokens take little time and improve 2:4 pruning
(docs/log/quantization.md, "Pruning: SparseGPT, Wanda, magnitude")."""


@dataclass
class Gram:
    """Gram matrix of a linear layer's inputs: `matrix` (I, I) float32 is the sum of x xT over `tokens` tokens.

    `factors` is free for solvers, to share work among layers with the same input.
    """

    matrix: Tensor
    tokens: int = 0
    factors: Any = None

    @classmethod
    def zeros(cls, inputs: int, device: torch.device) -> "Gram":
        """A Gram matrix of no tokens."""
        return cls(torch.zeros(inputs, inputs, device=device))

    def add(self, x: Tensor) -> None:
        """Add inputs (..., I) to the lower triangle; `dunes.ops.float32_products.mirror` completes the matrix."""
        x = x.detach().flatten(0, -2)
        add_gram(self.matrix, x)
        self.tokens += len(x)


Forward = Callable[[Tensor], Tensor]
Linears = Mapping[str, nn.Linear]
Rows = Sequence[Tensor]
Solve = Callable[[Mapping[str, Gram]], None]
"""Changes the weights of linear layers, given their Gram matrices by place."""


def require_ids(model: nn.Module, ids: Any) -> None:
    """Raise ValueError unless the calibration text is int64 ids (S, T) of the model's vocabulary."""
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
    """Let `solve` change the linear layers at `places`, block by block, given their inputs for ids (S, T) int64.

    `solve` is called for each block with the Gram of every place in it. Layers that read the same tensor share
    one; an expert's counts the tokens routed to it. The next block reads the changed block's outputs. With
    `sequential`, a block's layers are solved in execution order, each given its inputs after the layers before it
    were changed. The head, if it is one of the places, comes last.

    Yields after each block with places, and after the head; the generator then has no reference to a layer of the
    block, so that the caller may replace it.

    Memory: the hidden states of all tokens, and the Grams of one block. Raises ValueError, before any work, for
    invalid ids, and for places that are no plain linear layers of a block or the head.
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
            """Outputs of a block, or after the last block of the head."""
            y: Tensor = decoder.blocks[layer](x, ctx, layer) if layer < depth else decoder.logits(decoder.norm(x))
            return y

        for layer in each(range(last + 1)):
            run = partial(forward, layer)
            inside = {name: linears.pop(name) for name in [*linears] if layers[name] == layer}
            _solve_layers(run, hidden, rows, inside, solve, sequential)
            if layer < last:  # a later place reads these outputs
                for part in rows:
                    hidden[part] = run(hidden[part])
            if inside:
                inside.clear()
                yield


def _solve_layers(
    run: Forward, states: Tensor, rows: Rows, linears: Linears, solve: Solve, sequential: bool
) -> None:
    """Let `solve` change these layers of a block, all at once or with `sequential` in stages."""
    stages = _stages(run, states, rows[:1], linears) if sequential and len(linears) > 1 else [linears]
    for stage in filter(None, stages):
        grams = _collect(run, states, rows, stage)
        missing = {n: Gram.zeros(m.in_features, m.weight.device) for n, m in stage.items() if n not in grams}
        solve(grams | missing)


class _EnoughError(Exception):
    """Stops a forward after the last call of a watched layer."""


def _collect(run: Forward, states: Tensor, rows: Rows, linears: Linears) -> dict[str, Gram]:
    """Gram by place of the layers that hidden states (S, T, D) reach, in execution order.

    The first forward counts the calls of each layer; later forwards stop after that many calls, at least one.
    Layers that read the same tensor share a Gram.
    """
    grams: dict[str, Gram] = {}
    calls, awaited = Counter[str](), Counter[str]()
    readers: dict[str, str] = {}  # the first layer that reads the same tensor
    last: list[tuple[Tensor, str]] = []

    def count(name: str) -> Callable[..., None]:
        def hook(module: nn.Linear, inputs: tuple[Tensor]) -> None:
            x = inputs[0]
            first = last[0][1] if last and last[0][0] is x else name
            if readers.setdefault(name, first) != first:
                raise ValueError(f"{name}: reads the same tensor as {readers[name]} in some calls only")
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
    """Linear layers of a block in execution order, grouped by shared input; all experts are one group."""
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

    The old tensor is not overwritten, since written pages of a memory-mapped file would stay in memory.
    """
    linear.weight.data = weight.to(linear.weight.dtype)


def _plain_linears(decoder: Decoder, names: Collection[str]) -> dict[str, nn.Linear]:
    """Plain linear layers of blocks, or the head, by place. Raises ValueError for any other module."""
    modules = modules_at(decoder, names)
    for name in names:
        module = modules.get(name)
        if not isinstance(module, nn.Linear):
            actual = "no module" if module is None else type(module).__name__
            raise ValueError(
                f"{name} is {actual}; calibration needs dense linear layers: {how_to_make_dense(module)}"
            )
        if not name.startswith("blocks.") and name != "head":
            raise ValueError(f"{name}: only layers of blocks and the head are calibrated")
    return {name: module for name, module in modules.items() if isinstance(module, nn.Linear)}


def _decoder(model: nn.Module) -> Decoder:
    if not isinstance(model, Decoder):
        raise ValueError(f"{type(model).__name__} is no Decoder, whose blocks calibration runs one after another")
    return model


def calibration_tokens(model: nn.Module) -> int:
    """Number of calibration tokens beyond which the result no longer improves."""
    return 131_072 if tree.count(model) <= SMALL else 32_768


def require_text(model: nn.Module, ids: Any, linears: Mapping[str, nn.Linear]) -> None:
    """`require_ids`, and raise ValueError for fewer tokens than inputs of a layer, experts excepted."""
    require_ids(model, ids)
    layers = {name: linear for name, linear in linears.items() if ".experts." not in name} or linears
    name, widest = max(((n, m.in_features) for n, m in layers.items()), key=lambda pair: pair[1])
    if ids.numel() < widest:
        raise ValueError(
            f"the calibration text is too short: {plural(ids.numel(), 'token')} for {widest} inputs of {name}; "
            "pass more of it"
        )
