"""Parts with a recurrent state: equal to transformers', in pieces, in padded rows, packed and after `truncate`."""

import warnings

import pytest
import torch
from torch.nn.functional import normalize

from conftest import refuses
from dunes.generate import Request, generate, generate_all
from dunes.generate.decode_packages import check_step
from dunes.generate.prefix_cache import PrefixCache
from dunes.generate.speculate import look_up
from dunes.models.named_parts import build
from dunes.ops.linear_recurrence import CHUNK, plain, recurrence
from dunes.parts import Cache, CacheFormat, ForwardContext, RMSNorm, cache_for
from dunes.parts.layers import GroupedRMSNorm
from dunes.parts.recurrent import GatedConvolution, GatedDeltaNet, Mamba2
from dunes.parts.recurrent_cache import INTERVAL, SNAPSHOTS, RecurrentCache
from small_models import add_noise, random_model

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from transformers import Lfm2Config, Mamba2Config, Qwen3NextConfig
    from transformers.models.lfm2.modeling_lfm2 import Lfm2ShortConv
    from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

LIMIT = 1e-5
DIM = 32


def rand(*shape, **options):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), **options)


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("length", [1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 7])
def test_by_chunks_is_token_by_token_with_gradients(length, delta, documents):
    def draw(*shape):
        return rand(*shape, dtype=torch.float64)

    q, k, v, decay, state, beta = draw(2, 3, length, 8), draw(2, 3, length, 8), draw(2, 3, length, 5), *[None] * 3
    decay, state = -draw(2, 3, length).abs(), draw(2, 3, 8, 5)
    inputs = [q, normalize(k, dim=-1), v, decay, state, draw(2, 3, length).sigmoid()][: 6 if delta else 5]
    beta = [] if delta else [None]
    numbers = (torch.rand(2, length, generator=torch.Generator().manual_seed(0)) < 0.1).cumsum(1)
    results = []
    for form in (plain, recurrence):
        leaves = [x.requires_grad_() for x in inputs]
        y, last = form(*leaves, *beta, numbers if documents else None)
        results.append((y, last, *torch.autograd.grad(y.sin().sum() + last.cos().sum(), leaves)))
    torch.testing.assert_close(results[1], results[0], rtol=1e-12, atol=1e-12)


def delta_net():
    config = Qwen3NextConfig(
        hidden_size=DIM,
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        num_hidden_layers=4,
        linear_key_head_dim=8,
        linear_value_head_dim=12,
        num_attention_heads=4,
    )
    norm = RMSNorm(12, config.rms_norm_eps)
    return GatedDeltaNet(DIM, 4, 2, key_dim=8, value_dim=12, norm=norm), Qwen3NextGatedDeltaNet(config, 0)


def mamba(groups, **options):
    config = Mamba2Config(
        hidden_size=DIM,
        num_heads=4,
        head_dim=16,
        state_size=8,
        n_groups=groups,
        **{"chunk_size": 32, "num_hidden_layers": 1, **options},
    )
    ours = Mamba2(
        *(DIM, 4),
        head_dim=16,
        state_dim=8,
        groups=groups,
        width=config.conv_kernel,
        norm=GroupedRMSNorm(64, config.layer_norm_epsilon, groups),
        bias=config.use_bias,
        convolution_bias=config.use_conv_bias,
        limits=config.time_step_limit,
    )
    return ours, Mamba2Mixer(config, 0)


def convolution():
    config = Lfm2Config(hidden_size=DIM, num_hidden_layers=1, num_attention_heads=4, conv_L_cache=3)
    return GatedConvolution(DIM, 3), Lfm2ShortConv(config, 0)


OPTIONS = {"use_bias": True, "use_conv_bias": False, "time_step_limit": (0.3, 0.9), "conv_kernel": 2}
PARTS = {
    "delta": delta_net,
    "mamba": lambda: mamba(1),
    "mamba-groups": lambda: mamba(2, **OPTIONS),
    "convolution": convolution,
}
NAMES = {
    "in_proj": "project", "in_proj_qkvz": "project", "in_proj_ba": "rates", "conv1d": "convolution",
    "norm": "norm", "conv": "convolution", "A_log": "log_rate", "dt_bias": "step", "D": "skip", "out_proj": "out",
}  # fmt: skip


