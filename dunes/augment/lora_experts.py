"""Sparse mixtures of LoRA experts: a linear layer with several low-rank pairs, of which a router weighs a few.

An entry of CHANGES, see `changes.py`. LLaVA-MoLE https://arxiv.org/abs/2401.16160, MoLA
https://arxiv.org/abs/2402.08562, LoRAMoE https://arxiv.org/abs/2312.09979, MoLoRA https://arxiv.org/abs/2309.05444
"""

# Shapes: N tokens, I inputs, O outputs, E experts, R rank, k experts per token.

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dunes import tree
from dunes.augment import lora
from dunes.augment.adapted import Adapter, LoraConfig, is_embedding
from dunes.augment.change import Change, float_dtype, generator
from dunes.parts import MoE
from dunes.parts.moe import choose_experts, load_balance

VERSION = 1
LINEARS = (*lora.LINEARS, "!**.experts.**")
"""All linear layers of the blocks but routers, and but the experts of a mixture."""
ROUTER_DEVIATION = 0.02


class ExpertAdapter(Adapter):
    """The sum over a token's `top_k` experts of w_e * scale * B_e(A_e(dropout(x))).

    `A` (E, R, I) and `B` (O, E, R) hold all experts, `router` (E, I) gives logits. With a `top_k` of 1 the weight
    is the softmax's probability: renormalised it would be 1, from which a router learns nothing. Above that, the
    weights of the chosen experts sum to one. Coefficient of `load_balance` in training: `balance`.

    All pairs are multiplied, as two matrices, and those that were not chosen are masked in between: they get a
    gradient of zero.
    """

    depends_on_input = True

    def __init__(
        self, base: nn.Module, config: LoraConfig, dtype: torch.dtype, experts: int, top_k: int, balance: float
    ) -> None:
        super().__init__(base, config, dtype)
        (rank, inputs), outputs, device = self.A.shape, len(self.B), self.A.device
        self.top_k, self.balance = top_k, balance
        self.A = nn.Parameter(torch.empty(experts, rank, inputs, device=device, dtype=dtype))
        self.B = nn.Parameter(torch.empty(outputs, experts, rank, device=device, dtype=dtype))
        self.router = nn.Parameter(torch.empty(experts, inputs, device=device, dtype=dtype))
        self.recorded: list[Tensor] | None = None

    def update(self, x: Tensor) -> Tensor:
        """(..., I) -> (..., O), in the adapter's dtype or autocast's."""
        weights = self.route(x.to(self.A.dtype))
        x = F.dropout(x, self.config.dropout, self.training).to(self.A.dtype)
        low = F.linear(x, self.A.flatten(0, 1)).view(*x.shape[:-1], *self.A.shape[:2])
        low = low * weights.to(low.dtype)[..., None]
        return F.linear(low.flatten(-2), self.B.flatten(1)) * self.config.scale

    def route(self, x: Tensor) -> Tensor:
        """The weights (..., E) of the experts for inputs (..., I), 0 for those that are not chosen."""
        logits = F.linear(x, self.router)
        probs = logits.to(torch.promote_types(logits.dtype, torch.float32)).softmax(-1)
        if self.recorded is not None and self.balance:
            self.recorded.append(logits.flatten(0, -2))
        chosen = choose_experts(probs.flatten(0, -2), self.top_k).view(*probs.shape[:-1], self.top_k)
        weights = probs.gather(-1, chosen)
        if self.top_k > 1:
            weights = weights / weights.sum(-1, keepdim=True)
        return torch.zeros_like(probs).scatter(-1, chosen, weights)

    def auxiliary_losses(self, recorded: Sequence[Tensor], real: Tensor | None) -> dict[str, Any]:
        """The balance of the recorded logits, those of several calls together, times its coefficient."""
        real = None if real is None else real.repeat(len(recorded))
        return {"balance": self.balance * load_balance(torch.cat([*recorded]), self.top_k, real)}

    def factors(self) -> tuple[Tensor, Tensor]:
        """A (E * R, I) and B (O, E * R) of all experts."""
        return self.A.flatten(0, 1), self.B.flatten(1)

    def updated(self, base: nn.Module, dtype: torch.dtype = torch.float64) -> Tensor:
        """Raises ValueError: what it adds depends on the input."""
        raise ValueError("a mixture of LoRA experts depends on the input, so that no matrix equals it")


