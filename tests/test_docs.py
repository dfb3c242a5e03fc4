"""Every command and every Python block of README.md and docs/ runs, at toy size, in the order of its page.

A page runs in a folder of its own. What its commands read and did not write before is a toy (STAND_INS), and
options that make the work small follow from the verb (SMALL). What is not run is listed with its reason (NOT_RUN).
"""

import io
import json
import random
import re
import shlex
import shutil
import signal
import sys
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import own_networks
from dunes import checkpoint
from dunes.augment import apply_change, attach, quantize
from dunes.bench import BENCHMARKS
from dunes.cli.main import run_command
from dunes.data.batches import Rows
from dunes.data.mnist_files import drawn_digits
from dunes.models import mistral
from dunes.models.initialise import initialise
from dunes.models.mnist import mlp
from dunes.parts import GatedMLP
from dunes.serve import http
from dunes.text import Tokenizer
from dunes.train import Trainer, cross_entropy, muon, next_token
from native_files import write_native

ROOT = Path(__file__).parent.parent
PAGES = {path.name: path for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))}
COMMAND = re.compile(r"(\S+/bin/\w+|build/dunes|dunes|python3?|pip|make|cmake|cat|torchrun)(\s|$)")

NOT_RUN = {
    "make *": "installs from the network",
    "python3 -m venv *": "installs from the network",
    "pip install *": "installs from the network",
    "dunes generate org/name *": "downloads; tests/test_hub.py has a server of its own",
    "*dunes * smollm2 *": "downloads; tests/test_wheel.py",
    "dunes --completion *": "writes to the home folder; tests/test_shells.py",
    "dunes doctor *": "asks a server that stays up; tests/test_serve.py",
    "dunes studio *": "stays up; tests/test_studio.py",
    "torchrun *": "tests/test_ranks.py",
    "cmake *": "compiles for minutes; tests/test_export_native.py",
    "build/dunes *": "the program that cmake built; tests/test_export_native.py",
    "python recipes/*": "tests/test_recipes.py runs these lines",
    "# *\nimport torch\n*from dunes import ops\n*": "tests/test_operation.py",
    "* tasks.json *": "tests/test_walk.py",
    "* pairs.jsonl *": "tests/test_walk.py",
    "dunes chat runs/preferred": "tests/test_walk.py",
}
"""What is not run, as patterns of commands and of Python blocks, with the reason."""

TEXTS = ("dunes/\n", "RUN/\n", "  model.safetensors ", "ops.check of ", "                  type ", "completion: ")
"""How blocks begin that show files or output."""

TINY = ["--batch", "4", "--dtype", "float32", "--threads", "1"]
SHAPE = ["--size", "60k", "--vocab-size", "330", "--context-length", "64"]
SMALL = {
    "train": ["--steps", "2", *TINY],
    "finetune": ["--steps", "2", *TINY],
    "generate": ["--max-tokens", "8"],
    "chat": ["--max-tokens", "8"],
    "serve": ["--port", "0"],
}
"""Options that make the work of a verb small."""

TOYS = {"1m": "60k", "3m": "70k", "10m": "80k", "40m": "100k", "256": "32", "24": "1", "7": "1"}
"""Words of commands that are replaced: sizes, neurons, numbers of blocks."""
PYTHON_TOYS = {"number == 100": "number == 2", '["3m"]': '["60k"]', "rounds=10": "rounds=1"}
"""The same for Python blocks."""

PROGRAM = "def main(argument):\n    return argument\n" * 20
WORDS = [a + b for a in ("", "new_", "old_", "all_") for b in ("file", "line", "word", "text", "size", "page")]
ROWS = json.dumps([{"instruction": f"Say {i}.", "input": "", "output": f"It is {i}."} for i in range(60)])


@dataclass(frozen=True)
class Piece:
    """A command, or a block of Python."""

    page: str
    line: int
    text: str
    python: bool = False

    def __str__(self):
        return f"{self.page}:{self.line}: {self.text}"

    def runs(self):
        return not any(fnmatchcase(self.text, pattern) for pattern in NOT_RUN)


