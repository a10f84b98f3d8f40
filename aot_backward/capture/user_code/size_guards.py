"""The origin of each guard on a size: the user's line, the operator, and whether a transform of ``torch.func``
asked."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import CodeType, FrameType
from typing import Any

import sympy
from torch import nn
from torch.fx import GraphModule

from aot_backward_exporters import torch_api
from aot_backward_exporters.graph import LINE
from aot_backward_exporters.process_state import patched

from . import source_location
from .source_lines import ENGINE

_TRANSFORMS = tuple(f"/torch/_functorch/{name}.py" for name in ("eager_transforms", "vmap", "apis"))


@dataclass(frozen=True)
class GuardOrigin:
    """The origin of a guard. ``where``: from :mod:`source_location`, or "". ``operator``: its name, or "".
    ``transformed``: within vmap, jvp or grad. ``number``: of the autograd node that asked, -1 if the forward did."""

    where: str = ""
    operator: str = ""
    transformed: bool = False
    number: int = -1


Places = Mapping[Any, GuardOrigin]
"""The guard's expression -> its origin."""


@contextlib.contextmanager
def recorded(program: nn.Module, outermost: CodeType) -> Iterator[Places]:
    """Record the origin of each new guard; an expression that holds for all sizes adds no guard. ``outermost``: the
    code that runs ``program``; its callers are ignored."""
    environment = torch_api.ShapeEnv
    original = environment.evaluate_expr
    places: dict[Any, GuardOrigin] = {}

    def evaluate_expr(self: Any, expression: Any, *args: Any, **kwargs: Any) -> Any:
        if _always_holds(expression):
            return sympy.true
        count = len(self.guards)
        result = original(self, expression, *args, **kwargs)
        for guard in self.guards[count:]:
            places.setdefault(guard.expr, _origin(program, outermost))
        return result

    with patched(environment, evaluate_expr=evaluate_expr):
        yield places


def _always_holds(expression: Any) -> bool:
    """Return whether it says that a maximum is at least one of its arguments, or a minimum at most one; sympy does not
    simplify this."""
    kind = type(expression).__name__
    if kind not in ("GreaterThan", "LessThan"):
        return False
    large, small = expression.args if kind == "GreaterThan" else reversed(expression.args)
    larger = large.args if type(large).__name__ == "Max" else (large,)
    smaller = small.args if type(small).__name__ == "Min" else (small,)
    return len(larger) + len(smaller) > 2 and any((a - b).is_nonnegative for a in larger for b in smaller)


def _origin(program: nn.Module, outermost: CodeType) -> GuardOrigin:
    frames: list[tuple[FrameType, int]] = []
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code is not outermost and not frame.f_code.co_filename.endswith(ENGINE):
        frames.append((frame, frame.f_lineno))
        frame = frame.f_back
    if frame is None:
        return GuardOrigin()  # torch's own guard, after the program has run
    where, operator = source_location.described(reversed(frames), program), _operator(frames)
    backward_node = torch_api.backward_that_runs()
    name, number = backward_node or ("", -1)
    return GuardOrigin(where, operator or name, _in_transform(outermost), number)


def _in_transform(outermost: CodeType) -> bool:
    """Return whether a transform of ``torch.func`` is on the stack, also as the caller of a backward."""
    frame: FrameType | None = sys._getframe(3)
    while frame is not None and frame.f_code is not outermost:
        if frame.f_code.co_filename.endswith(_TRANSFORMS):
            return True
        frame = frame.f_back
    return False


def _operator(frames: list[tuple[FrameType, int]]) -> str:
    """Return the innermost running operator that does not itself ask for sizes."""
    for frame, _ in frames:
        operator = frame.f_locals.get("func")
        if isinstance(operator, torch_api.OpOverload) and not str(operator).startswith(
            ("aten.size", "aten.sym_", "aten.stride")
        ):
            return str(operator)
    return ""


def located(places: Places, graph: GraphModule) -> Places:
    """Return ``places`` with lines for the guards of the backward: the lines of the forward's operators. ``graph``: the
    traced graph, with its lines."""
    lines = {
        node.meta.get("seq_nr"): node.meta[LINE]
        for node in graph.graph.nodes
        if LINE in node.meta and not node.meta.get("autograd_backward")
    }
    out = {}
    for guard, origin in places.items():
        line = lines.get(origin.number) if not origin.where else None
        out[guard] = replace(origin, where=source_location.of_line(line)) if line else origin
    return out
