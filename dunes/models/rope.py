"""Rotary positions in a config.json: `rope_theta` and `rope_scaling`, or `rope_parameters` (transformers 5)."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from dunes.models.words import flag, hf_config, number, size
from dunes.parts.position import UNSCALED, Dynamic, Linear, Llama3, Scaling, Unscaled, Yarn

Words = Mapping[str, Any]


def rope(hf: dict[str, Any], default: float = 10_000.0) -> dict[str, Any]:
    """`rope_base` and `scaling` of a Config, of either dialect; `default` is the base that goes without saying.

    Raises ValueError for a kind of scaling, or a part of it, that is not supported. Where a file has both
    dialects, `rope_scaling` counts, as in transformers.
    """
    words = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    if not isinstance(words, dict):
        raise ValueError(f"config.json: rope_scaling is a {type(words).__name__}; it must be an object")
    said = {k: v for k, v in {**hf, **words}.items() if v is not None}
    hf_config(said, refused={"partial_rotary_factor": 1.0, "mrope_section": None})
    kind = words.get("rope_type", words.get("type", "default"))
    if not isinstance(kind, str) or kind not in KINDS:
        raise ValueError(f"config.json: rotary scaling {kind!r} is not supported, only {', '.join(KINDS)}")
    base = number(words, "rope_theta", number(hf, "rope_theta", default, above=1.0), above=1.0)
    return {"rope_base": base, "scaling": KINDS[kind](words, hf)}


def rope_words(base: float, scaling: Scaling) -> dict[str, Any]:
    """The same in both dialects."""
    words = _words(scaling)
    old = {} if words["rope_type"] == "default" else {"rope_scaling": {"type": words["rope_type"], **words}}
    return {"rope_theta": base, **old, "rope_parameters": {**words, "rope_theta": base}}


def _trained(words: Words, hf: Words) -> int:
    """How many tokens the model had seen together before it was stretched."""
    within = size(words, "original_max_position_embeddings", size(hf, "max_position_embeddings"))
    return size(hf, "original_max_position_embeddings", within)


def _dynamic(words: Words, hf: Words) -> Dynamic:
    heads = size(hf, "num_attention_heads")
    if size(hf, "head_dim", size(hf, "hidden_size") // heads) < 4:
        raise ValueError("config.json: rotary scaling 'dynamic' needs a head_dim of 4 or more")
    return Dynamic(number(words, "factor"), size(hf, "max_position_embeddings"))


def _yarn(words: Words, hf: Words) -> Yarn:
    length = _trained(words, hf)
    factor = number(words, "factor", size(hf, "max_position_embeddings") / length)
    return Yarn(
        factor,
        length,
        number(words, "attention_factor", _attention(words, factor)),
        number(words, "beta_fast", 32.0),
        number(words, "beta_slow", 1.0),
        flag(words, "truncate", True),
    )


def _attention(words: Words, factor: float) -> float:
    """YaRN's factor for cosines and sines where the file does not give it."""

    def scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if words.get("mscale") and words.get("mscale_all_dim"):
        return scale(number(words, "mscale")) / scale(number(words, "mscale_all_dim"))
    return scale(1.0)


def _llama3(words: Words, hf: Words) -> Llama3:
    low, high = number(words, "low_freq_factor"), number(words, "high_freq_factor")
    if not low < high:
        raise ValueError(f"config.json: high_freq_factor is {high}; it must be above low_freq_factor, {low}")
    return Llama3(number(words, "factor"), low, high, _trained(words, hf))


KINDS: dict[str, Callable[[Words, Words], Scaling]] = {
    "default": lambda words, hf: UNSCALED,
    "linear": lambda words, hf: Linear(number(words, "factor")),
    "dynamic": _dynamic,
    "yarn": _yarn,
    "llama3": _llama3,
}


def _words(scaling: Scaling) -> dict[str, Any]:
    match scaling:
        case Unscaled():
            return {"rope_type": "default"}
        case Linear():
            return {"rope_type": "linear", "factor": scaling.factor}
        case Dynamic():
            return {"rope_type": "dynamic", "factor": scaling.factor}
        case Yarn():
            return {
                "rope_type": "yarn",
                "factor": scaling.factor,
                "original_max_position_embeddings": scaling.length,
                "attention_factor": scaling.attention,
                "beta_fast": scaling.fast,
                "beta_slow": scaling.slow,
                "truncate": scaling.truncate,
            }
        case Llama3():
            return {
                "rope_type": "llama3",
                "factor": scaling.factor,
                "low_freq_factor": scaling.low,
                "high_freq_factor": scaling.high,
                "original_max_position_embeddings": scaling.length,
            }
    raise ValueError(f"{type(scaling).__name__} has no name in a config.json")
