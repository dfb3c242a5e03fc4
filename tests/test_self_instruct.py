"""Instruction data from a model: what it is asked, how its answer is cut, what is dropped and why."""

import json
import random
import warnings
from itertools import count, islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import refuses
from teacher.endpoint import Answer
from teacher.tasks import (
    GO_ON,
    InstructionIndex,
    Round,
    Task,
    filter_item,
    generate,
    numbered_prompt,
    parse_answer,
    read_seed_tasks,
)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from rouge_score import rouge_scorer, tokenize

SEEDS = [
    Task("Name three birds  of\nAsia:", "", "Crane, ibis, hoopoe."),
    Task("Sort these numbers from small to large.", "3, 1, 2", "1, 2, 3"),
    Task("What is the capital of France?", "", "Paris."),
    Task("Rewrite this sentence in the past tense.", "She sings.", "She sang."),
]


def theirs(a, b):
    a, b = (tokenize.tokenize(text, None) for text in (a, b))
    return rouge_scorer._score_lcs(a, b).fmeasure


def rouge_l(a, b):
    return (InstructionIndex([a]).nearest(b) or (0.0, ""))[0]


def listed(*items, first=4):
    """An answer as a model writes it: it goes on after the number of the first task."""
    parts = [
        f"{i}. Instruction: {asked}\n{i}. Input:\n{given}\n{i}. Output:\n{said}\n"
        for i, (asked, given, said) in enumerate(items, first)
    ]
    return "###\n".join(parts).removeprefix(f"{first}. Instruction:")


# A model that writes what is good and what is not, and the list that Alpaca's rules make of it

LONG = "Explain " + "very " * 149 + "slowly."
WRITTEN = [
    ("Explain why the sky is blue.", "<noinput>", "Air scatters blue light most.", ""),
    ("Explain, why the SKY is blue!", "<noinput>", "It scatters.",
     "similar: 1.00 to 'Explain why the sky is blue.'"),
    ("Explain why the sky is red.", "", "Dust.", "similar: 0.83 to 'Explain why the sky is blue.'"),
    ("Explain blue skies.", "", "Air.", "short"),
    (LONG, "", "No.", "long"),
    ("Draw a house with a red roof.", "", "[ ]", "word: draw"),
    ("Go to the shop and buy two eggs.", "", "Done.", "word: go to"),
    ("Describe the withdrawal of a mapmaker.", "", "He left.", ""),
    ("Write a program that adds two numbers.", "1, 2", "3", "program"),
    ('"Hello" is said in which languages?', "", "English.", "punctuation"),
    ("Übersetze den Satz ins Englische.", "Guten Tag.", "Hello.", "not ASCII"),
    ("Say in one word what a café sells.", "", "Coffee.", ""),
    ("A 和 B 中 哪 一 个 更大 为什么", "", "A.", "not ASCII"),
    ("One two three four", "", "Five.", ""),
    (" ".join(["word"] * 150), "", "Yes.", ""),
    ("Tell how a photograph is made.", "", "By light.", ""),
    ("What is the capital city of France?", "", "Paris.", "similar: 0.92 to 'What is the capital of France?'"),
]  # fmt: skip


def test_kept_and_dropped_are_those_of_the_recorded_list():
    """A4."""
    answer = listed(*[item[:3] for item in WRITTEN])
    broken = answer + "###\n99. Instruction: One two three four\n99. Input:\n\n99. Output:\nno"
    twice = listed(("One two three four five?", "", "a\n4. Output:\nb"))
    cut = listed(("Count the vowels in this word.", "sky", "0"))
    answers = enumerate([Answer(broken), Answer(twice), Answer(cut, True)])
    rounds = list(generate(answers, SEEDS, wanted=99))
    reasons = [item[3] for item in WRITTEN]
    assert [[i.reason for i in r.items] for r in rounds] == [[*reasons, "layout"], ["layout"], ["truncated"]]
    assert rounds[0].kept == [Task(*item[:3]) if item[1] != "<noinput>" else Task(item[0], "", item[2])
                          for item in WRITTEN if not item[3]]  # fmt: skip
    assert not rounds[1].kept + rounds[2].kept
    assert [Round.of(json.loads(json.dumps(r.row()))) for r in rounds] == rounds


