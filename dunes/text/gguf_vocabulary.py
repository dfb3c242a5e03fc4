"""The vocabulary of a GGUF file, as llama.cpp reads it, from a tokenizer.

llama.cpp has two algorithms that serve here. `gpt2` is byte-level BPE on words that a pattern splits off, known by
the pattern's name. `llama` is sentencepiece's: neighbours whose merged text has the highest score are merged,
without splitting. The second one also serves tokenizers trained here, whose merges cross spaces.
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import json
import re
from collections.abc import Iterator, Mapping
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
    model = json.loads(tokenizer.json())["model"]
    if model["type"] != "BPE":
        raise ValueError(f"llama.cpp has no tokenizer of type {model['type']}; train one with bpe")
    by_score = tokenizer.line_separable or tokenizer.byte_decoder.metaspace
    if by_score and not (tokenizer.line_separable or model["byte_fallback"]):
        raise ValueError("the tokenizer has no tokens for bytes, without which llama.cpp ends at unknown text")
    merges = [tuple(m.split(" ")) if isinstance(m, str) else tuple(m) for m in model["merges"]]
    tokens, types = zip(*_tokens(tokenizer, by_score, {"".join(m) for m in merges}, rows), strict=True)
    if len(set(tokens)) < rows:
        raise ValueError("two tokens have the same spelling in llama.cpp's vocabulary, which it cannot tell apart")
    fields: dict[str, Any] = {"ggml.tokens": tokens, "ggml.token_type": types, JSON: tokenizer.json()}
    if by_score:
        fields |= {"ggml.model": "llama", "ggml.scores": _scores(model["vocab"], merges, rows)}
        fields |= {"ggml.add_space_prefix": tokenizer.encode("a") != tokenizer.encode_continuation("a")}
    else:
        fields |= {"ggml.model": "gpt2", "ggml.merges": [" ".join(m) for m in merges]}
        fields |= {"ggml.pre": _pattern_name(tokenizer, model)}
    return fields | _special_fields(tokenizer)


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


def _tokens(tokenizer: Tokenizer, by_score: bool, merged: set[str], rows: int) -> Iterator[tuple[bytes, int]]:
    """The spelling and the type of each token; ids without one are unused."""
    added = tokenizer.inner.get_added_tokens_decoder()
    unknown = getattr(tokenizer.inner.model, "unk_token", None)
    for i in range(rows):
        text = tokenizer.inner.id_to_token(i) if i < tokenizer.vocab else None
        if text is None:
            yield f"[PAD{i}]".encode(), UNUSED
        elif text == unknown:
            yield text.encode(), UNKNOWN
        elif i in added:
            yield text.encode(), CONTROL if added[i].special else USER
        elif not by_score:
            yield text.encode(), NORMAL
        elif tokenizer.line_separable:
            yield _own_token(tokenizer.token_bytes[i])
        elif re.fullmatch("<0x[0-9A-F]{2}>", text):
            yield text.encode(), BYTE
        else:  # a symbol that a user of sentencepiece defined is split off first
            yield text.encode(), NORMAL if text in merged or len(text) == 1 else USER


def _own_token(raw: bytes) -> tuple[bytes, int]:
    """A token of a tokenizer trained here, spelled as by sentencepiece."""
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
    if "eos_token" in ids and (turns := sorted(tokenizer.stops - {tokenizer.eos})):
        fields["ggml.eot_token_id"] = turns[0]
    template = chat_template.template_from_files(tokenizer.extra_files, tokenizer.config_path.parent)
    fields |= {} if template is None else {"chat_template": template}
    return fields | {"ggml.add_bos_token": bool(tokenizer.bos), "ggml.add_eos_token": False}
