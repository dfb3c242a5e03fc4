"""GGUF, llama.cpp's format: metadata, vocabulary and weights in one file, by the `gguf` package.

Its table of names says how llama.cpp calls Hugging Face's tensors; `KEYS` is the same for a config.json.
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from collections import Counter
from contextlib import closing
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dunes.checkpoint.files.lazy_tensor import LazyTensor, Weights, in_memory, renamed
from dunes.checkpoint.forms.architecture import Architecture
from dunes.checkpoint.forms.native import to_halves
from dunes.extra import extra
from dunes.models import FAMILIES
from dunes.models.names import Names, identity, name, to_theirs
from dunes.models.rope import yarn_scale
from dunes.parts.position import Linear, Llama3, Scaling, Unscaled, Yarn, base_frequencies
from dunes.text import Tokenizer
from dunes.text.gguf_vocabulary import vocabulary_fields

ARCHITECTURES = {
    **dict.fromkeys(("llama", "mistral", "mixtral"), "llama"),
    **{family: family for family in ("arcee", "qwen2", "qwen3", "gpt2")},
    "qwen3_moe": "qwen3moe",
}
"""llama.cpp's architecture of each family."""
PAIRED = ("llama", "arcee")
"""Architectures that rotate adjacent dimensions, as Meta's own code does."""
UNBIASED = ("arcee", "qwen3", "qwen3moe")
"""Architectures without biases."""
TYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "q8_0": "Q8_0", "q4_0": "Q4_0"}
EXACT = ("ffn_gate_inp", "position_embd")
"""Matrices that llama.cpp wants in float32."""
BLOCK = 32
"""Elements in a block of the quantized types."""
FREQUENCIES = "rope_freqs.weight"
"""What llama.cpp divides each rotary frequency by: LLaMA 3's scaling."""

KEYS = {
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "sliding_window": "attention.sliding_window",
    "num_local_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "n_layer": "block_count",
    "n_embd": "embedding_length",
    "n_inner": "feed_forward_length",
    "n_head": "attention.head_count",
    "n_positions": "context_length",
    "layer_norm_epsilon": "attention.layer_norm_epsilon",
}
"""The keys of a config.json, and what follows the architecture's name in a GGUF file."""


def write(
    path: Path, model: Architecture, weights: Weights, tokenizer: Tokenizer | None, dtype: str
) -> Counter[str]:
    """Write a model's `weights`, by its own names, in one of TYPES; returns the number of tensors of each type.

    Vectors, routers and learned positions stay in float32. In quantized files, a matrix whose rows are not made of
    blocks of 32 is float16, and in q4_0, embedding and head are q8_0. Raises ValueError for what llama.cpp cannot
    express, before the file is opened, and for values that the dtype cannot hold.
    """
    package, kind = extra("gguf", "gguf"), TYPES[dtype]
    fields = _fields(model, tokenizer)
    conversions, unknown = to_theirs(weight_names(model), weights)
    assert not unknown, "a family has a name for each of its weights"
    tensors = renamed(conversions, weights) | _frequencies(model)
    types = {key: _type(key, tensor.shape, kind) for key, tensor in tensors.items()}
    numbers = {key: package.GGMLQuantizationType[types[key]] for key in tensors}
    with closing(package.GGUFWriter(path, ARCHITECTURES[model.family])) as writer:
        writer.add_file_type(package.LlamaFileType["ALL_F32" if kind == "F32" else f"MOSTLY_{kind}"])
        writer.add_quantization_version(package.GGML_QUANT_VERSION)
        for key, value in fields.items():
            _add(writer, key, value)
        for key, tensor in tensors.items():
            block, size = package.GGML_QUANT_SIZES[numbers[key]]
            nbytes = prod(tensor.shape) // block * size
            writer.add_tensor_info(key, tensor.shape, np.dtype(np.float32), nbytes, raw_dtype=numbers[key])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for key, tensor in tensors.items():
            writer.write_tensor_data(_encode(tensor, numbers[key]))
            tensor.release()
    return Counter(types.values())


def _add(writer: Any, key: str, value: Any) -> None:
    names = {bool: "bool", int: "uint32", float: "float32", str: "string", list: "array", tuple: "array"}
    getattr(writer, f"add_{names[type(value)]}")(key, value)


def _type(key: str, shape: tuple[int, ...], kind: str) -> str:
    if len(shape) == 1 or any(part in key for part in EXACT):
        return "F32"
    if kind == "Q4_0" and not key.startswith("blk."):
        kind = "Q8_0"
    return "F16" if kind[0] == "Q" and shape[-1] % BLOCK else kind


