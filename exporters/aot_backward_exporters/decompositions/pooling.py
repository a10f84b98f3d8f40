"""The gradients of pooling: scattered to the position of the maximum, or spread over the window."""

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
        """Scatter the gradient. ``indices`` count within one image."""
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
            raise ExportError.of(
                operator, f"{operator} of images of dynamic size has no ONNX translation: make height and width static"
            )
        shares = grad / _divisors(sizes, windows, kernel, steps, pad, count_include_pad, divisor_override, grad)
        planes = shares.reshape([-1, 1, *windows])
        ones = torch.ones([1, 1, *kernel], dtype=grad.dtype, device=grad.device)
        no_padding = [0] * spatial
        out = aten.convolution.default(planes, ones, None, steps, no_padding, [1] * spatial, True, no_padding, 1)
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
    sizes: list[int],
    windows: list[int],
    kernel: list[int],
    steps: list[int],
    pad: list[int],
    include: bool,
    override: int | None,
    like: torch.Tensor,
) -> Any:
    """Return how many elements each window counts: with ``include`` also elements of the padding, otherwise only the
    input's."""
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
        divisors = (
            aten.cat.default([torch.full([1], c, dtype=like.dtype) for c in counts])
            if len(set(counts)) > 1
            else torch.full([1], counts[0])
        )
        out = out * divisors.to(like.dtype).expand([count]).reshape(shape)
    return out


