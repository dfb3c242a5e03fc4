"""What a run prepares for completion: the index at its beginning, and at its end the gate and the thresholds."""

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from dunes.checkpoint import LoadedModel
from dunes.data import Document
from dunes.generate.copying import Gate
from dunes.runs.completion import CompletionEngine
from dunes.runs.completion_cuts import file_lines, sample_lines
from dunes.runs.completion_gate import fit_gate, places_of
from dunes.runs.completion_index import TextIndex, index_documents
from dunes.runs.completion_keystrokes import FileSuggestions, TypedFile, fit_threshold
from dunes.runs.completion_score import POLICIES
from dunes.runs.completion_sources import document_texts
from dunes.runs.completion_store import write_gate, write_index
from dunes.runs.completion_text import FileTokenizer
from dunes.text import Tokenizer

PLACES_PER_SECOND, MOST_PLACES, LEAST_PLACES = 20, 20_000, 2_000
"""Places that the gate is fitted on, by the seconds of the run."""
LINES_PER_SECOND, MOST_LINES, LEAST_LINES = 0.1, 120, 20
"""Lines that are typed to fit the thresholds."""


def prepare_completion(run: Path, documents: Sequence[Document], tokenizer: Tokenizer, header: bool) -> TextIndex:
    """Write the index of the training files, so that they can be copied from while the model learns."""
    index = index_documents(documents, FileTokenizer(tokenizer, header))
    write_index(run, index)
    return index


def finish_completion(
    run: Path, loaded: LoadedModel, index: TextIndex, gate_documents: Sequence[Document], seconds: float
) -> dict[str, Any]:
    """Fit the gate, then the thresholds, on files that neither the model nor the index has, and write both.

    `seconds` is the time of the run, of which this takes a few percent. Returns the bits/character before and after
    mixing.
    """
    engine = CompletionEngine(loaded, index, header=has_header(loaded))
    texts = [(d.header.rstrip("\n"), text) for d, (_, text) in zip(gate_documents, document_texts(gate_documents), strict=True)]
    most = int(min(MOST_PLACES, max(LEAST_PLACES, PLACES_PER_SECOND * seconds)))
    engine.gate, facts = fit(engine, texts, most)
    lines = int(min(MOST_LINES, max(LEAST_LINES, LINES_PER_SECOND * seconds)))
    typed = typed_files(engine, texts, lines)
    facts["thresholds"] = {policy: _finite(fit_threshold(typed, policy)) for policy in POLICIES}
    write_gate(run, engine.gate, facts)
    return facts
