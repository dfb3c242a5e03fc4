"""Read the files of a project: those below the studio's folder, and those that a model was trained on."""

from collections.abc import Sequence
from pathlib import Path

from dunes.files.model_file import open_file
from dunes.text.lines import decode_text

LARGEST = 400_000
"""Maximum size in bytes of a file that is opened."""


def read_project_file(name: str, roots: Sequence[Path]) -> tuple[Path, str]:
    """The path and the text of a file; `name` is its path, or its path relative to a folder in `roots`.

    Raises ValueError for a file outside of `roots`, also if a link leads there, and for a binary or too large
    file. Raises OSError for a file that cannot be read.
    """
    path = next((p for root in roots if (p := root / name).is_file()), roots[0] / name).resolve()
    if not any(path.is_relative_to(root.resolve()) for root in roots):
        raise ValueError(f"{path}: not below {' or '.join(map(str, roots))}; expected a file of the project")
    with open_file(path) as file:
        data = file.read(LARGEST + 1)
    if b"\0" in data or len(data) > LARGEST:
        raise ValueError(f"{path}: binary, or more than {LARGEST:,} bytes; expected a text file")
    return path, decode_text(data, str(path))
