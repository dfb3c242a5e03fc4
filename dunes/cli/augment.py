"""`dunes augment ...`: one command per modification, each from folder to folder."""

from collections.abc import Callable, Mapping
from functools import partial
from inspect import signature
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from dunes.cli.verbs import AnyBase, Model, Out
from dunes.flags import Dtype, flag, option
from dunes.runs.finetune_config import Router

if TYPE_CHECKING:
    from dunes.progress import Display

Into = Literal["dequantized", "original"]
Kind = Literal["int8", "int4", "int3", "nf4"]
Method = Literal["rtn", "gptq"]
Split = Literal["random", "cluster", "importance"]
Gate = Literal["linear", "noisy"]
Pruning = Literal["sparsegpt", "wanda", "magnitude"]
Scale = Literal["unbiased", "official"]


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
    from dunes.checkpoint.export import export
    from dunes.text import templates

    torch_dtype = None if dtype is None else getattr(torch, dtype)
    for line in export(checkpoint.locate_model(model).folder, out, into, torch_dtype, any_base).lines():
        print(line)
    loaded = checkpoint.load(out)
    if loaded.tokenizer is not None:
        verb = "generate" if templates.find_template(loaded.tokenizer, loaded.card) is None else "chat"
        print(f'next: dunes {verb} {quote(str(out))} "..."')


def quantize(
    model: Model,
    out: Out,
    *,
    kind: Annotated[Kind | None, flag("|".join(get_args(Kind)), "nf4")] = None,
    method: Annotated[
        Method | None,
        flag("|".join(get_args(Method)), "gptq for int4 and int3 where there is text for it, else rtn"),
    ] = None,
    group: Annotated[int | None, flag("INPUTS", "64")] = None,
    symmetric: bool = False,
    act_order: bool = True,
    calibration: Annotated[tuple[str, ...], flag("SOURCE", "the text of the model's training")] = (),
    override: Annotated[tuple[str, ...], flag("GLOB=KIND", "none")] = (),
    validation: Annotated[tuple[str, ...], flag("SOURCE", "the validation text of the model's training")] = (),
    target_modules: Annotated[tuple[str, ...], flag("GLOB", "all linear layers of the blocks but routers")] = (),
    double: bool = False,
) -> None:
    """Quantize the linear layers of a model, and measure the effect on its logits.

    Example: dunes augment quantize ~/models/mistral ~/models/mistral-nf4 --kind nf4

    Example: dunes augment quantize runs/project small --kind int4 --override 'blocks.0.**=int8' --group 32

    Args:
        model: A model folder, an adapter folder, or a model name on the Hub.
        out: Output folder.
        kind: int8 with a scale for each row, int4 or int3 with one for each group of inputs, or nf4 with one for
            each block of 64.
        method: Round to nearest (rtn), or by a solver that reads calibration text (gptq).
        group: Of int4 and int3: inputs of a row that share a scale; 0 for the whole row.
        symmetric: Without zero points: smaller by 0.06 bits per weight with groups of 64.
        act_order: With gptq, round the columns with the largest inputs first.
        calibration: Text for gptq.
        validation: Text that the report scores, before and after.
        override: Other kinds for some modules, or dense to leave them as they are; the last match wins.
        target_modules: Modules to quantize; quantized ones that a wildcard selects stay as they are.
        double: With nf4, also quantize the scales, which saves 0.4 bits per weight.
    """
    options: dict[str, Any] = {"where": target_modules} if target_modules else {}
    options |= {
        "kind": kind,
        "double": double,
        "group": group,
        "symmetric": symmetric,
        "act_order": None if act_order else False,
        "override": override,
    }
    _augment(model, out, "quantize", method=method, calibration=calibration, validation=validation, **options)
    folder = quote(str(out))
    print(f'next: dunes generate {folder} "..."   plain weights: dunes export {folder} PLAIN --to hf')


