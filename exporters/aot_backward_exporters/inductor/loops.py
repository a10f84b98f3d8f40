"""Rewrite each ``scan`` as a ``while_loop``, as Inductor does, with fewer copies.

Inductor's own rewrite carries all rows through the loop, and copies each flipped operand and result of a scan from the
last row to the first. Here rows are additional inputs, and a flipped operand or result is read or written from its end.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from .. import torch_api
from ..fx_splice import replace_results, spliced, with_strides
from ..rewrites.graph_edit import call

aten = torch.ops.aten


def scans_as_loops(module: GraphModule, fake_mode: Any) -> None:
    """Rewrite the scans of ``module`` and its subgraphs. Enter neither grad mode nor a mode in which comparing a size
    adds a guard."""
    with fake_mode, torch_api.enable_python_dispatcher():
        for number, node in enumerate(module.graph.find_nodes(op="call_function", target=torch.ops.higher_order.scan)):
            _as_loop(module, node, number)
            module.recompile()
    for _, child in module.named_children():
        if isinstance(child, GraphModule):
            scans_as_loops(child, fake_mode)


def _as_loop(module: GraphModule, node: Node, number: int) -> None:
    arguments: Any = node.args
    body, init, rows, others = arguments
    graph = node.graph
    operands = [_unflipped(row) for row in rows]
    flips = [row is not operand for row, operand in zip(rows, operands, strict=True)]
    row_outputs = node.meta["val"][len(init) :]
    results = [[user for user in node.users if user.args[1] == len(init) + k] for k in range(len(row_outputs))]
    output_flips = [
        bool(users) and all(_is_flip(reader) for user in users for reader in user.users) for users in results
    ]

    inner = getattr(module, body.target)
    (output,) = inner.graph.find_nodes(op="output")
    states = [n.meta["val"] for n in output.args[0][: len(init)]]

    def prepared(*args: Any) -> list[torch.Tensor]:
        # The sizes traced here
        sizes = {size.node.expr: size for value in args for size in value.shape if isinstance(size, torch.SymInt)}
        shapes = [
            [sizes.get(size.node.expr, size) if isinstance(size, torch.SymInt) else size for size in s.shape]
            for s in row_outputs
        ]
        buffers = [
            torch.empty(shape, dtype=s.dtype, device=s.device) for shape, s in zip(shapes, row_outputs, strict=True)
        ]
        return buffers + [with_strides(value, like) for value, like in zip(args, states, strict=False)]

    inputs = [n for n in (*init, *operands, *others) if isinstance(n, Node)]
    loop_inputs, _ = spliced(node, prepared, inputs, {n: n.meta["val"] for n in inputs})
    outs, init = loop_inputs[: len(row_outputs)], loop_inputs[len(row_outputs) :]
    with graph.inserting_before(node):
        counter = call(graph, aten.full.default, [], 0, dtype=torch.int64, device=torch.device("cpu"))
        carried_inputs, additional_inputs = (counter, *outs, *init), (*operands, *others)
        names = []
        for name, function in (
            ("below", _condition(carried_inputs, additional_inputs, len(carried_inputs))),
            ("step", _body(inner, carried_inputs, additional_inputs, len(outs), len(init), flips, output_flips)),
        ):
            names.append(f"loop_{number}_{name}")
            module.add_submodule(names[-1], GraphModule(inner, function))
        functions = [graph.get_attr(name) for name in names]
        loop = graph.call_function(torch.ops.higher_order.while_loop, (*functions, carried_inputs, additional_inputs))
        loop.meta = {**node.meta, "val": tuple(n.meta["val"] for n in carried_inputs)}
        parts = []
        for k, source in enumerate(carried_inputs):
            parts.append(graph.call_function(operator.getitem, (loop, k)))
            parts[-1].meta["val"] = source.meta["val"]
    for users, is_flipped, out in zip(results, output_flips, parts[1 : 1 + len(outs)], strict=True):
        for reader in [r for user in users for r in user.users] if is_flipped else ():
            reader.replace_all_uses_with(out)
    replace_results(node, [*parts[1 + len(outs) :], *parts[1 : 1 + len(outs)]])
    if not body.users:
        graph.erase_node(body)
    if not any(n.target == body.target for n in graph.find_nodes(op="get_attr")):
        module.delete_submodule(body.target)


def _condition(carried_inputs: Any, additional_inputs: Any, rows_at: int) -> Graph:
    graph = Graph()
    counter, *_, length = _start(graph, carried_inputs, additional_inputs, rows_at)
    graph.output(call(graph, aten.lt.Scalar, counter, length))
    return graph


def _start(graph: Graph, carried_inputs: Any, additional_inputs: Any, rows_at: int) -> list[Any]:
    """Add the placeholders and return them, then the number of steps."""
    inputs: list[Any] = []
    for k, outer in enumerate((*carried_inputs, *additional_inputs)):
        inputs.append(graph.placeholder(f"input_{k}"))
        inputs[-1].meta["val"] = outer.meta["val"] if isinstance(outer, Node) else outer
    length: Any = inputs[rows_at].meta["val"].shape[0]
    return [*inputs, call(graph, aten.sym_size.int, inputs[rows_at], 0) if isinstance(length, torch.SymInt) else length]


def _body(
    inner: GraphModule,
    carried_inputs: Any,
    additional_inputs: Any,
    outs: int,
    states: int,
    flips: list[bool],
    output_flips: list[bool],
) -> Graph:
    graph = Graph()
    *inputs, length = _start(graph, carried_inputs, additional_inputs, len(carried_inputs))
    counter, buffers, carry = inputs[0], inputs[1 : 1 + outs], inputs[1 + outs : len(carried_inputs)]
    rows = inputs[len(carried_inputs) : len(carried_inputs) + len(flips)]
    others = inputs[len(carried_inputs) + len(flips) :]
    step: Any = call(graph, aten._local_scalar_dense.default, counter)
    step.meta["unbacked_bindings"] = torch_api.compute_unbacked_bindings(
        counter.meta["val"].fake_mode.shape_env, step.meta["val"]
    )
    for in_bounds in (call(graph, operator.ge, step, 0), call(graph, operator.lt, step, length)):
        call(graph, aten._assert_scalar.default, in_bounds, "the loop left its rows")
    last = call(graph, operator.sub, length, 1) if isinstance(length, Node) else length - 1
    reverse_step = call(graph, operator.sub, last, step)
    row_slices = [
        call(graph, aten.select.int, row, 0, reverse_step if flip else step)
        for row, flip in zip(rows, flips, strict=True)
    ]
    mapping = dict(zip(inner.graph.find_nodes(op="placeholder"), (*carry, *row_slices, *others), strict=True))
    results: Any = graph.graph_copy(inner.graph, mapping)
    for result, buffer, flip in zip(results[states:], buffers, output_flips, strict=True):
        call(graph, aten.copy_.default, call(graph, aten.select.int, buffer, 0, reverse_step if flip else step), result)
    graph.output((call(graph, aten.add.Tensor, counter, 1), *buffers, *results[:states]))
    return graph


def _unflipped(node: Any) -> Any:
    """Return the operand of a flip along the first dimension, else ``node``."""
    return node.args[0] if _is_flip(node) else node


def _is_flip(node: Any) -> bool:
    return node.target in (aten.flip.default, torch.ops.prims.rev.default) and list(node.args[1]) == [0]
