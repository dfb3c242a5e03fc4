"""Where batches come from: files and folders, shards of tokens, windows over them."""

from dunes.data.document import Document
from dunes.data.examples import Example, Record, Records, coloured, read, split, tokenized
from dunes.data.packing import Batches
from dunes.data.preflight import Report, refuse, report
from dunes.data.shards import Row, Shard, cached, default_cache, opened
from dunes.data.sources import Corpus, collect
from dunes.data.windows import Ids, Windows

__all__ = [
    "Batches",
    "Corpus",
    "Document",
    "Example",
    "Ids",
    "Record",
    "Records",
    "Report",
    "Row",
    "Shard",
    "Windows",
    "cached",
    "collect",
    "coloured",
    "default_cache",
    "opened",
    "read",
    "refuse",
    "report",
    "split",
    "tokenized",
]
