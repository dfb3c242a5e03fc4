"""Multi-token prediction: losses as a loop over documents computes them, and a trunk that is as without."""

import json
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from conftest import refuses, refuses_command
from dunes import checkpoint, tree
from dunes.augment import apply_change, attach
from dunes.data.batches import collate
from dunes.generate import generate
from dunes.models.initialise import initialise
from dunes.models.named_parts import build
from dunes.ops import cross_entropy
from dunes.ops.cross_entropy import IGNORE
from dunes.parts import Block, Checkpointed, Decoder, Embedding, ForwardContext, RollingCache, cache_for, decoder
from dunes.parts.decoder import MultiTokenPredictor
from dunes.runs.autosize import active_parameters, flops, meta_model
from dunes.runs.memory import Shape, train_allocations
from dunes.runs.train_config import TrainConfig
from dunes.text import Tokenizer
from own_parts import Average, ShiftedLinear
from small_models import add_noise
from test_packing import CONTEXT, EXAMPLES, VOCAB

IDS = torch.arange(40).view(2, 20) * 7 % VOCAB
ROWS = [[EXAMPLES[i] for i in row] for row in ((0, 1, 2), (3, 9, 5), (4,), (7, 6))]


def made(**parts):
    return add_noise(initialise(build(VOCAB, 32, 2, CONTEXT, **{"ahead": "two", "norm": "layer"} | parts)), 0.1)


def own(attention=Average, head=None):
    """A model of parts that may mix tokens."""
    torch.manual_seed(0)
    blocks = [Block(nn.LayerNorm(32), attention(32), nn.LayerNorm(32), nn.Linear(32, 32)) for _ in range(4)]
    norms = lambda: [nn.LayerNorm(32) for _ in "ab"]
    ahead = [MultiTokenPredictor(32, *norms(), block, nn.LayerNorm(32)) for block in blocks[2:]]
    return Decoder(Embedding(VOCAB, 32), blocks[:2], nn.LayerNorm(32), head, ahead=ahead, ahead_weight=0.7)


