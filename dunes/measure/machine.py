"""Properties of this machine: device, memory, rates, and the dtype and number of threads that suit it.

Training results depend on the dtype and the number of threads. So these are chosen by instruction sets and cores,
and not by the current load. If only a measurement can decide, it continues until samples agree; the result is
stored in the cache folder for this machine and version of PyTorch.
"""

import ctypes
import functools
import hashlib
import math
import os
import platform
import re
import resource
import subprocess
import sys
from bisect import insort
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from time import perf_counter

import numpy as np
import torch

from dunes.cores import FREE, wait_times, waiting_seconds
from dunes.files.atomic import cache_home, write_file

DEVICES = ("cpu", "cuda", "mps")
"""The device types that `set_device` accepts."""
_device_set: str | None = None
FASTER = 1.5
"""bfloat16 is chosen if its matrix products are more than this many times as fast as float32's."""
AGREEMENT = 0.95
"""Samples agree if they reach this fraction of the best sample."""
AGREEING = 3
"""Number of samples that must agree."""
LONGEST = 2.0
"""Maximum seconds of a measurement. If samples do not agree by then, the machine is busy, and the result is not
stored."""
_rates: dict[str, float] = {}
"""Rates that this process has measured, by name."""
_unsure: set[str] = set()
"""Names of rates that are not stored, since samples did not agree."""


def set_device(name: str | None) -> None:
    """Make `device` return the device of this name, one of DEVICES; None restores the default.

    Raises ValueError if PyTorch cannot use this device on this machine.
    """
    global _device_set
    usable = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if name is not None and not usable[name]:
        raise ValueError(f"--device is {name}, which PyTorch cannot use here; leave it out, or use --device cpu")
    _device_set = name


def device() -> torch.device:
    """The device set by `set_device`. By default, the first available of: CUDA, Apple's GPU, the CPU."""
    if _device_set is not None:
        return torch.device(_device_set)
    mps = "mps" if torch.backends.mps.is_available() else "cpu"
    return torch.device("cuda" if torch.cuda.is_available() else mps)


def out_of_memory(error: BaseException) -> bool:
    """True if the error means that memory ran out, on any device."""
    messages = ("out of memory", "can't allocate memory", "not enough memory")
    return isinstance(error, MemoryError) or any(m in str(error) for m in messages)


def keep_freed_memory() -> None:
    """Keep freed memory in the process for the next step or layer.

    By default, glibc returns large blocks to the system at once. A training step then spends a third of its time
    on page faults (4M parameters, 2 threads: 5.3k tokens/s without this call, 7.8k with it); prefill spends a
    tenth (10M parameters, 256 tokens).
    """
    trim_threshold, mmap_max = -1, -4
    if sys.platform == "linux":
        with suppress(OSError):  # another C library
            libc = ctypes.CDLL("libc.so.6")
            libc.mallopt(trim_threshold, 2**31 - 1)
            libc.mallopt(mmap_max, 0)


def flush_denormals() -> None:
    """Flush denormal numbers to zero, in this thread and in threads that it starts later.

    Processors are ten times slower on denormals: a softmax over 512 x 4,096 logits of a confident model took 7.6
    ms with denormals and 0.7 ms without. Call this function before the first operation, which starts other
    threads.
    """
    for dtype in (np.float32, np.float64):
        np.finfo(dtype)  # numpy before 2.4 measures denormals at the first call, and warns if they are zero
    torch.set_flush_denormal(True)


def peak_memory(device: torch.device) -> int:
    """Peak memory of this process in bytes: GPU memory if `device` is a CUDA device, else resident memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    with suppress(OSError, StopIteration), open("/proc/self/status") as file:
        # Linux's getrusage would return the parent's peak if that was higher.
        return int(next(line for line in file if line.startswith("VmHWM:")).split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def reset_peak_memory(device: torch.device) -> int:
    """Reset `peak_memory` where the system allows it (CUDA, Linux); returns the bytes now in use."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    with suppress(OSError), open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    return resident_memory()


def resident_memory() -> int:
    """Resident memory of this process in bytes; peak resident memory on systems that report only the peak."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:
        return peak_memory(torch.device("cpu"))


def free_memory(device: torch.device) -> int:
    """Bytes of memory available on the device without swapping; 0 if unknown."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    with suppress(OSError, ValueError), open("/proc/meminfo") as file:
        fields = dict(line.split(":") for line in file)
        return min(int(fields["MemAvailable"].split()[0]) * 1024, _cgroup_free())
    with suppress(OSError, ValueError):  # total memory, if the system reports only that
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") - resident_memory()
    return 0


