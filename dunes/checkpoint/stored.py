"""Tensors that lie in files: known by name, shape and dtype before a single number is read."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor


@dataclass(frozen=True)
class Stored:
    """One tensor of a file. `origin` says where it lies, for messages; `read` brings its numbers."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    origin: str
    read: Callable[[], Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes that the numbers take."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta").nbytes


Weights: TypeAlias = Mapping[str, Stored]
