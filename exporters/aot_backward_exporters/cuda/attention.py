"""Scaled dot-product attention, captured with the CPU's kernel, with the kernel that eager selects on a GPU.

``scaled_dot_product_attention`` selects a kernel when it is called, and a trace on the CPU contains the CPU's. Forward
and backward are separate graphs, linked by the tensors that the forward saves (the result, and the logarithm of the
softmax's denominators, one for each row of queries). The choice depends only on properties that both graphs have
(sizes, dtypes, the mask), so both choose alike; saved tensors keep the CPU's shapes.

The conditions come from ``aten/src/ATen/native/transformers/cuda/sdp_utils.cpp`` and ``attention.cpp`` (torch 2.11),
with one difference: on H100 and B200 eager prefers cuDNN's kernel, if it has one, to flash attention. Without dropout
all of them compute the same result, up to rounding.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import nn
from torch.fx import Node

from aot_backward_runtime.errors import ExportError

from .. import torch_api
from ..fx_splice import spliced, with_strides

aten = torch.ops.aten
FORWARD = aten._scaled_dot_product_flash_attention_for_cpu.default
BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default

Kernel = Literal["flash", "efficient", "math"]
_HALVES = (torch.float16, torch.bfloat16)
_Tensors = tuple[torch.Tensor, ...]


def kernel_for(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    capability: tuple[int, int],
) -> Kernel:
    """Return the kernel for these (B, H, S, D) tensors. A condition that is unknown for a dynamic size counts as
    false."""
    is_true = torch_api.statically_known_true
    depth, is_half = query.shape[-1], query.dtype in _HALVES
    equal_depths = is_true(key.shape[-1] == depth) and is_true(value.shape[-1] == depth)
    # Flash attention's causal mask is aligned to the bottom right if there are more keys than queries; eager's to the
    # top left.
    is_square = not causal or is_true(query.shape[2] == key.shape[2])
    # its backward needs more shared memory than these GPUs have
    fits_memory = capability not in ((8, 6), (8, 9)) or is_true(depth <= 192) or is_true(depth > 224)
    if is_half and mask is None and equal_depths and is_true(depth <= 256) and is_square and fits_memory:
        return "flash"
    alignment = 8 if is_half else 4  # elements in 128 bits; with tensor cores, which half precision needs
    is_aligned = (
        is_true(depth % alignment == 0)
        and is_true(value.shape[-1] % alignment == 0)
        and is_true(key.shape[-1] == depth)
    )
    if (is_half or query.dtype is torch.float32) and is_aligned and (mask is None or mask.dtype is query.dtype):
        return "efficient"
    return "math"


def replace(node: Node, values: dict[Node, Any], capability: tuple[int, int]) -> None:
    """Make the users of ``node``, the CPU's forward or backward, use the GPU's kernel; ``node`` and its own users lose
    their users. ``values``: the fake tensor of each existing node; new nodes are added."""
    is_backward = node.target is BACKWARD
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    args = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    if args.get("dropout_p"):
        raise ExportError(
            f"{node.target} with dropout {args['dropout_p']} has no counterpart on a GPU: export on a GPU, target='cuda'"
        )
    causal, scale = bool(args.get("is_causal", False)), args.get("scale")
    tensors: list[Node] = [args[n] for n in names if isinstance(args.get(n), Node) and n != "attn_mask"]
    mask: Any = args.get("attn_mask")
    query, key, value = (values[args[n]] for n in ("query", "key", "value"))
    kernel = kernel_for(query, key, value, None if mask is None else values[mask], causal, capability)
    if scale is None:
        scale = 1 / math.sqrt(query.shape[-1])  # before the padding
    function = (_BACKWARD if is_backward else _FORWARD)[kernel]
    outputs = node.meta["val"]

    def called(*operands: torch.Tensor) -> _Tensors:
        inputs, bias = (operands, None) if mask is None else (operands[:-1], operands[-1])
        return tuple(
            with_strides(result.to(output.dtype), output)
            for result, output in zip(function(*inputs, bias, causal, scale), outputs, strict=True)
        )

    results, new_values = spliced(node, called, [*tensors, *([] if mask is None else [mask])], values)
    values |= new_values
    values[node] = tuple(new_values.get(result, values.get(result)) for result in results)
    for user in node.users:
        assert user.target is operator.getitem
        user.replace_all_uses_with(results[user.args[1]])  # type: ignore[index]


def _flash_forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: None, causal: bool, scale: float
) -> _Tensors:
    depth = query.shape[-1]
    operands = (_padded(t, 8) for t in (query, key, value))
    out, logs, *_ = aten._scaled_dot_product_flash_attention.default(*operands, 0.0, causal, False, scale=scale)
    return out[..., :depth], logs


def _flash_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logs: torch.Tensor,
    mask: None,
    causal: bool,
    scale: float,
) -> _Tensors:
    depth = query.shape[-1]
    seed = torch.empty(2, dtype=torch.uint64, device=query.device)  # unused without dropout
    offset = torch.empty(0, dtype=torch.uint64, device=query.device)
    operands = (_padded(t, 8) for t in (grad, query, key, value, out))
    lengths = (None, None, query.shape[2], key.shape[2])
    grads = aten._scaled_dot_product_flash_attention_backward.default(
        *operands, logs.contiguous(), *lengths, 0.0, causal, seed, offset, scale=scale
    )
    return tuple(g[..., :depth] for g in grads)


def _efficient_forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, causal: bool, scale: float
) -> _Tensors:
    heads = query.shape[1]
    key, value, bias = _with_bias(query, _repeated(key, heads), _repeated(value, heads), mask)
    out, logs, *_ = aten._scaled_dot_product_efficient_attention.default(
        query, key, value, bias, True, 0.0, causal, scale=scale
    )
    return out, _first(logs, query.shape[2], 2)


def _efficient_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logs: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    scale: float,
) -> _Tensors:
    heads, kv_heads, rows, columns = query.shape[1], key.shape[1], query.shape[2], key.shape[2]
    key, value, bias = _with_bias(query, _repeated(key, heads), _repeated(value, heads), mask)
    # kernel_forward.h pads to a multiple of kAlignLSE rows with infinity: their probabilities become zeros
    logs = nn.functional.pad(logs.contiguous(), (0, _lacking(rows, 32)), value=math.inf)
    # Unused without dropout
    seed, offset = (torch.empty(1, dtype=torch.int64, device=query.device).view(()) for _ in range(2))
    grads = aten._scaled_dot_product_efficient_attention_backward.default(
        grad, query, key, value, bias, out, logs, seed, offset, 0.0, [True, True, True, False], causal, scale=scale
    )
    grad_key, grad_value = (_summed(_first(g, columns, 2), kv_heads) for g in grads[1:3])
    return grads[0], grad_key, grad_value


def _math_forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, causal: bool, scale: float
) -> _Tensors:
    heads = query.shape[1]
    weights, logs = _weights(query, _repeated(key, heads), mask, causal, scale)
    return (weights @ _wide(_repeated(value, heads))).to(query.dtype), logs


def _math_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logs: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    scale: float,
) -> _Tensors:
    """Compute the backward of flash attention (arXiv:2205.14135, appendix B.4) with whole matrices. The weights are
    recomputed from the scores: torch declares the saved logarithms as float32, which would lose half the digits of
    float64."""
    heads, kv_heads, dtype = query.shape[1], key.shape[1], query.dtype
    key, value = _repeated(key, heads), _repeated(value, heads)
    weights, _ = _weights(query, key, mask, causal, scale)
    query, key, value, grad, out = map(_wide, (query, key, value, grad, out))
    grad_value = weights.transpose(-2, -1) @ grad
    grad_scores = weights * (grad @ value.transpose(-2, -1) - (grad * out).sum(-1, keepdim=True)) * scale
    grad_query, grad_key = grad_scores @ key, grad_scores.transpose(-2, -1) @ query
    return grad_query.to(dtype), _summed(grad_key, kv_heads).to(dtype), _summed(grad_value, kv_heads).to(dtype)


_FORWARD: dict[Kernel, Callable[..., _Tensors]] = {
    "flash": _flash_forward,
    "efficient": _efficient_forward,
    "math": _math_forward,
}
_BACKWARD: dict[Kernel, Callable[..., _Tensors]] = {
    "flash": _flash_backward,
    "efficient": _efficient_backward,
    "math": _math_backward,
}


def _weights(
    query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the softmax of the scores, and the logarithm of its denominators. A fully masked row gets zeros."""
    scores = _wide(query) @ _wide(key).transpose(-2, -1) * scale
    if mask is not None:
        scores = scores + mask
    if causal:
        causal_mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()
        scores = torch.where(causal_mask, scores, -math.inf)
    row_max = scores.amax(-1, keepdim=True)
    row_max = torch.where(row_max == -math.inf, 0.0, row_max)
    weights = (scores - row_max).exp()
    total = weights.sum(-1, keepdim=True)
    total = torch.where(total == 0, 1.0, total)
    return weights / total, (row_max + total.log()).squeeze(-1)


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """Convert to the precision of eager's formula."""
    return tensor.float() if tensor.dtype in _HALVES else tensor


