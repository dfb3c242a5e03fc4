"""Completion of lines: a model that learned the code, and what the code at hand has that can be copied.

Both are one distribution over the next id (`generate/copying.py`), and the line is the most probable that a beam
search finds in it. The last ids of the typed line are generated again, since a token may go on where the typing
ended (token healing). The text behind the cursor comes first in the prompt, as in training, so that a typed
character costs about one id.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from dunes.checkpoint import LoadedModel
from dunes.generate.beam import Beam, beam_search
from dunes.generate.copying import Copies, Far, Gate, Sources, TextSource, Vocabulary, index_ids, is_word
from dunes.generate.remembered import RememberedLogits
from dunes.generate.step import CompiledStep
from dunes.runs.completion.cuts import first_word, whole_words
from dunes.runs.completion.gate import scored_places
from dunes.runs.completion.index import TextIndex, index_texts
from dunes.runs.completion.mixture import Mixture
from dunes.runs.completion.protocol import Suggestion
from dunes.runs.completion.text import (
    BELOW,
    FileTokenizer,
    fim_form,
    near_text,
    valid_text,
    window,
    without_overlap,
)
from dunes.runs.trained_text import trained_text
from dunes.text.lines import split_lines

LIMIT = 48
"""Tokens of a suggestion at most."""
WIDTH = 3
"""Beams."""
BEAMED, LEAD = 5, 1.5
"""Ids up to which there are several beams, and nats by which one is so far ahead that it goes on alone."""
HOPELESS = -3.0
"""Log-probability (nats) of a line below which it is not written to its end: a user would not be shown it."""
SUFFIX = 0.25
"""The part of the context length that the text behind the cursor may take."""


@dataclass(frozen=True)
class CompleteOptions:
    """The number of `lines`, and of beams (`width`; 1 is greedy). `cancelled` is asked between two forwards."""

    lines: int = 1
    width: int = WIDTH
    cancelled: Callable[[], bool] = lambda: False

    def __post_init__(self) -> None:
        if self.lines < 1 or self.width < 1:
            raise ValueError(f"lines is {self.lines} and width is {self.width}; both must be at least 1")


class CompletionEngine:
    """Completes lines with a model and by copying: from the file, from files that are open, and from an index.

    `gate` mixes the two; without one, the model is alone. `header` tells whether the model knows the paths of
    files. `find_step` is asked for a compiled step. Raises ValueError if the model has no tokenizer.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        index: TextIndex | None = None,
        gate: Gate | None = None,
        header: bool = False,
        find_step: Callable[[], CompiledStep | None] = lambda: None,
    ) -> None:
        self.loaded, self.index, self.gate = loaded, index, gate
        self.files = FileTokenizer(loaded.require_tokenizer(), header)
        self._vocabulary = Vocabulary(self.files.pieces, self._encode)
        self._find_step = find_step
        self._mixtures: dict[int, Mixture] = {}
        self._changed: dict[str, Far] = {}
        self._near: tuple[list[int], list[int], str, Sources] | None = None
        self._far: tuple[str, Far] | None = None
        self._form = fim_form(loaded)

    def update(self, name: str, text: str | None) -> None:
        """From now on the file with this path has this text: it was opened or changed; None if it is gone."""
        name = valid_text(name)
        self._changed[name] = index_texts([(name, valid_text(text))], self.files).without(()) if text else Far()
        self._near = self._far = None

    def complete(
        self,
        before: str,
        after: str = "",
        name: str = "",
        options: CompleteOptions = CompleteOptions(),
    ) -> Suggestion:
        """The rest of the line, or with `options` a few lines. Raises Cancelled where these say so."""
        after, name = valid_text(after[:BELOW]), valid_text(name)
        text = self.files.tokenize(near_text(before), name)
        above, line = text.ids[: text.starts[-1]], text.ids[text.starts[-1] :]
        kept, typed = self.files.split_typed(line)
        below = self.files.plain(after)
        prompt = self._prompt([*above, *kept], below, text.starts[0]) or [self.files.end]
        copies = Copies(self._sources(above, below, name), typed, len(prompt))
        best = self._search(prompt, copies, options)
        data = self._text(typed, best.ids)
        rest = "".join(split_lines(data)[: options.lines]).rstrip("\r\n")
        if best.ids and not self._ends(typed, options.lines, best.ids):
            rest = whole_words(rest).rstrip("\r\n")
        rest = without_overlap(rest, after, before[max(before.rfind("\n"), before.rfind("\r")) + 1 :])
        rest = rest if rest.strip() else ""
        word = self._until(best, prompt, self._mixture_of(options.width), first_word(rest)) if rest else best.total
        return Suggestion(rest, math.exp(min(word, 0.0)), math.exp(min(best.total, 0.0)))

    def bits(self, text: str, name: str = "") -> float:
        """The information content of a file's text in bits, each id predicted from those above it."""
        tokenized, total = self.files.tokenize(text, name), 0.0
        for id, logprobs, candidates in scored_places(self.loaded, tokenized, partial(self.sources_above, name)):
            mixed = self.gate.change(candidates, logprobs) if self.gate else logprobs
            total -= float(mixed[id])
        return total / math.log(2)

    def sources_above(self, name: str, above: list[int]) -> Sources:
        """What to copy from below these ids of a file."""
        return self._sources(above, [], name)

    def _prompt(self, text: list[int], below: list[int], header: int) -> list[int]:
        """The ids of a prompt for a cursor between these ids; `header` ids of the text come before its lines."""
        room = self.loaded.context_length - min(LIMIT, self.loaded.context_length // 2)
        below = below[: int(SUFFIX * room)]
        narrow = room < 2 * (len(below) + 3)  # the text above matters more
        if narrow or self._form is None or not any(self.files.pieces[i].strip() for i in below):
            return [*window(text, room)]
        prefix, suffix, middle = self._form.ids
        above = window(text, room - len(below) - 3)
        head = above[:header] if len(above) == len(text) else []
        if self._form.suffix_first:
            return [*head, prefix, suffix, *below, middle, *above[len(head) :]]
        return [*head, prefix, *above[len(head) :], suffix, *below, middle]

    def _sources(self, above: list[int], below: list[int], name: str) -> Sources:
        """What to copy from at a cursor between these ids: that of the last call if the lines are the same."""
        if self._near is None or self._near[:3] != (above, below, name):
            pieces, parts = self.files.pieces, [above, below] if below else [above]
            texts = [TextSource(b"".join(pieces[i] for i in part)) for part in parts]
            near, far = [index_ids(part, len(pieces)) for part in parts], self._far_from(name)
            sources = Sources(near, far.ids, texts, far.texts, self._vocabulary)
            self._near = above, below, name, sources
        return self._near[3]

    def _far_from(self, name: str) -> Far:
        """All files but this one: those in the index that have not changed, and those that have."""
        if self._far is None or self._far[0] != name:
            parts = [far for changed, far in self._changed.items() if changed != name]
            if self.index is not None:
                parts.insert(0, self.index.without({name, *self._changed}))
            ids, texts = ([each for part in parts for each in getattr(part, kind)] for kind in ("ids", "texts"))
            self._far = name, Far(ids, texts)
        return self._far[1]

    def _encode(self, line: bytes) -> tuple[int, ...]:
        return self.files.line(line.decode(errors="ignore"))

    def _ends(self, typed: bytes, lines: int, ids: Sequence[int]) -> bool:
        """Whether these ids have so many line ends, or end the text."""
        data = b"".join(self.files.pieces[i] for i in ids)[len(typed) :]
        return len(split_lines(data.decode(errors="replace"))) > lines or not self.files.pieces[ids[-1]]

    def _search(self, prompt: Sequence[int], copies: Copies, options: CompleteOptions) -> Beam:
        """The most probable ids up to the lines' end, with their probabilities given what is typed."""
        ends = partial(self._ends, copies.typed, options.lines)
        limit = min(LIMIT * options.lines, self.loaded.context_length - len(prompt))
        mixture = self._mixture_of(options.width)
        mixture.begin(copies, self.gate, len(prompt) + limit, options.cancelled)
        best = self._best(mixture, prompt, options.width, limit, ends)
        has_typed = best.ids and not copies.rest([*prompt, *best.ids])
        return best.given(mixture.typed_logprob(prompt)) if has_typed else best

    def _best(
        self, mixture: Mixture, prompt: Sequence[int], width: int, limit: int, ends: Callable[..., bool]
    ) -> Beam:
        """The most probable ids, by one beam or by several up to where one goes on alone."""
        if width == 1:
            return self._decode(mixture, prompt, Beam(), limit, ends)
        beams = beam_search(
            mixture.after,
            prompt,
            width=width,
            max_tokens=min(limit, BEAMED),
            ends=ends,
            decided=partial(self._decided, mixture, prompt),
        )
        if not beams or ends(beams[0].ids):
            return beams[0] if beams else Beam()
        if self._hopeless(mixture, prompt, beams):  # a user may take the first word
            best = max(beams, key=partial(self._word_logprob, prompt, mixture))
            return self._decode(mixture, prompt, best, limit, ends)
        finished = [beam for beam in beams if ends(beam.ids)]
        return max([self._decode(mixture, prompt, beams[0], limit, ends), *finished], key=lambda b: b.total)

    def _decided(self, mixture: Mixture, prompt: Sequence[int], beams: Sequence[Beam]) -> bool:
        """Whether the first beam is far more probable than the next, or hopeless.

        Those without all of what is typed are not comparable: they have yet to lose what others have lost.
        """
        lead = beams[0].total - beams[1].total if len(beams) > 1 else math.inf
        has_typed = not any(mixture.copies.rest([*prompt, *beam.ids]) for beam in beams)
        return has_typed and (lead >= LEAD or self._hopeless(mixture, prompt, beams))

    def _hopeless(self, mixture: Mixture, prompt: Sequence[int], beams: Sequence[Beam]) -> bool:
        """Whether the first of some beams has no prospect, given what is typed, which all have."""
        if any(mixture.copies.rest([*prompt, *beam.ids]) for beam in beams):
            return False
        return beams[0].total < HOPELESS and beams[0].total - mixture.typed_logprob(prompt) < HOPELESS

    def _mixture_of(self, width: int) -> Mixture:
        """The mixture for so many beams. Only a single one uses a compiled step: its weights may be rounded."""
        step = self._find_step() if width == 1 else None
        mixture = self._mixtures.get(width)
        if mixture is None or mixture.logits.cache.step is not step:
            mixture = Mixture(RememberedLogits(self.loaded.model, width, step), self.files)
            self._mixtures[width] = mixture
        return mixture

    def _decode(
        self,
        mixture: Mixture,
        prompt: Sequence[int],
        beam: Beam,
        limit: int,
        ends: Callable[..., bool],
    ) -> Beam:
        """The beam with the most probable ids one by one, until it `ends`, or has a whole word and no prospect."""
        while len(beam.ids) < limit and not (beam.ids and ends(beam.ids)):
            text = self._text(mixture.copies.typed, beam.ids)
            if first_word(text) != text and self._hopeless(mixture, prompt, [beam]):
                break
            best = mixture.after_one([*prompt, *beam.ids], limit - len(beam.ids) - 1).max(-1)
            if not float(best.values) > -math.inf:
                break
            beam = beam.grown(int(best.indices), float(best.values))
        return beam

    def _text(self, typed: bytes, ids: Sequence[int]) -> str:
        """The text of these ids without what is typed."""
        return b"".join(self.files.pieces[i] for i in ids)[len(typed) :].decode(errors="ignore")

    def _until(self, beam: Beam, prompt: Sequence[int], mixture: Mixture, text: str) -> float:
        """The log-probability of the ids that have all of this text behind what is typed, and that it ends there,
        if it ends in an identifier."""
        total, size, end, ids = 0.0, 0, len(mixture.copies.typed) + len(text.encode()), [*prompt]
        for id, logprob in zip(beam.ids, beam.logprobs, strict=True):
            if size >= end:
                break
            total, size, ids = total + logprob, size + len(self.files.pieces[id]), [*ids, id]
        ends_word = size == end and is_word(text.encode()[-1:])
        return total + (mixture.word_end_logprob(ids) if ends_word else 0.0)

    def _word_logprob(self, prompt: Sequence[int], mixture: Mixture, beam: Beam) -> float:
        """The log-probability of the first word; -inf without one."""
        word = first_word(self._text(mixture.copies.typed, beam.ids))
        return self._until(beam, prompt, mixture, word) if word.strip() else -math.inf


def knows_paths(loaded: LoadedModel) -> bool:
    """Whether a model was trained on files with their paths, by its card."""
    trained = trained_text(loaded.card)
    return bool(trained.get("complete") and trained.get("file_headers", True))
