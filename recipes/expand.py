"""Block expansion: train only new blocks on a new domain, then remove them to restore the original model.

    python recipes/expand.py MODEL NEW OLD [MINUTES]

MODEL is a model folder or a name on the Hub, NEW is text to learn, OLD is text like the model's training text, for
measuring forgetting; both are files or folders.
"""

from pathlib import Path

from dunes import checkpoint
from dunes.cli.process import run_recipe
from dunes.evaluate.text_loss import score_folder
from dunes.progress import Display
from dunes.runs.augment import augment_folder, undo_folder
from dunes.runs.train import train
from dunes.runs.train_config import TrainConfig


def main(model: str, new: str, old: str, minutes: float = 5.0, out: str = "runs/expand", **changes: object) -> int:
    original, run = checkpoint.locate_model(model).folder, Path(out)
    expanded, restored = Path(f"{out}-start"), Path(f"{out}-restored")
    print(*augment_folder(original, expanded, "expand"), sep="\n")
    config = TrainConfig(sources=(new,), base=str(expanded), trainable=("new",), minutes=minutes)
    config = TrainConfig.of({**vars(config), **changes})
    if status := train(config, run, Display()):
        return status
    print(undo_folder(run, restored, "expand"))
    for name, folder in (("original", original), ("with trained blocks", run), ("without them", restored)):
        losses = (f"{score_folder(folder, (text,))[0].loss:.3f} nats/token on {text}" for text in (new, old))
        print(f"{name}: {', '.join(losses)}")
    return 0


if __name__ == "__main__":
    run_recipe(__doc__, lambda model, new, old, *minutes: main(model, new, old, *map(float, minutes)))
