"""Folders in Meta's and Mistral's own form, made of Hugging Face's for tests: as their authors describe it."""

import json

from safetensors.torch import load_file, save_file

from dunes.checkpoint.open import open_model
from dunes.models import FAMILIES

RENAMED = {
    "model.layers.": "layers.",
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3",
    "block_sparse_moe": "feed_forward",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "model.embed_tokens": "tok_embeddings",
    "model.norm": "norm",
    "lm_head": "output",
}


def native_name(name):
    """Their name for one of Hugging Face's."""
    for old, new in RENAMED.items():
        name = name.replace(old, new)
    return name


def to_pairs(weight, heads):
    """Rows of a query or key projection: dimensions i, i + D/2 of a head become 2i, 2i+1."""
    return weight.view(heads, 2, -1, weight.shape[1]).transpose(1, 2).flatten(0, 2).contiguous()


def params(config):
    """The params.json for the keys of a config.json."""
    p = {
        "dim": config["hidden_size"],
        "n_layers": config["num_hidden_layers"],
        "n_heads": config["num_attention_heads"],
        "n_kv_heads": config["num_key_value_heads"],
        "head_dim": config["head_dim"],
        "hidden_dim": config["intermediate_size"],
        "norm_eps": config["rms_norm_eps"],
        "vocab_size": config["vocab_size"],
        "rope_theta": config["rope_theta"],
        "max_seq_len": config["max_position_embeddings"],
        "sliding_window": config.get("sliding_window"),
        "tied_embeddings": config.get("tie_word_embeddings") or None,
    }
    if config["model_type"] == "llama":
        p["multiple_of"] = 1
    if config["model_type"] == "mixtral":
        p["moe"] = {k: config[f"num_{v}"] for k, v in MIXTURE.items()}
    if scaling := config.get("rope_scaling"):
        p |= {"use_scaled_rope": True, "rope_scaling_factor": scaling["factor"]}
        p |= {"rope_high_freq_factor": scaling["high_freq_factor"]}
    return {k: v for k, v in p.items() if v is not None}


MIXTURE = {"num_experts": "local_experts", "num_experts_per_tok": "experts_per_tok"}


def write_native(source, out):
    """Write the model of a Hugging Face folder in their form; returns the tensors."""
    opens = open_model(source)
    config = FAMILIES[opens.family].to_hf(opens.config)
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    tensors = {}
    for name, weight in load_file(source / "model.safetensors").items():
        part = name.split(".")[-2]
        tensors[native_name(name)] = to_pairs(weight, heads[part]) if part in heads else weight
    out.mkdir()
    save_file(tensors, out / "consolidated.safetensors")
    (out / "params.json").write_text(json.dumps(params(config)))
    return tensors
