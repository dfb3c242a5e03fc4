"""Write a quantized model as a Hugging Face folder whose weights stay packed, in compressed-tensors' form."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dunes import checkpoint, tree
from dunes.augment import Adapted, dequantize
from dunes.augment.quantized import Quantized
from dunes.checkpoint.architecture import Architecture
from dunes.checkpoint.convert import exclusive_folder, require_new_folder
from dunes.checkpoint.export import NOT_INHERITED
from dunes.checkpoint.folder import (
    hf_parts,
    load_decoder,
    readable_folder,
    write_card,
    write_files,
    write_tokenizer,
)
from dunes.checkpoint.formats import compressed_tensors
from dunes.checkpoint.model_folder import CONFIG
from dunes.checkpoint.source import open_source
from dunes.checkpoint.verify import EXACT, distance, model_logits
from dunes.checkpoint.weights.lazy_tensor import LazyTensor, in_memory
from dunes.checkpoint.weights.safetensors_writer import write_tensors
from dunes.models import FAMILIES
from dunes.models.names import to_theirs
from dunes.parts import Decoder
from dunes.units import format_bytes, plural

ROUNDED = 0.05
"""How far logits may move in a narrower dtype than float32, to which scales are rounded, too (relative norm)."""
ZERO_POINTS = (
    "; it has zero points, with which transformers 5.23 and compressed-tensors 0.20 do not open a folder: "
    "quantize with --symmetric for these"
)
"""https://github.com/vllm-project/llm-compressor/issues/1618"""


def export_packed(folder: Path, out: Path) -> str:
    """Write the quantized model of `folder` to `out` with its codes; returns a line on what was written.

    Raises ValueError if `out` exists, for a model without quantized layers, with adapters, or with layers that
    the form cannot hold, and, with nothing written, if what was written reads back as another model.
    """
    folder = readable_folder(folder)
    require_new_folder(folder, out)
    loaded = checkpoint.load(folder)
    model, length = loaded.model, loaded.context_length
    layers = {p.name: p.module for p in tree.places(model) if isinstance(p.module, Quantized)}
    if not layers or any(isinstance(m, Adapted) for m in model.modules()):
        raise ValueError(f"{folder}: needs quantized layers and no adapters: dunes augment merge, then quantize")
    packed = {name: compressed_tensors.layer_tensors(layer, name) for name, layer in layers.items()}
    expected = model_logits(model, length)
    dequantize(model)
    if isinstance(described := checkpoint.hf_config_of(model, length), str):
        raise ValueError(f"{folder}: no Hugging Face config describes this model: {described}")
    known, settings, weights = hf_parts(model, described)
    names = _their_names(model, described, packed)
    files = _files(weights, names, packed)
    theirs = {names[name].removesuffix(".weight"): layer for name, layer in layers.items()}
    quantization = compressed_tensors.quantization_config(theirs)
    asymmetric = any("weight_zero_point" in tensors for tensors in packed.values())
    size = sum(t.nbytes for t in files.values())
    dtype = str(next(iter(layers.values())).dtype).removeprefix("torch.")
    lines: list[str] = []

    def fill(staged: Path) -> None:
        write_tensors(staged, files)
        config = settings | write_tokenizer(staged, loaded.tokenizer, length)
        config |= {"dtype": dtype, "torch_dtype": dtype, "quantization_config": quantization}
        (staged / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        facts = {k: v for k, v in loaded.card.items() if k not in NOT_INHERITED}
        card = {**facts, **known, "context_length": length, "changes": []}
        (staged / "dunes.json").write_text(json.dumps(card))
        difference = _compare(staged, expected, length, dtype, out)
        write_card(staged, card | {"packed": {"layers": len(layers), "verified": difference}})
        lines.append(
            f"{plural(len(layers), 'layer')} packed, {format_bytes(size)} of tensors; read back, logits differ by "
            f"{difference:.1e} (relative norm){ZERO_POINTS * asymmetric}"
        )

    with exclusive_folder(out):
        write_files(out, fill, size)
    return lines[0]


def _their_names(model: Decoder, described: Architecture, packed: Any) -> dict[str, str]:
    """The names in the files of these places' weights. Raises ValueError where a file has another matrix."""
    names = {}
    for name in packed:
        weight = model.get_parameter(f"{name}.weight")
        conversions, _ = to_theirs(FAMILIES[described.family].NAMES, [f"{name}.weight"])
        if len(conversions) != 1 or not torch.equal(conversions[0].make([weight]), weight):
            raise ValueError(
                f"{name}: {described.family} stores this matrix in another layout, which is not packed"
            )
        names[name] = conversions[0].target
    return names


def _files(weights: dict[str, LazyTensor], names: dict[str, str], packed: dict[str, Any]) -> dict[str, LazyTensor]:
    """The tensors of the folder, with the parts of packed ones in place of these."""
    files = {name: tensor for name, tensor in weights.items() if name not in names.values()}
    for place, tensors in packed.items():
        prefix = names[place].removesuffix("weight")
        files |= in_memory({prefix + key: tensor for key, tensor in tensors.items()})
    return files


def _compare(staged: Path, expected: Tensor, length: int, dtype: str, out: Path) -> float:
    """How far the logits of the written model are. Raises ValueError if that is too far."""
    difference = distance(expected, model_logits(load_decoder(open_source(staged)), length))
    if not difference <= (EXACT if dtype == "float32" else ROUNDED):
        raise ValueError(f"{out}: the written model differs by {difference:.1e} from that in the folder")
    return difference
