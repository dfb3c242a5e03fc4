"""What is said of the machine is so."""

import itertools
import os
import subprocess
import sys
import threading
from itertools import count
from time import perf_counter, sleep

import pytest
import torch

from dunes import cores, measure
from dunes.cores import share_cores
from dunes.measure import machine


@pytest.mark.parametrize(
    ("variable", "quota", "threads"),
    [(None, 99, 4), ("3", 99, 3), ("3,2", 1, 3), ("many", 99, 4), ("0", 99, 1), (None, 2, 2)],
)
def test_threads_are_those_of_the_environment_or_the_cores(monkeypatch, variable, quota, threads):
    """Eight processors of four cores; whatever else the machine does."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if variable:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    monkeypatch.setattr(machine.Path, "read_text", lambda path: str(int(path.parts[-3][3:]) % 4))
    monkeypatch.setattr(machine, "_cpu_quota", lambda: quota)
    assert measure.choose_threads() == threads


def test_cores_of_a_container_are_those_of_its_quota(monkeypatch):
    monkeypatch.setattr(machine.Path, "read_text", lambda path: "150000 100000\n")
    assert machine._cpu_quota() == 2
    monkeypatch.setattr(machine.Path, "read_text", lambda path: "max 100000\n")
    assert machine._cpu_quota() > 1 << 30


FEATURES = {"architecture": "x86_64", "amx_bf16": False, "avx512_bf16": False}


@pytest.mark.parametrize(
    ("features", "ratio", "dtype"),
    [
        (FEATURES, 9.0, torch.float32),
        (FEATURES | {"amx_bf16": True, "avx512_bf16": True}, 0.1, torch.bfloat16),
        (FEATURES | {"avx512_bf16": True}, 1.4, torch.float32),
        (FEATURES | {"avx512_bf16": True}, 1.6, torch.bfloat16),
        ({"architecture": "aarch64"}, 1.6, torch.bfloat16),
    ],
)
def test_the_dtype_follows_from_instructions_or_else_from_kept_rates(monkeypatch, features, ratio, dtype):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: features)
    monkeypatch.setattr(machine, "peak_matmul_rate", lambda d, device: ratio if d == torch.bfloat16 else 1.0)
    monkeypatch.setattr(machine, "_unsure", set())
    assert machine.choose_dtype.__wrapped__(torch.device("cpu")) == dtype
    machine._unsure.add("on a busy machine")
    measured = features.get("amx_bf16") is not True
    assert machine.choose_dtype.__wrapped__(torch.device("cpu")) == (torch.float32 if measured else dtype)


def test_a_rate_is_that_of_an_idle_machine_and_kept(monkeypatch, tmp_path):
    """Samples that other work disturbs differ and are slower; the next process measures again what is unsure."""
    monkeypatch.setenv("DUNES_HOME", str(tmp_path))
    monkeypatch.setattr(machine, "LONGEST", 0.0)
    busy, sampled = itertools.cycle([3.0, 5.0, 10.0, 4.0, 9.9, 2.0, 9.8]), []
    sample = lambda samples: sampled.append(next(samples)) or sampled[-1]
    kept = lambda samples: machine._cached_rate("x", torch.device("cpu"), lambda: sample(samples))
    monkeypatch.setattr(machine, "_rates", {})
    monkeypatch.setattr(machine, "_unsure", set())
    monkeypatch.setattr(machine, "wait_times", dict)
    assert kept(2.0 ** (n % 900) for n in itertools.count()) > 3
    assert not list(tmp_path.rglob("x-*")), "they do not agree"
    monkeypatch.setattr(machine, "LONGEST", 1.0)
    machine._rates.clear()
    with monkeypatch.context() as patch:
        patch.setattr(machine, "wait_times", lambda: {"1": perf_counter()})  # one thread waits all the time
        assert kept(itertools.repeat(4.0)) == 4.0
    assert not list(tmp_path.rglob("x-*")), "they agree beside other programs"
    machine._rates.clear()
    assert kept(busy) == 10.0
    count = len(sampled)
    machine._rates.clear()
    assert kept(busy) == 10.0
    assert len(sampled) == count, "kept on disk"
    next(tmp_path.rglob("x-*")).write_text("nan")
    assert kept(busy) == 10.0
    assert len(sampled) > count
    machine._rates.clear()
    monkeypatch.setenv("DUNES_HOME", "/proc/none")
    assert kept(busy) == 10.0, "a folder that cannot be written to"


@pytest.mark.skipif(not cores.reports_waits(), reason="the kernel does not count how long threads wait")
def test_threads_that_wait_go_to_sleep_soon_while_cores_are_wanted(monkeypatch):
    """libgomp has more threads than processors exactly while this process waits for cores."""
    monkeypatch.setattr(cores, "SECONDS", 0.02)
    for name in cores.OWN_CHOICE:
        monkeypatch.delenv(name, raising=False)
    wanted, waited, last = threading.Event(), count(), [0.0]

    def waits():
        if wanted.is_set():
            last[0] = float(next(waited))
        return {"1": last[0]}

    monkeypatch.setattr(cores, "wait_times", waits)
    started = lambda: set(os.listdir("/proc/self/task")) - before  # others may end meanwhile
    teams = lambda: [thread.name for thread in threading.enumerate()].count("dunes-team")
    torch.rand(256, 256) @ torch.rand(256, 256)  # starts PyTorch's own
    share_cores()
    share_cores()
    until(lambda: teams() == 0)  # the machine may be busy
    before = set(os.listdir("/proc/self/task"))
    for _ in range(2):
        wanted.set()
        until(lambda: teams() == 1 and len(started()) >= 1 + len(os.sched_getaffinity(0)))
        wanted.clear()
        until(lambda: teams() == 0 and len(started()) <= 1)


@pytest.mark.parametrize("allowed", [0, 2])
def test_where_no_more_threads_are_to_be_had_nothing_fails(monkeypatch, allowed):
    """libgomp ends a process that cannot have its threads."""
    started, start = [], threading.Thread.start

    def refuse(thread):
        if len(started) >= allowed:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="new thread"):
            cores._start_team(3)
        patch.setattr(cores, "_watcher", None)
        for name in cores.OWN_CHOICE:
            patch.delenv(name, raising=False)
        share_cores()
        assert cores._watcher is None


def test_the_wait_of_a_thread_that_has_ended_hides_no_other():
    assert cores.waiting_seconds({"1": 5.0, "2": 1.0}, {"2": 1.5, "3": 0.25}) == 0.75
    assert cores.waiting_seconds({"1": 5.0}, {"1": 0.5}) == 0, "another one with its number"


def test_one_thread_watches_however_many_ask(monkeypatch):
    watched = []
    monkeypatch.setattr(cores, "_watch", lambda: (watched.append(1), sleep(0.5)))
    monkeypatch.setattr(cores, "_watcher", None)
    for name in cores.OWN_CHOICE:
        monkeypatch.delenv(name, raising=False)
    asking = [threading.Thread(target=share_cores) for _ in range(16)]
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join()
    assert watched == [1] * cores.reports_waits()


def until(true, seconds=20):
    end = perf_counter() + seconds
    while not true():
        assert perf_counter() < end
        sleep(0.01)


@pytest.mark.parametrize("told", [True, False])
def test_the_users_own_choice_of_waiting_is_respected(told):
    """Threads are only watched where the user says nothing and the kernel tells how long they wait."""

    def chosen(**given):
        code = "import os, pathlib, threading; pathlib.Path.exists = lambda path: {}; "
        code += "import dunes.cores as cores; cores.share_cores(); print(threading.active_count(), "
        code += "os.environ.get('GOMP_SPINCOUNT'), os.environ.get('OMP_WAIT_POLICY'))"
        unset = {k: v for k, v in os.environ.items() if k not in cores.OWN_CHOICE}
        command = [sys.executable, "-c", code.format(told)]
        return subprocess.run(command, env=unset | given, capture_output=True, check=True).stdout.decode().split()

    assert chosen() == (["2", "None", "None"] if told else ["1", "3000", "None"])
    assert chosen(GOMP_SPINCOUNT="7") == ["1", "7", "None"]
    assert chosen(OMP_WAIT_POLICY="ACTIVE") == ["1", "None", "ACTIVE"]


def test_a_matmul_rate_is_operations_over_time(monkeypatch):
    clock = iter([10.0, *[10.5] * 9])
    monkeypatch.setattr(machine, "perf_counter", lambda: next(clock))
    # The clock starts after the second product; the third ends half a second later.
    rate = measure.matmul_rate(torch.float32, torch.device("cpu"), size=64, seconds=0.1)
    assert rate == pytest.approx(2 * 64**3 * 1 / 0.5)


def test_peak_memory_grows_by_what_is_held():
    before = measure.peak_memory(torch.device("cpu"))
    held = torch.ones(200_000_000, dtype=torch.uint8)
    after = measure.peak_memory(torch.device("cpu"))
    assert after >= before
    assert after >= len(held)


def test_numbers_too_small_count_as_zero_when_asked():
    tiny = torch.full((4,), 1e-30)
    try:
        measure.flush_denormals()
        assert not (tiny * 1e-10).any()
    finally:
        torch.set_flush_denormal(False)
    assert (tiny * 1e-10).all()
