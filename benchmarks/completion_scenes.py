"""Line completion in small scenes that a user may try first, by a run trained on other text, against copying.

    python benchmarks/completion_scenes.py RUN [--scenes benchmarks/scenes]

A scene is a file LANGUAGE/KIND-NAME.EXT. ▏ marks the cursor; the correct texts follow it up to ▕, separated by ¦,
and the text after ▕ is behind the cursor. If a correct text ends in …, a suggestion only has to begin with it, and
may end or continue at the end of a word. If the texts begin with ≠, a suggestion is right if it begins with none.
KIND-NAME.open.EXT, if it exists, is another open file; the correct text follows from the scene and this file. Both
sides also have the run's training files.
"""

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from dunes import measure
from dunes.completion import Suggestion
from dunes.completion.completer import CopyNearest, FolderCompleter
from dunes.completion.text import first_line
from dunes.progress import print_table

import torch
import tyro

SCENES = Path(__file__).parent / "scenes"
CURSOR, END, OR, PART, NOT = MARKS = "▏▕¦…≠"
_SCENE = re.compile("(?s)(?P<before>[^▏▕¦]*)▏(?P<expected>[^▏▕\\n]*)▕(?P<after>[^▏▕¦]*)")
SIDES = ("ours", "copying", "ours, nothing open", "copying, nothing open")


@dataclass(frozen=True)
class Scene:
    """A text `before` and `after` a cursor, what is right there, and the file that is open beside it, if any."""

    path: Path
    before: str
    after: str
    expected: tuple[str, ...]
    opened: str = ""

    @property
    def name(self) -> str:
        """The language and the file's name."""
        return f"{self.language}/{self.path.name}"

    @property
    def language(self) -> str:
        """The name of its folder."""
        return self.path.parent.name

    @property
    def kind(self) -> str:
        """The knowledge that the scene needs, which is the first word of its name."""
        return self.path.name.split("-")[0]

    @property
    def opened_name(self) -> str:
        """The name of the file that is open beside it."""
        return f"{self.path.stem}.open{self.path.suffix}"

    def is_right(self, suggestion: str) -> bool:
        """True if the suggested line is an expected one, ignoring trailing white space."""
        line = first_line(suggestion).rstrip()
        if self.expected[0].startswith(NOT):
            return not any(_agrees(line, text.removeprefix(NOT)) for text in self.expected)
        return any(_agrees(line, text) for text in self.expected)


def _agrees(line: str, expected: str) -> bool:
    if not expected.endswith(PART):
        return line == expected
    part = expected.removesuffix(PART)
    ends_inside = (part[-1] + line[len(part) :][:1]).isidentifier() and len(line) > len(part)
    return line.startswith(part) and not ends_inside


def parse_scene(path: Path) -> Scene:
    """The scene in a file. Raises ValueError if it has not one cursor and at least one text that is expected."""
    whole = _SCENE.fullmatch(path.read_text("utf-8"))
    texts = tuple(whole["expected"].split(OR)) if whole else ()
    if whole is None or not all(text.removeprefix(NOT).removesuffix(PART).strip() for text in texts):
        raise ValueError(
            f"{path}: expected one {CURSOR}, texts with {OR} between them and one {END}; see {SCENES}"
        )
    opened = path.with_suffix(f".open{path.suffix}")
    return Scene(
        path, whole["before"], whole["after"], texts, opened.read_text("utf-8") if opened.exists() else ""
    )


def find_scenes(folder: Path) -> list[Scene]:
    """The scenes in a folder's folders."""
    return [parse_scene(path) for path in sorted(folder.glob("*/*-*.*")) if ".open" not in path.suffixes]


class CopyLonger:
    """Copies after the longest match that any of some copiers finds, the last one's if equally long."""

    def __init__(self, copiers: Sequence[CopyNearest]) -> None:
        self._copiers = copiers

    def complete(self, before: str, after: str = "", name: str = "") -> Suggestion:
        """The rest of the line behind the match."""
        found = [copier.complete(before, after, name) for copier in reversed(self._copiers)]
        return max(found, key=lambda suggestion: suggestion.line)


@contextmanager
def file_open(completer: FolderCompleter, scene: Scene) -> Iterator[FolderCompleter]:
    """The completer while the scene's file is open in it."""
    completer.update(scene.opened_name, scene.opened)
    yield completer
    completer.update(scene.opened_name, None)


def complete_scene(scene: Scene, completer: FolderCompleter, copier: CopyNearest) -> dict[str, Suggestion]:
    """Suggestions of each side."""
    text = scene.before, scene.after, scene.path.name
    alone = completer.complete(*text), copier.complete(*text)
    if not scene.opened:
        return dict(zip(SIDES, alone * 2, strict=True))
    copiers = CopyLonger([copier, CopyNearest.of_files([(scene.opened_name, scene.opened)])])
    with file_open(completer, scene):
        return dict(zip(SIDES, (completer.complete(*text), copiers.complete(*text), *alone), strict=True))


Results = Sequence[tuple[Scene, dict[str, Suggestion]]]
"""Scenes, and what each side suggests in them."""


def count_right(results: Results) -> dict[str, int]:
    """How many of some scenes there are, and how many each side has right."""
    right = {side: sum(scene.is_right(found[side].text) for scene, found in results) for side in SIDES}
    return {"scenes": len(results), **right}


def report(results: Results) -> dict[str, dict[str, dict[str, int]]]:
    """Print tables by language and by kind, and what was suggested where ours is wrong; returns the counts."""
    counts: dict[str, dict[str, dict[str, int]]] = {}
    for by in ("language", "kind"):
        groups = dict.fromkeys(getattr(scene, by) for scene, _ in results)
        parts = {group: [row for row in results if getattr(row[0], by) == group] for group in groups}
        counts[by] = {group: count_right(part) for group, part in {**parts, "all": results}.items()}
        rows = [[group, *map(str, count.values())] for group, count in counts[by].items()]
        print_table(f"Scenes that are right, by {by}", [by, "scenes", *SIDES], rows)
    for scene, found in results:
        ours, copied = (found[side] for side in SIDES[:2])
        if not scene.is_right(ours.text):
            line = scene.before.rsplit("\n", 1)[-1].strip()
            print(
                f"\n{scene.name}\n  expected {line}{CURSOR}{OR.join(scene.expected)}{END}{first_line(scene.after)}"
            )
            print(f"  ours     {line}{CURSOR}{ours.text}  (word {ours.word:.2f}, line {ours.line:.2f})")
            print(f"  copying  {line}{CURSOR}{copied.text}{'  right' * scene.is_right(copied.text)}")
    return counts


def main(run: Path, scenes: Path = SCENES) -> None:
    """Complete the scenes.

    Args:
        run: A run that completes lines.
        scenes: The folder of the scenes, with a folder for each language.
    """
    torch.set_num_threads(1)
    completer = FolderCompleter(run)
    copier = CopyNearest.of_files(completer.training_files)
    results = [(scene, complete_scene(scene, completer, copier)) for scene in find_scenes(scenes)]
    counts = report(results)
    missed = {scene.name: found["ours"].text for scene, found in results if not scene.is_right(found["ours"].text)}
    print(json.dumps({"machine": measure.fingerprint(), **counts, "missed": missed}))


if __name__ == "__main__":
    tyro.cli(main, config=(tyro.conf.PositionalRequiredArgs,))
