"""A transformer with a custom MLP, trained on generated sums.

python recipes/own_parts.py
"""

from pathlib import Path

from dunes import checkpoint
from dunes.cli.process import run_recipe
from dunes.parts import Attention, Block, Decoder, Embedding, RMSNorm, Rotary
from dunes.text import Tokenizer
from dunes.train import Trainer, adamw, next_token

import torch
from torch import Tensor, nn


class SquaredReLU(nn.Module):
    """A custom MLP. https://arxiv.org/abs/2109.08668"""

    supports_packing = True  # acts on each token separately, so packing and caching are safe

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, hidden, bias=False), nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu().square())


def build(vocab: int, dim: int = 64) -> Decoder:
    rotary = Rotary(16)
    attention = lambda i: Attention(dim, 4, 2, position=rotary, window=None if i else 8)
    blocks = [Block(RMSNorm(dim), attention(i), RMSNorm(dim), SquaredReLU(dim, 256)) for i in range(2)]
    return Decoder(Embedding(vocab, dim), blocks, RMSNorm(dim))


def main(steps: int = 300, out: Path = Path("runs/own-parts")) -> float:
    torch.manual_seed(0)
    sums = [f"{a}{b}={a + b:02};" for a in range(10) for b in range(10)]
    tokenizer = Tokenizer.train("chars", sums)
    table = torch.tensor([tokenizer.encode(text) for text in sums])
    model = build(tokenizer.vocab)
    for step in Trainer(model, adamw(model, 3e-3), next_token).run(iter([table] * steps)):
        if step.number % 50 == 0:
            print(f"step {step.number}: loss {step.loss:.3f}")
    architecture = checkpoint.Architecture.of_function(build, vocab=tokenizer.vocab)
    checkpoint.save(model, out, tokenizer, table.shape[1], architecture=architecture)
    loaded = checkpoint.load(out, build=build).model
    with torch.no_grad():
        correct = loaded(table[:, :-1])[:, 2:4].argmax(-1) == table[:, 3:5]
    return correct.all(1).float().mean().item()


if __name__ == "__main__":
    run_recipe(__doc__, lambda: print(f"correct sums: {main():.0%}"))
