"""Write a tokenizer's vocabulary for a GGUF file, and check that llama.cpp computes the same ids from it.

Two of llama.cpp's algorithms are used. `gpt2` splits text into words by a named pattern, then uses byte-level BPE.
`llama` is sentencepiece's algorithm: text is not split, and the neighbours whose merged text has the highest score
are merged first. `llama` also serves tokenizers trained here, whose merges cross spaces.
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import json
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import tokenizers
from tokenizers import normalizers

from dunes.text import chat_template, hf_tokenizers
from dunes.text.byte_pairs import SPACE, merge_pairs
from dunes.text.gguf_file import BYTE_PAIRS, JSON, byte_pairs
from dunes.text.sentencepiece import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER
from dunes.text.split_rules import RULES, rule_names
from dunes.text.tokenizer import Tokenizer


def vocabulary_fields(tokenizer: Tokenizer, rows: int) -> dict[str, Any]:
    """The values whose keys start with `tokenizer.` in a GGUF file, for an embedding with `rows` rows.

    Raises ValueError if llama.cpp has no algorithm for the tokenizer, or would produce other ids. Warns if ids may
    differ for text that is not in NFC, for spaces around special tokens, or for combining marks and capitals.
    """
    content = json.loads(tokenizer.json())
    model = content["model"]
    if model["type"] != "BPE":
        raise ValueError(f"a tokenizer of type {model['type']} cannot be written for llama.cpp; train with bpe")
    metaspace = tokenizer.byte_decoder.metaspace
    by_score = tokenizer.line_separable or (metaspace and tokenizer.split_rule not in BYTE_PAIRS)
    merges = [tuple(m.split(" ")) if isinstance(m, str) else tuple(m) for m in model["merges"]]
    tokens, types = zip(*_tokens(tokenizer, by_score, {"".join(m) for m in merges}, rows), strict=True)
    if len(set(tokens)) < rows:
        raise ValueError("two tokens would have the same spelling in llama.cpp's vocabulary")
    fields: dict[str, Any] = {"ggml.tokens": tokens, "ggml.token_type": types, JSON: tokenizer.json()}
    if by_score:
        spelled = {*tokens, b" "}  # llama.cpp never looks up a space as a byte
        missing = sum(spelled.isdisjoint((b"<0x%02X>" % b, bytes([b][: b < 128]))) for b in range(256))
        if missing or not (tokenizer.line_separable or model["byte_fallback"]):
            raise ValueError(
                f"the tokenizer has no tokens for bytes ({missing} of 256 are missing, byte_fallback is "
                f"{model['byte_fallback']}), without which llama.cpp aborts on unknown text"
            )
        fields |= {"ggml.model": "llama", "ggml.scores": _scores(model["vocab"], merges, rows)}
        fields |= {"ggml.add_space_prefix": tokenizer.encode("a") != tokenizer.encode_continuation("a")}
    else:
        fields |= {"ggml.model": BYTE_PAIRS[metaspace], "ggml.merges": [" ".join(m) for m in merges]}
        fields |= {"ggml.pre": _rule_name(tokenizer, bool(model["ignore_merges"]))}
    fields |= _special_fields(tokenizer)
    _check_ids(tokenizer, fields)
    return fields


TEXTS = (
    *("", " ", "  ", " a", "a ", "  a  b   c ", "\t", "\ta\t\tb", "\n", "\r\n", "a\r\nb\n\n c\r", " " * 200 + "x"),
    *("Hello, World! HELLO", "I'll DON'T", "CamelCaseXML_2 snake", "``a'' \u201cb\u201d \u2026", "f(x)!=[1]==>y;"),
    *("e\u0301 \xe9 A\u030a \xc5 \u212b", "\ufb01 \uff21\uff11 \u2460 \xbd \uff71"),
    *("\u1e9e\xdf \u0130\u0131\u017f", "\u0391\u03b1 \u041f\u0440", "\u6f22\u5b57\u304b\u306a \ud55c\uad6d"),
    *("\U0001f469\u200d\U0001f4bb\U0001f1e9\U0001f1ea", "\U0001f600\ufe0f", "0 12 345 6789 3.14e-10 1,000"),
    *("\u0939\u093f \u0e44\u0e17 \u0627\u0644", "\u0661\u0662 \u2167 \xb2", "\0a\x01\x7f\x85"),
    *("\ufeff\ufffd\uffff\U0010ffff\ue000", "\xa0\u3000\u2028\u200b"),
    *("a" * 200, "\u2581a \u2581", "<s> </s>a", "##a a</w>"),
)
"""Texts that tokenizers split and normalize differently: spaces, case, accents, widths, scripts."""
RAW = "surrogateescape"
"""Codec error handler for tokens that are not UTF-8."""
SAMPLES = 400
"""Approximate number of tokens of the vocabulary whose texts are encoded for comparison."""
SPECIAL = 40
"""Maximum number of special tokens whose texts are encoded for comparison."""


def _check_ids(tokenizer: Tokenizer, fields: Mapping[str, Any]) -> None:
    """Raise ValueError unless llama.cpp's algorithm produces the tokenizer's ids from `fields` alone."""
    encode, inner = encoder(fields), hf_tokenizers.parse(tokenizer.json())
    begin, (_, end) = tokenizer.bos, tokenizer.added_ids
    tokens = zip(fields["ggml.tokens"], fields["ggml.token_type"], strict=True)
    special = [token.decode() for token, type in tokens if type in (USER, CONTROL, UNKNOWN)]
    special += _joined_bytes(fields) if tokenizer.line_separable else []
    texts: list[str] = []
    for text in _texts(tokenizer, inner, special):
        text_ids = hf_tokenizers.call(
            "the tokenizer fails", partial(inner.encode, text, add_special_tokens=False)
        ).ids
        for parse, expected in ((False, tokenizer.encode(text)), (True, [*begin, *text_ids, *end])):
            actual = encode(text, parse)
            if actual == expected or _same_text(tokenizer, text, actual, expected):
                continue
            if not _moves_spaces(tokenizer, text, actual, expected, special):
                ids = f"{actual[:9]}, but the tokenizer as {expected[:9]}"
                raise ValueError(f"llama.cpp would read {ascii(text)[:60]} as ids {ids}; export with --to hf")
            texts.append(text)
    if texts:
        warnings.warn(f"llama.cpp puts other spaces around special tokens, as in {texts[0][:60]!a}", stacklevel=4)


def _joined_bytes(fields: Mapping[str, Any]) -> list[str]:
    """Byte tokens such as `<0x0A>` that llama.cpp may produce when it joins two tokens."""
    vocab: set[bytes] = {*fields["ggml.tokens"]}
    spelled = [t for t, type in zip(fields["ggml.tokens"], fields["ggml.token_type"], strict=True) if type == BYTE]
    return [t.decode() for t in spelled if any({t[:i], t[i:]} <= vocab for i in range(1, len(t)))]


def _same_text(tokenizer: Tokenizer, text: str, actual: list[int], expected: list[int]) -> bool:
    """True if ids differ only because llama.cpp merges characters and a tokenizer trained here merges bytes."""
    if not tokenizer.line_separable or text.isascii():
        return False
    return SPACE in text or _text_bytes(tokenizer, actual) == _text_bytes(tokenizer, expected)  # SPACE is decoded


def _moves_spaces(
    tokenizer: Tokenizer, text: str, actual: list[int], expected: list[int], special: list[str]
) -> bool:
    """True if the ids differ only in spaces around special tokens, since llama.cpp starts a new text there."""
    texts = {_text_bytes(tokenizer, ids).replace(b" ", b"") for ids in (actual, expected)}
    return tokenizer.byte_decoder.metaspace and len(texts) == 1 and any(token in text for token in special)


def _text_bytes(tokenizer: Tokenizer, ids: list[int]) -> bytes:
    table = tokenizer.token_bytes
    return b"".join(table[i] or b"<|%d|>" % i for i in ids if i < len(table))


def _texts(tokenizer: Tokenizer, inner: tokenizers.Tokenizer, special: list[str]) -> list[str]:
    """Test texts: TEXTS, single tokens, nine tokens concatenated, and special tokens alone and inside text. All
    texts are NFC-normalized if the tokenizer normalizes to NFC."""
    samples = [data.decode(errors="ignore") for data in tokenizer.token_bytes[:: tokenizer.vocab // SAMPLES + 1]]
    joined = ["".join(samples[i : i + 9]) for i in range(0, len(samples), 9)]
    in_context = [text for t in special[:SPECIAL] for text in (t, f"a{t}b", f" {t} \n{t}{t} b")]
    texts = [*TEXTS, *samples, *joined, *in_context]
    steps = hf_tokenizers.steps(hf_tokenizers.pipeline(inner), "normalizer")
    if not any(step["type"] == "NFC" for step in steps):
        return texts
    warnings.warn("llama.cpp does not change text to NFC: decomposed accents get other ids", stacklevel=5)
    return [*map(normalizers.NFC().normalize_str, texts)]


def _rule_name(tokenizer: Tokenizer, whole_words: bool) -> str:
    steps = list(hf_tokenizers.steps(hf_tokenizers.pipeline(tokenizer.inner), "pre_tokenizer"))
    names = rule_names(steps, whole_words)
    if not names:
        raise ValueError(
            f"the tokenizer's pre_tokenizer ({', '.join(step['type'] for step in steps)}), with ignore_merges "
            f"{whole_words}, splits text in another way than llama.cpp's {', '.join(RULES)}; export with "
            "--to hf"
        )
    name = tokenizer.split_rule if tokenizer.split_rule in names else names[0]
    if any(r"\p{Lu}" in pattern for pattern in RULES[name].patterns):
        warnings.warn(
            f"with {name}, llama.cpp ends words at combining marks, not at capitals beyond ASCII", stacklevel=4
        )
    return name


def _tokens(tokenizer: Tokenizer, by_score: bool, merged: set[str], rows: int) -> Iterator[tuple[bytes, int]]:
    """Yield the spelling and type of each of `rows` ids; ids without a token have the type UNUSED."""
    added = tokenizer.inner.get_added_tokens_decoder()
    unknown = getattr(tokenizer.inner.model, "unk_token", None)
    for i in range(rows):
        text = tokenizer.inner.id_to_token(i) if i < tokenizer.vocab else None
        if text is None:
            end = "\n" if tokenizer.line_separable else ""  # no merge produces text with line ends
            yield f"{end}[PAD{i}]{end}".encode(), UNUSED
        elif text == unknown:
            yield text.encode(), UNKNOWN
        elif i in added:
            yield text.encode(), CONTROL if added[i].special else USER
        elif tokenizer.line_separable:
            yield _own_token(tokenizer.token_bytes[i])
        elif tokenizer.byte_decoder.byte_fallback and re.fullmatch("<0x[0-9A-F]{2}>", text):
            yield text.encode(), BYTE
        elif not by_score:
            yield text.encode(), NORMAL
        else:  # sentencepiece splits off a user-defined symbol first
            yield text.encode(), NORMAL if text in merged or len(text) == 1 else USER


def _own_token(raw: bytes) -> tuple[bytes, int]:
    """The sentencepiece spelling and type of a token, given its bytes in a tokenizer trained here."""
    if len(raw) == 1 and raw >= b"\x80":
        return f"<0x{raw[0]:02X}>".encode(), BYTE
    return raw.replace(b" ", SPACE.encode()), NORMAL


def _scores(vocab: Mapping[str, int], merges: list[tuple[str, ...]], rows: int) -> list[float]:
    """The score of each token; tokens of earlier merges have higher scores."""
    scores = [0.0] * rows
    for rank, parts in reversed(list(enumerate(merges))):
        scores[vocab["".join(parts)]] = -1.0 - rank
    return scores


def _special_fields(tokenizer: Tokenizer) -> dict[str, Any]:
    """Special ids, flags for BOS and EOS around a text, and the chat template."""
    ids = {key: tokenizer.token_id(text) for key, text in tokenizer.special_tokens_map.items()}
    begin, (_, end) = tokenizer.bos, tokenizer.added_ids
    if len(begin) > 1 or end not in ([], [ids.get("eos_token")]):
        added = [tokenizer.inner.id_to_token(i) for i in (begin if len(begin) > 1 else end)]
        raise ValueError(
            f"the tokenizer's post_processor adds {added}, llama.cpp only BOS and EOS; export with --to hf"
        )
    ids |= {"bos_token": begin[0]} if begin else {}
    names = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding"}
    fields: dict[str, Any] = {f"ggml.{names[key]}_token_id": i for key, i in ids.items()}
    if "eos_token" in ids and (turns := sorted(tokenizer.stops - {tokenizer.eos})):
        fields["ggml.eot_token_id"] = turns[0]
    template = chat_template.template_from_files(tokenizer.extra_files, tokenizer.config_path.parent)
    fields |= {} if template is None else {"chat_template": template}
    return fields | {"ggml.add_bos_token": bool(begin), "ggml.add_eos_token": bool(end)}


# --- llama.cpp's tokenization: https://github.com/ggml-org/llama.cpp/blob/master/src/llama-vocab.cpp


def encoder(fields: Mapping[str, Any]) -> Callable[[str, bool], list[int]]:
    """llama.cpp's tokenizer for these `vocabulary_fields`: a function that maps a text and a flag to ids.

    If the flag is True, special tokens in the text are parsed, and BOS and EOS are added. User-defined tokens are
    always parsed. The text is not normalized. (llama.cpp supports lstrip and rstrip only for a few named models.)
    """
    tokens, types = [token.decode(errors=RAW) for token in fields["ggml.tokens"]], fields["ggml.token_type"]
    encode: Callable[[str], list[int]]
    if by_score := fields["ggml.model"] == "llama":
        scores = dict(zip(tokens, fields["ggml.scores"], strict=True))
        encode = partial(_by_score, scores, {token: i for i, token in enumerate(tokens)})
    else:
        inner = byte_pairs(tokens, types, fields["ggml.merges"], fields["ggml.pre"])
        encode = lambda text: inner.encode(text, add_special_tokens=False).ids
    special_ids = [i for i, type in enumerate(types) if type in (USER, CONTROL, UNKNOWN) and tokens[i]]
    special_ids.sort(key=lambda i: -len(fields["ggml.tokens"][i]))
    searched = {flag: {tokens[i]: i for i in special_ids if flag or types[i] == USER} for flag in (False, True)}
    prefix = " " if by_score and fields["ggml.add_space_prefix"] else ""

    def ids(text: str, special: bool) -> list[int]:
        parts, before = _split(text, searched[special]), True
        encoded = []
        for part in parts:  # text after a special token starts like the first text
            encoded += [part] if isinstance(part, int) else encode((prefix if before else "") + part)
            before = isinstance(part, int)
        begin = [fields["ggml.bos_token_id"]] if special and fields["ggml.add_bos_token"] else []
        end = [fields["ggml.eos_token_id"]] if special and fields["ggml.add_eos_token"] else []
        return [*begin, *encoded, *end]

    return ids


def _split(text: str, special: Mapping[str, int]) -> list[str | int]:
    """Split a text at special tokens, in the order of `special`; returns the tokens' ids and the texts between
    them."""
    parts: list[str | int] = [text]
    for token, i in ((token, i) for token, i in special.items() if token in text):
        pieces = ([part] if isinstance(part, int) else re.split(f"({re.escape(token)})", part) for part in parts)
        parts = [i if piece == token else piece for part in pieces for piece in part]
    return [part for part in parts if part != ""]


def _by_score(scores: Mapping[str, float], vocab: Mapping[str, int], text: str) -> list[int]:
    parts, _ = merge_pairs(list(text.replace(" ", SPACE)), scores.get)
    return [i for part in parts for i in ([vocab[part]] if part in vocab else _byte_ids(part, vocab))]


def _byte_ids(text: str, vocab: Mapping[str, int]) -> list[int]:
    return [vocab.get(f"<0x{b:02X}>", vocab.get(chr(b), -1)) for b in text.encode(errors=RAW)]
