"""Write a model with adapters or quantized layers as a plain Hugging Face folder, and verify the result."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any, Literal

import torch

from dunes import augment, checkpoint
from dunes.augment import Adapted, dequantize
from dunes.augment.lora import active_adapter
from dunes.augment.masked import masked_places
from dunes.augment.quantized import Quantized
from dunes.checkpoint.architecture import Architecture, has_own_form
from dunes.checkpoint.card import read_card
from dunes.checkpoint.convert import exclusive_folder, require_new_folder
from dunes.checkpoint.folder import (
    LoadedModel,
    inherited,
    load_decoder,
    load_tokenizer,
    open_verified_source,
    readable_folder,
    require_described,
)
from dunes.checkpoint.formats import gguf
from dunes.checkpoint.formats.adapter import attach_adapter
from dunes.checkpoint.loading import base_folder, is_adapter
from dunes.checkpoint.model_folder import named_folder
from dunes.checkpoint.source import open_source
from dunes.checkpoint.verify import Verification, distance, merge_check, model_logits
from dunes.checkpoint.weights.lazy_tensor import Weights, in_memory
from dunes.files import atomic
from dunes.parts import Decoder
from dunes.text import Tokenizer
from dunes.text.gguf_file import SUFFIX
from dunes.units import format_bytes, plural

Into = Literal["dequantized", "original"]
MAX_RATIO = 2.0
"""Allowed distance between original and quantized base with the adapter, as a multiple of their distance without
it. Both should be about equal (tests/test_merge.py) unless the adapter depends on quantization errors."""


@dataclass(frozen=True)
class Report:
    """The result of an export. `errors` are rounding errors by merged module, relative to the update.

    When merging into the original of a quantized base, `moved` is the relative distance between its logits and
    those of the trained model, and `allowed` the limit. `pruned` matrices keep their zeros.
    """

    errors: Mapping[str, float]
    verified: Verification
    moved: float | None = None
    allowed: float | None = None
    pruned: int = 0

    def lines(self) -> list[str]:
        lines = [
            self.verified.verdict + ("" if self.moved is None else ", to the adapter on the original base"),
            str(self.verified),
        ]
        if self.errors:
            place, worst = max(self.errors.items(), key=lambda pair: pair[1])
            lines[1:1] = [
                f"merged into {plural(len(self.errors), 'matrix', 'matrices')}; rounding error relative to "
                f"the update: {mean(self.errors.values()):.1e} on average, {worst:.1e} at most ({place})"
            ]
        if self.pruned:
            lines.append(f"the zeros of {plural(self.pruned, 'pruned matrix', 'pruned matrices')} stay")
        if self.moved is not None:
            lines.append(
                "the adapter was trained on the quantized base; on this one its logits differ by "
                f"{self.moved:.1e} "
                f"(relative norm; allowed: {self.allowed:.1e}, twice the effect of quantization)"
            )
        return lines

    def card(self) -> dict[str, Any]:
        moved = {} if self.moved is None else {"moved": self.moved, "allowed": self.allowed}
        if not self.errors:
            return moved
        return {"errors": {"largest": max(self.errors.values()), "mean": mean(self.errors.values())}} | moved


def export(
    folder: Path, out: Path, into: Into | None = None, dtype: torch.dtype | None = None, any_base: bool = False
) -> Report:
    """Merge the active adapter of the model in `folder`, dequantize it, and write `out` with its tokenizer.

    For the folder of an adapter that was trained on a quantized base, `into` says whether to merge into the
    dequantized weights (the default), on which it was trained, or into the original ones. `dtype` defaults to the
    base's. `any_base` accepts a base that is not verified to be the adapter's, and the card records it. Raises
    ValueError if `out` exists, if no Hugging Face config describes the result, and, with nothing written, if it
    differs from the model in `folder`.
    """
    folder = readable_folder(folder)
    if is_plain(folder):
        raise ValueError(f"{folder}: neither an adapter nor a quantized model, so there is nothing to merge")
    require_new_folder(folder, out)
    if is_adapter(folder):
        require_new_folder(base_folder(folder), out)
    loaded = checkpoint.load(folder, any_base=any_base)
    if any_base:
        loaded = replace(loaded, card=loaded.card | {"any_base": True})
    model, distances = loaded.model, None
    if into == "original" and _is_quantized(model):
        base = base_folder(folder) if is_adapter(folder) else folder
        model = load_decoder(open_verified_source(base)).eval()
        if _is_quantized(model):
            raise ValueError(f"{base}: was saved without the original weights; use --into dequantized")
        attach_adapter(model, folder, any_base=any_base)
        distances = _check_distance(model, loaded)
    merged_dtype = dtype or next(augment.base_model(model).parameters()).dtype
    with exclusive_folder(out):
        return _write_plain(model, loaded, (folder, out), merged_dtype, distances)


def _is_quantized(model: Decoder) -> bool:
    return any(isinstance(module, Quantized) for module in model.modules())


def is_plain(folder: Path) -> bool:
    """Whether a folder holds weights of a Hugging Face model in any format, without adapters or changes."""
    return not is_adapter(folder) and not has_own_form(read_card(readable_folder(folder)))


def export_gguf(folder: Path, out: Path, dtype: str | None = None) -> str:
    """Write the model in `folder` as one GGUF file, with its active adapter merged; returns what was written.

    `dtype` is one of `gguf.TYPES`, by default the model's own. Raises ValueError if `out` exists, for what
    llama.cpp cannot express, and, with nothing written, if the file read back has other weights.
    """
    if out.exists() or out.is_symlink():
        raise ValueError(f"{out}: exists already; choose another name, or remove it")
    if out.suffix != SUFFIX:
        raise ValueError(f"{out}: a GGUF file is known by its suffix; name it {out.name}{SUFFIX}")
    model, weights, tokenizer = (_open_plain if is_plain(folder) else _merge_all)(folder)
    stored = Counter(str(w.dtype).removeprefix("torch.") for w in weights.values())
    kind = dtype or stored.most_common(1)[0][0]
    if kind not in gguf.TYPES:
        raise ValueError(f"{folder}: stored in {kind}; choose --dtype {'|'.join(gguf.TYPES)}")
    out.parent.mkdir(parents=True, exist_ok=True)
    counts = atomic.replace_file(out, lambda path: gguf.write(path, model, weights, tokenizer, kind))
    listed = ", ".join(f"{plural(n, 'tensor')} in {name}" for name, n in counts.most_common())
    return f"{listed}; {format_bytes(out.stat().st_size)}; read back: equal{gguf.window_note(model)}"


def _open_plain(folder: Path) -> tuple[Architecture, Weights, Tokenizer | None]:
    source = open_verified_source(folder)
    return source.architecture, source.weights(), load_tokenizer(source)


def _merge_all(folder: Path) -> tuple[Architecture, Weights, Tokenizer | None]:
    """The model of any folder with dense weights in the base's dtype and its active adapter merged."""
    loaded = checkpoint.load(folder)
    dtype = next(augment.base_model(loaded.model).parameters()).dtype
    dequantize(loaded.model)
    _merge_active(loaded.model, dtype)
    described = require_described(loaded.model, loaded.context_length, folder, "llama.cpp")
    return described, in_memory(loaded.model.to(dtype).state_dict()), loaded.tokenizer


