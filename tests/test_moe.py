"""A mixture of experts: its forms agree, its routing is fixed, its weights stay packed; and caches that roll."""

import copy
import subprocess
import sys

import pytest
import torch
from torch import nn

from conftest import refuses
from dunes import tree
from dunes.augment import attach
from dunes.models.mixtral import mixture
from dunes.ops import expert_products as forms
from dunes.parts import Cache, Checkpointed, GatedMLP, MoE, RollingCache, cache_for
from dunes.parts.decoder import auxiliary_losses, record_auxiliary
from dunes.parts.moe import load_balance, router_z
from dunes.train import Trainer, adamw
from dunes.train.loss import next_token_loss
from small_models import random_model


def moe(experts=5, dim=16, hidden=24, top_k=2, **options):
    torch.manual_seed(0)
    return mixture(dim, [GatedMLP(dim, hidden) for _ in range(experts)], top_k, **options)


def gradients(model, x, form, monkeypatch):
    monkeypatch.setattr(forms, "fits", lambda *a: form == "grouped")
    model.zero_grad()
    x = x.clone().requires_grad_()
    y = model(x)
    y.square().sum().backward()
    return [y.detach(), x.grad, *(torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters())]


@pytest.mark.parametrize("tokens", [1, 3, 64])
@pytest.mark.parametrize("experts", [1, 5, 8])
def test_grouped_is_plain_in_values_and_gradients(experts, tokens, monkeypatch):
    model = moe(experts, top_k={1: 1, 5: 2, 8: 3}[experts])
    with torch.no_grad():
        model.router.weight[0] = -100 * model.router.weight[0].abs()
    x = torch.randn(tokens, 16).abs()  # nobody likes the first expert
    if experts > 2:
        assert 0 not in model.route(model.router(x))[0]
    plain, grouped = (gradients(model, x, form, monkeypatch) for form in ("plain", "grouped"))
    difference = max(float((a - b).abs().max()) for a, b in zip(plain, grouped, strict=True))
    print(f"{experts} experts, {tokens} tokens: {difference:.1e}")
    assert difference <= 1e-6 * max(1, *(float(t.abs().max()) for t in plain))


@pytest.mark.parametrize("sizes", [(16, 23), (13, 24), (13, 23)])
def test_sizes_that_do_not_align_take_the_plain_form(sizes):
    dim, hidden = sizes
    model = moe(dim=dim, hidden=hidden)
    x = torch.randn(9, dim)
    chosen, weights = model.route(model.router(x))
    experts_of = lambda row, choice: torch.stack([model.experts[int(e)](row) for e in choice])
    outputs = torch.stack([experts_of(*pair) for pair in zip(x, chosen, strict=True)])
    assert (model(x) - (weights[..., None] * outputs).sum(1)).abs().max() <= 1e-6
    assert not forms.adjacent([e.gate.weight for e in model.experts])


