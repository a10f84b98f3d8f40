"""The origin of a backward pass: the script's line that called it."""

from __future__ import annotations

import sys
import types

PASSED_OVER = ("torch", "aot_backward_runtime", "aot_backward")


def line(*, within: types.CodeType | None = None) -> str:
    """Return the innermost line outside of torch and this project. ``within``: return "" if no such line is inside a
    call of that function."""
    frame = sys._getframe(1)
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).partition(".")[0] in PASSED_OVER:
        if frame.f_code is within:
            return ""
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
