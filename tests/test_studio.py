"""The studio's base: who may see it, the runs and models that it finds and opens, and how it ends."""

import asyncio
import os
import re
import time
from contextlib import aclosing, nullcontext
from urllib.request import Request, urlopen

import pytest
import uvicorn
import websockets
from nicegui import ui
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Mount, Route, WebSocketRoute
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect
from websockets.sync.client import connect

from conftest import raising, refuses, refuses_command
from dunes import checkpoint
from dunes.serve.app import Gate
from dunes.serve.fields import Refused
from dunes.serve.http import DeadlineProtocol, open_sockets
from dunes.serve.requests import Answer, TextRequest
from dunes.serve.worker import Task
from dunes.studio.app import Studio, build
from dunes.studio.folders import find_entries
from dunes.studio.served import ServedModels
from dunes.text import Tokenizer
from small_models import random_model
from studio import KEY, needs_browser, opened, studio

OWN = "127.0.0.1:8014"
BEARER = {"Authorization": f"Bearer {KEY}"}


async def echo(socket):
    await socket.accept()
    await socket.send_text(await socket.receive_text())


def everything(request):
    return PlainTextResponse("seen")


INNER = Starlette(routes=[WebSocketRoute("/ws", echo), Route("/{path:path}", everything, methods=["GET", "POST"])])


def browser(key=None):
    return TestClient(Gate(INNER, ["studio.lan"], key), base_url=f"http://{OWN}", follow_redirects=False)


def status_of_socket(client, path="/ws", headers=()):
    """101 if a WebSocket is accepted, 403 if it is refused."""
    try:
        with client.websocket_connect(f"ws://{OWN}{path}", headers=dict(headers)) as socket:
            socket.send_text("hello")
            return 101 if socket.receive_text() == "hello" else 500
    except WebSocketDisconnect:
        return 403


# who may see it


@pytest.mark.parametrize(
    ("headers", "is_own"),
    [
        ({"Host": "evil.com"}, False),
        ({"Host": "127.0.0.1.evil.com:8014"}, False),
        ({"Origin": "http://evil.com"}, False),
        ({"Origin": "null"}, False),
        ({"Host": "studio.lan", "Origin": "http://studio.lan"}, True),
        ({"Origin": f"http://{OWN}"}, True),
    ],
)
def test_requests_and_sockets_of_other_hosts_and_pages_are_refused(headers, is_own):
    client = browser()
    assert client.get("/page", headers=headers).status_code == (200 if is_own else 403)
    assert status_of_socket(client, headers=headers) == (101 if is_own else 403)


def test_nothing_is_reached_without_the_key():
    client = browser(KEY)
    wrong = {"Authorization": "Bearer no"}, {"x-api-key": "no"}, {"Cookie": "dunes_key=no"}, {}
    for headers in wrong:
        for path in ("/", "/?key=no", "/_nicegui/static/a.js", "/api/model/infill"):
            assert client.get(path, headers=headers).status_code == 401
            assert client.post(path, headers=headers).status_code == 401
        assert status_of_socket(client, headers=headers) == status_of_socket(client, "/ws?key=no", headers) == 403
    assert client.get("/", headers=BEARER).text == client.post(f"/?key={KEY}").text == "seen"
    assert status_of_socket(client, headers=BEARER) == status_of_socket(client, f"/ws?key={KEY}") == 101


