"""Layers in int8 that round each token's inputs: what they compute, their record, and what stands on them."""

import json

import pytest
import torch
import torch.nn.functional as F

from adapters import IDS, build, difference
from dunes import checkpoint, tree
from dunes.augment import CHANGES, Change, apply_change, attach, dequantize, quantize, repeat_structure
from dunes.augment.quantize import VERSION, DynamicInt8, Int8, decide, describe
from dunes.checkpoint.verify import distance
from dunes.cli import augment
from dunes.generate import generate
from dunes.runs.augment import augment_folder
from dunes.runs.export import export

pytestmark = pytest.mark.filterwarnings("ignore:.*tokenizer is None")
W8A8 = {"kind": "int8", "activations": "int8"}


def rounded(model, **request):
    quantize(model, **W8A8, **request)
    return model


def with_rounded_inputs(model):
    """The same model with dense layers, whose inputs a hook rounds."""

    def round_inputs(layer, args):
        steps = args[0].abs().amax(-1, keepdim=True) / 127
        return ((args[0] / steps).round() * steps,)

    for place in dequantize(model):
        model.get_submodule(place).register_forward_pre_hook(round_inputs)
    return model


def test_a_model_computes_with_rounded_inputs():
    model, plain = rounded(build()), build()
    quantize(plain, kind="int8")
    for name, buffer in plain.named_buffers():
        assert torch.equal(buffer, model.get_buffer(name)), "the same weights"
    with torch.no_grad():
        got = model(IDS)
        moved = distance(plain(IDS), got)
    model.requires_grad_(False)
    expected = with_rounded_inputs(model)(IDS)
    assert difference(got, expected) <= 1e-4 * expected.abs().max()
    assert 1e-4 < moved < 0.03
    assert distance(expected, got) < moved / 50


def test_a_row_does_not_depend_on_its_neighbours():
    model = rounded(build()).requires_grad_(False)
    alone, together = model(IDS[:1]), model(torch.cat([IDS, IDS.flip(1)]))
    assert difference(together[:1], alone) <= 1e-5 * alone.abs().max()


def test_the_record_needs_this_version_and_plain_int8_does_not(monkeypatch, tmp_path):
    checkpoint.save(build(), tmp_path / "dense", None, 32)
    lines = augment_folder(tmp_path / "dense", tmp_path / "out", "quantize", **W8A8)
    assert "int8, activations in int8 by token, rounded to nearest" in lines
    loaded = checkpoint.load(tmp_path / "out")
    change = loaded.architecture.changes[0]
    assert (change.version, change.request["activations"]) == (VERSION, "int8") == (4, "int8")
    assert isinstance(loaded.model.blocks[0].attn.q, DynamicInt8)
    assert torch.equal(loaded.model(IDS), rounded(build())(IDS))
    moved = json.loads((tmp_path / "out" / "dunes.json").read_text())["augmented"]["logits_moved"]
    dense, plain = build(), build()
    quantize(plain, kind="int8")
    with torch.no_grad():
        assert moved > 1.2 * distance(dense(IDS), plain(IDS)), "the rounding of inputs counts"
    monkeypatch.setattr(CHANGES["quantize"], "VERSION", 3)
    with pytest.raises(ValueError, match="'quantize' of version 4 is not known; it needs a newer dunes"):
        checkpoint.load(tmp_path / "out")
    versions = [decide(build(), kind="int8").version, decide(build(), kind="int4").version]
    assert versions == [2, 3]
    assert "activations" not in decide(build(), kind="int8").request


@pytest.mark.parametrize("value", ["int4", [], 8])
def test_a_damaged_record_is_refused(value):
    change = decide(build(), **W8A8)
    change.request["activations"] = value
    with pytest.raises(ValueError, match="damaged"):
        repeat_structure(build(), Change.of(change.record()))


@pytest.mark.parametrize("kind", ["nf4", "int4", "int3", None])
def test_other_kinds_refuse_rounded_inputs_before_any_work(kind, tmp_path):
    checkpoint.save(build(), tmp_path / "dense", None, 32)
    message = rf"activations is 'int8', kind {kind or 'nf4'}; expected int8, and only with kind int8"
    with pytest.raises(ValueError, match=message):
        augment.quantize(str(tmp_path / "dense"), tmp_path / "out", kind=kind, activations="int8")
    assert not (tmp_path / "out").exists()
    with pytest.raises(ValueError, match=message):
        quantize(build(), kind=kind or "nf4", activations="int8")
    with pytest.raises(ValueError, match="activations is 'int4', kind int8; expected int8"):
        quantize(build(), kind="int8", activations="int4")


