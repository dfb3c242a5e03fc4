"""Rates belong to the optimizer's groups, gradients to the parameters of model and optimizer together."""

import math
from copy import deepcopy

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedulers

from conftest import refuses
from dunes import train
from dunes.train import Trainer
from test_fast import set_all

BATCHES = [torch.randn(6, 4, generator=torch.Generator().manual_seed(i)) for i in range(12)]


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 5, bias=False), nn.Linear(5, 3))


def squared(model, batch):
    return (model(batch) - 1).square().sum(), len(batch)


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def close(a, b):
    return torch.allclose(a, b, atol=1e-6)


OPTIMIZERS = {
    "adamw": lambda model: train.adamw(model, 0.01),
    "sgd": lambda model: torch.optim.SGD(model.parameters(), 0.1, momentum=0.9),
    "tensor": lambda model: torch.optim.AdamW(model.parameters(), torch.tensor(0.01)),
    "muon": train.muon,
}
SCHEDULERS = {
    "linear": lambda o: schedulers.LinearLR(o, 0.1, 1.0, 5),
    "lambda": lambda o: schedulers.LambdaLR(o, lambda step: 1 / (1 + step)),
    "one cycle": lambda o: schedulers.OneCycleLR(o, 0.1, total_steps=12, cycle_momentum=bool(o.defaults)),
    "sequential": lambda o: schedulers.SequentialLR(
        o, [schedulers.LinearLR(o, 0.1, 1.0, 4), schedulers.ExponentialLR(o, 0.5)], [5]
    ),
    "plateau": lambda o: schedulers.ReduceLROnPlateau(o, patience=0, factor=0.5, threshold=0.5),
}


def rates(optimizer):
    return [float(group["lr"]) for group in optimizer.param_groups]


def advance(scheduler, loss):
    scheduler.step(*[loss] * isinstance(scheduler, schedulers.ReduceLROnPlateau))


