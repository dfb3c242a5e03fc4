"""What a cache holds of a text is not evaluated again, and changes nothing."""

from contextlib import contextmanager
from functools import partial

import pytest
import torch
from torch import Tensor

from adapters import trained
from conftest import raising
from dunes.augment import adapter_active, attach, row_adapters
from dunes.checkpoint import LoadedModel
from dunes.generate import PrefixCache, Request, generate, generate_all, sampler
from dunes.inference.chat import Chat, load_chat_engine
from dunes.inference.text_generator import TextGenerator, cut_at_stop
from dunes.parts import Cache, CacheFormat, RollingCache
from dunes.text import Tokenizer
from own_parts import of_own_parts
from small_models import random_model
from test_chat_verb import three  # noqa: F401  (fixture)
from test_generate import CONTEXT, VOCAB, ids_of, made, windowed

TOKENS = Tokenizer.train("bytes", [])
TEXT = [(5 * i * i + i) % VOCAB for i in range(40)]


@contextmanager
def evaluated(model):
    """How many tokens each forward evaluates, padding not counted."""
    counts = []
    count = lambda module, ids, options: counts.append(int((options["positions"] >= 0).sum()))
    handle = model.register_forward_pre_hook(count, with_kwargs=True)
    yield counts
    handle.remove()


@torch.no_grad()
@pytest.mark.parametrize("cached", [[], TEXT[:9], TEXT[:20], TEXT[:30], [*TEXT[:7], 1, 2, 3], [9] * 4])
def test_a_text_from_a_cache_is_that_of_a_fresh_one(cached):
    model = made("llama").eval()
    cache, fresh = PrefixCache(model), PrefixCache(model)
    for each in (cache, fresh):
        each.reserve(20)
    if cached:
        cache.reserve(30)
        cache.logits({0: cached})
    with evaluated(model) as counts:
        logits = cache.logits({0: TEXT[:20]})[0]
    differing = (i for i, (a, b) in enumerate(zip(cached, TEXT[:19], strict=False)) if a != b)
    assert counts == [20 - next(differing, min(19, len(cached)))]
    assert (logits - fresh.logits({0: TEXT[:20]})[0]).abs().max() <= 1e-5
    assert (logits - model(torch.tensor([TEXT[:20]]))[:, -1]).abs().max() <= 1e-5


