"""Compiled graphs on a GPU: they run on the caller's device and stream, and errors report the state of the GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from ..errors import ExecutionError
from ..format.manifest import LibrarySpec
from .library import Library, reason_of


class CudaLibrary(Library):
    """A library with kernels for :attr:`device`. Its memory comes from PyTorch's caching allocator."""

    def run(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """Queue the graph on the current stream of its device. As in eager, the next synchronization raises errors of
        the kernels; with ``CUDA_LAUNCH_BLOCKING=1`` this call raises them."""
        try:
            with self.lock:  # one caller at a time: the container was opened single-threaded
                if torch.cuda.current_device() == self.device.index:
                    return super().run(inputs)
                with torch.cuda.device(self.device):  # the runner takes the current stream of the current device
                    return super().run(inputs)
        except RuntimeError as error:
            if capturing():
                raise
            raise ExecutionError(
                f"{self.spec.member}: native code failed on {self.device} ({reason_of(error)}); {_condition(self.device)}"
            ) from error

    @property
    def raw_run(self) -> Callable[[list[torch.Tensor]], list[torch.Tensor]]:
        return self.run


def library_on(device: torch.device, path: Callable[[], Path], spec: LibrarySpec) -> Library:
    """Return the compiled graph at ``path``, to run on ``device``."""
    return Library(path, spec, device) if device.type == "cpu" else CudaLibrary(path, spec, device)


def capturing() -> bool:
    """Return whether the current stream is being captured."""
    try:
        return torch.cuda.is_current_stream_capturing()
    except RuntimeError:  # after a fault every CUDA call raises it
        return False


def _condition(device: torch.device) -> str:
    """Return as text whether the GPU still answers, and its free memory: compiled code states no reason."""
    try:
        torch.cuda.synchronize(device)
        free, total = torch.cuda.mem_get_info(device)
    except RuntimeError as error:
        return (
            f"the GPU no longer answers this process ({str(error).partition(chr(10))[0]}): restart the process, with CUDA_LAUNCH_BLOCKING=1 to see "
            "the call that caused the fault"
        )
    return f"{free / 1e9:.1f} of {total / 1e9:.1f} GB of its memory are free, and the function is still usable"
