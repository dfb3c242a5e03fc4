"""The options of each change: arguments of `decide`, fields of records, and flags of the command line.

Importing this module does not import torch. `NotOffered` fields have no flag and are set from Python only.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args, get_origin, get_type_hints

import tyro

from dunes.flags import flag, option

T = TypeVar("T")
NotOffered = Annotated[T, tyro.conf.Fixed, tyro.conf.Suppress]
Count = Annotated[int, flag("N")]
KeepCount = Annotated[int | None, flag("N", "all")]
Where = tuple[str, ...]

Kind = Literal["int8", "int4", "int3", "nf4"]
Method = Literal["rtn", "gptq"]
"""Methods of quantization; `quantization.SOLVERS` has the functions of all methods except rtn."""
RTN, CALIBRATED = "rtn", ("gptq",)  # CALIBRATED methods need text; the first is the default if there is text
Variant = Literal["lora", "rslora", "dora", "pissa"]
Pruning = Literal["sparsegpt", "wanda", "magnitude"]
Split = Literal["random", "cluster", "importance"]
Gate = Literal["linear", "noisy"]
Scale = Literal["unbiased", "official"]
Router = Literal["linear", "shared", "mlp"]

LINEARS = ("blocks.**", "!**.router", "!**.router.**", "!**.rates")
"""Globs of all linear layers of the blocks, except routers (the choice of experts should not change) and the small
layers `rates` of recurrent states."""
LINEARS_BUT_EXPERTS = (*LINEARS, "!**.experts.**")
MLPS = ("blocks.*.mlp",)
NAME = "default"
"""Default name of an adapter."""
TRAIN = "next: dunes train SOURCE --from {out} --out RUN"
TRAIN_NEW = "next: dunes train SOURCE --from {out} --trainable new --out RUN"


def targets(default: str) -> Any:
    """The flag --target-modules GLOB, which selects modules; the help shows `default` as its default."""
    return tyro.conf.arg(name="target-modules", metavar="GLOB", help_behavior_hint=f"(default: {default})")


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of a change. After the change, the command prints `NEXT`, with the output folder for {out}.

    The constructor raises ValueError for a value that is not among an option's choices.
    """

    NEXT: ClassVar[str] = TRAIN
    TEXT: ClassVar[str] = ""
    """Help text of --calibration."""
    SCORED: ClassVar[bool] = False
    """True if the command's report compares the model before and after the change on the --validation text."""
    UNDO: ClassVar[str] = ""
    """Help text of --undo."""

    READERS: ClassVar[Mapping[str, Sequence[str]]] = {}
    """Maps an option to its values that need calibration text; if empty, a change with `TEXT` always needs it."""

    def __post_init__(self) -> None:
        for name, hint in get_type_hints(type(self)).items():
            if get_origin(hint) is Literal and getattr(self, name) not in (choices := get_args(hint)):
                raise ValueError(f"{name} is {getattr(self, name)!r}; expected {', '.join(choices)}")

    @property
    def reads_text(self) -> bool:
        """True if the change needs calibration text."""
        return bool(self.TEXT) and all(getattr(self, name) in values for name, values in self.READERS.items())

    def request(self) -> dict[str, Any]:
        """All options and their values, as JSON values."""
        return {field.name: _as_json(field.name, getattr(self, field.name)) for field in fields(self)}

    def changed(self) -> list[str]:
        """The flag names, without dashes, of the options whose values differ from their defaults."""
        default = type(self)()
        return [option(f.name) for f in fields(self) if getattr(self, f.name) != getattr(default, f.name)]


def _as_json(name: str, value: Any) -> Any:
    if name == "ranks":
        return [list(pair) for pair in (value.items() if isinstance(value, Mapping) else value)]
    if isinstance(value, str):
        return [value] if name == "where" else value
    return list(value) if isinstance(value, Iterable) else value


@dataclass(frozen=True, kw_only=True)
class Expand(Options):
    """Add blocks that change nothing until they are trained (LLaMA Pro), or remove them again.

    Example: dunes augment expand ~/models/llama ~/models/llama-pro

    Example: dunes augment expand --undo runs/legal ~/models/llama-again
    """

    NEXT = TRAIN_NEW
    UNDO = "Remove the new blocks, which restores the original weights bit for bit."

    blocks: Annotated[int | None, flag("N", "a quarter of the model's blocks")] = None
    """Number of new blocks, which are spread evenly."""
    after: Annotated[tuple[int, ...], flag("BLOCK", "all blocks")] = ()
    """Insert new blocks only after these blocks (indices from 0)."""


@dataclass(frozen=True, kw_only=True)
class Narrow(Options):
    """Remove the least important heads, neurons, experts and blocks for a smaller, faster and worse model.

    Continue training with dunes train --from: a few hundred steps undo much of the increase in loss.

    Example: dunes augment narrow ~/models/llama ~/models/llama-small --neurons 4096 --blocks 24
    """

    SCORED = True
    TEXT = "Text on which importance is measured."

    heads: KeepCount = None
    """Query heads to keep in each attention; grouped heads are kept or removed as complete groups."""
    neurons: KeepCount = None
    """Hidden neurons to keep in each MLP or expert."""
    experts: KeepCount = None
    """Experts to keep in each mixture."""
    blocks: KeepCount = None
    """Blocks to keep."""
    uneven: bool = False
    """Rank heads and neurons across layers; the layers then differ in size, and only dunes can open the model."""


