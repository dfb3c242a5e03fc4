"""Right lines with definitions, a similar block, or dependencies beside the text above the cursor.

    python benchmarks/nearby.py OUT FOLDER:SUFFIX... --model MODEL [--variants none names block]
    python benchmarks/nearby.py OUT FOLDER:SUFFIX... --dependencies PROJECT=FOLDER...

Of each folder, files are held out before anything sees them: most for cursors, some for the gate, which is fitted
once and kept in OUT. All variants complete the same cursors inside lines, from the text above alone, on one thread,
with the product's prompt, mixture and healing. A line is right if each of its ids is the most probable one, so that
one forward serves the cursors of some lines; `typed` types lines key by key with the engine, for its times. Rows
are appended to OUT/rows.jsonl, a file of each project in turn, so that the command can be stopped and goes on later.

`names` puts the first lines of definitions into the prompt that the last lines name, `block` the block of another
file that is most like the last lines: before the last lines, or with `-top` before the text. They are chosen anew
after STEP ids, with `-fresh` for each request. With `--dependencies`, lines are copied without a model, with and
without these folders. Intervals (95 %) resample files.
"""

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha1
from itertools import product, zip_longest
from pathlib import Path
from typing import NamedTuple

from dunes import checkpoint
from dunes.checkpoint import LoadedModel
from dunes.completion.completer import CopyNearest
from dunes.completion.copy_gate import read_gate, write_gate
from dunes.completion.engine import CompletionEngine
from dunes.completion.fit import file_means, fit_mixture, interval
from dunes.completion.index import index_texts, read_index, write_index
from dunes.completion.keystrokes import CutPoint, cut_points, file_lines
from dunes.completion.text import FileTokenizer, line_start, window
from dunes.data.document import NamedText
from dunes.generate.copying import Copies, Sources
from dunes.generate.prefix_cache import PrefixCache
from dunes.progress import print_table

import numpy as np
import torch
import tyro
from completion import source_files
from torch import Tensor

FILES, SHARE, GATE, RUNS, TOGETHER, LINES = 60, 4, 20, 3, 6, 20
"""Held-out files at most, and their share (1/4); files for the gate; parts of a
file with cursors, and lines in each; lines of a held-out file at least."""
LEFT_OUT = {"vendor", "node_modules", "dist", "sandbox"}
PLACES = 2_000
MOST = 12_000_000
BUDGET, STEP, BEHIND = 0.25, 128, 48
"""Part of the prompt for what is nearby; ids after which it is chosen anew; ids of the text behind it at least."""
READ, BLOCK, STRIDE, FIRST = 16, 12, 6, 4
"""Lines above that are read; of a block, and between the starts of two; of a definition."""
_WORD = re.compile(r"[^\W\d]\w{2,}")
_DEFINITION = re.compile(
    r"^[ \t]*(?:[\w@]+ )*?(?:func|def|function|class|interface|trait|type|struct|enum)\b(?:\s*\([^)\n]*\))?\s+(\w{3,})"
    r"|^[ \t]*(?:const |let |var )?(?:\w+\.)*(\w{3,}) = (?:async )?(?:function\b|\([^)\n]*\) =>)",
    re.M,
)


class Cursor(NamedTuple):
    """A cursor in a held-out file of a project."""

    project: str
    file: str
    text: str
    cut: CutPoint


class Nearby:
    """Definitions and blocks of files."""

    def __init__(self, texts: Sequence[NamedText], comment: str) -> None:
        self.files = [(f"{comment} {name}", text.split("\n")) for name, text in texts]
        self.definitions = defaultdict[str, list[tuple[int, int]]](list)
        self.blocks, counts = list[tuple[int, int]](), list[frozenset[str]]()
        for number, (_, text) in enumerate(texts):
            for name, line in definitions(text):
                self.definitions[name].append((number, line))
            lines = self.files[number][1]
            for first in range(0, max(1, len(lines) - STRIDE), STRIDE):
                self.blocks.append((number, first))
                counts.append(frozenset(_WORD.findall("\n".join(lines[first : first + BLOCK]))))
        users = defaultdict[str, list[int]](list)
        for block, words in enumerate(counts):
            for word in words:
                users[word].append(block)
        self.users = {word: np.array(blocks) for word, blocks in users.items()}
        self.weights = {word: np.log(len(counts) / len(blocks)) for word, blocks in users.items()}
        self.sizes = np.array([1 + sum(self.weights[w] ** 2 for w in words) for words in counts]) ** 0.5

    def names(self, text: str) -> list[str]:
        """Definitions that the last lines of a text name, the most recent name last."""
        lines = text.split("\n")
        used = [*dict.fromkeys(reversed(_WORD.findall("\n".join(lines[-READ:]))))]
        own = {name for name, _ in definitions(text)}
        places = [self.definitions[word] for word in used if word in self.definitions and word not in own]
        return [self.part(*place[0], FIRST) for place in reversed(places) if len(place) <= 2]

    def block(self, text: str) -> list[str]:
        """The block that is most like the last lines of a text, and the lines after it."""
        scores = np.zeros(len(self.blocks))
        for word in {*_WORD.findall("\n".join(text.split("\n")[-BLOCK:]))} & self.users.keys():
            scores[self.users[word]] += self.weights[word] ** 2
        best = int((scores / self.sizes).argmax())
        return [self.part(*self.blocks[best], 2 * BLOCK)] if scores[best] else []

    def part(self, number: int, line: int, count: int) -> str:
        """Lines of a file under its path."""
        path, lines = self.files[number]
        return "\n".join([path, *lines[line : line + count], ""])


