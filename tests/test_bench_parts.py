"""benchmarks/parts.py: variants, pairs, intervals, rungs; an interrupted one goes on."""

import json
import subprocess
import sys
from functools import partial
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

from conftest import refuses
from dunes.files.atomic import folder_lock

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "parts.py"
spec = spec_from_file_location("parts_of_benchmarks", SCRIPT)
parts = sys.modules[spec.name] = module_from_spec(spec)
spec.loader.exec_module(parts)
CLOCK, DEFAULT, TOKENS, Job, Plan = parts.CLOCK, parts.DEFAULT, parts.TOKENS, parts.Job, parts.Plan
bench_parts, interval, read_variants, verdict = (
    parts.bench_parts,
    parts.interval,
    parts.read_variants,
    parts.verdict,
)

PLAN = {"sources": ("stdlib",), "minutes": 1.0, "seeds": 2, "size": "2x64", "tokenizer": "bpe", "budget": None}


def plan(*vary, **changes):
    return Plan(**PLAN | {"variants": read_variants(vary)} | changes)


@pytest.mark.parametrize(
    ("texts", "variants"),
    [
        (("mlp=gated,gelu", "norm=layer"), ("mlp=gated", "mlp=gelu", "norm=layer")),
        (("mlp=relu2,gelu", "mlp=gelu"), ("mlp=gelu",)),  # relu2 is the default
        (("norm=layer+mlp=gated", "mlp=gated+norm=layer+kv=all"), ("mlp=gated+norm=layer",)),
        (("a.b:make", "kv=one"), ("a.b:make", "kv=one")),
        (("a.b:make,gated",), ("a.b:make", "=gated")),  # refused later, as it names no part
    ],
)
def test_variants(texts, variants):
    assert read_variants(texts) == (DEFAULT, *variants)


@pytest.mark.parametrize(
    ("vary", "changes"),
    [
        ("mlp=relu2", {}),  # the default
        ("mlp=gate", {}),
        ("nothing.py:build", {}),
        ("norm=layer", {"minutes": 0.01}),
        ("norm=layer", {"seeds": 0}),
        ("norm=layer", {"budget": -1}),
        ("norm=layer", {"budget": 0.001}),
        ("norm=layer", {"sources": ("nowhere",)}),
    ],
)
def test_what_cannot_be_measured_is_refused_before_any_run(vary, changes):
    refuses(".", lambda: plan(vary, **changes).rungs)


def test_the_interval_is_students():
    assert interval([1.0, 2.0, 3.0]) == (2.0, pytest.approx(4.3027 / 3**0.5, rel=1e-3))
    assert interval([1.0, 2.0]) == (1.5, pytest.approx(12.706 * 0.5, rel=1e-3))
    assert interval([0.3]) == (0.3, None)
    assert interval([1.0] * 40)[1] == 0.0


def test_rungs_spend_the_budget_and_halve():
    rungs = plan("mlp=gated,gelu,geglu", "norm=layer", "kv=one,half", budget=2.0).rungs
    assert [count for _, count in rungs] == [6, 3, 2, 1]
    assert [minutes / rungs[0][0] for minutes, _ in rungs] == [1, 2, 4, 8]
    assert sum(2 * (count + 1) * minutes for minutes, count in rungs) == pytest.approx(120)
    assert plan("norm=layer", budget=1.0).rungs == [(pytest.approx(15.0), 1)]


BITS = {DEFAULT: 2.0, "mlp=geglu": 2.1, "mlp=gated": 1.9, "norm=layer": 2.2, "kv=one": 2.0}


def made(job):
    bits = BITS[job.variant] + 0.3 * job.seed + (0.001 * job.seed if job.variant == "mlp=gated" else 0.0)
    bits += 0.5 * (job.variant == "kv=one") * (job.seed - 0.5)
    rates = {"rate": 100.0 if job.variant == DEFAULT else 80.0, "decode_rate": 10.0, "peak_bytes": 1000}
    return {
        **vars(job),
        "bits_per_byte": bits - 0.1 * (job.by == TOKENS),
        "made_steps": 50,
        "elapsed": 60.0,
        "settings": {},
        **rates,
    }


@pytest.fixture
def trained(monkeypatch):
    """The jobs that were trained; none really is."""
    jobs, interrupted = [], []

    def train(plan, job, out, first):
        assert (job.variant == DEFAULT) == (not first)
        assert job.steps in (None, first.get("made_steps"))
        if len(jobs) == 3 and not interrupted:
            interrupted.append(job)
            raise KeyboardInterrupt
        jobs.append(job)
        return made(job)

    monkeypatch.setattr(parts, "_train", train)
    return jobs, interrupted


