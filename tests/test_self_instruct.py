"""Instruction data from a model: what it is asked, how its answer is cut, what is dropped and why."""

import json
import random
import warnings
from dataclasses import replace
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import data, refuses
from dunes.data.self_instruct import (
    PROMPTS,
    REQUEST,
    InstructionIndex,
    Round,
    Task,
    build_prompt,
    build_prompts,
    generate,
    parse_answer,
    read_seed_tasks,
    rejection_reason,
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


def test_a_prompt_shows_tasks_in_its_layout_and_begins_the_next():
    assert build_prompt(SEEDS[:3]) == REQUEST + (
        "###\n1. Instruction: Name three birds of Asia\n1. Input:\n<noinput>\n1. Output:\nCrane, ibis, hoopoe.\n"
        "###\n2. Instruction: Sort these numbers from small to large.\n2. Input:\n3, 1, 2\n2. Output:\n1, 2, 3\n"
        "###\n3. Instruction: What is the capital of France?\n3. Input:\n<noinput>\n3. Output:\nParis.\n"
        "###\n4. Instruction:"
    )


def test_what_was_shown_is_read_back_from_an_answer():
    answer = listed(*[(t.instruction, t.input or "<NOinput>", t.output) for t in SEEDS])
    items = list(parse_answer(answer, False))
    assert [i.task for i in items] == [replace(t, instruction=t.instruction.strip()) for t in SEEDS]
    assert not any(i.reason for i in items)
    assert [i.reason for i in parse_answer(answer, True)] == ["", "", "", "truncated"]
    assert [i.task for i in parse_answer(answer, True)][3] is None


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
    ("What is the capital city of France?", "", "Paris.", "similar: 0.92 to 'What is the capital of France?'"),
]  # fmt: skip


def fake(*rounds):
    """A model whose answers stand in lists; it writes down what it was asked."""
    told, asked = iter(rounds), []

    def ask(prompts):
        asked.append(prompts)
        return next(told)

    return ask, asked


def test_kept_and_dropped_are_those_of_the_recorded_list():
    """A4."""
    answer = listed(*[item[:3] for item in WRITTEN])
    broken = answer + "###\n99. Instruction: One two three four\n99. Input:\n\n99. Output:\nno"
    twice = listed(("One two three four five?", "", "a\n4. Output:\nb"))
    cut = listed(("Count the vowels in this word.", "sky", "0"))
    ask, _ = fake([(broken, False), (twice, False), (cut, True)])
    (found,) = generate(ask, SEEDS, wanted=3)
    reasons = [item[3] for item in WRITTEN]
    assert [i.reason for i in found.items] == [*reasons, "layout", "layout", "truncated"]
    assert found.kept == [Task(*item[:3]) if item[1] != "<noinput>" else Task(item[0], "", item[2])
                          for item in WRITTEN if not item[3]]  # fmt: skip
    assert Round.of(json.loads(json.dumps(found.row()))) == found


def test_words_are_whole_and_limits_are_alpacas():
    assert rejection_reason("one two three") == "short"
    assert rejection_reason("one two three four") == ""
    assert rejection_reason(" ".join(["word"] * 150)) == ""
    assert rejection_reason(" ".join(["word"] * 151)) == "long"
    assert rejection_reason("Tell the PLOT of the story.") == "word: plot"
    assert rejection_reason("Tell how a photograph is made.") == ""
    assert rejection_reason("write a program that adds numbers") == ""


def many(seed):
    """A model that never stops having ideas."""
    chance = random.Random(seed)

    def word():
        return "".join(chance.choice("abcdefgh") for _ in range(5))

    def ask(prompts):
        return [(listed(*[(" ".join(word() for _ in range(6)), "", "yes")] * 2), False) for _ in prompts]

    return ask


