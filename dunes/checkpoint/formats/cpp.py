"""Write a folder with which a program without Python generates text, or runs a network that is no language model.

The folder has compiled code, weights, the tokenizer, and the sources of a library with a C interface. The code is
the decoding step that `dunes compile` caches, or a network's forward compiled by AOTInductor. The code runs only
on the same kind of processor and with the same release of torch:
https://docs.pytorch.org/docs/stable/torch.compiler_aot_inductor.html
"""

import json
import platform
import re
import shutil
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from shlex import quote
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dunes import checkpoint, measure, tree
from dunes.checkpoint import LoadedModel
from dunes.checkpoint.card import exclusive_folder
from dunes.checkpoint.weights import safetensors_file
from dunes.checkpoint.weights.lazy_tensor import in_memory
from dunes.checkpoint.weights.safetensors_file import CODES, write_file
from dunes.files import atomic
from dunes.generate import decode_packages
from dunes.generate.decode_graph import FEW, ROWS, TEXT, CompiledStep, load_native, named_tensors, step_weights
from dunes.ops.kernels import why_not_compiled
from dunes.parts import MoE, cache_for, vocabulary_size
from dunes.parts.cache import RollingCache
from dunes.text.byte_pairs import CHAR_TO_BYTE
from dunes.text.tokenizer import UNKNOWN, Tokenizer
from dunes.units import format_bytes

CARD, WEIGHTS, TABLES, FORMAT = "card.json", "weights.safetensors", "tokenizer.safetensors", 1
SOURCES = Path(__file__).parent / "program"
OF_TEXTS = "text."
"""Prefix of the names of weights that only the prefill code uses, for example in another dtype."""
MIN_CONTEXT, CHUNK = 8, 1 << 24
MIX = [np.uint64(n) for n in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)]
"""Constants of the checksum, from https://prng.di.unimi.it/splitmix64.c"""
INSTRUCTIONS = re.compile(
    "(sse|ssse|avx|amx|fma|f16c|bmi|adx|aes|pclmul|vaes|vpclmul|gfni|sha|rdrand|rdseed|rdpid|movbe|movdir|popcnt|abm|"
    "cx16|clflush|clwb|cldemote|xsave|fsgsbase|lahf|3dnowprefetch|serialize|waitpkg|ptwrite|enqcmd|cmpccxadd).*"
)
"""Pattern for Linux's names of the x86 instruction sets that compiled code may use."""
UNSUPPORTED = (
    *("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix"),
    *("byte_fallback", "ignore_merges"),
)
"""Settings of byte-pair tokenizers that the program does not support."""
NO_TOKENIZER = "the program supports dunes' byte, character and byte-pair tokenizers, but not this model's"


def write(folder: Path, out: Path, dtype: str | None = None) -> str:
    """Write the language model in `folder` with `export_native`; also returns commands that build the program."""
    check_target(out)
    loaded, show = checkpoint.load(folder), partial(print, flush=True)
    line = export_native(loaded, out, getattr(torch, dtype) if dtype else None, show)
    return line + _next_commands(out, '"..."')


def write_network(folder: Path, out: Path, sizes: Sequence[int]) -> str:
    """Write the network in `folder` with `export_network`, for an input of these sizes, batch included."""
    check_target(out)
    line = export_network(checkpoint.load_network(folder), torch.rand(*sizes), out)
    return line + _next_commands(out, "--image FILE.pgm")


def _next_commands(out: Path, arguments: str) -> str:
    """Lines with the commands that build and run the program in `out`."""
    python, folder = "\"$(python -c 'import torch; print(torch.utils.cmake_prefix_path)')\"", quote(str(out))
    return (
        f"\nnext: cmake -S {folder} -B build -DCMAKE_PREFIX_PATH={python} && cmake --build build"
        f"\nthen: build/dunes {folder} {arguments}"
    )


