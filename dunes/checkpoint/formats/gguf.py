"""Read and write GGUF, llama.cpp's file format for metadata, vocabulary and weights, with the `gguf` package.

The package maps names of tensors from Hugging Face to llama.cpp; `KEYS` maps the keys of a config.json.
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from collections import Counter
from collections.abc import Mapping
from contextlib import closing
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dunes.checkpoint.architecture import Architecture
from dunes.checkpoint.formats.native import to_halves
from dunes.checkpoint.weights.lazy_tensor import (
    LazyTensor,
    MappedFile,
    Weights,
    computed,
    hf_weights,
    in_memory,
    renamed,
    shape_error,
)
from dunes.checkpoint.weights.safetensors_file import check_name, quote
from dunes.extra import extra
from dunes.files import atomic
from dunes.models import FAMILIES, config_values
from dunes.models.config_values import quotient, scaling_to_hf, yarn_scale
from dunes.models.names import Names, identity, name, to_ours
from dunes.parts.position import Linear, Llama3, Scaling, Unscaled, Yarn, base_frequencies
from dunes.text import Tokenizer
from dunes.text.gguf_file import TensorInfo, read_header
from dunes.text.gguf_vocabulary import vocabulary_fields
from dunes.units import format_bytes, plural

ARCHITECTURES = {
    **dict.fromkeys(("llama", "mistral", "mixtral"), "llama"),
    **{family: family for family in ("arcee", "qwen2", "qwen3", "olmo2", "gpt2")},
    "qwen3_moe": "qwen3moe",
}
"""llama.cpp's name of the architecture, for each supported family."""
PAIRED = ("llama", "arcee")
"""Architectures whose rotary embedding rotates adjacent dimensions, as in Meta's code."""
UNBIASED = ("arcee", "qwen3", "qwen3moe", "olmo2")
"""Architectures without biases."""
TYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "q8_0": "Q8_0", "q4_0": "Q4_0"}
UNROUNDED = ("ffn_gate_inp", "position_embd")
"""Substrings in the names of matrices that llama.cpp needs in float32."""
DENSE = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
BLOCK = 32
"""Number of elements in a block of the quantized types."""
FREQUENCIES = "rope_freqs.weight"
"""Name of the tensor with the divisors of the rotary frequencies in LLaMA 3's scaling."""

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
}
"""Keys of a config.json, mapped to GGUF's metadata keys without the architecture's prefix."""
GPT2_KEYS = {
    "n_layer": "block_count",
    "n_embd": "embedding_length",
    "n_inner": "feed_forward_length",
    "n_head": "attention.head_count",
    "n_positions": "context_length",
    "layer_norm_epsilon": "attention.layer_norm_epsilon",
}
ROPE_KEYS = (
    *("rope.dimension_count", "rope.scale_linear", "rope.scaling.type", "rope.scaling.factor"),
    *("rope.scaling.original_context_length", "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow"),
)
"""Metadata keys on the rotary embedding, which are read for all architectures except gpt2."""
UNUSED = ("vocab_size", "tensor_data_layout", "rope.scaling.finetuned", "pooling_type")
"""Metadata keys that do not affect the logits."""
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("attention.causal", "expert_weights_norm"), (True,)),
    **dict.fromkeys(("logit_scale", "embedding_scale", "residual_scale", "expert_weights_scale"), (0.0, 1.0)),
    **dict.fromkeys(("expert_gating_func", "expert_group_count", "expert_group_used_count"), (0, 1)),
    **dict.fromkeys(("rope.scaling.alpha", "rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor"), (1.0,)),
    **dict.fromkeys(("attention.clamp_kqv", "attention.max_alibi_bias", "attention.sliding_window"), (0,)),
    **dict.fromkeys((f"{part}_logit_softcapping" for part in ("attn", "router", "final")), (0,)),
    **dict.fromkeys(("leading_dense_block_count", "nextn_predict_layers", "moe_every_n_layers"), (0,)),
    **dict.fromkeys(("expert_shared_count", "expert_shared_feed_forward_length"), (0,)),
    **dict.fromkeys(("use_parallel_residual", "swin_norm", "rope.scaling.yarn_log_multiplier"), (0,)),
}
"""Permitted values of metadata keys that are not read, such as 0 for a feature that is off."""


