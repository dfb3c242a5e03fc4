"""Any module in each slot of a decoder: called as the slot is, adapted, or refused with the slot's name."""

from functools import partial

import pytest
import torch
from torch import nn

from conftest import refuses
from dunes import tree
from dunes.generate import generate
from dunes.parts import MLP, Attention, Block, Decoder, Embedding, RMSNorm
from dunes.parts.context import supports_packing
from own_parts import Convolution

DIM, VOCAB = 16, 40
IDS = torch.arange(20).view(2, 10) * 7 % VOCAB


class NoLayer(nn.Module):
    def forward(self, x, ctx=None):
        return x


class ByName(nn.Module):
    def forward(self, x, *, ctx=None, layer=None):
        return x


class Own(nn.Module):
    def forward(self, x, ctx, layer):
        return x


def decoder(slot="", part=None):
    if slot == "block":
        return Decoder(Embedding(VOCAB, DIM), [part(), part()], RMSNorm(DIM))
    of_model = {"embed": lambda: Embedding(VOCAB, DIM), "norm": lambda: RMSNorm(DIM), "head": lambda: None}
    of_block = {
        "attn_norm": lambda: RMSNorm(DIM),
        "attn": lambda: Attention(DIM, 2),
        "mlp_norm": lambda: RMSNorm(DIM),
        "mlp": lambda: MLP(DIM, 32),
        "attn_post_norm": lambda: None,
        "mlp_post_norm": lambda: None,
    }
    made = lambda makers: {name: (part if name == slot else make)() for name, make in makers.items()}
    parts = made(of_model)
    return Decoder(parts["embed"], [Block(**made(of_block)) for _ in range(2)], parts["norm"], parts["head"])


PLAIN = [
    ("attn", lambda: nn.Linear(DIM, DIM), True),
    ("attn", lambda: nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh()), True),
    ("attn", nn.Identity, True),
    ("attn", partial(Convolution, DIM), False),
    ("attn", Own, False),
    ("block", lambda: nn.Linear(DIM, DIM), True),
    ("mlp", nn.Identity, True),
    ("mlp", partial(Convolution, DIM), False),
    ("norm", nn.Identity, True),
    ("attn_post_norm", lambda: nn.LayerNorm(DIM), True),
    ("head", lambda: nn.Linear(DIM, VOCAB), True),
]


@pytest.mark.filterwarnings("ignore:.*may mix tokens")
@pytest.mark.parametrize(("slot", "part", "packs"), PLAIN)
def test_a_part_that_takes_x_alone_decodes_and_keeps_documents_apart(slot, part, packs):
    torch.manual_seed(0)
    model = decoder(slot, part).eval()
    assert supports_packing(model) == packs
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5]] * 2)
    with torch.no_grad():
        torch.testing.assert_close(model(IDS, positions)[:, 4:], model(IDS[:, 4:]), atol=1e-5, rtol=1e-5)
        tokens = [t.id for t in generate(model, IDS[0].tolist(), max_tokens=4, context_length=20)]
        text = torch.tensor([[*IDS[0].tolist(), *tokens]])
        assert model(text)[0, 9:-1].argmax(-1).tolist() == tokens
    model(IDS[:, :-1], targets=IDS[:, 1:])[0].backward()


REFUSED = [
    ("attn", lambda: nn.MultiheadAttention(DIM, 2)),
    ("attn", NoLayer),
    ("attn", ByName),
    ("attn", lambda: nn.Sequential(Attention(DIM, 2))),
    ("mlp", lambda: Attention(DIM, 2)),
    ("mlp", lambda: nn.Sequential(RMSNorm(DIM), Attention(DIM, 2))),
    ("attn_norm", NoLayer),
    ("norm", Own),
    ("head", Own),
    ("block", NoLayer),
    ("embed", lambda: nn.Embedding(VOCAB, DIM)),
    ("embed", NoLayer),
]


@pytest.mark.parametrize(("slot", "part"), REFUSED)
def test_a_part_with_other_arguments_is_refused_where_it_is_put(slot, part):
    refuses(rf"\b{slot} is called with|has no `token`", decoder, slot, part)


@pytest.mark.parametrize("part", [lambda: nn.LSTM(DIM, DIM, batch_first=True), lambda: nn.Linear(DIM, 3)])
def test_another_output_is_named(part):
    refuses(r"returned .*; expected a tensor \(2, 10, 16\)", decoder("attn", part), IDS)


def test_parts_of_heads_are_called_as_said():
    refuses("position is called with", Attention, DIM, 2, position=nn.Identity())
    refuses("q_norm is called with", Attention, DIM, 2, q_norm=NoLayer())
    Attention(DIM, 2, position=lambda x, ctx: x, k_norm=nn.Identity())


def test_an_exchanged_part_is_adapted_and_refused_as_well():
    model = decoder()
    tree.replace(model, "blocks.*.attn", lambda _: nn.Linear(DIM, DIM))
    assert model(IDS).shape == (2, 10, VOCAB)
    assert torch.compile(model, backend="eager", fullgraph=True)(IDS).shape == (2, 10, VOCAB)
    tree.replace(model, "blocks.*.attn", lambda _: Attention(DIM, 2))
    assert type(model.blocks[0].attn) is Attention
    refuses("mlp is called with", tree.replace, model, "blocks.*.mlp", lambda _: Own())
