"""A model folder that is served: lines by its completer, texts by its model, and what follows the user's work."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

from dunes import checkpoint, measure
from dunes.augment import lora
from dunes.checkpoint import LoadedModel
from dunes.checkpoint.loading import is_adapter
from dunes.runs.chat import NONE, ChatModel, load_chat_engine
from dunes.runs.completion.completer import (
    CopyCompleter,
    FolderCompleter,
    find_completer,
    index_in_training,
    name_in_sources,
)
from dunes.runs.completion.engine import OpenFiles
from dunes.runs.completion.protocol import Suggestion
from dunes.runs.completion.search import WIDTH, CompleteOptions
from dunes.runs.step_package import step_source
from dunes.serve.batch import Batch
from dunes.serve.fields import Refused
from dunes.serve.recognise import FileFinder
from dunes.serve.requests import Answer, Event, LineRequest, TextRequest
from dunes.text.templates import Turn

SHORT = 3
"""Characters of a suggestion that does not end its line, at least."""
UNFITTED = 0.3
"""The probability from which on a suggestion is shown where no threshold was fitted."""


class ServedModel:
    """A model folder. It is used in the worker's thread alone, but for `with_texts`.

    A share of about `acceptance` of the shown suggestions is accepted, as its training measured; 0 shows all.
    Raises ValueError for a folder that cannot complete.
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
        self._adapter_folders = adapters
        self._texts: dict[str, str | None] = {}
        self.load()

    def load(self) -> None:
        """Load the model, or load it again: it may have ended its training."""
        self.stamp = model_stamp(self.folder)
        self._chats: dict[str, ChatModel] = {}
        self.loaded: LoadedModel | None = None
        self.batch: Batch | None = None
        if index_in_training(self.folder) is None:
            self._load_model()
        self.completer = find_completer(self.folder, self._say, False, self.loaded)
        self.files = FileFinder(self.completer.training_files)
        if self._texts:
            self.use(self.with_texts({}))

    def _load_model(self) -> None:
        """Load the model with its adapters."""
        chats = load_chat_engine(str(self.folder), self._adapter_folders, measure.device()).models
        base = NONE if self.name in chats else self.name
        self._chats = {base if name == NONE else name: chat for name, chat in chats.items()}
        own = self._chats[self.name]
        self.loaded = own.loaded
        adapters = {name: chat.adapter for name, chat in self._chats.items()} if len(self._chats) > 1 else {}
        if adapters:
            lora.set_adapter(self.loaded.model, own.adapter)
        self.batch = Batch(self.loaded, step_source(self.loaded.model), adapters, adapters.get(self.name))

    @property
    def names(self) -> list[str]:
        """The names of the model and of its adapters."""
        return [self.name, *(name for name in self._chats if name != self.name)]

    @property
    def threshold(self) -> float:
        """The probability of its first word from which on a suggestion is shown."""
        if self.acceptance <= 0:
            return 0.0
        fitted = isinstance(self.completer, CopyCompleter) or bool(self.completer.facts.get("thresholds"))
        return self.completer.threshold("word", self.acceptance) if fitted else UNFITTED

    def lines(self, request: LineRequest, is_cancelled: Callable[[], bool]) -> list[Answer]:
        """The suggestions at a cursor, the best first; one that is too improbable or too short is empty."""
        start = perf_counter()
        name = request.name and self.name_of(request.name)
        name = name or self.files.find(request.before, request.after)
        alternatives = min(WIDTH, request.alternatives)
        options = CompleteOptions(
            alternatives=alternatives,
            max_tokens=request.max_tokens,
            stop=request.stop,
            cancelled=is_cancelled,
            files=request.files,
        )
        found = self.completer.alternatives(request.before, request.after, name, options)
        threshold, seconds = self.threshold, perf_counter() - start
        return [_answer(suggestion, threshold, seconds) for suggestion in found]

    def warm(self, files: Sequence[tuple[str, str]]) -> None:
        """Index files that the next requests will bring along."""
        if isinstance(self.completer, FolderCompleter):
            self.completer.index_files(files)

    def explain(self, request: LineRequest, with_tokens: bool) -> dict[str, Any]:
        """The suggestions at a cursor, however improbable, and the tokens of the first one."""
        start = perf_counter()
        name = request.name and self.name_of(request.name)
        name = name or self.files.find(request.before, request.after)
        options = CompleteOptions(alternatives=WIDTH if with_tokens else 1)
        found = self.completer.alternatives(request.before, request.after, name, options)
        seconds, model = perf_counter() - start, self.completer
        explains = with_tokens and isinstance(model, FolderCompleter)
        tokens = model.explain(request.before, found[0].text, name) if explains else []
        listed = [{"text": s.text, "word": s.word, "line": s.line} for s in found]
        return {
            "file": name,
            "suggestions": listed,
            "tokens": tokens,
            "milliseconds": 1e3 * seconds,
            "threshold": min(1.0, self.threshold),
        }

    def name_of(self, path: str) -> str:
        """The name that a file has in training, for its path or its name there."""
        return path if path in self.files.names else name_in_sources(Path(path), self.folder)

    def add(self, asked: TextRequest, emit: Callable[[Event], None], is_cancelled: Callable[[], bool]) -> None:
        """Begin to generate a text. Raises Refused for a prompt that the model cannot read."""
        self.require_batch().add(asked, emit, is_cancelled)

    def advance(self) -> bool:
        """Go on with the texts by a token of each; False if there is none."""
        if self.batch is None or not self.batch.active:
            return False
        self.batch.advance()
        return True

    @property
    def is_full(self) -> bool:
        """True if another text has to wait."""
        return self.batch is not None and self.batch.is_full

    def require_batch(self) -> Batch:
        """What generates texts. Raises Refused while the model is in training."""
        if self.batch is None:
            raise Refused(503, "the model is in training; it completes lines by copying", "unavailable_error", 30)
        return self.batch

    def chat_prompt(self, name: str, messages: Sequence[tuple[str, str]]) -> tuple[list[int], int]:
        """The ids of a chat whose next turn is the model's, and the id that ends it. Raises Refused if the model
        has no chat template, or refuses the messages."""
        self.require_batch()
        chat = self._chats.get(name, self._chats[self.name])
        try:
            ids = chat.encode(tuple(Turn(role, text) for role, text in messages))
            return ids, chat.template.stop_id(chat.loaded.require_tokenizer())
        except ValueError as error:
            raise Refused(400, f"Field 'messages': {' '.join(str(error).split())}") from None

    def with_texts(self, texts: Mapping[str, str | None]) -> OpenFiles | Mapping[str, str | None]:
        """The files with these texts, indexed for `use`; any thread may call it."""
        return self.completer.with_texts({**self._texts, **texts})

    def use(self, files: Any) -> None:
        """Complete lines with these files from now on."""
        texts = files.texts if isinstance(files, OpenFiles) else files
        self._texts |= texts
        self.completer.use(files)
        self.files.update(texts)


