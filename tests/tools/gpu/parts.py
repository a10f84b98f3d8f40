"""The parts of ``python -m tests.tools.gpu``. Each yields rows: name, outcome, figure. :mod:`.compared` lists the
outcomes that are not failures."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from .compared import Row
from .correct import attention, native, precision, recorded, step
from .elsewhere import carried, cross
from .fast import SIZES, speed, start
from .running import graphs, recapture, runtime

_SPEED: dict[str, Callable[[str, bool], Iterator[Row]]] = {f"{size}-step": partial(speed, size) for size in SIZES}
PARTS: dict[str, Callable[[str, bool], Iterator[Row]]] = {
    f.__name__: f for f in (native, precision, attention, step, recorded, runtime, graphs, recapture, carried, cross)
} | {**_SPEED, "start": start}
ALONE = (*_SPEED, "start")
"""Parts with timings. They run alone."""
