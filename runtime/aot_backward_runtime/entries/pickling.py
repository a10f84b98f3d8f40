"""The tensors of a loaded entry in a pickle. The rest of the pickle is the path of the package, its digest, and the
arguments of ``load``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NoReturn

import torch

from ..errors import AotBackwardError, WeightsError
from ..format.manifest import StateSpec

Pickled = dict[str, tuple[torch.Tensor, bool, torch.Tensor | None]]
"""By weight key: the value, ``requires_grad`` and ``.grad``."""


def pickled(state: Sequence[StateSpec], tensors: Sequence[torch.Tensor]) -> Pickled:
    return {s.weight: (t.detach(), t.requires_grad, t.grad) for s, t in zip(state, tensors, strict=True)}


def restore(
    state: Sequence[StateSpec],
    tensors: Sequence[torch.Tensor],
    values: Mapping[str, tuple[torch.Tensor, bool, torch.Tensor | None]],
) -> None:
    """Write the pickled values into ``tensors``, in place."""
    with torch.no_grad():
        for spec, tensor in zip(state, tensors, strict=True):
            value, requires_grad, grad = values[spec.weight]
            check_shape(spec.weight, value, tensor)
            tensor.copy_(value)
            tensor.requires_grad_(requires_grad)
            tensor.grad = grad


def check_shape(weight: str, value: torch.Tensor, tensor: torch.Tensor) -> None:
    if value.shape != tensor.shape:
        raise WeightsError(f"pickle: {weight} has the shape {list(value.shape)}; expected {list(tensor.shape)}")


def refuse_shallow_copy(loaded: object) -> NoReturn:
    raise AotBackwardError(
        f"copy.copy of a {type(loaded).__name__}: its tensors cannot be shared with a copy. Call copy.deepcopy."
    )
