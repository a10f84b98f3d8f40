"""Values in bfloat16 and float16: selects the values that must be rounded as in eager, and decomposes operators to
round like eager's CPU kernels.

Compiled code keeps fused values in float32. If a comparison, an index or a rounding depends on one, it can select
another element than eager; the gradient is then 0 instead of 1 (pytorch#185517). Therefore all values that a selection
depends on are rounded (:func:`mark_rounded`). Other values are not, because rounding costs time: 16,384 bfloat16
numbers through nine pointwise operators take 103 us rounded and 52 us not rounded on one AVX2 thread, and 81 us in
eager.

Torch's decompositions compute most operators in float32 and round once, as most of eager's kernels do. Some kernels
round in between (``mse_loss`` rounds the difference before it squares it), and some decompositions compute in 16 bits
while the kernel computes in float32 (``lerp``). The functions here were compared with eager on every 16-bit number
between 1e-6 and 1e4.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from . import torch_api
from .graph import ROUNDED

aten = torch.ops.aten

DTYPES = (torch.bfloat16, torch.float16)

Decomposition = Callable[..., Any]

_STEPS = frozenset({
    aten.round, aten.floor, aten.ceil, aten.trunc, aten.frac, aten.sign, aten.sgn, aten.fmod, aten.remainder, aten.floor_divide, aten.heaviside,
})  # fmt: skip
"""Operators with discontinuous floating-point results."""

_UNRELATED = frozenset({aten.native_dropout, aten.rand_like, aten.randn_like})
"""Operators with results that depend only on their input's shape and on random numbers."""


def mark_rounded(graph: GraphModule) -> None:
    """Mark the 16-bit values of ``graph`` that a selection depends on, and values that the program casts to 16 bits and
    back, which is how a program rounds: compiled code rounds them as eager does."""
    stack = [node for node in graph.graph.nodes if _selects(node)]
    ancestors = set(stack)
    while stack:
        inputs = [n for n in stack.pop().all_input_nodes if n not in ancestors]
        ancestors.update(inputs)
        stack += inputs
    for node in graph.graph.nodes:
        if is_in_16_bits(node) and (node in ancestors or (_casts(node) and any(_casts(user) for user in node.users))):
            node.meta[ROUNDED] = True
    for _, child in graph.named_children():
        if isinstance(child, GraphModule):
            mark_all_rounded(child)


def mark_all_rounded(graph: GraphModule) -> None:
    """Mark every 16-bit value of ``graph`` and of its subgraphs."""
    for node in graph.graph.nodes:
        if is_in_16_bits(node):
            node.meta[ROUNDED] = True
    for _, child in graph.named_children():
        if isinstance(child, GraphModule):
            mark_all_rounded(child)


def is_in_16_bits(node: Node) -> bool:
    """Return whether the value of ``node`` is a tensor in bfloat16 or float16."""
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dtype in DTYPES


def computes_in_16_bits(graph: GraphModule) -> bool:
    """Return whether any value of ``graph`` is a tensor in bfloat16 or float16."""
    return any(map(is_in_16_bits, graph.graph.nodes))


def _casts(node: Node) -> bool:
    return node.target in (aten._to_copy.default, torch.ops.prims.convert_element_type.default)


def _selects(node: Node) -> bool:
    """Return whether a small change of an input of ``node`` can change its result by much."""
    if node.op != "call_function" or not any(_is_inexact(n.meta.get("val")) for n in node.all_input_nodes):
        return False
    if isinstance(node.target, torch_api.HigherOrderOperator):
        return True
    packet = getattr(node.target, "overloadpacket", None)
    if packet in _UNRELATED:
        return False
    if packet in _STEPS or node.kwargs.get("rounding_mode"):
        return True
    return any(not _is_inexact(value) for value in pytree.tree_leaves(node.meta.get("val")) if value is not None)


def _is_inexact(value: Any) -> bool:
    return any(
        isinstance(t, torch.Tensor) and (t.is_floating_point() or t.is_complex()) for t in pytree.tree_leaves(value)
    )


