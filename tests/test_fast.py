"""The loop of compiled units: the plain loop's losses, with every optimizer, and one line where it cannot run."""

import math
from copy import deepcopy

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.optim import lr_scheduler as schedulers

from conftest import refuses
from dunes import train
from dunes.data import Rows, drawn_digits
from dunes.models import mnist
from dunes.train import RuleOptimizer, Trainer, cross_entropy, fast, fast_run
from dunes.train.products import SmallProducts

LIMIT = 1e-4
DIGITS = drawn_digits(120)


class Lion(RuleOptimizer):
    """Signs of an average of gradients. https://arxiv.org/abs/2302.06675"""

    def start(self, p):
        return {"average": torch.zeros_like(p)}

    def update(self, p, grad, state, group):
        average = state["average"]
        ahead = group["beta"] * average + (1 - group["beta"]) * grad
        return p - group["lr"] * ahead.sign(), {"average": average.lerp(grad, 0.01)}


OPTIMIZERS = {
    "sgd": lambda model: train.sgd(model, 0.1, decay=0.01),
    "momentum": lambda model: train.sgd(model, 0.05, momentum=0.9),
    "nesterov": lambda model: torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, nesterov=True),
    "rmsprop": lambda model: train.rmsprop(model, 1e-3, momentum=0.5),
    "adamw": lambda model: train.adamw(model, 1e-3),
    "adam": lambda model: torch.optim.Adam(model.parameters(), 1e-3, weight_decay=0.01),
    "lion": lambda model: Lion(model.parameters(), 1e-3, beta=0.9),
}


@pytest.fixture
def no_inductor(monkeypatch):
    """The same graphs without a C++ compiler, and no choice by the clock."""
    compile_ = torch.compile
    without = lambda f, options, **others: compile_(f, backend="aot_eager", **others)
    monkeypatch.setattr(torch, "compile", without)
    monkeypatch.setattr(fast, "TIMED_CALLS", 10**9)
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()


@pytest.fixture
def no_compiler(monkeypatch):
    """The compiled function itself, uncompiled, and no choice by the clock."""
    monkeypatch.setattr(torch, "compile", lambda f, options, **others: f)
    monkeypatch.setattr(fast, "TIMED_CALLS", 10**9)


def build(kind="mlp"):
    torch.manual_seed(0)
    if kind == "mlp":
        return mnist.mlp(12)
    layers = [nn.Conv2d(1, 3, 5, stride=4), nn.BatchNorm2d(3), nn.ReLU(), nn.Dropout(0.2), nn.Flatten()]
    return nn.Sequential(mnist.Normalize(), nn.Unflatten(1, (1, 28)), *layers, nn.Linear(108, 10))


def run(form, steps=40, kind="mlp", optimizer="sgd", loss=cross_entropy, per_call=2, begin=None, **options):
    """`begin(trainer)` is the caller's loop body: a function that gets each step."""
    model = build(kind)
    trainer = Trainer(model, OPTIMIZERS[optimizer](model), loss, **options)
    body = begin(trainer) if begin else lambda step: None
    rows = Rows((DIGITS.images, DIGITS.labels), 20)
    lines = []
    indices = (index for index, _ in zip(rows.indices(), range(steps), strict=False))
    if form == "plain":
        stream = trainer.run(tuple(t[index] for t in rows.tensors) for index in indices)
    else:
        stream = fast_run(trainer, rows.tensors, indices, per_call, lines.append)
    done = []
    for step in stream:
        done.append(step)
        body(step)
    return done, model, trainer, lines


