"""One captured CUDA graph: its static inputs and outputs, and the backward that still reads the outputs."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from .. import torch_api


class CapturedGraph:
    """One capture: the inputs that a call copies into, and the outputs that a replay overwrites."""

    def __init__(
        self,
        inputs: Sequence[torch.Tensor],
        fixed: frozenset[int],
        replay: Callable[[], None],
        outputs: list[torch.Tensor],
        pool: Any,
    ):
        """``fixed``: addresses of inputs that are read in place. ``pool``: the graph's own memory pool, which it shares
        only with its backward's graph; or None."""
        self.inputs, self.outputs, self._replay, self.pool = inputs, outputs, replay, pool
        self._fixed = [i for i, t in enumerate(inputs) if t.data_ptr() in fixed]
        self._copied = [(i, _without_expansion(t)) for i, t in enumerate(inputs) if t.numel() and i not in self._fixed]
        self._expanded = [i for i, _ in self._copied if 0 in inputs[i].stride()]
        self._reader: Callable[[], Any] = _nobody
        self.backward_graphs: dict[Any, Any] = {}  # by library: graphs that read this one's outputs in place
        shared = Counter(t.untyped_storage().data_ptr() for t in outputs if t.numel())
        self._plain = [
            shared[t.untyped_storage().data_ptr()] < 2 and torch.empty_like(t).stride() == t.stride() for t in outputs
        ]

    def addresses(self) -> frozenset[int]:
        """Return the addresses of its inputs and outputs."""
        return frozenset(t.data_ptr() for t in (*self.inputs, *self.outputs) if t.numel())

    @property
    def awaits_backward(self) -> bool:
        """True if a backward that reads its outputs is still to come."""
        return self._reader() is not None

    def keep_for(self, reader: Any) -> None:
        """Forbid replays until :meth:`release` or until ``reader`` is gone."""
        self._reader = weakref.ref(reader)

    def release(self) -> None:
        self._reader = _nobody

    def reads_from(self, inputs: Sequence[torch.Tensor]) -> bool:
        """Return whether the inputs that are read in place have their addresses of the capture."""
        return all(inputs[i].data_ptr() == self.inputs[i].data_ptr() for i in self._fixed)

    def replay(self, inputs: Sequence[torch.Tensor]) -> None:
        if self._copied:
            sources = [_without_expansion(inputs[i]) if i in self._expanded else inputs[i] for i, _ in self._copied]
            torch_api.foreach_copy_([place for _, place in self._copied], sources)
        self._replay()

    def copies(self, which: Iterable[int] | None = None) -> list[torch.Tensor]:
        """Return the outputs, with copies of all, or of the indices ``which``. If outputs share memory, so do the
        copies."""
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
                if (clone := storages.get(storage.data_ptr())) is None:
                    clone = storages[storage.data_ptr()] = storage.clone()
                out[i] = torch.empty(0, dtype=t.dtype, device=t.device).set_(
                    clone, t.storage_offset(), t.shape, t.stride()
                )
        if places:
            with torch.no_grad():
                torch_api.foreach_copy_(places, sources)
        return out


class PooledOutputs:
    """The outputs of a forward that stay in the memory pool of its graph until the backward has read them."""

    def __init__(
        self,
        graph: CapturedGraph,
        operands: Iterable[tuple[str, Any]],
        lock: AbstractContextManager[Any],
        in_order: Callable[[], None],
    ):
        """``operands``: the parsed operands of the graph's inputs. ``lock``, ``in_order``: from
        :class:`.cuda_graphs.Graphs`."""
        self.graph, self._lock, self._in_order = graph, lock, in_order
        self._inputs = {where: graph.inputs[i] for i, (kind, where) in enumerate(operands) if kind == "input"}

    def input(self, number: int, tensor: torch.Tensor) -> torch.Tensor:
        """Return the static tensor that the forward read as input ``number``, or ``tensor`` if it did not read it."""
        return self._inputs.get(number, tensor)

    def with_copies(self, which: Iterable[int]) -> list[torch.Tensor]:
        """Return the outputs, with copies at the indices ``which``, for the caller."""
        with self._lock:
            self._in_order()
            return self.graph.copies(which)

    def release(self) -> None:
        """Allow replays of the graph again."""
        self.graph.release()


def _nobody() -> None:
    return None


def static_input(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy with the same strides and values: a capture may read sizes from values."""
    place = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    _without_expansion(place).copy_(_without_expansion(tensor))
    return place


def _without_expansion(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` with each expanded dimension (stride 0) narrowed to its first index."""
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor
