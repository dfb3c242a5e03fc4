"""Export a quantized model as a Hugging Face folder with packed weights in compressed-tensors' format.

The `quantization_config` in config.json lists the quantization schemes, each with the names of its layers.
transformers, vLLM and others read the folder.
"""

# Shapes: I inputs, O outputs, G groups of a row.

from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dunes import checkpoint, tree
from dunes.augment import Adapted, dequantize
from dunes.augment.quantized import Grid, GroupInt, Int8, Quantized, pack, unpack
from dunes.checkpoint.architecture import Architecture
from dunes.checkpoint.formats.quantized_weights import BITS, FORMAT, NAME, PACKED
from dunes.checkpoint.open import readable_folder
from dunes.checkpoint.verify import EXACT, check_written, model_logits
from dunes.checkpoint.verify import PACKED as TOLERANCE
from dunes.checkpoint.weights.lazy_tensor import in_memory
from dunes.checkpoint.write import Edit, hf_parts, inherited, require_described, rewrite, special_ids, write_model
from dunes.models import written_names
from dunes.models.names import to_theirs
from dunes.parts import Decoder
from dunes.units import format_bytes, plural

ZERO_POINTS = (
    "; it has zero points, which transformers 5.23 and compressed-tensors 0.20 do not read in a folder: "
    "for these tools, quantize with --symmetric"
)
"""https://github.com/vllm-project/llm-compressor/issues/1618"""


def write(folder: Path, out: Path) -> str:
    """Write the quantized model in `folder` to `out` with packed codes; returns a line on the result.

    Raises ValueError, and writes nothing, if `out` exists, if the format cannot express a layer, or if the
    result's logits differ. Also raises ValueError for a model with adapters or without quantized layers.
    """
    folder = readable_folder(folder)
    return rewrite(folder, out, partial(_packed, folder, out))


def _packed(folder: Path, out: Path) -> Edit[str]:
    """The `Edit` for `rewrite`: the quantized model in a folder, with packed codes."""
    loaded = checkpoint.load(folder)
    model, tokenizer, length = loaded.model, loaded.tokenizer, loaded.context_length
    layers = {p.name: p.module for p in tree.places(model) if isinstance(p.module, Quantized)}
    if not layers or any(isinstance(m, Adapted) for m in model.modules()):
        raise ValueError(f"{folder}: needs quantized layers and no adapters; run dunes augment merge and quantize")
    packed = {name: _pack(layer, name) for name, layer in layers.items()}
    expected = model_logits(model, length)
    dequantize(model)
    described = require_described(model, length, folder)
    known, settings, weights = hf_parts(model, described)
    names = _their_names(model, described, packed)
    files = {key: tensor for key, tensor in weights.items() if key.removesuffix(".weight") not in names.values()}
    for place, (tensors, _) in packed.items():
        files |= in_memory({f"{names[place]}.{part}": tensor for part, tensor in tensors.items()})
    dtype = str(next(iter(layers.values())).dtype).removeprefix("torch.")
    config = settings | special_ids(tokenizer) | {"dtype": dtype, "torch_dtype": dtype}
    config |= {"quantization_config": _quantization_config({names[place]: s for place, (_, s) in packed.items()})}
    card = {**inherited(loaded.card), **known, "context_length": length, "changes": []}

    def compare(staged: Path) -> tuple[str, Mapping[str, Any]]:
        limit = EXACT if dtype == "float32" else TOLERANCE
        difference = check_written(staged, out, expected, length, "the model in the folder", limit)
        asymmetric = any("weight_zero_point" in tensors for tensors, _ in packed.values())
        report = (
            f"{plural(len(layers), 'layer')} packed, {format_bytes(sum(t.nbytes for t in files.values()))} of "
            f"tensors; the result's logits differ by {difference:.1e} (relative norm){ZERO_POINTS * asymmetric}"
        )
        return report, {"packed": {"layers": len(layers), "verified": difference}}

    write = partial(write_model, weights=files, config=config, card=card, tokenizer=(tokenizer, length))
    return write, compare


def _their_names(model: Decoder, described: Architecture, places: Iterable[str]) -> dict[str, str]:
    """The modules' names in Hugging Face's files. Raises ValueError if they store a weight in another layout."""
    weights, names = dict(model.named_parameters()), {}
    conversions, _ = to_theirs(written_names(described.family, described.config), weights)
    alone = {c.sources[0]: c for c in conversions if len(c.sources) == 1}
    for place in places:
        weight, conversion = weights[f"{place}.weight"], alone.get(f"{place}.weight")
        if conversion is None or not torch.equal(conversion.make([weight]), weight):
            raise ValueError(
                f"{place}: {described.family} stores this matrix in another layout, which cannot be packed"
            )
        names[place] = conversion.target.removesuffix(".weight")
    return names


def _pack(layer: Quantized, place: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors of a layer by the last part of their names, and the layer's scheme in the `quantization_config`.

    Raises ValueError for a layer that the format cannot express.
    """
    grid = Grid(8, symmetric=True) if isinstance(layer, Int8) else getattr(layer, "grid", None)
    if not isinstance(grid, Grid) or grid.bits not in BITS:
        raise ValueError(
            f"{place} is {type(layer).__name__} {grid or ''}; {NAME} supports int8 and int4 with integer zero "
            "points: quantize the dense model with --kind int4 or int8"
        )
    inputs, group = layer.in_features, grid.width(layer.in_features)
    if inputs % group:
        raise ValueError(f"{place}: has {inputs} inputs; {NAME} needs a multiple of {grid.group}")
    codes, scale, zero = _values(layer)
    tensors = {
        PACKED: _int32(pack(codes, grid.bits)),
        "weight_scale": scale.to(layer.dtype),
        "weight_shape": torch.tensor([layer.out_features, inputs]),
    }
    if not grid.symmetric:
        tensors["weight_zero_point"] = _int32(pack(zero.T, grid.bits)).T.contiguous()
    strategy = {"strategy": "group", "group_size": group} if group < inputs else {"strategy": "channel"}
    scheme = {"num_bits": grid.bits, "type": "int", "symmetric": grid.symmetric, "dynamic": False, **strategy}
    return tensors, scheme


def _values(layer: Quantized) -> tuple[Tensor, Tensor, Tensor]:
    """A layer's unsigned codes (O, I), its scales (O, G) and its zero points (O, G)."""
    if isinstance(layer, GroupInt):
        return unpack(layer.codes, layer.grid.bits, layer.in_features), *layer.qparams()
    assert isinstance(layer, Int8)
    return layer.codes.int() + 128, layer.scale, torch.full_like(layer.scale, 128)


def _int32(packed: Tensor) -> Tensor:
    """View rows of bytes (O, N), padded with zeros, as int32 (O, ceil(N / 4))."""
    return F.pad(packed, (0, -packed.shape[1] % 4)).contiguous().view(torch.int32)


def _quantization_config(schemes: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The `quantization_config` for config.json; `schemes` maps layers' names in the files to schemes."""
    distinct = {str(scheme): scheme for scheme in schemes.values()}.values()
    layers = [[name for name, other in schemes.items() if other == scheme] for scheme in distinct]
    return {
        "quant_method": NAME,
        "format": FORMAT,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {
            f"group_{i}": {"targets": names, "weights": scheme, "format": FORMAT}
            for i, (names, scheme) in enumerate(zip(layers, distinct, strict=True))
        },
    }
