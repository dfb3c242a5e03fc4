"""Options of training; importing this module does not import torch, so the command line starts quickly."""

import math
import re
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Annotated, Literal, get_args

import tyro

from dunes.flags import PARTS, REQUIRED, Copies, Family, flag, option
from dunes.runs.config import Optimization, RunConfig

SMALLEST = 10_000
"""Smallest valid --size; a user who gives a smaller value has probably forgotten the unit."""

WIDTH_STEP = 32
"""The smallest head dimension; all widths are multiples of this number."""

MIXTURES = ("mixtral", "qwen3_moe", "qwen3_next", "deepseek_v3", "gpt_oss")
"""Model families that have experts."""
EXPERTS = 8
"""Default number of experts."""
MAX_EXPERTS = 4096
"""Maximum number of experts."""
VOCABULARY = 4096
"""Default vocabulary size of the BPE tokenizer."""
Tokenization = Literal["bpe", "bytes", "chars"]

EXPERT_OPTIONS = ("experts", "experts_per_token", "shared_experts", "balancing")
NONE = ("none",)
"""The value of `trainable` in a run that trains nothing."""
OF_COMPLETION = "fim_rate", "copies"
"""Options that only line completion uses."""
OF_TRAINING = (
    *("separate_documents", "fim_rate", "dropout", "weight_decay", "steps", "batch", "context_length", "lr"),
    *("lr_factors", "optimizer", "compile", "dtype", "seed"),
)
"""Options that have no effect in a run that trains nothing."""
Balancing = Literal["loss", "bias"]


@dataclass(frozen=True, kw_only=True)
class TextData:
    sources: Annotated[tuple[str, ...], tyro.conf.Positional, flag("SOURCE", REQUIRED)] = ()
    """Files and folders of text, JSON Lines or Parquet; "stdlib" is the running Python's standard library;
    "installed" or "installed:python,go" is the code of installed packages; hf:ORG/NAME[/CONFIG][:SPLIT][@REVISION]
    is a data set of the Hub."""
    text_field: Annotated[tuple[str, ...], flag("FIELD", "text, or the messages of a conversation")] = ()
    """Fields of each record to train on; several are joined by a blank line."""
    split: Annotated[Literal["files", "tails"] | None, flag("files|tails", "files; tails of a single file")] = None
    """Validation split: complete files, or the last tenth of every file."""
    separate_documents: bool = False
    """Let no token attend to other documents in its window; by default, documents form one long text."""
    follow_links: bool = False
    """Follow symbolic links that lead outside the sources."""


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    base: Annotated[str, flag("MODEL", "a new model", name="from")] = ""
    """Continue the training of this model: a folder of any format, a name on the Hub, or smollm2."""
    trainable: Annotated[
        tuple[str, ...], flag("none|all|new|GLOB", "all; none with --complete and a model not trained by dunes")
    ] = ()
    """With --from, the parameters to train. new: those added by the last change. GLOB: those with matching names.
    none: complete lines with the unchanged model, copies and a gate."""
    family: Annotated[Family, flag("|".join(get_args(Family)))] = "arcee"
    """Model architecture."""
    parts: Annotated[tuple[str, ...], flag("PART=CHOICE|FILE.py:FUNCTION", "those of the family")] = ()
    """PART=CHOICE replaces a part of the family arcee (an unknown name lists all). FILE.py:FUNCTION is a Python
    function that builds the model."""
    experts: Annotated[int, flag("EXPERTS", "8 with a family of mixtures, else none")] = 0
    """Train a mixture of this many experts; the family becomes mixtral unless --family has experts."""
    experts_per_token: Annotated[int, flag("EXPERTS", "2")] = 0
    """Number of experts selected for each token."""
    shared_experts: Annotated[int, flag("EXPERTS", "none")] = 0
    """Number of additional experts that are used for every token."""
    balancing: Annotated[Balancing, flag("loss|bias")] = "loss"
    """Balancing of the experts' load. loss: by an auxiliary loss. bias: by a selection bias of the router
    (loss-free)."""
    size: Annotated[
        str, flag("SIZE|LAYERSxWIDTH", "chosen from --minutes or --steps, the text and this machine")
    ] = ""
    """Number of parameters, like 500k or 3m, or number of layers and hidden size, like 4x256."""
    tokenizer: Annotated[Tokenization, flag("bpe|bytes|chars")] = "bpe"
    """Tokenizer to train: byte-level BPE, bytes, or characters."""
    vocab_size: Annotated[int | None, flag("TOKENS", "4096; fewer for small texts")] = None
    """Vocabulary size of the BPE tokenizer. Texts below 0.9 MB get 512 to 2048."""


