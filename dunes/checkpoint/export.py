"""Export a model as a plain Hugging Face folder or in one of FORMATS, and verify the result."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from statistics import mean
from typing import Any, Literal

import torch

from dunes import augment, checkpoint
from dunes.augment import Adapted, dequantize
from dunes.augment.lora import Merged, active_adapter
from dunes.augment.prune import masked_places
from dunes.augment.quantized import Quantized
from dunes.checkpoint import formats
from dunes.checkpoint.architecture import Architecture
from dunes.checkpoint.card import has_own_form, read_card, require_new_folder
from dunes.checkpoint.formats import FORMATS
from dunes.checkpoint.formats.adapter import attach_adapter
from dunes.checkpoint.open import (
    LoadedModel,
    base_folder,
    is_adapter,
    load_decoder,
    load_tokenizer,
    open_model,
    open_verified_model,
    readable_folder,
)
from dunes.checkpoint.verify import MAX_RATIO, Verification, distance, merge_check, model_logits
from dunes.checkpoint.weights.lazy_tensor import Weights, in_memory
from dunes.checkpoint.write import Edit, inherited, require_described, rewrite
from dunes.parts import Decoder
from dunes.text import Tokenizer
from dunes.units import plural

Into = Literal["dequantized", "original"]
MOST_LOST = 0.5
"""The report warns if a merge keeps less than this share of the adapter's update."""

NOTHING = "{}: neither an adapter nor a quantized model, so there is nothing to merge"


@dataclass(frozen=True)
class Report:
    """The result of an export. `merged` has each merged module's rounding error, and the share of the update that
    the merge kept.

    `moved` and `allowed` are set if an adapter of a quantized base was merged into the original weights. `moved`
    is the relative distance of the adapter's logits on the original base from its logits on the quantized base,
    and `allowed` is the limit of this distance. `pruned` is the number of pruned matrices; the result has the same
    zeros.
    """

    merged: Merged
    verified: Verification
    pruned: int
    moved: float | None = None
    allowed: float | None = None

    def lines(self) -> list[str]:
        lines = [self.verified.verdict + ("" if self.moved is None else ", to the adapter on the original base")]
        if errors := self.merged.errors:
            place, worst = max(errors.items(), key=lambda pair: pair[1])
            share = min(self.merged.share, 1)  # rounding to another dtype may increase the share
            lines.append(
                f"merged into {plural(len(errors), 'matrix', 'matrices')}, which keep {share:.1%} of the update; "
                f"rounding error relative to the update: {mean(errors.values()):.1e} on average, {worst:.1e} at "
                f"most ({place})"
            )
        if self.merged.share < MOST_LOST:
            lines.append(
                "warning: most of the update is lost, since it is below the resolution of this dtype; merge with "
                "--dtype float32, or use the adapter without merging"
            )
        lines.append(str(self.verified))
        if self.pruned:
            lines.append(f"the zeros of {plural(self.pruned, 'pruned matrix', 'pruned matrices')} stay")
        if self.moved is not None:
            lines.append(
                "the adapter was trained on the quantized base; on the original base, its logits differ by "
                f"{self.moved:.1e} (relative norm; allowed: {self.allowed:.1e}, twice the effect of quantization)"
            )
        return lines

    def card(self) -> dict[str, Any]:
        entries: dict[str, Any] = {} if self.moved is None else {"moved": self.moved, "allowed": self.allowed}
        if values := self.merged.errors.values():
            entries |= {"errors": {"largest": max(values), "mean": mean(values)}, "share_kept": self.merged.share}
        return entries


def export(
    folder: Path,
    out: Path,
    into: Into | None = None,
    dtype: torch.dtype | None = None,
    any_base: bool = False,
    reader: str = "",
) -> Report:
    """Write the model in `folder` and its tokenizer to `out`; merges the active adapter and dequantizes weights.

    `into` selects the weights into which an adapter of a quantized base is merged: the original weights, or the
    dequantized weights that the adapter was trained on (default). `dtype` is the dtype of the result, by default
    the base's. `any_base` accepts an unverified base, and is recorded in the card. `reader` is "dunes" if it is
    enough that dunes can load the result; by default, transformers must, too. Raises ValueError, and writes
    nothing, if `out` exists, if no family describes the result, or if the result's logits differ from the model's.
    """
    folder = readable_folder(folder)
    if is_plain(folder):
        raise ValueError(NOTHING.format(folder))
    if is_adapter(folder):
        require_new_folder(base_folder(folder), out)
    return rewrite(folder, out, partial(_plain, folder, into, dtype, any_base, reader))


def _plain(
    folder: Path, into: Into | None, dtype: torch.dtype | None, any_base: bool, reader: str
) -> Edit[Report]:
    """The `Edit` for `rewrite`: the model in a folder, with its adapter merged and its weights dequantized."""
    loaded = checkpoint.load(folder, any_base=any_base)
    model, distances = loaded.model, tuple[float, ...]()
    if into == "original" and _is_quantized(model):
        base = base_folder(folder) if is_adapter(folder) else folder
        model = load_decoder(open_verified_model(base)).eval()
        if _is_quantized(model):
            raise ValueError(f"{base}: was saved without the original weights; use --into dequantized")
        attach_adapter(model, folder, any_base=any_base)
        distances = _check_distance(model, loaded)
    dtype = dtype or next(augment.base_model(model).parameters()).dtype
    verify = merge_check(model, folder, loaded.context_length, dtype)
    quantized = dequantize(model)
    merged = _merge_active(model, dtype)
    if reader and not (quantized or merged.errors or is_adapter(folder)):
        raise ValueError(NOTHING.format(folder))
    require_described(model, loaded.context_length, folder, reader)

    def compare(staged: Path) -> tuple[Report, Mapping[str, Any]]:
        report = Report(merged, verify(open_model(staged)), len(masked_places(model)), *distances)
        return report, {"merged": report.card(), "verified": report.verified.card()}

    facts = inherited(loaded.card) | ({"any_base": True} if any_base else {})
    facts |= {"changes": [*_changes(folder, loaded.card), _note(folder, list(merged.errors), quantized, dtype)]}
    write = partial(checkpoint.save, model.to(dtype), facts=facts)
    return partial(write, tokenizer=loaded.tokenizer, context_length=loaded.context_length), compare


