"""Puts a function's operators into a graph: it is traced on the values of the nodes that it is given, and what was traced stands before a node."""

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
"""In the ``meta`` of a graph that a rewrite made, as a body of control flow: what it left there is not to be rewritten again."""


def spliced(place: Node, function: Callable[..., Any], operands: Sequence[Node], values: Mapping[Node, Any]) -> tuple[list[Node], dict[Node, Any]]:
    """``function`` of ``operands``, whose fake tensors are in ``values``, before ``place``: the nodes of its results (a flat tuple), and the value of
    each new node. To be called within the operands' fake mode, as retargeting is. Where ``function`` calls control flow, its bodies become parts of
    the module, marked as :data:`SPLICED`."""
    with torch.no_grad(), torch_api.enable_python_dispatcher():
        traced = torch_api.make_fx(function, decomposition_table=torch_api.select_decomp_table())(*(values[node] for node in operands))
    traced.graph.eliminate_dead_code()
    found: dict[Node, Node] = dict(zip(traced.graph.find_nodes(op="placeholder"), operands, strict=True))
    made: dict[Node, Any] = {}
    for node in traced.graph.nodes:
        if node.op == "output":
            return [found[result] for result in node.args[0]], made
        if node.op == "get_attr":
            with place.graph.inserting_before(place):
                found[node] = place.graph.get_attr(_added(place.graph.owning_module, getattr(traced, node.target)))
        if node.op == "call_function":
            with place.graph.inserting_before(place):
                found[node] = place.graph.node_copy(node, found.__getitem__)
            found[node].meta = {**place.meta, "val": node.meta["val"]}
            made[found[node]] = node.meta["val"]
    raise AssertionError("a graph ends with its output")


def _added(module: Any, branch: GraphModule) -> str:
    """The name under which ``branch``, a body of control flow, is a part of ``module`` now."""
    name = next(name for i in itertools.count() if not hasattr(module, name := f"spliced_{i}"))
    branch.meta[SPLICED] = True
    module.add_submodule(name, branch)
    return name


def with_strides(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """``tensor``, which has the sizes of ``like``, with its strides: itself, or a copy. For strides without gaps; the result's own show otherwise."""
    known = torch_api.statically_known_true
    if all(known(a == b) for a, b in zip(tensor.stride(), like.stride(), strict=True)):
        return tensor
    order = sorted(range(like.dim()), key=lambda d: (-hint(like.stride(d)), -hint(like.shape[d])))
    back = sorted(range(like.dim()), key=order.__getitem__)
    return tensor.permute(order).clone(memory_format=torch.contiguous_format).permute(back)


def hint(size: Any) -> int:
    """The number that a size is in the example, which it has (:func:`has_hints`)."""
    return int(size.node.hint) if isinstance(size, torch.SymInt) else int(size)


def at_most(size: Any) -> float:
    """The largest number that a size can be by its declared range; infinity where it has none."""
    if not isinstance(size, torch.SymInt):
        return int(size)
    upper = torch_api.bound_sympy(size.node.expr, size.node.shape_env.var_to_range).upper
    return int(upper) if upper.is_Integer else math.inf


def has_hints(tensor: torch.Tensor) -> bool:
    """Whether no size depends on data, as the number of rows of ``x[mask]`` does."""
    sizes: Sequence[Any] = tensor.shape
    return all(size.node.has_hint() for size in sizes if isinstance(size, torch.SymInt))


def replace_results(node: Node, results: Sequence[Node | None]) -> None:
    """Puts ``results`` in the place of those of ``node``, a tuple, and takes it out. None: a result that nothing reads."""
    for user in list(node.users):
        assert user.target is operator.getitem, f"{user} reads all of {node}"
        result = results[user.args[1]]  # type: ignore[index]
        if result is not None:
            user.replace_all_uses_with(result)
        node.graph.erase_node(user)
    node.graph.erase_node(node)
