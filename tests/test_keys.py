"""The cost of a key: what neither changes a suggestion nor is computed."""

import math
import socket

import pytest

from dunes.checkpoint import LoadedModel
from dunes.completion import copy_mixture, search
from dunes.completion.copy_mixture import PIECE, RememberedLogits
from dunes.completion.engine import CompletionEngine
from dunes.completion.index import index_texts
from dunes.completion.search import CompleteOptions
from dunes.completion.text import FileTokenizer
from dunes.generate.copying import Gate
from dunes.generate.prefix_cache import PieceReader, PrefixCache
from dunes.serve import http
from dunes.text import Tokenizer
from small_models import random_model

CODE = "".join(f"def area_{n}(width, height):\n    result = width * height + {n}\n\n\n" for n in range(8))
BEFORE = [CODE + "    result = wid", CODE + "def ar", CODE[:90], CODE + "    other = 1\n    re"]
BPE = Tokenizer.train("bpe", [CODE], 300)


def engine() -> CompletionEngine:
    """An untrained model, whose lines are hopeless, with a gate that changes nothing."""
    gate = Gate().requires_grad_(False)
    gate.scale(0.0)
    loaded = LoadedModel(random_model(vocab=BPE.vocab, context=64), BPE, 64, {})
    return CompletionEngine(loaded, index_texts([("a.py", CODE)], FileTokenizer(BPE, False)), gate)


def test_a_connection_sends_the_parts_of_a_reply_at_once():
    """Else the body waits until the client acknowledges the head, which takes it 40 ms."""
    (listener,) = http.open_sockets("127.0.0.1", [0])
    listener.setblocking(True)
    with listener, socket.create_connection(listener.getsockname()), listener.accept()[0] as connection:
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_a_copied_line_that_replaces_a_hopeless_one_costs_few_forwards(monkeypatch: pytest.MonkeyPatch):
    forwards: list[int] = []
    after_one = RememberedLogits.after_one

    def count(self, text, more=()):
        forwards.append(len(text))
        return after_one(self, text, more)

    monkeypatch.setattr(RememberedLogits, "after_one", count)
    monkeypatch.setattr(copy_mixture, "PROPOSED", 0)
    options, found = CompleteOptions(width=1), {}
    for negligible in (search.NEGLIGIBLE, -math.inf):
        monkeypatch.setattr(search, "NEGLIGIBLE", negligible)
        forwards.clear()
        found[negligible] = [engine().complete(before, "", "b.py", options) for before in BEFORE], len(forwards)
    (short, few), (whole, many) = found.values()
    assert few < 0.7 * many
    assert [each.text for each in short] == [each.text for each in whole]
    assert any(each.text for each in short)
    for bounded, exact in zip(short, whole, strict=True):
        assert exact.line / 1.001 <= bounded.line <= max(1.001 * exact.line, 0.011)


def test_a_copied_line_is_explained_by_all_its_tokens(monkeypatch: pytest.MonkeyPatch):
    """Also by those whose probabilities the suggestion did not need."""
    found = []
    for negligible in (search.NEGLIGIBLE, -math.inf):
        monkeypatch.setattr(search, "NEGLIGIBLE", negligible)
        found.append([token for before in BEFORE for token in engine().explain(before, "", "b.py")])
    assert found[0] == found[1] != []


@pytest.mark.parametrize("width", [1, 3])
def test_a_beam_goes_on_to_a_word_where_no_copy_replaces_it(width: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(search.LineSearch, "_or_copy", lambda self, beam: beam)
    monkeypatch.setattr(search, "HOPELESS", 0.0)
    options = CompleteOptions(width=width)
    alone = engine()
    alone.gate = None  # so that nothing is copied
    assert any(alone.complete(before, "", "b.py", options).text for before in BEFORE)


def test_the_first_piece_of_a_prompt_has_at_least_the_minimum():
    model = random_model(vocab=9, context=2 * PIECE)
    cache = PrefixCache(model)
    cache.reserve(2 * PIECE)
    for _ in PieceReader(seconds=0, least=PIECE).read(cache, 0, [1] * (PIECE + 9)):
        pass
    assert cache.forwards == 1
