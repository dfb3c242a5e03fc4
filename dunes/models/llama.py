"""LLaMA: rotary positions, RMSNorm, SwiGLU, grouped-query attention. https://arxiv.org/abs/2307.09288

A family that differs in its attention or MLP reuses `Config` and `build`, and passes that part to `build`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeVar

from torch import nn

from dunes.models.config_values import (
    check_supported,
    flag,
    number,
    quotient,
    rope_fields,
    rope_to_hf,
    rotary_dim,
    size,
)
from dunes.models.names import Names, name, weight_and_bias
from dunes.parts import Attention, Block, Decoder, Embedding, GatedMLP, RMSNorm, Rotary
from dunes.parts.position import UNSCALED, Scaling


@dataclass(frozen=True, kw_only=True)
class Config:
    """Sizes of a LLaMA. `hidden` is the exact width inside the MLP; it is not multiplied by 2/3."""

    vocab: int
    dim: int
    depth: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    context_length: int = 2048
    eps: float = 1e-5
    rope_base: float = 10_000.0
    scaling: Scaling = UNSCALED
    tied: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False

    @classmethod
    def from_size(cls, vocab: int, dim: int, depth: int, context_length: int) -> Self:
        """A config of this width and depth for training from scratch; the other sizes are conventional."""
        head_dim = 64 if dim % 64 == 0 and dim >= 192 else 32
        hidden = round(dim * 8 / 3 / 32) * 32
        heads = next(n for n in range(max(1, dim // head_dim), 0, -1) if dim % n == 0)
        return cls(
            vocab=vocab,
            dim=dim,
            depth=depth,
            heads=heads,
            kv_heads=heads,
            head_dim=head_dim,
            hidden=hidden,
            context_length=context_length,
            tied=True,
        )


C = TypeVar("C", bound=Config)


def attention(config: Config, layer: int = 0, **parts: Any) -> Attention:
    """The attention of a block; `parts` overrides arguments of `Attention`."""
    defaults: dict[str, Any] = {
        "position": Rotary(config.head_dim, config.rope_base, config.scaling),
        "bias": config.attention_bias,
    }
    return Attention(config.dim, config.heads, config.kv_heads, head_dim=config.head_dim, **(defaults | parts))


def mlp(config: Config) -> GatedMLP:
    return GatedMLP(config.dim, config.hidden, bias=config.mlp_bias)


def norm(config: Config) -> RMSNorm:
    return RMSNorm(config.dim, config.eps)


def block(config: C, attn: nn.Module, mlp: nn.Module, norm: Callable[[C], nn.Module] = norm) -> Block:
    return Block(norm(config), attn, norm(config), mlp)


def build(
    config: C,
    attention: Callable[[C, int], nn.Module] = attention,
    mlp: Callable[[C], nn.Module] = mlp,
    block: Callable[[C, nn.Module, nn.Module], Block] = block,
    norm: Callable[[C], nn.Module] = norm,
) -> Decoder:
    """Build the model of this config, untrained.

    `attention` (called with the number of the layer) and `mlp` build these parts of each block, and `block` joins
    them. `norm` builds the norm after the last block.
    """
    return Decoder(
        embed=Embedding(config.vocab, config.dim),
        blocks=[block(config, attention(config, layer), mlp(config)) for layer in range(config.depth)],
        norm=norm(config),
        head=None if config.tied else nn.Linear(config.dim, config.vocab, bias=False),
    )


def read(model: Any, context_length: int) -> Config:
    """The Config of a built model. Raises AttributeError if the model lacks an expected part."""
    return Config(**read_fields(model, context_length, model.blocks[0].mlp))


def read_fields(model: Any, context_length: int, mlp: Any, attns: Sequence[Any] | None = None) -> dict[str, Any]:
    """The fields of the Config of a built model; `mlp` is the MLP, or one expert, of its first block.

    `attns` are the attention modules, by default those of all blocks; if empty, the result has no fields of
    attention.
    """
    attns = [block.attn for block in model.blocks] if attns is None else attns
    return {
        "vocab": model.embed.token.num_embeddings,
        "dim": model.embed.token.embedding_dim,
        "depth": len(model.blocks),
        "hidden": mlp.down.in_features,
        "context_length": context_length,
        "eps": model.norm.eps,
        "tied": model.head is None,
        "mlp_bias": mlp.down.bias is not None,
        **(_attention_fields(attns) if attns else {}),
    }


def _attention_fields(attns: Sequence[Any]) -> dict[str, Any]:
    rotaries = (getattr(a.position, "rotary", a.position) for a in attns if a.position is not None)
    rotary: Any = next(rotaries, None)
    return {
        "heads": attns[0].head_count,
        "kv_heads": attns[0].kv_head_count,
        "head_dim": attns[0].head_dim,
        "rope_base": rotary.base,
        "scaling": rotary.scaling,
        "attention_bias": attns[0].out.bias is not None,
    }


def from_hf(hf: dict[str, Any]) -> Config:
    """Convert a Hugging Face config.json to a Config. Raises ValueError for unsupported settings."""
    return Config(**config_fields(hf))


def config_fields(
    hf: dict[str, Any],
    act: str = "silu",
    base: float = 10_000.0,
    eps: str = "rms_norm_eps",
    partial: float | None = None,
) -> dict[str, Any]:
    """The fields of a Config, read from a config.json.

    `act` is the only supported activation, `base` is the default rotary base, and `eps` is the key of the norms'
    epsilon. If `partial` is a number, the fields include `rotary_dim`, and `partial` is the default share of
    rotated dimensions. If `partial` is None, partly rotated heads are unsupported. Raises ValueError for
    unsupported or out-of-range values, and KeyError for missing values.
    """
    check_supported(hf, required={"hidden_act": act})
    heads = size(hf, "num_attention_heads")
    kv_heads = size(hf, "num_key_value_heads", heads)
    quotient(hf | {"num_key_value_heads": kv_heads}, "num_attention_heads", "num_key_value_heads")
    return {
        "vocab": size(hf, "vocab_size"),
        "dim": size(hf, "hidden_size"),
        "depth": size(hf, "num_hidden_layers"),
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim(hf),
        "hidden": size(hf, "intermediate_size"),
        "context_length": size(hf, "max_position_embeddings", largest=1 << 31),
        "eps": number(hf, eps),
        "tied": flag(hf, "tie_word_embeddings"),
        "attention_bias": flag(hf, "attention_bias"),
        "mlp_bias": flag(hf, "mlp_bias"),
        **rope_fields(hf, base, partial is not None),
        **({} if partial is None else {"rotary_dim": rotary_dim(hf, head_dim(hf), partial)}),
    }


def head_dim(hf: Mapping[str, Any]) -> int:
    """`head_dim` of a config.json; if it is absent, `hidden_size / num_attention_heads`.

    Raises ValueError for an odd `head_dim`, since rotary positions rotate pairs of dimensions.
    """
    width = size(hf, "head_dim", 0) or quotient(hf, "hidden_size", "num_attention_heads")
    if width % 2:
        raise ValueError(f"config.json: head_dim is {width}; rotary positions need an even number")
    return width


def to_hf(config: Config) -> dict[str, Any]:
    """Convert a Config to the content of a Hugging Face config.json, with the keys of transformers 4 and 5."""
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
        "max_position_embeddings": config.context_length,
        "rms_norm_eps": config.eps,
        **rope_to_hf(config.rope_base, config.scaling),
        "tie_word_embeddings": config.tied,
        "hidden_act": "silu",
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
    }


def refusal(config: Config) -> str:
    """The reason why transformers refuses this config, or "". In some families, `heads` must divide `dim`."""
    width, heads = config.dim, config.heads
    reason = f"hidden_size is {width}, which is not divisible by num_attention_heads, {heads}"
    return reason if width % heads else ""


ATTENTION: Names = [
    name("model.embed_tokens.weight", "embed.token.weight"),
    name("model.layers.{i}.input_layernorm.weight", "blocks.{i}.attn_norm.weight"),
    *weight_and_bias("model.layers.{i}.self_attn.q_proj", "blocks.{i}.attn.q"),
    *weight_and_bias("model.layers.{i}.self_attn.k_proj", "blocks.{i}.attn.k"),
    *weight_and_bias("model.layers.{i}.self_attn.v_proj", "blocks.{i}.attn.v"),
    *weight_and_bias("model.layers.{i}.self_attn.o_proj", "blocks.{i}.attn.out"),
    name("model.layers.{i}.post_attention_layernorm.weight", "blocks.{i}.mlp_norm.weight"),
    name("model.norm.weight", "norm.weight"),
    name("lm_head.weight", "head.weight"),
]
"""All weight names except the MLP's; related families share them."""

NAMES: Names = [
    *ATTENTION,
    *weight_and_bias("model.layers.{i}.mlp.gate_proj", "blocks.{i}.mlp.gate"),
    *weight_and_bias("model.layers.{i}.mlp.up_proj", "blocks.{i}.mlp.up"),
    *weight_and_bias("model.layers.{i}.mlp.down_proj", "blocks.{i}.mlp.down"),
]

_OURS, _THEIRS = "blocks.{i}", "model.layers.{i}"

JOINED: Names = [
    name(
        f"{_THEIRS}.self_attn.qkv_proj.weight",
        *(f"{_OURS}.attn.{p}.weight" for p in "qkv"),
        like=f"{_THEIRS}.self_attn.o_proj.weight",
    ),
    name(f"{_THEIRS}.mlp.gate_up_proj.weight", f"{_OURS}.mlp.gate.weight", f"{_OURS}.mlp.up.weight"),
]
"""Weight names of Phi-3, whose files store q, k and v as one matrix, and gate and up as another."""

ALIASES = JOINED

IGNORED_NAMES = ("model.layers.{i}.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq")