def export_native(
    loaded: LoadedModel,
    out: Path,
    dtype: torch.dtype | None = None,
    show: Callable[[str], None] = lambda line: None,
) -> str:
    """Write the folder `out` with the model's compiled code for decoding; returns a line on the folder.

    `dtype` is passed to `compile_step`. `show` is called with a message before compilation. If the steps are not
    cached, compilation takes two to five minutes. Raises ValueError, before any work, if `out` exists or no C++
    compiler is installed. Models that are no decoders, have mixtures of experts, need the entire text for each
    token, or attend to fewer than 8 tokens also raise ValueError. Later, raises ValueError, and writes nothing, if
    the model cannot be compiled, or if the compiled code computes other logits.
    """
    model, tokenizer = loaded.model, loaded.tokenizer
    check_target(out)
    decode_packages.check_step(model, dtype)
    if any(isinstance(module, MoE) for module in model.modules()):
        raise ValueError("--to cpp: a mixture of experts, whose operation needs Python, cannot be exported")
    if (length := loaded.context_length) < MIN_CONTEXT:
        raise ValueError(f"--to cpp: the model attends to {length} tokens; expected at least {MIN_CONTEXT}")
    show("compiling the decoding code: two to five minutes, unless it is cached")
    package, chosen = decode_packages.compile_step(model, loaded.context_length, dtype, whole=True)
    step = decode_packages.load_step(model, chosen)
    stems = {Path(name).stem for n, name in decode_packages.FILES.items() if n != ROWS}
    names = {name for name in decode_packages.native_files(package) if Path(name).stem in stems}
    if step is None or "native-few.so" not in names:
        raise ValueError("the steps of this model cannot be compiled; dunes compile shows the reason")
    weights = step_weights(model, chosen)
    if "native-text.so" in names:
        weights |= _differing(weights, step_weights(model, next(model.parameters()).dtype))
    tables = None if tokenizer is None else encoding_tables(tokenizer)
    reason = "the model has no tokenizer" if tokenizer is None else NO_TOKENIZER
    card = _decoder_card(loaded, step) | {"no_tokenizer": "" if tables else reason}

    def fill(folder: Path) -> None:
        for name in names:
            shutil.copy(package / name, folder)
        if tokenizer is not None:
            tokenizer.save(folder)
        if tables is not None:
            write_file(folder / TABLES, in_memory({k: torch.from_numpy(v) for k, v in tables.items()}))

    def verify(folder: Path, written: Mapping[str, Tensor]) -> None:
        own = {name: tensor for name, tensor in written.items() if not name.startswith(OF_TEXTS)}
        of_text = own | {n.removeprefix(OF_TEXTS): t for n, t in written.items() if n not in own}
        files = {n: name for n, name in decode_packages.FILES.items() if name in names}
        code = {n: (folder / name, of_text if n == TEXT else own) for n, name in files.items()}
        decode_packages.bind_step(model, code, chosen)

    return _write(out, "decoder", weights, card, fill, verify)


def export_network(model: nn.Module, example: Tensor, out: Path) -> str:
    """Write the folder `out` with a network's compiled forward, in evaluation mode; returns a line on the folder.

    The code maps a float32 tensor to a float32 tensor on the CPU, with the shapes of this example. Raises
    ValueError, before any work, if `out` exists or no C++ compiler is installed. Networks that change their
    buffers, or do not map one float32 tensor to another, also raise ValueError. Later, raises ValueError if torch
    cannot export or compile the network, or if the compiled code's output differs.
    """
    check_target(out)
    expected = _check_network(model, example)
    with tree.mode(model, False), warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # torch's own deprecation warnings
        graph = decode_packages.export_graph(lambda: torch.export.export(model, (example,), strict=False))
        card = {"input": list(example.shape), "output": list(expected.shape)}

        def fill(folder: Path) -> None:
            decode_packages.compile_graph(graph, folder / decode_packages.PACKAGE)

        def verify(staged: Path, written: Mapping[str, Tensor]) -> None:
            (run,) = load_native(staged / decode_packages.PACKAGE, written)
            result = run([example])[0]
            decode_packages.require_close("compiled, its numbers", result - expected, expected, torch.float32)

        return _write(out, "network", named_tensors(model), card, fill, verify)


