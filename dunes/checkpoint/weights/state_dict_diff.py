"""Compare the tensors of files with a model's state dict, and list all differences."""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch

from dunes.checkpoint.weights.lazy_tensor import LazyTensor, Weights, renamed
from dunes.models.names import Names, match_indices, substitute, to_ours, to_theirs

HEAD, EMBEDDING = "head.weight", "embed.token.weight"
HEADS = ("lm_head.weight", "output.weight")
WRAPPERS = {
    "_orig_mod", "module", "_fsdp_wrapped_module", "_fpw_module", "_checkpoint_wrapped_module", "_forward_module",
}  # fmt: skip
"""Attribute names of the wrapped module in torch.compile, DDP, FSDP, activation checkpointing and Lightning."""
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
SHOWN = 8
OTHER = "{name} is {actual}, not {expected}"
KINDS = {
    "shape": OTHER,
    "dtype": OTHER,
    "missing": "{name} {expected} is missing",
    "unexpected": "{name} {actual} is not a weight of this model",
    "duplicate": OTHER,
    "head": OTHER,
    "tied": OTHER,
    "structure": "{name} {actual}",
}
"""The message template of each kind of difference, in the order in which the kinds are listed."""


class Difference(NamedTuple):
    """A difference in one tensor; `name` is the tensor's name in the files, `kind` a key of `KINDS`."""

    kind: str
    name: str
    expected: str
    actual: str

    def __str__(self) -> str:
        return KINDS[self.kind].format(**self._asdict())


class _FileTensor(NamedTuple):
    """The shape of a tensor in a file, and the names of the model's tensors that the file's tensor contains."""

    shape: tuple[int, ...]
    names: tuple[str, ...]


def compare(
    expected: Weights, files: Weights, names: Names, ignored: Sequence[str]
) -> tuple[dict[str, LazyTensor], list[Difference], str]:
    """The files' tensors by the model's names, all differences from `expected`, and the note of the `Prefix`."""
    file_tensors = _file_tensors(expected, names)
    prefix = Prefix.of(files, [*file_tensors, *HEADS], ignored)
    files = prefix.without(files)
    files = {k: w for k, w in files.items() if not _is_ignored(k, ignored)}
    heads = {k: files.pop(k) for k in HEADS if k in files and HEAD not in expected}
    sources: dict[str, str] = {}
    fitting, differences = dict[str, LazyTensor](), list[Difference]()
    for key, tensor in files.items():
        if (difference := _difference(key, tensor, file_tensors.get(key), sources)) is None:
            fitting[key] = tensor
        else:
            differences.append(difference)
    conversions, _ = to_ours(names, {k: w.shape for k, w in fitting.items()})
    weights = renamed(conversions, fitting)
    differences += _missing(file_tensors, [key for key in expected if key not in sources])
    differences += [d for k, w in heads.items() if (d := _head_difference(k, w, weights.get(EMBEDDING)))]
    return weights, sorted(differences, key=lambda d: [*KINDS].index(d.kind)), prefix.note


@dataclass(frozen=True)
class Prefix:
    """Renames a file's tensors to the model's names: removes wrapper names, and removes or adds a prefix.

    `renames` maps the file's names to the model's; `note` describes the renaming, or the reason why no renaming is
    possible. `renames` and `note` are empty if all names match, or if no prefix makes more than half of the
    unmatched names match.
    """

    renames: Mapping[str, str] = field(default_factory=dict)
    note: str = ""

    @classmethod
    def of(cls, files: Iterable[str], known: Collection[str], ignored: Sequence[str] = ()) -> "Prefix":
        """The renaming for these names: wrapper names are removed, then a common prefix is removed or added.

        The renaming is empty if it would match at most half of the unknown names to the model, or would give two
        tensors the same name.
        """
        known, files = set(known), list(files)
        others = [name for name in files if name not in known and not _is_ignored(name, ignored)]
        plain = {name: ".".join(part for part in name.split(".") if part not in WRAPPERS) for name in others}
        removed = sorted({part for name in others if name != plain[name] for part in name.split(".")} & WRAPPERS)
        best, note, most = dict[str, str](), "", len(others) // 2
        complete = sum(name in known and name not in HEADS for name in files)
        for leading, added in _edges([*plain.values()], known) if others else ():
            if complete and (leading or added):  # tensors with a prefix are copies of those without it
                continue
            renames = {name: added + short.removeprefix(leading) for name, short in plain.items()}
            fitting = sum(new in known or _is_ignored(new, ignored) for new in renames.values())
            if fitting > most:
                parts = [f"{part}." for part in removed] + [leading] * bool(leading)
                edits = [f"without {' and '.join(map(ascii, parts))}"] * bool(parts)
                edits += [f"with {added!a}"] * bool(added)
                best, note, most = renames, f"tensors are read {' and '.join(edits)} in their names", fitting
        unchanged = {*files} - best.keys()
        if len({*best.values(), *unchanged}) < len(best) + len(unchanged):
            would = note.replace("are", "would be")
            return cls(note=f"{would}, but two would have the same name; keep one of each")
        return cls(best, note)

    def without(self, files: Weights) -> dict[str, LazyTensor]:
        """The files' tensors by the model's names."""
        return {self.renames.get(name, name): tensor for name, tensor in files.items()}


