"""Block expansion: nothing changes before training, only new blocks learn, and without them all is as before."""

import inspect
from dataclasses import replace
from functools import partial

import pytest
import torch
from transformers import AutoModelForCausalLM

from adapters import IDS, difference
from conftest import display, equal_states, refuses
from dunes import checkpoint, tree
from dunes.augment import Change, apply_change, repeat_structure, undo_change
from dunes.checkpoint import Architecture
from dunes.checkpoint.export import export
from dunes.models import FAMILIES
from dunes.parts import Checkpointed, cache_for
from dunes.runs.augment import augment_folder, undo_folder
from dunes.runs.saving import read_metrics
from dunes.runs.train import select_trainable, train
from dunes.text import Tokenizer
from dunes.train import Trainer, adamw, next_token
from own_parts import Branching
from small_models import random_model, small_config
from test_train_from import going_on

pytestmark = pytest.mark.filterwarnings("ignore:.*tokenizer is None")
TOKENIZER = Tokenizer.train("bpe", ["def task(value):\n    return value\n"] * 3, 300)


model_of = partial(random_model, noise=0.2, depth=3, context=64)


def copied(model):
    return {name: t.clone() for name, t in model.state_dict().items()}


@torch.no_grad()
def all_logits(model):
    cache = cache_for(model, 2, 20)
    cached = [model(part, cache=cache) for part in IDS.split([11, 1, 8], 1)]
    return torch.cat([model(IDS), *cached], 1)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_outputs_are_equal_bit_for_bit_with_and_without_a_cache_and_so_is_what_is_given_back(family, dtype):
    model = model_of(family).to(dtype)
    state, logits = copied(model), all_logits(model)
    change = apply_change(model, "expand", blocks=2)
    assert len(model.blocks) == 5
    assert torch.equal(all_logits(model), logits)
    described = checkpoint.hf_config_of(model, 64, loads=family != "dunes")
    assert described.family == checkpoint.hf_config_of(described.build(), 64, loads=family != "dunes").family
    undo_change(model, change)
    assert equal_states(model.state_dict(), state)
    assert torch.equal(all_logits(model), logits)


@pytest.mark.parametrize("family", ["olmo2", "gemma2"])
def test_norms_after_the_parts_start_silent_and_a_small_step_changes_little(family):
    model = model_of(family)
    (place,) = apply_change(model, "expand", blocks=1).places
    block = model.get_submodule(place)
    assert block.attn.out.weight.any()
    assert block.mlp.down.weight.any()
    logits = model(IDS)
    targets = IDS.roll(-1, 1)
    parameters = [*block.parameters()]
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
    assert max(p.grad.norm() for p in parameters) < 1.0, "projections at zero before a norm have hundreds"
    with torch.no_grad():
        for p in parameters:
            p -= 1e-4 * p.grad.sign()
        assert (model(IDS) - logits).abs().max() < 0.05 * logits.abs().max()


@pytest.mark.parametrize(
    ("depth", "request_", "copies"),
    [
        (8, {}, [3, 7]),  # one after every fourth, as LLaMA Pro
        (3, {}, [2]),
        (10, {"blocks": 3}, [3, 6, 9]),
        (2, {"blocks": 5}, [0, 0, 1, 1, 1]),
        (4, {"after": (2, 0)}, [0, 2]),
        (4, {"after": (1, 1)}, [1, 1]),
        (9, {"blocks": 2, "after": (0, 1, 2, 3)}, [1, 3]),
    ],
)
def test_any_number_of_blocks_stands_anywhere(depth, request_, copies):
    model = model_of("llama", depth=depth)
    old, logits = list(model.blocks), all_logits(model)
    change = apply_change(model, "expand", **request_)
    assert [s["of"] for s in change.places.values()] == copies
    for number, (place, of) in enumerate(zip(change.places, copies, strict=True), 1):
        assert place == f"blocks.{of + number}"
        new = model.get_submodule(place)
        assert torch.equal(new.mlp.up.weight, old[of].mlp.up.weight)
        assert new.mlp.up.weight.data_ptr() != old[of].mlp.up.weight.data_ptr()
    assert torch.equal(all_logits(model), logits)
    undo_change(model, change)
    assert all(a is b for a, b in zip(model.blocks, old, strict=True))


