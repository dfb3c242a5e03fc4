"""Folders on disk: whole or refused, and what a state gives back."""

import errno
import gc
import itertools
import json
import math
import os
import shutil
import weakref
from contextlib import nullcontext

import pytest
import torch
from safetensors.torch import load_file

from conftest import change_json, equal_states, raising, refuses
from dunes import augment, checkpoint
from dunes.checkpoint import inspect, state
from dunes.checkpoint.card import finish_save, verified_card
from dunes.checkpoint.formats.adapter import is_reference
from dunes.checkpoint.open import open_model
from dunes.checkpoint.weights import safetensors_file
from dunes.checkpoint.weights.lazy_tensor import in_memory
from dunes.models import FAMILIES
from dunes.models.initialise import initialise
from dunes.parts import MLP, RMSNorm
from dunes.text import Tokenizer
from small_models import random_model

TOKENIZER = Tokenizer.train("bytes", [])


def build(family="qwen3"):
    return random_model(family, vocab=TOKENIZER.vocab, context=16)


@pytest.fixture
def folder(tmp_path):
    checkpoint.save(build(), tmp_path / "model", TOKENIZER, 16, {"trained": {"steps": 3}})
    return tmp_path / "model"


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_saved_is_loaded_bit_for_bit(family, tmp_path):
    model = build(family)
    checkpoint.save(model, tmp_path, TOKENIZER, 16, {"note": "x"})
    loaded = checkpoint.load(tmp_path)
    assert equal_states(loaded.model.state_dict(), model.state_dict())
    assert loaded.card["note"] == "x"
    assert not is_reference(loaded.card)
    assert loaded.context_length == 16
    assert not loaded.model.training
    assert loaded.tokenizer.json() == TOKENIZER.json()


@pytest.mark.parametrize(("context", "vocab", "words"), [(0, TOKENIZER.vocab, "length is 0"), (16, 9, "9 rows")])
def test_what_could_not_be_loaded_is_not_saved(context, vocab, words, folder):
    refuses(words, checkpoint.save, random_model(vocab=vocab, context=16), folder, TOKENIZER, context)
    assert checkpoint.load(folder).card["trained"] == {"steps": 3}


def stage(folder, weights, shard):
    """A save that was cut short after all was written and before anything was moved."""
    from dunes.checkpoint import card as folders

    ready = folder / ".ready"
    ready.mkdir()
    for file in folder.iterdir():
        if file.is_file() and not file.name.startswith("model") and file.name != "dunes.json":
            shutil.copy(file, ready)
    safetensors_file.write_tensors(ready, in_memory(weights), shard=shard)
    folders.write_card(ready, {"note": str(shard)})
    return ready


