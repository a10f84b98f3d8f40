"""What Python does in a call of a module: which functions of user code run, and whether something happens that compiled code would leave out."""

from __future__ import annotations

import random
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from aot_backward_runtime.module_calls.plain_values import is_known

_SAYS: dict[Any, str] = {print: "prints", input: "reads from standard input", open: "opens a file"}
_MODULES = {"time": "asks for the time", "random": "draws from Python's random numbers", "secrets": "draws random numbers"}


class WatchedCall:
    """``functions``: ``module:qualname`` of the functions of user code that ran. ``refused``: what a compiled call would leave out, or ""."""

    def __init__(self, *, first: bool) -> None:
        """``first``: of its kind: what it logs may be said once."""
        self.first = first
        self.functions: set[str] = set()
        self.refused = ""

    @contextmanager
    def watching(self) -> Iterator[None]:
        before, states = sys.getprofile(), _random_states()
        sys.setprofile(self._event)
        try:
            yield
        finally:
            sys.setprofile(before)
        if not self.refused and _random_states() != states:
            self.refused = "draws random numbers that are not torch's"

    def _event(self, frame: types.FrameType, event: str, argument: Any) -> None:
        module = str(frame.f_globals.get("__name__"))
        if event == "call":
            code = frame.f_code
            if says := _MODULES.get(module.partition(".")[0]):
                self._refuse(says)
            elif not self.first and code.co_qualname == "Logger._log" and module == "logging":
                self._refuse("logs")
            if not is_known(module) and code.co_qualname != "<module>" and not _is_generated(module, code):
                self.functions.add(f"{module}:{code.co_qualname}")
        elif event == "c_call" and not is_known(module) and isinstance(argument, types.BuiltinFunctionType):
            of = argument.__module__ or type(argument.__self__).__module__
            if says := _SAYS.get(argument) or _MODULES.get(str(of).lstrip("_")):
                self._refuse(says)

    def _refuse(self, says: str) -> None:
        self.refused = self.refused or says


def _is_generated(module: str, code: types.CodeType) -> bool:
    """Whether the standard library wrote it for a named tuple or a dataclass."""
    return code.co_filename == "<string>" and (module.startswith("namedtuple_") or code.co_name.startswith("__"))


def _random_states() -> Any:
    numpy = sys.modules.get("numpy")
    theirs = numpy.random.get_state() if numpy is not None else ("", b"")
    return random.getstate(), theirs[0], bytes(theirs[1]), tuple(theirs[2:])
