"""The gate between a model and what it copies, fitted on files that neither of them has seen."""

# Shapes: N places, C candidates, F features, V vocabulary.

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dunes import tree
from dunes.checkpoint import LoadedModel
from dunes.completion.text import TokenizedText
from dunes.generate.copying import CANDIDATES, TOP, Candidates, Copies, Gate, Sources, mixture_loss, top_ids

PLACES, BATCH, RATE = 20_000, 256, 5e-3
"""Places that the gate is fitted on at most, and the settings of the fit by Adam."""
STEPS, PLACES_PER_STEP = (200, 1600), 5
"""The fewest and the most steps, and how many places make one more: a gate learns few places by heart. Of 500, 800
steps made it worse than the model alone on others."""
RENEWED = 100
"""Sources are renewed for each line of a text, or when it is longer by so small a part: else a text of N lines
would be sorted N times."""
CONTEXT = 64
"""Ids above a place that are matched."""
ROOM = 3 * CANDIDATES + TOP
"""Candidates of a place."""
CHUNK, FEWEST = 64, 8
"""Places side by side, about, and the fewest that are taken of a text. Those at its beginning alone have little of
it above: of many small files, a gate that was fitted on them lost 0.17 nats on others (docs/log/completion.md,
"Completion of lines: probabilities given what is typed, a gate of whole files")."""


SourcesOf = Callable[[list[int]], Sources]
"""The sources to copy from below these ids of a file."""


class Places(NamedTuple):
    """What the gate is fitted on: features (N, C, F) of the candidates, their log-probabilities under the model
    and whether they exist (N, C); the model's highest log-probability, which candidate is the target (-1 for
    none), its log-probability, and that of all ids that are no candidates (N,)."""

    features: Tensor
    logprobs: Tensor
    known: Tensor
    best: Tensor
    target: Tensor
    other: Tensor
    rest: Tensor

    def loss(self, gate: Gate, rows: Tensor | slice = slice(None)) -> Tensor:
        """The negative log-likelihoods (nats) of the targets at these places under the mixture."""
        part = Places(*(t[rows] for t in self))
        change = gate(part.features, part.logprobs, part.best)
        return mixture_loss(change, part.logprobs, part.target, part.known, part.other, part.rest)


def fit_gate(places: Places, seed: int = 0) -> Gate:
    """A gate that lowers the loss of these places."""
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        gate = Gate()
    optimizer = torch.optim.Adam(gate.parameters(), RATE)
    steps = min(max(STEPS[0], len(places.other) // PLACES_PER_STEP), STEPS[1])
    for step in range(steps):
        rows = torch.randint(len(places.other), (min(BATCH, len(places.other)),), generator=generator)
        optimizer.param_groups[0]["lr"] = RATE * (1 - step / steps)
        optimizer.zero_grad()
        places.loss(gate, rows).mean().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return gate.requires_grad_(False)


def places_of(
    loaded: LoadedModel, texts: Sequence[TokenizedText], sources_of: SourcesOf, most: int = PLACES
) -> Places | None:
    """About `most` places, as many of each text, in chunks that are spread over it; None without any."""
    random = np.random.default_rng(0)
    texts = [texts[i] for i in random.permutation(len(texts))[: max(1, most // FEWEST)]]
    each = even_share([len(text.ids) - text.starts[0] for text in texts], most)
    rows = [
        _row(*place)
        for text in texts
        for first, count in _chunks(len(text.ids) - text.starts[0], each, random)
        for place in islice(scored_places(loaded, text, sources_of, text.starts[0] + first), count)
    ]
    return Places(*(torch.stack(column) for column in zip(*rows, strict=True))) if rows else None


def _chunks(size: int, most: int, random: np.random.Generator) -> list[tuple[int, int]]:
    """The first index and the length of chunks with about `most` of `size` indices, one in each equal part."""
    if most >= size:
        return [(0, size)]
    parts = max(1, most // CHUNK)
    count, part = most // parts, size // parts
    return [(number * size // parts + int(random.integers(part - count + 1)), count) for number in range(parts)]


def even_share(sizes: Sequence[int], most: int) -> int:
    """How many are taken of each where `most` are, or all of those that have fewer."""
    share, left = most, most
    for count, size in zip(range(len(sizes), 0, -1), sorted(sizes), strict=True):
        if (share := left // count) < size:
            break
        left -= size
    return share


def _row(id: int, logprobs: Tensor, candidates: Candidates) -> Places:
    """The place with this target, as a row of `Places`."""
    count = min(len(candidates.ids), ROOM)
    features, own = torch.zeros(ROOM, Copies.FEATURES), torch.zeros(ROOM)
    features[:count], own[:count] = candidates.features[:count], logprobs[candidates.ids[:count]]
    hits = (candidates.ids[:count] == id).nonzero()
    target = hits[0, 0] if len(hits) else torch.tensor(-1)
    rest = logprobs.index_fill(0, candidates.ids[:count], -math.inf).logsumexp(0)
    return Places(features, own, torch.arange(ROOM) < count, logprobs.amax(), target, logprobs[id], rest)


def scored_places(
    loaded: LoadedModel, text: TokenizedText, sources_of: SourcesOf, first: int | None = None
) -> Iterator[tuple[int, Tensor, Candidates]]:
    """Of each id of a text, after its header or from the index `first` on: the id, log-probabilities (V,) of the
    model, and what can be copied.

    Copied is from the sources for the lines above; of a whole text, where it is long, but for the last percent.
    """
    whole = first is None
    first = max(text.starts[0] if first is None else first, 1)
    logprobs = text_logprobs(loaded, text.ids, first)
    copied, copies, stale = 0, None, 0
    for start, stop in zip(text.starts, [*text.starts[1:], len(text.ids)], strict=True):
        if stop > first and (copies is None or start - copied >= stale):
            copied, copies = start, Copies(sources_of(text.ids[:start]))
            stale = start // RENEWED if whole else 0
        for place in range(max(start, first), stop):
            assert copies is not None, "made for the first line"
            own = next(logprobs)
            above = text.ids[max(0, place - CONTEXT) : place]
            yield text.ids[place], own, copies.candidates(above, top_ids(own))


def text_logprobs(loaded: LoadedModel, ids: Sequence[int], first: int = 1) -> Iterator[Tensor]:
    """The log-probabilities (V,) of each of the ids from the index `first` on, which is at least 1.

    Windows overlap by half, so that each id but those of the first has half of the context length before it.
    """
    context, model = loaded.context_length, loaded.model
    half = max(1, context // 2)
    data, done = torch.tensor(ids[:-1], device=next(model.parameters()).device), first - 1
    while done < len(data):
        start = max(0, done - half)
        with torch.no_grad(), tree.mode(model, False):
            logprobs = model(data[None, start : start + context])[0].float().log_softmax(-1).cpu()
        yield from logprobs[done - start :]
        done = start + len(logprobs)
