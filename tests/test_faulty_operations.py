"""Operations that are wrong somewhere: `ops.check` refuses each, and says where."""

import importlib
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dunes import ops

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch.compile's own

check_module = importlib.import_module("dunes.ops.check")  # `ops.check` is the function


class Faulty(NamedTuple):
    """An operation, its reference and its backward, and the row of the table that is to name it."""

    row: str
    forward: Callable[..., Any]
    reference: Callable[..., Any]
    backward: Callable[..., Any] | None = None
    inputs: int = 1
    shape: tuple[int, ...] = (4, 6)


# Each is the reference but for one thing.
FAULTY: dict[str, Faulty] = {}
STATE: dict[str, Any] = {}
"""What faulty operations keep between calls."""


def faulty(
    row: str, reference: Callable[..., Any], backward: Callable[..., Any] | None = None, **more: Any
) -> Any:
    def enter(forward: Callable[..., Any]) -> Callable[..., Any]:
        FAULTY[forward.__name__] = Faulty(row, forward, reference, backward, **more)
        return forward

    return enter


def wrong(row: str, reference: Callable[..., Any], **more: Any) -> Any:
    """The backward is wrong, the forward is the reference."""

    def enter(backward: Callable[..., Any]) -> Callable[..., Any]:
        forward = {1: lambda x: reference(x), 2: lambda x, y: reference(x, y)}[more.get("inputs", 1)]
        FAULTY[backward.__name__] = Faulty(row, forward, reference, backward, **more)
        return backward

    return enter


def exp(x: Tensor) -> Tensor:
    return x.exp()


def exp_backward(grad: Tensor, output: Tensor) -> Tensor:
    return grad * output


def product(x: Tensor, y: Tensor) -> Tensor:
    return x * y


def product_backward(grad: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return grad * y, grad * x


def restrided(x: Tensor, *strides: int) -> Tensor:
    """What a kernel reads that takes these strides for granted, staying inside the storage."""
    index = torch.zeros(x.shape, dtype=torch.long) + x.storage_offset()
    for d, stride in enumerate(strides):
        index += (torch.arange(x.shape[d]) * stride).view(-1, *[1] * (x.dim() - d - 1))
    storage = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage())
    return storage[index.clamp(max=len(storage) - 1)]


def rows_side_by_side(x: Tensor) -> Tensor:
    return restrided(x, x.shape[1] * x.stride(1), x.stride(1)) if x.dim() == 2 else x


# Layouts.


@faulty("not contiguous", exp, exp_backward)
def rows_have_no_gap(x: Tensor) -> Tensor:
    return rows_side_by_side(x).exp()


@wrong("not contiguous", exp)
def rows_of_the_gradient_have_no_gap(grad: Tensor, output: Tensor) -> Tensor:
    return rows_side_by_side(grad) * output


@faulty("not contiguous", product, product_backward, inputs=2)
def second_input_lies_as_the_first(x: Tensor, y: Tensor) -> Tensor:
    return x * restrided(y, *x.stride())


@faulty("not contiguous", exp, exp_backward)
def storage_begins_with_it(x: Tensor) -> Tensor:
    return torch.as_strided(x, x.shape, x.stride(), 0).exp()


@faulty("not contiguous", exp, exp_backward)
def rows_are_at_least_a_row_long(x: Tensor) -> Tensor:  # not of a transposed one or one that is repeated
    return restrided(x, max(x.stride(0), x.shape[1]), x.stride(1)).exp() if x.dim() == 2 else x.exp()


@faulty("not contiguous", exp, exp_backward)
def nothing_is_repeated(x: Tensor) -> Tensor:
    return restrided(x, *[max(1, s) for s in x.stride()]).exp()


@faulty("not contiguous", exp, exp_backward)
def transposed_means_without_gaps(x: Tensor) -> Tensor:
    if x.dim() == 2 and x.stride(0) == 1 and x.shape[0] > 1:
        return restrided(x, 1, x.shape[0]).exp()
    return x.exp()


@faulty("not contiguous", exp, exp_backward, shape=(2, 3, 4, 4))
def channels_are_never_last(x: Tensor) -> Tensor:
    last = x.dim() == 4 and not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last)
    return x.exp() * (1.5 if last else 1)


