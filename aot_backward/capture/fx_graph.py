"""Read, copy and extend FX graphs, and find nodes that share memory."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from aot_backward_exporters import torch_api

aten = torch.ops.aten
_VIEWS = {
    aten.permute.default, aten.t.default, aten.transpose.int, aten.view.default, aten.reshape.default, aten._unsafe_view.default,
    aten.expand.default, aten.unsqueeze.default, aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.slice.Tensor, aten.select.int,
    aten.alias.default, aten.detach.default, aten.as_strided.default, aten.diagonal.default, aten.unfold.default,
}  # fmt: skip
"""Operators that return a view of their first argument; recomputing it costs nothing."""
_SOMETIMES_VIEWS = {aten.reshape.default, aten.contiguous.default, aten._to_copy.default, aten.to.dtype}


def output_of(graph: Graph) -> Node:
    return next(iter(graph.find_nodes(op="output")))


def results_of(graph: GraphModule) -> list[Any]:
    return list(output_of(graph.graph).args[0])  # type: ignore[arg-type]


def by_name(graph: GraphModule) -> dict[str, Node]:
    return {n.name: n for n in graph.graph.nodes}


def truncate(graph: GraphModule, results: Iterable[Any]) -> None:
    """Make ``results`` the graph's outputs, and remove dead code."""
    output = output_of(graph.graph)
    output.args = (tuple(results),)
    output.meta = {}
    graph.graph.eliminate_dead_code()
    graph.recompile()


def copy_of(module: GraphModule) -> tuple[GraphModule, dict[Node, Node]]:
    """Return a copy of the module with flat arguments, and a map from each node to its copy, which has the same name.
    Attributes are shared."""
    graph = Graph()
    nodes: dict[Node, Node] = {}
    output = graph.output(graph.graph_copy(module.graph, nodes))
    output.meta = dict(output_of(module.graph).meta)
    out = GraphModule(module, graph)
    out.meta = dict(module.meta)
    return out, nodes


def call(graph: Graph, target: Any, *args: Any, **kwargs: Any) -> Node:
    """Insert a call with its fake value; for ``copy_`` this is the value of its target."""
    node = graph.call_function(target, args, kwargs)
    if target is aten.copy_.default:
        node.meta["val"] = args[0].meta["val"]
    else:
        node.meta["val"] = target(*torch.fx.node.map_arg(args, lambda n: n.meta["val"]), **kwargs)
    return node


def add_placeholder(graph: GraphModule, name: str, value: Any) -> Node:
    """Add a placeholder after the existing ones."""
    placeholders = list(graph.graph.find_nodes(op="placeholder"))
    with (
        graph.graph.inserting_after(placeholders[-1])
        if placeholders
        else graph.graph.inserting_before(output_of(graph.graph))
    ):
        node = graph.graph.placeholder(name)
    node.meta["val"] = value
    return node


def clone_of(graph: GraphModule, source: Node, fake_mode: Any) -> Node:
    anchor = source if source.op != "placeholder" else list(graph.graph.find_nodes(op="placeholder"))[-1]
    with graph.graph.inserting_after(anchor), fake_mode:
        return call(graph.graph, aten.clone.default, source)


def root_of(node: Node) -> Node:
    """Return the node that ``node`` is a view of, or ``node`` itself."""
    while node.op == "call_function" and node.target in _VIEWS:
        node = node.args[0]  # type: ignore[assignment]
    return node


def overlaps(node: Node) -> bool:
    """Return whether elements share memory, as in sliding windows."""
    # Do not ask whether a size is 1, which is unknown
    with torch_api.symbolic_shapes_config.patch(backed_size_oblivious=True):
        if torch_api.is_non_overlapping_and_dense(node.meta["val"]):
            return False
    while node.op == "call_function" and node.target in _VIEWS:
        if node.target in (aten.unfold.default, aten.expand.default, aten.as_strided.default):
            return True
        node = node.args[0]  # type: ignore[assignment]
    return False


def is_fresh(node: Node) -> bool:
    """Return whether the operator always allocates its result."""
    maker = node.args[0] if node.target is operator.getitem else node
    target = maker.target  # type: ignore[union-attr]
    if not isinstance(target, torch_api.OpOverload) or target._schema.is_mutable:
        return False
    return target not in _SOMETIMES_VIEWS and all(r.alias_info is None for r in target._schema.returns)


def written_placeholders(graph: GraphModule) -> set[str]:
    return {
        n.args[0].name
        for n in graph.graph.find_nodes(op="call_function", target=aten.copy_.default)
        if n.args[0].op == "placeholder"
    }


def depends_on_nodes(args: Iterable[Any]) -> bool:
    """Return whether ``args``, which may be nested lists, contain a node."""
    return any(depends_on_nodes(a) if isinstance(a, list | tuple) else isinstance(a, Node) for a in args)
