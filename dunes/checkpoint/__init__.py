"""Folders on disk: models that other tools open too, and the states of runs."""

from dunes.checkpoint.folder import Loaded, load, save
from dunes.checkpoint.say import said
from dunes.checkpoint.state import latest, restore, store

__all__ = ["Loaded", "latest", "load", "restore", "said", "save", "store"]
