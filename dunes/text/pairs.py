"""What byte-pair tokenizers share: letters that stand for bytes, joining by score, words not to be looked up."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise

from tokenizers import AddedToken, Regex, Tokenizer, pre_tokenizers, processors


def _letters() -> dict[int, str]:
    """The printable letter that byte-level BPE writes for each byte, by GPT-2's rule."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}


LETTER = _letters()
BYTE = {letter: byte for byte, letter in LETTER.items()}


def joined(symbols: list[str], score: Callable[[str], float | None]) -> tuple[list[str], tuple[str, str] | None]:
    """What is left after all joins of neighbours, highest score first and then leftmost, and the last join."""
    last = None
    scores = [score(a + b) for a, b in pairwise(symbols)]
    while True:
        best = max((s for s in scores if s is not None), default=None)
        if best is None:
            return symbols, last
        at = scores.index(best)
        last = symbols[at], symbols[at + 1]
        symbols = [*symbols[:at], "".join(last), *symbols[at + 2 :]]
        del scores[at]
        for i in (at - 1, at):
            if 0 <= i < len(scores):
                scores[i] = score(symbols[i] + symbols[i + 1])


def apart(found: Mapping[str, Sequence[str]]) -> list[pre_tokenizers.PreTokenizer]:
    """Cuts words that are spelled like one of `found` where its parts meet: the whole is not looked up then."""
    cuts = []
    for text, parts in found.items():
        ends = [len("".join(parts[:n])) for n in range(1, len(parts))]
        end = next((e for e in ends if text[:e] not in found and text[e:] not in found), None)
        if end is None:
            raise ValueError(f"a tokenizer whose {text!r} cannot be told from plain text is not supported")
        cuts.append(rf"{re.escape(text[:end])}(?={re.escape(text[end:])}\z)")
    return [pre_tokenizers.Split(Regex(rf"\A(?:{'|'.join(cuts)})"), "isolated")] if cuts else []


def add_special(inner: Tokenizer, tokens: Iterable[str], begin: str | None = None) -> None:
    """Make these the special tokens; `begin` is the one that stands in front of a text if asked for."""
    inner.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in tokens])
    if begin is not None:
        special = [(begin, inner.token_to_id(begin))]
        inner.post_processor = processors.TemplateProcessing(
            single=f"{begin} $A", pair=f"{begin} $A {begin}:1 $B:1", special_tokens=special
        )
