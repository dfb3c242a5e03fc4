"""The architecture of a model: a family with its config, or a function that builds it, and the changes since.

The card of a model that no Hugging Face config describes records its architecture. Loading builds the structure,
repeats the changes, and compares the result with the saved model before any weight is read. The function is an
argument of `load`, or one of `dunes.models`; any other is imported only if the caller trusts the card.
"""

import importlib
import importlib.util
import inspect
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Any, Self, TypeAlias, cast, get_type_hints

import torch
from torch import Tensor, nn

from dunes import tree
from dunes.augment import Change, repeat_structure
from dunes.checkpoint.state_dict_diff import FLOATS, SHOWN, Difference
from dunes.checkpoint.weights.lazy_tensor import LazyTensor, Weights, in_memory
from dunes.checkpoint.weights.safetensors_file import CODES, quote
from dunes.files.atomic import tensor_digests
from dunes.files.trust import cards_trusted
from dunes.models import FAMILIES
from dunes.models.meta import build_on_meta
from dunes.parts import Decoder
from dunes.tree.summary import module_rows

Build: TypeAlias = Callable[..., nn.Module]
NAME = re.compile(r"([\w-]+\.py|[A-Za-z_]\w*(\.\w+)*):[A-Za-z_]\w*(\.\w+)*", re.ASCII)
OURS = re.compile(r"dunes\.models\.[a-z]\w*:[A-Za-z]\w*", re.ASCII)


@dataclass(frozen=True)
class Architecture:
    """A family's name with its Config, or a function's name with its arguments, and the changes since."""

    family: str
    config: Any
    changes: tuple[Change, ...] = ()
    function: Build | None = None

    @classmethod
    def of_function(cls, function: Build, **arguments: Any) -> Self:
        """The architecture of `function(**arguments)`. Raises ValueError for arguments that are not JSON."""
        try:
            stored = json.loads(json.dumps(arguments, allow_nan=False))
        except (TypeError, ValueError) as error:
            raise ValueError(f"arguments of {function_name(function)}: {error}; they must be JSON") from None
        return cls(function_name(function), stored, function=function)

    @classmethod
    def of_card(cls, card: Mapping[str, Any], path: Path, function: Build | None = None) -> Self:
        """The architecture in a card. `function` builds the model; by default, the card's function is imported.

        Without `trust_cards` only functions of `dunes.models` are imported. Raises ValueError for a damaged card,
        an unknown change, or a function that may not or cannot be imported.
        """
        family, config = card.get("family"), card.get("config")
        try:
            changes = tuple(map(Change.of, card.get("changes", [])))
            if isinstance(family, str) and family in FAMILIES and isinstance(config, dict):
                return cls(family, FAMILIES[family].from_hf(config), changes)
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}: {' '.join(str(error).split())[:300]}") from None
        if isinstance(family, dict) and "class" in family and function is not None:
            return cls(function_name(function), {}, changes, function)
        if isinstance(family, dict) and "class" in family:
            raise ValueError(
                f"{path.parent}: the weights of {quote(family['class'])} without a function that builds it; build "
                f"it and load them in Python: checkpoint.load_weights(network, {str(path.parent)!r})"
            )
        name, arguments = (
            family.get(key) if isinstance(family, dict) else None for key in ("function", "arguments")
        )
        if not isinstance(name, str) or not name.isprintable() or not isinstance(arguments, dict):
            raise ValueError(
                f"{path}: family must be a family's name with its config, or a function with its arguments"
            )
        if function is None and (cards_trusted() or is_ours(name)):
            return cls(name, arguments, changes, import_build(name, path.parent))
        if function is None:
            raise ValueError(
                f"{path.parent}: built by {name[:200]}, which is not imported automatically; if you trust it, "
                "pass --trust-code, in Python trust_code=True or the function itself: "
                f"build={name[:200].rpartition(':')[2]}"
            )
        return cls(function_name(function), arguments, changes, function)

    def record(self) -> dict[str, Any]:
        """The card's entries for this architecture."""
        entries: dict[str, Any] = {"family": {"function": self.family, "arguments": self.config}}
        if self.function is None:
            entries = {"family": self.family, "config": FAMILIES[self.family].to_hf(self.config)}
        return entries | {"changes": [change.record() for change in self.changes]}

    def build(self) -> Decoder:
        """The model with uninitialised weights, on the default device.

        A function may build a module that is no Decoder; code that needs one then raises AttributeError.
        """
        if self.function is not None:
            return self._repeat_changes(call_build(self.function, self.config))
        return self._repeat_changes(FAMILIES[self.family].build(self.config))

    def outline(self) -> Decoder:
        """The model on the meta device; a model that a function builds is on the device chosen by the function."""
        if self.function is not None:
            return self.build()
        return self._repeat_changes(build_on_meta(self.family, self.config))

    def _repeat_changes(self, model: nn.Module) -> Decoder:
        for change in self.changes:
            repeat_structure(model, change)
        return cast(Decoder, model)


