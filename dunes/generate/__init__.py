"""Ids in, ids out."""

from dunes.generate.decode import Token, generate, generate_all
from dunes.generate.sampling import Sampler, begun, below, sampler

__all__ = ["Sampler", "Token", "begun", "below", "generate", "generate_all", "sampler"]
