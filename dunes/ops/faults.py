"""What can be wrong with an operation, each as a function that returns a detail or raises on one line.

The reference decides: an input that it refuses is not tried, and the operation may be as inexact as the reference
is in the same dtype, both compared with the reference in float64 (on Apple's GPU, which has none, in float32).
"""

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._library.custom_ops import CustomOpDef
from torch._subclasses.fake_tensor import FakeTensorMode

from dunes.ops.operation import Operation

Form = Callable[..., Any]

SLACK = 4.0
"""How many times the reference's own error, or the rounding of the largest number, an operation may be off."""


LONGEST = 150
"""Characters of a foreign message that a table has room for."""


class NotTried(Exception):
    """Why a check does not apply."""


@dataclass(frozen=True)
class Subject:
    """An operation, its reference, and the arguments of both."""

    name: str
    op: Form
    reference: Form
    inputs: tuple[Any, ...]
    backend: str = "inductor"

    @property
    def operator(self) -> Any:
        """The operator that torch knows, or None."""
        operator = self.op.operator if isinstance(self.op, Operation) else self.op
        return operator if isinstance(operator, CustomOpDef) else None

    @property
    def device(self) -> torch.device:
        return next(x.device for x in self.inputs if isinstance(x, Tensor))

    @property
    def widest(self) -> torch.dtype:
        return torch.float32 if self.device.type == "mps" else torch.float64

    @property
    def dtype(self) -> torch.dtype:
        return next((x.dtype for x in self.inputs if _floating(x)), torch.float32)

    def label(self, index: int) -> str:
        return repr(self.op.parameters[index]) if isinstance(self.op, Operation) else f"number {index + 1}"

    def leaves(self) -> list[int]:
        """The positions of the tensors to differentiate; raises NotTried if there are none."""
        leaves = [i for i, x in enumerate(self.inputs) if isinstance(x, Tensor) and x.requires_grad]
        if not leaves:
            raise NotTried("no input requires a gradient")
        return leaves

    def arguments(self, dtype: torch.dtype | None = None) -> list[Any]:
        """Copies of the arguments as new leaves, floating-point ones in the dtype."""
        return [_leaf(x, dtype) for x in self.inputs]

    def rounded(self, dtype: torch.dtype) -> "Subject":
        """The same with arguments in this dtype."""
        return self.given(self.arguments(dtype))

    def given(self, inputs: Sequence[Any]) -> "Subject":
        return Subject(self.name, self.op, self.reference, tuple(inputs), self.backend)


