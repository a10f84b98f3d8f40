"""Changes to a graph before Inductor lowers it. Without them the generated code would be slow, wrong or invalid C++."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.fx import GraphModule, Node

from .. import torch_api
from ..graph import EAGER_KERNEL
from ..rewrites.graph_edit import call

aten = torch.ops.aten

KERNELS = (
    aten.convolution_backward.default,
    aten.max_pool2d_with_indices.default,
    aten.max_pool2d_with_indices_backward.default,
)
"""Operators with an eager CPU kernel that is faster than Inductor's lowering. For pooling Inductor has code of its own:
a step of two convolutions with pooling, 256 rows, takes 1.75 ms with the kernels and 2.7 to 3.7 with generated code.
The pooling of most images, though not its gradient, is rewritten (``rewrites.max_pooling``). For the backward of a
convolution Inductor calls the kernel, too, but first stores the images in the order of the weight's gradient (torch
2.13), which for a depthwise convolution is never channels last: gradients of a ConvNeXt of 3.4 million parameters took
1.17 and 1.20 times as long with one thread and two. Ordering them would also fix dynamic sizes. Small convolutions are
rewritten, too (``rewrites.small_convolution``)."""


_ADAPTIVE_POOLING = (aten._adaptive_avg_pool2d.default, aten.adaptive_max_pool2d.default)


def copied(module: GraphModule) -> GraphModule:
    """Return a copy for Inductor, which modifies its input; tensors are shared."""
    out = GraphModule(module, copy.deepcopy(module.graph))
    for name, child in out.named_children():  # bodies of control flow
        if isinstance(child, GraphModule):
            setattr(out, name, copied(child))
    return out


def calls_eager_kernels(module: GraphModule) -> bool:
    """Return whether an operator of ``module`` uses eager's kernel because compiled code gave other numbers, which an
    older version stored in the portable graph."""
    return any(node.meta.get(EAGER_KERNEL) for node in module.graph.nodes)


def call_kernels(module: GraphModule) -> None:
    """Mark the operators that Inductor must call instead of compiling."""
    for node in module.graph.nodes:
        needs_fallback = node.target in KERNELS or _miscompiled(node) or _would_fix_sizes(node)
        if node.meta.get(EAGER_KERNEL) or (needs_fallback and node.args[0].meta["val"].device.type == "cpu"):
            node.meta["should_fallback"] = True
            if node.target is torch.ops.aten.mul.Tensor and type(node.args[1]) in (int, float):
                node.target = torch.ops.aten.mul.Scalar  # generated code cannot pass a number as a tensor
    for _, child in module.named_children():
        if isinstance(child, GraphModule):
            call_kernels(child)


def _miscompiled(node: Node) -> bool:
    """Return whether Inductor generates wrong code for the call.

    The backward of average pooling with ``ceil_mode`` divides by the whole window if it reaches beyond the padded
    input; eager divides by the part inside.
    """
    aten = torch.ops.aten
    return node.target in (aten.avg_pool2d_backward.default, aten.avg_pool3d_backward.default) and bool(node.args[5])


def _would_fix_sizes(node: Node) -> bool:
    """Return whether Inductor's lowering (torch 2.13) fixes dynamic sizes: of adaptive pooling, to write the windows
    out."""
    return node.target in _ADAPTIVE_POOLING and any(
        isinstance(s, torch.SymInt) for s in node.all_input_nodes[0].meta["val"].shape
    )


_WRITES_INTO_FIRST = frozenset({
    aten.index_put.default, aten._unsafe_index_put.default, aten.select_scatter.default,
    aten.slice_scatter.default, aten.diagonal_scatter.default, aten.as_strided_scatter.default,
})  # fmt: skip
"""Operators that Inductor turns into writes into their first argument, if nothing else reads it."""


def expanded_arguments_copied(module: GraphModule, fake_mode: Any) -> None:
    """Copy expanded inputs that such an operator, or control flow, writes into: a write to one element would change
    several."""
    for node in list(module.graph.nodes):
        if node.target in _WRITES_INTO_FIRST:
            operands = [node.args[0]]
        elif isinstance(node.target, torch_api.HigherOrderOperator):
            operands = node.all_input_nodes
        else:
            continue
        for operand in operands:
            value = operand.meta.get("val")
            if isinstance(value, torch.Tensor) and any(
                type(stride) is int and stride == 0 for stride in value.stride()
            ):
                with module.graph.inserting_before(node), fake_mode:
                    clone = call(
                        module.graph, torch.ops.aten.clone.default, operand, memory_format=torch.contiguous_format
                    )
                node.replace_input_with(operand, clone)
    for _, child in module.named_children():
        if isinstance(child, GraphModule):
            expanded_arguments_copied(child, fake_mode)


_INDEXED = {torch.ops.aten.gather.default: 2, torch.ops.aten.embedding.default: 1}
"""Operators that raise for a negative index in eager, and the position of their index argument."""


def refuse_negative_indices(module: GraphModule, fake_mode: Any) -> None:
    """Replace a negative index by a too large one, which the generated code checks: in torch 2.11 and 2.12 it counts
    negative ones from the end."""
    if torch_api.at_least("2.13"):
        return
    aten = torch.ops.aten
    for node in [n for n in module.graph.nodes if n.target in _INDEXED]:
        index = node.args[_INDEXED[node.target]]
        value = index.meta["val"]
        options = {"dtype": value.dtype, "device": value.device}
        with module.graph.inserting_before(node), fake_mode:
            negative = module.graph.call_function(aten.lt.Scalar, (index, 0))
            negative.meta["val"] = aten.lt.Scalar(value, 0)
            large = module.graph.call_function(aten.full.default, ([], torch.iinfo(value.dtype).max), options)
            large.meta["val"] = aten.full.default([], torch.iinfo(value.dtype).max, **options)
            safe_index = module.graph.call_function(aten.where.self, (negative, large, index))
            safe_index.meta["val"] = aten.where.self(negative.meta["val"], large.meta["val"], value)
        node.update_arg(_INDEXED[node.target], safe_index)
    for _, child in module.named_children():
        if isinstance(child, GraphModule):
            refuse_negative_indices(child, fake_mode)
