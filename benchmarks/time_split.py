"""Completion of lines from future commits: gains from retrieving newer files and from training on newer changes.

    python benchmarks/time_split.py --out OUT --repository . --trained COMMIT --learned COMMIT

A model is trained on the files at the first commit. Lines added by commits after the second one are completed in
three ways: with files of the first commit (frozen), with files of the commit before the line's (following), and
with these files by a model that has a LoRA adapter trained on the changes between the two commits, mixed with as
much old text (learning). The text around a cursor is from the line's own commit, without the rest of the line.
Differences are paired by commit, with a bootstrap interval over commits.
"""

import random
import re
import subprocess
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO
from itertools import islice
from pathlib import Path

from dunes import tree
from dunes.augment import attach, merge
from dunes.completion.completer import FolderCompleter
from dunes.completion.fit import file_means, interval
from dunes.completion.index import index_texts
from dunes.data import FillInMiddle, Windows, header_name
from dunes.progress import Display
from dunes.runs.train import train
from dunes.runs.train_config import TrainConfig
from dunes.train import Trainer
from dunes.train.loss import next_token_loss

import torch
import tyro

HUNK = re.compile(r"^@@ -\S+ \+(\d+)(?:,(\d+))? @@")


@dataclass(frozen=True)
class Cursor:
    """A place in a line that a commit added."""

    commit: int
    name: str
    before: str
    after: str
    rest: str


def git(repository: Path, *args: str) -> str:
    """The output of a git command."""
    done = subprocess.run(["git", "-C", repository, *args], capture_output=True, check=True)
    return done.stdout.decode(errors="replace")


def write_tree(repository: Path, commit: str, out: Path) -> None:
    """Write the files of a commit."""
    data = subprocess.run(["git", "-C", repository, "archive", commit], capture_output=True, check=True).stdout
    with tarfile.open(fileobj=BytesIO(data)) as archive:
        archive.extractall(out, filter="data")


def changed(repository: Path, old: str, new: str, suffix: str) -> dict[str, str | None]:
    """The texts at a commit of the files that differ from an older one; None for those that are gone."""
    names = git(repository, "diff", "--name-only", "--no-renames", old, new, "--", f"*{suffix}").splitlines()
    kept = set(git(repository, "ls-tree", "-r", "--name-only", new).splitlines())
    return {name: git(repository, "show", f"{new}:{name}") if name in kept else None for name in names}


def added_lines(repository: Path, commit: str, suffix: str) -> Iterator[tuple[str, int]]:
    """The files and the numbers of the lines that a commit adds."""
    name = ""
    for line in git(
        repository, "diff", "-U0", "--no-renames", f"{commit}^", commit, "--", f"*{suffix}"
    ).splitlines():
        if line.startswith("+++ "):
            name = line[6:]
        elif hunk := HUNK.match(line):
            start, count = int(hunk[1]), int(hunk[2] or 1)
            yield from ((name, number) for number in range(start, start + count))


def cursors(repository: Path, commits: Sequence[str], suffix: str, most: int) -> list[Cursor]:
    """At most so many cursors of each commit, inside lines that it adds."""
    found: list[Cursor] = []
    for number, commit in enumerate(commits):
        chosen = random.Random(commit)
        places = [*added_lines(repository, commit, suffix)]
        chosen.shuffle(places)
        texts: dict[str, list[str]] = {}
        count = 0
        for name, line in places:
            if name not in texts:
                texts[name] = git(repository, "show", f"{commit}:{name}").splitlines(keepends=True)
            lines = texts[name]
            content = lines[line - 1].strip() if line <= len(lines) else ""
            if len(content) < 2 or count == most:
                continue
            column = lines[line - 1].index(content) + chosen.randrange(1, len(content))
            before = "".join(lines[: line - 1]) + lines[line - 1][:column]
            after = "\n" + "".join(lines[line:])
            found.append(Cursor(number, name, before, after, lines[line - 1][column:].strip()))
            count += 1
    return found


