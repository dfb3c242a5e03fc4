"""A graph pass for compiled steps on the CPU: it computes small bfloat16 matrix products in float32.

In oneDNN, even the smallest bfloat16 product takes 12 us; a float32 product takes 2 us. Both accumulate in
float32.
"""

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph, Node

aten = torch.ops.aten
SMALL = 2**19
"""Maximum number of multiplications of a product to compute in float32. Even at the lowest rates measured (0.11
TFLOP/s in float32, 0.48 in bfloat16), such products are faster in float32."""


class SmallProducts(CustomGraphPass):
    def __call__(self, graph: Graph) -> None:
        for node in [n for n in graph.nodes if n.target in (aten.mm.default, aten.addmm.default)]:
            if node.meta["val"].dtype == torch.bfloat16 and _multiplications(node) <= SMALL:
                with graph.inserting_before(node):
                    args = tuple(_cast(graph, n, torch.float32) for n in node.args)
                    product = graph.call_function(node.target, args, node.kwargs)
                    rounded = _cast(graph, product, torch.bfloat16)
                node.replace_all_uses_with(rounded)
                graph.erase_node(node)

    def uuid(self) -> tuple[str, int]:
        return "dunes.train.products 1", SMALL


def _multiplications(node: Node) -> int:
    rows, columns = node.meta["val"].shape
    inner = node.args[-1].meta["val"].shape[0]  # type: ignore[union-attr]
    return int(rows * columns * inner)


def _cast(graph: Graph, node: Node, dtype: torch.dtype) -> Node:
    return graph.call_function(torch.ops.prims.convert_element_type.default, (node, dtype))
