"""The verb that shows runs and models in a browser."""

import os
from pathlib import Path
from typing import Annotated

import tyro

from dunes.cli.process import drop_lost_output
from dunes.cli.serve import KEY, AllowHost, check_host
from dunes.extra import extra
from dunes.flags import flag


def studio(
    folder: Annotated[Path, tyro.conf.Positional, flag("FOLDER", "runs, or .")] = Path(),
    *,
    host: str = "127.0.0.1",
    port: int = 8014,
    allow_host: AllowHost = (),
) -> int:
    """Look at runs and models in a browser: losses, samples, suggestions, chats, weights and measurements.

    The page finds the runs and models in a folder, also runs that still train.

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
    key = os.environ.get(KEY) or None
    check_host(host, key)
    found = describe_count(find_entries(folder), folder)
    sockets = open_sockets(host, [port])
    from dunes.studio.app import Studio, build
    from dunes.studio.served import ServedModels
    from dunes.studio.views import VIEWS

    app = build(Studio(folder, ServedModels(hosts=[host, *allow_host], key=key)), VIEWS)
    place = editors.url(host, sockets[0].getsockname()[1])
    login = f"/?key={key}" if key else ""
    run(app, sockets, lambda: print(f"{found}\nstudio at {place}{login} (Ctrl-C ends it)", flush=True), pages=True)
    return 0
