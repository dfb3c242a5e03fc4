"""Candidates for the default recipe of `dunes train` that the package lacks; benchmarks/minutes.py tries them.

Functions of a shape build a model (`--parts candidates:bigram`), all others patch the package before the command
starts (`--patch cautious`). What loses stays here, so that its row in docs/log can be repeated.
"""

# Shapes: B batch, T tokens, K key/value heads, D head dim.

import math
from collections.abc import Callable, Iterator
from typing import Any

from dunes.models import named_parts
from dunes.parts import Attention, Block, Decoder, Embedding
from dunes.parts.context import ForwardContext

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROWS_PER_TOKEN = 5
"""Rows of the table of bigrams, by token of the vocabulary: https://github.com/KellerJordan/modded-nanogpt/pull/201"""


class Table(nn.Module):
    """An embedding that starts at 0 and is trained by AdamW, as all modules with an `embedding_dim` are."""

    supports_packing = True

    def __init__(self, rows: int, dim: int) -> None:
        super().__init__()
        self.weight, self.embedding_dim = nn.Parameter(torch.zeros(rows, dim)), dim

    def forward(self, index: Tensor) -> Tensor:
        return F.embedding(index, self.weight)


def previous(x: Tensor) -> Tensor:
    """x (B, T, ...) one token later; the first token gets zeros. Documents of a row are not told apart."""
    return F.pad(x, (*(0, 0) * (x.dim() - 2), 1, -1))


class BigramEmbedding(Embedding):
    """Adds an embedding of the hashed pair of a token and the one before it."""

    def __init__(self, vocab: int, dim: int, rows: int) -> None:
        super().__init__(vocab, dim)
        self.pairs, self.rows = Table(rows, dim), rows

    def forward(self, ids: Tensor, ctx: ForwardContext) -> Tensor:
        index = torch.bitwise_xor(36_313 * ids, 27_191 * previous(ids)) % self.rows
        return super().forward(ids, ctx) + self.pairs(index)


class SmearedEmbedding(Embedding):
    """Adds a gated share of the embedding of the token before."""

    def __init__(self, vocab: int, dim: int) -> None:
        super().__init__(vocab, dim)
        self.gate = Table(vocab, 1)
        self.share = nn.Parameter(torch.zeros(dim))

    def forward(self, ids: Tensor, ctx: ForwardContext) -> Tensor:
        x = super().forward(ids, ctx)
        return x + torch.sigmoid(self.gate(ids)) * self.share * previous(x)


class CarryingEmbedding(Embedding):
    """Gives the ids to the attentions."""

    def forward(self, ids: Tensor, ctx: ForwardContext) -> Tensor:
        ctx.carried["ids"] = ids
        return super().forward(ids, ctx)


class ValueEmbeddingAttention(Attention):
    """Adds an embedding of the token to its values: https://github.com/KellerJordan/modded-nanogpt/pull/119"""

    table: Table

    def heads(self, x: Tensor, ctx: ForwardContext) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().heads(x, ctx)
        own = self.table(ctx.carried["ids"]).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        return q, k, v + own.to(v.dtype)