def test_shards_of_an_older_save_do_not_stay(folder):
    weights = load_file(folder / "model.safetensors")
    counts = []
    for shard in (20_000, 40_000):
        stage(folder, weights, shard)
        assert checkpoint.load(folder).card["note"] == str(shard)
        finish_save(folder)
        said = set(json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"].values())
        assert said == {p.name for p in folder.glob("model*.safetensors")}
        counts.append(len(said))
    assert counts[0] > counts[1] > 1
    stage(folder, weights, 1 << 30)
    finish_save(folder)
    assert [p.name for p in folder.glob("model*")] == ["model.safetensors"], "nor beside a single file"


def test_a_save_that_was_cut_short_anywhere_is_finished_by_the_next_load_or_save(folder, tmp_path, monkeypatch):
    stage(folder, load_file(folder / "model.safetensors"), 20_000)
    expected = len(list((folder / ".ready").iterdir()))
    for placed in range(expected + 1):
        for finish in (finish_save, checkpoint.load):
            one = shutil.copytree(folder, tmp_path / f"one{placed}{finish.__name__}")
            ends = iter([*[False] * placed, True])
            cut = raising(KeyboardInterrupt(), os.replace, lambda *_, ends=ends: next(ends))
            with monkeypatch.context() as patch:
                patch.setattr(os, "replace", cut)
                with pytest.raises(KeyboardInterrupt) if placed < expected else nullcontext():
                    finish_save(one)
            finish(one)
            assert not list(one.glob(".*"))
            assert checkpoint.load(one).card["note"] == "20000"


def test_other_programs_miss_no_file_while_a_save_is_put_into_place(folder, monkeypatch):
    stage(folder, load_file(folder / "model.safetensors"), safetensors_file.SHARD)
    names, seen = [p.name for p in folder.iterdir() if p.is_file()], []
    for call in ("replace", "unlink", "rename"):
        real = getattr(os, call)

        def looking(*paths, real=real, **more):
            seen.append(all((folder / name).is_file() for name in names))
            return real(*paths, **more)

        monkeypatch.setattr(os, call, looking)
    finish_save(folder)
    assert all(seen)
    assert len(seen) > len(names)


def test_reading_moves_nothing_but_what_we_saved(folder):
    (folder / ".ready").mkdir()
    (folder / ".ready" / "config.json").write_text("theirs")
    checkpoint.load(folder)
    assert (folder / ".ready" / "config.json").read_text() == "theirs"


def test_a_save_in_a_folder_that_cannot_be_written_is_refused_not_read_old(folder, monkeypatch):
    stage(folder, load_file(folder / "model.safetensors"), safetensors_file.SHARD)
    with monkeypatch.context() as patch:
        for call in ("replace", "unlink", "rename", "mkdir", "rmdir"):
            patch.setattr(os, call, raising(OSError(errno.EROFS, os.strerror(errno.EROFS))))
        with pytest.raises(OSError, match="Read-only"):
            checkpoint.load(folder)
    assert checkpoint.load(folder).card["note"] == str(safetensors_file.SHARD)


def test_a_load_beside_a_save_begins_again_once(folder, monkeypatch):
    from dunes.checkpoint import open as opening

    filled, other, calls = opening.load_decoder, initialise(build(), seed=9), []

    def saved_meanwhile(source):
        calls.append(source)
        if len(calls) == 1:
            checkpoint.save(other, folder, TOKENIZER, 16)
            raise ValueError("model.safetensors: changed while it was being read")
        return filled(source)

    monkeypatch.setattr(opening, "load_decoder", saved_meanwhile)
    assert torch.equal(checkpoint.load(folder).model.embed.token.weight, other.embed.token.weight)
    assert len(calls) == 2
    flip(folder / "tokenizer.json")
    looks = []
    monkeypatch.setattr(opening, "open_verified_model", lambda f, **options: looks.append(f) or unchanged())
    refuses("nothing has changed", checkpoint.load, folder)
    assert len(looks) == 1


unchanged = raising(ValueError("nothing has changed"))


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGE = {
    "a flipped bit": ("model.safetensors", flip),
    "a cut file": ("model.safetensors", lambda file: os.truncate(file, 100)),
    "missing weights": ("model.safetensors", os.unlink),
    "no config": ("config.json", os.unlink),
    "a card that is not JSON": ("dunes.json", lambda file: file.write_text("{")),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_named_in_one_line(folder, damage):
    name, harm = DAMAGE[damage]
    harm(folder / name)
    refuses(str(folder / name), checkpoint.load, folder)


def test_a_changed_file_is_refused_by_load_up_to_a_gigabyte_and_by_inspect_at_any_size(folder, monkeypatch):
    weights, before = folder / "model.safetensors", os.stat(folder / "model.safetensors")
    flip(weights)
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    refuses(r"if it was changed on purpose, set 'files' to \{\} in .*dunes\.json", checkpoint.load, folder)
    assert verified_card(folder, max_bytes=before.st_size), "too large to hash at each load"
    assert "another SHA-256" in inspect.judge(open_model(folder)).reasons[0]
    limits = []
    monkeypatch.setattr(inspect, "verified_card", lambda folder, limit: limits.append(limit))
    inspect.judge(open_model(folder))
    assert limits == [math.inf]
    change_json(folder / "dunes.json", files={})
    checkpoint.load(folder)


FACTS = {"size": 1, "sha256": ""}
CARDS = {
    "absolute": {"/etc/passwd": FACTS},
    "above": {"../x": FACTS},
    "a link out": {"out": FACTS},
    "a pipe": {"pipe": {"size": 0, "sha256": ""}},
    "no facts": {"config.json": 3},
    "no names": ["config.json"],
    "nothing": None,
    "very many": {f"f{i}": FACTS for i in range(30_000)},
}


@pytest.mark.parametrize("case", CARDS)
def test_a_card_names_nothing_but_files_of_its_folder(folder, case, monkeypatch):
    from dunes.files import atomic

    monkeypatch.setattr(atomic, "digest", lambda path, advance: pytest.fail(f"{path} was opened"))
    (folder / "out").symlink_to("/etc/passwd")
    os.mkfifo(folder / "pipe")
    (folder / "dunes.json").write_text(json.dumps({"files": CARDS[case]}))
    refuses(str(folder), checkpoint.load, folder)


def test_a_card_whose_changes_are_no_list_is_refused(folder):
    for key, changes in itertools.product(("changes", "history"), (3, {"name": "lora"}, None, [1])):
        change_json(folder / "dunes.json", **{"changes": [], "history": [], key: changes})
        refuses(f"dunes.json: .*{key}", checkpoint.load, folder)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("bos_token_id", value) for value in ("<s>", True)),
        *(("pad_token_id", value) for value in ([None], 1.5, {"a": "x\n"}, 600)),
        *(("eos_token_id", "x\n"), ("model_type", "mamba"), ("hidden_size", ...)),
    ],
)
def test_what_a_config_cannot_say_is_named_by_file_and_key(folder, key, value):
    (folder / "dunes.json").unlink()
    change_json(folder / "config.json", **{key: value})
    assert str(folder) in refuses(key, checkpoint.load, folder)


