"""Every fast form against its plain twin: values and gradients."""

import math
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from dunes.ops import cross_entropy, float32_products, gated, int_linear, low_rank, rms_norm, rotary, row_products
from dunes.ops import scaled_dot_product as attention
from dunes.ops.float32_products import Float32Products, add_gram, mirror, plain_gram


def close(got, want, limit=2e-6):
    assert got.shape == want.shape
    if not want.numel():
        return
    scale = max(1.0, float(want.detach().abs().max()))
    assert float((got - want).detach().abs().max()) <= limit * scale


def both(fused, plain, inputs, *rest):
    """Values and gradients of two forms for the same upstream gradient."""
    results = []
    for form in (fused, plain):
        leaves = [x.detach().clone().requires_grad_() for x in inputs]
        y = form(*leaves, *rest)
        weight = torch.linspace(-1, 2, y.numel()).view(y.shape)
        results.append([y, *torch.autograd.grad((y * weight).sum(), leaves)])
    for got, want in zip(*results, strict=True):
        close(got, want)
    with torch.no_grad():  # inference may have a form of its own
        close(fused(*inputs, *rest), results[1][0])


@pytest.mark.parametrize("mask", ["causal", "window", "batched"])
@pytest.mark.parametrize(("heads", "kv"), [(4, 4), (6, 2), (5, 1)])
def test_attention(mask, heads, kv):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, h, 9, 8) for h in (heads, kv, kv))
    allowed = torch.ones(9, 9, dtype=torch.bool).tril()
    given = {"causal": None, "window": allowed.triu(-3), "batched": torch.stack([allowed, allowed.triu(-2)])}[mask]
    both(attention.fused, attention.plain, [q, k, v], given)


@pytest.mark.parametrize("keys", [9, 5, 12])
def test_attention_to_earlier_keys_in_blocks_of_queries(keys, monkeypatch):
    monkeypatch.setattr(attention, "PLAIN_BLOCK", 4)
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 6, 9, 8), torch.randn(2, 2, keys, 8), torch.randn(2, 2, keys, 8)
    with FlopCounterMode(display=False) as counter:
        both(attention.fused, attention.plain, [q, k, v])
    blocks = [(4, 4), (4, min(8, keys)), (1, min(12, keys))]
    pairs = sum(queries * min(seen, keys) for queries, seen in blocks)
    assert counter.get_total_flops() == 3 * 4 * 2 * 6 * 8 * pairs  # forward, and twice as much backward


@pytest.mark.parametrize("window", [None, 1, 3, 70])
@pytest.mark.parametrize("queries", [1, 4, 23, 40])
def test_attention_of_the_last_queries(queries, window, monkeypatch):
    monkeypatch.setattr(attention, "CAUSAL_BLOCK", 10)
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 6, queries, 8), torch.randn(2, 2, 40, 8), torch.randn(2, 2, 40, 8)
    allowed = torch.ones(40, 40, dtype=torch.bool).tril()
    allowed = allowed if window is None else allowed.triu(1 - window)
    close(attention.causal_attention(q, k, v, window), attention.plain(q, k, v, allowed[-queries:]))


def test_bfloat16_products_in_float32_are_rounded_once(monkeypatch):
    monkeypatch.setattr(float32_products, "MIN_TOKENS", 5)
    torch.manual_seed(0)
    x, weight, bias = (torch.randn(s).bfloat16() for s in ((2, 3, 64), (7, 64), (7,)))
    q, k, v = (torch.randn(1, 2, 9, 64).bfloat16() for _ in "qkv")
    linear, attend, mask = F.linear, F.scaled_dot_product_attention, torch.zeros(9, 9).bfloat16()
    with Float32Products():
        got, few, attended = linear(x, weight, bias), linear(x[:1], weight), attend(q, k, v, is_causal=True)
        assert linear(x.float(), weight.float()).dtype == torch.float32
        named = linear(input=x, weight=weight, bias=bias)
        masked = attend(query=q, key=k, value=v, attn_mask=mask)
    assert torch.equal(got, linear(x.float(), weight.float(), bias.float()).bfloat16())
    assert torch.equal(named, got)
    assert torch.equal(attended, attend(q.float(), k.float(), v.float(), is_causal=True).bfloat16())
    assert torch.equal(masked, attend(q.float(), k.float(), v.float()).bfloat16())
    assert torch.equal(few, linear(x[:1], weight)), "converting weights does not pay for few tokens"


