"""The finetuning task: batches, validation, forgetting, and answers before and after."""

import json
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field, replace
from functools import cached_property, partial
from hashlib import sha256
from math import inf
from operator import index
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
import torch

from dunes import checkpoint, tree
from dunes.augment import Change
from dunes.augment.options import NAME
from dunes.checkpoint import LoadedModel
from dunes.data import TokenIds
from dunes.data.examples import Example, Record
from dunes.data.packing import Batch, Batches
from dunes.evaluate.text_loss import Score, evaluate, score_batches
from dunes.files import json_file
from dunes.files.atomic import write_file
from dunes.files.json_file import append_text
from dunes.inference.text_generator import TextGenerator
from dunes.runs.augment import history
from dunes.runs.finetune_config import FinetuneConfig
from dunes.runs.finetune_data import FinetuneData, memory
from dunes.runs.finetune_method import METHODS
from dunes.runs.memory import describe_memory
from dunes.runs.run import FINAL_TOKENS, Run, card_facts
from dunes.runs.stored_state import read_score
from dunes.text import templates
from dunes.text.templates import Conversation
from dunes.units import format_count, plural

ANSWERED = 3
"""Validation examples to answer before and after finetuning."""

ANSWER_TOKENS = 160
"""Most tokens of an answer."""

FORGETTING_TOKENS = 65_536
"""Tokens of the forgetting data to score before and after finetuning."""

LINES, LINE = 5, 200  # of an answer in the report; characters of a line

VAL_BATCH = 16
"""Batch size of validation."""

PROBED = 2_048
"""Tokens to score first, in order to estimate how many fit the time budget."""

BUDGET = 0.05
"""Fraction of a time-limited run for each measurement of the base model (validation, forgetting, answers). The
finetuned model is measured on the same tokens."""


@dataclass(frozen=True)
class Baseline:
    """A model's validation score, its score on the forgetting data, and its answers.

    `text` is the fingerprint of the forgetting data, `limits` are the token limits of the two scores, and
    `seconds` is the time taken by forgetting and answers.
    """

    score: Score
    forgetting: Score | None
    answers: list[str]
    text: str
    limits: tuple[int, int] = (FINAL_TOKENS, FORGETTING_TOKENS)
    seconds: float = 0.0

    @classmethod
    def read(cls, path: Path) -> "Baseline":
        """The baseline in a file that `write` wrote. Raises ValueError for other contents."""
        stored = json_file.read(path)
        try:
            score, forgetting = map(read_score, (stored["score"], stored["forgetting"]))
            text, answers = stored["text"], list(stored["answers"])
            limits = index(stored["limits"][0]), index(stored["limits"][1])
            seconds = float(stored["seconds"])
        except (KeyError, TypeError, ValueError):
            score = None
        if score is None or not all(isinstance(answer, str) for answer in (text, *answers)):
            expected = "score, forgetting, answers, text, limits and seconds, as a finetune writes them"
            raise ValueError(f"{path}: expected {expected}")
        return cls(score, forgetting, answers, text, limits, seconds)

    def write(self, path: Path) -> None:
        scores = {"score": astuple(self.score), "forgetting": self.forgetting and astuple(self.forgetting)}
        write_file(path, json.dumps(asdict(self) | scores, indent=1).encode())