def plain_loop(model, optimizer, scheduler, scale):
    """The loop of PyTorch's tutorials; `scale` is the factor of each step's rates."""
    seen = []
    for number, batch in enumerate(BATCHES):
        optimizer.zero_grad()
        loss = squared(model, batch)[0] / len(batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        own = [group["lr"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * scale(number)
        optimizer.step()
        for group, lr in zip(optimizer.param_groups, own, strict=True):
            group["lr"] = lr
        advance(scheduler, float(loss.detach()))
        seen.append(rates(optimizer))
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_schedulers_of_pytorch_do_what_they_do_in_a_loop_of_pytorch(optimizer, scheduler):
    scaled = ([*OPTIMIZERS].index(optimizer) + [*SCHEDULERS].index(scheduler)) % 2
    scale = (lambda step: 1.0, lambda step: 1 / (2 + step))[scaled]
    ours, theirs = build(), build()
    mine, other = OPTIMIZERS[optimizer](ours), OPTIMIZERS[optimizer](theirs)
    expected = plain_loop(theirs, other, SCHEDULERS[scheduler](other), scale)
    trainer, seen = Trainer(ours, mine, squared, accumulate=2, lr_scale=scale), []
    each = SCHEDULERS[scheduler](mine)
    for step in trainer.run(half for batch in BATCHES for half in batch.split(3)):
        advance(each, step.loss)
        seen.append(rates(mine))
    assert torch.allclose(torch.tensor(seen), torch.tensor(expected), atol=0.0)
    assert torch.tensor(seen).std(0).min() > 0, "a scheduler that does nothing tests nothing"
    assert torch.allclose(weights(ours), weights(theirs), atol=1e-4 if optimizer == "muon" else 1e-6)


def changed(change, make=OPTIMIZERS["sgd"], steps=6, **options):
    """A model trained with the change after step 3, and its trainer."""
    model = build()
    trainer = Trainer(model, make(model), squared, **options)
    for step in trainer.run(BATCHES[:steps]):
        if step.number == 3:
            change(trainer)
    return model, trainer


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_what_is_set_by_hand_holds_from_the_next_step_on(make):
    stopped, _ = changed(set_all("lr", 0.0), OPTIMIZERS[make])
    three, _ = changed(lambda trainer: None, OPTIMIZERS[make], steps=3)
    assert torch.equal(weights(stopped), weights(three))
    if make != "muon":
        decayed, _ = changed(set_all("weight_decay", 0.5), OPTIMIZERS[make])
        assert not close(weights(decayed), weights(changed(lambda trainer: None, OPTIMIZERS[make])[0]))


@pytest.mark.parametrize("value", [math.nan, -1.0, math.inf, None])
def test_a_rate_that_is_none_is_refused_before_the_next_step(value):
    model = build()
    trainer = Trainer(model, train.sgd(model), squared)
    steps = trainer.run(BATCHES)
    next(steps)
    before = weights(model)
    trainer.optimizer.param_groups[0]["lr"] = value
    refuses(f"learning rates are .{value}.; expected numbers from 0", next, steps)
    assert torch.equal(weights(model), before)


@pytest.mark.parametrize("make", OPTIMIZERS)
@pytest.mark.parametrize("inner", [False, True])
def test_a_group_that_is_added_is_trained(make, inner):
    """Also by an optimizer inside a combined one, and after load_state_dict, which replaces groups."""

    def add(trainer):
        optimizer = trainer.optimizer
        owner = getattr(optimizer, "optimizers", [optimizer])[-1] if inner else optimizer
        owner.load_state_dict(deepcopy(owner.state_dict()))
        owner.add_param_group({"params": [*trainer.model[2].requires_grad_().parameters()], "lr": 0.5})

    def first_layers(model):
        model[2].requires_grad_(False)
        return OPTIMIZERS[make](model[:2])

    model, trainer = changed(add, first_layers, lr_scale=lambda step: 0.5)
    assert rates(trainer.optimizer)[-1] == 0.5
    assert not close(model[2].weight, build()[2].weight)
    refuses("more than one parameter group", trainer.optimizer.add_param_group, {"params": [model[0].weight]})


def test_rates_are_resumed_as_they_were_left():
    _, straight = changed(set_all("lr", 0.01), steps=9, lr_scale=lambda step: 1 / (1 + step))
    _, stopped = changed(set_all("lr", 0.01), steps=5, lr_scale=lambda step: 1 / (1 + step))
    resumed = Trainer(stopped.model, OPTIMIZERS["sgd"](stopped.model), squared, lr_scale=stopped.lr_scale)
    resumed.load_state_dict(stopped.state_dict())
    list(resumed.run(BATCHES[5:9]))
    assert rates(resumed.optimizer) == [0.01]
    assert torch.equal(weights(straight.model), weights(resumed.model))


class Scaled(nn.Module):
    """A model that has the temperature of its loss."""

    def __init__(self):
        super().__init__()
        self.inner, self.temperature = build(), nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        return self.inner(x) * self.temperature


def with_temperature(model, temperature):
    """Trained with its temperature in no module."""
    loss = lambda model, batch: ((model(batch) * temperature - 1).square().sum(), len(batch))
    return Trainer(model, torch.optim.SGD([*model.parameters(), temperature], 0.1), loss, accumulate=2, clip=0.5)


def test_a_parameter_outside_the_model_is_trained_as_one_inside():
    whole, model, temperature = Scaled(), build(), nn.Parameter(torch.tensor(2.0))
    inside = Trainer(whole, torch.optim.SGD(whole.parameters(), 0.1), squared, accumulate=2, clip=0.5)
    outside = with_temperature(model, temperature)
    temperature.grad = torch.tensor(1e9)
    for a, b in zip(inside.run(BATCHES), outside.run(BATCHES), strict=True):
        assert b.grad_norm == pytest.approx(a.grad_norm, rel=1e-5)
    assert temperature.grad is None
    assert temperature.item() == pytest.approx(whole.temperature.item(), abs=1e-6)
    assert close(weights(model), weights(whole.inner))


def test_a_gradient_outside_the_model_that_is_not_finite_skips_the_step():
    model, temperature = build(), nn.Parameter(torch.tensor(2.0))
    temperature.register_hook(lambda grad: grad * math.nan)
    before = weights(model)
    assert all(step.skipped for step in with_temperature(model, temperature).run(BATCHES[:4]))
    assert torch.equal(weights(model), before)


class Contrastive(nn.Module):
    """A loss with a parameter and a buffer of its own."""

    def __init__(self):
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(2.0))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, model, batch):
        self.calls += 1
        return (model(batch) * self.temperature - 1).square().sum() * batch.isfinite().all(), len(batch)


def test_a_parameter_in_no_group_is_named_once_counted_and_cleared():
    model, twin, loss = build(), build(), Contrastive()
    trainer = Trainer(model, train.sgd(model[:2], 0.1), loss, clip=0.5)
    other_temperature = nn.Parameter(torch.tensor(2.0))
    scaled = lambda model, batch: ((model(batch) * other_temperature - 1).square().sum(), len(batch))
    groups = [{"params": [*twin[:2].parameters()]}, {"params": [*twin[2].parameters()], "lr": 0.0}]
    other = Trainer(twin, torch.optim.SGD(groups, 0.1), scaled, clip=0.5)
    other.optimizer.add_param_group({"params": [other_temperature], "lr": 0.0})
    with pytest.warns(UserWarning, match="2.weight, 2.bias, loss.temperature: trainable") as caught:
        norms = [step.grad_norm for step in trainer.run(BATCHES)]
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert norms == pytest.approx([step.grad_norm for step in other.run(BATCHES)], rel=1e-5)
    assert close(weights(model), weights(twin))
    assert all(p.grad is None for p in (*model.parameters(), loss.temperature))


def test_a_skipped_step_restores_the_buffers_of_a_loss():
    model, loss = build(), Contrastive()
    trainer = Trainer(model, torch.optim.SGD([*model.parameters(), *loss.parameters()], 0.1), loss)
    steps = trainer.run([BATCHES[0], BATCHES[1] * math.nan, BATCHES[2]])
    assert [s.skipped for s in steps] == [False, True, False]
    assert loss.calls == 2


def test_a_layer_that_is_unfrozen_later_is_named():
    model = build()
    model[2].requires_grad_(False)
    trainer = Trainer(model, train.adamw(model), squared)
    model[2].weight.grad = torch.full_like(model[2].weight, 1e9)
    steps = trainer.run(BATCHES)
    assert next(steps).grad_norm < 1e3
    assert model[2].weight.grad is None
    model[2].requires_grad_(True)
    with pytest.warns(UserWarning, match=r"2.weight, 2.bias: trainable .* no group .* optimizer.add_param_group"):
        next(steps)


def test_frozen_and_shared_parameters_are_counted_as_pytorch_does():
    def shared():
        model = build()
        return nn.Sequential(model, nn.Linear(3, 4), model)

    ours, theirs = shared(), shared()
    frozen = [next(model[1].parameters()).requires_grad_(False) for model in (ours, theirs)]
    frozen[0].grad = torch.full_like(frozen[0], math.nan)
    [step] = Trainer(ours, torch.optim.SGD(ours.parameters(), 0.1), squared).run(BATCHES[:1])
    (squared(theirs, BATCHES[0])[0] / 6).backward()
    norm = nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
    torch.optim.SGD(theirs.parameters(), 0.1).step()
    assert step.grad_norm == pytest.approx(norm.item(), rel=1e-5)
    assert close(weights(ours), weights(theirs))