def test_a_browser_keeps_the_key_as_a_cookie_that_serves_own_pages_alone():
    client = browser(KEY)
    reply = client.get(f"/write?key={KEY}&file=a.py")
    assert (reply.status_code, reply.headers["refresh"]) == (200, f"0; url=http://{OWN}/write?file=a.py")
    cookie = reply.headers["set-cookie"]
    assert KEY not in cookie
    assert {"HttpOnly", "SameSite=strict"} <= {*cookie.split("; ")}
    assert client.get("/").text == "seen"
    assert status_of_socket(client, headers={"Origin": f"http://{OWN}"}) == 101
    # a program of another user may serve a page
    for other in ({"Origin": "http://127.0.0.1:3000"}, {"Sec-Fetch-Site": "same-site"}):
        assert (client.post("/", headers=other).status_code, status_of_socket(client, headers=other)) == (401, 403)
    elsewhere = client.get(f"//evil.com/?key={KEY}").headers["refresh"]
    assert elsewhere.startswith(f"0; url=http://{OWN}/"), "it stays on this server"
    names = {Gate(INNER, (), key).cookie[0] for key in ("one", "two")}
    assert len(names) == 2, "a browser sends the cookies of an address to all of its ports"


async def echo_after(delay):
    config = uvicorn.Config(
        INNER, http=DeadlineProtocol, ws="websockets-sansio", lifespan="off", log_level="error"
    )
    server = uvicorn.Server(config)
    server.capture_signals = nullcontext
    (listener,) = open_sockets("127.0.0.1", [0])
    serving = asyncio.create_task(server.serve([listener]))
    async with websockets.connect(f"ws://127.0.0.1:{listener.getsockname()[1]}/ws") as socket:
        await asyncio.sleep(delay)
        await socket.send("hello")
        reply = await socket.recv()
    server.should_exit = True
    await serving
    return reply


def test_the_deadline_of_requests_does_not_end_a_websocket(monkeypatch):
    monkeypatch.setattr("dunes.serve.http.RECEIPT", 0.2)
    assert asyncio.run(echo_after(0.6)) == "hello"


def test_the_printed_address_has_the_key_unless_the_user_chose_it(tmp_path, command, monkeypatch):
    monkeypatch.setattr("dunes.studio.app.build", lambda studio, views: studio)
    seen, printed = [], []

    def run(app, sockets, ready, pages):
        seen.append(app)
        ready()
        sockets[0].close()

    monkeypatch.setattr("dunes.serve.http.run", run)
    for key in ("", "", "secret"):
        monkeypatch.setenv("DUNES_API_KEY", key)
        status, text, _ = command("studio", tmp_path, "--port", 0)
        assert status == 0
        printed.append(re.search(r"studio at http://127.0.0.1:\d+/\?key=(\S+) ", text)[1])
    assert printed[2] == "$DUNES_API_KEY"
    assert [app.models.key for app in seen] == [*printed[:2], "secret"]
    assert printed[0] != printed[1]
    monkeypatch.setenv("DUNES_API_KEY", "")
    refuses_command("DUNES_API_KEY", command("studio", tmp_path, "--host", "0.0.0.0"))


# what it finds


def make_run(folder, modified=0, name="metrics.jsonl"):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).touch()
    os.utime(folder / name, (modified, modified))


def test_runs_and_models_are_found_newest_first_and_what_cannot_be_read_is_skipped(tmp_path, monkeypatch):
    root = tmp_path / "root"
    make_run(root / "old", 100)
    make_run(root / "old", 100, "dunes.json")
    make_run(root / "deep" / "a" / "new", 200)
    make_run(root / "models" / "small", 150, "dunes.json")
    make_run(root / "models", 50, "a.gguf")
    for name in (".hidden", "node_modules/x", "closed/x", "a/b/c/d/e/f"):
        make_run(root / name)
    (root / "circle").symlink_to(root)
    (root / "elsewhere").symlink_to(tmp_path)
    (root / "lost.gguf").symlink_to(root / "nowhere")
    (root / "folder.gguf").symlink_to(root / "models")
    os.mkdir(os.fsencode(root) + b"/caf\xe9")
    make_run(root / os.fsdecode(b"caf\xe9") / "run", 10)
    scandir = os.scandir
    refuse = raising(PermissionError("closed"))  # also for root, who may read everything
    monkeypatch.setattr(os, "scandir", lambda path: (refuse if "closed" in str(path) else scandir)(path))
    rows = [(entry.name, entry.is_run, entry.is_model) for entry in find_entries(root)]
    assert rows == [
        ("deep/a/new", True, False),
        ("models/small", False, True),
        ("old", True, True),
        ("models/a.gguf", False, True),
        ("caf\ufffd/run", True, False),
    ]