@dataclass(frozen=True)
class FinetuneTask:
    """Training on examples. `forgetting_ids` measure forgetting, `stored` is the base model's dtype.

    `base` is the `base_identity` of the base model, `changes` are the changes made to it.
    """

    data: FinetuneData
    forgetting_ids: TokenIds | None
    stored: torch.dtype
    before: Baseline | None = None
    base: Mapping[str, Any] = field(default_factory=dict)
    changes: Sequence[Change] = ()

    @property
    def config(self) -> FinetuneConfig:
        return self.data.config

    @property
    def loaded(self) -> LoadedModel:
        architecture = self.data.base.architecture
        architecture = replace(architecture, changes=(*architecture.changes, *self.changes))
        return replace(self.data.loaded, architecture=architecture)

    @cached_property
    def fingerprints(self) -> Mapping[str, str]:
        digest = sha256()
        for side in (self.data.train, self.data.valid):
            digest.update(str(len(side)).encode())
            for e in side:
                digest.update(e.ids.tobytes() + e.loss_mask.tobytes())
        return {"examples": digest.hexdigest(), "base": str(self.base["sha256"])}

    @property
    def tokens(self) -> int:
        targets = sum(e.targets(self.config.context_length) for e in self.data.valid)
        return targets if self.before is None else min(targets, self.before.limits[0])

    @property
    def closing_seconds(self) -> float:
        return self.before.seconds if self.before is not None else 0.0

    def batches(self, start: int) -> Iterator[Batch]:
        config = self.config
        rows = Batches(self.data.train, config.context_length, config.micro_batch, config.seed, config.packing)
        return rows.batches(start)

    def score(self, dtype: torch.dtype, limit: int | None = None) -> Score:
        if limit is not None and self.before is not None:
            limit = min(limit, self.before.limits[0])
        examples, context = self.data.valid, self.config.context_length
        if limit is not None:
            examples = _first_examples(examples, context, limit)
        batches = Batches(examples, context, VAL_BATCH)
        return score_batches(self.loaded, batches.one_epoch(), dtype)

    def sample(self) -> str:
        return "\n".join(f"{_question(r.turns)}\n>>> {self._answer(r)}" for r in self.data.val_records[:1])

    def measure_baseline(self, dtype: torch.dtype, score: Score | None = None) -> Baseline:
        """Score the model and generate its answers; `score` is its validation score if known already."""
        most, start = (FINAL_TOKENS, FORGETTING_TOKENS) if self.before is None else self.before.limits, monotonic()
        ids = () if self.forgetting_ids is None else self.forgetting_ids
        forgetting, kept = _score_within(self._budget, partial(self.score_forgetting, dtype), most[1], len(ids))
        answers = self._answers()
        seconds = monotonic() - start
        if score is None:
            score, scored = _score_within(self._budget, partial(self.score, dtype), most[0], self.tokens)
        else:
            scored = most[0]
        assert score is not None, "there are validation examples"
        return Baseline(score, forgetting, answers, self.text, (scored, kept), seconds)

    @property
    def _budget(self) -> float:
        """Seconds that each measurement of the base model may take; unlimited when its limits are repeated."""
        return BUDGET * self.config.seconds if self.config.stops_by_time and self.before is None else inf

    def _answers(self) -> list[str]:
        """Answers to the first validation examples, as many as the base model's, or as the budget permits."""
        answers, end = list[str](), monotonic() + self._budget
        for record in self.data.val_records[: ANSWERED if self.before is None else len(self.before.answers)]:
            answers.append(self._answer(record))
            if monotonic() > end:
                break
        return answers

    @property
    def text(self) -> str:
        """Fingerprint of the forgetting data; empty without any."""
        return "" if self.forgetting_ids is None else sha256(np.asarray(self.forgetting_ids).tobytes()).hexdigest()

    def score_forgetting(self, dtype: torch.dtype, limit: int) -> Score | None:
        """The score on about `limit` tokens of the forgetting data, if there is any."""
        if self.forgetting_ids is None:
            return None
        return evaluate(self.data.base, self.forgetting_ids, dtype, limit)

    def _answer(self, record: Record) -> str:
        """The model's answer by greedy decoding."""
        talk, generator = record.turns, TextGenerator(self.loaded)
        if talk[-1].role == "text":
            ids = generator.tokenizer.prompt("")
        else:
            prompt = talk[:-1] if talk[-1].role == "assistant" else talk
            ids = templates.encode_prompt(self.data.template, prompt, generator.tokenizer, record.variables)
        ids = ids[-max(1, generator.context_length - ANSWER_TOKENS) :]
        device, dtype = next(generator.model.parameters()).device, getattr(torch, self.config.dtype or "float32")
        with torch.autocast(device.type, dtype, dtype != torch.float32):
            return generator.text(ids, ANSWER_TOKENS)

    def memory_advice(self) -> str:
        remedy = "reduce --context-length or --micro-batch, or use --method qlora"
        return f"{describe_memory(memory(self.data))}; {remedy}"

    def begin(self, run: Run) -> list[str]:
        config, trained = self.config, tree.count(run.model, trainable=True)
        assert config.threads, "set by `FinetuneData.complete`"
        total = tree.count(self.data.base.model)
        return [
            f"{config.method} at {config.lr:.2g}: {format_count(trained)} of {format_count(total)} parameters; "
            f"{plural(config.batch, 'row')} x {config.context_length} tokens per step, micro-batches of "
            f"{config.micro_batch}; "
            f"{config.dtype} on {run.trainer.device.type}, {plural(config.threads, 'thread')}; {config.length}"
        ]

    def close(self, run: Run, score: Score, interrupted: bool) -> list[str]:
        if METHODS[self.config.method].adapter is None and self.stored != torch.float32:
            run.model.to(self.stored)  # to score the weights as saved
            score = self.score(run.trainer.dtype, FINAL_TOKENS)
        after = None if interrupted else self.measure_baseline(run.trainer.dtype, score)
        self._save(run, self._facts(run, score, after))
        lines = [] if after is None else self._lines(after)
        try:
            if after is not None:
                _append_once(run.folder / "samples.md", self._page(after))
        except OSError as error:  # the weights are saved by now
            lines.insert(0, f"warning: writing samples.md failed: {error}")
        return [*lines, *self._next(run.folder)]

    def _save(self, run: Run, about: Mapping[str, Any]) -> None:
        loaded, context = self.loaded, self.loaded.context_length
        if METHODS[self.config.method].saves_model:
            arguments = run.model, run.folder, loaded.tokenizer, context, about
            checkpoint.save(*arguments, architecture=loaded.architecture)
            return
        options: dict[str, Any] = {"tokenizer": loaded.tokenizer, "context_length": context, "facts": about}
        checkpoint.save_adapter(run.model, run.folder, NAME, self._base, identity=self.base, **options)

    @property
    def _base(self) -> Path | str:
        """The folder of the base model, or its name on the Hub."""
        return self.data.folder if Path(self.config.model).exists() else self.config.model

    def _facts(self, run: Run, score: Score, after: Baseline | None) -> dict[str, Any]:
        assert self.before is not None, "measured at the start"
        about = card_facts(run, score, "finetuned")
        if after is not None:
            about["measured"] |= {"before": self.before.score.loss}
        if after is not None and self.before.forgetting and after.forgetting:
            losses = {"before": self.before.forgetting.loss, "after": after.forgetting.loss}
            about["measured"] |= {"forgetting": losses}
        if (template_name := self.data.template_name) is not None:
            about["template"] = template_name
        whole = METHODS[self.config.method].saves_model
        return about | {"changes": history(self.data.base) if whole else [c.record() for c in self.changes]}

    def _lines(self, after: Baseline) -> list[str]:
        """The final report: validation loss, forgetting, and answers before and after."""
        assert self.before is not None, "measured at the start"
        values = f"{self.before.score.loss:.3f} nats/token before, {after.score.loss:.3f} after"
        lines = [f"validation loss of answers: {values}"]
        if not after.score.loss < self.before.score.loss:
            lines.append("warning: no better than the base model; try a lower --lr, or check the examples")
        if self.before.forgetting and after.forgetting:
            was, now = self.before.forgetting.loss, after.forgetting.loss
            values = f"{was:.3f} before, {now:.3f} after ({now - was:+.3f})"
            lines.append(f"forgetting: loss on the base model's own text {values}")
        for record, *answers in zip(self.data.val_records, self.before.answers, after.answers, strict=False):
            lines += ["", *(f"{label:>8}  {_short(text)}" for label, text in _comparison(record.turns, *answers))]
        return [*lines, ""]

    def _next(self, folder: Path) -> list[str]:
        run = shlex.quote(str(folder))
        if METHODS[self.config.method].saves_model:
            return [f"model: {run}", f"try: dunes chat {run}"]
        return [f"adapter: {run}", f"try: dunes chat {run}   or: dunes augment merge {run} {run}-merged"]

    def _page(self, after: Baseline) -> str:
        """Answers before and after, as a Markdown table."""
        assert self.before is not None, "measured at the start"
        rows = ["## Validation examples, before and after", ""]
        rows += ["| prompt | expected | before | after |", "|---|---|---|---|"]
        for record, *answers in zip(self.data.val_records, self.before.answers, after.answers, strict=False):
            cells = [text for _, text in _comparison(record.turns, *answers)]
            rows.append("| " + " | ".join(c.replace("|", "\\|").replace("\n", "<br>") for c in cells) + " |")
        return "\n".join([*rows, "", ""])


