"""All decompositions, by operator."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from .. import torch_api
from . import attention, convolution, elementwise, exponentials, indexing, layers, pooling, reductions, shapes

_TABLES = (attention, convolution, elementwise, exponentials, indexing, layers, pooling, reductions, shapes)


@functools.cache
def ours() -> Mapping[Any, Callable[..., Any]]:
    """Each takes an operator's arguments, and returns its results or ``NotImplemented``."""
    _ = torch_api.partition_fn  # registers Inductor's own operators, such as prims.fma
    return {_operator(name): function for table in _TABLES for name, function in table.DECOMPOSITIONS.items()}


def _operator(name: str) -> Any:
    namespace, packet, overload = name.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload)
