"""Operators that misbehave in different ways, for the tests of this tool: ``--only faults``."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
from torch.testing._internal.common_dtype import floating_types
from torch.testing._internal.opinfo.core import OpInfo, SampleInput


def _sample(info: Any, device: str, dtype: torch.dtype, requires_grad: bool, **_: Any) -> list[SampleInput]:
    return [SampleInput(torch.randn(3, 4, device=device, dtype=dtype).requires_grad_(requires_grad))]


class _Dishonest(torch.autograd.Function):
    """Its backward returns a different gradient under tracing than in eager."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * (3 if torch.compiler.is_compiling() else 2)


def aborts(x: torch.Tensor) -> torch.Tensor:
    os.abort()


def aborts_while_traced(x: torch.Tensor) -> torch.Tensor:
    if torch.compiler.is_compiling():
        os.abort()
    return x.sin()


def hangs_while_traced(x: torch.Tensor) -> torch.Tensor:
    if torch.compiler.is_compiling():
        time.sleep(1000)
    return x.sin()


def data_dependent(x: torch.Tensor) -> torch.Tensor:
    return x.sin() if x.sum() > 0 else x.cos()


def no_gradient(x: torch.Tensor) -> torch.Tensor:
    return x.detach() + 1


def sound(x: torch.Tensor) -> torch.Tensor:
    return x.sin() * x


_FUNCTIONS = {
    "aborts": aborts,
    "aborts_while_traced": aborts_while_traced,
    "hangs_while_traced": hangs_while_traced,
    "data_dependent": data_dependent,
    "no_gradient": no_gradient,
    "dishonest": _Dishonest.apply,
    "sound": sound,
}

OPERATORS = {
    name: OpInfo(name, op=function, sample_inputs_func=_sample, dtypes=floating_types(), supports_autograd=True)
    for name, function in _FUNCTIONS.items()
}