def _score_within(
    seconds: float, score: Callable[[int], Score | None], most: int, available: int
) -> tuple[Score | None, int]:
    """The score on as many tokens as fit into `seconds`, at most `most`, and this number of tokens."""
    start = monotonic()
    if seconds == inf or min(most, available) <= PROBED or (first := score(PROBED)) is None:
        return score(most), most
    limit = min(most, int(PROBED * (seconds / max(1e-9, monotonic() - start) - 1)))
    return (score(limit), limit) if limit > 2 * PROBED else (first, PROBED)


def _append_once(path: Path, text: str) -> None:
    """Append text to a file unless the file has it already, as after resuming a finished run."""
    if not (path.is_file() and text in path.read_text(errors="replace")):
        append_text(path, text)


def _comparison(talk: Conversation, was: str, now: str) -> list[tuple[str, str]]:
    expected = talk[-1].text if talk[-1].role == "assistant" else ""
    return [("prompt", _question(talk)), ("expected", expected), ("before", was), ("after", now)]


def _question(talk: Conversation) -> str:
    return next((turn.full_text for turn in reversed(talk) if turn.role == "user"), "")


def _first_examples(examples: Sequence[Example], context: int, limit: int) -> Sequence[Example]:
    """The first examples with about this many targets."""
    counts = np.cumsum([e.targets(context) for e in examples])
    return examples[: int(np.searchsorted(counts, limit)) + 1]


def _short(text: str) -> str:
    """The first lines of an answer for the report; samples.md has the full text."""
    lines = [line[:LINE] for line in text.split("\n") if line.strip()]
    cut = len(lines) > LINES or len(text) > LINE * LINES
    return "\n          ".join([*lines[:LINES], *["..."] * cut])
