"""Text generation on token ids: decoding, sampling, speculative decoding, prefix cache, compiled decoding.

Start with `generate` and `sampler`. `PrefixCache` caches keys and values; `look_up` and `DraftModel` propose ids.
torch is imported when one of these names is first used; `generate.sampling` does not need torch.
"""

from typing import TYPE_CHECKING

from dunes.extra import attributes_of

if TYPE_CHECKING:
    from dunes.generate.decode import Request, Token, generate, generate_all, prompt_tokens
    from dunes.generate.decode_graph import CompiledStep
    from dunes.generate.prefix_cache import PrefixCache
    from dunes.generate.sampling import Sampler, SamplingOptions, limit_vocab, sampler
    from dunes.generate.speculate import DraftModel, Proposal, Proposer, first_proposal, look_up

__all__ = [
    "CompiledStep", "DraftModel", "PrefixCache", "Proposal", "Proposer", "Request", "Sampler", "SamplingOptions",
    "Token", "first_proposal", "generate", "generate_all", "limit_vocab", "look_up", "prompt_tokens", "sampler",
]  # fmt: skip

if not TYPE_CHECKING:
    __getattr__ = attributes_of(__name__, ("sampling", "prefix_cache", "speculate", "decode"), __all__)
    __dir__ = lambda: sorted({*globals(), *__all__})
