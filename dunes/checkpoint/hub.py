"""A model by its name on the Hugging Face Hub: a folder of the Hub's own cache, at one commit, each file checked.

A branch is first turned into the commit that it stands for, and only then is anything read, so that all files
belong together and the commit can be written down. Of the files, those that a reader here can use are
fetched, and the weights in one form only; code is never among them. The Hub tells each file's digest (SHA-256
of large files, git's SHA-1 of a blob for the others) and the downloader itself compares only sizes, so what
came is compared with it here. What was told is noted under $DUNES_HOME/hub, and what was found right (see
`seen`): a model that is opened daily is not hashed daily, and a commit that is here needs no network.

Sources: https://huggingface.co/docs/huggingface_hub/guides/manage-cache (the layout: blobs named by digest,
snapshots of links to them, refs), https://huggingface.co/docs/hub/api,
https://git-scm.com/book/en/v2/Git-Internals-Git-Objects
"""

import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from hashlib import sha1
from importlib import import_module
from pathlib import Path
from typing import Any

from dunes.checkpoint import atomic
from dunes.checkpoint.seen import Seen
from dunes.data.shards import default_cache
from dunes.plural import plural

SECONDS = 10.0  # that an answer of the Hub may take
PART = r"[A-Za-z0-9_](?:[\w.-]*\w)?"
NAME = re.compile(f"{PART}/{PART}", re.ASCII)
REVISION = re.compile(r"\w(?:[\w./+-]{0,254}\w)?", re.ASCII)
COMMIT = re.compile("[0-9a-f]{40}")
RIGHT = "right"  # under this name is noted how the files looked that were right
SIGN_IN = "set HF_TOKEN to a token that may read it, or run: hf auth login"

BESIDE = re.compile(
    r"(config|generation_config|params|special_tokens_map|tekken|dunes|tokenizer\w*)\.json"
    r"|tokenizer\.model(\.v\w+)?|chat_template\.jinja"
)
# Forms of weights, the best first: safe ones before pickles, one file before many, the Hub's usual names first.
FORMS = tuple(
    (re.compile(weights), index)
    for weights, index in (
        (r"model\.safetensors", None),
        (r"model-[\w-]+\.safetensors", "model.safetensors.index.json"),
        (r"consolidated\.safetensors", None),
        (r"consolidated-[\w-]+\.safetensors", "consolidated.safetensors.index.json"),
        (r"consolidated\.\d+\.pth", None),
        (r"pytorch_model\.bin", None),
        (r"pytorch_model-[\w-]+\.bin", "pytorch_model.bin.index.json"),
    )
)


@dataclass(frozen=True)
class Local:
    """A model's folder on this machine; `origin` is {} or the `repository` and the `revision`, a commit."""

    folder: Path
    origin: dict[str, str]


@dataclass(frozen=True)
class Fact:
    """What is known of a file beforehand: its bytes, and the hex digest under which a cache keeps it."""

    size: int | None
    digest: str | None


@dataclass(frozen=True)
class Copy:
    """One commit of a repository in the Hub's cache; `store` holds all commits."""

    name: str
    commit: str
    store: Path

    @property
    def folder(self) -> Path:
        return self.store / "snapshots" / self.commit

    @property
    def notes(self) -> Path:
        return default_cache().parent / "hub" / self.store.name


def local(model: str | Path, revision: str | None = None) -> Local:
    """The folder of a model: one that is there, or a copy of `org/name` or `org/name@revision` from the Hub.

    A folder comes first where a name could be both. A revision is a branch, a tag or a commit, `main` if
    none is named. Raises ValueError in one line if there is neither folder nor repository, nothing that
    may be read, no weights, no way to the Hub and no copy in the cache, or a file is not what the Hub
    told; OSError if the disk has no room.
    """
    path = Path(model)
    if path.is_dir():
        if revision:
            raise ValueError(f"{path}: a folder has no revisions; leave out {revision!r}")
        return Local(path, {})
    if path.exists():
        raise ValueError(f"{path}: a file, not a model folder; name the folder that it is in")
    copy = _fetched(*_asked(str(model), revision))
    return Local(copy.folder, {"repository": copy.name, "revision": copy.commit})


def _asked(model: str, revision: str | None) -> tuple[str, str]:
    """The repository and the revision in a model's name, by the Hub's rules."""
    name, at, given = model.partition("@")
    if not NAME.fullmatch(name) or len(name) > 96 or re.search(r"\.\.|--|\.git$", name):
        raise ValueError(
            f"{model}: no such folder; name a model folder, or one on the Hugging Face Hub: org/name[@revision]"
        )
    if at and revision and given != revision:
        raise ValueError(f"{model}: revision {revision!r} is asked for, too; name one")
    wanted = given if at else revision or "main"
    if not REVISION.fullmatch(wanted) or ".." in wanted:
        raise ValueError(f"{name}: {wanted!r} cannot be a revision; name a branch, a tag or a commit")
    return name, wanted