class FirstInputAttention(Attention):
    """Computes values from a learned mixture of its input and the first layer's."""

    mix: nn.Parameter | None

    def heads(self, x: Tensor, ctx: ForwardContext) -> tuple[Tensor, Tensor, Tensor]:
        q, k, _ = super().heads(x, ctx)
        if self.mix is None:
            ctx.carried["first"] = x
        else:
            x = torch.lerp(x, ctx.carried["first"], self.mix.to(x.dtype))
        return q, k, self.v(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


def plain(vocab: int, dim: int, depth: int, context_length: int) -> Decoder:
    """Arcee's form, the default until 2026-11-30."""
    return named_parts.build(vocab, dim, depth, context_length)


def bigram(vocab: int, dim: int, depth: int, context_length: int) -> Decoder:
    model = plain(vocab, dim, depth, context_length)
    model.embed = BigramEmbedding(vocab, dim, ROWS_PER_TOKEN * vocab)
    return model


class NormedEmbedding(Embedding):
    """Normalizes the embedding: https://github.com/KellerJordan/modded-nanogpt"""

    def forward(self, ids: Tensor, ctx: ForwardContext) -> Tensor:
        x = super().forward(ids, ctx)
        return F.rms_norm(x, x.shape[-1:])


def normed_embedding(vocab: int, dim: int, depth: int, context_length: int) -> Decoder:
    model = plain(vocab, dim, depth, context_length)
    model.embed = NormedEmbedding(vocab, dim)
    return model


def smear(vocab: int, dim: int, depth: int, context_length: int) -> Decoder:
    model = plain(vocab, dim, depth, context_length)
    model.embed = SmearedEmbedding(vocab, dim)
    return model


def value_embeddings(vocab: int, dim: int, depth: int, context_length: int) -> Decoder:
    return _with_attention(plain(vocab, dim, depth, context_length), ValueEmbeddingAttention)


def bigram_and_values(vocab: int, dim: int, depth: int, context_length: int) -> Decoder:
    model = value_embeddings(vocab, dim, depth, context_length)
    embed = BigramEmbedding(vocab, dim, ROWS_PER_TOKEN * vocab)
    forward = embed.forward

    def carrying(ids: Tensor, ctx: ForwardContext) -> Tensor:
        ctx.carried["ids"] = ids
        return forward(ids, ctx)

    embed.forward = carrying  # type: ignore[method-assign]
    model.embed = embed
    return model


def first_input(vocab: int, dim: int, depth: int, context_length: int) -> Decoder:
    return _with_attention(plain(vocab, dim, depth, context_length), FirstInputAttention)


def _with_attention(model: Decoder, kind: type[Attention]) -> Decoder:
    """The model, whose attentions become `kind` in place."""
    token = model.embed.token
    if kind is ValueEmbeddingAttention:
        model.embed = CarryingEmbedding(token.num_embeddings, token.embedding_dim)
    for layer, block in enumerate(model.blocks):
        attn: Any = block.attn
        attn.__class__ = kind
        if kind is ValueEmbeddingAttention:
            attn.table = Table(token.num_embeddings, attn.v.out_features)
        else:
            attn.mix = nn.Parameter(torch.tensor(0.5)) if layer else None
    return model


def _fall(share: float) -> Callable[[], None]:
    def patch() -> None:
        from dunes.runs import run

        run.FALL = share

    return patch


fall30, fall70, fall90 = _fall(0.3), _fall(0.7), _fall(0.9)
"""The share of the steps in which the rate decays; 0.5 is the default."""


def _shape(height: Callable[[float], float]) -> Callable[[], None]:
    """The decay becomes `height` of the remaining share, which the default takes as it is."""

    def patch() -> None:
        from dunes.train.schedule import Schedule

        linear = Schedule.lr_scale

        def lr_scale(self: Schedule, step: int) -> float:
            value = linear(self, step)
            return value if not self.records or step < self.records[0].begin else height(value)

        Schedule.lr_scale = lr_scale  # type: ignore[method-assign]

    return patch


sqrt_decay = _shape(lambda left: 1 - math.sqrt(1 - left))
"""1 - sqrt(progress), as in https://arxiv.org/abs/2405.18392"""
cosine_decay = _shape(lambda left: 0.5 - 0.5 * math.cos(math.pi * left))


def cautious() -> None:
    """Muon's weight decay acts only where it agrees with the update: https://arxiv.org/abs/2510.12402"""
    from dunes.train import optim

    update = optim.Muon._update

    def cautious_update(self: Any, params: list[Tensor], group: dict[str, Any]) -> None:
        before = [p.clone() for p in params]
        update(self, params, group | {"weight_decay": 0.0})
        for p, old in zip(params, before, strict=True):
            agrees = (old - p) * old > 0
            p.sub_(old * agrees, alpha=group["lr"] * group["weight_decay"])

    optim.Muon._update = cautious_update  # type: ignore[method-assign]


def normed_rows() -> None:
    """NorMuon: rows of Muon's updates are divided by an average of their size: https://arxiv.org/abs/2510.05491"""
    from dunes.train import optim

    update = optim.Muon._update

    def normed_update(self: Any, params: list[Tensor], group: dict[str, Any]) -> None:
        before = [p.clone() for p in params]
        update(self, params, group | {"weight_decay": 0.0})
        for p, old in zip(params, before, strict=True):
            change, state = p - old, self.state[p]
            square = change.square().mean(1, keepdim=True)
            average = state.setdefault("row_average", torch.zeros_like(square))
            average.lerp_(square / group["lr"] ** 2, 0.05)
            scaled = change / average.sqrt().clamp(min=1e-8)
            scaled *= change.norm() / scaled.norm().clamp(min=1e-12)
            p.copy_(old * (1 - group["lr"] * group["weight_decay"]) + scaled)

    optim.Muon._update = normed_update  # type: ignore[method-assign]


def _average(share: float, rate: float) -> Callable[[], None]:
    """The weights at the end are an exponential average over the last `share` of the steps."""

    def patch() -> None:
        from dunes.train import Trainer

        update, averages = Trainer.update, list[Tensor]()

        def averaging_update(self: Any, scale: float = 1.0) -> None:
            update(self, scale)
            records = getattr(getattr(self.lr_scale, "__self__", None), "records", None)
            end, number = records[-1].end if records else math.inf, self.number + 1
            if number < end * (1 - share):
                return
            with torch.no_grad():
                params = self.parameters()
                if not averages:
                    averages.extend(p.detach().clone() for p in params)
                torch._foreach_lerp_(averages, params, rate)
                if number >= end:
                    torch._foreach_copy_(params, averages)

        Trainer.update = averaging_update  # type: ignore[method-assign]

    return patch


average10, average30 = _average(0.1, 0.05), _average(0.3, 0.02)


def _ramp(lengths: tuple[int, ...], keeps_tokens: bool) -> Callable[[], None]:
    """In equal parts of the run's first half, windows have the context length divided by `lengths`.

    With `keeps_tokens`, steps have more rows in turn, else they are smaller and more.
    """

    def patch() -> None:
        from dunes.data import Windows
        from dunes.runs.train import TrainTask

        def batches(self: Any, start: int) -> Iterator[Any]:
            config = self.config
            total = (config.steps or config.seconds * config.rate / (config.batch * config.context_length)) / 2
            number = 0
            for part in lengths:
                rows = config.batch * (part if keeps_tokens else 1)
                windows = Windows(self.text.train, config.context_length // part, rows, config.seed + part)
                steps = total / len(lengths) * (1 if keeps_tokens else part)
                yield from (windows.batch(number + i) for i in range(round(steps)))
                number += round(steps)
            windows = Windows(self.text.train, config.context_length, config.batch, config.seed)
            yield from windows.batches(number)

        TrainTask.batches = batches  # type: ignore[method-assign]

    return patch


short_first, shorter_first = _ramp((2,), True), _ramp((4, 2), True)
small_first = _ramp((2,), False)
"""Half the length, thus half the tokens in a step, while the first quarter of the tokens is read."""


def _started(change: Callable[[Any], None]) -> Callable[[], None]:
    """The initial weights of a new model are changed by `change`."""

    def patch() -> None:
        from dunes.runs import train

        initialise = train.initialise

        def initialised(model: Any, *args: Any, **options: Any) -> Any:
            model = initialise(model, *args, **options)
            with torch.no_grad():
                change(model)
            return model

        train.initialise = initialised

    return patch


def _pair_vectors(attn: Any, size: float) -> tuple[Tensor, Tensor]:
    """Queries and keys (H * D,) whose product after the rotation is largest at the same position and the next."""
    pairs = attn.head_dim // 2
    angle = attn.position.base ** (-torch.arange(pairs) / pairs)
    sizes = size * (angle > 0.05)
    query = torch.cat([sizes * (angle / 2).cos(), -sizes * (angle / 2).sin()])
    return query.repeat(attn.head_count), torch.cat([sizes, 0 * sizes]).repeat(attn.kv_head_count)


def _local_weights(strength: float, constant: float) -> Callable[[], None]:
    """As `local_start`, by an element of the embeddings that is `constant` for all tokens, instead of biases."""

    def change(model: Any) -> None:
        attn, dim = model.blocks[0].attn, model.embed.token.embedding_dim
        normed = constant / math.sqrt((constant**2 + (dim - 1) * 0.02**2) / dim)
        model.embed.token.weight[:, 0] = constant
        attn.q.weight[:, 0], attn.k.weight[:, 0] = _pair_vectors(attn, strength / normed)

    return _started(change)


local_weights, local_weights_large = _local_weights(4.5, 0.06), _local_weights(4.5, 0.4)


def _local(model: Decoder, window: int | None, heads: int = 2) -> Decoder:
    """The model after a block of attention alone, in which a token sees `window` tokens, its own included."""
    first: Any = model.blocks[0]
    dim = first.attn.q.in_features
    attn = Attention(
        dim, heads, head_dim=dim // heads, position=type(first.attn.position)(dim // heads), window=window
    )
    model.blocks.insert(0, Block(type(first.attn_norm)(dim, 1e-5), attn, None, None))
    return model


def pair_block(vocab: int, dim: int, depth: int, context_length: int) -> Decoder:
    return _local(plain(vocab, dim, depth, context_length), 2)


def four_block(vocab: int, dim: int, depth: int, context_length: int) -> Decoder:
    return _local(plain(vocab, dim, depth, context_length), 4)


def whole_block(vocab: int, dim: int, depth: int, context_length: int) -> Decoder:
    return _local(plain(vocab, dim, depth, context_length), None)


def _windows(*windows: int | None) -> Callable[[int, int, int, int], Decoder]:
    """In the first layers, a token sees `windows` tokens, its own included."""

    def build(vocab: int, dim: int, depth: int, context_length: int) -> Decoder:
        model = plain(vocab, dim, depth, context_length)
        for block, window in zip(model.blocks, windows, strict=False):
            block.attn.window = window  # type: ignore[union-attr]
        return model

    return build


first_sees2, first_sees3, first_sees4 = _windows(2), _windows(3), _windows(4)
see_2_2, see_2_4, see_2_8 = _windows(2, 2), _windows(2, 4), _windows(2, 8)
see_2_2_2, see_2_4_8 = _windows(2, 2, 2), _windows(2, 4, 8)


def biased(vocab: int, dim: int, depth: int, context_length: int) -> Decoder:
    """Queries and keys of the first layer have biases, for the patch `local_start`."""
    model = plain(vocab, dim, depth, context_length)
    old: Any = model.blocks[0].attn
    options = {"head_dim": old.head_dim, "position": old.position, "bias": True, "out_bias": False}
    model.blocks[0].attn = Attention(dim, old.head_count, old.kv_head_count, **options)
    return model


def _local_start(strength: float) -> Callable[[], None]:
    """The heads of the first layer start by attending to the token and the one before, by the biases."""

    def change(model: Any) -> None:
        attn = model.blocks[0].attn
        query, key = _pair_vectors(attn, strength)
        attn.q.bias.copy_(query)
        attn.k.bias.copy_(key)

    return _started(change)


local_start, local_start2 = _local_start(4.5), _local_start(7.0)


def momentum95() -> None:
    """Muon's momentum of 0.95 instead of 0.9."""
    from dunes.train import optim

    muon = optim.muon
    optim.muon = lambda *args, **options: muon(*args, **options | {"momentum": 0.95})


def equal_rows() -> None:
    """MuonEq: rows get equal norms before the orthogonalisation, as in https://github.com/karpathy/nanochat."""
    from dunes.train import optim

    orthogonalise = optim.orthogonalise
    optim.orthogonalise = lambda matrices, **options: orthogonalise(F.normalize(matrices, dim=-1), **options)


def unclipped() -> None:
    """Gradients are not clipped."""
    from dunes.train import Trainer

    init = Trainer.__init__
    Trainer.__init__ = lambda self, *args, **options: init(self, *args, **options | {"clip": None})  # type: ignore[method-assign]
