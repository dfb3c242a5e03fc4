"""Text to ids and back: nothing is lost, lines stay apart, and Hugging Face's tools agree."""

import random
import re

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from conftest import refuses
from dunes.checkpoint import LoadedModel
from dunes.text import END, KINDS, SPECIAL, DecodeStream, Tokenizer

ALPHABET = "abc äβ漢😀\t\r\n\ufeff\u2028<|>"
"""All that the chars tokenizer here knows."""


def corpus() -> str:
    """Lines of made-up code, whose words and pairs of words come again and again."""
    chance = random.Random(0)
    words = ["".join(chance.choices("abcdefghijklmnopqrstuvwxyz_", k=chance.randint(2, 8))) for _ in range(120)]
    lines = ["", "    return value", "    for item in range(limit):", "naïve = 'größer 漢字 😀'"]
    for _ in range(900):
        a, b, c = chance.choices(words, k=3)
        lines += [chance.choice(lines[:4]), f"def {a}({b}, {c}):", f"    {b} = {c} + {a}"]
    return "\n".join(lines)


TOKENIZERS = {
    "bpe": Tokenizer.train("bpe", [corpus()], 600),
    "bytes": Tokenizer.train("bytes", []),
    "chars": Tokenizer.train("chars", [ALPHABET[:5], ALPHABET[5:]]),
}
BYTE_LEVEL = ["bpe", "bytes"]

any_text = st.text(st.characters(exclude_categories=["Cs"]))
"""All that UTF-8 can say: everything but surrogates."""
spaces = ["\n", "\r\n", "\n\n\n", "    ", "\t"]
awkward = st.sampled_from([*SPECIAL, *spaces, "<|unk|>", "\0", "\ufeff", "\ufffd", "e\u0301"])
mixed = st.lists(st.one_of(any_text, awkward, st.sampled_from(corpus().splitlines()[:40]))).map("".join)


def many(examples):
    health = [HealthCheck.function_scoped_fixture]
    return settings(
        max_examples=examples, deadline=None, derandomize=True, database=None, suppress_health_check=health
    )


@many(200)
@given(text=st.text(ALPHABET))
@example(text="aZb")
def test_characters_come_back_from_their_ids_one_each_and_unknown_ones_as_nothing(text):
    tokenizer = TOKENIZERS["chars"]
    ids = tokenizer.encode(text)
    assert [tokenizer.token_bytes[i] for i in ids] == [c.encode() if c in ALPHABET else b"" for c in text]
    assert tokenizer.decode(ids) == text.replace("Z", "<|unk|>")


@pytest.mark.parametrize("kind", BYTE_LEVEL)
def test_each_byte_has_its_own_token(kind):
    pieces = TOKENIZERS[kind].token_bytes
    assert {bytes([b]) for b in range(256)} <= set(pieces)
    assert len(set(pieces)) == len(pieces) - len(SPECIAL) + 1, "no two ids stand for the same bytes"


@pytest.mark.parametrize("kind", BYTE_LEVEL)
@many(100)
@given(lines=st.lists(st.one_of(any_text, awkward, st.sampled_from(corpus().splitlines()))), data=st.data())
def test_blocks_of_lines_get_the_same_ids_as_the_whole(kind, lines, data):
    tokenizer = TOKENIZERS[kind]
    pieces = re.findall(r"[^\n]*\n|[^\n]+", "\n".join(lines))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(pieces)), max_size=5)))
    blocks = ["".join(pieces[a:b]) for a, b in zip([0, *cuts], [*cuts, len(pieces)], strict=True)]
    whole = tokenizer.encode("".join(pieces))
    assert [i for block in blocks for i in tokenizer.encode(block)] == whole
    assert [i for ids in tokenizer.encode_all(blocks) for i in ids] == whole


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_come_after_the_vocabulary_and_stand_for_no_text(kind):
    """They are spelled as Qwen spells them."""
    fim = {f"<|fim_{part}|>" for part in ("prefix", "middle", "suffix", "pad")}
    assert set(SPECIAL) == fim | {"<|endoftext|>", "<|repo_name|>", "<|file_sep|>", "<|im_start|>", "<|im_end|>"}
    tokenizer = TOKENIZERS[kind]
    ids = [tokenizer.token_id(token) for token in SPECIAL]
    assert ids == list(range(tokenizer.vocab - len(SPECIAL), tokenizer.vocab))
    assert ids[0] == tokenizer.eos == tokenizer.token_id(END)
    assert {tokenizer.token_bytes[i] for i in ids} == {b""}
    assert tokenizer.decode([*ids, *tokenizer.encode("a b"), *ids]) == "a b"
    refuses(r"no token '<\|eot\|>'", tokenizer.token_id, "<|eot|>")


