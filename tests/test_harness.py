"""Tasks of lm-evaluation-harness: our answers beside those of its own backend for the same folder."""

import json
import os
import string
import sys
import warnings
from functools import partial

import pytest
import tokenizers
import yaml
from tokenizers import processors

from conftest import change_json, display, refuses, run_dunes, toy
from dunes.evaluate.tasks import run_tasks
from dunes.runs.train import train

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]
OFFLINE = {"HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1"}
LIMIT = 1e-4
CONTEXT = 48
LIKELIEST = string.ascii_letters + string.digits + " \n_().,:=*+"  # one of them is
LONG = "".join(f"def task_{i}(value, limit={i}):\n    return value * {i} + limit\n\n" for i in range(9))
GREEDY = {"do_sample": False, "temperature": 1}

TASKS = {
    "choices": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{text}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{right}}",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "texts": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": m} for m in ("word_perplexity", "byte_perplexity", "bits_per_byte")],
    },
    "lines": {
        "output_type": "generate_until",
        "doc_to_text": "{{text}}",
        "doc_to_target": "{{rest}}",
        "generation_kwargs": GREEDY | {"until": ["\n\n", "limit)"], "max_gen_toks": 20},
        "metric_list": [{"metric": "exact_match"}],
    },
    "words": {
        "output_type": "generate_until",
        "doc_to_text": "{{text}}",
        "doc_to_target": "{{rest}}",
        "generation_kwargs": {"until": "value", "max_new_tokens": 9, "repetition_penalty": 1.5},
        "metric_list": [{"metric": "exact_match"}],
    },
}
DOCUMENTS = {
    "choices": [
        {"text": "def task_1_2", "choices": [" (value, limit=2):", " import os", " x"], "right": 0},
        {"text": "    return value *   ", "choices": ["3 + limit", "  spaces", "é + ü"], "right": 0},
        {"text": "", "choices": ["def task", "return"], "right": 0},
        {"text": "<|endoftext|>def task_3", "choices": ["_1(", "<|endoftext|>"], "right": 0},
        {"text": "<|im_start|>def task_3", "choices": ["_1(", "x"], "right": 0},
        {"text": "", "choices": ["<|im_start|>def", "<|endoftext|>def"], "right": 0},
        {"text": LONG + "\ndef task_9(", "choices": ["A", "B", "C", "D"], "right": 3},
        {"text": LONG[:CONTEXT], "choices": [LONG[60:80], "\n\n"], "right": 1},
        {"text": "def task_1_1(value, limit=1", "choices": ["):\n    return ", "x"], "right": 0},
        {"text": "def task_1_1(value, limit=1", "choices": list(LIKELIEST), "right": 0},
    ],
    "texts": [{"text": t} for t in (LONG, "x", "naïve café\n", LONG[:47], "<|endoftext|>" + LONG[:90])],
    "lines": [
        {"text": t, "rest": "value, limit=2):"}
        for t in ("def task_1_", LONG, "def ", "import os\n", LONG[:61], "    return value")
    ],
    "words": [{"text": t, "rest": "("} for t in ("def task_1_", LONG, "x")],
}


@pytest.fixture(scope="module")
def lm_eval():
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, value in OFFLINE.items():
            patch.setenv(name, value)
        import lm_eval.tasks

        # Reading the harness's own thousands of tasks takes seconds each time.
        patch.setattr(lm_eval.tasks, "TaskManager", partial(lm_eval.tasks.TaskManager, include_defaults=False))
        yield lm_eval


@pytest.fixture
def tasks(tmp_path):
    """A folder of four tasks and their documents."""
    folder = tmp_path / "tasks"
    folder.mkdir()
    for name, words in TASKS.items():
        write_task(folder, name, words, DOCUMENTS[name])
    return folder


def write_task(folder, name, words, documents):
    (folder / f"{name}.json").write_text("\n".join(map(json.dumps, documents)))
    data = {"data_files": {"test": str(folder / f"{name}.json")}, "cache_dir": str(folder / "cache")}
    words = {"task": f"dunes_{name}", "dataset_path": "json", "dataset_kwargs": data, "test_split": "test"} | words
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(words))


def trained(code, folder, family="arcee", tokenizer="bpe"):
    config = toy(code, family=family, tokenizer=tokenizer, context_length=CONTEXT, steps=60)
    assert train(config, folder, display()[0]) == 0
    return folder


def with_first_token(folder):
    """As if the folder were somebody else's whose tokenizer puts a token before every text."""
    first, path = "<|im_start|>", str(folder / "tokenizer.json")
    inner = tokenizers.Tokenizer.from_file(path)
    marks = [(first, inner.token_to_id(first))]
    inner.post_processor = processors.TemplateProcessing(single=f"{first} $A", special_tokens=marks)
    inner.save(path)
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        change_json(folder / name, bos_token=first)
    (folder / "dunes.json").unlink()


KINDS = [("arcee", "bpe", False), ("gpt2", "bytes", False), ("gpt2", "bpe", False), ("arcee", "bytes", True)]


