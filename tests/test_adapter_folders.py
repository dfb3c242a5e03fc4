"""Adapters opened through their folders: base, tokenizer and template found; half-read ones refused."""

import json
import shutil
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file

from adapters import difference, trained
from conftest import change_json, refuses, refuses_command
from dunes import checkpoint
from dunes.augment import attach, quantize
from dunes.checkpoint.convert import convert
from dunes.checkpoint.inspect import describe_adapter
from dunes.checkpoint.open import open_verified_model
from dunes.cli import augment_verb, verbs
from dunes.generate import SamplingOptions
from dunes.inference.chat import load_chat_engine
from dunes.text import Tokenizer
from dunes.text.templates import Turn, attach_template, encode_prompt, find_template, get_template
from native_files import write_native
from test_adapter import IDS, LIMIT, card_of, pair, random_like, their_adapter, weights, words

pytestmark = pytest.mark.filterwarnings("ignore")
TOKENS = Tokenizer.train("chars", ["abcdefghijklmnopqrstuvwxyz .,:#?!\n"])
"""Few enough ids for the models of `pair`."""
TALK = (Turn("user", "ab"),)


def base_in(folder, shape="llama"):
    """A model in a folder; theirs, and ours."""
    theirs, ours = pair(shape)
    checkpoint.save(ours, folder, TOKENS, 32)
    return theirs, ours


def adapter_in(folder, ours, base, **options):
    identity = checkpoint.base_identity(ours)
    attach(ours, rank=4, **options)
    trained(ours)
    tokenizer = attach_template(get_template("chatml"), TOKENS)
    more = {"tokenizer": tokenizer, "context_length": 24, "facts": {"template": "chatml"}}
    checkpoint.save_adapter(ours, folder, base=base, identity=identity, **more)
    return ours(IDS)


@pytest.fixture
def made(tmp_path):
    _, ours = base_in(tmp_path / "base")
    said = adapter_in(tmp_path / "a", ours, tmp_path / "base")
    return tmp_path / "a", said


