"""Random configs of every family: transformers runs what we write as its own, and refuses what we do not."""

import json
import math
import random
import warnings
from dataclasses import fields, replace

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError

from dunes import checkpoint
from dunes.checkpoint.architecture import Architecture, hf_config_of
from dunes.checkpoint.convert import convert
from dunes.checkpoint.open import open_model
from dunes.checkpoint.write import hf_parts, write_model
from dunes.models import FAMILIES, refusal
from dunes.models.initialise import initialise
from dunes.parts.position import UNSCALED, Linear, Llama3, Yarn
from small_models import add_noise, random_model

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import transformers

YARNS = [Yarn(4.0, 16, 1.1386), Yarn(2.0, 8, 1.3, 4.0, 2.0, truncate=False)]
CHOICES = {
    "vocab": [2, 7, 97, 265],
    "dim": [32, 33, 36, 40, 44, 48, 50],
    "depth": [1, 2, 3, 4],
    "heads": [1, 2, 3, 4, 5, 6, 8],
    "kv_heads": [1, 2, 3, 4, 5, 6, 8],
    "head_dim": [2, 4, 6, 8, 10, 12, 14, 16],
    "hidden": [1, 17, 40, 64],
    "context_length": [8, 33, 64],
    "eps": [1e-6, 1e-5, 1e-3],
    "rope_base": [100.0, 1e4, 5e5],
    "scaling": [UNSCALED, UNSCALED, Linear(3.0), Linear(0.5), Llama3(8.0, 1.0, 4.0, 16), *YARNS],
    "window": [None, 1, 3, 1000],
    "query_scalar": [1, 8, 256],
    "softcap": [None, 2.0, 50.0],
    "logit_softcap": [None, 3.0, 30.0],
    "local_base": [500.0, 1e4],
    "experts": [1, 2, 3, 4, 8],
    "top_k": [1, 2, 3],
    "groups": [1, 1, 2],
    "balance": [0.0, 0.001],
    "factor": [1.0, 2.5],
    "limit": [1.0, 7.0],
    "rotary_dim": [2, 4, 6, 8, 12, 16],
    "kv_rank": [1, 8],
    "q_rank": [None, 1, 6],
    "rope_dim": [2, 4],
    "value_dim": [1, 5, 8],
    "key_dim": [3, 8],
    "dense": [0, 1, 2],
    "shared": [1, 2],
    "shared_hidden": [1, 16],
    "key_heads": [1, 2, 4],
    "value_heads": [1, 2, 4],
    "width": [1, 2, 4],
    "state_dim": [5, 8],
    "limits": [(0.0, math.inf), (0.01, 0.5)],
}
FLAGS = ("tied", "attention_bias", "mlp_bias", "renormalise", "parallel", "tanh_gelu", "adjacent")
FLAGS += ("bias", "convolution_bias")
ORDERS = {"windows": [None, 1, 3, 1000], "rotary": [False, True], "recurrent": [False, True]}
"""Fields with one value for each layer; a window has one size."""


