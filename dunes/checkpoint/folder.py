"""A model on disk: a Hugging Face model folder with a card, `dunes.json`."""

import json
import os
import shutil
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import reduce
from pathlib import Path
from secrets import token_hex
from typing import Any, TypeVar

import torch
from torch import nn

from dunes import __version__, tree
from dunes.augment import lora
from dunes.augment.masked import mask_linears, masked_places
from dunes.checkpoint import architecture as architectures
from dunes.checkpoint import card as cards
from dunes.checkpoint.architecture import Architecture, Build
from dunes.checkpoint.card import CARD, FORMAT
from dunes.checkpoint.hf_config_of import hf_config_of
from dunes.checkpoint.model_folder import CONFIG, READY, UNFINISHED, explain, is_model_folder
from dunes.checkpoint.source import Source, open_source
from dunes.checkpoint.weights.lazy_tensor import LazyTensor, Weights, cast, hf_weights, in_memory, track_reads
from dunes.checkpoint.weights.safetensors_file import INDEX, SINGLE, write_tensors
from dunes.files import atomic
from dunes.files.staging import STAGED, folder_lock, staging_folder
from dunes.models import FAMILIES
from dunes.parts import Decoder
from dunes.progress import advance
from dunes.text import Tokenizer
from dunes.text.gguf_file import SUFFIX
from dunes.text.special_tokens import configured_ids
from dunes.units import format_count, plural

MAX_RETRIES = 10
"""Times that a folder is read again after concurrent saves before it is locked."""
SPECIAL_TOKENS = ("bos", "eos", "pad")
MASKED = "masked"
"""The card's key for places of pruned layers, whose zeros stay zero in training."""
NOT_INHERITED = (
    *("files", "format", "dunes", "adapter", "base", "family", "config", "structure", "changes", "history"),
    MASKED,
)
"""Keys that the card of a changed model does not inherit."""
T = TypeVar("T")
Check = Callable[[Path], Mapping[str, Any]]


