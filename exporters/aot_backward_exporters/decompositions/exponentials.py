"""Functions of exponentials and logarithms, computed in float64 or without the cancelling term: onnxruntime's float32
kernels are off by several roundings, so results near zero or near a limit have few correct digits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

aten = torch.ops.aten
_LOW = (torch.float32, torch.bfloat16, torch.float16)


def _in_float64(operator: Any) -> Callable[..., Any]:
    def wide(x: torch.Tensor) -> Any:
        return operator(x.to(torch.float64)).to(x.dtype) if x.dtype in _LOW else NotImplemented

    return wide


def _log1p(x: torch.Tensor) -> torch.Tensor:
    """Correct the rounding error of 1 + x (Kahan; HP-15C Advanced Functions Handbook, 1982, "Accuracy of Numerical
    Calculations")."""
    wide = x.to(torch.float64)
    u = 1 + wide
    delta = u - 1
    is_exact = (delta == 0) | torch.isinf(u)
    return torch.where(
        is_exact, torch.where(delta == 0, wide, u), torch.log(u) * (wide / torch.where(is_exact, 1.0, delta))
    ).to(_real(x))


def _expm1(x: torch.Tensor) -> torch.Tensor:
    """Correct the rounding error of exp(x) in the same way."""
    wide = x.to(torch.float64)
    u = torch.exp(wide)
    delta, log = u - 1, torch.log(u)
    is_limit = torch.isinf(u) | (delta == -1)
    is_tiny = delta == 0
    return torch.where(
        is_tiny, wide, torch.where(is_limit, delta, delta * wide / torch.where(is_limit | is_tiny, 1.0, log))
    ).to(_real(x))


def _softplus(x: torch.Tensor, beta: float = 1, threshold: float = 20) -> torch.Tensor:
    scaled = x.to(torch.float64) * beta
    result = torch.log1p(torch.exp(torch.where(scaled > threshold, 0.0, scaled))) / beta
    return torch.where(scaled > threshold, x.to(torch.float64), result).to(x.dtype)


def _real(x: torch.Tensor) -> torch.dtype:
    return x.dtype if x.dtype.is_floating_point else torch.get_default_dtype()


DECOMPOSITIONS: dict[str, Callable[..., Any]] = {
    "aten.sigmoid.default": _in_float64(aten.sigmoid.default),
    "aten.tanh.default": _in_float64(aten.tanh.default),
    "aten.log1p.default": _log1p,
    "aten.expm1.default": _expm1,
    "aten.softplus.default": _softplus,
}
