"""GGUF files: what the `gguf` package reads in ours, what we read back, and what llama.cpp computes from them."""

import json
import random
import re
import struct
import tracemalloc
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import gguf
import numpy as np
import pytest
import tokenizers
import torch
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from conftest import equal_states, metaspace_tokenizer, raising, refuses, refuses_command
from dunes import checkpoint
from dunes.checkpoint.architecture import Architecture
from dunes.checkpoint.export import write_format
from dunes.checkpoint.formats import gguf as form
from dunes.checkpoint.inspect import judge
from dunes.checkpoint.open import open_model
from dunes.checkpoint.weights.lazy_tensor import in_memory
from dunes.parts.position import Linear, Llama3, Yarn
from dunes.text import Tokenizer, gguf_file, gguf_vocabulary, ranked_bpe, sentencepiece, templates
from dunes.text.gguf_file import build_tokenizer, read_header, special_tokens
from dunes.text.gguf_vocabulary import vocabulary_fields
from dunes.text.split_rules import GPT2, RULES
from dunes.text.tokenizer import SPECIAL
from hard_strings import HARD
from small_models import random_model, small_config
from test_tokenizer_conversion import ranked, ranks, trained

TEXT = "def main(x1):\n    return 23 * x1\r\n\n\nclass Ab:\n\tpass  # end"
SCALINGS = {"llama3": Llama3(8.0, 1.0, 4.0, 32), "yarn": Yarn(4.0, 16, 1.3), "linear": Linear(2.0)}


@pytest.fixture(scope="module")
def tokenizer():
    sources = sorted(Path(form.__file__).parents[2].rglob("*.py"))[:60]
    return Tokenizer.train("bpe", [path.read_text() for path in sources], 500)


def tiny(family, rows, **changes):
    """A random model whose weights are so large that every part of it matters, and its architecture."""
    own = {"tied": False} if family == "olmo2" else {}
    sizes = {"vocab": rows, "dim": 64, "context": 64} | own | changes
    return random_model(family, 0.15, **sizes), Architecture(family, small_config(family, **sizes))


def written(tmp_path, family, tokenizer, dtype="float32", **changes):
    model, architecture = tiny(family, tokenizer.vocab + 3, **changes)
    path = tmp_path / f"{family}.gguf"
    form.write_file(path, architecture, in_memory(model.state_dict()), tokenizer, dtype)
    return model, path


def test_a_family_that_is_not_written_is_refused_by_name(tmp_path, tokenizer):
    refuses("GGUF files cannot be written for gemma2", written, tmp_path, "gemma2", tokenizer)
    refuses("this model's is tied", written, tmp_path, "olmo2", tokenizer, tied=True)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("family", form.ARCHITECTURES)
def test_the_package_reads_each_family(family, tmp_path, tokenizer):
    model, path = written(tmp_path, family, tokenizer)
    reader = gguf.GGUFReader(path)
    value = {key: field.contents() for key, field in reader.fields.items() if "tokens" not in key}
    config, arch = model.blocks[0].attn, form.ARCHITECTURES[family]
    assert value["general.architecture"] == arch
    assert value[f"{arch}.block_count"] == 2
    assert value[f"{arch}.embedding_length"] == 64
    assert value[f"{arch}.attention.head_count"] * config.head_dim == 64
    assert value[f"{arch}.vocab_size"] == tokenizer.vocab + 3
    assert value[f"{arch}.context_length"] == (32 if family == "mistral" else 64)
    assert value.get(f"{arch}.attention.sliding_window") == (32 if family == "mistral" else None)
    assert sum(t.n_elements for t in reader.tensors) == sum(p.numel() for p in model.parameters())


def test_a_quantized_file_has_the_values_of_the_packages_own_rounding(tmp_path, tokenizer):
    for dtype, kind in (("q8_0", "Q8_0"), ("q4_0", "Q4_0"), ("bfloat16", "BF16"), ("float16", "F16")):
        model, path = written(tmp_path, "qwen3", tokenizer, dtype)
        tensors = {t.name: t for t in gguf.GGUFReader(path).tensors}
        number, weight = gguf.GGMLQuantizationType[kind], model.blocks[1].mlp.up.weight.detach().numpy()
        assert tensors["blk.1.ffn_up.weight"].tensor_type == number
        expected = gguf.dequantize(gguf.quantize(weight, number), number)
        assert np.array_equal(gguf.dequantize(tensors["blk.1.ffn_up.weight"].data, number), expected)
        assert tensors["blk.1.ffn_norm.weight"].tensor_type == gguf.GGMLQuantizationType.F32
        head = "Q8_0" if kind == "Q4_0" else kind
        assert tensors["token_embd.weight"].tensor_type == gguf.GGMLQuantizationType[head]


def test_special_tokens_and_template_are_in_the_file(tmp_path, tokenizer):
    chat = templates.attach_template(templates.TEMPLATES["chatml"], tokenizer)
    _, path = written(tmp_path, "llama", chat)
    fields = gguf.GGUFReader(path).fields
    value = {key.removeprefix("tokenizer."): fields[key].contents for key in fields}
    assert value["ggml.eos_token_id"]() == tokenizer.eos
    assert value["ggml.eot_token_id"]() == tokenizer.token_id("<|im_end|>")
    assert value["ggml.add_bos_token"]() is False
    assert value["chat_template"]() == chat.extra_files["chat_template.jinja"].decode()
    assert value["huggingface.json"]() == tokenizer.json()
    types = value["ggml.token_type"]()
    assert types[tokenizer.eos] == gguf.TokenType.CONTROL
    assert types[-3:] == [gguf.TokenType.UNUSED] * 3
    assert sum(t == gguf.TokenType.BYTE for t in types) == 128


def test_what_llama_cpp_cannot_express_is_refused(tmp_path, tokenizer):
    refuses("no biases", written, tmp_path, "qwen3", tokenizer, attention_bias=True)
    refuses("renormalises", written, tmp_path, "qwen3_moe", tokenizer, renormalise=False)
    scaling = Yarn(4.0, 16, 1.3, beta_fast=16.0)
    refuses("beta_fast", written, tmp_path, "llama", tokenizer, scaling=scaling)
    refuses("a tokenizer of type WordLevel", vocabulary_fields, Tokenizer.train("chars", ["abc"]), 20)
    model, architecture = tiny("llama", tokenizer.vocab)
    model.blocks[0].mlp.up.weight.data[0, 0] = 1e6
    state = in_memory(model.state_dict())
    refuses("F16 cannot hold", form.write_file, tmp_path / "a.gguf", architecture, state, tokenizer, "float16")


