"""Vocabularies of published models in GGUF files: ids as llama.cpp's, read, written back and read again."""

import unicodedata

import pytest

from conftest import refuses
from dunes.text import Tokenizer, gguf_vocabulary
from dunes.text.gguf_file import build_tokenizer, special_tokens
from dunes.text.split_rules import RULES
from hard_strings import strings
from real_models import (
    FAMILIES_OF_BERT,
    VOCABULARIES,
    expected_ids,
    llama_cpp_ids,
    smollm2,
    vocabulary,
    write_tiny_model,
)

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
APPROXIMATED = ("gpt-4o", "llama4", "tekken")
"""Rules that llama.cpp's matcher approximates around combining marks and capitals beyond ASCII."""


@pytest.mark.parametrize("name", VOCABULARIES)
def test_a_published_vocabulary_has_llama_cpps_ids_and_is_written_under_its_own_name(name, tmp_path):
    before = Tokenizer.load(vocabulary(name, tmp_path))
    texts = expected_ids(name)
    assert [before.encode(text) for text, _ in texts] == [ids for _, ids in texts]
    fields = gguf_vocabulary.vocabulary_fields(before, before.vocab)
    assert fields.get("ggml.pre", "") == before.split_rule
    after = Tokenizer(build_tokenizer(own := without_json(fields), None), special_tokens(own))
    assert [after.encode(text) for text in strings(50)] == [before.encode(text) for text in strings(50)]
    assert (after.bos, after.eos, after.stops) == (before.bos, before.eos, before.stops)


def without_json(fields):
    """The metadata as a header has it, without the tokenizer.json."""
    import numpy as np

    numbers = {"ggml.token_type", "ggml.scores"}
    encoded = {"ggml.merges": [m.encode() for m in fields.get("ggml.merges", ())]}
    read = {**fields, **{k: v for k, v in encoded.items() if v}}
    arrays = {k: np.array(v) for k, v in read.items() if k in numbers}
    lists = {k: list(v) for k, v in read.items() if k == "ggml.tokens"}
    kept = {**read, **arrays, **lists}
    return {f"tokenizer.{k}": v for k, v in kept.items() if k != "huggingface.json"}


@pytest.mark.parametrize("name", FAMILIES_OF_BERT)
def test_a_vocabulary_of_bert_is_refused_by_its_kind(name, tmp_path):
    refuses("is not supported", Tokenizer.load, vocabulary(name, tmp_path))


def is_plain(text, rule):
    """True if llama.cpp splits a text as the original tokenizer does.

    Its matcher splits off characters that its Unicode tables lack, and does not match U+3000 in a class.
    """
    kinds = {unicodedata.category(c) for c in text}
    approximated = rule in APPROXIMATED and any(k[0] == "M" or k in ("Lu", "Lt", "Lm") for k in kinds)
    return (
        kinds.isdisjoint(("Cn", "Co", "Cs"))
        and not approximated
        and (rule != "deepseek-llm" or "\u3000" not in text)
    )


ORIGINS = {"smollm": None, "default": "aquila", "olmo": "gpt-2"}
ORIGINS |= dict.fromkeys(("deepseek-v3", "gpt-4o", "llama4", "tekken", "dbrx", "stablelm2"), "qwen2")
"""The vocabulary to which a rule is applied that llama.cpp has no expected ids for; None is SmolLM2's."""


@pytest.mark.parametrize("rule", [*ORIGINS, "neox", "spm"])
def test_two_thousand_hard_strings_have_the_ids_of_llama_cpp(rule, tmp_path):
    files = {"neox": "gpt-neox", "spm": "baichuan"} | ORIGINS
    source = vocabulary(files[rule], tmp_path) if files[rule] else smollm2()
    path = write_tiny_model(tmp_path / "x.gguf", source, rule if rule in RULES and rule != "default" else None)
    ours = Tokenizer.load(path)
    # Both drop bytes without a token, as SmolLM2 has; only `tokenizers` then merges their neighbours.
    dropped = {*range(256)} - {token[0] for token in ours.token_bytes if len(token) == 1}
    plain = (t for t in strings(5000) if len(t) < 700 and "\0" not in t and is_plain(t, rule))
    texts = [t for t in plain if dropped.isdisjoint(t.encode())][:2000]
    found = llama_cpp_ids(path, texts, tmp_path)
    different = [t for t, ids in zip(texts, found, strict=True) if ours.encode(t) != ids]
    print(f"{rule}: {len(texts)} texts, {len(different)} different")
    assert not different
