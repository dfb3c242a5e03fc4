"""A run that trains nothing, and completes lines with an open model, copies and a gate."""

import json
import math
import os
import re
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
import tokenizers
import torch
from safetensors.torch import load_file, save_file
from tokenizers import decoders, models, pre_tokenizers

from conftest import change_json, display, metaspace_tokenizer, raising, refuses, training_output, write_programs
from dunes import checkpoint, measure
from dunes.checkpoint import open as opening
from dunes.checkpoint.base_digests import BaseWeights
from dunes.checkpoint.export import write_format
from dunes.checkpoint.formats.adapter import is_reference
from dunes.completion import fit as completion_fit
from dunes.completion.completer import CopyCompleter, FolderCompleter, find_completer
from dunes.completion.copy_gate import read_gate
from dunes.completion.fit import FitSize
from dunes.completion.index import read_index
from dunes.completion.search import CompleteOptions
from dunes.completion.text import fim_form
from dunes.data import collect_corpus
from dunes.runs import train as train_module
from dunes.runs.corpus import choose_completion
from dunes.runs.train import choose_trainable, train
from dunes.runs.train_config import NONE, TrainConfig
from dunes.serve.fields import Refused
from dunes.serve.follow import Follower
from dunes.serve.served_model import LoadedFolder, ServedModel, base_stamp
from dunes.text import Tokenizer
from small_models import byte_level_bpe, random_model

IDS = torch.arange(12)[None]
PLACE = "def task_1_3(va", "", "module_1.py"


TEXTS = ["def task(value, limit):\n    return value * limit\n"] * 3
FOREIGN = Tokenizer(byte_level_bpe(TEXTS, 300, "<|endoftext|>"))
"""Has no fill-in-the-middle tokens."""


def write_base(folder, family="llama", tokenizer=FOREIGN, **sizes):
    """A model folder that dunes did not write."""
    checkpoint.save(
        random_model(family, **{"vocab": tokenizer.vocab, "context": 64} | sizes), folder, tokenizer, 64
    )
    (folder / "dunes.json").unlink()
    return folder


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_base(tmp_path_factory.mktemp("open") / "base")


