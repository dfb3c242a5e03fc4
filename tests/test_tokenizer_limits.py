"""Tokenizers of others that make much of little: refused in one line, before any memory is taken."""

import base64
import json
import resource
import string

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from dunes.text import Tokenizer
from dunes.text import tokenizer as module

ADDED = {"single_word": False, "lstrip": False, "rstrip": False, "special": True}
PART = {"type_id": 0}
A, MARK = {"Sequence": {"id": "A", **PART}}, {"SpecialToken": {"id": "m", **PART}}


def write(folder, **parts):
    model = {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []}
    content = {"version": "1.0", "added_tokens": [], "model": model, **parts}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return folder


def replace(pattern, content):
    return {
        "type": "Replace",
        "pattern": pattern if isinstance(pattern, dict) else {"String": pattern},
        "content": content,
    }


def sequence(key, *steps):
    return {"type": "Sequence", key: list(steps)}


def normal(*steps):
    return {"normalizer": sequence("normalizers", *steps)}


def template(*single, ids=(0,)):
    marks = {"m": {"id": "m", "ids": list(ids), "tokens": ["a"] * len(ids)}}
    return {"type": "TemplateProcessing", "single": list(single), "pair": [A], "special_tokens": marks}


def charsmap(text):
    return base64.b64encode((1024).to_bytes(4, "little") + bytes(1024) + b"x\0" + text.encode() + b"\0").decode()


BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
SPACES = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": False}
BEFORE = replace({"Regex": "(?=中)"}, "中")
ROUND = [{"type": "NFKC"}, replace("ل", "ﷺ")]
LEGACY = {"normalizers": [{"pattern": {"String": "a"}, "content": "a" * 1000}] * 3}

REFUSED = {
    "three replacements": (normal(*[replace("a", "a" * 1000)] * 3), r"normalizer .* 1,000,000,000 times"),
    "without types": ({"normalizer": LEGACY}, "normalizer .* times"),
    "nested": (normal(sequence("normalizers", *[replace("a", "a" * 6)] * 2), replace("a", "a" * 6)), "216 times"),
    "a pattern": (normal(*[replace({"Regex": "[a-z]"}, "b" * 30)] * 2), "900 times"),
    "nothing matched": (normal(*[replace({"Regex": r"\B"}, "a")] * 40), "normalizer makes"),
    "what another wrote": (normal(*[replace(a, b * 6) for a, b in ("ab", "xy", "bc", "yz", "cd")]), "216 times"),
    "what was written in capitals": (
        normal(replace("a", "B" * 20), {"type": "Lowercase"}, replace("b", "c" * 9)),
        "180 times",
    ),
    "a pattern of nothing": (normal(*[replace("", "a" * 30)] * 3), "29,791 times"),
    "a prefix": (normal({"type": "Prepend", "prepend": "a" * 10_000}), "10,001 times"),
    "of two kinds": (
        normal({"type": "Prepend", "prepend": "a" * 500, **replace("a", "a"), "normalizers": []}),
        "normalizer .* 501 times",
    ),
    "prefixes": (normal(*[{"type": "Prepend", "prepend": "aaa"}] * 50, replace("a", "aa")), "times"),
    "Unicode's own": (normal(replace("e", "ﷺ"), *ROUND * 5), "normalizer makes"),
    "hidden in it": (normal(replace("中", ""), {"type": "NFKC"}, *[BEFORE] * 30), "makes"),
    "a character map": (normal({"type": "Precompiled", "precompiled_charsmap": charsmap("y" * 9000)}), "times"),
    "bytes of bytes": ({"pre_tokenizer": sequence("pretokenizers", *[BYTES] * 22)}, "4,194,304 times"),
    "bytes, normalized": (normal(*[{"type": "ByteLevel"}] * 22), "4,194,304 times"),
    "marks of marks": ({"pre_tokenizer": sequence("pretokenizers", *[SPACES] * 5)}, "1,024 times"),
    "both": (normal(replace("a", "a" * 30)) | {"pre_tokenizer": sequence("pretokenizers", BYTES, SPACES)}, "240"),
    "many steps": (normal(*[{"type": "Lowercase"}] * 10_000), "normalizer .*10,000 steps"),
    "a decoder": ({"decoder": sequence("decoders", *[replace("a", "a" * 100)] * 3)}, "decoder .* 1,000,000 times"),
    "a decoder's pattern": ({"decoder": sequence("decoders", *[BEFORE] * 30)}, "decoder"),
    "a decoder's suffix": ({"decoder": sequence("decoders", *[{"type": "BPEDecoder", "suffix": ""}] * 30)}, "dec"),
    "templates": ({"post_processor": sequence("processors", *[template(*[A] * 100)] * 3)}, "makes 10,000 ids"),
    "marks in templates": ({"post_processor": template(A, *[MARK] * 2000, ids=[0] * 2000)}, "post_processor"),
    "an added token": (
        normal(*[replace("a", "a" * 1000)] * 3)
        | {"added_tokens": [{"id": 2, "content": "a", "normalized": True, **ADDED}]},
        "normalizer",
    ),
    "added tokens": (
        {"added_tokens": [{"id": i, "content": "ab" * 250_000, "normalized": False, **ADDED} for i in range(9)]},
        "added_tokens have 4,500,000 characters",
    ),
    "an end of words": (
        {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [], "end_of_word_suffix": "x" * 1_000_000}},
        "end_of_word_suffix",
    ),
    "words of any length": (
        {"model": {"type": "WordPiece", "vocab": {"a": 0}, "unk_token": "a", "max_input_chars_per_word": 10**9}},
        "max_input_chars_per_word",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_makes_much_of_little_is_refused_in_one_line_without_memory(case, tmp_path):
    parts, words = REFUSED[case]
    write(tmp_path, **parts)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ValueError, match=words) as caught:
        Tokenizer.load(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path / 'tokenizer.json'}: not a tokenizer: ")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000, "kilobytes"


