"""The step of one token where there is no C++ compiler: the exported graph as TorchScript text.

PyTorch's own operations run one after the other, without Python between them. TorchScript is deprecated, but its
interpreter is the only part of PyTorch that runs a graph so; if a release drops it, the text cannot be
loaded, and decoding is that of the modules.
"""

# Shapes: O outputs, I inputs.

import json
import math
import operator
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

Run = Callable[[list[Tensor]], list[Tensor]]
PACKED = ":packed"
"""After the name of a weight: the matrix (O, I) in float16, as FBGEMM reads it."""
PACKS = "fbgemm" in torch.backends.quantized.supported_engines


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if weight.dtype == x.dtype:
        return F.linear(x, weight, bias)
    if weight.dtype == torch.float16 and PACKS:
        return F.linear(x, weight.to(x.dtype), bias)  # `_packed_matrix` finds this
    return F.linear(x.to(weight.dtype), weight, bias).float()


def _embedding(input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return F.embedding(input, weight).float()


def _mean(x: Tensor, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Tensor:
    # PyTorch's own takes three times as long for one row.
    return torch.mean(x, dim, keepdim, **kwargs) if dim != -1 or kwargs else x.sum(-1, keepdim) * (1 / x.shape[-1])


def _layer_norm(
    x: Tensor, shape: Any, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    weight, bias = (t if t is None else t.to(x.dtype) for t in (weight, bias))  # those of a half model are half
    return F.layer_norm(x, shape, weight, bias, eps)


def _attention(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return F.scaled_dot_product_attention(query.to(key.dtype), key, value, *args, **kwargs).float()


SCRIPT_FORMS: dict[Callable[..., Any], Callable[..., Any]] = {
    F.linear: _linear,
    F.embedding: _embedding,
    F.layer_norm: _layer_norm,
    Tensor.mean: _mean,
    F.scaled_dot_product_attention: _attention,
}


def write_script(program: torch.export.ExportedProgram, path: Path) -> None:
    """Write the program as JSON: the names of its weights, and the text of a function of these and its inputs.

    Raises ValueError for a graph with something else than operators of PyTorch.
    """
    signature = program.graph_signature
    names = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    weights: dict[str, str] = {}
    inputs, lines = [], []
    for node in program.graph.nodes:
        matrix = _packed_matrix(node)
        if node.op != "placeholder":
            lines.append(_statement(node) if matrix is None else _packed_product(node, matrix))
        elif node.name in names:
            weights[node.name] = names[node.name]
        else:
            inputs.append(node.name)
        if matrix is not None:
            weights[f"{matrix.name}_packed"] = names[matrix.name] + PACKED
    text = f"def step({', '.join([*weights, *inputs])}):\n    " + "\n    ".join(filter(None, lines)) + "\n"
    path.write_text(json.dumps({"weights": [*weights.values()], "text": text}))


def _packed_matrix(node: fx.Node) -> fx.Node | None:
    """The weight in float16 with which this node multiplies float32, if it does."""
    if node.target is not torch.ops.aten.linear.default:
        return None
    weight: Any = node.args[1]
    cast = weight.target is torch.ops.aten.to.dtype and weight.args[0].op == "placeholder"
    return weight.args[0] if cast and _dtype(weight.args[0]) == torch.float16 else None


def _dtype(node: Any) -> torch.dtype:
    dtype: torch.dtype = node.meta["val"].dtype
    return dtype


def _packed_product(node: fx.Node, matrix: fx.Node) -> str:
    x, bias = node.args[0], node.args[2] if len(node.args) > 2 else None
    return f"{node.name} = torch.fbgemm_linear_fp16_weight_fp32_activation({x}, {matrix.name}_packed, {bias})"


def _statement(node: fx.Node) -> str:
    """The line of a node; none for what has no effect."""
    target: Any = node.target
    if node.op == "output":
        return f"return {_text(node.args[0])}"
    if target is operator.getitem:
        return f"{node.name} = {node.args[0]}[{node.args[1]}]"
    if not isinstance(target, torch._ops.OpOverload):
        raise ValueError(f"{target} is no operator of PyTorch")
    if not node.users and not target._schema.is_mutable:
        return ""
    if target is torch.ops.aten.to.dtype and node.args[1:] == (_dtype(node.args[0]),):
        return f"{node.name} = {node.args[0]}"
    arguments = [*map(_text, node.args), *(f"{k}={_text(v)}" for k, v in node.kwargs.items())]
    return f"{node.name} = torch.ops.{target._schema.name.replace('::', '.')}({', '.join(arguments)})"


def _text(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_text, value))}]"
    if isinstance(value, float) and not math.isfinite(value):
        return f"float('{value}')"
    return f"torch.device('{value}')" if isinstance(value, torch.device) else repr(value)


def load_script(path: Path, weights: Mapping[str, Tensor]) -> Run:
    """A function of the inputs with these weights. Raises RuntimeError for text that torch does not take."""
    script = json.loads(path.read_text())
    step = torch.jit.CompilationUnit(script["text"]).step
    arguments = [
        _pack(weights[name.removesuffix(PACKED)]) if name.endswith(PACKED) else weights[name].detach()
        for name in script["weights"]
    ]
    run: Run = lambda inputs: step(*arguments, *inputs)
    return run


def _pack(weight: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # once in a process: deprecated, without a successor that is as fast
        packed = torch.fbgemm_pack_gemm_matrix_fp16(weight.float())
        torch.fbgemm_linear_fp16_weight_fp32_activation(torch.zeros(1, weight.shape[1]), packed, None)
    return packed