@dataclass(frozen=True, kw_only=True)
class Prune(Options):
    """Set weights of linear layers to zero; they stay zero in training and finetuning.

    Files do not get smaller, and the model does not get faster on a CPU.

    Example: dunes augment prune ~/models/llama ~/models/llama-half

    Example: dunes augment prune ~/models/llama ~/models/llama-24 --pattern 2:4 --calibration corpus.txt
    """

    NEXT = f"{TRAIN}   trains the other weights; zeros stay zero"
    SCORED = True
    TEXT, READERS = "Text for SparseGPT and Wanda.", {"method": ("sparsegpt", "wanda")}

    method: Annotated[Pruning, flag("|".join(get_args(Pruning)))] = "sparsegpt"
    """SparseGPT changes the remaining weights to compensate; Wanda and magnitude do not."""
    sparsity: Annotated[float | None, flag("FRACTION", "0.5, or what --pattern gives")] = None
    """Fraction of each layer's weights to set to zero."""
    pattern: Annotated[str | None, flag("KEPT:GROUP", "any")] = None
    """Keep KEPT of every GROUP consecutive weights of a row (an output), such as 2:4 or 4:8."""
    where: Annotated[Where, targets("all linear layers of the blocks but routers")] = LINEARS
    """Linear layers to prune; ! excludes, the last match wins."""


@dataclass(frozen=True, kw_only=True)
class Quantize(Options):
    """Quantize the linear layers of a model, and measure the effect on its logits.

    Example: dunes augment quantize ~/models/mistral ~/models/mistral-nf4 --kind nf4

    Example: dunes augment quantize runs/project small --kind int4 --override 'blocks.0.**=int8' --group 32
    """

    NEXT = 'next: dunes generate {out} "..."   plain weights: dunes augment merge {out} PLAIN'
    SCORED = True
    TEXT, READERS = f"Text for {', '.join(CALIBRATED)}.", {"method": CALIBRATED}

    where: Annotated[Where, targets("all linear layers of the blocks but routers")] = LINEARS
    """Modules to quantize. Wildcards skip layers that are already quantized, so that several kinds can be applied
    one after another."""
    kind: Annotated[Kind, flag("|".join(get_args(Kind)))] = "nf4"
    """int8 (a scale for each row), int4 or int3 (a scale for each group of inputs), or nf4 (a scale for each block
    of 64)."""
    double: bool = False
    """With nf4, also quantize the scales, to save 0.4 bits per weight."""
    method: Annotated[
        Method | None,
        flag("|".join(get_args(Method)), "gptq for int4 and int3 if there is calibration text, else rtn"),
    ] = None
    """rtn: round to nearest. gptq: minimise the error of outputs on calibration text."""
    group: Annotated[int | None, flag("INPUTS", "64")] = None
    """Number of inputs that share a scale in int4 and int3; 0 for a complete row."""
    symmetric: bool = False
    """Omit zero points, to save 0.06 bits per weight with groups of 64."""
    act_order: bool = True
    """With gptq, round the columns with the largest inputs first."""
    override: Annotated[tuple[str, ...], flag("GLOB=KIND", "none")] = ()
    """Another kind for the modules that match GLOB, or dense to quantize none of them; the last match wins."""


@dataclass(frozen=True, kw_only=True)
class Upcycle(Options):
    """Copy each MLP of a dense model into the experts of a mixture; the outputs stay the same.

    Continue with dunes train --from so that the experts diverge. A LLaMA or Mistral becomes a Mixtral.

    Example: dunes augment upcycle ~/models/llama ~/models/mixture
    """

    experts: Count = 8
    """Experts in each layer."""
    top_k: Count = 2
    """Experts that each token is routed to."""
    granularity: Count = 1
    """Cut each MLP into this many pieces before copying; tokens are routed to complete sets of pieces."""
    drop: Annotated[float, flag("FRACTION")] = 0.0
    """Reinitialise this fraction of neurons per expert (Drop-Upcycling): higher loss at first, lower later."""
    balance: NotOffered[float] = 0.01
    """Coefficient of the load-balancing loss."""
    seed: Count = 0
    """Random seed of the routers and of --drop."""
    where: NotOffered[Where] = MLPS
    """MLPs to change."""