def _edges(names: Sequence[str], known: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield pairs: a common prefix to remove, and a prefix to add ("" or the most common in `known`)."""
    starts = ["", *(f"{first}." for first, _ in Counter(name.partition(".")[0] for name in known).most_common(1))]
    parts = names[0].split(".")
    for count in range(len(parts)):
        leading = "".join(f"{part}." for part in parts[:count])
        if all(name.startswith(leading) for name in names):
            yield from ((leading, added) for added in starts)


def _is_ignored(name: str, ignored: Sequence[str]) -> bool:
    """True if the name matches a pattern; a final `**` matches any rest of the name."""
    starts = tuple(pattern.removesuffix("**") for pattern in ignored if pattern.endswith("**"))
    return name.startswith(starts) or any(match_indices(pattern, name) is not None for pattern in ignored)


def _file_tensors(expected: Weights, names: Names) -> dict[str, _FileTensor]:
    """The tensors that files may have; a tensor with several possible names is listed under each name."""
    file_tensors: dict[str, _FileTensor] = {}
    for rule in names:
        conversions, _ = to_theirs([rule], expected)
        tensors = renamed(conversions, expected)
        for c in conversions:
            file_tensors.setdefault(c.target, _FileTensor(tensors[c.target].shape, c.sources))
    return file_tensors


def _difference(
    name: str, tensor: LazyTensor, expected: _FileTensor | None, sources: dict[str, str]
) -> Difference | None:
    """A tensor's difference from `expected`, or None. Adds to `sources` the names of the model's tensors that this
    tensor contains, each with the value `name`.
    """
    if expected is None:
        return Difference("unexpected", name, "nothing", str(tensor.shape))
    first = next((sources[key] for key in expected.names if key in sources), None)
    if first is not None:
        return Difference("duplicate", name, "one of its own", f"the same weight as {first}")
    sources |= dict.fromkeys(expected.names, name)
    if tensor.shape != expected.shape:
        return Difference("shape", name, str(expected.shape), str(tensor.shape))
    if tensor.dtype not in FLOATS:
        return Difference("dtype", name, "floating point", str(tensor.dtype).removeprefix("torch."))
    return None


def _missing(file_tensors: dict[str, _FileTensor], keys: Sequence[str]) -> Iterator[Difference]:
    """Differences for missing tensors, each under the first of its possible names."""
    names = {key: name for name, expected in reversed(file_tensors.items()) for key in expected.names}
    for name in dict.fromkeys(names[key] for key in keys):
        yield Difference("missing", name, str(file_tensors[name].shape), "nothing")


def _head_difference(name: str, head: LazyTensor, embedding: LazyTensor | None) -> Difference | None:
    """The difference between head and embedding in the files of a tied model; None if they are equal."""
    if embedding is None:
        return None
    same = head.shape == embedding.shape and torch.equal(head.read(), embedding.read())
    head.release()
    embedding.release()
    if same:
        return None
    return Difference("head", name, "the embedding (tie_word_embeddings is true)", f"another matrix {head.shape}")


def summarize(differences: Sequence[Difference]) -> str:
    """One line of text: the first difference of each kind, a few more, and the number of remaining differences."""
    firsts = {d.kind: d for d in reversed(differences)}
    shown = list(dict.fromkeys([*reversed(firsts.values()), *differences]))[:SHOWN]
    more = len(differences) - len(shown)
    rest = [f"and {more} more, which `dunes inspect` lists"] * (more > 0)
    listed = "; ".join([*map(str, shown), *rest])
    adapter = any(".lora_" in d.name for d in differences if d.kind == "unexpected")
    return f"{listed}; some are an adapter's: merge it first, in PEFT by merge_and_unload" if adapter else listed


def apply_renames(files: dict[str, LazyTensor], renames: Mapping[str, str], folder: Path) -> dict[str, LazyTensor]:
    """The tensors, renamed by a user's table.

    Raises ValueError if two tensors get the same name, and for an entry of the table that matches no tensor.
    """
    if unused := [k for k in renames if all(match_indices(k, key) is None for key in files)]:
        raise ValueError(f"{folder}: no tensor is called {unused[0]}, which the table of names lists")
    result: dict[str, LazyTensor] = {}
    for key, tensor in files.items():
        matches = ((new, match_indices(old, key)) for old, new in renames.items())
        name = next((substitute(new, indices) for new, indices in matches if indices is not None), key)
        if name in result:
            raise ValueError(f"{folder}: two tensors are called {name} after renaming, one of them formerly {key}")
        result[name] = tensor
    return result
