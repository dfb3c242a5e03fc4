"""Sparse mixtures of LoRA experts: for each token, a router selects a few updates of a linear layer and their
weights.

This module is registered in the table `CHANGES` in `changes.py`. LLaVA-MoLE https://arxiv.org/abs/2401.16160, MoLA
https://arxiv.org/abs/2402.08562, LoRAMoE https://arxiv.org/abs/2312.09979, MoLoRA
https://arxiv.org/abs/2309.05444, MixLoRA https://arxiv.org/abs/2404.15159
"""

# Shapes: N tokens, I inputs, O outputs, E experts, R rank, k experts per token.

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dunes import tree
from dunes.augment import lora
from dunes.augment.adapted import Adapter, LoraConfig, is_embedding
from dunes.augment.change import Change, generator
from dunes.augment.options import LoraExperts
from dunes.parts import MLP, Attention, GatedMLP, MoE
from dunes.parts.layers import at_least_float32
from dunes.parts.moe import choose_experts, load_balance

VERSION = 1
ROUTER_DEVIATION = 0.02
MLPS = (MLP, GatedMLP)
SHARING = (Attention, *MLPS)
"""Classes whose linear layers can share a router: their first layer in order of definition also runs first."""


class Choice:
    """The routing that several layers share. `value` is (one-hot experts (..., k, E), weights (..., k))."""

    value: tuple[Tensor, Tensor] | None = None

    def __deepcopy__(self, memo: object) -> "Choice":
        return Choice()  # a failed forward may have left a value, which is not copied


