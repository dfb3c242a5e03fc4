"""Networks of no family of ours, as people write them; also run as a script by a test."""

import torch
import torch.nn.functional as F
from torch import nn


class ConvNet(nn.Module):
    """With a module that is called twice, one that works in place, buffers, and one that is never called."""

    def __init__(self, classes=10, dropout=0.5):
        super().__init__()
        self.conv1, self.norm = nn.Conv2d(1, 4, 5), nn.BatchNorm2d(4)
        self.conv2, self.relu = nn.Conv2d(4, 8, 5), nn.ReLU(inplace=True)
        self.dropout, self.head = nn.Dropout(dropout), nn.Linear(8 * 16, classes)
        self.unused = nn.Linear(2, 2)

    def forward(self, x):
        x = self.relu(F.max_pool2d(self.norm(self.conv1(x)), 2))
        x = self.relu(F.max_pool2d(self.conv2(x), 2))
        return self.head(self.dropout(x.flatten(1)))


class Rows(nn.Module):
    """An LSTM over rows whose outputs are a dict."""

    def __init__(self, inputs=28, hidden=16):
        super().__init__()
        self.lstm, self.head = nn.LSTM(inputs, hidden, 2, batch_first=True), Named(hidden)

    def forward(self, x):
        return self.head(self.lstm(x)[0][:, -1])["scores"]


class Shared(nn.Module):
    """Two layers with one matrix, and a buffer that is a view of a parameter."""

    def __init__(self):
        super().__init__()
        self.up, self.again, self.down = nn.Linear(784, 784), nn.Linear(784, 784), nn.Linear(784, 10)
        self.again.weight = self.up.weight
        self.register_buffer("shift", self.down.bias.data)

    def forward(self, x):
        return self.down(self.again(self.up(x.flatten(1) / 255).relu())) + self.shift


class Named(nn.Linear):
    def __init__(self, inputs):
        super().__init__(inputs, 10)

    def forward(self, x):
        return {"scores": super().forward(x), "hidden": x.tanh(), "best": torch.zeros(3, dtype=torch.long)}


class Tied(nn.Module):
    """One module at two places, and one weight in two modules."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.again, self.out = self.first, nn.Linear(6, 6)
        self.out.weight = self.first.weight

    def forward(self, x):
        return self.out(self.again(self.first(x).tanh()).tanh())


def normed():
    return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 6)), nn.Tanh(), nn.Linear(6, 2))


def empty():
    return nn.Sequential(nn.Flatten(), nn.Softmax(1))


NETWORKS = {
    "convolutional": (ConvNet, lambda: torch.rand(3, 1, 28, 28)),
    "lstm": (Rows, lambda: torch.rand(3, 28, 28)),
    "torch's own": (lambda: nn.LSTM(5, 7), lambda: torch.rand(4, 3, 5)),
    "tied": (Tied, lambda: torch.rand(3, 6)),
    "weight_norm": (normed, lambda: torch.rand(3, 4)),
    "no parameters": (empty, lambda: torch.rand(3, 2, 2)),
}
