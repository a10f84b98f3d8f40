"""Rewrites of a lowered graph before its translation: numbers become tensors, 16-bit arithmetic is widened, ordering of
native code is removed."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

aten, prims = torch.ops.aten, torch.ops.prims
_LOW = (torch.bfloat16, torch.float16)
_MOVES = {
    prims.convert_element_type.default, aten._to_copy.default, aten.view.default, aten.permute.default, aten.unsqueeze.default,
    aten.squeeze.dim, aten.transpose.int, aten.clone.default, aten.alias.default,
}  # fmt: skip
"""Operators that onnxruntime's CPU kernels also support for 16-bit numbers."""


def rewrite(module: GraphModule) -> None:
    _without_waiting(module)
    _without_idle_squeezes(module)
    _numbers_as_tensors(module)
    module.graph.eliminate_dead_code()
    module.recompile()


def _without_waiting(module: GraphModule) -> None:
    """Remove a False that depends on tensors: it orders native code that updates in place, and ONNX needs no order."""
    false_nodes: set[Node] = set()
    for node in list(module.graph.nodes):
        if _is_never(node) or (node.target is aten.logical_or.default and false_nodes.issuperset(node.args)):
            false_nodes.add(node)
        elif node.target is aten.where.self and node.args[0] in false_nodes:
            node.replace_all_uses_with(node.args[2])
            module.graph.erase_node(node)


def _is_never(node: Node) -> bool:
    """Return whether the node is ``a and not a``."""
    if node.target is not aten.logical_and.default:
        return False
    pairs = (node.args, node.args[::-1])
    return any(isinstance(b, Node) and b.target is aten.logical_not.default and b.args[0] is a for a, b in pairs)


def _without_idle_squeezes(module: GraphModule) -> None:
    """Remove dimensions other than 1 from squeezes. PyTorch's squeeze keeps such dimensions, including dynamic ones;
    ONNX's raises an error."""
    for node in [n for n in module.graph.nodes if n.target in (aten.squeeze.dim, aten.squeeze.dims)]:
        source, dims = node.args
        before, after = source.meta["val"], node.meta["val"]
        if before.dim() == after.dim():
            node.replace_all_uses_with(source)
            module.graph.erase_node(node)
        elif node.target is aten.squeeze.dims:
            node.update_arg(1, [d for d in dims if isinstance(before.shape[d], int) and before.shape[d] == 1])


def _numbers_as_tensors(module: GraphModule) -> None:
    """Turn sizes, and numbers computed from them, into tensors for operators that require one."""
    for node in [n for n in module.graph.nodes if n.op == "call_function"]:
        schema = getattr(node.target, "_schema", None)
        if schema is None or not isinstance(node.meta.get("val"), torch.Tensor):
            continue
        for i, (arg, param) in enumerate(zip(node.args, schema.arguments, strict=False)):
            if (
                isinstance(arg, Node)
                and isinstance(arg.meta.get("val"), torch.SymInt | torch.SymFloat)
                and str(param.type) == "Tensor"
            ):
                with module.graph.inserting_before(node):
                    tensor_node = module.graph.call_function(
                        aten.scalar_tensor.default, (arg,), {"dtype": node.meta["val"].dtype}
                    )
                with node.meta["val"].fake_mode:
                    tensor_node.meta["val"] = torch.empty((), dtype=node.meta["val"].dtype)
                node.update_arg(i, tensor_node)


def widen(module: GraphModule) -> None:
    """Compute 16-bit arithmetic in float32 and round once, as eager's CPU kernels do; onnxruntime has hardly any 16-bit
    kernels for CPUs."""
    for node in [n for n in module.graph.nodes if n.op == "call_function" and n.target not in _MOVES]:
        value = node.meta.get("val")
        low_inputs = [n for n in node.all_input_nodes if _dtype(n) in _LOW]
        is_low = isinstance(value, torch.Tensor) and value.dtype in _LOW
        if not low_inputs and not is_low:
            continue
        if node.kwargs.get("dtype") in _LOW:
            node.kwargs = {**node.kwargs, "dtype": torch.float32}
        for operand in low_inputs:
            with module.graph.inserting_before(node):
                wide = _cast(module, operand, torch.float32)
            node.replace_input_with(operand, wide)
        if is_low:
            users = list(node.users)
            dtype = value.dtype
            node.meta["val"] = value.to(torch.float32)
            with module.graph.inserting_after(node):
                narrow = _cast(module, node, dtype)
            for user in users:
                user.replace_input_with(node, narrow)
    module.recompile()


def _dtype(node: Node) -> Any:
    value = node.meta.get("val")
    return value.dtype if isinstance(value, torch.Tensor) else None


def _cast(module: GraphModule, node: Node, dtype: torch.dtype) -> Node:
    cast = module.graph.call_function(prims.convert_element_type.default, (node, dtype))
    cast.meta = {**node.meta, "val": node.meta["val"].to(dtype)}
    return cast
