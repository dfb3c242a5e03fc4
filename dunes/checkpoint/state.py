"""Save training states, one folder per saved step, and load the newest intact state to resume a run.

`<run>/state/step-000123/` has tensors as safetensors and other values as JSON, no pickle. A manifest with digests
is written last. Then the folder is renamed into place. Tensors that rarely change, such as the best weights, are
in a separate file. If all these tensors are unchanged, the file is a hard link to the previous state's file.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from dunes.checkpoint.weights import safetensors_file
from dunes.checkpoint.weights.lazy_tensor import combine, in_memory
from dunes.files import atomic, json_file
from dunes.files.atomic import folder_lock
from dunes.measure import ranks
from dunes.progress import Line

M = TypeVar("M", bound=nn.Module)
KEEP_STATES = 2
FORMAT = 2
STATE, TENSORS, MANIFEST = "state.json", "tensors.safetensors", "manifest.json"
UNCHANGING = "unchanging.safetensors"
PART, PARTS = "{}-{:05}-of-{:05}.safetensors", r"(tensors|unchanging)(-\d{5}-of-\d{5})?\.safetensors"


class Snapshot(NamedTuple):
    """A copy of a training state: tensors by dotted path, and JSON values with a path in place of each tensor.

    `unchanging` has the paths of tensors that rarely change from one state to the next.
    """

    tensors: dict[str, Tensor]
    plain: Any
    unchanging: Collection[str] = ()


def save_state(run: Path, step: int, state: Mapping[str, Any] | Snapshot) -> Path:
    """Write a state (a nested dict of tensors and JSON values), and delete all but the newest two states.

    Each rank writes its part. Raises OSError if the state cannot be written, and ValueError if a tensor is not
    finite; both errors leave earlier states in place.
    """
    folder = run / "state" / f"step-{step:06d}"
    copied = state if isinstance(state, Snapshot) else snapshot(state)
    with atomic.add_path_to_errors(folder), ExitStack() as stack:
        size = sum(ranks.all_gather(lambda: _finite_size(folder, copied)))
        (staged, *_) = ranks.all_gather(lambda: _stage(folder, size, stack) if ranks.is_first() else None)
        if staged is None:
            return folder
        digests = ranks.all_gather(lambda: _write_part(staged, copied, _state_folders(run)))
        ranks.all_gather(lambda: _publish(staged, folder, digests) if ranks.is_first() else None)
    return folder


def _finite_size(folder: Path, copied: Snapshot) -> int:
    """Bytes of this rank's tensors. Raises ValueError if a tensor has values that are not finite."""
    for name, tensor in copied.tensors.items():
        if tensor.is_floating_point() and not _is_finite(tensor):
            raise ValueError(f"{folder}: not saved, since {name} has values that are not finite")
    return sum(t.nbytes for t in copied.tensors.values())


