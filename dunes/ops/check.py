"""Checks that compare an operation with its reference: dtypes, gradients, layouts, sizes and compilation.

A case in which the reference raises an error is skipped. All errors are relative to the reference in float64 (in
float32 on Apple's GPU, which has no float64). A few rounding errors are allowed, and so are a few times the error
that the reference has in the operation's dtype. The reference's error is the larger of two: at these inputs, and
at slightly changed inputs. Every call starts with the same seed.
"""

import math
import warnings
from collections import namedtuple
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, combinations, product
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._library.custom_ops import CustomOpDef
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from dunes import measure
from dunes.ops.kernels import missing_compiler
from dunes.ops.operation import Operation
from dunes.progress import print_table
from dunes.units import format_seconds, plural

Form = Callable[..., Any]
Check = namedtuple("Check", "name result detail")
Times = namedtuple("Times", "form reference operation")  # median seconds of a call

SLACK, ROUNDINGS = 4, 4  # permitted errors, as multiples of the reference's error and of a rounding error
SMALL = 1 / 2  # errors are relative to the tensor's largest number, or to SMALL times a larger tensor's

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
OUTPUTS = {"": slice(None), " of the first output alone": slice(1), " of the last output alone": slice(-1, None)}


class NotTried(Exception):
    """Raised by a check that does not apply; the message is the reason."""


class Fault(ValueError):
    """Raised for a fault that fails the check, even in cases in which the operation may raise an error."""


class Report(NamedTuple):
    """The results of the checks and the measured times; `check` returns a Report."""

    checks: list[Check]
    times: list[Times]

    def failures(self) -> list[Check]:
        """The checks that failed."""
        return [c for c in self.checks if c.result == "failed"]


def check(
    op: Form,
    inputs: Sequence[Any],
    reference: Form | None = None,
    *,
    backend: str = "inductor",
    seconds: float = 0.2,
) -> Report:
    """Compare an operation with its reference on these arguments, print a report and return it.

    Gradients are checked for inputs that require a gradient (`requires_grad_()`). `op` is an `Operation`, an
    operator of `torch.library.custom_op`, or any function; operators and functions need a `reference`. `backend`
    is passed to torch.compile. Each timing takes `seconds`; with 0, nothing is timed.

    If a check fails, the report is printed, and a ValueError with the name of the first failed check is raised.
    """
    own = op if isinstance(op, Operation) else None
    name = own.name if own else str(getattr(op, "_qualname", getattr(op, "__name__", op)))
    names = [repr(p) for p in own.parameters] if own else [f"number {i + 1}" for i in range(len(inputs))]
    reference = reference or (own and own.reference)
    if reference is None:
        raise ValueError(f"{name}: there is nothing to compare it with; give reference=")
    if not any(isinstance(x, Tensor) for x in inputs):
        raise ValueError(f"{name}: the inputs have no tensor; give a sequence of its arguments")
    case, report = Case(op, reference, dict(zip(names, inputs, strict=True)), backend), Report([], [])
    case = case.replace({name: x.detach().clone() for name, x in case.tensors.items()})
    with warnings.catch_warnings(), torch.random.fork_rng():
        warnings.filterwarnings("ignore", ".*determinis")  # the debug mode that `_sizes` sets makes torch warn
        for row in ROWS:
            report.checks.append(_attempt(row, case, [c.name for c in report.failures()]))
    report.times.extend(_times(case, seconds) if seconds and not report.failures() else ())
    print_table(f"ops.check of {name}", ["", "", ""], report.checks)
    if report.times:
        lines = [[t.form, *map(format_seconds, t[1:]), f"{t.operation / t.reference:.2f}"] for t in report.times]
        print_table("\ntime of a call", ["", "reference", "operation", "ratio"], lines)
    for failure in report.failures():
        raise ValueError(f"{name}: {failure.name}: {failure.detail}")
    return report


def _attempt(row: str, plain_case: "Case", wrong: Sequence[str]) -> Check:
    """Check the cases of `row` until a case fails; dtype modes in `wrong`, whose own rows failed, are skipped."""
    (cases, modes), case = ROWS[row], plain_case
    results: list[Any] = ["there is no such input"]
    try:
        for mode in (mode for mode in modes if mode not in wrong):
            for case in cases(plain_case.in_mode(mode)):
                results.append(_compare(case))
    except NotTried as reason:
        results.append(str(reason))
    except Exception as error:  # the report shows any error of the operation
        shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in case.tensors.items())
        return Check(row, "failed", f"{case.label}{_line(error)} ({case.mode}: {shapes})")
    errors = [pair for pair in results if isinstance(pair, tuple)]
    if not errors:
        other = "failed" if row == "float32" else "not tried"  # the float32 row must compare something
        return Check(row, "ok" if results[-1].startswith("refused") else other, results[-1])
    worst, ref_error = (max(pair) for pair in zip(*errors, strict=True))
    return Check(row, "ok", f"{plural(len(errors), 'case')}, error {worst:.1e}, the reference's {ref_error:.1e}")


