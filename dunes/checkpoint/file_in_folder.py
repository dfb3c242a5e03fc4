"""Files that another file of a folder names: plain ones in that folder, and nothing else."""

import stat
from pathlib import Path

from dunes.checkpoint.header import quote


def file_in_folder(folder: Path, name: str, index: Path) -> Path:
    """The plain file of that name in the folder. Raises ValueError if it lies elsewhere, or is another thing.

    The Hub's cache keeps a snapshot's files as links into a folder `blobs` beside all snapshots.
    """
    path = folder / name
    if name in ("", ".", "..") or Path(name).name != name or not name.isprintable() or "\\" in name:
        raise ValueError(f"{index}: {quote(name)} is not the name of a file in this folder")
    try:
        real, home = path.resolve(), folder.resolve()
        found = real.stat().st_mode if real.exists() else None
    except (OSError, RuntimeError) as error:  # a loop of links, a name too long
        raise ValueError(f"{index}: {quote(name)} cannot be opened: {_why(error)}") from None
    homes = [home, home.parents[1] / "blobs"] if home.parent.name == "snapshots" else [home]
    if real.parent not in homes:
        raise ValueError(f"{path}: leads out of the folder, to {real}")
    if found is None:
        raise ValueError(f"{path}: no such file, and {index.name} names it; fetch it")
    if not stat.S_ISREG(found):
        raise ValueError(f"{path}: not a plain file")
    return path


def _why(error: Exception) -> str:
    return error.strerror or "" if isinstance(error, OSError) else "its links lead in a circle"
