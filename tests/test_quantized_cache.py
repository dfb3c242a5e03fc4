"""The cache in few bits: what each query reads, however a text is cut, batched and rolled back."""

import itertools

import numpy as np
import pytest
import torch

from conftest import refuses
from dunes import checkpoint
from dunes.cli import verbs
from dunes.generate import PrefixCache, Proposal, SamplingOptions, generate, look_up
from dunes.inference.chat import load_chat_engine
from dunes.parts import Cache, CacheFormat, QuantizedCache, cache_for
from dunes.parts.quantized_cache import SLACK, pack, quantize, unpack
from dunes.text import Tokenizer
from small_models import random_model

HEADS, LENGTH = 2, 70
FORMATS = [
    CacheFormat(8, group=8, residual=8),
    CacheFormat(4, group=8, residual=3),
    CacheFormat(2, group=4, residual=17),
    CacheFormat(2, group=3, residual=0),
    CacheFormat(4, group=8, residual=5),
]


def random(*shape, seed=0, dtype=torch.float32):
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return (x * torch.linspace(0.1, 9, shape[-1]) + 1).to(dtype)


def on_grid(x, bits, axis):
    """The values (n,) along one axis of a float32 array, rounded to a grid that was derived anew."""
    low, levels = x.min(axis, keepdims=True), np.float32(2**bits - 1)
    zero = low.astype(np.float16)
    zero = np.where(zero > low, np.nextafter(zero, np.float16(-np.inf)), zero).astype(np.float32)
    step = ((x.max(axis, keepdims=True) - zero) / levels).astype(np.float32)
    half = step.astype(np.float16)
    half = np.where(half < step, np.nextafter(half, np.float16(np.inf)), half).astype(np.float32)
    return np.clip(np.rint((x - zero) / half), 0, levels) * half + zero


def rounded(x, axis, format):
    """A group (K, G, D) as it is read from its codes."""
    if axis == "channel":
        return on_grid(x, format.bits, 1)
    channels = x.shape[2] if x.shape[2] % format.group else format.group
    return on_grid(x.reshape(*x.shape[:2], -1, channels), format.bits, 3).reshape(x.shape)


def expected(x, p, axis, format, lost=0):
    """What the query at position p reads of tokens x (K, L, D): groups beyond the last tokens are rounded."""
    x, g = x[:, : p + 1].numpy().copy(), format.group
    for start in range(0, p + 1, g):
        if start + g <= max(p + 1 - format.residual, lost):
            x[:, start : start + g] = rounded(x[:, start : start + g], axis, format)
    return torch.from_numpy(x)


def put(cache, k, v, real=None):
    """Feed tokens (B, K, T, D); for each row and query that is real: its position, and what it reads in order."""
    positions = cache.start(k.shape[2] if real is None else real)
    readable = cache.put(0, k, v, positions)
    key = cache.slot_positions(positions.amax(1)).expand(cache.batch, -1)
    mask = cache.visible(key[:, None], positions[:, :, None]).expand(cache.batch, -1, -1)
    positions = positions.expand(cache.batch, -1)
    reads = {}
    for row, t in (positions >= 0).nonzero().tolist():
        slots = mask[row, t].nonzero()[:, 0]
        slots = slots[key[row, slots].argsort()]
        p = int(positions[row, t])
        assert key[row, slots].tolist() == list(range(p + 1)), "each token once"
        reads[row, p] = [x[row][:, slots] for x in readable]
    cache.advance((positions >= 0).sum(1))
    return reads


def check(reads, k, v, format, lost=0):
    for (row, p), read in reads.items():
        for x, got, axis in ((k, read[0], "channel"), (v, read[1], "token")):
            assert torch.equal(got, expected(x[row], p, axis, format, lost)), (row, p, axis)


