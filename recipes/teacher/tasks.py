"""Generate instruction data with a language model, which reads a list of three seed tasks and continues the list.

Prompts, parsing and filters follow Stanford Alpaca. https://github.com/tatsu-lab/stanford_alpaca,
https://arxiv.org/abs/2212.10560
"""

import json
import random
import re
import string
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from dunes.data.records import rows
from dunes.text.lines import valid_text
from dunes.units import plural
from teacher.endpoint import Answer

import numpy as np

SHOWN = 3
"""Number of seed tasks in a prompt."""
LAST = 20
"""Number of the last task that a prompt asks for."""
PER_ANSWER = LAST - SHOWN
"""Maximum number of tasks in an answer."""
STOP = (f"\n{LAST}.",)
"""Stop string of an answer. Alpaca's stop string is "20.", which also matches inside "2020."."""
TOKENS = 3072
"""Maximum tokens of an answer."""

MAX_SIMILARITY = 0.7
"""An instruction is dropped if its ROUGE-L with an earlier instruction is higher than this."""

WORDS = (
    "image", "images", "graph", "graphs", "picture", "pictures", "file", "files", "map", "maps", "draw", "plot",
    "go to", "video", "audio", "music", "flowchart", "diagram",
)  # fmt: skip
"""Words for things that a text model cannot see or produce."""

BANNED = re.compile(rf"\b({'|'.join(WORDS)})\b", re.IGNORECASE)

REQUEST = f"""Write a list of {LAST} different tasks for a language model that follows instructions.

What they should be like:
1. No two begin with the same verb, and they are about different things.
2. Some are questions, some are orders: explaining, sorting, rewriting, summing up, inventing, reckoning and so on.
3. A language model can do them. It sees and makes text only, and it cannot remind or call anybody.
4. All is in English.
5. An instruction has one or two sentences.
6. The input is a real example of what the instruction is about, at most 100 words, and no placeholder.
7. Where an instruction needs no input, as a question about the world does, the input is "<noinput>".
8. The output answers the instruction and the input, in fewer than 100 words.

The {LAST} tasks:
"""
GO_ON = f"""###
Write tasks {SHOWN + 1} to {LAST} of the list, in exactly this layout and with these numbers. Begin with "###" and
"{SHOWN + 1}. Instruction:", and write nothing else.
"""
"""End of a prompt for a chat model, which answers instead of continuing."""
IDLE = 10
"""Number of requests in a row without a kept task after which a run ends."""


@dataclass(frozen=True, slots=True)
class Task:
    """An Alpaca record; `input` is empty if the instruction needs none."""

    instruction: str
    input: str
    output: str


@dataclass(frozen=True, slots=True)
class Item:
    """A model's text for one task, the parsed task, and the reason to drop the task (empty: it is kept)."""

    text: str
    task: Task | None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Round:
    """The tasks of one answer. Rounds are numbered from 0, as requests are."""

    number: int
    items: tuple[Item, ...]

    @property
    def kept(self) -> list[Task]:
        return [item.task for item in self.items if item.task and not item.reason]

    def row(self) -> dict[str, Any]:
        """The round as a JSON object."""
        return asdict(self)

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> "Round":
        """Rebuild a Round from the dict that `Round.row()` returned."""
        items = [Item(i["text"], i["task"] and Task(**i["task"]), i["reason"]) for i in row["items"]]
        return cls(row["number"], tuple(items))

    @classmethod
    def fits(cls, row: Mapping[str, Any]) -> bool:
        """True if `of` can rebuild a Round from this object of a file."""
        try:
            parsed = cls.of(row)
        except (LookupError, TypeError):
            return False
        texts = [text for task in parsed.kept for text in (task.instruction, task.input, task.output)]
        return isinstance(parsed.number, int) and all(isinstance(text, str) for text in texts)


def read_seed_tasks(path: Path | str) -> list[Task]:
    """The tasks in a file of records that have Alpaca's keys, or Self-Instruct's keys with `instances`.

    Raises ValueError that names the line and the expected value.
    """
    return [_seed_task(place, row) for place, row in rows(Path(path))]


def _seed_task(place: str, row: Any) -> Task:
    try:
        instance = row["instances"][0] if "instances" in row else row
        texts = (row["instruction"], instance["input"], instance["output"])
        if not all(isinstance(t, str) for t in texts):
            raise TypeError("a text")
    except (LookupError, TypeError):
        raise ValueError(
            f"{place}: expected an object with instruction, input and output, "
            f"or with instruction and instances, found {json.dumps(row)[:60]}"
        ) from None
    if reason := _surrogates(texts):
        raise ValueError(f"{place}: {reason}; remove it")
    return Task(*texts)


def _surrogates(texts: Iterable[str]) -> str:
    """A message if a text has lone surrogates, which no tokenizer accepts and JSON can contain; else empty."""
    return "" if all(valid_text(text) == text for text in texts) else "half of a surrogate pair"


