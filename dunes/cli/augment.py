"""`dunes augment ...`: one command per modification, each from folder to folder."""

from collections.abc import Callable
from typing import Annotated, Any, Literal, get_args

from dunes.cli.verbs import AnyBase, Model, Out
from dunes.runs.config import Dtype, flag

Into = Literal["dequantized", "original"]


def merge(
    model: Model,
    out: Out,
    *,
    into: Annotated[Into | None, flag("|".join(get_args(Into)), "dequantized")] = None,
    dtype: Annotated[
        Dtype | None, flag("|".join(get_args(Dtype)), "the base's", "Dtype of the merged weights.")
    ] = None,
    any_base: AnyBase = False,
) -> None:
    """Merge an adapter into its base model, and verify the result; template and tokenizer are included.

    Example: dunes augment merge runs/chat ~/models/chat

    Args:
        into: For an adapter trained on a quantized base: merge into the dequantized weights, or the original ones.
    """
    import torch

    from dunes import checkpoint
    from dunes.runs.merge import merge as merge_adapter
    from dunes.text import templates

    torch_dtype = None if dtype is None else getattr(torch, dtype)
    report = merge_adapter(checkpoint.locate_model(model).folder, out, into, torch_dtype, any_base)
    for line in report.lines():
        print(line)
    loaded = checkpoint.load(out)
    if loaded.tokenizer is not None:
        verb = "generate" if templates.find_template(loaded.tokenizer, loaded.card) is None else "chat"
        print(f'next: dunes {verb} {out} "..."')


COMMANDS: dict[str, Callable[..., Any]] = {"merge": merge}

ABOUT = """Modify models: each command reads a folder and writes another.

Example: dunes augment merge runs/chat ~/models/chat"""