@pytest.fixture(scope="module", autouse=True)
def _small_fits():
    size = FitSize(16, 2, (math.inf, math.inf), (0.1, 0.1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FitSize, "of", lambda *_: size)
        patch.setattr("dunes.completion.copy_gate.STEPS", (20, 20))
        yield


def config(base, code, **changes):
    return TrainConfig(base=str(base), **{"sources": (str(code),), "threads": 1, "copies": "never"} | changes)


def logits(folder):
    with torch.no_grad():
        return checkpoint.load(folder).model(IDS)


@pytest.fixture(scope="module")
def run(base, tmp_path_factory, _small_fits):
    folder = tmp_path_factory.mktemp("run")
    training_output(config(base, write_programs(folder / "code")), folder / "run")
    return folder / "run"


def change_weights(own):
    weights = load_file(own / "model.safetensors")
    save_file({name: tensor + 1 for name, tensor in weights.items()}, own / "model.safetensors", {"format": "pt"})


@pytest.fixture
def copied(run, base, tmp_path):
    """The run and its base, moved together."""
    for folder in (base, run, run.parent / "code"):
        shutil.copytree(folder, tmp_path / folder.relative_to(base.parents[1]))
    folder, own = (tmp_path / path.relative_to(base.parents[1]) for path in (run, base))
    change_json(folder / "adapter_config.json", base_model_name_or_path="/gone")
    change_json(folder / "dunes.json", files={})
    change_json(folder / "state/plan.json", base="/gone")
    return folder, own


def contents(folder):
    """The bytes of each file of a run, but for its lock."""
    files = (file for file in folder.rglob("*") if file.is_file() and file.name != "lock")
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


def test_a_run_refers_to_its_base_and_trains_nothing(run):
    assert is_reference(json.loads((run / "dunes.json").read_text()))
    assert not [*run.glob("*.safetensors"), *run.glob("state/step*"), *run.glob("*.jsonl")]
    assert read_gate(run)
    completer = find_completer(run, raising(AssertionError))
    assert type(completer) is FolderCompleter
    assert len(completer.training_files) == 40 - len(completer.test_documents())
    assert completer.complete(*PLACE).text


def test_a_run_is_served(run, command):
    served = ServedModel(run, "run", 0.35)
    assert served.current.loaded is not None
    assert isinstance(served.threshold, float)
    status, out, error = command("complete", run, f"{run.parent / 'code/module_1.py'}:2:12", "--json")
    assert status == 0, error
    assert json.loads(out)["source"] in ("model", "copies")


def test_a_finished_run_is_not_fitted_again(copied):
    folder, own = copied
    os.utime(own / "config.json")
    before = contents(folder / "completion")
    dry = training_output(TrainConfig(), folder, resume=True, asked=[], dry_run=True)
    assert json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"] == "/gone"
    said = training_output(TrainConfig(), folder, resume=True, asked=[])
    assert "finished" in said
    assert "finished" in dry
    assert contents(folder / "completion") == before
    assert json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"] == str(own)


AGAIN = {"resume": True, "asked": []}
OVER = {"resume": True, "override": ["base"], "asked": ["base"]}


def test_a_run_follows_its_base_to_another_place(copied):
    folder, own = copied
    elsewhere, before = own.rename(own.parent / "elsewhere"), contents(folder / "completion")
    assert "finished" in training_output(config(elsewhere, ""), folder, **OVER)
    assert torch.equal(logits(folder), logits(elsewhere))
    assert contents(folder / "completion") == before
    assert "finished" in training_output(TrainConfig(), folder, resume=True, asked=[])


def swap_ids(own):
    content = json.loads((own / "tokenizer.json").read_text())
    vocab = content["model"]["vocab"]
    *_, a, b = vocab
    vocab[a], vocab[b] = vocab[b], vocab[a]
    (own / "tokenizer.json").write_text(json.dumps(content))


def test_another_tokenizer_of_the_same_weights_is_fitted_anew(copied):
    folder, own = copied
    before = read_index(folder).ids.items
    swap_ids(own)
    assert "finished" not in training_output(TrainConfig(), folder, **AGAIN)
    assert len(read_index(folder).ids.items) == len(before)
    assert (read_index(folder).ids.items != before).any()
    assert "finished" in training_output(TrainConfig(), folder, **AGAIN)


def change_settings(own):
    change_json(own / "config.json", rms_norm_eps=0.5)


@pytest.mark.parametrize(
    ("change", "overrides"), [(change_settings, False), (change_weights, False), (change_weights, True)]
)
def test_other_settings_or_weights_are_fitted_anew(change, overrides, copied):
    """Also at the same place."""
    folder, own = copied
    change(own)
    before = read_gate(folder)[1]["loss"]
    asked = (config(own, ""), OVER) if overrides else (TrainConfig(), AGAIN)
    assert "finished" not in training_output(asked[0], folder, **asked[1])
    assert read_gate(folder)[1]["loss"] != before
    assert torch.equal(logits(folder), logits(own))


def test_another_choice_of_copies_is_fitted_anew(copied):
    folder, _ = copied
    options = {"resume": True, "override": ["copies"], "asked": ["copies"]}
    training_output(TrainConfig(copies="only"), folder, **options)
    assert read_gate(folder)[1]["copies"]
    assert find_completer(folder, print).complete(*PLACE).source == "copies"


def other_base(folder, kind):
    """A base that cannot take the place of the run's, or whose fit does not end."""
    if kind == "gone":
        return folder / "gone"
    own = write_base(folder / "other", dim=48)
    if kind == "encoder":
        change_json(own / "config.json", architectures=["BertModel"], model_type="bert")
    if kind == "without tokenizer":
        for file in own.glob("tokenizer*"):
            file.unlink()
    if kind == "of whole words":
        whole_words().save(own)
    if kind == "trained":
        (own / "dunes.json").write_text(json.dumps({"trained": {"complete": True, "sources": []}}))
    return own


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        *((kind, ValueError) for kind in ("gone", "encoder", "without tokenizer", "of whole words", "trained")),
        *(("", error) for error in (KeyboardInterrupt(), SystemExit(143), MemoryError())),
    ],
)
def test_a_base_that_is_refused_or_interrupted_changes_nothing(kind, error, copied, monkeypatch):
    folder, _ = copied
    before, other = contents(folder), other_base(folder.parent, kind)
    if not kind:
        monkeypatch.setattr("dunes.completion.fit.ask_cursors", raising(error))
    shown, out = display()
    expected = ValueError if isinstance(error, MemoryError) else error if kind else type(error)
    with pytest.raises(expected) as told:
        train(config(other, ""), folder, shown, **OVER)
    assert "\n" not in str(told.value)
    assert kind or isinstance(error, MemoryError) or out.getvalue().rstrip().endswith("is unchanged")
    assert contents(folder) == before
    assert type(find_completer(folder, raising(AssertionError))) is FolderCompleter


