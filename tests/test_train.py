"""The step loop: exact accumulation, skipped steps, keyed randomness, any module, any optimizer."""

import math
from copy import deepcopy
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from conftest import refuses
from dunes import checkpoint, train
from dunes.augment import attach
from dunes.data import Windows
from dunes.models import FAMILIES
from dunes.train import Clock, Diverged, Record, Schedule, Trainer, next_token
from dunes.train import trainer as trainer_module
from dunes.train.loss import IGNORE
from dunes.train.optim import Muon
from own_parts import Wrapped

VOCAB = 23


class Tiny(nn.Module):
    """A hand-written language model with dropout and a buffer that forward changes."""

    def __init__(self, dropout=0.2):
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, 16), nn.Linear(16, VOCAB)
        self.mix, self.dropout, self.norm = nn.Linear(16, 16), nn.Dropout(dropout), nn.BatchNorm1d(16)

    def forward(self, ids):
        x = self.dropout(self.mix(self.embed(ids)).relu())
        return self.head(self.norm(x.transpose(1, 2)).transpose(1, 2))


def build(seed=0, **changes):
    torch.manual_seed(seed)
    return Tiny(**changes)


def batch(number, rows=4):
    return torch.randint(VOCAB, (rows, 9), generator=torch.Generator().manual_seed(number))


TEXT = torch.randint(VOCAB, (150,), generator=torch.Generator().manual_seed(9)).numpy()


def batches(start=0):
    """Windows over a text so short that a few steps are an epoch."""
    return Windows(TEXT, length=8, batch_size=4).batches(start)


def run(trainer, steps, stream=None):
    return [step for _, step in zip(range(steps), trainer.run(stream or batches(trainer.consumed)), strict=False)]


def one_step(model, optimizer, loss, stream, **settings):
    [step] = run(Trainer(model, optimizer, loss, **settings), 1, iter(stream))
    return step


def weights(model):
    return torch.cat([t.detach().flatten().double() for t in model.state_dict().values()])


