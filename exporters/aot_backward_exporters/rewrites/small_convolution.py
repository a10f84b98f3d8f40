"""Convolutions of little data, and their gradients, as batched products in the place of eager's kernel.

The kernel (oneDNN's) puts input, weight and result into an order of its own at each call, and the weight of a model that is trained is another one
each time: some 50 µs before anything is computed, and 50 to 100 for a gradient. Copying the windows of the input side by side, which is all that the
products need, takes less where there is little to copy.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule, Node

from .. import torch_api
from ..fx_splice import hint, spliced, with_strides
from . import convolution_products as products

aten = torch.ops.aten
NUMBERS = 160 << 10
"""In the windows of the input, or of the incoming gradient, at most."""
ROWS = 64
"""An open batch counts as so many rows where its example has fewer."""
_FORWARD, _BACKWARD = aten.convolution.default, aten.convolution_backward.default
_LISTS = ("stride", "padding", "dilation", "output_padding")


def by_products(module: GraphModule, fake_mode: Any) -> None:
    """Rewrites ``module`` and the graphs within it."""
    windows: dict[Any, Node] = {}
    for node in list(module.graph.nodes):
        if node.op == "call_function" and node.target in (_FORWARD, _BACKWARD):
            given = _arguments(node)
            if _is_plain(given) and _is_small(given) and (node.target is _FORWARD or _has_convolutions(given)):
                with fake_mode:
                    (_replace_forward if node.target is _FORWARD else _replace_backward)(node, given, windows)
    for _, child in module.named_children():
        if isinstance(child, GraphModule):
            by_products(child, fake_mode)
    module.recompile()


def _arguments(node: Node) -> dict[str, Any]:
    arguments = node.target._schema.arguments  # type: ignore[union-attr]
    given = {**dict(zip([a.name for a in arguments], node.args, strict=False)), **node.kwargs}
    axes = given["weight"].meta["val"].dim() - 2
    return {**given, **{name: list(given[name]) * (axes if len(given[name]) == 1 else 1) for name in _LISTS}}


def _is_plain(given: dict[str, Any]) -> bool:
    """In float32 on a CPU, in the order of batch, channels and positions, of which but the batch is known."""
    x, weight = given["input"].meta["val"], given["weight"].meta["val"]
    if x.device.type != "cpu" or x.dtype != torch.float32 or weight.dtype != torch.float32 or given["groups"] != 1 or given["transposed"]:
        return False
    if x.dim() != weight.dim() or not all(type(size) is int and size > 0 for size in (*x.shape[1:], *weight.shape)):
        return False
    return bool(torch_api.is_contiguous_or_false(x) and torch_api.is_contiguous_or_false(weight))


def _is_small(given: dict[str, Any]) -> bool:
    (rows, channels, *sizes), (out, _, *kernel) = given["input"].meta["val"].shape, given["weight"].meta["val"].shape
    copied = channels * math.prod(_places(given)) + (out * math.prod(sizes) if given.get("output_mask", [False])[0] else 0)
    rows = rows if type(rows) is int else max(hint(rows), ROWS)
    return rows * math.prod(kernel) * copied <= NUMBERS


def _places(given: dict[str, Any]) -> list[int]:
    sizes, kernel = given["input"].meta["val"].shape[2:], given["weight"].meta["val"].shape[2:]
    steps = zip(sizes, kernel, given["stride"], given["padding"], given["dilation"], strict=True)
    return [(size + 2 * p - d * (k - 1) - 1) // s + 1 for size, k, s, p, d in steps]


def _has_convolutions(given: dict[str, Any]) -> bool:
    """Whether the gradient of the input, where it is wanted, is a convolution of the incoming one; and not that of the bias alone is wanted."""
    kernel = given["weight"].meta["val"].shape[2:]
    fits = all(p <= d * (k - 1) for p, d, k in zip(given["padding"], given["dilation"], kernel, strict=True))
    mask = given["output_mask"]
    return fits and all(s == 1 for s in given["stride"]) if mask[0] else mask[1]


def _replace_forward(node: Node, given: dict[str, Any], windows: dict[Any, Node]) -> None:
    """``windows``: what is found of each input, for the backward of a forward in the same graph."""
    like, shape = node.meta["val"], _shape(given)

    def called(x: torch.Tensor, weight: torch.Tensor, *bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        covered = products.windows(x, *shape)
        return with_strides(products.forward(covered, weight, bias[0] if bias else None, _places(given)), like), covered

    made, covered = _spliced(node, called, [given["input"], given["weight"], *([] if given["bias"] is None else [given["bias"]])])
    windows[_key(given)] = covered
    node.replace_all_uses_with(made)
    node.graph.erase_node(node)


def _replace_backward(node: Node, given: dict[str, Any], windows: dict[Any, Node]) -> None:
    known, mask, shape = windows.get(_key(given)), given["output_mask"], _shape(given)
    of_input, of_weight, of_bias = mask

    def called(grad: torch.Tensor, weight: torch.Tensor, *given_x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        results = []
        if of_input:
            results.append(products.of_input(grad, weight, given["padding"], given["dilation"]))
        if of_weight:
            results.append(products.of_weight(grad, given_x[0] if known is not None else products.windows(given_x[0], *shape), weight))
        if of_bias:
            results.append(grad.sum([0, *range(2, grad.dim())]))
        wanted = [like for like, asked in zip(node.meta["val"], mask, strict=True) if asked]
        return tuple(with_strides(result, like) for result, like in zip(results, wanted, strict=True))

    covered = [given["input"] if known is None else known] if of_weight else []
    made = iter(_spliced(node, called, [given["grad_output"], given["weight"], *covered]))
    results = [next(made) if asked else None for asked in mask]
    for user in list(node.users):
        assert user.target is operator.getitem
        result = results[user.args[1]]  # type: ignore[index]
        if result is not None:
            user.replace_all_uses_with(result)
        node.graph.erase_node(user)
    node.graph.erase_node(node)


def _spliced(node: Node, called: Callable[..., tuple[torch.Tensor, ...]], operands: list[Node]) -> list[Node]:
    return spliced(node, called, operands, {operand: operand.meta["val"] for operand in operands})[0]


def _shape(given: dict[str, Any]) -> tuple[list[int], ...]:
    """Kernel, stride, padding and dilation."""
    return list(given["weight"].meta["val"].shape[2:]), given["stride"], given["padding"], given["dilation"]


def _key(given: dict[str, Any]) -> Any:
    return given["input"], *map(tuple, _shape(given))
