"""Lazy tensors of a safetensors file, from its header.

The safetensors library checks the header; offsets are read here, so that a file larger than memory can be mapped.
In addition, names must be unique and printable, and the memory that a header takes is limited before it is parsed.
The format: <https://huggingface.co/docs/safetensors>
"""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from dunes.checkpoint.weights.lazy_tensor import LazyTensor
from dunes.checkpoint.weights.mapped_file import MappedFile, shape_error
from dunes.files import json_file
from dunes.files.model_file import require_content

MAX_HEADER_BYTES = 32_000_000
"""Largest size of a header."""
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


def tensors(source: Path | MappedFile) -> dict[str, LazyTensor]:
    """Tensors of a safetensors file by name, in the file's order; values are memory-mapped when read.

    To stream a file larger than memory, pass a `MappedFile` and call its `release` between tensors. Raises
    ValueError, on one line, if the safetensors library refuses the header, for a duplicate or unsafe name (see
    `check_name`), and for more than 8 dimensions or 100,000 tensors.
    """
    mapped = source if isinstance(source, MappedFile) else MappedFile(source)
    with mapped.open() as file:
        require_content(mapped.path, file)
    try:
        begin, header = _header(mapped)
        return {name: _lazy_tensor(mapped, begin, check_name(name), entry) for name, entry in header.items()}
    except (SafetensorError, OSError) as error:
        reason = ValueError(ascii(str(error))[1:-1][:300])  # the message may quote names
    except ValueError as error:
        reason = error
    raise refusal(mapped.path, reason, "fetch the file again or write it anew with the safetensors library")


def refusal(path: Path, error: Exception, remedy: str) -> ValueError:
    """ValueError with a one-line message for users."""
    return ValueError(f"{path}: refused: {str(error).removeprefix(f'{path}: ')}; {remedy}")


def check_name(name: str) -> str:
    """The name of a tensor, unchanged. Raises ValueError unless it is safe as a key, in a path and on a terminal.

    Safe names have 1 to 512 bytes of printable UTF-8 without "/", "\\\\" or "..", and are not `__metadata__`.
    """
    if not name or not name.isprintable() or len(name.encode()) > MAX_NAME_BYTES:
        raise ValueError(
            f"{quote(name)} is no tensor name: expected 1 to {MAX_NAME_BYTES} bytes of printable text"
        )
    if "/" in name or "\\" in name or ".." in name or name == "__metadata__":
        raise ValueError(
            f"{quote(name)} is no tensor name: it must not contain '/', '\\', '..' or be '__metadata__'"
        )
    return name


def quote(value: object) -> str:
    """Text for an error message of a value from an untrusted file: one short line; containers by type only."""
    if isinstance(value, str):
        return ascii(value[:80]) + ("..." if len(value) > 80 else "")
    if isinstance(value, int) and abs(value) >> 70:
        return "an integer of more than 70 bits"
    return repr(value) if value is None or isinstance(value, int | float) else f"a {type(value).__name__}"


def _header(mapped: MappedFile) -> tuple[int, dict[str, Any]]:
    """Offset of the tensors' bytes, and the header without its metadata, checked by the library."""
    with mapped.open() as file:
        length = int.from_bytes(file.read(8), "little")
        if length > MAX_HEADER_BYTES:
            raise ValueError(f"the header claims {length} bytes; at most {MAX_HEADER_BYTES} are read")
        text = file.read(length)
    if text.count(b"{") > MAX_TENSORS + 2:
        raise ValueError(f"the header has {text.count(b'{')} '{{'; at most {MAX_TENSORS} tensors are read")
    # Parsed here first to limit the memory of the library's parser.
    header = json_file.parse(text, mapped.path)
    with safe_open(mapped.path, "np"):  # raises if invalid; "pt" would reserve memory for the complete file
        pass
    header.pop("__metadata__", None)
    if len(header) > MAX_TENSORS:
        raise ValueError(f"the header has {len(header)} tensors; at most {MAX_TENSORS} are read")
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
    read = partial(mapped.tensor, begin + entry["data_offsets"][0], shape, dtype)
    return LazyTensor(shape, dtype, f"{mapped.path.name}: {name}", read, mapped.release)