def _fetched(name: str, revision: str) -> Copy:
    """The copy of a revision, whole and checked."""
    hub = _hub()
    store = Path(hub.constants.HF_HUB_CACHE).expanduser() / f"models--{name.replace('/', '--')}"
    if COMMIT.fullmatch(revision):  # it never changes, so there is nothing to ask
        copy = Copy(name, revision, store)
        if (files := _told(copy)) and not _missing(copy, files):
            return _checked(copy, files)
    info = _answer(hub, name, revision)
    if isinstance(info, str):
        return _kept(name, revision, store, info)
    return _updated(hub, Copy(name, _commit(info, name), store), _wanted(_facts(info), name), revision)


def _answer(hub: Any, name: str, revision: str) -> Any:
    """What the Hub tells of a revision, or why it could not be asked. Raises ValueError if it refuses."""
    try:
        return hub.HfApi().model_info(name, revision=revision, files_metadata=True, timeout=SECONDS)
    except Exception as error:  # httpx, JSON, ...: what a foreign library raises is not ours to list
        if told := _refusal(error, name, revision, hub):
            raise ValueError(told) from None
        return _first_line(error)


def _hub() -> Any:
    """The downloader, told before it is imported to ask for the model only and to say nothing of what calls it."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    try:
        for part in ("constants", "errors", "utils"):
            import_module(f"huggingface_hub.{part}")
        return import_module("huggingface_hub")
    except ImportError as error:
        raise ValueError(
            f"a model of the Hub needs huggingface_hub ({_first_line(error)}); "
            "install it with: pip install huggingface-hub"
        ) from None


def _commit(info: Any, name: str) -> str:
    """The commit that the Hub named. It becomes part of a path, so it is not taken on trust."""
    if not COMMIT.fullmatch(str(info.sha)):
        raise ValueError(f"{name}: the Hub names no commit but {str(info.sha)!r:.60}; check HF_ENDPOINT")
    return str(info.sha)


def _facts(info: Any) -> dict[str, Fact]:
    """What the Hub tells of each file."""
    return {
        s.rfilename: Fact(s.size, s.lfs.sha256 if s.lfs is not None else s.blob_id) for s in info.siblings or ()
    }


def _wanted(files: Mapping[str, Fact], name: str) -> dict[str, Fact]:
    """Those that a reader uses, with the weights in one form. Raises ValueError without weights."""
    for weights, index in FORMS:
        if any(map(weights.fullmatch, files)):
            return {n: f for n, f in files.items() if BESIDE.fullmatch(n) or weights.fullmatch(n) or n == index}
    raise ValueError(
        f"{name}: no weights that are read here (model*.safetensors, consolidated*.safetensors, "
        f"consolidated.*.pth or pytorch_model*.bin) among its {plural(len(files), 'file')}; name another model"
    )


def _updated(hub: Any, copy: Copy, files: dict[str, Fact], revision: str) -> Copy:
    """The copy after what it lacks has been downloaded."""
    if _told(copy) != files:  # noted before they come: a download that is cut short is then known to be one
        _note(copy, copy.commit, {name: asdict(fact) for name, fact in files.items()})
    if missing := _missing(copy, files):
        atomic.room_for(copy.store, sum(_ahead(copy, files[name]) for name in missing))
        try:
            with _bars(hub):
                hub.snapshot_download(copy.name, revision=copy.commit, allow_patterns=sorted(files))
        except Exception as error:
            told = _refusal(error, copy.name, revision, hub)
            raise ValueError(told or f"{copy.name}: not downloaded: {_first_line(error)}; try again") from None
        if missing := _missing(copy, files):
            raise ValueError(f"{copy.name}: {missing[0]} was not downloaded; try again")
    _checked(copy, files)
    _point(copy, revision)
    return copy


def _ahead(copy: Copy, fact: Fact) -> int:
    """Bytes that a file will still take on the disk."""
    blob = copy.store / "blobs" / (fact.digest or "none")
    if blob.exists():
        return 0
    begun = blob.with_name(f"{blob.name}.incomplete")
    return max(0, (fact.size or 0) - (begun.stat().st_size if begun.exists() else 0))


@contextmanager
def _bars(hub: Any) -> Iterator[None]:
    """The downloader's progress on a terminal, silence elsewhere, unless the user has said which."""
    if sys.stderr.isatty() or hub.constants.HF_HUB_DISABLE_PROGRESS_BARS is not None:
        yield
        return
    hub.utils.disable_progress_bars()
    try:
        yield
    finally:
        hub.utils.enable_progress_bars()


def _point(copy: Copy, revision: str) -> None:
    """Note in the Hub's cache which commit a branch is at, for the day without a network."""
    ref = copy.store / "refs" / revision
    if not COMMIT.fullmatch(revision):
        with suppress(OSError):  # a cache that is only read serves as well
            ref.parent.mkdir(parents=True, exist_ok=True)
            if not ref.is_file() or ref.read_text() != copy.commit:
                atomic.write_file(ref, copy.commit.encode())


