"""Download a model from the Hugging Face Hub into the Hub's cache, which has a folder for each commit.

A branch is resolved to its commit. huggingface_hub caches the commit's list of files, downloads missing files, and
verifies their sizes. Cached files need no network. This module selects the files to download: weights in one
format only, and never code. Downloaded large files are compared with their SHA-256; `hf cache verify` compares
cached files.

The cache's layout (blobs named by digest, snapshots of links to blobs, refs) is described at
https://huggingface.co/docs/huggingface_hub/guides/manage-cache
"""

import os
import re
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from dunes.checkpoint.wheel import MODELS
from dunes.files import atomic
from dunes.units import plural

SECONDS = 10.0
"""Timeout of a request to the Hub."""
PART = r"[A-Za-z0-9_](?:[\w.-]*\w)?"
NAME = re.compile(f"{PART}/{PART}", re.ASCII)
REVISION = re.compile(r"\w(?:[\w./+-]{0,254}\w)?", re.ASCII)
COMMIT = re.compile("[0-9a-f]{40}")
SIGN_IN = "set HF_TOKEN to a token that may read it, or run: hf auth login"

BESIDE = (
    r"(config|generation_config|params|special_tokens_map|tekken|dunes|tokenizer\w*)\.json"
    r"|tokenizer\.model(\.v\w+)?|chat_template\.jinja"
)
# Patterns of weights' file names, the preferred first (safetensors before pickles), and the index of the shards.
FORMS = {
    r"model\.safetensors": None,
    r"model-[\w-]+\.safetensors": "model.safetensors.index.json",
    r"consolidated\.safetensors": None,
    r"consolidated-[\w-]+\.safetensors": "consolidated.safetensors.index.json",
    r"consolidated\.\d+\.pth": None,
    r"pytorch_model\.bin": None,
    r"pytorch_model-[\w-]+\.bin": "pytorch_model.bin.index.json",
}


def parse_name(model: str, revision: str | None) -> tuple[str, str]:
    """Repository and revision from a model's name. Raises ValueError for names that the Hub does not permit."""
    name, separator, suffix = model.partition("@")
    if not NAME.fullmatch(name) or len(name) > 96 or re.search(r"\.\.|--|\.git$", name):
        raise ValueError(
            f"{model}: no such folder; pass a model folder, a Hugging Face model (org/name[@revision]), or "
            f"{', '.join(MODELS)}"
        )
    if separator and revision and suffix != revision:
        raise ValueError(f"{model}: revision {revision!r} is given, too; pass only one")
    requested = suffix if separator else revision or "main"
    if not REVISION.fullmatch(requested) or ".." in requested:
        raise ValueError(f"{name}: {requested!r} cannot be a revision; pass a branch, a tag or a commit")
    return name, requested


