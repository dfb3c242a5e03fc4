"""What is said of the machine is so."""

import os
import sys
import threading
from itertools import count
from time import process_time, sleep

import pytest
import torch

from conftest import eventually, run_python
from dunes import cores, measure
from dunes.checkpoint.weights.lazy_tensor import MappedFile
from dunes.cores import share_cores
from dunes.measure import machine

NONE = (float("inf"), float("inf"))


@pytest.mark.parametrize(
    ("variable", "quota", "threads"),
    [
        (None, 99, 4),
        ("3,2", 1, 3),
        ("many", 99, 4),
        ("0", 99, 1),
        (None, 1.5, 1),
        (None, 0.1, 1),
        (None, NONE[0], 4),
    ],
)
def test_threads_are_those_of_the_environment_or_the_cores(monkeypatch, variable, quota, threads):
    """Eight processors of four cores; whatever else the machine does."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if variable:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    monkeypatch.setattr(machine.Path, "read_text", lambda path: str(int(path.parts[-3][3:]) % 4))
    monkeypatch.setattr(machine, "cgroup_limits", lambda: (quota, 0))
    assert measure.choose_threads() == threads


V2 = "31 1 0:26 {} /sys/fs/cgroup rw - cgroup2 cgroup2 rw,nsdelegate"
V1 = "\n".join(
    f"3{i} 1 0:2{i} {{}} /sys/fs/cgroup/{name} rw,relatime shared:9 - cgroup cgroup rw,{name}"
    for i, name in enumerate(["memory", "cpu,cpuacct", "name=systemd"])
)
GROUPS = "5:memory:{0}\n4:cpu,cpuacct:{0}\n1:name=systemd:/elsewhere\n0::/"
SCOPE = "user.slice/run.scope"
G = 1 << 30
NESTED = {
    f"{SCOPE}/cpu.max": "max 100000", f"{SCOPE}/memory.max": "max", f"{SCOPE}/memory.current": "100",
    "user.slice/cpu.max": "150000 100000", "user.slice/memory.max": str(3 * G), "cpu.stat": "usage_usec 1",
    "user.slice/memory.current": str(G), "user.slice/memory.stat": f"anon 1\ninactive_file {G}\n",
}  # fmt: skip
OLDER = {
    "cpu,cpuacct/a/b/cpu.cfs_quota_us": "-1", "cpu,cpuacct/a/b/cpu.cfs_period_us": "100000",
    "cpu,cpuacct/a/cpu.cfs_quota_us": "100000", "cpu,cpuacct/a/cpu.cfs_period_us": "100000",
    "memory/a/b/memory.limit_in_bytes": str(9223372036854771712), "memory/a/b/memory.usage_in_bytes": "5",
    "memory/a/memory.limit_in_bytes": str(2 * G), "memory/a/memory.usage_in_bytes": str(G),
    "memory/a/memory.stat": f"inactive_file 3\ntotal_inactive_file {G // 2}\n",
}  # fmt: skip
CONTAINER = {name.replace("/a/", "/"): text for name, text in OLDER.items()}
HYBRID = V1 + "\n41 1 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw"


@pytest.mark.parametrize(
    ("groups", "mounts", "files", "limits"),
    [
        (f"0::/{SCOPE}", V2.format("/"), NESTED, (1.5, 3 * G)),
        ("0::/elsewhere", V2.format("/"), NESTED, NONE),
        ("0::/", V2.format("/"), {"cpu.max": "50000 100000"}, (0.5, float("inf"))),
        ("0::/", V2.format("/"), {"memory.max": "max", "memory.high": "7", "memory.current": "5"}, (NONE[0], 2)),
        ("0::/docker/x", V2.format("/docker/x"), {"cpu.max": "200000 100000"}, (2, float("inf"))),
        ("0::/docker/xyz", V2.format("/docker/x"), {"yz/cpu.max": "1 1", "cpu.max": "3 1"}, (3, float("inf"))),
        ("0::/../other", V2.format("/"), {"cpu.max": "100000 100000"}, (1, float("inf"))),
        (GROUPS.format("/a/b"), V1.format("/", "/", "/"), OLDER, (1, 1.5 * G)),
        (GROUPS.format("/a/b"), V1.format("/a", "/a", "/"), CONTAINER, (1, 1.5 * G)),
        (GROUPS.format("/docker/id"), V1.format("/", "/", "/"), OLDER, NONE),
        (GROUPS.format("/a/b"), HYBRID.format("/", "/", "/"), OLDER | {"unified/cgroup.procs": "1"}, (1, 1.5 * G)),
        (f"0::/{SCOPE}", V2.format("/"), {"user.slice/cpu.max": "broken"}, NONE),
        ("", "", {}, NONE),
        ("0::/", "5 1 no fields\n" + V2.format("/") + "\n9 - cgroup", {"cpu.max": "1 1"}, (1, NONE[0])),
        (None, None, {}, NONE),
    ],
)
def test_the_smallest_limit_of_nested_groups_counts(tmp_path, groups, mounts, files, limits):
    proc = tmp_path / "proc/self"
    proc.mkdir(parents=True)
    if groups is not None:
        (proc / "cgroup").write_text(groups + "\n")
        (proc / "mountinfo").write_text(f"23 1 0:2 / /proc rw - proc proc rw\n{mounts}\n")
    for name, text in files.items():
        path = tmp_path / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert machine.cgroup_limits(tmp_path) == limits


ZEN5 = {"system": "Linux x86_64", "vendor_id": "AuthenticAMD", "cpu family": "26", "model": "2"}
XEON = {"system": "Linux x86_64", "vendor_id": "GenuineIntel", "cpu family": "6", "model": "143"}
AVX512 = "fma avx2 avx512f avx512_bf16"
ARM = {"system": "Linux aarch64"}


@pytest.mark.parametrize(
    ("facts", "bfloat16"),
    [
        (XEON | {"flags": f"{AVX512} amx_bf16 amx_tile"}, True),
        (XEON | {"flags": AVX512}, False),
        (XEON | {"flags": AVX512, "model": "85"}, True),
        (XEON | {"flags": "avx2"}, False),
        (ZEN5 | {"flags": AVX512}, True),
        (ZEN5 | {"flags": AVX512, "cpu family": "25", "model": "17"}, True),
        (ARM | {"Features": "asimd sve i8mm bf16"}, True),
        (ARM | {"Features": "asimd sve svebf16"}, False),
        ({"system": "Darwin arm64"}, False),
        ({}, False),
    ],
)
def test_the_dtype_follows_from_the_processor_alone(monkeypatch, facts, bfloat16):
    kind = machine.kind_of(facts)
    assert kind.bfloat16 == bfloat16 == (kind.rates[1] > 1.5 * kind.rates[0])
    monkeypatch.setattr(machine, "_kind", lambda: kind)
    monkeypatch.setattr(machine, "_sample", lambda *_: pytest.fail("measured"))
    assert (measure.choose_dtype(torch.device("cpu")) == torch.bfloat16) == bfloat16
    assert measure.choose_dtype(torch.device("mps")) == torch.float32
    for rate, operations in zip(kind.rates[:2], kind.most, strict=False):
        assert 1e12 * rate < operations * machine.FASTEST_CLOCK


@pytest.fixture
def rates(monkeypatch, tmp_path):
    """A function that returns the rate of products of a Zen 5 core whose calls take so many milliseconds."""
    monkeypatch.setenv("DUNES_HOME", str(tmp_path))
    monkeypatch.setattr(machine, "_kind", lambda: machine.kind_of(ZEN5 | {"flags": AVX512}))
    monkeypatch.setattr(machine, "_rates", {})

    def rate(*milliseconds, dtype=torch.float32, cores=1):
        monkeypatch.setattr(torch, "get_num_threads", lambda: cores)
        monkeypatch.setattr(machine, "_usable_cores", lambda: cores)
        monkeypatch.setattr(machine, "_sample", lambda *_: [[t / 1e3 for t in milliseconds]] * cores)
        machine._rates.clear()
        return measure.peak_matmul_rate(dtype, torch.device("cpu"))

    return rate


WORK = 2 * 512**3 / 1e-3  # FLOP/s of one product in a millisecond, 0.27 TFLOP/s


def test_a_rate_is_the_median_of_samples_that_agree_and_kept(rates, monkeypatch, tmp_path):
    assert rates(2.0, 2.1, 2.0, 1.9, 2.0, 2.0, 0.05) == (WORK / 2, 0.12e12, True), (
        "a jump of the clock is one sample"
    )
    assert rates(9.0, 9.0, 9.0) == (WORK / 2, 0.12e12, True), "kept on disk"
    assert rates(2.0, 2.0, 2.0, cores=3) == (pytest.approx(3 * WORK / 2), pytest.approx(0.36e12), True)
    (stored,) = tmp_path.rglob("float32-512-cpu-1-1")
    for text in ("nan", "-1", "inf", "4.23e12", ""):  # the last but one is 35 times what this core can
        stored.write_text(text)
        assert rates(2.0, 2.0, 2.0).value == WORK / 2
    monkeypatch.setenv("DUNES_HOME", "/proc/none")
    assert rates(2.0, 2.0, 2.0).sure, "a folder that cannot be written to"


@pytest.mark.parametrize("milliseconds", [(0.05,) * 9, (0.0,) * 9, (1.0, 2.0, 4.0, 8.0, 16.0)])
def test_a_rate_that_is_impossible_or_unsure_is_typical_and_not_kept(rates, tmp_path, milliseconds):
    assert rates(*milliseconds) == (0.12e12, 0.12e12, False)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.parametrize(("milliseconds", "times"), [(0.8, 1), (6.6, 1), (0.7, 4), (6.8, 0.25), (22.0, 0.125)])
def test_a_plan_has_the_typical_rate_unless_another_is_certain(rates, milliseconds, times):
    rate = rates(*[milliseconds] * 7)
    assert rate == (pytest.approx(WORK / milliseconds), pytest.approx(0.12e12 * times), True)


def test_samples_are_of_threads_that_compute_alone_and_leave_no_trace(monkeypatch):
    state, seen, threads = torch.get_rng_state(), set(), torch.get_num_threads()

    def work(core):
        seen.add((core, torch.get_num_threads()))
        sleep(0.001)  # another program's turn
        sum(range(20_000))

    monkeypatch.setattr(machine, "SAMPLE_SECONDS", 0.005)
    before = process_time()
    by_core = machine._sample(work, torch.device("cpu"), 2)
    assert sum(map(sum, by_core)) <= process_time() - before or sys.platform != "linux"
    assert seen == {(0, 1), (1, 1)} or sys.platform != "linux"
    assert all(len(seconds) >= machine.SAMPLES for seconds in by_core)
    machine._product(torch.float32, torch.device("cpu"), 8)
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.skipif(not cores.reports_waits(), reason="the kernel does not count how long threads wait")
def test_threads_that_wait_go_to_sleep_soon_while_cores_are_wanted(monkeypatch):
    """libgomp has more threads than processors exactly while this process waits for cores."""
    monkeypatch.setattr(cores, "SECONDS", 0.02)
    for name in cores.OWN_CHOICE:
        monkeypatch.delenv(name, raising=False)
    wanted, waited, last = threading.Event(), count(), [0.0]

    def waits():
        if wanted.is_set():
            last[0] = float(next(waited))
        return {"1": last[0]}

    monkeypatch.setattr(cores, "wait_times", waits)
    started = lambda: set(os.listdir("/proc/self/task")) - before  # others may end meanwhile
    teams = lambda: [thread.name for thread in threading.enumerate()].count("dunes-team")
    torch.rand(256, 256) @ torch.rand(256, 256)  # starts PyTorch's own
    share_cores()
    share_cores()
    assert eventually(lambda: teams() == 0)  # the machine may be busy
    before = set(os.listdir("/proc/self/task"))
    for _ in range(2):
        wanted.set()
        assert eventually(lambda: teams() == 1 and len(started()) >= 1 + len(os.sched_getaffinity(0)))
        wanted.clear()
        assert eventually(lambda: teams() == 0 and len(started()) <= 1)


@pytest.mark.parametrize("allowed", [0, 2])
def test_where_no_more_threads_are_to_be_had_nothing_fails(monkeypatch, allowed):
    """libgomp ends a process that cannot have its threads."""
    started, start = [], threading.Thread.start

    def refuse(thread):
        if len(started) >= allowed:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="new thread"):
            cores._start_team(3)
        patch.setattr(cores, "_watcher", None)
        for name in cores.OWN_CHOICE:
            patch.delenv(name, raising=False)
        share_cores()
        assert cores._watcher is None


def test_the_wait_of_a_thread_that_has_ended_hides_no_other():
    assert cores.waiting_seconds({"1": 5.0, "2": 1.0}, {"2": 1.5, "3": 0.25}) == 0.75
    assert cores.waiting_seconds({"1": 5.0}, {"1": 0.5}) == 0, "another one with its number"


@pytest.mark.parametrize("told", [True, False])
def test_the_users_own_choice_of_waiting_is_respected(told):
    """Threads are only watched where the user says nothing and the kernel tells how long they wait."""

    def chosen(**given):
        code = "import os, pathlib, threading; pathlib.Path.exists = lambda path: {}; "
        code += "import dunes.cores as cores; cores.share_cores(); print(threading.active_count(), "
        code += "os.environ.get('GOMP_SPINCOUNT'), os.environ.get('OMP_WAIT_POLICY'))"
        unset = {k: v for k, v in os.environ.items() if k not in cores.OWN_CHOICE}
        return run_python(code.format(told), env=unset | given, check=True).stdout.split()

    assert chosen() == (["2", "None", "None"] if told else ["1", "3000", "None"])
    assert chosen(GOMP_SPINCOUNT="7") == ["1", "7", "None"]
    assert chosen(OMP_WAIT_POLICY="ACTIVE") == ["1", "None", "ACTIVE"]


def test_numbers_too_small_count_as_zero_when_asked():
    tiny = torch.full((4,), 1e-30)
    try:
        measure.flush_denormals()
        assert not (tiny * 1e-10).any()
    finally:
        torch.set_flush_denormal(False)
    assert (tiny * 1e-10).all()


@pytest.mark.skipif(sys.platform != "linux", reason="madvise")
def test_pages_of_a_mapped_file_leave_the_memory_and_come_back(tmp_path):
    path, size = tmp_path / "file", 1 << 26
    path.write_bytes(bytes(range(256)) * (size >> 8))
    tensor = MappedFile(path).tensor(0, (size,), torch.uint8)
    tensor[5000] = 7
    before = [tensor[::4096].clone(), measure.resident_memory()]
    machine.page_out([(tensor.data_ptr() + 3, size - 3), (tensor.data_ptr(), 0), (tensor.data_ptr(), 5)])
    assert measure.resident_memory() < before[1] - size // 2
    assert tensor[5000] == 7
    assert torch.equal(tensor[::4096], before[0])


@pytest.mark.skipif(sys.platform != "linux", reason="madvise")
def test_weights_that_a_cast_replaces_leave_the_memory_and_others_stay(tmp_path):
    path, size = tmp_path / "file", 1 << 26
    path.write_bytes(bytes(2 * size))
    file = MappedFile(path)
    tensors = [file.tensor(n * size, (size // 4,), torch.float32) for n in range(2)]
    model = torch.nn.ParameterList(torch.nn.Parameter(tensor) for tensor in tensors)
    total, before = sum(float(p.detach().sum()) for p in model), measure.resident_memory()
    with measure.replaced_paged_out(model):
        model[0].data = model[0].data[:1024].bfloat16()
    assert total == 0
    assert size // 2 < before - measure.resident_memory() < 3 * size // 2
