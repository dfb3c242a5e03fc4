"""What a run is asked to do and, for training from scratch, the model that follows from it."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from math import log
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from dunes.models import FAMILIES
from dunes.text import KINDS

MEASURED = ("dtype", "threads")
STDLIB = "stdlib"

T = TypeVar("T", bound="Terms")


@dataclass(frozen=True, kw_only=True)
class Terms:
    """What any run is asked: how long, how much at a time, with what. Stored in the run; a resumed run keeps it.

    It ends after `steps` if given, else after `minutes`. What is None or 0 is chosen when the run begins.
    `matmul` is the machine's measured rate of matrix products in FLOP/s.
    """

    context: int = 0
    batch: int = 0
    steps: int | None = None
    minutes: float = 15.0
    seed: int = 0
    dtype: str | None = None
    threads: int | None = None
    matmul: float | None = None

    LEAST: ClassVar[dict[str, float]] = {
        "context": 2, "batch": 1, "minutes": 0.01, "steps": 1, "threads": 1, "size": 1, "vocab": 1,
    }  # fmt: skip
    CHOSEN: ClassVar[tuple[str, ...]] = ("size", "context", "batch")
    """Fields in which 0 leaves it open."""
    KNOWN: ClassVar[dict[str, Collection[str]]] = {}
    MAY_CHANGE: ClassVar[tuple[str, ...]] = ("steps", "minutes", *MEASURED)
    """What a run may change when it goes on. All else is built into its weights or its order of data."""
    PATHS: ClassVar[tuple[str, ...]] = ()
    """Fields that name files and folders."""
    VERB: ClassVar[str] = ""

    def __post_init__(self) -> None:
        """Raises ValueError for what cannot be done, before anything is."""
        there = {f.name for f in fields(self)}
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

    def differences(self, earlier: "Terms", asked: Collection[str] | None = None) -> dict[str, str]:
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
        if odd := stored.keys() - {f.name for f in fields(cls)}:
            raise ValueError(f"a run of another kind, or of another version: it has {', '.join(sorted(odd))}")
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
class Plan(Terms):
    """What training from scratch is asked; `size` counts parameters (what is left open: `runs/dial.py`).

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
    split: str | None = None

    KNOWN: ClassVar[dict[str, Collection[str]]] = {
        "family": FAMILIES,
        "tokenizer": KINDS,
        "split": ("files", "tails"),
    }
    MAY_CHANGE = ("sources", "corpus", *Terms.MAY_CHANGE)
    PATHS = ("sources",)
    VERB = "train"

    @property
    def about(self) -> str:
        return f"{self.family} on {', '.join(self.sources)}"

    @property
    def lacks(self) -> str:
        return "" if self.sources else "no sources; name files or folders to learn from, or stdlib"


def parse_size(text: str) -> int:
    """'3m' is three million parameters; k, m and b are understood. Raises ValueError otherwise."""
    units = {"k": 1e3, "m": 1e6, "b": 1e9}
    number, unit = text.lower()[:-1], text.lower()[-1:]
    try:
        count = int(float(number) * units[unit]) if unit in units else int(text)
        if count < 1:
            raise ValueError
        return count
    except (ValueError, OverflowError):
        raise ValueError(f"--size is {text!r}; write a number of parameters like 3m or 500k") from None


def config_for(plan: Plan, vocab: int) -> Any:
    """The family's config whose parameters, embeddings included, come nearest to the plan's size.

    Widths are 32 or multiples of 64, and of those that come near, the one whose depth is
    nearest to a layer for each 64 of width.
    """

    def depth(dim: int) -> int:
        return max(2, round((plan.size - vocab * dim) / (12 * dim * dim)))

    def cost(dim: int) -> float:
        count = vocab * dim + 12 * dim * dim * depth(dim)
        return 5 * abs(log(count / plan.size)) + abs(log(dim / depth(dim) / 64))

    dim = min([32, *range(64, 8193, 64)], key=cost)
    return FAMILIES[plan.family].Config.sized(vocab, dim, depth(dim), plan.context)
