"""Read weights that other libraries have quantized, and dequantize them.

bitsandbytes (4 bits, as transformers writes it): `X.weight` has packed codes, two in a byte. Its parts are
`X.weight.absmax` (a scale for each block), `X.weight.quant_map` (the 16 levels) and
`X.weight.quant_state.bitsandbytes__nf4` (JSON as bytes). With double quantization, the scales are codes of one
byte, decoded by `nested_absmax`, `nested_quant_map` and an offset.
https://github.com/bitsandbytes-foundation/bitsandbytes

compressed-tensors: `pack-quantized` stores `X.weight_packed` (int32: the codes of a row, lowest bit first),
`X.weight_scale` (one for each row and group), `X.weight_zero_point` (packed along the rows; missing if
quantization is symmetric) and `X.weight_shape`. `int-quantized` stores `X.weight` (int8) and `X.weight_scale` (one
for each row). https://github.com/vllm-project/compressed-tensors

MXFP4 (gpt-oss): `X.P_blocks` (E, O, G, 16) stacks the codes of all experts, two floats of four bits in a byte, the
lower bits first. `X.P_scales` (E, O, G) has the exponent of a power of two, plus 127, for each 32 codes.
https://arxiv.org/abs/2310.10537

GPTQ: `X.qweight` (I * bits / 32, O) int32 has the codes of each column, lowest bits first. `X.scales` (G, O) and
`X.qzeros` (G, O * bits / 32) have a row for each group of inputs; `X.qzeros` is int32, packed along the rows.
`X.g_idx` (I), int32, has the group of each input, since act-order sorts inputs. Zero points are stored minus 1
except in `gptq_v2`. https://github.com/AutoGPTQ/AutoGPTQ/blob/main/auto_gptq/nn_modules/qlinear/qlinear_cuda.py
https://github.com/ModelCloud/GPTQModel/blob/main/gptqmodel/utils/model.py

AWQ (`gemm`): `X.qweight` (I, O / 8) and `X.qzeros` (G, O / 8) are int32. A word has the codes of 8 outputs, in the
order 0 2 4 6 1 3 5 7 from the lowest bits. `X.scales` (G, O) has a row for each group of successive inputs.
https://github.com/casper-hansen/AutoAWQ/blob/main/awq/modules/linear/gemm.py
"""

# Shapes: N codes, B blocks, E experts, I inputs, O outputs, G groups of a row, W words.

import json
from collections.abc import Callable, Mapping
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dunes.augment.change import float_dtype
from dunes.augment.quantized import unpack
from dunes.checkpoint.weights.lazy_tensor import LazyTensor, Weights, computed
from dunes.checkpoint.weights.safetensors_file import quote
from dunes.checkpoint.weights.state_dict_diff import FLOATS

