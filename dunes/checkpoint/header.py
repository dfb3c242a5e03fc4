"""The header of a safetensors file, checked before anything else touches the file.

The format (<https://huggingface.co/docs/safetensors>): eight bytes that say how long the header is, little endian;
the header, a JSON object with the dtype, shape and place of each tensor; the tensors' bytes without a gap. The
library that reads it accepts more than the format allows (names given twice, unknown fields, any name), and
takes seconds to refuse some files. This accepts less, and reads nothing but the header.
"""

import json
from collections.abc import Mapping
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch

from dunes.checkpoint.mapped import Mapped, unusable
from dunes.checkpoint.stored import Stored
from dunes.plural import plural
from dunes.text import json_file

LENGTH = 32_000_000
TENSORS = 100_000
NAME = 512
# Commas and brackets bound what JSON becomes in memory. A tensor of 8 dimensions has 14; texts of the metadata
# may have any, so that some are free.
_PARTS_OF_ONE, _PARTS = 20, 200_000

_DTYPES: dict[str, torch.dtype] = {
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


def tensors(source: Path | Mapped) -> dict[str, Stored]:
    """The tensors of a safetensors file by name, in the file's order; their numbers are mapped when they are read.

    Who streams a file greater than memory passes a `Mapped` and calls its `forget` between tensors.
    Raises ValueError, on one line, if anything in the header is not as the format says, a name could harm
    (see `named`), or there are more than 8 dimensions or 100,000 tensors.
    """
    mapped = source if isinstance(source, Mapped) else Mapped(source)
    try:
        begin, entries = _entries(mapped)
        places = {named(name): _place(name, entry) for name, entry in entries.items()}
        _gapless({name: (first, last) for name, (_, _, first, last) in places.items()}, mapped.size - begin)
    except ValueError as error:
        raise refused(
            mapped.path, error, "fetch the file again or write it anew with the safetensors library"
        ) from None
    return {
        name: Stored(
            shape,
            dtype,
            f"{mapped.path.name}: {name}",
            partial(mapped.tensor, begin + first, shape, dtype),
            mapped.forget,
        )
        for name, (dtype, shape, first, _) in places.items()
    }


def refused(path: Path, error: Exception, remedy: str) -> ValueError:
    """The one line that a user sees. An error that names the file already stays as it is."""
    text = str(error)
    return ValueError(text if text.startswith(f"{path}: ") else f"{path}: refused: {text}; {remedy}")


def named(name: str) -> str:
    """The name of a tensor, if it is a harmless one. Raises ValueError otherwise.

    Names become keys, parts of paths and lines on a terminal: 1 to 512 bytes of UTF-8, printable, no "/", "\\\\"
    or "..", and not the format's own `__metadata__`.
    """
    if not name or not name.isprintable() or len(name.encode()) > NAME:
        raise ValueError(f"{shown(name)} is no name for a tensor: expected 1 to {NAME} bytes of printable text")
    if "/" in name or "\\" in name or ".." in name or name == "__metadata__":
        raise ValueError(f"{shown(name)} is no name for a tensor: it must not be or contain '/', '\\', '..'")
    return name


def shown(value: object) -> str:
    """A value of an untrusted file for a message: short, one line, and never a container's content."""
    if isinstance(value, str):
        return ascii(value[:80]) + ("..." if len(value) > 80 else "")
    if isinstance(value, int) and abs(value) >> 70:
        return "an integer of more than 70 bits"
    return repr(value) if value is None or isinstance(value, int | float) else f"a {type(value).__name__}"


def _entries(mapped: Mapped) -> tuple[int, dict[str, Any]]:
    """Where the tensors' bytes begin, and what the header says by name, without the metadata."""
    with mapped.open() as file:
        length = int.from_bytes(file.read(8), "little")
        if mapped.size < 8 or not 2 <= length <= min(mapped.size - 8, LENGTH):
            raise ValueError(
                f"the header is said to take {length} bytes of a file of {mapped.size}; expected 2 to {LENGTH}, "
                "within the file"
            )
        first = file.read(1)
        if first != b"{":
            raise ValueError(f"the header begins with {shown(first.decode('latin-1'))} instead of '{{'")
        header = _json(first + file.read(length - 1))
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise ValueError("__metadata__ is not an object of strings")
    if len(header) > TENSORS:
        raise ValueError(f"the header has {len(header)} tensors; at most {TENSORS} are read")
    return 8 + length, header


def _json(text: bytes) -> dict[str, Any]:
    """The header as a dict, each key once. Counts before it parses: that takes a hundredth of the time."""
    if text.count(b"{") > TENSORS + 2:
        raise ValueError(f"the header has {text.count(b'{')} '{{'; at most {TENSORS} tensors are read")
    parts = text.count(b",") + text.count(b"[")
    if parts > _PARTS + _PARTS_OF_ONE * text.count(b"{"):
        raise ValueError(f"the header has {parts} ',' and '[', too many for {text.count(b'{')} '{{'")
    try:
        # Decoded here: json would guess at UTF-16 and UTF-32, too.
        found = json.loads(text.decode("utf-8"), object_pairs_hook=json_file.once)
    except UnicodeDecodeError as error:
        raise ValueError(f"the header is not UTF-8 at byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"the header is not JSON: {error.msg} at character {error.pos}") from None
    except RecursionError:
        raise ValueError("the header is nested too deeply") from None
    assert isinstance(found, dict)  # since it begins with a brace
    return found


def _place(name: str, entry: Any) -> tuple[torch.dtype, tuple[int, ...], int, int]:
    """A tensor's dtype and shape, its first byte and the one after its last."""
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        what = ", ".join(map(shown, list(entry)[:8])) if isinstance(entry, dict) else shown(entry)
        raise ValueError(
            f"tensor {shown(name)} is described by {what or 'nothing'}; expected dtype, shape, data_offsets"
        )
    dtype, shape, offsets = _dtype(entry["dtype"]), entry["shape"], entry["data_offsets"]
    if dtype is None:
        raise ValueError(
            f"tensor {shown(name)} is of dtype {shown(entry['dtype'])}; expected one of {', '.join(_DTYPES)}"
        )
    if not _counts(shape):
        raise ValueError(f"tensor {shown(name)} has a shape that is no list of integers from 0 on")
    if reason := unusable(shape):
        raise ValueError(f"tensor {shown(name)} {reason}")
    if not _counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ValueError(f"tensor {shown(name)} has data_offsets that are no begin and end")
    size = prod(shape) * dtype.itemsize
    if size != offsets[1] - offsets[0]:
        raise ValueError(
            f"tensor {shown(name)} of shape {shape} and dtype {entry['dtype']} takes {plural(size, 'byte')}; its "
            f"data_offsets hold {shown(offsets[1] - offsets[0])}"
        )
    return dtype, tuple(shape), offsets[0], offsets[1]


def _dtype(name: Any) -> torch.dtype | None:
    return _DTYPES.get(name) if isinstance(name, str) else None


def _counts(values: Any) -> bool:
    """Whether this is a list of integers from 0 on; True and 1.0 are none."""
    return isinstance(values, list) and all(type(v) is int and v >= 0 for v in values)


def _gapless(places: Mapping[str, tuple[int, int]], size: int) -> None:
    """Raise ValueError unless the tensors fill the file to its end, one behind the other."""
    end = 0
    for name, (first, last) in sorted(places.items(), key=lambda item: item[1]):
        if first != end:
            raise ValueError(
                f"tensor {shown(name)} begins at byte {shown(first)} of the data; expected {shown(end)}"
            )
        end = last
    if end != size:
        raise ValueError(f"the tensors take {shown(end)} bytes and the file holds {size} for them")