def pair(kind):
    """Our part and theirs with the same weights, and the names of their parameters by ours."""
    torch.manual_seed(0)
    ours, theirs = PARTS[kind]()
    names = NAMES | ({"in_proj": "join"} if kind == "convolution" else {})
    add_noise(theirs, 0.1)
    renamed = {}
    for name, _ in theirs.named_parameters():
        first, _, rest = name.partition(".")
        renamed[".".join(filter(None, (names[first], rest)))] = name
    state = {own: theirs.get_parameter(name).detach() for own, name in renamed.items()}
    ours.load_state_dict({own: w.squeeze(1) if w.dim() == 3 else w for own, w in state.items()})
    return ours, theirs, renamed


@pytest.mark.parametrize("kind", PARTS)
def test_outputs_and_gradients_are_those_of_transformers(kind):
    ours, theirs, names = pair(kind)
    a, b = (rand(2, 75, DIM).requires_grad_() for _ in "ab")
    y, want = ours(a), theirs(b)
    assert (y - want).abs().max() <= LIMIT
    got, expected = (
        torch.autograd.grad((z * rand(2, 75, DIM)).sum(), [x, *parameters])
        for z, x, parameters in (
            (y, a, ours.parameters()),
            (want, b, (theirs.get_parameter(names[own]) for own, _ in ours.named_parameters())),
        )
    )
    for grad, other in zip(got, expected, strict=True):
        other = other.squeeze(1) if other.dim() == 3 else other
        assert (grad - other).abs().max() <= LIMIT * max(1.0, float(other.abs().max()))


@torch.no_grad()
def in_pieces(part, x, cuts, cache, real=None):
    """The outputs for pieces of x, of these lengths; `real` is False for padding."""
    outputs, start = [], 0
    for n in cuts:
        piece = slice(start, start := start + n)
        ctx = ForwardContext.of(x[:, piece], None if real is None else cache.start(real[:, piece]), cache)
        outputs.append(part(x[:, piece], ctx, 0))
        ctx.close()
    return torch.cat(outputs, 1)


@pytest.mark.parametrize("kind", PARTS)
def test_padding_changes_no_state(kind):
    """To the left, inside a row, and alone; with a NaN in it, which would show in every state."""
    ours, _, _ = pair(kind)
    x, lengths = rand(3, 60, DIM), [60, 37, 1]
    real = torch.stack([torch.arange(60) >= 60 - n for n in lengths])
    real[1, 55] = False
    want = [ours(row[None, its])[0] for row, its in zip(x, real, strict=True)]
    got = in_pieces(ours, x, [20, 37, 1, 1, 1], RecurrentCache(3, 60), real)
    for y, its, row in zip(got, real, want, strict=True):
        assert (y[its] - row).abs().max() <= LIMIT


DOCUMENTS = {"short": [1, 2, 1, 1, 3, CHUNK, 2, 1], "padded": [-1, -1, 20, -1, 3, 1, -1, -1, 30, -1]}


@pytest.mark.parametrize("documents", DOCUMENTS)
@pytest.mark.parametrize("kind", PARTS)
def test_documents_of_a_row_are_separate(kind, documents):
    ours, _, _ = pair(kind)
    pieces = [torch.arange(n) if n > 0 else torch.tensor([-1]) for n in DOCUMENTS[documents]]
    positions = torch.cat(pieces)[None].expand(2, -1)
    x, start = rand(2, positions.shape[1], DIM), 0
    y = ours(x, ForwardContext(positions), 0)
    for piece in pieces:
        rows = slice(start, start := start + len(piece))
        if piece[0] == 0:
            assert (y[:, rows] - ours(x[:, rows])).abs().max() <= LIMIT


CUTS = [100, 60, 100, 30]


@pytest.mark.parametrize(("n", "remaining"), [(290, 290), (289, 160), (160, 160), (159, 0), (0, 0)])
@pytest.mark.parametrize("kind", PARTS)
def test_truncate_continues_from_the_last_snapshot(kind, n, remaining):
    ours, _, _ = pair(kind)
    x, cache = rand(1, 290, DIM), RecurrentCache(1, 300)
    in_pieces(ours, x, CUTS, cache)
    assert cache.truncate(torch.tensor([n])).item() == remaining
    changed = torch.cat([x[:, :remaining], rand(1, 300 - remaining, DIM)], 1)
    want = ours(changed)
    got = in_pieces(ours, changed[:, remaining:], [300 - remaining], cache)
    assert (got - want[:, remaining:]).abs().max() <= LIMIT
    again = int(cache.truncate(torch.tensor([295])))  # not to a snapshot of the text before
    assert (in_pieces(ours, changed[:, again:], [300 - again], cache) - want[:, again:]).abs().max() <= LIMIT


