"""Preferences: DPO and ORPO against plain formulas and trl, forms of records, and runs with these objectives."""

import copy
import itertools
import json
import math
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from adapters import trained
from conftest import display, refuses
from dunes import checkpoint
from dunes.augment import attach
from dunes.augment.lora import set_adapter
from dunes.data import Example, read_records
from dunes.data.batches import Batches
from dunes.data.examples import count_leaked, split_records, tokenize_records
from dunes.data.preflight import data_report
from dunes.evaluate.preferences import reference_logprobs, score_pairs
from dunes.models import FAMILIES
from dunes.models.initialise import initialise
from dunes.runs import finetune as finetune_module
from dunes.runs.finetune import choose_options, finetune, load_base
from dunes.runs.finetune_config import METHODS, FinetuneConfig, learning_rate
from dunes.runs.finetune_data import FinetuneData
from dunes.runs.saving import METRICS, read_metrics
from dunes.text import Tokenizer, templates
from dunes.train.loss import dpo_loss, next_token_loss, orpo_loss
from small_models import random_model
from test_finetune import ALL, base_in, finetuned, stopped
from test_ranks import run_ranks
from test_runs import assert_same_training

VOCAB, CONTEXT = 60, 24
WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight"]
ROWS = [
    {"prompt": f"Say {a} and {b}.", "chosen": f"{a} {b}".upper(), "rejected": f"{a} {b}"}
    for a, b in itertools.permutations(WORDS, 2)
]
USER, GOOD, BAD = (
    {"role": role, "content": text} for role, text in (("user", "Hi"), ("assistant", "Yes"), ("assistant", "No"))
)


def pair(number, prompt, chosen, rejected):
    ids = np.random.default_rng(number).integers(0, VOCAB, prompt + chosen + rejected).astype(np.int32)
    sides = ids[: prompt + chosen], np.concatenate([ids[:prompt], ids[prompt + chosen :]])
    first, second = (Example(side, np.arange(len(side)) >= prompt, f"pair {number}") for side in sides)
    return replace(first, rejected=second)


PAIRS = [pair(0, 5, 4, 7), pair(1, 2, 9, 3), pair(2, 8, 1, 2), pair(3, 3, 15, 21)]


def network(family, dtype=torch.float64, seed=0):
    return random_model(family, seed=seed, vocab=VOCAB, context=CONTEXT).to(dtype)


def answer_probs(model, side):
    ids, mask = torch.tensor(side.ids[: CONTEXT + 1]).long(), torch.tensor(side.loss_mask[1 : CONTEXT + 1])
    return model(ids[None, :-1])[0].softmax(-1)[torch.arange(len(ids) - 1), ids[1:]][mask]


def plain_loss(model, pairs, reference, beta, smoothing, normalized):
    """The formulas of the papers, one answer at a time."""
    total = torch.zeros((), dtype=torch.float64)
    for example, known in zip(pairs, reference, strict=True):
        rewards = []
        for side, before in zip(example.sides, known, strict=True):
            probs = answer_probs(model, side)
            ratio = probs.log().sum() - float(before)
            rewards.append(beta * ratio / (len(probs) if normalized else 1))
        preferred = 1 / (1 + torch.exp(rewards[1] - rewards[0]))
        total = total - (1 - smoothing) * preferred.log()
        total = total - smoothing * (1 - preferred).log() if smoothing else total
    return total


def assert_same_loss(model, found, wanted):
    """Equal losses and gradients of all parameters."""
    grads = [torch.autograd.grad(loss, [*model.parameters()]) for loss in (found, wanted)]
    apart = max(((a - b).abs().max() / (1 + b.abs().max())).item() for a, b in zip(*grads, strict=True))
    print(f"loss {found.item() - wanted.item():+.1e}, gradients {apart:.1e}")
    assert found.item() == pytest.approx(wanted.item(), rel=1e-6)
    assert apart <= 1e-6


