"""`dunes chat`: one way to the ids, the template's own stops, adapters that take turns on one base."""

import os

import pytest
import torch

from adapters import trained
from conftest import refuses, run_dunes
from dunes import checkpoint
from dunes.augment import attach, quantize
from dunes.checkpoint import LoadedModel
from dunes.data.examples import read_records
from dunes.generate import Token, sampler
from dunes.inference import text_generator
from dunes.inference.chat import Chat, ChatEngine, ChatModel, load_chat_engine, run
from dunes.text.templates import Turn, attach_template, encode_prompt, get_template
from test_adapter import pair
from test_adapter_folders import TOKENS
from test_examples import bpe, llama3, spaced  # noqa: F401  (fixtures)

pytestmark = pytest.mark.filterwarnings("ignore")


class Script:
    """Stands for the decode loop: keeps what it was asked, and says what was written for it."""

    def __init__(self, tokenizer, *answers):
        self.tokenizer, self.answers, self.asked = tokenizer, list(answers), []

    def __call__(self, model, requests, *, context_length, cache):
        (request,) = requests
        self.asked.append(list(request.prompt))
        self.max_tokens, self.stop = request.max_tokens, request.stop
        text = self.answers.pop(0) if self.answers else "b"
        for i in self.tokenizer.encode(text)[: request.max_tokens]:
            yield [Token(i, 0.0)]


@pytest.fixture
def scripted(monkeypatch, tmp_path):
    def make(tokenizer, template, *answers, context=1000, **options):
        script = Script(tokenizer, *answers)
        monkeypatch.setattr(text_generator, "generate_all", script)
        told = attach_template(get_template(template), tokenizer)
        loaded = LoadedModel(pair("llama")[1], told, context, {"template": template})
        notes = []
        engine = ChatEngine({"none": ChatModel(tmp_path, None, loaded)})
        return Chat(engine, sampler(0.0), 20, note=notes.append, **options), script, notes

    return make


def said(chat, text):
    return "".join(chat.say(text))


@pytest.mark.parametrize(("kind", "template"), [("bpe", "chatml"), ("llama3", "llama3"), ("spaced", "llama2")])
def test_a_conversation_is_encoded_as_in_training_and_begins_once(kind, template, scripted, request):
    tokenizer = request.getfixturevalue(kind)
    chat, script, notes = scripted(tokenizer, template, "Ho", "No", system="Be brief.")
    assert said(chat, "Hi there") == "Ho"
    assert said(chat, "And so on?") == "No"
    talk = [("system", "Be brief."), ("user", "Hi there"), ("assistant", "Ho"), ("user", "And so on?")]
    turns = tuple(Turn(*each) for each in talk)
    encode = lambda count: encode_prompt(get_template(template), turns[:count], tokenizer)
    assert script.asked == [encode(2), encode(4)]
    begins = 2 if template == "llama2" else 1  # which begins each of its exchanges
    assert [ids[: len(tokenizer.document_start)] for ids in script.asked] == [tokenizer.document_start] * 2
    assert script.asked[1].count(tokenizer.document_start[0]) == begins
    assert script.stop >= {get_template(template).stop_id(tokenizer), tokenizer.eos}
    assert notes == []


def test_the_oldest_exchanges_are_left_out_never_the_system(bpe, scripted):  # noqa: F811
    chat, script, notes = scripted(bpe, "chatml", *"abcdefgh", context=90, system="Be brief.")
    for i in range(8):
        said(chat, f"question {i}")
    assert len(notes) == 1
    assert "oldest exchanges are dropped" in notes[0]
    assert [turn.text for turn in chat.talk[-2:]] == ["question 7", "h"]
    assert chat.talk[0].role == "user"
    assert len(chat.talk) < 14
    head = encode_prompt(get_template("chatml"), (Turn("system", "Be brief."),), bpe)[:8]
    for ids in script.asked:
        assert ids[:8] == head
        assert len(ids) <= 90 - 20
    assert script.max_tokens == 20
    refuses("the model's context length is 90; shorten it", said, chat, "question " * 60)
    assert chat.talk[-1].text == "h"
    chat.command("/new")
    said(chat, "Hi")
    assert [turn.text for turn in chat.talk] == ["Hi", "b"]


def test_one_question_and_one_answer_begin_anew(bpe, scripted):  # noqa: F811
    chat, script, _ = scripted(bpe, "alpaca")
    said(chat, "Hi")
    said(chat, "Ho")
    assert script.asked[1] == encode_prompt(get_template("alpaca"), (Turn("user", "Ho"),), bpe)
    refuses("one instruction and one answer, found system", scripted, bpe, "alpaca", system="Be brief.")


