"""Scoring a model folder on text."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dunes import checkpoint, measure
from dunes.data import Ids, collect
from dunes.runs.evaluate import Score, evaluate, widths
from dunes.text import Tokenizer


def score_folder(folder: Path, sources: Sequence[str] = ()) -> tuple[Score, int]:
    """The score on all text in the sources, and how many files that is.

    Without sources: on the files that the model's own training held out. Raises ValueError if the
    model's card does not say which these are, or if there is no text.
    """
    loaded, tokenizer = checkpoint.load_with_tokenizer(folder, measure.device())
    try:
        ids, files = held_out(tokenizer, loaded.card, sources)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from None
    return evaluate(loaded.model, ids, widths(tokenizer.pieces()), loaded.context), files


def held_out(tokenizer: Tokenizer, card: Mapping[str, Any], sources: Sequence[str] = ()) -> tuple[Ids, int]:
    """The ids of all text in the sources, and how many files that is; without sources, of the files that the
    training in the card held out. Raises ValueError if the card does not say which these are."""
    trained = card.get("trained", {})
    if not sources and trained.get("split") != "files":
        raise ValueError("does not say which files were held out; name the sources to score")
    corpus = collect(sources or trained["sources"])
    documents = corpus.valid + corpus.train if sources else corpus.valid
    ids = list[int]()
    # Where a document begins after the end of the one before, that end is there already.
    begin = [i for i in tokenizer.begin if i != tokenizer.end]
    for document in documents:
        ids += [*begin, *(i for part in tokenizer.encode_document(document.text()) for i in part), tokenizer.end]
    return np.array(ids), len(documents)
