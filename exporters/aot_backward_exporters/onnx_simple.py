"""Decompositions of element-wise operators, views and statistics for which PyTorch has no ONNX translation of its own, into operators that have one."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

aten, prims = torch.ops.aten, torch.ops.prims


def _fma(a: Any, b: Any, c: Any) -> torch.Tensor:
    return a * b + c


def _iota(length: int, *, start: int, step: int, dtype: torch.dtype, device: Any, requires_grad: bool) -> torch.Tensor:
    steps = aten.arange.start_step(0, length, 1, dtype=dtype, device=device)
    return steps * step + start if (start, step) != (0, 1) else steps


def _rev(x: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
    return aten.flip.default(x, list(dims))


def _squeeze(x: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
    places = {d % x.dim() for d in dims} if x.dim() else set()
    return aten.view.default(x, [n for d, n in enumerate(x.shape) if d not in places or n != 1])


def _numel(x: torch.Tensor) -> Any:
    return math.prod(aten.sym_size.int(x, d) for d in range(x.dim()))


def _var_mean(
    x: torch.Tensor, dim: Sequence[int] | None = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    dims = list(range(x.dim())) if dim is None or len(dim) == 0 else [d % x.dim() for d in dim]
    count = math.prod(x.shape[d] for d in dims)
    mean = aten.mean.dim(x, dims, True)
    apart = x - mean
    squares = aten.sum.dim_IntList(apart * apart, dims, keepdim)
    wanted = 1 if correction is None else correction
    rest = torch.sym_max(count - wanted, 0) if isinstance(wanted, int) else max(count - wanted, 0.0)
    return squares / rest, mean if keepdim else aten.squeeze.dims(mean, dims)


def _pad(x: torch.Tensor, pad: Sequence[Any], value: float = 0) -> Any:
    """Of tensors with dynamic sizes alone: what tells the result's shape would fix them."""
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
                filled = torch.full([*x.shape[:dim], n, *x.shape[dim + 1 :]], value, dtype=x.dtype)
                parts = [*parts, filled] if at_end else [filled, *parts]
        x = aten.cat.default(parts, dim) if len(parts) > 1 else x
    return x


DECOMPOSITIONS: dict[str, Callable[..., Any]] = {
    "prims.fma.default": _fma,
    "prims.iota.default": _iota,
    "prims.rev.default": _rev,
    "aten.constant_pad_nd.default": _pad,
    "aten.squeeze.dims": _squeeze,
    "aten.var_mean.correction": _var_mean,
}