def test_a_folder_that_is_a_run_is_found_and_one_that_is_none_is_refused(tmp_path):
    make_run(tmp_path / "run")
    (entry,) = find_entries(tmp_path / "run")
    assert (entry.name, entry.path) == ("run", tmp_path / "run")
    refuses("none", find_entries, tmp_path / "none")
    refuses("metrics", find_entries, tmp_path / "run" / "metrics.jsonl")


def test_200_runs_are_found_at_once(tmp_path):
    for i in range(200):
        make_run(tmp_path / f"group-{i % 7}" / f"run-{i}")
        make_run(tmp_path / f"group-{i % 7}" / f"run-{i}", name="dunes.json")
    begin = time.perf_counter()
    assert len(find_entries(tmp_path)) == 200
    assert time.perf_counter() - begin < 1


# what it opens


class FakeWorker:
    """Counts what is opened, and answers each request with `events`."""

    opened, fails, events, is_outdated, find = (), False, (), False, lambda self, name: self

    def __init__(self, folders, *rest, **named):
        time.sleep(0.1)
        FakeWorker.opened = (*FakeWorker.opened, *folders)
        if FakeWorker.fails:
            raise ValueError(f"{folders[0]}: fails")

    def submit(self, request, emit):
        self.task = Task(request, emit)
        for event in FakeWorker.events:
            emit(event)
        return self.task


@pytest.fixture
def models(monkeypatch):
    monkeypatch.setattr("dunes.studio.served.Worker", FakeWorker)
    for name in ("opened", "fails", "events"):
        monkeypatch.setattr(FakeWorker, name, getattr(FakeWorker, name))
    return ServedModels(key=KEY)


async def open_twice(models, folder):
    """Two browsers open a model; a third one leaves before it is opened."""
    leaving = asyncio.create_task(models.open(folder))
    await asyncio.sleep(0.02)
    leaving.cancel()
    return await asyncio.gather(models.open(folder), models.open(folder))


def test_a_model_is_opened_once_however_many_ask_and_leave(models, tmp_path):
    first, second = asyncio.run(open_twice(models, str(tmp_path)))
    assert first == second
    assert FakeWorker.opened == (tmp_path,)
    client = TestClient(Starlette(routes=[Mount("/api", models)]), base_url=f"http://{OWN}")
    assert "dunes studio" in client.get(f"/api/{first}/", headers=BEARER).text
    assert client.get(f"/api/{first}/").status_code == 401
    assert client.get("/api/unknown/", headers=BEARER).status_code == 404


def test_a_model_that_failed_to_open_is_tried_again(models, tmp_path):
    FakeWorker.fails = True
    refuses("fails", lambda: asyncio.run(models.open(str(tmp_path))))
    FakeWorker.fails = False
    key = asyncio.run(ServedModels.open(models, str(tmp_path)))
    assert isinstance(models.worker(key), FakeWorker)


def test_a_model_that_does_not_fit_is_refused_unread(tmp_path, monkeypatch):
    checkpoint.save(random_model(vocab=265), tmp_path / "model", Tokenizer.train("bytes", ()), 32)
    monkeypatch.setattr("dunes.measure.free_memory", lambda device: 1000)
    monkeypatch.setattr("dunes.checkpoint.open.load_decoder", raising(AssertionError("read")))
    refuses("model: .* free", lambda: asyncio.run(ServedModels().open(str(tmp_path / "model"))))


async def parts_of(models, folder, count):
    """The first parts of an answer, and its task after the stream has ended."""
    key, parts = await models.open(str(folder)), []
    async with aclosing(models.stream(key, TextRequest("a"))) as stream:
        async for part in stream:
            parts.append(part.text)
            if len(parts) == count:
                break
    return parts, models.worker(key).task