def assert_same(a, b):
    (plain, before, trainer, _), (ours, after, other, _) = a, b
    assert [s.number for s in plain] == [s.number for s in ours]
    assert [(s.count, s.lr_scale, s.skipped) for s in plain] == [(s.count, s.lr_scale, s.skipped) for s in ours]
    for x, y in zip(plain, ours, strict=True):
        assert x.loss == pytest.approx(y.loss, abs=LIMIT, nan_ok=True)
        assert x.grad_norm == pytest.approx(y.grad_norm, abs=LIMIT, rel=LIMIT, nan_ok=True)
        assert x.metrics == pytest.approx(y.metrics, abs=LIMIT, nan_ok=True)
    states = zip(before.state_dict().items(), after.state_dict().values(), strict=True)
    assert all(torch.allclose(t.float(), u.float(), atol=LIMIT) for (_, t), u in states)
    assert trainer.number == other.number
    assert [g["lr"] for g in trainer.optimizer.param_groups] == [g["lr"] for g in other.optimizer.param_groups]


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_unit_is_the_plain_loop(optimizer, no_inductor):
    options = {"optimizer": optimizer, "steps": 14, "clip": 0.5, "lr_scale": lambda step: 1 / (1 + 0.1 * step)}
    ours = run("fast", **options)
    assert ours[3] == [], "neither a fallback nor a choice"
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1, "another rate is no other graph"
    assert_same(run("plain", **options), ours)


def scored(model, batch):
    """NaN for the batch that has a certain row first, a count of 0 for another, and metrics."""
    x, y = batch
    scores = model(x)
    which = x.float().sum((1, 2))[0]
    marked = [DIGITS.images[i].float().sum() for i in range(40)]
    bad = torch.stack([which == m for m in marked]).any()
    total = torch.nn.functional.cross_entropy(scores, y, reduction="sum") * torch.where(bad, math.nan, 1.0)
    return total, torch.tensor(len(y)), {"right": ((scores.argmax(1) == y).sum(), torch.tensor(len(y)))}


@pytest.mark.slow
def test_a_step_that_is_not_finite_changes_nothing(no_inductor):
    options = {"loss": scored, "optimizer": "momentum", "steps": 32}
    ours = run("fast", **options)
    assert 2 < sum(step.skipped for step in ours[0]) < 30
    assert {"right"} == ours[0][-1].metrics.keys()
    assert_same(run("plain", **options), ours)


def test_too_many_of_them_end_the_run(no_inductor):
    nan = lambda model, batch: (model(batch[0]).sum() * math.nan, torch.tensor(1))
    with pytest.raises(train.Diverged, match="in a row, up to step 7"):
        run("fast", loss=nan, patience=7)


BUFFERS = {"kind": "conv", "optimizer": "momentum"}
"""Dropout too; Adam would amplify a gradient that is 0 but for rounding."""


@pytest.mark.parametrize("options", [BUFFERS | {"loss": scored, "steps": 16}, {"steps": 9}], ids=["", "in a unit"])
def test_buffers_also_of_skipped_steps_and_ends_are_those_of_the_plain_loop(options, no_inductor):
    assert_same(run("plain", **options), run("fast", **options))


def with_muon(trainer):
    trainer.__init__(trainer.model, train.muon(trainer.model), cross_entropy)


@pytest.mark.parametrize(
    "change",
    [lambda t: setattr(t, "accumulate", 2), with_muon,
     lambda t: t.optimizer.param_groups[0].update(maximize=True),
     lambda t: setattr(t.model[2], "after_step", lambda: None)],
)  # fmt: skip
def test_the_plain_loop_runs_where_there_is_no_compiled_one(change):
    trainer = Trainer(model := build(), train.sgd(model), cross_entropy)
    change(trainer)
    rows, lines = Rows((DIGITS.images, DIGITS.labels), 20), []
    indices = [index for index, _ in zip(rows.indices(), range(8), strict=False)]
    steps = list(fast_run(trainer, rows.tensors, indices, line=lines.append))
    assert len(steps) == 8 // trainer.accumulate
    assert [line.partition(":")[0] for line in lines] == ["plain loop"]


