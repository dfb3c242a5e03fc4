"""The texts that the language server completes in are those of the editor, whatever characters they have.

Editors end lines at \\n, \\r\\n and \\r and count columns in code units. `str.splitlines` also ends others.
"""

import json
import signal
import subprocess
import sys
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import message
from dunes.serve.protocols import openai
from dunes.text.lines import split_lines

types = pytest.importorskip("lsprotocol.types")
pytest.importorskip("pygls")

ENCODINGS = ["utf-8", "utf-16", "utf-32"]
NO_ENDS = "\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029"
"""Characters where Python splits lines, and no editor does."""
pieces = st.sampled_from(["a", "é", "漢", "🙂", "\t", "\n", "\r", "\r\n", *NO_ENDS, "\ud83d", "\ude42"])
texts = st.lists(pieces, max_size=12).map("".join)


def size(character, encoding):
    if encoding == "utf-32":
        return 1
    code = ord(character)
    if encoding == "utf-16":
        return 2 if code >= 0x10000 else 1
    return 1 + (code >= 0x80) + (code >= 0x800) + (code >= 0x10000)


@dataclass
class Editor:
    """An editor that walks through its text from the start to know where it is."""

    text: str
    encoding: str

    def position(self, offset):
        """Line and column; None between \\r and \\n, where no cursor can be."""
        line = column = i = 0
        while i < offset:
            if self.text[i : i + 2] == "\r\n":
                line, column, i = line + 1, 0, i + 2
            elif self.text[i] in "\r\n":
                line, column, i = line + 1, 0, i + 1
            else:
                column, i = column + size(self.text[i], self.encoding), i + 1
        return (line, column) if i == offset else None

    def cursors(self):
        """(offset, position) pairs, also of positions behind a line's end and behind the last line."""
        all_pairs = ((i, self.position(i)) for i in range(len(self.text) + 1))
        pairs = [(i, place) for i, place in all_pairs if place is not None]
        ends = [(i, place) for i, place in pairs if i == len(self.text) or self.text[i] in "\r\n"]
        behind = [(i, (line, column + more)) for i, (line, column) in ends for more in (1, 1000)]
        last, (line, _) = pairs[-1]
        return pairs + behind + [(last, (line + more, 0)) for more in (1, 7)]

    def replace(self, start, end, new):
        (i, a), (j, b) = start, end
        self.text = self.text[:i] + new + self.text[j:]
        return types.TextDocumentContentChangePartial(types.Range(types.Position(*a), types.Position(*b)), new)


def document(text, encoding):
    from pygls.workspace import PositionCodec

    from dunes.serve.lsp import Document

    return Document("file:///a.py", text, position_codec=PositionCodec(encoding))


def offset(text, line, column, encoding):
    return document(text, encoding).offset_at_position(types.Position(line, column))


@pytest.mark.parametrize("encoding", ENCODINGS)
@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(text=texts, edits=st.lists(st.tuples(texts, st.booleans()), max_size=4), data=st.data())
def test_after_any_edits_the_text_is_the_editors(encoding, text, edits, data):
    editor, ours = Editor(text, encoding), document(text, encoding)
    for new, is_whole in edits:
        if is_whole:
            editor.text = new
            change = types.TextDocumentContentChangeWholeDocument(new)
        else:
            start, end = sorted(data.draw(st.lists(st.sampled_from(editor.cursors()), min_size=2, max_size=2)))
            change = editor.replace(start, end, new)
        ours.apply_change(change)
        assert ours.source == editor.text
    for offset, place in editor.cursors():
        assert ours.offset_at_position(types.Position(*place)) == offset


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_positions_of_an_empty_text_and_inside_a_character(encoding):
    assert [offset("", *place, encoding) for place in ((0, 0), (0, 9), (3, 0))] == [0, 0, 0]
    units = size("🙂", encoding)
    assert [offset("é\na🙂b", 1, 1 + i, encoding) for i in range(units + 1)] == [3] * units + [4]
    ours = document("", encoding)
    ours.apply_change(
        types.TextDocumentContentChangePartial(types.Range(types.Position(5, 5), types.Position(9, 0)), "x")
    )
    assert ours.source == "x"


def test_lines_are_split_where_positions_count_them():
    text = f"a\r\nb{NO_ENDS}c\rd\n\r\ne"
    lines = split_lines(text)
    assert lines == ["a\r\n", f"b{NO_ENDS}c\r", "d\n", "\r\n", "e"]
    assert split_lines("") == split_lines("\r")[1:] == [""]
    assert [offset(text, i, 0, "utf-8") for i in range(5)] == [sum(map(len, lines[:i])) for i in range(5)]


def test_doctor_reads_events_of_servers_that_do_not_escape_line_separators():
    event = json.dumps({"choices": [{"text": NO_ENDS[-3:]}]}, ensure_ascii=False)
    assert openai._events(f"data: {event}\r\n\r\ndata: [DONE]\n\n".encode()) == NO_ENDS[-3:]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_server_though_a_thread_waits_for_the_editor(number, tmp_path):
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    process = subprocess.Popen([sys.executable, "-m", "dunes", "lsp", str(tmp_path)], **pipes)
    with process:
        request = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": {"capabilities": {}}}
        process.stdin.write(message(request) + message({"jsonrpc": "2.0", "method": "initialized", "params": {}}))
        process.stdin.flush()
        said = b""
        while b"showMessage" not in said:  # there is no model
            said += process.stdout.read1()
        process.send_signal(number)
        assert process.wait(20) == -number
        assert process.stderr.read() == b""
