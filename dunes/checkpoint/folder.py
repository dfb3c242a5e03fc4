"""A model on disk: a Hugging Face model folder, with our card `dunes.json` beside it."""

import errno
import json
import os
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any, TypeVar
from typing import cast as cast_type

import torch
from torch import nn

from dunes import __version__
from dunes.checkpoint import atomic, built, shards
from dunes.checkpoint import card as cards
from dunes.checkpoint.built import Build
from dunes.checkpoint.card import CARD, FORMAT
from dunes.checkpoint.header import quote
from dunes.checkpoint.hf_config_of import HfConfig, hf_config_of
from dunes.checkpoint.lazy_tensor import LazyTensor, cast, in_memory, renamed
from dunes.checkpoint.source import CONFIG, Source, indexed_tensors, open_source, tensors
from dunes.models import FAMILIES
from dunes.models.meta import build_on_meta
from dunes.models.names import to_theirs
from dunes.parts import Decoder
from dunes.plural import plural
from dunes.staging import folder_lock
from dunes.text import Tokenizer

READY = ".ready"
TRIES = 10
"""Times that a folder is read anew because it was saved to meanwhile, before those who save have to wait."""
IDS = ("bos", "eos", "pad")
T = TypeVar("T")


@dataclass(frozen=True)
class LoadedModel:
    """A model from a folder, in evaluation mode; `card` is what dunes.json says, empty without one.

    `tokenizer` is None where the folder has none.
    """

    model: Decoder
    tokenizer: Tokenizer | None
    context_length: int
    card: dict[str, Any]