def test_a_part_without_an_output_projection_is_refused_and_nothing_has_changed():
    model = model_of("llama")
    model.blocks[1].mlp = Branching()
    state, modules = copied(model), list(model.modules())
    refuses(r"outputs: .* attn\.out and mlp\.down", apply_change, model, "expand", after=(1,))
    assert equal_states(model.state_dict(), state)
    assert all(a is b for a, b in zip(model.modules(), modules, strict=True))
    assert torch.equal(all_logits(model), all_logits(model))
    apply_change(model, "expand", after=(0, 2))


def test_a_record_of_another_model_is_refused():
    model, change = model_of("llama"), Change("expand", 1, {}, {"blocks.9": {}})
    refuses("is damaged", repeat_structure, model, change)
    refuses("blocks", undo_change, model, change)


def test_checkpointed_blocks_are_expanded_too():
    model = model_of("llama")
    tree.replace(model, "blocks.*", Checkpointed)
    logits = all_logits(model)
    apply_change(model, "expand", blocks=2)
    assert torch.equal(all_logits(model), logits)


@pytest.mark.parametrize(
    ("family", "changes"),
    [("llama", {}), ("gpt2", {}), ("mixtral", {}), ("qwen3_moe", {}), ("arcee", {"tied": True})],
)
def test_at_first_only_the_output_projections_of_new_blocks_get_gradients_then_all(family, changes):
    """Not so in a mixture's experts: those that no token chose have none."""
    model = model_of(family, **changes)
    change = apply_change(model, "expand", blocks=2)
    loaded = checkpoint.LoadedModel(model, None, 64, {"changes": [change.record()]})
    select_trainable(model, ("new",), loaded)
    state = copied(model)
    moved = []
    steps = Trainer(model, adamw(model, 0.01, decay=0.0), next_token).run(iter([IDS] * 3))
    for _ in zip(range(2), steps, strict=False):
        moved.append({n for n, t in model.state_dict().items() if not torch.equal(t, state[n])})
        state = copied(model)
    new = {n for n, _ in model.named_parameters() if tree.matches(change.new, n)}
    outputs = {n for n in new if n.rpartition(".")[0].endswith(("attn.out", ".down"))}
    assert {n for n in moved[0] if ".experts." not in n} == {n for n in outputs if ".experts." not in n}
    assert moved[0] <= outputs, "B2, B4"
    silent = {n for n in new - moved[1] if ".experts." not in n}
    assert all(n.endswith("attn.k.bias") for n in silent), "a key's bias has no effect: softmax cancels it"
    assert moved[1] <= new


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A base in two bytes, and what it was expanded to."""
    root = tmp_path_factory.mktemp("expanded")
    checkpoint.save(model_of("llama", vocab=TOKENIZER.vocab).to(torch.bfloat16), root / "base", TOKENIZER, 64)
    lines = augment_folder(root / "base", root / "pro", "expand", blocks=2)
    copies = "blocks.2 copies the former blocks.1, blocks.4 copies the former blocks.2"
    assert lines[0] == f"2 new blocks without effect until trained: {copies}"
    assert lines[2].startswith("logits moved by 0.0e+00 (relative norm); top-1 tokens agree at 100%")
    return root


def stored(folder):
    """The bytes of its weights."""
    return (folder / "model.safetensors").read_bytes()


def test_new_blocks_learn_alone_and_taken_out_give_back_the_original(folders, code, tmp_path):
    config = going_on(folders / "pro", code, steps=4, trainable=("new",))
    assert train(config, tmp_path / "run", display()[0]) == 0
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    scores = [r["validation_loss"] for r in lines if "validation_loss" in r]
    assert scores[-1] < scores[0], "it learned"
    was, now = (checkpoint.load(folder).model.state_dict() for folder in (folders / "pro", tmp_path / "run"))
    changed = {n for n in was if not torch.equal(was[n].float(), now[n])}
    assert changed
    assert all(n.startswith(("blocks.2.", "blocks.4.")) for n in changed)
    report = undo_folder(tmp_path / "run", tmp_path / "again", "expand")
    assert "of tensors with the original SHA-256; the written folder is equal" in report
    assert stored(tmp_path / "again") == stored(folders / "base")
    base, again = checkpoint.load(folders / "base"), checkpoint.load(tmp_path / "again")
    assert torch.equal(all_logits(base.model), all_logits(again.model))
    assert again.card["changes"] == []
    assert "trained" not in again.card
    refuses("cannot undo expand", undo_folder, tmp_path / "again", tmp_path / "more", "expand")


def test_what_was_trained_in_its_old_blocks_or_changed_later_is_not_taken_back(folders, tmp_path):
    loaded = checkpoint.load(folders / "pro")
    with torch.no_grad():
        loaded.model.blocks[3].attn.q.weight[0, 0] += 1  # block 2 of the original
        loaded.model.norm.weight[0] += 1
    checkpoint.save(loaded.model, tmp_path / "other", TOKENIZER, 64, {"changes": loaded.card["changes"]})
    augment_folder(folders / "pro", tmp_path / "int8", "quantize", kind="int8")
    export(tmp_path / "int8", tmp_path / "plain")
    augment_folder(folders / "pro", tmp_path / "twice", "expand", blocks=1)
    for folder, words in (
        ("other", r"blocks\.2 was trained or rounded after the change"),
        ("int8", r"quantize came later and depends on it; its changes: expand, quantize"),
        ("plain", r"merge came later and depends on it; its changes: expand, quantize, merge"),
    ):
        refuses(f"cannot undo expand: {words}", undo_folder, tmp_path / folder, tmp_path / "out", "expand")
        assert not (tmp_path / "out").exists()
    undo_folder(tmp_path / "twice", tmp_path / "once", "expand")
    undo_folder(tmp_path / "once", tmp_path / "none", "expand")
    assert stored(tmp_path / "once") == stored(folders / "pro")
    assert stored(tmp_path / "none") == stored(folders / "base")


LAYERS = ("smollm3", "gemma3_text", "qwen3_next")
"""Families whose configs differ in what they say of each layer."""


@torch.no_grad()
@pytest.mark.parametrize(
    "family", [f if f in LAYERS else pytest.param(f, marks=pytest.mark.slow) for f in FAMILIES if f != "dunes"]
)
def test_transformers_opens_it_with_more_layers(family, tmp_path):
    """Also with its cache, which needs each layer's own index."""
    model = model_of(family, vocab=TOKENIZER.vocab)
    logits = model(IDS)
    checkpoint.save(model, tmp_path / "base", TOKENIZER, 64)
    augment_folder(tmp_path / "base", tmp_path / "pro", "expand", blocks=2)
    theirs, report = AutoModelForCausalLM.from_pretrained(tmp_path / "pro", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert theirs.config.num_hidden_layers == 5
    limit = 1e-5 * max(1.0, float(logits.abs().max()))
    assert difference(theirs.eval()(IDS).logits, logits) <= limit
    first = theirs(IDS[:, :11], use_cache=True)
    name = "cache" if "cache" in inspect.signature(theirs.forward).parameters else "past_key_values"  # since 5.24
    rest = theirs(IDS[:, 11:], **{name: first.past_key_values})
    assert difference(rest.logits, logits[:, 11:]) <= limit


def own(depth):
    model = FAMILIES["llama"].build(small_config(depth=depth, context=64))
    model.blocks[0].mlp.act = torch.sin
    return model


@pytest.mark.parametrize(("name", "request_"), [("expand", {"blocks": 2}), ("quantize", {"kind": "nf4"})])
def test_a_model_of_ones_own_function_is_changed_saved_and_loaded(name, request_, tmp_path):
    model = own(3).eval()
    change = apply_change(model, name, **request_)
    architecture = Architecture.of_function(own, depth=3)
    checkpoint.save(model, tmp_path, None, 64, architecture=replace(architecture, changes=(change,)))
    loaded = checkpoint.load(tmp_path, build=own)
    assert torch.equal(loaded.model(IDS), model(IDS))
    refuses("not imported automatically", checkpoint.load, tmp_path)
    if name == "expand":
        select_trainable(loaded.model, ("new",), loaded)
        assert {n.split(".")[1] for n, p in loaded.model.named_parameters() if p.requires_grad} == {"2", "4"}
