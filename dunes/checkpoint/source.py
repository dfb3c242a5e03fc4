"""What lies in a model folder, in whatever form it came: known from headers alone."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

from dunes.checkpoint import card as cards
from dunes.checkpoint import header, native, pickle_file
from dunes.checkpoint.built import function_of, loading_hint
from dunes.checkpoint.file_in_folder import file_in_folder
from dunes.checkpoint.lazy_tensor import LazyTensor, Weights, in_memory, renamed
from dunes.checkpoint.state_dict_diff import Difference, compare, summarize
from dunes.models import FAMILIES, family_of, weight_names
from dunes.models.meta import build_on_meta, weight_counts
from dunes.models.names import Names, match_indices, substitute, to_theirs
from dunes.text import json_file

CONFIG = "config.json"
SINGLE = ("model.safetensors", "pytorch_model.bin")
"""One file, or the same name with .index.json for several."""
ADAPTER = "adapter_config.json"
MOST_SHARDS = 10_000
MOST_TENSORS = 200_000
"""A mixture of 384 experts in 60 blocks has 70,000; each takes time to make even without numbers."""


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
        with _blaming(self.folder / (native.PARAMS if self.form == "native" else CONFIG)):
            return FAMILIES[self.family].from_hf(dict(self.words))

    @cached_property
    def expected(self) -> dict[str, LazyTensor]:
        """The tensors that the config asks for, by our names, without numbers.

        Raises ValueError if they are far more than the files hold, before anything is built.
        """
        self._bounded(self.files.values())
        return in_memory(build_on_meta(self.family, self.config).state_dict(), self.form)

    def _bounded(self, files: Iterable[LazyTensor]) -> None:
        """Raise ValueError if these files hold far less than the config describes."""
        sizes = [_numbers(w) for w in files]
        there, slack = sum(sizes), 1 << 20
        try:
            numbers, tensors = weight_counts(self.family, self.config)
        except RuntimeError:  # torch counts the bytes of a tensor in 64 bits
            raise ValueError(
                f"{self.folder}: the config describes a matrix of more than {1 << 63:.2e} bytes, "
                f"the files hold {there:.2e} parameters; one of them belongs to another model"
            ) from None
        if numbers > 2 * there + slack:
            raise ValueError(
                f"{self.folder}: the config describes {numbers:.2e} parameters ({2 * numbers:.2e} bytes in "
                f"bfloat16), the files hold {there:.2e}; one of them belongs to another model"
            )
        if self.config.depth > len(sizes) + 100 or tensors > MOST_TENSORS:
            raise ValueError(
                f"{self.folder}: the config describes {self.config.depth:,} blocks and {tensors:,} tensors, the "
                f"files hold {len(sizes):,} ({MOST_TENSORS:,} is the limit); one of them belongs to another model"
            )

    @cached_property
    def compared(self) -> tuple[dict[str, LazyTensor], list[Difference]]:
        """The files' tensors by our names, and all that keeps them from being this model."""
        return compare(self.expected, self.files, self.names, self.ignored)

    def weights(self) -> dict[str, LazyTensor]:
        """The tensors by our names. Raises ValueError that lists every difference."""
        weights, differences = self.compared
        if differences:
            raise ValueError(f"{self.folder}: {summarize(differences)}")
        return weights


def _numbers(stored: LazyTensor) -> int:
    return prod(stored.shape)


@contextmanager
def _blaming(path: Path) -> Iterator[None]:
    """Inside, whatever is wrong with the words of a file is said in one line that names it."""
    try:
        yield
    except KeyError as key:
        raise ValueError(f"{path}: {key} is missing") from None
    except (ValueError, TypeError, AttributeError, OverflowError) as error:
        said = " ".join(str(error).split()).removeprefix(f"{CONFIG}: ").removeprefix(f"{native.PARAMS}: ")
        raise ValueError(f"{path}: {said if len(said) < 400 else said[:400] + '...'}") from None


def open_source(folder: Path, renames: Mapping[str, str] | None = None) -> Source:
    """A model folder in any of the forms read here. Raises ValueError that says what was looked for.

    `renames` maps foreign names of tensors (with `{i}` for a number) to Hugging Face's.
    """
    if (function := function_of(cards.read(folder), folder / cards.CARD)) is not None:
        raise ValueError(loading_hint(folder, function[0]))
    if (folder / CONFIG).is_file() and (files := _weights(folder, *SINGLE)) is not None:
        return _hugging_face(folder, _renamed(files, renames or {}, folder))
    if (folder / native.PARAMS).is_file():
        if renames:
            raise ValueError(f"{folder}: a native folder, whose names are known; leave out the table of names")
        return _native(folder)
    if (folder / ADAPTER).is_file():
        raise ValueError(_adapter(folder))
    if not (folder / CONFIG).is_file() and (folder / "state").is_dir():
        raise ValueError(
            f"{folder}: a run without a model yet, still training, or stopped before its first save; "
            f"go on with: dunes train --resume --out {folder}"
        )
    if not (folder / CONFIG).is_file():
        raise ValueError(f"{folder / CONFIG}: no such file; {folder} is not a model folder")
    forms = ", ".join([*SINGLE, *(f"{s}.index.json" for s in SINGLE)])
    raise ValueError(f"{folder}: no weights; looked for {forms}, and consolidated.* with {native.PARAMS}")