def draw(family, seed):
    """A random config that the family's config.json can express, and a model of it."""
    chance, module = random.Random(f"{family} {seed}"), FAMILIES[family]
    names = [field.name for field in fields(module.Config)]
    while True:
        base = {key: chance.choice(values) for key, values in CHOICES.items()}
        base |= {key: chance.random() < 0.4 for key in FLAGS}
        base["dense"] = min(base["dense"], base["depth"] - 1)
        for key, values in ORDERS.items():
            pair = [values[0], chance.choice(values)]
            base[key] = tuple(chance.choice(pair) for _ in range(base["depth"]))
        sizes = (base["vocab"], base["dim"], base["depth"], base["context_length"])
        if chance.random() < 0.5:  # rare by chance
            base |= {"kv_heads": base["heads"], "head_dim": max(2, base["dim"] // base["heads"])}
        config = replace(module.Config.from_size(*sizes), **{k: base[k] for k in names if k in base})
        try:
            # A model without any positions, whose base nobody knows, is read as no family's.
            if module.from_hf(module.to_hf(config)) == config and any(getattr(config, "rotary", (True,))):
                return config, add_noise(initialise(module.build(config), seed).eval(), 0.1, seed)
        except (ValueError, ZeroDivisionError):
            pass


def ids_for(config):
    return torch.arange(2 * min(12, config.context_length)).view(2, -1) % config.vocab


@torch.no_grad()
def assert_equal_in_transformers(folder, model, ids):
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    expected, logits = model(ids), theirs(ids).logits
    assert float((logits - expected).abs().max()) <= 2e-4 * max(1.0, float(expected.abs().max()))
    if getattr(theirs.config, "time_step_limit", (0.0, math.inf)) != (0.0, math.inf):
        return  # which transformers ignores when it decodes Mamba-2 with a cache
    options = {"max_new_tokens": 2, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    start, wanted = ids[:, :-2], {"output_logits": True, "return_dict_in_generate": True}
    found = theirs.generate(start, attention_mask=torch.ones_like(start), **options, **wanted)
    expected, logits = model(found.sequences[:, :-1])[:, -1], found.logits[1]  # of a step that reads the cache
    assert float((logits - expected).abs().max()) <= 5e-4 * max(1.0, float(expected.abs().max()))


def check(family, seed, folder):
    config, model = draw(family, seed)
    described, reason = hf_config_of(model, config.context_length), refusal(family, config)
    if isinstance(described, Architecture):
        assert not refusal(described.family, described.config)
        checkpoint.save(model, folder, None, config.context_length)
        assert_equal_in_transformers(folder, model, ids_for(config))
    if not reason:
        assert isinstance(described, Architecture), described
        return
    known, settings, weights = hf_parts(model, Architecture(family, config))
    write_model(folder / "refused", weights, settings, known)
    with pytest.raises((ValueError, RuntimeError, StrictDataclassError, AssertionError)):
        assert_equal_in_transformers(folder / "refused", model, ids_for(config))


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_runs_what_we_write_and_nothing_else(family, tmp_path):
    check(family, 0, tmp_path)


@pytest.mark.parametrize(
    ("family", "field"), [("mistral", "window"), ("gemma2", "windows"), ("gpt_oss", "windows")]
)
def test_a_window_of_one_token_which_transformers_caches_ignore_is_in_no_hf_folder(family, field):
    for width in (1, 2):
        window = width if field == "window" else (width, None)
        described = hf_config_of(random_model(family, **{field: window}), 32)
        assert isinstance(described, Architecture) == (width == 2)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_runs_what_we_write_of_many_configs(family, tmp_path):
    for seed in range(1, 16):
        check(family, seed, tmp_path / str(seed))


SIZES = {"dim": 32, "depth": 2, "heads": 4, "kv_heads": 4, "head_dim": 8}


@pytest.mark.parametrize(("family", "written"), [("llama", "mistral"), ("arcee", None)])
def test_a_file_that_transformers_would_refuse_is_converted_to_another_family_or_refused(
    family, written, tmp_path
):
    module, sizes = FAMILIES[family], {**SIZES, "heads": 3, "kv_heads": 3}
    model = random_model(family, vocab=97, **sizes)
    config = module.read(model, 32)
    known, settings, weights = hf_parts(model, Architecture(family, config))
    write_model(tmp_path / "from", weights, settings, known)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        source = open_model(tmp_path / "from")
        if written is None:
            with pytest.raises(ValueError, match="num_attention_heads, 3"):
                convert(source, tmp_path / "to")
            assert not (tmp_path / "to").exists()
            return
        convert(source, tmp_path / "to", dtype=torch.float32)
    assert json.loads((tmp_path / "to" / "config.json").read_text())["model_type"] == written
    assert_equal_in_transformers(tmp_path / "to", model, torch.arange(24).view(2, -1))
