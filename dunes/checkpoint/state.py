"""Save and load training states to resume a run: one folder per saved step; the newest intact state is loaded.

`<run>/state/step-000123/` has tensors as safetensors and other values as JSON, no pickle. A manifest with digests
is written last, then the folder is renamed into place.
"""

import json
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from dunes.checkpoint.weights import safetensors_file
from dunes.checkpoint.weights.lazy_tensor import in_memory
from dunes.files import atomic, json_file
from dunes.files.atomic import folder_lock
from dunes.measure import ranks
from dunes.progress import Line

KEEP_STATES = 2
FORMAT = 2
STATE, TENSORS, MANIFEST = "state.json", "tensors.safetensors", "manifest.json"


class Snapshot(NamedTuple):
    """A copy of a training state: tensors by dotted path, and JSON values with a path in place of each tensor."""

    tensors: dict[str, Tensor]
    plain: Any


def save_state(run: Path, step: int, state: Mapping[str, Any] | Snapshot) -> Path:
    """Write a state, a nested dict of tensors and JSON values, and delete all but the newest two states.

    Raises OSError if the state cannot be written, ValueError if a tensor is not finite; earlier states then stay.
    """
    folder = run / "state" / f"step-{step:06d}"
    copied = state if isinstance(state, Snapshot) else snapshot(state)
    for name, tensor in copied.tensors.items():
        if tensor.is_floating_point() and not _is_finite(tensor):
            raise ValueError(f"{folder}: not saved, since {name} has values that are not finite")

    def write_files(staged: Path) -> None:
        safetensors_file.write_file(staged / TENSORS, in_memory(copied.tensors))
        (staged / STATE).write_text(json.dumps({"format": FORMAT, "state": copied.plain}))
        write_manifest(staged)

    folder.parent.mkdir(parents=True, exist_ok=True)
    with atomic.add_path_to_errors(folder), folder_lock(folder.parent):
        if _is_intact(folder):
            return folder  # states of the same step and run are equal
    atomic.write_folder(folder, write_files, sum(t.nbytes for t in copied.tensors.values()), _publish)
    return folder


def write_manifest(folder: Path) -> None:
    """Write the manifest: the SHA-256 of each of a state's files."""
    digests = {name: {"sha256": atomic.digest(folder / name)} for name in (STATE, TENSORS)}
    (folder / MANIFEST).write_text(json.dumps({"files": digests}))


def _verify(folder: Path) -> None:
    """Raise ValueError, naming the first file that is missing or differs from the manifest."""
    digests = json_file.read(folder / MANIFEST).get("files", {})
    for path in (folder / STATE, folder / TENSORS):
        if not path.is_file() or digests.get(path.name) is None:
            raise ValueError(f"{path}: missing, here or in {MANIFEST}")
        if digests[path.name].get("sha256") != atomic.digest(path):
            raise ValueError(f"{path}: not the bytes that were written")


def _publish(staged: Path, folder: Path) -> None:
    """Rename a state into place, unless another writer was faster, and delete all but the newest two states."""
    with folder_lock(folder.parent):
        if _is_intact(folder):
            return
        shutil.rmtree(folder, ignore_errors=True)
        os.rename(staged, folder)
        atomic.fsync_path(folder.parent)  # before deleting an older state
        for old in _state_folders(folder.parent.parent)[KEEP_STATES:]:
            shutil.rmtree(old, ignore_errors=True)


def _is_finite(tensor: Tensor) -> bool:
    """True if all values are finite; computed by numpy, which uses only the calling thread.

    PyTorch would start another thread pool for this thread. If threads outnumber processors, libgomp puts waiting
    threads to sleep sooner, which made training 40 % slower.
    """
    if tensor.dtype == torch.bfloat16:  # unknown to numpy; an exponent of all ones is not finite
        return bool((tensor.detach().view(torch.int16).numpy() & 0x7F80 != 0x7F80).all())
    return bool(np.isfinite(tensor.detach().numpy()).all())


def latest_state(run: Path, report: Line = lambda line: None) -> Path | None:
    """The folder of the newest intact state, or None; `report` gets a line for each newer, damaged state."""
    if not (states := _state_folders(run)):
        return None
    with folder_lock(run / "state"):  # or another writer might delete the state that is being verified
        for folder in states:
            try:
                _verify(folder)
                return folder
            except ValueError as error:
                report(f"{error}; going back to an older state")
    return None


def _is_intact(folder: Path) -> bool:
    with suppress(ValueError):
        _verify(folder)
        return True
    return False


def load_state(folder: Path) -> dict[str, Any]:
    """The nested dict of a saved state. Raises ValueError if the state has another format or is damaged."""
    path = folder / STATE
    content = json_file.parse(path.read_bytes(), path, most=1 << 30)  # trusted, and may be large
    if (number := content.get("format")) != FORMAT:
        raise ValueError(
            f"{folder}: its format is {number!r:.60}, and this version reads {FORMAT}; "
            "resume with the version that wrote it, or start another run"
        )
    try:
        state = _restore_tensors(content["state"], load_file(folder / TENSORS))
        return dict(state)
    except KeyError as error:
        raise ValueError(f"{path}: {error} is missing, in it or in {TENSORS}") from None
    except (ValueError, TypeError, RecursionError, SafetensorError) as error:
        raise ValueError(f"{path}: not the state of a run: {error}") from None


def _state_folders(run: Path) -> list[Path]:
    """State folders of a run, newest first."""
    folders = [p for p in (run / "state").glob("step-*") if p.is_dir() and p.name[5:].isdigit()]
    return sorted(folders, key=lambda p: int(p.name[5:]), reverse=True)


def snapshot(state: Mapping[str, Any]) -> Snapshot:
    """A copy of a state on the CPU. Raises TypeError for values that are neither tensors nor JSON."""
    tensors: dict[str, Tensor] = {}

    def plain(value: Any, path: str) -> Any:
        if isinstance(value, Tensor):
            if (complete := ranks.gathered(value)) is not None:
                tensors[path] = complete.contiguous().clone()
            return {"tensor": path}
        if isinstance(value, Mapping):
            # Optimizers number their parameters; JSON has string keys only.
            keys = [[k, plain(v, f"{path}.{k}" if path else str(k))] for k, v in value.items()]
            return {"dict": keys}
        if isinstance(value, (list, tuple)):
            type_name = "tuple" if isinstance(value, tuple) else "list"
            return {type_name: [plain(v, f"{path}.{i}") for i, v in enumerate(value)]}
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        raise TypeError(f"{path}: a training state cannot contain a {type(value).__name__}")

    return Snapshot(tensors, plain(state, ""))


def _restore_tensors(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if not isinstance(value, dict):
        return value
    ((type_name, content),) = value.items()
    if type_name == "tensor":
        return tensors[content]
    if type_name == "dict":
        return {k: _restore_tensors(v, tensors) for k, v in content}
    return (tuple if type_name == "tuple" else list)(_restore_tensors(v, tensors) for v in content)
