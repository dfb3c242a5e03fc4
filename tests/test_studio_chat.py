"""The studio's chat: tokens as the template renders them, rows that finetuning reads, and a chat in a browser."""

import json
import re
from html import escape

import pytest

from dunes import checkpoint
from dunes.data.examples import read_records
from dunes.studio.conversation import pair_rows, token_html
from dunes.text.templates import Turn, encode_prompt, get_template
from studio import needs_browser, opened, studio
from test_adapter_folders import TOKENS
from test_chat_verb import three  # noqa: F401  (fixture)


def test_tokens_are_those_of_the_template_and_special_ones_stand_out():
    ids = encode_prompt(get_template("chatml"), (Turn("user", "a, b\n#"),), TOKENS)
    chips = re.findall(r'<span class="([^"]*)">([^<]*)<sub class="dim">(\d+)</sub>', token_html(TOKENS, ids))
    assert [(int(id), "primary" in style) for style, _, id in chips] == [(i, not TOKENS.bytes_of(i)) for i in ids]
    shown = escape(TOKENS.inner.decode(ids, skip_special_tokens=False)).replace("\n", "↵")
    assert "".join(text for _, text, _ in chips) == shown


def test_two_different_answers_are_preferences_that_finetuning_reads(tmp_path):
    rows = pair_rows([{"role": "user", "content": "Hi"}], ["Human: a", "b"])
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    answers = [(row.turns[-1].text, row.rejected[-1].text) for row in read_records(tmp_path / "pairs.jsonl").rows]
    assert answers == [("Human: a", "b"), ("b", "Human: a")]
    assert not any(pair_rows([], texts) for texts in (["a", "a"], ["", "b"], ["a"], ["a", "b", "c"]))


@pytest.mark.slow
@needs_browser
def test_answers_are_streamed_stopped_edited_regenerated_compared_and_saved(three):  # noqa: F811
    base = checkpoint.load_with_tokenizer(three / "base")
    checkpoint.save(base.model, three / "long", base.tokenizer, 5000, {"template": "chatml"})
    with studio(three) as address, opened(f"{address}/chat?model=long") as page:

        def do(clicks, fills, shown):
            page.keyboard.press("Escape")  # the list of models stays open
            page.locator(".q-menu").last.wait_for(state="hidden")
            for text in clicks:
                page.get_by_text(text).or_(page.get_by_label(text)).last.click()
            for label, text in fills.items():
                page.get_by_label(label).fill(text)
                page.get_by_label(label).press("Enter")
            page.locator(shown).wait_for()

        do(["sampling"], {"temperature": "0", "max tokens": "4000", "Message": "ab"}, "text=/[1-9] tokens.s$/")
        do(["Stop"], {}, "text=stopped")
        do(["More", "Edit"], {"max tokens": "8"}, "body:not(:has([aria-label=More]))")
        do([], {"Message": "abc", "max tokens": "7"}, "[aria-label=More]")
        do(["More", "Regenerate"], {}, "body:has-text('+ 7 tokens') [aria-label=More]")
        do(["Models", "one"], {"Message": "b"}, "[aria-label=More] >> nth=1")
        do(["More", "Prefer answer 2"], {}, "text=pairs.jsonl")
        do(["More", "Save for finetuning"], {}, "text=chats.jsonl")
    (pair,), (chat,) = (read_records(three / f"{name}.jsonl").rows for name in ("pairs", "chats"))
    assert (chat.turns[0].text, chat.turns[2].text, chat.turns[-1]) == ("abc", "b", pair.turns[-1])
