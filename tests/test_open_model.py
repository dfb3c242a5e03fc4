"""A run that completes lines with a model from others: it refers to it, and has an adapter if that is better."""

import json
import math
import os
import re
import shutil
import signal
from dataclasses import replace
from itertools import count

import pytest
import tokenizers
import torch
from safetensors.torch import load_file, save_file
from tokenizers import decoders, models, pre_tokenizers, trainers

from conftest import change_json, display, raising, refuses, training_output, write_programs
from dunes import checkpoint, measure
from dunes.checkpoint.base import BaseWeights
from dunes.checkpoint.export import export_gguf
from dunes.checkpoint.formats.adapter import is_reference
from dunes.completion import Suggestion
from dunes.completion.completer import FolderCompleter, find_completer
from dunes.completion.engine import CompletionEngine
from dunes.completion.fit import AdapterVerdict, CompletionFiles, FitSize, compare_adapter
from dunes.completion.index import index_texts
from dunes.completion.text import FileTokenizer
from dunes.data import collect_corpus
from dunes.progress import Interrupted
from dunes.runs import train as train_module
from dunes.runs.corpus import choose_completion
from dunes.runs.train import choose_trainable, memory_with_base, train
from dunes.runs.train_config import TrainConfig
from dunes.serve.served import LoadedFolder
from dunes.text import Tokenizer
from real_models import smollm2
from small_models import random_model
from test_runs import stop

BETTER, WORSE = AdapterVerdict(True, "better"), AdapterVerdict(False, "worse")
IDS = torch.arange(12)[None]


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
    fixed = {"batch": 4, "context_length": 32, "steps": 2, "dtype": "float32", "threads": 1}
    fixed |= {"trainable": ("adapter",)}
    return TrainConfig(base=str(base), **{"sources": (str(code),)} | fixed | changes)


def logits(folder):
    with torch.no_grad():
        return checkpoint.load(folder).model(IDS)


