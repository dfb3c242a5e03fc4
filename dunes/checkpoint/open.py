"""Open a model from its folder in any supported format, or from the folders of an adapter and its base.

The functions are defined in the order in which they run. `locate_model` finds the folder. `open_model` recognises
the format, and reads the config and the headers of the weight files. An `OpenedModel` outlines the model on the
meta device and compares the files' tensors with it. `load_decoder` fills the model, and `load_tokenizer` reads the
tokenizer. `load` does all this. The last functions open adapters, and networks that are no language model.
"""

import math
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dunes import measure, tree
from dunes.augment import Change, lora, make_change
from dunes.augment.adapted import sides
from dunes.augment.prune import mask_linears
from dunes.checkpoint.architecture import (
    Architecture,
    Build,
    compare_structure,
    fill,
    naming_errors,
    require_depth,
    saved_tensors,
    tensor_differences,
)
from dunes.checkpoint.base_digests import BaseWeights, check_base, is_unchanged, read_base_record
from dunes.checkpoint.card import (
    ADAPTER,
    CARD,
    CONFIG,
    READY,
    UNFINISHED,
    finish_save,
    has_own_form,
    read_card,
    read_consistently,
    verified_card,
)
from dunes.checkpoint.formats import gguf, native
from dunes.checkpoint.formats.adapter import adapter_base_of, attach_adapter, check_settings, is_reference
from dunes.checkpoint.formats.quantized_weights import dense_weights
from dunes.checkpoint.hub import download, parse_name
from dunes.checkpoint.weights.files import UNSHARDED, find_weights, tensors
from dunes.checkpoint.weights.lazy_tensor import LazyTensor, Weights, cast, in_memory
from dunes.checkpoint.weights.safetensors_file import quote
from dunes.checkpoint.weights.state_dict_diff import Difference, Prefix, apply_renames, compare, summarize
from dunes.checkpoint.wheel import MODELS, cached_path, fetch_model
from dunes.checkpoint.write import MASKED, SPECIAL_TOKENS
from dunes.context import prefix_errors
from dunes.files import json_file
from dunes.files.atomic import LARGE
from dunes.files.hub_cache import NAME
from dunes.files.model_file import find_file, trust_cards, unfinished_downloads
from dunes.models import FAMILIES, weight_names
from dunes.models.names import Names, for_heads
from dunes.parts import Decoder
from dunes.pictures import html_table
from dunes.text import Tokenizer
from dunes.text.gguf_file import SUFFIX
from dunes.text.special_tokens import configured_ids
from dunes.units import format_bytes, format_count, plural

OWN = "dunes"
"""Name of dunes' own format."""
POSITIONS = "embed.place.weight"
"""Name of the tensor of learned position embeddings."""
OTHER_BASE = "put it back, or choose another: dunes train --out {} --resume --from BASE --override base"
"""The remedy in an error about a run whose base is gone or changed."""
ROUNDED_FROM = 30_000_000
"""Minimum number of parameters of models that `round_for_speed` casts to bfloat16."""


@dataclass(frozen=True)
class ModelLocation:
    """A model's local folder. `origin` has `repository` and `revision` (a commit) for a model from the Hub,
    `package` for a packaged model.
    """

    folder: Path
    origin: dict[str, str]


def locate_model(model: str | Path, revision: str | None = None) -> ModelLocation:
    """Locate a local or cached model; a model that is missing from the cache is downloaded.

    `model` is a local folder or GGUF file, a packaged model (`smollm2`), or else `org/name` or `org/name@revision`
    on the Hub, also written `hf:org/name`. A revision is a branch, a tag or a commit, by default `main`. Raises
    ValueError, on one line, if the model can neither be found nor downloaded, if the repository has no weights, or
    if a large downloaded file has another SHA-256. Raises OSError if the disk is full.
    """
    path = Path(model)
    if path.is_dir() and revision:
        raise ValueError(f"{path}: a folder has no revisions; leave out {revision!r}")
    if path.is_dir() or (path.exists() and path.suffix == SUFFIX):
        return ModelLocation(path, {})
    if path.exists():
        raise ValueError(explain(path))
    if packaged := MODELS.get(str(model)) if revision is None else None:
        return ModelLocation(fetch_model(str(model)), {"package": packaged.requirement})
    name, requested = parse_name(str(model).removeprefix("hf:"), revision)
    folder, commit = download(name, requested)
    return ModelLocation(folder, {"repository": name, "revision": commit})


