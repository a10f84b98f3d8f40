"""The entries of a package: modules, gradient functions and training steps, each in one or more variants."""

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
    pytrees. Values of tensors are used only to check the result. ``dynamic_shapes``: as for ``torch.export.export``; for ``*args`` also a tuple that
    follows the arguments.

    ``requires_grad``, of a module: the tensors that get a gradient; other gradients are not computed. Give names of inputs and parameters ("x",
    "head.weight"), of their containers ("head"), "inputs" and "parameters"; the default is every tensor that requires a gradient now. A call uses the
    smallest variant that covers the tensors that require a gradient in it.

    ``mode``: "train" or "eval"; the default is the module's own.
    """

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] | None = None
    _: KW_ONLY
    dynamic_shapes: Any = None
    requires_grad: Sequence[str] | None = None
    mode: str | None = None


@dataclass(frozen=True)
class Module:
    """An ``nn.Module`` to export with its forward and backward; loaded with ``load(path).module(name)``.

    ``order=2``: its gradients can be differentiated again (``create_graph=True``), for example for a gradient penalty, training on forces or a
    Hessian; 3: once more (``torch.autograd.functional.hvp`` needs it).
    """

    module: nn.Module
    variants: Sequence[Variant]
    order: int = 1


@dataclass(frozen=True)
class Grad:
    """A function or module that returns a scalar loss (or ``(loss, aux)``), exported with its gradients; ``load(path).grad(name)``.

    ``wrt``: the differentiated tensors: one or several names of inputs ("pos") or parameters ("net.0.weight"), "parameters" (all that require a
    gradient) or "inputs" (all of floating point). The default is the parameters of a module, and the inputs of a function. A function's parameters
    belong to the modules that it closes over, and are named by the variable.
    """

    fn: Callable[..., Any]
    variants: Sequence[Variant]
    wrt: str | Sequence[str] | None = None
    has_aux: bool = False


@dataclass(frozen=True)
class Step:
    """A whole training step: forward, backward and optimizer, in one native call; loaded with ``load(path).step(name)``.

    The loss is ``loss_fn(module(*inputs), target)``; the target is the last positional argument of the variant. Without a ``loss_fn`` the loss is the
    result of ``module``, alone or first of several. ``optimizer``: any ``torch.optim`` optimizer except LBFGS and SparseAdam, or a custom one that
    keeps its state in tensors. Its parameter groups are included, and its state if it has made steps already.

    ``accumulate``: ``step(x, y, update=False)`` only adds up gradients. ``distributed``: gradients are averaged over processes. ``clip_norm``,
    ``clip_value``: as ``torch.nn.utils.clip_grad_norm_`` and ``clip_grad_value_`` over the optimizer's parameters, before its step.
    ``skip_nonfinite``: if a gradient (with ``clip_norm``: their norm) has Inf or NaN, parameters and the optimizer's state stay unchanged.
    ``loss_scale``, for float16: the initial factor of the loss, by which gradients are divided; it then follows ``torch.amp.GradScaler``'s rule.
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