def definitions(text: str) -> Iterator[tuple[str, int]]:
    """The names that a text defines, and their lines."""
    for match in _DEFINITION.finditer(text):
        yield match[1] or match[2], text.count("\n", 0, match.start() + 1)


class Asked(NamedTuple):
    """A cursor, the ids before it, the ids of the rest of its line, and the sources and typed bytes to copy with."""

    cursor: Cursor
    ids: list[int]
    rest: Sequence[int]
    sources: Sources
    typed: bytes


class NearbyEngine(CompletionEngine):
    """The product's engine, whose prompts also have what is nearby, as `variant` says."""

    variant, nearby = "none", Nearby([], "")
    _chosen: tuple[object, list[int]] = None, []

    def _prompt(self, text: list[int], below: list[int], header: int) -> list[int]:
        source, *options = self.variant.split("-")
        if source == "none":
            return super()._prompt(text, below, header)
        size = int(BUDGET * self.prompt_tokens)
        kept = [*window(text, self.prompt_tokens - size, 2)]
        seen = len(text) if "fresh" in options else len(text) // STEP * STEP
        if self._chosen[0] != (key := (self.variant, text[:seen])):
            self._chosen = key, self._encode(source, text[:seen], size)
        place = 0 if "top" in options else max(0, seen - BEHIND - len(text) + len(kept))
        while place and b"\n" not in self.files.pieces[kept[place - 1]]:
            place -= 1
        return [*kept[:place], *self._chosen[1], *kept[place:]]

    def _encode(self, source: str, ids: list[int], size: int) -> list[int]:
        """The ids of what is nearby, at most `size`; the last part is the most important one."""
        text = b"".join(self.files.pieces[i] for i in ids).decode(errors="ignore")
        parts = [self.files.line(part) for part in getattr(self.nearby, source)(text)] if text.strip() else []
        chosen = list[int]()
        for part in reversed(parts):
            chosen = [*part, *chosen] if len(part) + len(chosen) <= size else chosen
        return chosen or ([*parts[-1][:size]] if parts else [])

    def ask(self, cursor: Cursor) -> Asked:
        """The ids and sources at a cursor, as the engine finds them for each request."""
        before = cursor.text[: cursor.cut.offset]
        above = self.files.tokenize(before[: line_start(before)], cursor.file).ids
        text = self.files.tokenize(before, cursor.file)
        line, typed = self.files.split_typed(text.ids[text.last :])
        ids = [*text.ids[: text.last], *line]
        whole = self.files.tokenize(before + cursor.cut.rest, cursor.file).ids
        is_same = whole[: len(ids)] == ids
        rest = whole[len(ids) :] if is_same else self.files.line(typed.decode(errors="ignore") + cursor.cut.rest)
        return Asked(cursor, ids, rest, self.sources(above, (), cursor.file), typed)

    def score(self, cache: PrefixCache, asked: Sequence[Asked]) -> Iterator[dict[str, object]]:
        """If the rest of the line is the greedy one at each of these cursors of a file, and its loss in nats."""
        prompts = [self._prompt(each.ids, [], 0) for each in asked]
        texts = [[*prompt, *each.rest] for prompt, each in zip(prompts, asked, strict=True)]
        last, first = texts[-1], len(prompts[0])
        rows = cache.logits({0: last}, {0: len(last) - first + 1})[0] if len(last) >= first else torch.empty(0)
        for each, prompt, text in zip(asked, prompts, texts, strict=True):
            start, count = len(prompt) - first, len(each.rest) + 1
            is_part = start >= 0 and text == last[: len(text)]
            logits = rows[start : start + count] if is_part else cache.logits({0: text}, {0: count})[0]
            yield {**key(each.cursor, self.variant), **self.compare(each, prompt, logits)}

    def compare(self, asked: Asked, prompt: Sequence[int], logits: Tensor) -> dict[str, object]:
        """If the mixtures from these logits (T, V) are greatest at the line's T - 1 ids and at its end."""
        mixture, nats, right = self._mixture_of(1), 0.0, True
        mixture.copies = Copies(asked.sources, asked.typed, len(prompt))
        for number, row in enumerate(logits):
            text = [*prompt, *asked.rest[:number]]
            mixed = mixture._mix(text, row, mixture.copies.uncovered(text), self.gate)
            best, target = int(mixed.argmax()), asked.rest[number] if number < len(asked.rest) else None
            piece = self.files.pieces[best]
            right &= best == target or (target is None and not piece.strip() and (not piece or b"\n" in piece))
            nats -= float(mixed[target]) if target is not None else 0.0
        return {"right": right, "nats": round(nats, 3)}


