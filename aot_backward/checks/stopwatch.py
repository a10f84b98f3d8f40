"""Time several calls against each other in one process, in turns. Use the minimum: noise only adds time."""

from __future__ import annotations

import contextlib
import gc
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch

Call = Callable[[], object]

_SAMPLE = 200e-6  # seconds; shorter calls are repeated, so that reading the clock counts little; a guess
_LOAD_SAMPLES = 7  # each waits 10 ms; the median is used; a guess
_ROUNDS = 3, 60  # minimum, even if they take longer than allowed; maximum; guesses


def microseconds(
    calls: Mapping[str, Call], seconds: float, finish: Call = lambda: None, *, sample: float = _SAMPLE
) -> dict[str, float]:
    """Return the shortest time of one call of each, in microseconds, of up to 60 samples.

    ``seconds``: time limit, without the first calls and three rounds. ``finish`` waits for work that the calls have
    started, such as on a GPU. ``sample``: seconds; shorter calls are repeated in a row. With 0 each call follows one of
    the others, as in a program."""
    repeats = {name: _repeats(call, seconds, finish, sample) for name, call in calls.items()}
    shortest = dict.fromkeys(calls, math.inf)
    collecting = gc.isenabled()
    gc.disable()
    try:
        end = time.perf_counter() + seconds
        for number in range(_ROUNDS[1]):
            if number >= _ROUNDS[0] and time.perf_counter() > end:
                break
            for name in list(calls) if number % 2 else reversed(list(calls)):
                shortest[name] = min(shortest[name], _time_of(calls[name], repeats[name], finish))
    finally:
        if collecting:
            gc.enable()
    return {name: seconds * 1e6 for name, seconds in shortest.items()}


@contextlib.contextmanager
def on_free_processors() -> Iterator[tuple[int, int]]:
    """Limit torch inside to as many threads as processors are not busy with others, at least one: a parallel region
    that waits for a processor takes milliseconds. Yield that number, and how many threads of others were running or
    waiting for a processor."""
    before, processors = torch.get_num_threads(), len(os.sched_getaffinity(0))
    other_threads = others_running()
    torch.set_num_threads(max(1, min(before, processors - other_threads)))
    try:
        yield torch.get_num_threads(), other_threads
    finally:
        torch.set_num_threads(before)


def others_running() -> int:
    """Return how many other threads were running or waiting for a processor, the median of seven samples."""
    return statistics.median_low([_running() - 1 for _ in range(_LOAD_SAMPLES)])


def _running() -> int:
    """Return how many threads of all processes are running or waiting for a processor, including this one."""
    time.sleep(0.01)
    return int(Path("/proc/loadavg").read_text().split()[3].partition("/")[0])


def _repeats(call: Call, seconds: float, finish: Call, sample: float) -> int:
    """Return how many calls make one sample. Make the first calls, which fill caches: three, or one if it takes
    long."""
    duration = _time_of(call, 1, finish)
    if duration < seconds / 10:
        duration = min(_time_of(call, 1, finish) for _ in range(2))
    return max(1, round(sample / max(duration, 1e-7)))


def _time_of(call: Call, repeats: int, finish: Call) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    finish()
    return (time.perf_counter() - start) / repeats
