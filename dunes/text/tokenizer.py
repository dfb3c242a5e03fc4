"""Tokenizers, of others and trained here, all kept as a tokenizer.json that Hugging Face's tools open.

Three kinds are trained: `bytes` (nothing to train), `chars` (the characters of the corpus) and `bpe`
(byte-level byte pairs, https://arxiv.org/abs/1508.07909). Pairs never merge across a line end (\\n,
\\r\\n or \\r), so that a line can be completed without a token that reaches into the next one, and text
can be encoded line by line with the same result; inside a line they merge across spaces, which
spares a fifth of the tokens of Python code.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers

from dunes.plural import plural
from dunes.text import bounded, json_file, llama3, sentencepiece, tekken
from dunes.text.marks import Marks, marks
from dunes.text.pairs import add_special
from dunes.text.spelling import Spelling, spelling

END = "<|endoftext|>"
PAD = "<|fim_pad|>"
ENDS = (END, "</s>", llama3.END)
SPECIAL = (
    END,
    "<|fim_prefix|>",
    "<|fim_middle|>",
    "<|fim_suffix|>",
    PAD,
    "<|repo_name|>",
    "<|file_sep|>",
    "<|im_start|>",
    "<|im_end|>",
)
"""Special tokens, spelled as Qwen spells them: editors' plugins know these."""

UNKNOWN = "<|unk|>"
KINDS = ("bpe", "bytes", "chars")
LIMIT_BYTES, LIMIT_IDS = 1 << 27, 1 << 22
"""The largest tokenizer file that is read, and the highest id that it may have."""

BESIDE = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "generation_config.json",
    "chat_template.jinja",
)
"""Files that say which tokens are special, which end a text, and how a conversation is written."""

_ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
_T = TypeVar("_T")


