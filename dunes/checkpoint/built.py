"""Models that no family describes, saved with the name of the function that builds them (`family` in the card).

The name is informative: nothing is imported. Loading takes the function as an argument, and compares the model
that it builds with the saved one before any weight is read.
"""

import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from dunes.checkpoint.atomic import tensor_digest
from dunes.checkpoint.hf_config_of import module_rows
from dunes.checkpoint.lazy_tensor import LazyTensor, Weights, in_memory
from dunes.checkpoint.safetensors_writer import CODES
from dunes.checkpoint.state_dict_diff import Difference

Build: TypeAlias = Callable[..., nn.Module]


def describe_built(
    model: nn.Module, build: Build, arguments: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, LazyTensor]]:
    """A model's entries in the card, and its tensors; a tied tensor is listed under its first name.

    `build(**arguments)` must return the same model except for the values of parameters and persistent buffers.
    Raises ValueError that lists every difference, and for arguments that are not JSON.
    """
    try:
        stored_arguments = json.loads(json.dumps(dict(arguments), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ValueError(f"arguments of {function_name(build)}: {error}; they must be JSON") from None
    rebuilt = call_build(build, stored_arguments)
    weights = _saved_tensors(model)
    if differences := [*_differences(rebuilt, weights, _tied_names(model)), *_unsaved_differences(model, rebuilt)]:
        raise ValueError(f"{function_name(build)} builds a different model: {'; '.join(map(str, differences))}")
    family = {"function": function_name(build), "arguments": stored_arguments}
    structure = {"modules": _digests(_settings(rebuilt)), "tied": _tied_names(rebuilt)}
    return {"family": family, "structure": structure}, weights


def function_name(build: Build) -> str:
    """The module (or file, for a script) and name of a function."""
    while hasattr(build, "func"):  # functools.partial
        build = build.func
    module = getattr(build, "__module__", None) or type(build).__module__
    if module == "__main__":
        code = getattr(build, "__code__", None)
        module = module if code is None else Path(code.co_filename).name
    return f"{module}:{getattr(build, '__qualname__', type(build).__qualname__)}"


def call_build(build: Build, arguments: Mapping[str, Any]) -> nn.Module:
    """Call the function; the global random state is restored.

    Raises ValueError if it does not take these arguments, or returns no module.
    """
    try:
        inspect.signature(build).bind(**arguments)
    except TypeError as error:
        raise ValueError(
            f"{function_name(build)} does not take the arguments {json.dumps(arguments)}: {error}"
        ) from None
    with torch.random.fork_rng(devices=[]):
        model = build(**arguments)
    if not isinstance(model, nn.Module):
        raise ValueError(f"{function_name(build)} returned a {type(model).__name__}; expected a module")
    return model


def build_function_of(card: Mapping[str, Any], path: Path) -> tuple[str, dict[str, Any]] | None:
    """Name and arguments of the function that builds a card's model; None for a model of a family.

    Raises ValueError for a damaged card.
    """
    family = card.get("family")
    if not isinstance(family, dict):
        return None
    name, arguments = family.get("function"), family.get("arguments")
    if not isinstance(name, str) or not name.isprintable() or not isinstance(arguments, dict):
        raise ValueError(f"{path}: family must be a family's name, or a function with its arguments")
    return name[:200], arguments


def loading_hint(folder: Path, name: str) -> str:
    """One line on how to load a folder that needs its function."""
    return (
        f"{folder}: built by {name}, which is not imported automatically; load it in Python with that function: "
        f"checkpoint.load({str(folder)!r}, build={name.rpartition(':')[2]})"
    )


def load_built(
    build: Build, arguments: Mapping[str, Any], card: Mapping[str, Any], files: Weights, path: Path
) -> nn.Module:
    """The model that the function builds, with the weights of the files.

    Raises ValueError that lists every difference from the saved model before any weight is read.
    """
    modules, tied = (_name_table(card.get("structure"), key, path) for key in ("modules", "tied"))
    model = call_build(build, arguments)
    differences, changed = [*_differences(model, files, tied)], [*_module_differences(model, modules)]
    if differences or changed:
        remedy = "" if differences else "; if this is intended, load model.safetensors with load_state_dict"
        listed = "; ".join(map(str, [*differences, *changed]))
        raise ValueError(
            f"{path.parent}: {function_name(build)} builds a different model from the saved one: {listed}{remedy}"
        )
    state = model.state_dict()
    with torch.no_grad():
        for key, stored in files.items():
            state[key].copy_(stored.read())
            stored.release()
    return model


def _name_table(structure: Any, key: str, path: Path) -> dict[str, str]:
    """A table in the card's structure. Raises ValueError unless it maps strings to strings."""
    table = structure.get(key) if isinstance(structure, dict) else None
    if not isinstance(table, dict) or not all(isinstance(value, str) for value in table.values()):
        raise ValueError(f"{path}: structure must have a table of {key}; download the file again")
    return table


def _saved_tensors(model: nn.Module) -> dict[str, LazyTensor]:
    """The tensors to save. Raises ValueError that names those which safetensors does not support."""
    state, tied = model.state_dict(), _tied_names(model)
    odd = [k for k, t in state.items() if not isinstance(t, Tensor) or t.dtype not in CODES or t.is_meta]
    if odd:
        raise ValueError(f"{', '.join(odd)}: not a tensor of a dtype that safetensors supports")
    return in_memory({k: t for k, t in state.items() if k not in tied})


def _tied_names(model: nn.Module) -> dict[str, str]:
    """The other names of tied tensors, each with the first name."""
    first: dict[int, str] = {}
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    names = {key: first.setdefault(id(tensor), key) for key, tensor in tensors}
    state = model.state_dict()
    return {key: name for key, name in names.items() if key != name and key in state}


def _differences(model: nn.Module, files: Weights, tied: Mapping[str, str]) -> Iterator[Difference]:
    """The differences between a model's tensors and those of the files: shape, dtype, tying."""
    expected, expected_ties = _saved_tensors(model), _tied_names(model)
    differing = {key for key in {**expected_ties, **tied} if expected_ties.get(key) != tied.get(key)}
    for key in sorted(differing):
        yield Difference("tied", key, *(_describe_tie(names.get(key)) for names in (expected_ties, tied)))
    for key in sorted((expected.keys() | files.keys()) - differing):
        wanted, actual = expected.get(key), files.get(key)
        if actual is None or wanted is None:
            kind = "missing" if actual is None else "unexpected"
            yield Difference(kind, key, *("nothing" if w is None else str(w.shape) for w in (wanted, actual)))
        elif wanted.shape != actual.shape:
            yield Difference("shape", key, str(wanted.shape), str(actual.shape))
        elif wanted.dtype != actual.dtype:
            yield Difference("dtype", key, str(wanted.dtype), str(actual.dtype))


def _describe_tie(name: str | None) -> str:
    return "a tensor of its own" if name is None else f"the same tensor as {name}"


def _settings(model: nn.Module) -> dict[str, dict[str, str]]:
    """The class and plain attributes of each module."""
    return {row.place: {"class": row.class_name, **row.attributes} for row in module_rows(model)}


def _digests(settings: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    return {k: sha256(json.dumps(v, sort_keys=True).encode()).hexdigest()[:16] for k, v in settings.items()}


def _module_differences(model: nn.Module, digests: Mapping[str, str]) -> Iterator[str]:
    """The modules that changed or exist in only one of the two models."""
    actual = _digests(_settings(model))
    for name in sorted(actual.keys() | digests.keys()):
        if actual.get(name) != digests.get(name):
            changed = "has another class or other settings" if {name} <= actual.keys() & digests.keys() else None
            yield f"{name or 'the model'} {changed or ('is missing' if name in digests else 'is new')}"


def _unsaved_differences(model: nn.Module, rebuilt: nn.Module) -> Iterator[str]:
    """Differences that no file would save: attributes and non-persistent buffers."""
    expected, actual = _settings(model), _settings(rebuilt)
    for name in expected.keys() & actual.keys():
        for key in sorted(expected[name].keys() | actual[name].keys()):
            if (a := expected[name].get(key)) != (b := actual[name].get(key)):
                yield f"{name or 'the model'}: {key} is {a}, not {b}"
    state, buffers = model.state_dict(), dict(rebuilt.named_buffers())
    for key, buffer in model.named_buffers():
        if key not in state and key in buffers and not _equal_tensors(buffer, buffers[key]):
            yield f"{key} has other values, and is not persistent: it would be lost"


def _equal_tensors(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and tensor_digest(a) == tensor_digest(b)
