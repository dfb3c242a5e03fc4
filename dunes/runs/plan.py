"""What a training run is asked to do, and the model that follows from it."""

from collections.abc import Collection
from dataclasses import dataclass, fields
from math import log
from typing import Any

from dunes.models import FAMILIES
from dunes.text import KINDS

MEASURED = ("dtype", "threads")
OVERRIDABLE = ("sources", "corpus", "steps", "minutes", *MEASURED)
"""What a run may be told to change when it goes on. All else is built into its weights or its order of data."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything that decides what a run computes. Stored in the run; a resumed run keeps it.

    It ends after `steps` if given, else after `minutes`. `size` counts parameters. What is None or 0
    is chosen when the run begins, from the minutes, the corpus and the machine (`runs/dial.py`).
    `matmul` is the machine's measured rate of matrix products in FLOP/s.
    """

    sources: tuple[str, ...]
    family: str = "arcee"
    tokenizer: str = "bpe"
    vocab: int = 4096
    size: int = 0
    context: int = 0
    batch: int = 0
    steps: int | None = None
    minutes: float = 15.0
    split: str = "files"
    seed: int = 0
    dtype: str | None = None
    threads: int | None = None
    matmul: float | None = None

    def __post_init__(self) -> None:
        """Raises ValueError for what cannot be done, before anything is."""
        least = {"vocab": 1, "size": 1, "context": 2, "batch": 1, "minutes": 0.01, "steps": 1, "threads": 1}
        for name, minimum in least.items():
            value = getattr(self, name)
            left_open = value is None or (value == 0 and name in ("size", "context", "batch"))
            if not left_open and not value >= minimum:
                raise ValueError(f"--{name} is {value}; it must be at least {minimum}")
        for name, known in {"family": FAMILIES, "tokenizer": KINDS, "split": ("files", "tails")}.items():
            if getattr(self, name) not in known:
                raise ValueError(f"--{name} is {getattr(self, name)!r}; it must be one of {', '.join(known)}")

    @property
    def seconds(self) -> float:
        """How long it may take, if it does not end by steps."""
        return self.minutes * 60

    def changed(self) -> set[str]:
        """The fields that are not at their defaults."""
        default = Plan(sources=())
        return {f.name for f in fields(self) if getattr(self, f.name) != getattr(default, f.name)}

    def differences(self, earlier: "Plan", asked: Collection[str] | None = None) -> dict[str, str]:
        """What an earlier plan says differently, in words by field; of the fields `asked` for, if given."""
        found = {f.name: (getattr(earlier, f.name), getattr(self, f.name)) for f in fields(self)}
        return {
            name: f"{name} was {was!r}, now {now!r}"
            for name, (was, now) in found.items()
            if was != now and name != "matmul" and (asked is None or name in asked)
        }


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
