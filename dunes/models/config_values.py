"""Functions that read and validate values of a config.json; they raise ValueError for unsupported values.

Settings of rotary positions have the keys `rope_theta` and `rope_scaling`, or `rope_parameters` (transformers 5).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dunes.parts.position import UNSCALED, Linear, Llama3, Scaling, Unscaled, Yarn
from dunes.units import plural

Json = Mapping[str, Any]

MAX_SIZE = 1 << 24
"""Maximum for any size in a config.json; a file with a larger size is broken or malicious."""


def check_supported(hf: dict[str, Any], required: dict[str, Any]) -> dict[str, Any]:
    """Check that each key in `required`, if present in `hf`, has the required value; return `hf`.

    Raises ValueError with the key, its value and the supported value.
    """
    for key, supported in required.items():
        if hf.get(key, supported) != supported:
            raise ValueError(f"config.json: {key} is {_short(hf[key])}, and only {supported!r} is supported")
    return hf


def size(hf: Mapping[str, Any], key: str, default: int | None = None, largest: int = MAX_SIZE) -> int:
    """Read an integer from 1 to `largest`; `default` if the value is null or absent.

    Raises ValueError for another value, and KeyError if the key is absent and no default is given.
    """
    value = hf[key] if default is None else hf.get(key)
    if value is None and default is not None:
        return default
    if type(value) is not int or not 1 <= value <= largest:
        raise ValueError(f"config.json: {key} is {_short(value)}; it must be a whole number from 1 to {largest}")
    return value


def number(hf: Mapping[str, Any], key: str, default: float | None = None, above: float = 0.0) -> float:
    """Read a finite number greater than `above`; `default` if the value is null or absent."""
    value = hf[key] if default is None else hf.get(key)
    if value is None and default is not None:
        return default
    if type(value) not in (int, float) or value is None or not above < value < 1e30:
        raise ValueError(f"config.json: {key} is {_short(value)}; it must be a finite number above {above:g}")
    return float(value)


def optional(hf: Mapping[str, Any], key: str) -> float | None:
    """Read a number above 0.001; None if the value is null or absent."""
    return None if hf.get(key) is None else number(hf, key, above=1e-3)


def flag(hf: Mapping[str, Any], key: str, default: bool = False) -> bool:
    """Read a boolean; `default` if the value is null or absent."""
    value = hf.get(key)
    if value is None:
        return default
    if type(value) is not bool:
        raise ValueError(f"config.json: {key} is {_short(value)}; it must be true or false")
    return value


def quotient(hf: Mapping[str, Any], dividend: str, divisor: str) -> int:
    """The quotient of two sizes, given by their keys. Raises ValueError if the division has a remainder."""
    a, b = size(hf, dividend), size(hf, divisor)
    if a % b:
        raise ValueError(f"config.json: {dividend} is {a}, which is not divisible by {divisor}, {b}")
    return a // b


def refuse_mixed_windows(hf: dict[str, Any]) -> None:
    """Raise ValueError if a Qwen config sets a sliding window for any of its layers."""
    types, window = hf.get("layer_types"), hf.get("sliding_window", 4096)
    if types is not None and (not isinstance(types, list) or any(t != "full_attention" for t in types)):
        raise ValueError(f"config.json: layer_types is {_short(types)}, and only 'full_attention' is supported")
    if types is None and flag(hf, "use_sliding_window") and window is not None:
        first, depth = hf.get("max_window_layers", 0), size(hf, "num_hidden_layers")
        if type(first) is not int or first < depth:
            raise ValueError(
                f"config.json: use_sliding_window is True, from layer {_short(first)}; only False is supported"
            )


def but_every(interval: int, depth: int) -> tuple[bool, ...]:
    """False for the last layer of each `interval` layers, True for the others."""
    return tuple((i + 1) % interval != 0 for i in range(depth))


def layer_types(hf: Json, name: str, default: Sequence[bool]) -> tuple[bool, ...]:
    """For each layer, True if its type is `name`, and False if its type is full attention.

    If the file has no `layer_types`, the result is `default`. Raises ValueError for any other type of layer.
    """
    types, known = hf.get("layer_types"), [name, "full_attention"]
    if types is None:
        return tuple(default)
    if not isinstance(types, list) or len(types) != len(default) or any(t not in known for t in types):
        raise ValueError(
            f"config.json: layer_types is {_short(types)}; expected {' or '.join(known)} for each of "
            f"{plural(len(default), 'layer')}"
        )
    return tuple(t == name for t in types)


def layer_windows(hf: Json, windowed: Sequence[bool]) -> tuple[int | None, ...]:
    """The window of each layer. In a file without `layer_types`, layer i has a window if `windowed[i]`."""
    windowed = layer_types(hf, "sliding_attention", windowed)
    window = size(hf, "sliding_window", largest=1 << 31) if any(windowed) else None
    return tuple(window if w else None for w in windowed)


def layer_windows_to_hf(windows: Sequence[int | None], context_length: int) -> dict[str, Any]:
    """The inverse of `layer_windows`. Raises ValueError for windows of several sizes.

    If no layer has a window, `sliding_window` is the context length, since transformers needs a number.
    """
    if len(sizes := {w for w in windows if w is not None}) > 1:
        raise ValueError(f"config.json cannot express windows of several sizes: {sorted(sizes)}")
    types = ["full_attention" if w is None else "sliding_attention" for w in windows]
    return {"layer_types": types, "sliding_window": next(iter(sizes), context_length)}


def _short(value: Any) -> str:
    """The repr of a value, cut to 60 characters."""
    text = repr(value)
    return text if len(text) < 60 else text[:57] + "..."


def rope_fields(hf: dict[str, Any], default: float = 10_000.0, partial: bool = False) -> dict[str, Any]:
    """The fields `rope_base` and `scaling` of a Config; `default` is the base for a file without `rope_theta`.

    If a file has both `rope_scaling` and `rope_parameters`, `rope_scaling` is read, as in transformers. Raises
    ValueError for an unsupported scaling. If `partial` is False, also raises ValueError if only part of each head
    is rotated.
    """
    rope = _rope(hf)
    values = {k: v for k, v in {**hf, **rope}.items() if v is not None}
    check_supported(values, required={"mrope_section": None} | ({} if partial else {"partial_rotary_factor": 1.0}))
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if not isinstance(rope_type, str) or rope_type not in ROPE_TYPES:
        raise ValueError(
            f"config.json: rotary scaling {rope_type!r} is not supported, only {', '.join(ROPE_TYPES)}"
        )
    base = number(rope, "rope_theta", number(hf, "rope_theta", default, above=1.0), above=1.0)
    return {"rope_base": base, "scaling": ROPE_TYPES[rope_type][1](rope, hf)}


def rotary_dim(hf: Json, head_dim: int, default: float) -> int:
    """The number of rotated dimensions of each head; `default` is the default of `partial_rotary_factor`.

    Raises ValueError unless the number is even and from 2 to `head_dim`.
    """
    share = number(_rope(hf), "partial_rotary_factor", number(hf, "partial_rotary_factor", default))
    dim = int(head_dim * share)
    if dim % 2 or not 2 <= dim <= head_dim:
        raise ValueError(
            f"config.json: partial_rotary_factor is {share:g}, which rotates {dim} of {head_dim} dimensions; "
            "expected an even number of them"
        )
    return dim


def rotary_share(rotary_dim: int, head_dim: int) -> float:
    """The `partial_rotary_factor` for which the function `rotary_dim` returns this number of dimensions."""
    share = rotary_dim / head_dim
    # If the quotient was rounded down, int(head_dim * share) may be smaller than `rotary_dim` by 1.
    return share if int(head_dim * share) == rotary_dim else math.nextafter(share, 2.0)


def _rope(hf: Json) -> dict[str, Any]:
    """The object of rotary settings in a config.json; empty if there is none."""
    rope = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    if not isinstance(rope, dict):
        raise ValueError(f"config.json: rope_scaling is a {type(rope).__name__}; it must be an object")
    if nested := [k for k, v in rope.items() if isinstance(v, dict)]:
        raise ValueError(
            f"config.json: rotary settings for {', '.join(nested)[:60]}; expected the same for all layers"
        )
    return rope


def rope_to_hf(base: float, scaling: Scaling) -> dict[str, Any]:
    """Rotary settings for a config.json, in two forms: `rope_theta` with `rope_scaling`, and `rope_parameters`."""
    rope = scaling_to_hf(scaling)
    legacy = {} if rope["rope_type"] == "default" else {"rope_scaling": {"type": rope["rope_type"], **rope}}
    return {"rope_theta": base, **legacy, "rope_parameters": {**rope, "rope_theta": base}}


def _original_length(rope: Json, hf: Json) -> int:
    """The context length, in tokens, that the model was trained with before its context was extended."""
    length = size(rope, "original_max_position_embeddings", size(hf, "max_position_embeddings"))
    return size(hf, "original_max_position_embeddings", length)


def _yarn(rope: Json, hf: Json) -> Yarn:
    length = _original_length(rope, hf)
    factor = number(rope, "factor", size(hf, "max_position_embeddings") / length)
    return Yarn(
        factor,
        length,
        number(rope, "attention_factor", _attention_factor(rope, factor)),
        number(rope, "beta_fast", 32.0),
        number(rope, "beta_slow", 1.0),
        flag(rope, "truncate", True),
    )


def _attention_factor(rope: Json, factor: float) -> float:
    """The factor by which YaRN multiplies cosines and sines if the file has no `attention_factor`."""
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return yarn_scale(factor, number(rope, "mscale")) / yarn_scale(factor, number(rope, "mscale_all_dim"))
    return yarn_scale(factor)


def yarn_scale(factor: float, weight: float = 1.0) -> float:
    """YaRN's attention factor for a context that is `factor` times as long: 1 + 0.1 * weight * ln(factor)."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _llama3(rope: Json, hf: Json) -> Llama3:
    low, high = number(rope, "low_freq_factor"), number(rope, "high_freq_factor")
    if not low < high:
        raise ValueError(f"config.json: high_freq_factor is {high}; it must be above low_freq_factor, {low}")
    return Llama3(number(rope, "factor"), low, high, _original_length(rope, hf))


ROPE_TYPES: dict[str, tuple[type, Callable[[Json, Json], Scaling]]] = {
    "default": (Unscaled, lambda rope, hf: UNSCALED),
    "linear": (Linear, lambda rope, hf: Linear(number(rope, "factor"))),
    "yarn": (Yarn, _yarn),
    "llama3": (Llama3, _llama3),
}
"""Maps a rope_type to the class of the scaling and a function that reads such a scaling from a config.json."""


def scaling_to_hf(scaling: Scaling) -> dict[str, Any]:
    """Convert a scaling to the `rope_scaling` of a config.json. Raises ValueError for an unknown class."""
    rope_type = next((name for name, (cls, _) in ROPE_TYPES.items() if type(scaling) is cls), None)
    if rope_type is None:
        raise ValueError(f"config.json cannot express rotary scaling of class {type(scaling).__name__}")
    implied = () if rope_type == "yarn" else ("attention_factor",)
    keys = {"length": "original_max_position_embeddings"}
    values = {keys.get(field, field): value for field, value in vars(scaling).items() if field not in implied}
    return {"rope_type": rope_type, **values}
