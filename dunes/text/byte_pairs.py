"""Helpers for byte-pair tokenizers: byte-level characters, merging by score, splitting lookalikes."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import pairwise

from tokenizers import AddedToken, Tokenizer, pre_tokenizers, processors

from dunes.text import library


def _bytes_to_chars() -> dict[int, str]:
    """The printable character that byte-level BPE writes for each byte, by GPT-2's rule."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}


BYTE_TO_CHAR = _bytes_to_chars()
CHAR_TO_BYTE = {char: byte for byte, char in BYTE_TO_CHAR.items()}


def merge_pairs(
    symbols: list[str], score: Callable[[str], float | None]
) -> tuple[list[str], tuple[str, str] | None]:
    """The symbols after all merges of neighbours, highest score first and then leftmost, and the last merge."""
    last = None
    scores = [score(a + b) for a, b in pairwise(symbols)]
    while True:
        best = max((s for s in scores if s is not None), default=None)
        if best is None:
            return symbols, last
        i = scores.index(best)
        last = symbols[i], symbols[i + 1]
        symbols = [*symbols[:i], "".join(last), *symbols[i + 2 :]]
        del scores[i]
        for j in (i - 1, i):
            if 0 <= j < len(scores):
                scores[j] = score(symbols[j] + symbols[j + 1])


def split_lookalikes(lookalikes: Mapping[str, Sequence[str]]) -> list[pre_tokenizers.PreTokenizer]:
    """Splits words that are spelled like a token that merges do not produce, so that they are not looked up whole.

    `lookalikes` maps these tokens to the parts into which merges encode their spelling.
    """
    splits = []
    for text, parts in lookalikes.items():
        ends = [len("".join(parts[:n])) for n in range(1, len(parts))]
        end = next((e for e in ends if text[:e] not in lookalikes and text[e:] not in lookalikes), None)
        if end is None:
            raise ValueError(f"a tokenizer whose {text!r} cannot be told from plain text is not supported")
        splits.append(rf"{re.escape(text[:end])}(?={re.escape(text[end:])}\z)")
    pattern = rf"\A(?:{'|'.join(splits)})"
    return [pre_tokenizers.Split(library.regex(pattern, "special tokens"), "isolated")] if splits else []


def add_special(inner: Tokenizer, tokens: Iterable[str], begin: str | None = None) -> None:
    """Add special tokens; `begin` is put before a text when special tokens are requested."""
    inner.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in tokens])
    if begin is not None:
        special = [(begin, inner.token_to_id(begin))]
        single, pair = [begin, "$A"], [begin, "$A", f"{begin}:1", "$B:1"]
        make = partial(processors.TemplateProcessing, single=single, pair=pair, special_tokens=special)
        inner.post_processor = library.call(f"the token before each text, {library.shown(begin)}", make)