@pytest.mark.parametrize("kind", BYTE_LEVEL)
@pytest.mark.parametrize("token", SPECIAL)
def test_a_special_token_in_a_text_is_plain_text(kind, token, tmp_path):
    tokenizer = TOKENIZERS[kind]
    tokenizer.save(tmp_path)
    text = f"before {token}{token} after\n{token}"
    for each in (tokenizer, Tokenizer.load(tmp_path)):
        (ids,) = each.encode_all([text])
        assert ids == each.encode(text)
        assert max(ids) < each.eos
        assert each.decode(ids) == text


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_corpus_trains_the_same_tokenizer(kind):
    halves = corpus()[:20_000], corpus()[20_000:]
    one, two = (Tokenizer.train(kind, iter(halves), 400) for _ in range(2))
    assert one.json() == two.json()


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_tokenizer_gives_the_same_ids_here_and_in_transformers(kind, tmp_path):
    from transformers import PreTrainedTokenizerFast

    tokenizer = TOKENIZERS[kind]
    tokenizer.save(tmp_path)
    again = Tokenizer.load(tmp_path)
    oracle = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    assert again.json() == tokenizer.json()
    assert len(oracle) == tokenizer.vocab
    assert oracle.convert_tokens_to_ids(list(SPECIAL)) == [tokenizer.token_id(t) for t in SPECIAL]

    @many(100)
    @given(text=st.text(ALPHABET) if kind == "chars" else mixed.filter(lambda t: "<|" not in t))
    @example(text=ALPHABET)
    def agree(text):
        ids = tokenizer.encode(text)
        assert again.encode(text) == ids
        assert oracle(text, add_special_tokens=False)["input_ids"] == ids
        assert again.decode(ids) == oracle.decode(ids, clean_up_tokenization_spaces=False) == text

    agree()


def test_added_tokens_that_are_not_special_stand_for_their_text(tmp_path):
    tokenizer = Tokenizer.train("bytes", [])
    tokenizer.inner.add_tokens(["<think> ö"])
    tokenizer.save(tmp_path)
    again = Tokenizer.load(tmp_path)
    ids = again.encode("a <think> öb")
    assert len(ids) == 4
    assert b"".join(again.token_bytes[i] for i in ids).decode() == again.decode(ids) == "a <think> öb"


def test_what_cannot_be_trained_or_loaded_is_refused(tmp_path):
    refuses("264", Tokenizer.train, "bpe", [corpus()], 264)
    refuses("words", Tokenizer.train, "words", [corpus()])
    refuses(f"{tmp_path}.*tokenizer.json", Tokenizer.load, tmp_path)


def streamed(tokenizer, ids):
    stream = DecodeStream(tokenizer)
    return [stream.step(i) for i in ids]


@pytest.mark.parametrize("kind", KINDS)
@many(120)
@given(data=st.data())
def test_a_stream_gives_whole_characters_as_soon_as_they_are_there(kind, data):
    tokenizer = TOKENIZERS[kind]
    text = data.draw(st.text(ALPHABET) if kind == "chars" else mixed)
    ids = tokenizer.encode(text)
    given_so_far = ""
    pieces, held = tokenizer.token_bytes, b""
    for i, new in zip(ids, streamed(tokenizer, ids), strict=True):
        given_so_far += new
        held = (held + pieces[i])[len(new.encode()) :]
        assert text.startswith(given_so_far)
        assert len(held) < 4, "only part of one character is held back"
        if "\ufffd" not in text:
            assert "\ufffd" not in new
    assert given_so_far == text


@pytest.mark.parametrize("kind", BYTE_LEVEL)
@many(100)
@given(data=st.data())
def test_a_stream_of_any_ids_begins_what_they_decode_to(kind, data):
    tokenizer = TOKENIZERS[kind]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab - 1)))
    assert tokenizer.decode(ids).startswith("".join(streamed(tokenizer, ids)))
    # A line end closes whatever was open.
    closed = [*ids, *tokenizer.encode("\n")]
    assert "".join(streamed(tokenizer, closed)) == tokenizer.decode(closed)


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_an_id_without_a_token_gives_no_text_and_is_never_chosen(kind):
    from dunes.completion.engine import CompletionEngine
    from dunes.generate import sampler
    from dunes.inference.text_generator import TextGenerator
    from dunes.models import llama
    from dunes.models.initialise import initialise

    tokenizer = TOKENIZERS[kind]
    ids = [*tokenizer.encode("a"), tokenizer.vocab, tokenizer.vocab + 7, *tokenizer.encode("b")]
    assert tokenizer.decode(ids) == "".join(map(DecodeStream(tokenizer).step, ids)) == "ab"
    model = initialise(llama.build(llama.Config.from_size(tokenizer.vocab + 512, 32, 1, 16)))
    for temperature in (0.0, 9.0):
        pieces = list(TextGenerator(LoadedModel(model, tokenizer, 16)).stream("a", 20, sampler(temperature)))
        assert len(pieces) <= 20
        assert all(piece.token.id < tokenizer.vocab for piece in pieces)
    CompletionEngine(LoadedModel(model, tokenizer, 16)).complete("a")


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_no_token_reaches_over_a_line_end(end):
    text = f"value = function(argument, other){end}" * 100
    tokenizer = Tokenizer.train("bpe", [text], 330)
    assert tokenizer.line_separable
    assert {piece for piece in tokenizer.token_bytes if {*piece} & {*b"\r\n"}} == {b"\r", b"\n", end.encode()}
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode(text) == tokenizer.encode(f"value = function(argument, other){end}") * 100
