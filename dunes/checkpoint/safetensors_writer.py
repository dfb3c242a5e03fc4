"""Write safetensors files tensor by tensor, so that a model larger than memory can be written.

https://huggingface.co/docs/safetensors/index#format
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dunes.checkpoint import atomic, header
from dunes.checkpoint.lazy_tensor import LazyTensor, Weights

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARD = 5_000_000_000
"""Bytes in a shard: the default of Hugging Face's tools."""

CODES = {dtype: code for code, dtype in header.DTYPES.items()}


def write_tensors(folder: Path, weights: Weights, single: str = SINGLE, shard: int = SHARD) -> None:
    """Write the tensors into one file, or into several with an index if they have more than `shard` bytes.

    Tensors are read one at a time and released afterwards. Raises OSError if a file cannot be written.
    """
    shards = list(_split(weights, shard))
    if len(shards) == 1:
        _write_file(folder / single, shards[0])
        return
    weight_map: dict[str, str] = {}
    for i, part in enumerate(shards, 1):
        name = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        _write_file(folder / name, part)
        weight_map |= dict.fromkeys(part, name)
    total = sum(w.nbytes for w in weights.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _split(weights: Weights, shard: int) -> Iterator[dict[str, LazyTensor]]:
    part: dict[str, LazyTensor] = {}
    size = 0
    for key, tensor in weights.items():
        if part and size + tensor.nbytes > shard:
            yield part
            part, size = {}, 0
        part[key] = tensor
        size += tensor.nbytes
    yield part


def _write_file(path: Path, weights: Weights) -> None:
    # Widest dtypes first, so that every tensor is aligned to its item size.
    order = sorted(weights, key=lambda k: (-weights[k].dtype.itemsize, k))
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for key in order:
        begin, end = end, end + weights[key].nbytes
        entries[key] = {
            "dtype": CODES[weights[key].dtype],
            "shape": list(weights[key].shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with atomic.add_path_to_errors(path), path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for key in order:
            tensor = weights[key].read()
            assert (tuple(tensor.shape), tensor.dtype) == (weights[key].shape, weights[key].dtype), key
            file.write(_bytes(tensor))
            weights[key].release()


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data
