"""What a package can be asked to hold: modules, gradient functions and training steps, each in one or more variants."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class Variant:
    """One way in which a program is called.

    ``args``, ``kwargs``: example inputs: tensors, None, bool, int, float, str, in any nesting of tuple, list, dict, namedtuple and registered
    pytrees. Values of tensors are used only to check the result. ``dynamic_shapes``: as ``torch.export.export`` takes it,
    for ``*args`` also a tuple that follows the arguments.
    ``requires_grad``, of a module: everything that gets a gradient, and nothing else is computed: names of inputs and parameters ("x",
    "head.weight"), of what they lie in ("head"), "inputs" and "parameters"; by default what requires one now. A call is served by the
    smallest variant that covers what requires a gradient in it.
    ``mode``: "train" or "eval"; by default the module's own.
    """

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] | None = None
    _: KW_ONLY
    dynamic_shapes: Any = None
    requires_grad: Sequence[str] | None = None
    mode: str | None = None


@dataclass(frozen=True)
class Module:
    """An ``nn.Module`` whose forward and backward are exported; loaded with ``load(path).module(name)``.

    ``order=2``: its gradients can be differentiated again (``create_graph=True``), as for a gradient penalty, forces that are trained on or a
    Hessian; 3: and those again (``torch.autograd.functional.hvp`` asks for it).
    """

    module: nn.Module
    variants: Sequence[Variant]
    order: int = 1


@dataclass(frozen=True)
class Grad:
    """A function or module that returns a scalar loss (or ``(loss, aux)``), exported with its gradients; ``load(path).grad(name)``.

    ``wrt``: what is differentiated: a name or several, each an input's ("pos"), a parameter's ("net.0.weight"), "parameters" (all that
    require a gradient) or "inputs" (all of floating point). By default the parameters of a module, and the inputs of a function.
    A function's parameters are those of the modules that it closes over, named by the variable.
    """

    fn: Callable[..., Any]
    variants: Sequence[Variant]
    wrt: str | Sequence[str] | None = None
    has_aux: bool = False


@dataclass(frozen=True)
class Step:
    """A whole training step: forward, backward and optimizer, in one native call; loaded with ``load(path).step(name)``.

    The loss is ``loss_fn(module(*inputs), target)``, where the target is the last positional argument of the variant; without a ``loss_fn``
    what ``module`` returns, alone or first of several results. ``optimizer``: any of ``torch.optim`` but LBFGS and SparseAdam, or one's own
    that keeps its state in tensors; with its parameter groups, and where it has made steps already, with its state.
    ``accumulate``: ``step(x, y, update=False)`` only adds up gradients. ``distributed``: gradients are averaged over processes.
    ``clip_norm``, ``clip_value``: as ``torch.nn.utils.clip_grad_norm_`` and ``clip_grad_value_`` over the optimizer's parameters, before it.
    ``skip_nonfinite``: where a gradient (with ``clip_norm``: their norm) has Inf or NaN, parameters and the optimizer's state stay as they were.
    ``loss_scale``: for float16: what the loss is scaled by at first, and the gradients back; it then follows ``torch.amp.GradScaler``'s rule.
    """

    module: nn.Module
    variants: Sequence[Variant]
    optimizer: torch.optim.Optimizer
    _: KW_ONLY
    loss_fn: Callable[..., Any] | None = None
    accumulate: bool = False
    distributed: bool = False
    clip_norm: float | None = None
    clip_value: float | None = None
    skip_nonfinite: bool = False
    loss_scale: float | None = None


Entry = Module | Grad | Step
Entries = Mapping[str, Entry]
