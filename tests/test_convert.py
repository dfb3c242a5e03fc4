"""Conversion of other people's files: the same bits, the same logits, or nothing."""

import json
import shutil
import threading
import warnings
from dataclasses import replace
from hashlib import sha256
from itertools import chain, repeat
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from conftest import change_json, equal_states, raising, refuses, refuses_command
from dunes.checkpoint import card as cards
from dunes.checkpoint import inspect, write
from dunes.checkpoint.convert import convert, read_name_table
from dunes.checkpoint.formats import native
from dunes.checkpoint.inspect import odd_values
from dunes.checkpoint.open import open_model, open_verified_model
from dunes.checkpoint.verify import source_logits
from dunes.checkpoint.weights import safetensors_file
from dunes.checkpoint.weights.lazy_tensor import in_memory, renamed
from dunes.files import atomic
from dunes.models import FAMILIES, written_names
from dunes.models.names import to_theirs

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import transformers

from native_files import write_native
from small_models import HF_LLAMA3, HF_SIZES, add_noise, random_model, small_config

LLAMA3 = HF_LLAMA3 | {"original_max_position_embeddings": 8192, "rope_theta": 500000.0}
KINDS = {
    "llama": ("Llama", {}),
    "tied": ("Llama", {"tie_word_embeddings": True}),
    "shardable": ("Llama", {"vocab_size": 96}),
    "llama-3.1": ("Llama", {"rope_parameters": LLAMA3, "num_key_value_heads": 1}),
    "mistral": ("Mistral", {"sliding_window": 5, "head_dim": 10}),
    "mixtral": ("Mixtral", {"num_local_experts": 4}),
}


def theirs(kind, folder, dtype=torch.float32):
    """A random tiny folder of transformers', with weights so large that every part of it matters."""
    name, changes = KINDS[kind]
    config, model = (getattr(transformers, name + part) for part in ("Config", "ForCausalLM"))
    torch.manual_seed(3)
    hf = add_noise(model(config(**HF_SIZES | changes)).eval(), 0.3).to(dtype)
    hf.save_pretrained(folder)
    return hf


@pytest.fixture
def hf(tmp_path):
    """The folder of a llama of transformers'."""
    theirs("llama", tmp_path / "hf")
    return tmp_path / "hf"


def bits(folder):
    """All weights of a Hugging Face folder."""
    return load_file(folder / "model.safetensors")


def digests(folder):
    return {p.name: sha256(p.read_bytes()).hexdigest() for p in folder.iterdir() if p.is_file()}


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_native_files_convert_bit_for_bit(kind, dtype, tmp_path):
    hf = type(theirs(kind, tmp_path / "hf", dtype)).from_pretrained(tmp_path / "hf").eval()
    write_native(tmp_path / "hf", tmp_path / "native")
    back = convert(open_model(tmp_path / "native"), tmp_path / "back")
    assert open_model(tmp_path / "native").format == "native"
    params = json.loads((tmp_path / "native" / "params.json").read_text())
    assert params.get("tied_embeddings", False) == (kind == "tied")
    assert back.relative <= 1e-5, "adjacent pairs and halves are one model"
    assert equal_states(bits(tmp_path / "hf"), bits(tmp_path / "back"))
    again = type(hf).from_pretrained(tmp_path / "back").eval()
    ids = torch.arange(20)[None]
    assert torch.equal(again(ids).logits, hf(ids).logits)


SPLIT_ON_COLUMNS = ("wo.weight", "w2.weight")


def split_over_machines(weights, count, words_in):
    """The way Meta's machines each held a part: rows of most matrices, columns of those that reduce."""
    parts = []
    for i in range(count):
        part = {}
        for key, weight in weights.items():
            if weight.dim() == 1:
                part[key] = weight
            elif key.endswith(SPLIT_ON_COLUMNS) or (key.startswith("tok_") and words_in == "columns"):
                part[key] = weight.chunk(count, 1)[i].clone()
            else:
                part[key] = weight.chunk(count, 0)[i].clone()
        parts.append(part)
    return parts


