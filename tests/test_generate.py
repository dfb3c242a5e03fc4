"""Decoding equals the cache-less forward; sampling equals transformers' filters."""

import itertools
import math
import warnings
from copy import deepcopy
from functools import partial

import pytest
import torch

from conftest import refuses
from dunes import measure
from dunes.generate import PrefixCache, Request, Sampler, generate, generate_all, prefix_cache, sampler
from dunes.generate.sampling import SamplingOptions, draw
from dunes.models import FAMILIES, qwen3
from dunes.models.initialise import initialise
from dunes.parts import RollingCache, cache_for, recurrent_cache
from own_parts import OWN, Wrapped, of_own_parts
from small_models import random_model

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from transformers import generation

VOCAB, CONTEXT = 61, 32
PROMPTS = [[1, 2, 3, 4, 5], [7], [9, 8, 7]]


@pytest.fixture(params=FAMILIES)
def model(request):
    # With a tied head, Gemma's scaled embeddings repeat their input until it is trained.
    return made(request.param, **({"tied": False} if request.param.startswith("gemma") else {}))


made = partial(random_model, noise=0.2, vocab=VOCAB, dim=64, context=CONTEXT)


@torch.no_grad()
def greedy(model, prompt, max_tokens):
    model.eval()
    ids = list(prompt)
    for _ in range(max_tokens):
        ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.slow
def test_cached_text_is_that_of_the_full_forward_alone_and_in_a_ragged_batch(model):
    want = [greedy(model, p, 20) for p in PROMPTS]
    assert [[t.id for t in generate(model, p, max_tokens=20, context_length=CONTEXT)] for p in PROMPTS] == want
    assert together(model, PROMPTS, max_tokens=20) == want
    assert len({i for ids in want for i in ids}) > 4, "the text must not be trivial"


@torch.no_grad()
@pytest.mark.parametrize("chunk", [7, *(pytest.param(n, marks=pytest.mark.slow) for n in (3, 2048))])
def test_a_prompt_in_chunks_is_the_prompt_in_one_go(model, chunk, monkeypatch):
    monkeypatch.setattr(prefix_cache, "CHUNK", chunk)
    model = deepcopy(model).eval().double()  # float32 rounds differently in products of other sizes
    rows = torch.randint(VOCAB, (2, 30), generator=torch.Generator().manual_seed(1)).tolist()
    cache = PrefixCache(model, 2)
    cache.reserve(30)
    for length, other, last in ((20, 11, 1), (30, 30, 9)):
        texts = {0: rows[0][:length], 1: rows[1][:other]}
        got = cache.logits(texts, {0: last, 1: last})
        got = torch.cat([*got.values()]) if isinstance(got, dict) else got
        want = torch.cat([model(torch.tensor([ids]))[0, -last:] for ids in texts.values()])
        assert (got - want).abs().max() <= 1e-6


@torch.no_grad()
def test_logprobs_are_the_models_own(model):
    model = model.double()  # a delta rule's outputs near 0 are normed, with their rounding
    for token, step in zip(generate(model, [3, 4], max_tokens=5, context_length=CONTEXT), range(5), strict=True):
        ids = [3, 4, *greedy(model, [3, 4], step)]
        want = model(torch.tensor([ids]))[0, -1].log_softmax(-1)[token.id]
        assert token.logprob == pytest.approx(float(want), abs=1e-5)


@pytest.mark.slow
def test_a_text_longer_than_the_context_goes_on_from_its_last_half(model):
    text = [t.id for t in generate(model, [1], max_tokens=100, context_length=CONTEXT)]
    assert len(text) == 100
    assert text[: CONTEXT - 1] == greedy(model, [1], CONTEXT - 1)
    long = list(range(60))
    first = next(generate(model, long, max_tokens=1, context_length=CONTEXT))
    assert first.id == greedy(model, long[-CONTEXT:], 1)[0]


