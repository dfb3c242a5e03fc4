# ruff: noqa: F811
"""Unmodified editors and clients of other people's APIs, against a real server.

Vim's plugin, Neovim and Helix are looked for in $DUNES_EDITORS, where `tests/get_editors.sh FOLDER vim-llama.cpp
neovim hx` puts them, and VS Code's server in $DUNES_VSCODE, where `tests/get_vscode.sh FOLDER` does.
"""

import asyncio
import importlib.util
import itertools
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from conftest import eventually
from dunes.completion.completer import FolderCompleter
from dunes.completion.search import CompleteOptions
from dunes.serve.editors import config
from test_serve import (  # noqa: F401  (fixtures)
    BEFORE,
    end_training,
    in_training,
    infill,
    ok,
    programs,
    run,
    server,
)

pytestmark = pytest.mark.slow
EDITORS = Path(os.environ.get("DUNES_EDITORS", "/nonexistent"))
PLUGIN = EDITORS / "usr/share/vim-llama.cpp"
NVIM = EDITORS / "usr/bin/nvim"
HELIX = EDITORS / "usr/lib/hx/hx"
VSCODE = Path(os.environ.get("DUNES_VSCODE", "/nonexistent"))
CHROMIUM = shutil.which("chromium")
FIRST = "def task_1_3(value_3, limit=3):"


def needs(*modules):
    missing = [m for m in modules if importlib.util.find_spec(m) is None]
    return pytest.mark.skipif(bool(missing), reason=f"{', '.join(missing)}: not installed")


class Terminal:
    """A program in a terminal of 100 columns."""

    def __init__(self, command, environment):
        import pexpect
        import pyte

        class Screen(pyte.Screen):
            def select_graphic_rendition(self, *attributes, private=False):
                if not private:  # pyte takes no such sequences
                    super().select_graphic_rendition(*attributes)

            def report_device_status(self, mode, private=False):
                if not private:
                    super().report_device_status(mode)

        self.timeout, self.eof = pexpect.TIMEOUT, pexpect.EOF
        self.screen = Screen(100, 24)
        self.stream = pyte.ByteStream(self.screen)
        env = {**os.environ, "TERM": "xterm-256color", **environment}
        self.child = pexpect.spawn(command[0], command[1:], dimensions=(24, 100), env=env, timeout=20)

    def wait(self, seconds=0.05):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            try:
                self.stream.feed(self.child.read_nonblocking(1 << 16, timeout=0.02))
            except self.timeout:
                continue
            except self.eof:
                return

    def send(self, text, pause=0.04):
        for key in text:
            self.child.send(key)
            self.wait(pause)

    def shows(self, text, seconds=20):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.wait(0.1)
            if any(text in line for line in self.screen.display):
                return True
        return False


def type_and_accept(editor, file, ghost):
    """Type the beginning of a line, see its ghost text, accept it, and save."""
    editor.wait(1.0)
    editor.send("Go")
    editor.send(FIRST)
    editor.send("\r    return val")
    assert editor.shows(f"    return val{ghost}"), "\n".join(editor.screen.display)
    assert ghost not in file.read_text().splitlines()[-1]
    editor.send("\t", 0.5)
    editor.send("\x1b", 0.5)
    editor.send(":wq\r", 0.5)
    editor.wait(1.0)
    last = file.read_text().splitlines()[-1]
    assert last == f"    return val{ghost}"


@pytest.mark.skipif(not PLUGIN.is_dir() or shutil.which("vim") is None, reason=f"no vim, or no {PLUGIN}")
@needs("pexpect", "pyte")
def test_vim_shows_ghost_text_and_tab_takes_it(run, tmp_path):
    file, settings = tmp_path / "new.py", tmp_path / "vimrc"
    file.write_text("x = 1\n")
    with server(run, "--acceptance", 0) as port:
        endpoint = f"let g:llama_config = {{'endpoint_fim': 'http://127.0.0.1:{port}/infill', 'endpoint': 'http://127.0.0.1:{port}/infill'}}"
        settings.write_text(f"set nocompatible noswapfile rtp^={PLUGIN}\nfiletype off\nsyntax off\n{endpoint}\n")
        ghost = ok(port, "/infill", infill(f"x = 1\n{FIRST}\n    return val", "\n"))["content"]
        assert len(ghost) > 10
        type_and_accept(Terminal(["vim", "-u", str(settings), "-i", "NONE", str(file)], {}), file, ghost)


