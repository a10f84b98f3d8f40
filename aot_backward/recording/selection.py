"""Select the recorded structures to compile: seen often enough, the most expensive first, in batches, within a time
limit.

The structures of a batch are compiled in parallel, and are in the package before the next batch begins.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from aot_backward_runtime.errors import InputError

from .recorded_structure import RecordedStructure

T = TypeVar("T")
_MIN_BATCH, _MAX_BATCH = 2, 16  # limits of a batch's items; in between, the number of processors; guesses
MIN_SEEN = 2
"""A structure is compiled from this number of passes on. A structure that comes once is more often the end of something
than the beginning."""


@dataclass(frozen=True)
class Selection:
    """``structures``: by fingerprint, the most expensive first. ``seldom``: the number of structures that came less
    often than ``min_seen``. ``untimed``: structures of which no pass was timed often enough."""

    structures: dict[str, RecordedStructure]
    seldom: int
    untimed: dict[str, RecordedStructure]


def select(
    structures: Mapping[str, RecordedStructure], min_seen: int, is_known: Callable[[str], bool], *, timed: bool
) -> Selection:
    """Select structures. ``is_known``: whether the package has a variant of the structure with that fingerprint, which
    then counts as often enough. ``timed``: whether compiled code is kept only if it can be compared with eager's
    time."""
    candidates = {fingerprint: structure for fingerprint, structure in structures.items() if structure.passes}
    frequent = {
        fingerprint: s for fingerprint, s in candidates.items() if s.passes >= min_seen or is_known(fingerprint)
    }
    untimed = {
        fingerprint: s
        for fingerprint, s in frequent.items()
        if timed and s.observations and all(map(s.is_untimed, s.observations))
    }
    by_cost = sorted(((f, s) for f, s in frequent.items() if f not in untimed), key=lambda item: -item[1].cost)
    return Selection(dict(by_cost), len(candidates) - len(frequent), untimed)


def check_min_seen(min_seen: int) -> int:
    if type(min_seen) is not int or min_seen < 1:
        raise InputError(f"min_seen is {min_seen!r}; expected a positive int")
    return min_seen


class Batches:
    """Batches under a time limit. A begun batch is finished, so at least one item is compiled, and the last batch may
    exceed the limit."""

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
        """Yield ``items`` in order, until the time is over. Under a limit the first batch is one item. Each further
        batch has as many as are likely to finish in time, judged by the earlier ones."""
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
