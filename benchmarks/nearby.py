"""Right lines with definitions, a similar block, or dependencies beside the text above the cursor.

    python benchmarks/nearby.py OUT FOLDER:SUFFIX... --model MODEL [--variants none names block]
    python benchmarks/nearby.py OUT FOLDER:SUFFIX --dependencies FOLDER...

Of each folder, files are held out before anything sees them: some for cursors, some for the gate, which is fitted
once. All variants have the same cursors inside lines, with only the text above, one thread, and the product's
prompt, mixture and healing. A line is right if each of its ids is the most probable one: one forward thus serves
some lines. `names` puts the first lines of definitions that the last lines name into the prompt, `block` the block
that is most like the last lines; before the last lines, or with `-top` before the text. They are chosen anew after
STEP ids, with `-fresh` for each request. With `--dependencies`, lines are copied, with and without these folders.
Rows are appended to OUT, some lines of each project in turn, so that the command can be stopped and goes on later.
"""

import json
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
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
from dunes.completion.text import line_start, window
from dunes.data.document import NamedText
from dunes.generate.copying import Copies
from dunes.generate.prefix_cache import PrefixCache
from dunes.progress import print_table

import numpy as np
import torch
import tyro
from completion import source_files

FILES, SHARE, LINES = 60, 4, 20
"""Held-out files at most, and at most one in SHARE; lines of each at least."""
RUNS, TOGETHER = 3, 6
"""Parts of a file with cursors, and cursors in each."""
LEFT_OUT = {"vendor", "node_modules", "dist", "sandbox"}
PLACES, MOST = 2_000, 12_000_000
"""Places of the gate, and characters of dependencies."""
BUDGET, STEP, BEHIND = 0.25, 128, 48
"""Part of the prompt for what is nearby, ids after which it is chosen anew, and ids of the text behind it."""
READ, SEEN, BLOCK, FIRST = 16, 60, 12, 4
"""Lines above that are read, lines above that the prompt has in any case, lines of a block and of a definition."""
_WORD = re.compile(r"[^\W\d]\w{2,}")
_DEFINITION = re.compile(
    r"^[ \t]*(?:[\w@]+ )*?(?:func|def|function|class|interface|trait|type|struct)\b(?:\s*\([^)\n]*\))?\s+(\w{3,})"
    r"|^[ \t]*(?:const |let |var )?(?:\w+\.)*(\w{3,}) = (?:async )?(?:function\b|\([^)\n]*\) =>)",
    re.M,
)
Row = tuple[str, str, int, str, bool, float]
"""Project, file, offset of the cursor, variant, whether the line is right, and its loss in nats."""


class Cursor(NamedTuple):
    """A cursor in a held-out file."""

    project: str
    file: str
    text: str
    cut: CutPoint

    @property
    def place(self) -> tuple[str, str, int]:
        """The fields that identify it."""
        return self.project, self.file, self.cut.offset


def definitions(text: str) -> Iterator[tuple[str, int]]:
    """The names that a text defines, and their lines."""
    for match in _DEFINITION.finditer(text):
        yield match[1] or match[2], text.count("\n", 0, match.start() + 1)


