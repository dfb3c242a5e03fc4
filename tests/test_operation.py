"""Operations of one's own: what they compute, what is refused, and our own ones by `ops.check`."""

import importlib
import re
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from conftest import refuses
from dunes import ops
from dunes.ops import cross_entropy, gated, int_linear, low_rank, rms_norm, rotary
from dunes.ops import expert_products as experts
from dunes.ops import scaled_dot_product as attention
from dunes.ops.float32_products import add_gram, mirror, plain_gram

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.compile's own

check_module = importlib.import_module("dunes.ops.check")  # `ops.check` is the function

DOCS = Path(__file__).parents[1] / "docs" / "operations.md"


def example(language, tmp_path, monkeypatch):
    """The page's example of this name, as a module."""
    blocks = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.S)
    (code,) = (block for block in blocks if f"# {language}" in block.splitlines()[0])
    (tmp_path / f"{language}_example.py").write_text(code.split("ops.check")[0])  # which compiles for long
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    return __import__(f"{language}_example")


def leaf(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).requires_grad_()


def exp_backward(grad: Tensor, output: Tensor) -> Tensor:
    return grad * output


def plain_exp(x: Tensor) -> Tensor:
    return x.exp()


@ops.operation("dunes_tests::exp", reference=torch.exp, backward=exp_backward)
def exp(x: Tensor) -> Tensor:
    return x.exp()


def quick(op, inputs, **options):
    """A check that compiles without Inductor and measures no time."""
    return ops.check(op, inputs, backend="aot_eager", seconds=0, **options)


def results(report):
    return {c.name: c.result for c in report.checks}


def test_the_first_example_of_the_page_is_ten_lines_and_right(tmp_path, monkeypatch, capsys, only):
    module = example("exp", tmp_path, monkeypatch)
    assert len([line for line in Path(module.__file__).read_text().splitlines() if line]) <= 10
    only("float32", "gradcheck", "compiled", "second derivative")
    assert set(results(quick(module.exp, [leaf(4, 3)])).values()) == {"ok"}
    assert "gradcheck" in capsys.readouterr().out


def test_only_what_the_backward_names_is_kept():
    @ops.operation(
        "dunes_tests::scale", reference=lambda x, factor: x * factor, backward=lambda grad, factor: grad * factor
    )
    def scale(x: Tensor, factor: float = 3.0) -> Tensor:
        return x * factor

    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = scale(leaf(3))
        assert not kept
        exp(leaf(3))
    assert len(kept) == 1
    assert y.grad_fn is not None
    (gradient,) = torch.autograd.grad(y.sum(), y.grad_fn.next_functions[0][0].variable)
    assert gradient.tolist() == [3.0] * 3
    assert torch.equal(scale(leaf(3), factor=2.0), leaf(3) * 2)


def test_what_the_forward_keeps_reaches_the_backward_alone(only):
    def backward(grad: Tensor, x: Tensor, kept: tuple[Tensor, ...], needs_grad: tuple[bool, ...]):
        (norm,) = kept
        return grad * x / norm.masked_fill(norm == 0, 1.0) if needs_grad[0] else None, None

    @ops.operation(
        "dunes_tests::norm",
        reference=lambda x, unused: x.norm(),
        backward=backward,
        fake=lambda x, unused: (x.new_empty(()), x.new_empty(())),
    )
    def norm(x: Tensor, unused: Tensor) -> tuple[Tensor, Tensor]:
        y = x.norm()
        return y, y.clone()

    assert isinstance(norm(leaf(4), torch.ones(2)), Tensor)
    assert [t.requires_grad for t in norm.operator(leaf(4), torch.ones(2))] == [True, False]
    only("float32", "gradcheck", "compiled")
    assert {*results(quick(norm, [leaf(4), torch.ones(2)])).values()} == {"ok"}
    torch.library.opcheck(norm.operator, (leaf(4), torch.ones(2)))