def _floating(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def _leaf(x: Any, dtype: torch.dtype | None) -> Any:
    if not isinstance(x, Tensor):
        return x
    y = x.detach().clone()
    y = y.to(dtype) if dtype is not None and y.is_floating_point() else y
    return y.requires_grad_(x.requires_grad)


def tensors(result: Any) -> list[Tensor]:
    return list(result) if isinstance(result, tuple | list) else [result]


def incoming(y: Tensor) -> Tensor:
    """A gradient that is exact in every dtype."""
    return ((torch.arange(y.numel(), device=y.device) % 7 - 2) / 4).to(y.dtype).view(y.shape)


def evaluate(form: Form, arguments: Sequence[Any], gradient: Form = incoming) -> list[Tensor | None]:
    """The outputs, and the gradients of those arguments that require one."""
    outputs = tensors(form(*arguments))
    leaves = [x for x in arguments if isinstance(x, Tensor) and x.requires_grad]
    differentiable = [y for y in outputs if y.requires_grad]
    if not leaves:
        return list(outputs)
    if not differentiable:
        raise ValueError("the output requires no gradient, though inputs do; give a backward")
    gradients = [gradient(y) for y in differentiable]
    return [*outputs, *torch.autograd.grad(differentiable, leaves, gradients, allow_unused=True)]


def by_reference(subject: Subject, arguments: Sequence[Any], gradient: Form = incoming) -> list[Tensor | None]:
    """What the reference computes; raises NotTried if it refuses these arguments."""
    try:
        return evaluate(subject.reference, arguments, gradient)
    except Exception as error:
        raise NotTried(f"the reference refuses it: {first_line(error)}") from None


def first_line(error: BaseException) -> str:
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    line = line if len(line) <= LONGEST else line[:LONGEST] + "..."
    return line if isinstance(error, ValueError | NotTried) else f"{type(error).__name__}: {line}"


def error_of(got: Sequence[Tensor | None], want: Sequence[Tensor | None]) -> float:
    """The largest difference, relative to the largest number of each tensor; NaN must be where NaN is."""
    return max((_difference(a, b) for a, b in zip(got, want, strict=True) if b is not None), default=0.0)


def _difference(got: Tensor | None, want: Tensor) -> float:
    want = want.detach()
    if got is None:
        return 1.0 if bool(want.any()) else 0.0
    if not want.numel():
        return 0.0
    got = got.detach().to(want.dtype)
    if not torch.equal(got.isnan(), want.isnan()):
        return math.inf
    difference = torch.where(got == want, 0.0, got - want).nan_to_num(0.0, math.inf).abs().max()
    finite = want[want.isfinite()]
    scale = float(finite.abs().max()) if finite.numel() else 0.0
    return float(difference) / (scale or 1.0)


def compare(subject: Subject, dtype: torch.dtype, gradient: Form = incoming) -> str:
    """The errors of operation and reference against the exact results; raises ValueError if that is too large."""
    exact = by_reference(subject.rounded(dtype), subject.rounded(dtype).arguments(subject.widest), gradient)
    plain = by_reference(subject, subject.arguments(dtype), gradient)
    own = evaluate(subject.op, subject.arguments(dtype), gradient)
    return _verdict(error_of(own, exact), error_of(plain, exact), dtype)


def _verdict(own: float, plain: float, dtype: torch.dtype) -> str:
    errors = f"error {own:.1e}, the reference's {plain:.1e}"
    if not own <= SLACK * max(plain, torch.finfo(dtype).eps):
        raise ValueError(f"{errors}: more than {SLACK:g} times that, and than {SLACK:g} roundings")
    return errors


def pure(s: Subject) -> str:
    """It writes into no input, and returns none."""
    arguments = s.arguments()
    before = [x.clone() if isinstance(x, Tensor) else x for x in arguments]
    with torch.no_grad():
        outputs = tensors(s.op(*arguments))
    for i, (x, was) in enumerate(zip(arguments, before, strict=True)):
        if not isinstance(x, Tensor):
            continue
        if not torch.equal(x.detach(), was.detach()):
            raise ValueError(f"it writes into its input {s.label(i)}; write into a clone")
        if any(y.untyped_storage()._cdata == x.untyped_storage()._cdata for y in outputs):
            raise ValueError(f"it returns its input {s.label(i)} or a view of it; return a clone")
    return "it writes into no input, and returns none"


def outputs(s: Subject) -> str:
    """Shapes and dtypes are the reference's."""
    with torch.no_grad():
        own, plain = tensors(s.op(*s.arguments())), tensors(s.reference(*s.arguments()))
    described = [", ".join(f"{tuple(y.shape)} {str(y.dtype)[6:]}" for y in result) for result in (own, plain)]
    if described[0] != described[1]:
        raise ValueError(f"it returns {described[0]}, the reference {described[1]}")
    return described[0]


def backward(s: Subject) -> str:
    """The backward returns a gradient of the right shape and dtype for each input that requires one."""
    leaves = s.leaves()
    wanted = dict(zip(leaves, by_reference(s, s.arguments())[-len(leaves) :], strict=True))
    gradients = _raw_gradients(s) if isinstance(s.op, Operation) else None
    if gradients is None:
        gradients = dict(zip(leaves, evaluate(s.op, s.arguments())[-len(leaves) :], strict=True))
    for i in leaves:
        got, want, x = gradients[i], wanted[i], s.inputs[i]
        if got is None:
            if want is not None and bool(want.any()):
                raise ValueError(
                    f"the backward returns no gradient for {s.label(i)}, which the reference gives one"
                )
        elif got.shape != x.shape or got.dtype != x.dtype:
            raise ValueError(
                f"the backward's gradient for {s.label(i)} is {tuple(got.shape)} {str(got.dtype)[6:]}, "
                f"not {tuple(x.shape)} {str(x.dtype)[6:]}"
            )
    return f"{len(leaves)} of {len(leaves)} gradients"


class _Context:
    """The context of an autograd.Function, as far as an operation uses it."""

    saved_tensors: tuple[Tensor, ...] = ()
    values: Sequence[Any] = ()

    def __init__(self, needs_input_grad: Sequence[bool]) -> None:
        self.needs_input_grad = needs_input_grad

    def save_for_backward(self, *saved: Tensor) -> None:
        self.saved_tensors = saved


def _raw_gradients(s: Subject) -> dict[int, Tensor | None] | None:
    """What the backward itself returns, before autograd sums or casts it; None where the reference is computed."""
    op, arguments = s.op, s.arguments()
    assert isinstance(op, Operation)
    if op.saved is None or op.fallback_reason(s.device.type) is not None:
        return None
    ctx = _Context([isinstance(x, Tensor) and x.requires_grad for x in arguments])
    with torch.no_grad():
        result = tensors(op.forward(*arguments))
        op.saved.store(ctx, arguments, result)
        shown = result[:1] if op.keeps else result
        return dict(enumerate(op.gradients(ctx, *map(incoming, shown))))


def gradcheck(s: Subject) -> str:
    """Gradients are the derivatives by differences, in float64 or as exactly as float32 inside allows."""
    s.leaves()
    fast = sum(x.numel() for x in s.inputs if isinstance(x, Tensor)) > 100
    tries = [(torch.float64, 1e-6, 1e-5), (torch.float64, 1e-3, 1e-2), (torch.float32, 1e-2, 2e-2)]
    first: Exception | None = None
    for dtype, eps, tolerance in tries[2:] if s.device.type == "mps" else tries:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of inputs in float32
            try:
                arguments = s.arguments(dtype)
                torch.autograd.gradcheck(
                    s.op, arguments, eps=eps, atol=tolerance, rtol=tolerance, fast_mode=fast, nondet_tol=tolerance
                )
            except Exception as error:
                first = first or error
            else:
                return "float64" if eps == 1e-6 else "float32 inside"
    assert first is not None
    raise first


def float32(s: Subject) -> str:
    return compare(s, torch.float32)


def bfloat16(s: Subject) -> str:
    return compare(s, torch.bfloat16)


def autocast(s: Subject) -> str:
    """Under autocast to bfloat16, values and gradients."""

    def under(form: Form) -> Form:
        def call(*arguments: Any) -> Any:
            with torch.autocast(s.device.type, torch.bfloat16):
                return form(*arguments)

        return call

    exact = by_reference(s, s.arguments(s.widest))
    plain = evaluate(under(s.reference), s.arguments(torch.float32))
    own = evaluate(under(s.op), s.arguments(torch.float32))
    return _verdict(error_of(own, exact), error_of(plain, exact), torch.bfloat16)


def nan(s: Subject) -> str:
    """NaN in, NaN out, where the reference has it."""
    arguments = s.arguments()
    place = next((i for i, x in enumerate(arguments) if _floating(x) and x.numel()), None)
    if place is None:
        raise NotTried("no input is of floating point")
    with torch.no_grad():
        arguments[place].view(-1)[arguments[place].numel() // 2] = math.nan
        try:
            want = tensors(s.reference(*arguments))
        except Exception as error:
            raise NotTried(f"the reference refuses it: {first_line(error)}") from None
        got = tensors(s.op(*arguments))
    for mine, true in zip(got, want, strict=True):
        if not torch.equal(mine.isnan(), true.isnan()):
            counts = [int(y.isnan().sum()) for y in (mine, true)]
            raise ValueError(f"NaN in {s.label(place)} makes {counts[0]} NaN, in the reference {counts[1]}")
    return "where the reference's are"


def empty(s: Subject) -> str:
    """No rows: the first dimension, and all that share its size, are of length 0."""
    first = next(x for x in s.inputs if isinstance(x, Tensor))
    if not first.dim():
        raise NotTried("the first input has no dimension")

    def shorten(x: Any) -> Any:
        same = isinstance(x, Tensor) and x.dim() and x.shape[0] == first.shape[0]
        return x.detach()[:0].clone().requires_grad_(x.requires_grad) if same else x

    short = s.given([shorten(x) for x in s.inputs])
    want, got = by_reference(short, short.arguments()), evaluate(s.op, short.arguments())
    for mine, true in zip(got, want, strict=True):
        if true is not None and mine is not None and mine.shape != true.shape:
            raise ValueError(f"of empty tensors it makes {tuple(mine.shape)}, the reference {tuple(true.shape)}")
    error = error_of(got, want)
    if error > SLACK * torch.finfo(torch.float32).eps:
        raise ValueError(f"of empty tensors: error {error:.1e}")
    return "as the reference"


def strided(s: Subject) -> str:
    """Inputs with gaps between their numbers, and a gradient that is one number repeated."""

    def spread(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        return torch.stack([x.detach(), x.detach()], -1)[..., 0].requires_grad_(x.requires_grad)

    ones = lambda y: torch.ones((), dtype=y.dtype, device=y.device).expand(y.shape)
    exact = by_reference(s, s.arguments(s.widest), ones)
    plain, own = by_reference(s, s.arguments(), ones), evaluate(s.op, [spread(x) for x in s.inputs], ones)
    return _verdict(error_of(own, exact), error_of(plain, exact), s.dtype)


def second(s: Subject) -> str:
    """Second derivatives are right or refused."""
    s.leaves()

    def twice(form: Form) -> list[Tensor | None]:
        arguments = s.arguments(s.widest)
        leaves = [arguments[i] for i in s.leaves()]
        made = tensors(form(*arguments))
        gradients = torch.autograd.grad(made, leaves, [incoming(y) for y in made], create_graph=True)
        return list(torch.autograd.grad(gradients, leaves, [incoming(g) for g in gradients]))

    try:
        got = twice(s.op)
    except Exception as error:
        return f"refused: {first_line(error)}"
    try:
        off = error_of(got, twice(s.reference))
    except Exception as refusal:
        raise NotTried(f"the reference has none: {first_line(refusal)}") from None
    if off > 1e-3:
        raise ValueError(f"second derivatives are wrong (error {off:.1e}) and not refused; differentiate once")
    return "right"


def transforms(s: Subject) -> str:
    """torch.func's vmap gives what calls one by one give, or is refused."""
    stacked = [torch.stack([x.detach(), x.detach()]) if isinstance(x, Tensor) else x for x in s.inputs]
    places = tuple(0 if isinstance(x, Tensor) else None for x in s.inputs)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the reference is computed
        want = tensors(s.reference(*s.arguments()))
        try:
            got = tensors(torch.func.vmap(s.op, in_dims=places)(*stacked))
        except Exception as error:
            return f"refused: {first_line(error)}"
    off = max(error_of([y[0], y[1]], [true, true]) for y, true in zip(got, want, strict=True))
    if off > SLACK * torch.finfo(s.dtype).eps * 16:
        raise ValueError(f"vmap gives something else: error {off:.1e}")
    return "by its reference" if isinstance(s.op, Operation) else "as one by one"


def fake(s: Subject) -> str:
    """Fake tensors get the shapes and dtypes of real ones."""
    with torch.no_grad():
        want = tensors(s.op(*s.arguments()))
        mode, arguments = FakeTensorMode(allow_non_fake_inputs=True), s.arguments()  # it may close over some
        fakes = [mode.from_tensor(x) if isinstance(x, Tensor) else x for x in arguments]
        with mode:
            got = tensors(s.op(*fakes))
    for mine, true in zip(got, want, strict=True):
        if mine.shape != true.shape or mine.dtype != true.dtype:
            raise ValueError(
                f"the fake form makes {tuple(mine.shape)} {str(mine.dtype)[6:]}, "
                f"the operation {tuple(true.shape)} {str(true.dtype)[6:]}"
            )
    return "shapes and dtypes"


def opcheck(s: Subject) -> str:
    """`torch.library.opcheck`, where torch has an operator of it."""
    if s.operator is None:
        raise NotTried("torch has no operator of it; compiled graphs hold what it calls")
    if isinstance(s.op, Operation) and (reason := s.op.fallback_reason(s.device.type)):
        raise NotTried(reason)
    return ", ".join(torch.library.opcheck(s.operator, tuple(s.arguments())))


def compiled(s: Subject) -> str:
    """torch.compile gives one graph, and what eager calls give."""
    torch.compiler.reset()
    form = torch.compile(s.op, fullgraph=True, backend=s.backend)
    own, eager = evaluate(form, s.arguments()), evaluate(s.op, s.arguments())
    exact = by_reference(s, s.arguments(s.widest))
    return f"{s.backend}, {_verdict(error_of(own, exact), error_of(eager, exact), s.dtype)}".replace(
        "the reference's", "eager's"
    )


FAULTS: dict[str, Callable[[Subject], str]] = {
    "inputs": pure,
    "outputs": outputs,
    "backward": backward,
    "gradcheck": gradcheck,
    "float32": float32,
    "bfloat16": bfloat16,
    "autocast": autocast,
    "NaN": nan,
    "empty": empty,
    "not contiguous": strided,
    "second derivative": second,
    "torch.func": transforms,
    "fake": fake,
    "opcheck": opcheck,
    "compiled": compiled,
}
