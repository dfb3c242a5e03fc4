"""Each named part in each of its uses, and an own part through them all by documented names."""

from itertools import repeat

import pytest
import torch
from torch.func import functional_call

from conftest import refuses, refuses_command, run_dunes
from dunes import checkpoint, tree
from dunes.augment import apply_change, attach, merge, quantize
from dunes.flags import PARTS
from dunes.generate import generate
from dunes.measure import ranks
from dunes.models.initialise import initialise
from dunes.models.named_parts import build
from dunes.parts import Checkpointed
from dunes.runs.autosize import architecture_for
from dunes.runs.train_config import TrainConfig
from dunes.text import Tokenizer
from dunes.train import Trainer
from dunes.train.loss import next_token_loss
from small_models import add_noise

SIZE = {"vocab": 265, "dim": 64, "depth": 4, "context_length": 24}
CHOICES = [{name: choice} for name, choices in PARTS.items() for choice in choices[1:]]
ALL = [
    {},
    *CHOICES,
    {"mlp": "geglu", "block": "sandwich", "position": "alibi", "attention": "values", "kv": "half"},
]
names = lambda parts: "-".join(parts.values()) or "default"
each_part = pytest.mark.parametrize("parts", ALL, ids=names)
third = [pytest.param(p, marks=[pytest.mark.slow] * (i % 3 > 0)) for i, p in enumerate(ALL)]
IDS = torch.arange(40).view(2, 20) * 6 + 5


def made(parts, **sizes):
    return add_noise(initialise(build(**SIZE | sizes, **parts)), 0.05)


def loss(model):
    return model(IDS[:, :-1], targets=IDS[:, 1:])[0]


def difference(a, b):
    return (a - b).abs().max()


@pytest.mark.parametrize("parts", third, ids=names)
def test_a_part_is_built_on_meta_generates_from_a_cache_and_is_saved_and_loaded(parts, tmp_path):
    with torch.device("meta"):
        assert all(p.is_meta for p in build(**SIZE, **parts).parameters())
    model = made(parts).eval()
    tokens = [t.id for t in generate(model, IDS[0, :8].tolist(), max_tokens=8, context_length=24)]
    text = torch.tensor([[*IDS[0, :8].tolist(), *tokens]])
    with torch.no_grad():
        assert model(text)[0, 7:-1].argmax(-1).tolist() == tokens
    architecture = checkpoint.Architecture.of_function(build, **SIZE, **parts)
    checkpoint.save(model, tmp_path, Tokenizer.train("bytes", []), 24, architecture=architecture)
    assert torch.equal(checkpoint.load(tmp_path).model(IDS), model(IDS))


