"""Which machine a figure comes from, and the energy it used where it tells."""

import hashlib
import os
import platform
from contextlib import suppress
from pathlib import Path

import torch

POWERCAP = Path("/sys/class/powercap")


def fingerprint() -> dict[str, str | int]:
    """What a machine's speed depends on; `machine` is a short digest of the rest."""
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
    """Bytes, to the gigabyte: kernels reserve a little more or less at each start."""
    with suppress(OSError, ValueError, AttributeError):
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30) * 2**30
    return 0


def joules(root: Path = POWERCAP) -> float | None:
    """Energy that the processor packages have used since some moment; None where that is not told.

    Linux counts it for Intel and AMD (https://docs.kernel.org/power/powercap/powercap.html), mostly for
    the superuser alone. The counters begin anew every few minutes to hours.
    """
    counters = [p for p in root.glob("intel-rapl:*/energy_uj") if p.parent.name.count(":") == 1]
    try:
        return sum(int(p.read_text()) for p in counters) / 1e6 if counters else None
    except (OSError, ValueError):
        return None
