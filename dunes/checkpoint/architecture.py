"""The architecture of a model: its family and config, or the function that builds it, and later changes to it.

`hf_config_of` derives the family and config of a built model from its modules. If no Hugging Face config describes
a model, its card records the architecture. Loading builds the model, repeats its later changes, and compares the
modules and tensors with the saved model's before any weight is read. The caller of `load` passes the function that
builds a model, or `load` imports the function that the card names. Functions outside of `dunes.models` are
imported only if the caller trusts the card.
"""

import importlib
import importlib.util
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Any, Self, TypeAlias, cast, get_type_hints

import torch
from torch import Tensor, nn

from dunes import tree
from dunes.augment import Change, repeat_structure
from dunes.checkpoint.weights.lazy_tensor import LazyTensor, Weights, in_memory
from dunes.checkpoint.weights.safetensors_file import CODES, quote
from dunes.checkpoint.weights.state_dict_diff import FLOATS, SHOWN, Difference
from dunes.context import prefix_errors, replaced
from dunes.files.atomic import tensor_digests
from dunes.files.model_file import cards_trusted
from dunes.models import FAMILIES, build_on_meta, family_of, refusal
from dunes.parts import Decoder
from dunes.tree.summary import ModuleRow, module_rows
from dunes.units import plural

Build: TypeAlias = Callable[..., nn.Module]
NAME = re.compile(r"([\w-]+\.py|[A-Za-z_]\w*(\.\w+)*):[A-Za-z_]\w*(\.\w+)*", re.ASCII)
OURS = re.compile(r"dunes\.models\.[a-z]\w*:[A-Za-z]\w*", re.ASCII)
"""Pattern for functions and classes in `dunes.models`, which are imported even if the card is not trusted."""


@dataclass(frozen=True)
class Architecture:
    """A model's architecture: family name and Config, or function name and arguments, and later changes."""

    family: str
    config: Any
    changes: tuple[Change, ...] = ()
    function: Build | None = None

    @classmethod
    def of_function(cls, function: Build, **arguments: Any) -> Self:
        """The architecture of `function(**arguments)`. Raises TypeError or ValueError for arguments that JSON
        cannot hold.
        """
        stored = json.loads(json.dumps(arguments, allow_nan=False))
        return cls(function_name(function), stored, function=function)

    @classmethod
    def of_card(cls, card: Mapping[str, Any], path: Path, function: Build | None = None) -> Self:
        """The architecture in a card. `function` builds the model; by default, the card's function is imported.

        Outside of the context `trust_cards`, only functions of `dunes.models` are imported. Raises ValueError if
        the card is damaged, has an unknown change, or names a function that cannot or may not be imported.
        """
        family, config = card.get("family"), card.get("config")
        try:
            changes = tuple(map(Change.of, card.get("changes", [])))
            if isinstance(family, str) and family in FAMILIES and isinstance(config, dict):
                return cls(family, FAMILIES[family].from_hf(config), changes)
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}: {' '.join(str(error).split())[:300]}") from None
        entries = family if isinstance(family, dict) else {}
        name, arguments = entries.get("function"), entries.get("arguments")
        if "class" in entries:
            if function is not None:
                return cls(function_name(function), {}, changes, function)
            raise ValueError(
                f"{path.parent}: has weights of {quote(entries['class'])}, but no function that builds it; "
                f"build it in Python, and load the weights: checkpoint.load_weights(network, {str(path.parent)!r})"
            )
        if not isinstance(name, str) or not name.isprintable() or not isinstance(arguments, dict):
            raise ValueError(
                f"{path}: family must be a family's name with its config, or a function with its arguments"
            )
        if function is not None:
            return cls(function_name(function), arguments, changes, function)
        if cards_trusted() or OURS.fullmatch(name):
            return cls(name, arguments, changes, import_build(name, path.parent))
        raise ValueError(
            f"{path.parent}: built by {name[:200]}, which is not imported automatically; if you trust it, "
            "pass --trust-code, or in Python trust_code=True or the function itself: "
            f"build={name[:200].rpartition(':')[2]}"
        )

    @classmethod
    def of_hf_config(cls, config: Mapping[str, Any], path: Path) -> Self:
        """The architecture that `config`, the content of the config.json at `path`, describes. Raises ValueError
        for an invalid config.
        """
        with naming_errors(path):
            family = family_of(config)
            return cls(family, FAMILIES[family].from_hf(dict(config)))

    @property
    def trust_option(self) -> str:
        """The text " --trust-code" if opening a folder of this model needs this option, otherwise empty."""
        return "" if self.function is None or OURS.fullmatch(self.family) else " --trust-code"

    def record(self) -> dict[str, Any]:
        """The card's entries for this architecture."""
        entries: dict[str, Any] = {"family": {"function": self.family, "arguments": self.config}}
        if self.function is None:
            entries = {"family": self.family, "config": FAMILIES[self.family].to_hf(self.config)}
        return entries | {"changes": [change.record() for change in self.changes]}

    def build(self, on_meta: bool = False) -> Decoder:
        """Build the model without its saved weights. With `on_meta`, a family's model is built on the meta device.

        A build function chooses the device itself, and may return a module that is no Decoder. Code that needs a
        Decoder then raises AttributeError.
        """
        if self.function is not None:
            model = call_build(self.function, self.config)
        else:
            model = (
                build_on_meta(self.family, self.config) if on_meta else FAMILIES[self.family].build(self.config)
            )
        for change in self.changes:
            repeat_structure(model, change)
        return cast(Decoder, model)

    def outline(self) -> Decoder:
        """The model on the meta device, or on the device that its build function chooses."""
        return self.build(on_meta=True)


