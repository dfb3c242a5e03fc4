"""Options of finetuning; importing this module does not import torch, so the command line starts quickly."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

import tyro

from dunes.augment.options import VARIANTS, Router, Variant
from dunes.flags import REQUIRED, flag, parse_fields
from dunes.runs.config import Optimization, RunConfig, adamw_rate
from dunes.runs.objectives import OBJECTIVES, Objective, Preference

Method = Literal["full", Variant, "qlora", "qdora", "qlora-int8", "lora-experts"]
TemplateName = Literal["plain", "alpaca", "alpaca-newline", "mistral", "llama2", "llama3", "chatml"]
TrainOn = Literal["answers", "all"]

EXPERTS = {"router": "router", "experts": "experts", "experts_per_token": "top_k"}
"""Options of --method lora-experts, mapped to their names in the change `lora-experts`."""

TOKENS = 4096
"""Tokens per step with the default batch size."""
STEPS = 32
"""Minimum steps per epoch with the default batch size, since LoRA learns less with large batches."""

MAX_ADAPTER_LR = 0.005
"""Largest default learning rate of adapters."""


@dataclass(frozen=True)
class MethodSpec:
    """Specification of a finetuning method: how it adds an adapter to the base, and how it quantizes the base.

    `adapter` has the options of the change named `change`; None if the method trains the base itself. `quantize`
    has the options of quantization; None if the base is not quantized.
    """

    adapter: Mapping[str, Any] | None = None
    quantize: Mapping[str, Any] | None = None
    change: str = "lora"

    @property
    def saves_model(self) -> bool:
        """True if a run saves the complete model instead of an adapter in PEFT's format."""
        return self.adapter is None or self.change != "lora"


_NF4 = {"kind": "nf4", "double": True}
METHODS: dict[str, MethodSpec] = {
    "full": MethodSpec(),
    **{name: MethodSpec(options) for name, options in VARIANTS.items()},
    "qlora": MethodSpec({}, _NF4),
    "qdora": MethodSpec(VARIANTS["dora"], _NF4),
    "qlora-int8": MethodSpec({}, {"kind": "int8"}),
    "lora-experts": MethodSpec({}, change="lora-experts"),
}


@dataclass(frozen=True, kw_only=True)
class ExampleData:
    model: Annotated[str, tyro.conf.Positional, flag("MODEL", REQUIRED)] = ""
    """Model folder, or a model name on the Hub."""
    data: Annotated[str, flag("FILE|FOLDER|hf:NAME", REQUIRED)] = ""
    """JSON, JSON Lines or Parquet (Alpaca, Dolly, question and answer, messages, ShareGPT, UltraChat, OASST's
    message trees, prompt and completion, text; preferences: chosen and rejected), plain text, a folder of such
    files, or hf:ORG/NAME[/CONFIG][:SPLIT][@REVISION], a data set of the Hub."""
    text_field: Annotated[tuple[str, ...], flag("FIELD", "detected")] = ()
    """Fields of each record to train on as plain text; several are joined by a blank line."""
    fields: Annotated[tuple[str, ...], flag("OURS=THEIRS,...", "named as in the formats of --data")] = ()
    """Renamed fields of the data: with prompt=question,completion=answer, the field question is read as prompt,
    and answer as completion."""
    follow_links: bool = False
    """Follow symbolic links that lead outside the data folder."""
    template: Annotated[
        TemplateName | None, flag("|".join(get_args(TemplateName)), "the model's own, or by --data")
    ] = None
    """Chat template; it is saved with the model."""
    train_on: Annotated[TrainOn, flag("answers|all")] = "answers"
    """Compute the loss on answers only, or on prompts as well."""
    val_data: Annotated[str, flag("FILE|FOLDER", "a part of --data")] = ""
    """Examples for validation."""
    val_fraction: Annotated[
        float | None, flag("FRACTION", "a tenth, or enough for 20,000 tokens, at most a fifth")
    ] = None
    """Fraction of --data used for validation."""
    forgetting_data: Annotated[
        tuple[str, ...], flag("SOURCE", "the validation text of the base's own training")
    ] = ()
    """Files and folders with text like the base model's training text, to measure forgetting."""
    max_truncated: Annotated[float, flag("FRACTION")] = 0.05
    """Refuse data if a larger fraction of the examples would be truncated."""
    packing: Annotated[bool, flag("", "packed")] = True
    """--no-packing puts one example into each row instead of packing several."""


