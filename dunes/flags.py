"""What flags of the command line share; it is read without importing torch."""

from typing import Any, Literal

import tyro

STDLIB = "stdlib"
"""The source that names the standard library of the running Python."""
Device = Literal["cpu", "cuda", "mps"]
Dtype = Literal["float32", "bfloat16", "float16"]


REQUIRED = "required"


def flag(metavar: str, default: str = "", about: str | None = None, name: str | None = None) -> Any:
    """The metavar of a flag in help, its default or that it is required, its help and its name, unless the class
    says them."""
    hint = f"({default})" if default == REQUIRED else f"(default: {default})" if default else None
    return tyro.conf.arg(name=name, metavar=metavar, help=about, help_behavior_hint=hint)


def option(field: str) -> str:
    """The flag of a field, without its dashes."""
    return field.replace("_", "-")
