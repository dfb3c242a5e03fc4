"""Preference pairs from a file of tasks: its answers are chosen, and a model's own answers are rejected.

    python recipes/preferences.py MODEL TASKS PAIRS [COUNT]

MODEL is the folder of a finetuned model or adapter, TASKS a file of Alpaca's keys, such as the output of
`recipes/self_instruct.py`; PAIRS, a .jsonl file, gets one pair for each of the first COUNT tasks that the model
answers otherwise. A stopped run continues. `dunes finetune --objective dpo` then prefers the file's answers to the
model's own, as SPIN does. https://arxiv.org/abs/2401.01335
"""

import zlib
from pathlib import Path

from dunes.cli.process import run_recipe
from dunes.data.records import rows
from dunes.files.json_file import append_record
from dunes.generate import sampler
from dunes.inference.chat import load_chat_engine
from dunes.text.templates import Turn
from dunes.units import plural
from teacher.tasks import read_seed_tasks

TOKENS = 512
"""Maximum tokens of an answer."""


def main(model: str, tasks: str, pairs: str, count: int = 1000) -> None:
    engine, out = load_chat_engine(model), Path(pairs)
    answered = {(row["instruction"], row["input"]) for _, row in rows(out)} if out.exists() else set()
    for task in read_seed_tasks(tasks)[:count]:
        if (task.instruction, task.input) in answered:
            continue
        seed = zlib.crc32(f"{task.instruction}\n{task.input}".encode())
        question = Turn("user", task.instruction, task.input)
        own = "".join(engine.answer((question,), sampler(1.0, seed=seed), TOKENS)).strip()
        print(f"{task.instruction}\n  chosen:   {task.output[:99]!r}\n  rejected: {own[:99]!r}")
        if own and own != task.output.strip():
            pair = {"instruction": task.instruction, "input": task.input, "chosen": task.output, "rejected": own}
            append_record(out, pair)
    print(f"{pairs}: {plural(len(list(rows(out))) if out.exists() else 0, 'pair')}")
    print(f"next: dunes finetune {model} --data {pairs} --objective dpo --out RUN")


if __name__ == "__main__":
    run_recipe(__doc__, lambda model, tasks, pairs, *count: main(model, tasks, pairs, *map(int, count)))