def _encode(tensor: LazyTensor, number: Any) -> Any:
    """A tensor's bytes in one of the package's types. Raises ValueError for values that it cannot hold."""
    values = tensor.read().float().numpy()
    with np.errstate(over="ignore", invalid="ignore"):
        encoded = extra("gguf", "gguf").quantize(values, number)
        decoded = extra("gguf", "gguf").dequantize(encoded, number)
    if not np.isfinite(decoded).all():
        raise ValueError(f"{tensor.origin}: has values that {number.name} cannot hold; use --dtype float32")
    return encoded


def weight_names(model: Architecture) -> Names:
    """The tensors' names in a GGUF file, with the experts stacked."""
    package, architecture = extra("gguf", "gguf"), ARCHITECTURES[model.family]
    number = {text: number for number, text in package.MODEL_ARCH_NAMES.items()}[architecture]
    table, names = package.get_tensor_name_map(number, 1), []
    for rule in FAMILIES[model.family].NAMES:
        key = table.get_name(rule.theirs.replace("{i}", "0").replace("{e}.", ""), (".weight", ".bias"))
        ours, load, save = rule.ours, identity, identity
        if rule.ours[0].rpartition(".")[0].endswith(("attn.q", "attn.k")) and architecture in PAIRED:
            heads = model.config.heads if ".q." in ours[0] else model.config.kv_heads
            load, save = partial(to_halves, heads=heads), partial(to_pairs, heads=heads)
        if "{e}" in rule.theirs:
            ours = tuple(ours[0].replace("{e}", str(e)) for e in range(model.config.experts))
            load, save = partial(Tensor.flatten, end_dim=1), partial(_stack, count=len(ours))
        names.append(name(key.replace(".0.", ".{i}."), *ours, load=load, save=save))
    return names


def to_pairs(weight: Tensor, heads: int) -> Tensor:
    """The inverse of `to_halves`: dimensions i, i + D/2 of a head become 2i, 2i+1."""
    return weight.view(heads, 2, -1, *weight.shape[1:]).transpose(1, 2).flatten(0, 2)


def _stack(weight: Tensor, count: int) -> Tensor:
    return weight.reshape(count, -1, weight.shape[1])


def _fields(model: Architecture, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """The metadata of a model. Raises ValueError for what llama.cpp cannot express."""
    hf, architecture = FAMILIES[model.family].to_hf(model.config), ARCHITECTURES[model.family]
    if architecture in UNBIASED and (hf.get("attention_bias") or hf.get("mlp_bias")):
        raise ValueError(f"llama.cpp's {architecture} has no biases, this model has; export it with --to hf")
    if not hf.get("norm_topk_prob", True):
        raise ValueError(f"llama.cpp's {architecture} renormalises experts' weights, this model does not")
    fields = {key: hf[ours] for ours, key in KEYS.items() if hf.get(ours) is not None}
    if window := hf.get("sliding_window"):  # which llama.cpp ignores; up to there the model is the same
        fields["context_length"] = min(window, fields["context_length"])
    if "head_dim" in hf:
        fields |= {"attention.value_length": hf["head_dim"], "rope.dimension_count": hf["head_dim"]}
        fields |= _rope_fields(model.config.scaling)
    fields = {
        f"{architecture}.{key}": value for key, value in (fields | {"vocab_size": model.config.vocab}).items()
    }
    vocabulary = {"ggml.model": "none"} if tokenizer is None else vocabulary_fields(tokenizer, model.config.vocab)
    return fields | {f"tokenizer.{key}": value for key, value in vocabulary.items()}


def _rope_fields(scaling: Scaling) -> dict[str, Any]:
    match scaling:
        case Linear():
            return {"rope.scaling.type": "linear", "rope.scaling.factor": float(scaling.factor)}
        case Yarn():
            if (scaling.beta_fast, scaling.beta_slow, scaling.truncate) != (32.0, 1.0, True):
                raise ValueError("llama.cpp's YaRN has beta_fast 32, beta_slow 1 and truncate, this model has not")
            return {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": float(scaling.factor),
                "rope.scaling.original_context_length": scaling.length,
                "rope.scaling.attn_factor": scaling.attention_factor / yarn_scale(scaling.factor),
            }
        case Llama3():
            return {"rope.scaling.original_context_length": scaling.length}
    assert isinstance(scaling, Unscaled)
    return {}


def _frequencies(model: Architecture) -> dict[str, LazyTensor]:
    """The divisors of LLaMA 3's rotary frequencies; none for other scalings."""
    scaling = getattr(model.config, "scaling", None)
    if not isinstance(scaling, Llama3):
        return {}
    config, cpu = model.config, torch.device("cpu")
    scaled = scaling.inverse_frequencies(config.head_dim, config.rope_base, cpu)
    return in_memory({FREQUENCIES: base_frequencies(config.head_dim, config.rope_base, cpu) / scaled})
