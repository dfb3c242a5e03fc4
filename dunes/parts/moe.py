"""A mixture of experts, which replaces an MLP, and a noisy router.

https://arxiv.org/abs/2101.03961, https://arxiv.org/abs/2401.04088, https://arxiv.org/abs/2412.19437
"""

# Shapes: N tokens, E experts, k experts per token, D width.

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dunes import tree
from dunes.measure import ranks
from dunes.ops import expert_products as forms
from dunes.parts.layers import GatedMLP, at_least_float32

TINY = 1e-20
"""Minimum divisor of the expert weights, so that gradients stay finite in float32."""
LEAST_NOISE = 1e-2


class MoE(nn.Module):
    """Routes each token to the `top_k` most probable experts and returns the weighted sum of their outputs.

    `router` returns logits (N, E). The weights are the softmax of the logits, in float32 or wider. With
    `renormalise`, the weights of the chosen experts are scaled to sum to one; with a `top_k` of 1, the router then
    gets a gradient only from the auxiliary losses. Ties go to the first expert. `shared` experts get every token,
    and their outputs are added without a weight. In training, `balance` times `load_balance` and `z_loss` times
    `router_z` are added to the loss. Raises ValueError for a top_k below 1 or above the number of experts, and for
    a repeated expert.

    With a `bias_rate`, experts are chosen by probability plus `selection_bias` (E,); the weights do not include
    the bias. After each step that trains the router, the bias is raised by `bias_rate` for experts whose load is
    below the mean, and lowered for experts whose load is above the mean (loss-free balancing,
    https://arxiv.org/abs/2408.15664). Loads are summed over all micro-batches and ranks. The bias is cast together
    with the weights, so train in float32. `biased` adds a selection bias that training does not change.

    `sigmoid`, `factor` and `groups` follow DeepSeek V3. With `sigmoid`, the probabilities are the sigmoids of the
    logits. The weights are multiplied by `factor`. Successive experts form `groups` groups of equal size. A
    group's score is the sum of its two highest biased probabilities, and experts are chosen from the `top_groups`
    groups with the highest scores. Raises ValueError like `check_groups`.
    """

    supports_packing = True
    mutable_buffers = ("selection_bias", "load")
    selection_bias: Tensor | None
    load: Tensor
    shared: nn.ModuleList | None
    # Class attributes, so that the saved structure of models without these settings does not change.
    z_loss, bias_rate, sigmoid, factor, groups, top_groups = 0.0, 0.0, False, 1.0, 1, 1

    def __init__(
        self,
        router: nn.Module,
        experts: Sequence[nn.Module],
        top_k: int,
        *,
        renormalise: bool = True,
        balance: float = 0.0,
        z_loss: float = 0.0,
        bias_rate: float = 0.0,
        shared: Sequence[nn.Module] = (),
        biased: bool = False,
        sigmoid: bool = False,
        factor: float = 1.0,
        groups: int = 1,
        top_groups: int = 1,
    ) -> None:
        super().__init__()
        if not 1 <= top_k <= len(experts):
            raise ValueError(f"top_k is {top_k}; expected 1 to {len(experts)}, the number of experts")
        check_groups(len(experts), top_k, groups, top_groups)
        if len({*map(id, (*experts, *shared))}) < len(experts) + len(shared):
            raise ValueError("the same expert occurs twice; build or copy a new one for each")
        self.router, self.experts = router, nn.ModuleList(experts)
        self.top_k, self.renormalise, self.balance = top_k, renormalise, balance
        self.recorded: list[Tensor] | None = None
        self.register_module("shared", nn.ModuleList(shared) if shared else None)
        self.register_buffer("selection_bias", torch.zeros(len(experts)) if biased else None)
        for name, value in (
            ("sigmoid", sigmoid),
            ("factor", factor),
            ("groups", groups),
            ("top_groups", top_groups),
        ):
            if value != getattr(MoE, name):
                setattr(self, name, value)
        self.extend(z_loss, bias_rate)

    def extend(self, z_loss: float = 0.0, bias_rate: float = 0.0, shared: Sequence[nn.Module] = ()) -> None:
        """Add shared experts, and set `z_loss` and `bias_rate` if they are not 0."""
        device = next((p.device for p in self.parameters()), None)
        if z_loss:
            self.z_loss = z_loss
        if bias_rate:
            self.bias_rate = bias_rate
            if self.selection_bias is None:
                self.register_buffer("selection_bias", torch.zeros(len(self.experts), device=device))
            # `load` is a buffer, so that a skipped step restores it.
            self.register_buffer("load", torch.zeros(len(self.experts), dtype=torch.long, device=device))
        if shared:
            self.shared = nn.ModuleList([*(self.shared or ()), *shared])

    def forward(self, x: Tensor) -> Tensor:
        """(..., dim) -> (..., dim)."""
        tokens = x.flatten(0, -2)
        logits = at_least_float32(self.router(tokens))
        if self.recorded is not None:
            self.recorded.append(logits)
        expert_ids, weights = self.route(logits)
        stacks = self._stacks(tokens)
        if stacks is None:
            y = forms.plain(tokens, list(self.experts), expert_ids, weights)
        else:
            y = forms.grouped(tokens, stacks, expert_ids, weights)
        for expert in self.shared or ():
            y = y + expert(tokens).to(y.dtype)
        return y.view_as(x)

    def route(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The experts (N, k) chosen for logits (N, E), highest first, and their weights (float32 or wider)."""
        probs = self._probabilities(at_least_float32(logits))
        expert_ids = self._choose(probs)
        weights = probs.gather(-1, expert_ids)
        # With a selection bias, the probabilities of chosen experts may underflow.
        total = weights.sum(-1, keepdim=True).clamp(min=TINY)
        weights = weights / total if self.renormalise else weights
        return expert_ids, weights if self.factor == 1 else weights * self.factor

    def _probabilities(self, logits: Tensor) -> Tensor:
        return logits.sigmoid() if self.sigmoid else logits.softmax(-1)

    def _choose(self, probs: Tensor) -> Tensor:
        probs = probs if self.selection_bias is None else probs + self.selection_bias
        if self.groups > 1:
            members = torch.unflatten(probs, -1, (self.groups, -1))
            chosen = choose_experts(members.topk(2).values.sum(-1), self.top_groups)
            closed = torch.ones_like(members[..., 0], dtype=torch.bool).scatter_(-1, chosen, False)
            probs = members.masked_fill(closed[..., None], -torch.inf).flatten(-2)
        return choose_experts(probs, self.top_k)

    def auxiliary_losses(self, recorded: Sequence[Tensor], real: Tensor | None) -> dict[str, Any]:
        """The auxiliary losses, already multiplied by their coefficients.

        The losses are computed from the router logits recorded in all calls. The metric `expert_load` is a pair of
        the tokens per expert (E,) and the number of tokens. Tokens that are not `real` do not count.
        """
        real = None if real is None else real.repeat(len(recorded))
        logits = _without_padding(torch.cat([*recorded]), real)
        probs = self._probabilities(logits)
        load = _one_hot(self._choose(probs), probs, real)
        tokens = load.detach().sum(0)
        if self.bias_rate:
            self.load += tokens.long()
        losses: dict[str, Any] = {"expert_load": (tokens, _count(probs, real))}
        if self.balance:
            shares = probs / probs.sum(-1, keepdim=True).clamp(min=TINY) if self.sigmoid else probs
            losses["balance"] = self.balance * _balance(load, shares, real)
        if self.z_loss:
            losses["router_z"] = self.z_loss * router_z(logits, real)
        return losses

    def after_step(self) -> None:
        """Adjust the selection bias by the loads since the last step, if the router is trainable."""
        if self.selection_bias is None or not self.bias_rate:
            return
        ranks.all_reduce(self.load)
        if any(p.requires_grad for p in tree.innermost(self.router).parameters()):
            below_mean = self.load.sum() - len(self.experts) * self.load
            self.selection_bias += self.bias_rate * below_mean.sign()
        self.load.zero_()

    def pack(self) -> bool:
        """Store the experts' matrices one after another, as the function `grouped` reads them.

        The gate weights of all experts become views of one storage; so do the up weights and the down weights. The
        parameters stay the same objects. The experts must be unmodified `GatedMLP`s with silu, of equal shape,
        dtype and device, without biases; otherwise returns False and changes nothing.
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
        """Gate, up and down weights of all experts; None if the experts differ in structure (see `pack`)."""
        experts = [e for e in self.experts if type(e) is GatedMLP and e.act is F.silu]
        linears = [(e.gate, e.up, e.down) for e in experts]
        if len(experts) < len(self.experts) or any(not tree.is_dense(m) for row in linears for m in row):
            return None
        signature = lambda m: (m.weight.shape, m.weight.dtype, m.weight.device, m.bias)
        signatures = {tuple(map(signature, row)) for row in linears}
        if len(signatures) > 1 or any(m.bias is not None for m in linears[0]):
            return None
        return [[m.weight for m in column] for column in zip(*linears, strict=True)]

    def _stacks(self, x: Tensor) -> forms.Stacks | None:
        """The weights for the function `grouped`; None if `grouped` does not apply or is not faster."""
        matrices = self._matrices()
        tokens_per_expert = len(x) * self.top_k / len(self.experts)
        if matrices is None or not forms.fits(x, [weights[0] for weights in matrices], tokens_per_expert):
            return None
        if torch.compiler.is_compiling():
            return forms.Stacks(*matrices)
        self.pack()
        return forms.Stacks(*map(forms.stack_view, matrices))


def check_groups(experts: int, top_k: int, groups: int, top_groups: int, place: str = "") -> None:
    """Raise ValueError unless groups have one size (>= 2 if several) and the chosen ones have >= `top_k` experts.

    The message starts with `place`.
    """
    size, rest = divmod(experts, groups)
    if rest or (groups > 1 and size < 2) or not top_k <= top_groups * size <= experts:
        raise ValueError(
            f"{place}{top_groups} of {groups} groups of {experts} experts, of which a token gets {top_k}; "
            f"expected equal groups of 2 or more, and at least {top_k} experts in the chosen groups"
        )


def choose_experts(scores: Tensor, top_k: int) -> Tensor:
    """The experts (N, k) with the highest scores (N, E), highest first; ties go to the first expert."""
    # `topk` does not define the order of equal values.
    return torch.sort(scores.detach(), dim=-1, descending=True, stable=True).indices[:, :top_k]


def load_balance(logits: Tensor, top_k: int, real: Tensor | None = None) -> Tensor:
    """Load-balancing loss of a layer's router logits (N, E); only tokens that are `real` (N, bool) count.

    The loss is E times the sum over experts of (share of tokens) * (mean probability). The loss is `top_k` if all
    experts are used equally, and E if `top_k` experts get every token. transformers has the same convention;
    https://arxiv.org/abs/2101.03961 divides by `top_k`. Training computes the loss per layer, since logits pooled
    over layers can look balanced even if each layer prefers different experts.
    """
    probs = at_least_float32(_without_padding(logits, real)).softmax(-1)
    return _balance(_one_hot(choose_experts(probs, top_k), probs, real), probs, real)


def router_z(logits: Tensor, real: Tensor | None = None) -> Tensor:
    """Router z-loss, which keeps the logits small: the mean squared logsumexp of the router logits (N, E).

    Only tokens that are `real` (N, bool) count. https://arxiv.org/abs/2202.08906
    """
    z = at_least_float32(_without_padding(logits, real)).logsumexp(-1).square()
    return z.mean() if real is None else (z * real).sum() / _count(z, real)


def _balance(load: Tensor, probs: Tensor, real: Tensor | None) -> Tensor:
    """`load_balance` from probabilities (N, E) and from `load` (N, E), which is 1 for chosen experts, else 0."""
    tokens = _count(probs, real)
    if real is None:
        load, probs = load.mean(0), probs.mean(0)
    else:
        load, probs = ((x * real[:, None]).sum(0) / tokens for x in (load, probs))
    if ranks.count() > 1:  # the rows of all ranks are balanced together, as in one process
        tokens = torch.cat([load, load.new_ones(1)]) * tokens
        ranks.all_reduce(tokens)
        load = tokens[:-1] / tokens[-1]
    return len(probs) * (load * probs).sum()


def _one_hot(expert_ids: Tensor, probs: Tensor, real: Tensor | None) -> Tensor:
    """(N, E) in the dtype of `probs`: 1 where an expert was chosen for a real token, otherwise 0."""
    load = torch.zeros_like(probs).scatter_(-1, expert_ids, 1.0)
    return load if real is None else load * real[:, None]


def _without_padding(logits: Tensor, real: Tensor | None) -> Tensor:
    """Replace the logits of padding, which may be NaN, by zeros; NaN times zero would be NaN."""
    return logits if real is None else logits.masked_fill(~real[:, None], 0.0)


def _count(x: Tensor, real: Tensor | None) -> Tensor:
    """Number of real tokens, at least 1."""
    return x.new_tensor(len(x)) if real is None else real.sum().clamp(min=1)


class NoisyGate(nn.Module):
    """A router of two linear layers, with noise in training and its own balance loss, as in LLaMA-MoE.

    The logits are out(tanh(hidden(x))). In training, Gaussian noise with standard deviation softplus(noise(x)) +
    0.01 is added. https://arxiv.org/abs/2406.16554, after https://arxiv.org/abs/1701.06538

    The balance loss is `balance` times the sum of two squared coefficients of variation over experts, of their
    importance and of their load. An expert's importance is the sum of its weights over the tokens. An expert's
    load is the sum of the probabilities of choosing the expert if its noise were drawn again.
    """

    supports_packing = True

    def __init__(self, dim: int, experts: int, top_k: int, balance: float = 0.01) -> None:
        super().__init__()
        self.hidden = nn.Linear(dim, experts, bias=False)
        self.out = nn.Linear(experts, experts, bias=False)
        self.noise = nn.Linear(dim, experts, bias=False)
        self.top_k, self.balance = top_k, balance
        self.recorded: list[Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        """(N, D) -> logits (N, E)."""
        logits: Tensor = self.out(self.hidden(x).tanh())
        if not self.training:
            return logits
        deviation = F.softplus(self.noise(x)) + LEAST_NOISE
        noisy = logits + torch.randn_like(logits) * deviation
        if self.recorded is not None and self.balance:
            self.recorded.append(torch.stack([logits, noisy, deviation], 1))
        return noisy

    def auxiliary_losses(self, recorded: Sequence[Tensor], real: Tensor | None) -> dict[str, Any]:
        """The balance loss of the recorded logits. Only `real` tokens count."""
        parts = torch.cat([*recorded]).float()
        count = parts.new_ones(len(parts), 1) if real is None else real.repeat(len(recorded))[:, None].float()
        logits, noisy, deviation = parts.masked_fill(count[..., None] == 0, 1.0).unbind(1)  # padding may be NaN
        importance = _top_weights(noisy, self.top_k) * count
        load = _chances(logits, noisy, deviation, self.top_k) * count
        return {"balance": self.balance * (_squared_variation(importance) + _squared_variation(load))}


def _top_weights(logits: Tensor, top_k: int) -> Tensor:
    """Weights (N, E): the softmax over each token's `top_k` highest logits, zero for the other experts."""
    top = logits.topk(top_k)
    return torch.zeros_like(logits).scatter(-1, top.indices, top.values.softmax(-1))


def _chances(logits: Tensor, noisy: Tensor, deviation: Tensor, top_k: int) -> Tensor:
    """Probability (N, E) that an expert is in the top k if only its own noise is drawn again."""
    if top_k == noisy.shape[-1]:
        return torch.ones_like(noisy)
    top = noisy.topk(top_k + 1).values
    last, next_ = top[:, top_k - 1, None], top[:, -1, None]
    rival = torch.where(noisy >= last, next_, last)
    chances: Tensor = torch.special.ndtr((logits - rival) / deviation)
    return chances


def _squared_variation(x: Tensor) -> Tensor:
    """Squared coefficient of variation, over experts, of the sums of x (N, E) over the tokens of all ranks."""
    sums = ranks.summed(x.sum(0))
    return sums.var() / (sums.mean().square() + 1e-10)
