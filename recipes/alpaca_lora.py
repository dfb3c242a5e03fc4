"""Alpaca with LoRA: finetune a base model on instructions, chat with it, and merge the adapter.

    python recipes/alpaca_lora.py BASE alpaca_data.json [EPOCHS]

BASE is a model folder (from `dunes train`, or a downloaded GPT-2, LLaMA, Mistral, ...) or a name on the Hub. The
52,002 instructions are at https://github.com/tatsu-lab/stanford_alpaca (for research only: CC BY-NC 4.0); any file
in the same format works, such as the output of `recipes/self_instruct.py`.
"""

from pathlib import Path

from dunes.checkpoint.export import export
from dunes.cli.process import run_recipe
from dunes.generate import sampler
from dunes.inference.chat import load_chat_engine
from dunes.progress import Display
from dunes.runs.finetune import finetune
from dunes.runs.finetune_config import FinetuneConfig
from dunes.text.templates import Turn

QUESTIONS = ("List three things that a cat likes.", "Say in one sentence what a computer is.")


def main(base: str, data: str, epochs: float = 3.0, out: str = "runs/alpaca-lora", **changes: object) -> int:
    config = FinetuneConfig(model=base, data=data, epochs=epochs, method="lora", rank=16, template="alpaca")
    config = FinetuneConfig.of({**vars(config), **changes})
    if status := finetune(config, Path(out), Display(), examples=2):
        return status
    engine = load_chat_engine(out)
    for question in QUESTIONS:
        print(f"\n{question}\n  {''.join(engine.answer((Turn('user', question),), sampler(0.0), 60))}")
    print(*export(Path(out), Path(f"{out}-merged")).lines(), sep="\n")
    print(f"merged model: {out}-merged")
    return 0


if __name__ == "__main__":
    run_recipe(__doc__, lambda base, data, *epochs: main(base, data, *map(float, epochs)))
