"""Copying and beam search: what followed a context before, its blend with a model, and the most probable line."""

import math
import random
from collections import Counter
from functools import partial

import numpy as np
import pytest
import torch

from dunes.completion.copy_mixture import RememberedLogits
from dunes.completion.search import Beam, beam_search
from dunes.generate import PrefixCache, generate, prefix_cache
from dunes.generate.context_index import ContextIndex, sorted_contexts
from dunes.generate.copying import (
    CANDIDATES,
    LENGTHS,
    NONE,
    Candidates,
    Copies,
    Gate,
    Sources,
    TextSource,
    Vocabulary,
    followers,
    index_ids,
    last_match,
    mixture_loss,
    top_ids,
)
from own_parts import Wrapped
from small_models import random_model

VOCAB = 7


def random_text(chance, alphabet, length):
    return [chance.choice(alphabet) for _ in range(length)]


def texts(count, seed=0, longest=70):
    """Random small texts over alphabets of one to three items and over a large one, some empty."""
    chance = random.Random(seed)
    for n in range(count):
        alphabet = [[0], [0, 1], [5, 0, 65535], range(1 << 16), [1 << 20, 0, (1 << 32) - 2]][n % 5]
        yield chance, alphabet, random_text(chance, alphabet, chance.randrange(longest) if n > 5 else 0)


def brute_matches(text, context, depth):
    """The positions after the last n items of the context, for each n that has any."""
    for n in range(1, min(depth, len(context)) + 1):
        positions = {p for p in range(n, len(text)) if text[p - n : p] == context[-n:]}
        if not positions:
            return
        yield n, positions


# the index of contexts


@pytest.mark.parametrize("depth", [1, 4, 32])
def test_matches_are_those_of_a_search_for_every_length(depth):
    longest = 0
    for chance, alphabet, text in texts(150):
        index = ContextIndex(np.array(text, np.uint32), depth=depth)
        for _ in range(4):
            start = chance.randrange(len(text) + 1)
            context = text[: start + 1] + random_text(chance, alphabet, chance.randrange(3))
            found = [(m.length, {*index.positions(m).tolist()}) for m in index.matches(context, range(1, depth))]
            assert found == [*brute_matches(text, context, depth)]
            assert [match.length for match in index.matches(context)] == [n for n, _ in found][-1:]
            longest = max(longest, len(found))
    assert longest == depth, "also of texts longer than the depth"
    assert ContextIndex(np.full(5000, 70_000), depth=depth).matches([70_000] * 300)[-1].length == depth


@pytest.mark.parametrize("depth", [1, 3, 16, 64])
def test_the_order_is_that_of_reversed_contexts(depth):
    for _, _, text in texts(120, seed=1):
        index = ContextIndex(np.array(text, np.uint32), depth=depth)
        contexts = [[text[i] + 1 if i >= 0 else 0 for i in range(p - 1, p - 1 - depth, -1)] for p in index.order]
        assert contexts == sorted(contexts)
        assert sorted(index.order.tolist()) == [*range(len(text))]
        assert index.order.dtype == np.int32


def test_a_known_order_is_used_and_zeros_before_the_text_match_nothing():
    text = np.array([0, 0, 0, 1], np.uint8)
    index = ContextIndex(text, depth=8)
    assert [m.length for m in index.matches([0] * 8, range(1, 8))] == [1, 2, 3]
    assert ContextIndex(text, index.order, 8).matches([0]) == index.matches([0]) != []
    assert index.matches([]) == index.matches([7]) == []
    empty = ContextIndex(text[:0])
    assert len(empty) == 0
    assert empty.matches([1]) == []
    equal = ContextIndex(np.full(5000, 70_000), depth=100)
    assert len(equal.matches([70_000] * 300, range(1, 300))) == 100
    assert len(sorted_contexts(np.zeros(0, np.uint32), 5)) == 0