def _stage(folder: Path, size: int, stack: ExitStack) -> Path | None:
    """A staging folder, removed when `stack` exits; None if an intact state of this step exists already."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder_lock(folder.parent):
        if _is_intact(folder):
            return None
    staged = stack.enter_context(atomic.staging_folder(folder))
    atomic.require_free_space(folder, size + (1 << 16))
    return staged


def _write_part(staged: Path, copied: Snapshot, earlier: Sequence[Path]) -> dict[str, str]:
    """Write this rank's tensors, and on the first rank all other values; returns each file's SHA-256.

    The file of unchanging tensors is a hard link to the newest `earlier` state's file if the bytes are equal.
    """
    written, digests = list[Path](), dict[str, str]()
    for name, kept in (TENSORS, False), (UNCHANGING, True):
        tensors = {key: t for key, t in copied.tensors.items() if (key in copied.unchanging) == kept}
        path = staged / (PART.format(name[:-12], ranks.rank() + 1, ranks.count()) if ranks.count() > 1 else name)
        if kept and earlier and (digest := _link(path, earlier[0] / path.name, tensors)):
            digests[path.name] = digest
        elif tensors or not kept:
            safetensors_file.write_file(path, in_memory(tensors))
            written.append(path)
    if ranks.is_first():
        written.append(staged / STATE)
        written[-1].write_text(json.dumps({"format": FORMAT, "state": copied.plain}))
    for path in written:
        atomic.fsync_path(path)
    return digests | {path.name: atomic.digest(path) for path in written}


def _link(path: Path, earlier: Path, tensors: Mapping[str, Tensor]) -> str:
    """If the file `earlier` has exactly these tensors, hard-link it as `path`, and return its SHA-256, else ""."""
    with suppress(OSError):  # there is no such file, or the disk has no hard links
        digest, own = atomic.digest(earlier), hashlib.sha256()
        for part in safetensors_file.file_parts(in_memory(tensors)):
            own.update(part)
        if own.hexdigest() == digest:
            os.link(earlier, path)
            return digest
    return ""


def _verify(folder: Path) -> None:
    """Raise ValueError, naming the first file that is missing or differs from the manifest.

    Each rank reads some of the files.
    """
    digests = json_file.read(folder / MANIFEST).get("files", {})
    names = sorted({STATE, *_tensor_files(digests)})
    for path in [folder / name for name in names][ranks.rank() :: ranks.count()]:
        if not path.is_file() or digests.get(path.name) is None:
            raise ValueError(f"{path}: missing, here or in {MANIFEST}")
        if digests[path.name].get("sha256") != atomic.digest(path):
            raise ValueError(f"{path}: not the bytes that were written")


def _tensor_files(names: Iterable[str]) -> list[str]:
    """Names of the files with tensors, in the order of the ranks that wrote them."""
    files = sorted(name for name in names if re.fullmatch(PARTS, name))
    return files if any(name.startswith("tensors") for name in files) else [TENSORS, *files]


def _publish(staged: Path, folder: Path, digests: Sequence[Mapping[str, str]]) -> None:
    """Write the manifest and rename the state into place; delete all but the newest two states.

    Does nothing if another writer has already written an intact state of this step.
    """
    files = {name: {"sha256": digest} for part in digests for name, digest in part.items()}
    (staged / MANIFEST).write_text(json.dumps({"files": files}))
    atomic.fsync_path(staged / MANIFEST)
    atomic.fsync_path(staged)
    with folder_lock(folder.parent):
        if _is_intact(folder):
            return
        shutil.rmtree(folder, ignore_errors=True)
        os.rename(staged, folder)
        atomic.fsync_path(folder.parent)  # reaches the disk before an older state is deleted
        for old in _state_folders(folder.parent.parent)[KEEP_STATES:]:
            shutil.rmtree(old, ignore_errors=True)


def _is_finite(tensor: Tensor) -> bool:
    """True if all values are finite, computed by numpy in the calling thread.

    PyTorch would start another thread pool for this thread. With more threads than processors, libgomp puts
    waiting threads to sleep sooner; training was 40 % slower.
    """
    if tensor.dtype == torch.bfloat16:  # numpy has no bfloat16; an exponent of all ones is not finite
        return bool((tensor.detach().view(torch.int16).numpy() & 0x7F80 != 0x7F80).all())
    return bool(np.isfinite(tensor.detach().numpy()).all())


def latest_state(run: Path, report: Line = lambda line: None) -> Path | None:
    """The folder of the newest intact state, or None; `report` gets a line for each newer, damaged state."""
    if not (states := ranks.broadcast(_state_folders(run))):
        return None
    # Without the lock, another writer might delete the state that is being verified.
    with folder_lock(run / "state") if ranks.is_first() else nullcontext():
        for folder in states:
            try:
                ranks.all_gather(partial(_verify, folder))
                return folder
            except ValueError as error:
                report(f"{error}; going back to an older state")
    return None


def _is_intact(folder: Path) -> bool:
    with suppress(ValueError), ranks.alone():  # `alone`: this rank verifies all files
        _verify(folder)
        return True
    return False


def load_state(folder: Path) -> dict[str, Any]:
    """The nested dict of a saved state. Raises ValueError if the state has another format or is damaged."""
    path = folder / STATE
    content = json_file.parse(path.read_bytes(), path)
    if (number := content.get("format")) != FORMAT:
        raise ValueError(
            f"{folder}: its format is {number!r:.60}, and this version reads {FORMAT}; "
            "resume with the version that wrote it, or start another run"
        )
    try:
        state = _restore_tensors(content["state"], _load_tensors(folder))
        return dict(state)
    except (KeyError, ValueError, TypeError, RecursionError, SafetensorError) as error:
        raise ValueError(f"{path}: not the state of a run: {error!r:.200}") from None


def _load_tensors(folder: Path) -> dict[str, Tensor]:
    """The tensors of all ranks' files. If a tensor was saved in parts, each rank keeps only its own rows."""
    parts: dict[str, list[Tensor]] = {}
    for name in _tensor_files(path.name for path in folder.iterdir()):
        for key, tensor in load_file(folder / name).items():
            parts.setdefault(key, []).append(tensor)
    return {key: ranks.merged(tensors) for key, tensors in parts.items()}


