"""What can be wrong with an operation, each as a function that returns a detail or raises on one line.

Each input and the incoming gradient lie otherwise in memory, have other values and other sizes, and require
gradients or none, in each dtype and under autocast. The reference decides: what it refuses is not tried, and the
operation may be as inexact as the reference is in the same dtype, both compared with the reference in float64 (on
Apple's GPU, which has none, in float32).
"""

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations, compress
from typing import Any

import torch
from torch import Tensor
from torch._library.custom_ops import CustomOpDef
from torch._subclasses.fake_tensor import FakeTensorMode

from dunes.ops.operation import Operation
from dunes.units import plural

Form = Callable[..., Any]
Change = tuple[str, Form]

SLACK = 4.0
"""How many times the reference's own error, or the rounding of the largest number, an operation may be off."""

LONGEST = 150
"""Characters of a foreign message that a table has room for."""

SMALL = 1 / 2, 1 / 16
"""Errors are relative to no less than this part of the largest of all outputs, or gradients, and in 16 bits."""

MODES = ("float32", "bfloat16", "float16", "autocast")

SIZES = (0, 1, 3, 7, 17, 33, 257)
LARGE = (1031, 4099)
"""Lengths of the first dimension alone, of at most 2**20 numbers."""


class NotTried(Exception):
    """Why a check does not apply."""


class Fault(ValueError):
    """What an operation computes is wrong."""


@dataclass(frozen=True)
class Subject:
    """An operation, its reference, and the arguments of both."""

    name: str
    op: Form
    reference: Form
    inputs: tuple[Any, ...]
    backend: str = "inductor"

    @property
    def widest(self) -> torch.dtype:
        return torch.float32 if self.device.type == "mps" else torch.float64

    @property
    def dtype(self) -> torch.dtype:
        return next((x.dtype for x in self.inputs if _floating(x)), torch.float32)

    @property
    def device(self) -> torch.device:
        return next(x.device for x in self.inputs if isinstance(x, Tensor))

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

    def changed(self, places: Sequence[int], change: Form) -> list[Any]:
        """The arguments with other tensors at these places."""
        return [_like(x, change(x.detach())) if i in places else x for i, x in enumerate(self.inputs)]


def _like(x: Tensor, y: Tensor) -> Tensor:
    return y.detach().requires_grad_(x.requires_grad)


def _scaled(x: Any, factor: float) -> Any:
    return _like(x, x.detach() * factor) if _floating(x) else x


def _leaf(x: Any, dtype: torch.dtype | None = None) -> Any:
    if not isinstance(x, Tensor):
        return x
    y: Tensor = x.detach().clone(memory_format=torch.contiguous_format)
    return _like(x, y.to(dtype) if dtype is not None and y.is_floating_point() else y)


def tensors(result: Any) -> list[Tensor]:
    return list(result) if isinstance(result, tuple | list) else [result]


def incoming(y: Tensor) -> Tensor:
    """A gradient that is exact in every dtype, and nowhere zero."""
    return ((torch.arange(y.numel(), device=y.device) % 7 * 2 - 5) / 8).to(y.dtype).view(y.shape)


@dataclass(frozen=True)
class Case:
    """One point of the grid: arguments, the gradient that comes in, and the surroundings of the call."""

    inputs: Sequence[Any]
    label: str = ""
    gradient: Form = incoming
    context: Form = nullcontext
    alone: int | None = None
    """The only output that the loss depends on."""
    same: bool = False
    """Numbers are the given ones, in another layout."""
    kink: bool = False
    """The reference is not continuous near these numbers."""
    wild: bool = False
    """Some numbers are not finite: gradients may be inf for NaN, and 0 times one of these NaN for 0."""


Result = tuple[list[Tensor], list[Tensor]]


