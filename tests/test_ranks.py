"""Several processes of one run, as torchrun starts them, have one process's losses, files and errors."""

import errno
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from random import Random
from time import monotonic, sleep
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoModelForCausalLM

from conftest import display, equal_states, eventually, raising, refuses, run_python, toy, training_output
from dunes import checkpoint
from dunes.checkpoint.weights import safetensors_file
from dunes.data import Windows
from dunes.measure import ranks
from dunes.models import FAMILIES
from dunes.models.initialise import initialise
from dunes.parts.moe import NoisyGate
from dunes.runs import run as run_module
from dunes.runs import saving
from dunes.runs.finetune import finetune
from dunes.runs.finetune_config import FinetuneConfig
from dunes.runs.saving import run_lock, was_started_by_job
from dunes.runs.task import load_trainable_state, trainable_state
from dunes.runs.train import TrainTask, train
from killed_runs import PROCESSES
from small_models import small_config


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def one_rank(variables, verb, config, folder, options):
    """The run of one process, to which these variables of the environment are new."""
    os.environ.update(variables | options.pop("variables", {}))
    torch.set_num_threads(1)
    TrainTask.sample, run_module.loss_picture = lambda *_: "", lambda *parts: parts[-1].touch()
    show, out = display()
    show.silent = variables["RANK"] != "0"
    try:
        with ranks.process_group("cpu", by_node="LOCAL_WORLD_SIZE" in os.environ):
            status = verb(config, folder, show, **options)
    except (ValueError, OSError) as error:
        out.write(f"error: {error}")
        status = 2
    (folder.parent / f"{folder.name}.rank{variables['RANK']}").write_text(out.getvalue())
    sys.exit(status)


