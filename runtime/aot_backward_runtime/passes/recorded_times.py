"""Recorded times of passes, and the choice of the variants that a replay runs."""

from __future__ import annotations

from collections.abc import Mapping

from ..format.manifest import Speed

AROUND, SLOWER = 80.0, 1.1
"""Microseconds, and factor, by which a compiled pass must be faster than eager to be kept. Replays of eleven models
(backward passes of 80 to 350 µs) cost a whole script step 17 to 103 µs more than predicted here, 34 in the median. Half
of it is the forward after the pass: a replay's code evicts the script's own code from the processor's caches. The rest
is that eager is slower while it is recorded: an embedding with an MLP of 2,000 µs with a predicted gain of 142 lost
100. With a factor of 1.05 it was kept. With 40 µs, a pass of 280 with a predicted gain of 80 gained 15 in a script of
its own, and a step with a second, uncompiled backward pass took 750 µs in place of 710."""


def is_served(speed: Speed | None) -> bool:
    """Return whether a replay runs the code. Up to format 1.13, packages also hold code that was slower than eager."""
    return speed is None or speed.chosen == "compiled"


def sizes_in_words(values: Mapping[str, int]) -> str:
    """Return one of :attr:`Speed.sizes`, such as ``s0=16, s1=3``."""
    return ", ".join(f"{name}={value}" for name, value in sorted(values.items()))
