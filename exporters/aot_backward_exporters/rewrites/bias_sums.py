"""A product of matrices to which something is added, in float32 on a CPU, as a product and a sum.

``addmm`` first copies what is added, repeated for each row, into its result, and then adds the product to it: 1.0 to 1.6 µs of a layer of a small
network, 5 of one of 192 by 256. A sum of its own becomes part of the loop that reads the result, where there is one, and costs no more where there
is none: what it reads and writes is what the copy does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from .graph_edit import arguments, call

aten = torch.ops.aten


def apart(module: GraphModule, fake_mode: Any) -> None:
    """Rewrites the graph of ``module``."""
    for node in list(module.graph.nodes):
        if node.op == "call_function" and _is_matrix(node.meta.get("val")) and (found := _added(node)):
            with module.graph.inserting_before(node), fake_mode:
                node.replace_all_uses_with(_sum(module.graph, node, *found))
            module.graph.erase_node(node)
    module.recompile()


def _is_matrix(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 2 and value.device.type == "cpu" and value.dtype == torch.float32


def _added(node: Node) -> tuple[Any, Node | None] | None:
    """What ``node`` adds to a product of matrices, and the product where there is one; None where it is no such sum."""
    if node.target is aten.addmm.default:
        given = arguments(node)
        return (given["self"], None) if given["alpha"] == given["beta"] == 1 else None
    if node.target is aten.add.Tensor and not node.kwargs:
        for product, added in (node.args, node.args[::-1]):
            if isinstance(product, Node) and product.target is aten.mm.default and len(product.users) == 1 and _is_float(added):
                return added, product
    return None


def _is_float(node: Any) -> bool:
    return isinstance(node, Node) and isinstance(value := node.meta["val"], torch.Tensor) and value.dtype == torch.float32


def _sum(graph: Graph, node: Node, added: Node, product: Node | None) -> Node:
    """In three dimensions: of two, Inductor would make an ``addmm`` of it. In the order of ``node``, which its strides may follow."""
    made = product if product is not None else call(graph, aten.mm.default, *(arguments(node)[name] for name in ("mat1", "mat2")))
    lifted = call(graph, aten.unsqueeze.default, made, 0)
    terms = (lifted, added) if product is None or node.args[0] is product else (added, lifted)
    return call(graph, aten.squeeze.dim, call(graph, aten.add.Tensor, *terms), 0)
