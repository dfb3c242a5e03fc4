"""A mixture of experts, in place of an MLP. https://arxiv.org/abs/2101.03961, https://arxiv.org/abs/2401.04088"""

# Shapes: N tokens, E experts, k experts per token.

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dunes.ops import experts as forms
from dunes.parts.mlp import GatedMLP


class MoE(nn.Module):
    """Routes each token to its `top_k` experts with the highest probability and returns their weighted sum.

    `router` returns logits (N, E), whose softmax in float32 or wider gives the weights; with `renormalise` those
    of the chosen experts are scaled to sum to one. (With a top_k of 1 the router then gets no gradient.) Of
    experts with equal probability the first is chosen. `balance` is the coefficient of the load-balancing loss
    that it adds in training. Raises ValueError for a top_k below 1 or above the number of experts.
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
            raise ValueError(f"top_k is {top_k}; expected 1 to {len(experts)}, the number of experts")
        self.router, self.experts = router, nn.ModuleList(experts)
        self.top_k, self.renormalise, self.balance = top_k, renormalise, balance
        self.recorded: list[Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        """(..., dim) -> (..., dim)."""
        tokens = x.flatten(0, -2)
        logits = _at_least_float32(self.router(tokens))
        if self.recorded is not None and self.balance:
            self.recorded.append(logits)
        chosen, weights = self.route(logits)
        stacks = self._stacks(tokens)
        if stacks is None:
            y = forms.plain(tokens, list(self.experts), chosen, weights)
        else:
            y = forms.grouped(tokens, stacks, chosen, weights)
        return y.view_as(x)

    def route(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The chosen experts (N, k) for logits (N, E), most probable first, with weights of at least float32."""
        probs = _at_least_float32(logits).softmax(-1)
        # topk does not specify which of equal values it returns.
        chosen = torch.sort(probs.detach(), dim=-1, descending=True, stable=True).indices[:, : self.top_k]
        weights = probs.gather(-1, chosen)
        return chosen, weights / weights.sum(-1, keepdim=True) if self.renormalise else weights

    def auxiliary_losses(self, recorded: Sequence[Tensor], real: Tensor | None) -> dict[str, Tensor]:
        """`balance` times the `load_balance` of the recorded router logits, those of several calls together."""
        real_tokens = None if real is None else real.repeat(len(recorded))
        return {"balance": self.balance * load_balance(torch.cat([*recorded]), self.top_k, real_tokens)}

    def pack(self) -> bool:
        """Make each matrix of all experts a view of one storage, which the grouped form reads.

        The parameters stay the same objects. Returns False, and does nothing, if the experts are not unmodified
        gated MLPs of equal shape, dtype and activation, without biases.
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
        """The gate, up and down weights of all experts, if the experts are equal in structure."""
        experts = [e for e in self.experts if type(e) is GatedMLP and e.act is F.silu]
        linears = [(e.gate, e.up, e.down) for e in experts]
        if len(experts) < len(self.experts) or any(type(m) is not nn.Linear for row in linears for m in row):
            return None
        signatures = {
            tuple((m.weight.shape, m.weight.dtype, m.weight.device, m.bias) for m in row) for row in linears
        }
        if len(signatures) > 1 or any(m.bias is not None for m in linears[0]):
            return None
        return [[m.weight for m in column] for column in zip(*linears, strict=True)]

    def _stacks(self, x: Tensor) -> forms.Stacks | None:
        """The weights for the grouped form, if it applies and is faster."""
        matrices = self._matrices()
        tokens_per_expert = len(x) * self.top_k / len(self.experts)
        if matrices is None or not forms.fits(x, [weights[0] for weights in matrices], tokens_per_expert):
            return None
        if torch.compiler.is_compiling():
            return forms.Stacks(*matrices)
        self.pack()
        return forms.Stacks(*map(forms.stacked, matrices))


def load_balance(logits: Tensor, top_k: int, real: Tensor | None = None) -> Tensor:
    """The load-balancing loss of a layer's router logits (N, E); only tokens that are `real` (N, bool) count.

    E times the sum over experts of their share of tokens times their mean probability: `top_k` if all are used
    equally, E if `top_k` of them get every token (the convention of transformers;
    https://arxiv.org/abs/2101.03961 divides by `top_k`). Pooled layers look balanced if each prefers other
    experts, so training takes each layer alone.
    """
    if real is not None:  # padding may be NaN, and NaN times zero is NaN, forward and backward
        logits = logits.masked_fill(~real[:, None], 0.0)
    probs = _at_least_float32(logits).softmax(-1)
    chosen = torch.sort(probs.detach(), dim=-1, descending=True, stable=True).indices[:, :top_k]
    load = torch.zeros_like(probs).scatter_(-1, chosen, 1.0)
    if real is None:
        return logits.shape[-1] * (load.mean(0) * probs.mean(0)).sum()
    count = real.sum().clamp(min=1)
    load, probs = ((x * real[:, None]).sum(0) / count for x in (load, probs))
    return logits.shape[-1] * (load * probs).sum()


def _at_least_float32(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