def test_autocast_casts_what_the_operation_says_and_is_off_inside():
    @ops.operation("dunes_tests::product", reference=F.linear, autocast="low", compiled="reference")
    def low(x: Tensor, weight: Tensor) -> Tensor:
        assert x.dtype == weight.dtype
        assert not torch.is_autocast_enabled("cpu")
        return F.linear(x, weight)

    @ops.operation("dunes_tests::wide", reference=torch.exp, autocast="float32", compiled="reference")
    def wide(x: Tensor) -> Tensor:
        return x.exp()

    with torch.autocast("cpu", torch.bfloat16):
        assert low(torch.randn(2, 3), torch.randn(4, 3).bfloat16()).dtype == torch.bfloat16
        assert wide(torch.randn(3).bfloat16()).dtype == torch.float32
        assert exp(torch.randn(3)).dtype == torch.float32
        assert low(torch.randn(2, 3).double(), torch.randn(4, 3).double()).dtype == torch.float64


def test_kernels_get_real_tensors_alone():
    @ops.operation(
        "dunes_tests::kernel",
        reference=torch.exp,
        backward=exp_backward,
        kernels=SimpleNamespace(missing=lambda device: None),
    )
    def kernel(x: Tensor) -> Tensor:
        assert type(x) is Tensor
        return x.exp()

    assert torch.equal(kernel(leaf(3)), leaf(3).exp())
    with FakeTensorMode() as mode:
        assert kernel(mode.from_tensor(torch.ones(3, 2))).shape == (3, 2)


def test_second_derivatives_are_refused_and_transforms_take_the_reference():
    x = leaf(3)
    for form in (exp, exp.operator):
        (gradient,) = torch.autograd.grad(form(x).sum(), x, create_graph=True)
        refuses("dunes_tests::exp has no second derivative", torch.autograd.grad, gradient.sum(), x)
    exp._announced.clear()
    with pytest.warns(UserWarning, match="computed by its reference: it has no form for torch.func"):
        assert torch.equal(torch.func.vmap(exp)(x), x.exp())


def test_where_kernels_are_missing_the_reference_is_computed_and_one_line_says_so():
    fails = SimpleNamespace(missing=lambda device: "there is no such device")

    @ops.operation("dunes_tests::absent", reference=torch.exp, backward=exp_backward, kernels=fails)
    def absent(x: Tensor) -> Tensor:
        raise AssertionError

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        y, again = absent(leaf(3)), absent(leaf(3))
    assert [str(w.message) for w in caught] == [
        "dunes_tests::absent is computed by its reference: there is no such device"
    ]
    assert torch.equal(y, again)
    assert torch.equal(y, leaf(3).exp())
    torch.compiler.reset()
    assert torch.equal(torch.compile(absent, fullgraph=True, backend="aot_eager")(leaf(3)), y)


def faulty(forward, backward=exp_backward, reference=plain_exp, **options):
    number = faulty.count = getattr(faulty, "count", 0) + 1
    if forward.__name__ == "<lambda>":
        forward.__annotations__ = {"x": Tensor}
    define = ops.operation(f"dunes_tests::faulty_{number}", reference=reference, backward=backward, **options)
    return define(forward)


def add_one(x: Tensor) -> Tensor:
    return x.add_(1)


def itself(x: Tensor) -> Tensor:
    return x


def rough(x: Tensor) -> Tensor:
    return x.exp() * 1.0001


WRONG_FORWARDS = {
    "writes": (add_one, "float32: it writes into its input 'x'; write into a clone"),
    "returns": (itself, "float32: it returns its input 'x' or a view of it; return a clone"),
    "view": (lambda x: x.t(), "float32: it returns its input 'x' or a view of it"),
    "no NaN": (lambda x: x.exp().nan_to_num(), "NaN: nan as number 6 of 'x': output 1 has 0.0, the reference nan"),
    "rough": (rough, "float32: output 1: error 1.0e-04"),
}
REFERENCES = {"writes": lambda x: x + 1, "returns": lambda x: x.clone(), "view": lambda x: x.t().clone()}
WRONG_BACKWARDS = {
    "shape": (
        lambda grad, output: (grad * output).sum(0),
        "float32: RuntimeError: Function dunes_tests_faulty_NBackward returned an invalid gradient at index 0",
    ),
    "count": (
        lambda grad, output: (grad, output),
        "float32: dunes_tests::faulty_N: the backward returns 2 gradients for 1 tensor",
    ),
    "wrong": (lambda grad, output: 1.5 * grad * output, "gradcheck: gradient of 'x': error 5.0e-01"),
}


