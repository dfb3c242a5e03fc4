"""From files of instruction data to ids: what is read, how it is written, what is trained on, what is refused."""

# ruff: noqa: E501  (rows of data, and templates as they are spelled)

import gzip
import json
import os
import sys
from dataclasses import replace
from functools import partial
from hashlib import blake2b

import numpy as np
import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors

from conftest import metaspace_tokenizer, refuses
from dunes.data import (
    check_report,
    collect_corpus,
    data_report,
    examples,
    read_records,
    split_records,
    tokenize_records,
    trained_spans,
)
from dunes.data.batches import collate
from dunes.data.examples import RECORD_FORMATS, Record
from dunes.data.records import MAX_ROW_BYTES
from dunes.flags import parse_fields
from dunes.ops.cross_entropy import IGNORE
from dunes.runs.finetune_data import read_dataset, split_tails, split_windows
from dunes.text import END, Tokenizer
from dunes.text.chat_template import render
from dunes.text.lines import line_parts
from dunes.text.templates import (
    BEGIN,
    TEMPLATES,
    ModelTemplate,
    Turn,
    encode_prompt,
    encode_segments,
    get_template,
)
from small_models import byte_level_bpe

TASK = {"instruction": "Add {them}.", "input": "1 and {instruction}", "output": "Three.\nReally"}
WANTED = [Turn("user", "Hi"), Turn("assistant", "Ho")]
CHAT = [
    {"role": "system", "content": "Be  brief."},
    {"role": "user", "content": "Hi there"},
    {"role": "assistant", "content": "Ho"},
    {"role": "user", "content": "And\n\nso on?"},
    {"role": "assistant", "content": "No, a <b>longer</b> one"},
]
WORDS = "Response:The answer. " * 40 + " ".join(m["content"] for m in CHAT) * 4 + "user assistant system "
LLAMA3_TOKENS = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|end_of_text|>")


@pytest.fixture(scope="module")
def bpe():
    """Trained here: begins with its end. Its pairs merge over the boundary of a prompt and an answer."""
    return Tokenizer.train("bpe", [WORDS, WORDS[1:]], 330)


@pytest.fixture(scope="module")
def llama3():
    """Of the make of llama 3's: a special token in front of a text, others around the roles."""
    return read_config(byte_level_bpe([WORDS], 320), LLAMA3_TOKENS)


@pytest.fixture(scope="module")
def spaced():
    """Of the make of llama 2's: a space is set in front of each text."""
    return metaspace_tokenizer()


def read_config(inner, special):
    """With these special tokens, of which the first stands before a text."""
    inner.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    begin = [(special[0], inner.token_to_id(special[0]))]
    inner.post_processor = processors.TemplateProcessing(single=f"{special[0]} $A", special_tokens=begin)
    made = Tokenizer(inner)
    made._special = replace(made._special, eos=inner.token_to_id(special[-1]))
    return made


def put(folder, content, name="data.json"):
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def lines(*rows):
    return "\n".join(json.dumps(row) for row in rows)


def chat(*roles):
    return tuple(Turn(role, f"{role} {i}") for i, role in enumerate(roles))


def rows(*talks):
    return [Record(tuple(talk), f"made, row {i}") for i, talk in enumerate(talks, 1)]


def made(talk, template, tokenizer, **options):
    (example,) = tokenize_records(rows(talk), template, tokenizer, **options)
    return example


def own_form(name, tokenizer):
    """A template of ours as a model brings one."""
    return ModelTemplate(get_template(name).jinja(tokenizer), tokenizer)


def spelled(ids, tokenizer):
    example = examples.Example(np.array(ids), np.zeros(len(ids), bool))
    return "".join(t for t, _ in trained_spans(example, tokenizer))


# Reading


