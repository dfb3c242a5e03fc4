"""The source `installed`: code of packages, in folders of our own that look like those of package managers."""

import json
import os
import sys
from itertools import count
from pathlib import Path

import pytest

from dunes.checkpoint.trained_text import remember_sources, require_own_sources, trained_packages
from dunes.data import collect_corpus, installed
from dunes.data.installed import describe_package, select_files
from dunes.evaluate.text_loss import missing_source
from dunes.flags import is_path
from dunes.runs.train_config import TrainConfig
from test_data import names, put, refuses

_numbers = count()


def code(lines: int = 12) -> str:
    """Code whose lines stand in no other file."""
    return "".join(f"value_{next(_numbers)} = compute({next(_numbers)})\n" for _ in range(lines))


SITE = {
    **dict.fromkeys(
        ["fast/__init__.py", "fast/routing.py", "fast/tests/test_routing.py", "fast/_vendor/other.py"]
    ),
    **dict.fromkeys(["fast/schema_pb2.py", "fast/stub.pyi", "one.py", "plain/x.py"]),
    "fast/_vendor/LICENSE": "MIT",
    "fast/data.json": "{}",
    "fast-1.2.dist-info/METADATA": "Metadata-Version: 2.4\nName: fast\nVersion: 1.2\nLicense-Expression: MIT\n",
    "fast-1.2.dist-info/RECORD": "fast/__init__.py,,\nfast/routing.py,,\n",
    "one-3.dist-info/METADATA": "Metadata-Version: 2.1\nName: one\nVersion: 3\nLicense: A\n B\n"
    "Classifier: License :: OSI Approved :: BSD License\n",
    "one-3.dist-info/RECORD": "one.py,,\n",
}
NODE = {
    **dict.fromkeys(["left/index.js", "left/index.min.js", "left/index.test.js", "left/types.d.ts"]),
    **dict.fromkeys(["left/node_modules/inner/index.js", "@scope/right/src/a.ts", "broken/index.js"]),
    "left/package.json": json.dumps({"name": "left", "version": "2.0.0", "license": "ISC"}),
    "@scope/right/package.json": json.dumps({"name": "@scope/right", "version": "1.0.0"}),
    "broken/package.json": "[",
    ".pnpm/up@1.0.0/node_modules/up/index.js": None,
    ".pnpm/up@1.0.0/node_modules/up/package.json": '{"name": "up", "version": "1.0.0", "license": "MIT"}',
}
GIN = "example.com/!gin/gin@v1.10.0"
GO = {
    **dict.fromkeys(["example.com/!gin/gin@v1.9.1/gin.go", f"{GIN}/gin.go", f"{GIN}/gin_test.go"]),
    f"{GIN}/LICENSE": "\nThe MIT License (MIT)\n\nCopyright\n",
    "cache/download/example.com/list": "text",
}
RUST = dict.fromkeys(f"index-1/serde-1.0.{name}" for name in ("9/src/lib.rs", "10/src/lib.rs", "10/tests/all.rs"))
RUST["index-1/serde-1.0.10/LICENSE-MIT"] = "Permission is granted\n"
FOUND = {
    "python": ["fast/__init__.py", "fast/routing.py", "one.py", "plain/x.py"],
    "javascript": ["@scope/right/src/a.ts", "broken/index.js", "left/index.js", "up/index.js"],
    "go": ["example.com/!gin/gin@v1.10.0/gin.go", "example.com/!gin/gin@v1.9.1/gin.go"],
    "rust": ["serde-1.0.10/src/lib.rs", "serde-1.0.9/src/lib.rs"],
    "c": ["net/if.h", "stdio.h"],
}


@pytest.fixture
def machine(tmp_path, monkeypatch) -> Path:
    """A machine with packages of each language, and a working folder with node_modules."""
    monkeypatch.setattr(installed, "LANGUAGES", dict(installed.LANGUAGES))
    headers = (installed.LANGUAGES["c"][0], lambda: [tmp_path / "include"])
    monkeypatch.setitem(installed.LANGUAGES, "c", headers)
    trees = {"lib/site-packages": SITE, "work/node_modules": NODE, "go": GO, "cargo/registry/src": RUST}
    for folder, files in (trees | {"include": {"stdio.h": None, "net/if.h": None}}).items():
        put(tmp_path / folder, {name: code() if text is None else text for name, text in files.items()})
    monkeypatch.setattr(sys, "path", [str(tmp_path / "lib" / "site-packages"), str(tmp_path)])
    monkeypatch.chdir(tmp_path / "work")
    for name, value in {"GOMODCACHE": "go", "CARGO_HOME": "cargo", "PATH": "bin", "DUNES_HOME": "home"}.items():
        monkeypatch.setenv(name, str(tmp_path / value))
    return tmp_path


