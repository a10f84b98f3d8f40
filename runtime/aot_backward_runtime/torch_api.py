"""Every private torch name that the runtime uses, and the versions in which each was seen. None of them imports Dynamo or Inductor."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor
from torch._C import _functions, _functorch
from torch._C import _get_deterministic_algorithms as deterministic  # the public one is a Python function of five times the cost
from torch._C import _get_float32_matmul_precision as matmul_precision
from torch._C._aoti import AOTIModelContainerRunnerCpu
from torch._C._dynamo.eval_frame import (
    _FrameAction,
    _FrameExecStrategy,
    get_eval_frame_callback,
    set_code_exec_strategy,
    set_eval_frame,
)
from torch._C._dynamo.guards import TensorGuards

SEEN_IN = ("2.11", "2.12", "2.13")  # 2.13 runs in CI, 2.11 on the GPU machine, 2.12 was read

is_functorch_wrapped = _functorch.is_functorch_wrapped_tensor
DelayedError = _functions.DelayedError
make_subclass = Tensor._make_subclass

__all__ = [
    "AOTIModelContainerRunnerCpu",
    "DelayedError",
    "TensorGuards",
    "deterministic",
    "is_functorch_wrapped",
    "make_subclass",
    "matmul_precision",
    "opaque_to_dynamo",
    "runner",
]

Function = TypeVar("Function", bound=Callable[..., Any])


def opaque_to_dynamo(function: Function) -> Function:
    """Like ``torch.compiler.disable``, which would import Dynamo: inside a compiled caller the call is a graph break, and runs as it is."""

    @functools.wraps(function)
    def outside(*args: Any, **kwargs: Any) -> Any:
        if get_eval_frame_callback() is None:  # no Dynamo in this thread
            return function(*args, **kwargs)
        callback = set_eval_frame(None)
        try:
            return function(*args, **kwargs)
        finally:
            set_eval_frame(callback)

    set_code_exec_strategy(outside.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.DEFAULT))  # type: ignore[attr-defined]
    outside._torchdynamo_disable = True  # type: ignore[attr-defined]
    return outside  # type: ignore[return-value]


def runner(library: str, device: str) -> Any:
    """Opens a compiled library on ``device`` ("cpu" or "cuda:0"), one instance of the model."""
    if device == "cpu":
        return AOTIModelContainerRunnerCpu(library, 1)
    from torch._C._aoti import AOTIModelContainerRunnerCuda  # only CUDA builds of torch have it

    return AOTIModelContainerRunnerCuda(library, 1, device)
