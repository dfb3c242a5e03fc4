"""The names of a place in a suggestion: half-typed words, copied lines, definitions."""

from dataclasses import replace
from functools import partial

import pytest
import tokenizers

from dunes.completion import Suggestion
from dunes.completion.completer import CopyCompleter
from dunes.completion.engine import CompletionEngine
from dunes.completion.index import index_texts
from dunes.completion.names import OTHER, RENAMED, REPEATED, SAME, Place, newest
from dunes.completion.search import CompleteOptions
from dunes.completion.text import FileTokenizer, first_word
from dunes.generate.copying import TextSource
from dunes.text import Tokenizer
from test_completion import BPE, CODE, LOADED, copying_gate, zero_gate

NAMES = [
    *("frobnicate", "zorbify_all", "quuxMargin", "blargTheta", "wibble_wobble", "splonk", "grumbleSort"),
    *("snarf_up", "plugh2", "xyzzy_turn", "flumpWidth", "crinkle_edge"),
]
OPENED = "".join(f"def {name}(first, second):\n    return first + second\n\n\n" for name in NAMES)


def completers(gate):
    files = FileTokenizer(BPE, True)
    copier = CopyCompleter(index_texts([("a.py", CODE)], files))
    engine = CompletionEngine(LOADED, index_texts([("a.py", CODE)], files) if gate else None, gate, True)
    return [copier, engine]


@pytest.mark.parametrize("gate", [None, zero_gate()])
@pytest.mark.parametrize("in_request", [False, True])
def test_half_typed_names_of_an_open_file_are_completed_by_any_model_and_by_none(gate, in_request):
    for completer in completers(gate):
        options = CompleteOptions(files=(("open.py", OPENED),) if in_request else ())
        if not in_request:
            completer.use(completer.with_texts({"open.py": OPENED, "gone.py": None}))
        for name in NAMES:
            before = f"import open\n\nvalue = {name[:4]}"
            best, *_ = completer.alternatives(before, "\n", "b.py", options)
            assert name[4:] == first_word(best.text), best
            assert OTHER <= best.word <= 1
            assert best.line <= best.word


def place_of(before, suggested="", after="", opened=(), sources=(), word=0.1):
    """A place at which `suggested` is what is suggested first, and nothing behind any other text."""
    suggest = lambda text: [Suggestion("" if text else suggested, word, word / 2)]
    return Place(before, after, opened, [TextSource(text.encode()) for text in sources], suggest)


def best_at(before, suggested="", **options):
    return place_of(before, suggested, **options).suggestions()[0]


@pytest.mark.parametrize(
    ("before", "suggested", "options", "text"),
    [
        ("gadget = 1\nx = gad", "dy", {}, "get"),
        ("x = gad", "", {"after": "\ngadget = 1\n"}, "get"),
        ("x = gad", "dy", {"opened": ["y = 1\n", "gadget = 1\n"]}, "get"),
        ("größe_a = 1\nx = grö", "", {}, "ße_a"),
        ("# a note\rgadget = 1\rx = gad", "dy", {}, "get"),
        ("gadget = gadgets = 1\nx = gad", "dy", {}, "dy"),  # two names
        ("gadget = 1\nx = ga", "p", {}, "p"),  # too short
        ("gadget = 1\nx = gad", "dy", {"word": 0.9}, "dy"),  # likely
        ("gadget = 1\nx = gad", "dy", {"after": "get\n"}, "dy"),  # inside a word
        ("gadget = 1\nx = gadget", "(", {}, "("),  # complete
        ("# gadget\nx = gad", "dy", {}, "dy"),  # only in a comment
        ("x = mygadget\nx = gad", "dy", {}, "dy"),
        ("1234567 = 1\nx = 123", "9", {}, "9"),
        ("x = gad", "dy", {}, "dy"),
        ("", "dy", {}, "dy"),
    ],
)
def test_a_half_typed_word_is_completed_to_the_only_name_that_continues_it(before, suggested, options, text):
    assert best_at(before, suggested, **options).text == text


