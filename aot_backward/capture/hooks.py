"""Hooks under a trace: what a hook returns is traced; a hook that a package would drop is refused, with its name and its place.

A trace runs a program's own autograd, so what hooks on modules, tensors and nodes make of values and gradients is in the graph. Not in it is what
hangs on a parameter, which runs where the gradient arrives, and what a backward hook does instead of returning a gradient (it logs it, it stores
it): that would be done once, while tracing, and never again.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from aot_backward_runtime.errors import ExportError

from .. import torch_api
from . import place


@contextlib.contextmanager
def traced(program: nn.Module) -> Iterator[None]:
    """Inside, a hook that would be dropped raises :class:`ExportError`: at once, or when it runs and returns nothing; so does ``backward()``."""
    _refuse_parameters(program)
    _refuse_global()
    slots = [(n, hooks) for n, m in program.named_modules() for hooks in (m._backward_hooks, m._backward_pre_hooks)]
    kept = [dict(hooks) for _, hooks in slots]
    saved = torch.autograd.graph.saved_tensors_hooks
    register, retain, enter = torch.Tensor.register_hook, torch.Tensor.retain_grad, saved.__enter__
    backward = torch.autograd.backward

    thread = threading.get_ident()  # another one may be training meanwhile

    def ours(function: Any, original: Any) -> Any:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            return (function if threading.get_ident() == thread else original)(*args, **kwargs)

        return call

    def register_hook(self: torch.Tensor, hook: Callable[..., Any]) -> Any:
        if name := next((n for n, p in program.named_parameters() if p is self), None):
            raise ExportError(
                f"a hook is registered on the parameter {name!r} {place.here()}: each call adds another, and a trace sees none; register it once, on "
                "the loaded module's parameter"
            )
        return register(self, _returning(hook, f"registered {place.here()}"))

    def retain_grad(self: torch.Tensor) -> None:
        if self.requires_grad and not self.is_leaf:
            raise ExportError(
                f"retain_grad() is called {place.here()}, and nobody could read that .grad: a loaded module has no inner tensors. Add an input of "
                "zeros there (h = h + probe): its gradient is the tensor's"
            )
        retain(self)

    def enter_saved(self: Any) -> None:
        if not self.pack_hook.__module__.startswith("torch."):
            raise ExportError(
                f"saved_tensors_hooks with {place.of(self.pack_hook)} are entered {place.here()}: a package chooses itself what it saves for its "
                "backward, and would not call them; export without them, or enter them around the call of the loaded module"
            )
        enter(self)

    def no_backward(*args: Any, **kwargs: Any) -> None:
        raise ExportError(
            f"backward() is called {place.here()}: a compiled forward fills no .grad; take the gradients from torch.autograd.grad instead"
        )

    try:
        for name, hooks in slots:
            hooks.update({k: _returning(h, f"on the module {name!r}" if name else "on the module itself") for k, h in hooks.items()})
        torch.Tensor.register_hook = ours(register_hook, register)  # type: ignore[method-assign]
        torch.Tensor.retain_grad = ours(retain_grad, retain)  # type: ignore[method-assign]
        saved.__enter__ = ours(enter_saved, enter)  # type: ignore[method-assign]
        torch.autograd.backward = ours(no_backward, backward)
        yield
    finally:
        torch.Tensor.register_hook, torch.Tensor.retain_grad = register, retain  # type: ignore[method-assign]
        saved.__enter__, torch.autograd.backward = enter, backward  # type: ignore[method-assign]
        for (_, hooks), before in zip(slots, kept, strict=True):
            hooks.update(before)


def _returning(hook: Callable[..., Any], where: str) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        out = hook(*args)
        if out is None:
            raise ExportError(
                f"the backward hook {place.of(hook)}, {where}, returns no gradient: what it does instead would not be done where the package runs. "
                "Return the gradient that is to go on, or export without the hook"
            )
        return out

    return call


def _refuse_parameters(program: nn.Module) -> None:
    for name, parameter in program.named_parameters():
        for hook in [*(parameter._backward_hooks or {}).values(), *(parameter._post_accumulate_grad_hooks or {}).values()]:
            raise ExportError(
                f"the parameter {name!r} has a gradient hook, which a trace does not see: {place.of(hook)}; export without it, and register it "
                "on the loaded module's parameter"
            )


def _refuse_global() -> None:
    for kind in ("forward_pre", "forward", "backward_pre", "backward"):
        for hook in getattr(torch_api, f"_global_{kind}_hooks").values():
            raise ExportError(
                f"the hook {place.of(hook)} is registered on every module there is (register_module_{kind}_hook); remove it, or register it on the "
                "modules that it is for"
            )
