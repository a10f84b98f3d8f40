"""Turns a sum of adjacent parts, each padded with zeros, into one ``cat``.

If every ``x[i]`` of a tensor is used, as in the packed projection of ``nn.MultiheadAttention``, its gradient is a sum
of ``select_scatter`` into zeros. Inductor computes every element of each part for every element of the whole. With a
dynamic size, the indices of fused views are divisions in the innermost loop: 13.7 ms of a backward of 27 ms.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from .. import torch_api
from .graph_edit import call, erase

aten = torch.ops.aten
_ERASED = (aten.add.Tensor, aten.select_scatter.default, aten.full.default)


@dataclass
class _Sum:
    """The summands of a term: parts along one dimension, and at most one further term. Two further terms would change
    the order of additions."""

    dim: int = -1
    parts: dict[int, Node] = field(default_factory=dict)  # the number of a part -> the part
    further: Node | None = None


def by_cat(module: GraphModule, fake_mode: Any) -> None:
    """Rewrite the graph of ``module``."""
    if module.graph.find_nodes(op="call_function", target=aten.select_scatter.default):
        _rewrite(module.graph, fake_mode)


def _rewrite(graph: Graph, fake_mode: Any) -> None:
    sums: dict[Node, _Sum] = {}
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if node.target is aten.select_scatter.default:
            sums[node] = _part(node) or _Sum(further=node)
        elif node.target is aten.add.Tensor:
            total = _total(node, sums)
            size = node.meta["val"].shape[total.dim] if total.parts else 0
            if type(size) is int and 1 < size == len(total.parts):
                with graph.inserting_before(node), fake_mode:
                    result = _joined(graph, total)
                    is_contiguous = torch_api.is_contiguous_or_false
                    if is_contiguous(node.meta["val"]) and not is_contiguous(result.meta["val"]):
                        result = call(graph, aten.clone.default, result, memory_format=torch.contiguous_format)
                node.replace_all_uses_with(result)
                erase(graph, node, _ERASED)
            else:
                sums[node] = total


def _total(node: Node, sums: dict[Node, _Sum]) -> _Sum:
    """Return the summands of ``node``. Each sum is read once: it becomes part of the sum that uses it."""
    default = _Sum(further=node)
    if len(node.args) != 2 or node.kwargs or node.meta["val"].device.type != "cpu" or node.args[0] is node.args[1]:
        return default
    terms = []
    for term in node.args:
        if (
            not isinstance(term, Node)
            or not isinstance(term.meta["val"], torch.Tensor)
            or _dtype_and_sizes(term) != _dtype_and_sizes(node)
        ):
            return default  # a number, or a size, is added to every part
        terms.append(sums.pop(term, _Sum(further=term)) if len(term.users) == 1 else _Sum(further=term))
    target, other = sorted(terms, key=lambda s: len(s.parts), reverse=True)
    extra_terms = [s.further for s in terms if s.further is not None]
    if len(extra_terms) > 1 or (
        other.parts and (target.dim != other.dim or not target.parts.keys().isdisjoint(other.parts))
    ):
        return default
    target.parts.update(other.parts)
    target.further = extra_terms[0] if extra_terms else None
    return target


def _joined(graph: Graph, total: _Sum) -> Node:
    parts = [call(graph, aten.unsqueeze.default, total.parts[i], total.dim) for i in range(len(total.parts))]
    out = call(graph, aten.cat.default, parts, total.dim)
    return out if total.further is None else call(graph, aten.add.Tensor, out, total.further)


def _dtype_and_sizes(node: Node) -> tuple[torch.dtype, list[str]]:
    value = node.meta["val"]
    return value.dtype, [str(n) for n in value.shape]  # comparing the sizes themselves would create a guard


def _part(node: Node) -> _Sum | None:
    """Return the part that ``node``, a ``select_scatter``, pads with zeros; None if it pads with something else."""
    if len(node.args) != 4:
        return None
    zeros, part, dim, index = node.args
    value = node.meta["val"]
    if not (
        isinstance(zeros, Node)
        and zeros.target is aten.full.default
        and type(zeros.args[1]) in (int, float)
        and zeros.args[1] == 0
    ):
        return None
    if not isinstance(part, Node) or type(dim) is not int or type(index) is not int:
        return None
    size = value.shape[dim]
    if type(size) is not int or part.meta["val"].dtype != value.dtype:
        return None
    return _Sum(dim % value.ndim, {index % size: part})