def write(
    out: Path, architecture: Architecture, weights: Weights, tokenizer: Tokenizer | None, dtype: str | None
) -> str:
    """Write a GGUF file; returns a line on the file. `dtype` is one of TYPES, by default the most common dtype.

    Raises ValueError, and writes nothing, in the cases described at `write_file`.
    """
    stored = Counter(str(w.dtype).removeprefix("torch.") for w in weights.values())
    type_name = dtype or stored.most_common(1)[0][0]
    if type_name not in TYPES:
        raise ValueError(f"{out}: the model is stored in {type_name}; choose --dtype {'|'.join(TYPES)}")
    out.parent.mkdir(parents=True, exist_ok=True)
    counts = atomic.replace_file(out, lambda path: write_file(path, architecture, weights, tokenizer, type_name))
    listed = ", ".join(f"{plural(n, 'tensor')} in {name}" for name, n in counts.most_common())
    return f"{listed}; {format_bytes(out.stat().st_size)}; read back: equal{window_note(architecture)}"


def write_file(
    path: Path, model: Architecture, weights: Weights, tokenizer: Tokenizer | None, dtype: str
) -> Counter[str]:
    """Write `weights`, by the model's names, in `dtype` (one of TYPES); returns the number of tensors by type.

    Vectors, routers and learned positions stay in float32. In quantized files, matrices whose row length is no
    multiple of 32 are float16; in q4_0 files, embedding and head are q8_0. The file is read back and compared, one
    tensor in memory at a time. Raises ValueError before writing if llama.cpp does not support the model. Later,
    raises ValueError if a value overflows the dtype, or if the file reads back with other weights.
    """
    package, kind, fields = extra("gguf", "gguf"), TYPES[dtype], _fields(model, tokenizer)
    weights = {**weights, **_frequencies(model)}
    names = [*weight_names(model), name(FREQUENCIES, FREQUENCIES)]
    theirs = hf_weights(names, weights)
    numbers = {key: package.GGMLQuantizationType[_type(key, t.shape, kind)] for key, t in theirs.items()}
    with closing(package.GGUFWriter(path, _architecture(model.family))) as writer:
        writer.add_file_type(package.LlamaFileType["ALL_F32" if kind == "F32" else f"MOSTLY_{kind}"])
        writer.add_quantization_version(package.GGML_QUANT_VERSION)
        for key, value in fields.items():
            _add(writer, key, value)
        for key, tensor in theirs.items():
            block, size = package.GGML_QUANT_SIZES[numbers[key]]
            nbytes = prod(tensor.shape) // block * size
            writer.add_tensor_info(key, tensor.shape, np.dtype(np.float32), nbytes, raw_dtype=numbers[key])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for key, tensor in theirs.items():
            writer.write_tensor_data(_encode(tensor, numbers[key])[0])
            tensor.release()
    _verify(path, names, weights, numbers)
    return Counter(number.name for number in numbers.values())


def _architecture(family: str) -> str:
    """llama.cpp's name of a family. Raises ValueError for a family that cannot be written as GGUF."""
    if family not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        remedy = "train a new model with --family arcee" if family == "dunes" else "export it with --to hf"
        raise ValueError(f"GGUF files cannot be written for {family}, only for {known}; {remedy}")
    return ARCHITECTURES[family]


def _add(writer: Any, key: str, value: Any) -> None:
    names = {bool: "bool", int: "uint32", float: "float32", str: "string", list: "array", tuple: "array"}
    getattr(writer, f"add_{names[type(value)]}")(key, value)


def _type(key: str, shape: tuple[int, ...], kind: str) -> str:
    if len(shape) == 1 or any(part in key for part in UNROUNDED):
        return "F32"
    if kind == "Q4_0" and not key.startswith("blk."):
        kind = "Q8_0"
    return "F16" if kind[0] == "Q" and shape[-1] % BLOCK else kind


