"""benchmarks/parts.py: variants, pairs, intervals, rungs; an interrupted one goes on."""

import json
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

from conftest import refuses

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
        (("a.b:make,gated",), ("a.b:make", "=gated")),  # refused later, as it names no part
    ],
)
def test_variants(texts, variants):
    assert read_variants(texts) == (DEFAULT, *variants)


def test_the_interval_is_students():
    assert interval([1.0, 2.0, 3.0]) == (2.0, pytest.approx(4.3027 / 3**0.5, rel=1e-3))
    assert interval([1.0, 2.0]) == (1.5, pytest.approx(12.706 * 0.5, rel=1e-3))
    assert interval([0.3]) == (0.3, None)
    assert interval([1.0] * 40)[1] == 0.0


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
    refuses("was started with other settings", bench_parts, plan("mlp=gated", size="3x64"), tmp_path / "out")


def test_the_default_is_trained_from_parts_as_the_variants_are(monkeypatch, tmp_path):
    commands, ended = [], subprocess.CompletedProcess("", 1, "", "no")
    monkeypatch.setattr(parts.subprocess, "run", lambda command, **options: commands.append(command) or ended)
    for variant in (DEFAULT, "mlp=gated"):
        refuses("no; what was measured", parts._train, plan("mlp=gated"), Job(variant, 0, 1.0), tmp_path, {})
    assert [command[command.index("--parts") + 1] for command in commands] == ["mlp=relu2", "mlp=gated"]


@pytest.mark.slow
def test_the_command_trains_measures_and_keeps_what_it_has(code, tmp_path):
    options = "--minutes", "0.05", "--seeds", "2", "--size", "1x32", "--tokenizer", "bytes", "--out", "out"
    command = [sys.executable, str(SCRIPT), code, *options, "--vary", "mlp=gelu"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (rung,) = json.loads(done.stdout.splitlines()[-1])["rungs"]
    assert [row["variant"] for row in rung] == [DEFAULT, "mlp=gelu"]
    rows = [json.loads(line) for line in (tmp_path / "out" / "runs.jsonl").read_text().splitlines()]
    for seed in (0, 1):
        pair = [row for row in rows if row["seed"] == seed and (row["steps"] or row["variant"] == DEFAULT)]
        assert len({row["made_steps"] for row in pair}) == 1
        assert len(pair) == 2
    assert not (tmp_path / "out" / "running").exists()
    assert all(row["decode_rate"] > 0 and row["peak_bytes"] > 1e6 for row in rows)
