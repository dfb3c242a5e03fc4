"""The evaluation of line completion: cursors, agreement, keystrokes, baselines, what is left out, and the verb."""

import math
from pathlib import Path

import numpy as np
import pytest

from conftest import refuses
from dunes.cli import verbs
from dunes.completion import Suggestion
from dunes.completion.completer import CopyNearest
from dunes.completion.fit import file_means, interval
from dunes.completion.keystrokes import (
    CutPoint,
    FileSuggestions,
    Typing,
    column_in_word,
    cut_points,
    file_lines,
    fit_threshold,
    sample_lines,
    type_file,
    type_line,
)
from dunes.completion.text import first_word, whole_words
from dunes.data import collect_corpus
from dunes.data.duplicates import content_digest
from dunes.evaluate import completion as report
from dunes.evaluate.completion import (
    CompletionOptions,
    LineIndex,
    Point,
    evaluate_completion,
    score_completer,
    scored_files,
)

CODE = "".join(
    f"def area_{n}(width, height):\n    result = width * height + {n}\n    return result\n\n" for n in range(12)
)
OTHER = "class Shape:\n    def area(self):\n        result = self.width * self.height\n        return result\n"


class Oracle:
    """Knows the files by name."""

    def __init__(self, texts):
        self.texts, self.asked = dict(texts), []

    def complete(self, before, after="", name=""):
        self.asked.append((before, after, name))
        assert self.texts[name].startswith(before)
        rest = self.texts[name][len(before) :].splitlines()[0]
        return Suggestion(rest)


class Silent:
    """Suggests nothing."""

    def complete(self, before, after="", name=""):
        return Suggestion("")


# cursors


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_lines_have_their_offsets(end):
    text = end.join(["  one = 'ä😀'  ", "", "\t", "\ttwo\u2028x", "three"])
    lines = file_lines(text)
    assert [line.text for line in lines] == ["one = 'ä😀'", "two\u2028x", "three"]
    for line in lines:
        assert text[line.start : line.end].rstrip() == line.text
        assert text[line.end : line.end + len(end)] == (end if line.text != "three" else "")


def test_cursors_stand_behind_and_before_a_character_of_a_line():
    text = "  ab = 1  \r\n\r\nx\n\tlonger_name(ä)\n"
    lines = file_lines(text)
    cuts = [c for seed in range(40) for c in cut_points("f", text, lines, seed)]
    inside = {(c.offset, c.rest) for c in cuts if c.kind == "character"}
    whole = {line.start: line.text for line in lines}
    assert {c.rest for c in cuts if c.kind == "line start"} == set(whole.values())
    assert {rest for _, rest in inside} >= {"b = 1", " = 1", "= 1", " 1", "1", ")", "ä)"}
    assert all(text[offset:].startswith(rest) and rest and offset not in whole for offset, rest in inside)
    assert all(text[c.offset : c.end].rstrip() == c.rest or c.behind for c in cuts)
    assert all(text[c.end] in "\r\n" for c in cuts)


def test_cursors_and_lines_are_a_function_of_seed_name_and_text():
    lines = file_lines(CODE)
    assert cut_points("a", CODE, lines) == cut_points("a", CODE, file_lines(CODE))
    assert len(cut_points("a", CODE, lines, count=8)) == 8 + 3
    assert len({tuple(cut_points(n, CODE, lines, s, 8)) for n, s in [("a", 0), ("b", 0), ("a", 1)]}) == 3
    assert sample_lines("a", CODE, lines) == sample_lines("a", CODE, lines)
    assert len(sample_lines("a", CODE, lines)) == 12
    assert sample_lines("a", CODE, lines) != sample_lines("b", CODE, lines)


