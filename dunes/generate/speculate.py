"""Speculative decoding: ids are proposed at little cost, and verified together by one forward of the model.

The distribution of texts stays the same: https://arxiv.org/abs/2211.17192, https://arxiv.org/abs/2302.01318.
"""

# Shapes: V vocabulary.

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from dunes.generate.context_index import last_match
from dunes.generate.prefix_cache import PrefixCache
from dunes.generate.sampling import Sampler, greedy
from dunes.parts.decoder import recurrent_part


@dataclass(frozen=True)
class Proposal:
    """Ids that may follow a text. If the ids were sampled, `probs` are their distributions (V,)."""

    ids: Sequence[int] = ()
    probs: Sequence[Tensor] = ()


Proposer = Callable[[Sequence[int], int, Sampler], Proposal]
"""(ids so far, maximum number of proposed ids, sampler of the text) -> proposal, which may be empty."""


def look_up(
    ids: Sequence[int], limit: int, sample: Sampler, *, count: int = 7, longest: int = 8, shortest: int = 2
) -> Proposal:
    """Propose the ids after the last earlier occurrence of the text's longest repeated suffix (prompt lookup).

    The suffix has `shortest` to `longest` ids. A shorter proposal is repeated until it has `count` ids. Raises
    ValueError for ids of 0x110000 or more, the limit of `chr`.
    """
    text = "".join(map(chr, ids))  # string search is fast
    length, position = last_match(text, text[max(0, len(text) - longest) :])
    return Proposal((list(ids[position:]) * count)[: min(count, limit)] if length >= shortest else ())


def check_rewinds(model: nn.Module) -> None:
    """Raise ValueError for a model whose recurrent state cannot drop the ids of a rejected proposal."""
    if name := recurrent_part(model):
        raise ValueError(
            f"{name} has a recurrent state, which would be computed again after each rejected proposal; "
            "leave out lookup and draft"
        )


class DraftModel:
    """Proposes ids that a smaller model with the same vocabulary generates with the text's sampler.

    Texts that are generated at the same time need separate draft models, since a draft model caches the keys and
    values of one text.
    """

    def __init__(self, model: nn.Module, context_length: int, count: int = 4) -> None:
        self.context_length, self.count, self.cache = context_length, count, PrefixCache(model)

    def __call__(self, ids: Sequence[int], limit: int, sample: Sampler) -> Proposal:
        half = max(1, self.context_length // 2)
        count = min(self.count, limit, self.context_length - half)
        # The window shifts by half its length, since each shift evaluates the entire window again.
        start = -(-max(0, len(ids) + count - self.context_length) // half) * half
        self.cache.reserve(min(self.context_length, 1 << (len(ids) + count).bit_length()))
        text, probs = list(ids), []
        for _ in range(count):
            logits = sample.process(self.cache.logits({0: text[start:]})[0][0], text)
            text.append(int(sample.choose(logits)))
            probs.append(logits.softmax(-1))
        return Proposal(text[len(ids) :], () if sample.choose is greedy else probs)


def first_proposal(*proposers: Proposer) -> Proposer:
    """A proposer that calls these proposers in order until a proposal has an id."""

    def propose(ids: Sequence[int], limit: int, sample: Sampler) -> Proposal:
        return next((p for proposer in proposers if (p := proposer(ids, limit, sample)).ids), Proposal())

    return propose


def choose(sample: Sampler, logits: Tensor, ids: Sequence[int], proposal: Proposal, index: int) -> Tensor:
    """The next id () for logits (V,) after `ids`, which end with the first `index` ids of the proposal.

    The id has the same distribution as without a proposal, and equals the proposed id as often as possible.
    """
    logits = sample.process(logits, ids)
    if index < len(proposal.probs):
        logits = _correct(logits.softmax(-1), proposal.probs[index], proposal.ids[index]).log()
    return sample.choose(logits)


def _correct(p: Tensor, q: Tensor, proposed: int) -> Tensor:
    """The distribution to sample from after `proposed` was sampled from `q`, so that results follow `p`.

    The proposed id gets probability `min(1, p / q)`; the rest is shared in proportion to `max(p - q, 0)`.
    """
    acceptance = (p[proposed] / q[proposed]).clamp(max=1)
    residual = (p - q).clamp(min=0)
    mixed = residual * ((1 - acceptance) / residual.sum().clamp(min=1e-30))
    mixed[proposed] += acceptance
    return mixed
