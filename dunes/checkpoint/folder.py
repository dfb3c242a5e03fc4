"""A model on disk: a Hugging Face model folder, with our card `dunes.json` beside it."""

import json
import os
import shutil
from collections.abc import Mapping
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
from dunes.models import FAMILIES, family_of
from dunes.models.names import from_theirs, to_theirs
from dunes.parts import Decoder
from dunes.text import END, Tokenizer

CARD = "dunes.json"
WEIGHTS = "model.safetensors"
FORMAT = 1


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

    Files that stand there already are replaced one by one, the card last; a card that does not match
    its files marks an interrupted save. Raises ValueError for a model that no family describes.
    """
    words = said(model, context)
    if isinstance(words, str):
        raise ValueError(f"this model cannot be said in Hugging Face's terms: {words}")
    folder = Path(folder)
    staged = folder / ".new"
    shutil.rmtree(staged, ignore_errors=True)
    staged.mkdir(parents=True)
    family = FAMILIES[words.family]
    weights = {k: v.detach().contiguous() for k, v in to_theirs(family.NAMES, model.state_dict()).items()}
    atomic.write_tensors(staged / WEIGHTS, weights)
    tokenizer.save(staged)
    for name, content in _beside(family.to_hf(words.config), tokenizer, context, weights).items():
        (staged / name).write_text(json.dumps(content, indent=2) + "\n")
    files = sorted(staged.iterdir())
    card = {
        "format": FORMAT,
        "dunes": __version__,
        "family": words.family,
        "context": context,
        "changes": [],
        "files": {f.name: {"size": f.stat().st_size, "sha256": atomic.digest(f)} for f in files},
        **(facts or {}),
    }
    (staged / CARD).write_text(json.dumps(card, indent=2) + "\n")
    for file in [*files, staged / CARD]:
        atomic.sync(file)
        os.replace(file, folder / file.name)
    staged.rmdir()
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
        "config.json": words | ids | {"dtype": dtype, "torch_dtype": dtype},
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
    config_file = folder / "config.json"
    if not config_file.is_file():
        raise ValueError(f"{config_file}: no such file; {folder} is not a model folder")
    hf, card = _json(config_file), _json(folder / CARD) if (folder / CARD).is_file() else {}
    if card:
        _check(folder, card)
    try:
        family = FAMILIES[family_of(hf)]
        config = family.from_hf(hf)
    except KeyError as key:
        raise ValueError(f"{config_file}: {key} is missing") from None
    with torch.device("meta"):
        model: Decoder = family.build(config)
    weights = from_theirs(family.NAMES, _weights(folder))
    _fill(model, weights, folder / WEIGHTS)
    tokenizer = Tokenizer.load(folder)
    rows = model.get_parameter("embed.token.weight").shape[0]
    if tokenizer.vocab > rows:
        raise ValueError(f"{folder}: the tokenizer has {tokenizer.vocab} ids, the model has embeddings for {rows}")
    return Loaded(model.to(device).eval(), tokenizer, config.context, card)


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
