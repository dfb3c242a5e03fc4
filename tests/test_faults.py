"""What goes wrong on real machines: flipped bits, cut files, full disks, kills at any moment."""

import errno
import itertools
import os
import random
import re
import resource
import shutil
import tempfile
import time
from pathlib import Path

import pytest
import torch

import killed_runs
from conftest import display, raising, refuses, toy, training_output
from dunes import checkpoint
from dunes.checkpoint.weights import safetensors_file
from dunes.files import atomic
from dunes.runs import run as run_module
from dunes.runs import saving
from dunes.runs import train as train_module
from dunes.runs.saving import read_metrics
from dunes.runs.task import Run
from dunes.runs.train import train
from dunes.runs.train_config import TrainConfig
from dunes.text import Tokenizer
from small_models import random_model
from test_runs import assert_same_training

STATE = {"weights": torch.arange(40.0), "numbers": {0: 1.5, "name": "x"}}


@pytest.fixture
def stored(tmp_path):
    """A run with an old state and a new one."""
    checkpoint.save_state(tmp_path, 1, STATE)
    return checkpoint.save_state(tmp_path, 2, STATE)


def test_a_thousand_flipped_bits_are_all_noticed_and_the_older_state_is_used(stored):
    run, chance = stored.parent.parent, random.Random(0)
    files = sorted(stored.iterdir())
    for _ in range(1000):
        path = chance.choices(files, [f.stat().st_size for f in files])[0]
        whole = path.read_bytes()
        data = bytearray(whole)
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        path.write_bytes(data)
        told = []
        found = checkpoint.latest_state(run, told.append)
        # Of all flips, only one of a space of the manifest into another white space says the same.
        if path.name != "manifest.json" or b"".join(data.split()) != b"".join(whole.split()):
            assert found.name == "step-000001", path
            assert len(told) == 1
            assert path.name == "manifest.json" or f"{path.name}: not the bytes that were written" in told[0]
        path.write_bytes(whole)
    assert checkpoint.latest_state(run) == stored


@pytest.mark.parametrize("name", ["tensors.safetensors", "state.json", "manifest.json"])
def test_a_file_cut_anywhere_or_replaced_by_something_else_is_noticed_without_a_hang(stored, name):
    run, path = stored.parent.parent, stored / name
    whole, chance = path.read_bytes(), random.Random(1)
    for length in {0, 1, len(whole) - 1, *(chance.randrange(len(whole)) for _ in range(60))}:
        path.write_bytes(whole[:length])
        assert checkpoint.latest_state(run).name == "step-000001", length
    for make in (os.mkfifo, os.mkdir, lambda p: os.symlink(p, p), lambda p: None):
        path.rmdir() if path.is_dir() else path.unlink(missing_ok=True)
        make(path)
        told = []
        assert checkpoint.latest_state(run, told.append).name == "step-000001"
        assert len(told) == 1
        assert name in told[0]
        assert "\n" not in told[0]


TOKENIZER = Tokenizer.train("bytes", [])


def small(seed: int):
    return random_model(vocab=TOKENIZER.vocab, context=16, seed=seed)


def save_model(folder: Path, value: int) -> None:
    checkpoint.save(small(value), folder, TOKENIZER, 16, {"value": value})


def read_model(folder: Path) -> int:
    loaded = checkpoint.load(folder)
    twin = small(loaded.card["value"]).state_dict()
    assert all(torch.equal(v, twin[k]) for k, v in loaded.model.state_dict().items()), "a torn model"
    return int(loaded.card["value"])


def save_state(run: Path, value: int) -> None:
    state = {"value": value, "weights": torch.full((1000,), float(value)), "best": torch.ones(10)}
    checkpoint.save_state(run, value, checkpoint.snapshot(state, ["best"]))


def read_state(run: Path) -> int:
    found = checkpoint.load_state(checkpoint.latest_state(run))
    assert torch.equal(found["weights"], torch.full((1000,), float(found["value"]))), "a torn state"
    return int(found["value"])


KINDS = {"state": (save_state, read_state), "model": (save_model, read_model)}
ERRORS = (errno.EIO, errno.EROFS, errno.EDQUOT, errno.ENOSPC)
CALLS = ("mkdir", "open", "fsync", "link", "rename", "replace", "unlink", "rmdir")


