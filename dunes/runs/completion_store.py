"""What a run keeps to complete with, in RUN/completion: the index of the training text, the gate, the thresholds.

`index.safetensors` has the ids of the training files and their sorted contexts, `files.json` which file is where,
with its digest; both are there seconds after a run has begun. `gate.safetensors` and `gate.json` follow at its end.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save
from safetensors.torch import load_file as load_tensors
from safetensors.torch import save as save_tensors

from dunes.checkpoint.files.atomic import write_file
from dunes.generate.context_index import ContextIndex
from dunes.generate.copying import Gate
from dunes.text import json_file

FOLDER = "completion"
FORMAT = 1
MOST = 8_000_000
"""Ids in an index at most: sorting the contexts of more takes longer than ten seconds."""


@dataclass(frozen=True)
class IndexedFile:
    """A file in an index: its path in its source, its digest, and the index of its first id."""

    name: str
    digest: str
    start: int


@dataclass(frozen=True)
class StoredIndex:
    """An index and the files in it."""

    index: ContextIndex
    files: Sequence[IndexedFile]


def write_index(run: Path, stored: StoredIndex) -> None:
    """Write the index of a run."""
    folder = run / FOLDER
    folder.mkdir(exist_ok=True)
    write_file(folder / "index.safetensors", save({"ids": stored.index.items, "order": stored.index.order}))
    record = {"format": FORMAT, "files": [[f.name, f.digest, f.start] for f in stored.files]}
    write_file(folder / "files.json", json.dumps(record).encode())


def read_index(run: Path) -> StoredIndex | None:
    """The index of a run; None if it has none. Raises ValueError for a damaged one."""
    folder = run / FOLDER
    if not (folder / "files.json").is_file():
        return None
    record = _record(folder / "files.json")
    try:
        tensors = load_file(folder / "index.safetensors")
        ids, order = tensors["ids"], tensors["order"]
        files = [IndexedFile(str(name), str(digest), int(start)) for name, digest, start in record["files"]]
    except (OSError, SafetensorError, LookupError, TypeError, ValueError) as error:
        raise ValueError(f"{folder}: a damaged index ({error}); {REMEDY}") from None
    if (
        ids.dtype not in (np.uint16, np.uint32)
        or order.dtype != np.int32
        or ids.shape != order.shape
        or ids.ndim != 1
    ):
        raise ValueError(
            f"{folder}: an index of {ids.dtype} {ids.shape} and {order.dtype} {order.shape}; {REMEDY}"
        )
    if len(order) and not 0 <= int(order.min()) <= int(order.max()) < len(ids):
        raise ValueError(f"{folder}: positions outside of the index's {len(ids)} ids; {REMEDY}")
    return StoredIndex(ContextIndex(ids, order), files)


REMEDY = "remove this folder to complete without what it has, or train again"


def write_gate(run: Path, gate: Gate, facts: Mapping[str, Any]) -> None:
    """Write the gate of a run, with the thresholds and figures that were fitted with it."""
    folder = run / FOLDER
    folder.mkdir(exist_ok=True)
    write_file(folder / "gate.safetensors", save_tensors(gate.state_dict()))
    write_file(folder / "gate.json", json.dumps({"format": FORMAT, **facts}, indent=1).encode())


def read_gate(run: Path) -> tuple[Gate, dict[str, Any]] | None:
    """The gate of a run and what `write_gate` got with it; None if it has none. Raises ValueError for a damaged one."""
    folder = run / FOLDER
    if not (folder / "gate.json").is_file():
        return None
    facts, gate = _record(folder / "gate.json"), Gate()
    try:
        gate.load_state_dict(load_tensors(folder / "gate.safetensors"))
    except (OSError, SafetensorError, RuntimeError, LookupError) as error:
        raise ValueError(f"{folder}: a damaged gate ({' '.join(str(error).split())[:200]}); {REMEDY}") from None
    return gate.requires_grad_(False), facts


def _record(path: Path) -> dict[str, Any]:
    record = json_file.read(path)
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise ValueError(f"{path}: not in format {FORMAT}, which this version reads; {REMEDY}")
    return record