def _is_quantized(model: Decoder) -> bool:
    return any(isinstance(module, Quantized) for module in model.modules())


def is_plain(folder: Path) -> bool:
    """True if a folder has no adapter, and a Hugging Face config describes its model completely."""
    return not is_adapter(folder) and not has_own_form(read_card(readable_folder(folder)))


def write_format(folder: Path, out: Path, to: str, dtype: str | None = None, example: Sequence[int] = ()) -> str:
    """Write the model or network in `folder` as `out`, in a format of FORMATS; returns a line for the user.

    `dtype` is by default the model's own; `example` has the sizes of a network's input, batch included. Raises
    ValueError, and writes nothing, if `out` exists, if the format cannot express the model, or if the result, read
    back, differs from the model.
    """
    form, module = FORMATS[to], import_module(f"{formats.__name__}.{to.replace('-', '_')}")
    if form.suffix and (out.exists() or out.is_symlink()):
        raise ValueError(f"{out}: exists already; choose another name, or remove it")
    if form.suffix and out.suffix != form.suffix:
        raise ValueError(f"{out}: the file name must end in {form.suffix}; choose {out.name}{form.suffix}")
    if checkpoint.is_network(folder):
        line = module.write_network(folder, out, example)
    elif form.dense:
        line = module.write(out, *_open_dense(folder, form.about), dtype)
    else:
        line = module.write(folder, out, *(() if form.no_dtype else (dtype,)))
    return str(line)


def check_example(folder: Path, to: str, dtype: str | None, example: Sequence[int]) -> None:
    """Raise ValueError unless the options fit: a language model takes no `example`, another network no `dtype`."""
    if not checkpoint.is_network(folder):
        if example:
            raise ValueError(f"--example: omit it, since {folder} is a language model")
        return
    if to not in (known := [name for name, form in FORMATS.items() if form.network]):
        raise ValueError(f"--to {to}: {folder} is no language model; for networks, expected {' or '.join(known)}")
    if dtype is not None:
        raise ValueError(f"--dtype {dtype}: a network's weights are written in float32; omit it")
    if not example or min(example) < 1:
        raise ValueError("--example is missing: the sizes of the network's input, as in --example 1 28 28")


def _open_dense(folder: Path, reader: str) -> tuple[Architecture, Weights, Tokenizer | None]:
    """The architecture, the dense weights (active adapter merged, in the base's dtype), and the tokenizer.

    If `is_plain(folder)`, the weights are lazy, so this function does not read them. `reader` is the program that
    will read the result, for error messages.
    """
    if is_plain(folder):
        opened = open_verified_model(folder)
        return opened.architecture, opened.weights(), load_tokenizer(opened)
    loaded = checkpoint.load(folder)
    dtype = next(augment.base_model(loaded.model).parameters()).dtype
    dequantize(loaded.model)
    _merge_active(loaded.model, dtype)
    described = require_described(loaded.model, loaded.context_length, folder, reader)
    return described, in_memory(loaded.model.to(dtype).state_dict()), loaded.tokenizer


def _merge_active(model: Decoder, dtype: torch.dtype) -> Merged:
    """Merge the active adapter, and remove all others; the result's `share` is 1 if no adapter is active."""
    active = active_adapter(model)
    adapters = {name for m in model.modules() if isinstance(m, Adapted) for name in m.adapters}
    for name in adapters - {active}:
        augment.detach(model, name)
    return Merged({}, 1.0) if active is None else augment.merge(model, dtype=dtype)


def _changes(folder: Path, card: Mapping[str, Any]) -> list[Any]:
    """Records of all changes to the model, including the card's history and changes to an adapter's base."""
    base = checkpoint.describe(base_folder(folder)).architecture.changes if is_adapter(folder) else ()
    return [*card.get("history", []), *(change.record() for change in base), *card.get("changes", [])]


def _note(folder: Path, places: list[str], quantized: list[str], dtype: torch.dtype) -> dict[str, Any]:
    request = {"adapter": folder.name, "dtype": str(dtype).removeprefix("torch.")}
    change = {"name": "merge", "version": 1, "request": request, "places": places}
    return {**change, "dequantized": quantized, "new": []}


def _check_distance(original: Decoder, trained: LoadedModel) -> tuple[float, ...]:
    """Relative distance between the adapter's logits on the original base and on the base it was trained on; also
    the limit of this distance.

    Raises ValueError if the distance exceeds the limit.
    """
    trained_logits, original_logits = (model_logits(m, trained.context_length) for m in (trained.model, original))
    bases = [model_logits(augment.base_model(m), trained.context_length) for m in (trained.model, original)]
    difference, limit = distance(trained_logits, original_logits), MAX_RATIO * distance(*bases)
    if not difference <= limit:
        raise ValueError(
            f"with this adapter, the logits of the original base and of the quantized base differ by "
            f"{difference:.1e}, more than the allowed {limit:.1e}; use --into dequantized; nothing was written"
        )
    return difference, limit