@dataclass(frozen=True, kw_only=True)
class Experts(Options):
    """Split each MLP of a dense model into experts, each with a part of its neurons (LLaMA-MoE).

    The result is as large as the dense model and computes less, but has a much higher loss until it is trained.

    Example: dunes augment experts ~/models/llama ~/models/llama-moe --top-k 4

    Example: dunes augment experts --undo ~/models/llama-moe ~/models/llama-again
    """

    NEXT = f"{TRAIN_NEW}   then without --trainable"
    TEXT, READERS = "Text for --split importance.", {"split": ("importance",)}
    UNDO = "Join the experts of an untrained split again, which restores the weights bit for bit."

    experts: Count = 8
    """Experts in each layer."""
    top_k: Count = 2
    """Experts that each token is routed to."""
    shared: Count = 0
    """Number of shared experts, which get the most important neurons and process every token (only with --split
    importance)."""
    split: Annotated[Split, flag("|".join(get_args(Split)))] = "random"
    """How to split: random; cluster (balanced k-means of the weights); importance (on calibration text)."""
    gate: Annotated[Gate, flag("|".join(get_args(Gate)))] = "linear"
    """linear: a router of one linear layer. noisy: a router of two layers with noise, as published."""
    scale: Annotated[Scale, flag("|".join(get_args(Scale)))] = "unbiased"
    """Factor on expert outputs. unbiased: the number of routed experts. official: this number / --top-k."""
    balance: NotOffered[float] = 0.01
    """Coefficient of the load-balancing loss."""
    seed: Count = 0
    """Random seed of the split and of the routers."""
    where: NotOffered[Where] = MLPS
    """MLPs to change."""


@dataclass(frozen=True, kw_only=True)
class Lora(Options):
    """Add an untrained low-rank adapter to linear layers. `dunes finetune` adds and trains such an adapter.

    The defaults, all linear layers and alpha 32 for any rank, follow https://thinkingmachines.ai/blog/lora/, which
    also recommends ten times the learning rate of full finetuning.
    """

    where: Where = LINEARS
    """Globs of linear layers; an embedding is selected only by its exact name."""
    rank: int = 16
    alpha: float = 32.0
    """Scaling: the adapter's output is multiplied by alpha / rank, or with `rslora` by alpha / sqrt(rank)."""
    ranks: Mapping[str, int] | Sequence[tuple[str, int]] = ()
    """Maps globs of places to ranks other than `rank`; the last glob that matches a place wins."""
    rslora: bool = False
    dora: bool = False
    init: Literal["lora", "pissa"] = "lora"
    dropout: float = 0.0
    adapter: str = NAME
    seed: int = 0
    dtype: str = "float32"
    """Dtype of the adapter; the base may have another dtype."""


VARIANTS: dict[str, Any] = {n: {n: True} for n in get_args(Variant)} | {"lora": {}, "pissa": {"init": "pissa"}}
"""Maps each variant of LoRA to the `Lora` options that select it. Each variant is also a method of finetuning."""


@dataclass(frozen=True, kw_only=True)
class LoraExperts(Options):
    """Add an untrained mixture of low-rank experts to each linear layer; outputs stay the same.

    To also train the mixture on examples, use dunes finetune --method lora-experts.

    Example: dunes augment lora-experts ~/models/llama ~/models/mixture --experts 4
    """

    NEXT = TRAIN_NEW

    where: Annotated[Where, targets("all linear layers of the blocks but routers and experts")] = (
        LINEARS_BUT_EXPERTS
    )
    """Modules that get experts; ! excludes, the last match wins."""
    router: Annotated[Router, flag("|".join(get_args(Router)))] = "linear"
    """linear: one router per linear layer. shared: one router per attention or MLP, on the input of the module's
    first layer. mlp: experts that are MLPs (MixLoRA), with plain LoRA on the other layers."""
    experts: Count = 8
    """Low-rank experts at each place; 1 is plain LoRA, without a router."""
    top_k: Count = 2
    """Experts that process each token; if equal to --experts, the mixture is dense."""
    rank: Count = 16
    """Rank of each expert."""
    alpha: Annotated[float, flag("ALPHA")] = 32.0
    """Scaling: an expert's output is multiplied by alpha / rank."""
    ranks: NotOffered[Mapping[str, int] | Sequence[tuple[str, int]]] = ()
    """The same as `Lora.ranks`."""
    dropout: NotOffered[float] = 0.0
    balance: NotOffered[float] = 0.001
    """Coefficient of the load-balancing loss."""
    adapter: NotOffered[str] = NAME
    seed: Count = 0
    """Random seed of experts and routers."""
    dtype: NotOffered[str] = "float32"


@dataclass(frozen=True, kw_only=True)
class Routing(Options):
    """Add shared experts, a selection bias or a z-loss to the mixtures of a model; its outputs stay the same."""

    where: str = "**"
    """Glob of the mixtures."""
    shared: int = 0
    """Number of new shared experts: copies of a routed expert with a zero output projection."""
    bias_rate: float = 0.0
    z_loss: float = 0.0


OPTIONS: dict[str, type[Options]] = {
    "expand": Expand,
    "experts": Experts,
    "lora": Lora,
    "lora-experts": LoraExperts,
    "narrow": Narrow,
    "prune": Prune,
    "quantize": Quantize,
    "routing": Routing,
    "upcycle": Upcycle,
}
COMMANDS = ("expand", "narrow", "prune", "quantize", "upcycle", "experts", "lora-experts")
"""Names of the changes that have a command `dunes augment NAME`."""
