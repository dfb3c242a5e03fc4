"""Writing so that after any crash the old or the new is there, whole.

Data is forced to the disk before a name points at it, and the name before we call it done.
"""

import json
import os
import shutil
from collections.abc import Callable
from hashlib import file_digest, sha256
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

MANIFEST = "manifest.json"


def sync(path: Path) -> None:
    """Force a file's data, or a folder's names, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def digest(path: Path) -> str:
    """SHA-256 of a file, in hex."""
    with path.open("rb") as file:
        return file_digest(file, "sha256").hexdigest()


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write a safetensors file. Raises OSError, as every other failed write does."""
    try:
        save_file(tensors, path, {"format": "pt"})
    except SafetensorError as error:
        raise OSError(f"{path}: cannot be written: {error}") from None


def write_file(path: Path, data: bytes) -> None:
    """Replace one file."""
    staged = path.with_name(f".{path.name}.new")
    staged.write_bytes(data)
    sync(staged)
    os.replace(staged, path)
    sync(path.parent)


def write_folder(folder: Path, fill: Callable[[Path], None]) -> None:
    """Make a folder that appears whole or not at all; `fill` writes plain files into a staging folder.

    A manifest with each file's size and SHA-256 is written last. Raises OSError, and leaves what was
    there untouched, if anything cannot be written.
    """
    staged = folder.with_name(f".{folder.name}.new")
    shutil.rmtree(staged, ignore_errors=True)
    try:
        staged.mkdir(parents=True)
        fill(staged)
        files = sorted(staged.iterdir())
        for file in files:
            sync(file)
        card = {f.name: {"size": f.stat().st_size, "sha256": digest(f)} for f in files}
        (staged / MANIFEST).write_text(json.dumps({"files": card, "sha256": _seal(card)}, indent=1))
        sync(staged / MANIFEST)
        sync(staged)
        os.rename(staged, folder)
        sync(folder.parent)
    except BaseException:
        shutil.rmtree(staged, ignore_errors=True)
        raise


def _seal(card: dict[str, Any]) -> str:
    """A digest of what the manifest says, kept in the manifest: a bit may flip there, too."""
    return sha256(json.dumps(card, sort_keys=True).encode()).hexdigest()


def verify_folder(folder: Path) -> None:
    """Raise ValueError that names the first file that is not what the folder's manifest says."""
    path = folder / MANIFEST
    if not path.is_file():
        raise ValueError(f"{path}: missing")
    try:
        manifest = json.loads(path.read_bytes())
        card = manifest["files"]
        whole = manifest["sha256"] == _seal(card)
    except (ValueError, KeyError, TypeError):
        whole = False
    if not whole:
        raise ValueError(f"{path}: damaged")
    verify(folder, card)


def verify(folder: Path, card: dict[str, Any]) -> None:
    """Raise ValueError that names the first file whose size or SHA-256 is not the card's."""
    for name, expected in card.items():
        file = folder / name
        if not file.is_file():
            raise ValueError(f"{file}: missing")
        if file.stat().st_size != expected["size"] or digest(file) != expected["sha256"]:
            raise ValueError(f"{file}: not the bytes that were written")
