"""Whole architectures, one file each, and their names and configs in Hugging Face.

Each family's file defines Config, build(config), read(model, context_length), from_hf, to_hf and NAMES. It may
also define ALIASES (weight names that are read but not written), IGNORED_NAMES (tensors in checkpoint files that
are no weights) and refusal(config) (why transformers does not run such a model). Start with `llama.Config`,
`llama.build` and `initialise.initialise`. `FAMILIES` is the table of all families by name.
"""

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from importlib import import_module
from types import ModuleType
from typing import Any, get_args

import torch
from torch.overrides import TorchFunctionMode

from dunes import tree
from dunes.flags import Family
from dunes.models.names import Names, for_heads
from dunes.parts import Decoder

FAMILIES: dict[str, ModuleType] = {name: import_module(f"{__name__}.{name}") for name in get_args(Family)}
"""Maps a family's name in `flags.Family`, which is also its model_type in Hugging Face, to its Python module."""


_NEAREST = {
    "gemma3": "gemma3_text (without images)",
    "gemma": "gemma2",
    "qwen2_moe": "qwen3_moe",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_5": "qwen3_next",
    "deepseek": "deepseek_v3",
    "kimi": "deepseek_v3",
    "olmoe": "qwen3_moe",
    "olmo": "olmo2",
    "phimoe": "mixtral",
    "phi": "phi3",
    "dbrx": "mixtral",
    "starcoder2": "mistral",
    "ministral": "mistral",
    "mistral": "mistral",
    "llama": "llama",
    "cohere": "llama",
    "granite": "llama",
    "glm": "llama",
    "internlm": "llama",
    "minicpm": "llama",
    "nemotron": "arcee",
    "gpt_bigcode": "gpt2",
    "gpt_neo": "gpt2",
    "gpt_neox": "",
    "gpt": "",
    "mamba": "mamba2",
}
"""The family nearest to model types that start with a key, of which the longest counts; "" where none is near."""
_LONGEST = 64
"""Number of characters up to which a model_type is compared with ours."""


def family_of(hf: dict[str, Any]) -> str:
    """The name of the family of a config.json.

    Raises ValueError for an unknown model_type, with the nearest family if there is one.
    """
    family = hf.get("model_type")
    if isinstance(family, str) and family in FAMILIES:
        return family
    hint = ""
    if isinstance(family, str) and (nearest := _nearest(family.lower())):
        hint = f"; the nearest is {nearest}: name it in the config only if the model has the same tensors"
    elif "ssm_cfg" in hf:
        hint = (
            "; this is a config of the package mamba_ssm: take the model's folder for transformers (mamba2-...-hf)"
        )
    raise ValueError(f"config.json: model_type {family!r} is not one of {', '.join(FAMILIES)}{hint}")


def _nearest(model_type: str) -> str:
    """The family nearest to an unknown model_type, by its start, else by its spelling; "" if none is near."""
    if len(model_type) > _LONGEST:
        return ""
    if starts := [start for start in _NEAREST if model_type.startswith(start)]:
        return _NEAREST[max(starts, key=len)]
    return "".join(difflib.get_close_matches(model_type, FAMILIES, n=1, cutoff=0.75))


def refusal(family: str, config: Any) -> str:
    """Why transformers refuses a model folder with this config, or computes other logits; "" if it runs it."""
    reason: str = getattr(FAMILIES[family], "refusal", lambda config: "")(config)
    if 1 in (getattr(config, "window", None), *getattr(config, "windows", ())):
        reason = reason or "its cache of a sliding window of 1 keeps all tokens"  # its slice [-window + 1:]
    return reason and f"transformers does not run it: {reason}"


def weight_names(family: str) -> Names:
    """All weight names of a family: first NAMES, which are written, then ALIASES, which are only read."""
    return [*FAMILIES[family].NAMES, *getattr(FAMILIES[family], "ALIASES", ())]


def written_names(family: str, config: Any) -> Names:
    """The weight names with which a model of this config is written."""
    return for_heads(FAMILIES[family].NAMES, config.heads)


_INITIAL = torch.nn.init.normal_, torch.nn.init.kaiming_uniform_


class _SkipInitial(TorchFunctionMode):
    """Skips initial values: on meta tensors `normal_` would make torch import its compiler (1.7 s)."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return None if func in _INITIAL else func(*args, **(kwargs or {}))


def build_on_meta(family: str, config: Any) -> Decoder:
    """Build the model on the meta device: in milliseconds, with structure and shapes, but without values."""
    with torch.device("meta"), _SkipInitial():
        model: Decoder = FAMILIES[family].build(config)
    return model


def weight_counts(family: str, config: Any) -> tuple[int, int]:
    """The number of parameters and the number of weight tensors of a model with this config.

    Both are extrapolated from models with one or two blocks and experts, since all blocks, and all experts, have
    the same size. Others are only the first `dense` blocks, which have no experts, or those that are `recurrent`.
    """
    experts, dense = getattr(config, "experts", 1), min(getattr(config, "dense", 0), config.depth)
    kinds = getattr(config, "recurrent", (False,))
    recurrent = config.depth // len(kinds) * sum(kinds) + sum(kinds[: config.depth % len(kinds)])
    small, deep = (_count(family, config, depth) for depth in (1, 2))
    wide = _count(family, config, experts=2) if experts > 1 else small
    other = _count(family, config, dense=min(dense, 1), recurrent=(bool(recurrent),))
    parameters, tensors = (
        a
        + (config.depth - 1) * (b - a)
        + (config.depth - dense) * (experts - 1) * (c - a)
        + (dense + recurrent) * (d - a)
        for a, b, c, d in zip(small, deep, wide, other, strict=True)
    )
    return parameters, tensors


def _count(
    family: str,
    config: Any,
    depth: int = 1,
    experts: int = 1,
    dense: int = 0,
    recurrent: tuple[bool, ...] = (False,),
) -> tuple[int, int]:
    sizes = {"experts": experts, "top_k": 1, "groups": 1, "top_groups": 1, "dense": dense, "recurrent": recurrent}
    sizes = {key: value for key, value in sizes.items() if hasattr(config, key)}
    model = build_on_meta(family, replace(config, depth=depth, **sizes))
    return tree.count(model), len(list(model.parameters()))
