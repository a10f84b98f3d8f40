"""Removes views that merge a dynamic dimension with another one, only for a later view to split them again.

Inductor indexes through views by division and remainder. It removes unnecessary ones for constant sizes but not for
dynamic ones, so they stay in the innermost loop. The heads of an attention are an example: ``(batch, 4, n, 16)`` as
``(4·batch, n, 16)``, transposed, as ``(n, batch, 64)``.

If a ``cat`` joins tensors with merged last sizes, such as the gradients of queries, keys and values, this module joins
them before they are merged: a loop over merged sizes divides even if all sizes are constant.
"""

from __future__ import annotations

from typing import Any

import sympy
import torch
from torch.fx import GraphModule, Node

from .. import torch_api
from .graph_edit import arguments, call, erase

aten = torch.ops.aten
_VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)


def split_merged_views(module: GraphModule, fake_mode: Any) -> None:
    """Rewrite the graph of ``module``: a view of a transposed, merged view becomes a view of the transposed
    original."""
    for node in module.graph.find_nodes(op="call_function", target=aten.cat.default):
        with fake_mode:
            _merge_after(module, node)
    erased: set[Node] = set()
    for node in list(module.graph.nodes):
        if (
            node not in erased
            and node.op == "call_function"
            and node.target in _VIEWS
            and (merge := _merged_before(node))
        ):
            source, order = merge
            producer = node.args[0]
            with module.graph.inserting_before(node), fake_mode:
                permuted = call(module.graph, aten.permute.default, source, order)
                node.update_arg(
                    0, call(module.graph, aten.clone.default, permuted, memory_format=torch.contiguous_format)
                )
            if not producer.users:
                erased |= erase(module.graph, producer, (*_VIEWS, aten.permute.default, aten.clone.default))


def _merge_after(module: GraphModule, node: Node) -> None:
    """Turn ``node``, a ``cat`` of views that merge their last two sizes, into a view of a ``cat``."""
    args, value = arguments(node), node.meta["val"]
    parts, dim = args["tensors"], args["dim"]
    if value.device.type != "cpu" or dim not in (-1, value.dim() - 1) or type(value.shape[-1]) is not int:
        return
    if not torch_api.is_contiguous_or_false(value):
        return
    groups = [*([i] for i in range(value.dim() - 1)), [value.dim() - 1, value.dim()]]
    sources = [
        part.args[0]
        for part in parts
        if part.target in _VIEWS and _groups(_sizes(part.args[0]), _sizes(part)) == groups
    ]
    if len(sources) < len(parts) or len({str(source.meta["val"].shape[-1]) for source in sources}) > 1:
        return
    graph = module.graph
    with graph.inserting_before(node):
        cat = call(graph, aten.cat.default, sources, value.dim() - 1)
        cat = call(graph, aten.clone.default, cat, memory_format=torch.contiguous_format)
        node.replace_all_uses_with(call(graph, aten.view.default, cat, [*parts[0].args[1][:-1], value.shape[-1]]))
    erase(graph, node, _VIEWS)


def _merged_before(node: Node) -> tuple[Node, list[int]] | None:
    """Return the tensor that ``node`` views, before merging and transposing, and its permutation; None if nothing
    dynamic was merged."""
    view_input = node.args[0]
    if not isinstance(view_input, Node) or not torch_api.is_contiguous_or_false(view_input.meta["val"]):
        return None  # its strides might differ then
    permute = _through_copies(view_input)
    if permute is None or permute.target is not aten.permute.default:
        return None
    merge_view: Any = permute.args[0]
    if not isinstance(merge_view, Node) or merge_view.target not in _VIEWS:
        return None
    source = _through_copies(merge_view.args[0])
    if source is None:
        return None
    groups = _groups(_sizes(source), _sizes(merge_view))
    if groups is None or not any(
        len(g) > 1 and any(not s.is_number for s in (_sizes(source)[i] for i in g)) for g in groups
    ):
        return None
    order: Any = permute.args[1]
    return source, [i for place in order for i in groups[place]]


def _through_copies(node: Any) -> Node | None:
    """Return ``node``, or the node that it copies: a copy changes strides, and views here depend only on sizes."""
    while isinstance(node, Node) and node.target is aten.clone.default:
        node = node.args[0]
    return node if isinstance(node, Node) else None


def _sizes(node: Node) -> list[sympy.Expr]:
    return [sympy.Integer(n) if type(n) is int else n.node.expr for n in node.meta["val"].shape]


def _groups(before: list[sympy.Expr], after: list[sympy.Expr]) -> list[list[int]] | None:
    """Return for each size in ``after`` the positions in ``before`` that it is the product of, in order; None if some
    size is split instead."""
    out: list[list[int]] = []
    place = 0
    for size in after:
        product, group = sympy.Integer(1), list[int]()
        while place < len(before) and (not group or sympy.expand(product - size) != 0):
            product *= before[place]
            group.append(place)
            place += 1
        if sympy.expand(product - size) != 0:
            return None
        out.append(group)
    return out if place == len(before) else None
