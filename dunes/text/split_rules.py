r"""Rules that split a text into words for byte-pair tokenizers, with llama.cpp's names.

In a GGUF file, `tokenizer.ggml.pre` is the name of the rule. The patterns of a rule are applied one after another.
Each pattern splits the parts left by earlier patterns, and each match becomes a part. The patterns come from
`llm_tokenizer_bpe` in https://github.com/ggml-org/llama.cpp/blob/master/src/llama-vocab.cpp. Where possible, the
patterns are written as in the original tokenizer; llama.cpp's own regex engine only approximates some of these
forms ((?i:...), \p{Lu}).
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""The pattern of ByteLevel with `use_regex`."""
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_QWEN2 = LLAMA3.replace("{1,3}", "")
_UPPER, _LOWER, _BEFORE = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]", r"[^\r\n\p{L}\p{N}]?"
_SIGNS = rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
_TEKKEN = rf"{_BEFORE}{_UPPER}*{_LOWER}+|{_BEFORE}{_UPPER}+{_LOWER}*|\p{{N}}{_SIGNS}"
_GPT4O = (
    rf"{_BEFORE}{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|{_BEFORE}{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    rf"|\p{{N}}{{1,3}}{_SIGNS}"
)
_DEEPSEEK3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
)
_CASED = (
    "[A-Za-z\xb5\xc0-\xd6\xd8-\xf6\xf8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376\u0377"
    "\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-"
    "\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-"
    "\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d"
    "\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-"
    "\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-"
    "\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2"
    "\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-"
    "\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-"
    "\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943]"
)
"""Letters of most scripts that have upper and lower case."""
_DIGITS = r"\p{N}"
"""One digit."""
_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_LINES = r"[^\n]+|[\n]+"
_PUNCTUATION = r"[\p{P}\$\+<=>\^~\|`]+"


class SplitRule(NamedTuple):
    """Patterns that split a text into words, and how a word becomes tokens.

    With `whole_words`, a word in the vocabulary becomes one token without merges (`ignore_merges`). Merges start
    from a word's bytes. With `metaspace`, each space is replaced by a mark, and merges start from a word's
    characters. With `bos`, a text starts with BOS by default; the GGUF file may override this.
    """

    patterns: tuple[str, ...]
    whole_words: bool = False
    metaspace: bool = False
    bos: bool = False


_GPT2_DIGITS = SplitRule((_DIGITS, GPT2))
_GPT4O_RULE = SplitRule((_GPT4O,))
RULES: Mapping[str, SplitRule] = {
    "gpt-2": SplitRule((GPT2,)),
    "llama-bpe": SplitRule((LLAMA3,), whole_words=True, bos=True),
    "qwen2": SplitRule((_QWEN2,)),
    "tekken": SplitRule((_TEKKEN,), whole_words=True, bos=True),
    "smollm": _GPT2_DIGITS,
    "starcoder": _GPT2_DIGITS,
    "refact": _GPT2_DIGITS,
    "command-r": _GPT2_DIGITS,
    "mpt": SplitRule((GPT2,)),
    "olmo": SplitRule((GPT2,)),
    "dbrx": SplitRule((LLAMA3,)),
    "stablelm2": SplitRule((_QWEN2,)),
    "qwen35": SplitRule(
        (_QWEN2.replace(r"\p{L}+", r"[\p{L}\p{M}]+").replace(r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]"),)
    ),
    "gpt-4o": _GPT4O_RULE,
    "llama4": _GPT4O_RULE,
    "deepseek-v3": SplitRule((r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", _DEEPSEEK3)),
    "deepseek-coder": SplitRule(("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, _DIGITS)),
    "deepseek-llm": SplitRule(
        (
            *("[\r\n]", rf"\s?{_CASED}+", "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"),
            *(r"\s+$", _CJK, r"\p{N}+"),
        )
    ),
    "falcon": SplitRule((_PUNCTUATION, GPT2, "[0-9][0-9][0-9]")),
    "gemma4": SplitRule((_LINES,), metaspace=True, bos=True),
    "default": SplitRule((r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
}
"""Rules by name. If rules are equal, the first is exported for a tokenizer that is not from a GGUF file."""


def split_rule(name: str) -> SplitRule:
    """The rule of this name. Raises ValueError for an unknown name."""
    if name not in RULES:
        raise ValueError(
            f"words are split as in {name[:80]!a}, a rule that is not known here; convert the model from its "
            f"Hugging Face folder instead (known: {', '.join(RULES)})"
        )
    return RULES[name]


def rule_names(steps: Sequence[Mapping[str, Any]], whole_words: bool) -> list[str]:
    """Names of the rules that split like these pre-tokenizers of a tokenizer.json.

    A Split after ByteLevel is ignored, since it only separates text spelled like a special token.
    """
    levels = [i for i, step in enumerate(steps) if step["type"] == "ByteLevel"]
    words = steps[: levels[0] + 1] if levels else steps
    if any(step["type"] != "Split" for step in steps[len(words) :]):
        return []
    rule = SplitRule(_patterns(words), whole_words, metaspace=not levels)
    return [name for name, known in RULES.items() if known._replace(bos=False) == rule]


def _patterns(steps: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """The patterns of these steps; empty if a step cannot be expressed as a pattern."""
    patterns: list[str] = []
    for step in steps:
        match step:
            case {"type": "ByteLevel", "add_prefix_space": False}:
                patterns += [GPT2] * step.get("use_regex", True)
            case {"type": "Digits"}:
                patterns.append(_DIGITS if step["individual_digits"] else rf"{_DIGITS}+")
            case {"type": "Punctuation", "behavior": "Contiguous"}:
                patterns.append(_PUNCTUATION)
            case {"type": "Split", "pattern": {"Regex": pattern}} if _isolates(step):
                patterns.append(pattern)
            case _:
                return ()
    return tuple(patterns)


def _isolates(step: Mapping[str, Any]) -> bool:
    return (step["behavior"], step["invert"]) in (("Isolated", False), ("Removed", True))
