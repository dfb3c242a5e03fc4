"""The finished parts of a change that is being made from folder to folder, so that it goes on after a kill.

`OUT/.unfinished/` has what is being made (`change.json`), and a folder for each part: the tensors of its block,
the hidden states that the next one reads (only of the last part), and a manifest with digests. A part is renamed
into place when all of it is on the disk. `checkpoint.save` deletes them when the model is complete.
"""

import json
import shutil
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dunes import __version__
from dunes.augment.calibrate import States
from dunes.augment.change import Change, Part
from dunes.augment.changes import Tensors
from dunes.checkpoint.files import atomic, header, safetensors_writer
from dunes.checkpoint.files.lazy_tensor import in_memory
from dunes.checkpoint.loading import base_folder, is_adapter
from dunes.checkpoint.model_folder import UNFINISHED
from dunes.text import json_file
from dunes.units import plural

CHANGE, PART, WEIGHTS, STATES = "change.json", "part.json", "weights.safetensors", "states.safetensors"
HIDDEN = "hidden"
READ = (".safetensors", ".bin", ".pth", ".gguf", ".json")
"""Suffixes of the files that a model is read from."""


class Unfinished:
    """The parts in `out` of a change to the model in `source`, a Store of `apply_change`.

    The caller holds the lock of `out`. `kept` is the number of parts, `lines` say what was there.
    """

    def __init__(self, source: Path, out: Path) -> None:
        self.folder, self.source, self._stamp = out / UNFINISHED, source, source_stamp(source)
        self.kept, self.lines, self._begun = 0, list[str](), False

    def begin(self, change: Change, ids: Tensor | None) -> list[tuple[Part, Tensors]]:
        """The intact parts of this change by this text to this source; others are deleted."""
        record = json.loads(json.dumps(self._record(change, ids)))
        parts: list[tuple[Part, Tensors]] = []
        self._begun = True
        if self.folder.exists():
            try:
                _require_equal(record, self.folder / CHANGE)
                parts = self._read()
                if parts:
                    self.lines.append(
                        f"{len(parts)} of {plural(len(change.parts()), 'part')} were finished before"
                    )
            except ValueError as error:
                self.lines.append(f"made anew: {error}")
                shutil.rmtree(self.folder)
        self.kept = len(parts)
        if not parts:
            self.folder.mkdir(exist_ok=True)
            atomic.write_file(self.folder / CHANGE, json.dumps(record).encode())
        return parts

    def keep(self, part: Part, tensors: Tensors) -> Tensors:
        """Write a part; returns its tensors as views of the file. Raises OSError if it cannot be written."""
        states = {} if part.states is None else {HIDDEN: part.states.hidden}
        files = {WEIGHTS: in_memory(tensors)} | ({STATES: in_memory(states)} if states else {})

        def write(staged: Path) -> None:
            for name, content in files.items():
                safetensors_writer.write_file(staged / name, content)
            layer = None if part.states is None else part.states.layer
            digests = {name: atomic.digest(staged / name) for name in files}
            record = {"change": part.change.record(), "layer": layer, "files": digests}
            (staged / PART).write_text(json.dumps(record))

        size = sum(w.nbytes for content in files.values() for w in content.values())
        atomic.write_folder(self._part(self.kept), write, size)
        self._delete_states(self.kept)
        self.kept += 1
        return _read_tensors(self._part(self.kept - 1) / WEIGHTS)

    def require_source(self) -> None:
        """Raise ValueError if a file of the source was written to since; it may be removed."""
        now = source_stamp(self.source)
        if changed := [path for path in now if path in self._stamp and now[path] != self._stamp[path]]:
            raise ValueError(f"{changed[0]}: changed while it was being read; try again when nothing writes to it")

    def size(self) -> int:
        """Bytes of the parts."""
        return sum(file.stat().st_size for file in self.folder.rglob("*") if file.is_file())

    def remove(self) -> None:
        """Delete all parts of this change; those of another stay until this one has begun."""
        if self._begun:
            shutil.rmtree(self.folder, ignore_errors=True)

    def remove_if_empty(self) -> None:
        """Delete the folder if it has no part of any change."""
        if self._begun and not [*self.folder.glob("part-*")]:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _record(self, change: Change, ids: Tensor | None) -> dict[str, Any]:
        """All that the parts depend on."""
        text = None if ids is None else sha256(ids.cpu().contiguous().numpy().data).hexdigest()
        versions = {"dunes": __version__, "torch": torch.__version__}
        return {"arguments": change.record(), "calibration text": text, "source": self._stamp, "version": versions}

    def _part(self, number: int) -> Path:
        return self.folder / f"part-{number:05d}"

    def _read(self) -> list[tuple[Part, Tensors]]:
        """The parts up to the last. Raises ValueError for one that is damaged."""
        parts, number = [], 0
        while (folder := self._part(number)).is_dir():
            number += 1
            parts.append(_read_part(folder, last=not self._part(number).is_dir()))
        self._delete_states(number - 1)
        return parts

    def _delete_states(self, last: int) -> None:
        """Delete the states of the parts before the last one; those that have none keep the ones before them."""
        with_states = [i for i in range(last + 1) if (self._part(i) / STATES).is_file()]
        for number in with_states[:-1]:
            (self._part(number) / STATES).unlink()


def _require_equal(record: dict[str, Any], file: Path) -> None:
    """Raise ValueError that names what differs from the record in the file."""
    before = json_file.read(file) if file.is_file() else {}
    if other := [key for key, value in record.items() if before.get(key) != value]:
        raise ValueError(f"the parts in {file.parent} have another {' and '.join(other)}")


def _read_part(folder: Path, last: bool) -> tuple[Part, Tensors]:
    """A part; the last one with the states behind it. Raises ValueError if it is damaged."""
    record = json_file.read(folder / PART)
    digests = record.get("files", {})
    for name in (WEIGHTS, *((STATES,) if last and STATES in digests else ())):
        if not (folder / name).is_file() or atomic.digest(folder / name) != digests.get(name):
            raise ValueError(f"{folder / name} is damaged")
    states = None
    if last and STATES in digests:
        # Not mapped: each block writes over all of them.
        states = States(_read_tensors(folder / STATES)[HIDDEN].clone(), record["layer"])
    return Part(Change.of(record.get("change")), states=states), _read_tensors(folder / WEIGHTS)


def _read_tensors(file: Path) -> dict[str, Tensor]:
    return {name: tensor.read() for name, tensor in header.tensors(file).items()}


def source_stamp(source: Path) -> dict[str, list[int]]:
    """Size, time and number of each file that a model is read from, for an adapter also of its base."""
    folders = [source, base_folder(source)] if source.is_dir() and is_adapter(source) else [source]
    files = [f for folder in folders for f in (sorted(folder.iterdir()) if folder.is_dir() else [folder])]
    stamps = {str(f.absolute()): f.stat() for f in files if f.suffix in READ and f.is_file()}
    return {path: [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino] for path, stat in stamps.items()}