def test_a_row_that_stops_does_not_disturb_the_others(model):
    want = [greedy(model, p, 12) for p in PROMPTS]
    stop = want[0][3]
    ended = [ids[: ids.index(stop) if stop in ids else 12] for ids in want]
    assert together(model, PROMPTS, max_tokens=12, stop={stop}) == ended


def ids_of(model, requests):
    rows = list(generate_all(model, requests, context_length=CONTEXT))
    return [[row[i].id for row in rows if row[i]] for i in range(len(requests))]


def together(model, prompts, samplers=None, **settings):
    samplers = samplers or [Sampler()] * len(prompts)
    return ids_of(model, [Request(p, sample=s, **settings) for p, s in zip(prompts, samplers, strict=True)])


def alone(model, prompts, samplers=None, **settings):
    """The text of each prompt by itself."""
    samplers = samplers or [Sampler()] * len(prompts)
    return [together(model, [p], [s], **settings)[0] for p, s in zip(prompts, samplers, strict=True)]


@pytest.mark.parametrize("rows", [1, 3])
def test_texts_go_on_from_a_snapshot_of_a_recurrent_state(rows, monkeypatch):
    monkeypatch.setattr(recurrent_cache, "INTERVAL", 8)
    monkeypatch.setattr(recurrent_cache.RecurrentCache, "largest_piece", 8)
    model, read = made("qwen3_next").double(), []
    model.embed.register_forward_pre_hook(lambda _, inputs: read.append(inputs[0].shape))
    first = [[(7 * i + 3 * n) % VOCAB for i in range(22)] for n in range(rows)]
    second = [[*ids[:19], n] for n, ids in enumerate(first)]
    cache = PrefixCache(model, rows)
    for prompts, count in ((first, 5), (second[:1], 4), (second, 4)):
        texts = [Request(p, max_tokens=count) for p in prompts]
        want = alone(model, prompts, max_tokens=count)
        del read[:]
        tokens = [*generate_all(model, texts + [None] * (rows - len(texts)), context_length=CONTEXT, cache=cache)]
        assert [[row[i].id for row in tokens] for i in range(len(texts))] == want
        assert prompts is first or read[0][1] == 4  # the 20 ids but the 16 of a snapshot


def test_ids_that_another_adapter_read_are_read_again():
    cache = PrefixCache(made("llama"), 2)
    cache.reserve(CONTEXT)
    cache.logits({0: [1, 2, 3], 1: [4, 5, 6]})
    assert all(cache.ids)
    cache.set_adapter(0, "other")
    assert [bool(ids) for ids in cache.ids] == [False, True]


CROSSING = [[(7 * i + n) % VOCAB for i in range(n)] for n in (20, CONTEXT, CONTEXT - 1, 50)]
"""Prompts whose texts come to the context at different times."""


def windowed(window):
    model = made("mistral")
    for block in model.blocks:
        block.attn.window = window
    return model


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt2", "llama", "mixtral"])
def test_a_row_crosses_the_context_when_its_own_text_does(family):
    model = made(family)
    want = alone(model, CROSSING, max_tokens=36)
    assert together(model, CROSSING, max_tokens=36) == want
    stop = {want[0][25], want[1][3]}
    ended = [list(itertools.takewhile(lambda id: id not in stop, ids)) for ids in want]
    assert together(model, CROSSING, max_tokens=36, stop=stop) == ended
    assert len({len(ids) for ids in ended}) > 1, "rows end at different times"


def test_a_row_that_crosses_the_context_draws_as_it_does_alone():
    model, settings = made("llama"), {"top_k": 20, "repetition_penalty": 1.1}
    samplers = lambda: [sampler(1.0, seed=3 + i, **settings) for i in range(len(CROSSING))]
    want = alone(model, CROSSING, samplers(), max_tokens=36)
    assert together(model, CROSSING, samplers(), max_tokens=36) == want