ASKED = [Task(f"Describe the history of item {n} briefly", "", f"Item {n} is old.") for n in range(4, 21)]
LAYOUT = "{}. Instruction: {}\n{}. Input:\n<noinput>\n{}. Output:\n{}\n"
BOLD = "**{}. Instruction:** {}\n**{}. Input:**\n<noinput>\n**{}. Output:**\n{}\n"


def written(layout=LAYOUT, end="###\n", first=4):
    parts = (layout.format(n, t.instruction, n, n, t.output) for n, t in enumerate(ASKED, first))
    return end.join(parts)


@pytest.mark.parametrize("answer", [
    written(end=""), written(end="---\n"),
    written(first=1), written().replace("\n", "\r\n"),
    written(LAYOUT.replace("{}. Instr", "### {}. Instr"), ""), written(BOLD),
    written(LAYOUT.replace("{}.", "{})")),
    written(LAYOUT.replace("{}. I", "{}. **I")), written(LAYOUT.upper()),
    written(LAYOUT.replace("<noinput>", "None")), written(LAYOUT.replace("<noinput>", '"<noinput>".')),
    "<think>\n4. Instruction: Say\n4. Input:\n</think>\n" + written(), written() + "###\nI hope these help!",
    "Sure:\n```\n" + written() + "```\n\nLet me know if you want more.", " 4.  Instruction:" + written()[15:],
    "Here they are:\n\n### " + written(), "```\n###\n" + written() + "\n```", "```text\n" + written(),
])  # fmt: skip
def test_tasks_are_read_in_the_layouts_that_models_write(answer):
    assert [item.task for item in parse_answer(answer, False) if not item.reason] == ASKED


@pytest.mark.parametrize(("text", "reason"), [
    ("### History\nOld.", ""), ("#### History\nOld.", ""), ("x = 1  ### one", ""), ("```\nx\n```", ""),
    ("1. a\n20. b", ""), ("", "no output"), ("a\n(7) Instruction: Two?", "layout"),
    ("a\n14. Output:\nb", "layout"),
    ("a\n**9. Input** :\nb", "layout"), ("a\ud800", "half of a surrogate pair"),
])  # fmt: skip
def test_an_output_loses_no_other_task_and_has_no_other_task_in_it(text, reason):
    answer = written().replace("Item 6 is old.", text)
    items = [filter_item(item, InstructionIndex()) for item in parse_answer(answer, False)]
    assert [item.reason for item in items] == [reason if i == 2 else "" for i in range(17)]
    assert items[2].task is None or items[2].task.output == text
    assert [i.task for i in items[:2] + items[3:]] == ASKED[:2] + ASKED[3:]


def test_an_input_may_be_absent_and_a_number_may_not_be_higher_than_asked():
    answer = written().replace("5. Input:\n<noinput>\n5.", "5.", 1)
    assert [item.task for item in parse_answer(answer, False)] == ASKED
    answer = written(first=14)
    assert [item.reason for item in parse_answer(answer, False)] == [""] * 7 + ["layout"] * 10
    complete = list(parse_answer(written() + "###\n21. Instr", True))
    assert [item.task for item in complete] == ASKED


def many(number):
    """An answer with two equal tasks."""
    chance = random.Random(number)
    text = " ".join("".join(chance.choices("abcdefgh", k=5)) for _ in range(6))
    return number, Answer(listed(*[(text, "", "yes")] * 2))


