"""What a training run is asked to do, and the model that follows from it."""

from dataclasses import dataclass, fields
from math import log
from typing import Any

from dunes.models import FAMILIES
from dunes.text import KINDS


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything that decides what a run computes. Stored in the run; a resumed run keeps it.

    It ends after `steps` if given, else after `minutes`. `size` counts parameters. What is None of
    `dtype` and `threads` is measured when the run begins.
    """

    sources: tuple[str, ...]
    family: str = "arcee"
    tokenizer: str = "bpe"
    vocab: int = 4096
    size: int = 4_000_000
    context: int = 256
    batch: int = 16
    steps: int | None = None
    minutes: float = 15.0
    split: str = "files"
    seed: int = 0
    dtype: str | None = None
    threads: int | None = None

    def __post_init__(self) -> None:
        """Raises ValueError for what cannot be done, before anything is."""
        least = {"vocab": 1, "size": 1, "context": 2, "batch": 1, "minutes": 0.01}
        for name, minimum in least.items():
            if getattr(self, name) < minimum:
                raise ValueError(f"--{name} is {getattr(self, name)}; it must be at least {minimum}")
        if self.steps is not None and self.steps < 1:
            raise ValueError(f"--steps is {self.steps}; it must be at least 1")
        for name, known in {"family": FAMILIES, "tokenizer": KINDS, "split": ("files", "tails")}.items():
            if getattr(self, name) not in known:
                raise ValueError(f"--{name} is {getattr(self, name)!r}; it must be one of {', '.join(known)}")

    def differences(self, earlier: "Plan", asked_only: bool = False) -> str:
        """What an earlier plan says differently, field by field; empty if nothing.

        With `asked_only`, a field that stands at its default here was not asked for, and so agrees.
        """
        default = Plan(sources=())
        found = [(f.name, getattr(earlier, f.name), getattr(self, f.name)) for f in fields(self)]
        if asked_only:
            found = [(name, was, now) for name, was, now in found if now != getattr(default, name)]
        return "; ".join(f"{name} was {was!r}, now {now!r}" for name, was, now in found if was != now)


def parse_size(text: str) -> int:
    """'3m' is three million parameters; k, m and b are understood. Raises ValueError otherwise."""
    units = {"k": 1e3, "m": 1e6, "b": 1e9}
    number, unit = text.lower()[:-1], text.lower()[-1:]
    try:
        return int(float(number) * units[unit]) if unit in units else int(text)
    except ValueError:
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
