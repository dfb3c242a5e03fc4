"""Load and train tokenizers, which are saved as a tokenizer.json for Hugging Face's tools.

Three kinds can be trained: `bytes` (nothing to train), `chars` (the characters of the corpus) and `bpe`
(byte-level BPE, https://arxiv.org/abs/1508.07909). BPE never merges pairs across a line end (\\n, \\r\\n or \\r),
so no token extends into the next line. Encoding line by line therefore gives the same ids. Within a line, pairs
merge across spaces; this saves a fifth of the tokens of Python code.
"""

import json
import re
from codecs import getincrementaldecoder
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers

from dunes.files import json_file
from dunes.files.model_file import find_file, read_file, unfinished_downloads
from dunes.text import gguf_file, hf_tokenizers, ranked_bpe, sentencepiece
from dunes.text.byte_pairs import ByteDecoder, add_special, byte_decoder
from dunes.text.special_tokens import SpecialTokens, read_special_tokens
from dunes.units import plural

END = "<|endoftext|>"
"""The token that ends a document."""
PAD = "<|fim_pad|>"
ENDS = (END, "</s>", ranked_bpe.LLAMA3_END)
SPECIAL = (
    END, "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", PAD,
    "<|repo_name|>", "<|file_sep|>", "<|im_start|>", "<|im_end|>",
)  # fmt: skip
"""Special tokens, spelled as in Qwen, since editor plugins support this spelling."""

_NAMES = [token[2:-2] for token in SPECIAL]
_FIRST = "".join(sorted({name[0] for name in _NAMES}))
_SPELLED = re.compile(
    rf"(?=[{_FIRST}|x>])(?:(?<=<\|)(?=[{_FIRST}])|(?=\|>)(?:{'|'.join(f'(?<={name})' for name in _NAMES)})"
    r"|(?<=<0)(?=x)|(?=>)(?<=x[89A-F][0-9A-F]))"
)
"""Matches positions that no token of a trained vocabulary may cross. Otherwise llama.cpp could join two tokens
that together spell a special token or a byte in GGUF (`<0xFF>`)."""

UNKNOWN = "<|unk|>"
KINDS = ("bpe", "bytes", "chars")
"""The kinds of tokenizers that can be trained."""
SPLIT_RULE = "gguf_pre"
"""Key of `split_rule` in a tokenizer_config.json."""
MAX_IDS = 1 << 22
"""Upper bound of token ids, exclusive."""

EXTRA_FILES = (
    "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "generation_config.json", "chat_template.jinja",
)  # fmt: skip
"""Names of files with special tokens, stop ids and the chat template."""

_MODEL_NAME = re.compile(r"tokenizer\.model(\.v\w+)?")
_ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