def run_ranks(count, verb, config, folder, **options):
    """What each of `count` processes printed in a run, and their exit codes."""
    common = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    variables = [common | {"RANK": str(i), "LOCAL_RANK": str(i)} for i in range(count)]
    configs = config if isinstance(config, list) else [config] * count
    processes = [
        PROCESSES.Process(target=one_rank, args=(own, verb, each, folder, options))
        for own, each in zip(variables, configs, strict=True)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(240)
    texts = [(folder.parent / f"{folder.name}.rank{i}") for i in range(count)]
    return [path.read_text() if path.exists() else "" for path in texts], [p.exitcode for p in processes]


def steps(folder):
    """The records of the steps of a run, by number."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {r["step"]: r for r in records if "loss" in r}


def assert_same_steps(folder, other):
    one, several = steps(folder), steps(other)
    assert one.keys() == several.keys()
    differences = [abs(one[n]["loss"] - several[n]["loss"]) for n in one]
    print(f"largest difference of losses {max(differences):.1e}")
    assert max(differences) <= 1e-5
    assert [r["count"] for r in one.values()] == [r["count"] for r in several.values()]
    for n, r in one.items():
        assert several[n].get("bits_per_byte") == pytest.approx(r.get("bits_per_byte"), abs=1e-5)


def test_two_processes_train_as_one(code, tmp_path):
    config = toy(code, steps=10)
    training_output(config, tmp_path / "one")
    (first, second), codes = run_ranks(2, train, config, tmp_path / "two")
    assert codes == [0, 0]
    assert "done after 10 steps" in first
    assert second == ""
    assert_same_steps(tmp_path / "one", tmp_path / "two")
    one, two = (checkpoint.load(tmp_path / name).model for name in ("one", "two"))
    assert one.state_dict().keys() == two.state_dict().keys()
    ids = torch.arange(20)[None]
    with torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "two")(ids).logits
        torch.testing.assert_close(two(ids), theirs, atol=1e-5, rtol=1e-5)
    names = [sorted(p.name for p in (tmp_path / run).iterdir()) for run in ("one", "two")]
    assert names[0] == names[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "changes"),
    [(4, {}), (2, {"family": "mixtral", "experts": 4}), (2, {"complete": True}), (4, {"family": "mistral"})],
)
def test_several_processes_train_as_one(count, changes, code, tmp_path):
    config = toy(code, steps=20, **changes)
    training_output(config, tmp_path / "one")
    nodes = {"LOCAL_WORLD_SIZE": "2"} if changes == {"family": "mistral"} else {}
    texts, codes = run_ranks(count, train, config, tmp_path / "two", variables=nodes, track=["tensorboard"])
    assert codes == [0] * count, texts
    assert len([*(tmp_path / "two" / "tensorboard").iterdir()]) == 1, "the first rank's"
    assert_same_steps(tmp_path / "one", tmp_path / "two")
    assert (tmp_path / "one" / "completion.npz").exists() == (tmp_path / "two" / "completion.npz").exists()


def finetune_config(code, tmp_path, dtype=torch.float32, **changes):
    """A finetuning of a model in this dtype, trained on the code before."""
    training_output(toy(code, tokenizer="bytes", context_length=64), tmp_path / "base")
    loaded = checkpoint.load(tmp_path / "base")
    checkpoint.save(loaded.model.to(dtype), tmp_path / "base", loaded.tokenizer, loaded.context_length)
    rows = [{"instruction": f"Say {i}.", "input": "", "output": f"It is {i} and {7 * i}."} for i in range(60)]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    fixed = {"steps": 8, "batch": 8, "micro_batch": 2, "dtype": "float32", "threads": 1} | changes
    return FinetuneConfig(model=str(tmp_path / "base"), data=str(tmp_path / "rows.json"), **fixed)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["full", "lora", "qlora", "dora"])
def test_two_processes_finetune_as_one(method, code, tmp_path):
    config = finetune_config(code, tmp_path, method=method)
    assert finetune(config, tmp_path / "one", display()[0]) == 0
    texts, codes = run_ranks(2, finetune, config, tmp_path / "two")
    assert codes == [0, 0], texts
    assert_same_steps(tmp_path / "one", tmp_path / "two")
    one, two = (checkpoint.load(tmp_path / name) for name in ("one", "two"))
    ids = torch.arange(20)[None]
    with torch.no_grad():
        assert (one.model(ids) - two.model(ids)).abs().max() <= 1e-3


@pytest.mark.slow
def test_a_model_in_bfloat16_is_saved_in_it_and_another_number_of_processes_goes_on(code, tmp_path):
    config = finetune_config(code, tmp_path, torch.bfloat16, method="full", steps=4, micro_batch=8)
    texts, codes = run_ranks(2, finetune, config, tmp_path / "run")
    assert codes == [0, 0], texts
    assert next(checkpoint.load(tmp_path / "run").model.parameters()).dtype == torch.bfloat16
    longer = replace(config, steps=6)
    assert finetune(longer, tmp_path / "run", display()[0], resume=True, override=["steps"]) == 0
    texts, codes = run_ranks(
        4, finetune, replace(config, steps=8), tmp_path / "run", resume=True, override=["steps"]
    )
    assert codes == [0] * 4, texts
    assert sorted(steps(tmp_path / "run")) == [*range(1, 9)]


def test_the_variable_of_another_program_makes_no_rank(monkeypatch):
    monkeypatch.setenv("RANK", "8")
    assert ranks.rank() == 0
    assert ranks.is_first()
    monkeypatch.setenv("WORLD_SIZE", "16")
    assert ranks.rank() == 8
    with ranks.alone():
        assert ranks.rank() == 0


@pytest.mark.parametrize("count", [2, 4])
def test_the_rows_of_all_ranks_are_those_of_one_process(count, monkeypatch):
    windows = Windows(np.arange(5_000), 16, 8, seed=3)
    batch, parts = windows.batch(7), []
    monkeypatch.setattr(ranks, "count", lambda: count)
    for number in range(count):
        monkeypatch.setattr(ranks, "rank", lambda number=number: number)
        parts.append(windows.batch(7))
    assert torch.equal(torch.cat(parts), batch)
    refuses(f"--batch is 7, which is not divisible by {count} ranks; use", ranks.rows, 7)


@pytest.mark.slow
def test_a_run_by_the_clock_ends_on_all_processes_after_the_same_step(code, tmp_path):
    config = toy(code, steps=None, minutes=0.1)
    texts, codes = run_ranks(2, train, config, tmp_path / "run")
    assert codes == [0, 0], texts
    last = max(steps(tmp_path / "run"))
    assert f"done after {last} steps" in texts[0]
    assert checkpoint.load_state(checkpoint.latest_state(tmp_path / "run"))["trainer"]["number"] == last


@pytest.mark.slow
def test_ranks_with_other_options_or_text_are_refused_by_one_of_them(code, tmp_path):
    config = toy(code)
    texts, codes = run_ranks(2, train, [config, toy(code, seed=1)], tmp_path / "a")
    assert codes == [2, 2]
    assert "".join(texts) == "error: rank 1: seed is 1, but 0 on rank 0"
    texts, codes = run_ranks(2, train, toy(code, batch=3), tmp_path / "b")
    assert codes == [2, 2]
    assert "".join(texts) == "error: --batch is 3, which is not divisible by 2 ranks; use 2 or 4"
    assert not (tmp_path / "a").exists()
    assert not (tmp_path / "b").exists()


@contextmanager
def torchrun(*words, stdout=subprocess.PIPE):
    """torchrun with two processes, none of which remains."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", *map(str, words)]
    options = {"stdout": stdout, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, **options) as process:
        try:
            yield process
        finally:
            for pid in (process.pid, *children(process)):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def children(process):
    found = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True)
    return [int(pid) for pid in found.stdout.split()]


