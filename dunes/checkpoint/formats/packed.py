"""Export a quantized model as a Hugging Face folder with packed weights in compressed-tensors' format."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from dunes import checkpoint, tree
from dunes.augment import Adapted, dequantize
from dunes.augment.quantized import Quantized
from dunes.checkpoint.architecture import Architecture
from dunes.checkpoint.convert import Edit, rewrite
from dunes.checkpoint.folder import hf_parts, inherited, require_described, special_ids, write_model
from dunes.checkpoint.formats import compressed_tensors
from dunes.checkpoint.model_folder import readable_folder
from dunes.checkpoint.verify import EXACT, PACKED, check_written, model_logits
from dunes.checkpoint.weights.lazy_tensor import LazyTensor, in_memory
from dunes.models import FAMILIES
from dunes.models.names import to_theirs
from dunes.parts import Decoder
from dunes.units import format_bytes, plural

ZERO_POINTS = (
    "; it has zero points, with which transformers 5.23 and compressed-tensors 0.20 do not open a folder: "
    "quantize with --symmetric for these"
)
"""https://github.com/vllm-project/llm-compressor/issues/1618"""


def export_packed(folder: Path, out: Path) -> str:
    """Write the quantized model in `folder` to `out` with packed codes; returns a line on its contents.

    Raises ValueError if `out` exists, for a model without quantized layers, with adapters, or with layers that the
    format cannot express, and, with nothing written, if the result reads back with other logits.
    """
    folder = readable_folder(folder)
    return rewrite(folder, out, partial(_packed, folder, out))


def _packed(folder: Path, out: Path) -> Edit[str]:
    """The quantized model in a folder, with packed codes."""
    loaded = checkpoint.load(folder)
    model, length = loaded.model, loaded.context_length
    layers = {p.name: p.module for p in tree.places(model) if isinstance(p.module, Quantized)}
    if not layers or any(isinstance(m, Adapted) for m in model.modules()):
        raise ValueError(f"{folder}: needs quantized layers and no adapters: dunes augment merge, then quantize")
    packed = {name: compressed_tensors.layer_tensors(layer, name) for name, layer in layers.items()}
    expected = model_logits(model, length)
    dequantize(model)
    described = require_described(model, length, folder)
    known, settings, weights = hf_parts(model, described)
    names = _their_names(model, described, packed)
    files = _files(weights, names, packed)
    theirs = {names[name].removesuffix(".weight"): layer for name, layer in layers.items()}
    dtype = str(next(iter(layers.values())).dtype).removeprefix("torch.")
    config = settings | special_ids(loaded.tokenizer) | {"dtype": dtype, "torch_dtype": dtype}
    config |= {"quantization_config": compressed_tensors.quantization_config(theirs)}
    card = {**inherited(loaded.card), **known, "context_length": length, "changes": []}

    def compare(staged: Path) -> tuple[str, Mapping[str, Any]]:
        limit = EXACT if dtype == "float32" else PACKED
        difference = check_written(staged, out, expected, length, "that in the folder", limit)
        asymmetric = any("weight_zero_point" in tensors for tensors in packed.values())
        report = (
            f"{plural(len(layers), 'layer')} packed, {format_bytes(sum(t.nbytes for t in files.values()))} of "
            f"tensors; read back, logits differ by {difference:.1e} (relative norm){ZERO_POINTS * asymmetric}"
        )
        return report, {"packed": {"layers": len(layers), "verified": difference}}

    write = partial(write_model, weights=files, config=config, card=card, tokenizer=(loaded.tokenizer, length))
    return write, compare


def _their_names(model: Decoder, described: Architecture, packed: Any) -> dict[str, str]:
    """Names of the places' weights in Hugging Face's files. Raises ValueError for a weight in another layout."""
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
    """Tensors of the folder, with the packed parts in place of quantized weights."""
    files = {name: tensor for name, tensor in weights.items() if name not in names.values()}
    for place, tensors in packed.items():
        prefix = names[place].removesuffix("weight")
        files |= in_memory({prefix + key: tensor for key, tensor in tensors.items()})
    return files