def test_it_goes_on_until_enough():
    rounds = list(generate(map(many, count()), SEEDS, wanted=12))
    assert [r.number for r in rounds] == list(range(12))
    assert sum(len(r.kept) for r in rounds) == 12
    assert all(item.reason.startswith("similar: 1.00") for r in rounds for item in r.items[1::2])
    assert list(generate(map(many, count()), SEEDS, wanted=12, before=rounds)) == []
    assert rounds[:7] + list(generate(map(many, count(7)), SEEDS, wanted=12, before=rounds[:7])) == rounds
    (again,) = islice(generate(iter([many(0)]), SEEDS, wanted=99, before=rounds), 1)
    assert not again.kept, "what rounds before have kept counts as earlier"
    answers = iter([(n, Answer("", reason="no answer: 503")) for n in range(99)])
    refuses("10 requests without a kept task", list, generate(answers, SEEDS, wanted=1))
    refuses("2 seed tasks", numbered_prompt, SEEDS[:2], 0, 0)


def test_prompts_follow_from_seed_and_number():
    prompts = [numbered_prompt(SEEDS, 3, n) for n in range(20)]
    assert prompts == [numbered_prompt(SEEDS, 3, n) for n in range(20)]
    assert 10 < len(set(prompts)) <= 20
    assert prompts != [numbered_prompt(SEEDS, 4, n) for n in range(20)]
    asked, continued = numbered_prompt(SEEDS, 3, 0, chat=True), prompts[0].removesuffix("###\n4. Instruction:")
    assert asked == continued + GO_ON != prompts[0]


def test_seed_files(tmp_path):
    path = tmp_path / "seeds.jsonl"
    own = {"instruction": "a", "input": "", "output": "c"}
    path.write_text(json.dumps({"instruction": "a", "instances": [own, own]}) + "\n" + json.dumps(own))
    assert read_seed_tasks(path) == [Task("a", "", "c")] * 2
    rows = [{"instruction": f"a\u2028b\x85{i}", "input": "\u2029", "output": "c"} for i in range(2)]
    text = "\r\n\r\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    path.write_bytes(f"\ufeff{text}\r\n".encode())
    assert read_seed_tasks(path) == [Task(*row.values()) for row in rows]
    for line in ("{", "3", '{"instruction": "a"}', '{"instruction": "a", "instances": []}',
                 '{"instruction": "a\\ud800", "input": "", "output": "c"}', b"\xff",
                 '{"instruction": "a", "input": null, "output": "b"}'):  # fmt: skip
        path.write_bytes(json.dumps(own).encode() + b"\n" + (line if isinstance(line, bytes) else line.encode()))
        refuses(f"{path}, line 2: ", read_seed_tasks, path)


# ROUGE-L

TEXT = st.text("ab c1é.", max_size=90) | st.text(max_size=40)


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(st.lists(TEXT, max_size=6), TEXT, st.sampled_from([0.0, 0.3, 0.7]))
def test_rouge_is_that_of_rouge_score(texts, new, above):
    scores = [theirs(text, new) for text in texts]
    assert [rouge_l(text, new) for text in texts] == scores
    found = InstructionIndex(texts).nearest(new, above)
    if max(scores, default=0.0) <= above:
        assert found is None
    else:
        assert found == (max(scores), texts[scores.index(max(scores))])


def test_long_texts_and_ties():
    nearest = InstructionIndex(["a b y z", "b a d c"]).nearest("a b c d")
    assert nearest == (0.5, "a b y z"), "the first, though it shares less"
    chance = random.Random(0)
    for _ in range(30):
        a, b = (" ".join(chance.choices("abcdefghijklmnop", k=chance.randrange(1, 300))) for _ in range(2))
        assert rouge_l(a, b) == theirs(a, b)
    seven_of_ten = "a b c d e f g h i j", "a b c d e f g x y z"
    assert rouge_l(*seven_of_ten) == theirs(*seven_of_ten)
    nearest = InstructionIndex(seven_of_ten[:1]).nearest(seven_of_ten[1], 0.7)
    assert (nearest is None) == (theirs(*seven_of_ten) <= 0.7)
