"""Model folders of others, damaged or hostile: refused as a whole, on one line."""

import json
import os
import re
import shutil
import sys
import warnings
from itertools import cycle

import pytest
import torch
from safetensors.torch import load_file, save_file

from dunes import checkpoint
from dunes.checkpoint.inspect import describe_folder
from dunes.checkpoint.open import load_decoder, open_model
from dunes.checkpoint.weights.lazy_tensor import MappedFile
from dunes.models import FAMILIES
from dunes.text import Tokenizer

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import transformers
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from conftest import change_json, equal_states, raising, refuses, run_python
from native_files import native_name
from small_models import HF_ENDS, HF_SIZES, add_noise, random_model, small_config

WORDS = HF_SIZES | HF_ENDS | {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
MODELS = {
    "llama": (transformers.LlamaForCausalLM, transformers.LlamaConfig(**WORDS)),
    "tied": (transformers.LlamaForCausalLM, transformers.LlamaConfig(**WORDS, tie_word_embeddings=True)),
    "gpt2": (
        transformers.GPT2LMHeadModel,
        transformers.GPT2Config(vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=64, **HF_ENDS),
    ),
}
IDS = torch.arange(40).view(2, 20)
WEIGHTS, CONFIG, INDEX = "model.safetensors", "config.json", "model.safetensors.index.json"


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    """A folder of transformers' for each model, and its logits."""
    made = {}
    for kind, (model, config) in MODELS.items():
        torch.manual_seed(0)
        theirs = add_noise(model(config).eval(), 0.1)
        with torch.no_grad():
            logits = theirs(IDS).logits
        folder = tmp_path_factory.mktemp(kind)
        theirs.save_pretrained(folder)
        Tokenizer.train("chars", ["abc"]).save(folder)
        made[kind] = folder, theirs, logits
    return made


@pytest.fixture
def copy(originals, tmp_path):
    """A copy of one of them, to be spoilt."""

    def copied(kind="llama"):
        return shutil.copytree(originals[kind][0], tmp_path / kind)

    return copied


def change_weights(folder, change):
    tensors = load_file(folder / WEIGHTS)
    changed = change(tensors)
    tensors = changed if isinstance(changed, dict) else tensors
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / WEIGHTS)


def change_config(folder, **changes):
    change_json(folder / CONFIG, **changes)