def prune(
    model: Model,
    out: Out,
    *,
    method: Annotated[Pruning, flag("|".join(get_args(Pruning)))] = "sparsegpt",
    sparsity: Annotated[float | None, flag("FRACTION", "0.5, or what --pattern gives")] = None,
    pattern: Annotated[str | None, flag("KEPT:GROUP", "any")] = None,
    calibration: Annotated[tuple[str, ...], flag("SOURCE", "the text of the model's training")] = (),
    validation: Annotated[tuple[str, ...], flag("SOURCE", "the validation text of the model's training")] = (),
    target_modules: Annotated[tuple[str, ...], flag("GLOB", "all linear layers of the blocks but routers")] = (),
) -> None:
    """Set weights of linear layers to zero, where they stay while the model is trained or finetuned.

    Files get no smaller, and on a CPU nothing gets faster.

    Example: dunes augment prune ~/models/llama ~/models/llama-half

    Example: dunes augment prune ~/models/llama ~/models/llama-24 --pattern 2:4 --calibration corpus.txt

    Args:
        method: SparseGPT lets the other weights make up for those it prunes; Wanda and magnitude do not.
        sparsity: The fraction of each layer's weights to set to zero.
        pattern: Keep so many of every GROUP consecutive inputs of an output, such as 2:4 or 4:8.
        calibration: Text for SparseGPT and Wanda.
        validation: Text that the report scores, before and after.
        target_modules: Linear layers to prune; ! excludes, the last match wins.
    """
    if calibration and method == "magnitude":
        raise ValueError("--method magnitude reads no text; omit --calibration")
    options: dict[str, Any] = {"where": target_modules} if target_modules else {}
    options |= {"calibration": None if method == "magnitude" else calibration, "validation": validation}
    _augment(model, out, "prune", method=method, sparsity=sparsity, pattern=pattern, **options)
    print(
        f"next: dunes train SOURCE --from {quote(str(out))} --out RUN   trains the other weights; the zeros stay"
    )


Kept = Annotated[int | None, flag("N", "all")]


def narrow(
    model: Model,
    out: Out,
    *,
    heads: Kept = None,
    neurons: Kept = None,
    experts: Kept = None,
    blocks: Kept = None,
    uneven: bool = False,
    calibration: Annotated[tuple[str, ...], flag("SOURCE", "the text of the model's training")] = (),
    validation: Annotated[tuple[str, ...], flag("SOURCE", "the validation text of the model's training")] = (),
) -> None:
    """Take out the heads, neurons, experts and blocks that matter least: smaller and faster, and worse.

    Train it on with dunes train --from: a few hundred steps give much back.

    Example: dunes augment narrow ~/models/llama ~/models/llama-small --neurons 4096 --blocks 24

    Args:
        heads: Query heads to keep in each attention; with grouped heads, whole groups.
        neurons: Hidden neurons to keep in each MLP or expert.
        experts: Experts to keep in each mixture.
        blocks: Blocks to keep.
        uneven: Compare heads and neurons across layers, which get different sizes; only dunes opens the result.
        calibration: Text on which importance is measured.
        validation: Text that the report scores, before and after.
    """
    kept: dict[str, Any] = {"heads": heads, "neurons": neurons, "experts": experts, "blocks": blocks}
    _augment(model, out, "narrow", calibration=calibration, validation=validation, uneven=uneven, **kept)
    print(f"next: dunes train SOURCE --from {quote(str(out))} --out RUN")


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
    if undo:
        _undo("expand", locals())
        return
    _augment(model, out, "expand", blocks=blocks, after=after)
    print(f"next: dunes train SOURCE --from {quote(str(out))} --trainable new --out RUN")


Count = Annotated[int, flag("N")]


def upcycle(
    model: Model,
    out: Out,
    *,
    experts: Count = 8,
    top_k: Count = 2,
    granularity: Count = 1,
    drop: Annotated[float, flag("FRACTION")] = 0.0,
    seed: Count = 0,
) -> None:
    """Copy each MLP of a dense model into the experts of a mixture, which computes the same.

    Train it on with dunes train --from: the experts diverge. A LLaMA or Mistral becomes a Mixtral.

    Example: dunes augment upcycle ~/models/llama ~/models/mixture

    Args:
        experts: Experts in each layer.
        top_k: Experts that each token is routed to.
        granularity: Cut each MLP into this many pieces first, of which a token gets whole sets.
        drop: Draw this fraction of each expert's neurons anew (Drop-Upcycling): worse at first, better later.
        seed: Random seed of the routers and of --drop.
    """
    _augment(model, out, "upcycle", experts=experts, top_k=top_k, granularity=granularity, drop=drop, seed=seed)
    print(f"next: dunes train SOURCE --from {quote(str(out))} --out RUN")


