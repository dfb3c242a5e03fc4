"""A change from folder to folder is the one in memory; what stops it leaves nothing that looks finished."""

import builtins
import errno
import io
import itertools
import json
import os
import re
import shutil
import signal
import tempfile
from pathlib import Path

import pytest
import torch

from conftest import equal_states, refuses
from dunes import checkpoint
from dunes.augment import apply_change
from dunes.checkpoint.weights import safetensors_file
from dunes.evaluate import comparison
from dunes.evaluate.text_loss import calibration_ids
from dunes.runs import augment
from dunes.runs.augment import augment_folder, undo_folder
from killed_runs import PROCESSES
from small_models import random_model
from test_finetune import tokenizer

__all__ = ["tokenizer"]  # a fixture
DEPTH = 3
FORMS = {
    "int8": ("quantize", {"kind": "int8"}),
    "nf4": ("quantize", {"kind": "nf4", "double": True}),
    "gptq": ("quantize", {"kind": "int4", "group": 16, "method": "gptq", "override": ["head=int8"]}),
    "mixed": ("quantize", {"kind": "int4", "group": 16, "method": "gptq", "override": ["blocks.0.**=nf4"]}),
    "magnitude": ("prune", {"method": "magnitude"}),
    "wanda": ("prune", {"method": "wanda", "pattern": "2:4"}),
    "sparsegpt": ("prune", {"method": "sparsegpt"}),
}
TEXTLESS = ("int8", "nf4", "magnitude")


@pytest.fixture(scope="module")
def made(tokenizer, tmp_path_factory):
    """A folder with a model in bfloat16, a text, and what some forms make of it undisturbed (`whole`)."""
    folder = tmp_path_factory.mktemp("made")
    model = random_model(depth=DEPTH, vocab=tokenizer.vocab, tied=False).bfloat16()
    checkpoint.save(model, folder / "model", tokenizer, 32)
    (folder / "text.txt").write_text("".join(f"What comes after {i}? Six or seven of ten.\n" for i in range(200)))
    return folder


def make(folder: Path, form: str, out: Path, **more):
    name, request = FORMS[form]
    text = None if form in TEXTLESS else [str(folder / "text.txt")]
    return augment_folder(folder / "model", out, name, calibration=text, **request | more)


def whole(folder: Path, form: str) -> Path:
    """The folder that a form makes undisturbed."""
    if not (folder / form).exists():
        make(folder, form, folder / form)
    return folder / form


def contents(folder: Path):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_the_folder_has_the_tensors_of_the_change_in_memory(made, form):
    loaded = checkpoint.load(made / "model")
    name, request = FORMS[form]
    ids = None if form in TEXTLESS else calibration_ids(loaded, [str(made / "text.txt")], 131_072)
    change = apply_change(loaded.model, name, ids=ids, **request)
    written = checkpoint.load(whole(made, form))
    assert equal_states(loaded.model.state_dict(), written.model.state_dict())
    assert written.card["changes"][-1]["places"] == json.loads(json.dumps(change.record()))["places"]


def killed(folder, form, out, files):
    """Makes a form in a process that dies when so many files of tensors are written."""
    torch.set_num_threads(1)
    count, original = itertools.count(1), safetensors_file.write_file

    def die(*arguments):
        original(*arguments)
        if next(count) == files:
            os.kill(os.getpid(), signal.SIGKILL)

    augment.write_file = safetensors_file.write_file = die
    make(folder, form, out)


@pytest.mark.slow
@pytest.mark.parametrize("files", [1, DEPTH + 1, DEPTH + 2])
def test_a_killed_change_looks_unfinished_and_the_same_command_gives_the_same_bytes(made, tmp_path, files):
    """After a block, after the head, and after the file of the model, which is not yet in its place."""
    out = tmp_path / "out"
    process = PROCESSES.Process(target=killed, args=(made, "gptq", out, files))
    process.start()
    process.join(120)
    assert process.exitcode == -signal.SIGKILL
    assert len([*out.glob(".unfinished/*.safetensors")]) == min(files, DEPTH + 1)
    assert {path.name[0] for path in out.iterdir()} == {"."}
    said = f"{out}: an unfinished model; remove it, or repeat the dunes augment command that began it"
    for read in (checkpoint.load, checkpoint.describe):
        refuses(re.escape(said), read, out)
    make(made, "gptq", out)
    assert contents(out) == contents(whole(made, "gptq"))


def at_block(monkeypatch, number, act):
    """Calls a function before the block of this number is written, counted from 0."""
    original = augment.write_file

    def write(file, tensors):
        if file.name == f"{number}.safetensors":
            act()
        original(file, tensors)

    monkeypatch.setattr(augment, "write_file", write)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_change_that_fails_or_is_interrupted_leaves_nothing(made, tmp_path, monkeypatch, error):
    def act():
        assert [path.name for path in (tmp_path / "new" / "out").iterdir()] == [".unfinished"]
        raise error

    at_block(monkeypatch, 1, act)
    with pytest.raises(error):
        make(made, "gptq", tmp_path / "new" / "out")
    assert not [*tmp_path.iterdir()]


