"""Other people's tokenizers: the ids and the text that their own programs give, and files that lie."""

import base64
import io
import json
import random
from functools import cache
from importlib.resources import files
from pathlib import Path

import pytest
import tokenizers

from conftest import change_json, refuses
from dunes.checkpoint.open import open_verified_model
from dunes.text import DecodeStream, Tokenizer, ranked_bpe, sentencepiece, split_rules

# ruff: noqa: E501  (tables)
from hard_strings import strings
from small_models import random_model

spm = pytest.importorskip("sentencepiece")
mistral = pytest.importorskip("mistral_common.tokens.tokenizers.tekken")

DATA = Path(str(files("mistral_common"))) / "data"
MODELS = sorted(p.name for p in DATA.glob("*.model*"))
TEKKEN = sorted(p.name for p in DATA.glob("tekken*.json"))
SYMBOLS = ["<sep>", "[REF]", "[/REF]", "[REFERENCE_DOC_1]", "[REFERENCE_DOC_12]"]
CONTROL = ["[INST]", "[/INST]"]
PLAIN = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
TRAINED = {
    "byte pairs": {"model_type": "bpe", "byte_fallback": True, "split_digits": True, **PLAIN},
    "byte pairs, symbols": {
        "model_type": "bpe", "byte_fallback": True, **PLAIN,
        "user_defined_symbols": SYMBOLS, "control_symbols": CONTROL,
    },
    "byte pairs, no prefix": {"model_type": "bpe", "byte_fallback": True, "add_dummy_prefix": False, **PLAIN},
    "byte pairs, unknown": {"model_type": "bpe", "normalization_rule_name": "identity"},
}  # fmt: skip
REFUSED = {"unigram": {"model_type": "unigram", **PLAIN}, "byte pairs, nfkc": {"model_type": "bpe"}}


@cache
def trained(name):
    chance = random.Random(0)
    words = ["".join(chance.choices("etaoinshrdlucm_", k=chance.randint(1, 9))) for _ in range(300)]
    lines = [" ".join(chance.choices(words, k=9)) for _ in range(400)] + ["größer (x, y): 漢字 😀 -> [1] <s>"] * 20
    file = io.BytesIO()
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=file, vocab_size=700, minloglevel=2, num_threads=1,
        hard_vocab_limit=False, **(TRAINED | REFUSED)[name],
    )  # fmt: skip
    return file.getvalue()


@cache
def shipped(name):
    """A file of mistral_common, converted."""
    convert = ranked_bpe.convert_tekken if name in TEKKEN else sentencepiece.convert
    return Tokenizer(convert((DATA / name).read_bytes()))


def theirs(data):
    return spm.SentencePieceProcessor(model_proto=data)


def with_special(tokenizer, text):
    """Ids of a text in which special tokens count, as in one that a chat template wrote."""
    return tokenizers.Tokenizer.from_str(tokenizer.json()).encode(text, add_special_tokens=False).ids


def compare(ours, want, texts, unknown):
    wrong = [t for t in texts if ours.encode(t) != want.encode(t)]
    assert not wrong, f"{len(wrong)} of {len(texts)}: {wrong[0]!r}"
    back = [ids for ids in map(want.encode, texts) if unknown not in ids]
    assert len(back) > 100
    assert [ours.decode(ids) for ids in back] == [want.decode(ids) for ids in back]


ENDS = [pytest.param(n, marks=[] if n in (MODELS[0], MODELS[-1]) else pytest.mark.slow) for n in MODELS]


@pytest.mark.parametrize("name", ENDS)
def test_shipped_sentencepiece_models_give_their_ids_and_their_text(name):
    compare(shipped(name), theirs((DATA / name).read_bytes()), strings(), 0)


@pytest.mark.parametrize("name", TRAINED)
def test_trained_sentencepiece_models_give_their_ids_and_their_text(name):
    data = trained(name)
    compare(Tokenizer(sentencepiece.convert(data)), theirs(data), strings(), 0)