@pytest.mark.slow
@pytest.mark.parametrize("format", FORMATS, ids=str)
@pytest.mark.parametrize("cuts", [[LENGTH], [1] * LENGTH, [7, 1, 30, 2, 30], [LENGTH - 1, 1]], ids=len)
def test_what_is_read_depends_on_the_position_alone(format, cuts):
    k, v = random(2, HEADS, LENGTH, 8), random(2, HEADS, LENGTH, 5, seed=1)
    cache = QuantizedCache(2, LENGTH, format=format)
    for a, b in itertools.pairwise([0, *itertools.accumulate(cuts)]):
        check(put(cache, k[:, :, a:b], v[:, :, a:b]), k, v, format)
    whole = QuantizedCache(2, LENGTH, format=format)
    put(whole, k, v)
    complete = LENGTH // format.group
    for name in cache.growing:
        for stored, want in zip(getattr(cache, name), getattr(whole, name), strict=True):
            assert torch.equal(stored[:, :, :complete], want[:, :, :complete])


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_a_row_reads_the_same_in_a_ragged_batch(format):
    k, v, generator = random(3, HEADS, LENGTH, 8), random(3, HEADS, LENGTH, 5, seed=1), torch.Generator()
    generator.manual_seed(2)
    cache, held = QuantizedCache(3, 26, format=format), [0, 0, 0]
    for width in (25, 1, 9, 1, 1, 1, 14, 2, 1, 1, 30):
        cache.grow(26 if width == 25 else LENGTH)
        wanted = width, int(torch.randint(width + 1, (), generator=generator)), width // 2
        new = [min(n, LENGTH - h) for n, h in zip(wanted, held, strict=True)]
        real = torch.arange(width) >= width - torch.tensor(new)[:, None]
        parts = [torch.full((3, HEADS, width, x.shape[3]), torch.nan) for x in (k, v)]
        for x, part in zip((k, v), parts, strict=True):
            for row, n in enumerate(new):
                part[row, :, width - n :] = x[row, :, held[row] : held[row] + n]
        check(put(cache, *parts, real), k, v, format)
        held = [h + n for h, n in zip(held, new, strict=True)]
    assert min(held) > 24


def replaced(old, new, lengths):
    """Texts (B, K, LENGTH, D) that are the old ones up to these lengths, and then others."""
    return torch.stack([torch.cat([o[:, :n], w[:, n:]], 1) for o, w, n in zip(old, new, lengths, strict=True)])


def go_on(cache, k, v, format, lost=0, widths=(1, 2, 3)):
    """Feed the rows the next tokens of these texts, and check what they read."""
    for width in widths:
        starts = cache.length.tolist()
        new = [torch.stack([x[i, :, s : s + width] for i, s in enumerate(starts)]) for x in (k, v)]
        check(put(cache, *new), k, v, format, lost)


@pytest.mark.slow
@pytest.mark.parametrize("format", FORMATS, ids=str)
@pytest.mark.parametrize("length", [57, 60])
def test_a_short_rollback_leaves_no_trace(format, length):
    old, new = random(2, 2, HEADS, LENGTH, 8), random(2, 2, HEADS, LENGTH, 8, seed=1)
    rows = torch.tensor([1, 0, 0])
    for back in range(SLACK + 1):
        cache, kept = QuantizedCache(2, LENGTH, format=format), [length - back, length]
        put(cache, *old[:, :, :, :length])
        assert cache.truncate(torch.tensor(kept)).tolist() == kept
        k, v = (replaced(o, n, kept)[rows] for o, n in zip(old, new, strict=True))
        go_on(cache.select_rows(rows), k, v, format)
        assert cache.length.tolist() == kept, "a fork is a copy"


