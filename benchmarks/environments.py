"""Virtual environments of other libraries: one per name and version, created on first use.

They are in the cache folder ($DUNES_HOME, or the user's). The file `whole` is written last; an environment without
this file is created again.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from filelock import FileLock

COMPLETE = "whole"


class Unavailable(RuntimeError):
    """An environment cannot be created; the message is one line with the reason."""


def home() -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("DUNES_HOME") or cache / "dunes") / "peers"


def python_of(name: str, release: str, requirements: Sequence[str] = ()) -> Path:
    """The interpreter of an environment with this release and further requirements.

    The requirement "torch" is pinned to the release running here. Raises Unavailable.
    """
    requirements = [f"torch=={version('torch').split('+')[0]}" if b == "torch" else b for b in requirements]
    tag = "-".join([name, release, *(b.replace("==", "-") for b in requirements)])
    folder = home() / tag
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.parent / f"{tag}.lock"):
        if not (folder / COMPLETE).is_file():
            _make(folder, f"{name}=={release}", requirements)
    return folder / "bin" / "python"


def _make(folder: Path, main: str, requirements: Sequence[str]) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    print(f"creating an environment for {main}: {folder}", file=sys.stderr, flush=True)
    try:
        _run(sys.executable, "-m", "venv", str(folder))
        pip = (str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet")
        # The release alone first: a missing one fails before gigabytes are fetched.
        _run(*pip, "--no-deps", main)
        _run(*pip, *requirements, main)
        (folder / COMPLETE).write_text("\n".join((main, *requirements)) + "\n")
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()]
        errors = [line for line in lines if line.lstrip().upper().startswith("ERROR")]
        raise Unavailable((errors or lines or [f"exit code {done.returncode}"])[-1].strip()[:300])


def installed_release(name: str, release: str = "") -> str:
    """The release installed in this Python. Raises Unavailable if there is none, or another."""
    try:
        installed = version(name)
    except PackageNotFoundError:
        raise Unavailable("not installed in this Python") from None
    if release not in ("", installed):
        raise Unavailable(f"{installed} is installed in this Python, not {release}")
    return installed
