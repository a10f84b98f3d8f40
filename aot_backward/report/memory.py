"""Compute the bytes that the values of a graph hold while it runs, in its own order and at the example's sizes.

This counts the graph as captured. The compiler fuses neighbours and never stores the values in between, so this is an
upper bound on the values if it keeps their order. Weights are left out, and so is memory that an operator needs while
it runs.
"""

from __future__ import annotations

from dataclasses import dataclass

from .graph_model import Drawing, Node

VIEWS = frozenset(
    {
        "alias",
        "as_strided",
        "chunk",
        "conj",
        "detach",
        "diagonal",
        "expand",
        "expand_as",
        "imag",
        "lift_fresh",
        "movedim",
        "narrow",
        "permute",
        "real",
        "select",
        "slice",
        "split",
        "split_with_sizes",
        "squeeze",
        "swapaxes",
        "t",
        "transpose",
        "unbind",
        "unfold",
        "unsafe_split",
        "unsafe_split_with_sizes",
        "unsqueeze",
        "view",
        "view_as",
        "view_as_complex",
        "view_as_real",
        "_conj",
        "_neg_view",
        "_reshape_alias",
        *("_unsafe_view", "broadcast_in_dim", "view_of"),
    }
)
"""Operators with results that share their first argument's memory."""


@dataclass(frozen=True)
class MemoryUse:
    """``live``: bytes in memory while each node runs. ``given``: bytes of the inputs, which the caller keeps all the
    time. ``peak``: the node with the most live bytes."""

    live: tuple[int, ...]
    given: int

    @property
    def peak(self) -> int:
        return max(range(len(self.live)), key=self.live.__getitem__)


def memory_use(drawing: Drawing) -> MemoryUse:
    """Count each value from the node that makes it to the last that reads it or a view of it; inputs and results to the
    end."""
    last = len(drawing.nodes) - 1
    begin: list[int] = []
    end: list[int] = []
    bytes_: list[int] = []
    # For each node and each tensor of its value, the allocations that it uses
    allocs: list[tuple[tuple[int, ...], ...]] = []
    input_bytes = 0

    def memory(start: int, stop: int, count: int) -> int:
        begin.append(start)
        end.append(stop)
        bytes_.append(count)
        return len(begin) - 1

    for i, node in enumerate(drawing.nodes):
        for j in node.inputs:
            item = node.index if node.operator == "operator:getitem" else -1
            for memories in (
                allocs[j]
                if not 0 <= item < len(allocs[j]) or not drawing.nodes[j].several
                else allocs[j][item : item + 1]
            ):
                for m in memories:
                    end[m] = max(end[m], i)
        if node.operator == "placeholder":
            input_bytes += sum(t.bytes for t in node.tensors if t)
            allocs.append(tuple((memory(0, last, t.bytes),) if t else () for t in node.tensors))
        elif node.operator in ("weight", "constant", "graph", "output"):
            allocs.append(((),) * len(node.tensors))
        elif node.operator == "operator:getitem" and node.inputs:
            source = allocs[node.inputs[0]]
            allocs.append(
                (source[node.index],)
                if 0 <= node.index < len(source) and drawing.nodes[node.inputs[0]].several
                else source[:1]
            )
        elif node.inputs and shares(node):
            allocs.append((tuple(m for memories in allocs[node.inputs[0]] for m in memories),) * len(node.tensors))
        else:
            allocs.append(tuple((memory(i, i, t.bytes),) if t else () for t in node.tensors))
    change = [0] * (last + 2)
    for start, stop, count in zip(begin, end, bytes_, strict=True):
        change[start] += count
        change[stop + 1] -= count
    live, total = [], 0
    for difference in change[:-1]:
        total += difference
        live.append(total)
    return MemoryUse(tuple(live), input_bytes)


def shares(node: Node) -> bool:
    """Return whether its value shares memory with its first input: a view, or its first argument changed in place."""
    return node.short in VIEWS or (node.short.endswith("_") and not node.short.endswith("__"))
