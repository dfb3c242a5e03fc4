"""Read Meta's and Mistral's native format: params.json, consolidated.*, rotary embedding on adjacent pairs.

params.json is translated into an equivalent config.json, which the families read.
https://github.com/meta-llama/llama-models, https://github.com/mistralai/mistral-inference
"""

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dunes.checkpoint.architecture import Architecture, naming_errors, require_depth
from dunes.checkpoint.weights.files import find_weights, tensors
from dunes.checkpoint.weights.lazy_tensor import LazyTensor, Weights, combine, hf_weights, in_memory
from dunes.files import json_file
from dunes.files.model_file import require_inside
from dunes.models.config_values import check_supported, number, quotient, size
from dunes.models.names import Layout, Names, identity, name

PARAMS, EMBEDDING = "params.json", "tok_embeddings.weight"
KNOWN = (
    *("dim", "n_layers", "n_heads", "n_kv_heads", "head_dim", "hidden_dim", "multiple_of", "ffn_dim_multiplier"),
    *("norm_eps", "vocab_size", "tied_embeddings", "rope_theta", "max_seq_len"),
    *("sliding_window", "_sliding_window"),
    *("use_scaled_rope", "rope_scaling_factor", "rope_high_freq_factor", "moe", "max_batch_size"),
)
"""Supported keys; `max_batch_size` does not affect the model. Keys that are neither here nor in DEFAULTS are
refused if their values are truthy.
"""
DEFAULTS = {"model_type": "transformer", "causal": True, "use_biases": False}
"""Keys that are accepted only with these values."""
EXPERTS = {"num_experts": "num_local_experts", "num_experts_per_tok": "num_experts_per_tok"}
LLAMA_3_2_DIMS = (2048, 3072)
"""Widths of LLaMA 3.2, whose rotary scaling factor differs from LLaMA 3.1's."""


def to_hf_config(params: Mapping[str, Any], vocab: int, tied: bool) -> tuple[dict[str, Any], list[str]]:
    """The config.json equivalent to a params.json, and a note for each assumed value.

    `vocab` is the number of embedding rows in the files, since params.json may give it as -1. Raises ValueError
    for unknown keys and invalid values, KeyError for missing keys. Values that are copied unchanged are checked by
    the family later.
    """
    p, notes = check_supported({k: v for k, v in params.items() if v is not None}, DEFAULTS), list[str]()
    _refuse_unknown(p, {*KNOWN, *DEFAULTS}, "")
    if p.get("vocab_size", -1) not in (-1, vocab):
        raise ValueError(f"vocab_size is {p['vocab_size']!r}, the files have {vocab} rows")
    mistral, window = "multiple_of" not in p, _window(p)
    config: dict[str, Any] = {
        "model_type": "mixtral" if p.get("moe") else "mistral" if mistral else "llama",
        "vocab_size": vocab,
        "hidden_size": size(p, "dim"),
        "num_hidden_layers": size(p, "n_layers"),
        "num_attention_heads": size(p, "n_heads"),
        "num_key_value_heads": size(p, "n_kv_heads", size(p, "n_heads")),
        "head_dim": size(p, "head_dim") if "head_dim" in p else quotient(p, "dim", "n_heads"),
        "intermediate_size": size(p, "hidden_dim") if mistral or "hidden_dim" in p else _hidden(p),
        "rms_norm_eps": p.get("norm_eps", 1e-5),
        "hidden_act": "silu",
        "tie_word_embeddings": tied,
        "rope_theta": _rope_theta(p, mistral, window, notes),
        "max_position_embeddings": _context_length(p, mistral, notes),
    }
    if mistral:
        config["sliding_window"] = window
    return config | _experts_config(p.get("moe")) | _rope_scaling(p, notes), notes


def _refuse_unknown(params: Mapping[str, Any], known: Collection[str], prefix: str) -> None:
    """Raise ValueError for an unknown key with a truthy value."""
    if unknown := [k for k, v in params.items() if k not in known and v]:
        raise ValueError(f"{prefix}{unknown[0]} is {str(params[unknown[0]])[:60]}, which is not supported")


def _experts_config(moe: Any) -> dict[str, Any]:
    if not moe:
        return {}
    if not isinstance(moe, dict):
        raise ValueError(f"moe is {str(moe)[:60]}, and must have {' and '.join(EXPERTS)}")
    _refuse_unknown(moe, EXPERTS, "moe.")
    return {theirs: moe[name] for name, theirs in EXPERTS.items()}