def evaluate(
    form: Form, arguments: Sequence[Any], gradient: Form = incoming, times: int = 1, alone: int | None = None
) -> Result:
    """The outputs, and the gradients of those arguments that require one."""
    outputs = tensors(form(*arguments))
    leaves = [x for x in arguments if isinstance(x, Tensor) and x.requires_grad]
    through = [y for y in outputs if y.requires_grad]
    if not leaves or not through:
        return outputs, []
    through = through if alone is None else [through[alone]]
    gradients = [gradient(y) for y in through]
    for _ in range(times):
        result = torch.autograd.grad(through, leaves, gradients, retain_graph=times > 1, materialize_grads=True)
    return outputs, list(result)


class Mode:
    """A dtype, or autocast, in which one operation is compared with its reference."""

    def __init__(self, s: Subject, name: str, rounding: torch.dtype | None = None) -> None:
        self.name, self.autocast, self.rounding = name, name == "autocast", rounding
        dtype = torch.float32 if self.autocast else getattr(torch, name)
        self.subject = replace(s, inputs=tuple(s.arguments(dtype)))
        self.eps = torch.finfo(torch.bfloat16 if self.autocast else rounding or dtype).eps
        self.known: Result | None = None

    def run(self, form: Form, case: Case, inputs: Sequence[Any], autocast: bool) -> Result:
        def call(*arguments: Any) -> Any:
            with torch.autocast(self.subject.device.type, torch.bfloat16, enabled=autocast), case.context():
                return form(*arguments)

        return evaluate(call, inputs, case.gradient, alone=case.alone)

    def reference(self, case: Case, dtype: torch.dtype | None = None, factor: float = 0.0) -> Result:
        """What the reference computes; raises NotTried if it refuses."""
        inputs = [_leaf(_scaled(x, 1 + factor * self.eps) if factor else x, dtype) for x in case.inputs]
        try:
            return self.run(self.subject.reference, case, inputs, self.autocast and not dtype)
        except Exception as error:
            raise NotTried(f"the reference refuses it: {first_line(error)}") from None

    def compare(self, case: Case) -> tuple[float, float]:
        """The errors of operation and reference; raises Fault if what the operation returns is wrong."""
        given = Case(self.subject.inputs) if case.same else case
        plain = self.known if case.same and self.known else self.reference(given, self.rounding)
        self.known = plain if case.same else self.known
        inputs = [_like(x, x) if isinstance(x, Tensor) else x for x in case.inputs]
        own = self.run(self.subject.op, case, inputs, self.autocast)
        if self.rounding:
            plain = _rounded(plain[0], own[0]), _rounded(plain[1], own[1])
        if (described := _described(own[0])) != _described(plain[0]):
            raise Fault(f": it returns {described}, the reference {_described(plain[0])}")
        if plain[1] and not own[1]:
            raise Fault(": the output requires no gradient, though inputs do; give a backward")
        if case.label and all(map(torch.equal, [*own[0], *own[1]], [*plain[0], *plain[1]])):
            return 0.0, 0.0
        return self.errors(given, own, plain)

    def errors(self, case: Case, own: Result, plain: Result) -> tuple[float, float]:
        try:
            exact = self.reference(case, self.subject.widest)
        except NotTried:  # a reference of one dtype
            exact = plain
        small = SMALL[self.eps > 1e-4]
        off, theirs = (_error(each, exact, plain, small, case.wild) for each in (own, plain))
        if off > SLACK * max(theirs, self.eps) and not case.kink:  # the reference may have been exact by chance
            near = [_error(self.reference(case, self.rounding, f), exact, None, small) for f in (-1, 1)]
            theirs = max(theirs, *(error / 2 for error in near))
        if not off <= SLACK * max(theirs, self.eps):
            text = f": error {off:.1e}, the reference's {theirs:.1e}"
            raise Fault(f"{text}: more than {SLACK:g} times that, and than {SLACK:g} roundings")
        return off, theirs

    def fault(self) -> str | None:
        """What is wrong with the arguments as they are, which has a row of its own."""
        try:
            self.compare(Case(self.subject.inputs))
        except Exception as error:
            return first_line(error).removeprefix(": ")
        return None