FORMS = {
    "preference": {"prompt": "Hi", "chosen": "Ho", "rejected": "He"},
    "alpaca": {"instruction": "Hi", "input": "", "output": "Ho"},
    "messages": {"prompt": "x", "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]},
    "completion": {"prompt": "Hi", "completion": "Ho"},
    "sharegpt": {"id": 7, "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}]},
    "ultrachat": {"id": "0", "data": ["Hi", "Ho"]},
    "dolly": {"instruction": "Hi", "response": "Ho", "category": "open_qa"},
    "qa": {"question": "Hi", "answer": "Ho"},
    "text": {"text": "Hi", "instruction": "He", "context": "", "response": "Ho"},
}  # fmt: skip


@pytest.mark.parametrize("write", ["list", "lines", "blank lines", "gzip"])
@pytest.mark.parametrize("kind", FORMS)
def test_each_kind_is_found_by_looking(kind, write, tmp_path):
    row = FORMS[kind]
    content = {
        "list": b"\xef\xbb\xbf \n" + json.dumps([row, row], indent=1).encode(),
        "lines": b"\xef\xbb\xbf" + lines(row, row).encode(),
        "blank lines": f"\n\r\n{json.dumps(row)}\r\n \n{json.dumps(row)}\n\n".encode(),
        "gzip": gzip.compress(lines(row, row).encode()),
    }[write]
    found = read_records(put(tmp_path, content, "data.txt"))
    assert found.format == kind
    assert [list(r.turns) for r in found.rows] == [WANTED if kind != "text" else [Turn("text", "Hi")]] * 2
    places = {"list": ["row 1", "row 2"], "blank lines": ["line 3", "line 5"]}.get(write, ["line 1", "line 2"])
    assert [r.place.rpartition(", ")[2] for r in found.rows] == places
    form = "a JSON list" if write == "list" else "JSON lines"
    words = f"2 records of {RECORD_FORMATS[kind].description}, in {form}"
    assert found.description == f"{tmp_path / 'data.txt'}: {words}"


def test_other_spellings_are_read_as_what_they_say(tmp_path):
    parts = [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]
    messages = [
        {"role": "developer", "content": "S", "name": None},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": "Hm", "weight": 0, "tool_calls": []},
        {"role": "user", "content": ""},
        {"role": "assistant", "content": "Ho", "weight": 1},
    ]
    (row,) = read_records(put(tmp_path, lines({"messages": messages, "tools": None}))).rows
    heard = [Turn("developer", "S"), Turn("user", "Hi"), Turn("assistant", "Hm", trained=False), Turn("user", "")]
    assert list(row.turns) == [*heard, WANTED[1]]
    (row,) = read_records(put(tmp_path, lines({"instruction": "Hi", "output": ""}))).rows
    assert list(row.turns) == [WANTED[0], Turn("assistant", "")]
    (row,) = read_records(put(tmp_path, lines({"conversations": FORMS["messages"]["messages"]}))).rows
    assert list(row.turns) == WANTED


def message(place: str, text: str, rank: int | None = None, **more):
    """A message of OASST's; its place is the name of its parent, which may be empty, and its own name."""
    role = "prompter" if len(place) % 2 else "assistant"
    return {"message_id": place, "parent_id": place[:-1] or None, "text": text, "role": role, "rank": rank} | more


def test_of_a_message_tree_the_best_ranked_answers_are_read(tmp_path):
    first = [message("a", "Hi"), message("ab", "He", 1), message("ac", "Ho", 0), message("abd", "So?", 0)]
    second = [message("e", "A"), message("ef", "B"), message("eg", "C"), message("efh", "D", 0), message("i", "E")]
    shuffled = [second[3], *first, *second[:3], second[4], message("efhk", "F", lang="de")]
    path = put(tmp_path, lines(*shuffled))
    found = read_records(path)
    wanted = [WANTED, [Turn(r, t) for r, t in zip(("user", "assistant") * 2, "ABDF", strict=True)]]
    assert (found.format, [list(record.turns) for record in found.rows]) == ("oasst", wanted)
    assert [record.place.rpartition(", ")[2] for record in found.rows] == ["line 2", "line 6"]
    assert [text for _, text in examples.record_texts(path)] == ["Hi\n\nHo", "A\n\nB\n\nD\n\nF"]
    for bad in ({"rank": "x"}, {"parent_id": "z"}, {"message_id": 7}, {"role": "judge"}):
        refuses("line [12]", read_records, put(tmp_path, lines(first[0], first[2] | bad)))
    refuses("data.json", lambda: [*examples.record_texts(put(tmp_path, lines(first[0])))])
    assert found.ignored == ("lang",)


def said(*messages):
    return {"messages": list(messages)}


S, BEFORE = Turn("system", "S"), [Turn("user", "A"), Turn("assistant", "B")]
BARE = Turn("assistant", "Ho", trained=False)


def answer(**fields):
    """A conversation whose last message has these fields."""
    return said({"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"} | fields)


USED = {
    "alpaca's system": (FORMS["alpaca"] | {"system": "S"}, [S, *WANTED]),
    "alpaca's history": (FORMS["alpaca"] | {"history": [["A", "B"]], "system": "S"}, [S, *BEFORE, *WANTED]),
    "no history": (FORMS["alpaca"] | {"history": [], "system": " "}, WANTED),
    "a completion's history": (FORMS["completion"] | {"history": [("A", "B")]}, [*BEFORE, *WANTED]),
    "messages": (FORMS["messages"] | {"system": "S"}, [S, *WANTED]),
    "sharegpt": (FORMS["sharegpt"] | {"system_prompt": "S"}, [S, *WANTED]),
    "ultrachat": (FORMS["ultrachat"] | {"system_message": "S", "system": None}, [S, *WANTED]),
    "the same twice": (FORMS["sharegpt"] | {"conversations": [{"from": "system", "value": "S"}, *FORMS["sharegpt"]["conversations"]], "system": "S"}, [S, *WANTED]),
    "no tools": (FORMS["sharegpt"] | {"tools": "[]", "images": [], "mask": "User", "weight": 1, "label": True}, WANTED),
    "train": (answer(train=False), [WANTED[0], BARE]),
    "training": (answer(training=False, weight=0), [WANTED[0], BARE]),
    "loss": (answer(loss=0), [WANTED[0], BARE]),
    "trained": (answer(train=True, loss=True, mask=False, weight=1), WANTED),
    "sharegpt's train": ({"conversations": [{"from": "human", "value": "Hi", "train": False}, {"from": "gpt", "value": "Ho", "train": True}]}, [Turn("user", "Hi", trained=False), WANTED[1]]),
}  # fmt: skip


@pytest.mark.parametrize("case", USED)
def test_fields_with_a_meaning_are_used(case, tmp_path):
    row, turns = USED[case]
    (record,) = read_records(put(tmp_path, lines(row))).rows
    assert list(record.turns) == turns
    texts = [t.text for t in turns if t.trained or t.role == "user"]
    trained = [t for _, t in examples.record_texts(tmp_path / "data.json")]
    assert trained == ["\n\n".join(texts)], "in training, too"


def test_variables_of_a_record_reach_a_template_that_reads_them(bpe, tmp_path):
    rows = [FORMS["messages"] | {"chat_template_kwargs": {"think": value}} for value in (False, True, None)]
    source = "{% if think is defined and not think %}quiet {% endif %}" + get_template("chatml").jinja(bpe)
    own = ModelTemplate(source, bpe)
    records = read_records(put(tmp_path, lines(*rows))).rows
    assert [dict(r.variables) for r in records] == [{"think": False}, {"think": True}, {}]
    texts = [spelled(e.ids, bpe) for e in tokenize_records(records, own, bpe)]
    assert ["quiet" in t for t in texts] == [True, False, False]
    prompt = encode_prompt(own, records[0].turns[:1], bpe, records[0].variables)
    assert spelled(prompt, bpe) == texts[0][: len(spelled(prompt, bpe))]
    for template, row in ((get_template("chatml"), records[1]), (own_form("chatml", bpe), records[0])):
        words = r"^.*line [12]: chat_template_kwargs: the chat template .* reads no 'think'"
        refuses(words, list, tokenize_records([records[2], row], template, bpe))
    hidden = replace(records[0], variables={"messages": []})
    refuses("reads no 'messages'", list, tokenize_records([hidden], own, bpe))


DONE = {"role": "assistant", "content": "c"}
BAD = {  # each with one defect
    "nothing": b"",
    "no end": lines(FORMS["text"]) + '\n{"text": "' + "a" * MAX_ROW_BYTES,
    "an empty list": b"[]",
    "not JSON": lines(FORMS["text"]) + "\n{oops",
    "not UTF-8": b'{"text": "a"}\n{"text": "\xff"}',
    "too deep": b"[" * 200_000,
    "a broken gzip": gzip.compress(b'{"text": "a"}' * 99)[:-9],
    "no object": lines(FORMS["text"], 7),
    "unknown keys": lines({"question": "a", "reply": "b"}),
    "wrong type": lines({"instruction": "a", "output": 3}),
    "empty text": lines({"text": ""}),
    "half a character": '{"text": "a\\ud800"}',
    "no list": lines({"messages": "Hi"}),
    "no message": lines({"messages": []}),
    "no message object": lines(said("Hi")),
    "an unknown role": lines(said({"role": "poet", "content": "x"}, DONE)),
    "a call": lines(said({"role": "assistant", "tool_calls": [{}]})),
    "tools": lines(FORMS["messages"] | {"tools": [{}]}),
    "a picture": lines(said({"role": "user", "content": [{"type": "image_url"}]}, DONE)),
    "pictures": lines(FORMS["alpaca"] | {"images": ["a.png"]}),
    "a refusal": lines(said({"role": "assistant", "content": "", "refusal": "No"})),
    "part of a turn": lines(said({"role": "assistant", "content": "ab", "train_detail": [{"end_offset": 1}]})),
    "a mask": lines(said({"role": "assistant", "content": "ab", "mask": 1})),
    "another train": lines(said({"role": "assistant", "content": "a", "train": "no"})),
    "contradiction": lines(said({"role": "assistant", "content": "a", "train": False, "weight": 1})),
    "a trained prompt": lines(said({"role": "user", "content": "a", "train": True}, DONE)),
    "two systems": lines(FORMS["messages"] | {"system": "a", "system_prompt": "b"}),
    "another system": lines(said({"role": "system", "content": "b"}, {"role": "assistant", "content": "c"}) | {"system": "a"}),
    "system of no text": lines(FORMS["alpaca"] | {"system": 3}),
    "history of no list": lines(FORMS["alpaca"] | {"history": "Hi"}),
    "history of no pair": lines(FORMS["alpaca"] | {"history": [["a", "b"], ["a"]]}),
    "history elsewhere": lines(FORMS["messages"] | {"history": [["a", "b"]]}),
    "no variables": lines(FORMS["messages"] | {"chat_template_kwargs": "a"}),
    "a weighted row": lines(FORMS["messages"] | {"weight": 0.5}),
    "a bad row": lines(FORMS["completion"] | {"label": False}),
    "a masked assistant": lines(FORMS["sharegpt"] | {"mask": "Assistant"}),
    "a preference": lines({"conversations": [*FORMS["sharegpt"]["conversations"], {"from": "human", "value": "a"}], "chosen": {"from": "gpt", "value": "b"}}),
    "a suffix": lines(FORMS["completion"] | {"suffix": "c"}),
    "a weight": lines(said({"role": "user", "content": "a", "weight": 0.5}, DONE)),
    "no answer": lines(said({"role": "user", "content": "a"})),
    "sharegpt's": lines({"conversations": [{"from": "human", "text": "a"}, {"from": "gpt", "value": "b"}]}),
}  # fmt: skip


TWICE = '{"output": "a", "instruction": "b", "output": "c"}'
DEEP = '{"messages": [{"role": "user", "content": "a", "content": "b"}, {"role": "assistant", "content": "c"}]}'
CALL = {"function": {"name": "f", "arguments": '{"city": "Rome", "city": "Oslo"}'}}
REPEATED = {
    "a line": (lines(FORMS["alpaca"]) + "\n\n" + TWICE, "line 3"),
    "the first line": (TWICE, "line 1"),
    "a message": (DEEP, "line 1"),
    "a list": (f'[{json.dumps(FORMS["alpaca"])},\n{json.dumps(FORMS["alpaca"])} ,\n {TWICE}]', "not JSON"),
    "a call": (lines(said({"role": "assistant", "tool_calls": [CALL]})), "line 1"),
    "tools": (lines(FORMS["messages"] | {"tools": '[{"name": "f", "name": "g"}]'}), "line 1"),
}  # fmt: skip


@pytest.mark.parametrize("which", REPEATED)
def test_a_key_that_occurs_twice_is_refused(which, tmp_path):
    """Also in a file that is a file of records by its first row alone: it must not become plain text."""
    content, place = REPEATED[which]
    path = put(tmp_path, content, "rows.txt")
    refuses(f"^{path}.*{place}.*occurs twice", read_records, path)
    refuses(f"^{path}", read_dataset, path)
    if which not in ("a call", "tools"):
        refuses(f"^{path}", collect_corpus, [path])


@pytest.mark.parametrize("which", BAD)
def test_a_bad_row_is_refused_with_its_file(which, tmp_path):
    refuses(f"^{tmp_path / 'data.json'}", read_records, put(tmp_path, BAD[which]))


# Templates

ALPACA_TAIL = {"alpaca": "### Response:", "alpaca-newline": "### Response:\n"}
ALPACA_PAIRED = """Below is an instruction that describes a task, paired with an input that provides further context. \
Write a response that appropriately completes the request.

### Instruction:
Add {them}.

### Input:
1 and {instruction}

"""
ALPACA_ALONE = """Below is an instruction that describes a task. \
Write a response that appropriately completes the request.

### Instruction:
Add {them}.

"""


@pytest.mark.parametrize("name", ALPACA_TAIL)
@pytest.mark.parametrize("given", ["1 and {instruction}", "", None])
def test_alpacas_prompts_to_the_byte(name, given, bpe, tmp_path):
    """A1."""
    row = {k: v for k, v in (TASK | {"input": given}).items() if v is not None}
    (record,) = read_records(put(tmp_path, lines(row))).rows
    pieces = get_template(name).render(record.turns)
    want = (ALPACA_PAIRED if given else ALPACA_ALONE) + ALPACA_TAIL[name]
    assert [p.text for p in pieces] == [BEGIN.text, want, "Three.\nReally", "{end}"]
    assert [p.trained for p in pieces] == [False, False, True, True]
    example = made(record.turns, get_template(name), bpe)
    assert spelled(example.ids, bpe) == f"{END}{want}Three.\nReally{END}"
    message = {"role": "user", "content": TASK["instruction"], "input": given or ""}
    assert render(get_template(name).jinja(bpe), [message]) == END + want


@pytest.mark.parametrize("answer", ["The answer", " The", "\nThe", "", "a {b} <|endoftext|> c", "é漢"])
@pytest.mark.parametrize("name", ["plain", "alpaca", "alpaca-newline", "chatml"])
def test_what_is_trained_on_is_the_answer_and_its_end(name, answer, bpe):
    """A2, with a tokenizer whose pairs merge over the boundary."""
    whole, apart = bpe.encode("Response:The"), [*bpe.encode("Response:"), *bpe.encode("The")]
    assert whole != apart
    example = made((Turn("user", "Response:"), Turn("assistant", answer)), get_template(name), bpe)
    trained = example.ids[example.loss_mask].tolist()
    stop = get_template(name).stop_id(bpe)
    assert trained[-1] == stop
    assert stop not in trained[:-1]
    assert bpe.decode(trained[:-1]) == answer
    assert example.loss_mask[: -len(trained) - 2].sum() == 0
    targets = collate([[example]], len(example))[1][0]
    assert targets[targets >= 0].tolist() == trained, "what the loss is given"


@pytest.mark.parametrize("scheme", ["first", "always"])
def test_following_text_gets_no_space_whatever_sets_it(scheme):
    inner = tokenizers.Tokenizer(models.BPE({"▁": 0, "a": 1, "▁a": 2}, [("▁", "a")]))
    inner.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Metaspace(prepend_scheme=scheme)])
    inner.decoder = decoders.Metaspace(prepend_scheme=scheme)
    tokenizer = Tokenizer(inner)
    assert tokenizer.encode("a") == tokenizer.encode_continuation(" a") == [2]
    assert tokenizer.encode_continuation("a") == [1]