OPTIONS = [(0.1, 0.0, False), (0.3, 0.2, False), (5.0, 0.0, True), (2.0, 0.1, True)]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("family", ["llama", "gemma2", "mamba2"])
def test_loss_and_gradients_equal_plain_formulas(family, options):
    """Of rows without padding (llama), and of a model with a cap on its logits, and one with states."""
    model, base = network(family), network(family, seed=1)
    reference = reference_logprobs(base, PAIRS, CONTEXT, torch.float32)
    (batch,) = Batches(PAIRS, CONTEXT, 4, reference=reference).one_epoch()
    found, count, metrics = dpo_loss(model, batch, *options)
    wanted = plain_loss(model, PAIRS, reference, *options)
    assert count == 4
    assert_same_loss(model, found, wanted)
    rewards = metrics["rewards_chosen"][0] - metrics["rewards_rejected"][0]
    assert metrics["margin"][0].item() == pytest.approx(rewards.item(), abs=1e-5)


def plain_orpo(probs, beta):
    """Equations 2, 4, 6 and 7 of the paper, for the probabilities of the tokens of both answers of a pair."""
    chosen, rejected = (torch.exp(p.log().sum() / len(p)) for p in probs)
    odds = (chosen / (1 - chosen)) / (rejected / (1 - rejected))
    return -chosen.log() - beta * torch.log(1 / (1 + torch.exp(-odds.log())))


class Losses(torch.nn.Module):
    """A model whose rows have these losses and numbers of targets."""

    def __init__(self, losses, counts):
        super().__init__()
        self.losses, self.counts = torch.nn.Parameter(losses), torch.tensor(counts)

    def forward(self, ids, positions, targets, by_row):
        return self.losses, self.counts, {}, {}


@pytest.mark.parametrize("beta", [0.1, 3.0])
@pytest.mark.parametrize("family", ["llama", "gemma2", "mamba2"])
def test_orpo_and_its_gradients_equal_plain_formulas(family, beta):
    model = network(family)
    (batch,) = Batches(PAIRS, CONTEXT, 4).one_epoch()
    found, count, metrics = orpo_loss(model, batch, beta)
    probs = [[answer_probs(model, side) for side in pair.sides] for pair in PAIRS]
    assert count == 4
    assert_same_loss(model, found, sum(plain_orpo(each, beta) for each in probs))
    margin = sum(beta * (chosen.log().mean() - rejected.log().mean()) for chosen, rejected in probs)
    assert metrics["margin"][0].item() == pytest.approx(margin.item(), rel=1e-5)


def test_orpo_is_finite_for_certain_answers_and_without_targets():
    model = Losses(torch.tensor([0.0, 3.0, 2.0, 0.0, 0.0, 0.0]), [1, 2, 2, 0, 3, 3])
    total, count, _ = orpo_loss(model, [torch.zeros(6, 3)] * 3)
    total.backward()
    assert count == 2
    assert total.item() == pytest.approx(0.1 * math.log(2), abs=1e-4), "the third pair's, whose odds are equal"
    assert model.losses.grad.isfinite().all()
    assert (model.losses.grad[2:4] == 0).all()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_orpo_and_its_gradients_equal_trl_s():
    from trl.experimental.orpo import ORPOTrainer

    model = Losses(torch.tensor([3.0, 80.0, 0.1, 0.5]), [1, 9, 4, 2])
    found, _, _ = orpo_loss(model, [torch.zeros(4, 9)] * 3, 0.3)
    logprobs, trainer = -model.losses / model.counts, SimpleNamespace(beta=0.3, accelerator=torch.ones(()))
    ratios, *_ = ORPOTrainer.odds_ratio_loss(trainer, logprobs[::2], logprobs[1::2])
    wanted = (-logprobs[::2] - ratios).sum()
    grads = [torch.autograd.grad(loss, model.losses)[0] for loss in (found, wanted)]
    print(f"loss {found.item() - wanted.item():+.1e}, gradients {(grads[0] - grads[1]).abs().max():.1e}")
    assert found.item() == pytest.approx(wanted.item(), abs=1e-6)
    assert torch.allclose(*grads, rtol=1e-5, atol=1e-7)


