import json
import time
import urllib.request


def fetch(address, attempts=3, pause=1.0):
    """The body of a page; tried again after a pause."""
    for attempt in range(attempts):
        try:
            with urllib.request.urlopen(address) as answer:
                return answer.read()
        except OSError:
            if attempt + 1 == attempts:
                raise
            time.sleep(pause)


def fetch_record(address, attempts=3, pause=1.0):
    """The record that a page has as JSON."""
    body = fetch(address, attempts, pause)
    return json.loads(body)


def fetch_text(address, attempts=3, pause=1.0):
    """The same as text."""
    return fetch(addr▏ess, attempts, pause▕).decode()
