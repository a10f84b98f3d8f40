"""A package's force field: its metadata, units and neighbor list. Shared by the adapters for ASE and OpenMM.

The convention (``docs/how-to/hosts.md``): the inputs of a "grad" entry are those of ``INPUTS``; atom ``src`` sees atom ``dst`` at
``positions[dst] + shift``; the value is the energy, or ``(energy, {"energies": (n,)})``. Here, lengths are in Ångström and energies in eV.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import vesin

import aot_backward_native as abn

from .errors import InputError, PackageError

INPUTS = ("positions", "species", "src", "dst", "shift", "strain", "own")
_REQUIRED = INPUTS[:5]
KJ_PER_MOL = 96.48533212331002  # one eV
ENERGIES = {"eV": 1.0, "Ha": 27.211386245981, "kcal/mol": 4.184 / KJ_PER_MOL, "kJ/mol": 1 / KJ_PER_MOL}
"""In eV; CODATA 2022."""
LENGTHS = {"Ang": 1.0, "nm": 10.0, "Bohr": 0.529177210544}
"""In Ångström; CODATA 2022."""


@dataclass(frozen=True)
class Result:
    """``virial``: the gradient of the energy by strain, (3, 3). None if the entry does not compute it."""

    energy: float
    energies: np.ndarray | None
    forces: np.ndarray
    virial: np.ndarray | None


class ForceField:
    """An entry of a package with its own neighbor list. Use one per thread."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        entry: str | None = None,
        *,
        skin: float = 0.3,
        backend: str | None = None,
        **overrides: Any,
    ):
        """``overrides``: "cutoff", "species", "energy" and "length", for a package without metadata; None if not given."""
        self._grad: Any = abn.load(path, backend=backend).grad(entry, cast=True)
        self._place = f"{os.fspath(path)}: entry {self._grad.name!r}"
        self._names = [name for name, _, _ in self._grad.inputs]
        if not set(_REQUIRED) <= set(self._names) <= set(INPUTS):
            raise InputError(
                f"{self._place}: expected the inputs {', '.join(_REQUIRED)}, got {', '.join(self._names)}. Export the entry with ab.forcefield."
            )
        cutoff, species, energy, length = self._facts(self._grad.metadata, overrides)
        self.species = [str(s) for s in species]
        self._energy, self._length = self._unit("energy", ENERGIES, energy), self._unit("length", LENGTHS, length)
        if not (isinstance(cutoff, int | float) and 0 < cutoff < np.inf):
            raise InputError(f"{self._place}: cutoff: expected a positive number, got {cutoff!r}. Give the model's cutoff.")
        if not 0 <= skin < np.inf:
            raise InputError(f"skin: expected a length of at least 0, got {skin!r}. Leave it out.")
        self._neighbors = Neighbors(cutoff * self._length, skin)

    def kinds(self, symbols: Iterable[str]) -> np.ndarray:
        """Return the model's number of each chemical symbol."""
        numbers, out = {s: i for i, s in enumerate(self.species)}, []
        for i, symbol in enumerate(symbols):
            if symbol not in numbers:
                raise InputError(f"{self._place}: expected the species {', '.join(self.species)}, got {symbol} (atom {i}). Export it with them.")
            out.append(numbers[symbol])
        if not out:
            raise InputError(f"{self._place}: expected at least one atom, got none. Add atoms.")
        return np.array(out, np.int64)

    def __call__(self, positions: np.ndarray, kinds: np.ndarray, cell: np.ndarray, periodic: Sequence[bool]) -> Result:
        """Compute the energy, forces and virial of atoms.

        Args:
            positions: (n, 3), in Ångström.
            kinds: Those of :meth:`kinds`.
            cell: (3, 3), a vector in each row, in Ångström; zeros for directions without one.
            periodic: The periodic directions.
        """
        src, dst, shift = self._neighbors(positions, cell, periodic)
        given = dict(zip(INPUTS, (positions / self._length, kinds, src, dst, shift / self._length), strict=False))
        given |= {"strain": np.zeros((3, 3)), "own": np.ones(len(positions))}
        value, gradients = self._grad(*(given[name] for name in self._names))
        energy, aux = value if isinstance(value, tuple) else (value, {})
        energies = aux.get("energies") if isinstance(aux, Mapping) else None
        if not isinstance(gradients, Mapping) or gradients.get("positions") is None:
            raise PackageError(f"{self._place}: expected the gradients by positions and strain, got others. Export the entry with ab.forcefield.")
        # float32 has 7 digits, too few for the energies of many atoms in one number
        total = energy if energies is None else np.sum(energies, dtype=np.float64)
        virial = gradients.get("strain")
        return Result(
            float(total) * self._energy,
            None if energies is None else np.multiply(energies, self._energy, dtype=np.float64),
            np.multiply(gradients["positions"], -self._energy / self._length, dtype=np.float64),
            None if virial is None else np.multiply(virial, self._energy, dtype=np.float64),
        )

    def _facts(self, metadata: Mapping[str, Any], overrides: Mapping[str, Any]) -> list[Any]:
        if metadata.get("forcefield", 1) != 1:
            raise PackageError(f"{self._place}: expected a force field of convention 1, got {metadata['forcefield']!r}. Install a newer version.")
        facts = []
        for name in ("cutoff", "species", "energy", "length"):
            given, stated = overrides.get(name), metadata.get(name)
            if given is None and stated is None:
                raise InputError(f"{self._place}: expected {name!r} in the metadata, got {sorted(metadata)}. Pass {name}=.")
            same = list(given) == stated if name == "species" and given is not None else given == stated
            if given is not None and stated is not None and not same:
                raise InputError(f"{self._place}: {name}: expected {stated!r} as in the metadata, got {given!r}. Leave {name}= out.")
            facts.append(stated if given is None else given)
        return facts

    def _unit(self, name: str, units: Mapping[str, float], unit: Any) -> float:
        if unit not in units:
            raise InputError(f"{self._place}: {name}: expected one of {', '.join(units)}, got {unit!r}. Export in one of these units.")
        return units[unit]


class Neighbors:
    """All pairs within the cutoff, in both directions, also with periodic images. Searches again after an atom has moved by half the skin."""

    def __init__(self, cutoff: float, skin: float):
        self._given = cutoff, skin
        self._list = vesin.NeighborList(cutoff=cutoff, full_list=True, skin=skin)

    def __reduce__(self) -> Any:
        return Neighbors, self._given

    def __call__(self, positions: np.ndarray, cell: np.ndarray, periodic: Sequence[bool]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return ``src``, ``dst`` (e,) and ``shift`` (e, 3)."""
        try:
            src, dst, images = self._list.compute(points=positions, box=cell, periodic=periodic, quantities="ijS")
        except RuntimeError as error:
            raise InputError(f"neighbor list: expected finite positions and a cell, got {error}. Check the cell and the time step.") from error
        return src.view(np.int64), dst.view(np.int64), images @ cell
