"""Data sets of the Hugging Face Hub: parquet files of a repository, named hf:ORG/NAME[/CONFIG][:SPLIT][@REVISION].

A repository without parquet files is read from the branch to which the Hub converts it
(https://huggingface.co/docs/dataset-viewer/parquet).
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from dunes.files.hub_cache import NAME, check_revision, download, resolve
from dunes.files.json_file import print_warning
from dunes.flags import HUB

BRANCHES = ("main", "refs/convert/parquet")
FORM = f"{HUB}ORG/NAME[/CONFIG][:SPLIT][@REVISION]"
SOURCE = re.compile(rf"{HUB}([^/:@]+/[^/:@]+)(?:/([^:@]+))?(?::([^:@]+))?(?:@([^:@]+))?")
PLACES = (
    re.compile(r"(?:(.+)/)?([^/]+?)-\d+-of-\d+[^/]*"),
    re.compile(r"(.+)/(?:partial-)?([^/]+)/\d{4}\.parquet"),
    re.compile(r"(?:(.+)/)?(?:[^/]*?(train|validation|test))?[^/]*"),
)
"""Patterns of files, with the groups configuration (a folder) and split: shards, the converted branch, others
(https://huggingface.co/docs/hub/datasets-file-names-and-splits)."""


def fetch(source: str) -> tuple[str, list[Path]]:
    """Download the missing files of a data set; returns its name with the commit, and the paths of its files.

    Prints a warning if the Hub did not answer and a cached commit is read. Raises ValueError, on one line, if the
    Hub does not provide the data set, or if it does not have the configuration or the split.
    """
    if not (match := SOURCE.fullmatch(source)) or not NAME.fullmatch(match[1]):
        raise ValueError(f"{source}: expected {FORM}, a data set of the Hub")
    name, config, split, revision = match.groups()
    branches, errors = [check_revision(name, revision)] if revision else BRANCHES, list[ValueError]()
    for branch in branches:
        try:
            commit, files, reason = resolve(f"datasets/{name}", branch)
        except ValueError as error:  # a branch without parquet files is not in the cache
            errors.append(error if branch == branches[0] else ValueError(f"{source}: no parquet files; {error}"))
            continue
        tables = {file: files[file] for file in sorted(files) if file.endswith(".parquet") and file.isprintable()}
        if tables and (reason or not errors):  # if the Hub fails to list main, it may have other tables there
            if reason:
                print_warning(f"warning: {name}: reads revision {commit} from the cache, as {reason}")
            tables = select_tables(tables, name, config, split)
            folder = download(f"datasets/{name}", branch, commit, tables)
            return f"{source.partition('@')[0]}@{commit}", [folder / file for file in tables]
    raise errors[0] if errors else ValueError(f"{source}: no parquet files; omit the revision, or pass another")


def pin(source: str) -> str:
    """The source; a data set of the Hub is downloaded and named with its commit."""
    return fetch(source)[0] if source.startswith(HUB) else source


def select_tables(tables: Mapping[str, int], name: str, config: str | None, split: str | None) -> dict[str, int]:
    """The files of a configuration and a split.

    The defaults are the only one, or else "default" and "train". Raises ValueError that names the existing ones.
    """
    places = {file: _place(file) for file in tables}
    folder = _choose(f"{name}: configuration", config, "default", [folder for folder, _ in places.values()])
    splits = [split for each, split in places.values() if each == folder]
    chosen = folder, _choose(f"{name}: split", split, "train", splits)
    return {file: tables[file] for file, place in places.items() if place == chosen}


def _choose(noun: str, asked: str | None, default: str, existing: Iterable[str]) -> str:
    names = [*dict.fromkeys(existing)]
    chosen = asked or (names[0] if len(names) == 1 else default)
    if chosen not in names:
        raise ValueError(f"{noun} {chosen!r}: expected one of {', '.join(names)[:300]}; pass {FORM}")
    return chosen


def _place(file: str) -> tuple[str, str]:
    """The configuration and the split of a file; the split is train if the name does not tell."""
    folder, split = next(match.groups() for pattern in PLACES if (match := pattern.fullmatch(file)))
    return folder or "", split or "train"