def test_without_ranges_no_position_in_them_is_found():
    for chance, alphabet, text in texts(150, seed=2):
        index = ContextIndex(np.array(text, np.uint32), depth=12)
        cuts = sorted(chance.randrange(len(text) + 1) for _ in range(4))
        ranges = [(cuts[0], cuts[1]), (cuts[2], cuts[3])]
        hidden = {p for a, b in ranges for p in range(a, b)}
        part = index.without(ranges)
        assert part.order.tolist() == [p for p in index.order.tolist() if p not in hidden]
        context = random_text(chance, alphabet, 6)
        expected = [(n, rest) for n, p in brute_matches(text, context, 12) if (rest := p - hidden)]
        assert [(m.length, {*part.positions(m).tolist()}) for m in part.matches(context, range(1, 12))] == expected
        assert len(index.order) == len(text), "the index itself is as it was"


# what followed


def brute_followers(text, context):
    """Blended probabilities by their definition, as a dict."""
    matches = [*brute_matches(text, context, 32)]
    if not matches:
        return {}, 0
    longest, last = matches[-1]
    levels = [positions for n, positions in matches if n in LENGTHS and len(positions) > len(last)]
    probs = Counter()
    for positions in [*levels, last]:
        counts = Counter(text[p] for p in positions)
        total = sum(counts.values()) + len(counts)
        probs = Counter({i: (probs[i] * len(counts) + counts[i]) / total for i in {*probs, *counts}})
    return probs, longest


def test_blended_probabilities_of_a_small_text():
    """After "1 2": 3 twice and 4 once; after "2" also 5. (2 + 2 q(3)) / 5 with q(3) = 2 / (4 + 3)."""
    found = followers(index_ids([1, 2, 3, 9, 1, 2, 4, 8, 1, 2, 3, 7, 2, 5, 6], 16), [1, 2])
    probs = {3: (2 + 2 * 2 / 7) / 5, 4: (1 + 2 * 1 / 7) / 5, 5: 2 * 1 / 7 / 5}
    assert dict(zip(found.ids.tolist(), found.probs, strict=True)) == pytest.approx(probs)
    assert dict(zip(found.ids.tolist(), found.shares, strict=True)) == pytest.approx({3: 2 / 3, 4: 1 / 3, 5: 0})
    assert (found.length, found.places) == (2, 3)


def test_blended_probabilities_are_those_of_the_definition_and_leave_some_for_others():
    seen = 0
    for chance, alphabet, text in texts(150, seed=3):
        context = text[: chance.randrange(len(text) + 1)] + random_text(chance, alphabet, chance.randrange(2))
        found = followers(ContextIndex(np.array(text, np.uint32)), context)
        expected, length = brute_followers(text, context)
        if length == 0:
            assert found is NONE
            continue
        assert found.length == length
        best = sorted(expected.values(), reverse=True)[:CANDIDATES]
        assert found.probs.tolist() == pytest.approx(best)
        assert all(expected[i] == pytest.approx(p) for i, p in zip(found.ids.tolist(), found.probs, strict=True))
        assert 0 < found.probs.sum() <= 1 + 1e-9
        assert found.probs.sum() < 1 - 1e-6 or found.length > 4
        seen += 1
    assert seen > 60


def test_the_last_longest_match_of_bytes_is_that_of_a_search():
    """A match has something behind it: else the end of the text above would match itself, and nothing follow."""
    chance = random.Random(4)
    for _ in range(800):
        text = bytes(chance.choices(b"ab\n", k=chance.randrange(12)))
        context = bytes(chance.choices(b"ab\n", k=chance.randrange(8)))
        lengths = [n for n in range(1, len(context) + 1) if text.rfind(context[-n:], 0, len(text) - 1) >= 0]
        n = max(lengths, default=0)
        expected = text.rfind(context[-n:], 0, len(text) - 1) + n if n else 0
        assert last_match(text, context) == (n, expected)
        if n:
            assert expected < len(text)


PIECES = [b"", b"\n", b"a", b"b", b"ab", b" = ", b"1", b"12"]