def check_target(out: Path) -> None:
    """Raise ValueError if `out` exists, or if no C++ compiler is installed."""
    if out.exists() or out.is_symlink():
        raise ValueError(f"{out}: exists already; choose another name, or remove it")
    if reason := why_not_compiled():
        raise ValueError(f"--to cpp: {reason}")


def _check_network(model: nn.Module, example: Tensor) -> Tensor:
    """The network's output for the example. Raises ValueError for a network that cannot be exported."""
    if decode_packages.has_hooks(model):
        raise ValueError("--to cpp: compiled code has no hooks; remove them from the network")
    with torch.no_grad(), tree.mode(model, False), decode_packages.buffers_unchanged(model):
        expected = model(example)
    if not isinstance(expected, Tensor) or {example.dtype, expected.dtype} != {torch.float32}:
        raise ValueError("--to cpp: expected a network that maps one float32 tensor to another")
    return expected


def _differing(weights: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors in `others` that differ from `weights`, with names prefixed by OF_TEXTS."""
    return {
        OF_TEXTS + name: tensor
        for name, tensor in others.items()
        if name not in weights or weights[name].dtype != tensor.dtype or not torch.equal(weights[name], tensor)
    }


def _decoder_card(loaded: LoadedModel, step: CompiledStep) -> dict[str, Any]:
    tokenizer, ids = loaded.tokenizer, vocabulary_size(loaded.model)
    assert ids is not None, "a decoder embeds ids"
    largest = cache_for(loaded.model, 1, 1 << 40)  # the cache allocates memory only when it is filled
    rolling = largest if isinstance(largest, RollingCache) else None
    parts = [("key", step.example.keys), ("value", step.example.values)]
    return {
        "context_length": loaded.context_length,
        "vocabulary": ids if tokenizer is None else min(ids, tokenizer.vocab),
        "embedded": ids,
        "few": FEW,
        "window": 0 if rolling is None else rolling.window,
        "rolling": 0 if rolling is None else rolling.capacity,
        "stops": [] if tokenizer is None else sorted(tokenizer.stops),
        "bos": [] if tokenizer is None else tokenizer.bos,
        "empty": [] if tokenizer is None else tokenizer.prompt(""),
        "cache": [
            {"part": part, "heads": t.shape[1], "dim": t.shape[3], "dtype": CODES[t.dtype]}
            for part, tensors in parts
            for t in tensors
        ],
    }


def _write(
    out: Path,
    kind: str,
    weights: Mapping[str, Tensor],
    facts: Mapping[str, Any],
    fill: Callable[[Path], None],
    verify: Callable[[Path, Mapping[str, Tensor]], None],
) -> str:
    """Write a folder with these weights, the files that `fill` writes, the sources, and the card.

    `verify` is called with the temporary folder and the weights read back, and raises ValueError if either is
    wrong.
    """
    aliases, own = _without_aliases(weights)
    card = {
        "format": FORMAT,
        "kind": kind,
        "torch": torch.__version__.split("+")[0],
        "system": platform.system(),
        "machine": platform.machine(),
        "instructions": " ".join(instructions()),
        "aliases": aliases,
        **facts,
    }

    def write(folder: Path) -> None:
        fill(folder)
        write_file(folder / WEIGHTS, in_memory(own))
        written = {name: tensor.read() for name, tensor in safetensors_file.tensors(folder / WEIGHTS).items()}
        verify(folder, written | {name: written[first] for name, first in aliases.items()})
        files = {file.name: checksum(file) for file in sorted(folder.iterdir())}
        for file in sorted(SOURCES.iterdir()):
            shutil.copy(file, folder)
        (folder / CARD).write_text(json.dumps(card | {"files": files}, indent=1) + "\n")

    size = sum(tensor.nbytes for tensor in own.values())
    with exclusive_folder(out):
        atomic.write_folder(out, write, size)
    code = sum(file.stat().st_size for file in out.glob("*.so"))
    return f"{format_bytes(size)} of weights, {format_bytes(code)} of code for this processor"


def _without_aliases(weights: Mapping[str, Tensor]) -> tuple[dict[str, str], dict[str, Tensor]]:
    """A dict from each alias of a stored tensor to the tensor's stored name, and the tensors to store."""
    stored: dict[tuple[Any, ...], str] = {}
    keys = {n: (t.data_ptr(), t.dtype, tuple(t.shape), t.stride()) for n, t in weights.items()}
    names = {name: stored.setdefault(key, name) if key[0] else name for name, key in keys.items()}
    own = {name: weights[name] for name, first in names.items() if name == first}
    return {name: first for name, first in names.items() if name != first}, own


def instructions() -> Sequence[str]:
    """The instruction sets of this processor, as Linux names them; empty on other systems."""
    fields = measure.processor()
    of_x86 = [flag for flag in fields.get("flags", "").split() if INSTRUCTIONS.fullmatch(flag)]
    return of_x86 or fields.get("Features", "").split()


def checksum(file: Path) -> str:
    """Hex checksum: the file's size plus its 8-byte words, each mixed with its index, as in program/folder.h."""
    total = size = file.stat().st_size
    with file.open("rb") as stream:
        for start in range(0, size, CHUNK):
            data = stream.read(CHUNK)
            words = np.frombuffer(data + bytes(-len(data) % 8), "<u8")
            mixed = words + np.arange(start // 8, start // 8 + len(words), dtype=np.uint64) * MIX[0]
            for shift, factor in zip((30, 27), MIX[1:], strict=True):
                mixed = (mixed ^ (mixed >> np.uint64(shift))) * factor
            total += int((mixed ^ (mixed >> np.uint64(31))).sum(dtype=np.uint64))
    return f"{total % 2**64:016x}"


def encoding_tables(tokenizer: Tokenizer) -> dict[str, NDArray[Any]] | None:
    """The tables of a tokenizer of bytes, byte pairs or characters; None for any other tokenizer.

    `bytes` (N,) has the bytes of all tokens, one after another; `ends` (V,) has the end of each token in `bytes`.
    A row of `first` (N, 2) is a byte or character and its id; for a character, the UTF-8 bytes are read as one
    big-endian integer. A row of `merges` (N, 3) is two ids and the id that they merge into; merges learned first
    come first. `characters` exists only in the tables of a character tokenizer.
    """
    content = json.loads(tokenizer.json())
    plain = content["normalizer"] is None and all(token["special"] for token in content["added_tokens"])
    model = content["model"]
    if plain and tokenizer.splits == "characters" and model["type"] == "WordLevel":
        vocab = model["vocab"]
        ids = {int.from_bytes(token.encode(), "big"): i for token, i in vocab.items() if len(token) == 1}
        ids[-1] = vocab[UNKNOWN]  # all unknown characters have this id
        return _tables(tokenizer, ids, []) | {"characters": np.ones(1, np.uint8)}
    if not (plain and tokenizer.splits == "lines" and model["type"] == "BPE"):
        return None
    first = {CHAR_TO_BYTE[c]: i for c, i in model["vocab"].items() if len(c) == 1 and c in CHAR_TO_BYTE}
    if len(first) < 256 or any(model.get(key) for key in UNSUPPORTED):
        return None
    pairs = [pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]]
    merges = [[model["vocab"][t] for t in (left, right, left + right)] for left, right in pairs]
    return _tables(tokenizer, first, merges)


def _tables(tokenizer: Tokenizer, first: Mapping[int, int], merges: list[list[int]]) -> dict[str, NDArray[Any]]:
    tokens = tokenizer.token_bytes
    return {
        "bytes": np.frombuffer(b"".join(tokens), np.uint8).copy(),
        "ends": np.array([*accumulate(map(len, tokens))], np.int64),
        "first": np.array(sorted(first.items()), np.int64).reshape(-1, 2),
        "merges": np.array(merges, np.int64).reshape(-1, 3),
    }
