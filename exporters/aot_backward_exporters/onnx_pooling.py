"""The gradients of pooling: scattered to where the maximum was, or spread over the window."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from aot_backward_runtime.errors import ExportError

aten = torch.ops.aten


def _max_backward(spatial: int) -> Callable[..., torch.Tensor]:
    def backward(
        grad: torch.Tensor,
        x: torch.Tensor,
        kernel_size: Any,
        stride: Any,
        padding: Any,
        dilation: Any,
        ceil_mode: bool,
        indices: torch.Tensor,
    ) -> torch.Tensor:
        """``indices`` count within one image."""
        leading, image = list(x.shape[: x.dim() - spatial]), math.prod(x.shape[x.dim() - spatial :])
        windows = math.prod(grad.shape[grad.dim() - spatial :])
        zeros = torch.zeros([*leading, image], dtype=grad.dtype, device=grad.device)
        flat = zeros.scatter_add(-1, indices.reshape([*leading, windows]), grad.reshape([*leading, windows]))
        return flat.reshape(x.shape)

    return backward


def _average_backward(spatial: int, operator: str) -> Callable[..., torch.Tensor]:
    def backward(
        grad: torch.Tensor,
        x: torch.Tensor,
        kernel_size: Sequence[int],
        stride: Sequence[int],
        padding: Sequence[int],
        ceil_mode: bool,
        count_include_pad: bool,
        divisor_override: int | None,
    ) -> torch.Tensor:
        kernel, pad = _each(kernel_size, spatial), _each(padding, spatial)
        steps = _each(stride, spatial) if len(stride) else kernel
        sizes, windows = list(x.shape[x.dim() - spatial :]), list(grad.shape[grad.dim() - spatial :])
        if not all(isinstance(n, int) for n in (*sizes, *windows)):
            raise ExportError.of(operator, f"{operator} of images of dynamic size has no ONNX translation: make height and width static")
        shares = grad / _divisors(sizes, windows, kernel, steps, pad, count_include_pad, divisor_override, grad)
        planes = shares.reshape([-1, 1, *windows])
        ones = torch.ones([1, 1, *kernel], dtype=grad.dtype, device=grad.device)
        none = [0] * spatial
        out = aten.convolution.default(planes, ones, None, steps, none, [1] * spatial, True, none, 1)
        for d in range(spatial):
            missing = sizes[d] + pad[d] - int(out.shape[2 + d])
            if missing > 0:
                out = aten.constant_pad_nd.default(out, [0, 0] * (spatial - 1 - d) + [0, missing])
            out = aten.slice.Tensor(out, 2 + d, pad[d], pad[d] + sizes[d])
        return out.reshape(x.shape)

    return backward


def _each(value: Sequence[int], spatial: int) -> list[int]:
    return list(value) * spatial if len(value) == 1 else list(value)


def _divisors(
    sizes: list[int], windows: list[int], kernel: list[int], steps: list[int], pad: list[int], include: bool, override: int | None, like: torch.Tensor
) -> Any:
    """How many elements each window counts: with ``include`` those of the padded input, else those of the input itself."""
    if override is not None:
        return override
    out: Any = 1.0
    for d, (size, count) in enumerate(zip(sizes, windows, strict=True)):
        counts = []
        for i in range(count):
            start = i * steps[d] - pad[d]
            end = min(start + kernel[d], size + pad[d])
            counts.append(float(end - start if include else min(end, size) - max(start, 0)))
        shape = [1] * len(sizes)
        shape[d] = count
        one = aten.cat.default([torch.full([1], c, dtype=like.dtype) for c in counts]) if len(set(counts)) > 1 else torch.full([1], counts[0])
        out = out * one.to(like.dtype).expand([count]).reshape(shape)
    return out


DECOMPOSITIONS: dict[str, Callable[..., Any]] = {
    "aten.max_pool2d_with_indices_backward.default": _max_backward(2),
    "aten.max_pool3d_with_indices_backward.default": _max_backward(3),
    "aten.avg_pool2d_backward.default": _average_backward(2, "aten.avg_pool2d_backward.default"),
    "aten.avg_pool3d_backward.default": _average_backward(3, "aten.avg_pool3d_backward.default"),
}
