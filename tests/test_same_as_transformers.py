"""Equality with another implementation: logits, greedy text, folders and tokenizers, both ways."""

import json
import warnings

import pytest
import torch

from dunes import checkpoint
from dunes.checkpoint.stored import held, moved
from dunes.generate import generate
from dunes.models import FAMILIES
from dunes.models.names import to_ours, to_theirs
from dunes.models.start import initialise
from dunes.text import Tokenizer

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import transformers

LIMIT = 1e-5


def from_theirs(names, weights):
    moves, unknown = to_ours(names, {k: tuple(w.shape) for k, w in weights.items()})
    assert not unknown
    return {k: w.read() for k, w in moved(moves, held(weights)).items()}


def back_to_theirs(names, weights):
    moves, unknown = to_theirs(names, weights)
    assert not unknown
    return {k: w.read() for k, w in moved(moves, held(weights)).items()}


COMMON = {
    "vocab_size": 97,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "intermediate_size": 70,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
SHAPES = {
    "llama": ("llama", {"num_attention_heads": 6, "num_key_value_heads": 2}),
    "llama-one-kv-tied": (
        "llama",
        {"num_attention_heads": 4, "num_key_value_heads": 1, "tie_word_embeddings": True, "rms_norm_eps": 1e-3},
    ),
    "qwen3-heads-that-do-not-divide": (
        "qwen3",
        {"num_attention_heads": 5, "num_key_value_heads": 5, "head_dim": 14},
    ),
    "llama-base": (
        "llama",
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        },
    ),
    "qwen3": ("qwen3", {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 10}),
    "qwen3-tied": (
        "qwen3",
        {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "tie_word_embeddings": True},
    ),
    "arcee": ("arcee", {"num_attention_heads": 6, "num_key_value_heads": 2}),
    "arcee-tied": (
        "arcee",
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "gpt2": ("gpt2", {}),
    "gpt2-wide": ("gpt2", {"n_inner": 50, "layer_norm_epsilon": 1e-3}),
}
CLASSES = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    "arcee": (transformers.ArceeConfig, transformers.ArceeForCausalLM),
    "gpt2": (transformers.GPT2Config, transformers.GPT2LMHeadModel),
}


def theirs(shape):
    """A random tiny model of theirs, no weight of which is zero or one, and our family."""
    family, changes = SHAPES[shape]
    config, model = CLASSES[family]
    if family == "gpt2":
        base = {"vocab_size": 97, "n_positions": 64, "n_embd": 32, "n_layer": 3, "n_head": 4}
        base |= {"bos_token_id": 0, "eos_token_id": 0}
    else:
        base = COMMON
    torch.manual_seed(1)
    hf = model(config(**base, **changes)).eval()
    with torch.no_grad():
        for p in hf.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    return family, hf


def saved_weights(hf):
    state = hf.state_dict()
    return {k: v for k, v in state.items() if not (k == "lm_head.weight" and hf.config.tie_word_embeddings)}


@torch.no_grad()
@pytest.mark.parametrize("shape", SHAPES)
def test_logits_and_greedy_text(shape, record_property):
    family, hf = theirs(shape)
    module = FAMILIES[family]
    ours = module.build(module.from_hf(hf.config.to_dict())).eval()
    ours.load_state_dict(from_theirs(module.NAMES, saved_weights(hf)))
    ids = torch.randint(97, (3, 21), generator=torch.Generator().manual_seed(2))
    difference = float((ours(ids) - hf(ids).logits).abs().max())
    record_property("difference", difference)
    print(f"{shape}: largest difference of logits {difference:.1e}")
    assert difference <= LIMIT
    prompt = ids[:1, :7]
    want = hf.generate(prompt, max_new_tokens=30, do_sample=False, pad_token_id=0, eos_token_id=96)[0, 7:]
    got = [t.id for t in generate(ours, prompt[0].tolist(), limit=30, context=64, stop={96})]
    assert got == [i for i in want.tolist() if i != 96]


