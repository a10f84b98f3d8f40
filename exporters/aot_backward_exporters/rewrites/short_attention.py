"""Attention between few positions, and its gradient, as batched products and a softmax instead of eager's kernel.

The kernel (``_scaled_dot_product_flash_attention_for_cpu``) processes batch and heads one by one, with several products
for each. For 12 by 8 numbers these take longer to call than to compute. The kernel is made for long sequences: their
scores would not fit into the caches.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from .. import torch_api
from ..decompositions import attention
from ..fx_splice import replace_results, spliced, with_strides
from .graph_edit import arguments

aten = torch.ops.aten
LENGTH = 32
"""Maximum positions of queries, and of keys. 16 rows of 4 heads with 16 numbers each, forward and backward in one
graph, time by products over time by the kernel: 0.44 with 8 positions, 0.67 with 16, 0.58 with 24, 0.71 with 32, 1.10
with 64 (products with AVX2, the kernel with AVX-512)."""
VECTOR = 16
"""A forward alone gains if the kernel's softmax does not fill whole vectors: 0.53 with 8 positions, 0.64 with 24, but
0.90 with 16, 1.16 with 32."""
_MAX_KEY_NUMBERS = 256
"""Maximum numbers in a head's keys if forward and backward are separate graphs: the backward computes the softmax
again. Module's backwards took 0.82 with 96 numbers, 0.85 with 128, 1.01 with 256, 1.06 with 384."""
_FORWARD = aten._scaled_dot_product_flash_attention_for_cpu.default
_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
_FACTORS = ("grad_out", "query", "key", "value")
"""Operands of several batched products. Each product would copy a non-contiguous one."""


def by_products(module: GraphModule, fake_mode: Any) -> None:
    """Rewrite the graph of ``module``."""
    weights: dict[Node, Node] = {}
    for node in list(module.graph.nodes):
        if node.op == "call_function" and node.target in (_FORWARD, _BACKWARD):
            args = arguments(node)
            if _is_short(args) and (
                _has_backward(node, args) or args.get("logsumexp") in weights or _pays_alone(node, args)
            ):
                with fake_mode:
                    _replace(node, args, weights)


def _is_short(args: dict[str, Any]) -> bool:
    """Return whether queries, keys and values are short float32 tensors with equal batch and heads. A scale that is not
    positive stays with the kernel, which applies it after the causal mask; this gives NaN."""
    is_true = torch_api.statically_known_true
    query, key = (args[name].meta["val"] for name in ("query", "key"))
    scale, depth = args["scale"], query.shape[3]
    if query.device.type != "cpu" or query.dtype != torch.float32 or args["dropout_p"]:
        return False
    if type(depth) is not int or depth == 0 or (scale is not None and (type(scale) is not float or scale <= 0)):
        return False  # the root of a dynamic depth would be its example's
    if not all(is_true(a == b) for a, b in zip(query.shape[:2], key.shape[:2], strict=True)):
        return False
    return bool(is_true(query.shape[2] <= LENGTH) and is_true(key.shape[2] <= LENGTH))


def _has_backward(node: Node, args: dict[str, Any]) -> bool:
    """Return whether the graph also has the forward's gradient, which can reuse the forward's softmax. With a mask it
    cannot: in a row with nothing but the least float32, as for masked padding, the logarithm of the sum is rounded, and
    the kernel's gradients correspond to weights that are all 1."""
    return (
        node.target is _FORWARD
        and args["attn_mask"] is None
        and any(user.target is _BACKWARD for result in node.users for user in result.users)
    )


def _pays_alone(node: Node, args: dict[str, Any]) -> bool:
    length, depth = args["key"].meta["val"].shape[2:]
    is_small = torch_api.statically_known_true(length * depth < _MAX_KEY_NUMBERS)
    return bool(is_small or (node.target is _FORWARD and type(length) is int and length % VECTOR != 0))


def _replace(node: Node, args: dict[str, Any], weights: dict[Node, Node]) -> None:
    """Replace ``node``. ``weights``: the softmax of each forward in the graph, by its ``logsumexp``, for its
    backward."""
    function: Any = attention.with_weights if node.target is _FORWARD else attention.backward
    if node.target is _BACKWARD:
        args = {**args, "weights": weights.get(args["logsumexp"])}
    names = [name for name, value in args.items() if isinstance(value, Node)]
    outputs = node.meta["val"]

    def called(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        values = {
            **args,
            **{name: _contiguous(t) if name in _FACTORS else t for name, t in zip(names, tensors, strict=True)},
        }
        options = {name: values.pop(name) for name in ("attn_mask", "scale", "weights") if name in values}
        outs = function(*values.values(), **options)
        return (
            *(with_strides(result, expected) for result, expected in zip(outs, outputs, strict=False)),
            *outs[len(outputs) :],
        )

    operands = [args[name] for name in names]
    results, _ = spliced(node, called, operands, {operand: operand.meta["val"] for operand in operands})
    if node.target is _FORWARD and args["attn_mask"] is None:
        weights[results[1]] = results[2]
    replace_results(node, results)


def _contiguous(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if torch_api.is_contiguous_or_false(tensor) else tensor.clone(memory_format=torch.contiguous_format)
