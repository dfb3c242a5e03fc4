"""Compiled decode steps, kept in the user's own cache: one for each shape of model, dtype, torch and CPU.

A package is native code, so it is read only from a folder that no other user can write to, and never from a model
folder. It holds no weights. AOTInductor makes it: https://docs.pytorch.org/docs/stable/torch.compiler_aot_inductor.html
"""

import functools
import inspect
import json
import math
import os
import platform
import re
import shlex
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar
from unittest.mock import patch
from zipfile import ZipFile

import torch
from torch import Tensor, nn

import dunes
from dunes import tree
from dunes.files import atomic, json_file
from dunes.files.staging import cache_home, folder_lock, staging_folder
from dunes.generate import generate
from dunes.generate.prefix_cache import PrefixCache
from dunes.generate.step import (
    FEW,
    STACK,
    TEXT,
    CompiledStep,
    Scores,
    Step,
    TextStep,
    export_step,
    model_state,
    outline,
    step_weights,
)
from dunes.ops.kernels import has_compiler
from dunes.parts import Cache, cache_for, vocabulary_size
from dunes.tree.summary import module_rows

PACKAGE, CARD, CHOSEN, FORMAT = "native.so", "package.json", "chosen-", 5
FILES = {1: PACKAGE, FEW: "native-few.so", TEXT: "native-text.so"}
"""Native code of the step of one token, and where a model has them, of a few, and of a text's beginning."""
OF_TEXTS = {"aot_inductor.package_constants_in_so": False, "cpp.dynamic_threads": True}
OPTIONS = OF_TEXTS | {
    "aot_inductor.allow_stack_allocation": True,
    "cpp.enable_floating_point_contract_flag": "fast",
    "realize_reads_threshold": 1,
    "score_fusion_memory_threshold": 1,
}
"""Weights stay outside; any number of threads; a norm is computed once, and not for each row that follows.

Buffers lie on the stack, up to ten times Inductor's own limit: to allocate some hundred tensors takes a seventh of
a step of ten million parameters.
"""
TOLERANCE = {torch.bfloat16: 2e-1, torch.float16: 2e-2, torch.float32: 1e-4}
"""Of the largest logit: how much a step with matrices of this dtype may differ from the model."""
GREEDY_TOKENS, CHECKED, LOOK_EVERY = 64, 6, 1.0
T = TypeVar("T")
SOURCES = "parts/*.py", "ops/*.py", "augment/*.py", "generate/step*.py"


def load_step(model: nn.Module, dtype: torch.dtype | None = None) -> CompiledStep | None:
    """The step of this model if a package for it is there; of one that cannot be used it warns.

    Its matrices have this dtype; without one, that which `compile_step` chose for these weights, or their own.
    """
    try:
        if not packages_folder().is_dir():
            return None
        package_of = _packages(model)
        for choice in _dtypes(model) if dtype is None else [dtype]:
            package = package_of(choice)
            if native_files(package):
                weights = step_weights(model, choice)
                if choice in (dtype, _dtype(model)) or _record(package, weights).is_file():
                    return _bind(model, package, weights, choice)
    except (ValueError, OSError) as error:
        warnings.warn(f"{error}; decoding without it", stacklevel=2)
    return None


Start = Callable[[], "subprocess.Popen[bytes]"]
"""Starts a process in the background."""


def step_source(model: nn.Module, start: Start | None = None) -> Callable[[], CompiledStep | None]:
    """A function that returns the step of the model, as soon as there is a package for it.

    Where native code is missing and there is a compiler, `start` starts the process that makes it.
    """
    step: CompiledStep | None = None
    process: subprocess.Popen[bytes] | None = None
    looked, files = -math.inf, None

    def find() -> CompiledStep | None:
        nonlocal step, process, looked, files
        first, running = looked == -math.inf, process is not None and process.poll() is None
        if first or (process and not running) or (running and time.monotonic() > looked + LOOK_EVERY):
            process, looked, before, files = process if running else None, time.monotonic(), files, _files()
            step = load_step(model) if first or files != before else step
            if first and start is not None and step is None and _dtypes(model) and has_compiler():
                process = start()
        return step

    return find


