"""Hyperparameters in an optimizer's graph: read from a vector when the graph runs, and combined before the loops over
parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from aot_backward_exporters import torch_api

from ..fx_graph import call
from ..trace_environment import decompositions

FIRST_NUMBER = 2
"""The vector begins with two flags: whether gradients are added to the accumulated ones or replace them, and whether
the optimizer has no state yet. docs/format.md (section 5) fixes it."""
LOW = (torch.bfloat16, torch.float16)


def with_tensors(
    traced: torch.fx.GraphModule, gradients: Any, parameters: Any, slots: Any, vector: torch.Tensor
) -> torch.fx.GraphModule:
    """Return the graph with the numbers as elements of ``vector``: Python arithmetic on symbols becomes arithmetic on
    float64 tensors."""
    for node in reversed(list(traced.graph.nodes)):  # users come first
        if node.op == "call_function" and node.target is torch.ops.aten.copy_.default:
            node.replace_all_uses_with(node.args[1])
            traced.graph.erase_node(node)
        elif node.op == "call_function" and "profiler" in str(node.target):
            traced.graph.erase_node(node)
    traced.graph.eliminate_dead_code()
    traced.graph.set_codegen(torch.fx.CodeGen())  # flat arguments
    traced.recompile()

    class WithTensors(torch.fx.Interpreter):
        def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
            if target is torch.ops.aten.scalar_tensor.default and isinstance(args[0], torch.Tensor):
                return args[0]
            tensors = [a for a in args if isinstance(a, torch.Tensor)]
            low_precision = any(a.dtype in LOW for a in tensors)
            if low_precision and any(a.dtype is torch.float64 and a.dim() == 0 for a in tensors):
                # with 16-bit elements, eager's kernels keep a Python number in float32, but would round a one-element
                # tensor to 16 bits
                wide_args = [a.float() if isinstance(a, torch.Tensor) and a.dim() > 0 else a for a in args]
                low_dtype = next(a.dtype for a in tensors if a.dtype in LOW)
                return super().call_function(target, tuple(wide_args), kwargs).to(low_dtype)
            return super().call_function(target, args, kwargs)

    def run(grads: Any, params: Any, states: Any, numbers: torch.Tensor) -> Any:
        elements = [numbers.select(0, i) for i in range(FIRST_NUMBER, numbers.shape[0])]
        return WithTensors(traced).run(*grads, *params, *states, numbers.select(0, 1), *elements)

    module = make_fx(run, decomposition_table=decompositions())(gradients, parameters, slots, vector)
    module.graph.set_codegen(torch.fx.CodeGen())
    module.graph = torch_api.fx_graph_cse(module.graph)
    module.graph.eliminate_dead_code()
    return module


def numbers_first(module: torch.fx.GraphModule, gradients: int) -> torch.fx.GraphModule:
    """Return ``module`` with scalars that depend only on numbers (bias corrections) computed first. Loops over
    parameters read them from memory.

    Otherwise the compiler writes the computation into each loop: two ``pow`` for every eight elements. These scalars
    also wait for every gradient (the first ``gradients`` placeholders), so nothing is changed before everything has
    been allocated: if memory runs out, the state is still intact.
    """
    graph = module.graph
    number_nodes: set[torch.fx.Node] = set()
    gradient_nodes = set(list(graph.find_nodes(op="placeholder"))[:gradients])
    for node in (n for n in graph.nodes if n not in gradient_nodes):
        value = node.meta.get("val")
        is_numbers = node.op == "placeholder" and value.dim() <= 1 and value.dtype is torch.float64  # the vector itself
        is_scalar = isinstance(value, torch.Tensor) and value.dim() == 0 and value.is_floating_point()
        if is_numbers or (
            is_scalar
            and (node.op == "placeholder" or (node.all_input_nodes and number_nodes.issuperset(node.all_input_nodes)))
        ):
            number_nodes.add(node)
    new_graph = torch.fx.Graph()
    new_nodes: dict[torch.fx.Node, torch.fx.Node] = {}

    def copy(nodes: Sequence[torch.fx.Node]) -> None:
        for node in nodes:
            new_nodes[node] = new_graph.node_copy(node, lambda n: new_nodes[n])

    order = [n for n in graph.nodes if n.op != "output"]
    copy([n for n in order if n.op == "placeholder"])
    copy([n for n in order if n in number_nodes and n.op != "placeholder"])
    false_node = false_after(new_graph, [new_nodes[n] for n in order[:gradients]])
    stages: dict[torch.dtype, list[torch.fx.Node]] = {}
    for node in order:
        loops = [u for u in node.users if u not in number_nodes and u.op != "output"]
        if node in number_nodes and loops and node.meta["val"].dim() == 0:
            is_float32 = all(u.meta["val"].dtype is torch.float32 for u in loops)
            stages.setdefault(torch.float32 if is_float32 else torch.float64, []).append(node)
    loaded_nodes: dict[torch.fx.Node, torch.fx.Node] = {}
    for dtype, nodes in stages.items():
        parts = []
        for node in nodes:
            part = new_nodes[node]
            if node.meta["val"].dtype is not dtype:
                part = call(new_graph, torch.ops.prims.convert_element_type.default, part, dtype)
            part = _after(new_graph, false_node, part)
            parts.append(call(new_graph, torch.ops.aten.unsqueeze.default, part, 0))
        vector = call(new_graph, torch.ops.aten.cat.default, parts if len(parts) > 1 else parts * 2)
        for i, node in enumerate(nodes):
            loaded_nodes[node] = call(new_graph, torch.ops.aten.select.int, vector, 0, i)
    for node in order:
        if node not in new_nodes:
            new_nodes[node] = new_graph.node_copy(node, lambda n: loaded_nodes.get(n, new_nodes[n]))
    for node in next(iter(graph.find_nodes(op="output"))).args[0]:
        if node in number_nodes:
            new_nodes[node] = _after(new_graph, false_node, new_nodes[node])
    new_graph.output(torch.fx.node.map_arg(next(iter(graph.find_nodes(op="output"))).args[0], lambda n: new_nodes[n]))
    return torch.fx.GraphModule(module, new_graph)


def false_after(graph: torch.fx.Graph, tensors: Sequence[torch.fx.Node]) -> torch.fx.Node | None:
    """Return a 0-d False that can be computed only after all ``tensors``."""
    aten = torch.ops.aten
    out: torch.fx.Node | None = None
    for tensor in tensors:
        if tensor.meta["val"].numel():
            for dim in range(tensor.meta["val"].dim() - 1, -1, -1):
                tensor = call(graph, aten.select.int, tensor, dim, 0)
            is_nan = call(graph, aten.isnan.default, tensor)
            false_node = call(graph, aten.logical_and.default, is_nan, call(graph, aten.logical_not.default, is_nan))
            out = false_node if out is None else call(graph, aten.logical_or.default, out, false_node)
    return out


def _after(graph: torch.fx.Graph, never: torch.fx.Node | None, scalar: torch.fx.Node) -> torch.fx.Node:
    """Return ``scalar``, computed after ``never`` (from :func:`false_after`)."""
    if never is None:
        return scalar
    return call(graph, torch.ops.aten.where.self, never, call(graph, torch.ops.aten.neg.default, scalar), scalar)
