"""Read untrusted GGUF files (llama.cpp's format): the header and its tokenizer.

The reader of the `gguf` package creates several objects for each element of an array, which takes seconds for a
vocabulary. That reader also trusts the sizes in a file, so a damaged file can take all memory. Here, each size is
compared with the bytes left in the file before it is used. https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar

import numpy as np
import tokenizers
from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers

from dunes.context import prefix_errors
from dunes.files.model_file import find_file, open_file, require_content
from dunes.text import hf_tokenizers, sentencepiece
from dunes.text.byte_pairs import SPACE, add_special, surround
from dunes.text.sentencepiece import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER, Piece
from dunes.text.special_tokens import SpecialTokens
from dunes.text.split_rules import RULES, split_rule
from dunes.units import plural

SUFFIX = ".gguf"
SCALARS = dict(enumerate("BbHhIif?", start=0)) | {10: "Q", 11: "q", 12: "d"}
"""`struct` letters of the scalar value types; type 8 is a string, and 9 an array."""
STRING, ARRAY = 8, 9

BYTE_PAIRS = ("gpt2", "gemma4")
"""Kinds of tokenizers that merge pairs by rank within words, unlike `llama`, which merges by score."""
JSON = "huggingface.json"
KNOWN = (
    *("model", "pre", "tokens", "token_type", "token_type_count", "scores", "merges"),
    *("add_space_prefix", "add_bos_token", "add_eos_token"),
)
"""Supported keys of a tokenizer (as are all keys that end in `_token_id`); they are read or do not change ids."""
OFF = ("remove_extra_whitespaces", "add_sep_token", "precompiled_charsmap")
"""Keys of a tokenizer that are supported only if their value is false or empty."""


class TensorInfo(NamedTuple):
    """A tensor's name, shape in torch's order, type number, and byte offset in the file at `path`."""

    name: str
    shape: tuple[int, ...]
    type: int
    offset: int
    path: Path


class Header(NamedTuple):
    """The metadata of a file by key, and its tensors. A string is `str`, but strings in arrays are `bytes`."""

    fields: Mapping[str, Any]
    tensors: Sequence[TensorInfo]


def read_header(path: Path) -> Header:
    """The header of a file. If the file is the first of several parts, the header has the tensors of all parts.

    The most recent header is cached until its file changes, since loading a model reads the header several times.
    Raises ValueError for a later part, and for a file without a complete, little-endian GGUF header of version 2
    or 3.
    """
    status = path.stat()
    header = _cached_header(path, status.st_size, status.st_mtime_ns, status.st_ino, status.st_dev)
    infos = [info for part in _other_parts(path, header.fields) for info in _read_part(part).tensors]
    return Header(header.fields, [*header.tensors, *infos])


@lru_cache(maxsize=1)
def _cached_header(path: Path, *identity: int) -> Header:
    return _read_part(path)


def _other_parts(path: Path, fields: Mapping[str, Any]) -> Iterator[Path]:
    """Yield the other parts of a model whose first part is at `path`."""
    count = fields.get("split.count")
    if type(count) is not int or count < 2:
        return
    ending = f"-00001-of-{count:05}{SUFFIX}"
    if not path.name.endswith(ending) or fields.get("split.no") != 0:
        raise ValueError(
            f"{path}: one of {count} parts; pass the first, whose name ends in {ending}; to join all: "
            "llama-gguf-split --merge FIRST OUT"
        )
    for i in range(2, count + 1):
        part = path.with_name(f"{path.name.removesuffix(ending)}-{i:05}-of-{count:05}{SUFFIX}")
        if find_file(path.parent, part.name) is None:
            raise ValueError(f"{path}: {part.name} is missing; fetch all {count} parts")
        yield part


def _read_part(path: Path) -> Header:
    with open_file(path) as file:
        require_content(path, file)
        with prefix_errors(f"{path}: not a GGUF file that can be read", end="; fetch it again"):
            return _Reader(file, path.stat().st_size).header()


class _Reader:
    """Reads the header of a file of `size` bytes. Raises ValueError for a size that exceeds the bytes left."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self.file, self.bytes_left = file, size

    def header(self) -> Header:
        if (magic := self.take(4)) != b"GGUF":
            raise ValueError(f"it begins with {magic!r}")
        if (version := self.scalar("I")) not in (2, 3):
            raise ValueError(f"version {version}; expected 2 or 3")
        tensors, keys = self.scalar("Q"), self.scalar("Q")
        fields: dict[str, Any] = {}
        for _ in range(keys):
            key = self.text()
            if key in fields:
                raise ValueError(f"the key {key[:80]!a} occurs twice")
            fields[key] = self.value(self.scalar("I"))
        infos = [self.tensor() for _ in range(tensors)]
        alignment = fields.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise ValueError("general.alignment is no power of two")
        start = -(-self.file.tell() // alignment) * alignment
        return Header(fields, [info._replace(offset=start + info.offset) for info in infos])

    def take(self, size: int) -> bytes:
        if size > self.bytes_left:
            raise ValueError(f"{size} bytes are claimed where {self.bytes_left} are left")
        self.bytes_left -= size
        return self.file.read(size)

    def scalar(self, letter: str) -> Any:
        (value,) = struct.unpack(f"<{letter}", self.take(struct.calcsize(f"<{letter}")))
        return float(str(np.float32(value))) if letter == "f" else value  # 1e-05, not 9.99999974e-06

    def string(self) -> bytes:
        return self.take(self.scalar("Q"))

    def text(self) -> str:
        return self.string().decode()  # UnicodeDecodeError is a ValueError

    def value(self, code: int) -> Any:
        """Read a value of the type `code`; an array of numbers becomes a numpy array."""
        if code == STRING:
            return self.text()
        if code in SCALARS:
            return self.scalar(SCALARS[code])
        if code != ARRAY:
            raise ValueError(f"a value of the unknown type {code}")
        code, size = self.scalar("I"), self.scalar("Q")
        if code in SCALARS:
            dtype = np.dtype(f"<{SCALARS[code]}" if SCALARS[code] != "?" else "?")
            return np.frombuffer(self.take(size * dtype.itemsize), dtype)
        if code != STRING:
            raise ValueError(f"an array of elements of the unknown type {code}")
        if 8 * size > self.bytes_left:  # each string has a length of 8 bytes
            raise ValueError(f"{size} strings are claimed where {self.bytes_left} bytes are left")
        return [self.string() for _ in range(size)]

    def tensor(self) -> TensorInfo:
        name, dims = self.text(), self.scalar("I")
        shape = tuple(self.scalar("Q") for _ in range(dims))[::-1]
        return TensorInfo(name, shape, self.scalar("I"), self.scalar("Q"), Path(self.file.name))


# --- the tokenizer


def has_tokenizer(path: Path) -> bool:
    """True if a file has a tokenizer. Raises ValueError like `read_header`."""
    return str(read_header(path).fields.get("tokenizer.ggml.model", "none")) != "none"


def build_tokenizer(
    fields: Mapping[str, Any], parse: Callable[[bytes], tokenizers.Tokenizer]
) -> tokenizers.Tokenizer:
    """The tokenizer in a header. `parse` reads its tokenizer.json, if any; otherwise, its tokens and merges are
    used.

    For damaged fields and unsupported kinds, raises ValueError that names the key and index, but not the file.
    """
    if f"tokenizer.{JSON}" in fields:
        inner = hf_tokenizers.call(f"tokenizer.{JSON}", lambda: parse(value(fields, JSON, str).encode()))
        check_same_tokens(inner, fields, f"tokenizer.{JSON}")
        return inner
    model, tokens, types = value(fields, "ggml.model", str), *vocabulary(fields)
    for key, given in fields.items():
        name = key.removeprefix("tokenizer.ggml.")
        known = name in (key, *KNOWN) or name.endswith("_token_id")
        if not known and (name not in OFF or (len(given) if isinstance(given, np.ndarray) else given)):
            raise ValueError(f"{key[:80]} is {hf_tokenizers.abbreviate(given)}, which is not supported")
    if model == "llama":
        return _surrounded(_sentencepiece(fields, tokens, types), fields, tokens)
    if model not in BYTE_PAIRS:
        raise ValueError(
            f"a tokenizer of kind {model[:80]!a} is not supported; expected llama, {', '.join(BYTE_PAIRS)}"
        )
    inner = byte_pairs(tokens, types, _texts(fields, "ggml.merges"), rule_name(fields))
    typed = [*zip(tokens, types, strict=True)]
    inner.add_tokens([AddedToken(text, normalized=False) for text, type in typed if type == USER])
    add_special(inner, [text for text, type in typed if type in (CONTROL, UNKNOWN)])
    return _surrounded(inner, fields, tokens)


def check_same_tokens(inner: tokenizers.Tokenizer, fields: Mapping[str, Any], name: str) -> None:
    """Raise ValueError if `inner` has more tokens than `fields`, or if over half of the normal tokens differ."""
    tokens, types = vocabulary(fields)
    normal = [i for i, type in enumerate(types) if type == NORMAL]
    other = [i for i in normal if inner.id_to_token(i) != tokens[i]]
    if inner.get_vocab_size() > len(tokens) or 2 * len(other) > len(normal):
        raise ValueError(
            f"{name} is not the tokenizer of tokenizer.ggml.tokens: {plural(len(other), 'id')} of "
            f"{len(normal)} are other tokens; convert the model from its Hugging Face folder instead"
        )


def _surrounded(
    inner: tokenizers.Tokenizer, fields: Mapping[str, Any], tokens: Sequence[str]
) -> tokenizers.Tokenizer:
    """The tokenizer with the BOS and EOS that the file puts around a text."""
    special = special_tokens(fields)
    end = [special.eos] if value(fields, "ggml.add_eos_token", bool, False) and special.eos is not None else []
    if special.bos or end:
        surround(inner, *(tokens[i] for i in special.bos or ()), end=[tokens[i] for i in end])
    return inner


def rule_name(fields: Mapping[str, Any]) -> str:
    """The name of the rule by which a byte-pair tokenizer splits words; "" for other kinds."""
    kind = value(fields, "ggml.model", str)
    named = value(fields, "ggml.pre", str, "") or "default"
    return named if kind == "gpt2" else kind if kind in BYTE_PAIRS else ""


def byte_pairs(
    tokens: Sequence[str], types: Sequence[int], merges: Sequence[str], rule: str
) -> tokenizers.Tokenizer:
    """A byte-pair tokenizer that splits words by the rule of this name and has no added tokens."""
    vocab = {token: i for i, token in enumerate(tokens) if types[i] != UNUSED}
    # If a merge is listed twice, llama.cpp uses the first entry, the library the last.
    pairs = [tuple(merge.split(" ", 1)) for merge in dict.fromkeys(merges)]
    patterns, whole_words, metaspace, _ = split_rule(rule)
    settings = {"ignore_merges": whole_words, "byte_fallback": metaspace}
    inner = tokenizers.Tokenizer(hf_tokenizers.bpe(vocab, pairs, MERGES, **settings))
    words = [pre_tokenizers.Split(Regex(p), "isolated") for p in patterns]
    if metaspace:
        inner.normalizer, inner.pre_tokenizer = normalizers.Replace(" ", SPACE), pre_tokenizers.Sequence(words)
        steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        inner.decoder = decoders.Sequence(steps)
        return inner
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.Sequence([*words, level]), decoders.ByteLevel()
    return inner


def _sentencepiece(fields: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int]) -> tokenizers.Tokenizer:
    scores = value(fields, "ggml.scores", np.ndarray)
    _check_length("ggml.scores", scores, tokens, "iuf")
    # Placeholders of unused ids have the type of the unknown token in some files (Phi 3).
    unknown = next((i for i, type in enumerate(types) if type == UNKNOWN), None)
    kinds = [CONTROL if type == UNKNOWN and i != unknown else type for i, type in enumerate(types)]
    pieces = [*map(Piece, tokens, scores.tolist(), kinds)]
    while pieces and pieces[-1].type == UNUSED:
        pieces.pop()
    bos, prefix = _id(fields, "bos", 1, len(pieces)), value(fields, "ggml.add_space_prefix", bool, True)
    byte_fallback = any(piece.type == BYTE for piece in pieces)
    assert bos is not None
    model = sentencepiece.Model(tuple(pieces), byte_fallback, pieces[bos].text, prefix, False)
    sentencepiece.check(model)
    return sentencepiece.build(model)


