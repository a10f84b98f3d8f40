"""Decompositions of element-wise operators, views and statistics for which PyTorch has no ONNX translation of its own."""

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


def _over_dims(operator: Any) -> Callable[..., Any]:
    """``amax`` and ``amin``: over all dimensions where none is named; of a number that number."""

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


def _squeeze_one(x: torch.Tensor, dim: int) -> Any:
    """ONNX's Squeeze takes nothing but dimensions of 1."""
    if x.dim() == 0 or (isinstance(x.shape[dim], int) and x.shape[dim] != 1):
        return aten.clone.default(x)
    return NotImplemented


def _top(x: torch.Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    return (aten.clone.default(x), torch.zeros([], dtype=torch.int64)) if x.dim() == 0 else NotImplemented


def _signbit(x: torch.Tensor) -> torch.Tensor:
    return (x < 0) | ((x == 0) & (torch.reciprocal(x) < 0)) if x.dtype.is_floating_point else x < 0


def _where(condition: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> Any:
    """onnxruntime chooses between numbers only."""
    return (condition & a) | (~condition & b) if a.dtype is b.dtype is torch.bool else NotImplemented


def _extreme(operator: Any) -> Callable[..., Any]:
    def of_truths(x: torch.Tensor, dim: int, keepdim: bool = False) -> Any:
        if x.dtype is not torch.bool:
            return NotImplemented
        values, places = operator(x.to(torch.int32), dim, keepdim)
        return values.to(torch.bool), places

    return of_truths


def _isinf(x: torch.Tensor) -> torch.Tensor:
    return (x == math.inf) | (x == -math.inf)


def _remainder(a: torch.Tensor, b: Any) -> Any:
    if not a.dtype.is_floating_point:
        return NotImplemented
    rest = torch.fmod(a, b)
    return torch.where((rest != 0) & ((rest < 0) != (b < 0)), rest + b, rest)


def _floor_divide(a: torch.Tensor, b: Any) -> torch.Tensor:
    return torch.div(a, b, rounding_mode="floor")


def _hypot(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Without squares that overflow."""
    larger, smaller = torch.maximum(a.abs(), b.abs()), torch.minimum(a.abs(), b.abs())
    ratio = smaller / torch.where(larger == 0, 1.0, larger)
    return torch.where(torch.isinf(larger), larger, larger * torch.sqrt(1 + ratio * ratio))


def _scalar_tensor(value: Any, *, dtype: torch.dtype | None = None, device: Any = None) -> torch.Tensor:
    return aten.scalar_tensor.default(value, dtype=dtype)


def _copy(x: torch.Tensor, src: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """What a write into a slice becomes. torchlib hands ``src`` on as it is, of whatever shape."""
    return src.to(x.dtype).expand(x.shape)


def _weight_norm(v: torch.Tensor, g: torch.Tensor, dim: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    norms = _norms(v, dim)
    return v * (g / norms), norms


def _norms(v: torch.Tensor, dim: int) -> torch.Tensor:
    return torch.sqrt(aten.sum.dim_IntList(v * v, _others(v, dim), True))


def _others(v: torch.Tensor, dim: int) -> list[int]:
    return [d for d in range(v.dim()) if d != dim % v.dim()]


def _weight_norm_backward(grad: torch.Tensor, v: torch.Tensor, g: torch.Tensor, norms: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of w = g · v / ‖v‖: by g the part of the gradient along v / ‖v‖, by v what is left of it, times g / ‖v‖."""
    along = aten.sum.dim_IntList(grad * v, _others(v, dim), True) / norms
    return (g / norms) * (grad - along * (v / norms)), along


def _trilinear(
    a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, expand1: Sequence[int], expand2: Sequence[int], expand3: Sequence[int],
    sumdim: Sequence[int], unroll_dim: int = 1,
) -> torch.Tensor:  # fmt: skip
    spread = []
    for x, places in ((a, expand1), (b, expand2), (c, expand3)):
        for d in places:
            x = x.unsqueeze(d)
        spread.append(x)
    out = spread[0] * spread[1] * spread[2]
    return aten.sum.dim_IntList(out, list(sumdim)) if sumdim else out


DECOMPOSITIONS: dict[str, Callable[..., Any]] = {
    "aten.amax.default": _over_dims(aten.amax.default),
    "aten.amin.default": _over_dims(aten.amin.default),
    "aten.prod.dim_int": _product,
    "aten.prod.default": _product_of_all,
    "prims.prod.default": _products,
    "aten.logsumexp.default": _logsumexp,
    "aten._softmax.default": _softmax,
    "aten._log_softmax.default": _log_softmax,
    "aten.squeeze.dim": _squeeze_one,
    "aten.where.self": _where,
    "aten.max.dim": _extreme(aten.max.dim),
    "aten.min.dim": _extreme(aten.min.dim),
    "aten.isinf.default": _isinf,
    "aten.remainder.Tensor": _remainder,
    "aten.remainder.Scalar": _remainder,
    "aten.floor_divide.default": _floor_divide,
    "aten.topk.default": _top,
    "prims.signbit.default": _signbit,
    "aten.signbit.default": _signbit,
    "prims.hypot.default": _hypot,
    "aten.hypot.default": _hypot,
    "prims.scalar_tensor.default": _scalar_tensor,
    "aten._trilinear.default": _trilinear,
    "aten.copy.default": _copy,
    "aten._weight_norm_interface.default": _weight_norm,
    "aten._weight_norm_interface_backward.default": _weight_norm_backward,
    "prims.fma.default": _fma,
    "prims.iota.default": _iota,
    "prims.rev.default": _rev,
    "aten.constant_pad_nd.default": _pad,
    "aten.squeeze.dims": _squeeze,
    "aten.var_mean.correction": _var_mean,
}
