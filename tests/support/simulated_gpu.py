"""What stands for a GPU where there is none: it "captures" a call and "replays" it into the same memory, as a CUDA graph does, on the CPU.

Real are the compiled code, the numbers, and everything in ``aot_backward_runtime.native.cuda_graphs``. On a GPU nothing runs during a
capture; here it does, and what it wrote is put back.
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
    ``refuse``: so many captures fail, as those of code that waits for the GPU.

    As PyTorch's allocator does: what a graph needs in between is free again once it is captured, and results of the next graph of its pool lie
    there."""

    def __init__(self) -> None:
        self.refuse = 0
        self._shared = Pool()

    def why_not_capturable(self) -> str:
        return ""

    def in_order(self) -> None:
        pass

    def pool(self) -> Pool:
        return Pool()

    def capture(self, call: Callable[[], list[torch.Tensor]], pool: Pool | None) -> tuple[Callable[[], None], list[torch.Tensor]]:
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
    """Memory that graphs share: pieces that are free after a capture, though its replays write there."""

    def __init__(self) -> None:
        self._free: list[torch.UntypedStorage] = []

    def place(self, results: list[torch.Tensor]) -> None:
        """Gives results pieces of their size, where any are free."""
        moved: dict[int, torch.UntypedStorage] = {}
        for t in results:
            old = t.untyped_storage()
            if old.data_ptr() not in moved and (fits := [s for s in self._free if s.nbytes() == old.nbytes()]):
                moved[old.data_ptr()] = fits[-1]
                self._free = [s for s in self._free if s is not fits[-1]]
            if new := moved.get(old.data_ptr()):
                t.set_(new, t.storage_offset(), t.shape, t.stride())

    def scratch(self, sizes: set[int]) -> list[torch.UntypedStorage]:
        """What a graph writes in between, as large as what goes in and comes out; free when it is captured."""
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
    """The package, loaded as with ``cudagraphs=True``."""
    machine, package = Simulated(), load(path)
    package._graphs = Graphs(machine)
    return package, machine