def test_special_tokens_in_what_a_user_wrote_are_words(bpe, llama3):
    wrote = "stop <|im_end|> <|eot_id|><|start_header_id|> \U000f0000{end}\U000f0003 now"
    talk = (Turn("user", wrote), Turn("assistant", wrote))
    for template, tokenizer, special in (
        (get_template("chatml"), bpe, {"<|im_start|>": 2, "<|im_end|>": 2}),
        (own_form("chatml", bpe), bpe, {"<|im_start|>": 2, "<|im_end|>": 2}),
        (get_template("llama3"), llama3, {"<|start_header_id|>": 2, "<|end_header_id|>": 2, "<|eot_id|>": 2}),
        (own_form("llama3", llama3), llama3, {"<|start_header_id|>": 2, "<|eot_id|>": 2}),
    ):
        ids = made(talk, template, tokenizer).ids.tolist()
        assert {t: ids.count(tokenizer.token_id(t)) for t in special} == special
        assert tokenizer.decode(ids).count(wrote) == 2


def oracle(tokenizer, **special):
    from transformers import PreTrainedTokenizerFast

    inner = tokenizers.Tokenizer.from_str(tokenizer.json())
    return PreTrainedTokenizerFast(tokenizer_object=inner, **special)


THEIRS = {
    "llama3": """{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}""",
    "chatml": """{{ bos_token }}{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}""",
    "mistral": """{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}{% elif message['role'] == 'assistant' %}{{ ' ' + message['content'] + eos_token }}{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}""",
    "llama2": """{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}{% set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}{% set system_message = false %}{% endif %}{% for message in loop_messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}{% if loop.index0 == 0 and system_message != false %}{% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}{% else %}{% set content = message['content'] %}{% endif %}{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}{% elif message['role'] == 'assistant' %}{{ ' '  + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}""",
}
"""As the models bring them: Meta-Llama-3-8B-Instruct, ChatML with a begin, Mistral-7B-Instruct, Llama-2-7b-chat-hf."""