def _rounded(results: Sequence[Tensor], like: Sequence[Tensor]) -> list[Tensor]:
    return [y.to(z.dtype) for y, z in zip(results, like, strict=False)]


def first_line(error: BaseException) -> str:
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    line = line if len(line) <= LONGEST else line[:LONGEST] + "..."
    return line if isinstance(error, ValueError | NotTried) else f"{type(error).__name__}: {line}"


def _described(outputs: Sequence[Tensor]) -> str:
    return ", ".join(f"{tuple(y.shape)} {str(y.dtype)[6:]}" for y in outputs)


def _error(
    got: Result, exact: Result, plain: Result | None = None, small: float = 0.0, wild: bool = False
) -> float:
    """The largest error relative to the largest number of its tensor.

    Raises Fault if a number is not finite and not as one of the reference's: where those overflow, it may, too.
    """
    worst = 0.0
    for group in (0, 1):
        wanted = [_real(w) for w in exact[group]]
        finite = [float(w.where(w.isfinite(), 0.0).abs().max()) if w.numel() else 0.0 for w in wanted]
        for i, (given, want) in enumerate(zip(got[group], wanted, strict=False)):
            dtype = given.dtype if given.is_floating_point() else torch.float64
            mine = _real(given).to(want.dtype)
            want = torch.where(want.to(dtype).isfinite(), want, want.to(dtype).to(want.dtype))
            if wild:
                excused = (want == 0) & mine.isnan() | (~want.isfinite() & ~mine.isfinite() & (group == 1))
                want = torch.where(excused, mine, want)
            if plain and (wrong := _not_finite_as(mine, want, _real(plain[group][i]).to(want.dtype))):
                raise Fault(wrong)
            off = torch.where(mine.isfinite() & want.isfinite(), (mine - want).abs(), 0.0)
            largest = float(off.max()) if off.numel() else 0.0
            if largest > 8 * torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps:
                worst = max(worst, largest / (max(finite[i], small * max(finite)) or 1.0))
    return worst


def _not_finite_as(got: Tensor, want: Tensor, plain: Tensor) -> str | None:
    """How many numbers are not finite that are so in the reference, if others are."""
    same = (got == want) | (got.isnan() & want.isnan()) | (got == plain) | (got.isnan() & plain.isnan())
    overflows = want.isfinite() & ~plain.isfinite() & ~got.isfinite()
    wrong = ~(same | overflows | (got.isfinite() & want.isfinite()))
    for kind, of in (("NaN", torch.isnan), ("inf", torch.isposinf), ("-inf", torch.isneginf)):
        if bool((wrong & (of(got) | of(want))).any()):
            return f" makes {int(of(got).sum())} {kind}, in the reference {int(of(plain).sum())}"
    return None


def _real(x: Tensor) -> Tensor:
    x = torch.view_as_real(x.detach()) if x.is_complex() else x.detach()
    return x if x.is_floating_point() else x.double()


def grid(s: Subject, cases: Form, modes: Sequence[str] = MODES, may_refuse: bool = False, **options: Any) -> str:
    """Try all cases of the arguments in these modes; raise at the first that is wrong."""
    errors, reason = [], ""
    for mode in (Mode(s, name, **options) for name in modes):
        if len(modes) > 1 and (told := mode.fault()):
            reason = f"it is wrong as given: {told}"
            continue
        for case in cases(mode.subject):
            try:
                errors.append(mode.compare(case))
            except NotTried as error:
                reason = str(error)
            except Fault as error:
                where = f" ({mode.name})" if len(modes) > 1 else ""
                told = f": error, it{error}" if case.same and str(error)[0] == " " else str(error)
                raise Fault(f"{case.label}{told}{where}".removeprefix(": ")) from None
            except Exception as error:
                reason = f"it refuses {case.label or mode.name}: {first_line(error)}"
                if not may_refuse and mode.name not in ("float16", "float64"):
                    raise ValueError(f"{case.label}: {first_line(error)}".removeprefix(": ")) from None
    if not errors:
        raise NotTried(reason or "there is no such input")
    off, theirs = (max(each) for each in zip(*errors, strict=True))
    told = f"error {off:.1e}, the reference's {theirs:.1e}" if off or theirs else "equal to the reference"
    return f"{plural(len(errors), 'case')}, {told}"


