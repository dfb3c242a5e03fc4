"""Every recipe runs, at toy size, and stays short enough to read."""

import importlib.util
from pathlib import Path

import pytest

from conftest import data

RECIPES = sorted((Path(__file__).parent.parent / "recipes").glob("*.py"))


def recipe(name):
    path = next(p for p in RECIPES if p.stem == name)
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["shakespeare", "zig"])
def test_a_recipe_is_short(name):
    lines = next(p for p in RECIPES if p.stem == name).read_text().split('"""', 2)[2].splitlines()
    assert sum(bool(line.strip()) for line in lines) < 40


def test_shakespeare(tmp_path, capsys):
    play = tmp_path / "play.txt"
    play.write_text(
        "First Citizen:\nBefore we proceed any further, hear me speak.\n\nAll:\nSpeak, speak.\n\n" * 60
    )
    assert recipe("shakespeare").main(str(play), 100, str(tmp_path / "run")) < 1.0
    assert "step 100" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_shakespeare_itself_learns_what_the_field_expects(tmp_path):
    loss = recipe("shakespeare").main(str(data("tinyshakespeare.txt")), 300, str(tmp_path / "run"))
    assert loss < 1.88


def test_zig(tmp_path, capsys):
    for i in range(30):
        code = f'const std = @import("std");\n\npub fn task{i}(value: u32) u32 {{\n    return value * {i};\n}}\n\n'
        (tmp_path / f"m{i}.zig").write_text(code * 60)
    assert recipe("zig").main(str(tmp_path), 0.1, str(tmp_path / "run")) == 0
    assert "const std = @im▏" in capsys.readouterr().out


def test_own_parts_learn_to_add():
    assert recipe("own_parts").main() > 0.9


def test_the_demo_shows_lines_of_unseen_files():
    found = recipe("demo").unseen_lines(3, seed=0)
    assert len({place for place, _, _ in found}) == 3
    for _, before, truth in found:
        assert truth.strip()
        assert len(before.splitlines()) > 5
