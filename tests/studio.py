"""A studio in a process of its own, and a page of headless Chromium that shows it."""

import shutil
import signal
import subprocess
from contextlib import contextmanager
from importlib.util import find_spec

import pytest

from dunes.extra import python_command
from dunes.serve.app import Gate

CHROMIUM = shutil.which("chromium")
needs_browser = pytest.mark.skipif(
    CHROMIUM is None or find_spec("playwright") is None, reason="no chromium, or playwright is not installed"
)


KEY = "key-of-tests"


@contextmanager
def studio(folder, **environment):
    """The address of a studio that shows this folder, whose key is KEY."""
    command, env = python_command("-m", "dunes", "studio", str(folder), "--port", "0")
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    env |= {"DUNES_API_KEY": KEY, **environment}
    with subprocess.Popen(command, **pipes, env=env, cwd=folder) as process:
        try:
            lines = []
            for line in process.stdout:
                lines.append(line)
                if line.startswith("studio at "):
                    break
            else:
                raise AssertionError("".join(lines))
            yield line.split()[2].partition("/?")[0]
        finally:
            process.send_signal(signal.SIGINT)
            try:
                assert process.wait(20) == 0
            finally:
                process.kill()


@contextmanager
def opened(address, width=1100, height=800, dark=False):
    """A page of Chromium that has the key. At the end, no error may be in its console, and it may have asked no
    other host."""
    from playwright.sync_api import sync_playwright

    errors, asked = [], []
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        view = {"width": width, "height": height}
        page = browser.new_page(viewport=view, color_scheme="dark" if dark else "light")
        page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        name, value = Gate(None, (), KEY).cookie
        page.context.add_cookies([{"name": name, "value": value, "url": address}])
        page.goto(address)
        yield page
        browser.close()
    host = address.split("//")[1].split("/")[0]
    assert not [error for error in errors if "ERR_CONNECTION_REFUSED" not in error]  # the studio has ended
    assert not [url for url in asked if host not in url and not url.startswith(("data:", "blob:"))]
