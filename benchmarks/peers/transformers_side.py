"""transformers: generate, a plain loop, and its Trainer.

Reasons for the settings: its guide to optimised inference recommends the static cache and torch.compile instead of
generate's default, the dynamic cache (https://huggingface.co/docs/transformers/llm_optims). generate compiles by
itself on accelerators only, so that the forward is compiled explicitly here, as in the guide. Left out for one
text are bfloat16 uncompiled (slower than compiled at 1.7M, and than float32 at 10M) and float16 compiled (a
quarter of float32's rate at 10M). Attention is PyTorch's SDPA, the default. Training on a CPU uses bf16=True and
use_cpu=True (https://huggingface.co/docs/transformers/perf_train_cpu); torch_compile=True and the optimizer,
PyTorch's fused AdamW, which is the default, are the Trainer's arguments
(https://huggingface.co/docs/transformers/main_classes/trainer). The plain loop does the same in PyTorch, compiled
as in https://huggingface.co/docs/transformers/perf_torch_compile.
"""

import contextlib
import tempfile
import warnings

import torch
import work as asked
from torch.utils.data import Dataset
from work import Answer, BatchAnswer, Watch, Work

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments


def loaded(work: Work, precision: str):
    return AutoModelForCausalLM.from_pretrained(work.folder, dtype=getattr(torch, precision))


def answers(work: Work, setting: str) -> Answer:
    answer = batch_answers(work, setting)
    return lambda ids, new: answer([ids], new)[0]


def batch_answers(work: Work, setting: str) -> BatchAnswer:
    precision, cache, *compiled = setting.split()
    model = loaded(work, precision).eval()
    # No id ends a text here, so that all sides write equally many.
    model.generation_config.eos_token_id = None
    asks = {"do_sample": False, "use_cache": True} | (
        {"cache_implementation": "static"} if cache == "static" else {}
    )
    if compiled:
        model.forward = torch.compile(model.forward)

    def answer(prompts, new):
        ids = torch.tensor(prompts)
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, **asks)
        return out[:, ids.shape[1] :].tolist()

    return answer


def train(work: Work, setting: str, watch: Watch) -> None:
    form, precision, *compiled = setting.split()
    model = loaded(work, "float32").train()
    (loop if form == "loop" else trainer)(work, model, precision == "bfloat16", bool(compiled), watch)


def inputs(rows):
    """Targets are given as they are (`shift_labels`), so that all sides compute as many positions."""
    ids, targets = rows[..., :-1].contiguous(), rows[..., 1:].contiguous()
    return {"input_ids": ids, "labels": targets, "shift_labels": targets}


def loop(work: Work, model, bf16: bool, compiled: bool, watch: Watch) -> None:
    run = torch.compile(model) if compiled else model
    optimizer = torch.optim.AdamW(asked.groups(work, model), work.lr, tuple(work.betas), fused=True)
    for rows in asked.batches(work):
        with torch.autocast("cpu", torch.bfloat16) if bf16 else contextlib.nullcontext():
            loss = run(**inputs(rows), use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), work.clip)
        optimizer.step()
        optimizer.zero_grad()
        if watch(loss.item()):
            return


class Rows(Dataset):
    """The rows of all batches, again and again."""

    def __init__(self, work: Work) -> None:
        self.rows = torch.tensor(work.batches).flatten(0, 1)

    def __len__(self) -> int:
        return 10**7

    def __getitem__(self, i: int):
        return inputs(self.rows[i % len(self.rows)])


class Watched(Trainer):
    """Keeps the loss of the step."""

    def training_step(self, *arguments, **named):
        self.last = super().training_step(*arguments, **named)
        return self.last


class Stop(TrainerCallback):
    def __init__(self, watch: Watch) -> None:
        self.watch, self.trainer = watch, None

    def on_step_end(self, args, state, control, **_):
        control.should_training_stop = self.watch(self.trainer.last.item())


def trainer(work: Work, model, bf16: bool, compiled: bool, watch: Watch) -> None:
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            per_device_train_batch_size=len(work.batches[0]),
            max_steps=10**6,
            learning_rate=work.lr,
            lr_scheduler_type="constant",
            adam_beta1=work.betas[0],
            adam_beta2=work.betas[1],
            weight_decay=work.decay,
            max_grad_norm=work.clip,
            optim="adamw_torch_fused",
            train_sampling_strategy="sequential",
            remove_unused_columns=False,  # else shift_labels is one
            bf16=bf16,
            torch_compile=compiled,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
        )
        stop = Stop(watch)
        stop.trainer = Watched(model, arguments, train_dataset=Rows(work), callbacks=[stop])
        stop.trainer.train()


if __name__ == "__main__":
    eager = ("float32 dynamic", "bfloat16 dynamic")
    compiled = ("float32 static compiled", "bfloat16 static compiled")
    settings = (*eager, *compiled)
    loops = ("loop float32", "Trainer float32", "loop bfloat16", "Trainer bfloat16", "loop bfloat16 compiled")
    asked.main(
        {
            "decode": (("float32 dynamic", *compiled), answers),
            "prefill": (settings, answers),
            **dict.fromkeys(asked.BATCHES, (settings, batch_answers)),
            "first": (eager, answers),
            "train": ((*loops, "Trainer bfloat16 compiled"), train),
        }
    )
