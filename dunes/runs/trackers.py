"""Show a run in TensorBoard, W&B, trackio or MLflow, or in any object with `log(dict, step)`.

A tracker gets the numbers in metrics.jsonl, with the names and steps of that file, and once the config. It writes
to the run's folder, and sends nothing, unless the user has set the tracker's own environment variable for it.
"""

import os
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from io import BytesIO
from pathlib import Path
from time import time
from typing import Any, BinaryIO
from unittest.mock import patch
from uuid import uuid4

from huggingface_hub import constants

from dunes.extra import extra
from dunes.files.atomic import write_file
from dunes.files.json_file import parse_line
from dunes.ops.kernels import one_line
from dunes.progress import Line
from dunes.runs.saving import METRICS
from dunes.runs.task import Run

PROJECT = "dunes"
"""Name of the project (in MLflow: the experiment), unless the tracker's own environment variable names another."""


@dataclass(frozen=True)
class Tracker:
    """Functions that log numbers at a step, close the tracker, and show the text generated after a step.

    The steps up to `last` were logged in an earlier session.
    """

    log: Callable[[dict[str, float], int], object]
    close: Callable[[], object] = lambda: None
    last: int = -1
    sample: Callable[[int, str], object] = lambda step, text: None


def open_tensorboard(run: Run) -> Tracker:
    """TensorBoard's event files in RUN/tensorboard.

    The old event files are emptied, and all steps and samples are written again. So the curves of a resumed run
    have neither gaps nor duplicates. `purge_step` lets an open TensorBoard discard earlier numbers, but not texts.
    """
    folder = run.folder / "tensorboard"
    for old in folder.glob("events.out.tfevents.*"):
        os.truncate(old, 0)  # not deleted, since an open TensorBoard would keep reading it
    writer = extra("torch.utils.tensorboard", "tensorboard").SummaryWriter(str(folder), purge_step=0)

    def log(values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    def show(step: int, text: str, name: str = "sample") -> None:
        """Show text verbatim: TensorBoard renders Markdown, where indented text is code."""
        writer.add_text(name, "    " + text.replace("\n", "\n    "), step)

    show(0, "\n".join(f"{name}: {value}" for name, value in asdict(run.config).items()), "config")
    for step, text in read_samples(run.folder / "samples.md").items():
        if step <= run.trainer.number:
            show(step, text)
    return Tracker(log, writer.close, sample=show)


def open_wandb(run: Run) -> Tracker:
    """W&B, in RUN/wandb; offline unless WANDB_MODE is set. A run that the program has open is left alone."""
    wandb, name = extra("wandb", "wandb"), run_id(run.folder)
    for old in (run.folder / "wandb").glob(f"offline-run-*-{name}"):
        shutil.rmtree(old)  # W&B cannot continue an offline run, so all steps are written again
    names = {"id": name, "name": run.folder.name, "project": os.environ.get("WANDB_PROJECT", PROJECT)}
    where = {"dir": str(run.folder), "mode": os.environ.get("WANDB_MODE", "offline"), "resume": "allow"}
    settings = wandb.Settings(console="off", quiet=True, reinit="create_new")  # no progress bar is recorded
    tracked = wandb.init(config=asdict(run.config), allow_val_change=True, settings=settings, **names, **where)
    return Tracker(tracked.log, tracked.finish, tracked.step - 1)


def open_trackio(run: Run) -> Tracker:
    """trackio, in RUN/trackio unless TRACKIO_DIR, TRACKIO_SPACE_ID or TRACKIO_SERVER_URL is set.

    The Hub is offline while a local run starts: trackio would ask it for the name of the user who is logged in.
    """
    trackio, name = extra("trackio", "trackio"), f"{run.folder.name}-{run_id(run.folder)}"
    local = not {"TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"} & os.environ.keys()
    with patch.object(constants, "HF_HUB_OFFLINE", local or constants.HF_HUB_OFFLINE):
        tracked = trackio.init(PROJECT, name, config=asdict(run.config), resume="allow")
    return Tracker(tracked.log, tracked.finish, tracked._next_step - 1)


def open_mlflow(run: Run) -> Tracker:
    """MLflow, in RUN/mlflow/mlflow.db unless MLFLOW_TRACKING_URI is set."""
    mlflow, entities, tag = extra("mlflow", "mlflow"), extra("mlflow.entities", "mlflow"), run_id(run.folder)
    if not (uri := os.environ.get("MLFLOW_TRACKING_URI")):
        (folder := run.folder.absolute() / "mlflow").mkdir(exist_ok=True)
        uri = "sqlite:///" + re.sub("[%?#]", lambda found: f"%{ord(found[0]):X}", f"{folder}/mlflow.db")
    client, title = mlflow.MlflowClient(uri), os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
    known = client.get_experiment_by_name(title)
    experiment = known.experiment_id if known else client.create_experiment(title)
    if not (runs := client.search_runs([experiment], f"tags.dunes = '{tag}'")):
        runs = [client.create_run(experiment, run_name=run.folder.name, tags={"dunes": tag})]
        config = [entities.Param(key, str(value)[:500]) for key, value in asdict(run.config).items()]
        client.log_batch(runs[0].info.run_id, params=config)
    name, waiting = runs[0].info.run_id, list[Any]()

    def log(values: dict[str, float], step: int) -> None:
        now = int(1000 * time())
        waiting.extend(entities.Metric(key, value, now, step) for key, value in values.items())
        if len(waiting) > 500 or now > waiting[0].timestamp + 1000:  # one step takes 20 ms, 140 at once 98 ms
            client.log_batch(name, waiting)
            waiting.clear()

    def close() -> None:
        client.log_batch(name, waiting)
        client.set_terminated(name)

    last = max((metric.step for metric in client.get_metric_history(name, "loss")), default=-1)
    return Tracker(log, close, last)


def open_object(tracker: Any, run: Run) -> Tracker:
    """The user's object; it gets only the steps of this session."""
    return Tracker(tracker.log, last=run.trainer.number or -1)


TRACKERS = {"tensorboard": open_tensorboard, "wandb": open_wandb, "trackio": open_trackio, "mlflow": open_mlflow}
"""Functions that open the trackers. A tracker has the name of its library and of the extra that installs it."""
QUIET = {"WANDB_ERROR_REPORTING": "false", "MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_LOGGING_LEVEL": "CRITICAL"}
"""Environment variables that the libraries read when they are imported: they report nothing to their makers."""


def find_trackers(track: Sequence[Any], folder: Path) -> dict[str, Callable[[Run], Tracker]]:
    """Functions that start the trackers, by name; the libraries are imported.

    `track` contains names of TRACKERS, and objects. Raises ValueError for an unknown name, a missing library, and
    an object without a method `log`.
    """
    openers = dict[str, Callable[[Run], Tracker]]()
    for number, each in enumerate(track, 1):
        if isinstance(each, str) and each in TRACKERS:
            os.environ.update(QUIET | {"TRACKIO_DIR": str(folder.absolute() / "trackio")} | dict(os.environ))
            extra(each, each)
            openers[each] = TRACKERS[each]
        elif callable(getattr(each, "log", None)):
            openers[f"{type(each).__name__} (tracker {number})"] = partial(open_object, each)
        else:
            expected = f"one of {', '.join(TRACKERS)}, or an object with log(dict, step)"
            raise ValueError(f"--track {each!r:.60}: expected {expected}")
    return openers


class Trackers:
    """The trackers of a run; `update` logs to them what was added to metrics.jsonl.

    If a tracker fails, `line` is called with a warning, and the run continues without it. `track` is as in
    `find_trackers`.
    """

    def __init__(self, run: Run, track: Sequence[Any], line: Line) -> None:
        self.line = line
        self._lines: BinaryIO = BytesIO()
        self._trackers: dict[str, Any] = find_trackers(track, run.folder)
        self._each(lambda name, open_: self._trackers.update({name: open_(run)}))
        if self._trackers:
            (run.folder / METRICS).touch()
            self._lines = (run.folder / METRICS).open("rb")

    def update(self) -> None:
        """Log the lines that metrics.jsonl gained since the last call."""
        for record in filter(None, map(parse_line, self._lines)):
            if "step" in record and (values := numbers(record)):
                self._each(partial(_log, values, record["step"]))

    def sample(self, step: int, text: str) -> None:
        """Show the text generated after this step, in trackers that show text."""
        self._each(lambda name, tracker: tracker.sample(step, text))

    def close(self) -> None:
        self.update()
        self._lines.close()
        self._each(lambda name, tracker: tracker.close())

    def _each(self, work: Callable[[str, Any], object]) -> None:
        for name, tracker in [*self._trackers.items()]:
            try:
                work(name, tracker)
            except Exception as error:  # of another library, or of the user's object
                del self._trackers[name]
                self.line(f"warning: {name} failed: {one_line(error)}; training continues without it")


def _log(values: dict[str, float], step: int, name: str, tracker: Tracker) -> None:
    if step > tracker.last:
        tracker.log(values, step)


def numbers(record: dict[str, Any]) -> dict[str, float]:
    """The numbers in a line of metrics.jsonl, by name; an entry of `metrics` is named like `metrics/balance`."""
    values = record | {f"metrics/{name}": value for name, value in record.get("metrics", {}).items()}
    return {name: float(v) for name, v in values.items() if isinstance(v, int | float) and name != "step"}


def run_id(folder: Path) -> str:
    """An id of the run for its trackers; a resumed run keeps it."""
    path = folder / "state" / "run_id"
    if not path.is_file():
        write_file(path, uuid4().hex.encode())
    return path.read_text()


def read_samples(path: Path) -> dict[int, str]:
    """Samples in a samples.md, by step; if a step has several samples, only the last is returned."""
    text = path.read_bytes().decode(errors="replace") if os.access(path, os.R_OK) and path.is_file() else ""
    parts = re.split(r"^## After (\d{1,15}) steps?[^\n]*\n\n```\n", text, flags=re.MULTILINE)[1:]
    return {int(n): sample.removesuffix("\n```\n\n") for n, sample in zip(parts[::2], parts[1::2], strict=True)}
