"""Write a model to a new folder and verify it; convert folders of any format to Hugging Face's format."""

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import torch

from dunes.checkpoint import folder
from dunes.checkpoint.architecture import Architecture
from dunes.checkpoint.model_folder import CARD, READY, UNFINISHED, finish_save
from dunes.checkpoint.source import Source, open_source
from dunes.checkpoint.verify import Verification, verify
from dunes.checkpoint.weights.lazy_tensor import cast, hf_weights
from dunes.files import json_file
from dunes.files.atomic import folder_lock
from dunes.files.model_file import read_file
from dunes.models import FAMILIES, refusal, written_names
from dunes.models.names import fields
from dunes.progress import phase
from dunes.text import Tokenizer
from dunes.text.tokenizer import MAX_BYTES, original_files

FOREIGN = ("auto_map", "quantization_config", "transformers_version", "_name_or_path", "torch_dtype", "dtype")
"""Keys of a config.json that are not copied, since they refer to code or get new values."""
WRITTEN = 0.3
"""Progress, from 0 to 1, after writing the result and before comparing it with the source."""
T = TypeVar("T")
Edit: TypeAlias = tuple[Callable[..., None], Callable[[Path], tuple[T, Mapping[str, Any]]]]
"""Two functions for an edited model. The first, `save` or `write_model` with bound arguments, writes the model if
called with `folder` and `check`. The second compares the temporary folder with the model, and returns a report and
entries for the card."""


def rewrite(
    source: Path, out: Path, edit: Callable[[], Edit[T]], writing: AbstractContextManager[Any] | None = None
) -> T:
    """Edit the model in `source`, write it to the new folder `out`, compare both, and return the report.

    The result is written in the context `writing` into a temporary folder, read back and compared, and then
    renamed into place. Raises ValueError, before any work, if `out` exists or another process writes to it.
    """
    require_new_folder(source, out)
    reports: list[T] = []
    with exclusive_folder(out):
        require_new_folder(source, out)  # another process may have written it before the lock
        write, compare = edit()

        def check(staged: Path) -> Mapping[str, Any]:
            report, entries = compare(staged)
            reports.append(report)
            return entries

        with writing or nullcontext():
            write(folder=out, check=check)
    return reports[0]


def convert(
    source: Source, out: Path, *, dtype: torch.dtype | None = None, facts: Mapping[str, Any] | None = None
) -> Verification:
    """Write the source's model as a new Hugging Face folder.

    Tensors are written one at a time into a temporary folder, which is read back and verified before it is renamed
    into place. `facts` about the source go into the card. Raises ValueError, before anything is written, if the
    source is incomplete or `out` exists, and afterwards if the logits of source and result differ.
    """
    edit = partial(_converted, source, dtype, facts or {})
    return rewrite(source.folder, out, edit, phase("writing", 0.0, WRITTEN))


def _converted(source: Source, dtype: torch.dtype | None, facts: Mapping[str, Any]) -> Edit[Verification]:
    """The `Edit` for `rewrite`: the source's model with Hugging Face's names, cast to `dtype` if it is given."""
    weights, model = source.weights() if dtype is None else cast(source.weights(), dtype), source.architecture
    if source.own is None and refusal(model.family, model.config):
        model = folder.require_described(source.outline(), source.context_length, source.folder)
    tokenizer = Tokenizer.load_if_present(source.folder)
    rounded = dtype if any(w.dtype != dtype for w in source.files.values()) else None
    card = {"family": model.family, "context_length": source.config.context_length, "changes": []}
    card |= {k: v for k, v in source.card.items() if k not in ("files", "format", "dunes", "family")}
    converted = {"format": source.format, "notes": list(source.assumed), **facts}
    earlier = {"before": card["converted"]} if "converted" in card else {}

    def compare(staged: Path) -> tuple[Verification, Mapping[str, Any]]:
        for path in original_files(source.folder):  # tokenizers of other libraries
            (staged / path.name).write_bytes(read_file(path, MAX_BYTES))
        with phase("comparing", WRITTEN, 1.0):
            verified = verify(source, open_source(staged), rounded)
        return verified, {"converted": converted | {"verified": verified.card()} | earlier}

    write = partial(
        folder.write_model,
        weights=hf_weights(written_names(model.family, model.config), weights),
        config=folder.special_ids(tokenizer) | _hf_config(source, model, dtype),
        card=card,
        tokenizer=(tokenizer, source.config.context_length),
    )
    return write, compare


