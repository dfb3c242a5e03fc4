"""Mixtures of LoRA experts: the sum they compute, what reaches the router, and that they are saved and removed."""

from copy import deepcopy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from adapters import IDS, build, difference, trained
from conftest import equal_states, refuses
from dunes import checkpoint, tree
from dunes.augment import Adapted, adapter_active, apply_change, attach, merge, row_adapters, set_adapter
from dunes.augment.adapted import Adapter, LoraConfig
from dunes.augment.lora_experts import ExpertAdapter
from dunes.checkpoint.export import export
from dunes.checkpoint.formats.adapter import peft_factors
from dunes.parts import MLP, GatedMLP
from dunes.parts.moe import load_balance
from dunes.runs.augment import augment_folder
from dunes.train import Trainer, adamw
from dunes.train.loss import next_token_loss

pytestmark = pytest.mark.filterwarnings("ignore:.*no tokenizer")
CONFIG = LoraConfig(rank=3, alpha=6.0)


def trained_layer(experts=5, top_k=2, balance=0.0, seed=0):
    """A linear layer, its experts with weights as after training, and inputs (40, 12)."""
    draw = torch.Generator().manual_seed(seed)
    base = nn.Linear(12, 9)
    adapter = ExpertAdapter(base, CONFIG, torch.float32, experts, top_k, balance)
    for p in adapter.parameters():
        p.data = torch.randn(p.shape, generator=draw) * 0.5
    return base, adapter, torch.randn(40, 12, generator=draw)


def naive(adapter, base, x):
    """A loop over tokens and experts, each one a plain adapter."""
    outputs = []
    for token in x:
        y, probs = base(token), F.softmax(F.linear(token, adapter.router), -1)
        best = sorted(range(len(probs)), key=lambda e: (-probs[e].item(), e))[: adapter.top_k]
        total = sum(probs[e] for e in best) if adapter.top_k > 1 else 1.0
        for e in best:
            single = Adapter(base, CONFIG, torch.float32)
            single.A, single.B = nn.Parameter(adapter.A[e]), nn.Parameter(adapter.B[:, e])
            y = y + probs[e] / total * single.update(token)
        outputs.append(y)
    return torch.stack(outputs)


@pytest.mark.parametrize("top_k", [1, 2, 5])
def test_it_is_the_weighted_sum_of_single_adapters(top_k):
    """With all experts, this is the dense mixture."""
    base, adapter, x = trained_layer(top_k=top_k)
    y = adapter(x, base(x), base)
    expected = naive(adapter, base, x)
    assert difference(y, base(x)) > 1
    assert difference(y, expected) < 1e-6 * expected.abs().max().item()
    assert torch.equal(adapter(x.view(4, 10, 12), base(x).view(4, 10, 9), base).view(40, 9), y)


@pytest.mark.parametrize("top_k", [1, 2, 5])
def test_the_task_loss_alone_reaches_the_router(top_k):
    base, adapter, x = trained_layer(top_k=top_k)
    adapter(x, base(x), base).square().sum().backward()
    assert adapter.router.grad.abs().max() > 1e-2
    base, fresh, x = trained_layer(top_k=top_k)
    fresh.B.data.zero_()
    fresh(x, base(x), base).square().sum().backward()
    assert not fresh.router.grad.any(), "before B is trained, nothing does"


def mixture_of(router, mlp, top_k):
    """An MLP whose layers have 5 experts with numbers as after training, and inputs (4, 10, 12)."""
    block = nn.Sequential(mlp)
    request = {"where": "**", "router": router, "experts": 5, "top_k": top_k, "rank": 3, "alpha": 6.0}
    change = apply_change(block, "lora-experts", **request)
    torch.manual_seed(1)
    for p in block.parameters():
        p.data = torch.randn(p.shape) * 0.3
    return block, change, torch.randn(4, 10, 12)


def routed(router, token, top_k):
    """The chosen experts of a token with their weights."""
    probs = F.softmax(F.linear(token, router), -1)
    best = sorted(range(len(probs)), key=lambda e: (-probs[e].item(), e))[:top_k]
    return {e: probs[e] / (sum(probs[b] for b in best) if top_k > 1 else 1.0) for e in best}


def expert_mlp(mlp, expert, token):
    """The MLP of one expert, whose matrices are the frozen ones plus its pair's product; None: the frozen MLP."""

    def layer(adapted, x):
        update = adapted.active_adapter
        weight, scale = adapted.base.weight, update.config.scale
        if expert is not None:
            weight = weight + scale * update.B[:, expert] @ update.A[expert]
        return F.linear(x, weight, adapted.base.bias)

    up = layer(mlp.up, token)
    hidden = mlp.act(layer(mlp.gate, token)) * up if isinstance(mlp, GatedMLP) else mlp.act(up)
    return layer(mlp.down, hidden)


