"""Small convolutions and their gradients, as batched products instead of eager's kernel.

The kernel (oneDNN's) reorders input, weight and result at each call, and a weight in training changes each time: some
50 µs before it computes anything, and 50 to 100 for a gradient. The products only need the windows of the input copied
side by side, which takes less time for small inputs. A dynamic batch may be small or large: then each call chooses, by
its rows.

The products multiply the zeros around the input, which the kernel skips: if a weight or an incoming gradient is Inf or
NaN, results at the border may be NaN that are finite or Inf in eager. This only affects tensors that contain an Inf or
a NaN in eager, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule, Node

from .. import torch_api
from ..fx_splice import SPLICED, at_most, has_hints, hint, replace_results, spliced, with_strides
from . import convolution_products as products
from .graph_edit import arguments

aten = torch.ops.aten
_MAX_WINDOW_NUMBERS = 256 << 10
"""Maximum numbers in the windows of the input; if the input's gradient is needed, too, the mean of these and of the
windows of the incoming gradient. With half as many a convolution and its gradients take 0.2 to 0.8 of the kernel's time
(two threads: 0.2 to 0.9), with as many 0.3 to 1.0, with half more 0.5 to 1.2."""
WEIGHT = 16 << 10
"""Maximum numbers in the weight, which the gradients copy and reorder. A 3 by 3 convolution from 128 channels to 128
(147,456 numbers) on one image of 4 by 4 took 1.3 times as long as by the kernel."""
_FORWARD, _BACKWARD = aten.convolution.default, aten.convolution_backward.default
_LISTS = ("stride", "padding", "dilation", "output_padding")
_OPTIONS = ("stride", "padding", "dilation", "transposed", "output_padding", "groups")


def by_products(module: GraphModule, fake_mode: Any) -> None:
    """Rewrite the graph of ``module``."""
    if SPLICED in module.meta:  # its convolution is for many rows
        return
    for node in list(module.graph.nodes):
        if node.op == "call_function" and node.target in (_FORWARD, _BACKWARD):
            args = _arguments(node)
            if (
                _is_plain(args)
                and (node.target is _FORWARD or _can_be_products(args))
                and (max_rows := _most_rows(args))
            ):
                with fake_mode:
                    (_replace_forward if node.target is _FORWARD else _replace_backward)(
                        node, args, max_rows, fake_mode
                    )


def _arguments(node: Node) -> dict[str, Any]:
    args = arguments(node)
    axes = args["weight"].meta["val"].dim() - 2
    return {**args, **{name: list(args[name]) * (axes if len(args[name]) == 1 else 1) for name in _LISTS}}


def _is_plain(args: dict[str, Any]) -> bool:
    """Return whether it is in float32 on a CPU, neither grouped nor transposed, in the order of batch, channels and
    positions. The batch may be dynamic."""
    x, weight = args["input"].meta["val"], args["weight"].meta["val"]
    if (
        x.device.type != "cpu"
        or x.dtype != torch.float32
        or weight.dtype != torch.float32
        or args["groups"] != 1
        or args["transposed"]
    ):
        return False
    if x.dim() != weight.dim() or not all(type(size) is int and size > 0 for size in (*x.shape[1:], *weight.shape)):
        return False
    return bool(torch_api.is_contiguous_or_false(x) and torch_api.is_contiguous_or_false(weight))


def _most_rows(args: dict[str, Any]) -> float:
    """Return the maximum rows for products: 0 for none, also if the example has more; infinity if every possible number
    is below the limit."""
    rows, channels, *sizes = args["input"].meta["val"].shape
    out, _, *kernel = args["weight"].meta["val"].shape
    if (
        math.prod(kernel) == 1
        or args["weight"].meta["val"].numel() > WEIGHT
        or not has_hints(args["input"].meta["val"])
    ):
        return 0  # for a kernel of one number, the library's is a product already
    of_input = math.prod(kernel) * channels * math.prod(_shape(args).places(sizes))
    of_grad = math.prod(kernel) * out * math.prod(sizes)
    wants_input = "output_mask" in args and args["output_mask"][0]
    max_rows = 2 * _MAX_WINDOW_NUMBERS // (of_input + of_grad) if wants_input else _MAX_WINDOW_NUMBERS // of_input
    if at_most(rows) <= max_rows:
        return math.inf
    return max_rows if hint(rows) <= max_rows else 0


def _can_be_products(args: dict[str, Any]) -> bool:
    """Return whether a backward can be products: the input's gradient, if needed, must be a convolution of the incoming
    one. If only the bias's is requested, eager's kernel also returns the weight's, so it stays."""
    shape, mask = _shape(args), args["output_mask"]
    fits = all(p <= d * (k - 1) and s == 1 for k, s, p, d in zip(*shape, strict=True))
    return fits if mask[0] else mask[1]


def _shape(args: dict[str, Any]) -> products.Shape:
    return products.Shape(list(args["weight"].meta["val"].shape[2:]), args["stride"], args["padding"], args["dilation"])


def _replace_forward(node: Node, args: dict[str, Any], max_rows: float, fake_mode: Any) -> None:
    options = [args[name] for name in _OPTIONS]

    def by_products(x: torch.Tensor, weight: torch.Tensor, *bias: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (with_strides(products.forward(x, weight, bias[0] if bias else None, _shape(args)), node.meta["val"]),)

    def by_kernel(x: torch.Tensor, weight: torch.Tensor, *bias: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with torch_api.unguarded(fake_mode):
            return (_FORWARD(x, weight, bias[0] if bias else None, *options),)

    operands = [args["input"], args["weight"], *([] if args["bias"] is None else [args["bias"]])]
    (result,) = _spliced(node, _by_rows(max_rows, by_products, by_kernel), operands)
    node.replace_all_uses_with(result)
    node.graph.erase_node(node)


def _replace_backward(node: Node, args: dict[str, Any], max_rows: float, fake_mode: Any) -> None:
    mask, shape, options = args["output_mask"], _shape(args), [args[name] for name in _OPTIONS]

    def by_products(grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        makers = (
            lambda: products.of_input(grad, weight, shape),
            lambda: products.of_weight(grad, x, weight, shape),
            lambda: grad.sum([0, *range(2, grad.dim())]),
        )
        return tuple(
            with_strides(make(), value)
            for make, value, needs_grad in zip(makers, node.meta["val"], mask, strict=True)
            if needs_grad
        )

    def by_kernel(grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with torch_api.unguarded(fake_mode):
            results = _BACKWARD(grad, x, weight, args["bias_sizes"], *options, mask)
        return tuple(result for result, needs_grad in zip(results, mask, strict=True) if needs_grad)

    operands = [args["grad_output"], args["input"], args["weight"]]
    gradients = iter(_spliced(node, _by_rows(max_rows, by_products, by_kernel), operands))
    replace_results(node, [next(gradients) if needs_grad else None for needs_grad in mask])


_Function = Callable[..., tuple[torch.Tensor, ...]]


def _by_rows(max_rows: float, few: _Function, many: _Function) -> _Function:
    """Return ``few`` if the first argument has at most ``max_rows`` rows, else ``many``: decided here, or by each
    call."""
    if max_rows == math.inf:
        return few
    return lambda *operands: torch.ops.higher_order.cond(operands[0].shape[0] <= max_rows, few, many, operands)


def _spliced(node: Node, called: _Function, operands: list[Node]) -> list[Node]:
    return spliced(node, called, operands, {operand: operand.meta["val"] for operand in operands})[0]
