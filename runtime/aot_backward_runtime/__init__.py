"""Runs packages of ahead-of-time compiled PyTorch gradients.

    import aot_backward_runtime
    model = aot_backward_runtime.load("model.pt2").module()
    model(x).sum().backward()

Nothing here imports Dynamo or Inductor, and no compiler is started.
"""

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
from .loader import Package, load
from .replay import replay

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
