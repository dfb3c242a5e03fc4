"""Packages of compiled decoding code in the user's cache folder: one per model architecture, dtype, torch version
and CPU.

A package contains native code, so it is read only from a folder that no other user can write to, never from a
model folder. It contains no weights. AOTInductor compiles the code:
https://docs.pytorch.org/docs/stable/torch.compiler_aot_inductor.html
"""

import inspect
import json
import os
import platform
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from copy import copy
from functools import partial
from hashlib import sha256
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from zipfile import ZipFile

import torch
from torch import Tensor, nn

import dunes
from dunes import measure, tree
from dunes.context import replaced
from dunes.files import atomic, json_file
from dunes.files.atomic import cache_home, folder_lock, staging_folder
from dunes.generate import generate
from dunes.generate.decode_graph import (
    BATCH,
    FEW,
    ROWS,
    STACK,
    TEXT,
    CompiledStep,
    DecodeGraph,
    HeadGraph,
    LayerGraph,
    Run,
    Scores,
    TextGraph,
    export_decode_graph,
    in_float32,
    join_parts,
    load_native,
    model_state,
    outline,
    step_weights,
)
from dunes.generate.prefix_cache import PrefixCache
from dunes.ops import row_products
from dunes.ops.kernels import attempt, why_not_compiled
from dunes.parts import Cache, Decoder, cache_for, vocabulary_size
from dunes.parts.decoder import recurrent_part
from dunes.tree.summary import stable_repr

PACKAGE, CARD, CHOSEN, FORMAT = "native.so", "package.json", "chosen-", 7
NAMES = {FEW: "few", TEXT: "text", BATCH: "batch", ROWS: "rows"}
FILES = {1: PACKAGE} | {n: f"native-{name}.so" for n, name in NAMES.items()}
"""File names of native code by number of tokens. Only the first file is required. ROWS (one token in each of
several rows) is compiled for models without BATCH. If only one block per form is compiled, the files in HEADS
replace those here."""
HEADS = {n: FILES[n].replace(".so", "-head.so") for n in (1, BATCH, FEW, ROWS)}
"""Names of the heads' files in packages where blocks of one form are compiled once; see `_layer_file`."""
PRODUCTS = "row-products.so"
"""Name of the library that steps for several rows call; missing if it does not compile."""
LAYERS_OF_A_FORM = 8
"""Only one block per form (set of blocks of equal structure) is compiled if forms have at least this many blocks
on average. Compiling one more form takes as long as compiling seven more blocks in one file."""
LAYER_PARAMETERS = 2_000_000
"""Only one block per form is compiled if blocks have at least this many parameters in linear layers on average. In
smaller blocks, the calls of native code would dominate the time."""
TEXT_OPTIONS: dict[str, Any] = {"aot_inductor.package_constants_in_so": False, "cpp.dynamic_threads": True}
ROW_OPTIONS = TEXT_OPTIONS | {
    "realize_reads_threshold": 1,
    "score_fusion_memory_threshold": 1,
    "cpp.enable_floating_point_contract_flag": "fast",
}
OPTIONS = ROW_OPTIONS | {"aot_inductor.allow_stack_allocation": True}
"""Inductor's options for a step: code without weights, for any number of threads, that computes each norm once.

Buffers of up to ten times Inductor's default limit are on the stack. With ten million parameters, allocating some
hundred tensors instead would take a seventh of the time of a token.
"""
TOLERANCE = {torch.bfloat16: 2e-1, torch.float16: 2e-2, torch.float32: 1e-4}
"""Maximum error of a step's logits, as a fraction of the largest logit, by the dtype of the step's matrices."""
GREEDY_TOKENS = 64
"""Number of tokens that the model and a half-precision step generate for comparison."""
TIMED = 30
"""Number of one-token timings per step; the smallest time counts."""
CHECKED = 6
"""Number of tokens in the cache when the logits of a step are checked."""
LOOK_EVERY = 1.0
"""Seconds between two checks for a new package."""
SOURCES = "parts/*.py", "ops/*.py", "ops/*.cpp", "augment/*.py", "generate/decode_graph.py"


