"""One thread in each worker, a private cache, and small things that many tests need."""

import gc
import json
import os
import re
import subprocess
import sys
import time

# Else MKL's kernels on AMD depend on alignment and shape, and equal products differ in their last bits.
os.environ.setdefault("MKL_CBWR", "AVX2")

from functools import partial
from io import StringIO
from pathlib import Path
from textwrap import dedent

import pytest
import tokenizers
import torch
from rich.console import Console
from tokenizers import decoders, models, pre_tokenizers, processors

from dunes import measure
from dunes.cli.main import main
from dunes.inference.text_generator import sample_text
from dunes.ops.float32_products import repeat_choice
from dunes.progress import Display
from dunes.runs import run as run_module
from dunes.runs.train import train
from dunes.runs.train_config import TrainConfig
from dunes.text import Tokenizer

torch.set_num_threads(1)


def pytest_collection_finish() -> None:
    """What has been imported stays: 800,000 objects that each full collection would look at in vain."""
    gc.collect()
    gc.freeze()


LONG = re.compile(
    r"""
    test_allocations.py::test_(what_is_foreseen_is_what_is_seen.*train_allocations.*bfloat16|memory_of_a_model_too)
    | test_allocations.py::test_the_process_grows_by_what_tensors_hold
    | test_autosize.py::test_the_estimate_of_memory_grows
    | test_bench.py::test_a_table_or_one_json
    | test_benchmarks.py::test_completion_is_trained
    | test_ranks.py::test_(a_process_that_does_not_answer|two_processes_finetune_as_one.(qlora|dora))
    | test_ranks.py::test_several_processes_train_as_one.(4-changes0|2-changes2)
    | test_ranks.py::test_any_number_of_processes_loads_what_any_number_saved.variables0
    | test_step.py::test_a_step_is_compiled_in_the_background
    | test_compile.py::test_loss_and_forward_are.*(adapters.on.experts|experts.whose.sides|such.experts|nf4)
    | test_export_native.py::test_its_tokenizers_are_those_of_python.bpe
    | test_pace.py::test_the_same_command_has_the_same_losses
    | test_completion.py::test_a_model_that_is_worse_than_copying_does_not_complete.*auto-True
    | test_fim.py::test_thousands_of_windows
    | test_finetune.py::test_fewer_rows_at_once
    | test_gguf.py::test_an_adapter_of_a_file_opens_with_it_alone.qlora
    | test_prune_folders.py::test_zeros_stay_in_training_that_is_stopped
    | test_recipes.py::test_(zig|expand)$
    | test_runs.py::test_what_was_chosen_is_kept
    | test_speculate.py::test_the_drawn_distribution_is_the_models.settings1
    | test_speculate.py::test_greedy_text_is_the_plain_one_after_200_random_prompts.(look-up,|another)
    | test_step.py::test_the_exported_step_gives_the_models_logits(?!.*-(llama|mixtral|lora)])
    | test_tokenizer_conversion.py::test_shipped_tekken.*240718
""",
    re.VERBOSE,
)
"""Long tests, beside those with the mark: each takes 5 to 140 s."""


SLOW = re.compile(
    r"""
    test_endpoint.py::test_one_and_sixteen.*anthropic
    | test_finetune.py::test_(a_run_by_the_clock|each_method.*(dora|pissa|lora-experts))
    | test_moe.py::test_the_grouped_product_is_an_operator
    | test_operation.py::test_(graphs_read|products_of_experts_pass)
    | test_parts.py::test_changed_scores_compile.*alibi
    | test_preferences.py::test_stopped_and_resumed.*lora
    | test_recipes.py::test_mixtral_tiny
    | test_runs.py::test_the_rest_of_a_line_is_learned
    | test_tokenizer_conversion.py::test_shipped_tekken.*240911
""",
    re.VERBOSE,
)
"""Slow tests, beside those with the mark: 2 to 6 s each, and a faster one beside them is of the same class."""
FIRST = re.compile(r"test_(real_\w+|editors|studio\w*|notebooks|recipes|cli|train_from)\.py")
"""Files whose slow tests begin, so that they are not among those for which time is lacking."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Long tests are skipped, with their names, unless asked for. Slow ones have more time and an order."""
    items.sort(key=lambda item: not FIRST.search(item.nodeid))  # stable
    for item in filter(lambda item: SLOW.search(item.nodeid), items):
        item.add_marker(pytest.mark.slow)
    for item in filter(lambda item: item.get_closest_marker("long") or LONG.search(item.nodeid), items):
        item.add_marker(pytest.mark.slow)
        item.add_marker(pytest.mark.long)
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(400))
    if "long" not in config.option.markexpr:
        for item in items:
            if item.get_closest_marker("long"):
                item.add_marker(pytest.mark.skip(reason=f"long: pytest -m long {item.nodeid}"))


