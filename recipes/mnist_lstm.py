"""An LSTM that reads a digit row by row, trained by the same loop as transformers.

python recipes/mnist_lstm.py [FOLDER] [EPOCHS]

FOLDER has MNIST's IDX files, or is `drawn` for digits drawn by code.
"""

from dunes import train
from dunes.cli.process import run_recipe
from dunes.data import Rows, drawn_digits, read_digits
from dunes.models.mnist import Normalize

import torch
from torch import Tensor, nn


class RowReader(nn.Module):
    """Images (B, 28, 28) -> class scores (B, 10), from the state after the last row."""

    def __init__(self, hidden: int = 64) -> None:
        super().__init__()
        self.normalize, self.lstm = Normalize(), nn.LSTM(28, hidden, batch_first=True)
        self.head = nn.Linear(hidden, 10)

    def forward(self, images: Tensor) -> Tensor:
        _, (state, _) = self.lstm(self.normalize(images))
        return self.head(state[-1])


def main(folder: str = "drawn", epochs: float = 30) -> float:
    drawn = folder == "drawn"
    training = drawn_digits(400) if drawn else read_digits(folder)
    test = drawn_digits(200, seed=1) if drawn else read_digits(folder, "t10k")
    torch.manual_seed(0)
    model, rows = RowReader(), Rows((training.images, training.labels), 64)
    schedule = train.Schedule.steps(rows.steps(epochs))
    trainer = train.Trainer(model, train.adamw(model, 3e-3), train.cross_entropy, lr_scale=schedule.lr_scale)
    for step in trainer.run(rows.batches()):
        if schedule.is_over(step.number):
            break
    with torch.no_grad():
        return (model(test.images).argmax(1) == test.labels).float().mean().item()


if __name__ == "__main__":
    run_recipe(__doc__, lambda *words: print(f"test accuracy: {main(*words[:1], *map(float, words[1:])):.2%}"))