STATE = ".quant_state.bitsandbytes__"
NAME = "compressed-tensors"
FORMAT, INT_FORMAT, MIXED = "pack-quantized", "int-quantized", "mixed-precision"
PACKED = "weight_packed"
BITS = (4, 8)
"""Supported bits per code, for which other programs that read compressed-tensors have kernels."""
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
FP4 = (*_MAGNITUDES, *(-x for x in _MAGNITUDES))
"""Floats of four bits (E2M1) by their codes."""
GPTQ_BITS = (2, 4, 8)
"""Supported bits per code. 3 bits are not supported, since GPTQModel has two layouts for them."""
AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""For each of 8 successive outputs, the position of its code in a word."""


def dense_weights(files: Weights, quantization: Any, config: Path) -> dict[str, LazyTensor]:
    """The files' tensors. One dense tensor, dequantized when read, replaces the parts of each quantized weight.

    Each stacked expert becomes a tensor of its own, `X.{e}.P`, so that a read dequantizes only one expert.
    `quantization` is the `quantization_config` of the config.json at `config`. Quantization of activations is
    ignored. Raises ValueError for an unknown quantization, and for parts that are missing or do not fit together.
    """
    settings = quantization if isinstance(quantization, dict) else {"quant_method": quantization}
    method = settings.get("quant_method")
    if method == "bitsandbytes" and settings.get("load_in_4bit") is True:
        return _blocks(files)
    if method == NAME and settings.get("format") in (FORMAT, INT_FORMAT, MIXED):
        return _rows(files)
    if method == "mxfp4":
        return _experts(files)
    if method == "gptq":
        bits, form = _known(settings, config, GPTQ_BITS, "gptq", "gptq_v2")
        return _words(files, partial(_gptq, bits, form == "gptq", settings.get("desc_act") is True), config)
    if method == "awq":
        _known(settings, config, (4,), "gemm")
        return _words(files, _awq, config)
    raise ValueError(
        f"{config}: quantized with {quote(method)}; supported are plain weights, bitsandbytes with four "
        "bits, packed compressed-tensors, MXFP4, GPTQ and AWQ; download one of these"
    )


# --- bitsandbytes


def _blocks(files: Weights) -> dict[str, LazyTensor]:
    tensors = dict(files)
    for key in [key for key in files if STATE in key]:
        name = key[: key.index(STATE)]
        parts = {k.removeprefix(name): tensors.pop(k) for k in files if k == name or k.startswith(f"{name}.")}
        state = _read_state(parts.pop(key.removeprefix(name)))
        tensors[name] = _dense_blocks(parts, state, files[key].origin)
    return tensors


def _read_state(tensor: LazyTensor) -> dict[str, Any]:
    try:
        state = json.loads(bytes(tensor.read().flatten().tolist()))
        rows, columns = state["shape"]
        if min(rows, columns, state["blocksize"], state.get("nested_blocksize", 1)) < 1:
            raise ValueError
        state["dtype"], state["offset"] = float_dtype(state["dtype"]), float(state.get("nested_offset", 0.0))
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ValueError(f"{tensor.origin}: no state of a weight in four bits; download the file again") from None
    return dict(state)


def _dense_blocks(parts: Weights, state: Mapping[str, Any], origin: str) -> LazyTensor:
    rows, columns = state["shape"]
    blocks = -(-rows * columns // state["blocksize"])
    expected = {"": -(-rows * columns // 2), ".absmax": blocks, ".quant_map": 16}
    if nested := "nested_blocksize" in state:
        expected |= {".nested_absmax": -(-blocks // state["nested_blocksize"]), ".nested_quant_map": 256}
    sizes = {name: prod(tensor.shape) if name else tensor.nbytes for name, tensor in parts.items()}
    if wrong := sorted(k for k in {*sizes, *expected} if sizes.get(k) != expected.get(k)):
        raise ValueError(
            f"{origin}: its part {wrong[0] or 'of codes'} has size {sizes.get(wrong[0], 0)}; expected "
            f"{expected.get(wrong[0], 0)}; download the file again"
        )

    def read() -> Tensor:
        values = {name: tensor.read().flatten() for name, tensor in parts.items()}
        scale = values[".absmax"]
        if nested:
            levels, outer = values[".nested_quant_map"], values[".nested_absmax"]
            scale = _scaled(levels, scale, outer, state["nested_blocksize"]) + state["offset"]
        packed = values[""].contiguous().view(torch.uint8)
        codes = torch.stack([packed >> 4, packed & 15], 1).flatten()[: rows * columns]
        weight = _scaled(values[".quant_map"], codes, scale, state["blocksize"])
        return weight.view(rows, columns).to(state["dtype"])

    return computed((rows, columns), state["dtype"], origin, read, parts.values())


def _scaled(levels: Tensor, codes: Tensor, scale: Tensor, block: int) -> Tensor:
    """Dequantize codes (N,) to float32. A value is the code's level, times the scale of its block of `block`
    codes; `scale` (B,) has a scale for each block.
    """
    blocks = F.pad(levels.float()[codes.int()], (0, -len(codes) % block)).view(-1, block)
    return (blocks * scale.float()[:, None]).flatten()[: len(codes)]


# --- compressed-tensors


def _rows(files: Weights) -> dict[str, LazyTensor]:
    tensors = dict(files)
    for key in [key for key, tensor in files.items() if tensor.dtype == torch.int8]:
        tensors[key] = _int8_rows(files[key], tensors.pop(f"{key}_scale", None))
    for key in [key for key in files if key.endswith(f".{PACKED}")]:
        name = key.removesuffix(PACKED)
        names = ("weight_scale", "weight_zero_point", "weight_shape")
        parts = {part: tensors.pop(name + part) for part in (PACKED, *names) if name + part in files}
        tensors[f"{name}weight"] = _packed_rows(parts, files[key].origin)
    return tensors


def _int8_rows(codes: LazyTensor, scale: LazyTensor | None) -> LazyTensor:
    """Int8 codes (O, I) times the scales (O, 1) of their rows, as a lazy tensor."""
    if scale is None or len(codes.shape) != 2 or scale.shape != (codes.shape[0], 1):
        raise ValueError(f"{codes.origin}: its scales do not fit int8 by row; download the file again")

    read = lambda: (codes.read().float() * scale.read().float()).to(scale.dtype)
    return computed(codes.shape, scale.dtype, codes.origin, read, (codes, scale))


def _packed_rows(parts: Mapping[str, LazyTensor], origin: str) -> LazyTensor:
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
        codes = _unpack(packed.read(), bits, columns).view(rows, groups, -1)
        offset = 2 ** (bits - 1) if zero is None else _unpack(zero.read().T, bits, rows).T[..., None]
        return ((codes - offset) * scale.read().float()[..., None]).flatten(1).to(scale.dtype)

    return computed((rows, columns), scale.dtype, origin, read, parts.values())


def _unpack(packed: Tensor, bits: int, count: int) -> Tensor:
    """Unpack `count` codes from each row of int32; returns them in float32."""
    return unpack(packed.contiguous().view(torch.uint8), bits, count).float()


# --- MXFP4


def _experts(files: Weights) -> dict[str, LazyTensor]:
    tensors = dict(files)
    for key in [key for key in files if key.endswith("_blocks")]:
        name = key.removesuffix("_blocks")
        codes, scale = tensors.pop(key), tensors.pop(f"{name}_scales", None)
        fits = codes.dtype == torch.uint8 and len(codes.shape) == 4 and codes.shape[3] == 16
        if not fits or scale is None or (scale.shape, scale.dtype) != (codes.shape[:3], torch.uint8):
            raise ValueError(f"{codes.origin}: its scales do not fit blocks of 32 codes; download the file again")
        experts, rows, groups, _ = codes.shape
        parent, _, part = name.rpartition(".")
        for e in range(experts):
            shape, read = (groups * 32, rows), partial(_expert, codes, scale, e)
            tensors[f"{parent}.{e}.{part}"] = computed(shape, torch.bfloat16, codes.origin, read, (codes, scale))
    return tensors


def _expert(codes: LazyTensor, scale: LazyTensor, expert: int) -> Tensor:
    """The matrix (I, O) of one of the stacked experts."""
    packed, exponents = codes.read()[expert], scale.read()[expert].int() - 127
    levels = torch.tensor(FP4)[torch.stack([packed & 15, packed >> 4], -1).int()]
    return torch.ldexp(levels.flatten(2), exponents[..., None]).flatten(1).mT.to(torch.bfloat16)


# --- GPTQ and AWQ


def _known(settings: Mapping[str, Any], config: Path, known: tuple[int, ...], *forms: str) -> tuple[int, str]:
    """The bits per code and the format in the settings. Raises ValueError for an unsupported number or format."""
    bits, keys = settings.get("bits"), ("checkpoint_format", "version", "format")
    form = next((settings[key] for key in keys if settings.get(key)), forms[0])
    if bits not in known or not isinstance(form, str) or form.lower() not in forms:
        raise ValueError(
            f"{config}: quantized to {quote(bits)} bits in format {quote(form)}; expected "
            f"{' or '.join(forms)} in {' or '.join(map(str, known))} bits; download such weights"
        )
    return int(bits), form.lower()


def _words(files: Weights, dense: Callable[[Weights, str], LazyTensor], config: Path) -> dict[str, LazyTensor]:
    """The files' tensors; `dense` combines the parts of each quantized weight into one tensor."""
    tensors = dict(files)
    if not (keys := [key for key in files if key.endswith(".qweight")]):
        raise ValueError(f"{config}: quantized, but no tensor is called qweight; get weights that fit the config")
    for key in keys:
        name = key.removesuffix("qweight")
        if f"{name}weight" in files:
            raise ValueError(f"{files[key].origin}: there is {name}weight, too; keep one of them")
        parts = {k: tensors.pop(name + k) for k in ("qweight", "qzeros", "scales", "g_idx") if name + k in files}
        tensors[f"{name}weight"] = dense(parts, files[key].origin)
    return tensors