def test_a_mixture_adds_its_balance_once_for_each_pair():
    model = network("mixtral").train()
    reference = reference_logprobs(model, PAIRS, CONTEXT, torch.float32)
    (batch,) = Batches(PAIRS, CONTEXT, 4, reference=reference).one_epoch()
    total, _, metrics = dpo_loss(model, batch)
    balance, targets = next_token_loss(model, batch[:3])[2]["balance"]
    assert total.item() - 4 * math.log(2) == pytest.approx(4 * (balance / targets).item(), abs=1e-6)
    assert metrics["balance"][0].item() == pytest.approx(4 * (balance / targets).item(), rel=1e-9)


def test_a_pair_without_a_target_on_one_side_is_skipped_and_counted():
    short, tokenizer = [*PAIRS, pair(4, CONTEXT, 2, 3), pair(5, 22, 2, 9)], Tokenizer.train("bytes", [])
    lost = replace(pair(6, 5, 3, 3), rejected=pair(6, CONTEXT + 4, 3, 3).rejected)
    batches = Batches([*short, lost], CONTEXT, 3, reference=np.zeros((7, 2), np.float32))
    assert batches.rows_per_epoch == 5 + 1
    report = data_report([*short, lost], PAIRS, CONTEXT, 300, templates.get_template("plain"), tokenizer)
    assert report.without_target == 1
    assert report.lines()[0].startswith("7 pairs, 4 for validation")
    assert report.truncated == sum(len(e) > CONTEXT + 1 for e in [*short, lost])
    assert "1 pair is skipped: no targets in the context, or equal sides" in report.warnings()


def test_a_row_of_padding_counts_in_no_sum():
    model = network("llama", torch.float32)
    reference = reference_logprobs(model, PAIRS[:2], CONTEXT, torch.float32)
    (batch,) = Batches(PAIRS[:2], CONTEXT, 2, reference=reference).one_epoch()
    targets = batch[1].clone()
    targets[2:] = -100
    alone = Batches([PAIRS[i] for i in [1]], CONTEXT, 1, reference=reference[1:])
    masked = dpo_loss(model, (batch[0], targets, *batch[2:]))
    assert masked[1] == 1
    assert masked[0].item() == pytest.approx(math.log(2), abs=1e-6)
    assert score_pairs(model, alone.one_epoch(), dpo_loss, torch.float32).pairs == 1


def filled(values):
    return torch.nested.nested_tensor([torch.tensor(v).long() for v in values]).to_padded_tensor(0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "options"),
    [("sigmoid", (0.1, 0.0, False)), ("aot", (0.1, 0.2, False)), ("sigmoid_norm", (0.5, 0.0, True))],
)
@pytest.mark.filterwarnings("ignore")
def test_loss_and_gradients_equal_trl_s(kind, options, bases, tmp_path, monkeypatch):
    """One pair, since trl's aot sorts a batch, and so has conservative DPO only for a single pair.

    trl rounds log-probabilities to float32 (in a model of float64, too), and `beta` multiplies that.
    """
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import DPOConfig, DPOTrainer

    base = bases["llama"]
    theirs = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(base)
    beta, smoothing, _ = options
    args = DPOConfig(
        tmp_path, beta=beta, loss_type=kind, label_smoothing=smoothing, use_cpu=True, bf16=False, report_to=[],
        disable_dropout=True, gradient_checkpointing=False,
    )  # fmt: skip
    trainer = DPOTrainer(
        theirs, ref_model=copy.deepcopy(theirs), args=args, processing_class=tokenizer,
        train_dataset=Dataset.from_list(ROWS[:4]),
    )  # fmt: skip
    reference = reference_logprobs(checkpoint.load(base).model, PAIRS, CONTEXT, torch.float32)
    for index, p in enumerate(trainer.model.parameters()):
        p.data.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(index)) * 0.05)
    trainer.model.save_pretrained(tmp_path / "trained")
    batches = Batches(PAIRS, CONTEXT, 1, reference=reference)
    for index in range(len(PAIRS)):
        sides = PAIRS[batches.row(index)[0]].sides
        inputs = {
            "input_ids": filled([s.ids[: CONTEXT + 1] for s in sides]),
            "attention_mask": filled([np.ones(len(s.ids[: CONTEXT + 1])) for s in sides]),
            "completion_mask": filled([s.loss_mask[: CONTEXT + 1] for s in sides]),
        }
        trainer.model.zero_grad()
        wanted = trainer.compute_loss(trainer.model, inputs)
        wanted.backward()
        ours = checkpoint.load(tmp_path / "trained").model
        found, _, _ = dpo_loss(ours, batches.batch(index), *options)
        found.backward()
        for p in ours.parameters():  # gradients under the other names, by way of a model that has them as weights
            p.data = p.grad
        checkpoint.save(ours, tmp_path / f"{index}", checkpoint.load(base).tokenizer, 128)
        grads = dict(AutoModelForCausalLM.from_pretrained(tmp_path / f"{index}").named_parameters())
        apart = max((grads[n] - p.grad).abs().max().item() for n, p in trainer.model.named_parameters())
        largest = max(p.grad.abs().max().item() for p in trainer.model.parameters())
        print(f"{kind}: loss {found.item() - wanted.item():+.1e}, gradients {apart:.1e} of {largest:.1f}")
        assert found.item() == pytest.approx(wanted.item(), abs=1e-6)
        assert apart <= 1e-6


