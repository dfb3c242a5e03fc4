"""What a run is asked to do and, for training from scratch, the model that follows from it."""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields, replace
from math import log
from pathlib import Path
from types import UnionType
from typing import Any, ClassVar, TypeVar, get_args

from dunes.measure import DEVICES
from dunes.models import FAMILIES
from dunes.text import KINDS

MEASURED = ("dtype", "threads", "device")
STDLIB = "stdlib"

SMALLEST = 10_000
"""Parameters of the smallest model that a size may ask for: fewer are a unit forgotten."""

WIDTH_STEP = 32
"""What widths are multiples of: the smallest head."""

T = TypeVar("T", bound="RunConfig")


_TYPES: dict[Any, tuple[str, Callable[[Any], bool]]] = {
    int: ("a whole number below 2^63", lambda v: type(v) is int and abs(v) < 1 << 63),
    float: ("a finite number", lambda v: type(v) in (int, float) and abs(v) < 1e300),
    bool: ("true or false", lambda v: isinstance(v, bool)),
    str: ("a text", lambda v: isinstance(v, str)),
    tuple[str, ...]: ("a tuple of texts", lambda v: isinstance(v, tuple) and all(isinstance(t, str) for t in v)),
    type(None): ("none", lambda v: v is None),
}
"""What a field of each type may hold, in words and checked: a plan may come from a file that somebody edited."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """What any run is asked: how long, how much at a time, with what. Stored in the run; a resumed run keeps it.

    It ends after `steps` if given, else after `minutes`. What is None or 0 is chosen when the run begins.
    `lr` is the peak learning rate, `device` one of DEVICES, and `matmul` the machine's measured rate of matrix
    products in FLOP/s.
    """

    context: int = 0
    batch: int = 0
    steps: int | None = None
    minutes: float = 15.0
    seed: int = 0
    lr: float | None = None
    device: str | None = None
    dtype: str | None = None
    threads: int | None = None
    matmul: float | None = None

    LEAST: ClassVar[dict[str, float]] = {
        "context": 2, "batch": 1, "minutes": 0.01, "steps": 1, "threads": 1, "size": 1, "vocab": 1, "lr": 1e-12,
        "depth": 1, "width": 1,
    }  # fmt: skip
    CHOSEN: ClassVar[tuple[str, ...]] = ("size", "depth", "width", "context", "batch")
    """Fields in which 0 leaves it open."""
    KNOWN: ClassVar[dict[str, Collection[str]]] = {"device": DEVICES}
    MAY_CHANGE: ClassVar[tuple[str, ...]] = ("steps", "minutes", *MEASURED)
    """What a run may change when it goes on. All else is built into its weights or its order of data."""
    PATHS: ClassVar[tuple[str, ...]] = ()
    """Fields that name files and folders."""
    VERB: ClassVar[str] = ""

    def __post_init__(self) -> None:
        """Raises ValueError for what cannot be done, before anything is."""
        there = {f.name for f in fields(self)}
        for f in fields(self):
            value, types = getattr(self, f.name), get_args(f.type) if isinstance(f.type, UnionType) else (f.type,)
            if not any(_TYPES[t][1](value) for t in types):
                raise ValueError(f"--{option(f.name)} is {value!r:.60}; it must be {_TYPES[types[0]][0]}")
        for name in there & self.LEAST.keys():
            value, minimum = getattr(self, name), self.LEAST[name]
            left_open = value is None or (value == 0 and name in self.CHOSEN)
            if not left_open and not value >= minimum:
                raise ValueError(f"--{option(name)} is {value}; it must be at least {minimum}")
        for name, known in self.KNOWN.items():
            value = getattr(self, name)
            if value is not None and value not in known:
                raise ValueError(f"--{option(name)} is {value!r}; it must be one of {', '.join(known)}")

    @property
    def seconds(self) -> float:
        """How long it may take, if it does not end by steps."""
        return self.minutes * 60

    @property
    def about(self) -> str:
        """What the run is, in words."""
        return ""

    @property
    def lacks(self) -> str:
        """What a new run cannot do without, in words; empty if it is all there."""
        return ""

    def placed(self: T) -> T:
        """The same with whole paths, so that the run can go on from another working directory."""
        found = {name: getattr(self, name) for name in self.PATHS}
        told: dict[str, Any] = {
            k: _whole(v) if isinstance(v, str) else (*map(_whole, v),) for k, v in found.items()
        }
        return replace(self, **told)

    def changed(self) -> set[str]:
        """The fields that are not at their defaults."""
        return {f.name for f in fields(self) if getattr(self, f.name) != f.default}

    def differences(self, earlier: "RunConfig", asked: Collection[str] | None = None) -> dict[str, str]:
        """What earlier terms say differently, in words by field; of the fields `asked` for, if given."""
        found = {f.name: (getattr(earlier, f.name), getattr(self, f.name)) for f in fields(self)}
        return {
            name: f"{name} was {was!r}, now {now!r}"
            for name, (was, now) in found.items()
            if was != now and name != "matmul" and (asked is None or name in asked)
        }

    @classmethod
    def of(cls: type[T], stored: Mapping[str, Any]) -> T:
        """From their JSON. Raises ValueError if that is of another kind of run."""
        if not isinstance(stored, Mapping):
            raise ValueError(f"holds no plan, but a {type(stored).__name__}")
        if odd := stored.keys() - {f.name for f in fields(cls)}:
            raise ValueError(
                f"holds a run of another kind, or of another version: it has {', '.join(sorted(odd))}"
            )
        told: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in stored.items()}
        return cls(**told)


def _whole(name: str) -> str:
    """The whole path of what is there; another name, as of the standard library or on the Hub, as it is."""
    path = Path(name).expanduser()
    return str(path.absolute()) if name not in ("", STDLIB) and path.exists() else name


def option(field: str) -> str:
    """How a field is spelled on the command line."""
    return field.replace("_", "-")


@dataclass(frozen=True, kw_only=True)
class TrainConfig(RunConfig):
    """What training from scratch is asked (what is left open: `runs/autosize.py`).

    `size` counts parameters; `depth` layers of `width` say the shape instead, and the size follows.
    Of files of records the fields `text_field` are learned, or what is text in them. `split` is how text is held
    out, "files" or "tails"; where it is open, the tails if there is a single file.
    """

    sources: tuple[str, ...] = ()
    text_field: tuple[str, ...] = ()
    follow_links: bool = False
    family: str = "arcee"
    tokenizer: str = "bpe"
    vocab: int = 4096
    size: int = 0
    depth: int = 0
    width: int = 0
    split: str | None = None

    KNOWN: ClassVar[dict[str, Collection[str]]] = {
        **RunConfig.KNOWN,
        "family": FAMILIES,
        "tokenizer": KINDS,
        "split": ("files", "tails"),
    }
    MAY_CHANGE = ("sources", "corpus", *RunConfig.MAY_CHANGE)
    PATHS = ("sources",)
    VERB = "train"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.vocab != TrainConfig.vocab and self.tokenizer != "bpe":
            raise ValueError(
                f"--vocab is {self.vocab}, and {self.tokenizer} are as many as there are; leave it out"
            )
        if self.width % WIDTH_STEP or bool(self.width) != bool(self.depth):
            expected = f"at least one layer and a width that {WIDTH_STEP} divides are expected, like 4x256"
            raise ValueError(f"--size is {self.depth}x{self.width}; {expected}")

    @property
    def about(self) -> str:
        return f"{self.family} on {', '.join(self.sources)}"

    @property
    def lacks(self) -> str:
        return "" if self.sources else "no sources; name files or folders to learn from, or stdlib"


def parse_size(text: str) -> int:
    """'3m' is three million parameters; k, m and b are understood.

    Raises ValueError for anything else, and below SMALLEST, where a unit was left out.
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
        raise ValueError(f"--size is {text!r}, and a model has at least {SMALLEST} parameters{hint}")
    return count


def size_fields(text: str) -> dict[str, int]:
    """The fields of a plan that a size sets: its parameters ('3m'), or its depth and width ('4x256')."""
    if shape := re.fullmatch(r"(\d{1,4})x(\d{1,6})", text.lower()):
        return {"depth": int(shape[1]), "width": int(shape[2])}
    return {"size": parse_size(text)}


def config_for(plan: TrainConfig, vocab: int) -> Any:
    """The family's config of the plan's shape, or whose parameters, embeddings included, come nearest to its size.

    Widths are 32 or multiples of 64, and of those that come near, the one whose depth is
    nearest to a layer for each 64 of width.
    """

    from_size = FAMILIES[plan.family].Config.from_size
    if plan.depth:
        return from_size(vocab, plan.width, plan.depth, plan.context)

    def depth(dim: int) -> int:
        return max(2, round((plan.size - vocab * dim) / (12 * dim * dim)))

    def cost(dim: int) -> float:
        count = vocab * dim + 12 * dim * dim * depth(dim)
        return 5 * abs(log(count / plan.size)) + abs(log(dim / depth(dim) / 64))

    dim = min([32, *range(64, 8193, 64)], key=cost)
    return from_size(vocab, dim, depth(dim), plan.context)