@dataclass(frozen=True, kw_only=True)
class Adapter:
    method: Annotated[Method, flag("|".join(get_args(Method)))] = "lora"
    """Finetuning method. full: train all weights. The others freeze the base (those with q also quantize it) and
    train an adapter."""
    target_modules: Annotated[
        tuple[str, ...], flag("GLOB", "all linear layers of the blocks but routers; full: all weights")
    ] = ()
    """Globs of modules that get an adapter (with full: that are trained). new: the modules of the last change.
    !GLOB: excluded modules. The last match wins."""
    rank: Annotated[int, flag("RANK")] = 16
    """Rank of the adapter (r)."""
    alpha: Annotated[float, flag("ALPHA")] = 32.0
    """Scaling: the adapter's output is multiplied by alpha / rank (rslora: alpha / sqrt(rank))."""
    ranks: Annotated[tuple[str, ...], flag("GLOB=RANK", "none")] = ()
    """Ranks for modules that match a glob, instead of --rank."""
    dropout: Annotated[float, flag("P")] = 0.0
    """Dropout probability of the adapter's input."""
    experts: Annotated[int, flag("EXPERTS")] = 8
    """With lora-experts: number of low-rank experts at each linear layer; each has rank --rank."""
    experts_per_token: Annotated[int, flag("EXPERTS")] = 2
    """With lora-experts: number of experts selected for each token."""
    router: Annotated[Router, flag("|".join(get_args(Router)))] = "linear"
    """With lora-experts. linear: a router for each linear layer. shared: a router for each attention and each MLP.
    mlp: experts that are MLPs, and plain LoRA on the other layers (as in MixLoRA)."""


@dataclass(frozen=True, kw_only=True)
class FinetuneOptimization(Optimization):
    minutes: Annotated[float, flag("MINUTES", "by --epochs")] = 0.0
    """Stop after this many minutes instead of --epochs."""
    steps: Annotated[int | None, flag("STEPS", "by --epochs")] = None
    """Stop after this many optimizer steps instead of --epochs."""
    batch: Annotated[int, flag("ROWS", "chosen from the data")] = 0
    """Rows per optimizer step; for preferences, pairs of rows."""
    context_length: Annotated[
        int, flag("TOKENS", "a power of two from 128 to 2048 that fits the longest example")
    ] = 0
    """Tokens in a row; longer examples are truncated."""
    lr: Annotated[float | None, flag("RATE", "chosen from the method and the model's width")] = None
    """Peak learning rate."""
    epochs: Annotated[float, flag("EPOCHS")] = 3.0
    """Number of passes over the data."""
    micro_batch: Annotated[int, flag("ROWS", "as many as fit into memory")] = 0
    """Rows per forward and backward pass; gradients are accumulated over --batch."""