@pytest.mark.parametrize("renormalise", [True, False])
def test_a_mixture_in_float64_is_exact(renormalise):
    model = moe(experts=3, dim=16, hidden=24, renormalise=renormalise).double()
    x = torch.randn(4, 16, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(model, (x,))
    assert model.route(model.router(x))[1].dtype == torch.float64
    assert (model(x) - copy.deepcopy(model).float()(x.float())).abs().max() < 1e-5


def test_the_grouped_product_is_an_operator_as_pytorch_wants_them():
    rows, weight = torch.randn(7, 8, requires_grad=True), torch.randn(3, 12, 8, requires_grad=True)
    ends = torch.tensor([2, 2, 7], dtype=torch.int32)
    torch.library.opcheck(forms.product, (rows, weight, ends))
    torch.library.opcheck(forms.outer, (torch.randn(7, 8), torch.randn(7, 12), ends))


def test_every_expert_is_called_while_gradients_are_on_and_only_the_chosen_without():
    model = moe(dim=13)
    called = []
    for e, expert in enumerate(model.experts):
        expert.register_forward_hook(lambda module, inputs, output, e=e: called.append(e))
    model(torch.randn(1, 13)).sum().backward()
    assert called == [0, 1, 2, 3, 4]
    assert all(p.grad is not None for p in model.parameters())
    called.clear()
    with torch.no_grad():
        model(torch.randn(1, 13))
    assert len(called) == 2


def test_of_equals_the_first_experts_are_taken_and_weights_are_renormalised_or_not():
    model = moe(experts=6, top_k=3)
    chosen, weights = model.route(torch.zeros(4, 6))
    assert chosen.tolist() == [[0, 1, 2]] * 4
    assert torch.allclose(weights, torch.full((4, 3), 1 / 3))
    assert model.route(torch.tensor([[0.0, 2.0, 1.0, 2.0, 1.0, 1.0]]))[0].tolist() == [[1, 3, 2]]
    for renormalise in (True, False):
        _, weights = moe(renormalise=renormalise).route(torch.randn(7, 5))
        assert torch.allclose(weights.sum(-1), torch.ones(7)) == renormalise
    refuses("top_k is 3; expected 1 to 2", moe, experts=2, top_k=3)


def packed(model):
    return all(forms.adjacent([getattr(e, p).weight for e in model.experts]) for p in ("gate", "up", "down"))


def test_packing_keeps_parameters_and_is_done_again_when_something_undid_it():
    model, x = moe(), torch.randn(64, 16)
    before = list(model.parameters())
    assert not packed(model)
    want = model(x)
    assert packed(model)
    assert all(a is b for a, b in zip(model.parameters(), before, strict=True))
    optimizer = adamw(model)
    model(x).square().sum().backward()
    optimizer.step()
    assert packed(model)
    assert (model(x) - want).abs().max() > 1e-3

    state = {k: v.clone() for k, v in model.state_dict().items()}
    model.load_state_dict(state)
    assert packed(model)
    want = model(x)
    assigned, cast = lambda m: m.load_state_dict(state, assign=True) and m, lambda m: m.double().float()
    for undone in (assigned, copy.deepcopy, cast):
        again = undone(model)
        assert not packed(again)
        assert torch.equal(again(x), want)
        assert packed(again)
    half = model.to(torch.bfloat16)
    assert half(x.bfloat16()).dtype == torch.bfloat16
    assert packed(half)
    other = moe()
    other.experts[1] = nn.Linear(16, 16)
    assert not other.pack(), "experts that are not plain are called one by one"
    assert other(x).shape == (64, 16)


def test_autocast_multiplies_in_bfloat16_in_both_forms(monkeypatch):
    model, x = moe(), torch.randn(64, 16)
    with torch.autocast("cpu", torch.bfloat16):
        plain, grouped = (gradients(model, x, form, monkeypatch) for form in ("plain", "grouped"))
    exact = gradients(model, x, "plain", monkeypatch)
    for a, b, c in zip(plain, grouped, exact, strict=True):
        assert a.dtype == b.dtype == torch.float32
        assert (b - c).norm() <= 2 * (a - c).norm() + 1e-4
        assert (b - c).norm() > 1e-6, "something was rounded"


def test_balance_is_that_of_transformers_and_padding_does_not_count():
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func as theirs

    torch.manual_seed(0)
    layers = [torch.randn(20, 6) for _ in range(3)]
    real = torch.rand(2, 10) > 0.3
    assert load_balance(torch.cat(layers), 2) == pytest.approx(float(theirs(tuple(layers), 6, 2)), rel=1e-6)
    masked = load_balance(layers[0], 2, real.flatten())
    assert masked == pytest.approx(float(theirs((layers[0],), 6, 2, real)), rel=1e-6)
    assert masked == pytest.approx(float(load_balance(layers[0][real.flatten()], 2)), rel=1e-6)


def test_shared_experts_get_every_token_and_are_added(monkeypatch):
    model, x = moe(), torch.randn(64, 16)
    alone = model(x)
    shared = [GatedMLP(16, 40), nn.Linear(16, 16)]
    both = mixture(16, list(model.experts), 2, shared=shared)
    both.router = model.router
    assert torch.equal(both(x), alone + shared[0](x) + shared[1](x))
    assert packed(both)
    plain, grouped = (gradients(both, x, form, monkeypatch) for form in ("plain", "grouped"))
    assert max(float((a - b).abs().max()) for a, b in zip(plain, grouped, strict=True)) <= 1e-5
    assert all(p.grad.abs().max() > 0 for e in shared for p in e.parameters())
    refuses("the same expert occurs twice", mixture, 16, [*model.experts], 2, shared=[model.experts[0]])


def test_the_z_loss_is_that_of_the_paper_and_padding_does_not_count():
    logits = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    real = torch.tensor([True] * 4 + [False] * 2)
    want = logits[:4].exp().sum(-1).log().pow(2).mean()
    assert torch.allclose(router_z(logits[:4]), want, rtol=1e-12)
    padded = torch.cat([logits[:4], torch.full((2, 4), torch.nan)])
    assert torch.allclose(router_z(padded, real), want, rtol=1e-12)
    assert torch.isfinite(torch.autograd.grad(router_z(padded, real), logits)[0]).all()
    overflowed = torch.cat([logits[:4], torch.full((2, 4), torch.inf)])
    assert torch.equal(load_balance(overflowed, 2, real), load_balance(logits[:4], 2))
    assert torch.isfinite(torch.autograd.grad(load_balance(overflowed, 2, real), logits)[0]).all()
    losses = moe(z_loss=0.1, balance=0.3).auxiliary_losses([logits.detach().float()], real)
    assert losses["router_z"] == pytest.approx(0.1 * float(want.detach()), rel=1e-6)
    assert losses["balance"] == pytest.approx(0.3 * float(load_balance(logits[:4].float(), 2).detach()), rel=1e-6)
    assert losses["expert_load"][0].sum() == 2 * losses["expert_load"][1] == 8


def test_the_selection_bias_changes_the_choice_and_no_weight():
    model = moe(bias_rate=0.5, renormalise=False)
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0, -1.0]])
    assert model.route(logits)[0].tolist() == [[0, 1]]
    model.selection_bias[:] = torch.tensor([-1.0, 0, 0, 0, 1.0])
    chosen, weights = model.route(logits)
    assert chosen.tolist() == [[4, 1]]
    assert torch.equal(weights, logits.softmax(-1)[:, [4, 1]])


