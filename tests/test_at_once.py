"""Several threads and processes that write in one place: the last one that finishes wins, whole."""

import multiprocessing
import os
import shutil
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from adapters import trained
from conftest import eventually, raising
from dunes import augment, checkpoint
from dunes.checkpoint import state
from dunes.checkpoint.card import read_consistently
from dunes.data import collect_corpus
from dunes.data.shards import token_shard
from dunes.files import atomic
from small_models import random_model
from test_faults import TOKENIZER, read_model, read_state, save_model, save_state, small

FORK = multiprocessing.get_context("fork")


def at_once(work, count=6):
    """The results of work(0), work(1), ... in threads of their own, which begin together."""
    barrier = threading.Barrier(count)

    def begin(i):
        barrier.wait()
        return work(i)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(begin, range(count)))


def hidden(folder: Path):
    return sorted(p.name for p in folder.rglob(".*"))


def test_the_save_that_finishes_last_wins_not_the_one_that_began_last(tmp_path):
    began, other_done = threading.Event(), threading.Event()

    def slow(staged):
        began.set()
        assert other_done.wait(30)
        return {}

    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(checkpoint.save, small(1), tmp_path, TOKENIZER, 16, {"value": 1}, slow)
        assert began.wait(30)
        save_model(tmp_path, 2)
        assert read_model(tmp_path) == 2
        other_done.set()
        first.result()
    assert read_model(tmp_path) == 1
    assert not hidden(tmp_path)


def _saving(folder, begin):
    torch.set_num_threads(1)
    for j in range(5):
        save_model(folder, begin + j)


def test_saves_of_several_processes_into_one_folder_all_succeed(tmp_path):
    save_model(tmp_path, 99)
    others = [FORK.Process(target=_saving, args=(tmp_path, 10 * i)) for i in (1, 2, 3)]
    for process in others:
        process.start()
    while any(process.is_alive() for process in others):
        read_model(tmp_path)
    assert [process.exitcode for process in others] == [0, 0, 0]
    assert read_model(tmp_path) % 10 == 4
    assert not hidden(tmp_path)


def test_adapters_and_models_saved_into_one_folder_are_one_or_the_other(tmp_path):
    base = tmp_path / "base"
    save_model(base, 1)
    model = trained(augmented(small(1)))

    def save(i):
        if i % 2:
            save_model(tmp_path / "out", i)
        else:
            checkpoint.save_adapter(model, tmp_path / "out", base=base, tokenizer=TOKENIZER, context_length=16)

    for last in (0, 1):
        at_once(save)
        save(last)
        assert ("adapter" in checkpoint.load(tmp_path / "out").card) == (last == 0)
        assert (tmp_path / "out" / "config.json").exists() == (last == 1)
    assert not hidden(tmp_path)


def test_an_adapter_is_saved_over_a_model_whose_save_was_interrupted(tmp_path, monkeypatch):
    save_model(base := tmp_path / "base", 1)
    model = trained(augmented(small(1)))
    interrupted = raising(KeyboardInterrupt(), os.replace, lambda _, target: Path(target).name == "dunes.json")
    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save_model(tmp_path / "out", 2)
    monkeypatch.undo()
    assert (tmp_path / "out" / "config.json").exists()
    assert not (tmp_path / "out" / "dunes.json").exists()
    checkpoint.save_adapter(model, tmp_path / "out", base=base, tokenizer=TOKENIZER, context_length=16)
    assert "adapter" in checkpoint.load(tmp_path / "out").card


def test_an_interrupted_save_of_an_adapter_finds_its_moved_base(tmp_path):
    from dunes.checkpoint.open import base_folder

    save_model(base := tmp_path / "a" / "base", 1)
    out = tmp_path / "a" / "out"
    checkpoint.save_adapter(trained(augmented(small(1))), out, base=base, tokenizer=TOKENIZER, context_length=16)
    (out / ".ready").mkdir()
    for file in [*out.iterdir()]:
        if file.is_file():
            file.rename(out / ".ready" / file.name)
    (tmp_path / "a").rename(tmp_path / "b")
    moved = tmp_path / "b" / "out"
    assert base_folder(moved) == (tmp_path / "b" / "base")
    assert "adapter" in checkpoint.load(moved).card


