"""Tokenizers that are trained here, all kept as a tokenizer.json that Hugging Face's tools open.

Three kinds: `bytes` (nothing to train), `chars` (the characters of the corpus) and `bpe`
(byte-level byte pairs, https://arxiv.org/abs/1508.07909). Pairs never merge across a line end, so
that a line can be completed without a token that reaches into the next one, and text can be encoded
line by line with the same result; inside a line they merge across spaces, which spares a fifth of
the tokens of Python code.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers

END = "<|endoftext|>"
SPECIAL = (
    END,
    "<|fim_prefix|>",
    "<|fim_middle|>",
    "<|fim_suffix|>",
    "<|fim_pad|>",
    "<|repo_name|>",
    "<|file_sep|>",
    "<|im_start|>",
    "<|im_end|>",
)
"""Special tokens, spelled as Qwen spells them: editors' plugins know these."""

UNKNOWN = "<|unk|>"
KINDS = ("bpe", "bytes", "chars")
_ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


class Tokenizer:
    """Text to ids and back. `encode(decode(ids)) == ids` need not hold; `decode(encode(text)) == text` does."""

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        self.inner = inner
        # A document that happens to contain "<|endoftext|>" has not ended there.
        self.inner.encode_special_tokens = True

    @classmethod
    def train(cls, kind: str, texts: Iterable[str], vocab: int = 4096) -> "Tokenizer":
        """A new tokenizer of one of KINDS; `vocab` counts the special tokens too and matters to `bpe` only.

        Raises ValueError for an unknown kind, or if the vocabulary cannot hold all bytes.
        """
        if kind == "bytes":
            return cls(_byte_level(models.BPE(_numbered(_ALPHABET), [])))
        if kind == "chars":
            return cls(_characters(sorted(set().union(*map(set, texts)))))
        if kind != "bpe":
            raise ValueError(f"no tokenizer is called {kind!r}; there are {', '.join(KINDS)}")
        if vocab < len(_ALPHABET) + len(SPECIAL):
            raise ValueError(
                f"a bpe vocabulary of {vocab} cannot hold 256 bytes and {len(SPECIAL)} special tokens"
            )
        inner = _byte_level(models.BPE())
        trainer = trainers.BpeTrainer(
            vocab_size=vocab - len(SPECIAL),
            initial_alphabet=_ALPHABET,
            special_tokens=[],
            show_progress=False,
        )
        inner.train_from_iterator(texts, trainer)
        # Built again from what was learned, now with the special tokens, which get the last ids.
        return cls(_byte_level(models.BPE(inner.get_vocab(), _merges(inner))))

    @classmethod
    def load(cls, folder: Path | str) -> "Tokenizer":
        """From `folder`/tokenizer.json. Raises ValueError if that is missing or not a tokenizer."""
        path = Path(folder) / "tokenizer.json"
        if not path.is_file():
            raise ValueError(f"{path}: no such file; a model folder needs its tokenizer")
        try:
            return cls(tokenizers.Tokenizer.from_file(str(path)))
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"{path}: not a tokenizer: {error}") from None

    def save(self, folder: Path | str) -> None:
        """Write tokenizer.json into the folder."""
        (Path(folder) / "tokenizer.json").write_text(self.json(), encoding="utf-8")

    def json(self) -> str:
        """The whole tokenizer as the text of its tokenizer.json."""
        return self.inner.to_str(pretty=True)

    @property
    def vocab(self) -> int:
        """How many ids there are, special tokens included."""
        return self.inner.get_vocab_size()

    @property
    def end(self) -> int:
        """The id that ends a document. Raises ValueError if the tokenizer has none."""
        return self.special(END)

    def special(self, token: str) -> int:
        """The id of a special token. Raises ValueError if there is no such token."""
        found = self.inner.token_to_id(token)
        if found is None:
            raise ValueError(f"the tokenizer has no token {token!r}")
        return found

    def encode(self, text: str) -> list[int]:
        """Ids of the text, in which nothing counts as a special token."""
        ids: list[int] = self.inner.encode(text, add_special_tokens=False).ids
        return ids

    def encode_all(self, texts: Sequence[str]) -> Iterator[list[int]]:
        """Ids of each text, on all cores."""
        for encoding in self.inner.encode_batch_fast(list(texts), add_special_tokens=False):
            yield encoding.ids

    def encode_bytes(self, data: bytes) -> list[int]:
        """Ids of any bytes, for byte-level tokenizers: what is not UTF-8 becomes a token a byte."""
        ids: list[int] = []
        while data:
            try:
                return ids + self.encode(data.decode())
            except UnicodeDecodeError as error:
                wrong = [_LETTER[b] for b in data[error.start : error.end]]
                ids += self.encode(data[: error.start].decode()) + [self.special(c) for c in wrong]
                data = data[error.end :]
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of the ids; special tokens give none, and broken UTF-8 gives U+FFFD."""
        return str(self.inner.decode(list(ids)))

    def pieces(self) -> list[bytes]:
        """The bytes that each id stands for; empty for special tokens. For byte-level tokenizers and chars."""
        plain = [self.inner.id_to_token(i) or "" for i in range(self.vocab)]
        added = {
            t.content: b"" if t.special else t.content.encode()
            for t in self.inner.get_added_tokens_decoder().values()
        }
        if self.byte_level:
            return [added[t] if t in added else bytes(_BYTE[c] for c in t) for t in plain]
        return [added[t] if t in added else b"" if t == UNKNOWN else t.encode() for t in plain]

    @property
    def byte_level(self) -> bool:
        """Whether ids stand for bytes, whatever these are, rather than for characters."""
        return isinstance(self.inner.decoder, decoders.ByteLevel)


def _letters() -> dict[int, str]:
    """The printable letter that byte-level BPE writes for each byte, by GPT-2's rule."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}


_LETTER = _letters()
_BYTE = {letter: byte for byte, letter in _LETTER.items()}


def _numbered(tokens: Iterable[str]) -> dict[str, int]:
    return {token: i for i, token in enumerate(tokens)}


def _byte_level(model: models.BPE) -> tokenizers.Tokenizer:
    inner = tokenizers.Tokenizer(model)
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\n|[^\n]+"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    inner.decoder = decoders.ByteLevel()
    if inner.get_vocab_size():
        _add_special(inner)
    return inner


def _characters(characters: Sequence[str]) -> tokenizers.Tokenizer:
    model = models.WordLevel(_numbered([*characters, UNKNOWN]), unk_token=UNKNOWN)
    inner = tokenizers.Tokenizer(model)
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    inner.decoder = decoders.Fuse()
    _add_special(inner)
    return inner


def _add_special(inner: tokenizers.Tokenizer) -> None:
    inner.add_special_tokens([tokenizers.AddedToken(t, special=True, normalized=False) for t in SPECIAL])


def _merges(inner: tokenizers.Tokenizer) -> list[tuple[str, str]]:
    model: dict[str, Any] = json.loads(inner.to_str())["model"]
    return [(a, b) for a, b in model["merges"]]