def failing(monkeypatch, number, error):
    """Of all calls that change or force something on the disk, number `number` and all later ones fail."""
    count = [0]

    def counted(real):
        def call(*args, **kwargs):
            count[0] += 1
            if count[0] >= number:
                raise error
            return real(*args, **kwargs)

        return call

    for name in CALLS:
        monkeypatch.setattr(os, name, counted(getattr(os, name)))
    monkeypatch.setattr(safetensors_file, "write_file", counted(safetensors_file.write_file))
    monkeypatch.setattr(Path, "write_text", counted(Path.write_text))


@pytest.mark.slow
@pytest.mark.parametrize("error", [KeyboardInterrupt(), *(OSError(n, os.strerror(n)) for n in ERRORS)], ids=repr)
@pytest.mark.parametrize("kind", KINDS)
def test_a_crash_or_a_failure_at_any_call_of_a_save_leaves_the_old_or_the_new(kind, error, tmp_path, monkeypatch):
    save, read = KINDS[kind]
    save(tmp_path, 1)
    seen, named = set(), []
    for number in range(1, 200):
        with monkeypatch.context() as patch:
            failing(patch, number, error)
            try:
                save(tmp_path, 2)
                break
            except KeyboardInterrupt:
                pass
            except OSError as raised:
                named.append(str(tmp_path) in str(raised))
        seen.add(found := read(tmp_path))
        if found == 2:
            shutil.rmtree(tmp_path)
            save(tmp_path, 1)
        for left in sorted(tmp_path.rglob(".dunes-*.new"))[1:]:  # removing it takes calls, too, more each time
            shutil.rmtree(left)
    assert number > 15, "the calls were seen"
    assert all(named), "an error names the place"
    assert seen == {1, 2}
    assert read(tmp_path) == 2
    assert not list(tmp_path.rglob(".*")), "what was left over is gone"


class Disk:
    """What a disk may hold after the power failed: all that was forced to it, and any part of the rest.

    It watches a folder, looking before and after every call that names or forces what is there by now.
    Each un-forced write and each un-forced name survives or does not, a write also in part.
    """

    def __init__(self, root: Path, monkeypatch) -> None:
        self.root, self.log, self.held = root, [], {}
        self.names, self.files = self.start = self.look()
        for name in ("fsync", "link", "rename", "replace", "unlink", "rmdir"):
            monkeypatch.setattr(os, name, self.watched(name, getattr(os, name)))

    def number(self, path: Path) -> int:
        """The inode, kept open so that its number is not given to another file."""
        inode = path.stat().st_ino
        if inode not in self.held:
            self.held[inode] = os.open(path, os.O_RDONLY)
        return inode

    def look(self):
        """(folder's inode, name) -> inode, and inode -> bytes of each file."""
        names, files = {}, {}
        for path in self.root.rglob("*"):
            names[path.parent.stat().st_ino, path.name] = inode = self.number(path)
            if path.is_file():
                files[inode] = path.read_bytes()
        return names, files

    def watched(self, name, real):
        def call(*args, **kwargs):
            self.notice()
            if name == "fsync":
                self.log.append(("forced", os.fstat(args[0]).st_ino))
            result = real(*args, **kwargs)
            self.notice()
            return result

        return call

    def notice(self) -> None:
        names, files = self.look()
        self.log += [("write", i, content) for i, content in files.items() if self.files.get(i) != content]
        gone = {inode: place for place, inode in self.names.items() if names.get(place) != inode}
        for place, inode in names.items():
            if self.names.get(place) != inode:
                self.log.append(("name", place, inode, gone.pop(inode, None)))
        self.log += [("name", place, None, None) for place in gone.values() if place not in names]
        self.names, self.files = names, files

    def fail(self, chance: random.Random, folder: Path) -> None:
        """Write into a folder what may be found if the power failed at some moment."""
        names, files = dict(self.start[0]), dict(self.start[1])
        log = self.log[: chance.randrange(len(self.log) + 1)]
        for i, (what, subject, *rest) in enumerate(log):
            forced = {e[1] for e in log[i:] if e[0] == "forced"}
            if what == "write":
                whole = subject in forced or chance.random() < 0.5
                files[subject] = rest[0] if whole else rest[0][: chance.randrange(len(rest[0]) + 1)]
            elif what == "name":
                inode, source = rest
                if subject[0] in forced or (source and source[0] in forced) or chance.random() < 0.5:
                    names[subject] = inode
                    names[source] = None
        self.write(names, files, self.root.stat().st_ino, folder)

    def write(self, names, files, number: int, folder: Path) -> None:
        folder.mkdir()
        for place, inode in names.items():
            if place is None or place[0] != number or inode is None:
                continue
            if inode in files:
                (folder / place[1]).write_bytes(files[inode])
            else:
                self.write(names, files, inode, folder / place[1])


