"""A model is a family, a config and its changes: made, trained, saved, loaded and exported in every order."""

import itertools
import json

import pytest
import torch

import expansion
from adapters import IDS, build, difference, trained
from conftest import change_json, refuses
from dunes import checkpoint, tree
from dunes.augment import CHANGES, Adapted, apply_change, base_model, dequantize
from dunes.augment.changes import decide_change
from dunes.checkpoint import Architecture
from dunes.checkpoint.export import export
from dunes.checkpoint.inspect import describe_adapter, judge
from dunes.checkpoint.open import add_adapter, open_model
from dunes.runs.augment import augment_folder
from dunes.train import next_token
from small_models import random_model, small_config

pytestmark = pytest.mark.filterwarnings("ignore:.*tokenizer is None")
KINDS = {
    "lora": ("lora", {"rank": 2}),
    "dora": ("lora", {"rank": 2, "dora": True}),
    "int8": ("quantize", {"kind": "int8"}),
    "nf4": ("quantize", {"kind": "nf4", "double": True}),
    "expand": ("expand", {}),
}
REFUSED = {
    ("int8", "int8"): "already quantized", ("int8", "nf4"): "already quantized",
    ("nf4", "int8"): "already quantized", ("nf4", "nf4"): "already quantized",
    ("lora", "expand"): "already adapted", ("dora", "expand"): "already adapted",
    ("int8", "expand"): "already quantized", ("nf4", "expand"): "already quantized",
    ("expand", "expand"): None,
}  # fmt: skip
CONFIG = small_config()
PAIRS = list(itertools.product(KINDS, repeat=2))


@pytest.fixture(autouse=True)
def expand(monkeypatch):
    monkeypatch.setitem(CHANGES, "expand", expansion)


def changed(*kinds):
    """A model after these changes and five steps of training of what each brought, and its architecture."""
    model, changes = build(), []
    for number, kind in enumerate(kinds):
        name, request = KINDS[kind]
        request = request | ({"adapter": f"a{number}"} if name == "lora" else {})
        before = base_model(model)(IDS).detach() if name == "lora" else model(IDS).detach()
        changes.append(apply_change(model, name, **request))
        if name != "quantize":
            assert difference(model(IDS), before) == 0.0, "nothing changes until it is trained"
        train(model, changes[-1].new)
    return model.eval(), Architecture("llama", CONFIG, tuple(changes))


def train(model, new):
    for name, p in model.named_parameters():
        p.requires_grad_(any(tree.matches(glob, name) for glob in new))
    learning = [p for p in model.parameters() if p.requires_grad]
    if learning:
        optimizer = torch.optim.SGD(learning, 0.05)
        for _ in range(5):
            optimizer.zero_grad()
            total, count = next_token(model, IDS)
            (total / count).backward()
            optimizer.step()
        assert all(p.grad.abs().sum() > 0 for p in learning if p.dim())


@pytest.mark.slow
@pytest.mark.parametrize("pair", [p for p in PAIRS if p not in REFUSED])
def test_every_pair_of_changes_is_saved_loaded_and_exported(pair, tmp_path):
    model, architecture = changed(*pair)
    logits = model(IDS)
    checkpoint.save(model, tmp_path / "a", None, 32, architecture=architecture)
    loaded = checkpoint.load(tmp_path / "a")
    assert torch.equal(loaded.model(IDS), logits), "bit for bit"
    assert loaded.architecture == architecture
    dtypes = [{n: t.dtype for n, t in each.state_dict().items()} for each in (loaded.model, model)]
    assert dtypes[0] == dtypes[1]
    if "expand" in pair:  # the gate is a part that no family has
        refuses("no Hugging Face config describes", export, tmp_path / "a", tmp_path / "hf")
        return
    assert export(tmp_path / "a", tmp_path / "hf").verified.relative <= 1e-4
    plain = checkpoint.load(tmp_path / "hf")
    assert difference(plain.model(IDS), logits) <= 2e-5 * logits.abs().max()
    assert [change["name"] for change in plain.card["changes"]][:2] == [c.name for c in architecture.changes]
    assert not any(isinstance(m, Adapted) for m in plain.model.modules())