def test_a_suggestion_that_agrees_with_the_only_name_is_nearly_certain():
    assert best_at("gadget = 1\nx = gad", "get(2)", word=0.05) == Suggestion("get(2)", SAME, 0.025)


LIKE_ABOVE = [
    ("first = padded(first, 3)\nsecond = padded(", "second, 3)"),
    ("first = padded(first, 3)\nsecond = ", "padded(second, 3)"),
    ("first = padded(first, 3)\nsecond = padded(second", ", 3)"),
    ("first = padded(first, 3)\n\n  second = padded(sec", "ond, 3)"),
    ("first_cost = cost(first.weight, first.size)\nsecond_cost = cost(", "second.weight, second.size)"),
    ("var firstItem = FirstItem(FIRST_ITEM)\nvar secondItem = ", "SecondItem(SECOND_ITEM)"),
    ("elevation = 1\nself.name = name\nself.elev", "ation = elevation"),
    ("| `--width` | `WIDTH` |\r\n| `--margin` |", " `MARGIN` |"),
    ("first = padded(first, 3)\nsecond = padded(first, ", ""),  # what differs is not in the rest
    ("first = padded(first, 3)\nsecond = other(", "second, 3)"),
    ("a = pad(a, b)\nc = pad(d, ", ""),
    ("first = first\nfirst = ", ""),
    ("first = first\nsec", ""),
    ("x = 1\nname = name\nelev", ""),
    ("first = first\nsecond", ""),
    ("total = total + 1\nreturn ", ""),  # a name and a space repeat nothing
    ("const user = getUser(user)\nconst orderItem = ", "getOrderItem(orderItem)"),
    ("form = formBinding{}\nform_post =", " form_postBinding{}"),
    ("a1" * 300 + "q " + "y," * 700 + "\n" + "a1" * 300 + "z ", ""),
    ("first", ""),
    ("", ""),
    ("\n", ""),
    ("a\n(a", ""),
]


@pytest.mark.parametrize(("before", "rest"), LIKE_ABOVE)
def test_a_line_that_repeats_the_one_above_has_its_own_name(before, rest):
    assert best_at(before).text.removesuffix("\r\n") == rest
    assert best_at("x = 0\n" * 9 + before).text == best_at(before).text or before.count("\n") < 1


def test_a_repetition_replaces_a_less_probable_line():
    before = "first = padded(first, 3)\nsecond = padded("
    assert best_at(before, "first, 3)", word=2 * REPEATED[1] - 0.01) == Suggestion(
        "second, 3)", *REPEATED, source="copies"
    )
    assert best_at(before, "first, 3)", word=2 * REPEATED[1]).text == "first, 3)"
    assert best_at(before, "second, 3)", word=0.1).word == REPEATED[0]
    assert best_at(before, "first,\n  3\n)").text == "first,\n  3\n)", "it has as many lines as were asked for"


@pytest.mark.parametrize("gate", [None, zero_gate()])
def test_a_repetition_with_another_name_is_a_suggestion_of_all_completers(gate):
    for completer in completers(gate):
        before = CODE + "    value = width(value, 3)\n    other = width("
        best, *others = completer.alternatives(before, "", "b.py", CompleteOptions(alternatives=3))
        assert best == Suggestion("other, 3)", *REPEATED, source="copies")
        assert best.text not in [other.text for other in others]
        for text, after, options, expected in (
            (before + "oth", "", CompleteOptions(), "er, 3)"),
            (before, ")\n", CompleteOptions(), "other, 3"),
            (before, "", CompleteOptions(stop=[", 3"]), "other"),
        ):
            assert completer.alternatives(text, after, "b.py", options)[0].text == expected


