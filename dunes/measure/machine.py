"""Properties of this machine: device, memory."""

import ctypes
import functools
import hashlib
import os
import platform
import re
import resource
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch

DEVICES = ("cpu", "cuda", "mps")
"""The types of devices that `set_device` knows."""
_device_set: str | None = None


def set_device(name: str | None) -> None:
    """Make `device` return the device of this name, one of DEVICES; None restores the default.

    Raises ValueError if this machine does not have it.
    """
    global _device_set
    usable = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if name is not None and not usable[name]:
        raise ValueError(f"--device is {name}, which PyTorch cannot use here; leave it out, or use --device cpu")
    _device_set = name


def device() -> torch.device:
    """The device set with `set_device`; else CUDA if available, else Apple's GPU, else the CPU."""
    if _device_set is not None:
        return torch.device(_device_set)
    mps = "mps" if torch.backends.mps.is_available() else "cpu"
    return torch.device("cuda" if torch.cuda.is_available() else mps)


def out_of_memory(error: BaseException) -> bool:
    """True if this error means out of memory, on any device."""
    messages = ("out of memory", "can't allocate memory", "not enough memory")
    return isinstance(error, MemoryError) or any(m in str(error) for m in messages)


def keep_freed_memory() -> None:
    """Keep freed memory in the process for the next step or layer.

    glibc returns large blocks to the system at once; a training step then spends a third of its time on page
    faults (4M parameters, 2 threads: 5.3k tokens/s without this, 7.8k with it), prefill a tenth (10M, 256 tokens).
    """
    trim_threshold, mmap_max = -1, -4
    if sys.platform == "linux":
        with suppress(OSError):  # another C library
            libc = ctypes.CDLL("libc.so.6")
            libc.mallopt(trim_threshold, 2**31 - 1)
            libc.mallopt(mmap_max, 0)


def flush_denormals() -> None:
    """Flush denormal numbers to zero, in this thread and threads that it starts.

    Processors are ten times slower on denormals: a softmax over 512 x 4,096 logits of a confident model took 7.6
    ms with and 0.7 ms without them. Call it before the first operation, which starts the other threads.
    """
    for dtype in (np.float32, np.float64):
        np.finfo(dtype)  # numpy before 2.4 measures denormals at the first call, and warns if they are zero
    torch.set_flush_denormal(True)


def peak_memory(device: torch.device) -> int:
    """Peak memory of this process in bytes: on the GPU if it uses one, else resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    with suppress(OSError, StopIteration), open("/proc/self/status") as file:
        # Linux's getrusage would return the parent's peak if that was higher.
        return int(next(line for line in file if line.startswith("VmHWM:")).split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def reset_peak_memory(device: torch.device) -> int:
    """Reset `peak_memory` if possible (CUDA, Linux); returns the bytes now in use."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    with suppress(OSError), open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    return resident_memory()


def resident_memory() -> int:
    """Resident memory of this process in bytes, or its peak on systems that report only the peak."""
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
    with suppress(OSError, ValueError):  # total memory, if the system reports only that
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") - resident_memory()
    return 0


def _cgroup_free() -> int:
    """Free bytes below a container's memory limit."""
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
    """Hardware and software that speed depends on; `machine` is a short digest of the rest."""
    facts: dict[str, str | int] = {
        "cpu": processor().get("model name") or platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "memory_bytes": _memory(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "",
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    return {"machine": hashlib.blake2b(repr(facts).encode(), digest_size=4).hexdigest()} | facts


@functools.cache
def processor() -> dict[str, str]:
    """The name of the processor and its instructions ("flags" on x86, "Features" on ARM); empty but on Linux."""
    with suppress(OSError):
        fields = [line.partition(":") for line in Path("/proc/cpuinfo").read_text().splitlines()]
        values = {key.strip(): value.strip() for key, _, value in fields}
        return {key: values[key] for key in ("model name", "CPU part", "flags", "Features") if key in values}
    return {}


def _memory() -> int:
    """Total memory in bytes, rounded to GiB: the kernel reserves a slightly different amount at each start."""
    with suppress(OSError, ValueError, AttributeError):
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30) * 2**30
    return 0