@pytest.mark.parametrize("name", [MODELS[1], "byte pairs, symbols"])
def test_any_ids_of_a_sentencepiece_model_become_their_text_at_once_and_in_a_stream(name):
    data = (DATA / name).read_bytes() if name in MODELS else trained(name)
    ours, want, chance = Tokenizer(sentencepiece.convert(data)), theirs(data), random.Random(0)
    pieces = ours.token_bytes
    # A space as a byte is never written, and only sentencepiece keeps it at the beginning.
    usual = [i for i in range(1, len(pieces)) if want.id_to_piece(i) != "<0x20>"]
    for _ in range(200):
        ids = [*chance.choices(usual, k=chance.randint(1, 12)), usual[-1]]
        assert ours.decode(ids) == want.decode(ids)
        assert "".join(map(DecodeStream(ours).step, ids)) == ours.decode(ids)
    assert len(pieces) == ours.vocab == want.get_piece_size()


@pytest.mark.parametrize("name", TEKKEN)
def test_shipped_tekken_files_give_their_ids_and_their_text(name):
    want, ours = mistral.Tekkenizer.from_file(DATA / name), shipped(name)
    texts, chance = strings(), random.Random(0)
    for text in texts:
        ids = want.encode(text, bos=False, eos=False)
        assert ours.encode(text) == ids, repr(text)
        assert ours.decode(ids) == want.decode(ids) == text
    for _ in range(600):
        ids = chance.choices(range(want.n_words), k=9)
        kept = [i for i in ids if i >= want.num_special_tokens]
        assert ours.decode(ids) == want._model.decode([i - want.num_special_tokens for i in kept])
    assert ours.vocab == want.n_words
    assert ours.document_start == [want.bos_id]
    assert ours.eos == want.eos_id


def small_tekken(**changes):
    tokens = [bytes([b]) for b in range(256)] + [b"he", b"ll", b"hell", b"hello", b"<s", b"<s>"]
    vocab = [{"rank": i, "token_bytes": base64.b64encode(t).decode()} for i, t in enumerate(tokens)]
    config = {"pattern": r"\S+|\s", "default_vocab_size": len(tokens) + 3, "default_num_special_tokens": 4}
    special = [{"rank": i, "token_str": t, "is_control": True} for i, t in enumerate(("<unk>", "<s>", "</s>"))]
    return {"vocab": vocab, "special_tokens": special, "config": config} | changes


def test_a_word_spelled_like_a_special_token_is_plain_text_where_the_pattern_leaves_it_whole():
    ours = Tokenizer(ranked_bpe.convert_tekken(json.dumps(small_tekken()).encode()))
    assert ours.encode("</s>") == [4 + b for b in b"</s>"]
    assert not {0, 1, 2, 3} & set(ours.encode("</s> <s> hello<s> <unk> <SPECIAL_3>"))
    assert ours.encode("hello") == [4 + 259]
    assert with_special(ours, "</s>hello<s>") == [2, 4 + 259, 1]
    assert ours.decode(ours.encode("</s> <s>")) == "</s> <s>"


# --- folders


def folder(tmp_path, name, data, **files):
    (tmp_path / name).write_bytes(data)
    for other, content in files.items():
        (tmp_path / f"{other}.json").write_text(json.dumps(content))
    return tmp_path


@pytest.mark.parametrize("name", ["tokenizer.model", "tokenizer.model.v3", "tekken.json"])
def test_a_folder_with_another_tokenizer_is_opened_and_saved_as_tokenizer_json(name, tmp_path):
    data = json.dumps(small_tekken()).encode() if name == "tekken.json" else trained("byte pairs, symbols")
    tokenizer = Tokenizer.load(folder(tmp_path, name, data))
    assert (tokenizer.document_start, tokenizer.eos, tokenizer.stops) == ([1], 2, {2})
    assert tokenizer.prompt("") == [1]
    assert tokenizer.prompt("hello") == [1, *tokenizer.encode("hello")]
    tokenizer.save(tmp_path)
    (tmp_path / name).write_bytes(b"no longer read")
    again = Tokenizer.load(tmp_path)
    texts = strings(60)
    assert [again.encode(t) for t in texts] == [tokenizer.encode(t) for t in texts]
    assert again.document_start == [1]
    assert again.token_bytes == tokenizer.token_bytes


