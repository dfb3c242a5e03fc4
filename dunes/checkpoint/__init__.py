"""Folders on disk: models that other tools open too, and the states of runs."""

from dunes.checkpoint.adapter import load_adapter, save_adapter
from dunes.checkpoint.base import identity
from dunes.checkpoint.folder import LoadedModel, save
from dunes.checkpoint.hub import local
from dunes.checkpoint.opening import described, load, load_with_tokenizer
from dunes.checkpoint.say import said
from dunes.checkpoint.state import Snapshot, latest, restore, snapshot, store

__all__ = [
    "LoadedModel",
    "Snapshot",
    "described",
    "identity",
    "latest",
    "load",
    "load_adapter",
    "load_with_tokenizer",
    "local",
    "restore",
    "said",
    "save",
    "save_adapter",
    "snapshot",
    "store",
]
