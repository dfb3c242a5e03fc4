"""Open a model folder in any supported format; only configs and the headers of weight files are read."""

import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from dunes.checkpoint.architecture import Architecture, Build, compare_structure
from dunes.checkpoint.card import CARD, CONFIG, explain, has_own_form, read_card, readable_folder, verified_card
from dunes.checkpoint.formats import gguf, native
from dunes.checkpoint.formats.quantized_weights import dense_weights
from dunes.checkpoint.weights.files import UNSHARDED, find_weights, tensors
from dunes.checkpoint.weights.lazy_tensor import LazyTensor, Weights, hf_weights, in_memory
from dunes.checkpoint.weights.safetensors_file import quote
from dunes.checkpoint.weights.state_dict_diff import Difference, Prefix, apply_renames, compare, summarize
from dunes.files import atomic, json_file
from dunes.files.model_file import find_file, require_inside, unfinished_downloads
from dunes.models import FAMILIES, build_on_meta, family_of, weight_names
from dunes.models.names import Names, for_heads
from dunes.parts import Decoder
from dunes.text.gguf_file import SUFFIX
from dunes.units import plural

POSITIONS = "embed.place.weight"
"""Name of learned position embeddings."""


@dataclass(frozen=True)
class Source:
    """A model whose weights have not been read yet. `hf_config` is its config.json, or an equivalent config.

    `files` has lazy tensors by their names in the files, `names` maps these to the model's names, `ignored` has
    patterns of names to skip, `notes` lists assumptions, and `card` is the content of dunes.json, if any. `own` is
    the architecture of a model that no Hugging Face config describes; its files use the model's names.
    """

    folder: Path
    format: str
    hf_config: Mapping[str, Any]
    files: Weights
    names: Names
    ignored: tuple[str, ...]
    notes: tuple[str, ...] = ()
    card: Mapping[str, Any] = field(default_factory=dict)
    own: Architecture | None = None

    def __repr__(self) -> str:
        return f"Source({self.folder}, {self.format} format, {plural(len(self.files), 'tensor')})"

    @cached_property
    def architecture(self) -> Architecture:
        """The model's architecture. Raises ValueError for a config that no model can be built from."""
        if self.own is not None:
            return self.own
        names = {"native": native.PARAMS, "GGUF": ""}
        with _naming_errors(self.folder / names.get(self.format, CONFIG)):
            family = family_of(dict(self.hf_config))
            return Architecture(family, FAMILIES[family].from_hf(dict(self.hf_config)))

    @property
    def family(self) -> str:
        return self.architecture.family

    @property
    def config(self) -> Any:
        """The family's config."""
        return self.architecture.config

    @property
    def context_length(self) -> int:
        """Number of tokens that the model can attend to. Raises ValueError if the card's number is invalid."""
        if self.own is None:
            return int(self.config.context_length)
        if self.architecture.function and self.card.get("context_length") is None:
            raise ValueError(
                f"{self.folder}: a network that is no language model; load it with checkpoint.load_network"
            )
        return context_length_of(self.card, self.folder, self.expected)

    @property
    def vocab(self) -> int | None:
        """Number of rows of the embedding; None if a function builds the model."""
        return None if self.architecture.function else self.config.vocab

    def outline(self) -> Decoder:
        """The model on the meta device; if a function builds the model, on the device that the function uses."""
        with _naming_errors(self.folder / (CONFIG if self.own is None else CARD)):
            return self.architecture.outline()

    @cached_property
    def expected(self) -> dict[str, LazyTensor]:
        """The tensors, without values, that a model with this config has, by the model's names.

        Raises ValueError, before the model is built, if the config has more blocks than the files have tensors.
        """
        if self.architecture.function is None:
            self._check_depth(len(self.files))
        return in_memory(self.outline().state_dict(), self.format)

    def _check_depth(self, tensors: int) -> None:
        """Raise ValueError if the config has more blocks than the files have tensors, which take long to build."""
        if (depth := self.config.depth) > tensors:
            described = f"the config describes {depth:,} blocks, the files have {plural(tensors, 'tensor')}"
            raise ValueError(f"{self.folder}: {described}; one of them belongs to another model")

    @property
    def assumed(self) -> tuple[str, ...]:
        """Assumptions made in reading the files, including the note on a `Prefix` of their tensors' names."""
        return (*self.notes, *filter(None, self.comparison[2:]))

    @cached_property
    def comparison(self) -> tuple[dict[str, LazyTensor], list[Difference], str]:
        """The files' tensors by the model's names, their differences from the model, and the `Prefix`'s note."""
        if self.own is not None:
            _ = self.expected  # raises for a far too large model before it is built
            outline, path = self.outline(), self.folder / CARD
            prefix = Prefix.of(self.files, self.expected)
            files = prefix.without(self.files)
            return files, compare_structure(outline, self.own, self.card, files, path), prefix.note
        return compare(self.expected, self.files, for_heads(self.names, self.config.heads), self.ignored)

    def weights(self) -> dict[str, LazyTensor]:
        """The files' tensors by the model's names, with a warning if a `Prefix` was removed or added.

        Raises ValueError, listing all differences, if the tensors do not fit the model.
        """
        weights, differences, prefix = self.comparison
        note = f"; {prefix}" if prefix else ""
        if differences and self.own is not None:
            listed, intact = "; ".join(map(str, differences)), all(d.kind == "structure" for d in differences)
            remedy = "; if this is intended, load model.safetensors with load_state_dict" if intact else ""
            built = f"{self.own.family} builds a different model from the saved one"
            raise ValueError(f"{self.folder}: {built}: {listed}{remedy}{note}")
        if differences:
            raise ValueError(f"{self.folder}: {summarize(differences)}{note}")
        if prefix:
            warnings.warn(f"{self.folder}: {prefix}", stacklevel=2)
        return weights