MODELS = {
    "full": lambda: made("llama"),
    "positions": lambda: made("gpt2"),
    "rolling": lambda: windowed(5),
    "ids": lambda: of_own_parts("shift").float(),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*may mix tokens")
@pytest.mark.parametrize("kind", MODELS)
def test_texts_go_on_from_one_another_as_from_nothing(kind):
    model = MODELS[kind]()
    text = [id % 50 for id in TEXT]
    write = partial(generate, model, context_length=CONTEXT)
    cache, shown = PrefixCache(model), []
    prompts = (text[:3], text[:12], text[:12], [*text[:10], 1, 2], text, text[:39], text[5:9], [*text[:4], 8])
    for prompt in prompts:
        got = [token.id for token in write(prompt, max_tokens=25, cache=cache)]
        assert got == [token.id for token in write(prompt, max_tokens=25)]
        shown.append(got)
        next(write(prompt, max_tokens=25, cache=cache))  # given up after a token
        longer = prompt + got[:6]
        assert next(write(longer, max_tokens=1, cache=cache)).id == next(write(longer, max_tokens=1)).id
    assert len(set(map(tuple, shown))) > 4
    assert type(cache.cache) is {"rolling": RollingCache, "ids": type(None)}.get(kind, Cache)


def test_a_forward_that_is_interrupted_leaves_nothing_behind():
    model = windowed(5)
    write = partial(generate, model, max_tokens=2, context_length=60)
    cache, want = PrefixCache(model), list(write(TEXT[:32]))
    list(write(TEXT[:38], cache=cache))
    handle = model.blocks[1].register_forward_pre_hook(raising(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        list(write(TEXT[:30] + TEXT[:20], cache=cache))  # the first block has overwritten what it still needs
    handle.remove()
    got = list(write(TEXT[:32], cache=cache))
    assert [token.id for token in got] == [token.id for token in want]
    assert got[0].logprob == pytest.approx(want[0].logprob, abs=1e-5)


@pytest.mark.parametrize("format", [None, CacheFormat(8, 4, 4)], ids=["floats", "codes"])
@pytest.mark.parametrize("kind", ["full", "rolling"])
def test_a_row_joins_others_without_a_copy_also_after_an_interruption(kind, format, monkeypatch):
    model = MODELS[kind]()
    texts = {i: [(7 * i + n) % 50 for n in TEXT[: 32 + i]] for i in range(3)}
    alone = {i: PrefixCache(model, format=format) for i in texts}
    cache = PrefixCache(model, 3, format=format)
    for one in (cache, *alone.values()):
        one.reserve(60)
    want = {i: alone[i].logits({0: [*text, 1]})[0] for i, text in texts.items()}
    cache.logits({1: texts[1]})
    kept = [t.data_ptr() for t in cache.cache.keys]
    monkeypatch.setattr(Tensor, "__getitem__", uncopied(Tensor.__getitem__))
    handle = model.blocks[1].register_forward_pre_hook(raising(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        cache.logits({0: texts[2]})
    handle.remove()
    for i in (0, 2):
        cache.logits({i: texts[i]})
    got = cache.logits({i: [*text, 1] for i, text in texts.items()})
    assert [t.data_ptr() for t in cache.cache.keys] == kept
    for i in texts:
        assert (got[i] - want[i]).abs().max() <= 1e-5


def test_rows_may_be_named_in_any_order():
    model, cache = MODELS["full"](), PrefixCache(MODELS["full"](), 2)
    texts = {1: [n % 50 for n in TEXT[5:35]], 0: [n % 50 for n in TEXT[:20]]}
    cache.reserve(60)
    cache.logits({0: [1], 1: [2]})
    for _ in range(2):
        for i, logits in cache.logits(texts).items():
            assert (logits - model(torch.tensor([texts[i]]))[:, -1]).abs().max() <= 1e-5
        texts = {i: [*ids, 3] for i, ids in texts.items()}


def uncopied(get):
    """Indexing that refuses to copy keys and values."""

    def checked(tensor, index):
        assert not (tensor.dim() == 4 and isinstance(index, Tensor)), "rows of the cache were copied"
        return get(tensor, index)

    return checked


def adapted():
    """A model with two adapters, one of them a DoRA."""
    model = made("llama")
    for name, dora in (("one", False), ("two", True)):
        attach(model, rank=4, adapter=name, dora=dora)
        trained(model, name, noise=0.3)
    return model


@torch.no_grad()
def test_each_row_of_a_forward_has_its_adapter():
    model, ids = adapted(), torch.tensor([TEXT[:9], TEXT[9:18], TEXT[18:27], TEXT[27:36]])
    names = ["two", "one", None, "two"]
    with row_adapters(model, names):
        got = model(ids)
    for row, (name, logits) in enumerate(zip(names, got, strict=True)):
        with adapter_active(model, name):
            assert (logits - model(ids[row : row + 1])[0]).abs().max() <= 1e-5
    with adapter_active(model, "two"):
        assert (got[1] - model(ids)[1]).abs().max() > 0.1, "the adapters differ"
        want = model(ids)
    with row_adapters(model, ["two"] * 4):
        assert torch.equal(model(ids), want), "one adapter takes the usual path"
    with pytest.raises(ValueError, match="no adapter 'other'"), row_adapters(model, ["one", "other"]):
        pass


@pytest.mark.filterwarnings("ignore:.*may mix tokens")
def test_a_model_that_does_not_keep_rows_is_refused():
    for model in (made("mixtral"), of_own_parts("shift")):
        attach(model, rank=2)
        with pytest.raises(ValueError, match="use one at a time"), row_adapters(model, ["default", None]):
            pass


def requests():
    samplers = [sampler(1.0, seed=3), sampler(0.0), sampler(1.3, top_k=9, seed=4)]
    samplers.append(sampler(0.9, top_p=0.8, repetition_penalty=1.2))
    prompts, limits = (TEXT[:9], TEXT[:30], [7], TEXT[3:20]), (12, 20, 9, 30)
    adapters = ("one", None, "two", "one")
    return [
        Request(prompt, limit, sample, adapter=adapter)
        for prompt, limit, sample, adapter in zip(prompts, limits, samplers, adapters, strict=True)
    ]


def test_requests_that_come_and_go_are_each_as_alone():
    model = adapted()
    want = []
    for request in requests():
        with adapter_active(model, request.adapter):
            want += ids_of(model, [request])
    first, second, third, late = requests()
    rows, got = [first, second, third], [[], [], [], [], []]
    cache = PrefixCache(model, 3, partial(row_adapters, model))
    owners = [0, 1, 2]
    for step, tokens in enumerate(generate_all(model, rows, context_length=CONTEXT, cache=cache)):
        for owner, token in zip(owners, tokens, strict=True):
            got[owner] += [] if token is None else [token.id]
        if step == 4:
            rows[1] = None  # leaves
        if step == 6:
            rows[1], owners[1] = late, 3  # joins
        if step == 10:
            rows[2], owners[2] = Request(TEXT[:9], 12, sampler(1.0, seed=3), adapter="one"), 4
    assert got[1] == want[1][:5]
    assert [got[0], got[2], got[3]] == [want[0], want[2], want[3]]
    assert got[4] == want[0], "in the place of another that has ended"
    assert len(set(map(tuple, got))) == 4
    with adapter_active(model, "two"):
        other = ids_of(model, requests()[:1])[0]
    assert other != want[0], "the adapters differ"


def test_a_row_forgets_what_another_adapter_has_read():
    model = adapted()
    cache = PrefixCache(model, 1, partial(row_adapters, model))
    for adapter in ("one", None, "two", "two"):
        with adapter_active(model, adapter):
            want = ids_of(model, [Request(TEXT[:9], 8)])
        rows = generate_all(model, [Request(TEXT[:9], 8, adapter=adapter)], context_length=CONTEXT, cache=cache)
        assert [[token.id for (token,) in rows]] == want


def test_a_second_turn_evaluates_only_its_new_tokens(three):  # noqa: F811
    engine = load_chat_engine(str(three / "base"))
    chat = Chat(engine, sampler(0.0), 12)
    with evaluated(engine.models["none"].loaded.model) as counts:
        first = "".join(chat.say("ab"))
        turn = len(counts)
        second = "".join(chat.say("cd"))
    assert len(first) == 12
    new = counts[turn]  # the answer's last token, the ends of the turns, and the question
    assert new == 1 + len("\n") + 1 + 1 + len("user\ncd") + 1 + len("\n") + 1 + len("assistant\n")
    assert counts[turn + 1 :] == [1] * 11
    fresh = Chat(load_chat_engine(str(three / "base")), sampler(0.0), 12, talk=chat.talk[:2])
    assert "".join(fresh.say("cd")) == second


byte_model = partial(random_model, noise=0.2, vocab=TOKENS.vocab, context=CONTEXT, seed=1)


def test_it_is_cancelled_between_tokens_and_goes_on_from_there():
    model = byte_model()
    generator = TextGenerator(LoadedModel(model, TOKENS, CONTEXT))
    want = TextGenerator(LoadedModel(model, TOKENS, CONTEXT)).text("ab", 12)
    with evaluated(model) as counts:
        stream = generator.stream("ab", 12)
        ids = [next(stream).token.id for _ in range(4)]
        stream.close()
        assert counts == [2, 1, 1, 1]
        assert generator.text("ab", 12) == want
        assert counts[4:6] == [1, 1]
    assert len(ids) == 4


def test_two_streams_at_a_time_do_not_disturb_each_other():
    generator = TextGenerator(LoadedModel(byte_model(), TOKENS, CONTEXT))
    want = [generator.text(prompt, 12) for prompt in ("ab", "xyz")]
    pairs = list(zip(*[generator.stream(prompt, 12) for prompt in ("ab", "xyz")], strict=True))
    assert ["".join(pair[i].text for pair in pairs) for i in range(2)] == want


@torch.no_grad()
def test_log_probabilities_of_a_prompt_and_the_best_alternatives():
    model = byte_model()
    generator = TextGenerator(LoadedModel(model, TOKENS, CONTEXT))
    ids = TOKENS.prompt("some text")
    logprobs = model(torch.tensor([ids]))[0].log_softmax(-1)
    tokens = generator.prompt_tokens("some text", alternatives=3)
    assert [token.id for token in tokens] == ids[1:]
    for row, token in zip(logprobs, tokens, strict=False):
        assert token.logprob == pytest.approx(float(row[token.id]), abs=1e-5)
        best = row.topk(3)
        assert [id for id, _ in token.alternatives] == best.indices.tolist()
        assert [value for _, value in token.alternatives] == pytest.approx(best.values.tolist(), abs=1e-5)
    (piece,) = generator.stream(ids, 1, alternatives=2)
    best = logprobs[-1].topk(2)
    assert [id for id, _ in piece.token.alternatives] == best.indices.tolist()
    assert piece.token.id == best.indices[0]
    long = generator.prompt_tokens([5] * (CONTEXT + 9))
    assert len(long) == CONTEXT - 1, "of those that the model can attend to"


def test_a_text_ends_with_the_token_that_completes_a_stop_string(monkeypatch):
    """Also one that is spelled by several tokens, each row by itself."""
    model, read = byte_model(), []
    generator = TextGenerator(LoadedModel(model, TOKENS, CONTEXT))
    prompts = [TOKENS.encode(text) for text in ("ab", "xyz")]
    whole = [generator.text(ids, 12) for ids in prompts]
    stop = whole[0][4:7]
    end = whole[0].index(stop)
    requests = [generator.request(ids, 12) for ids in prompts]
    for row in generator.tokens(requests, [stop]):
        read.append(row)
    got = [TOKENS.decode(r.ids[len(r.prompt) :]) for r in requests]
    assert got[0] == whole[0][: len(got[0])]
    assert end + len(stop) <= len(got[0]) < 12
    assert cut_at_stop(got[0], [stop]) == whole[0][:end]
    assert cut_at_stop(got[1], [stop]) == cut_at_stop(whole[1], [stop])
    assert "".join(p.text for p in generator.stream(prompts[0], 12, until=[""])) == whole[0]