def encode(data):
    """The longest pieces from the left."""
    ids = []
    while data:
        fitting = (i for i, p in enumerate(PIECES) if p and data.startswith(p))
        ids.append(max(fitting, key=lambda i: len(PIECES[i])))
        data = data[len(PIECES[ids[-1]]) :]
    return ids


def sources_of(near=b"", far=b""):
    near_ids, far_ids = (index_ids(encode(text), len(PIECES)) for text in (near, far))
    indexed = TextSource(far, ContextIndex(np.frombuffer(far, np.uint8)), far_ids)
    return Sources(
        [TextSource(near, None, near_ids)] * bool(near), [indexed] * bool(far), Vocabulary(PIECES, encode)
    )


def test_candidates_are_what_any_source_proposes_with_what_each_knows():
    candidates = Copies(sources_of(b"a = 12\n", b"\na = ab\na = 1\n")).candidates(encode(b"12\na = "))
    assert candidates.ids.tolist() == sorted({encode(b"12")[0], encode(b"ab")[0], encode(b"1")[0]})
    assert candidates.features.shape == (3, Copies.FEATURES)
    assert candidates.features.dtype == torch.float32
    rows = dict(zip(candidates.ids.tolist(), candidates.features, strict=True))
    near, far, near_line, far_line = rows[7], rows[4], rows[7], rows[6]
    assert near[:3].tolist() == pytest.approx([math.log(1 / 2 + 1e-4), 1, 1]), "near: once of one, one for others"
    assert far[0] == pytest.approx(math.log(1e-4)), "no candidate of the source near"
    assert far[6] == pytest.approx(0.5), "half of the places of the longest match far away"
    assert near_line[10] == near_line[11] == 1
    assert far_line[14:16].tolist() == [1, 1], "the last line"
    assert rows[4][14:16].tolist() == [0, 1], "the one before it"


def test_the_models_top_ids_are_candidates_too_with_how_the_file_uses_them():
    found = Copies(sources_of(b"ab = 12\na = 1\n", b"12")).candidates(encode(b"a"), [3, 4, 7])
    assert {3, 4, 7} <= {*found.ids.tolist()}
    own = dict(zip(found.ids.tolist(), found.features[:, 18:21].exp2() - 1, strict=True))
    assert own[4].tolist() == pytest.approx([1, 8, 8]), "ab: once, the first of eight ids"
    assert own[7].tolist() == pytest.approx([1, 6, 8])
    assert own[3].tolist() == pytest.approx([0, 8, 8]), "b alone: never"
    assert own[5].tolist() == pytest.approx([2, 3, 8]), "twice, the last time three ids before the end"
    kinds = dict(zip(found.ids.tolist(), found.features[:, 21:].tolist(), strict=True))
    assert kinds[7] == pytest.approx([0, 0, 1, 1, 1, 0, 0, math.log2(3)]), "12: an identifier's, and a digit"
    assert kinds[5] == pytest.approx([1, 0, 0, 0, 0, 0, 0, 2]), "it begins with a space"


def test_top_ids_of_the_model_can_gain_without_a_source():
    logprobs, gate = torch.randn(len(PIECES)).log_softmax(-1), gate_of()
    copies, ids = Copies(sources_of()), [2]
    assert top_ids(logprobs) == logprobs.argsort(descending=True).tolist()
    mixed = gate.mix(copies, logprobs, ids)
    assert mixed.exp().sum() == pytest.approx(1, abs=1e-6)
    assert not torch.allclose(mixed, logprobs)
    assert torch.equal(mixed, gate.change(copies.candidates(ids, range(len(PIECES))), logprobs))
    assert copies.candidates([2, 3]).ids.tolist() == [], "without a match nothing is a candidate or proposed"
    assert copies.candidates([2, 3]).features.shape == (0, Copies.FEATURES)
    assert copies.propose([2, 3], 9) == ()
    assert Copies(sources_of(b"ab")).candidates([]).ids.tolist() == []


