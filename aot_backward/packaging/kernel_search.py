"""Find the fewest operators that eager's kernels must compute if a variant's compiled code gives other numbers than
eager."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence

import torch
from torch.fx import Node

from aot_backward_exporters import torch_api
from aot_backward_exporters.graph import EAGER_KERNEL, LINE, Graph
from aot_backward_runtime.errors import ExportError

from ..checks.tolerance import WrongResult
from .contents import Contents

log = logging.getLogger("aot_backward")

_SINGLE_TRIES = 10
"""The most compilations if an operator's eager kernel cannot be called: each operator is then tried alone. A guess."""
_TRIES = 30
"""The most compilations of one search. Each takes seconds. Seven operators with one at fault took six."""


def repair(contents: Contents, prefixes: Sequence[str], check: Callable[[], object], error: ExportError) -> str:
    """Recompile the graphs whose names begin with one of ``prefixes``, so that ``check`` passes. Return a description
    of the change.

    Raise ``error``, which ``check`` raised before, if it fails even with eager's kernels for every operator that has
    one.
    """
    graphs = [graph for name, graph in contents.graphs.items() if name.startswith(tuple(prefixes))]
    before = contents.mark()
    tries, runs = 0, True

    def passes(operators: Iterable[str]) -> bool:
        nonlocal tries, runs
        tries += 1
        contents.progress(f"find the operator that differs from eager, {tries} of at most {_TRIES}", tries - 1, _TRIES)
        contents.back_to(before)
        try:
            _compile(contents, graphs, frozenset(operators))
            check()
        except WrongResult:
            return False
        except (ExportError, RuntimeError):  # compiled code cannot call an operator's eager kernel
            runs = False
            return False
        return True

    suspects = sorted({str(node.target) for graph in graphs for node in graph.module.graph.nodes if _has_kernel(node)})
    culprits = None
    if passes(suspects):
        culprits = _fewest(suspects, passes, lambda: tries >= _TRIES - 1)
    elif not runs:
        culprits = next(([s] for s in suspects if tries < _SINGLE_TRIES and passes([s])), None)
    if culprits is not None and not passes(culprits):  # the last compilation used other operators
        culprits = None
    contents.progress(f"find the operator that differs from eager, {tries} of at most {_TRIES}", _TRIES, _TRIES)
    if culprits is None:
        contents.back_to(before)
        _mark(graphs, frozenset())
        raise error
    lines = {
        f"{line.file}:{line.number}: {line.text}"
        for graph in graphs
        for n in _marked(graph)
        if (line := n.meta.get(LINE)) and line.file
    }
    location = f" ({'; '.join(sorted(lines)[:3])})" if lines else ""
    message = str(error).partition("; nothing was written")[0]
    return f"PyTorch's own kernels compute {', '.join(culprits)}{location}, because compiled code gave other numbers: {message}"


def _fewest(
    suspects: Sequence[str], passes: Callable[[Sequence[str]], bool], exhausted: Callable[[], bool]
) -> list[str]:
    """Return a minimal part of ``suspects`` that passes, as far as the number of compilations allows.

    Source: delta debugging (Zeller and Hildebrandt, 2002)."""
    remaining, parts = list(suspects), 2
    while len(remaining) > 1 and not exhausted():
        size = -(-len(remaining) // parts)
        chunks = [remaining[i : i + size] for i in range(0, len(remaining), size)]
        complements = [[s for s in remaining if s not in chunk] for chunk in chunks] if len(chunks) > 2 else []
        smaller = next((part for part in (*chunks, *complements) if not exhausted() and passes(part)), None)
        if smaller is not None:
            parts = 2 if smaller in chunks else max(parts - 1, 2)
            remaining = smaller
        elif parts >= len(remaining):
            break
        else:
            parts = min(2 * parts, len(remaining))
    return remaining


def _compile(contents: Contents, graphs: Sequence[Graph], operators: frozenset[str]) -> None:
    _mark(graphs, operators)
    for joint in {id(joint): joint for graph in graphs for joint in [contents.joints[graph.name]]}.values():
        guards = joint.sizes.guards()
        contents.compile([graph for graph in graphs if contents.joints[graph.name] is joint], joint)
        if joint.sizes.guards() != guards:
            raise ExportError("the code holds for fewer sizes")


def _mark(graphs: Sequence[Graph], operators: frozenset[str]) -> None:
    for graph in graphs:
        for node in graph.module.graph.nodes:
            node.meta.pop(EAGER_KERNEL, None)
            if _has_kernel(node) and str(node.target) in operators:
                node.meta[EAGER_KERNEL] = True


def _marked(graph: Graph) -> list[Node]:
    return [node for node in graph.module.graph.nodes if node.meta.get(EAGER_KERNEL)]


def _has_kernel(node: Node) -> bool:
    """Return whether ``node`` computes a new value from tensors by an operator that compiled code can call."""
    target = node.target
    if (
        not isinstance(target, torch_api.OpOverload)
        or target.namespace != "aten"
        or torch.Tag.nondeterministic_seeded in target.tags
    ):
        return False
    schema = target._schema
    # It writes, or its result is a view
    if any(a.alias_info is not None for a in (*schema.arguments, *schema.returns)):
        return False
    numbers = [
        i for i, a in enumerate(node.args) if type(a) in (int, float) and str(schema.arguments[i].type) == "Tensor"
    ]
    # Generated code can pass a number only to mul.Scalar
    if numbers and not (numbers == [1] and target is torch.ops.aten.mul.Tensor):
        return False
    return any(isinstance(n.meta.get("val"), torch.Tensor) for n in node.all_input_nodes)
