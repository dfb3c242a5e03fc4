"""Change the model in a folder, write the result to another folder, verify it, and report the effect."""

import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from dunes import checkpoint
from dunes.augment import CHANGES, Change, apply_change, undo_change
from dunes.augment.changes import Spill, Tensors
from dunes.augment.options import CALIBRATED, RTN
from dunes.augment.quantization import BY_GROUP, check_kinds
from dunes.checkpoint.architecture import hf_config_of
from dunes.checkpoint.base_digests import DTYPES, READ, changed_part, weights_identity
from dunes.checkpoint.card import UNFINISHED, read_card
from dunes.checkpoint.open import LoadedModel, base_folder, is_adapter, readable_folder
from dunes.checkpoint.trained_text import trained_text
from dunes.checkpoint.verify import check_written, distance, model_logits
from dunes.checkpoint.weights import safetensors_file
from dunes.checkpoint.weights.lazy_tensor import in_memory
from dunes.checkpoint.weights.safetensors_file import write_file
from dunes.checkpoint.write import Edit, inherited, rewrite
from dunes.data import TokenIds
from dunes.evaluate.comparison import Comparison, compare_folders
from dunes.evaluate.text_loss import calibration_ids, evaluation_tokens, missing_source, require_separate
from dunes.progress import phase, report, shown_by
from dunes.runs.picture import comparison_picture
from dunes.units import format_bytes, plural

CHANGING, WRITING, COMPARING, MEASURING = (0.15, 0.55), 0.6, 0.8, 0.85
"""Progress (0 to 1) at the start and end of the change, and at the start of each later phase."""
LEARNED = ("trained", "finetuned", "measured", "timings")
"""Card entries on training and measurements of the changed model; `undo_folder` removes them."""


def augment_folder(
    folder: Path,
    out: Path,
    name: str,
    *,
    calibration: Sequence[str] | None = None,
    validation: Sequence[str] | None = None,
    **request: Any,
) -> list[str]:
    """Apply the change `name` to the model in a folder, and write the result to `out`; returns lines of a report.

    `request` contains the options of the change. `calibration` lists sources of calibration text (None: no text;
    empty: the model's training text). `validation` lists sources of text on which the models before and after the
    change are compared by loss, size, memory and speed (None: no comparison; empty: the validation text recorded
    in the card). The written model is loaded again and compared with the model in memory. Raises ValueError if
    `out` exists or an option is invalid. Raises ValueError and writes nothing if the comparison fails, or if files
    in `folder` change during the call.

    To save memory, a change that proceeds block by block stores its finished blocks in `out` until the change is
    complete. If the process is killed, the next call starts from the beginning.
    """
    folder = readable_folder(folder)
    edit = partial(_changed, folder, out, name, calibration, validation, request)
    # With calibration text, the change itself takes nearly all of the time.
    scale = partial(np.interp, xp=(0.0, *CHANGING, 1.0), fp=(0.0, 0.03, 0.9, 1.0))
    with nullcontext() if calibration is None else shown_by(scale=scale):
        lines = rewrite(folder, out, edit, phase("writing", WRITING, COMPARING))
        report("written", 1.0)
    return lines


def _spill_into(folder: Path) -> Spill:
    """Build a function that writes tensors to a new file in the folder and returns them memory-mapped."""
    numbers = count()

    def spill(tensors: Tensors) -> Tensors:
        folder.mkdir(exist_ok=True)
        file = folder / f"{next(numbers)}.safetensors"
        write_file(file, in_memory(tensors))
        return {name: tensor.read() for name, tensor in safetensors_file.tensors(file).items()}

    return spill


def _source_stamp(source: Path) -> dict[str, tuple[int, ...]]:
    """Size, times and inode of a model's files, by path; for an adapter, the base's files are included."""
    folders = [source, base_folder(source)] if source.is_dir() and is_adapter(source) else [source]
    files = [f for folder in folders for f in (sorted(folder.iterdir()) if folder.is_dir() else [folder])]
    stamps = {str(f.absolute()): f.stat() for f in files if f.suffix in READ and f.is_file()}
    return {path: (stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino) for path, stat in stamps.items()}