@pytest.mark.parametrize("window", [5, 20])
def test_a_row_crosses_the_context_by_itself_in_a_rolling_cache_too(window):
    model = windowed(window)
    assert type(cache_for(model, 1, CONTEXT)) is RollingCache
    assert together(model, CROSSING, max_tokens=36) == alone(model, CROSSING, max_tokens=36)


@pytest.mark.parametrize("context", [1, 2, 3])
def test_the_smallest_contexts(context, monkeypatch):
    monkeypatch.setitem(globals(), "CONTEXT", context)
    model = windowed(5)
    assert together(model, PROMPTS, max_tokens=9) == alone(model, PROMPTS, max_tokens=9)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*may mix tokens")
@pytest.mark.parametrize("name", sorted(OWN))
def test_parts_of_ones_own_write_what_the_full_forward_does(name):
    module = of_own_parts(name).float()
    with torch.no_grad():
        for p in module.parameters():
            p.mul_(2)
    prompts = [[1, 2, 3], [9] * 11, [40, 2, 7, 7, 5]]
    assert together(module, prompts, max_tokens=12) == [greedy(module, p, 12) for p in prompts]
    crossing = [[id % 50 for id in p[:28]] for p in CROSSING]
    assert together(module, crossing, max_tokens=20) == alone(module, crossing, max_tokens=20)


@pytest.mark.filterwarnings("ignore:.*may mix tokens", "ignore:.*torch.jit:DeprecationWarning")
def test_a_wrapped_model_writes_what_it_does_by_itself():
    module = of_own_parts("shift").float()
    with torch.no_grad():
        for p in module.parameters():
            p.mul_(2)
    assert together(Wrapped(module), PROMPTS, max_tokens=12) == together(module, PROMPTS, max_tokens=12)
    with pytest.warns(UserWarning, match="may mix tokens, so the whole text is computed again"):
        assert cache_for(torch.compile(module), 1, CONTEXT) is None


@pytest.mark.parametrize("family", ["llama", "mixtral", "qwen3_next"])
def test_seeds_repeat_and_a_row_does_not_depend_on_its_neighbours(family):
    model = made(family)

    def text(prompts, seed):
        return together(model, prompts, [sampler(1.0, seed=seed + i) for i in range(len(prompts))], max_tokens=10)

    assert text(PROMPTS, 1) == text(PROMPTS, 1)
    assert text(PROMPTS, 1) != text(PROMPTS, 2)
    assert text(PROMPTS[:1], 1)[0] == text(PROMPTS, 1)[0]


def test_mode_and_gradients_are_left_as_they_were(model):
    model.train()
    tokens = generate(model, [1], max_tokens=3, context_length=CONTEXT)
    next(tokens)
    assert model.training
    assert torch.is_grad_enabled()


def theirs(settings):
    """Transformers' processors for the same settings, in its order."""
    kinds = {
        "repetition_penalty": generation.RepetitionPenaltyLogitsProcessor,
        "temperature": generation.TemperatureLogitsWarper,
    }
    kinds |= {"top_k": generation.TopKLogitsWarper, "top_p": generation.TopPLogitsWarper}
    kinds |= {"min_p": generation.MinPLogitsWarper, "typical_p": generation.TypicalLogitsWarper}
    settings = {"temperature": 1.0} | settings
    return generation.LogitsProcessorList(kind(settings[key]) for key, kind in kinds.items() if key in settings)


def choices(sample, logits, history):
    return [int(sample(row, ids)) for row, ids in zip(logits, history, strict=True)]


SETTINGS = [{"temperature": 0.7}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1}, {"repetition_penalty": 1.5}]
SETTINGS += [
    {"typical_p": 0.5},
    {"temperature": 1.3, "top_k": 20, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.2},
]
SETTINGS += [{**SETTINGS[-1], "typical_p": 0.7}]


@pytest.mark.parametrize("settings", SETTINGS)
def test_the_distribution_is_that_of_transformers(settings):
    torch.manual_seed(0)
    logits = torch.randn(3, 40) * 2
    history = torch.randint(40, (3, 6))
    sample = sampler(**settings)
    probs = [sample.process(x, ids).softmax(-1) for x, ids in zip(logits, history.tolist(), strict=True)]
    want = theirs(settings)(history, logits.clone()).softmax(-1)
    assert (torch.stack(probs) - want).abs().max() < 1e-6


