"""Patches for Triton 3.6's interpreter: NVIDIA's functions ("libdevice"), rounding to bfloat16, numpy 2.4. Only for
interpreting processes."""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton.language as tl
from torch._inductor.runtime import triton_helpers
from triton.language.extra.cuda import libdevice
from triton.runtime import interpreter

_SAME = """
acos acosh asin asinh atan atan2 atanh ceil copysign cos cosh erf erfc erfinv exp exp2 expm1 floor fmod hypot isinf isnan lgamma log log10 log1p log2
pow rsqrt signbit sin sinh sqrt tan tanh trunc
"""
_IN_TORCH = {name: name for name in _SAME.split()} | {"fabs": "abs", "rint": "round", "nearbyint": "round"}


def elementwise(self: Any, library: str, path: str, symbol: str, arguments: list[Any], kind: Any, pure: bool) -> Any:
    """Compute a function such as ``__nv_tanhf`` with torch in double precision, and round the result to its type."""
    name = symbol.removeprefix("__nv_")
    known = _IN_TORCH.get(name) or _IN_TORCH.get(name[:-1])  # the last letter may be the type's: "f" or "d"
    if known is None:
        raise NotImplementedError(f"libdevice's {symbol}")
    wide = [torch.from_numpy(a.data.copy()) for a in arguments]
    result = getattr(torch, known)(*(a.double() if a.is_floating_point() else a for a in wide))
    scalar = getattr(kind, "scalar", kind)
    return interpreter.TensorHandle(result.numpy().astype(interpreter._get_np_dtype(scalar)), scalar)


def rounded(original: Any) -> Any:
    """Return a cast that rounds to the nearest bfloat16, like the hardware. The interpreter truncates the bits."""

    def cast_impl(self: Any, source: Any, kind: Any) -> Any:
        if (source.dtype.scalar, kind.scalar) != (tl.float32, tl.bfloat16):
            return original(self, source, kind)
        bits = torch.from_numpy(source.data.copy()).bfloat16().view(torch.int16).numpy()
        return interpreter.TensorHandle(bits.view(interpreter._get_np_dtype(tl.bfloat16)), tl.bfloat16)

    return cast_impl


class Libdevice:
    """Triton's module ``libdevice``. Outside a compiler its functions need the argument ``_semantic``."""

    def __getattr__(self, name: str) -> Any:
        return functools.partial(getattr(libdevice, name), _semantic=interpreter.interpreter_semantic)


def install() -> None:
    builder = interpreter.InterpreterBuilder
    builder.create_extern_elementwise = elementwise
    builder.cast_impl = rounded(builder.cast_impl)
    triton_helpers.libdevice = Libdevice()
    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        # NumPy 2.4 raises for int() of an array of one
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patched
