"""Our own translations into ONNX, for operators that PyTorch's torchlib lacks or translates differently from eager."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from onnx import TensorProto, helper
from onnxscript import opset18

from .. import torch_api
from ..decompositions.pooling import windows

op: Any = opset18

_INEXACT = (
    *("special_erfcx", "special_log_ndtr", "_linalg_det", "linalg_det"),
    *("glu", "silu", "mish", "elu", "celu", "selu", "log_sigmoid_forward", "softplus", "log1p", "expm1"),
)
"""Operators with a torchlib translation that is off by more than rounding, or an invalid graph. Operators in the second
line are decomposed (:mod:`..decompositions.exponentials`), the others refused."""


def _numel(x: Any) -> Any:
    return op.Size(x)


def _number(value: Any, dtype: int) -> Any:
    """Return the number as ``dtype``. torchlib converts a Python number to float32 first, even if float64 is requested,
    and rounds it."""
    if isinstance(value, (bool, int, float)):
        return op.Constant(value=helper.make_tensor("", dtype, [], [value]))
    return op.Cast(value, to=dtype)


def _scalar_tensor(value: Any, dtype: int = -1, layout: str = "", device: str = "", pin_memory: bool = False) -> Any:
    return _number(value, TensorProto.FLOAT if dtype == -1 else dtype)


def _full(size: Any, value: Any, dtype: int = -1, layout: str = "", device: str = "", pin_memory: bool = False) -> Any:
    if dtype != -1:
        value = _number(value, dtype)
    return op.Expand(value, op.Cast(size, to=TensorProto.INT64))


def _full_like(
    x: Any,
    value: Any,
    dtype: int = -1,
    layout: str = "",
    device: str = "",
    pin_memory: bool = False,
    memory_format: str = "",
) -> Any:
    return op.Expand(_number(value, x.dtype.value if dtype == -1 else dtype), op.Shape(x))


def _divide(a: Any, b: Any, rounding_mode: str | None = None) -> Any:
    """Divide integers exactly (torchlib uses float32); for floating-point numbers return the floor of the true
    quotient, as Python's ``//``."""
    if a.dtype.is_integer():
        if rounding_mode is None:
            return op.Div(op.Cast(a, to=TensorProto.FLOAT), op.Cast(b, to=TensorProto.FLOAT))
        return op.Div(op.Sub(a, op.Mod(a, b)), b) if rounding_mode == "floor" else op.Div(a, b)
    quotient = op.Div(a, b)
    if rounding_mode is None:
        return quotient
    if rounding_mode == "trunc":
        return op.Mul(op.Floor(op.Abs(quotient)), op.Sign(quotient))
    remainder = op.Mod(a, b, fmod=1)
    zero, half, one = (_number(v, a.dtype.value) for v in (0.0, 0.5, 1.0))
    is_below = op.And(op.Not(op.Equal(remainder, zero)), op.Xor(op.Less(remainder, zero), op.Less(b, zero)))
    estimate = op.Div(op.Sub(a, remainder), b)
    estimate = op.Where(is_below, op.Sub(estimate, one), estimate)
    floor = op.Floor(estimate)
    floor = op.Where(op.Greater(op.Sub(estimate, floor), half), op.Add(floor, one), floor)
    return op.Where(op.Equal(b, zero), quotient, floor)


def _max_pool(spatial: int) -> Callable[..., Any]:
    def translated(
        x: Any,
        kernel_size: Sequence[int],
        stride: Sequence[int] = (),
        padding: Sequence[int] = (0,),
        dilation: Sequence[int] = (1,),
        ceil_mode: bool = False,
    ) -> Any:
        """Translate ``max_pool``. ONNX's indices count through the whole batch, eager's within one image."""
        kernel, pads, dilations = (
            list(v) * spatial if len(v) == 1 else list(v) for v in (kernel_size, padding, dilation)
        )
        steps = (list(stride) * spatial if len(stride) == 1 else list(stride)) if stride else kernel
        is_unbatched = len(x.shape) == spatial + 1
        batch = op.Unsqueeze(x, op.Constant(value_ints=[0])) if is_unbatched else x
        sizes = list(x.shape)[len(x.shape) - spatial :]
        end_pads = list(pads)
        if ceil_mode:  # ONNX would count windows that begin after the input, which eager does not
            if not all(isinstance(n, int) for n in sizes):
                raise ValueError("ceil_mode and images of dynamic size; make height and width static")
            extents = [d * (k - 1) + 1 for k, d in zip(kernel, dilations, strict=True)]
            counts = [windows(n, r, s, p, True) for n, r, s, p in zip(sizes, extents, steps, pads, strict=True)]
            end_pads = [
                max((c - 1) * s + r - n - p, 0)
                for c, s, r, n, p in zip(counts, steps, extents, sizes, pads, strict=True)
            ]
        out, indices = op.MaxPool(
            batch, dilations=dilations, kernel_shape=kernel, pads=[*pads, *end_pads], strides=steps
        )
        if all(isinstance(n, int) for n in sizes):
            image = op.Constant(value_int=math.prod(sizes))
        else:
            image = op.ReduceProd(op.Shape(batch, start=2), keepdims=0)
        indices = op.Mod(indices, image)
        if is_unbatched:
            axes = op.Constant(value_ints=[0])
            return op.Squeeze(out, axes), op.Squeeze(indices, axes)
        return out, indices

    return translated


def _floordiv(a: Any, b: Any) -> Any:
    """Floor-divide: ONNX's integer division truncates; its remainder has the divisor's sign, as Python's."""
    return op.Div(op.Sub(a, op.Mod(a, b)), b)


def registry() -> Any:
    """Return torchlib's translations for opset 18, with ours taking precedence."""
    out = torch_api.ONNXRegistry.from_torchlib()
    aten = torch.ops.aten
    for name in [n for n in out.functions if isinstance(n, str) and n.startswith("aten::")]:
        if name.partition("::")[2].partition(".")[0] in _INEXACT:
            del out.functions[name]
    out.register_op(operator.floordiv, _floordiv)
    for overload in (aten.div.Tensor_mode, aten.div.Scalar_mode):
        out.register_op(overload, _divide)
    out.register_op(aten.scalar_tensor.default, _scalar_tensor)
    out.register_op(aten.full.default, _full)
    out.register_op(aten.full_like.default, _full_like)
    out.register_op(aten.sym_numel.default, _numel)
    out.register_op(aten.max_pool2d_with_indices.default, _max_pool(2))
    out.register_op(aten.max_pool3d_with_indices.default, _max_pool(3))
    return out