def _changed(
    folder: Path,
    out: Path,
    name: str,
    calibration: Sequence[str] | None,
    validation: Sequence[str] | None,
    request: dict[str, Any],
) -> Edit[list[str]]:
    """Load and change the model in a folder; returns a function to save it and a function to check the files.

    A change that proceeds block by block stores its finished blocks in a folder in `out`.
    """
    stamp = _source_stamp(folder)
    with phase("reading", 0.0, 0.05):
        loaded = checkpoint.load(folder)
        ids = None if validation is None else _scored(loaded, validation)
        compare = None if validation is None else partial(compare_folders, folder, ids=ids)
        if calibration is not None:
            tokens = getattr(CHANGES[name], "calibration_tokens", lambda model: None)(loaded.model)
            if compare:
                require_separate(loaded, calibration, validation or ())
            request["ids"] = calibration_ids(loaded, calibration, tokens)
    with phase("measuring", 0.05, 0.1):
        size, before = size_of(loaded), model_logits(loaded.model, loaded.context_length)
        if not before.isfinite().all():
            raise ValueError(f"{folder}: its logits are not finite; dunes inspect --values lists such weights")
    with phase("hashing", 0.1, 0.15):
        identity = weights_identity(loaded.model) if getattr(CHANGES[name], "RESTORES", False) else {}
    with phase(name, *CHANGING):
        change = apply_change(loaded.model, name, spill=_spill_into(out / UNFINISHED), **request)
        for path, file_stamp in _source_stamp(folder).items():  # removed files are allowed
            if stamp.get(path, file_stamp) != file_stamp:
                raise ValueError(f"{path}: changed while it was being read; try again when nothing writes to it")
    with phase("measuring", CHANGING[1], WRITING):
        after = model_logits(loaded.model, loaded.context_length)
    agreement = float((before.argmax(-1) == after.argmax(-1)).float().mean())
    effect = {"logits_moved": distance(before, after), "top1_agree": agreement}
    facts = {"change": name, **effect} | ({} if calibration is None else {"calibration": [*calibration]})

    def check(staged: Path) -> tuple[list[str], Mapping[str, Any]]:
        entries = _check(staged, out, loaded, after, facts)
        # With validation text, the comparison reports the top-1 agreement.
        agreed = "" if ids is not None else f"top-1 tokens agree at {agreement:.0%} of positions; "
        lines = [
            *([CHANGES[name].describe(change)] if hasattr(CHANGES[name], "describe") else []),
            f"{name} at {plural(len(change.places), 'place')}: {format_bytes(size)} of tensors to "
            f"{format_bytes(size_of(loaded))}",
            f"logits moved by {effect['logits_moved']:.1e} (relative norm); {agreed}the written folder is equal",
            f"written as {describe_form(loaded)}",
        ]
        if compare is None:
            return lines, entries
        with phase("measuring before and after", MEASURING, 1.0):
            compared: Comparison | str = compare(staged)
        if isinstance(compared, str):
            return [*lines, compared], entries
        comparison_picture(compared, staged / "comparison.png")
        return [*compared.warnings(), *lines, *compared.lines()], entries | {"comparison": asdict(compared)}

    return partial(save_changed, loaded, (replace(change, before=identity),)), check


def _scored(loaded: LoadedModel, sources: Sequence[str]) -> TokenIds | None:
    """The token ids on which the report scores the model.

    Returns None if the model has no tokenizer. Without `sources`, also returns None if the card's validation text
    is not available.
    """
    if loaded.tokenizer is None or not (sources or trained_text(loaded.card).get("split")):
        return None
    try:
        return evaluation_tokens(loaded, sources)[0]
    except ValueError as error:
        if sources:
            raise
        if not missing_source(loaded.card):  # if text is missing, the report asks for it
            warnings.warn(f"not scored: {error}", stacklevel=2)
        return None


def quantize_folder(
    folder: Path,
    out: Path,
    *,
    kind: str = "nf4",
    method: str | None = None,
    calibration: Sequence[str] = (),
    validation: Sequence[str] | None = None,
    **request: Any,
) -> list[str]:
    """Quantize the model in a folder, by default to nf4; arguments and result are as in `augment_folder`.

    For int4 and int3, the default method is gptq if there is calibration text: the `calibration` sources, or the
    model's training text. Otherwise, the default method is rtn. Raises ValueError in the same cases as
    `augment_folder`, and if `calibration` is given with a method that reads no text.
    """
    card = read_card(readable_folder(folder))
    missing = missing_source(card)
    text = bool(calibration) or (bool(trained_text(card)) and not missing)
    chosen = method or (CALIBRATED[0] if kind in BY_GROUP and text else RTN)
    check_kinds(kind, request.get("override", ()), chosen)
    if calibration and chosen not in CALIBRATED:
        raise ValueError(f"--kind {kind} --method {chosen} reads no calibration text; omit --calibration")
    sources = calibration if chosen in CALIBRATED else None
    request |= {"kind": kind, "method": chosen}
    lines = augment_folder(folder, out, "quantize", calibration=sources, validation=validation, **request)
    if method is None and chosen in CALIBRATED:
        source = "the calibration text" if calibration else "the text that the model was trained on"
        return [*lines, f"method {chosen}, which reads {source}; --method rtn needs no text"]
    if method is None and kind in BY_GROUP and missing:
        reason = f"the text of the model's training is gone ({missing}); --calibration FILE uses {CALIBRATED[0]}"
        lines.append(f"method {chosen}: {reason}")
    return lines


