"""Computes what is spread over a larger tensor once per element.

Inductor (torch 2.13) writes an element-wise value into each loop that uses it. In ``cos(r)[:, None] * filters``, with
32 filters an edge, the cosine is then computed again for each vector of filters, and as one number: vectors lie along
the filters. Stored before, it is computed once an edge, in vectors of edges. Such values are the cutoff of a force
field, which each layer and its gradient use, and the rotary embedding of a language model.
"""

from __future__ import annotations

import contextlib
import re
from typing import Any

import sympy
import torch
from torch.fx import Node

from .. import torch_api
from ..fx_splice import has_hints, hint
from ..process_state import patched

_COSTLY = re.compile(r"a?(?:cos|sin|tan)h?|atan2|erf\w*|exp2?|expm1|lgamma|digamma|log(?:10|1p|2)?|pow|sigmoid")
"""Names of Inductor's operations. Spread over rows of 2 to 8 numbers, cos took 0.2 to 0.8 of the time when stored
(float32 and float64)."""
_ROOTS = {"sqrt", "rsqrt"}
"""They gain as much within rows, if vectors can read what they are computed of. Else they took up to 5 times as long
when stored."""
_TIMES = 4
"""Minimum factor by which other dimensions than the innermost must spread a value, which vectors then compute also
where it is used. With 2, exp took 0.96 of the time when stored and log 1.00."""
_aten = torch.ops.aten
_READ_AT = _aten.index, _aten.index_select, _aten.embedding, _aten.gather


def stored() -> contextlib.AbstractContextManager[None]:
    """Let Inductor store each such value."""
    lowering, ir = torch_api.GraphLowering, torch_api.inductor_ir
    original = lowering.run_node

    def run_node(self: Any, n: Node) -> Any:
        result = original(self, n)
        storage = getattr(result, "data", None)
        if isinstance(storage, ir.StorageBox) and isinstance(storage.data, ir.Pointwise) and pays(storage.data, n):
            storage.realize()
        return result

    def pays(value: Any, node: Node) -> bool:
        within_rows, often = _spread(node)
        operations = value.inner_fn_opcount().used_ops if within_rows or often else ()
        if any(map(_COSTLY.fullmatch, operations)):
            return True
        return within_rows and not _ROOTS.isdisjoint(operations) and _reads_along_vectors(value)

    return patched(lowering, run_node=run_node)


def _spread(node: Node) -> tuple[bool, bool]:
    """Return whether an operator uses a number of ``node``, on the CPU, for a row of the innermost dimension, and
    whether for ``_TIMES`` numbers."""
    value, within_rows, often = node.meta.get("val"), False, False
    if not isinstance(value, torch.Tensor) or value.device.type != "cpu" or not has_hints(value):
        return False, False
    count, views = hint(value.numel()), [node]
    for view in views:
        for user in view.users:
            result, target = user.meta.get("val"), user.target
            if (
                not isinstance(result, torch.Tensor)
                or not has_hints(result)
                or not isinstance(target, torch_api.OpOverload)
            ):
                continue
            if target.is_view:
                views.append(user)
            elif torch.Tag.pointwise in target.tags:
                within_rows = within_rows or _is_constant_in_rows(view.meta["val"], result)
                often = often or hint(result.numel()) >= _TIMES * max(count, 1)
            elif target.overloadpacket in _READ_AT:  # a call with few indices would compute the whole table
                often = often or torch_api.statically_known_true(result.numel() >= _TIMES * value.numel())
    return within_rows, often


def _is_constant_in_rows(operand: torch.Tensor, result: torch.Tensor) -> bool:
    dimensions = [d for d in range(-result.dim(), 0) if hint(result.shape[d]) > 1]
    if not dimensions:
        return False
    innermost = min(dimensions, key=lambda d: hint(result.stride(d)))
    return -innermost > operand.dim() or hint(operand.shape[innermost]) == 1 or hint(operand.stride(innermost)) == 0


def _reads_along_vectors(value: Any) -> bool:
    for read in value.get_reads():
        loops = (
            [v for v, size in zip(read.var_names, read.size, strict=True) if size != 1]
            if hasattr(read, "var_names")
            else None
        )
        if loops is None or (loops and sympy.diff(read.index, loops[-1]) not in (0, 1)):
            return False
    return True
