"""dunes: the Trainer with AdamW, an adapter on a frozen model, and batches made on demand.

Compiled: the loss as `dunes finetune --compile on` has it, for batches of equal shape (packed).
"""

from collections.abc import Callable

from dunes import checkpoint, tree
from dunes.data import Batches, Example
from dunes.runs.compiled_loss import compiled_loss
from dunes.train import Trainer, adamw, cast_frozen
from dunes.train.loss import next_token_loss

import numpy as np
import torch
import tuning as asked
from tuning import Tuning, Watch


def tune(tuning: Tuning, task: str, setting: str, watching: Callable[[], Watch]) -> Watch:
    precision, *compiled = setting.split()
    dtype = getattr(torch, precision)
    model = checkpoint.load(tuning.folder).model
    note = checkpoint.load_adapter(model, tuning.adapter)
    tree.freeze(model, ["**", *(f"!{new}" for new in note.new)])
    cast_frozen(model, dtype)
    optimizer = adamw(model, tuning.lr, tuning.betas, 0.0)
    examples = [Example(np.array(ids, np.int32), np.array(t, bool)) for ids, t in tuning.examples]
    made = Batches(examples, tuning.context, tuning.rows[task], tuning.seed, packed=task == "packed")
    loss = compiled_loss(next_token_loss) if compiled else next_token_loss
    trainer = Trainer(model, optimizer, loss, clip=tuning.clip, dtype=dtype)
    trainer.deterministic = bool(compiled)
    watch, count = watching(), len(tuning.batches[task])
    for step in trainer.run(made.batch(i % count) for i in range(10**9)):
        if watch(step.loss):
            break
    return watch


if __name__ == "__main__":
    plain = ("float32", "bfloat16")
    asked.main({"unpacked": plain, "packed": (*plain, "bfloat16 compiled")}, tune)
