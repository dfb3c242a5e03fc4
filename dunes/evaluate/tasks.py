"""Run tasks of lm-evaluation-harness on a model folder."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dunes.extra import extra
from dunes.files.atomic import write_file
from dunes.progress import Display, shown_by
from dunes.units import plural


def run_tasks(
    folder: Path,
    tasks: Sequence[str],
    display: Display,
    *,
    task_folder: Path | None = None,
    limit: int | None = None,
    out: Path | None = None,
    any_base: bool = False,
) -> dict[str, Any]:
    """The harness's results for the named tasks, groups or tags, with every sample; they are also written to
    `out`.

    `task_folder` contains YAML files of additional tasks. `limit` is the maximum number of documents per task.
    `any_base` is as in `checkpoint.load`. Raises ValueError for an unknown task, and for an invalid model folder
    or setting.
    """
    lm_eval = extra("lm_eval", "eval")
    if limit is not None and limit < 1:
        raise ValueError(f"--limit is {limit}; it must be at least 1")
    for option, path in {"--task-folder": task_folder, "--out": out and out.absolute().parent}.items():
        if path is not None and not path.is_dir():
            raise ValueError(f"{option}: {path} is not a folder")
    manager = extra("lm_eval.tasks", "eval").TaskManager(include_path=task_folder and str(task_folder))
    if unknown := [task for task in tasks if task not in manager.all_tasks]:
        raise ValueError(f"--tasks: unknown task {unknown[0]!r}; `lm-eval ls tasks` lists all tasks")
    from dunes.evaluate.harness import Harness

    with display, shown_by(display.state):
        model = Harness(folder, any_base)
        results: dict[str, Any] = lm_eval.simple_evaluate(
            model=model, tasks=list(tasks), task_manager=manager, limit=limit
        )
        if model.truncated:
            display.line(
                f"{plural(model.truncated, 'text')} truncated on the left to the context length of "
                f"{model.max_length} tokens"
            )
    if out is not None:
        write_file(out, json.dumps(results, indent=1, default=str).encode())
    return results


def table(results: Mapping[str, Any]) -> list[str]:
    """The results as lines of text: the harness's own table of metrics."""
    lines: list[str] = extra("lm_eval.utils", "eval").make_table(results).splitlines()
    return lines