@pytest.mark.parametrize("p", [1e-9, 0.05, 0.3, 0.5, 0.9, 0.999, 1 - 1e-9])
def test_typical_p_keeps_the_ids_that_transformers_keeps(p):
    generator = torch.Generator().manual_seed(0)
    for scale in (0.01, 1.0, 4.0, 30.0):
        logits = torch.randn(20, 500, generator=generator) * scale
        logits[10:, :200] = -torch.inf
        want = theirs({"typical_p": p})(torch.zeros(20, 0), logits.clone()).isfinite()
        kept = [sampler(typical_p=p).process(row, []).isfinite() for row in logits]
        assert torch.equal(torch.stack(kept), want), scale


@pytest.mark.parametrize("last", [-1, 0, 1, 4, 6, 99])
def test_a_penalty_applies_to_the_last_ids(last):
    torch.manual_seed(0)
    logits, history = torch.randn(40) * 2, torch.randint(40, (9,)).tolist()
    ids = history if last == -1 else history[9 - min(last, 9) :]
    want = theirs({"repetition_penalty": 1.5})(torch.tensor([ids], dtype=torch.long), logits[None].clone())[0]
    probs = sampler(repetition_penalty=1.5, penalty_range=last).process(logits, history).softmax(-1)
    assert probs.allclose(want.softmax(-1))


@pytest.mark.parametrize("top_k", [0, -1, 10**20])
def test_a_top_k_of_nothing_or_above_any_vocabulary_keeps_all_ids(top_k):
    logits = torch.randn(40)
    assert torch.equal(sampler(top_k=top_k).process(logits, []), sampler().process(logits, []))
    options = SamplingOptions(top_k=top_k, min_p=0.1, seed=3)
    assert torch.equal(options.sampler().process(logits, []), sampler(0.8, min_p=0.1).process(logits, []))


def test_draws_have_the_probabilities_and_no_excluded_id(monkeypatch):
    logits = torch.tensor([-torch.inf, 1.0, -torch.inf, 3.0, 2.0, -torch.inf])
    choose, points = draw(0), [i / 2000 for i in range(2000)] + [1.0]
    monkeypatch.setattr(
        torch, "rand", lambda *size, **options: torch.tensor(points[len(drawn)], dtype=torch.double)
    )
    drawn = []
    while len(drawn) < len(points):
        drawn.append(int(choose(logits)))
    shares = torch.tensor(drawn).bincount(minlength=6) / len(drawn)
    assert (shares - logits.softmax(-1)).abs().max() < 1e-3
    assert {*drawn} == {1, 3, 4}


@pytest.mark.parametrize("logits", [[torch.nan, 1.0], [-torch.inf, -torch.inf]])
def test_nothing_is_drawn_from_logits_without_probabilities(logits):
    refuses("no id can be drawn", draw(0), torch.tensor(logits))


