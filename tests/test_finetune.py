"""Whole finetunes at toy size: what they teach, leave and refuse, and that stopping loses nothing."""

import itertools
import json
import os
import re
from dataclasses import replace

import pytest
import tokenizers
import torch

from conftest import change_json, display, refuses, toy
from dunes import checkpoint, measure, tree
from dunes.augment import Adapted, apply_change
from dunes.cli import verbs
from dunes.data import Batches
from dunes.evaluate.text_loss import Score
from dunes.models import FAMILIES
from dunes.models.initialise import initialise
from dunes.runs import finetune as finetune_module
from dunes.runs import run as run_module
from dunes.runs import task as task_module
from dunes.runs.augment import augment_folder, history
from dunes.runs.finetune import FinetuneTask, choose_options, finetune, load_base, memory
from dunes.runs.finetune_config import METHODS, FinetuneConfig, choose_batch, choose_steps, learning_rate
from dunes.runs.finetune_data import Baseline, FinetuneData
from dunes.runs.saving import METRICS, read_metrics
from dunes.runs.task import Run, trainable_state
from dunes.runs.train import train
from dunes.text import Tokenizer, templates
from test_chat_tools import ANSWER, ASKED, TOOLS, call, calls, result, row, source
from test_runs import assert_same_training, stopping_at

WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
PAIRS = [(f"What comes after {a} {b}?", f"{b} {a}") for a, b in itertools.permutations(WORDS, 2)]
ROWS = [{"instruction": question, "input": "", "output": answer} for question, answer in PAIRS]


@pytest.fixture(scope="module")
def tokenizer():
    prompt = templates.get_template("alpaca").render((templates.Turn("user", "{instruction}"),))[1].text
    text = " ".join(f"{r['instruction']} {r['output']}" for r in ROWS) + prompt
    return Tokenizer.train("bpe", [text], 400)


def base_in(folder, tokenizer, family="llama", context=128, dtype=torch.float32):
    module = FAMILIES[family]
    model = initialise(module.build(module.Config.from_size(tokenizer.vocab, 32, 2, context)), seed=3)
    with torch.no_grad():  # projections that begin as zeros would let nothing through, which PiSSA cannot change
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())) * 0.02)
    checkpoint.save(model.to(dtype), folder, tokenizer, context)
    return folder


@pytest.fixture(scope="module")
def base(tokenizer, tmp_path_factory):
    return base_in(tmp_path_factory.mktemp("bases") / "base", tokenizer)


@pytest.fixture(scope="module")
def examples(tmp_path_factory):
    path = tmp_path_factory.mktemp("examples") / "rows.json"
    path.write_text(json.dumps(ROWS))
    return path


def asked(base, examples, **changes):
    fixed = {"steps": 6, "batch": 4, "rank": 4, "lr": 0.01, "dtype": "float32", "threads": 1}
    return FinetuneConfig(model=str(base), data=str(examples), **fixed | changes)


@pytest.fixture(autouse=True)
def _quick(request, monkeypatch):
    """Short answers, and no estimate of memory but where that is the subject: they take most of a small run."""
    monkeypatch.setattr(finetune_module, "ANSWER_TOKENS", 3)
    if not re.search("memory|cannot_be", request.node.name):
        monkeypatch.setattr(finetune_module, "memory", lambda data: {"weights": 1e6})


def finetuned(config, folder, **how):
    show, out = display()
    assert finetune(config, folder, show, **how) == 0
    return out.getvalue()


def stopped(config, folder, step, monkeypatch):
    """A finetune that a person stops during this step."""
    with monkeypatch.context() as patch:
        stopping_at(step, patch)
        assert finetune(config, folder, display()[0]) == 130


def refuses_run(words, config, folder, **how):
    """Refused with these words."""
    refuses(words, finetune, config, folder, display()[0], **how)


def score_of(folder, config):
    """The score of the folder that was left, computed anew from its files."""
    loaded = checkpoint.load(folder)
    config = replace(config, context_length=loaded.card["finetuned"]["context_length"], dtype="float32")
    data = replace(FinetuneData.read(config, load_base(config), display()[0]), base=loaded)
    task = FinetuneTask(data, None, torch.float32)
    return task.score()


