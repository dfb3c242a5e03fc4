"""Matrix products and attention of bfloat16 tensors, computed in float32 on CPUs where float32 is faster.

Without AMX, oneDNN multiplies bfloat16 at half the rate of float32 (Xeon with AVX512_BF16, 256 tokens, 384 x 1,024
weights, one thread: 84 and 154 GFLOP/s). Converting a matrix to float32 takes less time than the float32 products
save. Results are rounded to bfloat16 only once, so they are at least as exact as bfloat16 products.

The Gram matrix of inputs is the sum of x x^T over the tokens, in float32. Only the upper triangle is computed, in
panels of rows. For bfloat16 inputs, products in bfloat16 give the same matrix up to 1e-6: a product of two
bfloat16 numbers is exact in float32, and AMX accumulates in float32. Products in bfloat16 are faster (4,096
tokens, 5,632 inputs, two threads: 0.82 s plain, 0.47 s in panels, 0.24 s in panels with bfloat16 products).
"""

# Shapes: N tokens, I inputs.

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from dunes import measure
from dunes.ops.operation import without_autocast

MIN_TOKENS = 128
"""Minimum number of tokens for float32 products; with 64, they gain only the time of converting the weights."""
PANELS, NARROWEST = 8, 256  # number of panels of the Gram matrix, and minimum rows of a panel


def float32_products(weight: Tensor, tokens: int) -> AbstractContextManager[Any]:
    """`Float32Products` if float32 products make a forward of `tokens` tokens faster, otherwise a null context."""
    return Float32Products() if multiplies_in_float32(weight, tokens) else nullcontext()


def multiplies_in_float32(weight: Tensor, tokens: int) -> bool:
    """True if float32 products make a forward of `tokens` tokens faster, for weights of this dtype and device."""
    applies = weight.dtype == torch.bfloat16 and weight.device.type == "cpu" and tokens >= MIN_TOKENS
    return applies and float32_is_faster()


_recorded: list[bool] = []
"""The result of `float32_is_faster` in a recorded run, while that run is repeated; otherwise empty."""


def repeat_choice(faster: bool | None) -> None:
    """From now on, `float32_is_faster` returns `faster`, the choice recorded by an earlier run.

    With None, the choice depends on this machine again.
    """
    _recorded[:] = [] if faster is None else [faster]


def float32_is_faster() -> bool:
    """True if float32 products are clearly faster than bfloat16 products on this machine.

    Since results depend on this choice, the choice depends only on the processor's type and is the same in all
    runs.
    """
    return _recorded[0] if _recorded else measure.choose_dtype(torch.device("cpu")) == torch.float32


class Float32Products(TorchFunctionMode):
    """Computes `F.linear` and attention of MIN_TOKENS or more bfloat16 rows in float32; returns bfloat16."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func not in (F.linear, F.scaled_dot_product_attention):
            return func(*args, **kwargs)
        x = args[0] if args else kwargs.get("input", kwargs.get("query"))
        if x.dtype != torch.bfloat16 or x.numel() < MIN_TOKENS * x.shape[-1]:
            return func(*args, **kwargs)
        return func(*map(_widen, args), **{name: _widen(a) for name, a in kwargs.items()}).to(x.dtype)


def _widen(argument: Any) -> Any:
    return argument.float() if isinstance(argument, Tensor) and argument.is_floating_point() else argument


def plain_gram(x: Tensor) -> Tensor:
    """The Gram matrix (I, I) of inputs (N, I), computed in float32 even under autocast."""
    with without_autocast(x):
        return x.float().T @ x.float()


def add_gram(matrix: Tensor, x: Tensor) -> None:
    """Add the Gram matrix of inputs (N, I) to the upper triangle of `matrix` (I, I), float32.

    Entries below the diagonal are undefined until `mirror` is called.
    """
    wide = x.float()
    with _exact_products(x):
        for start, stop in _panels(len(matrix)):
            matrix[start:stop, start:].addmm_(wide[:, start:stop].T, wide[:, start:])


def mirror(matrix: Tensor) -> None:
    """Copy the upper triangle of a matrix (I, I) to the lower triangle."""
    for start, stop in _panels(len(matrix)):
        matrix[stop:, start:stop] = matrix[start:stop, stop:].T
        square = matrix[start:stop, start:stop]  # some products of float32 are not exactly symmetric
        square.copy_(square.triu() + square.triu(1).T)


def _panels(inputs: int) -> Iterator[tuple[int, int]]:
    width = max(NARROWEST, -(-inputs // PANELS))
    for start in range(0, inputs, width):
        yield start, min(start + width, inputs)


def _exact_products(x: Tensor) -> AbstractContextManager[None]:
    """Inside this context, float32 products run in bfloat16 if x is bfloat16 on a CPU and bfloat16 is faster."""
    cpu = x.dtype == torch.bfloat16 and x.device.type == "cpu"
    return nullcontext() if not cpu or float32_is_faster() else _products_allow_bfloat16()


def fast_products(dtype: torch.dtype, device: torch.device) -> AbstractContextManager[None]:
    """A context that computes float32 matrix products by oneDNN, if this is faster and a model runs in `dtype`.

    On AMD processors, MKL uses AVX2, and oneDNN uses AVX-512 (Zen 5, one thread, 128 x 784 by 784 x 128: 105 and
    211 GFLOP/s). PyTorch calls oneDNN only where rounding to bfloat16 is allowed. Without AMX, oneDNN does not
    round, which is checked once. The context of a bfloat16 model does nothing, since its few float32 products are
    small: a small product takes oneDNN 12 us, and MKL 2 us. On a GPU it does nothing either: inside the context,
    `torch.get_float32_matmul_precision` raises RuntimeError, and Inductor calls it for GPUs.
    """
    applies = dtype == torch.float32 and device.type == "cpu"
    return _products_allow_bfloat16() if applies and _onednn_is_faster() else nullcontext()


@cache
def _onednn_is_faster() -> bool:
    facts = measure.processor()
    if facts.get("vendor_id") != "AuthenticAMD" or "avx512f" not in facts["flags"].split():
        return False
    x = torch.full((64, 64), 1 + 2**-12, dtype=torch.float32, device="cpu")  # 1 in bfloat16
    with _products_allow_bfloat16(), without_autocast(x):
        return torch.allclose((x @ x).double(), x.double() @ x.double())


@contextmanager
def _products_allow_bfloat16() -> Iterator[None]:
    setting: Any = torch.backends.mkldnn
    before = setting.matmul.fp32_precision
    if before == "bf16":  # also if another thread is inside, which restores the setting
        yield
        return
    if before == setting.fp32_precision:  # inherited, so that it follows later changes of the general setting
        before = "none"
    setting.matmul.fp32_precision = "bf16"
    try:
        yield
    finally:
        setting.matmul.fp32_precision = before