@pytest.mark.slow
@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_after_a_long_rollback_codes_are_read_instead_of_whole_tokens(format):
    old, new, again = (random(2, 1, HEADS, LENGTH, 8, seed=seed) for seed in range(3))
    for n in range(LENGTH - 10):
        cache = QuantizedCache(1, LENGTH, format=format)
        put(cache, *old[:, :, :, :LENGTH])
        whole = (LENGTH - 1) // format.group * format.group + format.group - format.ring
        (remaining,) = cache.truncate(torch.tensor([n])).tolist()
        assert remaining == (n if n >= whole else n // format.group * format.group)
        lost = max(0, min(whole, remaining))
        k, v = (replaced(o, w, [remaining]) for o, w in zip(old, new, strict=True))
        go_on(cache, k, v, format, lost)
        (once,) = cache.truncate(torch.tensor([remaining + 1])).tolist()
        k, v = (replaced(t, w, [once]) for t, w in zip((k, v), again, strict=True))
        go_on(cache, k, v, format, lost, widths=(4, 1))


@pytest.mark.parametrize("rows", [torch.tensor([2, 0]), slice(0, 3, 2)])
def test_rows_are_written_back(rows):
    format = FORMATS[1]
    old, new = random(2, 3, HEADS, LENGTH, 8), random(2, 3, HEADS, LENGTH, 8, seed=1)
    cache = QuantizedCache(3, LENGTH, format=format)
    put(cache, *old[:, :, :, :60])
    part = cache.select_rows(rows)
    part.truncate(torch.tensor([0, 0]))
    put(part, *new[:, rows, :, :30])
    cache.write_rows(rows, part)
    assert cache.length.tolist() == [30, 60, 30]
    k, v = (torch.stack([n[0], o[1], n[2]]) for o, n in zip(old, new, strict=True))
    go_on(cache, k, v, format)


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("shift", [0.0, 1e-7, 100.0, -3000.0, 65000.0])
def test_a_grid_is_off_by_half_a_step_at_most(bits, shift):
    x = random(50, 32, seed=bits) + shift
    x[0], x[1] = shift, 0.0
    codes, scale, zero = quantize(x, -1, bits)
    read = codes * scale.float() + zero.float()
    assert ((read - x).abs() <= scale.float() / 2 * 1.001 + 1e-6 * x.abs()).all()
    assert torch.equal(read[1], x[1]), "zeros stay zeros"
    again, *grid = quantize(read, -1, bits)
    if not shift:
        assert torch.equal(again * grid[0].float() + grid[1].float(), read), "what is on a grid stays there"
    assert torch.isfinite(quantize(x * 1e30, -1, bits)[1]).all()


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("dim", [1, 8, 31, 32, 33, 64, 100])
def test_codes_are_packed_exactly(bits, dim):
    codes = torch.randint(2**bits, (3, 2, dim), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    packed = pack(codes, bits)
    assert packed.shape == (3, 2, -(-dim * bits // 64))
    assert torch.equal(unpack(packed, bits, dim), codes)


@pytest.mark.parametrize("bits", [3, 16])
def test_what_cannot_be_stored_is_refused(bits):
    refuses("^a cache of", CacheFormat, bits)


def made(family="llama", dtype=torch.float64, **fields):
    return random_model(family, vocab=61, dim=64, context=128, **fields).to(dtype)


def ids(rows=1, length=100):
    return torch.randint(61, (rows, length), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
@pytest.mark.parametrize(("family", "fields"), [("llama", {}), ("mistral", {"window": 20})])
def test_a_model_has_the_same_logits_however_the_text_is_cut(family, fields):
    model, text = made(family, **fields), ids(3)
    for bits, most in ((8, 0.1), (2, 5)):
        make = lambda b, bits=bits: cache_for(model, b, 100, format=CacheFormat(bits, group=8, residual=8))
        want = model(text, cache=make(3))
        assert 1e-6 < (want - model(text)).abs().max() < most
        cache = make(3)
        got = torch.cat([model(part, cache=cache) for part in text.split([31, 1, 1, 30, 37], 1)], 1)
        assert (got - want).abs().max() <= 1e-9
        rows = [text[0].tolist(), text[1, :23].tolist(), text[2, :61].tolist()]
        prefix = PrefixCache(model, 3, format=CacheFormat(bits, group=8, residual=8))
        prefix.reserve(100)
        for drop in (0, 3, 21):  # the last time rows go on, and one is cut in the middle of a group of codes
            texts = {i: row[: len(row) - drop] for i, row in enumerate(rows)}
            logits = prefix.logits(texts)
            for i, row in texts.items():
                assert (logits[i][0] - want[i, len(row) - 1]).abs().max() <= (1e-9 if drop < 21 else most)


@torch.no_grad()
def test_a_cache_of_which_nothing_is_quantized_yet_is_a_full_one():
    model, text = made(), ids(2)
    assert type(cache_for(model, 2, 100)) is Cache
    got = model(text, cache=QuantizedCache(2, 100, format=CacheFormat(2, group=8, residual=100)))
    assert (got - model(text)).abs().max() <= 1e-12


@torch.no_grad()
@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bytes_are_those_of_the_formula(bits, dtype):
    model, format = made(dtype=dtype), CacheFormat(bits)
    rough = CacheFormat(bits, group=24)  # which does not divide the channels
    attention = model.blocks[0].attn
    heads = attention.k.out_features // attention.head_dim
    for capacity in (100, 1000, 1024):
        cache = QuantizedCache(3, capacity, format=format)
        model(ids(3, 5), cache=cache)
        assert cache.nbytes == 3 * 2 * format.layer_bytes(capacity, heads, attention.head_dim, dtype.itemsize)
        full = Cache(3, capacity)
        model(ids(3, 5), cache=full)
        assert full.nbytes == 3 * 2 * 2 * heads * (capacity + 1) * attention.head_dim * dtype.itemsize
        assert capacity == 100 or cache.nbytes < full.nbytes
    cache = QuantizedCache(1, 240, format=rough)
    model(ids(1, 5), cache=cache)
    assert cache.nbytes == 2 * rough.layer_bytes(240, heads, attention.head_dim, dtype.itemsize)
    # For 64 channels and groups of 32: codes, a grid a channel, and two grids a token.
    slope = format.layer_bytes(3200, 1, 64, 2) - format.layer_bytes(0, 1, 64, 2)
    assert slope == 3200 * (2 * 8 * bits + 2 * 4 + 2 * 4)


def test_proposals_and_rollbacks_write_the_same_text():
    model, prompt = made(), [1, 2, 3, 4, 5, 6, 7] * 6
    format = CacheFormat(4, group=8, residual=8)
    options = {"max_tokens": 50, "context_length": 128}
    want = [t.id for t in generate(model, prompt, cache=PrefixCache(model, format=format), **options)]
    cache = PrefixCache(model, format=format)
    assert [t.id for t in generate(model, prompt, cache=cache, proposer=look_up, **options)] == want
    assert type(cache.cache) is QuantizedCache
    assert cache.forwards < 50, "some proposals hold"
    again = [t.id for t in generate(model, prompt, cache=cache, **options)]
    assert again == want, "the text again, from its prompt"


@pytest.mark.parametrize(("right", "wrong"), [(2, 30), (15, 1)])
def test_long_proposals_that_fail_leave_no_trace(right, wrong):
    """However many ids are proposed, no more are evaluated than the cache drops without a trace."""
    model, prompt = made(), [*range(1, 22), *range(20, 0, -1)]
    options = {"max_tokens": 60, "context_length": 160}
    format = CacheFormat(2, group=8, residual=5)
    want = [t.id for t in generate(model, prompt, cache=PrefixCache(model, format=format), **options)]

    def propose(ids, limit, sample):
        follows = want[len(ids) - len(prompt) :]
        return Proposal([*follows[:right], *((i + 1) % 50 for i in follows[right : right + wrong])])

    cache = PrefixCache(model, format=format)
    assert [t.id for t in generate(model, prompt, cache=cache, proposer=propose, **options)] == want


def test_the_option_of_the_command_line_is_the_cache_that_is_used(tmp_path, capsys):
    folder = tmp_path / "model"
    checkpoint.save(random_model(vocab=265, dim=64, context=128), folder, Tokenizer.train("bytes", ()), 128)
    assert verbs.generate(str(folder), SamplingOptions(max_tokens=9), "abc", cache="int4") == 0
    assert ", int4 cache of " in capsys.readouterr().err
    generator = load_chat_engine(str(folder), format=CacheFormat(2)).chat_model().generator
    generator.text("abc", 5)
    assert generator.cache.cache.format == CacheFormat(2)