def test_what_cannot_be_exported_is_refused_in_one_line(tmp_path, tokenizer, monkeypatch):
    checkpoint.save(tiny("llama", tokenizer.vocab - 1)[0], tmp_path / "small", None, 64)
    tokenizer.save(tmp_path / "small")
    broken, _ = tiny("llama", tokenizer.vocab)
    broken.norm.weight.data[0] = float("nan")
    checkpoint.save(broken, tmp_path / "broken", tokenizer, 64)
    for source, out, reason in (
        ("small", "x.gguf", "each id needs a row"),
        ("broken", "x.gguf", "inspect --values"),
        ("small", "x", "x.gguf"),
    ):
        refuses(reason, write_format, tmp_path / source, tmp_path / out, "gguf")
    assert not list(tmp_path.glob("x*"))


def damage_values(monkeypatch, name):
    """The lowest bits of that tensor's first and last byte are written wrong."""
    encode = form._encode

    def write_damaged(tensor, number):
        data, values = encode(tensor, number)
        if name in tensor.origin:
            data = data.copy()
            data.view(np.uint8).reshape(-1)[[0, -1]] ^= 1
        return data, values

    monkeypatch.setattr(form, "_encode", write_damaged)


@pytest.mark.parametrize("name", ["embed_tokens", "model.norm"])
@pytest.mark.parametrize("dtype", form.TYPES)
def test_a_file_with_other_values_is_not_kept(dtype, name, tmp_path, tokenizer, monkeypatch):
    checkpoint.save(tiny("llama", tokenizer.vocab)[0], tmp_path / "model", tokenizer, 64)
    damage_values(monkeypatch, name)
    out = tmp_path / "made" / "model.gguf"
    refuses("the written file has other values", write_format, tmp_path / "model", out, "gguf", dtype)
    assert not list(out.parent.iterdir())


def test_queries_and_keys_have_the_rows_of_llama_cpp():
    """The rows as its converter permutes them: two halves of each head become pairs."""
    architecture = tiny("llama", 300)[1]
    rules = {rule.ours[0]: rule for rule in form.weight_names(architecture)}
    for name, heads in (("q", architecture.config.heads), ("k", architecture.config.kv_heads)):
        weight = torch.randn(heads * 8, 5)
        theirs = weight.reshape(heads, 2, 4, 5).swapaxes(1, 2).reshape(-1, 5)
        rule = rules[f"blocks.{{i}}.attn.{name}.weight"]
        assert torch.equal(rule.save(weight), theirs)
        assert torch.equal(rule.load(theirs), weight)


# --- read back


def reference(model, dtype):
    """The weights after rounding to a type, by the package; vectors, routers and learned positions are exact."""

    def rounded(name, weight):
        prefix = "token_embd" if name.startswith(("embed.token", "head")) else "blk."
        kind = form._type(prefix, weight.shape, dtype)
        if "router" in name or "place" in name or weight.dim() == 1:
            return weight
        number = gguf.GGMLQuantizationType[kind]
        return torch.from_numpy(gguf.dequantize(gguf.quantize(weight.numpy(), number), number))

    return {name: rounded(name, weight) for name, weight in model.state_dict().items()}


KINDS = [*form.TYPES]
READ_BACK = [
    (family, kind)
    for i, family in enumerate(form.ARCHITECTURES)
    for kind in (KINDS if family == "llama" else {KINDS[i % len(KINDS)], KINDS[(i + 2) % len(KINDS)]})
]
"""All types of one family, two of each other one."""


@pytest.mark.parametrize(("family", "dtype"), sorted(READ_BACK))
def test_each_family_and_type_is_read_back(family, dtype, tmp_path, tokenizer):
    model, path = written(tmp_path, family, tokenizer, dtype)
    loaded = checkpoint.load(path)
    state, expected = loaded.model.state_dict(), reference(model, form.TYPES[dtype])
    stated = {"float16": torch.float16, "bfloat16": torch.bfloat16}.get(dtype, torch.float32)
    assert state.keys() == expected.keys()
    assert all(state[k].dtype == stated and torch.equal(state[k], w.to(stated)) for k, w in expected.items())
    assert loaded.architecture.family == family
    assert loaded.tokenizer.json() == tokenizer.json()
    assert (loaded.tokenizer.eos, loaded.tokenizer.bos) == (tokenizer.eos, tokenizer.bos)
    config = replace(loaded.architecture.config, **({} if family == "gpt2" else {"context_length": 64}))
    assert config == tiny(family, tokenizer.vocab + 3)[1].config


CONFIGS = [
    *(("llama", {"scaling": scaling}) for scaling in SCALINGS.values()),
    ("llama", {"tied": False, "heads": 2, "kv_heads": 1, "attention_bias": True, "mlp_bias": True}),
    ("qwen3", {"tied": False, "kv_heads": 1, "head_dim": 48, "eps": 1e-6, "rope_base": 1e6}),
    ("gpt2", {"hidden": 96}),
]


@pytest.mark.parametrize(("family", "changes"), CONFIGS)
def test_each_part_of_a_config_is_read_back(family, changes, tmp_path, tokenizer):
    model, path = written(tmp_path, family, tokenizer, **changes)
    loaded = checkpoint.load(path)
    assert loaded.architecture.config == tiny(family, tokenizer.vocab + 3, **changes)[1].config
    assert all(torch.equal(w, model.state_dict()[k]) for k, w in loaded.model.state_dict().items())