MEASURED = {"size": 1, "memory": 1, "form": "the modules", "loss": None, "tokens": 0, "top": []}


def fill_disk(patch, folder, number):
    """Of files that are written below this folder, number `number` and all later ones meet a full disk."""
    count, real = [0], open

    def limited(file, mode="r", *arguments, **options):
        writes = {*mode} & {*"wax+"} and isinstance(file, str | Path) and Path(file).is_relative_to(folder)
        count[0] += bool(writes)
        if writes and count[0] >= number:
            with real(file, "wb") as begun:
                begun.write(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(file, mode, *arguments, **options)

    patch.setattr(builtins, "open", limited)
    patch.setattr(io, "open", limited)


measured = lambda folders, scratch: dict(MEASURED) if len(folders) == 1 else {}
"""What is measured of one folder; no speeds of two."""


@pytest.mark.slow
@pytest.mark.parametrize(("form", "step"), [("int8", 1), ("sparsegpt", 3)])
def test_a_disk_that_is_full_at_any_file_leaves_nothing_half_written(made, tmp_path, monkeypatch, form, step):
    """Of blocks, the model, the card and the picture; the same command succeeds afterwards."""
    monkeypatch.setattr(comparison, "_run_measurement", measured)
    out = tmp_path / "full" / "out"
    for number in itertools.count(1, step):
        with monkeypatch.context() as patch:
            fill_disk(patch, tmp_path / "full", number)
            try:
                make(made, form, out, validation=())
                break
            except OSError as error:
                assert str(out) in str(error.filename)  # noqa: PT017
        assert not [*tmp_path.iterdir()]
    assert number > DEPTH + 8
    assert weights(out) == weights(whole(made, form))


def test_a_full_disk_for_temporary_files_costs_the_measurement_alone(made, tmp_path, monkeypatch):
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    monkeypatch.setattr(comparison, "_run_measurement", measured)
    with monkeypatch.context() as patch:
        fill_disk(patch, tmp_path / "scratch", 1)
        lines = make(made, "int8", tmp_path / "out", validation=(str(made / "text.txt"),))
    assert [line for line in lines if line.startswith("not measured: ") and "No space left on device" in line]
    assert checkpoint.load(tmp_path / "out").architecture.changes


def test_a_source_that_is_written_to_meanwhile_is_refused_and_one_that_is_removed_is_not(
    made, tmp_path, monkeypatch
):
    folder, out = tmp_path / "made", tmp_path / "out"
    shutil.copytree(made / "model", folder / "model")
    shutil.copy(made / "text.txt", folder)
    expected = weights(whole(made, "gptq"))
    with monkeypatch.context() as patch:
        at_block(patch, 1, lambda: os.utime(folder / "model" / "model.safetensors"))
        refuses(r"model.safetensors: changed while it was being read", make, folder, "gptq", out)
    assert not out.exists()
    at_block(monkeypatch, 1, lambda: shutil.rmtree(folder / "model"))
    make(folder, "gptq", out)
    assert weights(out) == expected


def test_two_processes_do_not_make_one_folder(made, tmp_path, monkeypatch):
    out = tmp_path / "out"

    def second():
        refuses("another process is writing there", make, made, "int8", out)

    whole(made, "gptq")
    at_block(monkeypatch, 1, second)
    make(made, "gptq", out)
    assert contents(out) == contents(whole(made, "gptq"))


def mapped_file(tensor):
    """The file whose pages a tensor's values are."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(number, 16) for number in line.split()[0].split("-"))
        if start <= tensor.data_ptr() < end:
            return line.partition("/")[2]
    return ""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="Linux alone lists mappings")
@pytest.mark.parametrize("form", ["int8", "gptq", "sparsegpt"])
def test_no_block_stays_in_memory(made, tmp_path, monkeypatch, form):
    """Tensors of finished blocks are views of files."""
    files, original = set(), checkpoint.save

    def save(model, *arguments, **options):
        blocks = [t for key, t in model.state_dict().items() if key.startswith("blocks.")]
        files.update(".unfinished/" in mapped_file(t) for t in blocks)
        original(model, *arguments, **options)

    monkeypatch.setattr(checkpoint, "save", save)
    make(made, form, tmp_path / "out")
    assert files == {True}
    assert not (tmp_path / "out" / ".unfinished").exists()


def test_changes_that_are_not_made_by_blocks_keep_nothing(made, tmp_path, monkeypatch):
    monkeypatch.setattr(augment, "write_file", lambda *arguments: pytest.fail("a block was written"))
    augment_folder(made / "model", tmp_path / "expanded", "expand", blocks=1)
    assert undo_folder(tmp_path / "expanded", tmp_path / "again", "expand")