def test_what_the_compiler_refuses_runs_plainly(no_inductor):
    def loss(model, batch):
        torch._dynamo.graph_break()
        return cross_entropy(model, batch)

    *_, lines = ours = run("fast", loss=loss)
    assert len(lines) == 1
    assert lines[0].startswith("plain loop: torch.compile cannot compile this step: ")
    assert_same(run("plain", loss=loss), ours)


def test_small_products_of_bfloat16_are_done_in_float32():
    def products(x, small, large):
        return torch.addmm(small[0], x, small), x @ small, x @ large

    a = [torch.randn(64, 64), torch.randn(64, 64), torch.randn(64, 4096)]
    args = [t.bfloat16() for t in a]
    graph = make_fx(products, tracing_mode="fake")(*args)
    SmallProducts()(graph.graph)
    graph.recompile()
    convert = torch.ops.prims.convert_element_type.default
    inner = [n.args[-1].target is convert for n in graph.graph.nodes if "mm" in n.name]
    assert inner == [True, True, False], "the large one stays"
    for ours, plain in zip(graph(*args), products(*args), strict=True):
        assert ours.dtype == torch.bfloat16
        assert torch.allclose(ours.float(), plain.float(), rtol=0.01, atol=0.01)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "dtype"), [("mlp", torch.float32), ("conv", torch.float32), ("mlp", torch.bfloat16)]
)
def test_compiled_losses_of_200_steps(kind, dtype, monkeypatch):
    monkeypatch.setattr(fast, "TIMED_CALLS", 10**9)
    torch.compiler.reset()
    steps = 200 if dtype == torch.float32 else 60
    *_, lines = ours = run("fast", steps, kind, dtype=dtype)
    assert lines == []
    plain = run("plain", steps, kind, dtype=dtype)
    if dtype == torch.float32:
        assert_same(plain, ours)
    assert [s.loss for s in ours[0]] == pytest.approx([s.loss for s in plain[0]], rel=0.02, abs=0.02)


def test_parameters_that_the_optimizer_lacks_stay(no_inductor):
    model, lines = build(), []
    first = next(model.parameters()).detach().clone()
    trainer = Trainer(model, train.sgd(model[-1], 0.1), cross_entropy)
    rows = Rows((DIGITS.images, DIGITS.labels), 20)
    indices = [index for index, _ in zip(rows.indices(), range(8), strict=False)]
    with pytest.warns(UserWarning, match="2.weight, 2.bias: trainable"):
        assert len(list(fast_run(trainer, rows.tensors, indices, 2, lines.append))) == 8
    assert lines == []
    assert torch.equal(first, next(model.parameters()))


def after(number, change):
    """A loop body that makes one change."""
    return lambda trainer: lambda step: change(trainer) if step.number == number else None


def scheduled(make):
    def begin(trainer):
        scheduler = make(trainer.optimizer)
        return lambda step: scheduler.step()

    return begin


def set_all(name, value):
    return lambda trainer: [group.update({name: value}) for group in trainer.optimizer.param_groups]


def frozen_from(model):
    model[2].requires_grad_(False)
    return torch.optim.SGD(model.parameters(), 0.1)


def last_only(model):
    model[2].requires_grad_(False)
    return train.sgd(model, 0.1)


