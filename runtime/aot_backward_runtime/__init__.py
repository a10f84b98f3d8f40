"""Runs packages of ahead-of-time compiled PyTorch gradients.

    import aot_backward_runtime
    model = aot_backward_runtime.load("model.pt2").module()
    model(x).sum().backward()

Nothing here imports Dynamo or Inductor, and no compiler is started. What needs torch is imported when it is first used
(PEP 562): ``aot_backward_runtime.format`` and ``aot_backward_runtime.package`` read packages in a Python without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .errors import (
    AotBackwardError,
    DistributedError,
    ExecutionError,
    ExportError,
    GradientError,
    IncompatibleError,
    InputError,
    MissError,
    PackageError,
    SignatureError,
    StateDictError,
    StateError,
    WeightsError,
)

if TYPE_CHECKING:
    from .loader import Package, load
    from .passes.session import replay

__version__ = "0.1.0"
__all__ = [
    "AotBackwardError",
    "DistributedError",
    "ExecutionError",
    "ExportError",
    "GradientError",
    "IncompatibleError",
    "InputError",
    "MissError",
    "Package",
    "PackageError",
    "SignatureError",
    "StateDictError",
    "StateError",
    "WeightsError",
    "load",
    "replay",
]

_HOME = {"Package": "loader", "load": "loader", "replay": "passes.session"}


if not TYPE_CHECKING:  # a type checker would take any name for one that is here

    def __getattr__(name: str) -> Any:
        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
