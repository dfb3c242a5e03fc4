"""Properties of this machine: device, memory and rates, and the best dtype and number of threads.

Training results depend on the dtype and the number of threads. Both are therefore chosen by the kind of processor
and the cores that this process may use, never by a measurement. Measured rates decide the size of a run. The
measurements use the threads' processor time, since other programs hardly change it.
"""

import ctypes
import functools
import gc
import hashlib
import math
import os
import platform
import re
import resource
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter, thread_time
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from dunes.files.atomic import cache_home, write_file

DEVICES = ("cpu", "cuda", "mps")
"""The device types that `set_device` accepts."""
_device_set: str | None = None
FASTEST_CLOCK = 6.2e9
"""Cycles per second of the fastest processors sold; virtual machines do not report their own clock."""
FAR = 3.0
"""Other programs on a core rarely change the core's measured rate by more than this factor."""
READERS = 8
"""Number of cores above which the memory read bandwidth hardly grows."""
SAMPLES, SAMPLE_SECONDS, SPREAD = 7, 0.15, 0.5
"""A rate is measured with at least SAMPLES calls and SAMPLE_SECONDS in total. Samples agree if their quartiles
differ by less than SPREAD times the median. With three other busy processes on two cores, the quartiles differ by
up to 0.34 times the median.
"""


class Kind(NamedTuple):
    """A kind of processor: all processors whose facts (see `kind_of`) contain the words in `where`.

    `bfloat16` is True if matrix products are clearly faster in bfloat16 than in float32. `rates` are typical rates
    of one core: TFLOP/s of products in float32 and bfloat16, and GB/s of memory reads. `most` are upper bounds for
    one core: operations per cycle in float32 and in 16 bits, and bytes read per cycle.
    """

    where: Mapping[str, str]
    bfloat16: bool
    rates: tuple[float, float, float]
    most: tuple[int, int, int] = (64, 128, 32)


AMD, BF16 = {"vendor_id": "AuthenticAMD"}, {"flags": "avx512_bf16"}
KINDS = (
    # AMX, measured on two Xeons (TFLOP/s of one core): float32 0.15 on both, bfloat16 0.58 and 1.0.
    Kind({"flags": "amx_bf16"}, True, (0.15, 0.76, 13), (64, 1024, 32)),
    # Zen 5, measured: float32 0.12, bfloat16 0.44 to 0.50. Zen 4 (next line): float32 0.09, bfloat16 0.21.
    Kind(AMD | BF16 | {"cpu family": "26"}, True, (0.12, 0.47, 17)),
    Kind(AMD | BF16, True, (0.1, 0.24, 17)),
    # Cooper Lake trains ResNet-50 1.7 times as fast in bfloat16: http://www.anandtech.com/show/15862
    Kind(BF16 | {"vendor_id": "GenuineIntel", "model": "85"}, True, (0.12, 0.2, 10)),
    # A later Xeon in a virtual machine that hides AMX, measured: float32 0.154, bfloat16 0.084.
    Kind(BF16, False, (0.15, 0.084, 13)),
    # oneDNN emulates bfloat16, at half the rate or less: https://github.com/uxlfoundation/oneDNN/issues/493
    Kind({"flags": "avx512f"}, False, (0.12, 0.05, 10)),
    # Zen 3: float32 .054, bfloat16 .001. Intel's AVX2 is as slow: https://github.com/pytorch/pytorch/issues/146508
    Kind({"flags": "avx2"}, False, (0.07, 0.001, 10), (32, 32, 32)),
    # Apple: 26 tokens/s with bfloat16, 76 without: https://github.com/pytorch/torchchat/issues/651
    Kind({"system": "Darwin"}, False, (0.25, 0.02, 25), (512, 512, 32)),
    # ARM: bfloat16 is 1.9 times as fast on Graviton3: https://github.com/pytorch/pytorch/pull/91763
    Kind({"system": "aarch64", "Features": "bf16"}, True, (0.06, 0.15, 15), (128, 256, 32)),
    Kind({}, False, (0.03, 0.002, 8), (128, 256, 32)),
)
"""Kinds of processors; the first match applies. Unmeasured rates are estimates from clock and SIMD width."""


class Rate(NamedTuple):
    """A rate per second. `sure` is True if the samples agree; if not, a CPU's `value` is typical of its kind.

    The size of a run is chosen by `planned`, which varies less than `value`. On a CPU, `planned` is the typical
    rate, multiplied by a power of two if `value` differs from it by more than a factor of FAR. On a GPU, `planned`
    equals `value`.
    """

    value: float
    planned: float
    sure: bool


