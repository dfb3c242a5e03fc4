"""Mamba-2: blocks of a norm and a state space model, without attention and MLP. https://arxiv.org/abs/2405.21060"""

import math
from dataclasses import dataclass
from typing import Any, Self

from torch import nn

from dunes.models.config_values import check_supported, flag, number, quotient, size
from dunes.models.names import Names, convolution, name, weight_and_bias
from dunes.parts import Block, Decoder, Embedding, RMSNorm
from dunes.parts.layers import GroupedRMSNorm
from dunes.parts.recurrent import Mamba2

UNLIMITED = (0.0, math.inf)
READ = ("heads", "head_dim", "state_dim", "groups", "limits")
"""Fields of `Config` that are attributes of `Mamba2`."""
BLOCK_SIZE = 7
"""Approximate number of parameters of a block of `Config.from_size`, in units of dim²; 12 in other families."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Sizes of a Mamba-2 model; see `Mamba2`. `context_length` is the length in training; texts may be longer."""

    vocab: int
    dim: int
    depth: int
    heads: int
    head_dim: int
    state_dim: int
    groups: int = 1
    width: int = 4
    context_length: int = 2048
    eps: float = 1e-5
    tied: bool = False
    bias: bool = False
    convolution_bias: bool = True
    limits: tuple[float, float] = UNLIMITED

    @classmethod
    def from_size(cls, vocab: int, dim: int, depth: int, context_length: int) -> Self:
        """A config of this width and depth for training from scratch; the other sizes are conventional."""
        head_dim = math.gcd(2 * dim, 64 if dim >= 192 else 32)
        return cls(
            vocab=vocab,
            dim=dim,
            depth=depth,
            heads=2 * dim // head_dim,
            head_dim=head_dim,
            state_dim=min(128, max(16, dim // 2)),
            context_length=context_length,
            tied=True,
        )


def build(config: Config) -> Decoder:
    """Build the model of this config, untrained. Raises ValueError unless `heads` is a multiple of `groups`."""

    def block() -> Block:
        parts = {field: getattr(config, field) for field in (*READ, "width", "bias", "convolution_bias")}
        norm = GroupedRMSNorm(config.heads * config.head_dim, config.eps, config.groups)
        return Block(RMSNorm(config.dim, config.eps), Mamba2(config.dim, **parts, norm=norm), None, None)

    return Decoder(
        embed=Embedding(config.vocab, config.dim),
        blocks=[block() for _ in range(config.depth)],
        norm=RMSNorm(config.dim, config.eps),
        head=None if config.tied else nn.Linear(config.dim, config.vocab, bias=False),
    )


def read(model: Any, context_length: int) -> Config:
    """The Config of a built model. Raises AttributeError if the model lacks an expected part."""
    mixer = model.blocks[0].attn
    return Config(
        vocab=model.embed.token.num_embeddings,
        dim=model.embed.token.embedding_dim,
        depth=len(model.blocks),
        **{field: getattr(mixer, field) for field in READ},
        width=mixer.convolution.weight.shape[1],
        context_length=context_length,
        eps=model.norm.eps,
        tied=model.head is None,
        bias=mixer.out.bias is not None,
        convolution_bias=mixer.convolution.bias is not None,
    )


SIZES = {
    "vocab": "vocab_size", "dim": "hidden_size", "depth": "num_hidden_layers", "heads": "num_heads",
    "head_dim": "head_dim", "state_dim": "state_size", "groups": "n_groups", "width": "conv_kernel",
}  # fmt: skip
"""Maps fields of `Config` to keys of a config.json."""
DEFAULTS = {"state_size": 128, "n_groups": 8, "conv_kernel": 4, "expand": 2, "max_position_embeddings": 2048}
"""Default values of a config.json; all but the last are also the defaults of transformers."""


def from_hf(hf: dict[str, Any]) -> Config:
    """Convert a Hugging Face config.json to a Config. Raises ValueError for unsupported settings.

    `residual_in_fp32` is ignored: hidden states have the dtype of the weights, or float32 under autocast.
    """
    check_supported(hf, required={"hidden_act": "silu", "rms_norm": True})
    hf = DEFAULTS | {key: value for key, value in hf.items() if value is not None}
    quotient(hf, "num_heads", "n_groups")
    inner, expanded = size(hf, "num_heads") * size(hf, "head_dim"), size(hf, "expand") * size(hf, "hidden_size")
    if inner != expanded:
        raise ValueError(
            f"config.json: num_heads x head_dim is {inner}; expected expand x hidden_size, {expanded}"
        )
    return Config(
        **{field: size(hf, key) for field, key in SIZES.items()},
        context_length=size(hf, "max_position_embeddings", largest=1 << 31),
        eps=number(hf, "layer_norm_epsilon", 1e-5),
        tied=flag(hf, "tie_word_embeddings"),
        bias=flag(hf, "use_bias"),
        convolution_bias=flag(hf, "use_conv_bias", True),
        limits=_limits(hf),
    )


def _limits(hf: dict[str, Any]) -> tuple[float, float]:
    """The smallest and the largest time step; transformers 5 writes infinity as an object."""
    given = [*UNLIMITED] if hf.get("time_step_limit") is None else hf["time_step_limit"]
    values = [math.inf if v == {"__float__": "Infinity"} else v for v in given] if isinstance(given, list) else []
    sized = [type(v) in (int, float) and (v < 1e30 or v == math.inf) for v in values]
    if sized != [True, True] or not 0 <= values[0] < values[1]:
        raise ValueError(
            f"config.json: time_step_limit is {given!r:.60}; expected two numbers, the second one larger"
        )
    return float(values[0]), float(values[1])


def to_hf(config: Config) -> dict[str, Any]:
    """Convert a Config to the content of a Hugging Face config.json.

    Raises ValueError unless `heads * head_dim` is a multiple of `dim`, since the key `expand` is an integer.
    """
    expand, rest = divmod(config.heads * config.head_dim, config.dim)
    if rest:
        raise ValueError(
            f"config.json: {config.heads} heads x {config.head_dim} is not divisible by hidden_size, {config.dim}"
        )
    return {
        "architectures": ["Mamba2ForCausalLM"],
        "model_type": "mamba2",
        **{key: getattr(config, field) for field, key in SIZES.items()},
        "expand": expand,
        "max_position_embeddings": config.context_length,
        "layer_norm_epsilon": config.eps,
        **({} if config.limits == UNLIMITED else {"time_step_limit": [*config.limits]}),
        "tie_word_embeddings": config.tied,
        "hidden_act": "silu",
        "use_bias": config.bias,
        "use_conv_bias": config.convolution_bias,
    }


_OURS, _THEIRS = "blocks.{i}.attn", "backbone.layers.{i}.mixer"

NAMES: Names = [
    name("backbone.embeddings.weight", "embed.token.weight"),
    name("backbone.layers.{i}.norm.weight", "blocks.{i}.attn_norm.weight"),
    *weight_and_bias(f"{_THEIRS}.in_proj", f"{_OURS}.project"),
    *convolution(f"{_THEIRS}.conv1d", f"{_OURS}.convolution"),
    name(f"{_THEIRS}.A_log", f"{_OURS}.log_rate"),
    name(f"{_THEIRS}.dt_bias", f"{_OURS}.step"),
    name(f"{_THEIRS}.D", f"{_OURS}.skip"),
    name(f"{_THEIRS}.norm.weight", f"{_OURS}.norm.weight"),
    *weight_and_bias(f"{_THEIRS}.out_proj", f"{_OURS}.out"),
    name("backbone.norm_f.weight", "norm.weight"),
    name("lm_head.weight", "head.weight"),
]
