"""One compiled graph: open it at the first run, bind its constants to tensors by pointer, and call it.

Only one caller at a time may enter a container. ``run`` holds the interpreter lock throughout. Graphs with operators
that go through the proxy executor can release it in between, so they have their own lock.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from .. import torch_api
from ..errors import ExecutionError, IncompatibleError
from ..format.manifest import LibrarySpec
from . import allocator
from .captured_graph import PooledOutputs
from .memory import extent

Binding = tuple[Mapping[str, torch.Tensor], tuple[int, ...]]
"""The tensors that constants point at, by weight key, and the addresses of the entry's own. A library compares that
tuple by identity: a new tuple rebinds it."""
NO_CONSTANTS: Binding = ({}, ())
"""The binding of a library that takes all tensors as arguments."""
_MEASURED = 8  # runs of a graph whose fresh memory is counted: the first may be short. A guess


class Library:
    """One compiled graph, opened at its first run. A copy (``deepcopy``) opens it again, so that each copy binds its
    own constants."""

    def __init__(self, path: Callable[[], Path], spec: LibrarySpec, device: torch.device):
        self.path, self.spec, self.device = path, spec, device
        self._runner: Any = None
        self._stated: torch_api.Stated | None = None
        self._bound: tuple[int, ...] | None = None
        self._keep: list[torch.Tensor] = []
        self._measured = 0
        self.lock = threading.RLock()

    pools_outputs = False
    """True if :meth:`run_forward` may leave its outputs in memory that later calls write."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Library:
        return type(self)(self.path, self.spec, self.device)

    def bind(self, binding: Binding) -> bool:
        """Point the constants at the tensors of ``binding``, unless they are bound to that tuple of addresses (see
        :data:`Binding`). Return whether they were bound again."""
        tensors, addresses = binding
        if self._bound is addresses:
            return False
        if self._runner is None:
            runner = self._open()
            self._check_layouts(tensors)
            self._runner = runner
        if self.spec.constants:
            self._bound = None  # an interrupted binding is made again
            bound = {c.name: tensors[c.weight].detach() for c in self.spec.constants}
            try:
                self._runner.bind(bound)
            except ValueError as error:
                raise IncompatibleError(f"{self.spec.member} was not compiled for these weights: {error}") from error
            self._keep = list(bound.values())  # the previous ones had to live until here
        self._bound = addresses
        return True

    def run(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """Call the graph. Inputs must have been checked; results are new tensors."""
        try:
            if self._measured < _MEASURED:
                self._measured += 1
                with allocator.kept():
                    return self.raw_run(inputs)
            return self.raw_run(inputs)
        except RuntimeError as error:
            raise self.failed(error) from error

    def run_bound(self, binding: Binding, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """Call :meth:`bind` and :meth:`run`, before another thread can bind other tensors."""
        with self.lock:
            if self._bound is not binding[1]:
                self.bind(binding)
            return self.run(inputs)

    def _run_locked(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        with self.lock:
            return self._runner.run(inputs)

    def failed(self, error: RuntimeError) -> ExecutionError:
        """Return the error to raise for an error of native code."""
        return ExecutionError(
            f"{self.spec.member}: native code failed ({reason_of(error)}); the function is still usable"
        )

    def run_forward(
        self, operands: Sequence[tuple[str, Any]], inputs: list[torch.Tensor], reader: Any, hooked: bool
    ) -> tuple[list[torch.Tensor], PooledOutputs | None]:
        """Call :meth:`run` for a forward that awaits its backward. If the results stay in a memory pool, nothing is
        written there until they are released, or until ``reader``, the call with that backward, is gone. ``operands``:
        the parsed operands of the inputs. ``hooked``: saved-tensor hooks receive the results."""
        return self.run(inputs), None

    def run_backward(self, inputs: list[torch.Tensor], pooled: PooledOutputs | None) -> list[torch.Tensor]:
        """Call :meth:`run` for the backward of a :meth:`run_forward` that returned ``pooled``."""
        return self.run(inputs)

    @property
    def is_one_call(self) -> bool:
        """True if :attr:`raw_run` is one C++ call, which no interrupt can split."""
        return not self.spec.operators

    @property
    def raw_run(self) -> Callable[[list[torch.Tensor]], list[torch.Tensor]]:
        """The function that :meth:`run` calls, with native code's own errors. The library must have been bound."""
        return self._run_locked if self.spec.operators else self._runner.run

    def _load(self) -> Any:
        path = str(self.path())
        runner = torch_api.Runner(path, self.device)
        if self.device.type == "cpu":
            self._stated = torch_api.stated(path)
            self._check_counts(self._stated)
        return runner

    def _check_counts(self, stated: torch_api.Stated) -> None:
        """Raise :class:`IncompatibleError` if the library's number of inputs or outputs differs from the manifest: it
        would read past the end of its arguments."""
        counts = (len(self.spec.inputs), len(self.spec.outputs))
        if (stated.inputs, stated.outputs) != counts:
            raise IncompatibleError(
                f"{self.spec.member} takes {stated.inputs} tensors and gives {stated.outputs}; the manifest says {counts[0]} and {counts[1]}: "
                "the package has parts of different exports; export it again"
            )

    def _open(self) -> Any:
        try:
            runner = self._load()
        except RuntimeError as error:
            raise IncompatibleError(
                f"{self.spec.member} could not be opened: {str(error).splitlines()[0]}{self._hint()}"
            ) from error
        names = {c.name for c in self.spec.constants}
        if runner.constants != names:
            raise IncompatibleError(
                f"{self.spec.member} has the constants {sorted(runner.constants) or 'none'}; the manifest lists {sorted(names) or 'none'}"
            )
        return runner

    def _check_layouts(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Raise :class:`IncompatibleError` if a constant's strides span more memory than when the library was compiled,
        or expand it over less. The library states only that memory size, not the strides; a tensor that was part of a
        larger one had more."""
        if self._stated is None:
            return
        for constant in self.spec.constants:
            tensor, layout = tensors[constant.weight], self._stated.layouts.get(constant.name)
            if layout is not None and layout != _described(tensor, layout):
                raise IncompatibleError(
                    f"{self.spec.member} was compiled for {constant.weight} as {layout}; the manifest says {_described(tensor, '')}: the "
                    "manifest does not belong to this code; export it again"
                )
            expanded = any(n > 1 and s == 0 for n, s in zip(tensor.shape, tensor.stride(), strict=True))
            held, had = -(-extent(tensor) // 64) * 64, self._stated.constants[constant.name]
            if held > had or (expanded and held != had):
                raise IncompatibleError(
                    f"{self.spec.member} was compiled for {had} bytes of {constant.weight}; with the manifest's strides {tensor.stride()} it has "
                    f"{held}: the manifest does not belong to this code; export it again"
                )

    def _hint(self) -> str:
        if not self.spec.operators:
            return ""
        return f"; it calls {', '.join(self.spec.operators)}: import the modules that register these operators before load()"


def _described(tensor: torch.Tensor, layout: str) -> str:
    """Return ``float32 [2,3] [3,1]``. A dimension of one element takes its stride from ``layout``, because it does not
    matter."""
    layout_strides = layout.rpartition("[")[2].rstrip("]").split(",")
    layout_strides = layout_strides if len(layout_strides) == tensor.dim() else list(map(str, tensor.stride()))
    strides = [
        layout_stride if n <= 1 else str(s)
        for n, s, layout_stride in zip(tensor.shape, tensor.stride(), layout_strides, strict=True)
    ]
    return f"{str(tensor.dtype).removeprefix('torch.')} [{','.join(map(str, tensor.shape))}] [{','.join(strides)}]"


_KERNEL = re.compile(r"^Exception raised from (\w+) at", re.MULTILINE)
_INDEX = re.compile(r"index out of bounds|out of range")


def reason_of(error: BaseException) -> str:
    """Return native code's message in one line, without its stack. Kernels are named after the operators fused into
    them."""
    if isinstance(error, ExecutionError) and error.__cause__ is not None:
        return reason_of(error.__cause__)
    text = str(error)
    reason, kernel = text.partition("\n")[0].strip(), _KERNEL.search(text)
    if kernel and kernel[1].startswith(("cpp_", "triton_")):
        reason += f", in {kernel[1]}"
    if _INDEX.search(reason):
        reason += ": an index among the inputs (of an embedding, a gather, a class label) is negative or too large"
    return reason
