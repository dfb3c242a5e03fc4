"""Options of finetuning, read by the command line without importing torch."""

from dataclasses import dataclass
from typing import Annotated, Literal, get_args

import tyro

from dunes.augment.options import Router
from dunes.flags import REQUIRED, flag
from dunes.runs.config import Optimization, RunConfig

Method = Literal["full", "lora", "rslora", "dora", "pissa", "qlora", "qdora", "qlora-int8", "lora-experts"]
TemplateName = Literal["plain", "alpaca", "alpaca-newline", "mistral", "llama2", "llama3", "chatml"]
TrainOn = Literal["answers", "all"]


@dataclass(frozen=True, kw_only=True)
class ExampleData:
    model: Annotated[str, tyro.conf.Positional, flag("MODEL", REQUIRED)] = ""
    """Model folder, or a model name on the Hub."""
    data: Annotated[str, flag("FILE|FOLDER", REQUIRED)] = ""
    """JSON, JSON Lines or Parquet (Alpaca, messages, ShareGPT, UltraChat, prompt and completion, text), plain
    text, or a folder of such files."""
    text_field: Annotated[tuple[str, ...], flag("FIELD", "detected")] = ()
    """Fields of each record to train on as plain text; several are joined by a blank line."""
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
    """Files and folders of text like the base model was trained on, to measure forgetting."""
    max_truncated: Annotated[float, flag("FRACTION")] = 0.05
    """Refuse data if a larger fraction of the examples would be truncated."""
    packing: Annotated[bool, flag("", "packed")] = True
    """Put one example into each row instead of packing several."""


@dataclass(frozen=True, kw_only=True)
class Adapter:
    method: Annotated[Method, flag("|".join(get_args(Method)))] = "lora"
    """Finetuning method: an adapter beside the frozen (or quantized) base, or all weights (full)."""
    target_modules: Annotated[
        tuple[str, ...], flag("GLOB", "all linear layers of the blocks but routers; full: all weights")
    ] = ()
    """Modules that get an adapter or, with full, are trained; new: modules from the last change; ! excludes, the
    last match wins."""
    rank: Annotated[int, flag("RANK")] = 16
    """Rank of the adapter (r)."""
    alpha: Annotated[float, flag("ALPHA")] = 32.0
    """Scaling: the adapter's output is multiplied by alpha / rank (rslora: alpha / sqrt(rank))."""
    ranks: Annotated[tuple[str, ...], flag("GLOB=RANK", "none")] = ()
    """Ranks of some modules that differ from --rank."""
    dropout: Annotated[float, flag("P")] = 0.0
    """Dropout probability of the adapter's input."""
    experts: Annotated[int, flag("EXPERTS")] = 8
    """With lora-experts: low-rank experts at each linear layer, each of --rank."""
    experts_per_token: Annotated[int, flag("EXPERTS")] = 2
    """With lora-experts: experts that compute each token."""
    router: Annotated[Router, flag("|".join(get_args(Router)))] = "linear"
    """With lora-experts, linear: a router for each linear layer; shared: one for each attention and MLP; mlp:
    experts that are MLPs (MixLoRA), with plain LoRA on the other layers."""


@dataclass(frozen=True, kw_only=True)
class FinetuneOptimization(Optimization):
    minutes: Annotated[float, flag("MINUTES", "by --epochs")] = 0.0
    """Stop after this many minutes instead of --epochs."""
    steps: Annotated[int | None, flag("STEPS", "by --epochs")] = None
    """Stop after this many optimizer steps instead of --epochs."""
    batch: Annotated[int, flag("ROWS", "chosen from the data")] = 0
    """Rows per optimizer step."""
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
class FinetuneConfig(ExampleData, Adapter, FinetuneOptimization, RunConfig):
    """Options of a finetuning run, which ends after `steps` if set, else after `minutes`, else after `epochs`."""

    AUTO = (*RunConfig.AUTO, "minutes")
    PATHS = ("model", "data", "val_data", "forgetting_data")
    # Paths may change, since the contents of base and examples are compared.
    OVERRIDABLE = (*RunConfig.OVERRIDABLE, *PATHS)
    VERB = "finetune"

    @property
    def about(self) -> str:
        return f"{self.method} of {self.model} on {self.data}"

    @property
    def missing(self) -> str:
        if self.method == "lora-experts" and self.experts_per_token > self.experts:
            return f"--experts-per-token is {self.experts_per_token}, more than --experts, {self.experts}"
        missing = [name for name in ("model", "data") if not getattr(self, name)]
        return f"the {missing[0]} is missing; dunes finetune MODEL --data FILE --out RUN" if missing else ""

    @property
    def stops_by_time(self) -> bool:
        return self.steps is None and self.minutes > 0

    @property
    def pairs(self) -> list[tuple[str, int]]:
        """`ranks` as pairs of glob and rank. Raises ValueError for anything but GLOB=RANK."""
        pairs = []
        for each in self.ranks:
            glob, _, rank = each.rpartition("=")
            if not (glob and rank.isdigit()):
                raise ValueError(f"--ranks {each}: expected GLOB=RANK, such as blocks.*.mlp.**=8")
            pairs.append((glob, int(rank)))
        return pairs
