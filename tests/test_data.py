"""From files to batches: what is read, what is kept on disk, and in which order it comes."""

import base64
import gzip
import itertools
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sysconfig
import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import change_json, metaspace_tokenizer, refuses
from dunes.data import PackedText, Windows, collect_corpus, document, files, open_shard, shards, token_shard
from dunes.data.batches import shuffle_index
from dunes.data.document import BLOCK, GIANT
from dunes.files import atomic
from dunes.progress import shown_by
from dunes.text import Tokenizer
from killed_runs import PROCESSES

BYTES = Tokenizer.train("bytes", [])


def many(examples):
    return settings(max_examples=examples, deadline=None, derandomize=True, database=None)


def put(folder, files):
    """Write the files of a dictionary from name to text or bytes."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    return folder


def names(corpus):
    return sorted(d.name for d in corpus.train + corpus.valid)


def one(path):
    """The document of a single file."""
    (document,) = collect_corpus([path]).train
    return document


# What .gitignore excludes


def git(folder, *words):
    """Run git, deaf to the settings of the user and the machine."""
    quiet = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    quiet |= {"HOME": str(folder), "XDG_CONFIG_HOME": ""}
    how = {"cwd": folder, "env": os.environ | quiet, "text": True, "check": True}
    return subprocess.run(["git", *words], capture_output=True, **how).stdout


def listed(folder):
    return sorted(filter(None, git(folder, "ls-files", "-z", "-co", "--exclude-standard").split("\0")))


def found(folder):
    """What `collect` finds, where each file has a text of its own; a file beside the folder is always found."""
    (beside := folder.parent / f"beside-{folder.name}").write_text("beside\n")
    corpus = collect_corpus([folder, beside])
    beside.unlink()
    assert set(corpus.skipped) <= {"ignored"}
    return [name for name in names(corpus) if name != beside.name]


needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="git is the oracle")


@pytest.fixture
def checkout(tmp_path):
    """A git checkout whose .gitignore files say all kinds of things."""
    root = tmp_path / "checkout"
    rules = {
        ".gitignore": [
            "# a comment", "", "*.log", "!keep.log", "/anchored.txt", "build/", "docs/*.html",
            "**/deep/secret.txt", "a/**/z.txt", "cache*", "trailing.txt   ", r"\#hash.txt", r"\!loud.txt",
            "[xy]?.dat", "only/*", "!only/this", "vendor/", "!generated/", "notes", "é.txt", "[", "broken\\",
            "!", "/", "[^ab]_.txt",
        ],
        "sub/.gitignore": ["!*.log", "/local.txt", "build", "!vendor/", "*.tmp"],
        "sub/inner/.gitignore": ["*.log", "!local.txt", "!*.tmp"],
        "crlf/.gitignore": ["\ufeff*.one\r", "*.two\r"],
    }  # fmt: skip
    stems = [
        "a.py", "x.log", "keep.log", "anchored.txt", "build", "docs/p.html", "docs/q/p.html", "deep/secret.txt",
        "a/z.txt", "a/b/c/z.txt", "cached.py", "trailing.txt", "#hash.txt", "!loud.txt", "x1.dat", "z1.dat",
        "only/this", "only/that", "vendor/v.py", "notes", "é.txt", "local.txt", "x.tmp", "c_.txt", "a_.txt",
        "generated/vendor/v.py", "generated/x.log", "build.d/x.py", "x.one", "x.two",
    ]  # fmt: skip
    files = [folder + stem for folder in ("", "sub/", "sub/inner/", "crlf/") for stem in stems]
    files += [f"{folder}build/out.py" for folder in ("a/", "sub/deeper/", "vendor/kept/", "sub/a/", "lib/")]
    put(root, {name: f"the text of {name}\n" for name in [*files, "lib/kept.py"]})
    put(root, {name: "\n".join([*lines, f"# of {name}"]) for name, lines in rules.items()})
    git(root, "init", "-q")
    return root


@needs_git
@pytest.mark.parametrize("below", ["", "sub", "sub/inner", "sub/a", "crlf", "lib", "a/b/c"])
def test_what_git_would_not_list_is_skipped(checkout, below):
    assert listed(checkout / below) or below == "a/b/c", "the oracle has something to say"
    assert found(checkout / below) == listed(checkout / below)


@needs_git
@pytest.mark.parametrize("seed", range(4))
def test_made_up_gitignore_files_are_read_as_git_reads_them(tmp_path, seed):
    chance = random.Random(seed)
    parts = ["*", "**", "*.py", "?", "[ab]", "f*", "[!a]", "*o*", "a b", "a", "b", "foo", "build"]
    for i in range(25):
        root = tmp_path / str(i)
        put(root, {"x.py": "the first\n"})
        git(root, "init", "-q")
        folders = [root]
        for _ in range(7):
            folders.append(chance.choice(folders) / chance.choice(["a", "b", "foo", "build", "a b"]))
        files = {}
        for at in folders:
            for name in chance.sample(["f", "x.py", "y.txt", "foo.c", "oo", "a b.py"], 3):
                files[(at / name).relative_to(root).as_posix()] = f"{at} {name}\n"
            lines = [f"# {at}"]
            for _ in range(chance.choice([0, 3, 5])):
                line = "/".join(chance.choices(parts, k=chance.choice([1, 1, 2, 3])))
                line = chance.choice(["", "", "/"]) + line + chance.choice(["", "", "/"])
                lines.append(chance.choice(["", "", "!"]) + line)
            files[(at / ".gitignore").relative_to(root).as_posix()] = "\n".join(lines)
        put(root, files)
        source = chance.choice([root, *folders])
        if want := listed(source):  # nothing, where the folder itself is ignored: that is the next test's
            assert found(source) == want, (seed, i, source)


@needs_git
@pytest.mark.parametrize("below", ["vendor", "lib/build"])
def test_a_folder_that_is_named_is_read_although_it_is_ignored(checkout, below):
    assert not listed(checkout / below)
    assert found(checkout / below)


def test_a_gitignore_outside_a_checkout_speaks_of_what_is_below_it_only(tmp_path):
    put(tmp_path, {".gitignore": "*.txt", "in/.gitignore": "*.log"})
    put(tmp_path, {"in/a.txt": "a", "in/b.log": "b", "in/c.py": "c"})
    assert names(collect_corpus([tmp_path / "in"])) == [".gitignore", "a.txt", "c.py"]
    assert names(collect_corpus([tmp_path])) == [".gitignore", "in/.gitignore", "in/c.py"]


def test_folders_of_tools_are_never_entered(tmp_path):
    tools = (".git", ".hg", ".svn", "__pycache__", "node_modules", ".venv", "lib/site-packages")
    put(tmp_path, {f"{tool}/x.py": tool for tool in tools} | {"venv.py": "kept", ".github/x.yml": "kept too"})
    corpus = collect_corpus([tmp_path])
    assert names(corpus) == [".github/x.yml", "venv.py"]
    assert corpus.skipped == {"folders of dependencies": [".venv", "lib/site-packages", "node_modules"]}
    put(tmp_path, {".gitignore": "node_modules/\n"})
    assert collect_corpus([tmp_path]).skipped == {"folders of dependencies": [".venv", "lib/site-packages"]}
    assert names(collect_corpus([tmp_path / "node_modules"])) == ["x.py"], "named by the user"


# What nobody wants to learn


def prose(size):
    """Lines such as a novel has."""
    chance = random.Random(1)
    words = ["the", "sea", "was", "calm", "no", "wind", "came", "over", "hills", "of", "that", "far", "country"]
    lines = []
    while size > 0:
        lines.append(" ".join(chance.choices(words, k=14)).capitalize() + ".\n")
        size -= len(lines[-1])
    return "".join(lines)


def hexadecimal(size):
    chance = random.Random(2)
    return "".join(" ".join(f"0x{b:02x}," for b in chance.randbytes(16)) + "\n" for _ in range(size // 96 + 1))


MINIFIED = "var a=function(b){return b.c};" * (GIANT // 30 + 1)
GENERATED = {
    "min.js": MINIFIED,
    "table.c": hexadecimal(GIANT + 1000),
    "marked.py": "# @generated by a program\n" + prose(GIANT),
    "edit.go": "// Code written by protoc. DO NOT EDIT.\n" + prose(GIANT),
}


def test_what_is_no_text_is_skipped_line_and_counted_with_its_reason(tmp_path):
    late = prose(200_000) + "\0"
    files = {
        "binary": {"a.bin": b"\x7fELF\0\0\1", "utf16.txt": "text".encode("utf-16"), "late.txt": late},
        "not UTF-8": {
            "latin.txt": "größe".encode("latin-1"),
            "cut.txt": "€".encode()[:2],
            "latest.txt": prose(BLOCK + 9).encode() + b"\xff",
            "lone.txt": b"\xed\xa0\x80",
        },
        "empty": {"nothing.py": "", "blank.py": " \n\t\n"},
        "duplicates": {"b/copy.py": "x = 1\n", "c.py": "x = 1\n"},
        "generated": GENERATED,
    }
    kept = {"a.py": "x = 1\n", "b/other.py": "x = 1", "novel.txt": prose(1_000_000), "small.js": MINIFIED[:9000]}
    kept["zh.txt"] = "".join("海風平靜沒有從遠方的山丘吹來他們離開了那裡。\n"[i % 3 :] for i in range(9000))
    put(tmp_path, kept)
    for group in files.values():
        put(tmp_path, group)
    corpus = collect_corpus([tmp_path])
    assert reasons(corpus) == {reason: sorted(group) for reason, group in files.items()}
    assert names(corpus) == sorted(kept)


NUMBERS = json.dumps([[i, i / 7, -i * 1e-9] for i in range(900)])
BASE64 = base64.encodebytes(bytes(range(256)) * 99).decode()
GO = "// Code generated by protoc-gen-go. DO NOT EDIT.\npackage a\n"
LICENSED = "/*\n * Copyright 2024 The Authors\n" + " * Licensed under\n" * 20 + " */\n"


def notebook(code, picture):
    output = {"data": {"image/png": BASE64[:picture]}, "output_type": "display_data"}
    cell = {"cell_type": "code", "source": [prose(code)], "outputs": [output] if picture else []}
    return json.dumps({"cells": [cell], "nbformat": 4}, indent=1)


NAMES = [
    "package-lock.json", "yarn.lock", "pnpm-lock.yaml", "npm-shrinkwrap.json", "Cargo.lock", "poetry.lock",
    "uv.lock", "go.sum", "Pipfile.lock", "composer.lock", "Gemfile.lock", "mix.lock", "pubspec.lock",
    "Podfile.lock", "Package.resolved", "flake.lock", "packages.lock.json", ".terraform.lock.hcl",
    "bun.lock", "gradle.lockfile", "deno.lock", "a/app.min.js", "a/app.min.css", "a/app.js.map",
    "a/app.css.map", "a/y.snap", "a/__snapshots__/x.test.js", "a/b_pb2.py", "a/b_pb2_grpc.py", "a/b.pb.go",
    "a/b.pb.cc", "a/b.g.dart", "a/Form.Designer.cs", "a/b.generated.ts", "zz_generated.deepcopy.go",
]  # fmt: skip
LEFT_OUT = {
    "generated": {
        **dict.fromkeys(NAMES),
        "a/made.go": GO,
        "a/licensed.c": LICENSED + "/* This file is auto-generated. */\nint x;\n",
        "a/marked.py": "#!/usr/bin/python\n# -*- coding: utf-8 -*-\n# @generated by a tool\nx = 1\n",
        "a/marked.html": "<!-- Generated file,\n  do not edit -->\n<p>x</p>\n",
        "a/marked.cs": "// <auto-generated>\n//   By a tool\n",
        "a/marked.sql": "-- DO NOT EDIT\nselect 1;\n",
        "a/one_line.js": "var a=function(b){return b+1};" * 900,
        "a/Plot.ipynb": notebook(8_000, 20_000),
        "a/one_line.css": ".a{color:red}" * 900,
    },
    "data": {
        "a/points.json": NUMBERS,
        "a/lines.csv": NUMBERS.replace("], [", "\n"),
        "a/table.c": "int table[] = {\n" + "  0x3f, 0x21, 0xa7, 0xff, 0x10,\n" * 900 + "};\n",
        "a/key.txt": BASE64,
    },
    "third-party": {
        **dict.fromkeys(["third_party/x/y.py", "bower_components/x.js", "vendor/modules.txt"]),
        **dict.fromkeys(["vendor/github.com/x/y/z.go", "src/_vendor/lib/LICENSE", "src/_vendor/lib/core.py"]),
    },
}
KEPT = {
    "a/generator.py": f'TEMPLATE = """\\\n{GO}"""\n# DO NOT EDIT\n',
    "a/generate.py": "# Writes the generated file c.go; people edit this one, not that.\nx = 1\n",
    "a/section.py": "# DO NOT EDIT BELOW THIS LINE\nx = 1\n",
    "settings.conf": "# DO NOT EDIT THIS FILE; copy it to your home folder.\ncolor: red\n",
    "a/lock.py": "x = 2\n",
    "a/block.lock.py": "x = 3\n",
    "a/min.js": "var x;\n",
    "a/map.js": "var y;\n",
    "shop/vendor/models.py": "class Vendor:\n    name = 1\n",
    "shop/vendor/views.py": "class View:\n    name = 2\n",
    "a/small.json": NUMBERS[:5000],
    "a/data.py": "".join(f"A_{i} = {{'name': 'value {i}', 'rate': 0.{i}}}\n" for i in range(500)),
    "a/Read.ipynb": notebook(40_000, 2_000),
    "paragraphs.txt": "\n".join(" ".join(prose(9_000).split()) for _ in range(9)),
    "log.md": "".join(f"- Fixed a bug ([#{i}](https://host/pull/{i})), thanks to @user{i}.\n" for i in range(999)),
    "embedded.py": "".join(f"def f{i}():\n    return {i}\n" for i in range(900)) 
    + f'ICON = "{BASE64[:9000].encode().hex()}"\n',
}  # fmt: skip


def test_what_no_one_wrote_here_is_left_out_and_said_in_one_line(tmp_path):
    groups = {reason: {n: t or f"x {n}\n" for n, t in group.items()} for reason, group in LEFT_OUT.items()}
    put(tmp_path, KEPT)
    for group in groups.values():
        put(tmp_path, group)
    corpus = collect_corpus([tmp_path])
    assert names(corpus) == sorted(KEPT)
    assert reasons(corpus) == {reason: sorted(group) for reason, group in groups.items()}
    everything = [n for group in groups.values() for n in group]
    (line,) = [note for note in corpus.notes if note.startswith("left out: ")]
    assert f"{len(everything)} files" in line
    for name in {*everything} - {"a/points.json"}:  # a list in JSON, which is read as records
        assert names(collect_corpus([tmp_path / name])) == [tmp_path.joinpath(name).name], "named by the user"
    assert len(names(collect_corpus([tmp_path / "vendor"]))) == 2
    refuses("only: no text to train on", collect_corpus, [put(tmp_path / "only", {"go.sum": "x"})])


@pytest.mark.timeout(30)
def test_links_that_lead_back_pipes_and_broken_links_do_no_harm(tmp_path, monkeypatch):
    put(tmp_path, {"a.py": "a", "sub/b.py": "b", "elsewhere.txt": "c"})
    source = put(tmp_path / "source", {"kept.py": "kept", "sub/kept.py": "kept too"})
    links = {"loop": "loop", "one": "two", "two": "one", "broken": "nowhere", "device": os.devnull}
    for name, target in (links | {"sub/up": source, "file": tmp_path / "elsewhere.txt"}).items():
        (source / name).symlink_to(target)
    os.mkfifo(source / "pipe")
    os.mkfifo(source / "sub" / ".gitignore")
    with socket.socket(socket.AF_UNIX) as listening:
        monkeypatch.chdir(source)  # the name of a socket is short
        listening.bind("socket")
        corpus = collect_corpus([source])
    assert names(corpus) == ["kept.py", "sub/kept.py"]
    harmless = {"unreadable": ["broken", "loop", "one", "two"], "links": ["sub/up"]}
    harmless["not regular files"] = ["pipe", "socket", "sub/.gitignore"]
    assert reasons(corpus) == harmless | {"links that lead outside": ["device", "file"]}
    assert "2 links that lead outside" in corpus.report()
    assert "--follow-links reads these" in corpus.report()
    refuses("1 not regular files", collect_corpus, [source / "pipe"])
    followed = collect_corpus([source], follow_links=True)
    assert names(followed) == ["file", "kept.py", "sub/kept.py"]
    irregular = sorted([*harmless["not regular files"], "device"])
    assert reasons(followed) == harmless | {"not regular files": irregular}


def reasons(corpus):
    return {reason: sorted(skipped) for reason, skipped in corpus.skipped.items()}


@pytest.mark.timeout(30)
@pytest.mark.skipif(not os.path.exists("/proc/kmsg"), reason="no file here is regular, empty and endless")
def test_files_that_never_end_are_not_opened(tmp_path):
    endless = "/proc/kmsg"
    source = put(tmp_path / "source", {"kept.py": "kept", "sub/kept.py": "kept too"})
    (source / "log").symlink_to(endless)
    (source / "sub" / ".gitignore").symlink_to(endless)
    assert names(collect_corpus([source])) == ["kept.py", "sub/kept.py"]
    followed = collect_corpus([source], follow_links=True)
    assert names(followed) == ["kept.py", "sub/kept.py"]
    reason = "empty" if os.access(endless, os.R_OK) else "unreadable"  # only root may read it
    assert reasons(followed) == {reason: ["log", "sub/.gitignore"]}
    for named in (endless, source / "log"):
        refuses(f"1 {reason}", collect_corpus, [named])


def test_what_is_linked_outside_is_read_if_asked_for_by_its_own_rules(tmp_path):
    put(tmp_path / "shared", {"a.py": "a", "in/b.py": "b", "secret/key": "c", ".gitignore": "secret/\n*.log"})
    put(tmp_path / "shared", {"d.log": "d", ".git/config": "e", "secret/open/f.py": "f"})
    source = put(tmp_path / "source", {"own.py": "own", ".gitignore": "hidden*\nown"})
    links = {
        "all": "shared", "again": "shared/in", "a1": "shared/secret/key", "a2": "shared/secret/open",
        "a3": "shared/d.log", "hidden": "shared/in", "a": "shared/a.py", "own": "source/own.py",
    }  # fmt: skip
    for name, target in links.items():
        (source / name).symlink_to(tmp_path / target)
    (tmp_path / "shared" / "in" / "back").symlink_to(source)
    (tmp_path / "shared" / "in" / "up").symlink_to(tmp_path / "shared")
    assert names(collect_corpus([source])) == [".gitignore", "own.py"]
    corpus = collect_corpus([source], follow_links=True)
    assert names(corpus) == [".gitignore", "a", "again/b.py", "again/up/.gitignore", "own.py"]
    ignored = ["a1", "a2", "a3", "again/up/d.log", "again/up/secret", "hidden", "own"]
    # What was followed once is not followed again, from wherever a link leads there.
    links = ["again/back", "again/up/in/back", "again/up/in/up", "all"]
    copies = ["again/up/a.py", "again/up/in/b.py"]
    assert reasons(corpus) == {"ignored": ignored, "links": links, "duplicates": copies}


def test_a_named_link_is_what_it_leads_to_and_what_is_linked_between_sources_or_named_twice_is_read_once(tmp_path):
    put(tmp_path, {"one/a.py": "a", "two/b.py": "b"})
    for link, target in (("folder", "one"), ("file", "one/a.py")):
        (tmp_path / link).symlink_to(target)
    assert [names(collect_corpus([tmp_path / link])) for link in ("folder", "file")] == [["a.py"], ["file"]]
    named = collect_corpus([tmp_path / "one", tmp_path / "one" / "a.py"])
    assert (names(named), named.skipped) == (["a.py"], {"duplicates": ["a.py"]})
    (tmp_path / "one" / "to").symlink_to(tmp_path / "two" / "b.py")
    os.link(tmp_path / "one" / "a.py", tmp_path / "two" / "hard.py")
    corpus = collect_corpus([tmp_path / "one", tmp_path / "two"])
    assert names(corpus) == ["a.py", "b.py"]
    assert reasons(corpus) == {"links": ["to"], "duplicates": ["hard.py"]}


@pytest.mark.timeout(30)
def test_a_file_that_grows_while_it_is_read_has_an_end(tmp_path, monkeypatch):
    put(tmp_path, {"a.py": "a", "log.txt": "a line\n" * 9})
    read = files.open_plain

    @contextmanager
    def growing(path):
        def grow(size):
            with path.open("a") as file:
                file.write("another line\n" * 9)
            return inner.read(size)

        with read(path) as inner:
            yield SimpleNamespace(read=grow)

    monkeypatch.setattr(document, "open_plain", lambda path: (growing if path.suffix == ".txt" else read)(path))
    corpus = collect_corpus([tmp_path])
    assert names(corpus) == ["a.py"]
    assert reasons(corpus) == {"changed while being read": ["log.txt"]}


@pytest.mark.timeout(30)
def test_a_file_that_becomes_a_pipe_is_not_waited_for(tmp_path, monkeypatch):
    put(tmp_path, {"a.py": "a", "b.py": "b"})
    corpus = collect_corpus([tmp_path])
    for text in [*corpus.train, *corpus.valid]:
        text.path.unlink()
        os.mkfifo(text.path)
        refuses("changed while it was being read", list, text.text())
    # Between the look at a file and its opening, too.
    status = os.stat(__file__)
    monkeypatch.setattr(os, "stat", lambda path, **more: status)
    with pytest.raises(OSError, match="not a plain file any more"):
        files.open_plain(tmp_path / "a.py")


def test_what_may_not_be_read_is_skipped_line_and_counted(tmp_path, monkeypatch):
    put(tmp_path, {"a.py": "a", "closed/b.py": "b", "closed.py": "c", "open/.gitignore": "d", "open/e.py": "e"})
    scandir, read, opened = os.scandir, Path.open, os.open

    def refuse(path):
        if Path(path).name in ("closed", "closed.py", ".gitignore"):
            raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "scandir", lambda path: refuse(path) or scandir(path))
    monkeypatch.setattr(Path, "open", lambda path, *rest, **more: refuse(path) or read(path, *rest, **more))
    monkeypatch.setattr(os, "open", lambda path, *rest, **more: refuse(path) or opened(path, *rest, **more))
    corpus = collect_corpus([tmp_path])
    assert names(corpus) == ["a.py", "open/e.py"]
    assert sorted(corpus.skipped["unreadable"]) == ["closed", "closed.py", "open/.gitignore"]


def test_file_names_that_are_not_utf8_do_no_harm(tmp_path):
    try:
        (tmp_path / os.fsdecode(b"caf\xe9.py")).write_text("a")
        (tmp_path / os.fsdecode(b"caf\xe8.py")).write_text("b")
    except OSError:
        pytest.skip("this file system takes UTF-8 names only")
    put(tmp_path, {"c.py": "c", ".gitignore": b"caf\xe8.py"})
    corpus = collect_corpus([tmp_path])
    assert names(corpus) == ["c.py", os.fsdecode(b"caf\xe9.py")]
    assert corpus.skipped == {"ignored": [os.fsdecode(b"caf\xe8.py")], "not UTF-8": [".gitignore"]}


def test_the_standard_library_has_a_name_and_leaves_its_tests_out(tmp_path, monkeypatch):
    library = {"os.py": "a", "json/tool.py": "b", "test/test_os.py": "c", "idlelib/idle_test/x.py": "d"}
    put(tmp_path / "real", library | {"site-packages/x.py": "e", "unittest/test.py": "f"})
    (tmp_path / "link").symlink_to("real")  # as some installers have it
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path / "link")})
    assert names(collect_corpus(["stdlib"])) == ["json/tool.py", "os.py", "unittest/test.py"]


@pytest.mark.parametrize("files", [None, {}, {"a.bin": b"\0", "b.txt": "", "c.txt": b"\xff"}])
def test_a_source_without_text_is_refused_by_its_path(tmp_path, files):
    put(tmp_path, {"a.py": "a"})
    source = tmp_path / "source"
    if files is not None:
        put(source, files).mkdir(exist_ok=True)
    refuses(str(source), collect_corpus, [source, *[tmp_path / "a.py"] * (files is None)])


# Validation


def sides(corpus):
    return {d.name: side for side in ("train", "valid") for d in getattr(corpus, side)}


def test_a_file_stays_on_its_side_when_others_come_go_and_change(tmp_path):
    files = {f"part_{i % 7}/module_{i}.py": f"x = {i}\n" for i in range(160)}
    put(tmp_path / "a", dict(list(files.items())[:120]))
    before = sides(collect_corpus([tmp_path / "a"], 0.2))
    assert set(before.values()) == {"train", "valid"}
    put(tmp_path / "a", files | {"part_0/module_0.py": "y = 'edited'\n"})
    after = sides(collect_corpus([tmp_path / "a"], 0.2))
    assert len(after) == 160
    assert sum(after[name] != before[name] for name in before) <= 6, "those whose hashes are near the limit"
    # On another machine the checkout lies elsewhere.
    put(tmp_path / "b" / "c", files | {"part_0/module_0.py": "y = 'edited'\n"})
    assert sides(collect_corpus([tmp_path / "b" / "c"], 0.2)) == after


@pytest.mark.parametrize("share", [0, 0.5, 1])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_of_several_files_each_side_gets_one_and_a_single_file_is_for_learning(tmp_path, share, count):
    for i in range(12):
        put(tmp_path / str(i), {f"{i}_{j}.py": f"{i} {j}" for j in range(count)})
        corpus = collect_corpus([tmp_path / str(i)], share)
        assert len(corpus.train) >= 1
        assert len(corpus.valid) >= (count > 1)
        assert len(corpus.train + corpus.valid) == count


# Documents


CONTENTS = {
    "line ends": b"one\r\ntwo\rthree\n\r\n\n",
    "mark": "\ufeffwith a mark\n".encode(),
    "no end": b"no line end",
    "boundary 2": b"%s\n" % (b"x" * 62) * (BLOCK // 63) + b"x" * (BLOCK % 63 - 1) + "érest\nand more".encode(),
    "boundary 4": b"%s\n" % (b"y" * 60) * (BLOCK // 61) + b"y" * (BLOCK % 61 - 3) + "😀\n".encode() * 9,
    "long line": "é".encode() * (3 * BLOCK) + b"\nshort\n" * BLOCK,
    "one line": b"z" * (6 * BLOCK + 5),
    "odd breaks": "a\u2028b\x0cc\x85d\n".encode() * 100_000,
}


@pytest.mark.parametrize("content", CONTENTS.values(), ids=CONTENTS)
def test_blocks_are_the_text_of_the_file_and_end_at_line_ends(tmp_path, content):
    (tmp_path / "file.txt").write_bytes(content)
    document = one(tmp_path / "file.txt")
    blocks = list(document.text())
    assert "".join(blocks) == content.decode()
    assert all(blocks)
    assert document.size == len(content)
    assert len(blocks) >= min(2, len(content) // (2 * BLOCK) + 1)
    if b"z" not in content:
        assert all(block.endswith("\n") for block in blocks[:-1])


CHANGES = {
    "another text": lambda path: path.write_bytes(b"x = 2\n" * 9),
    "more": lambda path: path.write_bytes(path.read_bytes() + b"x"),
    "less": lambda path: path.write_bytes(path.read_bytes()[:-3]),
    "not UTF-8": lambda path: path.write_bytes(b"\xff" + path.read_bytes()),
    "gone": lambda path: path.unlink(),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_file_that_changed_is_noticed_when_it_is_read(tmp_path, change):
    put(tmp_path, {"a.py": "x = 1\n" * 9})
    document = one(tmp_path / "a.py")
    assert "".join(document.text()) == "x = 1\n" * 9
    CHANGES[change](tmp_path / "a.py")
    refuses(r"a\.py: changed while it was being read", list, document.text())
    path = put(tmp_path, {"rows.jsonl": record_lines(20)}) / "rows.jsonl"
    corpus = collect_corpus([path])
    CHANGES[change](path)
    for side in (*corpus.train, *corpus.valid):
        refuses(r"rows\.jsonl: changed while it was being read", list, side.text())


# Files of records


def record_lines(count, **more):
    return "".join(json.dumps({"id": i, "text": f"the text of {i}\n", **more}) + "\n" for i in range(count))


def learned(documents):
    return [text for d in documents for text in map("".join, d.texts())]


def test_records_are_learned_by_their_texts_and_held_out_by_their_hashes(tmp_path):
    put(tmp_path, {"a.py": "x = 1\n", "in/rows.jsonl": record_lines(400) + '{"id": 7}\n{"text": ""}\n'})
    put(tmp_path, {"copy.jsonl.gz": gzip.compress((tmp_path / "in" / "rows.jsonl").read_bytes())})
    corpus = collect_corpus([tmp_path])
    expected = [f"the text of {i}\n" for i in range(400)]
    assert sorted([*learned(corpus.train), *learned(corpus.valid)]) == sorted([*expected, "x = 1\n"])
    held = learned(corpus.valid)
    assert 50 < len(held) < 110, "a fifth of a short text"
    assert sum(d.size for d in [*corpus.train, *corpus.valid]) == len("".join(expected)) + 6
    assert reasons(corpus) == {"duplicates": ["in/rows.jsonl"]}
    assert corpus.notes == ["text from records: the field text (402 records; 2 without text skipped)"]
    put(tmp_path / "more", {"rows.jsonl": record_lines(500)})
    assert set(held) <= set(learned(collect_corpus([tmp_path / "more"]).valid))
    for count, sides in ((1, [1, 0]), (2, [1, 1]), (3, [2, 1])):
        folder = put(tmp_path / str(count), {"rows.jsonl": record_lines(count) * 2})
        few = collect_corpus([folder / "rows.jsonl"], 1e-9)
        assert [len(set(learned(side))) for side in (few.train, few.valid)] == sides, "of a few, each gets one"


def said(role, content):
    return {"role": role, "content": content}


def test_what_is_taken_from_records_is_said(tmp_path):
    rows = {
        "tasks.json": json.dumps([{"instruction": "Hi", "output": "Ho"}, {"instruction": "A", "output": "B"}]),
        "chat.jsonl": json.dumps({"messages": [said("user", "Who"), said("assistant", "I")]}),
        "other.jsonl": json.dumps({"body": "other"}),
        "settings.json": '[{"body": "no text"}]',
    }  # fmt: skip
    corpus = collect_corpus([put(tmp_path / "all", rows)])
    texts = ["A\n\nB", "Hi\n\nHo", "Who\n\nI"]
    assert sorted([*learned(corpus.train), *learned(corpus.valid)]) == sorted(texts)
    notes = "\n".join(corpus.notes)
    for place in ("messages", "instruction, input, output", "other.jsonl, line 1", "settings.json, row 1"):
        assert place in notes
    assert reasons(corpus) == {"unreadable records": ["other.jsonl", "settings.json"]}
    refuses(r"other\.jsonl, line 1: .* --text-field", collect_corpus, [tmp_path / "all" / "other.jsonl"])
    body = collect_corpus([tmp_path / "all"], text_field=["body"])
    assert sorted(learned([*body.train, *body.valid])) == ["no text", "other"]
    assert reasons(body) == {"unreadable records": ["chat.jsonl", "tasks.json"]}


def test_a_shard_of_records_ends_each_text(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "BLOCK", 50)
    texts = [f"{i} héllo\nworld {'long ' * (i % 40)}" for i in range(60)]
    path = put(tmp_path, {"rows.jsonl": "".join(json.dumps({"text": t}) + "\n" for t in texts)}) / "rows.jsonl"
    corpus = collect_corpus([path])
    for side in (corpus.train, corpus.valid):
        ids = [[*BYTES.encode(text), BYTES.eos] for text in learned(side)]
        shard = token_shard(side, BYTES)
        assert shard.tokens.tolist() == [i for text in ids for i in text]
        assert shard.starts.tolist() == [sum(map(len, ids[:i])) for i in range(len(ids))]
    assert sorted(learned(corpus.train) + learned(corpus.valid)) == sorted(texts)


# Shards


@pytest.fixture
def documents(tmp_path):
    text = "def task_{0}(value):\n    return value * {0}  # größer 漢字 <|endoftext|>\n"
    texts = {f"{i}.py": text.format(i) for i in range(6)}
    return collect_corpus([put(tmp_path / "source", texts)]).train


def expected(documents, tokenizer):
    return [i for d in documents for i in (*tokenizer.encode(d.path.read_bytes().decode()), tokenizer.eos)]


@pytest.mark.parametrize("kind", ["bpe", "bytes", "chars"])
def test_a_shard_holds_the_ids_of_each_document_and_an_end(documents, tmp_path, kind):
    tokenizer = Tokenizer.train(kind, [block for d in documents for block in d.text()], 300)
    shard = token_shard(documents, tokenizer, tmp_path / "cache")
    assert shard.tokens.tolist() == expected(documents, tokenizer)
    assert shard.length == len(shard.tokens)
    assert shard.size == sum(d.path.stat().st_size for d in documents)
    assert shard.documents == len(documents) == (shard.tokens == tokenizer.eos).sum()
    assert shard.vocab == tokenizer.vocab
    assert shard.starts.tolist() == [0, *(np.flatnonzero(shard.tokens == tokenizer.eos)[:-1] + 1).tolist()]


def test_tokenizers_that_differ_in_the_end_of_a_text_alone_have_shards_of_their_own(documents, tmp_path):
    for eos in ("<a>", "<b>"):
        tokenizer = Tokenizer.train("bpe", ["def main()"], 300)
        tokenizer.inner.add_special_tokens(["<a>", "<b>"])
        (tmp_path / eos).mkdir()
        tokenizer.save(tmp_path / eos)
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": eos}
        (tmp_path / eos / "tokenizer_config.json").write_text(json.dumps(config))
        loaded = Tokenizer.load(tmp_path / eos)
        assert loaded.eos == loaded.inner.token_to_id(eos)
        assert token_shard(documents, loaded, tmp_path / "cache").tokens[-1] == loaded.eos


def test_a_shard_of_a_foreign_tokenizer_has_its_bos_and_ids_of_whole_texts(tmp_path):
    tokenizer = metaspace_tokenizer()
    corpus = collect_corpus([put(tmp_path / "source", {"a.txt": "def v\n" * 12_000, "b.txt": "v d"})])
    documents = sorted(corpus.train + corpus.valid, key=lambda d: d.name)
    ids = [[0, *tokenizer.encode("".join(d.text())), 1] for d in documents]
    shard = token_shard(documents, tokenizer, tmp_path / "cache")
    assert shard.tokens.tolist() == [i for text in ids for i in text]
    assert shard.starts.tolist() == [0, len(ids[0])]
    assert tokenizer.text_start == [0]
    assert len(tokenizer.encode("a\n") * 2) != len(tokenizer.encode("a\na\n")), "lines do not separate it"


def state(folder):
    return {p.name: (s.st_mtime_ns, s.st_ino, s.st_size) for p in sorted(folder.iterdir()) if (s := p.stat())}


def test_what_is_cached_is_not_written_again_and_only_the_owner_may_read_it(documents, tmp_path):
    cache = tmp_path / "a" / "cache"
    first = token_shard(documents, BYTES, cache)
    before = state(first.folder)
    assert token_shard(documents, Tokenizer.train("bytes", []), cache) == first
    assert state(first.folder) == before
    assert list(cache.iterdir()) == [first.folder]
    assert first.folder.stat().st_mode & 0o777 == 0o700
    assert (first.folder / "tokens.bin").stat().st_mode & 0o777 == 0o400
    with pytest.raises(ValueError, match="read-only"):
        first.tokens[0] = 1


def test_another_text_order_or_tokenizer_has_another_key(documents, tmp_path):
    bpe = [Tokenizer.train("bpe", [text], 270) for text in ("def task value", "return value")]
    assert bpe[0].vocab == bpe[1].vocab
    shards = [token_shard(documents, tokenizer) for tokenizer in (BYTES, *bpe)]
    shards += [token_shard(some, BYTES) for some in (documents[1:], documents[::-1])]
    documents[0].path.write_text("x = 'edited'\n")
    shards.append(token_shard(collect_corpus([tmp_path / "source"]).train, BYTES))
    assert len({s.key for s in shards}) == len({s.folder for s in shards}) == len(shards)


def flipped(data, at):
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


DAMAGES = {
    "a bit": lambda data: flipped(data, len(data) // 2),
    "cut": lambda data: data[:-2],
    "longer": lambda data: data + b"\0\0",
    "gone": lambda data: None,
    "zeros": lambda data: bytes(len(data)),
}


@pytest.mark.parametrize("name", ["tokens.bin", "starts.bin", "shard.json"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_shard_is_refused_by_its_path_and_made_again(documents, tmp_path, name, damage):
    first = token_shard(documents, BYTES, tmp_path / "cache")
    want, starts, path = first.tokens.tolist(), first.starts.tolist(), first.folder / name
    data, hurt = path.read_bytes(), DAMAGES[damage](path.read_bytes())
    path.unlink()
    if hurt is not None:
        path.write_bytes(hurt)
    refuses(str(first.folder), open_shard, first.folder)
    again = token_shard(documents, BYTES, tmp_path / "cache")
    assert again == open_shard(first.folder) == first
    assert again.tokens.tolist() == want
    assert again.starts.tolist() == starts
    assert path.read_bytes() == data
    assert list((tmp_path / "cache").iterdir()) == [first.folder]


def dies(documents, cache, batches):
    """Write a shard, and be killed after some of its batches."""
    shards.BLOCK, seen = 10, itertools.count()
    with shown_by(lambda *_: next(seen) == batches and os.kill(os.getpid(), signal.SIGKILL)):
        token_shard(documents, BYTES, cache)


def test_a_shard_whose_writer_was_killed_is_continued_after_its_intact_batches(documents, tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "BLOCK", 10)
    encode, encoded = shards._encode, []
    monkeypatch.setattr(shards, "_encode", lambda batch, _: encoded.append(batch) or encode(batch, BYTES))
    reference = token_shard(documents, BYTES, tmp_path / "reference")
    content = {path.name: path.read_bytes() for path in reference.folder.iterdir()}
    assert content.keys() == {"tokens.bin", "starts.bin", "shard.json"}
    process = PROCESSES.Process(target=dies, args=(documents, tmp_path / "killed", 3))
    process.start()
    process.join(120)
    assert process.exitcode == -signal.SIGKILL
    left = {p.name: p.read_bytes() for p in (tmp_path / "killed").glob(".dunes-*.new/*")}
    nothing = ("", "", lambda data: data)
    for name, damage, hurt in [nothing, *((n, d, f) for n in left for d, f in DAMAGES.items())]:
        cache = shutil.copytree(tmp_path / "killed", tmp_path / f"{name} {damage}")
        for path in cache.glob(f".dunes-*.new/{name or '-'}"):
            data = hurt(path.read_bytes())
            path.unlink() if data is None else path.write_bytes(data)
        encoded.clear()
        shard = token_shard(documents, BYTES, cache)
        assert {path.name: path.read_bytes() for path in shard.folder.iterdir()} == content, (name, damage)
        assert [*cache.iterdir()] == [shard.folder]
        assert (len(encoded) == len(documents) + 1 - 3) == (damage in ("", "longer")), (name, damage)


def test_a_shard_of_the_older_format_is_made_again(documents, tmp_path):
    first = token_shard(documents, BYTES, tmp_path)
    path = first.folder / "shard.json"
    data = path.read_bytes()
    (first.folder / "starts.bin").unlink()
    change_json(path, format=1)
    assert token_shard(documents, BYTES, tmp_path).starts.tolist()[0] == 0
    assert path.read_bytes() == data


def test_a_row_reads_what_the_mapped_file_holds_and_notices_a_change(documents):
    shard = token_shard(documents, BYTES)
    row = shard.token_file
    assert len(row) == shard.length
    for _ in range(50):
        index = np.random.default_rng(_).integers(0, len(row), (3, 7))
        assert (row[index] == shard.tokens[index]).all()
    windows = Windows(row, 20, 4)
    assert torch.equal(windows.batch(3), Windows(shard.tokens, 20, 4).batch(3))
    path = shard.folder / "tokens.bin"
    path.chmod(0o600)
    os.truncate(path, 50)
    refuses(r"tokens\.bin: the tokens changed while they were in use", windows.batch, 4)


def test_what_is_interrupted_is_removed_after_a_week(monkeypatch, documents, tmp_path):
    def stop(text, done):
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), shown_by(stop):
        token_shard(documents, BYTES, tmp_path / "cache")
    documents[-1].path.write_text("x = 'edited'\n")
    refuses("changed while it was being read", token_shard, documents, BYTES, tmp_path / "cache")
    assert len(list((tmp_path / "cache").iterdir())) == 1
    shard = token_shard(documents[:-1], BYTES, tmp_path / "cache")
    assert len(list((tmp_path / "cache").iterdir())) == 2
    monkeypatch.setattr(atomic, "time", lambda: time.time() + 8 * 86_400)
    token_shard(documents[:-2], BYTES, tmp_path / "cache")
    assert shard.folder in (tmp_path / "cache").iterdir()
    assert len(list((tmp_path / "cache").iterdir())) == 2


def test_a_shard_that_another_process_finished_first_is_left_in_its_place(documents, tmp_path):
    other = []

    def finish_other(text, done):
        if done and not other:
            with shown_by(lambda *state: None):
                shard = token_shard(documents, BYTES, tmp_path / "cache")
            other.append((shard, state(shard.folder)))

    with shown_by(finish_other):
        shard = token_shard(documents, BYTES, tmp_path / "cache")
    assert shard == other[0][0]
    assert state(shard.folder) == other[0][1]
    assert list((tmp_path / "cache").iterdir()) == [shard.folder]


@pytest.mark.parametrize(("vocab", "dtype"), [(1 << 16, np.uint16), ((1 << 16) + 1, np.uint32)])
def test_ids_take_two_bytes_as_long_as_they_fit(tmp_path, vocab, dtype):
    characters = [chr(i) for i in range(0x20, 0x12000) if not 0xD800 <= i < 0xE000][: vocab - 10]
    tokenizer = Tokenizer.train("chars", characters)
    assert tokenizer.vocab == vocab
    put(tmp_path, {"a.txt": "".join(characters[::97]) + characters[-1]})
    shard = token_shard([one(tmp_path / "a.txt")], tokenizer)
    assert shard.tokens.dtype == dtype
    assert shard.tokens.tolist() == expected([one(tmp_path / "a.txt")], tokenizer)
    assert Windows(shard.tokens, shard.length - 1, 1).batch(0).tolist() == [shard.tokens.tolist()]


# Windows

sized = lambda length: st.tuples(st.integers(length + 1, 12 * length + 30), st.just(length))
texts = st.integers(1, 40).flatmap(sized)
"""(how many tokens, how long a window is)"""


def starts(windows, epoch):
    """Where the windows of an epoch begin, in order."""
    count = windows.windows_per_epoch
    return windows.starts(np.arange(epoch * count, (epoch + 1) * count, dtype=np.int64))


@many(100)
@given(text=texts, epoch=st.integers(0, 10**6), seed=st.integers(0, 2**40))
def test_an_epoch_meets_each_token_once_but_for_the_two_ends(text, epoch, seed):
    size, length = text
    windows = Windows(np.arange(size), length, 1, seed)
    count = windows.windows_per_epoch
    rows = np.stack([windows.batch(epoch * count + i)[0].numpy() for i in range(count)])
    assert (np.diff(rows, axis=1) == 1).all(), "a window is a part of the text"
    assert rows.min() >= 0
    assert rows.max() < size
    targets = np.sort(rows[:, 1:].ravel())
    assert (np.diff(targets) == 1).all(), "no token is met twice, and none between two others is left out"
    assert size - 1 - len(targets) < 2 * length


@many(80)
@given(text=texts, batch=st.integers(1, 9), number=st.integers(0, 10**9), seed=st.integers(0, 9))
def test_a_batch_depends_on_its_number_only(text, batch, number, seed):
    size, length = text
    tokens = np.arange(size, dtype=np.uint16)
    windows = Windows(tokens, length, batch, seed)
    stream = windows.batches(number)
    for i in range(3):
        ids = next(stream)
        assert ids.shape == (batch, length + 1)
        assert ids.dtype == torch.int64
        assert torch.equal(ids, windows.batch(number + i))
        assert torch.equal(ids, Windows(tokens.copy(), length, batch, seed).batch(number + i))
        single = Windows(tokens, length, 1, seed)
        rows = range((number + i) * batch, (number + i + 1) * batch)
        assert torch.equal(ids, torch.cat([single.batch(row) for row in rows])), "of any size"


@many(80)
@given(text=texts, cuts=st.lists(st.integers(1, 400)), number=st.integers(0, 10**6), data=st.data())
def test_separate_documents_have_positions_and_targets_of_their_own(text, cuts, number, data):
    """The same ids in the same order; positions restart where a document or the window begins."""
    (size, length), end = text, 1
    ids = np.array(data.draw(st.lists(st.integers(0, 3), min_size=size, max_size=size)), np.uint16)
    begins = sorted({0, *(c for c in cuts if c < size)})
    plain = Windows(ids, length, 3)
    batch = Windows(PackedText(ids, np.array(begins), end), length, 3).batch(number)
    assert torch.equal(batch[0], plain.batch(number)[:, :-1])
    index = plain.starts(np.arange(3 * number, 3 * number + 3))[:, None] + np.arange(length + 1)
    for row, got_targets, got_positions in zip(index.tolist(), *(b.tolist() for b in batch[1:]), strict=True):
        begin = [max(row[0], max(b for b in begins if b <= i)) for i in row]
        assert got_positions == [i - b for i, b in zip(row, begin, strict=True)][:-1]
        same = [a == b or ids[i] == end for a, b, i in zip(begin, begin[1:], row[1:], strict=False)]
        assert got_targets == [int(ids[i]) if s else -100 for s, i in zip(same, row[1:], strict=True)]


def rotate(ids, generator):
    """Another order of a document's ids: its first id, then a rotation of the others."""
    return np.append(ids[:1], np.roll(ids[1:], generator.integers(len(ids))))


