"""Call the `tokenizers` library, and turn its errors into one line that names the damaged part.

The library raises plain Exception with messages from Rust, TypeError with several lines, and panics. A panic is
not an Exception, and prints a stack trace before it can be caught; what would panic is checked here before.
"""

import json
import re
from base64 import b64decode
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import tokenizers
from tokenizers import Regex, models

_T = TypeVar("_T")
PARTS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
SEQUENCES = ("normalizers", "pretokenizers", "decoders", "processors")
_INTERNAL = "untagged enum|invalid (type|value|length)|Error\\(|index|slice|unwrap"
"""Words of messages about the library's own types, which do not help with a file."""


def call(subject: str, make: Callable[[], _T]) -> _T:
    """The result of `make`. Any error in it becomes a one-line ValueError that starts with the subject."""
    try:
        return make()
    except BaseException as error:
        if not _is_failure(error):
            raise
        raise ValueError(f"{subject}: {_reason(error)}") from None


def _is_failure(error: BaseException) -> bool:
    """True for an error or a panic (which is not an Exception), but not for an interrupt or a disk error."""
    is_error = isinstance(error, Exception) and not isinstance(error, OSError)
    return is_error or type(error).__name__ == "PanicException"


def _reason(error: BaseException) -> str:
    """The message of an error in one line, without the library's internals."""
    text = re.sub(r" at line \d+ column \d+", "", " ".join(str(error).split()))
    if type(error) is ValueError and "PyO3" not in text:
        return text
    if field := re.match("missing field `(.*)`", text) or (
        isinstance(error, KeyError) and re.match("'(.*)'", text)
    ):
        return f"has no {field[1]}"
    if "TextInputSequence" in text:
        return "the text has half of a surrogate pair"
    if (isinstance(error, Exception) and type(error) is not Exception) or re.search(_INTERNAL, text):
        return "a setting is missing, or not what the tokenizers library expects"
    return text[:300]


def abbreviate(value: Any) -> str:
    """The value in at most 60 ASCII characters, for a message."""
    return ascii(value)[:60]


def item(container: Any, key: str, value_type: type[_T], place: str = "") -> _T:
    """The value of a key of a file. Raises ValueError that names `place` and key if it is missing or mistyped."""
    if not isinstance(container, Mapping):
        raise ValueError(f"{place.rstrip('.') or 'the file'} is {abbreviate(container)}; expected an object")
    if type(value := container.get(key)) is value_type:
        return value
    state = f"is {abbreviate(value)}" if key in container else "is missing"
    raise ValueError(f"{place}{key} {state}; expected {_NOUNS.get(value_type, 'a list of numbers')}")


_NOUNS = {str: "a text", int: "a number", bool: "true or false", dict: "an object", list: "a list"}


def regex(pattern: str, place: str) -> Regex:
    """A compiled pattern; `place` names its origin. Raises ValueError for an invalid pattern."""
    return call(f"{place} {abbreviate(pattern)}", lambda: Regex(pattern))


def bpe(
    vocab: dict[str, int], merges: Sequence[tuple[str, ...]], place: str = "merges", **settings: Any
) -> models.BPE:
    """A byte-pair model. Raises ValueError for the first of `merges` that does not join two tokens."""
    for i, pair in enumerate(merges):
        if len(pair) != 2 or not vocab.keys() >= {*pair, "".join(pair)}:
            raise ValueError(f"{place}[{i}] is {abbreviate(pair)}; expected two tokens that join to a third one")
    return call(place, lambda: models.BPE(vocab, [(left, right) for left, right in merges], **settings))


def parse(text: str) -> tokenizers.Tokenizer:
    """The tokenizer in a text written by `Tokenizer.json`. Raises ValueError if the text was damaged since."""
    return call("tokenizer.json", lambda: tokenizers.Tokenizer.from_str(text))


def pipeline(inner: tokenizers.Tokenizer) -> dict[str, Any]:
    """The steps that process texts and ids, in the format of tokenizer.json."""
    parts = {name: getattr(inner, name) for name in PARTS}
    return {name: json.loads(part.__getstate__()) for name, part in parts.items() if part is not None}


def steps(content: Mapping[str, Any], part: str) -> Iterator[Mapping[str, Any]]:
    """The steps of a part in order, with sequences flattened."""
    stack = [content.get(part)]
    while stack:
        step = stack.pop()
        if isinstance(step, dict):
            lists = [step[key] for key in SEQUENCES if isinstance(step.get(key), list)]
            stack += [inner for entries in lists for inner in reversed(entries)]
            if lists and step.get("type", "Sequence") == "Sequence" and step.keys() <= {"type", *SEQUENCES}:
                continue
            yield step


def _check_steps(content: Mapping[str, Any]) -> None:
    """Raise ValueError for steps that make the library panic when it loads them or when it encodes a text."""
    for step in steps(content, "normalizer"):
        if isinstance(data := step.get("precompiled_charsmap"), str):
            table = b64decode(data)
            end = 4 + int.from_bytes(table[:4], "little")
            if end % 4 or end > len(table):
                raise ValueError(f"its normalizer's precompiled_charsmap has {len(table)} bytes, of {end} or more")
    for step in steps(content, "post_processor"):
        for name in ("single", "pair"):
            parts = step.get(name) or []
            marks = [part["SpecialToken"]["id"] for part in parts if "SpecialToken" in part]
            if unknown := next((mark for mark in marks if mark not in step.get("special_tokens", {})), None):
                raise ValueError(f"its post_processor has {unknown[:60]!a} in {name}, but not in special_tokens")
            if name == "single" and any(part.get("Sequence", {}).get("id") == "B" for part in parts):
                raise ValueError("its post_processor has the second text, B, in single, the template of one text")


def parse_untrusted(content: Mapping[str, Any], text: str) -> tokenizers.Tokenizer:
    """The tokenizer in `text`, which is a tokenizer.json; `content` is the same file, parsed.

    Raises ValueError if the library does not load it, or would panic when it encodes a text.
    """
    try:
        _check_steps(content)
        return tokenizers.Tokenizer.from_str(text)
    except BaseException as error:
        if type(error) is ValueError or not _is_failure(error):
            raise
        raise ValueError(_reason(error)) from None


def text(data: bytes, place: str) -> str:
    """Decode a text from a file as UTF-8. Raises ValueError that names its `place` if it is not UTF-8."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise ValueError(f"{place} is {data[:20]!r}; expected UTF-8") from None
