"""A KV cache that records the ids of its tokens: of a new text, only the ids after the common prefix are
evaluated.

Long texts are prefilled in pieces; between two pieces, other work can run, or the request can be cancelled.
"""

# Shapes: B rows of the cache, N rows of a forward, T new tokens, V vocabulary.

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook
from torch.utils.hooks import RemovableHandle

from dunes import tree
from dunes.cores import share_cores
from dunes.generate.decode_graph import CompiledStep, Scores, model_state
from dunes.ops.float32_products import float32_products, multiplies_in_float32
from dunes.parts import Cache, CacheFormat, cache_for, vocabulary_size

CHUNK = 2048
"""Maximum tokens of a prompt per forward. Shorter chunks are not faster, and longer chunks take more memory."""
MAX_STEPPED = 16
"""Compiled code for FEW tokens evaluates up to this many new ids; a forward evaluates more ids. Code and forward
take equally long at 16 to 28 ids with 10M parameters, 13 to 16 with 124M, 15 with 1B."""
IN_FLOAT32 = 8
"""`MAX_STEPPED` for float32 matrices. Compiled code and a forward take equally long at 16 ids with
10M parameters, at 9 with 124M, and at 10 with 1B."""
PADDED = 8
"""Up to this many tokens of padding per row, batching rows is cheaper than copying a row's KV cache."""

Activate = Callable[[Sequence[str | None]], AbstractContextManager[None]]
"""Returns a context manager for adapter names; inside, row i of a forward uses the adapter `names[i]`."""


