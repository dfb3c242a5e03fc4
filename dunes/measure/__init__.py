"""Speed, threads and memory of this machine, and the memory of tensors.

Start with `device`, `choose_dtype`, `use_best_threads`, `peak_memory`, and `allocations`, which records the memory
of a workload.
"""

from dunes.measure.allocations import KINDS, Allocation, Allocations, ModuleTracker, allocations, memory_curves
from dunes.measure.machine import (
    DEVICES,
    LARGE_BLOCK,
    Rate,
    choose_dtype,
    choose_threads,
    device,
    fingerprint,
    flush_denormals,
    free_memory,
    keep_freed_memory,
    matmul_rate,
    model_flops_utilization,
    one_thread,
    out_of_memory,
    peak_matmul_rate,
    peak_memory,
    peak_read_rate,
    processor,
    read_rate,
    replaced_paged_out,
    reset_peak_memory,
    resident_memory,
    return_freed_memory,
    set_device,
    synchronize,
    use_best_threads,
)  # fmt: skip

__all__ = [
    "DEVICES", "KINDS", "LARGE_BLOCK", "Allocation", "Allocations", "ModuleTracker", "Rate", "allocations",
    "choose_dtype", "choose_threads", "device", "fingerprint", "flush_denormals", "free_memory",
    "keep_freed_memory", "matmul_rate", "memory_curves", "model_flops_utilization", "one_thread", "out_of_memory",
    "peak_matmul_rate", "peak_memory", "peak_read_rate", "processor", "read_rate", "replaced_paged_out",
    "reset_peak_memory", "resident_memory", "return_freed_memory", "set_device", "synchronize",
    "use_best_threads",
]  # fmt: skip
