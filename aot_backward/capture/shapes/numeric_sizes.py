"""Replacements for operators with C++ code that reads sizes as numbers, which fixes a dynamic size; these keep it symbolic.

The second derivative of ``sgn`` (and so of ``abs``) asks for the sizes of its zeros. Forward mode makes tensors that stand for zeros, without
memory; the sum or product of one with another tensor asks for the sizes of both.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from aot_backward_exporters import torch_api
from aot_backward_exporters.process_state import exclusive
from aot_backward_runtime.torch_api import is_zerotensor

aten = torch.ops.aten


@contextlib.contextmanager
def carried() -> Iterator[None]:
    """Run the replacements below in a trace. Outside a trace the Python dispatcher is off, and they are not called."""
    zero, autograd = torch_api.DispatchKey.ZeroTensor, torch_api.DispatchKey.Autograd
    kernels: dict[tuple[Any, Any], Callable[..., Any]] = {
        (aten.add.Tensor, zero): _sum,
        (aten.sub.Tensor, zero): _difference,
        (aten.mul.Tensor, zero): _zeros,
        (aten.linalg_cross.default, zero): _zeros,
        (aten.sgn.default, autograd): _sign,
    }
    with exclusive(), contextlib.ExitStack() as stack:
        for (operator, key), kernel in kernels.items():
            if key not in operator.py_kernels:
                operator.py_kernels[key] = kernel
                torch_api.clear_kernel_cache(operator)
                stack.callback(torch_api.clear_kernel_cache, operator)
                stack.callback(operator.py_kernels.pop, key)
        yield


def _zeros(x: Any, y: Any, **_: Any) -> Any:
    return aten._efficientzerotensor(torch.broadcast_shapes(x.shape, y.shape), dtype=torch.result_type(x, y), device=x.device)


def _sum(x: Any, y: Any, *, alpha: Any = 1) -> Any:
    if is_zerotensor(x) and is_zerotensor(y):
        return _zeros(x, y)
    addend = x if is_zerotensor(y) else y * alpha
    return addend.expand(torch.broadcast_shapes(x.shape, y.shape)).to(torch.result_type(x, y)).clone()


def _difference(x: Any, y: Any, *, alpha: Any = 1) -> Any:
    return _sum(x, y, alpha=-alpha)


def _sign(x: Any) -> Any:
    """Use ``sign`` for real numbers: its derivative keeps sizes symbolic. The derivative of ``sgn`` for complex numbers does so itself."""
    if not x.is_complex():
        return aten.sign(x)
    operator, key = aten.sgn.default, torch_api.DispatchKey.Autograd
    del operator.py_kernels[key]
    torch_api.clear_kernel_cache(operator)
    try:
        return operator(x)
    finally:
        operator.py_kernels[key] = _sign
        torch_api.clear_kernel_cache(operator)
