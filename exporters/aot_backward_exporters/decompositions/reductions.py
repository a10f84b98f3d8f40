"""Reductions over dimensions, also of 0-d tensors, and normalisations that use one."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

aten = torch.ops.aten


def var_mean(
    x: torch.Tensor, dim: Sequence[int] | None = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    dims = list(range(x.dim())) if dim is None or len(dim) == 0 else [d % x.dim() for d in dim]
    count = math.prod(x.shape[d] for d in dims)
    mean = aten.mean.dim(x, dims, True)
    deviations = x - mean
    squares = aten.sum.dim_IntList(deviations * deviations, dims, keepdim)
    divisor = torch.sym_max(count - (1 if correction is None else correction), 0)
    return squares / divisor, mean if keepdim else aten.squeeze.dims(mean, dims)


def _over_dims(operator: Any) -> Callable[..., Any]:
    """Wrap ``amax`` and ``amin``: reduce all dimensions if none is named; return the value of a 0-d tensor."""

    def reduced(x: torch.Tensor, dim: Sequence[int] = (), keepdim: bool = False) -> Any:
        if x.dim() == 0:
            return aten.clone.default(x)
        return operator(x, list(range(x.dim())), keepdim) if len(dim) == 0 else NotImplemented

    return reduced


def _product(x: torch.Tensor, dim: int, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Any:
    if x.dim() == 0:
        return aten.clone.default(x if dtype is None else x.to(dtype))
    return NotImplemented


def _products(x: torch.Tensor, dims: Sequence[int] | None, *, output_dtype: torch.dtype | None = None) -> torch.Tensor:
    for d in sorted(range(x.dim()) if dims is None else [d % x.dim() for d in dims], reverse=True):
        x = aten.prod.dim_int(x, d, False)
    return x if output_dtype is None else x.to(output_dtype)


def _product_of_all(x: torch.Tensor, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    return _products(x if dtype is None else x.to(dtype), None)


def _logsumexp(x: torch.Tensor, dim: Sequence[int], keepdim: bool = False) -> Any:
    return aten.clone.default(x) if x.dim() == 0 else NotImplemented


def _softmax(x: torch.Tensor, dim: int, half_to_float: bool) -> Any:
    return torch.where(torch.isfinite(x), 1.0, math.nan).to(x.dtype) if x.dim() == 0 else NotImplemented


def _log_softmax(x: torch.Tensor, dim: int, half_to_float: bool) -> Any:
    return x - x if x.dim() == 0 else NotImplemented


def _top(x: torch.Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    return (aten.clone.default(x), torch.zeros([], dtype=torch.int64)) if x.dim() == 0 else NotImplemented


def _extreme(operator: Any) -> Callable[..., Any]:
    def of_truths(x: torch.Tensor, dim: int, keepdim: bool = False) -> Any:
        if x.dtype is not torch.bool:
            return NotImplemented
        values, indices = operator(x.to(torch.int32), dim, keepdim)
        return values.to(torch.bool), indices

    return of_truths


DECOMPOSITIONS: dict[str, Callable[..., Any]] = {
    "aten.amax.default": _over_dims(aten.amax.default),
    "aten.amin.default": _over_dims(aten.amin.default),
    "aten.prod.dim_int": _product,
    "aten.prod.default": _product_of_all,
    "prims.prod.default": _products,
    "aten.logsumexp.default": _logsumexp,
    "aten._softmax.default": _softmax,
    "aten._log_softmax.default": _log_softmax,
    "aten.max.dim": _extreme(aten.max.dim),
    "aten.min.dim": _extreme(aten.min.dim),
    "aten.topk.default": _top,
    "aten.var_mean.correction": var_mean,
}
