"""Ours: generate, and the Trainer with AdamW, so that all sides take the same steps."""

import torch
import work as asked
from work import Answer, Watch, Work

from dunes import checkpoint
from dunes.generate import generate
from dunes.train import Trainer, adamw


def answers(work: Work, setting: str) -> Answer:
    loaded = checkpoint.load(work.folder)
    model, context = loaded.model.to(getattr(torch, setting)), loaded.context_length
    return lambda ids, new: [t.id for t in generate(model, ids, limit=new, context_length=context)]


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
    asked.main(
        {
            "decode": (both, answers),
            "prefill": (both, answers),
            "train": ((*both, "bfloat16 compiled"), train),
        }
    )