def augmented(model):
    augment.attach(model, where="**.attn.q", rank=2)
    return model


def _staging(path, fill):
    with atomic.staging_folder(path) as made:
        fill(made)
        time.sleep(60)


def test_what_a_dead_process_left_goes_and_what_a_living_one_writes_stays(tmp_path):
    arguments = (tmp_path / "model", lambda made: (made / "half").touch())
    dead, living = (FORK.Process(target=_staging, args=arguments) for _ in range(2))
    try:
        for i, process in enumerate((dead, living), 1):
            process.start()
            assert eventually(lambda: len(list(tmp_path.glob(".*/half"))) >= i)  # noqa: B023
        os.kill(dead.pid, signal.SIGKILL)
        dead.join()
        assert len(hidden(tmp_path)) == 2
        theirs = (tmp_path / ".dunes-theirs.new").symlink_to(tmp_path)
        atomic.write_file(tmp_path / "x", b"x")
        assert len(list(tmp_path.glob(".*/half"))) == 1
        assert (tmp_path / ".dunes-theirs.new").is_symlink(), theirs
    finally:
        living.kill()
        living.join()
    with (tmp_path / "x").open("rb") as reader:
        atomic.write_file(tmp_path / "x", b"longer")
        assert reader.read() == b"x", "a reader has the old file, not half of the new one"
    assert hidden(tmp_path) == [".dunes-theirs.new"]


@pytest.mark.parametrize("steps", [[7] * 6, range(1, 7)], ids=["one step", "each its own"])
def test_states_stored_by_many_threads_are_whole(tmp_path, steps, monkeypatch):
    remove = shutil.rmtree
    # What was gone may be there again.
    monkeypatch.setattr(state.shutil, "rmtree", lambda *a, **k: (remove(*a, **k), time.sleep(0.01)))
    at_once(lambda i: [save_state(tmp_path, steps[i]) for _ in range(4)])
    assert read_state(tmp_path) == int(checkpoint.latest_state(tmp_path, pytest.fail).name[5:])
    assert not hidden(tmp_path)


def test_shards_made_by_many_threads_are_one(tmp_path, code):
    documents = collect_corpus([str(code)]).train
    (tmp_path / "cache").mkdir()
    with atomic.staging_folder(tmp_path / "cache" / "x") as left:
        shards = at_once(lambda i: token_shard(documents, TOKENIZER, tmp_path / "cache"))
        assert left.is_dir(), "somebody is at it"
        assert len({bytes(shard.tokens) for shard in shards}) == 1
    assert [p.name for p in (tmp_path / "cache").iterdir()] == [shards[0].folder.name]


def test_an_older_save_leaves_nothing_that_would_be_read_with_the_new_one(tmp_path):
    marked = TOKENIZER.with_stop(1)
    marked.extra_files |= {"chat_template.jinja": b"{{ messages }}", "added_tokens.json": b"{}"}
    (tmp_path / "mine.txt").write_text("kept")
    checkpoint.save(small(1), tmp_path, marked, 16)
    assert checkpoint.load(tmp_path).tokenizer.extra_files.keys() > {"chat_template.jinja"}
    save_model(tmp_path, 2)
    assert "chat_template.jinja" not in checkpoint.load(tmp_path).tokenizer.extra_files
    assert not (tmp_path / "added_tokens.json").exists()
    assert (tmp_path / "mine.txt").exists()


def test_what_was_read_while_it_was_saved_is_read_again(tmp_path):
    """Else, weights of one save could have the tokenizer of another."""
    models, seen = [random_model("llama", seed=seed, context=16) for seed in (0, 1)], []
    checkpoint.save(models[0], tmp_path / "model", None, 16)

    def read(folder):
        seen.append(load_file(folder / "model.safetensors"))
        if len(seen) == 1:
            checkpoint.save(models[1], folder, None, 16)
        return len(seen)

    assert read_consistently(tmp_path / "model", read) == 2
