"""A package as a file: opened, its parts checked against each other, before any of its code runs. No torch."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    if name in ("Package", "load"):  # this package has the place of the module that had them
        raise ImportError(f"{name} is not in {__name__} any more: from aot_backward_runtime import {name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
