"""A substitute for a GPU: it "captures" a call and "replays" it into the same memory on the CPU, as a CUDA graph does.

The compiled code, the numbers and everything in ``aot_backward_runtime.native.cuda_graphs`` are real. On a GPU nothing
runs during a capture. Here the call runs, and its writes are undone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch

from aot_backward_runtime import load
from aot_backward_runtime.loader import Package
from aot_backward_runtime.native.cuda_graphs import Graphs


class Simulated:
    """A :class:`~aot_backward_runtime.native.cuda_graphs.Recorder` on the CPU.
    ``refuse``: the number of captures that fail, as captures of code that waits for the GPU do.

    It manages memory like PyTorch's allocator: a graph's scratch memory is free again after its capture, and results of
    the next graph in its pool are placed there."""

    def __init__(self) -> None:
        self.refuse = 0
        self._shared = Pool()

    def why_not_capturable(self) -> str:
        return ""

    def in_order(self) -> None:
        pass

    def pool(self) -> Pool:
        return Pool()

    def capture(
        self, call: Callable[[], list[torch.Tensor]], pool: Pool | None
    ) -> tuple[Callable[[], None], list[torch.Tensor]]:
        if self.refuse:
            self.refuse -= 1
            raise RuntimeError("operation not permitted when stream is capturing")
        assert isinstance(call, partial)
        with _put_back([*call.func.__self__._keep, *call.args[0]]), torch.random.fork_rng(devices=[]):
            results = call()
        pool = pool or self._shared
        pool.place(results)
        between = pool.scratch({t.untyped_storage().nbytes() for t in (*call.args[0], *results)} - {0})

        def replay() -> None:
            for storage in between:
                storage.fill_(0x7F)
            for place, new in zip(results, call(), strict=True):
                place.untyped_storage().copy_(new.untyped_storage())

        return replay, results


class Pool:
    """Memory that graphs share: pieces are free after a capture, though the graph's replays write to them."""

    def __init__(self) -> None:
        self._free: list[torch.UntypedStorage] = []

    def place(self, results: list[torch.Tensor]) -> None:
        """Move results into free pieces of the same size."""
        moved: dict[int, torch.UntypedStorage] = {}
        for t in results:
            old = t.untyped_storage()
            if old.data_ptr() not in moved and (fits := [s for s in self._free if s.nbytes() == old.nbytes()]):
                moved[old.data_ptr()] = fits[-1]
                self._free = [s for s in self._free if s is not fits[-1]]
            if new := moved.get(old.data_ptr()):
                t.set_(new, t.storage_offset(), t.shape, t.stride())

    def scratch(self, sizes: set[int]) -> list[torch.UntypedStorage]:
        """Return scratch memory for a graph, as large as its inputs and outputs; it is free after the capture."""
        made = [torch.UntypedStorage(size) for size in sorted(sizes)]
        self._free += made
        return made


@contextmanager
def _put_back(tensors: list[torch.Tensor]) -> Iterator[None]:
    before = [t.untyped_storage().clone() for t in tensors]
    yield
    for tensor, storage in zip(tensors, before, strict=True):
        tensor.untyped_storage().copy_(storage)


def graphed(path: Path) -> tuple[Package, Simulated]:
    """Return the package, loaded as with ``cudagraphs=True``, and the simulated GPU."""
    machine, package = Simulated(), load(path)
    package._graphs = Graphs(machine)
    return package, machine