def vocabulary(fields: Mapping[str, Any]) -> tuple[list[str], list[int]]:
    """The spelling and type of each token. Raises ValueError that names key and index of a damaged token."""
    tokens = _texts(fields, "ggml.tokens")
    types = value(fields, "ggml.token_type", np.ndarray, np.full(len(tokens), NORMAL))
    _check_length("ggml.token_type", types, tokens, "iu")
    ids: dict[str, int] = {}
    for i, token in enumerate(tokens):
        if not NORMAL <= types[i] <= BYTE:
            raise ValueError(f"tokenizer.ggml.token_type[{i}] is {types[i]}; expected {NORMAL} to {BYTE}")
        if ids.setdefault(token, i) != i:
            raise ValueError(
                f"tokenizer.ggml.tokens[{ids[token]}] and [{i}] are both {hf_tokenizers.abbreviate(token)}"
            )
    return tokens, types.tolist()


MERGES = "tokenizer.ggml.merges"
_T = TypeVar("_T")


def value(fields: Mapping[str, Any], name: str, value_type: type[_T], default: _T | None = None) -> _T:
    """The value of `tokenizer.NAME`, or the default. Raises ValueError for another type."""
    key = f"tokenizer.{name}"
    if type(given := fields.get(key, default)) is not value_type:
        raise ValueError(f"{key} is {hf_tokenizers.abbreviate(given)}; expected {value_type.__name__}")
    return given