@pytest.mark.parametrize(("family", "tokenizer", "first"), KINDS)
def test_answers_and_metrics_are_those_of_the_hf_backend(family, tokenizer, first, lm_eval, tasks, code, tmp_path):
    folder = trained(code, tmp_path / "run", family, tokenizer)
    if first:
        with_first_token(folder)
    names = [f"dunes_{name}" for name in TASKS]
    ours = run_tasks(folder, names, display()[0], task_folder=tasks)
    theirs = lm_eval.simple_evaluate(
        model="hf",
        model_args={"pretrained": str(folder), "dtype": "float32"},
        device="cpu",
        tasks=names,
        task_manager=lm_eval.tasks.TaskManager(include_path=str(tasks)),
    )
    largest, count, greedy = 0.0, 0, set()
    for name in names:
        for mine, other in zip(ours["samples"][name], theirs["samples"][name], strict=True):
            assert mine["arguments"] == other["arguments"]
            for (one,), (two,) in zip(mine["resps"], other["resps"], strict=True):
                assert type(one) is type(two)
                if isinstance(one, str):
                    assert one == two
                    continue
                nats = [x if isinstance(x, float) else x[0] for x in (one, two)]
                if isinstance(one, tuple):
                    assert one[1] == two[1], "is_greedy"
                    greedy.add(one[1])
                largest, count = max(largest, abs(nats[0] - nats[1])), count + 1
        for metric, value in theirs["results"][name].items():
            want = pytest.approx(value, rel=LIMIT) if isinstance(value, float) else value
            assert ours["results"][name][metric] == want
    print(f"{family}, {tokenizer}: {count} log-likelihoods differ by at most {largest:.1e} nats")
    assert largest <= LIMIT
    assert greedy == {True, False}
    assert any(ours["samples"]["dunes_lines"][i]["resps"] != [[""]] for i in range(6))


def test_sampling_is_repeatable(lm_eval, tasks, code, tmp_path):
    folder, settings = trained(code, tmp_path / "run"), {"do_sample": True, "temperature": 2.0, "max_gen_toks": 12}
    words = {"task": "sampled", "generation_kwargs": settings}
    write_task(tasks, "sampled", TASKS["lines"] | words, DOCUMENTS["lines"])

    def answers(task):
        found = run_tasks(folder, [task], display()[0], task_folder=tasks)["samples"][task]
        return [sample["resps"] for sample in found]

    assert answers("sampled") == answers("sampled") != answers("dunes_lines")


def test_the_command_prints_a_table_and_keeps_the_full_results(lm_eval, tasks, code, tmp_path):
    folder, out = trained(code, tmp_path / "run"), tmp_path / "full.json"
    names = ["--tasks", "dunes_choices,dunes_lines", "dunes_texts", "--task-folder", tasks, "--limit", 5]
    done = run_dunes("eval", folder, *names, "--out", out, env=os.environ | OFFLINE, timeout=200)
    assert done.returncode == 0, done.stderr
    full = json.loads(out.read_text())
    accuracy = f"{full['results']['dunes_choices']['acc,none']:.4f}"
    assert any("dunes_choices" in line and accuracy in line for line in done.stdout.splitlines())
    assert "bits_per_byte" in done.stdout
    assert len(full["samples"]["dunes_choices"]) == 5
    assert done.stdout.endswith(f"full results: {out}\n")
    assert "truncated on the left to the context length of 48 tokens" in done.stdout


def refused(*arguments, **options):
    return refuses(r".", run_tasks, *arguments, display()[0], **options)


WRITING = TASKS["lines"]["generation_kwargs"]
WRONG = {
    "no token of its own": ("choices", {}, [{"text": "    return val", "choices": ["ue", "x"], "right": 0}]),
    "does not fit into the model's context": ("choices", {}, [{"text": "x", "choices": [LONG, "y"], "right": 0}]),
    "leave no room": ("lines", {"generation_kwargs": WRITING | {"max_gen_toks": 48}}, DOCUMENTS["lines"]),
    "has num_beams": ("lines", {"generation_kwargs": WRITING | {"num_beams": 2}}, DOCUMENTS["lines"]),
    "without a temperature": ("lines", {"generation_kwargs": {"do_sample": True}}, DOCUMENTS["lines"]),
}


def test_mistakes_are_told_in_one_line(lm_eval, tasks, code, tmp_path):
    folder, here = trained(code, tmp_path / "run"), {"task_folder": tasks}
    assert "--tasks: unknown task 'dunes_choice'" in refused(folder, ["dunes_choice"], **here)
    assert "--limit is 0" in refused(folder, ["dunes_choices"], **here, limit=0)
    assert "--task-folder" in refused(folder, ["dunes_choices"], task_folder=tmp_path / "none")
    assert "--out" in refused(folder, ["dunes_choices"], **here, out=tmp_path / "none" / "full.json")
    assert "not a model folder" in refused(tmp_path, ["dunes_choices"], **here)
    for message, (name, words, documents) in WRONG.items():
        write_task(tasks, "changed", TASKS[name] | {"task": "changed"} | words, documents)
        assert message in refused(folder, ["changed"], **here)


def test_without_the_extra_its_name_is_told(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert "'astral-dunes[eval]'" in refused(tmp_path, ["hellaswag"])