def test_the_default_is_what_is_found_except_headers(machine):
    corpus = collect_corpus(["installed"])
    assert names(corpus) == sorted(name for language, found in FOUND.items() if language != "c" for name in found)
    assert corpus.packages == [
        *("@scope/right 1.0.0, no licence stated", "broken, no licence stated", "fast 1.2, MIT"),
        *("gin@v1.10.0, The MIT License (MIT)", "gin@v1.9.1, no licence stated", "left 2.0.0, ISC"),
        *("one 3, BSD License", "plain, no licence stated", "serde-1.0.10, Permission is granted"),
        *("serde-1.0.9, no licence stated", "up 1.0.0, MIT"),
    ]
    assert set(corpus.skipped) >= {"third-party", "generated", "ignored"}


@pytest.mark.parametrize(
    "asked", ["python", "javascript", "go", "rust", "c", "go,rust", "rs,py", "ts", "js, GO", "python,python"]
)
def test_languages_are_asked_for_by_name_or_suffix(machine, asked):
    aliases = {"rs": "rust", "py": "python", "ts": "javascript", "js": "javascript"}
    languages = {aliases.get(text, text) for text in asked.lower().replace(" ", "").split(",")}
    assert names(collect_corpus([f"installed:{asked}"])) == sorted(n for name in languages for n in FOUND[name])


@pytest.mark.parametrize("source", ["installed:cobol", "installed:", "installed:python,", "installed:../x"])
def test_an_unknown_language_is_refused(machine, source):
    refuses("unknown language", collect_corpus, [source])


@pytest.mark.parametrize("place", ["/nowhere/none", "~nobody-has-this-name/go"])
def test_a_language_without_packages_is_refused_with_the_places(machine, monkeypatch, place):
    monkeypatch.setenv("GOMODCACHE", place)
    refuses(place, collect_corpus, ["installed:go"])
    assert names(collect_corpus(["installed:go,rust"])) == FOUND["rust"]


def test_near_duplicates_of_installed_code_go_and_those_of_a_project_stay(machine):
    text = (machine / "lib/site-packages/fast/routing.py").read_text()
    put(machine / "lib/site-packages", {"again/routing.py": text + "# more\n", "same/routing.py": text})
    copies = {"src/routing.py": text + "# ours\n", "src/copy.py": text + "# own\n"}
    put(machine / "project", {"a.py": code()} | copies)
    corpus = collect_corpus(["installed:python"])
    assert names(corpus) == FOUND["python"]
    assert corpus.duplicates == {}
    assert not any(note.startswith("near-duplicates") for note in corpus.notes)
    both = collect_corpus(["installed:python", machine / "project"])
    assert {"src/routing.py", "src/copy.py", "a.py"} <= {*names(both)}
    assert {*both.duplicates} <= {d.digest for d in both.documents}


def test_packages_contribute_equally_up_to_a_cap():
    sizes = {"large": 100, "small": 3, "next": 50}
    files = [(f"/r/{package}", f"{package}/{i}.py", 10) for package, size in sizes.items() for i in range(size)]
    chosen = select_files(files, 430)
    counts = {package: sum(p == f"/r/{package}" for p, _ in chosen) for package in sizes}
    assert counts == {"large": 20, "small": 3, "next": 20}
    assert select_files(files[::-1], 430) == chosen
    assert select_files(files, 0) == set()
    assert len(select_files(files, 1e9)) == len(files)


def test_what_a_package_states_may_be_anything(tmp_path):
    put(tmp_path, {"a/package.json": '{"name": 1, "version": [], "license": {"type": "MIT\\n\\u0000"}}'})
    put(tmp_path, {"b/package.json": "[]", "c/LICENSE": b"\xff\xfe", "d/LICENSE": "", "e/COPYING": "\n\n"})
    os.mkdir(tmp_path / "f")
    os.mkdir(tmp_path / "f" / "LICENSE")
    for name in ("a", "b", "c", "d", "e", "f", "none"):
        assert "\n" not in describe_package(tmp_path / name)
    assert describe_package(tmp_path / "none") == "none, no licence stated"


def test_the_name_is_no_path_and_a_folder_of_that_name_is_one(machine):
    assert not any(map(is_path, ("installed", "installed:go", "stdlib", "hf:org/name")))
    assert all(map(is_path, ("./installed", "installed_x", "stdlib:go", "./hf:x", "hf")))
    put(Path("installed"), {"mine.py": code()})
    assert names(collect_corpus(["./installed"])) == ["mine.py"]
    assert "mine.py" not in names(collect_corpus(["installed"]))
    assert TrainConfig(sources=("installed", "work")).normalized().sources[0] == "installed"


def test_a_card_that_names_installed_code_is_trusted_only_if_this_user_trained_on_it(machine):
    record = {"sources": ["installed:go"], "follow_links": False}
    refuses("trained on no such text here", require_own_sources, record)
    remember_sources(["installed:go"], False)
    require_own_sources(record)
    assert missing_source({"trained": record}) == ""
    assert trained_packages({"trained": record | {"packages": ["a, MIT", 3]}}) == ["a, MIT"]
    assert trained_packages({"trained": record | {"packages": 3}}) == []