RARE = ("rslora", "qdora", "qlora-int8")
ALL = [pytest.param(name, marks=pytest.mark.slow) if name in RARE else name for name in METHODS]


@pytest.mark.parametrize("method", ALL)
def test_each_method_learns_and_leaves_what_was_measured(method, base, examples, tmp_path):
    rate, folder = 0.003 if method == "full" else 0.02, tmp_path / "run"
    config = asked(base, examples, method=method, steps=30, lr=rate)
    out = finetuned(config, folder)
    lines = [r for r in read_metrics(folder / "metrics.jsonl") if "loss" in r]
    assert lines[-1]["loss"] < lines[0]["loss"]
    card = checkpoint.load(folder).card
    assert card["measured"]["loss"] < card["measured"]["before"] - 0.01
    assert card["template"] == "alpaca"
    assert score_of(folder, config).loss == pytest.approx(card["measured"]["loss"], rel=1e-5)
    assert (folder / "adapter_config.json").is_file() != METHODS[method].saves_model
    assert (folder / "chat_template.jinja").is_file()
    assert "dunes chat" in out.splitlines()[-1]


def test_a_half_base_learns_in_float32_like_its_float32_copy(base, examples, tmp_path):
    loaded, losses = checkpoint.load(base), []
    for dtype in (torch.bfloat16, torch.float32):
        checkpoint.save(loaded.model.to(dtype), tmp_path / f"{dtype}", loaded.tokenizer, loaded.context_length)
        config = asked(tmp_path / f"{dtype}", examples, dtype="float32", steps=4, target_modules=("blocks.0.**",))
        finetuned(config, run := tmp_path / f"run-{dtype}")
        losses.append([step["loss"] for step in read_metrics(run / METRICS) if "loss" in step])
    assert len(losses[0]) == 4
    assert losses[0] == losses[1]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["lora", "qlora", "full", "pissa", "lora-experts"])
def test_stopped_and_resumed_is_straight_bit_for_bit(method, base, examples, tmp_path, monkeypatch):
    dropout = 0.1 if method == "lora" else 0.0
    config = asked(base, examples, method=method, steps=24, dropout=dropout, micro_batch=2)
    straight, halves = tmp_path / "straight", tmp_path / "halves"
    finetuned(config, straight)
    stopped(config, halves, 9, monkeypatch)
    # The base is asked before it is changed, and once: what it said stands in the run.
    asks, real = iter([1]), FinetuneTask.measure_baseline
    monkeypatch.setattr(FinetuneTask, "measure_baseline", lambda *args, **more: next(asks) and real(*args, **more))
    assert finetune(FinetuneConfig(), halves, display()[0], resume=True) == 0
    file = "model.safetensors" if METHODS[method].saves_model else "adapter_model.safetensors"
    assert_same_training(straight, halves, file)
    before = [json.loads((f / "state" / "baseline.json").read_text()) for f in (straight, halves)]
    assert [each.pop("seconds") > 0 for each in before] == [True, True]
    assert before[0] == before[1]


def test_a_run_goes_on_with_its_own_base_and_examples_only(base, tokenizer, examples, tmp_path):
    mine, rows = base_in(tmp_path / "base", tokenizer), tmp_path / "rows.json"
    rows.write_text(json.dumps(ROWS))
    config = asked(mine, rows)
    finetuned(config, tmp_path / "run")
    rows.write_text(json.dumps(ROWS[:-1]))
    refuses_run("cannot resume: examples changed", config, tmp_path / "run", resume=True)
    rows.write_text(json.dumps(ROWS))
    checkpoint.save(initialise(checkpoint.load(mine).model, seed=4), mine, tokenizer, 128)
    refuses_run("cannot resume: base changed", config, tmp_path / "run", resume=True)
    change_json(mine / "config.json", rms_norm_eps=0.01)
    (mine / "dunes.json").unlink()
    refuses_run("base changed; the model's config or changes differ; ", config, tmp_path / "run", resume=True)
    refuses("contains a run of another kind", train, toy(tmp_path), tmp_path / "run", display()[0], resume=True)


