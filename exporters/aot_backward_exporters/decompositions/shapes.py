"""Operators that make, reorder or pad elements, or drop dimensions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

aten = torch.ops.aten


def _iota(length: int, *, start: int, step: int, dtype: torch.dtype, device: Any, requires_grad: bool) -> torch.Tensor:
    steps = aten.arange.start_step(0, length, 1, dtype=dtype, device=device)
    return steps * step + start if (start, step) != (0, 1) else steps


def _rev(x: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
    return aten.flip.default(x, list(dims))


def _squeeze(x: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
    positions = {d % x.dim() for d in dims} if x.dim() else set()
    return aten.view.default(x, [n for d, n in enumerate(x.shape) if d not in positions or n != 1])


def _squeeze_one(x: torch.Tensor, dim: int) -> Any:
    """Skip dimensions other than 1: ONNX's Squeeze accepts only dimensions of 1."""
    if x.dim() == 0 or (isinstance(x.shape[dim], int) and x.shape[dim] != 1):
        return aten.clone.default(x)
    return NotImplemented


def _pad(x: torch.Tensor, pad: Sequence[Any], value: float = 0) -> Any:
    """Pad tensors with dynamic sizes: computing the result's shape would fix the sizes."""
    if all(isinstance(n, int) for n in (*x.shape, *pad)):
        return NotImplemented
    for i in range(len(pad) // 2):
        dim = x.dim() - 1 - i
        before, after = pad[2 * i], pad[2 * i + 1]
        if isinstance(before, int) and before < 0:
            x = aten.slice.Tensor(x, dim, -before)
        if isinstance(after, int) and after < 0:
            x = aten.slice.Tensor(x, dim, 0, x.shape[dim] + after)
        parts = [x]
        for n, at_end in ((before, False), (after, True)):
            if not isinstance(n, int) or n > 0:
                padding = torch.full([*x.shape[:dim], n, *x.shape[dim + 1 :]], value, dtype=x.dtype)
                parts = [*parts, padding] if at_end else [padding, *parts]
        x = aten.cat.default(parts, dim) if len(parts) > 1 else x
    return x


DECOMPOSITIONS: dict[str, Callable[..., Any]] = {
    "aten.squeeze.dim": _squeeze_one,
    "prims.iota.default": _iota,
    "prims.rev.default": _rev,
    "aten.constant_pad_nd.default": _pad,
    "aten.squeeze.dims": _squeeze,
}
