"""Reading other people's config.json: a refusal of what would be silently wrong, and of what makes no sense."""

from collections.abc import Mapping
from typing import Any

LARGEST = 1 << 24
"""No size of a model is larger: whatever says so is broken, or wants our memory."""


def hf_config(hf: dict[str, Any], refused: dict[str, Any]) -> dict[str, Any]:
    """The config again, after a check that each key in `refused`, if present, has the one value we build.

    Raises ValueError that names the key, what was found and what is supported.
    """
    for key, supported in refused.items():
        if hf.get(key, supported) != supported:
            raise ValueError(f"config.json: {key} is {_short(hf[key])}, and only {supported!r} is supported")
    return hf


def size(hf: Mapping[str, Any], key: str, default: int | None = None, largest: int = LARGEST) -> int:
    """A whole number from 1 on; `default` where it is null or absent. Raises ValueError, or KeyError if absent."""
    value = hf[key] if default is None else hf.get(key)
    if value is None and default is not None:
        return default
    if type(value) is not int or not 1 <= value <= largest:
        raise ValueError(f"config.json: {key} is {_short(value)}; it must be a whole number from 1 to {largest}")
    return value


def number(hf: Mapping[str, Any], key: str, default: float | None = None, above: float = 0.0) -> float:
    """A finite number greater than `above`; `default` where it is null or absent."""
    value = hf[key] if default is None else hf.get(key)
    if value is None and default is not None:
        return default
    if type(value) not in (int, float) or value is None or not above < value < 1e30:
        raise ValueError(f"config.json: {key} is {_short(value)}; it must be a finite number above {above:g}")
    return float(value)


def flag(hf: Mapping[str, Any], key: str, default: bool = False) -> bool:
    """True or false; `default` where it is null or absent."""
    value = hf.get(key)
    if value is None:
        return default
    if type(value) is not bool:
        raise ValueError(f"config.json: {key} is {_short(value)}; it must be true or false")
    return value


def divided(hf: Mapping[str, Any], whole: str, parts: str) -> int:
    """`whole` over `parts`, both sizes. Raises ValueError unless it comes out even."""
    a, b = size(hf, whole), size(hf, parts)
    if a % b:
        raise ValueError(f"config.json: {whole} is {a}, which {parts}, {b}, does not divide")
    return a // b


def no_windows(hf: dict[str, Any]) -> None:
    """Raises ValueError if some layers have a window and others none, as Qwen's configs can say."""
    kinds, window = hf.get("layer_types"), hf.get("sliding_window", 4096)
    if kinds is not None and (not isinstance(kinds, list) or any(k != "full_attention" for k in kinds)):
        raise ValueError(f"config.json: layer_types is {_short(kinds)}, and only 'full_attention' is supported")
    if kinds is None and flag(hf, "use_sliding_window") and window is not None:
        first, depth = hf.get("max_window_layers", 0), size(hf, "num_hidden_layers")
        if type(first) is not int or first < depth:
            raise ValueError(
                f"config.json: use_sliding_window is True, from layer {_short(first)}; only False is supported"
            )


def _short(value: Any) -> str:
    """On one line, whatever it is."""
    text = repr(value)
    return text if len(text) < 60 else text[:57] + "..."
