"""Write safetensors files tensor by tensor, so that a model larger than memory can be written.

https://huggingface.co/docs/safetensors/index#format
"""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dunes.checkpoint.weights import header
from dunes.checkpoint.weights.lazy_tensor import Weights
from dunes.files import atomic

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARD = 5_000_000_000
"""Largest size of a shard in bytes, as in Hugging Face's tools."""

CODES = {dtype: code for code, dtype in header.DTYPES.items()}


def write_tensors(folder: Path, weights: Weights, shard: int = SHARD) -> None:
    """Write the tensors into one file, or into shards of at most `shard` bytes with an index.

    Tensors are read one at a time and released afterwards. Raises OSError if a file cannot be written.
    """
    from huggingface_hub import split_state_dict_into_shards_factory

    split = split_state_dict_into_shards_factory(
        dict(weights),
        get_storage_size=lambda weight: weight.nbytes,
        filename_pattern=SINGLE.replace(".safetensors", "{suffix}.safetensors"),
        max_shard_size=shard,
    )
    for file, keys in (split.filename_to_tensors or {SINGLE: []}).items():
        write_file(folder / file, {key: weights[key] for key in keys})
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": dict(sorted(split.tensor_to_filename.items()))}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def write_file(path: Path, weights: Weights) -> None:
    """Write the tensors into one file, like `write_tensors`."""
    # Widest dtypes first, so that every tensor is aligned to its item size.
    order = sorted(weights, key=lambda k: (-weights[k].dtype.itemsize, k))
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for key in order:
        begin, end = end, end + weights[key].nbytes
        dtype, shape = CODES[weights[key].dtype], list(weights[key].shape)
        entries[key] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
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
