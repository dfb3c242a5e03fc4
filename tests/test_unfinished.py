"""A change from folder to folder is the one in memory bit for bit, and goes on after a kill at any block."""

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
import warnings
from pathlib import Path

import pytest
import torch

from dunes import checkpoint
from dunes.augment import CHANGES, apply_change
from dunes.augment.changes import make_change
from dunes.checkpoint.files import safetensors_writer
from dunes.checkpoint.unfinished import STATES, WEIGHTS, Unfinished
from dunes.runs import comparison
from dunes.runs.augment import augment_folder, undo_folder
from dunes.runs.score import calibration_ids
from killed_runs import PROCESSES
from test_calibrate import model_of
from test_finetune import tokenizer

__all__ = ["tokenizer"]  # a fixture
DEPTH = 3
FORMS = {
    "int8": ("quantize", {"kind": "int8"}),
    "nf4": ("quantize", {"kind": "nf4", "double": True}),
    "hqq": ("quantize", {"kind": "int3", "group": 16, "method": "hqq"}),
    "awq": (
        "quantize",
        {"kind": "int4", "group": 16, "method": "awq", "override": ["blocks.1.**=int8", "head=int8"]},
    ),
    "gptq": (
        "quantize",
        {"kind": "int4", "group": 16, "method": "gptq", "override": ["head=int8"]},
    ),
    "joint": ("quantize", {"kind": "int4", "group": 16, "method": "gptq", "pattern": "2:4"}),
    "mixed": ("quantize", {"kind": "int4", "group": 16, "method": "gptq", "override": ["blocks.0.**=nf4"]}),
    "magnitude": ("prune", {"method": "magnitude"}),
    "wanda": ("prune", {"method": "wanda", "pattern": "2:4"}),
    "sparsegpt": ("prune", {"method": "sparsegpt"}),
}
TEXTLESS = ("int8", "nf4", "hqq", "magnitude")


@pytest.fixture(scope="module")
def made(tokenizer, tmp_path_factory):
    """A folder with a model in bfloat16, a text, and what each form makes of it at once."""
    folder = tmp_path_factory.mktemp("made")
    model = model_of(depth=DEPTH, vocab=tokenizer.vocab, tied=False).bfloat16()
    checkpoint.save(model, folder / "model", tokenizer, 32)
    (folder / "text.txt").write_text("".join(f"What comes after {i}? Six or seven of ten.\n" for i in range(200)))
    for form in FORMS:
        make(folder, form, folder / form)
    return folder


def make(folder: Path, form: str, out: Path, **more):
    name, request = FORMS[form]
    text = None if form in TEXTLESS else [str(folder / "text.txt")]
    return augment_folder(folder / "model", out, name, calibration=text, **request | more)


def contents(folder: Path):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.mark.parametrize("form", FORMS)
def test_the_folder_has_the_tensors_of_the_change_in_memory(made, form):
    loaded = checkpoint.load(made / "model")
    name, request = FORMS[form]
    ids = None if form in TEXTLESS else calibration_ids(loaded, [str(made / "text.txt")], 131_072)
    change = apply_change(loaded.model, name, ids=ids, **request)
    written = checkpoint.load(made / form)
    ours, theirs = loaded.model.state_dict(), written.model.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    assert written.card["changes"][-1]["places"] == json.loads(json.dumps(change.record()))["places"]


def killed(folder, form, out, part, before):
    """Makes a form in a process that dies after it has written a part, before or after that is published."""
    torch.set_num_threads(1)
    (owner, call) = (safetensors_writer, "write_file") if before else (Unfinished, "_delete_states")
    original, count = getattr(owner, call), []

    def die(*arguments):
        original(*arguments)
        name = arguments[0].name if before else STATES
        count.extend([1] if name in (STATES, WEIGHTS) and (not before or name == WEIGHTS) else [])
        if len(count) == part:
            os.kill(os.getpid(), signal.SIGKILL)

    setattr(owner, call, die)
    make(folder, form, out)