@pytest.mark.parametrize("fault", [*WRONG_FORWARDS, *WRONG_BACKWARDS])
def test_what_is_wrong_is_named(fault, only):
    wrong, message = (WRONG_FORWARDS | WRONG_BACKWARDS)[fault]
    of_backward, reference = fault in WRONG_BACKWARDS, REFERENCES.get(fault, plain_exp)
    only(message.partition(":")[0] if ": " in message else "float32")
    form = (plain_exp, wrong) if of_backward else (wrong, None)
    op = faulty(*form, reference, compiled="reference")
    refuses(re.escape(message).replace("_N", r"_\d+"), quick, op, [leaf(3, 4).requires_grad_(of_backward)])


@pytest.fixture
def only(monkeypatch):
    """Leaves these rows."""
    return lambda *names: monkeypatch.setattr(check_module, "ROWS", {n: check_module.ROWS[n] for n in names})


def test_a_wrong_fake_form_is_found(only):
    only("opcheck")
    op = faulty(plain_exp, exp_backward, fake=lambda x: x.new_empty(2, 2))
    refuses("opcheck: ", quick, op, [leaf(3, 4)])


def test_graphs_read_outputs_by_their_strides():
    def forward(x: Tensor) -> Tensor:
        return x.contiguous().exp()

    op, x = faulty(forward), torch.randn(3, 4).t()
    quick(op, [leaf(3, 4)])
    torch.compiler.reset()
    graph = torch.compile(lambda x: op(x).stride(), fullgraph=True, backend="aot_eager")
    assert graph(x) == op.operator(x).stride() == (3, 1)


def test_definitions_that_cannot_be_right_are_refused():
    def untyped(x):
        return x

    def nothing(x: Tensor, sizes: dict) -> Tensor:
        return x

    def listed(x: Tensor) -> list[Tensor]:
        return [x.exp()]

    for forward, backward in (
        (untyped, exp_backward),
        (nothing, lambda grad: (grad,)),
        (listed, lambda grads, outputs: grads[0] * outputs[0]),
        (plain_exp, lambda gard: gard),
        (plain_exp, lambda grad, kept: grad),
    ):
        refuses("dunes_tests::faulty", faulty, forward, backward)
    refuses("has no backward", faulty(plain_exp, None, compiled="reference"), leaf(2))
    refuses("2 gradients", faulty(plain_exp, lambda grad, output: (grad, output))(leaf(3)).sum().backward)
    refuses("give reference=", quick, plain_exp, [leaf(2)])


def own_operations():
    """Our own operations with arguments for each: what `ops.check` is given."""
    torch.manual_seed(0)
    x, w = leaf(6, 8), torch.rand(8).requires_grad_()
    yield "gated", gated.fused, (x, leaf(6, 8)), None
    angle = torch.randn(2, 1, 5, 4)
    for adjacent in (False, True):
        yield f"rotary {adjacent}", rotary.fused, (leaf(2, 3, 5, 8), angle.cos(), angle.sin(), adjacent), None
    yield "rms_norm", rms_norm.fused, (x, w, 1e-5), rms_norm.plain
    targets = torch.tensor([1, 8, cross_entropy.IGNORE, 0, 3, 3])
    yield "cross_entropy", cross_entropy.fused, (x, leaf(9, 8), targets), cross_entropy.plain
    q, k = leaf(2, 4, 5, 8), leaf(2, 2, 5, 8)
    yield "attention", attention.attend, (q, k, torch.randn(2, 2, 5, 8).requires_grad_()), attention.plain
    weight, bias = torch.randn(7, 8), torch.randn(7)
    fused = lambda x, a, b: low_rank.fused(x, a, b, lambda: weight.to(x), bias.to(x), 0.7)
    plain = lambda x, a, b: low_rank.plain(x, a, b, lambda: weight.to(x), bias.to(x), 0.7)
    yield "low_rank", fused, (x, leaf(3, 8), leaf(7, 3)), plain
    fused = lambda x: low_rank.frozen(x, lambda: weight.to(x), bias.to(x))
    yield "frozen", fused, (x,), lambda x: F.linear(x, weight.to(x), bias.to(x))
    codes, scale = torch.randint(-127, 128, (8, 32), dtype=torch.int8), torch.rand(8)
    yield "int8_linear", int_linear.int8_linear, (torch.randn(3, 32), codes, scale), int_linear.plain
    yield "gram", gram, (torch.randn(20, 6),), plain_gram


