"""Copying: a trained gate mixes a language model with ids that followed earlier occurrences of the context.

Texts are searched as ids and as bytes. The ids after the longest match of ids and the ids after shorter matches
are blended as in prediction by partial matching (PPM). After each match, every distinct id adds one pseudocount;
the sum of these pseudocounts is shared among the ids in proportion to the blend of the shorter matches. Matches of
bytes do not depend on token boundaries. The first ids of the lines after the longest match of bytes are
candidates, too. A gate then changes the log-probabilities of all candidates and of the model's most probable ids,
and the result is normalised. The gate's features are match lengths, the probabilities under the sources and the
model, and, for each id, its frequency and recency in the file and its characters.
https://doi.org/10.1109/TCOM.1984.1096090 (PPM), https://arxiv.org/abs/2401.17377 (matches of any length)
"""

# Shapes: C candidates, F features, V vocabulary, N positions.

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dunes.generate.context_index import ContextIndex, last_match

LENGTHS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24)
"""Lengths, in ids, of the shorter matches that are blended with the longest match."""
FOLLOWERS = 256
"""Of a match of ids, fewer than twice this many occurrences are read, evenly spaced in the index."""
CANDIDATES = 16
"""Maximum number of ids that a source proposes."""
TOP = 24
"""Number of the model's most probable ids that become candidates."""
DEPTH_BYTES = 64
"""Maximum length of a match of bytes."""
CONTEXT_IDS = 48
"""The bytes of at most this many ids, at the end of a text, are searched for."""
CONTINUATIONS = 8
"""Of a match of bytes, fewer than twice this many occurrences are read, evenly spaced in the index."""
AHEAD = 24
"""Maximum number of bytes after a match that are encoded into ids."""
LINE = 120
"""Maximum length of a proposed line in bytes."""
LEAST = 1e-4
"""Constant that is added to a probability before taking its logarithm."""
COLUMNS = ("prob", "share", "match", "length", "places")
"""Names of the features from one source."""


class Followers(NamedTuple):
    """Ids (C,), int64, that followed a context in one source.

    `probs` (C,) are the blended probabilities of the ids, with a sum of at most 1. `shares` (C,) are the relative
    frequencies of the ids after the longest match. The longest match has `length` items (ids or bytes) and occurs
    at `places` positions.
    """

    ids: NDArray[np.int64]
    probs: NDArray[np.float64]
    shares: NDArray[np.float64]
    length: int
    places: int


NONE = Followers(np.zeros(0, np.int64), np.zeros(0), np.zeros(0), 0, 0)


class Candidates(NamedTuple):
    """Proposed ids (C,), int64, ascending, and their features (C, F), float32."""

    ids: Tensor
    features: Tensor


class TextSource(NamedTuple):
    """A text with optional indexes of its bytes (`contexts`) and of its `ids`. Without `contexts`, `last_match`
    searches the bytes."""

    text: bytes
    contexts: ContextIndex | None = None
    ids: ContextIndex | None = None

    def longest(self, context: bytes) -> tuple[int, list[int]]:
        """Length of the longest suffix of `context` that occurs, and the positions after it, highest first."""
        if self.contexts is None:
            length, position = last_match(self.text, context)
            return length, [position] if length else []
        if not (matches := self.contexts.matches(context)):
            return 0, []
        positions = self.contexts.positions(matches[-1], CONTINUATIONS)
        return matches[-1].length, sorted(positions.tolist(), reverse=True)


