"""Where batches come from: files and folders, shards of tokens, windows over them."""

from dunes.data.shards import Row, Shard, cached, default_cache, opened
from dunes.data.sources import Corpus, Document, collect
from dunes.data.windows import Ids, Windows

__all__ = [
    "Corpus",
    "Document",
    "Ids",
    "Row",
    "Shard",
    "Windows",
    "cached",
    "collect",
    "default_cache",
    "opened",
]
