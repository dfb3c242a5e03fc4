"""Serves a model folder: completes lines, generates texts in batches, and reloads the model when the folder
changes.

For a request without a path, the file is identified by the lines around the cursor.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from contextvars import copy_context
from dataclasses import replace
from functools import lru_cache, partial
from hashlib import sha256
from pathlib import Path
from threading import Lock
from time import perf_counter
from typing import Any

import torch
from torch import nn

from dunes import measure
from dunes.augment import lora
from dunes.checkpoint import LoadedModel
from dunes.checkpoint.base_digests import file_stamps
from dunes.checkpoint.card import read_card
from dunes.checkpoint.formats.adapter import is_reference
from dunes.checkpoint.open import base_folder
from dunes.completion import Suggestion
from dunes.completion.completer import (
    CopyCompleter,
    FolderCompleter,
    find_completer,
    model_or_copies,
    name_in_sources,
)
from dunes.completion.engine import GREEDY_FROM
from dunes.completion.search import WIDTH, CompleteOptions
from dunes.completion.text import near_text
from dunes.generate.decode_packages import step_source
from dunes.inference.chat import NONE, ChatModel, NoTemplate, load_chat_engine, start_compiling
from dunes.runs.saving import read_config
from dunes.runs.train_config import TrainConfig
from dunes.serve.batch import Batch
from dunes.serve.fields import Refused
from dunes.serve.requests import Answer, Event, Facts, LineRequest, TextRequest
from dunes.text.lines import split_lines
from dunes.tree import count
from dunes.units import plural

Call = Callable[[Callable[[], Any]], Future[Any]]
"""A function that runs another function in the worker's thread, and returns its `Future`."""
SHORT = 3
"""Minimum number of characters of a suggestion that does not complete its line."""
PATHS = 64
"""Number of paths for which the file's name in training is cached. For any other path, the model's card is
read."""
UNFITTED = 0.3
"""Minimum probability of a shown suggestion if no threshold was fitted."""
FILES = (
    *("config.json", "adapter_config.json", "model.safetensors", "adapter_model.safetensors", "dunes.json"),
    *("completion/gate.json", "completion/index.safetensors"),
)
"""Files that are written when a model, its gate or its index is saved."""


class LoadedFolder:
    """A loaded model folder: its completer, its batch for texts, facts about the model, and modification times.

    Raises ValueError for a model folder that cannot be used for completion.
    """

    def __init__(self, folder: Path, name: str, adapters: Sequence[Path], say: Callable[[str], object]) -> None:
        self.stamp, self.chats = model_stamp(folder), dict[str, ChatModel]()
        self.base_stamp = base_stamp(folder)
        self.batch: Batch | None = None
        chat, notes = None, list[str]()
        load = partial(load_chat_engine, str(folder), adapters, measure.device())
        found = model_or_copies(folder, notes.append, load)
        if not isinstance(found, CopyCompleter):
            chats = found.models
            base = NONE if name in chats else name
            self.chats = {base if key == NONE else key: chat for key, chat in chats.items()}
            chat = self.chats[name]
            take_out_of_file(chat.loaded.model)
            names = {key: chat.adapter for key, chat in self.chats.items()} if len(self.chats) > 1 else {}
            if names:
                lora.set_adapter(chat.loaded.model, chat.adapter)
            context = chat.loaded.context_length
            if longer := [key for key, chat in self.chats.items() if chat.loaded.context_length > context]:
                say(f"{', '.join(longer)}: served with the context length of {name}, {plural(context, 'token')}")
            is_large = count(chat.loaded.model) >= GREEDY_FROM and not adapters
            start = partial(copy_context().run, start_compiling, folder) if is_large else None
            find_step = step_source(chat.loaded.model, start)
            self.batch = Batch(chat.loaded, find_step, names, names.get(name))
        self.loaded = chat.loaded if chat else None
        self.facts = describe_model(folder, self.stamp, self.loaded)
        copier = found if isinstance(found, CopyCompleter) else None
        self.completer = copier or find_completer(folder, notes.append, False, self.loaded)
        if self.batch and isinstance(self.completer, FolderCompleter):
            self.completer.find_step = self.batch.find_step
        self.note = " ".join(notes)
        """The reason why the model does not complete lines; empty if it does."""
        if self.note:
            say(self.note)
        self.files = FileFinder(self.completer.training_files)
        self.copies = isinstance(self.completer, CopyCompleter) or self.completer.copies
        self.name_in_sources = lru_cache(PATHS)(lambda path: name_in_sources(Path(path), folder))

    def use(self, files: Any, texts: Mapping[str, str | None]) -> None:
        """From now on, `texts` are the current texts of these files; `files` is the result of the completer's
        `with_texts(texts)`."""
        self.completer.use(files)
        self.files.update(texts)


