"""What is said of the machine is so."""

import pytest
import torch

from dunes import measure


def test_one_thread_is_chosen_only_if_it_wins_every_round(monkeypatch):
    monkeypatch.setattr(measure.machine, "sleep", lambda seconds: None)
    monkeypatch.setattr(measure.machine.os, "sched_getaffinity", lambda pid: {0, 1, 2, 3}, raising=False)
    before = torch.get_num_threads()

    def rounds(*seconds):
        times = iter(seconds)
        monkeypatch.setattr(measure.machine, "_seconds", lambda threads: next(times))
        return measure.choose_threads()

    assert rounds(1.0, 2.0) == 4
    assert rounds(3.0, 2.0, 3.0, 2.0, 3.0, 2.0) == 1
    assert rounds(3.0, 2.0, 3.0, 2.0, 1.0, 2.0) == 4
    assert torch.get_num_threads() == before


def test_bfloat16_is_chosen_where_it_is_clearly_faster(monkeypatch):
    rates = {torch.bfloat16: 3.0, torch.float32: 1.0}
    monkeypatch.setattr(measure.machine, "matmul_rate", lambda dtype, device: rates[dtype])
    assert measure.choose_dtype(torch.device("cpu")) == torch.bfloat16
    rates[torch.bfloat16] = 1.2
    assert measure.choose_dtype(torch.device("cpu")) == torch.float32


def test_a_matmul_rate_is_operations_over_time(monkeypatch):
    clock = iter([10.0, *[10.5] * 9])
    monkeypatch.setattr(measure.machine, "perf_counter", lambda: next(clock))
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


def test_threads_are_those_of_the_environment_where_it_says(monkeypatch):
    chosen = []
    monkeypatch.setattr(measure.machine, "choose_threads", lambda: 3)
    monkeypatch.setattr(measure.machine.torch, "set_num_threads", chosen.append)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    measure.machine.use_best_threads()
    assert chosen == []
    monkeypatch.delenv("OMP_NUM_THREADS")
    measure.machine.use_best_threads()
    assert chosen == [3]