@pytest.mark.parametrize(
    ("keys", "kind", "factor"),
    [
        ({"scaling.factor": 4.0}, "linear", 4.0),  # llama.cpp reads a file without a type as linear
        ({"scale_linear": 2.0}, "linear", 2.0),
        ({"scaling.type": "linear", "scaling.factor": 0.0, "scale_linear": 8.0}, "linear", 8.0),
        *((keys, None, None) for keys in ({"scaling.type": "none", "scaling.factor": 4.0}, {})),
        *((keys, None, None) for keys in ({"scaling.factor": 1.0}, {"scaling.type": "linear"})),
        ({"scaling.type": "yarn"}, "yarn", 1.0),
        ({"scaling.type": "yarn", "scale_linear": 4.0}, "yarn", 4.0),
        ({"scaling.type": "yarn", "scaling.factor": 0.0}, "yarn", 1.0),
    ],
)
def test_scaling_without_some_of_its_keys(keys, kind, factor):
    read = lambda keys: form._rope_scaling(
        {"hidden_size": 64, "num_attention_heads": 2}, {f"rope.{key}": value for key, value in keys.items()}, {}
    )
    rope = read(keys).get("rope_scaling", {})
    assert (rope.get("rope_type"), rope.get("factor")) == (kind, factor)
    if kind:
        refuses("factor is '4'", read, keys | {"scaling.factor": "4"})


def test_divisors_of_another_scaling_are_refused(tmp_path, tokenizer):
    _, path = written(tmp_path, "llama", tokenizer, scaling=Llama3(8.0, 2.0, 4.0, 32))
    refuses(r"llama\.gguf: rope_freqs\.weight is not LLaMA 3's scaling", checkpoint.load, path)


def test_the_header_is_what_the_package_reads(tmp_path, tokenizer):
    _, path = written(tmp_path, "llama", tokenizer, "q8_0", scaling=SCALINGS["yarn"])
    header, theirs = read_header(path), gguf.GGUFReader(path)
    for key, field in theirs.fields.items():
        if key.startswith("GGUF."):
            continue
        value = header.fields[key]
        if key == "tokenizer.ggml.tokens":
            assert value == [field.parts[i].tobytes() for i in field.data]
        elif isinstance(value, np.ndarray):
            assert value.tolist() == field.contents()
        else:
            assert value == pytest.approx(field.contents())
    assert [(t.name, t.shape[::-1], t.type, t.offset) for t in header.tensors] == [
        (t.name, tuple(t.shape.tolist()), t.tensor_type, t.data_offset) for t in theirs.tensors
    ]


def test_a_file_that_was_replaced_is_read_again(tmp_path, tokenizer):
    _, path = written(tmp_path, "llama", tokenizer)
    _, other = written(tmp_path, "qwen2", tokenizer)
    for expected in ("llama", "qwen2"):
        assert checkpoint.load(path).architecture.family == expected
        path.write_bytes(other.read_bytes())


def test_every_command_takes_a_file(tmp_path, tokenizer, command):
    chat = templates.attach_template(templates.TEMPLATES["chatml"], tokenizer)
    model, path = written(tmp_path, "qwen2", chat, "bfloat16")
    status, described, _ = command("inspect", path)
    assert status == 0
    assert "GGUF format" in described
    assert command("generate", path, "def ", "--max-tokens", "4")[0] == 0
    assert command("convert", path, tmp_path / "hf")[0] == 0
    loaded = checkpoint.load(tmp_path / "hf")
    assert torch.equal(loaded.model.embed.token.weight, model.embed.token.weight.bfloat16())
    assert loaded.tokenizer.stops == chat.stops
    assert templates.find_template(loaded.tokenizer, {}).source == chat.extra_files["chat_template.jinja"].decode()
    assert command("export", path, tmp_path / "again.gguf")[0] == 0
    again, before = (read_header(p).fields for p in (tmp_path / "again.gguf", path))
    assert {k: str(v) for k, v in again.items()} == {k: str(v) for k, v in before.items()}


@pytest.mark.parametrize("kind", gguf.GGMLQuantizationType, ids=lambda kind: kind.name)
def test_every_type_that_the_package_dequantizes_is_read_and_others_are_refused_by_name(kind, tmp_path):
    block, size = gguf.GGML_QUANT_SIZES[kind]
    rng, path = np.random.default_rng(kind), tmp_path / "x.gguf"
    stored = rng.integers(0, 256, (3, 5 * size), dtype=np.uint8)
    path.write_bytes(tensor_file((b"a", (5 * block, 3), int(kind), 0)))
    start = read_header(path).tensors[0].offset
    with path.open("r+b") as file:
        file.seek(start)
        file.write(stored.tobytes())
    try:
        with np.errstate(all="ignore"):
            expected = gguf.dequantize(stored, kind)
    except NotImplementedError:
        refuses(rf"'a' has the unsupported type {kind.name}; .*llama-quantize", form.tensors, path)
        return
    with np.errstate(all="ignore"):
        found = form.tensors(path)["a"].read()
    assert found.shape == expected.shape == (3, 5 * block)
    np.testing.assert_array_equal(found.float().numpy(), expected.astype(np.float32))  # NaN equals NaN


def test_a_model_larger_than_memory_is_refused_before_a_weight_is_read(tmp_path, tokenizer, monkeypatch):
    _, path = written(tmp_path, "llama", tokenizer, "q8_0")
    folder = tmp_path / "folder"
    loaded = checkpoint.load(path)
    checkpoint.save(loaded.model.bfloat16(), folder, loaded.tokenizer, loaded.context_length)
    monkeypatch.setattr("dunes.measure.free_memory", lambda device: 100_000)
    monkeypatch.setattr("dunes.checkpoint.weights.lazy_tensor.MappedFile.tensor", raising(AssertionError("read")))
    assert "--dtype bfloat16" in refuses(rf"{path}: the weights take .* are free", checkpoint.load, path)
    assert "--dtype" not in refuses(rf"{folder}: the weights take .* are free", checkpoint.load, folder)
    for source in map(open_model, (path, folder)):
        assert "are free" in "".join(judge(source).reasons)
    monkeypatch.undo()
    monkeypatch.setattr("dunes.measure.free_memory", lambda device: 0)  # unknown
    checkpoint.load(path)


def write_parts(tmp_path, tokenizer, monkeypatch):
    """A model in three files, the path of the first."""
    monkeypatch.setattr(gguf, "GGUFWriter", partial(gguf.GGUFWriter, split_max_tensors=10))
    monkeypatch.setattr(form, "_verify", lambda *file: None)
    model, path = written(tmp_path, "qwen2", tokenizer, "q8_0")
    return model, path.with_name("qwen2-00001-of-00003.gguf")


