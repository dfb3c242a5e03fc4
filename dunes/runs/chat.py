"""Chat with a model in its own chat template, and with several adapters on one base model.

`Speaker.answer` turns a conversation into an answer, piece by piece, and knows no terminal; `Chat` keeps one
conversation; `run` reads lines and writes answers, `answer` writes one.
"""

import os
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from dunes import checkpoint
from dunes.augment import adapter_active
from dunes.checkpoint import card as cards
from dunes.checkpoint.folder import LoadedModel
from dunes.checkpoint.loading import add_adapter, base_folder, is_adapter
from dunes.generate import Sampler, generate, limit_vocab
from dunes.parts import Decoder
from dunes.plural import plural
from dunes.text import DecodeStream, Tokenizer
from dunes.text.templates import Conversation, Template, Turn, encode_prompt, find_template

NONE = "none"
"""The name of the base model without an adapter."""
ROOM = 4
"""Conversations are truncated to leave 1/ROOM of the context to the answer, if it may be so long."""


class NoTemplate(ValueError):
    """A model without a chat template."""


@dataclass(frozen=True, eq=False)
class ChatModel:
    """An adapter, or with None the base model alone, with its tokenizer and context length; `place` is its
    folder."""

    place: Path
    adapter: str | None
    tokenizer: Tokenizer
    context: int
    card: Mapping[str, Any]

    @cached_property
    def template(self) -> Template:
        """Raises NoTemplate for a model without one."""
        found = find_template(self.tokenizer, self.card)
        if found is None:
            remedy = f'use dunes generate {self.place} "..."'
            raise NoTemplate(f"{self.place}: no chat template, so it was not trained to chat; {remedy}")
        return found

    @cached_property
    def once(self) -> bool:
        """Whether the template is for a single question and answer."""
        asked = Turn("user", "a")
        return not self._writes(asked, Turn("assistant", "b"), asked) and self._writes(asked)

    def check_system(self, system: str) -> None:
        """Raises ValueError if the template cannot write this system prompt."""
        if system:
            next(
                iter(
                    self.template.render([(Turn("system", system), Turn("user", "a"))], add_generation_prompt=True)
                )
            )

    def _writes(self, *talk: Turn) -> bool:
        try:
            next(iter(self.template.render([talk], add_generation_prompt=True)))
        except ValueError:
            return False
        return True


