"""The origin of a backward pass: the script's line that called it, and the layers of the parameters that it reaches."""

from __future__ import annotations

import inspect
import sys
import types
import weakref
from typing import Any

import torch
from torch import nn

PASSED_OVER = ("torch", "aot_backward_runtime", "aot_backward")
_SEARCHES = 16  # searches by one Layers: bounds the time that misses take; a guess


def line(*, within: types.CodeType | None = None) -> str:
    """Return the innermost line outside of torch and this project. ``within``: return "" if no such line is inside a
    call of that function."""
    frame = sys._getframe(1)
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).partition(".")[0] in PASSED_OVER:
        if frame.f_code is within:
            return ""
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


class Layers:
    """Names of parameters in the modules that the calling script holds. The search only runs after a miss."""

    def __init__(self) -> None:
        self._names: dict[int, tuple[weakref.ref[torch.Tensor], str]] = {}
        self._left = _SEARCHES

    def name(self, leaf: torch.Tensor) -> str:
        """Return a name such as ``Net.encoder.0.weight``, or "" if no module within reach has it."""
        entry = self._names.get(id(leaf))
        if (entry is None or entry[0]() is not leaf) and self._left > 0:
            self._left -= 1
            self._search()
            entry = self._names.get(id(leaf))
        return entry[1] if entry is not None and entry[0]() is leaf else ""

    def _search(self) -> None:
        modules = _modules_within_reach()
        children = {id(child) for m in modules for child in m.modules() if child is not m}
        self._names = {
            id(p): (weakref.ref(p), f"{type(root).__qualname__}.{name}")
            for root in modules
            if id(root) not in children
            for name, p in root.named_parameters(remove_duplicate=False)
        }


def _modules_within_reach() -> list[nn.Module]:
    """Return the modules in the variables of the calling functions and their files, in containers there, and in
    attributes of objects there.

    ``gc.get_objects()`` would find all modules. But it also returns tuples that another thread is filling, and the
    thread then fails with a :class:`SystemError` (https://github.com/python/cpython/issues/59313)."""
    values: dict[int, Any] = {}
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if str(frame.f_globals.get("__name__")).partition(".")[0] not in PASSED_OVER:
            variables = frame.f_locals
            values |= {id(v): v for v in (*variables.values(), *list(frame.f_globals.values()))}
            if frame.f_code.co_flags & inspect.CO_OPTIMIZED and type(variables) is dict:
                # A copy that Python up to 3.12 would keep, with the tensors in it, until the function returns
                variables.clear()
        frame = frame.f_back
    for value in list(values.values()):
        if not issubclass(type(value), (types.ModuleType, type, nn.Module)):
            values |= {id(v): v for v in _held(value)}
    return [v for v in values.values() if issubclass(type(v), nn.Module)]


def _held(value: Any) -> list[Any]:
    """Return the items of a container, or the values of an object's attributes. Runs no code of the object's class."""
    if type(value) in (list, tuple):
        return list(value)
    try:
        attributes = value if type(value) is dict else object.__getattribute__(value, "__dict__")
    except AttributeError:
        return []
    return list(attributes.values()) if type(attributes) is dict else []
