"""Beam search: the most probable of several continuations that are followed side by side."""

# Shapes: V vocabulary.

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dunes.generate.prefix_cache import PrefixCache
from dunes.generate.sampling import Processor


class Beam(NamedTuple):
    """Ids after the prompt, and the log-probability (nats) of each."""

    ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()

    @property
    def total(self) -> float:
        """The log-probability of all ids together."""
        return sum(self.logprobs)


def beam_search(
    cache: PrefixCache,
    prompt: Sequence[int],
    *,
    width: int,
    limit: int,
    process: Processor,
    ends: Callable[[Sequence[int]], bool],
) -> Beam:
    """The most probable continuation that `ends`, of those that `width` beams of up to `limit` ids find; if none
    does, the best that does not; none, if nothing may follow.

    `process` makes log-probabilities (V,) of logits, with -inf for what must not follow. Afterwards the cache
    holds the prompt.
    """
    cache.reserve(len(prompt) + limit)
    logits = [cache.logits({0: prompt})[0][-1]]
    rows, beams = forked(cache, width), [Beam()]
    finished: list[Beam] = []
    for _ in range(limit):
        candidates = [
            b for beam, row in zip(beams, logits, strict=True) for b in _grown(beam, row, prompt, process, width)
        ]
        candidates.sort(key=lambda beam: -beam.total)
        beams = []
        for beam in candidates[:width]:
            (finished if ends(beam.ids) else beams).append(beam)
        best = max((beam.total for beam in finished), default=-torch.inf)
        beams = [beam for beam in beams if beam.total > best]
        if not beams:
            break
        if len(beams[0].ids) < limit:
            logits = rows(prompt, beams)
    return max(finished or beams, key=lambda beam: beam.total, default=Beam())


def _grown(beam: Beam, logits: Tensor, prompt: Sequence[int], process: Processor, width: int) -> list[Beam]:
    """The beam with each of the most probable next ids."""
    best = process(logits, [*prompt, *beam.ids]).topk(min(width, len(logits)))
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [Beam((*beam.ids, id), (*beam.logprobs, logprob)) for id, logprob in pairs if logprob > -torch.inf]


def forked(cache: PrefixCache, width: int) -> Callable[[Sequence[int], Sequence[Beam]], list[Tensor]]:
    """A function that gives the logits (V,) after the prompt and each beam, from a copy of the cache for each."""
    made: list[PrefixCache] = []

    def logits(prompt: Sequence[int], beams: Sequence[Beam]) -> list[Tensor]:
        if not made:
            made.append(PrefixCache(cache.model, width))
            if cache.cache is not None:
                made[0].cache = cache.cache.select_rows(
                    torch.zeros(width, dtype=torch.long, device=cache.cache.length.device)
                )
                made[0].ids = [list(cache.ids[0]) for _ in range(width)]
        texts = assigned(made[0].ids, [[*prompt, *beam.ids] for beam in beams])
        found = made[0].logits(texts)
        by_text = {tuple(text): found[row][-1] for row, text in texts.items()}
        return [by_text[(*prompt, *beam.ids)] for beam in beams]

    return logits


def assigned(held: Sequence[Sequence[int]], texts: Sequence[list[int]]) -> dict[int, list[int]]:
    """A row for each text, where possible one that holds all of it but the last id."""
    free, rows, later = set(range(len(held))), dict[int, list[int]](), []
    for text in texts:
        row = next((r for r in sorted(free) if list(held[r]) == text[:-1]), None)
        if row is None:
            later.append(text)
        else:
            rows[row] = text
            free.discard(row)
    for text in later:
        rows[free.pop()] = text
    return dict(sorted(rows.items()))
