"""A run that trains its own model and completes lines with an open one beside it."""

import json
import math
import os
import shutil
import signal
from dataclasses import replace

import numpy as np
import pytest
import torch

from conftest import change_json, display, raising, refuses, training_output, write_programs
from dunes import checkpoint
from dunes.checkpoint.formats.adapter import is_reference
from dunes.completion import Suggestion
from dunes.completion.completer import (
    CopyCompleter,
    FolderCompleter,
    OpenCompleter,
    PairCompleter,
    find_completer,
)
from dunes.completion.copy_gate import read_gate
from dunes.completion.engine import CompletionEngine
from dunes.completion.fit import FitSize
from dunes.completion.index import read_index
from dunes.completion.pair import (
    FEATURES,
    PRIOR,
    Cursor,
    Pair,
    features,
    fit_logistic,
    fit_pair,
    fit_weights,
    right,
    sigmoid,
)
from dunes.completion.search import CompleteOptions
from dunes.evaluate import completion as evaluation
from dunes.progress import Interrupted
from dunes.runs import train as train_module
from dunes.runs.train import train
from dunes.runs.train_config import TrainConfig
from dunes.serve.served import LoadedFolder, ServedModel
from test_open_model import FOREIGN, change_weights, write_base
from test_runs import stop

PLACE = "def task_1_3(va", "", "module_1.py"


def said(text, p, source="model"):
    return Suggestion(text, p, p, source=source)


@pytest.mark.parametrize("ours", [0.2, 0.9, 1.0, 0.0])
def test_the_better_is_shown_with_its_probability(ours):
    pair = Pair(1000, PRIOR)
    best = pair.better(said("a", ours), said("b", 0.5, "open"), "")
    assert best.text == ("a" if ours > 0.5 else "b")
    assert best.source == ("model" if ours > 0.5 else "open")
    assert best.line == pytest.approx(max(min(max(ours, 9e-4), 1 - 9e-4), 0.5), abs=1e-4)


def test_features_before_the_open_model_is_asked_are_those_after_it():
    own, opened = said("a b", 0.3), said("a b", 0.7)
    before, after = features(own, None, "a b", 10**6), features(own, opened, "a b", 10**6)
    known = before != 0
    assert np.array_equal(before[known], after[known])
    named = dict(zip(FEATURES, after, strict=True))
    assert (named["equal"], named["own copied"], named["open copied"], named["size"]) == (1, 1, 1, 0)


