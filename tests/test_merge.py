"""An adapter's folder becomes a plain model: the same logits, written whole or not at all."""

import json
import re

import pytest
import torch

from adapters import difference, trained
from conftest import refuses
from dunes import augment, checkpoint
from dunes.augment import Adapted, Merged, attach, dequantize, detach, quantize
from dunes.augment.adapted import Adapter
from dunes.augment.quantized import Quantized
from dunes.checkpoint import verify
from dunes.checkpoint.export import export as merge
from dunes.checkpoint.open import open_model
from dunes.checkpoint.verify import EXACT, model_logits
from dunes.runs.augment import augment_folder
from dunes.text.templates import encode_prompt, find_template, get_template
from small_models import random_model
from test_adapter import IDS, pair
from test_adapter_folders import TALK, TOKENS, adapter_in, base_in, made  # noqa: F401  (fixture)

pytestmark = pytest.mark.filterwarnings("ignore")
KINDS = {
    "lora": ("llama", {}),
    "dora": ("gpt2", {"dora": True}),
    "rslora": ("llama", {"rslora": True}),
    "pissa": ("llama", {"init": "pissa"}),
    "experts": ("mixtral", {}),
    "embedding": ("llama", {"where": ["embed.token", "blocks.**"]}),
}


@pytest.mark.parametrize(("kind", "dtype"), [*((kind, None) for kind in KINDS), ("lora", torch.bfloat16)])
def test_the_merged_folder_is_the_adapted_model(kind, dtype, tmp_path):
    from transformers import AutoModelForCausalLM

    shape, options = KINDS[kind]
    _, ours = base_in(tmp_path / "base", shape)
    said = adapter_in(tmp_path / "a", ours, tmp_path / "base", **options)
    report = merge(tmp_path / "a", tmp_path / "out", dtype=dtype)
    assert report.verified.relative <= EXACT
    loaded = checkpoint.load(tmp_path / "out")
    assert not any(isinstance(m, Adapted) for m in loaded.model.modules())
    assert loaded.model.norm.weight.dtype == (dtype or torch.float32)
    verdict = re.fullmatch(r"equal within rounding: (\S+) relative", report.lines()[0])
    if dtype is None:
        assert float(verdict[1]) <= EXACT
        assert report.verified.rounding is None
        assert max(report.merged.errors.values()) < 1e-5
        assert difference(loaded.model(IDS), said) <= 1e-4
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
        with torch.no_grad():
            assert difference(theirs(IDS).logits, said) <= 1e-4
    else:
        assert float(verdict[1]) > EXACT
        assert report.verified.rounding > report.verified.largest_difference
        assert max(report.merged.errors.values()) > 1e-5
    assert find_template(loaded.tokenizer, loaded.card) is get_template("chatml")
    assert loaded.tokenizer.token_id("<|im_end|>") in loaded.tokenizer.stops
    ids = encode_prompt(get_template("chatml"), TALK, loaded.tokenizer)
    assert ids == encode_prompt(get_template("chatml"), TALK, TOKENS)
    card = json.loads((tmp_path / "out" / "dunes.json").read_text())
    assert card["changes"][-1]["name"] == "merge"
    assert card["verified"]["tolerance"] == EXACT
    assert card["merged"]["errors"]["largest"] == max(report.merged.errors.values())
    assert not {"adapter", "base", "structure"} & card.keys()


@pytest.mark.parametrize(("size", "dtype"), [(1e-6, None), (1e-6, torch.float32), (0.5, None)])
def test_the_share_of_an_update_that_rounding_keeps_is_reported(size, dtype, tmp_path):
    ours = pair("llama")[1].bfloat16()
    checkpoint.save(ours, tmp_path / "base", TOKENS, 32)
    attach(ours, rank=4)
    trained(ours)
    with torch.no_grad():
        for name, p in ours.named_parameters():
            p.mul_(size if name.endswith(".B") else 1)
    checkpoint.save_adapter(ours, tmp_path / "a", base=tmp_path / "base", tokenizer=TOKENS, context_length=24)
    report = merge(tmp_path / "a", tmp_path / "out", dtype=dtype)
    is_lost = size < 1e-3 and dtype is None
    assert (report.merged.share < 0.5) == is_lost == any("--dtype float32" in line for line in report.lines())
    assert is_lost or report.merged.share == pytest.approx(1, abs=0.05)


def qlora(folder, kind="nf4"):
    """A base in a folder and an adapter that was made on it quantized."""
    _, ours = base_in(folder / "base")
    note = quantize(ours, kind=kind)
    attach(ours, where="blocks.*.attn.*", rank=2)
    trained(ours)
    words = {"tokenizer": TOKENS, "context_length": 32, "facts": {"changes": [note.record()]}}
    checkpoint.save_adapter(ours, folder / "a", base=folder / "base", **words)
    return ours


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_what_was_trained_on_a_quantized_base_goes_there_or_into_the_original(kind, tmp_path):
    ours = qlora(tmp_path, kind)
    report = merge(tmp_path / "a", tmp_path / "there")
    assert report.moved is None
    there = checkpoint.load(tmp_path / "there").model
    assert not any(isinstance(m, Quantized) for m in there.modules())
    assert difference(there(IDS), ours(IDS)) <= 1e-4
    card = json.loads((tmp_path / "there" / "dunes.json").read_text())
    assert [c["name"] for c in card["changes"]] == ["quantize", "merge"]
    assert "blocks.0.mlp.up" in card["changes"][-1]["dequantized"]
    report = merge(tmp_path / "a", tmp_path / "original", "original")
    print(f"{kind}: moved {report.moved:.2e}, allowed {report.allowed:.2e}")
    assert report.verified.relative <= EXACT
    assert 0 < report.moved <= report.allowed
    other = checkpoint.load(tmp_path / "original").model
    assert difference(other(IDS), ours(IDS)) > 1e-3
    base = checkpoint.load(tmp_path / "base").model
    assert torch.equal(other.blocks[0].mlp.up.weight, base.blocks[0].mlp.up.weight)
    assert len(report.lines()) == 4
    pattern = r"equal within rounding: \S+ relative, to the adapter on the original base"
    assert re.fullmatch(pattern, report.lines()[0])