def generate(
    answers: Iterable[tuple[int, Answer]], seeds: Sequence[Task], *, wanted: int, before: Iterable[Round] = ()
) -> Iterator[Round]:
    """Read answers until `wanted` tasks are kept, including those of `before`; yield the round of each answer.

    Raises ValueError after IDLE answers in a row without a kept task.
    """
    past = list(before)
    earlier = InstructionIndex([task.instruction for task in [*seeds, *(t for r in past for t in r.kept)]])
    total, idle = sum(len(r.kept) for r in past), 0
    if total >= wanted:
        return
    for number, answer in answers:
        items = (
            [Item(answer.text, None, answer.reason)]
            if answer.reason
            else parse_answer(answer.text, answer.truncated)
        )
        new_round = Round(number, tuple(filter_item(item, earlier) for item in items))
        total, idle = total + len(new_round.kept), 0 if new_round.kept else idle + 1
        yield new_round
        if total >= wanted:
            return
        if idle == IDLE:
            reasons = Counter(item.reason for item in new_round.items).most_common(3)
            raise ValueError(
                f"{IDLE} requests without a kept task; reasons in the last: {dict(reasons)}; try another "
                "model, or the same command again when the endpoint answers: kept tasks stay"
            )


def numbered_prompt(seeds: Sequence[Task], seed: int, number: int, chat: bool = False) -> str:
    """The prompt of a request, which shows a random sample of the seed tasks, and no generated tasks.

    It depends only on the arguments, so that a run can be resumed. Raises ValueError for too few seed tasks.
    """
    if len(seeds) < SHOWN:
        raise ValueError(
            f"{plural(len(seeds), 'seed task')}; a prompt shows {SHOWN}, so at least as many are needed"
        )
    prompt = build_prompt(random.Random(f"{seed} {number}").sample(seeds, SHOWN))
    return prompt.removesuffix(f"###\n{SHOWN + 1}. Instruction:") + GO_ON if chat else prompt


def build_prompt(tasks: Sequence[Task]) -> str:
    """The text of a prompt: REQUEST, the tasks in the layout of an answer, and the start of the next task."""
    text = REQUEST
    for i, task in enumerate(tasks, 1):
        instruction = " ".join(task.instruction.split()).rstrip(":")
        text += f"###\n{i}. Instruction: {instruction}\n{i}. Input:\n{task.input or '<noinput>'}\n"
        text += f"{i}. Output:\n{task.output}\n"
    return f"{text}###\n{len(tasks) + 1}. Instruction:"


HEADING = r"(?:^[^\S\n]*+#*+|(?<!#)#{3,}+)[^\S\n]*+\**+([0-9]{1,3})[.)]\**+[^\S\n]*+\**+(%s)\b[^\S\n]*+\**+:\**+"
"""The pattern of a heading such as "4. Input:", at the start of a line or after ###, perhaps in bold."""
FIELD = re.compile(f"(?im){HEADING % 'Instruction|Input|Output'}")
TASK = re.compile(f"(?im){HEADING % 'Instruction'}")
END = re.compile(r"(?m)^[^\S\n]*+#{3,}+[^\S\n]*+$|(?<!#)#{3,}+\s*+\Z|(?<!:)\n-{3,}+\s*+\Z")
"""What ends a task: ### on its own line, or ### or --- at the end. Other ### may be a title or a comment."""
STRAY = re.compile(r"(?im)^[^\w\n]*+[0-9]{1,3}[^\w\n]++(?:instruction|task|input|output)\b[ *_]*+:")
"""A heading in any form, which no text of a task has."""
NO_INPUT = ("<noinput>", "noinput", "none", "n/a")


def parse_answer(answer: str, truncated: bool, first: int = SHOWN + 1) -> Iterator[Item]:
    """The items of an answer, by the headings of its tasks. The last item of a truncated answer is dropped.

    An answer may go on after the heading of task `first`, or begin as chat models do: with their thoughts, an
    introduction or a code fence. Tasks may have other numbers than they should, but none above LAST.
    """
    answer = re.sub(r"(?s)\A\s*<think>.*?</think>", "", answer)
    starts = [0, *(match.start() for match in TASK.finditer(answer)), len(answer)]
    lead, *parts = (answer[a:b] for a, b in pairwise(starts))
    if not parts or STRAY.search(lead):
        parts = [f"{first}. Instruction:{lead}", *parts]
    if lead.count("```") % 2 and parts[-1].count("\n```") % 2:  # what follows the fence is no part of the output
        parts[-1] = parts[-1].rpartition("\n```")[0]
    for i, text in enumerate(parts, 1):
        body, *ended = END.split(text, maxsplit=1)
        _, *fields = FIELD.split(body)
        names, texts = [name.lower() for name in fields[1::3]], [field.strip() for field in fields[2::3]]
        if names == ["instruction", "output"]:
            names[1:1], texts[1:1] = ["input"], [""]
        if truncated and i == len(parts) and not ended:
            yield Item(text, None, "truncated")
        elif (
            names != ["instruction", "input", "output"]
            or len({*fields[::3]}) > 1
            or int(fields[0]) > LAST
            or any(map(STRAY.search, texts))
        ):
            yield Item(text, None, "layout")
        else:
            instruction, task_input, output = texts
            task_input = "" if task_input.lower().strip("\"'`*.") in NO_INPUT else task_input
            yield Item(text, Task(instruction, task_input, output), "" if output else "no output")


