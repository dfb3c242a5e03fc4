"""Waiting threads spin while the cores are free, and sleep where other programs want them.

A thread of libgomp (PyTorch's OpenMP on Linux) that waits spins 300,000 times before it sleeps. Beside other
programs it so takes the core from the thread that it waits for: a step of training took 25 times as long. Sleeping
sooner always costs an idle machine 17 % (docs/log/training.md, "Waiting threads by need; measured once, kept for
ever"). libgomp has another, short count for when its threads are more than the processors, and asks at each wait
(`do_spin` in its config/linux/wait.h, `gomp_managed_threads` in its team.c). So one thread here watches how long
those of this process wait for a core, and while that is long another holds a team that does nothing and makes them
too many.
"""

import ctypes
import os
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from time import perf_counter, sleep

OWN_CHOICE = frozenset({
    "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "OMP_PROC_BIND", "GOMP_CPU_AFFINITY", "OMP_STACKSIZE", "GOMP_STACKSIZE",
})  # fmt: skip
"""Where the user has set one of these, waiting, or what a team takes, is the user's."""
SECONDS = 0.25
"""Between two looks."""
BUSY, FREE = 0.15, 0.05
"""The share of a core for which this process waited in vain: beside one program 0.7, alone 0.01."""
PATIENCE = 8
"""So many looks in a row show free cores before waiting threads spin again."""
_TASKS = Path("/proc/self/task")
_watcher: threading.Thread | None = None
_lock = threading.Lock()


def share_cores() -> None:
    """Let waiting threads sleep sooner while other programs want their cores, from now on, in this process.

    It starts a thread, once. Nothing happens where the user has chosen how OpenMP waits or binds threads, where
    the system does not tell how long threads wait (not Linux), and where no more threads are allowed.
    """
    global _watcher
    with _lock:
        alive = _watcher is not None and _watcher.is_alive()
        if alive or os.environ.keys() & OWN_CHOICE or not waits_are_told():
            return
        thread = threading.Thread(target=_watch, name="dunes-cores", daemon=True)
        with suppress(RuntimeError):
            thread.start()
            _watcher = thread


def _after_fork() -> None:
    """A forked child has no other threads, and what they held is held for ever."""
    global _watcher, _lock
    _watcher, _lock = None, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def waits_are_told() -> bool:
    """Whether the kernel counts how long threads wait for a core."""
    return Path("/proc/self/schedstat").exists()


def waits() -> dict[str, float]:
    """Seconds for which each thread of this process has waited for a core; empty if the system does not tell."""
    found = {}
    with suppress(OSError):  # no more files may be opened
        for file in _TASKS.glob("*/schedstat"):
            with suppress(OSError, IndexError):  # the thread has ended
                found[file.parent.name] = int(file.read_bytes().split()[1]) / 1e9
    return found


def waited(before: Mapping[str, float], now: Mapping[str, float]) -> float:
    """The seconds that threads have waited between two looks; those that have ended are left out."""
    return sum(max(0.0, seconds - before.get(thread, 0.0)) for thread, seconds in now.items())


def _watch() -> None:
    team: threading.Event | None = None
    free, now, clock = 0, waits(), perf_counter()
    while True:
        sleep(SECONDS)
        before, last = now, clock
        now, clock = waits(), perf_counter()
        share = waited(before, now) / (clock - last)
        free = free + 1 if share < FREE else 0
        if share > BUSY and team is None and "torch" in sys.modules:
            try:
                team = _start_team(len(os.sched_getaffinity(0)) + 1)
            except (AttributeError, RuntimeError):  # another OpenMP, or no more threads are allowed
                return
        elif free >= PATIENCE and team is not None:
            team.set()
            team = None


def _start_team(size: int) -> threading.Event:
    """Have an idle team of so many threads until the event is set.

    Raises AttributeError without libgomp, and RuntimeError if so many threads more cannot be had.
    """
    process, over = ctypes.CDLL(None), threading.Event()
    parallel, nothing = process.GOMP_parallel, ctypes.cast(process.free, ctypes.c_void_p)
    _try_threads(size)  # libgomp would end the process

    def hold() -> None:  # the team ends with the thread
        parallel(nothing, None, size, 0)
        over.wait()

    threading.Thread(target=hold, name="dunes-team", daemon=True).start()
    return over


def _try_threads(count: int) -> None:
    """Raises RuntimeError if so many threads more cannot be had at once."""
    end = threading.Event()
    threads = [threading.Thread(target=end.wait, daemon=True) for _ in range(count)]
    try:
        for thread in threads:
            thread.start()
    finally:
        end.set()