def test_files_of_one_line_or_none_have_cursors_but_not_lines_of_a_character_alone():
    assert [c.rest for c in cut_points("f", "ab", file_lines("ab"))] == ["b", "ab"]
    assert [c.kind for c in cut_points("f", "a", file_lines("a"))] == ["line start"]
    assert cut_points("f", "\n \n", file_lines("\n \n")) == []
    refuses("no line to complete", scored_files, [("a.c", "{\na\n}\n")], [], all_lines=True)
    long = "x = [" + "1, " * 100 + "]\n"
    assert [line.text for line in sample_lines("a.py", long, file_lines(f"{long}y = 1\n"))] == ["y = 1"]


# agreement and intervals


def point(text, rest):
    return Point(0, CutPoint(1, 1 + len(rest), rest, "character"), text)


def test_lines_and_their_first_words_are_compared_without_trailing_white_space_and_further_lines():
    assert point("x)  \r\nnext", "x)").exact == 1
    assert point("x)", "x) ").exact == 1
    assert point(" x)", "x)").exact == 0
    assert (point("", "x)").exact, point("", "x)").word) == (0, 0)
    assert (point("foo(bar)", "foo(bat)").exact, point("foo(bar)", "foo(bat)").word) == (0, 1)
    assert point("foobar", "foo").word == 0
    assert point("foo", "foobar").word == 0


def test_words_are_those_that_copilot_vim_accepts():
    """Its pattern for what it accepts: other characters, then an identifier."""
    words = {"  ab_1(x": "  ab_1", "(x, y": "(x", " += 1": " += 1", "äb c": "äb", "):": "):", "": ""}
    words |= {"):\nab": "):", "\n\r\n  ab(": "\n\r\n  ab"}
    assert {text: first_word(text) for text in words} == words


def test_the_bootstrap_resamples_files_not_cursors():
    values, files = [0.0] * 3000 + [1.0] * 30, [0] * 3000 + [7] * 30
    means = file_means(values, files)
    assert means.tolist() == [0, 1]
    found = interval(means)
    assert (found.mean, found.low, found.high) == (0.5, 0, 1), "two files; over cursors it were 0.01 wide"
    many = interval(np.tile([0.0, 1.0], 200))
    assert 0.04 < many.high - many.mean < 0.06
    assert interval(means) == found
    assert interval(np.array([0.1, 0.2]) - np.array([0.1, 0.2])).percent("+") == "+0.0 [+0.0, +0.0]"
    refuses("no file", interval, np.array([]))


# keystrokes


def suggest(content, until=None):
    return lambda column: Suggestion(content[column:until])


def test_an_oracle_saves_what_is_counted_by_hand():
    content = "foo(bar, x)"  # foo (bar , x ): 4 words
    assert type_line(content, suggest(content)) == Typing(11, 4, 1, 1, 1)
    assert type_line(content, suggest(content)).saved == pytest.approx(7 / 11)
    nothing = type_line(content, lambda column: Suggestion(""))
    assert nothing == Typing(11, 11, 0, 0, 1)
    assert math.isnan(nothing.acceptance)


def test_wrong_suggestions_are_shown_and_save_nothing():
    typed = type_line("abc", lambda column: Suggestion("xyz"))
    assert typed == Typing(3, 3, 3, 0, 1), "each key makes it another suggestion"
    assert typed.saved == 0
    equal = type_line("(ab", lambda column: Suggestion("(" if not column else ""))
    assert equal == Typing(3, 3, 1, 0, 1), "a word of one character saves no key"
    one = type_line("ab(c", lambda column: Suggestion("ab(d"[column:]))
    assert one == Typing(4, 3, 1, 1, 1), "it stands while the keys agree"


def test_suggestions_are_accepted_by_words_from_the_threshold_on_and_further_lines_are_not_typed():
    assert type_line("foobar", lambda column: Suggestion("foo" if not column else "")).keys == 4
    assert type_line("foo", lambda column: Suggestion("foobar"[column:])).keys == 3
    unsure = lambda column: Suggestion("abc"[column:], word=0.3, line=0.2)
    assert type_line("abc", unsure, 0.3).keys == 1
    assert type_line("abc", unsure, math.inf) == Typing(3, 3, 0, 0, 1)
    assert type_line("abc", lambda column: Suggestion("abc  \nnext"[column:])) == Typing(3, 1, 1, 1, 1)


