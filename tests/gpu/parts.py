"""The parts of ``python -m tests.gpu``: each gives rows (what, outcome, figure), and an outcome that is not "right" is a failure."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from .compared import Row
from .correct import native, step
from .elsewhere import carried, cross
from .fast import speed, start
from .running import graphs, runtime

PARTS: dict[str, Callable[[str, bool], Iterator[Row]]] = {f.__name__: f for f in (native, step, runtime, graphs, carried, cross, speed, start)}