@dataclass(frozen=True)
class Vocabulary:
    """The bytes of each id (`pieces`), and a function that encodes bytes into ids (`encode`)."""

    pieces: Sequence[bytes]
    encode: Callable[[bytes], Sequence[int]]

    NAMES: ClassVar = ("indented", "newline", "word first", "word last", "digit", "blank", "opens", "length")

    @cached_property
    def kinds(self) -> NDArray[np.float32]:
        """Features (V, 8) of each id's text, named as in NAMES."""
        texts = [piece.strip() for piece in self.pieces]
        firsts, inner = ([part[:1] or b"\0" for part in parts] for parts in (self.pieces, texts))
        first, start, last = (
            np.frombuffer(b"".join(ends), np.uint8)
            for ends in (firsts, inner, [piece[-1:] or b"\0" for piece in self.pieces])
        )
        word = np.array([is_word(bytes([byte])) for byte in range(256)])
        columns = (
            np.isin(first, [*b" \t"]),
            [b"\n" in piece for piece in self.pieces],
            word[start],
            word[last],
            np.isin(start, [*b"0123456789"]),
            [not text for text in texts],
            np.isin(last, [*b"([{"]),
            np.log2([1 + len(piece) for piece in self.pieces]),
        )
        return np.stack(columns, 1).astype(np.float32)


def is_word(character: bytes) -> bool:
    """True if this byte is a part of an identifier; False for an empty string."""
    return character.isalnum() or character == b"_" or character >= b"\x80"


@dataclass(frozen=True)
class Sources:
    """Texts to copy from: `near` are the text above the cursor and the rest of the file, `far` are other files."""

    near: Sequence[TextSource]
    far: Sequence[TextSource]
    vocabulary: Vocabulary

    NAMES: ClassVar = ("count", "distance", "above")

    @cached_property
    def uses(self) -> NDArray[np.float32]:
        """Features (V, 3) of each id's use in the file, each as `log2(1 + x)`, named as in NAMES.

        `count` is the number of the id's occurrences. `distance` is the number of ids from the id's last
        occurrence above the cursor to the cursor; without an occurrence, `distance` equals `above`. `above` is the
        number of ids above the cursor.
        """
        size = len(self.vocabulary.pieces)
        uses = np.zeros((size, len(self.NAMES)), np.float32)
        near = [source.ids.items for source in self.near if source.ids is not None]
        for items in near:
            uses[:, 0] += np.bincount(items, minlength=size)[:size]
        above = near[0] if near else np.zeros(0, np.uint16)
        places = np.zeros(max(size, int(above.max(initial=0)) + 1), np.int64)
        places[above] = np.arange(len(above))  # a repeated id gets its last place
        uses[:, 1], uses[:, 2] = len(above) - places[:size], len(above)
        return np.log2(1 + uses)


