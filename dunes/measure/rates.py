"""Rates of this machine, and the dtype and number of threads chosen by them.

Training results depend on dtype and threads, so these must not depend on the current load: they follow from
instruction sets and cores. If only a measurement can decide, it continues until samples agree, and is stored in
the cache folder for this machine and version of PyTorch.
"""

import functools
import math
import os
import subprocess
import sys
from bisect import insort
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from time import perf_counter

import torch

from dunes.cores import FREE, wait_times, waiting_seconds
from dunes.files.atomic import cache_home, write_file
from dunes.measure.machine import fingerprint, synchronize

FASTER = 1.5
"""Speed-up over float32's matrix products at which bfloat16 is chosen."""
AGREEMENT = 0.95
"""Samples agree if they reach this fraction of the best one."""
AGREEING = 3
"""Number of samples that must agree."""
LONGEST = 2.0
"""Seconds after which a measurement ends unsure: the machine is busy, and the result is not stored."""

_rates: dict[str, float] = {}
"""Rates measured by this process."""
_unsure: set[str] = set()
"""Names of rates that are not stored, since samples did not agree."""


def matmul_rate(dtype: torch.dtype, device: torch.device, size: int = 1024, seconds: float = 0.1) -> float:
    """FLOP/s of a square matrix product, under the current load."""
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
    """Memory read bandwidth in bytes/s under the current load: the fastest of several sums over `size` bytes."""
    x = torch.ones(size // 4, device=device)
    best, start = 0.0, perf_counter()
    while perf_counter() - start < seconds or not best:
        before = perf_counter()
        x.sum()
        synchronize(device)
        best = max(best, x.nbytes / (perf_counter() - before))
    return best


def peak_matmul_rate(dtype: torch.dtype, device: torch.device, size: int = 512) -> float:
    """FLOP/s of a square matrix product on this machine when idle; measured once, then cached."""
    # One product per sample: a longer sample would be interrupted on a busy machine.
    return _cached_rate(f"matmul-{str(dtype)[6:]}-{size}", device, lambda: matmul_rate(dtype, device, size, 0.0))


def peak_read_rate(device: torch.device) -> float:
    """Memory read bandwidth of this machine in bytes/s when idle; measured once, then cached."""
    return _cached_rate("read", device, lambda: read_rate(device, 1 << 26, 0.0))


@functools.cache
def choose_dtype(device: torch.device) -> torch.dtype:
    """bfloat16 if its matrix products are clearly faster here, else float32."""
    fast = has_fast_bfloat16(device)
    if fast is None:
        half, full = (peak_matmul_rate(d, device) for d in (torch.bfloat16, torch.float32))
        fast = not _unsure and half > FASTER * full  # if unsure, the safe choice
    return torch.bfloat16 if fast else torch.float32


def has_fast_bfloat16(device: torch.device) -> bool | None:
    """True if instructions make bfloat16 products fast, False if not, None if only timing tells."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    if device.type != "cpu":
        return None
    features = torch.cpu.get_capabilities()
    if features.get("architecture") != "x86_64":
        return None
    # With AVX512_BF16 alone some processors are faster (Zen 4) and some slower (Xeon).
    return True if features["amx_bf16"] else None if features["avx512_bf16"] else False


def choose_threads() -> int:
    """Number of threads to use: OMP_NUM_THREADS, else the physical cores available to this process."""
    if threads := os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip():
        with suppress(ValueError):
            return max(1, int(threads))
    return max(1, min(_physical_cores(), _cpu_quota()))


def use_best_threads() -> None:
    """Use the number of threads that `choose_threads` returns."""
    torch.set_num_threads(choose_threads())


def _physical_cores() -> int:
    """Number of physical cores available to this process; on a Mac, of performance cores."""
    if not hasattr(os, "sched_getaffinity"):
        with suppress(OSError, ValueError, subprocess.SubprocessError):
            command = ["sysctl", "-n", "hw.perflevel0.physicalcpu"]
            return int(subprocess.run(command, capture_output=True, check=True, timeout=5).stdout)
        return os.cpu_count() or 1
    usable, siblings = os.sched_getaffinity(0), set[str]()
    for cpu in usable:
        with suppress(OSError):
            siblings.add(Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text())
    return len(siblings) or len(usable)


def _cpu_quota() -> int:
    """Processors of a container's quota, rounded up."""
    with suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return math.ceil(int(quota) / int(period))
    return sys.maxsize


def _cached_rate(name: str, device: torch.device, sample: Callable[[], float]) -> float:
    """The highest sample, taken until samples agree; cached on disk for this machine."""
    name = f"{name}-{device.type}" + f"-{torch.get_num_threads()}" * (device.type == "cpu")
    if name in _rates:
        return _rates[name]
    path = None
    with suppress(ValueError, OSError):  # no home folder, or no stored rate
        path = cache_home() / "peak-rates" / str(fingerprint()["machine"]) / name
        if 0 < (rate := float(path.read_text())) < math.inf:
            return rate
    start, before = perf_counter(), wait_times()
    rates = sorted(sample() for _ in range(AGREEING))
    while not (sure := _is_sure(rates, start, before)) and perf_counter() - start < LONGEST:
        insort(rates, sample())
    _rates[name] = rates[-1]
    if not sure:
        _unsure.add(name)
    if sure and path is not None:
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_file(path, repr(rates[-1]).encode())
    return rates[-1]


def _is_sure(rates: Sequence[float], start: float, before: Mapping[str, float]) -> bool:
    """True if samples agree, without waits for cores since `start` (under a steady load samples agree, too)."""
    alone = waiting_seconds(before, wait_times()) <= FREE * (perf_counter() - start)
    return alone and rates[-AGREEING] >= AGREEMENT * rates[-1]