@pytest.fixture(scope="module", params=["plain", pytest.param("kernel", marks=pytest.mark.slow)])
def products(request, tmp_path_factory):
    """A form of `row_products`; once the kernel is loaded, it stays loaded."""
    if request.param == "plain":
        return row_products.plain
    path = tmp_path_factory.mktemp("library") / "row_products.so"
    row_products.compile_library(path)
    row_products.load_library(path)
    return torch.ops.dunes.row_products


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("outputs", [1, 3, 4, 21, 130])
@pytest.mark.parametrize("inputs", [1, 15, 64, 389])
def test_products_of_a_few_rows(products, dtype, outputs, inputs):
    torch.manual_seed(0)
    weight, rows = torch.randn(outputs, inputs).to(dtype), torch.randn(17, inputs)
    every = products(rows, weight)
    close(every.double(), rows.double() @ weight.double().T)
    for n in range(1, 18):
        for x, want in ((rows[:n], every[:n]), (rows[-n:], every[-n:]), (rows.T.contiguous().T[:n], every[:n])):
            y = products(x, weight)
            close(y, want)
            assert products is row_products.plain or torch.equal(y, want), "a row depends on other rows"


@pytest.mark.slow
@pytest.mark.parametrize("products", ["kernel"], indirect=True)
def test_products_of_a_few_rows_by_several_threads(products):
    torch.manual_seed(0)
    x, weight, threads = torch.randn(5, 700), torch.randn(1001, 700).bfloat16(), torch.get_num_threads()
    try:
        results = [torch.set_num_threads(n) or products(x, weight) for n in (1, 2, 3)]
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(y, results[0]) for y in results)


def test_products_of_a_few_rows_as_an_operator(products):
    x, weight, bias = torch.randn(2, 3, 6), torch.randn(4, 6).bfloat16(), torch.randn(4)
    torch.library.opcheck(torch.ops.dunes.row_products.default, (x[0], weight))
    close(row_products.linear(x, weight, bias), F.linear(x, weight.float(), bias))
    empty = products(x[0, :0], weight), products(x[0], weight[:0]), products(x[0, :, :0], weight[:, :0])
    assert [y.tolist() for y in empty] == [[], [[]] * 3, [[0.0] * 4] * 3]


def test_products_of_a_few_rows_refuse_other_shapes_and_dtypes(products):
    x, weight = torch.randn(2, 6), torch.randn(3, 6)
    for wrong in ((x, weight[:, :5]), (x.bfloat16(), weight), (x[0, :5], weight), (x, weight[0, :5])):
        with pytest.raises(RuntimeError):
            products(*wrong)


def test_the_kernel_of_row_products_is_loaded_once_or_refused(monkeypatch, tmp_path):
    loaded = []
    has_kernel = lambda *names: bool(loaded) or time.sleep(0.02)
    monkeypatch.setattr(torch._C, "_dispatch_has_kernel_for_dispatch_key", has_kernel)
    monkeypatch.setattr("torch._inductor.cpp_builder.get_cpp_compiler", lambda: "true")  # writes no library
    with pytest.raises(ValueError, match="cannot be loaded"):
        row_products.compile_library(tmp_path / "library.so")
    monkeypatch.setattr(torch.ops, "load_library", loaded.append)
    with ThreadPoolExecutor(3) as threads:
        list(threads.map(row_products.load_library, [row_products.SOURCE] * 3))
    assert (len(loaded), [*tmp_path.iterdir()]) == (1, [])


@pytest.mark.parametrize("facts", [{}, {"vendor_id": "GenuineIntel"}, {"vendor_id": "AuthenticAMD"}])
def test_float32_products_by_onednn_are_not_rounded_to_bfloat16(monkeypatch, facts):
    """Whatever the processor says of itself: with AMX, oneDNN rounds, and the context must then do nothing."""
    monkeypatch.setattr(float32_products.measure, "processor", lambda: facts and facts | {"flags": "fma avx512f"})
    monkeypatch.setattr(float32_products, "_onednn_is_faster", float32_products._onednn_is_faster.__wrapped__)
    setting, x = torch.backends.mkldnn.matmul, torch.full((64, 64), 1 + 2**-12)
    for dtype in (torch.float32, torch.bfloat16):
        with float32_products.fast_products(dtype, x.device):
            close(x @ x, (x.double() @ x.double()).float(), 1e-6)
            assert setting.fp32_precision == "none" or (facts.get("vendor_id"), dtype) == ("AuthenticAMD", x.dtype)
        assert setting.fp32_precision == "none"