def test_it_goes_on_until_enough_and_asks_by_seed_and_number():
    ask, asked = fake(*[many(i)([0] * PROMPTS) for i in range(5)])
    rounds = list(generate(ask, SEEDS, wanted=12, seed=3))
    assert [r.number for r in rounds] == [0, 1, 2]
    assert sum(len(r.kept) for r in rounds) == 15
    assert asked == [build_prompts(SEEDS, 3, n) for n in range(3)]
    assert len(asked[0]) == len(set(asked[0])) == PROMPTS
    assert build_prompts(SEEDS, 3, 0) != build_prompts(SEEDS, 4, 0)
    assert all(item.reason.startswith("similar: 1.00") for r in rounds for item in r.items[1::2])


def test_a_run_that_goes_on_is_the_run():
    def answers(prompts):
        return [many(p)([0])[0] for p in prompts]

    whole = list(generate(answers, SEEDS, wanted=20))
    start = list(islice(generate(answers, SEEDS, wanted=20), 2))
    assert start + list(generate(answers, SEEDS, wanted=20, before=start)) == whole
    assert list(generate(answers, SEEDS, wanted=20, before=whole)) == []
    again = next(generate(lambda p: answers(build_prompts(SEEDS, 0, 0)), SEEDS, wanted=99, before=whole))
    assert not again.kept, "what rounds before have kept counts as earlier"


def test_too_few_seeds_and_a_model_that_has_none_are_refused():
    refuses("2 seed tasks; a prompt shows 3", next, generate(many(0), SEEDS[:2], wanted=1))
    rounds = []
    with pytest.raises(ValueError, match=r"10 rounds without a kept task; reasons in the last: \{'layout': 5\}"):
        rounds.extend(generate(lambda p: [("no", False)] * len(p), SEEDS, wanted=1))


def test_seed_files(tmp_path):
    path = tmp_path / "seeds.jsonl"
    own = {"instruction": "a", "input": "", "output": "c"}
    path.write_text(json.dumps({"instruction": "a", "instances": [own, own]}) + "\n" + json.dumps(own))
    assert read_seed_tasks(path) == [Task("a", "", "c")] * 2
    path.write_text(json.dumps(own) + "\n{")
    refuses("line 2: not JSON", read_seed_tasks, path)
    for line in ("[]", "3", '{"instruction": "a"}', '{"instruction": "a", "instances": []}',
                 '{"instruction": "a", "input": null, "output": "b"}'):  # fmt: skip
        path.write_text(json.dumps(own) + "\n" + line)
        refuses("line 2: expected an object with instruction", read_seed_tasks, path)


def test_seed_lines_end_where_an_editor_ends_them(tmp_path):
    path = tmp_path / "seeds.jsonl"
    rows = [{"instruction": f"a\u2028b\x85{i}", "input": "\u2029", "output": "c"} for i in range(2)]
    text = "\r\n\r\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    path.write_bytes(f"\ufeff{text}\r\n".encode())
    assert read_seed_tasks(path) == [Task(*row.values()) for row in rows]
    path.write_bytes(f"{text}\n\n[".encode())
    refuses("line 5: not JSON", read_seed_tasks, path)


# ROUGE-L

TEXT = st.text("ab c1é.", max_size=90) | st.text(max_size=40)


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(st.lists(TEXT, max_size=6), TEXT, st.sampled_from([0.0, 0.3, 0.7]))
def test_rouge_is_that_of_rouge_score(texts, new, above):
    scores = [theirs(text, new) for text in texts]
    assert [rouge_l(text, new) for text in texts] == scores
    found = InstructionIndex(texts).nearest(new, above)
    if max(scores, default=0.0) <= above:
        assert found is None
    else:
        assert found == (max(scores), texts[scores.index(max(scores))])


def test_rouge_of_the_tasks_that_people_wrote():
    instructions = [task.instruction for task in read_seed_tasks(data("alpaca_seed_tasks.jsonl"))]
    worst = max(abs(rouge_l(a, b) - theirs(a, b)) for a in instructions[::3] for b in instructions)
    print(f"59 x 175 pairs: {worst:.1e}")
    assert worst <= 1e-12
    for i, text in enumerate(instructions[:40]):
        others = instructions[:i] + instructions[i + 1 :]
        assert InstructionIndex(others).nearest(text)[0] == max(theirs(other, text) for other in others)


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
