"""Load a language model from its folder, or from the folders of an adapter and its base; load any network."""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dunes import measure, tree
from dunes.augment import Change, make_change
from dunes.augment.adapted import sides
from dunes.checkpoint import architecture as architectures
from dunes.checkpoint.architecture import Architecture, Build
from dunes.checkpoint.base_digests import BaseWeights, check_base, is_unchanged, read_base_record
from dunes.checkpoint.card import (
    ADAPTER,
    CARD,
    CONFIG,
    has_own_form,
    read_card,
    read_consistently,
    readable_folder,
    verified_card,
)
from dunes.checkpoint.formats.adapter import adapter_base_of, attach_adapter, check_settings, is_reference
from dunes.checkpoint.hub import NAME, locate_model
from dunes.checkpoint.source import Source, context_length_of, open_verified_source, own_weights
from dunes.checkpoint.weights.files import tensors
from dunes.checkpoint.weights.lazy_tensor import Weights
from dunes.checkpoint.weights.safetensors_file import quote
from dunes.checkpoint.weights.state_dict_diff import Difference, Prefix, summarize
from dunes.checkpoint.write import LoadedModel, load_decoder, load_tokenizer
from dunes.files import json_file
from dunes.files.atomic import LARGE
from dunes.files.model_file import trust_cards
from dunes.parts import Decoder
from dunes.text import Tokenizer
from dunes.units import format_bytes, format_count

OTHER_BASE = "put it back, or name one: dunes train --out {} --resume --from BASE --override base"
"""The remedy for a run that only refers to a base, if that is gone or changed."""
ROUNDED_FROM = 30_000_000
"""Number of parameters from which on the model of a run with a base is rounded to bfloat16."""


def load(
    folder: Path | str,
    device: torch.device | str = "cpu",
    any_base: bool = False,
    build: Build | None = None,
    adapters: Sequence[Path] = (),
    trust_code: bool = False,
) -> LoadedModel:
    """A model with its tokenizer and card, from a folder in any supported format; weights keep their stored dtype.

    `build` is the function that builds a model that no family describes, as passed to `save`. With `trust_code`,
    the function in the card is imported, which runs code from outside of this package. `adapters` are folders of
    adapters to add later: `load` verifies that the model is their base, and makes the changes in their cards.

    If the folder has an adapter, its base is loaded, verified by the digests in the adapter's card (unless
    `any_base`), and quantized if the card says so (QLoRA); then the adapter is added as `default`. Tokenizer and
    context length are the adapter's own; if it lacks one of them, the base's is used. Warns if the model has no
    tokenizer, and about special ids above the vocabulary. Raises ValueError if something is missing or wrong;
    names, shapes and free memory are checked before any weight is read. Loading is repeated if another process
    saves into the folder meanwhile.
    """

    def read(readable: Path) -> LoadedModel:
        if is_adapter(readable):
            return _load_adapted(readable_folder(readable), adapters, device, any_base)
        source = open_verified_source(readable, build=build)
        context_length, tokenizer = source.context_length, load_tokenizer(source)
        check_memory(source)
        model = load_decoder(source).to(device).eval()
        if adapters:
            prepare_base(model, adapters, any_base)
        return LoadedModel(model, tokenizer, context_length, dict(source.card), source.architecture)

    with trust_cards(trust_code):
        return read_consistently(Path(folder), read)


def load_with_tokenizer(
    folder: Path | str, device: torch.device | str = "cpu", any_base: bool = False, adapters: Sequence[Path] = ()
) -> LoadedModel:
    """Load a model like `load`, but raise ValueError, before anything is read, if it has no tokenizer."""
    if Tokenizer.find_file(place := tokenizer_folder(Path(folder))) is None:
        Tokenizer.load(place)  # raises before anything is read
    return load(folder, device, any_base, adapters=adapters)


def tokenizer_folder(folder: Path) -> Path:
    """The folder of a model's tokenizer: for an adapter without a tokenizer, the folder of its base."""
    folder = readable_folder(folder)
    return base_folder(folder) if is_adapter(folder) and Tokenizer.find_file(folder) is None else folder


