"""The vocabulary of a GGUF file, as llama.cpp reads it, from a tokenizer.

llama.cpp has two algorithms that serve here. `gpt2` is byte-level BPE on words that a pattern splits off, known by
the pattern's name. `llama` is sentencepiece's: neighbours whose merged text has the highest score are merged,
without splitting. The second one also serves tokenizers trained here, whose merges cross spaces.
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import json
from collections.abc import Mapping
from typing import Any

from dunes.text import chat_template, tokenizer_limits
from dunes.text.byte_decoder import SPACE
from dunes.text.gguf_file import JSON, PATTERNS, WHOLE_WORDS
from dunes.text.sentencepiece import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER
from dunes.text.tokenizer import Tokenizer


def vocabulary_fields(tokenizer: Tokenizer, rows: int) -> dict[str, Any]:
    """The values below `tokenizer.` in a GGUF file, for an embedding of `rows` rows.

    Raises ValueError for a tokenizer that llama.cpp has no algorithm for.
    """
    content = json.loads(tokenizer.json())
    if content["model"]["type"] != "BPE":
        raise ValueError(f"llama.cpp has no tokenizer of type {content['model']['type']}; train one with bpe")
    pattern = None if _merges_by_score(tokenizer) else _pattern_name(tokenizer, content["model"])
    tokens, types = zip(*(_token(tokenizer, content, i) for i in range(rows)), strict=True)
    if len(set(tokens)) < rows:
        raise ValueError("two tokens have the same spelling in llama.cpp's vocabulary, which it cannot tell apart")
    merges = [tuple(m.split(" ")) if isinstance(m, str) else tuple(m) for m in content["model"]["merges"]]
    fields: dict[str, Any] = {"ggml.tokens": tokens, "ggml.token_type": types, JSON: tokenizer.json()}
    if pattern is None:
        fields |= {"ggml.model": "llama", "ggml.scores": _scores(content["model"]["vocab"], merges, rows)}
        fields |= {"ggml.add_space_prefix": tokenizer.encode("a") != tokenizer.encode_continuation("a")}
    else:
        fields |= {"ggml.model": "gpt2", "ggml.pre": pattern, "ggml.merges": [" ".join(m) for m in merges]}
    return fields | _special_fields(tokenizer)


def _merges_by_score(tokenizer: Tokenizer) -> bool:
    return tokenizer.line_separable or tokenizer.byte_decoder.metaspace


def _pattern_name(tokenizer: Tokenizer, model: Mapping[str, Any]) -> str:
    steps = list(tokenizer_limits.steps(tokenizer_limits.pipeline(tokenizer.inner), "pre_tokenizer"))
    last = next((i for i, step in enumerate(steps) if step["type"] == "ByteLevel"), len(steps))
    words, level = steps[:last], steps[last] if last < len(steps) else {}
    patterns = [step.get("pattern", {}).get("Regex", step["type"]) for step in words] or [""]
    name = next((name for name, pattern in PATTERNS.items() if [pattern] == patterns), None)
    plain = level.get("use_regex") is (patterns == [""]) and not level.get("add_prefix_space")
    if name is None or not plain or bool(model["ignore_merges"]) != (name in WHOLE_WORDS):
        raise ValueError(f"the tokenizer splits text in another way than llama.cpp's {', '.join(PATTERNS)}")
    return name


def _token(tokenizer: Tokenizer, content: Mapping[str, Any], i: int) -> tuple[bytes, int]:
    """The spelling and the type of a token; ids without one are unused."""
    text = tokenizer.inner.id_to_token(i) if i < tokenizer.vocab else None
    if text is None:
        return f"[PAD{i}]".encode(), UNUSED
    if text == content["model"]["unk_token"]:
        return text.encode(), UNKNOWN
    if (added := tokenizer.inner.get_added_tokens_decoder().get(i)) is not None:
        return text.encode(), CONTROL if added.special else USER
    if not _merges_by_score(tokenizer):
        return text.encode(), NORMAL
    if not tokenizer.line_separable:
        is_byte = content["model"]["byte_fallback"] and len(tokenizer.token_bytes[i]) == 1 and text[:3] == "<0x"
        return text.encode(), BYTE if is_byte else NORMAL
    raw = tokenizer.token_bytes[i]
    if len(raw) == 1 and raw >= b"\x80":
        return f"<0x{raw[0]:02X}>".encode(), BYTE
    return raw.replace(b" ", SPACE.encode()), NORMAL


def _scores(vocab: Mapping[str, int], merges: list[tuple[str, ...]], rows: int) -> list[float]:
    """A score for each token: the earlier its merge, the higher."""
    scores = [0.0] * rows
    for rank, parts in reversed(list(enumerate(merges))):
        scores[vocab["".join(parts)]] = -1.0 - rank
    return scores


def _special_fields(tokenizer: Tokenizer) -> dict[str, Any]:
    """Special ids, whether BOS is put before a text, and the chat template."""
    ids = {key: tokenizer.token_id(text) for key, text in tokenizer.special_tokens_map.items()}
    names = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding"}
    fields: dict[str, Any] = {f"ggml.{names[key]}_token_id": i for key, i in ids.items()}
    if turns := sorted(tokenizer.stops - {tokenizer.eos}):
        fields["ggml.eot_token_id"] = turns[0]
    template = chat_template.template_from_files(tokenizer.extra_files, tokenizer.config_path.parent)
    fields |= {} if template is None else {"chat_template": template}
    return fields | {"ggml.add_bos_token": bool(tokenizer.bos), "ggml.add_eos_token": False}
