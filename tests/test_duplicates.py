"""Near-duplicates: which texts are, on which side they are, and what is told."""

import json
import random

import pytest

from conftest import change_json, refuses, toy, training_output
from dunes.checkpoint.trained_text import split_documents
from dunes.data import collect_corpus, hold_out_test, split_records
from dunes.data.duplicates import group_duplicates
from dunes.data.examples import Record, count_leaked
from dunes.data.sources import SPLIT_VERSION
from dunes.evaluate.text_loss import score_folder
from dunes.runs.corpus import gather
from dunes.runs.train_config import TrainConfig
from dunes.text.templates import Turn
from dunes.units import format_bytes


def program(seed, lines=30):
    chosen = random.Random(seed)
    return "".join(f"    name_{chosen.random()} = call({chosen.random()})\n" for _ in range(lines))


HEADER = "".join(f"# Licence, line {i}\n" for i in range(15))
SPACE = {
    "line ends": lambda t: t.replace("\n", "\r\n"),
    "old line ends": lambda t: t.replace("\n", "\r"),
    "indentation": lambda t: t.replace("    ", "\t"),
    "trailing blanks": lambda t: t.replace("\n", "  \n"),
    "blank lines": lambda t: t.replace("\n", "\n\n \n") + "\n\n",
    "no last line end": lambda t: t.rstrip("\n"),
    "inside lines": lambda t: t.replace(" = ", "="),
    "byte order mark": lambda t: "\ufeff" + t,
    "wide spaces": lambda t: t.replace(" ", "\u3000"),
}
EDITS = {
    "a year": lambda t: "# 2019\n" + t.replace("\n", "\n# version 2\n", 1),
    "another licence": lambda t: HEADER.replace("Licence", "MIT") + t + program(1, 30),
    "two lines of thirty": lambda t: t.replace("\n", " + 1\n", 2),
}


@pytest.mark.parametrize("edit", SPACE | EDITS)
def test_a_copy_with_other_space_or_a_small_edit_is_a_near_duplicate(edit):
    short = edit in SPACE
    for text in (program(0), *(["x = 1\n"] if short else [])):
        text = text + program(1, 60) if edit == "another licence" else text
        others = [program(i) for i in range(2, 40)]
        copy = (SPACE | EDITS)[edit](text)
        assert group_duplicates([[text], *([o] for o in others), [copy]]) == [*range(39), 0]


def test_what_has_little_in_common_is_none():
    half = [HEADER + program(i, 15) for i in range(100)]
    assert group_duplicates([t] for t in half) == [*range(100)]
    small = [f"import numpy as np\n\n{{\n}}\nx = {i}\n" for i in range(100)]  # too few lines to compare
    assert group_duplicates([t] for t in small) == [*range(100)]
    assert group_duplicates([]) == []
    assert group_duplicates([["a"], ["a", "b"], ["ab"], ["b\n", "a"]]) == [0, 1, 1, 3], "whatever the blocks"


def test_copies_below_the_same_licence_are_found():
    """Whose lines would be the least hashes of all, of which few are compared."""
    originals = [HEADER + program(i, 10) for i in range(200)]
    copies = [t.replace(" = ", " == ", 1) for t in originals]
    assert group_duplicates([t] for t in [*originals, *copies]) == [*range(200)] * 2


def test_two_large_groups_are_two():
    texts = [[program(seed) + f"last = {n}\n" for n in range(6)] for seed in range(4)]
    rows = [Record((Turn("text", t),), "a", "text") for group in texts for t in group]
    for learn, valid in (split_records(rows, 0.05), split_records(rows[:12], 0.05)):
        assert len(valid) == 6
        assert len(learn) in (18, 6)
    assert count_leaked(rows[:6], rows[6:12]) == 0
    assert count_leaked(rows[:6], rows[3:9]) == 3


@pytest.mark.parametrize("split", ["tails", None])
def test_near_duplicates_are_left_out_where_tails_are_for_validation(split, tmp_path):
    """Else the tail of a file would be in its copy, which is trained on."""
    text = program(0, 300)
    (tmp_path / "a.py").write_text(text)
    (tmp_path / "b.py").write_text(text.replace("    ", "\t") + program(1, 20))
    corpus = gather(TrainConfig(sources=(str(tmp_path),), split=split))
    assert [d.name for d in corpus.train] == ["a.py"]
    assert "near-duplicates: 1 file left out, since tails are for validation" in corpus.notes


def copied(folder, count=40, copies=8, edit=SPACE["line ends"]):
    """Files, and for some of them a copy in another folder."""
    for name in ("src", "vendor/deep"):
        (folder / name).mkdir(parents=True)
        for i in range(count if name == "src" else copies):
            text = program(i) if name == "src" else edit(program(i))
            (folder / name / f"file_{i}.py").write_bytes(text.encode())
    return folder


def sides(corpus):
    return {d.name: side for side in ("train", "valid", "test") for d in getattr(corpus, side)}