class Nearby:
    """Definitions and blocks of files."""

    def __init__(self, texts: Sequence[NamedText]) -> None:
        marks = {"py": "#"}
        self.files = [(f"{marks.get(name[-2:], '//')} {name}", text.split("\n")) for name, text in texts]
        self.definitions = defaultdict[str, list[tuple[int, int]]](list)
        for number, (_, text) in enumerate(texts):
            for name, line in definitions(text):
                self.definitions[name].append((number, line))
        lengths = enumerate(len(lines) for _, lines in self.files)
        self.blocks = [(number, line) for number, length in lengths for line in range(0, length, BLOCK // 2)]
        words = [{*_WORD.findall(self.part(*block, BLOCK).partition("\n")[2])} for block in self.blocks]
        users = defaultdict[str, list[int]](list)
        for block, word in ((block, word) for block, of in enumerate(words) for word in of):
            users[word].append(block)
        self.users = {word: np.array(blocks) for word, blocks in users.items()}
        self.weights = {word: np.log(len(words) / len(blocks)) ** 2 for word, blocks in users.items()}
        self.sizes = np.array([1 + sum(self.weights[word] for word in of) for of in words]) ** 0.5

    def names(self, text: str) -> list[str]:
        """Definitions that the last lines of a text name, the most recent name last."""
        lines, own, parts = text.split("\n"), dict(definitions(text)), list[str]()
        for word in dict.fromkeys(reversed(_WORD.findall("\n".join(lines[-READ:])))):
            places = self.definitions.get(word, ())
            if word in own and own[word] < len(lines) - SEEN:
                parts.append("\n".join([*lines[own[word] : own[word] + FIRST], ""]))
            elif word not in own and 0 < len(places) <= 2:
                parts.append(self.part(*places[0], FIRST))
        return parts[::-1]

    def block(self, text: str) -> list[str]:
        """The block that is most like the last lines of a text, and the lines after it."""
        scores = np.zeros(len(self.blocks))
        for word in {*_WORD.findall("\n".join(text.split("\n")[-BLOCK:]))} & self.users.keys():
            scores[self.users[word]] += self.weights[word]
        best = int((scores / self.sizes).argmax())
        return [self.part(*self.blocks[best], 2 * BLOCK)] if scores[best] else []

    def part(self, number: int, line: int, count: int) -> str:
        """Lines of a file under its path."""
        path, lines = self.files[number]
        return "\n".join([path, *lines[line : line + count], ""])


class NearbyEngine(CompletionEngine):
    """The engine, whose prompts also have what is nearby, as `variant` says."""

    variant, nearby = "none", Nearby([("", "")])
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

    def score(self, cache: PrefixCache, cursors: Sequence[Cursor]) -> Iterator[Row]:
        """If greedy decoding gives the rest of the line at each of these cursors of a file, and its loss."""
        asked = [self._ask(cursor) for cursor in cursors]
        last, first = asked[-1][1], len(asked[0][0])
        cache.reserve(2 * self.prompt_tokens)
        rows = cache.logits({0: last}, {0: max(0, len(last) - first) + 1})[0]
        for cursor, (prompt, text, copies) in zip(cursors, asked, strict=True):
            start, count = len(prompt) - first, len(text) - len(prompt) + 1
            is_part = start >= 0 and text == last[: len(text)]
            logits = rows[start : start + count] if is_part else cache.logits({0: text}, {0: count})[0]
            mixture, nats, right = self._mixture_of(1, ""), 0.0, True
            mixture.copies = copies
            for place, row in enumerate(logits, len(prompt)):
                mixed = mixture._mix(text[:place], row, copies.uncovered(text[:place]), self.gate)
                piece = self.files.pieces[best := int(mixed.argmax())]
                ends = not piece.strip() and (not piece or b"\n" in piece)
                right &= best == text[place] if place < len(text) else ends
                nats -= float(mixed[text[place]]) if place < len(text) else 0.0
            yield *cursor.place, self.variant, right, round(nats, 3)

    def _ask(self, cursor: Cursor) -> tuple[list[int], list[int], Copies]:
        """The prompt, the prompt with the rest of the line, and the copies, as in `_find`."""
        (_, name, text, cut), files = cursor, self.files
        above = files.tokenize(text[: line_start(text[: cut.offset])], name).ids
        before, whole = (files.tokenize(text[:end], name) for end in (cut.offset, cut.offset + len(cut.rest)))
        line, typed = files.split_typed(before.ids[before.last :])
        ids = [*before.ids[: before.last], *line]
        is_same = whole.ids[: len(ids)] == ids
        rest = whole.ids[len(ids) :] if is_same else files.line(typed.decode(errors="ignore") + cut.rest)
        prompt = self._prompt(ids, [], 0) or [self.files.tokenizer.eos]
        return prompt, [*prompt, *rest], Copies(self.sources(above, (), name), typed, len(prompt))


def split(folder: Path, suffix: str) -> tuple[list[NamedText], list[NamedText], list[NamedText]]:
    """Files for cursors, for the gate, and the rest."""
    files = sorted(source_files(folder, suffix, LEFT_OUT), key=lambda file: sha1(file[0].encode()).hexdigest())
    long = [file for file in files if len(file_lines(file[1])) >= LINES]
    count = min(FILES, len(files) // SHARE)
    test, valid = long[:count], long[count : count + min(FILES // 3, len(files) // SHARE // 2)]
    return test, valid, [file for file in files if file not in test + valid]


def runs_of(project: str, name: str, text: str, together: int) -> list[list[Cursor]]:
    """The cursors of a file: RUNS times those of some lines one after another, or of all lines."""
    cuts = [cut for cut in cut_points(name, text, file_lines(text), count=len(text)) if cut.kind == "character"]
    starts = {max(0, int((number + 0.5) * len(cuts) / RUNS - together / 2)) for number in range(RUNS)}
    return [[Cursor(project, name, text, cut) for cut in cuts[a : a + together]] for a in sorted(starts)]


def make_engine(
    out: Path, valid: Sequence[NamedText], train: Sequence[NamedText], loaded: LoadedModel
) -> NearbyEngine:
    """The engine of a project; its index and gate are made once."""
    engine = NearbyEngine(loaded)
    if not (out / "completion" / "gate.json").exists():
        engine.index = index_texts(train, engine.files)
        fitted, facts = fit_mixture(engine, valid, PLACES)
        assert fitted is not None
        write_index(out, index_texts([*train, *valid], engine.files))
        write_gate(out, fitted[1], facts)
    gate = read_gate(out)
    engine.index, engine.gate, engine.nearby = read_index(out), gate and gate[0], Nearby([*train, *valid])
    return engine


def copied(
    files: Sequence[NamedText], folders: Sequence[str], suffix: str, run: Sequence[Cursor]
) -> Iterator[Row]:
    """If lines copied from these files are right, and from dependencies, too."""
    more = [text for folder in folders for text in source_files(Path(folder), suffix, set())]
    more = more[: int(np.searchsorted(np.cumsum([len(text) for _, text in more]), MOST))]
    own = CopyNearest.of_files(files)
    both = CopyNearest([*own._far, *CopyNearest.of_files(more)._far])
    for cursor, (variant, copier) in product(run, (("copies", own), ("dependencies", both))):
        said = copier.complete(cursor.text[: cursor.cut.offset]).text.rstrip()
        yield *cursor.place, variant, said == cursor.cut.rest, 0.0


def report(rows: Sequence[Row], variants: Sequence[str]) -> None:
    """Print right lines, and paired differences to the first variant, by project and over all files."""
    by_cursor, table = defaultdict[tuple[str, str, int], dict[str, tuple[bool, float]]](dict), []
    for project, file, offset, variant, *figures in rows:
        by_cursor[project, file, offset][variant] = figures[0], figures[1]
    for project in [*sorted({where[0] for where in by_cursor}), "all"]:
        part = {w: r for w, r in by_cursor.items() if project in (w[0], "all") and {*variants} <= r.keys()}
        names = sorted({where[:2] for where in part})
        files = [names.index(where[:2]) for where in part]
        for variant in variants if part else ():
            right = np.mean([of[variant][0] for of in part.values()])
            gain, loss = np.array(
                [np.subtract(of[variant], of[variants[0]], dtype=float) for of in part.values()]
            ).T
            cells = [project, f"{len(part)} in {len(names)}", variant, f"{100 * right:.1f}"]
            cells += [f"{100 * gain.mean():+.1f}", interval(file_means(gain, files)).percent("+")]
            table.append([*cells, f"{(gain > 0).sum()}, {(gain < 0).sum()}", f"{loss.mean():+.3f}"])
    columns = [
        "project",
        "cursors, files",
        "variant",
        "right %",
        "minus first",
        "mean of files",
        "won, lost",
        "nats",
    ]
    print_table("Right lines, and the loss of a line minus that of the first variant", columns, table)


def main(
    out: tyro.conf.Positional[Path],
    folders: tyro.conf.Positional[tuple[str, ...]],
    model: Path = Path(),
    variants: tuple[str, ...] = ("none", "names", "block"),
    dependencies: tuple[str, ...] = (),
) -> None:
    """Measure.

    Args:
        out: Folder of gates, indexes and rows.
        folders: FOLDER:SUFFIX of each project.
        model: The folder of the model.
        variants: The first is what the others are compared with.
        dependencies: Folders of the first project's dependencies to copy from, without a model.
    """
    torch.set_num_threads(1)
    projects = {
        Path(folder).name: (Path(folder), suffix) for folder, _, suffix in (f.rpartition(":") for f in folders)
    }
    parts = {project: split(*source) for project, source in projects.items()}
    most = 1 << 30 if dependencies else TOGETHER
    runs = [[run for file in test for run in runs_of(name, *file, most)] for name, (test, *_) in parts.items()]
    in_turn = [run for turn in zip_longest(*runs) for run in turn if run]
    if dependencies:
        _, valid, train = parts[project := next(iter(parts))]
        cursors = [cursor for run in in_turn for cursor in run if cursor.project == project]
        suffix = projects[project][1]
        report([*copied([*valid, *train], dependencies, suffix, cursors)], ("copies", "dependencies"))
        return
    loaded = checkpoint.load_with_tokenizer(model)
    cache = PrefixCache(loaded.model.to(torch.bfloat16))
    engines = {project: make_engine(out / project, *files[1:], loaded) for project, files in parts.items()}
    path = out / "rows.jsonl"
    rows: list[Row] = [tuple(json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []
    done = {row[:4] for row in rows}
    for run, variant in product(in_turn, variants):
        if (*run[0].place, variant) not in done:
            engine = engines[run[0].project]
            engine.variant = variant
            rows += (scored := [*engine.score(cache, run)])
            with path.open("a") as file:
                file.writelines(json.dumps(row) + "\n" for row in scored)
    report(rows, variants)


if __name__ == "__main__":
    tyro.cli(main)
