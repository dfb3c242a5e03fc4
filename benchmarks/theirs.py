"""transformers' GPT-2 with its Trainer, in a common configuration."""

import tempfile
import time

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments


class Rows(Dataset):
    """Endless rows of random ids."""

    def __init__(self, vocab: int, context: int) -> None:
        self.ids = torch.randint(0, vocab, (64, context), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return 10**7

    def __getitem__(self, i: int):
        return {"input_ids": self.ids[i % 64], "labels": self.ids[i % 64]}


class Watch(TrainerCallback):
    """Record the time of each step's end, and stop after these steps and seconds."""

    def __init__(self, steps: int, seconds: float) -> None:
        self.steps, self.seconds, self.times = steps, seconds, []

    def on_step_end(self, args, state, control, **_):
        self.times.append(time.perf_counter())
        if len(self.times) >= self.steps and self.times[-1] - self.times[0] > self.seconds:
            control.should_training_stop = True


def step_ends(shape: dict[str, int], batch: int, accumulate: int, bf16: bool, watch: Watch) -> list[float]:
    """The times at which the steps of a training run ended; `shape` are options of GPT2Config."""
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=accumulate,
            max_steps=10**6,
            bf16=bf16,
            use_cpu=not torch.cuda.is_available(),
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
        )
        model, rows = GPT2LMHeadModel(GPT2Config(**shape, **off)), Rows(shape["vocab_size"], shape["n_positions"])
        Trainer(model, arguments, train_dataset=rows, callbacks=[watch]).train()
    return watch.times