def _line(error: BaseException) -> str:
    line = next((line.strip()[:150] for line in str(error).splitlines() if line.strip()), "")
    return line if isinstance(error, ValueError) else f"{type(error).__name__}: {line}"


def _gradient(y: Tensor) -> Tensor:
    """An incoming gradient for y, without zeros, whose values every dtype represents exactly."""
    return ((torch.arange(y.numel(), device=y.device) % 7 * 2 - 5) / 8).to(y.dtype).view(y.shape)


@dataclass(frozen=True)
class Case:
    """One call to compare: its inputs, dtype mode, context, incoming gradient, and the outputs that get this
    gradient."""

    op: Form
    reference: Form
    inputs: dict[str, Any]
    backend: str
    mode: str = "float32"
    label: str = ""
    gradient: Form = _gradient
    outputs: str = ""
    context: Form = nullcontext
    may_refuse: bool = False
    wild: bool = False  # with inputs that are not finite, gradients may be inf instead of NaN, or NaN instead of 0
    seed: int = 0
    graphs: tuple[bool, ...] = (False,)  # one per backward: True if the next backward differentiates the gradients
    after: Form | None = None  # a further check, called if the results are right

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {name: x for name, x in self.inputs.items() if isinstance(x, Tensor)}

    @property
    def floats(self) -> dict[str, Tensor]:
        return {name: x.detach() for name, x in self.tensors.items() if x.is_floating_point()}

    @property
    def leaves(self) -> dict[str, Tensor]:
        return {name: x for name, x in self.tensors.items() if x.requires_grad}

    @property
    def device(self) -> torch.device:
        return next(iter(self.tensors.values())).device

    def replace(self, tensors: dict[str, Tensor], **changes: Any) -> "Case":
        """A copy of the case with these inputs; a new tensor requires a gradient if the replaced tensor does."""
        like = {name: x.detach().requires_grad_(name in self.leaves) for name, x in tensors.items()}
        return replace(self, inputs=self.inputs | like, **changes)

    def call(self, form: Form, *arguments: Any) -> list[Tensor]:
        """The outputs of `form`, which is called with the same seed each time."""
        for seed in (torch.manual_seed, *(x.manual_seed for x in arguments if isinstance(x, torch.Generator))):
            seed(self.seed)
        return [y for y in tree_leaves(form(*arguments)) if y is not None]

    def in_mode(self, mode: str) -> "Case":
        wide = torch.float64 if mode == "float64" and self.device.type != "mps" else torch.float32
        return self.replace({name: x.to(DTYPES.get(mode, wide)) for name, x in self.floats.items()}, mode=mode)


def _evaluate(form: Form, c: Case) -> dict[str, Tensor]:
    """The outputs and gradients of `form`, by name.

    Raises Fault if `form` writes into an input, an output or the incoming gradient, even if `form` raises an
    error.
    """
    watched = [_memory(x, f"its input {name}") for name, x in c.tensors.items()]
    try:
        with torch.autocast(c.device.type, torch.bfloat16, enabled=c.mode == "autocast"), c.context():
            outputs = c.call(form, *c.inputs.values())
        results, leaves = {f"output {i + 1}": y for i, y in enumerate(outputs)}, dict(c.leaves)
        differentiable = [y for y in outputs if y.requires_grad][OUTPUTS[c.outputs]]
        for create_graph in c.graphs if leaves and differentiable else ():
            grads = [c.gradient(y.detach()).requires_grad_(create_graph) for y in differentiable]
            watched += [_memory(y, "its output in the backward") for y in differentiable]
            watched += [_memory(g, "the incoming gradient") for g in grads]
            keep, of = len(c.graphs) > 1, [*leaves.values()]
            gradients = torch.autograd.grad(differentiable, of, grads, keep, create_graph, materialize_grads=True)
            results |= {f"gradient of {name}": g for name, g in zip(leaves, gradients, strict=True)}
            if create_graph:
                # Without the graph of x * x, autograd would raise its own error for a gradient without a graph.
                differentiable = [g + x * x for g, x in zip(gradients, of, strict=True)]
                leaves |= {f"incoming gradient {i + 1}": g for i, g in enumerate(grads)}
    finally:
        for name, memory, before in watched:
            if not torch.equal(memory, before):
                raise Fault(f"it writes into {name}; write into a clone")
    return results


