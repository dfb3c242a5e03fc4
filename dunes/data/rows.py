"""Shuffled mini-batches of rows in memory, in an order that is a pure function of (seed, epoch, position)."""

# Shapes: N rows, B batch.

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dunes.data.windows import shuffle_index
from dunes.units import plural


@dataclass(frozen=True)
class Rows:
    """Endless batches of the rows of tensors (N, ...), each row once in an epoch, every epoch in another order.

    A batch may hold the end of one epoch and the beginning of the next, so all have the same size. Raises
    ValueError for tensors of different lengths, or with fewer rows than a batch.
    """

    tensors: tuple[Tensor, ...]
    batch_size: int = 128
    seed: int = 0

    def __post_init__(self) -> None:
        lengths = [len(t) for t in self.tensors]
        if len({*lengths}) != 1:
            raise ValueError(f"tensors of {lengths} rows; expected at least one, and all of the same length")
        if not 1 <= self.batch_size <= lengths[0]:
            raise ValueError(
                f"a batch of {self.batch_size} from {plural(lengths[0], 'row')}; expected 1 to that many"
            )

    def steps(self, epochs: float) -> int:
        """How many batches these epochs have, rounded up."""
        return -int(-epochs * len(self.tensors[0]) // self.batch_size)

    def indices(self, start: int = 0) -> Iterator[Tensor]:
        """The indices (B,), int64, of each batch from number `start` on."""
        size, position = len(self.tensors[0]), start * self.batch_size
        epoch, within = divmod(position, size)
        order = self._order(epoch)[within:]
        while True:
            while len(order) < self.batch_size:
                epoch += 1
                order = torch.cat([order, self._order(epoch)])
            yield order[: self.batch_size]
            order = order[self.batch_size :]

    def _order(self, epoch: int) -> Tensor:
        size = len(self.tensors[0])
        return torch.from_numpy(shuffle_index(np.arange(size), size, (self.seed, epoch)))

    def batches(self, start: int = 0) -> Iterator[tuple[Tensor, ...]]:
        """The batches themselves, from number `start` on."""
        for index in self.indices(start):
            yield tuple(t[index.to(t.device)] for t in self.tensors)
