"""Samples, and rates of generation."""

from collections.abc import Iterator, Sequence

from dunes.checkpoint import LoadedModel
from dunes.generate import PrefixCache, sampler
from dunes.inference.text_generator import TextGenerator
from dunes.units import format_bytes, format_count, plural


def sample_text(loaded: LoadedModel, seed: int = 0, max_tokens: int = 120) -> str:
    """A sample generated without a prompt."""
    return TextGenerator(loaded).text("", max_tokens, sampler(0.8, top_k=50, seed=seed)).strip("\n")


def describe_generation(
    generator: TextGenerator, prompt: int, times: Sequence[float], max_tokens: int | None
) -> Iterator[str]:
    """Lines about the generation after a prompt of `prompt` tokens; `times` (s): the start, then each token.

    `max_tokens` is the limit of new tokens, None if the text was interrupted.
    """
    count = len(times) - 1
    if count:
        yield describe_rates(min(prompt, generator.context_length), times) + _describe_form(generator.cache)
    if max_tokens is not None and count < max_tokens:
        yield f"the model ended the text after {count} of {plural(max_tokens, 'token')}"


def _describe_form(cache: PrefixCache | None) -> str:
    """Suffix that describes a quantized cache or a compiled step; empty for the plain model."""
    if cache is not None and cache.format and cache.cache:
        return f", int{cache.format.bits} cache of {format_bytes(cache.cache.nbytes)}"
    step = cache.step if cache is not None else None
    if step is None:
        return ""
    return f", compiled with {str(step.dtype).removeprefix('torch.')} weights"


def describe_rates(prompt: int, times: Sequence[float]) -> str:
    """Tokens/s of a prompt of this many tokens, and of decoding; `times` (s): the start, then each token."""
    start, first, last = times[0], times[1], times[-1]
    text = f"prompt: {plural(prompt, 'token')}, {format_count(prompt / (first - start))} tokens/s"
    if len(times) == 2:
        return text
    rate = format_count((len(times) - 2) / (last - first))
    return f"{text}; generated: {plural(len(times) - 1, 'token')}, {rate} tokens/s"
