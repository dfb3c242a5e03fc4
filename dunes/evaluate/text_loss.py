"""Evaluation on text: loss in nats/token, perplexity, bits/byte."""

# Shapes: B batch, T tokens.

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dunes import tree
from dunes.checkpoint import LoadedModel
from dunes.data import PackedText, TokenIds
from dunes.data.fim import find_headers
from dunes.measure import ranks
from dunes.train import IGNORE
from dunes.train.loss import next_token_loss
from dunes.units import plural

BATCH = 16
LONGEST_HEADER = 512
"""Number of tokens before a window in which the start of a file header is searched."""
FindHeaders = Callable[[NDArray[np.int64]], NDArray[np.bool_]]


@dataclass(frozen=True)
class Score:
    """The summed loss (in nats) of `tokens` tokens, which are `size` bytes of raw text."""

    loss_sum: float
    tokens: int
    size: int

    @property
    def loss(self) -> float:
        """The loss in nats/token."""
        return self.loss_sum / self.tokens

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 700.0))

    @property
    def bits_per_byte(self) -> float:
        """Compression of the text by this model, comparable across tokenizers."""
        return self.loss_sum / math.log(2) / max(1, self.size)


def evaluate(
    loaded: LoadedModel, tokens: TokenIds, dtype: torch.dtype = torch.float32, limit: int | None = None
) -> Score:
    """Score the tokens in windows of the context length; each token is predicted from the previous tokens of its
    window, and for `PackedText` of its document.

    In a stream of files, headers are read but not scored: their bytes count neither as loss nor as size, although
    the path of a file may help the model.

    A `limit` scores about this many tokens, in windows spread evenly over the text. Raises ValueError for fewer
    than two tokens.
    """
    if len(tokens) < 2:
        raise ValueError(f"{plural(len(tokens), 'token')} cannot be scored; at least two are needed")
    context = loaded.context_length
    starts = np.arange(0, len(tokens) - 1, context)
    if limit is not None and limit < len(tokens):
        starts = starts[np.linspace(0, len(starts) - 1, max(1, limit // context)).astype(int)]
    chunks = (starts[i : i + BATCH] for i in range(0, len(starts), BATCH))
    headers = find_headers(loaded.require_tokenizer())
    return score_batches(loaded, (_rectangle(tokens, chunk, context, headers) for chunk in chunks), dtype)


def score_batches(loaded: LoadedModel, batches: Iterable[tuple[torch.Tensor, ...]], dtype: torch.dtype) -> Score:
    """Score batches as in `next_token_loss`."""
    loss_sum, count, size, model = 0.0, 0, 0, loaded.model
    width = np.array([len(piece) for piece in loaded.require_tokenizer().token_bytes], np.int64)
    device = next(model.parameters()).device
    with torch.no_grad(), tree.mode(model, False), torch.autocast(device.type, dtype, dtype != torch.float32):
        for batch in map(_own_rows, batches):
            total, batch_count, _ = next_token_loss(model, [part.to(device) for part in batch])
            loss_sum, count = loss_sum + float(total), count + int(batch_count)
            targets = batch[1].numpy()
            size += int(width[targets[targets != IGNORE]].sum())
    loss_sum, *counts = ranks.total(loss_sum, count, size)
    return Score(loss_sum, *map(int, counts))


def _own_rows(batch: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """The rows of this rank; a row without targets if it has none, since all ranks call the model."""
    share = -(-len(batch[0]) // ranks.count())
    own = tuple(part[share * ranks.rank() :][:share] for part in batch)
    if len(own[0]):
        return own
    ids, targets, *positions = (part[:1] for part in batch)
    return ids, torch.full_like(targets, IGNORE), *positions


def _rectangle(
    tokens: TokenIds, starts: NDArray[Any], context: int, headers: FindHeaders
) -> tuple[torch.Tensor, ...]:
    """Ids, targets and, if packed, positions (B, T) of windows.

    Targets past the end of the text and in headers of files are ignored.
    """
    index = starts[:, None] + np.arange(min(context, len(tokens) - 1) + 1)
    window = torch.from_numpy(tokens[np.minimum(index, len(tokens) - 1)].astype(np.int64))
    batch: tuple[torch.Tensor, ...] = window[:, :-1], window[:, 1:]
    if isinstance(tokens, PackedText):
        batch = tokens.batch(window, index)
    ids, targets, *positions = batch
    # A header may start before the window.
    before = np.maximum(starts[:, None] + np.arange(-LONGEST_HEADER, 0), 0)
    longer = np.concatenate([tokens[before], window.numpy()], 1)
    ignored = (index[:, 1:] >= len(tokens)) | headers(longer)[:, LONGEST_HEADER + 1 :]
    return ids, targets.masked_fill(torch.from_numpy(ignored), IGNORE), *positions