def leaves(s: Subject) -> Iterator[Case]:
    """Each choice of inputs that require a gradient, of those that are marked, and of outputs that have one."""
    marked = [i for i, x in enumerate(s.inputs) if isinstance(x, Tensor) and x.requires_grad]
    yield Case(s.inputs)
    for n in {1, len(marked) - 1} if len(marked) > 1 else ():
        for some in combinations(marked, n):
            inputs = [x.detach().requires_grad_(i in some) if i in marked else x for i, x in enumerate(s.inputs)]
            yield Case(inputs, f"gradient of {' and '.join(map(s.label, some))} alone")
    yield Case(s.inputs, "gradient of the first output alone", alone=0)
    yield Case(s.inputs, "gradient of the last output alone", alone=-1)
    for context in (torch.no_grad, torch.inference_mode, _float64_by_default):
        yield Case(s.inputs, f"under {context.__name__.strip('_')}", context=context)


@contextmanager
def _float64_by_default() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _placed(x: Tensor, shape: Sequence[int], view: Form) -> Tensor:
    """The same numbers as a view of a larger tensor, whose others are NaN."""
    y: Tensor = view(torch.full(shape, math.nan if x.is_floating_point() else 0, dtype=x.dtype, device=x.device))
    return y.copy_(x)


def _sliced(d: int, x: Tensor) -> Tensor:
    return _placed(x, [n + 3 * (i == d) for i, n in enumerate(x.shape)], lambda y: y.narrow(d, 1, x.shape[d]))


def _stepped(d: int, x: Tensor) -> Tensor:
    return _placed(x, [n * (1 + (i == d)) for i, n in enumerate(x.shape)], lambda y: y.unfold(d, 1, 2)[..., 0])


def _repeated(d: int, x: Tensor) -> Tensor:
    return x.narrow(d, 0, min(1, x.shape[d])).expand(x.shape)


def _moved(i: int, j: int, then: Form, x: Tensor) -> Tensor:
    y: Tensor = then(x.movedim(i, j))
    return y.movedim(j, i)


def _layouts(dims: int) -> Iterator[tuple[str, Form, bool]]:
    """Names of layouts, what makes them, and whether they hold the same numbers."""
    yield "one number behind the start", lambda x: _placed(x, [x.numel() + 1], lambda y: y[1:].view(x.shape)), True
    for d in range(dims):
        yield f"a slice of dimension {d}", partial(_sliced, d), True
        yield f"every second of dimension {d}", partial(_stepped, d), True
        yield f"repeated in dimension {d}", partial(_repeated, d), False
    for i, j in combinations(range(dims), 2):
        yield f"dimension {i} at {j} in memory", partial(_moved, i, j, Tensor.contiguous), True
    for d in range(min(2, dims - 1)):
        yield f"dimension {d} last in a slice", partial(_moved, d, dims - 1, partial(_sliced, dims - 1)), True
    yield "one number repeated", lambda x: x.flatten()[:1].sum(dtype=x.dtype).expand(x.shape), False


def layouts(s: Subject) -> Iterator[Case]:
    """Inputs, each alone and all together, and gradients, with other strides, or numbers that are repeated."""
    places = [i for i, x in enumerate(s.inputs) if isinstance(x, Tensor)]
    for some in [*([i] for i in places), *([places] if len(places) > 1 else [])]:
        label = s.label(some[0]) if len(some) == 1 else "all"
        for name, change, same in _layouts(min(s.inputs[i].dim() for i in some)):
            yield Case(s.changed(some, change), f"{label} {name}", same=same)
    for name, change, same in _of_gradient(s, _layouts):
        yield Case(s.inputs, f"gradient {name}", lambda y, change=change: change(incoming(y)), same=same)


