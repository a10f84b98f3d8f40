"""Which way a recorded pass runs fastest, by what was measured when it was recorded, at the sizes nearest to its own."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ..format.manifest import Speed

AROUND, SLOWER = 40.0, 1.1
"""Microseconds, and times, by which a compiled pass must be faster than eager's to be preferred: what replays of eleven models (backward passes of 80
to 350 µs) cost a script, forward and all, over what was predicted here was 17 to 103 µs, 34 in the median. Half of it is the forward after the pass:
the code that a replay runs has taken the place of the script's own in the processor's caches. The rest is that eager is slower while it is recorded:
convolutions of 540 µs that were to gain 55 lost 10, an embedding with an MLP of 2,000 µs that was to gain 142 lost 100."""
_KEPT = 1024  # sizes


@dataclass(frozen=True)
class FastestWay:
    """``times``: microseconds in eager, interpreted and compiled; nothing where none was measured. ``in_eager``: whether eager was the fastest.
    ``interpreted``: whether what the engine hands over is better interpreted than run compiled. ``nearby``: the times are of other sizes."""

    times: Mapping[str, float] = field(default_factory=dict)
    in_eager: bool = False
    interpreted: bool = False
    nearby: bool = False

    @classmethod
    def of(cls, times: Mapping[str, float], chosen: str) -> FastestWay:
        in_eager = chosen == "eager"
        return cls(times, in_eager, chosen == "interpreted" or (in_eager and times["interpreted"] < times["compiled"]))


class FastestWays:
    """Of one variant, by the values of its symbols."""

    def __init__(self, speed: Speed | None):
        self._only = FastestWay() if speed is None else FastestWay.of(speed.means, speed.chosen)
        self._measured: list[tuple[Mapping[str, int], FastestWay]] = []
        self._near: dict[tuple[int, ...], FastestWay] = {}
        for i, choice in enumerate(speed.choices if speed is not None else ()):
            times = {t.name: t.microseconds[i] for t in speed.timings} if speed is not None else {}
            self._measured.append((choice.symbols, FastestWay.of(times, choice.chosen)))

    def at(self, values: Mapping[str, int]) -> FastestWay:
        """The fastest way of a pass whose symbols have these values."""
        if not self._measured:
            return self._only
        key = tuple(values.values())
        way = self._near.get(key)
        if way is None:
            sizes, way = min(self._measured, key=lambda measured: _distance(measured[0], values))
            way = replace(way, nearby=_distance(sizes, values) > 0)
            if len(self._near) < _KEPT:
                self._near[key] = way
        return way


def _distance(some: Mapping[str, int], other: Mapping[str, int]) -> float:
    """Between sizes: how many times larger one is counts, not by how much."""
    return sum(abs(math.log((1 + abs(value)) / (1 + abs(other[name])))) for name, value in some.items())
