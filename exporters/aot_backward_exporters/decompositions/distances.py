"""Distances between the rows of two matrices, and their gradient."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch


def _differences(x1: torch.Tensor, x2: torch.Tensor) -> torch.Tensor:
    """Return (..., rows of x1, rows of x2, columns)."""
    return x1.unsqueeze(-2) - x2.unsqueeze(-3)


def _cdist(x1: torch.Tensor, x2: torch.Tensor, p: float, compute_mode: int | None) -> torch.Tensor:
    absolute = _differences(x1, x2).abs()
    if p == 0:
        return (absolute != 0).to(x1.dtype).sum(-1)
    if p == 1:
        return absolute.sum(-1)
    if p == 2:
        return (absolute * absolute).sum(-1).sqrt()
    if math.isinf(p):
        return absolute.amax(-1)
    return absolute.pow(p).sum(-1).pow(1 / p)


def _cdist_backward(
    grad: torch.Tensor, x1: torch.Tensor, x2: torch.Tensor, p: float, cdist: torch.Tensor
) -> torch.Tensor:
    """Return the gradient with respect to x1. For equal rows it is 0, as in eager."""
    if p == 0:
        return torch.zeros_like(x1)
    difference, distance, grad = _differences(x1, x2), cdist.unsqueeze(-1), grad.unsqueeze(-1)
    unequal = distance != 0
    if p == 1:
        out = grad * difference.sign()
    elif p == 2:
        out = torch.where(unequal, grad * difference / distance, 0.0)
    elif math.isinf(p):
        out = grad * difference.sign() * (difference.abs() == distance).to(grad.dtype)
    elif p > 2:
        out = torch.where(unequal, difference * difference.abs().pow(p - 2) * grad / distance.pow(p - 1), 0.0)
    else:
        mask = unequal if p > 1 else unequal & (difference != 0)
        out = torch.where(mask, difference.sign() * difference.abs().pow(p - 1) * grad / distance.pow(p - 1), 0.0)
    return out.sum(-2)


DECOMPOSITIONS: dict[str, Callable[..., Any]] = {
    "aten._cdist_forward.default": _cdist,
    "aten._cdist_backward.default": _cdist_backward,
}
