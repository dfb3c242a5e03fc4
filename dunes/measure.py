"""What this machine is and can do: device, dtype, threads, memory."""

import ctypes
import os
import resource
import sys
from statistics import median
from time import perf_counter

import torch


def device() -> torch.device:
    """CUDA if there, else Apple's GPU, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda")
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


def matmul_rate(dtype: torch.dtype, device: torch.device, size: int = 1024, seconds: float = 0.1) -> float:
    """Floating-point operations a second of a square matrix product."""
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in "ab")
    count, start = 0, 0.0
    while count < 3 or perf_counter() - start < seconds:
        a @ b
        _wait(device)
        count += 1
        if count == 2:  # the first ones load kernels
            count, start = 2, perf_counter()
    return 2 * size**3 * (count - 2) / (perf_counter() - start)


def dtype(device: torch.device) -> torch.dtype:
    """bfloat16 where its matrix products are clearly faster here, else float32."""
    half, full = (matmul_rate(d, device) for d in (torch.bfloat16, torch.float32))
    return torch.bfloat16 if half > 1.5 * full else torch.float32


def threads() -> int:
    """How many threads to compute with: all the process may use, or one where others keep them busy.

    Threads that wait for each other at every operation can be slower than one alone when something
    else runs too; so the two are tried.
    """
    most = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    before, medians = torch.get_num_threads(), {}
    x, weight = torch.randn(1024, 256), torch.randn(256, 1024)
    for n in {1, most}:
        torch.set_num_threads(n)
        times = []
        for _ in range(40):
            start = perf_counter()
            (x @ weight).softmax(-1)
            times.append(perf_counter() - start)
        medians[n] = median(times)
    torch.set_num_threads(before)
    return min(medians, key=lambda n: medians[n])


def keep_memory() -> None:
    """Have freed memory kept for the next step, instead of given back and fetched anew each time.

    glibc returns large blocks to the system at once; a training step then spends a third of its time
    on page faults (4M parameters, 2 threads: 5.3k tokens/s without, 7.8k with).
    """
    if sys.platform != "linux":
        return
    try:
        libc = ctypes.CDLL("libc.so.6")
    except OSError:  # another C library, which may well behave otherwise
        return
    trim_threshold, mmap_max = -1, -4
    libc.mallopt(trim_threshold, 2**31 - 1)
    libc.mallopt(mmap_max, 0)


def peak_memory(device: torch.device) -> int:
    """The most bytes this process has held at once: on the GPU if it uses one, else resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