def _part(parts: Weights, name: str, origin: str, *shape: int | None) -> LazyTensor:
    """The part `name`. Raises ValueError unless it has this shape (None: any size) and is int32, or floats for
    `scales`.
    """
    dtypes, part = FLOATS if name == "scales" else (torch.int32,), parts.get(name)
    if part is not None and part.dtype in dtypes and len(part.shape) == len(shape):
        wrong = [size for size, actual in zip(shape, part.shape, strict=True) if size not in (None, actual)]
        if not wrong:
            return part
    actual = "missing" if part is None else f"{part.shape} {part.dtype}".replace("torch.", "")
    sizes = ", ".join("any" if size is None else str(size) for size in shape)
    kind = "floating point" if name == "scales" else "int32"
    raise ValueError(f"{origin}: its {name} is {actual}; expected ({sizes}) {kind}; download the file again")


def _gptq(bits: int, less_one: bool, sorted_inputs: bool, parts: Weights, origin: str) -> LazyTensor:
    """A weight (O, I) of `bits` bits per code; shapes that imply another number override `bits`."""
    packed = _part(parts, "qweight", origin, None, None)
    scale = _part(parts, "scales", origin, None, packed.shape[1])
    groups, rows = scale.shape
    width = _part(parts, "qzeros", origin, groups, None).shape[1]
    bits = next((b for b in (bits, *GPTQ_BITS) if width == -(-rows * b // 32)), bits)
    zero = _part(parts, "qzeros", origin, groups, -(-rows * bits // 32))
    columns = packed.shape[0] * 32 // bits
    index = _part(parts, "g_idx", origin, columns) if "g_idx" in parts or sorted_inputs else None
    if index is not None and not sorted_inputs and not index.read().any():
        index = None  # as in exllamav2 and vLLM: zeros mean no index, unless inputs are sorted
    if index is None:
        _check_even(groups, columns, origin)
    else:
        _check_groups(index, groups)

    def read() -> Tensor:
        group = torch.arange(columns) // (columns // groups) if index is None else index.read()
        # Writers subtract 1 from each code, with borrows inside a word; adding 1 to each code undoes this.
        words = zero.read() + (sum(1 << bit for bit in range(0, 32, bits)) if less_one else 0)
        offset = _unpack(words, bits, rows).T[:, group]
        codes = _unpack(packed.read().T, bits, columns)
        return ((codes - offset) * scale.read().float().T[:, group]).to(scale.dtype)

    return computed((rows, columns), scale.dtype, origin, read, parts.values())


def _check_groups(index: LazyTensor, groups: int) -> None:
    least, most = index.read().aminmax() if index.shape[0] else (0, -1)
    if least < 0 or most >= groups:
        raise ValueError(
            f"{index.origin}: has groups {int(least)} to {int(most)}; expected 0 to {groups - 1}, the rows of its "
            "scales; download the file again"
        )


def _check_even(groups: int, columns: int, origin: str) -> None:
    if not groups or columns % groups:
        raise ValueError(
            f"{origin}: its scales are of {groups} groups; expected a divisor of its {columns} inputs; "
            "download the file again"
        )


def _awq(parts: Weights, origin: str) -> LazyTensor:
    packed = _part(parts, "qweight", origin, None, None)
    columns, rows = packed.shape[0], packed.shape[1] * 8
    scale = _part(parts, "scales", origin, None, rows)
    groups = scale.shape[0]
    zero = _part(parts, "qzeros", origin, groups, rows // 8)
    _check_even(groups, columns, origin)

    def read() -> Tensor:
        codes = _awq_codes(packed.read()).view(groups, -1, rows)
        weight = (codes - _awq_codes(zero.read())[:, None]) * scale.read().float()[:, None]
        return weight.flatten(0, 1).T.to(scale.dtype)

    return computed((rows, columns), scale.dtype, origin, read, parts.values())


def _awq_codes(packed: Tensor) -> Tensor:
    """Unpack words (N, W) into codes in the order of the outputs, as float32 (N, 8 * W)."""
    codes = _unpack(packed, 4, packed.shape[1] * 8)
    return codes.view(len(packed), -1, 8)[..., AWQ_PLACES].flatten(1)