def test_transformers_reads_a_converted_tokenizer_as_we_do(tmp_path):
    from transformers import PreTrainedTokenizerFast

    tokenizer = shipped(MODELS[1])
    tokenizer.save(tmp_path)
    want = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    chat = "<s>[INST] Hi there [/INST] Hello</s>[INST]  two [/INST]"
    assert with_special(tokenizer, chat) == want(chat, add_special_tokens=False)["input_ids"]
    assert tokenizer.encode(chat) == spm.SentencePieceProcessor(str(DATA / MODELS[1])).encode(chat)
    assert want("hello")["input_ids"] == tokenizer.prompt("hello")


@pytest.mark.slow
def test_what_a_chat_template_wrote_has_the_ids_that_mistral_gives_the_conversation():
    from mistral_common.protocol.instruct.messages import AssistantMessage, UserMessage
    from mistral_common.protocol.instruct.request import ChatCompletionRequest
    from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

    texts = ["Hi there", "Hello!\n", "größer  2"]
    messages = [UserMessage(content=texts[0]), AssistantMessage(content=texts[1]), UserMessage(content=texts[2])]
    for name, made in {MODELS[1]: MistralTokenizer.v3(), TEKKEN[0]: MistralTokenizer.v3(is_tekken=True)}.items():
        space, ours = "" if name in TEKKEN else " ", shipped(name)
        marks = ["<s>[INST]", "[/INST]", "</s>[INST]"]
        text = "".join(f"{mark}{space}{text}" for mark, text in zip(marks, texts, strict=True)) + "[/INST]"
        want = made.encode_chat_completion(ChatCompletionRequest(messages=messages)).tokens
        assert with_special(ours, text) == want


@pytest.mark.parametrize(
    ("files", "begin", "end", "stops"),
    [
        ({}, [], 264, {264}),
        ({"tokenizer_config": {"eos_token": "<|b|>"}}, [], 265, {265}),
        ({"tokenizer_config": {"eos_token": {"content": "<|b|>"}, "add_bos_token": False}}, [], 265, {265}),
        ({"tokenizer_config": {"bos_token": "<|a|>", "add_bos_token": True}}, [263], 264, {264}),
        ({"config": {"eos_token_id": 265}}, [], 265, {265}),
        ({"config": {"eos_token_id": None}, "generation_config": {"eos_token_id": [264, 263]}}, [], 264, {263, 264}),
        (
            {"tokenizer_config": {"eos_token": "<|b|>"}, "generation_config": {"eos_token_id": [264, 263]}},
            [], 265, {263, 264, 265},
        ),
    ],
)  # fmt: skip
def test_the_files_beside_a_tokenizer_say_where_texts_begin_and_end(files, begin, end, stops, tmp_path):
    from tokenizers import Tokenizer as Inner
    from tokenizers import decoders, models, pre_tokenizers

    letters = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    inner = Inner(models.BPE(letters, []))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    inner.add_special_tokens([*(f"<|{c}|>" for c in "012345"), "<|fim|>", "<|a|>", "<|endoftext|>", "<|b|>"])
    tokenizer = Tokenizer.load(folder(tmp_path, "tokenizer.json", inner.to_str().encode(), **files))
    assert (tokenizer.document_start, tokenizer.eos, tokenizer.stops) == (begin, end, stops)
    assert tokenizer.prompt("") == (begin or [end])
    assert tokenizer.prompt("ab") == [*begin, *tokenizer.encode("ab")]
    assert with_special(tokenizer, "<|a|>x") == [263, letters["x"]]
    assert len(tokenizer.encode("<|a|>x")) == 6
    assert list(tokenizer.encode_document(["a\n", "\nb"])) == [tokenizer.encode("a\n\nb")]


# --- files that lie


def field(number, value):
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def varint(value):
    parts = []
    while value > 127:
        parts.append(value & 127 | 128)
        value >>= 7
    return bytes([*parts, value])


def piece(text, kind=1, score=b"\0\0\0\0"):
    return field(1, field(1, text) + varint(2 << 3 | 5) + score + field(3, kind))


