"""The origin of a backward pass: the script's line that called it, and the layers of the parameters that it reaches."""

from __future__ import annotations

import gc
import sys
import types
import weakref

import torch
from torch import nn

PASSED_OVER = ("torch", "aot_backward_runtime", "aot_backward")
_SEARCHES = 16  # searches of all objects, by one Layers: bounds the time that misses take; a guess


def line(*, within: types.CodeType | None = None) -> str:
    """Return the innermost line outside of torch and this project. ``within``: return "" if no such line is inside a call of that function."""
    frame = sys._getframe(1)
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).partition(".")[0] in PASSED_OVER:
        if frame.f_code is within:
            return ""
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


class Layers:
    """Names of parameters in the living modules. The search visits every object, so it only runs after a miss."""

    def __init__(self) -> None:
        self._names: dict[int, tuple[weakref.ref[torch.Tensor], str]] = {}
        self._left = _SEARCHES

    def name(self, leaf: torch.Tensor) -> str:
        """Return a name such as ``Net.encoder.0.weight``, or "" if no module has it."""
        entry = self._names.get(id(leaf))
        if (entry is None or entry[0]() is not leaf) and self._left > 0:
            self._left -= 1
            self._search()
            entry = self._names.get(id(leaf))
        return entry[1] if entry is not None and entry[0]() is leaf else ""

    def _search(self) -> None:
        modules = [m for m in gc.get_objects() if issubclass(type(m), nn.Module)]
        children = {id(child) for m in modules for child in m.children()}
        self._names = {
            id(p): (weakref.ref(p), f"{type(root).__qualname__}.{name}")
            for root in modules
            if id(root) not in children
            for name, p in root.named_parameters(remove_duplicate=False)
        }
