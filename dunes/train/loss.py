"""Losses for a Trainer: `loss(model, batch) -> (sum, count)`, never a mean.

Sums and counts of unequal micro-batches can be added, but means cannot; with sums, gradient accumulation over
several micro-batches equals one large batch. The result may have a third element with metrics: pairs (sum, count)
of scalars or vectors, by name. Metrics are added in the same way.
"""

# Shapes: B batch, T tokens, V vocabulary.

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dunes.ops.cross_entropy import IGNORE
from dunes.parts.decoder import LossSums, RowLosses

Metrics = Mapping[str, tuple[Tensor, Tensor]]
Loss = Callable[[nn.Module, Any], tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Metrics]]


def next_token(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    """Summed cross entropy in nats and the number of trained tokens.

    The batch is a tensor of windows of ids (B, T + 1), or a tuple (ids, targets) or (ids, targets, positions) of
    tensors (B, T). A position without a target has the target IGNORE. Packed documents need positions.
    """
    parts = (batch[:, :-1], batch[:, 1:]) if isinstance(batch, Tensor) else batch
    ids, targets, *positions = parts
    return _summed(model(ids, *positions).flatten(0, 1), targets.flatten())


def cross_entropy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Summed cross entropy of class scores `model(x)` (B, classes) for labels y (B,), and the number of labels.

    Raises ValueError if y contains class probabilities, because their elements would be counted as labels.
    """
    x, y = batch
    if y.is_floating_point():
        raise ValueError(
            f"the labels are {y.dtype} of {tuple(y.shape)}; expected whole numbers; for class probabilities, "
            "write a loss of your own"
        )
    return _summed(model(x), y)


def mean_squared(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Summed squared difference of `model(x)` and y, and the number of elements.

    Raises ValueError if the shapes differ, since PyTorch would silently broadcast them.
    """
    x, y = batch
    guess = model(x)
    if guess.shape != y.shape:
        raise ValueError(f"the model's outputs are {tuple(guess.shape)}, but the targets {tuple(y.shape)}")
    return (guess.float() - y).square().sum(), torch.tensor(y.numel(), device=y.device)


def _summed(scores: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    total = F.cross_entropy(scores.float(), targets, ignore_index=IGNORE, reduction="sum")
    return total, (targets != IGNORE).sum()


def next_token_loss(model: nn.Module, batch: Tensor | Sequence[Tensor]) -> LossSums:
    """The summed loss of a decoder and the number of targets, computed inside the model.

    The batch is windows of ids (B, T + 1), or a batch of `Batches`: ids, targets and positions, each (B, T).
    Without positions, each row is one document. The decoder may be wrapped or compiled.
    """
    parts = (batch[:, :-1], batch[:, 1:]) if isinstance(batch, Tensor) else batch
    ids, targets, *positions = parts
    loss: LossSums = model(ids, *positions, targets=targets)
    return loss


@contextmanager
def _without_dropout(model: nn.Module) -> Iterator[None]:
    """Inside the `with` block, set all dropout probabilities to 0, except those of adapters."""
    names = {"p": nn.Dropout, "dropout": nn.Module}
    kept = [(m, name, getattr(m, name, None)) for m in model.modules() for name, kind in names.items()
            if isinstance(m, kind)]  # fmt: skip
    kept = [entry for entry in kept if isinstance(entry[2], float) and entry[2]]
    try:
        for module, name, _ in kept:
            setattr(module, name, 0.0)
        yield
    finally:
        for module, name, value in kept:
            setattr(module, name, value)


def dpo_loss(
    model: nn.Module,
    batch: Sequence[Tensor],
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    length_normalized: bool = False,
) -> LossSums:
    """The summed DPO loss of pairs of answers, and the number of pairs. https://arxiv.org/abs/2305.18290

    The batch comes from `Batches`: ids, targets and positions, each (2B, T), and the reference model's
    log-probabilities (2B,). Rows alternate between chosen and rejected answers. The reward of an answer is `beta`
    times (log-probability - log-probability of the reference model). The margin of a pair is the chosen answer's
    reward minus the rejected answer's reward; the loss is -log sigmoid(margin). `label_smoothing` is the
    probability that a label is wrong (conservative DPO, https://ericmitchell.ai/cdpo.pdf). With
    `length_normalized`, each log-probability is divided by the answer's number of targets (section 5 of
    https://arxiv.org/abs/2411.15124). A pair is not counted if one of its answers has no target.

    The metrics `rewards_chosen`, `rewards_rejected`, `margin` and `accuracy` (the fraction of positive margins)
    are means over pairs. The metric `chosen_loss` is in nats/token. The model's own dropout is off, since its
    noise would be part of each margin; dropout of adapters stays on.
    """
    losses, counts, *_ = rows = _row_losses(model, batch)
    rewards = beta * (-losses - batch[3])
    if length_normalized:
        rewards = rewards / counts.clamp(min=1)
    margin = rewards[::2] - rewards[1::2]
    each = -(1 - label_smoothing) * F.logsigmoid(margin) - label_smoothing * F.logsigmoid(-margin)
    return _pair_sums(each, rewards, rows)


def orpo_loss(model: nn.Module, batch: Sequence[Tensor], beta: float = 0.1) -> LossSums:
    """The summed ORPO loss of pairs of answers, and the number of pairs. https://arxiv.org/abs/2403.07691

    The batch is as in `dpo_loss`, without the reference's log-probabilities. The odds of an answer are p / (1 -
    p), where p is the exponential of its mean log-probability. The loss is the cross entropy of the chosen answer
    in nats/token, minus `beta` times log sigmoid of the log odds ratio. Metrics, dropout and pairs without a
    target are as in `dpo_loss`; the reward of an answer is `beta` times its mean log-probability.
    """
    losses, counts, *_ = rows = _row_losses(model, batch)
    loss = losses / counts.clamp(min=1)
    logprobs = -loss.clamp(min=torch.finfo(loss.dtype).eps)  # an answer with p = 1 would have infinite odds
    log_odds = logprobs - torch.log(-torch.expm1(logprobs))
    each = loss[::2] - beta * F.logsigmoid(log_odds[::2] - log_odds[1::2])
    return _pair_sums(each, beta * logprobs, rows)


def _row_losses(model: nn.Module, batch: Sequence[Tensor]) -> RowLosses:
    """The losses of the rows of a batch, with the model's own dropout off."""
    ids, targets, positions, *_ = batch
    with _without_dropout(model):
        rows: RowLosses = model(ids, positions, targets=targets, by_row=True)
    return rows


def _pair_sums(each: Tensor, rewards: Tensor, rows: RowLosses) -> LossSums:
    """The summed loss, the number of pairs, and the metrics of `dpo_loss`; `each` (B,) contains the losses of the
    pairs."""
    losses, counts, auxiliary, metrics = rows
    real = (counts.view(-1, 2) > 0).all(1)
    chosen, rejected = rewards.view(-1, 2).masked_fill(~real[:, None], 0.0).unbind(1)
    margin, pairs, total = chosen - rejected, real.sum(), (each * real).sum()
    for name, loss in auxiliary.items():
        total = total + pairs * loss
        metrics[name] = (pairs * loss).detach(), pairs
    sums = {"rewards_chosen": chosen, "rewards_rejected": rejected, "margin": margin, "accuracy": margin > 0}
    metrics |= {name: (values.detach().float().sum(), pairs) for name, values in sums.items()}
    metrics["chosen_loss"] = losses[::2].detach().sum(), counts[::2].sum()
    return total, pairs, metrics