class Tokenizer:
    """Text to ids and back. `decode(encode(text))` is `text`, unless the tokenizer normalizes text or lacks a
    character.

    `encode(decode(ids))` may differ from `ids`. `extra_files` maps names of the folder's other tokenizer files to
    their contents. `split_rule` is llama.cpp's name of the rule that splits words, for a tokenizer that was read
    from a GGUF file.
    """

    split_rule = ""

    def __init__(self, inner: tokenizers.Tokenizer, special: SpecialTokens = SpecialTokens()) -> None:  # noqa: B008  (frozen)
        self.inner, self._special = inner, special
        self.extra_files: dict[str, bytes] = {}
        self.config_path = Path("tokenizer_config.json")
        # "<|endoftext|>" in the text of a document is plain text.
        self.inner.encode_special_tokens = True
        # Some tokenizer.json files ask to truncate or pad each text.
        self.inner.no_truncation()
        self.inner.no_padding()

    @classmethod
    def train(cls, kind: str, texts: Iterable[str], vocab: int = 4096) -> "Tokenizer":
        """Train a tokenizer of one of KINDS; `vocab` is the size of a `bpe` vocabulary with its special tokens.

        Raises ValueError for an unknown kind, or if the vocabulary is too small for all bytes.
        """
        if kind == "bytes":
            return cls(_byte_level(hf_tokenizers.bpe({char: i for i, char in enumerate(_ALPHABET)}, [])))
        if kind == "chars":
            return cls(_char_level(sorted(set().union(*map(set, texts)))))
        if kind != "bpe":
            raise ValueError(f"no tokenizer named {kind!r}; available: {', '.join(KINDS)}")
        if vocab < len(_ALPHABET) + len(SPECIAL):
            raise ValueError(
                f"a bpe vocabulary of {vocab} cannot hold 256 bytes and {len(SPECIAL)} special tokens"
            )
        inner = _byte_level(models.BPE())
        trainer = trainers.BpeTrainer(
            vocab_size=vocab - len(SPECIAL), initial_alphabet=_ALPHABET, special_tokens=[], show_progress=False
        )
        inner.train_from_iterator((part for text in texts for part in _SPELLED.split(text)), trainer)
        add_special(inner, SPECIAL)  # special tokens get the last ids
        return cls(inner)

    @classmethod
    def load(cls, folder: Path | str) -> "Tokenizer":
        """Load the folder's tokenizer.json, tokenizer.model (of sentencepiece or Llama 3) or tekken.json.

        If the folder has several of these files, the first in this order is read. `folder` may also be a GGUF
        file. Raises ValueError if none exists, if the file is not a tokenizer, and for invalid special tokens in
        the config files.
        """
        folder = Path(folder)
        path = cls.find_file(folder)
        if path is not None and path.suffix == gguf_file.SUFFIX:
            return cls._load_gguf(path)
        if path is None:
            raise ValueError(
                f"{folder}: no tokenizer.json, tokenizer.model or tekken.json; "
                f"put the tokenizer that the model was trained with there{unfinished_downloads(folder)}"
            )
        data = read_file(path)
        inner = hf_tokenizers.call(f"{path}: not a tokenizer", lambda: _parse(path, data))
        tokenizer = cls(inner, read_special_tokens(folder, inner.token_to_id))
        tokenizer.config_path = folder / tokenizer.config_path.name
        files = {name: file for name in EXTRA_FILES if (file := find_file(folder, name))}
        tokenizer.extra_files = {name: read_file(f) for name, f in files.items()}
        tokenizer.split_rule = str(json_file.read_if_present(tokenizer.config_path).get(SPLIT_RULE) or "")
        if path.name != "tokenizer.json" and tokenizer.config_path.name in tokenizer.extra_files:
            config = json_file.read_if_present(tokenizer.config_path)
            tokenizer.extra_files[tokenizer.config_path.name] = _config_for_json(config)
        return tokenizer

    @classmethod
    def _load_gguf(cls, path: Path) -> "Tokenizer":
        fields = gguf_file.read_header(path).fields
        message = f"{path}: not a tokenizer"
        inner = hf_tokenizers.call(message, lambda: gguf_file.build_tokenizer(fields, _parse_json))
        tokenizer = cls(inner, hf_tokenizers.call(message, lambda: gguf_file.special_tokens(fields)))
        tokenizer.config_path = path / tokenizer.config_path.name
        tokenizer.split_rule = gguf_file.rule_name(fields)
        for stop in tokenizer._special.stops - {tokenizer._special.eos}:
            tokenizer = tokenizer.with_stop(stop)
        if template := hf_tokenizers.call(message, lambda: gguf_file.value(fields, "chat_template", str, "")):
            tokenizer.extra_files["chat_template.jinja"] = template.encode()
        return tokenizer

    @classmethod
    def load_if_present(cls, folder: Path) -> "Tokenizer | None":
        """Load the folder's tokenizer as `load` does; None if the folder has no tokenizer."""
        return None if cls.find_file(folder) is None else cls.load(folder)

    def with_stop(self, stop: int) -> "Tokenizer":
        """The same tokenizer for a model that also ends its answers with this id.

        The id is listed in a generation_config.json in `extra_files`, which `load` and other tools read.
        """
        result = Tokenizer(self.inner, replace(self._special, stops=frozenset({*self.stops, stop})))
        result.config_path, name = self.config_path, "generation_config.json"
        result.split_rule = self.split_rule
        special = self.special_tokens_map.items()
        config: dict[str, Any] = {f"{key}_id": self.token_id(token) for key, token in special}
        if name in self.extra_files:
            config = json_file.parse(self.extra_files[name], self.config_path.with_name(name))
        # EOS comes first, since readers use the first id as EOS unless another file sets EOS.
        stop_ids = [self.eos, *sorted(result.stops - {self.eos})]
        content = json.dumps(config | {"eos_token_id": stop_ids}, indent=2) + "\n"
        result.extra_files = self.extra_files | {name: content.encode()}
        return result

    @staticmethod
    def find_file(folder: Path) -> Path | None:
        """The file that `load` reads (`folder` itself if it is a GGUF file); None if no such file exists.

        Raises ValueError for a link that leads out of the folder, and for anything but a regular file.
        """
        if folder.suffix == gguf_file.SUFFIX and folder.is_file():
            return folder if gguf_file.has_tokenizer(folder) else None
        return next(original_files(folder, "tokenizer.json"), None)

    def save(self, folder: Path | str) -> None:
        """Write tokenizer.json and the extra files into the folder."""
        (Path(folder) / "tokenizer.json").write_text(self.json(), encoding="utf-8")
        for name, content in self.extra_files.items():
            (Path(folder) / name).write_bytes(content)

    def json(self) -> str:
        """The text of the tokenizer.json."""
        return self.inner.to_str(pretty=True)

    def __repr__(self) -> str:
        return f"Tokenizer({type(self.inner.model).__name__}, {self.vocab:,} ids)"

    @cached_property
    def vocab(self) -> int:
        """Number of ids, including special tokens: one more than the highest id."""
        return 1 + max(self.inner.get_vocab().values(), default=-1)

    @property
    def bos(self) -> list[int]:
        """Ids that the tokenizer puts before every text, such as LLaMA's `<s>`; often empty."""
        return self.added_ids[0] if self._special.bos is None else list(self._special.bos)

    @property
    def document_start(self) -> list[int]:
        """Ids that start a document: `bos`; for a tokenizer trained here, the `eos` of the previous document."""
        return [self.eos] if self.line_separable and self._special.bos is None else self.bos

    @property
    def text_start(self) -> list[int]:
        """`document_start` without EOS, since EOS belongs to the previous text."""
        return [i for i in self.document_start if i != self._eos]

    @cached_property
    def added_ids(self) -> tuple[list[int], list[int]]:
        """The ids that the tokenizer's post_processor puts before and after a text."""
        text_ids, full = (self._ids(self.inner, "a", special) for special in (False, True))
        starts = range(len(full) - len(text_ids) + 1)
        start = next((i for i in starts if full[i : i + len(text_ids)] == text_ids), 0)
        return full[:start], full[start + len(text_ids) :]

    @property
    def eos(self) -> int:
        """The id that ends a document. Raises ValueError if the tokenizer has none."""
        if self._eos is None:
            raise ValueError(
                f"{self.config_path}: no EOS token: neither an eos_token nor any of {', '.join(ENDS)}; "
                'set one of the tokenizer\'s tokens there: "eos_token": "..."'
            )
        return self._eos

    @cached_property
    def _eos(self) -> int | None:
        candidates = [self._special.eos, *map(self.inner.token_to_id, ENDS)]
        return next((i for i in candidates if i is not None and self._token(i) is not None), None)

    def _token(self, i: int) -> str | None:
        return self.inner.id_to_token(i) if i < self.vocab else None

    @property
    def stops(self) -> set[int]:
        """Ids at which generation stops."""
        turns = [i for i in map(self.inner.token_to_id, ranked_bpe.LLAMA3_TURNS) if i is not None]
        return {self.eos, *self._special.stops, *turns}

    @property
    def configured_ids(self) -> set[int]:
        """The BOS and stop ids that the config files set."""
        return {*(self._special.bos or ()), *self._special.stops}

    @property
    def special_tokens_map(self) -> dict[str, str]:
        """Special tokens by their names in Hugging Face's special_tokens_map.json."""
        begin = self.text_start
        ids = {"eos": self._eos, "pad": self.inner.token_to_id(PAD), "bos": begin[0] if begin else None}
        tokens = {name: self._token(i) for name, i in ids.items() if i is not None}
        return {f"{name}_token": token for name, token in tokens.items() if token is not None}

    def prompt(self, text: str) -> list[int]:
        """The ids of a prompt: `bos` and the text. An empty text becomes `document_start` or, without one, EOS.

        For a tokenizer trained here, no EOS is put before a text, since a prompt rarely starts a document.
        """
        return [*(self.bos if text else self.document_start), *self.encode(text)] or [self.eos]

    @property
    def line_separable(self) -> bool:
        """True if a text can be encoded line by line, as with all tokenizers trained here."""
        return bool(self.splits)

    @cached_property
    def splits(self) -> str:
        """How a tokenizer trained here splits text: "lines" or "characters"; empty for other tokenizers."""
        pre_tokenizer = self.inner.pre_tokenizer
        return "" if pre_tokenizer is None else _SPLITS.get(pre_tokenizer.__getstate__(), "")

    def token_id(self, token: str) -> int:
        """The id of a special token. Raises ValueError if there is no such token."""
        token_id = self.inner.token_to_id(token)
        if token_id is None:
            raise ValueError(f"the tokenizer has no token {token!r}")
        return token_id

    def encode(self, text: str) -> list[int]:
        """The ids of the text, without parsing special tokens.

        Raises ValueError if the tokenizer fails on the text, for example if a regex backtracks too much.
        """
        return self._ids(self.inner, text)

    def _ids(self, inner: tokenizers.Tokenizer, text: str, special: bool = False) -> list[int]:
        encode = partial(inner.encode, text, add_special_tokens=special)
        return list(hf_tokenizers.call(self._failure, encode).ids)

    @property
    def _failure(self) -> str:
        return f"{self.config_path.parent}: the tokenizer fails"

    def encode_continuation(self, text: str) -> list[int]:
        """The ids of a text that continues another one; the space that some tokenizers put first is left out."""
        return self._ids(self._without_prefix, text)

    @cached_property
    def _without_prefix(self) -> tokenizers.Tokenizer:
        parts = [part.__getstate__() for part in (self.inner.normalizer, self.inner.pre_tokenizer) if part]
        if all(_drop_prefix(json.loads(part)) == json.loads(part) for part in parts):
            return self.inner  # a copy of a large vocabulary takes a third of a second
        content = json.loads(self.inner.to_str())
        for part in ("normalizer", "pre_tokenizer"):
            content[part] = _drop_prefix(content[part])
        inner = hf_tokenizers.parse(json.dumps(content))
        inner.encode_special_tokens = True
        return inner

    def encode_document(self, blocks: Iterable[str]) -> Iterator[list[int]]:
        """Yield the ids of each block of lines of a document; blocks are first joined unless `line_separable`."""
        yield from map(self.encode, blocks if self.line_separable else ["".join(blocks)])

    def encode_all(self, texts: Sequence[str]) -> Iterator[list[int]]:
        """Yield the ids of each text; the texts are encoded on all cores."""
        encode = partial(self.inner.encode_batch_fast, list(texts), add_special_tokens=False)
        for encoding in hf_tokenizers.call(self._failure, encode):
            yield encoding.ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of the ids; special tokens and unused ids are skipped, broken UTF-8 becomes U+FFFD."""
        if not self.byte_decoder.metaspace:
            return str(self.inner.decode(list(ids)))
        stream = DecodeStream(self)
        return "".join(map(stream.step, ids)) + stream.utf8.decode(b"", final=True)

    @cached_property
    def writes_lines(self) -> bool:
        """False if ids do not preserve spaces and line ends, as in most word-level tokenizers."""
        return {*b" \n"} <= {*b"".join(map(self.bytes_of, self.encode_continuation("a b\nc")))}

    @cached_property
    def token_bytes(self) -> list[bytes]:
        """The bytes of each id; empty for special tokens and unused ids."""
        return [*map(self.bytes_of, range(self.vocab))]

    def bytes_of(self, id: int) -> bytes:
        """The bytes of an id; empty for special tokens and unused ids."""
        token = self.inner.id_to_token(id) or ""
        return self._added_bytes[token] if token in self._added_bytes else self.byte_decoder.token_bytes(token)

    @cached_property
    def _added_bytes(self) -> dict[str, bytes]:
        added = self.inner.get_added_tokens_decoder().values()
        return {UNKNOWN: b""} | {t.content: b"" if t.special else t.content.encode() for t in added}

    @cached_property
    def byte_decoder(self) -> ByteDecoder:
        """The decoder from tokens to bytes."""
        return byte_decoder(self.inner)


def _drop_prefix(part: dict[str, Any] | None) -> dict[str, Any] | None:
    """The `part` (a normalizer or pre-tokenizer) without the step that puts a space before a text."""
    if part is None or part["type"] == "Prepend":
        return None
    for key in ("normalizers", "pretokenizers"):
        if key in part:
            part[key] = [step for step in map(_drop_prefix, part[key]) if step is not None]
    if part["type"] == "Metaspace":
        part["prepend_scheme"] = "never"
    return part | {"add_prefix_space": False} if part["type"] == "ByteLevel" else part


def original_files(folder: Path, *first: str) -> Iterator[Path]:
    """The folder's existing files among `first`, tokenizer.model* and tekken.json, in this order. Raises
    ValueError like `find_file`."""
    models = sorted(path.name for path in folder.glob("tokenizer.model*") if _MODEL_NAME.fullmatch(path.name))
    return (path for name in (*first, *models, "tekken.json") if (path := find_file(folder, name)))


def _parse(path: Path, data: bytes) -> tokenizers.Tokenizer:
    """The tokenizer in the content of a file of any format."""
    if path.suffixes[0] == ".model":
        return ranked_bpe.convert_llama3(data) if ranked_bpe.is_llama3_file(data) else sentencepiece.convert(data)
    return ranked_bpe.convert_tekken(data) if path.stem == "tekken" else _parse_json(data)


def _parse_json(data: bytes) -> tokenizers.Tokenizer:
    """The tokenizer in the content of a tokenizer.json. Raises ValueError for invalid ids."""
    json_file.parse(data, Path("tokenizer.json"))
    inner = tokenizers.Tokenizer.from_str(data.decode("utf-8-sig"))
    inner.encode("")  # some damaged files fail only here
    ids = inner.get_vocab().values()
    if not ids or len(set(ids)) != len(ids) or max(ids) >= MAX_IDS:
        raise ValueError(
            f"{plural(len(ids), 'token')} with {plural(len(set(ids)), 'id')} up to {max(ids, default=0)}; "
            f"each token needs an id of its own, below {MAX_IDS}"
        )
    return inner


def _config_for_json(config: dict[str, Any]) -> bytes:
    """The tokenizer_config.json for a converted tokenizer.json, with a class that reads every tokenizer.json."""
    settings = {k: v for k, v in config.items() if k not in ("legacy", "sp_model_kwargs", "tokenizer_class")}
    return json.dumps(settings | {"tokenizer_class": "PreTrainedTokenizerFast"}, indent=2).encode()


def _split_lines() -> pre_tokenizers.PreTokenizer:
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(r"\r\n|[\r\n]|[^\r\n]+"), "isolated"), to_bytes])


def _split_chars() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")


_SPLITS = {_split_lines().__getstate__(): "lines", _split_chars().__getstate__(): "characters"}


def _byte_level(model: models.BPE) -> tokenizers.Tokenizer:
    inner = tokenizers.Tokenizer(model)
    inner.pre_tokenizer = _split_lines()
    inner.decoder = decoders.ByteLevel()
    if inner.get_vocab_size():
        add_special(inner, SPECIAL)
    return inner


def _char_level(characters: Sequence[str]) -> tokenizers.Tokenizer:
    vocab = {token: i for i, token in enumerate([*characters, UNKNOWN])}
    inner = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token=UNKNOWN))
    inner.pre_tokenizer = _split_chars()
    inner.decoder = decoders.Fuse()
    add_special(inner, SPECIAL)
    return inner


class DecodeStream:
    """Decodes one id at a time and returns complete characters only."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer, self.byte_decoder = tokenizer, tokenizer.byte_decoder
        by_bytes = self.byte_decoder.byte_level or self.byte_decoder.metaspace
        self.bytes_of = tokenizer.bytes_of if by_bytes else None
        self.utf8 = getincrementaldecoder("utf-8")(self.byte_decoder.errors)
        self.strip, self.library_stream = self.byte_decoder.strip, decoders.DecodeStream(skip_special_tokens=True)

    def step(self, token: int) -> str:
        """The text that this id completes; empty while a character is incomplete."""
        if self.bytes_of is None:
            return self.library_stream.step(self.tokenizer.inner, token) or ""
        # The library's stream mistakes a real U+FFFD for an incomplete character, and withholds it.
        data, self.strip = self.byte_decoder.strip_leading(self.bytes_of(token), self.strip)
        return self.utf8.decode(data)