def test_chosen_experts_whose_probabilities_underflow_leave_values_and_gradients_finite():
    model = moe(bias_rate=0.001, shared=[GatedMLP(16, 24)])
    model.router.weight.data.zero_()[0] = 100.0
    model.selection_bias[0] = -2.0
    x = torch.ones(3, 16, requires_grad=True)
    assert model.route(model.router(x))[1].max() == 0
    y = model(x)
    assert torch.equal(y, model.shared[0](x))
    y.sum().backward()
    assert all(p.grad.isfinite().all() for p in (x, *model.parameters()))


def loss_free(model):
    for block in model.blocks:
        block.mlp.balance = 0.0
        block.mlp.extend(bias_rate=0.01)
    return model


def test_the_bias_follows_the_load_of_the_whole_step_and_a_skipped_one_leaves_it():
    ids_of = lambda i: torch.randint(61, (2, 17), generator=torch.Generator().manual_seed(i))
    whole, parts = loss_free(small()), loss_free(small())
    step = next(Trainer(whole, adamw(whole, 0.0), next_token_loss).run([torch.cat([ids_of(1), ids_of(2)])]))
    accumulated = Trainer(parts, adamw(parts, 0.0), next_token_loss, accumulate=2)
    two = next(accumulated.run([ids_of(1), ids_of(2)]))
    assert torch.equal(torch.tensor(step.metrics["expert_load"]), torch.tensor(two.metrics["expert_load"]))
    for a, b, load in zip(whole.blocks, parts.blocks, step.metrics["expert_load"], strict=True):
        assert a.mlp.selection_bias.abs().max() > 0
        assert torch.equal(a.mlp.selection_bias, b.mlp.selection_bias)
        assert torch.equal(a.mlp.selection_bias, 0.01 * (2 / 8 - torch.tensor(load)).sign())
        assert not a.mlp.load.any()
        assert sum(load) == pytest.approx(2)
    before = {k: v.clone() for k, v in whole.state_dict().items()}
    infinite = lambda model, batch: (next_token_loss(model, batch)[0] * torch.inf, 1)
    assert next(Trainer(whole, adamw(whole), infinite).run([ids_of(3)])).skipped
    assert all(torch.equal(v, before[k]) for k, v in whole.state_dict().items())
    tree.freeze(whole, "**.router.*")
    next(Trainer(whole, adamw(whole), next_token_loss).run([ids_of(3)]))
    attach(whole, where="**.router", rank=2)
    next(Trainer(whole, adamw(whole), next_token_loss).run([ids_of(4)]))
    assert torch.equal(whole.blocks[0].mlp.selection_bias, before["blocks.0.mlp.selection_bias"])
    assert not whole.blocks[0].mlp.load.any()


