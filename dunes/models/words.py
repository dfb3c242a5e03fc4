"""Reading other people's config.json: both dialects, and a refusal of what would be silently wrong."""

from typing import Any


def hf_config(hf: dict[str, Any], refused: dict[str, Any]) -> dict[str, Any]:
    """The config again, after a check that each key in `refused`, if present, has the one value we build.

    Raises ValueError that names the key, what was found and what is supported.
    """
    for key, supported in refused.items():
        if hf.get(key, supported) != supported:
            raise ValueError(f"config.json: {key} is {hf[key]!r}, and only {supported!r} is supported")
    return hf


def rope_base(hf: dict[str, Any]) -> float:
    """The base of the rotary angles: `rope_theta`, or inside `rope_parameters` (transformers 5)."""
    rope = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise ValueError(f"config.json: rotary scaling {kind!r} is not supported, only 'default'")
    return float(rope.get("rope_theta") or hf.get("rope_theta") or 10_000.0)