def _state_folders(run: Path) -> list[Path]:
    """State folders of a run, newest first."""
    folders = [p for p in (run / "state").glob("step-*") if p.is_dir() and p.name[5:].isdigit()]
    return sorted(folders, key=lambda p: int(p.name[5:]), reverse=True)


def snapshot(state: Mapping[str, Any], unchanging: Collection[str] = ()) -> Snapshot:
    """A copy of a state on the CPU; for a sharded tensor, only this rank's shard is copied.

    Tensors under the keys in `unchanging` are not copied, so the caller must never modify these tensors. While
    these tensors stay equal, `save_state` writes them only once. Raises TypeError for values that are neither
    tensors nor JSON.
    """
    tensors: dict[str, Tensor] = {}
    values = _plain(state, "", tensors, unchanging)
    return Snapshot(tensors, values, frozenset(path for path in tensors if path.partition(".")[0] in unchanging))


# A recursive inner function would keep the tensors in memory until the next garbage collection.
def _plain(value: Any, path: str, tensors: dict[str, Tensor], unchanging: Collection[str]) -> Any:
    """The JSON form of a value of a state; adds the value's tensors to `tensors` under their dotted paths."""
    if isinstance(value, Tensor):
        if (own := ranks.local_shard(value.detach())) is not None:
            own = own.cpu().contiguous()
            tensors[path] = own if path.partition(".")[0] in unchanging else own.clone()
        return {"tensor": path}

    def inner(key: object, v: Any) -> Any:
        return _plain(v, f"{path}.{key}" if path else str(key), tensors, unchanging)

    if isinstance(value, Mapping):
        # A list of pairs, since optimizers have integer keys, and JSON only string keys.
        return {"dict": [[key, inner(key, v)] for key, v in value.items()]}
    if isinstance(value, (list, tuple)):
        return {"tuple" if isinstance(value, tuple) else "list": [inner(i, v) for i, v in enumerate(value)]}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"{path}: a training state cannot contain a {type(value).__name__}")


def _restore_tensors(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if not isinstance(value, dict):
        return value
    ((type_name, content),) = value.items()
    if type_name == "tensor":
        return tensors[content]
    if type_name == "dict":
        return {k: _restore_tensors(v, tensors) for k, v in content}
    return (tuple if type_name == "tuple" else list)(_restore_tensors(v, tensors) for v in content)


def gathered(model: M, outline: M | None, folder: Path) -> M:
    """Gather a sharded model on the first rank; returns `outline`, on the first rank filled with the complete
    weights.

    Each rank writes its part to a temporary file beside `folder`; no rank has all weights in memory. `outline` is
    on the meta device. If `outline` is None, returns `model`. Raises OSError if a rank cannot write.
    """
    if outline is None:
        return model
    weights = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    names = [name for name, tensor in weights.items() if ranks.is_sharded(tensor)]
    own = {name: part.cpu() for name in names if (part := ranks.local_shard(weights[name])) is not None}
    with ExitStack() as stack:
        stage = lambda: stack.enter_context(atomic.staging_folder(folder)) if ranks.is_first() else None
        (staged, *_) = ranks.all_gather(stage)
        assert staged is not None, "the first rank's"
        path = staged / PART.format("tensors", ranks.rank() + 1, ranks.count())
        ranks.all_gather(lambda: safetensors_file.write_file(path, in_memory(own)))
        if ranks.is_first():
            files = [safetensors_file.tensors(file) for file in sorted(staged.iterdir())]
            parts = {name: [file[name] for file in files if name in file] for name in names}
            complete = {name: combine(torch.cat, parts[name]) for name in names}
            safetensors_file.write_file(staged / TENSORS, complete)
            others = {name: tensor.cpu() for name, tensor in weights.items() if name not in parts}
            outline.load_state_dict(others | load_file(staged / TENSORS), assign=True)
    return outline
