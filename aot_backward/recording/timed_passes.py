"""Time the passes of a recorded script, in eager and interpreted.

A pass cannot run twice, and its structure is known only after the engine has walked it. So each graph is inspected
first. If a similar one, with the same nodes, edges and shapes of gradients, was interpreted twice already, the next ten
similar passes from that call site run in eager and are timed. After two further interpreted ones come more: 25 in a row
if they are short, up to eighty. They run in a row because an interpreted pass leaves the processor's caches in a state
that slows eager: an MLP's backward takes 108 µs after an interpreted one, then 82, 77, 75, and 72 by the tenth; others
need twenty and more.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from aot_backward_exporters import torch_api
from aot_backward_runtime.passes.call_sites import Place, place_of

from .recorded_structure import PassTimes

_INTERPRETED_BEFORE, _ROW_LENGTH, _SHORT_PASS_ROW_LENGTH, _MAX_ROWS = 2, 10, 25, 10
"""Interpreted passes before a row, passes of a row and of a row of short passes (their reason is above), and the most
rows of a kind. The first and the last are guesses."""
# Passes of a kind timed in eager: between these, until they fill this many seconds; guesses
_MIN_TIMED, _MAX_TIMED, _SECONDS_TIMED = 20, 80, 0.05
_SHORT_PASS = 1e-3  # seconds in eager; a guess
_NODES_LOOKED_UP = 6  # nodes by which each call finds its row: few, because it happens at each pass; a guess
_MAX_NODES = 20_000  # nodes by which graphs are compared: bounds the time of a comparison; a guess
_MAX_GRAPHS = 4096  # graphs with times, and rows: bounds memory; a guess


@dataclass
class Row:
    """Similar passes from one call site that run in eager."""

    times: PassTimes
    likeness: int
    length: int = _ROW_LENGTH
    seconds: list[float] = field(default_factory=list)


class TimedPasses:
    """The times of passes, by a hash of their graphs."""

    def __init__(self) -> None:
        # None: several kinds of passes have this hash, so none of them is timed
        self._times: dict[int, PassTimes | None] = {}
        self._rows: dict[tuple[Place, int], Row] = {}
        self._here = threading.local()

    def due(self, roots: Sequence[Any], inputs: Sequence[Any]) -> Row | None:
        """Return the row of the pass that is called now, which runs in eager, or None if it is to be interpreted."""
        self._here.likeness = None
        key = place_of(roots), _likeness(roots, inputs, _NODES_LOOKED_UP)
        row = self._rows.get(key)
        if row is not None and len(row.seconds) < row.length:
            return row
        self._here.likeness = likeness = _likeness(roots, inputs, _MAX_NODES)
        self._here.interpreted = None
        if row is not None:
            self._rows.pop(key, None)
            if row.seconds:
                row.times.eager = min(row.times.eager, min(row.seconds))
                row.times.times_in_eager += len(row.seconds)
        times = self._times.get(likeness)
        rows = min(self._rows_due(times), _MAX_ROWS) if times is not None else 0
        if times is None or times.rows >= rows or _is_enough(times) or len(self._rows) >= _MAX_GRAPHS:
            return None
        times.rows += 1
        self._rows[key] = row = Row(
            times,
            likeness,
            _SHORT_PASS_ROW_LENGTH if times.times_in_eager and times.eager < _SHORT_PASS else _ROW_LENGTH,
        )
        return row

    def _rows_due(self, times: PassTimes) -> int:
        """Return the rows that are due. During a row of another kind, passes in between join in: interpreting them
        would slow eager there, too."""
        is_incomplete = any(len(row.seconds) < row.length for row in self._rows.values())
        return (
            -(-times.times_interpreted // _INTERPRETED_BEFORE)
            if is_incomplete
            else times.times_interpreted // _INTERPRETED_BEFORE
        )

    def ran_in_eager(self, row: Row, roots: Sequence[Any], inputs: Sequence[Any], seconds: float) -> None:
        """Add the pass to its row. End the row if only the first nodes of the pass are like it."""
        if _likeness(roots, inputs, _MAX_NODES) == row.likeness:
            row.seconds.append(seconds)
            row.times.passes_in_eager += 1
        else:
            row.length = len(row.seconds)

    def interpreted(self, times: PassTimes, seconds: float) -> None:
        """Note the seconds of the interpreted pass that this thread last passed to :meth:`due`."""
        likeness = getattr(self._here, "likeness", None)
        if likeness is None:
            return
        if self._times.setdefault(likeness, times) is not times:
            self._times[likeness] = None
        if len(self._times) > _MAX_GRAPHS:
            del self._times[next(iter(self._times))]
        self._here.interpreted = times, seconds

    def ended(self, engine: float) -> None:
        """Note the seconds that the engine took for that pass."""
        times, interpreted = getattr(self._here, "interpreted", None) or (None, math.inf)
        self._here.interpreted = None
        if times is not None and interpreted < math.inf:
            times.interpreted, times.engine = min(times.interpreted, interpreted), min(times.engine, engine)
            times.times_interpreted += 1


def _is_enough(times: PassTimes) -> bool:
    count = times.times_in_eager
    return count >= _MAX_TIMED or (count >= _MIN_TIMED and count * times.eager >= _SECONDS_TIMED)


def _likeness(roots: Sequence[Any], inputs: Sequence[Any], limit: int) -> int:
    """Return a hash of the graph's first ``limit`` nodes: their names and edges, and the shapes of their incoming
    gradients. It keeps no node alive."""
    numbers: dict[Any, int] = {}
    features: list[Any] = []
    nodes = [r.grad_fn if isinstance(r, torch.Tensor) else r.node for r in roots]
    features.append(
        (
            len(roots),
            len(inputs),
            tuple(None if node is None else numbers.setdefault(node, len(numbers)) for node in nodes),
        )
    )
    pending: list[Any] = [node for node in dict.fromkeys(nodes) if node is not None]
    while pending and len(features) <= limit:
        node = pending.pop()
        edges = []
        for following, place in node.next_functions:
            if following is not None and following not in numbers:
                numbers[following] = len(numbers)
                pending.append(following)
            edges.append((numbers.get(following), place))
        features.append((node.name(), tuple(edges), torch_api.gradient_shapes(node)))
    return hash(tuple(features))