def test_a_model_in_several_parts_is_read_by_its_first(tmp_path, tokenizer, monkeypatch):
    (whole := tmp_path / "whole").mkdir()
    _, path = written(whole, "qwen2", tokenizer, "q8_0")
    _, first = write_parts(tmp_path, tokenizer, monkeypatch)
    state, expected = (checkpoint.load_with_tokenizer(p).model.state_dict() for p in (first, path))
    assert equal_states(state, expected)
    second, third = (first.with_name(f"qwen2-0000{i}-of-00003.gguf") for i in (2, 3))
    renamed = first.with_name("renamed.gguf")
    renamed.write_bytes(first.read_bytes())
    for other in (second, renamed):
        words = rf"{other.name}: one of 3 parts; pass the first.*-00001-of-00003\.gguf"
        refuses(words, checkpoint.load_with_tokenizer, other)
    third.write_bytes(second.read_bytes())
    refuses("two tensors are called", checkpoint.load, first)
    third.unlink()
    refuses(r"qwen2-00003-of-00003\.gguf is missing", checkpoint.load_with_tokenizer, first)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["lora", "qlora"])
def test_an_adapter_of_a_file_opens_with_it_alone(method, tmp_path, tokenizer, command):
    (home := tmp_path / "home").mkdir()
    _, path = written(home, "llama", tokenizer, "q8_0")
    rows = "".join(f'{{"instruction": "Say {i}", "output": "b"}}\n' for i in range(40))
    (data := tmp_path / "data.jsonl").write_text(rows)
    options = ("--data", data, "--method", method, "--steps", 2, "--lr", 0.02)
    assert command("finetune", path, *options, "--out", home / "run")[0] == 0
    alone = (home / "run").rename(tmp_path / "alone")  # the base has its absolute path
    assert command("augment", "merge", alone, tmp_path / "merged")[0] == 0
    alone.rename(home / "run")
    moved = home.rename(tmp_path / "moved")  # the base has its path from the adapter
    adapted, merged, base = (
        checkpoint.load(place).model(torch.tensor([[1, 2, 3]]))
        for place in (moved / "run", tmp_path / "merged", moved / path.name)
    )
    assert (adapted - merged).abs().max() < 1e-5 * merged.abs().max() < (adapted - base).abs().max()
    written(moved, "llama", tokenizer, "q4_0")
    refuses("made for a different base", checkpoint.load, moved / "run")
    (moved / path.name).unlink()
    refuses_command("its base", command("chat", moved / "run"))


# --- tokenizers of other models


def byte_level(name):
    """A byte-level tokenizer that splits text by one of llama.cpp's rules."""
    tokenizer = Tokenizer(tokenizers.Tokenizer.from_str(trained_by_rule(name)))
    tokenizer.split_rule = name
    return tokenizer


@cache
def trained_by_rule(name):
    inner = tokenizers.Tokenizer(models.BPE(ignore_merges=RULES[name].whole_words))
    patterns = RULES[name].patterns
    ends = patterns[-1] == GPT2  # as in the original tokenizers
    words = [pre_tokenizers.Split(tokenizers.Regex(p), "isolated") for p in patterns[: len(patterns) - ends]]
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=ends)
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.Sequence([*words, level]), decoders.ByteLevel()
    alphabet, options = sorted(level.alphabet()), {"special_tokens": ["<|endoftext|>"], "show_progress": False}
    inner.train_from_iterator(HARD, trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, **options))
    inner.add_tokens([tokenizers.AddedToken("<tool>", normalized=False)])
    return inner.to_str()


FOREIGN = {
    **{name: partial(byte_level, name) for name, rule in RULES.items() if not rule.metaspace},
    "llama 3": lambda: Tokenizer(ranked_bpe.convert_llama3(ranked(ranks()))),
    "sentencepiece": lambda: Tokenizer(sentencepiece.convert(trained("byte pairs"))),
    "no prefix": lambda: Tokenizer(sentencepiece.convert(trained("byte pairs, no prefix"))),
    "symbols": lambda: Tokenizer(sentencepiece.convert(trained("byte pairs, symbols"))),
}


SOME = [pytest.param(name, marks=[pytest.mark.slow] * (i % 4 > 0)) for i, name in enumerate(FOREIGN)]
"""All of them, every fourth in the fast suite."""


@pytest.mark.parametrize("name", SOME)
@pytest.mark.filterwarnings("ignore:.*llama.cpp")
def test_a_tokenizer_is_built_from_the_tokens_of_a_file(name, tmp_path):
    before = FOREIGN[name]()
    _, path = written(tmp_path, "llama", before)
    fields = {k: v for k, v in read_header(path).fields.items() if k != "tokenizer.huggingface.json"}
    after = Tokenizer(build_tokenizer(fields, None), special_tokens(fields))
    assert [after.encode(text) for text in HARD] == [before.encode(text) for text in HARD]
    assert (after.bos, after.eos, after.stops) == (before.bos, before.eos, before.stops)
    ids = list(range(before.vocab))
    assert after.decode(ids) == before.decode(ids)


def test_the_first_of_two_equal_merges_counts():
    merges = ["a b", "b c", "a b"]
    inner = gguf_file.byte_pairs([*"abc", "ab", "bc"], [1] * 5, merges, "gpt-2")
    assert inner.encode("abc").tokens == ["ab", "c"]


PLAIN = {"tokenizer.ggml.tokens": [b"x"] * 12, "tokenizer.ggml.model": "gpt2"}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"model": "llama"}, ((1,), 2)),
        ({"model": "llama", "bos_token_id": 3, "eos_token_id": 4}, ((3,), 4)),
        ({"model": "llama", "add_bos_token": False}, ((), 2)),
        ({"model": "gemma4", "add_bos_token": False, "bos_token_id": 5}, ((5,), None)),
        ({"pre": "llama-bpe"}, "bos_token_id"),
        ({"add_bos_token": True}, "bos_token_id"),
        ({"add_eos_token": True}, "eos_token_id"),
        ({}, ((), None)),
    ],
)
def test_special_ids_that_a_header_leaves_out(fields, expected):
    fields = PLAIN | {f"tokenizer.ggml.{key}": value for key, value in fields.items()}
    if isinstance(expected, str):
        refuses(expected, special_tokens, fields)
    else:
        special = special_tokens(fields)
        assert (special.bos, special.eos) == expected