KINDS = {
    "lora": ("llama", {}),
    "rslora": ("llama", {"rslora": True}),
    "dora": ("gpt2", {"dora": True}),
    "experts": ("mixtral", {}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_peft_and_we_open_the_folder_with_its_base_and_tokenizer(kind, tmp_path):
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoTokenizer

    shape, options = KINDS[kind]
    _, ours = base_in(tmp_path / "base", shape)
    plain = ours(IDS)
    said = adapter_in(tmp_path / "a", ours, tmp_path / "base", **options)
    theirs = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "a").eval()
    with torch.no_grad():
        assert difference(theirs(IDS).logits, said) <= LIMIT * plain.abs().max()
    loaded = checkpoint.load(tmp_path / "a")
    assert difference(loaded.model(IDS), said) <= LIMIT * plain.abs().max()
    assert difference(plain, said) > 0.1
    assert loaded.context_length == 24
    assert not loaded.model.training
    template = find_template(loaded.tokenizer, loaded.card)
    assert template is get_template("chatml")
    tokenizer, talk = AutoTokenizer.from_pretrained(tmp_path / "a"), [{"role": "user", "content": "ab"}]
    ids = tokenizer.apply_chat_template(talk, add_generation_prompt=True, return_dict=False)
    assert ids == encode_prompt(template, TALK, loaded.tokenizer)
    assert loaded.tokenizer.token_id("<|im_end|>") in loaded.tokenizer.stops


def test_the_base_is_found_where_both_were_moved_and_missed_with_a_remedy(made, tmp_path, monkeypatch):
    folder, said = made
    (tmp_path / "new").mkdir()
    shutil.move(tmp_path / "base", tmp_path / "new" / "base")
    refuses(r"does not exist; .*dunes chat BASE --adapter", checkpoint.load, folder)
    assert describe_adapter(folder)[1]
    shutil.move(folder, tmp_path / "new" / "a")
    assert difference(checkpoint.load(tmp_path / "new" / "a").model(IDS), said) <= LIMIT


def test_a_name_on_the_hub_goes_to_the_hub(made, monkeypatch):
    folder, _ = made
    asked = []

    def local(name, revision=None):
        asked.append((name, revision))
        raise ValueError("no way to the Hub")

    card_of(folder, lambda card: [card["base"].pop("folder"), card["files"].pop("adapter_config.json")])
    words(base_model_name_or_path="org/name", revision="main")(folder)
    monkeypatch.setattr("dunes.checkpoint.open.locate_model", local)
    refuses("no way to the Hub; or pass it", checkpoint.load, folder)
    assert asked == [("org/name", "main")]


def test_a_folder_of_pefts_opens_with_the_tokenizer_of_the_base(tmp_path):
    theirs, _ = base_in(tmp_path / "base")
    theirs.name_or_path = str(tmp_path / "base")
    adapted = their_adapter(theirs, tmp_path / "a", r=2, target_modules=["q_proj", "down_proj"])
    with pytest.warns(UserWarning, match="has no digests of its base's weights"):
        loaded = checkpoint.load(tmp_path / "a")
    with torch.no_grad():
        assert difference(loaded.model(IDS), adapted(IDS).logits) <= LIMIT * 10
    assert loaded.context_length == 32
    assert loaded.card == {}
    assert loaded.tokenizer.encode("ab") == TOKENS.encode("ab")
    lines, reason = describe_adapter(tmp_path / "a")
    assert reason is None
    assert "q_proj 2 times" in "\n".join(lines)


def unsealed(change):
    """The change, made where no digest tells of it."""

    def changed(folder):
        card_of(folder, lambda card: card.update(files={}))
        change(folder)

    return changed


def other_base(folder, dtype=torch.float32):
    checkpoint.save(random_like(pair("llama")[1], dtype), folder.parent / "base", TOKENS, 32)


def other_settings(folder, **changes):
    """A base with the same weights in which a setting is another."""
    path = folder.parent / "base"
    (path / "dunes.json").unlink()
    change_json(path / "config.json", rope_parameters=..., **changes)


def lose(held, end):
    for key in [k for k in held if end in k]:
        del held[key]


DAMAGED = {
    "one lost": weights(lambda h: lose(h, "layers.1.self_attn.v_proj")),
    "a kind of module lost": weights(lambda h: lose(h, "down_proj")),
    "all lost": weights(lambda h: h.clear()),
    "another base": other_base,
    "another base in bfloat16": partial(other_base, dtype=torch.bfloat16),
    "a base with other angles": partial(other_settings, rope_theta=500.0),
    "a base with another epsilon": partial(other_settings, rms_norm_eps=0.01),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", DAMAGED)
def test_an_adapter_that_would_not_be_what_was_trained_is_refused(case, made):
    folder, _ = made
    unsealed(DAMAGED[case])(folder)
    refuses(str(folder), checkpoint.load, folder)


def test_what_takes_whole_models_and_what_changed_on_the_disk_is_refused(made, tmp_path):
    folder, _ = made
    refuses("merge it first: dunes augment merge", lambda: convert(open_verified_model(folder), tmp_path / "out"))
    assert checkpoint.describe(folder).family == "llama"
    assert checkpoint.describe(folder).card["template"] == "chatml"
    assert not (tmp_path / "out").exists()
    words(r=2)(folder)
    refuses("not the bytes that were written", checkpoint.load, folder)


def rounded_base(folder, dtype=torch.bfloat16):
    """The base beside an adapter's folder, rounded."""
    path = folder.parent / "base"
    checkpoint.save(checkpoint.load(path).model.to(dtype), path, TOKENS, 32)


ONE = SamplingOptions(max_tokens=1)
ANOTHER = {
    "load": lambda folder, any_base: checkpoint.load(folder, any_base=any_base),
    "generate": lambda folder, any_base: verbs.generate(str(folder), ONE, "ab", any_base=any_base),
    "complete": lambda folder, any_base: verbs.complete(str(folder), f"{__file__}:1:5", any_base=any_base),
    "chat": lambda folder, any_base: verbs.chat(str(folder), "ab", ONE, any_base=any_base),
    "chat with": lambda folder, any_base: verbs.chat(
        str(folder.parent / "base"), "ab", ONE, adapter=(folder,), any_base=any_base
    ),
    "eval": lambda folder, any_base: verbs.evaluate(str(folder), (str(folder / "x.txt"),), any_base=any_base),
    "merge": lambda folder, any_base: augment_verb.merge(str(folder), folder.parent / "m", any_base=any_base),
}


@pytest.mark.slow
@pytest.mark.parametrize("verb", ANOTHER)
def test_verbs_refuse_another_base_in_another_dtype_unless_told_to_take_it(verb, made, capsys):
    folder, _ = made
    (folder / "x.txt").write_text("abc def. " * 4)
    other_base(folder, torch.bfloat16)
    refuses(r"made for a different base.*--any-base", ANOTHER[verb], folder, False)
    assert not (folder.parent / "m").exists()
    ANOTHER[verb](folder, True)
    if verb == "merge":
        assert json.loads((folder.parent / "m" / "dunes.json").read_text())["any_base"] is True


def test_inspect_compares_the_numbers_where_it_is_asked_to(made, monkeypatch, command):
    folder, _ = made
    refuses_command("has no table of layers", command("inspect", folder, "--layers"))
    with monkeypatch.context() as patch:
        patch.setattr("dunes.measure.free_memory", lambda device: 1000)
        assert refuses("are free", checkpoint.load, folder).startswith(describe_adapter(folder)[1])
    lines, reason = describe_adapter(folder, values=True)
    assert reason is None
    assert "base check  its weights match the adapter's digests" in lines
    other_base(folder, torch.bfloat16)
    lines, reason = describe_adapter(folder)
    assert reason is None
    assert any(line.endswith("done when the adapter is loaded, or with --values") for line in lines)
    lines, reason = describe_adapter(folder, values=True)
    assert "made for a different base" in reason
    assert not any("match" in line for line in lines)
    (folder / "dunes.json").unlink()
    assert "base check  not possible: the adapter's card has no digests of the base" in describe_adapter(folder)[0]


ROUNDED = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def rewritten(base, out, form):
    """The same tensors in a pickle, or in two files with an index."""
    if form == "native":
        write_native(base, out)
        return
    shutil.copytree(base, out)
    held = load_file(out / "model.safetensors")
    for name in ("dunes.json", "model.safetensors"):
        (out / name).unlink()
    if form == "pickled":
        torch.save(held, out / "pytorch_model.bin")
        return
    places = {key: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, key in enumerate(held)}
    for file in set(places.values()):
        save_file({key: held[key] for key in held if places[key] == file}, out / file)
    (out / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


@pytest.mark.parametrize("form", [*ROUNDED, "native", "pickled", "sharded"])
@pytest.mark.usefixtures("made")
def test_a_base_in_another_form_is_known(form, tmp_path):
    out = tmp_path / "out"
    if form in ROUNDED:
        convert(open_verified_model(tmp_path / "base"), out, dtype=ROUNDED[form])
    else:
        rewritten(tmp_path / "base", out, form)
    model = checkpoint.load(out).model
    checkpoint.load_adapter(model, tmp_path / "a")
    with torch.no_grad():
        model.blocks[0].attn.q.base.weight[1, 1] *= 1.5
    refuses("made for a different base", checkpoint.load_adapter, model, tmp_path / "a", "again")


def test_a_rounded_base_is_quantized_as_the_first_was(tmp_path):
    _, ours = base_in(tmp_path / "base")
    identity = checkpoint.base_identity(ours)
    note = quantize(ours, kind="nf4", double=True)
    identity |= checkpoint.base_identity(ours)
    attach(ours, rank=2)
    trained(ours)
    beside = {"base": tmp_path / "base", "facts": {"changes": [note.record()], "template": "chatml"}}
    for name in ("a", "b"):
        checkpoint.save_adapter(ours, tmp_path / name, identity=identity, **beside)
    said = ours(IDS)
    assert difference(checkpoint.load(tmp_path / "a").model(IDS), said) <= 1e-6
    card_of(tmp_path / "b", lambda card: card["changes"][0]["request"].update(double=False))
    refuses("made for a different base", checkpoint.load, tmp_path / "b")
    card_of(tmp_path / "b", lambda card: card["changes"][0]["request"].update(double=True))
    rounded_base(tmp_path / "a")
    model = checkpoint.load(tmp_path / "a").model
    assert checkpoint.base_identity(model)["kind"] == "NF4, torch.bfloat16"
    with torch.no_grad():
        assert difference(model(IDS), said) <= 0.1 * said.abs().max()
    for first, others in (("base", ["a", "b"]), ("a", ["b"])):
        both = load_chat_engine(str(tmp_path / first), [tmp_path / name for name in others])
        assert sorted(both.models) == ["a", "b", "none"]
    other_base(tmp_path / "a")
    refuses("made for a different base", checkpoint.load, tmp_path / "a")
    refuses("made for a different base", load_chat_engine, str(tmp_path / "base"), [tmp_path / "a"])
