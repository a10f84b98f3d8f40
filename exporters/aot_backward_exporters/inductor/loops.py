"""Rewrite each ``scan`` as a ``while_loop``, as Inductor does, with fewer copies.

Inductor's own rewrite carries all rows through the loop, and copies each flipped operand and result of a scan from the last row to the first. Here
rows are additional inputs, and a flipped operand or result is read or written from its end.
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
    """Rewrite the scans of ``module`` and its subgraphs. Enter neither grad mode nor a mode in which comparing a size adds a guard."""
    with fake_mode, torch_api.enable_python_dispatcher():
        for number, node in enumerate(module.graph.find_nodes(op="call_function", target=torch.ops.higher_order.scan)):
            _as_loop(module, node, number)
    module.recompile()
    for _, child in module.named_children():
        if isinstance(child, GraphModule):
            scans_as_loops(child, fake_mode)


def _as_loop(module: GraphModule, node: Node, number: int) -> None:
    arguments: Any = node.args
    body, first, rows, others = arguments
    graph = node.graph
    operands = [_unflipped(row) for row in rows]
    flipped = [row is not operand for row, operand in zip(rows, operands, strict=True)]
    stacked = node.meta["val"][len(first) :]
    results = [[user for user in node.users if user.args[1] == len(first) + k] for k in range(len(stacked))]
    written_back = [bool(users) and all(_is_flip(reader) for user in users for reader in user.users) for users in results]

    inner = getattr(module, body.target)
    (output,) = inner.graph.find_nodes(op="output")
    states = [n.meta["val"] for n in output.args[0][: len(first)]]

    def prepared(*given: Any) -> list[torch.Tensor]:
        sizes = {size.node.expr: size for value in given for size in value.shape if isinstance(size, torch.SymInt)}  # the ones traced here
        shapes = [[sizes.get(size.node.expr, size) if isinstance(size, torch.SymInt) else size for size in s.shape] for s in stacked]
        buffers = [torch.empty(shape, dtype=s.dtype, device=s.device) for shape, s in zip(shapes, stacked, strict=True)]
        return buffers + [with_strides(value, like) for value, like in zip(given, states, strict=False)]

    given = [n for n in (*first, *operands, *others) if isinstance(n, Node)]
    made, _ = spliced(node, prepared, given, {n: n.meta["val"] for n in given})
    outs, first = made[: len(stacked)], made[len(stacked) :]
    with graph.inserting_before(node):
        counter = call(graph, aten.full.default, [], 0, dtype=torch.int64, device=torch.device("cpu"))
        carried, additional = (counter, *outs, *first), (*operands, *others)
        names = []
        for name, function in (
            ("below", _condition(carried, additional, len(carried))),
            ("step", _body(inner, carried, additional, len(outs), len(first), flipped, written_back)),
        ):
            names.append(f"loop_{number}_{name}")
            module.add_submodule(names[-1], GraphModule(inner, function))
        functions = [graph.get_attr(name) for name in names]
        loop = graph.call_function(torch.ops.higher_order.while_loop, (*functions, carried, additional))
        loop.meta = {**node.meta, "val": tuple(n.meta["val"] for n in carried)}
        parts = []
        for k, one in enumerate(carried):
            parts.append(graph.call_function(operator.getitem, (loop, k)))
            parts[-1].meta["val"] = one.meta["val"]
    for users, back, out in zip(results, written_back, parts[1 : 1 + len(outs)], strict=True):
        for reader in [r for user in users for r in user.users] if back else ():
            reader.replace_all_uses_with(out)
    replace_results(node, [*parts[1 + len(outs) :], *parts[1 : 1 + len(outs)]])
    if not body.users:
        graph.erase_node(body)
    if not any(n.target == body.target for n in graph.find_nodes(op="get_attr")):
        module.delete_submodule(body.target)


def _condition(carried: Any, additional: Any, rows_at: int) -> Graph:
    graph = Graph()
    counter, *_, length = _start(graph, carried, additional, rows_at)
    graph.output(call(graph, aten.lt.Scalar, counter, length))
    return graph


def _start(graph: Graph, carried: Any, additional: Any, rows_at: int) -> list[Any]:
    """Add the placeholders and return them, then the number of steps."""
    inputs: list[Any] = []
    for k, outer in enumerate((*carried, *additional)):
        inputs.append(graph.placeholder(f"input_{k}"))
        inputs[-1].meta["val"] = outer.meta["val"] if isinstance(outer, Node) else outer
    length: Any = inputs[rows_at].meta["val"].shape[0]
    return [*inputs, call(graph, aten.sym_size.int, inputs[rows_at], 0) if isinstance(length, torch.SymInt) else length]


def _body(inner: GraphModule, carried: Any, additional: Any, outs: int, states: int, flipped: list[bool], written_back: list[bool]) -> Graph:
    graph = Graph()
    *inputs, length = _start(graph, carried, additional, len(carried))
    counter, buffers, carry = inputs[0], inputs[1 : 1 + outs], inputs[1 + outs : len(carried)]
    rows, others = inputs[len(carried) : len(carried) + len(flipped)], inputs[len(carried) + len(flipped) :]
    step: Any = call(graph, aten._local_scalar_dense.default, counter)
    step.meta["unbacked_bindings"] = torch_api.compute_unbacked_bindings(counter.meta["val"].fake_mode.shape_env, step.meta["val"])
    for within in (call(graph, operator.ge, step, 0), call(graph, operator.lt, step, length)):
        call(graph, aten._assert_scalar.default, within, "the loop left its rows")
    last = call(graph, operator.sub, length, 1) if isinstance(length, Node) else length - 1
    back = call(graph, operator.sub, last, step)
    read = [call(graph, aten.select.int, row, 0, back if flip else step) for row, flip in zip(rows, flipped, strict=True)]
    places = dict(zip(inner.graph.find_nodes(op="placeholder"), (*carry, *read, *others), strict=True))
    results: Any = graph.graph_copy(inner.graph, places)
    for result, buffer, flip in zip(results[states:], buffers, written_back, strict=True):
        call(graph, aten.copy_.default, call(graph, aten.select.int, buffer, 0, back if flip else step), result)
    graph.output((call(graph, aten.add.Tensor, counter, 1), *buffers, *results[:states]))
    return graph


def _unflipped(node: Any) -> Any:
    """Return the operand of a flip along the first dimension, else ``node``."""
    return node.args[0] if _is_flip(node) else node


def _is_flip(node: Any) -> bool:
    return node.target in (aten.flip.default, torch.ops.prims.rev.default) and list(node.args[1]) == [0]
