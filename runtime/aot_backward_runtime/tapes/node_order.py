"""Eager's order of nodes.

Compiled autograd walks the graph depth first; eager runs the ready node that was made last in the forward, leaves
first. Both are right, but sums of three gradients round differently and hooks run in another order, so a recorded tape
is put into eager's order.
Sources: ``torch/csrc/autograd/engine.cpp`` (``CompareNodeTaskTime``, ``ReadyQueue``), and libstdc++'s heap for ties
among leaves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from .tape import Op, Slot, slots

Edge = tuple[Any, int]


def eager_order(roots: Sequence[Any], inputs: Sequence[Any], names: Sequence[str]) -> list[int] | None:
    """Return the engine's node numbers (0 is the root of roots) in eager's order.

    ``roots``, ``inputs``: tensors or gradient edges, as the caller of ``backward`` or ``grad`` gave them. ``names``:
    the nodes' names in compiled autograd's walk. Return None if the walk from ``roots`` meets other names.
    """
    edges = [_edge(root) for root in roots]
    if any(node is None for node, _ in edges):
        return None
    needed = _needed([n for n, _ in edges], [_edge(i)[0] for i in inputs]) if inputs else None
    if needed is not None and len(edges) == 1 and edges[0][0] not in needed:
        return None  # no target is reachable; eager still calls the hooks of a sole root, the engine's walk does not
    following: dict[Any, list[Any]] = {}

    def after(node: Any) -> list[Any]:
        successors = following.get(node)
        if successors is None:
            successors = following[node] = [
                n for n, _ in node.next_functions if n is not None and (needed is None or n in needed)
            ]
        return successors

    first = [n for n, _ in edges if needed is None or n in needed]
    counts: dict[Any, int] = {}
    pending = list(dict.fromkeys(first))
    for node in first:
        counts[node] = counts.get(node, 0) + 1
    visited = set(pending)
    while pending:
        for node in after(pending.pop()):
            counts[node] = counts.get(node, 0) + 1
            if node not in visited:
                visited.add(node)
                pending.append(node)

    # compiled autograd's own walk, to number the nodes as it does
    number: dict[Any, int] = {}
    remaining = dict(counts)
    stack: list[Any] = []

    def visit(nodes: Sequence[Any]) -> None:
        for node in nodes:
            remaining[node] -= 1
            if not remaining[node]:
                stack.append(node)

    visit(first)
    while stack:
        node = stack.pop()
        number[node] = len(number) + 1
        visit(after(node))
    if len(number) + 1 != len(names) or any(names[n] != node.name() for node, n in number.items()):
        return None

    order = [0]
    remaining = dict(counts)
    heap: list[tuple[int, Any]] = []

    def ready(nodes: Sequence[Any]) -> None:
        for node in nodes:
            remaining[node] -= 1
            if not remaining[node]:
                _push(heap, (node._sequence_nr(), node))

    ready(first)
    while heap:
        _, node = _pop(heap)
        order.append(number[node])
        ready(after(node))
    return order


def in_order(ops: Sequence[Op], outputs: Sequence[Any], order: Sequence[int], values: int) -> tuple[Op, ...]:
    """Return ``ops`` with the blocks of their nodes in ``order``, and every sum of gradients in the resulting order of
    arrival.

    ``values``: the first unused number of a value slot.
    """
    place = {node: p for p, node in enumerate(order)}
    blocks: dict[int, list[Op]] = {node: [] for node in order}
    terms: dict[int, list[int]] = {}  # value -> the values that it is the sum of
    home: dict[int, int] = {}  # value -> its node
    for op in ops:
        if op.kind == "add":
            terms[op.results[0]] = [t for o in op.operands for t in terms.pop(o.index, [o.index])]
        else:
            blocks[op.node].append(op)
        home.update(dict.fromkeys(op.results, op.node))
    sums: dict[int, list[Op]] = {node: [] for node in order}
    for total, parts in terms.items():
        parts.sort(key=lambda v: place[home[v]])
        so_far = parts[0]
        for part in parts[1:]:
            result = total if part is parts[-1] else values
            values += 1
            sums[home[part]].append(Op("add", "", (Slot("value", so_far), Slot("value", part)), (result,), home[part]))
            so_far = result
    arranged = [op for node in order for op in (*blocks[node], *sums[node])]
    return _without_dead(arranged, outputs)


def _without_dead(ops: Sequence[Op], outputs: Sequence[Any]) -> tuple[Op, ...]:
    """Mark unread results with -1."""
    used = {s.index for op in ops for s in slots(op.operands) if s.kind == "value"} | {
        s.index for s in slots(tuple(outputs)) if s.kind == "value"
    }
    return tuple(replace(op, results=tuple(r if r in used else -1 for r in op.results)) for op in ops)


def _edge(root: Any) -> Edge:
    if isinstance(root, torch.Tensor):
        if root.grad_fn is None and not root.requires_grad:
            return None, 0
        root = torch.autograd.graph.get_gradient_edge(root)
    return root.node, root.output_nr


def _needed(roots: Sequence[Any], targets: Sequence[Any]) -> set[Any]:
    """Return the nodes on a path to a target, including the targets."""
    predecessors: dict[Any, list[Any]] = {}
    pending, visited = list(roots), set(roots)
    while pending:
        node = pending.pop()
        for following, _ in node.next_functions:
            if following is not None:
                predecessors.setdefault(following, []).append(node)
                if following not in visited:
                    visited.add(following)
                    pending.append(following)
    nodes = {t for t in targets if t in visited}
    pending = list(nodes)
    while pending:
        for node in predecessors.get(pending.pop(), ()):
            if node not in nodes:
                nodes.add(node)
                pending.append(node)
    return nodes


def _push(heap: list[tuple[int, Any]], item: tuple[int, Any]) -> None:
    """Push like ``std::push_heap``: larger numbers are nearer the top."""
    heap.append(item)
    _sift(heap, len(heap) - 1, item)


def _sift(heap: list[tuple[int, Any]], hole: int, item: tuple[int, Any]) -> None:
    while hole > 0 and heap[(hole - 1) // 2][0] < item[0]:
        heap[hole] = heap[(hole - 1) // 2]
        hole = (hole - 1) // 2
    heap[hole] = item


def _pop(heap: list[tuple[int, Any]]) -> tuple[int, Any]:
    """Pop like ``std::pop_heap``: its way of closing the gap decides the order of equal numbers."""
    top, item = heap[0], heap.pop()
    size = len(heap)
    if not size:
        return top
    hole = child = 0
    while child < (size - 1) // 2:
        child = 2 * (child + 1)
        if heap[child][0] < heap[child - 1][0]:
            child -= 1
        heap[hole] = heap[child]
        hole = child
    if size % 2 == 0 and child == (size - 2) // 2:
        child = 2 * (child + 1)
        heap[hole] = heap[child - 1]
        hole = child - 1
    _sift(heap, hole, item)
    return top
