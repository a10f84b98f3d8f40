"""What stands for a GPU where there is none: it "captures" a call and "replays" it into the same memory, as a CUDA graph does, on the CPU.

Real are the compiled code, the numbers, and everything in ``aot_backward_runtime.cudagraphs``. On a GPU nothing runs during a capture; here it does,
and what it wrote is put back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch

from aot_backward_runtime import load
from aot_backward_runtime.cudagraphs import Graphs
from aot_backward_runtime.package import Package


class Simulated:
    """A :class:`~aot_backward_runtime.cudagraphs.Recorder` on the CPU. ``refuse``: so many captures fail, as those of code that waits for the GPU."""

    def __init__(self) -> None:
        self.refuse = 0

    def hindrance(self) -> str:
        return ""

    def in_order(self) -> None:
        pass

    def capture(self, call: Callable[[], list[torch.Tensor]]) -> tuple[Callable[[], None], list[torch.Tensor]]:
        if self.refuse:
            self.refuse -= 1
            raise RuntimeError("operation not permitted when stream is capturing")
        assert isinstance(call, partial)
        with _put_back([*call.func.__self__._keep, *call.args[0]]), torch.random.fork_rng(devices=[]):
            results = call()

        def replay() -> None:
            for place, new in zip(results, call(), strict=True):
                place.untyped_storage().copy_(new.untyped_storage())

        return replay, results


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
