"""Identify the machine of a measurement."""

import hashlib
import os
import platform
from contextlib import suppress
from pathlib import Path

import torch


def fingerprint() -> dict[str, str | int]:
    """Hardware and software that speed depends on; `machine` is a short digest of the rest."""
    known: dict[str, str | int] = {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "memory_bytes": _memory(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "",
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    return {"machine": hashlib.blake2b(repr(known).encode(), digest_size=4).hexdigest()} | known


def _cpu() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _memory() -> int:
    """Bytes, rounded to GiB: the kernel reserves a slightly different amount at each start."""
    with suppress(OSError, ValueError, AttributeError):
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30) * 2**30
    return 0