class PrefixCache:
    """The KV cache of a model and the ids in each of its rows. If the model's weights change, the cached values
    are wrong.

    `activate(names)` returns a context manager in which row i of a forward uses the adapter `names[i]`; by default
    all rows use the model's active adapter. `step`, if set, computes a few new tokens of a single row, or one
    token of each of several rows. `format` quantizes keys and values; with a `format`, `step` is not used.
    """

    def __init__(
        self,
        model: nn.Module,
        rows: int = 1,
        activate: Activate | None = None,
        step: CompiledStep | None = None,
        format: CacheFormat | None = None,
    ) -> None:
        share_cores()
        self.model, self.activate = model, activate or (lambda names: nullcontext())
        self.cache: Cache | None = None
        self.ids: list[list[int]] = [[] for _ in range(rows)]
        self.adapters: list[str | None] = [None] * rows
        self.step, self.format = step, format
        self._adapter_modules: list[Any] = []
        self._fitting_state: object = None  # `_state()` when the step last fitted the model
        self.vocab: int | None = None
        """The number of logits per token; None before the first forward."""
        self.forwards = 0

    def __repr__(self) -> str:
        return f"PrefixCache(ids in its rows: {', '.join(str(len(ids)) for ids in self.ids)}; {self.cache})"

    def reserve(self, capacity: int) -> None:
        """Make room for `capacity` ids in each row."""
        if self.cache is None:
            device = next(self.model.parameters()).device
            self.cache = cache_for(self.model, len(self.ids), capacity, device, self.format)
        if self.cache is not None:
            self.cache.grow(capacity)

    def set_adapter(self, row: int, adapter: str | None) -> None:
        """Set the adapter of a row; ids that were evaluated with another adapter are dropped."""
        if adapter != self.adapters[row]:
            self.adapters[row], self.ids[row] = adapter, []

    def logits(
        self, texts: Mapping[int, Sequence[int]], last: Mapping[int, int] | None = None
    ) -> dict[int, Tensor]:
        """Logits (n, V) after each of the last n ids of a text, by row; `last` maps rows to n (default: 1).

        Only the ids after the prefix that the row already contains are evaluated.
        """
        last = last or dict.fromkeys(texts, 1)
        if len(self.ids) > 1 and max(last.values(), default=0) == 1 and (by_row := self.row_scores(texts)):
            return {i: s.logits[None] for i, s in by_row.items()}
        if last.keys() == {0} and (scores := self.scores(texts[0], last[0])):
            return {0: torch.stack([s.logits for s in scores])}
        if self.cache is None:  # the model may mix tokens, so it reads entire texts
            with torch.no_grad(), tree.mode(self.model, False), self.activate([self.adapters[i] for i in texts]):
                logits = dict(zip(texts, self._forward([*texts.values()], max(last.values())), strict=True))
        else:
            # Rows with many new tokens get a separate forward, since they would add much padding to other rows.
            missing = {i: len(ids) - common_length(self.ids[i], ids, last[i]) for i, ids in texts.items()}
            prefill = [i for i in sorted(texts) if missing[i] > last[i] + PADDED] if any(self.ids) else []
            rows = list(range(len(self.ids)))
            logits = self._evaluate({i: texts[i] for i in prefill}, prefill, last)
            logits |= self._evaluate({i: ids for i, ids in texts.items() if i not in prefill}, rows, last)
        return {i: logits[i][-last[i] :] for i in texts}

    def scores(self, text: Sequence[int], last: int = 1) -> list[Scores] | None:
        """The compiled step's scores of the next token after each of the text's final `last` ids.

        None if no step can be used, or if a forward over the new ids is faster.
        """
        cached, step, cache = self.ids[0], self.step, self.cache
        if step is None or cache is None or len(self.ids) > 1 or torch.is_autocast_enabled("cpu"):
            return None
        common = common_length(cached, text, last)
        limit = (IN_FLOAT32 if step.dtype == torch.float32 else MAX_STEPPED) if step.most(cache, 0) > 1 else 1
        starts_text = not common and last == 1 and len(text) > limit and self._reads_text(step, len(text))
        if (len(text) - common > limit and not starts_text) or not self._step_fits(common, step, cache):
            return None
        self.ids[0] = []  # an interrupted step leaves the row undefined
        if common < len(cached) or not common:  # an interrupted forward leaves tokens in a row without ids
            del cached[common:]
            if cache.truncate(torch.tensor([common])) != common:
                return None  # a rolling cache has dropped all its tokens
        scores: list[Scores] = []
        try:
            while len(cached) < len(text):
                ids = text if starts_text else text[len(cached) : len(cached) + step.most(cache, len(cached))]
                scores += (step.read_text if starts_text else step)(ids, cache)
                cached += ids
                self.forwards += 1
            if any(math.isnan(s.log_sum) for s in scores):  # an invalid id, which the forward reports
                return None
        except (OverflowError, RuntimeError):  # an invalid id or position, which the forward reports
            return None
        self.ids[0], self.vocab = cached, self.vocab or len(scores[0].logits)
        return scores[-last:]

    def row_scores(self, texts: Mapping[int, Sequence[int]]) -> dict[int, Scores] | None:
        """The compiled step's scores of the next token after each text, by row.

        None if no step can be used, or if an id before a text's last id is not cached.
        """
        step, cache = self.step, self.cache
        if step is None or not step.reads_rows or cache is None or torch.is_autocast_enabled("cpu"):
            return None
        cached = {i: self.ids[i] for i in texts}
        has_all = all(cached[i] and cached[i] == [*text[:-1]] for i, text in texts.items())
        if not has_all or not self._step_fits(1, step, cache):
            return None
        for i in texts:
            self.ids[i] = []  # an interrupted step leaves a row undefined
        try:
            scores = step.read_rows({i: text[-1] for i, text in texts.items()}, cache)
        except (OverflowError, RuntimeError):  # an invalid id or position, which the forward reports
            return None
        self.forwards += 1
        if any(math.isnan(s.log_sum) for s in scores.values()):
            for tensor in cache.keys + cache.values:
                tensor.nan_to_num_()  # masked attention weights are 0, but 0 * NaN is NaN
            return None
        for i, text in texts.items():
            self.ids[i], self.vocab = [*cached[i], text[-1]], len(scores[i].logits)
        return scores

    def _reads_text(self, step: CompiledStep, tokens: int) -> bool:
        """True if the step can evaluate a text of this many tokens in one call, faster than the model."""
        if not step.reads_texts or self.cache is None or tokens > min(CHUNK, self.cache.capacity):
            return False
        return not multiplies_in_float32(next(self.model.parameters()), tokens)

    def _step_fits(self, common: int, step: CompiledStep, cache: Cache) -> bool:
        """True if the step can continue after the `common` cached ids or, if `common` is 0, start a text.

        False if the step does not match the model's present state and the cache's dtypes, or if a row has an
        adapter.
        """
        if self.format or any(self.adapters) or (not common and step.most(cache, 0) == 1):
            return False
        if self._fitting_state != self._state():
            self._adapter_modules = [m for m in self.model.modules() if hasattr(m, "active")]
            dtypes, expected = ([t.dtype for t in c.keys + c.values] for c in (cache, step.example))
            hooked = _has_any_global_hook()  # type: ignore[no-untyped-call]
            with self.activate(self.adapters):
                fits = not hooked and dtypes in ([], expected) and step.state == model_state(self.model)
            self._fitting_state = self._state() if fits else None
        if self._fitting_state and not cache.keys:
            cache.allocate_like(step.example)
        return self._fitting_state is not None

    def _state(self) -> object:
        """State that may change between two tokens: the step, the number of hooks so far, the active adapters."""
        return self.step, RemovableHandle.next_id, [m.active for m in self._adapter_modules]

    def _evaluate(
        self, texts: Mapping[int, Sequence[int]], rows: Sequence[int], last: Mapping[int, int]
    ) -> dict[int, Tensor]:
        """Logits (n, V) of each text from one forward over these rows; n is the largest value in `last`.

        Rows without a text are filled with padding.
        """
        if not texts:
            return {}
        assert self.cache is not None, "reserve comes first"
        all_rows = len(rows) == len(self.ids)
        index: Tensor | slice = slice(rows[0], rows[-1] + 1)
        if [*range(rows[0], rows[-1] + 1)] != list(rows):  # consecutive rows need no copy
            index = torch.tensor(rows, device=self.cache.length.device)
        part = self.cache if all_rows else self.cache.select_rows(index)
        common = [common_length(self.ids[i], texts[i], last[i]) if i in texts else len(self.ids[i]) for i in rows]
        cached = [len(self.ids[i]) for i in rows]
        for i in texts:
            self.ids[i] = []  # an interrupted forward leaves a row undefined
        if common != cached or not all(cached):  # an interrupted forward leaves tokens in a row without ids
            common = part.truncate(torch.tensor(common)).tolist()
        pending = [texts[i][n:] if i in texts else [] for i, n in zip(rows, common, strict=True)]
        try:
            with torch.no_grad(), tree.mode(self.model, False), self.activate([self.adapters[i] for i in rows]):
                logits = self._forward(pending, max(last[i] for i in texts), part)
        finally:  # also after an interrupted forward, which may have changed the rows' lengths
            if not all_rows:
                self.cache.write_rows(index, part)
        for i, ids in texts.items():
            self.ids[i] = list(ids)
        self._fitting_state = None  # the cache's dtype or hooks may have changed
        return {i: row for i, row in zip(rows, logits, strict=True) if i in texts}

    def _forward(self, pending: Sequence[Sequence[int]], last: int, cache: Cache | None = None) -> Tensor:
        """Logits (N, last, V) after the final `last` ids of each row; shorter rows are padded on the left."""
        check_ids(vocabulary_size(self.model), pending)
        self.forwards += 1
        width, weight = max(map(len, pending)), next(self.model.parameters())
        device = weight.device
        ids = torch.tensor([[0] * (width - len(row)) + list(row) for row in pending], device=device)
        real = torch.tensor([[False] * (width - len(row)) + [True] * len(row) for row in pending], device=device)
        padded = any(len(row) < width for row in pending)
        piece = width if cache is None else cache.largest_piece or CHUNK
        cuts = [*range(0, width - last + 1, piece), width]
        with float32_products(weight, ids.numel()):
            for a, b in itertools.pairwise(cuts):
                part, n = real[:, a:b], last if b == width else 0
                positions = part.long().cumsum(1) - 1 if cache is None else cache.start(part if padded else b - a)
                logits: Tensor = self.model(ids[:, a:b], positions=positions, cache=cache, last=n)
        self.vocab = logits.shape[-1]
        return logits


