"""Scoring a model folder on text."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dunes import checkpoint, measure
from dunes.data import collect
from dunes.runs.evaluate import Score, evaluate, widths


def score_folder(folder: Path, sources: Sequence[str] = ()) -> tuple[Score, int]:
    """The score on all text in the sources, and how many files that is.

    Without sources: on the files that the model's own training held out. Raises ValueError if the
    model's card does not say which these are, or if there is no text.
    """
    loaded = checkpoint.load(folder, measure.device())
    trained = loaded.card.get("trained", {})
    if not sources and trained.get("split") != "files":
        raise ValueError(f"{folder}: does not say which files were held out; name the sources to score")
    corpus = collect(sources or trained["sources"])
    documents = corpus.valid + corpus.train if sources else corpus.valid
    tokenizer, ids = loaded.tokenizer, list[int]()
    # Where a document begins after the end of the one before, that end is there already.
    begin = [i for i in tokenizer.begin if i != tokenizer.end]
    for document in documents:
        ids += [*begin, *(i for part in tokenizer.encode_document(document.text()) for i in part), tokenizer.end]
    return evaluate(loaded.model, np.array(ids), widths(tokenizer.pieces()), loaded.context), len(documents)
