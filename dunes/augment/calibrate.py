"""Calibration: collect the Gram matrix of each linear layer's inputs, block by block, and let a solver change it.

Each block reads the outputs of the changed blocks before it, as in GPTQ https://arxiv.org/abs/2210.17323 and
SparseGPT https://arxiv.org/abs/2301.00774
"""

# Shapes: S sequences, T tokens, D width, I inputs and O outputs of a linear layer.

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dunes import tree
from dunes.augment.adapted import how_to_make_dense
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
    """Gram matrix of a linear layer's inputs: `matrix` (I, I) float32 is the sum of x xT over `tokens` tokens."""

    matrix: Tensor
    tokens: int = 0

    @classmethod
    def zeros(cls, inputs: int, device: torch.device) -> "Gram":
        """A Gram matrix of no tokens."""
        return cls(torch.zeros(inputs, inputs, device=device))

    def add(self, x: Tensor) -> None:
        """Add inputs (..., I) to the lower triangle; `dunes.ops.float32_products.mirror` completes the matrix."""
        x = x.detach().flatten(0, -2)
        add_gram(self.matrix, x)
        self.tokens += len(x)


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
    model: nn.Module,
    ids: Tensor,
    places: Collection[str],
    solve: Solve,
    *,
    sequential: bool = False,
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
    linears = _plain_linears(decoder, places)
    rows = [*torch.split(torch.arange(len(ids)), max(1, TOKENS // ids.shape[1]))]
    with tree.mode(model, False), one_by_one():
        ids = ids.to(next(decoder.parameters()).device)
        ctx = ForwardContext.of(ids)
        hidden = torch.cat([decoder.embed(ids[part], ctx) for part in rows])
        stop = _last_layer(linears, len(decoder.blocks))
        for layer in each(range(min(stop + 1, len(decoder.blocks)))):
            inside = {name: linears.pop(name) for name in [*linears] if name.startswith(f"blocks.{layer}.")}
            solved, run = bool(inside), _Run(decoder.blocks[layer], layer, ctx)
            _solve_block(run, hidden, rows, inside, solve, sequential)
            inside.clear()
            if layer < stop:  # a later place reads these outputs
                for part in rows:
                    hidden[part] = run(hidden[part])
            if solved:
                yield
        if "head" in linears:
            run = _Run(decoder.norm, 0, ctx, head=linears["head"])
            solve(_collect(run, hidden, rows, {"head": linears.pop("head")}))
            del run
            yield


def _last_layer(places: Collection[str], depth: int) -> int:
    """Index of the last block with a place; the number of blocks if the head is a place; -1 without places."""
    layers = [depth if name == "head" else int(name.split(".")[1]) for name in places]
    return max(layers, default=-1)


def _solve_block(
    run: "_Run",
    hidden: Tensor,
    rows: list[Tensor],
    linears: Mapping[str, nn.Linear],
    solve: Solve,
    sequential: bool,
) -> None:
    """Let `solve` change these layers of a block, all at once or with `sequential` in stages."""
    stages = _stages(run, hidden[rows[0]], linears) if sequential and linears else [linears]
    for stage in filter(None, stages):
        solve(_collect(run, hidden, rows, stage))


@dataclass
class _Run:
    """Forward of one block, or of the final norm and the head."""

    block: nn.Module
    layer: int
    ctx: ForwardContext
    head: nn.Linear | None = None

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = self.block(x, self.ctx, self.layer) if self.head is None else self.head(self.block(x))
        return y


class _Watched(dict[str, Gram]):
    """Gram matrices of layers by place, with the number of `calls` of each layer in the current forward."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = Counter[str]()
        self.awaited: Counter[str] | None = None


class _EnoughError(Exception):
    """Stops a forward after the last call of a watched layer."""


def _collect(run: _Run, states: Tensor, rows: list[Tensor], linears: Mapping[str, nn.Linear]) -> dict[str, Gram]:
    """Gram of each linear layer over all hidden states (S, T, D), in execution order.

    The first forward counts the calls of each layer; later forwards stop after that many calls, at least one.
    """
    with _watch(linears) as grams:
        for part in rows:
            grams.calls.clear()
            with suppress(_EnoughError):
                run(states[part])
            grams.awaited = grams.awaited or Counter({name: max(1, grams.calls[name]) for name in linears})
    for gram in {id(gram): gram for gram in grams.values()}.values():
        mirror(gram.matrix)
    missing = {n: Gram.zeros(m.in_features, m.weight.device) for n, m in linears.items() if n not in grams}
    return {**grams, **missing}


@contextmanager
def _watch(linears: Mapping[str, nn.Linear]) -> Iterator[_Watched]:
    """Record the Grams of these layers' inputs in the context; layers that read the same tensor share one."""
    grams = _Watched()
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
            grams.calls[name] += 1
            if grams.awaited is not None and grams.awaited <= grams.calls:
                raise _EnoughError

        return hook

    with ExitStack() as hooks:
        for name, module in linears.items():
            hooks.enter_context(module.register_forward_pre_hook(count(name)))
        yield grams


def _stages(run: _Run, states: Tensor, linears: Mapping[str, nn.Linear]) -> list[dict[str, nn.Linear]]:
    """Linear layers of a block in execution order, grouped by shared input; all experts are one group."""
    with _watch(linears) as grams:
        run(states)
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
    modules = {p.name: p.module for p in tree.places(decoder) if p.name in names}
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