def test_a_file_is_typed_without_indentation_and_each_place_asked_once():
    text = "if x:\r\n    return x\r\n"
    oracle = Oracle({"a.py": text})
    suggestions = FileSuggestions(oracle, "a.py", text)
    file = suggestions, file_lines(text)
    assert type_file(file) == Typing(13, 5, 2, 2, 2)
    assert type_file(file) == Typing(13, 5, 2, 2, 2)
    assert len({before for before, _, _ in oracle.asked}) == len(oracle.asked) == 5
    assert (len(suggestions.cold), len(suggestions.warm)) == (1, 3)
    assert {(after, name) for _, after, name in oracle.asked} == {("", "a.py")}


def test_the_text_behind_the_cursor_never_has_the_answer():
    oracle = Oracle({"f": "one\ntwo\n"})
    FileSuggestions(oracle, "f", "one\ntwo\n", below=True).ask(3, 1)
    assert oracle.asked == [("o", "\ntwo\n", "f")]


def cut(rest, kind="character"):
    return CutPoint(0, 9, rest, kind)


def test_the_threshold_is_the_lowest_with_the_acceptance():
    right, wrong = [(cut("ab c"), 0, Suggestion("ab c", p)) for p in (0.9, 0.8, 0.3)], (cut("ab"), 0)
    answers = [*right, *((*wrong, Suggestion("xy", p)) for p in (0.7, 0.3, 0.2, 0.1))]
    found = [fit_threshold(answers, share) for share in (0.35, 0.5, 0.6, 0.7, 1.0)]
    assert found == [0.1, 0.2, 0.3, 0.8, 0.8], "suggestions of one probability are shown together"
    assert fit_threshold([(cut("ab"), 0, Suggestion("xy", 0.5))], 0.2) == 2.0
    assert fit_threshold([]) == fit_threshold([(cut("ab"), 0, Suggestion("", 1.0))]) == 2.0
    inside = [(cut("ef"), 4, Suggestion("ef", 0.9)), (*wrong, Suggestion("xy", 0.8))]
    assert fit_threshold(inside, 0.25) == 0.8
    assert fit_threshold(inside, 0.26) == 0.9, "one of the three cursors at which it had been right by then"
    last = [(cut("f"), 5, Suggestion("f", 0.5)), (cut("f"), 0, Suggestion("f", 0.4)), *right[:1]]
    assert fit_threshold(last, 1.0) == 0.9
    assert fit_threshold(last, 0.5) == 0.4


@pytest.mark.parametrize(
    ("line", "columns"), [("ab = f(x)", [0, 1, 0, 1, 2, 3, 0, 1, 0]), ("é\x0b", [0, 0]), ("日本", [0, 1])]
)
def test_the_column_of_a_cursor_in_its_word(line, columns):
    found = [column_in_word("x\n\t " + line[:n], line[n:]) for n in range(len(line))]
    assert found == columns


# baselines


def test_copies_follow_the_longest_match_the_nearest_on_ties():
    copy = CopyNearest.of_files([("a", "first_name = one\nsecond_name = two\n"), ("b", "third_name = three")])
    assert copy.complete("x\nfirst_name = ").text == "one"
    assert copy.complete("first_name = mine\nfirst_name = ").text == "mine", "the file wins a tie"
    assert copy.complete("_name = mine\nfirst_name = ").text == "one", "the longer match wins"
    assert copy.complete("_name = ").text == "three", "the last one of the training wins a tie"
    assert copy.complete("_name = mine\r\n_name = his\r\n_name = ").text == "his"
    assert copy.complete("a_name = mine\nb_name = his\nc_name = ").text == "his", "the nearest wins a tie"
    assert copy.complete("third_name = three").text == ""
    assert CopyNearest.of_files([("a", "x = one"), ("b", "two")]).complete("x = ").text == "one", "files end"
    assert copy.complete("").text == copy.complete("ß").text == ""
    assert copy.complete("ßü = 'äöü😀'\nßü = ").text == "'äöü😀'"
    assert copy.complete("x\nfirst_name = ").word > copy.complete("?_name = ").word