OPTIMIZERS = {
    "adamw": lambda m: train.adamw(m, 1e-2),
    "muon": lambda m: train.muon(m, 1e-2),
    "sgd": lambda m: train.sgd(m, 0.1, momentum=0.9),
    "rmsprop": lambda m: train.rmsprop(m, 1e-3),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_learns(name):
    model = build(dropout=0.0)
    losses = [s.loss for s in run(Trainer(model, OPTIMIZERS[name](model), next_token), 60, iter([batch(0)] * 60))]
    assert losses[-1] < losses[0] - 0.5


def masked(number):
    """Targets asked in very unequal numbers from row to row; one row has none."""
    ids = batch(number, 8)
    targets = ids[:, 1:].clone()
    for row, asked in enumerate((1, 2, 8, 0, 8, 8, 3, 8)):
        targets[row, asked:] = IGNORE
    return ids[:, :-1], targets


def plain(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Embedding(VOCAB, 16), nn.Linear(16, VOCAB))


def test_accumulation_equals_the_large_batch_also_with_masked_targets():
    whole, parts = plain(), plain()
    ids, targets = masked(0)
    big = one_step(whole, train.sgd(whole, 0.5), next_token, [(ids, targets)])
    pieces = [(ids[i : i + 2], targets[i : i + 2]) for i in range(0, 8, 2)]
    small = one_step(parts, train.sgd(parts, 0.5), next_token, pieces, accumulate=4)
    assert small.count == big.count == 38
    assert small.loss == pytest.approx(big.loss, rel=1e-6)
    assert small.grad_norm == pytest.approx(big.grad_norm, rel=1e-5)
    assert (weights(whole) - weights(parts)).abs().max() < 1e-7


def test_the_gradient_is_that_of_the_mean_over_counted_targets():
    model, twin = plain(), plain()
    ids, targets = masked(1)
    loss = nn.functional.cross_entropy(twin(ids).flatten(0, 1), targets.flatten(), ignore_index=IGNORE)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(twin.parameters(), 0.05)
    torch.optim.SGD(twin.parameters(), 0.5).step()
    step = one_step(model, train.sgd(model, 0.5), next_token, [(ids, targets)], clip=0.05)
    assert step.grad_norm == pytest.approx(float(norm), rel=1e-5)
    assert step.loss == pytest.approx(float(loss.detach()), rel=1e-6)
    assert (weights(model) - weights(twin)).abs().max() < 1e-7


def test_a_gradient_below_the_limit_stays_as_it_is():
    models = plain(), plain()
    for model, limit in zip(models, (1e3, None), strict=True):
        one_step(model, train.sgd(model, 0.5), next_token, [masked(1)], clip=limit)
    assert torch.equal(*map(weights, models))


def measured(model, pair):
    """With the accuracy as a metric, and counts and losses by row."""
    total, count = next_token(model, pair)
    logits, targets = model(pair[0]).detach(), pair[1]
    right = ((logits.argmax(-1) == targets).sum(), count)
    losses = nn.functional.cross_entropy(logits.mT, targets, ignore_index=IGNORE, reduction="none")
    rows = (losses.sum(1), (targets != IGNORE).sum(1))
    return total, count, {"accuracy": right, "rows": rows, "pairs": (torch.ones(2, 3), torch.tensor(2))}


def test_metrics_are_means_over_all_micro_batches():
    model, twin = plain(), plain()
    ids, targets = masked(0)
    pieces = [(ids[i::2], targets[i::2]) for i in range(2)]
    [step] = run(Trainer(model, train.sgd(model, 0.5), measured, accumulate=2), 1, iter(pieces))
    [without] = run(Trainer(twin, train.sgd(twin, 0.5), next_token, accumulate=2), 1, iter(pieces))
    assert (step.loss, step.count, step.grad_norm) == (without.loss, without.count, without.grad_norm)
    assert without.metrics == {}
    with torch.no_grad():
        logits = plain()(ids)
    asked = targets != IGNORE
    right = float((logits.argmax(-1) == targets)[asked].double().mean())
    losses = nn.functional.cross_entropy(logits.mT, targets, ignore_index=IGNORE, reduction="none")
    rows = losses.view(4, 2, 8).sum((1, 2)) / asked.view(4, 2, 8).sum((1, 2))
    assert step.metrics["accuracy"] == pytest.approx(right, rel=1e-6)
    assert step.metrics["rows"] == pytest.approx(rows.tolist(), rel=1e-6)
    assert step.metrics["pairs"] == [[0.5] * 3] * 2


class Masked(nn.Linear):
    """A user's own pruned layer: its first column stays 0."""

    calls = 0

    def after_step(self):
        self.calls += 1
        self.weight[:, 0] = 0


def test_what_must_hold_after_a_step_holds_and_a_skipped_step_calls_nothing():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(VOCAB, 16), Masked(16, VOCAB))
    model[1].weight.data[:, 0] = 0
    bad = batch(99)
    loss = lambda m, b: (next_token(m, b)[0] * (math.nan if b is bad else 1.0), next_token(m, b)[1])
    calls = []
    for step in Trainer(model, train.adamw(model, 0.1), loss).run([batch(0), batch(1), bad, batch(2)]):
        calls.append((step.skipped, model[1].calls))
        assert model[1].weight.requires_grad
        assert not model[1].weight[:, 0].any()
    assert calls == [(False, 1), (False, 2), (True, 2), (False, 3)]
    assert model[1].weight[:, 1].abs().max() > 0.2


def test_a_stream_that_ends_inside_an_accumulation_drops_that_part():
    """The mode of the model is set for a step and put back."""
    model = plain().eval()
    trainer = Trainer(model, train.sgd(model), next_token, accumulate=3)
    assert [step.number for step in trainer.run(batch(i) for i in range(8))] == [1, 2]
    assert trainer.consumed == 6
    assert all(p.grad is None for p in model.parameters())
    assert not model.training


