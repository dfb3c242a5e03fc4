"""GPT-2: learned positions, LayerNorm, GELU, biases everywhere, tied head.

https://cdn.openai.com/better-language-models/language_models_are_unsupervised_multitask_learners.pdf
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch.nn.functional as F
from torch import nn

from dunes.models.config_values import check_supported, number, quotient, size
from dunes.models.names import Names, name, transpose, weight_and_bias
from dunes.parts import MLP, Attention, Block, Decoder, Embedding


@dataclass(frozen=True, kw_only=True)
class Config:
    """Sizes of a GPT-2. Only `context_length` positions have a learned embedding, so no text may be longer."""

    vocab: int
    dim: int
    depth: int
    heads: int
    hidden: int
    context_length: int = 1024
    eps: float = 1e-5
    dropout: float = 0.0

    @classmethod
    def from_size(cls, vocab: int, dim: int, depth: int, context_length: int) -> Self:
        """A config of this width and depth for training from scratch; the other sizes are conventional."""
        heads = max(1, dim // (64 if dim % 64 == 0 and dim >= 192 else 32))
        return cls(vocab=vocab, dim=dim, depth=depth, heads=heads, hidden=4 * dim, context_length=context_length)


def build(config: Config) -> Decoder:
    """Build the model of this config, untrained."""
    act = partial(F.gelu, approximate="tanh")

    def norm() -> nn.LayerNorm:
        return nn.LayerNorm(config.dim, config.eps)

    def block() -> Block:
        attn = Attention(config.dim, config.heads, bias=True, dropout=config.dropout)
        return Block(norm(), attn, norm(), MLP(config.dim, config.hidden, act), config.dropout)

    return Decoder(
        embed=Embedding(config.vocab, config.dim, config.context_length, config.dropout),
        blocks=[block() for _ in range(config.depth)],
        norm=norm(),
    )


def read(model: Any, context_length: int) -> Config:
    """The Config of a built model. Raises AttributeError if the model lacks an expected part."""
    attn = model.blocks[0].attn
    return Config(
        vocab=model.embed.token.num_embeddings,
        dim=model.embed.token.embedding_dim,
        depth=len(model.blocks),
        heads=attn.q.out_features // attn.head_dim,
        hidden=model.blocks[0].mlp.up.out_features,
        context_length=model.embed.place.num_embeddings,
        eps=model.norm.eps,
        dropout=attn.dropout,
    )


def from_hf(hf: dict[str, Any]) -> Config:
    """Convert a Hugging Face config.json to a Config. Raises ValueError for unsupported settings."""
    hf = {key: hf[alias] for alias, key in OTHER_KEYS.items() if alias in hf} | hf
    rates = [_rate(hf, key) for key in ("resid_pdrop", "embd_pdrop", "attn_pdrop")]
    if len(set(rates)) > 1:
        raise ValueError(f"config.json: resid_pdrop, embd_pdrop and attn_pdrop are {rates}; one rate is supported")
    if hf.get("activation_function") != "gelu_pytorch_tanh":  # another name for gelu_new
        check_supported(hf, required={"activation_function": "gelu_new"})
    check_supported(
        hf,
        required={
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
            "tie_word_embeddings": True,
            "add_cross_attention": False,
        },
    )
    quotient(hf, "n_embd", "n_head")
    return Config(
        vocab=size(hf, "vocab_size"),
        dim=size(hf, "n_embd"),
        depth=size(hf, "n_layer"),
        heads=size(hf, "n_head"),
        hidden=size(hf, "n_inner", 4 * size(hf, "n_embd")),
        context_length=size(hf, "n_positions"),
        eps=number(hf, "layer_norm_epsilon"),
        dropout=rates[0],
    )


OTHER_KEYS = {
    "n_ctx": "n_positions",
    "max_position_embeddings": "n_positions",
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
}
"""Alternative keys in a config.json, and the usual key for each."""


def _rate(hf: dict[str, Any], key: str) -> float:
    """Read a dropout rate, by default 0.1. Raises ValueError unless it is from 0 to below 1."""
    rate = hf.get(key, 0.1)
    if type(rate) not in (int, float) or not 0 <= rate < 1:
        raise ValueError(f"config.json: {key} is {rate!r}; it must be a number from 0 to below 1")
    return float(rate)


def to_hf(config: Config) -> dict[str, Any]:
    """Convert a Config to the content of a Hugging Face config.json."""
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": config.vocab,
        "n_embd": config.dim,
        "n_layer": config.depth,
        "n_head": config.heads,
        "n_inner": config.hidden,
        "n_positions": config.context_length,
        "layer_norm_epsilon": config.eps,
        "activation_function": "gelu_new",
        "tie_word_embeddings": True,
        "resid_pdrop": config.dropout,
        "embd_pdrop": config.dropout,
        "attn_pdrop": config.dropout,
    }


def _names(prefix: str) -> Names:
    block = f"{prefix}h.{{i}}"
    return [
        name(f"{prefix}wte.weight", "embed.token.weight"),
        name(f"{prefix}wpe.weight", "embed.place.weight"),
        *weight_and_bias(f"{block}.ln_1", "blocks.{i}.attn_norm"),
        *weight_and_bias(
            f"{block}.attn.c_attn", *[f"blocks.{{i}}.attn.{p}" for p in "qkv"], load=transpose, save=transpose
        ),
        *weight_and_bias(f"{block}.attn.c_proj", "blocks.{i}.attn.out", load=transpose, save=transpose),
        *weight_and_bias(f"{block}.ln_2", "blocks.{i}.mlp_norm"),
        *weight_and_bias(f"{block}.mlp.c_fc", "blocks.{i}.mlp.up", load=transpose, save=transpose),
        *weight_and_bias(f"{block}.mlp.c_proj", "blocks.{i}.mlp.down", load=transpose, save=transpose),
        *weight_and_bias(f"{prefix}ln_f", "norm"),
    ]


NAMES = _names("transformer.")

ALIASES = _names("")
"""Weight names without the prefix `transformer.`, as in the oldest files on the Hugging Face Hub."""

IGNORED_NAMES = tuple(
    f"{prefix}h.{{i}}.attn.{mask}" for prefix in ("transformer.", "") for mask in ("bias", "masked_bias")
)
"""Names of causal masks, which older versions of transformers stored together with the weights."""