def _answer(suggestion: Suggestion, threshold: float, seconds: float) -> Answer:
    text = suggestion.text
    if suggestion.word < threshold or (len(text) < SHORT and not suggestion.ends_line):
        text = ""
    return Answer(text, "stop", line=suggestion.line, seconds=seconds)


def model_stamp(folder: Path) -> tuple[int, ...]:
    """What changes when a model or its gate is written into a folder."""
    files = (folder / "config.json", folder / "completion" / "gate.json", folder / "adapter_config.json")
    return tuple(file.stat().st_mtime_ns if file.exists() else 0 for file in files)


class Models:
    """The models that are served, by name."""

    def __init__(
        self, folders: Sequence[Path], acceptance: float, adapters: Sequence[Path], say: Callable[[str], object]
    ) -> None:
        if adapters and len(folders) > 1:
            raise ValueError("--adapter goes with a single model; name one")
        if wrong := [path for path in adapters if not is_adapter(path)]:
            raise ValueError(f"{wrong[0]}: not an adapter's folder")
        measure.keep_freed_memory()
        names = [folder.resolve().name for folder in folders]
        if twice := [name for i, name in enumerate(names) if name in names[:i]]:
            raise ValueError(f"two models are named {twice[0]!r}; rename one of the folders")
        self.served = {
            name: ServedModel(checkpoint.locate_model(str(folder)).folder, name, acceptance, adapters, say)
            for name, folder in zip(names, folders, strict=True)
        }

    def find(self, name: str) -> ServedModel:
        """The model of this name or with this adapter; the only one for any name. Raises Refused for an unknown
        name."""
        for model in self.served.values():
            if name in model.names or len(self.served) == 1:
                return model
        listed = ", ".join(n for model in self.served.values() for n in model.names)
        raise Refused(404, f"model '{name[:80]}' not found; this server has {listed}", "not_found_error")