def experts(
    model: Model,
    out: Out,
    *,
    experts: Count = 8,
    top_k: Count = 2,
    split: Annotated[Split, flag("|".join(get_args(Split)))] = "random",
    calibration: Annotated[tuple[str, ...], flag("SOURCE", "the text of the model's training")] = (),
    shared: Count = 0,
    gate: Annotated[Gate, flag("|".join(get_args(Gate)))] = "linear",
    scale: Annotated[Scale, flag("|".join(get_args(Scale)))] = "unbiased",
    seed: Count = 0,
    undo: bool = False,
) -> None:
    """Split each MLP of a dense model into experts with a part of its neurons each (LLaMA-MoE).

    The result is as large and computes less, but is much worse before it is trained on.

    Example: dunes augment experts ~/models/llama ~/models/llama-moe --top-k 4

    Example: dunes augment experts --undo ~/models/llama-moe ~/models/llama-again

    Args:
        experts: Experts in each layer.
        top_k: Experts that each token is routed to.
        split: Neurons at random, by balanced k-means over the weights, or by importance for calibration text.
        calibration: Text for --split importance.
        shared: With --split importance, so many of the experts get every token: the neurons that matter most.
        gate: Router: one layer, or the published one of two layers with noise.
        scale: Of an expert's output: the number of routed experts, or as published that over --top-k.
        seed: Random seed of the split and of the routers.
        undo: Put the experts of an untrained split together again, which gives back the weights bit for bit.
    """
    if undo:
        _undo("experts", locals())
        return
    text = calibration if calibration or split == "importance" else None
    options: dict[str, Any] = {"split": split, "shared": shared, "gate": gate, "scale": scale, "seed": seed}
    _augment(model, out, "experts", experts=experts, top_k=top_k, calibration=text, **options)
    print(
        f"next: dunes train SOURCE --from {quote(str(out))} --trainable new --out RUN   then without --trainable"
    )


def lora_experts(
    model: Model,
    out: Out,
    *,
    router: Annotated[Router, flag("|".join(get_args(Router)))] = "linear",
    experts: Count = 8,
    top_k: Count = 2,
    rank: Count = 16,
    alpha: Annotated[float, flag("ALPHA")] = 32.0,
    target_modules: Annotated[
        tuple[str, ...], flag("GLOB", "all linear layers of the blocks but routers and experts")
    ] = (),
    seed: Count = 0,
) -> None:
    """Put an untrained mixture of low-rank experts beside each linear layer, which changes no output.

    To train one on examples at once, use dunes finetune --method lora-experts.

    Example: dunes augment lora-experts ~/models/llama ~/models/mixture --experts 4

    Args:
        router: A router for each linear layer; one shared by those of an attention or an MLP; or experts that
            are whole MLPs (MixLoRA), with plain LoRA beside the other layers.
        experts: Low-rank pairs at each place.
        top_k: Experts that compute a token; all of them: a dense mixture.
        rank: Rank of each expert.
        alpha: Scaling: an expert's output is multiplied by alpha / rank.
        target_modules: Modules that get experts; ! excludes, the last match wins.
        seed: Random seed of experts and routers.
    """
    options: dict[str, Any] = {"where": target_modules} if target_modules else {}
    options |= {"router": router, "experts": experts, "top_k": top_k, "rank": rank, "alpha": alpha, "seed": seed}
    _augment(model, out, "lora-experts", **options)
    print(f"next: dunes train SOURCE --from {quote(str(out))} --trainable new --out RUN")


def _augment(model: str, out: Path, change: str, **request: Any) -> None:
    """Make the change from folder to folder, and print its report."""
    from dunes import checkpoint, measure
    from dunes.runs.augment import augment_folder, quantize_folder

    measure.use_best_threads()
    with _display() as display:
        folder = checkpoint.locate_model(model).folder
        make = quantize_folder if change == "quantize" else partial(augment_folder, name=change)
        lines = make(folder, out, show=display.time_left, **request)
    print("\n".join(lines))


def _display() -> "Display":
    """A bar on a terminal, a line every ten seconds elsewhere."""
    from rich.console import Console

    from dunes.progress import EVERY, Display

    return Display(Console(stderr=True, highlight=False), patience=EVERY)


def _undo(change: str, arguments: Mapping[str, Any]) -> None:
    """Take the change back from folder to folder, and print the report; `arguments` are those of its command.

    Raises ValueError if they have other options than --undo.
    """
    from dunes import checkpoint
    from dunes.runs.augment import undo_folder

    options = [p for p in signature(COMMANDS[change]).parameters.values() if p.kind is p.KEYWORD_ONLY]
    given = [option(p.name) for p in options if p.name != "undo" and arguments[p.name] != p.default]
    if given:
        raise ValueError(f"--undo takes back all of the change; omit --{' and --'.join(given)}")
    with _display() as display:
        folder = checkpoint.locate_model(arguments["model"]).folder
        report = undo_folder(folder, arguments["out"], change, show=display.time_left)
    print(report)


COMMANDS: dict[str, Callable[..., Any]] = {
    "expand": expand,
    "merge": merge,
    "narrow": narrow,
    "prune": prune,
    "quantize": quantize,
    "upcycle": upcycle,
    "experts": experts,
    "lora-experts": lora_experts,
}

ABOUT = """Modify models: each command reads a folder and writes another.

Example: dunes augment merge runs/chat ~/models/chat"""