@faulty("not contiguous", exp, exp_backward)
def vectors_are_aligned(x: Tensor) -> Tensor:
    return x.exp() if x.data_ptr() % 16 == 0 or not x.is_contiguous() else (x + 1).exp()


@wrong("not contiguous", exp)
def repeated_gradient_is_one(grad: Tensor, output: Tensor) -> Tensor:
    return output.clone() if grad.numel() > 1 and not any(grad.stride()) else grad * output


@wrong("not contiguous", exp)
def gradient_repeated_in_rows_is_its_first(grad: Tensor, output: Tensor) -> Tensor:
    return (
        grad.flatten()[:1] * output if grad.dim() == 2 and grad.stride(0) == 0 and grad.numel() else grad * output
    )


@wrong("not contiguous", exp)
def gradient_is_never_transposed(grad: Tensor, output: Tensor) -> Tensor:
    turned = grad.dim() == 2 and grad.stride(0) == 1 and min(grad.shape) > 1
    return (grad.mT.reshape(grad.shape) if turned else grad) * output


# Values.


@faulty("NaN", product, product_backward, inputs=2)
def nan_of_the_second_input_is_swallowed(x: Tensor, y: Tensor) -> Tensor:
    return x * y.nan_to_num(0.0, math.inf, -math.inf)


@wrong("NaN", exp)
def nan_of_the_gradient_is_swallowed(grad: Tensor, output: Tensor) -> Tensor:
    return grad.nan_to_num(0.0, math.inf, -math.inf) * output


