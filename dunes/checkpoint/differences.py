"""What keeps the tensors of some files from being the weights of a model, each with its likely cause."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from itertools import islice
from typing import NamedTuple

import torch

from dunes.checkpoint.stored import Stored, Weights, moved
from dunes.models.names import Conversion, Names, match_indices, to_ours, to_theirs
from dunes.plural import plural

HEAD, EMBEDDING = "head.weight", "embed.token.weight"
HEADS = ("lm_head.weight", "output.weight")
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
SHOWN = 8
EXPLAINED = 40
"""Missing tensors for which a name like theirs is looked for: comparing names takes time."""
QUANTIZED = "quantized elsewhere; get the plain weights"
NATIVE = "a native name: queries and keys lie in pairs there; put its params.json beside, without config.json"


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
    kept = {k: w for k, w in files.items() if not any(match_indices(t, k) is not None for t in ignored)}
    spare = {k: kept.pop(k) for k in HEADS if k in kept and HEAD not in expected}
    stacks = dict(_stacks(expected, kept, names))
    odd, there = {d.name for d in stacks}, {k for keys in stacks.values() for k in keys}
    moves, unknown = to_ours(names, {k: w.shape for k, w in kept.items() if k not in odd})
    taken, unexpected = _taken(moves, expected)
    unexpected = dict.fromkeys(unknown, "") | unexpected
    found = moved(taken, kept)
    spelled = _spelled(expected, names)
    missing = dict.fromkeys(
        spelled.get(k, (k, w.shape)) for k, w in expected.items() if k not in found and k not in there
    )
    differences = [
        *stacks,
        *_shapes({move.target: move.sources[0] for move in taken}, expected, found, spelled, kept),
        *_dtypes(kept, unexpected),
        *_missing(missing, kept, unexpected),
        *(_unexpected(k, kept[k].shape, cause or _foreign(k)) for k, cause in unexpected.items()),
        *(d for k, w in spare.items() if (d := _second_head(k, w, found.get(EMBEDDING)))),
    ]
    return found, differences


def _taken(moves: Iterable[Conversion], expected: Weights) -> tuple[list[Conversion], dict[str, str]]:
    """The moves that make what is expected, each of it once, and the other sources, with the cause if known."""
    taken: dict[str, Conversion] = {}
    others: dict[str, str] = {}
    for move in moves:
        (name,) = move.sources
        if move.target not in expected:
            others[name] = ""
        elif (first := taken.setdefault(move.target, move).sources[0]) != name:
            others[name] = f"it is {first} once more"
    return list(taken.values()), others


def _stacks(expected: Weights, files: Weights, names: Names) -> Iterator[tuple[Difference, tuple[str, ...]]]:
    """Tensors that hold more or fewer experts than there are, and which of ours they were to be.

    Found before any of them gets a name of ours: a shape may say a billion.
    """
    for rule in (n for n in names if n.stacked):
        stacked = {k: at for k in files if (at := match_indices(rule.theirs, k)) is not None}
        if not stacked:
            continue
        ours: dict[tuple[str, ...], list[str]] = {}
        for key in expected:
            for at in filter(None, (match_indices(part, key) for part in rule.ours)):
                ours.setdefault(tuple(v for f, v in sorted(at.items()) if f != "e"), []).append(key)
        for key, at in stacked.items():
            keys, shape = ours.get(tuple(v for _, v in sorted(at.items())), []), files[key].shape
            if keys and shape[:1] != (len(keys) // len(rule.ours),):
                what = f"of {plural(len(keys) // len(rule.ours), 'expert')}"
                yield Difference("shape", key, what, _size(shape)), tuple(keys)
            elif not keys:
                yield _unexpected(key, shape, ""), ()


def _spelled(expected: Weights, names: Names) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Name and shape in the files of the tensor that holds each of ours."""
    moves, _ = to_theirs(names, expected)
    shapes = moved(moves, expected)
    return {ours: (move.target, shapes[move.target].shape) for move in moves for ours in move.sources}


def _shapes(
    source: Mapping[str, str],
    expected: Weights,
    found: Weights,
    spelled: Mapping[str, tuple[str, tuple[int, ...]]],
    files: Weights,
) -> Iterator[Difference]:
    parts: dict[str, list[str]] = {}
    for key, name in source.items():
        parts.setdefault(name, []).append(key)
    for name, ours in parts.items():
        wrong = next((k for k in ours if found[k].shape != expected[k].shape), None)
        if wrong is not None:
            one, there = expected[wrong].shape, files[name].shape
            shape = _stack(ours, one) if _stacked(ours) else spelled.get(wrong, (name, one))[1]
            yield Difference("shape", name, _size(shape), _size(there), _turned(shape, there, wrong))


