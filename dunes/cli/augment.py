"""`dunes augment ...`: one command for each change from folder to folder."""

from collections.abc import Callable
from typing import Annotated, Any, Literal, get_args

from dunes.cli.verbs import AnyBase, Model, Out
from dunes.runs.config import Dtype, flag

Into = Literal["dequantized", "original"]


def merge(
    model: Model,
    out: Out,
    *,
    into: Annotated[Into | None, flag("|".join(get_args(Into)), "what it was trained on")] = None,
    dtype: Annotated[Dtype | None, flag("float32|bfloat16|float16", "as the base is stored")] = None,
    any_base: AnyBase = False,
) -> None:
    """Fold an adapter into its base: a plain model, verified, with template and tokenizer.

    Example: dunes augment merge runs/chat ~/models/chat

    Args:
        model: The adapter's folder.
        out: The new folder.
        into: Where the adapter was trained on a quantized base: that one made dense again, or the base as it was.
        dtype: Round the weights.
    """
    import torch

    from dunes import checkpoint
    from dunes.runs.merge import merge as run
    from dunes.text import templates

    rounded = None if dtype is None else getattr(torch, dtype)
    report = run(checkpoint.locate_model(model).folder, out, into, rounded, any_base)
    for line in report.lines():
        print(line)
    loaded = checkpoint.load(out)
    if loaded.tokenizer is not None:
        verb = "generate" if templates.find_template(loaded.tokenizer, loaded.card) is None else "chat"
        print(f'next: dunes {verb} {out} "..."')


COMMANDS: dict[str, Callable[..., Any]] = {"merge": merge}

ABOUT = "Change models from folder to folder, measured.\n\nExample: dunes augment merge runs/chat ~/models/chat"