def describe(folder: Path | str) -> Source:
    """The `Source` of a model, or of an adapter's base with the adapter's card.

    Raises ValueError in the same cases as `load`.
    """
    folder = Path(folder)
    if not is_adapter(folder):
        return open_verified_source(folder, max_bytes=0)
    source = open_verified_source(base_folder(folder), max_bytes=0)
    return replace(source, card=verified_card(readable_folder(folder), max_bytes=0))


def is_adapter(folder: Path) -> bool:
    """True if a folder has an adapter and no model."""
    readable = readable_folder(folder)
    return (readable / ADAPTER).is_file() and not (readable / CONFIG).is_file()


def base_folder(folder: Path, fetch: bool = True) -> Path:
    """The folder of an adapter's base: at its absolute path, at its relative path, or, with `fetch`, from the Hub.

    Raises ValueError, with a remedy, if none of these exists.
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
    remedy = OTHER_BASE.format(folder) if is_reference(record) else f"name it: dunes chat BASE --adapter {folder}"
    if not fetch or not isinstance(name, str) or not NAME.fullmatch(name):
        raise ValueError(f"{folder}: its base {quote(name)} does not exist; {remedy}")
    revision = peft.get("revision")
    try:
        return locate_model(name, revision if isinstance(revision, str) and revision else None).folder
    except ValueError as error:
        raise ValueError(f"{folder}: its base cannot be found: {error}; or {remedy}") from None


def check_memory(source: Source) -> None:
    """Raise ValueError if the weights take more memory than is free; blocks of a GGUF file become float32."""
    size, free = sum(w.nbytes for w in source.files.values()), measure.free_memory(torch.device("cpu"))
    if size > free > 0:
        count = sum(prod(w.shape) for w in source.files.values())
        fits = f"{format_count(free * count / size)} of {format_count(count)} parameters fit"
        halved = "; to halve the bytes: dunes convert MODEL OUT --dtype bfloat16" * (size > 2 * count)
        needed = f"the weights take {format_bytes(size)} of memory, and {format_bytes(free)} are free"
        raise ValueError(f"{source.folder}: {needed}; {fits}{halved}")


def _load_adapted(folder: Path, others: Sequence[Path], device: torch.device | str, any_base: bool) -> LoadedModel:
    card, base = verified_card(folder), base_folder(folder)
    is_same = is_unchanged(base, card) and not any(_changes(card))
    try:
        source = open_verified_source(base, max_bytes=0 if is_same else LARGE)
        tokenizer = load_tokenizer(source, tokenizer_folder(folder))
        context_length = context_length_of(card, folder, source.expected, source.context_length)
        check_memory(source)
        model = load_decoder(source)
        changes = prepare_base(model, [*others] if is_same else [folder, *others], any_base)
        if not is_reference(card):
            changes += [attach_adapter(model, folder, any_base=any_base)]
        elif not any_base:
            check_settings(adapter_base_of(model), card, folder)
    except ValueError as error:
        remedy = f"; {OTHER_BASE.format(folder)}" if is_reference(card) else ""
        raise (error if is_same else ValueError(f"{error} (in {base}){remedy}")) from None
    if history := source.card.get("changes" if source.own is None else "history"):
        card["history"] = history  # changes that the base's weights include
    architecture = replace(source.architecture, changes=(*source.architecture.changes, *changes))
    return LoadedModel(model.to(device).eval(), tokenizer, context_length, card, architecture)


def round_for_speed(loaded: LoadedModel) -> LoadedModel:
    """Cast the model of a run with a base to bfloat16 if it is large, in float32, and products are clearly faster.

    It then completes lines and generates; what is saved, scored or exported has the weights of `load`.
    """
    parameters = [*loaded.model.parameters()] if loaded.card.keys() >= {"adapter", "trained"} else []
    is_plain = all(p.dtype == torch.float32 for p in parameters) and tree.count(loaded.model) >= ROUNDED_FROM
    if parameters and is_plain and measure.choose_dtype(parameters[0].device) == torch.bfloat16:
        loaded.model.to(torch.bfloat16)
    return loaded


def add_adapter(loaded: LoadedModel, folder: Path, name: str, any_base: bool = False) -> LoadedModel:
    """Add an adapter, activate it under this name, and return the model with the adapter's card.

    Tokenizer and context length are the adapter's own; if it lacks one of them, the model's is used. The model
    must have been loaded with this folder in `adapters`, which verifies the base. Raises ValueError like `load`.
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
    """Verify that a model is the base of the adapters in these folders, and make the changes in their cards.

    Returns the changes made; empty if the base includes them already. If the base is bit-equal to the recorded
    base, the changes must reproduce the recorded weights; a base cast to another dtype need not reproduce them.
    Raises ValueError like `load_adapter`.
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
    changes = _make_changes(model, cards[changed], changed)
    weights = BaseWeights(model)
    for folder in exact:
        check_base(weights, records[folder], folder)
    return changes


def _changes(card: Mapping[str, Any]) -> Iterator[Any]:
    """Records, in an adapter's card, of changes to the base before the adapter was added."""
    return (r for r in card.get("changes", []) if not (isinstance(r, dict) and r.get("name") == "lora"))


