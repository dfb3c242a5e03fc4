"""The loss of benchmarks/distillation.py and what its teacher stores, beside plain loops."""

import importlib
from pathlib import Path

import numpy as np
import pytest
import torch

from dunes.models import arcee
from dunes.models.initialise import initialise
from dunes.runs.compiled_loss import compiled_loss

V, T, SHARE = 96, 16, 0.3


@pytest.fixture
def distillation(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parent.parent / "benchmarks")
    return importlib.import_module("distillation")


def decoder(seed, dtype=torch.float32):
    model = initialise(arcee.build(arcee.Config.from_size(V, 64, 2, T)), seed)
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():  # some weights start at 0, behind which no gradient comes
        for p in model.parameters():
            p += 0.1 * torch.randn(p.shape, generator=random)
    return model.to(dtype)


def by_hand(model, teacher, tokens, top):
    """(1 - SHARE) CE + SHARE KL(p_T || p_S), with p_T over its `top` ids, token by token in float64."""
    total = torch.zeros((), dtype=torch.float64)
    with torch.no_grad():
        taught = teacher(tokens[:, :-1]).double()
    for logits, teaching, target in zip(model(tokens[:, :-1]).flatten(0, 1), taught.flatten(0, 1),
                                        tokens[:, 1:].flatten(), strict=True):  # fmt: skip
        logp = logits - logits.exp().sum().log()
        ids = teaching.sort(descending=True).indices[:top]
        p = teaching[ids].exp() / teaching[ids].exp().sum()
        total = total - (1 - SHARE) * logp[target] + SHARE * (p * (p.log() - logp[ids])).sum()
    return total


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_loss_and_its_gradient_equal_a_loop_in_float64(distillation, compiled, monkeypatch):
    monkeypatch.setattr(distillation, "CHUNK", {"cpu": 0})  # so two chunks, one of them of 64 tokens
    tokens = torch.randint(V, (20, T + 1), generator=torch.Generator().manual_seed(0))
    model, teacher = decoder(1), decoder(2).requires_grad_(False)
    wanted = decoder(1, torch.float64)
    expected = by_hand(wanted, decoder(2), tokens, distillation.TOP)
    expected.backward()
    guess = distillation.Teacher(teacher, torch.float32)(tokens[:, :-1])
    loss = lambda model, batch: distillation.distilled_loss(model, batch, SHARE)
    batch = tokens[:, :-1], tokens[:, 1:], *guess
    total, count, _ = (compiled_loss(loss) if compiled else loss)(model, batch)
    total.backward()
    assert count == 20 * T
    assert total.item() == pytest.approx(expected.item(), rel=1e-5)
    for (name, p), q in zip(model.named_parameters(), wanted.parameters(), strict=True):
        difference = (p.grad - q.grad).abs().max() / q.grad.abs().max()
        assert difference < 1e-5, name


@pytest.mark.parametrize("before", [0, T // 2])
def test_each_token_is_stored_as_the_teacher_guesses_it_from_what_comes_before_it(distillation, before):
    teacher = distillation.Teacher(decoder(2), torch.float32)
    tokens = np.random.default_rng(0).integers(V, size=3 * T + 5)
    stored = distillation.Stored.of(teacher, tokens, T, before)
    for i in range(1, len(tokens)):
        fewest = i if i <= before else before + 1
        contexts = [tokens[i - n : i] for n in range(fewest, min(i, T) + 1)]
        guesses = [teacher(torch.from_numpy(c)[None], len(c) - 1) for c in contexts]
        assert any(_same(stored.at(np.array([i])), [t[0] for t in guess]) for guess in guesses), i


def _same(guess, other):
    """Whether two guesses have the same ids and, as far as float16 keeps them, log-probabilities."""
    (ids, logprobs), (others, wanted) = ([t[0] for t in each] for each in (guess, other))
    order, other_order = ids.argsort(), others.argsort()
    same = torch.equal(ids[order], others[other_order])
    return same and torch.allclose(logprobs[order], wanted[other_order], atol=3e-3)
