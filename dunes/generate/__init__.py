"""Ids in, ids out."""

from dunes.generate.decode import Token, generate, generate_all
from dunes.generate.sampling import Sampler, force_prefix, limit_vocab, sampler

__all__ = ["Sampler", "Token", "force_prefix", "generate", "generate_all", "limit_vocab", "sampler"]
