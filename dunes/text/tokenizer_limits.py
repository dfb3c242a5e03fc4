"""Limits on an untrusted tokenizer's pipeline: one that expands a text too much is refused before it runs.

The growth of a text is bounded from the settings of each step. Interactions of Unicode rules and patterns are
tested on single characters, step by step.
"""

import json
import string
from base64 import b64decode
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from typing import Any, TypeAlias

import tokenizers
from tokenizers import models

from dunes.text import library

Step: TypeAlias = Mapping[str, Any]

MAX_GROWTH = 100
"""Maximum growth of a text in bytes or ids. Published pipelines stay below 50."""
MAX_STEPS = 100
MAX_ADDED_CHARS = 2_000_000
"""Characters in all added tokens: the library takes 70 bytes for each."""
MAX_SPECIAL_IDS = 1000
"""Special ids added to a text."""
MAX_AFFIX, MAX_WORD = 100, 1000
"""Characters of a prefix or suffix of words, and of words that are looked up by trying all their parts."""
UNICODE_GROWTH = 33
"""Bytes of the longest Unicode normalization of one character, U+FDFA."""


def pipeline(inner: tokenizers.Tokenizer) -> dict[str, Any]:
    """The steps that process texts and ids, in the format of tokenizer.json."""
    parts = {name: getattr(inner, name) for name in ("normalizer", "pre_tokenizer", "post_processor", "decoder")}
    return {name: json.loads(part.__getstate__()) for name, part in parts.items() if part is not None}


def check_expansion(content: Mapping[str, Any]) -> None:
    """Raise ValueError that names the part of a tokenizer.json that expands a text more than MAX_GROWTH.

    Unknown or damaged parts are left to the library to refuse.
    """
    normalizer, cuts, decoder, marks = (
        list(steps(content, part)) for part in ("normalizer", "pre_tokenizer", "decoder", "post_processor")
    )
    _check_growth("normalizer", _chain_growth(normalizer))
    _check_growth("normalizer and pre_tokenizer", _chain_growth([*normalizer, *cuts]))
    _check_growth("decoder", prod(_growth(step) + ("Regex" in str(step.get("pattern"))) for step in decoder))
    _check_templates(marks)
    _check_tokens(content)
    _check_samples(normalizer)


def _check_growth(part: str, growth: float) -> None:
    if growth > MAX_GROWTH:
        raise ValueError(
            f"its {part} can make a text {min(growth, 1e15):,.0f} times as long; {MAX_GROWTH} times is the limit"
        )


def steps(content: Mapping[str, Any], part: str) -> Iterator[Step]:
    """The steps of a part in order, with sequences flattened."""
    stack, count = [content.get(part)], 0
    while stack:
        step = stack.pop()
        if isinstance(step, dict):
            lists = [step[key] for key in SEQUENCES if isinstance(step.get(key), list)]
            stack += [inner for steps in lists for inner in reversed(steps)]
            if lists and step.get("type", "Sequence") == "Sequence" and step.keys() <= {"type", *SEQUENCES}:
                continue
            yield step
        count += 1
        if count + len(stack) > MAX_STEPS:
            raise ValueError(f"its {part} has {count + len(stack):,} steps; {MAX_STEPS} is the limit")


def _chain_growth(steps: Sequence[Step]) -> float:
    """The growth of a text by all steps; factors multiply if a step may match the output of an earlier one."""
    grown: list[float] = []
    for step in steps:
        before = [g for g, earlier in zip(grown, steps, strict=False) if _may_rewrite(step, earlier)]
        grown.append(_growth(step) * max(before, default=1.0))
    return max(grown, default=1.0)


def _may_rewrite(step: Step, earlier: Step) -> bool:
    """Whether a step may change the output of an earlier one: not if its pattern has none of those characters."""
    pattern, written = step.get("pattern"), earlier.get("content")
    sought = pattern.get("String") if isinstance(pattern, dict) and "content" in step else None
    if not (isinstance(sought, str) and isinstance(written, str)):
        return True
    return sought == "" or not set(sought).isdisjoint(written)


SEQUENCES = ("normalizers", "pretokenizers", "decoders", "processors")
TYPES = {"ByteLevel": 2.0, "Metaspace": 4.0, "BPEDecoder": 2.0, "CTC": 2.0}
"""Growth by type: a character for each byte, ▁ for a space or before a character, a space after each character."""


