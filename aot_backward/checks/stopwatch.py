"""Times several calls against each other in one process, in turns. The shortest time counts: what else the machine does only adds to it."""

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

_SAMPLE = 200e-6  # seconds
_LOAD_SAMPLES = 7
_ROUNDS = 3, 60  # at least, also where they take longer than what was allowed; at most


def microseconds(calls: Mapping[str, Call], seconds: float, finish: Call = lambda: None, *, sample: float = _SAMPLE) -> dict[str, float]:
    """The shortest time of one call of each, in microseconds, of up to 60 samples.

    ``seconds``: what all of it may take, but for the first calls and three rounds. ``finish`` waits for what the calls have begun, as on a GPU.
    ``sample``: seconds, shorter calls are made several times in a row; with 0 each call comes after one of the others, as in a program."""
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
    """Inside, torch uses no more threads than there are processors that nobody else keeps busy, but one: a parallel region that has to wait for a
    processor takes milliseconds. Gives that number, and how many threads of others were running or waiting to."""
    before, processors = torch.get_num_threads(), len(os.sched_getaffinity(0))
    others = others_running()
    torch.set_num_threads(max(1, min(before, processors - others)))
    try:
        yield torch.get_num_threads(), others
    finally:
        torch.set_num_threads(before)


def others_running() -> int:
    """How many threads that are not this one were running or waiting for a processor, of seven looks the middle one."""
    return statistics.median_low([_running() - 1 for _ in range(_LOAD_SAMPLES)])


def _running() -> int:
    """How many threads of all processes are running or waiting for a processor, this one among them."""
    time.sleep(0.01)
    return int(Path("/proc/loadavg").read_text().split()[3].partition("/")[0])


def _repeats(call: Call, seconds: float, finish: Call, sample: float) -> int:
    """How many calls make one sample. The first calls, in which caches fill, are made here: three, or one where that alone takes long."""
    took = _time_of(call, 1, finish)
    if took < seconds / 10:
        took = min(_time_of(call, 1, finish) for _ in range(2))
    return max(1, round(sample / max(took, 1e-7)))


def _time_of(call: Call, repeats: int, finish: Call) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    finish()
    return (time.perf_counter() - start) / repeats
