"""Score pairs of answers by an objective's loss, and compute the log-probabilities of the reference model."""

# Shapes: B pairs, T tokens.

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dunes import progress
from dunes.data.batches import collate
from dunes.data.examples import Example
from dunes.evaluate.text_loss import Score, evaluation, own_rows
from dunes.measure import ranks
from dunes.ops.cross_entropy import IGNORE
from dunes.train.loss import Loss

BATCH = 8
"""Pairs per forward pass."""


@dataclass(frozen=True)
class PreferenceScore(Score):
    """Sums over `pairs` pairs of answers with `tokens` targets: the loss, the reward `margins`, the number of
    positive margins (`correct`), and the cross entropy of the chosen answers (`chosen_tokens` tokens)."""

    pairs: int
    margins: float
    correct: float
    chosen_sum: float
    chosen_tokens: int

    unit = ""

    @property
    def loss(self) -> float:
        """The mean loss of a pair; for DPO, the loss of the reference model is ln 2."""
        return self.loss_sum / self.pairs

    @property
    def criterion(self) -> float:
        return self.loss

    @property
    def facts(self) -> dict[str, float]:
        chosen = self.chosen_sum / max(1, self.chosen_tokens)
        values = {
            "accuracy": self.correct / self.pairs,
            "margin": self.margins / self.pairs,
            "chosen_loss": chosen,
        }
        return {"loss": self.loss, **values, "pairs": self.pairs, "tokens": self.tokens}

    @property
    def text(self) -> str:
        facts = self.facts
        return f"{self.loss:.4f} per pair, accuracy {facts['accuracy']:.1%}, margin {facts['margin']:.3g}"

    @property
    def record(self) -> dict[str, float]:
        return {f"validation_{name}": self.facts[name] for name in ("loss", "accuracy", "margin", "chosen_loss")}

    def compare(self, before: Score) -> list[str]:
        # With a reference, the loss starts at ln 2, and `before` is the base model's score on chosen answers.
        first, chosen = math.log(2), before.loss
        if isinstance(before, PreferenceScore):
            first, chosen = before.loss, before.facts["chosen_loss"]
        warns = not self.loss < first
        advice = "try a lower --lr, or check the pairs"
        return [
            f"validation loss of preferences: {first:.4f} before, {self.loss:.4f} after",
            f"loss of chosen answers: {chosen:.3f} nats/token before, {self.facts['chosen_loss']:.3f} after",
            *[f"warning: no better than the base model; {advice}"] * warns,
        ]


def score_pairs(
    model: nn.Module, batches: Iterable[tuple[Tensor, ...]], loss: Loss, dtype: torch.dtype
) -> PreferenceScore:
    """Score the preference pairs in batches of `Batches` by a loss such as `dpo_loss`, and by its metrics."""
    sums, targets = np.zeros((4, 2)), 0
    with evaluation(model, dtype) as device:
        for batch in (own_rows(batch, 2) for batch in batches):
            total, pairs, metrics = loss(model, [part.to(device) for part in batch])  # type: ignore[misc]
            rows = [(total, pairs), *(metrics[name] for name in ("margin", "accuracy", "chosen_loss"))]
            sums += [[float(value) for value in row] for row in rows]
            targets += int((batch[1] != IGNORE).sum())
    totals = ranks.all_reduce_sum(*sums.flatten(), targets)
    loss_sum, number, margins, _, correct, _, chosen, tokens, total = totals
    return PreferenceScore(loss_sum, int(total), 0, int(number), margins, correct, chosen, int(tokens))


def reference_logprobs(
    model: nn.Module, examples: Sequence[Example], context_length: int, dtype: torch.dtype
) -> NDArray[np.float32]:
    """The summed log-probabilities (examples, 2) of chosen and rejected answers, truncated to the context length.

    Pairs that `Batches` leaves out get 0. The ranks share the work; each returns the full result.
    """
    scored = [i for i, e in enumerate(examples) if e.targets(context_length)]
    order = sorted(scored, key=lambda i: -len(examples[i]))
    with evaluation(model, dtype) as device:
        result = torch.zeros(len(examples), 2, device=device)
        for chunk in progress.each([order[i : i + BATCH] for i in range(0, len(order), BATCH)]):
            batch = collate([[side] for i in chunk for side in examples[i].sides], context_length)
            own = own_rows((*batch, torch.tensor(chunk).repeat_interleave(2)), 2)
            ids, targets, positions, index = (part.to(device) for part in own)
            losses, counts, *_ = model(ids, positions, targets=targets, by_row=True)
            result.index_add_(0, index[::2], -losses.float().where(counts > 0, 0.0).view(-1, 2))
        ranks.all_reduce(result)
    array: NDArray[np.float32] = result.cpu().numpy()
    return array
