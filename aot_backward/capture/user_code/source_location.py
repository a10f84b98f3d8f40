"""Places in the user's code, in the form of error messages:
``in forward of 'body.0' (model.py:12: if h.sum() > 0:)``."""

from __future__ import annotations

import contextlib
import functools
import inspect
import linecache
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import torch
from torch import nn

import aot_backward_runtime
from aot_backward_exporters import torch_api
from aot_backward_exporters.graph import Line
from aot_backward_runtime.errors import AotBackwardError, ExportError

from .. import preserve

# These are below the standard library's folder
_INSTALLED = tuple(sysconfig.get_path(name) + "/" for name in ("purelib", "platlib"))
_STANDARD = sysconfig.get_path("stdlib") + "/"
_OURS = tuple(
    f"{Path(file).parent}/"
    for file in (torch.__file__, aot_backward_runtime.__file__, torch_api.__file__, Path(__file__).parents[1])
)


def of(function: Callable[..., Any]) -> str:
    """Return the name of ``function``, with its file and line."""
    while isinstance(function, functools.partial):
        function = function.func
    inner = inspect.unwrap(function)
    code = getattr(inner, "__code__", None) or getattr(type(inner).__call__, "__code__", None)
    name = getattr(inner, "__qualname__", type(inner).__qualname__).replace("<locals>.", "")
    return f"{name} ({Path(code.co_filename).name}:{code.co_firstlineno})" if code else name


def here(program: nn.Module | None = None) -> str:
    """Return the user's line that runs now."""
    return described(reversed(list(traceback.walk_stack(sys._getframe(1)))), program)


def of_error(error: BaseException, program: nn.Module) -> str:
    """Return the user's line that raised ``error``; if there is none, the module of PyTorch that did; or ""."""
    if where := described(traceback.walk_tb(error.__traceback__), program):
        return where
    names = {id(module): name for name, module in program.named_modules()}
    owners = [o for frame, _ in traceback.walk_tb(error.__traceback__) if id(o := frame.f_locals.get("self")) in names]
    return (
        f"in forward of {names[id(owners[-1])]!r} ({type(owners[-1]).__name__})"
        if owners and names[id(owners[-1])]
        else ""
    )


def packages_of(error: BaseException) -> set[str]:
    """Return the names of the packages in the traceback of ``error``."""
    return {
        str(frame.f_globals.get("__name__")).partition(".")[0] for frame, _ in traceback.walk_tb(error.__traceback__)
    }


def passes_through(error: BaseException, package: ModuleType) -> bool:
    """Return whether code of ``package`` is in the traceback of ``error``."""
    names = (str(frame.f_globals.get("__name__")) for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(f"{name}.".startswith(f"{package.__name__}.") for name in names)


def of_operator(name: str, program: nn.Module, args: Any, kwargs: Any) -> str:
    """Run the program in eager and return the user's line that calls the operator ("aten.index.Tensor"), or "" if it is
    not user code."""
    lines: list[str] = []

    class Watching(torch_api.TorchDispatchMode):
        def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if not lines and str(operator) == name:
                lines.append(here(program))
            return operator(*args, **(kwargs or {}))

    saved = [(b, b.detach().clone()) for b in program.buffers()]
    try:
        with preserve.slots_kept(program), preserve.random_state_kept(), contextlib.suppress(Exception), Watching():
            program(*args, **kwargs)
    finally:
        with torch.no_grad():
            for buffer, value in saved:
                buffer.copy_(value)
    return lines[0] if lines else ""


@contextlib.contextmanager
def errors_located(program: nn.Module, args: Any, kwargs: Any) -> Iterator[None]:
    """Add the user's line that calls the operator to an :class:`ExportError` that names one."""
    try:
        yield
    except ExportError as error:
        where = of_operator(error.operator, program, args, kwargs) if error.operator else ""
        if not where:
            raise
        raise ExportError.of(error.operator, f"{error}; it is called {where}") from error
    except AotBackwardError:
        raise
    except Exception as error:  # from torch's partitioner or compiler, or from ours
        cause = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
        raise ExportError(
            f"the program was traced, but it could not be compiled: {type(error).__name__}: {cause}. This is a bug in aot-backward or PyTorch: "
            "please report it, with the program. A static size, or another way to write the part that the message names, may help"
        ) from error


def described(stack: Iterable[tuple[FrameType, int]], program: nn.Module | None = None) -> str:
    """Return the user's innermost line on ``stack``, which begins with the outermost frame, or ""."""
    user_frames = [(frame, line) for frame, line in stack if is_user_code(frame.f_code.co_filename)]
    if not user_frames:
        return ""
    frame, line = user_frames[-1]
    file, modules = frame.f_code.co_filename, program.named_modules() if program is not None else ()
    owner = next((name for name, module in modules if name and module is frame.f_locals.get("self")), "")
    return of_line(Line(file, line, frame.f_code.co_name, linecache.getline(file, line).strip(), owner))


def of_line(line: Line) -> str:
    where = f" ({Path(line.file).name}:{line.number}{f': {line.text}' if line.text else ''})" if line.file else ""
    return f"in {line.function or 'forward'}{f' of {line.module!r}' if line.module else ''}{where}"


def is_user_code(file: str) -> bool:
    return not file.startswith(("<", *_OURS)) and (file.startswith(_INSTALLED) or not file.startswith(_STANDARD))
