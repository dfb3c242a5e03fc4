"""Workloads, and the models that they run: a model folder, or a shape (family and size) with random weights."""

import atexit
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from torch import nn

from dunes import checkpoint, measure
from dunes.checkpoint.open import is_adapter, tokenizer_folder
from dunes.models import FAMILIES
from dunes.models.initialise import initialise
from dunes.parts import Decoder
from dunes.runs.autosize import config_for
from dunes.runs.train_config import TrainConfig
from dunes.text import Tokenizer
from dunes.units import format_count

VOCAB = 4096
"""Vocabulary size of a shape, as in `dunes train`."""
CONTEXT = 256
"""Context length of a shape, as in `dunes train`."""


@dataclass(frozen=True)
class Work:
    """A workload to time: `run(setup())`. Only `run` is timed.

    `then` is called with the result of `run`. The time to first token is measured from the start of `run` until
    `then` returns.

    One run processes `amount` units; `unit` names them (tokens, bytes, ...). A run does `flops` floating-point
    operations and reads at least `bytes` bytes (0: unknown). `model` is the model that runs, if any.
    """

    run: Callable[[Any], object]
    amount: float
    unit: str = "tokens"
    setup: Callable[[], Any] = lambda: None
    flops: float = 0.0
    bytes: float = 0.0
    model: nn.Module | None = None
    then: Callable[[Any], object] | None = None
    form: str | None = None
    """Name of the implementation that is timed, if several exist; stored in the column `form` of the rows."""


@dataclass(frozen=True)
class Setting:
    """Settings of a measurement: batch size, sequence length, dtype of matrix products, number of threads.

    If `compile` is true, missing native code for decoding is compiled first.
    """

    batch: int
    context: int
    dtype: str
    threads: int
    compile: bool = False


@dataclass(frozen=True)
class Subject:
    """A model to measure: a folder, or a family with about `size` parameters.

    `outline()` builds the model with uninitialised weights; as fake or meta tensors, the weights take no memory.
    """

    name: str
    family: str
    context: int
    outline: Callable[[], Decoder] = field(repr=False)
    folder: Path | None = None
    size: int = 0

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The folder's tokenizer. Raises ValueError for a shape, which has no tokenizer."""
        if self.folder is None:
            raise ValueError(f"{self.name}: a shape has no tokenizer; pass a model folder")
        return Tokenizer.load(tokenizer_folder(self.folder))

    def model(self, dtype: str = "float32") -> Decoder:
        """A new copy of the model on this machine's device."""
        model = checkpoint.load(self.folder).model if self.folder else initialise(self.outline()).eval()
        return model.to(measure.device(), getattr(torch, dtype))

    @cached_property
    def saved_folder(self) -> Path:
        """The model's folder. A shape is first saved to a temporary folder, with random weights."""
        if self.folder is not None:
            return self.folder
        folder = scratch()
        checkpoint.save(self.model(), folder, Tokenizer.train("bytes", ()), self.context)
        return folder


def scratch() -> Path:
    """A new temporary folder, which is removed when the process ends."""
    path = Path(mkdtemp(prefix="dunes-bench-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


def of_folder(folder: Path) -> Subject:
    """The model in a folder. Raises ValueError if the folder contains no model."""
    # The architecture of a loaded adapter includes the adapter's changes to the base.
    model = checkpoint.load(folder) if is_adapter(folder) else checkpoint.describe(folder)
    return Subject(str(folder), model.architecture.family, model.context_length, model.architecture.build, folder)


def of_shape(family: str, size: int, context: int = CONTEXT) -> Subject:
    """A model of this family with about `size` parameters and random weights."""
    config = config_for(TrainConfig.of({"family": family, "size": str(size), "context_length": context}), VOCAB)
    name, outline = f"{family} {format_count(size)}", lambda: FAMILIES[family].build(config)
    return Subject(name, family, context, outline, size=size)
