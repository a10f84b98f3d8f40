"""Calls that are put into an FX graph, with their fake values, and nodes that are taken out."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch.fx import Graph, Node
from torch.fx.node import map_arg


def call(graph: Graph, target: Any, *args: Any, **kwargs: Any) -> Node:
    """A call at the graph's insertion point. The fake mode of its arguments must be entered where it makes a tensor of none."""
    made = graph.call_function(target, args, kwargs)
    made.meta["val"] = target(*map_arg(args, lambda n: n.meta["val"]), **kwargs)
    return made


def arguments(node: Node) -> dict[str, Any]:
    """Of a call of an operator, by name, with the defaults; None where one without a default is not given."""
    schema = node.target._schema.arguments  # type: ignore[union-attr]
    return {**{a.name: a.default_value for a in schema}, **dict(zip([a.name for a in schema], node.args, strict=False)), **node.kwargs}


def erase(graph: Graph, node: Node, targets: Collection[Any]) -> set[Node]:
    """Takes ``node`` out, which nothing may use, and what only it used, as far as those call one of ``targets``. Returns what is gone."""
    gone: set[Node] = set()
    waiting = [node]
    while waiting:
        one = waiting.pop()
        inputs = one.all_input_nodes
        graph.erase_node(one)
        gone.add(one)
        waiting += [before for before in inputs if not before.users and before.target in targets]
    return gone
