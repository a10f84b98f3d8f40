"""Times several calls against each other in one process: in turns, so that whatever else the machine does hits all of them alike."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping

Call = Callable[[], object]

_SAMPLE = 200e-6  # seconds: shorter calls are made several times between two looks at the clock
_WARM_UP = 3
_ROUNDS = 5, 60  # at least, also where they take longer than what was allowed; at most


def microseconds(calls: Mapping[str, Call], seconds: float) -> dict[str, float]:
    """The median time of one call of each, in microseconds. ``seconds``: what all of it may take, but for the first calls and five rounds."""
    repeats = {}
    for name, call in calls.items():
        for _ in range(_WARM_UP):
            took = _time_of(call, 1)
        repeats[name] = max(1, round(_SAMPLE / max(took, 1e-7)))
    samples: dict[str, list[float]] = {name: [] for name in calls}
    collecting = gc.isenabled()
    gc.disable()
    try:
        end = time.perf_counter() + seconds
        for number in range(_ROUNDS[1]):
            if number >= _ROUNDS[0] and time.perf_counter() > end:
                break
            for name in list(calls) if number % 2 else reversed(list(calls)):
                samples[name].append(_time_of(calls[name], repeats[name]))
    finally:
        if collecting:
            gc.enable()
    return {name: statistics.median(found) * 1e6 for name, found in samples.items()}


def _time_of(call: Call, repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - start) / repeats