@pytest.mark.parametrize("shape", SHAPES)
def test_names_and_config_survive_both_directions(shape):
    family, hf = theirs(shape)
    module, weights = FAMILIES[family], saved_weights(hf)
    back = back_to_theirs(module.NAMES, from_theirs(module.NAMES, weights))
    assert back.keys() == weights.keys()
    assert all(torch.equal(back[k], weights[k]) for k in weights)
    config = module.from_hf(hf.config.to_dict())
    assert module.from_hf(module.to_hf(config)) == config
    assert module.read(module.build(config), config.context) == config


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train("bpe", ["def main(argument):\n    return argument\n" * 20], 280)


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_opens_our_folder(family, tokenizer, tmp_path):
    module = FAMILIES[family]
    model = initialise(module.build(module.Config.sized(tokenizer.vocab, 64, 2, 48)), seed=3).eval()
    for p in model.parameters():
        p.add_(torch.randn_like(p) * 0.05)
    checkpoint.save(model, tmp_path, tokenizer, 48)
    hf, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    ids = torch.randint(tokenizer.vocab, (2, 20), generator=torch.Generator().manual_seed(2))
    assert (hf.eval()(ids).logits - model(ids)).abs().max() <= LIMIT

    text = "def main(x):\n    return  héllo\n"
    opened = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert opened(text, add_special_tokens=False)["input_ids"] == tokenizer.encode(text)
    assert opened.decode(tokenizer.encode(text)) == text
    assert opened.eos_token_id == tokenizer.end
    assert opened.pad_token_id != opened.eos_token_id

    prompt = tokenizer.encode("def ")
    want = hf.generate(torch.tensor([prompt]), max_new_tokens=25, do_sample=False)[0, len(prompt) :].tolist()
    got = [t.id for t in generate(model, prompt, limit=25, context=48, stop={tokenizer.end})]
    assert got == [i for i in want if i != tokenizer.end]


@torch.no_grad()
@pytest.mark.parametrize("shape", SHAPES)
def test_we_open_their_folder_and_write_it_back_bit_for_bit(shape, tmp_path):
    family, hf = theirs(shape)
    there, here = tmp_path / "there", tmp_path / "here"
    hf.save_pretrained(there)
    Tokenizer.train("chars", ["abc"]).save(there)
    loaded = checkpoint.load(there)
    ids = torch.randint(97, (2, 9), generator=torch.Generator().manual_seed(2))
    assert (loaded.model(ids) - hf(ids).logits).abs().max() <= LIMIT
    checkpoint.save(loaded.model, here, loaded.tokenizer, loaded.context)
    again = transformers.AutoModelForCausalLM.from_pretrained(here).state_dict()
    assert all(torch.equal(again[k], v) for k, v in hf.state_dict().items())
    assert json.loads((here / "dunes.json").read_text())["family"] == family


@pytest.mark.parametrize(
    ("family", "key", "value"),
    [
        ("llama", "hidden_act", "gelu"),
        ("llama", "attention_bias", True),
        ("llama", "rope_scaling", {"rope_type": "llama3", "factor": 8.0}),
        ("qwen3", "use_sliding_window", True),
        ("gpt2", "activation_function", "relu"),
        ("gpt2", "scale_attn_by_inverse_layer_idx", True),
    ],
)
def test_what_would_be_silently_wrong_is_refused_by_name(family, key, value):
    config = FAMILIES[family].to_hf(FAMILIES[family].Config.sized(97, 64, 2, 48))
    config.pop("rope_parameters", None)
    with pytest.raises(ValueError, match=r"config\.json: .*supported"):
        FAMILIES[family].from_hf(config | {key: value})


def test_both_dialects_of_config_are_read_alike():
    old = FAMILIES["llama"].to_hf(FAMILIES["llama"].Config.sized(97, 64, 2, 48)) | {"rope_theta": 7e5}
    new = dict(old)
    del old["rope_parameters"]
    del new["rope_theta"]
    new["rope_parameters"] = {"rope_type": "default", "rope_theta": 7e5}
    assert FAMILIES["llama"].from_hf(old) == FAMILIES["llama"].from_hf(new)
    assert FAMILIES["llama"].from_hf(old).rope_base == 7e5
