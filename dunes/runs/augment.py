"""Change the model of a folder and write another: measured, verified, with a report."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from dunes import checkpoint
from dunes.augment import CHANGES, Change, apply_change
from dunes.checkpoint.convert import exclusive_folder, require_new_folder
from dunes.checkpoint.folder import LoadedModel, load_decoder, readable_folder
from dunes.checkpoint.forms.hf_config_of import hf_config_of
from dunes.checkpoint.source import open_source
from dunes.checkpoint.verify import EXACT, distance, model_logits
from dunes.runs.export import NOT_INHERITED
from dunes.runs.score import calibration_ids
from dunes.units import format_bytes, plural


def augment_folder(
    folder: Path, out: Path, name: str, *, calibration: Sequence[str] | None = None, **request: Any
) -> list[str]:
    """Make the change of this name to the model in a folder, and write the result to `out`; returns a report.

    `request` are arguments of the change's `decide`, which also gets the ids of the `calibration` sources, if that
    is not None; without sources, of the model's training text. The written model is loaded again and compared
    with the one in memory. Raises ValueError if `out` exists, for a request that the change refuses, and, with
    nothing written, if the comparison fails.
    """
    folder = readable_folder(folder)
    require_new_folder(folder, out)
    loaded = checkpoint.load(folder)
    if calibration is not None:
        request["ids"] = calibration_ids(loaded, calibration)
    size, before = _size(loaded), model_logits(loaded.model, loaded.context_length)
    change = apply_change(loaded.model, name, **request)
    after = model_logits(loaded.model, loaded.context_length)
    effect = {"logits_moved": distance(before, after), "top1_agree": _agreement(before, after)}

    def check(staged: Path) -> dict[str, Any]:
        written = model_logits(load_decoder(open_source(staged)), loaded.context_length)
        if not (difference := distance(after, written)) <= EXACT:
            raise ValueError(f"{out}: the written model differs by {difference:.1e} from the one in memory")
        return {"augmented": {"change": name, **effect, "verified": difference}}

    with exclusive_folder(out):
        save_changed(loaded, (change,), out, check)
    describe = getattr(CHANGES[name], "describe", None)
    return [
        *([] if describe is None else [describe(change)]),
        f"{name} at {plural(len(change.places), 'place')}: {format_bytes(size)} of tensors to "
        f"{format_bytes(_size(loaded))}",
        f"logits moved by {effect['logits_moved']:.1e} (relative norm); top-1 tokens agree at "
        f"{effect['top1_agree']:.0%} of positions; the written folder is equal",
        f"written as {describe_form(loaded)}",
    ]


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
