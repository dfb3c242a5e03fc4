"""--trust-code: every command that opens a model folder has it, and imports nothing without it."""

import json
import os
import subprocess
import sys

import pytest

from conftest import message, refuses
from dunes import checkpoint
from dunes.cli import augment_verb, bench
from dunes.cli.main import VERBS
from dunes.evaluate import comparison
from dunes.parts import Attention, Block, Decoder, Embedding, RMSNorm, Rotary
from dunes.text import Tokenizer
from own_parts import OwnMLP
from test_network import rename

OF_NO_MODEL = ["bench", "bench compare", "bench plot", "doctor", "help", "augment"]
COMMANDS = [
    *VERBS,
    *(f"augment {name}" for name in augment_verb.COMMANDS),
    *(f"bench {name}" for name in bench.commands()),
]
ARGUMENTS = {
    "train": ["{text}", "--from", "{model}", "--out", "{out}"],
    "finetune": ["{model}", "--data", "{data}", "--out", "{out}"],
    "complete": ["{model}", "{text}:1:2"],
    "serve": ["{model}", "--port", "0"],
    "eval": ["{model}", "{text}"],
    "augment quantize": ["{model}", "{out}", "--kind", "int8"],
    "augment prune": ["{model}", "{out}", "--method", "magnitude"],
    "export": ["{model}", "{out}", "--to", "cpp"],
} | {name: ["{model}"] for name in ("generate", "chat", "inspect", "compile")}
SOURCE = "from pathlib import Path\nPath('ran').touch()\n"


def build(mlp=OwnMLP, dim=32, vocab=265):
    part = lambda: Block(RMSNorm(dim), Attention(dim, 2, 2, position=Rotary(16)), RMSNorm(dim), mlp(dim))
    blocks = [part() for _ in range(2)]
    return Decoder(Embedding(vocab, dim), blocks, RMSNorm(dim))


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """A model whose card names `stranger:make`, a text, examples, and a module without that function."""
    folder = tmp_path_factory.mktemp("kept")
    architecture = checkpoint.Architecture.of_function(build)
    tokenizer = Tokenizer.train("bytes", ())
    checkpoint.save(build(), folder / "model", tokenizer, 64, architecture=architecture)
    rename(folder / "model", "stranger:make")
    (folder / "text.txt").write_text("abc def\n" * 200)
    rows = [{"instruction": f"a {i}", "output": "b"} for i in range(60)]
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


@pytest.fixture
def dunes(kept, tmp_path, monkeypatch, command):
    """Runs a command in a folder that has the module; returns its exit status and what it printed as errors."""

    def run(name, *options):
        monkeypatch.chdir(tmp_path)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "stranger", raising=False)
        usual = ["{model}"] if name.startswith("bench") else ["{model}", "{out}"]
        places = {"model": kept / "model", "text": kept / "text.txt", "data": kept / "data.jsonl"}
        arguments = [a.format_map(places | {"out": tmp_path / "out"}) for a in ARGUMENTS.get(name, usual)]
        status, _, error = command(*name.split(), *arguments, *options)
        return status, error

    return run


@pytest.mark.parametrize("name", [name for name in COMMANDS if name not in (*OF_NO_MODEL, "lsp", "studio")])
def test_every_command_that_opens_a_model_imports_by_its_card_only_with_the_option(name, kept, tmp_path, dunes):
    (tmp_path / "stranger.py").write_text(SOURCE)
    status, error = dunes(name)
    if name == "inspect":
        assert (status, error) == (1, ""), "it describes the folder, which would not load"
    else:
        assert (status, error.count("\ndunes: ") + error.startswith("dunes: ")) == (2, 1)
        assert "--trust-code" in error
    assert not (tmp_path / "ran").exists()
    status, error = dunes(name, "--trust-code")
    assert status == 2
    assert error.splitlines()[-1].startswith(f"dunes: {kept / 'model'}: built by 'stranger:make'")
    assert (tmp_path / "ran").exists()
    assert not checkpoint.cards_trusted()


@pytest.mark.parametrize("name", OF_NO_MODEL[1:5])
def test_a_command_that_opens_no_model_has_no_such_option(name, command):
    _, shown, _ = command(*name.split(), "-h")
    assert f"usage: dunes {name}" in shown
    assert "--trust-code" not in shown


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--trust-code"]])
def test_a_language_server_imports_by_a_card_only_with_the_option(options, kept, tmp_path):
    (tmp_path / "stranger.py").write_text(SOURCE)
    command = [sys.executable, "-m", "dunes", "lsp", str(kept / "model"), *options]
    env = {**os.environ, "PYTHONPATH": ":".join([str(tmp_path), *filter(None, sys.path)])}
    first = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": {"capabilities": {}}}
    messages = [first, {"jsonrpc": "2.0", "method": "initialized", "params": {}}]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=tmp_path, env=env
    ) as process:
        process.stdin.write(b"".join(map(message, messages)))
        process.stdin.flush()
        said = b""
        while b"showMessage" not in said:
            said += process.stdout.read1(1 << 16)
        process.kill()
    assert (tmp_path / "ran").exists() == bool(options)


@pytest.mark.slow
def test_a_trusted_card_is_trusted_by_the_processes_that_measure(kept, tmp_path, monkeypatch, dunes):
    (tmp_path / "stranger.py").write_text("from test_trust_code import build as make\n")
    monkeypatch.setenv("PYTHONPATH", ":".join([str(tmp_path), *sys.path]))
    status, error = dunes("bench memory", "--trust-code", "--check")
    assert (status, error) == (0, "")
    refuses("not imported automatically", comparison._run_measurement, [kept / "model"], tmp_path)
    with checkpoint.trust_cards():
        assert comparison._run_measurement([kept / "model"], tmp_path)["memory"] > 0


def test_training_goes_on_from_a_trusted_model_and_keeps_its_function(tmp_path, dunes):
    (tmp_path / "stranger.py").write_text("from test_trust_code import build as make\n")
    few = ("--trust-code", "--steps", "2", "--batch", "2", "--context-length", "32", "--quiet")
    status, error = dunes("train", *few)
    assert status == 0, error
    assert checkpoint.load(tmp_path / "out", trust_code=True).architecture.function is build
    refuses("not imported automatically", checkpoint.load, tmp_path / "out")


def test_trust_ends_where_it_was_given():
    assert not checkpoint.cards_trusted()
    with checkpoint.trust_cards():
        with checkpoint.trust_cards(False):
            assert checkpoint.cards_trusted()
        assert checkpoint.cards_trusted()
    with pytest.raises(KeyError), checkpoint.trust_cards():
        raise KeyError
    assert not checkpoint.cards_trusted()
