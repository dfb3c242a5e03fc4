"""dunes: the Trainer with AdamW, an adapter on a frozen model, and batches made on demand."""

from collections.abc import Callable

from dunes import checkpoint, tree
from dunes.data import Batches, Example
from dunes.train import Trainer, adamw, cast_frozen
from dunes.train.loss import next_token_loss

import numpy as np
import torch
import tuning as asked
from tuning import Tuning, Watch


def tune(tuning: Tuning, task: str, setting: str, watching: Callable[[], Watch]) -> Watch:
    model = checkpoint.load(tuning.folder).model
    note = checkpoint.load_adapter(model, tuning.adapter)
    tree.freeze(model, ["**", *(f"!{new}" for new in note.new)])
    cast_frozen(model, getattr(torch, setting))
    optimizer, dtype = adamw(model, tuning.lr, tuning.betas, 0.0), getattr(torch, setting)
    examples = [Example(np.array(ids, np.int32), np.array(t, bool)) for ids, t in tuning.examples]
    made = Batches(examples, tuning.context, tuning.rows[task], tuning.seed, packed=task == "packed")
    trainer = Trainer(model, optimizer, next_token_loss, clip=tuning.clip, dtype=dtype)
    watch, count = watching(), len(tuning.batches[task])
    for step in trainer.run(made.batch(i % count) for i in range(10**9)):
        if watch(step.loss):
            break
    return watch


if __name__ == "__main__":
    asked.main(dict.fromkeys(asked.TASKS, ("float32", "bfloat16")), tune)