Q = lambda card: card["changes"][0]["places"]["blocks.0.attn.q"]
EDITS = [("lora", lambda c: c["changes"][0]["request"].update(dtype="int8"), r"dunes\.json: ")]
EDITS += [("lora", lambda c: Q(c).update(alpha="x"), r"dunes\.json: ")]
EDITS += [
    ("int8", *edit)
    for edit in [
        (
            lambda c: c["changes"][0].update(name="shuffle"),
            "the change 'shuffle' has version 5, and this dunes knows no such change",
        ),
        (
            lambda c: c["changes"][0].update(version=99),
            "the change 'quantize' has version 99, and this dunes reads",
        ),
        (lambda c: c["changes"][0].update(version=2), "version 2, .* make the change again"),
        (lambda c: c["changes"][0].update(places=3), "the record of a change is damaged"),
        (lambda c: c["changes"][0]["request"].pop("kind"), "'kind'"),
        (lambda c: c["changes"].pop(), "is not a weight of this model"),
        (lambda c: c["changes"][0]["request"].update(kind="nf4"), "codes"),
        (lambda c: c["changes"][0]["places"].update({"blocks.9.attn.q": {}}), "is damaged"),
        (lambda c: Q(c).update(dtype="int8"), "dtype is 'int8'; expected"),
        (lambda c: c["config"].update(rms_norm_eps=0.1), "has another class or other settings"),
        (lambda c: c["config"].pop("hidden_size"), "hidden_size"),
        (lambda c: c.update(adapter=["a"]), "adapter is a list; expected one of its adapters, or null"),
        *((lambda c, n=n: c.update(format=n), "format .*, but this version reads 3; make") for n in (99, 2, "3")),
    ]
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder of a model after each of two changes."""
    root = tmp_path_factory.mktemp("saved")
    for kind in ("lora", "int8"):
        model, architecture = changed(kind)
        checkpoint.save(model, root / kind, None, 32, architecture=architecture)
    return root


@pytest.mark.parametrize(("kind", "edit", "words"), EDITS)
def test_an_edited_card_is_refused_before_a_weight_is_read(kind, edit, words, saved):
    path = saved / kind / "dunes.json"
    text = path.read_text()
    edit(card := json.loads(text))
    path.write_text(json.dumps(card))
    refuses(words, checkpoint.load, saved / kind)
    path.write_text(text)


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_a_quantized_model_of_two_bytes_runs_and_trains_biases_in_four(kind):
    model = build("gpt2").to(torch.bfloat16)
    apply_change(model, "quantize", kind=kind)
    exact = build("gpt2").to(torch.bfloat16)
    apply_change(exact, "quantize", kind=kind)
    dequantize(exact)
    model.float()(IDS).sum().backward()
    assert difference(model(IDS), exact.float()(IDS)) < 1e-5
    assert model.blocks[0].attn.q.bias.grad.any()


def test_an_architecture_of_another_model_is_refused_at_once_on_one_short_line(tmp_path):
    model, _ = changed("int8")
    words, stale = r"llama builds a different model: blocks\.0\..*; and \d+ more$", Architecture("llama", CONFIG)
    assert len(refuses(words, checkpoint.save, model, tmp_path / "a", None, 32, architecture=stale)) < 1000
    refuses("no family describes this model", checkpoint.save, model, tmp_path / "a", None, 32)
    assert not (tmp_path / "a").exists()


def test_a_quantized_folder_takes_an_adapter_and_is_exported_to_transformers(tmp_path):
    from transformers import AutoModelForCausalLM

    checkpoint.save(build(), tmp_path / "dense", None, 32)
    lines = augment_folder(tmp_path / "dense", tmp_path / "nf4", "quantize", kind="nf4", double=True)
    assert "nf4, rounded to nearest" in lines
    assert any("the written folder is equal" in line for line in lines)
    loaded = checkpoint.load(tmp_path / "nf4")
    apply_change(loaded.model, "lora", rank=2)
    train(loaded.model, ("**.adapters.**",))
    logits = loaded.model.eval()(IDS)
    checkpoint.save_adapter(loaded.model, tmp_path / "adapter", base=tmp_path / "nf4")
    again = checkpoint.load(tmp_path / "adapter")
    assert torch.equal(again.model(IDS), logits)
    assert [change.name for change in again.architecture.changes] == ["quantize", "lora"]
    dense = checkpoint.load(tmp_path / "dense").model
    refuses(r"'NF4, torch\.float32'", checkpoint.load_adapter, dense, tmp_path / "adapter")
    export(tmp_path / "adapter", tmp_path / "plain")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "plain").eval()
    assert difference(theirs(IDS).logits, logits) <= 2e-5 * logits.abs().max()


def test_a_folder_that_does_not_hold_the_model_is_not_left(tmp_path, monkeypatch):
    from dunes.checkpoint import verify

    checkpoint.save(build(), tmp_path / "dense", None, 32)
    real = verify.load_decoder

    def damaged(source):
        model = real(source)
        model.norm.weight.data.mul_(1.01)
        return model

    monkeypatch.setattr(verify, "load_decoder", damaged)
    refuses("differs by", augment_folder, tmp_path / "dense", tmp_path / "out", "quantize", kind="int8")
    assert not (tmp_path / "out").exists()


def test_what_was_done_to_an_adapters_base_before_stays_in_the_cards_of_what_is_made_of_it(tmp_path):
    def names(folder, *keys):
        card = json.loads((tmp_path / folder / "dunes.json").read_text())
        return [change["name"] for key in keys for change in card.get(key, [])]

    model = build()
    checkpoint.save(model, tmp_path / "base", None, 32, {"changes": [{"name": "first"}]})
    apply_change(model, "lora", rank=2)
    checkpoint.save_adapter(trained(model), tmp_path / "adapter", base=tmp_path / "base")
    augment_folder(tmp_path / "adapter", tmp_path / "int8", "quantize", kind="int8")
    assert names("int8", "history", "changes") == ["first", "lora", "quantize"]
    export(tmp_path / "int8", tmp_path / "plain")
    assert names("plain", "changes") == ["first", "lora", "quantize", "merge"]
    augment_folder(tmp_path / "base", tmp_path / "nf4", "quantize", kind="nf4")
    loaded = checkpoint.load(tmp_path / "nf4")
    apply_change(loaded.model, "lora", rank=2)
    checkpoint.save_adapter(trained(loaded.model), tmp_path / "on", base=tmp_path / "nf4")
    export(tmp_path / "on", tmp_path / "merged")
    assert names("merged", "changes") == ["first", "quantize", "merge"]


def test_an_adapter_of_a_quantized_run_fits_the_quantized_folder_of_its_base(tmp_path):
    model = build()
    checkpoint.save(model, tmp_path / "base", None, 32)
    dense = checkpoint.base_identity(model)
    note = apply_change(model, "quantize", kind="nf4", double=True)
    identity = dense | checkpoint.base_identity(model)
    apply_change(model, "lora", rank=2)
    checkpoint.save_adapter(
        trained(model), tmp_path / "a", base=tmp_path / "base", identity=identity,
        facts={"changes": [note.record()]},
    )  # fmt: skip
    for double in (True, False):
        augment_folder(tmp_path / "base", tmp_path / f"{double}", "quantize", kind="nf4", double=double)
    loaded = checkpoint.load(tmp_path / "True", adapters=[tmp_path / "a"])
    add_adapter(loaded, tmp_path / "a", "default")
    assert torch.equal(loaded.model(IDS), checkpoint.load(tmp_path / "a").model(IDS))
    refuses("made for a different base", checkpoint.load, tmp_path / "False", adapters=[tmp_path / "a"])


def test_a_context_length_above_the_learned_positions_is_refused(tmp_path):
    model = build("gpt2")
    checkpoint.save(model, tmp_path / "base", None, 32)
    augment_folder(tmp_path / "base", tmp_path / "int8", "quantize", kind="int8")
    apply_change(model, "lora", rank=2)
    checkpoint.save_adapter(trained(model), tmp_path / "a", base=tmp_path / "base", context_length=32)
    for folder in (tmp_path / "int8", tmp_path / "a"):
        change_json(folder / "dunes.json", context_length=33)
        refuses(r"context_length is 33; expected 1 to 32, the learned positions", checkpoint.load, folder)
    assert "1 to 32" in "".join(judge(open_model(tmp_path / "int8")).reasons)
    assert "1 to 32" in describe_adapter(tmp_path / "a")[1]
    loaded = checkpoint.load(tmp_path / "base", adapters=[tmp_path / "a"])
    refuses(r"context_length is 33; expected 1 to 32", add_adapter, loaded, tmp_path / "a", "default")


def test_routing_learns_and_has_no_hugging_face_config(tmp_path):
    model = random_model("mixtral")
    before = model(IDS)
    change = apply_change(model, "routing", shared=2, bias_rate=0.1, z_loss=0.5)
    train(model, change.new)
    assert not torch.equal(model(IDS), before)
    *_, metrics = model.requires_grad_().train()(IDS[:, :-1], targets=IDS[:, 1:])
    assert metrics.keys() == {"balance", "router_z", "expert_load"}
    model.blocks[0].mlp.after_step()
    architecture = Architecture("mixtral", small_config("mixtral"), (change,))
    checkpoint.save(model.eval(), tmp_path / "a", None, 32, architecture=architecture)
    loaded = checkpoint.load(tmp_path / "a")
    assert torch.equal(loaded.model(IDS), model(IDS))
    assert loaded.model.blocks[0].mlp.selection_bias.abs().max() == pytest.approx(0.1)
    refuses(r"no Hugging Face config describes.*blocks.0.mlp", export, tmp_path / "a", tmp_path / "hf")


def test_options_from_python_have_any_form_and_the_record_is_json():
    after = [0]
    for given in (after, (0,), {0}, range(1)):
        record = decide_change(build(), "expand", blocks=1, after=given).record()
        assert json.loads(json.dumps(record))["request"]["after"] == [0]
    after.append(1)
    assert decide_change(build(), "quantize", kind="int4", act_order=None).request["method"] == "rtn"
    ids = torch.randint(0, 50, (8, 32))
    request = decide_change(build(), "quantize", kind="int4", ids=ids, act_order=None).request
    assert (request["method"], request["act_order"]) == ("gptq", True)
