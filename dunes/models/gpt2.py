"""GPT-2: learned positions, LayerNorm, GELU, biases everywhere, tied head.

https://cdn.openai.com/better-language-models/language_models_are_unsupervised_multitask_learners.pdf
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch.nn.functional as F
from torch import nn

from dunes.models.names import Names, both, name, turned
from dunes.models.words import hf_config
from dunes.parts import MLP, Attention, Block, Decoder, Embedding


@dataclass(frozen=True, kw_only=True)
class Config:
    """Sizes of a GPT-2. `context` is a hard limit: each position has a learned vector."""

    vocab: int
    dim: int
    depth: int
    heads: int
    hidden: int
    context: int = 1024
    eps: float = 1e-5
    dropout: float = 0.0

    @classmethod
    def sized(cls, vocab: int, dim: int, depth: int, context: int) -> Self:
        """A config of this family for training from scratch: width and depth, the rest by custom."""
        heads = max(1, dim // (64 if dim % 64 == 0 and dim >= 192 else 32))
        return cls(vocab=vocab, dim=dim, depth=depth, heads=heads, hidden=4 * dim, context=context)


def build(config: Config) -> Decoder:
    """An untrained model of this size."""
    act = partial(F.gelu, approximate="tanh")

    def norm() -> nn.LayerNorm:
        return nn.LayerNorm(config.dim, config.eps)

    def block() -> Block:
        attn = Attention(config.dim, config.heads, bias=True, dropout=config.dropout)
        return Block(norm(), attn, norm(), MLP(config.dim, config.hidden, act), config.dropout)

    return Decoder(
        embed=Embedding(config.vocab, config.dim, config.context, config.dropout),
        blocks=[block() for _ in range(config.depth)],
        norm=norm(),
    )


def read(model: Any, context: int) -> Config:
    """The sizes, read off a built model. Raises AttributeError where the model has other parts."""
    attn = model.blocks[0].attn
    return Config(
        vocab=model.embed.token.num_embeddings,
        dim=model.embed.token.embedding_dim,
        depth=len(model.blocks),
        heads=attn.q.out_features // attn.head_dim,
        hidden=model.blocks[0].mlp.up.out_features,
        context=model.embed.place.num_embeddings,
        eps=model.norm.eps,
        dropout=attn.dropout,
    )


def from_hf(hf: dict[str, Any]) -> Config:
    """From the keys of a config.json. Raises ValueError for what is not supported."""
    rates = [hf.get(key, 0.1) for key in ("resid_pdrop", "embd_pdrop", "attn_pdrop")]
    hf_config(
        hf,
        refused={
            "activation_function": "gelu_new",
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
            "tie_word_embeddings": True,
            "embd_pdrop": rates[0],
            "attn_pdrop": rates[0],
        },
    )
    return Config(
        vocab=hf["vocab_size"],
        dim=hf["n_embd"],
        depth=hf["n_layer"],
        heads=hf["n_head"],
        hidden=hf.get("n_inner") or 4 * hf["n_embd"],
        context=hf["n_positions"],
        eps=hf["layer_norm_epsilon"],
        dropout=rates[0],
    )


def to_hf(config: Config) -> dict[str, Any]:
    """The keys of a config.json that say the same."""
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": config.vocab,
        "n_embd": config.dim,
        "n_layer": config.depth,
        "n_head": config.heads,
        "n_inner": config.hidden,
        "n_positions": config.context,
        "layer_norm_epsilon": config.eps,
        "activation_function": "gelu_new",
        "tie_word_embeddings": True,
        "resid_pdrop": config.dropout,
        "embd_pdrop": config.dropout,
        "attn_pdrop": config.dropout,
    }


NAMES: Names = [
    name("transformer.wte.weight", "embed.token.weight"),
    name("transformer.wpe.weight", "embed.place.weight"),
    *both("transformer.h.{i}.ln_1", "blocks.{i}.attn_norm"),
    *both("transformer.h.{i}.attn.c_attn", *[f"blocks.{{i}}.attn.{p}" for p in "qkv"], load=turned, save=turned),
    *both("transformer.h.{i}.attn.c_proj", "blocks.{i}.attn.out", load=turned, save=turned),
    *both("transformer.h.{i}.ln_2", "blocks.{i}.mlp_norm"),
    *both("transformer.h.{i}.mlp.c_fc", "blocks.{i}.mlp.up", load=turned, save=turned),
    *both("transformer.h.{i}.mlp.c_proj", "blocks.{i}.mlp.down", load=turned, save=turned),
    *both("transformer.ln_f", "norm"),
]
