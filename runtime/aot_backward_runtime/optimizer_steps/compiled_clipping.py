"""A call of ``torch.nn.utils.clip_grad_norm_`` or ``clip_grad_value_`` as one native call, which writes the script's own gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..errors import InputError
from ..format.manifest import ClippingSpec
from ..native.guards import Contract, Fast
from ..native.library import NO_CONSTANTS, Library
from ..native.memory import Ranges, are_apart, extent

NORM, VALUE = "clip_grad_norm_", "clip_grad_value_"
"""The functions of ``torch.nn.utils``."""
Kind = tuple[str, str]
"""The function, and its ``norm_type`` as the package states it: ``("clip_grad_norm_", "2.0")``."""

_MOST = 1_000  # vectors of numbers that are kept


class CompiledClipping:
    """A recorded clipping with its library. Threads may call it side by side."""

    def __init__(self, spec: ClippingSpec, library: Library):
        self.spec, self.library = spec, library
        self._contract = Contract(library.spec.inputs[:-1], (), ())
        self._extents: list[int] = []
        self._fast: Fast | None = None
        self._numbers: dict[tuple[float, bool], torch.Tensor] = {}

    @property
    def kind(self) -> Kind:
        return self.spec.function, self.spec.norm_type

    def holds(self, gradients: Sequence[torch.Tensor]) -> bool:
        """Whether ``gradients`` look like those that were bound last."""
        return self._fast is not None and len(gradients) == len(self._extents) and self._fast.holds(gradients)

    def bind(self, gradients: Sequence[torch.Tensor]) -> None:
        """Looks at everything that native code depends on; :class:`InputError` where ``gradients`` do not fit."""
        specs = self._contract.specs
        if len(gradients) != len(specs):
            raise InputError(f"the parameters have {len(gradients)} gradients; {len(specs)} were recorded")
        _, _, untouched = self._contract.fit(gradients)
        if not untouched:
            odd = next((s.name for g, s in zip(gradients, specs, strict=True) if tuple(g.stride()) != tuple(s.stride)), "a gradient")
            raise InputError(f"{odd} has other strides than when it was recorded")
        fast = Fast(gradients)
        if not fast.holds(gradients) or any(g.is_inference() for g in gradients):
            raise InputError("a gradient cannot be written by native code")
        with self.library.lock:
            self.library.bind(NO_CONSTANTS)  # what cannot be opened is found before gradients count as written
        self._extents, self._fast = list(map(extent, gradients)), fast

    def run(self, gradients: list[torch.Tensor], limit: float, keep_nonfinite: bool) -> torch.Tensor:
        """Clips ``gradients``, for which :meth:`holds` is true, and returns the library's result. ``keep_nonfinite``: they stay as they are where
        their norm is Inf or NaN. :class:`InputError` where they share memory, and nothing was changed."""
        if not are_apart(list(map(torch.Tensor.data_ptr, gradients)), self._extents):
            self._refuse_shared(gradients)
        torch.autograd.graph.increment_version(gradients)
        return self.library.run_bound(NO_CONSTANTS, [*gradients, self._vector(limit, keep_nonfinite)])[0]

    def _vector(self, limit: float, keep_nonfinite: bool) -> torch.Tensor:
        vector = self._numbers.get((limit, keep_nonfinite))
        if vector is None:
            vector = torch.tensor([limit, keep_nonfinite], dtype=torch.float64, device="cpu")
            if len(self._numbers) >= _MOST:
                self._numbers.clear()
            self._numbers[limit, keep_nonfinite] = vector
        return vector

    def _refuse_shared(self, gradients: Sequence[torch.Tensor]) -> None:
        names = [s.name for s in self._contract.specs]
        if pair := Ranges(zip(names, gradients, strict=True)).overlap():
            raise InputError(f"{pair[0]} and {pair[1]} share memory")


class ClippingTable:
    """The clippings of a package. Gradients that fit none are looked at in full after 1, 2, 4, … 64 calls of their kind and number."""

    def __init__(self, clippings: Sequence[CompiledClipping]):
        self._clippings: dict[Kind, list[CompiledClipping]] = {}
        for clipping in clippings:
            self._clippings.setdefault(clipping.kind, []).append(clipping)
        self._refused: dict[tuple[Kind, int], _Refused] = {}

    def __bool__(self) -> bool:
        return bool(self._clippings)

    def run(self, kind: Kind, gradients: list[torch.Tensor], limit: float, keep_nonfinite: bool) -> tuple[CompiledClipping, torch.Tensor]:
        """Clips by compiled code: which, and its result. :class:`InputError` says why it did not, and nothing was changed."""
        refuse_unsupported(gradients)
        for clipping in self._clippings.get(kind, ()):
            if clipping.holds(gradients):
                return clipping, clipping.run(gradients, limit, keep_nonfinite)
        clipping = self._bound(kind, gradients)
        return clipping, clipping.run(gradients, limit, keep_nonfinite)

    def _bound(self, kind: Kind, gradients: Sequence[torch.Tensor]) -> CompiledClipping:
        refused = self._refused.get((kind, len(gradients)))
        if refused is not None and refused.waits > 0:
            refused.waits -= 1
            raise InputError(refused.reason)
        reasons: list[str] = []
        for clipping in self._clippings.get(kind, ()):
            try:
                clipping.bind(gradients)
            except InputError as error:
                reasons.append(str(error))
            else:
                self._refused.pop((kind, len(gradients)), None)
                return clipping
        if refused is None:
            refused = self._refused[kind, len(gradients)] = _Refused()
        refused.reason = reasons[0] if reasons else f"no {kind[0]}{f' of norm_type {kind[1]}' if kind[1] else ''} was recorded"
        refused.waits, refused.next_wait = refused.next_wait, min(2 * refused.next_wait, _LONGEST)
        raise InputError(refused.reason)


_LONGEST = 64  # calls for which gradients that did not fit are not looked at in full


class _Refused:
    __slots__ = ("next_wait", "reason", "waits")

    def __init__(self) -> None:
        self.reason, self.waits, self.next_wait = "", 0, 1


def refuse_unsupported(gradients: Sequence[torch.Tensor]) -> None:
    """:class:`InputError` where the call depends on what compiled code does not look at."""
    if not gradients:
        raise InputError("there are no gradients")
    if torch.is_autocast_enabled("cpu"):
        raise InputError("it is called under autocast")
