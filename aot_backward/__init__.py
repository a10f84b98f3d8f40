"""PyTorch gradients, compiled ahead of time into native packages.

    import aot_backward as ab
    ab.export_module(net, (x,), path="net.pt2")

Names are loaded when they are first used (PEP 562): importing this imports neither Dynamo nor Inductor.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from aot_backward_exporters.graph import VERSION as __version__

if TYPE_CHECKING:
    from aot_backward_runtime import (
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
        load,
        replay,
    )

    from .api import export, export_function, export_grad, export_module, export_step
    from .commands.sign import sign
    from .derivative_entries import derivatives
    from .entries import Function, Grad, Module, Step, Variant
    from .forcefield_entry import forcefield
    from .onnx.convert import convert
    from .onnx.export import export_onnx
    from .packaging.rebuild import rebuild
    from .recording.record import record

_HOME = dict.fromkeys(("export", "export_function", "export_grad", "export_module", "export_step"), "aot_backward.api")
_HOME |= dict.fromkeys(("Function", "Grad", "Module", "Step", "Variant"), "aot_backward.entries")
_HOME |= dict.fromkeys(
    (
        "AotBackwardError",
        "DistributedError",
        "ExecutionError",
        "ExportError",
        "GradientError",
        "IncompatibleError",
        "InputError",
        "MissError",
        "PackageError",
        "SignatureError",
        "StateDictError",
        "StateError",
        "WeightsError",
        "load",
        "replay",
    ),
    "aot_backward_runtime",
)
_HOME |= {"derivatives": "aot_backward.derivative_entries"}
_HOME |= {
    "convert": "aot_backward.onnx.convert",
    "export_onnx": "aot_backward.onnx.export",
    "forcefield": "aot_backward.forcefield_entry",
}
_HOME |= {
    "rebuild": "aot_backward.packaging.rebuild",
    "record": "aot_backward.recording.record",
    "sign": "aot_backward.commands.sign",
}

__all__ = [
    "AotBackwardError",
    "DistributedError",
    "ExecutionError",
    "ExportError",
    "Function",
    "Grad",
    "GradientError",
    "IncompatibleError",
    "InputError",
    "MissError",
    "Module",
    "PackageError",
    "SignatureError",
    "StateDictError",
    "StateError",
    "Step",
    "Variant",
    "WeightsError",
    "__version__",
    "convert",
    "derivatives",
    "export",
    "export_function",
    "export_grad",
    "export_module",
    "export_onnx",
    "export_step",
    "forcefield",
    "load",
    "rebuild",
    "record",
    "replay",
    "sign",
]


if not TYPE_CHECKING:  # otherwise a type checker would accept any name

    def __getattr__(name: str) -> Any:
        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(_HOME[name]), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
