"""Find a folder's files of weights and read their tensors lazily, from one file or from shards with an index."""

from collections import defaultdict
from pathlib import Path

from dunes.checkpoint.weights import pickle_file, safetensors_file
from dunes.checkpoint.weights.lazy_tensor import LazyTensor
from dunes.checkpoint.weights.safetensors_file import quote
from dunes.files import json_file
from dunes.files.model_file import find_file, listed_file

UNSHARDED = (safetensors_file.SINGLE, "pytorch_model.bin")
"""File names of unsharded weights; the index of sharded weights has the same name plus .index.json."""


def find_weights(folder: Path, *names: str) -> dict[str, LazyTensor] | None:
    """Tensors of the first of `names` that exists, as one file or as shards with an index; else None."""
    for name in names:
        path, index = find_file(folder, name), find_file(folder, f"{name}.index.json")
        if path or index:
            return tensors(path) if path else indexed_tensors(folder / f"{name}.index.json")
    return None


def indexed_tensors(index: Path) -> dict[str, LazyTensor]:
    """Tensors of all shards that an index lists.

    Raises ValueError, before any tensor is read, if a shard lies outside the folder or is not a regular file, or
    if the index and the shards' headers list different tensors.
    """
    weight_map, listed = json_file.read(index).get("weight_map") or None, defaultdict[str, set[str]](set)
    if not isinstance(weight_map, dict) or not all(isinstance(f, str) for f in weight_map.values()):
        raise ValueError(f"{index}: 'weight_map' must map each tensor to a file")
    for key, name in weight_map.items():
        listed[name].add(key)
    paths = {name: listed_file(index.parent, name, index) for name in sorted(listed)}
    files: dict[str, LazyTensor] = {}
    for name, path in paths.items():
        shard = tensors(path)
        if (key := min(shard.keys() ^ listed[name], default=None)) is not None:
            owner = weight_map.get(key, "no file")
            missing = f"is missing, although {index.name} lists it"
            reason = missing if key in listed[name] else f"belongs to {owner} according to {index.name}"
            raise ValueError(f"{path}: {quote(key)} {reason}; fetch both again")
        files |= shard
    return files


def tensors(path: Path) -> dict[str, LazyTensor]:
    """Tensors of one file: safetensors if the file has this suffix, else a pickle written by `torch.save`."""
    return safetensors_file.tensors(path) if path.suffix == ".safetensors" else pickle_file.tensors(path)