def test_what_was_said_before_a_stop_counts_and_the_conversation_goes_on(bpe, scripted):  # noqa: F811
    chat, script, notes = scripted(bpe, "chatml", "abc", "d", "")
    out = []

    def write(piece):
        out.append(piece)
        if piece == script.first:
            script.first = None
            raise KeyboardInterrupt

    script.first = bpe.decode(bpe.encode("abc")[:1])
    run(chat, ["Hi\n", "\n", "Ho\n", "Hm\n"], write, interactive=True)
    assert out[-1] == "\n"
    assert notes == ["(stopped)", "(the answer is empty)"]
    told = [turn.text for turn in chat.talk]
    assert told == ["Hi", bpe.decode(bpe.encode("abc")[:1]), "Ho", "d"]  # and not a question without an answer


def test_piped_lines_are_commands_too_and_an_empty_line_separates_answers(bpe, scripted):  # noqa: F811
    chat, script, notes = scripted(bpe, "chatml", "One", "Two\n\nthree", "", "Four")
    out = []
    run(chat, ["/help\n", "a\n", "\n", "b\r\n", "/new\n", " /c\n", "d", "/quit\n", "e\n"], out.append)
    assert "".join(out) == "One\n\nTwo\n\nthree\n\n\n\nFour\n"
    assert len(script.asked) == 4
    assert [turn.text for turn in chat.talk] == ["d", "Four"]
    assert "/quit" in notes[0]
    assert notes[1:] == ["(the answer is empty)"]


def texts(chat):
    return [turn.text for turn in chat.talk]


def test_another_answer_replaces_the_last_and_a_message_without_one_is_asked_again(bpe, scripted):  # noqa: F811
    chat, script, notes = scripted(bpe, "chatml", "One", "Two", "Three", "", "Four", "")
    chat.sample = sampler(1.0)
    run(chat, ["/retry", "Hi", "Ho", "/retry"], lambda piece: None, interactive=True)
    assert texts(chat) == ["Hi", "One", "Ho", "Three"]
    assert script.asked[1] == script.asked[2]
    run(chat, ["Hm", "/retry"], lambda piece: None, interactive=True)
    assert texts(chat) == ["Hi", "One", "Ho", "Three", "Hm", "Four"]
    run(chat, ["/retry"], lambda piece: None, interactive=True)  # gives an empty answer
    assert texts(chat) == ["Hi", "One", "Ho", "Three", "Hm", "Four"]
    run(chat, ["/undo", "/undo", "/retry"], lambda piece: None, interactive=True)
    assert texts(chat) == ["Hi", "b"]
    run(chat, ["/undo", "/undo"], lambda piece: None, interactive=True)
    assert chat.talk == []
    assert notes == ["there is no message yet", *["(the answer is empty)"] * 2, "there is no message yet"]
    script.answers = ["One", ""]
    run(chat, ["Hi", "Hm", "/undo", "/retry"], lambda piece: None, interactive=True)
    assert notes[4:] == ["(the answer is empty)", "there is no message yet"]


def test_another_answer_is_drawn_with_other_random_numbers(three):
    chat = Chat(load_chat_engine(str(three / "base")), sampler(3.0, seed=6), 12)
    first = said(chat, "ab")
    other = "".join(chat.retry())
    assert other != first
    assert texts(chat) == ["ab", other]


def test_a_saved_conversation_is_finetuning_data(bpe, scripted, tmp_path, monkeypatch):  # noqa: F811
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "home")
    chat, _, notes = scripted(bpe, "chatml", 'Hé "o"\n', system="Be brief.")
    path = tmp_path / "talk.jsonl"
    lines = [f"/save {path}", "Hi\n", f"/save {path}\n", "/save ~/b.jsonl"]
    run(chat, lines, lambda piece: None, interactive=True)
    (record,) = read_records(path).rows
    talk = [("system", "Be brief."), ("user", "Hi"), ("assistant", 'Hé "o"\n')]
    assert [(turn.role, turn.text) for turn in record.turns] == talk
    assert notes[:2] == ["there is no message yet", f"saved: {path}"]
    assert (tmp_path / "home" / "b.jsonl").read_bytes() == path.read_bytes()
    before = path.read_bytes()
    refused = [
        "",
        path,
        "~/no/a.jsonl",
        tmp_path,
        tmp_path / "a.txt",
        tmp_path / "no" / "a.jsonl",
        path / "a.jsonl",
    ]
    run(chat, [f"/save {name}" for name in refused] + ["Ho"], lambda piece: None, interactive=True)
    assert len(notes) == 3 + len(refused)
    assert path.read_bytes() == before
    assert {file.name for file in tmp_path.rglob("*")} == {"talk.jsonl", "home", "b.jsonl"}
    assert len(chat.talk) == 4


