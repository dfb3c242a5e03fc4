"""Ids in, ids out."""

from dunes.generate.decode import Token, generate, generate_all
from dunes.generate.sampling import Sampler, begun, sampler

__all__ = ["Sampler", "Token", "begun", "generate", "generate_all", "sampler"]