@pytest.mark.parametrize("words_in", ["rows", "columns"])
def test_shards_of_several_machines_are_one_model(words_in, tmp_path):
    """LLaMA 1 and 2 split the embedding's columns, LLaMA 3 its rows."""
    theirs("shardable", tmp_path / "hf")
    write_native(tmp_path / "hf", tmp_path / "native")
    meta = tmp_path / "meta"
    meta.mkdir()
    weights = load_file(tmp_path / "native" / "consolidated.safetensors")
    for i, part in enumerate(split_over_machines(weights | {"rope.freqs": torch.ones(4)}, 2, words_in)):
        torch.save(part, meta / f"consolidated.{i:02d}.pth")
    shutil.copy(tmp_path / "native" / "params.json", meta)
    change_json(meta / "params.json", vocab_size=-1)
    convert(open_model(meta), tmp_path / "back")
    assert equal_states(bits(tmp_path / "hf"), bits(tmp_path / "back"))
    (meta / "consolidated.00.pth").rename(meta / "consolidated.02.pth")
    refuses(r"a number occurs twice: consolidated\.01\.pth", open_model, meta)


def test_the_first_mixtral_files_stacked_and_apart(tmp_path):
    """Experts below each other, w2 turned; each file holds some of the layers' tensors."""
    theirs("mixtral", tmp_path / "hf")
    write_native(tmp_path / "hf", tmp_path / "native")
    weights = load_file(tmp_path / "native" / "consolidated.safetensors")
    stacked = {}
    for layer in range(2):
        here = f"layers.{layer}.feed_forward"
        for w in ("w1", "w2", "w3"):
            each = [weights.pop(f"{here}.experts.{e}.{w}.weight") for e in range(4)]
            stacked[f"layers.{layer}.block_sparse_moe.{w}"] = torch.cat([x.T if w == "w2" else x for x in each])
        stacked[f"layers.{layer}.block_sparse_moe.gate.weight"] = weights.pop(f"{here}.gate.weight")
    torrent = tmp_path / "native"
    (torrent / "consolidated.safetensors").unlink()
    torch.save(weights, torrent / "consolidated.00.pt")
    torch.save({k: v.clone() for k, v in stacked.items()}, torrent / "consolidated.01.pt")
    convert(open_model(torrent), tmp_path / "back")
    assert equal_states(bits(tmp_path / "hf"), bits(tmp_path / "back"))


@pytest.mark.parametrize(
    ("size", "dtype"),
    [("as a model begins", None), ("as a model begins", torch.float16), ("large", torch.bfloat16)],
)
@pytest.mark.parametrize("wrong", ["not permuted", "keys by the heads of queries"])
def test_a_wrong_permutation_does_not_pass(wrong, size, dtype, hf, tmp_path, monkeypatch):
    if size != "large":
        transformers.LlamaForCausalLM(transformers.LlamaConfig(**HF_SIZES)).save_pretrained(hf)
    write_native(hf, tmp_path / "native")
    right = native.to_halves
    broken = {"not permuted": lambda w, heads: w, "keys by the heads of queries": lambda w, heads: right(w, 2)}
    monkeypatch.setattr(native, "to_halves", broken[wrong])
    refuses("another model", convert, open_model(tmp_path / "native"), tmp_path / "back", dtype=dtype)
    assert not (tmp_path / "back").exists()


@pytest.mark.parametrize(("dtype", "least"), [(torch.bfloat16, 1e-4), (torch.float16, 1e-6)])
def test_rounding_is_measured_and_reported(dtype, least, hf, tmp_path):
    verification = convert(open_model(hf), tmp_path / "narrow", dtype=dtype)
    assert verification.relative == 0.0
    assert least < verification.rounding / verification.size < 32 * torch.finfo(dtype).eps
    assert {w.dtype for w in bits(tmp_path / "narrow").values()} == {dtype}
    card = json.loads((tmp_path / "narrow" / "dunes.json").read_text())
    assert card["converted"]["verified"]["rounding"] == verification.rounding > 0
    config = json.loads((tmp_path / "narrow" / "config.json").read_text())
    assert config["dtype"] == config["torch_dtype"] == str(dtype).removeprefix("torch.")


def test_numbers_too_large_for_the_dtype_are_refused(hf, tmp_path):
    weights = bits(hf)
    weights["model.layers.1.mlp.up_proj.weight"][3, 3] = 1e6
    save_file(weights, hf / "model.safetensors")
    narrow = tmp_path / "narrow"
    refuses("float16 cannot hold these weights", convert, open_model(hf), narrow, dtype=torch.float16)
    assert not (tmp_path / "narrow").exists()
    weights["model.layers.1.mlp.up_proj.weight"][3, 3] = float("nan")
    save_file(weights, hf / "model.safetensors")
    out = tmp_path / "new" / "deep" / "same"
    refuses("its logits are not finite; list the weights", convert, open_model(hf), out)
    assert not (tmp_path / "new").exists()


