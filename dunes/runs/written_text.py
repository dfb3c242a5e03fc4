"""Text that a model writes itself, to calibrate it where no other is at hand. https://arxiv.org/abs/2305.17888"""

from functools import partial

import torch
from torch import Tensor

from dunes.checkpoint import LoadedModel
from dunes.generate import Request, generate_all, limit_vocab, sampler

ROWS = 64
"""Sequences that are written at once."""


def write_ids(loaded: LoadedModel, sequences: int, width: int) -> Tensor:
    """Ids (sequences, width), sampled from the model's own distribution.

    Each sequence begins as a document does, or with a random id where nothing begins one. The same model writes
    the same. Raises ValueError for a model without a tokenizer.
    """
    tokenizer, rows = loaded.require_tokenizer(), list[list[int]]()
    draw = torch.Generator().manual_seed(0)
    for first in range(0, sequences, ROWS):
        requests = []
        for seed in range(first, min(first + ROWS, sequences)):
            begin = tokenizer.document_start or torch.randint(tokenizer.vocab, (1,), generator=draw).tolist()
            sample = sampler(seed=seed).after(partial(limit_vocab, tokenizer.vocab))
            requests.append(Request(begin, width - len(begin), sample))
        for _ in generate_all(loaded.model, requests, context_length=loaded.context_length):
            pass
        rows += [request.ids for request in requests]
    return torch.tensor(rows)
