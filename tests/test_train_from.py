"""Training that goes on from a folder: exact at its start, resumed bit for bit, saved as what it was."""

import json
from dataclasses import replace
from functools import partial

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import expansion
from adapters import IDS, trained
from conftest import display, refuses
from dunes import checkpoint, tree
from dunes.augment import CHANGES, apply_change
from dunes.checkpoint import Architecture
from dunes.checkpoint.convert import convert
from dunes.checkpoint.export import export
from dunes.checkpoint.open import open_model
from dunes.evaluate.text_loss import evaluate, evaluation_tokens
from dunes.runs import train as train_module
from dunes.runs.augment import augment_folder, records
from dunes.runs.autosize import build_optimizer, memory_advice
from dunes.runs.memory import measure_step
from dunes.runs.saving import read_metrics
from dunes.runs.train import dropouts, outline_with_base, train
from dunes.runs.train_config import TrainConfig
from dunes.text import Tokenizer
from dunes.train import IGNORE, Trainer, muon
from dunes.train.loss import next_token_loss
from small_models import random_model
from test_changes import KINDS
from test_runs import stop, train_in_halves

TOKENIZER = Tokenizer.train("bpe", ["def task(value):\n    return value\n"] * 3, 300)


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """A model of transformers, as dunes convert brings it in."""
    folder = tmp_path_factory.mktemp("bases")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=TOKENIZER.vocab, max_position_embeddings=64, **sizes)
    LlamaForCausalLM(config).save_pretrained(folder / "theirs")
    TOKENIZER.save(folder / "theirs")
    convert(open_model(folder / "theirs"), folder / "base")
    return folder / "base"


def going_on(base, code, **changes):
    fixed = {"batch": 4, "context_length": 32, "steps": 12, "lr": 0.01, "dtype": "float32", "threads": 1}
    return TrainConfig(sources=(str(code),), base=str(base), **{"complete": False} | fixed | changes)


@pytest.mark.parametrize(
    ("asked", "least", "chosen"), [(None, 1, "adamw"), (None, 10**9, "muon"), ("adamw", 10**9, "adamw")]
)
def test_many_weights_are_trained_on_by_adamw_unless_muon_is_asked_for(
    asked, least, chosen, converted, code, tmp_path, monkeypatch
):
    monkeypatch.setattr(train_module, "ADAMW_FROM", least)
    config = going_on(converted, code, steps=3, lr=None, optimizer=asked)
    assert train(config, tmp_path / "run", display()[0]) == 0
    plan = json.loads((tmp_path / "run/state/plan.json").read_text())
    assert plan["optimizer"] == chosen
    assert plan["lr"] == pytest.approx(0.006 if chosen == "muon" else 2e-5 * 128**1.28)
    model = checkpoint.load(converted).model.float()
    optimizer = build_optimizer(model, replace(config, optimizer=chosen))
    parts = getattr(optimizer, "optimizers", [optimizer])
    assert [type(o).__name__ for o in parts].count("Muon") == (chosen == "muon")
    assert sum(p.numel() for o in parts for g in o.param_groups for p in g["params"]) == tree.count(model)


def test_an_unknown_optimizer_is_refused_before_anything_is_written(code, tmp_path):
    config = TrainConfig(sources=(str(code),), optimizer="adam", steps=1)
    refuses("--optimizer", train, config, tmp_path / "run", display()[0])
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("asked", "trained_with"), [(None, 0.1), (0.4, 0.4), (0.0, 0.0)])
def test_a_base_keeps_its_dropout(asked, trained_with, code, tmp_path, monkeypatch):
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64}
    ends = {"bos_token_id": TOKENIZER.eos, "eos_token_id": TOKENIZER.eos}
    config = GPT2Config(vocab_size=TOKENIZER.vocab, **ends, **sizes)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "base")
    TOKENIZER.save(tmp_path / "base")
    seen, real = [], train_module.TrainTask.score
    noted = lambda self, *a: seen.append([d.p for d in dropouts(self.loaded.model)]) or real(self, *a)
    monkeypatch.setattr(train_module.TrainTask, "score", noted)
    assert train(going_on(tmp_path / "base", code, steps=2, dropout=asked), tmp_path / "run", display()[0]) == 0
    assert seen[0] == [trained_with] * 2
    assert [d.p for d in dropouts(checkpoint.load(tmp_path / "run").model)] == [0.1] * 2


def test_the_measurement_of_a_step_leaves_weights_buffers_and_optimizer(code):
    """Whether gradients are finite or not, and with experts whose selection is balanced."""
    model = random_model("mixtral", vocab=300, context=16).train()
    apply_change(model, "routing", bias_rate=0.1)
    for targets in (1, IGNORE):
        trainer = Trainer(model, muon(model), next_token_loss, accumulate=3)
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        ids = torch.randint(300, (4, 16))
        cost = measure_step(trainer, (ids, torch.full_like(ids, targets)))
        assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
        assert cost.tokens == 3 * ids.numel()
        assert cost.seconds > cost.gradients > 0
        assert trainer.number == 0
        assert not any(entry for o in trainer.optimizer.optimizers for entry in o.state.values())
        assert cost.state > 3 * 4 * tree.count(model)