@pytest.fixture
def three(tmp_path):
    """A base that can be talked to, and two adapters of it."""
    _, ours = pair("llama")
    with torch.no_grad():
        ours.head.weight[TOKENS.token_id("<|endoftext|>") - 1 :] = 0  # so that the likeliest is a letter
    tokens = attach_template(get_template("chatml"), TOKENS)
    checkpoint.save(ours, tmp_path / "base", tokens, 200, {"template": "chatml"})
    for name, seed in (("one", 1), ("two", 2)):
        model = checkpoint.load(tmp_path / "base").model
        attach(model, rank=4)
        trained(model, seed=seed)
        facts = {"template": "alpaca" if name == "two" else "chatml"}
        more = {"tokenizer": attach_template(get_template(facts["template"]), TOKENS), "context_length": 300}
        checkpoint.save_adapter(model, tmp_path / name, base=tmp_path / "base", facts=facts, **more)
    return tmp_path


def alone(folder, adapters=()):
    one = load_chat_engine(str(folder), [*adapters])
    return "".join(one.answer((Turn("user", "ab"),), sampler(0.0), 12))


def test_adapters_take_turns_on_one_base(three):
    want = {name: alone(three / name) for name in ("one", "two", "base")}
    assert len(set(want.values())) == 3
    assert all(len(text) == 12 for text in want.values())
    both = load_chat_engine(str(three / "base"), [three / "one", three / "two"])
    assert list(both.models) == ["one", "two", "none"]
    base = sum(p.numel() for p in pair("llama")[1].parameters())
    model = both.models["none"].loaded.model
    place = model.blocks[0].attn.q
    assert sum(p.numel() for n, p in model.named_parameters() if ".adapters." not in n) == base
    assert sorted(place.adapters) == ["a0", "a1"]
    talk, names = (Turn("user", "ab"),), {"one": "one", "two": "two", "none": "base"}
    for name, folder in names.items():
        assert "".join(both.answer(talk, sampler(0.0), 12, name)) == want[folder]
    streams = {name: both.answer(talk, sampler(0.0), 12, name) for name in names}
    got = dict.fromkeys(names, "")
    while streams:  # piece by piece in turns
        for name in list(streams):
            piece = next(streams[name], None)
            if piece is None:
                del streams[name]
            else:
                got[name] += piece
    assert {names[name]: text for name, text in got.items()} == want
    assert both.chat_model("two").single_turn
    assert not both.chat_model("one").single_turn
    own = load_chat_engine(str(three / "one"), [three / "two"])
    assert list(own.models) == ["two", "one", "none"]
    for name, folder in names.items():
        assert "".join(own.answer(talk, sampler(0.0), 12, name)) == want[folder]


def test_what_cannot_be_spoken_to_is_refused_before_it_is_loaded(three, monkeypatch):
    (three / "x").mkdir()
    os.symlink(three / "one", three / "x" / "one")
    ours = checkpoint.load(three / "base").model
    note = quantize(ours)
    attach(ours, rank=2)
    facts = {"changes": [note.record()]}
    checkpoint.save_adapter(trained(ours), three / "small", base=three / "base", facts=facts)
    assert alone(three / "small")
    assert alone(three / "base", adapters=[three / "small"]) == alone(three / "small")
    monkeypatch.setattr(checkpoint, "load", lambda *a: pytest.fail("loaded before it was refused"))
    refuses("not an adapter's folder", load_chat_engine, str(three / "base"), [three / "base"])
    (three / "y").mkdir()
    os.symlink(three / "two", three / "y" / "one")
    refuses("named 'one'", load_chat_engine, str(three / "base"), [three / "one", three / "y" / "one"])
    refuses("differently quantized bases", load_chat_engine, str(three / "base"), [three / "one", three / "small"])


@pytest.mark.slow
def test_the_verb_answers_once_or_line_by_line(three):
    want = alone(three / "one")
    once = run_dunes("chat", three / "one", "ab", "--temperature", 0, "--max-tokens", 12)
    assert once.returncode == 0, once.stderr
    assert once.stdout == want + "\n"
    options = ("--temperature", 0, "--max-tokens", 12, "--adapter", three / "two", "--adapter", three / "one")
    lines = run_dunes("chat", three / "base", *options, input="ab\n/adapter one\n/new\nab\n/quit\nab\n")
    assert lines.returncode == 0, lines.stderr
    assert lines.stdout == f"{alone(three / 'two')}\n\n{want}\n"


def test_answers_stop_at_the_context(three):
    one = load_chat_engine(str(three / "base"))
    talk = (Turn("user", "ab" * 60),)
    room = one.chat_model().loaded.context_length - len(encode_prompt(get_template("chatml"), talk, TOKENS))
    assert 0 < room < 80
    assert len("".join(one.answer(talk, sampler(0.0), 10_000))) == room
