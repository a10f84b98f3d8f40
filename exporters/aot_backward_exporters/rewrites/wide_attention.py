"""Attention in bfloat16 and float16, and its gradient, by eager's kernel for float32.

The kernel (``_scaled_dot_product_flash_attention_for_cpu``) multiplies tiles. In 16 bits a call of oneDNN for a tile
takes longer than a small tile, and float16 has instructions on few processors. Its results in float32 are more exact
than eager's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from ..fx_splice import has_hints, hint, replace_results, spliced, with_strides
from .graph_edit import arguments

aten = torch.ops.aten
MAX_KEY_NUMBERS = 8192
"""Maximum numbers in a head's keys in bfloat16. The time of a backward in float32, with conversions, over that in
bfloat16, with one thread and two on Zen 4: 64 keys of 64 numbers 0.29 and 0.43, 128 of 64 0.45 and 0.57, 256 of 32 0.73
and 0.78, 256 of 64 0.89 and 1.04, 192 of 128 1.32 and 1.51. A forward gains nothing. In float16 a backward takes 0.08
to 0.30 with 37 to 2,048 keys, a forward 0.32 to 0.70."""
_FORWARD = aten._scaled_dot_product_flash_attention_for_cpu.default
_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def in_float32(module: GraphModule, fake_mode: Any) -> None:
    """Rewrite the graph of ``module``."""
    for node in list(module.graph.nodes):
        if node.op == "call_function" and node.target in (_FORWARD, _BACKWARD) and _gains(node, arguments(node)):
            with fake_mode:
                _replace(node, arguments(node))


def _gains(node: Node, args: dict[str, Any]) -> bool:
    key = args["key"].meta["val"]
    if (
        key.device.type != "cpu"
        or key.dtype not in (torch.bfloat16, torch.float16)
        or args["dropout_p"]
        or not has_hints(key)
    ):
        return False
    return key.dtype == torch.float16 or (
        node.target is _BACKWARD and hint(key.shape[2] * key.shape[3]) <= MAX_KEY_NUMBERS
    )


def _replace(node: Node, args: dict[str, Any]) -> None:
    names = [name for name, value in args.items() if isinstance(value, Node)]
    outputs = node.meta["val"]

    def called(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        values = {**args, **{name: t.float() for name, t in zip(names, tensors, strict=True)}}
        options = {name: values.pop(name) for name in ("attn_mask", "scale")}
        results = node.target(*values.values(), **options)  # type: ignore[operator]
        return tuple(
            with_strides(result.to(expected.dtype), expected) for result, expected in zip(results, outputs, strict=True)
        )

    operands = [args[name] for name in names]
    replace_results(node, spliced(node, called, operands, {operand: operand.meta["val"] for operand in operands})[0])