def _memory(x: Tensor, name: str = "") -> tuple[str, Tensor, Tensor]:
    """The name, a view of x's storage as bytes (gaps between elements included), and a copy of these bytes."""
    memory = torch.empty(0, dtype=torch.uint8, device=x.device).set_(x.untyped_storage())
    return name, memory, memory.clone()


def _describe(name: str, y: Tensor | None) -> str:
    return f"no {name}" if y is None else f"{name} {tuple(y.shape)} {str(y.dtype)[6:]}"


def _compare(c: Case) -> tuple[float, float] | str:
    """The numerical errors of operation and reference, or the message if one of them raises an allowed exception.

    Raises ValueError if the results differ too much. Any other exception of the operation is raised, too.
    """
    try:
        reference = _evaluate(c.reference, c)
    except Exception as error:
        return f"the reference refuses it: {_line(error)}"
    try:
        own = _evaluate(c.op, c)
    except Exception as error:
        wrong = isinstance(error, Fault) or "invalid gradient" in str(error)
        if wrong or not (c.may_refuse or c.mode in ("float16", "float64")):
            raise
        return f"{'refused' if c.may_refuse else 'it refuses ' + c.mode}: {_line(error)}"
    for name in own | reference:
        returned, expected = (_describe(name, results.get(name)) for results in (own, reference))
        if returned != expected:
            raise ValueError(f"it returns {returned}; the reference {expected}")
    for (name, x), result in product(c.tensors.items(), own):
        aliases = [y[result].untyped_storage()._cdata == x.untyped_storage()._cdata for y in (own, reference)]
        if aliases == [True, False]:
            raise ValueError(f"it returns its input {name} or a view of it; return a clone")
    exact = reference
    with suppress(Exception):  # the reference may not support float64, or may draw other random numbers in float64
        other = _evaluate(c.reference, replace(c, seed=1))
        if all(torch.equal(_memory(y)[1], _memory(other[name])[1]) for name, y in reference.items()):
            exact = _evaluate(c.reference, c.in_mode("float64"))
    errors = _judge(c, own, reference, exact)
    if c.after:
        c.after(c)
    return errors


def _judge(c: Case, own: Any, reference: Any, exact: Any) -> tuple[float, float]:
    """The largest errors of operation and reference. Raises ValueError if an operation's error is too large."""
    rounding = torch.finfo(torch.bfloat16 if c.mode == "autocast" else DTYPES.get(c.mode, torch.float32)).eps
    long = max(x.numel() for x in c.tensors.values()) ** 0.5 * torch.finfo(torch.float32).eps  # sequential sum
    worst = (0.0, 0.0)
    for name, error, ref_error, numbers in _errors(own, reference, exact, c):
        if error > max(SLACK * ref_error, ROUNDINGS * rounding, long) and error > SLACK * _nearby(c, name, exact):
            raise ValueError(f"{name}: error {error:.1e}, the reference's {ref_error:.1e}: {numbers}")
        worst = max(worst[0], error), max(worst[1], ref_error)
    return worst


def _nearby(c: Case, name: str, exact: Any) -> float:
    """The reference's error at slightly changed inputs, since the reference may be exact at the inputs by
    chance."""
    moved: Form = lambda x, sign: x * (1 + sign * torch.finfo(x.dtype).eps * _gradient(x).abs())
    sides = [c.replace({n: moved(x, sign) for n, x in c.floats.items()}) for sign in (-1, 1)]
    results = (_evaluate(c.reference, side) for side in sides)
    return min(e for y in results for n, e, _, _ in _errors(y, y, exact, replace(c, wild=True)) if n == name)