LOCK = "c.guard.Lock()\n\tdefer c.guard.Unlock()\n\t}\n"
DEFER = "\tp.mutex.Lock()\n\tdefer "
COPIED = [
    (LOCK, DEFER, "c.guard.Unlock()", "p.mutex.Unlock()"),
    (LOCK, DEFER, "p.guard.Unlock()", "p.mutex.Unlock()"),
    (LOCK, f"func (c *C) F(guard) {{\n{DEFER}", "c.guard.Unlock()", "c.guard.Unlock()"),
    (LOCK, "\tif p {\n\tdefer ", "c.guard.Unlock()", "c.guard.Unlock()"),
    ("take(&q->lock);\n\tfree(&q->lock);\n}\n", "\ttake(&stats->key);\n\tfree(", "&q->lock);", "&stats->key);"),
    ("a = make(1)\na.close()\n\n", "    statement = make(1)\n    ", "a.close()", "statement.close()"),
    ("var a = one(1)\n\tdefer a.free()\n}\n", "\tvar b = two(2)\n\tdefer ", "a.free()", "b.free()"),
]


@pytest.mark.parametrize(("above", "typed", "suggested", "text"), COPIED)
def test_a_copied_line_gets_the_names_of_the_lines_above_the_cursor(above, typed, suggested, text):
    near = best_at(f"{above}\nfunction f(x) {{\n{typed}", suggested)
    assert near == best_at(typed, suggested, sources=["x\0" + above + "\0y"]), "from an indexed file"
    assert near == (
        Suggestion(text, *RENAMED, source="copies") if text != suggested else Suggestion(text, 0.1, 0.05)
    )


LOCKED = f"{LOCK}function f(x) {{\n{DEFER}"


def test_a_copied_line_with_other_names_keeps_the_lines_behind_it():
    assert best_at(LOCKED, "c.guard.Unlock()\n\tc.wait()").text == "p.mutex.Unlock()\n\tp.wait()"


def test_a_line_that_repeats_the_next_one_is_not_suggested_after_its_names_changed():
    assert best_at(LOCKED, "c.guard.Unlock()", after="\n\tdefer p.mutex.Unlock()\n").text == ""
    assert best_at(LOCKED, "c.guard.Unlock()", after="()\n").text == "p.mutex.Unlock"


HEADERS = [
    ("static int put(struct buffer *buffer, size_t length)\n{\n", ..., "buffer, length)"),
    ("func put(buffer io.Writer, length []int) error {\n", ..., "buffer, length)"),
    ("def put(buffer: Buffer, length: int = 3) -> int:\n", ..., "buffer, length)"),
    ("fn put(buffer: Buffer, mut length: f32) -> f32 {\n", ..., "buffer, length)"),
    ("export function put(buffer: B, length?: number): B {\n", ..., "buffer, length)"),
    ("pub fn put(buffer: []const u8, length: u8) u8 {\n", ..., "buffer, length)"),
    ("def put(buffer: Buffer, other: int):\n", ..., "buffer, "),
    ("def put(other: Buffer, length: int):\n", ..., ""),
    ("def put(other, length: int):\n", "1, length: int):", "1, length)"),
    ("def put(buffer, length=3):\n", "buffer, length=3)", "buffer, length=3)"),
    ("def put(name: str):\n", "name: other)", "name: other)"),
    ("put(buffer: Buffer, length: int)\n", ..., "buffer: Buffer, length: int)"),  # no definition
]
"""Headers, what is suggested in a call (... for the rest of the header), and what is shown."""


@pytest.mark.parametrize(("header", "suggested", "text"), HEADERS)
def test_a_call_does_not_go_on_with_the_header_of_the_definition(header, suggested, text):
    suggested = header.partition("put(")[2].partition("\n")[0] if suggested is ... else suggested
    before = f"{header}\n\nfunction f(buffer, length) {{\n    return put("
    assert best_at(before, suggested).text == text
    assert best_at(before.removeprefix(header), suggested, opened=["", header]).text == text
    assert best_at(before, f"max(put({suggested}", after=")").text.startswith(f"max(put({text}"), "inside a call"
    assert best_at(f"{header}\nclass A:\n    def put(", suggested).text == suggested, "another definition"