@dataclass(frozen=True)
class LoadedModel:
    """A model with tokenizer, context length, card and architecture: loaded, in evaluation mode, or in training.

    `tokenizer` is None if the folder has none; `card` is the content of dunes.json, {} without one.
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

    def require_tokenizer(self) -> Tokenizer:
        """The tokenizer. Raises ValueError if there is none."""
        if self.tokenizer is None:
            raise ValueError("the model has no tokenizer; copy tokenizer.json into its folder")
        return self.tokenizer


def save(
    model: nn.Module,
    folder: Path | str,
    tokenizer: Tokenizer | None = None,
    context_length: int | None = None,
    facts: Mapping[str, Any] | None = None,
    check: Check = lambda staged: {},
    *,
    architecture: Architecture | None = None,
) -> None:
    """Write the model as a folder that Hugging Face's tools open; `facts` go into the card.

    A model that no family describes is saved in dunes' own format with its `architecture`, which must build the
    same structure: `Architecture.of_function(build, **arguments)` for a function that builds it (`load` needs the
    function again), or a loaded model's architecture with the changes since.

    A network that is no language model has no tokenizer and no context length: `save(network, folder,
    architecture=...)`, then `load_network`.

    `check` is called with the temporary folder before it is renamed into place; it may raise, and its result is
    added to the card. The save is atomic: files are written into a temporary folder, which is renamed to `.ready`
    when all are on the disk, and then renamed into place one by one. An interrupted save is read from `.ready`,
    and the next save finishes it. Raises ValueError for a model that no family describes without `architecture`,
    for a tokenizer with more ids than the embedding has rows, and for a context length below 1.
    """
    model, folder = tree.uncompiled(model), Path(folder)
    if isinstance(model, Decoder) if context_length is None else context_length < 1:
        raise ValueError(f"context_length is {context_length}; expected 1 or more tokens")
    described: Architecture | str = f"{type(model).__name__} has no context length"
    if context_length is not None:
        described = hf_config_of(model, context_length)
    facts = {key: value for key, value in (facts or {}).items() if key != MASKED}
    facts |= {MASKED: masked} if (masked := masked_places(model)) else {}
    if isinstance(described, Architecture):
        known, settings, weights = hf_parts(model, described)
        _check_rows(tokenizer, described.config.vocab)
        changes = () if architecture is None else architecture.changes
        facts["changes"] = [*facts.get("changes", []), *(change.record() for change in changes)]
    elif architecture is not None:
        (known, weights), settings = architectures.describe(model, architecture), {}
        facts |= {"adapter": lora.active_adapter(model), "history": facts.get("changes", [])}
    else:
        raise ValueError(
            f"no family describes this model: {described}; save it with its architecture: after changes to a "
            "loaded model, replace(loaded.architecture, changes=(*loaded.architecture.changes, change)); for a "
            "function that builds it, Architecture.of_function(build), then checkpoint.load(folder, build=build)"
        )
    dtype = str(next(iter(weights.values())).dtype).removeprefix("torch.") if weights else None
    config = settings | special_ids(tokenizer) | {"dtype": dtype, "torch_dtype": dtype}
    # Twice: first for the order in the file, last because facts must not override them.
    length = {} if context_length is None else {"context_length": context_length}
    card = {**known, **length, "changes": [], **facts, **length, **known}
    write_model(folder, weights, config, card, (tokenizer, context_length), check)


def write_model(
    folder: Path,
    weights: Weights,
    config: Mapping[str, Any] | None,
    card: Mapping[str, Any],
    tokenizer: tuple[Tokenizer | None, int | None] = (None, None),
    check: Check = lambda staged: {},
) -> None:
    """Write a model folder atomically; `tokenizer` is a pair with its context length.

    The result of `check` for the temporary folder is added to the card; if it raises, nothing is written.
    """
    size = sum(w.nbytes for w in weights.values())

    def fill(staged: Path) -> None:
        write_tensors(staged, track_reads(weights, advance(size)))
        write_tokenizer(staged, *tokenizer)
        if config is not None:
            (staged / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        (staged / CARD).write_text(json.dumps({"files": {}, **card}))  # for `check`, which may load the folder
        write_card(staged, {**card, **check(staged)})

    write_files(folder, fill, size)


def inherited(card: Mapping[str, Any]) -> dict[str, Any]:
    """Entries of a card that stay true for a changed model."""
    return {key: value for key, value in card.items() if key not in NOT_INHERITED}


def require_described(model: nn.Module, context_length: int, folder: Path, reader: str = "") -> Architecture:
    """Family and config of the model from `folder`. Raises ValueError if no Hugging Face config describes it."""
    if isinstance(described := hf_config_of(model, context_length), str):
        refusal = f"{reader} does not know" if reader else "no Hugging Face config describes"
        raise ValueError(f"{folder}: {refusal} this model: {described}")
    return described


def _check_rows(tokenizer: Tokenizer | None, rows: int) -> None:
    """Raise ValueError for a tokenizer with more ids than an embedding has rows."""
    if tokenizer is not None and tokenizer.vocab > rows:
        raise ValueError(
            f"the tokenizer has {plural(tokenizer.vocab, 'id')}, the embedding {plural(rows, 'row')}; "
            "each id needs a row"
        )


def hf_parts(
    model: nn.Module, described: Architecture
) -> tuple[dict[str, Any], dict[str, Any], dict[str, LazyTensor]]:
    """Card entries, config.json, and tensors by Hugging Face's names, for a model of a family."""
    family, weights = FAMILIES[described.family], in_memory(model.state_dict())
    return {"family": described.family}, family.to_hf(described.config), hf_weights(family.NAMES, weights)


def write_files(folder: Path, fill: Callable[[Path], None], size: int) -> None:
    """Write about `size` bytes of files into a folder atomically; `fill` writes them into a temporary folder.

    Several processes may save at once; the last to finish wins.
    """
    finish_save(folder)
    atomic.write_folder(folder / READY, fill, size, _publish)