def test_the_next_ids_begin_with_the_typed_bytes():
    """After "a = " and the typed "1", the line behind "a = 1" proposes the one id that has both characters."""
    copies = Copies(sources_of(b"a = 12\n"), b"1", 2)
    ids = encode(b"a = ")
    assert 7 in copies.candidates(ids).ids.tolist()
    assert [*copies.propose(ids, 9)] == encode(b"12\n")
    assert [*copies.propose(ids, 1)] == encode(b"12")
    line = Copies(sources_of(b"\nab\n"), b"a", 1)
    assert line.candidates([1]).ids.tolist() == [encode(b"ab")[0]]
    assert line.candidates([1, 2]).ids.tolist() == [encode(b"b")[0]], "they are there already"
    assert Copies(sources_of(b"ab\n"), b"a", 0).candidates([]).ids.tolist() == [], "no more than them matches"
    above = b"ab\na = 1\nab\n"  # at the start of a line the text above does not match its own end
    candidates = Copies(sources_of(above)).candidates(encode(above))
    rows = dict(zip(candidates.ids.tolist(), candidates.features, strict=True))
    assert rows[encode(b"a")[0]][11] == 1, "the line after the earlier ab"
    assert [*Copies(sources_of(above)).propose(encode(above), 9)] == encode(b"a = 1\n")


# the gate


def random_candidates(ids, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return Candidates(torch.tensor(ids, dtype=torch.long), torch.randn(len(ids), Copies.FEATURES, generator=draw))


def gate_of(scale=2.0):
    torch.manual_seed(3)
    gate = Gate().requires_grad_(False)
    for p in gate.parameters():
        p.mul_(scale)
    return gate


def test_a_changed_distribution_is_one_and_without_candidates_the_models():
    logprobs = torch.randn(VOCAB).log_softmax(-1)
    gate = gate_of()
    for ids in ([0], [1, 4, 6], range(VOCAB)):
        mixed = gate.change(random_candidates([*ids]), logprobs)
        assert mixed.exp().sum() == pytest.approx(1, abs=1e-6)
        assert not torch.equal(mixed, logprobs) or len(ids) == VOCAB
    assert torch.equal(gate.change(random_candidates([]), logprobs), logprobs)
    unknown = gate.change(random_candidates([1, VOCAB, VOCAB + 5]), logprobs)
    known = Candidates(torch.tensor([1]), random_candidates([1, VOCAB, VOCAB + 5]).features[:1])
    assert torch.equal(unknown, gate.change(known, logprobs)), "ids without a logit are left out"
    change = gate.change(random_candidates([1, 4]), logprobs) - logprobs
    others = change[[0, 2, 3, 5, 6]]
    assert others.tolist() == pytest.approx([float(others[0])] * 5, abs=1e-5), "others keep their proportions"
    assert abs(float(change[1] - others[0])) > 1e-3


def test_the_mixtures_loss_is_that_of_the_dense_mixture():
    gate, losses = gate_of(), []
    for seed in range(40):
        logprobs = torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)).log_softmax(-1)
        ids = sorted(random.Random(seed).sample(range(VOCAB), seed % (VOCAB + 1)))
        candidates = random_candidates(ids, seed)
        target = seed % VOCAB
        change, own, known = torch.full((VOCAB,), 9.0), torch.zeros(VOCAB), torch.arange(VOCAB) < len(ids)
        own[: len(ids)] = logprobs[candidates.ids]
        if ids:
            change[: len(ids)] = gate(candidates.features, own[: len(ids)], logprobs.amax())
        place = torch.tensor([ids.index(target) if target in ids else -1])
        rest = logprobs.index_fill(0, candidates.ids, -torch.inf).logsumexp(0)[None]
        loss = mixture_loss(change[None], own[None], place, known[None], logprobs[target][None], rest)
        assert float(loss) == pytest.approx(-float(gate.change(candidates, logprobs)[target]), abs=1e-5)
        losses.append(float(loss))
    assert min(losses) > 0


