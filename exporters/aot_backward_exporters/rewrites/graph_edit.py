"""Inserts calls with their fake values into an FX graph, and erases nodes."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch.fx import Graph, Node
from torch.fx.node import map_arg


def call(graph: Graph, target: Any, *args: Any, **kwargs: Any) -> Node:
    """Return a call at the graph's insertion point. Enter the fake mode of its arguments if the call creates a tensor
    without tensor arguments."""
    node = graph.call_function(target, args, kwargs)
    node.meta["val"] = target(*map_arg(args, lambda n: n.meta["val"]), **kwargs)
    return node


def arguments(node: Node) -> dict[str, Any]:
    """Return the arguments of an operator call by name, with the defaults; None for a missing argument without a
    default."""
    schema = node.target._schema.arguments  # type: ignore[union-attr]
    return {
        **{a.name: a.default_value for a in schema},
        **dict(zip([a.name for a in schema], node.args, strict=False)),
        **node.kwargs,
    }


def erase(graph: Graph, node: Node, targets: Collection[Any]) -> set[Node]:
    """Erase ``node``, which must have no users, and its inputs that only it used and that call one of ``targets``.
    Return the erased nodes."""
    erased_nodes: set[Node] = set()
    stack = [node]
    while stack:
        current = stack.pop()
        inputs = current.all_input_nodes
        graph.erase_node(current)
        erased_nodes.add(current)
        stack += [producer for producer in inputs if not producer.users and producer.target in targets]
    return erased_nodes
