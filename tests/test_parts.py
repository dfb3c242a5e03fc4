"""What the parts promise: causality, positions, caches, packing, and that own parts fit."""

from functools import partial

import pytest
import torch
from torch import nn

from conftest import refuses
from dunes import tree
from dunes.models import FAMILIES
from dunes.models.initialise import initialise
from dunes.parts import (
    MLP,
    Attention,
    Block,
    Cache,
    Checkpointed,
    Decoder,
    Embedding,
    ForwardContext,
    GatedMLP,
    MoE,
    RMSNorm,
    Rotary,
    cache_for,
)
from dunes.parts.attention import GatedAttention, ValueResidualAttention
from dunes.parts.position import Alibi
from dunes.parts.recurrent_cache import RecurrentCache
from dunes.tree import watch
from own_parts import Average, alibi, scored
from small_models import random_model

VOCAB, CONTEXT = 61, 40


def windowed():
    """A decoder whose second layer sees four tokens only, with grouped heads."""
    torch.manual_seed(0)
    rotary = Rotary(8)
    attention = [Attention(32, 4, 2, position=rotary, window=window) for window in (None, 4)]
    blocks = [Block(RMSNorm(32), attn, RMSNorm(32), GatedMLP(32, 48)) for attn in attention]
    return Decoder(Embedding(VOCAB, 32), blocks, RMSNorm(32), nn.Linear(32, VOCAB, bias=False)).eval()


small = partial(random_model, vocab=VOCAB, dim=64, depth=3, context=CONTEXT, seed=1)
OWN = {"windowed": windowed, "alibi": alibi, "scored": scored}
MODELS = {name: partial(small, name) for name in FAMILIES} | OWN


@pytest.fixture(params=MODELS)
def model(request):
    return MODELS[request.param]()


@pytest.fixture(params=OWN)
def own(request):
    """A model of parts that no family has; those of families are compared with transformers' elsewhere."""
    return OWN[request.param]()


def tokens(rows=2, length=17):
    return torch.randint(VOCAB, (rows, length), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def test_a_token_is_unmoved_by_the_next_and_moved_by_the_one_before(own):
    ids = tokens()
    other = ids.clone()
    other[:, 9] = (other[:, 9] + 1) % VOCAB
    before, after = own(ids), own(other)
    assert torch.equal(before[:, :9], after[:, :9])
    assert (before[:, 9:11] - after[:, 9:11]).abs().amin(1).max() > 1e-4


def test_every_parameter_gets_a_gradient(own):
    own(tokens(4)).square().sum().backward()
    assert all(p.grad.any() for p in own.parameters())


def test_from_a_fresh_start_all_learn_within_two_steps():
    for name in FAMILIES:
        module = FAMILIES[name]
        model = initialise(module.build(module.Config.from_size(VOCAB, 64, 2, CONTEXT)))
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=0)
        for _ in range(2):
            total, count, _ = model(tokens(9)[:, :-1], targets=tokens(9)[:, 1:])
            (total / count).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert [n for n, p in model.named_parameters() if torch.equal(p, before[n])] == []


@torch.no_grad()
@pytest.mark.parametrize("cuts", [[17], [5, 1, 1, 10], [1] * 17])
def test_cached_is_full_in_any_chunks(own, cuts):
    ids, cache = tokens(), cache_for(own, 2, 32)
    got = torch.cat([own(part, cache=cache) for part in ids.split(cuts, 1)], 1)
    assert (got - own(ids)).abs().max() < 1e-5
    assert cache.length.tolist() == [17, 17]


