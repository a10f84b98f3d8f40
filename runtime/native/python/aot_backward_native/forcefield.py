"""Run a force field that ``ab.forcefield`` exported from a program of your own, without PyTorch. The adapters for ASE
and OpenMM use it.

from aot_backward_native.forcefield import ForceField

force_field = ForceField("mace.pt2")
result = force_field(positions, force_field.kinds(symbols), cell, periodic=[True] * 3)

The convention (``docs/how-to/hosts.md``): the inputs of a "grad" entry are those of ``INPUTS``; atom ``src`` sees atom
``dst`` at ``positions[dst] + shift``; the value is the energy, or ``(energy, {"energies": (n,)})``. Here, lengths are
in Ångström and energies in eV.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import aot_backward_native as abn

from ._neighbors import Neighbors
from .errors import InputError, PackageError

__all__ = ["ForceField", "Result"]
INPUTS = ("positions", "species", "src", "dst", "shift", "strain", "own")
_REQUIRED = INPUTS[:5]
KJ_PER_MOL = 96.48533212331002  # one eV
ENERGIES = {"eV": 1.0, "Ha": 27.211386245981, "kcal/mol": 4.184 / KJ_PER_MOL, "kJ/mol": 1 / KJ_PER_MOL}
"""In eV; CODATA 2022."""
LENGTHS = {"Ang": 1.0, "nm": 10.0, "Bohr": 0.529177210544}
"""In Ångström; CODATA 2022."""


@dataclass(frozen=True)
class Result:
    """Energy in eV, and its derivatives.

    Attributes:
        energy: In eV.
        energies: Those of the atoms, (n,), in eV. None if the entry does not compute them.
        forces: (n, 3), in eV/Å.
        virial: The gradient of the energy by strain, (3, 3), in eV: the stress times the volume. None if the entry does
            not compute it.
    """

    energy: float
    energies: np.ndarray | None
    forces: np.ndarray
    virial: np.ndarray | None


class ForceField:
    """A force field with its own neighbor list. Use one per thread.

    Args:
        path: The package.
        entry: The name of the entry; a sole "grad" entry needs none.
        skin: How far atoms may move, together, before the neighbor list is searched again, in Ångström. It does not
            change results.
        backend: As for :func:`aot_backward_native.load`.
        cutoff, species, energy, length: As in ``ab.forcefield``, for a package whose metadata lacks them.

    Raises:
        InputError: The metadata is incomplete or differs from an argument, or the entry is not a force field.
        PackageError: There is no such entry.

    Examples:
        >>> force_field = ForceField("copper.pt2")
        >>> kinds = force_field.kinds(["Cu", "Cu"])
        >>> force_field(np.array([[0, 0, 0], [0, 0, 2.5]]), kinds).forces
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        entry: str | None = None,
        *,
        skin: float = 0.3,
        backend: str | None = None,
        cutoff: float | None = None,
        species: Sequence[str] | None = None,
        energy: str | None = None,
        length: str | None = None,
    ):
        self._grad: Any = abn.load(path, backend=backend).grad(entry, cast=True)
        self._place = f"{os.fspath(path)}: entry {self._grad.name!r}"
        self._names = [name for name, _, _ in self._grad.inputs]
        if not set(_REQUIRED) <= set(self._names) <= set(INPUTS):
            raise InputError(
                f"{self._place}: expected the inputs {', '.join(_REQUIRED)}, got {', '.join(self._names)}. Export the entry with ab.forcefield."
            )
        facts = self._facts(
            self._grad.metadata, {"cutoff": cutoff, "species": species, "energy": energy, "length": length}
        )
        self.species = [str(s) for s in facts["species"]]
        self._energy = self._unit("energy", ENERGIES, facts["energy"])
        self._length = self._unit("length", LENGTHS, facts["length"])
        if not (isinstance(facts["cutoff"], int | float) and 0 < facts["cutoff"] < np.inf):
            raise InputError(
                f"{self._place}: cutoff: expected a positive number, got {facts['cutoff']!r}. Give the model's cutoff."
            )
        if not (isinstance(skin, int | float) and 0 <= skin < np.inf):
            raise InputError(f"skin: expected a length of at least 0, got {skin!r}. Give a number, such as 0.3.")
        self._neighbors = Neighbors(facts["cutoff"] * self._length, skin)

    def kinds(self, symbols: Iterable[str]) -> np.ndarray:
        """Return the model's number of each chemical symbol, (n,). Raise :class:`InputError` for one that it does not
        know, and for none."""
        if isinstance(symbols, str):
            raise InputError(f"symbols: expected a list of chemical symbols, got {symbols!r}. Pass a list.")
        numbers, out = {s: i for i, s in enumerate(self.species)}, []
        for i, symbol in enumerate(symbols):
            if symbol not in numbers:
                raise InputError(
                    f"{self._place}: expected the species {', '.join(self.species)}, got {symbol} (atom {i}). Export it with them."
                )
            out.append(numbers[symbol])
        if not out:
            raise InputError(f"{self._place}: expected at least one atom, got none. Add atoms.")
        return np.array(out, np.int64)

    def __call__(
        self,
        positions: np.ndarray,
        kinds: np.ndarray,
        cell: np.ndarray | None = None,
        periodic: Sequence[bool] = (False,) * 3,
    ) -> Result:
        """Compute the energy, forces and virial of atoms.

        Args:
            positions: (n, 3), in Ångström.
            kinds: Those of :meth:`kinds`.
            cell: (3, 3), a vector in each row, in Ångström; zeros for directions without one.
            periodic: The periodic directions.

        Raises:
            InputError: A shape or a kind is wrong, positions or cell are not finite or far too large, or the cell has
                no vector in a periodic direction.
        """
        positions, kinds = np.asarray(positions, np.float64), np.asarray(kinds, np.int64)
        cell = np.zeros((3, 3)) if cell is None else np.asarray(cell, np.float64)
        if positions.shape != (*kinds.shape, 3):
            raise InputError(
                f"positions: expected the shape {(*kinds.shape, 3)}, got {positions.shape}. Pass a row for each atom."
            )
        if cell.shape != (3, 3):
            raise InputError(f"cell: expected the shape (3, 3), got {cell.shape}. Pass a vector in each row.")
        if kinds.size and not 0 <= kinds.min() <= kinds.max() < len(self.species):
            raise InputError(
                f"kinds: expected numbers from 0 to {len(self.species) - 1}, got {kinds.min()} to {kinds.max()}. Use those of kinds()."
            )
        src, dst, shift = self._neighbors(positions, cell, periodic)
        if self._length != 1:  # else without copies: shift has megabytes
            positions, shift = positions / self._length, shift / self._length
        given = dict(zip(INPUTS, (positions, kinds, src, dst, shift), strict=False))
        given |= {"strain": np.zeros((3, 3)), "own": np.ones(len(positions))}
        value, gradients = self._grad(*(given[name] for name in self._names))
        energy, aux = value if isinstance(value, tuple) else (value, {})
        energies = aux.get("energies") if isinstance(aux, Mapping) else None
        if not isinstance(gradients, Mapping) or gradients.get("positions") is None:
            raise PackageError(
                f"{self._place}: expected the gradients by positions and strain, got others. Export the entry with ab.forcefield."
            )
        # float32 has 7 digits, too few for the energies of many atoms in one number
        total = energy if energies is None else np.sum(energies, dtype=np.float64)
        virial = gradients.get("strain")
        return Result(
            float(total) * self._energy,
            None if energies is None else np.multiply(energies, self._energy, dtype=np.float64),
            np.multiply(gradients["positions"], -self._energy / self._length, dtype=np.float64),
            None if virial is None else np.multiply(virial, self._energy, dtype=np.float64),
        )

    def _facts(self, metadata: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
        if metadata.get("forcefield", 1) != 1:
            raise PackageError(
                f"{self._place}: expected a force field of convention 1, got {metadata['forcefield']!r}. Install a newer version."
            )
        facts = {}
        for name, given in overrides.items():
            stated = metadata.get(name)
            if given is None and stated is None:
                raise InputError(
                    f"{self._place}: expected {name!r} in the metadata, got {sorted(metadata)}. Pass {name}=."
                )
            same = list(given) == stated if name == "species" and given is not None else given == stated
            if given is not None and stated is not None and not same:
                raise InputError(
                    f"{self._place}: {name}: expected {stated!r} as in the metadata, got {given!r}. Leave {name}= out."
                )
            facts[name] = stated if given is None else given
        return facts

    def _unit(self, name: str, units: Mapping[str, float], unit: Any) -> float:
        if unit not in units:
            raise InputError(
                f"{self._place}: {name}: expected one of {', '.join(units)}, got {unit!r}. Export in one of these units."
            )
        return units[unit]
