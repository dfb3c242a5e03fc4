"""Loading a model from its folder, or from the folders of an adapter and its base."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from dunes.augment import Change, make_change
from dunes.augment.adapted import sides
from dunes.checkpoint import card as cards
from dunes.checkpoint.architecture import Build
from dunes.checkpoint.base import BaseRecord, BaseWeights, check_base, read_base_record
from dunes.checkpoint.folder import (
    LoadedModel,
    load_decoder,
    load_source,
    load_tokenizer,
    open_verified_source,
    read_consistently,
    readable_folder,
    verified_card,
)
from dunes.checkpoint.formats.adapter import WEIGHTS, PeftConfig, attach_adapter
from dunes.checkpoint.hub import NAME, locate_model
from dunes.checkpoint.model_folder import ADAPTER, CONFIG, named_folder
from dunes.checkpoint.source import Source, context_length_of, tensors
from dunes.checkpoint.weights.safetensors_file import quote
from dunes.files import json_file
from dunes.files.model_file import find_file
from dunes.files.trust import trust_cards
from dunes.parts import Decoder
from dunes.text import Tokenizer, chat_template
from dunes.units import format_bytes, plural


def load(
    folder: Path | str,
    device: torch.device | str = "cpu",
    any_base: bool = False,
    build: Build | None = None,
    adapters: Sequence[Path] = (),
    trust_code: bool = False,
) -> LoadedModel:
    """A model with its tokenizer and card, from a folder in any supported format; weights keep their stored dtype.

    `build` is the function that builds a model of no family, as passed to `save`; with `trust_code`, the function
    in the card is imported, which runs code from outside of this package. `adapters` are folders of adapters to
    add later: the model is verified to be their base, and the changes in their cards are made.

    For an adapter's folder, its base is loaded, verified against the digests in the adapter's card (unless
    `any_base`), quantized if the card says so (QLoRA), and the adapter is added as `default`. Tokenizer and
    context length are the adapter's, else the base's. Warns if there is no tokenizer, and about special ids above
    the vocabulary. Raises ValueError, before any weight is read, if something is missing or wrong. Loading is
    repeated if another process saves into the folder meanwhile.
    """

    def read(readable: Path) -> LoadedModel:
        if is_adapter(readable):
            return _load_adapted(readable_folder(readable), adapters, device, any_base)
        loaded = load_source(open_verified_source(readable, build=build), device)
        if adapters:
            prepare_base(loaded.model, adapters, any_base)
        return loaded

    with trust_cards(trust_code):
        return read_consistently(Path(folder), read)


def load_with_tokenizer(
    folder: Path | str, device: torch.device | str = "cpu", any_base: bool = False, adapters: Sequence[Path] = ()
) -> LoadedModel:
    """`load` for a folder that must have a tokenizer. Raises ValueError as `load`, and if there is none."""
    if Tokenizer.find_file(place := tokenizer_folder(Path(folder))) is None:
        Tokenizer.load(place)  # raises before anything is read
    return load(folder, device, any_base, adapters=adapters)


def tokenizer_folder(folder: Path) -> Path:
    """The folder of the tokenizer: an adapter's own folder, or its base's if it has none."""
    folder = readable_folder(folder)
    return base_folder(folder) if is_adapter(folder) and Tokenizer.find_file(folder) is None else folder


def describe(folder: Path | str) -> Source:
    """The `Source` of a folder, or of an adapter's base with the adapter's card. Raises ValueError as `load`."""
    folder = Path(folder)
    if not is_adapter(folder):
        return open_verified_source(folder, max_bytes=0)
    folder = readable_folder(folder)
    source = open_verified_source(base_folder(folder), max_bytes=0)
    return replace(source, card=verified_card(folder, max_bytes=0))


def is_adapter(folder: Path) -> bool:
    """True if a folder has an adapter and no model."""
    readable = readable_folder(folder)
    return (readable / ADAPTER).is_file() and not (readable / CONFIG).is_file()


def base_folder(folder: Path) -> Path:
    """The folder of an adapter's base, by its absolute or relative path, or a copy from the Hub.

    Raises ValueError, with a remedy, if none of these exists.
    """
    readable, folder = readable_folder(folder), named_folder(folder)
    peft = json_file.read(readable / ADAPTER, json_file.MAX_CONFIG_BYTES)
    name, card = peft.get("base_model_name_or_path"), cards.read_card(readable).get("base")
    if isinstance(name, str) and name and Path(name).exists():
        return Path(name)
    relative = card.get("folder") if isinstance(card, dict) else None
    if isinstance(relative, str) and (folder / relative).exists():
        return (folder / relative).resolve()
    remedy = f"name it: dunes chat BASE --adapter {folder}"
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise ValueError(f"{folder}: its base {quote(name)} does not exist; {remedy}")
    revision = peft.get("revision")
    try:
        return locate_model(name, revision if isinstance(revision, str) and revision else None).folder
    except ValueError as error:
        raise ValueError(f"{folder}: its base cannot be found: {error}; or {remedy}") from None


def _load_adapted(folder: Path, others: Sequence[Path], device: torch.device | str, any_base: bool) -> LoadedModel:
    card = verified_card(folder)
    source = open_verified_source(base_folder(folder))
    tokenizer = load_tokenizer(source, tokenizer_folder(folder))
    context_length = context_length_of(card, folder, source.expected, source.context_length)
    model = load_decoder(source)
    changes = prepare_base(model, [folder, *others], any_base)
    changes += [attach_adapter(model, folder, any_base=any_base)]
    if history := source.card.get("changes" if source.own is None else "history"):
        card["history"] = history  # changes that the base's weights include
    architecture = replace(source.architecture, changes=(*source.architecture.changes, *changes))
    return LoadedModel(model.to(device).eval(), tokenizer, context_length, card, architecture)


def add_adapter(loaded: LoadedModel, folder: Path, name: str, any_base: bool = False) -> LoadedModel:
    """Add an adapter, activate it under this name, and return the model with the adapter's card.

    Tokenizer and context length are the adapter's, else the model's. The model must have been loaded with this
    folder in `adapters`, which verifies the base. Raises ValueError as `load`.
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

    Returns the changes made; none if the base has them already. A bit-equal base must also be bit-equal after the
    changes; one that was cast to another dtype may differ. Raises ValueError as `load_adapter`.
    """
    cards = {folder: verified_card(folder, max_bytes=0) for folder in map(readable_folder, folders)}
    optional = {} if any_base else {folder: read_base_record(card, folder) for folder, card in cards.items()}
    records = {folder: record for folder, record in optional.items() if record is not None}
    weights, exact = BaseWeights(model), set[Path]()
    made = any(record.is_of(weights) for record in records.values())
    changed = [] if made else [(card, folder) for folder, card in cards.items() if any(_changes(card))][:1]
    for folder, record in records.items():
        if record.digests or not changed:
            check_base(weights, record, folder)
        if not record.digests or record.quantized_from(weights):
            exact.add(folder)
    del weights
    changes: list[Change] = []
    for card, folder in changed:
        changes = _make_changes(model, card, folder)
        weights = BaseWeights(model)
        for folder in exact:
            check_base(weights, records[folder], folder)
    return changes


def _changes(card: Mapping[str, Any]) -> Iterator[Any]:
    """Records of changes to the base that preceded the adapter."""
    return (r for r in card.get("changes", []) if not (isinstance(r, dict) and r.get("name") == "lora"))


def _make_changes(model: Decoder, card: Mapping[str, Any], folder: Path) -> list[Change]:
    """Make the changes to the base in an adapter's card. Raises ValueError for unknown or damaged ones."""
    try:
        changes = list(map(Change.of, _changes(card)))
        for change in changes:
            make_change(model, change)
    except ValueError as error:
        raise ValueError(f"{folder / cards.CARD}: {error}") from None
    return changes