@torch.no_grad()
def test_cached_is_full_in_a_ragged_batch_after_rollback_and_in_picked_rows(model):
    ids, lengths = tokens(3), [9, 4, 1]
    cache = cache_for(model, 3, 64)
    padded = torch.zeros(3, 9, dtype=torch.long)
    real = torch.zeros(3, 9, dtype=torch.bool)
    for row, n in enumerate(lengths):
        padded[row, 9 - n :], real[row, 9 - n :] = ids[row, :n], True
    logits = model(padded, positions=cache.start(real), cache=cache, last=1)[:, -1]
    for row, n in enumerate(lengths):
        assert (logits[row] - model(ids[row : row + 1, :n])[0, -1]).abs().max() < 1e-5
    # All rows go on by three tokens, then fall back to their first two, or to none, then go on otherwise.
    model(torch.stack([ids[row, n : n + 3] for row, n in enumerate(lengths)]), cache=cache)
    left = 0 if isinstance(cache, RecurrentCache) else 2  # it has no snapshot that early
    assert cache.truncate(torch.tensor([2, 2, 2])).tolist() == [left] * 3
    got = model(ids[[2, 0, 0], left:8], cache=cache.select_rows(torch.tensor([2, 0, 0])))
    assert (got - model(ids[[2, 0, 0], :8])[:, left:]).abs().max() < 1e-5


@torch.no_grad()
def test_a_cache_that_is_too_small_says_so():
    cache = Cache(1, 8)
    model = windowed()
    model(tokens(1, 6), cache=cache)
    refuses("9 tokens do not fit into a cache of 8", model, tokens(1, 3), cache=cache)


@torch.no_grad()
def test_packed_documents_do_not_see_each_other(model):
    first, second, third = tokens(1, 6), tokens(2, 9)[1:], tokens(3, 2)[2:]
    packed = torch.cat([first, second, third, torch.zeros(1, 3, dtype=torch.long)], 1)
    positions = torch.cat([torch.arange(6), torch.arange(9), torch.arange(2), torch.full((3,), -1)])[None]
    got = model(packed, positions=positions)
    assert torch.isfinite(got).all()
    for part, rows in ((first, slice(0, 6)), (second, slice(6, 15)), (third, slice(15, 17))):
        assert (got[:, rows] - model(part)).abs().max() < 1e-5


@torch.no_grad()
def test_a_window_sees_so_many_tokens_itself_included():
    ctx = ForwardContext.of(tokens(1, 10))
    assert ctx.mask(10) is None
    assert ctx.mask(4)[0].sum(-1).tolist() == [1, 2, 3, 4, 4, 4, 4, 4, 4, 4]
    attn = Attention(16, 2, window=3)
    x = torch.randn(1, 8, 16)
    moved = x.clone()
    moved[:, 0] += 1
    assert ((attn(x) - attn(moved)).abs().amax(-1)[0] < 1e-6).tolist() == [False] * 3 + [True] * 5


def test_dropout_acts_in_training_only():
    torch.manual_seed(0)
    block = Block(RMSNorm(32), Attention(32, 4, dropout=0.5), RMSNorm(32), MLP(32, 64), 0.5)
    model = Decoder(Embedding(VOCAB, 32, 40, 0.5), [block], RMSNorm(32))
    ids = tokens()
    assert not torch.equal(model.train()(ids), model(ids))
    assert torch.equal(model.eval()(ids), model(ids))


def learned(model, steps):
    """The losses of so many steps on one batch."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    losses = []
    for _ in range(steps):
        total, count, _ = model(tokens()[:, :-1], targets=tokens()[:, 1:])
        optimizer.zero_grad()
        (total / count).backward()
        optimizer.step()
        losses.append(float(total.detach() / count))
    return losses


def test_bfloat16_weights_do_train():
    model = windowed().to(torch.bfloat16).train()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    losses = learned(model, 20)
    assert losses[-1] < losses[0] - 1
    assert not any(torch.equal(p, before[n]) for n, p in model.named_parameters())


class SquaredReLU(nn.Module):
    """A user's own mlp."""

    def __init__(self, dim, hidden):
        super().__init__()
        self.up, self.down = nn.Linear(dim, hidden, bias=False), nn.Linear(hidden, dim, bias=False)

    def forward(self, x):
        return self.down(self.up(x).relu().square())