def test_what_the_caller_draws_changes_nothing_and_nothing_is_drawn_from_the_caller():
    quiet, noisy = build(), build()
    run(Trainer(quiet, train.adamw(quiet), next_token, seed=5), 6)
    torch.manual_seed(1)
    want = torch.rand(3)
    torch.manual_seed(1)
    for i, _ in enumerate(Trainer(noisy, train.adamw(noisy), next_token, seed=5).run(batches())):
        if i == 0:
            assert torch.equal(torch.rand(3), want)
        if i == 5:
            break
    assert torch.equal(weights(quiet), weights(noisy))
    other = build()
    run(Trainer(other, train.adamw(other), next_token, seed=6), 6)
    assert not torch.equal(weights(quiet), weights(other)), "another seed drops others"


@pytest.mark.parametrize("where", ["loss", "gradient", "inf"])
def test_a_step_that_is_not_finite_changes_nothing_and_costs_only_itself(where):
    def loss(model, ids):
        total, count = next_token(model, ids)
        if trainer.number == 3 and where != "gradient":
            total = total * float("nan" if where == "loss" else "inf")
        if trainer.number == 3 and where == "gradient":
            model.head.bias.register_hook(lambda g: g * float("nan"))
        return total, count

    model = build()
    trainer = Trainer(model, train.adamw(model, 1e-2), loss)
    run(trainer, 3)
    before, state = weights(model), trainer.optimizer.state_dict()["state"][0]["exp_avg"].clone()
    [step] = run(trainer, 1)
    assert step.skipped
    assert math.isnan(step.loss) == (where == "loss")
    assert torch.equal(weights(model), before), "weights and buffers"
    assert torch.equal(trainer.optimizer.state_dict()["state"][0]["exp_avg"], state)
    if where != "gradient":  # the hook stays
        [after] = run(trainer, 1)
        assert not after.skipped
        assert not torch.equal(weights(model), before)


def test_ten_in_a_row_end_the_run_with_the_last_good_weights():
    model = build()
    loss = lambda m, b: (next_token(m, b)[0] * float("nan"), torch.tensor(1))
    trainer = Trainer(model, train.adamw(model), loss)
    before, steps = weights(model), []
    with pytest.raises(Diverged, match="not finite for 10 steps in a row, up to step 10"):
        steps.extend(trainer.run(batches()))
    assert torch.equal(weights(model), before)


class Modes(torch.autograd.Function):
    """Notes torch's mode in forward and backward."""

    seen: ClassVar = []

    @staticmethod
    def forward(ctx, x):
        Modes.seen.append(torch.get_deterministic_debug_mode())
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        Modes.seen.append(torch.get_deterministic_debug_mode())
        return grad


WARN, ERROR = 1, 2
"""Of an operation without a deterministic form."""


@pytest.mark.parametrize(("own", "expected"), [(0, WARN), (ERROR, ERROR)])
def test_a_deterministic_step_leaves_the_callers_mode_as_it_is(own, expected):
    def loss(model, batch):
        total, count = next_token(model, batch)
        return Modes.apply(total), count

    trainer = Trainer(model := build(), train.sgd(model), loss)
    try:
        torch.set_deterministic_debug_mode(own)
        for trainer.deterministic, mode in ((False, own), (True, expected)):
            Modes.seen.clear()
            run(trainer, 1)
            assert Modes.seen == [mode, mode]
            assert torch.get_deterministic_debug_mode() == own
        trainer.loss = lambda model, batch: 1 / 0
        with pytest.raises(ZeroDivisionError):
            run(trainer, 1)
        assert torch.get_deterministic_debug_mode() == own
    finally:
        torch.set_deterministic_debug_mode(0)


class Pair(NamedTuple):
    ids: torch.Tensor
    targets: torch.Tensor


@dataclass(frozen=True, slots=True)
class Example:
    ids: torch.Tensor
    name: str


def test_batches_of_every_form_are_to_device():
    ids, meta = batch(0), torch.device("meta")
    nested = {"pair": Pair(ids, ids), "list": [ids, "text"], "record": Example(ids, "a"), "none": None}
    moved = trainer_module._to_device(nested, meta)
    assert type(moved["pair"]) is Pair
    assert moved["pair"].targets.device == moved["list"][0].device == moved["record"].ids.device == meta
    assert (moved["list"][1], moved["record"].name, moved["none"]) == ("text", "a", None)
    assert nested["record"].ids is ids, "the caller's batch stays"
    transformers = pytest.importorskip("transformers")
    output = transformers.modeling_outputs.CausalLMOutput(logits=ids.float())
    others = {"logits": output, "input_ids": transformers.BatchEncoding({"input_ids": ids})}
    assert all(trainer_module._to_device(other, meta)[name].device == meta for name, other in others.items())


