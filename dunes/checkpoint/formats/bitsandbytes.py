"""4-bit weights of transformers with bitsandbytes, read as dense weights.

`X.weight` has packed codes, two in a byte, with `X.weight.absmax` (a scale for each block), `X.weight.quant_map`
(the 16 levels) and, as JSON in bytes, `X.weight.quant_state.bitsandbytes__nf4`. With double quantization the
scales are bytes, too, with `nested_absmax`, `nested_quant_map` and an offset.
https://github.com/bitsandbytes-foundation/bitsandbytes
"""

# Shapes: N codes, B blocks.

import json
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dunes.augment.change import float_dtype
from dunes.checkpoint.weights.lazy_tensor import LazyTensor, Weights, computed

STATE = ".quant_state.bitsandbytes__"
MAX_STATE = 1 << 16


def is_four_bits(quantization: Any) -> bool:
    """True if the `quantization_config` of a config.json describes this format."""
    return isinstance(quantization, Mapping) and (
        quantization.get("quant_method") == "bitsandbytes" and quantization.get("load_in_4bit") is True
    )


def dense_weights(files: Weights) -> dict[str, LazyTensor]:
    """The tensors, with the parts of each quantized weight replaced by a dense one, dequantized when read.

    Raises ValueError for parts that are missing or do not fit together.
    """
    tensors = dict(files)
    for key in [key for key in files if STATE in key]:
        name = key[: key.index(STATE)]
        parts = {k.removeprefix(name): tensors.pop(k) for k in files if k == name or k.startswith(f"{name}.")}
        state = _read_state(parts.pop(key.removeprefix(name)))
        tensors[name] = _dense(parts, state, files[key].origin)
    return tensors


def _read_state(tensor: LazyTensor) -> dict[str, Any]:
    try:
        if tensor.dtype != torch.uint8 or tensor.nbytes > MAX_STATE:
            raise ValueError
        state = json.loads(bytes(tensor.read().flatten().tolist()))
        rows, columns = state["shape"]
        sizes = [rows, columns, state["blocksize"], state.get("nested_blocksize", 1)]
        if not all(type(size) is int and size > 0 for size in sizes):
            raise ValueError
        state["dtype"], state["offset"] = float_dtype(state["dtype"]), float(state.get("nested_offset", 0.0))
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ValueError(f"{tensor.origin}: no state of a weight in four bits; download the file again") from None
    return dict(state)


def _dense(parts: Weights, state: Mapping[str, Any], origin: str) -> LazyTensor:
    rows, columns = state["shape"]
    blocks = -(-rows * columns // state["blocksize"])
    expected = {"": -(-rows * columns // 2), ".absmax": blocks, ".quant_map": 16}
    if nested := "nested_blocksize" in state:
        expected |= {".nested_absmax": -(-blocks // state["nested_blocksize"]), ".nested_quant_map": 256}
    sizes = {
        name: tensor.nbytes if not name else torch.Size(tensor.shape).numel() for name, tensor in parts.items()
    }
    if wrong := sorted(k for k in {*sizes, *expected} if sizes.get(k) != expected.get(k)):
        raise ValueError(
            f"{origin}: its part {wrong[0] or 'of codes'} has size {sizes.get(wrong[0], 0)}; expected "
            f"{expected.get(wrong[0], 0)}; download the file again"
        )

    def read() -> Tensor:
        values = {name: tensor.read().flatten() for name, tensor in parts.items()}
        scale = values[".absmax"]
        if nested:
            scale = _scaled(
                values[".nested_quant_map"], scale, values[".nested_absmax"], state["nested_blocksize"]
            )
            scale = scale + state["offset"]
        packed = values[""].contiguous().view(torch.uint8)
        codes = torch.stack([packed >> 4, packed & 15], 1).flatten()[: rows * columns]
        weight = _scaled(values[".quant_map"], codes, scale, state["blocksize"])
        return weight.view(rows, columns).to(state["dtype"])

    return computed((rows, columns), state["dtype"], origin, read, parts.values())


def _scaled(levels: Tensor, codes: Tensor, scale: Tensor, block: int) -> Tensor:
    """Levels of codes (N,), multiplied by the scale (B,) of each block of `block` codes, in float32."""
    blocks = F.pad(levels.float()[codes.int()], (0, -len(codes) % block)).view(-1, block)
    return (blocks * scale.float()[:, None]).flatten()[: len(codes)]
