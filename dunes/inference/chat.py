"""Chat in the format of a model's chat template, also with several adapters on one base model.

`ChatEngine.answer` streams an answer; `Chat` is one conversation; `run` reads lines and writes answers.
"""

import json
import os
import subprocess
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from dunes import checkpoint
from dunes.augment import adapter_active, lora
from dunes.checkpoint.card import read_card
from dunes.checkpoint.open import (
    LoadedModel,
    add_adapter,
    base_folder,
    is_adapter,
    readable_folder,
    round_for_speed,
)
from dunes.extra import python_command
from dunes.files.atomic import write_file
from dunes.files.model_file import cards_trusted
from dunes.generate import Sampler
from dunes.generate.decode_packages import step_source
from dunes.inference.text_generator import TextGenerator
from dunes.parts import CacheFormat
from dunes.text import Tokenizer
from dunes.text.templates import Conversation, Template, Turn, encode_prompt, find_template
from dunes.units import plural

NONE = "none"
"""Name of the chat model without an adapter folder. Adapters in a model folder are part of the model."""
ROOM = 4
"""A truncated conversation leaves 1/ROOM of the context length for the answer, or `max_tokens` if that is less."""


class NoTemplate(ValueError):
    """Raised for a model without a chat template."""


@dataclass(frozen=True, eq=False)
class ChatModel:
    """A model for chat. `loaded` is the model. `adapter` is the name of the adapter to use (None for the base
    model alone). `place` is the folder of the adapter or model."""

    place: Path
    adapter: str | None
    loaded: LoadedModel
    compiles: bool = False
    """If True, a missing compiled step for decoding is compiled in the background."""
    format: CacheFormat | None = None
    """Format of a quantized cache; no compiled step is used with it."""

    @cached_property
    def generator(self) -> TextGenerator:
        step = step_source(self.loaded.model, partial(start_compiling, self.place) if self.compiles else None)
        return TextGenerator(self.loaded, step, self.format)

    @cached_property
    def template(self) -> Template:
        """The chat template. Raises NoTemplate if the model has none."""
        template = find_template(self.loaded.require_tokenizer(), self.loaded.card)
        if template is None:
            remedy = f'use dunes generate {self.place} "..."'
            raise NoTemplate(f"{self.place}: no chat template, so it was not trained to chat; {remedy}")
        return template

    @cached_property
    def single_turn(self) -> bool:
        """True if the template supports only a single question and answer."""
        question = Turn("user", "a")
        return not self._supports(question, Turn("assistant", "b"), question) and self._supports(question)

    def check_system(self, system: str) -> None:
        """Raise ValueError if the template does not support this system prompt."""
        if system:
            self._render(Turn("system", system), Turn("user", "a"))

    def encode(
        self, talk: Conversation, variables: Mapping[str, Any] | None = None, continues: bool = False
    ) -> list[int]:
        """Token ids of a conversation, for the model to answer or, with `continues`, to continue its last turn."""
        return encode_prompt(self.template, talk, self.loaded.require_tokenizer(), variables, continues)

    def _supports(self, *talk: Turn) -> bool:
        with suppress(ValueError):
            self._render(*talk)
            return True
        return False

    def _render(self, *talk: Turn) -> None:
        self.template.render(talk, add_generation_prompt=True)


