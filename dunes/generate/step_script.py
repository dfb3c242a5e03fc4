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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from dunes.ops import rms_norm, rotary

Run = Callable[[list[Tensor]], list[Tensor]]
"""What it returns may be overwritten by the next call in the same thread."""
PACKED = ":packed"
"""After the names of weights, with + between them: the rows of these (O, I) in float16, as FBGEMM reads them."""
PARALLEL = 400_000
"""Numbers in a matrix from which it is multiplied by several threads, which costs some 10 us."""
RESHAPES = torch.ops.aten.unflatten.int, torch.ops.aten.flatten.using_ints, torch.ops.aten.view.default
MULTIPLY = "multiply_by_{}"
FUNCTIONS = """
def by_one_thread(x, weight):
    return torch.fbgemm_linear_fp16_weight_fp32_activation(x, weight, None)
def by_threads(x, weight: __torch__.torch.classes.quantized.LinearPackedParamsBase):
    return torch.ops.quantized.linear_dynamic_fp16(x, weight)
"""
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


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if x.numel() != x.shape[-1]:
        return rms_norm.plain(x, weight, eps)
    row = x.float().flatten()
    return x.float() * torch.rsqrt(torch.dot(row, row) * (1 / len(row)) + eps) * weight.float()


def _rotary(x: Tensor, cos: Tensor, sin: Tensor, adjacent: bool = False) -> Tensor:
    if adjacent:
        return rotary.plain(x, cos, sin, adjacent)
    other = x.roll(x.shape[-1] // 2, -1)
    return torch.addcmul(x * torch.cat([cos, cos], -1), other, torch.cat([-sin, sin], -1))


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
    rms_norm.plain: _rms_norm,
    rotary.plain: _rotary,
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
    products = _products(program.graph)
    for node in program.graph.nodes:
        if node.op != "placeholder":
            lines += _packed_product(node, products[node]) if node in products else [_statement(node)]
        elif node.name in names:
            weights[node.name] = names[node.name]
        else:
            inputs.append(node.name)
    for group in products.values():
        weights[_packed_name(group)] = "+".join(names[_matrix(node).name] for node in group) + PACKED
    path.write_text(json.dumps({"weights": weights, "inputs": inputs, "lines": [*filter(None, lines)]}))


def _products(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """The products of float32 and a matrix in float16, each with those of the same input: one product does."""
    groups: dict[Any, list[fx.Node]] = {}
    for node in graph.nodes:
        if node.target is torch.ops.aten.linear.default and _is_packed(node.args[1]):
            groups.setdefault(node.args[0], []).append(node)
    return {node: group for group in groups.values() for node in group}


def _is_packed(matrix: Any) -> bool:
    """Whether this is a weight in float16 that is cast, and not one that is computed."""
    if matrix.target is not torch.ops.aten.to.dtype or matrix.args[0].op != "placeholder":
        return False
    return _dtype(matrix.args[0]) == torch.float16


def _matrix(product: Any) -> fx.Node:
    matrix: fx.Node = product.args[1].args[0]
    return matrix


def _packed_name(group: Sequence[fx.Node]) -> str:
    return "_".join(_matrix(node).name for node in group) + "_packed"  # layers may share some of their matrices


def _packed_product(node: fx.Node, group: Sequence[fx.Node]) -> list[str]:
    """The lines of one of the products of a group, the first of which computes all."""
    packed, products = _packed_name(group), f"{group[0].name}_all"
    lines, bias = [], f" + {node.args[2]}" if len(node.args) > 2 and node.args[2] is not None else ""
    if node is group[0]:
        rows = [len(_matrix(n).meta["val"]) for n in group]
        product = f"{MULTIPLY.format(packed)}({node.args[0]}, {packed})"
        lines = [
            f"{products} = torch.split({product}, {rows}, -1)" if len(rows) > 1 else f"{products} = [{product}]"
        ]
    return [*lines, f"{node.name} = {products}[{group.index(node)}]{bias}"]


def _reshaped(node: Any) -> fx.Node | None:
    """What this node only gives another shape, if its numbers stay in their order."""
    if node.op != "call_function" or "val" not in node.meta or not isinstance(node.meta["val"], Tensor):
        return None
    if not all(type(size) is int for size in node.meta["val"].shape):
        return None
    before: Any = node.args[0] if node.args else None
    if node.target in RESHAPES:
        return _reshaped(before) or before
    if node.target is torch.ops.aten.transpose.int:
        one, other = (dim % node.meta["val"].dim() for dim in node.args[1:])
        if abs(one - other) == 1 and 1 in (node.meta["val"].shape[one], node.meta["val"].shape[other]):
            return _reshaped(before) or before
    return None


def _dtype(node: Any) -> torch.dtype:
    dtype: torch.dtype = node.meta["val"].dtype
    return dtype


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
    if target is torch.ops.aten.dropout.default and not node.args[2]:
        return f"{node.name} = {node.args[0]}"
    if (base := _reshaped(node)) is not None:
        return f"{node.name} = torch.reshape({base}, {[*node.meta['val'].shape]})" if node.users else ""
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
    arguments = {argument: _argument(name, weights) for argument, name in script["weights"].items()}
    body = "\n    ".join(script["lines"])
    types = {}
    for argument, value in arguments.items():
        if parallel := not isinstance(value, Tensor):
            types[argument] = f"{argument}: __torch__.torch.classes.quantized.LinearPackedParamsBase"
        body = body.replace(f"{MULTIPLY.format(argument)}(", f"{'by_threads' if parallel else 'by_one_thread'}(")
    signature = ", ".join([*(types.get(argument, argument) for argument in arguments), *script["inputs"]])
    step = torch.jit.CompilationUnit(f"{FUNCTIONS}def step({signature}):\n    {body}\n").step
    values = [*arguments.values()]

    def run(inputs: list[Tensor]) -> list[Tensor]:
        with torch.inference_mode():  # each operation takes less time
            outputs: list[Tensor] = step(*values, *inputs)
        return outputs

    return run


def _argument(name: str, weights: Mapping[str, Tensor]) -> Any:
    if not name.endswith(PACKED):
        return weights[name].detach()
    matrix = torch.cat([weights[part] for part in name.removesuffix(PACKED).split("+")])
    if matrix.numel() >= PARALLEL and torch.get_num_threads() > 1:
        return torch.ops.quantized.linear_prepack_fp16(matrix.float(), None)
    return _pack(matrix)


def _pack(weight: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # once in a process: deprecated, without a successor that is as fast
        packed = torch.fbgemm_pack_gemm_matrix_fp16(weight.float())
        torch.fbgemm_linear_fp16_weight_fp32_activation(torch.zeros(1, weight.shape[1]), packed, None)
    return packed