def loaded_by_its_own(program):
    """The command of a program from $DUNES_EDITORS, whose libraries are newer than the system's."""
    loader = next(EDITORS.rglob("ld-linux*.so*"))
    libraries = f"{EDITORS}/usr/lib/x86_64-linux-gnu:{EDITORS}/lib/x86_64-linux-gnu"
    return [str(loader), "--library-path", libraries, str(program)]


@pytest.mark.skipif(not HELIX.exists(), reason=f"no {HELIX}")
@needs("pexpect", "pyte", "pygls")
def test_helix_completes_with_the_lines_that_are_printed(run, tmp_path):
    file, settings = tmp_path / "new.py", tmp_path / "helix"
    file.write_text("x = 1\n")
    settings.mkdir()
    ours = f"command = '{sys.executable}'\nargs = ['-m', 'dunes', 'lsp', '--acceptance', '0', "
    lines = config("helix", "", str(run)).replace('command = "dunes"\nargs = ["lsp", ', ours)
    assert ours in lines
    (settings / "languages.toml").write_text(lines)
    before, three = f"x = 1\n{FIRST}\n    return val", CompleteOptions(alternatives=3)
    expected = FolderCompleter(run).alternatives(before, "\n", "new.py", three)[0].text
    editor = Terminal([*loaded_by_its_own(HELIX), str(file)], {
        "XDG_CONFIG_HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "HELIX_RUNTIME": str(HELIX.parent / "runtime"),
    })  # fmt: skip
    editor.wait(1.0)
    editor.send("o" + FIRST)
    assert editor.shows(FIRST)
    editor.send("\r    return va")
    editor.wait(8.0)
    editor.send("l")
    assert editor.shows(f"val{expected}"[:30]), "\n".join(editor.screen.display)
    editor.send("\t\r\x1b", 0.5)
    editor.send(":wq\r", 0.3)
    assert eventually(lambda: file.read_text().splitlines()[-1] == f"    return val{expected}"), file.read_text()


def listens(port):
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


@contextmanager
def code_server(folder, settings):
    """The address of VS Code's server, which has the extension, for the folder `project` in this one."""
    (folder / "data/User").mkdir(parents=True)
    (folder / "data/User/settings.json").write_text(f"{{{settings}}}")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    options = ["--auth", "none", "--bind-addr", f"127.0.0.1:{port}", "--user-data-dir", folder / "data"]
    options += ["--extensions-dir", VSCODE / "extensions", "--config", folder / "config.yaml"]
    options += ["--disable-telemetry", "--disable-update-check", "--disable-workspace-trust"]
    modules = VSCODE / "node_modules"
    command = [modules / "node/bin/node", modules / "code-server/out/node/entry.js", *options]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        assert eventually(lambda: listens(port))
        yield f"http://127.0.0.1:{port}/?folder={folder / 'project'}"
    finally:
        process.terminate()
        process.wait(20)


@pytest.mark.skipif(not VSCODE.is_dir() or CHROMIUM is None, reason=f"no chromium, or no {VSCODE}")
@needs("playwright")
@pytest.mark.parametrize("name", ["new.js", "new.py"])
def test_vs_code_shows_ghost_text_and_tab_takes_it(run, tmp_path, name):
    from playwright.sync_api import sync_playwright

    file = tmp_path / "project" / name
    file.parent.mkdir()
    file.write_text(f"x = 1\n{FIRST}\n    return\n")
    with server(run, "--acceptance", 0) as port:
        settings = config("vscode", f"http://127.0.0.1:{port}", "").partition("\n")[2]
        expected = ok(port, "/infill", infill(f"x = 1\n{FIRST}\n    return ", "\n"))["content"]
        with code_server(tmp_path, settings) as address, sync_playwright() as play:
            browser = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
            page = browser.new_page()
            page.set_default_timeout(60_000)
            page.goto(address)
            page.get_by_role("treeitem", name=name).dblclick()
            if name.endswith(".py"):  # for which the extension starts when its side bar is opened
                page.locator(".activitybar [aria-label*=llama]").first.click()
            # It greets its first user.
            page.locator(".tab", has_text="Information").wait_for()
            page.locator(".tab", has_text=name).click()
            page.locator(".view-line", has_text="return").click()
            page.keyboard.press("End")
            page.keyboard.type(" ")  # in a word, the list of words comes first
            ghost = lambda: "".join(page.locator("[class*=ghost-text]").all_inner_texts()).replace("\xa0", " ")
            assert eventually(lambda: ghost() == expected), ghost()
            assert expected not in file.read_text()
            page.keyboard.press("Tab")
            page.keyboard.press("Control+S")
            assert eventually(lambda: file.read_text().splitlines()[2] == f"    return {expected}")
            browser.close()


