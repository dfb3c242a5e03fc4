"""Speculation changes how many forwards a text needs, and nothing else."""

import random
import re
from collections import Counter
from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import nn

from conftest import raising, refuses
from dunes import checkpoint
from dunes.augment import adapter_active, row_adapters
from dunes.cli import verbs
from dunes.generate import (
    DraftModel,
    PrefixCache,
    Proposal,
    Request,
    Sampler,
    SamplingOptions,
    first_proposal,
    generate,
    generate_all,
    limit_vocab,
    look_up,
    sampler,
)
from dunes.generate.speculate import _correct
from dunes.parts import RollingCache
from dunes.text import Tokenizer
from own_parts import of_own_parts
from small_models import add_noise, assert_same_tokens, random_model
from test_generate import CONTEXT, CROSSING, PROMPTS, VOCAB, made, windowed
from test_text_generator import TEXT, adapted


def tiny(noise=0.0):
    """A model whose weights matter; with noise, another one that often agrees with it."""
    return add_noise(random_model(noise=0.2, vocab=VOCAB, depth=1, context=CONTEXT), noise)


def rounded(model):
    return model.to(torch.bfloat16).float()


LOOK_UP = partial(look_up, shortest=1)
PROPOSERS = {
    "the same model, rounded": lambda: DraftModel(rounded(tiny()), CONTEXT),
    "another model": lambda: DraftModel(tiny(0.03), CONTEXT, count=2),
    "look-up": lambda: LOOK_UP,
    "look-up, else a draft": lambda: first_proposal(look_up, DraftModel(rounded(tiny()), 20)),
}


def written(model, prompt, **settings):
    return list(generate(model, prompt, context_length=CONTEXT, **settings))


@pytest.mark.slow
@pytest.mark.parametrize("name", PROPOSERS)
def test_greedy_text_is_the_plain_one_after_200_random_prompts(name):
    model, propose, draw = tiny(), PROPOSERS[name](), random.Random(0)
    prompts = [draw.choices(range(VOCAB), k=draw.randint(1, 24)) for _ in range(200)]
    plain = [Request(p, 10, stop={3}) for p in prompts]
    assert len(list(generate_all(model, plain, context_length=CONTEXT))) == 10
    cache = PrefixCache(model)
    for prompt, want in zip(prompts, plain, strict=True):
        got = written(model, prompt, max_tokens=10, stop={3}, cache=cache, proposer=propose)
        assert [t.id for t in got] == want.ids[len(prompt) :]
    assert 1.1 < sum(len(r.ids) - len(r.prompt) for r in plain) / cache.forwards < 5
    assert len({len(r.ids) - len(r.prompt) for r in plain}) > 5, "some stop within an accepted run"


PROCESSED = {
    "penalty": lambda: sampler(0.0, repetition_penalty=1.3),
    "all": lambda: sampler(1.5, top_k=20, top_p=0.95, min_p=0.01, repetition_penalty=1.2, seed=5),
    "limited": lambda: sampler(1.0, seed=3).after(partial(limit_vocab, 40)),
}


@pytest.mark.parametrize("name", PROCESSED)
def test_look_up_writes_what_plain_sampling_does_token_by_token(name):
    model, cache = tiny(), PrefixCache(tiny())
    for prompt in ([5, 6, 7, 5], TEXT[:4], [1, 1, 1, 1]):
        request = lambda **options: Request(prompt, 24, PROCESSED[name](), alternatives=3, **options)  # noqa: B023
        want = [t for (t,) in generate_all(model, [request()], context_length=CONTEXT)]
        speculative = request(proposer=oracle([t.id for t in want], 4, wrong_at=3))
        got = [t for (t,) in generate_all(model, [speculative], context_length=CONTEXT, cache=cache)]
        assert_same_tokens(got, want)
        speculative = request(proposer=LOOK_UP)
        assert_same_tokens(
            [t for (t,) in generate_all(model, [speculative], context_length=CONTEXT, cache=cache)], want
        )
    assert cache.forwards < 120, "of 144 tokens"


