"""Ids in, ids out."""

from dunes.generate.decode import Request, Token, generate, generate_all, prompt_tokens
from dunes.generate.prefix_cache import PrefixCache
from dunes.generate.sampling import Sampler, force_prefix, limit_vocab, sampler

__all__ = [
    "PrefixCache",
    "Request",
    "Sampler",
    "Token",
    "force_prefix",
    "generate",
    "generate_all",
    "limit_vocab",
    "prompt_tokens",
    "sampler",
]