def _growth(step: Step) -> float:
    """The growth of a text in bytes by a step, from all its keys, since old files have no types."""
    growth = TYPES.get(str(step.get("type")), 1.0)
    if isinstance(content := step.get("content"), str) and isinstance(pattern := step.get("pattern"), dict):
        text, size = pattern.get("String"), _size(content)
        growth *= 1 + size if text == "" else max(1, size / (_size(text) if isinstance(text, str) else 1))
    if isinstance(text := step.get("prepend"), str):
        growth *= 1 + _size(text)
    if isinstance(data := step.get("precompiled_charsmap"), str):
        table = b64decode(data)
        end = 4 + int.from_bytes(table[:4], "little")
        if end % 4 or end > len(table):  # the library panics
            raise ValueError(f"its normalizer's precompiled_charsmap has {len(table)} bytes, of {end} or more")
        values = table[end:].split(b"\0")
        growth *= max(1, max(map(len, values)) / UNICODE_GROWTH)
    return growth


def _size(text: str) -> int:
    return len(text.encode(errors="replace"))


def _check_templates(steps: Sequence[Step]) -> None:
    """Raise ValueError for templates that repeat a text, add too many special ids, or make the library panic."""
    ids = 1
    for step in steps:
        special = {name: len(mark["ids"]) for name, mark in step.get("special_tokens", {}).items()}
        for name in ("single", "pair"):
            parts = step.get(name) or []
            marked = [part["SpecialToken"]["id"] for part in parts if "SpecialToken" in part]
            if unknown := next((mark for mark in marked if mark not in special), None):
                raise ValueError(f"its post_processor has {unknown[:60]!a} in {name}, but not in special_tokens")
            if name == "single" and any(part.get("Sequence", {}).get("id") == "B" for part in parts):
                raise ValueError("its post_processor has the second text, B, in single, the template of one text")
            marks = sum(special[mark] for mark in marked)
            ids = max(ids, marks + ids * sum("Sequence" in part for part in parts))
        if ids > MAX_SPECIAL_IDS:
            raise ValueError(f"its post_processor makes {ids:,} ids of one; {MAX_SPECIAL_IDS:,} is the limit")


def _check_tokens(content: Mapping[str, Any]) -> None:
    """Raise ValueError for added tokens, affixes and words whose size takes much memory or time."""
    size = sum(len(token["content"]) for token in content.get("added_tokens") or [])
    if size > MAX_ADDED_CHARS:
        raise ValueError(f"its added_tokens have {size:,} characters; {MAX_ADDED_CHARS:,} is the limit")
    model = content.get("model") or {}
    for key in ("continuing_subword_prefix", "end_of_word_suffix"):
        if len(model.get(key) or "") > MAX_AFFIX:
            raise ValueError(f"its model's {key} has {len(model[key]):,} characters; {MAX_AFFIX} is the limit")
    if (word := model.get("max_input_chars_per_word") or 0) > MAX_WORD:
        raise ValueError(f"its model's max_input_chars_per_word is {word:,}; {MAX_WORD:,} is the limit")


def _check_samples(steps: Sequence[Step]) -> None:
    """Raise ValueError if a normalizer expands single characters, or the output of its own steps, too much."""
    normalizers = list(map(_normalizer_of, steps))
    samples = [(i, text) for i, step in enumerate(steps) for text in _sample_texts(step)]
    for begin, text in [
        *((0, c) for c in string.printable),
        *((i, text) for step_index, text in samples for i in (0, step_index)),
    ]:
        sample = output = 3 * text
        for normalize in normalizers[begin:]:
            output = normalize(output)
            if _size(output) > MAX_GROWTH * _size(sample):
                raise ValueError(
                    f"its normalizer makes {_size(output):,} bytes of {ascii(sample)[:40]}; "
                    f"{MAX_GROWTH} times as many is the limit"
                )


def _sample_texts(step: Step) -> list[str]:
    """The strings that a step matches and writes."""
    pattern = step.get("pattern")
    texts = [step.get("content"), pattern.get("String") if isinstance(pattern, dict) else None]
    return [text[:MAX_AFFIX] for text in texts if isinstance(text, str) and text]


def _normalizer_of(step: Step) -> Callable[[str], str]:
    empty = json.loads(tokenizers.Tokenizer(models.BPE()).to_str())
    subject = f"its normalizer {step.get('type', '')}"
    normalizer = library.parse(json.dumps(empty | {"normalizer": step}), subject).normalizer
    assert normalizer is not None
    normalize: Callable[[str], str] = normalizer.normalize_str
    return normalize