@pytest.mark.parametrize("method", [pytest.param("lora", marks=pytest.mark.slow), "qlora"])
def test_a_finetune_knows_its_base_rounded_and_refuses_another(method, tokenizer, examples, tmp_path):
    base = base_in(tmp_path / "base", tokenizer)
    finetuned(asked(base, examples, steps=1, method=method, dtype="bfloat16"), tmp_path / "run")
    model = checkpoint.load(base).model
    card = json.loads((tmp_path / "run" / "dunes.json").read_text())
    assert card["base"]["digests"] == checkpoint.base_identity(model)["digests"]
    assert card["base"]["kind"] == {"lora": "torch.float32", "qlora": "NF4, torch.float32"}[method]
    said = checkpoint.load(tmp_path / "run").model(torch.arange(60)[None])
    checkpoint.save(model.bfloat16(), base, tokenizer, 128)
    rounded = checkpoint.load(tmp_path / "run").model(torch.arange(60)[None])
    print(f"{method}: moved {((rounded - said).norm() / said.norm()).item():.1e}")
    assert 0 < (rounded - said).norm() < 0.2 * said.norm()
    checkpoint.save(initialise(model, seed=5), base, tokenizer, 128)
    refuses("made for a different base", checkpoint.load, tmp_path / "run")


@pytest.mark.slow
def test_a_run_goes_on_from_elsewhere_and_with_what_was_moved(base, examples, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    (tmp_path / "here" / "base").symlink_to(base)
    (tmp_path / "here" / "rows.json").write_text(examples.read_text())
    monkeypatch.chdir(tmp_path / "here")
    finetuned(asked("base", "rows.json", steps=2), tmp_path / "run")
    monkeypatch.chdir(tmp_path / "there")
    assert finetune(FinetuneConfig(), tmp_path / "run", display()[0], resume=True) == 0
    (tmp_path / "here" / "rows.json").rename("moved.json")
    again = {"resume": True, "asked": ["data"], "override": ["data"]}
    assert finetune(FinetuneConfig(data="moved.json"), tmp_path / "run", display()[0], **again) == 0
    (tmp_path / "there" / "moved.json").write_text(json.dumps(ROWS[1:]))
    refuses_run("cannot resume: examples changed", FinetuneConfig(data="moved.json"), tmp_path / "run", **again)


def test_a_model_that_is_no_run_s_is_not_written_over(base, tokenizer, examples, tmp_path):
    other = base_in(tmp_path / "other", tokenizer)
    before = (other / "model.safetensors").read_bytes()
    refuses_run(str(other), asked(base, examples), other)
    assert (other / "model.safetensors").read_bytes() == before
    assert not (other / "state").exists()
    (tmp_path / "file").touch()
    refuses_run("file: is not a writable folder", asked(base, examples), tmp_path / "file" / "run")


def test_the_best_weights_of_an_adapter_are_what_is_saved(base, examples, tmp_path, monkeypatch):
    """Validation that is best at the second check and worse ever after."""
    monkeypatch.setattr(run_module, "_check_due", lambda step: True)
    scores = iter([Score(11.0, 10, 10), Score(10.0, 10, 10), *(Score(20.0 + i, 10, 10) for i in range(9))])
    check, kept = Run.validate, {}

    def remembered(run):
        score = check(run)
        kept[run.trainer.number] = {k: v.clone() for k, v in run.model.state_dict().items() if ".adapters." in k}
        return score

    config, folder = asked(base, examples, steps=6), tmp_path / "run"
    baseline = Baseline(Score(30.0, 10, 10), None, [], "")
    monkeypatch.setattr(FinetuneTask, "measure_baseline", lambda self, *a: baseline)
    monkeypatch.setattr(FinetuneTask, "score", lambda self, limit=None: next(scores))
    monkeypatch.setattr(Run, "validate", remembered)
    assert "warning: no better than the base model" in finetuned(config, folder)
    saved = checkpoint.load(folder).model.state_dict()
    assert all(torch.equal(saved[name], tensor) for name, tensor in kept[2].items())
    assert not all(torch.equal(saved[name], tensor) for name, tensor in kept[6].items())


REFUSED = {
    "no such base": {"model": "nowhere"},
    "no such file": {"data": "nowhere.json"},
    "no model": {"model": ""},
    "few experts": {"method": "lora-experts", "experts": 1},
    "too long": {"context_length": 16},
    "odd batch": {"batch": 4, "micro_batch": 3},
    "no token": {"template": "llama3"},
    "without effect": {"method": "full", "rank": 4},
    "nowhere": {"target_modules": ("blocks.9.**",)},
    "nothing": {"method": "full", "target_modules": ("blocks.9.**",)},
    "large rank": {"rank": 64},
    "odd ranks": {"ranks": ("mlp=x",)},
    "negative rate": {"lr": -1.0},
    "no rate": {"lr": float("nan")},
    "no alpha": {"alpha": 0.0, "lr": None},
    "method": {"method": "prefix"},
    "dropout": {"dropout": 1.5},
    "held out": {"val_fraction": 0.0},
    "domain": {"forgetting_data": ("nowhere",)},
    "form": {"model": "moe"},
    "form quantized": {"model": "moe", "method": "qlora"},
    "experts of DoRA": {"model": "mixtral", "method": "dora"},
    "adapted": {"model": "adapted"},
    "an adapter": {"model": "adapter", "method": "full"},
    "no answers": {"data": "questions.json"},
    "no targets for validation": {"data": "one.json", "val_fraction": 0.2},
    "no targets in the validation file": {"val_data": "questions.json"},
}


@pytest.fixture(scope="module")
def bad(base, tokenizer, tmp_path_factory):
    """Bases that some methods cannot change, and files without answers to learn from."""
    folder = tmp_path_factory.mktemp("bad")
    for family in ("gpt2", "mixtral"):
        base_in(folder / family, tokenizer, family)
    augment_folder(folder / "gpt2", folder / "moe", "upcycle", experts=2)
    loaded = checkpoint.load(base)
    change = apply_change(loaded.model, "lora", rank=2, adapter="first")
    architecture = replace(loaded.architecture, changes=(change,))
    checkpoint.save(loaded.model, folder / "adapted", loaded.tokenizer, 64, architecture=architecture)
    checkpoint.save_adapter(loaded.model, folder / "adapter", "first", base=base)
    chats(folder / "questions.json", [0] * 10)
    chats(folder / "one.json", [1] + [0] * 9)
    return folder


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_said_before_anything_is_written(case, bad, base, examples, tmp_path, monkeypatch):
    monkeypatch.setattr(FinetuneTask, "measure_baseline", None)
    made = os.listdir(bad)
    changes = {name: str(bad / value) if value in made else value for name, value in REFUSED[case].items()}
    how = {"asked": changes} if case == "without effect" else {}
    config = lambda: replace(asked(base, examples), **changes)
    refuses(".", lambda: finetune(config(), tmp_path / "run", display()[0], **how))
    assert not [p for p in tmp_path.rglob("*") if p.is_file()]


def chats(path, weights, size=1):
    """Conversations with these weights of their answers; those of weight 0 have questions of `size` words."""
    rows = [
        {"messages": [{"role": "user", "content": f"question {i} " * (1 if w else size)},
                      {"role": "assistant", "content": f"answer {i}", "weight": w or int(size > 1)}]}
        for i, w in enumerate(weights)
    ]  # fmt: skip
    path.write_text(json.dumps(rows))
    return path


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 60])
def test_examples_without_targets_are_not_for_validation(size, base, tmp_path):
    """As an answer that is excluded, or that begins beyond the context; in a dry run as well."""
    for share in (0.05, 0.5, 0.9):
        path = chats(tmp_path / "rows.json", [1] * 4 + [0] * 20, size)
        config = asked(base, path, val_fraction=share, context_length=128, max_truncated=1.0)
        assert "20 examples without targets" in finetuned(config, tmp_path / "run", dry_run=True)
        data = ready(base, path, val_fraction=share, context_length=128, max_truncated=1.0)
        assert 1 <= len(data.valid) <= 3
        assert all(e.targets(128) for e in data.valid)
    finetuned(replace(config, steps=1), tmp_path / "run")