def refusal(folder, read=open_model):
    """The error message; it must be one line, and no weight may be read for it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MappedFile, "tensor", raising(AssertionError("numbers were read")))
        message = refuses(".", lambda: read(folder).weights())
    assert message.isprintable()
    assert len(message) < 4000
    return message


def agrees(folder, logits):
    with torch.no_grad():
        assert (checkpoint.load(folder).model(IDS) - logits).abs().max() < 1e-5


LAYER = "model.layers.1."


def drop(key):
    return lambda t: t.pop(key)


def put(key, value):
    return lambda t: t.update({key: value(t) if callable(value) else value})


def rename(old, new):
    return lambda t: {k.replace(old, new): v for k, v in t.items()}


def turned(*parts):
    return lambda t: {k: v.T if any(p in k for p in parts) else v for k, v in t.items()}


H = "lm_head.weight"
UP = f"{LAYER}mlp.up_proj.weight"
GPT2 = ("Conv1D turned", "one weight under two names")
WRONG = {
    "missing": (drop(UP), UP),
    "unexpected": (put("model.extra", torch.ones(3)), "model.extra"),
    "a block more": (
        put("model.layers.2.input_layernorm.weight", torch.ones(32)),
        "layers.2.input_layernorm.weight",
    ),
    "shape": (put("model.norm.weight", torch.ones(31)), "model.norm.weight"),
    "no matrix": (put(f"{LAYER}self_attn.q_proj.weight", torch.ones(1024)), "q_proj.weight"),
    "dtype": (put(UP, torch.ones(48, 32).to(torch.int8)), f"{UP} is int8"),
    "float8": (put(UP, torch.ones(48, 32).to(torch.float8_e4m3fn)), f"{UP} is float8_e4m3fn"),
    "Conv1D turned": (
        turned("c_attn.weight", "c_fc.weight", "c_proj.weight"),
        *("0.attn.c_attn.weight is (96, 32)", "1.mlp.c_fc.weight is", "1.mlp.c_proj.weight is (32, 128)"),
    ),
    "a prefix lost": (
        lambda t: {k: v for k, v in rename("model.", "")(t).items() if "head" not in k},
        *(H, "with 'model.'"),
    ),
    "a prefix, and a tensor more": (
        lambda t: {f"net.{k}": v for k, v in t.items()} | {"net.extra": torch.ones(3)},
        *(": extra (3,)", "without 'net.'"),
    ),
    "two models": (lambda t: t | {f"_orig_mod.{k}": v.clone() for k, v in t.items()}, "have the same name"),
    "an adapter's tensors": (
        lambda t: {f"base_model.model.{k}": v for k, v in (t | {"q.lora_A.weight": t[H].clone()}).items()},
        *(": q.lora_A.weight (97, 32)", "merge it first"),
    ),
    "no head": (drop(H), f"{H} (97, 32)"),
    "one weight under two names": (put("ln_f.weight", torch.ones(32)), "ln_f.weight is the same weight as"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_differences_are_listed_before_a_weight_is_read(wrong, copy):
    change, *parts = WRONG[wrong]
    folder = copy("gpt2" if wrong in GPT2 else "llama")
    change_weights(folder, change)
    message = refusal(folder)
    assert message.startswith(f"{folder}: ")
    assert all(part in message for part in parts), message
    lines = list(describe_folder(open_model(folder)))
    differences = open_model(folder).comparison[1]
    listed = [line for line in lines if line.startswith("difference")]
    assert listed == [f"difference  {d}" for d in differences[:40]]
    assert lines[-1].startswith("loads       no: ")
    refuses(re.escape(message), checkpoint.load, folder)


def inside(*parts):
    """These parts after the third of each name, as wrappers of blocks leave them."""
    return lambda k: (
        ".".join([*k.split(".")[:3], *parts, *k.split(".")[3:]]) if re.search(r"\.(layers|h)\.", k) else k
    )


PREFIXES = {
    "compiled": (lambda k: f"_orig_mod.{k}", "without '_orig_mod.'"),
    "parallel": (lambda k: f"module.{k}", "without 'module.'"),
    "compiled in parallel": (lambda k: f"module._orig_mod.{k}", "without '_orig_mod.' and 'module.'"),
    "blocks compiled": (inside("_orig_mod"), "without '_orig_mod.'"),
    "sharded": (
        lambda k: "_fsdp_wrapped_module." + inside("_fsdp_wrapped_module", "_checkpoint_wrapped_module")(k),
        "without '_checkpoint_wrapped_module.' and '_fsdp_wrapped_module.'",
    ),
    "Lightning": (lambda k: f"_forward_module.net.{k}", "without '_forward_module.' and 'net.'"),
    "PEFT": (lambda k: f"base_model.model.{k}", "without 'base_model.model.'"),
    "twice": (lambda k: f"model.{k}", "without 'model.'"),
    "lost": (lambda k: k.removeprefix("model.").removeprefix("transformer."), "with 'model.'"),
    "other": (
        lambda k: k.replace("model.", "_orig_mod.gpt."),
        "without '_orig_mod.' and 'gpt.' and with 'model.'",
    ),
}


@pytest.mark.parametrize(
    ("kind", "prefix"),
    [("llama", p) for p in PREFIXES]
    + [("tied", p) for p in [*PREFIXES][7:]]
    + [("gpt2", p) for p in [*PREFIXES][:3]],
)
def test_a_prefix_of_all_names_is_removed_and_told(kind, prefix, copy, originals):
    folder, (rename_one, note) = copy(kind), PREFIXES[prefix]
    change_weights(folder, lambda t: {rename_one(k): v for k, v in t.items()})
    with pytest.warns(UserWarning, match=rf"{re.escape(str(folder))}: tensors are read {note} in their names$"):
        agrees(folder, originals[kind][2])
    assert f"assumed     tensors are read {note} in their names" in describe_folder(open_model(folder))


def test_a_second_copy_with_a_prefix_does_not_fill_what_the_first_one_lacks(copy):
    """As of a model whose file also has averaged weights."""
    folder = copy()
    averaged = lambda k, v: (f"ema.{k}", 2 * v) if "layers.1." in k else (k, v)
    change_weights(folder, lambda t: dict(averaged(k, v) for k, v in t.items()))
    assert "layers.1." in refusal(folder)


def test_several_differences_are_listed_at_once(copy):
    folder = copy()
    changed = {"model.extra": torch.ones(1), UP: torch.ones(2, 2)}
    changed[f"{LAYER}mlp.gate_proj.weight"] = torch.ones(48, 32, dtype=torch.int8)
    change_weights(folder, lambda t: {k: v for k, v in t.items() if k != "model.norm.weight"} | changed)
    listed = [("shape", "up_proj"), ("dtype", "gate_proj"), ("missing", "norm"), ("unexpected", "model")]
    assert [(d.kind, d.name.split(".")[-2]) for d in open_model(folder).comparison[1]] == listed
    assert refusal(folder).count(";") == 3


def test_a_tied_model_may_store_its_head_if_it_equals_the_embedding(copy, originals):
    folder = copy("tied")
    assert "lm_head.weight" not in load_file(folder / WEIGHTS)
    change_weights(folder, put("lm_head.weight", lambda t: t["model.embed_tokens.weight"].clone()))
    agrees(folder, originals["tied"][2])
    change_weights(folder, put("lm_head.weight", lambda t: t["model.embed_tokens.weight"].clone().neg()))
    words = r"lm_head\.weight is another matrix .*, not the embedding .tie_word_embeddings is true"
    refuses(words, checkpoint.load, folder)
    change_config(folder, tie_word_embeddings=False)
    checkpoint.load(folder)
    change_config(folder, tie_word_embeddings=True)
    change_weights(folder, put("lm_head.weight", torch.ones(5, 32)))
    assert "is another matrix (5, 32)" in refusal(folder, lambda f: open_model(f))


def test_files_without_a_head_load_once_the_config_is_tied_and_rotary_angles_are_ignored(copy, originals):
    folder = copy("tied")
    change_weights(folder, put("model.layers.0.self_attn.rotary_emb.inv_freq", torch.ones(4)))
    change_config(folder, tie_word_embeddings=False)
    assert refusal(folder).endswith("lm_head.weight (97, 32) is missing")
    change_config(folder, tie_word_embeddings=True)
    agrees(folder, originals["tied"][2])


def test_gpt2_names_of_the_first_files(copy, originals):
    folder = copy("gpt2")

    def old(tensors):
        tensors = rename("transformer.", "")(tensors)
        for i in range(2):
            tensors[f"h.{i}.attn.bias"] = torch.ones(64, 64).tril().to(torch.uint8).view(1, 1, 64, 64)
            tensors[f"h.{i}.attn.masked_bias"] = torch.tensor(-1e4)
        return tensors

    change_weights(folder, old)
    agrees(folder, originals["gpt2"][2])
    change_weights(folder, rename("h.1.attn.bias", "h.1.attn.odd"))
    assert "h.1.attn.odd (1, 1, 64, 64) is not a weight" in refusal(folder)


def test_a_layer_that_predicts_a_second_token_is_no_weight(made):
    """Published files have it after the last layer; it is ignored only if the config names it."""
    folder = made("deepseek_v3")
    logits = checkpoint.load(folder).model(IDS)
    extra = {f"model.layers.2.{key}": torch.ones(3) for key in ("eh_proj.weight", "mlp.experts.0.up_proj.weight")}
    change_weights(folder, lambda tensors: tensors | extra)
    assert "model.layers.2.eh_proj.weight (3,) is not a weight of this model" in refusal(folder)
    change_config(folder, num_nextn_predict_layers=1)
    agrees(folder, logits)
    change_weights(folder, rename("layers.2", "layers.3"))
    assert "model.layers.3.eh_proj.weight (3,) is not a weight of this model" in refusal(folder)
    change_config(folder, quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})
    assert "quantized with 'fp8'; supported are plain weights" in refusal(folder)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "deepseek_v3"])
def test_stacked_experts(family, tmp_path):
    """As transformers 5 holds them: 'gate_up_proj' (E, 2 x hidden, dim)."""
    model = random_model(family, vocab=265, context=16)
    checkpoint.save(model, tmp_path, Tokenizer.train("bytes", []), 16)
    (tmp_path / "dunes.json").unlink()
    stack, first = "model.layers.{}.mlp.experts.{}", int(family == "deepseek_v3")  # whose first layer is dense

    def stacked(tensors):
        tensors = {k: v for k, v in tensors.items() if ".experts." not in k}
        for i, block in enumerate(model.blocks[first:], first):
            e = block.mlp.experts
            both = torch.stack([torch.cat([x.gate.weight, x.up.weight]) for x in e])
            tensors[stack.format(i, "gate_up_proj")] = both.detach()
            tensors[stack.format(i, "down_proj")] = torch.stack([x.down.weight for x in e]).detach()
        return tensors

    change_weights(tmp_path, stacked)
    with torch.no_grad():
        assert torch.equal(checkpoint.load(tmp_path).model(IDS), model.eval()(IDS))
    mixture = model.blocks[first].mlp
    count, rows = len(mixture.experts), 2 * mixture.experts[0].gate.out_features
    change_weights(tmp_path, put(stack.format(first, "gate_up_proj"), torch.ones(count, rows, 31)))
    assert f"gate_up_proj is ({count}, {rows}, 31), not ({count}, {rows}, 32)" in refusal(tmp_path)
    change_weights(tmp_path, put(stack.format(first, "gate_up_proj"), torch.ones(count + 1, rows, 32)))
    message = refusal(tmp_path)
    assert f"gate_up_proj is ({count + 1}, {rows}, 32), not ({count}, {rows}, 32)" in message
    assert "missing" not in message
    for size in (1 << 40, 0):  # without numbers, so that the file is small
        change_weights(tmp_path, put(stack.format(first, "gate_up_proj"), torch.empty(size, 0, 32)))
        assert f"is ({size}, 0, 32), not ({count}, {rows}, 32)" in refusal(tmp_path)
    change_weights(
        tmp_path, lambda t: rename(f"layers.{first}.mlp.experts.gate_up", "layers.9.mlp.experts.gate_up")(t)
    )
    assert "model.layers.9.mlp.experts.gate_up_proj" in refusal(tmp_path)


def test_an_adapter_is_no_model(tmp_path):
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "some/base", "peft_type": "LORA"}')
    save_file({"base_model.model.x.lora_A.weight": torch.ones(2, 2)}, tmp_path / "adapter_model.safetensors")
    message = refusal(tmp_path)
    assert "an adapter, not a whole model" in message
    (tmp_path / CONFIG).write_text("{}")
    assert refusal(tmp_path) == message


def test_a_quantized_folder_is_refused(copy):
    folder = copy()
    change_config(folder, quantization_config={"quant_method": "hqq", "bits": 4})
    assert "config.json: quantized with 'hqq'; supported are plain weights, bitsandbytes" in refusal(folder)
    change_config(folder, quantization_config=["x" * 1_000_000])
    assert "quantized with a list" in refusal(folder)


SPOILT = {
    "no tokenizer": (lambda f: (f / "tokenizer.json").write_text("{"), "tokenizer.json: not a tokenizer"),
    "ids without rows": (lambda f: Tokenizer.train("bytes", []).save(f), "has 97 rows, the tokenizer 265 ids"),
    "marks that are none": (lambda f: change_config(f, bos_token_id="<s>"), "config.json: bos_token_id is '<s>'"),
    "a card of other files": (
        lambda f: (f / "dunes.json").write_text('{"files": {"config.json": {"size": 3, "sha256": ""}}}'),
        "config.json: not the bytes that were written",
    ),
}


@pytest.mark.parametrize("case", SPOILT)
def test_inspect_reports_what_load_refuses(case, copy, command):
    folder = copy()
    change, why = SPOILT[case]
    change(folder)
    refuses(r".", checkpoint.load, folder)
    status, out, _ = command("inspect", folder)
    assert status == 1
    last = out.splitlines()[-1]
    assert last.startswith("loads       no: ")
    assert why in last


def sharded(originals, folder, kind="llama"):
    originals[kind][1].save_pretrained(folder, max_shard_size="20KB")
    Tokenizer.train("chars", ["abc"]).save(folder)
    assert len(list(folder.glob("*.safetensors"))) > 2
    return folder


def binned(folder):
    """The same as files of torch.save, which transformers no longer writes."""
    for path in folder.glob("*.safetensors"):
        name = path.name.replace("model", "pytorch_model").replace("safetensors", "bin")
        torch.save(load_file(path), folder / name)
        path.unlink()
    if (folder / INDEX).exists():
        text = (folder / INDEX).read_text().replace("safetensors", "bin").replace('"model-', '"pytorch_model-')
        (folder / "pytorch_model.bin.index.json").write_text(text)
        (folder / INDEX).unlink()


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("parts", ["one", "several"])
@pytest.mark.parametrize("form", ["safetensors", "bin"])
def test_single_and_sharded_files_of_either_format_are_equal(kind, parts, form, originals, copy, tmp_path):
    folder = copy(kind) if parts == "one" else sharded(originals, tmp_path / "parts", kind)
    if form == "bin":
        binned(folder)
    assert not list(folder.glob("*.bin" if form == "safetensors" else "*.safetensors"))
    agrees(folder, originals[kind][2])
    single = load_decoder(open_model(originals[kind][0])).state_dict()
    found = load_decoder(open_model(folder)).state_dict()
    assert equal_states(found, single)


FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
OUTSIDE = "outside.safetensors"


@pytest.fixture
def two(made, tmp_path):
    """A folder of two shards with an index, a file beside it, and what changes the index."""
    folder = made("llama")
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    save_file(tensors, tmp_path / OUTSIDE)
    names = sorted(tensors)
    where = {k: FIRST if i < len(names) // 2 else SECOND for i, k in enumerate(names)}
    for shard in (FIRST, SECOND):
        save_file({k: tensors[k] for k in names if where[k] == shard}, folder / shard)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}))
    assert checkpoint.load(folder)
    return folder


def index(folder, change):
    change_json(folder / INDEX, weight_map=change)


def point(name):
    """The second shard under another name."""
    return lambda folder: index(folder, lambda where: {k: name if v == SECOND else v for k, v in where.items()})


def instead(make):
    """Another thing under the second shard's name."""

    def change(folder):
        (folder / SECOND).unlink()
        make(folder / SECOND)

    return change


