"""One captured CUDA graph: the places that a call fills, those that a replay overwrites, and who still reads them."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from .. import torch_api


class CapturedGraph:
    """One capture: the places that a call fills, and those that it overwrites."""

    def __init__(self, inputs: Sequence[torch.Tensor], fixed: frozenset[int], replay: Callable[[], None], outputs: list[torch.Tensor], pool: Any):
        """``pool``: of its own, in which no other graph writes but its backward's; or None."""
        self.inputs, self.outputs, self._replay, self.pool = inputs, outputs, replay, pool
        self._fixed = [i for i, t in enumerate(inputs) if t.data_ptr() in fixed]
        self._filled = [(i, _once(t)) for i, t in enumerate(inputs) if t.numel() and i not in self._fixed]
        self._narrow = [i for i, _ in self._filled if 0 in inputs[i].stride()]
        self._holder: Callable[[], Any] = _nobody
        self.after: dict[Any, Any] = {}  # what the backward keeps of its own graphs, which read what this one lends
        shared = Counter(t.untyped_storage().data_ptr() for t in outputs if t.numel())
        self._plain = [shared[t.untyped_storage().data_ptr()] < 2 and torch.empty_like(t).stride() == t.stride() for t in outputs]

    def places(self) -> frozenset[int]:
        """Where its inputs and results lie."""
        return frozenset(t.data_ptr() for t in (*self.inputs, *self.outputs) if t.numel())

    @property
    def lent(self) -> bool:
        """Whether a backward that reads its results is still to come."""
        return self._holder() is not None

    def lend(self, holder: Any) -> None:
        self._holder = weakref.ref(holder)

    def give_back(self) -> None:
        self._holder = _nobody

    def takes(self, given: Sequence[torch.Tensor]) -> bool:
        """Whether the tensors that are read where they lie are the ones that lay there at the capture."""
        return all(given[i].data_ptr() == self.inputs[i].data_ptr() for i in self._fixed)

    def replay(self, given: Sequence[torch.Tensor]) -> None:
        if self._filled:
            sources = [_once(given[i]) if i in self._narrow else given[i] for i, _ in self._filled]
            torch_api.foreach_copy_([place for _, place in self._filled], sources)
        self._replay()

    def copied(self, which: Iterable[int] | None = None) -> list[torch.Tensor]:
        """The results, all of them or those of the numbers ``which`` in memory of their own. Where results share memory, so do the copies."""
        out = list(self.outputs)
        places, sources = [], []
        storages: dict[int, torch.UntypedStorage] = {}
        for i in range(len(out)) if which is None else which:
            t = self.outputs[i]
            if self._plain[i]:
                out[i] = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device)
                places.append(out[i])
                sources.append(t)
            else:
                storage = t.untyped_storage()
                if (known := storages.get(storage.data_ptr())) is None:
                    known = storages[storage.data_ptr()] = storage.clone()
                out[i] = torch.empty(0, dtype=t.dtype, device=t.device).set_(known, t.storage_offset(), t.shape, t.stride())
        if places:
            with torch.no_grad():
                torch_api.foreach_copy_(places, sources)
        return out


def _nobody() -> None:
    return None


def place_for(tensor: torch.Tensor) -> torch.Tensor:
    """Memory that lies as ``tensor`` does, filled with it: capturing may look at sizes that come from values."""
    place = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    _once(place).copy_(_once(tensor))
    return place


def _once(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` with each expanded dimension, every index of which is the same place, at its first index alone."""
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor
