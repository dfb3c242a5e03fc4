"""Sampling options, read by the command line without importing torch."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from dunes.flags import flag

if TYPE_CHECKING:
    from dunes.generate import Sampler


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:  # sampling options and the maximum number of tokens
    max_tokens: int = 200
    """Maximum number of new tokens."""
    temperature: float = 0.8
    """Softmax temperature; 0 is greedy decoding."""
    top_k: Annotated[int | None, flag("K")] = 50
    """Sample from the K most probable tokens; 0 or -1 means all."""
    top_p: Annotated[float | None, flag("P", "off")] = None
    """Sample from the most probable tokens whose probabilities add up to P."""
    min_p: Annotated[float | None, flag("P", "off")] = None
    """Sample from tokens with at least P times the probability of the most probable one."""
    repetition_penalty: float = 1.0
    """Above 1, tokens that have already occurred become less probable."""
    seed: int = 0
    """Random seed."""

    def sampler(self) -> "Sampler":
        """The sampler with these options. Raises ValueError for invalid options."""
        if self.max_tokens < 1:
            raise ValueError(f"--max-tokens is {self.max_tokens}; it must be at least 1")
        from dunes.generate import sampler

        return sampler(
            self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            penalty=self.repetition_penalty,
            seed=self.seed,
        )