def whole(text):
    return lambda folder: (folder / INDEX).write_text(text)


def listed(folder):
    index(folder, lambda where: where | {"more": FIRST})


def in_both(folder):
    first, second = load_file(folder / FIRST), load_file(folder / SECOND)
    key = next(iter(first))
    save_file(second | {key: first[key]}, folder / SECOND)


def many(folder):
    pairs = ", ".join(f'"w{i}": "s{i}"' for i in range(1_000_000))
    (folder / INDEX).write_text(f'{{"weight_map": {{{pairs}}}}}')


BAD = {
    "above": point(f"../{OUTSIDE}"),
    "absolute": point("/etc/passwd"),
    "below": point(f"sub/{SECOND}"),
    "itself, written longer": point(f"./{SECOND}"),
    "backslash": point(f"..\\{OUTSIDE}"),
    "nothing": point(""),
    "the folder": point("."),
    "its parent": point(".."),
    "NUL": point(f"{SECOND}\0"),
    "half a character": point("\ud800"),
    "very, very long": point("x" * 1_000_000),
    "a link out": instead(lambda p: p.symlink_to(f"../{OUTSIDE}")),
    "a link to itself": instead(lambda p: p.symlink_to(p.name)),
    "a pipe": instead(os.mkfifo),
    "a folder": instead(os.mkdir),
    "gone": instead(lambda p: None),
    "a million files": many,
    "a number": point(7),
    "a list": lambda f: index(f, list),
    "empty": lambda f: index(f, lambda _: {}),
    "no object": whole("[]"),
    "no JSON": whole('{"weight_map": '),
    "a tensor in two files": in_both,
    "a tensor too few": listed,
    "a tensor that is not listed": lambda f: index(f, lambda where: dict(list(where.items())[1:])),
    "a name of two lines": lambda f: index(f, lambda where: where | {"a\nb": FIRST}),
    "a very long key twice": whole(f'{{"{"a" * 10**6}": 1, "{"a" * 10**6}": 2}}'),
    "very deep": whole("[" * 100_000),
}


