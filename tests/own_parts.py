"""Models of a user's own parts: some mix tokens where ours do not, some go by the context, some say so."""

import torch
import torch.nn.functional as F
from torch import nn

from dunes.parts import Attention, Block, Decoder, Embedding, GatedMLP, MoE, RMSNorm, Rotary
from dunes.parts.attention import ValueResidualAttention
from dunes.parts.position import Alibi, PartialRotary

VOCAB = 50


class Shifted(nn.Module):
    """A user's own mlp: each token and the one before it in the row."""

    def __init__(self, dim):
        super().__init__()
        self.inside = nn.Linear(2 * dim, dim)

    def forward(self, x):
        return self.inside(torch.cat([x, F.pad(x[:, :-1], (0, 0, 1, 0))], -1)).tanh()


class ShiftedMLP(GatedMLP):
    """One of ours with another forward: what the original says of itself does not hold for it."""

    def forward(self, x):
        return super().forward(x + F.pad(x[:, :-1], (0, 0, 1, 0)))


class ShiftedLinear(nn.Linear):
    def forward(self, x):
        return super().forward(x + F.pad(x[..., :-1, :], (0, 0, 1, 0)))


class Convolution(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.inside = nn.Conv1d(dim, dim, 3)

    def forward(self, x):
        return self.inside(F.pad(x.mT, (2, 0))).mT.tanh()


class RunningNorm(nn.LayerNorm):
    def forward(self, x):
        return super().forward(x.cumsum(1))


class Average(nn.Module):
    """A user's own attention that looks at no context: each token gets the mean of all before it."""

    def __init__(self, dim):
        super().__init__()
        self.value = nn.Linear(dim, dim)

    def forward(self, x, ctx=None, layer=0):
        return self.value(x).cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]


class ShiftedAttention(Attention):
    def forward(self, x, ctx=None, layer=0):
        return super().forward(x + F.pad(x[:, :-1], (0, 0, 1, 0)), ctx, layer)


class OwnAttention(nn.Module):
    """A user's own attention that goes by its context."""

    supports_packing = True

    def __init__(self, dim):
        super().__init__()
        self.k, self.v = nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(self, x, ctx=None, layer=0):
        k, v = ctx.put(layer, self.k(x)[:, None], self.v(x)[:, None])
        mask = ctx.mask()
        mask = torch.ones(k.shape[2], k.shape[2], dtype=torch.bool).tril() if mask is None else mask
        scores = (x @ k[:, 0].mT).masked_fill(~mask, -torch.inf)
        return scores.softmax(-1) @ v[:, 0]


class OwnMLP(nn.Module):
    """A user's own mlp that says it treats each token by itself."""

    supports_packing = True

    def __init__(self, dim):
        super().__init__()
        self.inside = nn.Linear(dim, dim)

    def forward(self, x):
        return self.inside(x).tanh()


class CalledOtherwise(OwnMLP):
    """As some libraries do it: what is called is not the class's forward."""

    def __init__(self, dim):
        super().__init__(dim)
        self.forward = self.shifted

    def shifted(self, x):
        return super().forward(x + F.pad(x[:, :-1], (0, 0, 1, 0)))


def plain_attention(dim):
    return Attention(dim, 4, 2, position=Rotary(8))


def moved_by_column(x, ctx):
    """A user's own positions, which go by the row and not by the context."""
    return x + 0.3 * torch.arange(x.shape[2], dtype=x.dtype)[:, None]


def plain_mlp(dim):
    return GatedMLP(dim, 48)


def shifted_inside(dim):
    return nn.Sequential(nn.Linear(dim, dim), Shifted(dim))


def mixture(dim):
    return MoE(nn.Linear(dim, 4, bias=False), [GatedMLP(dim, 32) for _ in range(4)], 2, balance=0.1)


def plain_head(dim):
    return nn.Linear(dim, VOCAB)


OWN = {
    "shift": {"mlp": Shifted},
    "shift in one of ours": {"mlp": lambda dim: ShiftedMLP(dim, 48)},
    "shift inside": {"mlp": shifted_inside},
    "convolution": {"mlp": Convolution},
    "another forward": {"mlp": CalledOtherwise},
    "norm": {"norm": RunningNorm},
    "position": {"attention": lambda dim: Attention(dim, 4, 2, position=moved_by_column)},
    "attention without a context": {"attention": Average},
    "attention in one of ours": {"attention": lambda dim: ShiftedAttention(dim, 4, 2, position=Rotary(8))},
    "attention with a context": {"attention": OwnAttention},
    "beside a mixture": {"attention": Average, "mlp": mixture},
    "per token": {"mlp": OwnMLP},
    "head": {"head": lambda dim: ShiftedLinear(dim, VOCAB)},
}


def of_own_parts(name):
    torch.manual_seed(0)
    usual = {"attention": plain_attention, "mlp": plain_mlp, "norm": RMSNorm, "head": plain_head}
    norm, attention, mlp, head = ((usual | OWN[name])[part] for part in ("norm", "attention", "mlp", "head"))
    blocks = [Block(norm(32), attention(32), norm(32), mlp(32)) for _ in range(2)]
    return Decoder(Embedding(VOCAB, 32), blocks, RMSNorm(32), head(32)).double()


class Wrapped(nn.Module):
    """Another module that does not say whether it mixes tokens."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *inputs, **options):
        return self.inner(*inputs, **options)


class Counting(nn.Module):
    """A buffer that forward changes, which no export can have."""

    supports_packing = True

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count += 1
        return x * self.count


class Branching(nn.Module):
    """A path that depends on values, which no export can have either."""

    supports_packing = True

    def forward(self, x):
        return x if x.sum() > 0 else -x


def alibi(vocab=61):
    """A decoder without rotary positions, six heads with biases of their own; its second layer has a window."""
    torch.manual_seed(0)
    attention = [Attention(48, 6, 2, position=Alibi(6), window=window) for window in (None, 5)]
    blocks = [Block(RMSNorm(48), attn, RMSNorm(48), GatedMLP(48, 64)) for attn in attention]
    return Decoder(Embedding(vocab, 48), blocks, RMSNorm(48), nn.Linear(48, vocab, bias=False)).eval()


def scored(vocab=61):
    """A decoder with capped scores, sinks, a scale and a partial rotation; its blocks differ from ours."""
    torch.manual_seed(0)
    scores = {"position": PartialRotary(Rotary(4)), "scale": 0.5, "softcap": 0.4, "sinks": True}
    parts = [
        (
            ValueResidualAttention(32, 4, 2, first=True, **scores),
            {"attn_post_norm": RMSNorm(32), "mlp_post_norm": RMSNorm(32)},
        ),
        (ValueResidualAttention(32, 4, 2, first=False, **scores), {"parallel": True}),
    ]
    blocks = [Block(RMSNorm(32), a, RMSNorm(32), GatedMLP(32, 48), **options) for a, options in parts]
    for attn, _ in parts:
        nn.init.normal_(attn.sinks)
    return Decoder(Embedding(vocab, 32), blocks, RMSNorm(32), nn.Linear(32, vocab, bias=False)).eval()