def _publish(staged: Path, ready: Path) -> None:
    """Rename the temporary folder to `.ready`, and its files into place."""
    with folder_lock(ready.parent):
        _move(ready.parent)  # finishes another save that was interrupted meanwhile
        os.rename(staged, ready)
        atomic.fsync_path(ready.parent)
        _move(ready.parent)


def write_card(folder: Path, facts: Mapping[str, Any]) -> None:
    """Write the card of a folder with complete files: `facts`, and each file's size and SHA-256."""
    files = {
        f.name: {"size": f.stat().st_size, "sha256": atomic.digest(f)}
        for f in sorted(folder.iterdir())
        if f.name != CARD
    }
    card = {"format": FORMAT, "dunes": __version__, **facts, "files": files}
    (folder / CARD).write_text(json.dumps(card, indent=2) + "\n")


def finish_save(folder: Path) -> None:
    """Finish a save that was interrupted after its files were written.

    Raises OSError if renaming fails, and ValueError if `.ready` is a link, which would lead to another folder.
    """
    if (folder / READY).is_symlink():
        raise ValueError(f"{folder / READY}: a link, not the folder of a save of ours; remove it")
    if (folder / READY).is_dir():
        with atomic.add_path_to_errors(folder), folder_lock(folder):
            _move(folder)


def _move(folder: Path) -> None:
    """Put the files of `.ready` into place, then remove it. The caller has locked the folder.

    Until then `.ready` stays complete, and readers read from it.
    """
    ready = folder / READY
    if not ready.is_dir():
        return
    _remove_old(folder, ready)
    with staging_folder(ready) as links:
        for file in sorted(ready.iterdir(), key=lambda file: file.name == CARD):
            if file.name == CARD:  # must be on the disk after the files that it lists
                atomic.fsync_path(folder)
            _place(file, links / file.name, folder / file.name)
    atomic.fsync_path(folder)
    shutil.rmtree(folder / UNFINISHED, ignore_errors=True)
    removed = folder / STAGED.format(token_hex(8))
    os.rename(ready, removed)
    atomic.fsync_path(folder)
    shutil.rmtree(removed, ignore_errors=True)


def _place(file: Path, link: Path, path: Path) -> None:
    try:
        os.link(file, link)
    except OSError:  # no hard links: `.ready` then loses its files one by one
        link = file
    os.replace(link, path)


def _remove_old(folder: Path, ready: Path) -> None:
    """Remove files of an older save that the new one does not have."""
    new = {f.name for f in ready.iterdir()} | set(cards.listed_files(ready, cards.read_card(ready)))
    old = _card_files(folder) if CARD in new else set()
    if SINGLE in new or (INDEX in new and CARD in new):
        old |= {INDEX, SINGLE, *(f.name for f in folder.glob("model-*-of-*.safetensors"))}
    elif INDEX in new:  # without a card, shards that were renamed already are unknown
        old |= {SINGLE}
    for name in old - new:
        (folder / name).unlink(missing_ok=True)


def _card_files(folder: Path) -> set[str]:
    """Files that the card of an older save lists; empty if it is damaged."""
    try:
        return {
            name
            for name in cards.listed_files(folder, cards.read_card(folder))
            if name != ".." and (folder / name).parent == folder and not (folder / name).is_dir()
        }
    except ValueError:
        return set()


def special_ids(tokenizer: Tokenizer | None) -> dict[str, int | None]:
    """Special token ids for config.json."""
    if tokenizer is None:
        return {}
    names = tokenizer.special_tokens_map
    return {
        f"{n}_token_id": tokenizer.token_id(names[k]) if (k := f"{n}_token") in names else None
        for n in SPECIAL_TOKENS
    }