# what is left out


def test_near_duplicate_lines():
    index = LineIndex(["    total = first + second\nreturn None\na b c d e f g h i j\n"])
    assert index.has_similar("total = first + second  ")
    assert index.has_similar("total = (first + second"), "5 of 6 tokens"
    assert not index.has_similar("total = (first + second)"), "5 of 7 tokens"
    assert not index.has_similar("return None"), "two tokens"
    assert index.has_similar("a b c d e f g h i")
    assert not index.has_similar("a b c d e f g h x y")
    assert not index.has_similar("total = first * second"), "4 of 6 tokens"


def test_what_is_left_out_is_counted():
    training = [("t.py", "alpha = beta + 1\n"), ("u.py", "gamma = 2\n")]
    texts = [
        ("copy.py", "\nalpha = beta + 1\n\n"),
        ("part.py", "    alpha = beta + 1\nnew line here\n\nreturn\n"),
        ("none.py", "alpha = beta + 1\ngamma = 2\n"),
        ("own.py", "own words only"),
    ]
    scored = scored_files(texts, training)
    kept = {f.name: [line.text for line in f.lines] for f in scored.files}
    assert kept == {"part.py": ["new line here", "return"], "own.py": ["own words only"]}
    assert (scored.trained_files, scored.line_count, scored.near_duplicates) == (1, 6, 3)
    assert scored.files_without_lines == 1
    assert scored.report() == (
        "2 files, 3 lines; left out: 1 file that the model was trained on, 3 lines like a training line, "
        "1 file without other lines"
    )
    every = scored_files(texts, training, all_lines=True)
    assert (len(every.files), every.trained_files, every.near_duplicates, every.line_count) == (3, 1, 0, 6)
    refuses(r"no line to complete \(0 files, .* 1 file that", scored_files, texts[:1], training)


# scores


def test_an_oracle_is_right_everywhere_and_nothing_nowhere():
    files = scored_files([("a.py", CODE), ("b.py", OTHER.replace("\n", "\r\n"))], []).files
    options, texts = CompletionOptions(cuts=10, lines=4), {file.name: file.text for file in files}
    starts = {file.text[: line.start] for file in files for line in file.lines}

    class Starts(Oracle):
        def complete(self, before, after="", name=""):
            return super().complete(before, after, name) if before in starts else Suggestion("")

    oracle = score_completer("oracle", Oracle(texts), files, options, 0.5)
    empty = score_completer("empty", Silent(), files, options)
    assert oracle.exact_match().mean == 1
    assert oracle.means("exact", lambda p: p.cut.kind == "line start").tolist() == [1, 1]
    assert oracle.difference(empty).percent("+") == "+100.0 [+100.0, +100.0]"
    assert empty.exact_match().mean == empty.saved() == 0
    assert [p.cut for p in oracle.points] == [p.cut for p in empty.points]
    assert oracle.saved() == oracle.saved(0.5) > 0.3
    assert math.isnan(empty.saved(empty.threshold))
    assert math.isnan(oracle.bits_per_character)
    assert len(oracle.cold) == len(files)
    assert score_completer("oracle", Oracle(texts), files, options, 2.0).saved(2.0) == 0
    at_starts = score_completer("starts", Starts(texts), files, options)
    assert at_starts.exact_match().mean == 0, "line starts are reported apart"


# the verb