@pytest.mark.slow
@pytest.mark.parametrize("bad", BAD)
def test_a_bad_index_is_refused(bad, two):
    BAD[bad](two)
    assert str(two) in refusal(two)


@pytest.mark.slow
def test_nothing_outside_of_the_folder_is_opened(two, tmp_path):
    """An audit hook sees every open of Python's; the folders are made here, so that it sees nothing else."""
    spoilt = []
    for i, change in enumerate(change for bad, change in BAD.items() if bad != "a million files"):
        folder = shutil.copytree(two, tmp_path / "spoilt" / str(i))
        change(folder)
        spoilt.append(str(folder))
    script = """
        import sys
        from pathlib import Path
        from dunes.checkpoint.open import open_model
        import dunes.models
        opens = []
        open_model(Path(sys.argv[1])).weights()
        sys.addaudithook(lambda event, args: opens.append(str(args[0])) if event == "open" else None)
        open_model(Path(sys.argv[1])).weights()
        assert len(opens) > 3, "it sees those inside"
        for folder in sys.argv[2:]:
            opens.clear()
            try:
                open_model(Path(folder)).weights()
            except ValueError:
                for path in opens:
                    real = Path(path).resolve()
                    if real.parent != Path(folder).resolve():
                        print(folder, path)
            else:
                print(folder, "loads")
    """
    done = run_python(script, two, *spoilt, timeout=100)
    assert (done.stdout, done.stderr) == ("", "")


