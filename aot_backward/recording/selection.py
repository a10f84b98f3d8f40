"""Which recorded structures are compiled: those that came often enough, the most expensive first, in batches, within a limit of time.

The structures of a batch are compiled side by side, and are in the package before the next batch begins.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from aot_backward_runtime.errors import InputError

from .recorded_structure import RecordedStructure

T = TypeVar("T")
_MIN_BATCH, _MAX_BATCH = 2, 16  # items of a batch: as many as processors, between these
MIN_SEEN = 2
"""Passes of a structure from which on it is compiled. What comes once is the end of something more often than the beginning."""


@dataclass(frozen=True)
class Selection:
    """``structures``: by fingerprint, the most expensive first. ``seldom``: how many came less often than is asked for."""

    structures: dict[str, RecordedStructure]
    seldom: int


def select(structures: Mapping[str, RecordedStructure], min_seen: int, is_known: Callable[[str], bool]) -> Selection:
    """``is_known``: whether the package has a variant of the structure with that fingerprint, which then counts as often enough."""
    met = {fingerprint: structure for fingerprint, structure in structures.items() if structure.passes}
    often = {fingerprint: s for fingerprint, s in met.items() if s.passes >= min_seen or is_known(fingerprint)}
    by_cost = sorted(often.items(), key=lambda item: -item[1].backward_seconds)
    return Selection(dict(by_cost), len(met) - len(often))


def percent(part: float, whole: float) -> str:
    """``93 %``: 100 only where nothing is left."""
    return f"{math.floor(100 * part / whole + 1e-6)} %" if part < whole else "100 %"


def check_min_seen(min_seen: int) -> int:
    if type(min_seen) is not int or min_seen < 1:
        raise InputError(f"min_seen is {min_seen!r}; expected a positive int")
    return min_seen


class Batches:
    """What is begun is finished, so one item at least is compiled, and the limit may be passed by what the last batch takes."""

    def __init__(self, time_limit: float | None):
        """``time_limit``: seconds from now on."""
        self._limit, self._began = time_limit, time.monotonic()
        self._largest = min(max(len(os.sched_getaffinity(0)), _MIN_BATCH), _MAX_BATCH)

    @property
    def is_over(self) -> bool:
        return self._limit is not None and self._elapsed >= self._limit

    @property
    def _elapsed(self) -> float:
        return time.monotonic() - self._began

    def of(self, items: Sequence[T]) -> Iterator[Sequence[T]]:
        """``items`` in their order, until the time is over. Under a limit the first batch is one item, and each further one as many as are likely to
        be finished in time, by what those before took."""
        done = 0
        while done < len(items) and not (done and self.is_over):
            batch = items[done : done + self._size(done)]
            yield batch
            done += len(batch)

    def _size(self, done: int) -> int:
        if self._limit is None:
            return self._largest
        if not done:
            return 1
        elapsed = self._elapsed
        return min(max(int((self._limit - elapsed) * done / elapsed), 1), self._largest)


def check_time_limit(seconds: float | None) -> float | None:
    if seconds is not None and (type(seconds) not in (int, float) or not seconds > 0):
        raise InputError(f"time_limit is {seconds!r}; expected a positive number of seconds, or None")
    return seconds