def is_model_folder(folder: Path) -> bool:
    """True if a folder has files with the names of a model's files, or an unfinished save. No file is read."""
    if any((folder / name).exists() for name in (READY, CARD, ADAPTER, native.PARAMS)):  # READY is removed last
        return True
    weights = [name for single in UNSHARDED for name in (single, f"{single}.index.json")]
    return (folder / CONFIG).is_file() and any((folder / name).exists() for name in weights)


def explain(path: Path) -> str:
    """One sentence that explains why a path is no model folder, with a remedy."""
    if not os.path.lexists(path):
        remedy = "; for a model's name, checkpoint.locate_model(NAME).folder is its folder"
        return f"{path}: no such folder{remedy if str(path) in MODELS or NAME.fullmatch(str(path)) else ''}"
    if not path.is_dir():
        return f"{path}: a file, not a model folder; pass a model folder"
    if (path / ADAPTER).is_file():
        return f"{path}: an adapter, not a whole model; merge it first: dunes augment merge {path} OUT"
    if _is_run(path):
        return (
            f"{path}: a run without a model: it is still training, or was stopped before its first save; "
            f"continue it with --resume --out {path}"
        )
    if (path / UNFINISHED).is_dir():
        return f"{path}: an unfinished model; remove it, or repeat the dunes augment command that began it"
    candidates = sorted((*path.glob("*"), *path.glob("snapshots/*")))
    if inside := [f for f in candidates if f.suffix == SUFFIX or is_model_folder(f)]:
        return f"{path}: not a model folder, but contains {', '.join(map(str, inside[:3]))}; choose one"
    names = ", ".join([*UNSHARDED, *(f"{s}.index.json" for s in UNSHARDED)])
    looked = f"looked for {CONFIG} with {names}, and consolidated.* with {native.PARAMS}"
    if (path / CONFIG).is_file():
        return f"{path}: no weights; {looked}"
    return f"{path}: not a model folder; {looked}; to train a model on its text: dunes train {path} --out RUN"


def _is_run(folder: Path) -> bool:
    """True if a folder has the state of a training run."""
    state, files = folder / "state", ("plan.json", "tokenizer.json")
    known = any((state / name).is_file() for name in files) or any(state.glob("step-[0-9]*"))
    return known or (state.is_dir() and not any(state.iterdir()))


def readable_folder(folder: Path) -> Path:
    """Finish an interrupted save into the folder of a model, adapter or network, and return the path. A GGUF file
    is permitted, too.

    Raises ValueError like `require_model_folder`.
    """
    require_model_folder(folder)
    return finish_save(folder)


def require_model_folder(folder: Path) -> None:
    """Raise ValueError with the text of `explain` if the path is neither a GGUF file nor a model folder."""
    if not (folder.suffix == SUFFIX and folder.is_file()) and not is_model_folder(folder):
        raise ValueError(explain(folder))


def is_adapter(folder: Path) -> bool:
    """True if a folder has an adapter and no model."""
    return _has_only_adapter(readable_folder(folder))


def _has_only_adapter(folder: Path) -> bool:
    return (folder / ADAPTER).is_file() and not (folder / CONFIG).is_file()


def is_network(folder: Path | str) -> bool:
    """True if a folder's card says that its network is no language model."""
    card = read_card(readable_folder(Path(folder)))
    return has_own_form(card) and card.get("context_length") is None


