"""Element-wise operators."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

aten = torch.ops.aten


def _fma(a: Any, b: Any, c: Any) -> torch.Tensor:
    return a * b + c


def _signbit(x: torch.Tensor) -> torch.Tensor:
    return (x < 0) | ((x == 0) & (torch.reciprocal(x) < 0)) if x.dtype.is_floating_point else x < 0


def _where(condition: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> Any:
    """Select between booleans: onnxruntime selects only between numbers."""
    return (condition & a) | (~condition & b) if a.dtype is b.dtype is torch.bool else NotImplemented


def _isinf(x: torch.Tensor) -> torch.Tensor:
    return (x == math.inf) | (x == -math.inf)


def _remainder(a: torch.Tensor, b: Any) -> Any:
    if not a.dtype.is_floating_point:
        return NotImplemented
    remainder = torch.fmod(a, b)
    return torch.where((remainder != 0) & ((remainder < 0) != (b < 0)), remainder + b, remainder)


def _floor_divide(a: torch.Tensor, b: Any) -> torch.Tensor:
    return torch.div(a, b, rounding_mode="floor")


def _hypot(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Avoid squares that overflow."""
    larger, smaller = torch.maximum(a.abs(), b.abs()), torch.minimum(a.abs(), b.abs())
    ratio = smaller / torch.where(larger == 0, 1.0, larger)
    return torch.where(torch.isinf(larger), larger, larger * torch.sqrt(1 + ratio * ratio))


def _scalar_tensor(value: Any, *, dtype: torch.dtype | None = None, device: Any = None) -> torch.Tensor:
    return aten.scalar_tensor.default(value, dtype=dtype)


def _copy(x: torch.Tensor, src: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """Decompose a write into a slice. torchlib returns ``src`` unchanged, without expanding it."""
    return src.to(x.dtype).expand(x.shape)


DECOMPOSITIONS: dict[str, Callable[..., Any]] = {
    "aten.where.self": _where,
    "aten.isinf.default": _isinf,
    "aten.remainder.Tensor": _remainder,
    "aten.remainder.Scalar": _remainder,
    "aten.floor_divide.default": _floor_divide,
    "prims.signbit.default": _signbit,
    "aten.signbit.default": _signbit,
    "prims.hypot.default": _hypot,
    "aten.hypot.default": _hypot,
    "prims.scalar_tensor.default": _scalar_tensor,
    "aten.copy.default": _copy,
    "prims.fma.default": _fma,
}
