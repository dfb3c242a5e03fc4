"""File formats other than Hugging Face's, one module each, and the table of formats that `dunes export` writes.

`checkpoint.open` imports the modules that only read or write tensors (`adapter`, `gguf`, `native`,
`quantized_weights`). The other modules import `checkpoint.open` to open a written model. This module does not
import torch.
"""

from typing import Literal, NamedTuple, get_args

from dunes.flags import Dtype

Blocks = Literal["q8_0", "q4_0"]
"""Quantized types of llama.cpp."""


class Format(NamedTuple):
    """A format that `dunes export --to NAME` writes. The format's module is called NAME, with _ in place of -.

    If `dense` is true, the module has `write(out, architecture, weights, tokenizer, dtype)`. `weights` are dense
    lazy tensors by the model's names, with the active adapter merged, and `out` is a new file with this `suffix`.
    Modules of other formats have `write(folder, out, dtype)`. If `network` is true, the module also has
    `write_network(folder, out, sizes)`, for networks that are no language models. All these functions return text
    for the user. If users cannot choose the dtype, `no_dtype` is the reason, and `write` has no argument `dtype`.
    """

    about: str
    dense: bool = False
    suffix: str = ""
    network: bool = False
    dtypes: tuple[str, ...] = get_args(Dtype)
    no_dtype: str = ""


_CODES = "a quantized model's codes as they are, for transformers and vLLM"
FORMATS = {
    "gguf": Format("llama.cpp", dense=True, suffix=".gguf", dtypes=get_args(Dtype) + get_args(Blocks)),
    "compressed-tensors": Format(_CODES, no_dtype="codes are written as they are"),
    "cpp": Format("a folder for C and C++ without Python", network=True),
    "onnx": Format("without a cache", suffix=".onnx", network=True, no_dtype="weights are written in float32"),
}
"""Formats by name. `hf` has no entry, since `dunes export --to hf` calls `convert` or `export`."""


def check_choice(to: str, dtype: str | None) -> None:
    """Raise ValueError unless `to` is hf or a format in FORMATS that supports this dtype."""
    form = Format("Hugging Face") if to == "hf" else FORMATS.get(to)
    if form is None:
        listed = ", ".join(FORMATS)
        raise ValueError(f"--to {to[:80]!a}: expected hf, {listed}; Mistral's and Meta's formats can only be read")
    if dtype in get_args(Blocks) and dtype not in form.dtypes:
        others = " or ".join(name for name, other in FORMATS.items() if dtype in other.dtypes)
        raise ValueError(f"--dtype {dtype}: for --to {others} only; quantize a folder with dunes augment quantize")
    if dtype is not None and form.no_dtype:
        raise ValueError(f"--dtype {dtype}: {form.no_dtype}; omit it")