class Neovim:
    """A Neovim without a terminal, asked through its own command line."""

    def __init__(self, settings, file, socket):
        self.command, self.socket = loaded_by_its_own(NVIM), str(socket)
        options = ["--headless", "--listen", self.socket, "-u", str(settings), "-i", "NONE", str(file)]
        self.process = subprocess.Popen([*self.command, *options], stderr=subprocess.DEVNULL)
        assert eventually(socket.exists)

    def _ask(self, *arguments):
        command = [*self.command, "--server", self.socket, *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=20).stdout

    def send(self, keys):
        self._ask("--remote-send", keys)

    def ghost_text(self):
        """The virtual text of the buffer, which it shows but does not have."""
        marks = "vim.api.nvim_buf_get_extmarks(0, -1, 0, -1, {details = true})"
        found = json.loads(self._ask("--remote-expr", f"json_encode(luaeval('{marks}'))") or "[]")
        return "".join(piece for *_, details in found for piece, *_ in details.get("virt_text", []))

    def has_server(self):
        ready = "vim.iter(vim.lsp.get_clients()):any(function(c) return c.initialized end)"
        return "true" in self._ask("--remote-expr", f"luaeval('{ready}')")

    def line(self):
        return self._ask("--remote-expr", "getline('.')").rstrip("\n")


