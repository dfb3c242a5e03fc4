"""A model folder that is served: lines by its completer, texts by its model, and what follows the user's work."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

from dunes import checkpoint, measure
from dunes.augment import lora
from dunes.checkpoint import LoadedModel
from dunes.checkpoint.loading import add_adapter, is_adapter
from dunes.runs.completion.completer import CopyCompleter, FolderCompleter, find_completer, name_in_sources
from dunes.runs.completion.engine import OpenFiles
from dunes.runs.completion.protocol import Suggestion
from dunes.runs.completion.search import WIDTH, CompleteOptions
from dunes.runs.step_package import step_source
from dunes.serve.batch import Adapters, Batch
from dunes.serve.fields import Refused
from dunes.serve.recognise import FileFinder
from dunes.serve.requests import Answer, Event, LineRequest, TextRequest
from dunes.text.templates import Template, Turn, encode_prompt, find_template

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
        self.completer = find_completer(self.folder, self._say)
        self.files = FileFinder(self.completer.training_files)
        self.loaded: LoadedModel | None = None
        self.batch: Batch | None = None
        if isinstance(self.completer, FolderCompleter):
            self.loaded = self.completer.loaded
            names = {self.name: lora.active_adapter(self.loaded.model)} if self._adapter_folders else {}
            for i, path in enumerate(self._adapter_folders):
                add_adapter(self.loaded, path, f"a{i}")
                names[path.resolve().name] = f"a{i}"
            if names:
                lora.set_adapter(self.loaded.model, names[self.name])
            self.batch = Batch(self.loaded, step_source(self.loaded.model), Adapters(names))
        if self._texts:
            self.use(self.with_texts({}))

    @property
    def names(self) -> list[str]:
        """The names of the model and of its adapters."""
        return [self.name, *(path.resolve().name for path in self._adapter_folders)]

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

    def explain(self, request: LineRequest) -> dict[str, Any]:
        """The suggestions at a cursor with their tokens, for the page."""
        start = perf_counter()
        name = request.name or self.files.find(request.before, request.after)
        options = CompleteOptions(alternatives=WIDTH)
        found = self.completer.alternatives(request.before, request.after, name, options)
        seconds, model = perf_counter() - start, self.completer
        tokens = [] if isinstance(model, CopyCompleter) else model.explain(request.before, found[0].text, name)
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

    def chat_prompt(self, messages: Sequence[tuple[str, str]]) -> tuple[list[int], int]:
        """The ids of a chat whose next turn is the model's, and the id that ends it. Raises Refused if the model
        has no chat template, or refuses the messages."""
        tokenizer, loaded = self.require_batch().tokenizer, self.loaded
        assert loaded is not None, "it generates"
        template: Template | None = find_template(tokenizer, loaded.card)
        if template is None:
            raise Refused(400, f"{self.name} has no chat template, so it was not trained to chat; use completions")
        try:
            ids = encode_prompt(template, tuple(Turn(role, text) for role, text in messages), tokenizer)
        except ValueError as error:
            raise Refused(400, f"Field 'messages': {' '.join(str(error).split())}") from None
        return ids, template.stop_id(tokenizer)

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
