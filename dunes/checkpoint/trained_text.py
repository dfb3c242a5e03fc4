"""Read the training text that a model's card lists, if permitted.

A card may come from a stranger and may list any file of the user. The sources in a card are read only if the cache
folder records that this user has trained on them, or inside `trust_sources` or `trust_cards`.
"""

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from contextvars import ContextVar
from hashlib import blake2b
from pathlib import Path
from typing import Any

from dunes.checkpoint import cards_trusted
from dunes.checkpoint.card import CARD
from dunes.context import bound
from dunes.data import Corpus, collect_corpus, hold_out_test
from dunes.data.sources import SPLIT_VERSION, without_files
from dunes.files.atomic import cache_home
from dunes.flags import STDLIB, is_path

_trusted = ContextVar("trusted_sources", default=False)


def trust_sources() -> AbstractContextManager[None]:
    """Context that permits reading the training text that cards list, in this thread (`--trust-sources`)."""
    return bound(_trusted, True)


def trained_text(card: Mapping[str, Any]) -> Mapping[str, Any]:
    """The card's record of training on text; empty if the record is missing or damaged."""
    if not isinstance(trained := card.get("trained"), dict):
        return {}
    sources = trained.get("sources")
    return trained if isinstance(sources, list | tuple) and all(isinstance(s, str) for s in sources) else {}


def trained_packages(card: Mapping[str, Any]) -> list[str]:
    """Installed packages whose code a model was trained on, including the training of its base."""
    packages = trained_text(card).get("packages")
    return [name for name in packages if isinstance(name, str)] if isinstance(packages, list) else []


def remember_sources(sources: Sequence[str], follow_links: bool) -> None:
    """Record that this user trains on these sources. Does nothing if the cache folder is not writable."""
    with suppress(OSError, ValueError):
        file = _record(sources, follow_links)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()


def require_own_sources(trained: Mapping[str, Any]) -> None:
    """Raise ValueError unless this user has trained on the sources in a card's record, or trusts them."""
    sources = [source for source in trained["sources"] if source != STDLIB]
    if not sources or _trusted.get() or cards_trusted():
        return
    with suppress(OSError, ValueError):
        if _record(trained["sources"], bool(trained.get("follow_links"))).exists():
            return
    raise ValueError(
        f"the model's card names {', '.join(map(ascii, sources[:3]))} as its training text, but this user "
        "has trained on no such text here; to permit reading it, pass --trust-sources, or pass the text"
    )


def _record(sources: Sequence[str], follow_links: bool) -> Path:
    """The path of a file whose existence records that this user has trained on these sources."""
    paths = [str(Path(os.path.expanduser(s)).absolute()) if is_path(s) else s for s in sources]
    digest = blake2b(json.dumps([paths, follow_links]).encode(), digest_size=16)
    return cache_home() / "sources" / digest.hexdigest()


def split_documents(card: Mapping[str, Any], **options: Any) -> Corpus:
    """The training and validation documents of a model, and the test documents of a model that completes lines.

    If the card's `split` is "tails", each document's tail is for validation, and the rest for training. `options`
    are arguments of `collect_corpus`, and override recorded ones. Raises ValueError if the card does not record
    the split, if another version of dunes split the text, or if the sources no longer exist.
    """
    trained = trained_text(card)
    if trained.get("split") not in ("files", "tails"):
        raise ValueError("does not record its validation files; pass the sources to score")
    corpus = _trained_corpus(trained, **options)
    return without_files(corpus) if trained["split"] == "tails" else corpus


def _trained_corpus(trained: Mapping[str, Any], **options: Any) -> Corpus:
    """The documents of a recorded training run; the run may have any `split`. Raises ValueError for an untrusted
    card, or if another version of dunes split the text.
    """
    require_own_sources(trained)
    if (number := trained.get("split_version")) != SPLIT_VERSION:
        raise ValueError(
            f"{CARD}: its text was split by another version of dunes (split_version {number!r:.20}, this version "
            f"has {SPLIT_VERSION}); pass the text, or train the model again"
        )
    recorded = {name: trained[name] for name in ("follow_links", "text_field") if name in trained}
    corpus = collect_corpus(trained["sources"], **recorded | options)
    return hold_out_test(corpus) if trained.get("complete") and trained.get("split") == "files" else corpus