def test_every_rank_gets_the_bias_of_the_loads_of_all(monkeypatch):
    model, other_rank = moe(bias_rate=0.5), torch.tensor([0, 0, 0, 9, 9])
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
    monkeypatch.setattr("torch.distributed.all_reduce", lambda t: t.add_(other_rank))
    model.load += torch.tensor([9, 4, 4, 0, 0])
    model.after_step()
    assert model.selection_bias.tolist() == [-0.5, 0.5, 0.5, -0.5, -0.5], "the mean is 7"
    assert model.load.tolist() == [0] * 5


def test_padding_is_no_load():
    model, x, y = loss_free(small()), ids()[:, :-1], ids()[:, 1:]
    positions = torch.arange(16).repeat(2, 1)
    positions[1, 9:] = -1
    model.train()(x, positions, targets=y.where(positions >= 0, -100))
    assert [int(b.mlp.load.sum()) for b in model.blocks] == [2 * 25] * 2


def test_layers_of_different_sizes_report_their_loads_side_by_side():
    parts = [moe(3, balance=1.0), moe(5, balance=1.0)]
    losses, metrics = auxiliary_losses({m: [torch.randn(7, len(m.experts))] for m in parts})
    sums, count = metrics["expert_load"]
    assert (sums.shape, int(count), [*losses]) == ((2, 5), 7, ["balance"])
    assert sums[0, 3:].tolist() == [-1, -1]
    assert sums[:, :3].sum() + sums[1, 3:].sum() == 2 * 2 * 7


def small(family="mixtral", **changes):
    return random_model(family, vocab=61, dim=64, context=40, **changes)


def ids(rows=2, length=17):
    return torch.randint(61, (rows, length), generator=torch.Generator().manual_seed(1))


