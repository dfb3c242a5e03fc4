"""Download files of a repository of the Hugging Face Hub into the Hub's cache, which has a folder for each commit.

A repository is named models/ORG/NAME or datasets/ORG/NAME. A branch is resolved to its commit. huggingface_hub
caches the commit's list of files, downloads missing files, and verifies their sizes. Cached files need no network.
Downloaded large files are compared with their SHA-256; `hf cache verify` compares cached files.

The cache's layout (blobs named by digest, snapshots of links to blobs, refs) is described at
https://huggingface.co/docs/huggingface_hub/guides/manage-cache
"""

import glob
import os
import re
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from dunes.files import atomic

SECONDS = 10.0
"""Timeout of a request to the Hub."""
PART = r"[A-Za-z0-9_](?:[\w.-]*\w)?"
NAME = re.compile(rf"(?=.{{1,96}}\Z)(?!.*(?:\.\.|--|\.git\Z)){PART}/{PART}", re.ASCII)
"""Names of repositories that the Hub permits, without models/ or datasets/."""
REVISION = re.compile(r"\w(?:[\w./+-]{0,254}\w)?", re.ASCII)
COMMIT = re.compile("[0-9a-f]{40}")
FILE = re.compile(r"(?:(?!\.\.?/)[^/\\\0]+/)*(?!\.\.?\Z)[^/\\\0]+")
"""Paths that stay inside a folder."""
SIGN_IN = "set HF_TOKEN to a token for it, or run: hf auth login"


def check_revision(name: str, revision: str) -> str:
    """Return the revision. Raises ValueError if git does not permit it."""
    if not REVISION.fullmatch(revision) or ".." in revision:
        raise ValueError(f"{name}: {revision!r} cannot be a revision; pass a branch, a tag or a commit")
    return revision


def resolve(repository: str, revision: str) -> tuple[str, dict[str, int], str]:
    """The commit of a revision, the number of bytes to download for each file in this commit, and the reason why
    they are from the cache instead of the Hub (empty if the Hub answered, or needed not be asked).

    If `revision` is a commit whose list of files is cached, no request is sent. Raises ValueError, on one line, if
    neither the Hub nor the cache has it. (`HfApi.resolve_revision` is not used, since it has no timeout.)
    """
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")  # read by huggingface_hub when it is imported
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    from huggingface_hub import HfApi

    if COMMIT.fullmatch(revision) and (listing := _cached_listing(repository, revision)):
        return revision, listing, ""
    store, kind, name = _locate(repository)
    api: Any = HfApi()
    try:
        info = api.repo_info(name, repo_type=kind, revision=revision, files_metadata=True, timeout=SECONDS)
    except Exception as error:
        commit = revision if COMMIT.fullmatch(revision) else _read_ref(store / "refs" / revision)
        if not COMMIT.fullmatch(commit) or not (listing := _cached_listing(repository, commit)):
            raise _failure(error, repository, revision) from None
        return commit, listing, _reason(error)
    if not COMMIT.fullmatch(str(info.sha)):  # the commit becomes part of a path
        raise ValueError(f"{name}: the Hub returned {str(info.sha)!r:.60}, not a commit; check HF_ENDPOINT")
    blobs = ((s.rfilename, s.lfs.sha256 if s.lfs else s.blob_id, s.size or 0) for s in info.siblings or ())
    sizes = {path: 0 if (store / "blobs" / str(blob)).exists() else size for path, blob, size in blobs}
    return info.sha, sizes, ""


def download(repository: str, revision: str, commit: str, files: Mapping[str, int]) -> Path:
    """Download those of the commit's `files` (with their sizes) that the cache lacks; returns the commit's folder.

    Raises ValueError, on one line, if a file cannot be downloaded, or its name leads out of the folder. Raises
    OSError if the disk is full.
    """
    from huggingface_hub import snapshot_download

    store, kind, name = _locate(repository)
    if outside := [file for file in files if not FILE.fullmatch(file)]:
        raise ValueError(f"{name}: {outside[0]!r:.100} in the Hub's list of its files is no path inside it")
    folder, ref = store / "snapshots" / commit, store / "refs" / revision
    missing = [file for file in files if not (folder / file).is_file()]
    if missing:
        atomic.require_free_space(store, sum(files[file] for file in missing))
        try:
            snapshot_download(name, repo_type=kind, revision=commit, allow_patterns=[*map(glob.escape, missing)])
        except Exception as error:  # httpx, JSON, ...
            raise _failure(error, repository, revision) from None
        _verify(folder / file for file in missing)
    if revision != commit and _read_ref(ref) != commit:
        with suppress(OSError):  # the cache may be read-only
            ref.parent.mkdir(parents=True, exist_ok=True)
            atomic.write_file(ref, commit.encode())
    return folder


def _locate(repository: str) -> tuple[Path, str, str]:
    """The folder of a repository in the cache, its type and its name in huggingface_hub."""
    from huggingface_hub import constants

    kind, _, name = repository.partition("/")
    return Path(constants.HF_HUB_CACHE).expanduser() / repository.replace("/", "--"), kind[:-1], name


def _cached_listing(repository: str, commit: str) -> dict[str, int]:
    """The cached list of a commit's files, with their sizes; empty if nothing is cached."""
    from huggingface_hub import get_cached_repo_tree
    from huggingface_hub.errors import CachedRepoTreeNotFoundError

    store, kind, name = _locate(repository)
    with suppress(CachedRepoTreeNotFoundError):
        return {f.path: f.size for f in get_cached_repo_tree(name, repo_type=kind, revision=commit)}
    # Older versions of huggingface_hub cache no listings. Of a data set, only a part may be cached.
    return {path.name: 0 for path in (store / "snapshots" / commit).glob("*") if kind == "model"}


def _read_ref(ref: Path) -> str:
    """The cached commit of a branch; empty if the cache does not have the branch."""
    return ref.read_text().strip() if ref.is_file() else ""


def _reason(error: Exception) -> str:
    """The reason of a failed request, on one line."""
    causes: list[BaseException] = [error]
    while (cause := causes[-1].__cause__) is not None:
        causes.append(cause)
    answered = next((cause for cause in causes if getattr(cause, "response", None) is not None), causes[-1])
    return (" ".join(str(answered).split()) or type(answered).__name__)[:200].rstrip(".")


def _failure(error: Exception, repository: str, revision: str) -> ValueError:
    """A one-line ValueError, with a remedy, for a request to the Hub that failed."""
    from huggingface_hub import constants

    store, kind, name = _locate(repository)
    begun = [f" (begun: {path.name})" for path in (store / "snapshots").glob("*") if path.name != revision]
    return ValueError(
        f"{name}: {'no such folder, ' * (kind == 'model')}{revision!r} is not complete in the Hub's cache"
        f"{''.join(begun[:1])}, and the Hub does not provide it ({_reason(error)}); check name and network, "
        f"accept the conditions at {constants.ENDPOINT}/{repository.removeprefix('models/')}, or {SIGN_IN}"
    )


def _verify(files: Iterable[Path]) -> None:
    """Remove the first file whose SHA-256 differs from its name in the cache, and raise ValueError."""
    for path in files:  # a large file is named by its SHA-256
        name = Path(os.readlink(path)).name if path.is_symlink() else ""
        if len(name) == 64 and atomic.digest(path) != name:
            path.resolve().unlink()
            raise ValueError(f"{path}: differs from the Hub's file, whose SHA-256 is {name}; try again")
