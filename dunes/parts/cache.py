"""The KV cache: one object, created by the caller, stores the keys and values of all layers.

Memory for a layer is allocated at full capacity when the layer first writes. A token at position p is stored in
slot p (in a rolling cache: slot p modulo the capacity), so rows of unequal length need no shifting. Padding
(position -1) is written to an extra slot, which is never read.
"""

# Shapes: B batch, T new tokens, S readable slots, K key/value heads, D head dim.

import copy
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from dunes.units import plural


class Cache:
    """A KV cache for `capacity` positions in each of `batch` rows. Use it under `torch.no_grad()`.

    In a forward, `start` returns the positions of the new tokens, each layer calls `put`, and `advance` counts the
    new tokens. `slot_positions` returns the position stored in each readable slot. `truncate` drops the last
    tokens; `select_rows` copies rows.
    """

    window: int | None = None
    """Maximum number of positions that a layer may attend to; None: all positions."""
    largest_piece: int | None = None
    """Maximum number of tokens in one forward of a prompt; None: no limit."""
    row_state: tuple[str, ...] = ("length",)
    """Names of the attributes that have one value per row (B,)."""
    stored: tuple[str, ...] = ("keys", "values")
    """Names of the attributes that are lists of tensors (B, ...), such as keys (B, K, slots, D)."""
    growing: tuple[str, ...] = ("keys", "values")
    """Names in `stored` whose tensors grow with the capacity: one slot per position or group of positions."""

    def __init__(self, batch: int, capacity: int, device: torch.device | str = "cpu") -> None:
        self.batch, self.capacity = batch, capacity
        self.length = torch.zeros(batch, dtype=torch.long, device=device)
        # An upper bound on the length of every row, known without a device read. `equal_rows` is True if the bound
        # is exact and all rows are equally long.
        self.max_length, self.equal_rows = 0, True
        self._in_order, self._empty = False, True
        self._slot_numbers = torch.arange(0)
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def __repr__(self) -> str:
        rows = f"{plural(self.batch, 'row')} of {self.capacity} slots, {plural(self.max_length, 'token')} so far"
        return f"{type(self).__name__}({rows}, {plural(len(self.keys), 'layer')})"

    @property
    def readable_slots(self) -> int:
        """Number of slots that attention reads.

        If not `in_order`, the number is a power of two or the capacity, so that few shapes occur.
        """
        if self.in_order:
            return self.max_length
        return min(self.capacity, max(64, 1 << (self.max_length - 1).bit_length()))

    @property
    def in_order(self) -> bool:
        """True if the readable keys have positions 0..S-1 in every row, and the last T keys are new."""
        return self._in_order and not torch.compiler.is_compiling()

    def start(self, new: int | Tensor) -> Tensor:
        """Begin a forward and return the positions (B or 1, T) of its tokens, -1 for padding.

        `new` is the number of tokens in each row, or a bool mask (B, T) that is False for padding. Raises
        ValueError if the tokens exceed the capacity (never for a rolling cache).
        """
        self._count(new)
        if isinstance(new, int):
            first = self.length[:1] if self._in_order else self.length
            positions = first[:, None] + torch.arange(new, device=first.device)
        else:
            positions = torch.where(new, self.length[:, None] + new.long().cumsum(1) - 1, -1)
        self._plan(positions)
        return positions

    def _plan(self, positions: Tensor) -> None:
        """Prepare to store tokens at these positions; called once for all layers."""

    def _count(self, new: int | Tensor) -> None:
        self._empty = self.max_length == 0
        self._in_order, self.equal_rows = self.equal_rows and isinstance(new, int), False
        self.max_length += new if isinstance(new, int) else new.shape[1]
        if self.max_length > self.capacity:  # the bound may be too high
            self.max_length = int((self.length + (new if isinstance(new, int) else new.sum(1))).max())
        if self.max_length > self.capacity:
            raise ValueError(
                f"{plural(self.max_length, 'token does', 'tokens do')} not fit into a cache of "
                f"{self.capacity}; make it larger"
            )

    def start_row(self, new: int, slots: int) -> tuple[int, Tensor]:
        """Begin a forward of a single row with `new` tokens.

        Returns the first slot to write, and the positions (S,) of the slots to read. If `slots` > `new`, these
        include the slots of `slots` - `new` later tokens, which `advance` does not count.
        """
        self._count(new)
        n = self.max_length - new if self._in_order else int(self.length)
        if self._slot_numbers.shape[0] < n + slots:
            self._slot_numbers = torch.arange(2 * (n + slots), device=self.length.device)
        return n, self._slot_numbers[: n + slots]

    def allocate_like(self, other: "Cache") -> None:
        """Allocate the memory of all layers now, with the numbers of heads and the dtypes of another cache."""
        for layers, tensors in ((self.keys, other.keys), (self.values, other.values)):
            layers[:] = [self._allocate(t, self.capacity) for t in tensors]

    def _allocate(self, x: Tensor, slots: int) -> Tensor:
        """Zeros (B, K, slots + 1, D) for keys or values like x (B, K, T, D); the last slot is for padding."""
        return x.new_zeros(self.batch, x.shape[1], slots + 1, x.shape[3])

    def put(self, layer: int, k: Tensor, v: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Write keys and values (B, K, T, D) at `positions`; return all readable keys and values (B, K, S, D)."""
        self._write(layer, k, v, positions)
        return self._read(layer)

    def _write(self, layer: int, k: Tensor, v: Tensor, positions: Tensor) -> None:
        if layer == len(self.keys):
            self.keys.append(self._allocate(k, self.capacity))
            self.values.append(self._allocate(v, self.capacity))
        if self.in_order and self.max_length <= self.capacity:
            block = slice(self.max_length - k.shape[2], self.max_length)
            self.keys[layer][:, :, block], self.values[layer][:, :, block] = k, v
        else:
            # On a CPU, scatter_ of bfloat16 takes time proportional to the size of the cache.
            rows, heads = (torch.arange(n, device=k.device) for n in k.shape[:2])
            index = rows[:, None, None], heads[:, None], self.slots(positions)[:, None]
            self.keys[layer].index_put_(index, k)
            self.values[layer].index_put_(index, v)

    def slots(self, positions: Tensor) -> Tensor:
        """The slots (B, T) of tokens at `positions`; padding has a slot of its own."""
        return torch.where(positions >= 0, positions, self.capacity)

    def _read(self, layer: int) -> tuple[Tensor, Tensor]:
        return self.keys[layer][:, :, : self.readable_slots], self.values[layer][:, :, : self.readable_slots]

    def slot_positions(self, last: Tensor) -> Tensor:
        """The position (B, S) stored in each readable slot, -1 if empty; `last` (B,) is the newest position."""
        slots = torch.arange(self.readable_slots, device=last.device)
        return torch.where(slots <= last[:, None], slots, -1)

    def visible(self, key: Tensor, query: Tensor) -> Tensor:
        """Attention mask (B, T, S), from the positions of keys (B, 1, S) and queries (B, T, 1)."""
        return (key >= 0) & (key <= query)

    @property
    def nbytes(self) -> int:
        """Bytes of the memory allocated for all `stored` tensors."""
        return sum(t.nbytes for name in self.stored for t in getattr(self, name))

    def advance(self, n: Tensor) -> None:
        """End the forward: add the numbers of new tokens `n` (B or 1,) to the rows' lengths."""
        self.length += n
        self.equal_rows = self._in_order

    def grow(self, capacity: int) -> None:
        """Enlarge the cache to `capacity` positions per row, if it is smaller; a rolling cache stays as it is."""
        if self.window is not None or capacity <= self.capacity:
            return
        before, self.capacity = self._slot_count, capacity
        extra = self._slot_count - before
        for name in self.growing:
            padded = [F.pad(t, (*[0] * (2 * (t.dim() - 3)), 0, extra)) for t in getattr(self, name)]
            setattr(self, name, padded)

    @property
    def _slot_count(self) -> int:
        """Number of slots of the `growing` tensors, without the slot for padding."""
        return self.capacity

    def truncate(self, n: Tensor) -> Tensor:
        """Keep only the first `n` (B,) tokens of each row. Returns the number of tokens (B,) that remain."""
        self.length.copy_(torch.minimum(self.length, n.to(self.length)))
        self._measure()
        return self.length.clone()

    def _measure(self) -> None:
        lengths = self.length.tolist()
        self.max_length, self.equal_rows = max(lengths), min(lengths) == max(lengths)

    def select_rows(self, rows: Tensor | slice) -> Self:
        """A new cache that contains these rows (N,) of this cache, in this order; a row may occur twice.

        With a slice, both caches share memory, so call `write_rows` before this cache is read again.
        """
        cache = copy.copy(self)
        for name in self.row_state:
            setattr(cache, name, getattr(self, name)[rows])
        cache.batch = len(cache.length)
        for name in self.stored:
            setattr(cache, name, [t[rows] for t in getattr(self, name)])
        cache._measure()
        return cache

    def write_rows(self, rows: Tensor | slice, other: Self) -> None:
        """Copy the N rows of another cache to these rows (N,) of this cache: the inverse of `select_rows`."""
        for name in self.row_state:
            getattr(self, name)[rows] = getattr(other, name)
        self._measure()
        for name in self.stored if isinstance(rows, Tensor) else ():  # a slice shares the memory
            for tensor, rows_of_other in zip(getattr(self, name), getattr(other, name), strict=True):
                tensor[rows] = rows_of_other


class RollingCache(Cache):
    """A cache of the last `window + slack` positions of each row; its memory does not grow with the text.

    Every layer of the model must have a window of at most `window`. Once a text is longer than the capacity,
    `truncate` can drop at most `slack + 1` tokens.
    """

    row_state = ("length", "high_water")

    def __init__(self, batch: int, window: int, device: torch.device | str = "cpu", slack: int = 16) -> None:
        super().__init__(batch, window + slack, device)
        self.window, self.slack = window, slack
        # One past the highest position ever written in each row, since rolled-back tokens still occupy slots.
        self.high_water = torch.zeros_like(self.length)
        self._new_positions: Tensor | None = None
        # True if slots may contain positions >= capacity; `truncate` does not remove them from the slots.
        self._wrapped = False

    def _plan(self, positions: Tensor) -> None:
        # A single new token overwrites a token outside every window. The first of several new tokens still attends
        # to slots that the last new token overwrites, so new tokens are read separately from the slots.
        self._new_positions = positions if self._wrapped and positions.shape[1] > 1 else None

    def _count(self, new: int | Tensor) -> None:
        self._new_positions = None
        self._empty = self.max_length == 0
        self.max_length += new if isinstance(new, int) else new.shape[1]
        self._wrapped = (self._wrapped and not self._empty) or self.max_length > self.capacity
        equal, self.equal_rows = self.equal_rows and isinstance(new, int), False
        self._in_order = equal and (self._empty or not self._wrapped)

    def put(self, layer: int, k: Tensor, v: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Write keys and values (B, K, T, D) at `positions`; return all readable keys and values (B, K, S, D)."""
        readable = k, v
        if self._new_positions is not None and not self._empty:
            readable = torch.cat([self._read(layer)[0], k], 2), torch.cat([self._read(layer)[1], v], 2)
        self._write(layer, k, v, positions)
        return self._read(layer) if self._new_positions is None else readable

    def slots(self, positions: Tensor) -> Tensor:
        """The slots (B, T) of tokens at `positions`; padding has a slot of its own."""
        is_stored = (positions >= 0) & (positions > positions.amax(1, keepdim=True) - self.capacity)
        return torch.where(is_stored, positions % self.capacity, self.capacity)

    def write_rows(self, rows: Tensor | slice, other: Self) -> None:
        """Copy the N rows of another cache to these rows (N,) of this cache: the inverse of `select_rows`."""
        super().write_rows(rows, other)
        self._wrapped |= other._wrapped

    def slot_positions(self, last: Tensor) -> Tensor:
        """The position (B, S) stored in each readable slot, -1 if empty; `last` (B,) is a row's newest position.

        If `put` returns new tokens separately after the slots, the new tokens' positions come last.
        """
        if self._new_positions is None:
            return ring_positions(last, self.readable_slots, self.capacity)
        stored = [] if self._empty else [ring_positions(self.length - 1, self.readable_slots, self.capacity)]
        return torch.cat([*stored, self._new_positions], 1)

    def start_row(self, new: int, slots: int) -> tuple[int, Tensor]:
        """Begin a forward of a row's next token: returns its slot, and the positions (S,) of the slots to read."""
        n, positions = super().start_row(new, slots)
        numbers = positions[: self.capacity]
        return n % self.capacity, n - (n - numbers) % self.capacity

    def advance(self, n: Tensor) -> None:
        """End the forward: add the numbers of new tokens `n` (B,) to the rows' lengths."""
        super().advance(n)
        self.high_water = torch.maximum(self.high_water, self.length)

    def truncate(self, n: Tensor) -> Tensor:
        """Keep only the first `n` (B,) tokens of each row. Returns the number of tokens (B,) that remain.

        A row that was ever longer than the capacity can drop at most `slack + 1` tokens, counted from its greatest
        length. A row that has to drop more tokens is emptied (0 tokens remain), and the caller must prefill it
        again.
        """
        n = torch.minimum(self.length, n.to(self.length))
        possible = (self.high_water <= self.capacity) | (self.high_water - n <= self.slack + 1)
        remaining = super().truncate(torch.where(possible, n, 0))
        self.high_water = torch.where(remaining == 0, 0, self.high_water)
        return remaining


def ring_positions(last: Tensor, slots: int, size: int) -> Tensor:
    """The position (B, S) stored in each of the first `slots` slots of a ring, -1 if empty.

    The ring has `size` slots; `last` (B,) is the newest position of each row.
    """
    age = (last[:, None] - torch.arange(slots, device=last.device)) % size
    return (last[:, None] - age).clamp(min=-1)


def readable_on_host(x: Tensor) -> bool:
    """True if the tensor's values can be read without waiting for a device."""
    return type(x) is Tensor and x.device.type == "cpu" and not torch.compiler.is_compiling()