def split(folder: Path, suffix: str, kept: Path) -> dict[str, list[NamedText]]:
    """Files for cursors (`test`), for the gate (`valid`), and the rest (`train`); kept in a file."""
    if kept.exists():
        return {part: [(n, t) for n, t in texts] for part, texts in json.loads(kept.read_text()).items()}
    order = lambda file: sha1(file[0].encode()).hexdigest()
    files = sorted(source_files(folder, suffix, LEFT_OUT), key=order)
    long = [file for file in files if len(file_lines(file[1])) >= LINES]
    test = long[: min(FILES, len(files) // SHARE)]
    valid = [file for file in long if file not in test][: min(GATE, len(files) // SHARE // 2)]
    parts = {"test": test, "valid": valid, "train": [f for f in files if f not in test and f not in valid]}
    kept.write_text(json.dumps(parts))
    return parts


def runs_of(project: str, file: NamedText) -> list[list[Cursor]]:
    """The cursors of a file: RUNS times some lines one after another."""
    name, text = file
    cuts = [cut for cut in cut_points(name, text, file_lines(text), count=len(text)) if cut.kind == "character"]
    cuts = sorted(cuts, key=lambda cut: cut.offset)
    starts = [int((number + 0.5) * len(cuts) / RUNS - TOGETHER / 2) for number in range(RUNS)]
    parts = [cuts[max(0, start) : start + TOGETHER] for start in starts]
    return [[Cursor(project, name, text, cut) for cut in part] for part in parts]


def make_engine(
    out: Path, parts: Mapping[str, list[NamedText]], loaded: LoadedModel, comment: str
) -> NearbyEngine:
    """The engine of a project; its index and gate are made once."""
    texts = [*parts["train"], *parts["valid"]]
    if not (out / "completion" / "gate.json").exists():
        files = FileTokenizer(loaded.require_tokenizer(), False)
        engine = CompletionEngine(loaded, index_texts(parts["train"], files))
        fitted, facts = fit_mixture(engine, parts["valid"], PLACES)
        assert fitted is not None
        write_index(out, index_texts(texts, files))
        write_gate(out, fitted[1], facts)
        print(out.name, facts, flush=True)
    gate = read_gate(out)
    engine = NearbyEngine(loaded, read_index(out), gate and gate[0])
    engine.nearby = Nearby(texts, comment)
    return engine


def ask(
    engine: NearbyEngine, cache: PrefixCache, run: Sequence[Cursor], variants: Sequence[str]
) -> Iterator[dict[str, object]]:
    """The rows of all variants at the cursors of a run."""
    cache.reserve(2 * engine.prompt_tokens)
    asked = [engine.ask(cursor) for cursor in run] if variants else []
    for variant in variants:
        engine.variant = variant
        yield from engine.score(cache, asked)


def key(cursor: Cursor, variant: str) -> dict[str, object]:
    """The fields that name a row."""
    return {"project": cursor.project, "file": cursor.file, "offset": cursor.cut.offset, "variant": variant}


def copy(completers: Mapping[str, CopyNearest], run: Sequence[Cursor]) -> Iterator[dict[str, object]]:
    """If the copied line is right at each cursor."""
    for (variant, completer), cursor in product(completers.items(), run):
        said = completer.complete(cursor.text[: cursor.cut.offset])
        yield {**key(cursor, variant), "right": said.text.rstrip() == cursor.cut.rest, "nats": 0.0}


def answered(out: Path) -> list[dict[str, object]]:
    """The rows that were written before."""
    path = out / "rows.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def copiers(parts: Mapping[str, list[NamedText]], folders: Sequence[str], suffix: str) -> dict[str, CopyNearest]:
    """Copying from a project, and also from its dependencies."""
    own = CopyNearest.of_files([*parts["train"], *parts["valid"]])
    size, texts = 0, list[NamedText]()
    for text in (text for folder in folders for text in source_files(Path(folder), suffix, set())):
        size += len(text[1])
        texts += [text] if size < MOST else []
    return {"copies": own, "copies+": CopyNearest([*own._far, *CopyNearest.of_files(texts)._far])}


def report(rows: Sequence[dict[str, object]], variants: Sequence[str]) -> None:
    """Print the share of right lines, the paired difference to the first variant, and times, by project."""
    by_cursor = defaultdict[tuple[object, ...], dict[str, dict[str, object]]](dict)
    for r in rows:
        by_cursor[r["project"], r["file"], r["offset"]][str(r["variant"])] = r
    paired = {key: values for key, values in by_cursor.items() if all(v in values for v in variants)}
    table = []
    for project in [*sorted({str(key[0]) for key in paired}), "all"]:
        part = {key: values for key, values in paired.items() if project in (key[0], "all")}
        names = [f"{key[0]}/{key[1]}" for key in part]
        files = [sorted({*names}).index(name) for name in names]
        first = np.array([values[variants[0]]["right"] for values in part.values()], float)
        for variant in variants:
            right = np.array([values[variant]["right"] for values in part.values()], float)
            nats = [float(str(v[variant]["nats"])) - float(str(v[variants[0]]["nats"])) for v in part.values()]
            difference = interval(file_means(right - first, files)).percent("+")
            won = Counter((right - first).tolist())
            wins = f"{won[1.0]}, {won[-1.0]}"
            cells = [project, str(len(part)), str(len({*files})), variant, f"{100 * right.mean():.1f}"]
            table.append(
                [*cells, f"{100 * (right - first).mean():+.1f}", difference, wins, f"{np.mean(nats):+.2f}"]
            )
    columns = ["project", "cursors", "files", "variant", "right %", "minus first", "by file", "won, lost", "nats"]
    print_table("Right lines, %, and the loss of a line minus the first variant's", columns, table)


def main(
    out: tyro.conf.Positional[Path],
    folders: tyro.conf.Positional[tuple[str, ...]],
    model: Path = Path(),
    variants: tuple[str, ...] = ("none", "names", "block"),
    dependencies: tuple[str, ...] = (),
    most: int = FILES,
) -> None:
    """Measure.

    Args:
        out: Folder of gates, indexes and rows.
        folders: FOLDER:SUFFIX of each project.
        model: The folder of the model.
        variants: The first is what the others are compared with.
        dependencies: PROJECT=FOLDER of dependencies to copy from; without a model.
        most: Files of each project.
    """
    torch.set_num_threads(1)
    loaded = None if dependencies else checkpoint.load_with_tokenizer(model)
    engines, copying, runs, rows = {}, {}, [], answered(out)
    cache = PrefixCache(loaded.model.to(torch.bfloat16)) if loaded else None
    for folder, _, suffix in (entry.rpartition(":") for entry in folders):
        project = Path(folder).name
        (out / project).mkdir(parents=True, exist_ok=True)
        parts = split(Path(folder), suffix, out / project / "split.json")
        if loaded:
            engines[project] = make_engine(out / project, parts, loaded, "#" if suffix == ".py" else "//")
        else:
            wanted = [folder for name, _, folder in (d.partition("=") for d in dependencies) if name == project]
            copying[project] = copiers(parts, wanted, suffix)
        runs.append([run for file in parts["test"][:most] for run in runs_of(project, file)])
        print(project, {part: len(texts) for part, texts in parts.items()}, flush=True)
    done = {(r["project"], r["file"], r["offset"], r["variant"]) for r in rows}
    with (out / "rows.jsonl").open("a") as file:
        for run in (run for turn in zip_longest(*runs) for run in turn if run):
            left = [v for v in variants if tuple(key(run[0], v).values()) not in done]
            for r in (
                ask(engines[run[0].project], cache, run, left) if cache else copy(copying[run[0].project], run)
            ):
                file.write(json.dumps(r) + "\n")
                rows.append(r)
            file.flush()
    report(rows, ("copies", "copies+") if dependencies else variants)


if __name__ == "__main__":
    tyro.cli(main)
