"""Beam search: the most probable of several continuations that are followed side by side."""

# Shapes: V vocabulary.

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Beam(NamedTuple):
    """Ids after the prompt, and the log-probability (nats) of each."""

    ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()

    @property
    def total(self) -> float:
        """The log-probability of all ids together."""
        return sum(self.logprobs)

    def grown(self, id: int, logprob: float) -> "Beam":
        """The beam with one more id."""
        return Beam((*self.ids, id), (*self.logprobs, logprob))

    def given(self, logprob: float) -> "Beam":
        """The beam with its log-probability given what has this one; it belongs to the first id."""
        first, *rest = self.logprobs
        return Beam(self.ids, (first - logprob, *rest))


def beam_search(
    logprobs: Callable[[Sequence[Sequence[int]]], Sequence[Tensor]],
    prompt: Sequence[int],
    *,
    width: int,
    max_tokens: int,
    ends: Callable[[Sequence[int]], bool],
    decided: Callable[[Sequence[Beam]], bool] = lambda beams: False,
) -> list[Beam]:
    """What `width` beams of up to `max_tokens` ids find, the most probable first; none, if nothing may follow.

    `logprobs` gives the log-probabilities (V,) of what follows each of several texts, with -inf for what must not.
    The search is over when no unfinished continuation is as probable as the best that `ends`, or earlier, when all
    that are left, the most probable first, are `decided`.
    """
    beams, finished, left = [Beam()], list[Beam](), list[Beam]()
    for _ in range(max_tokens):
        rows = logprobs([[*prompt, *beam.ids] for beam in beams])
        grown = [b for beam, row in zip(beams, rows, strict=True) for b in _grown(beam, row, width)]
        grown = sorted(grown, key=lambda beam: -beam.total)[:width]
        finished += [beam for beam in grown if ends(beam.ids)]
        best = max((beam.total for beam in finished), default=-torch.inf)
        beams = [beam for beam in grown if beam.total > best]
        left = sorted([*finished, *beams], key=lambda beam: -beam.total)
        if not beams or decided(left):
            break
    return left


def _grown(beam: Beam, logprobs: Tensor, width: int) -> list[Beam]:
    """The beam with each of the most probable next ids."""
    best = logprobs.topk(min(width, len(logprobs)))
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [beam.grown(id, logprob) for id, logprob in pairs if logprob > -torch.inf]