def describe(
    model: nn.Module, architecture: Architecture | None = None
) -> tuple[dict[str, Any], dict[str, LazyTensor]]:
    """A model's card entries and its tensors by name; a tied tensor is listed under its first name.

    Without an architecture, the card names only the model's class. Raises ValueError with the first differences if
    the architecture builds a different model; values of parameters and persistent buffers may differ.
    """
    _require_values(model)
    weights, tied = saved_tensors(model)
    if architecture is None:
        rebuilt, entries = model, {"family": {"class": function_name(type(model))}}
    else:
        rebuilt, entries = architecture.outline(), architecture.record()
        lost = _unsaved_differences(model, rebuilt)
        if differences := [*tensor_differences(rebuilt, weights, tied, architecture), *lost]:
            more = f"; and {len(differences) - SHOWN} more" if len(differences) > SHOWN else ""
            listed = "; ".join(" ".join(str(d).split())[:200] for d in differences[:SHOWN])
            raise ValueError(f"{architecture.family} builds a different model: {listed}{more}")
    return entries | {"structure": {"modules": _module_digests(rebuilt), "tied": tied}}, weights


def _require_values(model: nn.Module) -> None:
    """Raise ValueError for tensors on the meta device or of a dtype that safetensors does not support."""
    tree.require_shapes(model)
    state = model.state_dict().items()
    if empty := next((k for k, t in state if isinstance(t, Tensor) and t.is_meta), None):
        raise ValueError(f"{empty} has no values, since it is on the meta device")
    if odd := [k for k, t in state if not isinstance(t, Tensor) or t.dtype not in CODES]:
        raise ValueError(f"{', '.join(odd)}: not a tensor of a dtype that safetensors supports")


def compare_structure(
    model: nn.Module, architecture: Architecture, card: Mapping[str, Any], files: Weights, path: Path
) -> list[Difference]:
    """All differences between `model` and the saved model, in tensors and in the settings of modules."""
    modules, tied = (_name_table(card.get("structure"), key, path) for key in ("modules", "tied"))
    return [*tensor_differences(model, files, tied, architecture), *_module_differences(model, modules)]


def fill(model: nn.Module, files: Weights, card: Mapping[str, Any]) -> None:
    """Load the files' values into the model. If a tensor of the model is on the meta device, all of the model's
    tensors are replaced.
    """
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
    """The module that `build(**arguments)` returns; the CPU's random state is restored.

    Raises TypeError if the function does not take these arguments, and ValueError if it returns no module.
    """
    with torch.random.fork_rng(devices=[]):
        model = build(**arguments)
    if not isinstance(model, nn.Module):
        raise ValueError(f"{function_name(build)} returned a {type(model).__name__}; expected a module")
    return tree.uncompiled(model)


def _name_table(structure: Any, key: str, path: Path) -> dict[str, str]:
    """The dict under `key` in the card's `structure`. Raises ValueError unless it maps strings to strings."""
    table = structure.get(key) if isinstance(structure, dict) else None
    if not isinstance(table, dict) or not all(isinstance(value, str) for value in table.values()):
        raise ValueError(f"{path}: 'structure' must have an object {key!r}; download the file again")
    return table


def saved_tensors(model: nn.Module) -> tuple[dict[str, LazyTensor], dict[str, str]]:
    """The tensors to save, by name, and a dict from each alias of a tied tensor to the tensor's first name."""
    first: dict[int, str] = {}
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    names = {key: first.setdefault(id(tensor), key) for key, tensor in tensors}
    state = model.state_dict()
    tied = {key: name for key, name in names.items() if key != name and key in state}
    return in_memory({key: tensor for key, tensor in state.items() if key not in tied}), tied