@pytest.mark.parametrize("seed", [10**22 + 7, -(10**22), 2**64 - 1, -1, -(2**63)])
def test_any_seed_is_a_seed(seed):
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(0))
    draws = [choices(sampler(1.0, seed=s), logits, [[]] * 3) for s in (seed, seed, seed + 1)]
    assert draws[0] == draws[1] != draws[2]
    weights = [initialise(made("llama"), s).embed.token.weight for s in (seed, seed, seed + 1)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_draws_are_even_in_the_limit_of_a_large_temperature():
    logits = torch.tensor([1.0, 300.0, 2.0, -torch.inf])
    for temperature in (1e20, 1e39, 1e308):
        sample = sampler(temperature)
        assert {int(sample(logits, [])) for _ in range(60)} == {0, 1, 2}


TINY = (1e-3, 1e-30, 1e-39, 1e-40, 1e-45, 5e-324)


@pytest.mark.parametrize("temperature", TINY)
def test_the_limit_of_a_small_temperature_is_the_likeliest(temperature):
    logits = torch.tensor([[1.0, 3.0, 2.0, -torch.inf], [-1e4, -5.0, -1e-3, 0.0], [3e4, 3e4 - 1, 0.0, 3e38]])
    for rest in (
        {},
        {"top_k": 2},
        {"top_p": 0.9},
        {"min_p": 0.1},
        {"top_p": 5e-324},
        {"typical_p": 0.5},
        {"repetition_penalty": 1.2},
    ):
        assert choices(sampler(temperature, **rest), logits, [[], [], []]) == [1, 3, 3]
    equal = torch.tensor([2.0, 5.0, 5.0])
    sample = sampler(temperature)
    assert {int(sample(equal, [])) for _ in range(40)} == {1, 2}, "of equals each is as likely"


@pytest.mark.parametrize("temperature", [0.0, 1e-39, 0.01])
@pytest.mark.parametrize("penalty", TINY[1:])
def test_the_limit_of_a_small_penalty_is_the_likeliest_of_the_seen(penalty, temperature):
    sample = sampler(temperature, repetition_penalty=penalty)
    logits = torch.tensor([[4.0, 9.0, 1.0, 2.0], [-3.0, 5.0, -2.0, -9.0], [-3.0, -5.0, -2.0, -torch.inf]])
    assert choices(sample, logits, [[2, 3], [3, 0], []]) == [3, 1, 2]


@pytest.mark.parametrize("temperature", [0.0, 1e-39, 1.0])
@pytest.mark.parametrize("penalty", [1e20, 1e39, 1e308])
def test_the_limit_of_a_large_penalty_is_what_was_not_seen(penalty, temperature):
    sample = sampler(temperature, repetition_penalty=penalty)
    logits = torch.tensor([[-4.0, -9.0, -torch.inf, -2.0], [-90.0, -80.0, -70.0, -100.0]])
    assert choices(sample, logits, [[3, 0], [0, 1, 2]]) == [1, 3]


BAD = [{"temperature": -1}, {"top_k": -2}, {"top_p": 0}, {"min_p": 2}, {"repetition_penalty": 0}]
BAD += [{name: value} for name in SETTINGS[-1] if name != "top_k" for value in (math.inf, math.nan)]


@pytest.mark.parametrize("bad", BAD)
def test_settings_without_a_meaning_are_refused_by_name(bad):
    refuses(f"sampling: {next(iter(bad))} is .*; expected", sampler, **{"temperature": 1.0, **bad})


@pytest.mark.parametrize("setting", ["top_p", "typical_p", "repetition_penalty"])
def test_0_is_refused_also_after_training_which_flushes_denormal_numbers(setting):
    assert torch.set_flush_denormal(True)
    try:
        refuses(f"sampling: {setting} is 0.0; expected", sampler, **{setting: 0.0})
    finally:
        torch.set_flush_denormal(False)


def test_an_empty_prompt_is_refused():
    model = qwen3.build(qwen3.Config.from_size(VOCAB, 64, 2, CONTEXT))
    refuses("a prompt has no tokens", next, generate(model, [], max_tokens=1, context_length=CONTEXT))
    refuses("a prompt has no tokens", Request, [], 1)


def test_a_context_of_131072_tokens_takes_no_memory_by_itself():
    cpu, grown = torch.device("cpu"), {}
    for length in (2_048, 2_048, 131_072):
        model = random_model(dim=256, context=length)
        before = measure.reset_peak_memory(cpu)
        assert len([*generate(model, [1, 2, 3], max_tokens=4, context_length=length)]) == 4
        grown[length] = measure.peak_memory(cpu) - before
    print({length: f"{size / 1e6:.1f} MB" for length, size in grown.items()})
    assert grown[131_072] < grown[2_048] + (16 << 20)  # the keys and values of as many tokens: 537 MB or more
