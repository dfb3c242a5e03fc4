"""Small models none of whose weights is zero, as those of output projections and biases are at the start."""

from dataclasses import replace

import pytest
import torch

from dunes.models import FAMILIES
from dunes.models.initialise import initialise


def random_model(family="llama", noise=0.1, vocab=50, dim=32, depth=2, context=32, seed=0, **fields):
    """A model of these sizes, with these fields of its config, whose every part changes the logits."""
    module = FAMILIES[family]
    config = replace(module.Config.from_size(vocab, dim, depth, context), **fields)
    return add_noise(initialise(module.build(config), seed).eval(), noise, seed + 1)


def add_noise(model, scale, seed=0):
    draw = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.data += scale * torch.randn(p.shape, generator=draw)
    return model


def assert_same_tokens(got, want):
    assert [t.id for t in got] == [t.id for t in want]
    for a, b in zip(got, want, strict=True):
        assert a.logprob == pytest.approx(b.logprob, abs=2e-5)
        assert [i for i, _ in a.alternatives] == [i for i, _ in b.alternatives]