def has_own_form(card: Mapping[str, Any]) -> bool:
    """True if a card describes a model that no Hugging Face config describes."""
    return isinstance(card.get("family"), dict) or isinstance(card.get("structure"), dict)


def describe(model: nn.Module, architecture: Architecture) -> tuple[dict[str, Any], dict[str, LazyTensor]]:
    """A model's card entries and its tensors by name; a tied tensor is listed under its first name.

    Raises ValueError, listing the first differences, if the architecture builds a model that differs in more than
    the values of parameters and persistent buffers.
    """
    _require_values(model)
    rebuilt, tied, weights = architecture.outline(), tied_names(model), _tensors(model)
    differences = [
        *tensor_differences(rebuilt, weights, tied, architecture),
        *_unsaved_differences(model, rebuilt),
    ]
    if differences:
        more = f"; and {len(differences) - SHOWN} more" if len(differences) > SHOWN else ""
        listed = "; ".join(" ".join(str(d).split())[:200] for d in differences[:SHOWN])
        raise ValueError(f"{architecture.family} builds a different model: {listed}{more}")
    return architecture.record() | {"structure": _structure(rebuilt, tied)}, weights


def describe_weights(model: nn.Module) -> tuple[dict[str, Any], dict[str, LazyTensor]]:
    """Card entries and tensors of a network without a build function. Raises ValueError as `describe`."""
    _require_values(model)
    entries = {"family": {"class": function_name(type(model))}, "structure": _structure(model, tied_names(model))}
    return entries, _tensors(model)


def _require_values(model: nn.Module) -> None:
    """Raise ValueError for tensors on the meta device or of a dtype that safetensors does not support."""
    tree.require_shapes(model)
    state = model.state_dict().items()
    if empty := next((k for k, t in state if isinstance(t, Tensor) and t.is_meta), None):
        raise ValueError(f"{empty} has no values: it is on the meta device")
    if odd := [k for k, t in state if not isinstance(t, Tensor) or t.dtype not in CODES]:
        raise ValueError(f"{', '.join(odd)}: not a tensor of a dtype that safetensors supports")


def _structure(model: nn.Module, tied: dict[str, str]) -> dict[str, Any]:
    return {"modules": _module_digests(model), "tied": tied}


def compare_structure(
    model: nn.Module, architecture: Architecture, card: Mapping[str, Any], files: Weights, path: Path
) -> list[Difference]:
    """All differences of `model` from the saved model in tensors and module settings."""
    modules, tied = (_name_table(card.get("structure"), key, path) for key in ("modules", "tied"))
    return [*tensor_differences(model, files, tied, architecture), *_module_differences(model, modules)]


def fill(model: nn.Module, files: Weights, card: Mapping[str, Any]) -> None:
    """Load the files' values into parameters and buffers; meta tensors get the stored dtype."""
    state = {key: stored.read() for key, stored in files.items()}
    state |= {key: state[first] for key, first in card["structure"]["tied"].items()}
    model.load_state_dict(state, assign=any(t.is_meta for t in model.state_dict().values()))


def function_name(build: Build) -> str:
    """The name of a function as "module:name", or "file.py:name" if it is defined in a script."""
    while hasattr(build, "func"):  # functools.partial
        build = build.func
    module = getattr(build, "__module__", None) or type(build).__module__
    if module == "__main__":
        code = getattr(build, "__code__", None)  # None for a class
        file = getattr(sys.modules[module], "__file__", None) if code is None else code.co_filename
        module = Path(file).name if file else module
    return f"{module}:{getattr(build, '__qualname__', type(build).__qualname__)}"


def call_build(build: Build, arguments: Mapping[str, Any]) -> nn.Module:
    """The module that `build(**arguments)` returns; the global random state is restored.

    Raises ValueError if the function does not take these arguments, or returns no module.
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
    return tree.uncompiled(model)


def _name_table(structure: Any, key: str, path: Path) -> dict[str, str]:
    """A table of the card's structure. Raises ValueError unless it maps strings to strings."""
    table = structure.get(key) if isinstance(structure, dict) else None
    if not isinstance(table, dict) or not all(isinstance(value, str) for value in table.values()):
        raise ValueError(f"{path}: structure must have a table of {key}; download the file again")
    return table


def _tensors(model: nn.Module) -> dict[str, LazyTensor]:
    """Tensors to save, by name, without repetitions of tied ones."""
    tied = tied_names(model)
    return in_memory({k: t for k, t in model.state_dict().items() if k not in tied})


def tied_names(model: nn.Module) -> dict[str, str]:
    """Further names of tied tensors, mapped to each tensor's first name."""
    first: dict[int, str] = {}
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    names = {key: first.setdefault(id(tensor), key) for key, tensor in tensors}
    state = model.state_dict()
    return {key: name for key, name in names.items() if key != name and key in state}