def load_step(model: nn.Module, dtype: torch.dtype | None = None) -> CompiledStep | None:
    """The compiled step of this model; None if there is no package or, with a warning, if the package is unusable.

    The step's matrices have `dtype`, by default the dtype that `compile_step` recorded for these weights. If no
    package with the recorded dtype exists, the weights' own dtype is used.
    """
    try:
        if not packages_folder().is_dir() or (dtype or _dtype(model)) not in _dtypes(model):
            return None
        folder = _folder(model)
        for choice in [dtype] if dtype else [_read_choice(model, folder) or _dtype(model), _dtype(model)]:
            if names := native_files(package := folder / str(choice)):
                return _bind(model, package, names, choice)
    except (ValueError, OSError) as error:
        warnings.warn(f"{error}; decoding without it", stacklevel=2)
    return None


Start = Callable[[], "subprocess.Popen[bytes]"]
"""A function that starts a process in the background."""


def step_source(model: nn.Module, start: Start | None = None) -> Callable[[], CompiledStep | None]:
    """A function that returns the model's compiled step, or None as long as its package does not exist.

    If the package is missing and a compiler exists, `start` starts the process that compiles it.
    """

    checked_at = 0.0
    files: dict[Path, int] | None = None
    step: CompiledStep | None = None
    process: subprocess.Popen[bytes] | None = None

    def find() -> CompiledStep | None:
        nonlocal checked_at, files, process, step
        ended = process is not None and process.poll() is not None
        is_due = process is not None and time.monotonic() >= checked_at + LOOK_EVERY
        if files is None or ended or is_due:
            checked_at, now = time.monotonic(), _files()
            step = load_step(model) if now != files else step
            process = None if ended else process
            if files is None and start is not None and step is None and _dtypes(model) and not why_not_compiled():
                process = start()
            files = now  # set last, so that after Ctrl-C the next call begins again
        return step

    return find


def _files() -> dict[Path, int]:
    """Modification times of the files that determine which step is used."""
    with suppress(ValueError, OSError):
        names = f"*/{CARD}", f"{CHOSEN}*"
        return {f: f.stat().st_mtime_ns for name in names for f in packages_folder().glob(f"*/{name}")}
    return {}


def compile_step(
    model: nn.Module, context_length: int, dtype: torch.dtype | None = None, whole: bool = False
) -> tuple[Path, torch.dtype]:
    """Compile the package that `load_step` loads, unless it exists; returns the package's folder and dtype.

    By default, `dtype` is the dtype recorded for these weights. Without a record, float32 matrices are rounded to
    bfloat16 or float16, whichever is faster, provided that greedy decoding gives the same ids. The chosen dtype is
    recorded. Steps for FEW tokens, for the start of a text and for several rows are added if the model supports
    them. If many large blocks have the same structure, only the head and one block of each structure are compiled,
    for one token and for FEW tokens. With `whole`, the complete model is compiled, so that the files run without
    the model's modules. Raises ValueError with the reason if the step cannot be exported or compiled, if it does
    not support the dtype, or if no C++ compiler exists.
    """
    check_step(model, dtype)
    folder = _folder(model)
    choice = dtype or _read_choice(model, folder) or _choose_dtype(model, context_length)
    make_step(model, choice, whole)
    package = folder / str(choice)
    if (_read_choice(model, folder) or _dtype(model)) != choice:
        atomic.write_file(_record(model, folder), str(choice).encode())
    steps = [[FEW], [TEXT]] if whole or not layer_forms(model) else [[FEW]]
    for forms in steps if whole else [*steps, [BATCH, ROWS]]:
        for tokens in forms:  # the first one that can be compiled
            with suppress(ValueError):
                _add(model, choice, package, tokens, whole)
                break
    return package, choice


def _choose_dtype(model: nn.Module, context_length: int) -> torch.dtype:
    """The fastest half-precision dtype in which a float32 model generates the same greedy ids; else the model's
    own dtype."""
    own, steps = _dtype(model), dict[torch.dtype, CompiledStep]()
    for half in [d for d in TOLERANCE if d != own] if own == torch.float32 else []:
        with suppress(ValueError):  # weights may be too large for float16
            step = make_step(model, half)
            steps |= {half: step} if _same_greedy_ids(model, context_length, step) else {}
            if steps and layer_forms(model):
                break  # reading large matrices takes equally long in bfloat16 and float16
    return _fastest(steps) if steps else own