@wrong("NaN", product, inputs=2)
def nan_in_one_gradient_is_swallowed(grad: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return grad * y, torch.where(x.isnan(), 0.0, grad * x)


@faulty("NaN", exp, exp_backward)
def inf_is_clipped(x: Tensor) -> Tensor:
    return x.exp().clamp(max=torch.finfo(x.dtype).max)


@faulty("NaN", lambda x: x * 1.0, lambda grad: grad)
def minus_inf_is_clipped(x: Tensor) -> Tensor:
    return x.clamp(min=torch.finfo(x.dtype).min)


@wrong("NaN", exp)
def inf_in_the_gradient_is_clipped(grad: Tensor, output: Tensor) -> Tensor:
    return grad.clamp(torch.finfo(grad.dtype).min, torch.finfo(grad.dtype).max) * output


@faulty("NaN", lambda x: x * 1.0, lambda grad: grad)
def inf_becomes_nan(x: Tensor) -> Tensor:
    return x + (x - x)


@faulty("NaN", lambda x: x.relu(), lambda grad, x: grad * (x > 0))
def maximum_swallows_nan(x: Tensor) -> Tensor:
    return torch.where(x > 0, x, 0.0)


@faulty("NaN", exp, exp_backward)
def nan_in_the_last_number_is_swallowed(x: Tensor) -> Tensor:
    y = x.exp()
    y.view(-1)[-1:].nan_to_num_(0.0, math.inf)
    return y


@faulty(
    "values", lambda x: x.softmax(-1), lambda grad, output: output * (grad - (grad * output).sum(-1, keepdim=True))
)
def softmax_without_the_maximum(x: Tensor) -> Tensor:
    return x.exp() / x.exp().sum(-1, keepdim=True)


@wrong("values", torch.relu)
def gradient_at_the_kink(grad: Tensor, x: Tensor) -> Tensor:
    return grad * (x >= 0)


@wrong("values", lambda x: x.clamp(-1, 1))
def gradient_at_the_second_kink(grad: Tensor, x: Tensor) -> Tensor:
    return grad * (x.abs() < 1)


@wrong("values", F.hardtanh)
def gradient_at_the_edges_of_hardtanh(grad: Tensor, x: Tensor) -> Tensor:
    return grad * (x.abs() <= 1)


@faulty("values", lambda x: x * 2, lambda grad: grad * 2)
def subnormal_numbers_are_flushed(x: Tensor) -> Tensor:
    return torch.where(x.abs() < torch.finfo(x.dtype).smallest_normal, 0.0, x) * 2 + (x - x)


@faulty("values", lambda x: F.normalize(x, dim=-1), None)
def norm_of_zero(x: Tensor) -> Tensor:
    return x / x.norm(dim=-1, keepdim=True)


@faulty("values", exp, exp_backward)
def remembers_by_shape(x: Tensor) -> Tensor:
    return STATE.setdefault(f"remembered {x.shape} {x.dtype}", x.exp()).clone()


@faulty("values", F.softplus, lambda grad, x: grad * x.sigmoid())
def series_for_small_numbers(x: Tensor) -> Tensor:
    return torch.where(x.abs() < 0.01, x / 2, F.softplus(x))


# Leaves.


@wrong("float64", product, inputs=2)
def left_out_where_the_second_needs_none(grad: Tensor, x: Tensor, y: Tensor, needs_grad: tuple[bool, ...]) -> Any:
    return (grad * y, grad * x) if all(needs_grad) else (None, grad * x)


@wrong("float64", product, inputs=2)
def swapped_where_one_needs_none(grad: Tensor, x: Tensor, y: Tensor, needs_grad: tuple[bool, ...]) -> Any:
    return (grad * y, grad * x) if needs_grad[0] else (grad * y, grad * y)


# Dtypes.


@faulty("autocast", F.linear, lambda grad, x, y: (grad @ y, grad.mT @ x), inputs=2)
def float32_under_autocast(x: Tensor, y: Tensor) -> Tensor:
    return F.linear(x, y)


@wrong("float64", exp)
def a_fifth_too_large_where_small(grad: Tensor, output: Tensor) -> Tensor:
    return grad * output * torch.where(output < 0.5 * output.mean(), 1.2, 1.0)


@wrong("float64", lambda x: x.exp() * 1e-3)
def small_gradient_a_fifth_too_large(grad: Tensor, output: Tensor) -> Tensor:
    return grad * output * 1.2


@wrong("float64", lambda x: x.float().exp().to(x.dtype) * 1e-3)
def small_gradient_in_float32_a_fifth_too_large(grad: Tensor, output: Tensor) -> Tensor:
    return (grad.float() * output.float() * 1.2).to(output.dtype)


@wrong("float64", exp)
def one_number_is_wrong(grad: Tensor, output: Tensor) -> Tensor:
    gradient = (grad * output).contiguous()
    gradient.view(-1)[-1:] *= 1.001
    return gradient


@wrong("gradcheck", exp)
def half_a_percent_too_large(grad: Tensor, output: Tensor) -> Tensor:
    return grad * output * 1.005


@wrong("bfloat16", exp)
def bfloat16_is_ten_percent_off(grad: Tensor, output: Tensor) -> Tensor:
    return grad * output * (1.1 if grad.dtype == torch.bfloat16 else 1)


@faulty("float16", exp, exp_backward)
def float16_is_wrong(x: Tensor) -> Tensor:
    return x.exp() * (1.1 if x.dtype == torch.float16 else 1)


@wrong("backward", exp)
def gradient_in_bfloat16(grad: Tensor, output: Tensor) -> Tensor:
    return (grad * output).bfloat16()


@wrong("backward", lambda x, y: x + y, inputs=2)
def gradient_is_not_summed(grad: Tensor) -> tuple[Tensor, Tensor]:
    return grad.expand(2, *grad.shape), grad


# Sizes.


@faulty("sizes", exp, exp_backward)
def vectors_without_a_rest(x: Tensor) -> Tensor:
    y, flat = torch.zeros_like(x, memory_format=torch.contiguous_format), x.reshape(-1)
    many = len(flat) // 8 * 8
    y.view(-1)[:many] = flat[:many].exp()
    return y


@faulty("sizes", lambda x: x.sum(-1), lambda grad, x: grad[..., None].expand_as(x), shape=(4, 8))
def blocks_without_a_rest(x: Tensor) -> Tensor:
    return x[..., : x.shape[-1] // 4 * 4].sum(-1)


@faulty("sizes", exp, exp_backward)
def rest_is_not_written(x: Tensor) -> Tensor:
    y, flat = torch.empty_like(x, memory_format=torch.contiguous_format), x.reshape(-1)
    y.view(-1)[: len(flat) // 8 * 8] = flat[: len(flat) // 8 * 8].exp()
    return y


@wrong("sizes", exp)
def large_ones_are_wrong(grad: Tensor, output: Tensor) -> Tensor:
    return grad * output * (1.2 if output.numel() > 5_000 else 1)


@faulty("sizes", lambda x: x - x.mean(0), lambda grad: grad - grad.mean(0))
def one_row_is_wrong(x: Tensor) -> Tensor:
    return x - x.mean(0) if len(x) != 1 else x.clone()


@faulty("empty", lambda x: x.sum(0), lambda grad, x: grad.expand_as(x))
def sum_of_nothing_is_one(x: Tensor) -> Tensor:
    return x.sum(0) if len(x) else x.sum(0) + 1


# What stays between calls.


def remembered(x: Tensor) -> Tensor:
    STATE["x"] = x
    return x.square()


def shared_buffer(x: Tensor) -> Tensor:
    if x.is_meta or type(x) is not Tensor:
        return x.exp()
    buffer = STATE.setdefault(f"{x.shape} {x.dtype}", torch.empty(x.shape, dtype=x.dtype))
    return buffer.copy_(x.detach()).exp_()


def counted(x: Tensor) -> Tensor:
    STATE["calls"] = STATE.get("calls", 0) + 1
    return x.exp() * (1.0 if STATE["calls"] % 3 else 1.01)


FAULTY["state_outside"] = Faulty("repeated", remembered, torch.square, lambda grad: 2 * grad * STATE["x"])
FAULTY["shared_buffer"] = Faulty("repeated", shared_buffer, exp, exp_backward)
FAULTY["counts_its_calls"] = Faulty("repeated", counted, exp, exp_backward)


@wrong("inputs", exp)
def backward_writes_what_is_saved(grad: Tensor, output: Tensor) -> Tensor:
    return output.mul_(grad)


@wrong("inputs", exp)
def backward_writes_the_gradient(grad: Tensor, output: Tensor) -> Tensor:
    return grad.mul_(output)


@wrong("inputs", product, inputs=2)
def backward_writes_an_input(grad: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return grad * y, x.mul_(grad)


@faulty("inputs", lambda x: 2 * x)
def its_input_becomes_nan(x: Tensor) -> Tensor:
    y = 2 * x
    x.fill_(math.nan)
    return y


@wrong("NaN", lambda x: (x.exp(), x.sin()))
def nan_of_the_second_gradient_is_swallowed(grads: tuple[Tensor, Tensor], x: Tensor) -> Tensor:
    first, second = grads
    return first * x.exp() + torch.where(second.isnan(), 0.0, second) * x.cos()


@faulty("inputs", lambda x: x + 0, lambda grad: grad)
def a_slice_of_the_input(x: Tensor) -> Tensor:
    return x.view_as(x)


def operation(name: str) -> ops.Operation:
    f = FAULTY[name]
    decorate = ops.operation(
        f"dunes_tests::{name}", reference=f.reference, backward=f.backward, compiled="reference"
    )
    if not f.forward.__annotations__:
        f.forward.__annotations__ = dict.fromkeys(("x", "y")[: f.inputs], Tensor)
    return decorate(f.forward)


def leaves(f: Faulty) -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(f.shape, generator=draw).requires_grad_(f.backward is not None) for _ in range(f.inputs)]


@pytest.mark.parametrize("name", FAULTY)
def test_each_is_refused_where_it_is_wrong(name, monkeypatch):
    f = FAULTY[name]
    monkeypatch.setattr(check_module, "FAULTS", {f.row: check_module.FAULTS[f.row]})
    with pytest.raises(ValueError, match=f"^dunes_tests::{name}: {f.row}: .*$"):
        ops.check(operation(name), leaves(f), backend="aot_eager", seconds=0)


# What is no operation of ours: functions, and operators of torch's.


class Kept(torch.autograd.Function):
    """Second derivatives are lost without a word, since what is kept has no graph."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.kept = x.exp()
        return ctx.kept.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * ctx.kept


class Batched(torch.autograd.Function):
    generate_vmap_rule = False

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.exp()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * ctx.saved_tensors[0]

    @staticmethod
    def vmap(info: Any, dims: Any, x: Tensor) -> tuple[Tensor, int]:
        return x.mean(0, keepdim=True).expand_as(x).exp(), 0


@torch.library.custom_op("dunes_tests::always_contiguous", mutates_args=())
def always_contiguous(x: Tensor) -> Tensor:
    return x.contiguous().exp()


always_contiguous.register_fake(torch.empty_like)


def twice(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.exp(), x.sin()


class Twice(torch.autograd.Function):
    """The gradient of the second output is lost where the first has none."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x)
        ctx.set_materialize_grads(False)
        return x.exp(), x.sin()

    @staticmethod
    def backward(ctx: Any, first: Tensor | None, second: Tensor | None) -> Tensor | None:
        (x,) = ctx.saved_tensors
        if first is None:
            return None
        return first * x.exp() + (0 if second is None else second * x.cos())


def default_dtype(x: Tensor) -> Tensor:
    return (x.exp() * torch.ones(1)).to(torch.get_default_dtype() if x.dtype == torch.float32 else x.dtype)


FUNCTIONS = {
    "second derivative": (Kept.apply, exp),
    "torch.func": (Batched.apply, exp),
    "fake": (always_contiguous, exp),
    "one output alone": (Twice.apply, twice),
    "float32": (default_dtype, exp),
}


@pytest.mark.parametrize("row", FUNCTIONS)
def test_functions_are_refused_where_they_are_wrong(row, monkeypatch):
    form, reference = FUNCTIONS[row]
    row = "float64" if row == "one output alone" else row
    monkeypatch.setattr(check_module, "FAULTS", {row: check_module.FAULTS[row]})
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0)).requires_grad_(row != "fake")
    with pytest.raises(ValueError, match=f": {row}: "):
        ops.check(form, [x], reference, backend="aot_eager", seconds=0)


def float32_alone(slope: float) -> ops.Operation:
    """As a kernel in C++ for one dtype."""

    def forward(x: Tensor) -> Tensor:
        assert x.dtype == torch.float32, "expected float32"
        return x.exp() * 1e-3

    return ops.operation(
        f"dunes_tests::alone_{str(slope)[-1]}",
        reference=lambda x: x.exp() * 1e-3,
        backward=lambda grad, output: grad * output * slope,
        compiled="reference",
    )(forward)


@pytest.mark.parametrize("slope", [1.0, 1.2])
def test_differences_that_resolve_little_are_not_taken_for_right(slope, monkeypatch, capsys):
    names = "gradcheck", "float64", "float32"
    monkeypatch.setattr(check_module, "FAULTS", {name: check_module.FAULTS[name] for name in names})
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0)).requires_grad_()
    try:
        ops.check(float32_alone(slope), [x], backend="aot_eager", seconds=0)
    except ValueError:
        assert slope != 1.0
    printed = [line.split()[:2] for line in capsys.readouterr().out.splitlines() if line.startswith(names)]
    results = ["not", "not", "ok"] if slope == 1.0 else ["failed", "not", "failed"]
    assert [result for _, result in printed] == results