@pytest.mark.parametrize("name", THEIRS)
@pytest.mark.parametrize("turns", [1, 2, 3, 4])
def test_chat_templates_give_transformers_ids(name, turns, bpe, llama3, spaced):
    ends = {"llama3": (llama3, LLAMA3_TOKENS[0], LLAMA3_TOKENS[-1]), "chatml": (bpe, END, END)}
    tokenizer, bos, eos = ends.get(name, (spaced, "<s>", "</s>"))
    start = 1 if name == "mistral" else 0
    messages = CHAT[start : start + turns]
    opened = messages[-1]["role"] != "assistant"
    if messages[-1]["role"] == "system":
        pytest.skip("a system alone")
    talk = tuple(Turn(m["role"], m["content"]) for m in messages)
    options = {"chat_template": THEIRS[name], "add_generation_prompt": opened, "return_dict": False}
    want = oracle(tokenizer, bos_token=bos, eos_token=eos).apply_chat_template(messages, **options)
    own = ModelTemplate(THEIRS[name].replace("bos_token", f"'{bos}'").replace("eos_token", f"'{eos}'"), tokenizer)
    ours = own_form(name, tokenizer)
    for template in (get_template(name), own, ours):
        pieces = template.render(talk, opened)
        assert encode_segments(pieces, tokenizer)[0] == want
        if opened:
            assert encode_prompt(template, talk, tokenizer) == want


@pytest.mark.parametrize("name", ["chatml", "llama3", "mistral", "llama2", "alpaca", "plain"])
def test_a_prompt_has_the_ids_with_which_the_answer_is_trained(name, bpe, llama3, spaced):
    tokenizer = {"llama3": llama3, "mistral": spaced, "llama2": spaced}.get(name, bpe)
    talk = (Turn("user", "Response:"), Turn("assistant", "The answer"))
    for template in (get_template(name), own_form(name, tokenizer)):
        example = made(talk, template, tokenizer)
        first = int(example.loss_mask.argmax())
        assert encode_prompt(template, talk[:1], tokenizer) == example.ids[:first].tolist()
        begin = tokenizer.document_start
        assert example.ids[: len(begin)].tolist() == begin
        assert example.ids[len(begin)] != begin[0]


