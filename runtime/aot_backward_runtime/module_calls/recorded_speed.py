"""What was measured of a module when it was recorded, and whether its calls are worth being compiled."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..entries.dispatch import Entry
from ..format.manifest import Speed

_AROUND, _SLOWER = 30.0, 1.1
"""Microseconds, and times, by which a call and its backward must have been faster than eager's when they were recorded, in a loop. Within a script
what is around them is colder, for eager and for us: of eight scripts, calls that were to gain 33 to 41 µs of 135 to 335 lost as much, one that was to
gain 112 of 1,000 lost 37; 54 of 266 gained 30, 138 of 304 gained 87 (docs/benchmarks/2026-11-26-modules-in-scripts.md)."""


def gain_of(entry: Entry) -> float:
    """Seconds that a call and its backward took less than eager's when the entry was recorded; 0 where they were not timed."""
    means = [(s.means["eager"], s.means[s.chosen]) for s in _speeds(entry)]
    return sum(eager - compiled for eager, compiled in means) / max(len(means), 1) * 1e-6


def why_slower(entry: Entry) -> str:
    """In words, why calls that the entry fits are better left to eager, or "". In the geometric mean over its variants, so that one that takes long
    does not hide what another, which is called as often, loses."""
    speeds = _speeds(entry)
    if not speeds:
        return ""
    eager, compiled = _mean([s.means["eager"] for s in speeds]), _mean([s.means[s.chosen] for s in speeds])
    if eager >= _SLOWER * compiled + _AROUND:
        return ""
    took = f"compiled it took {compiled:,.0f} µs, in eager {eager:,.0f}, when it was recorded"
    return took if compiled >= eager else f"{took}, which is lost again within a script"


def _speeds(entry: Entry) -> list[Speed]:
    return [s for v in entry.variants if (s := v.spec.speed) is not None]


def _mean(times: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, times)) / len(times))