@contextmanager
def _naming_errors(path: Path) -> Iterator[None]:
    """Turn errors in the context into a ValueError on one line that names the file."""
    try:
        yield
    except KeyError as key:
        raise ValueError(f"{path}: {key} is missing") from None
    except (ValueError, TypeError, AttributeError, OverflowError, RuntimeError) as error:
        reason = " ".join(str(error).split()).removeprefix(f"{CONFIG}: ")
        raise ValueError(f"{path}: {reason if len(reason) < 400 else reason[:400] + '...'}") from None


def open_source(folder: Path, renames: Mapping[str, str] | None = None, build: Build | None = None) -> Source:
    """Open a model folder in any supported format. For other folders, raises ValueError with the file names tried.

    `renames` maps tensor names in the files (with `{i}` for an index) to Hugging Face's names. `build` is the
    function that builds a model that no family describes; inside `trust_cards`, the card's function is imported.
    """
    if folder.suffix == SUFFIX and folder.is_file():
        return _open_gguf(folder)
    if has_own_form(card := read_card(folder)):
        if renames:
            raise ValueError(f"{folder}: a folder of ours, whose names are known; leave out the table of names")
        return _open_own(folder, card, build)
    if find_file(folder, CONFIG) and (files := find_weights(folder, *UNSHARDED)) is not None:
        return _open_hugging_face(folder, apply_renames(files, renames or {}, folder))
    if (folder / native.PARAMS).is_file():
        if renames:
            raise ValueError(f"{folder}: a native folder, whose names are known; leave out the table of names")
        return _open_native(folder)
    raise ValueError(explain(folder) + unfinished_downloads(folder))


def open_verified_source(
    folder: Path,
    renames: Mapping[str, str] | None = None,
    max_bytes: float = atomic.LARGE,
    build: Build | None = None,
) -> Source:
    """Compare the files with the folder's card, if it has one, then open the folder like `open_source`.

    Raises ValueError for the first file that differs. Files are hashed if they have at most `max_bytes` in total.
    """
    folder = readable_folder(folder)
    card = verified_card(folder, max_bytes)  # first, since its error names the changed file
    return replace(open_source(folder, renames, build), card=card)


def _open_own(folder: Path, card: dict[str, Any], build: Build | None) -> Source:
    architecture = Architecture.of_card(card, folder / CARD, build)
    adapters = [change.request.get("adapter") for change in architecture.changes]
    if (active := card.get("adapter")) is not None and active not in adapters:
        raise ValueError(f"{folder / CARD}: adapter is {quote(active)}; expected one of its adapters, or null")
    config = json_file.read_if_present(folder / CONFIG)
    return Source(folder, "dunes", config, own_weights(folder), [], (), (), card, architecture)


def own_weights(folder: Path) -> dict[str, LazyTensor]:
    """Tensors of a folder that dunes wrote. Raises ValueError if the folder has no weights."""
    if (files := find_weights(folder, UNSHARDED[0])) is None:
        raise ValueError(explain(folder))
    return files


