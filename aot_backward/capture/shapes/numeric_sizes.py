"""Replacements for operators with C++ code that reads sizes as numbers, which fixes a dynamic size; these keep it
symbolic.

The second derivative of ``sgn`` (and so of ``abs``) asks for the sizes of its zeros. Forward mode makes tensors that
stand for zeros, without memory; operators on one ask for its sizes, and so do ``cat`` and ``stack`` to make one. The
rules of ``torch.func.vmap`` for ``cat`` and for the gradients of slices ask for the number of mapped items.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.autograd.forward_ad as fwd
from torch.utils._pytree import tree_map

from aot_backward_exporters import torch_api
from aot_backward_exporters.process_state import exclusive, patched
from aot_backward_runtime.torch_api import is_zerotensor

aten = torch.ops.aten


@contextlib.contextmanager
def carried() -> Iterator[None]:
    """Run the replacements below in a trace. Outside a trace the Python dispatcher is off, and they are not called."""
    zero = torch_api.DispatchKey.ZeroTensor
    autograd = torch_api.DispatchKey.Autograd
    batched = torch_api.DispatchKey.FuncTorchBatched
    kernels: dict[tuple[Any, Any], Callable[..., Any]] = {
        (aten.add.Tensor, zero): _sum,
        (aten.sub.Tensor, zero): _difference,
        (aten.mul.Tensor, zero): _zeros,
        (aten.div.Tensor, zero): _quotient,
        (aten.linalg_cross.default, zero): _zeros,
        # Else torch would copy the zeros, and read an offset as a number
        (aten._has_same_storage_numel.default, zero): lambda x, y: True,
        (aten.view.default, zero): _viewed,
        (aten.sgn.default, autograd): _sign,
        (aten.cat.default, autograd): functools.partial(_with_tangents, aten.cat.default),
        (aten.stack.default, autograd): functools.partial(_with_tangents, aten.stack.default),
        (aten.cat.default, batched): _joined,
        (aten.slice_backward.default, batched): functools.partial(_placed, aten.slice_backward.default),
        (aten.select_backward.default, batched): functools.partial(_placed, aten.select_backward.default),
    }
    with exclusive(), _fallback(zero, _with_memory), contextlib.ExitStack() as stack:
        for (operator, key), kernel in kernels.items():
            if key not in operator.py_kernels:
                operator.py_kernels[key] = kernel
                torch_api.clear_kernel_cache(operator)
                stack.callback(torch_api.clear_kernel_cache, operator)
                stack.callback(operator.py_kernels.pop, key)
        yield


@contextlib.contextmanager
def _fallback(key: Any, kernel: Callable[..., Any]) -> Iterator[None]:
    """Call ``kernel(operator, *args)`` for operators that have no kernel of their own for the dispatch key ``key``."""
    operators, method = torch_api.kernel_lookup()
    look_up = getattr(operators, method)

    def with_fallback(operator: Any, asked: Any) -> Any:
        own = asked != key or operator.has_kernel_for_dispatch_key(key)
        return look_up(operator, asked) if own else functools.partial(kernel, operator)

    with patched(operators, **{method: with_fallback}):
        yield


def _with_memory(operator: Any, *args: Any, **kwargs: Any) -> Any:
    """Call ``operator`` on plain zeros, as torch's own kernel for operators that know nothing of such tensors does."""
    return operator(*tree_map(_plain, args), **kwargs)


def _plain(value: Any) -> Any:
    if not (isinstance(value, torch.Tensor) and is_zerotensor(value)):
        return value
    return torch.zeros([], dtype=value.dtype, device=value.device).expand(value.shape)


def _zeros(x: Any, y: Any, **_: Any) -> Any:
    return aten._efficientzerotensor(
        torch.broadcast_shapes(x.shape, y.shape), dtype=_common_dtype(x, y), device=x.device
    )


def _quotient(x: Any, y: Any) -> Any:
    return _with_memory(aten.div.Tensor, x, y) if is_zerotensor(y) else _zeros(x, y)


