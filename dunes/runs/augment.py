"""Change the model of a folder and write another: measured, verified, with a report."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from dunes import checkpoint
from dunes.augment import CHANGES, Change, apply_change, undo_change
from dunes.checkpoint.base import DTYPES, changed_part, weights_identity
from dunes.checkpoint.convert import exclusive_folder, require_new_folder
from dunes.checkpoint.folder import LoadedModel, load_decoder, readable_folder
from dunes.checkpoint.forms.hf_config_of import hf_config_of
from dunes.checkpoint.source import open_source
from dunes.checkpoint.verify import EXACT, distance, model_logits
from dunes.runs.export import NOT_INHERITED
from dunes.runs.score import calibration_ids
from dunes.steps import Show, step
from dunes.units import format_bytes, plural

WRITING, COMPARING = 0.6, 0.95
"""The shares of the work before the result is written, and before it is compared with what was written."""
LEARNED = ("trained", "finetuned", "measured", "timings")
"""Keys of a card that are not true of the model before its last change."""


def augment_folder(
    folder: Path,
    out: Path,
    name: str,
    *,
    calibration: Sequence[str] | None = None,
    show: Show = lambda what, share: None,
    **request: Any,
) -> list[str]:
    """Make the change of this name to the model in a folder, and write the result to `out`; returns a report.

    `request` are arguments of the change's `decide`, which also gets the ids of the `calibration` sources, if that
    is not None; without sources, of the model's training text. The written model is loaded again and compared
    with the one in memory. Raises ValueError if `out` exists, for a request that the change refuses, and, with
    nothing written, if the comparison fails.
    """
    folder = readable_folder(folder)
    require_new_folder(folder, out)
    with step(show, "reading", 0.0, 0.05):
        loaded = checkpoint.load(folder)
        if calibration is not None:
            request["ids"] = calibration_ids(loaded, calibration)
    with step(show, "measuring", 0.05, 0.1):
        size, before = _size(loaded), model_logits(loaded.model, loaded.context_length)
    with step(show, "hashing", 0.1, 0.15):
        identity = weights_identity(loaded.model) if getattr(CHANGES[name], "RESTORES", False) else {}
    with step(show, name, 0.15, 0.55):
        change = replace(apply_change(loaded.model, name, **request), before=identity)
    with step(show, "measuring", 0.55, WRITING):
        after = model_logits(loaded.model, loaded.context_length)
    effect = {"logits_moved": distance(before, after), "top1_agree": _agreement(before, after)}
    _write(loaded, (change,), out, after, {"change": name, **effect}, show)
    describe = getattr(CHANGES[name], "describe", None)
    return [
        *([] if describe is None else [describe(change)]),
        f"{name} at {plural(len(change.places), 'place')}: {format_bytes(size)} of tensors to "
        f"{format_bytes(_size(loaded))}",
        f"logits moved by {effect['logits_moved']:.1e} (relative norm); top-1 tokens agree at "
        f"{effect['top1_agree']:.0%} of positions; the written folder is equal",
        f"written as {describe_form(loaded)}",
    ]


def undo_folder(folder: Path, out: Path, name: str, *, show: Show = lambda what, share: None) -> str:
    """Undo the last change of a folder, which has this name, and write the model from before to `out`.

    Returns a report. Raises ValueError, with nothing written, if the last change is another one, or the result is
    not equal bit for bit to the model from before.
    """
    folder = readable_folder(folder)
    require_new_folder(folder, out)
    with step(show, "reading", 0.0, 0.1):
        loaded = checkpoint.load(folder)
    made = records(loaded)
    if (names := [str(record.get("name")) for record in made])[-1:] != [name]:
        reason = f"{names[-1]} came later and stands on it" if name in names else "it was never made"
        raise ValueError(f"{folder}: cannot undo {name}: {reason}; its changes: {', '.join(names) or 'none'}")
    change, own = Change.of(made[-1]), loaded.architecture.changes[:-1]
    with step(show, f"undoing {name}", 0.1, 0.2):
        undo_change(loaded.model, change)
    # Training from a folder casts weights to float32, and saves them so.
    loaded.model.to({str(dtype): dtype for dtype in DTYPES.values()}.get(change.before.get("kind", "")))
    with step(show, "comparing with the digests", 0.2, 0.5):
        part = changed_part(loaded.model, change.before)
    if part is not None:
        raise ValueError(
            f"{folder}: cannot undo {name}: {part} of the model from before it was trained or rounded since; "
            "train with --trainable new to keep it"
        )
    card = {k: v for k, v in loaded.card.items() if k not in LEARNED} | {"history": made[: -1 - len(own)]}
    loaded = replace(loaded, card=card, architecture=replace(loaded.architecture, changes=own))
    with step(show, "measuring", 0.5, WRITING):
        after = model_logits(loaded.model, loaded.context_length)
    _write(loaded, (), out, after, {"undone": name}, show)
    return (
        f"{name} undone at {plural(len(change.places), 'place')}: {format_bytes(_size(loaded))} of tensors with "
        "the SHA-256 of before; the written folder is equal"
    )


def _write(
    loaded: LoadedModel,
    changes: tuple[Change, ...],
    out: Path,
    expected: Tensor,
    facts: dict[str, Any],
    show: Show,
) -> None:
    """Save a model with these logits. Raises ValueError, and leaves nothing, if the written one has others."""

    def check(staged: Path) -> dict[str, Any]:
        model = load_decoder(open_source(staged))
        with step(show, "comparing", COMPARING, 1.0):
            written = model_logits(model, loaded.context_length)
        if not (difference := distance(expected, written)) <= EXACT:
            raise ValueError(f"{out}: the written model differs by {difference:.1e} from the one in memory")
        return {"augmented": {**facts, "verified": difference}}

    with exclusive_folder(out), step(show, "writing", WRITING, COMPARING):
        save_changed(loaded, changes, out, check)
    show("written", 1.0)


def records(loaded: LoadedModel) -> list[Any]:
    """The records of all changes, in their order."""
    return [*history(loaded), *(change.record() for change in loaded.architecture.changes)]


def resolve_new(globs: Sequence[str], loaded: LoadedModel) -> tuple[str, ...]:
    """The globs, with those of the parameters that the model's last change added in place of `new`.

    Raises ValueError for `new` if it added none.
    """
    new = Change.of(made[-1]).new if "new" in globs and (made := records(loaded)) else ()
    if "new" in globs and not new:
        raise ValueError("new: the model's last change added no parameters; name them, or train all")
    return tuple(g for each in globs for g in (new if each == "new" else (each,)))


def describe_form(loaded: LoadedModel) -> str:
    """Whether the folder of a model is one of a Hugging Face family, or else why not."""
    described = hf_config_of(loaded.model, loaded.context_length)
    if isinstance(described, str):
        return f"a form of its own, which only dunes opens, since no family describes it: {described[:200]}"
    return f"a plain Hugging Face folder: {described.family}"


def save_changed(loaded: LoadedModel, changes: tuple[Change, ...], out: Path, check: Any) -> None:
    """Save a loaded model that was changed since; the card inherits what the change does not concern."""
    facts = {k: v for k, v in loaded.card.items() if k not in NOT_INHERITED}
    architecture = replace(loaded.architecture, changes=(*loaded.architecture.changes, *changes))
    checkpoint.save(
        loaded.model, out, loaded.tokenizer, loaded.context_length, facts | {"changes": history(loaded)}, check,
        architecture=architecture,
    )  # fmt: skip


def history(loaded: LoadedModel) -> list[Any]:
    """The records of the changes before those of the architecture; in a plain model's card, these are all."""
    plain = [] if "adapter" in loaded.card else loaded.card.get("changes", [])
    earlier: list[Any] = loaded.card.get("history", plain)
    return earlier


def _size(loaded: LoadedModel) -> int:
    return sum(t.nbytes for t in loaded.model.state_dict().values())


def _agreement(a: Tensor, b: Tensor) -> float:
    return float((a.argmax(-1) == b.argmax(-1)).float().mean())
