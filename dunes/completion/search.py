"""Search for the most probable rest of a line under the mixture of model and copies."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from dunes.completion import Suggestion
from dunes.completion.copy_mixture import Mixture
from dunes.completion.text import first_word, whole_words
from dunes.data.document import NamedText
from dunes.generate.copying import is_word
from dunes.text.lines import split_lines

LIMIT = 48
"""Maximum tokens of a line."""
WIDTH = 3
"""Default number of beams."""
BEAMED = 5
"""Number of tokens after which beam search ends and beams continue by greedy decoding."""
LEAD = 1.5
"""Lead (nats) of the best beam over the second beam at which beam search ends."""
HOPELESS = -2.3
"""If a line's log-probability (nats) is below this, decoding stops early, and a copied line may replace the
line."""
NEGLIGIBLE = -4.6
"""Log-probability (nats) of a copied line below which the remaining ids of the line are not evaluated."""
LIKELY = -1.9
"""If a beam's first word has at least this log-probability (nats), a copy with another first word is rejected."""


@dataclass(frozen=True)
class CompleteOptions:
    """Numbers of `lines`, of beams (`width`: 1 for greedy decoding, None for the model's default), and of
    suggestions (`alternatives`).

    A suggestion ends before a string in `stop`, and after at most `max_tokens` tokens. `cancelled` is called
    between two forwards, and ends the search by returning True. `files` are (name, text) pairs to copy from in
    this request only.
    """

    lines: int = 1
    width: int | None = None
    alternatives: int = 1
    max_tokens: int | None = None
    stop: Sequence[str] = ()
    cancelled: Callable[[], bool] = lambda: False
    files: Sequence[NamedText] = ()

    def __post_init__(self) -> None:
        numbers = self.lines, self.width, self.alternatives, self.max_tokens
        if "" in self.stop or any(number is not None and number < 1 for number in numbers):
            raise ValueError(f"no line would be found: stop has an empty string, or one of {numbers} is below 1")

    def limit(self, suggestion: Suggestion, shorten: Callable[[str, int | None], str]) -> Suggestion:
        """The suggestion cut at a stop string, and to `max_tokens` tokens by `shorten(text, max_tokens)`."""
        if ends := [place for stop in self.stop if (place := suggestion.text.find(stop)) >= 0]:
            suggestion = replace(suggestion, text=suggestion.text[: min(ends)], ends_line=False)
        text = shorten(suggestion.text, self.max_tokens)
        is_whole = text == suggestion.text
        return suggestion if is_whole else replace(suggestion, text=whole_words(text), ends_line=False)


DEFAULTS = CompleteOptions()


class Beam(NamedTuple):
    """Ids after the prompt, and the log-probability (nats) of each id; `is_copied` is True for a copied line."""

    ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    is_copied: bool = False

    @property
    def total(self) -> float:
        """Total log-probability of the ids."""
        return sum(self.logprobs)

    def extend(self, id: int, logprob: float) -> "Beam":
        """The beam with one more id."""
        return Beam((*self.ids, id), (*self.logprobs, logprob))

    def condition(self, logprob: float) -> "Beam":
        """The beam conditioned on an event, whose `logprob` is subtracted from the first id's log-probability."""
        first, *rest = self.logprobs
        return Beam(self.ids, (first - logprob, *rest))


