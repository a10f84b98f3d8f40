"""What the dtypes of tensors can hold, by their names under ``torch.*``, computed without torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .safetensors_header import DTYPES as STORED

DTYPES = frozenset(STORED) | {"complex128", "complex32"}
"""Every dtype that a package's tensors may have."""


@dataclass(frozen=True)
class _Float:
    """``precision``: bits of the significand, the implicit one included. ``lowest``: the exponent of the smallest normal number."""

    precision: int
    lowest: int
    largest: float


_FLOATS = {
    "float64": _Float(53, -1022, math.ldexp(2 - 2**-52, 1023)),
    "float32": _Float(24, -126, math.ldexp(2 - 2**-23, 127)),
    "float16": _Float(11, -14, 65504.0),
    "bfloat16": _Float(8, -126, math.ldexp(2 - 2**-7, 127)),
    "float8_e4m3fn": _Float(4, -6, 448.0),
    "float8_e4m3fnuz": _Float(4, -7, 240.0),
    "float8_e5m2": _Float(3, -14, 57344.0),
    "float8_e5m2fnuz": _Float(3, -15, 57344.0),
    "float8_e8m0fnu": _Float(1, -127, math.ldexp(1, 127)),
}
_PARTS = {"complex128": "float64", "complex64": "float32", "complex32": "float16"}


def is_floating(dtype: str) -> bool:
    """Whether it is a floating-point or complex one, as a tensor that requires a gradient must be."""
    return dtype.startswith(("float", "bfloat", "complex"))


def can_hold(dtype: str, number: float) -> bool:
    """Whether a tensor of ``dtype`` can be filled with ``number``: a float within its range, an integer of its bits, a bool 0 or 1."""
    if is_floating(dtype):
        return abs(number) <= _FLOATS[_PARTS.get(dtype, dtype)].largest
    if dtype == "bool":
        return number in (0.0, 1.0)
    bits = int(dtype.lstrip("uint"))
    low, high = (0, 1 << bits) if dtype.startswith("u") else (-1 << bits - 1, 1 << bits - 1)
    return number.is_integer() and low <= number < high


def rounded(number: float, dtype: str) -> float:
    """What ``torch.tensor(number, dtype=dtype).item()`` is where the dtype has numbers of that size and sign; beyond its largest, infinity."""
    if dtype == "bool":
        return float(bool(number))
    if not is_floating(dtype):
        return float(int(number))
    name = _PARTS.get(dtype, dtype)
    if name not in ("float64", "float32"):  # PyTorch's conversions to the narrow dtypes start from float32
        number = _nearest(number, _FLOATS["float32"])
    return _nearest(number, _FLOATS[name])


def _nearest(number: float, kind: _Float) -> float:
    """To the nearest number of that kind, ties to even."""
    if not math.isfinite(number) or kind.precision == 53:
        return number
    unit = max(math.frexp(number)[1] - kind.precision, kind.lowest - kind.precision + 1)
    nearest = math.ldexp(float(round(math.ldexp(number, -unit))), unit)
    return nearest if abs(nearest) <= kind.largest else math.copysign(math.inf, nearest)