def test_tasks_with_a_history_get_a_template_that_can_write_it(base, tmp_path):
    path = tmp_path / "rows.json"
    more = {"system": "Be brief.", "history": [["Hi", "Ho"]], "topic": "x"}
    path.write_text(json.dumps([r | more for r in ROWS]))
    out = finetuned(asked(base, path), tmp_path / "run", dry_run=True, examples=1)
    assert "template: chatml" in out
    assert "ignored fields: topic" in out
    assert "system\nBe brief." in out
    assert "⟦Ho<|im_end|>⟧" in out


def test_only_what_was_named_learns(base, examples, tmp_path):
    finetuned(asked(base, examples, method="full", target_modules=("blocks.1.**", "!**.k")), tmp_path / "full")
    before, after = (checkpoint.load(f).model.state_dict() for f in (base, tmp_path / "full"))
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {n for n in before if n.startswith("blocks.1.") and ".attn.k." not in n}
    finetuned(asked(base, examples, target_modules=("**.mlp.**",), ranks=("**.up=2",)), tmp_path / "lora")
    there = tree.places(checkpoint.load(tmp_path / "lora").model)
    ranks = {p.name: p.module["default"].config.rank for p in there if isinstance(p.module, Adapted)}
    assert all(".mlp." in name for name in ranks)
    assert {name.split(".")[-1]: rank for name, rank in ranks.items()} == {"gate": 4, "up": 2, "down": 4}


