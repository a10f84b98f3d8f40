"""Graphs with matrix products that may be oneDNN's (:mod:`..toolchain.products`)."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch.fx import GraphModule

Products = Literal["", "static", "open"]
"""Large products of a graph: none, of static sizes, or some of open sizes."""

_LEAST = 2**23  # multiplications, as in products.h
_OPEN_SIZE = 1024  # a guess at a batch, or at a number of atoms


def large_products(module: GraphModule) -> Products:
    """Return whether ``module`` has products of float32 matrices that are large enough for oneDNN. Others keep the call of PyTorch's ``mm``."""
    sizes = [size for child in module.modules() if isinstance(child, GraphModule) for size in _sizes(child)]
    if not any(math.prod(_OPEN_SIZE if isinstance(s, torch.SymInt) else s for s in each) >= _LEAST for each in sizes):
        return ""
    return "open" if any(isinstance(s, torch.SymInt) for each in sizes for s in each) else "static"


def _sizes(module: GraphModule) -> list[tuple[Any, ...]]:
    """Return rows, inner size and columns of each product."""
    products = []
    for node in module.graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default):
        left, right = (argument.meta["val"] for argument in node.args[:2])
        if left.dtype == torch.float32 and left.device.type == "cpu":
            products.append((*left.shape, right.shape[1]))
    return products