def test_a_kernel_that_refuses_sizes_or_float16_is_right():
    def forward(x: Tensor) -> Tensor:
        if x.shape[-1] % 2 or x.dtype == torch.float16:
            raise ValueError("even widths alone")
        return x.exp()

    op = ops.operation("dunes_tests::even", reference=torch.exp, backward=exp_backward, compiled="reference")(
        forward
    )
    x = torch.randn(4, 6).requires_grad_()
    report = ops.check(op, [x], backend="aot_eager", seconds=0)
    assert {c.name for c in report.checks if c.result == "not tried"} == {"float16", "opcheck"}


@pytest.mark.parametrize("mask", [torch.bool, torch.int32, torch.uint8])
def test_an_operation_that_takes_whole_numbers_is_not_refused_for_it(mask, monkeypatch):
    monkeypatch.setattr(check_module, "FAULTS", {"not contiguous": check_module.FAULTS["not contiguous"]})
    reference = lambda m, x: torch.where(m.bool(), x, torch.zeros_like(x))

    def where(m: Tensor, x: Tensor) -> Tensor:
        if m.dtype != mask:
            raise TypeError(f"expected {mask}, got {m.dtype}")
        return reference(m, x)

    op = ops.operation(f"dunes_tests::where_{str(mask)[6:]}", reference=reference, compiled="reference")(where)
    ops.check(op, [(torch.arange(24).view(4, 6) % 2).to(mask), torch.randn(4, 6)], backend="aot_eager", seconds=0)
