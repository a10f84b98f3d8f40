"""Who is called when a script calls a module: the outermost call goes to the interceptor that was entered last, and those within it where the
interceptor makes it by :func:`opened`. A module that has nothing to serve, neither parameters nor submodules, is not asked about.

While one is entered, ``nn.Module.__call__`` asks it, and assignments to modules and registrations of hooks are counted, so that what was
bound to a module is looked at again: by each of those that are bound to it, so that nothing is crossed off.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

Plain = Callable[..., Any]
"""PyTorch's own call of a module: ``plain(module, *args, **kwargs)``."""


class Interceptor(Protocol):
    def module_call(self, module: nn.Module, plain: Plain, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Makes the call, and returns what the module would."""


class _Here(threading.local):
    inside = False
    depth = 0


_stack: list[Interceptor] = []
_lock = threading.Lock()
_here = _Here()
_replaced: dict[type, dict[str, Any]] = {}
_TRANSPARENT = (nn.parallel.DistributedDataParallel, nn.DataParallel)
"""Wrappers: what they wrap is the outermost module."""
_CHANGES = ("__delattr__", "add_module", "register_parameter", "register_buffer")
_ABSENT = object()

assignments: dict[int, int] = {}
"""By the ``id`` of a module of :data:`watched`, how often something other than it had was assigned to it."""
switches: dict[int, int] = {}
"""Likewise, how often its mode was set to the other one: ``train()`` sets it in every module, and some training loops call it in every step."""
noted = [0]
"""How many of both there were."""
unheard: dict[int, int] = {}
"""Of modules, by ``id``, how many of the next calls within another one do not come to the interceptor. Who notes one takes it out when it dies."""
watched: set[int] = set()
registrations = [0]
"""How many hooks were registered so far, of any kind."""


def enter(interceptor: Interceptor) -> None:
    with _lock:
        if not _stack:
            _replaced[nn.Module] = {name: vars(nn.Module)[name] for name in ("__call__", "__setattr__", *_CHANGES)}
            _replaced[RemovableHandle] = {"__init__": vars(RemovableHandle)["__init__"]}
            for name in _CHANGES:
                setattr(nn.Module, name, _noting(_replaced[nn.Module][name]))
            nn.Module.__setattr__ = _comparing(_replaced[nn.Module]["__setattr__"])  # type: ignore[method-assign]
            RemovableHandle.__init__ = _counting(_replaced[RemovableHandle]["__init__"])  # type: ignore[method-assign]
            nn.Module.__call__ = _asking(_replaced[nn.Module]["__call__"])  # type: ignore[method-assign]
        unheard.clear()
        _stack.append(interceptor)


def leave(interceptor: Interceptor) -> None:
    with _lock:
        _stack.remove(interceptor)
        unheard.clear()
        if not _stack:
            for kind, own in _replaced.items():
                for name, value in own.items():
                    setattr(kind, name, value)
            _replaced.clear()
            watched.clear()
            assignments.clear()
            switches.clear()


def opened(module: nn.Module, plain: Plain, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``plain``, called by an interceptor: the calls of modules within it come to the interceptor, too."""
    _here.inside, _here.depth = False, _here.depth + 1
    try:
        return plain(module, *args, **kwargs)
    finally:
        _here.inside, _here.depth = True, _here.depth - 1


def depth() -> int:
    """How many opened calls there are around this one, in this thread."""
    return _here.depth


def _is_bare(module: nn.Module) -> bool:
    """Whether it has neither parameters nor submodules, as a loss or an activation: such a call is as one that the interceptor opens."""
    own = module.__dict__
    return "_parameters" in own and "_modules" in own and not own["_parameters"] and not own["_modules"]


def _is_unheard(module: nn.Module) -> bool:
    left = unheard.get(id(module), 0)
    if left:
        unheard[id(module)] = left - 1
    return left > 0


def _asking(plain: Plain) -> Plain:
    def asked(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if _here.inside or (_here.depth and _is_unheard(self)):
            return plain(self, *args, **kwargs)
        if torch.compiler.is_compiling() or isinstance(self, _TRANSPARENT):
            return plain(self, *args, **kwargs)
        if _is_bare(self):
            _here.depth += 1
            try:
                return plain(self, *args, **kwargs)
            finally:
                _here.depth -= 1
        innermost = _stack[-1:]  # another thread may leave its context meanwhile
        if not innermost:
            return plain(self, *args, **kwargs)
        _here.inside = True
        try:
            return innermost[0].module_call(self, plain, args, kwargs)
        finally:
            _here.inside = False

    return asked


def _noting(plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def changed(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if id(self) in watched:
            _note(assignments, self)
        return plain(self, *args, **kwargs)

    return changed


def _comparing(plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def compared(self: nn.Module, name: str, value: Any) -> None:
        if id(self) in watched and self.__dict__.get(name, _ABSENT) is not value:
            _note(switches if name == "training" else assignments, self)
        plain(self, name, value)

    return compared


def _note(counts: dict[int, int], module: nn.Module) -> None:
    counts[id(module)] = counts.get(id(module), 0) + 1
    noted[0] += 1


def _counting(plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def counted(self: RemovableHandle, *args: Any, **kwargs: Any) -> None:
        registrations[0] += 1
        plain(self, *args, **kwargs)

    return counted
