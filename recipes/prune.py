"""Prune a model, recover its loss by training the remaining weights, and compare.

    python recipes/prune.py MODEL SOURCE [STEPS [PATTERN]]

MODEL is a model folder or a name on the Hub, SOURCE a file or folder of text, PATTERN such as 2:4. SparseGPT
prunes, calibrated on SOURCE without its last tenth; zeros stay zero in training. For comparison, the dense model
is trained for as many steps. Prints the validation losses and returns them. https://arxiv.org/abs/2301.00774
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
    base: str, source: str, steps: int = 200, pattern: str = "2:4", out: str = "runs/pruned", **changes: object
) -> dict[str, float]:
    losses: dict[str, float] = {}
    dense = checkpoint.locate_model(base).folder
    print(*augment_folder(dense, Path(out) / "pruned", "prune", pattern=pattern, calibration=[source]), sep="\n")
    for name, model in (("dense", dense), ("pruned", Path(out) / "pruned")):
        config = TrainConfig(sources=(source,), base=str(model), steps=steps)
        train(TrainConfig.of({**vars(config), **changes}), Path(out) / f"{name}-trained", Display())
        records = read_metrics(Path(out) / f"{name}-trained" / METRICS)
        before, *_, after = (r["validation_loss"] for r in records if "validation_loss" in r)
        losses |= {name: before, f"{name}, {steps} steps on": after}
    for name, loss in losses.items():
        print(f"{name}: {loss:.3f} nats/token, {loss - losses['dense']:+.3f} against the dense model")
    return losses


if __name__ == "__main__":
    run_recipe(__doc__, lambda base, source, steps="200", *pattern: main(base, source, int(steps), *pattern) and 0)
