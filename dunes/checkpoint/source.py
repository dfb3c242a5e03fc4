"""What lies in a model folder, in whatever form it came: known from headers alone."""

import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from dunes.checkpoint import header, json_file, native, pickled
from dunes.checkpoint.differences import Difference, compare, report
from dunes.checkpoint.stored import Stored, Weights, held, moved
from dunes.models import FAMILIES, family_of, spellings
from dunes.models.names import Names, filled, numbers, to_theirs
from dunes.models.outline import outline, parameters

CONFIG = "config.json"
SINGLE = ("model.safetensors", "pytorch_model.bin")
"""One file, or the same name with .index.json for several."""
MOST_SHARDS = 10_000


@dataclass(frozen=True)
class Source:
    """A model that has not been read yet. `words` are its config.json, or what that would be.

    `files` are the tensors by the names in the files, `names` says what these are to us, `notes` what
    had to be assumed, and `card` is our dunes.json if there is one.
    """

    folder: Path
    form: str
    words: Mapping[str, Any]
    files: Weights
    names: Names
    ignored: tuple[str, ...]
    notes: tuple[str, ...] = ()
    card: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def family(self) -> str:
        return family_of(dict(self.words))

    @cached_property
    def config(self) -> Any:
        """Raises ValueError for what cannot be built."""
        try:
            return FAMILIES[self.family].from_hf(dict(self.words))
        except KeyError as key:
            raise ValueError(f"{self.folder / CONFIG}: {key} is missing") from None
        except (TypeError, AttributeError, OverflowError) as error:
            raise ValueError(f"{self.folder / CONFIG}: {error}") from None

    @cached_property
    def expected(self) -> dict[str, Stored]:
        """The tensors that the config asks for, by our names, without numbers.

        Raises ValueError if they are far more than the files hold, before anything is built.
        """
        described, there = parameters(self.family, self.config), sum(_numbers(w) for w in self.files.values())
        if described > 2 * there + (1 << 20):
            raise ValueError(
                f"{self.folder}: the config describes {described:.2e} parameters ({2 * described:.2e} bytes in "
                f"bfloat16), the files hold {there:.2e}; one of them belongs to another model"
            )
        return held(outline(self.family, self.config).state_dict(), self.form)

    @cached_property
    def compared(self) -> tuple[dict[str, Stored], list[Difference]]:
        """The files' tensors by our names, and all that keeps them from being this model."""
        return compare(self.expected, self.files, self.names, self.ignored)

    def weights(self) -> dict[str, Stored]:
        """The tensors by our names. Raises ValueError that lists every difference."""
        weights, differences = self.compared
        if differences:
            raise ValueError(f"{self.folder}: {report(differences)}")
        return weights


def _numbers(stored: Stored) -> int:
    return stored.nbytes // stored.dtype.itemsize


def opened(folder: Path, renamed: Mapping[str, str] | None = None) -> Source:
    """A model folder in any of the forms read here. Raises ValueError that says what was looked for.

    `renamed` maps foreign names of tensors (with `{i}` for a number) to Hugging Face's.
    """
    if (folder / CONFIG).is_file() and (files := _weights(folder, *SINGLE)) is not None:
        return _hugging_face(folder, _renamed(files, renamed or {}, folder))
    if (folder / native.PARAMS).is_file():
        return _native(folder)
    if not (folder / CONFIG).is_file():
        raise ValueError(f"{folder / CONFIG}: no such file; {folder} is not a model folder")
    forms = ", ".join([*SINGLE, *(f"{s}.index.json" for s in SINGLE)])
    raise ValueError(f"{folder}: no weights; looked for {forms}, and consolidated.* with {native.PARAMS}")


def _hugging_face(folder: Path, files: dict[str, Stored]) -> Source:
    words = json_file.read(folder / CONFIG)
    if (quantized := words.get("quantization_config")) is not None:
        method = quantized.get("quant_method") if isinstance(quantized, dict) else quantized
        raise ValueError(f"{folder / CONFIG}: quantized by {method!r}; only plain weights are read, get those")
    family = family_of(words)
    ignored = tuple(getattr(FAMILIES[family], "IGNORED", ()))
    return Source(folder, "Hugging Face", words, files, spellings(family), ignored)


def _renamed(files: dict[str, Stored], renamed: Mapping[str, str], folder: Path) -> dict[str, Stored]:
    """The tensors under the names that a user's table gives them. Raises ValueError for two under one name."""
    result: dict[str, Stored] = {}
    for key, stored in files.items():
        hit = next(((to, at) for at_, to in renamed.items() if (at := numbers(at_, key)) is not None), None)
        name = key if hit is None else filled(*hit)
        if name in result:
            raise ValueError(f"{folder}: two tensors are called {name} by the table of names, one of them {key}")
        result[name] = stored
    return result