def test_tokenizers_that_llama_cpp_has_no_algorithm_for_are_refused():
    refuses("no tokens for bytes", vocabulary_fields, metaspace_tokenizer(), metaspace_tokenizer().vocab)
    other, digits = byte_level("gpt-2"), pre_tokenizers.Digits()
    for steps in ([pre_tokenizers.ByteLevel(add_prefix_space=True)], [LEVEL, digits], [digits, LEVEL]):
        other.inner.pre_tokenizer = pre_tokenizers.Sequence(steps)
        refuses("in another way", vocabulary_fields, other, other.vocab)


def changed(tokenizer, **parts):
    """The tokenizer with other parts of its tokenizer.json; those of the model are merged into it."""
    content = json.loads(tokenizer.json())
    content["model"] |= parts.pop("model", {})
    return Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(content | parts)))


def step(kind, *settings, **named):
    """A part of a tokenizer.json by its class in the library."""
    return json.loads(kind(*settings, **named).__getstate__())


def template(text, *tokens):
    pairs = [(token, i) for i, token in enumerate(tokens)]
    return step(processors.TemplateProcessing, single=text, special_tokens=pairs)


NORMALIZERS = {
    **{name: step(getattr(normalizers, name)) for name in ("NFKC", "NFD", "NFKD", "Lowercase", "Strip")},
    "Replace": step(normalizers.Replace, "``", "a"),
    "Lowercase, in a sequence": step(normalizers.Sequence, [normalizers.NFC(), normalizers.Lowercase()]),
}
LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False)
UNSAID = {
    **{f"normalizer has {name.partition(',')[0]}": {"normalizer": part} for name, part in NORMALIZERS.items()},
    "pre_tokenizer has Whitespace": {"pre_tokenizer": step(pre_tokenizers.Whitespace)},
    "dropout 0.5": {"model": {"dropout": 0.5}},
    "end_of_word_suffix '</w>'": {"model": {"end_of_word_suffix": "</w>"}},
}  # fmt: skip


@pytest.mark.parametrize("reason", UNSAID)
@pytest.mark.parametrize("name", ["own", "gpt-2", "sentencepiece"])
@pytest.mark.filterwarnings("ignore:.*llama.cpp")
def test_settings_that_llama_cpp_lacks_are_refused_for_the_ids_that_differ(reason, name, tokenizer):
    if name != "gpt-2" and "_tokenizer" in reason:
        pytest.skip("another kind of tokenizer then")
    other = changed(tokenizer if name == "own" else FOREIGN[name](), **UNSAID[reason])
    refuses("--to hf", vocabulary_fields, other, other.vocab)


@pytest.mark.parametrize("flag", ["lstrip", "rstrip", "single_word"])
@pytest.mark.parametrize("special", [True, False])
def test_added_tokens_that_take_spaces_are_refused_for_the_ids_that_differ(flag, special, tmp_path, tokenizer):
    other = Tokenizer(tokenizers.Tokenizer.from_str(tokenizer.json()))
    other.inner.add_tokens([tokenizers.AddedToken("<mask>", special=special, **{flag: True})])
    checkpoint.save(tiny("llama", other.vocab)[0], tmp_path / "model", other, 64)
    refuses(r"<mask>.* as ids .*--to hf", write_format, tmp_path / "model", tmp_path / "x.gguf", "gguf")
    assert not (tmp_path / "x.gguf").exists()


END = "<|endoftext|>"
DIFFERENT = {  # nothing in their settings is unusual
    "a word of pieces": ("sentencepiece", {"pre_tokenizer": step(pre_tokenizers.Metaspace)}, "read .* as ids"),
    "pieces": ("sentencepiece", {"pre_tokenizer": step(pre_tokenizers.Split, "e", "isolated")}, "read .* as ids"),
    "merged": ("gpt-2", {"pre_tokenizer": step(pre_tokenizers.Split, "a", "merged_with_next")}, "in another way"),
    "whole words": ("gpt-2", {"model": {"ignore_merges": True}}, "ignore_merges True"),
    "unknown": ("gpt-2", {"model": {"unk_token": "!"}}, "read .* as ids"),
    "no fallback": ("sentencepiece", {"model": {"byte_fallback": False}}, "no tokens for bytes"),
    "other after": ("gpt-2", {"post_processor": template(f"$A {END} {END}", END)}, "post_processor adds"),
    "two before": ("gpt-2", {"post_processor": template(f"{END} {END} $A", END)}, "post_processor adds"),
}  # fmt: skip


@pytest.mark.parametrize("case", DIFFERENT)
@pytest.mark.filterwarnings("ignore:.*llama.cpp")
def test_other_ids_of_llama_cpp_are_found(case):
    name, parts, reason = DIFFERENT[case]
    other = changed(FOREIGN[name](), **parts)
    refuses(reason, vocabulary_fields, other, other.vocab)


def test_a_vocabulary_in_another_order_is_found(tokenizer, monkeypatch):
    scores = gguf_vocabulary._scores
    monkeypatch.setattr(gguf_vocabulary, "_scores", lambda *model: [-s for s in scores(*model)])
    refuses(r"llama\.cpp would read .* as ids", vocabulary_fields, tokenizer, tokenizer.vocab)


NFC = {"normalizer": step(normalizers.NFC)}


@pytest.mark.parametrize(
    ("name", "parts", "reason"),
    [
        *((name, NFC, "to NFC: decomposed accents") for name in ("own", "gpt-2")),
        *(("symbols", {}, "other spaces around"), ("tekken", {}, "at combining marks")),
    ],
)
def test_what_llama_cpp_reads_or_splits_otherwise_is_a_warning(name, parts, reason, tokenizer):
    other = changed(tokenizer if name == "own" else FOREIGN[name](), **parts)
    with pytest.warns(UserWarning, match=reason):
        vocabulary_fields(other, other.vocab)