def endless(code, folder, steps=100_000):
    """The arguments of a run of many steps."""
    shape = ["--size", "60k", "--vocab-size", "300", "--context-length", "32", "--batch", "4", "--no-complete"]
    machine = ["--dtype", "float32", "--threads", "1"]
    return ["-m", "dunes", "train", code, "--steps", steps, *shape, *machine, "--out", folder]


def reached(folder, number):
    return (folder / "metrics.jsonl").exists() and max(steps(folder), default=0) >= number


@pytest.mark.slow
def test_torchrun_goes_on_after_a_process_was_killed_and_stops_at_a_signal(code, tmp_path):
    folder = tmp_path / "run"
    with torchrun("--max-restarts", "1", *endless(code, folder)) as process:
        assert eventually(lambda: reached(folder, 10), 120)
        _, second = children(process)
        os.kill(second, signal.SIGUSR1)  # one process alone is asked for a save
        assert eventually(lambda: [*folder.glob("state/step-*")], 30)
        os.kill(second, signal.SIGKILL)
        (state,) = folder.glob("state/step-*")
        assert eventually(lambda: not reached(folder, int(state.name[5:]) + 1), 120)  # what came after is removed
        assert eventually(lambda: reached(folder, int(state.name[5:]) + 5), 120)
        process.terminate()
        out = process.communicate(timeout=60)[0]
    _, _, resumed = out.partition(f"resuming after step {int(state.name[5:])}")
    assert resumed.count("stopping after this step") == 1  # torchrun may have stopped the first processes, too
    assert checkpoint.load(folder).model
    assert sorted(steps(folder)) == [*range(1, len(steps(folder)) + 1)]


