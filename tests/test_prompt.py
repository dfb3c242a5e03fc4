"""What a user meets at Python's prompt and in a type checker: names, reprs, types of own parts."""

import importlib
import re
from pathlib import Path

import pytest
import torch

import dunes
import typed_parts
from adapters import build
from conftest import run_python
from dunes import checkpoint
from dunes.augment import apply_change
from dunes.data import TokenFile, collect_corpus
from dunes.generate import PrefixCache
from dunes.inference.text_generator import TextGenerator
from dunes.parts import Cache, CacheFormat, ForwardContext, QuantizedCache
from dunes.text import Tokenizer
from dunes.train import Trainer, muon, next_token

ROOMS = {path.parent.name for path in Path(dunes.__file__).parent.glob("*/__init__.py")}


@pytest.mark.slow
def test_dir_lists_the_rooms_and_imports_none():
    assert set(dir(dunes)) >= ROOMS - {"cli"}
    script = "import sys, dunes; dir(dunes); assert 'torch' not in sys.modules; print(dunes.text.__name__)"
    done = run_python(script)
    assert done.stdout == "dunes.text\n", done.stderr
    with pytest.raises(AttributeError, match="module 'dunes' has no attribute 'nonsense'"):
        dunes.nonsense  # noqa: B018


def test_help_names_the_rooms_and_their_main_names():
    described = dict(re.findall(r"^    (\w+) +(\S.*)$", dunes.__doc__, re.MULTILINE))
    assert {*described} == ROOMS - {"cli"}
    for room, line in described.items():
        first, blank, rest = importlib.import_module(f"dunes.{room}").__doc__.split("\n", 2)
        assert (first, blank) == (f"{line[0].upper()}{line[1:]}.", "")
        names = re.findall(r"`([\w.]+)`", rest)
        assert names, f"the docstring of {room} names nothing"
        for name in names:
            place, _, last = f"dunes.{room}.{name.removeprefix(f'{room}.')}".rpartition(".")
            assert hasattr(importlib.import_module(place), last), f"{room} has no {name}"


@pytest.mark.filterwarnings("ignore:unchanged may mix tokens")
def test_a_model_of_own_parts_that_type_checks_trains_and_generates():
    assert len(typed_parts.run(iter([torch.randint(11, (2, 8))]))) == 4


def test_each_object_says_what_it_is_on_a_line(tmp_path):
    model, (text, ids) = build(), (tmp_path / "text", tmp_path / "ids")
    checkpoint.save(model, tmp_path / "model", Tokenizer.train("chars", ["ab"]), 32)
    loaded = checkpoint.load(tmp_path / "model")
    trainer = Trainer(model, muon(model), next_token)
    next(trainer.run([torch.zeros(2, 8, dtype=torch.long)]))
    text.mkdir()
    (text / "a.txt").write_text("a text " * 20)
    ids.write_bytes(bytes(20))
    for value, part in (
        (loaded, "LoadedModel(llama, "),
        (loaded.tokenizer, "Tokenizer("),
        (TextGenerator(loaded), "context length 32"),
        (checkpoint.describe(tmp_path / "model"), "Hugging Face format, "),
        (trainer, "after step 1)"),
        (apply_change(model, "lora", rank=2), "Change(lora at 14 places"),
        (Cache(2, 16), "Cache(2 rows of 16 slots"),
        (QuantizedCache(2, 16, format=CacheFormat(4)), "QuantizedCache(2 rows"),
        (PrefixCache(model, 2), "PrefixCache("),
        (ForwardContext.of(torch.zeros(2, 8, dtype=torch.long)), "ForwardContext(positions (1, 8)"),
        (collect_corpus([str(text)]), "training file"),
        (TokenFile(ids, torch.zeros(1, dtype=torch.int16).numpy().dtype, 10), "10 ids of int16"),
    ):
        assert part in repr(value)
        assert " at 0x" not in repr(value)
        assert "\n" not in repr(value)