def test_full_finetuning_of_bfloat16_is_done_in_float32_and_kept_in_bfloat16(tokenizer, examples, tmp_path):
    half = base_in(tmp_path / "half", tokenizer, dtype=torch.bfloat16)
    finetuned(asked(half, examples, method="full", lr=1e-5), tmp_path / "run")
    state = checkpoint.load_state(checkpoint.latest_state(tmp_path / "run"))
    assert {t.dtype for t in state["weights"].values()} == {torch.float32}
    before = checkpoint.load(half).model.state_dict()
    moved = [not torch.equal(state["weights"][k], v.float()) for k, v in before.items()]
    assert all(moved), "steps that bfloat16 would round away"
    after = checkpoint.load(tmp_path / "run").model
    assert {p.dtype for p in after.parameters()} == {torch.bfloat16}


@pytest.mark.slow
def test_a_context_may_grow_where_positions_are_angles(tokenizer, examples, tmp_path):
    narrow = base_in(tmp_path / "narrow", tokenizer, context=16)
    out = finetuned(asked(narrow, examples), tmp_path / "run")
    assert "warning: the base model was trained on 16 tokens" in out
    assert checkpoint.load(tmp_path / "run").context_length >= 32
    finetuned(asked(narrow, examples, method="full"), tmp_path / "full")
    assert checkpoint.load(tmp_path / "full").context_length >= 32
    learnt = base_in(tmp_path / "learnt", tokenizer, "gpt2", context=16)
    refuses_run("longer than the context of 16", asked(learnt, examples), tmp_path / "no")
    refuses_run("--context-length", asked(learnt, examples, context_length=64), tmp_path / "no")


def test_chats_with_tools_are_learned_and_their_samples_have_tools_and_calls(tokenizer, tmp_path, monkeypatch):
    own = Tokenizer(tokenizers.Tokenizer.from_str(tokenizer.json()))
    own.extra_files["chat_template.jinja"] = source("qwen3").encode()
    base, data = base_in(tmp_path / "base", own, context=512), tmp_path / "data.jsonl"
    talks = [[ASKED, calls(call(city=word), thinking=f"{word}?")] for word in WORDS[:5]]
    talks += [[*talk, result(word), ANSWER] for talk, word in zip(talks, WORDS, strict=False)]
    data.write_text("\n".join(json.dumps(row(talk, TOOLS[:1])) for talk in talks))
    prompts, encode = [], templates.encode_prompt
    monkeypatch.setattr(templates, "encode_prompt", lambda *args: prompts.append(encode(*args)) or prompts[-1])
    out = finetuned(asked(base, data, context_length=512, val_fraction=0.3), tmp_path / "run")
    losses = [r["loss"] for r in read_metrics(tmp_path / "run" / "metrics.jsonl") if "loss" in r]
    assert losses[-1] < losses[0]
    assert prompts
    assert all('"name": "weather"' in own.decode(ids) for ids in prompts)
    assert '{"name": "weather", "arguments": {"city": "' in (tmp_path / "run" / "samples.md").read_text()
    assert "10 records of chats (messages)" in out