_rates: dict[str, Rate] = {}
"""Rates that this process has measured or read from the cache folder, by name."""


def set_device(name: str | None) -> None:
    """Set the device that `device` returns, by its name in DEVICES; None restores the default.

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


LARGE_BLOCK = 1 << 25
"""`keep_freed_memory` keeps blocks up to this many bytes, the largest value that glibc accepts."""


def _call_glibc(name: str, *arguments: object) -> None:
    """Call a function of glibc; does nothing on systems without glibc."""
    with suppress(OSError, AttributeError):  # another system or C library
        getattr(ctypes.cdll["libc.so.6"], name)(*arguments)  # `cdll` opens it once


def keep_freed_memory() -> None:
    """Keep freed memory in the process for the next step or layer, except blocks above LARGE_BLOCK.

    By default, glibc returns freed memory to the system at once, so page faults take a third of a training step
    (4M parameters, 2 threads: 5.3k tokens/s without this call, 7.8k with it). Page faults take a tenth of the time
    of a prefill (10M parameters, 256 tokens). Larger blocks are not kept: with a model of 135M parameters, kept
    blocks left holes of unequal sizes in the heap, and each step needed more memory than the step before.
    """
    trim_threshold, mmap_threshold = -1, -3
    _call_glibc("mallopt", trim_threshold, 2**31 - 1)
    _call_glibc("mallopt", mmap_threshold, LARGE_BLOCK)


def return_freed_memory() -> None:
    """Return freed memory to the system, including pages between blocks in use; the next step allocates anew."""
    gc.collect()  # a completion engine is a reference cycle that holds a model
    _call_glibc("malloc_trim", 0)


def page_out(ranges: Iterable[tuple[int, int]]) -> None:
    """Evict a mapped file's pages in these ranges (address, bytes) from memory; the next access reads them again.

    Without this call, weights that were only read to be cast or quantized would stay in memory. Changed pages are
    kept.
    """
    page, pageout = resource.getpagesize(), 21
    for address, size in ranges:
        start, stop = -(-address // page) * page, (address + size) // page * page
        _call_glibc("madvise", ctypes.c_void_p(start), ctypes.c_size_t(max(0, stop - start)), pageout)


@contextmanager
def replaced_paged_out(model: nn.Module) -> Iterator[None]:
    """After the `with` block, page out the weights that it replaced, for example by casting or quantizing."""
    stored = {p.data_ptr(): p.nbytes for p in model.parameters() if p.device.type == "cpu"}
    yield
    used = {p.data_ptr() for p in model.parameters()}
    page_out((address, size) for address, size in stored.items() if address not in used)


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
        # On Linux, getrusage would return the parent's peak if the parent's was higher.
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
    with suppress(OSError), open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()
    return peak_memory(torch.device("cpu"))


def free_memory(device: torch.device) -> int:
    """Bytes of memory available on the device without swapping; 0 if unknown."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    with suppress(OSError, ValueError), open("/proc/meminfo") as file:
        fields = dict(line.split(":") for line in file)
        return int(max(1, min(int(fields["MemAvailable"].split()[0]) * 1024, cgroup_limits()[1])))
    with suppress(OSError, ValueError):  # some systems report only total memory
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") - resident_memory()
    return 0


def cgroup_limits(root: Path = Path("/")) -> tuple[float, float]:
    """Numbers of processors and free bytes that this process's control groups allow; infinite without limits.

    The smallest limit of a group and its ancestors applies. `root` is the folder that contains `proc`.
    """
    limits = [(math.inf, math.inf)]
    with suppress(OSError, ValueError, IndexError):
        limits.extend((_quota(group), _free_in(group)) for group in _cgroups(root))
    return min(quota for quota, _ in limits), min(free for _, free in limits)


def _cgroups(root: Path) -> Iterator[Path]:
    """Folders of this process's control groups (versions 1 and 2), each followed by its ancestors."""
    texts = ((root / "proc/self" / name).read_bytes().decode(errors="replace") for name in ("cgroup", "mountinfo"))
    groups, mounts = (text.splitlines() for text in texts)
    for mount in (line for line in mounts if " - cgroup" in line):
        fields, (kind, *_, options) = (part.split() for part in mount.split(" - "))
        top, point = (re.sub(r"\\(\d{3})", lambda m: chr(int(m[1], 8)), f).strip("/") for f in fields[3:5])
        above = [*filter(None, top.split("/"))]
        for _, controllers, path in (group.split(":", 2) for group in groups):
            wanted, parts = {*controllers.split(",")}, [*filter(None, path.split("/"))]
            if kind == ("cgroup" if controllers else "cgroup2") and wanted <= {"", *options.split(",")}:
                # A path outside the mounted folder is from another namespace; the mounted folder replaces it.
                inside = parts[len(above) :] if parts[: len(above)] == above and ".." not in parts else []
                yield from ((root / point).joinpath(*inside[:n]) for n in range(len(inside), -1, -1))