def _kept(name: str, revision: str, store: Path, reason: str) -> Copy:
    """The copy in the cache, when the Hub cannot be asked. Raises ValueError if it is not there, or not whole."""
    ref = store / "refs" / revision
    commit = revision if COMMIT.fullmatch(revision) else ref.read_text().strip() if ref.is_file() else ""
    copy = Copy(name, commit, store)
    if not COMMIT.fullmatch(commit) or not copy.folder.is_dir():
        raise ValueError(
            f"{name}: no such folder, {revision!r} is not in {store.parent}, and the Hub cannot be reached "
            f"({reason}); try again with a network, or name a folder"
        )
    files = _told(copy) or _wanted({f.name: Fact(None, _blob(f)) for f in copy.folder.iterdir()}, name)
    if missing := _missing(copy, files | dict.fromkeys(_indexed(copy, files), Fact(None, None))):
        raise ValueError(
            f"{copy.folder}: {missing[0]} is missing and the Hub cannot be reached ({reason}); "
            "try again with a network"
        )
    return _checked(copy, files)


def _blob(path: Path) -> str | None:
    """The digest that a link of the cache leads to: the name of the blob, which may itself be a link."""
    name = Path(os.readlink(path)).name if path.is_symlink() else ""
    return name if re.fullmatch("[0-9a-f]{40}|[0-9a-f]{64}", name) else None


def _indexed(copy: Copy, files: Iterable[str]) -> set[str]:
    """The files that an index of weights names."""
    found: set[str] = set()
    for name in files:
        if name.endswith(".index.json"):
            with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):  # who reads it will say so
                found |= set(json.loads((copy.folder / name).read_bytes())["weight_map"].values())
    return found


def _missing(copy: Copy, files: Iterable[str]) -> list[str]:
    return [name for name in files if not (copy.folder / name).is_file()]


def _checked(copy: Copy, files: Mapping[str, Fact]) -> Copy:
    """The copy, after each file was found to be right, now or earlier. Raises ValueError that names the file."""
    seen = Seen(copy.notes / f"{RIGHT}.json")
    for path, fact in ((copy.folder / name, fact) for name, fact in files.items()):
        if wrong := seen.wrong(path, fact.digest, partial(_wrong, path, fact)):
            raise ValueError(
                f"{path}: not the file that the Hub holds ({wrong}); delete {path.resolve()} and try again"
            )
    seen.keep()
    return copy


def _wrong(path: Path, fact: Fact) -> str | None:
    """How a file differs from what is expected of it, in words."""
    size = path.stat().st_size
    if fact.size is not None and size != fact.size:
        return f"{plural(size, 'byte')} instead of {fact.size}"
    if fact.digest is None:
        return None
    if len(fact.digest) == 64:
        return None if atomic.digest(path) == fact.digest else f"its SHA-256 is not {fact.digest}"
    return None if _git_digest(path) == fact.digest else f"its git hash is not {fact.digest}"


def _git_digest(path: Path) -> str:
    """The name that git gives to these bytes, in hex."""
    data = path.read_bytes()
    return sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


def _told(copy: Copy) -> dict[str, Fact]:
    """What the Hub told of the wanted files of this commit; empty if it was never asked."""
    try:
        return {name: Fact(f["size"], f["digest"]) for name, f in _noted(copy, copy.commit).items()}
    except (KeyError, TypeError):
        return {}


def _noted(copy: Copy, name: str) -> dict[str, Any]:
    """What is noted under a name; empty if that cannot be read."""
    try:
        found = json.loads((copy.notes / f"{name}.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _note(copy: Copy, name: str, content: Mapping[str, Any]) -> None:
    """Note it. Where that cannot be, nothing is lost but the time to hash again."""
    with suppress(OSError):
        copy.notes.mkdir(parents=True, exist_ok=True)
        atomic.write_file(copy.notes / f"{name}.json", json.dumps(content, indent=1).encode())


def _refusal(error: Exception, name: str, revision: str, hub: Any) -> str | None:
    """What the Hub answered, in one line that says what to do; None if it did not answer, or not now."""
    errors, page = hub.errors, f"{hub.constants.ENDPOINT}/{name}"
    for cause in _causes(error):
        status = getattr(getattr(cause, "response", None), "status_code", 0)
        if isinstance(cause, errors.GatedRepoError):
            return f"{name}: its owner asks for consent; give it at {page}, then {SIGN_IN}"
        if isinstance(cause, errors.RevisionNotFoundError):
            return f"{name}: has no revision {revision!r}; its branches, tags and commits are at {page}/commits"
        if isinstance(cause, errors.RepositoryNotFoundError):
            return f"{name}: neither a folder nor a public model of the Hub; check the name, or {SIGN_IN}"
        if status in (401, 403):
            return f"{name}: the Hub does not let it be read ({status}); {SIGN_IN}"
        if status == 404:
            return f"{name}: the Hub has no such file: {_first_line(cause)}; try again, or check HF_ENDPOINT"
    return None


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def _first_line(error: BaseException) -> str:
    """What went wrong at the bottom of it, in one short line."""
    *_, last = _causes(error)
    lines = [line.strip() for line in str(last).splitlines() if line.strip()]
    return f"{lines[0] if lines else type(last).__name__}"[:300].rstrip(".")