def test_what_a_model_is_called_follows_from_its_tree():
    for family, module in FAMILIES.items():
        config = module.Config.from_size(50, 64, 2, 16)
        of = {"phi3": "mistral"}.get(family, family)  # the tree of a Phi-3 is that of a Mistral
        found = checkpoint.hf_config_of(module.build(config), 16, loads=family != "dunes")
        assert found == checkpoint.Architecture(of, config)
    changed = build()
    changed.blocks[1].mlp = MLP(32, 64)
    assert "blocks.1.mlp" in checkpoint.hf_config_of(changed, 16)
    changed = random_model(dim=64, context=16)
    augment.quantize(changed, kind="int8")
    assert checkpoint.hf_config_of(changed, 16) == "blocks.0.attn.q is Int8, not Linear", "for several families"
    changed = build()
    changed.blocks[1].attn.window = 4
    assert "blocks.1.attn has window 4, not None" in checkpoint.hf_config_of(changed, 16)
    changed = build()
    changed.blocks[0].attn.q_norm = RMSNorm(32, 1e-2)
    assert "eps" in checkpoint.hf_config_of(changed, 16)
    shorter = random_model(dim=64, depth=3, context=16)
    shorter.blocks = shorter.blocks[:2]
    assert checkpoint.hf_config_of(shorter, 16).config.depth == 2


@pytest.mark.filterwarnings("ignore:.*no tokenizer")
@pytest.mark.parametrize("bias", ["attention_bias", "mlp_bias"])
@pytest.mark.parametrize("family", ["mistral", "mixtral", "qwen3", "qwen3_moe"])
def test_a_family_describes_only_what_its_config_says(family, bias, tmp_path):
    model = random_model(family, dim=64, context=16, **{bias: True})
    if isinstance(described := checkpoint.hf_config_of(model, 16), str):
        assert "bias" in described
        return
    checkpoint.save(model, tmp_path, None, 16)
    ids = torch.arange(12)[None]
    assert torch.equal(checkpoint.load(tmp_path).model(ids), model(ids))
    assert (family, bias) in {("qwen3", "attention_bias"), ("qwen3_moe", "attention_bias")}


NESTED = {
    "tensor": torch.arange(6, dtype=torch.bfloat16).view(2, 3),
    "empty": {},
    "numbers": {0: {"step": torch.tensor(3.0), "pair": (0.9, 0.95), "none": None}, 1: {}},
    "list": [1, "two", True, [torch.zeros(2)]],
    "nan": 0.1 + 0.2,
}


