"""Use a model folder as a model of lm-evaluation-harness.

Results equal those of the harness's `hf` backend for the same folder (tests/test_harness.py). This module imports
lm_eval, so it is imported only in `evaluate/tasks.py`, when tasks are run.
https://github.com/EleutherAI/lm-evaluation-harness/blob/main/docs/model_guide.md
"""

# Shapes: B batch, T tokens, N tokens that are scored, V vocabulary.

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch import Tensor

from dunes import checkpoint, measure
from dunes.evaluate.text_loss import BATCH
from dunes.files import json_file
from dunes.generate import Sampler, sampler
from dunes.generate.sampling import RULES
from dunes.inference.text_generator import TextGenerator, cut_at_stop
from dunes.progress import report
from dunes.text import hf_tokenizers
from dunes.text.special_tokens import token_text
from dunes.units import plural

TOKENS = 256
"""Default maximum number of new tokens, as in the `hf` backend."""

LIMITS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""Names for the maximum number of new tokens in a task's settings; the first name present is used."""

SETTINGS = tuple(name for name, rule in RULES.items() if rule.process)
OPTIONS = (*LIMITS, "until", "do_sample", *SETTINGS)
WITHOUT_EFFECT = {"num_beams": 1}

T = TypeVar("T")
Question = tuple[Any, list[int], list[int]]
"""(texts, context ids, continuation ids to score)."""


class Harness(TemplateLM):
    """The harness's interface to a model folder.

    `truncated` counts inputs longer than the context length; they are truncated on the left. Raises ValueError for
    a folder without a model.
    """

    def __init__(self, folder: Path, any_base: bool = False) -> None:
        super().__init__()
        self._device = measure.device()
        loaded = checkpoint.load_with_tokenizer(folder, self._device, any_base)
        self.model, self.max_length, self.truncated = loaded.model, loaded.context_length, 0
        self.generator = TextGenerator(loaded)
        tokenizer = self.generator.tokenizer
        # This copy parses special tokens in a task's text, as the `hf` backend does; `loaded.tokenizer` does not.
        self.inner = hf_tokenizers.parse(tokenizer.json())
        self.inner.no_truncation()
        self.inner.no_padding()
        self._end = tokenizer.eos
        # The `hf` backend scores after BOS even if the tokenizer does not add it.
        first = token_text(json_file.read_if_present(tokenizer.config_path), "bos_token")
        self._first = self._end if first is None else tokenizer.token_id(first)

    @property
    def eot_token_id(self) -> int:
        """The EOS id."""
        return self._end

    @property
    def prefix_token_id(self) -> int:
        """The id that precedes a text without a context."""
        return self._first

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Ids of the text. Special tokens are not added if the text already starts with BOS."""
        if add_special_tokens is None:
            add_special_tokens = not string.startswith(self._decode([self._first]))
        ids: list[int] = self.inner.encode(string, add_special_tokens=add_special_tokens).ids
        return ids

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self.inner.decode(list(ids), skip_special_tokens=False))

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        """The log-likelihood of each continuation given its context, and True if greedy decoding generates it.

        Raises ValueError for a continuation that is longer than the model's context length, or that has no token
        of its own because one token spans context and continuation.
        """
        # The superclass moves spaces from the context's end to the continuation, and splits the ids.
        answers: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm=True)
        return answers

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = True) -> list[float]:
        """The log-likelihood of each text, scored in windows of the context length without overlap."""
        questions: list[Question] = []
        stops = []
        for request in requests:
            ids = self.tok_encode(request.args[0])
            rolling = get_rolling_token_windows(ids, self._first, self.max_length, context_len=1)
            questions += [(None, *make_disjoint_window(pair)) for pair in rolling]
            stops.append(len(questions))
        logprobs = [logprob for logprob, _ in self._loglikelihood_tokens(questions)]
        return [sum(logprobs[start:stop], 0.0) for start, stop in pairwise([0, *stops])]

    def _loglikelihood_tokens(self, requests: Sequence[Question], **kwargs: Any) -> list[tuple[float, bool]]:
        """Each question's log-likelihood, and True if its continuation is greedy. Questions that differ only in
        their last id share a row."""
        rows: dict[tuple[int, ...], list[int]] = {}
        for i, question in enumerate(requests):
            rows.setdefault(self._read(*question), []).append(i)
        answers = [(0.0, False)] * len(requests)
        for batch in self._batches("scoring", sorted(rows, key=len, reverse=True)):
            for ids, states in zip(batch, self._states(batch), strict=True):
                for i in rows[ids]:
                    answers[i] = self._answer(states[: len(ids)], requests[i][2])
        return answers

    def _read(self, source: Any, before: list[int], continuation: list[int]) -> tuple[int, ...]:
        """The model's input: all ids but the last, truncated on the left to the context length."""
        if not continuation:
            raise ValueError(
                f"{source[1]!r} after {source[0][-20:]!r} has no token of its own, since one token spans "
                "both; set target_delimiter to a newline in the task's YAML"
            )
        if len(continuation) > self.max_length:
            raise ValueError(
                f"{source[1][:20]!r}...: an answer of {plural(len(continuation), 'token')} does not fit into the "
                f"model's context length of {self.max_length}; shorten the answers, or train with a larger "
                "--context-length"
            )
        self.truncated += len(before) + len(continuation) > self.max_length + 1
        return tuple((before + continuation)[-(self.max_length + 1) : -1])

    @torch.no_grad()
    def _states(self, batch: Sequence[tuple[int, ...]]) -> Tensor:
        """The hidden states (B, T, dim) before the head. Rows are padded on the right; causal attention ignores
        this padding."""
        width = max(map(len, batch))
        ids = torch.tensor([[*row, *[0] * (width - len(row))] for row in batch], device=self._device)
        return self.model.hidden(ids)

    @torch.no_grad()
    def _answer(self, states: Tensor, continuation: list[int]) -> tuple[float, bool]:
        targets = torch.tensor(continuation, device=states.device)
        logprobs = self.model.logits(states[-len(continuation) :]).float().log_softmax(-1)  # NV
        logprob = logprobs.gather(1, targets[:, None]).sum()
        return float(logprob), bool((logprobs.argmax(-1) == targets).all())

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = True) -> list[str]:
        """Generate text after each context, up to the first stop string, EOS or the token limit.

        Raises ValueError for unsupported settings, and if the token limit leaves no room for the context.
        """
        groups: dict[str, list[int]] = {}
        for i, request in enumerate(requests):
            groups.setdefault(json.dumps(request.args[1], sort_keys=True), []).append(i)
        answers = [""] * len(requests)
        for members in groups.values():
            first = requests[members[0]]
            place = f"task {first.task_name}"
            settings = parse_settings(first.args[1], place, self.max_length, self._decode([self._end]))
            prompts = {i: self._prompt(requests[i].args[0], settings.max_tokens) for i in members}
            for batch in self._batches("generating", sorted(members, key=lambda i: -len(prompts[i]))):
                for i, text in zip(batch, self._write({i: prompts[i] for i in batch}, settings), strict=True):
                    answers[i] = text
        return answers

    def _prompt(self, context: str, max_tokens: int) -> list[int]:
        """The ids of the context, truncated on the left to leave room for the answer."""
        ids = self.tok_encode(context) or [self._first]
        room = self.max_length - max_tokens
        self.truncated += len(ids) > room
        return ids[-room:]

    def _write(self, prompts: Mapping[int, list[int]], settings: "GenerationSettings") -> list[str]:
        """The text generated after each prompt; the index of a prompt is the seed for sampling its text."""
        request = self.generator.request
        requests = [request(ids, settings.max_tokens, settings.sample(seed=i)) for i, ids in prompts.items()]
        for _ in self.generator.tokens(requests, settings.until):
            pass
        texts = (str(self.inner.decode(r.ids[len(r.prompt) :])) for r in requests)
        return [cut_at_stop(text, settings.until) for text in texts]

    def _batches(self, doing: str, rows: Sequence[T]) -> Iterator[Sequence[T]]:
        for start in range(0, len(rows), BATCH):
            report(f"{doing} {start} of {len(rows)}", start / len(rows))
            yield rows[start : start + BATCH]