def _encode(tensor: LazyTensor, number: Any) -> tuple[Any, Any]:
    """A tensor's bytes in a type of the `gguf` package, and the dequantized values.

    Raises ValueError for values that overflow the type.
    """
    package, values = extra("gguf", "gguf"), tensor.read().float().numpy()
    with np.errstate(over="ignore", invalid="ignore"):
        encoded = package.quantize(values, number)
        decoded = package.dequantize(encoded, number)
    if not np.isfinite(decoded).all():
        remedy = "use --dtype float32" if np.isfinite(values).all() else "list them: dunes inspect --values"
        raise ValueError(f"{tensor.origin}: has values that {number.name} cannot hold; {remedy}")
    return encoded, decoded


def _verify(path: Path, names: Names, weights: Weights, numbers: Mapping[str, Any]) -> None:
    """Raise ValueError unless the file has these weights, rounded to the file's types."""
    files = tensors(path)
    for key, number in numbers.items():
        conversions, _ = to_ours(names, {key: files[key].shape})
        for ours, tensor in renamed(conversions, in_memory({key: files[key].read()})).items():
            if not np.array_equal(tensor.read().float().numpy(), _encode(weights[ours], number)[1]):
                raise ValueError(f"{weights[ours].origin}: the written file has other values; check the disk")
            weights[ours].release()
        files[key].release()


def weight_names(model: Architecture) -> Names:
    """The table of a model's tensor names in GGUF, where experts are stacked."""
    package, architecture = extra("gguf", "gguf"), _architecture(model.family)
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
            load, save = partial(Tensor.flatten, end_dim=1), partial(torch.unflatten, dim=0, sizes=(len(ours), -1))
        names.append(name(key.replace(".0.", ".{i}."), *ours, load=load, save=save))
    return names


def to_pairs(weight: Tensor, heads: int) -> Tensor:
    """The inverse of `to_halves`: dimensions i, i + D/2 of each head become 2i, 2i+1."""
    return weight.view(heads, 2, -1, *weight.shape[1:]).transpose(1, 2).flatten(0, 2)


