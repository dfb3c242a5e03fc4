"""Latent attention: its two forms, transformers' one, packed and padded rows, and what it refuses."""

import warnings

import pytest
import torch
from torch.func import functional_call

from conftest import refuses
from dunes.augment import apply_change, attach, quantize
from dunes.models.named_parts import build
from dunes.parts import Cache, CacheFormat, ForwardContext, Rotary, cache_for
from dunes.parts.context import document_starts
from dunes.parts.latent_attention import LatentAttention
from dunes.parts.position import Alibi
from small_models import add_noise

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding

DIM, HEADS, LENGTH = 48, 3, 23
SIZES = {"nope_dim": 10, "rope_dim": 8, "value_dim": 14}
FORMS = {
    "usual": {"position": Rotary(8)},
    "low-rank queries, adjacent": {"q_rank": 12, "position": Rotary(8, adjacent=True), "bias": True, "scale": 0.4},
    "window": {"position": Rotary(8), "window": 5},
    "alibi": {"position": Alibi(HEADS)},
    "none": {},
}


def made(options, dtype=torch.float32, heads=HEADS, kv_rank=16, sizes=SIZES):
    torch.manual_seed(0)
    return add_noise(LatentAttention(DIM, heads, kv_rank, **options, **sizes), 0.1).to(dtype)


def some(rows, length=LENGTH, dtype=torch.float32):
    return torch.randn(rows, length, DIM, generator=torch.Generator().manual_seed(1)).to(dtype)


def cached(attn, x, cuts):
    cache, parts = Cache(len(x), 64), []
    for part in x.split(cuts, 1):
        parts.append(attn(part, ctx := ForwardContext.of(part, cache=cache)))
        ctx.close()
    return torch.cat(parts, 1), cache


@torch.no_grad()
@pytest.mark.parametrize("cuts", [[LENGTH], [9, 5, 1, 1, 7], [1] * LENGTH], ids=["whole", "chunks", "tokens"])
@pytest.mark.parametrize("form", FORMS)
def test_queries_on_latents_are_queries_on_keys_of_each_head(form, cuts, monkeypatch):
    attn, x = made(FORMS[form], torch.float64), some(2, dtype=torch.float64)
    want, calls = attn(x), []
    latents = attn._attend_latents
    monkeypatch.setattr(attn, "_attend_latents", lambda *args: calls.append(1) or latents(*args))
    got, cache = cached(attn, x, cuts)
    print(f"{form}: {(got - want).abs().max():.1e}")
    assert (got - want).abs().max() <= 1e-12
    assert len(calls) == len(cuts) - 1
    assert [t.shape for t in (*cache.keys, *cache.values)] == [(2, 1, 65, 24), (2, 1, 65, 0)]


@pytest.mark.parametrize("form", FORMS)
def test_gradients_are_those_of_finite_differences(form):
    attn, x = made(FORMS[form], torch.float64), some(1, 6, torch.float64)
    names, values = zip(*attn.named_parameters(), strict=True)
    function = lambda *values: functional_call(attn, dict(zip(names, values, strict=True)), (x,)).square().mean()
    assert torch.autograd.gradcheck(function, values, fast_mode=True, eps=1e-3, atol=1e-3, rtol=1e-2)


def theirs(options):
    """Their attention with rotary embeddings and our weights, as a function of x, positions and a mask."""
    config = DeepseekV3Config(
        hidden_size=DIM, num_attention_heads=HEADS, num_key_value_heads=HEADS, kv_lora_rank=16,
        q_lora_rank=options.get("q_rank"), qk_nope_head_dim=10, qk_rope_head_dim=8, v_head_dim=14,
        attention_bias=options.get("bias", False), rope_interleave=options["position"].adjacent,
        attn_implementation="eager",
    )  # fmt: skip
    hf, rotary, ours = DeepseekV3Attention(config, 0), DeepseekV3RotaryEmbedding(config), made(options)
    renamed = {
        "q_proj": "q",
        "q_a_proj": "q_a",
        "q_a_layernorm": "q_a_norm",
        "q_b_proj": "q_b",
        "kv_b_proj": "kv_b",
    }
    renamed |= {"kv_a_proj_with_mqa": "kv_a", "kv_a_layernorm": "kv_a_norm", "o_proj": "out"}
    state = {
        key: ours.get_parameter(key.replace(old := key.split(".")[0], renamed[old])) for key in hf.state_dict()
    }
    hf.load_state_dict(state)
    hf.scaling = options.get("scale") or hf.scaling

    def forward(x, positions, visible):
        mask = torch.zeros(visible.shape).masked_fill(~visible, -torch.inf)[:, None]
        return hf(x, rotary(x, positions.clamp(min=0)), mask)[0]

    by_our_name = {renamed[k.split(".")[0]] + "." + k.split(".")[1]: p for k, p in hf.named_parameters()}
    return forward, by_our_name, ours


