"""What the programs in Python share: the atoms, the times of neighbor lists and the report. Without PyTorch."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

import ase.io
import numpy as np
from aot_backward_native import _neighbors
from ase import Atoms, units

from . import TEMPERATURE


def read(path: str) -> Atoms:
    """Return the atoms of a file, with random velocities."""
    atoms = ase.io.read(path)
    spread = np.sqrt(units.kB * TEMPERATURE / atoms.get_masses())[:, None]
    atoms.set_velocities(np.random.default_rng(0).standard_normal((len(atoms), 3)) * spread)
    return atoms


def time_neighbors() -> list[float]:
    """Return a list that receives the seconds of each search for neighbors by the adapters in Python."""
    seconds, search = list[float](), _neighbors.Neighbors.__call__

    def timed(self: _neighbors.Neighbors, *args: Any) -> Any:
        start = time.perf_counter()
        try:
            return search(self, *args)
        finally:
            seconds.append(time.perf_counter() - start)

    _neighbors.Neighbors.__call__ = timed  # type: ignore[method-assign]
    return seconds


def report(energies: Sequence[float], kinetic: float, seconds: float, neighbors: float) -> None:
    """Print a run's largest drift of energy and its first kinetic energy, in eV, and its seconds, as JSON."""
    drift = max(abs(e - energies[0]) for e in energies)
    print(json.dumps({"drift": drift, "kinetic": kinetic, "seconds": seconds, "neighbors": neighbors}))