UNK, A, MERGES = piece(b"<unk>", 2), piece(b"a"), field(2, field(3, 2))
GOOD = A + UNK + MERGES
SENTENCEPIECE = [  # each with one defect
    b"",
    b"\x0a\xff\xff\xff\xff\x7f",
    GOOD + field(1, 7),
    GOOD + field(1, field(1, b"b") + field(3, b"x")),
    GOOD + piece(b"\xff"),
    GOOD + A,
    A + MERGES,
    GOOD + piece(b"b", 1, b"\0\0\xc0\x7f"),
    A + UNK + field(2, field(3, 3)),
    A + UNK + field(2, field(3, 2) + field(35, 1)),
    GOOD + field(3, field(5, 0)),
    A + UNK + field(2, field(3, 2) + field(24, 1)),
    A + UNK,
    GOOD + field(3, field(2, b"\xff" * 9)),
    GOOD + piece(b"ab") + piece(b"abb", 1),
    GOOD + piece(b""),
    GOOD + piece(b"a" * 513),
]


def test_the_file_without_a_defect_is_read():
    assert Tokenizer(sentencepiece.convert(GOOD)).vocab == 2


CONFIG = {"pattern": ".", "default_vocab_size": 265, "default_num_special_tokens": 4}
TEKKENS = [
    {"config": {}},
    {"vocab": None},
    {"vocab": [small_tekken()["vocab"][1], small_tekken()["vocab"][0], *small_tekken()["vocab"][2:]]},
    {"vocab": [{"rank": 0, "token_bytes": "!"}] * 300},
    {"config": CONFIG | {"pattern": "("}},
    {"config": CONFIG | {"default_vocab_size": 9999}},
    {"config": CONFIG | {"default_vocab_size": 266, "default_num_special_tokens": -4}},
    {"special_tokens": [{"rank": 5, "token_str": "x"}]},
    {"special_tokens": [{"rank": 0, "token_str": "hello"}]},
]


def simple(vocab, **changes):
    model = {"type": "BPE", "vocab": vocab, "merges": []}
    return json.dumps({"version": "1.0", "added_tokens": [], "model": model, **changes}).encode()


def split_by(pattern):
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


PAIRS = {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]]}
UNIGRAM = {"type": "Unigram", "unk_id": 0, "vocab": [["a", 0.0], ["b", -1.0]], "byte_fallback": False}


def test_a_pattern_that_never_ends_fails_on_the_text_and_not_forever(tmp_path):
    data = simple({"a": 0, "b": 1}, pre_tokenizer=split_by("(a+)+$"))
    tokenizer = Tokenizer.load(folder(tmp_path, "tokenizer.json", data))
    assert tokenizer.encode("aab") == [0, 0, 1]
    refuses("retry-limit", tokenizer.encode, "a" * 40 + "b")


def test_ids_with_gaps_stand_for_nothing_and_a_length_written_in_the_file_cuts_no_text(tmp_path):
    cut = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    tokenizer = Tokenizer.load(folder(tmp_path, "tokenizer.json", simple({"a": 1, "b": 4}, truncation=cut)))
    assert tokenizer.vocab == 5
    assert tokenizer.token_bytes == [b"", b"a", b"", b"", b"b"]
    assert tokenizer.encode("aaaa") == [1] * 4


def test_only_what_needs_an_end_asks_for_one(tmp_path):
    tokenizer = Tokenizer.load(folder(tmp_path, "tokenizer.json", simple({"a": 0, "b": 5})))
    assert tokenizer.special_tokens_map == {}
    assert tokenizer.prompt("ab") == [0, 5]
    for need in (lambda: tokenizer.eos, lambda: tokenizer.stops, lambda: tokenizer.prompt("")):
        assert str(tmp_path) in refuses(r"tokenizer_config\.json: no EOS token.*eos_token", need)
    for end in (3, 9, 1 << 40):  # ids without a token
        config = {"eos_token_id": end, "bos_token_id": 0}
        tokenizer = Tokenizer.load(folder(tmp_path, "tokenizer.json", simple({"a": 0, "b": 5}), config=config))
        assert tokenizer.special_tokens_map == {}
    config = {"eos_token_id": [9, 5]}
    told = Tokenizer.load(folder(tmp_path, "tokenizer.json", simple({"a": 0, "b": 5}), config=config))
    assert told.configured_ids == {5, 9}