def _average(spatial: int, operator: str, *, everywhere: bool = False) -> Callable[..., Any]:
    """Decompose average pooling. Without ``everywhere``, return NotImplemented for calls that torchlib translates
    correctly: no ``ceil_mode``, no ``divisor_override``, and either ``count_include_pad`` or no padding."""

    def forward(
        x: torch.Tensor,
        kernel_size: Sequence[int],
        stride: Sequence[int] = (),
        padding: Sequence[int] = (0,),
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> Any:
        kernel, pad = _each(kernel_size, spatial), _each(padding, spatial)
        steps = _each(stride, spatial) if len(stride) else kernel
        if not everywhere and not ceil_mode and divisor_override is None and (count_include_pad or not any(pad)):
            return NotImplemented
        sizes = list(x.shape[x.dim() - spatial :])
        if not all(isinstance(n, int) for n in sizes):
            raise ExportError.of(
                operator,
                f"{operator} of images of dynamic size has no ONNX translation as it is called here: make height and width static",
            )
        counts = [windows(n, k, s, p, ceil_mode) for n, k, s, p in zip(sizes, kernel, steps, pad, strict=True)]
        end_pads = [
            max((w - 1) * s + k - n - p, 0) for w, s, k, n, p in zip(counts, steps, kernel, sizes, pad, strict=True)
        ]
        planes = x.reshape([-1, 1, *sizes])
        widths = [n for p, b in zip(reversed(pad), reversed(end_pads), strict=True) for n in (p, b)]
        planes = aten.constant_pad_nd.default(planes, widths)
        ones, no_padding = torch.ones([1, 1, *kernel], dtype=x.dtype), [0] * spatial
        sums = aten.convolution.default(planes, ones, None, steps, no_padding, [1] * spatial, False, no_padding, 1)
        for d, w in enumerate(counts):
            sums = aten.slice.Tensor(sums, 2 + d, 0, w)
        sums = sums.reshape([*x.shape[: x.dim() - spatial], *counts])
        return sums / _divisors(sizes, counts, kernel, steps, pad, count_include_pad, divisor_override, x)

    return forward


def windows(size: int, kernel: int, step: int, pad: int, ceil_mode: bool) -> int:
    """Count windows as eager does: the last one must begin within the input or the padding before it."""
    slack = size + 2 * pad - kernel
    count = (-(-slack // step) if ceil_mode else slack // step) + 1
    return count - 1 if ceil_mode and (count - 1) * step >= size + pad else count


def _adaptive_average(spatial: int) -> Callable[..., Any]:
    """Multiply by a constant matrix, dimension by dimension: each window's mean is the mean of means."""

    def forward(x: torch.Tensor, output_size: Sequence[int]) -> torch.Tensor:
        for d, size in enumerate(output_size):
            x = _along(x, x.dim() - spatial + d, _windows_of(x.shape[x.dim() - spatial + d], size, x.dtype))
        return x

    return forward


def _adaptive_average_backward(spatial: int) -> Callable[..., Any]:
    def backward(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        for d in range(x.dim() - spatial, x.dim()):
            grad = _along(grad, d, _windows_of(x.shape[d], grad.shape[d], grad.dtype).transpose(0, 1))
        return grad

    return backward


def _along(x: torch.Tensor, dim: int, matrix: torch.Tensor) -> torch.Tensor:
    """Return ``x`` with the elements along ``dim`` multiplied by ``matrix`` (old, new)."""
    last = x.dim() - 1
    order = [*(d for d in range(x.dim()) if d != dim), dim]
    out = torch.matmul(x.permute(order), matrix)
    inverse_order = [order.index(d) for d in range(last + 1)]
    return out.permute(inverse_order)


def _windows_of(size: Any, output_size: Any, dtype: torch.dtype) -> torch.Tensor:
    """Return (size, output_size): the share of each element in each window of adaptive pooling."""
    index = torch.arange(output_size, dtype=torch.float64)
    position = torch.arange(size, dtype=torch.float64).unsqueeze(1)
    start, end = torch.floor(index * size / output_size), torch.ceil((index + 1) * size / output_size)
    return ((position >= start) & (position < end)).to(dtype) / (end - start).to(dtype)


def _padded_backward(spatial: int) -> Callable[..., Any]:
    """Return the gradient of replication padding: the gradients of copies are added up."""

    def backward(grad: torch.Tensor, x: torch.Tensor, padding: Sequence[int]) -> torch.Tensor:
        for i in range(spatial):
            d = x.dim() - 1 - i
            size, padded_size = x.shape[d], grad.shape[d]
            if not (isinstance(size, int) and isinstance(padded_size, int)):
                raise ExportError(
                    "the gradient of replication padding of a dynamic size has no ONNX translation: make that dimension static"
                )
            source = (torch.arange(padded_size) - padding[2 * i]).clamp(0, size - 1)
            copies = (source.unsqueeze(1) == torch.arange(size).unsqueeze(0)).to(grad.dtype)
            grad = _along(grad, d, copies)
        return grad

    return backward


def _adaptive_maximum(spatial: int, operator: str) -> Callable[..., Any]:
    """Pool with windows of one size, without gaps or overlap."""
    pool = {2: aten.max_pool2d_with_indices.default, 3: aten.max_pool3d_with_indices.default}[spatial]

    def forward(x: torch.Tensor, output_size: Sequence[int]) -> Any:
        sizes = x.shape[x.dim() - spatial :]
        if not all(isinstance(n, int) for n in sizes) or any(n % w for n, w in zip(sizes, output_size, strict=True)):
            raise ExportError.of(
                operator,
                f"{operator} with windows of several sizes has no ONNX translation: let output sizes divide input sizes",
            )
        kernel = [n // w for n, w in zip(sizes, output_size, strict=True)]
        return pool(x, kernel, kernel)

    return forward


def _adaptive_maximum_backward(spatial: int) -> Callable[..., Any]:
    def backward(grad: torch.Tensor, x: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        return _max_backward(spatial)(grad, x, None, None, None, None, False, indices)

    return backward


DECOMPOSITIONS: dict[str, Callable[..., Any]] = {
    "aten.max_pool2d_with_indices_backward.default": _max_backward(2),
    "aten.max_pool3d_with_indices_backward.default": _max_backward(3),
    "aten.avg_pool2d_backward.default": _average_backward(2, "aten.avg_pool2d_backward.default"),
    "aten.avg_pool3d_backward.default": _average_backward(3, "aten.avg_pool3d_backward.default"),
    "aten.avg_pool2d.default": _average(2, "aten.avg_pool2d.default"),
    "aten.avg_pool3d.default": _average(3, "aten.avg_pool3d.default"),
    "aten._adaptive_avg_pool2d.default": _adaptive_average(2),
    "aten._adaptive_avg_pool3d.default": _adaptive_average(3),
    "aten._adaptive_avg_pool2d_backward.default": _adaptive_average_backward(2),
    "aten._adaptive_avg_pool3d_backward.default": _adaptive_average_backward(3),
    "aten.adaptive_max_pool2d.default": _adaptive_maximum(2, "aten.adaptive_max_pool2d.default"),
    "aten.adaptive_max_pool3d.default": _adaptive_maximum(3, "aten.adaptive_max_pool3d.default"),
    "aten.adaptive_max_pool2d_backward.default": _adaptive_maximum_backward(2),
    "aten.adaptive_max_pool3d_backward.default": _adaptive_maximum_backward(3),
    "aten.replication_pad1d_backward.default": _padded_backward(1),
    "aten.replication_pad2d_backward.default": _padded_backward(2),
    "aten.replication_pad3d_backward.default": _padded_backward(3),
}

WITHOUT_TORCHLIB: dict[str, Callable[..., Any]] = {
    "aten.avg_pool2d.default": _average(2, "aten.avg_pool2d.default", everywhere=True),
    "aten.avg_pool3d.default": _average(3, "aten.avg_pool3d.default", everywhere=True),
}
"""For targets without PyTorch's own translations."""