def filter_item(item: Item, earlier: "InstructionIndex") -> Item:
    """The item, with a reason if it is dropped. The instruction of a kept item is added to `earlier`."""
    if item.task is None or item.reason:
        return item
    instruction = item.task.instruction
    if reason := rejection_reason(instruction) or _surrogates(asdict(item.task).values()):
        return replace(item, reason=reason)
    if match := earlier.nearest(instruction, MAX_SIMILARITY):
        return replace(item, reason=f"similar: {match[0]:.2f} to {match[1]!r}")
    earlier.add(instruction)
    return item


def rejection_reason(instruction: str) -> str:
    """The reason to drop an instruction because of its own text; empty if no reason applies."""
    length, banned, ink = len(instruction.split()), BANNED.search(instruction), "".join(instruction.split())
    reasons = {
        "short": length <= 3,
        "long": length > 150,
        f"word: {banned and banned[0].lower()}": banned,
        "program": instruction.startswith("Write a program"),
        "punctuation": instruction[:1] in string.punctuation,
        "not ASCII": not instruction[:1].isascii() or 2 * sum(map(str.isascii, ink)) < len(ink),
    }
    return next((reason for reason, applies in reasons.items() if applies), "")


def words(text: str) -> list[str]:
    """ROUGE's tokens: runs of ASCII letters and digits, in lower case."""
    return re.findall("[a-z0-9]+", text.lower())


def _measure(common: int, a: int, b: int) -> float:
    """The ROUGE-L F measure of texts of `a` and `b` tokens whose longest common subsequence has `common` tokens.

    https://aclanthology.org/W04-1013; operations are in rouge_score's order, for bit-equal results.
    """
    if not common:
        return 0.0
    precision, recall = common / b, common / a
    return 2 * precision * recall / (precision + recall)


def _masks(tokens: Sequence[str]) -> dict[str, int]:
    """For each token, a bit mask of its positions."""
    masks: dict[str, int] = defaultdict(int)
    for i, token in enumerate(tokens):
        masks[token] |= 1 << i
    return dict(masks)


def _common(masks: Mapping[str, int], tokens: Iterable[str]) -> int:
    """Length of the longest common subsequence, computed bit-parallel: a row of the table is one integer.

    Hyyrö's algorithm, https://doi.org/10.1016/j.ipl.2004.04.006
    """
    row = ones = (1 << sum(m.bit_count() for m in masks.values())) - 1
    for token in tokens:
        if hit := row & masks.get(token, 0):
            row = (row + hit | row - hit) & ones
    return (ones ^ row).bit_count()


class InstructionIndex:
    """An index of instructions that finds the most similar instruction without comparing all of them.

    The number of shared tokens is an upper bound of the length of a common subsequence. The k-th occurrence of a
    token has its own inverted list, so that one pass counts the shared tokens of all texts.
    """

    def __init__(self, texts: Iterable[str] = ()) -> None:
        self.texts: list[str] = []
        self.tokens: list[list[str]] = []
        self.lengths = array("i")
        self.postings: dict[tuple[str, int], array[int]] = defaultdict(lambda: array("i"))
        for text in texts:
            self.add(text)

    def add(self, text: str) -> None:
        tokens = words(text)
        for key in _number_occurrences(tokens):
            self.postings[key].append(len(self.texts))
        self.texts.append(text)
        self.tokens.append(tokens)
        self.lengths.append(len(tokens))

    def nearest(self, text: str, above: float = 0.0) -> tuple[float, str] | None:
        """The highest ROUGE-L F measure, and the first text that has it; None if no measure exceeds `above`."""
        tokens = words(text)
        masks, best, nearest = _masks(tokens), above, None
        bounds = self._bounds(tokens)
        candidates = np.flatnonzero(bounds > above - 1e-9)  # rounding differs from the measure
        for i in candidates[np.argsort(-bounds[candidates], kind="stable")].tolist():
            if bounds[i] < best - 1e-9:
                break
            score = _measure(_common(masks, self.tokens[i]), len(tokens), len(self.tokens[i]))
            if score > best or (nearest is not None and score == best and i < nearest):
                best, nearest = score, i
        return None if nearest is None else (best, self.texts[nearest])

    def _bounds(self, tokens: Sequence[str]) -> np.ndarray[Any, np.dtype[np.float64]]:
        """An upper bound of the ROUGE-L F measure of each text, float64 (N,)."""
        hits = [np.array(self.postings[key]) for key in _number_occurrences(tokens) if key in self.postings]
        shared = np.bincount(np.concatenate(hits) if hits else np.zeros(0, np.int64), minlength=len(self.texts))
        sizes = np.array(self.lengths) + len(tokens)
        bounds: np.ndarray[Any, np.dtype[np.float64]] = 2 * shared / np.maximum(sizes, 1)
        return bounds


def _number_occurrences(tokens: Iterable[str]) -> list[tuple[str, int]]:
    return [(token, number) for token, times in Counter(tokens).items() for number in range(times)]
