"""Matrices with many zeros, stored as a bit for each weight and the weights that are not zero.

A matrix `X` (O, I) is two tensors of a safetensors file: `X.mask` uint8 (O, I / 8), whose bit 1 << (i % 8) of byte
i // 8 says that weight i of a row is not zero, and `X.nonzero` (K,) in the matrix's dtype, row by row. The indices
of 2:4 and 4:8 patterns, two bits for each weight kept and seven for eight weights, would save at most an eighth of
the mask; there is one form for all.
"""

# Shapes: O outputs, I inputs, K weights that are not zero.

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from dunes.checkpoint.files import header
from dunes.checkpoint.files.lazy_tensor import LazyTensor, Weights

COMPACT = "model.compact.safetensors"
"""Its own name, since other tools would take the missing matrices for new ones."""
MASK, NONZERO = ".mask", ".nonzero"
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def compacted(weights: Weights) -> dict[str, LazyTensor]:
    """The tensors to write: those that get smaller in the compact form, and the others as they are."""
    stored: dict[str, LazyTensor] = {}
    for name, tensor in weights.items():
        pair = _pair(tensor)
        if pair is None or sum(part.nbytes for part in pair) >= tensor.nbytes:
            stored[name] = tensor
        else:
            stored[name + MASK], stored[name + NONZERO] = pair
    return stored


def _pair(tensor: LazyTensor) -> tuple[LazyTensor, LazyTensor] | None:
    """The mask and the other values of a matrix; None for other tensors."""
    if len(tensor.shape) != 2 or tensor.shape[1] % 8 or tensor.dtype not in FLOATS:
        return None
    count, (rows, columns) = int(_kept(tensor.read()).sum()), tensor.shape
    tensor.release()

    def nonzero() -> Tensor:
        dense = tensor.read()
        return dense[_kept(dense)]

    def mask() -> Tensor:
        return pack(_kept(tensor.read()))

    return (
        LazyTensor((rows, columns // 8), torch.uint8, tensor.origin, mask, tensor.release),
        LazyTensor((count,), tensor.dtype, tensor.origin, nonzero, tensor.release),
    )


def _kept(dense: Tensor) -> Tensor:
    """Where a weight is not zero, or is the zero with a sign, which is kept as it is."""
    return (dense != 0) | dense.signbit()


def pack(mask: Tensor) -> Tensor:
    """bool (O, I) -> uint8 (O, I / 8)."""
    bits = mask.view(len(mask), -1, 8).to(torch.uint8) << torch.arange(8, dtype=torch.uint8, device=mask.device)
    return bits.sum(2, dtype=torch.uint8)


def unpack(packed: Tensor) -> Tensor:
    """uint8 (O, I / 8) -> bool (O, I)."""
    bits = packed[:, :, None] >> torch.arange(8, dtype=torch.uint8, device=packed.device) & 1
    return bits.flatten(1).bool()


def dense_tensors(files: Weights, path: Path) -> dict[str, LazyTensor]:
    """The tensors of a compact file as dense ones, decoded when they are read.

    Raises ValueError for a mask or values without the other, of other shapes and dtypes, and for a matrix that
    also stands there densely; when read, for a mask that does not fit the number of values.
    """
    names = {key.removesuffix(end) for key in files for end in (MASK, NONZERO) if key.endswith(end)}
    dense = {key: tensor for key, tensor in files.items() if not key.endswith((MASK, NONZERO))}
    try:
        return dense | {name: _dense(name, files) for name in sorted(names)}
    except ValueError as error:
        raise header.refusal(path, error, "fetch the file again") from None


def _dense(name: str, files: Mapping[str, LazyTensor]) -> LazyTensor:
    mask, nonzero = files.get(name + MASK), files.get(name + NONZERO)
    if mask is None or nonzero is None or name in files:
        present = ", ".join(key for key in (name, name + MASK, name + NONZERO) if key in files)
        raise ValueError(f"{name}: stored as {present}; expected {name + MASK} and {name + NONZERO}")
    if len(mask.shape) != 2 or mask.dtype != torch.uint8:
        raise ValueError(
            f"{mask.origin}: {mask.dtype} of shape {mask.shape}; expected uint8 (outputs, inputs / 8)"
        )
    shape = (mask.shape[0], 8 * mask.shape[1])
    if len(nonzero.shape) != 1 or nonzero.dtype not in FLOATS or nonzero.shape[0] > shape[0] * shape[1]:
        raise ValueError(
            f"{nonzero.origin}: {nonzero.dtype} of shape {nonzero.shape}; expected up to {shape[0] * shape[1]} "
            "floating-point values"
        )

    def read() -> Tensor:
        kept = unpack(mask.read())
        if (count := int(kept.sum())) != nonzero.shape[0]:
            raise ValueError(f"{mask.origin}: has {count} bits for {nonzero.shape[0]} values; fetch it again")
        return torch.zeros(shape, dtype=nonzero.dtype).masked_scatter_(kept, nonzero.read())

    def release() -> None:
        mask.release()
        nonzero.release()

    return LazyTensor(shape, nonzero.dtype, f"{nonzero.origin} and mask", read, release)
