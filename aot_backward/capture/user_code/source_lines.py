"""The line of the user's code for each node of a traced graph. A backward node has the line of the forward operator
that it differentiates."""

from __future__ import annotations

import contextlib
import linecache
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from torch import nn
from torch.fx import GraphModule

from aot_backward_exporters import torch_api
from aot_backward_exporters.graph import LINE, Line
from aot_backward_exporters.process_state import patched

from . import source_location

ENGINE = ("/torch/autograd/__init__.py", "/torch/autograd/graph.py")
"""Files at which a walk up the stack ends: the caller of the engine did not ask for this operator."""


@contextlib.contextmanager
def recorded_lines(program: nn.Module, outermost: CodeType) -> Iterator[None]:
    """Record the user's line of each node that a trace makes. ``outermost``: the code that runs ``program``; its
    callers are ignored."""
    tracer = torch_api.PythonKeyTracer
    names = {id(module): name for name, module in program.named_modules()}
    original = tracer.create_node

    def create_node(self: Any, kind: str, *args: Any, **kwargs: Any) -> Any:
        node = original(self, kind, *args, **kwargs)
        if kind == "call_function" and LINE not in node.meta:
            line = _current_line(sys._getframe(1), names, outermost)
            if line is not None:
                node.meta[LINE] = line
        return node

    with patched(tracer, create_node=create_node):
        yield


def spread(graph: GraphModule) -> None:
    """Give the nodes of the backward the lines of the forward's operators that they belong to."""
    lines: dict[int, Line] = {}
    for node in graph.graph.nodes:
        if "seq_nr" in node.meta and LINE in node.meta and not node.meta.get("autograd_backward"):
            lines.setdefault(node.meta["seq_nr"], node.meta[LINE])
    for node in graph.graph.nodes:
        if node.meta.get("autograd_backward") and LINE not in node.meta and node.meta.get("seq_nr") in lines:
            node.meta[LINE] = lines[node.meta["seq_nr"]]


def _current_line(frame: FrameType | None, names: dict[int, str], outermost: CodeType) -> Line | None:
    user_frame: FrameType | None = None
    owner = ""
    while frame is not None:
        code = frame.f_code
        if code is outermost or code.co_filename.endswith(ENGINE):
            return _line_of(user_frame, owner)
        if user_frame is None and source_location.is_user_code(code.co_filename):
            user_frame = frame
        if not owner and code.co_name == "forward":
            owner = names.get(id(frame.f_locals.get("self")), "")
        frame = frame.f_back
    return None  # made by AOTAutograd, such as the writes into buffers at the end


def _line_of(found: FrameType | None, owner: str) -> Line | None:
    if found is None:
        return Line("", 0, "", "", owner) if owner else None
    file, number = found.f_code.co_filename, found.f_lineno
    return Line(
        "/".join(Path(file).parts[-2:]),
        number,
        found.f_code.co_name,
        linecache.getline(file, number).strip()[:200],
        owner,
    )
