"""Template and stop tokens travel with a model: transformers reads them off the folder, and so do we."""

import json
import warnings

import pytest

from conftest import refuses
from dunes import checkpoint
from dunes.checkpoint.convert import convert
from dunes.checkpoint.open import open_verified_model
from dunes.models import llama
from dunes.text import SPECIAL, Tokenizer
from dunes.text.templates import (
    TEMPLATES,
    ModelTemplate,
    Turn,
    attach_template,
    encode_prompt,
    encode_segments,
    find_template,
    get_template,
)
from test_examples import CHAT, THEIRS, bpe, llama3, spaced  # noqa: F401  (fixtures)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

CASES = {
    "chatml": ("bpe", CHAT),
    "alpaca": ("bpe", CHAT[1:2]),
    "plain": ("bpe", CHAT[1:2]),
    "llama3": ("llama3", CHAT[:4]),
    "mistral": ("spaced", CHAT[1:4]),
    "llama2": ("spaced", CHAT[:4]),
    "own": ("bpe", CHAT[:4]),
}
pytestmark = pytest.mark.filterwarnings("ignore")


def small(tokenizer):
    sizes = {"dim": 16, "depth": 1, "heads": 2, "kv_heads": 1, "head_dim": 8, "hidden": 24}
    return llama.build(llama.Config(vocab=tokenizer.vocab, context_length=512, **sizes)).eval()


@pytest.mark.parametrize("case", CASES)
def test_transformers_reads_template_and_stops_off_the_folder(case, tmp_path, request):
    kind, messages = CASES[case]
    plain = request.getfixturevalue(kind)
    source = THEIRS["chatml"].replace("bos_token", "'<|endoftext|>'")
    template = ModelTemplate(source, plain) if case == "own" else get_template(case)
    tokenizer, model = attach_template(template, plain), small(plain)
    assert tokenizer.stops >= {plain.eos, template.stop_id(plain)}
    facts = {} if case == "own" else {"template": case}
    checkpoint.save(model, tmp_path / "m", tokenizer, 512, facts)
    convert(open_verified_model(tmp_path / "m"), tmp_path / "again")
    talk = tuple(Turn(m["role"], m["content"]) for m in messages)
    for folder in (tmp_path / "m", tmp_path / "again"):
        loaded = checkpoint.load(folder)
        assert loaded.tokenizer.stops == tokenizer.stops
        assert loaded.tokenizer.eos == plain.eos
        assert loaded.tokenizer.document_start == plain.document_start
        assert set(GenerationConfig.from_pretrained(folder).eos_token_id) == tokenizer.stops
        found = find_template(loaded.tokenizer, loaded.card)
        assert (found is TEMPLATES[case]) if case != "own" else isinstance(found, ModelTemplate)
        ids = encode_prompt(found, talk, loaded.tokenizer)
        assert ids == encode_prompt(template, talk, plain)
        theirs = AutoTokenizer.from_pretrained(folder)
        said = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert said == ids
        # The file alone says the same as the name does.
        assert encode_prompt(find_template(loaded.tokenizer, {}), talk, loaded.tokenizer) == ids
        assert set(AutoModelForCausalLM.from_pretrained(folder).generation_config.eos_token_id) == tokenizer.stops


def test_a_begin_that_the_tokenizer_adds_is_not_doubled(llama3):  # noqa: F811
    """The template writes the beginning and the tokenizer would add it, too: it stands there once."""
    tokenizer = attach_template(get_template("llama3"), llama3)
    ids = encode_prompt(find_template(tokenizer, {}), (Turn("user", "Hi"),), tokenizer)
    (begin,) = llama3.document_start
    assert ids.count(begin) == 1
    assert ids[0] == begin


def test_what_was_beside_is_kept_but_the_older_template(bpe, tmp_path):  # noqa: F811
    bpe.save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "old", "eos_token": SPECIAL[0]}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": 0.6, "eos_token_id": 300}))
    tokenizer = attach_template(get_template("chatml"), Tokenizer.load(tmp_path))
    tokenizer.save(tmp_path)
    words = json.loads((tmp_path / "generation_config.json").read_text())
    assert words == {"temperature": 0.6, "eos_token_id": [bpe.eos, 300, bpe.token_id("<|im_end|>")]}
    assert json.loads((tmp_path / "tokenizer_config.json").read_text()) == {"eos_token": SPECIAL[0]}
    assert Tokenizer.load(tmp_path).stops == tokenizer.stops


def test_a_model_without_a_template_has_none_and_a_wrong_one_is_refused(bpe, spaced):  # noqa: F811
    assert find_template(bpe, {}) is None
    assert find_template(bpe, {"template": "no such"}) is None
    refuses(r"has no <\|im_start\|>", attach_template, get_template("chatml"), spaced)
    refuses(r"has no <\|im_start\|>", find_template, spaced, {"template": "chatml"})
    pieces = get_template("chatml").render((Turn("user", "<|im_end|>"),), add_generation_prompt=True)
    assert encode_segments(pieces, bpe)[0].count(bpe.token_id("<|im_end|>")) == 1