def _adapter(folder: Path) -> str:
    base = header.quote(
        json_file.read(folder / ADAPTER, json_file.MAX_CONFIG_BYTES).get("base_model_name_or_path")
    )
    return f"{folder}: an adapter of {base}, not a whole model; merge it first: dunes augment merge {folder} OUT"


def _hugging_face(folder: Path, files: dict[str, LazyTensor]) -> Source:
    words = json_file.read(folder / CONFIG, json_file.MAX_CONFIG_BYTES)
    if (quantized := words.get("quantization_config")) is not None:
        method = quantized.get("quant_method") if isinstance(quantized, dict) else quantized
        raise ValueError(
            f"{folder / CONFIG}: quantized by {header.quote(method)}; only plain weights are read, get those"
        )
    with _blaming(folder / CONFIG):
        family = family_of(words)
    ignored = tuple(getattr(FAMILIES[family], "IGNORED_NAMES", ()))
    return Source(folder, "Hugging Face", words, files, weight_names(family), ignored)


def _renamed(files: dict[str, LazyTensor], renames: Mapping[str, str], folder: Path) -> dict[str, LazyTensor]:
    """The tensors under the names that a user's table gives them.

    Raises ValueError for two under one name, and for a line of the table that names none.
    """
    if idle := [k for k in renames if all(match_indices(k, key) is None for key in files)]:
        raise ValueError(f"{folder}: no tensor is called {idle[0]}, which the table of names has")
    result: dict[str, LazyTensor] = {}
    for key, stored in files.items():
        hit = next(((to, at) for at_, to in renames.items() if (at := match_indices(at_, key)) is not None), None)
        name = key if hit is None else substitute(*hit)
        if name in result:
            raise ValueError(f"{folder}: two tensors are called {name} by the table of names, one of them {key}")
        result[name] = stored
    return result


def _native(folder: Path) -> Source:
    said = json_file.read(folder / native.PARAMS, json_file.MAX_CONFIG_BYTES)
    shards = _consolidated(folder)
    heads = [s["output.weight"].shape for s in shards if "output.weight" in s]
    rows = heads or [s["tok_embeddings.weight"].shape for s in shards if "tok_embeddings.weight" in s]
    if not rows or any(len(shape) != 2 for shape in rows):
        raise ValueError(
            f"{folder}: neither output.weight nor tok_embeddings.weight is a matrix in consolidated.*"
        )
    whole = rows[0][0] == said.get("vocab_size") or not heads
    with _blaming(folder / native.PARAMS):
        tied = bool(said.get("tied_embeddings")) or not heads
        words, notes = native.to_hf_config(said, rows[0][0] if whole else sum(r[0] for r in rows), tied)
    unnamed = Source(folder, "native", words, shards[0], [], native.IGNORED_NAMES, tuple(notes))
    unnamed._bounded(w for s in shards for w in s.values())
    names = native.names(words)
    expected = in_memory(build_on_meta(unnamed.family, unnamed.config).state_dict())
    moves, _ = to_theirs(names, expected)
    shapes = {key: stored.shape for key, stored in renamed(moves, expected).items()}
    return replace(unnamed, files=native.join_shards(shards, shapes), names=names)


def _consolidated(folder: Path) -> list[dict[str, LazyTensor]]:
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


def _weights(folder: Path, *names: str) -> dict[str, LazyTensor] | None:
    """The tensors in the first of these files, or of those that its index names; None if none is there."""
    for name in names:
        if (folder / name).exists():
            return tensors(folder / name)
        if (index := folder / f"{name}.index.json").is_file():
            return indexed_tensors(index)
    return None


def indexed_tensors(index: Path) -> dict[str, LazyTensor]:
    """The tensors of all shards that an index names.

    Raises ValueError for a name outside of the folder, for what is no plain file, and where the index
    and the headers differ, before any number is read.
    """
    where = json_file.read(index).get("weight_map")
    if not isinstance(where, dict) or not where or not all(isinstance(f, str) for f in where.values()):
        raise ValueError(f"{index}: 'weight_map' must name a file for each tensor")
    said: dict[str, set[str]] = {}
    for key, name in where.items():
        said.setdefault(name, set()).add(key)
    if len(said) > MOST_SHARDS:
        raise ValueError(f"{index}: names {len(said):,} files; {MOST_SHARDS:,} are the limit")
    paths = {name: file_in_folder(index.parent, name, index) for name in sorted(said)}
    files: dict[str, LazyTensor] = {}
    for name, path in paths.items():
        there = tensors(path)
        if (odd := min(there.keys() ^ said[name], default=None)) is not None:
            lacks = "is not in that file" if odd in said[name] else f"belongs to {where.get(odd, 'no file')}"
            raise ValueError(f"{path}: {header.quote(odd)} {lacks}, says {index.name}; fetch both again")
        files |= there
    return files


def tensors(path: Path) -> dict[str, LazyTensor]:
    """The tensors of one file, safetensors or pickle by its name."""
    return header.tensors(path) if path.suffix == ".safetensors" else pickle_file.tensors(path)