@pytest.mark.parametrize("all_change", [-18.0, 0.0, 18.0])
def test_no_change_of_all_candidates_makes_the_loss_of_a_sure_model_negative(all_change):
    """The candidates have all of the mass but e^-27: a sum of probabilities would lose the rest in rounding."""
    logprobs = torch.tensor([0.0, -30.0, -30.0, -28.0, -28.0]).double().log_softmax(-1)
    known, rest = torch.tensor([[True, True, True]]), logprobs[3:].logsumexp(0)[None]
    change = torch.full((1, 3), all_change, requires_grad=True)
    mixed = (logprobs + torch.tensor([all_change] * 3 + [0, 0])).log_softmax(-1)
    single = [t.float() for t in (logprobs[None, :3], logprobs, rest)]
    loss = mixture_loss(change, single[0], torch.tensor([0]), known, single[1][:1], single[2])
    assert loss.item() == pytest.approx(-mixed[0].item(), abs=1e-6)
    loss.backward()
    assert change.grad.isfinite().all()
    nothing = mixture_loss(change, single[0], torch.tensor([-1]), ~known, single[1][3:4], torch.zeros(1))
    assert nothing.item() == pytest.approx(-logprobs[3].item(), abs=1e-5), "without candidates, the model's"


# beam search


model_of = partial(random_model, noise=0.3, vocab=VOCAB)


def log_softmax(logits, ids):
    return logits.log_softmax(-1)


def forbid(banned, logits, ids):
    return logits.index_fill(0, torch.tensor(banned), -torch.inf).log_softmax(-1)


def after(known, process):
    """Processed log-probabilities after each of some texts."""
    return lambda texts: [process(row, text) for row, text in zip(known.after(texts), texts, strict=True)]


def search(model, prompt, known=None, process=log_softmax, end=1, width=2, **options):
    """The best continuation that ends with the id `end`; if none does, the best of all."""
    known = known or RememberedLogits(model, width)
    known.begin(len(prompt) + options["max_tokens"])
    beams = beam_search(after(known, process), prompt, width=width, ends=lambda b: b.ids[-1] == end, **options)
    assert [beam.total for beam in beams] == sorted((beam.total for beam in beams), reverse=True)
    return next((beam for beam in beams if beam.ids[-1] == end), beams[0] if beams else Beam())


def exhaustive(model, prompt, max_tokens, process=log_softmax, end=1):
    """The best of all continuations that end with the id `end`; of all, if none does."""
    cache, ended, others = PrefixCache(model), [], []
    cache.reserve(len(prompt) + max_tokens)
    pending = [Beam()]
    while pending:
        beam = pending.pop()
        row = process(cache.logits({0: [*prompt, *beam.ids]})[0][-1], [*prompt, *beam.ids])
        for id, logprob in enumerate(row.tolist()):
            grown = Beam((*beam.ids, id), (*beam.logprobs, logprob))
            if logprob == -math.inf:
                continue
            if id == end:
                ended.append(grown)
            elif len(grown.ids) < max_tokens:
                pending.append(grown)
            else:
                others.append(grown)
    return max(ended or others, key=lambda beam: beam.total)


def without_cache(model):
    model.blocks[0].mlp = Wrapped(model.blocks[0].mlp)
    return model


@pytest.mark.filterwarnings("ignore:Wrapped may mix tokens")
@pytest.mark.parametrize("wrap", [lambda m: m, without_cache], ids=["cache", "no cache"])
@pytest.mark.parametrize("process", [log_softmax, partial(forbid, [1]), partial(forbid, [0, 2, 3, 4, 5])])
def test_a_beam_as_wide_as_all_texts_finds_the_best(wrap, process):
    model, prompt = wrap(model_of()), [3, 2, 5]
    known = RememberedLogits(model, VOCAB**2)
    best = search(model, prompt, known, process=process, width=VOCAB**2, max_tokens=3)
    assert (known.cache.cache is None) == (wrap is without_cache)
    expected = exhaustive(model_of(), prompt, 3, process)
    assert best.ids == expected.ids
    assert best.total == pytest.approx(expected.total, abs=1e-4)
    assert len(best.logprobs) == len(best.ids) <= 3


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_one_beam_is_greedy_decoding(family):
    model, prompt = model_of(family), [3, 2, 5, 5]
    greedy = list(generate(model, prompt, max_tokens=9, context_length=32, stop=()))
    ids = [token.id for token in greedy]
    stop = ids.index(1) + 1 if 1 in ids else len(ids)
    best = search(model, prompt, width=1, max_tokens=9)
    assert [*best.ids] == ids[:stop]
    assert [*best.logprobs] == pytest.approx([token.logprob for token in greedy[:stop]], abs=1e-4)