@pytest.mark.parametrize("attention", [lambda: Attention(32, 4, position=Rotary(8)), lambda: Average(32)])
def test_a_decoder_of_own_parts_learns(attention):
    torch.manual_seed(0)
    blocks = [Block(nn.LayerNorm(32), attention(), RMSNorm(32), SquaredReLU(32, 64)) for _ in range(2)]
    losses = learned(Decoder(Embedding(VOCAB, 32), blocks, nn.LayerNorm(32)), 30)
    assert losses[-1] < losses[0] / 2


class Bounded(nn.Module):
    """A user's own mlp whose outputs a loss of its own keeps small."""

    supports_packing, recorded = True, None

    def __init__(self, dim, weight):
        super().__init__()
        self.inside, self.weight = nn.Linear(dim, dim), weight

    def forward(self, x):
        y = self.inside(x)
        if self.recorded is not None:
            self.recorded.append(y.flatten(0, -2))
        return y

    def auxiliary_losses(self, recorded, real):
        size = torch.cat(recorded).square().mean(-1)
        return {"size": self.weight * (size.mean() if real is None else size[real].mean())}


def test_a_part_of_ones_own_adds_a_loss_beside_those_of_others():
    torch.manual_seed(0)
    experts = lambda: MoE(nn.Linear(32, 4), [GatedMLP(32, 16) for _ in range(4)], 2, balance=0.1)
    mlps = [Bounded(32, 0.5), experts(), Bounded(32, 2.0), experts()]
    blocks = [Block(RMSNorm(32), Attention(32, 4, position=Rotary(8)), RMSNorm(32), mlp) for mlp in mlps]
    model, ids = Decoder(Embedding(VOCAB, 32), blocks, RMSNorm(32)), tokens()
    with watch(model, "blocks.*.mlp.inside") as outputs:
        total, count, metrics = model(ids[:, :-1], targets=ids[:, 1:])
    first, second = (output.square().mean() for output in outputs.values())
    plain, _, none = model.eval()(ids[:, :-1], targets=ids[:, 1:])
    want = (0.5 * first + 2.0 * second) / 2
    assert metrics.keys() == {"balance", "size", "expert_load"}
    assert metrics.pop("expert_load")[0].sum(1).tolist() == [2 * ids[:, 1:].numel()] * 2
    assert none == {}
    assert metrics["size"][0] == pytest.approx(float(want.detach() * count), rel=1e-5)
    added = float(sum(value for value, _ in metrics.values()))
    assert float((total - plain).detach()) == pytest.approx(added, rel=1e-4)
    assert not any(value.requires_grad for value, _ in metrics.values())


def test_targets_are_for_whole_texts():
    for other in ({"last": 1}, {"cache": Cache(4, 8)}):
        refuses("pass them without cache and last", windowed(), tokens(), targets=tokens(), **other)


def test_nonsense_is_refused():
    refuses("at least 1, the token itself", Attention, 32, 4, window=0)
    block = Block(RMSNorm(8), Attention(8, 2), RMSNorm(8), MLP(8, 8))
    refuses("same block occurs twice", Decoder, Embedding(5, 8), [block, block], RMSNorm(8))
    learned = Decoder(Embedding(5, 8, 4), [block], RMSNorm(8))
    refuses("only 4 positions were learned", learned, torch.zeros(1, 5, dtype=torch.long))
    refuses("head_dim is 3", Rotary, 3)


@pytest.mark.parametrize("heads", [1, 2, 3, 6, 8, 12, 17])
def test_slopes_of_alibi_are_those_of_transformers(heads):
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor
    from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

    positions = torch.arange(7)[None]
    got = Alibi(heads).bias(positions[:, -1:], positions)[0, :, 0]
    bloom = build_alibi_tensor(torch.ones(1, 7), heads, torch.float32)[:, 0]
    assert (got - (bloom - bloom[:, -1:])).abs().max() <= 1e-6
    assert (got - build_mpt_alibi_tensor(heads, 7)[:, 0]).abs().max() <= 1e-6