def test_the_loss_at_step_0_is_that_of_eval(converted, code, tmp_path):
    train(going_on(converted, code, context_length=64), tmp_path / "run", display()[0])
    first = read_metrics(tmp_path / "run" / "metrics.jsonl")[0]
    base = checkpoint.load(converted)
    ids, _ = evaluation_tokens(replace(base, card=checkpoint.load(tmp_path / "run").card))  # as dunes eval does
    score = evaluate(replace(base, context_length=64), ids)
    print(f"{first['validation_loss']} and {score.loss}")
    assert first["step"] == 0
    assert first["validation_loss"] == pytest.approx(score.loss, abs=1e-6)


def test_a_longer_context_is_that_of_the_saved_model_in_every_form(converted, code, tmp_path, monkeypatch):
    monkeypatch.setitem(KINDS, "own", ("lora-experts", {"experts": 2, "rank": 2}))
    own = changed(converted, tmp_path / "own", "own")
    for folder in (converted, own):
        run = tmp_path / f"run-{folder.name}"
        longer = checkpoint.load(folder).context_length * 2
        assert train(going_on(folder, code, steps=2, context_length=longer), run, display()[0]) == 0
        assert checkpoint.load(run).context_length == longer
        assert json.loads((run / "dunes.json").read_text())["context_length"] == longer


