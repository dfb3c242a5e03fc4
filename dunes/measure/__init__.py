"""What this machine is and can do, and what a piece of work takes of it."""

from dunes.measure.allocations import KINDS, Allocation, Allocations, allocations
from dunes.measure.fingerprint import fingerprint
from dunes.measure.machine import (
    DEVICES,
    device,
    dtype,
    forget_peak,
    free_memory,
    keep_memory,
    matmul_rate,
    out_of_memory,
    peak_memory,
    quick_small_numbers,
    read_rate,
    resident,
    threads,
    use_device,
    wait,
)
from dunes.measure.places import Places

__all__ = [
    "DEVICES",
    "KINDS",
    "Allocation",
    "Allocations",
    "Places",
    "allocations",
    "device",
    "dtype",
    "fingerprint",
    "forget_peak",
    "free_memory",
    "keep_memory",
    "matmul_rate",
    "out_of_memory",
    "peak_memory",
    "quick_small_numbers",
    "read_rate",
    "resident",
    "threads",
    "use_device",
    "wait",
]
