"""Measure the loss on text (nats/token, perplexity, bits/byte), and read the text for scores or calibration."""

# Shapes: B batch, T tokens.

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dunes import checkpoint, measure, tree
from dunes.checkpoint import LoadedModel
from dunes.checkpoint.trained_text import _trained_corpus, split_documents, trained_text
from dunes.context import prefix_errors
from dunes.data import Document, PackedText, TokenIds, collect_corpus, file_header
from dunes.data.batches import join_texts, tail_start
from dunes.data.duplicates import content_digest
from dunes.data.fim import find_headers
from dunes.flags import is_path
from dunes.measure import ranks
from dunes.progress import each
from dunes.text import Tokenizer
from dunes.train import IGNORE
from dunes.train.loss import next_token_loss
from dunes.units import plural

BATCH = 16
LONGEST_HEADER = 512
"""Number of tokens before a window in which the start of a file header is searched."""
FindHeaders = Callable[[NDArray[np.int64]], NDArray[np.bool_]]

SEQUENCES = 64
"""Default number of calibration sequences."""
CALIBRATION_TOKENS = 128
"""Maximum number of tokens in a calibration sequence."""


@dataclass(frozen=True)
class Score:
    """The summed loss (in nats) of `tokens` tokens, which are `size` bytes of raw text."""

    loss_sum: float
    tokens: int
    size: int

    unit: ClassVar[str] = " bits/byte"
    """Unit of `criterion`, preceded by a space."""

    @property
    def loss(self) -> float:
        """The loss in nats/token."""
        return self.loss_sum / self.tokens

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 700.0))

    @property
    def bits_per_byte(self) -> float:
        """The loss in bits per byte of text, comparable across tokenizers."""
        return self.loss_sum / math.log(2) / max(1, self.size)

    @property
    def criterion(self) -> float:
        """The value by which the best weights are selected; lower is better."""
        return self.bits_per_byte

    @property
    def facts(self) -> dict[str, float]:
        """The values for the model card."""
        return {name: getattr(self, name) for name in ("loss", "perplexity", "bits_per_byte", "tokens")}

    @property
    def record(self) -> dict[str, float]:
        """The values for metrics.jsonl."""
        return {"validation_loss": self.loss, "bits_per_byte": self.bits_per_byte}

    @property
    def text(self) -> str:
        """The values for the final report."""
        return f"{self.loss:.3f} nats/token, perplexity {self.perplexity:.1f}, {self.bits_per_byte:.3f} bits/byte"

    def compare(self, before: "Score") -> list[str]:
        """Lines of the report on a finetuned model; `before` is the base model's score on the answers."""
        lines = [f"validation loss of answers: {before.loss:.3f} nats/token before, {self.loss:.3f} after"]
        advice = "try a lower --lr, or check the examples"
        return lines + [f"warning: no better than the base model; {advice}"] * (not self.loss < before.loss)


