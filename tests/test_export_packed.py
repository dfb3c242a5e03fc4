"""Quantized models as compressed-tensors stores them: read back bit for bit, and by its own code."""

import json

import pytest
import torch
from safetensors.torch import load_file

from adapters import IDS, build, difference
from dunes import checkpoint
from dunes.augment.quantized import Quantized
from dunes.cli.verbs import export
from dunes.ops import dynamic_int8
from dunes.runs.augment import augment_folder
from dunes.runs.export_packed import export_packed

pytestmark = pytest.mark.filterwarnings("ignore:.*tokenizer is None")

REQUESTS = [
    {"kind": "int8"},
    {"kind": "int4", "symmetric": True, "group": 32},
    {"kind": "int4", "group": 16},
    {"kind": "int4", "group": 0},
    {"kind": "int4", "symmetric": True, "group": 32, "override": ["blocks.0.**=int8"]},
    {"kind": "int8", "activations": "int8"},
    {"kind": "int4", "symmetric": True, "group": 32, "override": ["blocks.0.**=int8"], "activations": "int8"},
]


def quantized(tmp_path, family="llama", **request):
    checkpoint.save(build(family), tmp_path / "dense", None, 32)
    augment_folder(tmp_path / "dense", tmp_path / "small", "quantize", **request)
    return tmp_path / "small"


@pytest.mark.parametrize("request_", REQUESTS, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_packed_folder_is_read_back(tmp_path, request_, dtype):
    checkpoint.save(build().to(getattr(torch, dtype)), tmp_path / "dense", None, 32)
    augment_folder(tmp_path / "dense", tmp_path / "small", "quantize", **request_)
    line = export_packed(tmp_path / "small", tmp_path / "packed")
    assert ("--symmetric" in line) == (request_["kind"] == "int4" and "symmetric" not in request_)
    ours, back = (checkpoint.load(tmp_path / name).model for name in ("small", "packed"))
    exact = dtype == "float32" or "int8" not in str(request_)  # the scales of int8 are rounded
    for name, layer in ours.named_modules():
        if isinstance(layer, Quantized):
            weight = back.get_parameter(f"{name}.weight")
            assert weight.dtype == layer.dense().dtype
            assert difference(weight, layer.dense()) <= (0 if exact else 0.01)
    assert back(IDS).dtype == ours(IDS).dtype
    sizes = [(tmp_path / name / "model.safetensors").stat().st_size for name in ("dense", "packed")]
    assert sizes[1] < 0.7 * sizes[0]


@pytest.mark.parametrize("request_", REQUESTS, ids=str)
def test_their_own_code_unpacks_the_same_weights(tmp_path, request_):
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors.naive_quantized import IntQuantizationCompressor
    from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationConfig

    folder = quantized(tmp_path, **request_)
    export_packed(folder, tmp_path / "packed")
    config = json.loads((tmp_path / "packed" / "config.json").read_text())["quantization_config"]
    schemes = QuantizationConfig.model_validate(config).config_groups.values()
    files = load_file(tmp_path / "packed" / "model.safetensors")
    model, count = checkpoint.load(folder).model, 0
    for scheme in schemes:
        inputs = scheme.input_activations
        assert (inputs is not None) == ("activations" in request_ and scheme.weights.num_bits == 8)
        if inputs is not None:
            expected = (8, True, True, "token", "int-quantized")
            assert (inputs.num_bits, inputs.symmetric, inputs.dynamic, inputs.strategy, scheme.format) == expected
        their_form = PackedQuantizationCompressor if inputs is None else IntQuantizationCompressor
        for name in scheme.targets:
            parts = {k.removeprefix(f"{name}."): v for k, v in files.items() if k.startswith(f"{name}.")}
            theirs = their_form.decompress(parts, scheme)["weight"]
            place = name.replace("model.layers", "blocks").replace("self_attn.", "attn.").replace("_proj", "")
            ours = model.get_submodule(place.replace("attn.o", "attn.out")).dense()
            assert difference(theirs, ours) <= 1e-6 * ours.abs().max()
            count += 1
    assert count == 14


@pytest.mark.slow
@pytest.mark.parametrize("request_", [r for r in REQUESTS if r["kind"] == "int8" or "symmetric" in r], ids=str)
def test_transformers_opens_it(tmp_path, request_, monkeypatch):
    pytest.importorskip("compressed_tensors")
    from transformers import AutoModelForCausalLM

    folder = quantized(tmp_path, **request_)
    export_packed(folder, tmp_path / "packed")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "packed")
    monkeypatch.setattr(dynamic_int8, "round_tokens", their_round_tokens)
    limit = 1e-2 if "activations" in request_ else 1e-4  # a number between two codes may fall to either side
    assert difference(theirs(IDS).logits, checkpoint.load(folder).model(IDS)) <= limit


def their_round_tokens(x):
    """They divide a token's largest number by 127.5, where we divide by 127."""
    steps = x.abs().amax(-1, keepdim=True) / 127.5
    return (x / steps).round().clamp(-128, 127), steps


@pytest.mark.parametrize(
    ("family", "request_", "message"),
    [
        ("llama", {"kind": "nf4"}, "is NF4"),
        ("llama", {"kind": "int3"}, "has int8 and int4 with whole zero points"),
        ("llama", {"kind": "int4", "method": "hqq"}, "not with --method hqq"),
        ("llama", {"kind": "int4", "group": 24}, "32 inputs are no multiple of 24"),
        ("gpt2", {"kind": "int4"}, "gpt2 stores this matrix in another layout"),
    ],
)
def test_what_the_form_cannot_hold_is_refused(tmp_path, family, request_, message):
    folder = quantized(tmp_path, family, **request_)
    with pytest.raises(ValueError, match=message):
        export_packed(folder, tmp_path / "packed")
    assert not (tmp_path / "packed").exists()


def test_the_verb_and_a_plain_model(tmp_path, capsys):
    folder = quantized(tmp_path, kind="int8")
    export(str(folder), tmp_path / "packed", to="compressed-tensors")
    assert "14 layers packed" in capsys.readouterr().out
    with pytest.raises(ValueError, match="needs quantized layers"):
        export(str(tmp_path / "dense"), tmp_path / "other", to="compressed-tensors")