@pytest.mark.parametrize("text", [f"{END} $A", f"$A {END}", f"{END} $A {END}"])
def test_what_stands_around_a_text_is_written(text):
    before = FOREIGN["gpt-2"]()
    marks = {"single": text, "special_tokens": [(END, before.eos)]}
    other = changed(before, post_processor=step(processors.TemplateProcessing, **marks))
    fields = vocabulary_fields(other, other.vocab)
    assert fields["ggml.add_bos_token"] == text.startswith(END)
    assert fields["ggml.add_eos_token"] == text.endswith(END)
    assert fields["ggml.eos_token_id"] == fields.get("ggml.bos_token_id", other.eos) == other.eos


@pytest.mark.parametrize("name", ["own", *SOME])
@pytest.mark.filterwarnings("ignore:.*llama.cpp")
def test_llama_cpps_algorithm_in_python_gives_the_ids_of_hard_texts(name, tokenizer):
    before = tokenizer if name == "own" else FOREIGN[name]()
    encode = gguf_vocabulary.encoder(vocabulary_fields(before, before.vocab))
    for text in (text for text in HARD if len(text) < 700):
        if (name == "own" and not text.isascii()) or (name == "symbols" and "REF" in text) or "<sep" in text:
            continue
        assert encode(text, False) == before.encode(text), text


DAMAGED = [
    ("ggml.tokens", lambda v: v[:-3], "token_type"),
    ("ggml.tokens", lambda v: [*v[:9], v[0], *v[10:]], r"tokens\[0\] and \[9\]"),
    ("ggml.tokens", lambda v: [*v[:9], b"\xff\xfe", *v[10:]], "0xff"),
    ("ggml.token_type", lambda v: [9, *v[1:]], r"token_type\[0\]"),
    ("ggml.token_type", lambda v: [1.5] * len(v), "token_type"),
    ("ggml.merges", lambda v: [*v[:5], "a qqq"], r"merges\[5\]"),
    ("ggml.merges", lambda v: None, "merges"),
    ("ggml.bos_token_id", lambda v: 99999, "bos_token_id"),
    ("ggml.eos_token_id", lambda v: "x", "eos_token_id"),
    ("ggml.add_bos_token", lambda v: 2, "add_bos_token"),
    ("ggml.pre", lambda v: "x", "'x'"),
    ("chat_template", lambda v: 7, "chat_template"),
    ("huggingface.json", lambda v: Tokenizer.train("chars", [TEXT]).json(), "not the tokenizer of"),
    ("huggingface.json", lambda v: "{}", "huggingface.json"),
]
"""A key, what becomes of its value, and what the message names."""


@pytest.mark.slow
@pytest.mark.parametrize(("key", "damage", "reason"), DAMAGED)
def test_a_damaged_vocabulary_is_named_by_key_and_id(key, damage, reason, tmp_path, monkeypatch, capfd):
    fields = form._fields

    def damaged(*model):
        made = {k: v for k, v in fields(*model).items() if not k.endswith("huggingface.json")}
        made[f"tokenizer.{key}"] = damage(made.get(f"tokenizer.{key}", 0))
        return {k: v for k, v in made.items() if v is not None}

    monkeypatch.setattr(form, "_fields", damaged)
    _, path = written(tmp_path, "llama", FOREIGN["gpt-2"]())
    refuses(rf"llama\.gguf: not a tokenizer: .*{reason}", checkpoint.load_with_tokenizer, path)
    assert "panicked" not in capfd.readouterr().err


# --- hostile files


def packed(*values):
    """Little-endian bytes: an int has 8, a pair of a letter of `struct` and a number has its size."""
    parts = [struct.pack("<Q", v) if isinstance(v, int) else v for v in values]
    return b"".join(p if isinstance(p, bytes) else struct.pack(f"<{p[0]}", p[1]) for p in parts)


HEAD = b"GGUF" + packed(("I", 3))
TEXT_KEY = packed(20, b"general.architecture", ("I", 8))
HOSTILE = {
    "magic": b"GGML" + bytes(100),
    "version": b"GGUF" + packed(("I", 1 << 24), 0, 0),
    "many tensors": HEAD + packed(1 << 60, 0),
    "a long key": HEAD + packed(0, 1, 1 << 62, b"x"),
    "a long string": HEAD + packed(0, 1) + TEXT_KEY + packed(1 << 40, b"llama"),
    "a long array": HEAD + packed(0, 1, 1, b"a", ("I", 9), ("I", 6), 1 << 61),
    "arrays in an array": HEAD + packed(0, 1, 1, b"a", ("I", 9), ("I", 9), 1 << 40),
    "an unknown type": HEAD + packed(0, 1, 1, b"a", ("I", 77)),
    "a key that occurs twice": HEAD + packed(0, 2) + 2 * packed(1, b"a", ("I", 7), b"\1"),
    "many dimensions": HEAD + packed(1, 0, 1, b"w", ("I", 1 << 31)),
    "text that is none": HEAD + packed(0, 1) + TEXT_KEY + packed(2, b"\xff\xfe"),
    "alignment 0": HEAD + packed(0, 1, 17, b"general.alignment", ("I", 4), ("I", 0)),
}


def tensor_file(*tensors, architecture=b"llama"):
    info = lambda name, dims, kind, offset: packed(len(name), name, ("I", len(dims)), *dims, ("I", kind), offset)
    infos = b"".join(info(*tensor) for tensor in tensors)
    return HEAD + packed(len(tensors), 1) + TEXT_KEY + packed(len(architecture), architecture) + infos + bytes(99)


