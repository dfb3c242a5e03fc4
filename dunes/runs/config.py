"""Options of every run; the command line takes its flags, their defaults and their help from these classes.

This module does not import torch.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args, get_origin

import tyro

from dunes.flags import HUB, Device, Dtype, flag, is_path, option
from dunes.units import plural

RECORDED = ("float32_products", "matmul", "rate")
"""Config fields that record measurements of the machine at the start of the run."""

Compile = Literal["auto", "on", "off"]
T = TypeVar("T", bound="RunConfig")


def adamw_rate(width: int) -> float:
    """Default learning rate of AdamW for training all weights of a model of this width.

    The rate is a power law through two points: Alpaca's 2e-5 at width 4,096
    (https://github.com/tatsu-lab/stanford_alpaca) and the best rate of our sweep, 1e-3 at width 192
    (docs/log/finetuning.md, "LoRA against full").
    """
    rate: float = 2e-5 * (4096 / width) ** 1.28
    return rate


@dataclass(frozen=True, kw_only=True)
class Optimization:  # options set to None or 0 are chosen at the start of the run
    minutes: Annotated[float, flag("MINUTES")] = 15.0
    """Stop after this many minutes."""
    steps: Annotated[int | None, flag("STEPS", "by --minutes")] = None
    """Stop after this many optimizer steps instead of --minutes."""
    batch: int = 0  # the subclasses describe this field and the next two
    context_length: int = 0
    lr: float | None = None
    seed: Annotated[int, flag("SEED")] = 0
    """Random seed."""


@dataclass(frozen=True, kw_only=True)
class Hardware:
    # Options that are None are chosen for this machine. `float32_products` is true if products of bfloat16 weights
    # are computed in float32. `matmul` is the FLOP/s of matrix products, and `rate` is the estimated tokens/s.
    device: Annotated[Device | None, flag("cpu|cuda|mps", "the fastest available")] = None
    """Device to train on."""
    compile: Annotated[Compile, flag("auto|on|off")] = "auto"
    """Compile the loss in the first step; `auto` does so for runs of 13 minutes and more on a CPU."""
    dtype: Annotated[Dtype | None, flag("float32|bfloat16|float16", "bfloat16 where it is fast")] = None
    """Dtype of matrix products; weights and optimizer state are float32."""
    threads: Annotated[int | None, flag("THREADS", "OMP_NUM_THREADS, or the cores of this machine")] = None
    """Number of threads."""
    float32_products: Annotated[bool | None, tyro.conf.Suppress] = None
    matmul: Annotated[float | None, tyro.conf.Suppress] = None
    rate: Annotated[float | None, tyro.conf.Suppress] = None


@dataclass(frozen=True, kw_only=True)
class RunOptions:  # `asked`: the config fields that the user set; resuming compares only these
    resume: bool = False
    """Resume the run in --out from its last state, with the options stored there."""
    override: Annotated[tuple[str, ...], flag("FIELD", "none")] = ()
    """Fields that may differ from the stored options on resuming, in addition to length and hardware: corpus,
    sources, ..."""
    dry_run: bool = False
    """Report the planned run and its memory, then exit."""
    strict: bool = False
    """Stop when saving the training state fails, and refuse to resume past a damaged state."""
    profile: bool = False
    """Print a breakdown of the wall-clock time at the end."""
    track: Annotated[tyro.conf.UseAppendAction[tuple[str, ...]], flag("TRACKER", "none")] = ()
    """Also show the metrics in tensorboard, wandb, trackio or mlflow, offline; may be repeated."""
    rank_timeout: Annotated[float, flag("MINUTES")] = 30.0
    """Under torchrun: end the run if a process does not answer for this long."""
    shard: Annotated[Literal["all", "node"], flag("all|node")] = "all"
    """Under torchrun: shard weights over all processes, or within each machine (less traffic, more memory)."""
    asked: Annotated[Collection[str] | None, tyro.conf.Suppress] = None
    plan: Annotated[Path | None, tyro.conf.Suppress] = None
    """The picture of `dunes train --plan`; None for any other run."""


@dataclass(frozen=True, kw_only=True)
class RunConfig(Optimization, Hardware):
    """Options of a run, saved in its folder. The run ends after `steps` if set, else after `minutes`."""

    MINIMUM: ClassVar[dict[str, float]] = {
        "context_length": 2, "batch": 1, "minutes": 0.01, "steps": 1, "threads": 1, "vocab_size": 1, "lr": 1e-12,
        "rank": 1, "alpha": 1e-12, "epochs": 1e-3, "micro_batch": 1, "val_fraction": 0, "max_truncated": 0,
        "experts": 1, "experts_per_token": 1, "shared_experts": 0, "beta": 1e-12, "label_smoothing": 0,
        "dropout": 0, "weight_decay": 0,
    }  # fmt: skip
    BELOW: ClassVar[dict[str, float]] = {"dropout": 1, "label_smoothing": 0.5}
    AUTO: ClassVar[tuple[str, ...]] = ("context_length", "batch", "micro_batch", "experts", "experts_per_token")
    """Fields whose value is chosen automatically if 0."""
    FREE: ClassVar[tuple[str, ...]] = ("steps", "minutes", "compile", "dtype", "threads", "device")
    """Fields that may change when resuming."""
    OVERRIDABLE: ClassVar[tuple[str, ...]] = ()
    """Fields that may change on resuming if listed in --override. Fields in neither tuple affect the weights or
    the data's order."""
    PATHS: ClassVar[tuple[str, ...]] = ()
    """Fields whose values are paths."""
    DATA: ClassVar[tuple[str, ...]] = ()
    """Fields whose values may name data sets of the Hub."""
    VERB: ClassVar[str] = ""

    def __post_init__(self) -> None:
        """Raises ValueError for an invalid value."""
        for f in fields(self):
            value, minimum = getattr(self, f.name), self.MINIMUM.get(f.name)
            if value is not None and (choices := _choices(f.type)) and value not in choices:
                raise ValueError(f"--{option(f.name)} is {value!r:.60}; it must be one of {', '.join(choices)}")
            chosen_later = value is None or (value == 0 and f.name in self.AUTO)
            limit = self.BELOW.get(f.name, math.inf)
            if minimum is not None and not chosen_later and not minimum <= value < limit:
                expected = f"it must be at least {minimum}, and below {limit}"
                raise ValueError(f"--{option(f.name)} is {value}; {expected}")

    @property
    def length(self) -> str:
        """The length of the run, like "100 steps"."""
        return plural(self.steps, "step") if self.steps else plural(self.minutes, "minute")

    @property
    def seconds(self) -> float:
        """Time limit in seconds, for a run without `steps`."""
        return self.minutes * 60

    @property
    def about(self) -> str:
        """A short description of the run."""
        return ""

    @property
    def counted(self) -> str:
        """The items over which a step's loss is averaged, as a plural noun."""
        return "tokens"

    @property
    def missing(self) -> str:
        """Message about a missing required option; empty if all required options are set."""
        return ""

    def normalized(self: T, asked: Collection[str] | None = None) -> T:
        """The config with absolute paths, so that the run can also be resumed from another working directory.

        `asked` are the options set by the user. Raises ValueError if these options contradict each other.
        """
        return self.mapped(self.PATHS, _absolute)

    def mapped(self: T, names: Sequence[str], change: Callable[[str], str]) -> T:
        """The config with `change` applied to fields that are text, or tuples of text."""
        values: dict[str, Any] = {name: getattr(self, name) for name in names}
        for name, value in values.items():
            values[name] = tuple(map(change, value)) if isinstance(value, tuple) else change(value)
        return replace(self, **values)

    def changed(self) -> set[str]:
        """Names of fields that differ from their defaults."""
        return {f.name for f in fields(self) if getattr(self, f.name) != f.default}

    def differences(self, earlier: "RunConfig", asked: Collection[str] | None = None) -> dict[str, str]:
        """Descriptions of the fields that differ from an earlier config, by name; with `asked`, only these fields
        are compared. A data set of the Hub without a revision is the one of the earlier config."""
        values = {f.name: (getattr(earlier, f.name), getattr(self, f.name)) for f in fields(self)}
        return {
            name: f"{name} was {_describe(was)}, now {_describe(now)}"
            for name, (was, now) in values.items()
            if not _is_same(was, now) and name not in RECORDED and (asked is None or name in asked)
        }

    @classmethod
    def of(cls: type[T], stored: Mapping[str, Any]) -> T:
        """The config read from its JSON object. Raises ValueError for a config of another kind of run."""
        if unknown := stored.keys() - {f.name for f in fields(cls)}:
            raise ValueError(f"contains a run of another kind or version (fields {', '.join(sorted(unknown))})")
        values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in stored.items()}
        return cls(**values)


def _choices(annotation: Any) -> tuple[str, ...]:
    """The values of the Literal in an annotation; empty if the annotation has no Literal."""
    parts = get_args(annotation)
    return parts if get_origin(annotation) is Literal else tuple(c for part in parts for c in _choices(part))


def _is_same(was: Any, now: Any) -> bool:
    if isinstance(was, tuple) and isinstance(now, tuple):
        return len(was) == len(now) and all(map(_is_same, was, now))
    return bool(was == now) or (str(now).startswith(HUB) and str(was).startswith(f"{now}@"))


def _describe(value: Any) -> str:
    return (", ".join(map(repr, value)) or "not set") if isinstance(value, tuple) else repr(value)


def _absolute(name: str) -> str:
    """The absolute path of an existing file or folder; any other name, such as a Hub name, stays unchanged."""
    path = Path(name).expanduser()
    return str(path.absolute()) if name and is_path(name) and path.exists() else name