def rounding_as_kernels(table: dict[Any, Decomposition]) -> dict[Any, Decomposition]:
    """Return ``table`` (operator -> decomposition) with this module's decompositions for 16-bit tensors; other tensors
    use ``table``'s."""
    out = dict(table)
    for operator, by_dtype in _OWN.items():
        out[operator] = _chosen_by_dtype(by_dtype, table.get(operator))
    for operator in _IN_FLOAT32:
        decomposition = _in_float32(table[operator])
        out[operator] = _chosen_by_dtype(dict.fromkeys(DTYPES, decomposition), table[operator])
    for packet in _NORMALIZATIONS:
        for overload in packet.overloads():
            if (operator := getattr(packet, overload)) in table:
                out[operator] = _with_wide_statistics(table[operator])
    return out


def _chosen_by_dtype(by_dtype: dict[torch.dtype, Decomposition], fallback: Decomposition | None) -> Decomposition:
    def decomposition(*args: Any, **kwargs: Any) -> Any:
        dtypes = {a.dtype for a in args if isinstance(a, torch.Tensor) and a.is_floating_point()}
        if len(dtypes) == 1 and (function := by_dtype.get(next(iter(dtypes)))) is not None:
            result = function(*args, **kwargs)
            if result is not NotImplemented:
                return result
        return NotImplemented if fallback is None else fallback(*args, **kwargs)

    return decomposition


def _in_float32(decomposition: Decomposition) -> Decomposition:
    def wide(*args: Any, **kwargs: Any) -> Any:
        dtype = args[0].dtype
        return decomposition(*(a.float() if isinstance(a, torch.Tensor) else a for a in args), **kwargs).to(dtype)

    return wide