def transformed_text(windows, epoch):
    """The text as the windows of an epoch show it, and the index of its first id."""
    per = windows.windows_per_epoch
    rows = [[*ids[0].tolist(), None] for ids, *_ in (windows.batch(epoch * per + i) for i in range(per))]
    by_start = dict(zip(starts(windows, epoch).tolist(), rows, strict=True))
    return [i for start in sorted(by_start) for i in by_start[start][:-1]], min(by_start)


@pytest.mark.parametrize("length", [3, 7, 50])
def test_a_document_is_transformed_as_a_whole_by_seed_epoch_and_document(length):
    size, begins = 240, np.array([0, 40, 41, 60, 150])  # the last two are equally long
    text = PackedText(np.arange(size), begins, 1, rotate)
    windows, bounds = Windows(text, length, 1, 5), [*begins.tolist(), size]
    texts, rotations = [], []
    for epoch in (0, 1, 7):
        ids, first = transformed_text(windows, epoch)
        whole = dict(enumerate(ids, first))
        texts.append(whole)
        for start, stop in itertools.pairwise(bounds):
            part = {i: whole[i] for i in range(start, stop) if i in whole}
            # Every window has its part of one rotation of the whole document.
            shifts = {(i - v) % (stop - start - 1) for i, v in part.items() if i > start}
            assert len(shifts) <= 1
            rotations.append((epoch, stop - start, *shifts))
            assert part.get(start, start) == start
    assert len({tuple(t.get(i) for i in range(70, 140)) for t in texts}) == 3, "epochs differ"
    assert len({r for r in rotations if r[1] == 90}) == 6, "documents differ"
    assert transformed_text(Windows(text, length, 1, 6), 0)[0] != transformed_text(windows, 0)[0], "seeds differ"