@pytest.mark.slow
@pytest.mark.parametrize("forced", [True, False], ids=["as it is", "without fsync"])
@pytest.mark.parametrize("kind", KINDS)
def test_power_losses_leave_the_old_or_the_new(kind, forced, tmp_path, monkeypatch):
    save, read = KINDS[kind]
    run, chance, found = tmp_path / "run", random.Random(0), []
    run.mkdir()
    save(run, 1)
    with monkeypatch.context() as patch:
        disk = Disk(run, patch)
        if not forced:
            patch.setattr(atomic, "fsync_path", lambda path: None)
        for value in (2, 3, 4):
            save(run, value)
    disk.notice()
    for handle in disk.held.values():
        os.close(handle)
    for i in range(500):
        disk.fail(chance, tmp_path / f"{i}")
        try:
            found.append(read(tmp_path / f"{i}"))
        except Exception:
            found.append(None)
        shutil.rmtree(tmp_path / f"{i}")
    assert (None not in found) == forced, "without forcing anything to the disk, some states are lost"
    assert not forced or set(found) == {1, 2, 3, 4}


@pytest.mark.parametrize("limit", [0, 900])
@pytest.mark.parametrize("kind", KINDS)
def test_a_disk_that_is_full_after_some_bytes_leaves_the_old_and_is_an_os_error(kind, limit, tmp_path):
    save, read = KINDS[kind]
    save(tmp_path, 1)
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        with pytest.raises(OSError, match=str(tmp_path)):
            save(tmp_path, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before
    assert read(tmp_path) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_what_does_not_fit_is_refused_before_a_byte_is_written(kind, tmp_path, monkeypatch):
    save, read = KINDS[kind]
    save(tmp_path, 1)
    free = shutil.disk_usage(tmp_path)._replace(free=500)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: free)
    monkeypatch.setattr(safetensors_file, "write_file", lambda path, tensors: pytest.fail("written"))
    with pytest.raises(OSError, match=r"B are needed and \S+ k?B are free.*" + str(tmp_path)):
        save(tmp_path, 2)
    assert read(tmp_path) == 1


def full(times):
    """A disk that is full for the first so many saves."""
    error, saves = OSError(errno.ENOSPC, "12.0 MB are needed and 3.0 MB are free"), itertools.count(1)
    return raising(error, checkpoint.save_state, lambda *_: next(saves) <= times)


def test_a_save_that_fails_does_not_end_a_run_unless_it_is_strict(code, tmp_path, monkeypatch):
    monkeypatch.setattr(saving, "SAVE_SECONDS", 0.0)
    monkeypatch.setattr(checkpoint, "save_state", full(2))
    printed = training_output(toy(code), tmp_path / "a")
    assert "saving the state failed" in printed
    assert "12.0 MB are needed and 3.0 MB are free" in printed
    assert checkpoint.latest_state(tmp_path / "a").name == "step-000012"
    monkeypatch.setattr(checkpoint, "save_state", full(99))
    assert train(toy(code), tmp_path / "b", display()[0]) == 3, "the last state could not be saved"
    assert checkpoint.load(tmp_path / "b").card["trained"]["steps"] == 12, "the model could"
    printed = training_output(toy(code), tmp_path / "c", status=3, strict=True)
    assert re.search(r"stopped: .*12\.0 MB are needed", printed)
    assert len(read_metrics(tmp_path / "c" / "metrics.jsonl")) < 12