def test_the_source_is_never_touched_and_an_old_result_never_replaced(hf, tmp_path):
    before = digests(hf)
    source = open_model(hf)
    for out in (hf, hf / "inside", tmp_path):
        refuses("must not contain each other", convert, source, out)
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "mine.txt").write_text("x")
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    refuses("exists already", convert, source, tmp_path / "there")
    for name in ("file", "file/below", "link"):
        refuses("not a folder", convert, source, tmp_path / name)
    assert not (tmp_path / "new").exists()
    convert(source, tmp_path / "new")
    assert digests(hf) == before


def test_a_full_disk_leaves_nothing(hf, tmp_path, monkeypatch):
    full = raising(OSError(28, "No space left on device"))
    writers = chain([safetensors_file._bytes] * 8, repeat(full))
    monkeypatch.setattr(safetensors_file, "_bytes", lambda tensor: next(writers)(tensor))
    with pytest.raises(OSError, match=r"No space left.*model\.safetensors"):
        convert(open_model(hf), tmp_path / "out")
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr(atomic.shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(OSError, match="are needed and"):
        convert(open_model(hf), tmp_path / "out")


def test_concurrent_conversions_exclude_each_other(hf, tmp_path):
    with cards.exclusive_folder(tmp_path / "out"):
        refuses("another process is writing", convert, open_model(hf), tmp_path / "out")
    convert(open_model(hf), tmp_path / "out")
    assert equal_states(bits(hf), bits(tmp_path / "out"))


def test_a_result_that_another_process_finished_meanwhile_stays(hf, tmp_path, monkeypatch):
    out, lock = tmp_path / "out", cards.exclusive_folder

    def late(path):
        monkeypatch.undo()
        convert(open_model(hf), out)
        return lock(path)

    monkeypatch.setattr(write, "exclusive_folder", late)
    refuses("exists already", convert, open_model(hf), out, dtype=torch.bfloat16)
    assert equal_states(bits(hf), bits(out))


def test_a_save_whose_files_another_process_renames_is_not_removed(hf, tmp_path, monkeypatch):
    out, move, threads = tmp_path / "out", cards.place_files, []

    def slow(path):
        if (path / ".ready").is_dir() and not threads:
            other = lambda: refuses("exists already", convert, open_model(hf), out)
            threads.append(threading.Thread(target=other))
            threads[0].start()
            threads[0].join(0.5)
        move(path)

    monkeypatch.setattr(cards, "place_files", slow)
    convert(open_model(hf), out)
    threads[0].join()
    assert equal_states(bits(hf), bits(out))


@pytest.mark.parametrize("name", [".ready", ".unfinished"])
def test_hidden_folders_that_are_not_ours_stay(hf, tmp_path, name):
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "0.safetensors").write_text("own")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).symlink_to(tmp_path / "own")
    refuses("a symbolic link, not a folder created by dunes", convert, open_model(hf), tmp_path / "out")
    (tmp_path / "out" / name).unlink()
    (tmp_path / "own").rename(tmp_path / "out" / ".ready")  # without a card it is no save
    refuses("exists already", convert, open_model(hf), tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").rglob("*")] == [".ready", "0.safetensors"]


def test_the_card_records_the_source(hf, tmp_path):
    convert(open_model(hf), tmp_path / "a", facts={"repository": "org/name", "revision": "f" * 40})
    first = open_verified_model(tmp_path / "a")
    card = first.card | {"trained": {"steps": 3}, "changes": [{"name": "x"}]}
    convert(replace(first, card=card), tmp_path / "b")
    card = json.loads((tmp_path / "b" / "dunes.json").read_text())
    assert card["converted"]["before"]["repository"] == "org/name"
    assert (card["trained"], card["changes"]) == ({"steps": 3}, [{"name": "x"}])


FORMS = [*(f for f in FAMILIES if f != "dunes"), "llama tied", "qwen3 tied"]


@pytest.mark.parametrize("form", FORMS)
def test_every_family_converts_bit_for_bit(form, tmp_path):
    family, _, tied = form.partition(" ")
    module, sizes = FAMILIES[family], {"vocab": 97, "dim": 64, "context": 48}
    sizes |= {} if family == "gpt2" else {"tied": bool(tied)}
    model = random_model(family, **sizes)
    moves, _ = to_theirs(written_names(family, small_config(family, **sizes)), model.state_dict())
    (tmp_path / "hf").mkdir()
    safetensors_file.write_tensors(tmp_path / "hf", renamed(moves, in_memory(model.state_dict())))
    (tmp_path / "hf" / "config.json").write_text(json.dumps(module.to_hf(small_config(family, **sizes))))
    assert convert(open_model(tmp_path / "hf"), tmp_path / "out").largest_difference == 0.0
    assert equal_states(bits(tmp_path / "hf"), bits(tmp_path / "out"))
    ids = torch.randint(97, (2, 16), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert (source_logits(open_model(tmp_path / "out")) - model.eval()(ids)).abs().max() <= 1e-4


def test_a_table_of_foreign_names(hf, tmp_path):
    foreign = shutil.copytree(hf, tmp_path / "foreign")
    foreign_name = lambda key: key.replace("model.layers", "gpt.h").replace("self_attn.q_proj", "query")
    save_file({foreign_name(key): weight for key, weight in bits(hf).items()}, foreign / "model.safetensors")
    refuses(r"gpt\.h\.0\.\S+ \(\S+ is not a weight", convert, open_model(foreign), tmp_path / "out")
    parts = ["input_layernorm", "post_attention_layernorm", *(f"self_attn.{p}_proj" for p in "qkvo")]
    parts += [f"mlp.{p}_proj" for p in ("gate", "up", "down")]
    names = {foreign_name(name): name for name in (f"model.layers.{{i}}.{part}.weight" for part in parts)}
    (tmp_path / "names.json").write_text(json.dumps(names))
    convert(open_model(foreign, read_name_table(tmp_path / "names.json")), tmp_path / "out")
    assert equal_states(bits(hf), bits(tmp_path / "out"))
    for broken, words in {'{"a": 1}': "the value of 'a' must be a name", '{"{i}": "{j}"}': "j"}.items():
        (tmp_path / "names.json").write_text(broken)
        refuses(words, read_name_table, tmp_path / "names.json")
    refuses(r"no tensor is called gpt\.h\.\{i\}\.key", open_model, foreign, names | {"gpt.h.{i}.key": "x.{i}"})
    (tmp_path / "names.json").write_text(json.dumps(dict.fromkeys(names, "one.name")))
    refuses("two tensors are called", open_model, foreign, read_name_table(tmp_path / "names.json"))


def test_large_models_are_sharded(hf, tmp_path):
    weights = bits(hf)
    (tmp_path / "many").mkdir()
    safetensors_file.write_tensors(tmp_path / "many", in_memory(weights), shard=40_000)
    (tmp_path / "many" / "config.json").write_text((hf / "config.json").read_text())
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) >= 4
    assert index["metadata"]["total_size"] == sum(w.nbytes for w in weights.values())
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "many").state_dict()
    assert equal_states(weights, dict(again))
    assert torch.equal(source_logits(open_model(tmp_path / "many")), source_logits(open_model(hf)))


