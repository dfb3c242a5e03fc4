"""What quantizing and pruning report: loss, size, memory and speed of both folders."""

import json
import subprocess
from dataclasses import replace

import numpy as np
import pytest
import torch

from conftest import display, refuses, write_programs
from dunes import checkpoint
from dunes.augment.options import Quantize
from dunes.cli import augment_verb
from dunes.data import PackedText
from dunes.evaluate import comparison
from dunes.evaluate.comparison import Comparison, Measurement, Speed, measure_folder
from dunes.evaluate.text_loss import calibration_ids, evaluate, evaluation_tokens, require_separate
from dunes.extra import python_command
from dunes.runs.augment import augment_folder
from dunes.runs.picture import comparison_picture
from dunes.runs.train import train
from dunes.runs.train_config import TrainConfig

SCORED = "used for both calibration and scoring"


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    return write_programs(tmp_path_factory.mktemp("programs") / "code")


@pytest.fixture(scope="module")
def run(programs, tmp_path_factory):
    """A model trained for a few steps on files, of which some are validation text."""
    out = tmp_path_factory.mktemp("compared") / "run"
    fixed = {"steps": 4, "batch": 4, "context_length": 32, "dtype": "float32", "threads": 1, "complete": False}
    train(TrainConfig(sources=(str(programs),), **fixed), out, display()[0])
    return out


@pytest.mark.slow
def test_the_verb_reports_loss_size_memory_and_speed(run, tmp_path, capsys):
    augment_verb.COMMANDS["quantize"](str(run), tmp_path / "int8", quantize=Quantize(kind="int8"))
    printed = capsys.readouterr().out
    compared = json.loads((tmp_path / "int8" / "dunes.json").read_text())["comparison"]
    for folder, side in ((run, compared["before"]), (tmp_path / "int8", compared["after"])):
        score = evaluate(checkpoint.load(folder), evaluation_tokens(checkpoint.load(run))[0])
        assert side["loss"] == pytest.approx(score.loss, abs=1e-6)
        assert side["tokens"] == score.tokens
        assert side["size"] == sum(f.stat().st_size for f in folder.glob("*.safetensors"))
        assert side["memory"] > 0
    assert 0.9 < compared["agreement"] <= 1
    assert printed.count("top-1") == 1
    for phase in ("prefill", "decode"):
        assert min(compared["speeds"][phase][side] for side in ("before", "after")) > 0
        assert f"{phase}, tokens/s" in printed
    assert f"{compared['before']['loss']:12.4f}{compared['after']['loss']:12.4f}" in printed
    assert (tmp_path / "int8" / "comparison.png").stat().st_size > 1000
    assert "comparison" not in json.loads((run / "dunes.json").read_text())


def test_a_slower_form_is_said_first_and_missing_text_is_asked_for():
    before = Measurement(1000, 5000, "the modules")
    after = replace(before, form="compiled code")
    rounds = [(100.0 + n, 40.0 + 0.4 * n) for n in range(8)]
    same, slow = Speed.of([(x, x) for x, _ in rounds]), Speed.of(rounds)
    both = lambda prefill, decode: Comparison(before, after, None, {"prefill": prefill, "decode": decode})
    assert both(same, same).warnings() == []
    assert both(same, Speed.of([(b, a) for a, b in rounds])).warnings() == []
    assert both(same, slow).warnings() == ["slower: decoding takes 2.50 times as long as before"]
    words = "slower: reading a prompt takes 2.50 times and decoding takes 2.50 times as long as before"
    assert both(slow, slow).warnings() == [words]
    lines = both(same, slow).lines()
    assert "pass --validation FILE" in lines[1]
    assert any("104          41  0.40 times [0.40, 0.40]" in line for line in lines)


def test_a_drift_of_the_machine_is_no_difference_between_models_that_take_turns(monkeypatch, tmp_path):
    calls, true = [], {"a": 100.0, "b": 100.0}

    def speeds(loaded, step, ids):
        calls.append(loaded)
        return (true[loaded] * 0.97 ** len(calls),) * 2

    monkeypatch.setattr(comparison.torch, "set_num_threads", lambda number: None)
    monkeypatch.setattr(comparison.checkpoint, "load", lambda folder: Named(folder.name))
    monkeypatch.setattr(comparison, "load_step", lambda model: None)
    monkeypatch.setattr(comparison, "_speeds", speeds)
    monkeypatch.setattr(comparison, "process_time", lambda: 0.0)
    measured = lambda: comparison.measure_speeds([tmp_path / "a", tmp_path / "b"], tmp_path / "none")
    assert not any(Speed.of(rounds).differs for rounds in measured().values())
    assert calls[:6] == ["a", "b", "b", "a", "a", "b"]
    assert len(calls) == 2 * (1 + comparison.ROUNDS[1])
    true["b"] = 120.0
    decode = Speed.of(measured()["decode"])
    assert decode.differs
    assert decode.ratio == pytest.approx(1.2, rel=0.01)
    monkeypatch.setattr(comparison, "process_time", lambda: 100.0 * len(calls))
    assert len(measured()["decode"]) == comparison.ROUNDS[0]


class Named(str):
    """A stand-in for a loaded model."""

    model = None


