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
"""Progress from 0 to 1 at the start and end of the change, and at the start of each later phase."""
LEARNED = ("trained", "finetuned", "measured", "timings")
"""Keys that `undo_folder` removes from a card, since their entries describe the changed model."""


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

    `request` has options of the change. With `calibration`, the change also gets token ids of these sources; an
    empty sequence selects the model's training text. With `validation`, the report compares size, memory and speed
    before and after, and the loss on these sources; an empty sequence selects the validation text recorded in the
    card. The written model is loaded again and compared with the model in memory. Raises ValueError if `out`
    exists or an option is invalid. Raises ValueError and writes nothing if the comparison fails, or if files in
    `folder` change meanwhile.

    To save memory, a change that proceeds block by block stores its finished blocks in `out` until the end. If the
    process is killed, the next call starts from the beginning.
    """
    folder = readable_folder(folder)
    edit = partial(_changed, folder, out, name, calibration, validation, request)
    # A change with calibration takes nearly all of the time.
    scale = partial(np.interp, xp=(0.0, *CHANGING, 1.0), fp=(0.0, 0.03, 0.9, 1.0))
    with nullcontext() if calibration is None else shown_by(scale=scale):
        lines = rewrite(folder, out, edit, phase("writing", WRITING, COMPARING))
        report("written", 1.0)
    return lines


def _spill_into(folder: Path) -> Spill:
    """A function that writes tensors to a new file in the folder and returns memory-mapped tensors from it."""
    numbers = count()

    def spill(tensors: Tensors) -> Tensors:
        folder.mkdir(exist_ok=True)
        file = folder / f"{next(numbers)}.safetensors"
        write_file(file, in_memory(tensors))
        return {name: tensor.read() for name, tensor in safetensors_file.tensors(file).items()}

    return spill


def _source_stamp(source: Path) -> dict[str, tuple[int, ...]]:
    """Size, times and inode of each file of a model and, for an adapter, of its base, by path."""
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
    """Load and change the model in a folder; returns two functions: to save it, and to check the saved files.

    Finished blocks are stored in `out` until the end.
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
        # With validation text, the comparison already reports the agreement.
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
    """Token ids to score in the report.

    None if the model has no tokenizer, or if no sources are given and the card's validation text is not available.
    """
    if loaded.tokenizer is None or not (sources or trained_text(loaded.card).get("split")):
        return None
    try:
        return evaluation_tokens(loaded, sources)[0]
    except ValueError as error:
        if sources:
            raise
        if not missing_source(loaded.card):  # the report asks for missing text
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

    The default method is gptq if `kind` is int4 or int3 and calibration text is available (the `calibration`
    sources, or the model's training text); otherwise it is rtn. Raises ValueError in the same cases as
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
    """Undo the change `name`, which must be the last one of the folder's model; write the original model to `out`.

    Returns a line that reports the result. Raises ValueError and writes nothing if the last change has another
    name, or if the result is not equal bit for bit to the original model.
    """
    folder = readable_folder(folder)
    line = rewrite(folder, out, partial(_restored, folder, out, name), phase("writing", WRITING, COMPARING))
    report("written", 1.0)
    return line


def _restored(folder: Path, out: Path, name: str) -> Edit[str]:
    """Undo the last change of a model; returns two functions: to save it, and to check the saved files."""
    with phase("reading", 0.0, 0.1):
        loaded = checkpoint.load(folder)
    recorded = records(loaded)
    if (names := [str(record.get("name")) for record in recorded])[-1:] != [name]:
        reason = f"{names[-1]} came later and depends on it" if name in names else "it was never made"
        raise ValueError(f"{folder}: cannot undo {name}: {reason}; its changes: {', '.join(names) or 'none'}")
    change, earlier = Change.of(recorded[-1]), loaded.architecture.changes[:-1]
    with phase(f"undoing {name}", 0.1, 0.2):
        undo_change(loaded.model, change)
    # Training casts weights to float32 and saves them as float32.
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
    """The globs; `new` is replaced by globs for the parameters that the model's last change added.

    Raises ValueError for `new` if the last change added no parameters.
    """
    new = Change.of(recorded[-1]).new if "new" in globs and (recorded := records(loaded)) else ()
    if "new" in globs and not new:
        raise ValueError("new: the model's last change added no parameters; pass globs, or train all")
    return tuple(g for each in globs for g in (new if each == "new" else (each,)))


def describe_form(loaded: LoadedModel) -> str:
    """The format in which the model is saved, as text. For a format other than plain Hugging Face, the text has
    the reason."""
    described = hf_config_of(loaded.model, loaded.context_length)
    if isinstance(described, str):
        return f"a form of its own, which only dunes opens, since no family describes it: {described[:200]}"
    return f"a plain Hugging Face folder: {described.family}"


def save_changed(loaded: LoadedModel, changes: tuple[Change, ...], folder: Path, check: Any) -> None:
    """Save a loaded model after changes. The new card inherits those entries that are still true."""
    facts = inherited(loaded.card) | {"changes": history(loaded)}
    architecture = replace(loaded.architecture, changes=(*loaded.architecture.changes, *changes))
    arguments = loaded.model, folder, loaded.tokenizer, loaded.context_length, facts, check
    checkpoint.save(*arguments, architecture=architecture)


def history(loaded: LoadedModel) -> list[Any]:
    """Records of the changes that were made before the changes in `loaded.architecture`.

    For a plain model, these are all records in its card.
    """
    plain = [] if "adapter" in loaded.card else loaded.card.get("changes", [])
    earlier: list[Any] = loaded.card.get("history", plain)
    return earlier


def described_family(base: LoadedModel) -> str | None:
    """The family of the base's files; None for a base that a function builds, or that was changed."""
    described = base.architecture
    return None if described.function is not None or described.changes else described.family


def size_of(loaded: LoadedModel) -> int:
    return sum(t.nbytes for t in loaded.model.state_dict().values())