def oracle(ids, prompt, wrong_at=10**9, count=6):
    """Proposes what will come, but for each `wrong_at`th id."""

    def propose(text, limit, sample):
        done = len(text) - prompt
        right = ids[done : done + min(count, limit)]
        return Proposal([(i + ((done + n) % wrong_at == wrong_at - 1)) % VOCAB for n, i in enumerate(right)])

    return propose


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt2", "llama", "mixtral"])
def test_it_crosses_the_context_where_the_plain_text_does(family):
    model = made(family)
    for prompt in CROSSING:
        want, cache = written(model, prompt, max_tokens=60), PrefixCache(model)
        for wrong_at in (10**9, 5):
            propose = oracle([t.id for t in want], len(prompt), wrong_at)
            assert_same_tokens(written(model, prompt, max_tokens=60, cache=cache, proposer=propose), want)
        assert cache.forwards < 80


@pytest.mark.slow
@pytest.mark.parametrize("count", [3, 16, 30])
@pytest.mark.parametrize("window", [5, 20])
def test_a_rolling_cache_drops_what_was_not_accepted(window, count):
    model = windowed(window)
    cache = PrefixCache(model)
    for prompt in CROSSING:
        want = written(model, prompt, max_tokens=36)
        for wrong_at in (2, 7):
            propose = oracle([t.id for t in want], len(prompt), wrong_at, count)
            assert_same_tokens(written(model, prompt, max_tokens=36, cache=cache, proposer=propose), want)
    assert type(cache.cache) is RollingCache


@pytest.mark.parametrize("context", [1, 2, 3])
def test_the_smallest_contexts_leave_room_for_what_fits(context):
    model = windowed(5)
    for propose in (LOOK_UP, DraftModel(model, context), DraftModel(model, 1)):
        for prompt in PROMPTS:
            write = partial(generate, model, prompt, max_tokens=9, context_length=context)
            assert_same_tokens(list(write(proposer=propose)), list(write()))


def test_a_batch_of_unequal_prompts_with_and_without_proposals_is_each_as_alone():
    model = adapted()
    samplers = lambda: [sampler(1.0, seed=1), Sampler(), sampler(0.9, top_k=9, seed=2), Sampler(), Sampler()]
    prompts, adapters = [TEXT[:9], TEXT[:30], [7], TEXT[3:20], [7]], ["one", None, "two", "one", None]
    plain = [
        Request(p, 20 + i, s, adapter=a)
        for i, (p, s, a) in enumerate(zip(prompts, samplers(), adapters, strict=True))
    ]
    for request in plain:
        with adapter_active(model, request.adapter):
            list(generate_all(model, [request], context_length=CONTEXT))
    new = [r.ids[len(r.prompt) :] for r in plain]
    proposers = [oracle(new[0], 9, 4), None, oracle(new[2], 1, 3), LOOK_UP, oracle(new[4], 1)]
    drawn = samplers()
    again = [
        Request(r.prompt, 20 + i, drawn[i], adapter=r.adapter, proposer=proposers[i]) for i, r in enumerate(plain)
    ]
    places, late = list(again[:3]), list(again[3:])
    cache = PrefixCache(model, 3, partial(row_adapters, model))
    got = {id(r): [] for r in again}
    for row in generate_all(model, places, context_length=CONTEXT, cache=cache):
        for i, token in enumerate(row):
            if token is not None:
                got[id(places[i])].append(token.id)
                assert places[i].ids[-1] == token.id, "ids grow one by one"
            if not places[i].unfinished and late:
                places[i] = late.pop(0)
    assert [got[id(r)] for r in again] == new
    assert len(new[0]) == 20
    assert cache.forwards < 75, "of 110 tokens"


