"""Saving while training goes on: the snapshot is of its own step, the writing is another thread's."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Self

from dunes import checkpoint
from dunes.checkpoint.atomic import fsync_path
from dunes.runs.run import METRICS, Run, run_state


class Saver:
    """`with Saver(told) as saver:` then `saver.start(run)` between steps; one save at most is under way.

    A save that fails is told in one line, and the states that were there stand; the next one tries
    again. With `strict`, it raises OSError at the next call instead.
    """

    def __init__(self, told: Callable[[str], None], strict: bool = False) -> None:
        self.told, self.strict = told, strict
        self._pool = ThreadPoolExecutor(1, "saver")
        self._pending: Future[Path] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown()

    @property
    def busy(self) -> bool:
        """Whether a save is under way."""
        return self._pending is not None and not self._pending.done()

    def start(self, run: Run) -> bool:
        """Begin to save the run as it is now; False if the save before this one is still under way."""
        if self.busy:
            return False
        self.wait()
        self._pending = self._pool.submit(
            _write, run.folder, run.trainer.number, checkpoint.snapshot(run_state(run))
        )
        return True

    def look(self) -> None:
        """Tell of a save that failed, if one did."""
        if not self.busy:
            self.wait()

    def last(self, run: Run) -> bool:
        """Save the run as it is now, and wait for that; False if it failed."""
        self.wait()
        self.start(run)
        return self.wait()

    def wait(self) -> bool:
        """Wait for the save that is under way, if any; False if it failed."""
        pending, self._pending = self._pending, None
        try:
            if pending is not None:
                pending.result()
            return True
        except (OSError, ValueError) as error:
            if self.strict:
                raise
            self.told(f"warning: saving the state failed: {error}; the previous state is kept")
            return False


def _write(folder: Path, step: int, taken: checkpoint.Snapshot) -> Path:
    if (folder / METRICS).exists():
        fsync_path(folder / METRICS)  # the losses up to a state belong to it
    return checkpoint.save_state(folder, step, taken)