def _make_changes(model: Decoder, card: Mapping[str, Any], folder: Path) -> list[Change]:
    """Make the changes to the base that an adapter's card lists. Raises ValueError if a record is damaged."""
    try:
        changes = list(map(Change.of, _changes(card)))
        for change in changes:
            make_change(model, change)
    except ValueError as error:
        raise ValueError(f"{folder / CARD}: {error}") from None
    return changes


def is_network(folder: Path | str) -> bool:
    """True if a folder's card says that its network is no language model."""
    card = read_card(readable_folder(Path(folder)))
    return has_own_form(card) and card.get("context_length") is None


def load_network(
    folder: Path | str, build: Build | None = None, trust_code: bool = False, device: torch.device | str = "cpu"
) -> nn.Module:
    """The network in a folder that `save` wrote, in evaluation mode.

    `build` is the function that was passed to `save`; by default the function in the card is imported, from
    `dunes.models`, or with `trust_code` from any module. Raises ValueError like `load`.
    """

    def read(readable: Path) -> nn.Module:
        source = open_verified_source(readable, build=build)
        check_memory(source)
        return load_decoder(source).to(device).eval()

    with trust_cards(trust_code):
        return read_consistently(Path(folder), read)


def load_weights(model: nn.Module, path: Path | str) -> dict[str, Any]:
    """Load weights from a folder of `save_weights` or `save`, or from a file; returns the folder's card, or {}.

    Nothing is cast: call `tree.move(model, dtype=...)` first. Files are safetensors or pickles, read without
    executing anything. Raises ValueError, listing the differences and changing nothing, if a file differs from its
    digest in the card, or if names, shapes, dtypes or ties differ; with a card, also if classes or settings of
    modules differ.
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
            raise ValueError(f"{folder / CARD}: no card of a network; load its file of weights")
        _fill(model, own_weights(folder), card, folder / CARD)
        return card

    return read_consistently(path, read)


def _fill(model: nn.Module, files: Weights, card: Mapping[str, Any], path: Path) -> None:
    """Compare the files with the network, then load their values."""
    exact, prefix = Architecture("", None, function=type(model)), Prefix()  # no other dtypes
    if card:
        differences = architectures.compare_structure(model, exact, card, files, path)
    else:
        prefix = Prefix.of(files, model.state_dict())
        files, tied = _without_ties(model, prefix.without(files))
        differences = list(architectures.tensor_differences(model, files, tied, exact))
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
        raise ValueError(f"{lost} has no values, and no file has them: it is a buffer that is not persistent")
    architectures.fill(model, files, card)


def _without_ties(model: nn.Module, files: Weights) -> tuple[Weights, dict[str, str]]:
    """A file's tensors without copies of tied tensors, and the tied names. Raises ValueError if copies differ."""
    _, tied = architectures.saved_tensors(model)
    for name, first in tied.items():
        if name in files and first in files and not torch.equal(files[name].read(), files[first].read()):
            raise ValueError(str(Difference("tied", name, f"the same tensor as {first}", "a tensor of its own")))
    repeated = {name for name, first in tied.items() if first in files}
    return {name: tensor for name, tensor in files.items() if name not in repeated}, tied