class Tokenizer:
    """Text to ids and back. `encode(decode(ids)) == ids` need not hold; `decode(encode(text)) == text` does.

    `beside` are the contents of the files in its folder that belong to it, as other tools wrote them.
    """

    def __init__(self, inner: tokenizers.Tokenizer, found: Marks = Marks()) -> None:  # noqa: B008  (frozen)
        self.inner, self._marks = inner, found
        self.beside: dict[str, bytes] = {}
        self.place = Path("tokenizer_config.json")
        # A document that happens to contain "<|endoftext|>" has not ended there.
        self.inner.encode_special_tokens = True
        # Some files cut each text at a length that has nothing to do with it.
        self.inner.no_truncation()
        self.inner.no_padding()

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
        """From `folder`/tokenizer.json, else a tokenizer.model (of sentencepiece or Llama 3), else a tekken.json.

        Raises ValueError if all are missing or the first of them is not a tokenizer, and for marks in the
        files beside it that are none.
        """
        folder = Path(folder)
        path = cls.file(folder)
        if path is None:
            raise ValueError(
                f"{folder}: no tokenizer.json, tokenizer.model or tekken.json, and text needs a tokenizer; "
                "put there the one that the model was trained with"
            )
        if (size := path.stat().st_size) > LIMIT_BYTES:
            raise ValueError(f"{path}: {size} bytes; a tokenizer has at most {LIMIT_BYTES}")
        inner = _tried(f"{path}: not a tokenizer", lambda: _check_pipeline(_MAKERS[path.suffixes[0]](path)))
        loaded = cls(inner, marks(folder, inner.token_to_id))
        loaded.place = folder / loaded.place.name
        loaded.beside = {name: (folder / name).read_bytes() for name in BESIDE if (folder / name).is_file()}
        if path.name != "tokenizer.json" and loaded.place.name in loaded.beside:
            loaded.beside[loaded.place.name] = _for_json(json_file.read_if_present(loaded.place))
        return loaded

    def stopping(self, stop: int) -> "Tokenizer":
        """The same tokenizer for a model that ends what it says with this id, too.

        A generation_config.json beside it tells other tools, and `load` of what it saves.
        """
        other = Tokenizer(self.inner, replace(self._marks, stops=frozenset({*self.stops, stop})))
        other.place, name = self.place, "generation_config.json"
        words: dict[str, Any] = {f"{key}_id": self.special(token) for key, token in self.named.items()}
        if name in self.beside:
            words = json_file.parsed(self.beside[name], self.place.with_name(name))
        # The end comes first: where no other file names one, the first is taken for it.
        ends = [self.end, *sorted(other.stops - {self.end})]
        content = json.dumps(words | {"eos_token_id": ends}, indent=2) + "\n"
        other.beside = self.beside | {name: content.encode()}
        return other

    @staticmethod
    def file(folder: Path) -> Path | None:
        """The file in the folder that `load` reads; None if there is none."""
        found = [folder / "tokenizer.json", *sorted(folder.glob("tokenizer.model*")), folder / "tekken.json"]
        return next((p for p in found if p.is_file()), None)

    def save(self, folder: Path | str) -> None:
        """Write tokenizer.json into the folder, and what was beside it where it came from."""
        (Path(folder) / "tokenizer.json").write_text(self.json(), encoding="utf-8")
        for name, content in self.beside.items():
            (Path(folder) / name).write_bytes(content)

    def json(self) -> str:
        """The whole tokenizer as the text of its tokenizer.json."""
        return self.inner.to_str(pretty=True)

    @cached_property
    def vocab(self) -> int:
        """How many ids there are, special tokens included: one more than the highest."""
        return 1 + max(self.inner.get_vocab().values(), default=-1)

    @property
    def bos(self) -> list[int]:
        """What the tokenizer itself puts before every text, such as LLaMA's `<s>`; often nothing."""
        return self._set_in_front if self._marks.begin is None else list(self._marks.begin)

    @property
    def begin(self) -> list[int]:
        """What stands at the beginning of a document: `bos`, or where it was trained here the end of another."""
        return [self.end] if self.by_lines and self._marks.begin is None else self.bos

    @cached_property
    def _set_in_front(self) -> list[int]:
        plain, whole = (self.inner.encode("a", add_special_tokens=special).ids for special in (False, True))
        starts = range(len(whole) - len(plain) + 1)
        return list(whole[: next((i for i in starts if whole[i : i + len(plain)] == plain), 0)])

    @property
    def end(self) -> int:
        """The id that ends a document. Raises ValueError if the tokenizer has none."""
        if self._end is None:
            raise ValueError(
                f"{self.place}: no token ends a text, neither an eos_token there nor any of {', '.join(ENDS)}; "
                'name one of the tokenizer there: "eos_token": "..."'
            )
        return self._end

    @cached_property
    def _end(self) -> int | None:
        found = [self._marks.end, *map(self.inner.token_to_id, ENDS)]
        return next((i for i in found if i is not None and self._spelled(i) is not None), None)

    def _spelled(self, i: int) -> str | None:
        return self.inner.id_to_token(i) if i < self.vocab else None

    @property
    def stops(self) -> set[int]:
        """The ids after which a model has nothing more to say."""
        turns = [i for i in map(self.inner.token_to_id, llama3.TURNS) if i is not None]
        return {self.end, *self._marks.stops, *turns}

    @property
    def marked(self) -> set[int]:
        """The ids that the files beside it name."""
        return {*(self._marks.begin or ()), *self._marks.stops}

    @property
    def named(self) -> dict[str, str]:
        """Its special tokens by the names that Hugging Face's files have for them; those that it has."""
        begin = [i for i in self.begin if i != self._end]
        ids = {"eos": self._end, "pad": self.inner.token_to_id(PAD), "bos": begin[0] if begin else None}
        found = {name: self._spelled(i) for name, i in ids.items() if i is not None}
        return {f"{name}_token": token for name, token in found.items() if token is not None}

    def prompt(self, text: str) -> list[int]:
        """The ids after which a model writes on with this text; at least one, since a model needs one.

        Those of the text after `bos`; an empty text is the beginning of a document. To a model trained here, the
        end token before a text says that a document begins with it, as hardly any does with a prompt.
        """
        return [*(self.bos if text else self.begin), *self.encode(text)] or [self.end]

    @cached_property
    def by_lines(self) -> bool:
        """Whether it was trained here, so that a text may be encoded in parts that end at line ends."""
        made = self.inner.pre_tokenizer
        return made is not None and made.__getstate__() in _OURS

    def special(self, token: str) -> int:
        """The id of a special token. Raises ValueError if there is no such token."""
        found = self.inner.token_to_id(token)
        if found is None:
            raise ValueError(f"the tokenizer has no token {token!r}")
        return found

    def encode(self, text: str) -> list[int]:
        """Ids of the text, in which nothing counts as a special token.

        Raises ValueError if the tokenizer fails on the text: a pattern in a file of others may be one that
        never ends.
        """
        ids: list[int] = _tried(
            "the tokenizer fails", lambda: self.inner.encode(text, add_special_tokens=False).ids
        )
        return ids

    def follow(self, text: str) -> list[int]:
        """Ids of a text that stands behind other text: without the space that some tokenizers set in front."""
        ids: list[int] = self._without_lead.encode(text, add_special_tokens=False).ids
        return ids

    @cached_property
    def _without_lead(self) -> tokenizers.Tokenizer:
        found = json.loads(self.inner.to_str())
        for part in ("normalizer", "pre_tokenizer"):
            found[part] = _leadless(found[part])
        inner = tokenizers.Tokenizer.from_str(json.dumps(found))
        inner.encode_special_tokens = True
        return inner

    def encode_document(self, blocks: Iterable[str]) -> Iterator[list[int]]:
        """Ids of a document that comes in blocks of lines; as a whole where tokens may reach across these."""
        yield from map(self.encode, blocks if self.by_lines else ["".join(blocks)])

    def encode_all(self, texts: Sequence[str]) -> Iterator[list[int]]:
        """Ids of each text, on all cores."""
        for encoding in self.inner.encode_batch_fast(list(texts), add_special_tokens=False):
            yield encoding.ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of the ids; special tokens and ids without a token give none, broken UTF-8 gives U+FFFD."""
        if not self.spelling.spaces:
            return str(self.inner.decode(list(ids)))
        pieces, lead, text = self.pieces(), self.spelling.lead, []
        for i in ids:
            piece, lead = self.spelling.without_lead(pieces[i] if i < len(pieces) else b"", lead)
            text.append(piece)
        return b"".join(text).decode(errors=self.spelling.errors)

    def pieces(self) -> list[bytes]:
        """The bytes that each id stands for; empty for special tokens and for ids that no token has."""
        return self._pieces

    @cached_property
    def _pieces(self) -> list[bytes]:
        plain = [self.inner.id_to_token(i) or "" for i in range(self.vocab)]
        added = {
            t.content: b"" if t.special else t.content.encode()
            for t in self.inner.get_added_tokens_decoder().values()
        }
        added.setdefault(UNKNOWN, b"")
        return [added[t] if t in added else self.spelling.piece(t) for t in plain]

    @cached_property
    def spelling(self) -> Spelling:
        """What its tokens' letters mean."""
        return spelling(self.inner)