def test_two_models_that_memory_does_not_hold_are_not_raced(run, monkeypatch):
    ran = []
    facts = {"size": 10, "memory": 1000, "form": "the modules", "top": []}
    monkeypatch.setattr(comparison, "_run_measurement", lambda folders, scratch: ran.append(folders) or {**facts})
    monkeypatch.setattr(comparison.measure, "free_memory", lambda device: 1999)
    compared = comparison.compare_folders(run, run, None)
    assert [len(folders) for folders in ran] == [1, 1]
    assert any("speed not measured" in line for line in compared.lines())
    assert compared.warnings() == []
    comparison_picture(compared, run.parent / "picture.png")
    assert (run.parent / "picture.png").stat().st_size > 1000
    monkeypatch.setattr(comparison.measure, "free_memory", lambda device: 0)  # unknown
    with pytest.raises(TypeError):
        comparison.compare_folders(run, run, None)


def test_a_result_is_written_where_measuring_fails(run, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(comparison.sys, "executable", "false")
    augment_verb.COMMANDS["quantize"](str(run), tmp_path / "int8", quantize=Quantize(kind="int8"))
    assert f"not measured: {run}: exit status 1" in capsys.readouterr().out
    assert checkpoint.load(tmp_path / "int8").architecture.changes
    assert not (tmp_path / "int8" / "comparison.png").exists()


@pytest.mark.parametrize("packed", [False, True])
def test_a_folder_is_measured_on_the_ids_of_a_file(run, tmp_path, packed):
    loaded = checkpoint.load(run)
    ids = np.asarray(evaluation_tokens(loaded)[0])[:200]
    text = PackedText(ids, np.array([0, 50, 120]), loaded.require_tokenizer().eos) if packed else ids
    comparison._write_ids(tmp_path / "ids.npz", text)
    found = measure_folder(run, tmp_path / "ids.npz")
    assert found["loss"] == pytest.approx(evaluate(loaded, text).loss, abs=1e-6)
    assert len(found["top"]) == 200
    assert measure_folder(run, tmp_path / "none.npz")["loss"] is None


def test_text_that_is_scored_does_not_calibrate(run, programs, tmp_path):
    file = programs / "module_3.py"
    same = {"calibration": [str(file)], "validation": [str(file)]}
    refuses(SCORED, augment_folder, run, tmp_path / "out", "prune", sparsity=0.5, **same)
    assert not (tmp_path / "out").exists()
    loaded = checkpoint.load(run)
    require_separate(loaded, [], [])
    assert loaded.card["trained"]["split"] == "files"
    refuses("used for both calibration", require_separate, loaded, [str(programs)], [])


def test_where_tails_are_scored_the_rest_of_each_document_calibrates(tmp_path):
    texts = [tmp_path / f"{i}.txt" for i in range(4)]  # of which one is not for calibration
    for name, text in zip("abcd", texts, strict=True):
        text.write_text("".join(f"{name}{i}\n" for i in range(300)) + f"{name.upper()}\n" * 30)
    fixed = {"steps": 1, "batch": 2, "context_length": 16, "dtype": "float32", "threads": 1, "split": "tails"}
    train(TrainConfig(sources=tuple(map(str, texts)), **fixed), tmp_path / "run", display()[0])
    loaded = checkpoint.load(tmp_path / "run")
    assert loaded.card["trained"]["split"] == "tails"
    words = loaded.require_tokenizer().decode(calibration_ids(loaded).flatten().tolist())
    assert not set("AB") & set(words)
    assert set("ab") <= set(words)
    ids = calibration_ids(loaded, [str(text) for text in texts], 10**6)  # of documents that are named, too
    assert not set("ABCD") & set(loaded.require_tokenizer().decode(ids.flatten().tolist()))


def test_records_and_files_with_a_scored_text_do_not_calibrate(run, programs, tmp_path):
    loaded, text = checkpoint.load(run), (programs / "module_3.py").read_text()
    others = [f"def other_{i}(): pass\n" * 40 for i in range(20)]
    records = {"a": [text.strip(), *others[:9]], "b": [*others[9:], f"{text}\n\n"], "c": others[:9]}
    for name, texts in records.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    file, a, b, c = str(programs / "module_3.py"), *(str(tmp_path / f"{name}.jsonl") for name in "abc")
    for calibration, validation in ((a, file), (file, a), (a, b), (b, a), (c, a)):
        refuses(SCORED, require_separate, loaded, [calibration], [validation])
    require_separate(loaded, [c], [file])
    require_separate(loaded, [c], [b])


@pytest.mark.parametrize("name", ["quantize", "narrow"])
def test_a_model_whose_logits_are_no_numbers_is_refused_before_the_work(run, tmp_path, name):
    loaded = checkpoint.load(run)
    with torch.no_grad():
        loaded.model.norm.weight[3] = torch.nan
    checkpoint.save(loaded.model, tmp_path / "nan", loaded.tokenizer, 32, loaded.card)
    request = {"kind": "int8"} if name == "quantize" else {"blocks": 1, "calibration": ()}
    words = "its logits are not finite; dunes inspect --values"
    refuses(words, augment_folder, tmp_path / "nan", tmp_path / "out", name, **request)
    assert not (tmp_path / "out").exists()


def test_a_child_has_the_modules_of_its_parent_and_not_of_the_working_directory(tmp_path, monkeypatch):
    (tmp_path / "json.py").write_text("raise SystemExit(7)")
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "beside.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path / "own")
    command, environment = python_command("-c", "import json, beside")
    assert subprocess.run(command, env=environment, cwd=tmp_path).returncode == 0