@pytest.mark.skipif(not NVIM.exists(), reason=f"no {NVIM}")
@needs("pygls")
def test_neovim_completes_inline_with_the_lines_that_are_printed(run, tmp_path, monkeypatch):
    file, settings = tmp_path / "new.py", tmp_path / "init.lua"
    file.write_text("x = 1\n")
    ours = f"'{sys.executable}', '-m', 'dunes', 'lsp', '--acceptance', '0',"
    lines = config("nvim", "", str(run)).replace("'dunes', 'lsp',", ours)
    settings.write_text(f"vim.o.swapfile = false\nvim.cmd('filetype indent off')\n{lines}")
    monkeypatch.setenv("VIMRUNTIME", str(EDITORS / "usr/share/nvim/runtime"))
    for name in ("XDG_STATE_HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))
    before, three = f"x = 1\n{FIRST}\n    return val", CompleteOptions(alternatives=3)
    expected = FolderCompleter(run).alternatives(before, "\n", "new.py", three)[0].text
    assert len(expected) > 10
    nvim = Neovim(settings, file, tmp_path / "socket")
    try:
        nvim.send(f"Go{FIRST}<CR>    return va")
        assert eventually(nvim.has_server)
        nvim.send("l")
        assert eventually(lambda: expected in nvim.ghost_text(), 40), nvim.ghost_text()
        nvim.send("<Tab>")
        assert eventually(lambda: nvim.line() == f"    return val{expected}"), nvim.line()
        nvim.send("<Esc>:wqa<CR>")
        assert eventually(lambda: file.read_text().splitlines()[-1] == f"    return val{expected}")
        assert nvim.process.wait(20) == 0
    finally:
        nvim.process.kill()
        nvim.process.wait()


@pytest.fixture(scope="module")
def clients_port(run):
    with server(run, "--acceptance", 0) as port:
        yield port


@needs("openai")
def test_openais_client(clients_port):
    import openai

    with openai.OpenAI(base_url=f"http://127.0.0.1:{clients_port}/v1", api_key="none") as client:
        assert [m.id for m in client.models.list()] == ["run"]
        line = client.completions.create(model="run", prompt=BEFORE, suffix="\n", max_tokens=64).choices[0].text
        assert line.startswith("ue_3 * ")
        settings = {"model": "run", "prompt": "def task_", "max_tokens": 12, "temperature": 0}
        whole = client.completions.create(**settings, logprobs=2)
        assert len(whole.choices[0].logprobs.token_logprobs) == whole.usage.completion_tokens
        parts = list(client.completions.create(**settings, stream=True, stream_options={"include_usage": True}))
        assert "".join(p.choices[0].text for p in parts if p.choices) == whole.choices[0].text
        assert parts[-1].usage.completion_tokens == whole.usage.completion_tokens
        with pytest.raises(openai.BadRequestError, match="chat template"):
            client.chat.completions.create(model="run", messages=[{"role": "user", "content": "hi"}])
        with pytest.raises(openai.BadRequestError, match="temperature"):
            client.completions.create(model="run", prompt="a", temperature=-1)


@needs("ollama")
def test_ollamas_client(clients_port):
    import ollama

    client = ollama.Client(f"http://127.0.0.1:{clients_port}")
    with client._client:
        assert [m.model for m in client.list().models] == ["run"]
        assert "insert" in client.show("run").capabilities
        assert client.generate("run", BEFORE, suffix="\n").response.startswith("ue_3 * ")
        options = {"num_predict": 7, "temperature": 0}
        parts = list(client.generate("run", "def task_", stream=True, options=options))
        assert parts[-1].done
        assert parts[-1].eval_count == 7
        with pytest.raises(ollama.ResponseError, match="chat template"):
            client.chat("run", [{"role": "user", "content": "hi"}])


@needs("mistralai")
def test_mistrals_client(clients_port):
    from mistralai.client import Mistral

    with Mistral(server_url=f"http://127.0.0.1:{clients_port}", api_key="none") as client:
        line = client.fim.complete(model="run", prompt=BEFORE, suffix="\n").choices[0].message.content
        assert line.startswith("ue_3 * ")
        parts = list(client.fim.stream(model="run", prompt=BEFORE, suffix="\n"))
        assert "".join(p.data.choices[0].delta.content or "" for p in parts) == line


@needs("lm_eval", "tenacity", "aiohttp")
def test_the_harness_scores_as_the_model(clients_port, run):
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    from dunes.checkpoint import load_with_tokenizer

    loaded = load_with_tokenizer(run)
    how = {"model": "run", "tokenizer": str(run), "tokenizer_backend": "huggingface", "max_length": 90}
    model = LocalCompletionsAPI(base_url=f"http://127.0.0.1:{clients_port}/v1/completions", **how)
    ids, cut = loaded.tokenizer.encode(BEFORE), 12
    import torch

    with torch.no_grad():
        logprobs = loaded.model(torch.tensor([ids]))[0].float().log_softmax(-1)
    expected = sum(float(logprobs[i - 1, ids[i]]) for i in range(cut, len(ids)))
    ((found, greedy),) = model._loglikelihood_tokens([(("", ""), ids[:cut], ids[cut:])])
    assert abs(found - expected) < 1e-3
    assert greedy == all(int(logprobs[i - 1].argmax()) == ids[i] for i in range(cut, len(ids)))


@needs("pygls")
def test_a_language_server_answers_follows_changes_and_cancels(run, tmp_path):
    asyncio.run(_speak(run, tmp_path))


async def _speak(run, tmp_path):
    from lsprotocol import types
    from pygls.lsp.client import BaseLanguageClient

    client, said = BaseLanguageClient("test", "1"), []
    client.feature(types.WINDOW_LOG_MESSAGE)(lambda message: said.append(message.message))
    await client.start_io(sys.executable, "-m", "dunes", "lsp", str(run), "--acceptance", "0", "--no-follow")
    encodings = types.GeneralClientCapabilities(position_encodings=["utf-16"])
    reply = await client.initialize_async(types.InitializeParams(types.ClientCapabilities(general=encodings)))
    assert reply.capabilities.inline_completion_provider is not None
    assert reply.capabilities.position_encoding == "utf-16"
    client.initialized(types.InitializedParams())
    uri = (tmp_path / "new.py").as_uri()
    text = f"x = '🙂é'; {BEFORE.replace(chr(10), '; ')}"  # characters of two units before the cursor
    document = types.TextDocumentIdentifier(uri)
    opened = types.TextDocumentItem(uri, "python", 1, f"{FIRST}\n{text}")
    client.text_document_did_open(types.DidOpenTextDocumentParams(opened))
    column = len(text.encode("utf-16-le")) // 2
    context = types.InlineCompletionContext(types.InlineCompletionTriggerKind.Automatic)
    ask = types.InlineCompletionParams(context, document, types.Position(1, column))
    found = await _until(lambda found: found.items, lambda: client.text_document_inline_completion_async(ask))
    assert found.items[0].insert_text.startswith("ue_3")
    assert 1 <= len(found.items) <= 3
    here = types.Range(types.Position(1, column), types.Position(1, column))
    change = types.TextDocumentContentChangePartial(here, "ue_")
    version = types.VersionedTextDocumentIdentifier(2, uri)
    client.text_document_did_change(types.DidChangeTextDocumentParams(version, [change]))
    ask = types.InlineCompletionParams(context, document, types.Position(1, column + 3))
    assert (await client.text_document_inline_completion_async(ask)).items[0].insert_text.startswith("3 * ")
    plain = await client.text_document_completion_async(types.CompletionParams(document, ask.position))
    assert plain.is_incomplete
    assert plain.items[0].text_edit.new_text.startswith("3 * ")
    assert plain.items[0].label.startswith("value_3 * ")
    pending = [asyncio.ensure_future(client.text_document_inline_completion_async(ask)) for _ in range(5)]
    answers = await asyncio.gather(*pending)  # older ones are ended by newer ones, and answered all the same
    assert answers[-1].items
    await client.workspace_execute_command_async(types.ExecuteCommandParams("dunes.accepted"))
    await _open_and_close(client, ask, (tmp_path / "unsaved.py").as_uri(), uri)
    await client.shutdown_async(None)
    assert said[-1] == "dunes: 1 suggestion accepted"
    client.exit(None)
    assert await asyncio.wait_for(client._server.wait(), 20) == 0


async def _until(is_right, ask):
    """The first right answer, or the last one of ten seconds."""
    for _ in range(100):
        if is_right(found := await ask()):
            break
        await asyncio.sleep(0.1)
    return found


async def _open_and_close(client, ask, other, uri):
    """What is open is copied from until it is closed; of what never was, nothing is known."""
    from lsprotocol import types

    async def suggested(text):
        document = types.VersionedTextDocumentIdentifier(version(), uri)
        whole = types.TextDocumentContentChangeWholeDocument(text)
        client.text_document_did_change(types.DidChangeTextDocumentParams(document, [whole]))
        at = types.InlineCompletionParams(ask.context, ask.text_document, types.Position(0, len(text)))
        found = await client.text_document_inline_completion_async(at)
        return [item.insert_text for item in found.items]

    version = itertools.count(3).__next__
    item = types.TextDocumentItem(other, "python", 1, "y = crimson_lantern_of(spring, 71)\n")
    client.text_document_did_open(types.DidOpenTextDocumentParams(item))
    ask_again = lambda: suggested("x = crimson_lan")
    found = await _until(lambda found: found[0].startswith("tern_of(spring, 71)"), ask_again)
    assert found[0] == "tern_of(spring, 71)"
    client.text_document_did_close(types.DidCloseTextDocumentParams(types.TextDocumentIdentifier(other)))
    found = await _until(lambda found: not any("spring" in text for text in found), ask_again)
    assert not any("spring" in text for text in found), "it was never saved"
    never = types.TextDocumentIdentifier(uri.replace("new.py", "never.py"))
    never = types.InlineCompletionParams(ask.context, never, types.Position(0, 0))
    assert not (await client.text_document_inline_completion_async(never)).items


@pytest.mark.parametrize("sent", ["", "POST /infill HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n{"])
def test_a_client_that_sends_a_byte_now_and_then_is_closed(clients_port, sent):
    start, closed = time.monotonic(), False
    with socket.create_connection(("127.0.0.1", clients_port), timeout=0.5) as client:
        client.sendall(sent.encode())
        while time.monotonic() - start < 20 and not closed:
            with suppress(TimeoutError):
                try:
                    client.sendall(b"X" * bool(sent))
                    closed = client.recv(1000).partition(b"\r\n")[0] in (b"", b"HTTP/1.1 408 Request Timeout")
                except (ConnectionError, BrokenPipeError):
                    closed = True
    assert closed
    assert ok(clients_port, "/infill", infill(BEFORE, "\n"))["content"], "others are served"
