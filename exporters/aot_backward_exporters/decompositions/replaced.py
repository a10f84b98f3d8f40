"""Replaces operators of a captured graph by their decompositions."""

from __future__ import annotations

import copy
import dataclasses
import operator
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from aot_backward_runtime.errors import ExportError

from .. import torch_api
from ..fx_splice import spliced, with_strides
from ..graph import Graph
from .table import everywhere


def without(graph: Graph, names: Collection[str], fake_mode: Any) -> Graph | None:
    """Return a copy of ``graph`` with calls of ``names`` ("aten.avg_pool2d", "aten._cdist_forward") decomposed as far
    as possible; None if no call can be decomposed. ``fake_mode``: the ``FakeTensorMode`` of the capture."""
    module = GraphModule(graph.module, copy.deepcopy(graph.module.graph))
    changed = False
    with (
        fake_mode,
        torch.no_grad(),
        torch_api.enable_python_dispatcher(),
        torch_api.symbolic_shapes_config.patch(backed_size_oblivious=True),
    ):
        for node in list(module.graph.nodes):
            if node.op == "call_function" and name_of(node.target) in names and node.target in everywhere():
                changed |= _replace(node, everywhere()[node.target])
    if not changed:
        return None
    module.graph.lint()
    module.recompile()
    return dataclasses.replace(graph, module=module)


def name_of(target: Any) -> str:
    """Return the name that the manifest uses for an entry without PyTorch."""
    return str(target).removesuffix(".default")


def _replace(node: Node, function: Callable[..., Any]) -> bool:
    """Return False if the decomposition does not support this call."""
    operands = list(dict.fromkeys(node.all_input_nodes))
    values = {n: n.meta["val"] for n in operands}
    is_tuple = isinstance(node.meta["val"], tuple | list)
    users = [n for n in node.users if n.target is operator.getitem] if is_tuple else [node]
    if is_tuple and len(users) < len(node.users):
        return False
    outputs = [n.meta["val"] for n in users]

    def called(*args: Any) -> tuple[Any, ...]:
        bound = dict(zip(operands, args, strict=True))
        out = function(*map_arg(node.args, bound.__getitem__), **map_arg(node.kwargs, bound.__getitem__))
        if out is NotImplemented:
            raise _NotServed
        results = [out[int(n.args[1])] for n in users] if is_tuple else [out]  # type: ignore[arg-type]
        return tuple(with_strides(result, like) for result, like in zip(results, outputs, strict=True))

    try:
        results, _ = spliced(node, called, operands, values)
    except (_NotServed, ExportError):
        return False
    for user, result in zip(users, results, strict=True):
        user.replace_all_uses_with(result)
    for old_node in (*(users if is_tuple else ()), node):
        old_node.graph.erase_node(old_node)
    return True


class _NotServed(Exception):
    """The decomposition does not support these arguments."""