def stepped(loss, **settings):
    model = plain()
    trainer = Trainer(model, train.sgd(model), loss, **settings)
    before = weights(model)
    [step] = run(trainer, 1, iter([Pair(batch(0)[:, :-1], batch(0)[:, 1:])] * settings.get("accumulate", 1)))
    return step, float((weights(model) - before).abs().max())


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
@pytest.mark.parametrize("count", [int, float, torch.tensor, lambda n: torch.tensor([n]), lambda n: np.int64(n)])
def test_a_loss_gives_one_element_and_one_number(shape, count):
    def loss(model, pair):
        total, counted = next_token(model, pair)
        return total.reshape(shape), count(int(counted))

    want, moved = stepped(next_token)
    assert moved
    got, same = stepped(loss)
    assert (got.loss, got.count, got.grad_norm, same) == (want.loss, want.count, want.grad_norm, moved)


LOSSES = {
    "a mean": lambda total, n: total / n,
    "its own": lambda total, n: (total, n, {"loss": (n, n)}),
    "none": lambda total, n: None,
    "item": lambda total, n: (total.item(), n),
    "many": lambda total, n: (total.expand(4), n),
    "mask": lambda total, n: (total, torch.ones(4, 8)),
    "bool": lambda total, n: (total, True),
    "any": lambda total, n: (total, (n > 0).any()),
    "string": lambda total, n: (total, "32"),
    "negative": lambda total, n: (total, -3),
    "detached": lambda total, n: (total.detach(), n),
    "another": lambda total, n: (torch.ones((), requires_grad=True), n),
}
SETTINGS = [
    {"clip": -1}, {"clip": math.nan}, {"accumulate": 0}, {"dtype": torch.float64},
    {"lr_scale": lambda step: math.nan}, {"lr_scale": lambda step: -0.1},
]  # fmt: skip


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_that_is_none_is_refused(name):
    refuses(".", stepped, lambda model, pair: LOSSES[name](*next_token(model, pair)))


@pytest.mark.parametrize("setting", SETTINGS)
def test_settings_that_cannot_be_are_refused_before_a_weight_changes(setting):
    refuses(next(iter(setting)), stepped, next_token, **setting)


@pytest.mark.parametrize("count", [math.nan, math.inf, 0, torch.tensor(math.nan), torch.tensor(0)])
def test_a_count_that_nothing_can_be_divided_by_skips_the_step(count):
    step, moved = stepped(lambda model, pair: (next_token(model, pair)[0], count))
    assert (step.skipped, step.count, moved) == (True, 0, 0.0)
    model = plain()
    trainer = Trainer(model, train.sgd(model), lambda m, b: (next_token(m, b)[0], count), patience=3)
    with pytest.raises(Diverged, match=r"count of targets was 0 or .* for 3 steps in a row, up to step 3"):
        run(trainer, 5)


def test_a_micro_batch_without_a_target_needs_no_gradient():
    def loss(model, ids):
        return next_token(model, ids) if ids[0, 0] else (torch.zeros(()), 0)

    nothing, something = torch.zeros(4, 9, dtype=torch.long), torch.ones(4, 9, dtype=torch.long)
    model = plain()
    trainer = Trainer(model, train.sgd(model), loss, accumulate=2)
    steps = run(trainer, 2, iter([nothing, something, nothing, nothing]))
    assert [(s.count, s.skipped) for s in steps] == [(32, False), (0, True)]


@pytest.mark.parametrize("seed", [np.int64(2**62), -(10**23)])
def test_settings_of_other_libraries_numbers_are_taken(seed):
    assert stepped(next_token, clip=np.float32(1), accumulate=np.int64(2), seed=seed)[1]


