"""Save training states in the background: a thread writes a snapshot taken between steps."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Self

from dunes import checkpoint
from dunes.files.atomic import fsync_path
from dunes.runs.run import METRICS, Run, run_state


class Saver:
    """`with Saver(warn) as saver:` then `saver.start(run)` between steps; at most one save is in progress.

    A failed save is reported in one line, earlier states are kept, and the next save tries again. With `strict`,
    it raises OSError at the next call instead.
    """

    def __init__(self, warn: Callable[[str], None], strict: bool = False) -> None:
        self.warn, self.strict = warn, strict
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
        """Whether a save is in progress."""
        return self._pending is not None and not self._pending.done()

    def start(self, run: Run) -> bool:
        """Start saving the run as it is now; False if the previous save is still in progress."""
        if self.busy:
            return False
        self.wait()
        self._pending = self._pool.submit(
            _write, run.folder, run.trainer.number, checkpoint.snapshot(run_state(run))
        )
        return True

    def report_failure(self) -> None:
        """Report a failed save, if there was one."""
        if not self.busy:
            self.wait()

    def last(self, run: Run) -> bool:
        """Save the run as it is now, and wait; False if that failed."""
        self.wait()
        self.start(run)
        return self.wait()

    def wait(self) -> bool:
        """Wait for the save in progress, if any; False if it failed."""
        pending, self._pending = self._pending, None
        try:
            if pending is not None:
                pending.result()
            return True
        except (OSError, ValueError) as error:
            if self.strict:
                raise
            self.warn(f"warning: saving the state failed: {error}; the previous state is kept")
            return False


def _write(folder: Path, step: int, snapshot: checkpoint.Snapshot) -> Path:
    if (folder / METRICS).exists():
        fsync_path(folder / METRICS)  # a state includes the losses up to it
    return checkpoint.save_state(folder, step, snapshot)