def _of_gradient(s: Subject, kinds: Form) -> Iterator[Any]:
    """Kinds of incoming gradients, where there are such."""
    with warnings.catch_warnings():
        outputs, gradients = evaluate(s.reference, s.arguments())
    return kinds(min(y.dim() for y in outputs)) if gradients else iter(())


def _with(last: bool, value: float, x: Tensor) -> Tensor:
    y = x.clone(memory_format=torch.contiguous_format)
    y.view(-1)[-1 if last else y.numel() // 2] = value
    return y


def _not_finite(dtype: torch.dtype, dims: int = 0) -> Iterator[Change]:
    for value in (math.nan, math.inf, -math.inf):
        for last in (False, True):
            yield f"{'NaN' if math.isnan(value) else value} in", partial(_with, last, value)


def _factors(dtype: torch.dtype, dims: int = 0) -> Iterator[Change]:
    yield "zeros in", lambda x: x * 0
    yield "whole numbers in", lambda x: x.round()
    large = 2.0 ** (math.log2(torch.finfo(dtype).max) // 2 + 2)  # whose squares overflow
    factors = {"128 times": 128, "1/128 of": 1 / 128, "large numbers in": large}
    for name, factor in (factors | {"subnormal numbers in": torch.finfo(dtype).smallest_normal / 8}).items():
        yield name, lambda x, factor=factor: x * factor


def values(kinds: Form, s: Subject) -> Iterator[Case]:
    """Each input, and the gradient, with other numbers."""
    wild = kinds is _not_finite
    for i, x in enumerate(s.inputs):
        for name, change in kinds(x.dtype) if _floating(x) and x.numel() else ():
            if s.device.type == "cpu" or "subnormal" not in name:  # which GPUs may flush
                yield Case(s.changed([i], change), f"{name} {s.label(i)}", kink="whole" in name, wild=wild)
    for alone in (None, 0, -1):
        for name, change in _of_gradient(s, partial(kinds, s.dtype)):
            yield Case(
                s.inputs, f"{name} the gradient", lambda y, c=change: c(incoming(y)), alone=alone, wild=wild
            )


def _floating(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def _resized(size: int, to: int, dims: slice, x: Any) -> Any:
    """Dimensions of this size in another, the numbers repeated and a little smaller each time."""
    if not isinstance(x, Tensor):
        return x
    y = x.detach()
    for d in (d for d in range(x.dim())[dims] if x.shape[d] == size):
        place = torch.arange(to, device=x.device)
        y = y.index_select(d, place % size)
        if y.is_floating_point():
            y = y / (1 + (place // size).to(y.dtype).view(-1, *[1] * (x.dim() - d - 1)) / 1024)
    return _like(x, y)


def first_lengths(lengths: Sequence[int], s: Subject) -> Iterator[Case]:
    """The first dimension, and all first ones that share its length, is of another one."""
    shape = next(x.shape for x in s.inputs if isinstance(x, Tensor))
    for n in lengths if shape else ():
        inputs = [_resized(shape[0], n, slice(1), x) for x in s.inputs]
        if sum(x.numel() for x in inputs if isinstance(x, Tensor)) < 2**20:
            yield Case(inputs, f"{n} in place of {shape[0]}")


def all_lengths(s: Subject) -> Iterator[Case]:
    """Dimensions of one length, in all inputs, are of another one."""
    shapes = [x.shape for x in s.inputs if isinstance(x, Tensor)]
    if s.device.type != "cpu" and len(shapes) > sum(map(_floating, s.inputs)):
        return  # an index out of bounds ends the process there
    for size in sorted({n for shape in shapes for n in shape if n}):
        for n in SIZES:
            yield Case([_resized(size, n, slice(None), x) for x in s.inputs], f"{n} in place of {size}")
    yield from first_lengths(LARGE, s)


@contextmanager
def _nan_in_new_memory() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)  # which fills torch.empty
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def resized(s: Subject, cases: Form, may_refuse: bool) -> str:
    """Other lengths; what is not written of an output is NaN."""
    with _nan_in_new_memory():
        return grid(s, cases, MODES[:2], may_refuse)


def repeated(s: Subject) -> str:
    """Calls between forward and backward, a second backward, and calls in other threads."""
    halved = [_scaled(x, 0.5) for x in s.inputs]

    def between(*arguments: Any) -> Any:
        y = s.op(*arguments)
        evaluate(s.op, halved, times=2)
        return y

    def attempt(inputs: Sequence[Any]) -> str:
        own = replace(s, op=between, inputs=tuple(inputs))
        return grid(own, lambda given: [Case(given.inputs, "between other calls")] * 3, [str(s.dtype)[6:]])

    with ThreadPoolExecutor(4) as pool:
        return [attempt(s.inputs), *pool.map(attempt, [s.inputs, halved] * 4)][0]


def pure(s: Subject) -> str:
    """It writes into no input, and returns none; its backward writes into nothing."""
    for dtype in (None, torch.float32, torch.bfloat16):
        arguments = s.arguments(dtype)
        named = [(f"its input {s.label(i)}", x) for i, x in enumerate(arguments) if isinstance(x, Tensor)]
        try:
            with _unwritten(named), torch.no_grad():
                results = tensors(s.op(*arguments))
        except Exception as error:
            if dtype is None or isinstance(error, Fault):
                raise
            continue  # it refuses this dtype
        memory = {y.untyped_storage()._cdata for y in results}
        for name, x in named:
            if x.untyped_storage()._cdata in memory:
                raise ValueError(f"it returns {name} or a view of it; return a clone")
        through = [y for y in tensors(s.op(*arguments)) if y.requires_grad]
        up = [incoming(y) for y in through]
        named += [
            *(("its output in the backward", y) for y in through),
            *(("the incoming gradient", g) for g in up),
        ]
        if through:
            with _unwritten(named):
                torch.autograd.grad(
                    through, [x for _, x in named if x.is_leaf and x.requires_grad], up, allow_unused=True
                )
    return "it writes into no input, and returns none"


@contextmanager
def _unwritten(named: Sequence[tuple[str, Tensor]]) -> Iterator[None]:
    before = [x.detach().clone() for _, x in named]
    yield
    for (name, x), was in zip(named, before, strict=True):
        if not bool(((x == was) | ((x != x) & (was != was))).all()):
            raise Fault(f"it writes into {name}; write into a clone")


def outputs(s: Subject) -> str:
    """Shapes and dtypes are the reference's."""
    with torch.no_grad():
        own, plain = (_described(tensors(form(*s.arguments()))) for form in (s.op, s.reference))
    if own != plain:
        raise ValueError(f"it returns {own}, the reference {plain}")
    return own


def backward(s: Subject) -> str:
    """The backward itself returns gradients of the right shape and dtype, before autograd sums or casts them."""
    leaves = s.leaves()
    for autocast in (False, True):
        arguments = s.arguments()
        with torch.autocast(s.device.type, torch.bfloat16, enabled=autocast):
            made = [y for y in tensors(s.op(*arguments)) if y.requires_grad]
        function: Any = made[0].grad_fn if made else None
        if not hasattr(function, "needs_input_grad"):
            return f"{len(leaves)} of {len(leaves)} gradients"  # autograd's own
        gradients = tensors(function.apply(*map(incoming, made)))
        nodes = [node for node, _ in function.next_functions if node is not None]
        for node, got in zip(nodes, compress(gradients, function.needs_input_grad), strict=False):
            place = next((i for i, x in enumerate(arguments) if x is getattr(node, "variable", None)), None)
            if place is not None:
                _well_formed(s, place, leaves, got)
    return f"{len(leaves)} of {len(leaves)} gradients"


def _well_formed(s: Subject, place: int, leaves: Sequence[int], got: Tensor | None) -> None:
    x = s.inputs[place]
    if got is None and bool(evaluate(s.reference, s.arguments())[1][leaves.index(place)].any()):
        raise ValueError(f"the backward returns no gradient for {s.label(place)}, which the reference gives one")
    if got is not None and _described([got]) != _described([x]):
        raise ValueError(
            f"the backward's gradient for {s.label(place)} is {_described([got])}, not {_described([x])}"
        )


def gradcheck(s: Subject) -> str:
    """Gradients are the derivatives by differences in float64.

    Where float32 is inside, differences resolve a fiftieth of the largest gradient, which is not enough.
    """
    s.leaves()
    try:
        return _differences(s, torch.float64, 1e-6, 1e-5)
    except Exception:
        dtype, why = _not_in_float64(s)
        if not why:
            raise
    _differences(s, dtype, 1e-2, 2e-2)
    raise NotTried(f"{why}: differences resolve 1/50; the rows below compare with the reference's gradients")


def _not_in_float64(s: Subject) -> tuple[torch.dtype, str]:
    """The dtype for differences, and why they do not resolve the operation; nothing if they do."""
    try:
        rounded = [_leaf(_leaf(x, torch.float32), torch.float64) for x in s.inputs]
        pairs = zip(*(tensors(s.op(*[_scaled(x, f) for x in rounded])) for f in (1, 1 + 1e-12)), strict=True)
    except Exception as error:
        return torch.float32, f"it refuses float64 ({first_line(error)})"
    return torch.float64, "it computes in float32" if all(torch.equal(*pair) for pair in pairs) else ""


def _differences(s: Subject, dtype: torch.dtype, eps: float, tolerance: float) -> str:
    """As exact as this part of the largest gradient."""
    scale = max((float(g.abs().max()) for g in evaluate(s.reference, s.arguments())[1] if g.numel()), default=1.0)
    form = lambda *a: tuple(y / (scale or 1.0) for y in tensors(s.op(*a)) if y.is_floating_point())
    fast = sum(x.numel() for x in s.inputs if isinstance(x, Tensor)) > 100
    limits: Any = {"eps": eps, "atol": tolerance, "rtol": tolerance, "nondet_tol": tolerance}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of inputs in float32
        torch.autograd.gradcheck(form, s.arguments(dtype), fast_mode=fast, **limits)
    return str(dtype)[6:]


def float64(s: Subject) -> str:
    """Values and gradients; those of an operation that computes in float32 are as exact as that, which is said."""
    if s.widest != torch.float64:
        raise NotTried(f"{s.device.type} has none")
    try:
        return grid(s, leaves, ["float64"])
    except Fault:
        return "computed in float32: " + grid(s, leaves, ["float64"], rounding=torch.float32)


def second(s: Subject) -> str:
    """Second derivatives are right or refused."""

    def twice(form: Form) -> Result:
        arguments = s.arguments(s.widest)
        leaves = [arguments[i] for i in s.leaves()]
        made = [y for y in tensors(form(*arguments)) if y.requires_grad]
        gradients = torch.autograd.grad(
            made, leaves, [incoming(y) for y in made], create_graph=True, materialize_grads=True
        )
        # With a term of its own, as a loss has others, what has lost its graph is not refused by autograd itself.
        loss = sum((g * incoming(g)).sum() + x.square().sum() / 2 for g, x in zip(gradients, leaves, strict=True))
        return [], list(torch.autograd.grad(loss, leaves))

    s.leaves()
    try:
        got = twice(s.op)
    except Exception as error:
        return f"refused: {first_line(error)}"
    try:
        want = twice(s.reference)
    except Exception as refusal:
        raise NotTried(f"the reference has none: {first_line(refusal)}") from None
    off = _error(got, want, want)
    if off > 1e-3:
        raise ValueError(f"second derivatives are wrong (error {off:.1e}) and not refused; differentiate once")
    return "right"


def transforms(s: Subject) -> str:
    """torch.func's vmap gives what calls one by one give, or is refused."""
    given = [x.detach() if isinstance(x, Tensor) else x for x in s.inputs]
    halves = [_scaled(x, 0.5) for x in given]
    stacked = [
        torch.stack(pair) if isinstance(pair[0], Tensor) else pair[0] for pair in zip(given, halves, strict=True)
    ]
    places = tuple(0 if isinstance(x, Tensor) else None for x in given)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the reference is computed
        want = [tensors(s.reference(*each)) for each in (given, halves)]
        try:
            got = tensors(torch.func.vmap(s.op, in_dims=places)(*stacked))
        except Exception as error:
            return f"refused: {first_line(error)}"
    off = max(_error(([y[i] for y in got], []), (want[i], []), (want[i], [])) for i in (0, 1))
    if off > SLACK * torch.finfo(s.dtype).eps * 16:
        raise ValueError(f"vmap gives something else: error {off:.1e}")
    return "by its reference" if isinstance(s.op, Operation) else "as one by one"


def fake(s: Subject) -> str:
    """Fake tensors get the shapes and dtypes of real ones; for an operator of torch's, the strides, too."""
    form = _operator(s)
    for case in [Case(s.inputs), *(layouts(s) if form else ())]:
        with torch.no_grad():
            want = tensors((form or s.op)(*case.inputs))
            mode = FakeTensorMode(allow_non_fake_inputs=True)  # it may close over some
            fakes = [mode.from_tensor(x) if isinstance(x, Tensor) else x for x in case.inputs]
            with mode:
                got = tensors((form or s.op)(*fakes))
        for describe in (_described, _strides if form else _described):
            if describe(got) != describe(want):
                name = f", {case.label}," if case.label else ""
                raise ValueError(f"the fake form{name} makes {describe(got)}, the operation {describe(want)}")
    return "shapes, dtypes and strides" if form else "shapes and dtypes"


def _strides(outputs: Sequence[Tensor]) -> str:
    steps = [
        tuple(s if n > 1 else 1 for n, s in zip(y.shape, y.stride(), strict=True)) for y in outputs if y.numel()
    ]
    return f"strides {', '.join(map(str, steps))}"


def _operator(s: Subject) -> Any:
    """The operator that torch knows, or None."""
    operator = s.op.operator if isinstance(s.op, Operation) else s.op
    return operator if isinstance(operator, CustomOpDef) else None


def opcheck(s: Subject) -> str:
    """`torch.library.opcheck`, where torch has an operator of it."""
    operator = _operator(s)
    if operator is None:
        raise NotTried("torch has no operator of it; compiled graphs hold what it calls")
    if isinstance(s.op, Operation) and (reason := s.op.fallback_reason(s.device.type)):
        raise NotTried(reason)
    return ", ".join(torch.library.opcheck(operator, tuple(s.arguments())))


def compiled(s: Subject) -> str:
    """torch.compile gives one graph, and what eager calls give."""
    torch.compiler.reset()
    form = torch.compile(s.op, fullgraph=True, backend=s.backend)
    detail = grid(replace(s, op=form, reference=s.op), lambda given: [Case(given.inputs)], [str(s.dtype)[6:]])
    return f"{s.backend}, {detail.partition(', ')[2]}".replace("the reference's", "eager's")


FAULTS: dict[str, Callable[[Subject], str]] = {
    "inputs": pure,
    "outputs": outputs,
    "backward": backward,
    "gradcheck": gradcheck,
    "float64": float64,
    **{mode: partial(grid, cases=leaves, modes=[mode]) for mode in MODES},
    "NaN": partial(grid, cases=partial(values, _not_finite)),
    "values": partial(grid, cases=partial(values, _factors)),
    "empty": partial(resized, cases=partial(first_lengths, (0,)), may_refuse=False),
    "sizes": partial(resized, cases=all_lengths, may_refuse=True),
    "not contiguous": partial(grid, cases=layouts, modes=MODES[:2]),
    "repeated": repeated,
    "second derivative": second,
    "torch.func": transforms,
    "fake": fake,
    "opcheck": opcheck,
    "compiled": compiled,
}