def learn(completer: FolderCompleter, texts: dict[str, str | None], steps: int, lr: float, rank: int) -> None:
    """Teach the model of a completer what has changed, beside as much of what it knows."""
    loaded, tokenizer = completer.loaded, completer.loaded.require_tokenizer()
    known = {header_name(name): text for name, text in texts.items()}
    new = index_texts([(name, text) for name, text in known.items() if text], completer.files)
    old = index_texts([file for file in completer.training_files if file[0] not in known], completer.files)
    change = attach(loaded.model, rank=rank)
    tree.freeze(loaded.model, ["**", *(f"!{new}" for new in change.new)])
    parameters = [p for p in loaded.model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr, weight_decay=0.0)
    arrange = FillInMiddle(tokenizer, 0.25)
    streams = [Windows(s.ids.items, loaded.context_length, 4, 0, arrange).batches(0) for s in (new, old)]

    def batches():
        for pair in zip(*streams, strict=False):
            yield tuple(map(torch.cat, zip(*pair, strict=True))) if isinstance(pair[0], tuple) else torch.cat(pair)

    trainer = Trainer(loaded.model, optimizer, next_token_loss, lr_scale=lambda step: 1 - step / steps)
    with tree.mode(loaded.model, True):
        for step in islice(trainer.run(batches()), steps):
            if step.number % 20 == 0:
                print(f"step {step.number}: {step.loss:.3f} nats/token", flush=True)
    merge(loaded.model)


def exact(completer, points: Sequence[Cursor], contexts: Sequence[dict] | None) -> list[bool]:
    """True for each point that is completed correctly; `contexts` are the files' texts before each commit."""
    right, now = [], -1
    for point in points:
        if contexts is not None and point.commit != now:
            now = point.commit
            completer.use(completer.with_texts(contexts[now]))
        text = completer.alternatives(point.before, point.after, header_name(point.name))[0].text
        right.append(text.strip() == point.rest)
    return right


def main(
    out: Path,
    repository: Path = Path(),
    trained: str = "fd4b0e5",
    learned: str = "06336e0",
    last: str = "HEAD",
    suffix: str = ".py",
    minutes: float = 3.0,
    steps: int = 150,
    lr: float = 2e-3,
    rank: int = 16,
    most: int = 6,
) -> None:
    """Train, learn, complete what later commits add, and print the figures."""
    run = out / "run"
    if not (run / "config.json").exists():
        write_tree(repository, trained, out / "corpus")
        config = TrainConfig(sources=(str(out / "corpus"),), minutes=minutes, complete=True)
        if status := train(config, run, Display()):
            raise SystemExit(status)
    if FolderCompleter(run).copies:
        raise ValueError(f"{run}: its model was worse than copying, so lines are copied; train for more --minutes")
    torch.set_num_threads(1)
    commits = git(
        repository, "rev-list", "--reverse", "--no-merges", f"{learned}..{last}", "--", f"*{suffix}"
    ).split()
    points = cursors(repository, commits, suffix, most)
    commits = [commits[i] for i in sorted({point.commit for point in points})]
    order = {number: i for i, number in enumerate(sorted({point.commit for point in points}))}
    points = [Cursor(order[p.commit], p.name, p.before, p.after, p.rest) for p in points]
    print(f"{len(points)} cursors in {len(commits)} commits", flush=True)
    before = [
        {header_name(n): t for n, t in changed(repository, trained, f"{c}^", suffix).items()} for c in commits
    ]
    owners = [point.commit for point in points]
    results: dict[str, list[bool]] = {}
    results["frozen"] = exact(FolderCompleter(run), points, None)
    print("frozen", sum(results["frozen"]), flush=True)
    results["following"] = exact(FolderCompleter(run), points, before)
    print("following", sum(results["following"]), flush=True)
    completer = FolderCompleter(run)
    torch.set_num_threads(2)
    learn(completer, changed(repository, trained, learned, suffix), steps, lr, rank)
    torch.set_num_threads(1)
    results["learning"] = exact(completer, points, before)
    print("learning", sum(results["learning"]), flush=True)
    means = {name: file_means([float(x) for x in right], owners) for name, right in results.items()}
    for name, right in results.items():
        print(f"{name:10} {100 * sum(right) / len(right):.1f} %", interval(100 * means[name]))
    for a, b in (("following", "frozen"), ("learning", "following")):
        print(f"{a} - {b}:", interval(100 * (means[a] - means[b])))


if __name__ == "__main__":
    tyro.cli(main)