def _with_wide_statistics(decomposition: Decomposition) -> Decomposition:
    """Save mean and deviation of a 16-bit input for the backward in the dtype of its float32 weights, as kernels do on
    a CPU. torch's decompositions round them to the input's dtype: a gradient of a network with batch normalization was
    off by four times what export allows."""

    def wide(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        is_mixed = any(isinstance(a, torch.Tensor) and a.dtype == torch.float32 for a in args)
        if x.device.type != "cpu" or x.dtype not in DTYPES or not is_mixed:
            return decomposition(x, *args, **kwargs)
        out, *statistics = decomposition(x.float(), *args, **kwargs)
        return out.to(x.dtype), *statistics

    return wide


def _reduced(loss: torch.Tensor, reduction: int) -> torch.Tensor:
    return (loss, loss.mean(), loss.sum())[reduction] if reduction else loss


def _mse_loss(x: torch.Tensor, target: torch.Tensor, reduction: int = 1) -> torch.Tensor:
    difference = x - target
    return _reduced(difference * difference, reduction)


def _huber_loss(x: torch.Tensor, target: torch.Tensor, reduction: int = 1, delta: float = 1.0) -> torch.Tensor:
    distance = (x - target).abs()
    limit = torch.full((), delta, dtype=x.dtype, device=x.device)
    return _reduced(
        torch.where(distance < limit, 0.5 * distance * distance, limit * (distance - 0.5 * limit)), reduction
    )


def _soft_margin_loss(x: torch.Tensor, target: torch.Tensor, reduction: int = 1) -> torch.Tensor:
    return _reduced((-x * target).exp().log1p(), reduction)


def _soft_margin_loss_backward(
    grad_output: torch.Tensor, x: torch.Tensor, target: torch.Tensor, reduction: int
) -> torch.Tensor:
    power = (-target * x).exp()
    norm = 1.0 / x.numel() if reduction == 1 else 1.0
    return target * power * -norm / (power + 1) * grad_output


def _logsumexp(x: torch.Tensor, dim: Any, keepdim: bool = False) -> torch.Tensor:
    maximum = x.amax(dim, keepdim=True)
    maximum = torch.where(maximum.abs() == float("inf"), 0, maximum)
    total = (x - maximum).exp().sum(dim, keepdim=keepdim)
    return total.log() + (maximum if keepdim else maximum.squeeze(dim))


def _log_softmax(x: torch.Tensor, dim: int, half_to_float: bool) -> Any:
    if half_to_float or x.dim() == 0 or dim % x.dim() != x.dim() - 1:
        return NotImplemented
    shifted = x.float() - x.amax(dim, keepdim=True).float()
    return (shifted - shifted.exp().sum(dim, keepdim=True).to(x.dtype).log().float()).to(x.dtype)


def _glu_backward(grad_output: torch.Tensor, x: torch.Tensor, dim: int) -> torch.Tensor:
    first, second = x.chunk(2, dim)
    gate = second.sigmoid()
    wide = gate.float()
    return torch.cat([gate * grad_output, ((1 - wide) * wide * first.float() * grad_output.float()).to(x.dtype)], dim)


def _xlogy(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.where(y.isnan(), y, torch.where(x == 0, 0, x * y.log()))


def _xlog1py(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.where(y.isnan(), y, torch.where(x == 0, 0, x * y.log1p()))


def _entr(x: torch.Tensor) -> torch.Tensor:
    return torch.where(
        x.isnan(), x, torch.where(x > 0, -x * x.log(), torch.where(x == 0, 0.0, -float("inf")).to(x.dtype))
    )


def _logit(x: torch.Tensor, eps: float | None = None) -> torch.Tensor:
    if eps is not None and eps >= 0:
        low = torch.full((), eps, dtype=x.dtype, device=x.device)
        x = torch.minimum(torch.maximum(x, low), 1 - low)
    return (x / (1 - x)).log()


def _quotient(x: torch.Tensor, y: torch.Tensor, *, rounding_mode: str | None = None) -> Any:
    return (x / y).trunc() if rounding_mode == "trunc" else NotImplemented


def _binary_cross_entropy(
    x: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None = None, reduction: int = 1
) -> torch.Tensor:
    loss = (target - 1) * (-x).log1p().clamp_min(-100) - target * x.log().clamp_min(-100)
    return _reduced(loss if weight is None else loss * weight, reduction)


def _pow(x: torch.Tensor, exponent: Any) -> Any:
    return x * x * x if exponent == 3 else NotImplemented


def _threshold_backward(grad_output: torch.Tensor, x: torch.Tensor, threshold: float) -> Any:
    return NotImplemented if threshold == 0 else torch.where(x.float() <= threshold, 0, grad_output)


def _smooth_l1_loss(x: torch.Tensor, target: torch.Tensor, reduction: int = 1, beta: float = 1.0) -> Any:
    if beta == 0:
        return NotImplemented
    distance = (x - target).abs()
    limit = torch.full((), beta, dtype=x.dtype, device=x.device)
    return _reduced(torch.where(distance < limit, 0.5 * distance * distance / limit, distance - 0.5 * limit), reduction)


def _sigmoid_backward(grad_output: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    return grad_output * (1 - output) * output


def _index_add(x: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor, *, alpha: Any = 1) -> torch.Tensor:
    return x.float().index_add(dim, index, source.float(), alpha=alpha).to(x.dtype)


_BOTH: dict[Any, Decomposition] = {
    aten.mse_loss.default: _mse_loss,
    aten.soft_margin_loss.default: _soft_margin_loss,
    aten.soft_margin_loss_backward.default: _soft_margin_loss_backward,
    aten.logsumexp.default: _logsumexp,
    aten._log_softmax.default: _log_softmax,
    aten.glu_backward.default: _glu_backward,
    aten.xlogy.Tensor: _xlogy,
    aten.special_xlog1py.default: _xlog1py,
    aten.special_entr.default: _entr,
    aten.logit.default: _logit,
    aten.div.Tensor_mode: _quotient,
    aten.binary_cross_entropy.default: _binary_cross_entropy,
    aten.threshold_backward.default: _threshold_backward,
    # The kernel rounds each sum; Inductor's call of bfloat16's kernel fails (torch 2.13)
    aten.index_add.default: _index_add,
}
_OWN: dict[Any, dict[torch.dtype, Decomposition]] = {
    operator: dict.fromkeys(DTYPES, decomposition) for operator, decomposition in _BOTH.items()
} | {
    aten.huber_loss.default: {torch.bfloat16: _huber_loss},
    aten.pow.Tensor_Scalar: {torch.bfloat16: _pow},
    aten.smooth_l1_loss.default: {torch.float16: _smooth_l1_loss},
    aten.sigmoid_backward.default: {torch.float16: _sigmoid_backward},
}

_NORMALIZATIONS = (
    aten.native_layer_norm, aten.native_group_norm, aten.native_batch_norm, aten._native_batch_norm_legit, aten._native_batch_norm_legit_functional,
    aten._batch_norm_with_update, aten._batch_norm_with_update_functional,
)  # fmt: skip

_IN_FLOAT32 = (aten.lerp.Scalar, aten.lerp.Tensor, aten.round.decimals)
