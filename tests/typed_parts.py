"""A model of a user's own parts, as the docs invite to them, with types: `mypy --strict` accepts it."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from dunes import checkpoint
from dunes.generate import generate
from dunes.parts import Attention, Block, Cache, Decoder, ForwardContext, MoE, RMSNorm
from dunes.train import Trainer, adamw


class OwnEmbedding(nn.Module):
    supports_packing = True

    def __init__(self, vocab: int, dim: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocab, dim)

    def forward(self, ids: Tensor, ctx: ForwardContext) -> Tensor:
        x: Tensor = self.token(ids)
        return x


class OwnPosition(nn.Module):
    supports_packing = True

    def forward(self, x: Tensor, ctx: ForwardContext) -> Tensor:
        return x + ctx.positions[:, None, :, None].to(x.dtype)


@dataclass(frozen=True)
class Scaled:
    supports_packing: ClassVar[bool] = True
    scale: float

    def __call__(self, x: Tensor, ctx: ForwardContext) -> Tensor:
        return self.scale * x


def unchanged(x: Tensor, ctx: ForwardContext) -> Tensor:
    return x


class OwnMLP(nn.Module):
    supports_packing = True

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.inside = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inside(x))


class OwnAttention(nn.Module):
    supports_packing = True

    def forward(self, x: Tensor, ctx: ForwardContext | None = None, layer: int = 0) -> Tensor:
        ctx = ctx or ForwardContext.of(x)
        k, v = ctx.put(layer, x[:, None], x[:, None])
        return ctx.attend(x[:, None], k, v)[:, 0]


def mixture(dim: int) -> MoE:
    return MoE(nn.Linear(dim, 2), [OwnMLP(dim), OwnMLP(dim)], 1)


def build(vocab: int = 11, dim: int = 8) -> Decoder:
    attentions: list[nn.Module] = [
        Attention(dim, 2, position=OwnPosition()),
        Attention(dim, 2, position=Scaled(0.5), q_norm=nn.LayerNorm(4)),
        Attention(dim, 2, position=unchanged),
        OwnAttention(),
    ]
    blocks = [Block(nn.LayerNorm(dim), attention, RMSNorm(dim), mixture(dim)) for attention in attentions]
    return Decoder(OwnEmbedding(vocab, dim), blocks, nn.LayerNorm(dim), nn.Linear(dim, vocab))


def loss(model: nn.Module, batch: Tensor) -> tuple[Tensor, Tensor]:
    logits: Tensor = model(batch[:, :-1])
    total = nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="sum")
    return total, torch.tensor(batch[:, 1:].numel())


def run(batches: Iterator[Tensor]) -> list[int]:
    model = build()
    for step in Trainer(model, adamw(model), loss).run(batches):
        print(step.loss)
    checkpoint.Architecture.of_function(build, vocab=11)
    cache = Cache(1, 16)
    with torch.no_grad():
        model(torch.tensor([[1]]), cache=cache)
    return [token.id for token in generate(model, [1, 2], max_tokens=4, context_length=16)]
