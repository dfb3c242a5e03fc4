"""The application: NiceGUI's pages, and `dunes serve`'s application for each opened model under /api."""

import logging
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import isawaitable, iscoroutinefunction
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from nicegui import app as pages
from nicegui import ui
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dunes.serve.app import Gate
from dunes.serve.fields import Refused
from dunes.studio.folders import Entry, find_entries, showable
from dunes.studio.served import ServedModels

NOTICE: Any = {"type": "negative", "timeout": 0, "actions": [{"label": "Close", "color": "white"}]}
SHOWN = (ValueError, OSError, Refused)
"""Errors that the page shows and the terminal does not."""
POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data:; font-src 'self' data:; base-uri 'self'; form-action 'self'; frame-ancestors 'none'"
)
"""Content security policy, with which the browser loads nothing from elsewhere."""
STYLE = """
:root { --train: #b0712a; --val: #2f6f8f; }
body { font-size: 15px; }
.dim { opacity: .65; }
.code { font-family: ui-monospace, monospace; white-space: pre-wrap; }
.nicegui-content { padding: 1rem; max-width: 1400px; margin: 0 auto; }
a.view { color: inherit; text-decoration: none; padding: .2em .7em; border-radius: .3em; }
a.view[aria-current] { background: rgba(127, 127, 127, .15); box-shadow: inset 0 -2px var(--train); }
.q-header { background: #fff; color: #222; border-bottom: 1px solid rgba(127, 127, 127, .3); }
.body--dark .q-header { background: #121212; color: #ddd; }
"""


@dataclass(frozen=True)
class Studio:
    """The folder that is looked at, and the models that are opened."""

    root: Path
    models: ServedModels

    def entries(self) -> list[Entry]:
        """The runs and models in the folder; the last modified is first."""
        return find_entries(self.root)


View = Callable[[Studio], Any]
"""A function, possibly async, that draws a view inside the page's frame."""


def build(studio: Studio, views: Mapping[str, View]) -> ASGIApp:
    """The application; `views` are functions by title. The first view is at /, the others at /title.

    NiceGUI keeps its pages in the process, so an application is built once. On a busy machine, a page has
    12 s to answer a ping, then 30 s to connect again, before it reloads and loses what was typed.
    """
    # NiceGUI looks at all objects of the process, which makes torch warn of a deprecated one.
    warnings.filterwarnings("ignore", ".*torch.distributed.reduce_op")
    logging.getLogger("nicegui").addFilter(lambda record: not isinstance(record.msg, SHOWN))
    parent = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    parent.mount("/api", studio.models)
    paths = {title: "/" if place == 0 else f"/{title.lower()}" for place, title in enumerate(views)}
    for title, view in views.items():
        ui.page(paths[title], title=f"{title}: dunes studio")(_framed(title, paths, view, studio))
    ui.run_with(parent, title="dunes studio", dark=None, language="en-US", reconnect_timeout=30)
    pages.on_shutdown(studio.models.close)
    return Gate(_with_policy(parent), studio.models.hosts, studio.models.key)


def _framed(title: str, paths: Mapping[str, str], view: View, studio: Studio) -> Callable[[], Any]:
    async def page() -> None:
        ui.on_exception(lambda e: ui.notify(showable(e if isinstance(e, SHOWN) else repr(e)), **NOTICE))
        ui.add_css(STYLE)
        ui.colors(primary="#8c5a1f", secondary="#2f6f8f")
        with ui.header().classes("items-center gap-1 py-2 px-4"), ui.element("nav").classes("flex flex-wrap"):
            for name, path in paths.items():
                ui.link(name, path).classes("view").props("aria-current=page" * (name == title))
        with ui.column().classes("w-full gap-4"):
            try:
                if iscoroutinefunction(view):
                    await ui.context.client.connected(60)  # the frame is shown first: NiceGUI gives a page 3 s
                drawn = view(studio)
                if isawaitable(drawn):
                    await drawn
            except SHOWN as error:
                ui.label(showable(error)).classes("text-negative")

    return page


def _with_policy(app: ASGIApp) -> ASGIApp:
    """The application with the content security policy in all its replies."""

    async def with_policy(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["Content-Security-Policy"] = POLICY
            await send(message)

        await app(scope, receive, send_headers if scope["type"] == "http" else send)

    return with_policy
