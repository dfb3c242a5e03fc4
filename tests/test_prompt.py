"""What a user meets at Python's prompt and in a type checker: names, reprs, types of own parts."""

from pathlib import Path

import pytest
import torch

import dunes
import typed_parts
from conftest import run_python

ROOMS = {path.parent.name for path in Path(dunes.__file__).parent.glob("*/__init__.py")}


@pytest.mark.slow
def test_dir_lists_the_rooms_and_imports_none():
    assert set(dir(dunes)) >= ROOMS - {"cli"}
    script = "import sys, dunes; dir(dunes); assert 'torch' not in sys.modules; print(dunes.text.__name__)"
    done = run_python(script)
    assert done.stdout == "dunes.text\n", done.stderr
    with pytest.raises(AttributeError, match="module 'dunes' has no attribute 'nonsense'"):
        dunes.nonsense  # noqa: B018


@pytest.mark.filterwarnings("ignore:unchanged may mix tokens")
def test_a_model_of_own_parts_that_type_checks_trains_and_generates():
    assert len(typed_parts.run(iter([torch.randint(11, (2, 8))]))) == 4
