"""Equality with another implementation: logits, greedy text, folders and tokenizers, both ways."""

import json
import warnings

import pytest
import torch
from safetensors.torch import load_file

from dunes import checkpoint
from dunes.checkpoint.weights.lazy_tensor import in_memory, renamed
from dunes.generate import generate
from dunes.models import FAMILIES, weight_names, written_names
from dunes.models.names import for_heads, to_ours, to_theirs
from dunes.parts import RollingCache, cache_for
from dunes.text import Tokenizer
from small_models import HF_ENDS, HF_LLAMA3, HF_SIZES, add_noise, random_model

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import transformers
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

LIMIT = 1e-5


def from_theirs(family, weights, heads):
    names = for_heads(weight_names(family), heads)
    moves, unknown = to_ours(names, {k: tuple(w.shape) for k, w in weights.items()})
    assert not unknown
    return {k: w.read() for k, w in renamed(moves, in_memory(weights)).items()}


def back_to_theirs(family, weights, config):
    moves, unknown = to_theirs(written_names(family, config), weights)
    assert not unknown
    return {k: w.read() for k, w in renamed(moves, in_memory(weights)).items()}


COMMON = HF_SIZES | HF_ENDS | {"num_hidden_layers": 3, "intermediate_size": 70}
GPT2 = {"vocab_size": 97, "n_positions": 64, "n_embd": 32, "n_layer": 3, "n_head": 4}
ONE_KV_TIED = {
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-3,
}
ODD_HEADS = {"num_attention_heads": 5, "num_key_value_heads": 5, "head_dim": 14}
MOE = {"num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 40}
QWEN_MOE = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "head_dim": 10}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0}
YARN_ALL = YARN | {"rope_theta": 5000.0, "mscale": 0.7, "mscale_all_dim": 0.3, "truncate": False, "beta_slow": 2.0}
ROPES = {
    "base": {"rope_type": "default", "rope_theta": 500000.0},
    "linear": {"rope_type": "linear", "factor": 3.0, "rope_theta": 10000.0},
    "yarn": YARN | {"factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 4.0},
    "yarn-all": YARN_ALL | {"factor": 4.0, "original_max_position_embeddings": 32},
    "yarn-factor": YARN | {"factor": 2.0, "original_max_position_embeddings": 32, "attention_factor": 1.3},
    "llama3": HF_LLAMA3 | {"original_max_position_embeddings": 24, "rope_theta": 10000.0},
}
DEEPSEEK = {
    "n_routed_experts": 9,
    "num_experts_per_tok": 3,
    "n_group": 3,
    "topk_group": 2,
    "moe_intermediate_size": 24,
}
DEEPSEEK |= {
    "q_lora_rank": None,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 8,
    "v_head_dim": 7,
}
DEEPSEEK |= {"first_k_dense_replace": 1, "num_key_value_heads": HF_SIZES["num_attention_heads"]}
GPT_OSS = {**MOE, "sliding_window": 5, "head_dim": 10}
QWEN_NEXT = {**QWEN_MOE, "head_dim": 16, "num_hidden_layers": 5, "shared_expert_intermediate_size": 20}
QWEN_NEXT |= {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_conv_kernel_dim": 3,
    "full_attention_interval": 3,
}
# Heads that forget at once have outputs near 0; with a smaller eps, norms multiply the rounding of both by 1,000.
QWEN_NEXT |= {"linear_key_head_dim": 8, "linear_value_head_dim": 10, "rms_norm_eps": 1e-3}
GEMMA = {"head_dim": 10, "num_attention_heads": 6, "num_key_value_heads": 2, "query_pre_attn_scalar": 7}
GEMMA |= {"sliding_window": 5, "hidden_activation": "gelu_pytorch_tanh"}
CAPS = {"attn_logit_softcapping": 0.7, "final_logit_softcapping": 2.0, "layer_types": ["full_attention"] * 3}
MAMBA2 = {"hidden_size": 48, "head_dim": 16, "num_heads": 6, "state_size": 12, "n_groups": 1}
SHAPES = {
    "llama": ("llama", {}),
    "llama-one-kv-tied": ("llama", ONE_KV_TIED),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    **{f"llama-{name}": ("llama", {"rope_parameters": rope}) for name, rope in ROPES.items()},
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral-window": ("mistral", {"sliding_window": 5, **ODD_HEADS}),
    "phi3": ("phi3", {"pad_token_id": 0, "num_key_value_heads": 3, "num_attention_heads": 6}),
    "phi3-window-tied": ("phi3", {"pad_token_id": 0, "sliding_window": 5, **ONE_KV_TIED, **ODD_HEADS}),
    "mixtral": ("mixtral", MOE),
    "mixtral-window": ("mixtral", {**MOE, "sliding_window": 4, "num_local_experts": 8, **ONE_KV_TIED}),
    "mixtral-aligned": ("mixtral", {**MOE, "num_experts_per_tok": 5, **ODD_HEADS}),
    "mixtral-unaligned": ("mixtral", {**MOE, "intermediate_size": 39, "num_experts_per_tok": 1}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"num_key_value_heads": 3, "head_dim": 10}),
    "qwen3-heads-that-do-not-divide": ("qwen3", ODD_HEADS),
    "qwen3_moe": ("qwen3_moe", QWEN_MOE),
    "qwen3_moe-renormalised": ("qwen3_moe", {**QWEN_MOE, "norm_topk_prob": True, "tie_word_embeddings": True}),
    "deepseek_v3": ("deepseek_v3", DEEPSEEK),
    "deepseek_v3-low-rank-queries-yarn-tied": (
        "deepseek_v3",
        {**DEEPSEEK, "q_lora_rank": 12, "attention_bias": True, "rope_interleave": False, "norm_topk_prob": False}
        | {
            "first_k_dense_replace": 0,
            "n_shared_experts": 2,
            "routed_scaling_factor": 1.5,
            "tie_word_embeddings": True,
        }
        | {"n_group": 1, "topk_group": 1, "v_head_dim": 16, "rope_parameters": ROPES["yarn-all"]},
    ),
    "olmo2": ("olmo2", {"num_key_value_heads": 3}),
    "olmo2-tied-biases": ("olmo2", {**ONE_KV_TIED, "attention_bias": True, "rope_parameters": ROPES["linear"]}),
    "gemma2": ("gemma2", GEMMA),
    "gemma2-biases": ("gemma2", {**GEMMA, **CAPS, "attention_bias": True, "tie_word_embeddings": False}),
    "gemma2-uncapped": ("gemma2", {**GEMMA, "attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "gemma3": ("gemma3_text", {**GEMMA, "sliding_window_pattern": 2}),
    "gemma3-scaled": (
        "gemma3_text",
        {**GEMMA, "final_logit_softcapping": 2.0}
        | {
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {"full_attention": ROPES["linear"], "sliding_attention": ROPES["base"]},
        },
    ),
    "smollm3": ("smollm3", {"pad_token_id": 0, "no_rope_layer_interval": 2}),
    "smollm3-first-untied": (
        "smollm3",
        {"pad_token_id": 0, "no_rope_layers": [0, 0, 1], "tie_word_embeddings": False},
    ),
    "gpt_oss": ("gpt_oss", GPT_OSS),
    "gpt_oss-tied-yarn": (
        "gpt_oss",
        {**GPT_OSS, **ONE_KV_TIED, "layer_types": ["full_attention", "sliding_attention", "full_attention"]}
        | {"swiglu_limit": 0.3, "num_local_experts": 11, "num_experts_per_tok": 5, "attention_bias": False}
        | {"rope_parameters": ROPES["yarn-all"]},
    ),
    "gpt_neox": ("gpt_neox", {}),
    "gpt_neox-one-by-one-unbiased": (
        "gpt_neox",
        {
            "use_parallel_residual": False,
            "attention_bias": False,
            "hidden_act": "gelu_fast",
            "layer_norm_eps": 1e-3,
        }
        | {"num_attention_heads": 4, "rope_parameters": ROPES["yarn"] | {"partial_rotary_factor": 1.0}}
        | {"tie_word_embeddings": True},
    ),
    "stablelm": ("stablelm", {"num_key_value_heads": 3}),
    "stablelm-biases-tied": (
        "stablelm",
        {"use_qkv_bias": True, "tie_word_embeddings": True, "num_attention_heads": 4, "num_key_value_heads": 1}
        | {"rope_parameters": ROPES["linear"] | {"partial_rotary_factor": 0.5}, "layer_norm_eps": 1e-3},
    ),
    "qwen3_next": ("qwen3_next", QWEN_NEXT),
    "qwen3_next-attention-first-tied": (
        "qwen3_next",
        {**QWEN_NEXT, **ONE_KV_TIED, "norm_topk_prob": False, "linear_num_value_heads": 2, "num_hidden_layers": 3}
        | {"layer_types": ["full_attention", "linear_attention", "full_attention"]}
        | {"rope_parameters": ROPES["linear"] | {"partial_rotary_factor": 1.0}},
    ),
    "arcee": ("arcee", {}),
    "mamba2": ("mamba2", MAMBA2),
    "mamba2-groups-biases-tied": (
        "mamba2",
        MAMBA2
        | {"n_groups": 3, "expand": 3, "num_heads": 9, "conv_kernel": 3, "time_step_limit": [0.01, 0.8]}
        | {"use_bias": True, "use_conv_bias": False, "tie_word_embeddings": True, "layer_norm_epsilon": 1e-3},
    ),
    "gpt2": ("gpt2", {}),
    "gpt2-wide": ("gpt2", {"n_inner": 50, "layer_norm_epsilon": 1e-3}),
}


NESTED = {"full_attention": {"rope_type": "default"}, "sliding_attention": {"rope_type": "default"}}
GEMMA3_ROPES = [
    {},
    {"rope_theta": 5e5},
    {"rope_local_base_freq": 50.0},
    {"rope_theta": 5e5, "rope_local_base_freq": 50.0, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    {"rope_parameters": NESTED, "rope_local_base_freq": 50.0, "rope_theta": 5e5},
    {"rope_parameters": NESTED, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    {"rope_parameters": NESTED | {"sliding_attention": None}, "rope_local_base_freq": 50.0},
    {"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 7e5}}},
]


@pytest.mark.parametrize("rope", GEMMA3_ROPES, ids=range(8))
def test_every_form_of_gemma3s_rotary_settings_is_read_as_theirs(rope):
    raw = {**COMMON, **GEMMA, "rms_norm_eps": 1e-6, "sliding_window_pattern": 2, **json.loads(json.dumps(rope))}
    config = transformers.Gemma3TextConfig(**json.loads(json.dumps(raw)))
    ours = FAMILIES["gemma3_text"].from_hf(raw)
    assert ours == FAMILIES["gemma3_text"].from_hf(config.to_dict())
    full, local = (config.rope_parameters[kind] for kind in NESTED)
    assert (ours.rope_base, ours.local_base) == (full["rope_theta"], local["rope_theta"])
    assert getattr(ours.scaling, "factor", None) == full.get("factor")


def theirs(shape):
    """A random tiny model of theirs, no weight of which is zero or one, and our family."""
    family, changes = SHAPES[shape]
    base = {**(GPT2 if family == "gpt2" else COMMON), **HF_ENDS}
    torch.manual_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = transformers.AutoConfig.for_model(family, **base | json.loads(json.dumps(changes)))
        hf = transformers.AutoModelForCausalLM.from_config(config).eval()
    if shape == "mixtral-unaligned":
        hf.set_experts_implementation("eager")  # theirs fails on such sizes otherwise
    for name, buffer in hf.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_(0.0, 0.1)
    return family, add_noise(hf, 0.1)


def saved_weights(hf):
    """As they lie in memory; on disk a mixture's experts have names of their own."""
    state = hf.state_dict()
    return {k: v for k, v in state.items() if not (k == "lm_head.weight" and hf.config.tie_word_embeddings)}


def ours_of(family, hf):
    module = FAMILIES[family]
    config = module.from_hf(hf.config.to_dict())
    model = module.build(config).eval()
    model.load_state_dict(from_theirs(family, saved_weights(hf), config.heads))
    return model


PLAIN = [shape for shape in SHAPES if "-" not in shape]
"""One shape of each family."""


def some(rows, length):
    return torch.randint(97, (rows, length), generator=torch.Generator().manual_seed(2))


@torch.no_grad()
@pytest.mark.parametrize("shape", SHAPES)
def test_logits_and_greedy_text(shape, record_property):
    family, hf = theirs(shape)
    ours, ids = ours_of(family, hf), some(3, 40)
    difference = float((ours(ids) - hf(ids).logits).abs().max())
    record_property("difference", difference)
    print(f"{shape}: largest difference of logits {difference:.1e}")
    assert difference <= LIMIT
    prompt = ids[:1, :17]
    want = hf.generate(prompt, max_new_tokens=12, do_sample=False, pad_token_id=0, eos_token_id=96)[0, 17:]
    got = [t.id for t in generate(ours, prompt[0].tolist(), max_tokens=12, context_length=64, stop={96})]
    assert got == [i for i in want.tolist() if i != 96]


@torch.no_grad()
@pytest.mark.parametrize("shape", SHAPES)
def test_cached_is_full_across_the_edge_of_a_window(shape):
    family, hf = theirs(shape)
    ours, ids = ours_of(family, hf), some(2, 40)
    cache = cache_for(ours, 2, 64)
    assert isinstance(cache, RollingCache) == all(getattr(block.attn, "window", None) for block in ours.blocks)
    got = torch.cat([ours(part, cache=cache) for part in ids.split([3, *[1] * 9, 9, 3, 1, 15], 1)], 1)
    assert (got - ours(ids)).abs().max() <= LIMIT


@pytest.mark.parametrize(("layers", "padded"), [(1, False), (3, True)])
@pytest.mark.parametrize("shape", ["mixtral", "qwen3_moe", "qwen3_moe-renormalised", "qwen3_next"])
def test_gradients_and_balance_loss_of_a_mixture_in_training(shape, layers, padded, monkeypatch):
    """With one layer it is their loss as it is; of several, they pool the layers and we take the mean."""
    family, options = SHAPES[shape]
    shape = {**options, "num_hidden_layers": layers, "router_aux_loss_coef": 0.3}
    monkeypatch.setitem(SHAPES, "training", (family, shape))
    _, hf = theirs("training")
    ours, ids = ours_of(family, hf).train(), some(3, 20)
    moe = ours.blocks[0].mlp
    real = torch.ones_like(ids, dtype=torch.bool)
    if padded:
        real[0, 13:], real[2, 4:] = False, False
    targets = ids.where(real, -100)
    out = hf.train()(ids, attention_mask=real.long(), labels=targets, output_router_logits=True, use_cache=False)
    balances = [
        load_balancing_loss_func((logits,), len(moe.experts), moe.top_k, real.long())
        for logits in out.router_logits
    ]
    balance = sum(balances) / layers
    loss = out.loss + 0.3 * (balance - out.aux_loss)
    if layers == 1:
        assert float(loss.detach()) == float(out.loss.detach())
    loss.backward()
    positions = torch.arange(20).expand_as(ids).where(real, -1)
    shifted = torch.nn.functional.pad(targets[:, 1:], (0, 1), value=-100)
    total, count, metrics = ours(ids, positions, targets=shifted)
    (total / count).backward()
    want = from_theirs(family, {k: p.grad for k, p in hf.named_parameters()}, hf.config.num_attention_heads)
    grads = {name: p.grad for name, p in ours.named_parameters()}
    assert want.keys() == grads.keys()
    differences = {name: float((grads[name] - want[name]).abs().max()) for name in want}
    differences["loss"] = abs(float((total / count - loss).detach()))
    differences["balance"] = abs(float((metrics["balance"][0] / count - 0.3 * balance).detach()))
    print({name: f"{d:.1e}" for name, d in differences.items() if "router" in name or "." not in name})
    assert all(want[f"blocks.{i}.mlp.router.weight"].abs().max() > 1e-3 for i in range(layers))
    assert max(differences.values()) <= LIMIT


@pytest.mark.parametrize("shape", [*PLAIN, "deepseek_v3-low-rank-queries-yarn-tied"])
def test_gradients(shape):
    family, hf = theirs(shape)
    ours, ids = ours_of(family, hf), some(3, 20).clamp(min=2)  # 0 or 1 may pad, without a gradient
    loss = hf(ids, labels=ids).loss
    loss.backward()
    total, count, _ = ours(ids[:, :-1], targets=ids[:, 1:])
    (total / count).backward()
    grads = {name: p.grad for name, p in hf.named_parameters() if p.grad is not None}
    want = from_theirs(family, grads, hf.config.num_attention_heads)
    for name, p in ours.named_parameters():
        assert p.grad.any() or ".experts." in name
        assert (p.grad - want.pop(name)).abs().max() <= LIMIT, name
    assert not want
    assert abs(float((total / count - loss).detach())) <= LIMIT


@torch.no_grad()
@pytest.mark.parametrize("shape", ["llama", "qwen3_next"])
def test_rows_padded_on_the_left_and_packed_documents(shape):
    family, hf = theirs(shape)
    ours, ids = ours_of(family, hf), some(3, 40)
    real = torch.arange(40) >= torch.tensor([0, 7, 39])[:, None]
    positions = (real.long().cumsum(1) - 1).where(real, -1)
    want = hf(ids, attention_mask=real.long(), position_ids=positions.clamp(min=0)).logits
    cache = cache_for(ours, 3, 64)
    for got in (ours(ids, positions), ours(ids, cache.start(real), cache)):
        assert (got - want)[real].abs().max() <= LIMIT
    packed = torch.cat([torch.arange(n) for n in (9, 1, 30)])[None]
    alone = torch.cat([hf(part).logits for part in ids[:1].split([9, 1, 30], 1)], 1)
    assert (ours(ids[:1], packed) - alone).abs().max() <= LIMIT


@torch.no_grad()
@pytest.mark.parametrize("name", ROPES)
def test_angles_are_theirs_to_the_bit_at_far_positions(name):
    family, hf = theirs(f"llama-{name}")
    rotary = FAMILIES[family].build(FAMILIES[family].from_hf(hf.config.to_dict())).blocks[0].attn.position
    positions = torch.tensor([[0, 1, 63, 4095, 100_000]])
    cos, sin = rotary.angles(positions)
    their_cos, their_sin = hf.model.rotary_emb(torch.zeros(1), positions)
    half = their_cos.shape[-1] // 2
    assert torch.equal(cos[:, 0], their_cos[..., :half])
    assert torch.equal(sin[:, 0], their_sin[..., :half])


@pytest.mark.parametrize("shape", SHAPES)
def test_names_and_config_survive_both_directions(shape, tmp_path):
    family, hf = theirs(shape)
    module = FAMILIES[family]
    config = module.from_hf(hf.config.to_dict())
    assert module.from_hf(json.loads(json.dumps(module.to_hf(config)))) == config
    assert module.read(module.build(config), config.context_length) == config
    hf.save_pretrained(tmp_path)
    written = load_file(tmp_path / "model.safetensors")
    assert module.from_hf(json.loads((tmp_path / "config.json").read_text())) == config
    in_memory = from_theirs(family, saved_weights(hf), config.heads)
    back = back_to_theirs(family, in_memory, config)
    assert back.keys() == written.keys()
    assert all(torch.equal(back[k], written[k]) for k in written)
    assert all(torch.equal(in_memory[k], w) for k, w in from_theirs(family, written, config.heads).items())


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train("bpe", ["def main(argument):\n    return argument\n" * 20], 280)


@torch.no_grad()
@pytest.mark.parametrize("family", [f for f in FAMILIES if f != "dunes"])  # which transformers does not know
def test_transformers_opens_our_folder(family, tokenizer, tmp_path):
    model = random_model(family, 0.05, vocab=tokenizer.vocab, dim=64, context=48)
    checkpoint.save(model, tmp_path, tokenizer, 48)
    hf, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    ids = torch.randint(tokenizer.vocab, (2, 40), generator=torch.Generator().manual_seed(2))
    assert (hf.eval()(ids).logits - model(ids)).abs().max() <= LIMIT

    text = "def main(x):\n    return  héllo\n"
    # Asked for a qwen2 folder's tokenizer, AutoTokenizer gives Qwen's own whatever the folder says.
    kind = transformers.PreTrainedTokenizerFast if family == "qwen2" else transformers.AutoTokenizer
    opened = kind.from_pretrained(tmp_path)
    assert opened(text, add_special_tokens=False)["input_ids"] == tokenizer.encode(text)
    assert opened.decode(tokenizer.encode(text)) == text
    assert opened.eos_token_id == tokenizer.eos
    assert opened.pad_token_id != opened.eos_token_id

    prompt = tokenizer.encode("def ")
    want = hf.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)[0, len(prompt) :].tolist()
    got = [t.id for t in generate(model, prompt, max_tokens=12, context_length=48, stop={tokenizer.eos})]
    assert got == [i for i in want if i != tokenizer.eos]


@torch.no_grad()
@pytest.mark.parametrize("shape", [*PLAIN, "phi3-window-tied"])
def test_we_open_their_folder_and_write_it_back_bit_for_bit(shape, tmp_path):
    family, hf = theirs(shape)
    there, here = tmp_path / "there", tmp_path / "here"
    hf.save_pretrained(there)
    Tokenizer.train("chars", ["abc"]).save(there)
    loaded = checkpoint.load(there)
    ids = torch.randint(97, (2, 9), generator=torch.Generator().manual_seed(2))
    assert (loaded.model(ids) - hf(ids).logits).abs().max() <= LIMIT
    checkpoint.save(loaded.model, here, loaded.tokenizer, loaded.context_length)
    again = transformers.AutoModelForCausalLM.from_pretrained(here)
    if family == "phi3":  # written with other names
        assert (again(ids).logits - hf(ids).logits).abs().max() <= LIMIT
    else:
        assert all(torch.equal(again.state_dict()[k], v) for k, v in hf.state_dict().items())
    # Without a window the tree of a Mistral is that of a LLaMA, and so is that of a Phi-3.
    said = {"mistral": "llama", "phi3": "llama", "phi3-window-tied": "mistral"}.get(shape, family)
    assert json.loads((here / "dunes.json").read_text())["family"] == said
