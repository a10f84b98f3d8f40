"""The metadata of one backward pass: its tensors' dtypes, devices, shapes and strides, its sizes and scalars, and the
state it was called under."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from aot_backward_runtime.format.manifest import Ambient
from aot_backward_runtime.passes.pass_contract import Operands, why_unsupported
from aot_backward_runtime.tapes.tape import Tape

from ..capture.ambient import current_ambient


@dataclass(frozen=True)
class TensorMetadata:
    """A tensor of a pass, without its values."""

    dtype: torch.dtype
    device: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    requires_grad: bool = False
    unsupported: str = ""  # why a compiled pass cannot take it: "a sparse tensor (torch.sparse_coo)"

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorMetadata:
        stride = tensor.stride() if tensor.layout is torch.strided else (0,) * tensor.dim()
        return cls(
            tensor.dtype, tensor.device.type, tuple(tensor.shape), stride, tensor.requires_grad, why_unsupported(tensor)
        )


@dataclass(frozen=True)
class Observation:
    """One pass, without its values."""

    inputs: tuple[TensorMetadata, ...]
    sizes: tuple[int, ...]
    scalars: tuple[int | float, ...]
    ambient: Ambient
    hook_groups: tuple[int, ...] = ()  # hooks that were one object share a number
    positions: frozenset[int] = field(default=frozenset(), compare=False)  # Tape.positions

    @classmethod
    def of(cls, operands: Operands, tape: Tape) -> Observation:
        numbers: dict[int, int] = {}
        groups = tuple(numbers.setdefault(id(h), len(numbers)) for h in operands.hooks)
        inputs = tuple(map(TensorMetadata.of, operands.inputs))
        device = inputs[0].device if inputs else "cpu"
        return cls(
            inputs, tuple(operands.sizes), tuple(operands.scalars), current_ambient(device), groups, tape.positions
        )

    def every_size(self) -> tuple[int, ...]:
        """Return the sizes of all tensors, then the sizes of the pass."""
        return (*(n for t in self.inputs for n in t.shape), *self.sizes)

    def kind(self) -> Any:
        """Return the properties that two passes of one program share: everything but the sizes, and which sizes are 0
        or 1. A position may be either."""

        def special(size: int) -> int:
            return size if size in (0, 1) else 2

        tensors = tuple(
            (t.dtype, t.device, t.requires_grad, t.unsupported, tuple(map(special, t.shape)), _dim_order(t))
            for t in self.inputs
        )
        sizes = tuple(2 if n in self.positions else special(size) for n, size in enumerate(self.sizes))
        return tensors, sizes, self.scalars, self.ambient


def _dim_order(tensor: TensorMetadata) -> tuple[int, ...]:
    """Return the dimensions from the largest stride to the smallest, with stride 0 as -1 - d; dimensions of size 1 are
    left out."""
    counted = [d for d, n in enumerate(tensor.shape) if n > 1]
    ordered = sorted(counted, key=lambda d: -tensor.stride[d])
    return tuple(d if tensor.stride[d] else -1 - d for d in ordered)