def _native(folder: Path) -> Source:
    said = json_file.read(folder / native.PARAMS)
    shards = _consolidated(folder)
    heads = [s["output.weight"].shape for s in shards if "output.weight" in s]
    rows = heads or [s["tok_embeddings.weight"].shape for s in shards if "tok_embeddings.weight" in s]
    if not rows or any(len(shape) != 2 for shape in rows):
        raise ValueError(
            f"{folder}: neither output.weight nor tok_embeddings.weight is a matrix in consolidated.*"
        )
    whole = rows[0][0] == said.get("vocab_size") or not heads
    words, notes = native.words(said, rows[0][0] if whole else sum(r[0] for r in rows), not heads)
    unjoined = Source(folder, "native", words, shards[0], native.names(words), native.IGNORED)
    described, there = (
        parameters(unjoined.family, unjoined.config),
        sum(_numbers(w) for s in shards for w in s.values()),
    )
    if described > 2 * there + (1 << 20):
        return unjoined  # `expected` refuses it
    expected = held(outline(unjoined.family, unjoined.config).state_dict())
    moves, _ = to_theirs(unjoined.names, expected)
    shapes = {key: stored.shape for key, stored in moved(moves, expected).items()}
    files = native.joined(shards, shapes)
    return Source(folder, "native", words, files, unjoined.names, native.IGNORED, tuple(notes))


def _consolidated(folder: Path) -> list[dict[str, Stored]]:
    """The tensors of each native file, in order. Raises ValueError if one is missing between others."""
    if (files := _weights(folder, "consolidated.safetensors")) is not None:
        return [files]
    found = sorted([*folder.glob("consolidated.*.pth"), *folder.glob("consolidated.*.pt")])
    if not found:
        raise ValueError(f"{folder}: no weights; looked for consolidated.safetensors and consolidated.NN.pth")
    if [path.name.split(".")[1] for path in found] != [f"{i:02d}" for i in range(len(found))]:
        there = ", ".join(path.name for path in found)
        raise ValueError(f"{folder}: one file is missing or twice there, found {there}")
    return [tensors(path) for path in found]


def _weights(folder: Path, *names: str) -> dict[str, Stored] | None:
    """The tensors in the first of these files, or of those that its index names; None if none is there."""
    for name in names:
        if (folder / name).exists():
            return tensors(folder / name)
        if (index := folder / f"{name}.index.json").is_file():
            return indexed(index)
    return None


def indexed(index: Path) -> dict[str, Stored]:
    """The tensors of all shards that an index names.

    Raises ValueError for a name outside of the folder, for what is no plain file, and where the index
    and the headers differ, before any number is read.
    """
    where = json_file.read(index).get("weight_map")
    if not isinstance(where, dict) or not where or not all(isinstance(f, str) for f in where.values()):
        raise ValueError(f"{index}: 'weight_map' must name a file for each tensor")
    shards = sorted(set(where.values()))
    if len(shards) > MOST_SHARDS:
        raise ValueError(f"{index}: names {len(shards):,} files; {MOST_SHARDS:,} are the limit")
    paths = [inside(index.parent, name, index) for name in shards]
    said: dict[str, set[str]] = {}
    for key, name in where.items():
        said.setdefault(name, set()).add(key)
    files: dict[str, Stored] = {}
    for path in paths:
        there = tensors(path)
        if odd := sorted(there.keys() ^ said[path.name])[:1]:
            lacks = (
                "is not in that file"
                if odd[0] in said[path.name]
                else f"belongs to {where.get(odd[0], 'no file')}"
            )
            raise ValueError(f"{path}: {odd[0]} {lacks}, says {index.name}; fetch both again")
        files |= there
    return files


def inside(folder: Path, name: str, index: Path) -> Path:
    """The plain file of that name in the folder. Raises ValueError if it lies elsewhere, or is another thing.

    The Hub's cache keeps a snapshot's files as links into a folder `blobs` beside all snapshots.
    """
    path = folder / name
    if name in ("", ".", "..") or Path(name).name != name or "\0" in name or "\\" in name:
        raise ValueError(f"{index}: {name!r} is not the name of a file in this folder")
    real, home = path.resolve(), folder.resolve()
    homes = [home, home.parents[1] / "blobs"] if home.parent.name == "snapshots" else [home]
    if real.parent not in homes:
        raise ValueError(f"{path}: leads out of the folder, to {real}")
    if not real.exists():
        raise ValueError(f"{path}: no such file, and {index.name} names it; fetch it")
    if not stat.S_ISREG(real.stat().st_mode):
        raise ValueError(f"{path}: not a plain file")
    return path


def tensors(path: Path) -> dict[str, Stored]:
    """The tensors of one file, safetensors or pickle by its name."""
    return header.tensors(path) if path.suffix == ".safetensors" else pickled.tensors(path)
