"""Inserts a function's operators into a graph: traces it on the values of its operands, and inserts the trace before a
node."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from . import torch_api

SPLICED = "spliced"
"""Key in the ``meta`` of a graph that a rewrite made, such as a control-flow body: it must not be rewritten again."""


def spliced(
    place: Node, function: Callable[..., Any], operands: Sequence[Node], values: Mapping[Node, Any]
) -> tuple[list[Node], dict[Node, Any]]:
    """Insert ``function`` of ``operands`` before ``place``. ``values``: the operands' fake tensors. Return the nodes of
    its results (a flat tuple), and the value of each new node. Call it within the operands' fake mode, as in
    retargeting. If ``function`` calls control flow, its bodies become submodules, marked as :data:`SPLICED`."""
    with torch.no_grad(), torch_api.enable_python_dispatcher():
        traced_module = torch_api.make_fx(function, decomposition_table=torch_api.select_decomp_table())(
            *(values[node] for node in operands)
        )
    traced_module.graph.eliminate_dead_code()
    node_map: dict[Node, Node] = dict(zip(traced_module.graph.find_nodes(op="placeholder"), operands, strict=True))
    new_values: dict[Node, Any] = {}
    for node in traced_module.graph.nodes:
        if node.op == "output":
            return [node_map[result] for result in node.args[0]], new_values
        if node.op == "get_attr":
            with place.graph.inserting_before(place):
                node_map[node] = place.graph.get_attr(
                    _added(place.graph.owning_module, getattr(traced_module, node.target))
                )
        if node.op == "call_function":
            with place.graph.inserting_before(place):
                node_map[node] = place.graph.node_copy(node, node_map.__getitem__)
            node_map[node].meta = {**place.meta, "val": node.meta["val"]}
            node_map[node].meta.pop("should_fallback", None)  # what replaces a kernel is compiled
            new_values[node_map[node]] = node.meta["val"]
    raise AssertionError("a graph ends with its output")


def _added(module: Any, branch: GraphModule) -> str:
    """Add ``branch``, a control-flow body, to ``module`` and return its name there."""
    name = next(name for i in itertools.count() if not hasattr(module, name := f"spliced_{i}"))
    branch.meta[SPLICED] = True
    module.add_submodule(name, branch)
    return name


def with_strides(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return ``tensor``, which has the sizes of ``like``, with its strides: itself, or a copy. ``like`` must be dense;
    otherwise the result's strides differ."""
    is_true = torch_api.statically_known_true
    if all(is_true(a == b) for a, b in zip(tensor.stride(), like.stride(), strict=True)):
        return tensor
    order = sorted(range(like.dim()), key=lambda d: (-hint(like.stride(d)), -hint(like.shape[d])))
    inverse_order = sorted(range(like.dim()), key=order.__getitem__)
    return tensor.permute(order).clone(memory_format=torch.contiguous_format).permute(inverse_order)


def hint(size: Any) -> int:
    """Return the example's value of a size that has one (:func:`has_hints`)."""
    return int(size.node.hint) if isinstance(size, torch.SymInt) else int(size)


def at_most(size: Any) -> float:
    """Return the largest value in the declared range of a size; infinity if it has no range."""
    if not isinstance(size, torch.SymInt):
        return int(size)
    upper = torch_api.bound_sympy(size.node.expr, size.node.shape_env.var_to_range).upper
    return int(upper) if upper.is_Integer else math.inf


def has_hints(tensor: torch.Tensor) -> bool:
    """Return whether no size depends on data. An example of one that does: the number of rows of ``x[mask]``."""
    sizes: Sequence[Any] = tensor.shape
    return all(size.node.has_hint() for size in sizes if isinstance(size, torch.SymInt))


def replace_results(node: Node, results: Sequence[Node | None]) -> None:
    """Replace the results of ``node``, a tuple, by ``results``, and erase it. None: an unused result."""
    for user in list(node.users):
        assert user.target is operator.getitem, f"{user} reads all of {node}"
        result = results[user.args[1]]  # type: ignore[index]
        if result is not None:
            user.replace_all_uses_with(result)
        node.graph.erase_node(user)
    node.graph.erase_node(node)
