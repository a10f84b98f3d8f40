"""Sums along axes, one axis after the other, each as a sum of rows.

Gradients of interpolation (``nn.Upsample``), of ``x[:, index]`` and of ``index_select`` along a later dimension are
``index_put`` with ``accumulate=True``, with one index per axis. Inductor adds such numbers atomically, one by one. With
the indexed axis in front, it is a sum of rows, each of all the other axes, which :mod:`.row_sums` then passes to
eager's kernel.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from .. import torch_api
from . import graph_edit
from .row_sums import WIDTH

aten = torch.ops.aten


@dataclass(frozen=True)
class AxisSums:
    """``values`` are added to ``to``, along each axis of ``indices`` at the positions in its index."""

    to: Node
    values: Node
    indices: dict[int, Node]


def by_rows(module: GraphModule, fake_mode: Any) -> None:
    """Rewrite the graph of ``module``."""
    for node in list(module.graph.nodes):
        if node.op == "call_function" and (sums := _sums(node)):
            with module.graph.inserting_before(node), fake_mode:
                node.replace_all_uses_with(_one_axis_after_the_other(module.graph, sums))
            module.graph.erase_node(node)


def _sums(node: Node) -> AxisSums | None:
    """Return the sums of ``node``; None if it does not add floats on a CPU, if an index belongs to several axes, or if
    it already sums rows."""
    arguments: Any = node.args
    if (
        node.target not in (aten.index_put.default, aten._unsafe_index_put.default)
        or len(arguments) < 4
        or not arguments[3]
    ):
        return None
    base, indices, values = arguments[:3]
    value, addend = base.meta["val"], values.meta["val"]
    if (
        value.device.type != "cpu"
        or value.dtype not in (torch.float32, torch.float64)
        or addend.dtype != value.dtype
        or addend.ndim != value.ndim
    ):
        return None
    axes = [axis for axis, index in enumerate(indices) if index is not None]
    if (
        not axes
        or axes == [0]
        or axes != list(range(axes[0], axes[-1] + 1))
        or not torch_api.is_contiguous_or_false(value)
    ):
        return None
    index_nodes: dict[int, Node] = {}
    for axis in axes:
        index = indices[axis].meta["val"]
        # Indices are broadcast against each other: the last one's only dimension is the last
        own_dim = index.ndim - 1 - (axes[-1] - axis)
        if (
            own_dim < 0
            or index.dtype not in (torch.int64, torch.int32)
            or any(not _is(n, 1) for i, n in enumerate(index.shape) if i != own_dim)
        ):
            return None
        if str(index.shape[own_dim]) != str(addend.shape[axis]):  # comparing the sizes themselves would create a guard
            return None
        index_nodes[axis] = indices[axis]
    if any(
        str(a) != str(b) for i, (a, b) in enumerate(zip(addend.shape, value.shape, strict=True)) if i not in index_nodes
    ):
        return None
    sizes = [n if type(n) is int else WIDTH for n in value.shape]
    if any(math.prod(sizes) < WIDTH * n for n in (sizes[axis] for axis in axes)):
        return None  # rows too short for that kernel
    return AxisSums(base, values, index_nodes)


def _is(size: Any, number: int) -> bool:
    return type(size) is int and size == number


def _one_axis_after_the_other(graph: Graph, sums: AxisSums) -> Node:
    call = functools.partial(graph_edit.call, graph)

    def size(node: Node, axis: int) -> Any:
        n = node.meta["val"].shape[axis]
        return n if type(n) is int else call(aten.sym_size.int, node, axis)

    def in_order(node: Node, order: Sequence[int]) -> Node:
        return call(
            aten.clone.default, call(aten.permute.default, node, list(order)), memory_format=torch.contiguous_format
        )

    value = sums.to.meta["val"]
    result = sums.values
    for axis, index in reversed(sums.indices.items()):
        front = [axis, *(i for i in range(value.ndim) if i != axis)]
        rows = in_order(result, front)
        shape = [size(sums.to, axis), *(size(rows, i) for i in range(1, value.ndim))]
        zeros = call(aten.full.default, shape, 0, dtype=value.dtype, device=value.device, pin_memory=False)
        flat = call(aten.view.default, index, [size(result, axis)])
        row_totals = call(aten.index_put.default, zeros, [flat], rows, True)
        result = call(aten.permute.default, row_totals, [front.index(i) for i in range(value.ndim)])
    return call(aten.add.Tensor, sums.to, call(aten.clone.default, result, memory_format=torch.contiguous_format))