def check_ids(vocab: int | None, texts: Iterable[Sequence[int]]) -> None:
    """Raise ValueError for an id below 0 or not below `vocab`; without `vocab`, all ids are allowed."""
    for id in (i for text in texts if text for i in (min(text), max(text))):
        if vocab is not None and not 0 <= id < vocab:
            raise ValueError(f"a text has id {id}; the model has ids 0 to {vocab - 1}")


def common_length(cached: Sequence[int], ids: Sequence[int], last: int) -> int:
    """Length of the common prefix of `cached` and `ids`, at most `len(ids) - last`, since the logits after the
    `last` final ids are needed."""
    equal, most = 0, min(len(cached), len(ids) - last)
    if (cached if most == len(cached) else cached[:most]) == ids[:most]:  # the usual case
        return max(most, 0)
    while equal < most:  # a binary search, since comparing slices is much faster than comparing ids
        middle = (equal + most + 1) // 2
        if cached[equal:middle] == ids[equal:middle]:
            equal = middle
        else:
            most = middle - 1
    return equal


FIRST = 128
"""Number of tokens in the first piece."""
LEAST = 32
"""Default minimum number of tokens in a piece."""


class PieceReader:
    """Prefills texts in pieces of at least `least` tokens that take about `seconds` each."""

    def __init__(self, seconds: float = 0.03, least: int = LEAST) -> None:
        self.seconds, self.least, self._size = seconds, least, float(max(FIRST, least))

    def read(self, cache: PrefixCache, row: int, text: Sequence[int]) -> Iterator[None]:
        """Prefill all but the last piece of a text into a row, and yield before each piece.

        The caller reserves room for the text in the cache. For a model without a KV cache, nothing is prefilled.
        """
        while cache.cache is not None:
            cached = common_length(cache.ids[row], text, 1)
            if len(text) - 1 - cached <= self._size:
                return
            yield
            start = perf_counter()
            cache.logits({row: text[: cached + int(self._size)]})
            seconds = perf_counter() - start
            self._size = max(self.least, min(self._size * self.seconds / seconds, 2 * self._size))