def test_products_by_onednn_leave_torchs_settings_and_follow_none(monkeypatch):
    """Autocast around the first step must not decide, a general setting must still apply afterwards, and Inductor
    must be able to read the precision of a GPU's products."""
    facts = {"vendor_id": "AuthenticAMD", "flags": "fma avx512f"}
    monkeypatch.setattr(float32_products.measure, "processor", lambda: facts)
    check, backends = float32_products._onednn_is_faster.__wrapped__, torch.backends
    with torch.autocast("cpu", torch.bfloat16), torch.device("meta"):
        assert check() == (not torch.cpu._is_amx_tile_supported())
    monkeypatch.setattr(float32_products, "_onednn_is_faster", lambda: True)
    with float32_products.fast_products(torch.float32, torch.device("cuda")):
        assert torch.get_float32_matmul_precision() == "highest"
    one, other = (float32_products.fast_products(torch.float32, torch.device("cpu")) for _ in range(2))
    one.__enter__()  # as in two threads
    other.__enter__()
    one.__exit__(None, None, None)
    other.__exit__(None, None, None)
    assert backends.mkldnn.matmul.fp32_precision == "none"
    try:
        for general in ("tf32", "ieee", "bf16"):
            backends.fp32_precision = general
            for _ in range(2):
                with float32_products.fast_products(torch.float32, torch.device("cpu")):
                    assert backends.mkldnn.matmul.fp32_precision == "bf16"
                assert backends.mkldnn.matmul.fp32_precision == general
        backends.mkldnn.matmul.fp32_precision = "tf32"
        with float32_products.fast_products(torch.float32, torch.device("cpu")):
            pass
        assert backends.mkldnn.matmul.fp32_precision == "tf32"
    finally:
        backends.mkldnn.matmul.fp32_precision = backends.fp32_precision = "none"


@pytest.mark.parametrize("instructions", [True, False])
def test_the_choice_of_products_follows_from_the_processor_or_the_record(monkeypatch, instructions):
    """Results depend on it: a change that went on after a kill ended in other bytes once in some 16 times."""
    monkeypatch.setattr(
        float32_products.measure, "choose_dtype", lambda device: torch.bfloat16 if instructions else torch.float32
    )
    assert float32_products.float32_is_faster() is (not instructions)
    try:
        for recorded in (True, False):
            float32_products.repeat_choice(recorded)
            assert float32_products.float32_is_faster() is recorded
    finally:
        float32_products.repeat_choice(None)


@pytest.mark.parametrize("window", [None, 2, 3, 70])
@pytest.mark.parametrize(("heads", "kv"), [(4, 4), (6, 2), (5, 1)])
def test_attention_within_documents(window, heads, kv):
    torch.manual_seed(0)
    lengths = [70, 1, 5, 150, 30, 600, 40]
    q, k, v = (torch.randn(1, h, sum(lengths), 8) for h in (heads, kv, kv))
    document_starts = torch.tensor([sum(lengths[:i]) for i, n in enumerate(lengths) for _ in range(n)])
    place = torch.arange(len(document_starts))
    seen = (place <= place[:, None]) & (place >= document_starts[:, None])
    if window is not None:
        seen &= place > place[:, None] - window
    groups = attention.query_blocks(document_starts, q.dtype, window)
    varlen = lambda q, k, v: attention.varlen_attention(q, k, v, groups)
    pair = lambda q, k, v: attention.pair_attention(q, k, v, (document_starts == place)[None])
    both(pair if window == 2 else varlen, lambda q, k, v: attention.plain(q, k, v, seen), [q, k, v])


@pytest.mark.parametrize("bias", [None, torch.randn(7)])
@pytest.mark.parametrize("shape", [(2, 5, 6), (4, 6), (0, 6)])
def test_a_low_rank_change(shape, bias):
    torch.manual_seed(0)
    weight, inputs = torch.randn(7, 6), [torch.randn(shape), torch.randn(3, 6), torch.randn(7, 3)]
    both(low_rank.fused, low_rank.plain, inputs, lambda: weight, bias, 0.7)
    alone = lambda x: low_rank.frozen(x, lambda: weight, bias)
    both(alone, lambda x: torch.nn.functional.linear(x, weight, bias), inputs[:1])