def _rope_scaling(p: Mapping[str, Any], notes: list[str]) -> dict[str, Any]:
    if not p.get("use_scaled_rope"):
        return {}
    if (factor := p.get("rope_scaling_factor")) is None:
        factor = 32.0 if p["dim"] in LLAMA_3_2_DIMS else 8.0
        notes.append(f"{PARAMS} has no rope_scaling_factor: assumed {factor:g} (LLaMA 3.1 has 8, 3.2 has 32)")
    scaling = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": p.get("rope_high_freq_factor", 4.0),
        "original_max_position_embeddings": 8192,
    }
    return {"rope_scaling": scaling}


def _hidden(p: Mapping[str, Any]) -> int:
    """Number of hidden neurons: `8/3 * dim * ffn_dim_multiplier`, rounded up to a multiple of `multiple_of`."""
    hidden = int(number(p, "ffn_dim_multiplier", 1.0) * int(8 * size(p, "dim") / 3))
    return -(-hidden // size(p, "multiple_of")) * size(p, "multiple_of")


def _window(p: Mapping[str, Any]) -> int | None:
    """The sliding window, or None. params.json has a number, a string, or the same number for each layer."""
    window = p.get("sliding_window", p.get("_sliding_window"))
    if isinstance(window, list):
        if len(set(map(str, window))) != 1:
            raise ValueError(f"layers have different sliding windows {str(window)[:60]}, which no family supports")
        window = window[0]
    known = {"sliding_window": int(window) if isinstance(window, str) else window}
    return None if window is None else size(known, "sliding_window")


def _rope_theta(p: Mapping[str, Any], mistral: bool, window: int | None, notes: list[str]) -> float:
    if "rope_theta" in p:
        return number(p, "rope_theta")
    # Without `rope_theta`, Mistral's first release used 10,000; its present code uses 1,000,000.
    theta = 1e6 if mistral and window is None else 1e4
    notes.append(f"{PARAMS} has no rope_theta: assumed {theta:,.0f}")
    return theta


def _context_length(p: Mapping[str, Any], mistral: bool, notes: list[str]) -> int:
    if "max_seq_len" in p:
        return size(p, "max_seq_len", largest=1 << 31)
    if mistral:
        context_length = 32768
    elif p.get("use_scaled_rope"):
        context_length = 131072
    elif number(p, "rope_theta", 1e4) > 1e4:
        context_length = 8192
    else:
        context_length = 2048 if p.get("norm_eps") == 1e-6 else 4096  # LLaMA 1, LLaMA 2
    notes.append(f"{PARAMS} has no max_seq_len: assumed {context_length:,}")
    return context_length


def weight_names(config: Mapping[str, Any], permuted: bool = True) -> Names:
    """The table that maps native names of weights to the model's names.

    With `permuted`, rows of the query and key projections are reordered from adjacent pairs to halves. Otherwise,
    rows keep their order, for a model whose rotary embedding rotates adjacent pairs.
    """

    def permute(heads: int) -> Layout:
        return partial(to_halves, heads=heads) if permuted else identity

    attention, attn = "layers.{i}.attention", "blocks.{i}.attn"
    return [
        name(EMBEDDING, "embed.token.weight"),
        name("layers.{i}.attention_norm.weight", "blocks.{i}.attn_norm.weight"),
        name(f"{attention}.wq.weight", f"{attn}.q.weight", load=permute(config["num_attention_heads"])),
        name(f"{attention}.wk.weight", f"{attn}.k.weight", load=permute(config["num_key_value_heads"])),
        name(f"{attention}.wv.weight", f"{attn}.v.weight"),
        name(f"{attention}.wo.weight", f"{attn}.out.weight"),
        name("layers.{i}.ffn_norm.weight", "blocks.{i}.mlp_norm.weight"),
        *(_experts(config["num_local_experts"]) if "num_local_experts" in config else _mlp(FEED_FORWARD, MLP)),
        name("norm.weight", "norm.weight"),
        name("output.weight", "head.weight"),
    ]


FEED_FORWARD, MLP, MATRICES = "layers.{i}.feed_forward", "blocks.{i}.mlp", {"w1": "gate", "w3": "up", "w2": "down"}
IGNORED_NAMES = ("rope.freqs", "layers.{i}.attention.inner_attention.rope.freqs")
"""Names of rotary tables in old files; ignored, since the model computes these tables."""


def _mlp(theirs: str, ours: str) -> Names:
    return [name(f"{theirs}.{w}.weight", f"{ours}.{part}.weight") for w, part in MATRICES.items()]


def _experts(count: int) -> Names:
    """Names of experts' weights. In mistral-inference, experts are separate; in Mixtral's first release, they are
    stacked, and w2 is transposed.
    """
    stacked = []
    for w, part in MATRICES.items():
        layout = (lambda x: x.view(count, -1, x.shape[1]).mT.flatten(0, 1)) if w == "w2" else identity
        ours = [f"{MLP}.experts.{e}.{part}.weight" for e in range(count)]
        stacked.append(name(f"layers.{{i}}.block_sparse_moe.{w}", *ours, load=layout, save=layout))
    return [
        name(f"{FEED_FORWARD}.gate.weight", f"{MLP}.router.weight"),
        *_mlp(f"{FEED_FORWARD}.experts.{{e}}", f"{MLP}.experts.{{e}}"),
        name("layers.{i}.block_sparse_moe.gate.weight", f"{MLP}.router.weight"),
        *stacked,
    ]


def to_halves(weight: Tensor, heads: int) -> Tensor:
    """Reorder rows (heads x D, ...) of a query or key projection: dimensions 2i, 2i+1 become i, i + D/2."""
    return weight.view(heads, -1, 2, *weight.shape[1:]).transpose(1, 2).flatten(0, 2)


def join_shards(shards: Sequence[Weights], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, LazyTensor]:
    """Join tensor-parallel shards; `shapes` has the expected shape of each tensor by its name.

    A replicated tensor is taken from the first shard; other tensors are concatenated along the dimension that
    gives the expected shape.
    """
    keys = dict.fromkeys(key for shard in shards for key in shard)
    return {key: _join([shard[key] for shard in shards if key in shard], shapes.get(key)) for key in keys}


def _join(parts: Sequence[LazyTensor], expected: tuple[int, ...] | None) -> LazyTensor:
    first = parts[0]
    if len(parts) == 1 or expected in (None, first.shape) or len({part.dtype for part in parts}) > 1:
        return first
    for dim in range(len(first.shape)):
        with suppress(RuntimeError, IndexError):  # torch.cat fails if sizes differ in another dimension
            if (joined := combine(partial(torch.cat, dim=dim), parts)).shape == expected:
                return joined
    return first


def open_folder(
    folder: Path,
) -> tuple[Architecture, dict[str, Any], Weights, Names, tuple[str, ...], tuple[str, ...]]:
    """Architecture, config.json, tensors, table of names, ignored names and assumptions of a native folder.

    Raises ValueError if params.json is not supported, and if files are missing or do not fit params.json.
    """
    params = json_file.read(folder / PARAMS)
    shards = _consolidated(folder)
    heads = [s["output.weight"].shape for s in shards if "output.weight" in s]
    rows = heads or [s[EMBEDDING].shape for s in shards if EMBEDDING in s]
    if not rows or any(len(shape) != 2 for shape in rows):
        raise ValueError(f"{folder}: neither output.weight nor {EMBEDDING} is a matrix in consolidated.*")
    replicated = rows[0][0] == params.get("vocab_size") or not heads
    with naming_errors(folder / PARAMS):
        tied = bool(params.get("tied_embeddings")) or not heads
        vocab = rows[0][0] if replicated else sum(shape[0] for shape in rows)
        config, notes = to_hf_config(params, vocab, tied)
    architecture = Architecture.of_hf_config(config, folder / PARAMS)
    require_depth(architecture, sum(map(len, shards)), folder)
    names, expected = weight_names(config), in_memory(architecture.outline().state_dict())
    shapes = {key: tensor.shape for key, tensor in hf_weights(names, expected).items()}
    return architecture, config, join_shards(shards, shapes), names, IGNORED_NAMES, tuple(notes)


def _consolidated(folder: Path) -> list[dict[str, LazyTensor]]:
    """Tensors of each consolidated.* file, in order. Raises ValueError if a file is missing."""
    if (files := find_weights(folder, "consolidated.safetensors")) is not None:
        return [files]
    paths = sorted([*folder.glob("consolidated.*.pth"), *folder.glob("consolidated.*.pt")])
    if not paths:
        raise ValueError(f"{folder}: no weights; looked for consolidated.safetensors and consolidated.NN.pth")
    if [path.name.split(".")[1] for path in paths] != [f"{i:02d}" for i in range(len(paths))]:
        names = ", ".join(path.name for path in paths)
        raise ValueError(f"{folder}: a file is missing or a number occurs twice: {names}")
    return [tensors(require_inside(folder, path)) for path in paths]