@pytest.mark.parametrize("name", ["chatml", "llama3", "mistral", "llama2"])
def test_all_answers_and_their_ends_are_trained_on(name, bpe, llama3, spaced):
    tokenizer = {"llama3": llama3, "mistral": spaced, "llama2": spaced}.get(name, bpe)
    talk = (Turn("system", "S"), *chat("user", "assistant", "user"), Turn("assistant", "no", trained=False))
    talk += chat("user", "assistant")
    stop = get_template(name).stop_id(tokenizer)
    for template in (get_template(name), own_form(name, tokenizer)):
        example = made(talk, template, tokenizer)
        parts = [t for t, trained in trained_spans(example, tokenizer) if trained]
        end = tokenizer.inner.id_to_token(stop)
        assert [t.replace(end, "").strip() for t in parts] == ["assistant 1", "assistant 1"]
        assert all(t.endswith(end) for t in parts)
        assert example.ids[example.loss_mask].tolist().count(stop) == 2
        everything = made(talk, template, tokenizer, train_on="all")
        assert everything.ids.tolist() == example.ids.tolist()
        starts = np.isin(everything.ids, tokenizer.document_start) & (everything.ids != tokenizer.eos)
        masked = made([replace(t, trained=True) for t in talk], template, tokenizer).loss_mask ^ example.loss_mask
        assert tokenizer.decode(everything.ids[masked].tolist()).strip().startswith("no")
        assert everything.loss_mask[1:].tolist() == (~starts & ~masked)[1:].tolist(), "but for what is excluded"
        assert not everything.loss_mask[0]


NO_FORM = {
    "no turns": ("mistral", ("user", "user", "assistant")),
    "assistant first": ("llama2", ("assistant", "user", "assistant")),
    "system later": ("mistral", ("user", "system", "assistant")),
    "several": ("alpaca", ("user", "assistant") * 2),
    "a system": ("alpaca-newline", ("system", "user", "assistant")),
    "text": ("alpaca", ("text",)),
}
LOSES_ANSWERS = (
    "{% for m in messages %}{{ m.content }}{% endfor %}",
    "{% for m in messages %}{{ raise_exception('no') if m.content == 'user 0' }}{{ m.content }}<|im_end|>{% endfor %}",
    "{% for m in messages %}{{ m.content | upper if loop.last else m.content }}<|im_end|>{% endfor %}",
    "{% for m in messages %}{{ m.content[:6] }}<|im_end|>{% endfor %}",
    "{% for m in messages %}{{ m.content[:6] }}<|im_end|>{% if loop.last and m.role == 'assistant' %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}",
)


@pytest.mark.parametrize("which", [*NO_FORM, *LOSES_ANSWERS])
def test_a_row_that_a_template_cannot_write_is_refused_by_its_place(which, spaced, bpe):
    if which in NO_FORM:
        name, roles = NO_FORM[which]
        template, tokenizer = get_template(name), spaced
    else:
        template, tokenizer, roles = ModelTemplate(which, bpe), bpe, ("user", "assistant")
    talks = [*[chat("user", "assistant")] * (which in NO_FORM) * 70, chat(*roles)]
    refuses(f"^made, row {len(talks)}: ", list, tokenize_records(rows(*talks), template, tokenizer))


def test_a_template_that_the_tokenizer_cannot_write_is_refused_before_the_first_row(bpe, llama3, spaced):
    begin = lambda name, tokenizer, *how: next(tokenize_records(rows(WANTED), get_template(name), tokenizer, *how))
    refuses("template chatml", begin, "chatml", spaced)
    held = Tokenizer(tokenizers.Tokenizer.from_str(spaced.json()))
    held.inner.add_special_tokens(["[INST]"])
    refuses("template mistral", begin, "mistral", held)
    refuses(f"available: {', '.join(TEMPLATES)}", get_template, "vicuna")
    refuses("train_on", begin, "plain", bpe, "prompt")
    for name, tokenizer in (("chatml", bpe), ("llama3", llama3)):
        refuses("made, row 1", made, [Turn("text", "a")], get_template(name), tokenizer)
    excluded = (Turn("user", "Hi", trained=False), WANTED[1])
    assert made(excluded, get_template("chatml"), bpe).loss_mask.any()
    refuses("made, row 1", made, excluded, get_template("chatml"), bpe, train_on="all")


def test_an_own_template_may_rewrite_earlier_answers_and_strip_spaces(bpe):
    """As templates do that leave out earlier thoughts, and tokens that take the spaces beside them."""
    source = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and loop.last %}<t></t>{% endif %}"
        "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    example = made(chat("user", "assistant", "user", "assistant"), ModelTemplate(source, bpe), bpe)
    parts = [t for t, trained in trained_spans(example, bpe) if trained]
    assert parts == ["assistant 1<|im_end|>", "<t></t>assistant 3<|im_end|>"]
    strips = Tokenizer(tokenizers.Tokenizer.from_str(bpe.json()))
    end = AddedToken("<|e|>", rstrip=True, lstrip=True, special=True, normalized=False)
    strips.inner.add_special_tokens([end])
    own = ModelTemplate("{% for m in messages %}{{ m.content }} <|e|>\n{% endfor %}", strips)
    e = strips.token_id("<|e|>")
    assert made(chat("user", "assistant"), own, strips).ids.tolist() == [
        *strips.encode("user 0"), e, *strips.encode("assistant 1"), e
    ]  # fmt: skip


# What is known before the first step


def reported(talks, template, tokenizer, context=1000, validation=(), vocab=None, **options):
    learn, hold = (list(tokenize_records(rows(*t), template, tokenizer, **options)) for t in (talks, validation))
    return data_report(learn, hold, context, vocab or tokenizer.vocab, template, tokenizer)


def checks(talks, template, tokenizer, context=1000, limit=None, **options):
    """Refused, or not, before the first step."""
    check_report(reported(talks, template, tokenizer, context, **options), **({"limit": limit} if limit else {}))