@cache
def pieces(page):
    """The commands and Python blocks of a page. A block that is neither, nor known as a text, fails."""
    text, result = PAGES[page].read_text(), []
    for block in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        language, content = block.groups()
        first = text.count("\n", 0, block.start()) + 2
        if language == "python":
            result.append(Piece(page, first, content, python=True))
        elif language in ("", "sh"):
            lines = [(i, line.strip()) for i, line in enumerate(content.splitlines(), first) if line.strip()]
            commands = [Piece(page, i, line) for i, line in lines if COMMAND.match(line)]
            known = len(commands) == len(lines) or content.startswith(TEXTS)
            assert known, f"{page}:{first}: neither commands of known programs nor a known text"
            result += commands
        else:
            assert language in ("c", "json", "bash", "yaml", "console", "toml", "vim", "lua"), (
                f"{page}:{first}: no test runs a block of {language}"
            )
    return result


def write_programs(folder):
    """Files with few lines in common, so that some are left to score completions on."""
    draw = random.Random(0)
    word = lambda: draw.choice(WORDS)
    one = lambda: f"def {word()}_{word()}({word()}, {word()}):\n    return {word()}.{word()}({word()})"
    for i in range(20):
        (folder / f"module_{i}.py").write_text("\n\n\n".join([one() for _ in range(6)]))


def dunes(*words):
    assert run_command([*map(str, words)]) == 0, words


class Toys:
    """Models that stand-ins are copied from, made when they are first needed."""

    def __init__(self, root):
        self.root = root
        (root / "code").mkdir()
        write_programs(root / "code")
        (root / "rows.json").write_text(ROWS)

    @cache  # noqa: B019
    def model(self):
        dunes("train", self.root / "code", "--out", self.root / "model", *SMALL["train"], *SHAPE)
        return self.root / "model"

    @cache  # noqa: B019
    def mixture(self):
        options = ["--experts", "8", "--no-complete", *SMALL["train"], *SHAPE]
        dunes("train", self.root / "code", "--out", self.root / "mixture", *options)
        return self.root / "mixture"

    @cache  # noqa: B019
    def adapter(self):
        out = self.root / "adapter"
        options = ["--method", "qlora-int8", "--lr", "1e-5", *SMALL["finetune"]]
        dunes("finetune", self.model(), "--data", self.root / "rows.json", "--out", out, *options)
        return out

    @cache  # noqa: B019
    def int8(self):
        m = checkpoint.load(self.model())
        change = quantize(m.model, kind="int8")
        architecture = replace(m.architecture, changes=(*m.architecture.changes, change))
        checkpoint.save(m.model, self.root / "int8", m.tokenizer, m.context_length, architecture=architecture)
        return self.root / "int8"

    @cache  # noqa: B019
    def foreign(self):
        tokenizer = Tokenizer.train("bytes", ())
        model = initialise(mistral.build(mistral.Config.from_size(tokenizer.vocab, 32, 2, 64)))
        checkpoint.save(model, self.root / "foreign", tokenizer, 64)
        (self.root / "foreign" / "dunes.json").unlink()
        return self.root / "foreign"

    @cache  # noqa: B019
    def native(self):
        write_native(self.foreign(), self.root / "native")
        shutil.copy(self.foreign() / "tokenizer.json", self.root / "native")
        return self.root / "native"

    @cache  # noqa: B019
    def programs(self):
        folder = shutil.copytree(self.root / "code", self.root / "programs")
        (folder / "src").mkdir()
        for name in ("main.py", "src/main.py"):
            (folder / name).write_text(PROGRAM)
        return folder

    @cache  # noqa: B019
    def others(self):
        folder = self.root / "others"
        folder.mkdir()
        (folder / "main.py").write_text(PROGRAM.replace("argument", "value"))
        return folder

    @cache  # noqa: B019
    def laps(self):
        dunes("bench", "tokenize", self.model(), "--rounds", "8", "--out", self.root / "laps.jsonl")
        return self.root / "laps.jsonl"


