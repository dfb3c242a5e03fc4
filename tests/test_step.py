"""The step of one token: the same logits as the model, exported, compiled, kept, and refused."""

import copy
import gc
import os
import pwd
import signal
import stat
import tempfile
import threading
import time
import warnings
import zipfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from types import MethodType, SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from conftest import eventually, raising, refuses
from dunes import augment, checkpoint
from dunes.augment.lora import row_adapters
from dunes.generate import (
    PrefixCache,
    Request,
    Sampler,
    decode_graph,
    generate,
    generate_all,
    limit_vocab,
    look_up,
    prompt_tokens,
    sampler,
)
from dunes.generate import decode_packages as step_package
from dunes.generate.decode_graph import (
    BATCH,
    FEW,
    MOST,
    ROWS,
    TEXT,
    CompiledStep,
    DecodeGraph,
    HeadGraph,
    LayerGraph,
    TextGraph,
    export_decode_graph,
    join_parts,
    load_native,
    model_state,
)
from dunes.generate.decode_packages import compile_step, load_step, make_step, step_source
from dunes.generate.prefix_cache import IN_FLOAT32
from dunes.inference.chat import start_compiling
from dunes.inference.text_generator import TextGenerator
from dunes.models import FAMILIES
from dunes.parts import Cache, CacheFormat, cache_for
from dunes.text import Tokenizer
from own_parts import Branching, Counting, alibi, scored
from small_models import assert_same_tokens

needs_compiler = pytest.mark.slow


@pytest.fixture
def home(monkeypatch, tmp_path):
    monkeypatch.setenv("DUNES_HOME", str(tmp_path))


@pytest.fixture
def no_compiler(monkeypatch, home):
    monkeypatch.setattr(step_package, "why_not_compiled", lambda: "no C++ compiler; install g++ or clang")


def model_of(family="llama", seed=0, depth=2, vocab=300, **changes):
    torch.manual_seed(seed)
    module = FAMILIES[family]
    config = module.Config.from_size(vocab=vocab, dim=64, depth=depth, context_length=64)
    model = module.build(type(config)(**{**vars(config), **changes})).eval()
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    return model


def changed(change, seed=0):
    model = model_of(seed=seed, depth=1)  # their graphs are long: each layer takes seconds to export
    if change in ("lora", "dora"):
        augment.attach(model, rank=2, dora=change == "dora")
        for name, parameter in model.named_parameters():
            if name.endswith(".B"):
                parameter.data.normal_(std=0.2)
    else:
        augment.quantize(model, kind=change)
    return model


def ids_of(model, step=None, max_tokens=40, prompt=(5, 6, 7)):
    options = {"context_length": 48, "cache": PrefixCache(model, step=step)}
    return [token.id for token in generate(model, list(prompt), max_tokens=max_tokens, **options)]


MODELS = {
    **{family: lambda family=family: model_of(family) for family in ("llama", "gpt2", "mixtral")},
    "window": lambda: model_of("mistral", window=8),
    "alibi": lambda: alibi(300),
    "scored": lambda: scored(300),
    **{
        change: lambda change=change: changed(change) for change in ("lora", "dora", "int8", "nf4", "int4", "int3")
    },
}

WITHOUT_TEXTS = ("window", "mixtral", "alibi")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["llama", "window", "mixtral", "alibi", "scored", "lora", "int8", "int4", "int3", "nf4"]
)
@pytest.mark.parametrize("n", [1, FEW])
@torch.no_grad()
def test_the_exported_step_gives_the_models_logits(name, n, capsys):
    model = MODELS[name]()
    cache, own = (cache_for(model, 1, 64) if n == 1 else Cache(1, 64) for _ in range(2))
    for filled in (cache, own):
        model(torch.arange(5)[None], cache=filled)
    run = export_decode_graph(DecodeGraph(model).eval(), example_cache(model), tokens=n).module()
    largest = 0.0
    for ids in torch.tensor([7, 9, 11, 3] * 10).split(n):
        expected = model(ids[None], cache=own)[0]
        slot, positions = cache.start_row(n, n)
        got, summary = run(ids, torch.arange(slot, slot + n), positions, cache.keys, cache.values)
        top, best = got.max(-1)
        log_sum = got.double().logsumexp(-1) - top
        torch.testing.assert_close(summary, torch.stack([best, top, log_sum], -1).double(), rtol=0, atol=1e-6)
        cache.advance(torch.tensor([n]))
        largest = max(largest, float((got - expected).abs().max() / expected.abs().max()))
    with capsys.disabled():
        print(f"\n  {name}: largest difference {largest:.1e} of the largest logit", end="")
    assert largest < 5e-6


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gpt2", "window", "alibi", "scored", "lora", "int8", "int4"])
@torch.no_grad()
@pytest.mark.parametrize("tokens", [ROWS, BATCH])
def test_the_exported_step_of_rows_gives_the_models_logits(name, tokens):
    model = MODELS[name]()
    step = PlainStep(model, rows=True)
    if tokens == BATCH and name in ("int8", "int4"):
        with pytest.raises(Exception, match="tokens"):  # few tokens are multiplied by the codes
            exported_rows(model, tokens)
        return
    step._run = {1: step._run[1], tokens: exported_rows(model, tokens)}
    assert_rows_are_read(model, step)
    if step.most_in_rows(cache_for(model, 1, 64)) > 1:
        assert_a_few_are_computed_at_once(model, step)


