"""Fits, writes and reads the gate that mixes model and copies. Neither the model nor the index has seen the text
on which the gate is fitted.

At the end of a run, the gate is written to RUN/completion/gate.safetensors, and its thresholds and losses to
RUN/completion/gate.json.
"""

# Shapes: N positions, C candidates, F features, V vocabulary.

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from safetensors.torch import load_file, save
from torch import Tensor

from dunes.checkpoint import LoadedModel
from dunes.completion.index import FOLDER, damage_reported, read_record
from dunes.completion.text import TokenizedText
from dunes.files.atomic import write_file
from dunes.files.model_file import find_file
from dunes.generate.copying import CANDIDATES, TOP, Candidates, Copies, Gate, Sources, mixture_loss, top_ids
from dunes.generate.decode import text_logprobs
from dunes.progress import each

BATCH = 256
"""Batch size: text positions per Adam step."""
RATE = 5e-3
"""Learning rate of Adam."""
STEPS = (200, 1600)
"""Minimum and maximum number of Adam steps. With 800 steps on 500 positions, the gate overfitted: the mixture was
worse than the model alone."""
PLACES_PER_STEP = 5
"""The number of Adam steps is the number of all positions divided by this, clamped to the range STEPS."""
FACTORS = 20
"""Number of factors above 0 that `best_factor` tries."""
RENEWED = 100
"""When an entire text is scored, sources are rebuilt each time the text above the current line has grown by
1/RENEWED. Rebuilding them for each line would be slow."""
CONTEXT = 64
"""At most this many ids before a position are searched for in the sources."""
ROOM = 3 * CANDIDATES + TOP
"""Maximum number of candidates per position."""
PLACE_BYTES = 4 * ROOM * (Copies.FEATURES + 2)
"""Memory of a position in bytes. While two `Places` are concatenated, each position is in memory twice."""
WINDOW = 512
"""Maximum number of ids in a forward; the first half only provides context. With windows of 8,192 ids, the model
evaluated 65 tokens per position."""
CHUNK = 64
"""Approximate number of positions in a contiguous chunk."""
FEWEST = 8
"""Minimum positions per text. With a lower minimum, most positions came from many small files and had little text
above them. The gate was then 0.17 nats worse at other positions (docs/log/completion.md, "Completion of lines:
probabilities given what is typed, a gate of whole files")."""
FORMAT = 2
REMEDY = "remove gate.json there to complete by copying alone, or train again"

Item = TypeVar("Item")
SourcesOf = Callable[[list[int]], Sources]
"""A function that maps the first ids of a file to the sources to copy from after these ids."""


class Places(NamedTuple):
    """Training data of the gate. Per candidate: features (N, C, F), log-probability under the model (N, C), and a
    mask, False for padding (N, C). Per position (N,): the model's highest log-probability, the target's candidate
    index (-1: no candidate) and log-probability, and the log of the total probability of all ids that are no
    candidates.
    """

    features: Tensor
    logprobs: Tensor
    mask: Tensor
    best: Tensor
    target: Tensor
    target_logprob: Tensor
    rest_logprob: Tensor

    @classmethod
    def zeros(cls, number: int) -> "Places":
        """Tensors of zeros with room for this number of positions."""
        features, logprobs = torch.zeros(number, ROOM, Copies.FEATURES), torch.zeros(number, ROOM)
        best, target_logprob, rest_logprob = torch.zeros(3, number)
        target, mask = torch.zeros(number, dtype=torch.long), torch.zeros(number, ROOM, dtype=torch.bool)
        return cls(features, logprobs, mask, best, target, target_logprob, rest_logprob)

    def set(self, row: int, id: int, logprobs: Tensor, candidates: Candidates) -> None:
        """Store in row `row` a position with the target `id`, the model's log-probabilities (V,) and the
        candidates."""
        ids = candidates.ids[:ROOM]
        hits, count = (ids == id).nonzero(), len(ids)
        self.features[row, :count], self.logprobs[row, :count] = candidates.features[:count], logprobs[ids]
        self.mask[row, :count], self.best[row] = True, logprobs.amax()
        self.target[row], self.target_logprob[row] = int(hits[0, 0]) if len(hits) else -1, logprobs[id]
        self.rest_logprob[row] = logprobs.index_fill(0, ids, -math.inf).logsumexp(0)

    def loss(self, gate: Gate, rows: Tensor | slice = slice(None)) -> Tensor:
        """Negative log-likelihood (N,), in nats, of the target at each position under the mixture."""
        part = Places(*(t[rows] for t in self))
        return part.mixture_loss(gate(part.features, part.logprobs, part.best))

    def mixture_loss(self, change: Tensor) -> Tensor:
        """Negative log-likelihood (N,), in nats, if `change` (N, C) is added to the candidates'
        log-probabilities."""
        return mixture_loss(change, self.logprobs, self.target, self.mask, self.target_logprob, self.rest_logprob)