AGAIN = [
    ("func (s *S) Area() int {\n\treturn 1\n}\n\nfunc ", "(s *S) Area() int {", "(s *S)"),
    ("func (s *S) Area() int {\n\treturn 1\n}\n\nfunc ", "(t *T) Area() int {", "(t *T) Area() int {"),
    ("class A:\n    def read(self):\n        pass\n\n    def ", "read(self):", ""),
    ("class A:\n    def read(self):\n        pass\n\nclass B:\n    def ", "read(self):", "read(self):"),
    ("  const theme = 1;\n  ", "const theme = 2;", "const"),
    ("  let a = 1;\n  if (a) {\n    let a = 2;\n  }\n  let ", "b = 2;", "b = 2;"),
    ("\tint width = 1;\n\tint ", "width = 2;", ""),
    ("\twidth := 1\n\t", "width := 2", ""),
    ("\treturn a * b;\n\t", "return a * b;", "return a * b;"),
    ("x = 1\n", "x = 2", "x = 2"),
]


@pytest.mark.parametrize(("before", "suggested", "text"), AGAIN)
def test_a_name_that_its_block_defines_is_not_defined_again(before, suggested, text):
    best = best_at(before, suggested)
    assert (best.text, best.ends_line) == (text, text == suggested)


def test_what_the_text_below_defines_is_not_defined_again():
    below = " {\n}\n\nfn b() {\n}\n\nstruct C {\n    fn d() {}\n}\n"
    texts = [best_at("fn ", f"{name}() {{", after=below).text for name in "abcd"]
    assert texts == ["a() {", "", "c() {", "d() {"]


def test_open_files_are_newest_first_and_none_is_this_one():
    engine = completers(None)[1]
    for name in ("a.py", "b.py", "c.py", "a.py"):
        engine.update(name, f"{name} {len(engine._open.texts)}")
    options = CompleteOptions(files=(("d.py", "d"),))
    assert newest(engine._open.texts, "b.py", options) == ["a.py 3", "c.py 2", "d"]


@pytest.mark.parametrize("gate", [None, zero_gate(), copying_gate()])
def test_names_are_cut_at_stop_strings_and_after_the_most_tokens(gate):
    before = OPENED + "\nvalue = wibb"
    for completer in completers(gate):
        complete = partial(completer.alternatives, before, "\n", "b.py")
        full = complete(CompleteOptions())[0].text
        assert full.startswith("le_wobble")
        assert complete(CompleteOptions(stop=["_wob"]))[0].text == "le"
        short = complete(CompleteOptions(max_tokens=1))[0]
        assert full.startswith(short.text)
        assert len(short.text) < len(full)


@pytest.mark.parametrize(("tokens", "text"), [(None, "e = ß = e\u0301"), (20, "e"), (1, "")])
def test_characters_that_a_tokenizer_drops_or_changes_are_not_lost(tokens, text):
    inner = tokenizers.Tokenizer(tokenizers.models.BPE({"<unk>": 0, "_": 1, "e": 2, " ": 3, "=": 4, "é": 5}, []))
    inner.normalizer = tokenizers.normalizers.NFC()
    engine = CompletionEngine(replace(LOADED, tokenizer=Tokenizer(inner)))
    options = CompleteOptions(max_tokens=tokens)
    assert options.limit(Suggestion("e = ß = e\u0301"), engine.shorten).text == text


ODD = [
    *("", "\n", "(", ")", "((((", "a(", "a(b: c", "日本(語: x", "\ud800", "x" * 5000, "a*" * 2000, "\\", "a\0b"),
    *("$x", "def ", "\t" * 500, "\nfoo()", "    \r\n    foo()"),
]


@pytest.mark.parametrize("before", ODD)
def test_odd_texts_are_no_errors(before):
    for suggested in ODD:
        for after in ("", "\n", ")", "x" * 100):
            sources = [] if "\ud800" in before + suggested else [before + suggested]
            place = replace(place_of(before, suggested, after), sources=[TextSource(s.encode()) for s in sources])
            assert isinstance(place.suggestions()[0].text, str)
