"""A convolution and its gradients as matrix products: the numbers under the kernel at each position are copied side by
side (im2col).

Channels are not grouped, and the convolution is not transposed. Tensors are batch, channels, positions along each axis.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

aten = torch.ops.aten
_RUN = 16
"""Minimum length of a contiguous run in a row of windows for using rows: the weight gradient is then one product,
instead of one for each image and their sum. For 512 images of 8 channels and 4 by 4, 523 µs by rows and 2,257 without;
for one channel and 8 by 8, 506 and 390."""


class Shape(NamedTuple):
    """Parameters of a convolution, along each axis."""

    kernel: Sequence[int]
    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]

    def places(self, sizes: Sequence[int]) -> list[int]:
        """Return how many positions the kernel has in an input of these sizes."""
        return [(size + 2 * p - d * (k - 1) - 1) // s + 1 for size, k, s, p, d in zip(sizes, *self, strict=True)]


def forward(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, shape: Shape) -> torch.Tensor:
    batch, out, places = x.shape[0], weight.shape[0], shape.places(x.shape[2:])
    rows, windows = weight.reshape(out, -1), _windows(x, shape)
    if math.prod(places) == 1:
        result = torch.mm(windows.flatten(1), rows.t())
    else:
        result = torch.bmm(_two(rows, 0).expand(batch, -1, -1), windows)[:, :out]
    result = result.reshape(batch, out, *places)
    return result if bias is None else result + bias.view(-1, *[1] * len(places))


def of_weight(grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, shape: Shape) -> torch.Tensor:
    """Return the gradient of ``weight``. It reads ``weight``, as the package declares for a backward and eager's
    version check counts, but no number depends on it."""
    out, channels, *kernel = weight.shape
    if kernel[-1] * channels >= _RUN:
        rows = grad.permute(0, *range(2, grad.dim()), 1).reshape(-1, out)
        gradient = (
            torch.mm(_rows_of_windows(x, shape).t(), rows)
            .view(*kernel, channels, out)
            .permute(-1, -2, *range(len(kernel)))
        )
    else:
        gradient = (
            torch.bmm(_two(grad.flatten(2), 1), _windows(x, shape).transpose(1, 2))[:, :out].sum(0).view(weight.shape)
        )
    return torch.where(weight == weight, gradient, gradient)


def of_input(grad: torch.Tensor, weight: torch.Tensor, shape: Shape) -> torch.Tensor:
    """Return the gradient of the input, for stride 1: the incoming gradient convolved with the flipped weights."""
    padding = [d * (k - 1) - p for k, _, p, d in zip(*shape, strict=True)]
    flipped_weight = weight.flip(list(range(2, weight.dim()))).transpose(0, 1)
    return forward(grad, flipped_weight, None, shape._replace(padding=padding))


def _two(rows: torch.Tensor, axis: int) -> torch.Tensor:
    """Return ``rows``, duplicated if there is only one: Inductor would lower a batched product by one row to a loop
    instead of a library call. The loop adds one number at a time, and computes each address by divisions (8 times as
    long, from 16 channels of 28 by 28 to one)."""
    return torch.cat([rows, rows], axis) if rows.shape[axis] == 1 else rows


def _windows(x: torch.Tensor, shape: Shape) -> torch.Tensor:
    """Return batch, channels × numbers of the kernel, positions: the numbers under the kernel, zeros outside ``x``."""
    batch, channels, *sizes = x.shape
    padded_sizes, inner, outer = _steps(sizes, shape, 1)
    plane = math.prod(padded_sizes)
    view = _with_zeros(x, shape.padding).as_strided(
        [batch, channels, *shape.kernel, *shape.places(sizes)], [channels * plane, plane, *inner, *outer]
    )
    return view.clone(memory_format=torch.contiguous_format).flatten(1, len(sizes) + 1).flatten(2)


def _rows_of_windows(x: torch.Tensor, shape: Shape) -> torch.Tensor:
    """Return the same as batch × positions, numbers of the kernel × channels."""
    batch, channels, *sizes = x.shape
    padded_sizes, inner, outer = _steps(sizes, shape, channels)
    images = _with_zeros(x.permute(0, *range(2, x.dim()), 1), [*shape.padding, 0])
    view = images.as_strided(
        [batch, *shape.places(sizes), *shape.kernel, channels], [channels * math.prod(padded_sizes), *outer, *inner, 1]
    )
    return view.clone(memory_format=torch.contiguous_format).flatten(0, len(sizes)).flatten(1)


def _steps(sizes: Sequence[int], shape: Shape, unit: int) -> tuple[list[int], list[int], list[int]]:
    """Return the sizes of the padded input, and the memory strides between numbers of the kernel and between its
    positions, along each axis. ``unit``: the stride of the last axis."""
    padded_sizes = [size + 2 * p for size, p in zip(sizes, shape.padding, strict=True)]
    strides = [unit * math.prod(padded_sizes[d + 1 :]) for d in range(len(padded_sizes))]
    return (
        padded_sizes,
        [t * d for t, d in zip(strides, shape.dilation, strict=True)],
        [t * s for t, s in zip(strides, shape.stride, strict=True)],
    )


def _with_zeros(x: torch.Tensor, padding: Sequence[int]) -> torch.Tensor:
    """Return ``x`` in new memory, with zeros around its last axes."""
    if any(padding):
        x = aten.constant_pad_nd.default(x, [size for p in reversed(padding) for size in (p, p)])
    return x.clone(memory_format=torch.contiguous_format)
