"""What passes took when they were recorded, and which variants of a package a replay runs."""

from __future__ import annotations

from collections.abc import Mapping

from ..format.manifest import Speed

AROUND, SLOWER = 40.0, 1.1
"""Microseconds, and times, by which a compiled pass must be faster than eager's to be kept: what replays of eleven models (backward passes of 80
to 350 µs) cost a script, forward and all, over what was predicted here was 17 to 103 µs, 34 in the median. Half of it is the forward after the pass:
the code that a replay runs has taken the place of the script's own in the processor's caches. The rest is that eager is slower while it is recorded:
convolutions of 540 µs that were to gain 55 lost 10, an embedding with an MLP of 2,000 µs that was to gain 142 lost 100."""


def is_served(speed: Speed | None) -> bool:
    """Whether a replay runs the code. Up to format 1.13 packages hold code that was slower than eager, too."""
    return speed is None or speed.chosen == "compiled"


def eager_at(speed: Speed | None, values: Mapping[str, int]) -> float | None:
    """Seconds that a pass took in eager where its symbols had these ``values``; None where none was timed."""
    if speed is None:
        return None
    label = sizes_in_words(values)
    return speed.timings[0].microseconds[speed.sizes.index(label)] * 1e-6 if label in speed.sizes else None


def sizes_in_words(values: Mapping[str, int]) -> str:
    """``s0=16, s1=3``: one of :attr:`Speed.sizes`."""
    return ", ".join(f"{name}={value}" for name, value in sorted(values.items()))
