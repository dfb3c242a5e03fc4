"""A model to be used: from a folder of its own, or from an adapter's folder and that of its base."""

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from dunes.augment.adapted import sides
from dunes.augment.quantize import shape as quantize
from dunes.checkpoint import card as cards
from dunes.checkpoint import folder as whole
from dunes.checkpoint.adapter import WEIGHTS, Words, load_adapter
from dunes.checkpoint.built import Build
from dunes.checkpoint.folder import (
    Loaded,
    agree,
    checked,
    context_of,
    filled,
    load_tokenizer,
    settled,
    steady,
    verified,
)
from dunes.checkpoint.header import shown
from dunes.checkpoint.hub import NAME, local
from dunes.checkpoint.source import ADAPTER, CONFIG, tensors
from dunes.parts import Decoder
from dunes.text import Tokenizer, chat, json_file


def load(folder: Path | str, device: torch.device | str = "cpu", build: Build | None = None) -> Loaded:
    """The model, its tokenizer and its card, from any form of folder that is read here.

    `build` is the function that builds a model which no family describes: what `save` was given.

    Of an adapter's folder: its base, changed as the card says and proven to be the one that the adapter was made
    for, with the adapter acting on it under the name `default`. Tokenizer and context are the adapter's, or else
    the base's. Warns where there is no tokenizer, and of special ids that are above the vocabulary. Raises
    ValueError that names what is missing or wrong, before any number is read. The weights keep the dtype they are
    stored in. Beside a process that saves into the folder a load begins again.
    """

    def read(there: Path) -> Loaded:
        return _adapted(settled(there), device) if adapts(there) else whole.load_model(there, device, build)

    return steady(Path(folder), read)


def load_with_tokenizer(folder: Path | str, device: torch.device | str = "cpu") -> tuple[Loaded, Tokenizer]:
    """`load` for what turns text into ids. Raises ValueError like it, and where there is no tokenizer."""
    if Tokenizer.file(place := _tokenizer_folder(Path(folder))) is None:
        Tokenizer.load(place)  # says what is missing, before anything is read
    loaded = load(folder, device)
    assert loaded.tokenizer is not None, "its file was there"
    return loaded, loaded.tokenizer


def _tokenizer_folder(folder: Path) -> Path:
    """Where the tokenizer of a model lies: for an adapter that brings none, beside its base."""
    folder = settled(folder)
    return base_of(folder) if adapts(folder) and Tokenizer.file(folder) is None else folder


def described(folder: Path | str) -> tuple[str, Any, dict[str, Any]]:
    """The family, its config and the card of a folder without its weights. Raises ValueError like `load`."""
    folder = Path(folder)
    if not adapts(folder):
        return whole.described(folder)
    family, config, _ = whole.described(base_of(settled(folder)))
    return family, config, verified(settled(folder))


def adapts(folder: Path) -> bool:
    """Whether a folder holds an adapter and no model."""
    there = settled(folder)
    return (there / ADAPTER).is_file() and not (there / CONFIG).is_file()


def base_of(folder: Path) -> Path:
    """The folder of the base of an adapter: where it was, or as it lies from here, or the copy of one on the Hub.

    Raises ValueError, with the remedy, if there is none of these.
    """
    words = json_file.read(folder / ADAPTER, json_file.CONFIG)
    name, card = words.get("base_model_name_or_path"), cards.read(folder).get("base")
    if isinstance(name, str) and name and Path(name).is_dir():
        return Path(name)
    near = card.get("folder") if isinstance(card, dict) else None
    if isinstance(near, str) and (folder / near).is_dir():
        return (folder / near).resolve()
    remedy = f"name it: dunes chat BASE --adapter {folder}"
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise ValueError(f"{folder}: its base {shown(name)} is not there; {remedy}")
    revision = words.get("revision")
    try:
        return local(name, revision if isinstance(revision, str) and revision else None).folder
    except ValueError as error:
        raise ValueError(f"{folder}: its base is not there: {error}; or {remedy}") from None