PHASES = ["prepare_completion", "finish_completion", "write_config", "write_index", "write_gate"]


@pytest.mark.parametrize(
    ("phase", "error"),
    [
        *((phase, KeyboardInterrupt()) for phase in ("describe_memory", *PHASES)),
        *((phase, error) for phase in PHASES[1:3] for error in (SystemExit(143), MemoryError())),
    ],
)
def test_what_ends_a_run_leaves_what_is_ready(phase, error, base, code, tmp_path, monkeypatch):
    """A second call of what writes the index is the one at the end."""
    folder, (shown, out) = tmp_path / "run", display()
    place = "dunes.completion.fit." if phase in ("write_index", "write_gate") else "dunes.runs.train."
    real = getattr(train_module if "train" in place else completion_fit, phase)
    calls = iter([real] * (phase == "write_index"))
    with monkeypatch.context() as patch:
        patch.setattr(place + phase, lambda *a, **b: next(calls, raising(error))(*a, **b))
        with pytest.raises((KeyboardInterrupt, SystemExit, ValueError, MemoryError)):
            train(config(base, code), folder, shown)
    if phase == "describe_memory":
        assert not folder.exists()
        return
    if not isinstance(error, MemoryError):
        assert (
            out.getvalue().rstrip().splitlines()[-1]
            == f"stopped: resume with: dunes train --out {folder} --resume"
        )
    if phase != "prepare_completion":
        assert find_completer(folder, print).complete(*PLACE).source == "copies"
    assert train(TrainConfig(), folder, display()[0], resume=True, asked=[]) == 0
    assert type(find_completer(folder, raising(AssertionError))) is FolderCompleter