def test_what_is_remembered_changes_nothing_and_where_nothing_may_follow_there_is_no_beam():
    model, prompts = model_of(), [[3, 2, 5], [3, 2, 5, 4], [3], [6, 6, 6, 6], [6] * 20, [6] * 19]
    known = RememberedLogits(model, 4)
    for prompt in [*prompts, *reversed(prompts)]:
        used = search(model, prompt, known, width=4, max_tokens=6)
        fresh = search(model, prompt, width=4, max_tokens=6)
        assert used.ids == fresh.ids
        assert used.total == pytest.approx(fresh.total, abs=1e-4)
    nothing = lambda logits, ids: torch.full_like(logits, -math.inf)
    assert search(model, [3], process=nothing, width=3, max_tokens=4) == Beam()
    assert search(model, [3], width=3, max_tokens=0) == Beam()


# logits that are remembered


def fresh_logits(model, text):
    with torch.no_grad():
        return model(torch.tensor([text]))[0, -1]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_remembered_logits_are_those_of_the_model(family):
    """Random texts that go on from earlier ones, asked for singly, side by side and with what may follow."""
    model, chance, worst = model_of(family), random.Random(0), 0.0
    known, texts, forwards = RememberedLogits(model, 3), [[3, 2, 5]], []
    model.register_forward_pre_hook(lambda *_: forwards.append(1))
    for _ in range(120):
        known.begin(40)
        for _ in range(chance.randrange(1, 4)):
            start = chance.choice(texts[-6:])
            start = start[: chance.randrange(1, len(start) + 1)][:24]
            grow = lambda most: [chance.randrange(VOCAB) for _ in range(chance.randrange(most))]
            asked = [start + grow(4) for _ in range(chance.randrange(1, 4))]
            found = known.after(asked)
            if chance.random() < 0.3:
                more = grow(6)
                found.append(known.after_one(asked[0], more))
                found += [known.get([*asked[0], *more[: n + 1]]).logits for n in range(len(more))]
                asked += [asked[0], *([*asked[0], *more[: n + 1]] for n in range(len(more)))]
            count = len(forwards)
            pairs = zip(found, asked, strict=True)
            worst = max(worst, *((row - fresh_logits(model, t)).abs().max() for row, t in pairs))
            del forwards[count:]
            known.after(asked[:3])
            assert len(forwards) == count, "they are remembered"
            texts += asked
    assert worst < 2e-4


@torch.no_grad()
def test_a_text_read_in_pieces_is_in_the_cache_but_for_its_last_piece(monkeypatch):
    monkeypatch.setattr(prefix_cache, "FIRST", 5)
    model = model_of(vocab=30, context=64)
    text = [(5 * i * i + i) % 30 for i in range(40)]
    cache, plain = PrefixCache(model), PrefixCache(model)
    cache.reserve(50)
    plain.reserve(50)
    reader, steps = prefix_cache.PieceReader(seconds=0, least=5), 0
    for _ in reader.read(cache, 0, text):
        assert cache.ids[0] == text[: 5 * steps], "each pause stands before a piece"
        steps += 1
    assert steps == 7
    assert cache.ids[0] == text[:35]
    assert (cache.logits({0: text})[0] - plain.logits({0: text})[0]).abs().max() < 1e-5
    assert [*reader.read(cache, 0, text)] == [], "what is known is not read again"