def _viewed(x: Any, sizes: Sequence[Any]) -> Any:
    known = math.prod(n for n in sizes if not (isinstance(n, int) and n == -1))
    shape = [x.numel() // known if isinstance(n, int) and n == -1 else n for n in sizes]
    return aten._efficientzerotensor(shape, dtype=x.dtype, device=x.device)


def _sum(x: Any, y: Any, *, alpha: Any = 1) -> Any:
    if is_zerotensor(x) and is_zerotensor(y):
        return _zeros(x, y)
    addend = x if is_zerotensor(y) else y * alpha
    return addend.expand(torch.broadcast_shapes(x.shape, y.shape)).to(_common_dtype(x, y)).clone()


def _common_dtype(x: Any, y: Any) -> torch.dtype:
    return x.dtype if x.dtype is y.dtype else torch.result_type(x, y)  # the latter asks for sizes as numbers


def _difference(x: Any, y: Any, *, alpha: Any = 1) -> Any:
    return _sum(x, y, alpha=-alpha)


def _sign(x: Any) -> Any:
    """Use ``sign`` for real numbers: its derivative keeps sizes symbolic. The derivative of ``sgn`` for complex numbers
    does so itself."""
    if not x.is_complex():
        return aten.sign(x)
    return torch_api.call_kernel(aten.sgn.default, torch_api.DispatchKey.Autograd, x)


def _with_tangents(operator: Any, tensors: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
    """Join tensors of which some have a tangent: zeros for the others, which torch would make of their sizes as
    numbers."""
    has = [fwd.unpack_dual(t, level=0).tangent is not None for t in tensors]
    if any(has):
        # Only floating-point and complex tensors have tangents
        dtype = functools.reduce(torch.promote_types, (t.dtype for t in tensors))
        tensors = [t if known else _with_zeros(t.to(dtype)) for t, known in zip(tensors, has, strict=True)]
    return torch_api.call_kernel(operator, torch_api.DispatchKey.Autograd, tensors, dim)


def _with_zeros(x: torch.Tensor) -> torch.Tensor:
    dense = x.clone()  # in the same memory format; a tangent must have the strides of its primal
    return fwd.make_dual(dense, torch.zeros_like(dense), level=0)


def _joined(tensors: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
    """Concatenate tensors inside ``vmap``: put the mapped dimension of each first, and expand those that lack it."""
    rank, level = max(t.dim() for t in tensors), torch_api.current_level()
    # An empty 1-d tensor fits any others
    pairs = [torch_api._unwrap_batched(t, level) for t in tensors if t.dim() == rank]
    count = next((t.shape[d] for t, d in pairs if d is not None), None)
    with torch_api._ExcludeDispatchKeyGuard(torch_api.DispatchKeySet(torch_api.DispatchKey.FuncTorchBatched)):
        if count is None:  # an outer vmap maps them
            return torch.cat([t for t, _ in pairs], dim)
        values = [t.expand(count, *t.shape) if d is None else t.movedim(d, 0) for t, d in pairs]
        joined = torch.cat(values, dim % rank + 1)
    return torch_api._add_batch_dim(joined, 0, level)


def _placed(operator: Any, gradient: torch.Tensor, sizes: Sequence[Any], dim: int, *place: Any) -> torch.Tensor:
    """Run ``operator``, the gradient of a slice or a selection, inside ``vmap``: put the mapped dimension first."""
    level = torch_api.current_level()
    value, mapped = torch_api._unwrap_batched(gradient, level)
    with torch_api._ExcludeDispatchKeyGuard(torch_api.DispatchKeySet(torch_api.DispatchKey.FuncTorchBatched)):
        if mapped is None:  # an outer vmap maps it
            return operator(value, sizes, dim, *place)
        value = value.movedim(mapped, 0)
        placed = operator(value, [value.shape[0], *sizes], dim % len(sizes) + 1, *place)
    return torch_api._add_batch_dim(placed, 0, level)