def test_the_loss_has_the_balance_in_training_only():
    model, x, y = small(balance=0.5), ids()[:, :-1], ids()[:, 1:]
    plain, count, none = model.eval()(x, targets=y)
    total, _, metrics = model.train()(x, targets=y)
    with record_auxiliary(model) as recorded:
        model(x)
    want = sum(load_balance(*logits, 2) for logits in recorded.values()) / 2
    assert [len(logits) for logits in recorded.values()] == [1, 1]
    assert float((total - plain).detach()) == pytest.approx(0.5 * float(want.detach()) * int(count), rel=1e-3)
    assert all(m.recorded is None for m in model.modules() if isinstance(m, MoE))
    assert none == {}
    assert metrics["balance"][0] == pytest.approx(float((total - plain).detach()), rel=1e-3)
    assert metrics["balance"][1] == count
    alone = small(balance=0.0).train()
    without, _, _ = alone(x, targets=y)
    assert float(without.detach()) == pytest.approx(float(plain.detach()), rel=1e-6)
    without.backward()
    assert all(b.mlp.router.weight.grad.abs().max() > 1e-3 for b in alone.blocks), "by the task alone"
    positions = torch.arange(16).repeat(2, 1)
    positions[1, 9:] = -1
    padded, _, _ = model(x, positions, targets=y.where(positions >= 0, -100))
    other = x.clone()
    other[1, 9:] = 7
    again, _, _ = model(other, positions, targets=y.where(positions >= 0, -100))
    assert float(again.detach()) == pytest.approx(float(padded.detach()), rel=1e-5)


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize(("groups", "top_groups"), [(1, 1), (3, 1), (3, 2), (6, 4)])
def test_sigmoid_routing_is_that_of_deepseek_v3(groups, top_groups, ties):
    """Their order of equal values is not specified: with ties it is compared with a loop that takes the first."""
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

    sizes = {"n_routed_experts": 12, "num_experts_per_tok": 4, "n_group": groups, "topk_group": top_groups}
    router = DeepseekV3TopkRouter(DeepseekV3Config(hidden_size=12, routed_scaling_factor=1.7, **sizes))
    torch.manual_seed(0)
    logits, bias = torch.randn(200, 12), 0.2 * torch.randn(12)
    if ties:
        logits, bias = logits.round(), torch.zeros(12)
    experts = [GatedMLP(8, 8) for _ in range(12)]
    routing = {"sigmoid": True, "factor": 1.7, "groups": groups, "top_groups": top_groups}
    ours = mixture(8, experts, 4, biased=True, **routing)
    ours.selection_bias.copy_(bias)
    chosen, weights = ours.route(logits)
    router.weight.data, router.e_score_correction_bias = torch.eye(12), bias
    _, their_weights, their_chosen = router(logits)
    if ties:
        for row, scores in zip(chosen.tolist(), logits.sigmoid(), strict=True):
            members = [[*range(g * 12 // groups, (g + 1) * 12 // groups)] for g in range(groups)]
            sums = [float(scores[group].topk(2).values.sum()) for group in members]
            best = sorted(range(groups), key=lambda g, sums=sums: -sums[g])[:top_groups]
            allowed = [e for g in sorted(best) for e in members[g]]
            assert row == sorted(allowed, key=lambda e, scores=scores: -scores[e])[:4]
    else:
        order = their_chosen.sort(-1).indices
        assert torch.equal(chosen.sort(-1).values, their_chosen.gather(-1, order))
        got = weights.gather(-1, chosen.sort(-1).indices)
        assert (got - their_weights.gather(-1, order)).abs().max() <= 1e-6
    assert torch.allclose(weights.sum(-1), torch.tensor(1.7))


def test_a_bias_without_a_rate_stays_and_one_with_a_rate_starts_from_it():
    layer = mixture(8, [GatedMLP(8, 8) for _ in range(4)], 2, biased=True, sigmoid=True).train()
    layer.selection_bias.copy_(torch.arange(4.0))
    layer.recorded = [torch.randn(9, 4)]
    assert layer.auxiliary_losses(layer.recorded, None)["expert_load"][0].tolist() == [0, 0, 9, 9]
    layer.after_step()
    assert layer.selection_bias.tolist() == [0, 1, 2, 3]
    layer.extend(bias_rate=0.5)
    layer.auxiliary_losses(layer.recorded, None)
    layer.after_step()
    assert layer.selection_bias.tolist() == [0.5, 1.5, 1.5, 2.5]


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3"])
def test_checkpointed_gives_the_same_gradients(family):
    def grads(model):
        model.train()(ids()[:, :-1], targets=ids()[:, 1:])[0].backward()
        return [p.grad for p in model.parameters()]

    plain, other = small(family), small(family)
    tree.replace(other, "blocks.*", Checkpointed)
    for a, b in zip(grads(plain), grads(other), strict=True):
        assert (a - b).abs().max() <= 1e-5 * max(1, float(a.abs().max()))


SHARDED = """
import torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.device_mesh import init_device_mesh
from dunes.models.mixtral import mixture
from dunes.parts import GatedMLP
torch.set_num_threads(1)
def make():
    torch.manual_seed(0); return mixture(16,[GatedMLP(16,24) for _ in range(4)],1,renormalise=False)
xs=[torch.randn(6,16,generator=torch.Generator().manual_seed(r))+(3 if r else -3) for r in range(2)]
ref=make(); (sum(ref(x).square().sum() for x in xs)/2).backward()
used = [set(ref.route(ref.router(x))[0].flatten().tolist()) for x in xs]
assert not used[0] & used[1], used
want={n:p.grad for n,p in ref.named_parameters()}
dist.init_process_group("gloo"); r=dist.get_rank()
m=make(); mesh=init_device_mesh("cpu",(2,))
for e in m.experts: fully_shard(e,mesh=mesh)
fully_shard(m,mesh=mesh)
for _ in range(2):
    m.zero_grad(); m(xs[r]).square().sum().backward()
for n, p in m.named_parameters():
    assert torch.allclose(p.grad.full_tensor(), want[n], rtol=1e-5, atol=1e-5), n
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_sharded_experts_get_the_same_gradients_where_ranks_use_different_ones(tmp_path):
    (tmp_path / "sharded.py").write_text(SHARDED)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "sharded.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]


# Rolling caches.


def windowed(window=5):
    return small("mistral", window=window).eval()


@torch.no_grad()
@pytest.mark.parametrize("slack", [0, 16])
@pytest.mark.parametrize("cuts", [[3, 13, 1, 1, 9, 13], [1] * 40, [6, 34]])
def test_rolling_is_full_in_any_chunks_and_ragged_rows(cuts, slack):
    model, text = windowed(), ids(3, 40)
    want = model(text)
    cache = RollingCache(3, 5, slack=slack)
    got = torch.cat([model(part, cache=cache) for part in text.split(cuts, 1)], 1)
    assert (got - want).abs().max() <= 1e-5
    assert all(k.shape[2] == 5 + slack + 1 for k in cache.keys), "constant memory, and a slot for padding"

    lengths, width, cache = [21, 4, 1], 21, RollingCache(3, 5, slack=slack)
    real = torch.arange(width) >= width - torch.tensor(lengths)[:, None]
    padded = torch.zeros(3, width, dtype=torch.long)
    for row, n in enumerate(lengths):
        padded[row, width - n :] = text[row, :n]
    model(padded, positions=cache.start(real), cache=cache)
    for step in range(12):  # one by one, where a row now and then has nothing to say
        now = torch.tensor([[True], [step % 3 > 0], [True]])
        new = text.gather(1, cache.length[:, None])
        held = cache.length.clone()
        got = model(new, positions=cache.start(now), cache=cache)
        for row in range(3):
            if now[row]:
                assert (got[row, -1] - want[row, held[row]]).abs().max() <= 1e-5


@torch.no_grad()
@pytest.mark.parametrize("slack", [0, 3])
def test_what_a_rolling_cache_can_take_back(slack):
    model, text = windowed(), ids(2, 40)
    want = model(text)
    for back in range(slack + 4):
        cache = RollingCache(2, 5, slack=slack)
        model(text[:, :20], cache=cache)
        model(text[:, 20:22], cache=cache)
        kept = cache.truncate(torch.tensor([22 - back, 22])).tolist()
        assert kept == [22 - back if back <= slack + 1 else 0, 22]
        if kept[0]:
            fork = cache.select_rows(torch.tensor([0, 1, 0]))
            new = torch.stack([text[row, n : n + 6] for row, n in ((0, kept[0]), (1, 22), (0, kept[0]))])
            got = model(new[:, :1], cache=fork), model(new[:, 1:], cache=fork)
            for i, (row, n) in enumerate(((0, kept[0]), (1, 22), (0, kept[0]))):
                assert (torch.cat(got, 1)[i] - want[row, n : n + 6]).abs().max() <= 1e-5
            assert cache.truncate(torch.tensor([0, 0])).tolist() == [0, 0]
    cache = RollingCache(2, 5, slack=slack)
    model(text[:, :4], cache=cache)
    assert cache.truncate(torch.tensor([1, 3])).tolist() == [1, 3], "nothing was overwritten yet"
    got = model(torch.stack([text[0, 1:9], text[1, 3:11]]), cache=cache)
    assert (got[0] - want[0, 1:9]).abs().max() <= 1e-5
    assert (got[1] - want[1, 3:11]).abs().max() <= 1e-5


@torch.no_grad()
@pytest.mark.parametrize("make", [lambda: Cache(3, 40), lambda: RollingCache(3, 5, slack=3)])
@pytest.mark.parametrize("rows", [torch.tensor([2, 0]), slice(0, 3, 2)])
def test_rows_that_were_taken_can_be_read_anew_and_written_back(make, rows):
    model, text = windowed(), ids(3, 40)
    want, cache = model(text), make()
    model(text[:, :20], cache=cache)
    part = cache.select_rows(rows)
    assert isinstance(rows, torch.Tensor) != (part.keys[0].data_ptr() == cache.keys[0].data_ptr())
    assert part.truncate(torch.zeros(2)).tolist() == [0, 0]
    model(text[rows, 20:][:, :7], cache=part)
    cache.write_rows(rows, part)
    assert cache.length.tolist() == [7, 20, 7]
    kept = cache.truncate(torch.tensor([3, 20, 6])).tolist()
    assert kept == [3, 20, 6], "nothing of their new text was overwritten"
    got = model(torch.stack([text[0, 23:30], text[1, 20:27], text[2, 26:33]]), cache=cache)
    assert (got[1] - want[1, 20:27]).abs().max() <= 1e-5
    for row, first in ((0, 3), (2, 6)):
        assert (got[row] - model(text[row : row + 1, 20:])[0, first : first + 7]).abs().max() <= 1e-5


@torch.no_grad()
def test_a_rolling_cache_refuses_a_layer_that_sees_more():
    refuses("a layer attends to 6", windowed(6), ids(), cache=RollingCache(2, 5))
    refuses("a layer attends to all", small("llama"), ids(), cache=RollingCache(2, 5))


def test_the_cache_for_a_model():
    assert type(cache_for(windowed(), 2, 40)) is RollingCache
    assert type(cache_for(windowed(40), 2, 40)) is Cache
    mixed = windowed()
    mixed.blocks[1].attn.window = None
    assert type(cache_for(mixed, 2, 40)) is Cache
    mixed.blocks[1].attn.window = 9
    assert cache_for(mixed, 2, 40).window == 9
    tree.replace(mixed, "blocks.*", Checkpointed)
    assert cache_for(mixed, 2, 40).window == 9
    assert type(cache_for(small("llama"), 2, 40)) is Cache