def evaluate(
    loaded: LoadedModel, tokens: TokenIds, dtype: torch.dtype = torch.float32, limit: int | None = None
) -> Score:
    """Score the tokens in windows of the context length.

    Each token is predicted from the previous tokens of its window; in `PackedText`, tokens of other documents are
    not used. In a stream of files, headers are input to the model, but count neither in the loss nor in the size.

    With `limit`, only about `limit` tokens are scored, in windows spread evenly over the text. Raises ValueError
    for fewer than two tokens.
    """
    if len(tokens) < 2:
        raise ValueError(f"{plural(len(tokens), 'token')} cannot be scored; at least two are needed")
    context = loaded.context_length
    starts = np.arange(0, len(tokens) - 1, context)
    if limit is not None and limit < len(tokens):
        starts = starts[np.linspace(0, len(starts) - 1, max(1, limit // context)).astype(int)]
    chunks = each([starts[i : i + BATCH] for i in range(0, len(starts), BATCH)])
    headers = find_headers(loaded.require_tokenizer())
    return score_batches(loaded, (_rectangle(tokens, chunk, context, headers) for chunk in chunks), dtype)


def score_batches(loaded: LoadedModel, batches: Iterable[tuple[Tensor, ...]], dtype: torch.dtype) -> Score:
    """Score batches of ids, targets and optional positions (B, T) by `next_token_loss`."""
    loss_sum, count, size, model = 0.0, 0, 0, loaded.model
    width = np.array([len(piece) for piece in loaded.require_tokenizer().token_bytes], np.int64)
    with evaluation(model, dtype) as device:
        for batch in map(own_rows, batches):
            total, batch_count, _ = next_token_loss(model, [part.to(device) for part in batch])
            loss_sum, count = loss_sum + float(total), count + int(batch_count)
            targets = batch[1].numpy()
            size += int(width[targets[targets != IGNORE]].sum())
    loss_sum, *counts = ranks.all_reduce_sum(loss_sum, count, size)
    return Score(loss_sum, *map(int, counts))


@contextmanager
def evaluation(model: nn.Module, dtype: torch.dtype) -> Iterator[torch.device]:
    """Inside the `with` block, the model is in eval mode, under autocast to `dtype`; yields its device."""
    device = next(model.parameters()).device
    with torch.no_grad(), tree.mode(model, False), torch.autocast(device.type, dtype, dtype != torch.float32):
        yield device


def own_rows(batch: tuple[torch.Tensor, ...], group: int = 1) -> tuple[torch.Tensor, ...]:
    """The rows of this rank, in whole groups of `group` rows; if none are left, a group of IGNORE targets."""
    share = -(-len(batch[0]) // (group * ranks.count())) * group
    own = tuple(part[share * ranks.rank() :][:share] for part in batch)
    if len(own[0]):
        return own
    ids, targets, *positions = (part[:group] for part in batch)
    return ids, torch.full_like(targets, IGNORE), *positions


def _rectangle(tokens: TokenIds, starts: NDArray[Any], context: int, headers: FindHeaders) -> tuple[Tensor, ...]:
    """Ids, targets and, if packed, positions (B, T) of windows.

    Targets after the end of the text and targets in file headers are IGNORE.
    """
    index = starts[:, None] + np.arange(min(context, len(tokens) - 1) + 1)
    window = torch.from_numpy(tokens[np.minimum(index, len(tokens) - 1)].astype(np.int64))
    batch: tuple[Tensor, ...] = window[:, :-1], window[:, 1:]
    if isinstance(tokens, PackedText):
        batch = tokens.batch(window, index)
    ids, targets, *positions = batch
    # A header may start before the window.
    before = np.maximum(starts[:, None] + np.arange(-LONGEST_HEADER, 0), 0)
    longer = np.concatenate([tokens[before], window.numpy()], 1)
    ignored = (index[:, 1:] >= len(tokens)) | headers(longer)[:, LONGEST_HEADER + 1 :]
    return ids, targets.masked_fill(torch.from_numpy(ignored), IGNORE), *positions


def score_folder(
    folder: Path, sources: Sequence[str] = (), any_base: bool = False, **options: Any
) -> tuple[Score, int]:
    """The score on all text in the sources, and the number of files.

    Without sources, the validation split of the model's training is scored. `any_base` is passed to
    `checkpoint.load`, and `options` to `collect_corpus`. Raises ValueError if the model's card does not record its
    validation split, or if there is no text.
    """
    loaded = checkpoint.load_with_tokenizer(folder, measure.device(), any_base)
    with prefix_errors(folder):
        ids, files = evaluation_tokens(loaded, sources, **options)
    return evaluate(loaded, ids), files


def evaluation_tokens(loaded: LoadedModel, sources: Sequence[str] = (), **options: Any) -> tuple[TokenIds, int]:
    """Token ids of all text in the sources, and the number of files. Without sources, the text is the validation
    split recorded in the model's card. Raises ValueError if the card records no validation split."""
    tokenizer, trained = loaded.require_tokenizer(), trained_text(loaded.card)
    if sources:
        corpus = collect_corpus(sources, **options)  # all text, on either side of the split
        files = len({document.path for document in corpus.documents})  # a file of records is two documents
        return _ids(tokenizer, corpus.valid + corpus.train, "all", trained, 0), files
    corpus = split_documents(loaded.card, **options)
    tails = corpus.split == "tails"
    documents = corpus.train if tails else corpus.valid
    return _ids(tokenizer, documents, "tail" if tails else "all", trained, corpus.share), len(documents)


def calibration_ids(loaded: LoadedModel, sources: Sequence[str] = (), tokens: int | None = None) -> Tensor:
    """Calibration ids (sequences, tokens); the sequences are spread evenly over the documents.

    The result has SEQUENCES sequences or, if `tokens` is given, about `tokens` ids. A short text gives fewer
    sequences. Tails of documents are left out if they may be scored. Without sources, the text is the training
    split recorded in the model's card. Raises ValueError if this text is not recorded, is gone, or is shorter than
    one sequence.
    """
    trained = trained_text(loaded.card)
    width = min(CALIBRATION_TOKENS, loaded.context_length)
    sequences = SEQUENCES if tokens is None else -(-tokens // width)
    if not (sources or trained):
        raise ValueError("the model's card does not record its training text; pass one with --calibration FILE")
    if not sources and (missing := missing_source(loaded.card)):
        raise ValueError(f"the text of the model's training is gone ({missing}); pass one with --calibration FILE")
    corpus = collect_corpus(sources) if sources else _trained_corpus(trained)
    tails = not sources and trained.get("split") == "tails"
    documents = corpus.documents if tails else corpus.train or corpus.valid
    # The tails of documents named by the user may be scored.
    part: Literal["all", "head"] = "head" if sources or tails else "all"
    ids = np.asarray(_ids(loaded.require_tokenizer(), documents, part, {}, corpus.share))
    if (last := len(ids) - width) < 0:
        raise ValueError(f"the calibration text is too short: {plural(len(ids), 'token')}; pass more of it")
    starts = np.unique(np.linspace(0, last, min(sequences, 1 + last // width)).astype(int))
    return torch.from_numpy(np.stack([ids[start : start + width] for start in starts]).astype(np.int64))


def missing_source(card: Mapping[str, Any]) -> str:
    """The first training source in the card that no longer exists; empty if all exist."""
    sources = [s for s in trained_text(card).get("sources", ()) if is_path(s)]
    return next((source for source in sources if not os.path.exists(os.path.expanduser(source))), "")


def require_separate(loaded: LoadedModel, calibration: Sequence[str], validation: Sequence[str]) -> None:
    """Raise ValueError if a text of the calibration sources is also scored.

    Texts of files and records are compared without white space. If only the tail of each
    document is scored, the rest of the document may be used for calibration.
    """
    trained = trained_text(loaded.card)
    if not (calibration or validation) or (not validation and trained.get("split") != "files"):
        return
    scored = collect_corpus(validation) if validation else _trained_corpus(trained)
    calibrating = collect_corpus(calibration) if calibration else _trained_corpus(trained)
    digests = {content_digest(t) for d in (scored.documents if validation else scored.valid) for t in d.texts()}
    for document in calibrating.documents if calibration else calibrating.train:
        if any(content_digest(text) in digests for text in document.texts()):
            raise ValueError(
                f"{document.path}: used for both calibration and scoring; pass other text with "
                "--calibration or --validation"
            )


def _ids(
    tokenizer: Tokenizer,
    documents: Sequence[Document],
    part: Literal["all", "head", "tail"],
    trained: Mapping[str, Any],
    share: float,
) -> TokenIds:
    """Token ids of a part of each text: the whole text (`all`), its last fraction `share` (`tail`), or the text
    before the tail (`head`).

    Texts are joined as in the training that `trained` records, or as plain text if `trained` is empty.
    """
    begin, parts, separate = tokenizer.text_start, [], bool(trained.get("separate_documents"))
    headers = bool(trained.get("complete") and trained.get("file_headers", True))
    for document, text in ((d, text) for d in documents for text in d.texts()):
        header = file_header(document, tokenizer) if headers else []
        pieces = [np.array(ids, np.int32) for ids in tokenizer.encode_document(text)]
        ids = np.concatenate([np.array([*begin, *header], np.int32), *pieces, np.array([tokenizer.eos], np.int32)])
        tail = tail_start(0, len(ids), share)
        parts.append(ids if part == "all" else ids[tail:].copy() if part == "tail" else ids[:tail].copy())
    ids, starts = join_texts(parts or [np.array([], np.int32)])
    starts[1:] -= part == "all" and not begin
    return PackedText(ids, starts, tokenizer.eos) if separate else ids
