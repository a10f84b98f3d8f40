"""Linear and cubic interpolation, one axis after the other.

PyTorch's decompositions look up the neighbours along all axes at once, 4 per pixel if linear and 16 if cubic, so the
gradient adds up as many tensors of the output's size. Axis by axis, the last one first, each output results from the
same operations in the same order, to the bit, and the gradient adds up 2 or 4 tensors along each axis.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from aot_backward_exporters import torch_api
from aot_backward_exporters.process_state import patched

aten = torch.ops.aten


def axis_by_axis() -> AbstractContextManager[None]:
    """Use these decompositions inside the context."""
    module = torch_api.decompositions
    cast = module.pw_cast_for_opmath  # half precision is interpolated in float, as in eager's kernels
    return patched(
        module,
        _upsample_linear=cast(_for_floats(_linear, module._upsample_linear)),
        upsample_bicubic2d_default=cast(_for_floats(_bicubic, module.upsample_bicubic2d_default)),
    )


def _for_floats(ours: Callable[..., Any], theirs: Callable[..., Any]) -> Callable[..., Any]:
    def chosen(input: torch.Tensor, *args: Any) -> Any:
        return (ours if input.is_floating_point() else theirs)(input, *args)

    return chosen


def _linear(
    input: torch.Tensor, output_size: Sequence[Any], align_corners: bool, scales: Sequence[float | None]
) -> torch.Tensor:
    output = input
    for dim in reversed(range(2, input.ndim)):
        source = _source(input, dim, output_size[dim - 2], align_corners, scales[dim - 2]).clamp(min=0.0)
        # As eager: a scale that does not match the size leads past the end
        first = source.to(torch.int64).clamp(max=input.shape[dim] - 1)
        second = (first + 1).clamp(max=input.shape[dim] - 1)
        share = _along(input, dim, (source - first).clamp(0.0, 1.0).to(input.dtype))
        first_value, second_value = _index_dim(output, dim, first), _index_dim(output, dim, second)
        output = first_value + torch.mul(second_value - first_value, share)
    return output.contiguous(memory_format=_format(input))


def _bicubic(
    input: torch.Tensor,
    output_size: Sequence[Any],
    align_corners: bool,
    scale_h: float | None = None,
    scale_w: float | None = None,
) -> torch.Tensor:
    output = input
    for dim, scale in ((3, scale_w), (2, scale_h)):
        source = _source(input, dim, output_size[dim - 2], align_corners, scale)
        floor = source.floor()
        weights = torch_api.decompositions._upsample_get_cubic_coefficients((source - floor).clamp(0.0, 1.0))
        indices = [(floor.to(torch.int64) + n).clamp(0, input.shape[dim] - 1) for n in (-1, 0, 1, 2)]
        terms = [
            _index_dim(output, dim, index) * _along(input, dim, weight)
            for index, weight in zip(indices, weights, strict=True)
        ]
        output = terms[0] + terms[1] + terms[2] + terms[3]
    return output.contiguous(memory_format=_format(input))


def _source(input: torch.Tensor, dim: int, size: Any, align_corners: bool, scale: float | None) -> torch.Tensor:
    """Return the input coordinate of each output position along ``dim``."""
    ratio = torch_api.decompositions._compute_scale(input.shape[dim], size, align_corners, scale)
    return torch_api.decompositions._compute_source_index(
        ratio, torch.arange(size, device=input.device).to(input.dtype), align_corners
    )


def _index_dim(input: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor:
    return aten._unsafe_index(input, [*[None] * dim, index])


def _along(input: torch.Tensor, dim: int, values: torch.Tensor) -> torch.Tensor:
    return values.reshape(-1, *[1] * (input.ndim - 1 - dim))


def _format(input: torch.Tensor) -> torch.memory_format:
    if input.device.type == "cuda" and input.shape[1] < 16:  # as eager: channels last only if that is faster
        return torch.contiguous_format
    return torch_api.decompositions.utils.suggest_memory_format(input)
