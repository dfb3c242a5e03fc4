"""What all layers of one forward share: the positions, the cache, and what follows from them."""

# Shapes: B batch, T new tokens, S readable keys, K key/value heads, D head dim.

import warnings
from collections.abc import Callable, Hashable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dunes.ops.attention import Bands, bands
from dunes.parts.cache import Cache
from dunes.plural import plural


class Context:
    """Made once per forward and passed to every block.

    `at` holds positions (B or 1, T), -1 for padding. Without a cache, a position that does not
    follow its neighbour's begins another document, which sees only itself: that is how packed
    examples stay apart. In a single row `begins` (T,) may say where each token's document does; T is then
    a multiple of `ops.attention.BAND`.
    """

    def __init__(
        self,
        at: Tensor,
        cache: Cache | None = None,
        consecutive: bool = False,
        begins: Tensor | None = None,
    ) -> None:
        self.at, self.cache, self.begins = at, cache, begins
        # The usual case in training, known without looking at the tensor: 0..T-1 in every row.
        self.consecutive = consecutive
        self._made: dict[Hashable, Any] = {}

    @classmethod
    def of(cls, ids: Tensor, at: Tensor | None = None, cache: Cache | None = None) -> "Context":
        """For tokens or states whose first two dimensions are (B, T); positions 0..T-1 unless given."""
        if cache is not None:
            if at is None:
                at = cache.start(torch.ones(ids.shape[:2], dtype=torch.bool, device=ids.device))
            return cls(at, cache)
        if at is not None:
            return cls(at)
        return cls(torch.arange(ids.shape[1], device=ids.device)[None], consecutive=True)

    def once(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """`make()`, computed by the first layer that asks and shared by the others."""
        if torch.compiler.is_compiling():
            return make()  # a checkpointed block may write to nothing outside of it, and equal terms become one
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def put(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values (B, K, S, D) that this layer can read: the new ones, or all in the cache."""
        return (k, v) if self.cache is None else self.cache.put(layer, k, v, self.at)

    def mask(self, window: int | None = None) -> Tensor | None:
        """True (B, T, S) where a query may look; None if query t sees exactly keys 0..t.

        With a window, a query sees that many keys, itself included. Raises ValueError if the cache
        does not remember as many.
        """
        if self.consecutive and (window is None or window >= self.at.shape[1]):
            return None
        mask: Tensor = self.once(("mask", window), lambda: self._mask(window))
        return mask

    def _mask(self, window: int | None) -> Tensor:
        reach = None if self.cache is None else self.cache.reach
        if reach is not None and (window is None or window > reach):
            raise ValueError(
                f"a rolling cache of {plural(reach, 'position')}, but a layer sees {window or 'all'} of them"
            )
        query = self.at[:, :, None]
        key = self.at if self.cache is None else self.cache.where(self.at.amax(1))
        key = key[:, None, :]
        seen = (key >= 0) & (key <= query)
        if window is not None:
            seen &= key > query - window
        if self.cache is None:
            restarts = self.at.diff(prepend=self.at[:, :1]) != 1
            document = restarts.cumsum(1) if self.begins is None else self.begins[None]
            seen &= document[:, :, None] == document[:, None, :]
        # Padding sees something, whatever it is: a softmax over nothing would be NaN.
        return seen | (query < 0)

    def bands(self, dtype: torch.dtype, window: int | None) -> list[Bands]:
        """The same where `begins` says it."""
        assert self.begins is not None
        begins = self.begins
        made: list[Bands] = self.once(("bands", dtype, window), lambda: bands(begins, dtype, window))
        return made

    def close(self) -> None:
        """The forward is over: the cache, if there is one, now holds the new tokens."""
        if self.cache is not None:
            self.cache.advance((self.at >= 0).sum(1))


def documents(at: Tensor) -> Tensor:
    """Of tokens at positions (B, T), all but padding in a row (N,): where in it the document of each begins."""
    before = F.pad(at[:, :-1], (1, 0), value=-1)
    fresh = ((before < 0) | (at != before + 1))[at >= 0]
    place = torch.arange(len(fresh), device=at.device)
    return torch.where(fresh, place, 0).cummax(0).values


def documents_by_length(at: Tensor) -> list[Tensor]:
    """Where in a flattened batch of tokens at positions (B, T) the documents of each length lie: (D, length)."""
    begins, real = documents(at), (at >= 0).flatten().nonzero()[:, 0]
    first = torch.unique(begins)
    lengths = first.diff(append=first.new_tensor([len(begins)]))
    return [
        real[first[lengths == n, None] + torch.arange(n, device=at.device)] for n in torch.unique(lengths).tolist()
    ]


PER_TOKEN = {
    *(nn.Module, nn.ModuleList, nn.ModuleDict, nn.Sequential, nn.Identity, nn.Dropout, nn.Linear, nn.Embedding),
    *(nn.LayerNorm, nn.RMSNorm, nn.GELU, nn.SiLU, nn.ReLU, nn.LeakyReLU, nn.ReLU6, nn.ELU, nn.SELU, nn.Mish),
    *(nn.Tanh, nn.Sigmoid, nn.Softplus, nn.Hardswish),
}
"""Modules of torch that treat each token by itself; nn.Module itself has no forward."""


def supports_packing(model: nn.Module) -> bool:
    """Whether documents that share a row of positions do not see each other, as far as modules say so.

    A class says `supports_packing = True` where its forward treats each token by itself, or looks at others by
    its context alone. A subclass with another forward has to say it anew.
    """
    return all(getattr(m, "supports_packing", True) for m in model.modules()) and not undeclared(model)


def undeclared(model: nn.Module) -> list[nn.Module]:
    """The modules of which it is not known how they mix tokens: they say nothing, and are not of torch."""
    return [m for m in model.modules() if not _declares_packing(m)]


def _declares_packing(module: nn.Module) -> bool:
    if "forward" in vars(module) or type(module).__call__ is not nn.Module.__call__:
        return False  # another function is called than the class's forward
    author = next(c for c in type(module).__mro__ if "forward" in vars(c))
    if author in PER_TOKEN:
        return len(getattr(module, "normalized_shape", "D")) == 1  # else a norm over more than a token
    return bool(vars(author).get("supports_packing")) and module.supports_packing is not None


def warn_of_mixing(model: nn.Module, consequence: str) -> None:
    """Name the modules that are undeclared, if there are any, and what comes of it."""
    if names := ", ".join(sorted(set(map(_name, undeclared(model))))):
        warnings.warn(
            f"{names} may mix tokens, so {consequence}; if each token is treated by itself, write "
            "supports_packing = True in its class",
            stacklevel=3,
        )


def _name(module: nn.Module) -> str:
    position: Any = getattr(module, "position", None)
    at_fault = module if position is None or hasattr(position, "supports_packing") else position
    return getattr(at_fault, "__name__", type(at_fault).__name__)


def at_hand(x: Tensor) -> bool:
    """Whether the numbers can be looked at without waiting for a device, and are there at all."""
    return type(x) is Tensor and x.device.type == "cpu" and not torch.compiler.is_compiling()
