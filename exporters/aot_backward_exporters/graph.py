"""Inputs and results of the exporters: plain dataclasses, no behaviour."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the command line reads VERSION from here, and must not wait a second for torch to say --help
    from pathlib import Path

    import torch

    from aot_backward_runtime.format.manifest import TensorSpec

VERSION = "0.1.0"


ROUNDED = "aot_backward_rounded"
"""The key in a node's ``meta`` that is true if a 16-bit result must be rounded as eager rounds it, also within a fused
loop."""

EAGER_KERNEL = "aot_backward_eager_kernel"
"""The key in a node's ``meta`` that is true if eager's own kernel is called, because compiled code gave other
numbers."""

LINE = "aot_backward_line"
"""The key in a node's ``meta`` that holds its :class:`Line`."""


@dataclass(frozen=True)
class Line:
    """The line of user code that an operator comes from."""

    file: str  # its last folder and its name: "nets/model.py"
    number: int
    function: str
    text: str
    module: str  # the submodule that calls it in forward(): "layers.0"


@dataclass(frozen=True)
class Graph:
    """One functional ATen graph, ready to compile.

    ``module``: its placeholders are the inputs, in order; parameters and buffers are ``get_attr`` nodes, named as in
    ``constants`` (in-place updates of buffers are ``copy_`` nodes); its output is a flat tuple of tensors.
    ``constants``: attribute name -> (weight key, the tensor). ``nodes``: operators in it, before any decomposition by
    the compiler.
    """

    name: str  # "net.0.forward": the model name inside the archive
    module: torch.fx.GraphModule
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    constants: dict[str, tuple[str, torch.Tensor]]
    nodes: int
    donated: tuple[int, ...] = ()  # inputs that may be overwritten with the code's own values


@dataclass(frozen=True)
class Artifact:
    """One compiled graph: files on disk for the package."""

    library: Path  # the shared library
    metadata: Path  # *_metadata.json
    extern: Path | None  # JSON of operators that go through the proxy executor
    constants: dict[str, str]  # the library's name of each bound constant -> weight key
    needed: tuple[str, ...]
    glibc: str
    glibcxx: str
    operators: tuple[str, ...]  # operators that go through the proxy executor


Options = dict[str, object]
"""Compiler settings, by the names of ``torch._inductor.config``."""
