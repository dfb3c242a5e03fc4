"""`dunes augment ...`: one command per modification, each from folder to folder."""

from collections.abc import Callable
from typing import Annotated, Any, Literal, get_args

from dunes.cli.verbs import AnyBase, Model, Out
from dunes.runs.config import Dtype, flag

Into = Literal["dequantized", "original"]
Kind = Literal["int8", "nf4"]


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
    from dunes.runs.export import export
    from dunes.text import templates

    torch_dtype = None if dtype is None else getattr(torch, dtype)
    for line in export(checkpoint.locate_model(model).folder, out, into, torch_dtype, any_base).lines():
        print(line)
    loaded = checkpoint.load(out)
    if loaded.tokenizer is not None:
        verb = "generate" if templates.find_template(loaded.tokenizer, loaded.card) is None else "chat"
        print(f'next: dunes {verb} {out} "..."')


def quantize(
    model: Model,
    out: Out,
    *,
    kind: Annotated[Kind, flag("|".join(get_args(Kind)))] = "nf4",
    double: bool = False,
) -> None:
    """Quantize the linear layers of a model, and measure the effect on its logits.

    Example: dunes augment quantize ~/models/mistral ~/models/mistral-nf4 --kind nf4

    Args:
        model: A model folder, an adapter folder, or a model name on the Hub.
        out: Output folder.
        kind: int8 with a scale for each row, or nf4 with a scale for each block of 64.
        double: With nf4, also quantize the scales, which saves 0.4 bits per weight.
    """
    from dunes import checkpoint
    from dunes.runs.augment import augment_folder

    for line in augment_folder(checkpoint.locate_model(model).folder, out, "quantize", kind=kind, double=double):
        print(line)
    print(f'next: dunes generate {out} "..."   plain weights: dunes export {out} PLAIN --to hf')


def expand(
    model: Model,
    out: Out,
    *,
    blocks: Annotated[int | None, flag("N", "a quarter of the model's blocks")] = None,
    after: Annotated[tuple[int, ...], flag("BLOCK", "all blocks")] = (),
    undo: bool = False,
) -> None:
    """Add blocks that change nothing until they are trained (LLaMA Pro), and take them out again.

    Example: dunes augment expand ~/models/llama ~/models/llama-pro

    Example: dunes augment expand --undo runs/legal ~/models/llama-again

    Args:
        blocks: Number of new blocks, spread evenly.
        after: The blocks, counted from 0, behind which the new ones may stand.
        undo: Take the new blocks out again, which gives back the original weights bit for bit.
    """
    from dunes import checkpoint
    from dunes.runs.augment import augment_folder, undo_folder

    if undo and (after or blocks is not None):
        raise ValueError("--undo takes out all new blocks; omit --blocks and --after")
    folder = checkpoint.locate_model(model).folder
    if undo:
        lines = undo_folder(folder, out, "expand")
    else:
        lines = augment_folder(folder, out, "expand", blocks=blocks, after=after)
        lines.append(f"next: dunes train SOURCE --from {out} --trainable new --out RUN")
    print(*lines, sep="\n")


COMMANDS: dict[str, Callable[..., Any]] = {"expand": expand, "merge": merge, "quantize": quantize}

ABOUT = """Modify models: each command reads a folder and writes another.

Example: dunes augment merge runs/chat ~/models/chat"""