def tensor_differences(
    model: nn.Module, files: Weights, tied: Mapping[str, str], architecture: Architecture
) -> Iterator[Difference]:
    """Differences between a model's tensors and the files' tensors, in name, shape, dtype and tying.

    If the model belongs to a family, its floating-point weights may be stored in any floating-point dtype.
    """
    (expected, expected_ties), any_float = saved_tensors(model), architecture.function is None
    differing = {key for key in {**expected_ties, **tied} if expected_ties.get(key) != tied.get(key)}
    for key in sorted(differing):
        firsts = (expected_ties.get(key), tied.get(key))
        texts = ("a tensor of its own" if name is None else f"the same tensor as {name}" for name in firsts)
        yield Difference("tied", key, *texts)
    for key in sorted((expected.keys() | files.keys()) - differing):
        built, actual = expected.get(key), files.get(key)
        if actual is None or built is None:
            reason = "missing" if actual is None else "unexpected"
            yield Difference(reason, key, *("nothing" if w is None else str(w.shape) for w in (built, actual)))
        elif built.shape != actual.shape:
            yield Difference("shape", key, str(built.shape), str(actual.shape))
        elif built.dtype != actual.dtype and not (any_float and {built.dtype, actual.dtype} <= {*FLOATS}):
            yield Difference("dtype", key, str(built.dtype), str(actual.dtype))


def _settings(model: nn.Module) -> dict[str, dict[str, str]]:
    """The class and public attributes of each module, by the module's name."""
    return {row.place: {"class": row.class_name, **row.attributes} for row in module_rows(model)}


def _module_digests(model: nn.Module) -> dict[str, str]:
    texts = {place: json.dumps(settings, sort_keys=True) for place, settings in _settings(model).items()}
    return {place: sha256(text.encode()).hexdigest()[:16] for place, text in texts.items()}


def _module_differences(model: nn.Module, digests: Mapping[str, str]) -> Iterator[Difference]:
    """Yield a difference for each module that is missing, is new, or does not match its digest."""
    actual = _module_digests(model)
    for name in sorted(actual.keys() | digests.keys()):
        if actual.get(name) != digests.get(name):
            single = "is missing" if name in digests else "is new"
            reason = "has another class or other settings" if name in actual and name in digests else single
            yield Difference("structure", name or "the model", "", reason)


def _unsaved_differences(model: nn.Module, rebuilt: nn.Module) -> Iterator[str]:
    """Yield a line for each attribute or non-persistent buffer that differs in `rebuilt`; saving would lose its
    value.
    """
    expected, actual = _settings(model), _settings(rebuilt)
    for name in expected.keys() & actual.keys():
        for key in sorted(expected[name].keys() | actual[name].keys()):
            if (a := expected[name].get(key)) != (b := actual[name].get(key)):
                yield f"{name or 'the model'}: {key} is {a}, not {b}"
    state, buffers = model.state_dict(), dict(rebuilt.named_buffers())
    for key, buffer in model.named_buffers():
        if key not in state and key in buffers and not _equal_tensors(buffer, buffers[key]):
            yield f"{key} has other values, which would be lost, as it is not persistent"


def _equal_tensors(a: Tensor, b: Tensor) -> bool:
    is_alike = a.shape == b.shape and a.dtype == b.dtype
    return is_alike and tensor_digests(a, [a.dtype]) == tensor_digests(b, [b.dtype])


def _reason(error: Exception) -> str:
    return " ".join(f"{'' if type(error) is ValueError else type(error).__name__ + ': '}{error}".split())[:300]


def import_build(name: str, folder: Path) -> Build:
    """Import the function or class "module:name" or "file.py:name" that builds a model; errors name `folder`.

    A module is searched for on the import path and in the current folder, a file only in the current folder.
    Raises ValueError if the import fails, if the object is not callable, or if it is in `dunes.models` and builds
    no network.
    """
    module_name, _, attributes = name.partition(":")
    where = f"{folder}: built by {quote(name)}, which cannot be imported"
    end = "; run in the folder that has its source file, or pass the function in Python: build="
    # The imported module may raise any error.
    with prefix_errors(where, Exception, end, _reason), replaced(sys, "path", [*sys.path, str(Path.cwd())]):
        if NAME.fullmatch(name) is None:
            raise ValueError("expected module:name; functions inside of functions cannot be imported")
        value: Any = _import_module(module_name)
        for attribute in attributes.split("."):
            value = getattr(value, attribute)
        if not callable(value) or (OURS.fullmatch(name) and not _builds_network(value, module_name)):
            raise ValueError(f"{attributes} builds no network")
    return cast(Build, value)


def _builds_network(value: Any, module: str) -> bool:
    """True if the Python module defines `value`, an nn.Module class or a function annotated to return one."""
    result = value if isinstance(value, type) else get_type_hints(value).get("return")
    return value.__module__ == module and isinstance(result, type) and issubclass(result, nn.Module)


