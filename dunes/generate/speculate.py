"""Speculation: ids that may come next are proposed cheaply and verified together by one forward of the model.

The text has the distribution that it has without: https://arxiv.org/abs/2211.17192, https://arxiv.org/abs/2302.01318.
"""

# Shapes: V vocabulary.

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from dunes.generate.context_index import last_match
from dunes.generate.prefix_cache import PrefixCache
from dunes.generate.sampling import Sampler, greedy


@dataclass(frozen=True)
class Proposal:
    """Ids that may follow a text; if each was drawn, `probs` are the distributions (V,) that it was drawn from."""

    ids: Sequence[int] = ()
    probs: Sequence[Tensor] = ()


Proposer = Callable[[Sequence[int], int, Sampler], Proposal]
"""(the ids so far, how many to propose at most, the sampler of the text) -> proposal, which may be empty."""


def look_up(
    ids: Sequence[int], limit: int, sample: Sampler, *, count: int = 7, longest: int = 8, shortest: int = 2
) -> Proposal:
    """Propose what followed the last earlier occurrence of the text's end, of as many as possible of its last ids.

    It is repeated if it is shorter than `count`. Known as prompt look-up decoding. Ids are below 0x110000.
    """
    text = "".join(map(chr, ids))  # a search in text is C
    length, position = last_match(text, text[max(0, len(text) - longest) :])
    return Proposal((list(ids[position:]) * count)[: min(count, limit)] if length >= shortest else ())


class DraftModel:
    """Proposes what a smaller model with the same vocabulary writes, by the sampler of the text.

    Each text that is written at the same time needs a draft of its own, which keeps the cache of that text.
    """

    def __init__(self, model: nn.Module, context_length: int, count: int = 4) -> None:
        self.context_length, self.count, self.cache = context_length, count, PrefixCache(model)

    def __call__(self, ids: Sequence[int], limit: int, sample: Sampler) -> Proposal:
        half = max(1, self.context_length // 2)
        count = min(self.count, limit, self.context_length - half)
        # A window that moved with each id would be evaluated anew each time.
        start = -(-max(0, len(ids) + count - self.context_length) // half) * half
        self.cache.reserve(min(self.context_length, 1 << (len(ids) + count).bit_length()))
        text, probs = list(ids), []
        for _ in range(count):
            logits = sample.process(self.cache.logits({0: text[start:]})[0][0], text)
            text.append(int(sample.choose(logits)))
            probs.append(logits.softmax(-1))
        return Proposal(text[len(ids) :], () if sample.choose is greedy else probs)


def first_proposal(*proposers: Proposer) -> Proposer:
    """A proposer that asks each of these until one proposes something."""

    def propose(ids: Sequence[int], limit: int, sample: Sampler) -> Proposal:
        return next((p for proposer in proposers if (p := proposer(ids, limit, sample)).ids), Proposal())

    return propose


def choose(sample: Sampler, logits: Tensor, ids: Sequence[int], proposal: Proposal, index: int) -> Tensor:
    """The next id () for logits (V,) after `ids`, which end with the first `index` ids of the proposal.

    It is distributed as without the proposal, and as often as possible equal to the one proposed next.
    """
    logits = sample.process(logits, ids)
    if index < len(proposal.probs):
        logits = _correct(logits.softmax(-1), proposal.probs[index], proposal.ids[index]).log()
    return sample.choose(logits)


def _correct(p: Tensor, q: Tensor, proposed: int) -> Tensor:
    """The distribution to draw from when `proposed` was drawn from q, so that in all the draw is from p.

    With probability min(1, p/q) it is the proposed id, else one by the positive part of p - q.
    """
    if len(p) != len(q):
        raise ValueError(f"a draft has {len(q)} ids, the model {len(p)}; use one with the same vocabulary")
    acceptance = (p[proposed] / q[proposed]).clamp(max=1)
    residual = (p - q).clamp(min=0)
    mixed = residual * ((1 - acceptance) / residual.sum().clamp(min=1e-30))
    mixed[proposed] += acceptance
    return mixed
