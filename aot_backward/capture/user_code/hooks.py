"""Hooks under a trace. The result of a hook is traced; a hook that a package would drop is refused with its name and
line.

A trace runs a program's own autograd, so the graph contains the results of hooks on modules, tensors and nodes. Two
things are missing. Hooks on parameters run when the gradient arrives (``parameter_hooks.py`` inserts them). Side
effects of backward hooks that return no gradient (logging, storing) would happen once, while tracing, and never again.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from aot_backward_exporters import torch_api
from aot_backward_exporters.process_state import patched
from aot_backward_runtime.errors import ExportError

from . import source_location


@contextlib.contextmanager
def refused_or_traced(program: nn.Module) -> Iterator[None]:
    """Raise :class:`ExportError` for a hook that would be dropped: at once, or when it runs and returns nothing.
    ``backward()`` raises it, too."""
    _refuse_global()
    slots = [(n, hooks) for n, m in program.named_modules() for hooks in (m._backward_hooks, m._backward_pre_hooks)]
    saved_hooks = [dict(hooks) for _, hooks in slots]
    saved_tensors_hooks = torch.autograd.graph.saved_tensors_hooks
    register, retain, enter = torch.Tensor.register_hook, torch.Tensor.retain_grad, saved_tensors_hooks.__enter__
    backward = torch.autograd.backward
    thread = threading.get_ident()  # another thread may be training

    def here_alone(function: Any, original: Any) -> Any:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            return (function if threading.get_ident() == thread else original)(*args, **kwargs)

        return call

    def register_hook(self: torch.Tensor, hook: Callable[..., Any]) -> Any:
        if name := next((n for n, p in program.named_parameters() if p is self), None):
            raise ExportError(
                f"a hook is registered on the parameter {name!r} {source_location.here()}: each call adds another hook, and tracing does not see it. "
                "Register it once, outside the forward"
            )
        return register(self, must_return(hook, f"registered {source_location.here()}"))

    def retain_grad(self: torch.Tensor) -> None:
        if self.requires_grad and not self.is_leaf:
            raise ExportError(
                f"retain_grad() is called {source_location.here()}, and its .grad could not be read: a loaded module has no intermediate "
                "tensors. Add an input of zeros there (h = h + probe): the input's gradient is equal to the tensor's"
            )
        retain(self)

    def enter_saved(self: Any) -> None:
        if not self.pack_hook.__module__.startswith("torch."):
            raise ExportError(
                f"saved_tensors_hooks with {source_location.of(self.pack_hook)} are entered {source_location.here()}: a package selects the tensors "
                "that it saves for its backward and would not call the hooks. Export without them, or enter them around the call of the loaded module"
            )
        enter(self)

    def no_backward(*args: Any, **kwargs: Any) -> None:
        raise ExportError(
            f"backward() is called {source_location.here()}: a compiled forward does not fill .grad. Use torch.autograd.grad instead"
        )

    with (
        patched(
            torch.Tensor, register_hook=here_alone(register_hook, register), retain_grad=here_alone(retain_grad, retain)
        ),
        patched(saved_tensors_hooks, __enter__=here_alone(enter_saved, enter)),
        patched(torch.autograd, backward=here_alone(no_backward, backward)),
    ):
        try:
            for name, hooks in slots:
                hooks.update(
                    {
                        k: must_return(h, f"on the module {name!r}" if name else "on the module itself")
                        for k, h in hooks.items()
                    }
                )
            yield
        finally:
            for (_, hooks), old in zip(slots, saved_hooks, strict=True):
                hooks.update(old)


def must_return(hook: Callable[..., Any], where: str, instead: str = "export without the hook") -> Callable[..., Any]:
    @functools.wraps(hook, updated=())
    def call(*args: Any) -> Any:
        out = hook(*args)
        if out is None:
            raise ExportError(
                f"the backward hook {source_location.of(hook)}, {where}: expected a gradient to be returned, got None. The package would not run the "
                f"hook's side effects. Return the gradient to pass on, or {instead}"
            )
        return out

    return call


def of_parameters(program: nn.Module, kind: str) -> dict[str, tuple[Callable[..., Any], ...]]:
    """Return the gradient hooks of parameters that require grad, by the parameter's first name. ``kind``: of the entry.

    Raise :class:`ExportError` for hooks that could not run as in eager: after accumulation, on the AccumulateGrad node,
    or, in a module, all hooks. Eager runs a parameter's hooks once per backward, on the sum of all its uses; one call
    of a module is only one use.
    """
    out = {}
    for name, parameter in program.named_parameters():
        if not parameter.requires_grad:
            continue
        path = name.removeprefix("module.") if kind == "step" else name
        accessor = _LOADED[kind].format(path)
        for hook in (parameter._post_accumulate_grad_hooks or {}).values():
            advice = f", and register it on the loaded module's parameter, {accessor}" if kind == "module" else ""
            raise ExportError(
                f"the parameter {path!r} has a post-accumulate-grad hook, {source_location.of(hook)}, and a compiled {_MADE[kind]} does not fill "
                f".grad. Export without it{advice}"
            )
        for hook in on_accumulation(parameter):
            raise ExportError(
                f"the AccumulateGrad node of the parameter {path!r} has a hook, {source_location.of(hook)}, and tracing does not see it. Export "
                f"without it, and use register_hook on the parameter itself: before the export of a Grad or a Step, or on the loaded one, {accessor}"
            )
        hooks = tuple((parameter._backward_hooks or {}).values())
        if hooks and kind == "module":
            raise ExportError(
                f"the parameter {path!r} has a gradient hook, {source_location.of(hooks[0])}. Autograd runs it once, on the sum over all uses of the "
                "parameter, and the graph of one call does not compute this sum. Export without it, and register it on the loaded module's "
                f"parameter, {accessor}"
            )
        if hooks:
            advice = f"export without it, and register it on the loaded parameter, {accessor}"
            out[name] = tuple(must_return(h, f"on the parameter {path!r}", advice) for h in hooks)
    return out


_MADE = {"module": "forward and backward", "grad": "gradient function", "step": "step"}
_LOADED = {
    "module": "module().get_parameter({!r})",
    "grad": "grad().parameters[{!r}]",
    "step": "step().parameters[{!r}] of a step with accumulate=True",
}


def on_accumulation(parameter: torch.Tensor) -> list[Callable[..., Any]]:
    """Return the hooks on the AccumulateGrad node of ``parameter``. A node does not list them, but the handle of a new
    hook knows the others."""
    node = torch.autograd.graph.get_gradient_edge(parameter).node
    node_hooks = []
    for register in (node.register_prehook, node.register_hook):
        handle = register(lambda *_: None)
        hooks: Any = handle.hooks_dict_ref()
        node_hooks += [hook for number, hook in hooks.items() if number != handle.id]
        handle.remove()
    return node_hooks


def _refuse_global() -> None:
    for kind in ("forward_pre", "forward", "backward_pre", "backward"):
        for hook in getattr(torch_api, f"_global_{kind}_hooks").values():
            raise ExportError(
                f"the hook {source_location.of(hook)} is registered globally, for all modules (register_module_{kind}_hook). Remove it, or register "
                "it only on the modules that need it"
            )
