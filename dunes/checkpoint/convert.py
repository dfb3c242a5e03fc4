"""A model from one folder to another: another form, other names, another dtype; streamed, whole and verified."""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from dunes.checkpoint import folder, safetensors_writer
from dunes.checkpoint.lazy_tensor import cast, renamed, track_reads
from dunes.checkpoint.source import CONFIG, Source, open_source
from dunes.checkpoint.verify import Verification, verify
from dunes.models import FAMILIES
from dunes.models.names import fields, to_theirs
from dunes.staging import folder_lock
from dunes.text import Tokenizer, json_file

FOREIGN = ("auto_map", "quantization_config", "transformers_version", "_name_or_path", "torch_dtype", "dtype")
"""Keys of a config.json that are not carried over: they speak of code, or of what we write anew."""


Show = Callable[[str, float], None]


def convert(
    source: Source,
    out: Path,
    *,
    dtype: torch.dtype | None = None,
    facts: Mapping[str, Any] | None = None,
    show: Show = lambda what, share: None,
) -> Verification:
    """Write the source's model as a new folder, in Hugging Face's form.

    Tensor by tensor, so that no more than one of them has to be in memory; under another name until all
    is written, read again and found equal. `facts` about the source go into the card, `show` is told what
    is going on and which share is done. Raises ValueError before anything is written for a source that is
    not whole or an `out` that is there, and after it if the result is another model.
    """
    require_new_folder(source.folder, out)
    weights = source.weights() if dtype is None else cast(source.weights(), dtype)
    tokenizer = _tokenizer(source)
    said = _json_files(source, dtype, tokenizer)
    moves, unknown = to_theirs(FAMILIES[source.family].NAMES, weights)
    assert not unknown, "a family has a name for each of its weights"
    theirs = renamed(moves, weights)
    size, before = (sum(w.nbytes for w in part.values()) for part in (theirs, source.files))
    rounded = dtype if any(w.dtype != dtype for w in source.files.values()) else None
    tick = _ticking(2 * size + before + (size if rounded else 0), show)
    verified: list[Verification] = []

    def fill(staged: Path) -> None:
        safetensors_writer.write_tensors(staged, track_reads(theirs, partial(tick, "writing")))
        for name, content in said.items():
            (staged / name).write_text(json.dumps(content, indent=2) + "\n")
        _copied(source.folder, staged)
        if tokenizer is not None:
            tokenizer.save(staged)
        verified.append(verify(source, open_source(staged), rounded, partial(tick, "comparing")))
        folder.write_card(staged, _card(source, verified[0], facts or {}))

    with exclusive_folder(out):
        folder.write_files(out, fill, size)
    return verified[0]


@contextmanager
def exclusive_folder(out: Path) -> Iterator[None]:
    """The folder exists, and no other process writes into it; one that was made for nothing is removed.

    Raises ValueError if another one does.
    """
    made = [p for p in (out, *out.parents) if not p.exists()]
    out.mkdir(parents=True, exist_ok=True)
    try:
        with folder_lock(out, wait=False):
            yield
    except BlockingIOError:
        raise ValueError(f"{out}: another process is writing there; wait for it or choose another name") from None
    except BaseException:
        for path in made:
            with suppress(OSError):
                path.rmdir()
        raise


def _ticking(total: int, show: Show) -> Callable[[str, int], None]:
    done = 0

    def tick(what: str, size: int) -> None:
        nonlocal done
        done += size
        show(what, done / total)

    return tick


def require_new_folder(source: Path, out: Path) -> None:
    """Raise ValueError unless `out` is a new or empty folder, apart from the source."""
    a, b = source.resolve(), out.resolve()
    if a == b or a in b.parents or b in a.parents:
        raise ValueError(f"{out}: source and result must not lie in each other; choose another folder")
    there = next(p for p in (out, *out.absolute().parents) if p.exists() or p.is_symlink())
    if not there.is_dir():
        raise ValueError(f"{there}: is there, and not a folder; choose another name")
    if (ready := out / folder.READY).is_dir():
        # Written whole, but not moved yet: all of it is there still, or the rest is moved now.
        shutil.rmtree(ready) if _empty(out) else folder.finish_save(out)
    if out.exists() and not _empty(out):
        raise ValueError(f"{out}: is there already; choose another name, or remove it")


def _empty(path: Path) -> bool:
    """What a conversion that was cut short left begins with a dot."""
    return all(p.name.startswith(".") for p in path.iterdir())


def _words(source: Source, dtype: torch.dtype | None) -> dict[str, Any]:
    """The config.json to write: what the source's says beside the model, and the model as we read it."""
    kinds = [w.dtype for w in source.files.values()]
    kind = str(dtype or max(set(kinds), key=kinds.count)).removeprefix("torch.")
    kept = {k: v for k, v in source.hf_config.items() if k not in FOREIGN}
    said: dict[str, Any] = FAMILIES[source.family].to_hf(source.config)
    return kept | said | {"dtype": kind, "torch_dtype": kind}


def _json_files(
    source: Source, dtype: torch.dtype | None, tokenizer: Tokenizer | None
) -> dict[str, dict[str, Any]]:
    """The JSON files of the result by name."""
    words = _words(source, dtype)
    if tokenizer is None:
        return {CONFIG: words}
    ids = {k: v for k, v in folder.special_ids(tokenizer).items() if v is not None}
    return {CONFIG: ids | words, **folder.tokenizer_configs(tokenizer, source.config.context_length)}


def _tokenizer(source: Source) -> Tokenizer | None:
    """The source's tokenizer; weights may come without one. Raises ValueError for one that does not open."""
    there = any((source.folder / name).exists() for name in ("tokenizer.json", "tekken.json"))
    return Tokenizer.load(source.folder) if there or [*source.folder.glob("tokenizer.model*")] else None


def _copied(source: Path, staged: Path) -> None:
    """The tokenizer in the form that it came in, beside the one that we write."""
    for path in (*source.glob("tokenizer.model*"), source / "tekken.json"):
        if path.is_file():
            shutil.copyfile(path, staged / path.name)


def _card(source: Source, verified: Verification, facts: Mapping[str, Any]) -> dict[str, Any]:
    """What the result's card says: all that the source's own did, and how the result came to be."""
    card = {k: v for k, v in source.card.items() if k not in ("files", "format", "dunes")}
    made = {"form": source.form, "notes": list(source.notes), **facts, "verified": verified.card()}
    before = {"before": card["converted"]} if "converted" in card else {}
    known = {"family": source.family, "context": source.config.context_length, "changes": []}
    return known | card | {"converted": made | before}


def read_name_table(path: Path) -> dict[str, str]:
    """A table of foreign names: a JSON object, their name to Hugging Face's, both with `{i}` for a number."""
    content = json_file.read(path)
    if wrong := [k for k, v in content.items() if not isinstance(v, str)]:
        raise ValueError(f"{path}: {wrong[0]!r} must stand for a name in quotes")
    if wrong := [k for k, v in content.items() if fields(v) - fields(k)]:
        raise ValueError(f"{path}: {content[wrong[0]]!r} has other letters in braces than {wrong[0]!r}")
    return content
