"""Where batches come from: files and folders, shards of tokens, windows over them."""

from dunes.data.shards import Shard, cached, default_cache
from dunes.data.sources import Corpus, Document, collect
from dunes.data.windows import Windows

__all__ = ["Corpus", "Document", "Shard", "Windows", "cached", "collect", "default_cache"]
