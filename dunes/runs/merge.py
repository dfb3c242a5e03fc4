"""Merge an adapter into its base model, and verify the result."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any, Literal

import torch
from torch import Tensor

from dunes import augment, checkpoint
from dunes.augment import dequantize
from dunes.augment.quantize import Quantized
from dunes.checkpoint.adapter import attach_adapter
from dunes.checkpoint.convert import exclusive_folder, require_new_folder
from dunes.checkpoint.folder import LoadedModel, load_decoder, open_verified_source, readable_folder
from dunes.checkpoint.loading import base_folder, is_adapter
from dunes.checkpoint.source import open_source
from dunes.checkpoint.verify import UnmergedLogits, Verification, model_logits
from dunes.parts import Decoder
from dunes.units import plural

Into = Literal["dequantized", "original"]
MAX_RATIO = 2.0
"""Allowed distance between original and quantized base with the adapter, as a multiple of their distance without
it. Both should be about equal (tests/test_merge.py) unless the adapter depends on quantization errors."""
NOT_INHERITED = ("files", "format", "dunes", "adapter", "base", "structure", "changes")
"""Keys of an adapter's card that the merged model's card does not inherit."""


@dataclass(frozen=True)
class Report:
    """The result of a merge. `errors` are rounding errors by module, relative to the update.

    When merging into the original of a quantized base, `moved` is the relative distance between its logits and
    those of the trained model, and `allowed` the limit.
    """

    errors: Mapping[str, float]
    verified: Verification
    moved: float | None = None
    allowed: float | None = None

    def lines(self) -> list[str]:
        place, worst = max(self.errors.items(), key=lambda pair: pair[1])
        usual = mean(self.errors.values())
        lines = [
            self.verified.verdict + ("" if self.moved is None else ", to the adapter on the original base"),
            f"merged into {plural(len(self.errors), 'matrix', 'matrices')}; rounding error relative to "
            "the update: "
            f"{usual:.1e} on average, {worst:.1e} at most ({place})",
            str(self.verified),
        ]
        if self.moved is not None:
            lines.append(
                "the adapter was trained on the quantized base; on this one its logits differ by "
                f"{self.moved:.1e} "
                f"(relative norm; allowed: {self.allowed:.1e}, twice the effect of quantization)"
            )
        return lines

    def card(self) -> dict[str, Any]:
        moved = {} if self.moved is None else {"moved": self.moved, "allowed": self.allowed}
        return {"errors": {"largest": max(self.errors.values()), "mean": mean(self.errors.values())}} | moved


def merge(
    folder: Path,
    out: Path,
    into: Into | None = None,
    dtype: torch.dtype | None = None,
    any_base: bool = False,
) -> Report:
    """Merge the adapter in `folder` into its base and write `out`, with template, tokenizer and card.

    `into` applies to quantized bases: merge into the dequantized weights (the default), on which the adapter was
    trained, or into the original ones. `dtype` defaults to the base's. `any_base` accepts a base that is not
    verified to be the adapter's, and the card records it. Raises ValueError if `out` exists, if `folder` is not an
    adapter, and, with nothing written, if the merged model differs from the unmerged one.
    """
    if not is_adapter(folder):
        raise ValueError(f"{folder}: not an adapter folder, so there is nothing to merge")
    folder = readable_folder(folder)
    require_new_folder(folder, out)
    base = base_folder(folder)
    require_new_folder(base, out)
    loaded = checkpoint.load(folder, any_base=any_base)
    if any_base:
        loaded = replace(loaded, card=loaded.card | {"any_base": True})
    model, distances = loaded.model, None
    if into == "original" and any(isinstance(m, Quantized) for m in model.modules()):
        model = load_decoder(open_verified_source(base)).eval()
        attach_adapter(model, folder, any_base=any_base)
        distances = _check_distance(model, loaded)
    merged_dtype = dtype or next(augment.base_model(model).parameters()).dtype
    with exclusive_folder(out):
        return _write_merged(model, loaded, (folder, out), merged_dtype, distances)


def _write_merged(
    model: Decoder,
    loaded: LoadedModel,
    folders: tuple[Path, Path],
    dtype: torch.dtype,
    distances: tuple[float, float] | None,
) -> Report:
    folder, out = folders
    before = UnmergedLogits.of(model, folder, loaded.context_length, dtype)
    quantized = dequantize(model)
    errors = augment.merge(model, dtype=dtype).errors
    reports: list[Report] = []

    def check(staged: Path) -> dict[str, Any]:
        reports.append(Report(errors, before.verify(open_source(staged)), *(distances or ())))
        return {"merged": reports[0].card(), "verified": reports[0].verified.card()}

    facts = {k: v for k, v in loaded.card.items() if k not in NOT_INHERITED}
    facts |= {"changes": [*_changes(folder, loaded.card), _note(folder, list(errors), quantized, dtype)]}
    checkpoint.save(model.to(dtype), out, loaded.tokenizer, loaded.context_length, facts, check)
    return reports[0]


def _changes(folder: Path, card: Mapping[str, Any]) -> list[Any]:
    """The changes of the base: those in its own folder, and those before the adapter."""
    return [*checkpoint.describe(base_folder(folder))[2].get("changes", []), *card.get("changes", [])]


def _note(folder: Path, places: list[str], quantized: list[str], dtype: torch.dtype) -> dict[str, Any]:
    request = {"adapter": folder.name, "dtype": str(dtype).removeprefix("torch.")}
    return {
        "name": "merge",
        "version": 1,
        "request": request,
        "places": places,
        "dequantized": quantized,
        "new": [],
    }


def _check_distance(original: Decoder, trained: LoadedModel) -> tuple[float, float]:
    """The distance between original and trained base, both with the adapter, and its limit.

    Raises ValueError if the distance exceeds the limit.
    """
    trained_logits, original_logits = (model_logits(m, trained.context_length) for m in (trained.model, original))
    bases = [model_logits(augment.base_model(m), trained.context_length) for m in (trained.model, original)]
    moved, allowed = _distance(trained_logits, original_logits), MAX_RATIO * _distance(*bases)
    if not moved <= allowed:
        raise ValueError(
            f"the logits of the original base with this adapter differ by {moved:.1e} from those it was "
            "trained with, "
            f"{allowed:.1e} allowed; use --into dequantized; nothing was written"
        )
    return moved, allowed


def _distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / a.norm())