def _write_plain(
    model: Decoder,
    loaded: LoadedModel,
    folders: tuple[Path, Path],
    dtype: torch.dtype,
    distances: tuple[float, float] | None,
) -> Report:
    folder, out = folders
    verify = merge_check(model, folder, loaded.context_length, dtype)
    quantized = dequantize(model)
    errors = _merge_active(model, dtype)
    require_described(model, loaded.context_length, folder)
    reports: list[Report] = []

    def check(staged: Path) -> dict[str, Any]:
        moved, allowed = distances or (None, None)
        reports.append(Report(errors, verify(open_source(staged)), moved, allowed, len(masked_places(model))))
        return {"merged": reports[0].card(), "verified": reports[0].verified.card()}

    facts = inherited(loaded.card)
    facts |= {"changes": [*_changes(folder, loaded.card), _note(folder, list(errors), quantized, dtype)]}
    checkpoint.save(model.to(dtype), out, loaded.tokenizer, loaded.context_length, facts, check)
    return reports[0]


def _merge_active(model: Decoder, dtype: torch.dtype) -> dict[str, float]:
    """Merge the active adapter and drop the others; returns the rounding errors."""
    active = active_adapter(model)
    adapters = {name for m in model.modules() if isinstance(m, Adapted) for name in m.adapters}
    for name in adapters - {active}:
        augment.detach(model, name)
    return {} if active is None else augment.merge(model, dtype=dtype).errors


def _changes(folder: Path, card: Mapping[str, Any]) -> list[Any]:
    """All changes so far: those of an adapter's base, and the model's own."""
    base = checkpoint.describe(base_folder(folder)).architecture.changes if is_adapter(folder) else ()
    return [*card.get("history", []), *(change.record() for change in base), *card.get("changes", [])]


def _note(folder: Path, places: list[str], quantized: list[str], dtype: torch.dtype) -> dict[str, Any]:
    request = {"adapter": named_folder(folder).name, "dtype": str(dtype).removeprefix("torch.")}
    change = {"name": "merge", "version": 1, "request": request, "places": places}
    return change | {"dequantized": quantized, "new": []}


def _check_distance(original: Decoder, trained: LoadedModel) -> tuple[float, float]:
    """The distance between original and trained base, both with the adapter, and its limit.

    Raises ValueError if the distance exceeds the limit.
    """
    trained_logits, original_logits = (model_logits(m, trained.context_length) for m in (trained.model, original))
    bases = [model_logits(augment.base_model(m), trained.context_length) for m in (trained.model, original)]
    moved, allowed = distance(trained_logits, original_logits), MAX_RATIO * distance(*bases)
    if not moved <= allowed:
        raise ValueError(
            f"the logits of the original base with this adapter differ by {moved:.1e} from those it was "
            "trained with, "
            f"{allowed:.1e} allowed; use --into dequantized; nothing was written"
        )
    return moved, allowed
