"""Definitions shared by command-line flags. Importing this module does not import torch."""

import re
from collections.abc import Collection, Sequence
from difflib import get_close_matches
from typing import Any, Literal

import tyro

STDLIB = "stdlib"
"""Source name for the standard library of the running Python."""
INSTALLED = "installed"
"""Source name for the code of installed packages; `installed:python,go` limits the languages."""
HUB = "hf:"
"""Prefix of a data set of the Hugging Face Hub: hf:ORG/NAME[/CONFIG][:SPLIT][@REVISION]."""
Device = Literal["cpu", "cuda", "mps"]
Dtype = Literal["float32", "bfloat16", "float16"]
Copies = Literal["auto", "never", "only"]
"""When to copy lines instead of using the model. auto: if the model is worse; never: never; only: always."""
Family = Literal[
    "arcee", "dunes", "llama", "mistral", "phi3", "mixtral", "qwen2", "qwen3", "qwen3_moe", "deepseek_v3", "olmo2",
    "gemma2", "gemma3_text", "smollm3", "gpt_oss", "gpt_neox", "stablelm", "gpt2", "mamba2", "qwen3_next",
]  # fmt: skip
"""Names of the model families. They are listed here because importing `models` would import torch."""

PARTS = {
    "mlp": ("relu2", "gelu", "gated", "geglu"),
    "norm": ("rms", "layer"),
    "block": ("pre", "post", "sandwich", "parallel"),
    "position": ("rotary", "partial", "some", "alibi", "learned", "none"),
    "attention": (
        *("plain", "normed", "values", "sinks", "capped", "gated", "latent"),
        *("convolution", "delta", "mamba"),
    ),
    "kv": ("all", "half", "one"),
    "window": ("none", "alternating", "pair"),
    "head": ("tied", "untied"),
    "logits": ("plain", "capped"),
}
"""Names of the parts of `models.named_parts`, and the choices for each part; the first choice is the default."""

REQUIRED = "required"


def flag(metavar: str, default: str = "", about: str | None = None, name: str | None = None) -> Any:
    """A tyro argument. The help shows `metavar`, the `default` (or REQUIRED) and the text `about`."""
    hint = f"({default})" if default == REQUIRED else f"(default: {default})" if default else None
    return tyro.conf.arg(name=name, metavar=metavar, help=about, help_behavior_hint=hint)


def is_path(source: object) -> bool:
    """True if a source of text is a path; False for STDLIB, INSTALLED and a data set of the Hub."""
    return str(source) != STDLIB and str(source).partition(":")[0] != INSTALLED and not str(source).startswith(HUB)


def option(field: str) -> str:
    """The name of a field's flag, without the leading dashes."""
    return field.replace("_", "-")


def nearest(name: str, names: Collection[str]) -> str:
    """The most similar names as ", such as NAME"; empty if none is similar."""
    near = get_close_matches(name, names)
    return f", such as {', '.join(near)}" if near else ""


def parse_fields(texts: Sequence[str]) -> dict[str, str]:
    """Map our field names to the file's, as in ["prompt=question,completion=answer"]. Raises ValueError."""
    parts = [part.partition("=") for text in texts for part in re.split(r",(?=\w+=)", text)]
    names = {ours: theirs for ours, _, theirs in parts}
    if min(len(names), len({*names.values()})) < len(parts) or not all(map(all, names.items())):
        raise ValueError(
            f"--fields {' '.join(texts)}: expected OURS=THEIRS with each name once, such as prompt=question"
        )
    return names