def test_tokens_that_are_cut_while_training_stop_it_and_it_goes_on_bit_for_bit(code, tmp_path, monkeypatch):
    config, real = toy(code, steps=30), run_module._log_step
    train(config, tmp_path / "straight", display()[0])

    def cutting(folder, step, bits):
        real(folder, step, bits)
        if step.number == 7:
            for shard in (tmp_path / "home").rglob("tokens.bin"):
                shard.chmod(0o600)
                os.truncate(shard, 100)

    monkeypatch.setenv("DUNES_HOME", str(tmp_path / "home"))
    with monkeypatch.context() as patch:
        patch.setattr(run_module, "_log_step", cutting)
        refuses(r"tokens\.bin: the tokens changed", train, config, tmp_path / "cut", display()[0])
    assert checkpoint.latest_state(tmp_path / "cut").name == "step-000007"
    assert train(TrainConfig(sources=()), tmp_path / "cut", display()[0], resume=True) == 0
    assert_same_training(tmp_path / "straight", tmp_path / "cut")


def test_too_little_memory_beside_the_steps_does_not_end_training(code, tmp_path, monkeypatch):
    greedy = lambda *arguments, **named: torch.empty(1 << 60)
    monkeypatch.setattr(train_module, "sample_text", greedy)
    monkeypatch.setattr(Run, "validate", greedy)
    printed = training_output(toy(code), tmp_path / "run")
    assert printed.count("warning: validation failed: ") == 1
    assert printed.count("warning: sampling failed: ") == 1


def test_a_damaged_state_is_passed_over_unless_strict(code, tmp_path):
    train(toy(code), tmp_path / "run", display()[0])
    (checkpoint.latest_state(tmp_path / "run") / "state.json").write_text("{}")
    refuses(r"state\.json: ", train, toy(code), tmp_path / "run", display()[0], resume=True, strict=True)
    assert "going back to an older state" in training_output(toy(code), tmp_path / "run", resume=True)


@pytest.mark.parametrize("where", ["run/state", "run", "."])
def test_a_folder_that_may_not_be_written_is_named(where, code, monkeypatch):
    base = Path(tempfile.mkdtemp())  # which another user can enter
    for folder in ("", "run", "home", *["run/state"] * (where != "run")):
        (base / folder).mkdir(exist_ok=True)
        (base / folder).chmod(0o777)  # whatever the umask is
    shutil.copytree(code, base / "code")
    (base / where).chmod(0o555)
    monkeypatch.setenv("DUNES_HOME", str(base / "home"))
    user = os.geteuid()
    os.seteuid(user or 65534)  # root may write everywhere
    try:
        with pytest.raises((OSError, ValueError), match=str(base)):
            train(toy(base / "code"), base / "new" if where == "." else base / "run", display()[0])
    finally:
        os.seteuid(user)
        (base / where).chmod(0o777)
    assert not list(base.rglob("step-*"))
    shutil.rmtree(base)


def training(code: Path, folder: Path):
    return killed_runs.start(toy(code, steps=60), folder, 0.1)


def killed(code: Path, folder: Path, kills: int, seed: int) -> int:
    """Train to the end through this many kills at random moments, some aimed at a save; how many were left."""
    chance = random.Random(seed)
    while True:
        process = training(code, folder)
        begun = time.monotonic()
        aimed, wait = chance.random() < 0.4, chance.uniform(0.0, 0.3)
        while kills and process.is_alive():
            running = len(read_metrics(folder / "metrics.jsonl")) > 0
            saving = bool(list((folder / "state").glob(".dunes-*")))
            begun = begun if running else time.monotonic()
            if running and (saving if aimed else time.monotonic() - begun > wait):
                process.kill()
                kills -= 1
                break
            time.sleep(0.001)
        process.join(120)
        if process.exitcode == 0:
            return kills


def test_kills_end_bit_for_bit_as_none(code, tmp_path):
    straight = training(code, tmp_path / "straight")
    straight.join(120)
    assert straight.exitcode == 0
    assert killed(code, tmp_path / "killed", 2, seed=0) < 2
    assert_same_training(tmp_path / "straight", tmp_path / "killed")
