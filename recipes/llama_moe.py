"""LLaMA-MoE: split a dense model into experts, rebuild the routers by continual pretraining, and compare.

    python recipes/llama_moe.py BASE SOURCE [STEPS]

BASE is a dense model folder or a name on the Hub, SOURCE a file or folder of text. The routers are trained first,
at 5 times the learning rate, then all weights at the full rate; for comparison, the dense model is trained for as
many steps. Prints the validation losses and returns them. https://arxiv.org/abs/2406.16554
"""

from pathlib import Path

from dunes import checkpoint
from dunes.cli.process import run_recipe
from dunes.progress import Display
from dunes.runs.augment import augment_folder
from dunes.runs.saving import METRICS, read_metrics
from dunes.runs.train import train
from dunes.runs.train_config import TrainConfig


def main(
    base: str, source: str, steps: int = 150, out: str = "runs/llama-moe", top_k: int = 2, **changes: object
) -> dict[str, float]:
    losses: dict[str, float] = {}

    def continued(name: str, model: Path, steps: int, **options: tuple[str, ...]) -> Path:
        config = TrainConfig(sources=(source,), base=str(model), steps=steps, lr=0.02, **options)
        train(TrainConfig.of({**vars(config), **changes}), Path(out) / name, Display())
        records = read_metrics(Path(out) / name / METRICS)
        before, *_, after = (r["validation_loss"] for r in records if "validation_loss" in r)
        losses.setdefault(f"before {name}", before)
        losses[name] = after
        return Path(out) / name

    dense, routers = checkpoint.locate_model(base).folder, max(1, steps // 10)
    print(*augment_folder(dense, Path(out) / "split", "experts", experts=8, top_k=top_k), sep="\n")
    rebuilt = continued("routers", Path(out) / "split", routers, trainable=("new",), lr_factors=("new=5",))
    continued("experts", rebuilt, steps - routers)
    continued("dense", dense, steps)
    for name, loss in losses.items():
        print(f"{name}: {loss:.3f} nats/token, {loss - losses['before dense']:+.3f} against the dense model")
    return losses


if __name__ == "__main__":
    run_recipe(__doc__, lambda base, source, *steps: 0 if main(base, source, *map(int, steps)) else 1)