def test_other_kinds_of_an_override_do_not_round(tmp_path):
    model = build()
    change = quantize(model, kind="int4", group=32, override=["blocks.0.**=int8"], activations="int8")
    kinds = {p.name: type(p.module).__name__ for p in tree.places(model) if p.name in change.places}
    assert {name.startswith("blocks.0.") for name, kind in kinds.items() if kind == "DynamicInt8"} == {True}
    assert {*kinds.values()} == {"DynamicInt8", "GroupInt"}
    assert "activations in int8 by token" in describe(change)


def test_the_codes_of_gptq_are_those_without_rounded_inputs():
    ids = torch.randint(50, (24, 32), generator=torch.Generator().manual_seed(1))
    model, plain = build(), build()
    for m, more in ((model, {"activations": "int8"}), (plain, {})):
        apply_change(m, "quantize", kind="int8", method="gptq", ids=ids, **more)
    for name, buffer in plain.named_buffers():
        assert torch.equal(buffer, model.get_buffer(name))
    assert not torch.equal(model(IDS), plain(IDS))


def test_an_adapter_trains_on_rounded_inputs():
    model = rounded(build())
    change = attach(model, rank=2)
    tree.freeze(model, ["**", *(f"!{new}" for new in change.new)])
    model.train()
    reference = with_rounded_inputs(rounded(build()))
    expected = reference(IDS)
    y = model(IDS)
    assert difference(y, expected) <= 1e-4 * expected.abs().max(), "an untrained adapter changes nothing"
    y.logsumexp(-1).mean().backward()
    grads = {name: p.grad for name, p in model.named_parameters() if name.endswith(".B")}
    assert all(grad.abs().sum() > 0 for grad in grads.values())
    plain = build()
    quantize(plain, kind="int8")
    attach(plain, rank=2)
    plain(IDS).logsumexp(-1).mean().backward()
    for name, grad in grads.items():
        assert distance(plain.get_parameter(name).grad, grad) < 0.1, "the gradient passes the rounding"


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")
def test_training_on_rounded_inputs_is_one_graph():
    model = rounded(build())
    attach(model, rank=2)
    model.requires_grad_(False)
    layer, grads = model.blocks[0].attn.q, []
    for run in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
        x = torch.randn(3, 32, generator=torch.Generator().manual_seed(0)).requires_grad_()
        run(x).square().sum().backward()
        grads.append(x.grad)
    assert difference(*grads) <= 1e-5 * grads[0].abs().max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_and_autocast(dtype):
    torch.manual_seed(0)
    linear, x = torch.nn.Linear(96, 40), torch.randn(3, 96)
    layer = DynamicInt8(linear)
    layer.fill(linear.weight.detach())
    layer.requires_grad_(False)
    exact = layer(x)
    with torch.autocast("cpu", dtype):
        for gradient in (False, True):
            y = layer(x.clone().requires_grad_(gradient))
            assert y.dtype == dtype
            assert difference(y, exact) <= 4 * torch.finfo(dtype).eps * exact.abs().max() + 0.01
    half = layer(x.to(dtype))
    assert half.dtype == dtype
    assert torch.equal(half, y.detach())
    assert layer(x[:0]).shape == (0, 40)


def test_an_export_says_that_inputs_are_no_longer_rounded(tmp_path):
    checkpoint.save(build(), tmp_path / "dense", None, 32)
    augment_folder(tmp_path / "dense", tmp_path / "out", "quantize", **W8A8)
    lines = export(tmp_path / "out", tmp_path / "plain").lines()
    assert lines[-1] == "inputs of 14 layers were rounded to int8; here they are not"
    back = checkpoint.load(tmp_path / "plain").model
    assert isinstance(back.blocks[0].attn.q, torch.nn.Linear)
    assert torch.equal(
        back.blocks[0].attn.q.weight, checkpoint.load(tmp_path / "out").model.blocks[0].attn.q.dense()
    )


def test_a_model_with_rounded_inputs_keeps_its_cache(recwarn):
    model = rounded(build())
    assert issubclass(DynamicInt8, Int8)
    ids = [token.id for token in generate(model, [1, 2, 3], max_tokens=8, context_length=32)]
    assert not [w for w in recwarn if "may mix tokens" in str(w.message)]
    text = [1, 2, 3]
    for _ in range(8):
        text.append(int(model(torch.tensor([text]))[0, -1].argmax()))
    assert F.relu(torch.tensor(ids)).tolist() == text[3:]
