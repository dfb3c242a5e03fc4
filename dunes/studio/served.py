"""The models that the pages have opened, each in a worker of `dunes.serve`."""

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from hashlib import sha256

from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from dunes import checkpoint
from dunes.files.json_file import print_warning
from dunes.serve.app import Server
from dunes.serve.requests import Answer, TextRequest
from dunes.serve.worker import Worker


class ServedModels:
    """Opens models on demand. As an ASGI application, answers `/KEY/PATH` as `dunes serve` answers `/PATH` with
    the model opened under this key."""

    def __init__(self, acceptance: float = 0.35, hosts: Sequence[str] = (), key: str | None = None) -> None:
        self.acceptance, self.hosts, self.key = acceptance, hosts, key
        self._servers, self._apps = dict[str, Server](), dict[str, ASGIApp]()
        self._opening = asyncio.Lock()

    async def open(self, model: str) -> str:
        """Load a model, unless it is loaded and has not changed since, and return its key; `model` is a folder, a
        file, or smollm2.

        Raises ValueError for a model that cannot be opened, also if its weights do not fit into free memory; then
        none is read.
        """
        # If a browser leaves, loading continues: a thread cannot be cancelled, and its model would be lost.
        return await asyncio.shield(asyncio.create_task(self._open(model)))

    async def _open(self, model: str) -> str:
        key = sha256(os.fsencode(model)).hexdigest()[:12]
        async with self._opening:
            if key not in self._servers:
                server = self._servers[key] = Server(await asyncio.to_thread(self._load, model))
                self._apps[key] = server.app(self.hosts, self.key)
            elif (served := self.worker(key).find("")).is_outdated:
                await asyncio.wrap_future(self.worker(key).call(served.reload))
        return key

    def worker(self, key: str) -> Worker:
        """The worker of an opened model."""
        return self._servers[key].worker

    def _load(self, model: str) -> Worker:
        return Worker([checkpoint.locate_model(model).folder], self.acceptance, (), print_warning, follows=False)

    async def stream(self, key: str, request: TextRequest) -> AsyncIterator[Answer]:
        """Yield the parts of an answer, the last with a `reason`. Ending the iteration cancels the request. Raises
        Refused."""
        async with aclosing(self._servers[key].events([request])) as events:
            async for _, answer in events:
                yield answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The entry point of an ASGI application, mounted at `scope["root_path"]`."""
        root = scope.get("root_path", "")
        key, _, _ = scope["path"].removeprefix(root).lstrip("/").partition("/")
        app = self._apps.get(key, PlainTextResponse("no such model", 404))
        await app({**scope, "root_path": f"{root}/{key}"}, receive, send)

    def close(self) -> None:
        """End all workers."""
        for server in self._servers.values():
            server.worker.close()
