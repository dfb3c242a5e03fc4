"""Beam search: the most probable of several continuations that are followed side by side."""

# Shapes: V vocabulary.

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dunes.generate.prefix_cache import PADDED, PrefixCache, common_length
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
    rows: PrefixCache,
    prompt: Sequence[int],
    *,
    limit: int,
    process: Processor,
    ends: Callable[[Sequence[int]], bool],
    decided: Callable[[Sequence[Beam]], bool] = lambda beams: False,
) -> list[Beam]:
    """Continuations that beams of up to `limit` ids find, the most probable first; none, if nothing may follow.

    There are as many beams as `rows`, a second cache of the same model, has rows: what it holds of the prompt from
    an earlier search is not evaluated again. The search is over when no unfinished continuation is as probable as
    the best that `ends`, or earlier, when all that are left, the most probable first, are `decided`. `process`
    makes log-probabilities (V,) of logits, with -inf for what must not follow. `cache` then holds the prompt.
    """
    cache.reserve(len(prompt) + limit)
    logits = [cache.logits({0: prompt})[0][-1]]
    width, beams, finished = len(rows.ids), [Beam()], list[Beam]()
    left: list[Beam] = []
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
        left = sorted([*finished, *beams], key=lambda beam: -beam.total)
        if not beams or len(beams[0].ids) == limit or decided(left):
            break
        logits = _logits(cache, rows, prompt, beams)
    return left


def _grown(beam: Beam, logits: Tensor, prompt: Sequence[int], process: Processor, width: int) -> list[Beam]:
    """The beam with each of the most probable next ids."""
    best = process(logits, [*prompt, *beam.ids]).topk(min(width, len(logits)))
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [Beam((*beam.ids, id), (*beam.logprobs, logprob)) for id, logprob in pairs if logprob > -torch.inf]


def _logits(cache: PrefixCache, rows: PrefixCache, prompt: Sequence[int], beams: Sequence[Beam]) -> list[Tensor]:
    """The logits (V,) after the prompt, which `cache` has, and each beam, by a forward of `rows`."""
    texts = assigned(rows.ids, [[*prompt, *beam.ids] for beam in beams])
    missing = max(len(text) - common_length(rows.ids[row], text, 1) for row, text in texts.items())
    if cache.cache is not None and missing > PADDED:
        first = torch.zeros(len(rows.ids), dtype=torch.long, device=cache.cache.length.device)
        rows.cache = cache.cache.select_rows(first)
        rows.ids = [list(cache.ids[0]) for _ in rows.ids]
        texts = assigned(rows.ids, [*texts.values()])
    rows.reserve(max(map(len, texts.values())))
    found = rows.logits(texts)
    by_text = {tuple(text): found[row][-1] for row, text in texts.items()}
    return [by_text[(*prompt, *beam.ids)] for beam in beams]


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
