"""dunes: generate, generate_all, the command line, and the Trainer with AdamW, as on all sides.

A compiled setting makes its package (`dunes compile`) before the first answer, unless it exists.
"""

import sys
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

from dunes import checkpoint
from dunes.generate import Request, generate, generate_all
from dunes.generate.decode_graph import CompiledStep
from dunes.generate.decode_packages import compile_step, load_step
from dunes.generate.prefix_cache import PrefixCache
from dunes.train import Trainer, adamw

import torch
import work as asked
from torch import nn
from work import Answer, BatchAnswer, Process, Watch, Work


def answers(work: Work, setting: str, cast: bool = False) -> Answer:
    """`cast`: of a compiled setting, too, all weights have its dtype, and not only the matrices of a step."""
    model, context, step = _model(work, setting, cast)

    def answer(ids, new):
        prefix = PrefixCache(model, step=step())
        return [t.id for t in generate(model, ids, max_tokens=new, context_length=context, cache=prefix)]

    return answer


def batch_answers(work: Work, setting: str) -> BatchAnswer:
    model, context, step = _model(work, setting)

    def answer(prompts, new):
        requests = [Request(ids, new) for ids in prompts]
        prefix = PrefixCache(model, len(prompts), step=step())
        for _ in generate_all(model, requests, context_length=context, cache=prefix):
            pass
        return [r.ids[len(r.prompt) :] for r in requests]

    return answer


def _model(
    work: Work, setting: str, cast: bool = False
) -> tuple[nn.Module, int, Callable[[], CompiledStep | None]]:
    """The model, its context length, and a function that returns its step, compiled by the first call."""
    precision, *compiled = setting.split()
    loaded, dtype = checkpoint.load(work.folder), getattr(torch, precision)
    model, context = loaded.model.to(dtype) if cast or not compiled else loaded.model, loaded.context_length

    @cache
    def step() -> CompiledStep | None:
        if not compiled:
            return None
        compile_step(model, context, dtype)
        made = load_step(model, dtype)
        assert made is not None, "the package was made"
        return made

    return model, context, step


def command(work: Work, setting: str) -> Process:
    """`dunes generate`; compiled: with the package that `dunes compile` makes, else in an empty cache."""
    kept = "compiled" in setting
    home = Path(work.folder).parent / ("kept" if kept else "empty")
    environment = {"DUNES_HOME": str(home)}
    tool = (sys.executable, "-m", "dunes")
    if kept and not home.exists():
        asked.subprocess.run((*tool, "compile", work.folder), check=True, env=asked.os.environ | environment)
    tokenizer = checkpoint.load(work.folder).require_tokenizer()
    read_ids = lambda output: tokenizer.encode(output[len(work.text) :].removesuffix("\n"))
    return (
        (*tool, "generate", work.folder, work.text, "--max-tokens", "1", "--temperature", "0"),
        environment,
        read_ids,
    )


def train(work: Work, setting: str, watch: Watch) -> None:
    precision, *compiled = setting.split()
    model, loss = checkpoint.load(work.folder).model, lambda m, b: m(b[:, :-1], targets=b[:, 1:])
    optimizer = adamw(model, work.lr, work.betas, work.decay)
    loss = torch.compile(loss, dynamic=False) if compiled else loss
    trainer = Trainer(model, optimizer, loss, clip=work.clip, dtype=getattr(torch, precision))
    for step in trainer.run(asked.batches(work)):
        if watch(step.loss):
            return


if __name__ == "__main__":
    both = ("float32", "bfloat16")
    steps = ("float32", "float32 compiled", "float16 compiled", "bfloat16 compiled")
    asked.main(
        {
            "decode": (steps, answers),
            "prefill": ((*both, "float32 compiled", "bfloat16 compiled"), partial(answers, cast=True)),
            **dict.fromkeys(asked.BATCHES, ((*both, *steps[1:]), batch_answers)),
            "first": (("float32", "float32 compiled"), command),
            "train": ((*both, "bfloat16 compiled"), train),
        },
        command,
    )
