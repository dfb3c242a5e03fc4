"""The verb that shows runs and models in a browser."""

import os
from pathlib import Path
from secrets import token_urlsafe
from typing import Annotated

import tyro

from dunes.cli.process import drop_lost_output
from dunes.cli.serve import KEY, AllowHost, check_host
from dunes.extra import extra
from dunes.flags import flag


def studio(
    folder: Annotated[Path, tyro.conf.Positional, flag("FOLDER", ".")] = Path(),
    *,
    host: str = "127.0.0.1",
    port: int = 8014,
    allow_host: AllowHost = (),
) -> int:
    """Look at runs and models in a browser: losses, samples, suggestions, chats, weights and measurements.

    The page finds the runs and models in a folder, also runs that still train. Only a browser that opens the
    printed address, or knows the key in DUNES_API_KEY, sees it.

    Example: dunes studio runs

    Args:
        folder: Folder with runs and models.
        host: Address to listen on. For an address that other machines can reach, set a key in DUNES_API_KEY.
        port: Port to listen on.
        allow_host: Another host name of this server; may be repeated.
    """
    for module in ("starlette", "uvicorn", "nicegui"):
        extra(module, "studio")
    from dunes.serve import editors
    from dunes.serve.http import open_sockets, run
    from dunes.studio.folders import describe_count, find_entries

    drop_lost_output()
    chosen = os.environ.get(KEY) or None
    check_host(host, chosen)
    key = chosen or token_urlsafe(16)  # otherwise other users of this machine could stop runs and read texts
    found = describe_count(find_entries(folder), folder)
    sockets = open_sockets(host, [port])
    from dunes.studio.app import Studio, build
    from dunes.studio.served import ServedModels
    from dunes.studio.views import VIEWS

    app = build(Studio(folder, ServedModels(hosts=[host, *allow_host], key=key)), VIEWS)
    shown = f"${KEY}" if chosen else key
    place = f"{editors.url(host, sockets[0].getsockname()[1])}/?key={shown}"
    run(app, sockets, lambda: print(f"{found}\nstudio at {place} (Ctrl-C ends it)", flush=True), pages=True)
    return 0