def test_a_report_counts(bpe):
    talks = [(Turn("user", "Hi" * i), Turn("assistant", "Ho")) for i in (1, 1, 2, 3, 40)]
    found = reported(talks, get_template("plain"), bpe, 30, talks[:1])
    sizes = [len(bpe.encode("Hi" * i)) + len(bpe.encode("Ho")) + 2 for i in (1, 1, 2, 3, 40)]
    answer = len(bpe.encode("Ho")) + 1
    assert (found.examples, found.validation, found.duplicates, found.leaked) == (5, 1, 1, 1)
    assert (found.tokens, found.trained, found.lost) == (sum(sizes), 4 * answer, answer)
    assert found.lengths == (sizes[2], sizes[4], sizes[4], sizes[4])
    assert (found.truncated, found.with_stop, found.without_target, found.double_bos) == (1, 4, 1, 0)
    assert found.max_id == bpe.eos
    texts = ["Hi", "HiHi", "HiHiHi", "Hi" * 40, "Ho"]
    assert found.distinct_ids == len({i for t in texts for i in bpe.encode(t)} | {bpe.eos})
    assert f"truncated at 30: 20.0% of the examples, {answer} targets lost" in found.lines()[2]
    assert len(found.warnings()) == 3
    assert all(str(n) in " ".join(found.lines()) for n in (5, sum(sizes), 4 * answer))
    assert reported(talks, get_template("plain"), bpe, sizes[4] - 1).truncated == 0
    assert reported(talks, get_template("plain"), bpe, sizes[4] - 2).truncated == 1
    check_report(found, limit=0.2)
    refuses(r"20.0% of the examples are longer than the context of 30", check_report, found)


GOOD = [(Turn("user", "Hi"), Turn("assistant", "The answer")), (Turn("user", "Hi"), Turn("assistant", "Ho"))]


def test_nothing_to_train_on_and_ids_that_the_model_has_not_are_refused(bpe):
    plain, masked = get_template("plain"), [tuple(replace(t, trained=False) for t in talk) for talk in GOOD]
    refuses(r"none of .* tokens is a target", checks, masked, plain, bpe)
    refuses("none of 0 tokens is a target", checks, [], plain, bpe)
    words = f"the examples contain the id {bpe.eos}, and the model has {bpe.eos}"
    refuses(words, checks, GOOD, plain, bpe, vocab=bpe.eos)
    words = "none of 2 validation examples has a target within the context of 1000 tokens"
    refuses(words, checks, GOOD, plain, bpe, validation=masked)
    found = reported(GOOD, plain, bpe, validation=[*masked, *GOOD])
    check_report(found)
    assert any("2 validation examples are skipped: no targets" in line for line in found.warnings())


def test_an_end_that_is_never_learnt_is_refused(bpe, monkeypatch):
    """The bug of padding with the end token and then not training on padding."""
    original = examples._example

    def aliased(*args):
        made = original(*args)
        return examples.Example(made.ids, made.loss_mask & (made.ids != bpe.eos), made.place)

    monkeypatch.setattr(examples, "_example", aliased)
    refuses("the token that ends an answer is never a target", checks, GOOD, get_template("plain"), bpe)
    monkeypatch.undo()
    # Cut off, at a context that a permissive limit allows.
    context = len(bpe.encode("HiThe answer")) - 1
    refuses("never a target", checks, GOOD[:1], get_template("plain"), bpe, context, limit=1)


def test_a_beginning_that_stands_twice_is_refused(llama3, bpe, monkeypatch):
    """The template writes it, and the tokenizer adds it; also where the token is that of the end."""
    source = "<|begin_of_text|>" + get_template("llama3").jinja(llama3)
    refuses("2 examples begin with the BOS token twice", checks, GOOD, ModelTemplate(source, llama3), llama3)

    def doubled(pieces, tokenizer, everything):
        ids, trained = encode_segments(pieces, tokenizer, everything)
        return [*tokenizer.document_start, *ids], [*([False] * len(tokenizer.document_start)), *trained]

    monkeypatch.setattr(examples, "encode_segments", doubled)
    for tokenizer in (llama3, bpe):
        for train_on in ("answers", "all"):
            alpaca = get_template("alpaca")
            refuses("2 examples begin with", checks, GOOD, alpaca, tokenizer, train_on=train_on)


# Files of records and of plain text, alone and in folders


def test_fields_that_are_named_are_read_as_plain_text(tmp_path):
    asked = [{"q": "Hi", "a": "Ho", "n": 1}, {"q": " ", "a": None}, {"a": "alone"}, {"q": "", "n": 2}]
    found = read_records(put(tmp_path, lines(*asked)), ["q", "a"])
    assert [r.turns for r in found.rows] == [(Turn("text", t),) for t in ("Hi\n\nHo", "alone")]
    assert [r.place.rpartition(", ")[2] for r in found.rows] == ["line 1", "line 3"]
    assert found.description.endswith("2 records of plain text, in JSON lines; 2 without text skipped")
    for field in ("n", "body"):
        refuses("data.json", read_records, put(tmp_path, lines(*asked)), [field])


@pytest.mark.parametrize("kind", FORMS)
def test_what_is_text_in_records_of_each_kind(kind, tmp_path):
    path = put(tmp_path, lines(FORMS[kind], FORMS[kind]))
    expected = "Hi" if kind == "text" else "Hi\n\nHo"
    assert [text for _, text in examples.record_texts(path)] == [expected] * 2
    read = lambda *rows: list(examples.record_texts(put(tmp_path, lines(*rows))))
    refuses("data.json", read, {"question": "a"})
    refuses("data.json", read, {"text": " "}, {"text": None})


def test_parquet_is_read_like_lines(tmp_path, monkeypatch):
    polars = pytest.importorskip("polars")
    monkeypatch.setattr("dunes.data.records.TABLE_ROWS", 2)
    for kind, row in FORMS.items():
        path = tmp_path / f"{kind}[a=1].parquet"
        polars.DataFrame([row] * 5).write_parquet(path, row_group_size=3)
        found = read_records(path)
        assert (found.format, found.file_format, len(found.rows)) == (kind, "parquet", 5)
        plain = read_records(put(tmp_path, lines(*[row] * 5)))
        assert [r.turns for r in found.rows] == [r.turns for r in plain.rows]
        assert found.rows[4].place == f"{path}, row 5"
    wide = tmp_path / "wide"
    polars.DataFrame({"id": [1, 2, 3], "body": ["a", None, "c"]}).write_parquet(wide)
    found = read_records(wide, ["body"])
    assert [r.turns[0].text for r in found.rows] == ["a", "c"]
    refuses(str(wide), read_records, wide, ["text"])
    polars.DataFrame({"text": []}).write_parquet(tmp_path / "empty.parquet")
    for read in (read_dataset, lambda path: collect_corpus([path])):
        refuses(r"empty\.parquet", read, tmp_path / "empty.parquet")
    for value in (1, b"a", ["a"], {"a": "b"}):
        polars.DataFrame({"text": [None, None, value]}).write_parquet(tmp_path / "typed", row_group_size=1)
        refuses("typed, row 3", read_records, tmp_path / "typed", ["text"])
    for content in (b"PAR1" + wide.read_bytes()[4:-9], b'{"text": "a"}'):
        refuses(r"x\.parquet", read_records, put(tmp_path, content, "x.parquet"))
    monkeypatch.setitem(sys.modules, "polars", None)
    refuses("pip install", read_records, wide)