def _cgroup_free() -> int:
    """Bytes that this process can still allocate before it reaches its container's memory limit."""
    free, group, cached = sys.maxsize, Path("/sys/fs/cgroup"), 0
    with suppress(OSError, ValueError):  # cached files can be evicted
        cached = int(re.findall(r"^inactive_file (\d+)", (group / "memory.stat").read_text(), re.M)[0])
    older = ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes")
    for most, usage in (("memory.max", "memory.current"), older):
        with suppress(OSError, ValueError):
            free = min(free, int((group / most).read_text()) - int((group / usage).read_text()) + cached)
    return free


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all its work."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def fingerprint() -> dict[str, str | int]:
    """Facts about hardware and software that affect speed; `machine` is a short digest of the other entries."""
    facts: dict[str, str | int] = {
        "cpu": processor().get("model name") or platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "memory_bytes": total_memory(torch.device("cpu")),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "",
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    return {"machine": hashlib.blake2b(repr(facts).encode(), digest_size=4).hexdigest()} | facts


@functools.cache
def processor() -> dict[str, str]:
    """Name and instruction sets of the processor ("flags" on x86, "Features" on ARM). Empty except on Linux."""
    with suppress(OSError):
        fields = [line.partition(":") for line in Path("/proc/cpuinfo").read_text().splitlines()]
        values = {key.strip(): value.strip() for key, _, value in fields}
        return {key: values[key] for key in ("model name", "CPU part", "flags", "Features") if key in values}
    return {}


def total_memory(device: torch.device) -> int:
    """Total memory in bytes, rounded to GiB: the kernel reserves a slightly different amount at each start."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    with suppress(OSError, ValueError, AttributeError):
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30) * 2**30
    return 0


def matmul_rate(dtype: torch.dtype, device: torch.device, size: int = 1024, seconds: float = 0.1) -> float:
    """FLOP/s of a product of two square matrices of this size, measured under the current load."""
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
    """FLOP/s of a product of square matrices on this machine when it is idle; measured once, then cached."""
    # One product per sample: a longer sample would be interrupted on a busy machine.
    return _cached_rate(f"matmul-{str(dtype)[6:]}-{size}", device, lambda: matmul_rate(dtype, device, size, 0.0))


def peak_read_rate(device: torch.device) -> float:
    """Memory read bandwidth in bytes/s of this machine when it is idle; measured once, then cached."""
    return _cached_rate("read", device, lambda: read_rate(device, 1 << 26, 0.0))


@functools.cache
def choose_dtype(device: torch.device) -> torch.dtype:
    """bfloat16 if its matrix products are clearly faster on this device than float32's, else float32."""
    fast = has_fast_bfloat16(device)
    if fast is None:
        half, full = (peak_matmul_rate(d, device) for d in (torch.bfloat16, torch.float32))
        fast = not _unsure and half > FASTER * full  # if unsure, the safe choice
    return torch.bfloat16 if fast else torch.float32


def has_fast_bfloat16(device: torch.device) -> bool | None:
    """True if the device has instructions for fast bfloat16 products, False if not, None if only timing tells."""
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
    """Number of threads to use: OMP_NUM_THREADS if set, else the number of physical cores for this process."""
    if threads := os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip():
        with suppress(ValueError):
            return max(1, int(threads))
    return max(1, min(_physical_cores(), _cpu_quota()))


def use_best_threads() -> None:
    """Set PyTorch's number of threads to the result of `choose_threads`."""
    torch.set_num_threads(choose_threads())


def _physical_cores() -> int:
    """Number of physical cores available to this process; on a Mac, number of performance cores."""
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
    """Number of processors in the container's CPU quota, rounded up; very large without a quota."""
    with suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return math.ceil(int(quota) / int(period))
    return sys.maxsize


def _cached_rate(name: str, device: torch.device, sample: Callable[[], float]) -> float:
    """The highest sample of a rate; samples are taken until they agree. Cached on disk for this machine."""
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
    """True if samples agree, and threads hardly waited for cores since `start`.

    Without the second condition, samples could also agree under a steady load.
    """
    alone = waiting_seconds(before, wait_times()) <= FREE * (perf_counter() - start)
    return alone and rates[-AGREEING] >= AGREEMENT * rates[-1]
