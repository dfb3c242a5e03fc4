"""Definitions shared by command-line flags; imports no torch."""

from typing import Any, Literal

import tyro

STDLIB = "stdlib"
"""The source that stands for the standard library of the running Python."""
Device = Literal["cpu", "cuda", "mps"]
Dtype = Literal["float32", "bfloat16", "float16"]
Family = Literal["arcee", "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "gpt2"]
"""Architectures, each a file of `models`; without torch, which these import."""


REQUIRED = "required"


def flag(metavar: str, default: str = "", about: str | None = None, name: str | None = None) -> Any:
    """A tyro argument: its metavar, default as shown in help (or REQUIRED), help text and name."""
    hint = f"({default})" if default == REQUIRED else f"(default: {default})" if default else None
    return tyro.conf.arg(name=name, metavar=metavar, help=about, help_behavior_hint=hint)


def option(field: str) -> str:
    """The flag of a field, without its dashes."""
    return field.replace("_", "-")