@pytest.mark.parametrize(
    ("form", "part", "before"),
    [("gptq", 1, True), ("gptq", 2, False), ("gptq", DEPTH + 1, False), ("awq", DEPTH, False),
     ("sparsegpt", 2, True), ("sparsegpt", 1, False), ("nf4", 2, False)],
)  # fmt: skip
def test_a_killed_change_goes_on_and_gives_the_same_bytes(made, tmp_path, form, part, before):
    out = tmp_path / "out"
    process = PROCESSES.Process(target=killed, args=(made, form, out, part, before))
    process.start()
    process.join(120)
    assert process.exitcode == -signal.SIGKILL
    assert [path.name for path in out.iterdir()] == [".unfinished"]
    with pytest.raises(ValueError, match=f"{out}: an unfinished model; the dunes augment command that began it"):
        checkpoint.load(out)
    finished = part - before
    assert len([*out.glob(".unfinished/part-*")]) == finished
    lines = make(made, form, out)
    parts = len([*filter(re.compile(r"\d+ of \d parts were finished before").fullmatch, lines)])
    assert parts == (1 if finished else 0)
    assert contents(out) == contents(made / form)


class Stop(Exception):
    pass


def stopped(folder, form, out, monkeypatch, after=2, error=Stop, then=lambda: None):
    """Makes a form until so many parts are finished, and raises this error."""
    original = Unfinished.keep

    def keep(self, part, tensors):
        result = original(self, part, tensors)
        if self.kept == after:
            then()
            raise error
        return result

    with monkeypatch.context() as patch, warnings.catch_warnings():
        patch.setattr(Unfinished, "keep", keep)
        warnings.simplefilter("ignore")  # that finished parts are kept
        with pytest.raises(error):
            make(folder, form, out)


def test_progress_goes_by_the_blocks_that_are_left(made, tmp_path, monkeypatch):
    seen = []
    stopped(made, "sparsegpt", tmp_path / "out", monkeypatch, after=1)
    make(made, "sparsegpt", tmp_path / "out", show=lambda *state: seen.append(state))
    assert seen[-1] == ("written", 1.0)
    shares = sorted({share for what, share in seen if what == "prune"})
    assert shares == [pytest.approx(0.03 + 0.87 * i / (DEPTH - 1)) for i in range(DEPTH)]


def test_finished_parts_are_not_computed_again(made, tmp_path, monkeypatch):
    stopped(made, "gptq", tmp_path / "out", monkeypatch)
    kept = []
    original = Unfinished.keep
    monkeypatch.setattr(Unfinished, "keep", lambda *a: kept.append(a[1].name) or original(*a))
    lines = make(made, "gptq", tmp_path / "out")
    assert kept == ["blocks.2", "head"]
    assert "2 of 4 parts were finished before" in lines


@pytest.mark.parametrize("other", ["arguments", "calibration text", "source", "version", "damaged"])
def test_parts_of_anything_else_are_deleted(made, tmp_path, monkeypatch, other):
    folder, out = tmp_path / "made", tmp_path / "out"
    shutil.copytree(made, folder)
    stopped(folder, "gptq", out, monkeypatch)
    more = {}
    if other == "arguments":
        more = {"act_order": False}
    elif other == "calibration text":
        (folder / "text.txt").write_text((made / "text.txt").read_text().replace("Six", "Two"))
    elif other == "source":
        loaded = checkpoint.load(folder / "model")
        torch.nn.init.normal_(loaded.model.blocks[0].attn.q.weight)
        checkpoint.save(loaded.model, folder / "model", loaded.tokenizer, 32)
    elif other == "version":
        monkeypatch.setattr("dunes.checkpoint.unfinished.__version__", "0")
    else:
        damage(out / ".unfinished" / "part-00000" / WEIGHTS)
    lines = make(folder, "gptq", out, **more)
    (line,) = [line for line in lines if line.startswith("made anew: ")]
    assert other in line
    assert str(out / ".unfinished") in line
    if other in ("arguments", "calibration text", "source"):
        assert contents(out)["model.safetensors"] != contents(made / "gptq")["model.safetensors"]
    else:
        assert contents(out)["model.safetensors"] == contents(made / "gptq")["model.safetensors"]
    assert not (out / ".unfinished").exists()