def _errors(own: Any, reference: Any, exact: Any, c: Case) -> Iterator[tuple[str, float, float, str]]:
    """For each tensor: its name, the largest errors of operation and reference, and the worst value as text.

    Only finite numbers count. Raises ValueError for a wrong inf or NaN.
    """
    exact = {name: y.detach() for name, y in exact.items()}
    sizes = {name: float(y.where(y.isfinite(), 0).abs().max()) if y.numel() else 0.0 for name, y in exact.items()}
    for name, y in ((name, y) for name, y in own.items() if y.numel()):
        value, ref, want = (x[name].detach().to(exact[name].dtype) for x in (own, reference, exact))
        want = want.where(want.to(y.dtype).isfinite(), want.to(y.dtype).to(want.dtype))  # overflow of y's dtype
        # Gradients that nearly cancel, such as softmax's, have errors of the size of the outputs' errors.
        floor = min(1.0, *(size for output, size in sizes.items() if output[0] == "o")) * (name[0] == "g")
        largest = max(sizes[name], floor, *(SMALL * size for other, size in sizes.items() if other[0] == name[0]))
        overflows = want.isfinite() & ~((ref - want).abs() <= largest / 2)  # an overflow inside the reference
        equal = want.isfinite() & (value.isfinite() | overflows.any())
        equal |= torch.isclose(value, want, 0, 0, equal_nan=True) | torch.isclose(value, ref, 0, 0, equal_nan=True)
        lost = (want == 0) & value.isnan() | ~want.isfinite() & ~value.isfinite() & (name[0] == "g")
        equal |= lost & c.wild
        if not equal.all():
            raise ValueError(f"{name} has {float(value[~equal][0])}, the reference {float(want[~equal][0])}")
        finite = value.isfinite() & want.isfinite() & ref.isfinite()
        distances = [(x - want).abs().where(finite, 0) for x in (value, ref)]
        numbers = " for ".join(f"{float(x.flatten()[distances[0].argmax()]):.6g}" for x in (value, want))
        yield name, *(float(x.max()) / max(largest or 1.0, 2.0**-120) for x in distances), numbers


def _with(get: Form, change: Form, value: Any) -> ExitStack:
    stack = ExitStack()
    stack.callback(change, get())
    change(value)
    return stack


def _choices(c: Case) -> Iterator[Case]:
    """Cases that vary which inputs require a gradient, which outputs get a gradient, or the context of the
    call."""
    for outputs in OUTPUTS:
        yield replace(c, outputs=outputs, label=f"gradient{outputs}: " * bool(outputs))
    for names in chain.from_iterable(combinations(c.leaves, n) for n in range(len(c.leaves))):
        inputs = {name: x.detach().requires_grad_(name in names) for name, x in c.leaves.items()}
        yield replace(c, inputs=c.inputs | inputs, label=f"gradient of {' and '.join(names) or 'none'} alone: ")
    double = partial(_with, torch.get_default_dtype, torch.set_default_dtype, torch.float64)
    for context in (torch.no_grad, torch.inference_mode, double):
        yield replace(c, context=context, label=f"under {getattr(context, '__name__', 'float64 by default')}: ")


def _variants(vary: Form, c: Case) -> Iterator[Case]:
    """Cases in which `vary` replaces one input, all inputs (layouts only), or the incoming gradient."""
    c = replace(c, wild=vary is _not_finite)
    variants = {name: dict(vary(x.detach())) for name, x in c.tensors.items() if x.numel()}
    for names in [(name,) for name in variants] + [tuple(variants)] * (vary is _layouts and len(variants) > 1):
        for variant in variants[names[0]]:
            tensors = {name: variants[name].get(variant, c.inputs[name]) for name in names}
            yield c.replace(tensors, label=f"{variant} {' and '.join(names)}: ")
    gradient_variants = max(variants.values(), key=len, default={})
    for outputs, variant in product(OUTPUTS, gradient_variants) if c.leaves else ():
        # A gradient with too few dimensions for a layout raises an error in the reference, too.
        gradient = lambda y, variant=variant: dict(vary(_gradient(y)))[variant]
        yield replace(c, gradient=gradient, outputs=outputs, label=f"{variant} the gradient{outputs}: ")


def _layouts(x: Tensor) -> Iterator[tuple[str, Tensor]]:
    """x in a NaN-filled buffer, x with permuted dimensions in memory, and first slices of x expanded."""
    nan = torch.full_like(x, math.nan if x.is_floating_point() else 0)
    yield "one number behind the start of memory,", torch.cat([nan.flatten()[:1], x.flatten()])[1:].view(x.shape)
    yield "one number repeated in", x.flatten()[0].expand(x.shape)
    for d, n in enumerate(x.shape):
        yield f"a slice in dimension {d} of", torch.cat([nan, x, nan], d).narrow(d, n, n)
        yield f"every second in dimension {d} of", torch.stack([x, nan], d + 1).select(d + 1, 0)
        yield f"the first in dimension {d} repeated in", x.narrow(d, 0, 1).expand(x.shape)
        for e in range(d):
            y, gap = x.movedim(e, d).contiguous(), nan.movedim(e, d)
            yield f"dimension {e} at {d} in memory of", y.movedim(d, e)
            yield f"dimension {e} at {d} in a slice of", torch.cat([y, gap], -1)[..., : y.shape[-1]].movedim(d, e)


