"""Which recorded structures are compiled, and in which order: those that came often enough, what took the script longest first."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from aot_backward_runtime.errors import InputError

from ..recorded_structure import RecordedStructure

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
