"""Converts complex arguments of operators to tensors: neither generated C++ nor the proxy executor can pass a complex
number to an operator.

A number becomes a 0-d tensor of the dtype that eager computes in, so the result has eager's dtype. Real numbers become
tensors if an operator on complex tensors takes a tensor: generated C++ would pass a float64 tensor, which would turn a
complex64 scalar into a complex128 one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_aggregate
from torch.utils import _pytree as pytree

from aot_backward_runtime.errors import ExportError

from .. import torch_api
from ..fx_splice import replace_results, spliced
from ..graph import LINE
from ..rewrites.graph_edit import arguments, call

aten = torch.ops.aten


def complex_numbers_as_tensors(module: GraphModule, fake_mode: Any) -> None:
    """Replace them in ``module`` and in its control-flow bodies. Raise :class:`ExportError` for an operator without
    another form."""
    _fold_numbers(module)
    queue = list(module.graph.nodes)
    with fake_mode:
        for node in queue:  # the list grows: replacements of an operator may have numbers, too
            if node.op == "call_function" and isinstance(node.target, torch_api.OpOverload):
                queue += _replaced(node)
    for _, child in module.named_children():
        if isinstance(child, GraphModule):
            complex_numbers_as_tensors(child, fake_mode)


def _fold_numbers(module: GraphModule) -> None:
    """Fold tensor operators with only numbers as arguments, such as ``_conj`` in the gradient of a product with a
    number, into a number."""
    for node in list(module.graph.nodes):
        if node.op != "call_function" or not isinstance(node.target, torch_api.OpOverload) or node.all_input_nodes:
            continue
        tensor_args = [value for value, kind in _typed_arguments(node) if isinstance(kind, torch.TensorType)]
        if tensor_args and all(_is_number(value) for value in tensor_args):
            number = node.target(*node.args, **node.kwargs).item()
            for user in list(node.users):
                user.args, user.kwargs = map_aggregate((user.args, user.kwargs), lambda a: number if a is node else a)  # noqa: B023
            module.graph.erase_node(node)


def _replaced(node: Node) -> Sequence[Node]:
    """Replace the numbers of ``node``. Return the nodes that replace it, if it is written out."""
    target: Any = node.target
    values = [n.meta.get("val") for n in (node, *node.all_input_nodes)]
    tensors = [v for v in pytree.tree_leaves(values) if isinstance(v, torch.Tensor)]
    typed_args: list[tuple[Any, Any]] = _typed_arguments(node)
    has_number = any(isinstance(v, complex) for v in pytree.tree_leaves([value for value, _ in typed_args]))
    if not has_number and not any(t.dtype.is_complex for t in tensors):
        return ()
    for argument in target._schema.arguments:
        if argument.kwarg_only and isinstance(
            argument.real_type, torch.NumberType
        ):  # Inductor passes a default that the proxy executor does not expect
            node.update_kwarg(argument.name, node.kwargs.get(argument.name, argument.default_value))
    if target in (aten.full.default, aten.scalar_tensor.default):
        size: Any = node.args[0] if target is aten.full.default else []
        number = typed_args[0 if target is aten.scalar_tensor.default else 1][0]
        if tensors[0].dtype.is_complex and _is_number(number):
            with node.graph.inserting_before(node):
                _replace(node, _filled(node.graph, size, complex(number), tensors[0]))
        return ()
    positions = {
        i for i, (value, kind) in enumerate(typed_args) if _is_number(value) and isinstance(kind, torch.TensorType)
    }
    positions |= {i for i, (value, _) in enumerate(typed_args) if isinstance(value, complex)}
    if not positions and not has_number:
        return ()
    overload = _taking_tensors(target, positions) if positions and isinstance(node.meta["val"], torch.Tensor) else None
    if target is aten.scatter.value or (target is aten.pow.Tensor_Scalar and node.args[1].imag == 0):  # type: ignore[union-attr]
        # scatter.src takes a tensor of the index's shape; eager has separate kernels for a square or a root
        overload = None
    if overload is None:
        return _written_out(node)
    min_dtype = torch.complex64 if has_number else torch.bool
    dtype = functools.reduce(torch.promote_types, (t.dtype for t in tensors), min_dtype)
    with node.graph.inserting_before(node):
        like = torch.empty((), dtype=dtype, device=tensors[0].device)
        values = [
            _filled(node.graph, [], value, like) if i in positions else value for i, (value, _) in enumerate(typed_args)
        ]
        _replace(node, _call_by_schema(node.graph, overload, values))
    return ()


def _typed_arguments(node: Node) -> list[tuple[Any, Any]]:
    """Return the arguments of a call in schema order, with their types; an optional argument has its non-optional
    type."""
    kinds = [a.real_type for a in node.target._schema.arguments]  # type: ignore[union-attr]
    kinds = [kind.getElementType() if isinstance(kind, torch.OptionalType) else kind for kind in kinds]
    return list(zip(arguments(node).values(), kinds, strict=True))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, complex))


def _filled(graph: Any, size: Any, number: Any, like: torch.Tensor) -> Node:
    """Return a tensor filled with ``number``, of the dtype and device of ``like``; a real number stays real, which
    promotes to the same."""
    options = {"dtype": like.dtype.to_real(), "device": like.device}
    if not size and not isinstance(number, complex):
        return call(graph, aten.full.default, [], number, **options)
    parts = [call(graph, aten.full.default, [*size, 1], part, **options) for part in (number.real, number.imag)]
    return call(graph, aten.view_as_complex.default, call(graph, aten.cat.default, parts, -1))


def _call_by_schema(graph: Any, target: Any, values: Sequence[Any]) -> Node:
    bound = list(zip(target._schema.arguments, values, strict=True))
    return call(
        graph, target, *(v for a, v in bound if not a.kwarg_only), **{a.name: v for a, v in bound if a.kwarg_only}
    )


def _taking_tensors(target: Any, positions: set[int]) -> Any:
    """Return ``target`` or another overload with the same arguments but tensors in ``positions``; None if there is
    none."""
    kinds = [
        str(torch.TensorType.get()) if i in positions else str(a.real_type)
        for i, a in enumerate(target._schema.arguments)
    ]
    packet = target.overloadpacket
    for overload in (target, *(getattr(packet, name) for name in packet.overloads())):
        if [str(a.real_type) for a in overload._schema.arguments] == kinds and not overload._schema.is_mutable:
            return overload
    return None


def _replace(node: Node, new: Node) -> None:
    before, after = node.meta["val"], new.meta["val"]
    if (before.dtype, before.shape) != (after.dtype, after.shape):
        raise ExportError.of(
            node.target,
            f"{node.target} with complex numbers as tensors gives {after}, expected {before}. Report this as a bug.",
        )
    new.meta = {**node.meta, "val": after}
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)


def _written_out(node: Node) -> Sequence[Node]:
    """Replace ``node`` by other operators, and return them."""
    target: Any = node.target
    name = target._schema.name.removeprefix("aten::")
    form = _WRITTEN_OUT.get(target) or (functools.partial(_each, name) if name.startswith("_foreach_") else None)
    if form is None:
        line = node.meta.get(LINE)
        raise ExportError.of(
            target,
            f"{target}: expected real numbers, got a complex one{f' ({line.file}:{line.number}: {line.text})' if line else ''}. Write it with "
            "products and sums of tensors.",
        )
    args, operands = arguments(node), node.all_input_nodes
    single = isinstance(node.meta["val"], torch.Tensor)

    def function(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        bound = dict(zip(operands, tensors, strict=True))
        results: Any = form(**map_aggregate(args, lambda a: bound.get(a, a) if isinstance(a, Node) else a))
        return (results,) if single else tuple(results)

    results, new_nodes = spliced(node, function, operands, {n: n.meta["val"] for n in operands})
    if single:
        _replace(node, results[0])
    else:
        replace_results(node, results)
    return list(new_nodes)


def _each(name: str, **kwargs: Any) -> list[Any]:
    """Apply the operator of ``_foreach_NAME`` to one element after another."""
    count = len(kwargs["self"])
    operator = getattr(aten, name.removeprefix("_foreach_"))
    rows = [value if isinstance(value, (list, tuple)) else [value] * count for value in kwargs.values()]
    return [operator(*row) for row in zip(*rows, strict=True)]


def _sum(self: torch.Tensor, product: torch.Tensor, beta: Any, alpha: Any) -> torch.Tensor:
    return product * alpha if beta == 0 else self * beta + product * alpha  # eager does not read ``self`` if beta is 0


_WRITTEN_OUT: dict[Any, Callable[..., Any]] = {
    aten.add.Tensor: lambda self, other, alpha: self + other * alpha,
    aten.sub.Tensor: lambda self, other, alpha: self - other * alpha,
    aten.pow.Tensor_Scalar: lambda self, exponent: (
        self.to(torch.promote_types(self.dtype, torch.complex64)) ** exponent.real
    ),
    aten.scatter.value: lambda self, dim, index, value: self.scatter(dim, index, self.new_full(index.shape, value)),
    aten.addcmul.default: lambda self, tensor1, tensor2, value: self + tensor1 * tensor2 * value,
    aten.addcdiv.default: lambda self, tensor1, tensor2, value: self + tensor1 / tensor2 * value,
    aten.addmm.default: lambda self, mat1, mat2, beta, alpha: _sum(self, mat1 @ mat2, beta, alpha),
    aten.addmv.default: lambda self, mat, vec, beta, alpha: _sum(self, mat @ vec, beta, alpha),
    aten.addr.default: lambda self, vec1, vec2, beta, alpha: _sum(self, torch.outer(vec1, vec2), beta, alpha),
    aten.baddbmm.default: lambda self, batch1, batch2, beta, alpha: _sum(self, batch1 @ batch2, beta, alpha),
    aten.addbmm.default: lambda self, batch1, batch2, beta, alpha: _sum(self, (batch1 @ batch2).sum(0), beta, alpha),
}
"""Operators without an overload that takes tensors for their numbers."""
