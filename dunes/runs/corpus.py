"""Read the text of a config's sources, and tokenize it for training and validation."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import pairwise
from typing import Any

import numpy as np

from dunes.checkpoint.trained_text import remember_sources
from dunes.data import (
    Corpus,
    Document,
    PackedText,
    Shard,
    TokenIds,
    code_size,
    collect_corpus,
    hold_out_test,
    missing_sentinels,
    token_shard,
)
from dunes.data.batches import Side, join_texts, tail_start
from dunes.data.fim import sentinels
from dunes.data.sources import without_files
from dunes.progress import Display, shown_by
from dunes.runs.train_config import OF_COMPLETION, VOCABULARY, TrainConfig
from dunes.text import Tokenizer
from dunes.units import format_bytes, plural

SAMPLE = 2_000_000
"""Bytes of text on which a tokenizer is trained; more text hardly changes the tokenizer."""

FEWEST = 5
"""Minimum number of validation files. If there are fewer and files are long, the tail of every file is used for
validation."""
LONG = 4_000
"""Files are long if their mean size is at least this many bytes."""
ENOUGH_CODE = 50_000
"""Minimum bytes of source code with which a run completes lines by default, if at most half of the text is
code."""
LEAST_CODE = 0.05
"""Minimum ratio of source code to other text (without documentation) with which such a run completes lines by
default."""
NO_LINES = "the model's tokenizer drops spaces or line ends, so it cannot write lines"
LITTLE = 20_000
"""Bytes of validation text below which a warning says that the validation loss is uncertain."""


@dataclass(frozen=True)
class Tokens:
    """A tokenizer, training token ids and validation token ids; `fingerprints` has digests of tokenizer and texts.

    `packages` are the installed packages whose code is in the text.
    """

    tokenizer: Tokenizer
    train: TokenIds
    valid: TokenIds
    fingerprints: dict[str, str]
    packages: Sequence[str] = ()


def gather(config: TrainConfig) -> Corpus:
    """The corpus of the config's sources. Raises ValueError if no text is left for training or for validation."""
    remember_sources(config.sources, config.follow_links)
    options: dict[str, Any] = {"follow_links": config.follow_links, "text_field": config.text_field}
    corpus = collect_corpus(config.sources, **options)
    if config.split == "files" and not corpus.valid:
        raise ValueError(
            "no file is left for validation: the corpus is a single file, or near-duplicates of one; "
            "add files, or validate on the end of each with --split tails"
        )
    corpus = _divided(config, corpus)
    size = corpus.share * corpus.size if corpus.split == "tails" else sum(d.size for d in corpus.valid)
    if size < LITTLE:
        reason = f"{format_bytes(size)} of text for validation say little about other text; add files"
        corpus.notes.append(f"warning: {reason}")
    return corpus


def _divided(config: TrainConfig, corpus: Corpus) -> Corpus:
    """The corpus, divided into training and validation files. With --split tails, or with few files, the tail of
    every file is for validation instead."""
    few_files = len(corpus.valid) < FEWEST and all(d.header for d in corpus.valid)
    few_files = few_files and corpus.size >= LONG * len(corpus.documents)
    if config.split == "files" or (config.split is None and corpus.valid and not few_files):
        return corpus
    if config.split is None:
        reason = "few files" if corpus.valid else "a single text, or near-duplicates of one"
        corpus.notes.append(f"{reason}: the last {corpus.share:.0%} of each is for validation")
    return without_files(corpus)


def with_test_files(config: TrainConfig, corpus: Corpus) -> Corpus:
    """The corpus; for a completion run with --split files, some files are set aside for testing."""
    hold_out = config.complete and corpus.split == "files"
    return hold_out_test(corpus) if hold_out else corpus


def choose_completion(
    config: TrainConfig, corpus: Corpus, base: Tokenizer | None, trains: bool = True
) -> tuple[TrainConfig, str]:
    """The config with `complete` chosen, and a line with the reason. `base` is the tokenizer of the model of
    --from.

    If `base` lacks the fill-in-the-middle tokens, `fim_rate` becomes 0, and files get no headers.

    Raises ValueError for --complete if `base` drops spaces or line ends. Also raises ValueError if completion is
    off and one of its options is set, and if --fim-rate is set for a `base` without fill-in-the-middle tokens.
    """
    asked = config.complete is not None
    chosen, reason = (bool(config.complete), "as asked") if asked else _suits_completion(config, corpus, base)
    if chosen and base is not None and not base.writes_lines:
        chosen, reason = False, NO_LINES
        if asked:
            raise ValueError(f"--complete: {reason}; omit it")
    if not chosen:
        config.refuse_unused(OF_COMPLETION, f"completion is off ({reason}); pass --complete, or omit it")
        return replace(config, complete=False), f"completion of lines: off, {reason}"
    windows = f"{config.fim_rate:.0%} of windows are cut into prefix, suffix and middle"
    context = windows if trains else "from the text above and below"
    if base is not None and (missing := missing_sentinels(base)):
        if config.fim_rate and "fim_rate" in config.changed():
            sentinels(base)  # raises
        config = replace(config, fim_rate=0.0, file_headers=False)
        context = f"only from the text above, as the model's tokenizer has no {missing[0]}"
    return replace(config, complete=True), f"completion of lines: on, {reason}; {context}"