@pytest.mark.parametrize("top_k", [1, 2, 5])
@pytest.mark.parametrize("make", [partial(GatedMLP, 12, 20, bias=True), partial(MLP, 12, 20)])
@torch.no_grad()
def test_experts_that_are_mlps_equal_a_loop_over_tokens(make, top_k):
    block, _, x = mixture_of("mlp", make(), top_k)
    mlp, expected = block[0], []
    first = mlp.gate if isinstance(mlp, GatedMLP) else mlp.up
    for token in x.flatten(0, 1):
        weights = routed(first.active_adapter.router, token, top_k)
        y = (1 - sum(weights.values())) * expert_mlp(mlp, None, token)  # of top-1 alone
        expected.append(y + sum(w * expert_mlp(mlp, e, token) for e, w in weights.items()))
    expected, y = torch.stack(expected).view(4, 10, 12), block(x)
    set_adapter(block, None)
    assert difference(y, block(x)) > 0.5
    assert difference(y, expected) <= 1e-6 * expected.abs().max().item()


@pytest.mark.parametrize("make", [partial(GatedMLP, 12, 20, bias=True), partial(MLP, 12, 20)])
@torch.no_grad()
def test_a_shared_router_chooses_for_all_layers_from_the_input_of_the_first(make):
    block, _, x = mixture_of("shared", make(), 2)
    adapters = [m.active_adapter for m in block.modules() if isinstance(m, Adapted)]
    routers = [a.router for a in adapters if a.router is not None]
    assert len(routers) == 1
    weights = [routed(routers[0], token, 2) for token in x.flatten(0, 1)]

    def watch(module, args, y):
        adapter, (x,) = module.active_adapter, args
        for weight, token, actual in zip(weights, x.flatten(0, -2), y.flatten(0, -2), strict=True):
            pairs = (w * adapter.B[:, e] @ adapter.A[e] for e, w in weight.items())
            expected = module.base(token) + adapter.config.scale * sum(pairs) @ token
            assert difference(actual, expected) <= 2e-6 * expected.abs().max().item()
        seen.append(module)

    seen = []
    hooks = [m.register_forward_hook(watch) for m in block.modules() if isinstance(m, Adapted)]
    block(x)
    assert len(seen) == len(hooks) == len(adapters)


@pytest.mark.parametrize("router", ["shared", "mlp"])
def test_a_choice_does_not_outlive_its_forward(router):
    block, _, x = mixture_of(router, GatedMLP(12, 20), 2)
    y, choice = block(x), block[0].gate.active_adapter._choice
    assert choice.value is None
    down, block[0].down = block[0].down, nn.Identity()
    block(x)
    block[0].down = down
    assert choice.value is not None, "the forward ended before the last layer"
    copy = deepcopy(block)
    assert copy[0].gate.active_adapter._choice.value is None
    assert torch.equal(copy(x), y)
    with torch.no_grad():
        copy[0].gate.active_adapter.router.neg_()
        assert difference(copy(x), y) > 0.1, "the copy shares its own router"


@pytest.mark.parametrize("top_k", [1, 2])
@pytest.mark.parametrize("router", ["shared", "mlp"])
def test_the_task_loss_reaches_a_shared_router_and_no_expert_that_was_not_chosen(router, top_k):
    block, _, x = mixture_of(router, GatedMLP(12, 20), top_k)
    gate = block[0].gate.active_adapter
    with torch.no_grad():
        gate.router[3] = -9.0
    block(x.abs()).square().sum().backward()
    assert gate.router.grad.abs().max() > 1e-2
    for adapter in (m.active_adapter for m in block.modules() if isinstance(m, Adapted)):
        assert not adapter.A.grad[3].any()
        assert not adapter.B.grad[:, 3].any()
        assert adapter.A.grad.any()


@pytest.mark.parametrize("top_k", [1, 2])
def test_an_expert_that_no_token_chose_gets_no_gradient(top_k):
    base, adapter, x = trained_layer(top_k=top_k)
    x = x.abs()
    with torch.no_grad():
        adapter.router[3] = -9.0
    adapter(x, base(x), base).square().sum().backward()
    assert not adapter.A.grad[3].any()
    assert not adapter.B.grad[:, 3].any()
    assert all(adapter.A.grad[e].any() for e in (0, 1, 2, 4) if adapter.route(x, adapter.router)[0][..., e].any())
    assert adapter.A.grad.any()


def run_steps(model, change, steps=5):
    tree.freeze(model, ["**", *(f"!{new}" for new in change.new)])
    model.train()
    losses = []
    for step in Trainer(model, adamw(model, 0.01), next_token_loss).run(IDS for _ in range(steps)):
        losses.append(step.loss)
    return losses, {n: p.detach().clone() for n, p in model.named_parameters()}


