"""Writes and additions at positions, including gradients of embeddings.

Indices of any form become the rows of a matrix. ONNX's ScatterElements writes or adds to them, one after another if a
row occurs twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from aot_backward_runtime.errors import ExportError

aten = torch.ops.aten


def _index_put(
    x: torch.Tensor, indices: Sequence[torch.Tensor | None], values: torch.Tensor, accumulate: bool = False
) -> torch.Tensor:
    masks = [i for i in indices if i is not None and i.dtype in (torch.bool, torch.uint8)]
    if masks:
        return _masked_put(x, indices, values, accumulate)
    if any(isinstance(n, int) and n == 0 for n in (*x.shape, *values.shape)):
        return aten.clone.default(x)
    indexed_dims = [d for d, i in enumerate(indices) if i is not None]
    index_tensors = torch.broadcast_tensors(*(i for i in indices if i is not None))
    other_dims = [d for d in range(x.dim()) if d not in indexed_dims]
    shape, other_sizes = list(index_tensors[0].shape), [x.shape[d] for d in other_dims]
    first = indexed_dims[0] if indexed_dims == list(range(indexed_dims[0], indexed_dims[-1] + 1)) else 0
    values_shape = [*other_sizes[:first], *shape, *other_sizes[first:]]
    values = values.to(x.dtype).expand(values_shape)
    values = values.permute(
        [*range(first, first + len(shape)), *range(first), *range(first + len(shape), len(values_shape))]
    )
    rows, width, sizes = math.prod(shape), math.prod(other_sizes), [x.shape[d] for d in indexed_dims]
    flat = x.permute([*indexed_dims, *other_dims])
    permuted_shape = flat.shape
    flat = flat.reshape([math.prod(sizes), width])
    linear: Any = 0
    for index, size in zip(index_tensors, sizes, strict=True):
        index = index.to(torch.int64)
        linear = linear * size + torch.where(index < 0, index + size, index)
    linear = linear.reshape([rows, 1]).expand([rows, width])
    values = values.reshape([rows, width])
    flat = flat.scatter_add(0, linear, values) if accumulate else flat.scatter(0, linear, values)
    order = [*indexed_dims, *other_dims]
    return flat.reshape(permuted_shape).permute([order.index(d) for d in range(x.dim())])


def _masked_put(
    x: torch.Tensor, indices: Sequence[torch.Tensor | None], values: torch.Tensor, accumulate: bool
) -> torch.Tensor:
    """Write or add one value at a mask, from some dimension on. Other selections by a mask have a data-dependent
    size."""
    masks = [(d, i) for d, i in enumerate(indices) if i is not None]
    if len(masks) > 1 or values.numel() != 1:
        raise ExportError.of(
            aten.index_put.default,
            "aten.index_put.default with a mask and more than one value has no ONNX translation: use torch.where(mask, values, x)",
        )
    ((dim, mask),) = masks
    mask = mask.to(torch.bool).reshape([*mask.shape, *([1] * (x.dim() - dim - mask.dim()))])
    value = values.to(x.dtype).reshape([])
    return torch.where(mask, x + value if accumulate else value, x)


def _masked_add(
    x: torch.Tensor, mask: torch.Tensor, indices: Sequence[torch.Tensor | None], values: torch.Tensor
) -> torch.Tensor:
    clamped_indices = [
        None if i is None else i.clamp(-size, size - 1) for i, size in zip(indices, x.shape, strict=False)
    ]
    masked_values = torch.where(mask, values, 0)
    return aten.index_put.default(x, clamped_indices, masked_values, True)


def _as_strided(
    x: torch.Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> torch.Tensor:
    _refuse_other_layouts(x)
    return x.reshape([-1]).index_select(0, _strided_places(size, stride, storage_offset)).reshape(size)


def _bags(offsets: torch.Tensor, count: Any, include_last_offset: bool) -> torch.Tensor:
    """Return the bag of each of ``count`` indices."""
    starts = offsets[:-1] if include_last_offset else offsets
    return (starts.unsqueeze(0) <= torch.arange(count).unsqueeze(1)).sum(1) - 1


def _embedding_bag(
    weight: torch.Tensor,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    per_sample_weights: torch.Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    _refuse_bag(aten._embedding_bag.default, mode, scale_grad_by_freq)
    count = offsets.shape[0] - 1 if include_last_offset else offsets.shape[0]
    bags = _bags(offsets, indices.shape[0], include_last_offset)
    rows = weight.index_select(0, indices)
    counts = torch.ones_like(bags)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.unsqueeze(1)
    if padding_idx >= 0:
        mask = indices != padding_idx
        rows, counts = torch.where(mask.unsqueeze(1), rows, 0), mask.to(torch.int64)
    out = torch.zeros([count, weight.shape[1]], dtype=weight.dtype).scatter_add(
        0, bags.unsqueeze(1).expand(rows.shape), rows
    )
    sizes = torch.zeros([count], dtype=torch.int64).scatter_add(0, bags, counts)
    if mode == 1:
        out = out / sizes.clamp(min=1).unsqueeze(1).to(out.dtype)
    else:
        sizes = torch.zeros_like(sizes)  # eager does not count them either
    return out, bags, sizes, sizes


def _embedding_bag_backward(
    grad: torch.Tensor,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    offset2bag: torch.Tensor,
    bag_size: torch.Tensor,
    maximum_indices: torch.Tensor,
    num_weights: int,
    scale_grad_by_freq: bool,
    mode: int,
    sparse: bool,
    per_sample_weights: torch.Tensor | None,
    padding_idx: int = -1,
) -> torch.Tensor:
    _refuse_bag(aten._embedding_bag_backward.default, mode, scale_grad_by_freq)
    is_missing = isinstance(offset2bag.shape[0], int) and offset2bag.shape[0] == 0  # eager omits it for plain sums
    bags = _bags(offsets, indices.shape[0], False) if is_missing else offset2bag
    rows = grad.index_select(0, bags)
    if mode == 1:
        rows = rows / bag_size.index_select(0, bags).clamp(min=1).unsqueeze(1).to(rows.dtype)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.unsqueeze(1)
    if padding_idx >= 0:
        rows = torch.where((indices != padding_idx).unsqueeze(1), rows, 0)
    zeros = torch.zeros([num_weights, grad.shape[1]], dtype=grad.dtype)
    return zeros.scatter_add(0, indices.unsqueeze(1).expand(rows.shape), rows)


def _of_sample_weights(
    grad: torch.Tensor,
    weight: torch.Tensor,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    offset2bag: torch.Tensor,
    mode: int,
    padding_idx: int = -1,
) -> torch.Tensor:
    is_missing = isinstance(offset2bag.shape[0], int) and offset2bag.shape[0] == 0
    bags = _bags(offsets, indices.shape[0], False) if is_missing else offset2bag
    out = (grad.index_select(0, bags) * weight.index_select(0, indices)).sum(1)
    return torch.where(indices != padding_idx, out, 0) if padding_idx >= 0 else out


def _of_a_number(operator: Any) -> Callable[..., Any]:
    """Wrap writes and reads along a dimension for tensors without one: ONNX's operators require one."""

    def along(x: torch.Tensor, dim: int, index: torch.Tensor, *rest: Any, **options: Any) -> Any:
        if x.dim() and index.dim():
            return NotImplemented
        tensors = [t.reshape([1]) if isinstance(t, torch.Tensor) and t.dim() == 0 else t for t in (x, index, *rest)]
        return operator(tensors[0], 0, *tensors[1:], **options).reshape(
            x.shape if operator is not aten.gather.default else index.shape
        )

    return along