def _fields(model: Architecture, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """The metadata of a model. Raises ValueError for models that llama.cpp does not support."""
    hf, architecture = FAMILIES[model.family].to_hf(model.config), _architecture(model.family)
    if architecture in UNBIASED and (hf.get("attention_bias") or hf.get("mlp_bias")):
        raise ValueError(f"llama.cpp's {architecture} supports no biases, which this model has; use --to hf")
    if architecture == "olmo2" and hf["tie_word_embeddings"]:
        raise ValueError("llama.cpp's olmo2 needs an untied head, but this model's is tied; use --to hf")
    if not hf.get("norm_topk_prob", True):
        raise ValueError(f"llama.cpp's {architecture} renormalises experts' weights, but this model does not")
    keys = GPT2_KEYS if architecture == "gpt2" else KEYS
    fields = {key: hf[ours] for ours, key in keys.items() if hf.get(ours) is not None}
    if hf.get("sliding_window"):
        fields["context_length"] = _context_length(hf)
    if "head_dim" in hf:
        fields |= {"attention.value_length": hf["head_dim"], "rope.dimension_count": hf["head_dim"]}
        fields |= _rope_fields(model.config.scaling)
    fields["vocab_size"] = model.config.vocab
    fields = {f"{architecture}.{key}": value for key, value in fields.items()}
    vocabulary = {"ggml.model": "none"} if tokenizer is None else vocabulary_fields(tokenizer, model.config.vocab)
    return fields | {f"tokenizer.{key}": value for key, value in vocabulary.items()}


def _context_length(hf: Mapping[str, Any]) -> int:
    """The context length, cut to the sliding window, since llama.cpp ignores sliding windows."""
    return int(min(hf["sliding_window"] or hf["max_position_embeddings"], hf["max_position_embeddings"]))


def window_note(model: Architecture) -> str:
    """Note for users if the context length is cut to the sliding window; otherwise empty."""
    hf = FAMILIES[model.family].to_hf(model.config)
    if not hf.get("sliding_window") or (cut := _context_length(hf)) == (length := hf["max_position_embeddings"]):
        return ""
    return f"; context length cut from {length} to {cut}, the sliding window, which llama.cpp ignores"


def _rope_fields(scaling: Scaling) -> dict[str, Any]:
    match scaling:
        case Linear():
            return {"rope.scaling.type": "linear", "rope.scaling.factor": float(scaling.factor)}
        case Yarn():
            if (scaling.beta_fast, scaling.beta_slow, scaling.truncate) != (32.0, 1.0, True):
                raise ValueError("llama.cpp's YaRN has beta_fast 32, beta_slow 1 and truncate; this model differs")
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
    """The tensor of rotary divisors for LLaMA 3's scaling; empty for other scalings."""
    scaling = getattr(model.config, "scaling", None)
    if not isinstance(scaling, Llama3):
        return {}
    config, cpu = model.config, torch.device("cpu")
    scaled = scaling.inverse_frequencies(config.head_dim, config.rope_base, cpu)
    return in_memory({FREQUENCIES: base_frequencies(config.head_dim, config.rope_base, cpu) / scaled})


# --- reading


def tensors(path: Path) -> dict[str, LazyTensor]:
    """Tensors of a GGUF model, which may be split into several files; quantized tensors become float32 when read.

    Raises ValueError for an unsafe or duplicate name, an unknown type, and a tensor that exceeds the file.
    """
    files, infos = dict[str, LazyTensor](), read_header(path).tensors
    mapped = {part: MappedFile(part) for part in {info.path for info in infos}}
    for info in infos:
        if check_name(info.name) in files:
            raise ValueError(f"two tensors are called {quote(info.name)}; fetch the file again")
        files[info.name] = _lazy_tensor(mapped[info.path], info)
    return files


def _lazy_tensor(mapped: MappedFile, info: TensorInfo) -> LazyTensor:
    package, tensor = extra("gguf", "gguf"), f"tensor {quote(info.name)}"
    kind: Any = info.type
    try:
        kind = number = package.GGMLQuantizationType(info.type)
        block, size = package.GGML_QUANT_SIZES[number]
        package.dequantize(np.zeros((1, size), np.uint8), number)
    except (ValueError, NotImplementedError):
        remedy = "convert the file: llama-quantize --allow-requantize FILE OUT F16"
        name = getattr(kind, "name", kind)
        raise ValueError(f"{tensor} has the unsupported type {name}; {remedy}") from None
    rows = info.shape[-1] // block if info.shape and info.shape[-1] % block == 0 else None
    if reason := "has rows that are not whole blocks" if rows is None else shape_error(info.shape):
        raise ValueError(f"{tensor} {reason}; fetch the file again")
    if info.offset + prod(info.shape) // block * size > mapped.size:
        raise ValueError(f"{tensor} exceeds the file's {mapped.size} bytes; fetch the file again")
    if number.name in DENSE:
        return mapped.lazy(info.name, info.offset, info.shape, DENSE[number.name])
    raw = mapped.lazy(info.name, info.offset, (*info.shape[:-1], (rows or 0) * size), torch.uint8)
    read = lambda: torch.from_numpy(package.dequantize(raw.read().numpy(), number))
    return computed(info.shape, torch.float32, raw.origin, read, [raw])


def hf_config(path: Path, files: Weights) -> dict[str, Any]:
    """The config.json equivalent to a file's metadata and tensors.

    Raises ValueError for an unsupported architecture, KeyError for a missing key.
    """
    fields = read_header(path).fields
    architecture = fields["general.architecture"]
    prefix = f"{architecture}."
    known = {key.removeprefix(prefix): value for key, value in fields.items() if key.startswith(prefix)}
    if architecture not in ARCHITECTURES.values():
        raise ValueError(f"architecture {quote(architecture)} is not one of {', '.join(ARCHITECTURES.values())}")
    keys = GPT2_KEYS if architecture == "gpt2" else KEYS
    hf = {ours: known[key] for ours, key in keys.items() if key in known}
    _refuse_other_keys(architecture, known)
    mostly = {"1": "float16", "32": "bfloat16"}.get(str(fields.get("general.file_type")), "float32")
    hf |= {"model_type": _family(architecture, known)}
    hf |= {"vocab_size": files["token_embd.weight"].shape[0], "tie_word_embeddings": "output.weight" not in files}
    if architecture == "gpt2":
        hf |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    else:
        biases = {"attention_bias": "blk.0.attn_output.bias", "mlp_bias": "blk.0.ffn_down.bias"}
        hf |= {key: bias in files for key, bias in biases.items()} | _rope_scaling(hf, known, files)
        hf = {"rope_theta": 10_000.0, "norm_topk_prob": True} | hf
    family = FAMILIES[hf["model_type"]]
    return {**family.to_hf(family.from_hf(hf)), "dtype": mostly}


def _refuse_other_keys(architecture: str, known: Mapping[str, Any]) -> None:
    """Raise ValueError for a key that is not read and may affect the logits."""
    read = {*UNUSED, *(GPT2_KEYS.values() if architecture == "gpt2" else (*KEYS.values(), *ROPE_KEYS))}
    read -= set() if architecture == "llama" else {"attention.sliding_window"}
    width = config_values.size(known, "attention.key_length", 0) if "attention.key_length" in read else 0
    width = width or quotient(known, "embedding_length", "attention.head_count")
    yarn = known.get("rope.scaling.type") == "yarn"
    neutral = {**NEUTRAL, "attention.key_length": (width,), "attention.value_length": (width,)}
    neutral |= {"attention.scale": (0.0, float(str(np.float32(width**-0.5))))}
    neutral |= {"attention.head_count_kv": (known.get("attention.head_count"),)}
    neutral |= {"rope.scaling.yarn_ext_factor": (-1.0, 1.0 if yarn else 0.0)}
    read |= {"rope.scaling.attn_factor"} if yarn else set()
    for key in known.keys() - read:
        if not any(np.array_equal(known[key], value) for value in neutral.get(key, ())):
            raise ValueError(
                f"{quote(f'{architecture}.{key}')} is {quote(known[key])}, which is not supported; "
                f"expected {' or '.join(map(str, neutral.get(key, ('none',))))}"
            )


def _family(architecture: str, known: Mapping[str, Any]) -> str:
    if architecture == "llama" and known.get("expert_count"):
        return "mixtral"
    if architecture == "llama" and known.get("attention.sliding_window"):
        return "mistral"
    return next(family for family, name in ARCHITECTURES.items() if name == architecture)


def _rope_scaling(hf: Mapping[str, Any], known: Mapping[str, Any], files: Weights) -> dict[str, Any]:
    width = hf.get("head_dim") or quotient(hf, "hidden_size", "num_attention_heads")
    rotated = {"partial_rotary_factor": config_values.number(known, "rope.dimension_count", width) / width}
    length = known.get("rope.scaling.original_context_length")
    # As in llama.cpp, the default type is linear, and the default factor is 1; `scale_linear` is its old key.
    kind = known.get("rope.scaling.type", "linear")
    given = known.get("rope.scaling.factor") or known.get("rope.scale_linear") or 1.0
    factor = config_values.number({"rope.scaling.factor": given}, "rope.scaling.factor")
    if FREQUENCIES in files:
        if kind not in ("none", "linear") or (kind == "linear" and factor != 1.0):
            raise ValueError(
                f"rope.scaling is {kind} by {factor:g} and {FREQUENCIES} exists; expected only one of them"
            )
        return rotated | {"rope_scaling": _llama3(hf, width, length or 8192, files[FREQUENCIES].read())}
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return rotated
    rope = {"rope_type": kind, "factor": factor, "original_max_position_embeddings": length}
    if kind == "yarn":
        multiple = config_values.number(known, "rope.scaling.attn_factor", 1.0)  # in float32
        rope["attention_factor"] = yarn_scale(factor) if multiple == 1 else round(multiple * yarn_scale(factor), 6)
        rope |= {key: known.get(f"rope.scaling.yarn_{key}") for key in ("beta_fast", "beta_slow")}
    return rotated | {"rope_scaling": rope}


def _llama3(hf: Mapping[str, Any], width: int, length: int, divisors: Tensor) -> dict[str, Any]:
    """LLaMA 3's `rope_scaling` with the frequency factors 1 and 4. Raises ValueError if it has other divisors."""
    scaling, base = Llama3(float(divisors.max()), 1.0, 4.0, length), hf.get("rope_theta", 10_000.0)
    cpu = torch.device("cpu")
    expected = base_frequencies(width, base, cpu) / scaling.inverse_frequencies(width, base, cpu)
    if divisors.shape != expected.shape or not torch.allclose(divisors, expected, rtol=1e-5):
        raise ValueError(f"{FREQUENCIES} is not LLaMA 3's scaling of rotary positions, the only one supported")
    return scaling_to_hf(scaling)
