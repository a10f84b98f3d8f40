"""The entries of a package: modules, functions, gradient functions and training steps, each in one or more variants."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class Variant:
    """One way to call a program: example arguments, dynamic sizes, gradients and mode.

    Args:
        args: Example arguments: tensors, None, bool, int, float and str, in any nesting of tuple, list, dict,
            namedtuple and registered pytrees. Values of tensors are used only to check the result.
        kwargs: Example keyword arguments.
        dynamic_shapes: The dynamic sizes, as for ``torch.export.export``; for ``*args`` also a tuple that follows the
            arguments.
        requires_grad: The tensors of a module that get a gradient; other gradients are not computed. Give names of
            inputs and parameters ("x", "head.weight"), of their containers ("head"), "inputs" and "parameters"; the
            default is every tensor that requires a gradient now. A call uses the smallest variant that covers the
            tensors that require a gradient in it.
        mode: "train" or "eval"; the default is the module's own.

    Examples:
        >>> batch = {0: torch.export.Dim("batch", min=2, max=1024)}
        >>> args = (torch.randn(4, 8),)
        >>> variant = ab.Variant(args, dynamic_shapes=(batch,), requires_grad=["parameters"], mode="train")
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

    Args:
        module: The module. Export changes nothing in it.
        variants: The ways to call it. A call runs the first variant whose guards pass, in the module's mode.
        order: The highest order of derivatives. With 2, gradients can be differentiated again (``create_graph=True``),
            for example for a gradient penalty, training on forces or a Hessian; with 3, once more
            (``torch.autograd.functional.hvp`` needs it).
        metadata: A JSON object of your own, such as units or an author. It is ``load(path).module(name).metadata``.

    Examples:
        >>> x = torch.randn(4, 8)
        >>> entry = ab.Module(net, [ab.Variant((x,), mode="train"), ab.Variant((x,), mode="eval")])
    """

    module: nn.Module
    variants: Sequence[Variant]
    order: int = 1
    _: KW_ONLY
    metadata: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Function:
    """A function or a module to export without gradients; loaded with ``load(path).function(name)``.

    It may compute derivatives itself, with ``torch.autograd.grad`` or ``torch.func``.

    Args:
        fn: The function or module. It returns tensors, in any nesting.
        variants: The ways to call it.
        metadata: A JSON object of your own.

    Examples:
        >>> def distances(pos):
        ...     return {"distances": torch.cdist(pos, pos)}
        >>> entry = ab.Function(distances, [ab.Variant((torch.randn(4, 3),))])
    """

    fn: Callable[..., Any]
    variants: Sequence[Variant]
    _: KW_ONLY
    metadata: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Grad:
    """A function or a module that returns a scalar loss, to export with its gradients; loaded with
    ``load(path).grad(name)``.

    Args:
        fn: The function or module. It returns the loss, a 0-d tensor, or with ``has_aux`` the pair ``(loss, aux)``.
        variants: The ways to call it.
        wrt: The differentiated tensors: one or several names of inputs ("pos") or parameters ("net.0.weight"),
            "parameters" (all that require a gradient) or "inputs" (all of floating point). The default is the
            parameters of a module, and the inputs of a function. A function's parameters belong to the modules that it
            closes over, and are named by the variable.
        has_aux: Whether the result is ``(loss, aux)``. No gradient of ``aux`` is computed.
        metadata: A JSON object of your own, such as a cutoff and units.

    Examples:
        >>> def loss(x, y):
        ...     return (net(x) - y).square().mean()
        >>> entry = ab.Grad(loss, [ab.Variant((torch.randn(4, 8), torch.randn(4, 1)))], wrt=["x", "net.0.weight"])
    """

    fn: Callable[..., Any]
    variants: Sequence[Variant]
    wrt: str | Sequence[str] | None = None
    has_aux: bool = False
    _: KW_ONLY
    metadata: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Step:
    """A whole training step to export: forward, backward and optimizer, in one native call; loaded with
    ``load(path).step(name)``.

    The loss is ``loss_fn(module(*inputs), target)``; the target is the last positional argument of the variant. Without
    a ``loss_fn`` the loss is the result of ``module``, alone or first of several.

    Args:
        module: The module to train.
        variants: The ways to call it, with the target as the last positional argument if there is a ``loss_fn``.
        optimizer: Any ``torch.optim`` optimizer except LBFGS and SparseAdam, or a custom one that keeps its state in
            tensors. Its parameter groups are included, and its state if it has made steps already.
        loss_fn: A function that returns a scalar loss.
        accumulate: Whether ``step(x, y, update=False)`` may only add up gradients.
        distributed: Whether gradients can be averaged over processes.
        clip_norm: The largest norm of the gradients of the optimizer's parameters together, as
            ``torch.nn.utils.clip_grad_norm_``, before its step.
        clip_value: The largest absolute value of an element of these gradients, as
            ``torch.nn.utils.clip_grad_value_``.
        skip_nonfinite: Whether parameters and the optimizer's state stay unchanged if a gradient (with ``clip_norm``:
            their norm) has Inf or NaN.
        loss_scale: The initial factor of the loss, by which gradients are divided, for float16; it then follows
            ``torch.amp.GradScaler``'s rule.
        ema: The decay of exponential moving averages of the trained parameters, made after each update, as
            ``AveragedModel`` of ``torch.optim.swa_utils`` with ``get_ema_multi_avg_fn(ema)``: after the first update
            they are the parameters themselves.
        metadata: A JSON object of your own.

    Examples:
        >>> sgd = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        >>> variant = ab.Variant((torch.randn(4, 8), torch.randn(4, 1)))
        >>> entry = ab.Step(net, [variant], sgd, loss_fn=torch.nn.functional.mse_loss, accumulate=True)
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
    ema: float | None = None
    metadata: Mapping[str, Any] | None = None


Entry = Module | Function | Grad | Step
Entries = Mapping[str, Entry]