def take_out_of_file(model: nn.Module) -> None:
    """Copy memory-mapped weights into memory, since truncating the mapped file would kill the process."""
    copies: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        storage: Any = tensor.untyped_storage()
        address = storage.data_ptr()
        if tensor.device.type == "cpu" and storage.nbytes():
            if address not in copies:
                copies[address] = storage.clone()
            place = tensor.storage_offset(), tensor.size(), tensor.stride()
            tensor.data = torch.empty(0, dtype=tensor.dtype).set_(copies[address], *place)


def describe_model(folder: Path, stamp: Sequence[int], loaded: LoadedModel | None) -> Facts:
    """Facts about a model, such as its size and the time of its last change (s). Without a loaded model, as during
    training, most facts are 0 or empty."""
    facts: dict[str, Any] = {
        "modified": max(stamp) / 1e9,
        "digest": sha256(repr((str(folder), stamp)).encode()).hexdigest(),
        "family": "dunes",
        "folder": str(folder.absolute()),
    }
    facts |= dict.fromkeys(("parameters", "size", "context_length", "vocab", "dim"), 0)
    facts |= dict.fromkeys(("dtype", "bos", "eos"), "")
    if loaded is None:
        config = read_config(folder, TrainConfig)
        return facts | {"context_length": config.context_length if config else 0}
    tokenizer, parameters = loaded.require_tokenizer(), [*loaded.model.parameters()]
    return facts | {
        "family": str(loaded.card.get("family") or "dunes"),
        "parameters": sum(p.numel() for p in parameters),
        "size": sum(p.numel() * p.element_size() for p in parameters),
        "dtype": str(parameters[0].dtype).removeprefix("torch."),
        "context_length": loaded.context_length,
        "vocab": tokenizer.vocab,
        "dim": parameters[0].shape[-1],
        "eos": tokenizer.inner.id_to_token(tokenizer.eos) or "",
        "bos": "".join(tokenizer.inner.id_to_token(i) or "" for i in tokenizer.bos),
    }