def test_a_state_comes_back_as_it_was(tmp_path):
    path = checkpoint.save_state(tmp_path, 12, NESTED)
    assert path.name == "step-000012"
    assert equal_states(checkpoint.load_state(path), NESTED)
    with pytest.raises(TypeError, match=r"a\.b: a training state cannot contain a set"):
        checkpoint.save_state(tmp_path, 13, {"a": {"b": {1}}})
    assert checkpoint.latest_state(tmp_path) == path, "a state that cannot be written leaves the old one"


def test_a_snapshot_is_freed_without_a_garbage_collection():
    """Each saved state of 135M parameters kept 1.2 GB until the next full collection."""
    gc.disable()
    try:
        taken = checkpoint.snapshot(NESTED)
        copies = [weakref.ref(tensor) for tensor in taken.tensors.values()]
        del taken
        assert copies
        assert not any(copy() is not None for copy in copies)
    finally:
        gc.enable()


def test_tensors_that_did_not_change_are_written_once(tmp_path, monkeypatch):
    """Also by a resumed run; a damaged or missing file, or a disk without links, costs one more writing."""
    best = {"a": torch.ones(3), "b": torch.zeros(2, dtype=torch.bfloat16)}
    kept = lambda folder: folder / "unchanging.safetensors"

    def save(step):
        values = {"best": dict(best), "weights": torch.full((3,), float(step)), "step": step}
        folder = checkpoint.save_state(tmp_path, step, checkpoint.snapshot(values, ["best"]))
        assert equal_states(checkpoint.load_state(folder), values)
        assert checkpoint.latest_state(tmp_path) == folder
        return folder

    first, second = save(1), save(2)
    assert kept(first).samefile(kept(second))
    assert not (first / "tensors.safetensors").samefile(second / "tensors.safetensors")
    best["a"] = torch.full((3,), 2.0)
    third = save(3)
    assert not kept(second).samefile(kept(third))
    flip(kept(third))
    assert checkpoint.latest_state(tmp_path) == second
    fourth = save(4)
    assert not kept(third).samefile(kept(fourth)), "damaged"
    kept(fourth).unlink()
    fifth = save(5)
    monkeypatch.setattr(state.os, "link", raising(OSError("no links here")))
    assert not kept(fifth).samefile(kept(save(6)))


def test_the_newest_whole_state_counts_and_old_ones_go(tmp_path):
    for step in (5, 10, 15):
        checkpoint.save_state(tmp_path, step, {"step": step})
    assert sorted(p.name for p in (tmp_path / "state").iterdir()) == ["step-000010", "step-000015"]
    flip(tmp_path / "state" / "step-000015" / "state.json")
    told = []
    newest = checkpoint.latest_state(tmp_path, told.append)
    assert checkpoint.load_state(newest) == {"step": 10}
    assert len(told) == 1
    assert "state.json" in told[0]
    shutil.rmtree(newest)
    assert checkpoint.latest_state(tmp_path) is None


def test_a_state_that_is_there_already_is_not_written_again_unless_damaged(tmp_path):
    path = checkpoint.save_state(tmp_path, 4, {"a": 1})
    before = (path / "state.json").stat().st_mtime_ns
    checkpoint.save_state(tmp_path, 4, {"a": 1})
    assert (path / "state.json").stat().st_mtime_ns == before
    flip(path / "state.json")
    checkpoint.save_state(tmp_path, 4, {"a": 1})
    assert checkpoint.load_state(state.latest_state(tmp_path)) == {"a": 1}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("wrong", [float("inf"), float("-inf"), float("nan")])
def test_a_state_that_is_not_finite_is_not_stored_in_any_dtype(tmp_path, dtype, wrong):
    weights = torch.linspace(-1e4, 1e4, 100).to(dtype)
    assert checkpoint.save_state(tmp_path, 1, {"weights": weights}).exists()
    weights[50] = wrong
    words = "step-000002: not saved, since weights has values that are not finite"
    refuses(words, checkpoint.save_state, tmp_path, 2, {"weights": weights})
    assert checkpoint.latest_state(tmp_path).name == "step-000001"