def _stacked(ours: Sequence[str]) -> bool:
    """Whether these are experts, which lie in one tensor of the files and have a number each."""
    return len({tuple(_digits(k)) for k in ours}) > 1


def _stack(ours: Sequence[str], one: tuple[int, ...]) -> tuple[int, ...]:
    experts = len({tuple(_digits(k)) for k in ours})
    return (experts, one[0] * len(ours) // experts, *one[1:])


def _dtypes(files: Weights, unexpected: Mapping[str, str]) -> Iterator[Difference]:
    for key, stored in files.items():
        if stored.dtype not in FLOATS and key not in unexpected:
            found = str(stored.dtype).removeprefix("torch.")
            yield Difference("dtype", key, "floating point", found, QUANTIZED)


def _unexpected(name: str, shape: tuple[int, ...], cause: str) -> Difference:
    return Difference("unexpected", name, "nothing", _size(shape), cause)


def _turned(expected: tuple[int, ...], found: tuple[int, ...], ours: str) -> str:
    if found == expected[::-1] and len(found) == 2:
        return "transposed: one of the two stores (in, out), as Conv1D does"
    if ours in (EMBEDDING, HEAD) and found[1:] == expected[1:]:
        return f"the vocabulary of the config has {expected[0]} words, that of the file {found[0]}"
    return ""


def _missing(
    missing: Iterable[tuple[str, tuple[int, ...]]], files: Weights, unexpected: Iterable[str]
) -> Iterable[Difference]:
    """What is not there, and for the first of them what they may be called in the files."""
    alike: dict[tuple[int, ...], list[str]] = {}
    for key in unexpected:
        if _foreign(key) == NATIVE:  # another name would not be enough: the rows lie otherwise
            alike = {}
            break
        if not _foreign(key):
            alike.setdefault(files[key].shape, []).append(key)
    for i, (name, shape) in enumerate(missing):
        cause = _renamed(name, alike.get(shape, [])) if i < EXPLAINED else ""
        yield Difference("missing", name, _size(shape), "nothing", cause)


def _renamed(name: str, alike: Sequence[str]) -> str:
    """What a missing tensor may be called, of those that have its shape."""
    if name in HEADS:
        return "the files may mean a tied head: tie_word_embeddings true in config.json"
    inside = [u for u in alike if u.endswith(f".{name}") or name.endswith(f".{u}")]
    numbered = [u for u in alike if _digits(u) == _digits(name)]
    likely = islice(inside or numbered or alike, 100)
    best = max(likely, key=lambda u: SequenceMatcher(None, u, name).ratio(), default=None)
    return f"perhaps it is {best}: `dunes convert --names` takes a table of names" if best else ""


def _digits(name: str) -> list[str]:
    return re.findall(r"\d+", name)


def _foreign(name: str) -> str:
    if name.startswith("layers.") and any(part in name for part in (".attention.w", ".feed_forward.", "_norm.w")):
        return NATIVE
    if name.endswith((".qweight", ".qzeros", ".scales", ".g_idx", ".absmax", ".quant_map", ".weight_scale")):
        return QUANTIZED
    if ".lora_" in name:
        return "an adapter's weight"
    return ""


def _second_head(name: str, head: Stored, embedding: Stored | None) -> Difference | None:
    """A tied model's files may hold the head, too, if it is the embedding."""
    if embedding is None:
        return None
    same = head.shape == embedding.shape and torch.equal(head.read(), embedding.read())
    head.forget()
    embedding.forget()
    if same:
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
    """All of it on one line: some of each kind in words, the others counted."""
    more = len(differences) - SHOWN
    said = "; ".join(map(str, _shown(differences)))
    return f"{said}; and {more} more, which `dunes inspect` lists" if more > 0 else said


def _shown(differences: Sequence[Difference]) -> list[Difference]:
    """At most so many, in order: the first of each kind and cause, then whatever comes first."""
    first = {(d.kind, d.cause[:12]): d for d in reversed(differences)}
    chosen = set(list(dict.fromkeys(map(id, [*reversed(first.values()), *differences])))[:SHOWN])
    return [d for d in differences if id(d) in chosen]
