"""Parameters that native code reads through pointers. Changes to them are noticed although a call does not compare them
one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from .. import torch_api
from ..errors import InputError
from ..native.guards import Fast
from ..native.memory import HeldStorages


class BoundParameter(nn.Parameter):
    """A parameter or buffer of a gradient function or a training step. The next call sees values written into it, binds
    it again if it was given other memory, and runs the hooks on its gradient.

    The properties intercept every way to register hooks in torch (``p.register_hook``,
    ``torch.Tensor.register_hook(p, …)``). The owner's weak reference makes ``torch.utils.swap_tensors`` refuse.
    """

    _touched: list[bool]

    @property
    def _backward_hooks(self) -> Any:
        return torch_api.backward_hooks.__get__(self)

    @_backward_hooks.setter
    def _backward_hooks(self, hooks: Any) -> None:
        self._refuse_hook()
        torch_api.backward_hooks.__set__(self, hooks)
        self._touched[0] = True

    @property
    def _post_accumulate_grad_hooks(self) -> Any:
        return torch_api.post_accumulate_grad_hooks.__get__(self)

    @_post_accumulate_grad_hooks.setter
    def _post_accumulate_grad_hooks(self, hooks: Any) -> None:
        self._refuse_hook()
        raise InputError(
            "a post-accumulate-grad hook would never run: this call does not fill .grad. Use register_hook, which gets the gradient"
        )

    def _refuse_hook(self) -> None:
        """Raise :class:`InputError` if a hook on this parameter's gradient could not be run."""

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """Return an independent parameter without hooks, as for any ``Parameter``."""
        if id(self) not in memo:
            memo[id(self)] = nn.Parameter(self.detach().clone(memory_format=torch.preserve_format), self.requires_grad)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return nn.Parameter(self.detach(), self.requires_grad).__reduce_ex__(protocol)


class StepParameter(BoundParameter):
    """A parameter of a compiled step. The export fixed whether it is trained, and with which gradient."""

    _no_hook = ""  # the reason why hooks cannot run, if so

    @property
    def requires_grad(self) -> bool:
        return torch_api.requires_grad.__get__(self)

    @requires_grad.setter
    def requires_grad(self, flag: bool) -> None:
        if flag != self.requires_grad:
            raise InputError(
                "the set of trained parameters is fixed in the compiled step; export a step without this one in the optimizer"
            )

    def requires_grad_(self, requires_grad: bool = True) -> Any:
        self.requires_grad = requires_grad
        return self

    def _refuse_hook(self) -> None:
        if self._no_hook:
            raise InputError(self._no_hook)


class Watch:
    """The owner's tensors that other code references, and whether memory or metadata of one changed since native code
    was last bound to them.

    Functions that bypass :class:`BoundParameter` (``torch.Tensor.set_(p, …)``), or another tensor of the same storage,
    can give any of them other memory or metadata. A tensor that no other code can reach costs a call nothing.
    """

    __slots__ = ("_addresses", "_check", "_storages", "tensors", "touched")

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        # True: the next call compares all, even if addresses are equal; parameters share this list, not the watch: no
        # cycle
        self.touched = [True]
        self._addresses: list[int] = []
        self._storages = HeldStorages()
        self._check: Callable[..., bool] = lambda *_: False

    def add(self, tensors: Iterable[torch.Tensor]) -> None:
        ids = {id(t) for t in self.tensors}
        new_tensors = [t for t in {id(t): t for t in tensors}.values() if id(t) not in ids]
        if new_tensors:
            self.tensors.extend(new_tensors)
            self.touched[0] = True

    def settle(self, hooks: bool) -> None:
        """Record that native code is now bound to the tensors. ``hooks``: whether some have hooks; then each call
        compares all."""
        self._addresses = list(map(_data_ptr, self.tensors))
        self._storages = HeldStorages(self.tensors)
        if self.tensors:
            self._check = Fast(self.tensors).check
        self.touched[0] = hooks

    def changed(self) -> bool:
        """Return whether the next call must compare all again."""
        if self.touched[0] or list(map(_data_ptr, self.tensors)) != self._addresses:
            return True
        return self._storages.resized() or not self._check(*self.tensors)


_data_ptr = torch.Tensor.data_ptr


def bound(kind: type[BoundParameter], tensor: torch.Tensor, requires_grad: bool, watch: Watch) -> BoundParameter:
    parameter = torch_api.make_subclass(kind, tensor, requires_grad)
    parameter._touched = watch.touched
    return parameter


def resizable(tensor: torch.Tensor) -> bool:
    """Return whether another tensor of the same memory could resize it. Memory that is mapped from a file cannot be
    resized."""
    return tensor.untyped_storage().resizable()


def has_hooks(tensor: torch.Tensor) -> bool:
    """Return whether ``tensor`` has hooks on its gradient. If the last one was removed, reset the tensor so that the
    next registration is noticed."""
    hooks = torch_api.backward_hooks.__get__(tensor)
    if hooks is not None and not hooks and isinstance(tensor, BoundParameter):
        torch_api.backward_hooks.__set__(tensor, None)
    return bool(hooks)


def apply_hooks(tensors: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Return ``gradients`` as changed by the hooks on ``tensors``. Autograd runs the hooks: in its order, in one pass,
    with its checks of their results. Each gets a copy, which it may change or keep."""
    with torch.inference_mode(False), torch.enable_grad():
        views = [t.view_as(t) for t in tensors]
    return torch.autograd.grad(views, tensors, [g.clone() for g in gradients])
