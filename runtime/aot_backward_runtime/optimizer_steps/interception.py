"""Who is called when a script calls ``step()`` of one of PyTorch's optimizers.

While an interceptor is entered, ``step`` of every optimizer class of ``torch.optim`` asks it first. What PyTorch puts around a step, the hooks of the
optimizer and the name for the profiler, stays around it where there are hooks or a profiler runs; else it is left out, and around ``zero_grad()``
too, since entering a name costs as much as a small fused step does. A method that a script took before, or that outlives the context
(learning-rate schedulers keep one), runs in eager.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, Protocol

import torch

from .. import torch_api

Eager = Callable[..., Any]
"""PyTorch's own step, without hooks: ``eager(optimizer, closure)``."""


class Interceptor(Protocol):
    def optimizer_step(self, optimizer: torch.optim.Optimizer, eager: Eager, closure: Callable[[], Any] | None) -> Any:
        """Makes the step, and returns what eager's returns."""


_stack: list[Interceptor] = []
_lock = threading.Lock()
_replaced: dict[tuple[type, str], Any] = {}  # methods of classes, by name

_NOT_SERVED = torch.optim.Optimizer, torch.optim.LBFGS, torch.optim.SparseAdam
SERVED = tuple(k for k in vars(torch.optim).values() if isinstance(k, type) and issubclass(k, torch.optim.Optimizer) and k not in _NOT_SERVED)
"""The classes whose steps are intercepted. LBFGS evaluates the loss several times in a step; SparseAdam takes sparse gradients alone."""


def enter(interceptor: Interceptor) -> None:
    with _lock:
        if not _stack:
            for kind in SERVED:
                if "step" in vars(kind):
                    _replaced[kind, "step"] = vars(kind)["step"]
            _replaced[torch.optim.Optimizer, "zero_grad"] = vars(torch.optim.Optimizer)["zero_grad"]
            for (kind, name), method in _replaced.items():
                type.__setattr__(kind, name, _intercepted(method) if name == "step" else _unprofiled(method))
        _stack.append(interceptor)


def leave(interceptor: Interceptor) -> None:
    with _lock:
        _stack.remove(interceptor)
        if not _stack:
            for (kind, name), method in _replaced.items():
                type.__setattr__(kind, name, method)
            _replaced.clear()


def _intercepted(step: Any) -> Any:
    """``step``, a function of a class, with hooks or without, as one that asks the interceptor between the hooks."""
    eager = step.__wrapped__ if getattr(step, "hooked", False) else step

    @functools.wraps(eager)
    def asked(self: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        innermost = _stack[-1:]  # another thread may leave its context meanwhile
        if not innermost or torch.compiler.is_compiling():
            return eager(self, closure)
        return innermost[0].optimizer_step(self, eager, closure)

    observed: Any = torch.optim.Optimizer.profile_hook_step(asked)

    @functools.wraps(eager)
    def called(self: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        return observed(self, closure) if torch_api.is_profiled() or torch_api.has_step_hooks(self) else asked(self, closure)

    hooked: Any = called
    hooked.hooked = True
    return hooked


def _unprofiled(zero_grad: Any) -> Any:
    """``zero_grad``, of :class:`torch.optim.Optimizer`, without a name for a profiler that does not run."""

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
