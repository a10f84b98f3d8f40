"""Observe which gradients a recorded script clips, and how."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from aot_backward_runtime.errors import InputError
from aot_backward_runtime.optimizer_steps.compiled_clipping import Kind, refuse_unsupported

_MAX_CLIPPING_KINDS = 32  # the most kinds, and refusals, that are kept: bounds the memory of their gradients; a guess


@dataclass
class ObservedClipping:
    """Calls of one function with gradients of the same metadata. ``example``: copies of the gradients of one call, and
    its ``max_norm`` or ``clip_value``; None if the kind came once."""

    kind: Kind
    line: str
    count: int = 0
    example: tuple[list[torch.Tensor], float] | None = None

    @property
    def words(self) -> str:
        return f"{self.kind[0]} called at {self.line}"


@dataclass
class ObservedClippings:
    """``kinds``: by function and metadata. ``refused``: why calls of a function cannot be compiled."""

    kinds: dict[tuple[object, ...], ObservedClipping] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)

    @property
    def repeated(self) -> dict[str, ObservedClipping]:
        """The kinds that came more than once, which are compiled, by digest."""
        return {
            hashlib.sha256(repr(key).encode()).hexdigest(): kind
            for key, kind in self.kinds.items()
            if kind.example is not None
        }

    def observe(self, kind: Kind, gradients: Sequence[torch.Tensor], limit: float, line: str) -> None:
        """Note a call before eager clips."""
        try:
            refuse_unsupported(gradients)
            for gradient in gradients:
                _refuse_odd(gradient)
        except InputError as error:
            if len(self.refused) < _MAX_CLIPPING_KINDS:
                self.refused[f"{kind[0]} called at {line}"] = str(error)
            return
        key = (kind, *((str(g.dtype), tuple(g.shape), g.stride()) for g in gradients))
        if key not in self.kinds and len(self.kinds) >= _MAX_CLIPPING_KINDS:
            return
        clipping = self.kinds.setdefault(key, ObservedClipping(kind, line))
        clipping.count += 1
        if clipping.count > 1 and clipping.example is None:
            clipping.example = [g.detach().clone() for g in gradients], limit


def _refuse_odd(gradient: torch.Tensor) -> None:
    if type(gradient) is not torch.Tensor:
        raise InputError(f"a gradient is a {type(gradient).__qualname__}")
    if gradient.layout is not torch.strided:
        raise InputError(f"a gradient has layout {gradient.layout}")
    if gradient.device.type != "cpu":
        raise InputError(f"a gradient is on {gradient.device}; clipping is compiled for the CPU")
    if not gradient.is_floating_point():
        raise InputError(f"a gradient has dtype {gradient.dtype}; expected a floating-point dtype")