def test_pairs_have_the_same_seed_and_an_interrupted_run_goes_on(trained, tmp_path):
    (jobs, interrupted), chosen = trained, plan("mlp=gated", "norm=layer", "kv=one")
    with pytest.raises(KeyboardInterrupt):
        bench_parts(chosen, tmp_path / "out")
    (results,), failed = bench_parts(chosen, tmp_path / "out")
    assert not failed
    assert len(set(jobs)) == len(jobs) == 2 * (1 + 2 * 3)
    assert jobs[3:4] == interrupted
    assert {job.steps for job in jobs if job.by == TOKENS} == {50}
    by_name = {row["variant"]: row for row in results}
    assert [row["variant"] for row in results] == [DEFAULT, "mlp=gated", "norm=layer", "kv=one"]
    assert by_name["mlp=gated"]["difference"][CLOCK] == (pytest.approx(-0.0995), pytest.approx(0.00635, rel=1e-2))
    assert by_name["norm=layer"]["difference"][TOKENS][0] == pytest.approx(0.1)
    assert by_name["norm=layer"]["rate"] == (pytest.approx(0.8), pytest.approx(0.0))
    assert by_name[DEFAULT]["rate"] == (1.0, 0.0)
    words = {name: verdict(row) for name, row in by_name.items()}
    assert words == {DEFAULT: "", "mlp=gated": "helps", "norm=layer": "harms", "kv=one": "no difference seen"}
    before = len(jobs)
    assert bench_parts(chosen, tmp_path / "out") == ([results], {})
    assert len(jobs) == before
    assert (tmp_path / "out" / "parts.svg").stat().st_size > 1000
    refuses("was started with other settings", bench_parts, plan("mlp=gated", size="3x64"), tmp_path / "out")
    with folder_lock(tmp_path / "out"):
        refuses("in use by another process", bench_parts, chosen, tmp_path / "out")
    bench_parts(plan("mlp=gated", "mlp=geglu", seeds=1), tmp_path / "out")  # others in the same folder
    assert [job.variant for job in jobs[before:]] == ["mlp=geglu"] * 2
    lines = (tmp_path / "out" / "runs.jsonl").read_text().splitlines(keepends=True)
    damaged = [lines[0].replace('"made_steps": 50', '"made_steps": 49'), *lines[1:]]
    (tmp_path / "out" / "runs.jsonl").write_text("".join(damaged))
    bench_parts(plan("mlp=gated", seeds=1), tmp_path / "out")
    assert [job.steps for job in jobs[before + 2 :]] == [49]  # runs of 50 steps are no pairs of it
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine.txt").touch()
    refuses("contains other files; choose another --out", bench_parts, chosen, tmp_path / "other")


def test_a_variant_that_fails_is_told_at_the_end_and_one_of_the_default_ends_it(trained, tmp_path, monkeypatch):
    trained[1].append("no interruption")
    train = parts._train

    def fail(plan, job, out, first, bad="norm=layer"):
        if job.variant == bad:
            raise ValueError("diverged")
        return train(plan, job, out, first)

    monkeypatch.setattr(parts, "_train", fail)
    (results,), failed = bench_parts(plan("norm=layer", "mlp=gated"), tmp_path / "out")
    assert failed == {"norm=layer": "diverged"}
    assert [row["variant"] for row in results] == [DEFAULT, "mlp=gated"]
    monkeypatch.setattr(parts, "_train", partial(fail, bad=DEFAULT))
    refuses("diverged", bench_parts, plan("mlp=gated"), tmp_path / "other")


def test_a_folder_of_somebody_else_runs_nothing_that_was_not_named(tmp_path, monkeypatch):
    """A link where the run will be, and settings that are options of another kind."""
    commands = []
    monkeypatch.setattr(parts.subprocess, "run", lambda command, **_: commands.append(command) or Done())
    (tmp_path / "model").mkdir()
    (tmp_path / "running").symlink_to(tmp_path / "model")
    settings = {"size": "2x64", "out": "elsewhere", "parts": "own.py:build", "threads": 1}
    job, first = Job("mlp=gated", 0, 1.0), {"settings": settings}
    refuses("seed 0: exit status 9", parts._train, plan("mlp=gated"), job, tmp_path, first)
    assert not (tmp_path / "running").is_symlink()
    assert (tmp_path / "model").is_dir()
    assert not {"elsewhere", "own.py:build"} & set(commands[0])


class Done:
    returncode, stdout, stderr = 9, "", ""


def test_the_worse_half_leaves(trained, tmp_path):
    trained[1].append("no interruption")
    rungs, _ = bench_parts(plan("mlp=gated", "norm=layer", "kv=one", budget=2.0), tmp_path)
    assert {job.by for job in trained[0]} == {CLOCK}
    assert all(row["difference"].keys() == {CLOCK} for rung in rungs for row in rung)
    assert [[row["variant"] for row in rung] for rung in rungs] == [
        [DEFAULT, "mlp=gated", "norm=layer", "kv=one"],
        [DEFAULT, "mlp=gated", "kv=one"],
        [DEFAULT, "mlp=gated"],
    ]


OWN = """
from dunes.models import named_parts


def build(vocab, dim, depth, context_length):
    return named_parts.build(vocab, dim, depth, context_length, mlp="gelu")


def late(vocab, dim, depth, context_length):
    model = build(vocab, dim, depth, context_length)
    if not model.norm.weight.is_meta:
        raise OSError("as late as this")
    return model
"""


@pytest.mark.slow
def test_the_command_trains_measures_and_keeps_what_it_has(code, tmp_path):
    (tmp_path / "own.py").write_text(OWN)

    def run(*vary):
        options = "--minutes", "0.05", "--seeds", "2", "--size", "1x32", "--tokenizer", "bytes", "--out", "out"
        command = [sys.executable, str(SCRIPT), code, *options, "--vary", *vary]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)

    failed = run("own.py:late")
    assert failed.returncode == 1
    (reason,) = json.loads(failed.stdout.splitlines()[-1])["failed"].values()
    assert "own.py:late, seed 0: dunes: " in reason
    assert "as late as this" in reason
    done = run("own.py:build")
    assert done.returncode == 0, done.stderr
    (rung,) = json.loads(done.stdout.splitlines()[-1])["rungs"]
    assert [row["variant"] for row in rung] == [DEFAULT, "own.py:build"]
    rows = [json.loads(line) for line in (tmp_path / "out" / "runs.jsonl").read_text().splitlines()]
    assert len(rows) == 2 * 3
    for seed in (0, 1):
        steps = {
            row["made_steps"]
            for row in rows
            if row["seed"] == seed and (row["steps"] or row["variant"] == DEFAULT)
        }
        assert len(steps) == 1
    assert not (tmp_path / "out" / "running").exists()
    assert all(row["decode_rate"] > 0 and row["peak_bytes"] > 1e6 for row in rows)
