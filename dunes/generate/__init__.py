"""Ids in, ids out: decoding, sampling, speculation, the prefix cache, compiled decoding.

Start with `generate` and `sampler`; `PrefixCache` keeps keys and values, `look_up` and `DraftModel` propose ids.
"""

from dunes.generate.decode import Request, Token, generate, generate_all, prompt_tokens
from dunes.generate.prefix_cache import PrefixCache
from dunes.generate.sampling import Sampler, limit_vocab, sampler
from dunes.generate.speculate import DraftModel, Proposal, Proposer, first_proposal, look_up
from dunes.generate.step import CompiledStep

__all__ = [
    "CompiledStep", "DraftModel", "PrefixCache", "Proposal", "Proposer", "Request", "Sampler", "Token",
    "first_proposal", "generate", "generate_all", "limit_vocab", "look_up", "prompt_tokens", "sampler",
]  # fmt: skip
