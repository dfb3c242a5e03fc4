"""A run's metrics and samples for TensorBoard, in RUN/tensorboard.

Written as a plain file in tensorboard's record format. SummaryWriter writes from a thread, which prints
a traceback and dies when the disk is full, and its purge_step lets TensorBoard forget numbers, not text.
"""

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from textwrap import indent
from time import time, time_ns
from types import TracebackType
from typing import Any, BinaryIO, Self

from dunes.runs.extra import extra
from dunes.runs.run import METRICS, read_metrics
from dunes.train import Step

FOLDER = "tensorboard"
SAMPLES = "samples.md"


class TensorBoard:
    """`with Mirror(run, aside) as mirror:` then `mirror.step(...)` and `mirror.sample(...)` between steps.

    It begins by writing anew all that the run noted so far, so that nothing is missing or stands there
    twice, whenever it is switched on and wherever the run goes on from. What cannot be written is told
    by `aside` and ends the mirroring, not the run. With None for the run's folder it does nothing.
    Raises ValueError if tensorboard is needed and not installed.
    """

    def __init__(self, run: Path | None, non_fatal: Callable[[str], AbstractContextManager[None]]) -> None:
        self.run, self.non_fatal = run, non_fatal
        self._file: BinaryIO | None = None
        if run is not None:
            self._words = extra("torch.utils.tensorboard.summary", "track")
            self._event = extra("tensorboard.compat.proto.event_pb2", "track")
            self._records = extra("tensorboard.summary.writer.record_writer", "track")

    def __enter__(self) -> Self:
        if self.run is not None:
            with self._lasting():
                self._begin(self.run)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        file, self._file = self._file, None
        with self.non_fatal("writing to TensorBoard"):
            if file is not None:
                file.close()

    def step(self, step: Step, bits_per_byte: float | None) -> None:
        """Write the metrics of a step, with the validation bits/byte if measured after it."""
        if self._file is not None:
            with self._lasting():
                self._scalars(asdict(step) | {"step": step.number, "bits_per_byte": bits_per_byte}, time())
                self._file.flush()

    def sample(self, step: int, text: str) -> None:
        """Mirror what the model wrote after this step."""
        if self._file is not None:
            with self._lasting():
                self._text(step, text)
                self._file.flush()

    def _begin(self, run: Path) -> None:
        (run / FOLDER).mkdir(exist_ok=True)
        for old in (run / FOLDER).glob("events.out.tfevents.*"):
            os.truncate(old, 0)  # a TensorBoard that is open would never get past a file that is gone
        self._file = (run / FOLDER / f"events.out.tfevents.{time_ns()}.dunes").open("wb")
        self._put(file_version="brain.Event:2")
        # Such a TensorBoard forgets here what it has read.
        self._put(session_log=self._event.SessionLog(status=self._event.SessionLog.START))
        noted = [r for r in read_metrics(run / METRICS) if "loss" in r]
        clock = time() - sum(r["seconds"] for r in noted)
        for record in noted:
            clock += record["seconds"]
            self._scalars(record, clock)
        for step, text in written(run / SAMPLES).items():
            if noted and step <= noted[-1]["step"]:
                self._text(step, text)
        self._file.flush()

    def _scalars(self, record: Mapping[str, Any], clock: float) -> None:
        for tag, value in scalars(record).items():
            self._put(step=record["step"], wall_time=clock, summary=self._words.scalar(tag, value))

    def _text(self, step: int, text: str) -> None:
        # TensorBoard shows Markdown: text with a margin stays as it is.
        self._put(step=step, summary=self._words.text("sample", indent(text, "    ", lambda line: True)))

    def _put(self, **fields: Any) -> None:
        event = self._event.Event(**{"wall_time": time()} | fields)
        self._records.RecordWriter(self._file).write(event.SerializeToString())

    @contextmanager
    def _lasting(self) -> Iterator[None]:
        with self.non_fatal("writing to TensorBoard"):
            try:
                yield
            except OSError:
                file, self._file = self._file, None
                with suppress(OSError):
                    if file is not None:
                        file.close()
                raise


def scalars(record: Mapping[str, Any]) -> dict[str, float]:
    """The scalars of a record of metrics.jsonl by tag: loss, bits/byte, lr_scale, grad_norm, tokens/s."""
    found = {name: record.get(name) for name in ("loss", "bits_per_byte", "lr_scale", "grad_norm")}
    found["tokens_per_second"] = record["count"] / record["seconds"]
    return {name: value for name, value in found.items() if value is not None}


def written(path: Path) -> dict[int, str]:
    """The samples in a samples.md by their steps; of a step that was done twice, the last."""
    text = path.read_bytes().decode(errors="replace") if path.is_file() else ""
    parts = re.split(r"^## After (\d{1,15}) steps?[^\n]*\n\n```\n", text, flags=re.MULTILINE)[1:]
    return {int(n): sample.removesuffix("\n```\n\n") for n, sample in zip(parts[::2], parts[1::2], strict=True)}