STAND_INS = {
    "~/code/project": Toys.programs,
    "~/code/other": Toys.others,
    "~/models/Mistral-7B-v0.3": Toys.foreign,
    "~/llama-2-7b-native": Toys.native,
    "src/main.py": PROGRAM,
    "before.txt": PROGRAM,
    "questions.txt": "Say 1.\n/undo\nSay 2.\n",
    "alpaca.json": ROWS,
    "before.jsonl": Toys.laps,
    "after.jsonl": Toys.laps,
    "runs/project": Toys.model,
    "runs/helper": Toys.adapter,
    "runs/polite": Toys.adapter,
    "runs/terse": Toys.adapter,
    "models/int8": Toys.int8,
    "BASE": Toys.model,
    "MIXTURE": Toys.mixture,
    "MODEL": Toys.model,
    "RUN": Toys.adapter,
    "SOURCE": PROGRAM * 200,
    "TEXT": PROGRAM * 200,
    "FILE": ROWS,
}
"""What pages name: the content of a file, or a toy to copy."""


class Head(nn.Linear):
    """A layer of another dtype than what it reads."""

    def forward(self, x):
        return super().forward(x.to(self.weight.dtype))


class ConvNet(own_networks.ConvNet):
    """A network with the modules that docs/networks.md names."""

    def __init__(self, classes=10):
        super().__init__(classes)
        self.features = nn.Sequential(nn.Linear(2, 2))
        self.blocks = nn.ModuleList([nn.ModuleDict({"attn": nn.ModuleDict({"q": nn.Linear(2, 2)})})])
        self.head = Head(8 * 16, classes)


def names_of_networks(toys):
    net = ConvNet()
    images, labels = torch.randn(3, 1, 28, 28), torch.tensor([1, 2, 3])
    tokenizer = Tokenizer.train("bytes", ())
    loss, make, MyMLP = F.cross_entropy, lambda linear: linear, lambda dim: GatedMLP(dim, 2 * dim)
    return locals() | {"torch": torch, "checkpoint": checkpoint, "ConvNet": ConvNet}


def names_of_small_networks(toys):
    digits, model = drawn_digits(300), mlp()
    return locals() | {"Rows": Rows, "torch": torch, "Trainer": Trainer, "cross_entropy": cross_entropy}


def names_of_training(toys):
    model = checkpoint.load(toys.model()).model
    batches, loss = [torch.randint(0, 50, (4, 16))] * 2, next_token
    return locals() | {"torch": torch, "muon": muon}


NAMES = {
    "format.md": lambda toys: {"checkpoint": checkpoint, "attach": attach, "replace": replace},
    "kv-cache.md": lambda toys: {"model": checkpoint.load(toys.model()).model, "ids": [1, 2, 3]},
    "mixtures-and-expansion.md": lambda toys: {
        "model": checkpoint.load(toys.mixture()).model,
        "apply_change": apply_change,
    },
    "networks.md": names_of_networks,
    "small-networks.md": names_of_small_networks,
    "training-loop.md": names_of_training,
}
"""Names that the Python blocks of a page use and do not define."""


def parsed(text):
    """The words of a command behind its program, and the file that it reads as standard input."""
    words = [TOYS.get(word, word) for word in shlex.split(re.sub(r"\[.*?\]", "", text), comments=True)]
    if words[0] == "cat":
        return words[4:], words[1]
    if "<" in words:
        return words[1:-2], words[-1]
    return words[1:], None


def written(words):
    """The file or folder that a command makes, which must not exist, or None."""
    if "--out" in words and "--resume" not in words:
        return words[words.index("--out") + 1]
    if words[0] in ("convert", "export", "augment"):
        places = [word for word in words if word != "--undo"]
        return next((places[i - 1] for i, word in enumerate(places) if word.startswith("--")), places[-1])
    return None


def small(words):
    """The words with options that make the work small, in place of those that say how long it takes."""
    if "--minutes" in words:
        at = words.index("--minutes")
        words = words[:at] + words[at + 2 :]
    if "--heads" in words:  # toys have one
        words[words.index("--heads") + 1] = "1"
    more = SMALL.get(words[0], [])
    if words[0] == "train":
        more = [] if "--resume" in words else more if "--from" in words else more + SHAPE
    if "--completion" in words and "--limit" not in words:
        more = ["--limit", "2", "--lines", "2"]
    if words[0] == "bench" and words[1] not in ("compare", "plot", "memory") and "--by-module" not in words:
        more = ["--rounds", "1"]
    return [*words, *more]