def cursors(count=240, seed=0):
    """The own model is right where it says so, the open one is far too sure of itself."""
    random, rows = np.random.default_rng(seed), []
    for number in range(count):
        p, q = random.random(2)
        own = "yes = 1" if random.random() < p else "no"
        opened = "yes = 1" if random.random() < q / 4 else "nothing"
        rows.append(Cursor(said(own, p), said(opened, q, "open"), "", "yes = 1", number // 6, 1000))
    return rows


def test_a_fit_learns_which_of_both_is_too_sure():
    rows = cursors()
    pair, pairs = fit_pair(rows)
    crossed = [each.choose(c) for each, c in zip(pairs, rows, strict=True)]
    share = lambda suggestions: np.mean([right(s, c.rest)[0] for s, c in zip(suggestions, rows, strict=True)])
    raw = [max((c.own, c.opened), key=lambda s: s.line) for c in rows]
    assert share(crossed) > share(raw) + 0.03
    assert share(crossed) >= share([c.own for c in rows]) - 0.01
    means = [s.line for s in crossed]
    assert np.mean(means) == pytest.approx(share(crossed), abs=0.07)
    assert 0.5 <= pair.sure <= 0.95


def test_without_cursors_coefficients_are_the_shipped_ones():
    assert np.array_equal(fit_weights([]), PRIOR)
    assert fit_pair([])[0].sure == Pair(1, PRIOR).sure
    few = fit_weights(cursors(2))
    assert np.abs(few - PRIOR).max() < 1


@pytest.mark.parametrize(("strength", "scale"), [(10.0, 1.0), (1e-3, 1.0), (1.0, 50.0)])
def test_a_logistic_regression_ends_where_its_gradient_is_zero(strength, scale):
    random = np.random.default_rng(0)
    x, prior = scale * random.normal(size=(80, 4)), random.normal(size=4)
    y = (random.random(80) < sigmoid(x @ random.normal(size=4) / scale)).astype(float)
    w = fit_logistic(x, y, prior, strength)
    weights = torch.tensor(w, requires_grad=True)
    logits = torch.tensor(x) @ weights
    loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, torch.tensor(y), reduction="sum")
    loss = loss + strength / 2 * ((weights - torch.tensor(prior)) ** 2).sum()
    loss.backward()
    assert weights.grad.abs().max() < 1e-4 * scale


def test_separable_labels_have_finite_coefficients():
    x = np.ones((9, 1))
    assert np.isfinite(fit_logistic(x, np.ones(9), np.zeros(1), 0.1)).all()


def test_a_pair_is_read_as_it_was_written():
    pair, _ = fit_pair(cursors(90))
    again = Pair.read(json.loads(json.dumps(pair.record())), 1)
    assert (again.size, again.sure) == (1000, pair.sure)
    assert np.allclose(again.weights, pair.weights, atol=1e-4)
    refuses("features", Pair.read, pair.record() | {"features": ["other"]}, 1)
    refuses("finite", Pair.read, pair.record() | {"weights": np.full(PRIOR.shape, np.nan).tolist()}, 1)


# Runs.


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
    fixed = {"batch": 4, "context_length": 64, "steps": 2, "dtype": "float32", "threads": 1, "vocab_size": 300}
    fixed |= {"trainable": ("own",), "size": "1x32", "copies": "never"}
    return TrainConfig(base=str(base), **{"sources": (str(code),)} | fixed | changes)


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
    assert not (run / "open/completion/index.safetensors").exists(), "its text is shared"
    own, opened = read_index(run), read_index(run, of_open=True)
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
    with monkeypatch.context() as patch:
        patch.setattr(OpenCompleter, "alternatives", raising(AssertionError("asked")))
        assert completer.complete(*PLACE).source == "model"
        completer.pair = replace(completer.pair, sure=1.1)
        with pytest.raises(AssertionError, match="asked"):
            completer.complete(*PLACE)
    answers = {OpenCompleter: [said("open line", 0.9)], CompletionEngine: [said("own line", 0.1)]}
    completer.pair = Pair(1, PRIOR, 0.5)
    monkeypatch.setattr(
        OpenCompleter, "alternatives", lambda *_: [replace(answers[OpenCompleter][0], source="open")]
    )
    monkeypatch.setattr(CompletionEngine, "alternatives", lambda *_: answers[CompletionEngine])
    best = completer.complete(*PLACE)
    assert (best.text, best.source) == ("open line", "open")
    assert best.word == pytest.approx(0.9)


USED = {"own": FolderCompleter, "open": OpenCompleter, "both": PairCompleter}


@pytest.mark.parametrize("models", USED)
def test_the_run_chooses_which_models_are_used(models, copied, command):
    folder, _ = copied
    use(folder, models)
    completer = find_completer(folder, print)
    assert type(completer) is USED[models]
    assert completer.complete(*PLACE).source == ("open" if models == "open" else completer.complete(*PLACE).source)
    served = ServedModel(folder, "run", 0.35)
    assert served.current.loaded is not None
    assert isinstance(served.threshold, float)
    place = f"{folder.parent / 'code/module_1.py'}:2:12"
    status, out, error = command("complete", folder, place, "--json")
    assert status == 0, error
    assert json.loads(out).keys() == {"text", "word", "line", "source"}


def test_a_pair_that_is_worse_than_copying_copies(copied):
    folder, _ = copied
    use(folder, "both", copies=True, verdict="worse")
    notes = []
    completer = find_completer(folder, notes.append)
    assert completer.complete(*PLACE).source == "copies"
    assert "worse" in notes[0]


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
    folder, _ = copied
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
    folder, own = copied
    change_weights(own)
    before = read_gate(folder / "open")[1]["loss"]
    training_output(config(own, ""), folder, resume=True, override=["base"], asked=["base"])
    assert read_gate(folder / "open")[1]["loss"] != before
    assert checkpoint.load(folder / "open")


@pytest.mark.parametrize("phase", ["fit_open", "finish_completion"])
def test_memory_that_ends_leaves_what_is_ready(phase, base, code, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(train_module, phase, raising(MemoryError()))
        refuses(str(tmp_path / "run"), train, config(base, code), tmp_path / "run", display()[0])
    completer = find_completer(tmp_path / "run", print)
    assert type(completer) is (CopyCompleter if phase == "fit_open" else OpenCompleter)
    assert completer.complete(*PLACE).text
    assert train(config(base, code), tmp_path / "run", display()[0], resume=True) == 0
    assert read_gate(tmp_path / "run")[1]["pair"]


def test_ctrl_c_while_the_open_model_is_fitted_leaves_copies(base, code, tmp_path, monkeypatch):
    monkeypatch.setattr(train_module, "fit_open", raising(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        train(config(base, code), tmp_path / "run", display()[0])
    assert find_completer(tmp_path / "run", print).complete(*PLACE).source == "copies"


def test_ctrl_c_in_training_leaves_the_open_model(base, code, tmp_path, monkeypatch):
    stop(config(base, code, steps=3), tmp_path / "run", 2, monkeypatch)
    assert type(find_completer(tmp_path / "run", print)) is OpenCompleter
    training_output(config(base, code, steps=3), tmp_path / "run", resume=True)
    assert read_gate(tmp_path / "run")[1]["pair"]


def test_ctrl_c_in_closing_leaves_the_open_model(base, code, tmp_path, monkeypatch):
    def interrupted(*_):
        os.kill(os.getpid(), signal.SIGINT)
        raise Interrupted

    with monkeypatch.context() as patch:
        patch.setattr(train_module, "finish_completion", interrupted)
        training_output(config(base, code), tmp_path / "run", status=130)
    assert type(find_completer(tmp_path / "run", print)) is OpenCompleter


def test_a_server_follows_from_copies_to_the_open_model_to_both(base, code, tmp_path, monkeypatch):
    states, folder = [], tmp_path / "run"
    look = lambda: states.append(LoadedFolder(folder, "run", (), lambda line: None))
    for name in ("fit_open", "finish_completion"):
        real = getattr(train_module, name)
        monkeypatch.setattr(train_module, name, lambda *a, real=real: (look(), real(*a), look())[1])
    train(config(base, code), folder, display()[0])
    use(folder, "both")
    look()
    assert [type(state.completer) for state in states[:3]] == [CopyCompleter, OpenCompleter, OpenCompleter]
    assert type(states[-1].completer) is PairCompleter
    assert len({state.stamp for state in states}) >= 4
    assert states[1].batch is None, "texts wait for the run's model"
    assert states[2].loaded is not None


def test_copying_only_needs_no_open_model(base, code, tmp_path):
    train(config(base, code, copies="only"), tmp_path / "run", display()[0])
    assert not (tmp_path / "run/open").exists()


def test_settings_of_a_new_model_go_with_an_open_one_beside_it_alone(base, code):
    assert config(base, code, size="1x32").beside
    refuses("own", config, base, code, trainable=())
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


def test_an_own_model_beside_another_gets_prompts_as_in_its_training(run, code, tmp_path):
    training_output(config(run, code), tmp_path / "run")
    use(tmp_path / "run", "both")
    opened = find_completer(tmp_path / "run", print).opened
    assert opened.files.header
    assert opened._form.suffix_first
    assert opened.index.ids.items[: opened.index.files[1].start].tolist() == [
        *opened.files.tokenize(opened.index.texts()[0][1], opened.index.files[0].name).ids,
        opened.files.tokenizer.eos,
    ]
