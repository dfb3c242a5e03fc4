"""What each family can do, and what its config.json may say: all spellings of one config, and what is refused."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from adapters import trained
from conftest import refuses
from dunes import checkpoint
from dunes.augment import attach, quantize
from dunes.checkpoint.formats import gguf
from dunes.checkpoint.weights.lazy_tensor import in_memory
from dunes.generate import generate
from dunes.generate.decode_graph import DecodeGraph, export_decode_graph
from dunes.models import FAMILIES, build_on_meta, family_of
from dunes.models.config_values import yarn_scale
from dunes.models.names import match_indices
from dunes.ops import rotary
from dunes.parts import Attention, Cache, Rotary, cache_for
from dunes.parts.position import Linear, Llama3, Yarn
from dunes.text import Tokenizer
from dunes.train import Trainer, muon
from dunes.train.loss import next_token_loss
from small_models import random_model, small_config

PAGE = Path(__file__).parents[1] / "docs" / "model-formats.md"
(_, *COLUMNS), _, *ROWS = [
    [cell.strip(" `") for cell in line.split("|")[1:-1]]
    for line in PAGE.read_text().partition("<!-- families -->")[2].partition("<!--")[0].split("\n")[1:-1]
]
SIZES = {"vocab": 265, "dim": 64, "depth": 2, "context": 64}
IDS = torch.arange(48).view(2, 24) * 5 + 3


def train(family, model, folder):
    losses = [step.loss for step in Trainer(model, muon(model), next_token_loss).run([IDS] * 8)]
    assert losses[-1] < losses[0]


def load_and_save(family, model, folder):
    checkpoint.save(model, folder / "model", Tokenizer.train("bytes", []), 64)
    loaded = checkpoint.load(folder / "model")
    assert loaded.architecture.family in (family, "mistral")  # a Phi-3 is saved as a Mistral
    assert torch.equal(loaded.model(IDS), model(IDS))


def generate_text(family, model, folder):
    tokens = [t.id for t in generate(model, IDS[0].tolist(), max_tokens=6, context_length=64)]
    logits = model(torch.tensor([[*IDS[0].tolist(), *tokens]]))
    assert logits[0, 23:-1].argmax(-1).tolist() == tokens


@torch.no_grad()
def compile_step(family, model, folder):
    cache, own = cache_for(model, 1, 64), Cache(1, 64)
    for filled in (cache, own):
        model(IDS[:1, :5], cache=filled)
    run = export_decode_graph(DecodeGraph(model).eval(), cache, tokens=1).module()
    slot, positions = cache.start_row(1, 1)
    got, _ = run(IDS[0, 5:6], torch.arange(slot, slot + 1), positions, cache.keys, cache.values)
    want = model(IDS[:1, 5:6], cache=own)[0]
    assert (got - want).abs().max() <= 1e-5 * want.abs().max()


def adapt(family, model, folder):
    exact = model(IDS)
    attach(model, rank=2, where="blocks.*.attn.*")
    checkpoint.save_adapter(trained(model), folder / "adapter")
    base = random_model(family, **SIZES)
    checkpoint.load_adapter(base, folder / "adapter", any_base=True)
    assert (base(IDS) - model(IDS)).abs().max() <= 1e-5 * exact.abs().max() < (model(IDS) - exact).abs().max()


def quantize_int8(family, model, folder):
    exact = model(IDS)
    quantize(model, kind="int8")
    differences = (model(IDS) - exact).norm(dim=-1) / exact.norm(dim=-1)
    assert 0 < differences.median() <= 0.1  # of a mixture, some tokens change their experts


def write_gguf(family, model, folder):
    untied = {"tied": False} if family == "olmo2" else {}  # whose GGUF has a head of its own
    architecture = checkpoint.Architecture(family, small_config(family, **SIZES, **untied))
    weights = in_memory(random_model(family, **SIZES, **untied).state_dict())
    gguf.write(folder / "a.gguf", architecture, weights, Tokenizer.train("bytes", []), "float32")


USES = dict(
    zip(
        COLUMNS, (train, load_and_save, generate_text, compile_step, adapt, quantize_int8, write_gguf), strict=True
    )
)


def test_the_table_in_the_documentation_has_all_families():
    assert [family for family, *_ in ROWS] == [*FAMILIES]
    assert [*USES] == ["train", "load, save", "generate", "compile", "LoRA", "quantize", "GGUF"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:PEFT refuses")
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize(("family", "cells"), [(family, cells) for family, *cells in ROWS])
def test_a_family_can_do_what_the_table_in_the_documentation_says(family, cells, use, tmp_path):
    works = cells[COLUMNS.index(use)] == "yes"
    with nullcontext() if works else pytest.raises(ValueError, match=r"\S"):
        USES[use](family, random_model(family, **SIZES), tmp_path)


LLAMA = ["arcee", "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "qwen3_next", "deepseek_v3"]
LLAMA += ["stablelm"]


def ignored(family, key):
    return any(match_indices(template, key) is not None for template in FAMILIES[family].IGNORED_NAMES)


def words(family):
    module = FAMILIES[family]
    return module.to_hf(module.Config.from_size(97, 64, 2, 48))


def without(hf, *keys):
    return {k: v for k, v in hf.items() if k not in keys}


def dialects(base, old, new):
    """A scaling as transformers wrote it before version 5, and since."""
    return {"rope_theta": base, "rope_scaling": old}, new | {"rope_theta": base}


TRAINED = {"original_max_position_embeddings": 12}
OLD_LLAMA3 = {"type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn"}
OLD_AND_NEW = {
    "base": ({"rope_theta": 7e5}, {"rope_type": "default", "rope_theta": 7e5}),
    "base-null": dialects(7e5, None, {"rope_type": "default"}),
    "linear": dialects(1e4, {"type": "linear", "factor": 2}, {"rope_type": "linear", "factor": 2.0}),
    "yarn": dialects(1e6, TRAINED | {"type": "yarn", "factor": 4.0}, TRAINED | YARN | {"factor": 4.0}),
    "yarn-without-factor": dialects(1e6, TRAINED | YARN | {"factor": None}, TRAINED | YARN | {"factor": 4}),
    "llama3": (TRAINED | {"rope_theta": 5e5, "rope_scaling": OLD_LLAMA3}, TRAINED | LLAMA3 | {"rope_theta": 5e5}),
}
SCALED = {"linear": Linear, "yarn": Yarn, "llama3": Llama3}


@pytest.mark.parametrize("family", LLAMA)
@pytest.mark.parametrize("spelling", OLD_AND_NEW)
def test_both_dialects_of_rotary_positions_are_read_alike(family, spelling):
    old, new = OLD_AND_NEW[spelling]
    rest = without(words(family), "rope_theta", "rope_scaling", "rope_parameters")
    read = FAMILIES[family].from_hf
    config = read(rest | {"rope_parameters": new})
    assert read(rest | old) == config
    assert config.rope_base == old["rope_theta"]
    kind = SCALED.get(spelling.split("-")[0])
    assert kind is None or type(config.scaling) is kind
    assert read(FAMILIES[family].to_hf(config)) == config


SAME = {
    ("gpt2", "n_ctx for n_positions"): lambda hf: without(hf, "n_positions") | {"n_ctx": hf["n_positions"]},
    ("gpt2", "n_inner null"): lambda hf: hf | {"n_inner": None},
    ("gpt2", "the other name of gelu"): lambda hf: hf | {"activation_function": "gelu_pytorch_tanh"},
    ("gpt2", "second names"): lambda hf: (
        without(hf, "n_embd", "n_layer", "n_head")
        | {"hidden_size": hf["n_embd"], "num_hidden_layers": hf["n_layer"], "num_attention_heads": hf["n_head"]}
    ),
    ("llama", "head_dim null"): lambda hf: hf | {"head_dim": None},
    ("llama", "no kv heads"): lambda hf: without(hf, "num_key_value_heads"),
    ("llama", "the tensor parallelism it was trained with"): lambda hf: hf | {"pretraining_tp": 8},
    ("llama", "dtype either way"): lambda hf: hf | {"torch_dtype": "bfloat16", "dtype": "bfloat16"},
    ("llama", "no biases, not said"): lambda hf: without(hf, "attention_bias", "mlp_bias"),
    ("llama", "code that would be run elsewhere"): lambda hf: hf | {"auto_map": {"AutoModel": "x.py"}},
    ("mistral", "no head_dim"): lambda hf: without(hf, "head_dim"),
    ("mixtral", "window null"): lambda hf: hf | {"sliding_window": None},
    ("mixtral", "window absent"): lambda hf: without(hf, "sliding_window"),
    ("qwen2", "a window that no layer has"): lambda hf: (
        hf | {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}
    ),
    ("qwen2", "layer types"): lambda hf: hf | {"layer_types": ["full_attention"] * 2},
    ("qwen2", "a window that is not used"): lambda hf: hf | {"sliding_window": 131072, "max_window_layers": 0},
    ("gpt_neox", "rotary positions as transformers 4 says them"): lambda hf: without(
        hf, "rope_parameters", "partial_rotary_factor", "rope_theta"
    ),
    ("gpt_neox", "rotary positions as transformers 5 says them"): lambda hf: without(
        hf, "rotary_pct", "rotary_emb_base", "partial_rotary_factor", "rope_theta"
    ),
    ("gpt_neox", "what goes without saying"): lambda hf: without(hf, "attention_bias", "use_parallel_residual"),
    ("gpt_neox", "key heads, which it does not have"): lambda hf: hf | {"num_key_value_heads": 1},
    ("stablelm", "rotary positions as transformers 4 says them"): lambda hf: without(hf, "rope_parameters"),
    ("stablelm", "a quarter is rotated, not said"): lambda hf: without(
        hf, "rope_parameters", "partial_rotary_factor"
    ),
    ("mamba2", "time steps without limit, as transformers 5 writes them"): lambda hf: (
        hf | {"time_step_limit": [0.0, {"__float__": "Infinity"}]}
    ),
    ("mamba2", "time steps without limit, as before"): lambda hf: hf | {"time_step_limit": [0.0, float("inf")]},
    ("gpt_oss", "layer types and limit not said"): lambda hf: without(hf, "layer_types", "swiglu_limit"),
    ("gpt_oss", "no scaling, as transformers 5 says it"): lambda hf: without(hf, "rope_scaling"),
    ("qwen3_moe", "experts as transformers 5 calls them"): lambda hf: without(hf, "num_experts"),
    ("qwen3_moe", "experts as before"): lambda hf: without(hf, "num_local_experts"),
    ("deepseek_v3", "the routing that is supported, not said"): lambda hf: without(
        hf, "scoring_func", "topk_method"
    ),
    ("deepseek_v3", "what is as in published files"): lambda hf: without(
        hf, "norm_topk_prob", "rope_interleave", "num_nextn_predict_layers"
    ),
    ("qwen3_moe", "mlp_only_layers null"): lambda hf: hf | {"mlp_only_layers": None},
    ("qwen3_next", "layer types by their interval"): lambda hf: (
        without(hf, "layer_types") | {"full_attention_interval": 2}
    ),
    ("qwen3_next", "a quarter is rotated, not said"): lambda hf: without(
        hf, "rope_parameters", "partial_rotary_factor"
    ),
    ("qwen3_next", "what published files leave to code"): lambda hf: without(
        hf, "attention_bias", "mlp_bias", "num_local_experts", "norm_topk_prob"
    ),
}


@pytest.mark.parametrize(("family", "spelling"), SAME)
def test_other_spellings_are_the_same_config(family, spelling):
    hf = words(family)
    assert FAMILIES[family].from_hf(SAME[family, spelling](hf)) == FAMILIES[family].from_hf(hf)


def test_what_goes_without_saying_differs_by_family():
    rope = ("rope_theta", "rope_parameters")
    assert FAMILIES["mixtral"].from_hf(without(words("mixtral"), *rope)).rope_base == 1e6
    assert FAMILIES["llama"].from_hf(without(words("llama"), *rope)).rope_base == 1e4
    assert FAMILIES["qwen3"].from_hf(without(words("qwen3"), "head_dim")).head_dim == 128
    published = FAMILIES["gpt_oss"].from_hf(without(words("gpt_oss"), *rope, "rope_scaling"))
    assert published.rope_base == 150_000.0
    assert FAMILIES["mamba2"].from_hf(without(words("mamba2"), "max_position_embeddings")).context_length == 2048
    assert published.scaling == Yarn(32.0, 4096, yarn_scale(32.0), truncate=False)
    assert words("gpt_oss")["rope_scaling"] == {"rope_type": "default"}  # so that transformers 4 takes no YaRN


@pytest.mark.parametrize("family", ["gpt_neox", "stablelm"])
@pytest.mark.parametrize("head_dim", [8, 64, 80, 98])
def test_every_number_of_rotated_dimensions_is_written_and_read(family, head_dim):
    module, sizes = FAMILIES[family], {"heads": 2, "kv_heads": 2, "dim": 2 * head_dim, "head_dim": head_dim}
    for rotary_dim in range(2, head_dim + 1, 2):
        config = replace(module.Config.from_size(97, 64, 2, 48), **sizes, rotary_dim=rotary_dim)
        hf = module.to_hf(config)
        assert int(hf["rope_parameters"]["partial_rotary_factor"] * head_dim) == rotary_dim  # as they compute it
        assert module.from_hf(hf) == config
        assert module.from_hf(without(hf, "rope_parameters")) == config
        assert module.read(build_on_meta(family, config), 48) == config


ROPE = {"rope_type": "yarn", "factor": 2.0}
EQUAL_FACTORS = {"low_freq_factor": 4, "high_freq_factor": 4}
REFUSED = [
    ("llama", {"hidden_act": "gelu"}, "hidden_act"),
    ("llama", {"rope_scaling": {"rope_type": "longrope", "factor": 8.0}}, "longrope"),
    ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 8.0}}, "'dynamic' is not supported"),
    ("llama", {"rope_scaling": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ("llama", {"rope_scaling": "linear"}, "rope_scaling"),
    ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 0}}, "factor"),
    ("llama", {"rope_scaling": ROPE | {"beta_fast": float("nan")}}, "beta_fast"),
    ("llama", {"rope_scaling": ROPE | {"truncate": 1}}, "truncate"),
    ("llama", {"rope_scaling": ROPE | {"rope_type": "llama3"} | EQUAL_FACTORS}, "high_freq_factor"),
    ("llama", {"num_attention_heads": 3, "num_key_value_heads": 2}, "not divisible"),
    ("llama", {"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": None}, "not divisible"),
    ("llama", {"head_dim": 15}, "head_dim"),
    ("llama", {"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
    ("mistral", {"attention_bias": True}, "attention_bias"),
    ("mistral", {"sliding_window": 0}, "sliding_window"),
    ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise"),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}, "use_sliding_window"),
    ("qwen2", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
    ("qwen3", {"use_sliding_window": True, "sliding_window": 8}, "use_sliding_window"),
    ("qwen3_moe", {"mlp_only_layers": [0]}, "mlp_only_layers"),
    ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func"),
    ("deepseek_v3", {"num_key_value_heads": 1}, "num_key_value_heads"),
    ("deepseek_v3", {"n_group": 3}, "1 of 3 groups of 8 experts, of which a token gets 2"),
    ("deepseek_v3", {"topk_group": 2}, "2 of 1 groups"),
    ("deepseek_v3", {"kv_lora_rank": None}, "kv_lora_rank"),
    ("deepseek_v3", {"first_k_dense_replace": -1}, "first_k_dense_replace"),
    ("qwen3_next", {"decoder_sparse_step": 2}, "decoder_sparse_step"),
    ("qwen3_next", {"attention_bias": True}, "attention_bias"),
    ("qwen3_next", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
    ("qwen3_next", {"layer_types": None, "full_attention_interval": 0}, "full_attention_interval"),
    ("qwen3_next", {"linear_num_value_heads": 3, "linear_num_key_heads": 2}, "not divisible"),
    ("qwen3_next", {"partial_rotary_factor": 0.1, "rope_parameters": None}, "3 of 32 dimensions"),
    ("gpt_oss", {"swiglu_alpha": 1.5}, "swiglu_alpha"),
    ("gpt_oss", {"swiglu_limit": 0}, "swiglu_limit"),
    ("gpt_neox", {"hidden_act": "relu"}, "hidden_act"),
    ("gpt_neox", {"hidden_dropout": 0.1}, "hidden_dropout"),
    ("gpt_neox", {"rotary_pct": "all"}, "rotary_pct"),
    ("stablelm", {"rope_parameters": {"partial_rotary_factor": 0.1}}, "3 of 32 dimensions"),
    ("stablelm", {"rope_parameters": {"partial_rotary_factor": 1.1}}, "partial_rotary_factor"),
    ("stablelm", {"use_parallel_residual": True}, "use_parallel_residual"),
    ("stablelm", {"qk_layernorm": True}, "qk_layernorm"),
    ("mamba2", {"hidden_act": "gelu"}, "hidden_act"),
    ("mamba2", {"rms_norm": False}, "rms_norm"),
    ("mamba2", {"expand": 3}, "num_heads x head_dim is 128; expected expand x hidden_size, 192"),
    ("mamba2", {"n_groups": 3}, "n_groups"),
    ("mamba2", {"time_step_limit": [0.1]}, "time_step_limit"),
    ("mamba2", {"time_step_limit": [0, 10**400]}, "time_step_limit"),
    ("mamba2", {"time_step_limit": [0.1, 0.01]}, "time_step_limit"),
    ("gpt2", {"activation_function": "relu"}, "activation_function"),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
    ("gpt2", {"add_cross_attention": True}, "add_cross_attention"),
    ("gpt2", {"attn_pdrop": 0.3}, "attn_pdrop"),
]


@pytest.mark.parametrize(("family", "change", "named"), REFUSED)
def test_what_would_be_wrong_is_refused_by_name_on_one_line(family, change, named):
    hf = without(words(family), "rope_parameters") if "rope_scaling" in change else words(family)
    message = refuses(r"^config\.json: ", FAMILIES[family].from_hf, hf | change)
    assert named in message
    assert len(message) < 200


@pytest.mark.parametrize("kind", [None, 7, ["llama"], {"a": 1}, "gptj"])
def test_a_model_type_that_is_none(kind):
    refuses(r"config\.json: model_type", family_of, {"model_type": kind})


def test_masks_and_parts_for_training_are_no_weights():
    for mask in ("bias", "masked_bias", "rotary_emb.inv_freq"):
        assert ignored("gpt_neox", f"gpt_neox.layers.11.attention.{mask}")
    assert not ignored("gpt_neox", "gpt_neox.layers.0.attention.query_key_value.bias")
    for more in ("fc", "norm", "layers.0.self_attn.q_norm", "layers.0.mlp.experts.511.up_proj"):
        assert ignored("qwen3_next", f"mtp.{more}.weight")
    assert not ignored("qwen3_next", "model.layers.0.linear_attn.norm.weight")


@pytest.mark.parametrize("kv_heads", [6, 2, 1])
def test_adjacent_pairs_are_halves_of_permuted_weights(kv_heads):
    """Native checkpoints turn neighbours: the same attention as turned halves after W's rows are reordered."""
    torch.manual_seed(0)
    dim, heads, head_dim = 48, 6, 8

    def attention(adjacent):
        turn = Rotary(head_dim, 100.0, adjacent=adjacent)
        attn = Attention(dim, heads, kv_heads, head_dim=head_dim, position=turn, bias=True)
        return attn.double()

    def halves(rows, n):
        return rows.unflatten(0, (n, head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)

    native, ours = attention(True), attention(False)
    state = native.state_dict()
    for part, n in (("q", heads), ("k", kv_heads)):
        for key in (f"{part}.weight", f"{part}.bias"):
            state[key] = halves(state[key], n)
    ours.load_state_dict(state)
    x = torch.randn(2, 11, dim, dtype=torch.float64)
    assert (native(x) - ours(x)).detach().abs().max() < 1e-14


def test_adjacent_fused_is_plain():
    x = torch.randn(2, 3, 5, 8, dtype=torch.float64, requires_grad=True)
    angle = torch.randn(1, 1, 5, 4, dtype=torch.float64)
    cos, sin = angle.cos(), angle.sin()
    torch.testing.assert_close(rotary.plain(x, cos, sin, True), rotary.fused(x, cos, sin, True))
    assert torch.autograd.gradcheck(lambda x: rotary.fused(x, cos, sin, True), x)