def _suits_completion(config: TrainConfig, corpus: Corpus, base: Tokenizer | None) -> tuple[bool, str]:
    """Returns True if the model completes lines by default, and the reason."""
    code, other = code_size(corpus.documents)
    size = f"{format_bytes(code)} of {format_bytes(corpus.size)} of text are source code"
    if code <= corpus.size / 2 and not (code >= ENOUGH_CODE and code > LEAST_CODE * other):
        return False, f"{size} (--complete turns it on)"
    if base is None and config.tokenizer != "bpe":
        return False, f"since --tokenizer is {config.tokenizer} (--complete turns it on)"
    return True, f"{size} (--no-complete turns it off)"


def tokenize(config: TrainConfig, corpus: Corpus, tokenizer: Tokenizer | None, display: Display) -> Tokens:
    """Tokenize the documents; if `tokenizer` is None, first train a tokenizer on the documents.

    Raises ValueError if the tokens are too few for one training window, or for validation.
    """
    headers = config.with_headers
    if tokenizer is None:
        display.detail(f"training a {config.tokenizer} tokenizer")
        tokenizer = Tokenizer.train(
            config.tokenizer, _sample(corpus.train, config), config.vocab_size or VOCABULARY
        )
    sides_documents = [documents for documents in (corpus.train, corpus.valid) if documents]
    with shown_by(display.state):
        shards = [token_shard(documents, tokenizer, headers=headers) for documents in sides_documents]
    # A document begins with its BOS, or with the EOS of the previous document.
    before = 0 if tokenizer.text_start else 1
    sides: list[Side] = [(s.token_file, np.append(0, s.starts[1:] - before)) for s in shards]
    if corpus.split == "tails":
        sides = _tails(shards[0], corpus.share)
    separate = config.separate_documents
    train, valid = (PackedText(*side, tokenizer.eos) if separate else side[0] for side in sides)
    for side, tokens, minimum in (("train on", train, config.context_length + 1), ("validate on", valid, 2)):
        if len(tokens) < minimum:
            raise ValueError(
                f"{plural(len(tokens), 'token')} to {side}, at least {minimum} needed; "
                "add text, or reduce --context-length"
            )
    return Tokens(tokenizer, train, valid, _fingerprints(tokenizer, corpus), corpus.packages)


def _fingerprints(tokenizer: Tokenizer, corpus: Corpus) -> dict[str, str]:
    texts = {"the tokenizer": tokenizer.json()}
    texts["the training text"] = "".join(d.digest for d in corpus.train)
    texts["the validation text"] = "".join(d.digest for d in corpus.valid)
    if corpus.test:
        texts["the test text"] = "".join(d.digest for d in corpus.test)
    return {name: blake2b(text.encode(), digest_size=16).hexdigest() for name, text in texts.items()}


def _sample(documents: Sequence[Document], config: TrainConfig) -> Iterator[str]:
    """Yields about SAMPLE bytes of text from all over the corpus; for a `chars` tokenizer, yields all text."""
    total = sum(d.size for d in documents)
    stride = 1 if config.tokenizer == "chars" else max(1, total // SAMPLE)
    for document in documents[::stride]:
        left = SAMPLE
        if config.tokenizer == "chars" and config.with_headers:
            yield document.header
        for block in document.text():
            yield block
            left -= len(block)
            if left <= 0 and config.tokenizer != "chars":
                break


def _tails(shard: Shard, share: float) -> list[Side]:
    """Two pairs (token ids, document starts): the texts without their tails, and the tails."""
    bounds = [*shard.starts.tolist(), shard.length]
    cuts = [(start, tail_start(start, stop, share), stop) for start, stop in pairwise(bounds)]
    return [join_texts([shard.tokens[cut[i] : cut[i + 1]] for cut in cuts]) for i in (0, 1)]