def _texts(fields: Mapping[str, Any], name: str) -> list[str]:
    return [raw.decode() for raw in value(fields, name, list)]


def _check_length(name: str, numbers: "np.ndarray[Any, Any]", tokens: Sequence[str], kinds: str) -> None:
    if numbers.dtype.kind not in kinds or len(numbers) != len(tokens):
        raise ValueError(f"tokenizer.{name} has {len(numbers)} {numbers.dtype}; expected a number for each token")


def _id(fields: Mapping[str, Any], name: str, default: int | None, count: int) -> int | None:
    """The id of a special token, or None. Raises ValueError unless the id is below `count`."""
    key = f"tokenizer.ggml.{name}_token_id"
    i = fields.get(key, default)
    if i is not None and not (type(i) is int and 0 <= i < count):
        raise ValueError(
            f"{key} is {hf_tokenizers.abbreviate(i)}; expected an id below {count}, the number of tokens"
        )
    return i


def special_tokens(fields: Mapping[str, Any]) -> SpecialTokens:
    """The special ids in a header. Texts start with BOS if `add_bos_token` (default: by kind) is true.

    As in llama.cpp, BOS is 1 and EOS 2 by default for the kind `llama`, and `gemma4` always adds BOS. Raises
    ValueError for a BOS or EOS that is added but has no id.
    """
    count, rule = len(value(fields, "ggml.tokens", list)), RULES.get(rule_name(fields))
    by_score = fields["tokenizer.ggml.model"] == "llama"
    defaults = {"bos": 1, "eos": 2} if by_score else {}
    names = ("bos", "eos", "eot", "eom")
    bos, eos, turn, message = (_id(fields, name, defaults.get(name), count) for name in names)
    adds = value(fields, "ggml.add_bos_token", bool, by_score if rule is None else rule.bos)
    adds |= rule is not None and rule.metaspace
    for name, i, added in (("bos", bos, adds), ("eos", eos, value(fields, "ggml.add_eos_token", bool, False))):
        if added and i is None:
            raise ValueError(f"tokenizer.ggml.{name}_token_id is missing, but each text gets this token")
    stops = frozenset(i for i in (eos, turn, message) if i is not None)
    return SpecialTokens((bos,) if adds and bos is not None else (), eos, stops)
