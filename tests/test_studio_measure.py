"""The view Measure: files of measurements become tables and pictures."""

import json
import re

import pytest

from dunes.bench import runner
from dunes.bench.step_memory import estimate_memory
from dunes.bench.table import draw_folder
from studio import needs_browser, opened, studio
from test_bench import TINY, laps

PROFILE = {"benchmark": "train", "subject": "m", "wall": 1.0, "between": 0.1}
PROFILE["modules"] = {"": {"forward": 0.3, "backward": 0.6}, "a<b": {"forward": 0.2}, "a<b.c": {"forward": 0.1}}


@pytest.fixture
def folder(tmp_path):
    step = estimate_memory(*runner.subjects_with_settings("train", TINY)[0], False, False).record(None)
    files = {"metrics": [{"step": 1}], "other": [{"benchmark": "memory", "results": [step]}, PROFILE]}
    case = lambda seconds, commit, batch: laps(seconds, 0.0, 0, 2, subject="<b>", commit=commit, batch=batch)
    files |= {name: case(time, name, 8) + case(time, name, 16) for name, time in (("old", 2), ("new", 1))}
    for name, records in files.items():
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, records)) + '\n{"benchmark')
    return tmp_path


def test_commits_of_a_setting_stand_side_by_side_and_damaged_lines_are_named(folder):
    (_, rates), _, (_, profile), *messages = draw_folder(folder)
    found = re.findall(">(&lt;b&gt;|8|16|old|new|1 tokens/s|0.5 tokens/s)<", rates)
    batches = (f"&lt;b&gt; {batch} new 1 tokens/s &lt;b&gt; {batch} old 0.5 tokens/s" for batch in (8, 16))
    assert " ".join(found) == " ".join(batches)
    assert re.findall('width="([0-9.]*)%"><title>', profile) == ["30.000", "66.667", "50.000", "60.000", "10.000"]
    assert "<title>forward.a&lt;b.c: c 100 ms</title>" in profile
    assert [re.search(r"(\w+)\.jsonl, line", line)[1] for line, _ in messages] == ["new", "old", "other"]


@pytest.mark.slow
@needs_browser
def test_the_page_shows_rates_memory_and_a_profile_in_a_narrow_window(folder):
    with studio(folder) as address, opened(f"{address}/measure", width=400) as page:
        for text in ("0.5 tokens/s", "■ temporaries", "c 100 ms"):
            page.get_by_text(text, exact=True).first.wait_for()
        assert page.evaluate("document.documentElement.scrollWidth") <= 400
