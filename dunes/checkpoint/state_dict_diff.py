"""What keeps the tensors of some files from being the weights of a model."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from dunes.checkpoint.lazy_tensor import LazyTensor, Weights, renamed
from dunes.models.names import Name, Names, match_indices, substitute, to_ours, to_theirs

HEAD, EMBEDDING = "head.weight", "embed.token.weight"
HEADS = ("lm_head.weight", "output.weight")
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
SHOWN = 8
KINDS = ("shape", "dtype", "missing", "unexpected", "duplicate", "head")
"""In the order in which they are listed."""


class Difference(NamedTuple):
    """A tensor by the name that it has, or should have, in the files, and how it differs: one of `KINDS`."""

    kind: str
    name: str
    expected: str
    found: str

    def __str__(self) -> str:
        if self.kind == "missing":
            return f"{self.name} {self.expected} is missing"
        if self.kind == "unexpected":
            return f"{self.name} {self.found} is not a weight of this model"
        return f"{self.name} is {self.found}, not {self.expected}"


class _Spelling(NamedTuple):
    """A tensor as files may hold it: its shape there, and the tensors of ours in it."""

    shape: tuple[int, ...]
    ours: tuple[str, ...]


def compare(
    expected: Weights, files: Weights, names: Names, ignored: Sequence[str]
) -> tuple[dict[str, LazyTensor], list[Difference]]:
    """The files' tensors by our names, and every difference from what is expected under our names."""
    kept = {k: w for k, w in files.items() if not any(match_indices(t, k) is not None for t in ignored)}
    heads = {k: kept.pop(k) for k in HEADS if k in kept and HEAD not in expected}
    weight_names = _spellings(expected, names)
    by_ours: dict[str, str] = {}
    fitting, differences = dict[str, LazyTensor](), list[Difference]()
    for key, stored in kept.items():
        if (difference := _difference(key, stored, weight_names.get(key), by_ours)) is None:
            fitting[key] = stored
        else:
            differences.append(difference)
    moves, _ = to_ours(names, {k: w.shape for k, w in fitting.items()})
    weights = renamed(moves, fitting)
    differences += _missing(weight_names, [key for key in expected if key not in by_ours])
    differences += [d for k, w in heads.items() if (d := _second_head(k, w, weights.get(EMBEDDING)))]
    return weights, sorted(differences, key=lambda d: KINDS.index(d.kind))


def _spellings(expected: Weights, names: Names) -> dict[str, _Spelling]:
    """What the files may hold of the expected tensors, by every name that it may have there."""
    weight_names: dict[str, _Spelling] = {}
    for rule in names:
        for name, spelling in (_stacks if rule.stacked else _plain)(expected, rule).items():
            weight_names.setdefault(name, spelling)
    return weight_names


def _plain(expected: Weights, rule: Name) -> dict[str, _Spelling]:
    moves, _ = to_theirs([rule], expected)
    shapes = {name: stored.shape for name, stored in renamed(moves, expected).items()}
    return {move.target: _Spelling(shapes[move.target], move.sources) for move in moves}


def _stacks(expected: Weights, rule: Name) -> dict[str, _Spelling]:
    """The stacks of experts that a rule describes."""
    ours: dict[str, list[str]] = {}
    for key in expected:
        for at in (match_indices(part, key) for part in rule.ours):
            if at is not None:
                ours.setdefault(substitute(rule.theirs, at), []).append(key)
    parts = len(rule.ours)
    shapes = {k: expected[keys[0]].shape for k, keys in ours.items()}
    return {
        k: _Spelling((len(keys) // parts, parts * shapes[k][0], *shapes[k][1:]), tuple(keys))
        for k, keys in ours.items()
    }


def _difference(
    name: str, stored: LazyTensor, spelling: _Spelling | None, by_ours: dict[str, str]
) -> Difference | None:
    """How a tensor of the files differs from what it should be; `by_ours` notes which one each of ours lies in."""
    if spelling is None:
        return Difference("unexpected", name, "nothing", str(stored.shape))
    first = next((by_ours[key] for key in spelling.ours if key in by_ours), None)
    if first is not None:
        return Difference("duplicate", name, "one of its own", f"the same weight as {first}")
    by_ours |= dict.fromkeys(spelling.ours, name)
    if stored.shape != spelling.shape:
        return Difference("shape", name, str(spelling.shape), str(stored.shape))
    if stored.dtype not in FLOATS:
        return Difference("dtype", name, "floating point", str(stored.dtype).removeprefix("torch."))
    return None


def _missing(weight_names: Mapping[str, _Spelling], keys: Sequence[str]) -> Iterator[Difference]:
    """What is not there, by the first of the names that it may have."""
    names: dict[str, str] = {}
    for name, spelling in weight_names.items():
        for key in spelling.ours:
            names.setdefault(key, name)
    for name in dict.fromkeys(names[key] for key in keys):
        yield Difference("missing", name, str(weight_names[name].shape), "nothing")


def _second_head(name: str, head: LazyTensor, embedding: LazyTensor | None) -> Difference | None:
    """A tied model's files may hold the head, too, if it is the embedding."""
    if embedding is None:
        return None
    same = head.shape == embedding.shape and torch.equal(head.read(), embedding.read())
    head.release()
    embedding.release()
    if same:
        return None
    return Difference("head", name, "the embedding (tie_word_embeddings is true)", f"another matrix {head.shape}")


def summarize(differences: Sequence[Difference]) -> str:
    """All of it on one line: the first of each kind and a few more in words, the others counted."""
    firsts = {d.kind: d for d in reversed(differences)}
    shown = list(dict.fromkeys([*reversed(firsts.values()), *differences]))[:SHOWN]
    more = len(differences) - len(shown)
    listed = "; ".join(map(str, shown))
    return f"{listed}; and {more} more, which `dunes inspect` lists" if more > 0 else listed
