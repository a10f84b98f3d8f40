"""Makes compiled code round and store like eager, so that comparisons, maxima and roundings select the same elements.

**Rounding.** Inductor computes a fused loop in float32 and rounds to 16 bits when it stores. Eager rounds after every
operator. Inductor's option ``emulate_precision_casts`` does not help on a CPU: the pass that makes loops over 16-bit
values compute in float32 removes the conversions again. The capture marks the values that must be rounded
(``graph.ROUNDED``). A call of :data:`ROUNDED` follows each of them if Inductor would keep its result in float32. Values
within one operator stay in float32, as in eager's kernels.

**Storing.** The gradient of ``amax`` goes to the elements that equal the maximum. Inductor computes a cheap value again
in each loop that reads it, in vectors in one loop and one by one in another. Their last bits can differ, and then no
element equals the maximum. A call of :data:`STORED` makes all loops read one value.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from .. import torch_api
from ..graph import ROUNDED as MARK
from ..rewrites import graph_edit
from ..sixteen_bits import DTYPES, is_in_16_bits

aten, prims = torch.ops.aten, torch.ops.prims

_LIBRARY = torch.library.Library("aot_backward", "FRAGMENT")
for _name in ("rounded", "stored"):
    _LIBRARY.define(f"{_name}(Tensor x) -> Tensor")
    _LIBRARY.impl(_name, torch.clone, "CompositeExplicitAutograd")

ROUNDED = torch.ops.aot_backward.rounded.default
"""A 16-bit tensor, rounded to its dtype. The calls exist only in the graph that Inductor lowers."""

STORED = torch.ops.aot_backward.stored.default
"""A tensor, computed once and kept in memory."""

_CALLED = frozenset({
    aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default, aten.convolution.default,
})  # fmt: skip
"""Operators that have a lowering but still call eager's kernels: their results are in memory, and rounded."""

_EXACT = frozenset({
    aten.view.default, aten.reshape.default, aten.permute.default, aten.expand.default, aten.slice.Tensor, aten.select.int, aten.squeeze.dim,
    aten.squeeze.dims, aten.squeeze.default, aten.unsqueeze.default, aten.as_strided.default, aten.alias.default, aten.t.default,
    aten.transpose.int, aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int, aten.diagonal.default, aten.clone.default,
    aten.detach.default, aten.cat.default, aten.where.self, aten.gather.default, aten.index.Tensor, aten.index_select.default,
    aten.embedding.default, aten.neg.default, aten.abs.default, aten.relu.default, aten.maximum.default, aten.minimum.default,
    aten.amax.default, aten.amin.default, aten.copy_.default, aten.flip.default, ROUNDED,
})  # fmt: skip
"""Operators that only return values of their inputs. Rounding these again changes nothing and takes time."""

_VIEWS = frozenset({
    aten.view.default, aten.permute.default, aten.expand.default, aten.squeeze.dim, aten.squeeze.dims, aten.unsqueeze.default, aten.t.default,
    aten.transpose.int, aten.alias.default,
})  # fmt: skip

_COMPARISONS = frozenset(getattr(aten, name) for name in ("eq", "ne", "lt", "le", "gt", "ge"))
_CONVERTED = _COMPARISONS | {aten.add, aten.sub, aten.rsub, aten.fmod, aten.remainder, aten.floor_divide, aten.pow}


def is_rounded(module: GraphModule) -> bool:
    """Return whether a node of ``module``, or of a subgraph, is marked."""
    return any(node.meta.get(MARK) for node in module.graph.nodes) or any(
        is_rounded(child) for _, child in module.named_children() if isinstance(child, GraphModule)
    )


def round_as_eager(module: GraphModule, fake_mode: Any) -> None:
    """Put a call of :data:`ROUNDED` after each marked node of ``module`` and its subgraphs, unless its result is
    rounded anyway.

    ``fake_mode``: the mode of its nodes' values."""
    _register_lowerings()
    for node in list(module.graph.nodes):
        if node.op != "call_function":
            continue
        if (
            node.target is prims.convert_element_type.default
            and is_in_16_bits(node)
            and node.args[0].target is aten.full.default
        ):
            with module.graph.inserting_before(node), fake_mode:
                node.replace_all_uses_with(_narrowed(module.graph, node.args[0], node.meta["val"].dtype))
            module.graph.erase_node(node)
            continue
        _round_numbers(module.graph, node, fake_mode)
        if node.meta.get(MARK) and _is_generated(node) and not all(_is_called(user) for user in _users(node)):
            with module.graph.inserting_after(node), fake_mode:
                _put_behind(node, ROUNDED)
    for _, child in module.named_children():
        if isinstance(child, GraphModule):
            round_as_eager(child, fake_mode)


