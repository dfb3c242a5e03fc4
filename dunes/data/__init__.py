"""Data for training: files and folders, shards of tokens, windows, examples, batches.

For text, start with `collect_corpus`, `token_shard` and `Windows`; for examples, with `read_records`,
`tokenize_records` and `Batches`; for tensors, with `Rows`.
"""

from dunes.data.batches import Batches, PackedText, Rows, TokenIds, Windows
from dunes.data.document import Document, code_size, header_name
from dunes.data.examples import (
    Example,
    Record,
    Records,
    read_records,
    split_records,
    tokenize_records,
    trained_spans,
)
from dunes.data.fim import FillInMiddle, missing_sentinels
from dunes.data.mnist_files import Digits, drawn_digits, fetch_digits, read_digits
from dunes.data.preflight import DataReport, check_report, data_report
from dunes.data.shards import Shard, TokenFile, default_cache, file_header, open_shard, token_shard
from dunes.data.sources import Corpus, collect_corpus, hold_out_test

__all__ = [
    "Batches", "Corpus", "DataReport", "Digits", "Document", "Example", "FillInMiddle", "PackedText", "Record",
    "Records", "Rows", "Shard", "TokenFile", "TokenIds", "Windows", "check_report", "code_size",
    "collect_corpus", "data_report", "default_cache", "drawn_digits", "fetch_digits", "file_header",
    "header_name", "hold_out_test", "missing_sentinels", "open_shard", "read_digits", "read_records",
    "split_records", "token_shard", "tokenize_records", "trained_spans",
]  # fmt: skip