@pytest.mark.parametrize("kind", PARTS)
def test_rows_are_truncated_and_selected_separately(kind):
    ours, _, _ = pair(kind)
    x, cache = rand(3, 200, DIM), RecurrentCache(3, 300)
    in_pieces(ours, x, [INTERVAL, 200 - INTERVAL], cache)
    assert cache.truncate(torch.tensor([200, 150, 100])).tolist() == [200, INTERVAL, 0]
    fork = cache.select_rows(torch.tensor([1, 0, 1]))
    new = rand(3, 5, DIM)
    want = [
        ours(torch.cat([x[i, :n], y])[None])[0, n:]
        for i, n, y in zip([1, 0, 1], [128, 200, 128], new, strict=True)
    ]
    ragged = torch.ones(3, 5, dtype=torch.bool)
    assert (in_pieces(ours, new, [5], fork, ragged) - torch.stack(want)).abs().max() <= LIMIT
    cache.write_rows(torch.tensor([2, 0]), fork.select_rows(torch.tensor([0, 1])))
    more = rand(3, 4, DIM)
    got = in_pieces(ours, more, [4], cache, ragged[:, :4])
    for row, (i, n, added) in enumerate([(0, 200, new[1]), (1, 128, new[:0, 0]), (1, 128, new[0])]):
        text = torch.cat([x[i, :n], added, more[row]])[None]
        assert (got[row] - ours(text)[0, -4:]).abs().max() <= LIMIT


def test_the_oldest_snapshot_is_overwritten():
    part, cache = GatedConvolution(DIM), RecurrentCache(1, 10_000)
    in_pieces(part, rand(1, INTERVAL * (SNAPSHOTS + 2), DIM), [INTERVAL] * (SNAPSHOTS + 2), cache)
    assert cache.truncate(torch.tensor([INTERVAL * 3 + 5])).item() == INTERVAL * 3
    assert cache.truncate(torch.tensor([INTERVAL * 3 - 1])).item() == 0


def parted(kind):
    torch.manual_seed(0)
    return add_noise(build(50, DIM, 4, 512, attention=kind).eval(), 0.1)


def assert_ends(logits, model, ids):
    """The logits (1, V) are the model's after these ids."""
    want = model(torch.tensor([ids]))[0, -1]
    assert (logits[0] - want).abs().max() <= LIMIT * want.abs().max()


MODELS = {kind: lambda kind=kind: parted(kind) for kind in ("convolution", "delta", "mamba")}
MODELS["mamba2"] = lambda: random_model("mamba2", depth=2)
IDS = torch.randint(50, (400,), generator=torch.Generator().manual_seed(3)).tolist()


@torch.no_grad()
@pytest.mark.parametrize("kind", MODELS)
def test_a_prefix_cache_that_rewinds_has_the_logits_of_a_new_one(kind):
    cache = PrefixCache(model := MODELS[kind](), 2)
    cache.reserve(450)
    texts = [IDS[:300], IDS[:290] + IDS[310:320], IDS[:20], IDS[:300] + IDS[:20], IDS[100:350], IDS[100:351]]
    for number, text in enumerate(texts):
        rows = {0: text, 1: texts[number - 1]} if number % 2 else {0: text}
        for row, logits in cache.logits(rows).items():
            assert_ends(logits, model, rows[row])
        if number == 0:  # as many forwards as there are snapshots, and one more
            assert cache.cache.snapshot_lengths[0, :3].tolist() == [INTERVAL, 2 * INTERVAL, 0]


@pytest.mark.parametrize("kind", MODELS)
def test_an_interrupted_forward_leaves_nothing(kind):
    model = MODELS[kind]()
    cache, inside = PrefixCache(model), model.blocks[-1]
    cache.reserve(100)
    hook = inside.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        cache.logits({0: IDS[:20]})
    hook.remove()
    assert_ends(cache.logits({0: IDS[:30]})[0], model, IDS[:30])