@pytest.mark.parametrize("phase", ["write_index", "write_gate"])
def test_what_ends_while_another_base_is_written_leaves_copies(phase, copied, monkeypatch):
    """Not the gate of the earlier base with the new one, or with an index of its ids."""
    folder, _ = copied
    other = write_base(folder.parent / "other", tokenizer=metaspace_tokenizer())
    with monkeypatch.context() as patch:
        patch.setattr(f"dunes.completion.fit.{phase}", raising(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            train(config(other, ""), folder, display()[0], **OVER)
    assert find_completer(folder, print).complete(*PLACE).source == "copies"
    assert "done after" in training_output(TrainConfig(), folder, **AGAIN)
    assert type(find_completer(folder, raising(AssertionError))) is FolderCompleter
    assert torch.equal(logits(folder), logits(other))


def test_a_server_follows_from_copies_to_the_model(base, code, tmp_path, monkeypatch):
    states, folder, real = [], tmp_path / "run", train_module.finish_completion
    look = lambda: states.append(LoadedFolder(folder, "run", (), lambda line: None))
    monkeypatch.setattr(train_module, "finish_completion", lambda *a, **b: (look(), real(*a, **b), look())[1])
    train(config(base, code), folder, display()[0])
    assert [type(state.completer) for state in states] == [CopyCompleter, FolderCompleter]
    assert len({state.stamp for state in states}) == 2
    assert states[0].batch is None, "texts wait for the run's model"
    assert states[1].loaded is not None


def test_a_server_compiles_the_step_of_a_large_model(run, monkeypatch):
    processes = []
    start = lambda *a: processes.append((*a, checkpoint.cards_trusted())) or SimpleNamespace(poll=lambda: None)
    monkeypatch.setattr("dunes.serve.served_model.start_compiling", start)
    monkeypatch.setattr("dunes.serve.served_model.GREEDY_FROM", 0)
    monkeypatch.setattr("dunes.generate.decode_packages.why_not_compiled", lambda: "")
    with checkpoint.trust_cards():
        served = LoadedFolder(run, "run", (), print)
    served.completer.complete(*PLACE, CompleteOptions(width=1))
    served.batch.find_step()
    assert processes == [(run, True)], "started once, for lines and texts"


@pytest.mark.parametrize("verb", ["generate", "inspect", "eval"])
def test_verbs_work_on_a_reference(verb, run, command):
    few = ["--max-tokens", 2] if verb == "generate" else []
    status, out, error = command(verb, run, *few)
    assert status == 0, error
    assert out.strip()


def test_only_models_that_are_used_are_rounded_for_speed(base, code, tmp_path, monkeypatch, command):
    """A merge writes the weights of the base, whatever is faster on this machine."""
    monkeypatch.setattr("dunes.checkpoint.open.ROUNDED_FROM", 0)
    monkeypatch.setattr(measure, "choose_dtype", lambda device: torch.bfloat16)
    dtypes, fitted, real = lambda model: {p.dtype for p in model.parameters()}, [], train_module.finish_completion
    noted = lambda *a: fitted.append(dtypes(a[3].model)) or real(*a)
    monkeypatch.setattr(train_module, "finish_completion", noted)
    train(config(base, code), tmp_path / "run", display()[0])
    assert fitted == [{torch.bfloat16}]
    assert json.loads((tmp_path / "run/dunes.json").read_text())["base"]["kind"] == "torch.float32"
    assert dtypes(LoadedFolder(tmp_path / "run", "run", (), print).completer.loaded.model) == {torch.bfloat16}
    assert dtypes(FolderCompleter(base).loaded.model) == {torch.float32}
    compiled = lambda model, *a: (fitted.append(dtypes(model)), (tmp_path, torch.bfloat16))[1]
    monkeypatch.setattr("dunes.generate.decode_packages.compile_step", compiled)
    assert command("compile", tmp_path / "run")[0] == 0
    assert fitted[1:] == [{torch.bfloat16}], "the model that completion and generation use"
    assert command("augment", "merge", tmp_path / "run", tmp_path / "out")[0] == 0
    assert dtypes(checkpoint.load(tmp_path / "out").model) == {torch.float32}
    assert torch.equal(logits(tmp_path / "out"), logits(base))


def test_a_run_that_moves_with_its_base_hashes_only_what_changed(base, copied, monkeypatch):
    folder, own = copied
    hashed = []
    real = BaseWeights.sha256
    monkeypatch.setattr(BaseWeights, "sha256", lambda self, *d: hashed.append(d) or real(self, *d))
    assert torch.equal(logits(folder), logits(base))
    assert not hashed
    os.utime(own / "model.safetensors")
    assert torch.equal(logits(folder), logits(base))
    assert hashed


CHANGED = {
    "other weights": (change_weights, "a different base"),
    "another setting": (lambda own: change_json(own / "config.json", rms_norm_eps=0.1), "'rms_norm_eps' was"),
    "cut weights": (lambda own: os.truncate(own / "model.safetensors", 3000), "model.safetensors"),
    "no config": (lambda own: (own / "config.json").unlink(), "config.json"),
    "gone": (shutil.rmtree, "/gone"),
}


@pytest.mark.parametrize("change", CHANGED)
def test_a_base_that_changed_is_named_in_one_line_and_lines_are_copied(change, copied, command):
    folder, own = copied
    make, words = CHANGED[change]
    make(own)
    for verb, *options in (("generate", "x"), ("inspect", "--values"), ("eval",), ("eval", "--completion")):
        status, out, error = command(verb, folder, *options)
        assert status == (1 if verb == "inspect" else 2), (verb, out, error)
        told = (out if verb == "inspect" else error).rstrip().splitlines()[-1]
        assert words in told
        assert verb == "inspect" or f"dunes train --out {folder} --resume --from BASE --override base" in told
    status, out, error = command("complete", folder, f"{folder.parent / 'code/module_1.py'}:2:12", "--json")
    assert (status, json.loads(out)["source"]) == (0, "copies")
    assert len(error.strip().splitlines()) == 1
    assert words in error
    assert "--override base" in error
    served = ServedModel(folder, "run", 0.35, say=lambda line: None)
    assert isinstance(served.current.completer, CopyCompleter)
    with pytest.raises(Refused, match=re.escape(words)):
        served.require_batch()
    if change == "gone":
        refuses("--override base", train, TrainConfig(), folder, display()[0], resume=True, asked=[])


def test_a_server_notices_a_base_that_is_put_back(copied):
    folder, own = copied
    away, said = shutil.move(own, own.parent / "away"), []
    served = ServedModel(folder, "run", 0.35, say=said.append)
    follower = Follower(served, lambda work: SimpleNamespace(result=work), said.append)
    follower._load_again()
    assert isinstance(served.current.completer, CopyCompleter)
    shutil.move(away, own)
    follower._load_again()
    assert isinstance(served.current.completer, FolderCompleter)
    shutil.move(own, away)
    follower._load_again()
    assert isinstance(served.current.completer, FolderCompleter), "it is in memory"
    assert len(said) == 2, said


def test_a_server_never_asks_the_hub_whether_a_base_is_back(copied, monkeypatch):
    """It looks every second, and each request takes up to ten."""
    folder, own = copied
    shutil.rmtree(own)
    change_json(folder / "adapter_config.json", base_model_name_or_path="org/name")
    monkeypatch.setattr(opening, "locate_model", lambda *a: pytest.fail("asked"))
    assert base_stamp(folder) == []


def test_a_base_that_changed_while_it_was_in_use_is_refused(base, code, tmp_path, monkeypatch):
    """Its files are those when the run began, not those at its end."""
    own, real = shutil.copytree(base, tmp_path / "own"), train_module.finish_completion
    monkeypatch.setattr(train_module, "finish_completion", lambda *a: change_weights(own) or real(*a))
    assert train(config(own, code), tmp_path / "run", display()[0]) == 0
    refuses("a different base", checkpoint.load, tmp_path / "run")


def test_a_model_without_the_tokens_completes_from_the_text_above(code):
    corpus = collect_corpus([str(code)])
    chosen, reason = choose_completion(TrainConfig(sources=(str(code),), base="x"), corpus, FOREIGN)
    assert (chosen.complete, chosen.fim_rate, chosen.with_headers) == (True, 0.0, False)
    assert "on, " in reason
    assert "<|fim_prefix|>" in reason
    refuses("fim", choose_completion, replace(chosen, fim_rate=0.5), corpus, FOREIGN)


def test_a_model_with_the_tokens_completes_from_the_text_above_and_below(code, tmp_path):
    known = Tokenizer.train("bpe", ["def task(value):\n    return value\n"] * 3, 300)
    base = write_base(tmp_path / "base", tokenizer=known)
    assert "above and below" in training_output(config(base, code), tmp_path / "run")
    assert fim_form(checkpoint.load(tmp_path / "run"))


KINDS = [
    ((), None, NONE),
    (NONE, None, NONE),
    (("all",), None, ("all",)),
    ((), "trained", ()),
    ((), "changed", ()),
]


@pytest.mark.parametrize(("asked", "whose", "chosen"), KINDS)
def test_a_model_from_others_is_not_trained_unless_the_user_says_so(asked, whose, chosen, base, code):
    cards = {
        "trained": {"trained": {"complete": True, "sources": []}},
        "changed": {"changes": [{"name": "narrow"}]},
    }
    loaded, corpus = replace(checkpoint.load(base), card=cards.get(whose, {})), collect_corpus([str(code)])
    ready, _ = choose_trainable(config(base, code, trainable=asked, complete=True), corpus, loaded)
    assert (ready.complete, ready.trainable) == (True, chosen)
    text = config(base, code, complete=False, copies="auto")
    assert choose_trainable(text, corpus, loaded)[0].trainable == ()
    if whose:
        refuses(str(base), choose_trainable, config(base, code, trainable=NONE), corpus, loaded)


@pytest.mark.parametrize(
    "changes",
    [{"steps": 2}, {"lr": 0.1}, {"batch": 4}, {"dtype": "float32"}, {"fim_rate": 0.5}, {"size": "1x32"}],
)
def test_what_only_training_uses_is_refused_before_the_work(changes, base, code, tmp_path):
    refuses(next(iter(changes))[:3], lambda: train(config(base, code, **changes), tmp_path / "run", display()[0]))
    assert not (tmp_path / "run").exists()


def test_prose_is_not_completed(base, tmp_path):
    (tmp_path / "text").mkdir()
    for number in range(9):
        (tmp_path / f"text/{number}.txt").write_text("A walk by the sea. " * 400)
    asked = config(base, tmp_path / "text", trainable=NONE, copies="auto")
    refuses("--trainable none", train, asked, tmp_path / "run", display()[0])
    off = config(base, tmp_path / "text", trainable=NONE, copies="auto", complete=False)
    refuses("off, as asked", train, off, tmp_path / "run", display()[0])


def test_a_model_that_dunes_trained_is_not_referred_to(run, code, tmp_path):
    refuses(str(run), train, config(run, code), tmp_path / "run", display()[0])


@pytest.mark.parametrize("name", ["own", "adapter"])
def test_a_run_of_an_earlier_form_is_refused_on_one_line(name, copied, command):
    folder, _ = copied
    change_json(folder / "state/plan.json", trainable=[name])
    status, _, error = command("train", "--out", folder, "--resume")
    assert (status, error.count("\n")) == (2, 1)


def test_all_weights_of_a_model_from_others_are_trained_on_demand(base, code, tmp_path):
    few = {"batch": 4, "context_length": 64, "steps": 2, "dtype": "float32"}
    assert train(config(base, code, trainable=("all",), **few), tmp_path / "run", display()[0]) == 0
    assert (tmp_path / "run/model.safetensors").exists()
    assert (tmp_path / "run/completion/gate.json").exists()


@pytest.mark.parametrize(
    "family",
    [
        "gguf",
        "gpt2",
        "mamba2",
        *(pytest.param(f, marks=pytest.mark.slow) for f in ("qwen3_next", "mixtral", "phi3")),
    ],
)
def test_bases_of_other_families_and_of_gguf(family, code, tmp_path):
    base = write_base(tmp_path / "base", "llama" if family == "gguf" else family)
    if family == "gguf":
        write_format(base, base := tmp_path / "base.gguf", "gguf")
    training_output(config(base, code), tmp_path / "run")
    assert find_completer(tmp_path / "run", raising(AssertionError)).complete(*PLACE)


@pytest.mark.parametrize("context", [8, 20])
def test_a_context_shorter_than_a_prompt(context, code, tmp_path):
    base = write_base(tmp_path / "base", context=context)
    assert train(config(base, code), tmp_path / "run", display()[0]) == 0
    assert find_completer(tmp_path / "run", print).complete("def task_1_3(value):\n" * 9 + "def ta", "", "x.py")


@pytest.mark.parametrize(("kind", "words"), [("encoder", "bert"), ("without tokenizer", "/other")])
def test_a_base_that_cannot_be_used_is_refused_by_name_before_the_work(kind, words, code, tmp_path):
    refuses(words, train, config(other_base(tmp_path, kind), code), tmp_path / "run", display()[0])
    assert not (tmp_path / "run").exists()


def whole_words():
    inner = tokenizers.Tokenizer(models.WordLevel({"[UNK]": 0, "def": 1, "return": 2, "(": 3}, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.add_special_tokens(["[UNK]"])
    return Tokenizer(inner)


def pieces_of_words():
    inner = tokenizers.Tokenizer(models.WordPiece({"[UNK]": 0, "def": 1, "##s": 2, "a": 3}, unk_token="[UNK]"))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    return Tokenizer(inner)


@pytest.mark.parametrize("make", [whole_words, pieces_of_words])
def test_a_tokenizer_that_drops_spaces_cannot_write_lines(make, code, tmp_path):
    base = write_base(tmp_path / "base", tokenizer=make())
    corpus, loaded = collect_corpus([str(code)]), checkpoint.load(base)
    ready, (reason,) = choose_trainable(config(base, code, copies="auto"), corpus, loaded)
    assert (ready.complete, ready.trainable) == (False, ())
    assert "drops spaces" in reason
    refuses("drops spaces", choose_trainable, config(base, code, complete=True), corpus, loaded)
    refuses("drops spaces", choose_trainable, config(base, code, trainable=NONE, copies="auto"), corpus, loaded)


@pytest.mark.parametrize("kind", ["bpe", "bytes", "chars"])
def test_other_tokenizers_write_lines(kind):
    assert Tokenizer.train(kind, ["def area(b):\n    return b\n"] * 3, 300).writes_lines
    assert FOREIGN.writes_lines
    assert metaspace_tokenizer().writes_lines
