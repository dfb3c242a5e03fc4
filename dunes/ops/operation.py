"""Differentiable operations, each defined by a forward, a backward and a plain reference function.

    def exp_backward(grad: Tensor, output: Tensor) -> Tensor:
        return grad * output

    @ops.operation("example::exp", reference=torch.exp, backward=exp_backward)
    def exp(x: Tensor) -> Tensor:
        return x.exp()

The reference defines the operation: `ops.check` compares results with the reference, and tracing takes shapes and
dtypes from it. Where the operation cannot run, the reference runs. Compiled graphs and exports call an operator of
`torch.library`. Eager calls use an autograd.Function, which has less overhead.
"""

import inspect
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, cast, get_origin

import torch
from torch import Tensor

from dunes.context import prefix_errors
from dunes.ops.kernels import Kernels
from dunes.units import plural

Autocast = Literal["low", "float32"]
"""The dtype to which inputs are cast under autocast: autocast's own dtype ("low") or float32."""

Compiled = Literal["operation", "reference"]
"""The function that torch.compile puts into its graph."""

SPECIAL = ("grad", "grads", "output", "outputs", "kept", "needs_grad")
"""Parameter names that a backward may use in addition to the forward's parameter names."""


@dataclass(eq=False, repr=False)
class Operation:
    """The result of `operation`: a callable with the forward's parameters; the backward computes its gradients."""

    name: str
    forward: Callable[..., Any]
    reference: Callable[..., Any]
    backward: Callable[..., Any] | None = None
    fake: Callable[..., Any] | None = None
    kernels: Kernels | None = None
    autocast: Autocast | None = None
    compiled: Compiled = "operation"

    def __post_init__(self) -> None:
        self.signature = inspect.signature(self.forward)
        self.parameters = list(self.signature.parameters)
        self.tensors = _tensor_parameters(self.name, self.forward)
        self.saved = Saved.of(self) if self.backward else None
        self.keeps = self.saved is not None and "kept" in self.saved.parameters
        self.operator: Any = None if self.compiled == "reference" else _register(self)
        self._function = _eager_function(self) if self.backward else None
        self._announced: set[str] = set()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs or len(args) != len(self.parameters):
            bound = self.signature.bind(*args, **kwargs)
            bound.apply_defaults()
            args = bound.args
        first = args[self.tensors[0]]
        device = first.device.type
        if autocast_enabled(first):
            with torch.autocast(device, enabled=False):
                return self._call(self._cast(args, torch.get_autocast_dtype(device)), device)
        return self._call(args, device)

    def __repr__(self) -> str:
        return f"<operation {self.name}>"

    def __deepcopy__(self, memo: dict[int, Any]) -> "Operation":
        """The operation itself: like a function, an operation is not copied when a model that contains it is
        copied."""
        return self

    def _call(self, args: Sequence[Any], device: str) -> Any:
        if torch.compiler.is_compiling():
            usable = self.operator is not None and (self.kernels is None or _usable(self, device))
            return self._call_operator(args) if usable else self.reference(*args)
        if torch._C._are_functorch_transforms_active() or self.kernels is not None:
            reason = self.fallback_reason(device)
            if reason is not None:
                self._announce(reason)
                return self.reference(*args)
            if not _plain_tensors(args, self.tensors):
                return self._call_operator(args)  # kernels cannot read fake tensors or tensor subclasses
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*args):
            if self._function is None:
                raise ValueError(f"{self.name} has no backward: call it under torch.no_grad(), or give it one")
            return self._function.apply(*args)  # type: ignore[no-untyped-call]
        result = self.forward(*args)
        return result[0] if self.keeps else result

    def _call_operator(self, args: Sequence[Any]) -> Any:
        result = self.operator(*args)
        return result[0] if self.keeps else result

    def _cast(self, args: Sequence[Any], low: torch.dtype) -> Sequence[Any]:
        if self.autocast is None:
            return args
        dtype = torch.float32 if self.autocast == "float32" else low
        floats = [isinstance(a, Tensor) and a.is_floating_point() and a.dtype != torch.float64 for a in args]
        return [a.to(dtype) if is_float else a for a, is_float in zip(args, floats, strict=True)]

    def fallback_reason(self, device: str) -> str | None:
        """The reason why eager calls use the reference on this type of device; None if they use the forward."""
        if torch._C._are_functorch_transforms_active():
            return "it has no form for torch.func"
        return None if self.kernels is None else self.kernels.missing(device)

    def _announce(self, reason: str) -> None:
        if reason not in self._announced:
            self._announced.add(reason)
            warnings.warn(f"{self.name} is computed by its reference: {reason}", stacklevel=4)

    def gradients(self, ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Call the backward. Returns a gradient or None for each argument of the forward.

        Raises ValueError unless the backward returns a value for each tensor argument.
        """
        assert self.backward is not None
        assert self.saved is not None
        result = self.backward(*self.saved.restore(ctx, grads))
        result = result if isinstance(result, tuple) else (result,)
        if len(result) != len(self.tensors):
            tensors = plural(len(self.tensors), "tensor")
            raise ValueError(
                f"{self.name}: the backward returns {len(result)} gradients for {tensors}; return one for each, "
                "None where there is none"
            )
        gradients: list[Tensor | None] = [None] * len(self.parameters)
        for i, gradient in zip(self.tensors, result, strict=True):
            gradients[i] = gradient
        return tuple(gradients)


@dataclass(frozen=True)
class Saved:
    """The parameters of a backward, and the tensors and values that the forward saves for these parameters."""

    parameters: list[str]
    inputs: list[str]
    """Parameter names shared with the forward: tensors first, then other values."""
    tensors: list[int]
    """Indices of the saved tensors in the forward's arguments."""
    values: list[int]
    outputs: slice
    differentiable: list[int]
    """Indices of all tensors in the forward's arguments."""

    @classmethod
    def of(cls, op: Operation) -> "Saved":
        """The `Saved` for the operation's backward. Raises ValueError for an unknown parameter name."""
        backward = op.backward.forward if isinstance(op.backward, Operation) else op.backward
        assert backward is not None
        parameters = list(inspect.signature(backward).parameters)
        names = [*SPECIAL, *op.parameters]
        unknown = [name for name in parameters if name not in names]
        if unknown:
            raise ValueError(f"{op.name}: the backward's {unknown[0]!r} is none of {', '.join(names)}")
        positions = [op.parameters.index(name) for name in parameters if name in op.parameters]
        tensors, values = [i for i in positions if i in op.tensors], [i for i in positions if i not in op.tensors]
        first = 0 if {"output", "outputs"} & {*parameters} else 1
        outputs = slice(first, None if {"kept", "outputs"} & {*parameters} else 1)
        inputs = [op.parameters[i] for i in tensors + values]
        return cls(parameters, inputs, tensors, values, outputs, op.tensors)

    def store(self, ctx: Any, inputs: Sequence[Any], outputs: Sequence[Tensor]) -> None:
        ctx.save_for_backward(*(inputs[i] for i in self.tensors), *outputs[self.outputs])
        ctx.values = [inputs[i] for i in self.values]

    def restore(self, ctx: Any, grads: Sequence[Tensor]) -> list[Any]:
        """The arguments of the backward, in the order of its parameters."""
        saved, n = ctx.saved_tensors, len(self.tensors)
        outputs = saved[n:]
        arguments = {
            "grad": grads[0],
            "grads": grads,
            "output": outputs[0] if outputs else None,
            "outputs": outputs,
            "kept": outputs[1 - self.outputs.start :],
            "needs_grad": tuple(ctx.needs_input_grad[i] for i in self.differentiable),
            **dict(zip(self.inputs, (*saved[:n], *ctx.values), strict=True)),
        }
        return [arguments[name] for name in self.parameters]


def operation(
    name: str,
    *,
    reference: Callable[..., Any],
    backward: Callable[..., Any] | None = None,
    fake: Callable[..., Any] | None = None,
    kernels: Kernels | None = None,
    autocast: Autocast | None = None,
    compiled: Compiled = "operation",
) -> Callable[[Callable[..., Any]], Operation]:
    """A decorator that turns a forward function into an `Operation`.

    An operation supports autograd, torch.compile, export, autocast and fake tensors. The forward needs annotations
    as for `torch.library.custom_op`; sequences of tensors are not supported. The forward must return new tensors
    and must not write into its arguments. `name` is `namespace::name`.

    reference: the same function in plain PyTorch, differentiable by autograd.
    backward: a function that returns a gradient or None for each tensor argument. Its parameters may have these
        names: `grad` (or `grads`, for several outputs), the names of the forward's parameters, `output` (or
        `outputs`), `needs_grad` (one bool for each tensor), and `kept`. With `kept`, the forward returns
        (output, *kept), and callers get only the output. Second derivatives raise ValueError.
    fake: a function that returns empty outputs of the right shape, for tracing. Default: the reference.
    kernels: a `Cpp`, a `Metal`, or another object with a method `missing`. Where the kernels cannot run, the
        reference runs, with one warning. A backward that uses kernels must itself be an `Operation`.
    autocast: dtype to which floating-point tensors are cast under autocast. By default, tensors are not cast.
        Autocast is disabled inside the operation.
    compiled: with "reference", torch.compile fuses the reference, and no torch operator is registered.

    Raises ValueError for an unknown parameter of the backward, and for types that torch.library does not support.
    """

    return lambda forward: Operation(name, forward, reference, backward, fake, kernels, autocast, compiled)


def _tensor_parameters(name: str, forward: Callable[..., Any]) -> list[int]:
    annotations = inspect.get_annotations(forward, eval_str=True)
    if get_origin(annotations.get("return")) is list:
        raise ValueError(f"{name}: the forward returns a list; return a tuple of tensors, annotated as one")
    hints = [annotations.get(p) for p in inspect.signature(forward).parameters]
    tensors = [i for i, hint in enumerate(hints) if hint in (Tensor, Tensor | None)]
    if not tensors or hints[tensors[0]] is not Tensor:
        raise ValueError(f"{name}: no parameter of the forward is annotated as Tensor; write x: Tensor")
    return tensors


def _eager_function(op: Operation) -> type[torch.autograd.Function]:
    store, keeps = cast(Saved, op.saved).store, op.keeps  # looked up once, since calls are short

    def forward(ctx: Any, *args: Any) -> Any:
        result = op.forward(*args)
        store(ctx, args, result if isinstance(result, tuple) else (result,))
        return result[0] if keeps else result

    members = {
        "forward": staticmethod(forward),
        "backward": staticmethod(once_differentiable(op.name, op.gradients)),
    }
    return type(op.name.replace("::", "_"), (torch.autograd.Function,), members)


def once_differentiable(name: str, backward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a backward so that it records no graph and second derivatives raise ValueError.

    With torch's `once_differentiable`, second derivatives are silently wrong for a constant incoming gradient.
    """

    def once(ctx: Any, *grads: Tensor) -> Any:
        if not torch.is_grad_enabled():
            return backward(ctx, *grads)
        with torch.no_grad():
            gradients = backward(ctx, *grads)
        gradients = gradients if isinstance(gradients, tuple) else (gradients,)
        return _NoSecondDerivative.apply(name, gradients, *grads, *ctx.saved_tensors)  # type: ignore[no-untyped-call]

    return once


class _NoSecondDerivative(torch.autograd.Function):
    """Returns the gradients unchanged; its backward raises ValueError."""

    @staticmethod
    def forward(ctx: Any, name: str, gradients: Sequence[Tensor | None], *of: Tensor) -> Any:
        ctx.name = name
        return tuple(None if g is None else g.view_as(g) for g in gradients)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise ValueError(f"{ctx.name} has no second derivative; differentiate its reference")


def _register(op: Operation) -> Any:
    """Register and return the torch operator that compiled graphs, exports and tensor subclasses use."""
    if op.keeps and op.fake is None:
        raise ValueError(f"{op.name}: the reference does not return the kept tensors; give fake= for their shapes")
    with prefix_errors(op.name, (ValueError, RuntimeError), describe=lambda error: str(error).splitlines()[0]):
        schema = torch.library.infer_schema(op.forward, mutates_args=())
        form = _contiguous(op.forward) if op.fake is None else op.forward
        operator: Any = torch.library.custom_op(op.name, form, mutates_args=(), schema=schema)
    operator.register_fake(op.fake or _contiguous(op.reference))
    if op.saved is not None:
        operator.register_autograd(once_differentiable(op.name, op.gradients), setup_context=_setup_context(op))
    return operator


def _contiguous(form: Callable[..., Any]) -> Callable[..., Any]:
    """Make `form` return contiguous outputs, since compiled graphs assume the fake implementation's strides."""

    def call(*args: Any) -> Any:
        result = form(*args)
        return tuple(y.contiguous() for y in result) if isinstance(result, tuple) else result.contiguous()

    return call


def _setup_context(op: Operation) -> Callable[..., None]:
    def setup(ctx: Any, inputs: Sequence[Any], output: Any) -> None:
        outputs = output if isinstance(output, tuple) else (output,)
        cast(Saved, op.saved).store(ctx, inputs, outputs)
        if op.keeps:
            ctx.mark_non_differentiable(*outputs[1:])

    return setup


def _usable(op: Operation, device: str) -> bool:
    reason = op.fallback_reason(device)
    if reason is not None:
        op._announce(reason)
    return reason is None


# Same as torch.compiler.assume_constant_result, which would take two seconds to import the compiler.
_usable._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _plain_tensors(args: Sequence[Any], tensors: Sequence[int]) -> bool:
    """True if the tensor arguments are plain tensors or None, and no torch dispatch mode is active."""
    plain_types = (Tensor, torch.nn.Parameter, type(None))
    return not torch._C._len_torch_dispatch_stack() and all(type(args[i]) in plain_types for i in tensors)


def autocast_dtype(x: Tensor) -> torch.dtype:
    """Autocast's dtype on x's device; x's own dtype if autocast is off."""
    return torch.get_autocast_dtype(x.device.type) if autocast_enabled(x) else x.dtype


def autocast_enabled(x: Tensor) -> bool:
    """True if autocast is on for x's device; False for devices without autocast, such as meta."""
    device = x.device.type
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


def without_autocast(x: Tensor) -> AbstractContextManager[object]:
    """A context that disables autocast on x's device.

    If autocast is off, a null context is returned, since exported graphs cannot contain autocast contexts.
    """
    return torch.autocast(x.device.type, enabled=False) if autocast_enabled(x) else nullcontext()