def undo_folder(folder: Path, out: Path, name: str) -> str:
    """Undo the last change of the model in a folder, and write the original model to `out`.

    Returns a line that reports the result. Raises ValueError and writes nothing if the last change is not named
    `name`, or if the result is not equal bit for bit to the original model.
    """
    folder = readable_folder(folder)
    line = rewrite(folder, out, partial(_restored, folder, out, name), phase("writing", WRITING, COMPARING))
    report("written", 1.0)
    return line


def _restored(folder: Path, out: Path, name: str) -> Edit[str]:
    """Undo the last change of a model; returns a function to save it and a function to check the files."""
    with phase("reading", 0.0, 0.1):
        loaded = checkpoint.load(folder)
    recorded = records(loaded)
    if (names := [str(record.get("name")) for record in recorded])[-1:] != [name]:
        reason = f"{names[-1]} came later and depends on it" if name in names else "it was never made"
        raise ValueError(f"{folder}: cannot undo {name}: {reason}; its changes: {', '.join(names) or 'none'}")
    change, earlier = Change.of(recorded[-1]), loaded.architecture.changes[:-1]
    with phase(f"undoing {name}", 0.1, 0.2):
        undo_change(loaded.model, change)
    # Training saves weights as float32; the digests are of weights in the original dtype.
    loaded.model.to({str(dtype): dtype for dtype in DTYPES.values()}.get(change.before.get("kind", "")))
    with phase("comparing with the digests", 0.2, 0.5):
        part = changed_part(loaded.model, change.before)
    if part is not None:
        raise ValueError(
            f"{folder}: cannot undo {name}: {part} was trained or rounded after the change, which loses the "
            "original; train with --trainable new to keep it"
        )
    card = {k: v for k, v in loaded.card.items() if k not in LEARNED} | {"history": recorded[: -1 - len(earlier)]}
    loaded = replace(loaded, card=card, architecture=replace(loaded.architecture, changes=earlier))
    with phase("measuring", 0.5, WRITING):
        after = model_logits(loaded.model, loaded.context_length)
    line = (
        f"{name} undone at {plural(len(change.places), 'place')}: {format_bytes(size_of(loaded))} of tensors with "
        "the original SHA-256; the written folder is equal"
    )
    check = lambda staged: (line, _check(staged, out, loaded, after, {"undone": name}))
    return partial(save_changed, loaded, ()), check


def _check(
    staged: Path, out: Path, loaded: LoadedModel, expected: Tensor, facts: Mapping[str, Any]
) -> dict[str, Any]:
    """Compare the logits of a written model with `expected`; returns entries for its card.

    Raises ValueError if the logits differ.
    """
    with phase("comparing", COMPARING, MEASURING):
        difference = check_written(staged, out, expected, loaded.context_length, "the model in memory")
    return {"augmented": {**facts, "verified": difference}}


def records(loaded: LoadedModel) -> list[Any]:
    """Records of all changes made to a model, in order."""
    return [*history(loaded), *(change.record() for change in loaded.architecture.changes)]


def resolve_new(globs: Sequence[str], loaded: LoadedModel) -> tuple[str, ...]:
    """Replace the glob `new` by the names of the parameters that the model's last change added.

    Raises ValueError for `new` if the last change added no parameters.
    """
    new = Change.of(recorded[-1]).new if "new" in globs and (recorded := records(loaded)) else ()
    if "new" in globs and not new:
        raise ValueError("new: the model's last change added no parameters; pass globs, or train all")
    return tuple(g for each in globs for g in (new if each == "new" else (each,)))


def describe_form(loaded: LoadedModel) -> str:
    """Describe the format in which the model is saved, with the reason if it is not plain Hugging Face."""
    described = hf_config_of(loaded.model, loaded.context_length)
    if isinstance(described, str):
        return f"a form of its own, which only dunes opens, since no family describes it: {described[:200]}"
    return f"a plain Hugging Face folder: {described.family}"


def save_changed(loaded: LoadedModel, changes: tuple[Change, ...], folder: Path, check: Any) -> None:
    """Save a loaded model after changes. The new card keeps those entries of the old card that are also true of
    the changed model."""
    facts = inherited(loaded.card) | {"changes": history(loaded)}
    architecture = replace(loaded.architecture, changes=(*loaded.architecture.changes, *changes))
    arguments = loaded.model, folder, loaded.tokenizer, loaded.context_length, facts, check
    checkpoint.save(*arguments, architecture=architecture)


def history(loaded: LoadedModel) -> list[Any]:
    """Records of the changes made before those in `loaded.architecture.changes`. For a plain model, these are all
    records in its card.
    """
    plain = [] if "adapter" in loaded.card else loaded.card.get("changes", [])
    earlier: list[Any] = loaded.card.get("history", plain)
    return earlier


def described_family(base: LoadedModel) -> str | None:
    """The base's model family; None if a function builds the base, or if the base was changed."""
    described = base.architecture
    return None if described.function is not None or described.changes else described.family


def size_of(loaded: LoadedModel) -> int:
    return sum(t.nbytes for t in loaded.model.state_dict().values())