def _adapted(folder: Path, device: torch.device | str) -> Loaded:
    card = verified(folder)
    source = checked(base_of(folder))
    tokenizer = load_tokenizer(_tokenizer_folder(folder))
    agree(source, tokenizer)
    context = context_of(card, folder, source.config.context)
    model = filled(source)
    repeat(model, card, folder)
    load_adapter(model, folder)
    return Loaded(model.to(device).eval(), tokenizer, context, card)


def put_on(loaded: Loaded, folder: Path, name: str) -> Loaded:
    """One more adapter beside a model's weights, under this name and acting, with its tokenizer, context and card.

    What it does not bring is the model's. Raises ValueError like `load`.
    """
    folder = settled(folder)
    card = verified(folder)
    tokenizer = Tokenizer.load(folder) if Tokenizer.file(folder) else loaded.tokenizer
    rows, _ = sides(loaded.model.embed.token)
    if tokenizer is not None and max(tokenizer.vocab, 1 + max(tokenizer.marked, default=0)) > rows:
        raise ValueError(f"{folder}: its tokenizer has {tokenizer.vocab} ids, the base's embedding {rows} rows")
    context = context_of(card, folder, loaded.context)
    load_adapter(loaded.model, folder, name)
    loaded.model.eval()
    return Loaded(loaded.model, tokenizer, context, card)


def repeat(model: Decoder, card: Mapping[str, Any], folder: Path) -> None:
    """Do to a base what an adapter's card says was done to it first. Raises ValueError for what cannot be done."""
    for note in card.get("changes", []):
        name = note.get("name") if isinstance(note, dict) else note
        if name == "lora":  # which its own files say
            continue
        if name != "quantize":
            raise ValueError(
                f"{folder / cards.CARD}: the change {shown(name)} is not known; a newer dunes has made it"
            )
        try:
            quantize(model, fill=True, request=note["request"], places=note["places"])
        except (KeyError, TypeError) as error:
            raise ValueError(f"{folder / cards.CARD}: the note of {name} is damaged: {error!r}") from None


def about(folder: Path) -> tuple[list[str], str | None]:
    """Lines about an adapter's folder, from headers alone, and why `load` would refuse it, if that can be told.

    Raises ValueError for what is no adapter.
    """
    folder = settled(folder)
    lines = list(_lines(folder))
    try:
        source = checked(base_of(folder))
        agree(source, load_tokenizer(_tokenizer_folder(folder)))
        lines.append(f"base        {source.folder}: {source.family}, {len(source.weights())} tensors")
        reason = None
    except ValueError as error:
        reason = str(error)
    return [*lines, f"loads       {'yes' if reason is None else f'no: {reason}'}"], reason


def _lines(folder: Path) -> Iterator[str]:
    words, card = Words.read(folder / ADAPTER), verified(folder)
    stored = [w for name in WEIGHTS if (folder / name).is_file() for w in tensors(folder / name).items()]
    kind = "DoRA" if words.dora else "rsLoRA" if words.rslora else "LoRA"
    size = sum(w.nbytes for _, w in stored) / 1e6
    yield f"adapter     {kind}, rank {words.rank}, alpha {words.alpha:g}: {len(stored)} tensors, {size:.1f} MB"
    modules = [k.split(".lora_")[0] for k, _ in stored if ".lora_A" in k or ".lora_embedding_A" in k]
    ends = Counter(module.rpartition(".")[2] for module in modules)
    yield f"places      {', '.join(f'{end} {n} times' for end, n in ends.items())}"
    for note in card.get("changes", []):
        if isinstance(note, dict) and isinstance(request := note.get("request"), dict) and "kind" in request:
            yield f"changed     the base is kept in {shown(request['kind'])} first"
    yield f"template    {_template(folder, card)}"
    yield f"tokenizer   {'its own' if Tokenizer.file(folder) else 'the one of the base'}"


def _template(folder: Path, card: Mapping[str, Any]) -> str:
    if isinstance(name := card.get("template"), str):
        return name
    return "in its files" if chat.template(folder) is not None else "none here"
