"""Sums of rows by eager's kernel, in the place of Inductor's loops, which add numbers atomically, one by one.

Gradients of embeddings, of ``x[index]``, ``index_select`` and ``index_add`` are ``index_put`` with ``accumulate=True``. As ``scatter_add`` with an
index that is the same along the row, Inductor leaves them to ``scatter_reduce``, whose kernel sorts the index and adds whole rows as vectors.
"""

from __future__ import annotations

import functools
import operator
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from . import graph_edit

aten = torch.ops.aten


def by_scatter_add(module: GraphModule, fake_mode: Any) -> None:
    """Rewrites ``module`` and the graphs within it."""
    for node in list(module.graph.nodes):
        if node.op == "call_function" and (found := _added_rows(node)):
            with module.graph.inserting_before(node), fake_mode:
                node.replace_all_uses_with(_scatter_add(module.graph, *found))
            module.graph.erase_node(node)
    for _, child in module.named_children():
        if isinstance(child, GraphModule):
            by_scatter_add(child, fake_mode)
    module.recompile()


def _added_rows(node: Node) -> tuple[Node, Node | None, Node, Node] | None:
    """Where the rows are added, which of them count (None: all), their index, and the rows; None where ``node`` adds no rows of floats on a CPU."""
    arguments: Any = node.args
    if node.target in (aten.index_put.default, aten._unsafe_index_put.default) and len(arguments) > 3 and arguments[3]:
        (to, indices, rows), mask = arguments[:3], None
    elif node.target is aten._unsafe_masked_index_put_accumulate.default:
        to, mask, indices, rows = arguments
    else:
        return None
    value, index = to.meta["val"], indices[0]
    if value.device.type != "cpu" or not value.dtype.is_floating_point or value.dtype.itemsize < 2:
        return None
    if len(indices) != 1 or index is None or index.meta["val"].dtype not in (torch.int64, torch.int32):
        return None
    ndim = index.meta["val"].ndim
    if ndim == 0 or rows.meta["val"].ndim != ndim + value.ndim - 1:
        return None
    within = () if mask is None else mask.meta["val"].shape[ndim:]
    if (mask is not None and mask.meta["val"].ndim != rows.meta["val"].ndim) or any(type(n) is not int or n != 1 for n in within):
        return None  # it chooses within rows
    return to, mask, index, rows


def _scatter_add(graph: Graph, to: Node, mask: Node | None, index: Node, rows: Node) -> Node:
    call = functools.partial(graph_edit.call, graph)

    def sizes(node: Node) -> list[Any]:
        return [n if type(n) is int else call(aten.sym_size.int, node, i) for i, n in enumerate(node.meta["val"].shape)]

    def product(factors: list[Any]) -> Any:
        out = factors[0]
        for factor in factors[1:]:
            out = out * factor if type(out) is int and type(factor) is int else call(operator.mul, out, factor)
        return out

    if index.meta["val"].dtype != torch.int64:
        index = call(torch.ops.prims.convert_element_type.default, index, torch.int64)
    height, *width = sizes(to)
    lengths = sizes(index)
    whole = [*lengths, *width]
    if [str(n) for n in rows.meta["val"].shape] != [str(n) for n in (*index.meta["val"].shape, *to.meta["val"].shape[1:])]:
        rows = call(aten.expand.default, rows, whole)
    if mask is not None:
        counts = call(aten.reshape.default, mask, lengths)
        index = call(aten.where.ScalarOther, counts, index, 0)
        rows = call(aten.where.ScalarOther, mask, rows, 0)
    index = call(aten.where.self, call(aten.lt.Scalar, index, 0), call(aten.add.Tensor, index, height), index)
    count = product(lengths)
    if len(lengths) > 1:
        index, rows = call(aten.reshape.default, index, [count]), call(aten.reshape.default, rows, [count, *width])
    if not rows.meta["val"].is_contiguous():
        rows = call(aten.clone.default, rows, memory_format=torch.contiguous_format)
    for at in range(len(width)):
        index = call(aten.unsqueeze.default, index, at + 1)
    if width:
        index = call(aten.expand.default, index, [count, *width])
    return call(aten.scatter_add.default, to, 0, index, rows)
