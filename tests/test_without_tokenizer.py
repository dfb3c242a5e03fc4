"""Model folders without a tokenizer, and with special ids that no token has: opened as transformers opens them."""

import json
import sys
from io import BytesIO, TextIOWrapper

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from adapters import trained
from conftest import refuses
from dunes import augment, checkpoint
from dunes.bench import subject
from dunes.checkpoint.export import export as merge
from dunes.generate import generate
from dunes.inference.chat import load_chat_engine
from dunes.inference.text_generator import TextGenerator
from dunes.text import Tokenizer

IDS = torch.arange(24).view(2, 12)
NONE = "no tokenizer.json, tokenizer.model or tekken.json"


def theirs(folder, vocab=40):
    """A tiny GPT-2 as transformers writes it: its ids of bos and eos are 50256."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=vocab, n_embd=16, n_layer=2, n_head=2, n_positions=64)
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)
    return folder


@pytest.fixture
def bare(tmp_path):
    return theirs(tmp_path / "bare")


def loaded(folder):
    with pytest.warns(UserWarning, match=NONE):
        return checkpoint.load(folder)


@pytest.mark.filterwarnings("ignore:.*special ids are up to 50256")
def test_a_folder_without_a_tokenizer_opens_as_in_transformers(bare, tmp_path):
    ours = loaded(bare)
    assert ours.tokenizer is None
    reference = AutoModelForCausalLM.from_pretrained(bare).eval()(IDS).logits
    with torch.no_grad():
        assert (ours.model(IDS) - reference).abs().max() <= 1e-5
    assert len(list(generate(ours.model, [1, 2], max_tokens=5, context_length=ours.context_length))) == 5
    checkpoint.save(ours.model, tmp_path / "again", None, ours.context_length)
    assert not list((tmp_path / "again").glob("*token*"))
    assert torch.equal(loaded(tmp_path / "again").model(IDS), ours.model(IDS))
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "again").eval()
    assert (saved(IDS).logits - reference).abs().max() <= 1e-5


def test_special_ids_above_the_vocabulary_are_warned_of_and_never_met(tmp_path):
    tokens = Tokenizer.train("bytes", [])
    folder = theirs(tmp_path / "model", vocab=tokens.vocab)
    tokens.save(folder)
    with pytest.warns(
        UserWarning, match=r"special ids are up to 50256 in config.json.* the embedding has 265 rows"
    ):
        ours = checkpoint.load(folder)
    assert ours.tokenizer is not None
    assert ours.tokenizer.eos == tokens.eos
    assert isinstance(TextGenerator(ours).text("ab", 8), str)
    checkpoint.save(ours.model, tmp_path / "again", ours.tokenizer, ours.context_length)
    assert json.loads((tmp_path / "again" / "config.json").read_text())["eos_token_id"] == tokens.eos
    with pytest.warns(UserWarning, match="special ids are up to 50256"):  # its generation_config.json is kept
        assert checkpoint.load(tmp_path / "again").tokenizer is not None


VERBS = {
    "generate": ("generate", "{}", "a"),
    "complete": ("complete", "{}"),
    "chat": ("chat", "{}", "hello"),
    "eval": ("eval", "{}", "{}/config.json"),
    "finetune": ("finetune", "{}", "--data", "{}/data.jsonl", "--out", "{}/run"),
}


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("verb", VERBS)
def test_verbs_that_need_text_say_so_in_one_line(verb, bare, monkeypatch, command):
    rows = [json.dumps({"instruction": f"a {i}", "output": "b"}) for i in range(100)]
    (bare / "data.jsonl").write_text("\n".join(rows))
    monkeypatch.setattr(sys, "stdin", TextIOWrapper(BytesIO(b"a")))
    status, _, error = command(*(word.format(bare) for word in VERBS[verb]))
    assert status == 2
    assert error == f"dunes: {bare}: {NONE}; put the tokenizer that the model was trained with there\n"


@pytest.mark.filterwarnings("default")
def test_inspect_warns_in_one_line_and_says_that_it_loads_without_a_tokenizer(bare, command):
    status, shown, error = command("inspect", bare)
    assert (status, error.count("\n")) == (0, 1)
    assert error.startswith(f"warning: {bare}: ")
    assert "tokenizer   none" in shown.splitlines()
    assert shown.endswith("loads       yes\n")


@pytest.mark.filterwarnings("ignore:.*special ids are up to 50256")
def test_adapters_go_on_and_into_a_base_without_a_tokenizer(bare, tmp_path):
    base = loaded(bare).model
    model = loaded(bare).model
    augment.attach(model, where="**.attn.q", rank=2)
    trained(model).eval()
    checkpoint.save_adapter(model, tmp_path / "adapter", base=bare)
    ours = loaded(tmp_path / "adapter")
    assert ours.tokenizer is None
    assert torch.equal(ours.model(IDS), model(IDS))
    assert not torch.equal(ours.model(IDS), base(IDS))
    with pytest.warns(UserWarning, match=NONE):
        merge(tmp_path / "adapter", tmp_path / "merged")
    assert (loaded(tmp_path / "merged").model(IDS) - model(IDS)).abs().max() <= 1e-5
    refuses(f"{bare}: {NONE}", checkpoint.load_with_tokenizer, tmp_path / "adapter")
    refuses(f"{bare}: {NONE}", load_chat_engine, str(bare), [tmp_path / "adapter"])
    Tokenizer.train("bytes", []).save(tmp_path / "adapter")
    refuses(r"the embedding has 40 rows, the tokenizer 265 ids", checkpoint.load, tmp_path / "adapter")


@pytest.mark.filterwarnings("ignore")
def test_a_model_without_a_tokenizer_is_measured(bare):
    assert subject.of_folder(bare).model().embed.token.num_embeddings == 40
    with pytest.raises(ValueError, match=NONE):
        _ = subject.of_folder(bare).tokenizer
