"""Let waiting OpenMP threads spin while the cores are idle, and sleep early while other programs use the cores.

A waiting libgomp thread (PyTorch's OpenMP on Linux) spins 300,000 times before it sleeps. While other programs
run, a spinning thread may occupy the core that the awaited thread needs; this made a training step 25 times as
long. On an idle machine, always sleeping early costs 17 % (docs/log/training.md, "Waiting threads by need;
measured once, kept for ever"). At each wait, libgomp spins less if it manages more threads than the machine has
processors (`do_spin` in config/linux/wait.h, `gomp_managed_threads` in team.c). A watcher thread measures the time
that this process's threads wait for a core. While these waits are long, another thread keeps an idle OpenMP team,
so that libgomp manages more threads than processors and spins less.
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
"""Environment variables that set how OpenMP waits or binds threads; each of them disables the watcher."""
SECONDS = 0.25
"""Seconds between two measurements."""
BUSY = 0.15
"""OpenMP threads sleep early while the threads' total waiting time for cores is above this, in seconds per second.
While one other program runs, the waiting time is 0.7 seconds per second."""
FREE = 0.05
"""Cores count as idle while the threads' total waiting time for cores is below this, in seconds per second. While
no other program runs, the waiting time is 0.01 seconds per second."""
PATIENCE = 8
"""Number of consecutive measurements with idle cores after which OpenMP threads spin again."""
_TASKS = Path("/proc/self/task")
_watcher: threading.Thread | None = None
_lock = threading.Lock()


def share_cores() -> None:
    """Make waiting OpenMP threads sleep early while other programs compete for the cores.

    Starts one watcher thread per process. Does nothing if the user has set a variable in OWN_CHOICE, if the system
    does not report waiting times (not Linux), or if no thread can be started.
    """
    global _watcher
    with _lock:
        alive = _watcher is not None and _watcher.is_alive()
        if alive or os.environ.keys() & OWN_CHOICE or not reports_waits():
            return
        thread = threading.Thread(target=_watch, name="dunes-cores", daemon=True)
        with suppress(RuntimeError):
            thread.start()
            _watcher = thread


def _after_fork() -> None:
    """Reset the watcher and the lock in a forked child, since a thread that held the lock does not exist there."""
    global _watcher, _lock
    _watcher, _lock = None, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def reports_waits() -> bool:
    """True if the kernel reports the time that threads wait for a core."""
    return Path("/proc/self/schedstat").exists()


def wait_times() -> dict[str, float]:
    """Seconds that each thread of this process has waited for a core; empty if the system reports no times."""
    seconds = {}
    with suppress(OSError):  # too many open files
        for file in _TASKS.glob("*/schedstat"):
            with suppress(OSError, IndexError):  # the thread has ended
                seconds[file.parent.name] = int(file.read_bytes().split()[1]) / 1e9
    return seconds


def waiting_seconds(before: Mapping[str, float], after: Mapping[str, float]) -> float:
    """Total seconds that threads waited between two measurements; threads that have ended are left out."""
    return sum(max(0.0, seconds - before.get(thread, 0.0)) for thread, seconds in after.items())


def _watch() -> None:
    team: threading.Event | None = None
    free, after, clock = 0, wait_times(), perf_counter()
    while True:
        sleep(SECONDS)
        before, last = after, clock
        after, clock = wait_times(), perf_counter()
        share = waiting_seconds(before, after) / (clock - last)
        free = free + 1 if share < FREE else 0
        if share > BUSY and team is None and "torch" in sys.modules:
            try:
                team = _start_team(len(os.sched_getaffinity(0)) + 1)
            except (AttributeError, RuntimeError):  # another OpenMP library, or too many threads
                return
        elif free >= PATIENCE and team is not None:
            team.set()
            team = None


def _start_team(size: int) -> threading.Event:
    """Start an idle OpenMP team of `size` threads that lasts until the returned event is set.

    Raises AttributeError if libgomp is not loaded, and RuntimeError if `size` threads cannot be started.
    """
    process, end = ctypes.CDLL(None), threading.Event()
    parallel, nothing = process.GOMP_parallel, ctypes.cast(process.free, ctypes.c_void_p)
    _try_threads(size)  # libgomp aborts the process if it cannot start a thread

    def keep() -> None:  # the team ends with the thread
        parallel(nothing, None, size, 0)
        end.wait()

    threading.Thread(target=keep, name="dunes-team", daemon=True).start()
    return end


def _try_threads(count: int) -> None:
    """Raise RuntimeError if `count` more threads cannot be started."""
    end = threading.Event()
    threads = [threading.Thread(target=end.wait, daemon=True) for _ in range(count)]
    try:
        for thread in threads:
            thread.start()
    finally:
        end.set()