def test_an_adapter_that_only_works_on_the_quantized_base_is_found_out(tmp_path, monkeypatch):
    qlora(tmp_path)
    monkeypatch.setattr("dunes.checkpoint.export.MAX_RATIO", 0.01)
    refuses("use --into dequantized; nothing was written", merge, tmp_path / "a", tmp_path / "out", "original")
    assert not (tmp_path / "out").exists()


def forgotten(model, dtype):
    """A merge that merges nothing."""
    detach(model)
    return Merged({"nowhere": 0.0}, 1.0)


WRONG = {
    "another update": (Adapter, "updated", lambda self, *base, right=Adapter.updated: right(self, *base) * 1.01),
    "no update": (augment, "merge", forgotten),
}


def test_a_model_that_only_dunes_loads_is_merged_into_another(tmp_path, command):
    checkpoint.save(ours := random_model("dunes", vocab=61), tmp_path / "base", TOKENS, 32)
    said = adapter_in(tmp_path / "a", ours, tmp_path / "base")
    assert command("augment", "merge", tmp_path / "a", tmp_path / "out")[0] == 0
    assert difference(checkpoint.load(tmp_path / "out").model(IDS), said) <= 1e-4
    assert "transformers does not run it" in command("export", tmp_path / "a", tmp_path / "hf", "--to", "hf")[2]
    assert "train a new model with --family arcee" in command("export", tmp_path / "out", tmp_path / "x.gguf")[2]
    for folder in ("base", "out"):
        assert "nothing to merge" in command("augment", "merge", tmp_path / folder, tmp_path / "again")[2]


@pytest.mark.usefixtures("made")
@pytest.mark.parametrize("wrong", WRONG)
def test_a_merge_that_makes_another_model_leaves_nothing(wrong, tmp_path, monkeypatch):
    monkeypatch.setattr(*WRONG[wrong])
    refuses(r"the result is another model: .*; nothing was written", merge, tmp_path / "a", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("made")
def test_a_merge_into_what_is_there_or_of_no_adapter_is_refused_first(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "load", lambda *a: pytest.fail("loaded before it was refused"))
    refuses("nothing to merge", merge, tmp_path / "base", tmp_path / "out")
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "file").touch()
    refuses("exists already", merge, tmp_path / "a", tmp_path / "there")
    for inside in ("a", "base"):
        refuses("must not contain each other", merge, tmp_path / "a", tmp_path / inside / "out")


@pytest.mark.parametrize("shape", ["llama", "gpt2", "mixtral"])
@pytest.mark.parametrize("quantized", [None, "nf4"])
def test_logits_from_one_matrix_at_a_time_are_the_models(shape, quantized):
    _, ours = pair(shape)
    if quantized:
        quantize(ours, kind=quantized)
    attach(ours, rank=2, dora=shape == "gpt2")
    trained(ours)
    ids = torch.randint(61, (2, 16), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        said = ours(ids)
    assert difference(model_logits(ours, 32), said) <= 1e-5 * said.abs().max()
    assert difference(model_logits(ours, 32, torch.float32), said) <= 1e-5 * said.abs().max()
    assert difference(model_logits(ours, 32, torch.bfloat16), said) > 1e-4
    dequantize(ours)
    with torch.no_grad():
        assert difference(ours(ids), said) <= 1e-5 * said.abs().max()


def test_a_merge_that_is_not_finite_is_no_verified_one(tmp_path, monkeypatch):
    with torch.no_grad():
        _, ours = base_in(tmp_path / "base")
        plain = model_logits(ours, 32)
    infinite = torch.full_like(plain, torch.inf)
    monkeypatch.setattr(verify, "model_logits", lambda *model: plain if model[-1] is None else infinite)
    check = verify.merge_check(ours, tmp_path, 32, torch.float32)
    refuses("the result is another model", check, open_model(tmp_path / "base"))


def test_a_quantized_folder_has_no_original_weights(tmp_path):
    base_in(tmp_path / "base")
    augment_folder(tmp_path / "base", tmp_path / "small", "quantize", kind="nf4")
    loaded = checkpoint.load(tmp_path / "small")
    attach(loaded.model, rank=2)
    checkpoint.save_adapter(trained(loaded.model), tmp_path / "a", base=tmp_path / "small", tokenizer=TOKENS)
    for folder in ("a", "small"):
        words = r"small: was saved without the original weights; use --into dequantized"
        refuses(words, merge, tmp_path / folder, tmp_path / "out", "original")
        assert not (tmp_path / "out").exists()
    refuses("leave out the table of names", open_model, tmp_path / "small", {"a": "model.norm.weight"})
    merge(tmp_path / "a", tmp_path / "out")


def test_an_adapter_does_not_go_where_a_foreign_model_would_hide_it(tmp_path):
    _, ours = base_in(tmp_path / "base")
    attach(ours, rank=2)
    checkpoint.save_adapter(ours, tmp_path / "base")  # replaces a model of ours
    assert not (tmp_path / "base" / "config.json").exists()
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / "base" / name).write_text("theirs")
    words = "contains a model that was not saved by dunes"
    refuses(words, checkpoint.save_adapter, ours, tmp_path / "base", tokenizer=TOKENS)
    assert (tmp_path / "base" / "tokenizer.json").read_text() == "theirs"