def describe_adapter(folder: Path, values: bool = False) -> tuple[list[str], str | None]:
    """Lines on an adapter's folder, from headers alone, and the reason why `load` would refuse it, or None.

    With `values` it is loaded, which compares the base's weights. Raises ValueError for anything but an adapter.
    """
    folder = readable_folder(folder)
    lines = list(_adapter_lines(folder))
    try:
        source = open_verified_source(base_folder(folder), max_bytes=math.inf)
        load_tokenizer(source, tokenizer_folder(folder))
        lines.append(f"base        {source.folder}: {source.family}, {plural(len(source.weights()), 'tensor')}")
        lines.append(f"base check  {_comparison(folder, values)}")
        reason = None
    except ValueError as error:
        reason = str(error)
    return [*lines, f"loads       {'yes' if reason is None else f'no: {reason}'}"], reason


def _comparison(folder: Path, values: bool) -> str:
    """Text on the check of the base's weights; with `values` they are compared, raising ValueError as `load`."""
    if values:
        load(folder)
    if BaseRecord.read(verified_card(folder), folder) is None:
        return "not possible: the adapter's card has no digests of the base"
    return (
        "its weights match the adapter's digests"
        if values
        else "done when the adapter is loaded, or with --values"
    )


def _adapter_lines(folder: Path) -> Iterator[str]:
    options, card = PeftConfig.read(folder / ADAPTER).options, verified_card(folder)
    stored = [w for name in WEIGHTS if (path := find_file(folder, name)) for w in tensors(path).items()]
    method = "DoRA" if options.dora else "rsLoRA" if options.rslora else "LoRA"
    size = f"{plural(len(stored), 'tensor')}, {format_bytes(sum(w.nbytes for _, w in stored))}"
    yield f"adapter     {method}, rank {options.rank}, alpha {options.alpha:g}: {size}"
    modules = [k.split(".lora_")[0] for k, _ in stored if ".lora_A" in k or ".lora_embedding_A" in k]
    module_ends = Counter(module.rpartition(".")[2] for module in modules)
    counts = [f"{end} {plural(n, 'time')}" for end, n in module_ends.items()]
    yield f"modules     {', '.join(counts)}"
    for note in card.get("changes", []):
        if isinstance(note, dict) and isinstance(request := note.get("request"), dict) and "kind" in request:
            yield f"base dtype  {quote(request['kind'])}"
    yield f"template    {_template_name(folder, card)}"
    yield f"tokenizer   {'its own' if Tokenizer.find_file(folder) else 'from the base'}"


def _template_name(folder: Path, card: Mapping[str, Any]) -> str:
    if isinstance(name := card.get("template"), str):
        return name
    return "in its files" if chat_template.read_template(folder) is not None else "none here"
