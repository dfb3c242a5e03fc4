"""Networks of any kind on disk: loading with the function that builds them, or loading weights alone."""

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dunes import tree
from dunes.checkpoint import architecture as architectures
from dunes.checkpoint.architecture import Architecture, Build, has_own_form
from dunes.checkpoint.card import CARD, read_card
from dunes.checkpoint.folder import (
    load_decoder,
    open_verified_source,
    read_consistently,
    readable_folder,
    verified_card,
    write_model,
)
from dunes.checkpoint.source import own_weights, tensors
from dunes.checkpoint.state_dict_diff import Difference, Prefix, summarize
from dunes.checkpoint.weights.lazy_tensor import Weights
from dunes.files.model_file import trust_cards


def is_network(folder: Path | str) -> bool:
    """True if a folder has a network that is no language model, by its card."""
    card = read_card(readable_folder(Path(folder)))
    return has_own_form(card) and card.get("context_length") is None


def load_network(
    folder: Path | str, build: Build | None = None, trust_code: bool = False, device: torch.device | str = "cpu"
) -> nn.Module:
    """The network in a folder that `save` wrote, in evaluation mode.

    `build` is the function that was passed to `save`; by default the function in the card is imported, from
    `dunes.models`, or with `trust_code` from any module. Raises ValueError as `load`.
    """

    def read(readable: Path) -> nn.Module:
        source = open_verified_source(readable_folder(readable), build=build)
        return load_decoder(source).to(device).eval()

    with trust_cards(trust_code):
        return read_consistently(Path(folder), read)


def save_weights(model: nn.Module, folder: Path | str, facts: Mapping[str, Any] | None = None) -> None:
    """Write the parameters and persistent buffers of any network, with a card.

    The card has digests of the files and of the network's structure, and `facts`. Raises ValueError for parameters
    without a shape or values, or of a dtype that safetensors does not support.
    """
    known, weights = architectures.describe_weights(tree.uncompiled(model))
    write_model(Path(folder), weights, None, {**(facts or {}), **known})


def load_weights(model: nn.Module, path: Path | str) -> dict[str, Any]:
    """Load weights from a folder of `save_weights` or `save`, or from one file; returns the card, {} for a file.

    Nothing is cast: call `tree.move(model, dtype=...)` first. Files are safetensors or pickles, read without
    executing anything. Raises ValueError, listing the differences and changing nothing, if a file differs from the
    card's digest, or if names, shapes, dtypes, ties or, with a card, classes and settings of modules differ.
    """
    model, path = tree.uncompiled(model), Path(path)
    tree.require_shapes(model)
    if not path.is_dir():
        if not path.is_file():
            raise ValueError(f"{path}: no such file or folder")
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
    anything, note = Architecture("", None, function=type(model)), ""
    if card:
        differences = architectures.compare_structure(model, anything, card, files, path)
    else:
        prefix = Prefix.of(files, model.state_dict())
        files, tied = _without_ties(model, prefix.without(files))
        note = prefix.note
        differences = list(architectures.tensor_differences(model, files, tied, anything))
        card = {"structure": {"tied": tied}}
    if differences:
        hint = "; for weights alone, load its model.safetensors"
        hint = hint if all(d.kind == "structure" for d in differences) else ""
        hint += f"; {note}" if note else ""
        raise ValueError(f"{path}: does not fit this {type(model).__name__}: {summarize(differences)}{hint}")
    state = model.state_dict()
    if note:
        warnings.warn(f"{path}: {note}", stacklevel=3)
    if lost := next((name for name, b in model.named_buffers() if b.is_meta and name not in state), None):
        raise ValueError(f"{lost} has no values, and no file has them: it is a buffer that is not persistent")
    architectures.fill(model, files, card)


def _without_ties(model: nn.Module, files: Weights) -> tuple[Weights, dict[str, str]]:
    """A file's tensors without copies of tied ones, and the names of ties. Raises ValueError if copies differ."""
    tied = architectures.tied_names(model)
    for name, first in tied.items():
        if name in files and first in files and not torch.equal(files[name].read(), files[first].read()):
            raise ValueError(str(Difference("tied", name, f"the same tensor as {first}", "a tensor of its own")))
    repeated = {name for name, first in tied.items() if first in files}
    return {name: tensor for name, tensor in files.items() if name not in repeated}, tied