@pytest.mark.parametrize("parts", third, ids=names)
def test_gradients_are_those_of_finite_differences_in_float64_and_of_checkpointing(parts):
    model = made(parts, vocab=300, depth=2).double().eval()
    names, values = zip(*model.named_parameters(), strict=True)

    def function(*values):
        return functional_call(model, dict(zip(names, values, strict=True)), (IDS[:1, :6],)).square().mean()

    # Norms compute in float32, and so do gated activations: differences of 1e-6 would be rounded away.
    assert torch.autograd.gradcheck(function, values, fast_mode=True, eps=1e-3, atol=1e-3, rtol=1e-2)
    model = made(parts).train()
    want = torch.autograd.grad(loss(model), model.parameters())
    tree.replace(model, "blocks.*", Checkpointed)
    got = torch.autograd.grad(loss(model), model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("parts", third, ids=names)
def test_lora_is_attached_trained_and_merged_and_int8_stays_near(parts):
    model = made(parts)
    before = model(IDS).detach()
    change = attach(model, rank=2)
    tree.freeze(model, ["**", *(f"!{new}" for new in change.new)])
    adapters = [p for p in model.parameters() if p.requires_grad]
    for p in adapters:  # B is zero at first, and A would get no gradient
        p.data += 0.02 * torch.randn(p.shape, generator=torch.Generator().manual_seed(1))
    assert all(gradient.any() for gradient in torch.autograd.grad(loss(model), adapters))
    after = model(IDS).detach()
    assert difference(after, before) > 1e-4
    merge(model)
    assert difference(model(IDS), after) <= 1e-5 * after.abs().max()
    dense = made(parts).eval()
    exact = dense(IDS)
    quantize(dense, kind="int8")
    assert 0 < (dense(IDS) - exact).norm() <= 0.05 * exact.norm()


@pytest.mark.slow
@each_part
def test_a_part_compiles_as_one_graph(parts):
    model = made(parts).train()
    want = torch.autograd.grad(loss(model), model.parameters())
    torch._dynamo.reset()
    got = torch.autograd.grad(torch.compile(loss, fullgraph=True, backend="aot_eager")(model), model.parameters())
    # Eager gradients of up to 19 are themselves 1e-4 off those in float64.
    largest = max(b.abs().max() for b in want)
    assert max(difference(a, b) for a, b in zip(got, want, strict=True)) <= 1e-5 * largest


@each_part
def test_values_of_a_model_built_on_meta_are_those_of_one_that_is_not(parts):
    with torch.device("meta"):
        empty = build(**SIZE, **parts)
    filled, usual = initialise(empty.to_empty(device="cpu"), empty=True), initialise(build(**SIZE, **parts))
    for (name, a), b in zip(filled.named_parameters(), usual.parameters(), strict=True):
        assert torch.equal(a, b), name


def test_every_choice_is_another_model():
    usual = made({})
    for parts in ALL[1:]:
        model = made(parts)
        assert difference(model(IDS), usual(IDS)) > 1e-4, parts
        assert abs(loss(model) - loss(usual)) > 1e-4, parts


def test_unknown_parts_are_refused_in_one_line():
    refuses("part mlp=gate is unknown; expected relu2|gelu|gated|geglu", build, **SIZE, mlp="gate")
    refuses("part size=3 is unknown; expected mlp|norm", build, **SIZE, size="3")
    for words, texts in (
        ("'mlp' is unknown", ("mlp",)),
        ("'norm=layer' is given twice", ("norm=layer", "norm=layer")),
        ("'a.py:build' is unknown", ("a.py:build", "norm=layer")),
    ):
        refuses(words, TrainConfig, sources=("a",), parts=texts)
    refuses("--parts and --family both describe the whole model", TrainConfig, parts=("mlp=gated",), family="gpt2")
    refuses("--parts describes a new model, and --from", TrainConfig, parts=("mlp=gated",), base="a")


def test_a_folder_of_a_part_that_is_gone_is_refused_in_one_line(tmp_path):
    parts = {"attention": "values"}  # in no family, so that the card names the parts
    architecture = checkpoint.Architecture.of_function(build, **SIZE, **parts)
    save = (made(parts), tmp_path, Tokenizer.train("bytes", ()), SIZE["context_length"])
    checkpoint.save(*save, architecture=architecture)
    card = tmp_path / "dunes.json"
    card.write_text(card.read_text().replace('"attention": "values"', '"ahead": "one"'))
    refuses("dunes.json: part ahead=one is unknown; expected mlp", checkpoint.load, tmp_path)


def test_blocks_whose_order_matters_stay():
    for change, request in (("narrow", {"blocks": 3, "ids": IDS}), ("expand", {})):
        model = made({"attention": "values"}).eval()
        refuses("uses results of an earlier block", apply_change, model, change, **request)


RAISING = """
import sys

import torch

from dunes.models.named_parts import build


def raises(**size):
    raise RuntimeError("two\\nlines")


def reads(**size):
    return torch.ones(3).tolist()


def leaves(**size):
    sys.exit(0)


def other(**size):
    return torch.nn.Linear(3, 3)
"""


def test_what_an_own_function_raises_is_one_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(RAISING)

    def shape(name):
        return architecture_for(TrainConfig(sources=("a",), parts=(f"own.py:{name}",), size="2x64"), 64)

    refuses("--parts own.py:raises: RuntimeError: two lines", shape, "raises")
    refuses(r"--parts own.py:reads: NotImplementedError: .* \(it is called on torch's meta device", shape, "reads")
    refuses("--parts own.py:leaves: SystemExit: 0", shape, "leaves")
    refuses("--parts own.py:other: returned a Linear; expected a Decoder", shape, "other")
    assert shape("build").family == "own.py:build"
    monkeypatch.setattr(ranks, "count", lambda: 2)
    refuses("--parts own.py:build: torchrun cannot use a function", shape, "build")


OWN = '''
import torch
from torch import nn

from dunes.parts import Block, Decoder, Embedding, GatedMLP, RMSNorm, Rotary


class OwnAttention(nn.Module):
    """A single head whose keys are its queries, which are squared."""

    supports_packing = True

    def __init__(self, dim):
        super().__init__()
        self.q, self.v, self.out = (nn.Linear(dim, dim, bias=False) for _ in range(3))
        self.position = Rotary(dim)

    def forward(self, x, ctx, layer=0):
        q, v = self.q(x)[:, None], self.v(x)[:, None]  # (B, 1, T, dim)
        q = self.position(q.square(), ctx)
        k, v = ctx.put(layer, q, v)
        return self.out(ctx.attend(q, k, v)[:, 0])


def build(vocab, dim, depth, context_length):
    blocks = [
        Block(RMSNorm(dim), OwnAttention(dim), RMSNorm(dim), GatedMLP(dim, 2 * dim)) for _ in range(depth)
    ]
    return Decoder(Embedding(vocab, dim), blocks, RMSNorm(dim))
'''


@pytest.mark.slow
def test_a_function_that_the_command_names_needs_no_further_trust_in_it(code, tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    for count in ("PLACES", "CURSORS"):
        monkeypatch.setattr(f"dunes.completion.fit.{count}", (1.0, 8, 8))
    (tmp_path / "own.py").write_text(OWN)
    few = ("--batch", 2, "--context-length", 32, "--size", "2x64", "--tokenizer", "bytes", "--threads", 1)
    resume = ("train", "--out", "run", "--resume", "--override", "steps", "--steps")
    own = ("--parts", "own.py:build")
    for words in (("train", code, "--out", "run", *own, "--complete", *few, "--steps", 2), (*resume, 3, *own)):
        status, printed, error = command(*words)
        assert (status, error) == (0, "")
        assert "completion: " in printed
        assert "dunes eval run --trust-code --completion" in printed
    assert checkpoint.load(tmp_path / "run", build=built_by(OWN)).card["trained"]["steps"] == 3
    refuses_command("built by own.py:build; if you trust it, pass --trust-code", command(*resume, 4))
    refuses_command("built by own.py:build, which is not imported", command("generate", "run", "def"))
    assert not checkpoint.cards_trusted()


@pytest.mark.slow
def test_an_own_attention_is_trained_completes_compiles_learns_lora_is_saved_and_loaded(code, tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    size = ("--size", "2x64", "--tokenizer", "bytes", "--threads", "1")
    trained = run_dunes(
        "train", code, "--parts", "own.py:build", "--steps", "30", *size, "--out", "run", cwd=tmp_path
    )
    assert trained.returncode == 0, trained.stderr
    assert "dunes complete run --trust-code" in trained.stdout or "dunes serve run --trust-code" in trained.stdout
    refused = run_dunes("generate", "run", "def", cwd=tmp_path)
    assert "built by own.py:build, which is not imported automatically" in refused.stderr
    (tmp_path / "own.py").write_text(OWN.replace("GatedMLP(dim, 2 * dim)", "GatedMLP(dim, 2 * dim, torch.tanh)"))
    resume = ("train", "--resume", "--out", "run", "--steps", "40", "--override", "steps", "--trust-code")
    assert "the model" in run_dunes(*resume, cwd=tmp_path).stderr
    (tmp_path / "own.py").write_text(OWN)
    line = run_dunes("complete", "run", f"{code}/module_1.py:2:9", "--trust-code", cwd=tmp_path)
    assert line.returncode == 0, line.stderr
    compiled = run_dunes("compile", "run", "--trust-code", cwd=tmp_path)
    assert compiled.returncode == 0, compiled.stderr
    loaded = checkpoint.load(tmp_path / "run", build=built_by(OWN))
    change = attach(loaded.model, rank=4, where="blocks.**")
    tree.freeze(loaded.model, ["**", *(f"!{new}" for new in change.new)])
    adapters = [p for p in loaded.model.parameters() if p.requires_grad]
    assert len(adapters) == 2 * 2 * 6
    trainer = Trainer(loaded.model, torch.optim.AdamW(adapters, 0.01), next_token_loss)
    for _, _ in zip(range(5), trainer.run(repeat(IDS)), strict=False):
        pass
    want = loaded.model(IDS).detach()
    merge(loaded.model)
    checkpoint.save(
        loaded.model,
        tmp_path / "merged",
        loaded.tokenizer,
        loaded.context_length,
        architecture=loaded.architecture,
    )
    merged = checkpoint.load(tmp_path / "merged", build=built_by(OWN)).model
    assert difference(merged(IDS), want) <= 1e-5 * want.abs().max()
    assert difference(checkpoint.load(tmp_path / "run", build=built_by(OWN)).model(IDS), want) > 1e-3


def built_by(source):
    names = {"__name__": "own"}
    exec(source, names)
    return names["build"]
