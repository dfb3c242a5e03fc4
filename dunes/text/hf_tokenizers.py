"""Call the `tokenizers` library, and turn its errors and panics into one-line ValueErrors."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import tokenizers
from tokenizers import models

_T = TypeVar("_T")
PARTS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
SEQUENCES = ("normalizers", "pretokenizers", "decoders", "processors")


def call(subject: str, make: Callable[[], _T]) -> _T:
    """The result of `make`. A panic or an error (except OSError) becomes a one-line ValueError that starts with
    `subject`."""
    try:
        return make()
    except BaseException as error:  # a panic in the library is not an Exception
        is_panic = type(error).__name__ == "PanicException"
        if isinstance(error, OSError) or not (is_panic or isinstance(error, Exception)):
            raise
        raise ValueError(f"{subject}: {' '.join(str(error).split())[:600]}") from None


def abbreviate(value: Any) -> str:
    """The value in at most 60 ASCII characters, for a message."""
    return ascii(value)[:60]


def bpe(
    vocab: dict[str, int], merges: Sequence[tuple[str, ...]], place: str = "merges", **settings: Any
) -> models.BPE:
    """A byte-pair model. Raises ValueError for the first of `merges` that does not join two tokens."""
    for i, pair in enumerate(merges):
        if len(pair) != 2 or not vocab.keys() >= {*pair, "".join(pair)}:
            raise ValueError(f"{place}[{i}] is {abbreviate(pair)}; expected two tokens that join to a third one")
    return call(place, lambda: models.BPE(vocab, [(left, right) for left, right in merges], **settings))


def parse(text: str) -> tokenizers.Tokenizer:
    """Parse a tokenizer from the text that `Tokenizer.json` returns. Raises ValueError if the text is damaged."""
    return call("tokenizer.json", lambda: tokenizers.Tokenizer.from_str(text))


def pipeline(inner: tokenizers.Tokenizer) -> dict[str, Any]:
    """The steps that process texts and ids, in the format of tokenizer.json."""
    parts = {name: getattr(inner, name) for name in PARTS}
    return {name: json.loads(part.__getstate__()) for name, part in parts.items() if part is not None}


def steps(content: Mapping[str, Any], part: str) -> Iterator[Mapping[str, Any]]:
    """The steps of `part` (such as "decoder") in order, with nested sequences flattened."""
    stack = [content.get(part)]
    while stack:
        step = stack.pop()
        if isinstance(step, dict):
            lists = [step[key] for key in SEQUENCES if isinstance(step.get(key), list)]
            stack += [inner for entries in lists for inner in reversed(entries)]
            if lists and step.get("type", "Sequence") == "Sequence" and step.keys() <= {"type", *SEQUENCES}:
                continue
            yield step
