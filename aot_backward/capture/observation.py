"""What is kept of a pass that was watched: how its tensors and sizes looked, without their values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from aot_backward_runtime.manifest import Ambient


@dataclass(frozen=True)
class Looks:
    """A tensor of a pass, without its values."""

    dtype: torch.dtype
    device: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    requires_grad: bool = False

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Looks:
        return cls(tensor.dtype, tensor.device.type, tuple(tensor.shape), tensor.stride(), tensor.requires_grad)


@dataclass(frozen=True)
class Observation:
    """One pass, without its values."""

    inputs: tuple[Looks, ...]
    sizes: tuple[int, ...]
    scalars: tuple[int | float, ...]
    ambient: Ambient
    hook_groups: tuple[int, ...] = ()  # hooks that were one object have one number

    def every_size(self) -> tuple[int, ...]:
        """The sizes of all tensors, then those of the pass."""
        return (*(n for t in self.inputs for n in t.shape), *self.sizes)

    def kind(self) -> Any:
        """What two passes must have in common to be one program: all but the sizes, and where those are 0 or 1."""

        def special(size: int) -> int:
            return size if size in (0, 1) else 2

        looks = tuple((t.dtype, t.device, t.requires_grad, tuple(map(special, t.shape)), _order(t)) for t in self.inputs)
        return looks, tuple(map(special, self.sizes)), self.scalars, self.ambient


def _order(looks: Looks) -> tuple[int, ...]:
    """The dimensions from the largest stride to the smallest, those of stride 0 marked; sizes of 1 have no say."""
    counted = [d for d, n in enumerate(looks.shape) if n > 1]
    ordered = sorted(counted, key=lambda d: -looks.stride[d])
    return tuple(d if looks.stride[d] else -1 - d for d in ordered)