@dataclass(frozen=True, kw_only=True)
class TrainOptimization(Optimization):
    batch: Annotated[int, flag("SEQUENCES", "8 with --complete, else 16")] = 0
    """Sequences per optimizer step."""
    context_length: Annotated[
        int, flag("TOKENS", "512 with --complete, else 256; with --from 256, at most the model's")
    ] = 0
    """Maximum sequence length of the model, in tokens."""
    optimizer: Annotated[
        str | None, flag("NAME", "muon; with --from adamw, if 30M parameters or more are trained")
    ] = None
    """Optimizer (an unknown name lists all); muon trains embeddings, head and norms with AdamW."""
    lr: Annotated[float | None, flag("RATE", "muon 0.02, with --from 0.006; adamw by the model's width")] = None
    """Peak learning rate; with muon, embeddings, head and norms get half of this rate."""
    lr_factors: Annotated[tuple[str, ...], flag("GLOB=FACTOR", "none")] = ()
    """Factors of the learning rate for parameters that match globs (as in --trainable), like all=0.1 new=1."""


@dataclass(frozen=True, kw_only=True)
class Completion:  # `file_headers`: insert each file's path before its text
    complete: tyro.conf.DisallowNone[
        Annotated[bool | None, flag("", "where most of the text is source code; --no-complete: off")]
    ] = None
    """Train to complete lines from the text before and after the cursor; each file is preceded by its path."""
    fim_rate: Annotated[float, flag("RATE")] = 0.25
    """With --complete, the fraction of windows that are cut into prefix, suffix and middle."""
    copies: Annotated[Copies, flag("auto|never|only")] = "auto"
    """Complete lines by copying alone, without the model. only: always. auto: if copies get significantly more
    line ends right than the model in unseen files."""
    file_headers: Annotated[bool, tyro.conf.Suppress] = True
    dropout: Annotated[float | None, flag("P", "0.2 for repeated text; with --from its own; else 0")] = None
    """Dropout probability of a block's outputs in training. Repeated text is read more than three times."""
    weight_decay: Annotated[
        float | None, flag("RATE", "new models: 0.15 for repeated text; else 0.01, embeddings and head 0")
    ] = None
    """Weight decay of all matrices: each step multiplies them by 1 - RATE x learning rate."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig(TextData, ModelShape, Completion, TrainOptimization, RunConfig):
    """Options of training on text; `runs/autosize.py` chooses the unset options."""

    OVERRIDABLE = ("sources", "base", "corpus", "copies")
    PATHS = ("sources", "base")
    DATA = ("sources",)
    VERB = "train"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tokenizer != "bpe":
            self.refuse_unused(("vocab_size",), f"a {self.tokenizer} tokenizer has a fixed vocabulary; omit it")
        if self.size and not self.shape:
            parse_size(self.size)
        _ = self.rate_factors, self.chosen_parts  # raises for invalid ones
        if self.top_k > self.expert_count or self.expert_count > MAX_EXPERTS:
            raise ValueError(
                f"--experts-per-token is {self.top_k} and --experts {self.expert_count}; expected at most as many "
                f"per token as there are, and at most {MAX_EXPERTS}"
            )
        if not 0 <= self.fim_rate <= 1:
            raise ValueError(f"--fim-rate is {self.fim_rate}; it must be from 0 to 1")
        if not self.trains:
            self.refuse_unused(OF_TRAINING, "nothing is trained; omit it, or pass --trainable all")
        if self.complete is False:
            self.refuse_unused(OF_COMPLETION, "--no-complete does not use it; omit one of them")
        names = (*EXPERT_OPTIONS, "family", "parts", "size", "tokenizer", "vocab_size")
        shape = [name for name in names if name in self.changed()]
        if self.parts and (others := [n for n in (*EXPERT_OPTIONS, "family") if n in self.changed()]):
            raise ValueError(f"--parts and --{option(others[0])} both describe the whole model; omit one of them")
        if self.base and shape:
            raise ValueError(f"--{option(shape[0])} describes a new model, and --from continues another; omit it")

    def refuse_unused(self, names: Collection[str], reason: str) -> None:
        """Raise ValueError with `reason` if one of the options `names` is set."""
        for name in names:
            if name in self.changed():
                raise ValueError(f"--{option(name)} is {getattr(self, name)}, but {reason}")

    @property
    def trains(self) -> bool:
        """True if the run trains parameters; False if it only completes lines with `base`."""
        return self.trainable != NONE

    @property
    def origin(self) -> str:
        """Text that names the base or, for a new model, the parts or the family."""
        return self.base or " ".join(self.parts) or self.family

    @property
    def shape(self) -> tuple[int, int] | None:
        """Number of layers and width if --size has the form LAYERSxWIDTH, else None.

        Raises ValueError for 0 layers, and for a width that is not a positive multiple of WIDTH_STEP.
        """
        if (match := re.fullmatch(r"(\d{1,4})x(\d{1,6})", self.size.lower())) is None:
            return None
        depth, width = int(match[1]), int(match[2])
        if not depth or not width or width % WIDTH_STEP:
            expected = f"expected LAYERSxWIDTH with a width divisible by {WIDTH_STEP}, like 4x256"
            raise ValueError(f"--size is {self.size}; {expected}")
        return depth, width

    @property
    def rate_factors(self) -> list[tuple[str, float]]:
        """`lr_factors` as pairs (glob, factor). Raises ValueError if an entry is not GLOB=FACTOR."""
        return [_parse_factor(text) for text in self.lr_factors]

    @property
    def chosen_parts(self) -> dict[str, str] | str:
        """`parts` as a dict of choices by part, or as the name of the function that builds the model.

        Raises ValueError for an unknown part or choice, and for a function together with parts.
        """
        if len(self.parts) == 1 and ":" in self.parts[0]:
            return self.parts[0]
        chosen = dict[str, str]()
        for text in self.parts:
            name, _, choice = text.partition("=")
            if choice not in PARTS.get(name, ()) or name in chosen:
                known = ", ".join(f"{n}={'|'.join(choices)}" for n, choices in PARTS.items())
                raise ValueError(
                    f"--parts: {text!r} is {'given twice' if name in chosen else 'unknown'}; expected a choice of "
                    f"each of {known}, or FILE.py:FUNCTION alone"
                )
            chosen[name] = choice
        return chosen

    @property
    def expert_count(self) -> int:
        """Number of experts, if the model is a mixture."""
        return self.experts or EXPERTS

    @property
    def top_k(self) -> int:
        """Number of experts selected for each token, if the model is a mixture."""
        return self.experts_per_token or min(2, self.expert_count)

    @property
    def has_own_form(self) -> bool:
        """True if the model has parts that no Hugging Face config describes."""
        return bool(self.shared_experts or self.parts) or self.balancing == "bias"

    def normalized(self, asked: Collection[str] | None = None) -> "TrainConfig":
        """As in `RunConfig`. If an option of experts is set and --family is not, the family becomes mixtral.

        Raises ValueError if an option of experts is set for a --family without experts.
        """
        config = super().normalized(asked)
        options = [option(name) for name in EXPERT_OPTIONS if name in self.changed()]
        if not options or self.family in MIXTURES:
            return config
        if self.family == TrainConfig.family and "family" not in (asked or ()):
            return replace(config, family="mixtral")
        families = " or ".join(MIXTURES)
        raise ValueError(f"--{options[0]}: {self.family} has no experts; use --family {families}, or omit it")

    @property
    def with_headers(self) -> bool:
        """True if the path of each file is inserted before its text."""
        return bool(self.complete) and self.file_headers

    @property
    def about(self) -> str:
        """The run in a few words: origin of the model, and sources."""
        return f"{self.origin} on {', '.join(self.sources)}"

    @property
    def missing(self) -> str:
        """The reason why a new run cannot start with these options, in one line; "" if it can."""
        if self.trainable and not self.base:
            return "--trainable applies to --from; a new model is trained as a whole"
        return "" if self.sources else "no sources; pass files or folders to train on, stdlib or installed"


def _parse_factor(text: str) -> tuple[str, float]:
    """Parse GLOB=FACTOR into (glob, factor). Raises ValueError for other text, and for a factor of 0 or less."""
    glob, _, factor = text.rpartition("=")
    with suppress(ValueError):
        if glob and 0 < float(factor) < math.inf:
            return glob, float(factor)
    raise ValueError(f"--lr-factors: {text!r} is not GLOB=FACTOR with a positive number, like **.router=10")


def parse_size(text: str) -> int:
    """The number of parameters given by text like '3m', with units k, m and b.

    Raises ValueError for other text, and for numbers below SMALLEST.
    """
    units = {"k": 1e3, "m": 1e6, "b": 1e9}
    number, unit = text.lower()[:-1], text.lower()[-1:]
    try:
        count = int(float(number) * units[unit]) if unit in units else int(text)
    except (ValueError, OverflowError):
        count = 0
    if count < 1:
        raise ValueError(f"--size is {text!r}; expected a number of parameters like 3m or 500k")
    if count < SMALLEST:
        hint = f"; did you mean {text}m?" if text.isdigit() and count < 1000 else ""
        raise ValueError(f"--size is {text!r}, but the smallest model has {SMALLEST} parameters{hint}")
    return count