def test_a_transformed_document_is_the_same_in_every_window_batch_and_resumed_run():
    text = PackedText(np.arange(300), np.array([0, 9, 100, 120, 290]), 1, rotate)
    windows = Windows(text, 11, 4, 3)
    for number, batch in zip(range(30), windows.batches(), strict=False):
        alone = [Windows(text, 11, 1, 3).batch(4 * number + row) for row in range(4)]
        resumed = next(Windows(text, 11, 4, 3).batches(number))
        for part, again, rows in zip(batch, resumed, zip(*alone, strict=True), strict=True):
            assert torch.equal(part, again)
            assert torch.equal(part, torch.cat(rows))


def test_epochs_and_seeds_differ_in_order_and_cut():
    windows = [Windows(np.arange(1000), 10, 1, seed) for seed in (0, 1)]
    epochs = [starts(w, epoch) for w in windows for epoch in range(20)]
    cuts = [int(e.min()) for e in epochs]
    orders = {tuple(((e - cut) // 10).tolist()) for e, cut in zip(epochs, cuts, strict=True)}
    assert len(orders) == len(epochs)
    assert len(set(cuts)) > 8
    assert cuts[:20] != cuts[20:]


EDGES = [1 << 16, (1 << 16) + 1]


@many(100)
@given(st.integers(1, 3000) | st.sampled_from([1, 2, 4, *EDGES]), st.integers(0, 2**50), st.integers(0, 2**30))
def test_shuffling_is_a_permutation(size, seed, epoch):
    order = shuffle_index(np.arange(size), size, (seed, epoch))
    assert np.array_equal(np.sort(order), np.arange(size))
    some = np.arange(size)[:: max(1, size // 5)]
    assert np.array_equal(shuffle_index(some, size, (seed, epoch)), order[some])


def test_shuffling_leaves_no_trace_of_the_old_order_and_needs_no_list():
    orders = np.stack([shuffle_index(np.arange(1000), 1000, (seed, 0)) for seed in range(50)])
    assert abs(orders.mean(0) - 499.5).max() < 6 * 289 / 50**0.5, "each place gets numbers of all sizes"
    neighbours = np.abs(np.diff(orders, axis=1)) == 1
    assert neighbours.mean() < 0.004, "about two in a thousand follow each other by chance"
    assert (orders == np.arange(1000)).mean() < 0.003
    many = shuffle_index(np.array([0, 1, 10**12 - 1]), 10**12, (0, 0))
    assert len(set(many.tolist())) == 3
    assert 0 <= many.min() <= many.max() < 10**12


@pytest.mark.parametrize(("size", "length"), [(8, 8), (0, 1), (5, 64)])
def test_a_text_without_one_window_is_refused_with_both_numbers(size, length):
    refuses(rf"^{size} tokens, and one window needs {length + 1};", Windows, np.arange(size), length, 1)
    assert Windows(np.arange(length + 1), length, 2).batch(0).tolist() == [list(range(length + 1))] * 2
