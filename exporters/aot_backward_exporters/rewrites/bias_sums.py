"""A matrix product with an addition, in float32 on a CPU, as separate product and sum.

``addmm`` first copies the added tensor, repeated for each row, into its result, and then adds the product to it: 1.0 to
1.6 µs of a layer of a small network, 5 of one of 192 by 256. A separate sum fuses into the loop that reads the result.
Without such a loop it costs no more: it reads and writes the same memory as the copy.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from .graph_edit import arguments, call

aten = torch.ops.aten


def split_bias_sums(module: GraphModule, fake_mode: Any) -> None:
    """Rewrite the graph of ``module``."""
    for node in list(module.graph.nodes):
        if node.op == "call_function" and _is_matrix(node.meta.get("val")) and (summands := _added(node)):
            with module.graph.inserting_before(node), fake_mode:
                node.replace_all_uses_with(_sum(module.graph, node, *summands))
            module.graph.erase_node(node)


def _is_matrix(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.dim() == 2
        and value.device.type == "cpu"
        and value.dtype == torch.float32
    )


def _added(node: Node) -> tuple[Any, Node | None] | None:
    """Return the tensor that ``node`` adds to a matrix product, and the product if it is a node; None if ``node`` is
    not such a sum."""
    if node.target is aten.addmm.default:
        args = arguments(node)
        return (args["self"], None) if args["alpha"] == args["beta"] == 1 else None
    if node.target is aten.add.Tensor and not node.kwargs:
        for product, addend in (node.args, node.args[::-1]):
            if (
                isinstance(product, Node)
                and product.target is aten.mm.default
                and len(product.users) == 1
                and _is_float(addend)
            ):
                return addend, product
    return None


def _is_float(node: Any) -> bool:
    return (
        isinstance(node, Node) and isinstance(value := node.meta["val"], torch.Tensor) and value.dtype == torch.float32
    )


def _sum(graph: Graph, node: Node, addend: Node, product: Node | None) -> Node:
    """Add in three dimensions: Inductor would turn a 2-d sum into an ``addmm``. Keep the operand order of ``node``: its
    strides may follow it."""
    matmul = (
        product
        if product is not None
        else call(graph, aten.mm.default, *(arguments(node)[name] for name in ("mat1", "mat2")))
    )
    unsqueezed = call(graph, aten.unsqueeze.default, matmul, 0)
    terms = (unsqueezed, addend) if product is None or node.args[0] is product else (addend, unsqueezed)
    return call(graph, aten.squeeze.dim, call(graph, aten.add.Tensor, *terms), 0)