@dataclass(frozen=True)
class GenerationSettings:
    """Stop strings, the maximum number of new tokens, and a function that returns the sampler for a seed."""

    until: tuple[str, ...]
    max_tokens: int
    sample: Callable[..., Sampler]


def parse_settings(settings: Mapping[str, Any], place: str, context_length: int, end: str) -> GenerationSettings:
    """Parse a task's `generation_kwargs`; generation also stops at the string `end`. Raises ValueError for
    unsupported settings."""
    unknown = [k for k, v in settings.items() if k not in OPTIONS and (k, v) not in WITHOUT_EFFECT.items()]
    if unknown:
        raise ValueError(f"{place}: generation_kwargs has {unknown[0]}; supported are {', '.join(OPTIONS)}")
    temperature = float(settings.get("temperature") or 0.0)
    if settings.get("do_sample") and not temperature:
        raise ValueError(f"{place}: generation_kwargs has do_sample without a temperature; set one above 0")
    used = {name: settings[name] for name in SETTINGS if name in settings}
    used["temperature"] = 0.0 if settings.get("do_sample") is False else temperature
    sample = partial(sampler, **used)
    sample()  # raises ValueError for settings out of range
    max_tokens = next((int(settings[name]) for name in LIMITS if settings.get(name) is not None), TOKENS)
    if max_tokens >= context_length:
        raise ValueError(
            f"{place}: {max_tokens} new tokens leave no room in the context of {context_length}; set max_gen_toks "
            "below that (generation_kwargs in the task's YAML), or train with a larger --context-length"
        )
    until = settings.get("until") or ()  # a task may give one string instead of a list
    until = (until,) if isinstance(until, str) else until
    return GenerationSettings((*until, end), max_tokens, sample)
