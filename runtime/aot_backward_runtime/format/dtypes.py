"""The ranges of dtypes, by their names under ``torch.*``, computed without torch."""

from __future__ import annotations

import math

from .safetensors_header import DTYPES as STORED

DTYPES = frozenset(STORED) | {"complex128", "complex32"}
"""Every dtype that a package's tensors may have."""


_LARGEST = {
    "float64": math.ldexp(2 - 2**-52, 1023),
    "float32": math.ldexp(2 - 2**-23, 127),
    "float16": 65504.0,
    "bfloat16": math.ldexp(2 - 2**-7, 127),
    "float8_e4m3fn": 448.0,
    "float8_e4m3fnuz": 240.0,
    "float8_e5m2": 57344.0,
    "float8_e5m2fnuz": 57344.0,
    "float8_e8m0fnu": math.ldexp(1, 127),
}
_PARTS = {"complex128": "float64", "complex64": "float32", "complex32": "float16"}


def is_floating(dtype: str) -> bool:
    """Return whether the dtype is floating-point or complex, as a tensor that requires a gradient must be."""
    return dtype.startswith(("float", "bfloat", "complex"))


def can_hold(dtype: str, number: float) -> bool:
    """Return whether a tensor of ``dtype`` can be filled with ``number``: a float within its range, an integer of its
    bits, a bool 0 or 1."""
    if is_floating(dtype):
        return abs(number) <= _LARGEST[_PARTS.get(dtype, dtype)]
    if dtype == "bool":
        return number in (0.0, 1.0)
    bits = int(dtype.lstrip("uint"))
    low, high = (0, 1 << bits) if dtype.startswith("u") else (-1 << bits - 1, 1 << bits - 1)
    return number.is_integer() and low <= number < high