TIMED = {"seconds": 0.0}
"""How long a measurement took is no part of what it measured."""


def test_a_note_of_what_the_base_could_do_is_made_anew_if_damaged_or_of_another_base(base, examples, tmp_path):
    """Left behind by a run that ended while it changed its base."""
    config, note = asked(base, examples, steps=1), tmp_path / "run" / "state" / "baseline.json"
    finetuned(config, tmp_path / "right")
    text = (tmp_path / "right" / "state" / "baseline.json").read_text()
    right = json.loads(text)
    note.parent.mkdir(parents=True)
    note.write_text(json.dumps(right | {"score": [1.0, 2, 3]}))
    finetuned(config, tmp_path / "run")
    assert json.loads(note.read_text()) | TIMED == right | TIMED
    note.write_text(text[:30])
    said = finetuned(FinetuneConfig(), tmp_path / "run", resume=True)
    assert f"warning: {note}: not JSON" in said
    assert "evaluating the base model" in said
    assert json.loads(note.read_text()) | TIMED == right | TIMED


@pytest.mark.slow
def test_the_domain_is_one_text_before_and_after(base, examples, code, tmp_path, monkeypatch):
    config = asked(base, examples, forgetting_data=(str(code),), steps=12)
    stopped(config, tmp_path / "run", 9, monkeypatch)
    for path in code.glob("*.py"):
        path.write_text(path.read_text() * 2)
    assert finetune(FinetuneConfig(), tmp_path / "run", display()[0], resume=True) == 0
    finetuned(config, tmp_path / "straight")
    cards = [json.loads((tmp_path / f / "dunes.json").read_text())["measured"] for f in ("run", "straight")]
    assert cards[0]["forgetting"] == cards[1]["forgetting"]
    assert cards[0]["before"] == cards[1]["before"]


def test_validation_may_have_a_file_of_its_own_and_a_leak_that_differs_in_space_is_told(base, examples, tmp_path):
    other = tmp_path / "valid.jsonl"
    copies = [{**r, "output": r["output"] + " "} for r in ROWS[:3]]
    other.write_text("".join(json.dumps(r) + "\n" for r in [*copies, {**ROWS[5], "output": "another"}]))
    out = finetuned(asked(base, examples, val_data=str(other)), tmp_path / "run")
    assert "90 examples, 4 for validation; 0 duplicates, 3 validation examples are in the training data" in out
    assert "warning: 3 validation examples are in the training data" in out


def test_a_run_by_the_clock(base, examples, tmp_path, monkeypatch):
    looks = itertools.count()
    for module in (run_module, task_module):
        monkeypatch.setattr(module, "monotonic", lambda: next(looks) * 0.02)
    finetuned(asked(base, examples, steps=None, minutes=0.05), tmp_path / "run")
    card = json.loads((tmp_path / "run" / "dunes.json").read_text())
    assert 1.4 < card["finetuned"]["seconds"] < 3.1, "half at most is kept for the last measurements"


@pytest.mark.parametrize("kind", ["completion", "messages", "text"])
def test_other_records(kind, base, tmp_path):
    rows = {
        "completion": [{"prompt": r["instruction"], "completion": r["output"]} for r in ROWS],
        "messages": [{"messages": [{"role": "user", "content": r["instruction"]},
                                   {"role": "assistant", "content": r["output"]}]} for r in ROWS],
        "text": [{"text": f"{r['instruction']} {r['output']}"} for r in ROWS],
    }  # fmt: skip
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in rows[kind]))
    out = finetuned(asked(base, path), tmp_path / "run")
    assert f"template: {'chatml' if kind == 'messages' else 'plain'}" in out
    loaded = checkpoint.load(tmp_path / "run")
    if kind == "messages":
        assert loaded.tokenizer.inner.token_to_id("<|im_end|>") in loaded.tokenizer.stops


@pytest.fixture(scope="module")
def book(tmp_path_factory):
    path = tmp_path_factory.mktemp("books") / "book.txt"
    path.write_text("".join(f"{r['instruction']} {r['output']}\n" for r in ROWS))
    return path


