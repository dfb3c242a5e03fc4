"""The models of a running server by name, their worker thread, and the followers of their files."""

from collections import deque
from collections.abc import Callable, Sequence
from contextvars import copy_context
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

from dunes import checkpoint, measure
from dunes.serve.fields import Refused
from dunes.serve.follow import Follower
from dunes.serve.requests import Answer, LineRequest, Named
from dunes.serve.served import ServedModel
from dunes.serve.worker import Worker

RECENT = 8
"""Number of lines whose last request is kept in memory, for `dunes doctor`."""


class Running:
    """Models in their worker thread. Raises ValueError for a model folder that cannot be used for completion."""

    def __init__(
        self,
        folders: Sequence[Path],
        acceptance: float,
        adapters: Sequence[Path] = (),
        say: Callable[[str], object] = print,
        follows: bool = True,
    ) -> None:
        if adapters and len(folders) > 1:
            raise ValueError("--adapter goes with a single model; name one")
        measure.keep_freed_memory()
        names = [folder.resolve().name for folder in folders]
        if duplicates := [name for i, name in enumerate(names) if name in names[:i]]:
            raise ValueError(f"two models are named {duplicates[0]!r}; rename one of the folders")
        self.served, self._followers = dict[str, ServedModel](), list[Follower]()
        self._recent = deque[tuple[float, LineRequest, str]](maxlen=RECENT)
        self.worker = Worker(self)

        def load() -> dict[str, ServedModel]:
            places = (checkpoint.locate_model(str(folder)).folder for folder in folders)
            return {n: ServedModel(p, n, acceptance, adapters, say) for n, p in zip(names, places, strict=True)}

        try:
            # The copied context carries the trust settings.
            self.served = self.worker.call(partial(copy_context().run, load)).result()
        except BaseException:
            self.worker.close()
            raise
        for model in self.served.values():
            # The first line takes longer.
            warm_up = partial(model.lines, LineRequest("def main(\nmai", max_tokens=4), lambda: False)
            self.worker.call(warm_up).exception()
        if follows:
            self._followers = [Follower(model, self.worker, say) for model in self.served.values()]
        for follower in self._followers:
            follower.start()

    def facts_by_name(self, name: str, is_exact: bool = False) -> Named:
        """(name, facts) of the model or adapter with this name; for an empty name, of all models and adapters."""
        models = [self.find(name, is_exact)] if name or is_exact else self.served.values()
        entries = [(entry, model.current.facts) for model in models for entry in model.names]
        return [entry for entry in entries if entry[0] == name] or entries

    def find(self, name: str, is_exact: bool = False) -> ServedModel:
        """The model with this name, or with an adapter of this name. Raises Refused for an unknown name.

        Unless the name must be exact, an empty one selects the first model, and every name the only model.
        """
        for model in self.served.values():
            if name in model.names or (not is_exact and (not name or len(self.served) == 1)):
                return model
        listed = ", ".join(n for model in self.served.values() for n in model.names)
        raise Refused(404, f"model '{name[:80]}' not found; this server has {listed}")

    def remember(self, request: LineRequest, answer: Answer) -> None:
        """Keep a request of an editor and what was shown, in place of an earlier one in the same line."""
        above = request.before.rpartition("\n")[0]
        others = [past for past in self._recent if past[1].before.rpartition("\n")[0] != above]
        self._recent = deque([*others, (monotonic(), request, answer.text)], RECENT)

    def replay(self) -> list[dict[str, Any]]:
        """What was shown at the last places where an editor asked, newest first, and what would be shown now."""
        places = []
        for time, request, shown in [*self._recent][::-1]:
            model = self.find(request.model)
            answer = self.worker.call(partial(model.lines, request, lambda: False)).result()[0]
            place = {"line": request.before.rpartition("\n")[2], "seconds": monotonic() - time, "shown": shown}
            places.append(place | {"now": answer.text, "word": answer.word, "threshold": model.threshold})
        return places

    def take_in(self, path: str, text: str | None) -> None:
        """Let all models copy from this text of an open file when they complete other files."""
        for model in self.served.values():
            model.take_in(self.worker, {model.name_of(path): text})

    def close(self) -> None:
        """End the threads."""
        for follower in self._followers:
            follower.close()
        self.worker.close()