def damage(file):
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_a_full_disk_or_an_interrupt_keeps_what_is_finished_and_says_where(made, tmp_path, monkeypatch, error):
    out, original = tmp_path / "out", safetensors_writer.write_file

    def write(path, weights):
        if "part-00000" in os.listdir(path.parent.parent):
            path.write_bytes(b"half")
            raise error
        original(path, weights)

    with monkeypatch.context() as patch, warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        patch.setattr(safetensors_writer, "write_file", write)
        with pytest.raises(type(error)) as raised:
            make(made, "sparsegpt", out)
    said = r"1 finished part of the change \(.* in .*/out/.unfinished: the same command goes on after them"
    assert [str(warning.message) for warning in shown if re.fullmatch(said, str(warning.message))]
    assert isinstance(error, KeyboardInterrupt) or str(out) in str(raised.value.filename)
    assert sorted(os.listdir(out / ".unfinished")) == ["change.json", "part-00000"]
    make(made, "sparsegpt", out)
    assert contents(out) == contents(made / "sparsegpt")


MEASURED = {
    "size": 1,
    "memory": 1,
    "prefill": 1.0,
    "decode": 1.0,
    "form": "the modules",
    "loss": None,
    "tokens": 0,
    "top": [],
}


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


@pytest.mark.parametrize(
    ("form", "first", "again"),
    [("sparsegpt", 2, 6), pytest.param("int8", 1, 10, marks=pytest.mark.slow)],
)
def test_a_disk_that_is_full_at_any_file_leaves_nothing_half_written(
    made, tmp_path, monkeypatch, form, first, again
):
    """Of blocks, the model, the card and the picture; the same command goes on afterwards."""
    monkeypatch.setattr(comparison, "_measured", lambda *arguments: dict(MEASURED))
    out = tmp_path / "full" / "out"
    for number in itertools.count(first, 3):
        with monkeypatch.context() as patch, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            fill_disk(patch, tmp_path / "full", number)
            try:
                make(made, form, out, validation=())
                break
            except OSError as error:
                assert str(out) in str(error.filename)  # noqa: PT017
        left = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
        assert all(name.startswith(PARTS) for name in left)
        assert out.exists() == any(name.endswith("part.json") for name in left)
        if number == again:
            make(made, form, out, validation=())
            assert contents(out)["model.safetensors"] == contents(made / form)["model.safetensors"]
        shutil.rmtree(out, ignore_errors=True)
    assert number > 15
    assert contents(out)["model.safetensors"] == contents(made / form)["model.safetensors"]


PARTS = (".unfinished/part-", ".unfinished/change.json")


def test_a_full_disk_for_temporary_files_costs_the_measurement_alone(made, tmp_path, monkeypatch):
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    monkeypatch.setattr(comparison, "_measured", lambda *arguments: dict(MEASURED))
    with monkeypatch.context() as patch:
        fill_disk(patch, tmp_path / "scratch", 1)
        lines = make(made, "int8", tmp_path / "out", validation=(str(made / "text.txt"),))
    assert [line for line in lines if line.startswith("not measured: ") and "No space left on device" in line]
    assert checkpoint.load(tmp_path / "out").architecture.changes


def test_a_change_that_fails_leaves_nothing(made, tmp_path, monkeypatch):
    stopped(made, "gptq", tmp_path / "out", monkeypatch, error=ValueError)
    assert not (tmp_path / "out").exists()