def _lacking(size: Any, multiple: int) -> Any:
    """Return the distance from ``size`` to the next multiple; for a symbolic size in a form that lets torch see that
    the sum is a multiple."""
    return (size + multiple - 1) // multiple * multiple - size


def _padded(tensor: torch.Tensor, multiple: int) -> torch.Tensor:
    """Append zeros to the last dimension, up to a multiple."""
    padding = _lacking(tensor.shape[-1], multiple)
    return nn.functional.pad(tensor, (0, padding)) if padding else tensor


def _with_bias(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return keys, values, and the mask of every head. The kernel requires the mask's rows to begin at multiples of 8
    elements.

    Eager pads the rows and takes a slice of them (``preprocess_mask`` in attention.cpp). For a dynamic size, slicing
    would compare sizes and create a guard, so the keys are padded to a multiple of 8, too; the mask hides the new ones.
    """
    if mask is None:
        return key, value, None
    columns = key.shape[2]
    padding = _lacking(columns, 8)
    pads: list[Any] = [0, padding]
    mask = mask.expand(*mask.shape[:-1], columns)
    if isinstance(padding, torch.SymInt):
        mask = nn.functional.pad(mask, pads, value=-math.inf)
        key, value = (nn.functional.pad(t, [0, 0, *pads]) for t in (key, value))
    elif padding:
        mask = nn.functional.pad(mask, pads)[..., :columns]
    return key, value, mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])


def _first(tensor: torch.Tensor, count: Any, dim: int) -> torch.Tensor:
    """Return a copy of the first ``count`` elements in that dimension: for a view, torch would compare sizes and guard
    a dynamic size."""
    if torch_api.statically_known_true(tensor.shape[dim] == count):
        return tensor
    return tensor.index_select(dim, torch.arange(count, device=tensor.device))


def _repeated(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Repeat the heads to one for each of the query's (grouped-query attention)."""
    kv_heads = tensor.shape[1]
    return tensor if kv_heads == heads else tensor.repeat_interleave(heads // kv_heads, dim=1)


def _summed(grad: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """Return the gradient for the ``kv_heads`` heads that :func:`_repeated` repeated."""
    return grad if grad.shape[1] == kv_heads else grad.unflatten(1, (kv_heads, grad.shape[1] // kv_heads)).sum(2)