HOSTILE |= {
    "a tensor past the end": tensor_file((b"token_embd.weight", (64, 1 << 20), 0, 0)),
    "a tensor far away": tensor_file((b"token_embd.weight", (1, 1), 0, (1 << 64) - 64)),
    "a huge tensor": tensor_file((b"token_embd.weight", (1 << 63, 1 << 63, 1 << 63, 1 << 63), 0, 0)),
    "an unknown type of tensor": tensor_file((b"token_embd.weight", (1, 1), 999, 0)),
    "half a block": tensor_file((b"token_embd.weight", (33, 1), 8, 0)),
    "no dimensions": tensor_file((b"token_embd.weight", (), 0, 0)),
    "a name that occurs twice": tensor_file((b"w", (1,), 0, 0), (b"w", (1,), 0, 0)),
    "a name of a path": tensor_file((b"../w", (1,), 0, 0)),
    "no embedding": tensor_file((b"w", (1,), 0, 0)),
    "another architecture": tensor_file((b"token_embd.weight", (1, 1), 0, 0), architecture=b"mamba"),
    "no settings": tensor_file((b"token_embd.weight", (1, 1), 0, 0)),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_refused_in_one_line_and_without_memory(name, tmp_path):
    path = tmp_path / "hostile.gguf"
    path.write_bytes(HOSTILE[name])
    with Path(path).open("r+b") as file:
        file.truncate(max(len(HOSTILE[name]), 4 << 30) if "long" in name else len(HOSTILE[name]))  # a hole
    tracemalloc.start()
    refuses(r"hostile\.gguf: ", checkpoint.load, path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 5_000_000


def test_a_file_that_is_cut_anywhere_is_refused(tmp_path, tokenizer):
    _, path = written(tmp_path, "gpt2", tokenizer)
    data = path.read_bytes()
    for end in [*range(60), *range(60, len(data), len(data) // 40), len(data) - 40]:
        path.write_bytes(data[:end])
        refuses("gguf", checkpoint.load, path)


# --- llama.cpp


@pytest.fixture
def llama(monkeypatch):
    """Opens a file with llama.cpp, all in float32.

    Without `use_extra_bufts`, its kernels for AMX, which crash with quantized weights, are left out.
    """
    llama_cpp = pytest.importorskip("llama_cpp")
    defaults = llama_cpp.llama_model_default_params

    def without_amx():
        parameters = defaults()
        parameters.use_extra_bufts = False
        return parameters

    monkeypatch.setattr(llama_cpp.llama_cpp, "llama_model_default_params", without_amx)
    options = {"n_ctx": 64, "n_threads": 1, "logits_all": True, "verbose": False, "type_k": 0, "type_v": 0}
    return lambda path: llama_cpp.Llama(str(path), **options)


def scores_of(other, ids):
    other.eval(ids)
    return torch.from_numpy(np.array(other.scores[: len(ids)]))


@pytest.mark.slow
@pytest.mark.llama_cpp
@pytest.mark.parametrize(("family", "changes"), [*((family, {}) for family in form.ARCHITECTURES), *CONFIGS])
def test_llama_cpp_gives_the_same_logits_and_greedy_tokens(family, changes, tmp_path, tokenizer, llama):
    model, path = written(tmp_path, family, tokenizer, **changes)
    other, ids = llama(path), tokenizer.encode(TEXT)[:24]
    assert other.tokenize(TEXT.encode(), add_bos=False) == tokenizer.encode(TEXT)
    assert other.detokenize(tokenizer.encode(TEXT)) == TEXT.encode()
    with torch.no_grad():
        for _ in range(8):
            ours = model(torch.tensor([ids]))[0]
            ids.append(int(ours[-1].argmax()))
    theirs = scores_of(other, ids[:-1])
    # Its GELU is a table of float16 values.
    assert (theirs - ours).abs().max() < (1e-3 if family == "gpt2" else 5e-6) * ours.abs().max()
    assert theirs.argmax(-1).tolist() == ours.argmax(-1).tolist()


def quantize_with_llama_cpp(source, out, ftype):
    import llama_cpp

    parameters = llama_cpp.llama_model_quantize_default_params()
    parameters.ftype, parameters.allow_requantize, parameters.nthread = ftype, True, 1
    assert llama_cpp.llama_model_quantize(str(source).encode(), str(out).encode(), parameters) == 0


@pytest.mark.slow
@pytest.mark.llama_cpp
@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K_M", "Q4_K_M", "Q5_K_M", "Q6_K", "IQ4_XS"])
def test_files_that_llama_cpp_quantized_have_its_values(kind, tmp_path, tokenizer, llama):
    _, path = written(tmp_path, "llama", tokenizer, dim=256, hidden=512, heads=4, kv_heads=4)
    small, dense = tmp_path / "small.gguf", tmp_path / "dense.gguf"
    quantize_with_llama_cpp(path, small, gguf.LlamaFileType[f"MOSTLY_{kind}"])
    quantize_with_llama_cpp(small, dense, gguf.LlamaFileType.ALL_F32)
    ours, theirs = form.tensors(small), form.tensors(dense)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert (tensor.read() - theirs[name].read()).abs().max() <= 1e-6 * theirs[name].read().abs().max()
    ids = tokenizer.encode(TEXT)
    with torch.no_grad():
        logits = checkpoint.load(small).model(torch.tensor([ids]))[0]
    for file, limit in ((dense, 5e-6), (small, 1e-1)):  # the latter rounds what it multiplies, too
        assert (scores_of(llama(file), ids) - logits).norm() < limit * logits.norm()


KEYS = [
    key.removeprefix("{arch}.")
    for group in vars(gguf.Keys).values()
    for key in (vars(group).values() if isinstance(group, type) else ())
    if isinstance(key, str) and key.startswith("{arch}.")
]
"""All keys of an architecture that llama.cpp knows."""
CHANGE_LOGITS = {
    **{f"rope.scaling.{key}": 0.5 for key in ("yarn_ext_factor", "yarn_attn_factor", "attn_factor")},
    **dict.fromkeys(("logit_scale", "embedding_scale", "residual_scale", "expert_weights_scale"), 0.5),
    **dict.fromkeys(("attention.clamp_kqv", "attention.max_alibi_bias", "final_logit_softcapping"), 8.0),
    "attention.causal": False,
    "attention.scale": 0.3,
    "attention.value_length": 24,
    "expert_gating_func": 2,
    "a.key.of.tomorrow": 0,
}


@pytest.mark.parametrize("architecture", sorted({*form.ARCHITECTURES.values()}))
def test_every_key_of_llama_cpp_is_read_or_without_effect_or_refused_by_name(architecture):
    gpt2 = architecture == "gpt2"
    sizes = {"embedding_length": 64, "attention.head_count": 4}
    more = () if gpt2 else form.ROPE_KEYS
    check = lambda key, value: form._refuse_other_keys(architecture, sizes | {key: value})
    read = {*(form.GPT2_KEYS if gpt2 else form.KEYS).values(), *form.UNUSED, *more}
    read -= set() if architecture == "llama" else {"attention.sliding_window"}
    for key in {*KEYS, *CHANGE_LOGITS} - read:
        assert f"'{architecture}.{key}' is " in refuses("not supported", check, key, CHANGE_LOGITS.get(key, 3))
        for value in form.NEUTRAL.get(key, ()):
            check(key, value)
    for key in read - sizes.keys():
        check(key, 3)
    check("attention.scale", 0.25)


def test_a_sliding_window_is_read_where_llama_cpp_ignores_it_and_refused_where_it_does_not(
    tmp_path, tokenizer, monkeypatch
):
    fields = form._fields
    for family in ("llama", "olmo2"):
        window = {f"{family}.attention.sliding_window": 16}
        monkeypatch.setattr(form, "_fields", lambda *a, more=window: fields(*a) | more)
        _, path = written(tmp_path, family, tokenizer)
        if family == "llama":
            assert checkpoint.load(path).architecture.config.window == 16
        else:
            refuses("'olmo2.attention.sliding_window' is 16", checkpoint.load, path)


def test_yarns_bounds_are_read_and_divisors_stand_for_a_scaling_alone(tmp_path, tokenizer, monkeypatch):
    fields, betas = form._fields, {"beta_fast": 8.0, "beta_slow": 2.0}
    more = {f"llama.rope.scaling.yarn_{key}": value for key, value in betas.items()}
    monkeypatch.setattr(form, "_fields", lambda *a: fields(*a) | more)
    _, path = written(tmp_path, "llama", tokenizer, scaling=SCALINGS["yarn"])
    assert checkpoint.load(path).architecture.config.scaling == replace(SCALINGS["yarn"], **betas)
    more |= {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0}
    _, path = written(tmp_path, "llama", tokenizer, scaling=SCALINGS["llama3"])
    refuses("rope.scaling is linear by 2 and rope_freqs.weight exists", checkpoint.load, path)


def test_a_converted_file_names_the_ids_that_it_lacks(tmp_path, tokenizer, command):
    _, path = written(tmp_path, "llama", tokenizer)
    status, _, error = command("convert", path, tmp_path / "out")
    assert status == 0, error
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert {key: config[f"{key}_token_id"] for key in ("bos", "eos", "pad")} == {
        "bos": None,
        "eos": tokenizer.eos,
        "pad": tokenizer.token_id("<|fim_pad|>"),
    }


@pytest.mark.parametrize("name", ["gpt-2", "sentencepiece"])
@pytest.mark.filterwarnings("ignore:.*llama.cpp")
def test_keys_of_a_vocabulary_are_read_or_refused_by_name(name, tmp_path):
    _, path = written(tmp_path, "llama", FOREIGN[name]())
    fields = {k: v for k, v in read_header(path).fields.items() if k != "tokenizer.huggingface.json"}
    fields |= {"tokenizer.ggml.eos_token_id": 3}
    build = lambda more: build_tokenizer(fields | {f"tokenizer.ggml.{k}": v for k, v in more.items()}, None)
    before, ids = build({}), lambda inner: inner.encode("a b", add_special_tokens=True).ids
    for key in ("remove_extra_whitespaces", "add_sep_token", "a_key_of_tomorrow"):
        assert f"tokenizer.ggml.{key}" in refuses("not supported", build, {key: True})
    refuses("precompiled_charsmap", build, {"precompiled_charsmap": np.ones(4, np.uint8)})
    build({"remove_extra_whitespaces": False, "precompiled_charsmap": np.ones(0, np.uint8)})
    assert ids(build({"add_eos_token": True})) == [*ids(before), 3]
    assert ids(build({"add_eos_token": False})) == ids(before)
    later = special_tokens(fields | {"tokenizer.ggml.eom_token_id": 5})
    assert 5 in later.stops


SPELLINGS = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(128, 256)), "[PAD301]"]


@pytest.mark.parametrize("vocab", [270, 300, 400, 1500])
@pytest.mark.parametrize("seed", range(3))
def test_a_text_full_of_spellings_of_tokens_trains_a_vocabulary_that_llama_cpp_reads_equally(vocab, seed):
    """Neighbours that are together spelled like any token would become it there."""
    chance = random.Random(seed)
    cuts = [part for s in SPELLINGS if (i := chance.randint(1, len(s) - 1)) for part in (s[:i], s[i:])]
    parts = [
        *SPECIAL * 8,
        *SPELLINGS,
        *cuts,
        *"<|>_",
        *(s[2:-2] for s in SPECIAL),
        " ",
        "\n",
        "def ",
        "x = ",
        "\t",
    ]
    draw = lambda count: "".join(chance.choices(parts, k=count))
    tokenizer = Tokenizer.train("bpe", [draw(6000)], vocab)
    tokens = {*filter(None, tokenizer.token_bytes)}
    for spelling in map(str.encode, SPELLINGS[:-1]):
        assert not any({spelling[:i], spelling[i:]} <= tokens for i in range(1, len(spelling)))
    encode = gguf_vocabulary.encoder(vocabulary_fields(tokenizer, tokenizer.vocab + 400))
    for text in (*SPELLINGS, *(draw(12) for _ in range(60))):
        ids = tokenizer.encode(text)
        assert (tokenizer.decode(ids), encode(text, False)) == (text, ids)
        assert max(ids) < tokenizer.eos


def test_a_vocabulary_whose_tokens_join_to_a_byte_is_found(monkeypatch):
    monkeypatch.setattr("dunes.text.tokenizer._SPELLED", re.compile("(?!)"))
    tokenizer = Tokenizer.train("bpe", ["def f(x): return '<0xE9>' + x # <0x a FF>\n" * 20], 300)
    monkeypatch.setattr(gguf_vocabulary, "_joined_bytes", lambda fields: [])
    vocabulary_fields(tokenizer, tokenizer.vocab)
    monkeypatch.undo()
    refuses("llama.cpp would read '<0xE9>' as ids", vocabulary_fields, tokenizer, tokenizer.vocab)