def _quota(group: Path) -> float:
    """Number of processors in the quota of a control group; infinite without a quota."""
    for files in (["cpu.max"], ["cpu.cfs_quota_us", "cpu.cfs_period_us"]):
        with suppress(OSError, ValueError, ZeroDivisionError):
            quota, period = map(int, " ".join((group / file).read_text() for file in files).split())
            return quota / period if quota > 0 else math.inf
    return math.inf


def _free_in(group: Path) -> float:
    """Bytes that a control group can allocate before it reaches a memory limit; infinite without limits."""
    free, cached = math.inf, 0
    with suppress(OSError, ValueError):  # cached files can be evicted; `total_` (version 1) includes child groups
        evictable = re.compile(r"^(?:total_)?inactive_file (\d+)", re.M)
        cached = max(map(int, evictable.findall((group / "memory.stat").read_text())))
    older = ("memory.limit_in_bytes", "memory.usage_in_bytes")
    for most, usage in (("memory.max", "memory.current"), ("memory.high", "memory.current"), older):
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
    """On Linux, name, family and instruction sets of the processor ("flags" on x86, "Features" on ARM); else
    empty.
    """
    with suppress(OSError):
        fields = [line.partition(":") for line in Path("/proc/cpuinfo").read_text().splitlines()]
        values = {key.strip(): value.strip() for key, _, value in fields}
        names = ("vendor_id", "cpu family", "model", "model name", "CPU part", "flags", "Features")
        return {key: values[key] for key in names if key in values}
    return {}


def kind_of(facts: Mapping[str, str]) -> Kind:
    """The first of KINDS that matches `facts`: those of `processor()`, and `system`, such as "Linux x86_64"."""
    words = {name: {*text.split()} for name, text in facts.items()}
    return next(k for k in KINDS if all({*v.split()} <= words.get(n, set()) for n, v in k.where.items()))


@functools.cache
def _kind() -> Kind:
    return kind_of({"system": f"{platform.system()} {platform.machine()}"} | processor())


def total_memory(device: torch.device) -> int:
    """Total memory in bytes, rounded to GiB, since the amount that the kernel reserves varies slightly."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    with suppress(OSError, ValueError, AttributeError):
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30) * 2**30
    return 0


def matmul_rate(dtype: torch.dtype, device: torch.device, size: int = 1024, seconds: float = 0.1) -> float:
    """Median FLOP/s of several products of two square matrices of this size, under the current load."""
    work = _product(dtype, device, size)
    return 2 * size**3 / median(_times(lambda: work(0), device, seconds))


def read_rate(device: torch.device, size: int = 1 << 28, seconds: float = 0.2) -> float:
    """Memory read bandwidth in bytes/s under the current load: the median of several sums over `size` bytes."""
    x = torch.ones(size // 4, device=device)
    return x.nbytes / median(_times(x.sum, device, seconds))


def peak_matmul_rate(dtype: torch.dtype, device: torch.device, size: int = 512) -> Rate:
    """FLOP/s of products of square matrices with all cores that PyTorch may use; measured once, then cached."""
    prepare = lambda cores: _product(dtype, device, size)
    return _cached_rate(f"{str(dtype)[6:]}-{size}", device, prepare, 2 * size**3)


def _product(dtype: torch.dtype, device: torch.device, size: int) -> Callable[[int], object]:
    own = torch.Generator().manual_seed(0)  # leaves the global random state to training
    a, b = (torch.randn(size, size, generator=own).to(device, dtype) for _ in "ab")
    return lambda core: a @ b


def peak_read_rate(device: torch.device, size: int = 1 << 25) -> Rate:
    """Memory read bandwidth in bytes/s with all cores that PyTorch may use; measured once, then cached."""

    def prepare(cores: int) -> Callable[[int], object]:
        parts = torch.ones(cores, size // 4, device=device)
        return lambda core: parts[core].sum()

    return _cached_rate("read", device, prepare, size, READERS)


def model_flops_utilization(flops: float, seconds: float, dtype: torch.dtype, device: torch.device) -> float:
    """MFU: a model's FLOP/s over the peak rate of products in `dtype` or float32, whichever is faster."""
    return flops / seconds / max(peak_matmul_rate(d, device).value for d in {dtype, torch.float32})


