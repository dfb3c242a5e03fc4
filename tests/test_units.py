"""Counts in sentences."""

import pytest
from rich.cells import cell_len

from dunes.progress import print_table
from dunes.units import format_bytes, format_count, format_seconds, plural


def test_a_count_agrees_with_its_noun():
    assert [plural(n, "file") for n in (0, 1, 1.0, 0.5)] == ["0 files", "1 file", "1 file", "0.5 files"]
    assert [plural(n, "matrix", "matrices") for n in (1, 2)] == ["1 matrix", "2 matrices"]


def test_numbers_with_their_units():
    bytes_of = {0: "0 B", 999: "999 B", 999_600: "1 MB", 34.2e6: "34.2 MB", 2.2e9: "2.2 GB", 1.5e12: "1.5 TB"}
    assert {n: format_bytes(n) for n in bytes_of} == bytes_of
    counts = {0: "0", 0.25: "0.25", 87: "87", 999.96: "1k", 4100: "4.1k", 12.34e6: "12.3M", 2e9: "2B"}
    assert {n: format_count(n) for n in counts} == counts
    times = {0: "0 s", 4.5e-8: "45 ns", 1e-4: "100 us", 0.0456: "45.6 ms", 59.94: "59.9 s", 59.96: "1:00"}
    times |= {65.4: "1:05", 3599.7: "1:00:00", 7389: "2:03:09"}
    assert {s: format_seconds(s) for s in times} == times


@pytest.mark.parametrize("width", [1, 40, 80, 200])
def test_a_table_is_as_wide_as_the_terminal_and_loses_no_figure(width, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(width))
    figures = [[f"{10 ** (row + column)}" for column in range(12)] for row in range(2)]
    lines = [["ü 表", "x", *figures[0]], ["b", "y", *figures[1]]]
    print_table("title", ["", "of", *(f"column {n}" for n in range(12))], lines, 2)
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "title"
    parts = printed.count("") + 1
    assert [sum(line.startswith(name) for line in printed) for name in ("ü 表", "b")] == [parts, parts]
    assert (parts == 1) == (width == 200)
    for name, row in zip(("ü 表", "b"), figures, strict=True):
        words = [word for line in printed if line.startswith(name) for word in line.removeprefix(name).split()]
        assert [word for word in words if word not in "xy"] == row
    if width > 30:
        assert max(map(cell_len, printed)) <= width


def test_a_table_without_a_terminal_has_a_hundred_columns(monkeypatch, capsys):
    monkeypatch.delenv("COLUMNS", raising=False)
    print_table("", ["", *["figure"] * 40], [["a", *["1.0"] * 40]])
    printed = capsys.readouterr().out.splitlines()
    assert 92 < max(map(len, printed)) <= 100
    print_table("", ["", "none"], [])
    assert capsys.readouterr().out == "  none\n"
