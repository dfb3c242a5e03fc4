"""Smaller forms of a model, tried one after another: how many bytes each takes, and what it costs in loss."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import Tensor

from dunes import checkpoint
from dunes.augment import apply_change
from dunes.augment.calibrate import calibration_tokens
from dunes.augment.quantize import BY_GROUP, CALIBRATED, GROUP, all_kinds
from dunes.checkpoint import LoadedModel
from dunes.checkpoint.files.compact import compacted
from dunes.checkpoint.files.lazy_tensor import in_memory
from dunes.data import TokenIds
from dunes.runs.comparison import SCORED
from dunes.runs.evaluate import evaluate
from dunes.runs.score import (
    calibration_ids,
    calibration_sources,
    evaluation_tokens,
    require_separate,
)
from dunes.runs.trained_text import trained_text
from dunes.steps import Show, step


@dataclass(frozen=True)
class Form:
    """The arguments of a change that makes a model smaller; `change` is its name in CHANGES."""

    change: str
    request: tuple[tuple[str, Any], ...]

    @property
    def name(self) -> str:
        """The values of the arguments."""
        return " ".join(name if value is True else str(value) for name, value in self.request)

    @property
    def needs_text(self) -> bool:
        return dict(self.request)["method"] in (*CALIBRATED, "sparsegpt", "wanda")

    def with_settings(self, further: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments with `further` ones, less those that this form of quantization does not have."""
        request = dict(further) | dict(self.request)
        if self.change == "quantize" and not {*BY_GROUP} & {
            *all_kinds(request["kind"], request.get("override", ()))
        }:
            request.pop("group", None)
        if request.get("method") != "gptq":
            request.pop("act_order", None)
        return request


@dataclass(frozen=True)
class Trial:
    """A form of a model: bytes of its tensors, for pruned ones in the compact form, and its loss in nats/token."""

    name: str
    size: int
    loss: float


def quantized_forms(text: bool, group: int | None = None) -> list[Form]:
    """Forms of quantization, the smallest first for this `group`; those with a solver need calibration `text`."""
    method = "gptq" if text else "rtn"
    small = [
        Form("quantize", (("kind", kind), *((("symmetric", True),) if symmetric else ()), ("method", method)))
        for kind in ("int3", "int4")
        for symmetric in (True, False)
    ]
    forms = [*small, Form("quantize", (("kind", "int8"), ("method", "rtn")))]
    return sorted(forms, key=lambda form: _bits(dict(form.request), GROUP if group is None else group))


def _bits(request: Mapping[str, Any], group: int) -> float:
    """Bits of a weight, with its part of the scale and the zero point of its group."""
    bits = int(request["kind"].removeprefix("int"))
    return bits + (0 if bits == 8 or not group else (16 if request.get("symmetric") else 16 + bits) / group)


def all_forms(text: bool) -> list[Form]:
    """Every kind and method of quantization with its defaults, and pruned forms."""
    methods = ("rtn", "hqq", "awq", "gptq") if text else ("rtn", "hqq")
    quantized = [Form("quantize", (("kind", k), ("method", m))) for k in ("int3", "int4") for m in methods]
    others = [Form("quantize", (("kind", kind), ("method", "rtn"))) for kind in ("nf4", "int8")]
    pruned = [
        Form("prune", (("method", method), *target))
        for method in (("sparsegpt", "wanda", "magnitude") if text else ("magnitude",))
        for target in ((("sparsity", 0.5),), (("pattern", "2:4"),))
    ]
    return [*quantized, *others, *pruned]


class Frontier:
    """A model folder and the text on which its smaller forms are compared.

    Text for calibration and validation is that of the sources, or that of the model's training. Raises ValueError
    for calibration text that would also score, and if there is no validation text.
    """

    def __init__(self, folder: Path, calibration: Sequence[str] = (), validation: Sequence[str] = ()) -> None:
        self.folder = folder
        loaded = checkpoint.load_with_tokenizer(folder)
        if not (validation or trained_text(loaded.card).get("split")):
            raise ValueError(f"{folder}: records no validation text; pass --validation FILE")
        self.scored: TokenIds = evaluation_tokens(loaded, validation)[0]
        self.ids: Tensor | None = None
        if calibration or trained_text(loaded.card):
            calibration = calibration_sources(loaded.card, calibration)
            require_separate(loaded, calibration, validation)
            self.ids = calibration_ids(loaded, calibration, calibration_tokens(loaded.model))
        self.dense = self._trial("dense", loaded)

    def try_forms(
        self, forms: Sequence[Form], show: Show, further: Mapping[str, Any] = MappingProxyType({})
    ) -> Iterator[Trial]:
        """The trial of each form, with `further` arguments; its model is dropped then."""
        for i, form in enumerate(forms):
            with step(show, f"trying {form.name}", i / len(forms), (i + 1) / len(forms)):
                loaded = checkpoint.load(self.folder)
                request = form.with_settings(further) | ({"ids": self.ids} if form.needs_text else {})
                apply_change(loaded.model, form.change, **request)
                trial = self._trial(form.name, loaded)
            yield trial

    def _trial(self, name: str, loaded: LoadedModel) -> Trial:
        size = sum(t.nbytes for t in compacted(in_memory(loaded.model.state_dict())).values())
        return Trial(name, size, evaluate(loaded, self.scored, limit=SCORED).loss)


def smallest_form(
    frontier: Frontier, rise: float, further: Mapping[str, Any], show: Show
) -> tuple[Form, list[str]]:
    """The smallest quantized form that raises the loss by at most `rise` nats/token, and a line for each tried.

    `further` are arguments that all forms have. Raises ValueError if there is none.
    """
    forms, lines = quantized_forms(frontier.ids is not None, further.get("group")), []
    for form, trial in zip(forms, frontier.try_forms(forms, show, further), strict=False):
        lines.append(f"tried {trial.name}: {trial.loss - frontier.dense.loss:+.4f} nats/token")
        if trial.loss - frontier.dense.loss <= rise:
            return form, lines
    raise ValueError(f"{frontier.folder}: no form stays within {rise:g} nats/token; {'; '.join(lines)}")
