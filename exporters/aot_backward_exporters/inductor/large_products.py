"""Graphs with matrix products that may be oneDNN's (:mod:`..toolchain.products`)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.fx import GraphModule

from ..toolchain.products import LEAST_LOOP_WEIGHT

_LEAST = 2**23
"""Multiplications from which on oneDNN is faster on the processors that use it. Below, it has 0.2 to 1.0 of MKL's
speed."""
_LEAST_DYNAMIC = 2**27
"""The same if a size is dynamic: oneDNN compiles code for each new size in 0.2 to 0.8 ms. A product of 2^27
multiplications takes MKL 2.7 ms."""
_DYNAMIC_SIZE = 1024  # a guess at a batch, or at a number of atoms


def least(module: GraphModule) -> int:
    """Return the multiplications from which on a product of ``module`` may be oneDNN's; 0 if it has none so large, and
    no loop a large weight."""
    in_loops = [size for child in module.children() if isinstance(child, GraphModule) for size in _sizes(child)]
    sizes = _sizes(module) + in_loops
    are_large = any(_product(each) >= _LEAST for each in sizes) or any(
        _product(each[1:]) >= LEAST_LOOP_WEIGHT for each in in_loops
    )
    if not are_large:
        return 0
    return _LEAST_DYNAMIC if any(isinstance(s, torch.SymInt) for each in sizes for s in each) else _LEAST


def _product(sizes: tuple[Any, ...]) -> int:
    return math.prod(_DYNAMIC_SIZE if isinstance(s, torch.SymInt) else s for s in sizes)


def _sizes(module: GraphModule) -> list[tuple[Any, ...]]:
    """Return rows, inner size and columns of each product of float32 matrices."""
    products = []
    for node in module.graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default):
        left, right = (argument.meta["val"] for argument in node.args[:2])
        if left.dtype == torch.float32 and left.device.type == "cpu":
            products.append((*left.shape, right.shape[1]))
    return products