class LineSearch:
    """Searches for the most probable lines at a cursor after a prompt and the typed bytes. At most `room` ids fit
    after the prompt."""

    def __init__(self, mixture: Mixture, prompt: Sequence[int], options: CompleteOptions, room: int) -> None:
        self.mixture, self.prompt, self.options = mixture, prompt, options
        self.pieces = mixture.files.pieces
        self.limit = min(options.max_tokens or LIMIT * options.lines, room)

    def beams(self) -> list[Beam]:
        """The most probable beams up to the end of the lines, with log-probabilities given the typed text."""
        count = self.options.alternatives
        beams = [Beam()]
        if (width := self.options.width or WIDTH) > 1:
            most, after = min(self.limit, BEAMED), self.mixture.after
            beams = beam_search(after, self.prompt, width, most, self.ends, self._is_decided)
        if beams and not self.ends(beams[0]) and self._is_hopeless(beams):  # a user may accept the first word
            beams.sort(key=self._word_logprob, reverse=True)
            best = [self._decode(beam) for beam in beams[:count]]
        else:
            finished = [beam for beam in beams if self.ends(beam)]
            best = sorted({*map(self._decode, beams[:count]), *finished}, key=lambda beam: -beam.total)[:count]
        return [self._or_copy(self._condition(beam)) for beam in best or [Beam()]]

    def text(self, beam: Beam) -> str:
        """The text of a beam without the typed part, and without a last word that may be incomplete."""
        text = "".join(split_lines(self._data(beam).decode(errors="ignore"))[: self.options.lines])
        places = [place for stop in self.options.stop if (place := text.find(stop)) >= 0]
        if places:
            text = text[: min(places)]
        elif not self.ends(beam):
            text = whole_words(text.rstrip("\r\n"))
        return text.rstrip("\r\n")

    def logprob(self, beam: Beam, text: str) -> float:
        """Log-probability that this text follows the typed part, and that the last identifier of this text is
        complete."""
        total, size, end, ids = 0.0, 0, len(self.mixture.copies.typed) + len(text.encode()), [*self.prompt]
        for id, logprob in zip(beam.ids, beam.logprobs, strict=True):
            if size >= end:
                break
            total, size, ids = total + logprob, size + len(self.pieces[id]), [*ids, id]
        ends_word = size == end and is_word(text.encode()[-1:])
        return total + (self.mixture.word_end_logprob(ids) if ends_word else 0.0)

    def _decode(self, beam: Beam) -> Beam:
        """Continue a beam greedily until it ends. A hopeless beam stops after its first word, or as soon as a copy
        is certain to replace the beam."""
        while len(beam.ids) < self.limit and not self.ends(beam):
            text = self._data(beam).decode(errors="ignore")
            if self._is_hopeless([beam]) and (first_word(text) != text or self._will_be_copied(beam, text)):
                break
            room = self.limit - len(beam.ids) - 1
            best = self.mixture.after_one([*self.prompt, *beam.ids], room).max(-1)
            if not float(best.values) > -math.inf:
                break
            beam = beam.extend(int(best.indices), float(best.values))
        return beam

    def _or_copy(self, beam: Beam) -> Beam:
        """The beam, or the line after the text's longest match if the beam's log-probability is below HOPELESS.
        The beam is kept if its first word is likely and differs from the copy's first word."""
        if (beam.ids and (beam.total >= HOPELESS or self._uncovered(beam))) or not self._copied:
            return beam
        copy = self.score(self._copied, bounded=True)
        words = [first_word(self._data(candidate).decode(errors="ignore")) for candidate in (beam, copy)]
        is_likely = beam.ids and words[0] != words[1] and self.logprob(beam, words[0]) >= LIKELY
        return beam if is_likely else copy._replace(is_copied=True)

    def _will_be_copied(self, beam: Beam, text: str) -> bool:
        """True if a copy will replace the only beam, however the beam's unfinished last word continues."""
        may_be = self.options.width == 1 and bool(self._copied)
        return may_be and self.logprob(self._condition(beam), text) < LIKELY

    @cached_property
    def _copied(self) -> Sequence[int]:
        """The ids of the line after the text's longest match; empty without a gate or without a line end."""
        ids = self.mixture.copies.propose(self.prompt, self.limit) if self.mixture.gate else ()
        fits = bool(ids) and len(ids) <= self.limit and max(ids) < len(self.pieces)
        return ids if fits and self.ends(Beam(tuple(ids))) else ()

    def score(self, ids: Sequence[int], bounded: bool = False) -> Beam:
        """The beam of these ids, with log-probabilities given the typed text. With `bounded`, once the total is
        below NEGLIGIBLE, further ids get log-probability 0, so the total is an upper bound."""
        beam, is_enough = Beam(), False
        for id in ids:
            room, logprob = self.limit - len(beam.ids), 0.0
            is_enough = is_enough or (bounded and self._is_hopeless([beam], NEGLIGIBLE))
            if not is_enough:
                logprob = float(self.mixture.after_one([*self.prompt, *beam.ids], room)[id])
            beam = beam.extend(id, logprob)
        return self._condition(beam)

    def _condition(self, beam: Beam) -> Beam:
        has_typed = beam.ids and not self._uncovered(beam)
        return beam.condition(self.mixture.typed_logprob(self.prompt)) if has_typed else beam

    def ends(self, beam: Beam) -> bool:
        """True if the beam has `lines` line ends, a stop string, or the end of the text."""
        text = self._data(beam).decode(errors="replace")
        if len(split_lines(text)) > self.options.lines or any(stop in text for stop in self.options.stop):
            return True
        return bool(beam.ids) and not self.pieces[beam.ids[-1]]

    def _is_decided(self, beams: Sequence[Beam]) -> bool:
        """True if the first beam is far more probable than the second, or hopeless.

        False while a beam has not covered the typed text, since such a beam cannot be compared with others.
        """
        lead = beams[0].total - beams[1].total if len(beams) > 1 else math.inf
        return not any(map(self._uncovered, beams)) and (lead >= LEAD or self._is_hopeless(beams))

    def _is_hopeless(self, beams: Sequence[Beam], least: float = math.inf) -> bool:
        """True if the first beam's log-probability is below both HOPELESS and `least`; False while a beam does not
        cover the typed text."""
        least = min(least, HOPELESS)
        if any(map(self._uncovered, beams)):
            return False
        return beams[0].total < least and beams[0].total - self.mixture.typed_logprob(self.prompt) < least

    def _uncovered(self, beam: Beam) -> bytes:
        """Typed bytes that a beam has not covered yet."""
        return self.mixture.copies.uncovered([*self.prompt, *beam.ids])

    def _data(self, beam: Beam) -> bytes:
        """Bytes of a beam's ids without the typed part."""
        return b"".join(self.pieces[i] for i in beam.ids)[len(self.mixture.copies.typed) :]

    def _word_logprob(self, beam: Beam) -> float:
        """Log-probability of a beam's first word; -inf if it has no word."""
        word = first_word(self._data(beam).decode(errors="ignore"))
        return self.logprob(beam, word) if word.strip() else -math.inf


