"""Adapters on disk: PEFT opens ours, we open PEFT's, and what cannot be right is refused."""

import json
import warnings
from copy import deepcopy

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from adapters import difference, trained
from conftest import change_json, equal_states, refuses
from dunes import checkpoint
from dunes.augment import Adapted, attach, base_model, detach, quantize, set_adapter
from dunes.checkpoint.weights.lazy_tensor import in_memory, renamed
from dunes.models import FAMILIES, weight_names
from dunes.models.names import for_heads, to_ours
from dunes.train import cast_frozen
from small_models import HF_ENDS, HF_SIZES, random_model
from test_checkpoint import flip

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import peft
    import transformers

LIMIT = 1e-5
OTHERS = {"vocab_size": 61, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 40}
COMMON = HF_SIZES | HF_ENDS | OTHERS | {"max_position_embeddings": 32}
SHAPES = {
    "llama": ("llama", COMMON),
    "phi3": ("phi3", {**COMMON, "num_key_value_heads": 1, "pad_token_id": 0}),
    "gpt2": ("gpt2", {"vocab_size": 61, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 4}),
    "gpt_neox": ("gpt_neox", COMMON),
    "mixtral": ("mixtral", {**COMMON, "num_local_experts": 3, "num_experts_per_tok": 2}),
    "qwen3_moe": (
        "qwen3_moe",
        {**COMMON, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8},
    ),
    "deepseek_v3": (
        "deepseek_v3",
        {**COMMON, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "v_head_dim": 8}
        | {"q_lora_rank": 12, "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4}
        | {"num_key_value_heads": 4, "moe_intermediate_size": 24, "first_k_dense_replace": 1},
    ),
    "qwen3_next": (
        "qwen3_next",
        {**COMMON, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8}
        | {"full_attention_interval": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
        | {
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "shared_expert_intermediate_size": 20,
            "rms_norm_eps": 1e-3,
        },
    ),
    "gpt_oss": ("gpt_oss", {**COMMON, "num_local_experts": 3, "num_experts_per_tok": 2, "head_dim": 8}),
}
IDS = torch.arange(60).view(3, 20)
pytestmark = pytest.mark.filterwarnings("ignore")


def pair(shape):
    """Their model, and ours with the same weights."""
    torch.manual_seed(0)
    family, words = SHAPES[shape]
    config = transformers.AutoConfig.for_model(family, **words | HF_ENDS)
    theirs = transformers.AutoModelForCausalLM.from_config(config).eval()
    for p in theirs.parameters():
        nn.init.normal_(p, 0.0, 0.2)
    left_out = "lm_head" if config.tie_word_embeddings else None
    state = {k: v for k, v in theirs.state_dict().items() if left_out is None or left_out not in k}
    ours_config = FAMILIES[family].from_hf(theirs.config.to_dict())
    names = for_heads(weight_names(family), ours_config.heads)
    moves, unknown = to_ours(names, {k: tuple(w.shape) for k, w in state.items()})
    assert not unknown
    ours = FAMILIES[family].build(ours_config).eval()
    ours.load_state_dict({k: w.read() for k, w in renamed(moves, in_memory(state)).items()})
    return theirs, ours


@torch.no_grad()
def their_logits(theirs, folder=None):
    model = theirs if folder is None else peft.PeftModel.from_pretrained(theirs, folder).eval()
    return model(IDS).logits


def their_adapter(theirs, folder, **config):
    """An adapter of PEFT's with numbers as after training, which it saves."""
    adapted = peft.get_peft_model(theirs, peft.LoraConfig(**config)).eval()
    for n, p in adapted.named_parameters():
        if "lora_" in n:
            p.data += torch.randn(p.shape) * 0.1
    adapted.save_pretrained(folder)
    return adapted


KINDS = {"lora": {}, "rslora": {"rslora": True}, "dora": {"dora": True}, "pissa": {"init": "pissa"}}


@pytest.mark.parametrize(
    ("shape", "kind"),
    [*((s, [*KINDS][i % 4]) for i, s in enumerate(SHAPES)), *(("llama", k) for k in KINDS if k != "lora")],
)
def test_peft_opens_ours(shape, kind, tmp_path):
    theirs, ours = pair(shape)
    base = their_logits(theirs)
    where = ["blocks.**", "!**.router", *(["!**.experts.**", "!**.shared.**"] if kind == "dora" else [])]
    if shape == "deepseek_v3":  # PEFT takes the layers of dense and shared MLPs for experts
        where += ["!blocks.0.mlp.**", "!**.shared.**"]
    attach(ours, where=where, rank=4, ranks={"**.mlp.**": 6, "blocks.1.attn.out": 3}, **KINDS[kind])
    trained(ours)
    checkpoint.save_adapter(ours, tmp_path / "a", family=SHAPES[shape][0])
    with torch.no_grad():
        said = ours(IDS)
    assert difference(said, their_logits(theirs, tmp_path / "a")) <= LIMIT * base.abs().max()
    assert difference(said, base) > 0.1
    set_adapter(ours, None)
    assert difference(ours(IDS), base) <= LIMIT * base.abs().max()
    detach(ours)
    checkpoint.load_adapter(ours, tmp_path / "a", "again")
    assert difference(ours(IDS), said) <= LIMIT * base.abs().max()


def test_layers_that_peft_takes_for_experts_are_named(tmp_path):
    _, ours = pair("deepseek_v3")
    attach(ours, where=["**.shared.**"], rank=2)
    trained(ours)
    with pytest.warns(UserWarning, match="down_proj, gate_proj, up_proj of this mixture as an expert"):
        checkpoint.save_adapter(ours, tmp_path / "a", family="deepseek_v3")
    said = ours(IDS)
    detach(ours)
    checkpoint.load_adapter(ours, tmp_path / "a")
    assert torch.equal(ours(IDS), said)


def test_a_layer_that_peft_refuses_is_named(tmp_path):
    model = random_model("mamba2")
    attach(model, where=["**.out"], rank=2)
    with pytest.warns(UserWarning, match="PEFT refuses a Mamba-2's out_proj; for PEFT, leave out blocks"):
        checkpoint.save_adapter(model, tmp_path / "a", family="mamba2")


LINEARS = {
    "llama": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"],
    "phi3": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"],
    "gpt2": ["c_attn", "c_proj", "c_fc"],
    "gpt_neox": ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h", "lm_head"],
    "mixtral": ["q_proj", "v_proj", "o_proj"],
    "deepseek_v3": ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"],
}
THEIRS = {
    "lora": {
        "rank_pattern": {"q_proj": 2, "c_attn": 5, "qkv_proj": 3, "query_key_value": 5},
        "alpha_pattern": {"o_proj": 3, "c_attn": 7},
    },
    "rslora": {"use_rslora": True, "rank_pattern": {"o_proj": 2, "c_fc": 2}},
    "dora": {"use_dora": True},
}


@pytest.mark.parametrize(
    ("shape", "kind"),
    [(s, k) for s in LINEARS for k in THEIRS if k == "lora" or s in ("llama", "gpt2", "mixtral")],
)
def test_we_open_pefts(shape, kind, tmp_path):
    theirs, ours = pair(shape)
    words = {"r": 4, "lora_alpha": 6, "target_modules": LINEARS[shape], **THEIRS[kind]}
    if shape == "mixtral" and kind != "dora":
        words["target_modules"] = [*LINEARS[shape], "gate", *([] if kind == "rslora" else ["w1", "w2", "w3"])]
    elif shape == "llama" and kind == "lora":
        words["target_modules"] = [*LINEARS[shape], "embed_tokens"]
    adapted = their_adapter(theirs, tmp_path, **words)
    base = ours(IDS)
    checkpoint.load_adapter(ours, tmp_path)
    there = their_logits(adapted)
    assert difference(ours(IDS), there) <= LIMIT * base.abs().max()
    assert difference(there, base) > 0.05


@pytest.mark.parametrize("nested", ["gate_up inside", "down inside"])
@pytest.mark.parametrize("shape", ["mixtral", "gpt_oss"])
def test_stacked_experts_are_told_by_their_shapes_not_by_their_nesting(shape, nested, tmp_path):
    theirs, ours = pair(shape)
    parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    modules = {"target_modules": ["q_proj"], "target_parameters": parameters}
    adapted = their_adapter(theirs, tmp_path, r=2, lora_alpha=3, **modules)
    if nested == "down inside":
        path = tmp_path / "adapter_model.safetensors"
        inner, outer = "experts.base_layer.", "experts."
        turn = lambda k: k.replace(inner, outer) if inner in k else k.replace(outer, inner)
        save_file({turn(k): w for k, w in load_file(path).items()}, path)
    checkpoint.load_adapter(ours, tmp_path)
    assert difference(ours(IDS), their_logits(adapted)) <= LIMIT * 10


def test_experts_one_by_one_as_older_files_have_them(tmp_path):
    theirs, ours = pair("mixtral")
    draw = torch.Generator().manual_seed(3)
    prefix = "base_model.model.model.layers.{}.block_sparse_moe.experts.{}.{}.lora_{}.weight"
    sizes = {"w1": (32, 40), "w2": (40, 32), "w3": (32, 40)}
    weights = {
        prefix.format(i, e, w, part): torch.randn((2, wide) if part == "A" else (tall, 2), generator=draw) * 0.2
        for i in range(2)
        for e in range(3)
        for w, (wide, tall) in sizes.items()
        for part in "AB"
    }
    save_file(weights, tmp_path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": list(sizes)}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    checkpoint.load_adapter(ours, tmp_path)
    there = their_logits(theirs, tmp_path)  # which makes them into stacked ones
    assert difference(ours(IDS), there) <= LIMIT * 10


def test_heads_of_gpt2_with_one_a_share_it_on_disk(tmp_path):
    theirs, ours = pair("gpt2")
    their_adapter(theirs, tmp_path / "theirs", r=3, target_modules=["c_attn"])
    checkpoint.load_adapter(ours, tmp_path / "theirs")
    assert torch.equal(ours.blocks[0].attn.q["default"].A, ours.blocks[0].attn.v["default"].A)
    checkpoint.save_adapter(ours, tmp_path / "ours")
    before, after = (load_file(tmp_path / d / "adapter_model.safetensors") for d in ("theirs", "ours"))
    assert equal_states(before, after)


def test_parts_of_fused_matrices_are_enough(tmp_path):
    theirs, ours = pair("gpt2")
    attach(ours, where=["blocks.0.attn.[qv]", "blocks.1.mlp.up"], rank=2, ranks={"**.v": 4})
    trained(ours)
    checkpoint.save_adapter(ours, tmp_path / "a")
    assert difference(ours(IDS), their_logits(theirs, tmp_path / "a")) <= LIMIT
    config = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    assert config["target_modules"] == ["transformer.h.0.attn.c_attn", "transformer.h.1.mlp.c_fc"]
    assert config["fan_in_fan_out"]
    said = ours(IDS)
    detach(ours)
    note = checkpoint.load_adapter(ours, tmp_path / "a")
    assert list(note.places) == ["blocks.0.attn.q", "blocks.0.attn.v", "blocks.1.mlp.up"]
    assert note.places["blocks.0.attn.q"] == {"rank": 2, "alpha": 32.0}
    assert difference(ours(IDS), said) <= 1e-6
    theirs, mixed = pair("mixtral")
    attach(mixed, where=["blocks.*.mlp.experts.1.gate", "blocks.1.mlp.experts.2.down"], rank=2)
    checkpoint.save_adapter(trained(mixed), tmp_path / "b")
    assert difference(mixed(IDS), their_logits(theirs, tmp_path / "b")) <= LIMIT * 10


def test_an_adapter_learnt_on_a_quantized_base_opens_on_the_dense_one(tmp_path):
    theirs, ours = pair("llama")
    dense = base_model(ours)
    before = checkpoint.base_identity(dense)
    quantize(ours, kind="nf4")
    attach(ours, rank=2)
    checkpoint.save_adapter(trained(ours), tmp_path / "a", identity=before | checkpoint.base_identity(ours))
    checkpoint.load_adapter(dense, tmp_path / "a")
    assert difference(dense(IDS), their_logits(theirs, tmp_path / "a")) <= LIMIT * 10
    detach(dense)
    checkpoint.save_adapter(ours, tmp_path / "b")  # which knows the codes alone
    refuses(r"in 'NF4, torch.float32'.*cannot be compared", checkpoint.load_adapter, dense, tmp_path / "b")


def test_dora_may_change_lengths_alone(tmp_path):
    theirs, ours = pair("gpt2")
    attach(ours, rank=2, dora=True)
    with torch.no_grad():
        for name, p in ours.named_parameters():
            if name.endswith("magnitude"):
                p *= 1.5
    checkpoint.save_adapter(ours, tmp_path / "a")
    said = ours(IDS)
    detach(ours)
    checkpoint.load_adapter(ours, tmp_path / "a")
    assert difference(ours(IDS), said) <= LIMIT
    assert difference(said, their_logits(theirs, tmp_path / "a")) <= LIMIT


@pytest.fixture
def saved(tmp_path):
    _, ours = pair("llama")
    attach(ours, where="blocks.*.attn.[qv]", rank=2, alpha=4)
    checkpoint.save_adapter(trained(ours), tmp_path / "a", base="some/base")
    detach(ours)
    return ours, tmp_path / "a"


def words(**changes):
    return lambda folder: change_json(folder / "adapter_config.json", **changes)


Q = "base_model.model.model.layers.0.self_attn.q_proj.lora_"


def weights(change):
    def changed(folder):
        path = folder / "adapter_model.safetensors"
        held = load_file(path)
        change(held)
        save_file(held, path)

    return changed


def rename(old, new):
    return weights(lambda h: [h.update({key.replace(old, new): h.pop(key)}) for key in list(h)])


def put(name, *shape):
    return weights(lambda h: h.update({name: torch.ones(shape)}))


REFUSED = {
    "another method": (words(peft_type="LOHA"), "peft_type is 'LOHA'"),
    "a base of its own": (words(init_lora_weights="pissa"), "also changes the base"),
    "biases": (words(bias="all"), "'bias' is 'all'"),
    "trained modules": (words(modules_to_save=["lm_head"]), "'modules_to_save'"),
    "a method unknown": (words(use_something=True), "'use_something' is True"),
    "a setting without a name": (words(**{"": True}), "is True"),
    "no scale": (words(lora_alpha=0), "lora_alpha is 0"),
    "no dropout": (words(lora_dropout="a"), "adapter_config.json: .*'a'"),
    "no patterns": (words(rank_pattern=[1]), "adapter_config.json: "),
    "no number for a pattern": (words(alpha_pattern={"q_proj": None}), "alpha_pattern of 'q_proj' is None"),
    "half a rank": (words(r=2.5), "r is 2.5"),
    "another rank": (words(r=8), "rank 8 for .*whose A has 2 rows"),
    "no pattern": (words(rank_pattern={"(": 2}), "adapter_config.json: .*unterminated"),
    "dora by name only": (words(use_dora=True), "has A, B; .*expected A, B, magnitude"),
    "another model's names": (rename("self_attn", "attention"), "does not exist in this llama model"),
    "one name of another model": (
        rename("layers.1.self_attn.v_proj", "layers.1.self_attn.w_proj"),
        r"layers.1.self_attn.w_proj .*does not exist in this llama model",
    ),
    "no adapter": (put("lm_head.weight", 2), "'lm_head.weight' does not belong to an adapter"),
    "half of it": (weights(lambda h: h.pop(Q + "B.weight")), "has A; .*expected A, B"),
    "another base's shape": (put(Q + "A.weight", 2, 31), r"A is \(2, 31\), expected \(2, 32\)"),
    "not finite": (weights(lambda h: h[Q + "A.weight"].fill_(float("nan"))), "not finite"),
    "no weights": (lambda f: (f / "adapter_model.safetensors").unlink(), "no weights: neither"),
    "a damaged config": (lambda f: (f / "adapter_config.json").write_text("{"), "not JSON"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_right_is_refused_and_the_model_left_alone(case, saved):
    ours, folder = saved
    (folder / "dunes.json").unlink()  # or the digests would tell before
    change, said = REFUSED[case]
    change(folder)
    refuses(said, checkpoint.load_adapter, ours, folder)
    assert not any(isinstance(m, Adapted) for m in ours.modules())


def test_the_card_tells_other_weights_and_damage(saved):
    ours, folder = saved
    checkpoint.load_adapter(ours, folder, "first")
    refuses("it already has an adapter 'first'", checkpoint.load_adapter, ours, folder, "first")
    checkpoint.load_adapter(ours, folder, "second")  # the digest is the base's, whatever stands beside it
    other = base_model(ours)
    with torch.no_grad():
        other.norm.weight[0] += 1  # which is shared
    refuses("made for a different base", checkpoint.load_adapter, other, folder)
    checkpoint.load_adapter(other, folder, any_base=True)
    flip(folder / "adapter_model.safetensors")
    refuses("not the bytes that were written", checkpoint.load_adapter, ours, folder, "third")


ROUNDED = (torch.bfloat16, torch.float16)


def random_like(model, dtype):
    """A base of the same shapes with other numbers, which bfloat16 can hold."""
    other = deepcopy(model).to(dtype)
    with torch.no_grad():
        for p in other.parameters():
            p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())) / 5)
    return other


def card_of(folder, change):
    card = json.loads((folder / "dunes.json").read_text())
    change(card)
    (folder / "dunes.json").write_text(json.dumps(card))


@pytest.mark.parametrize("dtype", [torch.float32, *ROUNDED, torch.float64])
def test_a_base_in_any_dtype_proves_to_be_the_one_or_is_refused(dtype, saved):
    ours, folder = saved
    same = deepcopy(ours).to(dtype)
    checkpoint.load_adapter(same, folder)
    assert difference(same(IDS), ours(IDS)) > 0.05
    other = random_like(ours, dtype)
    refuses(r"made for a different base.*--any-base", checkpoint.load_adapter, other, folder)
    assert not any(isinstance(m, Adapted) for m in other.modules())
    checkpoint.load_adapter(other, folder, any_base=True)
    nearly = deepcopy(ours).to(dtype)
    with torch.no_grad():
        nearly.blocks[1].mlp.down.weight[3, 5] *= 1.01
    refuses("made for a different base", checkpoint.load_adapter, nearly, folder)


@pytest.mark.parametrize("dtype", ROUNDED)
def test_what_was_rounded_and_made_wide_again_is_known(dtype, saved, tmp_path):
    ours, folder = saved
    checkpoint.load_adapter(deepcopy(ours).to(dtype).float(), folder)
    rounded = deepcopy(ours).to(dtype)
    attach(rounded, where="blocks.*.attn.[qv]", rank=2)
    checkpoint.save_adapter(trained(rounded), tmp_path / "b")
    checkpoint.load_adapter(deepcopy(ours), tmp_path / "b")  # of which that base was made
    cast_frozen(rounded.float(), torch.bfloat16)  # linear maps alone
    checkpoint.load_adapter(rounded, folder, "other")
    refuses("made for a different base", checkpoint.load_adapter, random_like(ours, torch.float32), tmp_path / "b")


@pytest.mark.parametrize("change", [{"digests": 7}, {"digests": {}, "sha256": 7}, {"config": 7}])
def test_a_damaged_card_proves_nothing(change, saved):
    ours, folder = saved
    card_of(folder, lambda card: card["base"].update(change))
    refuses("--any-base", checkpoint.load_adapter, ours, folder)
    checkpoint.load_adapter(ours, folder, any_base=True)


def test_an_adapter_without_a_card_opens_with_one_warning(saved):
    ours, folder = saved
    (folder / "dunes.json").unlink()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        checkpoint.load_adapter(ours, folder)
        checkpoint.load_adapter(ours, folder, "sure", any_base=True)
    assert len(caught) == 1
    assert "cannot be verified" in str(caught[0].message)
    assert str(folder) in str(caught[0].message)


def test_a_base_that_was_quantized_by_hand_is_refused(saved):
    ours, folder = saved
    quantized = deepcopy(ours)
    quantize(quantized)
    refuses(r"in NF4, torch.float32.*nor quantized, or.*--any-base", checkpoint.load_adapter, quantized, folder)
    checkpoint.load_adapter(ours, folder)
    quantize(ours)
    assert checkpoint.base_identity(ours)["kind"] == "NF4, torch.float32"


def test_saving_again_replaces_and_what_has_no_words_is_refused(saved, tmp_path):
    ours, folder = saved
    refuses("this model has no adapter 'default'; its adapters are: none", checkpoint.save_adapter, ours, folder)
    attach(ours, where="**.down", rank=5)
    checkpoint.save_adapter(trained(ours), folder)
    assert json.loads((folder / "adapter_config.json").read_text())["target_modules"] == ["down_proj"]
    assert not list(folder.glob(".*"))
    _, mixed = pair("mixtral")
    attach(mixed, where="**.experts.**", rank=2, dora=True)
    refuses(
        "experts.gate_up_proj: PEFT supports magnitude neither", checkpoint.save_adapter, mixed, tmp_path / "m"
    )
    detach(mixed)
    attach(mixed, where="**.router", rank=2)
    refuses(r"blocks.0.mlp.router: .*detach it", checkpoint.save_adapter, mixed, tmp_path / "m")
    _, small = pair("gpt2")
    attach(small, where="**.q", rank=2, dora=True)
    refuses("attn.c_attn: PEFT supports magnitude neither", checkpoint.save_adapter, small, tmp_path / "m")
    assert not (tmp_path / "m").exists()
