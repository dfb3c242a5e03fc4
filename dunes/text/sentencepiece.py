"""Convert a sentencepiece `tokenizer.model` (LLaMA 1 and 2, Mistral v1 to v7) for the `tokenizers` library.

The file is a protobuf message; only the fields that determine ids are read here
(https://github.com/google/sentencepiece/blob/master/src/sentencepiece_model.proto,
https://protobuf.dev/programming-guides/encoding/). For BPE, sentencepiece merges the two neighbours whose merged
piece has the highest score; if scores are equal, the leftmost pair is merged first. A piece can be produced only
by the last merge of its own encoding, so one merge per piece, ordered by score, gives the same ids. Unigram models
and models that normalize characters, which LLaMA and Mistral do not use, raise ValueError.
"""

import math
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers

from dunes.text import hf_tokenizers
from dunes.text.byte_pairs import SPACE, add_special, merge_pairs, split_lookalikes
from dunes.units import plural

MAX_PIECE = 512
"""Maximum bytes of a piece, since the time to find its merges is quadratic in its length."""

UNIGRAM, BPE = 1, 2
NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = range(1, 7)
_MARK = " "
"""Placeholder for the dummy prefix, used until the spaces of the text are replaced by `SPACE`."""


@dataclass(frozen=True)
class Piece:
    """One entry of the vocabulary."""

    text: str
    score: float
    type: int


@dataclass(frozen=True)
class Model:
    """The settings that determine the ids of a text."""

    pieces: tuple[Piece, ...]
    byte_fallback: bool
    bos: str
    add_dummy_prefix: bool
    remove_extra_whitespaces: bool

    def texts(self, *types: int) -> list[str]:
        """The texts of all pieces of these types."""
        return [p.text for p in self.pieces if p.type in types]


def convert(data: bytes) -> tokenizers.Tokenizer:
    """A tokenizer with the same ids as sentencepiece, from the bytes of its file.

    Control symbols (`<s>`, `[INST]`) are special tokens. If special tokens are requested, a text starts with
    `<s>`. For an invalid file or an unsupported setting, raises an error that does not name the file.
    """
    return build(read(data))


def build(model: Model) -> tokenizers.Tokenizer:
    """The tokenizer of a checked model."""
    inner = tokenizers.Tokenizer(_bpe(model))
    inner.normalizer = _normalizer(model)
    inner.pre_tokenizer = _pre_tokenizer(model)
    inner.decoder = _decoder(model)
    begin = model.bos if model.bos in model.texts(CONTROL) else None
    add_special(inner, model.texts(UNKNOWN, CONTROL), begin)
    return inner


# --- the file


