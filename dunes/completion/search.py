"""The search for the rest of a line: what is most probable by the mixture of model and copies."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dunes.completion.cuts import first_word, whole_words
from dunes.completion.mixture import Mixture
from dunes.data.document import NamedText
from dunes.generate.copying import is_word
from dunes.text.lines import split_lines

LIMIT = 48
"""Tokens of a line at most."""
WIDTH = 3
"""Beams."""
BEAMED, LEAD = 5, 1.5
"""Ids up to which there are several beams, and nats by which one is so far ahead that it goes on alone."""
HOPELESS, LIKELY = -2.3, -1.9
"""Log-probability (nats) of a line below which it is not written to its end, but copied, and that of its first
word from which on it stays."""
LONG, SURE = 10, -1.8
"""Bytes before the cursor that the file itself has had before, from which on a line is copied below SURE."""
REPEATED = math.log(0.4)
"""Of a line that repeats the one above with another name, at least: 30 of 69 were right (docs/log/completion.md,
"Lines that repeat one with another name")."""


@dataclass(frozen=True)
class CompleteOptions:
    """The number of `lines`, of beams (`width`; 1 is greedy), and of suggestions (`alternatives`, up to `width`).

    They end before a string of `stop`, and after `max_tokens`. `cancelled` is asked between two forwards. `files`
    are names and texts to copy from in this request alone.
    """

    lines: int = 1
    width: int = WIDTH
    alternatives: int = 1
    max_tokens: int | None = None
    stop: Sequence[str] = ()
    cancelled: Callable[[], bool] = lambda: False
    files: Sequence[NamedText] = ()

    def __post_init__(self) -> None:
        least = min(self.lines, self.width, self.alternatives, 1 if self.max_tokens is None else self.max_tokens)
        if least < 1 or self.alternatives > self.width:
            raise ValueError(
                f"lines is {self.lines}, width {self.width}, alternatives {self.alternatives} and max_tokens "
                f"{self.max_tokens}; all must be at least 1, and alternatives at most width"
            )
        if "" in self.stop:
            raise ValueError("stop has an empty string, with which every text begins")


DEFAULTS = CompleteOptions()


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


class LineSearch:
    """The search at a cursor behind a prompt and what is typed since. At most `room` ids fit behind the prompt.

    `renamed` is the rest of the line, if it repeats another with another name.
    """

    def __init__(
        self, mixture: Mixture, prompt: Sequence[int], options: CompleteOptions, room: int, renamed: str = ""
    ) -> None:
        self.mixture, self.prompt, self.options, self.renamed = mixture, prompt, options, renamed
        self.pieces = mixture.files.pieces
        self.limit = min(options.max_tokens or LIMIT * options.lines, room)

    @property
    def typed(self) -> bytes:
        """The bytes that the ids have to begin with."""
        return self.mixture.copies.typed

    def beams(self) -> list[Beam]:
        """The most probable ids up to the lines' end, with their probabilities given what is typed."""
        count = self.options.alternatives
        found = [Beam()] if self.options.width == 1 else self._side_by_side()
        if found and not self.ends(found[0]) and self._hopeless(found):  # a user may take the first word
            found.sort(key=self._word_logprob, reverse=True)
            best = [self._decoded(beam) for beam in found[:count]]
        else:
            finished = [beam for beam in found if self.ends(beam)]
            best = sorted({*map(self._decoded, found[:count]), *finished}, key=lambda beam: -beam.total)[:count]
        found = [self._or_copied(self._given(beam)) for beam in best or [Beam()]]
        if (repeating := self._repeating()) is not None:
            found = [beam for beam in found if beam.ids != repeating.ids]
            found.insert(bool(found) and repeating.total < found[0].total, repeating)
        return found[:count]

    def text(self, beam: Beam) -> str:
        """The lines of these ids without what is typed, and without a word at their end that may be a part."""
        text = "".join(split_lines(self._data(beam).decode(errors="ignore"))[: self.options.lines])
        places = [place for stop in self.options.stop if (place := text.find(stop)) >= 0]
        if places:
            text = text[: min(places)]
        elif not self.ends(beam):
            text = whole_words(text.rstrip("\r\n"))
        return text.rstrip("\r\n")

    def logprob(self, beam: Beam, text: str) -> float:
        """The log-probability of the ids that have all of this text behind what is typed, and that an identifier
        at its end goes no further."""
        total, size, end, ids = 0.0, 0, len(self.typed) + len(text.encode()), [*self.prompt]
        for id, logprob in zip(beam.ids, beam.logprobs, strict=True):
            if size >= end:
                break
            total, size, ids = total + logprob, size + len(self.pieces[id]), [*ids, id]
        ends_word = size == end and is_word(text.encode()[-1:])
        return total + (self.mixture.word_end_logprob(ids) if ends_word else 0.0)

    def _side_by_side(self) -> list[Beam]:
        return beam_search(
            self.mixture.after,
            self.prompt,
            width=self.options.width,
            max_tokens=min(self.limit, BEAMED),
            ends=lambda ids: self.ends(Beam(tuple(ids))),
            decided=self._decided,
        )

    def _decoded(self, beam: Beam) -> Beam:
        """The beam with the most probable ids one by one, until it ends, or has a whole word and no prospect."""
        while len(beam.ids) < self.limit and not self.ends(beam):
            text = self._data(beam).decode(errors="ignore")
            if first_word(text) != text and self._hopeless([beam]):
                break
            room = self.limit - len(beam.ids) - 1
            best = self.mixture.after_one([*self.prompt, *beam.ids], room).max(-1)
            if not float(best.values) > -math.inf:
                break
            beam = beam.grown(int(best.indices), float(best.values))
        return beam

    def _or_copied(self, beam: Beam) -> Beam:
        """The beam; if it has no prospect, the line behind the longest match of the text, unless its first word is
        another one than the beam's, which is probable enough."""
        copies = self.mixture.copies
        if self.mixture.gate is None or (beam.ids and (beam.total >= SURE or self._rest(beam))):
            return beam
        if beam.ids and beam.total >= HOPELESS and copies.near_match(self.prompt) < LONG:
            return beam
        if (copied := self._scored(copies.propose(self.prompt, self.limit))) is None:
            return beam
        words = [first_word(self._data(each).decode(errors="ignore")) for each in (beam, copied)]
        is_likely = beam.ids and words[0] != words[1] and self.logprob(beam, words[0]) >= LIKELY
        return beam if is_likely else copied

    def _repeating(self) -> Beam | None:
        """The line that repeats another with another name, if it does."""
        if self.mixture.gate is None or not self.renamed or self.options.lines > 1:
            return None
        line = self.typed + f"{self.renamed}\n".encode()
        ids = self.mixture.copies.sources.vocabulary.encode(line)
        beam = self._scored(ids) if b"".join(self.pieces[i] for i in ids) == line else None
        if beam and beam.total < REPEATED:
            beam = Beam(beam.ids, (REPEATED / len(beam.ids),) * len(beam.ids))
        return beam

    def _scored(self, ids: Sequence[int]) -> Beam | None:
        """The ids of a line with their log-probabilities given what is typed; None without its end."""
        if not ids or len(ids) > self.limit or max(ids) >= len(self.pieces) or not self.ends(Beam(tuple(ids))):
            return None
        beam = Beam()
        for id in ids:
            room = self.limit - len(beam.ids)
            beam = beam.grown(id, float(self.mixture.after_one([*self.prompt, *beam.ids], room)[id]))
        return self._given(beam)

    def _given(self, beam: Beam) -> Beam:
        has_typed = beam.ids and not self._rest(beam)
        return beam.given(self.mixture.typed_logprob(self.prompt)) if has_typed else beam

    def ends(self, beam: Beam) -> bool:
        """Whether these ids have so many line ends, a string to stop at, or the end of the text."""
        text = self._data(beam).decode(errors="replace")
        if len(split_lines(text)) > self.options.lines or any(stop in text for stop in self.options.stop):
            return True
        return bool(beam.ids) and not self.pieces[beam.ids[-1]]

    def _decided(self, beams: Sequence[Beam]) -> bool:
        """Whether the first beam is far more probable than the next, or hopeless.

        Those without all of what is typed are not comparable: they have yet to lose what others have lost.
        """
        lead = beams[0].total - beams[1].total if len(beams) > 1 else math.inf
        return not any(map(self._rest, beams)) and (lead >= LEAD or self._hopeless(beams))

    def _hopeless(self, beams: Sequence[Beam]) -> bool:
        """Whether the first of some beams has no prospect, given what is typed, which all have."""
        if any(map(self._rest, beams)):
            return False
        return beams[0].total < HOPELESS and beams[0].total - self.mixture.typed_logprob(self.prompt) < HOPELESS

    def _rest(self, beam: Beam) -> bytes:
        """The typed bytes that a beam does not have yet."""
        return self.mixture.copies.rest([*self.prompt, *beam.ids])

    def _data(self, beam: Beam) -> bytes:
        """The bytes of the ids without what is typed."""
        return b"".join(self.pieces[i] for i in beam.ids)[len(self.typed) :]

    def _word_logprob(self, beam: Beam) -> float:
        """The log-probability of the first word; -inf without one."""
        word = first_word(self._data(beam).decode(errors="ignore"))
        return self.logprob(beam, word) if word.strip() else -math.inf


# Shapes: V vocabulary.


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