def test_plain_text_is_learned_in_windows_and_its_end_held_out(base, book, tokenizer, tmp_path):
    data = ready(base, book, steps=None)
    config = data.config
    ids = [*tokenizer.document_start, *tokenizer.encode(book.read_text()), tokenizer.eos]
    assert len(ids) > 3 * config.context_length
    assert config.context_length == data.base.context_length == 128
    rows = Batches(data.train, config.context_length, 1, packed=config.packing)
    asked_for = [t for e in data.train for t in e.ids[1:].tolist()]
    held = [t for e in data.valid for t in e.ids[1:].tolist()]
    assert asked_for + held == ids[1:]
    assert len(held) == pytest.approx(0.2 * len(ids), abs=1)
    # An epoch asks for each of them once, and nothing is left out of a row.
    batches = map(rows.batch, range(rows.rows_per_epoch))
    epoch = [t for _, targets, _ in batches for t in targets[targets >= 0].tolist()]
    assert sorted(epoch) == sorted(asked_for)
    out = finetuned(asked(base, book, steps=30, method="full", lr=0.003), tmp_path / "run")
    assert " 0 for validation" not in out
    assert f"{len(ids) - len(held)} tokens, {len(asked_for)} of them targets" in out
    card = checkpoint.load(tmp_path / "run").card
    assert card["measured"]["tokens"] == len(held)
    assert card["measured"]["loss"] < card["measured"]["before"]
    score = score_of(tmp_path / "run", asked(base, book))
    assert score.loss == pytest.approx(card["measured"]["loss"], rel=1e-5)


def test_another_template_than_the_base_was_taught_with_is_told_and_plain_rows_leave_it(base, examples, tmp_path):
    finetuned(asked(base, examples, method="full"), tmp_path / "alpaca")
    again = finetuned(asked(tmp_path / "alpaca", examples), tmp_path / "same", dry_run=True)
    assert "template: alpaca\n" in again
    assert "warning: it replaces the place" not in again
    other = finetuned(asked(tmp_path / "alpaca", examples, template="chatml"), tmp_path / "other", dry_run=True)
    assert "warning: it replaces the base model's own template: alpaca" in other
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": r["instruction"]}) + "\n" for r in ROWS))
    out = finetuned(asked(tmp_path / "alpaca", rows), tmp_path / "more")
    assert "template: plain" in out
    assert "warning: it replaces" not in out
    assert checkpoint.load(tmp_path / "more").card["template"] == "alpaca"


def test_renamed_fields_are_recorded_and_kept_by_resume(base, tmp_path, capsys):
    rows = [{"question": r["instruction"], "answer": r["output"], "output": "x"} for r in ROWS]
    path, run = tmp_path / "rows.jsonl", tmp_path / "run"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = asked(base, path, fields=("instruction=question,output=answer",), steps=4)
    assert "ignored fields: output (replaced by --fields)" in " ".join(finetuned(config, run).split())
    card = checkpoint.load(run).card
    assert card["finetuned"]["fields"] == ["instruction=question,output=answer"]
    show, out = display()
    resumed = FinetuneConfig(steps=6)
    assert finetune(resumed, run, show, resume=True, asked={"steps"}, override=("steps",)) == 0
    assert "output (replaced by --fields)" in " ".join(out.getvalue().split())
    for fields in ("prompt=question", "reply=answer"):
        refuses_run(".", asked(base, path, fields=(fields,)), tmp_path / "x")
    refuses("--fields output", asked, base, path, fields=("output",))
    refuses("--text-field", asked, base, path, fields=("text=answer",), text_field=("answer",))
    assert not (tmp_path / "x").exists()
    verbs.evaluate(str(run), (str(path),), fields=("prompt=question,completion=answer",))
    assert re.search(r"^1 file, .* nats/token", capsys.readouterr().out, re.M)


