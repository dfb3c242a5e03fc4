"""Waiting threads spin while the cores are free, and sleep where other programs want them.

A thread of libgomp (PyTorch's OpenMP on Linux) that waits spins 300,000 times before it sleeps. Beside other
programs it so takes the core from the thread that it waits for: a step of training took 25 times as long. Sleeping
sooner always costs an idle machine 17 % (LOG.md, "A machine that does something else"). libgomp has another, short
count for when its threads are more than the processors, and asks at each wait (`do_spin` in its
config/linux/wait.h, `gomp_managed_threads` in its team.c). So one thread here watches how long those of this
process wait for a core, and while that is long another holds a team that does nothing and makes them too many.
"""

import ctypes
import os
import threading
from contextlib import suppress
from pathlib import Path
from time import perf_counter, sleep

OWN_CHOICE = frozenset({"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"})
SECONDS = 0.25
"""Between two looks."""
BUSY, FREE = 0.15, 0.05
"""The share of a core for which this process waited in vain: beside one program 0.7, alone 0.01."""
PATIENCE = 8
"""So many looks in a row show free cores before waiting threads spin again."""
_TASKS = Path("/proc/self/task")
_watcher: threading.Thread | None = None


def share_cores() -> None:
    """Let waiting threads sleep sooner while other programs want their cores, from now on, in this process.

    It starts a thread, once. Nothing happens where the user has set OMP_WAIT_POLICY or GOMP_SPINCOUNT, and where
    the system does not tell how long threads wait (not Linux).
    """
    global _watcher
    alive = _watcher is not None and _watcher.is_alive()  # a forked child has no threads
    if not (alive or os.environ.keys() & OWN_CHOICE) and waits_are_told():
        _watcher = threading.Thread(target=_watch, name="dunes-cores", daemon=True)
        _watcher.start()


def waits_are_told() -> bool:
    """Whether the kernel counts how long threads wait for a core."""
    return Path("/proc/self/schedstat").exists()


def _watch() -> None:
    held, free = threading.Event(), 0
    waited, clock = seconds_waited(), perf_counter()
    while True:
        sleep(SECONDS)
        before, last = waited, clock
        waited, clock = seconds_waited(), perf_counter()
        share = (waited - before) / (clock - last)
        free = free + 1 if share < FREE else 0
        if share > BUSY and not held.is_set():
            held.set()
            threading.Thread(target=_hold_team, args=[held], name="dunes-team", daemon=True).start()
        elif free >= PATIENCE:
            held.clear()


def seconds_waited() -> float:
    """How long this process's threads have waited for a core, together; 0 where the system does not tell."""
    total = 0
    for file in _TASKS.glob("*/schedstat"):
        with suppress(OSError):  # it has ended
            total += int(file.read_bytes().split()[1])
    return total / 1e9


def _hold_team(held: threading.Event) -> None:
    """Have a team as large as the machine until `held` is cleared; it ends with this thread."""
    process, size = ctypes.CDLL(None), len(os.sched_getaffinity(0)) + 1
    try:
        parallel, nothing = process.GOMP_parallel, ctypes.cast(process.free, ctypes.c_void_p)
        _try_threads(size)
    except (
        AttributeError,
        RuntimeError,
    ):  # another OpenMP, torch is not loaded yet, or no more threads are allowed
        held.clear()
        return
    parallel(nothing, None, size, 0)
    while held.is_set():
        sleep(SECONDS)


def _try_threads(count: int) -> None:
    """Raises RuntimeError if so many threads more cannot be had at once: libgomp would end the process."""
    end = threading.Event()
    threads = [threading.Thread(target=end.wait, daemon=True) for _ in range(count)]
    try:
        for thread in threads:
            thread.start()
    finally:
        end.set()
