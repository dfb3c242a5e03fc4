"""Completion files of a run, in RUN/completion: the training text with its indexes, the gate, thresholds.

`index.safetensors` has the training files as ids and as bytes with their sorted contexts, `files.json` their names
and offsets; both are written in the first seconds of a run. `gate.safetensors` and `gate.json` follow at its end,
when the validation files are added to the index.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save
from safetensors.torch import load_file as load_tensors
from safetensors.torch import save as save_tensors

from dunes.completion.index import IndexedFile, TextIndex
from dunes.files import json_file
from dunes.files.atomic import write_file
from dunes.files.model_file import find_file
from dunes.generate.context_index import DEPTH, ContextIndex
from dunes.generate.copying import DEPTH_BYTES, Gate

FOLDER, INDEX_FORMAT, GATE_FORMAT = "completion", 1, 2
INDEX_REMEDY = "remove this folder to complete without it, or train again"
GATE_REMEDY = "remove gate.json there to complete by copying alone, or train again"


def write_index(run: Path, index: TextIndex, sources: Sequence[str] = (), follow_links: bool = False) -> None:
    """Write the index of a run, and the sources of its text."""
    folder = run / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {"ids": index.ids.items, "order": index.ids.order}
    tensors |= {"text": index.contexts.items, "text_order": index.contexts.order}
    write_file(folder / "index.safetensors", save({k: np.ascontiguousarray(v) for k, v in tensors.items()}))
    files = [[f.name, f.start, f.first_byte] for f in index.files]
    content = {"format": INDEX_FORMAT, "files": files, "sources": [*sources], "follow_links": follow_links}
    write_file(folder / "files.json", json.dumps(content).encode())


def read_sources(run: Path) -> Mapping[str, Any]:
    """The sources of an index's text and their `follow_links`, as in a card; empty if they were not recorded.
    Raises ValueError for a damaged record."""
    file = find_file(run, f"{FOLDER}/files.json")
    return {} if file is None else _record(file, INDEX_FORMAT, INDEX_REMEDY)


def read_index(run: Path) -> TextIndex | None:
    """The index of a run; None if it has none. Raises ValueError for a damaged one."""
    folder = run / FOLDER
    record, _ = (find_file(run, f"{FOLDER}/{name}") for name in ("files.json", "index.safetensors"))
    if record is None:
        return None
    content = _record(record, INDEX_FORMAT, INDEX_REMEDY)
    try:
        tensors = load_file(folder / "index.safetensors")
        ids = _context_index(tensors["ids"], tensors["order"], (np.uint16, np.uint32), DEPTH)
        contexts = _context_index(tensors["text"], tensors["text_order"], (np.uint8,), DEPTH_BYTES)
        files = [IndexedFile(str(name), *map(int, places[-2:])) for name, *places in content["files"]]
        bounds = [(f.start, f.first_byte) for f in files] + [(len(ids), len(contexts))]
        if any(a[0] > b[0] or a[1] >= b[1] for a, b in pairwise(bounds)) or bounds[0] != (0, 0):
            raise ValueError("files that overlap")
        text = contexts.items.tobytes()
        text.decode()
        if any(text[f.first_byte - 1 : f.first_byte] != b"\0" for f in files[1:]) or text[-1:] not in (b"", b"\0"):
            raise ValueError("files without an end")
    except (OSError, SafetensorError, LookupError, TypeError, ValueError, ArithmeticError) as error:
        raise ValueError(
            f"{folder}: a damaged index ({' '.join(str(error).split())[:200]}); {INDEX_REMEDY}"
        ) from None
    return TextIndex(files, ids, text, contexts)


def _context_index(items: NDArray[Any], order: NDArray[Any], dtypes: Collection[Any], depth: int) -> ContextIndex:
    if items.dtype not in dtypes or order.dtype != np.int32 or items.shape != order.shape or items.ndim != 1:
        raise ValueError(f"{items.dtype} {items.shape} with an order of {order.dtype} {order.shape}")
    if len(order) and not 0 <= int(order.min()) <= int(order.max()) < len(items):
        raise ValueError(f"positions outside of {len(items)} items")
    return ContextIndex(items, order, depth)


def write_gate(run: Path, gate: Gate, facts: Mapping[str, Any]) -> None:
    """Write the gate of a run, with the facts fitted and measured with it."""
    folder = run / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    write_file(folder / "gate.safetensors", save_tensors(gate.state_dict()))
    write_file(folder / "gate.json", json.dumps({"format": GATE_FORMAT, **facts}, indent=1).encode())


def read_gate(run: Path) -> tuple[Gate, dict[str, Any]] | None:
    """The gate of a run and the facts with it; None if it has none. Raises ValueError for a damaged one."""
    folder = run / FOLDER
    record, _ = (find_file(run, f"{FOLDER}/{name}") for name in ("gate.json", "gate.safetensors"))
    if record is None:
        return None
    facts, gate = _record(record, GATE_FORMAT, GATE_REMEDY), Gate()
    try:
        gate.load_state_dict(load_tensors(folder / "gate.safetensors"))
        if not all(p.isfinite().all() for p in gate.parameters()):
            raise ValueError("it has infinite numbers or NaN")
        thresholds = facts.get("thresholds", {})
        if not all(isfinite(share) and isfinite(value) for pairs in thresholds.values() for share, value in pairs):
            raise ValueError("thresholds that are not finite")
    except (OSError, SafetensorError, RuntimeError, LookupError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(
            f"{folder}: a damaged gate ({' '.join(str(error).split())[:200]}); {GATE_REMEDY}"
        ) from None
    return gate.requires_grad_(False), facts


def _record(path: Path, format: int, remedy: str) -> dict[str, Any]:
    record = json_file.read(path)
    if not isinstance(record, dict) or record.get("format") != format:
        raise ValueError(f"{path}: not in format {format}, which this version reads; {remedy}")
    return record
