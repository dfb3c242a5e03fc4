"""Two nodes of one run: network namespaces of this machine, whose link is cut in a step and in a save.

It prints what the nodes did and after how many seconds. It needs root and the command `ip`, and eight minutes.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path
from time import monotonic, sleep

from dunes import checkpoint

NODES = {"dunes0": "10.77.0.1", "dunes1": "10.77.0.2"}
RUN = f"-m dunes train {Path(__file__).parents[1]}/dunes/files --steps 120 --size 60k --vocab-size 300"
RUN += " --context-length 32 --batch 4 --no-complete --dtype float32 --threads 1 --out"
LAUNCH = f"-m torch.distributed.run --nnodes 2 --master_addr {NODES['dunes0']} --master_port 29500 --node_rank"


def ip(words):
    subprocess.run(["ip", *words.split()], check=True)


@contextmanager
def network():
    """A namespace for each node, in which its interface has its name."""
    for node in NODES:
        ip(f"netns add {node}")
    try:
        ip("link add dunes0 netns dunes0 type veth peer name dunes1 netns dunes1")
        for node, address in NODES.items():
            for words in (f"addr add {address}/24 dev {node}", "link set lo up", f"link set {node} up"):
                ip(f"-n {node} {words}")
        yield
    finally:
        for node in NODES:
            ip(f"netns delete {node}")


@contextmanager
def two_nodes(folder, *options):
    """Each node's torchrun, with one rank, which writes into FOLDER.dunes0 or .dunes1; nothing of them remains."""
    processes = []
    for number, node in enumerate(NODES):
        torchrun = f"ip netns exec {node} {sys.executable} {LAUNCH} {number} {RUN} {folder}".split()
        env = os.environ | {"GLOO_SOCKET_IFNAME": node, "OMP_NUM_THREADS": "1"}
        with folder.with_suffix(f".{node}").open("w") as log:
            processes.append(subprocess.Popen([*torchrun, *options], env=env, stdout=log, stderr=log))
    try:
        yield processes
    finally:
        for pid in (pid for p in processes if p.poll() is None for pid in (*children(p), p.pid)):
            os.kill(pid, signal.SIGKILL)


def children(process):
    return [*map(int, subprocess.getoutput(f"pgrep -P {process.pid}").split())]


def wait(check, pause=0.05):
    start = monotonic()
    while not check():
        assert monotonic() < start + 600, "a run does not go on"
        sleep(pause)
    return monotonic() - start


def losses(folder):
    path = folder / "metrics.jsonl"
    records = map(json.loads, path.read_text().splitlines() if path.exists() else [])
    return [record["loss"] for record in records if "loss" in record]


def complete(name, nodes, folder, *options):
    """Run to the end, with one process or on both nodes, and print how far the losses are from one process's."""
    if nodes == 1:
        subprocess.check_output([sys.executable, *f"{RUN} {folder} --quiet".split(), *options])
    else:
        with two_nodes(folder, *options) as processes:
            [process.wait(600) for process in processes]
    pairs = zip(losses(folder.parent / "one"), losses(folder), strict=True)
    differences = [abs(loss - other) for loss, other in pairs]
    print(f"{name}: losses differ by {max(differences[:20]):.1e} in 20 steps, by {max(differences):.1e} in all")


def cut(phase, folder):
    """Cut the link in a step or a save; then go on from the newest state with one process and with two nodes."""
    with two_nodes(folder) as processes:
        wait(lambda: len(losses(folder)) >= 5)
        for pattern in ["step-*", ".dunes-*.new"][: 1 + (phase == "save")]:
            os.kill(children(processes[0])[0], signal.SIGUSR1)
            wait(lambda: [*folder.glob(f"state/{pattern}")], 0.0005)  # noqa: B023
        ip("-n dunes0 link set dunes0 down")
        staged = [path.name for path in folder.glob("state/.dunes-*.new")]
        print(f"link cut in a {phase}, after step {len(losses(folder))}; being saved: {staged}")
        print(f"  both ranks ended after {wait(lambda: not any(map(children, processes))):.0f} s, ", end="")
        print(f"both torchruns {wait(lambda: None not in [p.poll() for p in processes]):.0f} s later")
    for log in map(folder.with_suffix, (f".{node}" for node in NODES)):
        print(f"  {log.suffix[1:]}:", *[line for line in log.read_text().splitlines() if "dunes:" in line])
    ip("-n dunes0 link set dunes0 up")
    print(f"  newest state: {checkpoint.latest_state(folder, print).name}")
    shutil.copytree(folder, copy := folder.with_name(f"{folder.name}-copy"))
    complete("  --resume with one process", 1, copy, "--resume")
    complete("  --resume on two nodes", 2, folder, "--resume")


if __name__ == "__main__":
    if os.geteuid() or not shutil.which("ip"):
        raise SystemExit("two_nodes.py: network namespaces need root and the command ip; start it as root")
    with tempfile.TemporaryDirectory() as root, network():
        complete("one process", 1, Path(root, "one"))
        complete("two nodes", 2, Path(root, "two"))
        for phase in ("step", "save"):
            cut(phase, Path(root, phase))