def choose_dtype(device: torch.device) -> torch.dtype:
    """bfloat16 if its matrix products are clearly faster on this device than float32's, else float32.

    NVIDIA's GPUs from Ampere on have faster products in bfloat16; KINDS decides for CPUs. On Apple's GPU, bfloat16
    saves memory but no time (https://github.com/karpathy/nanochat/pull/793).
    """
    cuda = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.bfloat16 if cuda or (device.type == "cpu" and _kind().bfloat16) else torch.float32


def choose_threads() -> int:
    """Number of threads to use: OMP_NUM_THREADS if set, else the number of physical cores for this process."""
    if threads := os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip():
        with suppress(ValueError):
            return max(1, int(threads))
    return _usable_cores()


def use_best_threads() -> None:
    """Set PyTorch's number of threads to the result of `choose_threads`."""
    torch.set_num_threads(choose_threads())


@contextmanager
def one_thread() -> Iterator[None]:
    """Inside the `with` block, limit PyTorch to one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _usable_cores() -> int:
    return max(1, int(min(_physical_cores(), cgroup_limits()[0])))


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


def _cached_rate(
    name: str,
    device: torch.device,
    prepare: Callable[[int], Callable[[int], object]],
    amount: float,
    most_cores: int = sys.maxsize,
) -> Rate:
    """Rate of a function that does `amount` of work per call; cached on disk if the samples agree.

    `prepare` takes the number of cores and returns the function; each core calls the function with its own index.
    """
    cpu, threads = device.type == "cpu", torch.get_num_threads()
    key = f"{name}-{device.type}" + f"-{threads}" * cpu
    if key in _rates:
        return _rates[key]
    cores = min(most_cores, threads, _usable_cores())
    full, half, read = zip(_kind().rates, _kind().most, strict=True)
    others = min(full[0], half[0]), half[1]
    rates = {"float32": full, "bfloat16": half, "read": read}.get(name.partition("-")[0], others)
    typical = cores * rates[0] * (1e9 if name == "read" else 1e12)
    most = cores * rates[1] * FASTEST_CLOCK if cpu else math.inf
    path, value = None, 0.0
    with suppress(ValueError, OSError):  # there is no home folder or no stored rate
        path = cache_home() / "processor-rates" / str(fingerprint()["machine"]) / f"{key}-{cores}"
        value = float(path.read_text())
    stored = sure = 0 < value < most
    if not stored:
        samples = _sample(prepare(cores), device, cores)
        value = sum(amount / max(1e-12, median(seconds)) for seconds in samples)
        sure = value < most and all(high - low < SPREAD * mid for low, mid, high in map(quantiles, samples))
    if sure and not stored and path is not None:
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_file(path, repr(value).encode())
    far = sure and not typical / FAR <= value <= FAR * typical
    planned = typical * 2.0 ** (round(math.log2(value / typical)) if far else 0)
    return _rates.setdefault(
        key, Rate(value if sure else typical, planned, sure) if cpu else Rate(value, value, sure)
    )


def _sample(work: Callable[[int], object], device: torch.device, cores: int) -> list[list[float]]:
    """Seconds of each call, by core. On Linux, one thread per core measures its own processor time."""
    if device.type != "cpu" or sys.platform != "linux":  # libraries on macOS compute in hidden threads
        return [_times(lambda: work(0), device, SAMPLE_SECONDS, SAMPLES)]
    # Each thread computes alone, since threads of an OpenMP team would spin while they wait for a slow one.
    with one_thread(), ThreadPoolExecutor(cores, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        take = lambda core: _times(lambda: work(core), device, SAMPLE_SECONDS, SAMPLES, thread_time)
        return [*pool.map(take, range(cores))]


def _times(
    work: Callable[[], object],
    device: torch.device,
    seconds: float,
    least: int = 1,
    clock: Callable[[], float] = perf_counter,
) -> list[float]:
    """Seconds per call of `work`, for at least `least` calls and, if the clock advances, `seconds` in total."""
    times = list[float]()
    for _ in range(2):  # the first calls load kernels
        work()
    while len(times) < least or (sum(times) < seconds and len(times) < 10_000):
        synchronize(device)
        start = clock()
        work()
        synchronize(device)
        times.append(clock() - start)
    return times
