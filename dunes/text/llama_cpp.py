"""llama.cpp's tokenization of a text, from the vocabulary in a GGUF file alone.

There is no normalizer. Special tokens are searched in the raw text by their type (lstrip and rstrip are set by
name for a few models, not from the file). The text between them is split by byte-level BPE on words of a pattern
(`gpt2`), or by merging the neighbours whose merged text has the highest score (`llama`).
https://github.com/ggml-org/llama.cpp/blob/master/src/llama-vocab.cpp
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from dunes.text.byte_pairs import SPACE, merge_pairs
from dunes.text.gguf_file import byte_level
from dunes.text.sentencepiece import CONTROL, UNKNOWN, USER

Encode = Callable[[str, bool], list[int]]
"""Maps a text to ids; the flag parses special tokens in it, and adds BOS and EOS."""


def encoder(fields: Mapping[str, Any]) -> Encode:
    """llama.cpp's tokenizer for the values below `tokenizer.` in a GGUF file; tokens as bytes or text."""
    tokens = [_text(token) for token in fields["ggml.tokens"]]
    types, by_score = [*map(int, fields["ggml.token_type"])], fields["ggml.model"] == "llama"
    encode: Callable[[str], list[int]]
    if by_score:
        scores = dict(zip(tokens, map(float, fields["ggml.scores"]), strict=True))
        encode = partial(_by_score, scores, {token: i for i, token in enumerate(tokens)})
    else:
        merges = [_text(merge) for merge in fields["ggml.merges"]]
        inner = byte_level(tokens, types, merges, fields["ggml.pre"])
        encode = lambda text: inner.encode(text, add_special_tokens=False).ids
    searched = {
        special: _longest_first(tokens, types, (USER, CONTROL, UNKNOWN) if special else (USER,))
        for special in (False, True)
    }
    prefix = " " if by_score and fields["ggml.add_space_prefix"] else ""

    def ids(text: str, special: bool) -> list[int]:
        parts, before = _split(text, searched[special]), True
        encoded = []
        for part in parts:  # a text after a special token starts like the first
            encoded += [part] if isinstance(part, int) else encode((prefix if before else "") + part)
            before = isinstance(part, int)
        begin = [fields["ggml.bos_token_id"]] if special and fields["ggml.add_bos_token"] else []
        end = [fields["ggml.eos_token_id"]] if special and fields["ggml.add_eos_token"] else []
        return [*begin, *encoded, *end]

    return ids


def _text(data: bytes | str) -> str:
    return data if isinstance(data, str) else data.decode(errors="surrogateescape")


def _longest_first(tokens: Sequence[str], types: Sequence[int], selected: Sequence[int]) -> dict[str, int]:
    pairs = [(token, i) for i, token in enumerate(tokens) if types[i] in selected and token]
    return dict(sorted(pairs, key=lambda pair: -len(_bytes(pair[0]))))


def _bytes(text: str) -> bytes:
    return text.encode(errors="surrogateescape")


def _split(text: str, special: Mapping[str, int]) -> list[str | int]:
    """The text around special tokens, and their ids; each token in turn is searched in the remaining text."""
    parts: list[str | int] = [text]
    for token, i in special.items():
        if token in text:
            parts = [piece for part in parts for piece in _split_at(part, token, i)]
    return [part for part in parts if part != ""]


def _split_at(part: str | int, token: str, i: int) -> list[str | int]:
    return [part] if isinstance(part, int) else [x for text in part.split(token) for x in (i, text)][1:]


def _by_score(scores: Mapping[str, float], vocab: Mapping[str, int], text: str) -> list[int]:
    parts, _ = merge_pairs(list(text.replace(" ", SPACE)), scores.get)
    return [i for part in parts for i in ([vocab[part]] if part in vocab else _byte_ids(part, vocab))]


def _byte_ids(text: str, vocab: Mapping[str, int]) -> list[int]:
    return [vocab.get(f"<0x{b:02X}>", vocab.get(chr(b), -1)) for b in _bytes(text)]