def _fastest(steps: Mapping[torch.dtype, CompiledStep]) -> torch.dtype:
    """The dtype whose step takes the least processor time for a token; each round of timings runs every step
    once."""

    def seconds(step: CompiledStep) -> float:
        step.example.truncate(torch.tensor([CHECKED - 1]))
        start = time.process_time()
        step([0], step.example)
        return time.process_time() - start

    rounds = [{dtype: seconds(step) for dtype, step in steps.items()} for _ in range(TIMED)]
    return min(steps, key=lambda dtype: min(times[dtype] for times in rounds))


def make_step(model: nn.Module, dtype: torch.dtype, whole: bool = False) -> CompiledStep:
    """The step with matrices of this dtype, compiled unless its package exists.

    Raises ValueError in the same cases as `compile_step`.
    """
    check_step(model, dtype)
    packages_folder().mkdir(parents=True, exist_ok=True, mode=0o700)
    package = _folder(model) / str(dtype)
    package.mkdir(parents=True, exist_ok=True)
    _add(model, dtype, package, 1, whole)
    return _bind(model, package, native_files(package), dtype)


def _add(model: nn.Module, dtype: torch.dtype, package: Path, tokens: int, whole: bool = False) -> None:
    """Compile the step for this number of tokens and add it to a package, unless the package contains it.

    Raises ValueError, and adds nothing, if the step cannot be compiled, or if its logits differ from the model's.
    """
    by_layer = not whole and tokens in HEADS and bool(layer_forms(model))
    name, digests = HEADS[tokens] if by_layer else FILES[tokens], dict[str, str]()
    with folder_lock(package):  # another process may be compiling the package
        # A damaged package is compiled again, from its first file on.
        with suppress(ValueError) if tokens == 1 else nullcontext():
            digests |= native_files(package)
        if name in digests:
            return
        if reason := why_not_compiled():
            raise ValueError(f"decoding cannot be compiled: {reason}. Uncompiled, it is several times slower")
        with warnings.catch_warnings(), staging_folder(package / name) as staged:
            warnings.simplefilter("ignore")  # torch warns of its own deprecations
            options = {TEXT: TEXT_OPTIONS, ROWS: ROW_OPTIONS, BATCH: ROW_OPTIONS}.get(tokens, OPTIONS)
            computed = _dtype(model) if tokens == TEXT else dtype
            parts = _export_parts(model, dtype, tokens) if by_layer else [(name, _export(model, computed, tokens))]
            for file, graph in parts:
                compile_graph(graph, staged / file, options)
            with suppress(ValueError):
                if tokens in (ROWS, BATCH):
                    row_products.compile_library(staged / PRODUCTS)
            _bind(model, staged, [file.name for file in staged.iterdir()], dtype)
            for part in sorted(staged.iterdir()):
                digests[part.name] = atomic.digest(part)
                os.replace(part, package / part.name)
        atomic.write_file(package / CARD, json.dumps(digests).encode())


def check_step(model: nn.Module, dtype: torch.dtype | None = None) -> None:
    """Raise ValueError for an unsupported dtype, and for a model that is no Decoder, is not on the CPU, has hooks
    or a recurrent state, or needs its entire text for each token."""
    DecodeGraph(model)
    if cache_for(model, 1, 1) is None:
        raise ValueError("the model may mix tokens, so each token needs a forward over the whole text")
    if name := recurrent_part(model):
        raise ValueError(
            f"compiled decoding needs a KV cache, and {name} has a recurrent state; use it without compiling"
        )
    if next(model.parameters()).device.type != "cpu":
        raise ValueError("steps are compiled for the CPU, and this model is on another device")
    if not (choices := _dtypes(model)):
        raise ValueError("compiled decoding needs a model without hooks, in float32, float16 or bfloat16")
    if dtype is not None and dtype not in choices:
        names = ", ".join(str(choice).removeprefix("torch.") for choice in choices)
        raise ValueError(f"--dtype {str(dtype).removeprefix('torch.')}: this model can be compiled in {names}")


