"""Inductor's JSON for operators without their own C function. torch's proxy executor reads it in the process that loads
the library."""

from __future__ import annotations

import json
from typing import Any

from .. import torch_api

_DTYPE_NUMBERS = {n: n - 1 for n in range(1, 13)} | {13: 15, 28: 27, 29: 24, 30: 23, 31: 26, 32: 25}
"""``ScalarType`` of torch/_export/serde/schema.py -> of c10/core/ScalarType.h."""


def as_executed(data: bytes) -> bytes:
    """Return ``data`` in the form that this version's proxy executor understands.

    Exported programs and C++ number the dtypes differently. The executor of torch 2.11 confuses the two (``float64``,
    8, with ``complex32``), and 2.12 translates them: for 2.11 this function writes C++'s numbers.
    """
    return data if torch_api.at_least("2.12") else json.dumps(_renumbered(json.loads(data))).encode()


def _renumbered(value: Any) -> Any:
    if isinstance(value, list):
        return [_renumbered(v) for v in value]
    if isinstance(value, dict):
        return {k: _DTYPE_NUMBERS[v] if k == "as_scalar_type" else _renumbered(v) for k, v in value.items()}
    return value
