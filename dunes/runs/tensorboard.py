"""Write a run's metrics and samples for TensorBoard, to RUN/tensorboard.

The file is written directly in TensorBoard's record format. PyTorch's SummaryWriter is not used: its thread dies
with a traceback when the disk is full, and its purge_step purges scalars but not text.
"""

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from time import time, time_ns
from typing import Any, BinaryIO, Self

from dunes.extra import extra
from dunes.runs.saving import METRICS, read_metrics
from dunes.train import Step

FOLDER = "tensorboard"
SAMPLES = "samples.md"


class TensorBoard:
    """Writes metrics and samples: `with TensorBoard(run, non_fatal) as board: board.step(...)`.

    At the start, the old event files are emptied, and all earlier metrics and samples are written to a new file.
    So the curves of a resumed run have neither gaps nor duplicates. After an OSError, `non_fatal` reports the
    error, and the run continues without TensorBoard. If `run` is None, nothing is written. Raises ValueError if
    tensorboard is needed but not installed.
    """

    def __init__(self, run: Path | None, non_fatal: Callable[[str], AbstractContextManager[None]]) -> None:
        self.run, self.non_fatal = run, non_fatal
        self._file: BinaryIO | None = None
        if run is not None:
            self._summary = extra("torch.utils.tensorboard.summary", "track")
            self._event = extra("tensorboard.compat.proto.event_pb2", "track")
            self._records = extra("tensorboard.summary.writer.record_writer", "track")

    def __enter__(self) -> Self:
        if self.run is not None:
            with self._until_error():
                self._begin(self.run)
        return self

    def __exit__(self, *error: object) -> None:
        with self.non_fatal("writing to TensorBoard"):
            self._close()

    def step(self, step: Step, validation: Mapping[str, float]) -> None:
        """Write the metrics of a step, and those of the validation after the step, if any."""
        if self._file is not None:
            with self._until_error():
                self._scalars(asdict(step) | {"step": step.number, **validation}, time())

    def sample(self, step: int, text: str) -> None:
        """Write the sample generated after this step."""
        if self._file is not None:
            with self._until_error():
                self._text(step, text)

    def _begin(self, run: Path) -> None:
        (run / FOLDER).mkdir(exist_ok=True)
        for old in (run / FOLDER).glob("events.out.tfevents.*"):
            os.truncate(old, 0)  # not deleted, since an open TensorBoard would keep reading it
        self._file = (run / FOLDER / f"events.out.tfevents.{time_ns()}.dunes").open("wb")
        self._put(file_version="brain.Event:2")
        # This record lets an open TensorBoard discard earlier records.
        self._put(session_log=self._event.SessionLog(status=self._event.SessionLog.START))
        steps = [r for r in read_metrics(run / METRICS) if "loss" in r]
        clock = time() - sum(r["seconds"] for r in steps)
        for record in steps:
            clock += record["seconds"]
            self._scalars(record, clock)
        for step, text in read_samples(run / SAMPLES).items():
            if steps and step <= steps[-1]["step"]:
                self._text(step, text)

    def _scalars(self, record: Mapping[str, Any], clock: float) -> None:
        for tag, value in scalars(record).items():
            self._put(step=record["step"], wall_time=clock, summary=self._summary.scalar(tag, value))

    def _text(self, step: int, text: str) -> None:
        # TensorBoard renders Markdown: indented text is shown verbatim.
        self._put(step=step, summary=self._summary.text("sample", "    " + text.replace("\n", "\n    ")))

    def _put(self, **fields: Any) -> None:
        event = self._event.Event(**{"wall_time": time()} | fields)
        self._records.RecordWriter(self._file).write(event.SerializeToString())

    @contextmanager
    def _until_error(self) -> Iterator[None]:
        """Flush the file after the `with` block; after the first error, close it and write nothing more."""
        with self.non_fatal("writing to TensorBoard"):
            try:
                yield
                if self._file is not None:
                    self._file.flush()
            except OSError:
                with suppress(OSError):
                    self._close()
                raise

    def _close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()


def scalars(record: Mapping[str, Any]) -> dict[str, float]:
    """Scalars to write for a record of metrics.jsonl, by tag: losses, `lr_scale`, `grad_norm`, tokens/s and the
    metrics."""
    values = {name: record.get(name) for name in ("loss", "bits_per_byte", "lr_scale", "grad_norm")}
    metrics = record.get("metrics", {})
    pairs = "margin" in metrics
    values[f"{'pairs' if pairs else 'tokens'}_per_second"] = record["count"] / record["seconds"]
    values |= {name: record[name] for name in record if pairs and name.startswith("validation_")}
    values |= {f"metrics/{name}": value for name, value in metrics.items() if isinstance(value, int | float)}
    return {name: value for name, value in values.items() if value is not None}


def read_samples(path: Path) -> dict[int, str]:
    """Samples in a samples.md, by step; if a step has several samples, only the last is returned."""
    text = path.read_bytes().decode(errors="replace") if path.is_file() else ""
    parts = re.split(r"^## After (\d{1,15}) steps?[^\n]*\n\n```\n", text, flags=re.MULTILINE)[1:]
    return {int(n): sample.removesuffix("\n```\n\n") for n, sample in zip(parts[::2], parts[1::2], strict=True)}
