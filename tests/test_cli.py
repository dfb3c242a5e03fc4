"""The command, as a person types it."""

import inspect
import io
import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from pkgutil import resolve_name
from typing import get_args

import pytest

from conftest import refuses_command, run_python
from dunes import checkpoint
from dunes.bench.subject import of_shape
from dunes.cli import hints
from dunes.cli import main as cli
from dunes.cli.user_config import REPEATED
from dunes.completion.completer import FolderCompleter
from dunes.generate import sampler
from dunes.inference.text_generator import TextGenerator
from dunes.measure import DEVICES
from dunes.models import FAMILIES
from dunes.models.initialise import initialise
from dunes.runs import config, finetune_config, train_config
from dunes.runs.finetune_config import METHODS
from dunes.text import KINDS, Tokenizer
from dunes.text.templates import TEMPLATES
from dunes.units import plural


def test_help_comes_without_torch_and_each_verb_shows_an_example():
    script = """
        import sys
        from contextlib import suppress
        from dunes.cli import main
        for verb in sys.argv[1:]:
            print("\\0")
            with suppress(SystemExit):
                main.run_command([*verb.split(), "--help"])
            assert verb == "bench" or "torch" not in sys.modules, verb
    """
    verbs = sorted(("", *cli.VERBS), key=lambda verb: verb == "bench")  # its registry holds what computes
    done = run_python(script, *verbs)
    assert done.returncode == 0, done.stderr
    for verb, text in zip(verbs, done.stdout.split("\0")[1:], strict=True):
        assert f"dunes {verb}".strip() in text
        assert "Example: dunes" in text
        others = {name.removeprefix(f"{verb}:") for names in hints.OPTIONS.values() for name in names.split()}
        assert others.isdisjoint(re.findall(r"--([\w-]+)", text)), verb


