"""LLaMA: rotary positions, RMSNorm, SwiGLU, grouped attention. https://arxiv.org/abs/2307.09288

Config and build also serve the families that differ in one part; they pass theirs in.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

from torch import nn

from dunes.models.names import Names, name
from dunes.models.words import hf_config, rope_base
from dunes.parts import Attention, Block, Decoder, Embedding, GatedMLP, RMSNorm, Rotary


@dataclass(frozen=True, kw_only=True)
class Config:
    """Sizes of a LLaMA. `hidden` is the width inside the MLP, final, with no factor applied."""

    vocab: int
    dim: int
    depth: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    context: int = 2048
    eps: float = 1e-5
    rope_base: float = 10_000.0
    tied: bool = False

    @classmethod
    def sized(cls, vocab: int, dim: int, depth: int, context: int) -> Self:
        """A config of this family for training from scratch: width and depth, the rest by custom."""
        head_dim = 64 if dim % 64 == 0 and dim >= 192 else 32
        hidden = round(dim * 8 / 3 / 32) * 32
        heads = max(1, dim // head_dim)
        return cls(
            vocab=vocab,
            dim=dim,
            depth=depth,
            heads=heads,
            kv_heads=heads,
            head_dim=head_dim,
            hidden=hidden,
            context=context,
            tied=True,
        )


def attention(config: Config) -> Attention:
    rotary = Rotary(config.head_dim, config.rope_base)
    return Attention(config.dim, config.heads, config.kv_heads, head_dim=config.head_dim, position=rotary)


def mlp(config: Config) -> nn.Module:
    return GatedMLP(config.dim, config.hidden)


Make = Callable[[Config], nn.Module]


def build(config: Config, attention: Make = attention, mlp: Make = mlp) -> Decoder:
    """An untrained model of this size; `attention` and `mlp` make each block's."""

    def norm() -> RMSNorm:
        return RMSNorm(config.dim, config.eps)

    def block() -> Block:
        return Block(norm(), attention(config), norm(), mlp(config))

    return Decoder(
        embed=Embedding(config.vocab, config.dim),
        blocks=[block() for _ in range(config.depth)],
        norm=norm(),
        head=None if config.tied else nn.Linear(config.dim, config.vocab, bias=False),
    )


def read(model: Any, context: int, config: type[Config] = Config) -> Config:
    """The sizes, read off a built model. Raises AttributeError where the model has other parts."""
    attn = model.blocks[0].attn
    return config(
        vocab=model.embed.token.num_embeddings,
        dim=model.embed.token.embedding_dim,
        depth=len(model.blocks),
        heads=attn.q.out_features // attn.head_dim,
        kv_heads=attn.k.out_features // attn.head_dim,
        head_dim=attn.head_dim,
        hidden=model.blocks[0].mlp.down.in_features,
        context=context,
        eps=model.norm.eps,
        rope_base=attn.position.base,
        tied=model.head is None,
    )


def from_hf(hf: dict[str, Any], config: type[Config] = Config, act: str = "silu") -> Config:
    """From the keys of a config.json, of either dialect. Raises ValueError for what is not supported."""
    hf = hf_config(hf, refused={"attention_bias": False, "mlp_bias": False, "hidden_act": act})
    return config(
        vocab=hf["vocab_size"],
        dim=hf["hidden_size"],
        depth=hf["num_hidden_layers"],
        heads=hf["num_attention_heads"],
        kv_heads=hf.get("num_key_value_heads") or hf["num_attention_heads"],
        head_dim=hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"],
        hidden=hf["intermediate_size"],
        context=hf["max_position_embeddings"],
        eps=hf["rms_norm_eps"],
        rope_base=rope_base(hf),
        tied=hf.get("tie_word_embeddings", False),
    )


def to_hf(config: Config) -> dict[str, Any]:
    """The keys of a config.json that say the same, in both dialects where they differ."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab,
        "hidden_size": config.dim,
        "num_hidden_layers": config.depth,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.hidden,
        "max_position_embeddings": config.context,
        "rms_norm_eps": config.eps,
        "rope_theta": config.rope_base,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_base},
        "tie_word_embeddings": config.tied,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
    }


NAMES: Names = [
    name("model.embed_tokens.weight", "embed.token.weight"),
    name("model.layers.{i}.input_layernorm.weight", "blocks.{i}.attn_norm.weight"),
    name("model.layers.{i}.self_attn.q_proj.weight", "blocks.{i}.attn.q.weight"),
    name("model.layers.{i}.self_attn.k_proj.weight", "blocks.{i}.attn.k.weight"),
    name("model.layers.{i}.self_attn.v_proj.weight", "blocks.{i}.attn.v.weight"),
    name("model.layers.{i}.self_attn.o_proj.weight", "blocks.{i}.attn.out.weight"),
    name("model.layers.{i}.post_attention_layernorm.weight", "blocks.{i}.mlp_norm.weight"),
    name("model.layers.{i}.mlp.gate_proj.weight", "blocks.{i}.mlp.gate.weight"),
    name("model.layers.{i}.mlp.up_proj.weight", "blocks.{i}.mlp.up.weight"),
    name("model.layers.{i}.mlp.down_proj.weight", "blocks.{i}.mlp.down.weight"),
    name("model.norm.weight", "norm.weight"),
    name("lm_head.weight", "head.weight"),
]