MORE = {"all": lambda model: torch.optim.SGD(model.parameters(), 0.1), "frozen": frozen_from, "last": last_only}
unfreeze = lambda trainer: trainer.model[2].requires_grad_()
reload = lambda trainer: trainer.optimizer.load_state_dict(deepcopy(trainer.optimizer.state_dict()))
CHANGES = {  # the optimizer, the loop body, and what the plain loop runs for
    "a rate": ("momentum", after(6, set_all("lr", 0.0)), ""),
    "a rate in the first steps": ("adamw", after(3, set_all("lr", 0.1)), ""),
    "a rate of each step": ("sgd", lambda t: lambda step: set_all("lr", 0.1 / step.number)(t), ""),
    "step": ("momentum", scheduled(lambda o: schedulers.StepLR(o, 5, 0.1)), ""),
    "one cycle": (
        "momentum",
        scheduled(lambda o: schedulers.OneCycleLR(o, 0.1, total_steps=20)),
        "momentum of group",
    ),
    "decay": ("sgd", after(8, set_all("weight_decay", 0.5)), "weight_decay of group 0"),
    "betas": ("adam", after(6, set_all("betas", (0.5, 0.9))), "betas of group 0"),
    "freezing": ("all", after(6, lambda t: t.model[2].requires_grad_(False)), "requires_grad of 2.weight"),
    "thawing": ("frozen", after(6, unfreeze), "requires_grad of 2.weight"),
    "a group": (
        "last",
        after(6, lambda t: t.optimizer.add_param_group({"params": [*unfreeze(t).parameters()]})),
        "requires_grad of 2.weight",
    ),
    "a state": ("momentum", after(6, reload), "state of 2.weight"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_the_loop_body_changes_holds_as_in_the_plain_loop(name, no_compiler, monkeypatch):
    monkeypatch.setattr(f"{__name__}.OPTIMIZERS", OPTIMIZERS | MORE)
    optimizer, begin, reason = CHANGES[name]
    options = {"steps": 14, "optimizer": optimizer, "begin": begin, "lr_scale": lambda step: 1 / (1 + 0.1 * step)}
    ours = run("fast", **options)
    assert [line[: len("plain loop: ") + len(reason)] for line in ours[3]] == [f"plain loop: {reason}"] * bool(
        reason
    )
    assert_same(run("plain", **options), ours)
    still = run("plain", **{**options, "begin": None})[1]
    weights = [torch.cat([p.detach().flatten() for p in model.parameters()]) for model in (ours[1], still)]
    without_effect = torch.allclose(*weights, atol=LIMIT)
    assert name == "a state" or not without_effect, "a change that does nothing tests nothing"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (set_all("lr", 0.0), "lr of group 0"),
        (set_all("weight_decay", 0.5), "weight_decay of group 0"),
        (lambda t: t.model[2].requires_grad_(False), "requires_grad of 2.weight"),
    ],
)
def test_a_change_that_comes_after_the_steps_it_is_for_is_refused_by_name(change, words, no_compiler):
    words += " changed before step 8, which one call computed with steps 5 to 7"
    refuses(words, run, "fast", begin=after(6, change), per_call=4)
    refuses(r"tensors of \[2, 3\] rows", lambda: [*fast_run(None, [torch.zeros(3), torch.zeros(2)], [])])
    options = {"begin": after(6, change), "steps": 10}
    assert_same(run("plain", **options), run("fast", per_call=1, **options))


class Tempered(nn.Module):
    """A loss with a parameter of its own."""

    def __init__(self):
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(2.0))

    def forward(self, model, batch):
        x, y = batch
        return nn.functional.cross_entropy(model(x) * self.temperature, y, reduction="sum"), torch.tensor(len(y))


@pytest.mark.parametrize(("module", "form"), [(True, "no_compiler"), (False, "no_inductor")])
def test_a_parameter_outside_the_model_is_trained_in_a_unit(module, form, monkeypatch, request):
    request.getfixturevalue(form)
    ends = []
    for form in ("plain", "fast"):
        own = Tempered()
        optimizer = lambda model, p=own.temperature: torch.optim.SGD([*model.parameters(), p], 0.1)
        monkeypatch.setitem(OPTIMIZERS, "tempered", optimizer)
        loss = own if module else lambda model, batch, own=own: own(model, batch)
        ends.append((run(form, 10, optimizer="tempered", loss=loss, clip=0.5), own.temperature.item()))
    (plain, expected), (ours, temperature) = ends
    assert ours[3] == []
    assert_same(plain, ours)
    assert temperature == pytest.approx(expected, abs=LIMIT) != 2.0
