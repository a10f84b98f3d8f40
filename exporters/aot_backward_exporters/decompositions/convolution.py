"""The gradients of a convolution, as convolutions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

aten = torch.ops.aten


def _backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias_sizes: Any,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    output_mask: Sequence[bool],
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    n = x.dim() - 2
    stride, padding, dilation = (list(v) * n if len(v) == 1 else list(v) for v in (stride, padding, dilation))
    grad_input = grad_weight = grad_bias = None
    if output_mask[0]:
        if transposed:
            grad_input = aten.convolution.default(grad, weight, None, stride, padding, dilation, False, [0] * n, groups)
        else:
            grad_input = _of_input(grad, weight, list(x.shape[2:]), stride, padding, dilation, groups)
    if output_mask[1]:
        kernel = list(weight.shape[2:])
        grad_weight = _of_weight(
            x, grad, *((grad, x) if transposed else (x, grad)), kernel, stride, padding, dilation, groups
        )
    if output_mask[2]:
        grad_bias = aten.sum.dim_IntList(grad, [0, *range(2, grad.dim())])
    return grad_input, grad_weight, grad_bias


def _of_input(
    grad: torch.Tensor,
    weight: torch.Tensor,
    sizes: list[Any],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
) -> torch.Tensor:
    """Return the input's gradient. A transposed convolution without padding covers the padded input up to the last
    window; the rest gets zeros."""
    n = len(sizes)
    out = aten.convolution.default(grad, weight, None, stride, [0] * n, dilation, True, [0] * n, groups)
    for d in range(n):
        missing = sizes[d] + padding[d] - out.shape[2 + d]
        if isinstance(missing, int):
            if missing > 0:
                out = aten.constant_pad_nd.default(out, [0, 0] * (n - 1 - d) + [0, missing])
        else:
            # The maximum that a stride leaves
            out = aten.constant_pad_nd.default(out, [0, 0] * (n - 1 - d) + [0, stride[d] - 1])
        out = aten.slice.Tensor(out, 2 + d, padding[d], padding[d] + sizes[d])
    return out


def _of_weight(
    x: torch.Tensor,
    grad: torch.Tensor,
    larger: torch.Tensor,
    smaller: torch.Tensor,
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
) -> torch.Tensor:
    """Convolve ``larger`` with ``smaller``: channels are the batch, the batch is summed over, stride and dilation are
    swapped.

    In a plain convolution ``larger`` is its input and ``smaller`` the incoming gradient; in a transposed one the other
    way round.
    """
    n, batch, channels = len(kernel), larger.shape[0], larger.shape[1] // groups
    data = aten.view.default(larger, [batch, groups, channels, *larger.shape[2:]])
    data = aten.permute.default(data, [2, 1, 0, *range(3, 3 + n)])
    data = aten.reshape.default(data, [channels, groups * batch, *larger.shape[2:]])
    filters = aten.permute.default(smaller, [1, 0, *range(2, 2 + n)])
    out = aten.convolution.default(data, filters, None, dilation, padding, stride, False, [0] * n, groups)
    for d in range(n):
        out = aten.slice.Tensor(out, 2 + d, 0, kernel[d])  # drops windows that reached beyond the last one
    return aten.permute.default(out, [1, 0, *range(2, 2 + n)])


DECOMPOSITIONS: dict[str, Callable[..., Any]] = {"aten.convolution_backward.default": _backward}
