"""The completer of a folder: of a trained model, or while a run still trains, copying alone."""

import sysconfig
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from dunes import checkpoint, measure
from dunes.checkpoint.forms.card import read_card
from dunes.data import Document, header_name
from dunes.generate.copying import TextSource, line_at
from dunes.runs.completion import CompletionEngine, knows_paths
from dunes.runs.completion_cuts import first_line
from dunes.runs.completion_index import TextIndex
from dunes.runs.completion_keystrokes import Policy
from dunes.runs.completion_protocol import Suggestion
from dunes.runs.completion_store import read_gate, read_index
from dunes.runs.completion_text import near_text, without_overlap
from dunes.runs.config import STDLIB
from dunes.runs.run import read_config
from dunes.runs.score import split_documents, trained_text
from dunes.runs.step_package import step_source
from dunes.runs.train_config import TrainConfig


class FolderCompleter(CompletionEngine):
    """The completer of a model folder, with what its training left for the evaluation."""

    def __init__(self, folder: Path, any_base: bool = False) -> None:
        loaded = checkpoint.load_with_tokenizer(folder, measure.device(), any_base)
        index, stored = read_index(folder), read_gate(folder)
        self.folder, self.facts = folder, stored[1] if stored else {}
        gate = stored[0] if stored and index else None
        super().__init__(loaded, index, gate, knows_paths(loaded), step_source(loaded.model))

    @cached_property
    def training_files(self) -> list[tuple[str, str]]:
        """The files in the index."""
        return self.index.texts() if self.index else []

    def threshold(self, policy: Policy) -> float:
        """The probability from which on a suggestion is shown; 0 where none was fitted."""
        thresholds: Any = self.facts.get("thresholds", {})
        return float(thresholds.get(policy, 0.0))

    def test_documents(self) -> list[Document]:
        """The files that the training left for a test. Raises ValueError if it left none."""
        if documents := split_documents(self.loaded.card).test:
            return documents
        raise ValueError(f"{self.folder}: its training left no files for a test; pass files to complete")


class CopyCompleter:
    """Copies the rest of the line behind the longest match, in the file or in an index: there is no model yet."""

    def __init__(self, index: TextIndex) -> None:
        self.index = index

    def complete(self, before: str, after: str = "", name: str = "") -> Suggestion:
        """The rest of the line; both probabilities only order suggestions."""
        context, far = near_text(before).encode(), self.index.without([name])
        sources = [TextSource(context), TextSource(after.encode()), *far.texts]
        matches = [(source.longest(context), source.text) for source in sources]
        (length, positions), text = max(matches, key=lambda match: match[0][0])
        if not length:
            return Suggestion("", 0.0, 0.0)
        line = first_line(line_at(text, positions[0], 1000).decode(errors="ignore"))
        probability = length / (length + 32)
        return Suggestion(without_overlap(line, after), probability, probability)


def name_in_sources(path: Path, folder: Path) -> str:
    """The path of a file as the training of this model named it: within the source that has the file."""
    for source in _sources(folder):
        root = Path(sysconfig.get_path("stdlib") if source == STDLIB else source).expanduser().resolve()
        if path.resolve().is_relative_to(root) and root.is_dir():
            return header_name(path.resolve().relative_to(root).as_posix())
    return header_name(path.name)


def _sources(folder: Path) -> Sequence[str]:
    """The sources of a model's training, or of a run that has no model yet."""
    if card := read_card(folder):
        return list(trained_text(card).get("sources", ()))
    with suppress(ValueError):  # of a run of another kind
        return config.sources if (config := read_config(folder, TrainConfig)) else ()
    return ()


def load_completer(folder: Path, any_base: bool = False) -> FolderCompleter:
    """The completer of a model folder. Raises ValueError for an invalid folder, or one without a tokenizer."""
    return FolderCompleter(folder, any_base)


def find_completer(
    folder: Path, line: Callable[[str], object], any_base: bool = False
) -> FolderCompleter | CopyCompleter:
    """The completer of a model folder, or of a run that has no model yet; `line` is told of that."""
    if not (folder / "config.json").exists() and (index := read_index(folder)) is not None:
        line("the model is still in training: copying from the training files alone")
        return CopyCompleter(index)
    return load_completer(folder, any_base)
