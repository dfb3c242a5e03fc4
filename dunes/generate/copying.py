"""Copying: what followed the same ids before, mixed with a language model by a gate that is fitted.

For each source of text, what followed its longest match with the context, and shorter ones, is blended as in
prediction by partial matching (PPM): the counts after n ids, and as many more for the shorter contexts as there are
different ids. A gate then changes the log-probability of each id that a source proposes by what it knows of it: how
long the match is, how sure the sources and the model are. The result is a distribution again.
https://doi.org/10.1109/TCOM.1984.1096090 (PPM), https://arxiv.org/abs/2401.17377 (matches of any length)
"""

# Shapes: C candidates, F features, V vocabulary, N places.

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dunes.generate.context_index import ContextIndex
from dunes.generate.sampling import Sampler
from dunes.generate.speculate import Proposal

LENGTHS = (24, 16, 12, 8, 6, 5, 4, 3, 2, 1)
"""The lengths of matches that are blended, besides the longest."""
FOLLOWERS, CANDIDATES = 256, 24
"""Positions of a match that are looked at, and ids that a source proposes, at most."""
LEAST = 1e-4
"""The probability that stands for none in a feature."""


class Followers(NamedTuple):
    """What followed a context in one source: ids (C,), int64, their blended probabilities, which leave some for
    others, and their share among what followed the longest match, of `length` ids at `count` positions."""

    ids: NDArray[np.int64]
    probs: NDArray[np.float64]
    shares: NDArray[np.float64]
    length: int
    count: int


NONE = Followers(np.zeros(0, np.int64), np.zeros(0), np.zeros(0), 0, 0)


class Candidates(NamedTuple):
    """Ids (C,) that sources propose, int64, and what these know of each: (C, F), float32."""

    ids: Tensor
    features: Tensor


class Copies:
    """The text near the place that is completed, such as the file above it, and others: indexes of ids."""

    FEATURES = 10

    def __init__(self, near: ContextIndex | None, far: Sequence[ContextIndex] = ()) -> None:
        self.near, self.far = near, far

    def candidates(self, context: Sequence[int]) -> Candidates:
        """What may follow a context by all sources."""
        near = followers(self.near, context) if self.near is not None else NONE
        far = max((followers(index, context) for index in self.far), key=lambda f: f.length, default=NONE)
        ids = np.union1d(near.ids, far.ids)
        columns = [column for source in (near, far) for column in _columns(source, ids)]
        features = np.stack(columns, 1) if len(ids) else np.zeros((0, self.FEATURES))
        return Candidates(torch.from_numpy(ids), torch.from_numpy(features.astype(np.float32)))

    def propose(self, ids: Sequence[int], limit: int, sample: Sampler, *, count: int = 12) -> Proposal:
        """Propose what followed the longest match; of equal ones, the near and the last."""
        indexes = [index for index in (self.near, *self.far) if index is not None]
        matches = [(match, index) for index in indexes for match in [*index.matches(ids)][-1:]]
        if not matches:
            return Proposal()
        match, index = max(matches, key=lambda pair: pair[0].length)
        start = int(index.positions(match, FOLLOWERS).max())
        return Proposal(index.items[start : start + min(count, limit)].tolist())


def index_ids(ids: Sequence[int], vocab: int) -> ContextIndex:
    """The index of some ids below `vocab`."""
    return ContextIndex(np.array(ids, np.uint16 if vocab <= 1 << 16 else np.uint32))


def followers(index: ContextIndex, context: Sequence[int]) -> Followers:
    """What followed this context in an index."""
    matches = [*index.matches(context)]
    if not matches:
        return NONE
    longest = matches[-1]
    levels = [m for m in matches if m.length in LENGTHS and m.last - m.first > longest.last - longest.first]
    followed = (index.items[index.positions(m, FOLLOWERS)] for m in [*levels, longest])
    counted = [np.unique(items, return_counts=True) for items in followed]
    ids = np.unique(np.concatenate([own for own, _ in counted])).astype(np.int64)
    probs, shares = np.zeros(len(ids)), np.zeros(len(ids))
    for own, counts in counted:
        probs *= len(own)
        probs[np.searchsorted(ids, own)] += counts
        probs /= counts.sum() + len(own)
    own, counts = counted[-1]
    shares[np.searchsorted(ids, own)] = counts / counts.sum()
    best = np.argsort(-probs, kind="stable")[:CANDIDATES]
    return Followers(ids[best], probs[best], shares[best], longest.length, longest.last - longest.first)


def _columns(source: Followers, ids: NDArray[np.int64]) -> list[NDArray[np.float64]]:
    """The features of these ids by one source."""
    probs, shares, known = np.zeros(len(ids)), np.zeros(len(ids)), np.zeros(len(ids))
    place = np.searchsorted(ids, source.ids)
    probs[place], shares[place], known[place] = source.probs, source.shares, 1.0
    length = np.full(len(ids), np.log2(1 + source.length))
    return [np.log(probs + LEAST), shares, known, length, np.full(len(ids), np.log2(1 + source.count))]


class Gate(nn.Module):
    """By how much each candidate's log-probability changes: two layers on its features and the model's."""

    def __init__(self, hidden: int = 24) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(Copies.FEATURES + 2, hidden), nn.Linear(hidden, 1)

    def forward(self, features: Tensor, logprobs: Tensor, best: Tensor) -> Tensor:
        """(..., C) for features (..., C, F), the model's log-probabilities (..., C) and its highest one (...)."""
        own = torch.stack([logprobs, best[..., None].expand_as(logprobs)], -1).clamp(min=-15)
        x: Tensor = self.down(torch.tanh(self.up(torch.cat([features, own], -1))))
        return x[..., 0]

    def mix(self, copies: Copies, logits: Tensor, ids: Sequence[int]) -> Tensor:
        """A processor: the log-probabilities (V,) of the mixture."""
        return self.change(copies.candidates(ids), logits.log_softmax(-1))

    def change(self, candidates: Candidates, logprobs: Tensor) -> Tensor:
        """The log-probabilities (V,) of the mixture; those of the model, where nothing can be copied."""
        count = int((candidates.ids < len(logprobs)).sum())
        if not count:
            return logprobs
        known, mixed = candidates.ids[:count], logprobs.clone()
        mixed[known] += self(candidates.features[:count], logprobs[known], logprobs.amax())
        return mixed.log_softmax(-1)


def mixture_loss(change: Tensor, logprobs: Tensor, target: Tensor, known: Tensor, other: Tensor) -> Tensor:
    """The negative log-likelihood (N,) of targets under the mixture, in nats.

    `change` and `logprobs` (N, C) are the gate's changes and the model's log-probabilities of the candidates, of
    which `known` (N, C) says which exist; `target` (N,) is the candidate that is the target, or -1, and `other`
    (N,) the model's log-probability of the target.
    """
    change = change.masked_fill(~known, 0.0)
    # All that are no candidates keep their mass, so the sum of exponentials is 1 and what the candidates gain.
    total = 1 + (logprobs.exp() * known * change.expm1()).sum(-1)
    gain = torch.where(target >= 0, change.gather(-1, target.clamp(min=0)[:, None])[:, 0], 0.0)
    return total.clamp(min=1e-9).log() - other - gain