@dataclass(frozen=True)
class Copies:
    """Proposes ids to append to the ids of a text.

    `typed` are the bytes that the user typed after the first `start` ids. As long as later ids cover only a part
    of `typed`, a proposed line begins with the other part.
    """

    sources: Sources
    typed: bytes = b""
    start: int = 0

    # For lines, "share" is 1 for the first id of the last matched line, else 0; "prob" is no feature.
    NAMES: ClassVar = (
        *(f"{part} {column}" for part in ("near ids", "far ids") for column in COLUMNS),
        *(f"{part} {column}" for part in ("near lines", "far lines") for column in COLUMNS[1:]),
        *Sources.NAMES,
        *Vocabulary.NAMES,
    )
    FEATURES: ClassVar[int] = len(NAMES)

    def candidates(self, ids: Sequence[int], top: Sequence[int] = ()) -> Candidates:
        """Candidates for the next id: ids from all sources, and `top`, the model's most probable ids."""
        sources, rest = self.sources, self.uncovered(ids)
        context = self._context(ids, rest)
        parts = sources.near, sources.far
        by_part = ([followers(source.ids, ids) for source in part if source.ids is not None] for part in parts)
        by_source = [max(part, key=lambda source: source.length, default=NONE) for part in by_part]
        by_source += [self._lines(part, context, rest) for part in parts]
        union = np.unique(np.concatenate([np.array(top, np.int64), *(source.ids for source in by_source)]))
        columns = [column for source in by_source for column in _columns(source, union)]
        rows = union.clip(max=len(sources.vocabulary.pieces) - 1)
        of_sources = np.stack([*columns[:10], *columns[11:15], *columns[16:]], 1).astype(np.float32)
        features = np.concatenate([of_sources, sources.uses[rows], sources.vocabulary.kinds[rows]], 1)
        return Candidates(torch.from_numpy(union), torch.from_numpy(features))

    def propose(self, ids: Sequence[int], limit: int) -> Sequence[int]:
        """Up to `limit` ids of the rest of the line after the longest match. If several matches are equally long,
        the last match in the first source is used."""
        sources, rest = self.sources, self.uncovered(ids)
        context = self._context(ids, rest)
        length, positions, text = longest_match((*sources.near, *sources.far), context)
        return sources.vocabulary.encode(rest + line_at(text, positions[0], LINE))[:limit] if length else ()

    def uncovered(self, ids: Sequence[int]) -> bytes:
        """The end of `typed`, without the bytes that `ids[start:]` already cover."""
        pieces = self.sources.vocabulary.pieces
        covered = sum(len(pieces[i]) for i in ids[self.start :][: len(self.typed)]) if self.typed else 0
        return self.typed[covered:]

    def _context(self, ids: Sequence[int], rest: bytes) -> bytes:
        """The text after its last sentinel (an id without bytes), then `rest`; only the last DEPTH_BYTES bytes."""
        pieces = self.sources.vocabulary.pieces
        parts = [*takewhile(len, (pieces[i] for i in reversed(ids[-CONTEXT_IDS:])))]
        return (b"".join(reversed(parts)) + rest)[-DEPTH_BYTES:]

    def _lines(self, part: Sequence[TextSource], context: bytes, rest: bytes) -> Followers:
        """The first ids of the lines after the longest match, with the frequencies of these ids."""
        length, positions, text = longest_match(part, context)
        if length <= len(rest):
            return NONE
        lines = [line_at(text, position, AHEAD) for position in positions]
        first_ids = [encoded[0] for line in lines if (encoded := self.sources.vocabulary.encode(rest + line))]
        ids, counts = np.unique(np.array(first_ids, np.int64), return_counts=True)
        last = (ids == first_ids[0]).astype(float) if first_ids else np.zeros(0)
        return Followers(ids, counts / max(1, len(first_ids)), last, length, len(positions))


def longest_match(sources: Sequence[TextSource], context: bytes) -> tuple[int, list[int], bytes]:
    """The longest suffix of `context` that occurs in a source: its length, the positions after it, and the
    source's text. Among equally long matches, the first source wins."""
    matches = ((*source.longest(context), source.text) for source in sources)
    return max(matches, key=lambda match: match[0], default=(0, [], b""))


def line_at(text: bytes, position: int, size: int) -> bytes:
    """The rest of the line from `position` on, with the line end; at most `size` bytes, and never beyond the
    file's end."""
    line = text[position : position + size].partition(b"\0")[0]
    end = line.find(b"\n")
    return line if end < 0 else line[: end + 1]


def index_ids(ids: Sequence[int], vocab: int) -> ContextIndex:
    """The context index of a text's ids, all below `vocab`."""
    return ContextIndex(np.array(ids, np.uint16 if vocab <= 1 << 16 else np.uint32))


def followers(index: ContextIndex, context: Sequence[int]) -> Followers:
    """The ids that followed this context in an index, with the probabilities of these ids."""
    if not (matches := index.matches(context, LENGTHS)):
        return NONE
    *shorter, longest = matches
    places = longest.last - longest.first
    levels = [match for match in shorter if match.last - match.first > places]
    next_ids = [index.items[index.positions(m, FOLLOWERS)] for m in [*levels, longest]]
    ids, place = np.unique(np.concatenate(next_ids), return_inverse=True)
    level = np.repeat(np.arange(len(next_ids)), [len(items) for items in next_ids])
    counts = np.bincount(level * len(ids) + place, minlength=len(next_ids) * len(ids)).reshape(-1, len(ids))
    sums, distinct = counts.sum(1), (counts > 0).sum(1)
    probs, shares = np.zeros(len(ids)), counts[-1] / sums[-1]
    for level_counts, n, k in zip(counts, sums, distinct, strict=True):
        probs = (probs * k + level_counts) / (n + k)
    best = np.argsort(-probs, kind="stable")[:CANDIDATES]
    return Followers(ids[best].astype(np.int64), probs[best], shares[best], longest.length, places)