FORMS = {
    "strings": {"prompt": "Hi", "chosen": "Yes", "rejected": "No"},
    "explicit": {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]},
    "implicit": {"chosen": [USER, GOOD], "rejected": [USER, BAD]},
    "ultrafeedback": {"prompt": "Hi", "chosen": [USER, GOOD], "rejected": [USER, BAD], "messages": [USER, GOOD]},
    "sharegpt": {
        "conversations": [{"from": "human", "value": "Hi"}],
        "chosen": {"from": "gpt", "value": "Yes"},
        "rejected": {"from": "gpt", "value": "No"},
    },
    "alpaca": {"instruction": "Hi", "input": "", "chosen": "Yes", "rejected": "No"},
}


def written(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("form", FORMS)
def test_all_forms_are_one_record(form, tmp_path):
    records = read_records(written(tmp_path / "rows.jsonl", [FORMS[form] | {"system": "Be brief."}]))
    (row,) = records.rows
    assert records.format == "preference"
    prompt = (templates.Turn("system", "Be brief."), templates.Turn("user", "Hi"))
    assert row.turns == (*prompt, templates.Turn("assistant", "Yes"))
    assert row.rejected == (*prompt, templates.Turn("assistant", "No"))


MORE = {"role": "user", "content": "And now?"}
MARKS = {"train": False}, {"training": False}, {"weight": 0}, {"loss": 0}, {"train": True}


STRINGS = {"prompt": "Hi", "chosen": "b", "rejected": "c"}
REFUSED = {
    **{f"{key} {mark}": STRINGS | {key: GOOD | mark} for key in ("chosen", "rejected") for mark in MARKS[:4:3]},
    "its beginning after a prompt": {"prompt": "Hi", "chosen": [GOOD], "rejected": [GOOD, USER, BAD]},
    "equal but for a mark": {"prompt": "Hi", "chosen": GOOD, "rejected": GOOD | {"weight": 0}},
    "no prompt": {"chosen": "b", "rejected": "c"},
    "transcripts": STRINGS | {"chosen": "\n\nHuman: a\n\nAssistant: b"},
    "two prompts": STRINGS | {"instruction": "Ho"},
    "a history of messages": STRINGS | {"prompt": [USER], "history": [["a", "b"]]},
    "an input and conversations": FORMS["implicit"] | {"instruction": "Hi", "input": "x"},
    "other prompts": {"chosen": [USER, GOOD], "rejected": [USER | {"content": "Ho"}, BAD]},
    "another prompt": FORMS["implicit"] | {"prompt": "x"},
    "a question at the end": STRINGS | {"chosen": [GOOD, USER]},
    "one conversation": STRINGS | {"chosen": [USER, GOOD]},
    "its beginning": {"chosen": [USER, GOOD, USER, GOOD], "rejected": [USER, GOOD]},
    "a number": STRINGS | {"chosen": 3},
    "a missing side": {"prompt": "x", "chosen": "a"},
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_bad_pair_is_refused_by_its_line(case, tmp_path):
    path = written(tmp_path / "rows.jsonl", [FORMS["strings"], REFUSED[case]])
    refuses("rows.jsonl, line 2: ", read_records, path)


SIDES = {  # forms of one pair, whose first answer is history: chosen, rejected, and further fields
    "conversations": ([USER, GOOD, MORE, GOOD], [USER, GOOD, MORE, BAD], {}),
    "after a prompt": ([GOOD, MORE, GOOD], [GOOD, MORE, BAD], {"prompt": "Hi"}),
    "beside messages": ([GOOD, MORE, GOOD], [GOOD, MORE, BAD], {"prompt": [USER]}),
    "in the prompt": ([GOOD], [BAD], {"prompt": [USER, GOOD, MORE]}),
}


@pytest.mark.parametrize("side", [("chosen",), ("rejected",), ("chosen", "rejected")])
@pytest.mark.parametrize("form", SIDES)
def test_answers_in_the_history_are_not_trained_on_whatever_marks_they_have(form, side, tmp_path):
    chosen, rejected, more = SIDES[form]
    rows = [{"chosen": chosen, "rejected": rejected, **more}]
    for mark in MARKS:
        rows.append(json.loads(json.dumps(rows[0])))
        for name in side:
            turns = rows[-1]["prompt" if form == "in the prompt" else name]
            next(turn for turn in turns if turn["role"] == "assistant").update(mark)
    records = read_records(written(tmp_path / "rows.jsonl", rows)).rows
    examples = list(tokenize_records(records, templates.get_template("mistral"), Tokenizer.train("bytes", [])))
    for example, record in zip(examples, records, strict=True):
        assert [s.loss_mask.sum() for s in example.sides] == [len(" Yes") + 1, len(" No") + 1]
        assert record.turns[:3] == record.rejected[:3]
        assert [e.ids.tolist() for e in example.sides] == [e.ids.tolist() for e in examples[0].sides]
    assert split_records(records, 0.5)[1] == [], "they have one prompt, so they are on one side"


def test_pairs_are_split_by_their_prompts(tmp_path):
    rows = [row | {"chosen": row["chosen"] + end} for row in ROWS for end in ("", "!", "?")]
    records = read_records(written(tmp_path / "rows.jsonl", rows)).rows
    sides = split_records(records, 0.2)
    prompts = [{r.turns[0].text for r in side} for side in sides]
    assert all(prompts)
    assert not prompts[0] & prompts[1]
    assert count_leaked(records[::3], records[1:4]) == 3


def test_pairs_that_are_equal_within_the_context_are_skipped(tmp_path):
    equal = STRINGS | {"rejected": "b"}, {"chosen": [USER, GOOD], "rejected": [USER, GOOD]}
    read = read_records(written(tmp_path / "rows.jsonl", equal)).rows
    assert [row.turns == row.rejected and len(row.turns) for row in read] == [2, 2]
    same = pair(0, 5, 4, 7)
    same = replace(same, rejected=Example(same.ids, same.loss_mask))
    long = Example(np.append(PAIRS[0].ids, np.int32(3)), np.append(PAIRS[0].loss_mask, True))
    longer = replace(PAIRS[0], rejected=long)
    assert [e.targets(CONTEXT) for e in (same, longer)] == [0, 9]
    assert longer.targets(len(PAIRS[0].ids) - 1) == 0
    assert Batches([same, longer], CONTEXT, 1, reference=np.zeros((2, 2), np.float32)).rows_per_epoch == 1


def test_dropout_of_the_model_is_off_and_of_adapters_on():
    """The first loss is that of equal models; two forwards of one batch differ by the adapter's dropout."""
    module = FAMILIES["gpt2"]
    made = replace(module.Config.from_size(VOCAB, 32, 2, CONTEXT), dropout=0.3)
    model = initialise(module.build(made), seed=0).train()
    reference = reference_logprobs(model, PAIRS, CONTEXT, torch.float32)
    (batch,) = Batches(PAIRS, CONTEXT, 4, reference=reference).one_epoch()
    assert dpo_loss(model, batch)[0].item() == pytest.approx(4 * math.log(2), abs=1e-5)
    assert module.read(model, CONTEXT) == made
    attach(model, rank=2, dropout=0.5)
    trained(model)
    first, second = (dpo_loss(model, batch)[0].item() for _ in range(2))
    assert first != second


def forms_of(a, b):
    """One prompt, "Say A.\n\nAnd B." after a system message, in rows that differ in their answers."""
    system, text = f"Be {b}.", f"Say {a}.\n\nAnd {b}."
    turns = [{"role": "system", "content": system}, {"role": "user", "content": text}]
    answers = [(f"{a} {i}", f"{b} {i}") for i in range(6)]
    talk = [{"role": "assistant", "content": part} for part in answers[5]]
    prompts = (
        {"instruction": f"Say {a}.", "input": f"And {b}.", "system": system},
        {"prompt": text, "system_prompt": system},
        {"prompt": turns},
        {"prompt": f"{system}\n\n{text}"},  # mistral's template has the system message in the question
        {"conversations": [{"from": "human", "value": f" {text}"}], "system": system},
    )
    rows = [p | {"chosen": c, "rejected": d} for p, (c, d) in zip(prompts, answers, strict=False)]
    return [*rows, {"chosen": [*turns, talk[0]], "rejected": [*turns, talk[1]]}]


@pytest.mark.parametrize("given", [True, False])
def test_prompts_that_are_rendered_equally_are_on_one_side_or_counted_as_leaks(given, bases, tmp_path):
    pairs = list(itertools.permutations(WORDS, 2))[:20]
    groups = [forms_of(*pair) for pair in pairs]
    if given:  # of each prompt, one form for validation
        held = [group.pop(i % 6) for i, group in enumerate(groups[:12])]
        new = {"prompt": "Say nothing.", "chosen": "", "rejected": "No"}
        path = written(tmp_path / "held.jsonl", [*held, new])
    rows = written(tmp_path / "rows.jsonl", [row for same in zip(*groups, strict=False) for row in same])
    valid = str(path) if given else ""
    config = asked(bases, rows, template="mistral", val_data=valid)
    show, out = display()
    data = choose_options(FinetuneData.read(config, load_base(config), show), show)
    leaks = "12 validation pairs repeat" if given else "0 validation pairs repeat"
    assert f"{leaks} a training prompt" in " ".join(out.getvalue().split())
    if not given:
        assert {*Counter(int(e.place.rpartition(" ")[2]) % 20 for e in data.valid).values()} == {6}


# Runs.


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """A tiny model with ids for ROWS, by its family."""
    tokenizer = Tokenizer.train("bpe", [" ".join(" ".join(row.values()) for row in ROWS)], 300)
    return {"llama": base_in(tmp_path_factory.mktemp("bases") / "llama", tokenizer)}


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return written(tmp_path_factory.mktemp("rows") / "rows.jsonl", ROWS)


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(finetune_module, "ANSWER_TOKENS", 3)
    monkeypatch.setattr(finetune_module, "memory", lambda data: {"weights": 1e6})


def asked(bases, rows, **changes):
    fixed = {"steps": 6, "batch": 4, "rank": 4, "lr": 0.003, "dtype": "float32", "threads": 1, "objective": "dpo"}
    return FinetuneConfig(model=str(bases["llama"]), data=str(rows), **fixed | changes)


def logged(folder):
    return [r for r in read_metrics(folder / METRICS) if "loss" in r]


@pytest.mark.parametrize("method", ALL)
def test_the_first_loss_is_ln_2_and_the_reference_is_the_model_without_adapters(method, bases, rows, tmp_path):
    finetuned(asked(bases, rows, method=method, steps=2), tmp_path / "run")
    first = logged(tmp_path / "run")[0]
    balance = first["metrics"].get("balance", 0.0)
    assert first["loss"] - balance == pytest.approx(math.log(2), abs=1e-6)
    assert (balance > 0) == (method == "lora-experts")
    stored = json.loads((tmp_path / "run" / "state" / "reference.json").read_text())
    if METHODS[method].saves_model:
        return
    config, show = asked(bases, rows, method=method), display()[0]
    data = choose_options(FinetuneData.read(config, load_base(config), show), show)
    model = checkpoint.load(tmp_path / "run").model
    set_adapter(model, None)
    again = reference_logprobs(model, data.train, data.config.context_length, torch.float32)
    assert np.abs(again - np.array(stored["train"])).max() <= 2e-4 * (20 if method == "pissa" else 1)


@pytest.mark.parametrize("options", [{}, {"length_normalized": True, "beta": 5.0, "method": "full", "lr": 0.001}])
def test_the_margin_grows_and_validation_pairs_are_reported(options, bases, rows, tmp_path):
    finetuned(asked(bases, rows, steps=60, **options), tmp_path / "run", examples=1)
    lines = logged(tmp_path / "run")
    assert lines[-1]["metrics"]["margin"] > 0.5
    assert lines[-1]["loss"] < 0.6
    checks = [r for r in lines if "validation_loss" in r]
    assert checks[-1]["validation_margin"] > checks[0]["validation_margin"]
    assert checks[-1]["validation_accuracy"] > 0.8
    assert {"validation_chosen_loss", "validation_loss"} <= checks[-1].keys()
    card = json.loads((tmp_path / "run" / "dunes.json").read_text())
    assert card["finetuned"]["objective"] == "dpo"
    assert card["measured"]["loss"] < 0.6
    assert card["measured"]["accuracy"] > 0.8


def test_gradients_accumulate_to_the_same_steps(bases, rows, tmp_path):
    for size in (1, 2, 4):
        finetuned(asked(bases, rows, micro_batch=size), tmp_path / f"{size}")
    losses = [[r["loss"] for r in logged(tmp_path / f"{size}")] for size in (1, 2, 4)]
    assert losses[0] == pytest.approx(losses[2], abs=2e-6)
    assert losses[1] == pytest.approx(losses[2], abs=2e-6)


@pytest.mark.parametrize("method", ["lora", pytest.param("full", marks=pytest.mark.slow)])
def test_orpo_needs_no_reference_and_resumes_bit_for_bit(method, bases, rows, tmp_path, monkeypatch):
    """Its score before training is that of the base model, in the report and in the card."""
    monkeypatch.setattr(finetune_module, "reference_logprobs", None)
    config, (show, out) = asked(bases, rows, method=method, steps=30, objective="orpo"), display()
    assert finetune(config, tmp_path / "dry", show, dry_run=True) == 0
    assert not (tmp_path / "dry").exists()
    assert finetune(config, tmp_path / "straight", show) == 0
    card = json.loads((tmp_path / "straight" / "dunes.json").read_text())
    assert card["finetuned"]["objective"] == "orpo"
    measured, lines = card["measured"], logged(tmp_path / "straight")
    assert measured["loss"] < measured["before"]
    assert measured["chosen_loss"] < measured["loss"]
    assert f"{measured['before']:.4f} before, {measured['loss']:.4f} after" in out.getvalue()
    assert lines[-1]["metrics"]["accuracy"] > lines[0]["metrics"]["accuracy"]
    assert lines[-1]["metrics"]["chosen_loss"] < lines[0]["metrics"]["chosen_loss"]
    assert_resumes(config, tmp_path, monkeypatch)


def assert_resumes(config, folder, monkeypatch):
    """The run in "straight" is one that is stopped and resumed, which reads what the reference said."""
    stopped(config, folder / "halves", 7, monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(finetune_module, "reference_logprobs", None)
        assert finetune(FinetuneConfig(), folder / "halves", display()[0], resume=True) == 0
    file = "model.safetensors" if METHODS[config.method].saves_model else "adapter_model.safetensors"
    assert_same_training(folder / "straight", folder / "halves", file)


@pytest.mark.parametrize("method", ["lora", pytest.param("full", marks=pytest.mark.slow)])
def test_stopped_and_resumed_is_straight_bit_for_bit(method, bases, rows, tmp_path, monkeypatch):
    config = asked(bases, rows, method=method, steps=14, lr=0.001)
    finetuned(config, tmp_path / "straight")
    assert_resumes(config, tmp_path, monkeypatch)
    other = FinetuneConfig(beta=0.2)  # as the command has it, without the stored objective
    attempt = lambda: finetune(other, tmp_path / "halves", display()[0], resume=True, asked=["beta"])
    refuses("beta was 0.1, now 0.2", attempt)
    note = tmp_path / "halves" / "state" / "reference.json"
    right = json.loads(note.read_text())
    for damaged in ("{", json.dumps(right | {"train": right["train"][1:]}), json.dumps({**right, "train": {}})):
        note.write_text(damaged)
        show, out = display()
        assert finetune(FinetuneConfig(), tmp_path / "halves", show, resume=True) == 0
        assert f"warning: {note}: " in out.getvalue()
        assert json.loads(note.read_text()) == right


@pytest.mark.slow
@pytest.mark.parametrize("method", ["full", "lora"])
def test_two_processes_prefer_as_one(method, bases, rows, tmp_path):
    config = asked(bases, rows, method=method, micro_batch=1)
    finetuned(config, tmp_path / "one")
    texts, codes = run_ranks(2, finetune, config, tmp_path / "two")
    assert codes == [0, 0], texts
    one, two = ([r["loss"] for r in logged(tmp_path / name)] for name in ("one", "two"))
    assert one == pytest.approx(two, abs=1e-5)
    cards = [json.loads((tmp_path / name / "dunes.json").read_text())["measured"] for name in ("one", "two")]
    assert cards[0]["loss"] == pytest.approx(cards[1]["loss"], abs=1e-5)
    assert cards[0]["pairs"] == cards[1]["pairs"]


ORPO = {"objective": "orpo"}


@pytest.mark.parametrize(
    ("changes", "options"),
    [({"objective": "sft"}, ()), ({"data": "plain.jsonl"}, ()), ({"objective": "sft"}, ("beta",)),
     (ORPO | {"data": "plain.jsonl"}, ()), (ORPO, ("packing",)), (ORPO, ("label_smoothing",)),
     ({}, ("train_on",)), ({"beta": 0}, ()), ({"label_smoothing": -0.1}, ()), ({"label_smoothing": 0.5}, ()),
     ({"compile": "on"}, ()), (ORPO | {"compile": "on"}, ())],
)  # fmt: skip
def test_the_objective_must_fit_the_file_and_the_options(changes, options, bases, rows, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "plain.jsonl", [{"prompt": "a", "completion": "b"}])
    attempt = lambda: finetune(
        replace(asked(bases, rows), **changes), tmp_path / "run", display()[0], asked=options
    )
    refuses("--|plain.jsonl", attempt)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("objective", "part"), [("dpo", 20), ("orpo", 4)])
@pytest.mark.parametrize("method", ["full", "lora"])
def test_the_default_learning_rate_is_a_part(method, objective, part):
    sft = FinetuneConfig(model="m", data="d", method=method)
    rate = learning_rate(replace(sft, objective=objective), 1000)
    assert rate == pytest.approx(learning_rate(sft, 1000) / part)


def test_pairs_of_calls_and_of_reasoning_differ_by_these(tmp_path):
    def answer(city, **more):
        call = {"function": {"name": "weather", "arguments": json.dumps({"city": city})}}
        return {"role": "assistant", "content": None, "tool_calls": [call], **more}

    row = {"prompt": [USER], "chosen": [answer("Rome", mood="good")], "rejected": [answer("Oslo")]}
    path = tmp_path / "pairs.jsonl"
    path.write_text(json.dumps(row))
    records = read_records(path)
    (record,) = records.rows
    assert [side[-1].fields["tool_calls"][0]["function"]["arguments"]["city"]
            for side in (record.turns, record.rejected)] == ["Rome", "Oslo"]  # fmt: skip
    assert records.ignored == ("mood (of messages)",)
    path.write_text(json.dumps(row | {"rejected": [answer("Rome")]}))
    (record,) = read_records(path).rows
    assert record.turns == record.rejected
    thoughtful = [GOOD | {"reasoning_content": text} for text in ("a", "b")]
    path.write_text(json.dumps({"prompt": [USER], "chosen": thoughtful[:1], "rejected": thoughtful[1]}))
    assert read_records(path).rows[0].rejected[-1].fields == {"reasoning_content": "b"}
