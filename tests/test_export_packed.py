"""Quantized models as compressed-tensors stores them: read back bit for bit, and by its own code."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from adapters import IDS, build, difference
from conftest import refuses
from dunes import checkpoint
from dunes.augment.quantized import Quantized, unpack
from dunes.checkpoint.formats.compressed_tensors import write as export_packed
from dunes.cli.verbs import export
from dunes.runs.augment import augment_folder

pytestmark = pytest.mark.filterwarnings("ignore:.*tokenizer is None")

REQUESTS = [
    {"kind": "int8"},
    {"kind": "int4", "symmetric": True, "group": 32},
    {"kind": "int4", "group": 16},
    {"kind": "int4", "group": 0},
    {"kind": "int4", "symmetric": True, "group": 32, "override": ["blocks.0.**=int8"]},
]


def quantized(tmp_path, family="llama", **request):
    checkpoint.save(build(family), tmp_path / "dense", None, 32)
    augment_folder(tmp_path / "dense", tmp_path / "small", "quantize", **request)
    return tmp_path / "small"


@pytest.mark.parametrize(
    ("request_", "dtype"),
    [*((request, "float32") for request in REQUESTS[1:]), *((REQUESTS[i], "bfloat16") for i in (0, 4))],
)
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
    from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationConfig

    folder = quantized(tmp_path, **request_)
    export_packed(folder, tmp_path / "packed")
    config = json.loads((tmp_path / "packed" / "config.json").read_text())["quantization_config"]
    schemes = QuantizationConfig.model_validate(config).config_groups.values()
    model = checkpoint.load(folder).model
    assert all(scheme.input_activations is None for scheme in schemes)
    weight_at = lambda place: model.get_submodule(place).dense()
    assert_unpacked(PackedQuantizationCompressor, schemes, tmp_path / "packed", weight_at)


def assert_unpacked(compressor, schemes, folder, weight_at):
    """All layers unpacked by this class of theirs have our weights."""
    files, names = load_file(folder / "model.safetensors"), [(s, name) for s in schemes for name in s.targets]
    assert len(names) == 14
    for scheme, name in names:
        parts = {k.removeprefix(f"{name}."): v for k, v in files.items() if k.startswith(f"{name}.")}
        theirs, ours = compressor.decompress(parts, scheme)["weight"], weight_at(place_of(name))
        assert difference(theirs, ours) <= 1e-6 * ours.abs().max()


def place_of(name):
    """Our place of a layer of theirs."""
    place = name.replace("model.layers", "blocks").replace("self_attn.", "attn.").replace("_proj", "")
    return place.replace("attn.o", "attn.out")


INPUTS = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": True, "strategy": "token"}
"""As the layers of others' folders round their inputs."""


def with_plain_codes(folder, inputs):
    """Store the layers of int8 in `int-quantized`, as others' folders do; returns the settings of their group."""
    files = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    groups = config["quantization_config"]["config_groups"].values()
    (group,) = (g for g in groups if g["weights"]["num_bits"] == 8)
    for name in group["targets"]:
        packed, (_, columns) = files.pop(f"{name}.weight_packed"), files.pop(f"{name}.weight_shape").tolist()
        codes = unpack(packed.view(torch.uint8), 8, columns).int() - 128
        files[f"{name}.weight"] = codes.to(torch.int8)
    group |= {"format": "int-quantized", "input_activations": inputs}
    config["quantization_config"]["format"] = "mixed-precision" if len(groups) > 1 else "int-quantized"
    save_file(files, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "dunes.json").unlink()  # it has the digests of the other files
    return config["quantization_config"], group


@pytest.mark.parametrize("inputs", [None, INPUTS], ids=["weights", "weights and inputs"])
@pytest.mark.parametrize("request_", [r for r in REQUESTS if "int8" in str(r)], ids=str)
def test_codes_of_int8_that_are_not_packed_are_read(tmp_path, request_, inputs):
    folder = quantized(tmp_path, **request_)
    export_packed(folder, tmp_path / "packed")
    _, group = with_plain_codes(tmp_path / "packed", inputs)
    ours, back = (checkpoint.load(path).model for path in (folder, tmp_path / "packed"))
    places = [name for name, layer in ours.named_modules() if isinstance(layer, Quantized)]
    assert len(places) == 14
    assert {*map(place_of, group["targets"])} <= {*places}
    assert all(torch.equal(back.get_parameter(f"{p}.weight"), ours.get_submodule(p).dense()) for p in places)
    assert difference(back(IDS), ours(IDS)) <= 1e-5


@pytest.mark.parametrize("inputs", [None, INPUTS], ids=["weights", "weights and inputs"])
def test_codes_that_are_not_packed_are_those_of_their_own_code(tmp_path, inputs):
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors.naive_quantized import IntQuantizationCompressor
    from compressed_tensors.quantization import QuantizationConfig

    export_packed(quantized(tmp_path, kind="int8"), tmp_path / "packed")
    config, _ = with_plain_codes(tmp_path / "packed", inputs)
    schemes = QuantizationConfig.model_validate(config).config_groups.values()
    model = checkpoint.load(tmp_path / "packed").model
    weight_at = lambda place: model.get_parameter(f"{place}.weight")
    assert_unpacked(IntQuantizationCompressor, schemes, tmp_path / "packed", weight_at)


@pytest.mark.parametrize("change", [lambda scale: scale[1:], lambda scale: scale[:, 0], None])
def test_scales_that_do_not_fit_plain_codes_are_refused(tmp_path, change):
    export_packed(quantized(tmp_path, kind="int8"), tmp_path / "packed")
    with_plain_codes(tmp_path / "packed", None)
    file = tmp_path / "packed" / "model.safetensors"
    files = load_file(file)
    name = next(key for key in files if key.endswith("_scale"))
    scale = files.pop(name)
    save_file(files if change is None else files | {name: change(scale).contiguous()}, file)
    refuses("its scales do not fit int8 by row; download the file again", checkpoint.load, tmp_path / "packed")


@pytest.mark.slow
@pytest.mark.parametrize("request_", [r for r in REQUESTS if r["kind"] == "int8" or "symmetric" in r], ids=str)
def test_transformers_opens_it(tmp_path, request_):
    pytest.importorskip("compressed_tensors")
    from transformers import AutoModelForCausalLM

    folder = quantized(tmp_path, **request_)
    export_packed(folder, tmp_path / "packed")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "packed")
    assert difference(theirs(IDS).logits, checkpoint.load(folder).model(IDS)) <= 1e-4


@pytest.mark.parametrize(
    ("family", "request_", "message"),
    [
        ("llama", {"kind": "nf4"}, "is NF4"),
        ("llama", {"kind": "int3"}, "supports int8 and int4 with integer zero points"),
        ("llama", {"kind": "int4", "group": 24}, "has 32 inputs; compressed-tensors needs a multiple of 24"),
        ("gpt2", {"kind": "int4"}, "gpt2 stores this matrix in another layout"),
    ],
)
def test_what_the_form_cannot_hold_is_refused(tmp_path, family, request_, message):
    refuses(message, export_packed, quantized(tmp_path, family, **request_), tmp_path / "packed")
    assert not (tmp_path / "packed").exists()


def test_the_verb_and_a_plain_model(tmp_path, capsys):
    export(str(quantized(tmp_path, kind="int8")), tmp_path / "packed", to="compressed-tensors")
    assert "14 layers packed" in capsys.readouterr().out
    refuses("needs quantized layers", export, str(tmp_path / "dense"), tmp_path / "other", to="compressed-tensors")