def decide(
    model: nn.Module,
    *,
    where: tree.Where = LINEARS,
    experts: int = 8,
    top_k: int = 2,
    rank: int = 16,
    alpha: float = 32.0,
    ranks: lora.Ranks = (),
    dropout: float = 0.0,
    balance: float = 0.001,
    adapter: str = lora.NAME,
    seed: int = 0,
    dtype: str = "float32",
) -> Change:
    """The record of the change: every setting, and the rank and alpha of each place.

    `top_k` of the `experts` compute a token; all of them is a dense mixture, and a single expert is plain LoRA,
    without a router. `rank` is that of each expert; `ranks` and `where` are those of `lora.decide`. Raises
    ValueError, with the place, for an invalid request, for an embedding, and for a `balance` above 0 inside the
    experts of a mixture, where padding is not known.
    """
    request = {k: v for k, v in locals().items() if k != "model"}
    request["where"] = [where] if isinstance(where, str) else list(where)
    request["ranks"] = [list(pair) for pair in (ranks.items() if isinstance(ranks, Mapping) else ranks)]
    places = lora.adapter_places(model, request)
    change = Change("lora-experts", VERSION, request, places, (f"**.adapters.{adapter}.*",))
    check(model, change)
    return change


def check(model: nn.Module, change: Change) -> None:
    """Raise ValueError, with the place and the remedy, if the change cannot be made to this model."""
    experts, top_k, balance = (change.request[key] for key in ("experts", "top_k", "balance"))
    if type(experts) is not int or experts < 1:
        raise ValueError(f"experts is {experts!r}; expected 1 or more")
    if type(top_k) is not int or not 1 <= top_k <= experts:
        raise ValueError(f"top_k is {top_k!r}; expected 1 to {experts}, the number of experts")
    if type(balance) not in (int, float) or not 0 <= balance < math.inf:
        raise ValueError(f"balance is {balance!r}; expected a number of at least 0")
    mixtures = tuple(f"{p.name}.experts." for p in tree.places(model) if isinstance(p.module, MoE))
    for place, module in lora.check_places(model, change):
        if is_embedding(module):
            raise ValueError(f"{place}: an embedding, whose ids a router cannot read; exclude it")
        if balance and place.startswith(mixtures):
            raise ValueError(
                f"{place}: an expert of a mixture, whose padding is not known; set balance=0, or exclude it"
            )


def shape(model: nn.Module, change: Change) -> None:
    """Wrap the places and make the adapter active. Raises ValueError, before anything is changed, if it cannot."""
    check(model, change)
    request, dtype = change.request, float_dtype(change.request["dtype"])
    routing = {key: request[key] for key in ("experts", "top_k", "balance")}

    def make(base: nn.Module, settings: Mapping[str, Any]) -> Adapter:
        config = LoraConfig(settings["rank"], settings["alpha"], dropout=request["dropout"])
        return (
            Adapter(base, config, dtype)
            if request["experts"] == 1
            else ExpertAdapter(base, config, dtype, **routing)
        )

    lora.add_adapters(model, change, make)


@torch.no_grad()
def fill(model: nn.Module, change: Change, weights: Mapping[str, Tensor]) -> None:
    """Initialise experts and routers: the model's outputs stay equal, bit for bit.

    The random numbers depend only on the seed, the adapter's name and the place.
    """
    lora.fill(model, change, weights)
    seed, name = change.request["seed"], change.request["adapter"]
    modules = lora.adapted_modules(model, name)
    for place in change.places:
        if isinstance(adapter := modules[place][name], ExpertAdapter):
            draw = generator(seed, name, place, "router")
            adapter.router.copy_(ROUTER_DEVIATION * torch.randn(adapter.router.shape, generator=draw))


def undo(model: nn.Module, change: Change) -> None:
    """Remove the adapter."""
    lora.undo(model, change)