def _not_finite(x: Tensor) -> Iterator[tuple[str, Tensor]]:
    n, values = x.numel(), (math.nan, math.inf, -math.inf) if x.is_floating_point() else ()
    for value, place in product(values, (n // 2, n - 1)):
        at = torch.arange(n, device=x.device).view(x.shape) == place
        yield f"{value} as number {place} of", torch.where(at, value, x)


def _values(x: Tensor) -> Iterator[tuple[str, Tensor]]:
    yield "the reverse of", x.flatten().flip(0).view(x.shape)
    if x.is_floating_point():
        yield "whole numbers in", x.round()
        yield "other numbers in", x + _gradient(x)
        # Squares of large numbers overflow; GPUs may flush subnormal numbers.
        for factor in (0, 1 / 128, 128, 2.0**66, *([2.0**-129] if x.device.type == "cpu" else ())):
            yield f"{factor:.2g} times", x * factor


def _sizes(c: Case) -> Iterator[Case]:
    """Cases in which dimensions get other sizes. Uninitialised memory is filled with NaN."""
    if c.device.type != "cpu" and len(c.floats) < len(c.tensors):
        raise NotTried("an index out of bounds ends the process on this device")
    nan = partial(_with, torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode, 1)
    shapes = [x.shape for x in c.tensors.values()]
    sizes, dims = sorted({n for shape in shapes for n in shape if n}), range(-max(map(len, shapes)), 0)
    places = [((None,), (0, 1, 3, 7, 17, 33, 257, 1031)), (dims, (1031,)), ((0, -1), (4099,))]
    alone = [(place, {n: to}) for where, lengths in places for place, n, to in product(where, sizes, lengths)]
    together = [(None, dict(zip(sizes, odd, strict=False))) for odd in ([1] * len(sizes), range(17, 99, 2))]
    for place, lengths in [*((0, {n: 0}) for n in shapes[0][:1] if n), *alone, *together]:
        resized = dict(c.tensors)
        for name, (d, n) in ((name, dim) for name, x in resized.items() for dim in enumerate(x.shape)):
            if n in lengths and place in (None, d, d - c.tensors[name].dim()):
                resized[name] = resized[name].index_select(d, torch.arange(lengths[n], device=c.device) % n)
        if sum(x.numel() for x in resized.values()) < 2**22:
            label = ", ".join(f"{to} in place of {n}" for n, to in lengths.items())
            label += f" in dimension {place}: " if place else ": "
            yield c.replace(resized, label=label, context=nan, may_refuse=place != 0 or 0 not in lengths.values())


def _other_values(c: Case) -> Iterator[Case]:
    """Cases with other values of a tensor or a number (also in a sequence), or with None in place of a tensor."""
    yield from _variants(_values, c)
    for name, argument in c.inputs.items():
        leaves, spec = tree_flatten(argument)
        for i, x in enumerate(leaves):
            for other in _others(x):
                changed = tree_unflatten([*leaves[:i], other, *leaves[i + 1 :]], spec)
                label = f"{changed} in place of {'a tensor' if isinstance(x, Tensor) else x} as {name}: "
                yield replace(c, inputs=c.inputs | {name: changed}, label=label, may_refuse=True, wild=True)


def _others(x: Any) -> set[Any]:
    if isinstance(x, Tensor | bool):
        return {None} if isinstance(x, Tensor) else {not x}
    if isinstance(x, int):
        return {n for n in (x + 1, x - 1, 2 * x, x // 2) if n != x and (n >= 0 or x < 0)}
    return {0.0, x / 2, 2 * x, x + 1} - {x} if isinstance(x, float) else set()


def _gradcheck(c: Case) -> Iterator[Case]:
    """Compare gradients with finite differences. Raises NotTried if the operation does not compute in float64."""
    errors = _compare(c)
    if isinstance(errors, str) or errors[0] > 1e-9 or not c.leaves:
        raise NotTried(errors if isinstance(errors, str) else "no gradient, or computed in float32")
    form = lambda *arguments: tuple(y for y in c.call(c.op, *arguments) if y.is_floating_point())
    fast = sum(x.numel() for x in c.leaves.values()) > 100
    torch.autograd.gradcheck(form, [*c.inputs.values()], fast_mode=fast, nondet_tol=1e-5)
    yield c


def _repeat(c: Case) -> Iterator[Case]:
    """Cases with several calls, and with tensors that are overwritten between calls."""
    halves = c.replace({name: x / 2 for name, x in c.floats.items()})
    interrupted = lambda *arguments: (c.op(*arguments), _evaluate(c.op, halves))[0]
    yield from [replace(case, op=interrupted) for case in (c, halves)] * 4
    yield replace(c, graphs=(False, False), label="a second backward: ")

    def in_buffers(overwrite: bool, *arguments: Any) -> Any:
        buffers = [x / 2 if isinstance(x, Tensor) and x.is_floating_point() else x for x in arguments]
        pairs = [(b, x) for b, x in zip(buffers, arguments, strict=True) if b is not x]
        for fill in (1, 0):
            outputs = c.call(c.op, *buffers)
            for b, x in pairs if fill or overwrite else ():
                b.copy_(x * fill)
        return outputs

    yield replace(c, op=partial(in_buffers, False), label="after other numbers in the same memory: ")
    yield replace(
        c, op=partial(in_buffers, True), may_refuse=True, label="inputs overwritten before the backward: "
    )


def _opcheck(c: Case) -> Iterator[Case]:
    """Run `torch.library.opcheck` on a torch operator, and its fake-tensor test on each memory layout."""
    operator = getattr(c.op, "operator", c.op)
    falls_back = isinstance(c.op, Operation) and c.op.fallback_reason(c.device.type)
    if falls_back or not isinstance(operator, CustomOpDef):
        raise NotTried("it has no torch operator, or its kernels cannot run here")
    torch.library.opcheck(operator, (*c.inputs.values(),))
    fake = lambda case: torch.library.opcheck(operator, (*case.inputs.values(),), test_utils="test_faketensor")
    plain = replace(c, inputs=c.inputs | c.floats, after=fake)
    yield from chain([plain], _variants(_layouts, plain), _sizes(plain))


def _compile(c: Case) -> Iterator[Case]:
    """Check that torch.compile makes a single graph, and that its results equal the eager results."""
    if c.backend == "inductor" and c.device.type == "cpu" and (reason := missing_compiler()):
        raise NotTried(reason)
    torch.compiler.reset()
    yield replace(c, op=torch.compile(c.op, fullgraph=True, backend=c.backend), reference=c.op)


MODES = (*DTYPES, "autocast")
ROWS: dict[str, tuple[Callable[[Case], Iterable[Case]], Sequence[str]]] = {
    **{mode: (_choices, [mode]) for mode in (*MODES, "float64")},
    "gradcheck": (_gradcheck, ["float64"]),
    "NaN": (partial(_variants, _not_finite), MODES),
    "values": (_other_values, MODES[:2]),
    "sizes": (_sizes, MODES[:2]),
    "not contiguous": (partial(_variants, _layouts), MODES[:2]),
    "repeated": (_repeat, ["float32"]),
    "second derivative": (lambda c: [replace(c, graphs=(True, False), may_refuse=True)], ["float64", "float32"]),
    "opcheck": (_opcheck, MODES[:2]),
    "compiled": (_compile, ["float32"]),
}


def _times(c: Case, seconds: float) -> Iterator[Times]:
    """Median seconds of reference and operation, called in turn, without and with the backward pass."""
    forms = {"eager": [c.reference, c.op]}
    with suppress(NotTried):
        forms[f"compiled ({c.backend})"] = [next(_compile(replace(c, op=form))).op for form in forms["eager"]]
    for (name, pair), backward in product(forms.items(), (False, True) if c.leaves else (False,)):
        durations: list[list[float]] = [[], []]
        end = perf_counter() + 2 * seconds
        while perf_counter() < end or len(durations[1]) < 5:
            for form, times in zip(pair, durations, strict=True):
                start = perf_counter()
                with torch.set_grad_enabled(backward):
                    outputs = [y for y in tree_leaves(form(*c.inputs.values())) if y.requires_grad]
                if backward:
                    torch.autograd.grad(outputs, [*c.leaves.values()], outputs, allow_unused=True)
                measure.synchronize(c.device)
                times.append(perf_counter() - start)
        yield Times(name + ", with backward" * backward, *map(median, durations))
