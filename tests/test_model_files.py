"""Files of model folders that strangers made: read from the folder only, in limits, and as what they are."""

import os
import shutil
from dataclasses import replace

import pytest
import torch

from conftest import change_json, display, refuses, toy
from dunes import checkpoint
from dunes.checkpoint.convert import convert
from dunes.checkpoint.open import open_model, open_verified_model
from dunes.checkpoint.trained_text import remember_sources, split_documents, trust_sources
from dunes.completion.copy_gate import read_gate
from dunes.completion.index import read_index
from dunes.data import collect_corpus
from dunes.data.records import rows
from dunes.data.sources import SPLIT_VERSION
from dunes.evaluate.text_loss import calibration_ids, evaluation_tokens
from dunes.files.model_file import find_file
from dunes.models import llama
from dunes.models.initialise import initialise
from dunes.runs.train import train
from dunes.text import Tokenizer

SECRET = b'{"secret": 1}'
CONFIG = llama.Config(vocab=265, dim=16, depth=1, heads=2, kv_heads=2, head_dim=8, hidden=16, context_length=32)
OPTIONAL = ("added_tokens.json", "chat_template.jinja")
NAMES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json", *OPTIONAL,
    "config.json", "model.safetensors", "dunes.json",
)  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A Hugging Face folder with each file that is read, and no digests in its card."""
    folder = tmp_path_factory.mktemp("made")
    checkpoint.save(initialise(llama.build(CONFIG)), folder, Tokenizer.train("bytes", ()), 32)
    (folder / "added_tokens.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    change_json(folder / "dunes.json", files={})
    return folder


@pytest.fixture
def model(made, tmp_path):
    (tmp_path / "secret").write_bytes(SECRET)
    return shutil.copytree(made, tmp_path / "model")


def refusals(folder, out):
    """The messages of whatever opens a model, of which none may write anything."""
    works = (checkpoint.load, lambda f: convert(open_verified_model(f), out))
    messages = [refuses(r"\A[^\n]+\Z", work, folder) for work in works]
    assert not out.exists()
    return messages


PLACES = {
    "a link out": lambda p: p.symlink_to("../secret"),
    "a broken link": lambda p: p.symlink_to("gone"),
    "a loop": lambda p: p.symlink_to(p.name),
    "a pipe": os.mkfifo,
    "a folder": os.mkdir,
}


@pytest.mark.parametrize(
    ("name", "place"),
    [(name, place) for name in NAMES for place in PLACES if "config" in name or place in ("a link out", "a pipe")],
)
def test_every_file_of_a_folder_is_a_plain_one_in_it(name, place, model, tmp_path):
    (model / name).unlink()
    PLACES[place](model / name)
    for message in refusals(model, tmp_path / "out"):
        assert name in message
        assert 'secret"' not in message


@pytest.mark.parametrize("name", ["tokenizer.model", "tokenizer.model.v3", "tekken.json"])
def test_the_tokenizers_own_files_are_copied_from_the_folder_only(name, model, tmp_path):
    (model / name).symlink_to("../secret")
    refuses("leads out of the folder", convert, open_verified_model(model), tmp_path / "out")
    (model / name).unlink()
    (model / name).write_bytes(SECRET)
    (model / f"{name}.part").write_bytes(SECRET)
    convert(open_verified_model(model), tmp_path / "out")
    assert (tmp_path / "out" / name).read_bytes() == SECRET
    assert not (tmp_path / "out" / f"{name}.part").exists()


def test_links_inside_of_a_folder_and_to_the_blobs_of_the_hubs_cache_are_files(model, tmp_path):
    home = tmp_path / "models--a--b"
    (home / "snapshots").mkdir(parents=True)
    shutil.copytree(model, home / "blobs")
    snapshot = home / "snapshots" / "0123"
    snapshot.mkdir()
    for name in NAMES:
        (snapshot / name).symlink_to(f"../../blobs/{name}")
        (model / name).rename(model / f"kept.{name}")
        (model / name).symlink_to(f"kept.{name}")
    (home / "blobs" / "params").write_bytes(b"{}")
    (snapshot / "original").mkdir()
    (snapshot / "original" / "params.json").symlink_to("../../../blobs/params")
    assert find_file(snapshot / "original", "params.json")
    for folder in (snapshot, model, tmp_path / "link"):
        (tmp_path / "link").symlink_to(model) if folder.name == "link" else None
        assert checkpoint.load(folder).require_tokenizer().extra_files["added_tokens.json"] == b"{}"
    shutil.move(home / "blobs", tmp_path / "elsewhere")
    (home / "blobs").symlink_to(tmp_path / "elsewhere")
    refuses("leads out of the folder", checkpoint.load, snapshot)


def test_a_link_to_another_models_save_is_not_finished(model, tmp_path):
    other = shutil.copytree(model, tmp_path / "other")
    (model / ".ready").symlink_to("../other")
    before = sorted(p.name for p in other.iterdir())
    for message in refusals(model, tmp_path / "out"):
        assert ".ready: a symbolic link, not a folder created by dunes; remove it" in message
    assert sorted(p.name for p in other.iterdir()) == before


@pytest.mark.parametrize("read", [read_index, read_gate])
def test_a_linked_folder_of_completion_is_not_read(read, model, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    for name in ("files.json", "index.safetensors", "gate.json", "gate.safetensors"):
        (tmp_path / "elsewhere" / name).write_bytes(SECRET)
    (model / "completion").symlink_to("../elsewhere")
    refuses("leads out of the folder", read, model)


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
PLACEHOLDERS = {
    "Git LFS": LFS,
    "Xet": b"# xet version 0\nfilesize = 7\nhash = '1'\n",
    "git-annex": b"/annex/objects/SHA256E-s1--2",
    "link as text": b"../../blobs/0123",
    "page": b"\xef\xbb\xbf\n <!DOCTYPE html>\n<html><body>Sign in</body></html>",
    "page without a type": b"<HTML lang=en>",
    "storage's error": b'<?xml version="1.0"?><Error><Code>AccessDenied</Code></Error>',
    "empty": b"",
    "zeros": bytes(4096),
}
TOLD = ["model.safetensors", "config.json", "dunes.json", "tokenizer.json", "tokenizer.model", "tekken.json"]
OTHERS = (b"PK\3\4" + b"x" * 40, b"\x80\2" + b"x" * 40, b"GGUF" + b"\3\0\0\0" * 9, b'{"error": "none"}', b"none")
IN_PLACE = [
    *((name, content) for name in TOLD for content in (LFS, *OTHERS)),
    *((name, content) for name in OPTIONAL for content in (LFS, b"")),
    *(("model.safetensors", content) for content in [*PLACEHOLDERS.values()][1:]),
]


@pytest.mark.parametrize(("name", "content"), IN_PLACE)
def test_what_is_in_place_of_a_file_is_refused_by_its_name(name, content, model, tmp_path):
    if name in ("tokenizer.model", "tekken.json"):
        (model / "tokenizer.json").unlink()
    (model / name).write_bytes(content)
    for message in refusals(model, tmp_path / "out"):
        assert name in message
        assert ("git lfs pull" in message) == (content == LFS)


@pytest.mark.filterwarnings("ignore:.*has no digests of its base")
@pytest.mark.parametrize("content", PLACEHOLDERS)
@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "consolidated.00.pth", "x.gguf", "adapter_model.safetensors"]
)
def test_the_same_for_other_forms_of_weights(name, content, tmp_path):
    (tmp_path / name).write_bytes(PLACEHOLDERS[content])
    config = {"pytorch_model.bin": "config.json", "consolidated.00.pth": "params.json"}.get(name)
    if config:
        (tmp_path / config).write_text("{}")
    if name.startswith("adapter"):
        adapter = '{"peft_type": "LORA", "r": 1, "target_modules": ["q_proj"]}'
        (tmp_path / "adapter_config.json").write_text(adapter)
        read = lambda: checkpoint.load_adapter(initialise(llama.build(CONFIG)), tmp_path)
    else:
        read = lambda: open_model(tmp_path / name if name == "x.gguf" else tmp_path)
    refuses(f"{name}: ", read)


def test_an_unfinished_download_is_named(model):
    (model / "model.safetensors").rename(model / "model.safetensors.incomplete")
    refuses(r"no weights; .*; model.safetensors.incomplete is an unfinished download", open_model, model)
    (model / "model.safetensors.incomplete").rename(model / "model.safetensors")
    (model / "model.safetensors.aria2").write_bytes(b"\0\1")
    refuses(r"model.safetensors: an unfinished download, since model.safetensors.aria2", open_model, model)


def test_a_long_header_of_tensors_is_not_taken_for_another_format(tmp_path):
    for size in (0x0280, 0x088B1F):  # as a pickle and gzip begin
        header = b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}'.ljust(size)
        (tmp_path / "a.safetensors").write_bytes(size.to_bytes(8, "little") + header + b"\0\0\x80?")
        module = torch.nn.ParameterDict({"a": torch.zeros(1)})
        checkpoint.load_weights(module, tmp_path / "a.safetensors")
        assert module["a"].tolist() == [1.0]


def test_pointers_are_no_text_to_train_on(tmp_path):
    (tmp_path / "a.txt").write_text("words\n")
    for name in ("b.txt", "c.jsonl", "d.parquet"):
        (tmp_path / name).write_bytes(LFS)
    corpus = collect_corpus([tmp_path])
    assert [d.name for d in corpus.documents] == ["a.txt"]
    assert corpus.skipped["pointers to files that are not here (git lfs pull)"] == ["b.txt"]
    assert "c.jsonl: a Git LFS pointer, not the file itself; run git lfs pull" in " ".join(corpus.notes)
    refuses("1 pointers to files that are not here", collect_corpus, [tmp_path / "b.txt"])
    for name in ("b.txt", "c.jsonl", "d.parquet"):
        refuses(f"{name}: a Git LFS pointer", list, rows(tmp_path / name))


# --- the text that a card names


def split_of(source):
    return {"sources": [str(source)], "split": "files", "split_version": SPLIT_VERSION}


@pytest.fixture
def foreign(model, tmp_path, monkeypatch):
    """A model whose card says that it was trained on a file of the user."""
    monkeypatch.setenv("DUNES_HOME", str(tmp_path / "home"))
    (tmp_path / "private").mkdir()
    for i in range(20):
        (tmp_path / "private" / f"{i}.txt").write_text(f"private {i}\n" * 40)
    change_json(model / "dunes.json", trained=split_of(tmp_path / "private"))
    return model


READS = {
    "validation": lambda loaded: evaluation_tokens(loaded),
    "calibration": lambda loaded: calibration_ids(loaded),
    "split": lambda loaded: split_documents(loaded.card),
}


@pytest.mark.parametrize("read", READS)
def test_sources_that_a_strangers_card_names_are_read_if_asked_for(read, foreign, tmp_path, monkeypatch):
    loaded, read = checkpoint.load(foreign), READS[read]
    with monkeypatch.context() as patch:
        patch.setattr("dunes.evaluate.text_loss.collect_corpus", lambda *_, **__: pytest.fail("it was read"))
        refuses(r"private' as .*pass --trust-sources, or pass", read, loaded)
    for trust in (trust_sources, checkpoint.trust_cards):
        with trust():
            read(loaded)
    remember_sources([str(tmp_path / "private")], follow_links=True)
    refuses("--trust-sources", read, loaded)
    monkeypatch.chdir(tmp_path)
    remember_sources(["private"], follow_links=False)
    read(loaded)
    refuses("--trust-sources", read, replace(loaded, card={"trained": split_of(tmp_path)}))


@pytest.mark.filterwarnings("default:not scored")
def test_the_commands_ask_for_a_strangers_text_and_know_what_was_trained_here(
    foreign, tmp_path, monkeypatch, command
):
    status, out, error = command("eval", foreign)
    assert (status, out) == (2, "")
    assert error.startswith(f"dunes: {foreign}: the model's card names ")
    assert command("eval", foreign, "--trust-sources")[0] == 0
    for change in (["quantize", "--kind", "int4"], ["prune", "--sparsity", "0.5"]):
        status, _, error = command("augment", *change, foreign, tmp_path / "out")
        assert (status, "--trust-sources" in error) == (2, True)
        assert not (tmp_path / "out").exists()
    monkeypatch.chdir(tmp_path)
    assert train(toy("private", steps=1), tmp_path / "run", display()[0]) == 0
    assert command("eval", "run")[0] == 0
    shutil.move("run", "elsewhere")
    assert command("eval", "elsewhere")[0] == 0
