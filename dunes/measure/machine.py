"""Properties of this machine: device, dtype, threads, memory."""

import ctypes
import os
import re
import resource
import sys
from contextlib import suppress
from pathlib import Path
from statistics import median
from time import perf_counter, sleep

import numpy as np
import torch

DEVICES = ("cpu", "cuda", "mps")
_device_set: str | None = None


def set_device(name: str | None) -> None:
    """Make `device` return the device of this name, one of DEVICES, or with None the default again.

    Raises ValueError if this machine has none.
    """
    global _device_set
    usable = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if name is not None and not usable[name]:
        raise ValueError(f"--device is {name}, which PyTorch cannot use here; leave it out, or use --device cpu")
    _device_set = name


def device() -> torch.device:
    """The device that was set with `set_device`; else CUDA if available, else Apple's GPU, else the CPU."""
    if _device_set is not None:
        return torch.device(_device_set)
    if torch.cuda.is_available():
        return torch.device("cuda")
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


def matmul_rate(dtype: torch.dtype, device: torch.device, size: int = 1024, seconds: float = 0.1) -> float:
    """FLOP/s of a square matrix product."""
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in "ab")
    count, start = 0, 0.0
    while count < 3 or perf_counter() - start < seconds:
        a @ b
        synchronize(device)
        count += 1
        if count == 2:  # the first ones load kernels
            count, start = 2, perf_counter()
    return 2 * size**3 * (count - 2) / (perf_counter() - start)


def read_rate(device: torch.device, size: int = 1 << 28, seconds: float = 0.2) -> float:
    """Memory read bandwidth in bytes/s: the fastest of several sums over `size` bytes."""
    x = torch.ones(size // 4, device=device)
    best, start = 0.0, perf_counter()
    while perf_counter() - start < seconds or not best:
        before = perf_counter()
        x.sum()
        synchronize(device)
        best = max(best, x.nbytes / (perf_counter() - before))
    return best


def out_of_memory(error: BaseException) -> bool:
    """Whether this error means out of memory, on any device."""
    messages = ("out of memory", "can't allocate memory", "not enough memory")
    return isinstance(error, MemoryError) or any(m in str(error) for m in messages)


def choose_dtype(device: torch.device) -> torch.dtype:
    """bfloat16 where its matrix products are clearly faster here, else float32."""
    half, full = (matmul_rate(d, device) for d in (torch.bfloat16, torch.float32))
    return torch.bfloat16 if half > 1.5 * full else torch.float32


def choose_threads(rounds: int = 3) -> int:
    """The number of threads to use: all that the process may use, or one if other processes keep them busy.

    Threads that wait for each other at every operation can be ten times slower than a single one while other
    processes run. One thread is chosen only if it is faster in every round, half a second apart.
    """
    most = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    before = torch.get_num_threads()
    try:
        for i in range(rounds):
            sleep(0.5 if i else 0.0)
            if _seconds(most) <= _seconds(1):
                return most
        return 1
    finally:
        torch.set_num_threads(before)


def use_best_threads() -> None:
    """Use the number of threads that `choose_threads` finds, or what OMP_NUM_THREADS says."""
    if not os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(choose_threads())


def _seconds(threads: int) -> float:
    """The median time of a small part of a training step with this many threads."""
    torch.set_num_threads(threads)
    x, weight, times = torch.randn(1024, 256), torch.randn(256, 1024), []
    for _ in range(30):
        start = perf_counter()
        (x @ weight).softmax(-1)
        times.append(perf_counter() - start)
    return median(times)


def keep_freed_memory() -> None:
    """Keep freed memory in the process for the next step, or the next layer.

    glibc returns large blocks to the system at once; a training step then spends a third of its time
    on page faults (4M parameters, 2 threads: 5.3k tokens/s without, 7.8k with), and reading a prompt of 256
    tokens a tenth (10M).
    """
    if sys.platform != "linux":
        return
    try:
        libc = ctypes.CDLL("libc.so.6")
    except OSError:  # another C library
        return
    trim_threshold, mmap_max = -1, -4
    libc.mallopt(trim_threshold, 2**31 - 1)
    libc.mallopt(mmap_max, 0)


def flush_denormals() -> None:
    """Flush denormal numbers to zero, in this thread and those it starts.

    Processors compute with them ten times slower: a softmax over 512 x 4,096 logits of a confident model took
    7.6 ms with and 0.7 ms without. Call it before the first operation, which starts the other threads.
    """
    for dtype in (np.float32, np.float64):
        np.finfo(dtype)  # numpy before 2.4 measures denormals at the first call, and warns if they are zero
    torch.set_flush_denormal(True)


def peak_memory(device: torch.device) -> int:
    """The peak memory of this process in bytes: on the GPU if it uses one, else resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    with suppress(OSError, StopIteration), open("/proc/self/status") as file:
        # Linux's getrusage would return the parent's peak if that was higher.
        return int(next(line for line in file if line.startswith("VmHWM:")).split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def reset_peak_memory(device: torch.device) -> int:
    """Reset `peak_memory` where that is possible (CUDA, Linux); returns the bytes in use now."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    with suppress(OSError), open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    return resident_memory()


def resident_memory() -> int:
    """Resident memory of this process in bytes; its peak if the system reports only that."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:
        return peak_memory(torch.device("cpu"))


def free_memory(device: torch.device) -> int:
    """Bytes available without swapping; 0 if unknown."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    with suppress(OSError, ValueError), open("/proc/meminfo") as file:
        fields = dict(line.split(":") for line in file)
        return min(int(fields["MemAvailable"].split()[0]) * 1024, _cgroup_free())
    with suppress(OSError, ValueError):  # all memory, if the system reports only that
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") - resident_memory()
    return 0


def _cgroup_free() -> int:
    """Bytes left of a container's memory limit."""
    left, group, cached = sys.maxsize, Path("/sys/fs/cgroup"), 0
    with suppress(OSError, ValueError):  # cached files can be evicted
        cached = int(re.findall(r"^inactive_file (\d+)", (group / "memory.stat").read_text(), re.M)[0])
    older = ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes")
    for most, used in (("memory.max", "memory.current"), older):
        with suppress(OSError, ValueError):
            left = min(left, int((group / most).read_text()) - int((group / used).read_text()) + cached)
    return left


def synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
