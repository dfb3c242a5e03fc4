"""Model folders in formats that other tools open, and training states of runs.

Start with `load`, `save`, `describe`, `load_adapter`, `save_adapter`, `convert.convert` and `export.export`. For
any network, use `save_weights` and `load_weights`; for a run's training state, `save_state` and `load_state`.
torch is imported when one of these names is first used; importing `checkpoint.formats` does not import torch.
"""

from typing import TYPE_CHECKING

from dunes.extra import attributes_of

if TYPE_CHECKING:
    from dunes.checkpoint.architecture import Architecture, hf_config_of
    from dunes.checkpoint.base_digests import base_identity
    from dunes.checkpoint.formats.adapter import load_adapter, save_adapter
    from dunes.checkpoint.open import (
        LoadedModel,
        describe,
        is_network,
        load,
        load_network,
        load_weights,
        load_with_tokenizer,
        locate_model,
    )
    from dunes.checkpoint.state import Snapshot, gathered, latest_state, load_state, save_state, snapshot
    from dunes.checkpoint.write import save, save_weights
    from dunes.files.model_file import cards_trusted, trust_cards

__all__ = [
    "Architecture", "LoadedModel", "Snapshot", "base_identity", "cards_trusted", "describe", "gathered",
    "hf_config_of", "is_network", "latest_state", "load", "load_adapter", "load_network", "load_state",
    "load_weights", "load_with_tokenizer", "locate_model", "save", "save_adapter", "save_state", "save_weights",
    "snapshot", "trust_cards",
]  # fmt: skip

if not TYPE_CHECKING:
    _FILES = ("open", "write", "architecture", "base_digests", "formats.adapter", "state")
    __getattr__ = attributes_of(__name__, _FILES, __all__)