START, MINUTES = time.monotonic(), float(os.environ.get("DUNES_TEST_MINUTES", "inf"))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Where a machine is too slow for all slow tests in $DUNES_TEST_MINUTES, the rest is skipped and listed."""
    if item.get_closest_marker("slow") and time.monotonic() - START > 60 * MINUTES:
        pytest.skip(f"after {MINUTES:g} minutes: pytest -m slow {item.nodeid}")


@pytest.fixture(autouse=True, scope="session")
def _private_cache(tmp_path_factory: pytest.TempPathFactory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DUNES_HOME", str(tmp_path_factory.getbasetemp() / "dunes-home"))
        patch.setenv("DUNES_CONFIG", "")
        yield


@pytest.fixture(autouse=True)
def _threads(monkeypatch: pytest.MonkeyPatch):
    """Verbs that are called in this process neither measure nor change its number of threads; runs set theirs."""
    monkeypatch.setattr("dunes.measure.use_best_threads", lambda: None)
    yield
    torch.set_num_threads(1)
    repeat_choice(None)


@pytest.fixture
def draws():
    """A test with this fixture has real pictures of its runs."""


@pytest.fixture(autouse=True)
def _short_samples(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch):
    """Samples and pictures take most of a small run."""
    monkeypatch.setattr("dunes.runs.train.sample_text", partial(sample_text, max_tokens=2))
    if "draws" not in request.fixturenames:
        monkeypatch.setattr(run_module, "loss_picture", lambda records, score, step, path: path.touch())
        monkeypatch.setattr(run_module, "load_picture", lambda records, path: False)


@pytest.fixture(autouse=True)
def _denormal_numbers():
    """Runs flush them to zero for the whole process; a test finds them as they usually are."""
    yield
    torch.set_flush_denormal(False)


@pytest.fixture
def code(tmp_path: Path) -> Path:
    """A folder of forty small made-up programs."""
    return write_programs(tmp_path / "code")


def write_programs(folder: Path) -> Path:
    folder.mkdir()
    for i in range(40):
        lines = [f"def task_{i}_{j}(value, limit={j}):\n    return value * {i + j} + limit\n" for j in range(12)]
        (folder / f"module_{i}.py").write_text("\n".join(lines))
    return folder


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Runs `dunes` with these arguments in this process: its exit code, output and errors."""

    def run(*arguments) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["dunes", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code, *capsys.readouterr()

    return run


def refuses_command(words, outcome):
    """A command ended with status 2 and one line that has these words."""
    status, _, error = outcome
    assert (status, error.count("\n")) == (2, 1), error
    assert error.startswith("dunes: ")
    assert words in error


def metaspace_tokenizer() -> Tokenizer:
    """A tokenizer as LLaMA's first: a space before each text, which lines do not separate, and a BOS."""
    characters = [chr(i) for i in range(32, 127) if i != 32] + ["\n", "▁"]
    vocab = {token: i for i, token in enumerate(["<s>", "</s>", "<unk>", *characters, "▁d", "▁v"])}
    inner = tokenizers.Tokenizer(models.BPE(vocab, [("▁", "d"), ("▁", "v")], unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    inner.decoder = decoders.Metaspace()
    inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    inner.add_special_tokens(["<s>", "</s>"])
    return Tokenizer(inner)


def data(name: str) -> Path:
    """A file of the test data, or a skip where there is none."""
    root = os.environ.get("DUNES_TEST_DATA")
    if not root:
        pytest.skip("DUNES_TEST_DATA is not set")
    return Path(root) / name


def toy(code, **changes):
    fixed = {"sources": (str(code),), "size": "60k", "context_length": 32, "batch": 4, "steps": 12}
    fixed |= {"vocab_size": 300} if changes.get("tokenizer", "bpe") == "bpe" else {}
    return TrainConfig(**fixed | {"dtype": "float32", "threads": 1, "complete": False} | changes)


def change_json(path: Path, **changes) -> None:
    """Give these keys of a JSON file other values, which a function makes of the old one; ... removes one."""
    content = json.loads(path.read_text())
    content |= {key: value(content[key]) if callable(value) else value for key, value in changes.items()}
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not ...}))


