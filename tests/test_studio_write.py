"""The view that writes: beams, the places of copies, files of a project, and the page in a browser."""

import re
from contextlib import closing
from functools import partial

import pytest

from dunes.serve import app
from dunes.serve.fields import Fields, Refused
from dunes.serve.worker import Worker
from dunes.studio.project_files import LARGEST, read_project_file
from studio import needs_browser, opened, studio
from test_serve import BEFORE, LINE, programs, request_of, run  # noqa: F401  (fixtures)


def test_tokens_name_the_places_that_they_were_copied_from(run, programs):  # noqa: F811
    with closing(Worker([run], 0.0, (), print, follows=False)) as worker:
        suggest = partial(request_of, app.Server(worker).app(), "/suggest")
        places = [token["copied"] for token in suggest({"before": BEFORE, "tokens": True})["tokens"]]
        above = f"\n{LINE.format(77)}\n{LINE[:20]}"
        assert suggest({"before": above, "tokens": True})["tokens"][0]["copied"] == ["", 2]
        few, many = (suggest({"before": "def ", "tokens": True, "beams": n})["suggestions"] for n in (1, 8))
    lines = (programs / "module_1.py").read_text().split("\n")
    assert {(file, lines[line - 1]) for file, line in places} == {("module_1.py", LINE.format(1))}
    assert len(few) == 1 < len(many)
    for beams in (0, 9, 1.5, "3", True):
        with pytest.raises(Refused, match="beams"):
            app.read_suggest(Fields({"beams": beams}))


def test_only_text_files_of_the_project_are_read(tmp_path):
    root, secret = tmp_path / "root", tmp_path / "secret.py"
    root.mkdir()
    (root / "link.py").symlink_to(secret)
    for path, data in (("a.py", b"x"), ("nul", b"\0"), ("latin", b"\xe9"), ("large", b"x" * (LARGEST + 1))):
        (root / path).write_bytes(data)
    secret.write_text("y")
    assert read_project_file("a.py", [tmp_path / "none", root]) == (root / "a.py", "x")
    assert read_project_file(str(secret), [root, secret]) == (secret, "y")
    for name in (str(secret), "../secret.py", "link.py", "nul", "latin", "large", "."):
        with pytest.raises(ValueError, match=(root / name).resolve().name):
            read_project_file(name, [root])


@needs_browser
@pytest.mark.slow
def test_a_suggestion_is_accepted_and_its_source_opened(run, programs):  # noqa: F811
    from playwright.sync_api import expect

    file, line = programs / "module_3.py", LINE.format(1)
    with studio(run.parent) as address, opened(f"{address}/write?model=run&file={file}") as page:
        text = page.get_by_label("Text")
        expect(text).to_have_value(file.read_text(), timeout=60_000)
        page.get_by_label("Threshold").fill("0")
        text.press("Control+End")
        page.keyboard.type(BEFORE)
        expect(page.locator(".ghost")).to_have_text(line[14:])
        page.keyboard.press("Control+ArrowRight")
        expect(text).to_have_value(re.compile(r"return value_3$"))
        page.keyboard.press("Tab")
        expect(text).to_have_value(re.compile(re.escape(line) + "$"))
        page.keyboard.press("Control+z")
        page.locator(".token", has_text="other").click()
        expect(page.get_by_text(re.compile(r"^module_1\.py, line \d+$"))).to_be_visible()
        assert line in page.evaluate("document.activeElement.textContent")