def has_hooks(model: nn.Module) -> bool:
    """True if a forward of the model calls hooks; compiled code would not call them."""
    return any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def native_files(package: Path) -> dict[str, str]:
    """Digests of a package's files of native code, by name; empty if the package does not exist.

    Raises ValueError for damaged files.
    """
    digests = json_file.read(package / CARD) if (package / CARD).is_file() else {}
    for name, digest in digests.items():
        if not ((file := package / name).is_file() and atomic.digest(file) == digest):
            raise ValueError(f"{file}: not the bytes that were written; run dunes compile again")
    return digests


def packages_folder() -> Path:
    """The folder of packages. Raises ValueError if another user owns the folder or has access to it."""
    folder = cache_home() / "steps"
    if folder.exists() and (folder.stat().st_uid != os.getuid() or folder.stat().st_mode & 0o077):
        raise ValueError(f"{folder}: contains native code that others can change; remove it, or chmod 700 it")
    return folder


def _dtype(model: nn.Module) -> torch.dtype:
    return next(model.parameters()).dtype


def _dtypes(model: nn.Module) -> list[torch.dtype]:
    """Supported dtypes of a step's matrices; the model's own dtype is the last. Empty for a model with hooks or
    not on the CPU."""
    if next(model.parameters()).device.type != "cpu" or has_hooks(model):
        return []
    return [*TOLERANCE] if _dtype(model) == torch.float32 else [d for d in TOLERANCE if d == _dtype(model)]


def _read_choice(model: nn.Module, folder: Path) -> torch.dtype | None:
    """The dtype that is recorded for these weights, or None."""
    record = _record(model, folder) if any(folder.glob(f"{CHOSEN}*")) else folder
    choice = record.read_text() if record.is_file() else ""
    return next((dtype for dtype in _dtypes(model) if str(dtype) == choice), None)


