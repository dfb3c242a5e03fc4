"""MNIST with a multilayer perceptron or a small convolutional network, by default on digits drawn by code.

python recipes/mnist.py [FOLDER] [NETWORK] [OPTIMIZER] [LOSS] [EPOCHS]

FOLDER has IDX files, gzipped or not, or is `drawn` for drawn digits, or `fetch` to download MNIST (11 MB). NETWORK
is mlp or conv_net, OPTIMIZER adamw, sgd, momentum or rmsprop, LOSS cross_entropy or mean_squared.
"""

from pathlib import Path

from dunes import measure, train
from dunes.cli.process import run_recipe
from dunes.data import Digits, Rows, drawn_digits, fetch_digits, read_digits
from dunes.files.atomic import cache_home
from dunes.models import mnist

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure

NETWORKS = {"mlp": mnist.mlp, "conv_net": mnist.conv_net}
OPTIMIZERS = {
    "adamw": lambda model: train.adamw(model, 4e-3),
    "sgd": lambda model: train.sgd(model, 0.1),
    "momentum": lambda model: train.sgd(model, 0.03, momentum=0.9),
    "rmsprop": lambda model: train.rmsprop(model, 1e-3),
}
LOSSES = {
    "cross_entropy": train.cross_entropy,
    "mean_squared": lambda model, batch: train.mean_squared(model, (batch[0], F.one_hot(batch[1], 10).float())),
}


def digits(folder: str) -> tuple[Digits, Digits]:
    """The training and the test digits."""
    if folder == "drawn":
        return drawn_digits(400, seed=0), drawn_digits(200, seed=1)
    path = cache_home() / "mnist" if folder == "fetch" else Path(folder)
    if folder == "fetch":
        fetch_digits(path)
    return read_digits(path, "train"), read_digits(path, "t10k")


def main(
    folder: str = "drawn",
    network: str = "mlp",
    optimizer: str = "adamw",
    loss: str = "cross_entropy",
    epochs: float = 30,
    out: str = "runs/mnist",
    seed: int = 0,
    batch_size: int = 64,
) -> float:
    for name, choices in ((network, NETWORKS), (optimizer, OPTIMIZERS), (loss, LOSSES)):
        if name not in choices:
            raise ValueError(f"{name!r} is not one of {', '.join(choices)}")
    training, test = digits(folder)
    torch.manual_seed(seed)
    model = NETWORKS[network]().to(measure.device())
    rows = Rows((training.images, training.labels), min(batch_size, len(training)), seed)
    schedule = train.Schedule.steps(rows.steps(epochs), decay=0.9)
    trainer = train.Trainer(
        model, OPTIMIZERS[optimizer](model), LOSSES[loss], lr_scale=schedule.lr_scale, seed=seed
    )
    plain = folder == "drawn"  # too few steps to pay for compiling
    steps = (
        trainer.run(rows.batches()) if plain else train.fast_run(trainer, rows.tensors, rows.indices(), line=print)
    )
    for step in steps:
        if step.number % rows.steps(5) == 0:
            print(f"step {step.number}: loss {step.loss:.4f}, test accuracy {accuracy(model, test):.2%}")
        if schedule.is_over(step.number):
            break
    Path(out).mkdir(parents=True, exist_ok=True)
    mistakes_picture(test.images, test.labels, guesses(model, test), Path(out) / "mistakes.png")
    return accuracy(model, test)


@torch.no_grad()
def guesses(model: torch.nn.Module, test: Digits) -> torch.Tensor:
    model.eval()
    return model(test.images.to(next(model.parameters()).device)).argmax(1).cpu()


def accuracy(model: torch.nn.Module, test: Digits) -> float:
    return (guesses(model, test) == test.labels).float().mean().item()


def mistakes_picture(images: torch.Tensor, labels: torch.Tensor, guesses: torch.Tensor, path: Path) -> None:
    """The first 50 images (N, height, width) whose guess is not their label, with both, as a PNG."""
    wrong = (guesses != labels).nonzero().flatten().tolist()
    height, width = images.shape[1] + 12, images.shape[2] + 6
    canvas = torch.zeros(5 * height, 10 * width)
    figure = Figure(figsize=(9, 5.5), layout="constrained")
    axes = figure.add_subplot()
    for place, i in enumerate(wrong[:50]):
        top, left = place // 10 * height + 12, place % 10 * width
        canvas[top : top + images.shape[1], left : left + images.shape[2]] = images[i]
        axes.text(left, top - 2, f"{int(labels[i])}: {int(guesses[i])}", fontsize=9, color="#8c5a1f")
    axes.imshow(canvas.numpy(), cmap="gray_r", vmin=0)
    axes.set_axis_off()
    shown = ", the first 50 of them" if len(wrong) > 50 else ""
    figure.suptitle(f"{len(wrong):,} of {len(labels):,} wrong{shown} (label: guess)", fontsize=11)
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    report = lambda *words: print(f"test accuracy: {main(*words[:4], *map(float, words[4:])):.2%}")
    run_recipe(__doc__, report)