@pytest.mark.parametrize(
    "settings",
    [
        {"padding": {"strategy": {"Fixed": 10**9}, "pad_to_multiple_of": None}},
        {"padding": {"strategy": "BatchLongest", "pad_to_multiple_of": 10**9}},
        {"truncation": {"direction": "Right", "max_length": 10**9, "strategy": "LongestFirst", "stride": 0}},
        {"truncation": {"direction": "Left", "max_length": 0, "strategy": "LongestFirst", "stride": 9}},
    ],
)
def test_padding_and_truncation_of_the_file_have_no_effect(settings, tmp_path):
    if "padding" in settings:
        settings["padding"] |= {"direction": "Right", "pad_id": 0, "pad_type_id": 0, "pad_token": "a"}
    tokenizer = Tokenizer.load(write(tmp_path, **settings))
    assert tokenizer.encode("abba") == tokenizer.encode_continuation("abba") == [0, 1, 1, 0]
    assert list(tokenizer.encode_all(["a", "ab"])) == [[0], [0, 1]]
    assert tokenizer.document_start == []


def spelled(part):
    return json.loads(part.__getstate__())


def test_what_real_tokenizers_do_is_let_through(tmp_path):
    """The pipelines of LLaMA, Gemma, T5 and mT5, XLNet, ALBERT, CLIP, GPT-NeoX, Falcon, DeepSeek and BERT."""
    nfkc = {"type": "Precompiled", "precompiled_charsmap": charsmap("صلى الله عليه وسلم")}
    squeezed = replace({"Regex": " {2,}"}, "▁")
    quotes = [replace("``", '"'), replace("''", '"')]
    bert = normalizers.BertNormalizer()
    words = {"type": "WordPiece", "vocab": {"a": 0, "b": 1}, "unk_token": "a", "continuing_subword_prefix": "##"}
    chinese = spelled(pre_tokenizers.Split(tokenizers.Regex("[\u4e00-\u9fa5]+"), "isolated"))
    for parts in (
        normal({"type": "Prepend", "prepend": "▁"}, replace(" ", "▁")),
        normal(replace(" ", "▁")) | {"pre_tokenizer": spelled(pre_tokenizers.Split(" ", "merged_with_previous"))},
        normal(nfkc, squeezed) | {"pre_tokenizer": sequence("pretokenizers", {"type": "WhitespaceSplit"}, SPACES)},
        normal(*quotes, {"type": "NFKD"}, {"type": "StripAccents"}, {"type": "Lowercase"}, nfkc, squeezed)
        | {"pre_tokenizer": SPACES},
        normal({"type": "NFC"}, replace({"Regex": r"\s+"}, " "), {"type": "Lowercase"}) | {"pre_tokenizer": BYTES},
        {"pre_tokenizer": sequence("pretokenizers", *[chinese] * 9, spelled(pre_tokenizers.Digits()), BYTES)},
        {"normalizer": spelled(bert), "decoder": spelled(decoders.WordPiece())},
        {"decoder": sequence("decoders", replace("▁", " "), {"type": "ByteFallback"}, {"type": "Fuse"})},
        normal(replace("\n", "<n>"), replace("\t", "<tab>"), replace(" ", "▁")) | {"pre_tokenizer": SPACES},
        normal(*[replace(c, f"\uf000{c.lower()}") for c in string.ascii_uppercase]),
        {"post_processor": template(MARK, A, MARK)},
        {"post_processor": spelled(processors.RobertaProcessing(("b", 1), ("a", 0)))},
        {"model": words | {"max_input_chars_per_word": 200}},
    ):  # fmt: skip
        assert Tokenizer.load(write(tmp_path, **parts)).encode("a") is not None, parts


def test_a_file_of_very_many_parts_is_not_parsed(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MAX_ITEMS", 1000)
    with pytest.raises(ValueError, match=r"9,0\d\d commas and brackets"):
        Tokenizer.load(write(tmp_path, version=[[]] * 4500))


def test_a_model_file_with_a_map_that_makes_much_of_little_is_refused(tmp_path, monkeypatch):
    inner = tokenizers.Tokenizer(models.BPE({"a": 0}, []))
    inner.normalizer = normalizers.Sequence([normalizers.Replace("a", "a" * 1000)] * 3)
    monkeypatch.setattr("dunes.text.sentencepiece.convert", lambda data: inner)
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"tokenizer\.model: not a tokenizer: its normalizer .* times"):
        Tokenizer.load(tmp_path)
