"""What goes wrong on real machines: flipped bits, cut files, full disks, kills at any moment."""

import os
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from dunes import checkpoint
from dunes.runs.run import records

STATE = {"weights": torch.arange(40.0), "numbers": {0: 1.5, "name": "x"}}


@pytest.fixture
def stored(tmp_path):
    """A run with an old state and a new one."""
    checkpoint.store(tmp_path, 1, STATE)
    return checkpoint.store(tmp_path, 2, STATE)


def test_a_thousand_flipped_bits_are_all_noticed_and_the_older_state_is_used(stored):
    run, chance = stored.parent.parent, random.Random(0)
    files = sorted(stored.iterdir())
    for _ in range(1000):
        path = chance.choices(files, [f.stat().st_size for f in files])[0]
        whole = path.read_bytes()
        data = bytearray(whole)
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        path.write_bytes(data)
        told = []
        found = checkpoint.latest(run, told.append)
        # Of all flips, only one of a space of the manifest into another white space says the same.
        if path.name != "manifest.json" or b"".join(data.split()) != b"".join(whole.split()):
            assert found.name == "step-000001", path
            assert len(told) == 1
        path.write_bytes(whole)
    assert checkpoint.latest(run) == stored


@pytest.mark.parametrize("name", ["tensors.safetensors", "state.json", "manifest.json"])
def test_a_file_cut_anywhere_or_replaced_by_something_else_is_noticed_without_a_hang(stored, name):
    run, path = stored.parent.parent, stored / name
    whole, chance = path.read_bytes(), random.Random(1)
    for length in {0, 1, len(whole) - 1, *(chance.randrange(len(whole)) for _ in range(60))}:
        path.write_bytes(whole[:length])
        assert checkpoint.latest(run).name == "step-000001", length
    for make in (os.mkfifo, os.mkdir, lambda p: os.symlink(p, p), lambda p: None):
        path.rmdir() if path.is_dir() else path.unlink(missing_ok=True)
        make(path)
        told = []
        assert checkpoint.latest(run, told.append).name == "step-000001"
        assert len(told) == 1
        assert name in told[0]
        assert "\n" not in told[0]


@pytest.mark.parametrize("limit", [0, 10, 100, 200, 300, 400, 500, 600, 700, 800])
def test_a_full_disk_leaves_the_old_state_and_is_an_os_error(stored, limit):
    run = stored.parent.parent
    before = {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        with pytest.raises(OSError, match=r"."):
            checkpoint.store(run, 3, {**STATE, "more": torch.arange(400.0)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert {p: p.read_bytes() for p in run.rglob("*") if p.is_file()} == before
    assert checkpoint.latest(run) == stored


TRAIN = """
import sys
from pathlib import Path
from dunes.runs import train as module
from dunes.runs.plan import Plan
from dunes.runs.progress import Display

module.SAVE_SECONDS = 0.1
plan = Plan(sources=(sys.argv[1],), size=60_000, vocab=300, context=32, batch=4, steps=120,
            dtype="float32", threads=1)
folder = Path(sys.argv[2])
sys.exit(module.train(plan, folder, Display(), again=(folder / "state" / "plan.json").exists()))
"""


def training(code: Path, folder: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", TRAIN, code, folder], stdout=subprocess.DEVNULL)


def outcome(folder: Path):
    """Everything that must be the same: weights, optimizer, counters, best weights, losses as hex."""
    state = checkpoint.restore(checkpoint.latest(folder))
    state.pop("elapsed")
    lines = [
        (r["step"], r["exact"], r["norm"], r["rate"], r.get("bits_per_byte"))
        for r in records(folder / "metrics.jsonl")
    ]
    return state, lines, (folder / "model.safetensors").read_bytes()


def same(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def killed(code: Path, folder: Path, kills: int, seed: int) -> int:
    """Train to the end through this many kills at random moments, some aimed at a save; how many hit one."""
    chance, inside = random.Random(seed), 0
    while True:
        process = training(code, folder)
        begun = time.monotonic()
        aimed, wait = chance.random() < 0.4, chance.uniform(0.0, 1.2)
        while kills and process.poll() is None:
            running = len(records(folder / "metrics.jsonl")) > 0
            saving = bool(list((folder / "state").glob(".step-*")))
            begun = begun if running else time.monotonic()
            if running and (saving if aimed else time.monotonic() - begun > wait):
                process.send_signal(signal.SIGKILL)
                kills, inside = kills - 1, inside + saving
                break
            time.sleep(0.001)
        if process.wait(timeout=120) == 0:
            return inside


def test_twelve_kills_end_bit_for_bit_as_none(code, tmp_path):
    assert training(code, tmp_path / "straight").wait(timeout=120) == 0
    killed(code, tmp_path / "killed", 12, seed=0)
    straight, resumed = outcome(tmp_path / "straight"), outcome(tmp_path / "killed")
    assert same(straight[0], resumed[0])
    assert straight[1:] == resumed[1:]


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_seventy_kills_end_bit_for_bit_as_none(code, tmp_path):
    assert training(code, tmp_path / "straight").wait(timeout=120) == 0
    straight = outcome(tmp_path / "straight")
    for part in range(7):
        killed(code, tmp_path / f"killed-{part}", 10, seed=part + 1)
        resumed = outcome(tmp_path / f"killed-{part}")
        assert same(straight[0], resumed[0])
        assert straight[1:] == resumed[1:]