def store_what_is_compared(module: GraphModule, fake_mode: Any) -> None:
    """Put a call of :data:`STORED` after each floating-point value that is compared for equality, in ``module`` and its
    subgraphs.

    ``fake_mode``: the mode of its nodes' values."""
    _register_lowerings()
    comparisons = [n for n in module.graph.nodes if n.target in (aten.eq.Tensor, aten.ne.Tensor)]
    for node in dict.fromkeys(_computed(a) for n in comparisons for a in n.args[:2] if isinstance(a, Node)):
        value = node.meta.get("val")
        if (
            node.op == "call_function"
            and isinstance(value, torch.Tensor)
            and value.is_floating_point()
            and _is_generated(node)
        ):
            with module.graph.inserting_after(node), fake_mode:
                _put_behind(node, STORED)
    for _, child in module.named_children():
        if isinstance(child, GraphModule):
            store_what_is_compared(child, fake_mode)


def _put_behind(node: Node, operator: Any) -> None:
    new_node = graph_edit.call(node.graph, operator, node)
    node.replace_all_uses_with(new_node, lambda user: user is not new_node)


def _computed(node: Node) -> Node:
    """Return the node that ``node`` is a view of."""
    while node.target in _VIEWS:
        assert isinstance(node.args[0], Node)
        node = node.args[0]
    return node


def _is_generated(node: Node) -> bool:
    """Return whether Inductor generates code that computes the node."""
    producer = node.args[0] if node.target is operator.getitem else node
    assert isinstance(producer, Node)
    return producer.target not in _EXACT and not _is_called(producer)


def _is_called(node: Node) -> bool:
    """Return whether it calls an operator's own kernel, or ends the graph: its arguments and results are in memory."""
    lowering = torch_api.lowering
    return (
        node.op == "output"
        or node.target in _CALLED
        or node.target not in lowering.lowerings
        or bool(node.meta.get("should_fallback"))
    )


def _users(node: Node) -> list[Node]:
    """Return the nodes that read its values, directly or through views."""
    return [reader for user in node.users for reader in (_users(user) if user.target in _VIEWS else [user])]


def _round_numbers(graph: Graph, node: Node, fake_mode: Any) -> None:
    """Round inputs that eager converts to 16 bits before use: the numbers of :data:`_CONVERTED`, and 0-d tensors of a
    wider dtype, except the second operand of a product or quotient."""
    packet = getattr(node.target, "overloadpacket", None)
    values = [a.meta.get("val") if isinstance(a, Node) else None for a in node.args]
    tensors = [v for v in values if isinstance(v, torch.Tensor) and v.is_floating_point()]
    dtype = next((t.dtype for t in tensors if t.dtype in DTYPES and t.dim()), None)
    result = node.meta.get("val")
    if dtype is None or not isinstance(result, torch.Tensor) or (packet not in _COMPARISONS and result.dtype != dtype):
        if packet is aten.full and is_in_16_bits(node) and isinstance(node.args[1], float):
            node.update_arg(1, _nearest(node.args[1], node.meta["val"].dtype))
        return
    for i, (argument, value) in enumerate(zip(node.args, values, strict=True)):
        if isinstance(argument, float) and packet in _CONVERTED:
            node.update_arg(i, _nearest(argument, dtype))
        elif isinstance(argument, Node) and _is_wide_number(value) and not (i == 1 and packet in (aten.mul, aten.div)):
            with graph.inserting_before(node), fake_mode:
                node.update_arg(i, _narrowed(graph, argument, dtype))
    if isinstance(alpha := node.kwargs.get("alpha"), float):
        node.update_kwarg("alpha", _nearest(alpha, dtype))


def _is_wide_number(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim() == 0 and value.itemsize > 2


def _narrowed(graph: Graph, wide: Node, dtype: torch.dtype) -> Node:
    """Return ``wide`` in 16 bits. For a constant, write the nearest number: Inductor would drop its rounding."""
    if wide.target is aten.full.default:
        size, number = wide.args[0], float(wide.args[1])  # type: ignore[arg-type]
        return graph_edit.call(
            graph, aten.full.default, size, _nearest(number, dtype), dtype=dtype, device=wide.meta["val"].device
        )
    return graph_edit.call(graph, ROUNDED, graph_edit.call(graph, prims.convert_element_type.default, wide, dtype))


def _nearest(number: float, dtype: torch.dtype) -> float:
    return float(torch.tensor(number, dtype=torch.float64).to(dtype))


def _register_lowerings() -> None:
    lowering = torch_api.lowering
    if ROUNDED in lowering.lowerings:
        return

    @lowering.register_lowering(ROUNDED, type_promotion_kind=None)
    def rounded(x: Any) -> Any:
        dtype, ops = x.get_dtype(), lowering.ops

        def there_and_back(value: Any) -> Any:
            wide = ops.to_dtype(value, torch.float32, use_compute_types=False)
            narrow = ops.to_dtype(wide, dtype, use_compute_types=False)
            return ops.to_dtype(narrow, torch.float32, use_compute_types=False)

        return lowering.make_pointwise(there_and_back, override_return_dtype=dtype)(x)

    @lowering.register_lowering(STORED, type_promotion_kind=None)
    def stored(x: Any) -> Any:
        x.realize()
        return x