@pytest.fixture(scope="module")
def run(base, tmp_path_factory, _small_fits):
    """A run whose adapter is not used."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "code").mkdir()
    write_programs(folder / "code")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_module, "compare_adapter", lambda *_: WORSE)
        said = training_output(config(base, folder / "code"), folder / "run")
    (folder / "said").write_text(said)
    return folder / "run"


def test_a_run_is_its_base_until_an_adapter_is_better(base, run):
    said = (run.parent / "said").read_text()
    assert "from now on with the model" in said
    assert "adapter: not used" in said
    assert is_reference(json.loads((run / "dunes.json").read_text()))
    assert not [*run.glob("*.safetensors")]
    assert torch.equal(logits(run), logits(base))
    completer = find_completer(run, print)
    assert isinstance(completer, FolderCompleter)
    assert completer.gate is not None
    assert completer.files.header is False


@pytest.mark.parametrize(
    "verb", ["generate", "inspect", "complete", "eval", pytest.param("eval --completion", marks=pytest.mark.slow)]
)
def test_verbs_work_on_a_run_without_weights(verb, run, command):
    place = [run.parent / "code/module_1.py:2:12"] if verb == "complete" else []
    few = ["--max-tokens", 2] if verb == "generate" else ["--limit", 1, "--all-lines"] if "--" in verb else []
    status, out, error = command(*verb.split()[:1], run, *verb.split()[1:], *place, *few)
    assert status == 0, error
    assert out.strip()


def test_only_models_that_are_used_are_rounded_for_speed(base, run, tmp_path, monkeypatch, command):
    """A merge writes the weights of the base, whatever is faster on this machine."""
    monkeypatch.setattr("dunes.checkpoint.loading.ROUNDED_FROM", 0)
    monkeypatch.setattr(measure, "choose_dtype", lambda device: torch.bfloat16)
    dtypes = lambda model: {p.dtype for p in model.parameters()}
    assert dtypes(LoadedFolder(run, "run", (), print).loaded.model) == {torch.bfloat16}
    assert dtypes(FolderCompleter(run).loaded.model) == {torch.bfloat16}
    assert dtypes(FolderCompleter(base).loaded.model) == {torch.float32}
    assert command("augment", "merge", run, tmp_path / "out")[0] == 0
    assert dtypes(checkpoint.load(tmp_path / "out").model) == {torch.float32}
    assert torch.equal(logits(tmp_path / "out"), logits(base))


def verdict(monkeypatch, given):
    monkeypatch.setattr(train_module, "compare_adapter", lambda *_: given)


def test_a_better_adapter_is_used_and_resuming_goes_on_with_it(base, code, tmp_path, monkeypatch):
    verdict(monkeypatch, BETTER)
    assert "adapter: used" in training_output(config(base, code), tmp_path / "run")
    adapted = logits(tmp_path / "run")
    assert not torch.allclose(adapted, logits(base))
    assert not (tmp_path / "run/model.safetensors").exists()
    assert find_completer(tmp_path / "run", print).gate is not None
    assert training_output(config(base, code), tmp_path / "run", resume=True)
    assert torch.equal(logits(tmp_path / "run"), adapted)
    verdict(monkeypatch, WORSE)
    more = config(base, code, steps=3)
    training_output(more, tmp_path / "run", resume=True, override=["steps"], asked=["steps"])
    assert torch.equal(logits(tmp_path / "run"), adapted), "what was better stays in use"


def test_a_run_of_a_gguf_file(base, code, tmp_path, monkeypatch):
    verdict(monkeypatch, BETTER)
    export_gguf(base, tmp_path / "base.gguf")
    assert train(config(tmp_path / "base.gguf", code), tmp_path / "run", display()[0]) == 0
    assert find_completer(tmp_path / "run", print).complete("def task_1_3(va", "", "x.py").text


@pytest.fixture
def moved(base, run, tmp_path):
    """A run and its base, moved together."""
    for folder in (base, run, run.parent / "code"):
        shutil.copytree(folder, tmp_path / folder.relative_to(base.parents[1]))
    folder, own = (tmp_path / path.relative_to(base.parents[1]) for path in (run, base))
    change_json(folder / "adapter_config.json", base_model_name_or_path="/gone")
    change_json(folder / "dunes.json", files={})
    return folder, own


def test_a_run_that_moves_with_its_base_finds_it_and_hashes_only_what_changed(base, moved, monkeypatch):
    folder, own = moved
    hashed = []
    real = BaseWeights.sha256
    monkeypatch.setattr(BaseWeights, "sha256", lambda self, *d: hashed.append(d) or real(self, *d))
    assert torch.equal(logits(folder), logits(base))
    assert not hashed
    os.utime(own / "model.safetensors")
    assert torch.equal(logits(folder), logits(base))
    assert hashed


def change_weights(own):
    weights = load_file(own / "model.safetensors")
    save_file({name: tensor + 1 for name, tensor in weights.items()}, own / "model.safetensors", {"format": "pt"})


CHANGED = {
    "other weights": (change_weights, "model.safetensors"),
    "another setting": (lambda own: change_json(own / "config.json", rms_norm_eps=0.1), "config.json"),
    "cut weights": (lambda own: os.truncate(own / "model.safetensors", 3000), "model.safetensors"),
    "gone": (shutil.rmtree, "--from BASE --override base"),
}


@pytest.mark.parametrize("change", CHANGED)
def test_a_base_that_changed_is_refused_in_one_line_that_names_it(change, moved, command):
    folder, own = moved
    make, words = CHANGED[change]
    make(own)
    place = f"{folder.parent / 'code/module_1.py'}:2:9"
    for verb, *options in (("generate", "x"), ("inspect", "--values"), ("complete", place)):
        status, out, error = command(verb, folder, *options)
        assert status == (1 if verb == "inspect" else 2), (verb, out, error)
        said = (out if verb == "inspect" else error).rstrip().splitlines()[-1]
        assert words in said
        assert str(folder if change == "gone" else own) in said
    with pytest.raises(ValueError, match=re.escape(words)):
        LoadedFolder(folder, "run", (), print)


def test_a_base_that_changed_while_it_was_in_use_is_refused(base, code, tmp_path, monkeypatch):
    """Its files are those that were loaded, not those at the end of the run."""
    own = shutil.copytree(base, tmp_path / "own")
    monkeypatch.setattr(train_module, "compare_adapter", lambda *_: change_weights(own) or BETTER)
    assert train(config(own, code), tmp_path / "run", display()[0]) == 0
    refuses("model.safetensors", checkpoint.load, tmp_path / "run")


def test_a_run_whose_base_is_gone_goes_on_with_it_at_another_place(base, moved, code):
    folder, own = moved
    own.rename(own.parent / "elsewhere")
    plan = json.loads((folder / "state/plan.json").read_text())
    again = config(own.parent / "elsewhere", code, sources=tuple(plan["sources"]))
    assert train(again, folder, display()[0], resume=True, override=["base"], asked=["base"]) == 0
    assert torch.equal(logits(folder), logits(base))


@pytest.mark.parametrize(("right", "is_better"), [(0.0, True), (1.0, False)])
def test_an_adapter_is_better_only_beyond_the_spread_of_files(right, is_better, base, run, monkeypatch):
    """Both sides are right at every cursor, or one of them at none."""
    texts = [(f"{i}.py", "".join(f"def task_{i}_{j}(value, limit):\n" for j in range(40))) for i in range(9)]
    calls = count()

    def complete(self, before, after="", name="", options=None):
        text = dict(texts)[name][len(before) :].partition("\n")[0]
        return Suggestion("wrong" if next(calls) % 2 and not right else text, 1.0, 1.0)

    monkeypatch.setattr(CompletionEngine, "complete", complete)
    files = CompletionFiles(index_texts(texts, FileTokenizer(FOREIGN, False)), texts, texts, (), False)
    verdict = compare_adapter(run, run, files, FitSize(0, 30, (math.inf, math.inf), (0.0, 0.0)))
    assert verdict.is_better is is_better
    assert ("+100.0" if is_better else "+0.0") in verdict.reason


def test_no_text_to_compare_on_is_no_reason_to_use_an_adapter(run):
    files = CompletionFiles(index_texts([("a.py", "x = 1\n")], FileTokenizer(FOREIGN, False)), [], [], (), False)
    assert not compare_adapter(run, run, files, FitSize(0, 30, (math.inf, math.inf), (0.0, 0.0))).is_better


def test_a_model_without_the_tokens_completes_from_the_text_above(code):
    corpus = collect_corpus([str(code)])
    chosen, reason = choose_completion(TrainConfig(sources=(str(code),), base="x"), corpus, FOREIGN)
    assert (chosen.complete, chosen.fim_rate, chosen.with_headers) == (True, 0.0, False)
    assert "on, " in reason
    assert "<|fim_prefix|>" in reason
    refuses("fim", choose_completion, replace(chosen, fim_rate=0.5), corpus, FOREIGN)


KINDS = [
    ((), None, ("own",)),
    (("own",), "trained", ("own",)),
    (("all",), None, ("all",)),
    (("adapter",), None, ("adapter",)),
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
    ready, _ = choose_trainable(config(base, code, trainable=asked, complete=True), loaded)
    assert ready.trainable == chosen
    text = config(base, code, trainable=(), complete=False)
    assert choose_trainable(text, loaded)[0].trainable == ()


def test_an_adapter_without_completion_is_refused(base, code):
    refuses("finetune", config, base, code, trainable=("adapter",), complete=False)


def test_all_weights_of_a_model_from_others_are_trained_on_demand(base, code, tmp_path):
    assert train(config(base, code, trainable=("all",)), tmp_path / "run", display()[0]) == 0
    assert (tmp_path / "run/model.safetensors").exists()
    assert (tmp_path / "run/completion/gate.json").exists()


@pytest.mark.slow
def test_an_adapter_needs_less_memory_than_all_weights(code, tmp_path):
    """Of a model large enough that weights count: gradients and optimizer of an adapter are small."""
    base = checkpoint.load(write_base(tmp_path / "base", dim=512, depth=4))
    said = [memory_with_base(config("x", code, trainable=(t,), complete=True), base) for t in ("adapter", "all")]
    adapter, whole = (float(re.search(r"about (\d+\.\d) GB", text)[1]) for text in said)
    assert adapter < whole


@pytest.mark.filterwarnings("ignore:PEFT")
@pytest.mark.parametrize(
    "family",
    ["gpt2", *(pytest.param(f, marks=pytest.mark.slow) for f in ("mamba2", "qwen3_next", "mixtral", "phi3"))],
)
def test_bases_of_other_families(family, code, tmp_path, monkeypatch):
    verdict(monkeypatch, BETTER)
    base = write_base(tmp_path / "base", family)
    print(training_output(config(base, code), tmp_path / "run"))
    find_completer(tmp_path / "run", print).complete("def task_1_3(va", "", "x.py")


def test_ctrl_c_while_the_gate_is_fitted_leaves_copies(base, code, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(train_module, "finish_completion", raising(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            train(config(base, code), tmp_path / "run", display()[0])
    completer = find_completer(tmp_path / "run", print)
    assert completer.copies
    assert completer.complete("def task_1_3(va", "", "x.py").text
    verdict(monkeypatch, WORSE)
    assert train(config(base, code), tmp_path / "run", display()[0], resume=True) == 0
    assert find_completer(tmp_path / "run", print).gate is not None


def test_ctrl_c_in_training_leaves_the_base_and_its_gate(base, code, tmp_path, monkeypatch):
    said = stop(config(base, code, steps=3), tmp_path / "run", 2, monkeypatch)
    assert "not compared" in said
    assert find_completer(tmp_path / "run", print).gate is not None
    assert torch.equal(logits(tmp_path / "run"), logits(base))
    verdict(monkeypatch, BETTER)
    assert "adapter: used" in training_output(config(base, code, steps=3), tmp_path / "run", resume=True)


def test_ctrl_c_while_the_adapter_is_compared_leaves_the_base_and_its_gate(base, code, tmp_path, monkeypatch):
    def interrupted(*_):
        os.kill(os.getpid(), signal.SIGINT)
        raise Interrupted

    monkeypatch.setattr(train_module, "compare_adapter", interrupted)
    said = training_output(config(base, code), tmp_path / "run", status=130)
    assert "not compared" in said
    assert find_completer(tmp_path / "run", print).gate is not None
    verdict(monkeypatch, BETTER)
    assert "adapter: used" in training_output(config(base, code), tmp_path / "run", resume=True)


@pytest.mark.parametrize("phase", ["finish_completion", "score_base", "compare_adapter"])
def test_memory_that_ends_in_any_phase_leaves_what_is_ready(phase, base, code, tmp_path, monkeypatch):
    monkeypatch.setattr(train_module, phase, raising(MemoryError()))
    refuses(str(tmp_path / "run"), train, config(base, code), tmp_path / "run", display()[0])
    completer = find_completer(tmp_path / "run", print)
    assert (completer.gate is not None) is (phase != "finish_completion")
    assert completer.complete("def task_1_3(va", "", "x.py").text


def test_a_server_follows_a_run_from_copies_to_its_model(base, code, tmp_path, monkeypatch):
    states = []
    folder = tmp_path / "run"
    real = train_module.finish_completion
    look = lambda: states.append(LoadedFolder(folder, "run", (), lambda line: None))
    monkeypatch.setattr(train_module, "finish_completion", lambda *a: (look(), real(*a), look())[1])
    verdict(monkeypatch, BETTER)
    train(config(base, code), folder, display()[0])
    assert [state.copies for state in states[:2]] == [True, False]
    look()
    assert len({state.stamp for state in states}) == 3, "copies, the base with its gate, and with the adapter"
    assert [*states[-1].chats] == ["run"]


@pytest.mark.slow
def test_smollm2_completes_lines_of_a_project(code, tmp_path):
    """From its GGUF file, with two steps of an adapter."""
    few = config(smollm2(), code, batch=2, context_length=64, dtype=None)
    said = training_output(few, tmp_path / "run")
    assert "a chat model: its template is not used for lines" in said
    assert sum(file.stat().st_size for file in (tmp_path / "run").glob("*")) < 50_000_000
    assert find_completer(tmp_path / "run", print).complete("def task_1_3(va", "", "x.py").text


@pytest.mark.parametrize("context", [8, 20])
def test_a_context_shorter_than_a_prompt(context, code, tmp_path):
    base = write_base(tmp_path / "base", context=context)
    few = config(base, code, context_length=0)
    assert train(few, tmp_path / "run", display()[0]) == 0
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