def context_length_of(
    card: Mapping[str, Any], folder: Path, weights: Mapping[str, Any], otherwise: int | None = None
) -> int:
    """The context length in a card, in tokens; `otherwise` if the card has none.

    Raises ValueError unless the context length is a positive integer. If the weights have learned position
    embeddings, it must not exceed their number.
    """
    context_length = card.get("context_length", otherwise)
    limit = weights[POSITIONS].shape[0] if POSITIONS in weights else math.inf
    if type(context_length) is not int or not 1 <= context_length <= limit:
        expected = "a number of tokens" if limit == math.inf else f"1 to {limit}, the learned positions"
        raise ValueError(f"{folder / CARD}: context_length is {quote(context_length)}; expected {expected}")
    return context_length


def _open_hugging_face(folder: Path, files: dict[str, LazyTensor]) -> Source:
    hf_config = json_file.read(folder / CONFIG)
    notes: tuple[str, ...] = ()
    if (quantized := hf_config.get("quantization_config")) is not None:
        hf_config = {k: v for k, v in hf_config.items() if k != "quantization_config"}
        files, notes = dense_weights(files, quantized, folder / CONFIG), ("quantized weights, dequantized",)
    with _naming_errors(folder / CONFIG):
        family = family_of(hf_config)
    if family == "gpt2" and isinstance(quantized, dict) and quantized.get("quant_method") in ("gptq", "awq"):
        raise ValueError(f"{folder / CONFIG}: a gpt2 of GPTQ or AWQ is not read; get its plain weights")
    ignored = tuple(getattr(FAMILIES[family], "IGNORED_NAMES", ()))
    if hf_config.get("num_nextn_predict_layers") == 1:  # one layer follows those of the model
        ignored = tuple(pattern.replace("{depth}", str(hf_config.get("num_hidden_layers"))) for pattern in ignored)
    return Source(folder, "Hugging Face", hf_config, files, weight_names(family), ignored, notes)


def _open_gguf(path: Path) -> Source:
    with _naming_errors(path):
        files = gguf.tensors(path)
        hf_config = gguf.hf_config(path, files)
    unnamed = Source(path, "GGUF", hf_config, files, [], (gguf.FREQUENCIES,))
    unnamed._check_depth(len(files))
    return replace(unnamed, names=gguf.weight_names(unnamed.architecture))


def _open_native(folder: Path) -> Source:
    params = json_file.read(folder / native.PARAMS)
    shards = _consolidated(folder)
    heads = [s["output.weight"].shape for s in shards if "output.weight" in s]
    rows = heads or [s[native.EMBEDDING].shape for s in shards if native.EMBEDDING in s]
    if not rows or any(len(shape) != 2 for shape in rows):
        raise ValueError(f"{folder}: neither output.weight nor {native.EMBEDDING} is a matrix in consolidated.*")
    replicated = rows[0][0] == params.get("vocab_size") or not heads
    with _naming_errors(folder / native.PARAMS):
        tied = bool(params.get("tied_embeddings")) or not heads
        vocab = rows[0][0] if replicated else sum(shape[0] for shape in rows)
        hf_config, notes = native.to_hf_config(params, vocab, tied)
    unnamed = Source(folder, "native", hf_config, shards[0], [], native.IGNORED_NAMES, tuple(notes))
    unnamed._check_depth(sum(map(len, shards)))
    names = native.weight_names(hf_config)
    expected = in_memory(build_on_meta(unnamed.family, unnamed.config).state_dict())
    shapes = {key: tensor.shape for key, tensor in hf_weights(names, expected).items()}
    return replace(unnamed, files=native.join_shards(shards, shapes), names=names)


def _consolidated(folder: Path) -> list[dict[str, LazyTensor]]:
    """Tensors of each native file, in order. Raises ValueError if a file is missing."""
    if (files := find_weights(folder, "consolidated.safetensors")) is not None:
        return [files]
    paths = sorted([*folder.glob("consolidated.*.pth"), *folder.glob("consolidated.*.pt")])
    if not paths:
        raise ValueError(f"{folder}: no weights; looked for consolidated.safetensors and consolidated.NN.pth")
    if [path.name.split(".")[1] for path in paths] != [f"{i:02d}" for i in range(len(paths))]:
        names = ", ".join(path.name for path in paths)
        raise ValueError(f"{folder}: a file is missing or a number occurs twice: {names}")
    return [tensors(require_inside(folder, path)) for path in paths]
