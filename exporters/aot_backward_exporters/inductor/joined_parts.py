"""Sums of parts that lie beside each other, each padded with zeros, become one ``cat``.

The gradient of a tensor of which every ``x[i]`` was used, as the packed projection of ``nn.MultiheadAttention`` is, comes as a sum of
``select_scatter`` into zeros. Inductor computes every element of each part for every element of the whole, and with a dynamic size the indices of
views that it puts into that are divisions in the innermost loop: 13.7 ms of a backward of 27 ms.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from .graph_edit import call, erase

aten = torch.ops.aten
_ERASED = (aten.add.Tensor, aten.select_scatter.default, aten.full.default)


def by_cat(module: GraphModule, fake_mode: Any) -> None:
    """Rewrites ``module`` and the graphs within it."""
    erased: set[Node] = set()
    for node in reversed(list(module.graph.nodes)):
        if node not in erased and _is_sum(node) and (found := _parts_of(node)):
            with module.graph.inserting_before(node), fake_mode:
                node.replace_all_uses_with(_joined(module.graph, *found))
            erased |= erase(module.graph, node, _ERASED)
    for _, child in module.named_children():
        if isinstance(child, GraphModule):
            by_cat(child, fake_mode)
    module.recompile()


def _joined(graph: Graph, dim: int, parts: list[Node], further: list[Node]) -> Node:
    out = call(graph, aten.cat.default, [call(graph, aten.unsqueeze.default, part, dim) for part in parts], dim)
    for term in further:
        out = call(graph, aten.add.Tensor, out, term)
    return out


def _parts_of(node: Node) -> tuple[int, list[Node], list[Node]] | None:
    """A dimension, the parts along it, in order, and what else the sum ``node`` adds; None where it does not add all parts along a dimension."""
    value = node.meta["val"]
    if value.device.type != "cpu":
        return None
    parts: dict[int, dict[int, Node]] = {}
    further: list[Node] = []
    waiting: list[Any] = list(node.args)
    while waiting:
        term = waiting.pop()
        if not isinstance(term, Node) or not isinstance(term.meta["val"], torch.Tensor) or _looks(term) != _looks(node):
            return None  # a number, or a size, is added to every part
        if _is_sum(term) and len(term.users) == 1:
            waiting += term.args
            continue
        place = _place_of(term)
        if place is not None and place[1] not in parts.setdefault(place[0], {}):
            parts[place[0]][place[1]] = term
        else:
            further.append(term)
    for dim, found in parts.items():
        if len(found) > 1 and len(found) == value.shape[dim]:
            further += [term for other, terms in parts.items() if other != dim for term in terms.values()]
            return dim, [found[i].args[1] for i in range(len(found))], further  # type: ignore[misc]
    return None


def _looks(node: Node) -> tuple[torch.dtype, list[str]]:
    value = node.meta["val"]
    return value.dtype, [str(n) for n in value.shape]  # two sizes compared as such would become a guard


def _is_sum(node: Node) -> bool:
    return node.target is aten.add.Tensor and len(node.args) == 2 and not node.kwargs


def _place_of(node: Node) -> tuple[int, int] | None:
    """The dimension and the number of the part that ``node`` pads with zeros; None where it is another node, or is used elsewhere, too."""
    arguments: Any = node.args
    if node.target is not aten.select_scatter.default or len(node.users) > 1:
        return None
    zeros, part, dim, index = arguments
    value = node.meta["val"]
    size = value.shape[dim]
    if not (isinstance(zeros, Node) and zeros.target is aten.full.default and zeros.args[1] == 0):
        return None
    if type(size) is not int or type(index) is not int or part.meta["val"].dtype != value.dtype:
        return None
    return dim % value.ndim, index % size