def test_a_source_that_is_written_to_meanwhile_is_refused_and_one_that_is_removed_is_not(
    made, tmp_path, monkeypatch
):
    folder, out = tmp_path / "made", tmp_path / "out"
    shutil.copytree(made, folder)
    original = Unfinished.keep

    def keep(self, part, tensors):
        if self.kept == 1:
            act()
        return original(self, part, tensors)

    act = lambda: os.utime(folder / "model" / "model.safetensors")
    monkeypatch.setattr(Unfinished, "keep", keep)
    with pytest.raises(ValueError, match=r"model.safetensors: changed while it was being read") as error:
        make(folder, "gptq", out)
    assert "\n" not in str(error.value)
    assert not out.exists()
    act = lambda: shutil.rmtree(folder / "model")
    make(folder, "gptq", out)
    assert contents(out)["model.safetensors"] == contents(made / "gptq")["model.safetensors"]


def test_two_processes_do_not_make_one_folder(made, tmp_path, monkeypatch):
    def second():
        with pytest.raises(ValueError, match="another process is writing there"):
            make(made, "int8", tmp_path / "out")

    stopped(made, "gptq", tmp_path / "out", monkeypatch, then=second)


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="Linux alone lists mappings")
@pytest.mark.parametrize("form", ["int8", "gptq", "awq", "sparsegpt"])
def test_no_block_stays_in_memory(made, tmp_path, monkeypatch, form):
    """Tensors of finished blocks are views of files, and pages of the source were never written to."""
    sizes = []
    original = checkpoint.save

    def save(model, *arguments, **options):
        sizes.append(_dirty(str(made / "model")))
        where = {key: _mapped_file(t) for key, t in model.state_dict().items() if key.startswith("blocks.")}
        sizes.append({path is not None and ".unfinished/part-" in path for path in where.values()})
        original(model, *arguments, **options)

    monkeypatch.setattr(checkpoint, "save", save)
    make(made, form, tmp_path / "out")
    assert sizes == [0, {True}]


def _mappings():
    found, path = [], None
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            start, end = (int(number, 16) for number in line.split()[0].split("-"))
            path = line.split(maxsplit=5)[5] if len(line.split(maxsplit=5)) == 6 else ""
            found.append([start, end, path, 0])
        elif line.startswith("Private_Dirty"):
            found[-1][3] = int(line.split()[1])
    return found


def _dirty(prefix):
    """kB of pages that are no longer those of the files below a folder."""
    return sum(dirty for _, _, path, dirty in _mappings() if path.startswith(prefix))


def _mapped_file(tensor):
    address = tensor.data_ptr()
    return next((path for start, end, path, _ in _mappings() if start <= address < end and "/" in path), None)


def test_changes_that_are_not_made_by_blocks_keep_nothing(made, tmp_path):
    augment_folder(made / "model", tmp_path / "expanded", "expand", blocks=1)
    assert undo_folder(tmp_path / "expanded", tmp_path / "again", "expand")
    assert not [*tmp_path.rglob(".unfinished")]


def test_a_part_is_packed_before_the_next_block_is_solved_for(made):
    """In memory, too: no more than one block is dense and changed."""
    loaded = checkpoint.load(made / "model")
    entry, seen = CHANGES["quantize"], []
    change = entry.decide(loaded.model, kind="int8")
    original = entry.solve

    def solve(model, *arguments):
        for part in original(model, *arguments):
            seen.append([type(block.attn.q).__name__ for block in model.blocks])
            yield part

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(entry, "solve", solve)
        make_change(loaded.model, change)
    assert seen == [["Int8"] * i + ["Linear"] * (DEPTH - i) for i in range(DEPTH)]


def test_a_refused_command_deletes_no_finished_parts(made, tmp_path, monkeypatch):
    def interrupted(self, part, tensors):
        keep(self, part, tensors)
        raise KeyboardInterrupt

    out, keep = tmp_path / "out", Unfinished.keep
    monkeypatch.setattr(Unfinished, "keep", interrupted)
    with pytest.warns(UserWarning, match="1 finished part"), pytest.raises(KeyboardInterrupt):
        make(made, "int8", out)
    monkeypatch.undo()
    with pytest.raises(ValueError, match="override"):
        make(made, "int8", out, override=["typo"])
    assert any("were finished before" in line for line in make(made, "int8", out))
