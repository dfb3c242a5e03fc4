"""A mixture of LoRA experts against plain LoRA with as many parameters, finetuned on the same examples.

    python recipes/lora_experts.py BASE DATA [EPOCHS]

BASE is a model folder or a name on the Hub, DATA a file or folder of examples or text, best of several domains.
Prints the validation losses and returns them. https://arxiv.org/abs/2402.08562
"""

from pathlib import Path

from dunes import checkpoint, tree
from dunes.cli.process import run_recipe
from dunes.progress import Display
from dunes.runs.finetune import finetune
from dunes.runs.finetune_config import FinetuneConfig

EXPERTS, RANK = 4, 4


def main(
    base: str, data: str, epochs: float = 3.0, out: str = "runs/lora-experts", **changes: object
) -> dict[str, float]:
    losses: dict[str, float] = {}
    methods = {
        "lora-experts": {"experts": EXPERTS, "experts_per_token": 2, "rank": RANK},
        "lora": {"rank": EXPERTS * RANK},
    }
    for method, options in methods.items():
        config = FinetuneConfig(model=base, data=data, epochs=epochs)
        config = FinetuneConfig.of({**vars(config), "method": method, "alpha": 2.0 * RANK, **options, **changes})
        if finetune(config, Path(out) / method, Display()):
            return losses
        loaded = checkpoint.load(Path(out) / method)
        trained = sum(p.numel() for n, p in loaded.model.named_parameters() if tree.matches("**.adapters.**", n))
        losses[method] = loaded.card["measured"]["loss"]
        print(f"{method}: {losses[method]:.3f} nats/token with {trained:,} trained parameters")
    return losses


if __name__ == "__main__":
    run_recipe(__doc__, lambda base, data, *epochs: 0 if main(base, data, *map(float, epochs)) else 1)
