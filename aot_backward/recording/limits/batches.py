"""Structures in batches, each compiled side by side and in the package before the next begins, within a limit of time."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from typing import TypeVar

from aot_backward_runtime.errors import InputError

T = TypeVar("T")
_FEW, _MANY = 2, 16  # items of a batch: as many as processors, between these


class Batches:
    """What is begun is finished, so one item at least is compiled, and the limit may be passed by what the last batch takes."""

    def __init__(self, time_limit: float | None):
        """``time_limit``: seconds from now on."""
        self._limit, self._began = time_limit, time.monotonic()
        self._largest = min(max(len(os.sched_getaffinity(0)), _FEW), _MANY)

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