def changed(base, folder, *kinds, **options):
    """The base after these changes, the last with these options, in a folder."""
    loaded, made = checkpoint.load(base), []
    for number, kind in enumerate(kinds, 1):
        name, request = KINDS[kind]
        request = request | ({"adapter": f"a{number}"} if name == "lora" else {})
        made.append(apply_change(loaded.model, name, **request | (options if number == len(kinds) else {})))
    architecture = Architecture("llama", loaded.architecture.config, tuple(made))
    checkpoint.save(loaded.model, folder, loaded.tokenizer, 64, architecture=architecture)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("names", "trainable"),
    [
        ((), ()), ((), ("blocks.1.**",)), pytest.param(("nf4", "lora"), ("new",), marks=pytest.mark.slow),
        (("expand",), ("new",)), pytest.param(("noisy",), ("new",), marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_stopped_and_resumed_is_straight_bit_for_bit(names, trainable, converted, code, tmp_path, monkeypatch):
    monkeypatch.setitem(CHANGES, "expand", expansion)
    monkeypatch.setitem(KINDS, "noisy", ("experts", {"experts": 4, "gate": "noisy"}))
    base = changed(converted, tmp_path / "base", *names)
    config = going_on(base, code, trainable=trainable)
    advice = memory_advice(config, partial(outline_with_base, config, checkpoint.load(base)))
    assert "this run needs about" in advice, "estimated on fake tensors"
    run = train_in_halves(config, tmp_path, 5, monkeypatch)
    before, after = (checkpoint.load(folder).model.state_dict() for folder in (base, run))
    assert before.keys() == after.keys()
    differing = {name for name in before if not torch.equal(before[name], after[name])}
    assert differing, "it learned"
    if trainable:
        new = {("expand",): "blocks.1.", ("noisy",): "router"}.get(names, "adapters")
        part = new if trainable == ("new",) else "blocks.1."
        assert all(part in n or ".3." in n for n in differing), "nothing else changed"
    assert checkpoint.load(run).architecture == checkpoint.load(base).architecture


def test_parameters_learn_at_their_rates_and_as_long_as_before(converted, code, tmp_path, monkeypatch):
    monkeypatch.setitem(CHANGES, "expand", expansion)
    base = changed(converted, tmp_path / "base", "expand")
    config = going_on(base, code, lr_factors=("all=1e-9", "new=2"))
    run = train_in_halves(config, tmp_path, 5, monkeypatch)
    before, after = (checkpoint.load(folder).model.state_dict() for folder in (base, run))
    moved = {name for name in before if (before[name] - after[name]).abs().max() > 1e-5}
    assert moved
    assert all(".3." in name or "blocks.1." in name for name in moved)


@pytest.mark.slow
def test_a_stack_of_all_changes_is_saved_loaded_and_resumed_bit_for_bit(converted, code, tmp_path, monkeypatch):
    """Expanded, split into experts, with mixtures of LoRA experts also in these, and quantized."""
    routing = {"router": "mlp", "experts": 3, "balance": 0.0, "where": ("blocks.**", "!**.router")}
    own = {"expand": {"blocks": 1}, "experts": {"experts": 4}}
    stack = own | {"lora-experts": routing | {"rank": 2}, "quantize": {"kind": "int8"}}
    base = converted
    for name, request in stack.items():
        augment_folder(base, tmp_path / name, name, **request)
        base = tmp_path / name
    config = going_on(base, code, trainable=("**.adapters.**",), steps=4, lr=2e-3)
    run = train_in_halves(config, tmp_path, 2, monkeypatch)
    before, loaded = checkpoint.load(base), checkpoint.load(run)
    states = before.model.state_dict(), loaded.model.state_dict()
    differing = {name for name in states[0] if not torch.equal(states[0][name], states[1][name])}
    assert any(".experts.3." in name for name in differing)
    assert {"adapters" in name for name in differing} == {True}
    assert [change["name"] for change in records(loaded)] == [*stack]
    assert not torch.equal(before.model(IDS), loaded.model(IDS))
    unmerged = "a mixture of LoRA experts depends on the input: it cannot be merged"
    for folder in (base, run):
        refuses(unmerged, export, folder, tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


def test_what_the_base_was_stays(converted, code, tmp_path):
    train(going_on(converted, code), tmp_path / "run", display()[0])
    loaded = checkpoint.load(tmp_path / "run")
    assert loaded.card["family"] == "llama"
    assert loaded.context_length == 64, "the model's, though it was trained on 32"
    assert loaded.tokenizer.json() == checkpoint.load(converted).tokenizer.json()
    assert LlamaForCausalLM.from_pretrained(tmp_path / "run").config.hidden_size == 32
    assert loaded.card["trained"]["base"] == str(converted)


@pytest.mark.parametrize(
    "changes",
    [{"family": "gpt2"}, {"size": "3m"}, {"tokenizer": "bytes"}, {"trainable": ("new",)},
     {"trainable": ("nothing",)}, {"base": "", "trainable": ("all",)}, {"lr_factors": ("nothing=2",)},
     {"lr_factors": ("new=2",)}, {"lr_factors": ("blocks.**",)}, {"lr_factors": ("blocks.**=0",)},
     {"base": "nowhere"}, {"base": "nf4"}, {"base": "adapter"}],
    ids=str,
)  # fmt: skip
def test_what_makes_no_sense_is_refused(changes, converted, code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if changes.get("base") == "nf4":
        changed(converted, tmp_path / "nf4", "nf4")
    elif changes.get("base") == "adapter":
        loaded = checkpoint.load(converted)
        apply_change(loaded.model, "lora", rank=2)
        checkpoint.save_adapter(trained(loaded.model), tmp_path / "adapter", base=converted)
    options = {"base": converted, "code": code} | changes
    refuses(".", lambda: train(going_on(**options), tmp_path / "run", display()[0]))
    assert not (tmp_path / "run" / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("kinds", "option"),
    [((), {}), (("nf4", "lora"), {}), (("lora",), {"alpha": 16.0}), (("int8",), {"kind": "nf4"})],
)
def test_a_base_that_changed_is_not_gone_on_with(kinds, option, converted, code, tmp_path, monkeypatch):
    """Neither with other weights nor with other changes; nor is a run with another choice of what is trained."""
    base, run = changed(converted, tmp_path / "base", *kinds), tmp_path / "run"
    stop(going_on(base, code, trainable=("norm.**", "blocks.*.attn_norm.**")), run, 5, monkeypatch)
    refuses("trainable was", train, TrainConfig(trainable=("new",)), run, display()[0], resume=True)
    if option:
        changed(converted, base, *kinds, **option)
    else:
        loaded = checkpoint.load(base)
        with torch.no_grad():
            name = next(n for n in loaded.model.state_dict() if n.endswith(".B" if kinds else "norm.weight"))
            loaded.model.state_dict()[name].add_(0.5)
        checkpoint.save(loaded.model, base, loaded.tokenizer, 64, architecture=loaded.architecture)
    for override in ((), ("corpus", "base")):
        refuses("the model", train, TrainConfig(), run, display()[0], resume=True, override=override)


@pytest.mark.parametrize(("factor", "trainable"), [(1.0, ()), (1e4, ()), (1e4, ("all",))])
def test_a_base_that_knows_less_than_chance_is_left_unless_it_is_asked_for(
    factor, trainable, converted, code, tmp_path
):
    base = checkpoint.load_with_tokenizer(converted)
    base.model.head.weight.data *= factor
    facts = {"trained": {"sources": ["elsewhere"], "complete": True}}
    checkpoint.save(base.model, tmp_path / "base", base.tokenizer, base.context_length, facts)
    shown, output = display()
    config = going_on(tmp_path / "base", code, steps=2, trainable=trainable, complete=True)
    assert train(config, tmp_path / "run", shown) == 0
    chosen = json.loads((tmp_path / "run/state/plan.json").read_text())["base"]
    assert bool(chosen) == (factor == 1.0 or bool(trainable))
    assert ("bits/byte on this text" in output.getvalue()) == (not chosen)