def project(attn, x):
    """Queries, keys and values of an attention with as many key/value heads, and their gradients' inputs."""
    return [proj(x).unflatten(-1, (-1, attn.head_dim)).transpose(1, 2) for proj in (attn.q, attn.k, attn.v)]


@pytest.mark.parametrize("kind", ["softcap", "sinks", "alibi"])
@pytest.mark.parametrize("grad", [True, False])
def test_changed_scores_are_those_of_transformers(kind, grad):
    """In blocks of queries and at once; outputs and gradients."""
    from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward as capped
    from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward as with_sinks

    torch.manual_seed(0)
    options = {"softcap": {"softcap": 1.5}, "sinks": {"sinks": True}, "alibi": {"position": Alibi(6)}}[kind]
    attn = Attention(48, 6, 2, scale=0.7, **options)
    x = torch.randn(2, 600, 48, requires_grad=grad)
    if attn.sinks is not None:
        nn.init.normal_(attn.sinks)
    positions = torch.arange(600)
    mask = torch.zeros(600, 600).masked_fill(positions[None] > positions[:, None], -torch.inf)[None, None]
    mask = mask + attn.position.bias(positions[None], positions[None]) if kind == "alibi" else mask
    attn.num_key_value_groups, attn.training = 3, False
    with torch.set_grad_enabled(grad):
        function = with_sinks if kind == "sinks" else partial(capped, softcap=attn.softcap)
        want, _ = function(attn, *project(attn, x), mask, scaling=0.7, dropout=0.0)
        want, got = attn.out(want.flatten(2)), attn(x)
    print(f"{kind}: {(got - want).abs().max():.1e}")
    assert (got - want).abs().max() <= 1e-5
    if grad:
        leaves = [x, *attn.parameters()]
        pairs = zip(*(torch.autograd.grad(y.square().sum(), leaves) for y in (got, want)), strict=True)
        assert max((a - b).abs().max() / b.abs().max() for a, b in pairs) <= 1e-5


@pytest.mark.parametrize("make", [alibi, scored])
def test_changed_scores_compile_as_one_graph_and_under_checkpointing(make):
    model, ids = make().train(), tokens()
    loss = lambda model: model(ids[:, :-1], targets=ids[:, 1:])[0]
    want = torch.autograd.grad(loss(model), model.parameters())
    got = torch.autograd.grad(torch.compile(loss, fullgraph=True, backend="aot_eager")(model), model.parameters())
    assert max((a - b).abs().max() for a, b in zip(got, want, strict=True)) <= 1e-4
    tree.replace(model, "blocks.*", Checkpointed)
    got = torch.autograd.grad(loss(model), model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_outputs_of_heads_are_gated():
    attn, x = GatedAttention(32, 4, 2, position=Rotary(8)).double(), torch.randn(2, 5, 32).double()
    plain = Attention(32, 4, 2, position=Rotary(8)).double()
    plain.load_state_dict({k: v for k, v in attn.state_dict().items() if "gate" not in k})
    plain.out = nn.Identity()
    want = (plain(x) / (1 + torch.exp(-x @ attn.gate.weight.T))) @ attn.out.weight.T
    assert (attn(x) - want).abs().max() <= 1e-12


def test_values_are_mixed_with_those_of_the_first_layer():
    torch.manual_seed(0)
    first, later, plain = (ValueResidualAttention(16, 2, first=n != 1) for n in range(3))
    plain.load_state_dict({name: t for name, t in later.state_dict().items() if name != "mix"})
    later.mix.data.fill_(0.3)
    x, ctx = torch.randn(1, 5, 16), ForwardContext.of(torch.zeros(1, 5, 16))
    first.heads(x, ctx)
    values = later.heads(x, ctx)[2]
    torch.testing.assert_close(
        values,
        0.7 * plain.v(x).unflatten(-1, (2, 8)).transpose(1, 2)
        + 0.3 * first.v(x).unflatten(-1, (2, 8)).transpose(1, 2),
    )