# Shapes: V vocabulary.


def beam_search(
    logprobs: Callable[[Sequence[Sequence[int]]], Sequence[Tensor]],
    prompt: Sequence[int],
    width: int,
    max_tokens: int,
    ends: Callable[[Beam], bool],
    decided: Callable[[Sequence[Beam]], bool] = lambda beams: False,
) -> list[Beam]:
    """Beam search with `width` beams of up to `max_tokens` ids; returns beams, the most probable first.

    `logprobs` returns the next-id log-probabilities (V,) after each of several texts, -inf for forbidden ids.
    `ends` returns True for a finished beam. The search stops when no unfinished beam is more probable than the
    best finished beam, or when `decided` returns True for the beams (the most probable first).
    """
    beams, finished, ranked = [Beam()], list[Beam](), list[Beam]()
    for _ in range(max_tokens):
        rows = logprobs([[*prompt, *beam.ids] for beam in beams])
        extended = [b for beam, row in zip(beams, rows, strict=True) for b in _extensions(beam, row, width)]
        extended = sorted(extended, key=lambda beam: -beam.total)[:width]
        finished += filter(ends, extended)
        best = max((beam.total for beam in finished), default=-torch.inf)
        beams = [beam for beam in extended if beam.total > best]
        ranked = sorted([*finished, *beams], key=lambda beam: -beam.total)
        if not beams or decided(ranked):
            break
    return ranked


def _extensions(beam: Beam, logprobs: Tensor, width: int) -> list[Beam]:
    """The beam extended by each of the `width` most probable next ids."""
    best = logprobs.topk(min(width, len(logprobs)))
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [beam.extend(id, logprob) for id, logprob in pairs if logprob > -torch.inf]