def read(data: bytes) -> Model:
    """The model in the file's bytes. Raises errors as `convert` does."""
    pieces: list[Piece] = []
    messages = {2: b"", 3: b"", 5: b""}
    for number, value in _fields(data):
        if number == 1:
            pieces.append(_piece(value))
        elif number in messages:
            messages[number] += value  # protobuf concatenates the parts of a message
    trainer, normalizer = dict(_fields(messages[2])), dict(_fields(messages[3]))
    model = Model(
        tuple(pieces),
        bool(trainer.get(35, 0)),
        trainer.get(46, b"<s>").decode(),
        bool(normalizer.get(3, 1)),
        bool(normalizer.get(4, 1)),
    )
    check(model)
    algorithm = trainer.get(3, UNIGRAM)
    unusual = {
        "model_type=unigram": algorithm == UNIGRAM,
        f"model_type={algorithm}": algorithm != BPE,
        "a normalization of characters (nmt_nfkc or the like)": normalizer.get(2),
        "escape_whitespaces=false": not normalizer.get(5, 1),
        "treat_whitespace_as_suffix=true": trainer.get(24, 0),
        "a denormalizer": dict(_fields(messages[5])).get(2),
    }
    if name := next((name for name, value in unusual.items() if value), None):
        raise ValueError(f"a sentencepiece model with {name}, which is not supported; use a tokenizer.json")
    return model


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Yield (field number, value) for each field of a message; values are integers, or bytes for other types."""
    offset = 0
    while offset < len(data):
        key, offset = _varint(data, offset)
        wire_type = key & 7
        if wire_type == 0:
            value, offset = _varint(data, offset)
            yield key >> 3, value
            continue
        if wire_type not in (1, 2, 5):
            raise ValueError(f"not a sentencepiece model: wire type {wire_type} before byte {offset}")
        size, offset = _varint(data, offset) if wire_type == 2 else (8 if wire_type == 1 else 4, offset)
        if size > len(data) - offset:
            raise ValueError(
                f"not a sentencepiece model: a field of {plural(size, 'byte')} at byte {offset} passes the end"
            )
        yield key >> 3, data[offset : offset + size]
        offset += size


def _varint(data: bytes, offset: int) -> tuple[int, int]:
    value = 0
    for i, byte in enumerate(data[offset : offset + 10]):
        value |= (byte & 127) << 7 * i
        if byte < 128:
            return value, offset + i + 1
    raise ValueError(f"not a sentencepiece model: a number at byte {offset} has no end")


def _piece(data: bytes) -> Piece:
    fields = dict(_fields(data))
    (score,), text = struct.unpack("<f", fields.get(2, bytes(4))), fields.get(1, b"")
    if not 0 < len(text) <= MAX_PIECE:
        raise ValueError(f"a piece has {plural(len(text), 'byte')}; expected 1 to {MAX_PIECE}")
    return Piece(text.decode(), score, fields.get(3, NORMAL))


def check(model: Model) -> None:
    """Raise ValueError for pieces that do not form a model."""
    texts, types = [p.text for p in model.pieces], {p.type for p in model.pieces}
    problem = ""
    if len(set(texts)) != len(texts):
        problem = f"{plural(len(texts) - len(set(texts)), 'piece occurs', 'pieces occur')} twice"
    elif len(model.texts(UNKNOWN)) != 1:
        problem = f"{len(model.texts(UNKNOWN))} unknown pieces, expected one"
    elif odd := [i for i, p in enumerate(model.pieces) if not math.isfinite(p.score)]:
        problem = f"the score of piece {odd[0]}, {texts[odd[0]]!a}, is not finite"
    elif not types <= {NORMAL, UNKNOWN, CONTROL, USER, BYTE} or NORMAL not in types:
        problem = f"types of pieces {sorted(types)}; expected normal pieces, and none of type {UNUSED} (unused)"
    elif model.byte_fallback and model.texts(BYTE) != [f"<0x{b:02X}>" for b in range(256)]:
        problem = "byte_fallback is true, but the 256 byte pieces are not in order"
    if problem:
        raise ValueError(f"not a sentencepiece model that can be read: {problem}")


# --- the parts of the tokenizer


def _bpe(model: Model) -> models.BPE:
    scores = {p.text: p.score for p in model.pieces if p.type == NORMAL}
    merges = []
    for text in scores:
        parts, last = merge_pairs(list(text), scores.get)
        if len(parts) == 1 and last is not None:
            if not {*last} <= scores.keys():
                raise ValueError(f"not a sentencepiece model that can be read: {text!r} is made of unknown pieces")
            merges.append(last)
    # If scores are equal (Mistral's runs of spaces), the longest piece comes first, as in merging from the left.
    merges.sort(key=lambda pair: (-scores[pair[0] + pair[1]], -len(pair[0] + pair[1])))
    return hf_tokenizers.bpe(
        {p.text: i for i, p in enumerate(model.pieces)},
        merges,
        unk_token=model.texts(UNKNOWN)[0],
        fuse_unk=True,
        byte_fallback=model.byte_fallback,
        # A user-defined symbol has no merges: it is split off and looked up as one token.
        ignore_merges=bool(model.texts(USER)),
    )


def _normalizer(model: Model) -> normalizers.Normalizer:
    steps: list[normalizers.Normalizer] = []
    if model.remove_extra_whitespaces:
        # With a dummy prefix, one leading space is kept, since Metaspace with "first" depends on it.
        prefix = " " if model.add_dummy_prefix else ""
        steps += [
            normalizers.Replace(Regex(pattern), text)
            for pattern, text in ((rf"[ {SPACE}]+\z", ""), (r"\A +", prefix), (" +", " "))
        ]
    if not (model.remove_extra_whitespaces and model.add_dummy_prefix):
        steps.append(normalizers.Replace(" ", SPACE))
    return normalizers.Sequence(steps)


def _pre_tokenizer(model: Model) -> pre_tokenizers.PreTokenizer:
    steps: list[pre_tokenizers.PreTokenizer] = []
    if model.add_dummy_prefix:
        # Put a space before the text, even if the text starts with a space, but none after special tokens.
        steps = [
            pre_tokenizers.Metaspace(_MARK, "first", split=False),
            pre_tokenizers.Metaspace(SPACE, "never", split=False),
        ]
    if model.texts(USER):
        users = sorted(model.texts(USER), key=len, reverse=True)
        pattern = Regex("|".join(map(re.escape, users)))
        steps.append(pre_tokenizers.Split(pattern, "isolated"))
        steps += split_lookalikes(_lookalikes(model))
    return pre_tokenizers.Sequence(steps)


def _lookalikes(model: Model) -> dict[str, list[str]]:
    """Maps each token that merges cannot produce to the tokens into which merges encode its spelling."""
    scores = {p.text: p.score for p in model.pieces if p.type == NORMAL}
    parts_by_text = {p.text: merge_pairs(list(p.text), scores.get)[0] for p in model.pieces if p.type != USER}
    return {text: parts for text, parts in parts_by_text.items() if len(parts) > 1}


def _decoder(model: Model) -> decoders.Decoder:
    steps: list[decoders.Decoder] = [decoders.Replace(SPACE, " ")]
    if model.byte_fallback:
        steps.append(decoders.ByteFallback())
    steps.append(decoders.Fuse())
    if model.add_dummy_prefix or model.remove_extra_whitespaces:
        steps.append(decoders.Strip(" ", MAX_PIECE if model.remove_extra_whitespaces else 1, 0))
    return decoders.Sequence(steps)
