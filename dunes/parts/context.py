"""State shared by all layers of one forward: positions, cache, and masks."""

# Shapes: B batch, T new tokens, S readable keys, K key/value heads, D head dim.

import warnings
from collections.abc import Callable, Hashable
from contextlib import suppress
from inspect import Signature, signature
from typing import Any, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dunes.ops.scaled_dot_product import (
    CAUSAL_BLOCK,
    attend,
    attend_scored,
    causal_attention,
    pair_attention,
    query_blocks,
    varlen_attention,
)
from dunes.parts.cache import Cache
from dunes.parts.recurrent_cache import RecurrentCache
from dunes.units import plural

Part = TypeVar("Part", bound=Callable[..., Any])
Bias = Callable[[Tensor, Tensor], Tensor]
"""Maps the positions of queries (B or 1, T) and keys (B or 1, S) to a bias of attention scores, broadcastable to
(B, H, T, S)."""


class ForwardContext:
    """The state of one forward, built once and passed to every block.

    `positions` is (B or 1, T), -1 for padding. Without a cache, positions separate packed documents: a position
    other than the previous position plus one starts a new document. Documents do not attend to each other. For a
    single row, `document_starts` (T,) may give the index at which each token's document starts; in that case T
    must be a multiple of `ops.scaled_dot_product.QUERY_BLOCK`.
    """

    def __init__(
        self,
        positions: Tensor,
        cache: Cache | None = None,
        consecutive: bool = False,
        document_starts: Tensor | None = None,
    ) -> None:
        self.positions, self.cache, self.document_starts = positions, cache, document_starts
        # True if the positions of each row are known, without reading them, to be the last T of 0..S-1.
        self.consecutive = consecutive
        self.carried: dict[str, Tensor] = {}
        """Tensors, by name, that a layer passes to later layers in this forward."""
        self._memo: dict[Hashable, Any] = {}

    def __repr__(self) -> str:
        return f"ForwardContext(positions {tuple(self.positions.shape)}, {self.cache})"

    @classmethod
    def of(cls, ids: Tensor, positions: Tensor | None = None, cache: Cache | None = None) -> "ForwardContext":
        """The context for ids or hidden states (B, T, ...).

        `positions` default to `cache.start(T)`, or without a cache to 0..T-1.
        """
        if cache is not None:
            if positions is None:
                positions = cache.start(ids.shape[1])
            return cls(positions, cache, cache.in_order)
        if positions is not None:
            return cls(positions)
        return cls(torch.arange(ids.shape[1], device=ids.device)[None], consecutive=True)

    def once(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """The result of `make()`, computed once per `key` and then shared by all layers."""
        if torch.compiler.is_compiling():
            return make()  # checkpointing forbids side effects, and Inductor merges the repeated computations
        if key not in self._memo:
            self._memo[key] = make()
        return self._memo[key]

    def put(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store new keys and values in the cache, if any, and return all that this layer can read (B, K, S, D)."""
        return (k, v) if self.cache is None else self.cache.put(layer, k, v, self.positions)

    def state(self, name: Hashable, initial: Tensor) -> Tensor:
        """The recurrent state called `name`, after the cached tokens.

        Without cached tokens, the state is `initial` (B, ...), which is zero. Raises ValueError for a cache
        without states.
        """
        if self.cache is None:
            return initial
        if not isinstance(self.cache, RecurrentCache):
            raise ValueError(f"a {type(self.cache).__name__} has no recurrent states; create one with cache_for")
        return self.cache.state(name, initial)

    def keep(self, name: Hashable, state: Tensor) -> None:
        """Replace the recurrent state called `name` in the cache, if there is a cache."""
        if self.cache is not None:
            self.state(name, state).copy_(state)

    def padding(self) -> Tensor | None:
        """Mask (B, T), True for padding among tokens appended to a cache; None without padding or cache."""
        return None if self.cache is None or self.consecutive else self.positions < 0

    def documents(self) -> Tensor | None:
        """Numbers (B or 1, T), equal within a document; None with a cache or consecutive positions."""
        if self.cache is not None or self.consecutive:
            return None
        return self.document_starts[None] if self.document_starts is not None else self.starts().cumsum(1)

    def starts(self) -> Tensor:
        """Mask (B or 1, T), True for the first token of each document, and for padding; there is no cache."""
        if self.document_starts is not None:
            return F.pad(self.document_starts.diff() != 0, (1, 0), value=True)[None]
        previous = F.pad(self.positions[:, :-1], (1, 0), value=-1)  # position 0 after padding starts a document
        return (previous < 0) | (self.positions != previous + 1)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, window: int | None = None, dropout: float = 0.0) -> Tensor:
        """The output (B, H, T, D) of attention; `k` and `v` come from `put`, `window` is as in `mask`."""
        if window == 2 and self.cache is None and not dropout:
            return pair_attention(q, k, v, self.once("starts", self.starts))
        if (starts := self.document_starts) is not None:
            blocks = self.once(("query blocks", q.dtype, window), lambda: query_blocks(starts, q.dtype, window))
            return varlen_attention(q, k, v, blocks)
        if self.consecutive and not (torch.is_grad_enabled() or torch.compiler.is_compiling()):
            self._check_window(window)
            return causal_attention(q, k, v, window)
        return attend(q, k, v, self.mask(window), dropout)

    def attend_scored(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        window: int | None = None,
        dropout: float = 0.0,
        *,
        bias: Bias | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """`attend` with a bias, a softcap or sinks, as in `ops.scaled_dot_product.attend_scored`."""
        mask, key = self.mask(window), self.key_positions()
        if mask is None:
            mask = self.once(("mask", window), lambda: self._mask(window))

        def block(rows: slice) -> Tensor:
            added = None if bias is None else bias(self.positions[:, rows], key)
            query, visible = q[:, :, rows], mask[:, rows]
            return attend_scored(query, k, v, visible, dropout, bias=added, softcap=softcap, sinks=sinks)

        if torch.compiler.is_compiling() or q.shape[2] <= CAUSAL_BLOCK:
            return block(slice(None))
        # In blocks of queries, since all scores at once may take gigabytes.
        return torch.cat([block(slice(a, a + CAUSAL_BLOCK)) for a in range(0, q.shape[2], CAUSAL_BLOCK)], 2)

    def key_positions(self) -> Tensor:
        """The positions (B or 1, S) of the keys that `put` returns, -1 for an empty slot."""
        return self.positions if self.cache is None else self.cache.slot_positions(self.positions.amax(1))

    def mask(self, window: int | None = None) -> Tensor | None:
        """Attention mask (B, T, S), True if a query may attend to a key; None for plain causal attention.

        `window` is the maximum number of keys that a query attends to, its own included. Raises ValueError if the
        cache stores fewer positions than `window`.
        """
        self._check_window(window)
        first = self.cache is None or self.cache.max_length == self.positions.shape[1]
        if self.consecutive and first and (window is None or window >= self.positions.shape[1]):
            return None
        mask: Tensor = self.once(("mask", window), lambda: self._mask(window))
        return mask

    def _check_window(self, window: int | None) -> None:
        cached = None if self.cache is None else self.cache.window
        if cached is not None and (window is None or window > cached):
            raise ValueError(
                f"the cache stores {plural(cached, 'position')}, but a layer attends to {window or 'all'}"
            )

    def _mask(self, window: int | None) -> Tensor:
        query, key = self.positions[:, :, None], self.key_positions()[:, None, :]
        visible = (key >= 0) & (key <= query) if self.cache is None else self.cache.visible(key, query)
        if window is not None:
            visible &= key > query - window
        if (document := self.documents()) is not None:
            visible &= document[:, :, None] == document[:, None, :]
        # Padding attends to everything, since a softmax over no key would be NaN.
        return visible | (query < 0)

    def close(self) -> None:
        """End the forward: add the new tokens to the lengths in the cache, if any."""
        if self.cache is not None:
            self.cache.advance((self.positions >= 0).sum(1))


def document_starts(positions: Tensor) -> Tensor:
    """Indices (N,): for each of the N tokens that are not padding, the index of its document's first token.

    Padding has position -1 in `positions` (B, T); the other tokens are numbered from 0 to N - 1.
    """
    previous = F.pad(positions[:, :-1], (1, 0), value=-1)
    restarts = ((previous < 0) | (positions != previous + 1))[positions >= 0]
    token = torch.arange(len(restarts), device=positions.device)
    return torch.where(restarts, token, 0).cummax(0).values


def documents_by_length(positions: Tensor) -> list[Tensor]:
    """Token indices of the documents, in one tensor (documents, length) for each document length.

    The indices refer to the flattened batch (B, T).
    """
    starts, real = document_starts(positions), (positions >= 0).flatten().nonzero()[:, 0]
    first = torch.unique(starts)
    lengths = first.diff(append=first.new_tensor([len(starts)]))
    return [
        real[first[lengths == n, None] + torch.arange(n, device=positions.device)]
        for n in torch.unique(lengths).tolist()
    ]


class WithoutContext(nn.Module):
    """A wrapper that discards the context, for a part that takes only x."""

    supports_packing = True

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base

    def forward(self, x: Tensor, *context: Any) -> Tensor:
        """The part's output for x, both (B, T, dim). Raises ValueError if the output has another shape."""
        y: Any = self.base(x)
        if (shape := getattr(y, "shape", type(y).__name__)) != x.shape:
            raise ValueError(f"{type(self.base).__name__} returned {shape}; expected a tensor {tuple(x.shape)}")
        return cast(Tensor, y)


def fitted(slot: str, part: Part, arguments: str) -> Part:
    """Return the part if it can be called with these arguments, such as "x, ctx, layer".

    Otherwise raises a ValueError that starts with `slot`. torch's own modules get no context, even if their
    forward has several parameters. A part with a parameter `ctx` cannot be called without a context.
    """
    alone, call = "," not in arguments, _signature(part)
    calls = map(_signature, part.modules()) if isinstance(part, nn.Sequential) else [call]
    torchs = type(part).__module__.startswith("torch.nn.modules.")
    fits = not any("ctx" in c.parameters for c in calls) if alone else not torchs
    with suppress(TypeError):
        call.bind(*arguments.split(","))
        if fits:
            return part
    name, taken = getattr(part, "__name__", type(part).__name__), ", ".join(call.parameters)
    raise ValueError(
        f"{slot} is called with ({arguments}) by position, but {name} takes ({taken}); wrap it in a module"
    )


def with_context(slot: str, part: nn.Module) -> nn.Module:
    """The part, for calls with (x, ctx, layer); wrapped if it takes only x. Raises ValueError like `fitted`."""
    try:
        return fitted(slot, part, "x, ctx, layer")
    except ValueError:
        with suppress(ValueError):
            return WithoutContext(fitted(slot, part, "x"))
        raise


def _signature(part: Any) -> Signature:
    try:
        return signature(getattr(part, "forward", part))
    except ValueError:  # not written in Python
        return signature(lambda *arguments: None)


PER_TOKEN = {
    *(nn.Module, nn.ModuleList, nn.ModuleDict, nn.Sequential, nn.Identity, nn.Dropout, nn.Linear, nn.Embedding),
    *(nn.LayerNorm, nn.RMSNorm, nn.GELU, nn.SiLU, nn.ReLU, nn.LeakyReLU, nn.ReLU6, nn.ELU, nn.SELU, nn.Mish),
    *(nn.Tanh, nn.Sigmoid, nn.Softplus, nn.Hardswish),
}
"""torch's modules that process each token separately, and nn.Module, which has no forward."""


def supports_packing(model: nn.Module) -> bool:
    """True if all modules of the model declare that documents packed into one row stay separate.

    A class sets `supports_packing = True` if its forward processes each token separately, or mixes tokens only as
    the context allows. A subclass that overrides forward has to set `supports_packing` again.
    """
    return all(getattr(m, "supports_packing", True) for m in model.modules()) and not undeclared_modules(model)


def undeclared_modules(model: nn.Module) -> list[nn.Module]:
    """Modules that may mix documents: they are not in PER_TOKEN and do not declare `supports_packing`."""
    return [m for m in model.modules() if not _declares_packing(m)]


def _declares_packing(module: nn.Module) -> bool:
    if "forward" in vars(module) or type(module).__call__ is not nn.Module.__call__:
        return False  # calls may bypass the class's forward
    author = next(c for c in type(module).__mro__ if "forward" in vars(c))
    if author in PER_TOKEN:
        return len(getattr(module, "normalized_shape", "D")) == 1  # a norm over several tokens mixes them
    return bool(vars(author).get("supports_packing")) and module.supports_packing is not None


def warn_about_mixing(model: nn.Module, consequence: str) -> None:
    """Warn if the model has `undeclared_modules`; the warning names them and `consequence`."""
    if names := ", ".join(sorted(set(map(_name, undeclared_modules(model))))):
        warnings.warn(
            f"{names} may mix tokens, so {consequence}; if it acts on each token separately, set "
            "supports_packing = True in its class",
            stacklevel=3,
        )


def _name(module: nn.Module) -> str:
    position: Any = getattr(module, "position", None)
    culprit = module if position is None or hasattr(position, "supports_packing") else position
    return getattr(culprit, "__name__", type(culprit).__name__)
