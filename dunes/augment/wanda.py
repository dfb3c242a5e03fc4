"""Pruning without an update of what stays: by magnitude, or by magnitude times the norm of the input (Wanda).

https://arxiv.org/abs/2306.11695
"""

# Shapes: O outputs, I inputs.

import torch
from torch import Tensor

from dunes.augment.calibrate import Gram


def wanda_scores(weight: Tensor, gram: Gram) -> Tensor:
    """|w| times the norm of its input over all tokens (O, I), in float32."""
    return weight.detach().float().abs() * gram.matrix.diagonal().sqrt()


def smallest(scores: Tensor, sparsity: float) -> Tensor:
    """Where the scores are lowest; as published, one weight more than the fraction.

    Of equal ones so many of the first, or a layer with few different values would lose more; but all zeros.
    """
    count = int(scores.numel() * sparsity) + 1
    threshold = scores.flatten().kthvalue(count).values
    chosen = scores <= threshold
    if threshold > 0 and (extra := int(chosen.sum()) - count):
        chosen.view(-1)[(scores == threshold).flatten().nonzero()[-extra:]] = False
    return chosen


def lowest(scores: Tensor, count: int, dim: int) -> Tensor:
    """Where the `count` lowest scores are along `dim`; of equal ones the first."""
    order = torch.sort(scores, stable=True, dim=dim).indices.narrow(dim, 0, count)
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(dim, order, True)


def lowest_of_groups(scores: Tensor, kept: int, group: int) -> Tensor:
    """Where all but the `kept` highest scores of every `group` consecutive inputs of an output are (O, I)."""
    return lowest(scores.view(len(scores), -1, group), group - kept, 2).flatten(1)
