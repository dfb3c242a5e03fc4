"""The objectives of finetuning, and their options. Importing this module does not import torch."""

from dataclasses import dataclass, fields, replace
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, get_args

from dunes.flags import flag

if TYPE_CHECKING:
    from dunes.checkpoint import LoadedModel
    from dunes.data.batches import Batch, Batches
    from dunes.evaluate.text_loss import Score
    from dunes.runs.finetune_config import FinetuneConfig
    from dunes.train.loss import Loss

ObjectiveName = Literal["sft", "dpo", "orpo"]


@dataclass(frozen=True, kw_only=True)
class Preference:
    objective: Annotated[ObjectiveName, flag("|".join(get_args(ObjectiveName)))] = "sft"
    """sft: learn the examples. dpo: prefer chosen to rejected answers, relative to the base. orpo: learn the
    chosen answers, and prefer them to the rejected ones."""
    beta: Annotated[float, flag("BETA")] = 0.1
    """With dpo: the reward of an answer is beta times its log-probability relative to the base; with orpo: weight
    of the odds-ratio loss."""
    label_smoothing: Annotated[float, flag("P")] = 0.0
    """With dpo: probability (below 0.5) that a pair's chosen and rejected answers are swapped."""
    length_normalized: bool = False
    """With dpo: divide log-probabilities by the answer's number of tokens, usually with a --beta near 5."""


@dataclass(frozen=True)
class Objective:
    """A finetuning objective: the name of a loss in `dunes.train.loss`, and the options that the loss takes.

    `lr_scale` multiplies the default learning rate. If `has_reference` is true, batches contain the base model's
    log-probabilities. `row_format` (a key of RECORD_FORMATS) is the only format that the objective reads. If it
    is empty, the objective reads every format that no other objective has as its `row_format`.
    `ignored` lists the run's options that have no effect with this objective. `counted` names the items over which
    the loss is averaged; `noun` names the items that --batch counts.
    """

    loss_name: str
    options: tuple[str, ...] = ()
    lr_scale: float = 1.0
    has_reference: bool = False
    row_format: ClassVar[str] = ""
    ignored: ClassVar[tuple[str, ...]] = ()
    counted: ClassVar[str] = "tokens"
    noun: ClassVar[str] = "row"

    @property
    def unused(self) -> list[str]:
        """Names of options that have no effect: `ignored`, and options of other objectives."""
        used = {"objective", *self.options}
        return [*self.ignored, *(f.name for f in fields(Preference) if f.name not in used)]

    def loss(self, config: "FinetuneConfig") -> "Loss":
        """The loss for a `Trainer`, with the config's options."""
        loss: Loss = getattr(import_module("dunes.train.loss"), self.loss_name)
        return partial(loss, **{name: getattr(config, name) for name in self.options}) if self.options else loss

    def full_batch(self, config: "FinetuneConfig", size: int) -> "Batch":
        """A batch of `size` rows of the context length. Each row contains two examples of half this length
        (without packing, one example and padding); all targets of an example have a loss."""
        import numpy as np

        from dunes.data.batches import collate
        from dunes.data.examples import Example

        half = np.zeros(config.context_length // 2 + 1, np.int32)
        row = [Example(half, half == 0)] * (2 if config.packing else 1)
        return collate([row] * size, config.context_length, full=True)

    def score(self, config: "FinetuneConfig", loaded: "LoadedModel", batches: "Batches") -> "Score":
        """The score on one epoch of the validation batches."""
        from dunes.evaluate.text_loss import score_batches
        from dunes.runs.autosize import autocast_dtype

        return score_batches(loaded, batches.one_epoch(), autocast_dtype(config))


class PairObjective(Objective):
    """An objective on pairs of a chosen and a rejected answer. A pair takes two rows; rows are not packed."""

    row_format, counted, noun = "preference", "pairs", "pair"
    ignored = ("text_field", "train_on", "packing")

    def full_batch(self, config: "FinetuneConfig", size: int) -> "Batch":
        import torch

        ids = torch.zeros(2 * size, config.context_length, dtype=torch.long)
        batch = ids, ids, torch.arange(ids.shape[1]).expand_as(ids), torch.zeros(len(ids))
        return batch if self.has_reference else batch[:3]

    def score(self, config: "FinetuneConfig", loaded: "LoadedModel", batches: "Batches") -> "Score":
        """The score on one epoch of pairs. Until the reference is computed, only the chosen answers are scored."""
        from dunes.evaluate.preferences import score_pairs
        from dunes.runs.autosize import autocast_dtype

        if self.has_reference and batches.reference is None:
            chosen = [replace(pair, rejected=None) for pair in batches.examples]
            return super().score(config, loaded, replace(batches, examples=chosen))
        return score_pairs(loaded.model, batches.one_epoch(), self.loss(config), autocast_dtype(config))


OBJECTIVES: dict[ObjectiveName, Objective] = {
    "sft": Objective("next_token_loss"),
    "dpo": PairObjective("dpo_loss", ("beta", "label_smoothing", "length_normalized"), 1 / 20, has_reference=True),
    "orpo": PairObjective("orpo_loss", ("beta",), 1 / 4),
}