@pytest.mark.parametrize("edit", ["line ends", "two lines of thirty"])
def test_a_file_and_its_copies_are_on_one_side(tmp_path, edit):
    alone = sides(collect_corpus([copied(tmp_path / "alone", copies=0)], 0.2))
    corpus = collect_corpus([copied(tmp_path / "all", copies=40, edit=(SPACE | EDITS)[edit])], 0.2)
    for each in (corpus, hold_out_test(corpus, 0.2)):
        found = sides(each)
        assert set(found.values()) == ({"train", "valid"} if each is corpus else {"train", "valid", "test"})
        assert all(found[f"src/file_{i}.py"] == found[f"vendor/deep/file_{i}.py"] for i in range(40))
    assert {name: sides(corpus)[name] for name in alone} == alone, "a copy follows the file with the shorter path"
    assert corpus.notes == [
        "near-duplicates: 40 files, each on the same side as its original (vendor/deep/file_0.py of src/file_0.py)"
    ]


@pytest.mark.parametrize("part", [0.3, 0.9])
def test_a_large_group_does_not_replace_the_validation_part(tmp_path, part):
    """Also where the file that it follows would be held out."""
    count = round(40 * part)
    for i in range(40):
        (tmp_path / f"{i:02}.py").write_text(program(0) + f"x = {i}\n" if i < count else program(i))
    for share in (0.05, 0.3, 0.9):
        corpus = collect_corpus([tmp_path], share)
        assert {sides(corpus)[f"{i:02}.py"] for i in range(count)} == {"train"}
        assert 0 < len(corpus.valid) <= 40 - count


def test_copies_of_one_file_are_no_training_and_validation(tmp_path):
    text = program(0)
    for i, copy in enumerate((text, text + "\n")):
        (tmp_path / f"{i}.py").write_text(copy)
    corpus = collect_corpus([tmp_path])
    assert (len(corpus.train), corpus.valid) == (2, [])
    assert gather(toy(tmp_path)).split == "tails"
    refuses("a single file, or near-duplicates of one; add files", gather, toy(tmp_path, split="files"))


def test_a_run_tells_near_duplicates_and_its_card_has_the_version_of_the_split(tmp_path):
    source, run = copied(tmp_path / "source", copies=40), tmp_path / "run"
    printed = training_output(toy(source, steps=2), run)
    assert "near-duplicates: 40 files, each on the same side" in " ".join(printed.split())
    card = json.loads((run / "dunes.json").read_text())
    assert sides(split_documents(card)) == sides(gather(toy(source)))
    for version in (None, 0, SPLIT_VERSION + 1):
        change_json(run / "dunes.json", trained=card["trained"] | {"split_version": version})
        assert "dunes.json" in refuses(str(run), score_folder, run)


def texts(*contents):
    return [Record((Turn("text", text),), f"row {i}", "text") for i, text in enumerate(contents)]


def test_texts_to_finetune_on_are_on_one_side_with_their_like():
    originals = [program(i) for i in range(60)]
    copies = [EDITS["two lines of thirty"](text) for text in originals]
    train, valid = split_records(texts(*originals, *copies), 0.2)
    numbers = [{int(r.place[4:]) % 60 for r in side} for side in (train, valid)]
    assert not numbers[0] & numbers[1]
    assert all(numbers)
    again = split_records(texts(*copies, *originals), 0.2)[1]
    assert {r.turns for r in again} == {r.turns for r in valid}, "whatever their order"
    assert count_leaked(texts(*originals), texts(*copies[:7], "new")) == 7
    swallowed = split_records(texts(*[program(0) + f"x = {i}\n" for i in range(60)], *originals[1:20]), 0.3)[1]
    assert swallowed
    assert all(int(r.place[4:]) >= 60 for r in swallowed)


@pytest.mark.parametrize(("files", "size", "share"), [(240, 5_000, 0.1), (60, 5_000, 0.2), (400, 1_500, 80 / 600)])
def test_the_validation_part_has_its_share_of_the_text_of_each_kind_and_size(files, size, share, tmp_path):
    """A tenth, or what makes 80 kB, at most a fifth; of other files of the same kinds it says the truth."""
    for i in range(files):
        suffix, factor = (".py", ".go", ".md")[i % 3], (1, 3, 9)[i // 3 % 3] / 4.333
        text = "".join(f"line {i} {n} {suffix}\n" for n in range(size))
        (tmp_path / f"file_{i}{suffix}").write_text(text[: int(size * factor)])
    corpus = collect_corpus([tmp_path])
    total, held = corpus.size, sum(d.size for d in corpus.valid)
    assert held / total == pytest.approx(share, rel=0.15)
    for suffix in (".py", ".go", ".md"):
        parts = [sum(d.size for d in side if d.name.endswith(suffix)) for side in (corpus.train, corpus.valid)]
        assert 0.5 * share < parts[1] / sum(parts) < 2 * share
    assert f"{len(corpus.valid)} for validation ({format_bytes(held)})" in corpus.report()
    tested = hold_out_test(corpus)
    assert sum(d.size for d in tested.test) / total == pytest.approx(0.05, rel=0.5)
    assert not {d.name for d in tested.test} & {d.name for d in corpus.valid}
    assert len({d.size for d in corpus.valid}) == 3, "small ones and large ones"


@pytest.mark.parametrize("count", [2, 12])
def test_of_few_files_the_tails_are_for_validation(count, tmp_path):
    for i in range(count):
        (tmp_path / f"{i}.py").write_text("".join(f"x_{i}_{n} = {n}\n" for n in range(400)))
    corpus = gather(toy(tmp_path))
    assert (corpus.split, corpus.share) == ("tails", 0.2)
    assert "few files: the last 20% of each is for validation" in corpus.notes
    assert gather(toy(tmp_path, split="files")).split == "files"