def download(name: str, revision: str) -> tuple[Path, str]:
    """Download the missing files of a revision; returns the revision's folder in the cache, and its commit."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")  # read by huggingface_hub when it is imported
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    from huggingface_hub import constants, snapshot_download

    store = Path(constants.HF_HUB_CACHE).expanduser() / f"models--{name.replace('/', '--')}"
    commit, listing = _resolve(name, revision, store)
    folder, files = store / "snapshots" / commit, select_files(listing, name)
    missing = [file for file in files if not (folder / file).is_file()]
    if missing:
        atomic.require_free_space(store, sum(files[file] for file in missing))
        try:
            snapshot_download(name, revision=commit, allow_patterns=missing)
        except Exception as error:  # httpx, JSON, ...
            raise _failure(error, name, revision) from None
        _verify(folder / file for file in missing)
    ref = store / "refs" / revision
    if revision != commit and _read_ref(ref) != commit:
        with suppress(OSError):  # the cache may be read-only
            ref.parent.mkdir(parents=True, exist_ok=True)
            atomic.write_file(ref, commit.encode())
    return folder, commit


def _resolve(name: str, revision: str, store: Path) -> tuple[str, dict[str, int]]:
    """The commit of a revision, and the number of bytes to download for each file in this commit.

    If `revision` is a commit whose list of files is cached, no request is sent. (`HfApi.resolve_revision` is not
    used, since it has no timeout.)
    """
    from huggingface_hub import HfApi

    if COMMIT.fullmatch(revision) and (listing := _cached_listing(name, revision, store)):
        return revision, listing
    try:
        info = HfApi().model_info(name, revision=revision, files_metadata=True, timeout=SECONDS)
    except Exception as error:
        commit = revision if COMMIT.fullmatch(revision) else _read_ref(store / "refs" / revision)
        if not COMMIT.fullmatch(commit) or not (listing := _cached_listing(name, commit, store)):
            raise _failure(error, name, revision) from None
        return commit, listing
    if not COMMIT.fullmatch(str(info.sha)):  # the commit becomes part of a path
        raise ValueError(f"{name}: the Hub returned {str(info.sha)!r:.60}, not a commit; check HF_ENDPOINT")
    blobs = ((s.rfilename, s.lfs.sha256 if s.lfs else s.blob_id, s.size or 0) for s in info.siblings or ())
    return str(info.sha), {
        path: 0 if (store / "blobs" / str(blob)).exists() else size for path, blob, size in blobs
    }


def _cached_listing(name: str, commit: str, store: Path) -> dict[str, int]:
    """The cached list of a commit's files, with their sizes; empty if nothing is cached."""
    from huggingface_hub import get_cached_repo_tree
    from huggingface_hub.errors import CachedRepoTreeNotFoundError

    try:
        return {entry.path: entry.size for entry in get_cached_repo_tree(name, revision=commit)}
    except CachedRepoTreeNotFoundError:  # older versions of huggingface_hub cache no listings
        return {path.name: 0 for path in (store / "snapshots" / commit).glob("*")}


def _read_ref(ref: Path) -> str:
    """The cached commit of a branch; empty if the cache does not have the branch."""
    return ref.read_text().strip() if ref.is_file() else ""


def select_files(files: Mapping[str, int], name: str) -> dict[str, int]:
    """Files to download, with weights in one format only. Raises ValueError if there are no weights."""
    for weights, index in FORMS.items():
        if any(re.fullmatch(weights, file) for file in files):
            names = f"{BESIDE}|{weights}"
            return {file: size for file, size in files.items() if re.fullmatch(names, file) or file == index}
    raise ValueError(
        f"{name}: no weights in a supported format (model*.safetensors, consolidated*.safetensors, "
        f"consolidated.*.pth or pytorch_model*.bin) among its {plural(len(files), 'file')}; choose another model"
    )


def _failure(error: Exception, name: str, revision: str) -> ValueError:
    """A one-line ValueError, with a remedy, for a request to the Hub that failed."""
    from huggingface_hub import constants

    causes: list[BaseException] = [error]
    while (cause := causes[-1].__cause__) is not None:
        causes.append(cause)
    answered = next((cause for cause in causes if getattr(cause, "response", None) is not None), causes[-1])
    words = (" ".join(str(answered).split()) or type(answered).__name__)[:200].rstrip(".")
    return ValueError(
        f"{name}: no such folder, {revision!r} is not complete in the Hub's cache, and the Hub does not provide "
        f"it ({words}); check name and network, accept the conditions at {constants.ENDPOINT}/{name}, or {SIGN_IN}"
    )


def _verify(files: Iterable[Path]) -> None:
    """Remove the first file whose SHA-256 differs from its name in the cache, and raise ValueError."""
    for path in files:  # a large file is named by its SHA-256
        name = Path(os.readlink(path)).name if path.is_symlink() else ""
        if len(name) == 64 and atomic.digest(path) != name:
            path.resolve().unlink()
            raise ValueError(f"{path}: differs from the Hub's file, whose SHA-256 is {name}; try again")
