"""All decompositions, by operator."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from .. import torch_api
from . import (
    attention,
    convolution,
    distances,
    elementwise,
    exponentials,
    indexing,
    layers,
    pooling,
    reductions,
    shapes,
)

_TABLES = (attention, convolution, distances, elementwise, exponentials, indexing, layers, pooling, reductions, shapes)


@functools.cache
def ours() -> dict[Any, Callable[..., Any]]:
    """Return the decompositions. Each takes an operator's arguments, and returns its results or ``NotImplemented``."""
    _ = torch_api.partition_fn  # registers Inductor's own operators, such as prims.fma
    return {_operator(name): function for table in _TABLES for name, function in table.DECOMPOSITIONS.items()}


@functools.cache
def everywhere() -> dict[Any, Callable[..., Any]]:
    """Return the decompositions for targets without PyTorch's own translations."""
    return ours() | {_operator(name): function for name, function in pooling.WITHOUT_TORCHLIB.items()}


def _operator(name: str) -> Any:
    namespace, packet, overload = name.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload)