class ExpertAdapter(Adapter):
    """LoRA experts: the update is the sum of w_e * scale * B_e(A_e(dropout(x))) over a token's `top_k` experts e.

    `A` is (E, R, I), `B` is (O, E, R), `router` is (E, I). If `top_k` is 1, the weight w_e is the router's softmax
    probability, since a weight normalised to 1 would give the router no gradient. Otherwise the weights of the
    selected experts sum to one. `balance` is the coefficient of the `load_balance` loss.

    Two matrix products compute all experts. Between the two products, the results of unselected experts are set to
    zero, so these experts get zero gradients.
    """

    depends_on_input = True
    for_each_choice = False, False  # for A and B: True if a token is multiplied `top_k` times, not once
    router: nn.Parameter | None

    def __init__(
        self, base: nn.Module, config: LoraConfig, dtype: torch.dtype, experts: int, top_k: int, balance: float
    ) -> None:
        super().__init__(base, config, dtype)
        (rank, inputs), outputs, empty = self.A.shape, len(self.B), self.A.new_empty
        self.top_k, self.balance = top_k, balance
        self.A = nn.Parameter(empty(experts, rank, inputs))
        self.B = nn.Parameter(empty(outputs, experts, rank))
        self.router = nn.Parameter(empty(experts, inputs))
        self.recorded: list[Tensor] | None = None
        self._choice, self._is_last = Choice(), True

    def update(self, x: Tensor) -> Tensor:
        """The update of the output: (..., I) -> (..., O), in the adapter's dtype or autocast's."""
        chosen, weights = self.choose(x)
        shares, low = (chosen * weights[..., None]).sum(-2), self.low(x)
        return self.high(low * shares.to(low.dtype)[..., None])

    def low(self, x: Tensor) -> Tensor:
        """Apply dropout and `A` of all experts: (..., I) -> (..., E, R)."""
        x = F.dropout(x, self.config.dropout, self.training).to(self.A.dtype)
        return F.linear(x, self.A.flatten(0, 1)).view(*x.shape[:-1], *self.A.shape[:2])

    def high(self, low: Tensor) -> Tensor:
        """Apply `B`, sum over the experts, and scale: (..., E, R) -> (..., O)."""
        return F.linear(low.flatten(-2), self.B.flatten(1)) * self.config.scale

    def choose(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The routing of inputs (..., I): one-hot experts and weights, as in `route`.

        An adapter without its own router returns the routing that the first layer of its group computed.
        """
        if self.router is not None:
            self._choice.value = self.route(x.to(self.A.dtype), self.router)
        choice = self._choice.value
        assert choice is not None, "the first of the layers that share a router was not called"
        if self._is_last:
            self._choice.value = None
        return choice

    def route(self, x: Tensor, router: Tensor) -> tuple[Tensor, Tensor]:
        """Route inputs (..., I): returns one-hot experts (..., k, E) and weights (..., k), float32 or wider."""
        logits = F.linear(x, router)
        probs = at_least_float32(logits).softmax(-1)
        if self.recorded is not None and self.balance:
            self.recorded.append(logits.flatten(0, -2))
        chosen = choose_experts(probs.flatten(0, -2), self.top_k).view(*probs.shape[:-1], self.top_k)
        weights = probs.gather(-1, chosen)
        one_hot = chosen[..., None] == torch.arange(len(router), device=x.device)
        return one_hot, weights / weights.sum(-1, keepdim=True) if self.top_k > 1 else weights

    def auxiliary_losses(self, recorded: Sequence[Tensor], real: Tensor | None) -> dict[str, Any]:
        """`balance` times the load-balancing loss, computed from the router logits that all calls recorded."""
        real = None if real is None else real.repeat(len(recorded))
        return {"balance": self.balance * load_balance(torch.cat([*recorded]), self.top_k, real)}

    def factors(self) -> tuple[Tensor, Tensor]:
        """The factors of all experts: A (E * R, I) and B (O, E * R)."""
        return self.A.flatten(0, 1), self.B.flatten(1)

    def products(self) -> list[tuple[int, int]]:
        """The (inputs, outputs) of each matrix product for a token: A and B of all experts, and the router."""
        router = [] if self.router is None else [(self.router.shape[1], len(self.router))]
        times = [self.top_k if each else 1 for each in self.for_each_choice]
        return [p for p, n in zip(super().products(), times, strict=True) for _ in range(n)] + router

    def updated(self, base: nn.Module, dtype: torch.dtype = torch.float64) -> Tensor:
        """Raises ValueError, since no matrix equals an update that depends on the input."""
        raise ValueError("a mixture of LoRA experts depends on the input: it cannot be merged or exported")


class HiddenExperts(ExpertAdapter):
    """LoRA experts of an MLP's gate or up projection in MixLoRA, where each expert is an MLP.

    The forward returns the output of the frozen projection and one output per selected expert, so that the MLP
    computes an activation for each output.
    """

    keeps_shape = False
    for_each_choice = False, True
    supports_packing = True

    def forward(self, x: Tensor, y: Tensor, base: nn.Module) -> Tensor:
        """Input x (..., I) and base output y (..., O) -> (..., 1 + k, O): y, then y plus each expert's update."""
        (chosen, _), low = self.choose(x), self.low(x)[..., None, :, :]
        update = self.high(low * chosen.to(low.dtype)[..., None])
        return (y[..., None, :] + F.pad(update, (0, 0, 1, 0))).to(y.dtype)


class OutputExperts(ExpertAdapter):
    """LoRA experts of an MLP's down projection in MixLoRA. The forward returns the weighted sum of the experts'
    outputs.

    Let h be the activation of the frozen MLP, h_e the activation of expert e, and W the frozen projection. The
    output is W(h + sum of w_e (h_e - h)) + sum of w_e * scale * B_e(A_e(h_e)). If the weights sum to one, the
    output equals the weighted sum of the experts, but needs only one product with W. Until the experts are
    trained, the output equals W h bit for bit.
    """

    for_each_choice = True, False

    def base_input(self, x: Tensor) -> Tensor:
        """The input of W: (..., 1 + k, I) -> (..., I)."""
        assert self._choice.value is not None
        weights, frozen = self._choice.value[1], x[..., :1, :]
        change = ((x[..., 1:, :] - frozen) * weights[..., None]).sum(-2)
        return (frozen.squeeze(-2) + change).to(x.dtype)

    def update(self, x: Tensor) -> Tensor:
        """The update of the output: (..., 1 + k, I) -> (..., O)."""
        chosen, weights = self.choose(x)
        shares, low = chosen * weights[..., None], self.low(x[..., 1:, :])
        return self.high((low * shares.to(low.dtype)[..., None]).sum(-3))


def decide(model: nn.Module, options: LoraExperts) -> Change:
    """The record of the change: every setting, and the rank and alpha of each place.

    Raises ValueError with the name of the place if an option is invalid or if the place is an embedding. Inside
    the experts of a mixture, `balance` above 0 is invalid, since experts cannot tell which of their tokens are
    padding.
    """
    change = lora.adapter_change("lora-experts", VERSION, model, options)
    check(model, change)
    return change


def check(model: nn.Module, change: Change) -> None:
    """Raise ValueError with the place and a remedy if the change cannot be made to this model."""
    experts, top_k, balance = (change.request[key] for key in ("experts", "top_k", "balance"))
    if not 1 <= top_k <= experts:
        raise ValueError(f"top_k is {top_k!r}; expected 1 to {experts}, the number of experts")
    if not 0 <= balance < math.inf:
        raise ValueError(f"balance is {balance!r}; expected a number of at least 0")
    mixtures = tuple(f"{p.name}.experts." for p in tree.places(model) if isinstance(p.module, MoE))
    for place, module in lora.check_places(model, change):
        if is_embedding(module):
            raise ValueError(f"{place}: a router cannot read the ids of an embedding; exclude it")
        if balance and place.startswith(mixtures):
            raise ValueError(
                f"{place}: an expert cannot know which of its tokens are padding; set balance=0, or exclude it"
            )
    if change.request["router"] == "mlp":
        _check_mlps(router_groups(model, change))


def _check_mlps(groups: Mapping[nn.Module, Sequence[str]]) -> None:
    """Raise ValueError if no MLP is selected, or if only some of the linear layers of an MLP are selected."""
    mlps = {module: places for module, places in groups.items() if type(module) in MLPS}
    if not mlps:
        raise ValueError("router is 'mlp', and no linear layer of an MLP is selected; use 'linear' or 'shared'")
    for mlp, places in mlps.items():
        if len(places) < len([*tree.linears(mlp)]):
            raise ValueError(f"{places[0]}: router is 'mlp'; select the other linear layers of this MLP, too")


def router_groups(model: nn.Module, change: Change) -> dict[nn.Module, list[str]]:
    """The places of the change, grouped by router.

    The key is the attention or MLP whose layers share a router; a layer with its own router is itself the key.
    """
    groups: dict[nn.Module, list[str]] = {}
    for place in [p for p in tree.places(model) if p.name in change.places]:
        shares = change.request["router"] != "linear" and type(place.parent) in SHARING
        groups.setdefault(place.parent if shares else place.module, []).append(place.name)
    return groups


def shape(model: nn.Module, change: Change) -> None:
    """Wrap the modules at the places and activate the adapter; a group's first adapter contains the router.

    Raises ValueError, before anything is changed, if the change does not fit the model.
    """
    check(model, change)
    name = change.request["adapter"]
    lora.add_adapters(model, change, lambda place: _adapter_class(change, place))
    modules = lora.adapted_modules(model, name)
    for places in router_groups(model, change).values():
        adapters = [a for place in places if isinstance(a := modules[place][name], ExpertAdapter)]
        for adapter in adapters[1:]:
            adapter.router, adapter._choice = None, adapters[0]._choice
        for adapter in adapters[:-1]:
            adapter._is_last = False


def _adapter_class(change: Change, place: tree.Place) -> Callable[..., Adapter]:
    """The adapter class for this module; for expert adapters, a `partial` with the routing arguments filled in."""
    in_mlp = change.request["router"] == "mlp"
    if change.request["experts"] == 1 or (in_mlp and type(place.parent) not in MLPS):
        return Adapter
    cls = OutputExperts if place.key == "down" else HiddenExperts
    routing = {key: change.request[key] for key in ("experts", "top_k", "balance")}
    return partial(cls if in_mlp else ExpertAdapter, **routing)


@torch.no_grad()
def fill(model: nn.Module, change: Change, weights: Mapping[str, Tensor]) -> None:
    """Initialise experts and routers; the model's outputs stay the same, bit for bit.

    The random numbers depend only on the seed, the adapter's name and the place.
    """
    lora.fill(model, change, weights)
    seed, name = change.request["seed"], change.request["adapter"]
    modules = lora.adapted_modules(model, name)
    for place in change.places:
        if isinstance(adapter := modules[place][name], ExpertAdapter) and adapter.router is not None:
            draw = generator(seed, name, place, "router")
            adapter.router.copy_(ROUTER_DEVIATION * torch.randn(adapter.router.shape, generator=draw))


undo = lora.undo