def _import_module(name: str) -> ModuleType:
    """Import a module by name, or a script in the current folder by file name; the running script is not run
    again.
    """
    if not name.endswith(".py"):
        return importlib.import_module(name)
    main = sys.modules["__main__"]
    if Path(getattr(main, "__file__", None) or "").name == name:
        return main
    specification = importlib.util.spec_from_file_location(Path(name).stem, Path(name).resolve())
    assert specification is not None, "the suffix is Python's"
    assert specification.loader is not None, "the suffix is Python's"
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def hf_config_of(model: nn.Module, context_length: int, loads: bool = True) -> Architecture | str:
    """Family and config that build exactly this model, or text that says how the closest family's model differs.

    If `loads` is true, the result is also text if transformers refuses the config or computes other logits.
    """
    reasons: list[tuple[bool, int, str]] = []  # (can read the model, number of equal modules, difference)
    for family, module in FAMILIES.items():
        try:
            hf = module.to_hf(module.read(model, context_length))
            config = module.from_hf(hf)  # some fields of a Config have no key in the family's config.json
            rebuilt = build_on_meta(family, config)
        except (AttributeError, LookupError, TypeError, ValueError, ArithmeticError, RuntimeError) as error:
            reasons.append((False, *_first_other_part(model, family, error)))
            continue
        difference = _first_difference(model, rebuilt)
        if difference is None and loads and (reason := refusal(family, config)):
            difference = len(list(module_rows(model))), reason
        if difference is None:
            return Architecture(family, config)
        reasons.append((True, *difference))
    most = max(reason[:2] for reason in reasons)
    return Counter(reason for *rank, reason in reasons if tuple(rank) == most).most_common(1)[0][0]


def _first_difference(model: nn.Module, rebuilt: nn.Module) -> tuple[int, str] | None:
    """Number of equal modules before the first difference, and text on this difference; None if all are equal."""
    actual, expected = list(module_rows(model)), list(module_rows(rebuilt))
    for i, (a, b) in enumerate(zip(actual, expected, strict=False)):
        if a.place != b.place:
            return i, f"it has a module {a.place} before {b.place}"
        if a != b:
            return i, f"{a.place or 'the model'} {_difference(a, b)}"
    n, m = len(actual), len(expected)
    return None if n == m else (min(n, m), f"{plural(n, 'module')}, not {m}")


def _difference(a: ModuleRow, b: ModuleRow) -> str:
    """Text on the first difference between two modules: their class, a setting or a tensor."""
    if a.class_name != b.class_name:
        return f"is {a.class_name}, not {b.class_name}"
    actual, expected = {**a.attributes, **a.tensors}, {**b.attributes, **b.tensors}
    key = next(key for key in {**actual, **expected} if actual.get(key) != expected.get(key))
    return f"has {key} {actual.get(key, 'none')}, not {expected.get(key, 'none')}"


def _first_other_part(model: nn.Module, family: str, error: Exception) -> tuple[int, str]:
    """Number of modules before the first module that a family cannot read, and text on this module.

    If no module differs from the family's modules, the text is the message of `error`.
    """
    config = FAMILIES[family].Config.from_size(32, 32, 1, 32)
    experts = {"experts": 1, "top_k": 1} if hasattr(config, "experts") else {}
    twin = build_on_meta(family, replace(config, **experts))
    parts, classes = dict(model.named_modules()), {row.place: row.class_name for row in module_rows(model)}
    for i, row in enumerate(module_rows(twin)):
        if row.place not in classes:
            return i, f"it has no {row.place}"
        if classes[row.place] != row.class_name:
            return i, f"{row.place or 'the model'} is {classes[row.place]}, not {row.class_name}"
        for key, value in vars(twin.get_submodule(row.place)).items() if row.place else ():
            if type(own := getattr(parts[row.place], key, None)) is not type(value):
                return i, f"{row.place} has {key} {type(own).__name__}, not {type(value).__name__}"
    return len(classes), " ".join(str(error).split())


@contextmanager
def naming_errors(path: Path) -> Iterator[None]:
    """Context that turns an error into a one-line ValueError that names the file."""
    try:
        yield
    except KeyError as key:
        raise ValueError(f"{path}: {key} is missing") from None
    except (ValueError, TypeError, AttributeError, OverflowError, RuntimeError) as error:
        reason = " ".join(str(error).split()).removeprefix("config.json: ")
        raise ValueError(f"{path}: {reason if len(reason) < 400 else reason[:400] + '...'}") from None


def require_depth(architecture: Architecture, tensors: int, folder: Path) -> None:
    """Before blocks are built, raise ValueError if the config has more blocks than the files have tensors."""
    if architecture.function is None and (depth := architecture.config.depth) > tensors:
        described = f"the config describes {depth:,} blocks, the files have {plural(tensors, 'tensor')}"
        raise ValueError(f"{folder}: {described}; config and files belong to different models")