def test_a_text_ends_or_is_cancelled_within_an_accepted_run_and_the_cache_stays_right():
    model, prompt = tiny(), TEXT[:6]
    want = written(model, prompt, max_tokens=20)
    ids = [t.id for t in want]
    for n in (1, 4, 6, 7, 11):
        cache = PrefixCache(model)
        settings = {"cache": cache, "proposer": oracle(ids, 6)}
        stop = {ids[n]}
        assert_same_tokens(written(model, prompt, max_tokens=20, stop=stop, **settings), want[: ids.index(ids[n])])
        tokens = generate(model, prompt, max_tokens=20, context_length=CONTEXT, **settings)
        assert_same_tokens([next(tokens) for _ in range(n)], want[:n])
        tokens.close()
        assert_same_tokens(written(model, prompt, max_tokens=n, **settings), want[:n])
        other = [*prompt, *ids[:n], 1, 2]
        assert_same_tokens(written(model, other, max_tokens=8, cache=cache), written(model, other, max_tokens=8))
        request = Request(prompt, 20, proposer=oracle(ids, 6))
        for _ in generate_all(model, [request], context_length=CONTEXT, cache=cache):
            if len(request.ids) == 6 + n:
                request.end = 6 + n  # as a stop string sets it
        assert request.ids[6:] == ids[:n]


@pytest.mark.parametrize("bad", [-1, VOCAB, 10**6])
def test_proposals_with_other_ids_are_refused_and_empty_or_long_ones_are_not(bad):
    model, want = tiny(), written(tiny(), [1, 2], max_tokens=8)
    refuse = generate(model, [1, 2], max_tokens=8, context_length=CONTEXT, proposer=lambda *_: Proposal([4, bad]))
    refuses(f"has id {bad}", list, refuse)
    for ids in ([], [want[1].id] * 100):
        assert_same_tokens(written(model, [1, 2], max_tokens=8, proposer=lambda *_: Proposal(ids)), want)  # noqa: B023


@pytest.mark.filterwarnings("ignore:.*may mix tokens")
def test_a_model_without_a_cache_is_asked_for_one_token_at_a_time():
    model = of_own_parts("shift").float()
    propose = raising(AssertionError("what follows might change what stands before"))
    assert_same_tokens(
        written(model, [1, 2], max_tokens=8, proposer=propose), written(model, [1, 2], max_tokens=8)
    )


class Bigram(nn.Module):
    """Logits that depend on the last id only."""

    def __init__(self, logits):
        super().__init__()
        self.table = nn.Parameter(logits)

    def forward(self, ids, positions, cache, last):
        cache.advance((positions >= 0).sum(1))
        return self.table[ids][:, -last:]


def bigram(seed, vocab=4):
    return Bigram(torch.randn(vocab, vocab, generator=torch.Generator().manual_seed(seed)))


def test_of_tied_logits_greedy_takes_the_same():
    model = Bigram(torch.randint(0, 2, (VOCAB, VOCAB), generator=torch.Generator().manual_seed(0)).float())
    for start in range(0, VOCAB, 4):
        want = written(model, [start], max_tokens=30)
        assert_same_tokens(written(model, [start], max_tokens=30, proposer=DraftModel(model, CONTEXT)), want)
        assert_same_tokens(written(model, [start], max_tokens=30, proposer=LOOK_UP), want)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain", "look-up", "draft", "its own draft"])
@pytest.mark.parametrize("settings", [{}, {"temperature": 0.7, "top_k": 3}])
def test_the_drawn_distribution_is_the_models(name, settings):
    model, other = bigram(0), bigram(1)
    propose = {
        "look-up": partial(look_up, shortest=1, count=3),
        "draft": DraftModel(other, 50),
        "its own draft": DraftModel(model, 50),
    }.get(name)
    cache = PrefixCache(model)
    options = {"max_tokens": 4000, "context_length": 50, "cache": cache, "proposer": propose}
    text = generate(model, [0], sample=sampler(**settings, seed=7), **options)
    ids = [0, *(t.id for t in text)]
    chi_squared, freedom = 0.0, 0
    counts = Counter(pairwise(ids))
    for i in range(4):
        want = sampler(**settings).process(model.table[i].detach(), []).softmax(-1) * ids[:-1].count(i)
        drawn = torch.tensor([counts[i, j] for j in range(4)])
        assert drawn[want == 0].sum() == 0
        chi_squared += float(((drawn - want) ** 2 / want)[want > 0].sum())
        freedom += int((want > 0).sum()) - 1
    assert chi_squared < {12: 32.9, 8: 26.1}[freedom], "exceeded by chance once in a thousand seeds"
    rates = {"plain": 1.0, "look-up": 1.2, "draft": 1.5, "its own draft": 4}
    assert 4000 / cache.forwards >= rates[name]
    assert name == "plain" or 4000 / cache.forwards < 5.001