def fit_gate(places: Places) -> Gate:
    """A gate trained to minimise the loss at these positions."""
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        gate = Gate()
    optimizer = torch.optim.Adam(gate.parameters(), RATE)
    steps = min(max(STEPS[0], len(places.target) // PLACES_PER_STEP), STEPS[1])
    for step in each(range(steps)):
        rows = torch.randint(len(places.target), (min(BATCH, len(places.target)),), generator=generator)
        optimizer.param_groups[0]["lr"] = RATE * (1 - step / steps)
        optimizer.zero_grad()
        places.loss(gate, rows).mean().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return gate.requires_grad_(False)


def best_factor(gate: Gate, places: Places) -> float:
    """The factor from 0 (the model alone) to 1 that, multiplied by the gate's output, gives the lowest loss."""
    change = gate(places.features, places.logprobs, places.best)
    factors = [number / FACTORS for number in range(FACTORS, -1, -1)]
    return min(factors, key=lambda factor: float(places.mixture_loss(factor * change).mean()))


def within(seconds: float, items: Iterable[Item]) -> Iterator[Item]:
    """Yield the first item, and further items until `seconds` have passed."""
    end = monotonic() + seconds
    for item in items:
        yield item
        if monotonic() > end:
            return


def places_of(
    loaded: LoadedModel,
    texts: Sequence[TokenizedText],
    sources_of: SourcesOf,
    most: int,
    seconds: float = math.inf,
) -> Places | None:
    """Training data from about `most` positions: the same number in each text, in chunks spread over the text.
    Returns None for texts without ids. After `seconds`, no further chunk is evaluated."""
    random = np.random.default_rng(0)
    texts = [texts[i] for i in random.permutation(len(texts))[: max(1, most // FEWEST)]]
    per_text = even_share([len(text.ids) - text.starts[0] for text in texts], most)
    chunks = [(t, *c) for t in texts for c in _chunks(len(t.ids) - t.starts[0], per_text, random)]
    chunks = [chunks[i] for i in random.permutation(len(chunks))] if seconds < math.inf else chunks
    # Allocated before the first logits, since rows allocated between logits would fragment the heap.
    places, number = Places.zeros(sum(count for *_, count in chunks)), 0
    for text, first, count in within(seconds, each(chunks)):
        for place in scored_places(loaded, text, sources_of, text.starts[0] + first, count):
            places.set(number, *place)
            number += 1
    return Places(*(column[:number] for column in places)) if number else None


def _chunks(size: int, most: int, random: np.random.Generator) -> list[tuple[int, int]]:
    """(start, length) of chunks that cover about `most` of `size` indices: one random chunk in each of several
    equal parts."""
    if most >= size:
        return [(0, size)]
    parts = max(1, most // CHUNK)
    count, part = most // parts, size // parts
    return [(number * size // parts + int(random.integers(part - count + 1)), count) for number in range(parts)]


def even_share(sizes: Sequence[int], most: int) -> int:
    """The number of items to take from each group so that the total is about `most`; groups with fewer items are
    taken entirely."""
    share, remaining = most, most
    for count, size in zip(range(len(sizes), 0, -1), sorted(sizes), strict=True):
        if (share := remaining // count) < size:
            break
        remaining -= size
    return share


def scored_places(
    loaded: LoadedModel,
    text: TokenizedText,
    sources_of: SourcesOf,
    first: int | None = None,
    count: int | None = None,
) -> Iterator[tuple[int, Tensor, Candidates]]:
    """Yield (id, the model's log-probabilities (V,) at its position, copy candidates) for ids of a text.

    The `count` ids (default: all) start at index `first` (default: after the header).

    `sources_of` is called with the ids of the lines above; without `first`, only each time these lines have grown
    by 1 %.
    """
    is_complete = first is None
    first = max(text.starts[0] if first is None else first, 1)
    stop = len(text.ids) if count is None else min(first + count, len(text.ids))
    window = loaded.context_length if count is None else min(loaded.context_length, WINDOW)
    logprobs = text_logprobs(loaded.model, text.ids, window, first, stop)
    copied, copies, stale = 0, None, 0
    for start, end in zip(text.starts, [*text.starts[1:], len(text.ids)], strict=True):
        if start >= stop:
            return
        if end > first and (copies is None or start - copied >= stale):
            copied, copies = start, Copies(sources_of(text.ids[:start]))
            stale = start // RENEWED if is_complete else 0
        for place in range(max(start, first), min(end, stop)):
            assert copies is not None, "made for the first line"
            own = next(logprobs)
            context = text.ids[max(0, place - CONTEXT) : place]
            yield text.ids[place], own, copies.candidates(context, top_ids(own))


def write_gate(run: Path, gate: Gate, facts: Mapping[str, Any]) -> None:
    """Write the gate of a run, and `facts` about the gate, such as thresholds and losses."""
    (run / FOLDER).mkdir(parents=True, exist_ok=True)
    record = {"format": FORMAT, "inputs": gate.INPUTS, **facts}
    write_file(run / FOLDER / "gate.safetensors", save(gate.state_dict()))
    write_file(run / FOLDER / "gate.json", json.dumps(record, indent=1).encode())


def read_gate(run: Path) -> tuple[Gate, dict[str, Any]] | None:
    """The gate of a run and its facts; None if the run has no gate. Raises ValueError for a damaged gate.

    The file contains the names of the gate's inputs. Inputs that the file lacks get zero weights; inputs that this
    version lacks are dropped.
    """
    find_file(run, f"{FOLDER}/gate.safetensors")
    if (facts := read_record(run, "gate.json", FORMAT, REMEDY)) is None:
        return None
    with damage_reported(run, "gate", REMEDY):
        tensors = load_file(run / FOLDER / "gate.safetensors")
        columns = dict(zip(facts["inputs"], tensors["up.weight"].unbind(1), strict=True))
        unknown = torch.zeros_like(tensors["up.bias"])
        tensors["up.weight"] = torch.stack([columns.get(name, unknown) for name in Gate.INPUTS], 1)
        gate = Gate(len(unknown))
        gate.load_state_dict(tensors)
        return gate.requires_grad_(False), facts
