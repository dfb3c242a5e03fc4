"""Folders that transformers wrote with bitsandbytes: every dense weight as bitsandbytes dequantizes it."""

import logging
import shutil
import sys
import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file

from adapters import IDS
from conftest import change_json, refuses
from dunes import checkpoint

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*tokenizer is None"),
    pytest.mark.skipif(sys.platform != "linux", reason="bitsandbytes is tested on Linux"),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """One for each kind of quantization, with the logits and the dequantized weights of transformers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.getLogger("bitsandbytes").setLevel(logging.CRITICAL)
        from bitsandbytes.functional import dequantize_4bit
        from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        root, results = tmp_path_factory.mktemp("bnb"), {}
        sizes = {"hidden_size": 64, "intermediate_size": 152, "num_attention_heads": 2, "num_key_value_heads": 1}
        LlamaForCausalLM(LlamaConfig(vocab_size=50, num_hidden_layers=2, **sizes)).save_pretrained(root / "dense")
        for kind, double, dtype in (
            ("nf4", False, "float32"),
            ("nf4", True, "bfloat16"),
            ("fp4", False, "float32"),
        ):
            config = BitsAndBytesConfig(
                load_in_4bit=True, bnb_4bit_quant_type=kind, bnb_4bit_use_double_quant=double,
                bnb_4bit_compute_dtype=getattr(torch, dtype),
            )  # fmt: skip
            model = AutoModelForCausalLM.from_pretrained(
                root / "dense", quantization_config=config, dtype=getattr(torch, dtype)
            )
            model.save_pretrained(root / f"{kind}-{double}")
            weights = {n: p for n, p in model.named_parameters() if hasattr(p, "quant_state")}
            dense = {n: dequantize_4bit(p.data, p.quant_state) for n, p in weights.items()}
            results[f"{kind}-{double}"] = root / f"{kind}-{double}", dense, model(IDS).logits.detach()
    return results


OURS = {"self_attn.q_proj": "attn.q", "self_attn.o_proj": "attn.out", "mlp.down_proj": "mlp.down"}


@pytest.mark.parametrize("kind", ["nf4-False", "nf4-True", "fp4-False"])
def test_weights_are_those_that_bitsandbytes_dequantizes(folders, kind):
    folder, dense, logits = folders[kind]
    model = checkpoint.load(folder).model
    assert len(dense) == 14
    for theirs, ours in OURS.items():
        for block in range(2):
            expected = dense[f"model.layers.{block}.{theirs}.weight"]
            weight = model.get_parameter(f"blocks.{block}.{ours}.weight")
            assert weight.dtype == expected.dtype
            assert torch.equal(weight, expected)
    difference = ((model(IDS) - logits).float().norm() / logits.float().norm()).item()
    assert difference < (1e-5 if logits.dtype == torch.float32 else 0.02)


PREFIX = "model.layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("part", "changed", "message"),
    [
        (".absmax", None, "its part .absmax has size 0; expected 64"),
        (".absmax", torch.ones(3), "its part .absmax has size 3; expected 64"),
        ("", torch.zeros(2047, 1).byte(), "its part of codes has size 2047; expected 2048"),
        (".quant_state.bitsandbytes__nf4", torch.ones(3).byte(), "no state of a weight in four bits"),
    ],
)
def test_damaged_files_are_refused(folders, tmp_path, part, changed, message):
    folder = shutil.copytree(folders["nf4-False"][0], tmp_path / "damaged")
    files = load_file(folder / "model.safetensors") | {PREFIX + part: changed}
    save_file({name: tensor for name, tensor in files.items() if tensor is not None}, folder / "model.safetensors")
    refuses(message, checkpoint.load, folder)


def test_other_quantizations_are_refused(folders, tmp_path):
    folder = shutil.copytree(folders["nf4-False"][0], tmp_path / "other")
    other = {"load_in_4bit": False, "load_in_8bit": True}
    change_json(folder / "config.json", quantization_config=lambda settings: settings | other)
    refuses("quantized with 'bitsandbytes'; supported are plain weights", checkpoint.load, folder)
