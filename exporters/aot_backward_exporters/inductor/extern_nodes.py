"""The JSON that Inductor writes of operators without a C function of their own, which torch's proxy executor reads where the library is loaded."""

from __future__ import annotations

import json
from typing import Any

from .. import torch_api

_DTYPE_NUMBERS = {n: n - 1 for n in range(1, 13)} | {13: 15, 28: 27, 29: 24, 30: 23, 31: 26, 32: 25}
"""``ScalarType`` of torch/_export/serde/schema.py -> of c10/core/ScalarType.h."""


def as_executed(data: bytes) -> bytes:
    """``data`` as this version's proxy executor understands it.

    Exported programs and C++ number the dtypes each their own way. The executor of torch 2.11 takes the one number for the other (``float64``, 8, for
    ``complex32``), and 2.12 translates it: so for 2.11 C++'s numbers are written.
    """
    return data if torch_api.at_least("2.12") else json.dumps(_renumbered(json.loads(data))).encode()


def _renumbered(value: Any) -> Any:
    if isinstance(value, list):
        return [_renumbered(v) for v in value]
    if isinstance(value, dict):
        return {k: _DTYPE_NUMBERS[v] if k == "as_scalar_type" else _renumbered(v) for k, v in value.items()}
    return value
