"""Convolutions of one number each, with large weights, at few positions: by oneDNN also on one thread.

On one thread and for fewer than 16 images, PyTorch (2.13) computes a convolution with a kernel of 1 by 1 as one product
an image, which has as many columns as there are positions. MKL is slow for so few. PyTorch leaves dilated convolutions
to oneDNN, and the dilation of one number changes nothing. So these convolutions are marked as dilated. Milliseconds of
the convolution and of its gradients on one thread, for 8 images of 3 by 3:

| channels | products | oneDNN |
|---|---|---|
| 48 to 288 | 0.18, 0.22 | 0.08, 0.15 |
| 120 to 720 | 1.06, 1.41 | 0.22, 0.42 |
| 240 to 1,280 | 3.70, 5.10 | 0.53, 1.19 |
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.fx import GraphModule

from .graph_edit import arguments

aten = torch.ops.aten
_POSITIONS = 16
"""From 16 on, oneDNN took 0.5 to 1.9 of the time of products."""
_WEIGHT = 1 << 14
"""Minimum numbers in the weight. For 32 channels to 32, oneDNN took 2 to 5 times as long as products."""


def by_onednn(module: GraphModule, fake_mode: Any) -> None:
    """Rewrite the graph of ``module``."""
    for target in (aten.convolution.default, aten.convolution_backward.default):
        for node in module.graph.find_nodes(op="call_function", target=target):
            args = arguments(node)
            if _has_few_positions(args):
                position = list(args).index("dilation")
                node.update_arg(position, [2] * (args["weight"].meta["val"].dim() - 2))


def _has_few_positions(args: dict[str, Any]) -> bool:
    x, weight = args["input"].meta["val"], args["weight"].meta["val"]
    sizes, (_, _, *kernel) = x.shape[2:], weight.shape
    if (
        x.device.type != "cpu"
        or x.dtype != torch.float32
        or args["groups"] != 1
        or args["transposed"]
        or x.dim() != weight.dim()
    ):
        return False
    if any(args["padding"]) or any(step != 1 for name in ("stride", "dilation") for step in args[name]):
        return False
    fixed = all(type(size) is int for size in (*sizes, *weight.shape))
    return fixed and math.prod(kernel) == 1 and math.prod(sizes) < _POSITIONS and weight.numel() >= _WEIGHT