def test_a_model_whose_tokenizer_has_no_end_is_converted(tmp_path):
    from dunes import checkpoint
    from dunes.checkpoint.convert import convert
    from dunes.checkpoint.write import SPECIAL_TOKENS

    model = random_model(vocab=512, depth=1, context=16)
    checkpoint.save(model, tmp_path / "in", Tokenizer.train("bytes", []), 16)
    (tmp_path / "in" / "dunes.json").unlink()
    for name in ("tokenizer_config.json", "generation_config.json", "special_tokens_map.json"):
        (tmp_path / "in" / name).unlink()
    marks = [key for key in json.loads((tmp_path / "in" / "config.json").read_text()) if key.endswith("_token_id")]
    change_json(tmp_path / "in" / "config.json", **dict.fromkeys(marks, ...))
    (tmp_path / "in" / "tokenizer.json").write_bytes(simple({"a": 0, "b": 5}))
    convert(open_verified_model(tmp_path / "in"), tmp_path / "out")
    said = json.loads((tmp_path / "out" / "config.json").read_text())
    assert {k: v for k, v in said.items() if k.endswith("_token_id")} == {
        f"{n}_token_id": None for n in SPECIAL_TOKENS
    }
    assert checkpoint.load(tmp_path / "out").tokenizer.encode("ab") == [0, 5]


@pytest.mark.filterwarnings("ignore")
def test_other_tools_read_the_tokenizer_that_was_made_whatever_the_config_called_it(tmp_path):
    transformers = pytest.importorskip("transformers")
    (tmp_path / "in").mkdir()
    name, data = "tokenizer.model", trained("byte pairs, symbols")
    said = {
        "tokenizer_class": "LlamaTokenizer", "legacy": True, "sp_model_kwargs": {}, "add_bos_token": True,
        "bos_token": "<s>", "eos_token": "</s>", "model_max_length": 64, "chat_template": "{{ messages }}",
    }  # fmt: skip
    ours = Tokenizer.load(folder(tmp_path / "in", name, data, tokenizer_config=said))
    (tmp_path / "out").mkdir()
    ours.save(tmp_path / "out")
    (tmp_path / "out" / name).write_bytes(data)
    (tmp_path / "out" / "config.json").write_text('{"model_type": "llama"}')
    now = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    kept = {k: v for k, v in said.items() if k not in ("legacy", "sp_model_kwargs")}
    assert now == kept | {"tokenizer_class": "PreTrainedTokenizerFast"}
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert (theirs.bos_token, theirs.eos_token, theirs.model_max_length) == ("<s>", "</s>", 64)
    inner = Tokenizer(theirs.backend_tokenizer)
    wrong = [t for t in [" two  spaces", *strings()] if inner.encode(t) != ours.encode(t)]
    assert not wrong, wrong[0]
    assert theirs.encode(" two  spaces") == [ours.token_id("<s>"), *ours.encode(" two  spaces")]
    again = Tokenizer.load(tmp_path / "out")
    assert (again.document_start, again.stops) == (ours.document_start, ours.stops)


@cache
def ranks():
    """A file as Llama 3 brings it: tokens of joins in the order in which they were learned, bytes first, not in order."""
    chance = random.Random(0)
    order = sorted(range(256), key=lambda b: (not 33 <= b < 127, b))
    tokens = [bytes([b]) for b in order]
    seen, text = {*tokens}, "".join(strings(60)).encode()
    while len(tokens) < 1500:
        a, b = chance.choice(tokens[200:]), chance.choice(tokens)
        at = chance.randrange(len(text) - 4)
        made = chance.choice([text[at : at + 2], text[at : at + 3], (a + b)[:12], b" " * chance.randint(2, 9)])
        if made not in seen and any(made[:i] in seen and made[i:] in seen for i in range(1, len(made))):
            seen.add(made)
            tokens.append(made)
    return tokens


def ranked(tokens):
    return b"".join(base64.b64encode(t) + b" %d\n" % i for i, t in enumerate(tokens))