def stand_in(word, toys):
    """Make what a word names, or the folder that it is in, unless it exists."""
    name = next((name for name in STAND_INS if re.match(rf"{re.escape(name)}([/:]|$)", word)), None)
    if name is None or (place := Path(name).expanduser()).exists():
        return
    place.parent.mkdir(parents=True, exist_ok=True)
    content = STAND_INS[name]
    if isinstance(content, str):
        place.write_text(content)
    elif (made := content(toys)).is_dir():
        shutil.copytree(made, place)
    else:
        shutil.copy(made, place)


def remove(place):
    shutil.rmtree(place, ignore_errors=True)  # leaves a file
    place.unlink(missing_ok=True)


@pytest.fixture(scope="session")
def toys(tmp_path_factory):
    return Toys(tmp_path_factory.mktemp("docs"))


@pytest.fixture
def run(toys, command, tmp_path, monkeypatch):
    """Runs pieces of a page in a new folder. Servers end when they have started."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("dunes.runs.finetune.ANSWER_TOKENS", 8)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    serve, names = http.run, ModuleType("page")
    stop = lambda ready: (ready(), signal.raise_signal(signal.SIGTERM))
    monkeypatch.setattr(http, "run", lambda app, sockets, ready: serve(app, sockets, lambda: stop(ready)))
    monkeypatch.setitem(sys.modules, "page", names)

    def run_python(piece):
        vars(names).update(NAMES.get(piece.page, lambda toys: {})(toys))
        text = piece.text
        for name in re.findall(r'"([^"\n]*)"', text):
            stand_in(name, toys)
        for word, toy in PYTHON_TOYS.items():
            text = text.replace(word, toy)
        exec(compile("\n" * (piece.line - 1) + text, PAGES[piece.page], "exec"), vars(names))

    def run_command(piece):
        words, typed = parsed(piece.text)
        out = written(words)
        if out:
            remove(Path(out).expanduser())
        for word in [*words, typed or ""]:
            if word != out:
                stand_in(word, toys)
        stdin = Path(typed).read_bytes() if typed else b""
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        status, _, errors = command(*small([each for word in words for each in expanded(word)]))
        assert status == 0, f"{piece}\n{errors}"

    def run(pieces):
        for piece in pieces:
            (run_python if piece.python else run_command)(piece)

    with mock.patch.dict(BENCHMARKS):
        yield run


def expanded(word):
    """A word as a shell gives it to a program."""
    if "*" in word and "**" not in word and (files := sorted(map(str, Path().glob(word)))):
        return files
    return [str(Path(word).expanduser()) if word.startswith("~") else word]


RUN = {page: [piece for piece in pieces(page) if piece.runs()] for page in PAGES}


@pytest.mark.slow
@pytest.mark.long  # in a process of its own: in one that had run other tests, all after the first page failed
@pytest.mark.filterwarnings("ignore:geom_path")  # a single round
@pytest.mark.parametrize("page", [page for page in PAGES if RUN[page]])
def test_all_of_a_page_runs(page, run):
    run(RUN[page])


def anchors(path):
    """The anchors of a page's headings. A line that begins with # in a code block is none."""
    text = re.sub(r"^```.*?^```$", "", path.read_text().lower(), flags=re.MULTILINE | re.DOTALL)
    return {re.sub(r"[^\w -]", "", title).replace(" ", "-") for title in re.findall(r"\n#+ (.*)", "\n" + text)}


def test_every_relative_link_has_a_target():
    for path in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
        for name, anchor in re.findall(r"\]\(([^():#\s]*)#?([^():\s]*)\)", path.read_text()):
            target = path.parent / name if name else path
            assert target.exists(), (path, name)
            assert not anchor or anchor in anchors(target), (path, name, anchor)


def test_the_lists_name_what_the_docs_have():
    texts = [piece.text for page in PAGES for piece in pieces(page)]
    assert [p for p in NOT_RUN if not any(fnmatchcase(text, p) for text in texts)] == []
    assert [name for name in STAND_INS if not any(name in text for text in texts)] == []
