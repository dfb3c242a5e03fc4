"""Line completion in unseen files, by a model trained for a few minutes on the rest of a repository.

    python benchmarks/completion.py OUT [--corpus stdlib|zig|dunes|FOLDER] [--minutes 15] [--steps N] [--seed 0]
    python benchmarks/completion.py OUT --repositories FILE --folders FOLDER [--minutes 3]

The corpus is split by files: files with sha1(path) % 10 == 0 are for evaluation; of the others, in the order of
their hashes, about 5 MB are for training (and half a megabyte for the run's gate and own test). Near-duplicates,
tests, and files below 200 or above 400,000 bytes are left out. `zig` is the library in the package ziglang. Both
sides of a comparison see the file above the cursor and the training files. OUT gets the corpus, the run, and
finally result.json. With --repositories, each repository of a list has a folder in OUT
(completion_repositories.py), and six in seven of its files are for training.
"""

import json
import sysconfig
from collections.abc import Iterator, Set
from hashlib import sha1
from importlib.util import find_spec
from pathlib import Path

import dunes
from dunes import measure
from dunes.evaluate.completion import COPY, CompletionOptions, evaluate_completion
from dunes.evaluate.text_loss import score_folder
from dunes.progress import Display
from dunes.runs.train import train
from dunes.runs.train_config import TrainConfig

import torch
import tyro
from completion_repositories import report, score_repositories

TRAINING_BYTES = 5_550_000
SMALLEST, LARGEST, SIMILAR = 200, 400_000, 0.8
LEFT_OUT = {"test", "tests", "idle_test", "lib2to3", "encodings", "site-packages", "__pycache__"}
SUFFIXES = {"zig": ".zig"}


def corpus_folder(name: str) -> Path:
    """The folder of a named corpus. Raises ValueError if it is not installed."""
    if name == "stdlib":
        return Path(sysconfig.get_path("stdlib"))
    if name == "dunes":
        return Path(dunes.__file__).parent
    if name == "zig":
        spec = find_spec("ziglang")
        if spec is None or not spec.submodule_search_locations:
            raise ValueError("zig: the package ziglang is not installed; pip install ziglang")
        return Path(spec.submodule_search_locations[0]) / "lib" / "std"
    if not Path(name).is_dir():
        raise ValueError(f"--corpus is {name}: expected stdlib, zig, dunes or a folder")
    return Path(name)


def source_files(root: Path, suffix: str, left_out: Set[str] = LEFT_OUT) -> Iterator[tuple[str, str]]:
    """The paths and texts of the files of a corpus, without near-duplicates of earlier ones."""
    kept: list[frozenset[str]] = []
    for path in sorted(root.rglob(f"*{suffix}")):
        name = path.relative_to(root)
        if left_out & {*name.parts} or path.is_symlink() or not path.is_file():
            continue
        if not SMALLEST <= path.stat().st_size <= LARGEST:
            continue
        try:
            text = path.read_text("utf-8")
        except UnicodeDecodeError:
            continue
        lines = frozenset(line.strip() for line in text.splitlines() if line.strip())
        if not any(len(lines & other) > SIMILAR * len(lines | other) for other in kept):
            kept.append(lines)
            yield name.as_posix(), text


def write_split(root: Path, suffix: str, out: Path, all_files: bool = False) -> dict[str, int]:
    """Write the parts of a corpus to OUT/train and OUT/test; returns the number of files in each.

    With `all_files`, one in seven files of every kind is for the test; files without the suffix go to OUT/other.
    """
    counts, size = {"train": 0, "test": 0, "other": 0}, 0
    number = lambda file: int(sha1(file[0].encode()).hexdigest(), 16)
    parts = 7 if all_files else 10
    for file in sorted(source_files(root, *(("", set()) if all_files else (suffix,))), key=number):
        held = "test" if file[0].endswith(suffix) else "other"
        part = held if number(file) % parts == 0 else "train"
        if part == "train" and size > TRAINING_BYTES:
            continue
        size += len(file[1].encode()) if part == "train" else 0
        counts[part] += 1
        path = out / part / file[0]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(file[1], "utf-8", newline="")
    return counts


def main(
    out: Path,
    corpus: str = "stdlib",
    suffix: str = "",
    minutes: float = 15.0,
    steps: int | None = None,
    size: str = "",
    seed: int = 0,
    cuts: int = 60,
    lines: int = 12,
    all_lines: bool = False,
    all_files: bool = False,
    repositories: Path | None = None,
    folders: Path = Path(),
) -> None:
    """Train on a part of a corpus, complete lines of the rest, and print the figures.

    Args:
        out: A new folder.
        corpus: stdlib, zig, dunes or a folder.
        suffix: Of the files; by default .py, and .zig for zig.
        minutes: Minutes of training.
        steps: Steps of training instead.
        size: Size of the model, as for `dunes train`; by default the chosen one.
        seed: Seed of the training.
        cuts: Cursors in each file.
        lines: Lines of each file that are typed.
        all_lines: Also complete lines like one of the training.
        all_files: Train on the files of every kind; one in seven is held out, and scored if it has the suffix.
        repositories: A list of repositories in JSON; each is done instead of a corpus.
        folders: The folder that has a folder of each repository.
    """
    if repositories is not None:
        asked = [f"--minutes={minutes}", f"--seed={seed}", f"--cuts={cuts}", f"--lines={lines}"]
        asked += [f"--steps={steps}"] * (steps is not None) + [f"--size={size}"] * bool(size)
        return report(score_repositories(repositories, folders, out, asked))
    counts = write_split(corpus_folder(corpus), suffix or SUFFIXES.get(corpus, ".py"), out / "corpus", all_files)
    config = TrainConfig(
        sources=(str(out / "corpus" / "train"),), minutes=minutes, steps=steps, size=size, seed=seed, complete=True
    )
    if status := train(config, out / "run", Display()):
        raise SystemExit(status)
    torch.set_num_threads(1)
    options = CompletionOptions(cuts, lines, all_lines=all_lines)
    scores = evaluate_completion(out / "run", [str(out / "corpus" / "test")], options)
    rows = {
        s.name: {
            "exact": s.exact_match().mean,
            "keys_by_words": s.saved(),
            "keys_at_35": s.saved(s.threshold),
            "bits_per_character": s.bits_per_character,
        }
        for s in scores
    }
    card = json.loads((out / "run" / "dunes.json").read_text())
    facts = {
        key: card["trained"][key] for key in ("steps", "size", "batch", "context_length", "matmul", "seconds")
    }
    held = [str(folder) for folder in (out / "corpus" / "test", out / "corpus" / "other") if folder.is_dir()]
    ours, copy = scores[0], next(score for score in scores if score.name == COPY)
    result = {
        "corpus": corpus,
        "files": counts,
        **facts,
        "machine": measure.fingerprint(),
        "rows": rows,
        "differences": (ours.means("exact") - copy.means("exact")).tolist(),
        "validated": card["measured"]["bits_per_byte"],
        "held_out": score_folder(out / "run", held)[0].bits_per_byte,
    }
    (out / "result.json").write_text(json.dumps(result))
    print(json.dumps(result))
    return None


if __name__ == "__main__":
    tyro.cli(main, config=(tyro.conf.PositionalRequiredArgs,))
