"""Time calls within a process and summarize the samples."""

from __future__ import annotations

import gc
import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

DISCARDED = 10  # warm-up calls
_BATCH = 2e-3  # seconds; a batch of short calls lasts about this long


def batch_size(call: Callable[[], Any]) -> int:
    """Return the number of calls in a batch; 1 for calls of more than 2 ms. Make the warm-up calls first."""
    for _ in range(DISCARDED):
        call()
    count = 1
    while True:
        seconds = batch(call, count) * count
        if seconds >= _BATCH / 2:
            return max(1, round(count * _BATCH / seconds))
        count *= 4


def batch(call: Callable[[], Any], count: int) -> float:
    """Return the seconds per call of ``count`` calls in a row, with the garbage collector off."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        turns = itertools.repeat(None, count)
        start = time.perf_counter()
        for _ in turns:
            call()
        return (time.perf_counter() - start) / count
    finally:
        if enabled:
            gc.enable()


def samples(call: Callable[[], Any], count: int, seconds: float) -> list[float]:
    """Run batches of ``count`` calls for about ``seconds``, at least three. Return the seconds per call of each
    batch."""
    out: list[float] = []
    end = time.perf_counter() + seconds
    while len(out) < 3 or time.perf_counter() < end:
        out.append(batch(call, count))
    return out


def interleaved(peers: Mapping[str, Callable[[], Iterable[float]]], rounds: int) -> dict[str, list[float]]:
    """Run the peers as A B C C B A, ``rounds`` times, so that drift of the machine affects all peers equally.

    Each peer returns samples in seconds."""
    out: dict[str, list[float]] = {name: [] for name in peers}
    for _ in range(rounds):
        for name in (*peers, *reversed(peers)):
            out[name] += peers[name]()
    return out


def compare(calls: Mapping[str, Callable[[], Any]], seconds: float, rounds: int) -> dict[str, dict[str, float]]:
    """Time ``calls`` in this process. They take turns of ``seconds``; each has its own batch size."""
    counts = {p: batch_size(c) for p, c in calls.items()}
    peers = {p: lambda c=c, p=p: samples(c, counts[p], seconds) for p, c in calls.items()}
    return {p: summary(s) for p, s in interleaved(peers, rounds).items()}


def summary(seconds: list[float]) -> dict[str, float]:
    return {"median_s": statistics.median(seconds), "min_s": min(seconds), "samples": len(seconds)}
