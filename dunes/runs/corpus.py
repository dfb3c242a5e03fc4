"""From a config's sources to training and validation tokens."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import pairwise
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray

from dunes.checkpoint.files.atomic import write_file
from dunes.data import Corpus, Document, PackedText, Shard, TokenIds, collect_corpus, default_cache, token_shard
from dunes.runs.progress import Display
from dunes.runs.train_config import TrainConfig
from dunes.text import Tokenizer
from dunes.units import plural

SAMPLE = 2_000_000
"""Bytes of text that a tokenizer is trained on; more hardly changes it."""

TAIL = 0.1
"""Fraction of a text that is its validation split with --split tails."""


Side = tuple[TokenIds, NDArray[np.int64]]
"""Token ids, and the indices at which documents begin."""


@dataclass(frozen=True)
class Tokens:
    """Training and validation token ids of one tokenizer; `fingerprints` identify all three."""

    tokenizer: Tokenizer
    train: TokenIds
    valid: TokenIds
    fingerprints: dict[str, str]


def gather(config: TrainConfig) -> Corpus:
    """The config's documents. Raises ValueError if nothing is left to train or to validate on."""
    corpus = collect_corpus(config.sources, follow_links=config.follow_links, text_field=config.text_field)
    if config.split == "files" and not corpus.valid:
        raise ValueError(
            "no file is left for validation: the corpus is a single file; "
            "add files, or validate on the last tenth of each with --split tails"
        )
    if config.split == "files" or (config.split is None and corpus.valid):
        return corpus
    if config.split is None:
        corpus.notes.append(f"a single text: its last {TAIL:.0%} is used for validation")
    return replace(corpus, train=corpus.train + corpus.valid, valid=[], split="tails")


def tokenize(config: TrainConfig, corpus: Corpus, tokenizer: Tokenizer | None, display: Display) -> Tokens:
    """Tokenize the documents, with a tokenizer trained on them if none is given.

    Raises ValueError if there are too few tokens for one training window, or for validation.
    """
    tokenizer = tokenizer or _tokenizer(config, corpus.train, display)
    shards = [_shard(documents, tokenizer, display) for documents in (corpus.train, corpus.valid) if documents]
    # A document begins with its BOS, or the EOS of the one before it.
    before = 0 if tokenizer.text_start else 1
    whole: list[Side] = [(s.token_file, np.append(0, s.starts[1:] - before)) for s in shards]
    sides = _tails(shards[0]) if corpus.split == "tails" else whole
    separate = config.separate_documents
    train, valid = (PackedText(*side, tokenizer.eos) if separate else side[0] for side in sides)
    for side, tokens, minimum in (("train on", train, config.context_length + 1), ("validate on", valid, 2)):
        if len(tokens) < minimum:
            raise ValueError(
                f"{plural(len(tokens), 'token')} to {side}, at least {minimum} needed; "
                "add text, or reduce --context-length"
            )
    return Tokens(tokenizer, train, valid, _fingerprints(tokenizer, corpus))


def _tokenizer(config: TrainConfig, documents: Sequence[Document], display: Display) -> Tokenizer:
    """A tokenizer trained on the documents, or the cached one of an earlier run."""
    request = f"{config.tokenizer} {config.vocab_size} {SAMPLE} " + "".join(d.digest for d in documents)
    key = _digest(request.encode())
    folder = default_cache().parent / "tokenizers"
    for path in folder.glob(f"{key}-*.json"):
        if path.stem.endswith(_digest(text := path.read_bytes())):
            return Tokenizer(tokenizers.Tokenizer.from_str(text.decode()))
    display.detail(f"training a {config.tokenizer} tokenizer")
    trained = Tokenizer.train(config.tokenizer, _sample(documents, config), config.vocab_size)
    data = trained.json().encode()
    folder.mkdir(parents=True, exist_ok=True)
    write_file(folder / f"{key}-{_digest(data)}.json", data)
    return trained


def _digest(data: bytes) -> str:
    return blake2b(data, digest_size=16).hexdigest()


def _fingerprints(tokenizer: Tokenizer, corpus: Corpus) -> dict[str, str]:
    texts = {"the tokenizer": tokenizer.json()}
    texts["the training text"] = "".join(d.digest for d in corpus.train)
    texts["the validation text"] = "".join(d.digest for d in corpus.valid)
    return {name: _digest(text.encode()) for name, text in texts.items()}


def _sample(documents: Sequence[Document], config: TrainConfig) -> Iterator[str]:
    """About SAMPLE bytes of text from documents across the corpus; all text for characters."""
    total = sum(d.size for d in documents)
    stride = 1 if config.tokenizer == "chars" else max(1, total // SAMPLE)
    for document in documents[::stride]:
        left = SAMPLE
        for block in document.text():
            yield block
            left -= len(block)
            if left <= 0 and config.tokenizer != "chars":
                break


def _shard(documents: Sequence[Document], tokenizer: Tokenizer, display: Display) -> Shard:
    total, done = sum(d.size for d in documents), 0

    def report(size: int) -> None:
        nonlocal done
        done += size
        display.state("tokenizing", done / max(1, total))

    return token_shard(documents, tokenizer, progress=report)


def _tails(shard: Shard) -> list[Side]:
    """The texts without their last tenths, and the last tenths."""
    bounds = [*shard.starts.tolist(), shard.length]
    cuts = [(start, tail_start(start, stop), stop) for start, stop in pairwise(bounds)]
    return [join_texts([shard.tokens[cut[i] : cut[i + 1]] for cut in cuts]) for i in (0, 1)]


def join_texts(texts: Sequence[NDArray[Any]]) -> Side:
    """The ids of all texts, and the index at which each begins."""
    return np.concatenate(texts), np.cumsum([0, *map(len, texts[:-1])])


def tail_start(start: int, stop: int) -> int:
    """The index at which the last tenth of a text begins; its tokens, EOS included, are `start` to `stop`."""
    return stop - round((stop - start) * TAIL)
