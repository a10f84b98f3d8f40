"""Operators of single layers: weight normalisation, the bilinear form."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

aten = torch.ops.aten


def _weight_norm(v: torch.Tensor, g: torch.Tensor, dim: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    norms = _norms(v, dim)
    return v * (g / norms), norms


def _norms(v: torch.Tensor, dim: int) -> torch.Tensor:
    return torch.sqrt(aten.sum.dim_IntList(v * v, _others(v, dim), True))


def _others(v: torch.Tensor, dim: int) -> list[int]:
    return [d for d in range(v.dim()) if d != dim % v.dim()]


def _weight_norm_backward(
    grad: torch.Tensor, v: torch.Tensor, g: torch.Tensor, norms: torch.Tensor, dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients for w = g · v / ‖v‖: g gets the part of the gradient along v / ‖v‖, v the rest of it, times
    g / ‖v‖."""
    grad_g = aten.sum.dim_IntList(grad * v, _others(v, dim), True) / norms
    return (g / norms) * (grad - grad_g * (v / norms)), grad_g


def _trilinear(
    a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, expand1: Sequence[int], expand2: Sequence[int], expand3: Sequence[int],
    sumdim: Sequence[int], unroll_dim: int = 1,
) -> torch.Tensor:  # fmt: skip
    factors = []
    for x, dims in ((a, expand1), (b, expand2), (c, expand3)):
        for d in dims:
            x = x.unsqueeze(d)
        factors.append(x)
    out = factors[0] * factors[1] * factors[2]
    return aten.sum.dim_IntList(out, list(sumdim)) if sumdim else out


DECOMPOSITIONS: dict[str, Callable[..., Any]] = {
    "aten._trilinear.default": _trilinear,
    "aten._weight_norm_interface.default": _weight_norm,
    "aten._weight_norm_interface_backward.default": _weight_norm_backward,
}