def test_the_version_comes_without_torch():
    script = "import sys; from dunes.cli.main import main\ntry: main()\n"
    script += "finally: assert not {'torch', 'numpy'} & sys.modules.keys()"
    done = run_python(script, "--version")
    assert (done.returncode, done.stderr) == (0, "")
    assert re.fullmatch(rf"dunes {re.escape(version('astral-dunes'))} \(torch \S+, Python \S+\)\n", done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("verb", [("generate",), ("chat", "hi"), ("complete", f"{__file__}:5:3")])
def test_text_begins_without_modules_that_are_slow_to_import(verb, tmp_path):
    """Beyond those of torch itself: compilers, and what only longer work needs."""
    card = {"template": "chatml"}
    model = initialise(of_shape("arcee", 20_000, 64).outline())
    checkpoint.save(model, tmp_path / "model", Tokenizer.train("bytes", ()), 64, card)
    script = (
        "import sys, torch; before = set(sys.modules); from dunes.cli import main\n"
        "try: main.main()\n"
        "finally: print('\\nadded', *sorted(set(sys.modules) - before))"
    )
    done = run_python(script, verb[0], tmp_path / "model", *verb[1:])
    assert done.returncode == 0, done.stderr
    added = done.stdout.splitlines()[-1].split()
    slow = {"sympy", "rich", "matplotlib", "pandas", "huggingface_hub", "http", "asyncio"}
    assert slow.isdisjoint(added)
    assert [name for name in added if name.startswith("torch.")] == ["torch.utils._device"]
    assert "dunes.generate.decode" in added


def test_the_choices_of_flags_are_those_of_the_code():
    assert get_args(train_config.Tokenization) == KINDS
    assert get_args(config.Device) == DEVICES
    assert set(get_args(finetune_config.Method)) == set(METHODS)
    assert set(get_args(finetune_config.TemplateName)) == set(TEMPLATES)


def test_a_flag_at_its_default_counts_as_asked_for(monkeypatch, user_file):
    """So that resuming refuses what is not as in the run, and does not pass over it."""
    seen = {}
    user_file.write_text("[finetune]\nminutes = 30")
    work = lambda config, *_, **named: seen.update(named, minutes=config.minutes) or 0
    monkeypatch.setattr("dunes.runs.finetune.finetune", work)
    line = "finetune m --rank=16 --no-packing --epochs 3 --out run --resume"
    assert cli.run_command(line.split()) == 0
    assert seen["asked"] == {"model", "rank", "packing", "epochs"}
    assert (seen["resume"], seen["minutes"]) == (True, 0)


def test_families_are_the_same_in_help_docs_and_code():
    root = Path(__file__).parent.parent
    for file in ("docs/training-options.md", "docs/model-formats.md"):
        text = (root / file).read_text()
        assert [f for f in FAMILIES if f"`{f}`" not in text and f"{f}.py" not in text] == [], file


def test_generate_imports_neither_training_nor_templates():
    script = (
        "import sys; from dunes.cli.main import run_command\n"
        "try: run_command(['generate', 'nowhere'])\n"
        "except ValueError: print(*{'dunes.cli.training', 'dunes.data', 'jinja2', 'torch'} & sys.modules.keys())"
    )
    assert run_python(script).stdout == "torch\n"


def test_errors_of_a_verb_name_the_options_of_others(capsys):
    """They are printed once."""
    with pytest.raises(SystemExit, match="2"):
        cli.run_command(["generate", "m", "--rank", "4", "--steps", "x"])
    printed, errors = capsys.readouterr()
    assert (printed, errors.count("Unrecognized options")) == ("", 1)
    assert "in dunes train --help" in errors


UNDO = ("--undo", "nowhere", "out")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train", "nowhere", "--out", "run"], "nowhere: no such file or folder"),
        (["train", "--out", "run"], "no sources"),
        (["train", "x", "--out", "run", "--size", "huge"], "--size is 'huge'"),
        (["train", "x", "--out", "run", "--batch", "-1"], "--batch is -1; it must be at least 1"),
        (["train", "x", "--out", "run", "--track", "x"], "--track 'x': expected one of tensorboard, wandb, "),
        (["train", "x", "--out", "run", "--track", "mlflow"], "mlflow cannot be imported"),
        (["finetune", "x"], "--out is missing"),
        (["finetune", "x", "--out", "run"], "the data is missing"),
        (["--completion", "csh"], "expected bash, zsh or fish"),
        (["generate", "nowhere", "- see lora.block_size"], "nowhere: no such folder"),
        (["chat", "nowhere", "--", "--model"], "nowhere: no such folder"),
        (["generate", "nowhere", "--max-tokens", "-1"], "--max-tokens is -1; it must be at least 1"),
        (["complete", "nowhere", "file"], "expected FILE:LINE:COLUMN"),
        (["complete", "nowhere", f"{__file__}:1:999"], "outside the line, which ends at column"),
        (["serve", "-c", "9", "-m", "x"], "MODEL without an option (smollm2, a file or a folder) for -m"),
        (["finetune", "m", "--train.max_steps=4", "--out_dir", "a"], "--steps for --train.max_steps, --out for"),
        (["train", "--out", "a", "--data", "b"], "SOURCE without an option for --data"),
        (["bench", "compare", "a.jsonl", "b.jsonl"], "no such file"),
        (["augment", "expand", *UNDO, "--blocks", "2", "--after", "1"], "--blocks and --after"),
        (["augment", "experts", *UNDO, "--split", "cluster"], "--split"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(arguments, words, tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "mlflow", None)
    refuses_command(words, command(*arguments))
    assert not (tmp_path / "run").exists()


def test_a_number_of_processes_that_is_none_is_named(command, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "x")
    refuses_command("WORLD_SIZE", command("-h"))


def test_who_stops_reading_is_told_nothing():
    script = "from dunes.cli.process import exit_with; exit_with(lambda: print('line'), 'dunes')"
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([sys.executable, "-c", script], stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert done.stderr == ""
    assert done.returncode == 141


def test_train_generate_complete_eval(code, tmp_path, command, monkeypatch):
    for name, count in (("PLACES", 100), ("CURSORS", 16)):
        monkeypatch.setattr(f"dunes.completion.fit.{name}", (0.0, count, count))
    run, options = tmp_path / "run", ("--steps", 20, "--size", "60k", "--context-length", 32, "--threads", 1)
    status, printed, errors = command("train", code, "--out", run, *options)
    assert status == 0, errors
    assert "done after 20 steps" in printed
    loaded, file = checkpoint.load(run), code / "module_1.py"
    text = TextGenerator(loaded).text("def ", 9, sampler(0.8, top_k=50, seed=1))
    _, printed, errors = command("generate", run, "def ", "--max-tokens", 9, "--seed", 1)
    assert printed == f"def {text}\n"
    prompt = plural(len(loaded.tokenizer.prompt("def ")), "token")
    rates = rf"prompt: {prompt}, [\d.k]+ tokens/s; generated: 9 tokens, [\d.k]+ tokens/s\n"
    assert re.fullmatch(rates, errors)
    rest = FolderCompleter(run).complete(file.read_text()[:4]).text
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(file.read_bytes()[:4])))
    assert command("complete", run)[1] == f"{rest}\n"
    assert "bits/byte" in command("eval", run, file)[1]


PAGE = Path(__file__).parent.parent / "docs" / "command.md"


@pytest.fixture
def user_file(tmp_path, monkeypatch):
    """The user's file of defaults, with the example of the documentation."""
    monkeypatch.setenv("DUNES_CONFIG", str(tmp_path / "user.toml"))
    (tmp_path / "user.toml").write_text(PAGE.read_text().partition("```toml\n")[2].partition("```")[0])
    return tmp_path / "user.toml"


@pytest.mark.parametrize(("options", "expected", "asked"), [
    ("x", (30, 4, False), {"sources"}),
    ("x --threads=2 --complete", (30, 2, True), {"sources", "threads", "complete"}),
    ("x --steps 3", (15, 4, False), {"sources", "steps"}),
    ("x --minutes 15", (15, 4, False), {"sources", "minutes"}),
    ("--resume", (30, 4, False), set()),
])  # fmt: skip
def test_a_users_file_counts_less_than_flags_and_than_what_a_run_recorded(
    options, expected, asked, user_file, monkeypatch, capsys
):
    runs = []
    user_file.write_text(user_file.read_text().replace("minutes", 'from = "m"\nminutes'))
    monkeypatch.setattr("dunes.runs.train.train", lambda config, *_, **named: runs.append((config, named)) or 0)
    assert cli.run_command(["train", *options.split(), "--out", "r", "--dry-run"]) == 0
    ((run, named),) = runs
    assert (run.minutes, run.threads, run.complete) == expected
    assert (named["asked"], named["track"]) == (asked, ("tensorboard", "wandb"))
    assert capsys.readouterr().out.startswith(f"from {user_file}: --")


@pytest.mark.parametrize(("text", "arguments"), [
    ("[trian]", "augment merge a b"), ("train = 1", "train x"), ("[augment.quantise]", "augment quantize a b"),
    ("[train]\nminuts = 1", "train x"), ("[train]\nminutes = '1'", "train x"), ("[train", "train x"),
    ("[train]\nthreads = true", "train x"), ("[augment.quantize]\nkind = 'int9'", "augment quantize a b"),
    ("[train]\nparts = ['mlp=gated']", "train x --out r --family llama"),
])  # fmt: skip
def test_a_mistake_in_a_users_file_is_named_with_its_path(text, arguments, user_file, command):
    user_file.write_text(text)
    status, _, error = command(*arguments.split())
    assert (status, str(user_file) in error) == (2, True)
    assert command("train", "-h")[0] == 0


def test_help_shows_pages_and_verbs_and_names_the_nearest(command):
    assert "\ncommand                 Set up the command\n" in command("help")[1]
    assert command("help", "command")[1].strip() == PAGE.read_text().strip()
    assert "dunes augment quantize" in command("help", "augment", "quantize")[1]
    refuses_command("quantization", command("help", "quantisation"))


def test_the_flags_that_are_repeated_are_known_to_the_users_file():
    commands = [resolve_name(f"dunes.cli.{path}") for path in (*cli.VERBS.values(), "training:RunOptions")]
    parameters = [p for command in commands for p in inspect.signature(command).parameters.values()]
    repeated = {p.name for p in parameters if "UseAppendAction" in str(getattr(p.annotation, "__metadata__", ""))}
    assert repeated == REPEATED
