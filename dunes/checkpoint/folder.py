"""A model on disk: a Hugging Face model folder, with our card `dunes.json` beside it."""

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from dunes import __version__
from dunes.checkpoint import atomic
from dunes.checkpoint.say import said
from dunes.checkpoint.stored import held, moved
from dunes.models import FAMILIES, family_of
from dunes.models.names import to_ours, to_theirs
from dunes.parts import Decoder
from dunes.text import END, Tokenizer

CARD = "dunes.json"
CONFIG = "config.json"
WEIGHTS = "model.safetensors"
FORMAT = 1
READY = ".ready"


@dataclass(frozen=True)
class Loaded:
    """A model from a folder, in evaluation mode; `card` is what dunes.json says, empty without one."""

    model: Decoder
    tokenizer: Tokenizer
    context: int
    card: dict[str, Any]


def save(
    model: nn.Module,
    folder: Path | str,
    tokenizer: Tokenizer,
    context: int,
    facts: Mapping[str, Any] | None = None,
) -> None:
    """Write the model as a folder that Hugging Face's tools open; `facts` go into the card.

    Whole or not at all: the files are made in a folder beside, which is named `.ready` when they all
    are on the disk, and then moved to their places; a move that was cut short is finished by the next
    save or load. Raises ValueError for a model that no family describes.
    """
    words = said(model, context)
    if isinstance(words, str):
        raise ValueError(f"this model cannot be said in Hugging Face's terms: {words}")
    folder = Path(folder)
    settle(folder)
    family = FAMILIES[words.family]
    state = model.state_dict()
    moves, unknown = to_theirs(family.NAMES, state)
    assert not unknown, "a family has a name for each of its weights"
    weights = {k: v.read() for k, v in moved(moves, held(state)).items()}

    def fill(staged: Path) -> None:
        atomic.write_tensors(staged / WEIGHTS, weights)
        tokenizer.save(staged)
        for name, content in _beside(family.to_hf(words.config), tokenizer, context, weights).items():
            (staged / name).write_text(json.dumps(content, indent=2) + "\n")
        card = {
            "format": FORMAT,
            "dunes": __version__,
            "family": words.family,
            "context": context,
            "changes": [],
            "files": {
                f.name: {"size": f.stat().st_size, "sha256": atomic.digest(f)} for f in sorted(staged.iterdir())
            },
            **(facts or {}),
        }
        (staged / CARD).write_text(json.dumps(card, indent=2) + "\n")

    atomic.write_folder(folder / READY, fill, {WEIGHTS: weights})
    settle(folder)


def settle(folder: Path) -> None:
    """Finish a save that was cut short after its files were written. Raises OSError if they cannot be moved."""
    ready = folder / READY
    if not ready.is_dir():
        return
    with atomic.naming(folder), suppress(FileNotFoundError):  # another process may be at it, too
        (ready / atomic.MANIFEST).unlink(missing_ok=True)
        for file in sorted(ready.iterdir()):
            os.replace(file, folder / file.name)
        atomic.sync(folder)
        ready.rmdir()
        atomic.sync(folder)


def _beside(
    words: dict[str, Any], tokenizer: Tokenizer, context: int, weights: Mapping[str, Tensor]
) -> dict[str, Any]:
    """The JSON files that belong to a Hugging Face folder."""
    dtype = str(next(iter(weights.values())).dtype).removeprefix("torch.")
    end, pad = tokenizer.end, tokenizer.special("<|fim_pad|>")
    ids = {"bos_token_id": None, "eos_token_id": end, "pad_token_id": pad}
    names = {"eos_token": END, "pad_token": "<|fim_pad|>"}
    return {
        CONFIG: words | ids | {"dtype": dtype, "torch_dtype": dtype},
        "generation_config.json": {"eos_token_id": end, "pad_token_id": pad},
        "tokenizer_config.json": names
        | {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": context,
            "clean_up_tokenization_spaces": False,
        },
        "special_tokens_map.json": names,
    }


def load(folder: Path | str, device: torch.device | str = "cpu") -> Loaded:
    """The model, its tokenizer and its card. Raises ValueError that names what is missing or wrong.

    Built on the meta device first, so that no memory is taken before everything is known to fit.
    """
    folder = Path(folder)
    name, config, card = described(folder)
    family, hf = FAMILIES[name], _json(folder / CONFIG)
    with torch.device("meta"):
        model: Decoder = family.build(config)
    stored = held(_weights(folder), WEIGHTS)
    moves, unknown = to_ours(family.NAMES, {k: w.shape for k, w in stored.items()})
    if unknown:
        raise ValueError(f"{folder / WEIGHTS}: weights that this family does not have: {', '.join(unknown)}")
    weights = {k: w.read() for k, w in moved(moves, stored).items()}
    tokenizer = Tokenizer.load(folder)
    if (rows := weights.get("embed.token.weight")) is not None:
        _agree(folder, hf, len(rows), tokenizer)
    _fill(model, weights, folder / WEIGHTS)
    return Loaded(model.to(device).eval(), tokenizer, config.context, card)


def described(folder: Path | str) -> tuple[str, Any, dict[str, Any]]:
    """The family, its config and the card of a model folder without its weights. Raises ValueError like `load`."""
    folder = Path(folder)
    settle(folder)
    config_file = folder / CONFIG
    if not config_file.is_file():
        raise ValueError(f"{config_file}: no such file; {folder} is not a model folder")
    hf, card = _json(config_file), _json(folder / CARD) if (folder / CARD).is_file() else {}
    if card:
        _check(folder, card)
    try:
        name = family_of(hf)
        return name, FAMILIES[name].from_hf(hf), card
    except KeyError as key:
        raise ValueError(f"{config_file}: {key} is missing") from None


def _agree(folder: Path, hf: Mapping[str, Any], rows: int, tokenizer: Tokenizer) -> None:
    """Raise ValueError unless config and embedding agree and every id has a row; more rows do no harm."""
    special = {k: v for k, v in hf.items() if k in ("bos_token_id", "eos_token_id", "pad_token_id")}
    largest = max((i for v in special.values() for i in (v if isinstance(v, list) else [v or 0])), default=0)
    if hf["vocab_size"] != rows or tokenizer.vocab > rows or largest >= rows:
        raise ValueError(
            f"{folder}: config.json says {hf['vocab_size']} words, the embedding has {rows} rows and the "
            f"tokenizer {tokenizer.vocab} ids, special ids are {special}; the first two must be equal, and each "
            "id needs a row"
        )


def _check(folder: Path, card: dict[str, Any]) -> None:
    try:
        atomic.verify(folder, card["files"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{error}; the save was interrupted or the file was changed since") from None


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path}: not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected an object, found {type(content).__name__}")
    return content


def _weights(folder: Path) -> dict[str, Tensor]:
    path = folder / WEIGHTS
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path}: not a safetensors file: {error}") from None


def _fill(model: nn.Module, weights: Mapping[str, Tensor], path: Path) -> None:
    """Give the model its weights, all of them and no other. Raises ValueError with every difference."""
    expected = {name: tuple(p.shape) for name, p in model.state_dict().items()}
    found = {name: tuple(w.shape) for name, w in weights.items()}
    differences = [f"{n} is missing" for n in expected if n not in found]
    differences += [f"{n} is not a weight of this model" for n in found if n not in expected]
    differences += [f"{n} is {found[n]}, not {s}" for n, s in expected.items() if n in found and found[n] != s]
    if differences:
        raise ValueError(f"{path}: {'; '.join(differences)}")
    model.load_state_dict(dict(weights), assign=True)
