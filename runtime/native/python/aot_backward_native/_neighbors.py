"""The neighbor list of the adapters in Python."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import vesin

from .errors import InputError

_CELLS = 1e4
"""The largest extent of the atoms and of the cell, in cutoffs."""


class Neighbors:
    """All pairs within the cutoff, in both directions, also with periodic images. Searches again after an atom has
    moved by half the skin."""

    def __init__(self, cutoff: float, skin: float):
        self._given = cutoff, skin
        self._list = vesin.NeighborList(cutoff=cutoff, full_list=True, skin=skin)

    def __reduce__(self) -> Any:
        return Neighbors, self._given

    def __call__(
        self, positions: np.ndarray, cell: np.ndarray, periodic: Sequence[bool]
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return ``src``, ``dst`` (e,) and ``shift`` (e, 3). The next call overwrites the first two."""
        # vesin divides space into cells of the cutoff. It ends the process if it cannot count them: above some 1e5 in a
        # direction.
        largest = _CELLS * self._given[0]
        spread = np.ptp(positions, axis=0).max(initial=0)
        for name, size in (("positions", spread), ("cell", np.abs(cell).max())):
            if not size < largest:
                raise InputError(
                    f"{name}: expected finite numbers below {largest:g} Å, got {size:g}. Check the structure, the barostat and the time step."
                )
        try:
            src, dst, images = self._list.compute(
                points=positions, box=cell, periodic=periodic, quantities="ijS", copy=False
            )
        except RuntimeError as error:
            raise InputError(
                f"neighbor list: expected finite positions and a cell, got {error}. Check the cell and the time step."
            ) from error
        return src.view(np.int64), dst.view(np.int64), images @ cell