def exported_rows(model, tokens):
    run = export_decode_graph(DecodeGraph(model).eval(), example_cache(model), tokens).module()
    return lambda inputs: run(*inputs[:3], *halves(inputs[3:]))


def halves(tensors):
    return tensors[: len(tensors) // 2], tensors[len(tensors) // 2 :]


@torch.no_grad()
def assert_rows_are_read(model, step, tolerance=1e-5):
    """Rows of several lengths, of which some wait, as the model computes them, with equal caches."""
    rows = [[*range(3, 3 + length)] for length in (4, 9, 1, 20)]
    cache, other = (cache_for(model, 4, 64) for _ in range(2))
    for each in (cache, other):
        width = max(map(len, rows))
        ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
        real = torch.tensor([[False] * (width - len(row)) + [True] * len(row) for row in rows])
        model(ids, positions=each.start(real), cache=each, last=1)
    for ids in ({0: 5, 1: 6, 2: 7, 3: 8}, {0: 9, 3: 2}, {1: 11}, {0: 1, 1: 2, 2: 3, 3: 4}):
        new = torch.tensor([[i in ids] for i in range(4)])
        tokens = torch.tensor([[ids.get(i, 0)] for i in range(4)])
        expected = model(tokens, positions=other.start(new), cache=other)[:, 0]
        for i, (scores,) in step.read_rows({i: [id] for i, id in ids.items()}, cache).items():
            largest = tolerance * float(expected[i].abs().max())
            assert (scores.logits - expected[i]).abs().max() < largest
            assert scores.best == int(scores.logits.argmax())
            assert abs(scores.logprob(5) - float(expected[i].log_softmax(-1)[5])) < 2 * largest
        assert torch.equal(cache.length, other.length)
        for own, theirs in zip(cache.keys + cache.values, other.keys + other.values, strict=True):
            apart = (own - theirs)[:, :, : cache.capacity].abs().max()
            assert apart <= tolerance * theirs.abs().max()
            assert own.isfinite().all(), "the slot for padding becomes readable once the cache grows"


def example_cache(model):
    cache = cache_for(model, 1, 8)
    with torch.no_grad():
        model(torch.arange(6)[None], cache=cache)
    return cache


class PlainStep(CompiledStep):
    """What a CompiledStep computes, without a compiler."""

    def __init__(self, model, few=False, texts=False, rows=False, batch=False):
        self.native, self.dtype, self.calls, self.reads_texts = True, torch.float32, 0, texts
        self.reads_rows = rows or batch
        self.state, self.example, step = model_state(model), example_cache(model), DecodeGraph(model)

        @torch.no_grad()
        def run(inputs, graph=step, n=3):
            self.calls += 1
            return graph(*inputs[:n], *halves(inputs[n:]))

        self._run = dict.fromkeys((1, FEW) if few else (1,), run)
        self._run |= ({BATCH: run} if batch else {}) | {TEXT: partial(run, graph=TextGraph(model), n=1), ROWS: run}


class Fresh(Sampler):
    """Never repeats an id."""

    def process(self, logits, ids):
        return logits.index_fill(0, torch.tensor(ids), -torch.inf)


REQUESTS = {
    "own": lambda: {"sample": Fresh()},
    "greedy": dict,
    "alternatives": lambda: {"alternatives": 3},
    "vocabulary": lambda: {"sample": Sampler((partial(limit_vocab, 40),))},
    "penalty": lambda: {"sample": sampler(0, repetition_penalty=1.5)},
    "drawn": lambda: {"sample": sampler(1.0, top_k=50, seed=3)},
    "stop": lambda: {"stop": range(100, 200)},
    "look-up": lambda: {"proposer": look_up},
}


def tokens_of(model, step, options, between=lambda requests, cache, n: None):
    cache, requests, tokens = PrefixCache(model, step=step), [Request([5, 6, 7], 60, **options)], []
    for (token,) in generate_all(model, requests, context_length=48, cache=cache):
        tokens.append(token)
        between(requests, cache, len(tokens))
    return tokens


@pytest.mark.slow
@pytest.mark.parametrize("name", REQUESTS)
@pytest.mark.parametrize(("window", "few"), [(None, False), (8, True)])
def test_a_step_gives_the_tokens_of_the_model(name, window, few):
    model = model_of("mistral", window=window, tied=False) if window else model_of(tied=False)
    step = PlainStep(model, few)
    want = tokens_of(model, None, REQUESTS[name]())
    assert_same_tokens(tokens_of(model, step, REQUESTS[name]()), want)
    assert len({t.id for t in want}) > 4
    assert step.calls > (0 if name == "look-up" and not few else len(want) // 2)


@pytest.mark.parametrize("name", ["own", "greedy", "penalty", "drawn", "stop"])
@pytest.mark.parametrize(("window", "batch"), [(None, False), (8, False), (None, True), (8, True)])
def test_rows_that_join_and_leave_have_the_tokens_of_the_model(name, window, batch, monkeypatch):
    model = model_of("mistral", window=window, tied=False) if window else model_of(tied=False)
    step, forward, forwards = PlainStep(model, rows=True, batch=batch), PrefixCache._forward, []
    monkeypatch.setattr(PrefixCache, "_forward", lambda *a: forwards.append(a[0].step) or forward(*a))

    def texts(step):
        requests = [Request([*range(5, 5 + n)], 10 + 9 * n, **REQUESTS[name]()) for n in (1, 4, 2)]
        every = [*requests]
        cache = PrefixCache(model, 3, step=step)
        for count, _ in enumerate(generate_all(model, requests, context_length=48, cache=cache)):
            if count == 12:
                requests[2] = None
            if count == 15:
                requests[2] = Request([8, 9, 10], 30, **REQUESTS[name]())
                every.append(requests[2])
        return [request.ids for request in every]

    want = texts(None)
    assert texts(step) == want
    assert step.calls > (1 if name == "stop" else 15)
    reads_prompts = batch and window is None
    assert forwards.count(step) == (1 if name == "stop" else 4) - reads_prompts


@pytest.mark.parametrize("change", ["hook", "adapter", "autocast", "format", "two new ids"])
def test_rows_are_computed_by_the_model_where_the_step_does_not_fit(change):
    model = changed("lora")
    step = PlainStep(model, rows=True)
    format = CacheFormat(8) if change == "format" else None
    cache = PrefixCache(model, 2, partial(row_adapters, model), step, format)
    cache.reserve(64)
    texts = {0: [5, 6, 7], 1: [8, 9, 10]}
    cache.logits({i: ids[: 1 if change == "two new ids" else 2] for i, ids in texts.items()})
    if change == "hook":
        model.blocks[0].register_forward_hook(lambda *arguments: None)
    if change == "adapter":
        cache.adapters[0] = "default"
    with torch.autocast("cpu", enabled=change == "autocast"):
        cache.logits(texts)
        assert step.calls == 0
    assert cache.ids == [*texts.values()]


def test_numbers_that_are_none_stay_in_no_slot():
    model = model_of()
    step = PlainStep(model, rows=True)

    def run_rows(inputs):
        for tensor in inputs[3:]:
            tensor[:, :, 3] = torch.nan
        return torch.full((2, 300), torch.nan), torch.tensor([[0.0, torch.nan, torch.nan]] * 2)

    step._run[ROWS] = run_rows
    cache = PrefixCache(model, 2, step=step)
    cache.reserve(64)
    assert cache.logits({}) == {}
    cache.logits({0: [5, 6, 7], 1: [8, 9]})
    got, want = (c.logits({0: [5, 6, 7, 8], 1: [8, 9, 10]}) for c in (cache, PrefixCache(model, 2)))
    assert all(t.isfinite().all() for t in cache.cache.keys + cache.cache.values)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("batch", [False, True])
def test_a_text_is_read_and_proposals_are_verified_by_steps_of_a_few_tokens(batch, monkeypatch):
    model, forwards = model_of(tied=False), []
    step = PlainStep(model, few=True, batch=batch)
    monkeypatch.setattr(PrefixCache, "_forward", lambda *arguments: forwards.append(1))
    for capacity, calls in ((40, 4), (13, 4), (12, 5), (11, 5)):
        calls = 3 if batch else calls
        before, cache, fresh = step.calls, PrefixCache(model, step=step), cache_for(model, 1, 40)
        cache.reserve(capacity)
        with torch.no_grad():
            want = model(torch.arange(5, 16)[None], cache=fresh)[0]
        for end, last in ((12, 1), (15, 3), (16, 2)):
            got = cache.logits({0: [*range(5, end)]}, {0: last})[0]
            torch.testing.assert_close(got, want[end - 5 - last : end - 5], atol=1e-5, rtol=0)
        assert (step.calls - before, cache.cache.length.tolist(), cache.vocab) == (calls, [11], 300)
        torch.testing.assert_close(cache.logits({0: [5]})[0], want[:1], atol=1e-5, rtol=0)
    assert not forwards


@pytest.mark.parametrize("change", ["hook", "dtype", "rows", "capacity", "window", "format", "autocast"])
def test_a_text_is_begun_by_the_model_where_the_step_does_not_fit(change):
    model = model_of("mistral", window=8 if change == "window" else None, tied=False)
    step = PlainStep(model, few=True)
    if change == "hook":
        model.blocks[0].register_forward_hook(lambda *arguments: None)
    if change == "dtype":
        model.double()
    format = CacheFormat(8) if change == "format" else None
    cache, fresh = (PrefixCache(model, 1 + (change == "rows"), format=format) for _ in range(2))
    cache.step = step
    for one in (cache, fresh):
        one.reserve(2 if change == "capacity" else 40)
    with torch.autocast("cpu", enabled=change == "autocast"):
        torch.testing.assert_close(cache.logits({0: [5, 6]})[0], fresh.logits({0: [5, 6]})[0], atol=0, rtol=0)
    assert step.calls == 0


@pytest.mark.parametrize("window", [None, 8])
@pytest.mark.parametrize("length", [12, 50])
@pytest.mark.parametrize("few", [True, False])
def test_some_ids_after_what_the_cache_holds_are_computed_by_the_step(window, length, few):
    model = model_of("mistral", window=window, tied=False) if window else model_of(tied=False)
    step = PlainStep(model, few)
    most = IN_FLOAT32 if few and not window else 1
    cache, text = PrefixCache(model, step=step), [*range(5, 5 + length)]
    for dropped, new in ((0, 1), (2, 3), (0, most), (0, most + 1), (4, 1), (length - 1, most)):
        cache.reserve(120)
        cache.logits({0: text})
        text = [*text[: len(text) - dropped], *range(200, 200 + new)]
        calls, fresh = step.calls, PrefixCache(model)
        fresh.reserve(120)
        torch.testing.assert_close(cache.logits({0: text})[0], fresh.logits({0: text})[0], atol=1e-5, rtol=0)
        emptied = window and length == 50 and dropped > 16
        assert step.calls - calls == (0 if new > most or emptied else -(-new // (FEW if most > 1 else 1)))
        assert cache.ids == [text]
        assert cache.cache.length.tolist() == [len(text)]


def next_request(requests, cache, n):
    if n == 9:
        requests[0] = Request([8, 9], 20)


def truncate(requests, cache, n):
    if n == 9:
        del requests[0].ids[6:]


def edit(requests, cache, n):
    if n == 9:
        requests[0].ids[5] = 1


def choose_otherwise(requests, cache, n):
    if n == 9:
        requests[0].sample = Fresh()


def switch_adapter(requests, cache, n):
    if n in (9, 20):
        augment.set_adapter(cache.model, None if n == 9 else "default")


@pytest.mark.parametrize("between", [next_request, truncate, edit, choose_otherwise, switch_adapter])
def test_what_changes_between_two_tokens_is_seen_by_the_next_step(between):
    model = changed("lora") if between is switch_adapter else model_of(tied=False)
    step, want = PlainStep(model), tokens_of(model, None, {}, between)
    assert_same_tokens(tokens_of(model, step, {}, between), want)
    assert len({t.id for t in want}) > 4
    if between is switch_adapter:
        assert [t.id for t in want] != [t.id for t in tokens_of(model, None, {})]
        assert 40 < step.calls < 50


@pytest.mark.parametrize("window", [None, 8])
@pytest.mark.parametrize("name", ["greedy", "drawn", "penalty"])
def test_steps_take_over_in_the_midst_of_a_text(name, window):
    model = model_of("mistral", window=window, tied=False) if window else model_of(tied=False)
    other, want = PlainStep(model), tokens_of(model, None, REQUESTS[name]())
    first, misfit = PlainStep(model), PlainStep(model)
    misfit.example = Cache(1, 8)
    steps = {4: first, 20: other, 30: misfit, 33: other, 43: None, 44: first, 46: other}

    def take_over(requests, cache, n):
        cache.step = steps.get(n, cache.step)

    assert_same_tokens(tokens_of(model, None, REQUESTS[name](), take_over), want)
    assert (other.calls > 20, misfit.calls) == (True, 0)


def append(id, requests, cache, n):
    if n == 9:
        requests[0].ids[-1] = id


def assert_ids_and_positions_are_checked(make):
    model, learned = model_of(tied=False, depth=1), model_of("gpt2", depth=1)
    for step in (None, make(model)):
        for prompt in ([5, 300, 7], [-1], [5, 2**70]):
            with pytest.raises(ValueError, match=f"has id {max(prompt, key=abs)}; the model has ids 0 to 299$"):
                next(generate(model, prompt, max_tokens=1, context_length=48, cache=PrefixCache(model, step=step)))
        for id in (-1, 300, 2**70):
            refuses(rf"has id {id}; the model has ids 0 to 299$", tokens_of, model, step, {}, partial(append, id))
    refuses(r"has id 300; the model has ids 0 to 299$", prompt_tokens, model, [5, 300])
    for step in (None, make(learned)):
        cache = PrefixCache(learned, step=step)
        tokens = generate(learned, [5, 6, 7], max_tokens=80, context_length=100, cache=cache)
        refuses(r"65 tokens, but only 64 positions were learned$", list, tokens)


def test_ids_and_positions_that_a_model_does_not_have_are_refused_alike():
    assert_ids_and_positions_are_checked(lambda model: None)


@pytest.mark.long
def test_ids_and_positions_do_not_end_the_process_in_native_code(home):
    assert_ids_and_positions_are_checked(partial(make_step, dtype=torch.float32))
    model = model_of(tied=False)
    step = make_step(model, torch.float32)
    for token in (300, -1, 2**62):
        assert step([token], example_cache(model))[0].logits.isnan().all()


@pytest.mark.parametrize("of_module", [True, False])
def test_a_hook_between_two_tokens_is_called(of_module):
    register = nn.Module.register_forward_hook if of_module else register_module_forward_hook
    model, calls, handles = model_of(tied=False), [], []
    hooked = model.blocks[0]

    def hook(module, *arguments):
        if module is hooked:
            calls.append(1)

    def add(requests, cache, n):
        if n == 9:
            handles.append(register(*[hooked] * of_module, hook))

    step = PlainStep(model)
    tokens = tokens_of(model, step, {}, add)
    handles[0].remove()
    assert (len(tokens), step.calls, len(calls)) == (60, 8, 51)
    assert_same_tokens(tokens, tokens_of(model, None, {}))


@torch.no_grad()
def assert_a_few_are_computed_at_once(model, step):
    """By the step as by the model in float32; in rows of unequal lengths too, if the step has code for a batch."""
    cache, other = Cache(1, 64), Cache(1, 64)
    cache.allocate_like(step.example)
    assert step.most(cache, 0) == (FEW if step.most_in_rows(cache) == 1 else MOST)
    limit = 1e-5 if step.dtype == torch.float32 else 0.1
    for ids in ([5, 6], [6, 7], [8, 9, 10], [11, 12, 13, 14], [15]):
        got, expected = step(ids, cache), model(torch.tensor([ids]), cache=other)[0]
        assert (torch.stack([s.logits for s in got]) - expected).abs().max() < limit * expected.abs().max()
    assert torch.equal(cache.length, other.length)
    if step.most_in_rows(cache) == 1:
        return
    cache, other = cache_for(model, 3, 64), cache_for(model, 3, 64)
    cache.allocate_like(step.example)
    for rows in ([[3], [4, 5, 6], [7, 8]], [[9, 10, 11], [12], [13, 14, 15]], [[1] * 9] * 3):
        ids = torch.tensor([[0] * (len(max(rows, key=len)) - len(row)) + row for row in rows])
        real = torch.tensor([[False] * (ids.shape[1] - len(row)) + [True] * len(row) for row in rows])
        expected = model(ids, positions=other.start(real), cache=other)
        for i, scores in step.read_rows(dict(enumerate(rows)), cache).items():
            want = expected[i, -len(scores) :]
            assert (torch.stack([s.logits for s in scores]) - want).abs().max() < limit * want.abs().max()
        assert torch.equal(cache.length, other.length)


@torch.no_grad()
def assert_texts_are_read(model, step):
    """By the step as by the model, with equal caches; not by a step of a model that cannot have it."""
    for length in (FEW + 1, 17, 40):
        cache, other = Cache(1, 64), Cache(1, 64)
        cache.allocate_like(step.example)
        ids = [*range(3, 3 + length)]
        (scores,), expected = step.read_text(ids, cache), model(torch.tensor([ids]), cache=other)[0, -1]
        assert (scores.logits - expected).abs().max() < 1e-5 * expected.abs().max()
        assert scores.best == int(expected.argmax())
        assert abs(scores.logprob(5) - float(expected.log_softmax(-1)[5])) < 1e-5 * expected.abs().max()
        for own, theirs in zip(cache.keys + cache.values, other.keys + other.values, strict=True):
            assert torch.equal(own[:, :, length:], torch.zeros_like(own[:, :, length:]))
            torch.testing.assert_close(own, theirs)
        assert (cache.length.item(), cache.max_length, cache.equal_rows) == (length, length, True)


@pytest.mark.parametrize("length", [8, 9, 63])
def test_the_beginning_of_a_text_is_read_at_once(length, monkeypatch):
    model = model_of()
    step, reads = PlainStep(model, few=True, texts=True), []
    monkeypatch.setattr(PlainStep, "read_text", lambda self, *args: reads.append(1) or READ(self, *args))
    cache = PrefixCache(model, step=step)
    cache.reserve(64)
    ids = [*range(3, 3 + length)]
    torch.testing.assert_close(cache.logits({0: ids})[0], PrefixCache(model).logits({0: ids})[0])
    assert len(reads) == (length > IN_FLOAT32)
    changed = [*ids[:-1], 90]  # what the cache holds is not read again
    torch.testing.assert_close(cache.logits({0: changed})[0], PrefixCache(model).logits({0: changed})[0])
    torch.testing.assert_close(cache.logits({0: ids}, {0: 3})[0], PrefixCache(model).logits({0: ids}, {0: 3})[0])
    assert len(reads) == (length > IN_FLOAT32)
    assert cache.scores([90] * 70) is None, "more than the cache has room for"


READ = CompiledStep.read_text


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gpt2", "scored", "lora", "int8", "int4"])
@torch.no_grad()
def test_the_exported_step_of_texts_gives_the_models_logits(name):
    model = MODELS[name]()
    run = export_decode_graph(TextGraph(model).eval(), example_cache(model)).module()
    for length in (FEW + 1, 40):
        cache, own, ids = Cache(1, 64), Cache(1, 64), torch.arange(3, 3 + length)
        cache.allocate_like(example_cache(model))
        expected = model(ids[None], cache=own)[0, -1:]
        got, _ = run(ids, cache.keys, cache.values)
        assert (got - expected).abs().max() < 5e-6 * expected.abs().max()
        assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(cache.keys, own.keys, strict=True))


COMPILED = sorted({*MODELS} - {"lora", "int3"})  # as dora and int4
COMPILED = [n if n == "llama" else pytest.param(n, marks=pytest.mark.long) for n in COMPILED]


@needs_compiler
@pytest.mark.parametrize("name", COMPILED)
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_the_compiled_step_gives_equal_greedy_ids(name, monkeypatch, home):
    class Archive(zipfile.ZipFile):
        def __init__(self, *args):
            super().__init__(*args)
            written.extend(self.read(name) for name in self.namelist() if name.endswith("wrapper.cpp"))

    written = []
    monkeypatch.setattr(step_package, "ZipFile", Archive)
    model = MODELS[name]()
    assert load_step(model) is None
    torch.compile(torch.relu)(torch.zeros(64))  # which must not decide how the step is compiled
    _, dtype = compile_step(model, 64)
    step = load_step(model)
    assert dtype in step_package.TOLERANCE
    assert ids_of(model, step) == ids_of(model)
    assert_a_few_are_computed_at_once(model, step)
    if step.reads_texts:
        assert_texts_are_read(model, step)
    assert step.reads_rows == (name != "mixtral")
    if step.reads_rows:
        assert_rows_are_read(model, step, tolerance=1e-5 if dtype == torch.float32 else 0.1)
    assert step.reads_texts == (name not in WITHOUT_TEXTS)
    assert stat.S_IMODE(step_package.packages_folder().stat().st_mode) == 0o700
    in_heap = name in ("mixtral", "dora", "nf4", "int4")  # with operators that Inductor only calls
    few = written[: len(written) - step.reads_texts - step.reads_rows]
    if name != "scored":  # a library multiplies by its keys and values, if there are several tokens
        assert {b"_storage[" in code for code in few} == {not in_heap}, "where its buffers lie"


def logits_of(model, step=None):
    cache, rows = cache_for(model, 1, 64), []
    with torch.no_grad():
        rows.append(model(torch.arange(5)[None], cache=cache, last=1)[0, 0])
        for id in (7, 9, 11, 3) * 10:
            rows.append(step([id], cache)[0].logits if step else model(torch.tensor([[id]]), cache=cache)[0, 0])
    return torch.stack(rows)


@pytest.mark.parametrize("name", [name for name in MODELS if name not in ("lora", "dora")])
@torch.no_grad()
def test_a_step_is_compared_with_the_model_in_float32(name):
    model = MODELS[name]().to(torch.bfloat16)
    cache, own = step_package._check_tokens(model)
    exact = step_package._exact_logits(model, cache)
    dtypes = {tensor.dtype for tensor in cache.keys + cache.values}
    for module in model.modules():
        module.dtype = torch.float32  # of dequantized weights
    model.float()
    expected, logits = step_package._check_tokens(model)
    assert (exact - logits).abs().max() < (own - logits).abs().max() / 4
    assert dtypes == {torch.bfloat16}
    for stored, tensor in zip(cache.keys + cache.values, expected.keys + expected.values, strict=True):
        torch.testing.assert_close(stored.float(), tensor, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("name", ["llama", "window", "gpt2", "alibi", "lora", "int8", "int4"])
@torch.no_grad()
def test_the_parts_of_a_step_together_give_the_models_logits(name):
    model = MODELS[name]()

    def layer(graph, inputs):
        *of_tokens, k, v = inputs
        return [graph(*of_tokens, [k], [v])]

    layers = [partial(layer, LayerGraph(block)) for block in model.blocks]
    joined = join_parts(model, layers, lambda inputs: HeadGraph(model)(*inputs))
    step = CompiledStep(dict.fromkeys((1, ROWS), joined), torch.float32)
    assert (logits_of(model, step) - logits_of(model)).abs().max() < 1e-4
    assert_rows_are_read(model, step)


@needs_compiler
@pytest.mark.parametrize("name", ["llama", "int8"])
def test_a_step_by_layer_gives_equal_greedy_ids(name, monkeypatch, home):
    monkeypatch.setattr(step_package, "LAYER_PARAMETERS", 0)
    monkeypatch.setattr(step_package, "LAYERS_OF_A_FORM", 1)
    model = MODELS[name]()
    package, dtype = compile_step(model, 64, torch.float32)
    forms = "", "few-", "rows-" if name == "int8" else "batch-"
    names = {f"native-{form}{part}.so" for form in forms for part in ("head", "layer0")}
    assert names <= {*step_package.native_files(package)}
    step = load_step(model, dtype)
    assert ids_of(model, step) == ids_of(model)
    assert_a_few_are_computed_at_once(model, step)
    assert_rows_are_read(model, step)


def test_native_code_is_not_loaded_where_threads_have_small_stacks(tmp_path):
    before = threading.stack_size(1 << 18)
    try:
        with pytest.raises(ValueError, match="needs threads with a stack of 2097152 bytes; the stack has 262144"):
            load_native(tmp_path / "native.so", {})
    finally:
        threading.stack_size(before)


@needs_compiler
def test_threads_and_copies_have_their_own_numbers(home):
    model = model_of(tied=False, depth=1)
    step, want = make_step(model, torch.float32), ids_of(model)
    assert ids_of(model, copy.deepcopy(step)) == want
    run, other = step._run[1], partial(ids_of, model, step, max_tokens=3, prompt=(8, 9))

    def interrupted(inputs):  # as code may be, between the writing of its inputs and their reading
        if threading.current_thread() is threading.main_thread():
            (thread := threading.Thread(target=other)).start()
            thread.join()
        return run(inputs)

    step._run[1] = interrupted
    assert ids_of(model, step) == want


def test_native_code_runs_in_one_thread_at_a_time():
    inside = []
    run = lambda _: inside.append(1) or time.sleep(0.02) or inside.pop() - len(inside)
    runner = SimpleNamespace(get_constant_names_to_original_fqns=dict, update_constant_buffer=print, run=run)
    with ThreadPoolExecutor(3) as threads:
        assert [*threads.map(decode_graph._with_weights(runner, {}), "abc")] == [1, 1, 1]


@pytest.mark.long
def test_weights_too_large_for_float16_stay_in_float32(home):
    model = model_of(depth=1)
    model.blocks[0].mlp.up.weight.data *= 1e6
    model.blocks[0].mlp.down.weight.data *= 1e-6
    assert compile_step(model, 64)[1] == torch.float32
    assert ids_of(model, load_step(model)) == ids_of(model)
    refuses("from the model's", compile_step, model, 64, torch.float16)


@pytest.mark.parametrize(
    "make",
    [
        lambda factor: lambda x, factor=factor: x * factor,
        lambda factor: MethodType(lambda self, x: x * self.factor, SimpleNamespace(factor=factor)),
        lambda factor: partial(torch.mul, factor),
    ],
)
def test_what_functions_hold_is_part_of_a_package(make, home):
    folders = []
    for factor in (1.0, 3.0, 3.0):
        model = model_of(depth=1)
        model.blocks[0].mlp.scale = make(factor)
        folders.append(step_package._folder(model))
    assert folders[0] != folders[1] == folders[2]


@pytest.mark.parametrize(
    "change",
    [
        lambda patch, attn: patch.setattr(torch, "__version__", "9.9"),
        lambda patch, attn: patch.setattr(step_package.measure, "processor", lambda: {"flags": "another"}),
        lambda patch, attn: patch.setitem(step_package.OPTIONS, "realize_reads_threshold", 2),
        lambda patch, attn: patch.setattr(step_package.atomic, "digest", lambda path: f"edited {path.name}"),
        lambda patch, attn: setattr(attn, "_private", {"a": [{"b": [("depth", 1)]}]}),
        lambda patch, attn: attn.q.half(),
        lambda patch, attn: setattr(attn.out, "weight", attn.q.weight),
    ],
)
def test_what_compiled_code_depends_on_names_its_folder(change, home, monkeypatch):
    model, before = model_of(depth=1), step_package._folder(model_of(depth=1, seed=1))
    assert step_package._folder(model) == before, "whatever its weights"
    change(monkeypatch, model.blocks[0].attn)
    assert step_package._folder(model) != before


def test_a_user_without_a_home_decodes_without_a_package(monkeypatch):
    for name in ("HOME", "DUNES_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", raising(KeyError("uid")))
    with pytest.warns(UserWarning, match="set DUNES_HOME to a folder; decoding without it$"):
        assert load_step(model_of()) is None
    refuses("no home folder", compile_step, model_of(), 64)


def test_without_a_compiler_nothing_is_compiled_and_the_remedy_is_named(no_compiler, tmp_path):
    model = model_of(depth=1)
    refuses("no C\\+\\+ compiler; install g\\+\\+ or clang", compile_step, model, 64)
    assert load_step(model) is None
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "lock"]
    assert step_source(model, lambda: pytest.fail("started"))() is None


@needs_compiler
def test_a_step_is_compiled_in_the_background_and_taken_when_it_is_ready(home, tmp_path):
    folder = tmp_path / "model"
    checkpoint.save(model_of(), folder, Tokenizer.train("bytes", []), 64)
    loaded = checkpoint.load(folder)
    find = step_source(loaded.model, partial(start_compiling, folder))
    generator = TextGenerator(loaded, find)
    before = generator.text("some", 30)
    assert generator.cache.step is None
    assert eventually(lambda: find() is not None and find().reads_texts, 240), "which comes last"
    assert generator.text("some", 30) == before
    assert generator.cache.step is find()


def test_a_process_that_compiles_can_be_forgotten(tmp_path):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        number = start_compiling(tmp_path).pid
        assert start_compiling(tmp_path).pid == number, "a model is loaded again while its step is compiled"
        gc.collect()
    assert not caught
    os.kill(number, signal.SIGKILL)
    deadline = time.monotonic() + 30
    with suppress(ProcessLookupError):
        while time.monotonic() < deadline:
            os.kill(number, 0)
            time.sleep(0.01)
        pytest.fail("a zombie stays")


@pytest.mark.long
def test_a_package_that_is_damaged_or_not_ours_is_not_used(monkeypatch, tmp_path, home):
    model = model_of()
    package, _ = compile_step(model, 64)
    (temporary := tmp_path / "temporary").mkdir()
    with monkeypatch.context() as patch:
        patch.setenv("TMPDIR", str(temporary))
        patch.setattr(tempfile, "tempdir", str(temporary))
        step = load_step(model)
        assert not [*temporary.iterdir()], "which would stay if the process were killed"
    assert load_step(model_of(hidden=96)) is None, "of another shape"
    (folder := step_package.packages_folder()).chmod(0o755)
    with pytest.warns(UserWarning, match="chmod 700"):
        assert load_step(model) is None
    folder.chmod(0o700)
    for file in [*package.glob("*.so")]:
        data = file.read_bytes()
        for damaged in (data[: len(data) // 2], data[:5000] + bytes([data[5000] ^ 1]) + data[5001:], b""):
            file.write_bytes(damaged)
            with pytest.warns(UserWarning, match=f"{file.name}: not the bytes that were written"):
                assert load_step(model) is None
            assert ids_of(model, step) == ids_of(model), "its code is in use"
        compile_step(model, 64)
        assert_a_few_are_computed_at_once(model, load_step(model))
    monkeypatch.setattr(type(model.blocks[0].mlp), "forward", lambda self, x: self.up(x)[..., : x.shape[-1]])
    with pytest.warns(UserWarning, match="from the model's"):
        assert load_step(model) is None


@pytest.mark.long
def test_the_dtype_is_chosen_by_greedy_ids_or_by_the_user_for_these_weights_alone(monkeypatch, home):
    model, other = model_of(), model_of(seed=1)
    monkeypatch.setattr(step_package, "_fastest", lambda steps: [*steps][-1])
    assert compile_step(model, 64)[1] == torch.float16
    assert load_step(model).dtype == torch.float16
    assert load_step(other) is None, "its greedy ids in float16 were not compared"
    for chosen in (torch.bfloat16, torch.float32, torch.float16):
        assert compile_step(model, 64, chosen)[1] == chosen
        assert load_step(model).dtype == chosen
    monkeypatch.setattr(step_package, "_fastest", lambda steps: next(iter(steps)))
    assert compile_step(model, 64)[1] == torch.float16, "which is recorded"
    assert load_step(other).dtype == torch.float32, "needs no comparison"
    assert load_step(other, torch.bfloat16).dtype == torch.bfloat16
    monkeypatch.setattr(step_package, "_same_greedy_ids", lambda *arguments: False)
    assert compile_step(other, 64)[1] == torch.float32
    model.blocks[0].mlp.down.weight.data[0, 0] += 0.5
    assert load_step(model).dtype == torch.float32, "changed since"
    refuses("float64: this model can be compiled in bfloat16, float16, float32", make_step, model, torch.float64)


@pytest.mark.slow
def test_experts_that_run_one_by_one_and_changing_buffers_are_refused(home):
    warnings.simplefilter("ignore")
    model = model_of("mixtral")
    augment.quantize(model, kind="nf4")
    refuses("cannot export this model: experts of this form run one by one", make_step, model, torch.float32)
    model = model_of()
    model.blocks[0].mlp = Counting()
    refuses("count: a buffer that forward changes", make_step, model, torch.float32)
    model.register_forward_hook(lambda *arguments: None)
    refuses("without hooks", make_step, model, torch.float32)
    refuses("in float32, float16 or bfloat16", make_step, model_of().double(), torch.float64)


class Mixing(nn.Module):
    def forward(self, x):
        return x.cumsum(1)


@pytest.mark.parametrize(
    ("part", "message"),
    [pytest.param(Branching(), "cannot export this model", marks=pytest.mark.slow), (Mixing(), "may mix tokens")],
)
def test_a_model_that_cannot_be_exported_says_why(part, message, tmp_path, home):
    model = model_of(depth=1)
    model.blocks[0].mlp = part
    warnings.simplefilter("ignore")
    refuses(message, compile_step, model, 64)
    assert not list(tmp_path.rglob("*.so"))
