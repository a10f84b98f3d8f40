"""What is kept of a pass that was watched: how its tensors and sizes looked, without their values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from aot_backward_runtime.format.manifest import Ambient


@dataclass(frozen=True)
class Looks:
    """A tensor of a pass, without its values."""

    dtype: torch.dtype
    device: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    requires_grad: bool = False
    unlike: str = ""  # how it is no plain, dense tensor, which alone a compiled pass takes

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Looks:
        unlike = ""
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            unlike = f"a {type(tensor).__module__}.{type(tensor).__qualname__}, a subclass of torch.Tensor"
        elif tensor.layout is not torch.strided:
            unlike = f"a sparse tensor ({tensor.layout})"
        stride = tensor.stride() if tensor.layout is torch.strided else (0,) * tensor.dim()
        return cls(tensor.dtype, tensor.device.type, tuple(tensor.shape), stride, tensor.requires_grad, unlike)


@dataclass(frozen=True)
class Observation:
    """One pass, without its values."""

    inputs: tuple[Looks, ...]
    sizes: tuple[int, ...]
    scalars: tuple[int | float, ...]
    ambient: Ambient
    hook_groups: tuple[int, ...] = ()  # hooks that were one object have one number
    positions: frozenset[int] = field(default=frozenset(), compare=False)  # Tape.positions

    def every_size(self) -> tuple[int, ...]:
        """The sizes of all tensors, then those of the pass."""
        return (*(n for t in self.inputs for n in t.shape), *self.sizes)

    def kind(self) -> Any:
        """What two passes must have in common to be one program: all but the sizes, and where those are 0 or 1. A position may be either."""

        def special(size: int) -> int:
            return size if size in (0, 1) else 2

        looks = tuple((t.dtype, t.device, t.requires_grad, t.unlike, tuple(map(special, t.shape)), _order(t)) for t in self.inputs)
        sizes = tuple(2 if n in self.positions else special(size) for n, size in enumerate(self.sizes))
        return looks, sizes, self.scalars, self.ambient


def _order(looks: Looks) -> tuple[int, ...]:
    """The dimensions from the largest stride to the smallest, those of stride 0 marked; sizes of 1 have no say."""
    counted = [d for d, n in enumerate(looks.shape) if n > 1]
    ordered = sorted(counted, key=lambda d: -looks.stride[d])
    return tuple(d if looks.stride[d] else -1 - d for d in ordered)