def test_a_stream_yields_the_parts_and_its_end_cancels_the_task(models, tmp_path):
    FakeWorker.events = Answer("a"), Answer("b"), Answer("c", "stop"), Answer("never")
    parts, task = asyncio.run(parts_of(models, tmp_path, 9))
    assert (parts, task.is_cancelled()) == (["a", "b", "c"], True)
    parts, task = asyncio.run(parts_of(ServedModels(), tmp_path, 1))
    assert (parts, task.is_cancelled()) == (["a"], True)
    FakeWorker.events = (KeyError("x"),)
    with pytest.raises(Refused, match="KeyError"):
        asyncio.run(parts_of(ServedModels(), tmp_path, 1))


# what a browser gets


def show_names(studio):
    for entry in studio.entries():
        ui.label(entry.name)


def show_failure(studio):
    raise ValueError("this view fails")


async def show_late(studio):
    ui.label("late")


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """A browser of three views. NiceGUI keeps its pages in the process, so they are built once."""
    root = tmp_path_factory.mktemp("studio")
    make_run(root / "first")
    views = {"Names": show_names, "Failure": show_failure, "Late": show_late}
    app = build(Studio(root, ServedModels(key=KEY)), views)
    with TestClient(app, base_url=f"http://{OWN}") as client:
        yield client


def test_a_view_is_drawn_in_the_frame_and_its_error_is_one_line_there(pages):
    page = pages.get("/", headers=BEARER)
    assert "first" in page.text
    assert "default-src 'self'" in page.headers["content-security-policy"]
    failed = pages.get("/failure", headers=BEARER)
    assert (failed.status_code, "this view fails" in failed.text, "Traceback" in failed.text) == (200, True, False)
    late = pages.get("/late", headers=BEARER)  # it is drawn once the browser has connected
    assert (late.status_code, "Late" in late.text, '"late"' in late.text) == (200, True, False)


def test_all_of_nicegui_is_behind_the_key(pages):
    page = pages.get("/", headers=BEARER).text
    script = re.search(r'"(/_nicegui/[^"]+\.js)"', page)[1]
    polling = "/_nicegui_ws/socket.io/?EIO=4&transport=polling"
    for path in ("/", "/late", "/api/x/infill", "/nowhere", script, polling):
        assert pages.get(path).status_code == 401
        assert pages.get(path, headers=BEARER | {"Host": "evil.com"}).status_code == 403
        assert pages.get(path, headers=BEARER | {"Origin": "http://evil.com"}).status_code == 403
    assert pages.get(script, headers=BEARER).status_code == pages.get(polling, headers=BEARER).status_code == 200
    assert pages.get("/nowhere", headers=BEARER).status_code == 404


@pytest.mark.slow
def test_a_studio_accepts_sockets_with_the_key_and_leaves_no_files(tmp_path):
    with studio(tmp_path) as address:
        url = f"ws{address[4:]}/_nicegui_ws/socket.io/?EIO=4&transport=websocket"
        for headers in ({}, BEARER | {"Origin": "http://evil.com"}, BEARER | {"Host": "evil.com"}):
            with pytest.raises(websockets.InvalidStatus), connect(url, additional_headers=headers):
                pass
        with connect(url, additional_headers=BEARER) as socket:
            assert socket.recv().startswith("0{")
        assert urlopen(Request(address, headers=BEARER)).status == 200
    assert [*tmp_path.iterdir()] == []


@pytest.mark.slow
@needs_browser
def test_a_studio_with_an_open_page_ends_at_once(tmp_path):
    running = studio(tmp_path)
    with opened(running.__enter__()) as page:
        page.get_by_role("link", name="Runs").wait_for()
        assert page.get_by_role("link", name="Runs").get_attribute("aria-current") == "page"
        page.wait_for_function("window.socket && window.socket.connected")
        begin = time.monotonic()
        running.__exit__(None, None, None)
        assert time.monotonic() - begin < 15  # an open connection would hold it for 30 s