def write_tokenizer(folder: Path, tokenizer: Tokenizer | None, context_length: int | None) -> None:
    """Write a tokenizer, if any, and its config files."""
    if tokenizer is None:
        return
    tokenizer.save(folder)
    names = tokenizer.special_tokens_map
    configs = {
        "generation_config.json": {k: v for k, v in special_ids(tokenizer).items() if v is not None},
        "tokenizer_config.json": names
        | {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": context_length,
            "clean_up_tokenization_spaces": False,
        },
        "special_tokens_map.json": names,
    }
    for name, content in configs.items():
        if name not in tokenizer.extra_files:
            (folder / name).write_text(json.dumps(content, indent=2) + "\n")


def read_consistently(folder: Path, read: Callable[[Path], T]) -> T:
    """The result of `read(folder)`, repeated if another thread or process saved into the folder meanwhile."""
    for _ in range(MAX_RETRIES):
        saved_folder(folder)
        before = _save_stamp(folder)
        try:
            result = read(folder)
        except (ValueError, FileNotFoundError):
            if _save_stamp(folder) == before:
                raise
        else:
            if _save_stamp(folder) == before:
                return result
    with folder_lock(folder):
        saved_folder(folder)
        return read(folder)


def _save_stamp(folder: Path) -> list[tuple[str, int, int]]:
    """A value that changes with each save."""
    stamps = []
    for path in (folder / CARD, folder / READY):
        with suppress(OSError):  # renamed by a save, inside a GGUF file's path, or a loop of links
            stat = path.stat()
            stamps.append((path.name, stat.st_ino, stat.st_mtime_ns))
    return stamps


def load_source(source: Source, device: torch.device | str) -> LoadedModel:
    """The model of an opened and verified folder, with its tokenizer and card.

    Warns if there is no tokenizer, and about special ids above the vocabulary.
    """
    context_length, tokenizer = source.context_length, load_tokenizer(source)
    model = load_decoder(source).to(device).eval()
    return LoadedModel(model, tokenizer, context_length, dict(source.card), source.architecture)


def load_tokenizer(source: Source, folder: Path | None = None) -> Tokenizer | None:
    """The tokenizer for a model, by default from its folder; None, with a warning, if there is none.

    Raises ValueError as `check_vocabulary`.
    """
    folder = folder or source.folder
    tokenizer = None if Tokenizer.find_file(folder) is None else Tokenizer.load(folder)
    if tokenizer is None:
        files = "tokenizer.json, tokenizer.model or tekken.json"
        warnings.warn(f"{folder}: no {files}; tokenizer is None", stacklevel=2)
    check_vocabulary(source, tokenizer)
    return tokenizer


def load_decoder(source: Source) -> Decoder:
    """The model with its weights, which are memory-mapped, copy on write.

    Raises ValueError, listing all differences, if the weights do not fit, before any is read.
    """
    weights, model = source.weights(), source.outline()
    if source.own is None:
        weights = _to_one_dtype(source, weights)
        model.load_state_dict({name: tensor.read() for name, tensor in weights.items()}, assign=True)
    else:
        architectures.fill(model, weights, source.card)
        lora.set_adapter(model, source.card.get("adapter"))
    _mask(model, source)
    return model


def _mask(model: nn.Module, source: Source) -> None:
    """Mask the pruned layers that the card lists. Raises ValueError if they do not fit the model."""
    places = source.card.get(MASKED, [])
    try:
        if not isinstance(places, list) or not all(isinstance(place, str) for place in places):
            raise ValueError("expected a list of places")
        mask_linears(model, places)
    except ValueError as error:
        raise ValueError(f"{source.folder / CARD}: {MASKED!r}: {error}") from None


def open_verified_source(
    folder: Path,
    renames: Mapping[str, str] | None = None,
    max_bytes: float = atomic.LARGE,
    build: Build | None = None,
) -> Source:
    """`open_source` after comparing the files with the folder's card, if it has one.

    Raises ValueError for the first file that differs. Files are hashed if they have at most `max_bytes` in total.
    """
    folder = readable_folder(folder)
    card = verified_card(folder, max_bytes)  # first, since its error names the changed file
    return replace(open_source(folder, renames, build), card=card)