def test_models_and_optimizers_that_cannot_be_trained_are_named():
    refuses("nothing to train", Trainer, nn.ReLU(), train.sgd(plain()), next_token)
    refuses("nothing to train", train.adamw, plain().requires_grad_(False))
    optimizer = torch.optim.SGD(plain().parameters(), 0.1)
    optimizer.param_groups[0]["lr"] = math.nan
    refuses("learning rates", Trainer, plain(), optimizer, next_token)
    trainer = Trainer(plain(), train.sgd(plain()), next_token)
    refuses("format 1, not 2", trainer.load_state_dict, trainer.state_dict() | {"format": 1})


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_stopped_and_resumed_is_straight_bit_for_bit(name, tmp_path):
    def made(seed=0):
        model = build(seed)
        optimizer, schedule = OPTIMIZERS[name](model), Schedule.steps(9, 2)
        return model, Trainer(model, optimizer, next_token, accumulate=2, lr_scale=schedule.lr_scale)

    def trained(steps):
        model, trainer = made()
        losses, saved = [], {}
        for count in steps:
            if saved:  # everything is made anew, as in a new process
                state = checkpoint.load_state(checkpoint.save_state(tmp_path, len(losses), saved))
                model, trainer = made(seed=7)
                model.load_state_dict(state["weights"])
                trainer.load_state_dict(state["trainer"])
            losses += [s.loss.hex() for s in run(trainer, count)]
            saved = {"weights": model.state_dict(), "trainer": trainer.state_dict()}
        return losses, weights(model)

    assert Windows(TEXT, length=8, batch_size=4).windows_per_epoch < 9 * 2 * 4 / 3, "three epochs"
    one, two = trained([9]), trained([2, 4, 3])
    assert one[0] == two[0]
    assert torch.equal(one[1], two[1])


def test_mean_squared_and_cross_entropy():
    model = nn.Linear(4, 3)
    x, y, label = torch.randn(5, 4), torch.randn(5, 3), torch.randint(3, (5,))
    for loss, mean, target in (
        (train.mean_squared, nn.functional.mse_loss, y),
        (train.cross_entropy, nn.functional.cross_entropy, label),
    ):
        total, count = loss(model, (x, target))
        assert float((total / count).detach()) == pytest.approx(float(mean(model(x), target).detach()))
    refuses("the targets", train.mean_squared, model, (x, label.float()))
    refuses("the labels are", train.cross_entropy, model, (x, nn.functional.one_hot(label, 3).float()))


def names(model, optimizer):
    """The parameters that Muon has, by their names in the model."""
    inside = {id(p) for g in optimizer.param_groups if "momentum" in g for p in g["params"]}
    return {name for name, p in model.named_parameters() if id(p) in inside}


class LanguageModel(nn.Module):
    """Blocks in a list, a head by another name, an adapter of its inputs."""

    def __init__(self, tied=False):
        super().__init__()
        self.wte, self.project = nn.Embedding(16, 16), nn.Linear(16, 16)
        self.layers = nn.ModuleList(nn.ModuleDict({"mix": nn.Linear(16, 16)}) for _ in range(2))
        self.lm_head = nn.Linear(16, 16, bias=False)
        if tied:
            self.lm_head.weight = self.wte.weight


MIXED = {"layers.0.mix.weight", "layers.1.mix.weight"}


@pytest.mark.parametrize("tied", [False, True])
def test_muon_takes_blocks_whatever_stands_around_them(tied):
    compiled = lambda m: torch.compile(m, backend="aot_eager")
    for wrap in (lambda m: m, compiled, Wrapped, lambda m: Wrapped(compiled(m)), nn.Sequential):
        model = wrap(LanguageModel(tied))
        assert {n[n.index("layers") :] for n in names(model, train.muon(model))} == MIXED
        assert all("layers" in n for n in names(model, train.muon(model)))


def test_muon_knows_the_heads_of_a_model_without_blocks_by_what_they_give():
    classifier = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))
    conv = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(36, 12), nn.ReLU(), nn.Linear(12, 10))
    several = nn.ModuleDict({"a": nn.Linear(8, 3), "trunk": nn.Linear(8, 8), "b": nn.Linear(8, 5)})
    square = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    adapted = nn.Sequential(*map(deepcopy, classifier))
    attach(adapted, rank=2, where="4")
    blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4, bias=False))])
    inside = {classifier: {"0.weight", "2.weight"}, conv: {"2.weight"}, several: {"trunk.weight"}}
    inside |= {square: {"0.weight"}, adapted: {"0.weight", "2.weight"}, blocks: {"0.0.weight"}}
    inside |= {nn.Linear(4, 4, bias=False): set(), nn.LayerNorm(4): set()}
    for model, weights in inside.items():
        assert names(model, train.muon(model)) == weights, model
    refuses("nothing to train", train.muon, nn.ReLU())