def _record(model: nn.Module, folder: Path) -> Path:
    """The file that records the dtype chosen for these weights.

    The file name is a digest of each tensor's name, of the sum of its 8-byte words, and of a sample of these
    words. Computing the name takes as long as reading the weights.
    """
    digest = sha256()
    for name, tensor in sorted(step_weights(model, _dtype(model)).items()):
        data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
        words = data[: len(data) // 8 * 8].view("int64")
        sample = words[::997].tobytes() + data[words.nbytes :].tobytes()
        digest.update(repr((name, int(words.sum()))).encode() + sample)
    return folder / f"{CHOSEN}{digest.hexdigest()[:32]}"


def _folder(model: nn.Module) -> Path:
    """The folder of a model's packages, named by a digest of everything that the compiled code depends on."""
    package, files = Path(dunes.__file__).parent, set[str]()
    modules, tensors = _structure(model, files)
    files.update(str(file) for pattern in SOURCES for file in package.glob(pattern))
    sources = [atomic.digest(Path(file)) for file in sorted(files) if os.path.isfile(file)]
    processor = measure.processor() or (platform.processor(), torch.backends.cpu.get_cpu_capability())
    machine = torch.__version__, sys.platform, platform.machine(), processor
    dependencies = FORMAT, sorted(OPTIONS.items()), machine, modules, tensors, sources
    return packages_folder() / sha256(repr(dependencies).encode()).hexdigest()[:32]


def _structure(model: nn.Module, files: set[str]) -> tuple[list[Any], list[Any]]:
    """The modules and tensors that a model's compiled code depends on; adds the modules' source files to
    `files`."""
    internal, modules = vars(nn.Module()), []
    for place, module in model.named_modules():
        files.add(_source_file(type(module)))
        attributes = [(k, _describe(v, files)) for k, v in sorted(vars(module).items()) if k not in internal]
        modules.append((place, type(module).__qualname__, attributes))
    return modules, [(k, t.shape, t.dtype) for k, t in chain(model.named_parameters(), model.named_buffers())]


def layer_forms(model: nn.Module) -> list[int]:
    """Per block, the index of the first block of equal structure; empty if all blocks are compiled in one file."""
    in_order = any(getattr(m, "depends_on_order", False) for m in model.modules())
    blocks = [*model.blocks] if isinstance(model, Decoder) and not in_order else []
    texts = [repr(_structure(block, set())) for block in blocks]
    modules = chain.from_iterable(block.modules() for block in blocks)
    size = sum(getattr(m, "in_features", 0) * getattr(m, "out_features", 0) for m in modules)
    is_large = size >= LAYER_PARAMETERS * len(blocks) and len(blocks) >= LAYERS_OF_A_FORM * len({*texts})
    return [texts.index(text) for text in texts] if is_large else []


def _layer_file(head: Path, layer: int) -> Path:
    return head.with_name(head.name.replace("head", f"layer{layer}"))


def _source_file(module: type[nn.Module]) -> str:
    """The file of a class; for a class in a script imported by path, the file of its `forward`."""
    try:
        return inspect.getsourcefile(module) or ""
    except TypeError:  # the class's module is not in sys.modules
        return inspect.getsourcefile(module.forward) or ""


def _describe(value: Any, files: set[str], depth: int = 4) -> str:
    """Describe everything in an attribute that may affect traced code; adds source files to `files`."""
    if isinstance(value, Tensor | nn.Module):
        return type(value).__qualname__
    if not depth:
        return stable_repr(value)
    if isinstance(value, list | tuple | dict | set | frozenset):
        entries = value.items() if isinstance(value, dict) else value
        texts = [_describe(entry, files, depth - 1) for entry in entries]
        return str(sorted(texts) if isinstance(value, set | frozenset) else texts)
    if isinstance(value, partial):
        return _describe([value.func, value.args, value.keywords], files, depth - 1)
    if inspect.isfunction(value):
        files.add(value.__code__.co_filename)
        cells = [_describe(cell.cell_contents, files, depth - 1) for cell in value.__closure__ or ()]
        constants = stable_repr(value.__code__.co_consts)
        defaults = _describe([value.__defaults__, value.__kwdefaults__], files, depth - 1)
        return f"{value.__qualname__} {value.__code__.co_code!r} {constants} {cells} {defaults}"
    if inspect.ismethod(value):
        return f"{_describe(value.__func__, files, depth)} {_describe(value.__self__, files, depth)}"
    if hasattr(value, "__dict__") and not isinstance(value, type):
        files.update(filter(None, [sys.modules[type(value).__module__].__dict__.get("__file__")]))
        return f"{type(value).__qualname__} {_describe(vars(value), files, depth - 1)}"
    return stable_repr(value)


def _bind(model: nn.Module, package: Path, names: Collection[str], dtype: torch.dtype) -> CompiledStep:
    if PRODUCTS in names:
        row_products.load_library(package / PRODUCTS)
    files = {n: package / name for table in (HEADS, FILES) for n, name in table.items() if name in names}
    dtypes = {n: _dtype(model) if n == TEXT else dtype for n in files}
    weights = {d: step_weights(model, d) for d in {*dtypes.values()}}
    return bind_step(model, {n: (file, weights[dtypes[n]]) for n, file in files.items()}, dtype)


def bind_step(
    model: nn.Module, files: Mapping[int, tuple[Path, Mapping[str, Tensor]]], dtype: torch.dtype
) -> CompiledStep:
    """The compiled step from these files and weights. Raises ValueError if the step's logits differ from the
    model's."""
    step = CompiledStep({n: _load(model, *file) for n, file in files.items()}, dtype)
    cache, own = _check_tokens(model)
    step.state, step.example = model_state(model), cache
    exact = own if _dtype(model) == torch.float32 else _exact_logits(model, cache)
    rows = cache.select_rows(torch.tensor([0, 0]))
    checks = [(n, file) for n, (file, _) in files.items() if n != BATCH]
    checks += [(n, files[BATCH][0]) for n in (FEW, ROWS) if BATCH in files]
    for n, file in checks:
        ids = [*range({TEXT: CHECKED, ROWS: 2}.get(n, n), 0, -1)]
        lengths = [CHECKED - len(ids)] if n != ROWS else [CHECKED - 2, CHECKED - 1]
        used = rows if n == ROWS else cache
        used.truncate(torch.tensor(lengths))
        for tensor in used.keys + used.values:
            for row, length in zip(tensor, lengths, strict=True):
                row[:, length : length + len(ids) // len(lengths)] = torch.nan  # NaN that the step must overwrite
        with torch.autocast("cpu", enabled=False):
            scores = attempt("a compiled step cannot be run", partial(_run(step, n), ids, used))
        logits = torch.stack([s.logits for s in scores])
        expected, computed = (own, _dtype(model)) if n == TEXT else (exact, dtype)
        require_close(f"{file}: its logits", logits - expected[-len(logits) :], expected, computed)
    return step


def _load(model: nn.Module, file: Path, weights: Mapping[str, Tensor]) -> Run:
    """The code in a file of FILES; for a head in HEADS, the joined code of blocks and head."""
    (run,), firsts = load_native(file, weights), layer_forms(model)
    if file.name not in HEADS.values():
        return run
    layers: dict[int, Run] = {}
    prefixes = [f"model.blocks.{i}." for i in range(len(firsts))]
    named = [{f"block.{k.removeprefix(p)}": t for k, t in weights.items() if k.startswith(p)} for p in prefixes]
    for first in {*firsts}:
        numbers = [i for i, form in enumerate(firsts) if form == first]
        layers |= zip(numbers, load_native(_layer_file(file, first), *(named[i] for i in numbers)), strict=True)
    return join_parts(model, [layers[i] for i in range(len(firsts))], run)


def _run(step: CompiledStep, tokens: int) -> Callable[[list[int], Cache], list[Scores]]:
    """The step's method for this number of tokens; for ROWS, the ids are one per row."""
    rows = lambda ids, cache: [*chain(*step.read_rows({i: [id] for i, id in enumerate(ids)}, cache).values())]
    return {TEXT: step.read_text, ROWS: rows}.get(tokens, step)


def require_close(subject: str, difference: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """Raise ValueError if `difference`, relative to `expected`, exceeds the tolerance of this dtype."""
    worst, largest = difference.abs().max(), expected.abs().max()
    if not worst <= TOLERANCE[dtype] * largest:
        raise ValueError(f"{subject} differ by {worst:.1e} from the model's (max {largest:.1e})")


def _check_tokens(model: nn.Module) -> tuple[Cache, Tensor]:
    """A cache of 8 slots with the tokens CHECKED, ..., 2, 1, and the logits (FEW, V) after the last FEW tokens.

    The tokens are distinct if the vocabulary is large enough.
    """
    cache = cache_for(model, 1, 8)
    assert cache is not None, "check_step refuses others"
    ids = torch.arange(CHECKED, 0, -1) % (vocabulary_size(model) or CHECKED + 1)
    with torch.no_grad(), tree.mode(model, False), torch.autocast("cpu", enabled=False):
        return cache, model(ids[None], cache=cache, last=FEW)[0].float()


def _exact_logits(model: nn.Module, cache: Cache) -> Tensor:
    """Logits of `_check_tokens` with float32 activations; also writes the keys and values into `cache`.

    A compiled step's activations are also float32. With bfloat16 activations, the error of a published model's
    logits can exceed the largest logit.
    """
    with in_float32(model):
        exact, logits = _check_tokens(model)
    for stored, tensor in zip(cache.keys + cache.values, exact.keys + exact.values, strict=True):
        stored.copy_(tensor)
    return logits


def compile_graph(
    graph: torch.export.ExportedProgram, path: Path, options: Mapping[str, Any] = TEXT_OPTIONS
) -> None:
    """Write the native code of a graph, and a file that lists calls of operators without a C interface, if any.

    With OPTIONS, the wrapper code allocates its buffers on the stack. Raises ValueError for a graph that Inductor
    cannot compile.
    """
    from torch._inductor import aoti_compile_and_package
    from torch._inductor.codegen import common
    from torch._inductor.codegen import cpp_wrapper_cpu_array_ref as wrapper
    from torch._inductor.utils import fresh_cache

    limit = replaced(wrapper, "MAX_STACK_ALLOCATION_SIZE", STACK)
    # Inductor's backends, registered once per process, must be registered before one of them is replaced.
    common.init_backend_registration()
    cpu = common.device_codegens["cpu"]
    used = wrapper.CppWrapperCpuArrayRef if options is OPTIONS else cpu.cpp_wrapper_codegen
    writer = replaced(cpu, "cpp_wrapper_codegen", used)
    # In a temporary folder: other processes may use the usual cache; the compiler accepts no spaces in `path`.
    with TemporaryDirectory() as folder, fresh_cache(dir=folder), limit, writer:
        archive = f"{folder}/archive.pt2"
        make = partial(aoti_compile_and_package, package_path=archive, inductor_configs=dict(options))
        attempt("torch cannot compile this model", partial(make, graph))
        with ZipFile(archive) as members:  # code, and a list of calls without a C interface
            for name in (n for n in members.namelist() if n.endswith((".wrapper.so", ".wrapper.json"))):
                path.with_suffix(Path(name).suffix).write_bytes(members.read(name))


def _export(model: nn.Module, dtype: torch.dtype, tokens: int) -> torch.export.ExportedProgram:
    with buffers_unchanged(model):
        cache, _ = _check_tokens(model)
    with tree.mode(model, False):
        step = (TextGraph if tokens == TEXT else DecodeGraph)(outline(model, dtype)).eval()
    with torch.autocast("cpu", enabled=False):  # autocast would add its casts to the graph
        return export_graph(lambda: export_decode_graph(step, cache, tokens))


def _export_parts(
    model: nn.Module, dtype: torch.dtype, tokens: int
) -> Iterator[tuple[str, torch.export.ExportedProgram]]:
    """The names and the graphs of the head and of one block of each form."""
    with buffers_unchanged(model):
        cache, _ = _check_tokens(model)
    with tree.mode(model, False), torch.autocast("cpu", enabled=False):
        positions = torch.arange({ROWS: 1, BATCH: 2}.get(tokens, tokens))
        if tokens in (ROWS, BATCH):
            positions = positions.repeat(3, 1)
        slots = torch.stack([positions, positions]) if tokens in (ROWS, BATCH) else positions
        (x,) = join_parts(model, [], lambda inputs: inputs)([torch.zeros_like(positions), slots, positions])
        inner: Any = outline(model, dtype).eval()
        head = HeadGraph(Decoder(inner.embed, [], inner.norm, inner.head, inner.softcap)).eval()
        yield HEADS[tokens], export_graph(lambda: export_decode_graph(head, cache, tokens, x))
        for layer in sorted({*layer_forms(model)}):
            step, of_layer = LayerGraph(inner.get_submodule(f"blocks.{layer}")), copy(cache)
            of_layer.keys, of_layer.values = [cache.keys[layer]], [cache.values[layer]]
            name = _layer_file(Path(HEADS[tokens]), layer).name
            yield name, export_graph(lambda: export_decode_graph(step, of_layer, tokens, x))  # noqa: B023


@contextmanager
def buffers_unchanged(model: nn.Module) -> Iterator[None]:
    """Raise ValueError if a forward inside the context changes a buffer; compiled code cannot change buffers."""
    buffers = [(name, b, b._version) for name, b in model.named_buffers()]
    yield
    for (name, before, version), after in zip(buffers, model.buffers(), strict=True):
        if after is not before or after._version != version:
            raise ValueError(f"{name}: a buffer that forward changes, which compiled code cannot do; remove it")


def export_graph(export: Callable[[], torch.export.ExportedProgram]) -> torch.export.ExportedProgram:
    """The graph that `export` returns. Raises ValueError if `export` fails, or if forward makes a constant
    tensor."""
    graph = attempt("torch cannot export this model", export)
    if constants := graph.graph_signature.lifted_tensor_constants:
        raise ValueError(f"{constants[0]}: a tensor made in forward; register it as a buffer")
    return graph


def _same_greedy_ids(model: nn.Module, context_length: int, step: CompiledStep) -> bool:
    """True if greedy decoding after each of the first two ids gives the same ids with and without the step."""

    def greedy_ids(first: int, step: CompiledStep | None) -> list[int]:
        cache, limit = PrefixCache(model, step=step), min(GREEDY_TOKENS, context_length - 1)
        tokens = generate(model, [first], max_tokens=limit, context_length=context_length, cache=cache)
        return [token.id for token in tokens]

    return all(greedy_ids(first, None) == greedy_ids(first, step) for first in (0, 1))
