"""Models and data sets of a small Hub of our own on this machine: nothing here reaches the internet."""

import json
import os
import re
import shutil
import socket
import threading
from dataclasses import replace
from hashlib import sha1, sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
import torch
from huggingface_hub import _tree_cache, constants, snapshot_download, utils

from conftest import display, refuses, run_python, toy
from dunes import checkpoint
from dunes.checkpoint import hub
from dunes.checkpoint import open as opening
from dunes.completion.completer import training_sources
from dunes.data import hub_tables
from dunes.data.hub_tables import fetch
from dunes.evaluate.text_loss import score_folder
from dunes.files import hub_cache
from dunes.runs.train import train
from dunes.text import Tokenizer
from small_models import random_model

COMMIT, CONVERTED = "0123456789abcdef0123456789abcdef01234567", "f" * 40
LARGE = (".safetensors", ".bin", ".pth", ".gguf", ".onnx", ".parquet")
WEIGHTS, TABLE = "model.safetensors", "data/train-00000-of-00001-a0.parquet"


def blob(data: bytes) -> str:
    return sha1(b"blob %d\0" % len(data) + data).hexdigest()


def facts(name: str, data: bytes, key: str = "sha256") -> dict:
    """What the Hub says of a file's content."""
    large = {key: sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
    return {"size": len(data), "lfs": large} if name.endswith(LARGE) else {"size": len(data)}


class Hub(ThreadingHTTPServer):
    """One repository, `org/tiny`, a model and a data set; what is `sent` may differ from what is told.

    The branch to which the Hub converts data sets is at CONVERTED, and has the files `converted`, if any.
    """

    daemon_threads = True

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.files, self.sent, self.log, self.agents = files, dict(files), [], set()
        self.refused: tuple[str, int, dict[str, str]] | None = None
        self.sha, self.raw, self.converted = COMMIT, None, {}

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def fetched(self) -> set[str]:
        return {path.partition(f"/resolve/{COMMIT}/")[2] for method, path in self.log if "/resolve/" in path}

    def listing(self, revision: str) -> dict[str, bytes]:
        return self.files if revision in ("main", "v1", COMMIT) else self.converted


class Answer(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def log_message(self, *_) -> None:
        pass

    def do_GET(self) -> None:
        hub, url = self.server, urlsplit(self.path)
        hub.log.append((self.command, url.path))
        hub.agents.add(self.headers["User-Agent"])
        if hub.refused and hub.refused[0] in url.path:
            return self.say(hub.refused[1], b"no", hub.refused[2])
        if found := re.fullmatch(r"/api/(?:models|datasets)/org/tiny/revision/(.+)", url.path):
            return self.info(unquote(found[1]), parse_qs(url.query))
        if found := re.fullmatch("/api/(?:models|datasets)/org/tiny/tree/(.+)", url.path):
            files = hub.listing(found[1]).items()
            rows = [{"type": "file", "path": n, "oid": blob(d), **facts(n, d, "oid")} for n, d in files]
            return self.say(200, json.dumps(rows).encode())
        if found := re.fullmatch("(?:/datasets)?/org/tiny/resolve/([^/]+)/(.+)", url.path):
            return self.file(found[1], unquote(found[2]))
        return self.say(404, b"", {"X-Error-Code": "RepoNotFound"})

    do_HEAD = do_GET

    def info(self, revision: str, query: dict) -> None:
        hub = self.server
        files, converted = hub.listing(revision), revision in (CONVERTED, hub_tables.BRANCHES[1])
        if revision not in ("main", "v1", COMMIT) and not (converted and files):
            return self.say(404, b"", {"X-Error-Code": "RevisionNotFound"})
        digests = query.get("blobs") == ["true"]
        rows = [
            {"rfilename": n, **({"blobId": blob(d), **facts(n, d)} if digests else {})} for n, d in files.items()
        ]
        sha = CONVERTED if converted else hub.sha
        body = json.dumps({"id": "org/tiny", "sha": sha, "siblings": rows}).encode()
        return self.say(200, hub.raw or body)

    def file(self, commit: str, name: str) -> None:
        data = self.server.listing(commit)[name]
        large = facts(name, data).get("lfs")
        headers = {"X-Repo-Commit": commit, "ETag": f'"{blob(data)}"'}
        if large:
            headers |= {"X-Linked-ETag": f'"{large["sha256"]}"', "X-Linked-Size": str(large["size"])}
        self.say(200, self.server.sent.get(name, data), headers)

    def say(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    """A model folder."""
    folder, tokenizer = tmp_path_factory.mktemp("model") / "tiny", Tokenizer.train("bytes", [])
    checkpoint.save(random_model(vocab=tokenizer.vocab, context=16), folder, tokenizer, 16)
    return folder


@pytest.fixture
def site(tiny, tmp_path, monkeypatch):
    """A Hub with that folder and much else, and a machine that knows no other one."""
    files = {f.name: f.read_bytes() for f in tiny.iterdir()}
    more = ["README.md", "modeling_tiny.py", "tiny.gguf", "pytorch_model.bin"]
    more += ["onnx/model.onnx", "onnx/config.json", TABLE, "data/test-00000-of-00001.parquet"]
    site = Hub(files | dict.fromkeys([*more, "model.fp16.safetensors", "consolidated.00.pth"], b"not for us"))
    threading.Thread(target=site.serve_forever, args=(0.02,), daemon=True).start()
    use(monkeypatch, site.address, tmp_path)
    yield site
    stop(site)


def stop(site: Hub) -> None:
    utils.close_session()  # a kept connection would go on being served
    site.shutdown()
    site.server_close()


def use(monkeypatch, address: str, tmp_path: Path) -> None:
    """Give the downloader this Hub and a home below tmp_path; it reads the environment only when imported."""
    utils.close_session()
    monkeypatch.setattr(constants, "ENDPOINT", address)
    template = address + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf" / "hub"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "hf" / "token"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", True)  # as hub does before it imports it
    monkeypatch.setattr(_tree_cache, "_IN_MEMORY_TREE_CACHE", {})
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.delenv("HF_TOKEN", raising=False)
    real = socket.getaddrinfo

    def here(host, *args, **kwargs):
        assert host in ("127.0.0.1", b"127.0.0.1"), f"{host} is not this machine"
        return real(host, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", here)


def located(name: str, *args):
    return fetch(name) if name.startswith("hf:") else checkpoint.locate_model(name, *args)


def refused(*args) -> str:
    with pytest.raises((ValueError, OSError)) as caught:
        located(*args)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 500
    assert caught.value.__suppress_context__ or caught.value.__context__ is None, "no foreign traceback above it"
    return message


def test_a_model_is_fetched_at_one_commit_and_opens_as_the_folder_does(site, tiny):
    found = checkpoint.locate_model("org/tiny")
    assert found.origin == {"repository": "org/tiny", "revision": COMMIT}
    assert found.folder.name == COMMIT
    assert site.fetched() == {f.name for f in tiny.iterdir()}, "what readers use, in one form, and no code"
    asked = [path for _, path in site.log if COMMIT not in path]
    assert asked == ["/api/models/org/tiny/revision/main"], "the branch may move between two requests"
    ours, same = checkpoint.load(found.folder), checkpoint.load(tiny)
    assert all(torch.equal(v, same.model.state_dict()[k]) for k, v in ours.model.state_dict().items())


@pytest.mark.parametrize("away", ["no server", "offline", "answers 503", "another page"])
@pytest.mark.parametrize("asked", [("org/tiny",), ("org/tiny@v1",), ("org/tiny", COMMIT), ("hf:org/tiny",)])
def test_what_is_here_serves_without_the_hub(site, monkeypatch, away, asked, capsys):
    first = located(*asked)
    capsys.readouterr()
    if away == "no server":
        stop(site)
    elif away == "offline":
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    else:
        site.refused = ("/", 503, {}) if away == "answers 503" else None
        site.raw = b"<html>please sign in to this hotel</html>"
    assert located(*asked) == first
    assert (COMMIT in capsys.readouterr().err) == asked[0].startswith("hf:"), "which revision is read"


@pytest.mark.parametrize("change", [lambda data: data[:-3], lambda data: data[:-1] + bytes([data[-1] ^ 1])])
@pytest.mark.parametrize(("name", "file"), [("org/tiny", WEIGHTS), ("hf:org/tiny", TABLE)])
def test_other_content_is_refused_and_the_remedy_works(site, name, file, change):
    site.sent[file] = change(site.files[file])
    for _ in range(2):
        assert "tiny" in refused(name)
    site.sent[file] = site.files[file]
    located(name)


def test_a_cache_without_a_listing_serves_without_the_hub(site):
    folder = Path(snapshot_download("org/tiny"))  # any tool's; older ones keep no listing
    shutil.rmtree(folder.parent.parent / "trees")
    _tree_cache._IN_MEMORY_TREE_CACHE.clear()
    site.refused = ("/", 503, {})
    assert checkpoint.locate_model("org/tiny").folder.samefile(folder)


SIGN = {"X-Error-Message": "Invalid credentials in Authorization header"}
GATED = {"X-Error-Code": "GatedRepo"}
REFUSALS = {
    "private": ("org/tiny", ("/api/", 401, {}), "set HF_TOKEN"),
    "token": ("org/tiny", ("/api/", 401, SIGN), "401 "),
    "gated": ("org/tiny", ("/resolve/", 403, GATED), "gated.* conditions at http.*/org/tiny"),
    "forbidden": ("org/tiny", ("/resolve/", 403, {}), "403 "),
    "missing": ("org/other", None, "Repository Not Found"),
    "revision": ("org/tiny@v2", None, "'v2' .*Revision Not Found"),
    "gone": ("org/tiny", ("/resolve/", 404, {"X-Error-Code": "EntryNotFound"}), "Entry Not Found"),
    "busy": ("org/tiny", ("/api/", 429, {}), "429"),
    "down": ("org/tiny", ("/api/", 503, {}), "503"),
}


@pytest.mark.parametrize("prefix", ["", "hf:"])
@pytest.mark.parametrize("case", REFUSALS)
def test_a_refusal_names_the_repository_and_the_reason(site, case, prefix):
    name, site.refused, words = REFUSALS[case]
    assert re.search(words, message := refused(prefix + name)), message
    assert message.startswith(name.partition("@")[0])


def test_a_full_disk_is_said_before_anything_is_fetched_and_what_is_here_needs_no_room(site, monkeypatch):
    free = len(site.files[WEIGHTS])
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    assert re.search("kB are needed and .* kB are free", refused("org/tiny"))
    assert site.fetched() == set()
    free = 1 << 40
    checkpoint.locate_model("org/tiny")
    shutil.rmtree(Path(constants.HF_HUB_CACHE) / "models--org--tiny" / "snapshots")  # the blobs stay
    free = 0
    checkpoint.locate_model("org/tiny")


def test_what_is_no_model_is_said_on_one_line_before_anything_is_fetched(site):
    site.raw = b"<html>"
    assert "org/tiny" in refused("org/tiny")
    site.raw, sha, site.sha = None, site.sha, "../../elsewhere"
    assert "not a commit" in refused("org/tiny")
    site.sha = sha
    for name in [n for n in site.files if n.endswith((".safetensors", ".bin", ".pth"))]:
        del site.files[name]
    assert "org/tiny: no weights in a supported format" in refused("org/tiny")
    assert site.fetched() == set()


def test_a_download_that_was_cut_short_is_no_model_without_a_network_and_goes_on_with_one(site, monkeypatch):
    site.refused = (f"/resolve/{COMMIT}/{WEIGHTS}", 403, {})
    refused("org/tiny")
    site.refused = None
    with monkeypatch.context() as patch:
        patch.setattr(constants, "HF_HUB_OFFLINE", True)
        assert "is not complete in" in refused(f"org/tiny@{COMMIT}")
    checkpoint.locate_model("org/tiny")


@pytest.mark.timeout(20)
@pytest.mark.parametrize("silent", [False, True])
@pytest.mark.parametrize("name", ["org/tiny", "hf:org/tiny"])
def test_nothing_here_and_no_network_is_one_line_after_one_try(monkeypatch, tmp_path, silent, name):
    monkeypatch.setattr(hub_cache, "SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        use(monkeypatch, f"http://127.0.0.1:{server.getsockname()[1]}", tmp_path)
        if not silent:
            server.close()
        message = refused(name)
    assert message.startswith("org/tiny: ")
    assert ("timed out" if silent else "refused") in message
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE" in refused(name)


NOT_NAMES = [
    *("tiny", "/no/such", "./org/tiny", "../tiny", "~/tiny", "org/tiny/more", "org/.tiny", ".org/tiny"),
    *("org/ti..ny", "org/tiny.", "-org/tiny", "org/ti--ny", "org/tiny.git", "örg/tiny", "org/ti\tny"),
    *("org/tiny\n", "runs/my model", "org/tiny@", "org/tiny@../x", "org/tiny@/x", "org/tiny@a..b"),
    f"org/{'a' * 93}",
]


@pytest.mark.parametrize("model", NOT_NAMES)
def test_what_cannot_be_a_name_is_no_such_folder_and_asks_nobody(monkeypatch, model, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(opening, "download", lambda *_: pytest.fail("asked"))
    monkeypatch.setattr(hub_tables, "resolve", lambda *_: pytest.fail("asked"))
    for name in (model, f"hf:{model}".replace("tiny/more", "tiny:a:b")):
        with pytest.raises(
            ValueError, match=r"no such folder|expected hf:ORG|be a revision"
        ):  # perhaps of two lines
            located(name)


@pytest.mark.parametrize("model", ["org/tiny", "Org_1/a.b-c_D2", "0/0", "org/tiny@refs/pr/1", f"org/{'a' * 92}"])
def test_names_by_the_hubs_rules(model):
    name = hub.parse_name(model, None)[0]
    utils.validate_repo_id(name)
    assert name == model.partition("@")[0]


def test_a_folder_is_itself_and_comes_before_a_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(opening, "download", lambda *_: pytest.fail("asked"))
    Path("org/tiny").mkdir(parents=True)
    Path("org/file").write_text("")
    for model in ("org/tiny", Path("org/tiny"), tmp_path):
        assert checkpoint.locate_model(model) == opening.ModelLocation(Path(model), {})
    assert "a file, not a model folder" in refused("org/file")
    assert "a folder has no revisions" in refused("org/tiny", "main")
    assert "pass only one" in refused("org/other@v1", "v2")


ONE, PARTS = "-00000-of-00001-ab12.parquet", ["-00000-of-00002.parquet", "-00001-of-00002.parquet"]
GSM8K = [f"{config}/{split}{ONE}" for config in ("main", "socratic") for split in ("test", "train")]
CONFIGS = {  # the files that are wanted, or what a refusal names; other files; configuration; split
    "the only one": ([f"data/train{part}" for part in PARTS], [f"data/test{ONE}"], None, None),
    "one of several": (GSM8K[3:], GSM8K[:3], "socratic", None),
    "a split": ([f"data/train_sft{ONE}"], [f"data/train_prefs{ONE}"], None, "train_sft"),
    "branch": (["default/train/0000.parquet"], ["default/dev/0000.parquet", "b/train/0000.parquet"], None, None),
    "partial": ([f"en/partial-train/000{i}.parquet" for i in range(2)], ["fr/train/0000.parquet"], "en", "train"),
    "a folder": (["sample/10BT/000_00000.parquet"], ["data/CC/000_00000.parquet"], "sample/10BT", None),
    "words": (["more.parquet", "my_train.parquet"], ["my_validation.parquet"], None, None),
    "no default": ("main, socratic", GSM8K, None, None),
    "no configuration": ("main, socratic", GSM8K, "all", None),
    "no split": ("test, train", GSM8K, "main", "dev"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_the_files_of_a_configuration_and_a_split_are_wanted(case):
    wanted, others, *asked = CONFIGS[case]
    files = dict.fromkeys(sorted([*others, *(wanted if isinstance(wanted, list) else ())]), 1)
    if isinstance(wanted, list):
        assert [*hub_tables.select_tables(files, "org/tiny", *asked)] == wanted
    else:
        refuses(wanted, hub_tables.select_tables, files, "org/tiny", *asked)


def test_a_data_set_without_tables_is_read_as_the_hub_converts_it(site, capsys):
    site.files = {"README.md": b"", "rows.jsonl": b"{}", "a\nb/c.parquet": b"PAR1"}
    assert "no parquet files" in refused("hf:org/tiny")
    refused(f"hf:org/tiny@{COMMIT}")
    site.converted = {"default/train/0000.parquet": b"PAR1", "default/test/0000.parquet": b"PAR1"}
    site.refused = ("/revision/main", 503, {})
    assert "503" in refused("hf:org/tiny:test")
    site.refused = None
    name, paths = fetch("hf:org/tiny:test")
    assert (name, [path.read_bytes() for path in paths]) == (f"hf:org/tiny:test@{CONVERTED}", [b"PAR1"])
    stop(site)
    assert fetch(name) == fetch("hf:org/tiny:test") == (name, paths)
    assert capsys.readouterr().err.count(CONVERTED) == 1
    assert CONVERTED in refused("hf:org/tiny"), "what is in the cache"


@pytest.mark.parametrize("name", ["../../train", "/etc/train", "data/../../train", "a\\..\\train", "./train"])
def test_a_file_name_that_leads_out_of_the_folder_is_refused(site, name):
    site.files = {f"{name}-00000-of-00001.parquet": b"PAR1"}
    assert "no path inside" in refused("hf:org/tiny")
    assert site.fetched() == set()


def test_a_run_records_the_commit_of_its_data_and_goes_on_with_it(site, tmp_path):
    rows = {"text": [f"{i} is a number.\n" for i in range(300)]}
    pytest.importorskip("polars").DataFrame(rows).write_parquet(file := BytesIO())
    site.files[TABLE] = site.sent[TABLE] = file.getvalue()
    config, folder = toy("", sources=("hf:org/tiny",), steps=1), tmp_path / "run"
    assert train(config, folder, display()[0]) == 0
    sources = [f"hf:org/tiny@{COMMIT}"]
    assert checkpoint.load(folder).card["trained"]["sources"] == sources
    assert json.loads((folder / "state" / "plan.json").read_text())["sources"] == sources
    stop(site)
    for source in ("hf:org/tiny", "hf:org/tiny@main"):
        config = replace(config, sources=(source,), steps=2)
        assert train(config, folder, display()[0], resume=True, override=["steps"]) == 0
    assert score_folder(folder)[1] == score_folder(folder, ["hf:org/tiny"])[1] == 1
    assert training_sources(folder)[0] == (), "a server or an editor asks for no data set"
    config = replace(config, sources=("hf:org/tiny:test",))
    refuses("sources was", train, config, folder, display()[0], resume=True)


SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"]
BINS = ["pytorch_model-00001-of-00001.bin", "pytorch_model.bin.index.json"]
CHOICES = [
    (["model.safetensors"], [*SHARDS, *BINS, "consolidated.safetensors", "model.fp16.safetensors"]),
    (SHARDS, ["consolidated.safetensors", *BINS, "sub/model.safetensors"]),
    (["consolidated.safetensors", "params.json", "tekken.json"], ["consolidated.00.pth", "pytorch_model.bin"]),
    (["consolidated.00.pth", "consolidated.01.pth", "tokenizer.model.v3"], ["pytorch_model.bin"]),
    (["pytorch_model.bin", "tokenizer.model"], [*BINS, "tf_model.h5", "training_args.bin", "a.safetensors.py"]),
    (BINS, ["merges.txt", "modeling.py", "config.json.py", "onnx/config.json", "tokenizer.py", "tiny.gguf"]),
]


@pytest.mark.parametrize(("wanted", "unwanted"), CHOICES)
def test_one_form_of_the_weights_is_wanted(wanted, unwanted):
    assert list(hub.select_files(dict.fromkeys([*unwanted, *wanted], 1), "org/tiny")) == wanted


@pytest.mark.slow
def test_with_nothing_but_the_environment_and_quiet_where_there_is_no_terminal(site, tmp_path):
    code = "import sys; from dunes import checkpoint; print(checkpoint.locate_model(sys.argv[1]).folder)"
    env = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
    env |= {"HF_ENDPOINT": site.address, "HF_HOME": str(tmp_path / "home")}
    run = run_python(code, "org/tiny", env=env, timeout=60, check=True)
    assert Path(run.stdout.strip()).is_relative_to(tmp_path / "home")
    assert run.stderr == ""
    assert all("/org/tiny/" in path for _, path in site.log), "no other question"
    assert not any("torch" in agent or "agent/" in agent for agent in site.agents), "nobody's business"