RENAMED = {"prompt": "question", "completion": "reply", "system": "rules"}
FIELDS = ("prompt=question,completion=reply", "system=rules")


@pytest.mark.parametrize("suffix", ["jsonl", "json", "jsonl.gz", "parquet", "csv", "tsv"])
def test_fields_are_renamed_in_files_of_all_forms(suffix, tmp_path):
    polars = pytest.importorskip("polars")
    texts = [(f'Is {i},\n"so"?', f"{i}\tyes") for i in range(3)]
    asked = [{"question": q, "reply": a, "rules": "Be brief.", "prompt": "p"} for q, a in texts]
    path, table = tmp_path / f"data.{suffix}", polars.DataFrame(asked)
    if suffix == "parquet":
        table.write_parquet(path)
    elif suffix in ("csv", "tsv"):
        table.write_csv(path, separator="," if suffix == "csv" else "\t", include_bom=suffix == "csv")
    else:
        text = json.dumps(asked) if suffix == "json" else lines(*asked)
        path.write_bytes(gzip.compress(text.encode()) if suffix.endswith("gz") else text.encode())
    assert parse_fields(FIELDS) == RENAMED
    ((found,), _) = read_dataset(path, names=RENAMED)
    wanted = [(Turn("system", "Be brief."), Turn("user", q), Turn("assistant", a)) for q, a in texts]
    assert [row.turns for row in found.rows] == wanted
    assert examples.ignored_line([found]) == ["ignored fields: prompt (replaced by --fields)"]
    corpus = collect_corpus([path], names=RENAMED)
    texts = ["".join(text) for d in corpus.documents for text in d.texts()]
    assert sorted(texts) == ["\n\n".join(turn.text for turn in turns) for turns in wanted]
    refuses("^.*data.*--fields", read_dataset, path)
    for names in (
        {"system": "other", "output": "reply", "instruction": "question"},
        {"completion": "other", "prompt": "question"},
        {"reply": "a"},
        {"output": "a", "completion": "b"},
    ):
        refuses("--fields", read_dataset, path, names=names)


def test_renamed_fields_select_the_format(tmp_path):
    """Fields that another format would be known by are left alone, names may be exchanged, and text has one too."""
    row = {"messages": FORMS["messages"]["messages"], "text": "x", "q": "Hi", "a": "Ho", "output": "no"}
    row |= {"instruction": "no"}
    path = put(tmp_path, lines(row, row | {"note": 1}))
    for names, kind in (
        ({"prompt": "q", "completion": "a"}, "completion"),
        ({"instruction": "q", "output": "a"}, "alpaca"),
        ({"instruction": "q", "chosen": "a", "rejected": "output"}, "preference"),
        ({"text": "a"}, "text"),
        ({"conversations": "messages"}, "sharegpt"),
    ):
        found = read_records(path, names=names)
        assert found.format == kind
        assert found.rows[0].turns[-1].text == "Ho"
    swapped = put(tmp_path, lines({"prompt": "Ho", "completion": "Hi"}), "swapped.jsonl")
    found = read_records(swapped, names={"prompt": "completion", "completion": "prompt"})
    assert (list(found.rows[0].turns), found.ignored) == (WANTED, ())
    optional = put(tmp_path, lines({"q": "Hi", "a": "Ho"}, {"q": "Hi", "a": "Ho", "s": "S"}), "optional.jsonl")
    found = read_records(optional, names={"prompt": "q", "completion": "a", "system": "s"})
    assert [len(r.turns) for r in found.rows] == [2, 3]
    refuses("no file has records", read_dataset, put(tmp_path, "A book.", "book.txt"), names={"text": "q"})
    for name, content in (("twice.csv", "q,a,q\n1,2,3\n"), ("ragged.csv", "q,a\n1,2,3\n"), ("none.csv", "")):
        refuses(name, read_dataset, put(tmp_path, content, name), names={"prompt": "q", "completion": "a"})
    for text in ("prompt", "prompt=", "=a", "", "prompt=a,prompt=b", "b=a,c=a"):
        refuses("--fields ", parse_fields, [text])
    assert parse_fields(["prompt=a,b=c,text=x=y, z"]) == {"prompt": "a", "b": "c", "text": "x=y, z"}
    assert parse_fields(["prompt=a, b"]) == {"prompt": "a, b"}


def test_a_folder_may_hold_records_of_several_kinds_and_plain_text(tmp_path):
    folder = tmp_path / "data"
    (folder / "in").mkdir(parents=True)
    files = {"package.json": '{"name": "a project"}', "names.json": '["names"]', "image.bin": b"\0\1"}
    files |= dict.fromkeys(("book.txt", "copy.txt"), "A book.\n")
    files |= {".gitignore": "ignored*", "ignored.jsonl": "{"}
    files |= {"chats.jsonl": lines(FORMS["messages"]), "tasks.json": json.dumps([FORMS["alpaca"]], indent=1)}
    files |= {"in/texts.jsonl.gz": gzip.compress(lines(FORMS["text"]).encode())}
    for name, content in files.items():
        put(folder, content, name)
    (folder / "link").symlink_to(__file__)
    found, _ = read_dataset(folder)
    assert {f.path.name: (f.format, len(f.rows)) for f in found} == {
        "chats.jsonl": ("messages", 1),
        "texts.jsonl.gz": ("text", 1),
        "tasks.json": ("alpaca", 1),
        "data": ("text", 4),
    }
    plain = {r.place.rpartition("/")[2]: r.turns[0].text for r in found[-1].rows}
    assert plain["book.txt"] == "A book.\n"
    assert plain.keys() == {"book.txt", "package.json", "names.json", ".gitignore"}
    assert len(read_dataset(folder, follow_links=True)[0][-1].rows) == 5
    put(folder, "{broken", "z.jsonl")
    refuses(r"data/z\.jsonl, line 1: not JSON", read_dataset, folder)
    put(folder, '[{"name": "settings"}]', "settings.json")
    refuses(r"data/settings\.json, row 1: expected the keys .* --text-field", read_dataset, folder)


