"""GPT-NeoX (Pythia): attention and MLP in parallel, LayerNorm, a quarter of each head rotated, biases.

https://arxiv.org/abs/2204.06745, https://arxiv.org/abs/2304.01373
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

import torch.nn.functional as F

from dunes.models import llama, stablelm
from dunes.models.config_values import flag, number
from dunes.models.names import Names, name, per_head, weight_and_bias
from dunes.parts import MLP, Decoder

TANH_GELU = partial(F.gelu, approximate="tanh")
TANH_GELU_NAMES = ("gelu_fast", "gelu_new", "gelu_pytorch_tanh")


@dataclass(frozen=True, kw_only=True)
class Config(stablelm.Config):
    """StableLM's config. With `attention_bias`, the attention's output projection has a bias, as q, k and v have.
    `parallel` is passed to `Block`.

    With `tanh_gelu`, the MLP uses the tanh approximation of GELU, otherwise the exact GELU.
    """

    parallel: bool = True
    tanh_gelu: bool = False

    @classmethod
    def from_size(cls, vocab: int, dim: int, depth: int, context_length: int) -> Self:
        """A config of this width and depth for training from scratch; the other sizes are conventional."""
        config = super().from_size(vocab, dim, depth, context_length)
        return replace(config, hidden=4 * dim, attention_bias=True, mlp_bias=True)


def mlp(config: Config) -> MLP:
    return MLP(config.dim, config.hidden, TANH_GELU if config.tanh_gelu else F.gelu, config.mlp_bias)


def build(config: Config) -> Decoder:
    """Build the model of this config, untrained."""
    attention = partial(stablelm.attention, out_bias=config.attention_bias)
    return llama.build(config, attention, mlp, partial(stablelm.block, parallel=config.parallel), stablelm.norm)


def read(model: Any, context_length: int) -> Config:
    """The Config of a built model. Raises AttributeError if the model lacks an expected part."""
    block = model.blocks[0]
    tanh_gelu = getattr(block.mlp.act, "keywords", {}) == TANH_GELU.keywords
    return Config(**stablelm.read_fields(model, context_length), parallel=block.parallel, tanh_gelu=tanh_gelu)


def from_hf(hf: dict[str, Any]) -> Config:
    """Convert a Hugging Face config.json to a Config. Raises ValueError for unsupported settings."""
    base, share = number(hf, "rotary_emb_base", 10_000.0, above=1.0), number(hf, "rotary_pct", 0.25)
    tanh_gelu = hf.get("hidden_act") in TANH_GELU_NAMES
    act = TANH_GELU_NAMES[0] if tanh_gelu else "gelu"
    # GPT-NeoX has no settings for grouped key/value heads or for an MLP without biases.
    own = {"num_key_value_heads": None, "mlp_bias": True, "attention_bias": flag(hf, "attention_bias", True)}
    fields = stablelm.config_fields(hf | own | ({"hidden_act": act} if tanh_gelu else {}), act, base, share)
    return Config(**fields, parallel=flag(hf, "use_parallel_residual", True), tanh_gelu=tanh_gelu)


def to_hf(config: Config) -> dict[str, Any]:
    """Convert a Config to the content of a Hugging Face config.json, with the keys of transformers 4 and 5."""
    hf = stablelm.to_hf(config)
    for key in ("num_key_value_heads", "use_qkv_bias", "qk_layernorm"):
        del hf[key]
    return hf | {
        "architectures": ["GPTNeoXForCausalLM"],
        "model_type": "gpt_neox",
        "rotary_emb_base": config.rope_base,
        "rotary_pct": hf["partial_rotary_factor"],
        "attention_bias": config.attention_bias,
        "hidden_act": TANH_GELU_NAMES[0] if config.tanh_gelu else "gelu",
        "use_parallel_residual": config.parallel,
    }


_LAYER, _OURS = "gpt_neox.layers.{i}", "blocks.{i}"

NAMES: Names = [
    name("gpt_neox.embed_in.weight", "embed.token.weight"),
    *weight_and_bias(f"{_LAYER}.input_layernorm", f"{_OURS}.attn_norm"),
    *per_head(weight_and_bias(f"{_LAYER}.attention.query_key_value", *(f"{_OURS}.attn.{p}" for p in "qkv"))),
    *weight_and_bias(f"{_LAYER}.attention.dense", f"{_OURS}.attn.out"),
    *weight_and_bias(f"{_LAYER}.post_attention_layernorm", f"{_OURS}.mlp_norm"),
    *weight_and_bias(f"{_LAYER}.mlp.dense_h_to_4h", f"{_OURS}.mlp.up"),
    *weight_and_bias(f"{_LAYER}.mlp.dense_4h_to_h", f"{_OURS}.mlp.down"),
    *weight_and_bias("gpt_neox.final_layer_norm", "norm"),
    name("embed_out.weight", "head.weight"),
]

ALIASES: Names = [name("lm_head.weight", "head.weight")]
"""The head's name in the modules of transformers 5, whose files still call the head `embed_out`."""

IGNORED_NAMES = tuple(f"{_LAYER}.attention.{n}" for n in ("bias", "masked_bias", "rotary_emb.inv_freq"))
"""Names of causal masks and rotary frequencies, which older versions of transformers stored with the weights."""
