"""A model of characters that is trained well enough to rank methods on it, trained once and kept."""

from pathlib import Path

import pytest
from filelock import FileLock

from conftest import data, display
from dunes import checkpoint
from dunes.checkpoint import Architecture
from dunes.models import llama
from dunes.models.initialise import initialise
from dunes.runs.train import train
from dunes.runs.train_config import TrainConfig
from dunes.text import Tokenizer

SIZES = {"dim": 128, "depth": 4, "heads": 4, "kv_heads": 2, "head_dim": 32, "hidden": 384, "context_length": 128}


@pytest.fixture(scope="session")
def characters(pytestconfig: pytest.Config) -> Path:
    """The folder of a llama of 0.8M parameters with a validation loss below 1.52 nats on Shakespeare's characters.

    It takes three minutes, and is in pytest's cache afterwards.
    """
    text, cache = data("tinyshakespeare.txt"), pytestconfig.cache
    assert cache is not None
    folder = cache.mkdir("characters-1")
    with FileLock(folder / "lock"):
        if not (folder / "model" / "dunes.json").exists():
            _train(text, folder)
    return folder / "model"


def _train(text: Path, folder: Path) -> None:
    tokenizer = Tokenizer.train("chars", [text.read_text()])
    config = llama.Config(vocab=tokenizer.vocab, tied=True, **SIZES)
    model, start = initialise(llama.build(config), 0), folder / "start"
    checkpoint.save(model, start, tokenizer, 128, architecture=Architecture("llama", config, ()))
    settings = {"steps": 1000, "batch": 24, "context_length": 128, "lr": 0.02, "threads": 1}
    train(TrainConfig(sources=(str(text),), base=str(start), **settings), folder / "model", display()[0])
