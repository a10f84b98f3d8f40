"""One compiled graph: it is opened when it is first run, its constants are bound to tensors by pointer, and it is called.

The containers are entered one caller at a time: ``run`` holds the interpreter lock from its first instruction to its last. Graphs with
operators that go through the proxy executor can give it up in between, so those have a lock of their own.
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
from .captured_graph import PooledOutputs
from .memory import extent

Binding = tuple[Mapping[str, torch.Tensor], tuple[int, ...]]
"""The tensors that constants point at, by weight key, and the addresses of the entry's own. A library compares that tuple by identity: a new one has
it bound again."""
NO_CONSTANTS: Binding = ({}, ())
"""Of a library whose tensors are all arguments."""


class Library:
    """One compiled graph, opened when it is first run. A copy (``deepcopy``) opens it again: constants are bound to each by itself."""

    def __init__(self, path: Callable[[], Path], spec: LibrarySpec, device: torch.device):
        self.path, self.spec, self.device = path, spec, device
        self._runner: Any = None
        self._stated: torch_api.Stated | None = None
        self._bound: tuple[int, ...] | None = None
        self._keep: list[torch.Tensor] = []
        self.lock = threading.RLock()

    pools_outputs = False
    """Whether :meth:`run_forward` may leave its outputs in memory that later calls write."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Library:
        return type(self)(self.path, self.spec, self.device)

    def bind(self, binding: Binding) -> bool:
        """Points the constants at the tensors of ``binding``, unless it was bound to that tuple of addresses before (see :data:`Binding`). Returns
        whether they were bound again."""
        tensors, addresses = binding
        if self._bound is addresses:
            return False
        if self._runner is None:
            runner = self._open()
            self._check_layouts(tensors)
            self._runner = runner
        if self.spec.constants:
            self._bound = None  # a binding that was interrupted is made again
            bound = {c.name: tensors[c.weight].detach() for c in self.spec.constants}
            try:
                self._runner.bind(bound)
            except ValueError as error:
                raise IncompatibleError(f"{self.spec.member} was not compiled for these weights: {error}") from error
            self._keep = list(bound.values())  # the previous ones had to live until here
        self._bound = addresses
        return True

    def run(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """Calls the graph. Inputs must have been checked; results are new tensors."""
        try:
            return self.raw_run(inputs)
        except RuntimeError as error:
            raise self.failed(error) from error

    def run_bound(self, binding: Binding, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """:meth:`bind`, and :meth:`run` before another thread can bind other tensors."""
        with self.lock:
            if self._bound is not binding[1]:
                self.bind(binding)
            return self.run(inputs)

    def _run_locked(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        with self.lock:
            return self._runner.run(inputs)

    def failed(self, error: RuntimeError) -> ExecutionError:
        """The error to raise for one of native code."""
        return ExecutionError(f"{self.spec.member}: native code failed ({reason_of(error)}); the next call may go well")

    def run_forward(
        self, operands: Sequence[tuple[str, Any]], inputs: list[torch.Tensor], reader: Any, hooked: bool
    ) -> tuple[list[torch.Tensor], PooledOutputs | None]:
        """:meth:`run` for a forward whose backward is to come. Where the results stay in a memory pool, nothing is written there until they are
        released, or ``reader``, the call whose backward reads them, is gone. ``operands``: what the inputs are. ``hooked``: saved-tensor hooks get
        hold of the results."""
        return self.run(inputs), None

    def run_backward(self, inputs: list[torch.Tensor], pooled: PooledOutputs | None) -> list[torch.Tensor]:
        """:meth:`run` for the backward of a forward that ran by :meth:`run_forward`, which gave ``pooled``."""
        return self.run(inputs)

    @property
    def is_one_call(self) -> bool:
        """Whether :attr:`raw_run` is one call of C++, which an interrupt comes before or after, and never into."""
        return not self.spec.operators

    @property
    def raw_run(self) -> Callable[[list[torch.Tensor]], list[torch.Tensor]]:
        """What :meth:`run` calls, with errors as native code raises them; the library must have been bound."""
        return self._run_locked if self.spec.operators else self._runner.run

    def _load(self) -> Any:
        path = str(self.path())
        runner = torch_api.Runner(path, self.device)
        if self.device.type == "cpu":
            self._stated = torch_api.stated(path)
            self._check_counts(self._stated)
        return runner

    def _check_counts(self, stated: torch_api.Stated) -> None:
        """:class:`IncompatibleError` where the library takes or gives another number of tensors than the manifest says: it would read beyond the
        end of its arguments."""
        listed = (len(self.spec.inputs), len(self.spec.outputs))
        if (stated.inputs, stated.outputs) != listed:
            raise IncompatibleError(
                f"{self.spec.member} takes {stated.inputs} tensors and gives {stated.outputs}; the manifest says {listed[0]} and {listed[1]}: "
                "the package is made of parts of different exports; export it again"
            )

    def _open(self) -> Any:
        try:
            runner = self._load()
        except RuntimeError as error:
            raise IncompatibleError(f"{self.spec.member} could not be opened: {str(error).splitlines()[0]}{self._hint()}") from error
        listed = {c.name for c in self.spec.constants}
        if runner.constants != listed:
            raise IncompatibleError(f"{self.spec.member} has the constants {sorted(runner.constants)}, the manifest lists {sorted(listed)}")
        return runner

    def _check_layouts(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """:class:`IncompatibleError` where a constant's strides spread it over more memory than it had when the library was compiled, or expand it
        over less. The library states that memory alone, not its strides; a tensor that was part of a larger one had more."""
        if self._stated is None:
            return
        for constant in self.spec.constants:
            tensor, layout = tensors[constant.weight], self._stated.layouts.get(constant.name)
            if layout is not None and layout != _described(tensor, layout):
                raise IncompatibleError(
                    f"{self.spec.member} was compiled for {constant.weight} as {layout}; by the manifest it is {_described(tensor, '')}: the "
                    "manifest is not that of this code; export it again"
                )
            expanded = any(n > 1 and s == 0 for n, s in zip(tensor.shape, tensor.stride(), strict=True))
            held, had = -(-extent(tensor) // 64) * 64, self._stated.constants[constant.name]
            if held > had or (expanded and held != had):
                raise IncompatibleError(
                    f"{self.spec.member} was compiled for {had} bytes of {constant.weight}; with the manifest's strides {tensor.stride()} it has "
                    f"{held}: the manifest is not that of this code; export it again"
                )

    def _hint(self) -> str:
        if not self.spec.operators:
            return ""
        return f"; it calls {', '.join(self.spec.operators)}: import the modules that register these operators before load()"


def _described(tensor: torch.Tensor, layout: str) -> str:
    """``float32 [2,3] [3,1]``; where a dimension has one element, its stride does not matter and is that of ``layout``."""
    theirs = layout.rpartition("[")[2].rstrip("]").split(",")
    theirs = theirs if len(theirs) == tensor.dim() else list(map(str, tensor.stride()))
    strides = [their if n <= 1 else str(s) for n, s, their in zip(tensor.shape, tensor.stride(), theirs, strict=True)]
    return f"{str(tensor.dtype).removeprefix('torch.')} [{','.join(map(str, tensor.shape))}] [{','.join(strides)}]"


_KERNEL = re.compile(r"^Exception raised from (\w+) at", re.MULTILINE)
_INDEX = re.compile(r"index out of bounds|out of range")


def reason_of(error: BaseException) -> str:
    """What native code says, in one line: its own text goes on with the stack. Kernels are named after the operators that were fused into them."""
    if isinstance(error, ExecutionError) and error.__cause__ is not None:
        return reason_of(error.__cause__)
    text = str(error)
    reason, kernel = text.partition("\n")[0].strip(), _KERNEL.search(text)
    if kernel and kernel[1].startswith(("cpp_", "triton_")):
        reason += f", in {kernel[1]}"
    if _INDEX.search(reason):
        reason += ": an index among the inputs (of an embedding, a gather, a class label) is negative or too large"
    return reason