def _leadless(part: dict[str, Any] | None) -> dict[str, Any] | None:
    """A normalizer or pre-tokenizer as tokenizer.json spells it, less what sets a space in front of a text."""
    if part is None or part["type"] == "Prepend":
        return None
    for key in ("normalizers", "pretokenizers"):
        if key in part:
            part[key] = [step for step in map(_leadless, part[key]) if step is not None]
    if part["type"] == "Metaspace":
        part["prepend_scheme"] = "never"
    return part | {"add_prefix_space": False} if part["type"] == "ByteLevel" else part


def _foreign(path: Path) -> tokenizers.Tokenizer:
    """From any tokenizer.json. Raises ValueError for ids that cannot be, and for what makes much of little."""
    data = path.read_bytes()
    bounded.check(bounded.parse(data))  # first, since building it normalizes its added tokens
    inner = tokenizers.Tokenizer.from_buffer(data)
    ids = inner.get_vocab().values()
    if not ids or len(set(ids)) != len(ids) or max(ids) >= LIMIT_IDS:
        raise ValueError(
            f"{plural(len(ids), 'token')} with {plural(len(set(ids)), 'id')} up to {max(ids, default=0)}; "
            f"each needs its own, below {LIMIT_IDS}"
        )
    return inner


def _for_json(words: dict[str, Any]) -> bytes:
    """A tokenizer_config.json for a tokenizer.json made here, of which other classes take only the tokens."""
    kept = {k: v for k, v in words.items() if k not in ("legacy", "sp_model_kwargs", "tokenizer_class")}
    return json.dumps(kept | {"tokenizer_class": "PreTrainedTokenizerFast"}, indent=2).encode()


def _check_pipeline(inner: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """The same, after a look at what it makes of a text."""
    bounded.check(bounded.pipeline(inner))
    return inner


def _model(data: bytes) -> tokenizers.Tokenizer:
    """From a tokenizer.model: two kinds of files have this name."""
    return llama3.convert(data) if llama3.looks_like(data) else sentencepiece.convert(data)


_MAKERS: dict[str, Callable[[Path], tokenizers.Tokenizer]] = {
    ".model": lambda path: _model(path.read_bytes()),
    ".json": lambda path: tekken.convert(path.read_bytes()) if path.stem == "tekken" else _foreign(path),
}


def _tried(what: str, make: Callable[[], _T]) -> _T:
    """What `make` gives. The library raises bare Exception, and a panic in it is not even that."""
    try:
        return make()
    except BaseException as error:
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise ValueError(f"{what}: {error or type(error).__name__}".replace("\n", " ")) from None
        raise


def _numbered(tokens: Iterable[str]) -> dict[str, int]:
    return {token: i for i, token in enumerate(tokens)}


def _lines(pattern: str = r"\r\n|[\r\n]|[^\r\n]+") -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _each() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")


# The last one, for which only \n ended a line, is that of older runs.
_OURS = [made.__getstate__() for made in (_lines(), _each(), _lines(r"\n|[^\n]+"))]


def _byte_level(model: models.BPE) -> tokenizers.Tokenizer:
    inner = tokenizers.Tokenizer(model)
    inner.pre_tokenizer = _lines()
    inner.decoder = decoders.ByteLevel()
    if inner.get_vocab_size():
        add_special(inner, SPECIAL)
    return inner


def _characters(characters: Sequence[str]) -> tokenizers.Tokenizer:
    model = models.WordLevel(_numbered([*characters, UNKNOWN]), unk_token=UNKNOWN)
    inner = tokenizers.Tokenizer(model)
    inner.pre_tokenizer = _each()
    inner.decoder = decoders.Fuse()
    add_special(inner, SPECIAL)
    return inner


def _merges(inner: tokenizers.Tokenizer) -> list[tuple[str, str]]:
    model: dict[str, Any] = json.loads(inner.to_str())["model"]
    return [(a, b) for a, b in model["merges"]]