@contextmanager
def exclusive_folder(out: Path) -> Iterator[None]:
    """Create the folder and lock it in the context; if the body raises, folders created here are removed.

    Raises ValueError if another process has the lock.
    """
    created = [p for p in (out, *out.parents) if not p.exists()]
    out.mkdir(parents=True, exist_ok=True)
    try:
        with folder_lock(out, wait=False), ExitStack() as stack:
            shutil.rmtree(out / UNFINISHED, ignore_errors=True)  # left by a change that was killed
            stack.callback(shutil.rmtree, out / UNFINISHED, ignore_errors=True)
            yield
    except BlockingIOError:
        raise ValueError(f"{out}: another process is writing there; wait for it or choose another name") from None
    except BaseException:
        for path in created:
            with suppress(OSError):
                path.rmdir()
        raise


def require_new_folder(source: Path, out: Path) -> None:
    """Raise ValueError unless `out` is a new or empty folder, and neither it nor the source contains the other."""
    a, b = source.resolve(), out.resolve()
    if a == b or a in b.parents or b in a.parents:
        raise ValueError(f"{out}: source and result must not contain each other; choose another folder")
    existing = next(p for p in (out, *out.absolute().parents) if p.exists() or p.is_symlink())
    if not existing.is_dir():
        raise ValueError(f"{existing}: exists and is not a folder; choose another name")
    ready = out / READY
    if links := [path for path in (ready, out / UNFINISHED) if path.is_symlink()]:
        raise ValueError(f"{links[0]}: a link, not a folder of ours; remove it, or choose another folder")
    if ready.is_dir():
        with folder_lock(out):  # another process may be renaming the files
            # A complete save: remove it if no file was renamed into place yet, else finish it.
            shutil.rmtree(ready) if _empty(out) and (ready / CARD).is_file() else finish_save(out)
    if out.exists() and (ready.exists() or not _empty(out)):
        raise ValueError(f"{out}: exists already; choose another name, or remove it")


def _empty(path: Path) -> bool:
    """True if the folder is empty except for hidden files, which an interrupted conversion leaves."""
    return all(p.name.startswith(".") for p in path.iterdir())


def _hf_config(source: Source, model: Architecture, dtype: torch.dtype | None) -> dict[str, Any]:
    """The content of the config.json to write: the family's keys, and further keys of the source."""
    dtypes = [w.dtype for w in source.files.values()]
    name = str(dtype or max(set(dtypes), key=dtypes.count)).removeprefix("torch.")
    others = {k: v for k, v in source.hf_config.items() if k not in FOREIGN}
    known: dict[str, Any] = FAMILIES[model.family].to_hf(model.config)
    return others | known | {"dtype": name, "torch_dtype": name}


def read_name_table(path: Path) -> dict[str, str]:
    """Read a JSON object that maps other tensor names to Hugging Face's names, both with `{i}` for an index."""
    content = json_file.read(path.resolve())  # links are followed, as the user names the path
    if wrong := [k for k, v in content.items() if not isinstance(v, str)]:
        raise ValueError(f"{path}: the value of {wrong[0]!r} must be a name in quotes")
    if wrong := [k for k, v in content.items() if fields(v) - fields(k)]:
        raise ValueError(f"{path}: {content[wrong[0]]!r} has fields in braces that {wrong[0]!r} has not")
    return content