@pytest.mark.parametrize("family", FAMILIES)
def test_muon_takes_the_matrices_of_every_familys_blocks_and_those_inside_of_another_model(family):
    module = FAMILIES[family]
    model, tiny = module.build(module.Config.from_size(64, 64, 2, 16)), build()
    matrices = {n for n, p in model.named_parameters() if p.dim() == 2 and n.startswith("blocks.")}
    assert names(model, train.muon(model)) == matrices
    assert names(tiny, train.muon(tiny)) == {"mix.weight"}


@pytest.mark.parametrize("make", [train.muon, train.adamw, train.sgd])
def test_a_factor_of_a_rate_is_that_rate(make):
    models = [LanguageModel(), LanguageModel()]
    models[1].load_state_dict(models[0].state_dict())
    slow = {"lr": 0.001} | ({"adam_lr": 0.002} if make is train.muon else {})
    optimizers = [make(models[0], **slow), make(models[1], **{name: 4 * rate for name, rate in slow.items()})]
    head = models[1].lm_head.weight
    train.scale_rates(optimizers[1], {p: 0.25 for p in models[1].parameters() if p is not head})
    optimizers[1].load_state_dict(optimizers[1].state_dict())
    for step in range(3):
        for model, optimizer in zip(models, optimizers, strict=True):
            torch.manual_seed(step)
            for p in model.parameters():
                p.grad = torch.randn_like(p)
            optimizer.step()
    for (name, one), two in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        assert torch.equal(one, two) != (name == "lm_head.weight"), name
    refuses("factor is -1; expected a number from 0", train.scale_rates, optimizers[1], {head: -1})


def test_muon_does_what_the_caller_says_and_says_what_it_does():
    model = LanguageModel()
    assert names(model, train.muon(model, where=["**", "!wte.*"])) == MIXED | {"project.weight", "lm_head.weight"}
    split = train.muon_split(model)
    assert split["muon"] == sorted(MIXED)
    assert split["adamw"] == [name for name, _ in model.named_parameters() if name not in MIXED]
    assert train.muon_split(model, where="lm_head.*")["muon"] == ["lm_head.weight"]
    words = r"'head\.\*' selects no trainable matrix; the matrices are: wte.weight, project"
    refuses(words, train.muon, model, where="head.*")


@pytest.mark.parametrize(
    ("make", "name", "value"),
    [(train.muon, "lr", math.nan), (train.muon, "momentum", 1.5), (train.muon, "adam_decay", -1.0),
     (train.adamw, "decay", math.nan), (train.sgd, "lr", math.nan), (train.rmsprop, "lr", -1.0)],
)  # fmt: skip
def test_optimizers_refuse_rates_that_are_none(make, name, value):
    refuses(name, make, LanguageModel(), **{name: value})


