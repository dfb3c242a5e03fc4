"""A run that trains its own model and completes lines with an open one beside it."""

import json
import math
import os
import re
import shutil
import signal
from dataclasses import asdict, replace
from itertools import count

import pytest
import tokenizers
import torch
from safetensors.torch import load_file, save_file
from tokenizers import decoders, models, pre_tokenizers, trainers

from adapters import trained
from conftest import change_json, display, raising, refuses, training_output, write_programs
from dunes import checkpoint, measure
from dunes.augment import attach
from dunes.checkpoint.base import BaseWeights
from dunes.checkpoint.export import export_gguf
from dunes.checkpoint.formats.adapter import is_reference
from dunes.completion import Suggestion
from dunes.completion.completer import (
    FolderCompleter,
    PairCompleter,
    find_completer,
)
from dunes.completion.copy_gate import read_gate
from dunes.completion.engine import CompletionEngine
from dunes.completion.fit import Answer, FitSize, fit_beside
from dunes.completion.index import read_index
from dunes.completion.keystrokes import CutPoint
from dunes.completion.pair import Pair
from dunes.completion.search import CompleteOptions
from dunes.data import collect_corpus
from dunes.evaluate import completion as evaluation
from dunes.progress import Interrupted
from dunes.runs import train as train_module
from dunes.runs.corpus import choose_completion
from dunes.runs.train import choose_trainable, train
from dunes.runs.train_config import TrainConfig
from dunes.serve.served import LoadedFolder, ServedModel
from dunes.text import Tokenizer
from real_models import smollm2
from small_models import random_model
from test_pair import log_odds
from test_runs import stop

IDS = torch.arange(12)[None]
PLACE = "def task_1_3(va", "", "module_1.py"


def said(text, p, source="model"):
    return Suggestion(text, p, p, source=source)


def foreign_tokenizer():
    """A byte-level BPE without fill-in-the-middle tokens."""
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet)
    inner.train_from_iterator(["def task(value, limit):\n    return value * limit\n"] * 3, trainer)
    return Tokenizer(inner)


FOREIGN = foreign_tokenizer()


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
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            train_module, "fit_size", lambda config, per_token: FitSize(40, 8, (math.inf, math.inf), (0.1, 0.1))
        )
        patch.setattr("dunes.completion.copy_gate.STEPS", (20, 20))
        yield


def config(base, code, **changes):
    fixed = {"batch": 4, "context_length": 64, "steps": 2, "dtype": "float32", "threads": 1, "copies": "never"}
    own = {"trainable": ("own",), "size": "1x32", "vocab_size": 300}
    fixed |= {} if "trainable" in changes else own
    return TrainConfig(base=str(base), **{"sources": (str(code),)} | fixed | changes)


def logits(folder):
    with torch.no_grad():
        return checkpoint.load(folder).model(IDS)


