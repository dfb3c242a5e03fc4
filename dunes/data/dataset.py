"""Finetuning data from a file or a folder: files of records, each of its own format, and files of plain text."""

from collections.abc import Sequence
from pathlib import Path

from dunes.data.document import Document, plain_document
from dunes.data.examples import Record, Records, read_records
from dunes.data.files import SourceFile, Walk, skipped_line
from dunes.data.record_document import holds_records
from dunes.data.records import JSON
from dunes.text.templates import Turn
from dunes.units import plural


def read_dataset(
    source: Path | str, text_field: Sequence[str] = (), follow_links: bool = False
) -> tuple[list[Records], list[str]]:
    """The records in a file, or in all files below a folder, and lines that report read and skipped files.

    A file of plain text is one record; .gitignore, binaries, links and duplicates are handled as in
    `collect_corpus`. Raises ValueError that names the file, and the line or row, for invalid records, and if there
    are none.
    """
    walk = Walk([source], follow_links)
    files: list[Records] = []
    documents: dict[str, Document] = {}
    for file in walk.files():
        if _has_records(file):
            files.append(read_records(file.path, text_field))
        elif isinstance(document := plain_document(file), str):
            walk.skip(document, file.name)
        elif document.digest in documents:
            walk.skip("duplicates", file.name)
        else:
            documents[document.digest] = document
    lines = [records.description for records in files]
    if documents:
        rows = [Record((Turn("text", "".join(d.text())),), str(d.path), "text") for d in documents.values()]
        files.append(Records(Path(source), "text", "plain files", rows))
        lines.append(f"{source}: {plural(len(rows), 'file')} of plain text")
    if walk.skipped:
        lines.append(skipped_line(walk.skipped))
    if not files:
        raise ValueError(f"{source}: nothing to train on ({lines[0] if lines else 'no files'})")
    return files, lines


def _has_records(file: SourceFile) -> bool:
    """Whether to read a file as records; a .json file that the user names must have records."""
    return holds_records(file) or (file.named and file.path.name.lower().endswith(JSON))