def verified_card(folder: Path, max_bytes: float = atomic.LARGE) -> dict[str, Any]:
    """The card of a folder, or {} without one. Raises ValueError for the first file that differs from it."""
    card = cards.read_card(folder)
    cards.check_files(folder, card, max_bytes)
    return card


def readable_folder(folder: Path) -> Path:
    """`saved_folder` for the folder of a model, adapter or network, or the path of a GGUF file.

    Raises ValueError, which says what the path is, for any other path.
    """
    if not (folder.suffix == SUFFIX and folder.is_file()) and not is_model_folder(folder):
        raise ValueError(explain(folder))
    return saved_folder(folder)


def saved_folder(folder: Path) -> Path:
    """The folder to read from: its complete `.ready` subfolder after an interrupted save, else the folder itself.

    Waits for a save in progress. Nothing is changed; the next save into the folder finishes the interrupted one.
    Raises ValueError if `.ready` is a link, which would lead to another folder, or incomplete, as after a crash on
    a file system without hard links.
    """
    ready = folder / READY
    if ready.is_symlink():
        raise ValueError(f"{ready}: a link, not the folder of a save of ours; remove it")
    if not (ready / CARD).is_file():
        return folder
    with atomic.add_path_to_errors(folder), folder_lock(folder):
        if not (ready / CARD).is_file():
            return folder
        missing = cards.listed_files(ready, cards.read_card(ready)).keys() - {*os.listdir(ready)}
    if missing:
        name = min(missing)[:80]
        raise ValueError(
            f"{ready}: has no {name!a}; move what is in it to {folder}, which ends an interrupted save"
        )
    return ready


def _to_one_dtype(source: Source, weights: dict[str, LazyTensor]) -> dict[str, LazyTensor]:
    """The weights in one dtype: their own, or if they differ the config's, else the promoted one."""
    dtypes = {w.dtype for w in weights.values()}
    if len(dtypes) == 1:
        return weights
    configured = str(source.hf_config.get("dtype") or source.hf_config.get("torch_dtype"))
    matching = [dtype for dtype in dtypes if str(dtype).removeprefix("torch.") == configured]
    return cast(weights, matching[0] if matching else reduce(torch.promote_types, dtypes))


def check_vocabulary(source: Source, tokenizer: Tokenizer | None) -> None:
    """Raise ValueError unless every id of the tokenizer has a row in the embedding; more rows are allowed.

    Warns about BOS and EOS ids without a row, such as GPT-2's defaults in a model with a smaller vocabulary.
    """
    rows, special = source.vocab, _special_ids(source)
    if rows is None:
        return
    ids, padding = (0 if tokenizer is None else tokenizer.vocab), max(special.get("pad_token_id", ()), default=0)
    marked = () if tokenizer is None else tokenizer.configured_ids
    largest = max([*marked, *(i for ids in special.values() for i in ids)], default=0)
    if ids > rows or padding >= rows:
        listed = ", ".join(f"{k} {v}" for k, v in special.items())
        raise ValueError(
            f"{source.folder}: the embedding has {rows} rows, the tokenizer {ids} ids, special ids "
            f"are up to {largest} ({listed}); each id needs a row"
        )
    if largest >= rows:
        warnings.warn(
            f"{source.folder}: special ids are up to {largest} in config.json or generation_config.json, the "
            f"embedding has {rows} rows; no text begins or ends with them",
            stacklevel=2,
        )


def _special_ids(source: Source) -> dict[str, list[int]]:
    """Special ids in a config, by key. Raises ValueError for invalid ones; -1 means none in old files."""
    path, keys = source.folder / CONFIG, [f"{name}_token_id" for name in SPECIAL_TOKENS]
    return {key: ids for key in keys if (ids := configured_ids(path, source.hf_config, key, least=-1))}
