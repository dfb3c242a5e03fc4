"""A small BPE, and models none of whose weights is zero, as those of output projections are at the start."""

from dataclasses import replace

import pytest
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers, trainers

from conftest import equal_states, refuses
from dunes.augment import apply_change, repeat_structure
from dunes.models import FAMILIES
from dunes.models.initialise import initialise

HF_SIZES = {
    "vocab_size": 97, "hidden_size": 48, "num_hidden_layers": 2, "intermediate_size": 72,
    "max_position_embeddings": 64, "num_attention_heads": 6, "num_key_value_heads": 2,
}  # fmt: skip
"""A small llama's in a config of transformers."""
HF_ENDS = {"bos_token_id": 0, "eos_token_id": 0}
HF_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def small_config(family="llama", vocab=50, dim=32, depth=2, context=32, **fields):
    return replace(FAMILIES[family].Config.from_size(vocab, dim, depth, context), **fields)


def random_model(family="llama", noise=0.1, seed=0, **sizes):
    """A model of these sizes and fields of its config, whose every part changes the logits."""
    model = initialise(FAMILIES[family].build(small_config(family, **sizes)), seed)
    return add_noise(model.eval(), noise, seed + 1)


def byte_level_bpe(texts, vocab, *special):
    """A byte-level BPE as others have it, trained on these texts; its first ids are these special tokens."""
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab, initial_alphabet=alphabet, special_tokens=[*special])
    inner.train_from_iterator(texts, trainer)
    return inner


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


def assert_takes_numbers(fresh, change, model, ids):
    """A fresh model computes the same once the change is repeated without values and it has those of the model."""
    repeat_structure(fresh, change)
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(fresh(ids), model(ids))


def assert_refused_unchanged(words, model, change, **request):
    before = {name: value.clone() for name, value in model.state_dict().items()}
    refuses(words, apply_change, model, change, **request)
    assert equal_states(model.state_dict(), before)