def gram(x: Tensor) -> Tensor:
    matrix = x.new_zeros(x.shape[1], x.shape[1], dtype=torch.float32)
    add_gram(matrix, x)
    mirror(matrix)
    return matrix


OWN = {name: (op, inputs, reference) for name, op, inputs, reference in own_operations()}


@pytest.mark.parametrize(
    "name", [name if name == "int8_linear" else pytest.param(name, marks=pytest.mark.slow) for name in OWN]
)
def test_our_own_operations_pass(name, capsys):
    op, inputs, reference = OWN[name]
    if name != "attention":
        quick(op, inputs, reference=reference)
        return
    message = r"attend: NaN: nan as number \d+ of number 1: output 1 has 0"  # torch's kernel hides them
    refuses(message, quick, op, inputs, reference=reference)
    lost = set(re.findall(r"^(\S+) +failed ", capsys.readouterr().out, re.M))
    assert {"NaN"} <= lost <= {"NaN", "values"}  # with AVX-512 it also loses gradients at 7e19


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", OWN)
def test_our_own_operations_run_on_meta_tensors(name, dtype):
    op, inputs, _ = OWN[name]
    convert = lambda x: x.to(dtype) if x.is_floating_point() and name != "int8_linear" else x
    real = [convert(x.detach()) if isinstance(x, Tensor) else x for x in inputs]
    meta = [x.to("meta") if isinstance(x, Tensor) else x for x in real]
    for grad in (False, True):
        leaves = [x.requires_grad_(grad and x.is_floating_point()) if isinstance(x, Tensor) else x for x in meta]
        y = op(*leaves)
        assert (y.shape, y.dtype, y.device.type) == (*(getattr(op(*real), k) for k in ("shape", "dtype")), "meta")
        if y.requires_grad:
            y.sum().backward()


def failed(op, inputs, reference, capsys):
    """The names of the checks that an operation fails."""
    try:
        quick(op, inputs, reference=reference)
    except ValueError:
        return set(re.findall(r"^(.*?) +failed ", capsys.readouterr().out, re.M))
    return set()


@pytest.mark.parametrize("apart", [False, True])
def test_products_of_experts_pass_on_rows_without_gaps(apart, capsys):
    torch.manual_seed(0)
    rows, weight, ends = leaf(9, 8), leaf(3, 16, 8), torch.tensor([4, 4, 9], dtype=torch.int32)

    @torch.autocast("cpu", enabled=False)  # the operators do not know of it
    def by_expert(rows: Tensor, weight: Tensor) -> Tensor:
        return torch.cat([piece @ w.mT for piece, w in zip(rows.tensor_split([4, 4]), weight, strict=True)])

    def grouped(rows: Tensor, weight: Tensor) -> Tensor:
        if apart:
            return experts.products(rows, list(weight.unbind()), ends, False)
        return experts.product(rows, weight, ends)

    # Of more rows than are routed the rest is undefined.
    assert failed(grouped, [rows, weight], by_expert, capsys) == {"not contiguous", "sizes"}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_example_in_cpp_compiles_runs_and_is_right(tmp_path, monkeypatch):
    module = example("cpp", tmp_path, monkeypatch)
    if module.cpp.missing("cpu"):
        pytest.skip(module.cpp.missing("cpu"))
    assert torch.equal(module.squared_relu(torch.tensor([-1.0, 3.0])), torch.tensor([0.0, 9.0]))
    for op, x in ((module.squared_relu, [leaf(9, 5)]), (module.squared_relu_backward, [leaf(9, 5).detach()] * 2)):
        assert set(results(ops.check(op, x, seconds=0)).values()) <= {"ok", "not tried"}


@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_the_example_in_triton_is_right(tmp_path, monkeypatch):
    module = example("triton", tmp_path, monkeypatch)
    ops.check(module.exp, [leaf(33, 70).detach().cuda().requires_grad_()], seconds=0)
