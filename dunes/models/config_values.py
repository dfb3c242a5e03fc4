"""Validated values of a config.json: unsupported and out-of-range values are refused."""

from collections.abc import Mapping
from typing import Any

MAX_SIZE = 1 << 24
"""Largest size in a model; a file with a larger one is broken or malicious."""


def check_supported(hf: dict[str, Any], required: dict[str, Any]) -> dict[str, Any]:
    """The config itself, after checking that each key in `required`, if present, has that value.

    Raises ValueError that names the key, its value and the supported one.
    """
    for key, supported in required.items():
        if hf.get(key, supported) != supported:
            raise ValueError(f"config.json: {key} is {_short(hf[key])}, and only {supported!r} is supported")
    return hf


def size(hf: Mapping[str, Any], key: str, default: int | None = None, largest: int = MAX_SIZE) -> int:
    """An integer of at least 1; `default` if null or absent. Raises ValueError, or KeyError if required."""
    value = hf[key] if default is None else hf.get(key)
    if value is None and default is not None:
        return default
    if type(value) is not int or not 1 <= value <= largest:
        raise ValueError(f"config.json: {key} is {_short(value)}; it must be a whole number from 1 to {largest}")
    return value


def number(hf: Mapping[str, Any], key: str, default: float | None = None, above: float = 0.0) -> float:
    """A finite number greater than `above`; `default` if null or absent."""
    value = hf[key] if default is None else hf.get(key)
    if value is None and default is not None:
        return default
    if type(value) not in (int, float) or value is None or not above < value < 1e30:
        raise ValueError(f"config.json: {key} is {_short(value)}; it must be a finite number above {above:g}")
    return float(value)


def flag(hf: Mapping[str, Any], key: str, default: bool = False) -> bool:
    """A boolean; `default` if null or absent."""
    value = hf.get(key)
    if value is None:
        return default
    if type(value) is not bool:
        raise ValueError(f"config.json: {key} is {_short(value)}; it must be true or false")
    return value


def quotient(hf: Mapping[str, Any], whole: str, parts: str) -> int:
    """`whole` / `parts`, both sizes. Raises ValueError if not divisible."""
    a, b = size(hf, whole), size(hf, parts)
    if a % b:
        raise ValueError(f"config.json: {whole} is {a}, which is not divisible by {parts}, {b}")
    return a // b


def refuse_mixed_windows(hf: dict[str, Any]) -> None:
    """Raise ValueError if only some layers have a window, which Qwen's configs can express."""
    types, window = hf.get("layer_types"), hf.get("sliding_window", 4096)
    if types is not None and (not isinstance(types, list) or any(t != "full_attention" for t in types)):
        raise ValueError(f"config.json: layer_types is {_short(types)}, and only 'full_attention' is supported")
    if types is None and flag(hf, "use_sliding_window") and window is not None:
        first, depth = hf.get("max_window_layers", 0), size(hf, "num_hidden_layers")
        if type(first) is not int or first < depth:
            raise ValueError(
                f"config.json: use_sliding_window is True, from layer {_short(first)}; only False is supported"
            )


def _short(value: Any) -> str:
    """The repr in at most 60 characters, on one line."""
    text = repr(value)
    return text if len(text) < 60 else text[:57] + "..."