def kill_a_rank(process, chance, most_seconds):
    """Kill a rank at any time: while it starts, loads, trains or saves, for which another one is asked before."""
    assert eventually(lambda: len(children(process)) == 2, 60)
    pids = children(process)
    sleep(chance.uniform(0, most_seconds))
    for number in (signal.SIGUSR1, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.kill(chance.choice(pids), number)
        sleep(chance.uniform(0, 0.05))
    assert eventually(lambda: not {*children(process)} & {*pids}, 60)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_run_with_twenty_kills_is_that_without(code, tmp_path):
    one, two, chance = tmp_path / "one", tmp_path / "two", Random(0)
    start = monotonic()
    with torchrun(*endless(code, one, 3000)) as process:
        assert eventually(lambda: reached(one, 1), 120)
        start_seconds = monotonic() - start
        assert process.wait(400) == 0
    words = ["--max-restarts", "25", *endless(code, two, 3000)]
    with (tmp_path / "log").open("w") as log, torchrun(*words, stdout=log) as process:
        for _ in range(20):
            kill_a_rank(process, chance, 1.2 * start_seconds)
        assert process.wait(400) == 0
    assert_same_steps(one, two)
    models = [checkpoint.load(folder).model.state_dict() for folder in (one, two)]
    difference = max((models[0][name] - models[1][name]).abs().max() for name in models[0])
    assert difference <= 1e-5


@pytest.mark.slow
def test_a_process_that_does_not_answer_ends_the_run_with_the_stacks_of_the_others(code, tmp_path):
    folder = tmp_path / "run"
    with torchrun(*endless(code, folder), "--rank-timeout", "0.4") as process:
        assert eventually(lambda: reached(folder, 5), 120)
        os.kill(children(process)[1], signal.SIGSTOP)
        assert eventually(lambda: [*folder.glob("state/stacks-rank-*.txt")], 29)
        out = process.communicate(timeout=60)[0]  # torchrun waits for half a minute for the one that was stopped
    assert out.count("dunes: a rank did not answer for 24 s; the others' stacks are in") == 1
    assert "dunes/runs/run.py" in next(folder.glob("state/stacks-rank-*.txt")).read_text()


@pytest.mark.slow
def test_other_verbs_are_refused_in_one_line(tmp_path):
    with torchrun("-m", "dunes", "generate", tmp_path, "text") as process:
        out = process.communicate(timeout=120)[0]
    assert out.count("dunes: torchrun can start only train and finetune") == 1


def test_a_restarted_rank_meets_only_the_ranks_of_its_start():
    shared = dist.HashStore()
    for key in ("start/0", "start/1", "start/2", "joined/old/1", "joined/old/2"):
        shared.set(key, "old")
    shared.set("starts", "old old old")
    with ThreadPoolExecutor(3) as pool:
        first = [pool.submit(ranks._fresh_store, shared, number, 3) for number in (1, 2, 0)]
        _, _, store = [future.result(20) for future in first]
        store.set("failed", "1")
        again = [pool.submit(ranks._fresh_store, shared, number, 3) for number in (2, 0, 1)]
        third, zero, one = [future.result(20) for future in again]
    zero.set("address", "a")
    assert one.get("address") == third.get("address") == b"a"
    assert not one.check(["failed"])


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_model_built_without_memory_gets_the_weights_of_another(family):
    config = small_config(family)
    with torch.device("meta"):
        built = FAMILIES[family].build(config)
    filled = built.to_empty(device="cpu")
    for tensor in filled.state_dict().values():
        tensor.fill_(3)
    expected = initialise(FAMILIES[family].build(config), 5).state_dict()
    state = initialise(filled, 5, empty=True).state_dict()
    assert equal_states(state, expected)


STATE_SHAPES = [(5, 3), (8, 2), (3,), (1,), (13,), (2, 2, 2)]
"""Of a state's tensors: more and fewer rows than ranks, and some that do not divide."""


def values(shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def save_sharded(config, folder, display):
    """Save states of sharded tensors, if any, and load the newest: bit-equal, and only this rank's rows."""
    model = nn.Module()
    for i, shape in enumerate(STATE_SHAPES):
        model.register_parameter(str(i), nn.Parameter(values(shape)))
    ranks.shard(model, [])
    for step in config:
        checkpoint.save_state(folder, step, {"weights": model.state_dict(), "step": step})
    state = checkpoint.load_state(checkpoint.latest_state(folder))
    for (name, p), shape in zip(model.named_parameters(), STATE_SHAPES, strict=True):
        stored = ranks.shard_like(state["weights"][name], p)
        assert torch.equal(ranks.full_tensor(stored), values(shape))
        assert ranks.count() == 1 or stored.to_local().shape == p.to_local().shape
    return 0


@pytest.mark.slow
@pytest.mark.parametrize("variables", [{}, {"LOCAL_WORLD_SIZE": "2"}])
def test_any_number_of_processes_loads_what_any_number_saved(variables, tmp_path):
    folder = tmp_path / "run"
    assert run_ranks(4, save_sharded, [[1]] * 4, folder, variables=variables)[1] == [0] * 4
    names = sorted(path.name for path in (folder / "state" / "step-000001").glob("*.safetensors"))
    assert names == [f"tensors-0000{i}-of-00004.safetensors" for i in (1, 2, 3, 4)]
    assert save_sharded([], folder, None) == 0
    for step, count in enumerate((2, 1, 3, 4, 2), 2):
        assert run_ranks(count, save_sharded, [[]] * count, folder)[1] == [0] * count
        assert run_ranks(count, save_sharded, [[step]] * count, folder)[1] == [0] * count


def change_weights(config, folder, display):
    """Weights that change between two forward passes without a backward are used and stored."""
    models = [initialise(FAMILIES["arcee"].build(small_config("arcee")), seed) for seed in (1, 2)]
    ids = torch.ones(1, 4).long()
    ranks.shard(models[0], models[0].blocks)
    with torch.no_grad():
        models[0](ids)
        load_trainable_state(models[0], trainable_state(models[1]))
        assert torch.equal(models[0](ids), models[1](ids))
    stored = models[0].state_dict()  # frees what was gathered
    assert all(
        torch.equal(ranks.full_tensor(stored[name]), tensor) for name, tensor in models[1].state_dict().items()
    )
    return 0


@pytest.mark.slow
def test_weights_that_were_gathered_before_are_not_used_again(tmp_path):
    assert run_ranks(2, change_weights, [[]] * 2, tmp_path / "run")[1] == [0, 0]


def train_with_full_disk(config, folder, display, **options):
    """A run with a save after each step; the second rank's disk is full at its second save."""
    calls, full = itertools.count(1), OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "a file")
    second = lambda *_: ranks.rank() == 1 and next(calls) == 2
    safetensors_file.write_file = raising(full, safetensors_file.write_file, second)
    saving.SAVE_SECONDS = -1
    return train(config, folder, display, **options)


def train_with_failing_sync(config, folder, display, **options):
    """A run with a save after each step, in one of which the metrics cannot be synchronised to the disk."""
    calls, failure = itertools.count(1), OSError(errno.EIO, os.strerror(errno.EIO))
    saving.fsync_path = raising(failure, saving.fsync_path, lambda *_: next(calls) == 2)
    saving.SAVE_SECONDS = -1
    return train(config, folder, display, **options)


@pytest.mark.slow
def test_a_save_that_fails_before_it_begins_is_skipped_by_all(code, tmp_path):
    texts, codes = run_ranks(2, train_with_failing_sync, toy(code, steps=12), tmp_path / "run")
    assert codes == [0, 0], texts
    assert texts[0].count("saving the state failed: [Errno 5] rank 0: ") == 1
    newest = checkpoint.latest_state(tmp_path / "run")
    assert newest.name == "step-000012"
    part = newest / "tensors-00002-of-00002.safetensors"  # the first rank reads the other alone
    part.write_bytes(part.read_bytes()[:-1] + b"\x00")
    assert checkpoint.latest_state(tmp_path / "run").name != newest.name
    texts, codes = run_ranks(2, train, toy(code, steps=12), tmp_path / "run", resume=True)
    assert codes == [0, 0], texts
    assert "not the bytes that were written; going back" in texts[0]
    assert checkpoint.latest_state(tmp_path / "run").name == newest.name


def train_with_failing_check(config, folder, display, **options):
    if ranks.rank() == 1:
        run_module.Run.validate = raising(OSError(errno.EIO, os.strerror(errno.EIO)))
    return train(config, folder, display, **options)


@pytest.mark.slow
def test_an_error_in_work_of_all_processes_ends_the_run_and_is_reported(code, tmp_path):
    texts, codes = run_ranks(2, train_with_failing_check, toy(code, steps=12), tmp_path / "run")
    assert 0 not in codes
    assert "Errno 5" in texts[1]


@pytest.mark.slow
def test_a_full_disk_of_one_process_leaves_older_states_and_training_goes_on(code, tmp_path):
    texts, codes = run_ranks(2, train_with_full_disk, toy(code, steps=12), tmp_path / "run")
    assert codes == [0, 0], texts
    assert texts[0].count("saving the state failed") == 1
    assert "[Errno 28] rank 1: No space left on device" in texts[0]
    assert len(steps(tmp_path / "run")) == 12
    assert len([*(tmp_path / "run" / "state").glob("step-*")]) == 2
    texts, codes = run_ranks(2, train_with_full_disk, toy(code, steps=12), tmp_path / "strict", strict=True)
    assert codes == [3, 3], texts
    (state,) = (tmp_path / "strict" / "state").glob("step-*")
    assert checkpoint.load_state(state)


def balance_together(config, folder, display):
    """The balance loss of a noisy gate and its gradients are those of one process."""
    gate, recorded = NoisyGate(8, 4, 2), torch.randn(20, 3, 4, generator=torch.Generator().manual_seed(1)).abs()

    def loss_and_gradient(rows, processes):
        rows = rows.clone().requires_grad_()
        loss = gate.auxiliary_losses([rows], None)["balance"]
        (loss / processes).backward()
        return loss.detach(), rows.grad

    together = loss_and_gradient(recorded[ranks.rows(20)], 2)
    with ranks.alone():
        loss, gradient = loss_and_gradient(recorded, 1)
    torch.testing.assert_close(together, (loss, gradient[ranks.rows(20)]))
    return 0


@pytest.mark.slow
def test_a_noisy_gate_is_balanced_over_all_processes(tmp_path):
    assert run_ranks(2, balance_together, [[]] * 2, tmp_path / "run")[1] == [0, 0]


def test_only_the_torchrun_command_that_started_a_run_goes_on_with_it(tmp_path, monkeypatch):
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "plan.json").write_text("{}")
    with run_lock(tmp_path):
        assert not was_started_by_job(tmp_path)  # a single process never does
        monkeypatch.setenv("WORLD_SIZE", "2")
        assert was_started_by_job(tmp_path)
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a")
        assert not was_started_by_job(tmp_path)
    with run_lock(tmp_path):
        assert was_started_by_job(tmp_path)
        monkeypatch.setattr(os, "getppid", lambda: 1)  # of another machine
        assert was_started_by_job(tmp_path)
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
        assert not was_started_by_job(tmp_path)
    assert not was_started_by_job(tmp_path / "new")