def save(
    model: nn.Module,
    folder: Path | str,
    tokenizer: Tokenizer | None,
    context_length: int,
    facts: Mapping[str, Any] | None = None,
    check: Callable[[Path], Mapping[str, Any]] = lambda staged: {},
    *,
    build: Build | None = None,
    arguments: Mapping[str, Any] | None = None,
) -> None:
    """Write the model as a folder that Hugging Face's tools open; `facts` go into the card.

    A model that no family describes is kept with the function that builds it: `build(**arguments)` gives the
    same model with other numbers, and `load` is given that function again.

    `check` is given the folder before it is in its place; it raises if that must not be, and adds to the card.
    Whole or not at all: the files are made in a folder beside, which is named `.ready` when they all
    are on the disk, and then moved to their places; a move that was cut short is finished by the next
    save or load. Raises ValueError for a model that no family describes without the `build` that gives it, and for
    what `load` would not take: a tokenizer with more ids than the embedding has rows, a context of nothing.
    """
    words, folder = hf_config_of(model, context_length), Path(folder)
    if isinstance(words, HfConfig):
        known, settings, weights = _in_their_terms(model, words)
        _fits(tokenizer, words.config.vocab)
    elif build is not None:
        (known, weights), settings = built.describe_built(model, build, arguments or {}), {}
    else:
        raise ValueError(
            f"this model cannot be said in Hugging Face's terms: {words}; keep it with the function that builds "
            "it: checkpoint.save(..., build=function), then checkpoint.load(folder, build=function)"
        )
    if context_length < 1:
        raise ValueError(f"context is {context_length}; a number of tokens from 1 is expected")
    dtype = str(next(iter(weights.values())).dtype).removeprefix("torch.") if weights else None

    def fill(staged: Path) -> None:
        shards.write_tensors(staged, weights)
        ids = write_tokenizer(staged, tokenizer, context_length)
        config = settings | ids | {"dtype": dtype, "torch_dtype": dtype}
        (staged / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        card = {
            **known,
            "context": context_length,
            "changes": [],
            **(facts or {}),
            **known,
        }  # which facts cannot change
        write_card(staged, {**card, **check(staged)})

    write_files(folder, fill, sum(w.nbytes for w in weights.values()))


def _fits(tokenizer: Tokenizer | None, rows: int) -> None:
    """Raise ValueError for a tokenizer with more ids than an embedding has rows."""
    if tokenizer is not None and tokenizer.vocab > rows:
        raise ValueError(
            f"the tokenizer has {plural(tokenizer.vocab, 'id')}, the embedding {plural(rows, 'row')}; "
            "each id needs a row"
        )


def _in_their_terms(
    model: nn.Module, words: HfConfig
) -> tuple[dict[str, Any], dict[str, Any], dict[str, LazyTensor]]:
    """What the card and config.json say of a model of a family, and its tensors by Hugging Face's names."""
    family, state = FAMILIES[words.family], in_memory(model.state_dict())
    moves, unknown = to_theirs(family.NAMES, state)
    assert not unknown, "a family has a name for each of its weights"
    return {"family": words.family}, family.to_hf(words.config), renamed(moves, state)


def write_files(folder: Path, fill: Callable[[Path], None], size: int) -> None:
    """Put the files that `fill` makes, about `size` bytes, into a folder: all of them or none.

    They are made in a folder beside, so that several may be at it; the one that finishes last counts.
    """
    finish_save(folder)
    atomic.write_folder(folder / READY, fill, size, _place)


def _place(made: Path, ready: Path) -> None:
    """Name what was made `.ready`, and move its files to their places."""
    with folder_lock(ready.parent):
        _move(ready.parent)  # of another save, which was cut short meanwhile
        os.rename(made, ready)
        atomic.fsync_path(ready.parent)
        _move(ready.parent)


def write_card(folder: Path, facts: Mapping[str, Any]) -> None:
    """The card of a folder whose other files are all there: `facts`, and each file's size and SHA-256."""
    files = {f.name: {"size": f.stat().st_size, "sha256": atomic.digest(f)} for f in sorted(folder.iterdir())}
    card = {"format": FORMAT, "dunes": __version__, **facts, "files": files}
    (folder / CARD).write_text(json.dumps(card, indent=2) + "\n")


def finish_save(folder: Path) -> None:
    """Finish a save that was cut short after its files were written. Raises OSError if they cannot be moved."""
    if (folder / READY).is_dir():
        with atomic.add_path_to_errors(folder), folder_lock(folder):
            _move(folder)


def _move(folder: Path) -> None:
    """Move what is `.ready` to its places, while no other process or thread does."""
    ready = folder / READY
    if not ready.is_dir():
        return
    _make_way(folder, ready)
    for file in sorted(f for f in ready.iterdir() if f.name != CARD):
        os.replace(file, folder / file.name)
    atomic.fsync_path(folder)
    # The card comes when the others are there to stay: as long as one is left, it is there and names them all.
    with suppress(FileNotFoundError):
        os.replace(ready / CARD, folder / CARD)
    atomic.fsync_path(folder)
    ready.rmdir()
    atomic.fsync_path(folder)


def _make_way(folder: Path, ready: Path) -> None:
    """Remove files of an older save that the new one does not have: they would be read, or lie there unread."""
    new = {f.name for f in ready.iterdir()} | set(cards.listed_files(ready, cards.read_card(ready)))
    old = _named(folder) if CARD in new else set()
    if shards.SINGLE in new or (shards.INDEX in new and CARD in new):
        old |= {shards.INDEX, shards.SINGLE, *(f.name for f in folder.glob("model-*-of-*.safetensors"))}
    elif shards.INDEX in new:  # without a card it is not known which of its shards were moved already
        old |= {shards.SINGLE}
    for name in old - new:
        (folder / name).unlink(missing_ok=True)


def _named(folder: Path) -> set[str]:
    """The files that the card of an older save names; none if it is damaged."""
    try:
        return {
            name
            for name in cards.listed_files(folder, cards.read_card(folder))
            if (folder / name).parent == folder
        }
    except ValueError:
        return set()


def write_tokenizer(
    folder: Path, tokenizer: Tokenizer | None, context_length: int | None
) -> dict[str, int | None]:
    """Write a tokenizer, if there is one, and the files beside it; what config.json says of its special tokens."""
    if tokenizer is None:
        return {}
    tokenizer.save(folder)
    for name, content in tokenizer_configs(tokenizer, context_length).items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")
    return special_ids(tokenizer)


def tokenizer_configs(tokenizer: Tokenizer, context_length: int | None) -> dict[str, Any]:
    """The JSON files that Hugging Face's tools expect beside a tokenizer, but for those that it brought along."""
    names = tokenizer.special_tokens_map
    ids = special_ids(tokenizer)
    made = {
        "generation_config.json": {k: v for k, v in ids.items() if v is not None},
        "tokenizer_config.json": names
        | {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": context_length,
            "clean_up_tokenization_spaces": False,
        },
        "special_tokens_map.json": names,
    }
    return {name: content for name, content in made.items() if name not in tokenizer.extra_files}


def special_ids(tokenizer: Tokenizer) -> dict[str, int | None]:
    """What config.json says of special tokens."""
    names = tokenizer.special_tokens_map
    return {f"{n}_token_id": tokenizer.token_id(names[k]) if (k := f"{n}_token") in names else None for n in IDS}


def read_consistently(folder: Path, read: Callable[[Path], T]) -> T:
    """What `read` makes of the folder, anew where another thread or process saved there meanwhile."""
    for _ in range(TRIES):
        readable_folder(folder)
        before = _saved(folder)
        try:
            result = read(folder)
        except (ValueError, FileNotFoundError):
            if _saved(folder) == before:
                raise
        else:
            if _saved(folder) == before:
                return result
    with folder_lock(folder):
        readable_folder(folder)
        return read(folder)


def _saved(folder: Path) -> list[tuple[int, int] | None]:
    """What is another after each save."""
    found = [path.stat() if path.exists() else None for path in (folder / CARD, folder / READY)]
    return [None if f is None else (f.st_ino, f.st_mtime_ns) for f in found]


def load_model(folder: Path, device: torch.device | str, build: Build | None = None) -> LoadedModel:
    """The model, its tokenizer and its card, from any form of model folder, that of a function with `build`.

    Warns where there is no tokenizer, and of special ids that are above the vocabulary.
    """
    folder = readable_folder(folder)
    if built.build_function_of(cards.read_card(folder), folder / CARD) is not None:
        return _built(folder, device, build)
    source = open_verified_source(folder)
    tokenizer = load_tokenizer(source.folder)
    check_vocabulary(source, tokenizer)
    return LoadedModel(
        load_decoder(source).to(device).eval(), tokenizer, source.config.context_length, dict(source.card)
    )


def _built(folder: Path, device: torch.device | str, build: Build | None) -> LoadedModel:
    """A model that its function builds. Raises ValueError, with the remedy, without that function."""
    card = verified_card(folder)
    function = built.build_function_of(card, folder / CARD)
    assert function is not None, "asked before"
    name, arguments = function
    if build is None:
        raise ValueError(built.loading_hint(folder, name))
    index = folder / shards.INDEX
    files = indexed_tensors(index) if index.is_file() else tensors(folder / shards.SINGLE)
    tokenizer = load_tokenizer(folder)
    # Whatever is built: what needs a language model will miss its parts.
    model = built.load_built(build, arguments, card, files, folder / CARD)
    return LoadedModel(
        cast_type(Decoder, model).to(device).eval(), tokenizer, context_length_of(card, folder), card
    )


def context_length_of(card: Mapping[str, Any], folder: Path, otherwise: int | None = None) -> int:
    """How many tokens a card says that its model looks at. Raises ValueError for what is no number."""
    context_length = card.get("context", otherwise)
    if type(context_length) is not int or context_length < 1:
        raise ValueError(f"{folder / CARD}: context is {quote(context_length)}; a number of tokens is expected")
    return context_length


def load_tokenizer(folder: Path) -> Tokenizer | None:
    """The tokenizer in a folder; None, with a warning, where there is none."""
    if Tokenizer.find_file(folder) is not None:
        return Tokenizer.load(folder)
    warnings.warn(f"{folder}: no tokenizer.json, tokenizer.model or tekken.json; tokenizer is None", stacklevel=2)
    return None


def load_decoder(source: Source) -> Decoder:
    """The model with its weights, which are mapped, not copied: a file never changes.

    Raises ValueError that lists every difference before any number is read.
    """
    weights = _alike(source, source.weights())
    model = build_on_meta(source.family, source.config)
    model.load_state_dict({name: stored.read() for name, stored in weights.items()}, assign=True)
    return model


def described(folder: Path | str) -> tuple[str, Any, dict[str, Any]]:
    """The family, its config and the card of a model folder without its weights. Raises ValueError like `load`."""
    source = open_verified_source(Path(folder), max_bytes=0)
    return source.family, source.config, dict(source.card)


def open_verified_source(
    folder: Path, renames: Mapping[str, str] | None = None, max_bytes: float = atomic.LARGE
) -> Source:
    """A folder as `open_source` gives it, after a look whether its files are those that its card, if any, names.

    Raises ValueError for the first that is not. They are hashed up to `max_bytes` bytes together.
    """
    folder = readable_folder(folder)
    card = verified_card(
        folder, max_bytes
    )  # first, since it says what was changed where opening would only wonder
    return replace(open_source(folder, renames), card=card)


def verified_card(folder: Path, max_bytes: float = atomic.LARGE) -> dict[str, Any]:
    """The card of a folder, empty without one. Raises ValueError for the first file that is not as it says."""
    card = cards.read_card(folder)
    cards.check_files(folder, card, max_bytes)
    return card


def readable_folder(folder: Path) -> Path:
    """Where to read a folder, after what our save left there to be moved has been; other people's files stay.

    Where nothing can be moved (a disk that is only read) the save lies beside, and its card tells if it is whole.
    """
    ready = folder / READY
    if (ready / CARD).is_file():
        try:
            finish_save(folder)
        except OSError as error:
            if error.errno not in (errno.EROFS, errno.EACCES, errno.EPERM):
                raise
            return ready
    return folder


def _alike(source: Source, weights: dict[str, LazyTensor]) -> dict[str, LazyTensor]:
    """The weights in one dtype: of several in the files the config's, or else one that holds them all."""
    kinds = {w.dtype for w in weights.values()}
    if len(kinds) == 1:
        return weights
    said = str(source.hf_config.get("dtype") or source.hf_config.get("torch_dtype"))
    named = [k for k in kinds if str(k).removeprefix("torch.") == said]
    return cast(weights, named[0] if named else reduce(torch.promote_types, kinds))


def check_vocabulary(source: Source, tokenizer: Tokenizer | None) -> None:
    """Raise ValueError unless every id that a text may have has a row in the embedding; more rows do no harm.

    Ids that stand for the beginning or the end of a text and have no row, as GPT-2's defaults have in a model with
    a smaller vocabulary, are never met: they are only warned of.
    """
    rows, special = source.config.vocab, _special(source)
    ids, padding = (0 if tokenizer is None else tokenizer.vocab), max(special.get("pad_token_id", ()), default=0)
    marked = () if tokenizer is None else tokenizer.configured_ids
    largest = max([*marked, *(i for ids in special.values() for i in ids)], default=0)
    if ids > rows or padding >= rows:
        said = ", ".join(f"{k} {v}" for k, v in special.items())
        raise ValueError(
            f"{source.folder}: the embedding has {rows} rows, the tokenizer {ids} ids, special ids "
            f"are up to {largest} ({said}); each id needs a row"
        )
    if largest >= rows:
        warnings.warn(
            f"{source.folder}: special ids are up to {largest} in config.json or generation_config.json, the "
            f"embedding has {rows} rows; no text begins or ends with them",
            stacklevel=2,
        )


def _special(source: Source) -> dict[str, list[int]]:
    """The ids in a config by their keys. Raises ValueError for what is none; -1 stands for none in old files."""
    special = {}
    for key in (f"{name}_token_id" for name in IDS):
        found = source.hf_config.get(key)
        ids = found if isinstance(found, list) else [] if found is None else [found]
        if not all(type(i) is int and i >= -1 for i in ids):
            said = ascii(found)
            raise ValueError(f"{source.folder / CONFIG}: {key} is {said[:80]}; expected an id or a list of ids")
        special[key] = ids
    return {key: ids for key, ids in special.items() if ids}