def test_a_low_rank_change_of_what_needs_no_gradient_and_in_bfloat16():
    torch.manual_seed(0)
    weight, x, a, b = torch.randn(7, 6), torch.randn(4, 6), torch.randn(3, 6), torch.randn(7, 3)
    a.requires_grad_()
    low_rank.fused(x, a, b.requires_grad_(), lambda: weight, None, 0.7).sum().backward()
    exact = a.grad
    a.grad = None
    with torch.autocast("cpu", torch.bfloat16):
        y = low_rank.fused(x, a, b, lambda: weight, None, 0.7)
    y.sum().backward()
    assert y.dtype == torch.bfloat16
    assert a.grad.dtype == torch.float32
    close(a.grad, exact, 0.02)


ANGLE = torch.randn(2, 1, 5, 4, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("form", "shapes", "rest"),
    [
        (gated, [(5, 9), (5, 9)], ()),
        (rotary, [(2, 3, 5, 8)], (ANGLE.cos(), ANGLE.sin())),
        (rms_norm, [(3, 5, 16), (16,)], (1e-5,)),
        (rms_norm, [(1, 16), (16,)], (1e-5,)),
    ],
)
def test_gated_rotary_and_rms_norm(form, shapes, rest):
    torch.manual_seed(0)
    first, *others = (torch.randn(shape) for shape in shapes)
    both(form.fused, form.plain, [first * 3, *others], *rest)


def test_attention_drops_weights_only_when_told():
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 6, 4) for _ in "qkv")
    ones = torch.ones_like(v)
    close(attention.plain(q, k, ones, None, 0.0), ones)
    for form in (attention.plain, attention.fused):
        assert not torch.allclose(form(q, k, ones, None, 0.5), ones)


@pytest.mark.parametrize("ignored", [False, True])
@pytest.mark.parametrize("chunk", [7 * 50, 1 << 20])
def test_cross_entropy(ignored, chunk, monkeypatch):
    for sizes in (cross_entropy.CHUNK, cross_entropy.SLICE):
        monkeypatch.setitem(sizes, "cpu", chunk)
    torch.manual_seed(0)
    x, weight, targets = torch.randn(33, 16), torch.randn(50, 16), torch.randint(50, (33,))
    if ignored:
        targets[::3] = cross_entropy.IGNORE
    both(cross_entropy.fused, cross_entropy.plain, [x, weight], targets)


@pytest.mark.parametrize("chunk", [2 * 50, 1 << 20])
@pytest.mark.parametrize("wrong", [math.inf, -math.inf, math.nan, 1e38])
@pytest.mark.parametrize("form", [cross_entropy.fused, cross_entropy.plain])
def test_cross_entropy_never_looks_at_an_ignored_state(form, wrong, chunk, monkeypatch):
    monkeypatch.setitem(cross_entropy.CHUNK, "cpu", chunk)
    torch.manual_seed(0)
    x, weight, targets = torch.randn(7, 2), torch.randn(50, 2, requires_grad=True), torch.randint(50, (7,))
    asked = torch.tensor([True, False, True, True, False, True, True])
    targets[~asked] = cross_entropy.IGNORE
    x[~asked] = wrong
    x.requires_grad_()
    loss = form(x, weight, targets)
    want = cross_entropy.plain(x[asked], weight, targets[asked])
    close(loss, want)
    for got, alone in zip(*(torch.autograd.grad(of, (x, weight)) for of in (loss, want)), strict=True):
        close(got, alone)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        assert torch.isfinite(form(x, weight, targets))


def test_cross_entropy_of_a_frozen_head_or_of_frozen_states():
    torch.manual_seed(0)
    x, weight, targets = torch.randn(33, 16), torch.randn(50, 16), torch.randint(50, (33,))
    both(lambda x: cross_entropy.fused(x, weight, targets), lambda x: cross_entropy.plain(x, weight, targets), [x])
    both(lambda w: cross_entropy.fused(x, w, targets), lambda w: cross_entropy.plain(x, w, targets), [weight])


@pytest.mark.parametrize(("grad", "products"), [((True, True), 3), ((True, False), 2), ((False, False), 1)])
def test_cross_entropy_computes_no_gradient_that_nobody_asked_for(grad, products):
    x, weight = (torch.randn(n, 8).requires_grad_(g) for n, g in zip((6, 10), grad, strict=True))
    targets = torch.arange(6)
    for enabled, count in ((True, products), (False, 1)):
        with FlopCounterMode(display=False) as counter, torch.set_grad_enabled(enabled):
            cross_entropy.fused(x, weight, targets)
        assert counter.get_total_flops() == count * 2 * 6 * 10 * 8


