"""The verbs that serve a model to editors."""

import os
import sys
from contextlib import ExitStack, closing
from contextvars import copy_context
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, get_args

import tyro

from dunes.cli.process import die_by_signals, drop_lost_output
from dunes.extra import extra
from dunes.flags import REQUIRED, flag
from dunes.serve import editors

if TYPE_CHECKING:
    from dunes.serve.worker import Worker

Folders = Annotated[
    tuple[str, ...], tyro.conf.Positional, flag("MODEL", REQUIRED, "Runs, model folders, GGUF files, or smollm2.")
]
AllowHost = Annotated[tyro.conf.UseAppendAction[tuple[str, ...]], flag("NAME", "none")]
Editor = Literal["vim", "nvim", "vscode", "zed", "emacs", "helix"]
KEY = "DUNES_API_KEY"
DEFAULT = "http://127.0.0.1:8012"
"""Default address of the server, which is also that of llama.vim."""


def serve(
    models: Folders,
    *,
    host: str = "127.0.0.1",
    port: int = 8012,
    allow_host: AllowHost = (),
    adapter: Annotated[tyro.conf.UseAppendAction[tuple[Path, ...]], flag("FOLDER", "none")] = (),
    acceptance: float = 0.35,
    ollama: bool = False,
    no_follow: bool = False,
    config: Annotated[Editor | None, flag("EDITOR", "none")] = None,
) -> int:
    """Serve a model to editors and programs: completion of lines, texts and chats, over HTTP.

    The server speaks the protocols of llama-server, OpenAI, Mistral and Ollama. When a file of the training
    sources is saved, completion can copy from the new text within two seconds.

    Example: dunes serve runs/project

    Args:
        host: Address to listen on. For an address that other machines can reach, set a key in DUNES_API_KEY.
        port: Port to listen on; llama.vim connects to 8012.
        allow_host: Another host name of this server; may be repeated.
        adapter: Adapter folder to load; requests select it by the folder's name. May be repeated.
        acceptance: Desired share of accepted suggestions; fitted thresholds hide unlikely ones; 0 shows all.
        ollama: Also listen on Ollama's own port, 11434.
        no_follow: Do not watch the files of the training sources.
        config: Print the settings for this editor, and exit.
    """
    if not 0 <= acceptance <= 1:
        raise ValueError(f"--acceptance is {acceptance}; expected a share between 0 and 1")
    if not models:
        raise ValueError("MODEL is missing; pass a model folder, like runs/project")
    if config is not None:
        print(editors.config(config, editors.url(host, port), os.path.abspath(models[0])), end="")
        return 0
    drop_lost_output()
    for module in ("starlette", "uvicorn"):
        extra(module, "serve")
    from dunes.serve.http import open_sockets, run
    from dunes.serve.protocols import ollama as ollama_protocol

    key = os.environ.get(KEY) or None
    check_host(host, key)
    sockets = open_sockets(host, [port, ollama_protocol.PORT] if ollama else [port])
    from dunes import checkpoint
    from dunes.serve.app import Server
    from dunes.serve.client import listening
    from dunes.serve.worker import Worker

    with ExitStack() as stack:
        for listener in sockets:
            stack.enter_context(listener)
        folders = [checkpoint.locate_model(model).folder for model in models]
        say = partial(print, file=sys.stderr)
        worker = stack.enter_context(closing(Worker(folders, acceptance, adapter, say, not no_follow)))
        place = editors.url(host, sockets[0].getsockname()[1])
        app = Server(worker).app([host, *allow_host], key)
        own = stack.enter_context(listening([] if key else folders))
        run(app, [*sockets, *own], partial(_announce, worker, models[0], place))
    return 0


def check_host(host: str, key: str | None) -> None:
    """Raise ValueError for an address that other machines can reach, if there is no key."""
    from dunes.serve.http import is_loopback

    if not is_loopback(host) and key is None:
        raise ValueError(
            f"--host {host} is reachable from other machines; set a key in {KEY}, which clients must send"
        )


def _announce(worker: "Worker", model: str, place: str) -> None:
    names = ", ".join(name for served in worker.models.values() for name in served.names)
    print(f"serving {names} at {place} (Ctrl-C ends it)")
    port, other = place.rpartition(":")[2], place != DEFAULT
    command = f"dunes serve {model}{f' --port {port}' if other else ''}"
    print(f"editors: {command} --config {'|'.join(get_args(Editor))} prints an editor's settings")
    print(f"nothing appears? dunes doctor{f' {place}' if other else ''}", flush=True)


def lsp(
    model: Annotated[
        str, tyro.conf.Positional, flag("MODEL", about="A model folder, or a run that still trains.")
    ],
    *,
    acceptance: float = 0.35,
    no_follow: bool = False,
) -> int:
    """Serve a model to an editor as a language server, on standard input and output.

    The server offers inline completion (Neovim 0.12) and plain completion (Helix and others).

    Example: dunes lsp runs/project

    Args:
        acceptance: Desired share of accepted suggestions; fitted thresholds hide unlikely ones; 0 shows all.
        no_follow: Do not watch the files of the training sources.
    """
    if not 0 <= acceptance <= 1:
        raise ValueError(f"--acceptance is {acceptance}; expected a share between 0 and 1")
    drop_lost_output()
    folder = Path(model)
    if not folder.is_dir():
        raise ValueError(f"{model}: no such folder; train a model there: dunes train SOURCE --out {model}")
    extra("pygls", "lsp")
    from dunes.serve.lsp import start

    def load() -> "Worker":
        from dunes.serve.worker import Worker

        return Worker([folder], acceptance, (), partial(print, file=sys.stderr), not no_follow)

    die_by_signals()  # a cleanup would wait for the thread that reads standard input
    # The loading thread inherits the trust settings.
    start(partial(copy_context().run, load), sys.stdin.buffer, sys.stdout.buffer)
    return 0


def doctor(
    address: Annotated[str, tyro.conf.Positional, flag("ADDRESS", DEFAULT)] = DEFAULT,
    *,
    file: Annotated[str | None, flag("FILE:LINE:COLUMN", "an example")] = None,
) -> int:
    """Send each editor's requests to a running server, and report the text that the editor would show.

    Example: dunes doctor

    Example: dunes doctor --file src/main.py:12:9

    Args:
        address: The server's address, or its port on this machine. A key, if the server needs one, is read from
            DUNES_API_KEY.
        file: Cursor position to complete at.
    """
    from dunes.serve.doctor import AFTER, BEFORE, examine

    before, after = BEFORE, AFTER
    if file is not None:
        from dunes.text.lines import text_around_cursor

        _, before, after = text_around_cursor(file)
    if "://" not in address:
        address = f"http://{'127.0.0.1:' if address.isdecimal() else ''}{address}"
    failed = False
    for line in examine(address.rstrip("/"), os.environ.get(KEY, ""), before, after):
        print(f"{'FAILS' if line.problem else 'ok':5}  {line.client}: {line.problem or line.text}")
        failed |= bool(line.problem)
    return 1 if failed else 0
