"""Read safetensors files as lazy tensors and write them tensor by tensor, so a model may be larger than memory.

The safetensors library checks the header. This module reads the tensors' offsets itself, so that it can map a file
larger than memory. This module also requires unique printable names. The format:
https://huggingface.co/docs/safetensors/index#format
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dunes.checkpoint.weights.lazy_tensor import LazyTensor, MappedFile, Weights, open_mapped, shape_error
from dunes.files import atomic, json_file

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARD = 5_000_000_000
"""Largest size of a shard in bytes, as in Hugging Face's tools."""
MAX_TENSORS = 100_000
MAX_NAME_BYTES = 512

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Supported dtypes by their names in a header."""

CODES = {dtype: code for code, dtype in DTYPES.items()}


def tensors(path: Path) -> dict[str, LazyTensor]:
    """Tensors of a safetensors file by name, in the file's order; values are memory-mapped when read.

    Raises ValueError, on one line, if the safetensors library refuses the header, if a name is duplicate or unsafe
    (see `check_name`), or if a tensor has more than 8 dimensions.
    """
    with open_mapped(path, "fetch the file again or write it anew with the safetensors library") as (mapped, file):
        begin, header = _header(path, file)
        return {name: _lazy_tensor(mapped, begin, check_name(name), entry) for name, entry in header.items()}


def check_name(name: str) -> str:
    """The name of a tensor, unchanged. Raises ValueError if the name is unsafe as a key, in a path or on a
    terminal.

    Safe names have 1 to 512 bytes of printable UTF-8 without "/", "\\\\" or "..", and are not `__metadata__`.
    """
    unsafe = any(part in name for part in ("/", "\\", "..")) or name == "__metadata__"
    if unsafe or not name or not name.isprintable() or len(name.encode()) > MAX_NAME_BYTES:
        raise ValueError(
            f"{quote(name)} is no tensor name: expected 1 to {MAX_NAME_BYTES} printable bytes without slashes"
        )
    return name


def quote(value: object) -> str:
    """A value from an untrusted file, as one short line for an error message; for a container, only its type."""
    if isinstance(value, str):
        return ascii(value[:80]) + ("..." if len(value) > 80 else "")
    if isinstance(value, int) and abs(value) >> 70:
        return "an integer of more than 70 bits"
    return repr(value) if value is None or isinstance(value, int | float) else f"a {type(value).__name__}"


def _header(path: Path, file: BinaryIO) -> tuple[int, dict[str, Any]]:
    """Offset of the tensors' bytes, and the header without its metadata, checked by the library."""
    try:
        with safe_open(path, "np"):  # raises if invalid; "pt" would reserve memory for the complete file
            pass
    except (SafetensorError, OSError) as error:
        raise ValueError(ascii(str(error))[1:-1][:300]) from None  # escaped, since the message may quote names
    length = int.from_bytes(file.read(8), "little")
    header = json_file.parse(file.read(length), path)
    header.pop("__metadata__", None)
    return 8 + length, header


def _lazy_tensor(mapped: MappedFile, begin: int, name: str, entry: Any) -> LazyTensor:
    if not isinstance(entry, dict):  # the library also accepts a list of the three values
        raise ValueError(f"tensor {quote(name)} is described by {quote(entry)}; expected an object")
    if entry["dtype"] not in DTYPES:
        raise ValueError(
            f"tensor {quote(name)} has the dtype {quote(entry['dtype'])}; expected one of {', '.join(DTYPES)}"
        )
    dtype, shape = DTYPES[entry["dtype"]], tuple(entry["shape"])
    if reason := shape_error(shape):
        raise ValueError(f"tensor {quote(name)} {reason}")
    return mapped.lazy(name, begin + entry["data_offsets"][0], shape, dtype)


def write_tensors(folder: Path, weights: Weights, shard: int = SHARD) -> None:
    """Write the tensors into one file in the folder, or into shards of at most `shard` bytes with an index.

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
    """Write the tensors into one file; like `write_tensors`, reads and releases one tensor at a time."""
    with atomic.add_path_to_errors(path), path.open("wb") as file:
        for part in file_parts(weights):
            file.write(part)


def file_parts(weights: Weights) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a safetensors file with these tensors."""
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
    yield len(text).to_bytes(8, "little") + text
    for key in order:
        tensor = weights[key].read()
        assert (tuple(tensor.shape), tensor.dtype) == (weights[key].shape, weights[key].dtype), key
        yield _bytes(tensor)
        weights[key].release()


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data