def train_on_own_disk(config, folder, display):
    """A run whose folder the second rank does not see, since the machines do not share it."""
    missing = OSError(errno.ENOENT, os.strerror(errno.ENOENT))
    Path.touch = raising(missing, Path.touch, lambda path, *_: ".dunes-" in str(path) and ranks.rank() == 1)
    return train(config, folder, display)


def train_elsewhere(config, folder, display):
    return train(config, folder / str(ranks.rank()), display)


@pytest.mark.slow
def test_a_folder_that_the_ranks_do_not_share_is_refused_before_the_first_step(code, tmp_path):
    folder = tmp_path / "run"
    texts, codes = run_ranks(2, train_on_own_disk, toy(code), folder)
    assert codes == [2, 2], texts
    line = f"error: rank 1: {folder}: cannot write where rank 0 does (No such file or directory); --out must be"
    assert f"{line} on a disk that all machines share and write to" in "".join(texts)
    assert sorted(path.name for path in folder.rglob("*")) == ["lock", "state"]
    texts, codes = run_ranks(2, train_elsewhere, toy(code), tmp_path / "two")
    assert codes == [2, 2], texts
    assert "".join(texts).startswith(f"error: rank 1: --out is '{tmp_path}/two/1")


def group_by_node(config, folder, display):
    """Sharding within machines of as many ranks as the config says for each rank."""
    os.environ["LOCAL_WORLD_SIZE"] = str(config[ranks.rank()])
    ranks._make_groups(True, timedelta(seconds=60))
    return 0


