"""The view that writes: beams, the places of copies, files of a project, and the page in a browser."""

import pytest

from dunes.serve import app
from dunes.serve.fields import Fields, Refused
from dunes.studio.project_files import LARGEST, read_project_file
from studio import needs_browser, opened, studio
from test_serve import BEFORE, LINE, ok, port, programs, run  # noqa: F401  (fixtures)


def test_tokens_name_the_places_that_they_were_copied_from(port, programs):  # noqa: F811
    far = ok(port, "/suggest", {"before": BEFORE, "tokens": True})["tokens"]
    near = ok(port, "/suggest", {"before": f"\n{LINE.format(77)}\n{LINE[:20]}", "tokens": True})["tokens"]
    lines = (programs / "module_1.py").read_text().split("\n")
    places = {(file, lines[line - 1]) for file, line in (token["copied"] for token in far)}
    assert places == {("module_1.py", LINE.format(1))}
    assert near[0]["copied"] == ["", 2]


def test_a_request_sets_its_beams(port):  # noqa: F811
    few, many = (ok(port, "/suggest", {"before": "x = ", "tokens": True, "beams": n}) for n in (1, 3))
    assert len(few["suggestions"]) == 1 < len(many["suggestions"])
    for beams in (0, 9, 1.5, "3", True):
        with pytest.raises(Refused, match="beams"):
            app.read_suggest(Fields({"beams": beams}))


def test_only_text_files_of_the_project_are_read(tmp_path):
    root, secret = tmp_path / "root", tmp_path / "secret.py"
    root.mkdir()
    (root / "link.py").symlink_to(secret)
    files = {"root/a.py": b"x", "root/nul": b"\0", "root/latin": b"\xe9", "root/large": b"x" * (LARGEST + 1)}
    for path, data in {"secret.py": b"y", **files}.items():
        (tmp_path / path).write_bytes(data)
    assert read_project_file("a.py", [tmp_path / "none", root]) == (root / "a.py", "x")
    for name in (str(secret), "../secret.py", "link.py", "nul", "latin", "large", "."):
        with pytest.raises(ValueError, match=(root / name).resolve().name):
            read_project_file(name, [root])


@needs_browser
@pytest.mark.slow
def test_a_suggestion_is_accepted_and_its_source_opened(run, programs):  # noqa: F811
    from playwright.sync_api import expect

    file, rest = programs / "module_3.py", LINE.format(1)[len("    return val") :]
    with studio(run.parent) as address, opened(f"{address}/write?model=run&file={file}") as page:
        text = page.get_by_label("Text")
        expect(text).to_have_value(file.read_text(), timeout=60_000)
        page.get_by_label("Threshold").fill("0")
        text.press("Control+End")
        page.keyboard.type(BEFORE)
        expect(page.locator(".ghost")).to_have_text(rest)
        page.locator(".token", has_text="other").click()
        expect(page.locator("b")).to_have_text("module_1.py, line 8")
        expect(page.locator(":focus")).to_have_text(f"   8 {LINE.format(1)}")
        page.keyboard.press("Escape")
        page.keyboard.press("Control+ArrowRight")
        expect(text).to_have_value(file.read_text() + BEFORE + "ue_3")
        page.keyboard.press("Tab")
        expect(text).to_have_value(file.read_text() + BEFORE + rest)
