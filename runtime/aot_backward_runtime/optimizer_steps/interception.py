"""Intercept calls of ``step()`` of PyTorch's optimizers, and of gradient clipping.

While an interceptor is entered, ``step`` of every optimizer class of ``torch.optim`` calls it. PyTorch's wrapper of a
step (optimizer hooks and ``record_function``) is kept only if there are hooks or a profiler is active. ``zero_grad()``
also skips ``record_function`` when no profiler is active, because it costs as much as a small fused step. A method that
a script stored before, or that outlives the context (learning-rate schedulers keep one), runs in eager.
``clip_grad_norm_`` and ``clip_grad_value_`` of ``torch.nn.utils`` are intercepted however a script imported them: both
call a function in a closure cell, and it is replaced there.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, Protocol

import torch

from .. import torch_api
from .compiled_clipping import NORM, VALUE, Kind

Eager = Callable[..., Any]
"""PyTorch's own step, without hooks: ``eager(optimizer, closure)``."""


class Interceptor(Protocol):
    def optimizer_step(self, optimizer: torch.optim.Optimizer, eager: Eager, closure: Callable[[], Any] | None) -> Any:
        """Make the step and return eager's result."""

    def clip_gradients(
        self, kind: Kind, gradients: list[torch.Tensor], limit: float, keep_nonfinite: bool, eager: Callable[[], Any]
    ) -> Any:
        """Clip ``gradients`` and return the result of ``eager()``, PyTorch's own call. ``limit``: ``max_norm`` or
        ``clip_value``; ``keep_nonfinite``: ``error_if_nonfinite``."""


_stack: list[Interceptor] = []
_lock = threading.Lock()
_replaced: dict[tuple[type, str], Any] = {}  # methods of classes, by name
_clippings: list[tuple[Any, Any]] = []  # closure cells and their original functions

_NOT_SERVED = torch.optim.Optimizer, torch.optim.LBFGS, torch.optim.SparseAdam
SERVED = tuple(
    k
    for k in vars(torch.optim).values()
    if isinstance(k, type) and issubclass(k, torch.optim.Optimizer) and k not in _NOT_SERVED
)
"""The classes with intercepted steps. LBFGS evaluates the loss several times in a step; SparseAdam only takes sparse
gradients."""


def enter(interceptor: Interceptor) -> None:
    with _lock:
        if not _stack:
            for kind in SERVED:
                if "step" in vars(kind):
                    _replaced[kind, "step"] = _with_hooks(vars(kind)["step"])
            _replaced[torch.optim.Optimizer, "zero_grad"] = vars(torch.optim.Optimizer)["zero_grad"]
            for (kind, name), method in _replaced.items():
                type.__setattr__(kind, name, _intercepted(method) if name == "step" else _unprofiled(method))
            for function, wrap in (
                (torch.nn.utils.clip_grad_norm_, _clip_grad_norm),
                (torch.nn.utils.clip_grad_value_, _clip_grad_value),
            ):
                if (cell := torch_api.wrapped_cell(function)) is not None:
                    _clippings.append((cell, cell.cell_contents))
                    cell.cell_contents = wrap(cell.cell_contents)
        _stack.append(interceptor)


def leave(interceptor: Interceptor) -> None:
    with _lock:
        _stack.remove(interceptor)
        if not _stack:
            for (kind, name), method in _replaced.items():
                type.__setattr__(kind, name, method)
            _replaced.clear()
            for cell, function in _clippings:
                cell.cell_contents = function
            _clippings.clear()


def _intercepted(step: Any) -> Any:
    """Return ``step``, a function of a class with or without hooks, as one that calls the interceptor between the
    hooks."""
    eager = _without_hooks(step)

    @functools.wraps(eager)
    def asked(self: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        innermost = _stack[-1:]  # another thread may leave its context meanwhile
        if not innermost or torch.compiler.is_compiling():
            return eager(self, closure)
        return innermost[0].optimizer_step(self, eager, closure)

    observed = _with_hooks(asked)

    @functools.wraps(eager)
    def called(self: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        return (
            observed(self, closure)
            if torch_api.is_profiled() or torch_api.has_step_hooks(self)
            else asked(self, closure)
        )

    hooked: Any = called
    hooked.hooked = True
    return hooked


def step_of(optimizer: torch.optim.Optimizer) -> Eager:
    """Return the step of its class, without hooks."""
    return _without_hooks(type(optimizer).step)


def _with_hooks(step: Any) -> Any:
    """Return ``step`` with hooks, as PyTorch wraps it when the first optimizer of a class is made (possibly within the
    context)."""
    if getattr(step, "hooked", False):
        return step
    hooked: Any = torch.optim.Optimizer.profile_hook_step(step)
    hooked.hooked = True
    return hooked


def _without_hooks(step: Any) -> Any:
    return step.__wrapped__ if getattr(step, "hooked", False) else step


def _unprofiled(zero_grad: Any) -> Any:
    """Return ``zero_grad`` of :class:`torch.optim.Optimizer`, without ``record_function`` when no profiler is
    active."""

    @functools.wraps(zero_grad)
    def called(self: torch.optim.Optimizer, set_to_none: bool = True) -> None:
        if not set_to_none or torch_api.is_profiled() or torch.compiler.is_compiling():
            zero_grad(self, set_to_none)
            return
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad = None

    return called


def _clip_grad_norm(eager: Any) -> Any:
    @functools.wraps(eager)
    def clip_grad_norm_(
        parameters: Any,
        max_norm: Any,
        norm_type: Any = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Any:
        def again(parameters: Any) -> Any:
            return eager(parameters, max_norm, norm_type, error_if_nonfinite, foreach)

        return _clipped(again, parameters, NORM, max_norm, norm_type, bool(error_if_nonfinite))

    return clip_grad_norm_


def _clip_grad_value(eager: Any) -> Any:
    @functools.wraps(eager)
    def clip_grad_value_(parameters: Any, clip_value: Any, foreach: bool | None = None) -> Any:
        return _clipped(lambda params: eager(params, clip_value, foreach), parameters, VALUE, clip_value, None, False)

    return clip_grad_value_


def _clipped(
    eager: Callable[[Any], Any], parameters: Any, function: str, limit: Any, norm_type: Any, keep_nonfinite: bool
) -> Any:
    innermost = _stack[-1:]
    if not innermost or torch.compiler.is_compiling():
        return eager(parameters)
    param_list = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    try:
        kind = (function, repr(float(norm_type)) if norm_type is not None else "")
        number = float(limit)
    except (TypeError, ValueError, RuntimeError):
        return eager(param_list)  # eager raises if they are invalid
    gradients = [gradient for p in param_list if (gradient := p.grad) is not None]
    if not gradients:
        return eager(param_list or parameters)  # warns if the generator is empty
    return innermost[0].clip_gradients(kind, gradients, number, keep_nonfinite, lambda: eager(param_list))