@dataclass(frozen=True)
class OpenedModel:
    """A model whose weights have not been read yet. `hf_config` is its config.json, or an equivalent config.

    `config_file` describes the architecture. `files` has lazy tensors by their names in the files. `names` maps
    the files' names to the model's names, and is empty if `is_own`, since both are equal. `ignored` has patterns
    of names to skip, `notes` lists assumptions, and `card` is the content of dunes.json, if any.
    """

    folder: Path
    format: str
    config_file: Path
    architecture: Architecture
    hf_config: Mapping[str, Any]
    files: Weights
    names: Names = ()
    ignored: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    card: Mapping[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"OpenedModel({self.folder}, {self.format} format, {plural(len(self.files), 'tensor')})"

    @property
    def is_own(self) -> bool:
        """True if no Hugging Face config describes the model."""
        return self.format == OWN

    @property
    def family(self) -> str:
        return self.architecture.family

    @property
    def config(self) -> Any:
        """The family's config."""
        return self.architecture.config

    @property
    def context_length(self) -> int:
        """Number of tokens that the model can attend to. Raises ValueError if the card's context length is
        invalid.
        """
        if not self.is_own:
            return int(self.config.context_length)
        if self.architecture.function and self.card.get("context_length") is None:
            raise ValueError(
                f"{self.folder}: a network that is no language model; load it with checkpoint.load_network"
            )
        return context_length_of(self.card, self.folder, self.expected)

    def outline(self) -> Decoder:
        """The model on the meta device, or on the device that its build function chooses."""
        with naming_errors(self.config_file):
            return self.architecture.outline()

    @cached_property
    def expected(self) -> dict[str, LazyTensor]:
        """The state dict of `outline()`, as lazy tensors.

        Raises ValueError, before the model is built, if the config has more blocks than the files have tensors.
        """
        require_depth(self.architecture, len(self.files), self.folder)
        return in_memory(self.outline().state_dict(), self.format)

    @property
    def assumed(self) -> tuple[str, ...]:
        """Assumptions made in reading the files, including `Prefix.note`."""
        return (*self.notes, *filter(None, self.comparison[2:]))

    @cached_property
    def comparison(self) -> tuple[dict[str, LazyTensor], list[Difference], str]:
        """The files' tensors by the model's names, all differences from the model, and the `Prefix`'s note."""
        if self.is_own:
            prefix = Prefix.of(self.files, self.expected)
            files, outline = prefix.without(self.files), self.outline()
            differences = compare_structure(outline, self.architecture, self.card, files, self.config_file)
            return files, differences, prefix.note
        return compare(self.expected, self.files, for_heads(self.names, self.config.heads), self.ignored)

    def weights(self) -> dict[str, LazyTensor]:
        """The files' tensors by the model's names; warns with the note of the `Prefix`, if it has one.

        Raises ValueError, listing all differences, if the tensors do not fit the model.
        """
        weights, differences, prefix = self.comparison
        note = f"; {prefix}" if prefix else ""
        if differences and self.is_own:
            listed, intact = "; ".join(map(str, differences)), all(d.kind == "structure" for d in differences)
            wanted = "; if this is intended, make the folder again, or load model.safetensors with load_state_dict"
            remedy = wanted if intact else ""
            built = f"{self.family} builds a different model from the saved one"
            raise ValueError(f"{self.folder}: {built}: {listed}{remedy}{note}")
        if differences:
            raise ValueError(f"{self.folder}: {summarize(differences)}{note}")
        if prefix:
            warnings.warn(f"{self.folder}: {prefix}", stacklevel=2)
        return weights


def open_verified_model(
    folder: Path, renames: Mapping[str, str] | None = None, max_bytes: float = LARGE, build: Build | None = None
) -> OpenedModel:
    """Compare the files with the folder's card, if any, then open the folder like `open_model`.

    Raises ValueError for the first file that differs. SHA-256 is compared only if all files have at most
    `max_bytes` in total.
    """
    require_model_folder(folder)
    card = verified_card(folder, max_bytes)  # before `open_model`, since this error names the changed file
    return open_model(folder, renames, build, card)


def open_model(
    folder: Path,
    renames: Mapping[str, str] | None = None,
    build: Build | None = None,
    card: Mapping[str, Any] | None = None,
) -> OpenedModel:
    """Open a model folder. If the folder has no supported format, raises ValueError with the file names that were
    looked for.

    `renames` maps tensor names in the files (with `{i}` for an index) to Hugging Face's names. `build` is the
    function that builds a model that no family describes; by default, `Architecture.of_card` imports the card's
    function. `card` is the folder's card, if the caller has read it.
    """
    if folder.suffix == SUFFIX and folder.is_file():
        return _open_gguf(folder)
    card = read_card(folder) if card is None else card
    is_own = has_own_form(card)
    if not is_own and find_file(folder, CONFIG) and (files := find_weights(folder, *UNSHARDED)) is not None:
        return _open_hugging_face(folder, apply_renames(files, renames or {}, folder), card)
    if not is_own and not (folder / native.PARAMS).is_file():
        raise ValueError(explain(folder) + unfinished_downloads(folder))
    if renames:
        form = "folder created by dunes" if is_own else "native folder"
        raise ValueError(f"{folder}: a {form}, whose tensor names are known; leave out the table of names")
    if is_own:
        return _open_own(folder, card, build)
    return OpenedModel(folder, "native", folder / native.PARAMS, *native.open_folder(folder), card=card)


def _open_own(folder: Path, card: Mapping[str, Any], build: Build | None) -> OpenedModel:
    architecture = Architecture.of_card(card, folder / CARD, build)
    adapters = [change.request.get("adapter") for change in architecture.changes]
    if (active := card.get("adapter")) is not None and active not in adapters:
        raise ValueError(f"{folder / CARD}: adapter is {quote(active)}; expected one of its adapters, or null")
    config = json_file.read_if_present(folder / CONFIG)
    return OpenedModel(folder, OWN, folder / CARD, architecture, config, own_weights(folder), card=card)


def _open_hugging_face(folder: Path, files: dict[str, LazyTensor], card: Mapping[str, Any]) -> OpenedModel:
    hf_config, path = json_file.read(folder / CONFIG), folder / CONFIG
    notes: tuple[str, ...] = ()
    if (quantized := hf_config.get("quantization_config")) is not None:
        hf_config = {k: v for k, v in hf_config.items() if k != "quantization_config"}
        files, notes = dense_weights(files, quantized, path), ("quantized weights, dequantized",)
    method = quantized.get("quant_method") if isinstance(quantized, dict) else None
    if hf_config.get("model_type") == "gpt2" and method in ("gptq", "awq"):
        raise ValueError(f"{path}: gpt2 with GPTQ or AWQ is not supported; download its plain weights")
    architecture = Architecture.of_hf_config(hf_config, path)
    family = architecture.family
    ignored = tuple(getattr(FAMILIES[family], "IGNORED_NAMES", ()))
    if hf_config.get("num_nextn_predict_layers") == 1:  # the files have one more layer than the model
        ignored = tuple(pattern.replace("{depth}", str(hf_config.get("num_hidden_layers"))) for pattern in ignored)
    form = "Hugging Face", path, architecture, hf_config
    return OpenedModel(folder, *form, files, weight_names(family), ignored, notes, card)


def _open_gguf(path: Path) -> OpenedModel:
    with naming_errors(path):
        files = gguf.tensors(path)
        hf_config = gguf.hf_config(path, files)
    architecture = Architecture.of_hf_config(hf_config, path)
    names = gguf.weight_names(architecture)
    return OpenedModel(path, "GGUF", path, architecture, hf_config, files, names, (gguf.FREQUENCIES,))


def own_weights(folder: Path) -> dict[str, LazyTensor]:
    """Tensors of a folder that dunes wrote. Raises ValueError if the folder has no weights."""
    if (files := find_weights(folder, UNSHARDED[0])) is None:
        raise ValueError(explain(folder))
    return files


def context_length_of(
    card: Mapping[str, Any], folder: Path, weights: Mapping[str, Any], otherwise: int | None = None
) -> int:
    """The context length in a card, in tokens; `otherwise` if the card has none.

    Raises ValueError if the context length is no positive integer, or exceeds the number of learned position
    embeddings.
    """
    context_length = card.get("context_length", otherwise)
    limit = weights[POSITIONS].shape[0] if POSITIONS in weights else math.inf
    if type(context_length) is not int or not 1 <= context_length <= limit:
        expected = "a number of tokens" if limit == math.inf else f"1 to {limit}, the learned positions"
        raise ValueError(f"{folder / CARD}: context_length is {quote(context_length)}; expected {expected}")
    return context_length


def check_memory(opened: OpenedModel) -> None:
    """Raise ValueError if the weights do not fit into free memory; quantized GGUF tensors count as float32."""
    size, free = sum(w.nbytes for w in opened.files.values()), measure.free_memory(torch.device("cpu"))
    if size > free > 0:
        count = sum(prod(w.shape) for w in opened.files.values())
        fits = f"{format_count(free * count / size)} of {format_count(count)} parameters fit"
        remedy = "; to halve the bytes: dunes convert MODEL OUT --dtype bfloat16" * (size > 2 * count)
        needed = f"the weights take {format_bytes(size)} of memory, and {format_bytes(free)} are free"
        raise ValueError(f"{opened.folder}: {needed}; {fits}{remedy}")


def load_decoder(opened: OpenedModel) -> Decoder:
    """The model with its weights, which are memory-mapped with copy on write.

    Linear layers that the card lists as pruned keep their zeros in training. Before any weight is read, raises
    ValueError, listing all differences, if the weights do not fit the model. Later, raises ValueError if the card
    lists a layer that does not exist.
    """
    weights, model = opened.weights(), opened.outline()
    if not opened.is_own:
        weights = _to_one_dtype(opened, weights)
        model.load_state_dict({name: tensor.read() for name, tensor in weights.items()}, assign=True)
    else:
        fill(model, weights, opened.card)
        lora.set_adapter(model, opened.card.get("adapter"))
    with prefix_errors(f"{opened.folder / CARD}: {MASKED!r}", (TypeError, ValueError)):
        mask_linears(model, opened.card.get(MASKED, []))
    return model


def _to_one_dtype(opened: OpenedModel, weights: dict[str, LazyTensor]) -> dict[str, LazyTensor]:
    """The weights in one dtype. If they have several dtypes, they are cast to the dtype in config.json if one of
    them has it, else to the result of `torch.promote_types`.
    """
    dtypes = {w.dtype for w in weights.values()}
    if len(dtypes) == 1:
        return weights
    configured = str(opened.hf_config.get("dtype") or opened.hf_config.get("torch_dtype"))
    matching = [dtype for dtype in dtypes if str(dtype).removeprefix("torch.") == configured]
    return cast(weights, matching[0] if matching else reduce(torch.promote_types, dtypes))


def load_tokenizer(opened: OpenedModel, folder: Path | None = None) -> Tokenizer | None:
    """The tokenizer for a model, by default from the model's folder; None, with a warning, if the folder has none.

    Raises ValueError like `check_vocabulary`.
    """
    folder = folder or opened.folder
    if (tokenizer := Tokenizer.load_if_present(folder)) is None:
        files = "tokenizer.json, tokenizer.model or tekken.json"
        warnings.warn(f"{folder}: no {files}; tokenizer is None", stacklevel=2)
    check_vocabulary(opened, tokenizer)
    return tokenizer


def check_vocabulary(opened: OpenedModel, tokenizer: Tokenizer | None) -> None:
    """Raise ValueError unless every id of the tokenizer has a row in the embedding; more rows are allowed.

    Warns about BOS and EOS ids without a row, such as GPT-2's defaults in a model with a smaller vocabulary.
    """
    path, keys = opened.folder / CONFIG, [f"{name}_token_id" for name in SPECIAL_TOKENS]
    # In old files, an id of -1 means that the model lacks the token.
    special = {key: listed for key in keys if (listed := configured_ids(path, opened.hf_config, key, least=-1))}
    if opened.architecture.function:
        return
    rows = opened.config.vocab
    ids, padding = (0 if tokenizer is None else tokenizer.vocab), max(special.get("pad_token_id", ()), default=0)
    configured = () if tokenizer is None else tokenizer.configured_ids
    largest = max([*configured, *(i for ids in special.values() for i in ids)], default=0)
    if ids > rows or padding >= rows:
        named = ", ".join(f"{k} {v}" for k, v in special.items())
        raise ValueError(
            f"{opened.folder}: the embedding has {rows} rows, the tokenizer {ids} ids, special ids "
            f"are up to {largest} ({named}); each id needs a row"
        )
    if largest >= rows:
        warnings.warn(
            f"{opened.folder}: special ids are up to {largest} in config.json or generation_config.json, the "
            f"embedding has {rows} rows; no text begins or ends with them",
            stacklevel=2,
        )


@dataclass(frozen=True)
class LoadedModel:
    """A model with its tokenizer, context length, card and architecture; in evaluation mode after loading.

    `tokenizer` is None if the folder has none; `card` is the content of dunes.json, or {} without this file.
    """

    model: Decoder
    tokenizer: Tokenizer | None
    context_length: int
    card: dict[str, Any] = field(default_factory=dict)
    architecture: Architecture = field(default=Architecture("", None))

    def __repr__(self) -> str:
        size = f"{format_count(tree.count(self.model))} parameters"
        family = self.architecture.family or type(self.model).__name__
        return f"LoadedModel({family}, {size}, context length {self.context_length}, {self.tokenizer})"

    def _repr_html_(self) -> str:
        dtypes = ", ".join(sorted({str(p.dtype).removeprefix("torch.") for p in self.model.state_dict().values()}))
        changes = ", ".join(f"{c.name} at {plural(len(c.places), 'place')}" for c in self.architecture.changes)
        family, size = self.architecture.family or type(self.model).__name__, f"{tree.count(self.model):,}"
        titles = ["family", "parameters", "dtype", "context length", "changes"]
        return html_table(titles, [[family, size, dtypes, f"{self.context_length:,}", changes]])

    def require_tokenizer(self) -> Tokenizer:
        """The tokenizer. Raises ValueError if the model has no tokenizer."""
        if self.tokenizer is None:
            raise ValueError("the model has no tokenizer; copy tokenizer.json into its folder")
        return self.tokenizer


def load(
    folder: Path | str,
    device: torch.device | str = "cpu",
    any_base: bool = False,
    build: Build | None = None,
    adapters: Sequence[Path] = (),
    trust_code: bool = False,
) -> LoadedModel:
    """A model with its tokenizer and card, from a folder in any supported format; weights keep their stored dtype.

    `build` is the function that builds a model that no family describes, as passed to `save`. `trust_code` permits
    importing the card's function from outside of this package, so that foreign code runs. `adapters` are folders
    of adapters to add later: `load` verifies that the model is their base, and applies the changes listed in their
    cards.

    If the folder has an adapter, its base is loaded, and quantized if the card says so (QLoRA). The base must
    match the digests in the adapter's card, unless `any_base` is set. Then the adapter is added as `default`. If
    the adapter has no tokenizer or no context length, the base's is used. Warns if the model has no tokenizer, and
    about special ids above the vocabulary. Raises ValueError for files that are missing, damaged or not of one
    model, and for too little memory; names, shapes and free memory are checked before any weight is read. Loading
    is repeated if another process saves into the folder meanwhile.
    """

    def read(readable: Path) -> LoadedModel:
        if _has_only_adapter(readable):
            return _load_adapted(readable, adapters, device, any_base)
        opened = open_verified_model(readable, build=build)
        context_length, tokenizer = opened.context_length, load_tokenizer(opened)
        check_memory(opened)
        model = load_decoder(opened).to(device).eval()
        if adapters:
            prepare_base(model, adapters, any_base)
        return LoadedModel(model, tokenizer, context_length, dict(opened.card), opened.architecture)

    with trust_cards(trust_code):
        return read_consistently(Path(folder), read)


def load_with_tokenizer(
    folder: Path | str, device: torch.device | str = "cpu", any_base: bool = False, adapters: Sequence[Path] = ()
) -> LoadedModel:
    """Load a model like `load`, but raise ValueError before any weight is read if the model has no tokenizer."""
    if Tokenizer.find_file(place := tokenizer_folder(Path(folder))) is None:
        Tokenizer.load(place)  # raises before any weight is read
    return load(folder, device, any_base, adapters=adapters)


def tokenizer_folder(folder: Path) -> Path:
    """The folder of a model's tokenizer: for an adapter without a tokenizer, the folder of its base."""
    folder = readable_folder(folder)
    return base_folder(folder) if is_adapter(folder) and Tokenizer.find_file(folder) is None else folder


def describe(folder: Path | str) -> OpenedModel:
    """Open a model, or an adapter's base with the adapter's card. Weights are not read, and files are compared
    with the card only by size.

    Raises ValueError like `open_verified_model`.
    """
    folder = Path(folder)
    if not is_adapter(folder):
        return open_verified_model(folder, max_bytes=0)
    opened = open_verified_model(base_folder(folder), max_bytes=0)
    return replace(opened, card=verified_card(readable_folder(folder), max_bytes=0))


def round_for_speed(loaded: LoadedModel) -> LoadedModel:
    """Cast a large float32 model to bfloat16, if it was trained from a base and bfloat16 is clearly faster here.

    The result is for completion and generation; saving, scoring and exporting use the weights of `load`.
    """
    parameters = [*loaded.model.parameters()] if loaded.card.keys() >= {"adapter", "trained"} else []
    is_plain = all(p.dtype == torch.float32 for p in parameters) and tree.count(loaded.model) >= ROUNDED_FROM
    if parameters and is_plain and measure.choose_dtype(parameters[0].device) == torch.bfloat16:
        loaded.model.to(torch.bfloat16)
    return loaded


def base_folder(folder: Path, fetch: bool = True) -> Path:
    """The folder of an adapter's base: the recorded path, else a path relative to the adapter, else a packaged
    model in the cache, else, with `fetch`, from the Hub.

    Raises ValueError, with a remedy, if the base is in none of these places.
    """
    folder = readable_folder(folder)
    peft = json_file.read(folder / ADAPTER)
    name, record = peft.get("base_model_name_or_path"), read_card(folder)
    card = record.get("base")
    if isinstance(name, str) and name and Path(name).exists():
        return Path(name)
    relative = card.get("folder") if isinstance(card, dict) else None
    if isinstance(relative, str) and (folder / relative).exists():
        return (folder / relative).resolve()
    packaged = name if isinstance(name, str) and name in MODELS else ""
    if packaged and cached_path(packaged).is_file():
        return cached_path(packaged)
    chat = f"dunes chat {packaged or 'BASE'} --adapter {folder}"
    remedy = OTHER_BASE.format(folder) if is_reference(record) else f"pass it: {chat}"
    if not fetch or not isinstance(name, str) or not NAME.fullmatch(name):
        raise ValueError(f"{folder}: its base {quote(name)} does not exist; {remedy}")
    revision = peft.get("revision")
    with prefix_errors(f"{folder}: its base cannot be found", end=f"; or {remedy}"):
        return locate_model(name, revision if isinstance(revision, str) and revision else None).folder


def open_base(
    folder: Path, card: Mapping[str, Any], max_bytes: float
) -> tuple[OpenedModel, Tokenizer | None, int]:
    """Open an adapter's base; also returns the adapter's tokenizer and context length, from `folder` and `card`.

    If the adapter has no tokenizer or no context length, the base's is returned. The base's SHA-256 is compared
    only if its files have at most `max_bytes` in total. Raises ValueError like `load`.
    """
    opened = open_verified_model(base_folder(folder), max_bytes=max_bytes)
    tokenizer = load_tokenizer(opened, tokenizer_folder(folder))
    context_length = context_length_of(card, folder, opened.expected, opened.context_length)
    check_memory(opened)
    return opened, tokenizer, context_length


def _load_adapted(folder: Path, others: Sequence[Path], device: torch.device | str, any_base: bool) -> LoadedModel:
    card, base = verified_card(folder), base_folder(folder)
    is_same = is_unchanged(base, card) and not any(_changes(card))
    try:
        opened, tokenizer, context_length = open_base(folder, card, 0 if is_same else LARGE)
        model = load_decoder(opened)
        changes = prepare_base(model, [*others] if is_same else [folder, *others], any_base)
        if not is_reference(card):
            changes += [attach_adapter(model, folder, any_base=any_base)]
        elif not any_base:
            check_settings(adapter_base_of(model), card, folder)
    except ValueError as error:
        remedy = f"; {OTHER_BASE.format(folder)}" if is_reference(card) else ""
        raise (error if is_same else ValueError(f"{error} (in {base}){remedy}")) from None
    if history := opened.card.get("changes" if not opened.is_own else "history"):
        card["history"] = history  # the base's weights include these changes
    architecture = replace(opened.architecture, changes=(*opened.architecture.changes, *changes))
    return LoadedModel(model.to(device).eval(), tokenizer, context_length, card, architecture)


def add_adapter(loaded: LoadedModel, folder: Path, name: str, any_base: bool = False) -> LoadedModel:
    """Add an adapter, activate it under this name, and return the model with the adapter's card.

    If the adapter has no tokenizer or no context length, the model's is used. The model must be loaded with this
    folder in `adapters`, so that `load` verifies the base. Raises ValueError like `load`.
    """
    folder = readable_folder(folder)
    card = verified_card(folder)
    tokenizer = Tokenizer.load(folder) if Tokenizer.find_file(folder) else loaded.tokenizer
    rows, _ = sides(loaded.model.embed.token)
    if tokenizer is not None and max(tokenizer.vocab, 1 + max(tokenizer.configured_ids, default=0)) > rows:
        raise ValueError(f"{folder}: its tokenizer has {tokenizer.vocab} ids, the base's embedding {rows} rows")
    context_length = context_length_of(card, folder, loaded.model.state_dict(), loaded.context_length)
    change = attach_adapter(loaded.model, folder, name, any_base)
    loaded.model.eval()
    architecture = replace(loaded.architecture, changes=(*loaded.architecture.changes, change))
    return LoadedModel(loaded.model, tokenizer, context_length, card, architecture)


def prepare_base(model: Decoder, folders: Sequence[Path], any_base: bool = False) -> list[Change]:
    """Verify that a model is the base of the adapters in these folders, and apply the changes in their cards.

    Returns the changes made; the list is empty if the base includes all changes already. If the base is bit-equal
    to the recorded base, raises ValueError unless the changes give the recorded weights. If the base was cast to
    another dtype, the changed weights are not compared. Raises ValueError like `load_adapter`.
    """
    cards = {folder: verified_card(folder, max_bytes=0) for folder in map(readable_folder, folders)}
    optional = {} if any_base else {folder: read_base_record(card, folder) for folder, card in cards.items()}
    records = {folder: record for folder, record in optional.items() if record is not None}
    weights, exact = BaseWeights(model), list[Path]()
    changed = next((folder for folder, card in cards.items() if any(_changes(card))), None)
    if any(record.is_of(weights) for record in records.values()):
        changed = None
    for folder, record in records.items():
        if record.digests or changed is None:
            check_base(weights, record, folder)
        if not record.digests or record.quantized_from(weights):
            exact.append(folder)
    del weights
    if changed is None:
        return []
    with prefix_errors(changed / CARD):
        changes = list(map(Change.of, _changes(cards[changed])))
        for change in changes:
            make_change(model, change)
    weights = BaseWeights(model)
    for folder in exact:
        check_base(weights, records[folder], folder)
    return changes


def _changes(card: Mapping[str, Any]) -> Iterator[Any]:
    """Records of changes to the base, such as quantization, that an adapter's card lists."""
    return (r for r in card.get("changes", []) if not (isinstance(r, dict) and r.get("name") == "lora"))


def load_network(
    folder: Path | str, build: Build | None = None, trust_code: bool = False, device: torch.device | str = "cpu"
) -> nn.Module:
    """The network in a folder that `save` wrote, in evaluation mode.

    `build` is the function that was passed to `save`. By default, the card's function is imported; without
    `trust_code`, the function must be in `dunes.models`. Raises ValueError like `load`.
    """

    def read(readable: Path) -> nn.Module:
        opened = open_verified_model(readable, build=build)
        check_memory(opened)
        return load_decoder(opened).to(device).eval()

    with trust_cards(trust_code):
        return read_consistently(Path(folder), read)


def load_weights(model: nn.Module, path: Path | str) -> dict[str, Any]:
    """Load weights from a file, or a folder written by `save_weights` or `save`; returns the folder's card or {}.

    Weights are not cast; if dtypes differ, call `tree.move(model, dtype=...)` first. Files are safetensors or
    pickles, read without executing anything. Raises ValueError, and changes nothing, if a file differs from its
    digest in the card. Also raises ValueError, listing the differences, if names, shapes, dtypes or ties differ,
    or if a card records other classes or settings of modules.
    """
    model, path = tree.uncompiled(model), Path(path)
    tree.require_shapes(model)
    if not path.is_dir():
        _fill(model, tensors(path), {}, path)
        return {}

    def read(readable: Path) -> dict[str, Any]:
        folder = readable_folder(readable)
        card = verified_card(folder)
        if not has_own_form(card):
            raise ValueError(f"{folder / CARD}: not the card of a network; load the weight file")
        _fill(model, own_weights(folder), card, folder / CARD)
        return card

    return read_consistently(path, read)


def _fill(model: nn.Module, files: Weights, card: Mapping[str, Any], path: Path) -> None:
    """Compare the files with the network, then load their values."""
    exact, prefix = Architecture("", None, function=type(model)), Prefix()  # dtypes must match
    if card:
        differences = compare_structure(model, exact, card, files, path)
    else:
        prefix = Prefix.of(files, model.state_dict())
        files, tied = _without_ties(model, prefix.without(files))
        differences = list(tensor_differences(model, files, tied, exact))
        card = {"structure": {"tied": tied}}
    if differences:
        intact = all(d.kind == "structure" for d in differences)
        hint = "; for weights alone, load its model.safetensors" if intact else ""
        hint += f"; {prefix.note}" if prefix.note else ""
        raise ValueError(f"{path}: does not fit this {type(model).__name__}: {summarize(differences)}{hint}")
    state = model.state_dict()
    if prefix.note:
        warnings.warn(f"{path}: {prefix.note}", stacklevel=3)
    if lost := next((name for name, b in model.named_buffers() if b.is_meta and name not in state), None):
        raise ValueError(f"{lost} has no values, and no file has them, since it is a non-persistent buffer")
    fill(model, files, card)


def _without_ties(model: nn.Module, files: Weights) -> tuple[Weights, dict[str, str]]:
    """A file's tensors without copies of tied tensors, and a dict from each alias of a tied tensor to its first
    name. Raises ValueError if copies differ.
    """
    _, tied = saved_tensors(model)
    for name, first in tied.items():
        if name in files and first in files and not torch.equal(files[name].read(), files[first].read()):
            raise ValueError(str(Difference("tied", name, f"the same tensor as {first}", "a tensor of its own")))
    repeated = {name for name, first in tied.items() if first in files}
    return {name: tensor for name, tensor in files.items() if name not in repeated}, tied
