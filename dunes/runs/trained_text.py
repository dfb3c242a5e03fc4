"""What a model's card says of the text that it was trained on."""

from collections.abc import Mapping
from typing import Any


def trained_text(card: Mapping[str, Any]) -> Mapping[str, Any]:
    """The card's record of training on text; empty if there is none, or a damaged one."""
    if not isinstance(trained := card.get("trained"), dict):
        return {}
    sources = trained.get("sources")
    return trained if isinstance(sources, list | tuple) and all(isinstance(s, str) for s in sources) else {}
