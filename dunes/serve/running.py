"""Models in their worker, with what follows their files, for the HTTP server and the language server."""

from collections.abc import Callable, Sequence
from contextvars import copy_context
from functools import partial
from pathlib import Path

from dunes.serve.follow import Follower
from dunes.serve.requests import LineRequest
from dunes.serve.served import Models
from dunes.serve.worker import Worker


class Running:
    """Models in their worker. Raises ValueError for a folder that cannot complete, before anything is served."""

    def __init__(
        self,
        folders: Sequence[Path],
        acceptance: float,
        adapters: Sequence[Path] = (),
        say: Callable[[str], object] = print,
        follows: bool = True,
    ) -> None:
        models: list[Models] = []
        self.worker = Worker(lambda name: models[0].find(name), lambda: models[0].served if models else {})
        try:
            load = partial(copy_context().run, Models, folders, acceptance, adapters, say)  # what is trusted
            models.append(self.worker.call(load).result())
        except BaseException:
            self.worker.close()
            raise
        self.models = models[0]
        self._warm_up()
        served = self.models.served.values()
        self._followers = [Follower(model, self.worker, say) for model in served] if follows else []
        for follower in self._followers:
            follower.start()

    def take_in(self, path: str, text: str | None) -> None:
        """Complete lines of other files with this text of an open file, in all models."""
        for model in self.models.served.values():
            model.take_in(self.worker, {model.name_of(path): text})

    def close(self) -> None:
        """End the threads."""
        for follower in self._followers:
            follower.close()
        self.worker.close()

    def _warm_up(self) -> None:
        """Complete a line once, which takes longer the first time."""
        request = LineRequest("def main(\nmai", "", "", (), 1, 4)
        for model in self.models.served.values():
            self.worker.call(lambda model=model: model.lines(request, lambda: False)).exception()  # type: ignore[misc]
