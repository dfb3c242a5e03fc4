"""Line completion by a language model, and by copying from the user's files.

Model and copies are mixed into one distribution over the next id (`generate/copying.py`), and beam search looks
for the most probable line. The last ids of the typed line are generated again, since a token may continue past the
cursor (token healing). If the model was trained to fill in the middle, the prompt also contains the text after the
cursor. After each typed character, only about one id has to be evaluated.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from itertools import takewhile
from typing import Any

from torch import nn

from dunes.checkpoint import LoadedModel
from dunes.checkpoint.trained_text import trained_text
from dunes.completion import Source, Suggestion
from dunes.completion.copy_gate import scored_places
from dunes.completion.copy_mixture import Mixture, RememberedLogits
from dunes.completion.index import TextIndex, find_copy, index_texts
from dunes.completion.names import Place, newest
from dunes.completion.search import DEFAULTS, LIMIT, WIDTH, Beam, CompleteOptions, LineSearch
from dunes.completion.text import (
    BELOW,
    FileTokenizer,
    fim_form,
    first_line,
    first_word,
    line_start,
    near_text,
    window,
    without_overlap,
)
from dunes.data.document import NamedText
from dunes.generate.copying import Copies, Gate, Sources, TextSource, Vocabulary, index_ids
from dunes.generate.decode_graph import CompiledStep
from dunes.generate.prefix_cache import PrefixCache
from dunes.text.lines import valid_text
from dunes.tree import count

SUFFIX = 0.25
"""Maximum fraction of the prompt for the text after the cursor."""
PROMPT_WORK = 7e10
"""Maximum product of parameters and prompt tokens. With twice this product, one thread takes half a second longer
without completing more lines correctly (docs/log/completion.md, "Beams and budgets of a large model")."""
SHORTEST = 256
"""A prompt may always have at least this many tokens, however large the model is."""
GREEDY_FROM = 30_000_000
"""From this number of parameters on, greedy decoding is the default, since it completes more correct lines per
second."""
LIKELY = 4
"""Number of most probable tokens that `explain` lists at each token of a suggestion."""
FILES = 16
"""Number of files for which keys and values are cached. With 135M parameters and 500 tokens, a file takes 12 MB to
25 MB, and half a second without the cache."""
MERGED = 3
"""If there are more indexes of changed files than MERGED, the smaller indexes are merged."""


@dataclass(frozen=True, eq=False)
class OpenFiles:
    """Files that changed since the index was built. `texts` maps names to texts (None: deleted). `parts` are
    indexes of these texts, larger ones first. Each index comes with the names of the files whose newest text it
    contains."""

    texts: Mapping[str, str | None] = field(default_factory=dict)
    parts: Sequence[tuple[frozenset[str], TextIndex]] = ()

    def far(self, name: str) -> list[TextSource]:
        """The sources to copy from in these files, except the file `name`."""
        return [index.without(index.names - (names - {name})) for names, index in self.parts]


class CompletionEngine:
    """Completes lines with a model and by copying from the file, from open files, and from an index.

    `gate` mixes model and copies; without a gate, only the model is used. `header` is True if each file's path
    preceded its text in training. `find_step()` returns the compiled decoding of the model (`CompiledStep`), or
    None if there is none. A prompt has at most `prompt_tokens` tokens, by default `choose_budget(loaded.model)`.
    Raises ValueError for a model without a tokenizer.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        index: TextIndex | None = None,
        gate: Gate | None = None,
        header: bool = False,
        find_step: Callable[[], CompiledStep | None] = lambda: None,
        prompt_tokens: int | None = None,
    ) -> None:
        self.loaded, self.index, self.gate = loaded, index, gate
        self.prompt_tokens = prompt_tokens or choose_budget(loaded.model)
        self.files = FileTokenizer(loaded.require_tokenizer(), header)
        encode = lambda line: self.files.line(line.decode(errors="ignore"))
        self._vocabulary = Vocabulary(self.files.pieces, encode)
        self.find_step = find_step
        # An older step would keep its copy of the weights in memory, so only caches with one step are kept.
        caches = lambda step: lru_cache(FILES)(lambda name: PrefixCache(loaded.model, step=step))
        mixture = lambda width, cache: Mixture(RememberedLogits(loaded.model, width, cache), self.files)
        self._caches, self._mixture = lru_cache(1)(caches), lru_cache(1)(mixture)
        self._open = OpenFiles()
        self._form = fim_form(loaded)

    @cached_property
    def width(self) -> int:
        """Default number of beams."""
        return 1 if count(self.loaded.model) >= GREEDY_FROM else WIDTH

    def update(self, name: str, text: str | None) -> None:
        """Set the text of the file with this path, after it was opened or changed; None if it was deleted."""
        self.use(self.with_texts({name: text}))

    def with_texts(self, texts: Mapping[str, str | None]) -> OpenFiles:
        """The open files with these texts added, to pass to `use`. Another thread may complete lines during the
        call."""
        # A file without a name could not be excluded from the sources.
        by_name = ((valid_text(name), text) for name, text in texts.items() if name)
        changed = {name: valid_text(text) if text else None for name, text in by_name}
        current, absent = self._open, object()
        changed = {name: text for name, text in changed.items() if current.texts.get(name, absent) != text}
        if not changed:
            return current
        texts_after = {**{n: t for n, t in current.texts.items() if n not in changed}, **changed}  # newest last
        parts = [(rest, index) for names, index in current.parts if (rest := names - changed.keys())]
        fresh = {name for name, text in changed.items() if text}
        size = sum(len(texts_after[name] or "") for name in fresh)
        while parts and (len(parts) > MERGED or 2 * size > len(parts[-1][1].text)):
            names, index = parts.pop()
            fresh |= names
            size += len(index.text)
        if fresh:
            index = index_texts([(name, texts_after[name] or "") for name in sorted(fresh)], self.files)
            parts.append((frozenset(fresh), index))
        return OpenFiles(texts_after, parts)

    def use(self, files: OpenFiles) -> None:
        """Complete lines with these open files from now on."""
        self._open = files

    def index_files(self, files: Sequence[NamedText]) -> None:
        """Index these files in advance, for requests whose options contain them."""
        self.files.recent(index_texts, tuple(files), self.files)

    def complete(
        self, before: str, after: str = "", name: str = "", options: CompleteOptions = DEFAULTS
    ) -> Suggestion:
        """The rest of the line, or `options.lines` lines. Raises Cancelled once `options.cancelled()` is true."""
        return self.alternatives(before, after, name, options)[0]

    def alternatives(
        self, before: str, after: str = "", name: str = "", options: CompleteOptions = DEFAULTS
    ) -> list[Suggestion]:
        """The most probable suggestions, best first, at most `options.alternatives`. The text of the first one may
        be empty.

        Raises Cancelled once `options.cancelled()` is true.
        """
        place = Place(
            before=near_text(before),
            after=valid_text(after[:BELOW]),
            opened=newest(self._open.texts, name, options),
            sources=self.far(name, options.files),
            suggest=lambda text: self._suggest(before + text, after, name, options),
            limit=lambda suggestion: options.limit(suggestion, self.shorten),
        )
        return place.suggestions()

    def shorten(self, text: str, tokens: int | None) -> str:
        """The first `tokens` tokens of a text, up to the first character that the tokenizer changes or drops."""
        cut = b"".join(self.files.pieces[i] for i in self.files.line(text)[:tokens]).decode(errors="ignore")
        same = takewhile(lambda pair: pair[0] == pair[1], zip(text, cut, strict=False))
        return text if tokens is None else "".join(character for character, _ in same)

    def _suggest(self, before: str, after: str, name: str, options: CompleteOptions) -> list[Suggestion]:
        """The suggestions found by the search, not yet changed by the rules of names.py."""
        search, ranked = self._find(before, after, name, options)
        suggestions: dict[str, Suggestion] = {}
        for rest, beam in ranked:
            word = max(beam.total, search.logprob(beam, first_word(rest))) if rest else beam.total
            first, full = (math.exp(min(p, 0.0)) for p in (word, beam.total))
            source: Source = "copies" if beam.is_copied else "model"
            suggestions.setdefault(rest, Suggestion(rest, first, full, search.ends(beam), source))
        best, *others = suggestions.values()
        return [best, *(suggestion for suggestion in others if suggestion.text)]

    def _find(
        self, before: str, after: str, name: str, options: CompleteOptions
    ) -> tuple[LineSearch, list[tuple[str, Beam]]]:
        """The search, and (rest of the line, beam) pairs, best first."""
        after, name = valid_text(after[:BELOW]), valid_text(name)
        before = near_text(before)
        start = line_start(before)
        text, above = self.files.tokenize(before, name), self.files.tokenize(before[:start], name).ids
        line, typed = self.files.split_typed(text.ids[text.last :])
        # Without text below the line, the prompt has no suffix, since the file may continue.
        below = self.files.encode_continuation(after) if after[len(first_line(after)) :].strip() else []
        prompt = self._prompt([*text.ids[: text.last], *line], below, text.starts[0]) or [self.files.tokenizer.eos]
        width = options.width or self.width
        options = replace(options, width=width, alternatives=min(width, options.alternatives))
        mixture = self._mixture_of(width, name)
        room = self.loaded.context_length - len(prompt)
        search = LineSearch(mixture, prompt, options, room)
        copies = Copies(self.sources(above, below, name, options.files), typed, len(prompt))
        mixture.begin(copies, self.gate, prompt, search.limit, options.cancelled)
        beams = search.beams()
        rests = [without_overlap(search.text(beam), after, before[start:]) for beam in beams]
        return search, [(rest if rest.strip() else "", beam) for rest, beam in zip(rests, beams, strict=True)]

    def explain(
        self, before: str, after: str = "", name: str = "", options: CompleteOptions = DEFAULTS
    ) -> list[dict[str, Any]]:
        """For each token of the first suggestion: its text, its probability, the model's probability, likely
        tokens, and the place `copied` where the text up to the token occurs. This place is the result of
        `find_copy`; its file is empty for the text around the cursor. Files in `options` are not searched.

        Probabilities are conditional on the text around the cursor, including the typed part of a token. The
        product of the tokens' probabilities is the line's probability. The last tokens returned, such as a line
        end, may not be part of the suggestion. An empty suggestion gives an empty list. Raises Cancelled once
        `options.cancelled()` is true.
        """
        shown = self.complete(before, after, name, options).text
        search, ranked = self._find(before, after, name, options)
        (rest, beam), mixture, tokens = ranked[0], search.mixture, list[dict[str, Any]]()
        if shown != rest:  # a rule in names.py changed the text
            beam = Beam(tuple(self._vocabulary.encode(mixture.copies.typed + shown.encode())))
        beam, decode = search.score(beam.ids), partial(bytes.decode, errors="replace")
        typed, mixed_sum, alone_sum = len(mixture.copies.typed), 0.0, 0.0
        above, below = valid_text(before).encode(), valid_text(after).encode()
        sources = TextSource(above + b"\xff" + below), *self.far(name)  # no match crosses a byte that UTF-8 lacks
        indexes = [*filter(None, (self.index, *(index for _, index in self._open.parts)))]
        written = above[: len(above) - typed]
        for place, (id, logprob) in enumerate(zip(beam.ids, beam.logprobs, strict=True) if shown else ()):
            ids, piece = [*search.prompt, *beam.ids[:place]], self.files.pieces[id]
            best = (mixed := mixture.after_one(ids, 0)).topk(min(LIKELY, len(mixed)))
            mixed_sum, alone_sum = mixed_sum + logprob, alone_sum + float(mixture.alone(ids)[id])
            written += piece
            if len(piece) > typed:  # else its probability is included in the next token's
                pairs = zip(best.indices.tolist(), best.values.exp().tolist(), strict=True)
                likely = [[decode(self.files.pieces[i][typed:]), prob] for i, prob in pairs]
                probs = {"probability": math.exp(min(mixed_sum, 0.0)), "model": math.exp(min(alone_sum, 0.0))}
                copied = find_copy(written, sources, indexes)
                tokens.append({"text": decode(piece[typed:]), **probs, "likely": likely, "copied": copied})
                mixed_sum = alone_sum = 0.0
            typed = max(0, typed - len(piece))
        return tokens

    def bits(self, text: str, name: str = "") -> float:
        """Information content of a file's text in bits, each id predicted from the ids before it."""
        tokenized, total = self.files.tokenize(text, name), 0.0
        for id, logprobs, candidates in scored_places(self.loaded, tokenized, partial(self.sources, name=name)):
            mixed = self.gate.change(candidates, logprobs) if self.gate else logprobs
            total -= float(mixed[id])
        return total / math.log(2)

    def _prompt(self, text: list[int], below: list[int], header: int) -> list[int]:
        """Prompt ids for a cursor between `text` and `below`; the first `header` ids of `text` are the file's
        header."""
        room = self.loaded.context_length - min(LIMIT, self.loaded.context_length // 2)
        moves = 4 if room <= self.prompt_tokens else 2  # evaluating a long prompt again is slow
        room = min(room, self.prompt_tokens)
        below = below[: int(SUFFIX * room)]
        narrow = room < 2 * (len(below) + 3)  # the text above matters more than the text below
        if narrow or self._form is None or not any(self.files.pieces[i].strip() for i in below):
            return [*window(text, room, moves)]
        prefix, suffix, middle = self._form.ids
        above = window(text, room - len(below) - 3, moves)
        head = above[:header] if len(above) == len(text) else []
        if self._form.suffix_first:
            return [*head, prefix, suffix, *below, middle, *above[len(head) :]]
        return [*head, prefix, *above[len(head) :], suffix, *below, middle]

    def sources(
        self, above: Sequence[int], below: Sequence[int] = (), name: str = "", texts: Collection[NamedText] = ()
    ) -> Sources:
        """The sources to copy from if the cursor is between the ids `above` and `below`. The same cached object is
        returned until `above`, `below` or other files change."""
        parts = (tuple(above), tuple(below)) if below else (tuple(above),)
        sources: Sources = self.files.recent(self._find_sources, parts, name, tuple(texts), self._open)
        return sources

    def far(self, name: str, texts: Collection[NamedText] = ()) -> list[TextSource]:
        """The sources to copy from in `texts` and in all files except `name`: open files, and unchanged files of
        the index."""
        sources = self._open.far(name)
        if self.index:
            hidden = self.index.names & {name, *self._open.texts}
            sources = [self.files.recent(self.index.without, hidden), *sources]
        if texts:
            sources.append(self.files.recent(index_texts, tuple(texts), self.files).without())
        return sources

    def _find_sources(
        self, parts: tuple[tuple[int, ...], ...], name: str, texts: tuple[NamedText, ...], files: OpenFiles
    ) -> Sources:
        # `files` is an argument only for the cache key, since `far` reads the same `self._open`.
        pieces = self.files.pieces
        near = [TextSource(b"".join(pieces[i] for i in p), ids=index_ids(p, len(pieces))) for p in parts]
        return Sources(near, self.far(name, texts), self._vocabulary)

    def _mixture_of(self, width: int, name: str) -> Mixture:
        """The mixture for `width` beams in this file. A compiled step, whose weights may be rounded, is used only
        for a single beam."""
        step = self.find_step() if width == 1 else None
        return self._mixture(width, self._caches(step)(name))


def choose_budget(model: nn.Module) -> int:
    """Maximum number of prompt tokens, determined by the model's size alone, so that all machines suggest the
    same."""
    return max(SHORTEST, int(PROMPT_WORK / max(1, count(model))))


def knows_paths(loaded: LoadedModel) -> bool:
    """True if the model's card says that it was trained on files with their paths."""
    trained = trained_text(loaded.card)
    return bool(trained.get("complete") and trained.get("file_headers", True))