@pytest.mark.parametrize("router", ["linear", "shared", "mlp"])
def test_a_single_expert_is_plain_lora_bit_for_bit(router):
    one, plain = build(), build()
    change = apply_change(one, "lora-experts", experts=1, top_k=1, rank=4, router=router)
    losses, weights = run_steps(one, change)
    plain_losses, plain_weights = run_steps(plain, attach(plain, rank=4))
    assert losses == plain_losses
    assert losses[-1] < losses[0]
    assert equal_states(weights, plain_weights)
    base, adapter, x = trained_layer(experts=1, top_k=1)
    lora = Adapter(base, CONFIG, torch.float32)
    lora.A, lora.B = nn.Parameter(adapter.A[0]), nn.Parameter(adapter.B[:, 0])
    assert torch.equal(adapter(x, base(x), base), lora(x, base(x), base)), "the probability is 1"


@pytest.mark.parametrize("router", ["linear", "shared", "mlp"])
def test_the_balance_loss_is_that_of_a_mixture_and_leaves_padding_out(router):
    model = build()
    change = apply_change(model, "lora-experts", rank=2, experts=4, balance=0.5, router=router)
    trained(model).train()
    torch.manual_seed(0)
    ids = torch.randint(50, (2, 12))
    total, count, metrics = model(ids, targets=ids)
    assert metrics["balance"][0] > 0
    model.eval()
    logits = []

    def watch(module, args):
        logits.append(F.linear(args[0], module.active_adapter.router).flatten(0, -2))

    adapted = [m for m in model.modules() if isinstance(m, Adapted)]
    routing = [m for m in adapted if getattr(m.active_adapter, "router", None) is not None]
    hooks = [m.register_forward_pre_hook(watch) for m in routing]
    without = model(ids, targets=ids)[0]
    expected = torch.stack([0.5 * load_balance(x, 2) for x in logits]).mean()
    assert len(logits) == len(hooks) == {"linear": len(change.places), "shared": 4, "mlp": 2}[router]
    assert abs(metrics["balance"][0] - count * expected) < 1e-5 * metrics["balance"][0]
    assert abs(total - without - count * expected) < 1e-5 * total
    padded, positions = F.pad(ids, (0, 5)), F.pad(torch.arange(12).expand(2, 12), (0, 5), value=-1)
    model.train()
    again = model(padded, positions, targets=F.pad(ids, (0, 5), value=-100))
    assert abs(again[2]["balance"][0] - metrics["balance"][0]) < 1e-5 * metrics["balance"][0]


def test_it_cannot_be_merged_or_written_for_others(tmp_path):
    model = build()
    checkpoint.save(model, tmp_path / "base", None, 32)
    apply_change(model, "lora-experts", rank=2, router="shared")
    refuses(r"^blocks\.0\.\S+: 'default' is a mixture of LoRA experts", merge, model)
    refuses("PEFT has no layout", peft_factors, model)
    refuses("depends on the input", model.blocks[0].mlp.gate.dense)
    augment_folder(tmp_path / "base", tmp_path / "out", "lora-experts", rank=2)
    refuses("depends on the input: it cannot be merged or exported", export, tmp_path / "out", tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


def test_rows_of_a_batch_have_adapters_of_their_own_unless_these_are_mlps():
    for router in ("linear", "shared", "mlp"):
        model = build()
        for name in ("a", "b"):
            apply_change(model, "lora-experts", rank=2, adapter=name, router=router)
            trained(model, name)
        expected = []
        for row, name in enumerate(("b", "a")):
            with adapter_active(model, name):
                expected.append(model(IDS[row : row + 1]))
        if router == "mlp":
            with pytest.raises(ValueError, match="adapters in experts, as MLPs"), row_adapters(model, ["b", "a"]):
                pass
        else:
            with row_adapters(model, ["b", "a"]):
                assert difference(model(IDS), torch.cat(expected)) < 1e-5


def test_beside_a_mixture_each_kind_of_router_has_a_mean_of_its_own():
    """So that LoRA experts beside it do not weaken the mixture's balance."""

    def balance(mixture, lora):
        model = build("mixtral")
        apply_change(model, "lora-experts", rank=2, experts=4, balance=lora)
        for place in tree.find(model, "blocks.*.mlp"):
            place.module.balance = mixture
        return model.train()(IDS, targets=IDS)[2]["balance"][0].item()

    both, alone, lora = balance(0.3, 0.5), balance(0.3, 0.0), balance(0.0, 0.5)
    assert min(alone, lora) > 0
    assert both == pytest.approx(alone + lora, rel=1e-6)
