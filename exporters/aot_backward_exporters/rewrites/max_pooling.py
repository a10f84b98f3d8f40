"""Maximum pooling of images in compiled code, with the channels last, instead of eager's kernel.

The kernel takes 25 ns for each window of 2 by 2: it reads one number after the other, and each comparison is a branch
that is hard to predict. With the channels last a whole vector is compared at once, in 6 ns a window including the
reordering. The gradient stays with the kernel, which computes it fast.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from .. import torch_api
from ..fx_splice import has_hints, replace_results, spliced, with_strides
from .graph_edit import arguments

aten = torch.ops.aten
CHANNELS = 4
"""Minimum channels: fewer leave most of a vector empty. 32 images of 8 by 8: 0.61 of the kernel's time with 4 channels,
0.23 with 5."""
WINDOW = 16
"""Maximum numbers in a window: each is a separate load and comparison in the code. One image of 128 channels and 20 by
20, stride 1: 0.96 of the kernel's time with 16, 1.22 with 25."""
_POOL = aten.max_pool2d_with_indices.default


def by_channels(module: GraphModule, fake_mode: Any) -> None:
    """Rewrite the graph of ``module``."""
    for node in module.graph.find_nodes(op="call_function", target=_POOL):
        args = _arguments(node)
        if _is_served(args):
            with fake_mode:
                _replace(node, args)


def _arguments(node: Node) -> dict[str, Any]:
    args = arguments(node)
    args["stride"] = args["stride"] or args["kernel_size"]
    return {**args, **{n: list(args[n]) * (3 - len(args[n])) for n in ("kernel_size", "stride", "padding", "dilation")}}


def _is_served(args: dict[str, Any]) -> bool:
    x = args["self"].meta["val"]
    if (
        x.device.type != "cpu"
        or x.dtype != torch.float32
        or not all(type(size) is int and size > 0 for size in x.shape[-3:])
    ):
        return False
    channels, height, width = x.shape[-3:]
    is_small = math.prod(args["kernel_size"]) <= WINDOW and channels >= CHANNELS and height * width < 2**31
    return bool(is_small and has_hints(x) and torch_api.is_contiguous_or_false(x))


def _replace(node: Node, args: dict[str, Any]) -> None:
    outputs = node.meta["val"]

    def called(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        images = x if x.dim() == 4 else x.unsqueeze(0)
        pooled_values = pooled(
            images, args["kernel_size"], args["stride"], args["padding"], args["dilation"], outputs[0].shape[-2:]
        )
        return tuple(
            with_strides(result.view(expected.shape), expected)
            for result, expected in zip(pooled_values, outputs, strict=True)
        )

    results, _ = spliced(node, called, [args["self"]], {args["self"]: args["self"].meta["val"]})
    replace_results(node, results)


def pooled(
    x: torch.Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    places: Sequence[int],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the largest number of each window of ``x``, batch by channels by height by width, and its index in its
    image. Ties follow eager: the first of equal ones, the last NaN, and the window's first if all are minus infinity.
    ``places``: height and width of the results."""
    batch, channels, *sizes = x.shape
    # Ends of the last windows
    ends = [(n - 1) * s + d * (k - 1) + 1 for n, s, d, k in zip(places, stride, dilation, kernel, strict=True)]
    # Padding that they reach into
    end_padding = [max(0, end - size - p) for end, size, p in zip(ends, sizes, padding, strict=True)]
    images = x.permute(0, 2, 3, 1)
    if any(padding) or any(end_padding):
        images = aten.constant_pad_nd.default(
            images, [0, 0, padding[1], end_padding[1], padding[0], end_padding[0]], -math.inf
        )
    images = images.clone(memory_format=torch.contiguous_format)
    rows = (sizes[1] + padding[1] + end_padding[1]) * channels
    strides = [rows * (sizes[0] + padding[0] + end_padding[0]), stride[0] * rows, stride[1] * channels, 1]
    corners = [
        torch.arange(n, dtype=torch.int32, device=x.device) * s - p
        for n, s, p in zip(places, stride, padding, strict=True)
    ]
    top, left = corners[0].view(-1, 1, 1), corners[1].view(-1, 1)
    # The first that lies in the image
    first = [torch.where(t < 0, t.remainder(d), t) for t, d in zip((top, left), dilation, strict=True)]
    best = images.as_strided([batch, *places, channels], strides, 0)
    best_index = (first[0] * sizes[1] + first[1]).expand(best.shape)
    for i in range(kernel[0]):
        for j in range(kernel[1]):
            if i or j:
                index = (top + i * dilation[0]) * sizes[1] + left + j * dilation[1]
                value = images.as_strided(
                    [batch, *places, channels], strides, i * dilation[0] * rows + j * dilation[1] * channels
                )
                mask = (value > best) | (value != value)
                best, best_index = torch.where(mask, value, best), torch.where(mask, index, best_index)
    return _realized(best).permute(0, 3, 1, 2), _realized(best_index).permute(0, 3, 1, 2).to(torch.int64)


def _realized(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` in new memory, which Inductor allocates for inputs of ``as_strided``: later operators, in
    another order, are another loop."""
    tensor = tensor.clone(memory_format=torch.contiguous_format)
    return tensor.as_strided(tensor.shape, tensor.stride())