def test_a_file_that_is_named_is_what_it_holds(tmp_path):
    book = "It was a dark night.\n[and]\n"
    for content in (book, "[Chapter 1]\n" + book, "{curly}\n" + book):
        ((found,), _) = read_dataset(put(tmp_path, content, "book.txt"))
        assert [r.turns for r in found.rows] == [(Turn("text", content),)]
    ((found,), _) = read_dataset(put(tmp_path, lines(FORMS["alpaca"]), "rows"))
    assert found.format == "alpaca"
    refuses("line 1: not JSON", read_dataset, put(tmp_path, "broken", "data.json"))
    for content, name in ((b"\xff\xfe", "a.txt"), (b"", "b.txt"), (b"\0", "c")):
        refuses(name, read_dataset, put(tmp_path, content, name))
    refuses("nowhere", read_dataset, tmp_path / "nowhere")


@pytest.mark.timeout(30)
def test_a_pipe_for_a_file_of_records_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe.jsonl")
    refuses(r"pipe\.jsonl: cannot be read: not a plain file", read_dataset, tmp_path / "pipe.jsonl")
    if os.path.exists("/proc/kmsg"):
        (tmp_path / "log.jsonl").symlink_to("/proc/kmsg")
        refuses("no records", read_records, tmp_path / "log.jsonl")


# Plain text in windows


def targets_of(made, context):
    """The targets that a trainer is asked for in rows of this context, in order."""
    return [int(t) for e in made for t in collate([[e]], context)[1].flatten() if t != IGNORE]


@pytest.mark.parametrize("context", [1, 2, 7, 100, 1000])
def test_each_token_of_a_text_is_a_target_once(bpe, llama3, spaced, context):
    for tokenizer in (bpe, llama3, spaced):
        text = made([Turn("text", WORDS[:300])], get_template("plain"), tokenizer)
        parts = [*split_windows(text, context)]
        assert targets_of(parts, context) == text.ids[1:].tolist()
        assert all(len(p) <= context + 1 for p in parts)
        assert [p.window_index for p in parts] == [*range(len(parts))]
        counted = data_report(parts, [], context, tokenizer.vocab, get_template("plain"), tokenizer)
        assert (counted.tokens, counted.trained, counted.lost) == (len(text), len(text) - 1, 0)
        assert counted.windows == len(parts)
        assert counted.truncated == counted.without_target == counted.double_bos == 0
        check_report(counted)


def test_the_ids_of_a_long_text_are_those_of_the_whole(bpe, spaced, monkeypatch):
    monkeypatch.setattr(examples, "line_parts", partial(line_parts, size=5))
    text = "The answer.\nis\r\n\n" + WORDS[:500].replace(" ", "\n") + "no end"
    for tokenizer in (bpe, spaced):
        whole, flags = encode_segments(get_template("plain").render((Turn("text", text),)), tokenizer)
        found = made([Turn("text", text)], get_template("plain"), tokenizer)
        assert (found.ids.tolist(), found.loss_mask.tolist()) == (whole, flags)


def test_the_hash_of_a_talk_is_that_of_its_words(monkeypatch):
    monkeypatch.setattr(examples, "line_parts", partial(line_parts, size=3))
    talks = [(), chat("user"), chat("user", "assistant"), (Turn("user", "a\n\n b\nc", "d e\x1cf"), Turn("text", "")),
             (Turn("user", "é \"q\"\u2028x", ""), Turn("assistant", " \n"))]  # fmt: skip
    for talk in talks:
        words = [[t.role, *t.text.split(), None, *t.input.split()] for t in talk]
        digest = blake2b(json.dumps(words).encode(), digest_size=6).digest()
        assert examples.split_hash(talk) == int.from_bytes(digest) / 2**48


def test_a_split_leaves_something_on_both_sides_and_goes_by_inputs_and_roles():
    two = rows(*[(Turn("user", w), Turn("assistant", "b")) for w in "ab"])
    for share in (1e-9, 0.5, 0.999999):
        assert [len(side) for side in split_records(two, share)] == [1, 1]
    assert split_records(two, 0) == (two, [])
    assert split_records(two[:1] * 3, 0.5) == (two[:1] * 3, [])
    refuses("--val-fraction is 1; it must be at least 0 and below 1", split_records, two, 1)
    a, b = (Turn("user", "a b"), Turn("assistant", "")), (Turn("user", "a", "b"), Turn("assistant", ""))
    assert len({examples.split_hash(t) for t in (a, b, (Turn("user", "a"), Turn("assistant", "b")))}) == 3


def test_tails_are_held_out_without_leaks():
    tokenizer = Tokenizer.train("bytes", [])
    whole = [made([Turn("text", WORDS[:n])], get_template("plain"), tokenizer) for n in (600, 900, 8)]
    learn, held = split_tails(whole, 0.2)
    assert len(learn) == 3
    assert len(held) == 2
    assert learn[2] is whole[2]
    for text, head, tail in zip(whole, learn, held, strict=False):
        asked = [targets_of(side, 2000) for side in ([head], [tail])]
        assert asked[0] + asked[1] == text.ids[1:].tolist()
        assert abs(len(asked[1]) / len(text) - 0.2) < 0.01
        parts = [*split_windows(head, 9), *split_windows(tail, 9)]
        assert targets_of(parts, 9) == text.ids[1:].tolist()
    counted = data_report(learn[:1], held[:1], 2000, tokenizer.vocab, get_template("plain"), tokenizer)
    assert counted.with_stop == 0
    check_report(counted)  # a text that goes on has no end to learn


def test_texts_beside_conversations_hide_no_answer_without_an_end(bpe, monkeypatch):
    text = [*split_windows(made([Turn("text", "The answer")], get_template("plain"), bpe), 3)]
    answer = made(GOOD[0], get_template("plain"), bpe)
    check_report(data_report([answer, *text], [], 99, bpe.vocab, get_template("plain"), bpe))
    endless = examples.Example(answer.ids, answer.loss_mask & (answer.ids != bpe.eos))
    report = data_report([endless, *text], [], 99, bpe.vocab, get_template("plain"), bpe)
    refuses("never a target", check_report, report)
