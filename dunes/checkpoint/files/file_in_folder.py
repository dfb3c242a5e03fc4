"""Resolve the name of a file that another file of a folder lists: a regular file in that folder, nothing else."""

import stat
from pathlib import Path

from dunes.checkpoint.files.header import quote


def file_in_folder(folder: Path, name: str, index: Path) -> Path:
    """The path of a file that `index` lists. Raises ValueError unless it is a regular file in the folder.

    In the Hub's cache, files of a snapshot are links into a folder `blobs` beside all snapshots.
    """
    path = folder / name
    if name in ("", ".", "..") or Path(name).name != name or not name.isprintable() or "\\" in name:
        raise ValueError(f"{index}: {quote(name)} is not the name of a file in this folder")
    try:
        real, home = path.resolve(), folder.resolve()
        mode = real.stat().st_mode if real.exists() else None
    except (OSError, RuntimeError) as error:  # a loop of links, a name that is too long
        reason = error.strerror or "" if isinstance(error, OSError) else "its links form a loop"
        raise ValueError(f"{index}: {quote(name)} cannot be opened: {reason}") from None
    allowed = [home, home.parents[1] / "blobs"] if home.parent.name == "snapshots" else [home]
    if real.parent not in allowed:
        raise ValueError(f"{path}: leads out of the folder, to {real}")
    if mode is None:
        raise ValueError(f"{path}: no such file, and {index.name} names it; fetch it")
    if not stat.S_ISREG(mode):
        raise ValueError(f"{path}: not a regular file")
    return path