def test_the_library_reads_what_is_written(tmp_path):
    kinds = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool]
    tensors = {f"t{i}": torch.randn(3, i + 1).mul(9).to(kind) for i, kind in enumerate(kinds)}
    tensors |= {"scalar": torch.tensor(2.5), "empty": torch.zeros(0, 4), "turned": torch.randn(4, 3).T}
    safetensors_file.write_tensors(tmp_path, in_memory(tensors))
    assert equal_states(load_file(tmp_path / "model.safetensors"), tensors)


PARAMS = {"dim": 48, "n_layers": 2, "n_heads": 6, "norm_eps": 1e-5, "vocab_size": 97}


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({"hidden_dim": 72, "sliding_window": 8}, {"model_type": "mistral", "sliding_window": 8}),
        ({"hidden_dim": 72, "_sliding_window": "8"}, {"rope_theta": 1e4, "sliding_window": 8}),
        ({"hidden_dim": 72, "sliding_window": [8, 8]}, {"sliding_window": 8}),
        ({"hidden_dim": 72}, {"rope_theta": 1e6, "sliding_window": None, "max_position_embeddings": 32768}),
        ({"multiple_of": 16}, {"intermediate_size": 128, "model_type": "llama", "max_position_embeddings": 4096}),
        ({"multiple_of": 16, "ffn_dim_multiplier": 1.3}, {"intermediate_size": 176}),
        ({"multiple_of": 16, "norm_eps": 1e-6}, {"max_position_embeddings": 2048}),
        ({"multiple_of": 16, "rope_theta": 5e5, "use_scaled_rope": True}, {"rope_theta": 5e5}),
        (
            {"hidden_dim": 72, "moe": {"num_experts": 4, "num_experts_per_tok": 2}, "max_seq_len": 9},
            {"model_type": "mixtral", "num_local_experts": 4, "max_position_embeddings": 9},
        ),
    ],
)
def test_params_json_as_hf_config(params, expected):
    config, notes = native.to_hf_config(PARAMS | params, 97, False)
    assert {k: config[k] for k in expected} == expected
    assert ("rope_theta" in params) != any("rope_theta" in note for note in notes), "assumptions are noted"