@dataclass(frozen=True, kw_only=True)
class FinetuneConfig(ExampleData, Adapter, Preference, FinetuneOptimization, RunConfig):
    """Options of a finetuning run. The run ends after `steps` if set, else after `minutes` if set, else after
    `epochs`."""

    AUTO = (*RunConfig.AUTO, "minutes")
    PATHS = ("model", "data", "val_data", "forgetting_data")
    DATA = ("data", "val_data", "forgetting_data")
    # Paths may change, since a resumed run compares the contents of base and examples.
    OVERRIDABLE = PATHS
    VERB = "finetune"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.field_names and self.text_field:
            raise ValueError("--fields is for records, and --text-field for plain text; omit one of them")
        if self.compile == "on" and self.counted != "tokens":
            raise ValueError(f"--compile on: the loss of {self.counted} is not compiled; omit it")

    @property
    def field_names(self) -> dict[str, str]:
        """`fields` as a dict from the field names in the formats of dunes to those in the data. Raises ValueError
        if an entry is not OURS=THEIRS."""
        return parse_fields(self.fields)

    @property
    def spec(self) -> MethodSpec:
        """The entry of `method` in METHODS."""
        return METHODS[self.method]

    @property
    def goal(self) -> Objective:
        """The entry of `objective` in OBJECTIVES."""
        return OBJECTIVES[self.objective]

    @property
    def about(self) -> str:
        """The run in a few words: method, model and data."""
        return f"{self.method} of {self.model} on {self.data}"

    @property
    def missing(self) -> str:
        """The reason why a new run cannot start with these options, in one line; "" if it can."""
        if self.method == "lora-experts" and self.experts_per_token > self.experts:
            return f"--experts-per-token is {self.experts_per_token}, more than --experts, {self.experts}"
        missing = [name for name in ("model", "data") if not getattr(self, name)]
        return f"the {missing[0]} is missing; dunes finetune MODEL --data FILE --out RUN" if missing else ""

    @property
    def counted(self) -> str:
        """The unit of the objective's count."""
        return self.goal.counted

    @property
    def stops_by_time(self) -> bool:
        """True if `minutes` ends the run, not `steps`."""
        return self.steps is None and self.minutes > 0

    @property
    def pairs(self) -> list[tuple[str, int]]:
        """`ranks` as pairs (glob, rank). Raises ValueError if an entry does not have the form GLOB=RANK."""
        pairs = []
        for each in self.ranks:
            glob, _, rank = each.rpartition("=")
            if not (glob and rank.isdigit()):
                raise ValueError(f"--ranks {each}: expected GLOB=RANK, such as blocks.*.mlp.**=8")
            pairs.append((glob, int(rank)))
        return pairs


def unused_options(config: FinetuneConfig, asked: Collection[str]) -> dict[str, str]:
    """The options in `asked` that have no effect; the values are the flags that ignore them, like "--method
    full"."""
    others = () if config.spec.adapter is not None else ("rank", "alpha", "ranks", "dropout")
    others = (*others, *(EXPERTS if config.spec.change != "lora-experts" else ()))
    unused = dict.fromkeys(others, f"--method {config.method}")
    unused |= dict.fromkeys(config.goal.unused, f"--objective {config.objective}")
    return {name: reason for name, reason in unused.items() if name in asked}


def learning_rate(config: FinetuneConfig, width: int) -> float:
    """The configured learning rate, or the default for a model of this width.

    For full finetuning, the default is `adamw_rate`. For adapters, the default is 0.7 times the power law of
    https://thinkingmachines.ai/blog/lora/, but at most MAX_ADAPTER_LR, above which the validation loss rises
    during training. The default for adapters is then divided by the adapter's scale relative to LoRA with alpha
    32, since the scale multiplies updates of `B`. "Learning rates of finetuning" in docs/log/finetuning.md gives
    results for 100 to 5,000 steps, and the limits of these defaults. Both defaults are multiplied by the
    objective's `lr_scale`. Full finetuning with dpo thus gets 1e-6 at a width of 4,096, as in
    https://arxiv.org/abs/2305.18290.
    """
    if config.lr is not None:
        return config.lr
    part = config.goal.lr_scale
    if config.spec.adapter is None:
        return part * adamw_rate(width)
    adapter_lr: float = part * min(3.5e-4 * (2000 / width) ** 0.78, MAX_ADAPTER_LR)
    scale = config.alpha / 32 * (config.rank**0.5 if config.spec.adapter.get("rslora") else 1.0)
    return max(adapter_lr / scale, config.MINIMUM["lr"])


def choose_batch(config: FinetuneConfig, context: int, rows_per_epoch: int) -> int:
    """The configured batch size. The default gives about TOKENS tokens per step and at least STEPS steps per
    epoch."""
    return config.batch or max(1, min(TOKENS // context, rows_per_epoch // STEPS))


def choose_steps(config: FinetuneConfig, rows_per_epoch: int, batch: int) -> int | None:
    """The number of steps, or None if the run ends after --minutes."""
    if config.stops_by_time:
        return None
    return config.steps or max(1, round(config.epochs * rows_per_epoch / batch))
