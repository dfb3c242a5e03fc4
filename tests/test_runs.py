"""Whole runs at toy size: what they leave behind, and that stopping loses nothing."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from math import inf, nan
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn.modules.module import register_module_forward_hook

from conftest import display, equal_states, eventually, metaspace_tokenizer, refuses, toy, training_output
from dunes import checkpoint, measure
from dunes.checkpoint import LoadedModel
from dunes.checkpoint.card import has_own_form
from dunes.checkpoint.export import export
from dunes.completion import copy_gate, fit
from dunes.completion.engine import CompletionEngine
from dunes.data import collect_corpus
from dunes.data.sources import SPLIT_VERSION
from dunes.evaluate import text_loss
from dunes.evaluate.text_loss import Score, evaluate, evaluation_tokens, score_folder
from dunes.inference import text_generator
from dunes.models import FAMILIES
from dunes.parts import Decoder
from dunes.runs import autosize, saving
from dunes.runs import run as run_module
from dunes.runs import train as train_module
from dunes.runs.autosize import config_for
from dunes.runs.corpus import gather, tokenize
from dunes.runs.run import early_end
from dunes.runs.saving import read_metrics
from dunes.runs.train import TrainTask, train
from dunes.runs.train_config import TrainConfig, parse_size
from dunes.text import KINDS, Tokenizer
from dunes.tree import count


def assert_same_training(folder, other, file="model.safetensors"):
    """The same weights and state of the optimizer, losses of all steps to the last bit, and file of weights."""
    states = [checkpoint.load_state(checkpoint.latest_state(f)) for f in (folder, other)]
    for name in ("weights", "best_weights", "best_step", "trainer", "schedule"):
        assert equal_states(*(state[name] for state in states)), name
    logs = [read_metrics(f / "metrics.jsonl") for f in (folder, other)]
    names = ("step", "loss_hex", "lr_scale", "validation_loss", "bits_per_byte")
    exact = [[[r.get(name) for name in names] for r in log if "loss" in r] for log in logs]
    assert exact[0] == exact[1]
    assert (folder / file).read_bytes() == (other / file).read_bytes()


def test_a_hook_on_the_model_sees_every_step_of_training(code, tmp_path):
    """What FSDP and profilers rely on."""
    outputs = []

    def remember(module, inputs, output):
        if isinstance(module, Decoder):
            outputs.append((module.training, output))

    hook = register_module_forward_hook(remember)
    try:
        assert train(toy(code, steps=4), tmp_path / "run", display()[0]) == 0
    finally:
        hook.remove()
    records = [r for r in read_metrics(tmp_path / "run" / "metrics.jsonl") if "loss" in r]
    sums = [output for training, output in outputs if training]
    assert [r["loss"] for r in records] == [float(total.detach()) / int(count) for total, count, _ in sums]
    assert any(not training for training, _ in outputs), "validation"


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_trains_from_scratch_with_every_tokenizer(family, kind, code, tmp_path):
    printed = training_output(toy(code, family=family, tokenizer=kind, steps=2), tmp_path / "run")
    loaded = checkpoint.load(tmp_path / "run")
    assert loaded.card["family"] == {"phi3": "mistral"}.get(family, family)  # it has the modules of one
    assert loaded.card["trained"]["steps"] == 2
    assert "done after 2 steps" in printed


@pytest.mark.usefixtures("draws")
def test_a_run_learns_and_leaves_what_it_promises(code, tmp_path):
    folder = tmp_path / "run"
    printed = training_output(toy(code, steps=60), folder)
    lines = read_metrics(folder / "metrics.jsonl")
    assert [r["step"] for r in lines] == list(range(1, 61))
    assert lines[-1]["loss"] < lines[0]["loss"] / 2
    assert all(float.fromhex(r["loss_hex"]) == r["loss"] for r in lines)
    assert [r["step"] for r in lines if "bits_per_byte" in r] == [10, 25, 50, 60]
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert re.findall("## After ([0-9]+) steps", (folder / "samples.md").read_text()) == ["5", "50", "60"]
    card = json.loads((folder / "dunes.json").read_text())
    assert card["measured"]["perplexity"] == pytest.approx(np.exp(card["measured"]["loss"]))
    score, files = score_folder(folder)
    assert files == len(collect_corpus([code]).valid)
    assert score.bits_per_byte == pytest.approx(card["measured"]["bits_per_byte"], rel=1e-4)
    assert "bits/byte" in printed
    assert "dunes generate" in printed.splitlines()[-1]


def stopping_at(step, monkeypatch):
    """A person who presses Ctrl-C during this step."""
    real = run_module._log_step

    def note(path, done, bits):
        real(path, done, bits)
        if done.number == step:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(run_module, "_log_step", note)


def stop(config, folder, step, monkeypatch):
    """What a run says that is stopped during this step."""
    with monkeypatch.context() as patch:
        stopping_at(step, patch)
        return training_output(config, folder, status=130)


def train_in_halves(config, folder, step, monkeypatch):
    """A run that is stopped during this step and resumed, which changes nothing."""
    straight, halves = folder / "straight", folder / "halves"
    assert train(config, straight, display()[0]) == 0
    stop(config, halves, step, monkeypatch)
    assert train(TrainConfig(), halves, display()[0], resume=True) == 0
    assert_same_training(straight, halves)
    return halves


@pytest.mark.slow
def test_stopped_and_resumed_is_straight_bit_for_bit_over_epochs(code, tmp_path, monkeypatch):
    config = toy(code, steps=90, batch=16)
    straight, halves = tmp_path / "straight", tmp_path / "halves"
    train(config, straight, display()[0])
    said = stop(config, halves, 37, monkeypatch)
    assert "stopped after 37 steps" in said
    assert "--resume" in said.splitlines()[-1]
    assert checkpoint.load(halves).card["trained"]["steps"] == 37
    assert train(TrainConfig(sources=()), halves, display()[0], resume=True) == 0
    assert np.prod([90, 16, 32]) > 2 * 32 * 40 * 12, "more than one epoch"
    assert_same_training(straight, halves)
    for name in ("config.json", "tokenizer.json"):
        assert (straight / name).read_bytes() == (halves / name).read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("split", ["files", "tails"])
def test_separate_documents_are_scored_as_they_are_trained_and_resumed_exactly(split, code, tmp_path, monkeypatch):
    config = toy(code, split=split, context_length=128, separate_documents=True, complete=False)
    straight, halves, joined = (tmp_path / name for name in ("straight", "halves", "joined"))
    train(config, straight, display()[0])
    stop(config, halves, 5, monkeypatch)
    train(TrainConfig(sources=()), halves, display()[0], resume=True)
    train(replace(config, separate_documents=False), joined, display()[0])
    losses = [[r["loss_hex"] for r in read_metrics(f / "metrics.jsonl")] for f in (straight, halves, joined)]
    assert losses[0] == losses[1]
    assert losses[0][1] != losses[2][1]
    card = checkpoint.load(straight).card
    assert score_folder(straight)[0].loss == pytest.approx(card["measured"]["loss"], rel=1e-6)
    del card["trained"]["separate_documents"]
    loaded = replace(checkpoint.load_with_tokenizer(straight), card=card)
    score = evaluate(loaded, evaluation_tokens(loaded)[0])
    assert abs(score.loss / card["measured"]["loss"] - 1) > 1e-4, "joined, they score otherwise"


@pytest.mark.parametrize("split", ["files", "tails"])
@pytest.mark.parametrize("tokenizer", [Tokenizer.train("bytes", []), metaspace_tokenizer()])
def test_the_validation_tokens_of_eval_are_those_of_training(tokenizer, split, code):
    config = toy(code, split=split, separate_documents=True)
    with display()[0] as show:
        ids = tokenize(config, gather(config), tokenizer, show).valid
    card = {"trained": asdict(config) | {"split_version": SPLIT_VERSION}}
    again, _ = evaluation_tokens(LoadedModel(None, tokenizer, 1, card))
    every = np.arange(len(ids))[None]
    assert np.array_equal(ids[every], again[every[0]][None])
    assert ids.starts.tolist() == again.starts.tolist()
    assert ids.end == again.end == tokenizer.eos


def test_a_finished_run_that_is_resumed_is_the_same_run_and_a_tokenizer_left_by_none_is_not_used(code, tmp_path):
    """Also of a depth and a width that were asked for."""
    folder, config = tmp_path / "run", toy(code, size="3x96", steps=1)
    (folder / "state").mkdir(parents=True)
    Tokenizer.train("bytes", []).save(folder / "state")
    train(config, folder, display()[0])
    loaded, before = checkpoint.load(folder), (folder / "model.safetensors").read_bytes()
    assert loaded.tokenizer.vocab == 300
    assert (len(loaded.model.blocks), loaded.model.embed.token.embedding_dim) == (3, 96)
    assert train(config, folder, display()[0], resume=True) == 0
    assert (folder / "model.safetensors").read_bytes() == before
    assert train(replace(config, steps=2), folder, display()[0], resume=True, override=["steps"]) == 0


def refused(config, folder, resume=False):
    show, _ = display()
    return refuses(r".", train, config, folder, show, resume=resume)


def test_a_run_that_another_process_has_made_meanwhile_stays(code, tmp_path, monkeypatch):
    """The folder was free when the second run began, and the first ended while that one read its text."""
    folder, other = tmp_path / "run", train_module.gather

    def gather(config):
        with monkeypatch.context() as patch:
            patch.setattr(train_module, "gather", other)
            assert train(toy(code, steps=3), folder, display()[0]) == 0
        return other(config)

    monkeypatch.setattr(train_module, "gather", gather)
    refuses("already contains a run", train, toy(code, steps=5, seed=1), folder, display()[0])
    assert len(read_metrics(folder / "metrics.jsonl")) >= 3
    assert checkpoint.latest_state(folder).name == "step-000003"


STOPS = {  # the function that a signal interrupts, in which call, the last step, and the steps validated by then
    "validation": (text_loss, "_rectangle", 2, 10, []),
    "the last validation": (TrainTask, "score", 2, 12, [10]),
    "a sample": (text_generator.TextGenerator, "_use_step", 1, 3, []),
    "the gate": (copy_gate, "scored_places", 1, 12, [10, 12]),
}


@pytest.mark.parametrize("where", [pytest.param(n, marks=[pytest.mark.slow] * (n == "the gate")) for n in STOPS])
def test_a_stop_is_obeyed_at_once_and_the_resumed_run_is_that_without(where, code, tmp_path, monkeypatch):
    owner, name, number, last, validated = STOPS[where]
    config, real, calls = toy(code, seed=1, complete=where == "the gate"), getattr(owner, name), []
    for each in ("PLACES", "CURSORS"):
        monkeypatch.setattr(fit, each, (0.0, 4, 4))
    monkeypatch.setattr(run_module, "SAMPLES", (3,) if where == "a sample" else ())

    def stopped(*arguments):
        calls.append(None)
        if len(calls) == number:
            signal.raise_signal(signal.SIGTERM)
        return real(*arguments)

    checks = lambda run: [r["step"] for r in read_metrics(run / "metrics.jsonl") if "bits_per_byte" in r]
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, stopped)
        patch.setattr(text_loss, "BATCH", 2)
        printed = training_output(config, tmp_path / "run", status=128 + signal.SIGTERM)
    assert len(calls) <= number + 1, "nothing more but a last, minimal validation"
    assert ("sample after" in printed) == (where == "the gate")
    assert checkpoint.latest_state(tmp_path / "run").name == f"step-{last:06}"
    assert checks(tmp_path / "run") == validated
    assert ("completion: " in training_output(config, tmp_path / "run", resume=True)) == (where == "the gate")
    train(config, tmp_path / "straight", display()[0])
    assert checks(tmp_path / "run") == checks(tmp_path / "straight") == [10, 12]
    runs = [(tmp_path / each / "model.safetensors").read_bytes() for each in ("run", "straight")]
    assert runs[0] == runs[1]


@pytest.mark.parametrize(
    ("seconds", "low", "high"), [(0.0, 60, 60), (0.01, 60, 60), (8.0, 300, 1200), (60.0, 1200, 3600)]
)
def test_states_are_saved_as_often_as_the_work_that_would_be_lost_is_worth(seconds, low, high):
    saver = saving.Saver(None, print)
    saver.seconds = seconds
    assert low <= saver.interval <= high


def test_a_run_is_never_begun_over_another_nor_changed(code, tmp_path):
    folder = tmp_path / "run"
    refused(toy(code), folder, resume=True)
    refused(TrainConfig(sources=()), folder)
    assert not folder.exists(), "nothing is written before all is known to be well"
    train(toy(code, steps=2), folder, display()[0])
    assert str(folder) in refused(toy(code), folder)
    with saving.run_lock(folder):
        assert "in use by another training process" in refused(toy(code, steps=2), folder, resume=True)
    changed = refused(toy(code, steps=2, size="70k", family="gpt2"), folder, resume=True)
    assert all(words in changed for words in ("size was '60k', now '70k'", "family was 'arcee', now 'gpt2'"))
    (code / "module_3.py").write_text("something = 'else'\n" * 50)
    assert refused(TrainConfig(sources=()), folder, resume=True).endswith("or pass --override corpus")


@pytest.mark.slow
def test_a_longer_end_and_what_is_overridden_by_name_are_taken_and_noted(code, tmp_path):
    folder = tmp_path / "run"
    train(toy(code, steps=10), folder, display()[0])
    other = {"resume": True, "override": ["size"]}
    refuses("another --out", train, toy(code, size="70k"), folder, display()[0], **other)
    assert train(toy(code, steps=25), folder, display()[0], resume=True) == 0
    lines = read_metrics(folder / "metrics.jsonl")
    assert [r["step"] for r in lines if "loss" in r] == list(range(1, 26))
    assert [r["changed"] for r in lines if "changed" in r] == [{"steps": "steps was 10, now 25"}]
    assert saving.read_config(folder, TrainConfig).steps == 25
    assert lines[-1]["lr_scale"] < 0.1 < lines[12]["lr_scale"], "the rate went up again, and down to the new end"
    (code / "module_3.py").write_text("something = 'else'\n" * 50)
    assert train(TrainConfig(sources=()), folder, display()[0], resume=True, override=["corpus"]) == 0


def test_a_run_has_one_end(code, tmp_path):
    folder, show = tmp_path / "run", display()[0]
    config, asked = toy(code, steps=2, minutes=1.0), {"steps": 2, "minutes": 1.0}
    refuses("--steps and --minutes exclude each other", train, config, folder, show, asked=asked)
    train(toy(code, steps=2), folder, show)
    words = "the run stops after 2 steps, not after a time; use --steps N"
    refuses(words, train, TrainConfig(minutes=1.0), folder, show, resume=True, asked={"minutes": 1.0})
    assert train(TrainConfig(steps=4), folder, show, resume=True, asked={"steps": 4}) == 0


def test_a_dry_run_says_what_would_be_done_and_writes_nothing(code, tmp_path):
    config = TrainConfig(sources=(str(code),), minutes=1, dtype="float32", threads=1)
    words = training_output(config, tmp_path / "run", dry_run=True)
    assert not (tmp_path / "run").exists()
    assert re.search(r"this machine: 1 thread, float32 at \d\.\d\d TFLOP/s, memory read at \d+ GB/s", words)
    assert re.search(r"this run needs about \d\.\d GB, including", words)


def test_what_was_chosen_is_kept_and_never_measured_again(code, tmp_path, monkeypatch):
    config = TrainConfig(sources=(str(code),), steps=2, vocab_size=300, dtype="float32", threads=1)
    train(config, tmp_path / "run", display()[0])
    kept = saving.read_config(tmp_path / "run", TrainConfig)
    assert all((kept.size, kept.batch, kept.context_length, kept.matmul))
    monkeypatch.setattr(autosize, "measure_machine", lambda config: pytest.fail("measured again"))
    assert train(TrainConfig(sources=()), tmp_path / "run", display()[0], resume=True) == 0
    assert saving.read_config(tmp_path / "run", TrainConfig) == kept
    assert train(TrainConfig(dtype="bfloat16"), tmp_path / "run", display()[0], resume=True) == 0
    assert saving.read_config(tmp_path / "run", TrainConfig).dtype == "bfloat16", "but for what is asked"


def test_a_run_that_does_not_recover_stops_with_its_last_good_state(code, tmp_path, monkeypatch):
    real = run_module.next_token_loss
    trained = {}

    def broken(model, batch):
        total, counted, _ = real(model, batch)
        if len(read_metrics(tmp_path / "run" / "metrics.jsonl")) >= 7:
            trained.setdefault("weights", {k: v.clone() for k, v in model.state_dict().items()})
            total = total * float("nan")
        return total, counted

    monkeypatch.setattr(run_module, "next_token_loss", broken)
    printed = training_output(toy(code, steps=60), tmp_path / "run", status=4)
    assert "not finite for 10 steps in a row, up to step 17" in printed
    assert printed.count("this step was skipped") == 10
    kept = checkpoint.load_state(checkpoint.latest_state(tmp_path / "run"))["weights"]
    assert all(torch.equal(kept[k], v) for k, v in trained["weights"].items())


CORPORA = {"too short": {"a.py": b"x = 1\n", "b.py": b"y = 2\n"}, "one file": {"a.txt": b"one file only\n" * 500}}


@pytest.mark.parametrize("corpus", CORPORA)
def test_a_corpus_that_cannot_be_learned_is_refused_before_a_run_begins(corpus, tmp_path):
    (tmp_path / "corpus").mkdir()
    for name, content in CORPORA[corpus].items():
        (tmp_path / "corpus" / name).write_bytes(content)
    refused(toy(tmp_path / "corpus", tokenizer="bytes", split="files"), tmp_path / "run")
    assert not (tmp_path / "run" / "state" / "plan.json").exists()


@pytest.mark.parametrize("split", [None, "tails"])
def test_one_file_trains_with_its_tail_held_out_and_is_scored_on_it(split, tmp_path, monkeypatch):
    (tmp_path / "book.txt").write_text("It was a dark and stormy night.\n" * 200)
    config, run = toy(tmp_path / "book.txt", tokenizer="chars", split=split, steps=6), tmp_path / "run"
    said = stop(config, run, 3, monkeypatch)
    assert ("the last 20% of each is for validation" in said) == (split is None)
    assert train(TrainConfig(), run, display()[0], resume=True, asked={}) == 0
    card = checkpoint.load(run).card
    assert card["trained"]["split"] == "tails"
    score, files = score_folder(run)
    assert (score.loss, score.tokens, files) == (card["measured"]["loss"], card["measured"]["tokens"], 1)


def test_records_are_learned_by_their_texts(tmp_path):
    rows = [{"id": i, "body": f"Task {i} is a task of {i * 7} parts.\n" * 3} for i in range(60)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    config = toy(tmp_path / "rows.jsonl", tokenizer="chars", text_field=("body",), steps=3)
    assert "text from records: the field body (60 records)" in training_output(config, tmp_path / "run")
    loaded = checkpoint.load(tmp_path / "run")
    assert not set('{}":') & {piece.decode() for piece in loaded.tokenizer.token_bytes}
    score, _ = score_folder(tmp_path / "run")
    assert score.loss == pytest.approx(loaded.card["measured"]["loss"], rel=1e-6)
    assert score.tokens == loaded.card["measured"]["tokens"]
    assert score_folder(tmp_path / "run", [str(tmp_path)], text_field=["body"])[0].tokens > score.tokens


def test_what_links_lead_to_is_trained_and_scored_if_asked_for(code, tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    for path in code.iterdir():
        (source / path.name).symlink_to(path)
    assert "40 links that lead outside; --follow-links reads" in refused(toy(source), tmp_path / "run")
    assert train(toy(source, follow_links=True, steps=2), tmp_path / "run", display()[0]) == 0
    card = checkpoint.load(tmp_path / "run").card
    assert score_folder(tmp_path / "run")[0].loss == pytest.approx(card["measured"]["loss"], rel=1e-6)


def test_bits_per_byte_is_the_loss_of_the_whole_text_over_its_bytes(code):
    tokenizer = Tokenizer.train("bpe", ["def task(value):\n    return value\n"], 280)
    model = FAMILIES["qwen3"].build(FAMILIES["qwen3"].Config.from_size(tokenizer.vocab, 32, 2, 16)).eval()
    text = "def task(héllo):\n    return 1\n" * 9
    ids = [tokenizer.eos, *tokenizer.encode(text)]
    score = evaluate(LoadedModel(model, tokenizer, 16), np.array(ids))
    nats = 0.0
    for start in range(0, len(ids) - 1, 16):
        window = torch.tensor(ids[start : start + 17])
        with torch.no_grad():
            likely = model(window[None, :-1])[0].log_softmax(-1)
        nats -= float(likely.gather(1, window[1:, None]).sum())
    assert score.size == len(text.encode())
    assert score.tokens == len(ids) - 1
    assert score.loss_sum == pytest.approx(nats, rel=1e-5)
    assert score.bits_per_byte == pytest.approx(nats / np.log(2) / len(text.encode()), rel=1e-5)
    assert 16 < evaluate(LoadedModel(model, tokenizer, 16), np.array(ids), limit=40).tokens <= 32


@pytest.mark.parametrize(
    ("bits", "since", "best"),
    [
        ([3.0, 2.0, 2.01, 2.03, 2.1], [0, 0, 1, 2, 3], 2),
        ([3.0, 3.5, 4.0, 2.9, 3.5], [0, 1, 2, 0, 1], 4),
        ([3.0, float("nan"), float("inf")], [0, 1, 2], 1),
        ([float("nan"), 3.0, 2.0], [0, 0, 0], 3),
    ],
)
def test_checks_since_the_best_one_are_counted(bits, since, best):
    scores, model, trainer = iter(bits), torch.nn.Linear(2, 2), SimpleNamespace(number=0, dtype=None)
    score = lambda *_: SimpleNamespace(tokens=1, criterion=next(scores))
    task = SimpleNamespace(score=score, loaded=LoadedModel(model, None, 1))
    run, counts = run_module.Run(Path(), TrainConfig(), task, trainer, None), []
    for number in range(1, len(bits) + 1):
        trainer.number = number
        run.validate()
        counts.append(run.checks_since_best)
    assert counts == since
    assert run.best_step == best


def test_a_run_by_the_clock_ends_where_it_only_memorises(code, tmp_path, monkeypatch):
    """Validation is best at step 25 and rises from then on; the fourth one after it is at step 150."""
    bits = (12.0, 10.0, 10.2, 10.25, 10.4, 10.5, 10.6, 10.0)
    scores = iter([Score(1e3 * b, 10, 10) for b in (*bits[:7], bits[7], bits[7])])
    monkeypatch.setattr(TrainTask, "score", lambda self, limit=None: next(scores))
    (show, out), folder = display(), tmp_path / "run"
    assert train(toy(code, steps=None, minutes=60, compile="off"), folder, show) == 0
    assert len(read_metrics(folder / "metrics.jsonl")) == 150
    assert "ending early, with 59:" in out.getvalue()
    assert "the weights of step 25 were saved" in out.getvalue()
    before = (folder / "model.safetensors").read_bytes()
    assert train(TrainConfig(sources=()), folder, show, resume=True) == 0
    assert len(read_metrics(folder / "metrics.jsonl")) == 150, "it is over"
    assert (folder / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize(
    ("steps", "since", "number", "bits", "loss", "ends"),
    [
        (None, 3, 150, 104.0, 6.2, True), (150, 3, 150, 104.0, 6.2, False), (None, 2, 150, 104.0, 6.2, False),
        (None, 3, 149, 104.0, 6.2, False), (None, 3, 150, 102.9, 6.1, False), (None, 3, 150, 104.0, 6.3, False),
        (None, 3, 150, float("nan"), 6.2, False), (None, 3, 150, 104.0, float("nan"), False),
    ],
)  # fmt: skip
def test_only_a_long_rise_while_the_text_is_memorised_ends_a_run(steps, since, number, bits, loss, ends):
    run = SimpleNamespace(best=Score(100.0, 10, 10), best_step=50, last=Score(bits, 10, 10), seconds_left=60.0)
    run.checks_since_best, run.config = since, SimpleNamespace(steps=steps)
    run.trainer = SimpleNamespace(number=number)
    assert bool(early_end(run, loss)) == ends


@pytest.mark.parametrize(
    ("text", "size"), [("3m", 3_000_000), ("500k", 500_000), ("1.5M", 1_500_000), ("10k", 10_000)]
)
def test_sizes_are_read(text, size):
    assert parse_size(text) == size


NONSENSE = {
    "size": ("many", "3x", "m", "4x", "x256", "4x256x2", "9999", "3", "0x256", "4x250", "4x0"), "lr": (nan,),
    "device": ("tpu",), "vocab_size": (0,), "steps": (0,), "minutes": (0, inf, nan), "context_length": (1,),
    "family": ("rnn",), "split": ("lines",), "experts": (-1, 5000), "shared_experts": (-1,),
    "balancing": ("luck",), "experts_per_token": (9,), "weight_decay": (-1.0,), "tokenizer": ("chars",),
}  # fmt: skip
NO_EXPERTS = {
    "experts": {"experts": 8, "family": "llama"},
    "experts of the default family": {"experts": 8, "asked": {"experts", "family"}},
    "balancing": {"balancing": "bias", "family": "gpt2"},
    "from": {"experts": 2, "base": "x"},
}


@pytest.mark.parametrize(("field", "value"), [(name, value) for name in NONSENSE for value in NONSENSE[name]])
def test_nonsense_in_a_plan_is_refused_by_name(field, value):
    more = {"vocab_size": 300} if field == "tokenizer" else {}
    refuses(f"--{field.replace('_', '-')}|--vocab-size", TrainConfig, sources=("x",), **{field: value}, **more)


@pytest.mark.parametrize("case", NO_EXPERTS)
def test_experts_that_do_not_fit_are_refused_before_any_work(case, code, tmp_path):
    options = dict(NO_EXPERTS[case])
    asked, show = options.pop("asked", None), display()[0]
    refuses("^--", lambda: train(toy(code, **options), tmp_path / "run", show, asked=asked))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("size", [300_000, 30_000_000])
def test_a_size_asked_for_is_about_the_size_built(family, size):
    with torch.device("meta"):
        model = FAMILIES[family].build(config_for(TrainConfig(family=family, size=str(size)), 2048))
    assert count(model) == pytest.approx(size, rel=0.2)


def test_the_learning_rate_asked_for_is_the_one_trained_with(code, tmp_path):
    run = lambda name, **changes: train(toy(code, steps=3, **changes), tmp_path / name, display()[0])
    losses = lambda name: [r["loss_hex"] for r in read_metrics(tmp_path / name / "metrics.jsonl")]
    for name, changes in {"usual": {}, "same": {"lr": 0.02}, "other": {"lr": 0.01}}.items():
        run(name, **changes)
    assert losses("usual") == losses("same") != losses("other")


def test_a_device_that_is_not_here_is_refused_and_the_one_asked_for_is_used(code, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    refuses("--device is cuda", train, toy(code, device="cuda"), tmp_path / "run", display()[0])
    assert not (tmp_path / "run").exists()
    assert train(toy(code, device="cpu", steps=1), tmp_path / "run", display()[0]) == 0
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert measure.device().type == "cpu"
    measure.set_device(None)
    assert measure.device().type == "cuda", "what is chosen without a wish"


def test_the_rest_of_a_line_is_learned(tmp_path):
    (tmp_path / "code").mkdir()
    for i in range(30):
        (tmp_path / "code" / f"m{i}.py").write_text(f"import itertools\n\nvalue_{i} = itertools.count()\n" * 8)
    config = toy(tmp_path / "code", steps=150, vocab_size=320, size="100k")
    train(config, tmp_path / "run", display()[0])
    loaded = checkpoint.load(tmp_path / "run")
    for cut in ("import ", "import i", "import iter", "import itertoo"):  # inside a token, too
        prefix = "import itertools\n\nvalue_3 = itertools.count()\n" + cut
        assert cut + CompletionEngine(loaded).complete(prefix).text == "import itertools"


TRAIN = ("train", "--size", "60k", "--context-length", "32")


def start(source, folder, verb, *options, steps=100_000, before=None):
    command = [sys.executable, "-m", "dunes", verb, source, "--out", folder, "--steps", steps, *options]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen([*map(str, command)], **pipes, preexec_fn=before)


def started(source, folder, *options, **more):
    """A process that has trained some steps."""
    process = start(source, folder, *options or TRAIN, **more)
    limit = time.monotonic() + 90
    while len(read_metrics(folder / "metrics.jsonl")) < 8:
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < limit
        time.sleep(0.05)
    return process


@pytest.mark.slow
def test_a_second_signal_ends_at_once_and_leaves_a_run_to_go_on_with(code, tmp_path):
    folder: Path = tmp_path / "run"
    process = started(code, folder)
    for _ in range(2):
        process.send_signal(signal.SIGINT)
        time.sleep(0.001)
    process.communicate(timeout=30)
    assert process.returncode == 130
    assert saving.read_config(folder, TrainConfig).steps == 100_000
    assert not list((folder / "state").glob(".*")), "nothing half-written"
    told = []
    assert run_module.checkpoint.latest_state(folder, told.append) is None or not told


@pytest.mark.slow
def test_sigusr1_saves_and_goes_on_and_sigterm_saves_and_says_how_to_go_on(code, tmp_path):
    folder: Path = tmp_path / "run"
    process = started(code, folder)
    assert checkpoint.latest_state(folder) is None
    process.send_signal(signal.SIGUSR1)
    assert eventually(lambda: checkpoint.latest_state(folder), 60)
    at = int(checkpoint.latest_state(folder).name[5:])
    assert eventually(lambda: read_metrics(folder / "metrics.jsonl")[-1]["step"] >= at + 3, 60)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 143
    assert f"dunes train --out {folder} --resume" in output
    done = int(re.search(r"stopped after (\d+) steps", output)[1])
    assert checkpoint.latest_state(folder).name == f"step-{done:06}"
    assert checkpoint.load(folder).card["trained"]["steps"] == done
    assert (folder / "loss.png").is_file()


@pytest.mark.slow
def test_a_terminal_that_is_closed_ends_training_and_finetuning_with_their_state_saved(code, tmp_path):
    folders = {"train": tmp_path / "run", "finetune": tmp_path / "tuned"}
    rows = [json.dumps({"prompt": f"{i} + {i}", "completion": f"{2 * i}"}) for i in range(60)]
    (tmp_path / "data.jsonl").write_text("\n".join(rows))
    options = {"train": TRAIN, "finetune": ("finetune", "--data", tmp_path / "data.jsonl", "--batch", "1")}
    for verb, folder in folders.items():
        process = started({"train": code, "finetune": folders["train"]}[verb], folder, *options[verb])
        process.stdout.close()  # as its terminal is
        process.send_signal(signal.SIGHUP)
        assert process.wait(60) == 128 + signal.SIGHUP
        steps = read_metrics(folder / "metrics.jsonl")[-1]["step"]
        assert checkpoint.latest_state(folder).name == f"step-{steps:06}"
        checkpoint.load(folder)


@pytest.mark.slow
def test_training_goes_on_without_an_output_or_a_terminal(code, tmp_path):
    """Under nohup, with nobody who reads, and with its output closed."""
    nohup = lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)
    process = started(code, tmp_path / "run", *TRAIN, "--no-complete", steps=60, before=nohup)
    process.stdout.close()
    process.send_signal(signal.SIGHUP)
    assert process.wait(90) == 0
    assert checkpoint.load(tmp_path / "run").card["trained"]["steps"] == 60
    close = lambda: (os.close(1), os.close(2))
    process = start(code, tmp_path / "closed", *TRAIN, "--no-complete", steps=3, before=close)
    assert process.communicate(timeout=90)[0] == ""
    assert process.returncode == 0
    assert checkpoint.load(tmp_path / "closed").card["trained"]["steps"] == 3


@pytest.mark.slow
@pytest.mark.usefixtures("draws")
@pytest.mark.parametrize(
    "options",
    [
        {"experts": 4, "family": "qwen3_moe"},
        {"experts": 4, "family": "gpt_oss", "shared_experts": 1, "balancing": "bias"},
        {"experts": 3, "shared_experts": 2, "balancing": "bias"},
    ],
)
def test_a_mixture_trains_from_scratch_and_resumes_exactly(options, code, tmp_path, monkeypatch):
    run = train_in_halves(toy(code, **options), tmp_path, 6, monkeypatch)
    whole = checkpoint.load(run)
    moe = whole.model.blocks[0].mlp
    assert len(moe.experts) == options.get("experts", 8)
    assert moe.top_k == options.get("experts_per_token", 2)
    assert len(moe.shared or ()) == options.get("shared_experts", 0)
    assert has_own_form(whole.card) == ("balancing" in options)
    if "balancing" in options:
        assert moe.selection_bias.abs().max() > 0
        refuses("no Hugging Face config describes", export, run, tmp_path / "hf")
    steps = [r for r in read_metrics(run / "metrics.jsonl") if "loss" in r]
    for step in steps:
        load = step["metrics"]["expert_load"]
        assert [len(layer) for layer in load] == [len(moe.experts)] * len(whole.model.blocks)
        violations = [max(layer) / (moe.top_k / len(moe.experts)) - 1 for layer in load]
        assert step["metrics"]["MaxVio"] == pytest.approx(sum(violations) / len(load), abs=1e-3)
    assert (run / "expert_load.png").stat().st_size > 10_000
