"""Replace a call of ``torch.nn.utils.clip_grad_norm_`` or ``clip_grad_value_`` by one native call that writes the
script's own gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..errors import InputError
from ..format.manifest import ClippingSpec
from ..native.guards import Contract, Fast
from ..native.library import NO_CONSTANTS, Library
from ..native.memory import Ranges, are_apart, extent
from .compiled_table import OtherCaller

NORM, VALUE = "clip_grad_norm_", "clip_grad_value_"
"""The functions of ``torch.nn.utils``."""
Kind = tuple[str, str]
"""The function, and its ``norm_type`` as the package states it: ``("clip_grad_norm_", "2.0")``."""

# Vectors of numbers that are kept: bounds the memory of a script that changes the limit in each call; a guess
_MAX_VECTORS = 1_000


class CompiledClipping:
    """A recorded clipping with its library. Threads may call it concurrently."""

    def __init__(self, spec: ClippingSpec, library: Library):
        self.spec, self.library = spec, library
        self.contract = Contract(library.spec.inputs[:-1], (), ())
        self._numbers: dict[tuple[float, bool], torch.Tensor] = {}

    @property
    def kind(self) -> Kind:
        return self.spec.function, self.spec.norm_type

    def bind(self, gradients: Sequence[torch.Tensor]) -> BoundClipping:
        return BoundClipping(self, gradients)

    def vector(self, limit: float, keep_nonfinite: bool) -> torch.Tensor:
        """Return the vector that the library takes after the gradients."""
        vector = self._numbers.get((limit, keep_nonfinite))
        if vector is None:
            vector = torch.tensor([limit, keep_nonfinite], dtype=torch.float64, device="cpu")
            if len(self._numbers) >= _MAX_VECTORS:
                self._numbers.clear()
            self._numbers[limit, keep_nonfinite] = vector
        return vector


class BoundClipping:
    """A compiled clipping, with guards on the gradients that it serves."""

    def __init__(self, code: CompiledClipping, gradients: Sequence[torch.Tensor]):
        self.code = code
        specs = code.contract.specs
        if len(gradients) != len(specs):
            raise OtherCaller(f"the parameters have {len(gradients)} gradients; {len(specs)} were recorded")
        refuse_unsupported(gradients)
        _, _, untouched = code.contract.fit(gradients)
        if not untouched:
            name = next(
                (s.name for g, s in zip(gradients, specs, strict=True) if tuple(g.stride()) != tuple(s.stride)),
                "a gradient",
            )
            raise InputError(f"{name} has other strides than when it was recorded")
        self._fast, self._extents = Fast(gradients), list(map(extent, gradients))
        if not self._fast.holds(gradients) or any(g.is_inference() for g in gradients):
            raise InputError("a gradient cannot be written by native code")
        with code.library.lock:
            code.library.bind(NO_CONSTANTS)  # raises if it cannot be opened, before the gradients' versions change

    def serves(self, gradients: Sequence[torch.Tensor]) -> bool:
        return len(gradients) == len(self._extents) and self._fast.holds(gradients)

    def run(self, gradients: list[torch.Tensor], limit: float, keep_nonfinite: bool) -> torch.Tensor:
        """Clip ``gradients`` and return the library's result. ``keep_nonfinite``: leave them unchanged if their norm is
        Inf or NaN."""
        refuse_unsupported(gradients)
        if not are_apart(list(map(torch.Tensor.data_ptr, gradients)), self._extents):
            names = [s.name for s in self.code.contract.specs]
            if pair := Ranges(zip(names, gradients, strict=True)).overlap():
                raise InputError(f"{pair[0]} and {pair[1]} share memory")
        torch.autograd.graph.increment_version(gradients)
        return self.code.library.run_bound(NO_CONSTANTS, [*gradients, self.code.vector(limit, keep_nonfinite)])[0]


def refuse_unsupported(gradients: Sequence[torch.Tensor]) -> None:
    """Raise :class:`InputError` if the call depends on something that compiled code ignores."""
    if not gradients:
        raise InputError("there are no gradients")
    if torch.is_autocast_enabled("cpu"):
        raise InputError("it is called under autocast")