def test_the_scaling_of_llama_3_2_is_not_that_of_3_1():
    llama3 = PARAMS | {"n_heads": 32, "multiple_of": 256, "rope_theta": 5e5, "use_scaled_rope": True}
    for dim, factor in {4096: 8.0, 2048: 32.0}.items():
        given = llama3 | {"dim": dim}
        config, notes = native.to_hf_config(given, 97, False)
        assert config["rope_scaling"]["factor"] == factor
        assert any("rope_scaling_factor" in note for note in notes)
        config, _ = native.to_hf_config(given | {"rope_scaling_factor": 3}, 97, False)
        assert config["rope_scaling"]["factor"] == 3.0


def test_the_commands(hf, tmp_path, command):
    status, out, _ = command("export", hf, tmp_path / "plain", "--to", "hf")
    assert (status, "differ by" in out, "next: dunes generate" in out) == (0, True, True)
    refuses_command("native", command("export", hf, tmp_path / "other", "--to", "native"))
    assert not (tmp_path / "other").exists()
    write_native(hf, tmp_path / "native")
    status, out, _ = command("inspect", tmp_path / "native")
    assert status == 0
    assert "native format" in out
    assert "tokenizer   none" in out
    assert command("convert", tmp_path / "native", tmp_path / "back", "--dtype", "bfloat16")[0] == 0
    refuses_command("exists already", command("convert", tmp_path / "native", tmp_path / "back"))
    refuses_command("nothing: no such folder", command("inspect", tmp_path / "nothing"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_odd_values_are_counted_by_tensor(dtype, monkeypatch):
    monkeypatch.setattr(inspect, "CHUNK", 5000)  # several parts
    limits = torch.finfo(dtype)
    odd = torch.linspace(-3, 3, 300 * 700).reshape(300, 700).to(dtype)
    odd[odd == 0] = 1
    odd[3] = 0
    odd[7, 7], odd[8, 8] = torch.nan, -torch.inf
    odd[9, 9], odd[10, 0] = limits.smallest_normal / 2, -limits.smallest_normal / 4
    odd[11, 11], odd[12, 12] = limits.max, limits.smallest_normal
    fine = torch.tensor([[1.0, 0.0], [0.0, -2.0]], dtype=dtype)
    tensors = {"odd": odd, "fine": fine, "none": torch.zeros(0, 3, dtype=dtype), "whole": torch.arange(3)}
    tensors |= {"bias": torch.zeros(4, dtype=dtype), "scalar": torch.tensor(torch.inf, dtype=dtype)}
    by_hand = int(((odd != 0) & (odd.abs() < limits.smallest_normal)).sum())
    odd = f"odd: not finite 2, denormal {by_hand}, rows of zeros 1"
    assert list(odd_values(in_memory(tensors))) == [odd, "scalar: not finite 1"]


def test_a_pickle_becomes_safetensors_bit_for_bit_and_shared_numbers_are_written_once(tmp_path):
    hf = theirs("tied", tmp_path / "hf", torch.bfloat16)
    weights = bits(tmp_path / "hf")
    state = hf.state_dict()
    assert state["lm_head.weight"].data_ptr() == state["model.embed_tokens.weight"].data_ptr()
    old = shutil.copytree(tmp_path / "hf", tmp_path / "bin")
    (old / "model.safetensors").unlink()
    torch.save(state, old / "pytorch_model.bin")
    convert(open_model(old), tmp_path / "out")
    assert equal_states(bits(tmp_path / "out"), weights)
    assert "lm_head.weight" not in bits(tmp_path / "out")