def test_llama_3_files_give_the_ids_of_its_own_code(tmp_path):
    tiktoken = pytest.importorskip("tiktoken")
    names = {t: len(ranks()) + i for i, t in enumerate(ranked_bpe.LLAMA3_SPECIAL)}
    assert len(names) == 256
    known = {"begin_of_text": 0, "end_of_text": 1, "start_header_id": 6, "end_header_id": 7, "eot_id": 9}
    assert all(names[f"<|{t}|>"] == len(ranks()) + i for t, i in known.items())
    theirs = tiktoken.Encoding(
        "llama3", pat_str=split_rules.LLAMA3, special_tokens=names,
        mergeable_ranks={t: i for i, t in enumerate(ranks())},
    )  # fmt: skip
    ours = Tokenizer.load(folder(tmp_path, "tokenizer.model", ranked(ranks())))
    ours.save(tmp_path)
    for each in (ours, Tokenizer.load(tmp_path)):
        for text in strings():
            ids = theirs.encode(text, disallowed_special=())
            assert each.encode(text) == ids, repr(text)
            assert each.decode(ids) == text
        spelled = "<|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|>"
        assert with_special(each, spelled) == theirs.encode(spelled, allowed_special="all")
        assert each.document_start == [names["<|begin_of_text|>"]]
        assert each.eos == names["<|end_of_text|>"]
        assert each.stops == {names[t] for t in ("<|end_of_text|>", "<|eot_id|>", "<|eom_id|>")}
        assert each.vocab == len(ranks()) + 256


BYTES = [bytes([b]) for b in range(256)]
LLAMA_3 = [
    ranked(BYTES).replace(b" 7\n", b" 9\n"), b"IQ== 0\n", b"IQ== 0\n!! 1\n", b"IQ== 0\n\nIQ== 1\n",
    ranked([*BYTES, b"\7"]), ranked([*BYTES, b"<|eot_id|>"]),
]  # fmt: skip
BROKEN = [
    b"{", b"null", b"\xff\xfe", b"[" * 100_000, '{"é": 1}'.encode("utf-16"), simple({"a": 0, "b": 0}), simple({}),
    simple({"a": 0, "b": 2**32 - 1}), simple({"a": 0}, pre_tokenizer=split_by("(")),
]  # fmt: skip
TEMPLATE = {"type": "TemplateProcessing", "single": [], "pair": [], "special_tokens": {}}
DAMAGED = [  # where the library panics, too
    {"model": PAIRS | {"merges": [["a", "b"], ["b", "a"]]}},
    {"model": {"type": "WordPiece", "vocab": {"a": 0}, "unk_token": "a", "continuing_subword_prefix": "##"}},
    {"model": UNIGRAM | {"unk_id": 7}},
    {"post_processor": TEMPLATE | {"single": [{"Sequence": {"id": "B", "type_id": 0}}]}},
]
UNREADABLE = [("tokenizer.model", data) for data in SENTENCEPIECE + LLAMA_3]
UNREADABLE += [("tokenizer.model", name) for name in REFUSED]
UNREADABLE += [("tekken.json", json.dumps(small_tekken(**changes)).encode()) for changes in TEKKENS]
UNREADABLE += [("tokenizer.json", data) for data in BROKEN]
UNREADABLE += [("tokenizer.json", simple({}, **{"model": PAIRS} | changes)) for changes in DAMAGED]


@pytest.mark.parametrize("case", range(len(UNREADABLE)))
def test_a_tokenizer_that_cannot_be_read_is_refused_by_its_file(case, tmp_path):
    name, data = UNREADABLE[case]
    data = data if isinstance(data, bytes) else trained(data)
    refuses(f"^{tmp_path / name}", Tokenizer.load, folder(tmp_path, name, data))


@pytest.mark.parametrize("content", [
    '{"eos_token": 7}', '{"bos_token": "\\ud800"}', '{"eos_token": "a", "eos_token": "b"}', "[]", "[" * 100_000,
])  # fmt: skip
def test_a_file_beside_a_tokenizer_that_cannot_be_read_is_refused(content, tmp_path):
    (folder(tmp_path, "tokenizer.model", trained("byte pairs")) / "tokenizer_config.json").write_text(content)
    refuses(f"^{tmp_path / 'tokenizer_config.json'}", Tokenizer.load, tmp_path)


def test_ids_of_ends_that_are_none_are_refused(tmp_path):
    for name, marks in (("config", "two"), ("generation_config", [1, True]), ("generation_config", -1)):
        folder(tmp_path, "tokenizer.model", trained("byte pairs"), **{name: {"eos_token_id": marks}})
        refuses(f"{name}.json", Tokenizer.load, tmp_path)
        (tmp_path / f"{name}.json").unlink()
