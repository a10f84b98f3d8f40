"""A convolution and its gradients as batched products of matrices: the windows of the input are copied side by side (im2col).

Channels are not grouped, and the convolution is not transposed. Tensors are batch, channels, positions along each axis.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

aten = torch.ops.aten


def windows(x: torch.Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]) -> torch.Tensor:
    """Batch, channels × places in the kernel, places of the kernel: what each of them covers, zeros where it reaches beyond ``x``."""
    batch, channels, *sizes = x.shape
    if any(padding):
        x = aten.constant_pad_nd.default(x, [p for size in reversed(padding) for p in (size, size)])
        x = x if x.is_contiguous() else x.clone(memory_format=torch.contiguous_format)
    else:
        x = x.clone(memory_format=torch.contiguous_format)
    padded = [s + 2 * p for s, p in zip(sizes, padding, strict=True)]
    steps = [1] * len(sizes)
    for d in reversed(range(len(sizes) - 1)):
        steps[d] = steps[d + 1] * padded[d + 1]
    plane = steps[0] * padded[0]
    places = [(p - d * (k - 1) - 1) // s + 1 for p, k, s, d in zip(padded, kernel, stride, dilation, strict=True)]
    inner = [step * d for step, d in zip(steps, dilation, strict=True)]
    outer = [step * s for step, s in zip(steps, stride, strict=True)]
    viewed = x.as_strided([batch, channels, *kernel, *places], [channels * plane, plane, *inner, *outer])
    return viewed.clone(memory_format=torch.contiguous_format).flatten(1, len(kernel) + 1).flatten(2)


def forward(covered: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, places: Sequence[int]) -> torch.Tensor:
    """``covered``: of the input, by :func:`windows`. ``places``: sizes of the result along the axes."""
    batch, out = covered.shape[0], weight.shape[0]
    made = torch.bmm(weight.reshape(1, out, -1).expand(batch, -1, -1), covered).view(batch, out, *places)
    return made if bias is None else made + bias.view(-1, *[1] * len(places))


def of_weight(grad: torch.Tensor, covered: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The gradient of ``weight``. ``covered``: of the input. ``weight`` is read, as a package says of a backward and eager's check of versions counts
    it, but no number depends on it."""
    made = torch.bmm(grad.flatten(2), covered.transpose(1, 2)).sum(0).view(weight.shape)
    return torch.where(weight == weight, made, made)


def of_input(grad: torch.Tensor, weight: torch.Tensor, padding: Sequence[int], dilation: Sequence[int]) -> torch.Tensor:
    """The gradient of the input, of a convolution whose stride is 1: the incoming gradient convolved with the flipped weights."""
    _, channels, *kernel = weight.shape
    axes = range(2, 2 + len(kernel))
    around = [d * (k - 1) - p for k, p, d in zip(kernel, padding, dilation, strict=True)]
    covered = windows(grad, kernel, [1] * len(kernel), around, dilation)
    places = [g + 2 * a - d * (k - 1) for g, a, k, d in zip(grad.shape[2:], around, kernel, dilation, strict=True)]
    flipped = weight.flip(list(axes)).transpose(0, 1).reshape(1, channels, -1)
    return torch.bmm(flipped.expand(grad.shape[0], -1, -1), covered).view(grad.shape[0], channels, *places)