def _files() -> dict[Path, int]:
    """When the files that say which step to use were written."""
    with suppress(ValueError, OSError):
        names = CARD, f"{CHOSEN}*"
        return {f: f.stat().st_mtime_ns for name in names for f in packages_folder().glob(f"*/{name}")}
    return {}


def compile_step(
    model: nn.Module, context_length: int, dtype: torch.dtype | None = None
) -> tuple[Path, torch.dtype]:
    """Make the package that `load_step` will choose unless it is there; its folder and dtype.

    Without a dtype, float32 matrices are rounded to float16 if that gives equal greedy ids. Raises ValueError for
    a model whose step cannot be exported or compiled, or has no such dtype, and says why, and without a C++
    compiler. Steps of a few tokens, and of a text's beginning, follow where a model has them.
    """
    own = _dtype(model)
    choices = [dtype] if dtype else [torch.float16, own] if own == torch.float32 else [own]
    for choice in choices:
        last = choice in (dtype, own)
        with nullcontext() if last else suppress(ValueError):  # weights may be too large for float16
            step = make_step(model, choice)
            if last or _same_greedy_ids(model, context_length, step):
                break
    _choose(model, choice)
    package = _packages(model)(choice)
    for tokens, name in FILES.items():
        if name not in _digests(package):
            with suppress(ValueError), folder_lock(package):
                _add(model, choice, package, tokens)
    return package, choice


def _add(model: nn.Module, dtype: torch.dtype, package: Path, tokens: int) -> None:
    """Make another step beside that of one token. Raises ValueError, and leaves it out, if it cannot be used."""
    before = _digests(package)
    _compile(model, dtype, package, tokens)
    try:
        _bind(model, package, step_weights(model, dtype), dtype)
    except ValueError:
        _write_card(package, before)
        raise


def make_step(model: nn.Module, dtype: torch.dtype) -> CompiledStep:
    """The step with matrices of this dtype, whose package is made unless it is there. Raises as above."""
    check_step(model, dtype)
    package = _packages(model)(dtype)
    package.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    package.mkdir(exist_ok=True, mode=0o700)
    with folder_lock(package):  # another process may be making it
        files: list[Path] = []
        with suppress(ValueError):  # damaged ones are made again
            files = native_files(package)
        if not files:
            if not has_compiler():
                raise ValueError(
                    "decoding cannot be compiled: no C++ compiler; install g++ or clang. Without one the modules "
                    "decode, several times slower"
                )
            _compile(model, dtype, package, 1)
    return _bind(model, package, step_weights(model, dtype), dtype)


def check_step(model: nn.Module, dtype: torch.dtype | None = None) -> None:
    """Raise ValueError for a model on another device, with hooks, or that can have no step of this dtype."""
    if next(model.parameters()).device.type != "cpu":
        raise ValueError("steps are compiled for the CPU, and this model is on another device")
    if not (choices := _dtypes(model)):
        raise ValueError("a compiled step has no hooks and is in float32, float16 or bfloat16; change the model")
    if dtype is not None and dtype not in choices:
        names = ", ".join(str(choice).removeprefix("torch.") for choice in choices)
        raise ValueError(f"--dtype {str(dtype).removeprefix('torch.')}: a step of this model can have {names}")


def native_files(package: Path) -> list[Path]:
    """The files of native code in a package; none if it is not made. Raises ValueError for damaged ones."""
    digests = _digests(package)
    for file in (package / name for name in digests):
        if not (file.is_file() and atomic.digest(file) == digests[file.name]):
            raise ValueError(f"{file}: not the bytes that were written; run dunes compile again")
    return [package / name for name in sorted(digests)]


def _choose(model: nn.Module, dtype: torch.dtype) -> None:
    """Let `load_step` use the package of this dtype for these weights."""
    package_of = _packages(model)
    for choice in _dtypes(model):
        if (package := package_of(choice)).is_dir():
            record = _record(package, step_weights(model, choice))
            if choice == dtype and not record.is_file():
                atomic.write_file(record, b"")
            elif choice != dtype:
                record.unlink(missing_ok=True)


