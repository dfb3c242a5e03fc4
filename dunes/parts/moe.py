"""A mixture of experts in the place of an MLP. https://arxiv.org/abs/2101.03961, https://arxiv.org/abs/2401.04088"""

# Shapes: N tokens, E experts, k experts a token.

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dunes.ops import experts as forms
from dunes.parts.mlp import GatedMLP
from dunes.plural import plural

Routed = list[tuple["MoE", Tensor]]


class MoE(nn.Module):
    """Each token goes to the `top_k` experts that the router likes best, and gets their weighted sum.

    `router` gives (N, E) logits, of which a softmax in float32 or wider makes weights; with `renormalise` those of
    the chosen experts are made to add up to one. (With one expert a token that leaves its router
    without a gradient.) Of equally liked experts the first is taken. `balance` weighs the loss that
    `Decoder.nats` adds in training. Raises ValueError for a top_k that cannot be.
    """

    supports_packing = True

    def __init__(
        self,
        router: nn.Module,
        experts: Sequence[nn.Module],
        top_k: int,
        *,
        renormalise: bool = True,
        balance: float = 0.0,
    ) -> None:
        super().__init__()
        if not 1 <= top_k <= len(experts):
            raise ValueError(f"a token cannot go to {top_k} of {plural(len(experts), 'expert')}")
        self.router, self.experts = router, nn.ModuleList(experts)
        self.top_k, self.renormalise, self.balance = top_k, renormalise, balance
        self._routed: Routed | None = None

    def forward(self, x: Tensor) -> Tensor:
        """(..., dim) -> (..., dim)."""
        tokens = x.flatten(0, -2)
        logits = _widened(self.router(tokens))
        if self._routed is not None:
            self._routed.append((self, logits))
        chosen, weights = self.route(logits)
        stacks = self._stacks(tokens)
        if stacks is None:
            y = forms.plain(tokens, list(self.experts), chosen, weights)
        else:
            y = forms.grouped(tokens, stacks, F.silu, chosen, weights)
        return y.view_as(x)

    def route(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Of logits (N, E), the chosen experts (N, k), likeliest first, and their weights in float32 or wider."""
        likely = _widened(logits).softmax(-1)
        # topk leaves open which of equals it takes.
        chosen = torch.sort(likely.detach(), dim=-1, descending=True, stable=True).indices[:, : self.top_k]
        weights = likely.gather(-1, chosen)
        return chosen, weights / weights.sum(-1, keepdim=True) if self.renormalise else weights

    def pack(self) -> bool:
        """Make the experts' weights views of one storage for each matrix, which the grouped form reads.

        The parameters stay the same objects. False, and nothing is done, where the experts are not gated
        MLPs of one shape, type and activation, without biases or changes.
        """
        matrices = self._matrices()
        if matrices is None:
            return False
        with torch.no_grad():
            for weights in matrices:
                if not forms.adjacent(weights):
                    for weight, view in zip(weights, torch.stack(weights), strict=True):
                        weight.data = view
        return True

    def _matrices(self) -> list[list[Tensor]] | None:
        """All experts' gates, ups and downs, if they are alike."""
        experts = [e for e in self.experts if type(e) is GatedMLP and e.act is F.silu]
        linears = [(e.gate, e.up, e.down) for e in experts]
        if len(experts) < len(self.experts) or any(type(m) is not nn.Linear for row in linears for m in row):
            return None
        kinds = {tuple((m.weight.shape, m.weight.dtype, m.weight.device, m.bias) for m in row) for row in linears}
        if len(kinds) > 1 or any(m.bias is not None for m in linears[0]):
            return None
        return [[m.weight for m in column] for column in zip(*linears, strict=True)]

    def _stacks(self, x: Tensor) -> forms.Stacks | None:
        """What the grouped form reads, if it can serve and is the faster one."""
        matrices = self._matrices()
        each = len(x) * self.top_k / len(self.experts)
        if matrices is None or not forms.fits(x, [weights[0] for weights in matrices], each):
            return None
        if torch.compiler.is_compiling():
            return forms.Stacks(*matrices)
        self.pack()
        return forms.Stacks(*map(forms.stacked, matrices))


@contextmanager
def routing(model: nn.Module) -> Iterator[Routed]:
    """Collects the router's logits (N, E) of each mixture with a `balance`, in training only."""
    routed: Routed = []
    layers = [m for m in model.modules() if isinstance(m, MoE) and m.balance] if model.training else []
    for layer in layers:
        layer._routed = routed
    try:
        yield routed
    finally:
        # Activation checkpointing computes forwards again, later.
        for layer in layers:
            layer._routed = None


def imbalance(routed: Routed, real: Tensor | None = None) -> Tensor:
    """The mean over layers of their weighted `load_balance`, layer by layer; `real` (N,) excludes padding.

    What a layer routed in several calls counts together; with `real` each call is of the same N tokens.
    """
    calls: dict[MoE, list[Tensor]] = {}
    for layer, logits in routed:
        calls.setdefault(layer, []).append(logits)
    losses = []
    for layer, parts in calls.items():
        counted = None if real is None else real.repeat(len(parts))
        losses.append(layer.balance * load_balance([torch.cat(parts)], layer.top_k, counted))
    return torch.stack(losses).mean()


def load_balance(layers: Sequence[Tensor], top_k: int, real: Tensor | None = None) -> Tensor:
    """How unevenly tokens use experts, by the router's logits (N, E) of one or of several layers together.

    The experts times the sum over them of their share of tokens times their mean probability: `top_k` if
    all are used alike, the number of experts if `top_k` of them get everything (the convention of
    transformers; https://arxiv.org/abs/2101.03961 divides by `top_k`). Several layers together look even
    if each prefers other experts, so for training each is taken alone. Only tokens that are `real`
    (N, bool) count.
    """
    shares = [_shares(logits, top_k, real) for logits in layers]
    load, likely = (torch.stack(part).mean(0) for part in zip(*shares, strict=True))
    return layers[0].shape[-1] * (load * likely).sum()


def _shares(logits: Tensor, top_k: int, real: Tensor | None) -> tuple[Tensor, Tensor]:
    """The share of tokens that each expert (E,) is chosen by, and its mean probability."""
    if real is not None:  # NaN times zero is NaN, forward and backward
        logits = logits.masked_fill(~real[:, None], 0.0)
    likely = _widened(logits).softmax(-1)
    chosen = torch.sort(likely.detach(), dim=-1, descending=True, stable=True).indices[:, :top_k]
    load = torch.zeros_like(likely).scatter_(-1, chosen, 1.0)
    if real is None:
        return load.mean(0), likely.mean(0)
    count = real.sum().clamp(min=1)
    return (load * real[:, None]).sum(0) / count, (likely * real[:, None]).sum(0) / count


def _widened(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