class ServedModel:
    """A model folder. Only the worker's thread may load the model, complete lines or generate texts.

    `acceptance` is the desired share of accepted suggestions. The share selects one of the thresholds that were
    fitted in training. With share 0, all suggestions are shown. Raises ValueError for a folder that cannot be used
    for completion.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        acceptance: float,
        adapters: Sequence[Path] = (),
        say: Callable[[str], object] = print,
    ) -> None:
        self.folder, self.name, self.acceptance, self._say = folder, name, acceptance, say
        load = partial(LoadedFolder, folder, name, adapters, say)
        self._load: Callable[[], LoadedFolder] = partial(copy_context().run, load)
        self._texts: dict[str, str | None] = {}
        self._pending: dict[str, str | None] = {}
        self._adding, self._changing, self._ending = Lock(), Lock(), list[Batch]()
        self.current = self._load()

    def reload(self) -> None:
        """Load the folder again, for example after training. Texts that have already started continue with the old
        model.

        Raises ValueError or OSError if the folder cannot be loaded; the old model then stays in use.
        """
        new, was_copying = self._load(), self.current.copies
        if self.current.batch is not None and self.current.batch.active:
            self._ending.append(self.current.batch)
        indexed = dict(new.completer.training_files)
        self._texts = {name: text for name, text in self._texts.items() if indexed.get(name) != text}
        new.use(new.completer.with_texts(self._texts), self._texts)
        self.current = new
        if was_copying and not new.copies:
            self._say(f"{self.name}: its model completes lines from now on")
        measure.return_freed_memory()  # of the old model, held by a reference cycle in its engine

    @property
    def is_outdated(self) -> bool:
        """True if the folder has changed since it was loaded. While no model is loaded, also true if the files of
        its base model have changed."""
        current = self.current
        is_missing = isinstance(current.completer, CopyCompleter)
        has_base_changed = is_missing and base_stamp(self.folder) != current.base_stamp
        return has_base_changed or model_stamp(self.folder) != current.stamp

    def take_in(self, call: Call, texts: Mapping[str, str | None]) -> None:
        """Copy from these texts of files, by name, in later completions. None means that the file was deleted.
        Thread-safe.

        The texts are indexed in the calling thread, or in another thread that is calling `take_in` at the same
        time.
        """
        with self._adding:
            self._pending |= texts
        with self._changing:
            with self._adding:
                pending, self._pending = self._pending, {}
            is_current = not pending
            while not is_current:
                completer = self.current.completer
                files = completer.with_texts(pending)
                is_current = call(partial(self._use, completer, files, pending)).result()

    def _use(self, completer: Any, files: Any, texts: Mapping[str, str | None]) -> bool:
        """Use these files and return True; return False if the files were indexed for a model that has been
        replaced."""
        if completer is self.current.completer:
            self._texts |= texts
            self.current.use(files, texts)
        return completer is self.current.completer

    @property
    def names(self) -> list[str]:
        """Names of the model and of its adapters."""
        return [self.name, *(name for name in self.current.chats if name != self.name)]

    @property
    def threshold(self) -> float:
        """Minimum probability of the first word of a shown suggestion."""
        completer = self.current.completer
        if self.acceptance <= 0:
            return 0.0
        fitted = isinstance(completer, CopyCompleter) or bool(completer.facts.get("thresholds"))
        return completer.threshold(self.acceptance) if fitted else UNFITTED

    def lines(self, request: LineRequest, is_cancelled: Callable[[], bool]) -> list[Answer]:
        """The suggestions at a cursor, best first. If a suggestion is too improbable or too short, its text is
        empty."""
        start, completer, files = perf_counter(), self.current.completer, self.current.files
        name = request.name and self.name_of(request.name)
        name = name or files.find(request.before, request.after)
        options = CompleteOptions(
            width=request.beams,
            alternatives=min(WIDTH, request.alternatives),
            max_tokens=request.max_tokens,
            stop=request.stop,
            cancelled=is_cancelled,
            files=request.files,
        )
        suggestions = completer.alternatives(request.before, request.after, name, options)
        threshold, seconds = None if request.shows_all else self.threshold, perf_counter() - start
        answers = [_answer(suggestion, threshold, seconds) for suggestion in suggestions]
        if isinstance(completer, FolderCompleter):
            prompt_tokens = len(completer.files.tokenize(near_text(request.before), name).ids)
            for answer in answers:
                answer.new_tokens = len(completer.files.line(answer.text))
                answer.prompt_tokens = min(prompt_tokens, completer.loaded.context_length)
            if request.explains:
                tokens = completer.explain(request.before, request.after, name, options)
                answers[0].explained = {"file": name, "tokens": tokens, "threshold": min(1.0, self.threshold)}
        return answers

    def warm(self, files: Sequence[tuple[str, str]]) -> None:
        """Index the files of a coming request in advance; thread-safe."""
        if files and isinstance(self.current.completer, FolderCompleter):
            self.current.completer.index_files(files)

    def name_of(self, path: str) -> str:
        """The name that a file had in training, or would have had; `path` may be such a name."""
        return path if path in self.current.files.names else self.current.name_in_sources(path)

    def add(self, request: TextRequest, emit: Callable[[Event], None], is_cancelled: Callable[[], bool]) -> None:
        """Start generating a text. Raises Refused for a prompt that is empty, too long or has unknown ids."""
        batch = self.require_batch()
        if request.batch not in (None, batch):
            raise Refused(503, "the model was loaded again meanwhile", retry=1)
        batch.add(request, emit, is_cancelled)

    def advance(self) -> bool:
        """Generate a token of each text; False if no text is in progress."""
        self._ending = [batch for batch in self._ending if batch.active]
        batches = [batch for batch in (self.current.batch, *self._ending) if batch is not None and batch.active]
        for batch in batches:
            batch.advance()
        return bool(batches)

    @property
    def is_full(self) -> bool:
        """True if the batch has no room for another text."""
        return self.current.batch is not None and self.current.batch.is_full

    def require_batch(self) -> Batch:
        """The batch that generates texts. Raises Refused if there is no model, as during training."""
        if self.current.batch is None:
            raise Refused(503, self.current.note, retry=30)
        return self.current.batch

    def with_prompt(self, request: TextRequest) -> TextRequest:
        """The request, with its messages encoded as a prompt for the model's next turn. Thread-safe.

        A model without a chat template reads the request's `prompt`. For such a model, raises Refused if `prompt`
        is empty, or if the request has several messages or asks for thinking. Also raises Refused if the template
        refuses the messages.
        """
        batch, chats = self.require_batch(), self.current.chats
        chat, variables = chats.get(request.model, chats[self.name]), dict(request.variables)
        try:
            if not variables.get("enable_thinking") and not chat.template.reads("enable_thinking"):
                variables.pop("enable_thinking", None)  # the template has no thinking to disable
            ids = chat.encode(tuple(request.messages), variables, request.continues)
            stop = chat.template.stop_id(chat.loaded.require_tokenizer())
            return replace(request, prompt=ids, stop_ids=(stop,), batch=batch)
        except ValueError as error:
            is_plain = len(request.messages) == 1 and not variables.get("enable_thinking")
            if isinstance(error, NoTemplate) and request.prompt and is_plain:
                return replace(request, messages=())
            name = "prompt" if request.prompt else "messages"
            raise Refused(400, f"Field '{name}': {' '.join(str(error).split())}") from None


def _answer(suggestion: Suggestion, threshold: float | None, seconds: float) -> Answer:
    """The answer for a suggestion; the text is empty if the suggestion is too improbable or too short."""
    text = suggestion.text
    if threshold is not None and (suggestion.word < threshold or (len(text) < SHORT and not suggestion.ends_line)):
        text = ""
    return Answer(
        text, "stop", word=suggestion.word, line=suggestion.line, source=suggestion.source, seconds=seconds
    )


def model_stamp(folder: Path) -> tuple[int, ...]:
    """Modification times (ns) of a GGUF file, or of a folder's FILES. A time changes when the model, its gate or
    its index is written."""
    return tuple(file_time(folder / name) for name in (FILES if folder.is_dir() else [""]))


def base_stamp(folder: Path) -> Sequence[Sequence[int]]:
    """Sizes and modification times of the base model's files; empty if the run does not refer to a base model on
    this machine."""
    with suppress(ValueError, OSError):
        if is_reference(read_card(folder)):
            return [*file_stamps(base_folder(folder, fetch=False)).values()]
    return []


def file_time(path: Path) -> int:
    """Modification time of a file (ns); 0 if it does not exist."""
    with suppress(OSError):
        return path.stat().st_mtime_ns
    return 0


LINES = 400
"""Maximum number of lines, nearest to the cursor first, that are looked up on each side of the cursor."""
LENGTH = 8
"""Minimum characters of a looked-up line, not counting white space at both ends."""
FEWEST = 3
"""Minimum number of looked-up lines that occur only in the selected file."""
SHARE = 0.5
"""Of the looked-up lines that occur in only one file, at least this fraction occurs in the selected file."""


class FileFinder:
    """Identifies the file that a text belongs to, by lines that occur in only one of the indexed files."""

    def __init__(self, files: Iterable[tuple[str, str]]) -> None:
        self._lines: dict[str, frozenset[int]] = {}
        self._numbers: dict[str, int] = {}
        # For each line: how many files contain the line, and the sum of the indices of these files.
        self._owners: dict[int, tuple[int, int]] = {}
        self.update(dict(files))

    @property
    def names(self) -> Iterable[str]:
        """The names of all files."""
        return self._lines.keys()

    def update(self, texts: Mapping[str, str | None]) -> None:
        """Replace the texts of these files; None for deleted files."""
        for name, text in texts.items():
            number = self._numbers.setdefault(name, len(self._numbers))
            for key in self._lines.pop(name, ()):
                count, total = self._owners[key]
                self._owners[key] = count - 1, total - number
                if count == 1:
                    del self._owners[key]
            if text:
                self._lines[name] = frozenset(_keys(split_lines(text)))
                for key in self._lines[name]:
                    count, total = self._owners.get(key, (0, 0))
                    self._owners[key] = count + 1, total + number

    def find(self, before: str, after: str) -> str:
        """The name of the file around a cursor, from the text before and after it; empty if uncertain."""
        above, below = split_lines(before[-(1 << 16) :])[-LINES:], split_lines(after[: 1 << 16])[:LINES]
        counts = (self._owners.get(key, (0, 0)) for key in set(_keys((*above[:-1], *below[1:]))))
        owners = Counter(number for count, number in counts if count == 1)
        if not owners:
            return ""
        number, count = owners.most_common(1)[0]
        return [*self._numbers][number] if count >= FEWEST and count >= SHARE * owners.total() else ""


def _keys(lines: Iterable[str]) -> Iterable[int]:
    return (hash(line) for line in map(str.strip, lines) if len(line) >= LENGTH)