def packages_folder() -> Path:
    """The folder of packages. Raises ValueError if it is another user's, or others have access to it."""
    folder = cache_home() / "steps"
    if folder.exists() and (folder.stat().st_uid != os.getuid() or folder.stat().st_mode & 0o077):
        raise ValueError(f"{folder}: contains native code that others can change; remove it, or chmod 700 it")
    return folder


def _dtype(model: nn.Module) -> torch.dtype:
    return next(model.parameters()).dtype


def _dtypes(model: nn.Module) -> list[torch.dtype]:
    """The dtypes that a step's matrices can have, the model's own last; none on a device, or with hooks."""
    if next(model.parameters()).device.type != "cpu":
        return []
    if any(module._forward_hooks or module._forward_pre_hooks for module in model.modules()):
        return []  # a step would not call them
    return [*TOLERANCE] if _dtype(model) == torch.float32 else [d for d in TOLERANCE if d == _dtype(model)]


def _record(package: Path, weights: Mapping[str, Tensor]) -> Path:
    """The file whose presence says that the package was chosen for these weights.

    Its name has the sum of all words of each tensor, which takes as long as reading them, and some of the words.
    """
    digest = sha256()
    for name in sorted(weights):
        data = weights[name].detach().contiguous().reshape(-1).view(torch.uint8).numpy()
        words = data[: len(data) // 8 * 8].view("int64")
        some = words[::997].tobytes() + data[words.nbytes :].tobytes()
        digest.update(repr((name, int(words.sum()))).encode() + some)
    return package / f"{CHOSEN}{digest.hexdigest()[:32]}"


def _packages(model: nn.Module) -> Callable[[torch.dtype], Path]:
    """The folder of each dtype's package, named by a digest of everything that the compiled code depends on."""
    rows = [repr(tuple(row)) for row in module_rows(model)]
    dtypes = [str(t.dtype) for t in (*model.parameters(), *model.buffers())]
    internal = vars(nn.Module())
    plain = [(k, v) for m in model.modules() for k, v in sorted(vars(m).items()) if k not in internal]
    files: set[str] = {inspect.getsourcefile(type(module)) or "" for module in model.modules()}
    attributes = [(k, _describe(v, files)) for k, v in plain]
    package = Path(dunes.__file__).parent
    sources = {*files, *(str(f) for pattern in SOURCES for f in package.glob(pattern))}
    digests = [_source_digest(path, os.stat(path).st_mtime_ns) for path in sorted(sources) if os.path.isfile(path)]
    machine = torch.__version__, sys.platform, platform.machine(), *_processor()
    everything = FORMAT, sorted(OPTIONS.items()), *machine, *rows, *dtypes, *attributes, *digests
    digest = sha256(repr(everything).encode())
    return lambda dtype: packages_folder() / sha256(digest.digest() + str(dtype).encode()).hexdigest()[:32]


@functools.cache
def _source_digest(path: str, mtime_ns: int) -> str:
    return atomic.digest(Path(path))


def _describe(value: Any, files: set[str], depth: int = 4) -> str:
    """A text with everything in an attribute that traced code may depend on; `files` get those of its code."""
    if isinstance(value, Tensor | nn.Module) or not depth:
        return type(value).__qualname__
    if isinstance(value, list | tuple | dict | set | frozenset):
        entries = value.items() if isinstance(value, dict) else value
        texts = [_describe(entry, files, depth - 1) for entry in entries]
        return str(sorted(texts) if isinstance(value, set | frozenset) else texts)
    if isinstance(value, functools.partial):
        return _describe([value.func, value.args, value.keywords], files, depth - 1)
    if inspect.isfunction(value):
        files.add(value.__code__.co_filename)
        cells = [_describe(cell.cell_contents, files, depth - 1) for cell in value.__closure__ or ()]
        constants = _without_addresses(value.__code__.co_consts)
        defaults = _describe([value.__defaults__, value.__kwdefaults__], files, depth - 1)
        return f"{value.__qualname__} {value.__code__.co_code!r} {constants} {cells} {defaults}"
    if inspect.ismethod(value):
        return f"{_describe(value.__func__, files, depth)} {_describe(value.__self__, files, depth)}"
    if hasattr(value, "__dict__") and not isinstance(value, type):
        files.update(filter(None, [sys.modules[type(value).__module__].__dict__.get("__file__")]))
        return f"{type(value).__qualname__} {_describe(vars(value), files, depth - 1)}"
    return _without_addresses(value)


def _without_addresses(value: Any) -> str:
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


@functools.cache
def _processor() -> list[str]:
    """What identifies the instructions of this processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return [platform.processor(), torch.backends.cpu.get_cpu_capability()]
    return sorted({line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))})


def _digests(package: Path) -> Mapping[str, str]:
    return json_file.read(package / CARD) if (package / CARD).is_file() else {}


def _bind(model: nn.Module, package: Path, weights: Mapping[str, Tensor], dtype: torch.dtype) -> CompiledStep:
    names = {n: name for n, name in FILES.items() if name in _digests(package)}
    of_text = step_weights(model, _dtype(model)) if TEXT in names else {}
    return bind_step(model, {n: (package / f, of_text if n == TEXT else weights) for n, f in names.items()}, dtype)


def bind_step(
    model: nn.Module, files: Mapping[int, tuple[Path, Mapping[str, Tensor]]], dtype: torch.dtype
) -> CompiledStep:
    """The step of these files and weights. Raises ValueError if it computes something else than the model."""
    step = CompiledStep(files, dtype)
    cache, expected = _check_tokens(model)
    step.state, step.example = model_state(model), cache
    for n, (file, _) in files.items():
        kept = CHECKED - n if n != TEXT else 0
        cache.truncate(torch.tensor([kept]))
        for tensor in cache.keys + cache.values:
            tensor[:, :, kept:] = torch.nan  # which the step has to replace
        with torch.autocast("cpu", enabled=False):
            scores = _attempt("run", functools.partial(_evaluate, step, n, cache))
        logits = torch.stack([s.logits for s in scores])
        difference, largest = (logits - expected[-len(logits) :]).abs().max(), expected.abs().max()
        tolerance = TOLERANCE[_dtype(model) if n == TEXT else dtype]
        if not difference <= tolerance * largest:
            words = f"its logits differ by {difference:.1e} from the model's, of up to {largest:.1e}"
            raise ValueError(f"{file}: {words}")
    return step


def _evaluate(step: CompiledStep, tokens: int, cache: Cache) -> list[Scores]:
    """The scores after the last of the tokens that are checked, or after all of a text."""
    if tokens == TEXT:
        return [step.read_text([*range(CHECKED, 0, -1)], cache)]
    return step([*range(tokens, 0, -1)], cache)


def _check_tokens(model: nn.Module) -> tuple[Cache, Tensor]:
    """A cache of 8 slots that holds tokens, which count down to 1, and the logits (FEW, V) after the last of them.

    The tokens differ where there are enough. Raises ValueError for a model without a cache.
    """
    if (cache := cache_for(model, 1, 8)) is None:
        raise ValueError("the model may mix tokens, so that it needs its whole text for each token")
    ids = torch.arange(CHECKED, 0, -1) % (vocabulary_size(model) or CHECKED + 1)
    with torch.no_grad(), tree.mode(model, False), torch.autocast("cpu", enabled=False):
        return cache, model(ids[None], cache=cache, last=FEW)[0].float()


def _compile(model: nn.Module, dtype: torch.dtype, package: Path, tokens: int) -> None:
    file = package / FILES[tokens]
    digests = dict(_digests(package)) if tokens != 1 else {}  # that of one token comes first
    with warnings.catch_warnings(), staging_folder(file) as staged:
        warnings.simplefilter("ignore")  # torch's own deprecations
        graph = _export(model, _dtype(model) if tokens == TEXT else dtype, tokens)
        compile_graph(graph, staged / file.name, tokens == TEXT)
        for part in sorted(staged.glob(f"{file.stem}.*")):
            digests[part.name] = atomic.digest(part)
            os.replace(part, package / part.name)
    _write_card(package, digests)


def compile_graph(graph: torch.export.ExportedProgram, path: Path, as_usual: bool = True) -> None:
    """Write native code of a graph, and beside it what its calls of other operators need, if anything.

    It is compiled as usual, or as a step of few tokens is. The folder gets other files, too. Raises ValueError for
    what Inductor cannot compile.
    """
    from torch._inductor import aoti_compile_and_package
    from torch._inductor.codegen import common
    from torch._inductor.codegen import cpp_wrapper_cpu_array_ref as wrapper
    from torch._inductor.utils import fresh_cache

    archive = path.parent / "archive.pt2"
    arguments: Any = {"package_path": str(archive), "inductor_configs": {**(OF_TEXTS if as_usual else OPTIONS)}}
    # Others may be writing files of these names into the usual cache; the compiler takes no spaces.
    plain = shlex.quote(str(path.parent)) == str(path.parent)
    place = nullcontext(str(path.parent)) if plain else TemporaryDirectory()
    limit = patch.object(wrapper, "MAX_STACK_ALLOCATION_SIZE", STACK, create=True)
    # The first compilation of a process, which may be another's, decides what all have.
    common.init_backend_registration()
    cpu = common.device_codegens["cpu"]
    writer = patch.object(cpu, "cpp_wrapper_codegen", wrapper.CppWrapperCpuArrayRef)
    with place as folder, fresh_cache(dir=folder), limit, nullcontext() if as_usual else writer:
        _attempt("compiled", lambda: aoti_compile_and_package(graph, **arguments))
    with ZipFile(archive) as members:  # the code, and calls of operators that have no interface in C
        for name in (n for n in members.namelist() if n.endswith((".wrapper.so", ".wrapper.json"))):
            path.with_suffix(Path(name).suffix).write_bytes(members.read(name))


def _write_card(package: Path, digests: Mapping[str, str]) -> None:
    atomic.write_file(package / CARD, json.dumps(digests).encode())


def _export(model: nn.Module, dtype: torch.dtype, tokens: int) -> torch.export.ExportedProgram:
    buffers = [(name, b, b._version) for name, b in model.named_buffers()]
    cache, _ = _check_tokens(model)
    for (name, before, version), now in zip(buffers, model.buffers(), strict=True):
        if now is not before or now._version != version:
            raise ValueError(f"{name}: a buffer that forward changes, which a compiled step cannot; remove it")
    with tree.mode(model, False):
        step = (TextStep if tokens == TEXT else Step)(outline(model, dtype)).eval()
    with torch.autocast("cpu", enabled=False):  # whose casts would be part of the graph
        graph = _attempt("exported", lambda: export_step(step, cache, tokens))
    if constants := graph.graph_signature.lifted_tensor_constants:
        raise ValueError(f"{constants[0]}: a tensor made in forward; register it as a buffer")
    return graph


def _attempt(verb: str, work: Callable[[], T]) -> T:
    """The result of work by torch's compiler, which raises whatever it meets. Raises ValueError of one line."""
    try:
        return work()
    except Exception as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ValueError(f"the decoding of this model cannot be {verb}: {reason}") from None


def _same_greedy_ids(model: nn.Module, context_length: int, step: CompiledStep) -> bool:
    """True if the model writes the same by itself after each of the first ids, with the step and without."""

    def written(first: int, step: CompiledStep | None) -> list[int]:
        cache, limit = PrefixCache(model, step=step), min(GREEDY_TOKENS, context_length - 1)
        tokens = generate(model, [first], max_tokens=limit, context_length=context_length, cache=cache)
        return [token.id for token in tokens]

    return all(written(first, None) == written(first, step) for first in (0, 1))
