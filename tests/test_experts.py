"""Dense MLPs split into experts: a partition of the neurons, the dense model with all of them on, and back."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from adapters import difference
from conftest import refuses
from dunes import checkpoint, tree
from dunes.augment import apply_change, undo_change
from dunes.augment.experts import balanced_assignment, balanced_clusters, importances, shared_neurons
from dunes.checkpoint.trained_text import remember_sources
from dunes.data.sources import SPLIT_VERSION
from dunes.evaluate.text_loss import calibration_ids
from dunes.parts.decoder import auxiliary_losses, record_auxiliary
from dunes.parts.moe import NoisyGate
from dunes.runs.augment import augment_folder, save_changed, undo_folder
from dunes.text import Tokenizer
from own_parts import Wrapped
from test_upcycle import IDS, dense

pytestmark = pytest.mark.filterwarnings("ignore:.*no tokenizer")
TEXT = torch.randint(50, (24, 16), generator=torch.Generator().manual_seed(3))
PARTITIONS = [{"split": "random"}, {"split": "cluster"}, {"split": "importance", "ids": TEXT, "shared": 2}]


def neurons(change):
    return {place: torch.tensor(settings["neurons"]) for place, settings in change.places.items()}


@pytest.mark.parametrize("request_", PARTITIONS, ids=lambda r: r["split"])
def test_each_neuron_is_in_one_expert_and_all_experts_are_equally_large(request_):
    change = apply_change(dense(hidden=96), "experts", experts=6, **request_)
    for rows in neurons(change).values():
        assert rows.shape == (6, 16)
        assert rows.flatten().sort().values.tolist() == [*range(96)]
        assert all(row.tolist() == sorted(row.tolist()) for row in rows)
    places = [rows.tolist() for rows in neurons(change).values()]
    assert places[0] != places[1]


@pytest.mark.parametrize("scale", ["unbiased", "official"])
@pytest.mark.parametrize("request_", PARTITIONS, ids=lambda r: r["split"])
@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("llama", {"hidden": 96}),
        ("arcee", {"mlp_bias": True, "hidden": 96}),
        ("gpt2", {}),
        ("qwen3", {"hidden": 96}),
    ],
)
@torch.no_grad()
def test_all_experts_without_scores_are_the_dense_model(family, fields, request_, scale):
    model = dense(family, **fields)
    before = model(IDS)
    top_k, routed = 3, 8 - request_.get("shared", 0)
    apply_change(model, "experts", top_k=top_k, scale=scale, **request_)
    factor = routed if scale == "unbiased" else routed / top_k

    class AllOn(Wrapped):
        def forward(self, x):
            bias = 0 if self.inner.experts[0].down.bias is None else self.inner.experts[0].down.bias
            y = sum(e(x) - bias for e in self.inner.experts) / factor + bias
            return y + sum(e(x) for e in self.inner.shared or ())

    assert difference(model(IDS), before) > 1e-2
    tree.replace(model, "blocks.*.mlp", AllOn)
    assert difference(model(IDS), before) <= 1e-5


def test_the_folder_of_a_split_is_taken_back_until_it_is_trained(tmp_path):
    checkpoint.save(dense(hidden=96).bfloat16(), tmp_path / "dense", None, 32)
    augment_folder(tmp_path / "dense", tmp_path / "moe", "experts", split="cluster")
    undo_folder(tmp_path / "moe", tmp_path / "again", "experts")
    assert checkpoint.load(tmp_path / "again").architecture.family == "llama"
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("dense", "again")]
    assert files[0] == files[1]
    loaded = checkpoint.load(tmp_path / "moe")
    loaded.model.blocks[0].mlp.experts[3].up.weight.data[0, 0] += 1
    save_changed(loaded, (), tmp_path / "trained", lambda staged: {})
    words = r"cannot undo experts: blocks\.0 was trained"
    refuses(words, undo_folder, tmp_path / "trained", tmp_path / "no", "experts")
    refuses("cannot undo experts: it was never made", undo_folder, tmp_path / "dense", tmp_path / "no", "experts")


@pytest.mark.parametrize("damage", [{"places": {"blocks.0.mlp": {"neurons": [[96]] * 8}}}, {"request": {}}])
def test_a_damaged_record_of_a_split_is_not_undone(damage):
    model = dense(hidden=96)
    change = replace(apply_change(model, "experts"), **damage)
    refuses("the record of the change experts is damaged", undo_change, model, change)


def test_what_cannot_be_taken_back_exactly_is_refused():
    model = dense(hidden=96)
    change = apply_change(model, "experts", split="importance", ids=TEXT)
    refuses("some neurons are in several experts or none", undo_change, model, change)
    model = dense(hidden=96)
    change = apply_change(model, "experts", experts=6, top_k=2)
    refuses("multiplying by 6 rounded .*only a power of two", undo_change, model, change)


def test_the_noise_is_there_in_training_alone_and_the_gate_learns():
    torch.manual_seed(0)
    gate = NoisyGate(16, 4, 2)
    x = torch.randn(512, 16)
    assert torch.equal(gate.eval()(x), gate(x))
    assert not torch.equal(gate.train()(x), gate(x))
    nn.init.zeros_(gate.noise.weight)
    deviation = (gate(x) - gate.eval()(x)).detach().std()
    assert float(deviation) == pytest.approx(float(F.softplus(torch.zeros(()))) + 0.01, rel=0.05)


def test_the_load_is_the_chance_of_being_chosen_again():
    torch.manual_seed(0)
    from dunes.parts.moe import _chances

    logits, deviation = torch.randn(6, 5), torch.rand(6, 5) + 0.5
    noisy = logits + torch.randn(6, 5) * deviation
    chances = _chances(logits, noisy, deviation, 2)
    for expert in range(5):
        drawn = noisy.repeat(20_000, 1, 1)
        drawn[..., expert] = logits[:, expert] + torch.randn(20_000, 6) * deviation[:, expert]
        chosen = (drawn.topk(2).indices == expert).any(-1).float().mean(0)
        assert difference(chosen, chances[:, expert]) < 0.02
    assert torch.equal(_chances(logits, noisy, deviation, 5), torch.ones(6, 5)), "of all experts each is chosen"


def test_padding_does_not_count_in_the_balance_of_the_gate():
    torch.manual_seed(0)
    gate = NoisyGate(16, 4, 2).train()
    rows = torch.stack([torch.randn(10, 4), torch.randn(10, 4), torch.rand(10, 4) + 0.1], 1)
    padded = torch.cat([rows, torch.full((3, 3, 4), torch.nan)]).requires_grad_()
    real = torch.arange(13) < 10
    losses = gate.auxiliary_losses([rows], None)["balance"], gate.auxiliary_losses([padded], real)["balance"]
    assert difference(*losses) <= 1e-6
    losses[1].backward()
    assert padded.grad.isfinite().all()
    even = torch.stack([torch.zeros(8, 4), torch.eye(4).repeat(2, 1), torch.ones(8, 4)], 1)
    skewed = torch.stack([torch.zeros(8, 4), torch.eye(4)[[0] * 8], torch.ones(8, 4)], 1)
    assert gate.auxiliary_losses([even], None)["balance"] < gate.auxiliary_losses([skewed], None)["balance"]


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("gate", ["linear", "noisy"])
def test_the_routers_learn_from_the_loss_and_the_balance(gate, biased):
    model = dense()
    change = apply_change(model, "experts", gate=gate)
    if biased:
        apply_change(model, "routing", bias_rate=0.001)
    routers = [p for n, p in model.named_parameters() if tree.matches(change.new, n)]
    assert len(routers) == (2 if gate == "linear" else 6)
    model.train()
    with record_auxiliary(model) as recorded:
        loss = F.cross_entropy(model(IDS)[:, :-1].flatten(0, 1), IDS[:, 1:].flatten())
        losses, metrics = auxiliary_losses(recorded)
    load, count = metrics["expert_load"]
    assert load.sum(1).tolist() == [2 * IDS.numel()] * len(model.blocks), "of each layer, once"
    assert count == IDS.numel()
    for each in (loss, losses["balance"]):
        assert all(g is not None and float(g.abs().max()) > 0 for g in
                   torch.autograd.grad(each, routers, retain_graph=True, allow_unused=True))  # fmt: skip


def test_planted_clusters_are_found_with_equal_sizes():
    torch.manual_seed(0)
    directions = torch.eye(8)[:4]
    labels = torch.arange(4).repeat_interleave(10)[torch.randperm(40)]
    rows = (directions[labels] + 0.05 * torch.randn(40, 8)) * torch.rand(40, 1).add(0.1)
    tried = (balanced_clusters(rows, 4, torch.Generator().manual_seed(seed)) for seed in range(4))
    mixed = lambda clusters: len({*zip(clusters.tolist(), labels.tolist(), strict=True)})
    clusters = min(tried, key=mixed)
    assert torch.bincount(clusters).tolist() == [10] * 4
    assert mixed(clusters) == 4
    assert torch.bincount(balanced_assignment(torch.randn(11, 3))).sort().values.tolist() in ([3, 4, 4], [3, 3, 5])


def test_importance_is_activation_times_gradient():
    model = dense(hidden=32)
    for p in model.parameters():
        p.requires_grad_(False)  # a frozen model has importances too
    mlps = {p.name: p.module for p in tree.find(model, "blocks.*.mlp")}
    total = importances(model, mlps, TEXT, 1, torch.Generator().manual_seed(0))
    place = "blocks.0.mlp"
    mlp, seen = mlps[place], []

    class Scaled(nn.Module):
        def forward(self, x):
            seen.append(nn.Parameter(torch.ones_like(x)))
            return mlp.down_(x * seen[-1])

    mlp.down_, mlp.down = mlp.down, Scaled()
    loss = F.cross_entropy(model(TEXT)[:, :-1].flatten(0, 1), TEXT[:, 1:].flatten(), reduction="sum")
    # the gradient of a factor of one on an activation is activation times gradient
    expected = torch.autograd.grad(loss, seen)[0].abs().sum((0, 1))
    assert difference(total[place][0], expected) <= 1e-4 * expected.max()
    assert [*total] == [*mlps]


def test_neurons_that_all_groups_want_are_shared():
    scores = torch.rand(3, 16) * 0.1
    scores[:, [2, 5, 7, 11]] = 5.0
    for group, own in enumerate(([0, 1, 3, 4], [6, 8, 9, 10], [12, 13, 14, 15])):
        scores[group, own] += 1.0
    rows = shared_neurons(scores, 4)
    assert sorted(rows[0].tolist()) == [2, 5, 7, 11]
    assert [sorted(row.tolist()) for row in rows[1:]] == [[0, 1, 3, 4], [6, 8, 9, 10], [12, 13, 14, 15]]


def test_calibration_text_is_the_training_text_or_a_file(tmp_path):
    text = "Before we proceed any further, hear me speak.\n" * 300
    (tmp_path / "play.txt").write_text(text)
    tokenizer = Tokenizer.train("chars", [text], 0)
    play = str(tmp_path / "play.txt")
    trained = {"trained": {"sources": [play], "split": "tails", "split_version": SPLIT_VERSION}}
    remember_sources((play,), False)
    checkpoint.save(dense(hidden=96), tmp_path / "dense", tokenizer, 32, trained)
    loaded = checkpoint.load(tmp_path / "dense")
    ids = calibration_ids(loaded)
    assert ids.shape == (64, 32)
    assert torch.equal(ids, calibration_ids(loaded, [play]))
    whole = tokenizer.encode(text)
    assert ids[0].tolist() == whole[:32]
    ends = (whole[i : i + 32] for i in range(len(whole) * 7 // 10, len(whole) * 8 // 10))
    assert ids[-1].tolist() in ends, "tails of a fifth"
    lines = augment_folder(tmp_path / "dense", tmp_path / "moe", "experts", calibration=(), split="importance")
    assert "importance" in lines[0]