@pytest.fixture
def wide(monkeypatch):
    """Everything in float64, also what is float32 in models of float64."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    monkeypatch.setattr(decoder, "linear_cross_entropy", cross_entropy.plain)
    return monkeypatch


def documents(ids, targets, positions):
    """The ids and targets (1, length) of each document, one after another."""
    found = []
    for row in zip(ids.tolist(), targets.tolist(), positions.tolist(), strict=True):
        last = None
        for token, target, position in zip(*row, strict=True):
            if position >= 0:
                if last is None or position != last + 1:
                    found.append(([], []))
                found[-1][0].append(token)
                found[-1][1].append(target)
            last = position if position >= 0 else None
    return [(torch.tensor([a]), torch.tensor([b])) for a, b in found]


def nats(model, x, targets):
    return F.cross_entropy(model.logits(x)[0], targets[0], ignore_index=IGNORE, reduction="sum")


def by_loop(model, texts):
    """The loss and its parts, one document at a time: depth k reads the tokens from k on."""
    first, count, sums, counts = 0.0, 0, [0.0] * len(model.ahead), [0] * len(model.ahead)
    for ids, targets in texts:
        ctx = ForwardContext.of(ids)
        x = tokens = model.embed(ids, ctx)
        for layer, block in enumerate(model.blocks):
            x = block(x, ctx, layer)
        first, count = first + nats(model, model.norm(x), targets), count + (targets != IGNORE).sum()
        for k, part in enumerate(list(model.ahead)[: ids.shape[1] - 1], 1):
            x = part.join(torch.cat([part.state_norm(x[:, :-1]), part.token_norm(tokens[:, k:])], -1))
            shorter = ForwardContext.of(x)
            shorter.carried = {name: value[:, :, :-k] for name, value in ctx.carried.items()}
            x = part.block(x, shorter, len(model.blocks) + k - 1)
            sums[k - 1] += nats(model, part.norm(x), targets[:, k:])
            counts[k - 1] += (targets[:, k:] != IGNORE).sum()
    means = [total / n for total, n in zip(sums, counts, strict=True)]
    return first + count * model.ahead_weight * sum(means) / len(means), count, means, counts


MODELS = {
    "plain": made,
    "one": lambda: made(ahead="one", norm="rms"),
    "untied": lambda: made(head="untied", position="learned"),
    "capped": lambda: made(logits="capped", window="alternating"),
    "values": lambda: made(attention="values", block="sandwich", position="alibi"),
    "own": own,
    "own head": lambda: own(head=ShiftedLinear(32, VOCAB)),
}


@pytest.mark.parametrize(
    ("name", "way"),
    [*((name, "flattened") for name in MODELS)]
    + [(name, way) for name in ("plain", "values", "own") for way in ("masked", "rows", "by length")],
)
@pytest.mark.filterwarnings("ignore:.* may mix tokens")
def test_the_loss_and_its_gradients_are_those_of_a_loop_over_documents(name, way, wide):
    model = MODELS[name]().double().train()
    batch = collate(ROWS, CONTEXT, full=True)
    if way == "rows":
        batch = (IDS, torch.where(IDS % 5 == 0, IGNORE, IDS.roll(-1, 1)))
    elif way == "masked":
        wide.setattr(decoder, "readable_on_host", lambda _: False)
    elif way == "by length":
        wide.setattr(decoder, "supports_packing", lambda _: False)
    ids, targets, *positions = batch
    wanted = documents(ids, targets, *positions or [torch.arange(20).expand(2, 20)])
    want, count, means, counts = by_loop(model, wanted)
    got, number, metrics = model(ids, *positions, targets=targets)
    assert number == count
    assert abs(got / want - 1) <= 1e-9
    for k, (mean, n) in enumerate(zip(means, counts, strict=True), 1):
        total, metric_count = metrics[f"ahead_{k}"]
        assert metric_count == n
        assert abs(total / n - mean) <= 1e-9
    for a, b in zip(*(torch.autograd.grad(x, model.parameters()) for x in (got, want)), strict=True):
        assert (a - b).abs().max() <= 1e-9 * max(1, b.abs().max())


@pytest.mark.parametrize("parts", [{}, {"window": "alternating"}, {"head": "untied", "logits": "capped"}])
def test_evaluation_and_generation_are_bit_for_bit_those_of_the_trunk(parts):
    model, plain = made(**parts).eval(), made(ahead="none", **parts).eval()
    plain.load_state_dict({k: v for k, v in model.state_dict().items() if not k.startswith("ahead.")})
    batch = collate(ROWS, CONTEXT, full=True)
    for other in (plain, model.trunk.eval()):
        for ids, targets, *positions in (batch, (IDS[:, :-1], IDS[:, 1:])):
            (a, n, none), (b, m, _) = (x(ids, *positions, targets=targets) for x in (model, other))
            assert torch.equal(a, b)
            assert (n, none) == (m, {})
        assert torch.equal(model.train()(IDS), other.train()(IDS))
        model.eval(), other.eval()
        texts = [[t.id for t in generate(x, [1, 2], max_tokens=9, context_length=CONTEXT)] for x in (model, other)]
        assert texts[0] == texts[1]
    loss = model.train()(IDS[:, :-1], targets=IDS[:, 1:])[0]
    assert loss > 1.2 * plain.train()(IDS[:, :-1], targets=IDS[:, 1:])[0]
    assert model.trunk is not model
    assert plain.trunk is plain


def test_a_rolling_cache_is_chosen_by_the_windows_of_the_blocks():
    model = made(ahead="one")
    for block in model.blocks:
        block.attn.window = 6
    assert isinstance(cache_for(model, 1, CONTEXT), RollingCache)
    model.ahead[0].block.attn.window = 7
    assert cache_for(model, 1, CONTEXT).window == 6


def test_first_values_of_the_trunk_are_those_of_a_model_without():
    model, plain = (initialise(build(VOCAB, 32, 2, CONTEXT, head="untied", ahead=n)) for n in ("two", "none"))
    for name, value in plain.state_dict().items():
        assert torch.equal(model.state_dict()[name], value)
    assert not model.ahead[1].block.attn.out.weight.any()


def loss_of(model, ids, targets, positions):
    return model(ids, positions, targets=targets)[0]


def loss(model):
    return loss_of(model, *collate(ROWS, CONTEXT, full=True))


def test_checkpointing_and_adapters():
    model = made().train()
    want = torch.autograd.grad(loss(model), model.parameters())
    places = tree.replace(model, ("blocks.*", "ahead.*"), Checkpointed)
    assert len(places) == 4
    got = torch.autograd.grad(loss(model), model.parameters())
    assert all(map(torch.equal, got, want))
    model = made().train()
    change = attach(model, rank=2, where="ahead.**")
    assert "ahead.1.join" in change.places
    adapters = [p for name, p in model.named_parameters() if tree.matches(change.new, name)]
    assert all(g.any() for g in torch.autograd.grad(loss(model), adapters[1::2]))


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_packed_rows_compile_as_one_graph(backend):
    model = made().train()
    want = torch.autograd.grad(loss(model), model.parameters())
    torch._dynamo.reset()
    compiled = torch.compile(loss_of, fullgraph=True, backend=backend)
    got = torch.autograd.grad(compiled(model, *collate(ROWS, CONTEXT, full=True)), model.parameters())
    assert max((a - b).abs().max() / (1 + b.abs().max()) for a, b in zip(got, want, strict=True)) <= 1e-4


@pytest.mark.parametrize(
    ("change", "request_"),
    [("narrow", {"heads": 2, "neurons": 50}), ("narrow", {"blocks": 2}), ("expand", {"blocks": 1})],
)
def test_blocks_are_changed_and_what_predicts_further_stays(change, request_):
    model = initialise(build(VOCAB, 64, 3, CONTEXT, ahead="one"))
    add_noise(model, 0.05).eval()
    before = {k: v.clone() for k, v in model.state_dict().items() if k.startswith("ahead.")}
    if change == "narrow":
        request_ = request_ | {"ids": IDS}
    record = apply_change(model, change, **request_)
    assert not [place for place in record.places if place.startswith("ahead")]
    assert all(torch.equal(model.state_dict()[k], v) for k, v in before.items())
    grads = torch.autograd.grad(loss(model.train()), [*model.ahead.parameters()])
    assert all(g.any() for g in grads)


def test_counts_and_estimates():
    config = TrainConfig(sources=("a",), size="2x64", tokenizer="bytes", parts=("ahead=two",))
    model = meta_model(config)
    plain = meta_model(TrainConfig(sources=("a",), size="2x64", tokenizer="bytes"))
    assert active_parameters(model) == tree.count(plain) == active_parameters(plain)
    one = sum(6 * m.in_features * m.out_features for m in tree.linears(model.ahead[0]))
    further = 2 * (one + 12 * 64 * 32 + 6 * 64 * model.embed.token.num_embeddings)
    assert flops(model, 32) == flops(model.trunk, 32) + further
    for checkpointing in (False, True):
        shape = Shape(4, 32, checkpointing=checkpointing)
        plain, guess, actual = (
            train_allocations(partial(build, 300, 64, 2, 32, ahead=n), shape, estimated).peak
            for n, estimated in (("none", True), ("two", True), ("two", False))
        )
        assert guess == pytest.approx(actual, rel=0.02)
        assert guess > 1.5 * plain


def test_a_folder_of_it_is_dunes_own_and_says_why(tmp_path):
    plain = made(norm="rms", mlp="relu2", ahead="none")
    model = made(norm="rms", mlp="relu2", ahead="one")
    assert not isinstance(checkpoint.hf_config_of(plain, CONTEXT), str)
    assert "it has modules that predict further ahead" in checkpoint.hf_config_of(model, CONTEXT)
    architecture = checkpoint.Architecture.of_function(build, vocab=VOCAB, dim=32, depth=2, context_length=CONTEXT)
    save = (model, tmp_path / "a", Tokenizer.train("bytes", []), CONTEXT)
    refuses("ahead", checkpoint.save, *save, architecture=architecture)
    assert not isinstance(checkpoint.hf_config_of(model.trunk, CONTEXT), str)


@pytest.mark.slow
def test_the_command_trains_what_predicts_further(code, tmp_path, command):
    run = tmp_path / "run"
    words = ("--parts", "ahead=two", "--size", "2x64", "--tokenizer", "bytes", "--threads", "1")
    status, *_ = command("train", code, "--steps", "60", "--no-complete", "--out", run, *words)
    assert status == 0
    steps = [r for r in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()) if "loss" in r]
    for name in ("ahead_1", "ahead_2"):
        assert steps[-1]["metrics"][name] < 0.7 * steps[0]["metrics"][name]
    model = checkpoint.load(run).model
    assert len(model.ahead) == 2
    for form in ("a.gguf", "--to", "gguf"), ("hf",):
        refuses_command("predict further ahead in training; save `model.trunk`", command("export", run, *form))
    loaded = checkpoint.load(run)
    checkpoint.save(loaded.model.trunk, tmp_path / "plain", loaded.tokenizer, loaded.context_length)
    plain = checkpoint.load(tmp_path / "plain")
    assert plain.architecture.family == "arcee"
    assert torch.equal(plain.model(IDS), model(IDS))
