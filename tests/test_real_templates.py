"""The chat templates in llama.cpp's sources: prompts are transformers' text, and conversations are trained on."""

import json
import re

import pytest

from dunes.text import Tokenizer
from dunes.text.templates import Turn, find_template
from real_models import llama_cpp_models

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
MARK = re.compile(
    r"<\|[^|<>\s]{1,40}\|>|<\uff5c[^\uff5c<>]{1,40}\uff5c>|</?[a-zA-Z_|:0-9]{1,30}>|\[/?[A-Z_ ]{3,30}\]"
    r"|<\|[a-z_]+>|<[a-z_]+\|>|\[e~\[|\]~!?b\[|<[a-z_]+\|"
)
SYSTEM = {"role": "system", "content": "You are terse."}
TURNS = [
    {"role": "user", "content": "Hello there, how many?"},
    {"role": "assistant", "content": "Hi, I am fine."},
    {"role": "user", "content": "And now this?"},
    {"role": "assistant", "content": "Then that one."},
]
REFUSALS = {
    "llama-cpp-rwkv-world": "ends an answer with no special token",
    "mistralai-Mistral-Nemo-Instruct-2407": "leaves out or changes a system message",
}


@pytest.fixture(scope="module")
def templates(tmp_path_factory):
    """Each template's name, with our tokenizer and theirs, which have all of its marks as special tokens."""
    from transformers import PreTrainedTokenizerFast

    def tokenizers(name, source):
        folder = tmp_path_factory.mktemp("template")
        marks = {mark for mark in MARK.findall(source) if mark not in ("<think>", "</think>")}
        # Hunyuan's template writes its marks by a format.
        marks |= {mark.replace("{}", ":opensource") for mark in marks if ":opensource" in source}
        tokenizer = Tokenizer.train("bytes", [])
        tokenizer.inner.add_special_tokens(sorted(marks | {"<s>", "</s>", "<|endoftext|>", "[BOS]", "[EOS]"}))
        tokenizer.save(folder)
        (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
        (folder / "chat_template.jinja").write_text(source, encoding="utf-8")
        return Tokenizer.load(folder), PreTrainedTokenizerFast.from_pretrained(str(folder))

    files = {n[10:-6]: s for n, s in sorted(llama_cpp_models().items()) if re.match(r"templates/.*\.jinja$", n)}
    return {name: tokenizers(name, source.decode()) for name, source in files.items()}


def theirs(tokenizer, messages, is_open):
    """What transformers renders, or None where the template raises."""
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=is_open)
    except Exception:
        return None


def segments(tokenizer, messages, is_open):
    turns = tuple(Turn(message["role"], message["content"]) for message in messages)
    return find_template(tokenizer, {}).render(turns, is_open)


@pytest.mark.parametrize(("messages", "least"), [(TURNS[:3], 66), ([SYSTEM, *TURNS[:3]], 65)])
def test_every_prompt_that_transformers_renders_is_the_same_text(templates, messages, least):
    expected = {name: theirs(hf, messages, True) for name, (_, hf) in templates.items()}
    expected = {name: text for name, text in expected.items() if text is not None}
    assert len(expected) >= least
    found = {n: "".join(s.text for s in segments(templates[n][0], messages, True)) for n in expected}
    assert [name for name in expected if found[name] != expected[name]] == []


def test_all_but_two_train_on_the_answers_and_say_why_they_do_not(templates):
    refused, rendered = {}, 0
    for name, (tokenizer, hf) in templates.items():
        for messages in (TURNS, [SYSTEM, *TURNS]):
            text = theirs(hf, messages, False)
            rendered += text is not None
            if text is None:
                continue
            try:
                parts = segments(tokenizer, messages, False)
            except ValueError as error:
                refused[name] = str(error)
                continue
            # Some leave an answer open at the end of a conversation; training closes it.
            assert "".join(s.text for s in parts).startswith(text), name
            learned = "".join(s.text for s in parts if s.trained)
            assert all(m["content"] in learned for m in TURNS if m["role"] == "assistant"), (name, learned)
            assert not any(m["content"] in learned for m in messages if m["role"] != "assistant"), (name, learned)
    print(rendered, "conversations", refused)
    assert refused.keys() == REFUSALS.keys()
    assert all(REFUSALS[name] in reason for name, reason in refused.items())
