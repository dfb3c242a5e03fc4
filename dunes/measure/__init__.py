"""Properties of this machine, and measurements of memory."""

from dunes.measure.allocations import KINDS, Allocation, Allocations, allocations
from dunes.measure.fingerprint import fingerprint
from dunes.measure.machine import (
    DEVICES,
    choose_dtype,
    choose_threads,
    device,
    flush_denormals,
    free_memory,
    keep_freed_memory,
    matmul_rate,
    out_of_memory,
    peak_memory,
    read_rate,
    reset_peak_memory,
    resident_memory,
    set_device,
    synchronize,
    use_best_threads,
)
from dunes.measure.module_tracker import ModuleTracker

__all__ = [
    "DEVICES",
    "KINDS",
    "Allocation",
    "Allocations",
    "ModuleTracker",
    "allocations",
    "choose_dtype",
    "choose_threads",
    "device",
    "fingerprint",
    "flush_denormals",
    "free_memory",
    "keep_freed_memory",
    "matmul_rate",
    "out_of_memory",
    "peak_memory",
    "read_rate",
    "reset_peak_memory",
    "resident_memory",
    "set_device",
    "synchronize",
    "use_best_threads",
]
