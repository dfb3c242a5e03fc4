"""What keeps the tensors of some files from being the weights of a model, each with its likely cause."""

from collections.abc import Iterable, Mapping, Sequence
from difflib import SequenceMatcher
from itertools import islice
from typing import NamedTuple

import torch

from dunes.checkpoint.stored import Stored, Weights, moved
from dunes.models.names import Names, numbers, to_ours, to_theirs

HEAD, EMBEDDING = "head.weight", "embed.token.weight"
HEADS = ("lm_head.weight", "output.weight")
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
SHOWN = 8


class Difference(NamedTuple):
    """A tensor by the name it has, or should have, in the files: `missing`, `unexpected`, `shape` or `dtype`."""

    kind: str
    name: str
    expected: str
    found: str
    cause: str = ""

    def __str__(self) -> str:
        said = {
            "missing": f"{self.name} {self.expected} is missing",
            "unexpected": f"{self.name} {self.found} is not a weight of this model",
        }.get(self.kind, f"{self.name} is {self.found}, not {self.expected}")
        return f"{said} ({self.cause})" if self.cause else said


def compare(
    expected: Weights, files: Weights, names: Names, ignored: Sequence[str]
) -> tuple[dict[str, Stored], list[Difference]]:
    """The files' tensors by our names, and every difference from what is expected under our names."""
    kept = {k: w for k, w in files.items() if not any(numbers(t, k) is not None for t in ignored)}
    spare = {k: kept.pop(k) for k in HEADS if k in kept and HEAD not in expected}
    moves, unknown = to_ours(names, {k: w.shape for k, w in kept.items()})
    found = moved(moves, kept)
    spelled = _spelled(expected, names)
    source = {move.to: move.sources[0] for move in moves}
    unexpected = [*unknown, *dict.fromkeys(source[k] for k in found if k not in expected)]
    missing = dict.fromkeys(spelled.get(k, (k, w.shape)) for k, w in expected.items() if k not in found)
    wrong = [k for k, w in found.items() if k in expected and w.shape != expected[k].shape]
    differences = [*_shapes(wrong, expected, found, source, spelled, kept)]
    differences += [
        Difference("dtype", k, "floating point", str(w.dtype).removeprefix("torch."), "quantized elsewhere")
        for k, w in kept.items()
        if w.dtype not in FLOATS and k not in unexpected
    ]
    differences += [
        Difference("missing", name, _size(shape), "nothing", _renamed(name, shape, kept, unexpected))
        for name, shape in missing
    ]
    differences += [
        Difference("unexpected", name, "nothing", _size(kept[name].shape), _foreign(name)) for name in unexpected
    ]
    differences += [d for k, w in spare.items() if (d := _second_head(k, w, found.get(EMBEDDING)))]
    return {k: w for k, w in found.items() if k in expected}, differences


def _spelled(expected: Weights, names: Names) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Name and shape in the files of the tensor that holds each of ours."""
    moves, _ = to_theirs(names, expected)
    shapes = moved(moves, expected)
    return {ours: (move.to, shapes[move.to].shape) for move in moves for ours in move.sources}


def _shapes(
    wrong: Iterable[str],
    expected: Weights,
    found: Weights,
    source: Mapping[str, str],
    spelled: Mapping[str, tuple[str, tuple[int, ...]]],
    files: Weights,
) -> Iterable[Difference]:
    done = set()
    for ours in wrong:
        name = source[ours]
        if name in done:
            continue
        done.add(name)
        canonical, whole = spelled.get(ours, (name, expected[ours].shape))
        shape = whole if canonical == name or len(whole) == len(files[name].shape) else expected[ours].shape
        yield Difference(
            "shape", name, _size(shape), _size(files[name].shape), _turned(shape, files[name].shape, ours)
        )


def _turned(expected: tuple[int, ...], found: tuple[int, ...], ours: str) -> str:
    if found == expected[::-1] and len(found) == 2:
        return "transposed: one of the two stores (in, out), as Conv1D does"
    if ours in (EMBEDDING, HEAD) and found[1:] == expected[1:]:
        return f"the vocabulary of the config has {expected[0]} words, that of the file {found[0]}"
    return ""


def _renamed(name: str, shape: tuple[int, ...], files: Weights, unexpected: Sequence[str]) -> str:
    """What a missing tensor may be called in the files."""
    if name in HEADS:
        return "the files may mean a tied head: tie_word_embeddings true in config.json"
    alike = list(islice((u for u in unexpected if files[u].shape == shape), 2000))
    inside = [u for u in alike if u.endswith(name) or name.endswith(u)]
    best = max(inside or alike, key=lambda u: SequenceMatcher(None, u, name).ratio(), default=None)
    return f"perhaps it is {best}, renamed" if best else ""


def _foreign(name: str) -> str:
    if name.startswith("layers.") and ".attention.w" in name:
        return (
            "a native name: queries and keys lie in pairs there; put its params.json beside, without config.json"
        )
    if name.endswith((".qweight", ".qzeros", ".scales", ".absmax", ".weight_scale")):
        return "quantized elsewhere"
    if ".lora_" in name:
        return "an adapter's weight"
    return ""


def _second_head(name: str, head: Stored, embedding: Stored | None) -> Difference | None:
    """A tied model's files may hold the head, too, if it is the embedding."""
    if embedding is None:
        return None
    if head.shape == embedding.shape and torch.equal(head.read(), embedding.read()):
        return None
    return Difference(
        "unexpected",
        name,
        "nothing",
        _size(head.shape),
        "the config says that the head is tied, and this is not the embedding: tie_word_embeddings false",
    )


def _size(shape: Sequence[int]) -> str:
    return str(tuple(shape))


def report(differences: Sequence[Difference]) -> str:
    """All of it on one line: the first of them in words, the others counted."""
    more = len(differences) - SHOWN
    said = "; ".join(map(str, differences[:SHOWN]))
    return f"{said}; and {more} more, which `dunes inspect` lists" if more > 0 else said