def test_look_up_finds_the_last_occurrence_of_the_longest_end():
    draw = random.Random(0)
    for _ in range(500):
        ids = [draw.choice([0, 1, 256, 2**20]) for _ in range(draw.randint(1, 30))]
        want = []
        for n in range(1, min(4, len(ids) - 1) + 1):
            for start in range(len(ids) - n):
                if ids[start : start + n] == ids[-n:]:
                    want, lag = list(ids), len(ids) - n - start
        for _ in range(6 if want else 0):
            want.append(want[-lag])
        assert list(look_up(ids, 6, Sampler(), longest=4, shortest=1).ids) == want[len(ids) :]
    assert list(look_up([1, 2, 3, 1, 2], 2, Sampler()).ids) == [3, 1]
    assert not look_up([1, 2, 3], 5, Sampler()).ids


@pytest.fixture
def folders(tmp_path):
    """Two models with one tokenizer and one with another."""
    characters = [chr(i) for i in range(32, 127)]
    for name, text, seed in (("big", characters, 0), ("small", characters, 1), ("other", characters[:-1], 0)):
        tokenizer = Tokenizer.train("chars", text)
        model = random_model(vocab=tokenizer.vocab, dim=16, depth=1, context=64, seed=seed)
        checkpoint.save(model, tmp_path / name, tokenizer, 64)
    return tmp_path


@pytest.mark.parametrize("temperature", [0.0, pytest.param(0.8, marks=pytest.mark.slow)])
def test_the_verb_writes_the_same_text_and_says_how_many_tokens_a_forward_gave(folders, capsys, temperature):
    options = SamplingOptions(max_tokens=60, temperature=temperature, top_k=3)
    verbs.generate(str(folders / "big"), options, "ab ab ab")
    want = capsys.readouterr().out
    for arguments in ({"lookup": True}, {"draft": str(folders / "small")}, {"lookup": True, "draft": "big"}):
        arguments |= {"draft": str(folders / arguments["draft"])} if "draft" in arguments else {}
        verbs.generate(str(folders / "big"), options, "ab ab ab", **arguments)
        printed = capsys.readouterr()
        forwards, rate = re.search(r"(\d+) forwards, (.*) tokens per forward\n", printed.err).groups()
        count = re.search(r"generated: (\d+) tokens", printed.err).group(1)
        assert float(rate) == pytest.approx(int(count) / int(forwards), abs=0.01)
        if temperature == 0 or "draft" not in arguments:
            assert printed.out == want
            assert int(count) == 60


def test_the_verb_refuses_a_draft_with_another_tokenizer_before_it_writes(folders, capsys):
    big, other = str(folders / "big"), str(folders / "other")
    refuses("vocabulary", verbs.generate, big, SamplingOptions(), "ab", draft=other)
    assert not capsys.readouterr().out


def test_a_proposed_id_that_is_accepted_or_replaced_has_the_models_distribution():
    """Mean over what a proposer draws from `q`: equation 1 of https://arxiv.org/abs/2211.17192."""
    p, q = torch.rand(2, 20, generator=torch.Generator().manual_seed(0), dtype=torch.float64).softmax(-1).pow(3)
    p, q = p / p.sum(), q / q.sum()
    drawn = sum(q[proposed] * _correct(p, q, proposed) for proposed in range(20))
    assert (drawn - p).abs().max() < 1e-12
