"""Model architectures, one file each, with their weight names and configs in Hugging Face format.

Each family's file defines Config, build(config), read(model, context_length), from_hf, to_hf and NAMES. It may
also define ALIASES, weight names that are read but not written; IGNORED_NAMES, tensors in checkpoint files that
are not weights; and refusal(config), the reason why transformers does not run the model. Start with
`llama.Config`, `llama.build` and `initialise.initialise`. `FAMILIES` is the table of all families by name.
"""

from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from types import ModuleType
from typing import Any, get_args

import torch
from torch.overrides import TorchFunctionMode

from dunes.flags import Family
from dunes.models.names import Names, for_heads
from dunes.parts import Decoder

FAMILIES: dict[str, ModuleType] = {name: import_module(f"{__name__}.{name}") for name in get_args(Family)}
"""Maps a family's name, which is the model_type in a Hugging Face config.json, to its Python module."""


def family_of(hf: Mapping[str, Any]) -> str:
    """The name of the model family that a config.json describes. Raises ValueError for an unknown model_type."""
    family = hf.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        raise ValueError(f"config.json: model_type {str(family)[:60]!r} is not one of {', '.join(FAMILIES)}")
    return family


def refusal(family: str, config: Any) -> str:
    """The reason why transformers refuses this config or computes logits other than ours; "" if there is none."""
    reason: str = getattr(FAMILIES[family], "refusal", lambda config: "")(config)
    if 1 in (getattr(config, "window", None), *getattr(config, "windows", ())):
        reason = reason or "a cache with a sliding window of 1 keeps all tokens"  # its [-window + 1:] is [0:]
    return reason and f"transformers does not run it: {reason}"


def weight_names(family: str) -> Names:
    """All weight names of a family: first NAMES, which are written, then ALIASES, which are only read."""
    return [*FAMILIES[family].NAMES, *getattr(FAMILIES[family], "ALIASES", ())]


def written_names(family: str, config: Any) -> Names:
    """The weight names in the files of a model with this config."""
    return for_heads(FAMILIES[family].NAMES, config.heads)


_INITIAL = torch.nn.init.normal_, torch.nn.init.kaiming_uniform_


class _SkipInitial(TorchFunctionMode):
    """Skips drawing initial weights, since `normal_` on a meta tensor makes torch import its compiler (1.7 s)."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return None if func in _INITIAL else func(*args, **(kwargs or {}))


def build_on_meta(family: str, config: Any) -> Decoder:
    """Build the model on the meta device, where weights have shapes but no values; this takes milliseconds."""
    with torch.device("meta"), _SkipInitial():
        model: Decoder = FAMILIES[family].build(config)
    return model
