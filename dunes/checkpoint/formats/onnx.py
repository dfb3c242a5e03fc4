"""Write a model's forward pass without a cache as an ONNX file (https://onnx.ai), with torch.onnx."""

import logging
import warnings
from collections.abc import Sequence
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from dunes import checkpoint, tree
from dunes.augment import dequantize
from dunes.checkpoint import LoadedModel
from dunes.checkpoint.verify import EXACT, prompts
from dunes.extra import extra
from dunes.files import atomic
from dunes.ops.kernels import one_line
from dunes.parts import vocabulary_size
from dunes.units import format_bytes

SUFFIX, LARGEST = ".onnx", 2**31 - 2**20  # protocol buffers have at most 2 GB


def write(folder: Path, out: Path) -> str:
    """Write the language model in `folder` as an ONNX file, with `export_onnx`."""
    return export_onnx(checkpoint.load(folder), out)


def write_network(folder: Path, out: Path, sizes: Sequence[int]) -> str:
    """Write the network in `folder` as an ONNX file for an input of these sizes, batch included."""
    size = write_onnx(checkpoint.load_network(folder), torch.rand(*sizes), out)
    return f"{size}, for an input of {' x '.join(map(str, sizes))}"


def export_onnx(loaded: LoadedModel, out: Path) -> str:
    """Write an ONNX file that maps `ids` (B, T) to `logits` (B, T, V) in float32; returns a line on the file.

    `loaded.model` is changed: its weights become float32, and its quantized layers become dense. Raises
    ValueError, and writes nothing, if the model has a window of other than two tokens or more than 2 GB, if `out`
    exists, if the extra packages are missing, if torch cannot export the model, or if onnxruntime computes other
    logits.
    """
    windowed = (m for m in loaded.model.modules() if getattr(m, "window", None) is not None)
    if any(m.window != 2 or not getattr(m, "has_plain_scores", False) for m in windowed):
        raise ValueError("--to onnx: a sliding window, whose mask depends on the length, cannot be exported")
    dequantize(loaded.model)
    ids, free = prompts(vocabulary_size(loaded.model) or 1, min(8, loaded.context_length)), torch.export.Dim
    shapes = {"ids": {0: free("batch"), 1: free("tokens", max=loaded.context_length)}}
    size = write_onnx(loaded.model, ids, out, input_names=["ids"], output_names=["logits"], dynamic_shapes=shapes)
    return f"{size}: ids (batch, tokens) to logits (batch, tokens, vocabulary)"


def write_onnx(model: nn.Module, example: Tensor, out: Path, **options: Any) -> str:
    """Write the forward pass of any network as the ONNX file `out`; returns the file's size as text.

    The file accepts only the example's shapes, unless `options` for `torch.onnx.export` make sizes dynamic.
    onnxruntime's outputs for the example are compared with the network's. Raises ValueError like `export_onnx`.
    """
    options = {"input_names": ["input"], "output_names": ["output"]} | options
    runtime, _, checker = [extra(module, "onnx") for module in ("onnxruntime", "onnxscript", "onnx.checker")]
    if out.exists() or out.is_symlink() or out.suffix != SUFFIX:
        raise ValueError(f"{out}: expected a new file that ends in {SUFFIX}; choose another name, or remove it")
    if (size := sum(t.nbytes for t in model.float().state_dict().values())) > LARGEST:
        raise ValueError(f"{format_bytes(size)} in float32; an ONNX file has at most {format_bytes(LARGEST)}")
    try:
        with torch.no_grad(), tree.mode(model, False), warnings.catch_warnings(), redirect_stdout(StringIO()):
            warnings.simplefilter("ignore")  # hides torch's own deprecation warnings.
            logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # hides a note that torchvision is missing
            expected = tree_leaves(model(example))
            program: Any = torch.onnx.export(model, (example,), dynamo=True, **options)
            checker.check_model(program.model_proto, full_check=True)
    except Exception as error:  # torch raises errors of many types
        reason = one_line(error.__cause__ or error)
        raise ValueError(f"--to onnx: torch cannot export this model: {reason}") from None
    out.parent.mkdir(parents=True, exist_ok=True)

    def write(path: Path) -> None:
        program.save(str(path), external_data=False)
        session = runtime.InferenceSession(path, providers=["CPUExecutionProvider"])
        computed = session.run(None, {session.get_inputs()[0].name: example.detach().numpy()})
        for got, want in zip(map(torch.from_numpy, computed), expected, strict=True):
            limit = EXACT * float(want.double().nan_to_num(0, 0, 0).abs().max())
            if not torch.allclose(got.double(), want.double(), 0, limit, equal_nan=True):
                off = float((got.double() - want.double()).abs().max())
                raise ValueError(f"--to onnx: onnxruntime computes another result, which differs by {off:.1e}")

    atomic.replace_file(out, write)
    return format_bytes(out.stat().st_size)
