"""Partition a recorded pass: runs of operations that become one compiled graph each, and operations between them that
call Python code.

The latter run in eager's order: hooks, custom functions, and the leaves that accumulate their gradients.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass

import torch

from aot_backward_runtime.tapes.tape import CALLS_OUT, Slot, Tape, slots

from .recorded_structure import ExamplePass

OPAQUE = frozenset({"MkldnnRnnLayerBackward0"})
"""Nodes that are not compiled: one operator of oneDNN, which compiling would not make faster. AOTInductor's proxy
executor cannot pass on its missing list of batch sizes either (torch 2.13)."""


@dataclass(frozen=True)
class Partition:
    """Operations (by number) that become one graph, or a single operation that is not compiled.

    ``inputs``: tensors of the pass that a graph reads. ``values``: results of earlier partitions that it reads.
    ``outputs``: its results that are read outside.
    """

    ops: tuple[int, ...]
    compiled: bool
    inputs: tuple[int, ...] = ()
    values: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()


def partition_tape(
    tape: Tape,
    hook_groups: Sequence[int],
    opaque: Set[str] = OPAQUE,
    single: Set[int] = frozenset(),
) -> list[Partition]:
    """Return the partitions of a pass in the order in which they run.

    ``hook_groups``: which hooks are one object. ``opaque`` (nodes by name) and ``single`` (operations by number) are
    not compiled.

    Everything that eager runs before a hook runs before it here, since a hook may read or change any tensor. The
    exception is hooks that unpack saved tensors: hooks of one object are called together, before the operations between
    them (the next object is another checkpoint, whose recomputed tensors should not be in memory at the same time).
    """
    parts: list[tuple[list[int], bool]] = []
    graph: list[int] = []
    leaves: list[int] = []
    unpacking: int | None = None

    def flush() -> None:
        nonlocal unpacking
        if graph:
            parts.append((list(graph), True))
        parts.extend(([n], False) for n in leaves)
        graph.clear()
        leaves.clear()
        unpacking = None

    for n, op in enumerate(tape.ops):
        if op.kind == "accumulate":
            leaves.append(n)
        elif n not in single and op.kind not in CALLS_OUT and op.name not in opaque:
            graph.append(n)
        else:
            group = None
            if op.kind == "unpack_hook":
                index = op.operands[0].index
                group = hook_groups[index] if index < len(hook_groups) else -1 - index
            if group is None or group != unpacking:
                flush()
            unpacking = group
            parts.append(([n], False))
    flush()
    readers = _readers(tape)
    return [
        _partition(tape, numbers, readers) if is_compiled else Partition(tuple(numbers), False)
        for numbers, is_compiled in parts
    ]


def sparse_operations(tape: Tape, examples: Sequence[ExamplePass]) -> set[int]:
    """Return the operations that return or read a sparse tensor. Native code does not support them, so they are not
    compiled."""
    sparse = {
        Slot("value", v)
        for e in examples
        for v, t in e.values.items()
        if t is not None and t.layout is not torch.strided
    }
    if not sparse:
        return set()
    producers = {n for n, op in enumerate(tape.ops) if any(Slot("value", r) in sparse for r in op.results)}
    return producers | {n for n, op in enumerate(tape.ops) if not sparse.isdisjoint(slots(op.operands))}


def _partition(tape: Tape, numbers: Sequence[int], readers: dict[int, set[int]]) -> Partition:
    inside = {r for n in numbers for r in tape.ops[n].results if r >= 0}
    reads = [s for n in numbers for s in slots(tape.ops[n].operands)]
    return Partition(
        ops=tuple(numbers),
        compiled=True,
        inputs=tuple(dict.fromkeys(s.index for s in reads if s.kind == "input")),
        values=tuple(dict.fromkeys(s.index for s in reads if s.kind == "value" and s.index not in inside)),
        outputs=tuple(r for r in sorted(inside) if readers.get(r, set()) - set(numbers)),
    )


def _readers(tape: Tape) -> dict[int, set[int]]:
    """Return the operations that read each value; -1 stands for the pass's outputs."""
    out: dict[int, set[int]] = {}
    for n, op in enumerate(tape.ops):
        for s in slots(op.operands):
            if s.kind == "value":
                out.setdefault(s.index, set()).add(n)
    for s in slots(tape.outputs):
        if s.kind == "value":
            out.setdefault(s.index, set()).add(-1)
    return out