@dataclass(frozen=True)
class ChatEngine:
    """A model with its adapters by name, the first of which is the default."""

    model: Decoder
    models: Mapping[str, ChatModel]

    def chat_model(self, name: str | None = None) -> ChatModel:
        """Raises ValueError for an unknown name."""
        if name is not None and name not in self.models:
            raise ValueError(f"no adapter named {name!r}; available: {', '.join(self.models)}")
        return self.models[name or next(iter(self.models))]

    def named(self, name: str | None) -> str | None:
        """The name of an adapter given by its name or its folder; another name as it is."""
        if name is None or name in self.models:
            return name
        places = {os.path.abspath(chat_model.place): key for key, chat_model in self.models.items()}
        return places.get(os.path.abspath(name), name)

    def answer(self, talk: Conversation, sample: Sampler, tokens: int, name: str | None = None) -> Iterator[str]:
        """Stream the model's answer, of at most `tokens` tokens and as many as still fit into the context.

        Answers of several adapters may be streamed alternately. Raises ValueError for a conversation that the
        template cannot write, or that is too long.
        """
        chat_model = self.chat_model(name)
        ids, stream = (
            encode_prompt(chat_model.template, talk, chat_model.tokenizer),
            DecodeStream(chat_model.tokenizer),
        )
        if len(ids) >= chat_model.context:
            raise ValueError(
                f"the conversation has {plural(len(ids), 'token')} in its template, but the model's "
                "context length is "
                f"{chat_model.context}; shorten it"
            )
        found = generate(
            self.model,
            ids,
            limit=min(tokens, chat_model.context - len(ids)),
            context_length=chat_model.context,
            sample=limit_vocab(sample, chat_model.tokenizer.vocab),
            stop={*chat_model.tokenizer.stops, chat_model.template.stop_id(chat_model.tokenizer)},
        )
        while True:
            with adapter_active(
                self.model, chat_model.adapter
            ):  # for this step only: other answers may be in progress
                token = next(found, None)
            if token is None:
                return
            if piece := stream.step(token.id):
                yield piece

    def cut(self, talk: Conversation, tokens: int, name: str | None = None) -> Conversation:
        """The conversation without its oldest exchanges, as far as needed to leave room; the system prompt
        stays."""
        chat_model = self.chat_model(name)
        most = chat_model.context - min(tokens, chat_model.context // ROOM)
        while len(encode_prompt(chat_model.template, talk, chat_model.tokenizer)) > most:
            asked = [i for i, turn in enumerate(talk) if turn.role == "user"]
            if len(asked) < 2:
                break
            talk = (*talk[: asked[0]], *talk[asked[1] :])
        return talk


def load_chat_engine(
    model: str, adapters: Sequence[Path] = (), device: torch.device | str = "cpu", any_base: bool = False
) -> ChatEngine:
    """Load a model from a folder or the Hub once, with these adapters on it; the first adapter is the default.

    Raises ValueError, before anything is loaded, for a folder that is not an adapter, for two adapters of one
    name, for adapters trained on differently quantized bases, and for adapters of another base unless `any_base`.
    """
    folder = checkpoint.locate_model(model).folder
    labels = [_label(path) for path in (*adapters, *([folder] if is_adapter(folder) else []))]
    if twice := [label for i, label in enumerate(labels) if label in (NONE, *labels[:i])]:
        raise ValueError(f"two adapters are named {twice[0]!r}; rename one of the folders")
    if wrong := [path for path in adapters if not is_adapter(path)]:
        raise ValueError(f"{wrong[0]}: not an adapter's folder; name the model itself: dunes chat {wrong[0]}")
    _alike([*adapters, *([folder] if is_adapter(folder) else [])])
    loaded, _ = checkpoint.load_with_tokenizer(folder, any_base=any_base, adapters=adapters)
    models = _first(folder, loaded)
    new = {}
    for i, path in enumerate(adapters):
        new[labels[i]] = _voice(path, f"a{i}", add_adapter(loaded, path, f"a{i}", any_base))
    loaded.model.to(device)
    return ChatEngine(loaded.model, new | models)


def _label(folder: Path) -> str:
    """The name of an adapter: its folder's, or the link's."""
    return os.path.basename(os.path.abspath(folder))


def _alike(folders: Sequence[Path]) -> None:
    """Raise ValueError unless all these adapters were trained on the same quantization of the base."""
    found = [[c for c in cards.read_card(path).get("changes", []) if c.get("name") != "lora"] for path in folders]
    for path, changes in zip(folders, found, strict=True):
        if changes != found[0]:
            raise ValueError(
                f"{folders[0]} and {path} were trained on differently quantized bases; load one of them"
            )


def _first(folder: Path, loaded: LoadedModel) -> dict[str, ChatModel]:
    """The chat models of a folder: the model itself, or an adapter and its base."""
    if not is_adapter(folder):
        return {NONE: _voice(folder, None, loaded)}
    base = base_folder(folder)
    _, config, card = checkpoint.describe(base)
    alone = replace(loaded, card=card, context_length=config.context_length)
    if Tokenizer.find_file(base):
        alone = replace(alone, tokenizer=Tokenizer.load(base))
    return {_label(folder): _voice(folder, "default", loaded), NONE: _voice(base, None, alone)}


def _voice(place: Path, adapter: str | None, loaded: LoadedModel) -> ChatModel:
    assert loaded.tokenizer is not None, "where an adapter brings none it is the base's"
    return ChatModel(place, adapter, loaded.tokenizer, loaded.context_length, loaded.card)


COMMANDS = {
    "/adapter NAME": f"switch to that adapter; {NONE} is the base model alone",
    "/new": "start a new conversation",
    "/help": "this list",
    "/quit": "exit (or Ctrl-D); Ctrl-C stops an answer",
}


@dataclass
class Chat:
    """One conversation. `note` gets messages that are not the model's."""

    engine: ChatEngine
    sample: Sampler
    tokens: int
    system: str = ""
    note: Callable[[str], None] = print
    name: str | None = None
    talk: list[Turn] = field(default_factory=list)
    cut: bool = False

    def __post_init__(self) -> None:
        self.switch_to(self.name)

    def switch_to(self, name: str | None) -> None:
        """Switch to an adapter by name or folder. Raises ValueError for an unknown one, or one that cannot
        chat."""
        name = self.engine.named(name)
        self.engine.chat_model(name).check_system(self.system)
        _ = self.engine.chat_model(name).template
        self.name = name

    def say(self, text: str) -> Generator[str, None, None]:
        """Stream the answer; what was generated is remembered even if the caller stops early."""
        before = [] if self.engine.chat_model(self.name).once else self.talk
        system = [Turn("system", self.system)] if self.system else []
        talk = (*system, *before, Turn("user", text))
        kept = self.engine.cut(talk, self.tokens, self.name)
        if len(kept) < len(talk) and not self.cut:
            self.cut = True
            self.note("the conversation exceeds the model's context length; its oldest exchanges are dropped")
        said: list[str] = []
        try:
            for piece in self.engine.answer(kept, self.sample, self.tokens, self.name):
                said.append(piece)
                yield piece
        finally:
            if said:
                self.talk = [*kept[len(system) :], Turn("assistant", "".join(said))]

    def command(self, line: str) -> bool:
        """Execute a line that begins with /; False ends the chat. Raises ValueError for an invalid command."""
        word, _, rest = line.partition(" ")
        if word == "/quit":
            return False
        if word == "/new":
            self.talk = []
        elif word == "/adapter" and rest.strip():
            try:
                self.switch_to(rest.strip())
            except NoTemplate as error:
                self.note(str(error))
        elif word in ("/help", "/adapter"):
            here = self.name or next(iter(self.engine.models))
            names = ", ".join(f"{name} (now)" if name == here else name for name in self.engine.models)
            shown = [f"{key:14} {what}" for key, what in COMMANDS.items()] if word == "/help" else []
            self.note("\n".join([*shown, f"adapters: {names}"]))
        else:
            raise ValueError(
                f"{word} is not a command; /help lists the commands, and a leading space sends it as a message"
            )
        return True


def run(chat: Chat, lines: Iterable[str], write: Callable[[str], None], interactive: bool = False) -> None:
    """Answer each line; one that begins with / is a command.

    An empty line separates two answers, and an invalid line raises ValueError. On a terminal (`interactive`) the
    prompt separates them, and the error is only printed.
    """
    answers = 0
    for line in lines:
        try:
            if line.startswith("/"):
                if not chat.command(line.strip()):
                    return
            elif line.strip():
                if answers and not interactive:
                    write("\n")
                answers += 1
                answer(chat, line.strip(), write)
        except ValueError as error:
            if not interactive:
                raise
            chat.note(str(error))


def answer(chat: Chat, text: str, write: Callable[[str], None]) -> None:
    """Write the answer and a newline; Ctrl-C stops it, and what was generated so far is kept."""
    length = 0
    with closing(chat.say(text)) as pieces:
        try:
            for piece in pieces:
                length += len(piece)
                write(piece)
            if not length:
                chat.note("(the answer is empty)")
        except KeyboardInterrupt:
            chat.note("(stopped)")
    write("\n")