@torch.no_grad()
@pytest.mark.parametrize("kind", MODELS)
def test_an_interrupted_forward_is_taken_back_by_truncate(kind):
    model, ids = MODELS[kind](), torch.tensor([IDS[:180]])
    cache, want = cache_for(model, 1, 256), model(ids)[0, 150:]
    for piece in ids[:, :150].split([INTERVAL, 22], 1):
        model(piece, cache=cache)
    hook = model.blocks[-1].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(ids[:, 150:], cache=cache)
    hook.remove()
    refuses("a forward was interrupted, which may have changed states; call truncate", cache.start, 1)
    assert cache.truncate(cache.length).item() == INTERVAL
    got = model(ids[:, INTERVAL:], cache=cache)[0, 150 - INTERVAL :]
    assert (got - want).abs().max() <= LIMIT * want.abs().max()


@torch.no_grad()
def test_a_row_keeps_its_snapshots_while_others_go_on_and_makes_them_in_pieces():
    cache = PrefixCache(parted("mamba"), 2)
    cache.reserve(3_000)
    for end in range(60, 400, 60):  # each piece is shorter than the interval
        cache.logits({0: IDS[:end]})
    kept = sorted(cache.cache.snapshot_lengths[0].tolist())
    assert kept == [0] * (SNAPSHOTS - 2) + [180, 360]
    for end in range(100, 400):
        cache.logits({1: IDS[:end]})
    assert sorted(cache.cache.snapshot_lengths[0].tolist()) == kept
    assert {128, 256, 384} <= {*cache.cache.snapshot_lengths[1].tolist()}


@pytest.mark.parametrize("kind", ["delta", "mamba"])
def test_extreme_decays_and_autocast_change_nothing_between_pieces(kind):
    part = {"delta": lambda: GatedDeltaNet(DIM, 2, key_dim=8, value_dim=8, norm=RMSNorm(8))}
    part["mamba"] = lambda: Mamba2(DIM, 4, head_dim=16, state_dim=8, norm=RMSNorm(64))
    net, x = add_noise(part[kind](), 0.1), rand(1, 70, DIM)
    with torch.no_grad():
        net.log_rate[0], net.log_rate[1] = 9.0, 200.0
        want = net(x)
        assert want.isfinite().all()
        assert (want - token_by_token(net, x)).abs().max() < 1e-4 * want.abs().max()
        net.log_rate.zero_()
        with torch.autocast("cpu", torch.bfloat16):
            want = net(x)
            assert (want - token_by_token(net, x)).abs().max() < 2e-3 * want.abs().max()


def token_by_token(part, x):
    return in_pieces(part, x, [1] * x.shape[1], RecurrentCache(len(x), x.shape[1]))


@pytest.mark.parametrize("kind", MODELS)
def test_texts_of_a_batch_are_those_of_each_alone(kind):
    model = MODELS[kind]()
    prompts = [IDS[:7], IDS[10:170], IDS[50:51]]
    alone = [[t.id for t in generate(model, p, max_tokens=8, context_length=300)] for p in prompts]
    for prompt, tokens in zip(prompts, alone, strict=True):
        ids = torch.tensor([[*prompt, *tokens]])
        assert model(ids)[0, len(prompt) - 1 : -1].argmax(-1).tolist() == tokens
    requests = [Request(p, max_tokens=8) for p in prompts]
    texts = [[] for _ in prompts]
    for tokens in generate_all(model, requests, context_length=300):
        for text, token in zip(texts, tokens, strict=True):
            text += [token.id] if token else []
    assert texts == alone


def test_what_a_recurrent_state_rules_out_is_refused_by_name():
    model = random_model("mamba2")
    ids = torch.tensor([IDS[:5]])
    refuses("a Cache has no recurrent states; create one with cache_for", model, ids, cache=Cache(1, 10))
    refuses(r"recurrent states \(Mamba2\) cannot be quantized", cache_for, model, 1, 10, format=CacheFormat(8))
    drafted = [Request(IDS[:5], 3, proposer=look_up)]
    refuses("Mamba2 has a recurrent state", lambda: [*generate_all(model, drafted, context_length=32)])
    refuses("KV cache, and Mamba2 has a recurrent state", check_step, model)
