"""Time per epoch of a multilayer perceptron on MNIST in four training loops, in alternation, at equal accuracy.

    python benchmarks/mnist.py FOLDER [--epochs 6] [--threads 1] [--picture docs/figures/mnist-loops.svg]

FOLDER has MNIST's IDX files. An epoch has 60,000 rows: the folder's training digits, repeated until they are as
many. 784-128-10 with ReLU, batch size 128, SGD with learning rate 0.1, the same initial weights. (a) DataLoader
over a TensorDataset of float32 images; (b) the same tensors indexed by a random permutation; (c) a Dataset that
decodes and normalises each sample with PIL, as tutorials do; (d) `fast_run` in float32 and under bfloat16
autocast, with bytes as data. Times include the complete loop except the evaluation after each epoch.
"""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from dunes.bench import plot
from dunes.data import Digits, Rows, read_digits
from dunes.extra import extra
from dunes.models import mnist
from dunes.train import Trainer, cross_entropy, fast_run, sgd

import curves
import numpy as np
import torch
import torch.nn.functional as F
import tyro
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

ROWS, BATCH, LR = 60_000, 128, 0.1
Epochs = Iterator[nn.Module]


def build(hidden: int = 128) -> nn.Sequential:
    torch.manual_seed(0)
    return mnist.mlp(hidden)


def normalized(images: Tensor) -> Tensor:
    return (images.float() - mnist.MEAN) / mnist.STD


def plain_epochs(batches: Callable[[], Iterator[tuple[Tensor, Tensor]]], hidden: int = 128) -> Epochs:
    """Endless epochs of the loop that everyone writes; the network's own normalisation is left out."""
    model = build(hidden)
    body = model[1:]
    optimizer = torch.optim.SGD(body.parameters(), lr=LR)
    while True:
        for x, y in batches():
            optimizer.zero_grad()
            F.cross_entropy(body(x), y).backward()
            optimizer.step()
        yield model


def loader(digits: Digits) -> Epochs:
    data = TensorDataset(normalized(digits.images), digits.labels)
    return plain_epochs(lambda: iter(DataLoader(data, BATCH, shuffle=True)))


def resident(digits: Digits, hidden: int = 128) -> Epochs:
    x, y = normalized(digits.images), digits.labels
    batches = lambda: ((x[i], y[i]) for i in torch.randperm(len(y)).split(BATCH))
    return plain_epochs(batches, hidden)


class Decoded(Dataset[tuple[Tensor, int]]):
    """Each sample from bytes by PIL, to a float32 tensor, then normalised."""

    def __init__(self, digits: Digits) -> None:
        self.images, self.labels = digits.images.numpy(), digits.labels.tolist()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        from PIL import Image

        image = Image.fromarray(self.images[i])
        x = torch.from_numpy(np.array(image)).unsqueeze(0).float().div(255)
        return x.sub(0.1307).div(0.3081), self.labels[i]


def decoded(digits: Digits) -> Epochs:
    return plain_epochs(lambda: iter(DataLoader(Decoded(digits), BATCH, shuffle=True)))


def ours(digits: Digits, dtype: torch.dtype, steps_per_call: int, hidden: int = 128) -> Epochs:
    model = build(hidden)
    rows = Rows((digits.images, digits.labels), BATCH)
    trainer = Trainer(model, sgd(model, LR), cross_entropy, clip=None, dtype=dtype)
    epoch = 1
    for step in fast_run(trainer, rows.tensors, rows.indices(), steps_per_call, lambda text: print(dtype, text)):
        if step.number >= rows.steps(epoch):
            epoch += 1
            yield model


def accuracy(model: nn.Module, test: Digits) -> float:
    with torch.no_grad():
        return (model.eval()(test.images).argmax(1) == test.labels).float().mean().item()


def read(folder: str) -> tuple[Digits, Digits]:
    digits = read_digits(folder)
    repeats = -(-ROWS // len(digits))
    many = Digits(digits.images.repeat(repeats, 1, 1)[:ROWS], digits.labels.repeat(repeats)[:ROWS])
    print(f"{ROWS:,} rows: {len(digits):,} digits, each {ROWS / len(digits):g} times")
    return many, read_digits(folder, "t10k")


def crossover(folder: str, sizes: list[int], steps_per_call: int) -> None:
    """Print seconds of an epoch of (b) and (d) for wider networks."""
    digits, _ = read(folder)
    for hidden in sizes:
        sides = {"b": resident(digits, hidden)}
        for dtype in (torch.float32, torch.bfloat16):
            sides[str(dtype)] = ours(digits, dtype, steps_per_call, hidden)
        times = {name: [timed(side)[0] for _ in range(3)][1:] for name, side in sides.items()}
        print(json.dumps({"hidden": hidden, **{name: round(min(t), 3) for name, t in times.items()}}), flush=True)


def timed(side: Epochs) -> tuple[float, nn.Module]:
    start = perf_counter()
    model = next(side)
    return perf_counter() - start, model


def main(
    folder: str,
    epochs: int = 6,
    threads: int = 1,
    steps_per_call: int = 4,
    picture: Path | None = None,
    hidden: list[int] | None = None,
) -> None:
    """Race the four loops.

    Args:
        folder: The folder of the IDX files.
        epochs: Epochs of each loop.
        threads: Threads of torch.
        steps_per_call: Steps of our loop in one compiled call.
        picture: Where to draw accuracy over time (.svg or .png).
        hidden: Time only (b) and (d), for networks of these hidden sizes.
    """
    torch.set_num_threads(threads)
    if hidden:
        crossover(folder, hidden, steps_per_call)
        return
    digits, test = read(folder)
    sides = {
        "(a) DataLoader": loader(digits),
        "(b) resident tensors": resident(digits),
        "(c) decoded samples": decoded(digits),
        "(d) fast_run, float32": ours(digits, torch.float32, steps_per_call),
        "(d) fast_run, bfloat16": ours(digits, torch.bfloat16, steps_per_call),
    }
    times: dict[str, list[float]] = {name: [] for name in sides}
    scores: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(epochs):
        for name, side in sides.items():
            seconds, model = timed(side)
            times[name].append(seconds)
            scores[name].append(accuracy(model, test))
    base = median(times["(a) DataLoader"][1:])
    for name, values in times.items():
        own = median(values[1:])
        shown = f"{own:.3f} s an epoch, {base / own:.2f} times (a); first epoch {values[0]:.2f} s"
        print(f"{name:24} {shown}; test accuracy {scores[name][-1]:.2%}")
    if picture:
        points = [
            {"loop": name, "seconds": sum(times[name][: i + 1]), "accuracy": scores[name][i]}
            for name in sides
            for i in range(epochs)
        ]
        plot.save_plot(accuracy_over_time(points, "test accuracy over training time"), picture)
    print(json.dumps({"threads": threads, "seconds": times, "accuracy": scores}))


def accuracy_over_time(points: list[dict[str, Any]], title: str) -> Any:
    """Accuracy over seconds of training (logarithmic); points have `loop`, `seconds` and `accuracy`."""
    p = extra("plotnine", "plot")
    records = [{"loop": str(q["loop"]), "x": float(q["seconds"]), "y": float(q["accuracy"])} for q in points]
    percent = p.scale_y_continuous(labels=lambda values: [f"{v:.1%}" for v in values])
    return (
        curves.line_plot(records, "loop", title, "seconds", "accuracy")
        + p.scale_x_log10(labels=plot.rounded)
        + percent
    )


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    tyro.cli(main, config=(tyro.conf.PositionalRequiredArgs,))