@pytest.fixture
def engine(monkeypatch, tmp_path):
    """A folder whose completer knows the scored files, and errs in c.py."""
    for name, text in {"a.py": CODE, "b.py": OTHER, "c.py": OTHER.replace("height", "ähöhe")}.items():
        (tmp_path / "sources" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "sources" / name).write_text(text)
    (tmp_path / "model").mkdir()

    class Engine(Oracle):
        training_files = (("a.py", CODE), ("z.py", "import os\nimport sys\nprint(os.name)\n"))

        def complete(self, before, after="", name=""):
            right = super().complete(before, after, name)
            return Suggestion(right.text + "!" * (name == "c.py"))

        known = frozenset()

        def seen_digests(self):
            return self.known

        def threshold(self):
            return 0.5

        def test_documents(self):
            corpus = collect_corpus([tmp_path / "sources"])
            return corpus.valid + corpus.train

        def bits(self, text, name=""):
            return 2.0 * len(text)

    texts = {name: (tmp_path / "sources" / name).read_text() for name in ("a.py", "b.py", "c.py")}
    monkeypatch.setattr(report, "FolderCompleter", lambda folder, any_base=False: Engine(texts))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_verb_scores_sources_and_at_most_limit_files(engine, capsys):
    verbs.evaluate("model", ("sources/b.py", "sources/c.py"), completion=True, lines=1)
    assert "2 files, 8 lines" in capsys.readouterr().out
    verbs.evaluate("model", ("sources/b.py", "sources/c.py"), completion=True, limit=1)
    assert "1 file, 4 lines" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((), {"lines": 0}, "--lines is 0; it must be at least 1"),
        ((), {"limit": 0}, "--limit is 0"),
        ((), {"tasks": ("x",)}, "--tasks: not with --completion"),
        ((), {"out": Path("page.md")}, "--out: not with --completion"),
        ((("sources/a.py",),), {}, "sources/a.py: no line to complete"),
        ((("empty",),), {}, "empty: no text"),
        ((("nowhere",),), {}, "nowhere"),
    ],
)
def test_the_verb_refuses_in_one_line(engine, arguments, options, message):
    (engine / "empty").mkdir()
    refuses(message, verbs.evaluate, "model", *arguments, completion=True, **options)
    refuses("--lines applies to line completion", verbs.evaluate, "model", lines=3)


def test_files_that_the_training_read_are_left_out_and_it_is_said_where_they_are_not_known(engine, capsys):
    model = report.FolderCompleter("model")
    type(model).known = {content_digest([(engine / "sources" / "b.py").read_text() + "\n"])}
    verbs.evaluate("model", completion=True, lines=1)
    printed = capsys.readouterr().out
    assert "1 file, 4 lines; left out: 2 files that the model was trained on" in printed
    assert "not known" not in printed
    type(model).known = None
    verbs.evaluate("model", completion=True, lines=1)
    printed = capsys.readouterr().out
    assert "2 files, 8 lines; left out: 1 file that the model was trained on" in printed
    assert "the files that the model was trained on are not known, except the files in its index" in printed


def test_a_run_without_a_model_is_not_scored(tmp_path):
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "plan.json").write_text("{}")
    refuses("a run without a model: it is still training", evaluate_completion, tmp_path)


@pytest.mark.parametrize(
    ("text", "whole"),
    [("", ""), ("ab", ""), ("ab cd", "ab"), ("ab(c", "ab("), ("ab)", "ab"), ("ab\ncd.e", "ab\ncd."), ("  ", "")],
)
def test_a_part_of_a_line_ends_with_a_whole_word(text, whole):
    assert whole_words(text) == whole


def test_cursors_inside_of_brackets_come_a_second_time_with_what_an_editor_closes():
    text = "x = 1\nprint(value, [a, b])  # c\ndef task(value, limit=50):\n    return (a +\n            b)\n" * 20
    cuts = cut_points("a.py", text, file_lines(text))
    closed = [cut for cut in cuts if cut.kind == "closed"]
    assert len(closed) > 8
    inside = {cut.offset: cut for cut in cuts if cut.kind == "character"}
    for cut in closed:
        whole = inside[cut.offset].rest
        assert text[cut.offset :].startswith(cut.rest)
        assert whole.startswith(cut.rest)
        assert whole[len(cut.rest) :].lstrip().startswith(cut.behind[0])
        assert set(cut.behind) <= set(")]")
    assert {cut.behind for cut in closed} == {")", "])"}
    assert not any("return" in text[cut.offset - 20 : cut.offset] for cut in closed), "closed in another line"