def _diagonal_scatter(
    x: torch.Tensor, src: torch.Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> torch.Tensor:
    dims = [dim1 % x.dim(), dim2 % x.dim()]
    order = [d for d in range(x.dim()) if d not in dims] + dims
    steps = torch.arange(src.shape[-1], device=x.device)
    indices = [*([None] * (x.dim() - 2)), steps + max(-offset, 0), steps + max(offset, 0)]
    out = aten.index_put.default(x.permute(order), indices, src)
    return out.permute([order.index(d) for d in range(x.dim())])


def _strided_places(size: Sequence[Any], stride: Sequence[Any], offset: int | None) -> torch.Tensor:
    positions = torch.full([1] * len(size), offset or 0, dtype=torch.int64)
    for d, (n, step) in enumerate(zip(size, stride, strict=True)):
        shape = [1] * len(size)
        shape[d] = n
        positions = positions + (torch.arange(n) * step).reshape(shape)
    return positions.expand(size).reshape([-1])


def _as_strided_scatter(
    x: torch.Tensor, src: torch.Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> torch.Tensor:
    _refuse_other_layouts(x)
    flat = x.reshape([-1]).scatter(0, _strided_places(size, stride, storage_offset), src.reshape([-1]))
    return flat.reshape(x.shape)


def _refuse_other_layouts(x: torch.Tensor) -> None:
    if not x.is_contiguous():
        raise ExportError.of(
            aten.as_strided.default,
            "aten.as_strided.default of a tensor that is not row-major has no ONNX translation: call .contiguous() first",
        )


def _refuse_bag(operator: Any, mode: int, scale_grad_by_freq: bool) -> None:
    if mode == 2:
        raise ExportError.of(operator, f"{operator} with mode='max' has no ONNX translation: use 'sum' or 'mean'")
    if scale_grad_by_freq:
        raise ExportError.of(operator, f"{operator} with scale_grad_by_freq has no ONNX translation: leave that out")


DECOMPOSITIONS: dict[str, Callable[..., Any]] = {
    "aten.index_put.default": _index_put,
    "aten._unsafe_index_put.default": _index_put,
    "aten._unsafe_masked_index_put_accumulate.default": _masked_add,
    "aten.as_strided.default": _as_strided,
    "aten.as_strided_scatter.default": _as_strided_scatter,
    "prims.as_strided_scatter.default": _as_strided_scatter,
    "aten.diagonal_scatter.default": _diagonal_scatter,
    "aten._embedding_bag_per_sample_weights_backward.default": _of_sample_weights,
    **{
        name: _of_a_number(operator)
        for name, operator in (
            ("aten.gather.default", aten.gather.default),
            ("aten.scatter.src", aten.scatter.src),
            ("aten.scatter.value", aten.scatter.value),
            ("aten.scatter_add.default", aten.scatter_add.default),
            ("aten.scatter_reduce.two", aten.scatter_reduce.two),
        )
    },
    "aten._embedding_bag.default": _embedding_bag,
    "aten._embedding_bag_forward_only.default": _embedding_bag,
    "aten._embedding_bag_backward.default": _embedding_bag_backward,
}