@pytest.fixture(scope="module")
def run(base, tmp_path_factory, _small_fits):
    """A run that uses both models."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "code").mkdir()
    write_programs(folder / "code")
    (folder / "said").write_text(training_output(config(base, folder / "code"), folder / "run"))
    use(folder / "run", "both")
    return folder / "run"


def use(run, models, **changes):
    """Let a run use these of its models."""
    gate = json.loads((run / "completion/gate.json").read_text())
    change_json(run / "completion/gate.json", pair=gate["pair"] | {"uses": models, "copies": False} | changes)


def change_weights(own):
    weights = load_file(own / "model.safetensors")
    save_file({name: tensor + 1 for name, tensor in weights.items()}, own / "model.safetensors", {"format": "pt"})


@pytest.fixture
def copied(run, base, tmp_path):
    """The run and its base, moved together."""
    for folder in (base, run, run.parent / "code"):
        shutil.copytree(folder, tmp_path / folder.relative_to(base.parents[1]))
    folder, own = (tmp_path / path.relative_to(base.parents[1]) for path in (run, base))
    change_json(folder / "open/adapter_config.json", base_model_name_or_path="/gone")
    change_json(folder / "open/dunes.json", files={})
    return folder, own


def test_a_run_has_its_own_model_and_a_reference(base, run):
    said = (run.parent / "said").read_text()
    assert "beside" in said
    assert "from now on with the model" in said
    assert "own model" in said
    assert is_reference(json.loads((run / "open/dunes.json").read_text()))
    assert not [*run.glob("open/*.safetensors")]
    assert (run / "model.safetensors").exists()
    own, opened = read_index(run), read_index(run / "open")
    assert own.texts() == opened.texts()
    assert len(own.ids) != len(opened.ids)
    assert FOREIGN.decode(opened.ids.items[: opened.files[1].start].tolist()).startswith(own.texts()[0][1][:40])


def test_both_complete_lines(run):
    completer = find_completer(run, print)
    assert isinstance(completer, PairCompleter)
    assert completer.index.contexts is completer.opened.index.contexts
    suggestions = completer.alternatives(*PLACE, CompleteOptions(alternatives=3))
    assert len({s.text for s in suggestions}) == len(suggestions)
    assert all(s.line <= suggestions[0].line for s in suggestions)
    completer.update("module_1.py", "def other(): pass\n")
    assert all("module_1.py" in engine._open.texts for engine in (completer, completer.opened))
    assert completer.complete(*PLACE).text
    for sure in (0.0, 1.1):
        completer.pair = replace(completer.pair, sure=sure)
        assert completer.explain(*PLACE) or not completer.complete(*PLACE).text


def test_a_sure_own_line_saves_the_open_model(run, monkeypatch):
    completer = find_completer(run, print)
    completer.pair = replace(completer.pair, sure=0.0)
    monkeypatch.setattr(completer.opened, "alternatives", raising(AssertionError("asked")))
    assert completer.complete(*PLACE).source == "model"
    completer.pair = replace(completer.pair, sure=1.1)
    with pytest.raises(AssertionError, match="asked"):
        completer.complete(*PLACE)
    completer.pair = Pair(1, log_odds(), 0.5)
    monkeypatch.setattr(completer.opened, "alternatives", lambda *_: [said("open line", 0.9, "open")])
    monkeypatch.setattr(CompletionEngine, "alternatives", lambda *_: [said("own line", 0.1)])
    best = completer.complete(*PLACE)
    assert (best.text, best.source) == ("open line", "open")
    assert best.word == pytest.approx(0.9)


USED = {"own": "FolderCompleter model", "open": "FolderCompleter open", "both": "PairCompleter model"}


def kind(completer):
    """The class of a completer, and the source of its own suggestions."""
    return f"{type(completer).__name__} {getattr(completer, 'source', 'copies')}"


@pytest.mark.parametrize("models", USED)
def test_the_run_chooses_which_models_are_used(models, copied, command):
    folder, _ = copied
    use(folder, models)
    completer = find_completer(folder, print)
    assert kind(completer) == USED[models]
    assert completer.complete(*PLACE).source == ("open" if models == "open" else completer.complete(*PLACE).source)
    served = ServedModel(folder, "run", 0.35)
    assert served.current.loaded is not None
    assert isinstance(served.threshold, float)
    place = f"{folder.parent / 'code/module_1.py'}:2:12"
    status, out, error = command("complete", folder, place, "--json")
    assert status == 0, error
    assert json.loads(out).keys() == {"text", "word", "line", "source"}


@pytest.mark.parametrize(
    ("lines", "uses", "is_copying"),
    [
        (("yes", "no", "no"), "own", None),
        (("no", "no", "yes"), "both", None),
        (("no", "yes", "no"), "own", True),
    ],
)
def test_a_run_uses_what_completes_lines_better(lines, uses, is_copying, run, tmp_path):
    """Lines of the own model, of copying, and of the open model, of which "yes" is right."""
    own, copied, other = (said(line, 0.5) for line in lines)
    cut = CutPoint(0, 3, "yes", "character", False)
    answers = [Answer(file, replace(cut, offset=n), 0, (own, copied)) for file in range(10) for n in range(12)]
    shutil.copytree(run / "open/completion", tmp_path / "open/completion")
    told = [[a.file, a.cut.offset, a.cut.rest, asdict(other)] for a in answers]
    change_json(tmp_path / "open/completion/gate.json", answers=told)
    facts = fit_beside(tmp_path, answers, 1000, "auto")
    assert (facts["pair"]["uses"], facts.get("copies")) == (uses, is_copying)
    assert facts["pair" if is_copying is None else "verdict"]
    change_json(tmp_path / "open/completion/gate.json", answers=[])
    assert fit_beside(tmp_path, answers, 1000, "auto") == {}


@pytest.mark.parametrize("change", [shutil.rmtree, change_weights])
def test_the_own_model_goes_on_alone_without_the_open_one(change, copied, command):
    folder, own = copied
    change(own)
    notes = []
    assert type(find_completer(folder, notes.append)) is FolderCompleter
    assert len(notes) == 1
    assert "\n" not in notes[0]
    assert str(folder if change is shutil.rmtree else own) in notes[0]
    assert f"{folder} --resume" in notes[0] or change is change_weights
    place = f"{folder.parent / 'code/module_1.py'}:2:12"
    status, _, error = command("complete", folder, place)
    assert status == 0
    assert len(error.strip().splitlines()) == 1
    LoadedFolder(folder, "run", (), print)


def test_a_moved_run_finds_its_open_model(copied):
    assert isinstance(find_completer(copied[0], raising(AssertionError)), PairCompleter)


def test_a_resumed_run_goes_on_without_its_open_model(copied, monkeypatch):
    folder, own = copied
    shutil.rmtree(own)
    monkeypatch.setattr(train_module, "load_base", raising(ValueError("gone")))
    out = training_output(TrainConfig(), folder, resume=True, asked=[])
    assert "without the open model: gone" in out
    assert type(find_completer(folder, print)) is FolderCompleter


def test_a_resumed_run_goes_on_with_its_open_model_at_another_place(copied):
    folder, own = copied
    elsewhere, before = own.rename(own.parent / "elsewhere"), (folder / "open/completion/gate.json").stat()
    options = {"override": ["base"], "asked": ["base"]}
    assert "beside" in training_output(config(elsewhere, ""), folder, resume=True, **options)
    assert checkpoint.load(folder / "open")
    assert (folder / "open/completion/gate.json").stat().st_mtime_ns == before.st_mtime_ns


def test_another_open_model_is_fitted_anew(copied):
    """Also if it is at the same place."""
    folder, own = copied
    options = {"override": ["base"], "asked": ["base"]}
    training_output(config(own, ""), folder, resume=True, **options)
    change_weights(own)
    before = read_gate(folder / "open")[1]["loss"]
    training_output(config(own, ""), folder, resume=True, **options)
    assert read_gate(folder / "open")[1]["loss"] != before
    assert checkpoint.load(folder / "open")


def finishing(number, change):
    """`finish_completion`, but the call with this number (0: of the open model, 1: of the own) is `change`."""
    real, calls = train_module.finish_completion, count()
    return lambda *a, **b: (change if next(calls) == number else real)(*a, **b)


@pytest.mark.parametrize("ready", [0, 1])
def test_memory_that_ends_leaves_what_is_ready(ready, base, code, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(train_module, "finish_completion", finishing(ready, raising(MemoryError())))
        refuses(str(tmp_path / "run"), train, config(base, code), tmp_path / "run", display()[0])
    completer = find_completer(tmp_path / "run", print)
    assert kind(completer) == ("FolderCompleter open" if ready else "CopyCompleter copies")
    assert completer.complete(*PLACE).text
    assert train(config(base, code), tmp_path / "run", display()[0], resume=True) == 0
    assert read_gate(tmp_path / "run")[1]["pair"]


def test_ctrl_c_while_the_open_model_is_fitted_leaves_copies(base, code, tmp_path, monkeypatch):
    monkeypatch.setattr(train_module, "finish_completion", raising(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        train(config(base, code), tmp_path / "run", display()[0])
    assert find_completer(tmp_path / "run", print).complete(*PLACE).source == "copies"


def test_ctrl_c_in_training_leaves_the_open_model(base, code, tmp_path, monkeypatch):
    stop(config(base, code, steps=3), tmp_path / "run", 2, monkeypatch)
    assert kind(find_completer(tmp_path / "run", print)) == "FolderCompleter open"
    training_output(config(base, code, steps=3), tmp_path / "run", resume=True)
    assert read_gate(tmp_path / "run")[1]["pair"]


def test_ctrl_c_in_closing_leaves_the_open_model(base, code, tmp_path, monkeypatch):
    def interrupted(*_):
        os.kill(os.getpid(), signal.SIGINT)
        raise Interrupted

    with monkeypatch.context() as patch:
        patch.setattr(train_module, "finish_completion", finishing(1, interrupted))
        training_output(config(base, code), tmp_path / "run", status=130)
    assert kind(find_completer(tmp_path / "run", print)) == "FolderCompleter open"


def test_a_server_follows_from_copies_to_the_open_model_to_both(base, code, tmp_path, monkeypatch):
    states, folder, real = [], tmp_path / "run", train_module.finish_completion
    look = lambda: states.append(LoadedFolder(folder, "run", (), lambda line: None))
    monkeypatch.setattr(train_module, "finish_completion", lambda *a, **b: (look(), real(*a, **b), look())[1])
    train(config(base, code), folder, display()[0])
    use(folder, "both")
    look()
    opened = "FolderCompleter open"
    assert [kind(state.completer) for state in states[:3]] == ["CopyCompleter copies", opened, opened]
    assert type(states[-1].completer) is PairCompleter
    assert len({state.stamp for state in states}) >= 4
    assert states[1].batch is None, "texts wait for the run's model"
    assert states[2].loaded is not None


def test_copying_only_needs_no_open_model(base, code, tmp_path):
    train(config(base, code, copies="only"), tmp_path / "run", display()[0])
    assert not (tmp_path / "run/open").exists()


def test_settings_of_a_new_model_go_with_an_open_one_beside_it_alone(base, code):
    assert config(base, code, size="1x32").beside
    refuses("own", config, base, code, trainable=(), size="1x32")
    refuses("completion", config, base, code, complete=False)


def test_the_estimate_leaves_time_for_the_open_model(base, code, tmp_path, command):
    lines = []
    for options in ([], ["--from", base]):
        arguments = ["--minutes", 1, "--dry-run", "--threads", 1, "--dtype", "float32", "--out", tmp_path / "run"]
        status, out, error = command("train", code, *arguments, *options)
        assert status == 0, error
        lines.append(out + error)
    assert "beside" not in lines[0]
    assert "the open model needs" in lines[1]
    assert "trains a model of its own" in lines[1]


@pytest.mark.slow
def test_an_evaluation_scores_both(run, monkeypatch):
    used = []
    real = evaluation.score_completer
    monkeypatch.setattr(evaluation, "score_completer", lambda *a: used.append(type(a[1])) or real(*a))
    evaluation.evaluate_completion(run, options=evaluation.CompletionOptions(4, 1, all_lines=True), files=1)
    assert PairCompleter in used


def test_a_model_that_dunes_trained_is_not_beside_another(run, code, tmp_path):
    refuses(str(run), train, config(run, code), tmp_path / "run", display()[0])


@pytest.mark.parametrize("verb", ["generate", "inspect", "eval"])
def test_verbs_work_on_a_reference(verb, run, command):
    few = ["--max-tokens", 2] if verb == "generate" else []
    status, out, error = command(verb, run / "open", *few)
    assert status == 0, error
    assert out.strip()


def test_only_models_that_are_used_are_rounded_for_speed(base, run, tmp_path, monkeypatch, command):
    """A merge writes the weights of the base, whatever is faster on this machine."""
    monkeypatch.setattr("dunes.checkpoint.loading.ROUNDED_FROM", 0)
    monkeypatch.setattr(measure, "choose_dtype", lambda device: torch.bfloat16)
    dtypes = lambda model: {p.dtype for p in model.parameters()}
    assert dtypes(LoadedFolder(run, "run", (), print).completer.opened.loaded.model) == {torch.bfloat16}
    assert dtypes(FolderCompleter(base).loaded.model) == {torch.float32}
    assert command("augment", "merge", run / "open", tmp_path / "out")[0] == 0
    assert dtypes(checkpoint.load(tmp_path / "out").model) == {torch.float32}
    assert torch.equal(logits(tmp_path / "out"), logits(base))


def test_a_run_with_a_gguf_file(base, code, tmp_path):
    export_gguf(base, tmp_path / "base.gguf")
    assert train(config(tmp_path / "base.gguf", code), tmp_path / "run", display()[0]) == 0
    use(tmp_path / "run", "both")
    assert type(find_completer(tmp_path / "run", raising(AssertionError))) is PairCompleter


def test_a_run_that_moves_with_its_base_hashes_only_what_changed(base, copied, monkeypatch):
    folder, own = copied
    hashed = []
    real = BaseWeights.sha256
    monkeypatch.setattr(BaseWeights, "sha256", lambda self, *d: hashed.append(d) or real(self, *d))
    assert torch.equal(logits(folder / "open"), logits(base))
    assert not hashed
    os.utime(own / "model.safetensors")
    assert torch.equal(logits(folder / "open"), logits(base))
    assert hashed


CHANGED = {
    "other weights": (change_weights, "a different base"),
    "another setting": (lambda own: change_json(own / "config.json", rms_norm_eps=0.1), "'rms_norm_eps' was"),
    "cut weights": (lambda own: os.truncate(own / "model.safetensors", 3000), "model.safetensors"),
    "gone": (shutil.rmtree, "--from BASE --override base"),
}


@pytest.mark.parametrize("change", CHANGED)
def test_a_base_that_changed_is_refused_in_one_line_that_names_it(change, copied, command):
    folder, own = copied
    make, words = CHANGED[change]
    make(own)
    for verb, *options in (("generate", "x"), ("inspect", "--values")):
        status, out, error = command(verb, folder / "open", *options)
        assert status == (1 if verb == "inspect" else 2), (verb, out, error)
        told = (out if verb == "inspect" else error).rstrip().splitlines()[-1]
        assert words in told
        assert str(folder if change == "gone" else own) in told
    with pytest.raises(ValueError, match=re.escape(words)):
        LoadedFolder(folder / "open", "open", (), print)


def test_a_base_that_changed_while_it_was_in_use_is_refused(base, code, tmp_path, monkeypatch):
    """Its files are those when the run began, not those at its end."""
    own = shutil.copytree(base, tmp_path / "own")
    changed = finishing(1, lambda *_: change_weights(own) or "changed")
    monkeypatch.setattr(train_module, "finish_completion", changed)
    assert train(config(own, code), tmp_path / "run", display()[0]) == 0
    refuses("a different base", checkpoint.load, tmp_path / "run/open")


def test_a_model_without_the_tokens_completes_from_the_text_above(code):
    corpus = collect_corpus([str(code)])
    chosen, reason = choose_completion(TrainConfig(sources=(str(code),), base="x"), corpus, FOREIGN)
    assert (chosen.complete, chosen.fim_rate, chosen.with_headers) == (True, 0.0, False)
    assert "on, " in reason
    assert "<|fim_prefix|>" in reason
    refuses("fim", choose_completion, replace(chosen, fim_rate=0.5), corpus, FOREIGN)


KINDS = [
    ((), None, ("own",)),
    (("all",), None, ("all",)),
    ((), "trained", ()),
    ((), "changed", ()),
]


@pytest.mark.parametrize(("asked", "whose", "chosen"), KINDS)
def test_a_model_from_others_stays_beside_a_new_one_unless_the_user_says_otherwise(
    asked, whose, chosen, base, code
):
    loaded = checkpoint.load(base)
    cards = {
        "trained": {"trained": {"complete": True, "sources": []}},
        "changed": {"changes": [{"name": "narrow"}]},
    }
    loaded = replace(loaded, card=cards.get(whose, {}))
    corpus = collect_corpus([str(code)])
    ready, _ = choose_trainable(config(base, code, trainable=asked, complete=True), corpus, loaded)
    assert ready.trainable == chosen
    text = config(base, code, trainable=(), complete=False, copies="auto")
    assert choose_trainable(text, corpus, loaded)[0].trainable == ()


@pytest.mark.parametrize("has_tensors", [True, False])
def test_a_run_that_trained_an_adapter_completes_and_is_not_resumed(has_tensors, base, run, tmp_path, command):
    """The form of an earlier version: the run itself refers to the model, with or without an adapter."""
    folder, loaded = tmp_path / "run", checkpoint.load(base)
    identity = checkpoint.base_identity(loaded.model, base)
    model = checkpoint.load(base).model
    if has_tensors:
        attach(model, where="**.attn.*", rank=2)
        trained(model)
    facts = {"trained": {"sources": ["x"], "complete": True, "trainable": ["adapter"], "file_headers": False}}
    words = {"base": base, "identity": identity, "facts": facts, "tokenizer": FOREIGN, "context_length": 64}
    checkpoint.save_adapter(model, folder, "default" if has_tensors else None, **words)
    shutil.copytree(run / "completion", folder / "completion")
    (folder / "state").mkdir()
    stored = {"format": 2} | asdict(config(base, "x")) | {"trainable": ["adapter"]}
    (folder / "state/plan.json").write_text(json.dumps(stored))
    completer = find_completer(folder, print)
    assert completer.complete(*PLACE).text
    assert torch.equal(logits(folder), logits(base)) is not has_tensors
    status, _, error = command("train", "--out", folder, "--resume")
    assert status == 2
    assert len(error.strip().splitlines()) == 1
    assert str(folder) in error
    assert "--from" in error


def test_all_weights_of_a_model_from_others_are_trained_on_demand(base, code, tmp_path):
    assert train(config(base, code, trainable=("all",)), tmp_path / "run", display()[0]) == 0
    assert (tmp_path / "run/model.safetensors").exists()
    assert (tmp_path / "run/completion/gate.json").exists()


@pytest.mark.parametrize(
    "family",
    ["gpt2", *(pytest.param(f, marks=pytest.mark.slow) for f in ("mamba2", "qwen3_next", "mixtral", "phi3"))],
)
def test_bases_of_other_families(family, code, tmp_path):
    base = write_base(tmp_path / "base", family)
    training_output(config(base, code), tmp_path / "run")
    use(tmp_path / "run", "both")
    completer = find_completer(tmp_path / "run", raising(AssertionError))
    assert type(completer) is PairCompleter
    completer.opened.complete(*PLACE)


@pytest.mark.slow
def test_smollm2_completes_lines_of_a_project(code, tmp_path):
    """From its GGUF file, beside two steps of an own model."""
    said = training_output(config(smollm2(), code, dtype=None), tmp_path / "run")
    assert "a chat model: its template is not used for lines" in said
    assert sum(file.stat().st_size for file in (tmp_path / "run").rglob("*")) < 50_000_000
    use(tmp_path / "run", "open")
    assert find_completer(tmp_path / "run", print).complete(*PLACE).text


@pytest.mark.parametrize("context", [8, 20])
def test_a_context_shorter_than_a_prompt(context, code, tmp_path):
    base = write_base(tmp_path / "base", context=context)
    assert train(config(base, code), tmp_path / "run", display()[0]) == 0
    use(tmp_path / "run", "open")
    assert find_completer(tmp_path / "run", print).complete("def task_1_3(value):\n" * 9 + "def ta", "", "x.py")


@pytest.mark.parametrize(("change", "words"), [({"model_type": "bert"}, "bert"), ({"model_type": "t5"}, "t5")])
def test_an_encoder_is_refused_by_name(change, words, base, code, tmp_path):
    shutil.copytree(base, tmp_path / "base")
    change_json(tmp_path / "base/config.json", architectures=["BertModel"], **change)
    refuses(words, train, config(tmp_path / "base", code), tmp_path / "run", display()[0])


def test_a_base_without_a_tokenizer_is_refused_before_the_work(base, code, tmp_path):
    shutil.copytree(base, tmp_path / "base", ignore=shutil.ignore_patterns("tokenizer*"))
    refuses(str(tmp_path / "base"), train, config(tmp_path / "base", code), tmp_path / "run", display()[0])
    assert not (tmp_path / "run").exists()