def _columns(source: Followers, ids: NDArray[np.int64]) -> list[NDArray[np.float64]]:
    """Features of these ids from one source, named as in COLUMNS."""
    probs, shares, mask = np.zeros(len(ids)), np.zeros(len(ids)), np.zeros(len(ids))
    place = np.searchsorted(ids, source.ids)
    probs[place], shares[place], mask[place] = source.probs, source.shares, 1.0
    length = np.full(len(ids), np.log2(1 + source.length))
    return [np.log(probs + LEAST), shares, mask, length, np.full(len(ids), np.log2(1 + source.places))]


class Gate(nn.Module):
    """Two layers that compute, from a candidate's features and the model's log-probabilities, a change of its
    log-probability.

    INPUTS are the names of the input features of the layer `up`.
    """

    INPUTS: ClassVar = (*Copies.NAMES, "logprob", "best logprob")

    def __init__(self, hidden: int = 24) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(len(self.INPUTS), hidden), nn.Linear(hidden, 1)

    def forward(self, features: Tensor, logprobs: Tensor, best: Tensor) -> Tensor:
        """The change (..., C) of each candidate's log-probability, for features (..., C, F), `logprobs` (..., C)
        under the model and the model's highest log-probability `best` (...)."""
        own = torch.stack([logprobs, best[..., None].expand_as(logprobs)], -1).clamp(min=-15)
        x: Tensor = self.down(torch.tanh(self.up(torch.cat([features, own], -1))))
        return x[..., 0]

    def scale(self, factor: float) -> None:
        """Multiply the gate's output by a factor; with factor 0, the mixture equals the model's distribution."""
        with torch.no_grad():
            for parameter in self.down.parameters():
                parameter.mul_(factor)

    def mix(self, copies: Copies, logprobs: Tensor, ids: Sequence[int], allowed: Tensor | None = None) -> Tensor:
        """Log-probabilities (V,) of the mixture, from the model's log-probabilities (V,) after these ids.

        With a mask `allowed` (V,), bool, the most probable allowed ids become additional candidates.
        """
        top = top_ids(logprobs)
        if allowed is not None:
            top += top_ids(logprobs.masked_fill(~allowed, -math.inf))
        return self.change(copies.candidates(ids, top), logprobs)

    def change(self, candidates: Candidates, logprobs: Tensor) -> Tensor:
        """Log-probabilities (V,) of the mixture; without candidates, the model's `logprobs` (V,) unchanged."""
        count = int(torch.searchsorted(candidates.ids, len(logprobs)))
        if not count:
            return logprobs
        ids, mixed = candidates.ids[:count], logprobs.clone()
        mixed[ids] += self(candidates.features[:count], logprobs[ids], logprobs.amax())
        return mixed.log_softmax(-1)


def top_ids(logprobs: Tensor) -> list[int]:
    """Up to TOP ids with the highest log-probabilities in `logprobs` (V,)."""
    best = logprobs.topk(min(TOP, len(logprobs)))
    return best.indices[best.values > -math.inf].tolist()


def mixture_loss(
    change: Tensor, logprobs: Tensor, target: Tensor, mask: Tensor, target_logprob: Tensor, rest_logprob: Tensor
) -> Tensor:
    """Negative log-likelihood (N,) of the targets under the mixture, in nats.

    For each candidate, `change` (N, C) is the gate's change, and `logprobs` (N, C) is the log-probability under
    the model. `mask` (N, C) is False for padding. `target` (N,) is the target's index among the candidates, or -1;
    `target_logprob` (N,) is the target's log-probability under the model. `rest_logprob` (N,) is the log of the
    total probability of the ids that are no candidates; 1 minus the candidates' total would be inexact.
    """
    # Not -inf, so that gradients stay finite in rows without a candidate.
    mixed = (logprobs + change).masked_fill(~mask, -1e30)
    total = torch.logaddexp(mixed.logsumexp(-1), rest_logprob)
    gain = torch.where(target >= 0, change.gather(-1, target.clamp(min=0)[:, None])[:, 0], 0.0)
    return total - target_logprob - gain