def test_records_that_are_rendered_equally_are_on_one_side(base, tmp_path):
    """Tasks in four forms, of which only the template makes the last equal to the others."""
    forms = {
        "a": lambda i: {"instruction": f"Add {i}.", "input": "To 7.", "output": f"{i + 7}"},
        "b": lambda i: {"conversations": [{"from": "human", "value": f"Add {i}.\n\nTo 7."},
                                          {"from": "gpt", "value": f"{i + 7}"}]},
        "c": lambda i: {"messages": [{"role": "user", "content": f"Add {i}.\n\nTo 7."},
                                     {"role": "assistant", "content": f"{i + 7}"}]},
        "d": lambda i: {"instruction": "To 7.", "system": f"Add {i}.", "output": f"{i + 7}"},
    }  # fmt: skip
    for name, form in forms.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(form(i)) + "\n" for i in range(30)))
    config = asked(base, tmp_path, template="mistral")
    data = FinetuneData.read(config, load_base(config), display()[0])
    numbers = [{e.place.rpartition(" ")[2] for e in side} for side in (data.train, data.valid)]
    assert all(numbers)
    assert not numbers[0] & numbers[1]


def ready(base, examples, **changes):
    return fitted(asked(base, examples, **changes), display()[0])


def fitted(config, show):
    """The data of a run with all of its options chosen."""
    return choose_options(FinetuneData.read(config, load_base(config), show), show)


def test_fewer_rows_at_once_where_memory_is_short(base, examples, monkeypatch):
    whole = ready(base, examples, batch=8)
    assert whole.config.micro_batch == 8
    needed = sum(memory(whole).values())
    least = sum(memory(replace(whole, config=replace(whole.config, micro_batch=2))).values())
    monkeypatch.setattr(measure, "free_memory", lambda device: int((needed + least) / 2))
    assert ready(base, examples, batch=8).config.micro_batch in (2, 4)
    monkeypatch.setattr(measure, "free_memory", lambda device: 1_000_000)  # the weights fit, no more
    show, out = display()
    assert fitted(asked(base, examples, batch=8), show).config.micro_batch == 1
    assert "warning: that may not fit" in out.getvalue()


def test_the_state_holds_buffers_that_training_changes_and_neither_codes_nor_scales():
    model = FAMILIES["gpt2"].build(FAMILIES["gpt2"].Config.from_size(50, 32, 2, 32))
    apply_change(model, "quantize", kind="nf4", double=True)
    tree.freeze(model, ["**", "!**.attn.*.bias"])
    model.average = torch.nn.BatchNorm1d(2).requires_grad_(False)
    names = {name.rpartition(".")[2] for name in trainable_state(model)}
    assert names == {"bias", "running_mean", "running_var", "num_batches_tracked"}


def test_what_is_chosen(base, examples):
    config = FinetuneConfig(model="m", data="d")
    full = replace(config, method="full")
    assert learning_rate(full, 4096) == 2e-5
    assert learning_rate(full, 192) == pytest.approx(1e-3, rel=0.02)
    assert learning_rate(config, 2000) == 3.5e-4
    assert learning_rate(config, 192) == pytest.approx(2.2e-3, rel=0.02)
    assert learning_rate(config, 32) == 0.005
    assert learning_rate(replace(config, lr=0.5, method="rslora", alpha=8.0), 512) == 0.5
    higher = replace(config, rank=64)
    assert learning_rate(higher, 192) == learning_rate(config, 192), "alpha / rank evens that out"
    assert learning_rate(replace(config, alpha=64.0), 192) == learning_rate(config, 192) / 2
    assert learning_rate(replace(config, method="rslora"), 192) == learning_rate(config, 192) / 4
    assert choose_batch(config, 512, 10_000) == 8
    assert choose_batch(config, 512, 64) == 2
    assert choose_batch(config, 8192, 10_000) == 1
    assert choose_steps(config, 100, 8) == 38
    assert choose_steps(replace(config, epochs=1.0), 100, 8) == 12
    assert choose_steps(replace(config, minutes=1.0), 100, 8) is None
    assert ready(base, examples, steps=None, batch=0).config.steps > 0


@pytest.mark.parametrize("method", ["full", "lora"])
def test_what_was_done_to_the_base_before_stays_in_the_card(method, base, examples, tmp_path):
    loaded = checkpoint.load(base)
    earlier = [{"name": "first"}]
    checkpoint.save(loaded.model, tmp_path / "base", loaded.tokenizer, 128, {"changes": earlier})
    finetuned(asked(tmp_path / "base", examples, method=method, steps=2), tmp_path / "run")
    assert history(checkpoint.load(tmp_path / "run")) == earlier
