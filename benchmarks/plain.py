"""A plain GPT: learned positions, LayerNorm, GELU, SDPA, float32, eager, AdamW.

The baseline in `shakespeare.py` and `train.py`, with nanoGPT's defaults for a CPU
(https://github.com/karpathy/nanoGPT): no biases, tied head, weight decay on matrices only.
"""

# Shapes: B batch, T tokens, C width.

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(dim, bias=False), nn.LayerNorm(dim, bias=False)
        self.qkv, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.up, self.down = nn.Linear(dim, 4 * dim, bias=False), nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = (h.view(b, t, self.heads, -1).transpose(1, 2) for h in self.qkv(self.ln1(x)).split(c, 2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, c)
        x = x + self.out(y)
        return x + self.down(F.gelu(self.up(self.ln2(x))))


class GPT(nn.Module):
    def __init__(self, vocab: int, dim: int, depth: int, heads: int, context: int) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(vocab, dim), nn.Embedding(context, dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(dim, bias=False), nn.Linear(dim, vocab, bias=False)
        self.head.weight = self.token.weight
        for name, p in self.named_parameters():
            if p.dim() >= 2:
                nn.init.normal_(
                    p, 0.0, 0.02 / math.sqrt(2 * depth) if name.endswith(("out.weight", "down.weight")) else 0.02
                )

    def forward(self, ids: Tensor) -> Tensor:
        x = self.token(ids) + self.place.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    """Mean loss of windows of ids (B, T + 1)."""
    logits = model(batch[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def adamw(model: nn.Module, lr: float, betas: tuple[float, float]) -> torch.optim.AdamW:
    decay = [p for p in model.parameters() if p.dim() >= 2]
    rest = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr, betas)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> float:
    """One step with gradient clipping; returns its loss."""
    loss = loss_of(model, batch)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.item()


def cosine(step: int, steps: int, warmup: int, highest: float, lowest: float) -> float:
    """nanoGPT's learning rate."""
    if step < warmup:
        return highest * (step + 1) / (warmup + 1)
    share = (step - warmup) / max(1, steps - warmup)
    return lowest + 0.5 * (1 + math.cos(math.pi * share)) * (highest - lowest)