def causal(positions, documents=None):
    key, query = positions[:, None], positions[:, :, None]
    visible = (key >= 0) & (key <= query)
    if documents is not None:
        visible &= documents[:, None] == documents[:, :, None]
    return visible | (query < 0)


@pytest.mark.parametrize("form", ["usual", "low-rank queries, adjacent"])
def test_it_is_that_of_transformers_with_its_gradients(form):
    forward, their_weights, ours = theirs(FORMS[form])
    x, positions = some(2).requires_grad_(), torch.arange(LENGTH)[None]
    want, got = forward(x, positions, causal(positions)), ours(x)
    weights = dict(ours.named_parameters())
    grads = torch.autograd.grad(got.square().sum(), [x, *weights.values()])
    wanted = torch.autograd.grad(want.square().sum(), [x, *(their_weights[name] for name in weights)])
    differences = [float((a - b).detach().abs().max() / b.abs().max()) for a, b in zip(grads, wanted, strict=True)]
    print(f"{form}: outputs {(got - want).abs().max():.1e}, gradients {max(differences):.1e}")
    assert (got - want).abs().max() <= 1e-5
    assert max(differences) <= 1e-5
    with torch.no_grad():
        assert (cached(ours, x, [9, 5, 1, 1, 7])[0] - want).abs().max() <= 1e-5


@pytest.mark.parametrize("varlen", [False, True])
def test_packed_documents_are_those_of_transformers(varlen):
    """Blocks of queries need a multiple of 64 tokens: the last document is padding there."""
    forward, their_weights, ours = theirs(FORMS["usual"])
    x, positions = some(1, 64), torch.cat([torch.arange(n) for n in (30, 1, 19, 14)])[None]
    starts = document_starts(positions)
    ctx = ForwardContext(positions, document_starts=starts if varlen else None)
    want, got = forward(x, positions, causal(positions, starts[None])), ours(x, ctx)
    assert (got - want).abs().max() <= 1e-5
    weights = dict(ours.named_parameters())
    grads = torch.autograd.grad(got.square().sum(), weights.values())
    wanted = torch.autograd.grad(want.square().sum(), [their_weights[name] for name in weights])
    assert max((a - b).abs().max() / b.abs().max() for a, b in zip(grads, wanted, strict=True)) <= 1e-5


@torch.no_grad()
def test_rows_padded_on_the_left_are_those_of_transformers_and_go_on():
    forward, _, ours = theirs(FORMS["usual"])
    x, lengths = some(3), torch.tensor([LENGTH, 9, 2])
    real = torch.arange(LENGTH) >= LENGTH - lengths[:, None]
    positions = torch.where(real, real.long().cumsum(1) - 1, -1)
    want = forward(x, positions, causal(positions))
    cache = Cache(3, 64)
    got = []
    for part in (slice(0, LENGTH - 4), slice(LENGTH - 4, LENGTH - 1), slice(LENGTH - 1, LENGTH)):
        new = cache.start(real[:, part])
        got.append(ours(x[:, part], ctx := ForwardContext.of(x[:, part], new, cache)))
        ctx.close()
    assert ((torch.cat(got, 1) - want).abs().amax(-1) * real).max() <= 1e-5
    assert cache.length.tolist() == lengths.tolist()


CHANGES = {
    "lora": lambda model: attach(model, rank=2, where="**.kv_b"),
    "experts": lambda model: apply_change(model, "lora-experts", rank=2, where="**.kv_b", experts=3, top_k=2),
    "int8": lambda model: quantize(model, where="**.kv_b", kind="int8"),
}


@torch.no_grad()
@pytest.mark.parametrize("change", CHANGES)
def test_changed_weights_of_keys_and_values_count_with_a_cache(change):
    model = add_noise(build(vocab=61, dim=64, depth=2, context_length=32, attention="latent"), 0.02).eval()
    ids, cache = torch.arange(20)[None] * 3, cache_for(model, 1, 32)
    before = model(ids)
    CHANGES[change](model)
    for name, p in model.named_parameters():
        if any(part in name for part in (".A", ".B")):
            p.normal_(0.0, 0.2)
    want = model(ids)
    got = torch.cat([model(part, cache=cache) for part in ids.split([12, 1, 7], 1)], 1)
    assert (got - want).abs().max() <= 1e-5 * want.abs().max() < (want - before).abs().max()


def test_what_has_heads_of_keys_is_refused():
    model = build(vocab=61, dim=64, depth=2, context_length=32, attention="latent")
    words = "attention=latent has no key/value heads; leave out kv=half"
    refuses(words, build, 61, 64, 2, 32, attention="latent", kv="half")
    words = "blocks.0.attn: the cache of a LatentAttention cannot be quantized"
    refuses(words, cache_for, model, 1, 32, format=CacheFormat(4))
    ids = torch.arange(20).view(2, 10)
    refuses("heads cannot be removed from a LatentAttention", apply_change, model, "narrow", heads=1, ids=ids)