def test_cross_entropy_where_nothing_is_asked_is_zero_and_finite_only_where_it_is():
    targets = torch.full((4,), cross_entropy.IGNORE)
    x = torch.randn(4, 3, requires_grad=True)
    loss = cross_entropy.fused(x, torch.randn(5, 3), targets)
    loss.backward()
    assert float(loss.detach()) == 0.0
    assert not x.grad.any()
    hopeless = torch.tensor([[500.0], [0.0]])
    assert float(cross_entropy.fused(torch.ones(1, 1), hopeless, torch.tensor([1]))) == 500.0
    for wrong in (math.inf, math.nan):
        asked = torch.randn(3, 4).index_fill(0, torch.tensor(1), wrong)
        assert not torch.isfinite(cross_entropy.fused(asked, torch.randn(5, 4), torch.tensor([1, 2, 3])))


def test_rms_norm_is_reduced_in_float32():
    x = torch.full((1, 1000), 300.0, dtype=torch.float16)  # the squares overflow float16
    assert torch.allclose(rms_norm.fused(x, torch.ones(1000), 1e-6).float(), torch.ones(1000), atol=1e-3)


@pytest.mark.parametrize("sides", [(5, 51), (64, 96), (1, 7), (33, 256)])
@pytest.mark.parametrize("rows", [(1,), (1, 4), (2, 3), (0, 4)])
def test_int8_products_are_those_of_the_scaled_codes(sides, rows):
    draw = torch.Generator().manual_seed(0)
    codes = torch.randint(-127, 128, sides, generator=draw).to(torch.int8)
    scale, x = torch.rand(sides[0], generator=draw), torch.randn(*rows, sides[1], generator=draw)
    want = F.linear(x.double(), codes.double() * scale.double()[:, None])
    close(int_linear.int8_linear(x, codes, scale), want.float())
    half = x.bfloat16()
    for form in (int_linear.plain, int_linear.int8_linear):
        got, exact = form(half, codes, scale), F.linear(half.double(), codes.double() * scale.double()[:, None])
        assert got.dtype == torch.bfloat16
        close(got.double(), exact, 2**-7)


@pytest.mark.parametrize("size", [5, 300, 700])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grams_by_panels_are_those_of_plain_products(dtype, size, monkeypatch):
    setting = torch.backends.mkldnn.matmul
    monkeypatch.setattr("dunes.ops.float32_products.float32_is_faster", lambda: False)
    parts = torch.randn(2, 500, size, generator=torch.Generator().manual_seed(0)).to(dtype)
    exact = sum(x.double().T @ x.double() for x in parts)
    before, matrix = setting.fp32_precision, torch.zeros(size, size)
    for x in parts:
        add_gram(matrix, x)
    mirror(matrix)
    assert setting.fp32_precision == before
    plain = sum(map(plain_gram, parts))
    assert matrix.dtype == plain.dtype == torch.float32
    assert torch.equal(matrix, matrix.T)
    assert (plain - exact).norm() < 2e-6 * exact.norm()
    assert (matrix - exact).norm() < 2e-6 * exact.norm()  # bfloat16 inputs rounded once more: 2e-3


def misaligned(values):
    """The same values, from one number behind an address that vectors can be read from."""
    buffer = torch.zeros(values.numel() + 128, dtype=values.dtype)
    first = -buffer.data_ptr() % 64 // values.element_size() + 1
    return buffer[first : first + values.numel()].view_as(values).copy_(values)


def test_torchs_packed_int8_product_reads_nothing_misaligned(monkeypatch):
    monkeypatch.setattr(int_linear, "packed", lambda *arguments: pytest.fail("this can end the process"))
    codes, x, scale = torch.ones(65, 64, dtype=torch.int8), torch.ones(2, 64).bfloat16(), torch.ones(65)
    wide = torch.ones(2, 128).bfloat16()
    for rows, matrix in ((misaligned(x), codes), (x, misaligned(codes)), (wide[:, ::2], codes), (x[:0], codes)):
        assert torch.equal(int_linear.int8_linear(rows, matrix, scale), int_linear.plain(rows, matrix, scale))
