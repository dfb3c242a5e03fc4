"""Quantized layers in the format of compressed-tensors, which transformers, vLLM and others read.

`pack-quantized` stores `X.weight_packed` (int32: the codes of a row, lowest bit first), `X.weight_scale` (one for
each row and group), `X.weight_zero_point` (packed along the rows, unless symmetric) and `X.weight_shape`.
`int-quantized`, which is only read, stores `X.weight` (int8) and `X.weight_scale` (one for each row). The
`quantization_config` in config.json lists the layers of each kind.
https://github.com/vllm-project/compressed-tensors
"""

# Shapes: I inputs, O outputs, G groups of a row.

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dunes.augment.quantized import Grid, GroupInt, Int8, Quantized, Steps, pack, unpack
from dunes.checkpoint.weights.lazy_tensor import LazyTensor, Weights, computed

NAME = "compressed-tensors"
FORMAT, INT_FORMAT, MIXED = "pack-quantized", "int-quantized", "mixed-precision"
PACKED = "weight_packed"
BITS = (4, 8)
"""Bits that its readers have kernels for."""


def layer_tensors(layer: Quantized, place: str) -> dict[str, Tensor]:
    """Tensors of a layer by the last part of their names, the inverse of `dense_weights`.

    Raises ValueError for a layer that the format cannot express.
    """
    grid, inputs = grid_of(layer, place), layer.in_features
    if inputs % grid.width(inputs):
        raise ValueError(f"{place}: its {inputs} inputs are no multiple of {grid.group}, as {NAME} needs them")
    codes, scale, zero = _values(layer)
    tensors = {
        PACKED: _int32(pack(codes, grid.bits)),
        "weight_scale": scale.to(layer.dtype),
        "weight_shape": torch.tensor([layer.out_features, inputs]),
    }
    if not grid.symmetric:
        tensors["weight_zero_point"] = _int32(pack(zero.T, grid.bits)).T.contiguous()
    return tensors


def grid_of(layer: Quantized, place: str) -> Grid:
    """The quantization grid of a layer. Raises ValueError for a layer that the format cannot express."""
    grid = Grid(8, symmetric=True) if isinstance(layer, Int8) else getattr(layer, "grid", None)
    if not isinstance(grid, Grid) or grid.real_zero or grid.bits not in BITS:
        raise ValueError(
            f"{place} is {type(layer).__name__} {grid or ''}; {NAME} has int8 and int4 with whole zero points: "
            "quantize the dense model with --kind int4 or int8"
        )
    return grid


def _values(layer: Quantized) -> tuple[Tensor, Tensor, Tensor]:
    """Unsigned codes (O, I), scales and zero points (O, G)."""
    if isinstance(layer, GroupInt):
        return unpack(layer.codes, layer.grid.bits, layer.in_features), *layer.steps()
    assert isinstance(layer, Int8)
    return layer.codes.int() + 128, layer.scale, torch.full_like(layer.scale, 128)


def _int32(packed: Tensor) -> Tensor:
    """Rows of bytes (O, N), padded with zeros, as int32 (O, ceil(N / 4))."""
    return F.pad(packed, (0, -packed.shape[1] % 4)).contiguous().view(torch.int32)


def quantization_config(layers: Mapping[str, Quantized]) -> dict[str, Any]:
    """The `quantization_config` of config.json, for layers by their names in the files."""
    groups: dict[tuple[Any, ...], list[str]] = {}
    for name, layer in layers.items():
        grid = grid_of(layer, name)
        width = grid.width(layer.in_features)
        group = width if width < layer.in_features else 0
        groups.setdefault((grid.bits, group, grid.symmetric), []).append(name)
    return {
        "quant_method": NAME,
        "format": FORMAT,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {
            f"group_{i}": {"targets": names, "weights": _scheme(*key), "format": FORMAT}
            for i, (key, names) in enumerate(groups.items())
        },
    }


def _scheme(bits: int, group: int, symmetric: bool) -> dict[str, Any]:
    strategy = {"strategy": "group", "group_size": group} if group else {"strategy": "channel"}
    return {"num_bits": bits, "type": "int", "symmetric": symmetric, "dynamic": False, **strategy}


def is_packed(quantization: Any) -> bool:
    """True if the `quantization_config` of a config.json describes this format."""
    return (
        isinstance(quantization, Mapping)
        and quantization.get("quant_method") == NAME
        and quantization.get("format") in (FORMAT, INT_FORMAT, MIXED)
    )


def dense_weights(files: Weights) -> dict[str, LazyTensor]:
    """The tensors, with the parts of each quantized weight replaced by a dense one, dequantized when read.

    Quantization of activations is ignored. Raises ValueError for parts that are missing or do not fit together,
    and for other numbers of bits than 4 and 8.
    """
    tensors = dict(files)
    for key in [key for key, tensor in files.items() if tensor.dtype == torch.int8]:
        tensors[key] = _dense_rows(files[key], tensors.pop(f"{key}_scale", None))
    for key in [key for key in files if key.endswith(f".{PACKED}")]:
        name = key.removesuffix(PACKED)
        names = ("weight_scale", "weight_zero_point", "weight_shape")
        parts = {part: tensors.pop(name + part) for part in (PACKED, *names) if name + part in files}
        tensors[f"{name}weight"] = _dense(parts, files[key].origin)
    return tensors


def _dense_rows(codes: LazyTensor, scale: LazyTensor | None) -> LazyTensor:
    """Int8 codes (O, I) times the scales (O, 1) of their rows, as a lazy tensor."""
    if scale is None or len(codes.shape) != 2 or scale.shape != (codes.shape[0], 1):
        raise ValueError(f"{codes.origin}: its scales do not fit int8 by row; download the file again")

    read = lambda: (codes.read().float() * scale.read().float()).to(scale.dtype)
    return computed(codes.shape, scale.dtype, codes.origin, read, (codes, scale))


def _dense(parts: Mapping[str, LazyTensor], origin: str) -> LazyTensor:
    try:
        rows, columns = parts["weight_shape"].read().flatten().tolist()
        scale, packed, zero = parts["weight_scale"], parts[PACKED], parts.get("weight_zero_point")
        bits = next(b for b in BITS if packed.shape == (rows, -(-columns * b // 32)))
        groups = scale.shape[1]
        fits = scale.shape == (rows, groups) and columns % groups == 0 and packed.dtype == torch.int32
        if not fits or (zero is not None and zero.shape != (-(-rows * bits // 32), groups)):
            raise ValueError
    except (KeyError, ValueError, IndexError, StopIteration, ArithmeticError):
        raise ValueError(
            f"{origin}: its scale, zero point and shape do not fit codes of 4 or 8 bits; download the file again"
        ) from None

    def read() -> Tensor:
        codes = unpack(packed.read().contiguous().view(torch.uint8), bits, columns).float()
        steps = Steps(scale.read().float(), torch.full((rows, groups), float(2 ** (bits - 1))))
        if zero is not None:
            steps = steps._replace(zero=unpack(zero.read().T.contiguous().view(torch.uint8), bits, rows).T.float())
        weight = (codes.view(rows, groups, -1) - steps.zero[..., None]) * steps.scale[..., None]
        return weight.flatten(1).to(scale.dtype)

    return computed((rows, columns), scale.dtype, origin, read, parts.values())
