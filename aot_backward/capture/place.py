"""Where in the caller's own code something stands, as error messages say it: ``in forward of 'body.0' (model.py:12: if h.sum() > 0:)``."""

from __future__ import annotations

import functools
import inspect
import linecache
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

import aot_backward_runtime

_INSTALLED = tuple(sysconfig.get_path(name) + "/" for name in ("purelib", "platlib"))  # below the standard library's folder
_STANDARD = sysconfig.get_path("stdlib") + "/"
_OURS = tuple(f"{folder}/" for folder in (Path(torch.__file__).parent, Path(aot_backward_runtime.__file__).parent, Path(__file__).parents[1]))


def of(function: Callable[..., Any]) -> str:
    """``function`` by its name, and where it is written."""
    while isinstance(function, functools.partial):
        function = function.func
    inner = inspect.unwrap(function)
    code = getattr(inner, "__code__", None) or getattr(type(inner).__call__, "__code__", None)
    name = getattr(inner, "__qualname__", type(inner).__qualname__).replace("<locals>.", "")
    return f"{name} ({Path(code.co_filename).name}:{code.co_firstlineno})" if code else name


def here() -> str:
    """The caller's line that runs now."""
    return _worded(reversed(list(traceback.walk_stack(sys._getframe(1)))))


def of_error(error: BaseException, program: nn.Module) -> str:
    """The caller's line on which ``error`` was raised; nothing where none of theirs ran."""
    return _worded(traceback.walk_tb(error.__traceback__), program)


def _worded(stack: Iterable[tuple[FrameType, int]], program: nn.Module | None = None) -> str:
    theirs = [(frame, line) for frame, line in stack if _is_theirs(frame.f_code.co_filename)]
    if not theirs:
        return ""
    frame, line = theirs[-1]
    file, modules = frame.f_code.co_filename, program.named_modules() if program is not None else ()
    owner = next((name for name, module in modules if name and module is frame.f_locals.get("self")), "")
    text = linecache.getline(file, line).strip()
    return f"in {frame.f_code.co_name}{f' of {owner!r}' if owner else ''} ({Path(file).name}:{line}{f': {text}' if text else ''})"


def _is_theirs(file: str) -> bool:
    return not file.startswith(("<", *_OURS)) and (file.startswith(_INSTALLED) or not file.startswith(_STANDARD))