@dataclass(frozen=True)
class ChatEngine:
    """A base model with its adapters, as chat models by name; the first is the default."""

    models: Mapping[str, ChatModel]

    def chat_model(self, name: str | None = None) -> ChatModel:
        """The model of this name, or the default. Raises ValueError for an unknown name."""
        if name is not None and name not in self.models:
            raise ValueError(f"no adapter named {name!r}; available: {', '.join(self.models)}")
        return self.models[name or next(iter(self.models))]

    def resolve_name(self, name: str | None) -> str | None:
        """The name of an adapter given by name or folder; an unknown name is returned unchanged."""
        if name is None or name in self.models:
            return name
        places = {os.path.abspath(chat_model.place): key for key, chat_model in self.models.items()}
        return places.get(os.path.abspath(name), name)

    def answer(
        self, talk: Conversation, sample: Sampler, max_tokens: int, name: str | None = None
    ) -> Iterator[str]:
        """Stream the model's answer, up to `max_tokens` tokens or the end of the context.

        Answers of several adapters may be streamed alternately. Raises ValueError for a conversation that the
        template does not support, or that is too long.
        """
        chat_model = self.chat_model(name)
        generator, ids = chat_model.generator, chat_model.encode(talk)
        if len(ids) >= generator.context_length:
            raise ValueError(
                f"the conversation has {plural(len(ids), 'token')} in its template, but the model's "
                f"context length is {generator.context_length}; shorten it"
            )
        limit = min(max_tokens, generator.context_length - len(ids))
        stop = {*generator.tokenizer.stops, chat_model.template.stop_id(generator.tokenizer)}
        with closing(generator.stream(ids, limit, sample, stop=stop)) as pieces:
            while True:
                with adapter_active(generator.model, chat_model.adapter):  # other answers may be in progress
                    piece = next(pieces, None)
                if piece is None:
                    return
                if piece.text:
                    yield piece.text

    def truncate(self, talk: Conversation, max_tokens: int, name: str | None = None) -> Conversation:
        """Drop the oldest exchanges as needed to leave room for the answer; the system prompt stays."""
        chat_model = self.chat_model(name)
        context_length = chat_model.loaded.context_length
        limit = context_length - min(max_tokens, context_length // ROOM)
        while len(chat_model.encode(talk)) > limit:
            questions = [i for i, turn in enumerate(talk) if turn.role == "user"]
            if len(questions) < 2:
                break
            talk = (*talk[: questions[0]], *talk[questions[1] :])
        return talk


def load_chat_engine(
    model: str,
    adapters: Sequence[Path] = (),
    device: torch.device | str = "cpu",
    any_base: bool = False,
    compiles: bool = False,
    format: CacheFormat | None = None,
) -> ChatEngine:
    """Load a model once, from a folder or the Hub, with these adapters on it; the first adapter is the default.

    With `compiles` and without `adapters`, a step for decoding is compiled in the background. With a cache
    `format`, no step is used. Before anything is loaded, raises ValueError for a folder that is not an adapter,
    for two adapters of the same name, and for adapters trained on differently quantized bases. Without `any_base`,
    also raises ValueError for adapters of another base.
    """
    folder = checkpoint.locate_model(model).folder
    folders = [*adapters, *([folder] if is_adapter(folder) else [])]
    labels = [_label(path) for path in folders]
    if duplicates := [label for i, label in enumerate(labels) if label in (NONE, *labels[:i])]:
        raise ValueError(f"two adapters are named {duplicates[0]!r}; rename one of the folders")
    if (other := next((path for path in adapters if not is_adapter(path)), None)) is not None:
        raise ValueError(f"{other}: not an adapter's folder; chat with the model: dunes chat {other}")
    _check_same_quantization(folders)
    loaded = checkpoint.load_with_tokenizer(folder, any_base=any_base, adapters=adapters)
    of_folder = _chat_models(folder, loaded)
    models = {
        label: ChatModel(path, f"a{i}", add_adapter(loaded, path, f"a{i}", any_base))
        for i, (label, path) in enumerate(zip(labels, adapters, strict=False))
    } | of_folder
    loaded.model.to(device)
    if not adapters:
        round_for_speed(loaded)
    default = None if adapters else next(iter(models))
    return ChatEngine(
        {k: replace(m, format=format, compiles=compiles and k == default) for k, m in models.items()}
    )


def _label(folder: Path) -> str:
    """The name of an adapter: the name of its folder or link."""
    return os.path.basename(os.path.abspath(folder))


def _check_same_quantization(folders: Sequence[Path]) -> None:
    """Raise ValueError unless all these adapters were trained on the same quantization of the base."""
    cards_read = [read_card(readable_folder(path)) for path in folders]
    changes = [[c for c in card.get("changes", []) if c.get("name") != "lora"] for card in cards_read]
    if other := next((path for path, own in zip(folders, changes, strict=True) if own != changes[0]), None):
        raise ValueError(f"{folders[0]} and {other} were trained on differently quantized bases; load one of them")


def _chat_models(folder: Path, loaded: LoadedModel) -> dict[str, ChatModel]:
    """The chat models of a folder: the model itself, or an adapter and its base."""
    if not is_adapter(folder) or not lora.active_adapter(loaded.model):
        return {NONE: ChatModel(folder, lora.active_adapter(loaded.model), loaded)}
    base = base_folder(folder)
    source = checkpoint.describe(base)
    base_only = replace(loaded, card=dict(source.card), context_length=source.context_length)
    if Tokenizer.find_file(base):
        base_only = replace(base_only, tokenizer=Tokenizer.load(base))
    return {_label(folder): ChatModel(folder, "default", loaded), NONE: ChatModel(base, None, base_only)}


COMMANDS = {
    "/adapter NAME": f"switch to that adapter; {NONE} is the base model alone",
    "/new": "start a new conversation",
    "/retry": "another answer to the last message",
    "/undo": "drop the last message and its answer",
    "/save FILE": "write the conversation to FILE.jsonl, which dunes finetune reads",
    "/help": "this list",
    "/quit": "exit (or Ctrl-D); Ctrl-C stops an answer",
}


@dataclass
class Chat:
    """One conversation. `note` is called with messages that are not from the model.

    `pending` is the last message while it has no answer.
    """

    engine: ChatEngine
    sample: Sampler
    max_tokens: int
    system: str = ""
    note: Callable[[str], None] = print
    name: str | None = None
    talk: list[Turn] = field(default_factory=list)
    pending: str = ""
    truncated: bool = False

    def __post_init__(self) -> None:
        self.switch_to(self.name)

    def switch_to(self, name: str | None) -> None:
        """Switch to an adapter by name or folder. Raises ValueError for an unknown name or a missing template."""
        name = self.engine.resolve_name(name)
        self.engine.chat_model(name).check_system(self.system)
        _ = self.engine.chat_model(name).template
        self.name = name

    def say(self, text: str) -> Generator[str, None, None]:
        """Stream the answer to `text`. Unless the answer is empty, both texts are added to the conversation, even
        if the caller stops early."""
        before = [] if self.engine.chat_model(self.name).single_turn else self.talk
        system, self.pending = self._system(), text
        talk = (*system, *before, Turn("user", text))
        prompt = self.engine.truncate(talk, self.max_tokens, self.name)
        if len(prompt) < len(talk) and not self.truncated:
            self.truncated = True
            self.note("the conversation exceeds the model's context length; its oldest exchanges are dropped")
        pieces: list[str] = []
        try:
            for piece in self.engine.answer(prompt, self.sample, self.max_tokens, self.name):
                pieces.append(piece)
                yield piece
        finally:
            if pieces:
                self.talk, self.pending = [*prompt[len(system) :], Turn("assistant", "".join(pieces))], ""

    def retry(self) -> Generator[str, None, None]:
        """Stream another answer to the last message; if the new answer is empty, the earlier answer stays.

        Raises ValueError if the conversation has no message.
        """
        before, pending = self.talk, self.pending
        text = pending or self.undo()
        shorter = self.talk
        try:
            yield from self.say(text)
        finally:
            if self.talk is shorter:
                self.talk, self.pending = before, pending

    def undo(self) -> str:
        """Drop the last message and its answer; returns the message. Raises ValueError if there is no message."""
        if not self.talk:
            raise ValueError("there is no message yet")
        last = max(i for i, turn in enumerate(self.talk) if turn.role == "user")
        text, self.talk, self.pending = self.talk[last].text, self.talk[:last], ""
        return text

    def save(self, path: Path) -> None:
        """Write the conversation to a new file, as a record of finetuning data. Raises ValueError or OSError."""
        if path.suffix != ".jsonl" or os.path.lexists(path):
            raise ValueError(f"/save: expected a new file name that ends in .jsonl, found {str(path)!r}")
        if not self.talk:
            raise ValueError("there is no message yet")
        messages = [{"role": turn.role, "content": turn.text} for turn in (*self._system(), *self.talk)]
        write_file(path, (json.dumps({"messages": messages}) + "\n").encode())
        self.note(f"saved: {path}")

    def _system(self) -> list[Turn]:
        return [Turn("system", self.system)] if self.system else []

    def command(self, line: str) -> bool:
        """Execute a line that starts with /; returns False if the line ends the chat. Raises ValueError for an
        invalid line."""
        word, _, rest = line.partition(" ")
        if word == "/quit":
            return False
        if word == "/new":
            self.talk, self.pending = [], ""
        elif word == "/undo":
            self.undo()
        elif word == "/save":
            self.save(Path(os.path.expanduser(rest.strip())))
        elif word == "/adapter" and rest.strip():
            self.switch_to(rest.strip())
        elif word in ("/help", "/adapter"):
            current = self.name or next(iter(self.engine.models))
            names = ", ".join(f"{name} (now)" if name == current else name for name in self.engine.models)
            usage = [f"{key:14} {effect}" for key, effect in COMMANDS.items()] if word == "/help" else []
            self.note("\n".join([*usage, f"adapters: {names}"]))
        else:
            hint = "/help lists the commands, and a line that starts with a space is a message"
            raise ValueError(f"{word} is not a command; {hint}")
        return True


def run(chat: Chat, lines: Iterable[str], write: Callable[[str], None], interactive: bool = False) -> None:
    """Answer each line; a line that starts with / is a command.

    Without `interactive`, an empty line is written between two answers, and an invalid line raises ValueError or
    OSError. With `interactive`, the terminal's prompt separates the answers, and errors are only printed.
    """
    answers = 0
    for line in lines:
        try:
            retry = line.rstrip() == "/retry"
            if line.startswith("/") and not retry:
                if not chat.command(line.strip()):
                    return
            elif line.strip():
                if answers and not interactive:
                    write("\n")
                answers += 1
                answer(chat, chat.retry() if retry else chat.say(line.strip()), write)
        except (ValueError, OSError) as error:
            if not interactive:
                raise
            chat.note(str(error))


def answer(chat: Chat, text: Generator[str, None, None], write: Callable[[str], None]) -> None:
    """Write the answer and a newline. Ctrl-C stops the answer; the conversation keeps its text so far."""
    length = 0
    with closing(text) as pieces:
        try:
            for piece in pieces:
                length += len(piece)
                write(piece)
            if not length:
                chat.note("(the answer is empty)")
        except KeyboardInterrupt:
            chat.note("(stopped)")
    write("\n")


_compiling: dict[Path, subprocess.Popen[bytes]] = {}


def start_compiling(folder: Path) -> subprocess.Popen[bytes]:
    """Compile the step of a model folder in a low-priority process that may outlive this one.

    If this process has already started one for the folder, and it still runs, it is returned.
    """
    if (running := _compiling.get(folder)) and running.poll() is None:
        return running
    trust = ["--trust-code"] * cards_trusted()
    command, environment = python_command("-m", "dunes", "compile", str(folder), *trust)
    quiet: Any = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    process = subprocess.Popen(command, **quiet, env=environment, start_new_session=True)
    os.setpriority(os.PRIO_PROCESS, process.pid, 19)
    # Waiting avoids a zombie and a ResourceWarning if the caller drops the process.
    threading.Thread(target=process.wait, daemon=True).start()
    _compiling[folder] = process
    return process
