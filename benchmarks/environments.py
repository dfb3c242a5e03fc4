"""Virtual environments of other people's libraries: one for each name and version, made on first use.

They lie in the cache folder ($DUNES_HOME, or the user's). An environment counts once the file `whole`
lies in it, which is written last; what an interrupted installation left is made anew.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from filelock import FileLock

WHOLE = "whole"


class Unavailable(RuntimeError):
    """An environment that cannot be had; the message is one line that says why."""


def home() -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("DUNES_HOME") or cache / "dunes") / "peers"


def python_of(name: str, release: str, beside: Sequence[str] = ()) -> Path:
    """The interpreter of an environment that holds this release and what is asked for beside it.

    "torch" beside it is the release that runs here, so that no side wins by another one. Raises Unavailable.
    """
    beside = [f"torch=={version('torch').split('+')[0]}" if b == "torch" else b for b in beside]
    tag = "-".join([name, release, *(b.replace("==", "-") for b in beside)])
    folder = home() / tag
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.parent / f"{tag}.lock"):
        if not (folder / WHOLE).is_file():
            _make(folder, f"{name}=={release}", beside)
    return folder / "bin" / "python"


def _make(folder: Path, main: str, beside: Sequence[str]) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    print(f"making an environment for {main}: {folder}", file=sys.stderr, flush=True)
    try:
        _run(sys.executable, "-m", "venv", str(folder))
        pip = (str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet")
        # The release alone first: where there is none, that is known before gigabytes are fetched.
        _run(*pip, "--no-deps", main)
        _run(*pip, *beside, main)
        (folder / WHOLE).write_text("\n".join((main, *beside)) + "\n")
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()]
        errors = [line for line in lines if line.lstrip().upper().startswith("ERROR")]
        raise Unavailable((errors or lines or [f"exit code {done.returncode}"])[-1].strip()[:300])


def found_here(name: str, release: str = "") -> str:
    """The release of it that this Python has. Raises Unavailable if there is none, or another."""
    try:
        here = version(name)
    except PackageNotFoundError:
        raise Unavailable("not installed in this Python") from None
    if release not in ("", here):
        raise Unavailable(f"{here} is installed in this Python, not {release}")
    return here
