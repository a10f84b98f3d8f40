"""Attention and its gradient, as eager's CPU kernel computes them: the softmax in float32, fully masked rows are
zero."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from aot_backward_runtime.errors import ExportError

aten = torch.ops.aten


def _scores(q: torch.Tensor, k: torch.Tensor, is_causal: bool, mask: torch.Tensor | None, scale: float) -> torch.Tensor:
    """Return the scores in float32, minus infinity at masked positions."""
    scores = torch.matmul(q, k.transpose(-1, -2)) * scale
    if mask is not None:
        scores = torch.where(mask, scores, -math.inf) if mask.dtype is torch.bool else scores + mask
    if is_causal:
        rows = torch.arange(q.shape[-2], device=q.device).unsqueeze(1)
        columns = torch.arange(k.shape[-2], device=q.device).unsqueeze(0)
        scores = torch.where(columns <= rows, scores, -math.inf)
    return scores


def _prepared(
    operator: Any,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout: float,
    mask: torch.Tensor | None,
    scale: float | None,
) -> tuple[list[torch.Tensor], torch.Tensor | None, float]:
    if dropout:
        raise ExportError.of(
            operator, f"{operator} draws random numbers, and ONNX cannot draw eager's: set the attention's dropout to 0"
        )
    if q.shape[1] != k.shape[1]:
        raise ExportError.of(
            operator,
            f"{operator} with fewer heads of keys than of queries has no ONNX translation: repeat the keys' heads",
        )
    dtype = torch.float64 if q.dtype is torch.float64 else torch.float32
    if mask is not None and mask.dtype is not torch.bool:
        mask = mask.to(dtype)
    return [t.to(dtype) for t in (q, k, v)], mask, 1 / math.sqrt(q.shape[-1]) if scale is None else scale


def with_weights(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the operator's results and the attention weights. Without the weights, :func:`backward` computes them
    again."""
    operator = aten._scaled_dot_product_flash_attention_for_cpu.default
    (wide_q, wide_k, wide_v), mask, factor = _prepared(operator, q, k, v, dropout_p, attn_mask, scale)
    scores = _scores(wide_q, wide_k, is_causal, mask, factor)
    row_max = scores.amax(-1, keepdim=True)
    row_max = torch.where(row_max == -math.inf, 0.0, row_max)
    exponentials = torch.exp(scores - row_max)
    total = exponentials.sum(-1, keepdim=True)
    total = torch.where(total == 0, 1.0, total)
    return (
        (torch.matmul(exponentials, wide_v) / total).to(q.dtype),
        (torch.log(total) + row_max).squeeze(-1),
        exponentials / total,
    )


def _forward(*arguments: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return with_weights(*arguments, **options)[:2]


def backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: torch.Tensor | None = None,
    scale: float | None = None,
    weights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    operator = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    (wide_q, wide_k, wide_v), mask, factor = _prepared(operator, q, k, v, dropout_p, attn_mask, scale)
    wide_grad, wide_out = grad.to(wide_q.dtype), out.to(wide_q.dtype)
    if weights is None:
        weights = torch.exp(_scores(wide_q, wide_k, is_causal, mask, factor) - logsumexp.unsqueeze(-1))
    grad_v = torch.matmul(weights.transpose(-1, -2), wide_grad)
    grad_weights = torch.matmul(wide_grad, wide_v.transpose(-1, -2))
    grad_scores = weights * (grad_weights - (wide_grad * wide_out).sum(-1, keepdim=True)) * factor
    grad_q, grad_k = torch.matmul(grad_scores, wide_k), torch.matmul(grad_scores.transpose(-1, -2), wide_q)
    return grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype)


DECOMPOSITIONS: dict[str, Callable[..., Any]] = {
    "aten._scaled_dot_product_flash_attention_for_cpu.default": _forward,
    "aten._scaled_dot_product_flash_attention_for_cpu_backward.default": backward,
}
