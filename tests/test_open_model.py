"""A run that completes lines with a model from others: it refers to that model, and has an adapter if it is better."""

import json

import pytest
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers, trainers

from conftest import display, training_output, write_programs
from dunes import checkpoint
from dunes.checkpoint.export import export
from dunes.completion.completer import CopyCompleter, FolderCompleter, find_completer
from dunes.runs import train as train_module
from dunes.runs.train import train
from dunes.runs.train_config import TrainConfig
from dunes.text import Tokenizer
from small_models import random_model


def foreign_tokenizer():
    """A byte-level BPE without fill-in-the-middle tokens."""
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet)
    inner.train_from_iterator(["def task(value, limit):\n    return value * limit\n"] * 3, trainer)
    return Tokenizer(inner)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A model folder that dunes did not write."""
    folder, tokenizer = tmp_path_factory.mktemp("open") / "base", foreign_tokenizer()
    checkpoint.save(random_model(vocab=tokenizer.vocab, context=64), folder, tokenizer, 64)
    (folder / "dunes.json").unlink()
    return folder


def config(base, code, **changes):
    fixed = {"batch": 4, "context_length": 32, "steps": 4, "dtype": "float32", "threads": 1}
    return TrainConfig(sources=(str(code),), base=str(base), **fixed | changes)


def test_a_run_refers_to_its_base(base, code, tmp_path):
    said = training_output(config(base, code), tmp_path / "run")
    print(said)
    print([*(tmp_path / "run").rglob("*")])
    completer = find_completer(tmp_path / "run", print)
    print(completer.complete("def task_1_3(va", "", "x.py"))
    assert 0
