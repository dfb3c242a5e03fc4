"""Parts of a transformer. The arguments of a part are plain values or other parts, never a config.

Start with `Decoder` and `Block`. A `Block` contains an `Attention` and an `MLP`, `GatedMLP` or `MoE`. `cache_for`
returns a `Cache`, `RollingCache`, `QuantizedCache` or `RecurrentCache`.
"""

from dunes.parts.attention import Attention
from dunes.parts.cache import Cache, RollingCache
from dunes.parts.context import ForwardContext
from dunes.parts.decoder import Block, Checkpointed, Decoder, cache_for, vocabulary_size
from dunes.parts.layers import MLP, Embedding, GatedMLP, RMSNorm, squared_relu
from dunes.parts.moe import MoE
from dunes.parts.position import Rotary
from dunes.parts.quantized_cache import CacheFormat, QuantizedCache

__all__ = [
    "MLP", "Attention", "Block", "Cache", "CacheFormat", "Checkpointed", "Decoder", "Embedding",
    "ForwardContext", "GatedMLP", "MoE", "QuantizedCache", "RMSNorm", "RollingCache", "Rotary", "cache_for",
    "squared_relu", "vocabulary_size",
]  # fmt: skip