def tensor_differences(
    model: nn.Module, files: Weights, tied: Mapping[str, str], architecture: Architecture
) -> Iterator[Difference]:
    """Differences between a model's tensors and the files' in name, shape, dtype and tying.

    The weights of a family may be stored in any floating-point dtype.
    """
    expected, expected_ties = _tensors(model), tied_names(model)
    differing = {key for key in {**expected_ties, **tied} if expected_ties.get(key) != tied.get(key)}
    for key in sorted(differing):
        yield Difference("tied", key, *(_describe_tie(names.get(key)) for names in (expected_ties, tied)))
    for key in sorted((expected.keys() | files.keys()) - differing):
        built, actual = expected.get(key), files.get(key)
        if actual is None or built is None:
            reason = "missing" if actual is None else "unexpected"
            yield Difference(reason, key, *("nothing" if w is None else str(w.shape) for w in (built, actual)))
        elif built.shape != actual.shape:
            yield Difference("shape", key, str(built.shape), str(actual.shape))
        elif built.dtype != actual.dtype and (
            architecture.function or not {built.dtype, actual.dtype} <= {*FLOATS}
        ):
            yield Difference("dtype", key, str(built.dtype), str(actual.dtype))


def _describe_tie(name: str | None) -> str:
    return "a tensor of its own" if name is None else f"the same tensor as {name}"


def _settings(model: nn.Module) -> dict[str, dict[str, str]]:
    """Class and plain attributes of each module, by place."""
    return {row.place: {"class": row.class_name, **row.attributes} for row in module_rows(model)}


def _module_digests(model: nn.Module) -> dict[str, str]:
    texts = {place: json.dumps(settings, sort_keys=True) for place, settings in _settings(model).items()}
    return {place: sha256(text.encode()).hexdigest()[:16] for place, text in texts.items()}


def _module_differences(model: nn.Module, digests: Mapping[str, str]) -> Iterator[Difference]:
    """Modules that differ from the digests, or exist in only one of the two models."""
    actual = _module_digests(model)
    for name in sorted(actual.keys() | digests.keys()):
        if actual.get(name) != digests.get(name):
            changed = "has another class or other settings" if {name} <= actual.keys() & digests.keys() else None
            reason = changed or ("is missing" if name in digests else "is new")
            yield Difference("structure", name or "the model", "", reason)


def _unsaved_differences(model: nn.Module, rebuilt: nn.Module) -> Iterator[str]:
    """Differences in attributes and non-persistent buffers, which saving would lose."""
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
    return (
        a.shape == b.shape and a.dtype == b.dtype and tensor_digests(a, [a.dtype]) == tensor_digests(b, [b.dtype])
    )


def is_ours(name: str) -> bool:
    """True if "module:name" names an object of a module in `dunes.models`."""
    return OURS.fullmatch(name) is not None


def import_build(name: str, folder: Path) -> Callable[..., nn.Module]:
    """Import the function or class "module:name" or "file.py:name" that builds the model in this folder.

    Modules are also searched for in the current folder, files only there. Raises ValueError if the import fails,
    or if an object of `dunes.models` builds no network.
    """
    module_name, _, attributes = name.partition(":")
    try:
        if NAME.fullmatch(name) is None:
            raise ValueError("expected module:name; functions inside of functions cannot be imported")
        value: Any = _import_module(module_name)
        for attribute in attributes.split("."):
            if not hasattr(value, attribute):
                raise ValueError(f"{module_name} has no {attributes}")
            value = getattr(value, attribute)
        if not callable(value) or (is_ours(name) and not _builds_network(value, module_name)):
            raise ValueError(f"{attributes} builds no network")
    except Exception as error:  # whatever the module raises when it runs
        reason = " ".join(f"{'' if type(error) is ValueError else type(error).__name__ + ': '}{error}".split())
        raise ValueError(
            f"{folder}: built by {quote(name)}, which cannot be imported: {reason[:300]}; run in the folder that "
            "has its file, or pass the function in Python: build="
        ) from None
    build: Callable[..., nn.Module] = value
    return build


def _builds_network(value: Any, module: str) -> bool:
    """True for an nn.Module class, or a function annotated to return one, that this module defines itself."""
    result = value if isinstance(value, type) else get_type_hints(value).get("return")
    return value.__module__ == module and isinstance(result, type) and issubclass(result, nn.Module)


def _import_module(name: str) -> ModuleType:
    """Import a module by name, or a script of the current folder by file name; it may be the running script."""
    if not name.endswith(".py"):
        with _current_folder():
            return importlib.import_module(name)
    main = sys.modules["__main__"]
    if Path(getattr(main, "__file__", None) or "").name == name:
        return main
    if not Path(name).is_file():
        raise ValueError(f"no file {name} in the current folder")
    specification = importlib.util.spec_from_file_location(Path(name).stem, Path(name).resolve())
    assert specification is not None, "the suffix is Python's"
    assert specification.loader is not None, "the suffix is Python's"
    module = importlib.util.module_from_spec(specification)
    with _current_folder():
        specification.loader.exec_module(module)
    return module


@contextmanager
def _current_folder() -> Iterator[None]:
    """Append the current folder to the import path in the context."""
    before = [*sys.path]
    sys.path.append(str(Path.cwd()))
    try:
        yield
    finally:
        sys.path[:] = before