def test_sparse_gradients_are_clipped_and_divided_as_dense_ones():
    def trained(sparse):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(9, 4, sparse=sparse), nn.Linear(4, 3))
        optimizer = torch.optim.SGD(model.parameters(), 1.0)
        made = Trainer(model, optimizer, train.cross_entropy, accumulate=2, clip=0.1)
        batches = [(torch.tensor([1, 1, 5]), torch.tensor([0, 2, 1])), (torch.tensor([5]), torch.tensor([2]))]
        norms = [step.grad_norm for step in made.run(batches * 3)]
        return norms, [p.detach() for p in model.parameters()]

    (some, ours), (dense, theirs) = trained(True), trained(False)
    assert some == pytest.approx(dense)
    assert all(torch.allclose(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(("momentum", "decay", "stacked"), [(0.95, 0.01, 1 << 26), (0.0, 0.5, 3 * 32 * 96)])
def test_muon_by_shape_is_pytorchs_to_the_rounding_of_bfloat16(momentum, decay, stacked, monkeypatch):
    monkeypatch.setattr("dunes.train.optim.STACKED", stacked)
    torch.manual_seed(0)
    shapes = [(32, 32), (32, 32), (96, 32), (32, 96), (96, 32), (96, 32)]
    ours, theirs = ([nn.Parameter(torch.randn(s)) for s in shapes] for _ in range(2))
    for a, b in zip(ours, theirs, strict=True):
        b.data.copy_(a.data)
    by_shape = Muon(ours, 0.05, decay, momentum)
    one_by_one = torch.optim.Muon(theirs, 0.05, decay, momentum)
    for _ in range(3):
        for a, b in zip(ours, theirs, strict=True):
            a.grad = torch.randn_like(a)
            b.grad = a.grad.clone()
        by_shape.step()
        one_by_one.step()
    for a, b in zip(ours, theirs, strict=True):
        # A step moves the weights by 0.05 times values near 1, of which bfloat16 keeps 8 bits.
        assert (a - b).detach().abs().max() < 3 * 0.05 * 2**-6


def test_a_schedule_rises_holds_falls_and_ends():
    schedule = Schedule.steps(100, warmup=4, decay=0.4)
    rates = [schedule.lr_scale(step) for step in range(100)]
    assert rates[:4] == [0.2, 0.4, 0.6, 0.8]
    assert rates[4:61] == [1.0] * 57
    assert rates[80] == pytest.approx(0.5)
    assert rates[99] == pytest.approx(1 / 40)
    assert [schedule.is_over(step) for step in (99, 100)] == [False, True]


@pytest.mark.parametrize("begin", [0.0, 60.0])
@pytest.mark.parametrize(("slower", "at"), [(1.0, 0), (1.3, 600), (0.7, 600), (5.0, 100), (5.0, 300), (0.2, 450)])
def test_a_clock_ends_the_run_in_time_and_enters_the_rate_only_by_its_records(slower, at, begin):
    """Also where nothing is trained in the first 60 s, and where the machine becomes slower or faster."""
    schedule = Schedule()
    clock, elapsed, step = Clock(schedule, 100.0, 0.5, begin), begin, 0
    rates = []
    while not schedule.is_over(step):
        rates.append(schedule.lr_scale(step))
        step += 1
        elapsed += 5.0 if step == 1 else 0.1 * (slower if step > at else 1.0)
        clock.update(step, elapsed)
    assert elapsed == pytest.approx(100, abs=2.5)
    assert len(schedule.records) <= 6
    assert rates[-1] < 0.06
    assert all(a >= b - 1e-9 for a, b in pairwise(rates))
    again = Schedule(records=[Record(r.begin, r.end) for r in schedule.records])
    late = schedule.records[-1].begin
    assert [again.lr_scale(s) for s in range(late, step)] == rates[late:]


@pytest.mark.parametrize(("seconds", "warmup"), [(8.0, 1), (30.0, 6), (1000.0, 20)])
def test_warming_up_takes_a_fifth_of_the_steps_at_most_and_is_part_of_the_schedule(seconds, warmup):
    schedule = Schedule(20)
    clock = Clock(schedule, seconds)
    rates = []
    for step in range(8):
        rates.append(schedule.lr_scale(step))
        clock.update(step + 1, 1.0 + step)
    assert schedule.warmup == warmup
    assert rates[2:4] == [min(1.0, n / (warmup + 1)) for n in (3, 4)]


def test_a_run_that_is_late_stops():
    schedule = Schedule(records=[Record(50, 1000)])
    clock = Clock(schedule, 100.0)
    clock.update(60, 99.5)
    assert not schedule.is_over(61)
    clock.update(61, 103.0)
    assert schedule.is_over(62)


def test_a_clock_may_be_told_before_the_first_step_and_one_that_is_told_late_still_ends():
    early, late = Schedule(), Schedule()
    Clock(early, 1.0).update(0, 0.9)
    assert early.is_over(early.records[-1].end)
    Clock(late, 1.0).update(1, 50.0)
    assert late.is_over(2)