def display():
    out = StringIO()
    return Display(Console(file=out, width=100)), out


def training_output(config, folder, status=0, **options) -> str:
    """What a training prints that ends with this status."""
    show, out = display()
    assert train(config, folder, show, **options) == status
    return out.getvalue()


def eventually(check, seconds=20.0, pause=0.05):
    """True once the check succeeds, False if it does not within this time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if check():
            return True
        time.sleep(pause)
    return False


def run_python(script, *arguments, **options):
    """A process of Python that has run this script."""
    command = [sys.executable, "-c", dedent(script), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, **options)


def run_dunes(*arguments, **options):
    """A process that has run `dunes` with these arguments."""
    command = [sys.executable, "-m", "dunes", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, **options)


def message(content) -> bytes:
    """A message to a language server, with its header."""
    data = json.dumps(content).encode()
    return b"Content-Length: %d\r\n\r\n" % len(data) + data


def refuses(words, call, /, *arguments, **options) -> str:
    """The message of a call that is refused: on one line, with these words, which are a regular expression."""
    with pytest.raises(ValueError, match=words) as error:
        call(*arguments, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


def refused(read, path) -> str:
    """The line with which a file is refused, printable, not long, and without much memory."""
    cpu = torch.device("cpu")
    before, begin = measure.reset_peak_memory(cpu), time.perf_counter()
    line = refuses("refused", read, path)
    took, grown = 1e3 * (time.perf_counter() - begin), measure.peak_memory(cpu) - before
    print(f"{took:7.2f} ms, {grown / 1e6:5.1f} MB: {line.removeprefix(str(path))[:110]}")
    assert line.startswith(f"{path}: ")
    assert line.isprintable()
    assert len(line) < 600 + len(str(path))
    assert grown < 64 << 20
    return line


def count_readable(read, path, mutants) -> int:
    """How many of these damaged files are read all the same; the others are refused, as `refused` has it."""
    cpu = torch.device("cpu")
    before, worst, kept, lines = measure.reset_peak_memory(cpu), 0.0, 0, set()
    for data in mutants:
        path.write_bytes(data)
        begin = time.perf_counter()
        try:
            lazy = read(path)
            kept += 1
        except ValueError as error:
            lazy = {}
            lines.add(str(error))
        worst = max(worst, time.perf_counter() - begin)
        assert all(stored.read().nbytes == stored.nbytes for stored in lazy.values())
    grown = measure.peak_memory(cpu) - before
    print(f"{kept} mutants are legal, slowest {1e3 * worst:.2f} ms, memory grew by {grown / 1e6:.1f} MB")
    assert all(line.isprintable() for line in lines)
    assert grown < 64 << 20
    return kept


def equal_states(a, b):
    """Two tensors, or dictionaries and lists of values, have the same names, types and numbers."""
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal_states(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(equal_states, a, b))
    return type(a) is type(b) and a == b


def raising(error, call=None, when=lambda *_: True):
    """A function that raises this error, or calls `call` where `when` is false of the arguments."""

    def function(*arguments, **options):
        if when(*arguments):
            raise error
        return call(*arguments, **options)

    return function