@pytest.mark.slow
def test_machines_with_unequal_numbers_of_ranks_are_refused(tmp_path):
    texts, codes = run_ranks(4, group_by_node, [[2, 2, 1, 1]] * 4, tmp_path / "run")
    assert codes == [2] * 4, texts
    remedy = "the number of ranks per machine, which must be equal for --shard node, is 1, but 2 on rank 0"
    assert "".join(texts) == f"error: rank 2: {remedy}"
    assert run_ranks(4, group_by_node, [[2] * 4] * 4, tmp_path / "run")[1] == [0] * 4


def test_ranks_that_do_not_meet_are_refused_in_one_line(monkeypatch):
    port = str(free_port())
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, value)
    refuses(f"rank 0: the ranks did not meet at 127.0.0.1:{port} .Timed out", ranks._meet, 1.0)
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", int(port)))
        taken.listen()
        refuses("address already in use", ranks._meet, 1.0)
    shared = dist.HashStore()
    shared.set("start/1", "of an earlier start")
    with pytest.raises(RuntimeError, match="some rank did not start within"):
        ranks._fresh_store(shared, 0, 2, 0.3)


STALLED = """
import sys, threading
from pathlib import Path
from dunes.measure import ranks

class Unreachable:
    def add(self, name, value):
        threading.Event().wait()

ranks._watch(threading.Event(), 0.2, Path(sys.argv[1]), Unreachable())
"""


def test_a_rank_that_reaches_no_other_prints_its_line(tmp_path):
    process = run_python(STALLED, tmp_path)
    assert process.returncode == ranks.STALLED
    assert process.stderr.count("dunes: a rank did not answer for") == 1
    assert (tmp_path / "stacks-rank-0.txt").exists()


def test_the_first_failure_is_reported_and_after_the_end_of_the_store_what_is_unknown():
    ended = SimpleNamespace(add=raising(RuntimeError("Connection reset by peer")))
    assert [ranks._is_first_failure(ended, unknown) for unknown in (True, False)] == [True, False]
    store = dist.HashStore()
    assert [ranks._is_first_failure(store, True) for _ in range(2)] == [True, False]


def test_the_rooms_that_ask_ranks_are_listed_there():
    package = Path(ranks.__file__).parents[1]
    asking = {f.relative_to(package).parts[0] for f in package.rglob("*.py") if "import ranks" in f.read_text()}
    assert set(re.findall(r"`(\w+)`[,:]", ranks.__doc__)) == asking
