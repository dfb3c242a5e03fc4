"""The entropy of a text, and the estimates of --plan, which scale with it."""

import math
import random
import re
from collections import Counter

import pytest

from conftest import raising, refuses_command
from dunes.data import collect_corpus
from dunes.data.sources import without_files
from dunes.runs import autosize, forecast, text_entropy
from dunes.runs.memory import StepCost
from dunes.runs.train_config import TrainConfig

DRAW = random.Random(0)
MACHINE, COST = autosize.Machine(1, "float32", 1e11, 1e10), StepCost(2.0, 1.5, 4_000, 1_000)
TRAIN, VALID = bytes(DRAW.choices(b"aab\nc", k=400)), bytes(DRAW.choices(b"aabc\0\xff", k=60))


def counted_bits(train, valid):
    """Bits/byte with probabilities that are counted one by one."""
    longest, bits = min(7, len(train) - 1, len(valid) - 1), 0.0
    grams = [Counter(train[i - k : i + 1] for i in range(k, len(train))) for k in range(longest + 1)]
    counts = [Counter(gram[1:] for gram in longer) for longer in grams[1:]] + grams[-1:]
    for i, byte in enumerate(valid):
        p = 1 / 256
        for k in range(min(i, longest) + 1):
            after = [counts[k][valid[i - k : i] + bytes([b])] for b in range(256)]
            once, twice = (sum(count == n for count in counts[k].values()) for n in (1, 2))
            discount = (once + 1) / (once + 2 * twice + 2)
            if total := sum(after):
                p = (max(after[byte] - discount, 0) + discount * sum(map(bool, after)) * p) / total
        bits -= math.log2(p) / len(valid)
    return bits


@pytest.mark.parametrize(("train", "valid"), [(TRAIN, VALID), (TRAIN[:3], VALID), (b"", VALID), (TRAIN, b"a")])
def test_bits_per_byte_are_those_of_a_loop(train, valid):
    assert text_entropy.ngram_bits(train, valid) == pytest.approx(counted_bits(train, valid), abs=1e-12)


@pytest.mark.parametrize("context", [TRAIN[100:107], VALID[:7], b"unseen.", b"aaaaaaa"])
def test_the_probabilities_of_all_bytes_after_a_context_sum_to_one(context):
    texts = b"".join(context + bytes([byte]) for byte in range(256))
    assert text_entropy.ngram_probabilities(TRAIN, texts)[7::8].sum() == pytest.approx(1.0, abs=1e-12)


def test_the_text_is_that_of_either_split_and_a_sample_is_spread_over_it(tmp_path, monkeypatch):
    (large := tmp_path / "large.txt").write_text("".join(f"{i:07}\n" for i in range(160_000)))
    (rows := tmp_path / "rows.jsonl").write_text("".join(f'{{"text": "{i:06}ä"}}\n' for i in range(2_000)))
    corpus, seen, text = collect_corpus([large, rows]), [], lambda d: "".join(d.text()).encode()
    monkeypatch.setattr(text_entropy, "ngram_bits", lambda *texts: seen.append(texts) or 3.0)
    text_entropy.text_factor(corpus, TrainConfig())
    assert seen[0] == tuple(b"".join(map(text, side)) for side in (corpus.train, corpus.valid))
    text_entropy.text_factor(tails := without_files(corpus), TrainConfig())
    ends = b"".join(each[len(each) - round(tails.share * len(each)) :] for each in map(text, tails.train))
    assert (seen[1][1], len(seen[1][0])) == (ends, corpus.size - len(ends))
    monkeypatch.setattr(text_entropy, "COUNTED", 100_000)
    text_entropy.text_factor(corpus, TrainConfig())
    places = [int(number) for number in re.findall(rb"\n(\d{7})\n", seen[2][0])]
    assert 95_000 < len(seen[2][0]) <= 100_000
    assert min(places) < 16_000 < 144_000 < max(places)


def test_a_plan_is_a_table_and_a_picture_of_what_dry_runs_estimate(code, tmp_path, monkeypatch, command):
    monkeypatch.setattr(autosize, "measure_machine", lambda _: MACHINE)
    monkeypatch.setattr(forecast, "measure_step", lambda *_: COST)
    options = ("train", code, "--threads", 1, "--dtype", "float32", "--minutes", 2)
    status, table, _ = command(*options, "--plan", tmp_path / "plan.png", "--out", tmp_path / "run")
    rows = re.findall(r"^(\d+)(?: (\(--minutes\)))? .* (\S+) +(\S+) to (\S+)$", table, re.M)
    assert (status, [int(row[0]) for row in rows]) == (0, [1, 2, 3, 5, 15, 30, 60, 120, 240, 480])
    assert all(low < bits < high and bool(own) == (number == "2") for number, own, bits, low, high in rows)
    assert [(tmp_path / name).exists() for name in ("plan.png", "run")] == [True, False]
    said, (_, _, *bits) = command(*options, "--dry-run")[1], rows[1]
    assert re.search(r"measured: 2k .*: {} bits/byte .{} to {}".format(*bits), said)


@pytest.mark.parametrize("complete", [False, True])
def test_a_measured_step_scales_the_machine(complete, monkeypatch):
    monkeypatch.setattr(forecast, "measure_step", lambda *_: COST)
    config = TrainConfig(size="2x64", batch=2, context_length=64, dtype="float32", threads=1, complete=complete)
    machine = forecast.measured_machine(config, MACHINE)
    expected = forecast.forecast(config, 10**6, machine, 2.0)
    plain = autosize.estimate(config, 10**6, machine)
    assert expected.rate == pytest.approx(COST.tokens / COST.seconds, rel=1e-9)
    assert (expected.tokens < plain.tokens, expected.bits > 2.0 * plain.bits) == (complete, complete)


@pytest.mark.parametrize(("size", "ranks"), [("3B", 1), ("2x64", 2)])
def test_a_step_that_is_slow_or_of_several_ranks_is_not_measured(size, ranks, monkeypatch):
    monkeypatch.setattr("dunes.measure.ranks.count", lambda: ranks)
    monkeypatch.setattr(forecast, "initialise", raising(AssertionError))
    config = TrainConfig(size=size, batch=2, context_length=64, dtype="float32", threads=1)
    assert forecast.measured_machine(config, MACHINE) is MACHINE


@pytest.mark.parametrize("options", ["p.png --from m", "p.png --steps 3", "p.png --resume", "p.svg", "no/p.png"])
def test_what_no_estimate_applies_to_is_refused_before_text_is_read(options, command, monkeypatch):
    monkeypatch.setattr("dunes.runs.train.gather", raising(AssertionError))
    refuses_command("--plan", command("train", ".", "--plan", *options.split()))