SIZES = {
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("intermediate_size", "moe_intermediate_size", "num_local_experts", "num_experts_per_tok"),
    *("n_embd", "n_layer", "n_head", "n_inner", "n_positions"),
}
FRACTIONS = {"rms_norm_eps", "layer_norm_epsilon"}
NOT_SIZES = [10**9, 1 << 31, -1, 0, 1.5, True, "8", [8], {}, float("nan"), float("inf"), 10**400]
NOT_FRACTIONS = [0, -1e-5, True, "1e-5", [1e-5], {}, float("nan"), float("inf"), None, 10**400]
MAY_BE_ABSENT = {"num_key_value_heads", "head_dim", "n_inner", "num_local_experts"}


def small(family):
    return FAMILIES[family], small_config(family, vocab=265, dim=64, context=16)


def each(keys, values):
    """A change of a config for each of the keys and values, by what is wrong."""
    return {f"{key} {str(value)[:9]}": {key: value} for key in keys for value in values}


def mxfp4(tensors):
    """Random codes and scales in place of the experts' matrices, and what transformers makes of them."""
    codes, dense = {k: v for k, v in tensors.items() if not k.endswith("_proj")}, {}
    for key, stack in tensors.items():
        if key.endswith("_proj"):
            experts, inputs, outputs = stack.shape
            blocks = torch.randint(256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
            scales = torch.randint(110, 130, blocks.shape[:3], dtype=torch.uint8)
            codes |= {f"{key}_blocks": blocks, f"{key}_scales": scales}
            dense[key] = convert_moe_packed_tensors(blocks, scales)
    return codes, dense


def test_experts_in_mxfp4_are_those_that_transformers_dequantizes(made, tmp_path):
    torch.manual_seed(0)
    folder, made_dense = made("gpt_oss"), tmp_path / "dense"
    shutil.copytree(folder, made_dense)
    codes, dense = mxfp4(load_file(folder / "model.safetensors"))
    assert len(dense) == 4
    change_weights(made_dense, lambda tensors: tensors | dense)
    change_weights(folder, lambda tensors: codes)
    change_config(folder, quantization_config={"quant_method": "mxfp4"})
    weights = open_model(folder).weights()
    assert weights.keys() == (want := open_model(made_dense).weights()).keys()
    assert all(torch.equal(weights[key].read(), want[key].read()) for key in want)
    scale = next(key for key in codes if key.endswith("_scales"))
    for wrong in (lambda t: {k: w for k, w in t.items() if k != scale}, put(scale, codes[scale][:1])):
        change_weights(folder, wrong)
        assert "its scales do not fit blocks of 32 codes; download the file again" in refusal(folder)


def hostile(family):
    """Whole config.jsons that must be refused, by what is wrong with them."""
    good = FAMILIES[family].to_hf(small(family)[1])
    changes = each(SIZES & good.keys(), NOT_SIZES) | each(FRACTIONS & good.keys(), NOT_FRACTIONS)
    changes |= each(["model_type"], ([], None, {}, 7, "x" * 9, ["llama"]))
    changes |= {f"{k} null": {k: None} for k in (SIZES & good.keys()) - MAY_BE_ABSENT}
    changes["heads"] = {"num_attention_heads": 3, "n_head": 3, "num_key_value_heads": 3, "head_dim": None}
    changes["deep"] = {"num_hidden_layers": 10_000_000, "n_layer": 10_000_000}
    changes["quantized"] = {"quantization_config": {"quant_method": "awq"}}
    changes["as large as can be"] = dict.fromkeys(("hidden_size", "head_dim", "num_attention_heads"), 1 << 24)
    changes["as large as can be"] |= {"num_key_value_heads": 1 << 24, "n_embd": 1 << 24, "n_head": 1}
    if family != "gpt2":
        changes["key heads"] = {"num_attention_heads": 2, "num_key_value_heads": 4}
        for theta in (0, -1.0, 1.0, float("nan"), float("inf"), "1e4", [], True):
            changes[f"rope_theta {theta}"] = {"rope_theta": theta, "rope_parameters": None}
            changes[f"rope_parameters {theta}"] = {"rope_parameters": {"rope_theta": theta}, "rope_scaling": None}
        changes["rope_scaling"] = {"rope_scaling": [1]}
    if "num_experts_per_tok" in good:
        keys = {"num_local_experts", "num_experts", "n_routed_experts"} & good.keys()
        changes["too many for a token"] = {"num_experts_per_tok": good[min(keys)] + 1}
        changes["experts"] = dict.fromkeys(keys, 4096)
        changes["small experts"] = changes["experts"] | {"moe_intermediate_size": 1, "intermediate_size": 1}
        changes["small experts"] |= {"num_hidden_layers": 90}
    configs = {name: json.dumps(good | change) for name, change in changes.items()}
    for key in good.keys() & (SIZES | FRACTIONS | {"model_type"}) - MAY_BE_ABSENT:
        configs[f"no {key}"] = json.dumps({k: v for k, v in good.items() if k != key})
    return configs


FILES = {
    "nesting": b'{"a": ' * 100_000 + b"1" + b"}" * 100_000,
    "a list": b"[]",
    "nothing": b"",
    "not UTF-8": b'{"model_type": "\xff\xfe"}',
    "twice": b'{"model_type": "llama", "model_type": "gpt2"}',
    "a very long number": b'{"vocab_size": ' + b"9" * 1_000_000 + b"}",
}


def refused_all(folder, name, cases):
    """The error messages for these contents of a file."""
    messages = []
    for case, content in cases.items():
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
        messages.append(refusal(folder))
        assert messages[-1].startswith(str(folder)), case
    return messages


@pytest.fixture
def made(tmp_path):
    def folder(family, depth=2):
        model = random_model(family, vocab=265, dim=64, depth=depth, context=16)
        checkpoint.save(model, tmp_path / family, Tokenizer.train("bytes", []), 16)
        (tmp_path / family / "dunes.json").unlink()
        return tmp_path / family

    return folder


@pytest.mark.slow
def test_bad_configs_are_refused(made):
    folder = made("llama")
    cases = {f"{family}: {name}": text for family in FAMILIES for name, text in hostile(family).items()}
    refused_all(folder, CONFIG, cases | FILES)


def test_a_config_with_more_blocks_than_tensors_is_refused_before_they_are_built(made):
    folder = made("llama")
    change_config(folder, num_hidden_layers=10_000_000)
    message = refusal(folder)
    assert "the config describes 10,000,000 blocks, the files have 20 tensors" in message
    with pytest.raises(ValueError, match=re.escape(message)):
        next(line for line in describe_folder(open_model(folder)) if line.startswith("parameters"))


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_code_in_a_folder_is_not_executed(family, made):
    folder = made(family)
    (folder / "code.py").write_text(f"open({str(folder / 'ran')!r}, 'w')")
    classes = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    change_config(folder, auto_map=classes, trust_remote_code=True)
    before = set(sys.modules)
    assert checkpoint.load(folder).model
    assert not (folder / "ran").exists()
    assert "code" not in set(sys.modules) - before


PARAMS = {"dim": 64, "n_layers": 2, "n_heads": 2, "hidden_dim": 160, "vocab_size": 265, "norm_eps": 1e-5}


def test_bad_params_are_refused(made):
    folder = made("llama")
    tensors = {native_name(k): v for k, v in load_file(folder / WEIGHTS).items()}
    for file in (CONFIG, WEIGHTS):
        (folder / file).unlink()
    tensors["output.weight"] = tensors["tok_embeddings.weight"].clone()
    save_file(tensors, folder / "consolidated.safetensors")
    good = PARAMS | {"hidden_dim": tensors["layers.0.feed_forward.w1.weight"].shape[0]}
    (folder / "params.json").write_text(json.dumps(good))
    open_model(folder).weights()
    sizes = ("dim", "n_layers", "n_heads", "n_kv_heads", "head_dim", "hidden_dim")
    fractions = [v for v in NOT_FRACTIONS if v is not None]
    changes = each(sizes, NOT_SIZES) | each(["norm_eps"], fractions)
    changes |= each(["rope_theta"], [v for v in fractions if v != "1e-5"])
    changes |= each(["sliding_window"], [v for v in NOT_SIZES if v not in ("8", [8], 10**9)])
    moes = [7, "x", [], [1], {}, {"num_experts": 1}]
    moes += [{"num_experts": v, "num_experts_per_tok": 1} for v in NOT_SIZES]
    moes += [{"num_experts": 2, "num_experts_per_tok": v} for v in [*NOT_SIZES, 3]]
    changes |= {f"moe {i}": {"moe": v} for i, v in enumerate(moes) if v}
    experts = {"num_experts": 4, "num_experts_per_tok": 2}
    changes |= each(["moe"], [experts | {"shared": 1}]) | each(["sliding_window"], [[8, 16]])
    changes |= each(["yarn", "quantization"], [{"factor": 4}]) | each(["model_type"], ["mamba"])
    changes |= each(["causal"], [False]) | each(["vocab_size"], [98]) | each(["n_layers"], [10_000_000])
    changes |= each(["n_heads"], [3, 7]) | each(["n_kv_heads"], [4])
    meta = {"hidden_dim": None, "multiple_of": 32}
    factors = (float("nan"), float("inf"), -1, "x", [], 1e300)
    changes |= {f"factor {v}": meta | {"ffn_dim_multiplier": v} for v in factors}
    changes |= {f"multiple_of {str(v)[:9]}": meta | {"multiple_of": v} for v in NOT_SIZES}
    cases = {k: json.dumps({a: b for a, b in (good | v).items() if b is not None}) for k, v in changes.items()}
    for key in ("dim", "n_layers", "n_heads"):
        cases[f"no {key}"] = json.dumps({k: v for k, v in good.items() if k != key})
    messages = refused_all(folder, "params.json", cases | FILES)
    assert not [message for message in messages if "config.json" in message]


def test_mixed_dtypes_become_one(copy):
    """The config's if the files hold it, else one that holds them all."""
    folder = copy()

    kinds = cycle([torch.bfloat16, torch.float16])
    change_weights(folder, lambda t: {k: v.to(next(kinds)) for k, v in t.items()})
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        change_config(folder, dtype=str(dtype).removeprefix("torch."))
        state = checkpoint.load(folder).model.state_dict()
        assert {v.dtype for v in state.values()} == {dtype}
    assert torch.equal(state["norm.weight"], load_file(folder / WEIGHTS)["model.norm.weight"].float())
    change_config(folder, dtype=None)
    change_weights(folder, put("model.norm.weight", torch.full((32,), 0.1, dtype=torch.float64)))
    state = checkpoint.load(folder).model.state_dict()
    assert {v.dtype for v in state.values()} == {torch.float64}
