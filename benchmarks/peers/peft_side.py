"""peft under transformers' Trainer.

Reasons for the settings: LoRA on a model from from_pretrained, trained by the Trainer, is peft's quicktour
(https://huggingface.co/docs/peft/quicktour). bf16=True, use_cpu=True and torch_compile=True are the Trainer's
arguments (https://huggingface.co/docs/transformers/perf_train_cpu); the frozen base may be in bfloat16, which
saves autocast's casts ("base"). Attention is PyTorch's SDPA, the default, or "eager", whose backward is faster in
bfloat16 on a CPU. Packed rows have position_ids that restart, from which transformers makes a block-diagonal mask;
"flat" is the form of DataCollatorWithFlattening, one row with all examples
(https://huggingface.co/blog/packing-with-FA2). The optimizer, PyTorch's fused AdamW, is the default.
"""

import tempfile
import warnings
from collections.abc import Callable

import torch
import tuning as asked
from torch.utils.data import Dataset
from tuning import Tuning, Watch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments


class Rows(Dataset):
    """The rows of all batches, again and again, without their padding."""

    def __init__(self, batches) -> None:
        self.rows = [[part[: sum(p >= 0 for p in row[2])] for part in row] for batch in batches for row in batch]

    def __len__(self) -> int:
        return 10**7

    def __getitem__(self, i: int):
        return self.rows[i % len(self.rows)]


def padded(rows):
    """Targets are given as they are (`shift_labels`), so that both sides compute as many positions."""
    ids, targets = (filled([row[i] for row in rows], value) for i, value in ((0, 0), (1, -100)))
    mask = filled([[1] * len(row[0]) for row in rows], 0)
    return {"input_ids": ids, "labels": targets, "shift_labels": targets, "attention_mask": mask}


def packed(rows):
    """As many examples in a row as fit; padding is an example of its own, which nothing is asked of."""
    ids, targets = (filled([row[i] for row in rows], value) for i, value in ((0, 0), (1, -100)))
    width = ids.shape[1]
    positions = torch.tensor([[*row[2], *range(width - len(row[2]))] for row in rows])
    return {"input_ids": ids, "labels": targets, "shift_labels": targets, "position_ids": positions}


def flat(rows):
    ids, targets, positions = (torch.tensor([[x for row in rows for x in row[i]]]) for i in range(3))
    return {"input_ids": ids, "labels": targets, "shift_labels": targets, "position_ids": positions}


def filled(rows, value):
    width = max(map(len, rows))
    return torch.tensor([[*row, *[value] * (width - len(row))] for row in rows])


class Watched(Trainer):
    """Keeps the loss of the step."""

    def training_step(self, *arguments, **named):
        self.last = super().training_step(*arguments, **named)
        return self.last


class Stop(TrainerCallback):
    def __init__(self, watching: Callable[[], Watch]) -> None:
        self.watching = watching

    def on_train_begin(self, args, state, control, **_):
        self.watch = self.watching()

    def on_step_end(self, args, state, control, **_):
        control.should_training_stop = self.watch(self.trainer.last.item())


def tune(tuning: Tuning, task: str, setting: str, watching: Callable[[], Watch]) -> Watch:
    precision, *words = setting.split()
    torch.set_num_threads(tuning.threads)
    dtype = torch.bfloat16 if "base" in words else torch.float32
    attention = "eager" if "eager" in words else "sdpa"
    base = AutoModelForCausalLM.from_pretrained(tuning.folder, dtype=dtype, attn_implementation=attention)
    model = PeftModel.from_pretrained(base, tuning.adapter, is_trainable=True)
    stop = Stop(watching)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            per_device_train_batch_size=tuning.rows[task],
            max_steps=10**6,
            learning_rate=tuning.lr,
            lr_scheduler_type="constant",
            adam_beta1=tuning.betas[0],
            adam_beta2=tuning.betas[1],
            weight_decay=0.0,
            max_grad_norm=tuning.clip,
            train_sampling_strategy="sequential",
            remove_unused_columns=False,  # else shift_labels is one
            bf16=precision == "bfloat16",
            torch_compile="compiled" in words,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
        )
        form = padded if task == "unpacked" else flat if "flat" in words else packed
        rows = Rows(tuning.batches[task])
        stop.trainer = Watched(model, arguments, data_collator=form, train_dataset=rows, callbacks=[stop])
        stop.trainer.train()
    return stop.watch


if __name__ == "__main__":
    # To keep the race short, float32 runs with SDPA alone, and a base that autocast casts with "eager" alone.
    halves = ("bfloat16 eager", "bfloat16 base", "bfloat16 base eager")
    both = ("float32", *halves, "bfloat16 base compiled", "bfloat16 base compiled eager")
    asked.main({"unpacked": both, "packed": (*both, "bfloat16 base flat")}, tune)
